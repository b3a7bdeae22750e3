"""The planner of the gated family (GLA, RWKV-6): recurrences S_t = diag(exp g_t) S_{t-1} + k_t v_t^T of a state S_t
[K, V], with a log gate g_t for every channel. Operators whose channels share a gate: see `scalar_decay`.

The modes of a call: "recurrent" goes token by token, "chunk" in chunks, "staged" by the five stages of `stages.py`.
"""

from __future__ import annotations

from . import float64, gated_backward, gated_forward, stages
from .arithmetic import ceil_div
from .gated_kernels import CHANNELS, Recurrent, channels, read_order
from .kernel import CTYPES, DOUBLE, no_kernels
from .plan import Draft, mode_of


def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    mode = mode_of(problem)
    if problem.dtype == DOUBLE:
        return None if mode == "staged" else float64.unsupported(problem)
    if mode not in PLANS:
        return f"no mode {mode!r}; it has {', '.join(map(repr, ('auto', *PLANS)))}"
    if problem.mode == "chunk" and problem.materialize:
        return "mode 'chunk' is one pass that keeps no chunk's state; mode 'staged' keeps them"
    if problem.sizes["K"] > CHANNELS[-1] and mode == "recurrent":
        return f"K={problem.sizes['K']} is over {CHANNELS[-1]}"
    return no_kernels(problem.dtype, CTYPES)


def plan(problem, device, summaries=()):
    """The plan of a call. `summaries`: the arrays that a plan of `plan_summary` has saved for the same arrays."""
    if problem.dtype == DOUBLE and problem.mode != "staged":
        return float64.plan(problem, device)
    return PLANS[problem.mode](problem, device, summaries)


def plan_vjp(problem, device, do, dht, saved=(), summaries=()):
    """The plan of a pullback. In every mode it is that of mode "chunk", so that the gradients have the same bits.

    `saved`: what the plan of the call has saved; `summaries`: what a plan of `plan_summary_vjp` has saved for the same
    `do`.
    """
    if problem.dtype == DOUBLE:
        return float64.plan_vjp(problem, device, do, dht)
    return gated_backward.plan_vjp(problem, device, do, dht, saved, summaries)


plan_summary, plan_summary_vjp = gated_forward.plan_summary, gated_backward.plan_summary_vjp


# -- token by token ----------------------------------------------------------------------------------------------------
def plan_recurrent(problem, device, summaries):
    """The plan of mode "recurrent", which has no use for a device or for summaries."""
    draft = Draft()
    o, final, (q, k, v, g) = draft.output(problem), draft.final(problem), draft.inputs(problem)
    kernel = Recurrent(read_order(problem.op), problem.dtype, g.dtype, channels(problem.sizes["K"]))
    arrays = {"q": q, "k": k, "v": v, "g": g, "u": draft.bonus(problem)}
    return launch_recurrent(draft, problem, kernel, arrays, o, final)


def launch_recurrent(draft, problem, kernel, arrays, o, final):
    """The plan of a call by one kernel that goes token by token; `arrays`: its inputs by argument. A block of it
    computes `kernel.BV` columns of a head's state. `value_gate` uses this, too."""
    N, H, V = problem.shape("N H V")
    states = {"initial": draft.initial(problem), "final": final}
    common = {"shape": draft.shape(problem), "scale": problem.scale}
    draft.launch(kernel, N * H * ceil_div(V, kernel.BV), **arrays, o=o, **states, **common)
    return draft.plan(draft.results(problem, o, final), mode="recurrent", tiles=kernel.tiles)


PLANS = {"recurrent": plan_recurrent, "chunk": gated_forward.plan_in_chunks, "staged": stages.plan_all_stages}
