"""The chunked form on BLAS, forward and backward.

    o = scale (qg h_c + A v)            h_{c+1} = diag(decay_c) h_c + kg^T v

Nearly all of it is products of small matrices, in batches over chunks. The work is cut into segments of chunks that
stay in cache, and over rows (batch, head) into tasks for the machine's cores; neither cut changes a bit of the result.
"""

from itertools import product

import numpy as np

from . import by_token
from .casts import assign, cast
from .chunking import Chunking
from .cores import in_parallel, workers
from .loop_choice import loops
from .packing import Scratch, Segment, row_blocks, thread_scratch
from .scores import LEAST, LIMIT, Gates, blas_ready, diagonal, gated_keys, gated_scores, gated_scores_vjp, mask_future

SEGMENT_ELEMENTS = 1 << 18  # of one of a segment's arrays: long calls for the threads, short ones for the cache
MATERIALIZED_BYTES = 1 << 30  # above this, keeping every chunk's state must be asked for
SCORES_BYTES = 1 << 25  # of all chunks' scores: more are made again for the gradients, which costs less than memory
TASKS = 4  # of a core, by Numba's loops
LEAST_ROWS, LEAST_TOKENS = 4, 64  # for Numba's loops: a core does a row alone


def run(member, o, states=None):
    """Fills o [B, H, T, V], returns the final state [N, H, K, V]; `states` [B, H, NC, K, V] receives one a chunk."""
    return forward(Schedule(member), o, states)


def forward(schedule, o, states):
    final = schedule.member.initial_state()
    blocks = compiled(schedule, o, final, states) if schedule.loops else schedule.blocks
    if schedule.materialize and blocks is schedule.blocks:
        done = materialized(schedule, o, final, states)
    else:
        done = in_parallel(lambda rows: streamed(schedule, rows, o, final, states), blocks, caller=True)
    undone = [rows for rows, well in zip(blocks, done) if not well or not schedule.finite_states(final, rows)]
    if undone:
        redo(schedule, undone, o, final, states)
    return final


