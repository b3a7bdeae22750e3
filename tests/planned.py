"""Plans as tests ask for them: drawn and executed for one call alone, or by the plan of calls alike."""

import numpy as np
from emulator import EmulatedDevice

from linattn_np.backends import cupy
from linattn_np.backends.cupy import PLANNERS, execute


def plan_of(problem, device):
    """As `explain` sees it."""
    return cupy.plan_of(problem, device)


def run(problem, device):
    """By a plan of this call alone."""
    return replayed(problem.replace(memo=None), device)


def pull(problem, device, do, dht, saved=(), summaries=()):
    return replayed_pull(problem.replace(memo=None), device, do, dht, saved, summaries)


def replayed(problem, device):
    """By the plan of the first call alike."""
    return run_and_save(problem, device)[0]


def run_and_save(problem, device, summaries=()):
    """(results, the arrays saved for the pullback)."""
    return executed("plan", problem, device, summaries=summaries)


def replayed_pull(problem, device, do, dht, saved=(), summaries=()):
    trees = {"do": do, "dht": dht, "saved": saved, "summaries": summaries}
    return executed("plan_vjp", problem.replace(out=None), device, **trees)[0]


def executed(function, problem, device, **trees):
    """(results, saved arrays) of what a function of the planner plans; None if it has no such function."""
    return execute.run(PLANNERS[problem.op], function, problem, device, **trees)


def plan_of_call(problem, device):
    """Of the call itself, also if gradients are asked for, of which `plan_of` shows the pullback."""
    return execute.plan_of(PLANNERS[problem.op], "plan", problem, device)


def plan_of_pullback(problem, device, do, dht, saved=()):
    """Of a pullback of these arrays."""
    return execute.plan_of(PLANNERS[problem.op], "plan_vjp", problem, device, do=do, dht=dht, saved=saved)


def results(op, arrays, device, start=None, final=False, **arguments):
    """[o, the final state's parts] of host arrays on a device, back on the host."""
    problem = op.bind(
        [device.upload(x) for x in arrays],
        output_final_state=final,
        initial_state=None if start is None else device.upload(start),
        **arguments,
    )
    o, parts = run(problem, device)
    return [host(x) for x in (o, *(parts or ()))]


def host(x):
    """An array of a device as NumPy's."""
    return x if isinstance(x, np.ndarray) else x.get()


def compiled(problem) -> list:
    """The plans that calls like this one have drawn."""
    return list(problem.memo.get("plans", {}).values())


def names(plan) -> list[str]:
    return [kernel.name for kernel in plan.kernels]


def forbid_planning(monkeypatch, op):
    """From now on no plan of an operator may be drawn."""
    for name in ("plan", "plan_vjp"):
        monkeypatch.setattr(PLANNERS[op], name, None, raising=False)


class Noting(EmulatedDevice):
    """A device that notes what it makes and launches."""

    def __init__(self, capability=80):
        super().__init__(capability)
        self.made, self.launched = [], []

    def empty(self, shape, dtype):
        self.made.append(super().empty(shape, dtype))
        return self.made[-1]

    def launch(self, kernel, *launch):
        self.launched.append(kernel)
        return super().launch(kernel, *launch)
