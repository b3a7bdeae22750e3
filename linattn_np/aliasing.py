"""What a call writes is none of what it reads, and no element of it is another one."""

from __future__ import annotations

from typing import Any

import numpy as np

MOST_PLACES = 64  # of calls alike on a device: the layers of a model
MOST_WORK: Any = 100_000  # candidates that NumPy may try, in milliseconds: strides can make the question very hard


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
    if not np.may_share_memory(x, y):  # their bounds alone
        return False
    try:
        return np.shares_memory(x, y, max_work=MOST_WORK)
    except np.exceptions.TooHardError:
        return True


def check_aliasing(problem, addresses):
    """Refuses a call that writes what it reads, or writes one place by two names.

    `addresses` are those of its arrays on a device: calls alike whose arrays lie at the same places pass alike.
    """
    state, out = problem.options.get("state"), problem.out
    if out is None and state is None:
        return
    slots = problem.options.get("slots")
    if problem.home == "host" or problem.memo is None:
        compare(problem, state, slots)
    else:
        passed, places = problem.memo.setdefault("apart", set()), tuple(addresses)
        if places not in passed:
            compare(problem, state, slots)
            if len(passed) >= MOST_PLACES:
                passed.clear()
            passed.add(places)


def compare(problem, state, slots):
    """`check_aliasing` without a memory; of a device's arrays by their addresses alone."""
    read, out = [*problem.arrays.items()], problem.out
    if problem.initial_state is not None:
        read += [("initial_state", part) for part in problem.initial_state]
    if problem.mask is not None:
        read.append(("mask", problem.mask))
    if slots is not None:
        read.append(("slots", slots))
    if problem.home != "host":
        read = [(name, seen_from_the_host(x)) for name, x in read]
        state, out = (None if x is None else seen_from_the_host(x) for x in (state, out))
    if state is not None:
        refuse_shared(problem.op, "state", state, read)
        read.append(("state", state))
    if out is not None:
        refuse_shared(problem.op, "out", out, read)


def refuse_shared(op, name, written, read):
    may_share_memory = np.may_share_memory
    for other, x in read:
        if may_share_memory(written, x) and share(written, x):
            op.refuse(name, f"shares memory with {other}")


# -- on a device ------------------------------------------------------------------------------------------------------
def seen_from_the_host(x):
    """A NumPy array at the addresses of a device's, never to be read; an array of the host's itself."""
    return x if isinstance(x, np.ndarray) else np.asarray(Addresses(x))


class Addresses:
    """What NumPy's array interface asks of an array that it only compares."""

    def __init__(self, x):
        self.__array_interface__ = {
            "version": 3,
            "shape": x.shape,
            "strides": x.strides,
            "data": (x.data.ptr, True),
            "typestr": f"|V{x.dtype.itemsize}",
        }
