"""Memory that a call writes must not overlap memory that it reads, and its elements must not overlap each other."""

from typing import Any

import numpy as np

MOST_PASSED = 64  # sets of device addresses that are remembered for one key: a model's layers make calls with one key
MOST_WORK: Any = 100_000  # candidates that NumPy tries, in some milliseconds; for some strides it would need many more


def elements_apart(x) -> bool:
    """Whether no two elements of x share memory, by a test that every slice of an ordinary array passes: the stride of
    each axis is at least the extent in bytes of all axes with smaller strides."""
    extent = x.dtype.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(x.strides, x.shape) if size > 1):
        if stride < extent:
            return x.size == 0
        extent += (size - 1) * stride
    return True


def share(x, y) -> bool:
    """Whether two arrays on the host share memory; True, too, if NumPy finds no answer by MOST_WORK candidates. Callers
    first ask `np.may_share_memory`, which compares the arrays' first and last bytes alone."""
    try:
        return np.shares_memory(x, y, max_work=MOST_WORK)
    except np.exceptions.TooHardError:
        return True


def check_aliasing(problem, addresses):
    """ContractError if the call writes to memory that it also reads, or writes twice.

    addresses : of the call's arrays on a device. A call with the key and the addresses of an earlier one passes
    """
    if problem.out is None and problem.options.get("state") is None:
        return
    if problem.home == "host" or problem.memo is None:
        compare(problem)
    else:
        passed, addresses = problem.memo.setdefault("apart", set()), tuple(addresses)
        if addresses not in passed:
            compare(problem)
            if len(passed) >= MOST_PASSED:
                passed.clear()
            passed.add(addresses)


def compare(problem):
    """`check_aliasing` of one call, by the addresses of its arrays: all that a call may have must be named here."""
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
    """ContractError if the array `written` shares memory with one of `read`, [(name, array)]."""
    may_share_memory = np.may_share_memory
    for other, x in read:
        if may_share_memory(written, x) and share(written, x):
            op.refuse(name, f"shares memory with {other}")


# -- on a device ------------------------------------------------------------------------------------------------------
class Addresses:
    """Makes `np.asarray` return an array at a device array's addresses, to be compared. It has no readable numbers."""

    def __init__(self, x):
        self.__array_interface__ = {
            "version": 3,
            "shape": x.shape,
            "strides": x.strides,
            "data": (x.data.ptr, True),
            "typestr": f"|V{x.dtype.itemsize}",
        }
