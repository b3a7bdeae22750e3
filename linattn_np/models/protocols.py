"""The methods and attributes that batches, texts and trainings need of a model: protocols of Python's typing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self, TypeVar


class State(Protocol):
    """The recurrent state of several sequences, a row each."""

    def copy(self) -> Self:
        """A state with the same numbers in memory of its own."""

    def row(self, slot: int) -> Self:
        """A view of one row, as the state of one sequence."""

    def put(self, slots: int | Sequence[int], state: Self) -> None:
        """Writes the state of one sequence to one row, or to each of several `slots`."""


S = TypeVar("S", bound=State)  # a model's own


class Model(Protocol[S]):
    """A language model."""

    sizes: dict[str, int]  # with the vocabulary's size as "V"

    def checked(self, tokens) -> Any:
        """`tokens` as host integers [B, T]; ContractError if they are not, or are outside the vocabulary."""

    def initial_state(self, batch: int = 1) -> S:
        """The state before the first token of `batch` sequences."""

    def forward(
        self, tokens, state: S | None = None, *, cu_seqlens=None, slots=None, last: bool = False
    ) -> tuple[Any, S]:
        """``(logits, state)`` as `RWKV6.forward` returns them; `state` is updated in place."""

    def on_device(self, state: S, rows: int | None = None) -> S:
        """`state` on the model's device; ContractError if its sizes, or its number of `rows`, are wrong."""

    def turn(self) -> AbstractContextManager:
        """A context for work on arrays of the model's device, which other threads or streams may use, too."""

    def to_host(self, array) -> Any:
        """An array of logits as a NumPy array."""


class Layout(Protocol):
    """A model's parameters in one vector, matrices first."""

    size: int
    sizes: dict[str, int]  # with the vocabulary's size as "V"
    matrices: int  # the number of elements of all matrices
    parts: list  # (start, stop) of each layer's matrices; the first part includes the matrices outside the layers

    def initial(self, seed: int) -> Any:
        """The float32 vector of the initial parameters."""

    def named(self, vector) -> dict:
        """Views of `vector` by the names that checkpoints have."""

    def tree(self, vector, matrices=None) -> Any:
        """Views of `vector`, as the model's `loss` takes them. Matrices are views of `matrices` if it is given: the
        vector's matrices in another dtype."""


class Trainable(Protocol):
    """A model that can be trained: its class, or an object of a class of `fine_tuning`.

    It may have a `title`, which says in words what is trained. A training's file has it, and `Training.restore` refuses
    a file with another one.
    """

    @property
    def beside(self) -> bytes:
        """A digest of the weights that are not trained; `Training.restore` refuses a checkpoint with another one."""

    def trainable(self, layers: int, width: int, head_size: int) -> Layout:
        """The layout of the parameters that are trained, of a model of these sizes."""

    def loss(self, weights, tokens, products, dropout) -> tuple[Any, Callable]:
        """``(mean cross entropy in nats, its pullback)`` for the weights of a `Layout.tree`, as `rwkv.grad.loss`
        returns them.

        On CUDA, `products` is a `CudaProducts`, and `dropout` a `training_steps.Dropout` or None. The keywords
        `recompute` and `cut` are given only by trainings that need them.
        """
