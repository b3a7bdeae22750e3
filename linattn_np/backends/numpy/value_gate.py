"""Gated linear attention with gates g of channels and gv of columns (Yang et al., 2024, section 4.1).

    S_t = (exp g_t exp gv_t^T) * S_{t-1} + k_t v_t^T,       o_t = scale q_t^T S_t

Tokens are computed piece by piece. A piece is a range of tokens for which the sum c_t of the gates gv after the piece's
first token is small; the first token's gv multiplies the state before the piece. Then a piece is a call of gla with
other values:

    R_t = diag(exp g_t) R_{t-1} + k_t (v_t / exp c_t)^T,    S_t = R_t diag(exp c_t)

If strong gates would make pieces short, or if gates are above 0 and grow too much, tokens are computed one by one.

Gradients are computed by the same pieces. Those of q, k, v and g are gla's. The transposed state obeys the same
recurrence with v in place of k and gv in place of g, and sum_t <do_t, S_t^T q_t> = sum_t <q_t, S_t do_t>. So the
gradient of gv is that of gla's gate for the arrays (do, v, k, gv, g). Thus neither gate's gradient is a difference of
sums, which strong gates would leave with nothing but rounding errors.
"""

from types import SimpleNamespace

import numpy as np

from ...contract import SUB_CHUNK
from ...varlen import dense
from . import chunked, chunking, recurrent
from .by_token import is_finite
from .family import Member
from .recurrent import cast_inputs, cast_states, outer, read, write_and_read_vjp
from .scores import LEAST

LIMIT = 40.0  # the most that gv may sum to below 0: exp(40) = 2e17 leaves float32 room for values up to 1e20
GROWTH = 4.0  # the most that gv may sum to above 0: with more, v / exp c_t and R_t could underflow


def decays(g, gv):
    """exp(g) exp(gv)^T [..., K, V]. If a gate is above 0, it is computed as exp(g + gv), since one of the two factors
    may leave the range although their product does not."""
    if g.max(initial=0) <= 0 and gv.max(initial=0) <= 0:
        return outer(np.exp(g), np.exp(gv))
    return np.exp(g[..., :, None] + gv[..., None, :])


def step(problem, state, q, k, v, g, gv):
    """(the state after a token, o) by the first equation above."""
    (S,) = state
    S = decays(g, gv) * S + outer(k, v)
    return (S,), problem.scale * read(q, S)


def step_vjp(problem, state, q, k, v, g, gv, dstate, do):
    """The gradients of `step`: (those of the state before it, that of each array)."""
    (S,), decay = state, decays(g, gv)
    dS, dq, dk, dv = write_and_read_vjp(problem, decay * S, q, k, v, dstate, do)
    gate_terms = decay * S * dS  # the sum of both gates has this gradient for each number of S
    return (decay * dS,), dq, dk, dv, gate_terms.sum(-1), gate_terms.sum(-2)


EQUATION = SimpleNamespace(step=step, step_vjp=step_vjp)  # for `recurrent`


def run(problem, o):
    """Fills o [B, H, T, V], returns the final state's parts."""
    arrays, (states,), count = cast_inputs(problem), cast_states(problem.initial_state, problem), problem.spans.count
    for s, span in enumerate(problem.spans):
        S = states[s::count]
        for piece in pieces(problem, arrays, *span):
            S = piece.forward(S, o[:, :, piece.tokens])
        states[s::count] = S
    return (states,)


def vjp(problem, o):
    """Fills o; returns (the final state's parts, pull)."""
    final = run(problem, o)

    def pull(do, dht):
        q, k, v, g, gv = cast_inputs(problem)
        (start,), (dht,) = cast_states(problem.initial_state, problem), cast_states(dht, problem)
        do = do.astype(problem.compute_dtype)
        results, dh0 = gradients(problem, (q, k, v, g, gv), start, do, dht)
        transposed_start, transposed_dht = (x.swapaxes(2, 3) for x in (start, dht))
        dgv = gradients(problem, (do, v, k, gv, g), transposed_start, q, transposed_dht)[0][3]
        return [*results, dgv], (dh0,)

    return final, pull


