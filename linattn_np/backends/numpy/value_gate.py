"""Gated linear attention with a gate on either side of the state (Yang et al., 2024, section 4.1).

    S_t = (exp g_t exp gv_t^T) * S_{t-1} + k_t v_t^T,       o_t = scale q_t^T S_t

Over tokens whose gv sum up to little, c_t in all, it is gla on other values:

    R_t = diag(exp g_t) R_{t-1} + k_t (v_t / exp c_t)^T,    S_t = R_t diag(exp c_t)

The first token's gv is none of them, since it can be taken to the state at once; so whatever it is, this is exact.
Where strong gates leave few such tokens, or gates grow, they go one by one.

Gradients go the same way, piece by piece. Those of q, k, v and g are gla's. That of gv is the gradient of gla's gate in
the same operator turned over, of (do, v, k, gv, g): sum_t <do_t, S_t^T q_t> is sum_t <q_t, S_t do_t>. So neither gate's
gradient is a difference of sums, of which strong gates would leave rounding alone.
"""

import numpy as np

from ...contract import SUB_CHUNK
from ...varlen import dense
from . import chunked, chunking
from .by_token import is_finite
from .family import Member
from .recurrent import cast_inputs, cast_states, outer, read, read_vjp, write_vjp
from .scores import LEAST

LIMIT = 40.0  # nats that gv may sum up to below 0: exp(40) = 2e17 leaves float32 room for values up to 1e20
GROWTH = 4.0  # and above 0: what values are divided by, and with them the states, leaves the range at their lower end


def decays(g, gv):
    """exp(g) exp(gv)^T [..., K, V]; of growth exp(g + gv), since one of two factors may leave the range alone."""
    if g.max(initial=0) <= 0 and gv.max(initial=0) <= 0:
        return outer(np.exp(g), np.exp(gv))
    return np.exp(g[..., :, None] + gv[..., None, :])


def step(problem, state, q, k, v, g, gv):
    (S,) = state
    S = decays(g, gv) * S + outer(k, v)
    return (S,), problem.scale * read(q, S)


def step_vjp(problem, state, q, k, v, g, gv, dstate, do):
    (S,), (dS,), decay = state, dstate, decays(g, gv)
    do = problem.scale * do
    dq = read_vjp(decay * S + outer(k, v), do)
    dS = dS + outer(q, do)
    dk, dv = write_vjp(k, v, dS)
    kept = decay * S * dS
    return (decay * dS,), dq, dk, dv, kept.sum(-1), kept.sum(-2)


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
    """(final state's parts, pull), o filled."""
    final = run(problem, o)

    def pull(do, dht):
        q, k, v, g, gv = cast_inputs(problem)
        (start,), (dht,) = cast_states(problem.initial_state, problem), cast_states(dht, problem)
        do = do.astype(problem.compute_dtype)
        found, dh0 = of_one_side(problem, (q, k, v, g, gv), start, do, dht)
        turned = (x.swapaxes(2, 3) for x in (start, dht))
        dgv = of_one_side(problem, (do, v, k, gv, g), next(turned), q, next(turned))[0][3]
        return [*found, dgv], (dh0,)

    return final, pull


def of_one_side(problem, arrays, start, do, dht):
    """(gradients of q, k, v and g, of the initial states)."""
    found, dh0, count = [np.empty_like(x) for x in arrays[:4]], dht.copy(), problem.spans.count
    for s, span in enumerate(problem.spans):
        S, dS, before = start[s::count], dh0[s::count], []
        for piece in pieces(problem, arrays, *span, least=LEAST):
            before.append((piece, S))
            S = piece.forward(S, np.empty_like(do[:, :, piece.tokens]))
        for piece, S in reversed(before):
            dS, *parts = piece.backward(S, do[:, :, piece.tokens], dS)
            for gradient, part in zip(found, parts, strict=True):
                gradient[:, :, piece.tokens] = part
        dh0[s::count] = dS
    return found, dh0


def pieces(problem, arrays, first, stop, least=-LIMIT):
    """The tokens from `first` to before `stop`, as many at a time as go together: none but the first has gv below
    `least`, so that what crosses a token is of the size of what does not, and its rounding.
    """
    chunk = problem.chunk_size or chunking.CHUNK
    while first < stop:
        size, sums = factored(*(x[:, :, first : min(stop, first + 2 * chunk)] for x in arrays[3:]), chunk, least)
        yield Piece(problem, arrays, slice(first, first + size), sums)
        first += size


def factored(g, gv, chunk, least):
    """(how many tokens are to go next, their sums of gv behind the first or None where they go one by one)."""
    sums = np.zeros_like(gv)
    np.cumsum(gv[:, :, 1:], axis=2, out=sums[:, :, 1:])
    strong = ~((sums.min((0, 1, 3)) >= -LIMIT) & (sums.max((0, 1, 3)) <= GROWTH))  # infinite gates add up to NaN
    strong[1:] |= gv[:, :, 1:].min((0, 1, 3)) < least
    size = int(strong.argmax()) if strong.any() else len(strong)
    faded = not gv[:, :, 0].min() >= -GROWTH and g.max() > 0  # what the first gv takes out of range may grow again
    if size < min(SUB_CHUNK, gv.shape[2]) or faded:
        return min(SUB_CHUNK, gv.shape[2]), None
    size -= size % chunk if size > chunk else 0
    return size, sums[:, :, :size]


class Piece:
    """Tokens that go together, as gla, or where `sums` is None one by one."""

    def __init__(self, problem, arrays, tokens, sums):
        self.problem, self.tokens, self.sums = problem, tokens, sums
        self.arrays = [x[:, :, tokens] for x in arrays]

    def as_gla(self, S):
        """(gla's arrays and its initial state, what takes its state to this one's)."""
        (q, k, v, g, gv), grown = self.arrays, np.exp(self.sums)
        sizes = self.problem.sizes | {"N": len(q)}
        started = S * np.exp(gv[:, :, 0, None])
        problem = self.problem.replace(spans=dense(q.shape[2]), sizes=sizes, initial_state=(started,))
        return Member(problem, q, k, v / grown, g), grown

    def forward(self, S, o):
        """Fills o; the state [B, H, K, V] behind these tokens."""
        if self.sums is not None:
            member, grown = self.as_gla(S)
            final = chunked.run(member, o) * grown[:, :, -1:]
            o *= grown
            if is_finite(o, final):
                return final
        for t, token in enumerate(self.one_by_one()):
            (S,), o[:, :, t] = step(self.problem, (S,), *token)
        return S

    def backward(self, S, do, dS):
        """(gradient of the state before, dq, dk, dv, dg)."""
        if self.sums is not None:
            member, grown = self.as_gla(S)
            pull = chunked.vjp(member, np.empty_like(do))[1]
            (dq, dk, dv, dg, _), dR = pull(do * grown, dS * grown[:, :, -1:])
            found = dR * np.exp(self.arrays[4][:, :, 0, None]), dq, dk, dv / grown, dg
            if is_finite(*found):
                return found
        states, found = [S], [np.empty_like(x) for x in self.arrays[:4]]
        for token in self.one_by_one():
            states.append(step(self.problem, (states[-1],), *token)[0][0])
        for t, token in reversed(list(enumerate(self.one_by_one()))):
            (dS,), *parts = step_vjp(self.problem, (states[t],), *token, (dS,), do[:, :, t])
            for gradient, part in zip(found, parts):
                gradient[:, :, t] = part
        return dS, *found

    def one_by_one(self):
        return ([x[:, :, t] for x in self.arrays] for t in range(self.arrays[0].shape[2]))
