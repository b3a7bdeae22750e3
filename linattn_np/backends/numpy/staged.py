"""The five stages of `linattn_np.stages`, each on whole arrays, which are divided into chunks [.., NC, C, .].

b, e      of each token: the sum of its chunk's log gates up to it, and that of the gates after it
qg, kg    q exp(b) and k exp(e); with `exclusive` b is that of the token before
h         the states before the chunks
A         the scores of a chunk's queries with its keys, with the decays between them
o         scale (qg h + A v)
"""

import numpy as np

from .by_token import is_finite, product_over
from .chunked import mend, put_bonus
from .chunking import Chunking
from .packing import Scratch, Segment
from .scores import Gates, decay_query, gated_scores, prefix_suffix_sums


def run(member, o):
    """The staged mode: fills o [B, H, T, V], returns the final state [N, H, K, V]."""
    problem, chunking = member.problem, Chunking(member.problem)
    all_chunks = Segment(chunking.table, chunking.size)
    q, k, v, g = (all_chunks.pack(x, problem.compute_dtype) for x in (member.q, member.k, member.v, member.g))
    b, e = prefix_suffix_sums(g)
    qg, kg = gate_qk(q, k, b, e, member.exclusive)
    final = member.initial_state()
    h = chunk_states(chunking, kg, v, np.exp(b[..., -1, :]), final)
    gates = Gates(g, Scratch(q.dtype))
    A = scores(q, k, gates, member.bonus(np.s_[:, :]), member.exclusive)
    packed = read(qg, h, A, v, member.scale)
    all_chunks.unpack_into(o, packed)
    if not is_finite(packed, final) or gates.underflow(h):
        mend(member, o, final)
    return final


def gate_qk(q, k, b, e, exclusive):
    """(qg, kg). `exclusive`: whether outputs read the state before the write."""
    return decay_query(q, np.exp(b), exclusive), k * np.exp(e)


def chunk_states(chunking, kg, v, decay, states):
    """h [B, H, NC, K, V]; replaces the initial states in `states` by the final ones."""
    h = np.empty((*kg.shape[:2], chunking.count + 1, kg.shape[-1], v.shape[-1]), kg.dtype)
    np.matmul(kg.swapaxes(-1, -2), v, out=h[:, :, 1:])
    chunking.scan(np.s_[:, :], 0, decay, h, states)
    return h[:, :, :-1]


def scores(q, k, gates, u, exclusive):
    """A. `u` [H, 1, 1, K] is the bonus, or None."""
    scratch, g = Scratch(q.dtype), gates.g
    decay = scratch("decay", (*g.shape[:-2], g.shape[-1]))
    A = gated_scores(q, k, gates, exclusive, decay, scratch)[2]
    if u is not None:
        put_bonus(A, q, k, u)
    return A


def read(qg, h, A, v, scale):
    """o."""
    return scale * (qg @ h + product_over(A, v, np.tri(A.shape[-1], dtype=bool)))


# -- the public stages ------------------------------------------------------------------------------------------------


class StageArrays:
    """The arrays of a stage, divided into chunks by their names, and the arrays for its results."""

    def __init__(self, problem):
        self.problem, self.dtype = problem, problem.compute_dtype
        self.chunking = Chunking(problem)
        self.all_chunks = Segment(self.chunking.table, self.chunking.size)

    def __getitem__(self, name):
        """The array `name` in chunks."""
        return self.all_chunks.pack(self.problem[name], self.dtype)

    def result(self, packed, prototype):
        """A result in chunks as [B, H, T, ...], with the memory order of the array `prototype`."""
        x = self.problem[prototype]
        out = np.empty_like(x, shape=(*x.shape[:3], packed.shape[-1]), dtype=self.dtype)
        self.all_chunks.unpack_into(out, packed)
        return out


def chunk_cumsum(problem):
    """(b, e)."""
    arrays = StageArrays(problem)
    b, e = prefix_suffix_sums(arrays["g"])
    return arrays.result(b, "g"), arrays.result(e, "g")


def gated_qk(problem):
    """(qg, kg)."""
    arrays = StageArrays(problem)
    qg, kg = gate_qk(*(arrays[name] for name in "qkbe"), problem.options["exclusive"])
    return arrays.result(qg, "q"), arrays.result(kg, "k")


def inter_chunk(problem):
    """(h, (the final states,)). A chunk's decay is exp(b) of its last token, and not that of the padding after it."""
    arrays = StageArrays(problem)
    N, H, K, V = problem.shape("N H K V")
    initial = problem.initial_state
    states = np.zeros((N, H, K, V), arrays.dtype) if initial is None else initial[0].astype(arrays.dtype)
    decay = np.exp(problem["b"][:, :, arrays.chunking.table[:, 1] - 1])
    h = chunk_states(arrays.chunking, arrays["kg"], arrays["v"], decay, states)
    return h, (states,)


def intra_chunk(problem):
    """A."""
    arrays = StageArrays(problem)
    u = problem["u"][:, None, None].astype(arrays.dtype) if "u" in problem.arrays else None
    gates = Gates(arrays["g"], Scratch(arrays.dtype))
    return arrays.result(scores(arrays["q"], arrays["k"], gates, u, problem.op.reads_before_write), "q")


def combine(problem, o):
    """Fills o."""
    arrays = StageArrays(problem)
    o_chunks = read(arrays["qg"], problem["h"], arrays["A"], arrays["v"], problem.scale)
    arrays.all_chunks.unpack_into(o, o_chunks)


STAGES = {stage.__name__: stage for stage in (chunk_cumsum, gated_qk, inter_chunk, intra_chunk, combine)}