def gradients(problem, arrays, start, do, dht):
    """([the gradients of q, k, v and g], that of the initial states `start`); `arrays`: q, k, v, g, gv."""
    results, dh0, count = [np.empty_like(x) for x in arrays[:4]], dht.copy(), problem.spans.count
    for s, span in enumerate(problem.spans):
        S, dS, before = start[s::count], dh0[s::count], []
        for piece in pieces(problem, arrays, *span, least=LEAST):
            before.append((piece, S))
            S = piece.forward(S, np.empty_like(do[:, :, piece.tokens]))
        for piece, S in reversed(before):
            dS, *parts = piece.backward(S, do[:, :, piece.tokens], dS)
            for gradient, part in zip(results, parts, strict=True):
                gradient[:, :, piece.tokens] = part
        dh0[s::count] = dS
    return results, dh0


def pieces(problem, arrays, first, stop, least=-LIMIT):
    """Yields the pieces of the tokens first ... stop - 1. Only a piece's first token has gv below `least`: a token with
    a stronger gate would reduce the earlier tokens' terms to the size of the later ones' rounding errors."""
    chunk = problem.chunk_size or chunking.CHUNK
    while first < stop:
        size, sums = next_piece(*(x[:, :, first : min(stop, first + 2 * chunk)] for x in arrays[3:]), chunk, least)
        yield Piece(problem, arrays, slice(first, first + size), sums)
        first += size


def next_piece(g, gv, chunk, least):
    """(the number of tokens of a piece that begins with the first token of g and gv, the sums c_t of its tokens, or
    None if its tokens are to be computed one by one)."""
    sums = np.zeros_like(gv)
    np.cumsum(gv[:, :, 1:], axis=2, out=sums[:, :, 1:])
    strong = ~((sums.min((0, 1, 3)) >= -LIMIT) & (sums.max((0, 1, 3)) <= GROWTH))  # sums of infinite gates may be NaN
    strong[1:] |= gv[:, :, 1:].min((0, 1, 3)) < least
    size = int(strong.argmax()) if strong.any() else len(strong)
    # a state that the first gv makes underflow might grow again by g
    underflows = not gv[:, :, 0].min() >= -GROWTH and g.max() > 0
    if size < min(SUB_CHUNK, gv.shape[2]) or underflows:
        return min(SUB_CHUNK, gv.shape[2]), None
    size -= size % chunk if size > chunk else 0
    return size, sums[:, :, :size]


class Piece:
    """A piece: its tokens are a call of gla, or are computed one by one if `sums` is None."""

    def __init__(self, problem, arrays, tokens, sums):
        self.problem, self.tokens, self.sums = problem, tokens, sums
        self.arrays = [x[:, :, tokens] for x in arrays]

    def alone(self, S):
        """The piece as a problem of its own, with the state S before it."""
        arrays, sizes = dict(zip(self.problem.op.arrays, self.arrays)), self.problem.sizes | {"N": len(S)}
        spans = dense(self.arrays[0].shape[2])
        return self.problem.replace(arrays=arrays, spans=spans, sizes=sizes, initial_state=(S,))

    def as_gla(self, S):
        """(the `Member` of gla for this piece, exp c_t). `S`: the state before the piece."""
        (q, k, v, g, gv), grown = self.arrays, np.exp(self.sums)
        return Member(self.alone(S * np.exp(gv[:, :, 0, None])), q, k, v / grown, g), grown

    def forward(self, S, o):
        """Fills o; returns the state [B, H, K, V] after the piece."""
        if self.sums is not None:
            member, grown = self.as_gla(S)
            final = chunked.run(member, o) * grown[:, :, -1:]
            o *= grown
            if is_finite(o, final):
                return final
        return recurrent.run(self.alone(S), EQUATION, o)[0]

    def backward(self, S, do, dS):
        """(the gradient of the state before the piece, dq, dk, dv, dg), from that of the state after it, dS."""
        if self.sums is not None:
            member, grown = self.as_gla(S)
            pull = chunked.vjp(member, np.empty_like(do))[1]
            (dq, dk, dv, dg, _), dR = pull(do * grown, dS * grown[:, :, -1:])
            results = dR * np.exp(self.arrays[4][:, :, 0, None]), dq, dk, dv / grown, dg
            if is_finite(*results):
                return results
        _, pull = recurrent.vjp(self.alone(S), EQUATION, np.empty_like(do))
        (*parts, _), (dS,) = pull(do, (dS,))
        return dS, *parts
