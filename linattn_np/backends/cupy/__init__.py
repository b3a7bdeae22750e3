"""Raw CUDA through CuPy: the kernels of `kernels_cu`, compiled by NVRTC at first use.

An operator's planner is a module with these functions; each returns a `Plan` but for `unsupported` and `saved`. The
planners `step` (one token of each sequence) and `stages` (parts of an operator) have only `unsupported` and `plan`.

    unsupported(problem)                         why its kernels cannot compute a problem; None if they can
    plan(problem, device)                        the plan of (o, the final state's parts or None), of a step's o, or of
                                                 a stage's result
    plan_vjp(problem, device, do, dht, saved)    the plan of (the arrays' gradients, those of the initial state's parts
                                                 or None); `saved`: the arrays that the plan of the call has saved
    saved(problem, device)                       optional: (shape, dtype) of each of these arrays

and maybe, for sequences that are cut over ranks,

    plan_summary(problem, device)                the plan of what a call does to the state, without o, or None
    plan_summary_vjp(problem, device, do, saved) the plan of what the pullback does to the state's gradient, or None

The arrays that such a plan saves are its *summaries*: they spare the call, or its pullback, work that has been done. If
there are any, they are one more argument: `plan(problem, device, summaries)`, or
`plan_vjp(problem, device, do, dht, saved, summaries)`.
"""

from __future__ import annotations

import sys
from functools import cache

from ...declarations import (
    DELTA_RULE_STEPS,
    DELTA_RULES,
    GATED,
    GATED_STEPS,
    GLA_VALUE_GATE,
    LINEAR_ATTENTION,
    NORMALIZED,
    RETENTION,
    SIMPLE_GLA,
    SIMPLE_GLA_SHARED,
    SOFTMAX,
    STAGES,
    STEPS_OF_SEVERAL,
)
from ...kernel_choice import portable
from . import delta, execute, gated, long_sequence, scalar_decay, softmax, stages, step, value_gate
from .device import LEAST_CAPABILITY, CupyDevice
from .plan import Plan, caller_array

PLANNERS = (
    dict.fromkeys(GATED, gated)
    | dict.fromkeys(SOFTMAX, softmax)
    | dict.fromkeys((SIMPLE_GLA, SIMPLE_GLA_SHARED, RETENTION, LINEAR_ATTENTION, NORMALIZED), scalar_decay)
    | dict.fromkeys((*GATED_STEPS, *DELTA_RULE_STEPS, *STEPS_OF_SEVERAL), step)
    | dict.fromkeys(STAGES, stages)
    | dict.fromkeys(DELTA_RULES, delta)
    | {GLA_VALUE_GATE: value_gate}
)
OWN = (SIMPLE_GLA_SHARED,)  # derived operators that it computes itself
DEVICE, PORTABLE = CupyDevice(), CupyDevice(portable=True)
SAVES_SUMMARIES = True  # whether `summarise` may return arrays that `run` and `vjp` use again


def chosen_device() -> CupyDevice:
    """The device for which calls are planned: one with the portable kernels if `choose_kernels` asks for them."""
    return PORTABLE if portable() else DEVICE


# -- which problems the kernels can compute ----------------------------------------------------------------------------
def why_not(problem) -> str | None:
    """Why this backend cannot run a call; None when it can."""
    if problem.home == "host":
        return "the arrays are on the host"
    memo = {} if problem.memo is None else problem.memo
    if "unsupported" not in memo:
        memo["unsupported"] = why_too_old(ordinal(problem)) or unsupported(problem)
    return memo["unsupported"]


