"""The delta rules in chunks, on BLAS.

    S_t = diag(exp g_t) S_{t-1} + b_t (a_t^T S')^T + k_t v_t^T,     o_t = scale q_t^T S_t

For RWKV-7 S' is S_{t-1}. For the delta rule it is diag(exp g_t) S_{t-1}, with a = -k, and b and the written key are
beta k. Of a chunk with the state S before it, let qd and ad be q and a decayed from its start, be and ke be b and k
decayed to its end, and Aqk, Aqb, Aak, Aab the scores of q and a with the keys k and b. Then

    N = (I - Aab)^-1,   H = Aqb N,      W = qd + H ad,      B = Aqk + H Aak,        Zb = N^T be,    Zk = ke + Aak^T Zb
    o = scale (W S + B V),              S <- diag(decay) S + Zb^T (ad S) + Zk^T V

ad S and Zb^T (ad S) alone go from chunk to chunk. What the tokens write, N (Aak V + ad S), is not formed on the way to
o: where keys resemble each other its parts alternate in sign, while W, B and Z stay as small as q and b are where no
transition enlarges a state. The gradient takes the same matrices, with C the gradient of the state behind the chunk:

    E = Zb C,   R = E + scale H^T dO,   dV = Zk C + scale B^T dO,       C <- diag(decay) C + scale W^T dO + ad^T E

Of the delta rule B = H and Zk = Zb. What gates above 0 enlarge, later tokens may take back: the recurrence rounds what
they leave, while W would be a difference of large numbers. So a block of rows goes token by token where gates grow by
more than GROWTH in a chunk, where results are not finite, and where decays leave the range.
"""

from copy import copy

import numpy as np

from ...declarations import RWKV7
from . import by_token, delta_rule, recurrent, rwkv7
from .chunked import Schedule
from .cores import in_parallel
from .packing import thread_scratch
from .scores import Gates, blas_ready, diagonal, gated_scores, gated_scores_vjp, mask_future

GROWTH = 4.0  # nats: e^4 times the rounding of float32 is 3e-6
FEW = 8  # tokens of which a chunk takes longer than one after the other
BLOCK = 8  # tokens whose triangle is inverted row by row


def run(problem, o):
    """Fills o [B, H, T, V], returns the final state's parts."""
    member = Tokens(equation_of(problem).of_every_head(problem))
    return forward(member, Schedule(member, compiled=False), o, None)


def vjp(problem, o):
    """(final state's parts, pull), o filled."""
    equation = equation_of(problem)
    member = Tokens(equation.of_every_head(problem))
    schedule = Schedule(member, compiled=False)
    states = np.empty((*o.shape[:2], schedule.chunking.count, schedule.K, schedule.V), schedule.dtype)
    final = forward(member, schedule, o, states)

    def pull(do, dht):
        gradients = [np.empty_like(x, schedule.dtype, shape=x.shape) for x in member.problem.arrays.values()]
        (dstates,) = recurrent.cast_states(dht, problem)
        of_final = dstates.copy()
        done = in_parallel(
            lambda rows: backward(member, schedule, rows, do, states, dstates, gradients), schedule.blocks
        )
        for rows, well in zip(schedule.blocks, done):
            if not well or not schedule.finite_states(dstates, rows):
                part, put = member.block(schedule, rows, of_final)
                found, (initial,) = recurrent.vjp(part, equation, np.empty_like(o[rows]))[1](do[rows], put)
                for gradient, x in zip(gradients, found, strict=True):
                    gradient[rows] = x
                member.put_states(schedule, rows, dstates, initial)
        return equation.of_the_callers(problem, gradients), (dstates,)

    return final, pull


def equation_of(problem):
    return rwkv7 if problem.op is RWKV7 else delta_rule


