"""What a segment does to the state that comes in, for every operator: S_out = decay * S_in + S_own.

S_own is the segment's final state from zero, decay the product of its tokens' decays. The gradient runs the other way,
dS_in = decay * dS_out + dS_own, where dS_own comes from the segment's own o alone.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate

import numpy as np

from .. import ops
from ..declarations import GLA
from ..dispatch import summarise
from ..views import callers_sizes


class Recurrence:
    """The arithmetic of states for one call; its problem tells sizes, dtypes and options."""

    def __init__(self, function, declared, problem):
        self.function, self.declared = function, declared
        self.problem, self.dtype = problem, problem.compute_dtype
        sizes = callers_sizes(problem)
        self.heads = {"K": sizes["H"], "V": sizes["H"] * problem.groups}  # by what an array's columns are
        self.K, self.V = sizes["K"], sizes["V"]

    def state_shapes(self, rows):
        """Of every part of so many sequences' states."""
        S = (rows, self.heads["V"], self.K, self.V)
        return [S, (rows, self.heads["K"], self.K)][: len(self.problem.op.state)]

    def gate_shapes(self, rows):
        """Of the decays that a segment tells the others: none where all know them."""
        axes = {name: self.problem.op.arrays[name].split() for name in self.problem.op.gates if name != "u"}
        return [
            (rows, self.heads["V" if "V" in of else "K"], *(getattr(self, axis) for axis in of[3:]))
            for of in axes.values()
        ]

    def gates(self, arrays, mask):
        """exp of the sums over tokens: [rows, heads, channels], or [rows, heads] for a gate a head.

        Summed in float64: a million weak gates would lose digits in float32.
        """
        named = dict(zip(self.problem.op.arrays, arrays))
        return [total_decay(named[name], mask, self.dtype) for name in self.problem.op.gates if name != "u"]

    def decay(self, gates, tokens):
        """What multiplies S [rows, heads, K, V] over a segment of so many tokens; None where that is 1."""
        if "log_decay" in self.problem.options:
            factor = self.problem.op.decay_over(self.problem.options["log_decay"], tokens).astype(self.dtype)
            return as_kind(factor.repeat(self.problem.groups)[:, None, None], self.problem.arrays["q"])
        if not gates:
            return None
        factor = gates[0] if gates[0].ndim == 3 else gates[0][..., None]
        if self.problem.groups > 1:
            factor = factor.repeat(self.problem.groups, axis=1)
        factor = factor[..., None]
        return factor if len(gates) < 2 else factor * gates[1][:, :, None]

    def carry(self, state, own, gates, tokens):
        """decay * state + own, after so many tokens; a normaliser does not decay, nor does the S beside it."""
        if state is None:
            return own
        decay = self.decay(gates, tokens)
        if decay is None:
            return [before + added for before, added in zip(state, own, strict=True)]
        return [decay * state[0] + own[0]]

    def summary(self, arrays, given, gradient=False):
        """(the parts of the final state from zero, the decays, what the backend keeps), before the pass that gives o.

        Hopper's kernels cut a long sequence into segments, and begin with what each does to a state: that pass is this
        one, and is not repeated. The other way, o from a zero state with (q * decay) S_in added afterwards, reads q and
        o and writes o again, and rounds o twice.
        """
        found = summarise(self.declared, arrays, gradient=gradient, **given)
        if found is None:
            return self.whole_pass(self.function, arrays, given), self.gates(arrays, given.get("mask")), ()
        own, decays, kept = found
        if decays is None:
            return list(own), self.gates(arrays, given.get("mask")), kept
        return list(own), self.told(decays), kept

    def final_state(self, declared, function, arrays, given):
        """The final state from zero, without o where a backend can."""
        found = summarise(declared, arrays, **given)
        return self.whole_pass(function, arrays, given) if found is None else list(found[0])

    def whole_pass(self, function, arrays, given):
        """The same of the operator itself, whose o is not used."""
        final = function(*arrays, output_final_state=True, state_dtype=self.dtype, **given)[1]
        return list(final) if isinstance(final, tuple) else [final]

    def told(self, decays):
        """A backend's decays [rows, heads, channels] as `gates`; None where all ranks know them."""
        return (
            []
            if decays is None
            else [decays if len(shape) == 3 else decays[..., 0] for shape in self.gate_shapes(len(decays))]
        )

    @property
    def turns_over(self) -> bool:
        """Whether dS_own is the state of an operator that runs backwards: not through a division or two gates."""
        return len(self.problem.op.state) == 1 and len(self.gate_shapes(0)) < 2

    def gradient_summary(self, arrays, do, given):
        """dS_own = scale * sum_t exp(g_1 + ... + g_t) q_t do_t^T, for RWKV-6 without g_t itself.

        It is the final state of the same recurrence from the last token to the first, with q for k and do for v; what
        a token's own gate does to its read goes into q. A forward pass, a third of the work of a backward one.
        """
        problem = self.problem
        q, gates = arrays[0], arrays[3:4]
        dtype = q.dtype if do.dtype == q.dtype else self.dtype  # a gradient may be finer than its result
        given = given | {"reverse": not given["reverse"]}
        if problem.op.gates:
            g = gates[0]
            if not problem.op.reads_before_write:
                with np.errstate(over="ignore"):
                    decay = np.exp(wide(g))
                    q = (wide(q) * (decay if g.ndim == 4 else decay[..., None])).astype(dtype)
            gates = [g if g.dtype == dtype else g.astype(self.dtype)]
        q, do = q.astype(dtype, copy=False), do.astype(dtype, copy=False)
        operator = (GLA, ops.gla) if problem.op.reads_before_write else (self.declared, self.function)
        (dS,) = self.final_state(*operator, (q, q, do, *gates), given)
        dS = dS * problem.scale
        if "log_decay" in problem.options:  # one decay a head: exact after the sum
            dS *= self.decay((), 1)
        return [dS]