def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem, wherever its arrays are; None when they can."""
    if problem.op not in PLANNERS:
        return f"no kernel for {problem.op.name}; it has {', '.join(dict.fromkeys(op.name for op in PLANNERS))}"
    return PLANNERS[problem.op].unsupported(problem)


def ordinal(problem) -> int:
    """The number of the CUDA device that has the arrays."""
    return int(problem.home.removeprefix("cuda:"))


@cache
def why_too_old(device: int) -> str | None:
    """Why CuPy or a device is too old; None if neither is. Since there are arrays on the device, CuPy is imported."""
    cupy = sys.modules["cupy"]
    if tuple(int(part) for part in cupy.__version__.split(".")[:2]) < (14, 2):
        return f"CuPy {cupy.__version__} is older than 14.2, whose kernel cache these kernels rely on"
    capability = int(cupy.cuda.Device(device).compute_capability)
    if capability < LEAST_CAPABILITY:
        return f"the device is sm_{capability}, older than sm_{LEAST_CAPABILITY}"
    return None


# -- calls -------------------------------------------------------------------------------------------------------------
def run(problem, summaries=()):
    """(o, the final state's parts or None), a step's o, or a stage's results. `summaries`: those that `summarise` has
    returned for the same call, if it has run."""
    return executed("plan", problem, chosen_device(), summaries=summaries)[0]


def vjp(problem, summaries=()):
    """((o, the final state's parts or None), a `Pullback`), for a problem bound with gradient=True. All modes have the
    same pullback. `summaries` as in `run`."""
    at_home(problem, compile_pullback, problem, chosen_device())
    result, saved = executed("plan", problem, chosen_device(), summaries=summaries)
    return result, Pullback(problem, saved)


def summarise(problem):
    """((the final state for an initial state of zero, the products of the decays), summaries), without o; or None: see
    `gated_forward.plan_summary`."""
    return executed("plan_summary", problem, chosen_device())


def compile_pullback(problem, device):
    """Makes other threads compile the kernels of the pullback, once for all calls with equal descriptions (they share
    `problem.memo`), while the forward pass compiles its own. `problem` must have been bound with gradient=True."""
    if problem.memo is None or "pullback compiles" in problem.memo:
        return
    problem.memo["pullback compiles"] = True
    device.compile(plan_of(problem, device).kernels)


def pullback(problem):
    """The pullback of `vjp`. The forward pass runs for softmax attention alone, whose pullback needs what the call has
    saved: others compute that again, which takes less time than the call."""
    return vjp(problem)[1] if PLANNERS[problem.op] is softmax else Pullback(problem, ())


def saved_arrays(problem, device) -> tuple[tuple, ...]:
    """(shape, dtype) of each array that the plan of a call saves for its pullback."""
    planner, (described, _) = PLANNERS[problem.op], execute.describe(problem, device)
    if not hasattr(planner, "saved") or long_sequence.parts(described, device):
        return ()
    return planner.saved(described, device)


class Pullback:
    """The pullback of a call, on its device. It uses the kernels ("auto" or "portable") that were chosen when the call
    was made. `saved`: the arrays that the call's plan has saved for the pullback."""

    def __init__(self, problem, saved):
        self.problem, self.saved, self.device = problem.replace(out=None), saved, chosen_device()

    def __call__(self, do, dht, summaries=()):
        """(the arrays' gradients, those of the initial state's parts or None). `summaries`: those that
        `self.summarise` has returned for the same `do`, if it has run."""
        trees = {"do": do, "dht": dht, "saved": self.saved, "summaries": summaries}
        return executed("plan_vjp", self.problem, self.device, **trees)[0]

    def summarise(self, do):
        """((the initial state's gradient for a dht of zero, the products of the decays), summaries), or None: see
        `gated_backward.plan_summary_vjp`."""
        return executed("plan_summary_vjp", self.problem, self.device, do=do, saved=self.saved)


def executed(function: str, problem, device, **trees):
    """(results, saved arrays) of the plan that a function of the operator's planner makes; None if the planner lacks
    the function, or it returns None. `trees`: its arguments after the device, arrays or nested tuples of arrays."""
    return at_home(problem, execute.run, PLANNERS[problem.op], function, problem, device, **trees)


def at_home(problem, function, *arguments, **named):
    """`function(*arguments, **named)` with the arrays' device as the current one."""
    cuda = sys.modules["cupy"].cuda
    if cuda.runtime.getDevice() == ordinal(problem):
        return function(*arguments, **named)
    with cuda.Device(ordinal(problem)):
        return function(*arguments, **named)


# -- what a call would do ----------------------------------------------------------------------------------------------
def plan_of(problem, device) -> Plan:
    """The plan of a call, or of its pullback if its gradient is wanted. The pullback is planned for a contiguous do and
    for saved arrays that are contiguous."""
    planner = PLANNERS[problem.op]
    if not problem.gradient:
        return execute.plan_of(planner, "plan", problem, device)
    do = caller_array("do", problem.shape(problem.op.out), problem.dtype)
    saved = tuple(caller_array("saved", *part) for part in saved_arrays(problem, device))
    return execute.plan_of(planner, "plan_vjp", problem.replace(out=None), device, do=do, dht=None, saved=saved)


def kernels_of(problem, device) -> tuple:
    """The kernels that a call launches, and those of its pullback if its gradient is wanted."""
    calls = [problem.replace(gradient=False), problem] if problem.gradient else [problem]
    return tuple(kernel for call in calls for kernel in plan_of(call, device).kernels)


def warm_up(problem):
    """Compiles and loads the kernels of a call."""
    device = chosen_device()
    at_home(problem, lambda: device.wait_for(kernels_of(problem, device)))


def describe(problem, bytes_moved) -> dict:
    """What `explain` shows of a call that must move at least `bytes_moved` bytes to and from memory."""
    plan, bandwidth = at_home(problem, plan_of, problem, chosen_device()), peak_bandwidth(ordinal(problem))
    return {
        "mode": plan.mode,
        "kernels": tuple(f"{kernel.file}.cu: {kernel.expression}" for kernel in plan.kernels),
        "tiles": plan.tiles,
        "reasons": plan.reasons,
        "copies": plan.copies,
        "scratch": plan.scratch if problem.gradient else None,
        "floor_ms": bytes_moved / bandwidth * 1e3 if bandwidth else None,
    }


def peak_bandwidth(device: int) -> float:
    """Bytes per second that a device's memory moves; 0 if the driver does not tell its clock and width."""
    transfers_per_clock = 2  # one at each edge
    attributes = sys.modules["cupy"].cuda.Device(device).attributes
    clock, bytes_at_once = attributes.get("MemoryClockRate", 0) * 1e3, attributes.get("GlobalMemoryBusWidth", 0) / 8
    return clock * transfers_per_clock * bytes_at_once