class Tokens:
    """The arrays of a call, as `Schedule` cuts them into chunks; g [B, H, T, K or 1]."""

    def __init__(self, problem):
        self.problem, self.scale = problem, problem.scale
        self.k, self.v = problem["k"], problem["v"]
        gate = next(iter(problem.op.decays), None)
        self.constant_gate = gate is None
        if gate is None:
            self.g = np.broadcast_to(problem.compute_dtype.type(0), (*self.k.shape[:3], 1))
        else:
            self.g = problem[gate] if problem[gate].ndim == 4 else problem[gate][..., None]
        self.chunks = Rwkv7Chunks if problem.op is RWKV7 else DeltaRuleChunks

    def initial_state(self):
        return recurrent.initial_states(self.problem)[0]

    def block(self, schedule, rows, states):
        """(the problem of a block of rows alone, these states of the block as its parts)."""
        problem, B = self.problem, self.k[rows].shape[0]
        H = self.k[rows].shape[1]

        def of_block(states):
            part = schedule.of_rows(states, rows)
            return (part.reshape(-1, *part.shape[2:]),)

        sizes = problem.sizes | {"B": B, "H": H, "HK": H, "N": B * problem.spans.count}
        initial = problem.initial_state and of_block(problem.initial_state[0])
        arrays = {name: x[rows] for name, x in problem.arrays.items()}
        return problem.replace(arrays=arrays, sizes=sizes, initial_state=initial), of_block(states)

    def put_states(self, schedule, rows, states, part):
        into = schedule.of_rows(states, rows)
        into[...] = part.reshape(into.shape)


def forward(member, schedule, o, states):
    final = member.initial_state()
    done = in_parallel(lambda rows: streamed(member, schedule, rows, o, final, states), schedule.blocks, caller=True)
    for rows, well in zip(schedule.blocks, done):
        if not well or not schedule.finite_states(final, rows):
            part, _ = member.block(schedule, rows, final)
            (last,) = recurrent.run(part, equation_of(part), o[rows])
            member.put_states(schedule, rows, final, last)
    return (final,)


def streamed(member, schedule, rows, o, final, states):
    """All segments of a block of rows, one after the other, carrying the state; whether products did for o."""
    carried, well = None, True
    for first, segment in schedule.segments:
        chunks = member.chunks(member, rows, segment, schedule)
        h = chunks.states()
        np.matmul(chunks.Zk.swapaxes(-1, -2), chunks.v, out=h[:, :, 1:])
        if carried is not None:
            h[:, :, 0] = carried
        schedule.chunking.scan(rows, first, chunks.decay, h, final, chunks.written)
        carried = h[:, :, segment.count].copy()
        if states is not None:
            states[rows][:, :, first : first + segment.count] = h[:, :, :-1]
        found = chunks.W @ h[:, :, :-1]
        found += chunks.B @ chunks.v
        found *= member.scale
        segment.unpack_into(o[rows], found)
        well &= by_token.is_finite(found) and not chunks.grow() and not chunks.gates.underflow(h[:, :, :-1])
    return well


def backward(member, schedule, rows, do, states, dstates, gradients):
    """All segments of a block of rows, last first, carrying the state's gradient; whether products did for all."""
    carried, well = None, True
    for first, segment in reversed(schedule.segments):
        chunks = member.chunks(member, rows, segment, schedule, backward=True)
        scaled = blas_ready(segment.pack(do[rows], schedule.dtype)) * schedule.dtype.type(member.scale)
        dh = chunks.states()
        np.matmul(chunks.W.swapaxes(-1, -2), scaled, out=dh[:, :, :-1])
        if carried is not None:
            dh[:, :, -1] = carried
        schedule.chunking.scan_back(rows, first, chunks.decay, dh, dstates, chunks.read)
        h = states[rows][:, :, first : first + segment.count]
        found = chunks.vjp(h, dh[:, :, 1:], scaled)
        for gradient, part, x in zip(gradients, found, member.problem.arrays.values(), strict=True):
            place = gradient[rows] if x.ndim == 4 else gradient[rows][..., None]
            segment.unpack_into(place, part)
        well &= by_token.is_finite(*found) and not chunks.grow() and not chunks.gates.underflow(h, dh[:, :, 1:])
        carried = dh[:, :, 0].copy()
    return well


