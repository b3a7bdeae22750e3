"""The chunked form on BLAS, forward and backward.

    o = scale (qg h_c + A v)            h_{c+1} = diag(decay_c) h_c + kg^T v

Nearly all of it is products of small matrices, in batches over chunks. The work is cut into segments of chunks that
stay in cache, and over rows (batch, head) into tasks for the machine's cores; neither cut changes a bit of the result.
"""

from itertools import product

import numpy as np

from .chunking import Chunking
from .cores import in_parallel, workers
from .packing import Scratch, Segment, row_blocks, thread_scratch
from .scores import Gates, blas_ready, chunk_decays, gated_scores, gated_scores_vjp, mask_future

SEGMENT_ELEMENTS = 1 << 18      # of one of a segment's arrays: long calls for the threads, short ones for the cache
MATERIALIZED_BYTES = 1 << 30    # above this, keeping every chunk's state must be asked for


def run(member, o, states=None):
    """Fills o [B, H, T, V], returns the final state [N, H, K, V]; `states` [B, H, NC, K, V] receives one a chunk."""
    sweep = Sweep(member)
    final = member.initial_state()
    if sweep.materialize:
        materialized(sweep, o, final, states)
    else:
        in_parallel(lambda rows: streamed(sweep, rows, o, final, states), sweep.blocks, caller=True)
    return final


