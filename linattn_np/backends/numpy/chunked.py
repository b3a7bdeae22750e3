"""The chunked form on BLAS, forward and backward.

    o = scale (qg h_c + A v)            h_{c+1} = diag(decay_c) h_c + kg^T v

h_c [K, V] is the state before chunk c, decay_c the product of all decays of the chunk. Of its tokens i and j, qg_i is
q_i times the decays since the chunk's start, kg_j is k_j times the decays until its end, and A_ij is q_i . k_j with the
decays between them, and 0 for j > i. If outputs read the state before the write (`exclusive`, RWKV-6), A_ii is the
bonus sum_k q_ik u_k k_ik.

Most of the work is products of small matrices, batched over chunks. Chunks are grouped into segments that fit in cache,
and rows (pairs of batch entry and head) into blocks, the cores' tasks. The results do not depend on the grouping.

`member` is a `family.Member`: a call's arrays and initial state as q, k, v, g, u and h_0 of the equations above.
"""

from itertools import product

import numpy as np

from . import by_token
from .casts import assign, cast
from .chunking import Chunking
from .cores import in_parallel, workers
from .loop_choice import loops
from .packing import Scratch, Segment, row_blocks, thread_scratch
from .scores import LEAST, LIMIT, Gates, blas_ready, decay_vjp, diagonal, gated_scores, gated_scores_vjp, mask_future

# Numbers in each of a segment's arrays: larger ones leave the cache, smaller ones cost more calls.
SEGMENT_ELEMENTS = 1 << 18
MATERIALIZED_BYTES = 1 << 30  # of all chunks' states: more are kept only if the caller asks for `materialize`
SCORES_BYTES = 1 << 25  # of all chunks' scores: more are not kept, because computing them again costs less
TASKS = 4  # per core, for Numba's loops
LEAST_ROWS, LEAST_TOKENS = 4, 64  # with fewer, NumPy computes: Numba's loops give each core whole rows


def run(member, o):
    """Fills o [B, H, T, V], returns the final state [N, H, K, V]."""
    return forward(Schedule(member), o, None)


def forward(schedule, o, states):
    """`run` for a schedule; `states` [B, H, chunks, K, V] receives every h_c unless it is None."""
    final, blocks, materialize = schedule.member.initial_state(), schedule.blocks, schedule.materialize
    if schedule.loops:
        left = compute_by_loops(schedule, o, final, states)
        if not left.all():
            blocks, materialize = [np.s_[b : b + 1, h : h + 1] for b, h in np.argwhere(left).tolist()], False
    if materialize:
        accurate = materialized(schedule, o, final, states)
    else:
        accurate = in_parallel(lambda rows: streamed(schedule, rows, o, final, states), blocks, caller=True)
    if inaccurate := schedule.inaccurate(blocks, accurate, final):
        redo(schedule, inaccurate, o, final, states)
    return final


