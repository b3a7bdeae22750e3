"""Copies at the speed of memory, by one kernel of our own.

Most are copies whose rows are whole pieces of 16 bytes, filled up with zeros, for kernels that else go number by
number. A channel or a column of zeros changes nothing: its products are 0, and so are its gradients.
"""

from __future__ import annotations

from dataclasses import replace

from .elementwise_kernels import CopyRows
from .plan import (
    Copy,
    Draft,
    aligned16,
    are_large,
    arrays_in,
    ceil_div,
    common_bytes,
    has_rows,
    is_contiguous,
    token_arrays,
)

PIECE = 16  # bytes


def widened(problem, plan, do=None, dht=None):
    """(a draft, the plan that `plan` draws of a wider problem and its cotangents, not yet a part of the draft)."""
    sizes, draft, copies = dict(problem.sizes), Draft(), {}
    numbers = PIECE // min(x.dtype.itemsize for x in token_arrays(problem))
    for axis in "KV":
        sizes[axis] = numbers * ceil_div(sizes[axis], numbers)

    def wide(name, x, axes):
        shape = tuple(sizes[axis] for axis in axes.split())
        if shape == x.shape and aligned16(x):
            return x
        copies[name] = x, draft.like(x, shape=shape)
        return copies[name][1]

    def wide_states(name, parts):
        return parts and tuple(wide(name, part, axes) for part, axes in zip(parts, problem.op.state, strict=True))

    larger = problem.replace(
        arrays={name: wide(name, x, problem.op.arrays[name]) for name, x in problem.arrays.items()},
        sizes=sizes,
        initial_state=wide_states("initial_state", problem.initial_state),
        out=None,
    )
    cotangents = () if do is None else (wide("do", do, problem.op.out), wide_states("dht", dht))
    copy_rows(draft, [*copies.values()], f"{', '.join(copies)}: rows are not whole pieces of {PIECE} bytes")
    return draft, plan(larger, *cotangents)


def plan_on_copies(problem, plan, *cotangents):
    """The plan that `plan` draws of copies of a call's arrays whose rows are whole pieces, or of its pullback's for the
    `cotangents` do and dht, with results in the shapes that the caller wants."""
    draft, found = widened(problem, plan, *cotangents)
    results, states = draft.include(found)
    if cotangents:
        wanted = tuple(draft.with_shape(x, of.shape) for x, of in zip(results, problem.arrays.values(), strict=True))
    else:
        wanted = draft.output(problem, fits=lambda out: True)
    state = states and (draft.with_shape(states[0], problem.shape(problem.op.state[0])),)
    copy_rows(draft, zip(arrays_in((results, states)), arrays_in((wanted, state)), strict=True))
    return draft.plan((wanted, state), mode=found.mode, tiles=found.tiles)


def copy_rows(draft, pairs, reason=""):
    """Arrays to other memory, whose axes may be longer, with zeros at their ends, or shorter. By one kernel; to memory
    that is not contiguous, which has no longer axes, one by one."""
    pairs = [(x, to) for x, to in pairs if x is not to]
    together = [(x, to) for x, to in pairs if fills_memory(to)]
    for x, to in pairs:
        if not fills_memory(to):
            draft.copy(x[tuple(map(slice, to.shape))], to)
    for n in range(0, len(together), CopyRows.COPIES):
        launch_copies(draft, together[n : n + CopyRows.COPIES], reason)


def with_fast_copies(plan):
    """The plan with the kernel's launches in place of neighbouring copies that are large: CuPy's own kernel goes number
    by number, which takes six times as long where time runs backwards."""
    draft, pairs, reasons = Draft(), [], []

    def move():
        if are_large([x for x, _ in pairs]):
            copy_rows(draft, pairs, "; ".join(reason for reason in reasons if reason))
        else:
            for pair, reason in zip(pairs, reasons):
                draft.copy(*pair, reason)
        pairs.clear(), reasons.clear()

    for step in plan.steps:
        if isinstance(step, Copy) and moves_rows(step):
            if any(step.source.memory is to.memory for _, to in pairs):
                move()
            pairs.append(with_ascending_axes(step.source, step.target))
            reasons.append(step.reason)
        else:
            move()
            draft.steps.append(step)
    move()
    return replace(plan, steps=tuple(draft.steps))


def moves_rows(copy) -> bool:
    """Whether the kernel can make the copy."""
    same = copy.source.dtype == copy.target.dtype and copy.source.shape == copy.target.shape
    return (
        same
        and not copy.is_of_bytes
        and 2 <= copy.target.ndim <= 4
        and fills_memory(with_ascending_axes(copy.source, copy.target)[1])
    )


def with_ascending_axes(x, to):
    """Both arrays with every axis in the direction in which `to` lies in memory."""
    key = tuple(slice(None, None, -1 if stride < 0 else 1) for stride in to.strides)
    return x[key], to[key]


def fills_memory(x) -> bool:
    return x.address_mod_16 == 0 and has_rows(x) and is_contiguous(in_memory_order(x, x))


def in_memory_order(x, of):
    """[B, H, T, C] of an array, whose axes but the last lie as those of another one do."""
    axes = sorted(range(x.ndim - 1), key=lambda axis: -abs(of.strides[axis]))
    while len(axes) < 3:
        axes, x = [x.ndim - 1, *axes], x[..., None, :]
    return x.transpose((*axes, x.ndim - 1))


def launch_copies(draft, pairs, reason):
    """One launch that copies the sources of the pairs (source, copy), at most `CopyRows.COPIES`."""
    copies, blocks = [], 0
    for x, to in pairs:
        copies.append(copy_of(in_memory_order(x, to), in_memory_order(to, to)) | {"first_block": blocks})
        blocks += ceil_div(to.nbytes, CopyRows.BYTES_OF_BLOCK)
    nothing = dict.fromkeys(copies[0], 0) | {"from_": None, "to": None, "first_block": blocks}
    copies += [nothing] * (CopyRows.COPIES - len(copies))
    draft.launch(CopyRows(), blocks, reason=reason, copies=copies)


def copy_of(x, to) -> dict:
    """The members of the kernel's struct `Copy` for one array. To the kernel, neighbours that always move together are
    one number."""
    in_rows = has_rows(x)
    size = common_bytes(x, to) if in_rows else x.dtype.itemsize
    size_c, C = (array.shape[-1] * array.dtype.itemsize // size for array in (x, to))
    members = {f"stride_{axis}": stride // size for axis, stride in zip("bhtc", x.strides)}
    members |= {f"size_{axis}": count for axis, count in zip("bht", x.shape)}
    members |= {"stride_c": 1} if in_rows else {}
    to_members = {"to": to, "H": to.shape[1], "T": to.shape[2], "C": C, "count": to.nbytes // size}
    return members | to_members | {"from_": x, "size_c": size_c, "bytes": size}
