"""Compiles plans for a device and runs them.

A plan is compiled once and then run for all calls with equal descriptions (shapes, dtypes, strides, options), whatever
their addresses. Each execution allocates the plan's buffers, fills the addresses into the kernels' argument structs
(or finds the structs of an earlier execution with these addresses) and launches the kernels.
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

# compiled plans kept for calls of one description: each stream has its own, and so has each description of the
# gradients that a pullback gets
COMPILED = 16
PLACES = 64  # sets of addresses per compiled plan whose argument structs are kept, such as one for each model layer
ALIGNED = 256  # bytes; buffers start at multiples of it


def plan_of(planner, problem, device, kept=()) -> Plan:
    """A planner's plan of a call; `kept` are the arrays that a plan of `plan_summary` has saved, if there was one."""
    return drawn(planner.plan, problem, device, **({"kept": kept} if kept else {}))


def summary_plan_of(planner, problem, device) -> Plan | None:
    """A planner's plan of a call's effect on the state, without o."""
    return drawn(planner.plan_summary, problem, device)


def vjp_plan_of(planner, problem, device, do, dht, saved=(), kept=()) -> Plan:
    """A planner's plan of a pullback; `kept` are the arrays that a plan of `plan_summary_vjp` has saved, if any."""
    trees = {"do": do, "dht": dht, "saved": tuple(saved)} | ({"kept": kept} if kept else {})
    return drawn(planner.plan_vjp, problem.replace(out=None), device, **trees)


def summary_vjp_plan_of(planner, problem, device, do, saved) -> Plan | None:
    """A planner's plan of the initial state's gradient alone."""
    return drawn(planner.plan_summary_vjp, problem.replace(out=None), device, do=do, saved=tuple(saved))


def drawn(draw, problem, device, **trees):
    """The plan that the planner's function `draw` makes from descriptions of the problem and the trees of arrays.

    None if `draw` returns None.
    """
    described_problem, memory = describe(problem, device)
    given = list(memory)
    trees = {name: describe_tree(name, tree, device, given) for name, tree in trees.items()}
    plan = draw(described_problem, device, *trees.values())
    return plan and replace(with_fast_copies(plan), given=tuple(given))


def run(planner, problem, device, kept=()):
    """Runs a call: (results, the arrays saved for the pullback)."""
    return call(partial(plan_of, planner), problem, device, kept)


def summarise(planner, problem, device):
    """((final state from the state 0, total decays), arrays that `run` takes as `kept`); None without such a plan."""
    if not hasattr(planner, "plan_summary"):
        return None
    return call(partial(summary_plan_of, planner), problem, device, kept_as="summaries")


def pull(planner, problem, device, do, dht, saved=(), kept=()):
    """(the gradients in the order of the problem's arrays, the initial state's gradient or None)."""
    return call(partial(vjp_plan_of, planner), problem.replace(out=None), device, do, dht, saved, kept)[0]


def summarise_vjp(planner, problem, device, do, saved=()):
    """((the initial state's gradient for dht = 0, total decays), arrays that `pull` takes as `kept`), or None."""
    if not hasattr(planner, "plan_summary_vjp"):
        return None
    plan = partial(summary_vjp_plan_of, planner)
    return call(plan, problem.replace(out=None), device, do, saved, kept_as="summaries_vjp")


def call(plan, problem, device, *trees, kept_as="plans"):
    """Runs a call by its compiled plan, compiling it if no call of this description has run on this queue before.

    `plan` makes the plan; None is returned if it makes none. `kept_as`: the kind of plan, a key of the problem's memo.
    """
    memo, tree_arrays = problem.memo, arrays_in(trees)
    kinds = [signature(x) for x in tree_arrays]
    if memo is None or None in kinds:
        compiled = compile_plan(plan(problem, device, *trees), device)
    else:
        plans, key = memo.setdefault(kept_as, {}), (device, device.queue, *kinds)
        if key not in plans:
            similar = None
            if device.capturing:  # uploads are impossible: use a plan of another queue, whose tables are on the device
                similar = next((x for (on, _, *of), x in plans.items() if on is device and of == kinds), None)
            if len(plans) >= COMPILED:
                plans.clear()
            plans[key] = similar or compile_plan(plan(problem, device, *trees), device)
        compiled = plans[key]
    return compiled and compiled([*arrays_of(problem), *tree_arrays])


def compile_plan(plan, device):
    return plan and CompiledPlan(plan, device)


class CompiledPlan:
    """A plan compiled for a device. It holds none of the caller's arrays."""

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
        """Runs the plan on `given`, the caller's arrays in the plan's order; returns (results, saved arrays)."""
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
        """The commands for a caller who also owns the plan's buffers and runs the commands many times.

        Each command may be called with None, because none of them is a copy, which alone reads its argument.
        """
        assert all(isinstance(step, (Launch, Product, Upload)) for step in self.plan.steps)
        return self.fill([*arrays, *self.tables])

    def fill(self, arrays) -> list:
        """The commands, in order, of an execution on arrays at these addresses; each is called with the arrays."""
        addresses = np.array([self.device.pointer(x) for x in arrays], np.int64)
        return [command for step in self.plan.steps if (command := self.command(step, arrays, addresses))]

    def command(self, step, arrays, addresses):
        """The command of one step; None if there is nothing to do."""
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
        return None  # tables were uploaded when the plan was compiled

    def reader(self, tree):
        """A function that returns `tree` with the plan's arrays replaced by an execution's arrays."""
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
    """The buffers as views of one allocation, which gets the same address again more often than many would."""
    places = np.cumsum([0, *(padded(buffer.nbytes, ALIGNED) for buffer in buffers)])
    memory = device.empty((int(places[-1]),), np.uint8)
    return [
        device.view(memory, buffer.shape, buffer.strides, buffer.dtype, int(at)) for buffer, at in zip(buffers, places)
    ]


def maker(buffer: Buffer, device):
    """A function that allocates the buffer and returns it with its axes as the plan has them, not as in memory."""
    if buffer.axes == tuple(range(len(buffer.axes))):
        return partial(device.empty, buffer.shape, buffer.dtype)
    shape, back = (
        tuple(buffer.shape[axis] for axis in buffer.axes),
        tuple(map(buffer.axes.index, range(len(buffer.axes)))),
    )
    return lambda: device.empty(shape, buffer.dtype).transpose(back)
