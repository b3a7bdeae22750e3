"""The operators on a sequence that is cut over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from .. import ops
from .rank_call import RankCall
from .sequence_pass import Forward, gradients

OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {}  # the functions of this module, with linattn_np's


def on_ranks(operator):
    """Decorates a documented name: `operator` with the arguments `comm` and `segment_size`."""
    parameters = list(inspect.signature(operator).parameters.values())
    arrays = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    comm = inspect.Parameter("comm", inspect.Parameter.KEYWORD_ONLY)
    segment_size = comm.replace(name="segment_size", default=None)
    signature = inspect.Signature([*arrays, comm, segment_size, *parameters[len(arrays) :]])

    def decorate(documented) -> Callable[..., Any]:
        @wraps(documented)
        def function(*arrays, **arguments):
            return Forward(call_of(function, arrays, arguments)).result()

        function.__signature__ = signature  # type: ignore[attr-defined]
        OPERATORS[function] = operator
        return function

    return decorate


def call_of(function, arrays, arguments, gradient=False) -> RankCall:
    bound = inspect.signature(function).bind(*arrays, **arguments)  # an unknown keyword is Python's own TypeError
    bound.apply_defaults()
    given = dict(bound.arguments)
    return RankCall(OPERATORS[function], given.pop("comm"), given.pop("segment_size"), given, gradient)


@on_ranks(ops.gla)
def gla():
    """`linattn_np.gla` of a sequence whose tokens lie on several ranks, each with a part, in the order of the ranks.

        S_t = diag(exp g_t) S_{t-1} + k_t v_t^T,        o_t = scale * q_t^T S_t

    A part of tokens a+1 ... b turns the state before it into ``S_b = diag(exp(g_{a+1} + ... + g_b)) S_a + F``, with F
    its final state from zero (Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training",
    2024, section 4, whose chunks are these parts). Every rank computes F and the sum of its gates, an all-gather
    brings them to all, K * V + K floats a head, and each rank computes its o from the S_a that they make. Nothing else
    travels but a digest of the call, and final states where they are asked for.

    Parameters
    ----------
    q, k : [B, H, T, K], v : [B, H, T, V], g : [B, H, T, K], gv : [B, H, T, V]; T is this rank's
        As in `linattn_np.gla`. The ranks may have different T, 0 too; all else is the same on all ranks.
    comm : an `Engine`
        Such as `connect()` gives.
    segment_size : int, optional
        Cuts every rank's tokens after so many. The bits of results and gradients then depend on it, not on the number
        of ranks, which must all have multiples of it but the last. Otherwise a rank's part is one segment.
    initial_state, final state : [N, H, K, V]
        Those of the whole sequences, the same on every rank.
    cu_seqlens : host integers [N + 1]
        Of the tokens of all ranks together, the same on every rank: sequences may cross from rank to rank.
    mask : bool [B, T], out : like the result
        Of this rank's tokens.

    Everything else, o and the errors are those of `linattn_np.gla`, and `Disagreement` (a ContractError) where the
    ranks' calls differ, `RankLost` where a rank has ended.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> from linattn_np import distributed
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 100, 16))
    >>> g = -np.exp(rng.standard_normal((1, 2, 100, 16)))
    >>> def on_a_rank(comm):
    ...     part = slice(50 * comm.rank, 50 * (comm.rank + 1))
    ...     return distributed.gla(*(x[:, :, part] for x in (q, k, v, g)), comm=comm)
    >>> o = np.concatenate(distributed.run_threads(on_a_rank, 2), axis=2)
    >>> bool(np.allclose(o, linattn_np.gla(q, k, v, g)))
    True
    """


@on_ranks(ops.rwkv6)
def rwkv6():
    """`linattn_np.rwkv6` of a sequence whose tokens lie on several ranks.

        o_t = scale * r_t^T (S_{t-1} + diag(u) k_t v_t^T),      S_t = diag(exp w_t) S_{t-1} + k_t v_t^T

    (Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", 2024, eq. 18-19.) What
    travels, `comm` and `segment_size` are those of `gla` here, and u [H, K] is the same on every rank, as is its
    gradient, the sum over all ranks.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> from linattn_np import distributed
    >>> rng = np.random.default_rng(0)
    >>> r, k, v, w = rng.standard_normal((4, 1, 2, 50, 8))
    >>> w, u = -np.exp(w), rng.standard_normal((2, 8))
    >>> def on_a_rank(comm):
    ...     return distributed.rwkv6(*(np.split(x, 2, axis=2)[comm.rank] for x in (r, k, v, w)), u, comm=comm)
    >>> o = np.concatenate(distributed.run_threads(on_a_rank, 2), axis=2)
    >>> bool(np.allclose(o, linattn_np.rwkv6(r, k, v, w, u)))
    True
    """


@on_ranks(ops.hgrn2)
def hgrn2():
    """`linattn_np.hgrn2` of a sequence whose tokens lie on several ranks.

        S_t = diag(exp g_t) S_{t-1} + (1 - exp g_t) v_t^T,        o_t = scale * q_t^T S_t

    (Qin et al., "HGRN2: Gated Linear RNNs with State Expansion", 2024.) All else is as in `gla` here.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> from linattn_np import distributed
    >>> rng = np.random.default_rng(0)
    >>> q, g, v = rng.standard_normal((3, 1, 2, 50, 8))
    >>> arrays = q, -np.exp(g), v
    >>> def on_a_rank(comm):
    ...     return distributed.hgrn2(*(np.split(x, 2, axis=2)[comm.rank] for x in arrays), comm=comm)
    >>> o = np.concatenate(distributed.run_threads(on_a_rank, 2), axis=2)
    >>> bool(np.allclose(o, linattn_np.hgrn2(*arrays)))
    True
    """


@on_ranks(ops.simple_gla)
def simple_gla():
    """`linattn_np.simple_gla` of a sequence whose tokens lie on several ranks.

        S_t = exp(g_t) S_{t-1} + k_t v_t^T,        o_t = scale * q_t^T S_t

    (Dao and Gu, "Transformers are SSMs", 2024, eq. 6 with a_t = exp g_t; their section 8.2 cuts a sequence in the
    same way.) A head's message is K * V + 1 floats; all else is as in `gla` here.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> from linattn_np import distributed
    >>> rng = np.random.default_rng(0)
    >>> arrays = *rng.standard_normal((3, 1, 2, 50, 8)), -rng.random((1, 2, 50))
    >>> def on_a_rank(comm):
    ...     return distributed.simple_gla(*(np.split(x, 2, axis=2)[comm.rank] for x in arrays), comm=comm)
    >>> o = np.concatenate(distributed.run_threads(on_a_rank, 2), axis=2)
    >>> bool(np.allclose(o, linattn_np.simple_gla(*arrays)))
    True
    """


@on_ranks(ops.retention)
def retention():
    """`linattn_np.retention` of a sequence whose tokens lie on several ranks.

        S_t = gamma_h S_{t-1} + k_t v_t^T,        o_t = scale * q_t^T S_t

    (Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models", 2023, eq. 6.) A head's
    message is K * V floats, since all ranks know the decays; all else is as in `gla` here.

    Example
    -------
    >>> import numpy as np
    >>> from linattn_np import distributed
    >>> one = np.ones((1, 1, 2, 1))
    >>> def on_a_rank(comm):
    ...     return distributed.retention(one, one, one, gamma=0.5, comm=comm)
    >>> np.concatenate(distributed.run_threads(on_a_rank, 2), axis=2).ravel()
    array([1.   , 1.5  , 1.75 , 1.875])
    """


@on_ranks(ops.linear_attention)
def linear_attention():
    """`linattn_np.linear_attention` of a sequence whose tokens lie on several ranks.

        S_t = S_{t-1} + phi(k_t) v_t^T,     z_t = z_{t-1} + phi(k_t)
        o_t = scale * phi(q_t)^T S_t,       or with `normalize`  o_t = (phi(q_t)^T S_t) / (phi(q_t)^T z_t)

    (Katharopoulos et al., "Transformers are RNNs", 2020, eq. 10-12 and 18-20.) A head's message is K * V floats, and K
    more with `normalize`; all else is as in `gla` here.

    Example
    -------
    >>> import numpy as np
    >>> from linattn_np import distributed
    >>> one = np.ones((1, 1, 2, 1))
    >>> def on_a_rank(comm):
    ...     return distributed.linear_attention(one, one, one, comm=comm)
    >>> np.concatenate(distributed.run_threads(on_a_rank, 2), axis=2).ravel()
    array([1., 2., 3., 4.])
    """


def undocumented(operator):
    """An operator on ranks that has no text of its own above."""

    def function(): ...

    function.__name__ = function.__qualname__ = operator.__name__
    function.__doc__ = f"""`linattn_np.{operator.__name__}` of a sequence whose tokens lie on several ranks.

    Its equation is in `linattn_np.{operator.__name__}`; all else is as in `gla` here.
    """
    return on_ranks(operator)(function)


globals().update({op.name: undocumented(of) for op, of in ops.OPS.items() if op.state and op.name not in globals()})


def vjp(op, *arrays, **arguments):
    """``(result, pullback)`` of an operator of this module, as `linattn_np.vjp` has them.

        dS_a = diag(exp(g_{a+1} + ... + g_b)) dS_b + dF        for the part of tokens a+1 ... b, the last part first

    (Yang et al., 2024, section 4.4.) ``pullback(do)`` or ``pullback(do, dht)`` is called on all ranks, each with the
    gradient of its own o, and with that of the whole final state, the same on every rank. It returns the gradients of
    this rank's arrays, then that of the whole `initial_state`, the same on every rank, as is that of rwkv6's u; with
    ``summed=False`` u's is that of this rank's tokens, which spares a message.

    dF is one forward pass backwards in time (for the normaliser and two gates one backward pass). An all-gather of
    K * V + K floats a head follows, then the backward pass itself.

    Example
    -------
    >>> import numpy as np, linattn_np
    >>> from linattn_np import distributed
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 20, 8))
    >>> g = -np.exp(rng.standard_normal((1, 2, 20, 8)))
    >>> def on_a_rank(comm):
    ...     parts = (np.split(x, 2, axis=2)[comm.rank] for x in (q, k, v, g))
    ...     o, pullback = distributed.vjp(distributed.gla, *parts, comm=comm)
    ...     return pullback(np.ones_like(o))
    >>> dq, dk, dv, dg = (np.concatenate(parts, axis=2) for parts in zip(*distributed.run_threads(on_a_rank, 2)))
    >>> o, pullback = linattn_np.vjp(linattn_np.gla, q, k, v, g)
    >>> bool(np.allclose(dg, pullback(np.ones_like(o))[3]))
    True
    """
    if op not in OPERATORS:
        raise TypeError(
            f"vjp: op is {op!r}, expected one of linattn_np.distributed's operators: "
            + ", ".join(function.__name__ for function in OPERATORS)
        )
    if arguments.get("out") is not None:
        ops.declaration(OPERATORS[op], "vjp").refuse("out", "cannot be given to vjp")
    forward = Forward(call_of(op, arrays, arguments, gradient=True))
    result = forward.result()

    def pullback(do, dht=None, *, summed=True):
        return gradients(forward, do, dht, summed)

    return result, pullback
