"""Gated linear attention."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from ..declarations import GLA, GLA_VALUE_GATE
from ..dispatch import call
from ..typing import A, Array, MaskedOptions, State


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
) -> tuple[A, State]: ...


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
) -> A | tuple[A, State]: ...


def gla(
    q,
    k,
    v,
    g,
    gv=None,
    *,
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
    """Gated linear attention with a decay for every key channel.

        S_t = diag(exp g_t) S_{t-1} + k_t v_t^T,        o_t = scale * q_t^T S_t

    (Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", 2024, eq. 3 with
    alpha_t = exp g_t; the chunked form is section 4 there.) With `gv` every value channel decays too, by the outer
    product of two gates (section 4.1 there, G_t = alpha_t^T beta_t with beta_t = exp gv_t):

        S_t = (exp g_t exp gv_t^T) * S_{t-1} + k_t v_t^T,       * element by element

    Parameters
    ----------
    q, k : [B, H, T, K], v : [B, H, T, V]
        NumPy or CuPy arrays, or anything with ``__dlpack__``; float64, float32, float16 or bfloat16, all the same. No
        subclasses such as masked arrays, and nothing whose gradient would be cut: `linattn_np.interop` differentiates.
        Any strides: slices of a fused buffer are read in place. v may have more heads than q, k and g, a multiple HV
        of H: o is then [B, HV, T, V], states [N, HV, K, V], and value head n goes with head ``n // (HV // H)``. That
        costs no copy of v and o where the heads lie side by side, as with ``layout="bthd"``; states are copied.
    g : [B, H, T, K]
        The log of the decay, natural base, usually <= 0: ``0`` keeps, ``-inf`` forgets. The dtype of q, or float32
        beside half-precision inputs. Values above 0 are computed as given: the state overflows float32 once a
        channel's gates since the last strong decay sum to more than about 88, and on CuPy chunks with a gate above 1
        take up to a hundred times as long (docs, "Gates").
    gv : [B, H, T, V], optional
        The same for the value channels, with the heads of v: what g is to the keys. With it
        `materialize` is refused, and `mode` is "auto", "recurrent" or "chunk".
    scale : float, optional
        ``K ** -0.5`` by default; finite in the dtype that is computed in.
    initial_state : [N, H, K, V], optional
        S_0 of each of the N sequences: N = B, or ``len(cu_seqlens) - 1``.
    output_final_state : bool
        Return ``(o, final_state)``; the state is float32 (float64 beside float64 inputs) unless `state_dtype` says
        otherwise.
    cu_seqlens : host integers [N + 1], optional
        Sequences packed into one row (B = 1): sequence n is tokens ``cu_seqlens[n]:cu_seqlens[n + 1]``. Empty
        sequences are legal and hand their initial state through. The first such call sends them to the device: make
        it, and wait for it, before one is captured into a CUDA graph.
    mask : bool [B, T], optional
        True for a token, False for padding, which is as if it were not there: it writes nothing, its gate is 0 (no
        decay), and o and all gradients are 0 there, whatever the arrays hold. It costs a copy of every array.
        Not beside `cu_seqlens`, and not for capture into a CUDA graph, which such copies do not outlive.
    reverse : bool
        Every sequence runs from its last token to its first: S_t = diag(exp g_t) S_{t+1} + k_t v_t^T, and the final
        state is that at its first token. No copy.
    state_v_first : bool
        `initial_state`, the final state and their gradients are [N, H, V, K].
    layout : "bhtd" or "bthd"
        "bthd" takes and returns ``[B, T, H, ...]``. No layout costs a copy.
    mode : "auto", "recurrent", "chunk", "staged" or "parallel"
        Token by token; fused chunks; the five stages of `linattn_np.stages` one by one; the quadratic form. All
        compute the same function; "auto" takes the fastest that the backend has.
    chunk_size : int, optional
        Tokens in a chunk, a multiple of 16; for the chunked modes.
    materialize : bool, optional
        True keeps every chunk's state and computes chunks side by side; False carries one state through; None
        decides from the shape.
    precision : "float32" or "tf32", optional
        Of products of float32 arrays on a GPU's tensor cores; what `linattn_np.precision` says by default, and
        "float32" where it says nothing. "tf32" is faster, with a relative error of 4e-4 for 1e-6. All else is the same.
    backend : "auto", "numpy", "cupy" or "numba"
        "auto" follows the arrays: host arrays run on NumPy, device arrays on CuPy's kernels.
    out : array like the result, optional
        Where to write o: memory that no other argument shares, and in which no two elements are one.

    Returns
    -------
    o : [B, H, T, V], the dtype and memory order of q; or ``(o, final_state)``.

    Raises
    ------
    ContractError (a ValueError)
        Shapes, modes or cu_seqlens that do not fit; ContractTypeError (also a TypeError) for dtypes, devices and
        things that are no arrays; NotSupported where no backend can, with every reason. Nothing has run by then.
    LinattnWarning
        Arrays that look like [B, T, H, ...] without `layout`, or like decays where their logs are expected.

    Notes
    -----
    NaN and inf go where the recurrence takes them, forwards in time: one in k, v, g or a state stays in the state, one
    in q stays at its token; gradients take those of `do` and `dht` backwards. That holds in every mode on NumPy and
    Numba, and in "recurrent" on CuPy. CuPy's kernels on tensor cores multiply whole blocks, in which the weight of a
    later token is 0, and 0 times NaN is NaN. There a NaN or inf in v also reaches the tokens before it in its block:
    of 16 tokens; of 32 on Hopper with half-precision arrays (64 where a head has one gate, or none); of a chunk in
    mode "staged". Of gradients, dq, dk and dv may have one in k, q or `do` at the other tokens of its block of up to
    64, and dg, which is summed up from the end, one in k, v or g at every token of the sequence.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 100, 16))
    >>> g = -np.exp(rng.standard_normal((1, 2, 100, 16)))
    >>> o, state = linattn_np.gla(q, k, v, g, output_final_state=True)
    >>> first, half = linattn_np.gla(q[:, :, :60], k[:, :, :60], v[:, :, :60], g[:, :, :60], output_final_state=True)
    >>> rest = linattn_np.gla(q[:, :, 60:], k[:, :, 60:], v[:, :, 60:], g[:, :, 60:], initial_state=half)
    >>> bool(np.allclose(o, np.concatenate([first, rest], axis=2)))
    True
    """
    op, arrays = (GLA, (q, k, v, g)) if gv is None else (GLA_VALUE_GATE, (q, k, v, g, gv))
    return call(
        op,
        arrays,
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
