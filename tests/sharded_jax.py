"""The JAX functions under `shard_map`, on four devices: JAX makes four of a host when it starts, so this is a process.

Prints the name of each case that holds; tests/test_distributed.py runs it.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from reference import assert_close

from linattn_np.interop import jax as interop

jax.config.update("jax_enable_x64", True)
MESH = jax.make_mesh((4,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
B, H, T, K, V = 4, 4, 24, 5, 3


def draw(name, rng):
    """Arrays of a call, in float64, with an initial state at the end."""
    q, k, g = rng.standard_normal((3, B, H, T, K))
    v, state = rng.standard_normal((B, H, T, V)), rng.standard_normal((B, H, K, V))
    gates = {"gla": [-np.exp(g)], "rwkv6": [-np.exp(g), rng.standard_normal((H, K))],
             "simple_gla": [-np.exp(g[..., 0])], "retention": [], "linear_attention": []}
    return [q, k, v, *gates[name], state]


def loss(function, weights):
    """A number of all results of a call, and its gradients."""
    def of(*inputs):
        return sum((x * w).sum() for x, w in zip(function(*inputs), weights, strict=True))
    return jax.jit(jax.value_and_grad(of, argnums=tuple(range(6))[:function.count]))


def calls(name, **options):
    def call(*inputs):
        *arrays, state = inputs
        return getattr(interop, name)(*arrays, initial_state=state, output_final_state=True, **options)
    if name == "retention":         # its default decays differ by head, of which a device has its own alone
        options["gamma"] = 0.8
    call.count = {"gla": 5, "rwkv6": 6, "simple_gla": 5}.get(name, 4)
    return call


def compare(case, found, wanted):
    for place, (x, y) in enumerate(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)):
        assert_close(f"{case}, number {place}", np.atleast_1d(x), np.atleast_1d(y), "float64", factor=10)
    print(case, flush=True)


def sharded(call, inputs, state, outputs, check=True):
    mapped = jax.shard_map(call, mesh=MESH, in_specs=(*inputs, state), out_specs=(outputs, state), check_vma=check)
    mapped.count = call.count
    return mapped


def over_batch_and_heads(name, rng, axis, spec, check):
    """Every array cut along batch or heads; rwkv6's u is the same on every device, or cut with the heads."""
    inputs = draw(name, rng)
    weights = rng.standard_normal((B, H, T, V)), rng.standard_normal((B, H, K, V))
    u = (P("devices") if axis == "heads" else P(),) * (name == "rwkv6")
    specs = (*(spec,) * (len(inputs) - 1 - len(u)), *u)
    found = loss(sharded(calls(name), specs, spec, spec, check), weights)(*inputs)
    compare(f"{name} over {axis}{'' if check else ' unchecked'}", found, loss(calls(name), weights)(*inputs))


def main():
    rng = np.random.default_rng(0)
    for name in ("gla", "rwkv6", "simple_gla", "retention", "linear_attention"):
        over_batch_and_heads(name, rng, "batch", P("devices"), True)
        over_batch_and_heads(name, rng, "heads", P(None, "devices"), True)
    over_batch_and_heads("rwkv6", rng, "batch", P("devices"), False)


if __name__ == "__main__":
    main()
