"""Operators on arrays whose sharding over devices is known while JAX traces: each device computes its own part.

For a callback XLA would gather all arrays on every device. `jax.experimental.custom_partitioning` does not help,
because in JAX 0.10 it loses the callbacks inside. The sharding of arrays outside of `jit`, and of arrays on a mesh with
explicit axes, is known before compilation, so that `jax.shard_map` can run the callback on each device.
"""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding, PartitionSpec


def over_devices(run, problem, arrays, state):
    """run(arrays, state) on every device's sequences and heads; None if no array is sharded, or inside of `shard_map`.

    problem : the problem of the whole call. ContractError if arrays are sharded along other axes than batch and heads

    Meshes are not compared: of arrays on several meshes JAX moves some to the last one's, or raises a ValueError.
    """
    of_arrays, of_state, of_o = axes_of(problem)
    names = [*problem.op.arrays, *["initial_state"] * len(state or ())]
    inputs = [*of_arrays, *(of_state if state else ())]
    mesh, sharded = None, {}
    for name, axes, x in zip(names, inputs, [*arrays, *(state or ())], strict=True):
        sharding = sharding_of(x)
        if sharding is None:
            continue
        mesh = sharding.mesh
        for axis, mesh_axis in zip(axes, sharding.spec):
            if mesh_axis is None:
                continue
            check(problem, name, axis, mesh_axis, sharded)
            sharded[axis] = mesh_axis
    if not sharded:
        return None

    def specs(parts):
        return [PartitionSpec(*map(sharded.get, axes)) for axes in parts]

    results = [of_o, *(of_state if problem.output_final_state else ())]
    in_specs = specs(of_arrays), specs(of_state) if state else None
    mapped = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=tuple(specs(results)))
    return mapped(list(arrays), state and list(state))


def sharding_of(x):
    """The NamedSharding of a sharded array; None for any other array, and inside of `jax.shard_map`."""
    sharding = getattr(jax.typeof(x), "sharding", None)  # a tracer's type knows its Explicit axes only
    if not isinstance(x, jax.core.Tracer) and not any(getattr(sharding, "spec", ())):
        sharding = x.sharding  # an array's own, which has axes of type Auto, too
    # `shard_map` makes its mesh axes manual.
    if not isinstance(sharding, NamedSharding) or not any(sharding.spec) or getattr(sharding.mesh, "manual_axes", ()):
        return None
    return sharding


def check(problem, name, axis, mesh_axis, sharded):
    """ContractError if array `name` may not be sharded along `axis`, or if another array's axis is sharded otherwise.

    sharded : {letter of an axis: the mesh axis over which other arrays are sharded along it}
    """
    op, found = problem.op, f"is sharded over {mesh_axis!r} along {axis.upper()}"
    if axis not in free_axes(problem):
        ways_out = {
            "h": "whose decays differ by head: name one gamma for all",
            "b": "where sequences are packed: shard heads",
        }
        if "initial_state" in op.signature.parameters:  # softmax attention has none, and no axis_name
            ways_out["t"] = "expected a call inside of jax.shard_map with axis_name="
        op.refuse(name, f"{found}, {ways_out.get(axis, 'expected batch or heads')}")
    if sharded.get(axis, mesh_axis) != mesh_axis:
        op.refuse(name, f"{found}, but another array over {sharded[axis]!r}")


def axes_of(problem):
    """The axes of (the arrays, the state's parts, o) in the caller's order, as letters b, h, t, k, v. Heads of grouped
    values are h, too: a device with a part of the heads has the values of these heads."""
    op = problem.op

    def letters(axes, swapped=None):
        names = axes.lower().replace("n", "b").split()
        if swapped and max(swapped) < len(names):  # a normaliser's state, [N, H, K], has no fourth axis
            names[swapped[0]], names[swapped[1]] = names[swapped[1]], names[swapped[0]]
        return tuple(names)

    def of_tokens(axes):
        return letters(axes, (1, 2) if problem.layout == "bthd" and "T" in axes.split() else None)

    states = [letters(axes, (2, 3) if problem.state_v_first else None) for axes in op.state]
    return [of_tokens(axes) for axes in op.arrays.values()], states, of_tokens(op.out)


def free_axes(problem) -> frozenset[str]:
    """The axes that may be sharded: b unless sequences are packed, h unless the heads' constant decays differ."""
    log_decay = problem.options.get("log_decay")
    equal_decays = log_decay is None or (log_decay == log_decay[0]).all()
    return frozenset("h" * bool(equal_decays) + "b" * (not problem.varlen))
