"""Compiles plans (see `plan`) for a device and runs them.

A plan is compiled once. It then serves all calls with the same shapes, dtypes, strides and options, whatever their
addresses. Each execution allocates the plan's buffers, writes the addresses into the kernels' argument structs (or
finds the structs of an earlier execution with these addresses) and launches the kernels.

A planner is a module with the function `plan`, and maybe `plan_vjp`, `plan_summary` and `plan_summary_vjp`: such as
`gated`. A device is an object like `device.CupyDevice`; the tests' emulator is another one. do and dht are the
gradients of a call's o and final state.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np

from ... import graph_capture
from ...array_kinds import signature
from . import long_sequence
from .aligned_copies import with_fast_copies
from .arguments import Packed
from .arithmetic import padded
from .plan import Buffer, CallerArray, Copy, Fill, Launch, Plan, Product, Upload, arrays_in, as_array, mode_of

# The most compiled plans that are stored for calls with one description. There is a plan for each stream, and for each
# description of the do and dht that a pullback gets.
COMPILED_PLANS = 16
# The most sets of addresses for which a compiled plan stores the commands: a model may use one set per layer.
ADDRESS_SETS = 64
BUFFER_ALIGNMENT = 256  # bytes; buffers that share an allocation start at multiples of it


def plan_of(planner, name, problem, device, **trees):
    """The plan that the planner's function `name` makes for descriptions of the call and of further arrays, with large
    copies made faster; None if it has no such function. `trees`: nested tuples of arrays, in the order of the
    function's parameters; empty `summaries` are left out, since many planners take none. The plan's given arrays are
    those of `arrays_of`, then those of `trees`."""
    if not hasattr(planner, name):
        return None
    described_problem, memory = describe(problem, device)
    given = list(memory)
    described = [
        describe_tree(name, tree, device, given) for name, tree in trees.items() if name != "summaries" or tree
    ]
    of_operator = name in ("plan", "plan_vjp") and hasattr(planner, "plan_vjp") and not trees.get("summaries")
    others_know_sequences = problem.gradient if name == "plan" else trees.get("dht") or trees.get("saved")
    if of_operator and not others_know_sequences:
        described_problem = long_sequence.without_empty_ones(described_problem)
    if of_operator and (ranges := long_sequence.parts(described_problem, device)):
        plan = getattr(long_sequence, name)(ranges, planner, described_problem, device, *described[:2])
    else:
        plan = getattr(planner, name)(described_problem, device, *described)
    return plan and replace(with_fast_copies(plan), given=tuple(given))


def run(planner, name, problem, device, **trees):
    """Compiles and executes a plan of `plan_of`; returns (its results, its saved arrays), or None if there is no plan.

    The plan is the one in the call's memo for this function, this device, its queue (stream and thread) and arrays like
    these. `problem.memo` is a dictionary shared by calls with equal descriptions, or None if nothing may be stored.
    """
    memo, call_arrays, tree_arrays = problem.memo, arrays_of(problem), arrays_in(tuple(trees.values()))
    signatures = [signature(x) for x in tree_arrays]
    if memo is None or None in signatures:
        compiled = compiled_plan(planner, name, problem, device, trees)
    else:
        plans, key = memo.setdefault("plans", {}), (device, device.queue, name, *signatures)
        if key not in plans:
            of_other_queue = None
            if device.capturing:  # nothing can be uploaded now: take a plan whose tables are on the device already
                of_other_queue = next(
                    (plan for (owner, _, *others), plan in plans.items() if (owner, *others) == (device, *key[2:])),
                    None,
                )
            if len(plans) >= COMPILED_PLANS:
                plans.clear()
            plans[key] = of_other_queue or compiled_plan(planner, name, problem, device, trees)
        compiled = plans[key]
    return compiled and compiled([*call_arrays, *tree_arrays])


def compiled_plan(planner, name, problem, device, trees):
    """The `CompiledPlan` of a call, or None if there is no plan."""
    plan = plan_of(planner, name, problem, device, **trees)
    return plan and CompiledPlan(plan, device)


class CompiledPlan:
    """A plan compiled for a device. It holds none of the caller's arrays.

    The *arrays of an execution* are a list: the given arrays, the plan's buffers, its tables. A *command* is a function
    of this list that enqueues one step on the device.
    """

    def __init__(self, plan: Plan, device):
        self.device, self.plan = device, plan
        device.compile(plan.kernels)
        tables = [step.table for step in plan.steps if isinstance(step, Upload)]
        self.tables = [device.upload(table.host) for table in tables]
        memories = [*plan.given, *plan.buffers, *tables]
        self.index_of = {memory: n for n, memory in enumerate(memories)}  # among the arrays of an execution
        self.allocators = [allocator(buffer, device) for buffer in plan.buffers]
        self.first_table = len(plan.given) + len(plan.buffers)  # an index among the arrays of an execution
        self.packed = {step: Packed(step.kernel.arguments, step.args, self.index_of) for step in plan.launches}
        self.result = self.reader((plan.results, plan.saved))
        returned = {self.index_of[x.memory] for x in arrays_in((plan.results, plan.saved))}
        # the arrays that the caller neither gives nor gets
        self.internal = [index for index in range(len(plan.given), len(memories)) if index not in returned]
        self.commands_by_address: dict = {}

    def __call__(self, given):
        """Runs the plan on `given`, the arrays of `plan.given` in its order; returns (results, saved arrays)."""
        arrays = [*given, *[allocate() for allocate in self.allocators]]
        addresses = tuple(map(self.device.pointer, arrays))
        arrays += self.tables
        commands = self.commands_by_address.get(addresses)
        if commands is None:
            if len(self.commands_by_address) >= ADDRESS_SETS:
                self.commands_by_address.clear()
            commands = self.commands_by_address[addresses] = self.commands_at(arrays)
        for command in commands:
            command(arrays)
        if self.internal and self.device.capturing:  # the graph uses these arrays whenever it is replayed
            lent, first_table = self.device.lent, self.first_table
            graph_capture.in_graphs.extend(arrays[n] for n in self.internal if n >= first_table or not lent(arrays[n]))
        return self.result(arrays)

    def commands(self, arrays) -> list:
        """The commands on `arrays` (those of `plan.given` and `plan.buffers`), for a caller who runs them many times.

        Each may be called with None in place of the arrays: only copies and fills read them, and there are none.
        """
        assert all(isinstance(step, (Launch, Product, Upload)) for step in self.plan.steps)
        return self.commands_at([*arrays, *self.tables])

    def commands_at(self, arrays) -> list:
        """The commands of all steps for `arrays` and any other arrays at the same addresses."""
        addresses = np.array([self.device.pointer(x) for x in arrays], np.int64)
        return [command for step in self.plan.steps if (command := self.command(step, arrays, addresses))]

    def command(self, step, arrays, addresses):
        """The command of one step, or None if the step needs none. `addresses`: those of `arrays`."""
        if isinstance(step, Launch):
            if not step.blocks:
                return None
            args = self.packed[step].filled(addresses, lambda tensor_map: self.encoded(tensor_map, arrays))
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

    def encoded(self, tensor_map, arrays) -> bytes:
        """A `plan.TensorMap` as the driver's CUtensorMap. The driver takes no negative strides, so reversed tokens are
        described in the order of their addresses."""
        x = self.reader(tensor_map.array.with_ascending_tokens)(arrays)
        return self.device.tensor_map(x, tensor_map.columns, tensor_map.tokens, tensor_map.swizzled, tensor_map.heads)

    def reader(self, tree):
        """A function of the arrays of an execution that returns `tree`, nested tuples of `plan.Array` and None, with an
        array on the device in place of each `plan.Array`."""
        if tree is None:
            return lambda arrays: None
        if isinstance(tree, (tuple, list)):
            parts = [self.reader(part) for part in tree]
            return lambda arrays: tuple([part(arrays) for part in parts])
        index, view = self.index_of[tree.memory], self.device.view
        if tree.covers_memory:
            return lambda arrays: arrays[index]
        return lambda arrays: view(arrays[index], tree.shape, tree.strides, tree.dtype, tree.offset)


class OneAllocation:
    """Groups of buffers, by name, that are allocated at once. A single allocation gets an address that was used before
    more often than many allocations do, and then stored launches can be used again."""

    def __init__(self, device, **groups):
        # Of each group: the places of its arrays in the allocation.
        self.device, self.nbytes, self.places = device, 0, {}
        for name, buffers in groups.items():
            self.places[name] = []
            for buffer in buffers:
                self.places[name].append((buffer.shape, buffer.strides, buffer.dtype, self.nbytes))
                self.nbytes += padded(buffer.nbytes, BUFFER_ALIGNMENT)

    def allocated(self):
        """The memory of all groups."""
        return self.device.empty((self.nbytes,), np.uint8)

    def arrays(self, group, memory) -> list:
        """The buffers of a group, as arrays in `memory`."""
        return [self.device.view(memory, *place) for place in self.places[group]]


def allocator(buffer: Buffer, device):
    """A function that allocates a buffer and returns it as an array of the buffer's shape and strides."""
    if buffer.axes == tuple(range(len(buffer.axes))):
        return partial(device.empty, buffer.shape, buffer.dtype)
    shape_in_memory = tuple(buffer.shape[axis] for axis in buffer.axes)
    to_callers_axes = tuple(map(buffer.axes.index, range(len(buffer.axes))))
    return lambda: device.empty(shape_in_memory, buffer.dtype).transpose(to_callers_axes)


