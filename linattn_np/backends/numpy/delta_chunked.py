"""The delta rules in chunks, on BLAS.

    S_t = diag(exp g_t) S_{t-1} + b_t (a_t^T S') + k_t v_t^T,       o_t = scale q_t^T S_t

For RWKV-7, S' is S_{t-1}. For the delta rule S' is diag(exp g_t) S_{t-1}, a is -k, and b and the k of the last term
are beta k. For a chunk with the state S before it, qd and ad are q and a decayed from the chunk's start, be and ke are
b and k decayed to its end, and Aqk, Aqb, Aak, Aab are the scores of q and a with the keys k and b. Then

    N = (I - Aab)^-1,   H = Aqb N,      W = qd + H ad,      B = Aqk + H Aak,        Zb = N^T be,    Zk = ke + Aak^T Zb
    o = scale (W S + B V),              S <- diag(decay) S + Zb^T (ad S) + Zk^T V

Only the states, with ad S and Zb^T (ad S), are computed chunk after chunk; all else is computed at once. The values
that tokens write along b, N (Aak V + ad S), are not computed for o: with similar keys they are differences of large
numbers, while W and B are as small as q, and Zb and Zk as b and k, if no transition enlarges a state. Gradients take
the same matrices; dS is the gradient of the state after the chunk, and dO that of o:

    E = Zb dS,  R = E + scale H^T dO,   dV = Zk dS + scale B^T dO,      dS <- diag(decay) dS + scale W^T dO + ad^T E

For the delta rule B = H and Zk = Zb. If gates are above 0, later tokens may reduce again what these have enlarged; W is
then a difference of large numbers, which the recurrence is not. So a block of rows is computed token by token if gates
grow by more than GROWTH in a chunk, if results are not finite, or if decays underflow.
"""

from copy import copy

import numpy as np

from ...declarations import RWKV7
from . import by_token, delta_rule, recurrent, rwkv7
from .chunked import Schedule
from .cores import in_parallel
from .packing import thread_scratch
from .scores import Gates, blas_ready, decay_vjp, diagonal, gated_scores, gated_scores_vjp, mask_future

GROWTH = 4.0  # the most that a chunk's gates above 0 sum to: e^4 times the rounding error of float32 is 3e-6
FEW = 8  # up to so many tokens are faster one after the other than in a chunk
BLOCK = 8  # the size of blocks of triangular matrices that are inverted row by row


def run(problem, o):
    """Fills o [B, H, T, V]; returns the final state's parts."""
    member = DeltaArrays(equation_of(problem).of_every_head(problem))
    return forward(Schedule(member, has_loops=False), o, None)


def vjp(problem, o):
    """Fills o; returns (the final state's parts, pull)."""
    equation = equation_of(problem)
    member = DeltaArrays(equation.of_every_head(problem))
    schedule = Schedule(member, has_loops=False)
    states = np.empty((*o.shape[:2], schedule.chunking.count, schedule.K, schedule.V), schedule.dtype)
    final = forward(schedule, o, states)

    def pull(do, dht):
        gradients = [np.empty_like(x, schedule.dtype, shape=x.shape) for x in member.problem.arrays.values()]
        (dstates,) = recurrent.cast_states(dht, problem)
        dfinal = dstates.copy()
        accurate = in_parallel(lambda rows: backward(schedule, rows, do, states, dstates, gradients), schedule.blocks)
        for rows in schedule.inaccurate(schedule.blocks, accurate, dstates):
            block_problem, block_dfinal = member.block(schedule, rows, dfinal)
            _, pull_block = recurrent.vjp(block_problem, equation, np.empty_like(o[rows]))
            block_gradients, (initial,) = pull_block(do[rows], block_dfinal)
            for gradient, x in zip(gradients, block_gradients, strict=True):
                gradient[rows] = x
            member.put_states(schedule, rows, dstates, initial)
        return equation.of_the_callers(problem, gradients), (dstates,)

    return final, pull


def equation_of(problem):
    """The module with the operator's equation for one token."""
    return rwkv7 if problem.op is RWKV7 else delta_rule


