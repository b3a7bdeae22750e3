"""Steps, stages and the layer: what decoding and the chunked form are made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from reference import DECAYS, same_bits

from attack.calls import ALL_GATES, DTYPES, GROWING, double, judge, lengths_of
from attack.harness import Refused, holds_for, require
from linattn_np import NotSupported, gla, gla_step, rwkv6, rwkv6_step, stages
from linattn_np.layers import GatedLinearAttention, random_weights
from linattn_np.ops.steps import GLA_STEP, RWKV6_STEP

STEPS = {"gla_step": (GLA_STEP, gla_step), "rwkv6_step": (RWKV6_STEP, rwkv6_step)}
STABLE = [name for name in ALL_GATES if name not in GROWING]


# -- steps -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Step:
    """One token for B sequences."""

    op: str = "gla_step"
    dtype: str = "float32"
    state_dtype: str = "float32"
    gate: str = "zero"
    B: int = 1
    H: int = 1
    K: int = 1
    V: int = 1
    slots: tuple | None = None
    pool: int = 0  # rows beyond B
    memory: str = "plain"  # "plain", "layer": a slice of a state of all layers, "odd": one number behind the start
    scale: float | None = None
    seed: int = 0

    def arrays(self):
        rng, found = np.random.default_rng(self.seed), {}
        sizes = {"B": self.B, "H": self.H, "K": self.K, "V": self.V}
        for name, axes in STEPS[self.op][0].arrays.items():
            shape = tuple(sizes[axis] for axis in axes.split())
            x = (
                ALL_GATES[self.gate](rng, (*shape[:2], 1, *shape[2:]))[:, :, 0]
                if name in DECAYS
                else rng.standard_normal(shape)
            )
            with np.errstate(over="ignore"):
                found[name] = x.astype(DTYPES[self.dtype])
        rows = self.B + self.pool if self.slots is not None else self.B
        found["state"] = rng.standard_normal((rows, self.H, self.K, self.V)).astype(DTYPES[self.state_dtype])
        return found


@st.composite
def steps(draw, machine):
    B, pool = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    slots = draw(st.none() | st.permutations(range(B + pool)).map(lambda rows: tuple(rows[:B])))
    sizes = st.one_of(st.integers(1, 9), st.sampled_from((16, 17, 32, 33, 64)))
    return Step(
        draw(st.sampled_from(list(STEPS))),
        draw(st.sampled_from([str(d) for d in machine.dtypes])),
        draw(st.sampled_from(list(DTYPES))),
        draw(st.sampled_from(STABLE)),
        B,
        draw(st.integers(0, 3)),
        draw(sizes),
        draw(sizes),
        slots,
        pool,
        draw(st.sampled_from(("plain", "layer", "odd"))),
        draw(st.sampled_from((None, 1.0, -2.0, 0.0))),
        draw(st.integers(0, 999)),
    )


def step_equation(step, arrays):
    """(o, state) in float64 from the equation."""
    q, k, v, gate, *bonus, state = (double(x).copy() for x in arrays.values())
    rows = list(range(step.B) if step.slots is None else step.slots)
    S, new = state[rows], k[..., None] * v[..., None, :]
    after = np.exp(gate)[..., None] * S + new
    seen = S + bonus[0][:, :, None] * new if bonus else after
    o = (step.K**-0.5 if step.scale is None else step.scale) * (q[..., None] * seen).sum(-2)
    state[rows] = after
    return o, state


@holds_for(steps)
def a_step(step, machine):
    """The equation; no other row of the pool or number beside the state is written."""
    arrays = step.arrays()
    *inputs, state = (machine.asarray(x.copy()) for x in arrays.values())
    shape = arrays["state"].shape
    if step.memory == "layer":
        memory = machine.asarray(np.repeat(arrays["state"][:, None], 3, axis=1))
        state = memory[:, 1]
    elif step.memory == "odd":
        memory = machine.asarray(np.concatenate([np.zeros(1, arrays["state"].dtype), arrays["state"].ravel()]))
        state = memory[1:].reshape(shape)
    try:
        o = machine.run(
            STEPS[step.op][1], *inputs, state, slots=None if step.slots is None else list(step.slots), scale=step.scale
        )
    except NotSupported as error:
        raise Refused from error
    wanted, after = step_equation(step, arrays)
    arrays_abs = {name: x if name in DECAYS else abs(x) for name, x in arrays.items()}
    bound, bound_after = step_equation(step, arrays_abs)
    finite = [np.isfinite(x) for x in (wanted, after)]
    judge(f"steps: {step.op}, o", machine.tohost(o), wanted, abs(bound), finite[0], step.dtype, least=1e-32)
    kinds = (step.dtype, step.state_dtype) if step.dtype != "float64" else (step.state_dtype,)
    coarse = max(kinds, key=lambda kind: list(DTYPES).index(kind) if kind != step.dtype or len(kinds) == 1 else 1)
    judge(f"steps: {step.op}, state", machine.tohost(state), after, bound_after, finite[1], coarse, least=1e-32)
    others = [row for row in range(shape[0]) if step.slots is not None and row not in step.slots]
    require(same_bits(machine.tohost(state)[others], arrays["state"][others]), "steps: another slot is written")
    if step.memory == "layer":
        rest = machine.tohost(memory)[:, [0, 2]]
        require(same_bits(rest, np.repeat(arrays["state"][:, None], 2, axis=1)), "steps: another layer is written")
    for name, x in zip(arrays, inputs):
        require(same_bits(machine.tohost(x), arrays[name]), f"steps: {name} is written")


# -- stages ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pipeline:
    """The five stages one after the other."""

    lengths: tuple = (1,)
    packed: bool = False
    B: int = 1
    H: int = 1
    K: int = 1
    V: int = 1
    dtype: str = "float32"
    gate: str = "zero"
    bonus: bool = False
    chunk_size: int = 16
    layout: str = "bhtd"
    scale: float | None = None
    seed: int = 0


@st.composite
def pipelines(draw, machine):
    T, packed = draw(st.integers(0, 70 if machine.quick else 34)), draw(st.booleans())
    sizes = st.one_of(st.integers(1, 9), st.sampled_from((16, 17, 33)))
    return Pipeline(
        draw(lengths_of(T)) if packed else (T,),
        packed,
        1 if packed else draw(st.integers(0, 2)),
        draw(st.integers(0, 2)),
        draw(sizes),
        draw(sizes),
        draw(st.sampled_from([str(d) for d in machine.dtypes])),
        draw(st.sampled_from(STABLE)),
        draw(st.booleans()),
        draw(st.sampled_from((16, 32, 64))),
        draw(st.sampled_from(("bhtd", "bthd"))),
        draw(st.sampled_from((None, 1.0, -0.5))),
        draw(st.integers(0, 999)),
    )


@holds_for(pipelines)
def stages_are_the_operator(p, machine):
    """Stage after stage is what the recurrence gives."""
    rng, T = np.random.default_rng(p.seed), sum(p.lengths)
    dtype = DTYPES[p.dtype]
    q, k, v, g = (rng.standard_normal((p.B, p.H, T, D)) for D in (p.K, p.K, p.V, p.K))
    with np.errstate(over="ignore"):
        q, k, v, g = (x.astype(dtype) for x in (q, k, v, ALL_GATES[p.gate](rng, g.shape)))
    u = rng.standard_normal((p.H, p.K)).astype(dtype) if p.bonus else None
    how = {"chunk_size": p.chunk_size, "layout": p.layout}
    if p.packed:
        how["cu_seqlens"] = [0, *np.cumsum(p.lengths).tolist()]
    there = [machine.asarray(np.ascontiguousarray(x if p.layout == "bhtd" else x.swapaxes(1, 2))) for x in (q, k, v, g)]
    try:
        b, e = machine.run(stages.chunk_cumsum, there[3], **how)
        qg, kg = machine.run(stages.gated_qk, *there[:2], b, e, exclusive=p.bonus, **how)
        h = machine.run(stages.inter_chunk, kg, there[2], b, **how)
        bonus = {"u": machine.asarray(u)} if p.bonus else {}
        A = machine.run(stages.intra_chunk, there[0], there[1], there[3], **bonus, **how)
        o = machine.tohost(machine.run(stages.combine, qg, h, A, there[2], scale=p.scale, **how))
    except NotSupported as error:
        raise Refused from error
    o = o if p.layout == "bhtd" else o.swapaxes(1, 2)

    def recurrence(*arrays):
        given = {"cu_seqlens": how["cu_seqlens"]} if p.packed else {}
        if p.bonus:
            return rwkv6(*arrays, mode="recurrent", backend="numpy", scale=p.scale, **given)
        return gla(*arrays[:4], mode="recurrent", backend="numpy", scale=p.scale, **given)

    inputs = [double(x) for x in (q, k, v, g, *([u] if p.bonus else []))]
    wanted = recurrence(*inputs)
    bound = abs(recurrence(*(x if i == 3 else abs(x) for i, x in enumerate(inputs))))
    judge("stages", o, wanted, bound, np.isfinite(wanted), p.dtype, 2.0, least=1e-32)


# -- the layer ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Layer:
    """A GLA layer and a batch."""

    D: int = 8
    heads: int = 1
    kv_heads: int = 1
    B: int = 1
    lengths: tuple = (1,)
    packed: bool = False
    dtype: str = "float64"
    feature_map: str | None = None
    gate_fn: str = "swish"
    clamp_min: float | None = None
    at: int = 0
    seed: int = 0


@st.composite
def layers(draw, machine):
    heads = draw(st.sampled_from((1, 2, 4)))
    packed, T = draw(st.booleans()), draw(st.integers(0, 40))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]))
    return Layer(
        heads * draw(st.sampled_from((2, 4, 8))),
        heads,
        kv_heads,
        1 if packed else draw(st.integers(0, 3)),
        draw(lengths_of(T)) if packed else (T,),
        packed,
        draw(st.sampled_from(("float64", "float32", "float16"))),
        draw(st.sampled_from((None, "relu", "sigmoid", "swish"))),
        draw(st.sampled_from(("swish", "sigmoid", "relu"))),
        draw(st.sampled_from((None, -0.02, -5.0))),
        draw(st.integers(0, 40)),
        draw(st.integers(0, 999)),
    )


@holds_for(layers, machines=("numpy", "cupy"))
def a_layer(layer, machine):
    """Cut in two it is what it is whole, token by token too; packed as one by one; the gradient as differences."""
    rng, T = np.random.default_rng(layer.seed), sum(layer.lengths)
    weights = random_weights(rng, layer.D, layer.heads, num_kv_heads=layer.kv_heads)
    wide = layer.dtype == "float64"
    weights = {name: machine.asarray(x.astype(np.float64 if wide else np.float32)) for name, x in weights.items()}
    own = GatedLinearAttention(
        weights,
        layer.heads,
        num_kv_heads=layer.kv_heads,
        feature_map=layer.feature_map,
        gate_fn=layer.gate_fn,
        clamp_min=layer.clamp_min,
    )
    x = machine.asarray(rng.standard_normal((layer.B, T, layer.D)).astype(layer.dtype))
    bounds = [0, *np.cumsum(layer.lengths).tolist()]
    y, state = own(x, **({"cu_seqlens": bounds} if layer.packed else {}))
    close = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2}[layer.dtype]

    def same(law, found, wanted):
        found, wanted = double(machine.tohost(found)), double(machine.tohost(wanted))
        require(found.shape == wanted.shape, f"layers: {law}: shape", f"{found.shape}, expected {wanted.shape}")
        size = 1 + abs(wanted).max(initial=0)
        error = abs(found - wanted).max(initial=0) / size
        require(error <= close, f"layers: {law}", f"differs by {error:.1e} of {size:.1e}")

    if layer.packed:
        for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:])):
            alone, end = own(x[:, start:stop])
            same("packed", y[:, start:stop], alone)
            same("packed state", state[n : n + 1], end)
        return
    at = layer.at % (T + 1)
    first, half = own(x[:, :at])
    kept = machine.tohost(half).copy()
    rest, end = own(x[:, at:], half)
    require(same_bits(machine.tohost(half), kept), "layers: the state that came in is changed")
    same("split", np.concatenate([machine.tohost(first), machine.tohost(rest)], axis=1), y)
    same("split state", end, state)
    if T - at <= 5:
        for t in range(at, T):
            same("step", own.step(x[:, t], half), y[:, t])
    if wide and machine.name == "numpy" and x.size:
        slope(own, x, rng)


def slope(own, x, rng):
    (y, end), pull = own.vjp(x)
    weights = [rng.standard_normal(y.shape), rng.standard_normal(end.shape)]
    dx, gradients = pull(*weights)
    direction = rng.standard_normal(x.shape)
    turned = {name: rng.standard_normal(w.shape) for name, w in own.weights.items()}
    kept = dict(own.weights)

    def value(h):
        own.weights.update({name: kept[name] + h * turned[name] for name in kept})
        try:
            return sum(float((a * b).sum()) for a, b in zip(own(x + h * direction), weights))
        finally:
            own.weights.update(kept)

    terms = [float((dx * direction).sum())] + [float((gradients[name] * turned[name]).sum()) for name in kept]
    size = sum(map(abs, terms)) + abs(value(0)) + 1e-2
    errors = [abs((value(h) - value(-h)) / (2 * h) - sum(terms)) / size for h in (1e-5, 1e-6, 1e-7)]
    if own.feature_map is None or own.feature_map.__name__ != "Relu":  # which has a kink, as a clamp has
        kinked = own.clamp_min is not None or own.gate_fn.__name__ == "Relu"
        require(min(errors) < (1e-2 if kinked else 1e-4), "layers: gradient", f"differs by {min(errors):.1e}")
