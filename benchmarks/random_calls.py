"""Random calls from the whole space that the operators accept: what benchmarks/sweep.py --random times and checks.

A call is one line of `name=value` pairs, which --replay takes back. Its time is judged by max(floor, 10 us): the floor
is the time to read every input and to write every result once, at the bandwidth of a copy in the same run. Its results
are held to the same operator in float64, token by token, at the first and the last key head.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial

import gates
import numpy as np
import run
from cases import DECLARED, DTYPES

import linattn_np
from linattn_np.command.measuring import contracting
from linattn_np.declarations import DELTA_RULES
from linattn_np.layouts import swap_heads

OPS = {"gla": 5, "rwkv6": 4, "simple_gla": 2, "retention": 1, "linear_attention": 1, "gla with gv": 1, "gla_step": 1}
OPS |= {"rwkv6_step": 1, "delta_rule": 1, "gated_delta_rule": 2, "kda": 2, "rwkv7": 2}
OPS |= dict.fromkeys(("gated_delta_rule_step", "kda_step", "rwkv7_step"), 0.5)
RANK_ONE = {op.name for op in DELTA_RULES}
DEEPEST = 256  # channels that the delta rules have kernels for
GATES = (*(name for name in gates.NAMES if name != "model"), "growth", "zero")
DECAYS = ("g", "gv", "w")
LEAST_MS = 10e-3  # what the launches of a call may take: no floor is lower
ELEMENTS = (1 << 13, 1 << 27)  # of the largest array
SAMPLES = 3
SPREAD = 3  # times the limit of benchmarks/run.py that an error may be: gates here are harder


@dataclass(frozen=True)
class Call:
    """A call of an operator; the fields that are not sizes have the values of a plain call by default."""

    op: str
    B: int
    T: int
    H: int  # of q and k
    K: int
    V: int
    groups: int = 1  # value heads a key head
    dtype: str = "bfloat16"
    gate: str = "trained"
    wide_gates: bool = False  # float32 gates beside half precision
    layout: str = "bhtd"
    memory: str = "aligned"  # one of MEMORY
    sequences: int = 0  # packed into one row
    tailed: bool = False  # packed lengths: many short and few long ones; else equal ones
    initial: bool = False  # an initial state is given
    final: bool = False  # the final state is asked for
    reverse: bool = False
    materialize: str = "None"
    mode: str = "auto"
    backward: bool = False  # the pullback, after a forward pass that is not timed
    lengths: bool = False  # queries and keys are divided by their lengths

    def __str__(self):
        """The line that --replay takes: the op, the sizes, and whatever is not as in a plain call."""
        shown = (
            f"{field.name}={str(getattr(self, field.name)).replace(' ', '_')}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return " ".join(shown)

    @property
    def step(self):
        return self.op.endswith("_step")

    @property
    def declared(self):
        return DECLARED[self.op]

    @property
    def rank_one(self):
        """Whether it is a delta rule, or a step of one."""
        return self.op.removesuffix("_step") in RANK_ONE

    def heads_each(self, axes, name=None) -> int:
        """How many heads an array has for each key head."""
        shared = getattr(self.declared, "shared", None)
        own = "V" in axes or shared is not None and name in self.declared.arrays and name not in shared
        return self.groups if own else 1

    @property
    def function(self):
        return getattr(linattn_np, self.op.split()[0])

    @property
    def bounds(self):
        """[N + 1] of the packed sequences."""
        weights = np.full(self.sequences, 1.0)
        if self.tailed:
            weights = np.random.default_rng(self.T).pareto(1, self.sequences) + 0.1
        return np.concatenate([[0], np.round(self.T * np.cumsum(weights) / weights.sum())]).astype(int).tolist()

    @property
    def keywords(self):
        """What the call is given besides arrays."""
        given = {"qk_l2norm": True} if self.lengths else {}
        if self.step:
            return given
        given |= {"layout": self.layout, "reverse": self.reverse}
        given["output_final_state"] = self.final and not self.backward
        if "materialize" in self.declared.keywords.__annotations__ and self.op != "gla with gv":
            given["materialize"] = {"None": None, "True": True, "False": False}[self.materialize]
        if self.mode != "auto":
            given["mode"] = self.mode
        if self.dtype == "tf32":
            given["precision"] = "tf32"
        if self.sequences:
            given["cu_seqlens"] = self.bounds
        return given


MEMORY = ("aligned", "odd", "slices", "fused")


def read(line) -> Call:
    """The call of a line that `str` wrote."""
    types = {"int": int, "bool": lambda word: word == "True", "str": lambda word: word.replace("_with_gv", " with gv")}
    given = dict(word.split("=", 1) for word in line.split())
    fields = [field for field in dataclasses.fields(Call) if field.name in given]
    return Call(**{field.name: types[field.type](given[field.name]) for field in fields})


def draw_call(rng) -> Call:
    """One call: sizes log-uniform, each option as in a plain call most of the time."""

    def log_uniform(low, high):
        return int(math.exp(rng.uniform(math.log(low), math.log(high + 1))))

    def chosen(*values, plain=0.7):
        return values[0] if rng.random() < plain else values[rng.integers(len(values))]

    def columns():
        return int(rng.choice((16, 32, 64, 96, 128, 192, 256, 512))) if rng.random() < 0.6 else log_uniform(1, 512)

    def has(op, name):
        return name in DECLARED[op].keywords.__annotations__

    while True:
        op = str(rng.choice(list(OPS), p=np.array(list(OPS.values())) / sum(OPS.values())))
        step, rank_one = op.endswith("_step"), op.removesuffix("_step") in RANK_ONE
        K = min(columns(), DEEPEST) if rank_one else columns()
        V = K if rng.random() < 0.5 else columns()
        B, T, H = log_uniform(1, 64), 1 if step else log_uniform(1, 1 << 17), log_uniform(1, 128)
        if step:
            B = log_uniform(1, 1024)
        grouped = ("gla", "simple_gla", "retention", "linear_attention")
        groups = chosen(1, 2, 4, 8) if op in grouped or has(op, "qk_l2norm") else 1
        largest = B * H * groups * max(T * max(K, V), K * V if step else 0)
        if ELEMENTS[0] <= largest <= ELEMENTS[1]:
            break
    dtype = str(rng.choice(("bfloat16", "float16", "float32", "tf32"), p=(0.5, 0.2, 0.2, 0.1)))
    gated = any(name in DECAYS for name in DECLARED[op].arrays)
    half = dtype in ("bfloat16", "float16")
    lengths = bool(has(op, "qk_l2norm") and K > 1 and rng.random() < 0.3)  # of one channel the sign alone is left
    gate = chosen(*GATES, plain=0.4) if gated else "trained"
    if step:
        single = "float32" if dtype == "tf32" else dtype
        return Call(op, B, 1, H, K, V, groups, single, gate, lengths=lengths)
    packed = T > 1 and rng.random() < 0.2
    gv = op == "gla with gv"
    materialize = chosen("None", "True", "False") if has(op, "materialize") and not gv else "None"
    unstaged = gv or rank_one or materialize == "False"  # mode "staged" keeps every chunk's state
    return Call(
        op,
        1 if packed else B,
        T * B if packed else T,
        H,
        K,
        V,
        groups,
        dtype,
        gate,
        bool(gated and half and rng.random() < 0.3),
        chosen("bhtd", "bthd", plain=0.5),
        chosen(*MEMORY),
        log_uniform(1, min(4096, T * B)) if packed else 0,
        bool(packed and rng.random() < 0.5),
        bool(rng.random() < 0.3),
        bool(rng.random() < 0.3),
        bool(rng.random() < 0.2),
        materialize,
        chosen("auto", "chunk") if unstaged else chosen("auto", "chunk", "staged", plain=0.8),
        bool(rng.random() < 0.4),
        lengths,
    )


# -- arrays of a call --------------------------------------------------------------------------------------------------
def shape_of(call, axes):
    sizes = {"B": call.B, "T": call.T, "H": call.H, "K": call.K, "V": call.V}
    sizes["N"] = call.sequences or call.B
    return [sizes[axis] for axis in axes.split()]


def per_value_head(call, axes, shape, name=None):
    """The shape of an array with as many heads as it has."""
    heads = call.heads_each(axes, name)
    return [size * heads if axis == "H" else size for axis, size in zip(axes.split(), shape)]


def draw_gates(call, rng, xp, shape):
    if call.gate == "zero":
        return xp.zeros(shape, np.float32)
    if call.gate == "growth":  # one gate of 10,000 grows
        g = gates.draw("weak", rng, xp, shape)
        return xp.where(rng.random(shape, dtype=np.float32) < 1e-4, np.float32(1.5), g)
    return gates.draw(call.gate, rng, xp, shape)


def laid(call, x, axes, xp):
    """The same values in the layout and in the memory of the call."""
    x = xp.ascontiguousarray(swap_heads(x, axes, call.layout)) if not call.step else x
    if call.memory in ("aligned", "fused") or x.ndim < 3:
        return x
    if call.memory == "slices":
        wide = xp.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)[..., : x.shape[-1]]
    else:
        wide = xp.empty(x.size + 1, x.dtype)[1:].reshape(x.shape)
    wide[...] = x
    return wide


def draw(call, xp, seed):
    """(the call's arrays as [B, H, ..], the same as they are passed, the states and cotangents by name)."""
    rng = xp.random.default_rng(seed)
    dtype = DTYPES[call.dtype]

    def normal(shape):
        return rng.standard_normal(tuple(shape), dtype=np.float32)

    plain = {}
    for name, axes in DECLARED[call.op].arrays.items():
        shape = tuple(per_value_head(call, axes, shape_of(call, axes), name))
        if name in DECAYS:
            x = draw_gates(call, rng, xp, (*shape[:2], 1, *shape[2:]) if call.step else shape)
            plain[name] = x[:, :, 0] if call.step else x
        else:
            plain[name] = normal(shape)
    single = ("u", *DECAYS) if call.wide_gates else ("u",)
    plain = {name: x.astype(np.float32 if name in single else dtype) for name, x in contracting(plain, xp).items()}
    given = {name: laid(call, x, DECLARED[call.op].arrays[name], xp) for name, x in plain.items()}
    alike = {(x.shape[:-1], x.dtype) for x in list(given.values())[:3]}
    if call.memory == "fused" and call.groups == 1 and len(alike) == 1:
        given |= fused(given, xp)
    more = {}
    if call.step or call.initial:
        state = normal(per_value_head(call, "N H K V", shape_of(call, "N H K V")))
        more["state" if call.step else "initial_state"] = state
    if call.backward:
        more["do"] = xp.ascontiguousarray(swap_heads(normal(plain["v"].shape).astype(dtype), "B H T V", call.layout))
    return plain, given, more


def fused(given, xp):
    """The first three arrays as slices of one buffer."""
    names = list(given)[:3]
    buffer = xp.concatenate([given[name] for name in names], axis=-1)
    ends = np.cumsum([given[name].shape[-1] for name in names])
    return {name: buffer[..., end - given[name].shape[-1] : end] for name, end in zip(names, ends)}


def prepared(call, given, more):
    """What is timed: a function without arguments."""
    if call.step:
        return partial(call.function, *given.values(), **more, **call.keywords)
    if not call.backward:
        return partial(call.function, *given.values(), **states_of(more), **call.keywords)
    _, pullback = linattn_np.vjp(call.function, *given.values(), **states_of(more), **call.keywords)
    return partial(pullback, more["do"])


def bytes_moved(call, given, more):
    """Every input read once and every result written once."""
    inputs = sum(x.nbytes for x in given.values())
    states = sum(x.nbytes for name, x in more.items() if name in ("state", "initial_state"))
    out = given["v"].nbytes
    if call.backward:
        return 2 * (inputs + states) + out
    final = (call.sequences or call.B) * call.H * call.groups * call.K * call.V * 4 if call.final else 0
    return inputs + out + (2 * states if call.step else states + final)


# -- the exact answer --------------------------------------------------------------------------------------------------
def of_two_heads(call, axes, x, device, name=None):
    """The first and the last key head with their value heads, in float64: of the first and the last sequence as one
    row, of packed sequences' states all of them.
    """
    if axes == "H K":
        return x[[0, -1]].astype(np.float64)
    heads = call.heads_each(axes, name)
    rows = (slice(None), slice(None)) if axes.startswith("N") and call.sequences else (slice(0, 1), slice(-1, None))
    return device.xp.concatenate([x[rows[0], :heads], x[rows[1], -heads:]], 1).astype(np.float64)


def results_by_name(call, results, more):
    """{name: (axes, array as [B, H, ..])} of what a call gives, but the gradient of u, a sum over all sequences."""
    axes = DECLARED[call.op].arrays
    if call.step:
        return {"o": ("B H V", results), "state": ("N H K V", more["state"])}
    if not call.backward:
        o = results[0] if isinstance(results, tuple) else results
        return {"o": ("B H T V", swap_heads(o, "B H T V", call.layout))}
    named = zip(axes, results)
    return {f"d{name}": (axes[name], swap_heads(x, axes[name], call.layout)) for name, x in named if name != "u"}


def in_float64(call, plain, more, state, device):
    """(arrays, what `results_by_name` must be) at two key heads: the same operator token by token."""
    arrays = {name: of_two_heads(call, axes, plain[name], device, name) for name, axes in call.declared.arrays.items()}
    options = {"qk_l2norm": True} if call.lengths else {}
    if call.step:
        state = of_two_heads(call, "N H K V", state, device)
        return arrays, {"o": call.function(*arrays.values(), state=state, **options), "state": state}
    options |= {"reverse": call.reverse, "mode": "recurrent"}
    if call.op == "retention":
        options["gamma"] = (1 - 2.0 ** (-5 - np.arange(call.H)))[[0, -1]]
    if call.sequences:
        options["cu_seqlens"] = call.bounds
    if call.initial:
        options["initial_state"] = of_two_heads(call, "N H K V", more["initial_state"], device)
    if not call.backward:
        return arrays, {"o": call.function(*arrays.values(), **options)}
    _, pullback = linattn_np.vjp(call.function, *arrays.values(), **options)
    do = swap_heads(more["do"], "B H T V", call.layout)
    gradients = pullback(of_two_heads(call, "B H T V", do, device))
    return arrays, {f"d{name}": x for name, x in zip(arrays, gradients) if name != "u"}


def errors(call, plain, more, state, results, device):
    """{name: relative error} of o, of a step's state, or of the gradients; a gate's relative to its sum's terms."""
    arrays, exact = in_float64(call, plain, more, state, device)
    arrays, exact = ({name: device.host(x) for name, x in found.items()} for found in (arrays, exact))
    terms = {}
    if call.backward:
        query = next(iter(arrays))
        products = arrays[query] * exact[f"d{query}"]
        for name in {"dg", "dw"} & set(exact):
            terms[name] = run.rms(products if exact[name].ndim == 4 else products.sum(-1))
        if "dgv" in exact:
            terms["dgv"] = run.rms(arrays["v"] * exact["dv"])
    return {
        name: run.relative(
            device.host(of_two_heads(call, axes, x, device, name.removeprefix("d"))), exact[name], terms.get(name, 0.0)
        )[0]
        for name, (axes, x) in results_by_name(call, results, more).items()
    }


# -- measuring ---------------------------------------------------------------------------------------------------------
def states_of(more):
    return {name: x for name, x in more.items() if name == "initial_state"}


def warm_up(call, device):
    """Compiles what a call launches; a step compiles in its turn."""
    _, given, more = draw(call, device.xp, 0)
    if not call.step:
        linattn_np.warm_up(call.function, *given.values(), gradient=call.backward, **states_of(more), **call.keywords)


def measure(call, device, bandwidth):
    """A row: the call, its milliseconds, floor, multiple and errors, what `explain` says; or why it was refused."""
    device.free()
    row = {"call": str(call)}
    plain, given, more = draw(call, device.xp, 0)
    state = more["state"].copy() if call.step else None
    try:
        timed = prepared(call, given, more)
        found = errors(call, plain, more, state, timed(), device)
    except linattn_np.NotSupported as refusal:
        return row | {"refused": str(refusal).splitlines()[0]}
    ms = device.device_ms([device.captured([timed])] if call.step else [timed], SAMPLES)[0]
    floor = bytes_moved(call, given, more) / bandwidth * 1e3
    limit = SPREAD * run.LIMITS[call.dtype]
    row |= {"ms": ms, "floor_ms": floor, "multiple": ms / max(floor, LEAST_MS), "errors": found}
    return row | {"wrong": not all(error < limit for error in found.values()), "ran": explained(call, given, more)}


def explained(call, given, more):
    """The names of the kernels and the copies that `explain` lists."""
    if call.step:
        return []
    found = linattn_np.explain(
        call.function, *given.values(), gradient=call.backward, **states_of(more), **call.keywords
    )
    return [*found.kernels, *(f"copy: {copy}" for copy in found.copies)]


def line(row) -> str:
    if "refused" in row:
        return f"refused: {row['call']}: {row['refused']}"
    error = max(row["errors"].values())
    wrong = "WRONG  " * row["wrong"]
    return f"{wrong}{row['multiple']:7.2f}x of max(floor, 10 us), {row['ms']:.4f} ms, error {error:.1e}  {row['call']}"
