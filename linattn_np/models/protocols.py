"""What the modules around a model know of it: batches, text and training take every model with these faces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self, TypeVar


class State(Protocol):
    """What sequences carry from token to token: one row each, of a pool or of as many sequences as there are."""

    def copy(self) -> Self: ...

    def row(self, slot: int) -> Self:
        """One row, as the state of one sequence; views."""

    def put(self, slots: int | Sequence[int], state: Self) -> None:
        """Replaces one row, or each of several, by the state of one sequence."""


S = TypeVar("S", bound=State)  # a model's own


class Model(Protocol[S]):
    """A language model that reads and writes."""

    sizes: dict[str, int]  # "V" is the vocabulary's

    def checked(self, tokens) -> Any:
        """`tokens` [B, T] as host integers of the vocabulary, or ContractError."""

    def initial_state(self, batch: int = 1) -> S: ...

    def forward(
        self, tokens, state: S | None = None, *, cu_seqlens=None, slots=None, last: bool = False
    ) -> tuple[Any, S]:
        """``(logits, state)``, as `RWKV6.forward` has them; `state` is updated in place."""

    def on_device(self, state: S, rows: int | None = None) -> S:
        """`state` where the model computes, or ContractError where it is not one of this model's."""

    def turn(self) -> AbstractContextManager:
        """What several calls that touch a state are put into, where other threads and streams use the model."""

    def to_host(self, array) -> Any:
        """Logits as NumPy's."""


class Layout(Protocol):
    """A model's parameters in one vector, matrices first."""

    size: int
    sizes: dict[str, int]  # "V" is the vocabulary's
    matrices: int  # where the matrices end
    parts: list  # (start, stop) of each layer's matrices, one after the other; the whole model's are in the first's

    def initial(self, seed: int) -> Any:
        """A float32 vector to start from."""

    def named(self, vector) -> dict:
        """Views of `vector` under the names that checkpoints have."""

    def tree(self, vector, matrices=None) -> Any:
        """Views of `vector`, and of `matrices` instead where it is given, as the model's `loss` takes them."""


class Trainable(Protocol):
    """A kind of model that can be trained: a class, or an object of `fine_tuning`.

    It may have a `title`, what is trained in words: a training's file says it, and `Training.restore` wants the same.
    """

    @property
    def beside(self) -> bytes:
        """A digest of what the loss depends on and no training changes; `Training.restore` wants the same."""

    def trainable(self, layers: int, width: int, head_size: int) -> Layout: ...

    def loss(self, weights, tokens, products, drop) -> tuple[Any, Callable]:
        """``(mean cross entropy in nats, its pullback)`` of a `Layout.tree`, as `rwkv6.grad.loss` has them.

        On CUDA `products` is a `CudaProducts`, and `drop` a `dropout.Dropout` or None. The keywords `recompute` and
        `cut` are given only where a training is told so.
        """