class Sweep:
    """A family member cut into segments of chunks and blocks of rows."""

    def __init__(self, member):
        self.member, self.dtype = member, member.problem.compute_dtype
        self.chunking = chunking = Chunking(member.problem)
        B, H, _, self.K = member.k.shape
        self.V = member.v.shape[-1]
        at_once = max(1, SEGMENT_ELEMENTS // (chunking.size * max(self.K, self.V)))       # chunks times rows
        rows = max(1, min(B * H, max(B * H // workers(), at_once // max(1, chunking.count)), at_once))
        self.blocks = row_blocks(B, H, rows)
        self.step = max(1, at_once // rows)
        self.segments = [(c, Segment(chunking.table[c:c + self.step], chunking.size))
                         for c in range(0, chunking.count, self.step)]
        self.materialize = member.problem.materialize
        if self.materialize is None:            # rows alone do not keep the cores busy, and the states fit
            kept = B * H * chunking.count * self.K * self.V * self.dtype.itemsize
            self.materialize = len(self.blocks) < min(workers(), len(self.segments)) and kept < MATERIALIZED_BYTES

    def states(self, block, chunks, scratch):
        """Room for h [B, H, n + 1, K, V] and the chunks' decays [B, H, n, K or 1] of a block of rows."""
        h = scratch("h", (chunks + 1, *block, self.K, self.V))      # chunk by chunk in memory, as they are scanned
        decay = scratch("decay", (chunks, *block, self.member.g.shape[-1]))
        return np.moveaxis(h, 0, 2), np.moveaxis(decay, 0, 2)


def streamed(sweep, rows, o, final, states):
    """All segments of a block of rows, one after the other, carrying the state."""
    block, scratch, carried = o[rows].shape[:2], thread_scratch(sweep.dtype), None
    for first, segment in sweep.segments:
        n = segment.count
        h, decay = sweep.states(block, n, scratch)
        inside = within_chunks(sweep, rows, segment, h, decay, scratch)
        if carried is not None:
            h[:, :, 0] = carried
        sweep.chunking.scan(rows, first, decay, h, final)
        carried = h[:, :, n].copy()
        if states is not None:
            states[rows][:, :, first:first + n] = h[:, :, :n]
        read_out(sweep, rows, segment, *inside, h, o, scratch)


def materialized(sweep, o, final, states):
    """Every chunk's state kept: all segments side by side, then the states in order, then all outputs."""
    h, decay = sweep.states(o.shape[:2], sweep.chunking.count, Scratch(sweep.dtype))

    def part(rows, first, segment):
        chunks, after = slice(first, first + segment.count), slice(first, first + segment.count + 1)
        return rows, segment, h[rows][:, :, after], decay[rows][:, :, chunks], Scratch(sweep.dtype)

    parts = [part(rows, *segment) for rows, segment in product(sweep.blocks, sweep.segments)]
    inside = in_parallel(lambda part: within_chunks(sweep, *part), parts)
    in_parallel(lambda rows: sweep.chunking.scan(rows, 0, decay[rows], h[rows], final), sweep.blocks)
    if states is not None:
        states[:] = h[:, :, :-1]
    in_parallel(lambda part, inside: read_out(sweep, *part[:2], *inside, part[2], o, part[4]), parts, inside)


def within_chunks(sweep, rows, segment, h, decay, scratch):
    """What chunks need nobody else for: (qg, A, v); fills the decays, and kg^T v one place on from its chunk in h."""
    member = sweep.member
    q, k, v, g = (segment.pack(x[rows], sweep.dtype) for x in (member.q, member.k, member.v, member.g))
    qg, kg, A = gated_scores(q, k, Gates(g, scratch), member.exclusive, decay, scratch)
    if member.u is not None:
        put_bonus(A, q, k, member.bonus(rows))
    v = blas_ready(v)
    np.matmul(kg.swapaxes(-1, -2), v, out=h[:, :, 1:])
    return qg, A, v


def read_out(sweep, rows, segment, qg, A, v, h, o, scratch):
    """o = scale (qg h + A v), in the room of kg and b, which have served."""
    within = np.matmul(A, v, out=scratch("kg", v.shape))
    in_place = segment.view(o[rows], sweep.dtype)
    part = scratch("b", v.shape) if in_place is None else in_place
    np.matmul(qg, h[:, :, :-1], out=part)
    part += within
    part *= sweep.member.scale
    if in_place is None:
        segment.unpack_into(o[rows], part)


def diagonal(A):
    """The diagonals of [..., C, C] as a writable view [..., C]."""
    return np.einsum("...ii->...i", A)


def put_bonus(A, q, k, u):
    """A_ii = sum_k q_ik u_k k_ik."""
    diagonal(A)[:] = np.vecdot(q * u, k)


# -- backward ---------------------------------------------------------------------------------------------------------

def vjp(member, o):
    """(final state, pull), o filled; pull(do, dht) gives ((dq, dk, dv, dg, du), gradient of the initial state)."""
    sweep = Sweep(member)
    B, H = member.k.shape[:2]
    states = np.empty((B, H, sweep.chunking.count, sweep.K, sweep.V), sweep.dtype)
    final = run(member, o, states)

    def pull(do, dstates):
        gradients = Gradients(sweep)
        in_parallel(lambda rows: backward(sweep, rows, do, states, dstates, gradients), sweep.blocks)
        du = None if member.u is None else gradients.du.sum((0, 2))
        return (gradients.dq, gradients.dk, gradients.dv, gradients.dg, du), dstates

    return final, pull


class Gradients:
    """Where the backward sweep writes."""

    def __init__(self, sweep):
        member = sweep.member
        self.dq, self.dk, self.dv, self.dg = (np.empty(x.shape, sweep.dtype)
                                              for x in (member.q, member.k, member.v, member.g))
        if member.u is not None:                # one a chunk, so that no cut changes the order of the sum
            self.du = np.empty((*member.k.shape[:2], sweep.chunking.count, sweep.K), sweep.dtype)


def backward(sweep, rows, do, states, dstates, gradients):
    """All segments of a block of rows, last first, carrying the state's gradient."""
    member, carried = sweep.member, None
    for first, segment in reversed(sweep.segments):
        chunks = slice(first, first + segment.count)
        inputs = (segment.pack(x[rows], sweep.dtype) for x in (member.q, member.k, member.v, member.g))
        do_scaled = segment.pack(do[rows], sweep.dtype) * member.scale
        carried, du, *rest = segment_vjp(sweep, rows, first, *inputs, do_scaled, states[rows][:, :, chunks], carried,
                                         dstates)
        for gradient, part in zip((gradients.dq, gradients.dk, gradients.dv, gradients.dg), rest):
            segment.unpack_into(gradient[rows], part)
        if du is not None:
            gradients.du[rows][:, :, chunks] = du


def segment_vjp(sweep, rows, first, q, k, v, g, do, h, carried, dstates):
    """(dh before the segment, du a chunk, dq, dk, dv, dg) from do (scaled) and dh behind the segment."""
    member, scratch = sweep.member, thread_scratch(sweep.dtype)
    gates, decay = Gates(g, scratch), scratch("decay", (*g.shape[:-2], g.shape[-1]))
    qg, kg, A = gated_scores(q, k, gates, member.exclusive, decay, scratch)
    u = member.bonus(rows)
    if u is not None:
        put_bonus(A, q, k, u)

    dh = np.empty((*h.shape[:2], h.shape[2] + 1, *h.shape[3:]), q.dtype)
    np.matmul(qg.swapaxes(-1, -2), do, out=dh[:, :, :-1])
    if carried is not None:
        dh[:, :, -1] = carried
    sweep.chunking.scan_back(rows, first, decay, dh, dstates)
    after = dh[:, :, 1:]

    dv = A.swapaxes(-1, -2) @ do + kg @ after
    dA = do @ v.swapaxes(-1, -2)
    own = diagonal(dA).copy()[..., None]                # of A_ii: the token's own weight, which no gate touches
    mask_future(dA, exclusive=True)
    dq, dk = gated_scores_vjp(q, k, gates, dA, member.exclusive)
    dqg, dkg = do @ h.swapaxes(-1, -2), v @ after.swapaxes(-1, -2)
    dg = gate_gradient(member, q * dq + qg * dqg, k * dk, kg * dkg, decay, np.vecdot(h, after))

    query, key = chunk_decays(gates, member.exclusive)
    dq += dqg * query + own * (k if u is None else u * k)
    dk += dkg * key + own * (q if u is None else u * q)
    du = None if u is None else (own * q * k).sum(-2)
    return dh[:, :, 0], du, dq, dk, dv, dg


def gate_gradient(member, queries, keys, stored, decay, states):
    """dg_t: every weight that holds g_t, counted at its query, its key, or as what the chunk stores.

    dg_t = sum_{i >= t} q dq - sum_{j >= t} k dk (both without A_ii; i > t where the read comes before the write)
           + sum_{j < t} kg dkg + decay sum_v h dh'
    """
    if member.constant_gate:
        return np.zeros_like(queries[..., :1])
    if member.g.shape[-1] == 1:
        queries, keys, stored, states = (x.sum(-1, keepdims=True) for x in (queries, keys, stored, states))
    C = queries.shape[-2]
    behind = np.tri(C, dtype=queries.dtype).T
    before = np.tri(C, k=-1, dtype=queries.dtype)
    dg = before.T @ (queries - keys) - keys if member.exclusive else behind @ (queries - keys)
    return dg + before @ stored + (decay * states)[..., None, :]
