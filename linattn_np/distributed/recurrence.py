"""The parts of a segment's `Summary` for every operator, computed by calls of the operator, and the layout of the
message that sends them.

The state after a segment is F S_in + S_own: S_own is the segment's final state if its initial state is zero, F the
product of its tokens' transitions. For the gradient dS_in = F^T dS_out + dS_own, where dS_own is the initial state's
gradient if the final state's is zero.

In this module `arrays` are those of the operator for a segment's tokens, and `arguments` its other arguments.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate

import numpy as np

from ..conversions import callers_sizes
from ..declarations import GLA
from ..dispatch import call, summarise
from ..summary import Summary, Transition, factor_shapes


class Recurrence:
    """Computes the summaries of one checked call, `problem`."""

    def __init__(self, declared, problem):
        self.declared, self.problem, self.dtype = declared, problem, problem.compute_dtype
        sizes = callers_sizes(problem)
        self.heads = {"K": sizes["H"], "V": sizes["H"] * problem.groups}  # heads of keys, heads of values
        self.K, self.V = sizes["K"], sizes["V"]

    def state_shapes(self, rows):
        """The shape of each part of the states of `rows` sequences."""
        S = (rows, self.heads["V"], self.K, self.V)
        return [S, (rows, self.heads["K"], self.K)][: len(self.problem.op.state)]

    def factor_shapes(self, rows):
        """The shape of each factor of F in a message; () if every rank can compute them by itself."""
        return factor_shapes(self.problem.op, rows, self.heads["K"], self.heads["V"], self.K, self.V)

    def factors(self, arrays, arguments):
        """The factors of F for these tokens, as in `Summary`. Gates are summed in float64: the sum of a million weak
        gates would lose digits in float32."""
        if self.problem.op.transition is Transition.RANK_ONE:
            return self.whole_pass(self.declared, arrays, arguments)[1]
        named = dict(zip(self.problem.op.arrays, arrays))
        return [total_decay(named[name], arguments.get("mask"), self.dtype) for name in self.problem.op.decays]

    def summary_of_message(self, message, tokens, backwards=False) -> Summary:
        """The map of the state from a segment's message [*own, *factors]; if `backwards`, that of the gradient."""
        own, factors = message[: len(self.problem.op.state)], message[len(self.problem.op.state) :]
        if "log_decay" in self.problem.options:
            factors = [self.power_of_gamma(tokens)]
        summary = Summary(self.problem.op.transition, tuple(own), tuple(factors))
        return summary.of_gradient(summary.own) if backwards else summary

    def power_of_gamma(self, tokens):
        """Retention's decay over this number of tokens, [1, H], on the device of the call."""
        factor = self.problem.op.decay_over(self.problem.options["log_decay"], tokens).astype(self.dtype)
        return on_device_of(factor[None], next(iter(self.problem.arrays.values())))

    def summary(self, arrays, arguments, gradient=False):
        """(the parts of S_own, the factors of F, summaries). `summaries` are what `dispatch.call` can use again for o.

        Hopper's kernels cut a long sequence into segments and summarise these first; the call that computes o does not
        repeat that pass. The alternative, to compute o from a zero state and to add (q * decay) S_in afterwards, would
        read q and o again, write o again, and round o twice.
        """
        if self.problem.op.transition is Transition.RANK_ONE:
            return *self.whole_pass(self.declared, arrays, arguments), ()
        summary = summarise(self.declared, arrays, gradient=gradient, **arguments)
        if summary is None:
            return self.whole_pass(self.declared, arrays, arguments)[0], self.factors(arrays, arguments), ()
        own, decays, summaries = summary
        factors = self.factors(arrays, arguments) if decays is None else self.factors_of_decays(decays)
        return list(own), factors, summaries

    def final_state(self, declared, arrays, arguments):
        """The parts of S_own, without computing o if the backend can do so."""
        summary = summarise(declared, arrays, **arguments)
        return self.whole_pass(declared, arrays, arguments)[0] if summary is None else list(summary[0])

    def whole_pass(self, declared, arrays, arguments):
        """(the parts of S_own, [F, if transitions have rank one]), by a whole call of the operator.

        F is then computed as the final state of K more columns, whose initial state is the identity and whose values
        are zeros.
        """
        arguments, columns = arguments | {"output_final_state": True, "state_dtype": self.dtype}, self.V
        if self.problem.op.transition is not Transition.RANK_ONE:
            final = call(declared, arrays, **arguments)[1]
            return list(final) if isinstance(final, tuple) else [final], []
        named = dict(zip(self.problem.op.arrays, arrays))
        v = named[self.problem.op.value]
        named[self.problem.op.value] = np.concatenate([v, np.zeros_like(v, shape=(*v.shape[:3], self.K))], axis=-1)
        start = np.zeros_like(v, shape=(len(v), self.heads["V"], self.K, columns + self.K), dtype=self.dtype)
        for channel in range(self.K):
            start[..., channel, columns + channel] = 1
        final = call(declared, tuple(named.values()), **arguments, initial_state=start)[1]
        return [final[..., :columns]], [final[:, :: self.problem.groups, :, columns:]]  # heads of a group share F

    def factors_of_decays(self, decays):
        """The factors of F from a backend's products of decays [rows, heads, channels]; [] if `decays` is None, as
        every rank can then compute them by itself."""
        if decays is None:
            return []
        return [decays if len(shape) == 3 else decays[..., 0] for shape in self.factor_shapes(len(decays))]

    @property
    def reversal_gives_gradient(self) -> bool:
        """Whether the same operator, run backwards in time, computes dS_own: see `gradient_summary`.

        It does not if there is a normaliser, or two gates, or if transitions have rank one.
        """
        one_factor = len(self.factor_shapes(0)) < 2 and self.problem.op.transition is not Transition.RANK_ONE
        return len(self.problem.op.state) == 1 and one_factor

    def gradient_summary(self, arrays, do, arguments):
        """dS_own = scale * sum_t exp(g_1 + ... + g_t) q_t do_t^T, for RWKV-6 without g_t itself.

        It is the final state of the same recurrence from the last token to the first, with q in the place of k and do
        in the place of v. Where a token reads the state after its own gate, q is multiplied by that gate. This is a
        forward pass, a third of the work of a backward pass.
        """
        problem = self.problem
        q, *_ = arrays
        if q.shape[1] != self.heads["K"]:  # several heads of the gate share a head of q
            q = np.repeat(q, self.heads["K"] // q.shape[1], axis=1)
        gates = [x for name, x in zip(problem.op.arrays, arrays) if name in problem.op.decays]
        dtype = q.dtype if do.dtype == q.dtype else self.dtype  # do may have more digits than o
        arguments = arguments | {"reverse": not arguments["reverse"]}
        if problem.op.gates:
            g = gates[0]
            if not problem.op.reads_before_write:
                with np.errstate(over="ignore"):
                    decay = np.exp(at_least_float32(g))
                    q = (at_least_float32(q) * (decay if g.ndim == 4 else decay[..., None])).astype(dtype)
            gates = [g if g.dtype == dtype else g.astype(self.dtype)]
        q, do = q.astype(dtype, copy=False), do.astype(dtype, copy=False)
        derived = problem.op.derived
        inner = derived.inner if derived else GLA if problem.op.reads_before_write else self.declared
        (dS,) = self.final_state(inner, (q, q, do, *gates), arguments)
        dS = dS * problem.scale
        if "log_decay" in problem.options:  # one decay per head, by which the sum may be multiplied
            dS = Summary(Transition.SCALAR, (), (self.power_of_gamma(1),)).transitioned(dS)
        return [dS]


def total_decay(g, mask, dtype):
    """exp of the sum of a gate over tokens, [B, heads] or [B, heads, channels]; padding counts as 0."""
    g = at_least_float32(g)
    if mask is not None:
        is_token = mask[:, None] if g.ndim == 3 else mask[:, None, :, None]
        g = np.where(is_token, g, np.zeros_like(g))
    with np.errstate(all="ignore"):
        return np.exp(g.sum(axis=2, dtype=np.float64)).astype(dtype)


def at_least_float32(x):
    """A half-precision array in float32."""
    return x if x.dtype.itemsize > 2 else x.astype(np.float32)


def on_device_of(x, example):
    """A host array, copied to the device of `example`."""
    if isinstance(example, np.ndarray):
        return x
    return cuda_constant(x.tobytes(), x.shape, x.dtype, example.device.id)


@lru_cache(64)
def cuda_constant(contents, shape, dtype, device):
    """The CUDA array of these bytes, copied there once: a CUDA graph cannot capture a copy from the host."""
    import cupy

    with cupy.cuda.Device(device):
        return cupy.asarray(np.frombuffer(contents, dtype).reshape(shape))


class MessageLayout:
    """The layout of a message: arrays of given shapes, one after the other in a row of numbers."""

    def __init__(self, shapes):
        *starts, self.length = accumulate(map(math.prod, shapes), initial=0)
        self.spans = [(slice(start, start + math.prod(shape)), shape) for start, shape in zip(starts, shapes)]
        self.shapes = shapes

    def put(self, row, arrays):
        """Copies the arrays to a row [length]."""
        for x, (span, _) in zip(arrays, self.spans, strict=True):
            row[span] = x.reshape(-1)

    def parts(self, row):
        """The arrays as views of a row [length]."""
        return [row[span].reshape(shape) for span, shape in self.spans]

    def view_of(self, arrays, dtype):
        """A view [1, length] of `arrays` as one message, if they are adjacent in CUDA memory; else None."""
        first, *others = arrays
        if isinstance(first, np.ndarray) or any(x.dtype != dtype or not x.flags.c_contiguous for x in arrays):
            return None
        end = first.data + first.nbytes
        for x in others:
            if x.data.mem is not first.data.mem or x.data.ptr != end.ptr:
                return None
            end += x.nbytes
        return type(first)((1, self.length), dtype, first.data)
