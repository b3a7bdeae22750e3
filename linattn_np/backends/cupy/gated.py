"""The gated family: recurrences with a gate for every channel. Nothing here knows of gates that channels share."""

from __future__ import annotations

from . import float64, gated_backward, gated_forward, stages
from .gated_kernels import CHANNELS, Recurrent, channels, read_order
from .kernel import CTYPES, DOUBLE, no_kernels
from .plan import Draft, ceil_div, mode_of


def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    mode = mode_of(problem)
    if problem.dtype == DOUBLE:
        return None if mode == "staged" else float64.unsupported(problem)
    if mode not in PLANS:
        return f"no mode {mode!r}; it has {', '.join(map(repr, ('auto', *PLANS)))}"
    if mode == "chunk" and problem.materialize:
        return "mode 'chunk' is one pass that keeps no chunk's state; mode 'staged' keeps them"
    if problem.sizes["K"] > CHANNELS[-1] and mode != "chunk":
        return f"K={problem.sizes['K']} is over {CHANNELS[-1]}"
    return no_kernels(problem.dtype, CTYPES)


def plan(problem, device, kept=()):
    """`kept`: what `plan_summary` of the same tokens has left."""
    if problem.dtype == DOUBLE and problem.mode != "staged":
        return float64.plan(problem, device)
    return PLANS[problem.mode](problem, device, kept)


def plan_vjp(problem, device, do, dht, saved=(), kept=()):
    """The states at the segments' starts are those of the forward pass of mode "chunk", so that every mode's gradients
    have the same bits."""
    if problem.dtype == DOUBLE:
        return float64.plan_vjp(problem, device, do, dht)
    return gated_backward.plan_vjp(problem, device, do, dht, saved, kept)


plan_summary, plan_summary_vjp = gated_forward.plan_summary, gated_backward.plan_summary_vjp


# -- token by token ----------------------------------------------------------------------------------------------------
def plan_recurrent(problem, device, kept):
    draft = Draft()
    o, final, (q, k, v, g) = draft.output(problem), draft.final(problem), draft.inputs(problem)
    kernel = Recurrent(read_order(problem.op), problem.dtype, g.dtype, channels(problem.sizes["K"]))
    arrays = {"q": q, "k": k, "v": v, "g": g, "u": draft.bonus(problem)}
    return launch_recurrent(draft, problem, kernel, arrays, o, final)


def launch_recurrent(draft, problem, kernel, arrays, o, final):
    """The plan of a kernel for BV columns a block."""
    N, H, V = problem.shape("N H V")
    states = {"initial": draft.initial(problem), "final": final}
    common = {"shape": draft.shape(problem), "scale": problem.scale}
    draft.launch(kernel, N * H * ceil_div(V, kernel.BV), **arrays, o=o, **states, **common)
    return draft.plan(draft.results(problem, o, final), mode="recurrent", tiles=kernel.tiles)


PLANS = {"recurrent": plan_recurrent, "chunk": gated_forward.plan_in_chunks, "staged": stages.plan_in_a_row}