class DeltaArrays:
    """The arrays of a call, with the attributes of a `Member` that `Schedule` reads.

    g : the gates [B, H, T, K or 1], zeros if the operator has none (`constant_gate`)
    chunks : the class of the operator's chunks
    """

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
        """The initial state [N, H, K, V] in a new array."""
        return recurrent.initial_states(self.problem)[0]

    def block(self, schedule, rows, states):
        """(the problem of a block of rows alone, its share of `states` [N, H, K, V] as the one part of its state)."""
        problem, B = self.problem, self.k[rows].shape[0]
        H = self.k[rows].shape[1]

        def of_block(states):
            part = schedule.chunking.of_rows(states, rows)
            return (part.reshape(-1, *part.shape[2:]),)

        sizes = problem.sizes | {"B": B, "H": H, "HK": H, "N": B * problem.spans.count}
        initial = problem.initial_state and of_block(problem.initial_state[0])
        arrays = {name: x[rows] for name, x in problem.arrays.items()}
        return problem.replace(arrays=arrays, sizes=sizes, initial_state=initial), of_block(states)

    def put_states(self, schedule, rows, states, part):
        """Writes `part`, the states of the problem of a block of rows, to `states` of all rows."""
        block_states = schedule.chunking.of_rows(states, rows)
        block_states[...] = part.reshape(block_states.shape)


def forward(schedule, o, states):
    """Fills o, and unless it is None `states` with the state before each chunk; returns the final state's parts."""
    member = schedule.member
    final = member.initial_state()
    accurate = in_parallel(lambda rows: streamed(schedule, rows, o, final, states), schedule.blocks, caller=True)
    for rows in schedule.inaccurate(schedule.blocks, accurate, final):
        block_problem, _ = member.block(schedule, rows, final)
        (last,) = recurrent.run(block_problem, equation_of(block_problem), o[rows])
        member.put_states(schedule, rows, final, last)
    return (final,)


def streamed(schedule, rows, o, final, states):
    """Computes a block of rows segment by segment, carrying the state; returns whether products gave o accurately."""
    carried, accurate = None, True
    for first, segment in schedule.segments:
        chunks = schedule.member.chunks(schedule, rows, segment)
        h = chunks.states()
        np.matmul(chunks.Zk.swapaxes(-1, -2), chunks.v, out=h[:, :, 1:])
        if carried is not None:
            h[:, :, 0] = carried
        schedule.chunking.scan(rows, first, chunks.decay, h, final, chunks.written)
        carried = h[:, :, segment.count].copy()
        if states is not None:
            states[rows][:, :, first : first + segment.count] = h[:, :, :-1]
        o_part = chunks.W @ h[:, :, :-1]
        o_part += chunks.B @ chunks.v
        o_part *= schedule.member.scale
        segment.unpack_into(o[rows], o_part)
        accurate &= by_token.is_finite(o_part) and not chunks.grow() and not chunks.gates.underflow(h[:, :, :-1])
    return accurate


def backward(schedule, rows, do, states, dstates, gradients):
    """Computes a block's gradients from the last segment to the first, carrying the state's gradient; returns whether
    products were accurate."""
    member, carried, accurate = schedule.member, None, True
    for first, segment in reversed(schedule.segments):
        chunks = member.chunks(schedule, rows, segment, for_gradients=True)
        scaled_do = blas_ready(segment.pack(do[rows], schedule.dtype)) * schedule.dtype.type(member.scale)
        dh = chunks.states()
        np.matmul(chunks.W.swapaxes(-1, -2), scaled_do, out=dh[:, :, :-1])
        if carried is not None:
            dh[:, :, -1] = carried
        schedule.chunking.scan_back(rows, first, chunks.decay, dh, dstates, chunks.read)
        h = states[rows][:, :, first : first + segment.count]
        parts = chunks.vjp(h, dh[:, :, 1:], scaled_do)
        for gradient, part, x in zip(gradients, parts, member.problem.arrays.values(), strict=True):
            segment.unpack_into(gradient[rows] if x.ndim == 4 else gradient[rows][..., None], part)
        accurate &= by_token.is_finite(*parts) and not chunks.grow() and not chunks.gates.underflow(h, dh[:, :, 1:])
        carried = dh[:, :, 0].copy()
    return accurate