# -- within chunks -----------------------------------------------------------------------------------------------------
class Pair:
    """The scores A of rows with columns; the rows decayed from the chunk's start, the columns to its end.

    Rows stand behind their own gate, or `before` it. Columns are those before a row, and with `own` the row's too.
    """

    def __init__(self, rows, columns, gates, decay, scratch, keep, *, before=False, own=False):
        self.gates, self.rows, self.columns, self.scratch = copy(gates), rows, columns, scratch
        self.before, self.own = before, own
        self.decayed, self.to_end, self.A = gated_scores(rows, columns, self.gates, before, decay, scratch, keep)
        if not own:
            mask_future(self.A, exclusive=True)

    def vjp(self, dA, ddecayed=None, dto_end=None, through=None):
        """The gradients of rows, columns and gates from those of A, of the decayed rows and of the decayed columns.

        `through` is what flows across the whole chunk; None stands for zeros.
        """
        drows, dcolumns, dg = (np.empty_like(x) for x in (self.rows, self.columns, self.gates.g))
        own = diagonal(dA).copy()[..., None]
        mask_future(dA, exclusive=True)
        ddecayed = np.zeros_like(self.rows) if ddecayed is None else ddecayed
        dto_end = np.zeros_like(self.columns) if dto_end is None else dto_end
        through = np.zeros_like(dg[..., 0, :]) if through is None else through
        gated_scores_vjp(self.gates, self.before, dA, ddecayed, dto_end, through, (drows, dcolumns, dg), self.scratch)
        if self.own:
            drows += own * self.columns
            dcolumns += own * self.rows
        return drows, dcolumns, dg


class Chunks:
    """Chunks [B, H, n, C, .] of a block of rows, and their matrices, which hang on no state."""

    def __init__(self, member, rows, segment, schedule, backward=False):
        dtype, self.scratch, self.keep = schedule.dtype, thread_scratch(schedule.dtype), backward
        arrays = {name: x if x.ndim == 4 else x[..., None] for name, x in member.problem.arrays.items()}
        packed = {name: segment.pack(x[rows], dtype) for name, x in arrays.items()}
        g = segment.pack(member.g[rows], dtype)
        self.v = blas_ready(packed["v"])
        self.gates = Gates(g, self.scratch.part("gates"), schedule.least if backward else None)
        self.decay = np.empty((*g.shape[:-2], g.shape[-1]), dtype)
        self.make(**packed)

    def pair(self, name, rows, columns, **how):
        return Pair(rows, columns, self.gates, self.decay, self.scratch.part(name), self.keep, **how)

    def states(self):
        """Memory for states [B, H, n + 1, K, V]."""
        *rows, n, _, K = self.ad.shape
        return np.moveaxis(np.empty((n + 1, *rows, K, self.v.shape[-1]), self.v.dtype), 0, 2)

    def grow(self):
        """Whether the gates above 0 of some chunk come to more than GROWTH."""
        g = self.gates.g
        return g.max(initial=0) > 0 and np.maximum(g, 0).sum(-2).max() > GROWTH

    def written(self, c, S):
        """What chunk `c` writes of the state before it: Zb^T (ad S)."""
        return self.Zb[:, :, c].swapaxes(-1, -2) @ (self.ad[:, :, c] @ S)

    def read(self, c, C):
        """The adjoint of that: ad^T (Zb C)."""
        return self.ad[:, :, c].swapaxes(-1, -2) @ (self.Zb[:, :, c] @ C)

    def through(self, h, after):
        """What flows across whole chunks: of the states before them to those behind them, [B, H, n, K or 1]."""
        flow = self.decay * np.vecdot(h, after)
        return flow.sum(-1, keepdims=True) if self.decay.shape[-1] == 1 else flow


