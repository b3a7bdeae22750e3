"""Plans on a device: compiled once, then run for every call alike, whose arrays may be anywhere.

What an execution of a compiled plan does on the host: allocate the plan's buffers, find what was filled in for these
addresses, launch. Addresses and tensor maps stand where the plan's typed arguments say.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from ... import graph_capture
from ...array_kinds import signature
from .aligned_copies import with_fast_copies
from .arguments import Packed
from .kernel import padded
from .plan import (
    Buffer,
    Copy,
    Fill,
    Launch,
    Plan,
    Product,
    Upload,
    arrays_in,
    arrays_of,
    describe,
    describe_tree,
    forwards,
)

COMPILED = 16  # plans that are kept of calls alike: one for every stream, each with its own tables, and for every kind
# of gradients that a pullback is given
PLACES = 64  # sets of addresses whose arguments are kept: the layers of a model
ALIGNED = 256  # bytes on which a buffer starts


def plan_of(planner, problem, device, kept=()) -> Plan:
    """A planner's plan of a call, which goes on from what `plan_summary` kept."""
    return drawn(planner.plan, problem, device, **({"kept": kept} if kept else {}))


def summary_plan_of(planner, problem, device) -> Plan | None:
    """A planner's plan of a call without o."""
    return drawn(planner.plan_summary, problem, device)


def vjp_plan_of(planner, problem, device, do, dht, saved=(), kept=()) -> Plan:
    """A planner's plan of a pullback, which goes on from what `plan_summary_vjp` kept."""
    trees = {"do": do, "dht": dht, "saved": tuple(saved)} | ({"kept": kept} if kept else {})
    return drawn(planner.plan_vjp, problem.replace(out=None), device, **trees)


def summary_vjp_plan_of(planner, problem, device, do, saved) -> Plan | None:
    """A planner's plan of what the tokens make of the final state's gradient."""
    return drawn(planner.plan_summary_vjp, problem.replace(out=None), device, do=do, saved=tuple(saved))


def drawn(draw, problem, device, **trees):
    """The plan that `draw` makes of the descriptions of a problem and of trees of arrays, or None."""
    described, memory = describe(problem, device)
    given = list(memory)
    trees = {name: describe_tree(name, tree, device, given) for name, tree in trees.items()}
    plan = draw(described, device, *trees.values())
    return plan and replace(with_fast_copies(plan), given=tuple(given))


def run(planner, problem, device, kept=()):
    """(results, what the pullback needs besides)."""
    return call(partial(plan_of, planner), problem, device, kept)


def summarise(planner, problem, device):
    """((final state from zero, decays), what `run` of the same arrays may go on from), or None."""
    if not hasattr(planner, "plan_summary"):
        return None
    return call(partial(summary_plan_of, planner), problem, device, kept_as="summaries")


def pull(planner, problem, device, do, dht, saved=(), kept=()):
    """Gradients in the order of the arrays, and those of the initial state or None."""
    return call(partial(vjp_plan_of, planner), problem.replace(out=None), device, do, dht, saved, kept)[0]


def summarise_vjp(planner, problem, device, do, saved=()):
    """((the initial state's gradient for a dht of zero, decays), what `pull` may go on from), or None."""
    if not hasattr(planner, "plan_summary_vjp"):
        return None
    plan = partial(summary_vjp_plan_of, planner)
    return call(plan, problem.replace(out=None), device, do, saved, kept_as="summaries_vjp")


def call(plan, problem, device, *trees, kept_as="plans"):
    """Run a call by the compiled plan of the first call like it on the same queue; calls are compared by description.

    None where there is no such plan. `kept_as` names the plans of one kind.
    """
    found, more = problem.memo, arrays_in(trees)
    kinds = [signature(x) for x in more]
    if found is None or None in kinds:
        compiled = compile_plan(plan(problem, device, *trees), device)
    else:
        plans, key = found.setdefault(kept_as, {}), (device, device.queue, *kinds)
        if key not in plans:
            alike = None
            if device.capturing:  # nothing can be sent: the tables of a call alike, on another queue, are there
                alike = next((x for (on, _, *of), x in plans.items() if on is device and of == kinds), None)
            if len(plans) >= COMPILED:
                plans.clear()
            plans[key] = alike or compile_plan(plan(problem, device, *trees), device)
        compiled = plans[key]
    return compiled and compiled([*arrays_of(problem), *more])


def compile_plan(plan, device):
    return plan and CompiledPlan(plan, device)