# -- descriptions of calls ---------------------------------------------------------------------------------------------
def arrays_of(problem) -> list:
    """The arrays on the device that the caller of a checked call gave, in the order of `describe`."""
    arrays = [*problem.arrays.values(), *(problem.initial_state or ())]
    if problem.out is not None:
        arrays.append(problem.out)
    return arrays + [problem.options[name] for name in array_options(problem)]


def array_options(problem) -> list[str]:
    """The names of the options that are arrays on the device. Only steps (one-token operators) have such options; their
    `slots` may also be an array on the host."""
    option = problem.options.get
    names = [name for name in ("state", "pending", "accepted") if option(name) is not None]
    return names if isinstance(option("slots"), (type(None), np.ndarray)) else [*names, "slots"]


def describe(problem, device) -> tuple:
    """(a checked call as planners get it: with an `Array` in place of each array, and a mode in place of "auto"; a
    `CallerArray` for each array, in the order of `arrays_of`)."""
    given: list[CallerArray] = []

    def described(name, x):
        return describe_tree(name, x, device, given)

    arrays = {name: described(name, x) for name, x in problem.arrays.items()}
    initial = problem.initial_state and described("initial_state", problem.initial_state)
    out, options = described("out", problem.out), dict(problem.options)
    for name in array_options(problem):
        options[name] = described(name, options[name])
    assert [x.shape for x in given] == [x.shape for x in arrays_of(problem)]
    described_problem = problem.replace(
        arrays=arrays, initial_state=initial, out=out, options=options, mode=mode_of(problem), memo=None, example=None
    )
    return described_problem, tuple(given)


