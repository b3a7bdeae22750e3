"""The types in the signatures of the public functions.

No array library but NumPy is a dependency: other arrays are described by the protocol `Array`, and results are `Any`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import DTypeLike

Layout: TypeAlias = Literal["bhtd", "bthd"]
Mode: TypeAlias = Literal["auto", "recurrent", "chunk", "staged", "parallel"]  # staged: as `stages` compute it
Precision: TypeAlias = Literal["float32", "tf32"]
Backend: TypeAlias = Literal["auto", "numpy", "cupy", "numba"]
Kernels: TypeAlias = Literal["auto", "portable"]  # portable: the kernels of every card
Integers: TypeAlias = Sequence[int] | np.ndarray  # on the host
Result: TypeAlias = Any  # an array of the caller's library; its dtype may be another than that of the inputs
State: TypeAlias = Any  # likewise; a pair of them for the normalised `linear_attention`


class Array(Protocol):
    """An array that the operators read: NumPy's, CuPy's, or that of a library which speaks DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


A = TypeVar("A", bound=Array)  # of q, and so of the result; the stubs (.pyi) use it


class Pullback(Protocol):
    """What `vjp` returns beside the result: gradients in the order of the arrays, then that of `initial_state`."""

    def __call__(self, do: Array, dht: State | None = None) -> tuple[Any, ...]: ...


# -- keyword arguments. `contract.Op.signature` builds the signature of a public function: its arrays, its second result
# -- if it has one (`output_final_state` or `return_lse`), then the fields of one of these classes in their order, base
# -- classes first. `shared_documentation` says what the arguments mean.
# Defaults that are not None; all other arguments have None, but for the stages' `chunk_size`, 64 (`StageOp`).
DEFAULTS: dict[str, Any] = {
    "output_final_state": False,
    "return_lse": False,
    "reverse": False,
    "state_v_first": False,
    "normalize": False,
    "qk_l2norm": False,
    "exclusive": False,
    "causal": True,
    "dropout_p": 0.0,
    "layout": "bhtd",
    "mode": "auto",
    "backend": "auto",
}


class RecurrentOptions(TypedDict, total=False):
    """The keyword arguments of every recurrent operator, besides `output_final_state`."""

    scale: float | None
    initial_state: State | None
    state_dtype: DTypeLike | None
    cu_seqlens: Integers | None
    reverse: bool
    state_v_first: bool  # whether states are [V, K] instead of [K, V]
    layout: Layout
    mode: Mode
    precision: Precision | None
    backend: Backend
    out: Array | None


class Options(RecurrentOptions, total=False):
    """The keywords of an operator whose chunks the caller may choose."""

    chunk_size: int | None
    materialize: bool | None  # whether every chunk's state is kept in memory


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of `softmax_attention`, besides `return_lse`."""

    causal: bool
    scale: float | None
    window: tuple[int, int] | None
    softcap: float | None
    cu_seqlens: Integers | None
    cu_seqlens_k: Integers | None
    dropout_p: float
    block_table: None  # of FlashAttention's paged caches, which are refused
    layout: Layout
    mode: Literal["auto", "chunk"]
    chunk_size: int | None
    backend: Backend
    out: Array | None


class MaskedOptions(Options, total=False):
    """The keywords of an operator that accepts padding, and whose chunks the caller may choose."""

    mask: Array | None


class Rwkv7Options(RecurrentOptions, total=False):
    """The keyword arguments of `rwkv7`, which accepts padding, too."""

    mask: Array | None


class DeltaRuleOptions(Rwkv7Options, total=False):
    """The keyword arguments of the delta rules that may normalise queries and keys."""

    qk_l2norm: bool


class RetentionOptions(Options, total=False):
    gamma: float | Sequence[float] | np.ndarray | None


class LinearAttentionOptions(MaskedOptions, total=False):
    feature_map: Literal["elu", "relu", "exp"] | None
    normalize: bool  # whether outputs are divided by the sum of weights


class StepOptions(TypedDict, total=False):
    """The keyword arguments of a step, which computes one token, or with `pending` a few (speculative decoding)."""

    slots: Integers | None  # each sequence's row of the state
    pending: Array | None  # tokens that the state has not taken yet
    accepted: Array | None  # how many of these it takes now
    scale: float | None
    backend: Backend
    out: Array | None


class DeltaRuleStepOptions(StepOptions, total=False):
    qk_l2norm: bool


class StageOptions(TypedDict, total=False):
    """The keyword arguments of the stages of the chunked form."""

    chunk_size: int  # None is refused, as the stages' results depend on it
    cu_seqlens: Integers | None
    layout: Layout
    backend: Backend


class GatedQkOptions(StageOptions, total=False):
    exclusive: bool  # whether a query reads the state before its own token's gate, as RWKV-6's do


class InterChunkOptions(StageOptions, total=False):
    initial_state: Array | None
    state_dtype: DTypeLike | None


class CombineOptions(StageOptions, total=False):
    """The keyword arguments of the last stage, `combine`, which adds up a chunk's outputs."""

    scale: float | None
    out: Array | None
