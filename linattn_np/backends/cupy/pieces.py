"""Copies whose rows are whole pieces of 16 bytes, filled up with zeros, for kernels that else go number by number.

A channel or a column of zeros changes nothing: its products are 0, and so are its gradients.
"""

from __future__ import annotations

from .plan import Draft, aligned16, ceil_div, common_bytes

PIECE = 16  # bytes
WORTH_COPIES = 1 << 20  # bytes of arrays from which on the copies' launches are a small part of a call


def rows(problem) -> list:
    """The arrays of a call that have a row for every token."""
    return [x for name, x in problem.arrays.items() if "T" in problem.op.arrays[name].split()]


def many(arrays) -> bool:
    return all(x.size for x in arrays) and sum(x.nbytes for x in arrays) >= WORTH_COPIES


def forward_gains(problem) -> bool:
    """Whether the one-pass kernels take longer than copies and they together: where they load 2 bytes at a time."""
    arrays = rows(problem)
    return many(arrays) and "final_state" not in problem.options and common_bytes(*arrays) == 2


def backward_gains(problem, do) -> bool:
    """The same of the backward kernels: wherever a row is not whole pieces, which takes ten times as long."""
    arrays = [*rows(problem), do]
    return many(arrays) and not aligned16(*arrays)


def widened(problem, plan, do=None, dht=None):
    """(a draft, the plan that `plan` draws of a wider problem and its cotangents, not yet a part of the draft)."""
    sizes, draft = dict(problem.sizes), Draft()
    numbers = PIECE // min(x.dtype.itemsize for x in rows(problem))
    for axis in "KV":
        sizes[axis] = numbers * ceil_div(sizes[axis], numbers)

    def wide(name, x, axes):
        shape = tuple(sizes[axis] for axis in axes.split())
        if shape == x.shape and aligned16(x):
            return x
        copied = draft.like(x, shape=shape)
        if shape != x.shape:
            draft.fill(copied)
        draft.copy(x, narrow(copied, x.shape), f"{name}: its rows are not whole pieces of {PIECE} bytes")
        return copied

    def wide_states(name, parts):
        return parts and tuple(wide(name, part, axes) for part, axes in zip(parts, problem.op.state, strict=True))

    larger = problem.replace(
        arrays={name: wide(name, x, problem.op.arrays[name]) for name, x in problem.arrays.items()},
        sizes=sizes,
        initial_state=wide_states("initial_state", problem.initial_state),
        out=None,
    )
    cotangents = () if do is None else (wide("do", do, problem.op.out), wide_states("dht", dht))
    return draft, plan(larger, *cotangents)


def narrow(x, shape):
    """That much of `x`."""
    return x[tuple(slice(size) for size in shape)]


def cut(draft, x, shape):
    """`x`, or a copy of what a caller asked for, in the same memory order."""
    if x.shape == shape:
        return x
    found = draft.like(x, shape=shape)
    draft.copy(narrow(x, found.shape), found)
    return found