# -- within chunks -----------------------------------------------------------------------------------------------------
class Pair:
    """The scores A of `rows` (such as queries) with `columns` (such as keys), both [B, H, n, C, K]; the attributes
    `decayed` and `to_end` are the rows decayed from the chunk's start, and the columns decayed to its end.

    exclusive : whether a row is not decayed by its own token's gate
    own : whether a row has a score with its own token's column, besides those of earlier tokens
    """

    def __init__(self, rows, columns, gates, decay, scratch, keep, *, exclusive=False, own=False):
        self.gates = copy(gates)  # gated_scores keeps the decays of this pair in it
        self.rows, self.columns, self.scratch = rows, columns, scratch
        self.exclusive, self.own = exclusive, own
        self.decayed, self.to_end, self.A = gated_scores(rows, columns, self.gates, exclusive, decay, scratch, keep)
        if not own:
            mask_future(self.A, exclusive=True)

    def vjp(self, dA, ddecayed=None, dto_end=None, through=None):
        """(the gradients of rows, of columns, of gates) from those of A, `decayed` and `to_end`; None stands for zeros.

        through : what the decay of the state over the chunk adds to the gradient of each of the chunk's gates

        dA is overwritten.
        """
        drows, dcolumns, dg = (np.empty_like(x) for x in (self.rows, self.columns, self.gates.g))
        own = diagonal(dA).copy()[..., None]
        mask_future(dA, exclusive=True)
        ddecayed = np.zeros_like(self.rows) if ddecayed is None else ddecayed
        dto_end = np.zeros_like(self.columns) if dto_end is None else dto_end
        through = np.zeros_like(dg[..., 0, :]) if through is None else through
        gated_scores_vjp(
            self.gates, self.exclusive, dA, ddecayed, dto_end, through, (drows, dcolumns, dg), self.scratch
        )
        if self.own:
            drows += own * self.columns
            dcolumns += own * self.rows
        return drows, dcolumns, dg


class Chunks:
    """Chunks [B, H, n, C, .] of a block of rows, and their matrices, which do not depend on states."""

    def __init__(self, schedule, rows, segment, for_gradients=False):
        member = schedule.member
        dtype, self.scratch, self.keep = schedule.dtype, thread_scratch(schedule.dtype), for_gradients
        arrays = {name: x if x.ndim == 4 else x[..., None] for name, x in member.problem.arrays.items()}
        packed = {name: segment.pack(x[rows], dtype) for name, x in arrays.items()}
        g = segment.pack(member.g[rows], dtype)
        self.v = blas_ready(packed["v"])
        self.gates = Gates(g, self.scratch.part("gates"), schedule.least if for_gradients else None)
        self.decay = np.empty((*g.shape[:-2], g.shape[-1]), dtype)
        self.make(**packed)  # sets ad, N, H, W, B, Zb and Zk of the module's equations

    def pair(self, name, rows, columns, **how):
        """The `Pair` of rows and columns, in scratch memory called `name`."""
        return Pair(rows, columns, self.gates, self.decay, self.scratch.part(name), self.keep, **how)

    def states(self):
        """Memory for states [B, H, n + 1, K, V]."""
        *rows, n, _, K = self.ad.shape
        return np.moveaxis(np.empty((n + 1, *rows, K, self.v.shape[-1]), self.v.dtype), 0, 2)

    def grow(self):
        """Whether the gates above 0 of some chunk sum to more than GROWTH."""
        g = self.gates.g
        return g.max(initial=0) > 0 and np.maximum(g, 0).sum(-2).max() > GROWTH

    def written(self, c, S):
        """Zb^T (ad S) for chunk c and the state S before it: what tokens write after they have read S."""
        return self.Zb[:, :, c].swapaxes(-1, -2) @ (self.ad[:, :, c] @ S)

    def read(self, c, dS):
        """The adjoint of `written`: ad^T (Zb dS)."""
        return self.ad[:, :, c].swapaxes(-1, -2) @ (self.Zb[:, :, c] @ dS)


