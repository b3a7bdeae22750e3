"""Gated linear attention with a gate on either side of the state (Yang et al., 2024, section 4.1).

    S_t = (exp g_t exp gv_t^T) * S_{t-1} + k_t v_t^T,       o_t = scale q_t^T S_t

Over tokens whose gv sum up to little, c_t in all, it is gla on other values:

    R_t = diag(exp g_t) R_{t-1} + k_t (v_t / exp c_t)^T,    S_t = R_t diag(exp c_t)

The first token's gv is none of them, since it can be taken to the state at once; so whatever it is, this is exact.
Where strong gates leave few such tokens, they go one by one.

The same recurrence computes the gradients:

    S_t = (exp g_t exp gv_t^T) * S_{t-1} + k_t v_t^T                    o_t = scale q_t^T S_t
    C_t = (exp g_{t+1} exp gv_{t+1}^T) * C_{t+1} + scale q_t do_t^T     the gradient of S_t; dht comes in behind the end

    dq_t = scale S_t do_t       dk_t = C_t v_t      dv_t = C_t^T k_t        dh0 = (exp g_1 exp gv_1^T) * C_1
    dg_t = sum_{i >= t} (q_i dq_i - k_i dk_i) + sum_v S_T dht
    dgv_t = sum_{i >= t} (o_i do_i - v_i dv_i) + sum_k S_T dht          (Yang et al., 2024, section 4.4, on both sides)

The first line turned over is the operator itself, of (do, v, k, gv, g); the second one runs backwards in time. What no
gate touches stands on both sides of these differences: a token's own q k v do, and the last one's k v dht. There the
results are taken *apart* from it, or strong gates, of which little but rounding would be left, lost their gradients.
"""

import numpy as np

from ...contract import SUB_CHUNK
from ...varlen import dense
from . import chunked, chunking
from .by_token import is_finite
from .family import Member
from .recurrent import cast_inputs, cast_states, outer, read, read_vjp, write, write_vjp

LIMIT = 40.0  # nats that gv may sum up to: exp(40) = 2e17 leaves float32 room for values up to 1e20


def step(problem, state, q, k, v, g, gv):
    (S,) = state
    S = np.multiply(np.exp(gv)[..., None, :], S, out=np.empty_like(S) if problem.gradient else S)
    S = write(problem, S, np.exp(g), k, v)
    return (S,), problem.scale * read(q, S)


def step_vjp(problem, state, q, k, v, g, gv, dstate, do):
    (S,), (dS,), decay = state, dstate, outer(np.exp(g), np.exp(gv))
    do = problem.scale * do
    dq = read_vjp(decay * S + outer(k, v), do)
    dS = dS + outer(q, do)
    dk, dv = write_vjp(k, v, dS)
    kept = decay * S * dS
    return (decay * dS,), dq, dk, dv, kept.sum(-1), kept.sum(-2)


def run(problem, o):
    """Fills o [B, H, T, V], returns the final state's parts."""
    (start,) = cast_states(problem.initial_state, problem)
    o[...], final = walk(problem, *cast_inputs(problem), start, problem.scale)
    return (final,)


def vjp(problem, o):
    """(final state's parts, pull), o filled."""
    arrays, machine = cast_inputs(problem), Machine(problem)
    (start,) = cast_states(problem.initial_state, problem)
    o[...], apart, last = machine.forwards(*arrays, start)

    def pull(do, dht):
        (dht,) = cast_states(dht, problem)
        do = do.astype(problem.compute_dtype)
        found, dh0 = gradients(machine, arrays, apart, last, start, do, dht)
        if not is_finite(dh0, *found):
            found, dh0 = by_token(problem, arrays, start, do, dht)
        return found, (dh0,)

    return (machine.with_last(last, *arrays[1:3]),), pull


