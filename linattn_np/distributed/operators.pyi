"""Written by docs/write_operators.py: the operators on ranks."""

from collections.abc import Callable
from typing import Any, Unpack

from ..contract import Op
from ..typing import A, Array, LinearAttentionOptions, MaskedOptions, RetentionOptions
from .engine import Engine

__all__ = ["gla", "rwkv6", "hgrn2", "simple_gla", "retention", "linear_attention", "vjp"]
OPERATORS: dict[Callable[..., Any], Op]

def gla(
    q: A,
    k: Array,
    v: Array,
    g: Array,
    gv: Array | None = None,
    *,
    comm: Engine,
    segment_size: int | None = None,
    output_final_state: bool = False,
    **options: Unpack[MaskedOptions],
) -> Any: ...
def rwkv6(
    r: A,
    k: Array,
    v: Array,
    w: Array,
    u: Array,
    *,
    comm: Engine,
    segment_size: int | None = None,
    output_final_state: bool = False,
    **options: Unpack[MaskedOptions],
) -> Any: ...
def hgrn2(
    q: A,
    g: Array,
    v: Array,
    *,
    comm: Engine,
    segment_size: int | None = None,
    output_final_state: bool = False,
    **options: Unpack[MaskedOptions],
) -> Any: ...
def simple_gla(
    q: A,
    k: Array,
    v: Array,
    g: Array,
    *,
    comm: Engine,
    segment_size: int | None = None,
    output_final_state: bool = False,
    **options: Unpack[MaskedOptions],
) -> Any: ...
def retention(
    q: A,
    k: Array,
    v: Array,
    *,
    comm: Engine,
    segment_size: int | None = None,
    output_final_state: bool = False,
    **options: Unpack[RetentionOptions],
) -> Any: ...
def linear_attention(
    q: A,
    k: Array,
    v: Array,
    *,
    comm: Engine,
    segment_size: int | None = None,
    output_final_state: bool = False,
    **options: Unpack[LinearAttentionOptions],
) -> Any: ...
def vjp(op: Callable[..., Any], *arrays: Array, **options: Any) -> tuple[Any, Callable[..., Any]]: ...
