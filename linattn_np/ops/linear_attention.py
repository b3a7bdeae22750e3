"""Linear attention with feature maps and the normaliser."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from ..declarations import LINEAR_ATTENTION
from ..dispatch import call
from ..typing import A, Array, MaskedOptions, State


class LinearAttentionOptions(MaskedOptions, total=False):
    feature_map: Literal["elu", "relu", "exp"] | None
    normalize: bool


@overload
def linear_attention(
    q: A, k: Array, v: Array, *, output_final_state: Literal[False] = False, **options: Unpack[LinearAttentionOptions]
) -> A: ...


@overload
def linear_attention(
    q: A, k: Array, v: Array, *, output_final_state: Literal[True], **options: Unpack[LinearAttentionOptions]
) -> tuple[A, State]: ...


@overload
def linear_attention(
    q: A, k: Array, v: Array, *, output_final_state: bool, **options: Unpack[LinearAttentionOptions]
) -> A | tuple[A, State]: ...


def linear_attention(
    q,
    k,
    v,
    *,
    feature_map=None,
    normalize=False,
    scale=None,
    initial_state=None,
    output_final_state=False,
    state_dtype=None,
    cu_seqlens=None,
    mask=None,
    reverse=False,
    state_v_first=False,
    layout="bhtd",
    mode="auto",
    chunk_size=None,
    materialize=None,
    precision=None,
    backend="auto",
    out=None,
):
    """Causal linear attention, with an optional feature map and normaliser.

        S_t = S_{t-1} + phi(k_t) v_t^T,     z_t = z_{t-1} + phi(k_t)
        o_t = scale * phi(q_t)^T S_t,       or with `normalize`  o_t = (phi(q_t)^T S_t) / (phi(q_t)^T z_t)

    (Katharopoulos et al., "Transformers are RNNs", 2020, eq. 10-12 and 18-20. The scale cancels in the normalised
    form. Where numerator and denominator are both 0, as for a query whose features are all 0, o_t is 0.)

    Parameters
    ----------
    feature_map : None, "elu", "relu" or "exp"
        phi, applied to q and k: the identity, ``elu(x) + 1``, ``max(x, 0)`` or ``exp(x)``.
    normalize : bool
        Divide by phi(q_t)^T z_t. The state is then the pair ``(S [N, H, K, V], z [N, H, K])``, in `initial_state` and
        in the result, so that a sequence can be resumed. z belongs to the heads of k, also where v has more.

    With ``"exp"`` and `normalize`, host arrays may hold any finite q and k: exp is taken less the channel's largest key
    so far. The state is of exp(k) itself, and overflows float32 for keys from 88 on. On a GPU o does too.

    Everything else, the result and the errors are those of `gla`.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 50, 8))
    >>> o = linattn_np.linear_attention(q, k, v, feature_map="elu", normalize=True)
    >>> bool(np.allclose(o[:, :, 0], v[:, :, 0]))         # the first token can only attend to itself
    True
    """
    return call(
        LINEAR_ATTENTION,
        (q, k, v),
        feature_map=feature_map,
        normalize=normalize,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_dtype=state_dtype,
        cu_seqlens=cu_seqlens,
        mask=mask,
        reverse=reverse,
        state_v_first=state_v_first,
        layout=layout,
        mode=mode,
        chunk_size=chunk_size,
        materialize=materialize,
        precision=precision,
        backend=backend,
        out=out,
    )