def by_token(problem, arrays, start, do, dht):
    """(gradients of the arrays, of the initial states) by the recurrence: of what is not finite, or overflows above."""
    found, dh0, count = [np.empty_like(x) for x in arrays], dht.copy(), problem.spans.count

    def walk_on(S, tokens):
        """The states [B, H, K, V] before these tokens, and behind the last."""
        states = [S]
        for t in tokens:
            states.append(step(problem, (states[-1],), *(x[:, :, t] for x in arrays))[0][0])
        return states

    for s, span in enumerate(problem.spans):
        pieces, kept = (
            [range(*span)[at : at + chunking.CHUNK] for at in range(0, span[1] - span[0], chunking.CHUNK)],
            [],
        )
        S, dS = start[s::count], dh0[s::count]
        for piece in pieces:
            kept.append(S)
            S = walk_on(S, piece)[-1]
        for piece, S in reversed(list(zip(pieces, kept))):
            for t, before in reversed(list(zip(piece, walk_on(S, piece)))):
                (dS,), *parts = step_vjp(problem, (before,), *(x[:, :, t] for x in arrays), (dS,), do[:, :, t])
                for gradient, part in zip(found, parts, strict=True):
                    gradient[:, :, t] = part
        dh0[s::count] = dS
    return found, dh0


def gradients(machine, arrays, o, last, initial, do, dht):
    """([dq, dk, dv, dg, dgv], dh0), from o and S_T of the forward pass, both apart; `initial` and `dht` may be None.

    `machine` computes, on arrays [B, H, T, ...] and states [N, H, K, V]:
    forwards(q, k, v, g, gv, initial): o, o apart, S_T apart from the last token's k v;
    backwards(q, k, v, g, gv, last): o, o apart (0 at the last token), the state before the first token;
    gate_gradient(gate, (x, dx apart), (y, dy apart), S_T apart, dht): the sums above.
    """
    q, k, v, g, gv = arrays
    dq, dq_apart, _ = machine.forwards(do, v, k, gv, g, turned(initial))
    dv, dv_apart, dh0 = machine.backwards(k, q, do, g, gv, dht)
    dk, dk_apart, _ = machine.backwards(v, do, q, gv, g, turned(dht))
    dg = machine.gate_gradient(g, (q, dq_apart), (k, dk_apart), last, dht)
    dgv = machine.gate_gradient(gv, (do, o), (v, dv_apart), turned(last), turned(dht))
    return [dq, dk, dv, dg, dgv], dh0


def turned(states):
    """[N, H, K, V] <-> [N, H, V, K], a view."""
    return None if states is None else states.swapaxes(2, 3)


class Machine:
    """What `gradients` computes with."""

    def __init__(self, problem):
        self.problem, self.scale, self.count = problem, problem.scale, problem.spans.count
        self.spans = [(s, *span) for s, span in enumerate(problem.spans) if span[0] < span[1]]

    def forwards(self, q, k, v, g, gv, start):
        apart, final = walk(self.problem, q, k, v, g, gv, start, self.scale, apart=True)
        return self.with_own(q, k, v, apart), apart, final

    def backwards(self, q, k, v, g, gv, start):
        """A token's gates come after it, so they are the next one's where gates come before."""
        problem, v = self.problem.replace(spans=self.problem.spans.backwards()), self.scale * v
        order = slice(None, None, -1 if self.count > 1 else 1)
        arrays = (x[:, :, ::-1] for x in (q, k, v, self.of_next_token(g), self.of_next_token(gv)))
        apart, final = walk(problem, *arrays, start[order], 1.0, apart=True)
        apart, final = apart[:, :, ::-1], final[order]
        o = apart + np.vecdot(q, k)[..., None] * v
        for s, first, stop in self.spans:
            final[s :: self.count] += outer(k[:, :, first], v[:, :, first])
            final[s :: self.count] *= outer(np.exp(g[:, :, first]), np.exp(gv[:, :, first]))
            apart[:, :, stop - 1] = 0
        return o, apart, final

    def of_next_token(self, g):
        """0 for a sequence's last one."""
        found = np.zeros_like(g)
        for _, first, stop in self.spans:
            found[:, :, first : stop - 1] = g[:, :, first + 1 : stop]
        return found

    def with_own(self, q, k, v, apart):
        return apart + (self.scale * np.vecdot(q, k))[..., None] * v

    def with_last(self, state, k, v):
        state = state.copy()
        for s, _, stop in self.spans:
            state[s :: self.count] += outer(k[:, :, stop - 1], v[:, :, stop - 1])
        return state

    def gate_gradient(self, gate, x, y, last, dht):
        """Summed in float64; 0 at tokens that forget everything."""
        found = np.empty(gate.shape, np.float64)
        (x, dx), (y, dy) = x, y
        for s, first, stop in self.spans:
            tokens = np.s_[:, :, first:stop]
            weights = x[tokens] * dx[tokens] - y[tokens] * dy[tokens]
            found[tokens] = np.cumsum(weights[:, :, ::-1], axis=2, dtype=np.float64)[:, :, ::-1]
            found[tokens] += (last[s :: self.count] * dht[s :: self.count]).sum(-1)[:, :, None]
        return np.where(np.exp(gate) == 0, 0, found)


