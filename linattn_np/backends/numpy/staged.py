"""The five stages, one after the other on whole arrays, as `linattn_np.stages` states them."""

import numpy as np

from .by_token import is_finite, product_over
from .chunked import mend, put_bonus
from .chunking import Chunking
from .packing import Scratch, Segment
from .scores import Gates, decay_query, gated_scores, prefix_suffix_sums


def run(member, o):
    """The staged mode: fills o [B, H, T, V], returns the final state [N, H, K, V]."""
    problem, chunking = member.problem, Chunking(member.problem)
    whole = Segment(chunking.table, chunking.size)
    q, k, v, g = (whole.pack(x, problem.compute_dtype) for x in (member.q, member.k, member.v, member.g))
    b, e = prefix_suffix_sums(g)
    qg, kg = gate_qk(q, k, b, e, member.exclusive)
    final = member.initial_state()
    h = chunk_states(chunking, kg, v, np.exp(b[..., -1, :]), final)
    gates = Gates(g, Scratch(q.dtype))
    A = scores(q, k, gates, member.bonus(np.s_[:, :]), member.exclusive)
    packed = read(qg, h, A, v, member.scale)
    whole.unpack_into(o, packed)
    if not is_finite(packed, final) or gates.underflow(h):
        mend(member, o, final)
    return final


def gate_qk(q, k, b, e, exclusive):
    return decay_query(q, np.exp(b), exclusive), k * np.exp(e)


def chunk_states(chunking, kg, v, decay, states):
    """h [B, H, NC, K, V]; `states` goes from the initial to the final ones."""
    h = np.empty((*kg.shape[:2], chunking.count + 1, kg.shape[-1], v.shape[-1]), kg.dtype)
    np.matmul(kg.swapaxes(-1, -2), v, out=h[:, :, 1:])
    chunking.scan(np.s_[:, :], 0, decay, h, states)
    return h[:, :, :-1]


def scores(q, k, gates, u, exclusive):
    scratch, g = Scratch(q.dtype), gates.g
    decay = scratch("decay", (*g.shape[:-2], g.shape[-1]))
    A = gated_scores(q, k, gates, exclusive, decay, scratch)[2]
    if u is not None:
        put_bonus(A, q, k, u)
    return A


def read(qg, h, A, v, scale):
    return scale * (qg @ h + product_over(A, v, np.tri(A.shape[-1], dtype=bool)))


# -- the public stages ------------------------------------------------------------------------------------------------


class Tokens:
    """A stage's arrays in chunks, and its results back at their tokens."""

    def __init__(self, problem):
        self.problem, self.dtype = problem, problem.compute_dtype
        self.chunking = Chunking(problem)
        self.whole = Segment(self.chunking.table, self.chunking.size)

    def __getitem__(self, name):
        return self.whole.pack(self.problem[name], self.dtype)

    def put(self, packed, like):
        x = self.problem[like]
        out = np.empty_like(x, shape=(*x.shape[:3], packed.shape[-1]), dtype=self.dtype)
        self.whole.unpack_into(out, packed)
        return out


def chunk_cumsum(problem):
    tokens = Tokens(problem)
    b, e = prefix_suffix_sums(tokens["g"])
    return tokens.put(b, "g"), tokens.put(e, "g")


def gated_qk(problem):
    tokens = Tokens(problem)
    qg, kg = gate_qk(*(tokens[name] for name in "qkbe"), problem.options["exclusive"])
    return tokens.put(qg, "q"), tokens.put(kg, "k")


def inter_chunk(problem):
    """b is read at each chunk's last token: behind a sequence's end its padding is no prefix sum."""
    tokens = Tokens(problem)
    N, H, K, V = problem.shape("N H K V")
    initial = problem.initial_state
    states = np.zeros((N, H, K, V), tokens.dtype) if initial is None else initial[0].astype(tokens.dtype)
    decay = np.exp(problem["b"][:, :, tokens.chunking.table[:, 1] - 1])
    h = chunk_states(tokens.chunking, tokens["kg"], tokens["v"], decay, states)
    return h, (states,)


def intra_chunk(problem):
    tokens = Tokens(problem)
    u = problem["u"][:, None, None].astype(tokens.dtype) if "u" in problem.arrays else None
    gates = Gates(tokens["g"], Scratch(tokens.dtype))
    return tokens.put(scores(tokens["q"], tokens["k"], gates, u, problem.op.reads_before_write), "q")


def combine(problem, o):
    tokens = Tokens(problem)
    tokens.whole.unpack_into(o, read(tokens["qg"], problem["h"], tokens["A"], tokens["v"], problem.scale))


STAGES = {stage.__name__: stage for stage in (chunk_cumsum, gated_qk, inter_chunk, intra_chunk, combine)}
