"""Copies of arrays by one fast kernel of our own, `CopyRows`.

Most are *padded copies*: zeros fill up each row to a multiple of PADDED_BYTES, since kernels move other rows one number
at a time. The padding changes no result: products with a channel or a column of zeros are 0, and so are its gradients.
"""

from __future__ import annotations

from dataclasses import replace

from .arithmetic import ceil_div
from .elementwise_kernels import CopyRows
from .plan import Copy, Draft, aligned16, arrays_in, common_bytes, has_rows, is_contiguous

PADDED_BYTES = 16
LARGE_BYTES = 1 << 20  # a copy of so many bytes takes much longer than the launch of a kernel


# -- calls on padded copies --------------------------------------------------------------------------------------------
def plan_on_copies(problem, plan, *cotangents, keep=""):
    """The plan of a call on padded copies of its arrays; or, for `cotangents` (do, dht), that of its pullback. Results
    have the shapes that the caller wants. `plan` is a function of (the padded problem, *padded cotangents). `keep`: the
    name of an array that is not copied, and whose gradient is returned as `plan` gives it."""
    draft, padded_plan = plan_of_padded(problem, plan, *cotangents, keep=keep)
    results, states = draft.include(padded_plan)
    if cotangents:
        named = zip(results, problem.arrays.items(), strict=True)
        wanted = tuple(dx if name == keep else draft.with_shape(dx, x.shape) for dx, (name, x) in named)
    else:
        o_shape = problem.shape(problem.op.out)
        wanted = draft.with_shape(results, o_shape) if problem.out is None else problem.out
    state = states and (draft.with_shape(states[0], problem.shape(problem.op.state[0])),)
    copy_rows(draft, zip(arrays_in((results, states)), arrays_in((wanted, state)), strict=True))
    explained = {"mode": padded_plan.mode, "tiles": padded_plan.tiles, "reasons": padded_plan.reasons}
    return draft.plan((wanted, state), **explained)


def plan_of_padded(problem, plan, do=None, dht=None, keep=""):
    """(a draft that makes the padded copies, what `plan` returns for them, which is not yet a part of the draft)."""
    sizes, draft, copies = dict(problem.sizes), Draft(), {}
    multiple = PADDED_BYTES // min(x.dtype.itemsize for x in problem.token_arrays)
    for axis in "KV":
        sizes[axis] = multiple * ceil_div(sizes[axis], multiple)

    def padded(name, x, axes):
        names = axes.split()
        if name == keep or names[-1] not in "KV":
            return x
        shape = tuple(sizes[axis] if axis in "KV" else size for axis, size in zip(names, x.shape, strict=True))
        if shape == x.shape and aligned16(x):
            return x
        copies[name] = x, draft.like(x, shape=shape)
        return copies[name][1]

    def padded_states(name, parts):
        return parts and tuple(padded(name, part, axes) for part, axes in zip(parts, problem.op.state, strict=True))

    padded_problem = problem.replace(
        arrays={name: padded(name, x, problem.op.arrays[name]) for name, x in problem.arrays.items()},
        sizes=sizes,
        initial_state=padded_states("initial_state", problem.initial_state),
        out=None,
    )
    cotangents = () if do is None else (padded("do", do, problem.op.out), padded_states("dht", dht))
    copy_rows(draft, [*copies.values()], f"{', '.join(copies)}: rows are not whole pieces of {PADDED_BYTES} bytes")
    return draft, plan(padded_problem, *cotangents)


# -- fast copies in any plan -------------------------------------------------------------------------------------------
def with_fast_copies(plan):
    """The plan with launches of `CopyRows` in place of its large copies, where neighbouring copies share a launch. CuPy
    copies number by number, which takes six times as long if tokens run backwards in memory."""
    if not any(isinstance(step, Copy) for step in plan.steps):
        return plan
    draft, pairs, reasons = Draft(), [], []

    def add_copies():
        """Adds the collected `pairs` to the draft."""
        sources = [source for source, _ in pairs]
        if all(x.size for x in sources) and sum(x.nbytes for x in sources) >= LARGE_BYTES:
            copy_rows(draft, pairs, "; ".join(reason for reason in reasons if reason))
        else:
            for pair, reason in zip(pairs, reasons):
                draft.copy(*pair, reason)
        pairs.clear(), reasons.clear()

    for step in plan.steps:
        if isinstance(step, Copy) and can_copy(step):
            memories = step.source.memory, step.target.memory
            if any(target.memory in memories or source.memory is memories[1] for source, target in pairs):
                add_copies()  # copies of a launch run in any order: none may read or write what another one writes
            pairs.append(with_ascending_axes(step.source, step.target))
            reasons.append(step.reason)
        else:
            add_copies()
            draft.steps.append(step)
    add_copies()
    return replace(plan, steps=tuple(draft.steps))


