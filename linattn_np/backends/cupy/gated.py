"""The gated family: recurrences with a gate for every channel. Nothing here knows of gates that channels share."""

from __future__ import annotations

from . import aligned_copies, float64, gated_backward, segments, stages
from .gated_forward import PASSES, HopperForward
from .gated_kernels import CHANNELS, Recurrent, channels, read_order
from .kernel import CTYPES, DOUBLE, no_kernels
from .plan import Draft, ceil_div, mode_of
from .segments import HOPPER

MODES = ("auto", "recurrent", "chunk", "staged")


def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    mode = mode_of(problem)
    if problem.dtype == DOUBLE:
        return None if mode == "staged" else float64.unsupported(problem)
    if problem.mode not in MODES:
        return f"no mode {problem.mode!r}; it has {', '.join(map(repr, MODES))}"
    if mode == "chunk" and problem.materialize:
        return "mode 'chunk' is one pass that keeps no chunk's state; mode 'staged' keeps them"
    if problem.sizes["K"] > CHANNELS[-1] and mode != "chunk":
        return f"K={problem.sizes['K']} is over {CHANNELS[-1]}"
    return no_kernels(problem.dtype, CTYPES)


def plan(problem, device, kept=()):
    """`kept`: what `plan_summary` of the same tokens has left."""
    if problem.mode == "staged":
        return stages.plan_in_a_row(problem)
    if problem.dtype == DOUBLE:
        return float64.plan(problem, device)
    if problem.mode == "recurrent":
        return plan_recurrent(problem)
    if aligned_copies.forward_gains(problem):
        return plan_wider(problem, device)
    draft, cut = Draft(), segments.forward_cut(problem, device)
    o, final = draft.output(problem, cut.fits), draft.final(problem)
    inputs = draft.mapped_inputs(problem, cut.fits) if cut.way == HOPPER else draft.inputs(problem)
    launches = PASSES[cut.way](draft, problem, cut, inputs, o)
    launches.run(final, kept)
    results = draft.results(problem, o, final)
    return draft.plan(results, mode=problem.mode, tiles=cut.tiles, saved=launches.saved)


def plan_wider(problem, device):
    """Plan the call on copies of its arrays whose rows are whole 16-byte pieces, as Hopper's own kernel needs them."""
    draft, found = aligned_copies.widened(problem, lambda wide: plan(wide, device))
    found_o, final = draft.include(found)
    o = draft.output(problem, fits=lambda out: True)
    end = final and (aligned_copies.narrower(draft, final[0], problem.shape("N H K V")),)
    aligned_copies.copy_rows(draft, [(found_o, o), *zip(final or (), end or ())])
    return draft.plan((o, end), mode=found.mode, tiles=found.tiles)


def plan_summary(problem, device):
    """A plan of ((the final state from zero,), the decay [N, H, K] of any other), side by side in memory, without o;
    what it saves spares `plan` the same pass. None where nothing is cheaper than a whole call."""
    cut = segments.forward_cut(problem, device)
    if problem.mode != "chunk" or cut.way != HOPPER:
        return None
    cut = segments.without_a_short_segment(problem, device, cut)
    draft = Draft()
    inputs = draft.mapped_inputs(problem)
    launches = HopperForward(draft, problem, cut, inputs, o=inputs[2])  # o is not written: v's tensor map stands for it
    return launches.summary(problem.sizes["K"])


def plan_vjp(problem, device, do, dht, saved=(), kept=()):
    """The states at the segments' starts are those of the forward pass of mode "chunk", so that every mode's gradients
    have the same bits."""
    if problem.dtype == DOUBLE:
        return float64.plan_vjp(problem, device, do, dht)
    return gated_backward.plan_vjp(problem, device, do, dht, saved, kept)


plan_summary_vjp = gated_backward.plan_summary_vjp


# -- token by token ----------------------------------------------------------------------------------------------------
def plan_recurrent(problem):
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
