"""Raw CUDA through CuPy: the kernels of `kernels_cu`, compiled by NVRTC at first use."""

from __future__ import annotations

import sys
from functools import cache

from . import attention, gradients, plans, recording
from .build import CupyDevice

DEVICE = CupyDevice()
LEAST_CAPABILITY = 80           # cp.async and tf32 products came with sm_80


def why_not(problem) -> str | None:
    if problem.home == "host":
        return "the arrays are on the host"
    memo = {} if problem.memo is None else problem.memo
    if "unsupported" not in memo:
        memo["unsupported"] = too_old(ordinal(problem)) or plans.unsupported(problem) or gradients.unsupported(problem)
    return memo["unsupported"]


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


def run(problem):
    return at_home(problem, recording.run, problem, DEVICE)


def vjp(problem):
    """((o, final state parts or None), pull); one backward serves every mode."""
    if problem.op.name == attention.NAME:
        result, pull = at_home(problem, attention.vjp, problem, DEVICE)
        return result, lambda do, dht: at_home(problem, pull, do, dht)
    return run(problem), pullback(problem)


def pullback(problem):
    """That of `vjp`; the operators' backward computes what it needs of the forward pass itself."""
    if problem.op.name == attention.NAME:
        return vjp(problem)[1]
    return lambda do, dht: at_home(problem, recording.pullback, problem, DEVICE, do, dht)


def at_home(problem, function, *arguments):
    """`function(*arguments)` with the arrays' device as the current one."""
    cuda = sys.modules["cupy"].cuda
    if cuda.runtime.getDevice() == ordinal(problem):
        return function(*arguments)
    with cuda.Device(ordinal(problem)):
        return function(*arguments)


def describe(problem, bytes_moved) -> dict:
    operator = problem.op.name in (*plans.OPERATORS, *plans.OWN)
    bandwidth = peak_bandwidth(ordinal(problem))
    kernels = plans.sweeps_of(problem, DEVICE) if problem.gradient else plans.kernels_of(problem, DEVICE)
    return {
        "mode": plans.mode_of(problem) if operator else None,
        "kernels": tuple(f"{kernel.file}.cu: {kernel.expression}" for kernel in kernels),
        "tiles": plans.tiles_of(problem, DEVICE),
        "copies": plans.copies_of(problem, DEVICE),
        "scratch": plans.scratch(problem, DEVICE) if problem.gradient else None,
        "floor_ms": bytes_moved / bandwidth * 1e3 if bandwidth else None,
    }


def peak_bandwidth(device: int) -> float:
    """Bytes a second that the memory moves at its clock, both edges; 0 where the driver does not say."""
    attributes = sys.modules["cupy"].cuda.Device(device).attributes
    return attributes.get("MemoryClockRate", 0) * 1e3 * 2 * attributes.get("GlobalMemoryBusWidth", 0) / 8