class CompiledPlan:
    """A plan on a device. Keeps none of the caller's arrays."""

    def __init__(self, plan: Plan, device):
        self.device, self.plan = device, plan
        device.compile(plan.kernels)
        tables = [step.table for step in plan.steps if isinstance(step, Upload)]
        self.tables = [device.upload(table.host) for table in tables]
        memories = [*plan.given, *plan.buffers, *tables]
        self.number = {memory: n for n, memory in enumerate(memories)}
        self.makers = [maker(buffer, device) for buffer in plan.buffers]
        self.addressed = len(plan.given) + len(plan.buffers)
        self.packed = {step: Packed(step.kernel.arguments, step.args, self.number) for step in plan.launches}
        self.result = self.reader((plan.results, plan.saved))
        kept = {self.number[x.memory] for x in arrays_in((plan.results, plan.saved))}
        self.hidden = [n for n in range(len(plan.given), len(memories)) if n not in kept]
        self.filled: dict = {}

    def __call__(self, given):
        """`given`: the caller's arrays, in the plan's order."""
        arrays = [*given, *[make() for make in self.makers]]
        addresses = tuple(map(self.device.pointer, arrays))
        arrays += self.tables
        commands = self.filled.get(addresses)
        if commands is None:
            if len(self.filled) >= PLACES:
                self.filled.clear()
            commands = self.filled[addresses] = self.fill(arrays)
        for command in commands:
            command(arrays)
        if self.hidden and self.device.capturing:
            lent, tables = self.device.lent, self.addressed
            graph_capture.in_graphs.extend(arrays[n] for n in self.hidden if n >= tables or not lent(arrays[n]))
        return self.result(arrays)

    def commands(self, arrays) -> list:
        """`fill` for who has the buffers too, and runs the commands again and again. They take None for arrays, which
        they only need to copy."""
        assert all(isinstance(step, (Launch, Product, Upload)) for step in self.plan.steps)
        return self.fill([*arrays, *self.tables])

    def fill(self, arrays) -> list:
        """The commands of an execution on memory at these addresses, in order; each is a function of the arrays."""
        addresses = np.array([self.device.pointer(x) for x in arrays], np.int64)
        return [command for step in self.plan.steps if (command := self.command(step, arrays, addresses))]

    def command(self, step, arrays, addresses):
        if isinstance(step, Launch):
            if not step.blocks:
                return None
            args = self.packed[step].filled(
                addresses,
                lambda box: self.device.tensor_map(
                    self.reader(forwards(box.array))(arrays), box.columns, box.tokens, box.swizzled, box.heads
                ),
            )
            smem = step.kernel.shared_bytes + step.more_shared
            launch = self.device.prepared(step.kernel, step.blocks, args, smem, step.together)
            return lambda arrays: launch()
        if isinstance(step, Product):
            multiply = self.device.product(*self.reader((step.w, step.x, step.y))(arrays), step.add)
            return lambda arrays: multiply()
        if isinstance(step, Copy):
            source, target = self.reader(step.source), self.reader(step.target)
            if step.is_of_bytes:
                return lambda arrays: self.device.copy(source(arrays), target(arrays))
            return lambda arrays: target(arrays).__setitem__(..., source(arrays))
        if isinstance(step, Fill):
            target = self.reader(step.target)
            return lambda arrays: self.device.fill(target(arrays))
        return None  # a table's upload was done at once, for all executions

    def reader(self, tree):
        """A function of an execution's arrays: the tree with arrays of the device for those of the plan."""
        if tree is None:
            return lambda arrays: None
        if isinstance(tree, (tuple, list)):
            parts = [self.reader(part) for part in tree]
            return lambda arrays: tuple([part(arrays) for part in parts])
        number, view = self.number[tree.memory], self.device.view
        if tree.is_whole:
            return lambda arrays: arrays[number]
        return lambda arrays: view(arrays[number], tree.shape, tree.strides, tree.dtype, tree.offset)


def allocated(buffers, device) -> list:
    """The buffers in one piece of memory, which comes back to the same place sooner than many do."""
    places = np.cumsum([0, *(padded(buffer.nbytes, ALIGNED) for buffer in buffers)])
    memory = device.empty((int(places[-1]),), np.uint8)
    return [
        device.view(memory, buffer.shape, buffer.strides, buffer.dtype, int(at)) for buffer, at in zip(buffers, places)
    ]


def maker(buffer: Buffer, device):
    """A function that allocates the buffer, with its axes in their order in memory."""
    if buffer.axes == tuple(range(len(buffer.axes))):
        return partial(device.empty, buffer.shape, buffer.dtype)
    shape, back = (
        tuple(buffer.shape[axis] for axis in buffer.axes),
        tuple(map(buffer.axes.index, range(len(buffer.axes)))),
    )
    return lambda: device.empty(shape, buffer.dtype).transpose(back)