def total_decay(g, mask, dtype):
    g = wide(g)
    if mask is not None:  # padding keeps the state, whatever stands there
        kept = mask[:, None] if g.ndim == 3 else mask[:, None, :, None]
        g = np.where(kept, g, np.zeros_like(g))
    with np.errstate(all="ignore"):
        return np.exp(g.sum(axis=2, dtype=np.float64)).astype(dtype)


def wide(x):
    """A half-precision array in float32."""
    return x if x.dtype.itemsize > 2 else x.astype(np.float32)


def as_kind(x, example):
    """A host array where `example` lives."""
    if isinstance(example, np.ndarray):
        return x
    return kept_on_device(x.tobytes(), x.shape, x.dtype, example.device.id)


@lru_cache(64)
def kept_on_device(contents, shape, dtype, device):
    """An array on a CUDA device, sent there once: a copy from the host could not be captured into a graph."""
    import cupy

    with cupy.cuda.Device(device):
        return cupy.asarray(np.frombuffer(contents, dtype).reshape(shape))


class Row:
    """Arrays of given shapes in one row of a message."""

    def __init__(self, shapes):
        *starts, self.length = accumulate(map(math.prod, shapes), initial=0)
        self.places = [(slice(start, start + math.prod(shape)), shape) for start, shape in zip(starts, shapes)]
        self.shapes = shapes

    def put(self, row, arrays):
        for x, (place, _) in zip(arrays, self.places, strict=True):
            row[place] = x.reshape(-1)

    def parts(self, row):
        return [row[place].reshape(shape) for place, shape in self.places]

    def seen_in(self, arrays, dtype):
        """A message [1, length] in the memory of `arrays`, where a backend has put them side by side on a card."""
        first, *others = arrays
        if isinstance(first, np.ndarray) or any(x.dtype != dtype or not x.flags.c_contiguous for x in arrays):
            return None
        end = first.data + first.nbytes
        for x in others:
            if x.data.mem is not first.data.mem or x.data.ptr != end.ptr:
                return None
            end += x.nbytes
        return type(first)((1, self.length), dtype, first.data)