def can_copy(copy) -> bool:
    """Whether `CopyRows` can make a `plan.Copy` faster. A copy of one contiguous range of bytes is fast already, if
    both start on 16 bytes."""
    same = copy.source.dtype == copy.target.dtype and copy.source.shape == copy.target.shape
    fast = copy.is_of_bytes and copy.source.address_mod_16 == 0
    if not same or fast or not 2 <= copy.target.ndim <= 4:
        return False
    return fills_memory(with_ascending_axes(copy.source, copy.target)[1])


def with_ascending_axes(source, target):
    """Views of both arrays, reversed along the axes along which the `target` runs backwards in memory."""
    key = tuple(slice(None, None, -1 if stride < 0 else 1) for stride in target.strides)
    return source[key], target[key]


# -- launches ----------------------------------------------------------------------------------------------------------
def copy_rows(draft, pairs, reason=""):
    """Copies each source to its target, for `pairs` (source, target) of arrays, by as few launches as possible. Along
    the last axis a target may be longer, and is then filled up with zeros, or shorter. A target that `CopyRows` cannot
    write has a copy step of its own; it must not be longer."""
    pairs = [(source, target) for source, target in pairs if source is not target]
    together = [(source, target) for source, target in pairs if fills_memory(target)]
    for source, target in pairs:
        if not fills_memory(target):
            draft.copy(source[tuple(map(slice, target.shape))], target)
    for n in range(0, len(together), CopyRows.COPIES):
        launch_copies(draft, together[n : n + CopyRows.COPIES], reason)


def fills_memory(x) -> bool:
    """Whether an array starts on 16 bytes and has no gaps; its axes but the last may have any order in memory."""
    return x.address_mod_16 == 0 and has_rows(x) and is_contiguous(in_memory_order(x, x))


def in_memory_order(x, prototype):
    """`x` as [B, H, T, C]: with leading axes of size 1 if it has fewer, and with the axes but the last in the order in
    which those of the `prototype` lie in memory."""
    axes = sorted(range(x.ndim - 1), key=lambda axis: -abs(prototype.strides[axis]))
    while len(axes) < 3:
        axes, x = [x.ndim - 1, *axes], x[..., None, :]
    return x.transpose((*axes, x.ndim - 1))


def launch_copies(draft, pairs, reason):
    """Launches `CopyRows` once for at most `CopyRows.COPIES` pairs (source, target)."""
    copies, blocks, kernel = [], 0, CopyRows.fitting(sum(target.nbytes for _, target in pairs))
    for source, target in pairs:
        ordered = in_memory_order(source, target), in_memory_order(target, target)
        copies.append(copy_members(*ordered) | {"first_block": blocks})
        blocks += ceil_div(target.nbytes, kernel.bytes_of_block)
    no_copy = dict.fromkeys(copies[0], 0) | {"from_": None, "to": None, "first_block": blocks}
    copies += [no_copy] * (CopyRows.COPIES - len(copies))
    draft.launch(kernel, blocks, reason=reason, copies=copies)


def copy_members(source, target) -> dict:
    """The members of the kernel's struct `Copy` for one pair. What the kernel counts as a number are so many bytes as
    it may move at a time."""
    in_rows = has_rows(source)
    size = common_bytes(source, target) if in_rows else source.dtype.itemsize
    size_c, C = (x.shape[-1] * x.dtype.itemsize // size for x in (source, target))
    strides = {f"stride_{axis}": stride // size for axis, stride in zip("bhtc", source.strides)}
    strides |= {"stride_c": 1} if in_rows else {}
    sizes = {f"size_{axis}": count for axis, count in zip("bht", source.shape)} | {"size_c": size_c, "bytes": size}
    target_sizes = {"H": target.shape[1], "T": target.shape[2], "C": C, "count": target.nbytes // size}
    spans = [stride * (count - 1) for stride, count in zip(source.strides, source.shape)]  # of the axes, in bytes
    below, above = -sum(span for span in spans if span < 0), sum(span for span in spans if span > 0)
    readable = {"below": below, "above": above + source.dtype.itemsize}
    return strides | sizes | target_sizes | readable | {"from_": source, "to": target}
