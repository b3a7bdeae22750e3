"""The operators on a sequence whose tokens lie on several ranks: a function for each operator that has a state.

Their signatures and docstrings are made from those of `linattn_np`'s operators.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

from ..contract import Op
from ..ops import OPS
from ..public_function import Docstring, defined
from .rank_call import RankCall
from .sequence_pass import Forward, gradients_of

OPERATORS: dict[Callable[..., Any], Op] = {}  # the declaration of each function of this module

# Entries of the docstrings' section Parameters, in place of those that the operators of `linattn_np` have.
PARAMETERS = """
comm : an `Engine`
    Sends arrays from rank to rank, such as `connect()` returns.
segment_size : int, optional
    Cuts every rank's tokens into segments of this size. All ranks but the last must have multiples of it. The bits of
    results and gradients then depend on the size, not on the number of ranks. Without it a rank's tokens are one
    segment.
initial_state : [N, H, K, V], optional
    The state before the first token of each whole sequence, the same on every rank. The final state that is returned is
    the same on every rank, too.
cu_seqlens : host integers [N + 1], optional
    Where the sequences begin and end among the tokens of all ranks, the same on every rank. A sequence may have tokens
    on several ranks.
mask : bool [B, T], optional
    False for padding among this rank's tokens.
out : array like the result, optional
    Where the result of this rank's tokens is written.
"""
RAISES = """
Disagreement (a ContractError)
    The ranks make different calls.
RankLost
    A rank has ended.
"""
NOTES = """
T is the number of this rank's tokens. Ranks may differ in T, which may be 0. All else is the same on all ranks, as is
an array without an axis T, whose gradient is the sum over all ranks.

A rank has tokens a+1 ... b. They turn the state S_a before them into ``S_b = diag(exp(g_{a+1} + ... + g_b)) S_a + F``,
where F is their final state if they start from zero (Yang et al., "Gated Linear Attention Transformers with
Hardware-Efficient Training", 2024, section 4, which writes this for chunks). Gates of columns multiply S_a from the
right in the same way. Of a delta rule the factor of S_a is a matrix [K, K]. Every rank computes F and the factor, and
sends both to all ranks by one all-gather. Then each rank computes its own S_a, and from it its o. A head's message is
K * V floats for F, and for the factor K more, or 1 if the channels share a gate, V more for gates of columns, or K * K
of a delta rule; a normaliser adds K. Besides, ranks send only a digest of the call, and final states if these are asked
for.
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


def operator_on_ranks(op: Op) -> Callable[..., Any]:
    """Makes the function of a declared operator, with the arguments `comm` and `segment_size` before all keywords."""
    arrays = [x for x in op.signature.parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    keywords = list(op.signature.parameters.values())[len(arrays) :]
    comm = Parameter("comm", Parameter.KEYWORD_ONLY)
    signature = inspect.Signature([*arrays, comm, comm.replace(name="segment_size", default=None), *keywords])

    function = defined(op, signature, compute, globals())  # returns compute(op, arrays, **keywords), in this module
    function.__doc__ = documentation(op, list(signature.parameters))
    OPERATORS[function] = op
    return function


def compute(op: Op, inputs, **options):
    """The operator's results for this rank's tokens."""
    return Forward(RankCall(op, inputs, **options)).result()


def documentation(op: Op, names) -> str:
    """The docstring of `linattn_np`'s operator, changed for several ranks; `names` are the parameters."""
    doc = Docstring(OPS[op].__doc__)  # OPS: {declaration: public function}
    _, _, equation = doc.head.partition("\n\n")
    doc.head = f"`linattn_np.{op.name}` of a sequence whose tokens lie on several ranks, in their order.\n\n{equation}"
    doc.replace_entries(PARAMETERS, names)
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


globals().update({op.name: operator_on_ranks(op) for op in OPS if op.state})
__all__ = [*(function.__name__ for function in OPERATORS), "vjp"]


def vjp(op, *arrays, **arguments):
    """``(result, pullback)`` of the operator `op`, a function of this module; see `linattn_np.vjp`.

        dS_a = diag(exp(g_{a+1} + ... + g_b)) dS_b + dF        for the rank with tokens a+1 ... b, the last rank first;
                                                               for a delta rule the matrix transposed, times dS_b

    (Yang et al., 2024, section 4.4.) dS_a and dS_b are the gradients of the states before and after the rank's tokens,
    and dF is dS_a for dS_b = 0.

    All ranks call ``pullback(do)`` or ``pullback(do, dht)``: each with the gradient `do` of its own o, all with one
    gradient `dht` of the final state. It returns the gradients of this rank's arrays, then the gradient of
    `initial_state`, if there is one, the same on every rank. The gradient of an array without an axis T, as rwkv6's u,
    is the sum over all ranks; with ``summed=False`` it is that of this rank's tokens, which spares a message.

    Each rank computes dF by the operator itself, backwards in time, with q in the place of k and do in that of v; or by
    the backward pass, for an operator with a normaliser or with gates for channels and for columns, and for a delta
    rule. One all-gather of the same size as the operator's follows, then the backward pass.

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
    declaration, bound = OPERATORS[op], inspect.signature(op).bind(*arrays, **arguments)
    bound.apply_defaults()
    options = dict(bound.arguments)
    inputs = tuple(options.pop(name) for name in (*declaration.arrays, *declaration.optional_arrays))
    if options["out"] is not None:
        declaration.refuse("out", "cannot be given to vjp")
    forward = Forward(RankCall(declaration, inputs, gradient=True, **options))
    result = forward.result()

    def pullback(do, dht=None, *, summed=True):
        return gradients_of(forward, do, dht, summed)

    return result, pullback
