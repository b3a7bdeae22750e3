"""The cached results of checking a call, shared by all calls that differ only in the addresses of their arrays."""

import numpy as np

from . import array_kinds
from .accepted_arrays import contents
from .bounded_cache import Cache
from .layouts import swap_heads
from .precisions import current
from .problem import Problem

ARRAYS = ("initial_state", "state", "pending", "accepted", "out", "mask")  # arguments that are arrays
INTEGERS = ("cu_seqlens", "cu_seqlens_k", "window", "slots")  # arguments that are integers on the host, by value
DECAYS = ("gamma",)  # arguments that are numbers on the host, by value
EXACT = frozenset({int, type})  # hashable types whose equal values are interchangeable
SCALARS = frozenset(np.sctypeDict.values())  # NumPy's scalar types, without a caller's subclasses
# {key of a call: the memo of all calls with this key: {"problem": the checked call without arrays, and what backends
# add}}
MEMOS = Cache(most=1 << 26, entries=256)


def call_key(op, inputs, arguments):
    """(key, addresses) of a call.

    The key is a hashable of everything that the checks read: calls with equal keys pass or fail alike. It is None if an
    argument has an unknown type. `addresses` are those of the device arrays, in the order of the call.
    """
    signature, addresses = array_kinds.signature, []
    parts = [signature(x, addresses) for x in inputs]
    if None in parts:
        return None, addresses
    for name, x in arguments.items():
        if x is None:
            parts.append(())
            continue
        kind = type(x)
        if kind is str or kind is bool:  # differs from the key of a number, (int, 1)
            parts.append(x)
            continue
        if name in ARRAYS:
            part = signature(x, addresses)
        elif name in INTEGERS:
            part = contents(x, "iu") or signature(x, addresses)
        elif name in DECAYS and kind is not float:
            part = contents(x, "iuf")
        else:
            part = exact_key(x)
        if part is None:
            return None, addresses
        parts.append(part)
    return (op, current(), *arguments, *parts), addresses


def exact_key(x):
    """A hashable that equals only those of values interchangeable with `x`: 1 differs from 1.0, and 0.0 from -0.0.

    It is made by the exact type, never by a repr or hash that a subclass could define; None for unknown types.
    """
    kind = type(x)
    if kind is float:
        return kind, x.hex()
    if kind in EXACT:
        return kind, x
    if kind in SCALARS:
        return kind, x.tobytes()
    return (np.dtype, x) if isinstance(x, np.dtype) else None


def memo_bytes(problem: Problem) -> int:
    """About how many bytes the memo of calls like `problem` takes: the key, and tables on the host and on the
    device."""
    count = 4096 + 3 * sum(x.nbytes for x in problem.options.values() if type(x) is np.ndarray)
    if "S" in problem.sizes:  # softmax attention's tables: 12 words of 4 bytes for every 64 to 192 tokens of a head
        count += problem.sizes["B"] * problem.sizes["H"] * (problem.sizes["T"] + problem.sizes["S"])
    if problem.varlen:  # tables of sequences and of chunks: 8 numbers for a sequence, 2 for a chunk of 64 tokens
        count += 8 * problem.spans.bounds.nbytes + max(problem.shape("T S" if "S" in problem.sizes else "T")) // 4
    return count


def without_arrays(problem: Problem) -> Problem:
    """The problem without the caller's arrays, so that a cache keeps none of their memory alive."""
    options = {
        name: None if name in ARRAYS or array_kinds.kind(x) == "cupy" else x for name, x in problem.options.items()
    }
    for x in options.values():
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    return problem.replace(arrays={}, initial_state=None, out=None, mask=None, example=None, options=options)


def with_arrays(problem: Problem, inputs, arguments, memo) -> Problem:
    """The cached `problem` with the arrays of this call; `memo`: that of the call's key."""
    op, layout, initial_state, out = problem.op, problem.layout, arguments.get("initial_state"), arguments.get("out")
    arrays = dict(zip(op.arrays, inputs))
    if layout != "bhtd":
        arrays = {name: swap_heads(x, op.arrays[name], layout) for name, x in arrays.items()}
        out = None if out is None else swap_heads(out, op.out, layout)
    if "state" in problem.options:  # a step's
        options = {name: arguments.get(name) if x is None else x for name, x in problem.options.items()}
        return problem.replace(arrays=arrays, options=options, out=out, example=inputs[0], memo=memo)
    return problem.replace(
        arrays=arrays,
        initial_state=None if initial_state is None else (initial_state,),
        out=out,
        example=inputs[0],
        mask=arguments.get("mask"),
        memo=memo,
    )