class DeltaRuleChunks(Chunks):
    """`Chunks` of the delta rules of q, k, v, maybe g, and beta."""

    def make(self, q, k, v, beta, g=None):
        self.k, self.beta, self.gated, written = k, beta, g is not None, beta * k
        self.q_pairs = self.pair("q", q, written, own=True)
        self.a_pairs = self.pair("a", -k, written)
        self.ad, self.N = self.a_pairs.decayed, inverse(self.a_pairs.A)
        self.H = self.B = self.q_pairs.A @ self.N
        self.W = self.q_pairs.decayed + self.H @ self.ad
        self.Zb = self.Zk = self.N.swapaxes(-1, -2) @ self.q_pairs.to_end

    def vjp(self, h, dh_after, do):
        """The gradients of the call's arrays, in their order. `h`: the states before the chunks; `dh_after`: the
        gradients of the states after them; `do`: scale dO."""
        R = self.Zb @ dh_after
        R += self.H.swapaxes(-1, -2) @ do
        U = self.N @ (self.v + self.ad @ h)  # the values that tokens write along beta k
        h_T, U_T = h.swapaxes(-1, -2), U.swapaxes(-1, -2)
        dto_end = U @ dh_after.swapaxes(-1, -2)
        dq, dwritten, dg = self.q_pairs.vjp(do @ U_T, do @ h_T, dto_end, decay_vjp(self.decay, h, dh_after))
        da, dwritten_by_a, dg_by_a = self.a_pairs.vjp(R @ U_T, R @ h_T)
        dwritten += dwritten_by_a
        dg += dg_by_a
        dk = self.beta * dwritten - da
        dbeta = np.vecdot(self.k, dwritten)[..., None]
        return [dq, dk, R, *([dg] if self.gated else []), dbeta]


class Rwkv7Chunks(Chunks):
    """`Chunks` of rwkv7."""

    def make(self, r, w, k, v, a, b):
        self.rk_pairs, self.rb_pairs = self.pair("rk", r, k, own=True), self.pair("rb", r, b, own=True)
        self.ak_pairs, self.ab_pairs = self.pair("ak", a, k, exclusive=True), self.pair("ab", a, b, exclusive=True)
        self.ad, self.N = self.ab_pairs.decayed, inverse(self.ab_pairs.A)
        self.H = self.rb_pairs.A @ self.N
        self.W = self.rb_pairs.decayed + self.H @ self.ad
        self.B = self.rk_pairs.A + self.H @ self.ak_pairs.A
        self.Zb = self.N.swapaxes(-1, -2) @ self.ab_pairs.to_end
        self.Zk = self.rk_pairs.to_end + self.ak_pairs.A.swapaxes(-1, -2) @ self.Zb

    def vjp(self, h, dh_after, do):
        """As in `DeltaRuleChunks`."""
        R = self.Zb @ dh_after
        R += self.H.swapaxes(-1, -2) @ do
        dv = self.Zk @ dh_after
        dv += self.B.swapaxes(-1, -2) @ do
        P = self.N @ (self.ad @ h + self.ak_pairs.A @ self.v)  # the values that tokens write along b
        h_T, dh_after_T, v_T, P_T = (x.swapaxes(-1, -2) for x in (h, dh_after, self.v, P))
        through = decay_vjp(self.decay, h, dh_after)
        dr, dk, dw = self.rk_pairs.vjp(do @ v_T, do @ h_T, self.v @ dh_after_T, through)
        da, db, dw_by_ab = self.ab_pairs.vjp(R @ P_T, R @ h_T, P @ dh_after_T)
        dw += dw_by_ab
        for pair, dA, drows, dcolumns in ((self.rb_pairs, do @ P_T, dr, db), (self.ak_pairs, R @ v_T, da, dk)):
            for gradient, term in zip((drows, dcolumns, dw), pair.vjp(dA)):
                gradient += term
        return [dr, dw, dk, dv, da, db]


def inverse(L):
    """(I - L)^-1 for strictly lower triangular L [..., C, C]: blocks on the diagonal row by row, and then the inverses
    of neighbouring blocks joined by products."""
    shape, C = L.shape, L.shape[-1]
    assert C % BLOCK == 0
    assert C % BLOCK == 0
    L = L.reshape(-1, C, C)
    N = np.zeros_like(L)
    tiled = len(L), C // BLOCK, BLOCK, C // BLOCK, BLOCK
    L_blocks, N_blocks = (np.einsum("mibic->mibc", x.reshape(tiled)) for x in (L, N))  # those on the diagonal
    diagonal(N_blocks)[...] = 1
    for i in range(1, BLOCK):
        N_blocks[..., i : i + 1, :i] = L_blocks[..., i : i + 1, :i] @ N_blocks[..., :i, :i]
    size = BLOCK
    while size < C:
        for m in range(size, C, 2 * size):
            before, after = slice(m - size, m), slice(m, min(m + size, C))
            N[:, after, before] = N[:, after, after] @ (L[:, after, before] @ N[:, before, before])
        size *= 2
    return N.reshape(shape)
