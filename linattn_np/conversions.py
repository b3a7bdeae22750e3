"""Conversions between the caller's arrays and a backend's.

A backend gets arrays [B, H, T, ...] in the recurrence's order of time, states [N, H, K, V], as many heads of v as of q,
and no padding. The caller may pass [B, T, H, ...] (`layout`), time running backwards (`reverse`), states [N, H, V, K]
(`state_v_first`), more heads of v than of q (grouped value heads: a group's heads are folded into the columns of v)
and padding (`mask`). Conversions are views, except for padding, which is filled in a copy, and for grouped heads that
are not adjacent in memory.
"""

import numpy as np

from . import array_kinds, value_heads
from .graph_capture import refuse_lost_memory
from .layouts import swap_heads
from .problem import Problem


# -- a whole call -----------------------------------------------------------------------------------------------------
def to_backend(problem: Problem) -> Problem:
    """The problem with a backend's arrays; its `out` is None if no view of the caller's `out` has a backend's axes."""
    arrays = {
        name: array_to_backend(problem, x, problem.op.arrays[name], value_of_padding(problem, name))
        for name, x in problem.arrays.items()
    }
    initial_state = problem.initial_state and tuple(
        state_to_backend(problem, part, axes) for part, axes in zip(problem.initial_state, problem.op.state)
    )
    out = None
    if problem.out is not None and "out" not in problem.copied_arrays:
        out = folded(problem, in_time(problem, problem.out, problem.op.out), problem.op.out)
    mask = problem.mask
    if mask is not None and problem.gradient:  # the caller may change the mask before the pullback reads it
        mask = mask.copy()
    return problem.replace(arrays=arrays, initial_state=initial_state, out=out, mask=mask)


def with_output(problem: Problem) -> Problem:
    """The problem with memory for o if time is reversed, so that o lies in the caller's order of time."""
    if not problem.reverse or problem.out is not None:
        return problem
    like = next(in_time(problem, x, axes) for x, axes in zip(problem.arrays.values(), problem.op.arrays.values()))
    o = np.empty_like(like, shape=problem.shape(problem.op.out), dtype=problem.dtype)  # a CuPy array if `like` is one
    return problem.replace(out=in_time(problem, o, problem.op.out))


def copied_arrays(problem: Problem) -> tuple[str, ...]:
    """The names of the caller's arrays that are copied because a group's value heads are not adjacent in memory."""
    if problem.groups == 1:
        return ()
    state = problem.initial_state and state_in_order(problem, problem.initial_state[0])
    with_columns = [(name, x) for name, x in problem.arrays.items() if value_heads.has_columns(problem.op.arrays[name])]
    return tuple(
        name
        for name, x in (*with_columns, ("initial_state", state), ("out", problem.out))
        if x is not None and not value_heads.folds_in_place(x)
    )


# -- from the caller to a backend -------------------------------------------------------------------------------------
def array_to_backend(problem: Problem, x, axes: str, fill=0.0):
    """The caller's array [B, H, T, ...] as the backend's; its padding is filled with `fill`."""
    x = folded(problem, in_time(problem, x, axes), axes)
    if problem.mask is None or "T" not in axes.split():
        return x
    refuse_lost_memory(problem, "mask", "copies of the arrays without padding are")
    return filled(x.copy(order="K"), padding_of(problem), fill)


def state_to_backend(problem: Problem, part, axes: str):
    """A part of the caller's state, or of its gradient, as the backend's array."""
    return folded(problem, state_in_order(problem, part), axes)


# -- from a backend to the caller -------------------------------------------------------------------------------------
def to_caller(problem: Problem, native, axes: str):
    """A backend's array as the caller's; padding becomes 0."""
    if problem.mask is not None and "T" in axes.split():
        native = filled(native, padding_of(problem))
    return swap_heads(unfolded(problem, in_time(problem, native, axes), axes), axes, problem.layout)


def state_to_caller(problem: Problem, part, axes: str):
    """A part of a backend's state, or of its gradient, as the caller's array."""
    return state_in_order(problem, unfolded(problem, part, axes))


def states_to_caller(problem: Problem, parts):
    """All parts of a state, or their gradients, as arrays of the caller's library: one array, or a tuple of several."""
    parts = tuple(
        in_callers_library(problem, state_to_caller(problem, part, axes)) for part, axes in zip(parts, problem.op.state)
    )
    return parts if len(parts) > 1 else parts[0]


def in_callers_library(problem: Problem, native):
    """A NumPy or CuPy result as the caller's library's."""
    return array_kinds.from_native(native, problem.kind, problem.example)


def callers_sizes(problem: Problem) -> dict[str, int]:
    """The problem's sizes, with V per value head as in the caller's arrays, not per group."""
    return problem.sizes | {"V": problem.sizes["V"] // problem.groups}


# -- each conversion alone --------------------------------------------------------------------------------------------
def in_time(problem: Problem, x, axes: str):
    """Converts between the caller's and the recurrence's order of time; its own inverse, a view."""
    return x[:, :, ::-1] if problem.reverse and axes.split()[:3] == ["B", "H", "T"] else x


def state_in_order(problem: Problem, part):
    """Converts between the caller's and a backend's order of a state's sequences and axes; its own inverse, a view."""
    part = part[::-1] if problem.reverse and problem.varlen else part
    return part.swapaxes(2, 3) if problem.state_v_first and part.ndim == 4 else part


def folded(problem: Problem, x, axes: str):
    """x [B, HV, T, V] as [B, H, T, groups * V] if value heads are grouped; `unfolded` is the inverse."""
    return value_heads.fold(x, problem.groups) if problem.groups > 1 and value_heads.has_columns(axes) else x


def unfolded(problem: Problem, x, axes: str):
    return value_heads.unfold(x, problem.groups) if problem.groups > 1 and value_heads.has_columns(axes) else x


def padding_of(problem: Problem):
    """[B, T], True for padding, in the recurrence's order of time."""
    return ~(problem.mask[:, ::-1] if problem.reverse else problem.mask)


def filled(x, padding, value=0.0):
    """Writes `value` to x [B, H, T, ...] where `padding` [B, T] is True, also in place of NaN; returns x."""
    bits = x.view(f"u{x.dtype.itemsize}")  # NumPy has no casts from Python's numbers to bfloat16
    B, T = padding.shape
    where = np.broadcast_to(padding.reshape(B, 1, T, *(1,) * (x.ndim - 3)), x.shape)  # a CuPy array if `padding` is one
    np.copyto(bits, int(np.array(value, x.dtype).view(bits.dtype)), where=where)
    return x


def value_of_padding(problem: Problem, name: str) -> float:
    """The value of an array at padding: for a key one that every feature map (none, elu + 1, relu, exp) makes 0."""
    return -np.inf if name == "k" and problem.options.get("feature_map") else 0.0
