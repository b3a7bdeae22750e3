"""Random calls of the operators: what they are drawn from, their arrays, and the exact answer with its error bound.

A `Call` is plain values, so that its repr is the example; its arrays come from its seed. What operators take is read
from their declarations and signatures.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields

import ml_dtypes
import numpy as np
from growth import bounded
from hypothesis import strategies as st
from reference import DECAYS, GATES, LIMITS, contracting, logsigmoid, scattered, stated, with_value_heads

from attack.harness import Fault, require
from linattn_np.array_kinds import BFLOAT16
from linattn_np.declarations import GLA, GLA_VALUE_GATE
from linattn_np.layouts import swap_heads
from linattn_np.ops import OPS

DTYPES = {str(d): d for d in (np.dtype("float64"), np.dtype("float32"), np.dtype("float16"), BFLOAT16)}
FUNCTIONS = {op.name: (op, function) for op, function in OPS.items()} | {
    GLA_VALUE_GATE.name: (GLA_VALUE_GATE, OPS[GLA])
}
TOLERANCES = {name: row for name, (_, row) in LIMITS.items()} | {"float64": 1e-11}


# -- gates -------------------------------------------------------------------------------------------------------------
def trained(rng, shape):
    """As in trained RWKV-6: every channel its own strength, some tokens far stronger."""
    start = np.linspace(-4.2, -2.5, shape[-1]) if len(shape) > 3 else -3.0
    return -np.exp(start + 2 * rng.standard_normal(shape))


def burst(rng, shape):
    """No decay but for +-50, whose sums stay small."""
    g = np.zeros(shape)
    g[:, :, 1::5], g[:, :, 2::5] = 50, -50
    return g


def runs(rng, shape):
    """Growth of up to +5 a token and decays of up to -30 in runs of 1 to 40 tokens, here and there a reset.

    No run of growth comes to more than 80 nats, and one of decays that comes to less than -80 ends in a reset: what
    is smaller than that float32 does not know, and it would show if it grew again.
    """
    g = np.zeros(shape)
    bounds = np.cumsum(rng.integers(1, 41, shape[2] + 1))
    for start, stop in zip([0, *bounds], bounds):
        g[:, :, start:stop] = rng.choice([rng.uniform(0, 5), -rng.uniform(0, 6), -rng.uniform(0, 30), 0])
    g[rng.random(shape) < 0.01] = rng.choice([-np.inf, -1e30])
    return bounded(g, 80)


ALL_GATES = GATES | {
    "trained": trained,
    "spikes-1e30": scattered(-1e30, 40),
    "one-reset": scattered(-np.inf, 60),
    "burst": burst,
    "few-20": scattered(-20.0, 15),
    "few-86": scattered(-86.0, 15),
    "growth": lambda rng, shape: rng.uniform(-0.2, 0.5, shape),
    "strong-growth": lambda rng, shape: rng.choice([0.0, -2.0, 8.0, 50.0], shape, p=[0.5, 0.3, 0.1, 0.1]),
    "runs": runs,
    "mixed": lambda rng, shape: np.where(
        rng.random(shape) < 0.5,
        logsigmoid(rng.standard_normal(shape)),
        rng.choice([0.0, -0.0, -20.0, -1e4, -1e30, -np.inf], shape),
    ),
}
GROWING = ("burst", "growth", "strong-growth", "positive", "runs")
HOST_ALONE = ("runs",)  # a chunk's decays beside what earlier chunks have grown by: docs/gates.md
MEMORIES = ("plain", "fused", "heads-inside", "backwards", "every-second", "odd", "shared-head")


# -- calls -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Call:
    """One call of an operator."""

    op: str
    mode: str = "recurrent"
    dtype: str = "float32"
    B: int = 1
    H: int = 1
    T: int = 1
    K: int = 1
    V: int = 1
    seed: int = 0
    gate: str = "zero"
    gate_dtype: str | None = None
    loudness: float = 1.0  # factor of v
    groups: int = 1  # value heads for each head
    lengths: tuple | None = None  # of packed sequences, T together
    masked: float | None = None  # the share of tokens that are padding
    reverse: bool = False
    state_v_first: bool = False
    layout: str = "bhtd"
    memory: str = "plain"  # how the arrays lie, of MEMORIES
    initial: str | None = None  # dtype of an initial state
    final: bool = False
    state_dtype: str | None = None
    chunk_size: int | None = None
    materialize: bool | None = None
    scale: float | None = None
    gamma: float | None = None
    feature_map: str | None = None
    normalize: bool = False
    causal: bool = True
    plants: tuple = ()  # (array, token, place behind it, "nan", "inf" or "-inf")

    def __repr__(self):
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Call({', '.join(given)})"

    @property
    def declared(self):
        return FUNCTIONS[self.op][0]

    @property
    def function(self):
        return FUNCTIONS[self.op][1]

    @property
    def takes(self):
        return set(inspect.signature(self.function).parameters)

    @property
    def sizes(self):
        N = len(self.lengths) if self.lengths is not None else self.B
        return {"B": self.B, "H": self.H, "T": self.T, "K": self.K, "V": self.V, "N": N}

    @property
    def rng(self):
        return np.random.default_rng([self.seed, 1])

    def sizes_of(self, axes):
        return self.sizes | ({"H": self.H * self.groups} if self.groups > 1 and axes.split()[-1] == "V" else {})

    def shape(self, axes):
        return tuple(self.sizes_of(axes)[axis] for axis in axes.split())

    def shape_of(self, name):
        """The shape of the caller's array of this name."""
        wide = self.groups > 1 and name in with_value_heads(self.declared)
        sizes = self.sizes | ({"H": self.H * self.groups} if wide else {})
        return tuple(sizes[axis] for axis in self.declared.arrays[name].split())

    def arrays(self) -> dict:
        """Host arrays [B, H, T, ...], contiguous."""
        rng, drawn, found = np.random.default_rng(self.seed), {}, {}
        for name in self.declared.arrays:
            shape = self.shape_of(name)
            drawn[name] = ALL_GATES[self.gate](rng, shape) if name in DECAYS else rng.standard_normal(shape)
        for name, x in contracting(self.declared, drawn).items():
            axes = self.declared.arrays[name]
            if name == "v":
                x = x * self.loudness
            if self.normalize and self.feature_map is None and name in ("q", "k"):
                x = abs(x)
            if self.memory == "shared-head" and axes.startswith("B H"):
                x = np.broadcast_to(x[:, :1], x.shape).copy()
            wide = self.gate_dtype and name in self.declared.gates
            with np.errstate(over="ignore"):
                found[name] = x.astype(DTYPES[self.gate_dtype if wide else self.dtype])
        for name, token, place, value in self.plants:
            x = found[name]
            if x.size and x.ndim > 2:
                at = np.unravel_index(place % (x.size // self.T), x.shape[:2] + x.shape[3:])
                x[(*at[:2], token, *at[2:])] = float(value)
        return found

    def arguments(self) -> dict:
        """Keyword arguments without mode and backend; arrays on the host."""
        own = {
            "scale": self.scale,
            "layout": self.layout,
            "chunk_size": self.chunk_size,
            "materialize": self.materialize,
            "reverse": self.reverse,
            "state_v_first": self.state_v_first,
            "gamma": self.gamma,
            "feature_map": self.feature_map,
            "normalize": self.normalize,
            "causal": self.causal,
            "output_final_state": self.final,
            "state_dtype": self.state_dtype,
        }
        own = {name: x for name, x in own.items() if name in self.takes}
        if self.lengths is not None:
            own["cu_seqlens"] = [0, *np.cumsum(self.lengths).tolist()]
        if self.masked is not None:
            own["mask"] = self.rng.random((self.B, self.T)) >= self.masked
        if self.initial:
            parts = self.states()
            own["initial_state"] = parts if len(parts) > 1 else parts[0]
        return own

    def states(self):
        """The initial state's parts as the caller has them."""
        rng, parts = np.random.default_rng([self.seed, 2]), []
        for axes in stated(self.declared, {"normalize": self.normalize}).state:
            x = rng.standard_normal(self.shape(axes))
            x = abs(x) if axes == "N H K" else x * self.loudness
            x = x.swapaxes(2, 3).copy() if self.state_v_first and x.ndim == 4 else x
            parts.append(x.astype(DTYPES[self.initial]))
        return tuple(parts)

    def cotangents(self):
        """(do [B, H, T, V], dht or None) on the host."""
        rng = np.random.default_rng([self.seed, 3])
        do = rng.standard_normal(self.shape(self.declared.out)).astype(DTYPES[self.dtype])
        if not (self.final and self.declared.state):
            return do, None
        single = np.float64 if self.dtype == "float64" else np.float32
        parts = tuple(
            rng.standard_normal(self.shape(axes)).astype(single)
            for axes in stated(self.declared, {"normalize": self.normalize}).state
        )
        if self.state_v_first:
            parts = tuple(x.swapaxes(2, 3).copy() if x.ndim == 4 else x for x in parts)
        return do, parts if len(parts) > 1 else parts[0]


def placed(machine, x, memory):
    """`x` where the machine computes, in another order of memory."""
    if x.ndim < 3 or memory == "plain" or not x.size:
        return machine.asarray(np.ascontiguousarray(x))
    if memory == "fused":
        return machine.asarray(np.concatenate([x, x], axis=-1))[..., : x.shape[-1]]
    if memory == "heads-inside":
        return machine.asarray(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2)
    if memory == "backwards":
        return machine.asarray(np.ascontiguousarray(x[:, ::-1, ::-1]))[:, ::-1, ::-1]
    if memory == "every-second":
        return machine.asarray(np.repeat(x, 2, axis=-1))[..., ::2]
    if memory == "odd":
        return machine.asarray(np.concatenate([np.zeros(1, x.dtype), x.ravel()]))[1:].reshape(x.shape)
    if memory == "shared-head" and (x == x[:, :1]).all():
        one = machine.asarray(np.ascontiguousarray(x[:, :1]))
        return one.repeat(1, axis=1) if x.shape[1] == 1 else machine.broadcast(one, x.shape)
    return machine.asarray(np.ascontiguousarray(x))


def there(machine, x):
    return tuple(there(machine, part) for part in x) if isinstance(x, tuple) else machine.asarray(x)


def given(call, machine):
    """(arrays, keyword arguments) where the machine computes, as the caller's layout has them."""
    arrays = [
        swap_heads(placed(machine, x, call.memory), axes, call.layout)
        for x, axes in zip(call.arrays().values(), call.declared.arrays.values())
    ]
    arguments = call.arguments()
    for name in ("initial_state", "mask"):
        if arguments.get(name) is not None:
            arguments[name] = there(machine, arguments[name])
    return arrays, arguments | {"mode": call.mode}


def flat(result):
    """Nested results as one list."""
    if isinstance(result, (tuple, list)):
        return [part for x in result for part in flat(x)]
    return [result]


def home(machine, call, result):
    """A result's parts on the host, o as [B, H, T, V]."""
    o, *states = map(machine.tohost, flat(result))
    return [swap_heads(o, call.declared.out, call.layout), *states]


# -- the exact answer --------------------------------------------------------------------------------------------------
def double(x):
    return tuple(map(double, x)) if isinstance(x, tuple) else np.asarray(x, np.float64)


def exactly(call, arrays, arguments):
    """(keyword arguments for the exact answer)"""
    given = {
        name: x
        for name, x in arguments.items()
        if name not in ("layout", "chunk_size", "materialize", "state_dtype", "mode")
    }
    if given.get("initial_state") is not None:
        given["initial_state"] = double(given["initial_state"])
    return given


def truth(call, arrays, arguments):
    """[o, *final state's parts] in float64, of host arrays [B, H, T, ...]."""
    arrays = [double(x) for x in arrays]
    if call.op == "softmax_attention":
        return [softmax(call, *arrays, arguments.get("cu_seqlens"), arguments.get("scale"))]
    return flat(call.function(*arrays, mode="recurrent", backend="numpy", **exactly(call, arrays, arguments)))


def softmax(call, q, k, v, bounds, scale):
    o, scale = np.empty(v.shape), call.K**-0.5 if scale is None else scale
    with np.errstate(all="ignore"):
        for t, seen, weights in softmax_rows(call, q, k, bounds, scale):
            o[:, :, t] = np.einsum("bhs,bhsv->bhv", weights, v[:, :, seen])
    return o


def softmax_rows(call, q, k, bounds, scale):
    """(a token, the tokens that it sees, its weights on them [B, H, S]) one by one: no row meets a token that it cannot
    see."""
    bounds = [0, call.T] if bounds is None else bounds
    for start, stop in zip(bounds[:-1], bounds[1:]):
        for t in range(start, stop):
            seen = slice(start, t + 1 if call.causal else stop)
            scores = scale * np.einsum("bhk,bhsk->bhs", q[:, :, t], k[:, :, seen])
            weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
            yield t, seen, weights / weights.sum(-1, keepdims=True)


def magnitudes(call, arrays, arguments):
    """The call with all signs taken away where that bounds its terms: what its rounding is judged by."""
    keep = call.op == "softmax_attention" or call.feature_map or call.normalize
    arrays = {name: x if name in DECAYS or (keep and name != "v") else abs(double(x)) for name, x in arrays.items()}
    arguments = dict(arguments)
    if arguments.get("initial_state") is not None:
        arguments["initial_state"] = tuple(abs(double(x)) for x in flat(arguments["initial_state"]))
        if len(arguments["initial_state"]) == 1:
            arguments["initial_state"] = arguments["initial_state"][0]
    if arguments.get("scale") is not None and call.op != "softmax_attention":
        arguments["scale"] = abs(arguments["scale"])
    return arrays, arguments


UNDERFLOWS = {"float16": 16}  # sums of products on tensor cores: each operand has come to a subnormal number


def judge(law, found, wanted, bound, must, dtype, factor=1.0, least=0.0):
    """Every element within its bound where `must`; `bound` is what the sum's terms come to without their signs."""
    require(found.shape == wanted.shape, f"{law}: shape", f"{found.shape}, expected {wanted.shape}")
    limits = ml_dtypes.finfo(found.dtype)
    with np.errstate(all="ignore"):
        must = must & np.isfinite(wanted) & (abs(wanted) < float(limits.max) / 8) & np.isfinite(bound)
        lost = must & ~np.isfinite(double(found))
        if lost.any():
            at = tuple(int(i) for i in np.argwhere(lost)[0])
            raise Fault(f"{law}: not finite", f"{found[at]} for {wanted[at]!r} at {at}, {int(lost.sum())} in all")
        underflow = UNDERFLOWS.get(found.dtype.name, 1) * float(limits.smallest_subnormal)
        allowed = factor * TOLERANCES[np.dtype(dtype).name] * abs(bound) + least + underflow
        error = np.where(must, abs(double(found) - wanted), 0)
        bad = must & (error > allowed)
    if bad.any():
        at = np.unravel_index(np.argmax(np.where(bad, error / allowed, 0)), error.shape)
        at = tuple(int(i) for i in at)
        raise Fault(
            f"{law}: wrong",
            f"{found[at]!s} for {wanted[at]!r} at {at}, where {allowed[at]:.1e} is allowed; "
            f"{int(bad.sum())} of {bad.size} in all",
        )


def least(call):
    """What underflow in float32 may cost: numbers that come to it are lost whatever they are multiplied by."""
    return 1e-35 * max(1.0, call.loudness) ** 2 * 1e3 if call.dtype != "float64" else 0.0


def loudnesses(op, dtype):
    """Values below 1e-7 may be lost between strong gates of their own: docs/numerics.md."""
    if dtype.itemsize <= 2:
        return (1.0,)
    return (1.0, 1.0, 1.0, 1e8) if op == "gla with gv" else (1.0, 1.0, 1.0, 1e-8, 1e8)


# -- strategies --------------------------------------------------------------------------------------------------------
def lengths_of(T):
    """Packed sequences that come to T tokens, some of them empty."""
    return st.lists(st.integers(0, T), max_size=5).map(
        lambda cuts: tuple(int(n) for n in np.diff([0, *sorted(cuts), T]))
    )


EDGES = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130)


def tokens(machine):
    edges = [n for n in EDGES if machine.quick or n <= 33]
    return st.one_of(st.integers(0, 20), st.sampled_from(edges))


def channels(machine):
    edges = (16, 17, 20, 32, 33, 64, 65) if machine.quick else (16, 17, 20)
    return st.one_of(st.integers(1, 8), st.sampled_from(edges))


def taken_dtypes(machine, name):
    modes = machine.modes[name] or ("chunk",)
    return [str(d) for d in machine.dtypes if machine.takes(FUNCTIONS[name][0], modes[0], d)]


@st.composite
def calls(draw, machine, *, ops=None, gradient=False, plants=True, gates=None, edges=True):
    """Calls that the library must take, or refuse as NotSupported."""
    able = {name: taken_dtypes(machine, name) for name in FUNCTIONS if ops is None or name in ops}
    op = draw(st.sampled_from([name for name, dtypes in able.items() if dtypes]))
    declared, function = FUNCTIONS[op]
    takes = set(inspect.signature(function).parameters)
    mode = draw(st.sampled_from(("auto", *(machine.modes[op] or ("chunk",)))))
    least_size = 0 if edges else 1
    most = 3 if machine.quick else 2
    B, H = (draw(st.sampled_from((1, 1, *range(least_size, most + 1)))) for _ in "BH")
    T, K, V = draw(tokens(machine)), draw(channels(machine)), draw(channels(machine))
    T = max(T, least_size)
    dtype = draw(st.sampled_from(able[op]))
    chunked = mode in ("auto", "chunk", "staged")
    has_state, maybe = bool(declared.state), st.booleans()
    lengths = draw(st.none() | lengths_of(T)) if "cu_seqlens" in takes else None
    if lengths is not None:
        B = 1
    kinds = gates or [kind for kind in ALL_GATES if machine.name == "numpy" or kind not in HOST_ALONE]
    return Call(
        op,
        mode,
        dtype,
        B,
        H,
        T,
        K,
        V,
        seed=draw(st.integers(0, 999)),
        gate=draw(st.sampled_from(kinds)) if declared.gates else "zero",
        gate_dtype=draw(st.sampled_from((None, "float32"))) if declared.gates and DTYPES[dtype].itemsize == 2 else None,
        loudness=draw(st.sampled_from(loudnesses(op, DTYPES[dtype]))),
        groups=draw(st.sampled_from((1, 1, 2, 3))) if has_state and H else 1,
        lengths=lengths,
        masked=draw(st.sampled_from((None, None, 0.0, 0.3, 1.0))) if "mask" in takes and lengths is None else None,
        reverse="reverse" in takes and draw(maybe),
        state_v_first="state_v_first" in takes and draw(maybe),
        layout=draw(st.sampled_from(("bhtd", "bthd"))),
        memory=draw(st.sampled_from(MEMORIES)),
        initial=draw(st.sampled_from((None, *DTYPES))) if has_state else None,
        final=has_state and draw(maybe),
        state_dtype=draw(st.sampled_from((None, None, *DTYPES))) if has_state and not gradient else None,
        chunk_size=draw(st.sampled_from((None, 16, 32, 48, 64, 128))) if chunked else None,
        materialize=draw(st.sampled_from((None, None, True, False) if mode != "staged" else (None, True)))
        if chunked and "materialize" in takes and op != GLA_VALUE_GATE.name
        else None,
        scale=draw(st.sampled_from((None, None, 1.0, -0.5, 0.0))),
        gamma=draw(st.sampled_from((None, 0.0, 0.5, 0.97, 1.0))) if "gamma" in takes else None,
        feature_map=draw(st.sampled_from((None, "elu", "relu", "exp"))) if "feature_map" in takes else None,
        normalize="normalize" in takes and draw(maybe),
        causal="causal" not in takes or draw(maybe),
        plants=draw(planted(declared, T)) if plants and T else (),
    )


def planted(declared, T):
    """At most two numbers that are not finite, mostly none."""
    one = st.tuples(
        st.sampled_from([name for name, axes in declared.arrays.items() if "T" in axes.split()]),
        st.integers(0, T - 1),
        st.integers(0, 500),
        st.sampled_from(("nan", "inf", "-inf")),
    )
    return st.one_of(st.just(()), st.just(()), st.lists(one, min_size=1, max_size=2).map(tuple))
