"""The types in the signatures of the public functions.

CuPy, torch and Numba say nothing of their types, so that a type checker takes their arrays for anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import DTypeLike

Layout: TypeAlias = Literal["bhtd", "bthd"]
Mode: TypeAlias = Literal["auto", "recurrent", "chunk", "staged", "parallel"]
Precision: TypeAlias = Literal["float32", "tf32"]
Backend: TypeAlias = Literal["auto", "numpy", "cupy", "numba"]
Kernels: TypeAlias = Literal["auto", "portable"]
Integers: TypeAlias = Sequence[int] | np.ndarray  # on the host
Result: TypeAlias = Any  # an array of the caller's library; its dtype may be another than that of the inputs
State: TypeAlias = Any  # likewise; a pair of them for the normalised `linear_attention`


class Array(Protocol):
    """An array that the operators read: NumPy's, CuPy's, or that of a library which speaks DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


A = TypeVar("A", bound=Array)  # of q, and so of the result
F = TypeVar("F", bound=Callable[..., Any])  # an operator as another framework has it


class Pullback(Protocol):
    """What `vjp` returns beside the result: gradients in the order of the arrays, then that of `initial_state`."""

    def __call__(self, do: Array, dht: State | None = None) -> tuple[Any, ...]: ...


class Options(TypedDict, total=False):
    """What every recurrent operator takes by keyword, besides `output_final_state`."""

    scale: float | None
    initial_state: State | None
    state_dtype: DTypeLike | None
    cu_seqlens: Integers | None
    reverse: bool
    state_v_first: bool
    layout: Layout
    mode: Mode
    chunk_size: int | None
    materialize: bool | None
    precision: Precision | None
    backend: Backend
    out: Array | None


class AttentionOptions(TypedDict, total=False):
    """What `softmax_attention` takes by keyword, besides `return_lse`."""

    causal: bool
    scale: float | None
    window: tuple[int, int] | None
    softcap: float | None
    cu_seqlens: Integers | None
    cu_seqlens_k: Integers | None
    dropout_p: float
    block_table: None
    layout: Layout
    mode: Literal["auto", "chunk"]
    chunk_size: int | None
    backend: Backend
    out: Array | None


class MaskedOptions(Options, total=False):
    """Those of the operators that take padding."""

    mask: Array | None
