"""Calls that differ in nothing but where their arrays are: what is known of one holds for the next."""

from __future__ import annotations

import numpy as np

from . import arrays as array_kinds
from .caches import Cache

ARRAYS = ("initial_state", "state", "out", "mask")  # arguments that are arrays
INTEGERS = ("cu_seqlens", "slots")                  # arguments that are integers on the host, whose values matter
DECAYS = ("gamma",)                                 # and numbers there
EXACT = frozenset({int, type})                      # types whose equal values are the same, and hashable
SCALARS = frozenset(np.sctypeDict.values())         # NumPy's own, no subclass of the caller's
MEMOS = Cache(most=1 << 26, entries=256)            # of calls by their likeness


def likeness(op, inputs, arguments):
    """All that the checks of a call can see, hashable: calls alike pass or fail alike. None where it cannot tell."""
    seen = [array_kinds.signature(x) for x in inputs]
    for name, x in arguments.items():
        kind = type(x)
        if x is None:
            seen.append(())
        elif kind is str or kind is bool:       # True is no (int, 1)
            seen.append(x)
        elif name in ARRAYS:
            seen.append(array_kinds.signature(x))
        elif name in INTEGERS:
            seen.append(array_kinds.contents(x, "iu") or array_kinds.signature(x))
        elif name in DECAYS and kind is not float:
            seen.append(array_kinds.contents(x, "iuf"))
        else:
            seen.append(exactly(x))
    return None if None in seen else (op, *arguments, *seen)


def exactly(x):
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


def weight(problem) -> int:
    """About how many bytes are kept for calls like `problem`: its key, and its sequences' tables here and on a device."""
    kept = 4096 + 3 * sum(x.nbytes for x in problem.options.values() if type(x) is np.ndarray)
    if problem.varlen:                              # eight numbers a sequence, and two for every chunk of 64 tokens
        kept += 8 * problem.spans.bounds.nbytes + problem.sizes["T"] // 4
    return kept