def compiled(schedule, o, final, states):
    """Numba's loops on all rows; the blocks of those that are left: with strong gates, or with results not finite."""
    member, chunking, (B, H) = schedule.member, schedule.chunking, o.shape[:2]
    begins, ends = (np.array([at.get(c, -1) for c in range(chunking.count)]) for at in (chunking.begins, chunking.ends))
    how = chunking.table, begins, ends, np.float32(LIMIT), np.float32(member.scale), member.exclusive
    left = np.ones((B, H), bool)

    def rowwise(x):
        return np.require(cast(x, schedule.dtype), None, "CW").reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    def task(rows):
        arrays = [rowwise(x[rows]) for x in (member.q, member.k, member.v, member.g)]
        u = np.zeros((H, 0)) if member.u is None else member.u
        u = np.array(np.broadcast_to(u[rows[1]], (*o[rows].shape[:2], u.shape[1])), np.float32)
        of_block = np.moveaxis(schedule.of_rows(final, rows), 1, 2)
        to = o[rows]
        found = rowwise(to if to.dtype == schedule.dtype else np.empty(to.shape, schedule.dtype))
        initial = rowwise(of_block)
        kept = np.empty((len(found), 0, 0, 0), np.float32) if states is None else rowwise(states[rows])
        last, undone = initial.copy(), np.empty(left[rows].shape, bool)
        schedule.loops.gated_rows(*arrays, rowwise(u), *how, initial, found, last, kept, undone.reshape(-1))
        left[rows] = undone
        of_block[~undone] = last[~undone.reshape(-1)]
        if not np.may_share_memory(found, o):
            assign(to, found.reshape(to.shape))

    in_parallel(task, row_blocks(B, H, max(1, B * H // (TASKS * workers()))), caller=True)
    return schedule.blocks if left.all() else [np.s_[b : b + 1, h : h + 1] for b, h in np.argwhere(left).tolist()]


def final_state(member):
    """The final state [N, H, K, V] from zero without o; None where it takes more than products."""
    schedule, final = Schedule(member), member.state(None)
    well = in_parallel(lambda rows: states_alone(schedule, rows, final), schedule.blocks)
    return final if all(well) and by_token.is_finite(final) else None


def states_alone(schedule, rows, final):
    """Compute the states as `streamed` does, without o; tells whether all decays are in range."""
    member, carried, scratch, well = schedule.member, None, thread_scratch(schedule.dtype), True
    block = member.k[rows].shape[:2]
    for first, segment in schedule.segments:
        h, decay = schedule.states(block, segment.count, scratch)
        k, v, g = (segment.pack(x[rows], schedule.dtype) for x in (member.k, member.v, member.g))
        gates = Gates(g, scratch)
        kg = gated_keys(k, gates, decay, scratch)
        np.matmul(kg.swapaxes(-1, -2), blas_ready(v), out=h[:, :, 1:])
        if carried is not None:
            h[:, :, 0] = carried
        schedule.chunking.scan(rows, first, decay, h, final)
        well &= not gates.underflow(h[:, :, :-1])
        carried = h[:, :, segment.count].copy()
    return well


def mend(member, o, final):
    """Has o and the final state of another chunked form redone where they are not finite."""
    schedule = Schedule(member)
    redo(schedule, schedule.blocks, o, final, None)


def redo(schedule, blocks, o, final, states):
    initial = schedule.member.initial_state()
    in_parallel(lambda rows: carefully(schedule, rows, o, initial, final, states), blocks)


class Schedule:
    """A family member cut into segments of chunks and blocks of rows."""

    def __init__(self, member, compiled=True):
        self.member, self.dtype = member, member.problem.compute_dtype
        self.chunking = chunking = Chunking(member.problem)
        B, H, _, self.K = member.k.shape
        self.V = member.v.shape[-1]
        at_once = max(1, SEGMENT_ELEMENTS // (chunking.size * max(self.K, self.V)))  # chunks times rows
        rows = max(1, min(B * H, max(B * H // workers(), at_once // max(1, chunking.count)), at_once))
        self.blocks = row_blocks(B, H, rows)
        self.step = max(1, at_once // rows)
        self.segments = [
            (c, Segment(chunking.table[c : c + self.step], chunking.size)) for c in range(0, chunking.count, self.step)
        ]
        self.materialize = member.problem.materialize
        if self.materialize is None:  # rows alone do not keep the cores busy, and the states fit
            kept = B * H * chunking.count * self.K * self.V * self.dtype.itemsize
            self.materialize = len(self.blocks) < min(workers(), len(self.segments)) and kept < MATERIALIZED_BYTES
        self.least = None if member.constant_gate else LEAST
        suited = self.dtype == np.float32 and B * H >= LEAST_ROWS and chunking.count * chunking.size >= LEAST_TOKENS
        self.loops = loops(member.k.size) if suited and compiled else None
        self.scores = None  # those that a pullback finds again, by their place

    def keep_scores(self):
        """Has the forward pass leave the chunks' scores where gradients ask for them, if they are few."""
        if self.loops:
            return
        B, H = self.member.k.shape[:2]
        tokens = B * H * self.chunking.count * self.chunking.size
        if tokens * (8 * self.K + self.V + self.chunking.size) * self.dtype.itemsize <= SCORES_BYTES:
            self.scores = {}

    def scores_before(self, rows, first, segment, scratch):
        """A segment's scores for its gradients: those of the forward pass, or made again."""
        found = self.scores and self.scores.get(place(rows, first))
        return found or Scores(self, rows, segment, None, scratch, backward=True)

    @property
    def single_chunks(self):
        """[(chunk, its segment)]."""
        return [(c, Segment(self.chunking.table[c : c + 1], self.chunking.size)) for c in range(self.chunking.count)]

    def finite_states(self, states, rows):
        """Whether a block of rows is finite in states [N, H, K, V]."""
        return by_token.is_finite(self.of_rows(states, rows))

    def of_rows(self, states, rows):
        """A block of rows in states [N, H, K, V]: a view [B, sequences, H, K, V]."""
        S = self.chunking.sequences
        return states.reshape(len(states) // S, S, *states.shape[1:])[rows[0], :, rows[1]]

    def states(self, block, chunks, scratch):
        """Memory for h [B, H, n + 1, K, V] and the chunks' decays [B, H, n, K or 1] of a block of rows."""
        h = scratch("h", (chunks + 1, *block, self.K, self.V))  # chunk by chunk in memory, as they are scanned
        decay = scratch("decay", (chunks, *block, self.member.g.shape[-1]))
        return np.moveaxis(h, 0, 2), np.moveaxis(decay, 0, 2)


def streamed(schedule, rows, o, final, states):
    """All segments of a block of rows, one after the other, carrying the state; whether products did for o."""
    block, scratch, carried, well = o[rows].shape[:2], thread_scratch(schedule.dtype), None, True
    for first, segment in schedule.segments:
        n = segment.count
        h, decay = schedule.states(block, n, scratch)
        inside = within_chunks(schedule, rows, first, segment, h, decay, scratch)
        if carried is not None:
            h[:, :, 0] = carried
        schedule.chunking.scan(rows, first, decay, h, final)
        carried = h[:, :, n].copy()
        if states is not None:
            states[rows][:, :, first : first + n] = h[:, :, :n]
        well &= read_out(schedule, rows, segment, inside, h, o, scratch)
    return well


def materialized(schedule, o, final, states):
    """Every chunk's state kept: all segments side by side, then the states in order, then all outputs.

    Whether products did for o, by blocks of rows.
    """
    h, decay = schedule.states(o.shape[:2], schedule.chunking.count, Scratch(schedule.dtype))

    def part(rows, first, segment):
        chunks, after = slice(first, first + segment.count), slice(first, first + segment.count + 1)
        return rows, first, segment, h[rows][:, :, after], decay[rows][:, :, chunks], Scratch(schedule.dtype)

    parts = [part(rows, *segment) for rows, segment in product(schedule.blocks, schedule.segments)]
    inside = in_parallel(lambda part: within_chunks(schedule, *part), parts)
    in_parallel(lambda rows: schedule.chunking.scan(rows, 0, decay[rows], h[rows], final), schedule.blocks)
    if states is not None:
        states[:] = h[:, :, :-1]

    def out_of(part, inside):
        rows, _, segment, states, _, scratch = part
        return read_out(schedule, rows, segment, inside, states, o, scratch)

    well = in_parallel(out_of, parts, inside)
    return [all(well[at : at + len(schedule.segments)]) for at in range(0, len(parts), len(schedule.segments))]


def carefully(schedule, rows, o, initial, final, states):
    """Compute what `streamed` does, one chunk at a time; chunks whose decays leave the range go token by token."""
    member, carried = schedule.member, None
    for c, segment in schedule.single_chunks:
        inputs = [segment.pack(x[rows], schedule.dtype)[:, :, 0] for x in (member.q, member.k, member.v, member.g)]
        h, decay = schedule.states(o[rows].shape[:2], 1, Scratch(schedule.dtype))
        scores = Scores(schedule, rows, segment, decay, thread_scratch(schedule.dtype))
        scores.store(h)
        qg, A, v = (x[:, :, 0] for x in (scores.qg, scores.A, scores.v))
        if (s := schedule.chunking.begins.get(c)) is not None:
            carried = schedule.of_rows(initial, rows)[:, s]
        if states is not None:
            states[rows][:, :, c] = carried
        after = decay[:, :, 0, :, None] * carried + h[:, :, 1]
        found = member.scale * (qg @ carried + A @ v)
        at = np.nonzero(by_token.to_redo((found, after), inputs, (carried,)))
        if at[0].size:
            how = rows_of_bonus(member, rows, at), member.scale, member.exclusive
            stepwise, after[at] = by_token.forward(*(x[at] for x in inputs), *how, carried[at])
            overflowed = ~np.isfinite(stepwise) & np.isfinite(found[at])  # in the state, which scores do not go through
            found[at] = np.where(overflowed, found[at], stepwise)
        segment.unpack_into(o[rows], found[:, :, None])
        carried = after
        if (s := schedule.chunking.ends.get(c)) is not None:
            schedule.of_rows(final, rows)[:, s] = after


def rows_of_bonus(member, rows, at):
    """u [m, K] of the heads of the rows `at`, or None."""
    return None if member.u is None else member.bonus(rows)[at[1], 0, 0]


def place(rows, first):
    """The key under which a call keeps the scores of a segment: its first batch row, head and chunk."""
    return rows[0].start, rows[1].start, first


def within_chunks(schedule, rows, first, segment, h, decay, scratch):
    """Compute what depends on a chunk alone: its scores, its addition to the state into h, its decay into `decay`."""
    scores = Scores(schedule, rows, segment, decay, scratch if schedule.scores is None else Scratch(schedule.dtype))
    if scores.lasting:
        scores.decay = decay.copy()
        schedule.scores[place(rows, first)] = scores
    scores.store(h)
    return scores


class Scores:
    """Chunks [B, H, n, C, .] of a block of rows, their gated queries and keys and A, in the memory of `scratch`.

    `decay` receives their whole decays. Gradients ask for those made `backward`, or for `lasting` ones.
    """

    def __init__(self, schedule, rows, segment, decay, scratch, backward=False):
        member = schedule.member
        q, k, v, g = (segment.pack(x[rows], schedule.dtype) for x in (member.q, member.k, member.v, member.g))
        self.q, self.k, self.v, self.u = q, k, blas_ready(v), member.bonus(rows)
        self.gates = gates = Gates(g, scratch, schedule.least if backward else None)
        self.lasting = backward or (schedule.scores is not None and gates.serve_gradients(schedule.least))
        self.decay = scratch("decay", (*g.shape[:-2], g.shape[-1])) if decay is None else decay
        self.qg, self.kg, self.A = gated_scores(q, k, gates, member.exclusive, self.decay, scratch, self.lasting)
        if self.u is not None:
            put_bonus(self.A, q, k, self.u)

    def store(self, h):
        """kg^T v of each chunk, one place on from it in h."""
        np.matmul(self.kg.swapaxes(-1, -2), self.v, out=h[:, :, 1:])


def read_out(schedule, rows, segment, scores, h, o, scratch):
    """o = scale (qg h + A v), in the memory of kg and b, which have served; whether products did for it."""
    within = np.matmul(scores.A, scores.v, out=scratch("kg", scores.v.shape))
    in_place = segment.view(o[rows], schedule.dtype)
    part = scratch("b", within.shape) if in_place is None else in_place
    np.matmul(scores.qg, h[:, :, :-1], out=part)
    part += within
    part *= schedule.member.scale
    if in_place is None:
        segment.unpack_into(o[rows], part)
    return by_token.is_finite(part) and not scores.gates.underflow(h[:, :, :-1])


def put_bonus(A, q, k, u):
    """A_ii = sum_k q_ik u_k k_ik."""
    diagonal(A)[:] = np.vecdot(q * u, k)


# -- backward ---------------------------------------------------------------------------------------------------------


def vjp(member, o):
    """(final state, pull), o filled; pull(do, dht) gives ((dq, dk, dv, dg, du), gradient of the initial state)."""
    schedule = Schedule(member)
    schedule.keep_scores()
    B, H = member.k.shape[:2]
    states = np.empty((B, H, schedule.chunking.count, schedule.K, schedule.V), schedule.dtype)
    final = forward(schedule, o, states)

    def pull(do, dstates):
        gradients, of_final = Gradients(schedule), dstates.copy()
        done = in_parallel(lambda rows: backward(schedule, rows, do, states, dstates, gradients), schedule.blocks)
        undone = [
            rows for rows, well in zip(schedule.blocks, done) if not well or not schedule.finite_states(dstates, rows)
        ]
        in_parallel(lambda rows: backward_carefully(schedule, rows, do, states, of_final, dstates, gradients), undone)
        du = None if member.u is None else gradients.du.sum((0, 2))
        return (gradients.dq, gradients.dk, gradients.dv, gradients.dg, du), dstates

    return final, pull


class Gradients:
    """The arrays that the backward pass writes."""

    def __init__(self, schedule):
        member = schedule.member
        self.dq, self.dk, self.dv, self.dg = (
            np.empty_like(x, schedule.dtype, shape=x.shape) for x in (member.q, member.k, member.v, member.g)
        )
        if member.u is not None:  # one a chunk, so that no cut changes the order of the sum
            self.du = np.empty((*member.k.shape[:2], schedule.chunking.count, schedule.K), schedule.dtype)

    def memory(self, rows, segment, scratch):
        """Where to write a segment's dq, dk, dv and dg: at their places, or in scratch where tokens have to move."""
        for name in ("dq", "dk", "dv", "dg"):
            x = getattr(self, name)[rows]
            in_place = segment.view(x, x.dtype)
            packed = (*x.shape[:2], segment.count, segment.chunk, x.shape[-1])
            yield scratch(name, packed) if in_place is None else in_place

    def put(self, rows, segment, first, du, parts):
        for gradient, part in zip((self.dq, self.dk, self.dv, self.dg), parts, strict=True):
            if not np.may_share_memory(gradient, part):
                segment.unpack_into(gradient[rows], part)
        if du is not None:
            self.du[rows][:, :, first : first + segment.count] = du


def backward(schedule, rows, do, states, dstates, gradients):
    """All segments of a block of rows, last first, carrying the state's gradient; whether products did for all."""
    carried, well = None, True
    for first, segment in reversed(schedule.segments):
        scratch = thread_scratch(schedule.dtype)
        scores = schedule.scores_before(rows, first, segment, scratch)
        products = ChunkProducts(schedule.member, scores, segment.pack(do[rows], schedule.dtype), scratch)
        dh = products.dh()
        if carried is not None:
            dh[:, :, -1] = carried
        schedule.chunking.scan_back(rows, first, scores.decay, dh, dstates)
        found = list(gradients.memory(rows, segment, scratch))
        h = states[rows][:, :, first : first + segment.count]
        du = products.vjp(h, dh, found)
        gradients.put(rows, segment, first, du, found)
        well &= by_token.is_finite(*found) and not scores.gates.underflow(h, dh[:, :, 1:])
        carried = dh[:, :, 0].copy()
    return well


class ChunkProducts:
    """The backward pass within chunks [B, H, n, C, .], as products."""

    def __init__(self, member, scores, do, scratch):
        self.exclusive, self.scores, self.scratch = member.exclusive, scores, scratch
        self.do = np.multiply(do, member.scale, out=scratch("do", do.shape))

    def dh(self):
        """Gradients of the states [B, H, n + 1, K, V]: of each chunk's, what it adds; the last one's is to be set."""
        *rows, n, _, K = self.scores.q.shape
        dh = self.scratch("dh", (*rows, n + 1, K, self.do.shape[-1]))
        np.matmul(self.scores.qg.swapaxes(-1, -2), self.do, out=dh[:, :, :-1])
        return dh

    def vjp(self, h, dh, out):
        """du a chunk, from the states before the chunks and the gradients of all states; fills dq, dk, dv, dg."""
        scores, do, after, (dq, dk, dv, dg) = self.scores, self.do, dh[:, :, 1:], out
        q, k, v, u, scratch, product = scores.q, scores.k, scores.v, scores.u, self.scratch, self.scratch.product
        np.matmul(scores.A.swapaxes(-1, -2), do, out=dv)
        dv += product("dkg", scores.kg, after)
        dA = product("dA", do, v.swapaxes(-1, -2))
        own = diagonal(dA).copy()[..., None]  # of A_ii: the token's own weight, which no gate touches
        mask_future(dA, exclusive=True)
        dqg, dkg = product("dqg", do, h.swapaxes(-1, -2)), product("dkg", v, after.swapaxes(-1, -2))
        through = self.flow(h, after)
        gated_scores_vjp(scores.gates, self.exclusive, dA, dqg, dkg, through, (dq, dk, dg), scratch)
        for gradient, other in ((dq, k), (dk, q)):
            weighted = np.multiply(own, other, out=scratch("dqg", other.shape))
            gradient += weighted if u is None else np.multiply(u, weighted, out=weighted)
        return None if u is None else (own.swapaxes(-1, -2) @ np.multiply(q, k, out=scratch("dqg", q.shape)))[..., 0, :]

    def flow(self, h, after):
        """The gates' gradient by the products of the states before chunks and those behind them, [B, H, n, K or 1]."""
        decay = self.scores.decay
        flow = decay * np.vecdot(h, after)
        return flow.sum(-1, keepdims=True) if decay.shape[-1] == 1 else flow


def backward_carefully(schedule, rows, do, states, of_final, of_initial, gradients):
    """Compute what `backward` does, one chunk at a time; chunks whose decays leave the range go token by token."""
    member, chunking, carried = schedule.member, schedule.chunking, None
    for c, segment in reversed(schedule.single_chunks):
        scratch = thread_scratch(schedule.dtype)
        scores = Scores(schedule, rows, segment, None, scratch, backward=True)
        products = ChunkProducts(member, scores, segment.pack(do[rows], schedule.dtype), scratch)
        h = states[rows][:, :, c : c + 1]
        if (s := chunking.ends.get(c)) is not None:
            carried = schedule.of_rows(of_final, rows)[:, s]
        dh = products.dh()
        dh[:, :, 1] = carried
        dh[:, :, 0] += scores.decay[:, :, 0, :, None] * carried
        found = [np.empty_like(x) for x in (scores.q, scores.k, scores.v, scores.gates.g)]
        du = products.vjp(h, dh, found)
        found = [dh[:, :, 0], *(x[:, :, 0] for x in found)]
        inputs = [x[:, :, 0] for x in (scores.q, scores.k, scores.v, scores.gates.g, products.do)]
        at = np.nonzero(by_token.to_redo(found, inputs, (h, carried)))
        if at[0].size:
            u = rows_of_bonus(member, rows, at)
            redone = by_token.backward(*(x[at] for x in inputs), u, member.exclusive, h[:, :, 0][at], carried[at])
            if u is not None:
                du[:, :, 0][at] = redone[1]
            for x, new in zip(found, (redone[0], *redone[2:]), strict=True):
                x[at] = new
        carried = found[0].copy()
        gradients.put(rows, segment, c, du, [x[:, :, None] for x in found[1:]])
        if (s := chunking.begins.get(c)) is not None:
            schedule.of_rows(of_initial, rows)[:, s] = carried
