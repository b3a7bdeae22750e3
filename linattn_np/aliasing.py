"""Memory that a call writes must not overlap memory that it reads, and its elements must not overlap each other."""

from typing import Any

import numpy as np

MOST_PLACES = 64  # sets of device addresses that are remembered for calls with one key: the layers of a model
MOST_WORK: Any = 100_000  # candidates that NumPy tries, some milliseconds: for some strides an exact answer takes long


def elements_apart(x) -> bool:
    """Whether every axis steps over the whole next smaller axis, as in every slice of an ordinary array."""
    reach = x.dtype.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(x.strides, x.shape) if size > 1):
        if stride < reach:
            return x.size == 0
        reach += (size - 1) * stride
    return True


def share(x, y) -> bool:
    """Whether two arrays on the host share memory; True, too, if their strides make the answer take too long."""
    if not np.may_share_memory(x, y):  # their bounds alone
        return False
    try:
        return np.shares_memory(x, y, max_work=MOST_WORK)
    except np.exceptions.TooHardError:
        return True


def check_aliasing(problem, addresses):
    """Refuses a call that writes memory which an argument that it reads has, or another one that it writes.

    `addresses` are those of its arrays on a device. A call with the key and the addresses of an earlier one is not
    checked again.
    """
    if problem.out is None and problem.options.get("state") is None:
        return
    if problem.home == "host" or problem.memo is None:
        compare(problem)
    else:
        passed, places = problem.memo.setdefault("apart", set()), tuple(addresses)
        if places not in passed:
            compare(problem)
            if len(passed) >= MOST_PLACES:
                passed.clear()
            passed.add(places)


def compare(problem):
    """`check_aliasing` of one call; device arrays are compared by their addresses alone."""
    option, read = problem.options.get, [*problem.arrays.items()]
    if problem.initial_state is not None:
        read += [("initial_state", part) for part in problem.initial_state]
    read += [("mask", problem.mask), ("slots", option("slots")), ("accepted", option("accepted"))]
    written = [("state", option("state")), ("pending", option("pending")), ("out", problem.out)]
    read, written = (
        [(name, x if isinstance(x, np.ndarray) else np.asarray(Addresses(x))) for name, x in named if x is not None]
        for named in (read, written)
    )
    for name, x in written:
        refuse_shared(problem.op, name, x, read)
        read.append((name, x))


def refuse_shared(op, name, written, read):
    may_share_memory = np.may_share_memory
    for other, x in read:
        if may_share_memory(written, x) and share(written, x):
            op.refuse(name, f"shares memory with {other}")


# -- on a device ------------------------------------------------------------------------------------------------------
class Addresses:
    """A device array of which NumPy makes an array at its addresses, whose numbers nobody may read."""

    def __init__(self, x):
        self.__array_interface__ = {
            "version": 3,
            "shape": x.shape,
            "strides": x.strides,
            "data": (x.data.ptr, True),
            "typestr": f"|V{x.dtype.itemsize}",
        }
