"""Raw CUDA through CuPy: the kernels of `kernels_cu`, compiled by NVRTC at first use.

An operator's planner is a module with

    unsupported(problem) -> str | None              why its kernels cannot compute a problem
    plan(problem, device) -> Plan                   of (o, final state parts or None); a step's o; a stage's result
    plan_summary(problem, device) -> Plan | None    where there is one: of what tokens make of any state, without o;
                                                    what it saves is a last argument of `plan` for the same tokens
    plan_summary_vjp(problem, device, do, saved)    the same of the final state's gradient, for `plan_vjp`
    plan_vjp(problem, device, do, dht, saved)       of (gradients of the arrays, of the initial state's parts or None)
    saved(problem)                                  (shape, dtype) of what `plan` saves for `plan_vjp`, if anything
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
    SOFTMAX,
    STAGES,
    STEPS_OF_SEVERAL,
)
from ...kernel_choice import portable
from . import delta, delta_step, execute, gated, scalar_decay, softmax, stages, step, step_of_several, value_gate
from .device import LEAST_CAPABILITY, CupyDevice
from .plan import Plan, caller_array

PLANNERS = (
    dict.fromkeys(GATED, gated)
    | dict.fromkeys(SOFTMAX, softmax)
    | dict.fromkeys((SIMPLE_GLA, RETENTION, LINEAR_ATTENTION, NORMALIZED), scalar_decay)
    | dict.fromkeys(GATED_STEPS, step)
    | dict.fromkeys(STAGES, stages)
    | dict.fromkeys(DELTA_RULES, delta)
    | dict.fromkeys(DELTA_RULE_STEPS, delta_step)
    | dict.fromkeys(STEPS_OF_SEVERAL, step_of_several)
    | {GLA_VALUE_GATE: value_gate}
)
DEVICE, PORTABLE = CupyDevice(), CupyDevice(portable=True)
KEEPS = True  # what `summarise` has computed, for `run` and `vjp`


def chosen_device() -> CupyDevice:
    """The device that plans and launches: the portable kernels' where they were asked for, else CuPy's."""
    return PORTABLE if portable() else DEVICE


# -- which problems ----------------------------------------------------------------------------------------------------
def why_not(problem) -> str | None:
    if problem.home == "host":
        return "the arrays are on the host"
    memo = {} if problem.memo is None else problem.memo
    if "unsupported" not in memo:
        memo["unsupported"] = too_old(ordinal(problem)) or unsupported(problem)
    return memo["unsupported"]


def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem, wherever its arrays are; None when they can."""
    if problem.op not in PLANNERS:
        return f"no kernel for {problem.op.name}; it has {', '.join(dict.fromkeys(op.name for op in PLANNERS))}"
    return PLANNERS[problem.op].unsupported(problem)


def ordinal(problem) -> int:
    """The device that the arrays live on."""
    return int(problem.home.removeprefix("cuda:"))


@cache
def too_old(device: int) -> str | None:
    """Device arrays exist, so a driver and CuPy do; what is left is whether they are new enough."""
    cupy = sys.modules["cupy"]
    if tuple(int(part) for part in cupy.__version__.split(".")[:2]) < (14, 2):
        return f"CuPy {cupy.__version__} is older than 14.2, whose kernel cache these kernels rely on"
    capability = int(cupy.cuda.Device(device).compute_capability)
    if capability < LEAST_CAPABILITY:
        return f"the device is sm_{capability}, older than sm_{LEAST_CAPABILITY}"
    return None


# -- calls -------------------------------------------------------------------------------------------------------------
def run(problem, kept=()):
    return at_home(problem, execute.run, PLANNERS[problem.op], problem, chosen_device(), kept)[0]


def vjp(problem, kept=()):
    """((o, final state parts or None), pull); one backward serves every mode."""
    at_home(problem, compile_pullback, problem, chosen_device())
    result, saved = at_home(problem, execute.run, PLANNERS[problem.op], problem, chosen_device(), kept)
    return result, Pull(problem, saved)


def summarise(problem):
    """((final state from zero, decays), kept) of a call without o, or None: see `plan_summary`."""
    return at_home(problem, execute.summarise, PLANNERS[problem.op], problem, chosen_device())


def compile_pullback(problem, device):
    """Has other threads compile what the pullback launches, at the first of calls alike: beside the forward kernels."""
    if problem.memo is None or "compiles" in problem.memo:
        return
    problem.memo["compiles"] = True
    device.compile(plan_of(problem, device).kernels)


def pullback(problem):
    """The pullback of `vjp`, without the forward pass if the backward pass needs nothing of it."""
    return vjp(problem)[1] if hasattr(PLANNERS[problem.op], "saved") else Pull(problem, ())


class Pull:
    """The pullback of a problem on its device, by the kernels that were asked for when it was made."""

    def __init__(self, problem, saved):
        self.problem, self.saved, self.device = problem, saved, chosen_device()

    def __call__(self, do, dht, kept=()):
        """(gradients of the arrays, of the initial state's parts or None)."""
        return self.at_home(execute.pull, do, dht, self.saved, kept)

    def summarise(self, do):
        """((the initial state's gradient for a dht of zero, decays), kept), or None: see `plan_summary_vjp`."""
        return self.at_home(execute.summarise_vjp, do, self.saved)

    def at_home(self, function, *arguments):
        return at_home(self.problem, function, PLANNERS[self.problem.op], self.problem, self.device, *arguments)


def at_home(problem, function, *arguments):
    """`function(*arguments)` with the arrays' device as the current one."""
    cuda = sys.modules["cupy"].cuda
    if cuda.runtime.getDevice() == ordinal(problem):
        return function(*arguments)
    with cuda.Device(ordinal(problem)):
        return function(*arguments)


# -- what a call would do ----------------------------------------------------------------------------------------------
def plan_of(problem, device) -> Plan:
    """The plan of a call, or of its pullback where a gradient is asked for; gradients of its results lie as these
    would."""
    planner = PLANNERS[problem.op]
    if not problem.gradient:
        return execute.plan_of(planner, problem, device)
    do = caller_array("do", problem.shape(problem.op.out), problem.dtype)
    saved = [caller_array("saved", *part) for part in planner.saved(problem)] if hasattr(planner, "saved") else ()
    return execute.vjp_plan_of(planner, problem, device, do, None, saved)


def kernels_of(problem, device) -> tuple:
    """The kernels that a call launches, and those of its pullback where a gradient is asked for."""
    calls = [problem.replace(gradient=False), problem] if problem.gradient else [problem]
    return tuple(kernel for call in calls for kernel in plan_of(call, device).kernels)


def warm_up(problem):
    device = chosen_device()
    at_home(problem, lambda: device.wait_for(kernels_of(problem, device)))


def describe(problem, bytes_moved) -> dict:
    plan, bandwidth = at_home(problem, plan_of, problem, chosen_device()), peak_bandwidth(ordinal(problem))
    return {
        "mode": plan.mode,
        "kernels": tuple(f"{kernel.file}.cu: {kernel.expression}" for kernel in plan.kernels),
        "tiles": plan.tiles,
        "reasons": plan.against,
        "copies": plan.copies,
        "scratch": plan.scratch if problem.gradient else None,
        "floor_ms": bytes_moved / bandwidth * 1e3 if bandwidth else None,
    }


def peak_bandwidth(device: int) -> float:
    """Bytes a second that the memory moves at its clock, both edges; 0 where the driver does not say."""
    attributes = sys.modules["cupy"].cuda.Device(device).attributes
    return attributes.get("MemoryClockRate", 0) * 1e3 * 2 * attributes.get("GlobalMemoryBusWidth", 0) / 8
