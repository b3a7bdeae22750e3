"""RetNet's retention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack, overload

import numpy as np

from ..declarations import RETENTION
from ..dispatch import call
from ..typing import A, Array, Options, State


class RetentionOptions(Options, total=False):
    gamma: float | Sequence[float] | np.ndarray | None


@overload
def retention(
    q: A, k: Array, v: Array, *, output_final_state: Literal[False] = False, **options: Unpack[RetentionOptions]
) -> A: ...


@overload
def retention(
    q: A, k: Array, v: Array, *, output_final_state: Literal[True], **options: Unpack[RetentionOptions]
) -> tuple[A, State]: ...


@overload
def retention(
    q: A, k: Array, v: Array, *, output_final_state: bool, **options: Unpack[RetentionOptions]
) -> A | tuple[A, State]: ...


def retention(
    q,
    k,
    v,
    *,
    gamma=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    state_dtype=None,
    cu_seqlens=None,
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
    """Retention: linear attention with a fixed decay a head.

        S_t = gamma_h S_{t-1} + k_t v_t^T,        o_t = scale * q_t^T S_t

    (Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models", 2023, eq. 6. The rotation
    of q and k, and the norm after the heads, belong to the layer.)

    Parameters
    ----------
    gamma : float or host array [H], optional
        Decays between 0 and 1 (not their logs); ``1 - 2 ** (-5 - h)`` for head h by default, eq. 8 there. Their logs
        are taken in float64, since float32 has no number between ``1 - 2 ** -24`` and 1.

    Everything else, the result and the errors are those of `gla`. There is no `mask`, since padding would decay the
    state as well: where there is padding, `simple_gla` with the gate ``log(gamma)`` takes it, by default
    ``log1p(-2.0 ** (-5 - h))``.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> q = k = v = np.ones((1, 1, 3, 1))
    >>> linattn_np.retention(q, k, v, gamma=0.5).ravel()
    array([1.  , 1.5 , 1.75])
    """
    return call(
        RETENTION,
        (q, k, v),
        gamma=gamma,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_dtype=state_dtype,
        cu_seqlens=cu_seqlens,
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