def walk(problem, q, k, v, g, gv, start, scale, apart=False):
    """(o [B, H, T, V], final states [N, H, K, V]) in the computing dtype; `apart`: o without the
    token's own k v, the state without the last one's."""
    o, final, count = np.empty(v.shape, v.dtype), start.copy(), problem.spans.count
    for s, (first, stop) in enumerate(problem.spans):
        S = final[s::count].copy()
        while first < stop - apart:
            size, sums = factored(gv[:, :, first : stop - apart], problem.chunk_size or chunking.CHUNK)
            tokens = np.s_[:, :, first : first + size]
            arrays = (x[tokens] for x in (q, k, v, g, gv))
            S = move_on(problem, S, *arrays, sums, o[tokens], scale, apart)
            first += size
        if first < stop:  # the last one's k v stays apart
            S *= outer(np.exp(g[:, :, first]), np.exp(gv[:, :, first]))
            o[:, :, first] = scale * read(q[:, :, first], S)
        final[s::count] = S
    return o, final


def factored(gv, chunk):
    """(how many tokens are to go next, their sums of gv behind the first or None where they go one by one)."""
    sums = np.zeros_like(gv[:, :, : 2 * chunk])
    np.cumsum(gv[:, :, 1 : 2 * chunk], axis=2, out=sums[:, :, 1:])
    strong = ~(np.abs(sums).max((0, 1, 3)) <= LIMIT)  # infinite gates add up to NaN
    size = int(strong.argmax()) if strong.any() else len(strong)
    if size < min(SUB_CHUNK, gv.shape[2]):
        return min(SUB_CHUNK, gv.shape[2]), None
    size -= size % chunk if size > chunk else 0
    return size, sums[:, :, :size]


def move_on(problem, S, q, k, v, g, gv, sums, o, scale, apart):
    """Fills o; the state [B, H, K, V] behind these tokens."""
    if sums is None:
        return one_by_one(S, q, k, v, np.exp(g), np.exp(gv), o, scale, apart)
    grown, started = np.exp(sums), S * np.exp(gv[:, :, 0, None])
    piece = problem.replace(spans=dense(q.shape[2]), sizes=problem.sizes | {"N": len(q)}, initial_state=(started,))
    member = Member(piece, q * np.exp(g) if apart else q, k, v / grown, g, scale=scale)
    member.exclusive = apart
    final = chunked.run(member, o) * grown[:, :, -1:]
    o *= grown
    if is_finite(o, final):
        return final
    return one_by_one(S, q, k, v, np.exp(g), np.exp(gv), o, scale, apart)


def one_by_one(S, q, k, v, decay, value_decay, o, scale, apart):
    for t in range(q.shape[2]):
        S *= value_decay[:, :, t, None]
        S *= decay[:, :, t, :, None]
        new = outer(k[:, :, t], v[:, :, t])
        o[:, :, t] = scale * read(q[:, :, t], S if apart else S + new)
        S += new
    return S
