"""The JAX functions under `shard_map`, on four devices: JAX makes four of a host when it starts, so this is a process.
Or, as `python sharded_jax.py 2`, on so many cards, where XLA takes long to compile: fewer operators.

Prints the name of each case that holds; tests/test_distributed_engines.py runs it.
"""

import os
import sys
from functools import partial

COUNT = int((*sys.argv, 4)[1])
DELTA = ("kda", "rwkv7")
NAMES = ("gla", "rwkv6", "simple_gla", "retention")[: 2 if sys.argv[1:] else 4]
if sys.argv[1:]:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
else:
    quick = os.environ.get("XLA_FLAGS", "")  # pytest's
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={COUNT} {quick}"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close

from linattn_np import ContractError
from linattn_np.interop import jax as interop

jax.config.update("jax_enable_x64", True)
MESH, EXPLICIT = (
    jax.make_mesh((COUNT,), ("devices",), axis_types=(kind,), devices=jax.devices()[:COUNT])
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
)
B, H, T, K, V = 4, 4, 24, 5, 3


def draw(name, rng):
    """Arrays of a call, in float64, with an initial state at the end."""
    q, k, g = rng.standard_normal((3, B, H, T, K))
    v, state = rng.standard_normal((B, H, T, V)), rng.standard_normal((B, H, K, V))
    gates = {
        "gla": [-np.exp(g)],
        "rwkv6": [-np.exp(g), rng.standard_normal((H, K))],
        "simple_gla": [-np.exp(g[..., 0])],
        "retention": [],
    }
    if name in DELTA:
        k, beta = k / np.linalg.norm(k, axis=-1, keepdims=True), rng.random((B, H, T))
        return (
            [q, k, v, -np.exp(g), beta, state]
            if name == "kda"
            else [q, -np.exp(g), k, v, -k, beta[..., None] * k, state]
        )
    return [q, k, v, *gates[name], state]


def loss(function, weights):
    """A number of all results of a call, and its gradients."""

    def of(*inputs):
        return sum((x * w).sum() for x, w in zip(function(*inputs), weights, strict=True))

    return jax.jit(jax.value_and_grad(of, argnums=tuple(range(7))[: function.count]))


def calls(name, **options):
    def call(*inputs):
        *arrays, state = inputs
        return getattr(interop, name)(*arrays, initial_state=state, output_final_state=True, **options)

    if name == "retention":  # its default decays differ by head, of which a device has its own alone
        options["gamma"] = 0.8
    call.count = {"gla": 5, "rwkv6": 6, "simple_gla": 5, "kda": 6, "rwkv7": 7}.get(name, 4)
    return call


def compare(case, found, wanted):
    for place, (x, y) in enumerate(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)):
        assert_close(f"{case}, number {place}", np.atleast_1d(x), np.atleast_1d(y), "float64", factor=10)
    print(case, flush=True)


def over_the_sequence(name, rng, reverse=False, check=True, **options):
    """Tokens cut over the devices; u and the states, before and after, the same on all."""
    inputs = draw(name, rng)
    weights = rng.standard_normal((B, H, T, V)), rng.standard_normal((B, H, K, V))
    specs = (*(P() if x.shape == (H, K) else P(None, None, "devices") for x in inputs[:-1]), P())
    call = calls(name, reverse=reverse, **options)
    along = calls(name, reverse=reverse, axis_name="devices", **options)
    mapped = jax.shard_map(along, mesh=MESH, in_specs=specs, out_specs=(P(None, None, "devices"), P()), check_vma=check)
    mapped.count = call.count
    label = f"{name} over the sequence{' in reverse' if reverse else ''}{'' if check else ' unchecked'}"
    compare(label, loss(mapped, weights)(*inputs), loss(call, weights)(*inputs))