def describe_array(name, x, device) -> CallerArray:
    """The description of an array `x` on the device; `x` itself if it is a description already."""
    if isinstance(x, CallerArray):
        return x
    return CallerArray(name, tuple(x.shape), tuple(x.strides), x.dtype, device.pointer(x) % 16)


def describe_parts(device, **parts: dict) -> tuple[SimpleNamespace, tuple[CallerArray, ...], list]:
    """Descriptions of arrays in named groups, for the plans of language models, which are no calls of an operator.

    `parts` is {group: {name: an array, nested tuples of arrays, or None}}. Returns (a namespace of namespaces, with an
    `Array` as `.group.name`; a `CallerArray` for each array; the arrays in the same order).
    """
    given: list[CallerArray] = []
    groups = {
        part: SimpleNamespace(**{name: describe_tree(name, x, device, given) for name, x in arrays.items()})
        for part, arrays in parts.items()
    }
    return SimpleNamespace(**groups), tuple(given), [x for part in parts.values() for x in arrays_in([*part.values()])]


def describe_tree(name, tree, device, given):
    """`tree` (an array, nested tuples of arrays, or None) with an `Array` in place of each array, whose `CallerArray`
    is appended to `given`."""
    if isinstance(tree, tuple):
        return tuple(describe_tree(name, part, device, given) for part in tree)
    if tree is None:
        return None
    given.append(describe_array(name, tree, device))
    return as_array(given[-1])