class DeltaRuleChunks(Chunks):
    def make(self, q, k, v, beta, g=None):
        self.k, self.beta, self.gated, written = k, beta, g is not None, beta * k
        self.of_q = self.pair("q", q, written, own=True)
        self.of_a = self.pair("a", -k, written)
        self.ad, self.N = self.of_a.decayed, inverse(self.of_a.A)
        self.H = self.B = self.of_q.A @ self.N
        self.W = self.of_q.decayed + self.H @ self.ad
        self.Zb = self.Zk = self.N.swapaxes(-1, -2) @ self.of_q.to_end

    def vjp(self, h, after, do):
        """The gradients of the call's arrays from the states before the chunks, those behind them, and scale dO."""
        R = self.Zb @ after
        R += self.H.swapaxes(-1, -2) @ do
        U = self.N @ (self.v + self.ad @ h)
        turned, of_values = h.swapaxes(-1, -2), U.swapaxes(-1, -2)
        dend = U @ after.swapaxes(-1, -2)
        dq, dwritten, dg = self.of_q.vjp(do @ of_values, do @ turned, dend, self.through(h, after))
        da, more, dg_more = self.of_a.vjp(R @ of_values, R @ turned)
        dwritten += more
        dg += dg_more
        dk = self.beta * dwritten - da
        dbeta = np.vecdot(self.k, dwritten)[..., None]
        return [dq, dk, R, *([dg] if self.gated else []), dbeta]


class Rwkv7Chunks(Chunks):
    def make(self, r, w, k, v, a, b):
        self.of_rk, self.of_rb = self.pair("rk", r, k, own=True), self.pair("rb", r, b, own=True)
        self.of_ak, self.of_ab = self.pair("ak", a, k, before=True), self.pair("ab", a, b, before=True)
        self.ad, self.N = self.of_ab.decayed, inverse(self.of_ab.A)
        self.H = self.of_rb.A @ self.N
        self.W = self.of_rb.decayed + self.H @ self.ad
        self.B = self.of_rk.A + self.H @ self.of_ak.A
        self.Zb = self.N.swapaxes(-1, -2) @ self.of_ab.to_end
        self.Zk = self.of_rk.to_end + self.of_ak.A.swapaxes(-1, -2) @ self.Zb

    def vjp(self, h, after, do):
        R = self.Zb @ after
        R += self.H.swapaxes(-1, -2) @ do
        dv = self.Zk @ after
        dv += self.B.swapaxes(-1, -2) @ do
        P = self.N @ (self.ad @ h + self.of_ak.A @ self.v)
        turned, behind, of_v, of_p = (x.swapaxes(-1, -2) for x in (h, after, self.v, P))
        dr, dk, dw = self.of_rk.vjp(do @ of_v, do @ turned, self.v @ behind, self.through(h, after))
        da, db, more = self.of_ab.vjp(R @ of_p, R @ turned, P @ behind)
        dw += more
        for pair, dA, drows, dcolumns in ((self.of_rb, do @ of_p, dr, db), (self.of_ak, R @ of_v, da, dk)):
            for gradient, more in zip((drows, dcolumns, dw), pair.vjp(dA)):
                gradient += more
        return [dr, dw, dk, dv, da, db]


def inverse(L):
    """(I - L)^-1 of strictly lower triangles [..., C, C]: row by row within blocks, which products then join."""
    shape, C = L.shape, L.shape[-1]
    L = L.reshape(-1, C, C)
    N = np.zeros_like(L)
    tiled = len(L), C // BLOCK, BLOCK, C // BLOCK, BLOCK
    own, found = (np.einsum("mibic->mibc", x.reshape(tiled)) for x in (L, N))
    diagonal(found)[...] = 1
    for i in range(1, BLOCK):
        found[..., i : i + 1, :i] = own[..., i : i + 1, :i] @ found[..., :i, :i]
    size = BLOCK
    while size < C:
        for m in range(size, C, 2 * size):
            before, after = slice(m - size, m), slice(m, min(m + size, C))
            N[:, after, before] = N[:, after, after] @ (L[:, after, before] @ N[:, before, before])
        size *= 2
    return N.reshape(shape)
