"""Calls that differ in nothing but where their arrays are: what is known of one holds for the next."""

from __future__ import annotations

import numpy as np

from . import array_kinds
from .accepted_arrays import contents
from .bounded_cache import Cache
from .layouts import swap_heads
from .precisions import current
from .problem import Problem

ARRAYS = ("initial_state", "state", "out", "mask")  # arguments that are arrays
INTEGERS = ("cu_seqlens", "cu_seqlens_k", "window", "slots")  # that are integers on the host, whose values matter
DECAYS = ("gamma",)  # and numbers there
EXACT = frozenset({int, type})  # types whose equal values are the same, and hashable
SCALARS = frozenset(np.sctypeDict.values())  # NumPy's own, no subclass of the caller's
MEMOS = Cache(most=1 << 26, entries=256)  # of calls by their keys


def call_key(op, inputs, arguments):
    """(key, addresses) of a call.

    The key is all that its checks can see, hashable: calls alike pass or fail alike. None where it cannot tell. With
    the addresses of a device's arrays, in the order of the call, it tells whether their memory overlaps.
    """
    signature, addresses = array_kinds.signature, []
    seen = [signature(x, addresses) for x in inputs]
    if None in seen:
        return None, addresses
    for name, x in arguments.items():
        if x is None:
            seen.append(())
            continue
        kind = type(x)
        if kind is str or kind is bool:  # True is no (int, 1)
            seen.append(x)
            continue
        if name in ARRAYS:
            found = signature(x, addresses)
        elif name in INTEGERS:
            found = contents(x, "iu") or signature(x, addresses)
        elif name in DECAYS and kind is not float:
            found = contents(x, "iuf")
        else:
            found = exact_key(x)
        if found is None:
            return None, addresses
        seen.append(found)
    return (op, current(), *arguments, *seen), addresses


def exact_key(x):
    """A hashable that equals only what `x` cannot be told from: 1 is not 1.0, 0.0 not -0.0. None of unknown types.

    By type, never by a repr or a hash that a subclass could have of its own.
    """
    kind = type(x)
    if kind is float:
        return kind, x.hex()
    if kind in EXACT:
        return kind, x
    if kind in SCALARS:
        return kind, x.tobytes()
    return (np.dtype, x) if isinstance(x, np.dtype) else None


def kept_bytes(problem: Problem) -> int:
    """About the bytes kept for calls like `problem`: its key, and its sequences' tables here and on a device."""
    kept = 4096 + 3 * sum(x.nbytes for x in problem.options.values() if type(x) is np.ndarray)
    if "S" in problem.sizes:  # 12 words of 4 bytes for every 64 to 192 tokens of a head, here and on a device
        kept += problem.sizes["B"] * problem.sizes["H"] * (problem.sizes["T"] + problem.sizes["S"])
    if problem.varlen:  # eight numbers a sequence, and two for every chunk of 64 tokens
        kept += 8 * problem.spans.bounds.nbytes + max(problem.shape("T S" if "S" in problem.sizes else "T")) // 4
    return kept


def without_arrays(problem: Problem) -> Problem:
    """What calls alike have in common; keeps no memory of the caller's alive."""
    options = {
        name: None if name == "state" or array_kinds.kind(x) == "cupy" else x for name, x in problem.options.items()
    }
    for x in options.values():
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    return problem.replace(arrays={}, initial_state=None, out=None, mask=None, example=None, options=options)


def with_arrays(problem: Problem, inputs, arguments, memo) -> Problem:
    """A call like `problem` on arrays of its own, which need no conversion; `memo` is what all of them share."""
    op, layout, initial_state, out = problem.op, problem.layout, arguments.get("initial_state"), arguments.get("out")
    arrays = dict(zip(op.arrays, inputs))
    if layout != "bhtd":
        arrays = {name: swap_heads(x, op.arrays[name], layout) for name, x in arrays.items()}
        out = None if out is None else swap_heads(out, op.out, layout)
    if "state" in problem.options:  # a step's
        slots = problem.options["slots"]
        options = {"state": arguments["state"], "slots": arguments.get("slots") if slots is None else slots}
        return problem.replace(arrays=arrays, options=options, out=out, example=inputs[0], memo=memo)
    return problem.replace(
        arrays=arrays,
        initial_state=None if initial_state is None else (initial_state,),
        out=out,
        example=inputs[0],
        mask=arguments.get("mask"),
        memo=memo,
    )