def compute_by_loops(schedule, o, final, states):
    """Computes all rows in Numba's loops; returns a mask [B, H] of the rows that they leave to NumPy.

    These are rows whose gates are too strong for products, or whose results are not finite. `final` holds the initial
    states, and receives the final ones of the other rows.
    """
    member, chunking, (B, H) = schedule.member, schedule.chunking, o.shape[:2]
    begins, ends = (np.array([at.get(c, -1) for c in range(chunking.count)]) for at in (chunking.begins, chunking.ends))
    options = chunking.table, begins, ends, np.float32(LIMIT), np.float32(member.scale), member.exclusive
    left = np.empty((B, H), bool)

    def rowwise(x):
        """x [B, H, ...] as [B * H, ...], contiguous and in the computing dtype: a view if x is so, else a copy."""
        return np.require(cast(x, schedule.dtype), None, "CW").reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    def task(rows):
        arrays = [rowwise(x[rows]) for x in (member.q, member.k, member.v, member.g)]
        block_o, block_states = o[rows], np.moveaxis(schedule.chunking.of_rows(final, rows), 1, 2)
        block_shape, bonus = block_o.shape[:2], schedule.bonus(rows)
        if bonus is None:
            bonus = np.zeros((block_shape[1], 0), schedule.dtype)
        u = rowwise(np.broadcast_to(bonus, (*block_shape, bonus.shape[-1])))
        row_o = rowwise(block_o if block_o.dtype == schedule.dtype else np.empty(block_o.shape, schedule.dtype))
        initial = rowwise(block_states)
        last = initial.copy()
        # `states` is contiguous and of the computing dtype, and so are blocks of rows: `rowwise` returns a view.
        chunk_states = np.empty((len(row_o), 0, 0, 0), schedule.dtype) if states is None else rowwise(states[rows])
        undone = np.empty(block_shape, bool)
        schedule.loops.gated_rows(*arrays, u, *options, initial, row_o, last, chunk_states, undone.reshape(-1))
        left[rows] = undone
        block_states[~undone] = last[~undone.reshape(-1)]
        if not np.may_share_memory(row_o, o):
            assign(block_o, row_o.reshape(block_o.shape))

    in_parallel(task, row_blocks(B, H, max(1, B * H // (TASKS * workers()))), caller=True)
    return left


def mend(member, o, final):
    """Computes o and `final`, the results of another chunked form, again, token by token."""
    schedule = Schedule(member)
    redo(schedule, schedule.blocks, o, final, None)


def redo(schedule, blocks, o, final, states):
    """Computes these blocks of rows again with `token_by_token`."""
    initial = schedule.member.initial_state()
    in_parallel(lambda rows: token_by_token(schedule, rows, o, initial, final, states), blocks)


class Schedule:
    """A call of the gated family, divided into blocks of rows and `segments`, [(first chunk, `Segment`)].

    member : it reads its problem, k, v and constant_gate, and `states` the shape of g
    has_loops : whether Numba has loops for the operator
    loops : the module of these loops, or None if NumPy computes the call
    materialize : whether every chunk's state is kept, so that segments are computed in parallel
    least : None, or the gate below which a chunk is `halved` for gradients (scores.py)
    """

    def __init__(self, member, has_loops=True):
        self.member, self.dtype = member, member.problem.compute_dtype
        self.chunking = chunking = Chunking(member.problem)
        B, H, _, self.K = member.k.shape
        self.V = member.v.shape[-1]
        most = max(1, SEGMENT_ELEMENTS // (chunking.size * max(self.K, self.V)))  # chunks of all rows of a segment
        rows = max(1, min(B * H, max(B * H // workers(), most // max(1, chunking.count)), most))  # of a block
        self.blocks = row_blocks(B, H, rows)
        chunks = max(1, most // rows)  # of a row in a segment
        self.segments = [
            (c, Segment(chunking.table[c : c + chunks], chunking.size)) for c in range(0, chunking.count, chunks)
        ]
        self.materialize = member.problem.materialize
        if self.materialize is None:  # True if there are fewer blocks of rows than cores, and the states fit
            kept = B * H * chunking.count * self.K * self.V * self.dtype.itemsize
            self.materialize = len(self.blocks) < min(workers(), len(self.segments)) and kept < MATERIALIZED_BYTES
        self.least = None if member.constant_gate else LEAST
        suited = self.dtype == np.float32 and B * H >= LEAST_ROWS and chunking.count * chunking.size >= LEAST_TOKENS
        self.loops = loops(member.k.size) if suited and has_loops else None
        self.scores = None  # or a dict from `segment_key` to the `Scores` that the forward pass keeps for the pullback

    def keep_scores(self):
        """Makes the forward pass keep the chunks' scores for the pullback, if they are small."""
        if self.loops:
            return
        B, H = self.member.k.shape[:2]
        tokens = B * H * self.chunking.count * self.chunking.size
        # with K channels: q, k, qg, kg, g, their decays, and the decayed queries and keys of factored chunks
        if tokens * (8 * self.K + self.V + self.chunking.size) * self.dtype.itemsize <= SCORES_BYTES:
            self.scores = {}

    def scores_before(self, rows, first, segment, scratch):
        """A segment's scores for its gradients: those that the forward pass kept, or computed again."""
        found = self.scores and self.scores.get(segment_key(rows, first))
        return found or Scores(self, rows, segment, None, scratch, for_gradients=True)

    @property
    def single_chunks(self):
        """[(chunk, a segment of this chunk alone)]."""
        return [(c, Segment(self.chunking.table[c : c + 1], self.chunking.size)) for c in range(self.chunking.count)]

    def bonus(self, rows):
        """u [H, K] of a block of rows in the computing dtype, or None."""
        u = self.member.bonus(rows)
        return None if u is None else u[:, 0, 0]

    def inaccurate(self, blocks, accurate, states):
        """The blocks of rows to compute token by token: products were not accurate, or a last state is not finite.

        accurate : for each block, whether products gave its results accurately
        states : the states, or their gradients, [N, H, K, V] that the pass ended with
        """
        return [
            rows
            for rows, good in zip(blocks, accurate)
            if not good or not by_token.is_finite(self.chunking.of_rows(states, rows))
        ]

    def states(self, block, chunks, scratch):
        """Scratch memory for h [B, H, n + 1, K, V] and the decays [B, H, n, K or 1] of a block's n chunks."""
        h = scratch("h", (chunks + 1, *block, self.K, self.V))  # the scan goes by chunk
        decay = scratch("decay", (chunks, *block, self.member.g.shape[-1]))
        return np.moveaxis(h, 0, 2), np.moveaxis(decay, 0, 2)


def streamed(schedule, rows, o, final, states):
    """Computes a block of rows segment by segment, carrying the state; returns whether products gave o accurately."""
    block_shape, scratch, carried, accurate = o[rows].shape[:2], thread_scratch(schedule.dtype), None, True
    for first, segment in schedule.segments:
        n = segment.count
        h, decay = schedule.states(block_shape, n, scratch)
        inside = within_chunks(schedule, rows, first, segment, h, decay, scratch)
        if carried is not None:
            h[:, :, 0] = carried
        schedule.chunking.scan(rows, first, decay, h, final)
        carried = h[:, :, n].copy()
        if states is not None:
            states[rows][:, :, first : first + n] = h[:, :, :n]
        accurate &= read_out(schedule, rows, segment, inside, h, o, scratch)
    return accurate


def materialized(schedule, o, final, states):
    """Keeps every chunk's state: all segments in parallel, then the scan over the states, then all outputs in parallel.

    Returns for each block of rows whether products gave o accurately.
    """
    h, decay = schedule.states(o.shape[:2], schedule.chunking.count, Scratch(schedule.dtype))

    def part(rows, first, segment):
        """The arguments of `within_chunks` after the schedule."""
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

    accurate = in_parallel(out_of, parts, inside)
    return [
        all(accurate[start : start + len(schedule.segments)]) for start in range(0, len(parts), len(schedule.segments))
    ]


def token_by_token(schedule, rows, o, initial, final, states):
    """Computes a block of rows token by token, chunk by chunk."""
    member, carried = schedule.member, None
    for c, segment in schedule.single_chunks:
        q, k, v, g = (segment.pack(x[rows], schedule.dtype)[:, :, 0] for x in (member.q, member.k, member.v, member.g))
        if (s := schedule.chunking.begins.get(c)) is not None:
            carried = schedule.chunking.of_rows(initial, rows)[:, s]
        if states is not None:
            states[rows][:, :, c] = carried
        u, by_products = schedule.bonus(rows), segment.pack(o[rows], schedule.dtype)[:, :, 0]
        o_chunk, carried = by_token.forward(q, k, v, g, u, member.scale, member.exclusive, carried)
        # A state may be out of range although o is not: then the o of products stays.
        np.copyto(o_chunk, by_products, where=~np.isfinite(o_chunk) & np.isfinite(by_products))
        segment.unpack_into(o[rows], o_chunk[:, :, None])
        if (s := schedule.chunking.ends.get(c)) is not None:
            schedule.chunking.of_rows(final, rows)[:, s] = carried


def segment_key(rows, first):
    """The key of a segment's scores in `Schedule.scores`: its first batch entry, head and chunk."""
    return rows[0].start, rows[1].start, first


def within_chunks(schedule, rows, first, segment, h, decay, scratch):
    """Computes what needs no state: returns a segment's scores; writes kg^T v to h and the decays to `decay`."""
    scores = Scores(schedule, rows, segment, decay, scratch if schedule.scores is None else Scratch(schedule.dtype))
    if scores.lasting:
        scores.decay = decay.copy()
        schedule.scores[segment_key(rows, first)] = scores
    scores.store(h)
    return scores


class Scores:
    """The arrays q, k, v [B, H, n, C, .] of a block's n chunks with qg, kg and A, in the memory of `scratch`.

    The decay of each chunk is written to `decay`. `for_gradients`: computed for them, whose limits on gates are
    stricter. `lasting`: the gates are within these limits, so that the pullback may use the scores.
    """

    def __init__(self, schedule, rows, segment, decay, scratch, for_gradients=False):
        member = schedule.member
        q, k, v, g = (segment.pack(x[rows], schedule.dtype) for x in (member.q, member.k, member.v, member.g))
        self.q, self.k, self.v, self.u = q, k, blas_ready(v), member.bonus(rows)
        self.gates = gates = Gates(g, scratch, schedule.least if for_gradients else None)
        self.lasting = for_gradients or (schedule.scores is not None and gates.serve_gradients(schedule.least))
        self.decay = scratch("decay", (*g.shape[:-2], g.shape[-1])) if decay is None else decay
        self.qg, self.kg, self.A = gated_scores(q, k, gates, member.exclusive, self.decay, scratch, self.lasting)
        if self.u is not None:
            put_bonus(self.A, q, k, self.u)

    def store(self, h):
        """Writes kg^T v of chunk c to h_{c+1}; the scan adds the decayed h_c."""
        np.matmul(self.kg.swapaxes(-1, -2), self.v, out=h[:, :, 1:])


def read_out(schedule, rows, segment, scores, h, o, scratch):
    """o = scale (qg h + A v); returns whether it is accurate. It takes the memory of kg and of the gates' sums, which
    are no longer needed: scores that last have memory of their own."""
    weighted_values = np.matmul(scores.A, scores.v, out=scratch("kg", scores.v.shape))
    in_place = segment.view(o[rows], schedule.dtype)
    o_part = scratch("gate_sums", weighted_values.shape) if in_place is None else in_place
    np.matmul(scores.qg, h[:, :, :-1], out=o_part)
    o_part += weighted_values
    o_part *= schedule.member.scale
    if in_place is None:
        segment.unpack_into(o[rows], o_part)
    return by_token.is_finite(o_part) and not scores.gates.underflow(h[:, :, :-1])


def put_bonus(A, q, k, u):
    """Sets the diagonal A_ii = sum_k q_ik u_k k_ik."""
    diagonal(A)[:] = np.vecdot(q * u, k)


# -- backward ---------------------------------------------------------------------------------------------------------


def vjp(member, o):
    """Fills o; returns (final state, pull).

    pull(do, dstates) gives ((dq, dk, dv, dg, du), gradient of the initial state); `dstates` [N, H, K, V], the gradient
    of the final state, is overwritten with the latter.
    """
    schedule = Schedule(member)
    schedule.keep_scores()
    B, H = member.k.shape[:2]
    states = np.empty((B, H, schedule.chunking.count, schedule.K, schedule.V), schedule.dtype)
    final = forward(schedule, o, states)

    def pull(do, dstates):
        gradients, final_gradient = Gradients(schedule), dstates.copy()
        accurate = in_parallel(lambda rows: backward(schedule, rows, do, states, dstates, gradients), schedule.blocks)
        in_parallel(
            lambda rows: backward_token_by_token(schedule, rows, do, states, final_gradient, dstates, gradients),
            schedule.inaccurate(schedule.blocks, accurate, dstates),
        )
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
        if member.u is not None:  # one per chunk, so that the order of the sum does not depend on the blocks
            self.du = np.empty((*member.k.shape[:2], schedule.chunking.count, schedule.K), schedule.dtype)

    def memory(self, rows, segment, scratch):
        """Yields the memory for a segment's dq, dk, dv and dg: a view of each array, or scratch if none is possible."""
        for name in ("dq", "dk", "dv", "dg"):
            x = getattr(self, name)[rows]
            in_place = segment.view(x, x.dtype)
            packed = (*x.shape[:2], segment.count, segment.chunk, x.shape[-1])
            yield scratch(name, packed) if in_place is None else in_place

    def put(self, rows, segment, first, du, parts):
        """Stores a segment's gradients; those that `memory` placed in the arrays are there already."""
        for gradient, part in zip((self.dq, self.dk, self.dv, self.dg), parts, strict=True):
            if not np.may_share_memory(gradient, part):
                segment.unpack_into(gradient[rows], part)
        if du is not None:
            self.du[rows][:, :, first : first + segment.count] = du


def backward(schedule, rows, do, states, dstates, gradients):
    """Computes a block's gradients from the last segment to the first; returns whether products were accurate."""
    carried, accurate = None, True
    for first, segment in reversed(schedule.segments):
        scratch = thread_scratch(schedule.dtype)
        scores = schedule.scores_before(rows, first, segment, scratch)
        products = ChunkProducts(schedule.member, scores, segment.pack(do[rows], schedule.dtype), scratch)
        dh = products.dh()
        if carried is not None:
            dh[:, :, -1] = carried
        schedule.chunking.scan_back(rows, first, scores.decay, dh, dstates)
        gradient_parts = list(gradients.memory(rows, segment, scratch))
        h = states[rows][:, :, first : first + segment.count]
        du = products.vjp(h, dh, gradient_parts)
        gradients.put(rows, segment, first, du, gradient_parts)
        accurate &= by_token.is_finite(*gradient_parts) and not scores.gates.underflow(h, dh[:, :, 1:])
        carried = dh[:, :, 0].copy()
    return accurate


class ChunkProducts:
    """The gradients within chunks [B, H, n, C, .], as matrix products."""

    def __init__(self, member, scores, do, scratch):
        self.exclusive, self.scores, self.scratch = member.exclusive, scores, scratch
        self.do = np.multiply(do, member.scale, out=scratch("do", do.shape))

    def dh(self):
        """The gradients of the states h [B, H, n + 1, K, V] through the outputs alone; the last one is left to set."""
        *rows, n, _, K = self.scores.q.shape
        dh = self.scratch("dh", (*rows, n + 1, K, self.do.shape[-1]))
        np.matmul(self.scores.qg.swapaxes(-1, -2), self.do, out=dh[:, :, :-1])
        return dh

    def vjp(self, h, dh, out):
        """Fills out = (dq, dk, dv, dg) from the states h before the chunks and the gradients dh of all states.

        Returns du of each chunk, or None.
        """
        scores, do, dh_after, (dq, dk, dv, dg) = self.scores, self.do, dh[:, :, 1:], out
        q, k, v, u, scratch, multiply = scores.q, scores.k, scores.v, scores.u, self.scratch, self.scratch.product
        np.matmul(scores.A.swapaxes(-1, -2), do, out=dv)
        dv += multiply("dkg", scores.kg, dh_after)  # in the memory of dkg, which is computed below
        dA = multiply("dA", do, v.swapaxes(-1, -2))
        diagonal_dA = diagonal(dA).copy()[..., None]  # dA_ii: no gate multiplies A_ii
        mask_future(dA, exclusive=True)
        dqg, dkg = multiply("dqg", do, h.swapaxes(-1, -2)), multiply("dkg", v, dh_after.swapaxes(-1, -2))
        dlog_decay = decay_vjp(scores.decay, h, dh_after)
        gated_scores_vjp(scores.gates, self.exclusive, dA, dqg, dkg, dlog_decay, (dq, dk, dg), scratch)
        for gradient, other in ((dq, k), (dk, q)):
            weighted = np.multiply(diagonal_dA, other, out=scratch("dqg", other.shape))  # dqg has been used
            gradient += weighted if u is None else np.multiply(u, weighted, out=weighted)
        if u is None:
            return None
        qk = np.multiply(q, k, out=scratch("dqg", q.shape))
        return (diagonal_dA.swapaxes(-1, -2) @ qk)[..., 0, :]


def backward_token_by_token(schedule, rows, do, states, final_gradient, initial_gradient, gradients):
    """Computes what `backward` does token by token. `final_gradient` is the gradient of the final states; that of the
    initial states is written to `initial_gradient`."""
    member, chunking, carried = schedule.member, schedule.chunking, None
    for c, segment in reversed(schedule.single_chunks):
        arrays = (member.q, member.k, member.v, member.g, do)
        *inputs, do_chunk = (segment.pack(x[rows], schedule.dtype)[:, :, 0] for x in arrays)
        if (s := chunking.ends.get(c)) is not None:
            carried = schedule.chunking.of_rows(final_gradient, rows)[:, s]
        options = schedule.bonus(rows), member.scale, member.exclusive, states[rows][:, :, c], carried
        carried, du, *parts = by_token.backward(*inputs, do_chunk, *options)
        gradients.put(rows, segment, c, None if du is None else du[:, :, None], [x[:, :, None] for x in parts])
        if (s := chunking.begins.get(c)) is not None:
            schedule.chunking.of_rows(initial_gradient, rows)[:, s] = carried
