"""Written by docs/write_operators.py: the operators."""

from typing import Any, Literal, Unpack, overload

from ..typing import (
    A,
    Array,
    AttentionOptions,
    DeltaRuleOptions,
    LinearAttentionOptions,
    MaskedOptions,
    RetentionOptions,
    Rwkv7Options,
)

__all__ = [
    "gla",
    "rwkv6",
    "hgrn2",
    "simple_gla",
    "retention",
    "linear_attention",
    "delta_rule",
    "gated_delta_rule",
    "kda",
    "rwkv7",
    "softmax_attention",
]

@overload
def gla(
    q: A,
    k: Array,
    v: Array,
    g: Array,
    gv: Array | None = None,
    *,
    output_final_state: Literal[False] = False,
    **options: Unpack[MaskedOptions],
) -> A: ...
@overload
def gla(
    q: A,
    k: Array,
    v: Array,
    g: Array,
    gv: Array | None = None,
    *,
    output_final_state: Literal[True],
    **options: Unpack[MaskedOptions],
) -> tuple[A, Any]: ...
@overload
def gla(
    q: A,
    k: Array,
    v: Array,
    g: Array,
    gv: Array | None = None,
    *,
    output_final_state: bool,
    **options: Unpack[MaskedOptions],
) -> A | tuple[A, Any]: ...
@overload
def rwkv6(
    r: A,
    k: Array,
    v: Array,
    w: Array,
    u: Array,
    *,
    output_final_state: Literal[False] = False,
    **options: Unpack[MaskedOptions],
) -> A: ...
@overload
def rwkv6(
    r: A, k: Array, v: Array, w: Array, u: Array, *, output_final_state: Literal[True], **options: Unpack[MaskedOptions]
) -> tuple[A, Any]: ...
@overload
def rwkv6(
    r: A, k: Array, v: Array, w: Array, u: Array, *, output_final_state: bool, **options: Unpack[MaskedOptions]
) -> A | tuple[A, Any]: ...
@overload
def hgrn2(
    q: A, g: Array, v: Array, *, output_final_state: Literal[False] = False, **options: Unpack[MaskedOptions]
) -> A: ...
@overload
def hgrn2(
    q: A, g: Array, v: Array, *, output_final_state: Literal[True], **options: Unpack[MaskedOptions]
) -> tuple[A, Any]: ...
@overload
def hgrn2(
    q: A, g: Array, v: Array, *, output_final_state: bool, **options: Unpack[MaskedOptions]
) -> A | tuple[A, Any]: ...
@overload
def simple_gla(
    q: A, k: Array, v: Array, g: Array, *, output_final_state: Literal[False] = False, **options: Unpack[MaskedOptions]
) -> A: ...
@overload
def simple_gla(
    q: A, k: Array, v: Array, g: Array, *, output_final_state: Literal[True], **options: Unpack[MaskedOptions]
) -> tuple[A, Any]: ...
@overload
def simple_gla(
    q: A, k: Array, v: Array, g: Array, *, output_final_state: bool, **options: Unpack[MaskedOptions]
) -> A | tuple[A, Any]: ...
@overload
def retention(
    q: A, k: Array, v: Array, *, output_final_state: Literal[False] = False, **options: Unpack[RetentionOptions]
) -> A: ...
@overload
def retention(
    q: A, k: Array, v: Array, *, output_final_state: Literal[True], **options: Unpack[RetentionOptions]
) -> tuple[A, Any]: ...
@overload
def retention(
    q: A, k: Array, v: Array, *, output_final_state: bool, **options: Unpack[RetentionOptions]
) -> A | tuple[A, Any]: ...
@overload
def linear_attention(
    q: A, k: Array, v: Array, *, output_final_state: Literal[False] = False, **options: Unpack[LinearAttentionOptions]
) -> A: ...
@overload
def linear_attention(
    q: A, k: Array, v: Array, *, output_final_state: Literal[True], **options: Unpack[LinearAttentionOptions]
) -> tuple[A, Any]: ...
@overload
def linear_attention(
    q: A, k: Array, v: Array, *, output_final_state: bool, **options: Unpack[LinearAttentionOptions]
) -> A | tuple[A, Any]: ...
@overload
def delta_rule(
    q: A,
    k: Array,
    v: Array,
    beta: Array,
    *,
    output_final_state: Literal[False] = False,
    **options: Unpack[DeltaRuleOptions],
) -> A: ...
@overload
def delta_rule(
    q: A, k: Array, v: Array, beta: Array, *, output_final_state: Literal[True], **options: Unpack[DeltaRuleOptions]
) -> tuple[A, Any]: ...
@overload
def delta_rule(
    q: A, k: Array, v: Array, beta: Array, *, output_final_state: bool, **options: Unpack[DeltaRuleOptions]
) -> A | tuple[A, Any]: ...
@overload
def gated_delta_rule(
    q: A,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    output_final_state: Literal[False] = False,
    **options: Unpack[DeltaRuleOptions],
) -> A: ...
@overload
def gated_delta_rule(
    q: A,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    output_final_state: Literal[True],
    **options: Unpack[DeltaRuleOptions],
) -> tuple[A, Any]: ...
@overload
def gated_delta_rule(
    q: A, k: Array, v: Array, g: Array, beta: Array, *, output_final_state: bool, **options: Unpack[DeltaRuleOptions]
) -> A | tuple[A, Any]: ...
@overload
def kda(
    q: A,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    output_final_state: Literal[False] = False,
    **options: Unpack[DeltaRuleOptions],
) -> A: ...
@overload
def kda(
    q: A,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    output_final_state: Literal[True],
    **options: Unpack[DeltaRuleOptions],
) -> tuple[A, Any]: ...
@overload
def kda(
    q: A, k: Array, v: Array, g: Array, beta: Array, *, output_final_state: bool, **options: Unpack[DeltaRuleOptions]
) -> A | tuple[A, Any]: ...
@overload
def rwkv7(
    r: A,
    w: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    *,
    output_final_state: Literal[False] = False,
    **options: Unpack[Rwkv7Options],
) -> A: ...
@overload
def rwkv7(
    r: A,
    w: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    *,
    output_final_state: Literal[True],
    **options: Unpack[Rwkv7Options],
) -> tuple[A, Any]: ...
@overload
def rwkv7(
    r: A, w: Array, k: Array, v: Array, a: Array, b: Array, *, output_final_state: bool, **options: Unpack[Rwkv7Options]
) -> A | tuple[A, Any]: ...
@overload
def softmax_attention(
    q: A,
    k: Array,
    v: Array,
    sinks: Array | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> A: ...
@overload
def softmax_attention(
    q: A,
    k: Array,
    v: Array,
    sinks: Array | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[A, Any]: ...
@overload
def softmax_attention(
    q: A, k: Array, v: Array, sinks: Array | None = None, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> A | tuple[A, Any]: ...