def with_all_options(rng):
    """The normaliser's pair of states, [B, T, H, ...], grouped value heads and states [N, HV, V, K]; half precision,
    outside of jit, where JAX compiles each of a function's steps by itself.
    """
    q, k = rng.standard_normal((2, B, T, H, K))
    v, S = rng.standard_normal((B, T, 2 * H, V)), rng.standard_normal((B, 2 * H, V, K))
    z = np.abs(rng.standard_normal((B, H, K)))
    options = {
        "layout": "bthd",
        "output_final_state": True,
        "state_v_first": True,
        "initial_state": (S, z),
        "feature_map": "elu",
        "normalize": True,
    }
    spec = P(None, "devices")
    mapped = jax.shard_map(
        partial(interop.linear_attention, **options, axis_name="devices"),
        mesh=MESH,
        in_specs=(spec,) * 3,
        out_specs=(spec, P()),
    )
    compare("the normaliser over the sequence", jax.jit(mapped)(q, k, v), interop.linear_attention(q, k, v, **options))
    g, gv = -np.exp(rng.standard_normal((B, T, H, K))), -np.exp(rng.standard_normal((B, T, 2 * H, V)))
    mapped = jax.shard_map(
        partial(interop.gla, layout="bthd", axis_name="devices"), mesh=MESH, in_specs=(spec,) * 5, out_specs=spec
    )
    found = jax.jit(mapped)(q, k, v, g, gv)
    compare("a gate of values over the sequence", found, interop.gla(q, k, v, g, gv, layout="bthd"))
    half = [jax.numpy.asarray(x, "bfloat16") for x in (q, k, v, g)]
    mapped = jax.shard_map(
        partial(interop.gla, layout="bthd", axis_name="devices"), mesh=MESH, in_specs=(spec,) * 4, out_specs=spec
    )
    assert_close(
        "bfloat16", np.asarray(mapped(*half)), np.asarray(interop.gla(*half, layout="bthd")), "bfloat16", rows=2
    )
    refused = jax.shard_map(
        partial(interop.gla, cu_seqlens=(0, T // COUNT), axis_name="devices"),
        mesh=MESH,
        in_specs=(P(None, None, "devices"),) * 4,
        out_specs=P(None, None, "devices"),
    )
    try:
        refused(*(x.swapaxes(1, 2)[:1] for x in (q, k, v[:, :, :H], g)))
    except ContractError as error:
        print(error)


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


def put(inputs, specs, mesh):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(inputs, specs, strict=True)]


def under_jit(name, rng, axis, spec):
    """Cut arrays as their types say it: no device is sent another one's, and results are cut likewise."""
    inputs = draw(name, rng)
    weights = rng.standard_normal((B, H, T, V)), rng.standard_normal((B, H, K, V))
    u = (P("devices") if axis == "heads" else P(),) * (name == "rwkv6")
    given = put(inputs, (*(spec,) * (len(inputs) - 1 - len(u)), *u, spec), EXPLICIT)
    function = loss(calls(name), weights)
    assert "all-gather" not in function.lower(*given).compile().as_text()
    o, _ = jax.jit(lambda *inputs: calls(name)(*inputs))(*given)
    assert o.sharding.is_equivalent_to(NamedSharding(EXPLICIT, spec), 4)
    compare(f"{name} under jit over {axis}", function(*given), function(*inputs))


def cut_as_they_are(rng):
    """Outside of jit on any mesh; [B, T, H, ...], grouped value heads and states [N, HV, V, K]; refusals."""
    q, k = rng.standard_normal((2, B, T, H, K))
    v, state = rng.standard_normal((B, T, 2 * H, V)), rng.standard_normal((B, 2 * H, V, K))
    g = -np.exp(rng.standard_normal((B, T, H, K)))
    options = {"layout": "bthd", "output_final_state": True, "state_v_first": True}
    wanted = interop.gla(q, k, v, g, initial_state=state, **options)
    for mesh in (MESH, EXPLICIT):
        for tokens, states in ((P("devices"), P("devices")), (P(None, None, "devices"), P(None, "devices"))):
            *given, start = put((q, k, v, g, state), (tokens,) * 4 + (states,), mesh)
            o, final = interop.gla(*given, initial_state=start, **options)
            assert o.sharding.is_equivalent_to(NamedSharding(mesh, tokens), 4)
            assert final.sharding.is_equivalent_to(NamedSharding(mesh, states), 4)
            compare("cut as they are", (o, final), wanted)
    half_of_heads = jax.numpy.ones((2, B, T, H // 2, 4))  # q and k, on one device
    for call, spec in (
        (lambda *x: interop.gla(*x, layout="bthd"), P(None, "devices")),
        (lambda *x: interop.gla(*x, layout="bthd"), P(None, None, None, "devices")),
        (lambda q, k, v, g: interop.retention(q, k, v, layout="bthd"), P(None, None, "devices")),
        (lambda q, k, v, g: interop.retention(*half_of_heads, v, layout="bthd"), P(None, None, "devices")),
        (lambda q, k, v, g: interop.softmax_attention(q, k, v, layout="bthd"), P(None, "devices")),
    ):
        try:
            call(*put(rng.standard_normal((4, B, T, H, 4)), (spec,) * 4, EXPLICIT))
        except ContractError as error:
            print(error)


def main():
    rng = np.random.default_rng(0)
    for name in NAMES:
        over_batch_and_heads(name, rng, "heads", P(None, "devices"), True)
    for name in ("gla", "rwkv6"):
        over_batch_and_heads(name, rng, "batch", P("devices"), True)
    over_batch_and_heads("rwkv6", rng, "batch", P("devices"), False)
    for name in NAMES:
        over_the_sequence(name, rng)
    for name in DELTA if COUNT == 4 else ():  # on cards they may have no kernels
        over_the_sequence(name, rng, reverse=name == "kda")
    over_the_sequence("gla", rng, reverse=True)
    over_the_sequence("rwkv6", rng, check=False)
    with_all_options(rng)
    for name, axis, spec in zip(NAMES, 2 * ("batch", "heads"), 2 * (P("devices"), P(None, "devices"))):
        under_jit(name, rng, axis, spec)
    cut_as_they_are(rng)


if __name__ == "__main__":
    main()
