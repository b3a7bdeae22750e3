"""What a call writes is none of what it reads, and no element of it is another one."""

from __future__ import annotations

import numpy as np

MOST_WORK = 100_000         # candidates that NumPy may try, milliseconds: strides can make the question arbitrarily hard


def elements_apart(x) -> bool:
    """Whether the axes nest, each stepping over all of the next smaller one: so of every slice of an ordinary array."""
    reach = x.dtype.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(x.strides, x.shape) if size > 1):
        if stride < reach:
            return x.size == 0
        reach += (size - 1) * stride
    return True


def share(x, y) -> bool:
    """Whether two arrays on the host share memory, or have strides for which that would take long to tell."""
    if not np.may_share_memory(x, y):           # their bounds alone
        return False
    try:
        return np.shares_memory(x, y, max_work=MOST_WORK)
    except np.exceptions.TooHardError:
        return True


def keep_apart(problem):
    """On the host: refuses a call that writes what it reads, or writes one place by two names."""
    state, out = problem.options.get("state"), problem.out
    if out is None and state is None:
        return
    read = [*problem.arrays.items(), *(("initial_state", part) for part in problem.initial_state or ()),
            ("mask", problem.mask)]
    for name, written, others in (("state", state, read), ("out", out, [*read, ("state", state)])):
        for other, x in others if written is not None else ():
            if x is not None and share(written, x):
                problem.op.refuse(name, f"shares memory with {other}")
