"""The operators on a sequence that is cut over ranks: a function for each that has a state."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

from ..contract import Op
from ..ops import OPS
from ..public_function import Docstring, defined
from .rank_call import RankCall
from .sequence_pass import Forward, gradients

OPERATORS: dict[Callable[..., Any], Op] = {}  # the functions of this module

PARAMETERS = """
comm : an `Engine`
    Such as `connect()` gives.
segment_size : int, optional
    Cuts every rank's tokens after so many. The bits of results and gradients then depend on it, not on the number of
    ranks, which must all have multiples of it but the last. Otherwise a rank's part is one segment.
initial_state : [N, H, K, V], optional
    That of the whole sequences, the same on every rank; so is the final state.
cu_seqlens : host integers [N + 1], optional
    Of the tokens of all ranks together, the same on every rank: sequences may cross from rank to rank.
mask : bool [B, T], optional
    Of this rank's tokens, as in the operator on one rank.
out : array like the result, optional
    Of this rank's tokens.
"""
RAISES = """
Disagreement (a ContractError)
    The ranks' calls differ.
RankLost
    A rank has ended.
"""
NOTES = """
T is the number of this rank's tokens. The ranks may have different T, 0 too; all else is the same on all ranks, also an
array without tokens, whose gradient is the sum over all ranks.

A part of tokens a+1 ... b turns the state before it into ``S_b = diag(exp(g_{a+1} + ... + g_b)) S_a + F``, with F its
final state from zero (Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", 2024,
section 4, whose chunks are these parts). Every rank computes F and the sum of its gates. An all-gather brings them to
all ranks: K * V + K floats a head, of one gate a head K * V + 1, without gates K * V, and K more with a normaliser.
Each rank computes its o from the S_a that they make. Nothing else travels but a digest of the call, and final states
where they are asked for.
"""
EXAMPLE = """
>>> import numpy as np, linattn_np
>>> from linattn_np import distributed
>>> rng = np.random.default_rng(0)
>>> {arrays} = (-rng.random(shape) for shape in {shapes})
>>> def on_a_rank(comm):
...     tokens = slice(10 * comm.rank, 10 * (comm.rank + 1))
...     return distributed.{name}({parts}, comm=comm)
>>> o = np.concatenate(distributed.run_threads(on_a_rank, 2), axis=2)
>>> bool(np.allclose(o, linattn_np.{name}({arrays})))
True
"""


def on_ranks(op: Op) -> Callable[..., Any]:
    """The operator with the arguments `comm` and `segment_size`."""
    arrays = [x for x in op.signature.parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    keywords = list(op.signature.parameters.values())[len(arrays) :]
    comm = Parameter("comm", Parameter.KEYWORD_ONLY)
    signature = inspect.Signature([*arrays, comm, comm.replace(name="segment_size", default=None), *keywords])

    function = defined(op, signature, compute, globals())
    function.__doc__ = documentation(op, list(signature.parameters))
    OPERATORS[function] = op
    return function


def compute(op: Op, inputs, **given):
    """The results of this rank's tokens."""
    return Forward(RankCall(op, inputs, **given)).result()


def documentation(op: Op, names) -> str:
    """The operator's docstring with what differs on ranks."""
    doc = Docstring(OPS[op].__doc__)
    _, _, equation = doc.head.partition("\n\n")
    doc.head = f"`linattn_np.{op.name}` of a sequence whose tokens lie on several ranks, in their order.\n\n{equation}"
    doc.describe(PARAMETERS, names)
    doc.add("Raises", RAISES)
    doc.add("Notes", NOTES)
    sizes = {"B": 1, "H": 2, "T": 20, "K": 8, "V": 8}
    doc.sections["Example"] = EXAMPLE.strip().format(
        name=op.name,
        arrays=", ".join(op.arrays),
        shapes=[tuple(sizes[axis] for axis in axes.split()) for axes in op.arrays.values()],
        parts=", ".join(f"{name}[:, :, tokens]" if "T" in axes.split() else name for name, axes in op.arrays.items()),
    )
    return doc.text()


globals().update({op.name: on_ranks(op) for op in OPS if op.state})
__all__ = [*(function.__name__ for function in OPERATORS), "vjp"]


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
    declared, bound = OPERATORS[op], inspect.signature(op).bind(*arrays, **arguments)
    bound.apply_defaults()
    given = dict(bound.arguments)
    inputs = tuple(given.pop(name) for name in (*declared.arrays, *declared.optional_arrays))
    if given["out"] is not None:
        declared.refuse("out", "cannot be given to vjp")
    forward = Forward(RankCall(declared, inputs, gradient=True, **given))
    result = forward.result()

    def pullback(do, dht=None, *, summed=True):
        return gradients(forward, do, dht, summed)

    return result, pullback
