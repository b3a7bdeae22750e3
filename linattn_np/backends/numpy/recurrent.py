"""Token by token: the papers' recurrences, forward and backward. Tests compare all other forms with these.

An operator's file (`equation`) says what a token does:
    step(problem, state, *token)                   the state after the token, and o; it may overwrite the state's parts
                                                   unless problem.gradient is set, where `vjp` keeps them
    step_vjp(problem, state, *token, dstate, do)   the gradients of the state before the token and of the token's arrays
    writes(problem, S, *token)                     the decay, and [(k, u), ...]: step makes decay S + sum k u^T of S
This module applies them to all tokens and sequences. A state is a tuple of parts: S [N, H, K, V], and for a normaliser
z [N, H, K]. A batch row has `count` (problem.spans.count) sequences: row n of N is sequence n % count of batch row
n // count.
"""

import numpy as np

from .packing import thread_scratch


def run(problem, equation, o, before=None):
    """Writes o [B, H, T, V]; returns the parts of the final state. before : a dictionary that receives the state before
    each token, no copy: where the problem wants gradients, no step overwrites a state."""
    inputs = cast_inputs(problem)
    final = initial_states(problem)
    for s, (start, stop) in enumerate(problem.spans):
        state = state_of_sequence(final, s, problem)
        for t in range(start, stop):
            if before is not None:
                before[t] = state
            state, o[:, :, t] = equation.step(problem, state, *tokens(problem, inputs, t))
        put_state(final, s, problem, state)
    return final


def vjp(problem, equation, o):
    """Writes o; returns (the parts of the final state, the pullback)."""
    inputs, before = cast_inputs(problem), {}
    final = run(problem, equation, o, before)

    def pull(do, dht):
        gradients = [np.zeros_like(x) for x in inputs]
        dstates = cast_states(dht, problem)
        for s, (start, stop) in enumerate(problem.spans):
            dstate = state_of_sequence(dstates, s, problem)
            for t in reversed(range(start, stop)):
                dstate, *dtokens = equation.step_vjp(
                    problem, before[t], *tokens(problem, inputs, t), dstate, do[:, :, t].astype(problem.compute_dtype)
                )
                for gradient, axes, dtoken in zip(gradients, problem.op.arrays.values(), dtokens, strict=True):
                    if has_time(axes):
                        gradient[:, :, t] = dtoken
                    else:
                        gradient += dtoken
            put_state(dstates, s, problem, dstate)
        return gradients, dstates

    return final, pull


def has_time(axes):
    """Whether an array with these axes has tokens."""
    return "T" in axes.split()


def cast_inputs(problem):
    """The arrays of a call in the dtype of the arithmetic."""
    return [x.astype(problem.compute_dtype, copy=False) for x in problem.arrays.values()]


def tokens(problem, inputs, t):
    """The arrays of token t of every sequence: [B, H, ...], or the whole array if it has no tokens."""
    return (x[:, :, t] if has_time(axes) else x for x, axes in zip(inputs, problem.op.arrays.values()))


def initial_states(problem):
    """New arrays with the initial state's parts."""
    return cast_states(problem.initial_state, problem)


def cast_states(parts, problem):
    """New arrays with a state's parts in the dtype of the arithmetic; zeros for None."""
    if parts is None:
        return tuple(np.zeros(problem.shape(axes), problem.compute_dtype) for axes in problem.op.state)
    return tuple(part.astype(problem.compute_dtype) for part in parts)


def state_of_sequence(parts, s, problem):
    """Copies [B, H, ...] of the states of sequence s of every batch row."""
    return tuple(part[s :: problem.spans.count].copy() for part in parts)


def put_state(parts, s, problem, state):
    """Writes the states [B, H, ...] of sequence s of every batch row to `parts`."""
    for part, new in zip(parts, state, strict=True):
        part[s :: problem.spans.count] = new


def outer(k, v):
    """k v^T."""
    return k[..., :, None] * v[..., None, :]


def decayed(problem, S, g=None):
    """exp(g) S for a gate [...] or [..., K]; S without a gate. The result is in the memory of S, unless a gradient will
    need S.

    A new array of this size would take three times as long as a token's arithmetic, because its memory comes from the
    operating system.
    """
    if g is None:
        return S.copy() if problem.gradient else S
    decay = np.exp(g).reshape(*g.shape, *(1,) * (S.ndim - g.ndim))
    return np.multiply(decay, S, out=np.empty_like(S) if problem.gradient else S)


def add_outer(S, k, v):
    """S + k v^T, in place."""
    S += np.multiply(k[..., :, None], v[..., None, :], out=thread_scratch(S.dtype)("outer", S.shape))  # no new array
    return S


def write(problem, S, g, k, v):
    """exp(g) S + k v^T, in the memory that `decayed` returns."""
    return add_outer(decayed(problem, S, g), k, v)


def read(q, S):
    """q^T S."""
    return (q[..., None, :] @ S)[..., 0, :]


def write_vjp(k, v, dS):
    """The gradients of k and v in S = ... + k v^T, from dS."""
    return (dS @ v[..., None])[..., 0], read(k, dS)


def read_vjp(S, do):
    """The gradient of q in o = q^T S, from do."""
    return (S @ do[..., None])[..., 0]


def write_and_read_vjp(problem, D, q, k, v, dstate, do):
    """The gradients of D, q, k and v for S = D + k v^T and o = scale q^T S; `dstate` holds that of S."""
    do = problem.scale * do
    dS = dstate[0] + outer(q, do)
    return dS, read_vjp(D + outer(k, v), do), *write_vjp(k, v, dS)


def step(problem, equation):
    """Computes one token of B sequences; returns o. The state, or its rows `slots`, are updated in place."""
    state, rows = problem.options["state"], rows_in_use(problem)
    before = state[rows].astype(problem.compute_dtype, copy=False)
    (new,), o = equation.step(problem, (before,), *cast_inputs(problem))
    if not np.may_share_memory(new, state):  # it does where `before` is a view that the step has overwritten
        state[rows] = new
    return o


def step_of_several(problem, equation, o):
    """Writes o [B, H, T, V] for a few tokens of every sequence, of which the caller may later reject the last ones.

    First those of the previous call's tokens that were accepted, the first `accepted` of the `pending` ones, are
    applied to the state. Then this call's tokens are stored as pending [P, H, tokens, numbers]: of a token its decays,
    then the vectors k, then the vectors u of the matrices k u^T that it adds to the state.
    """
    inputs, rows, accepted = cast_inputs(problem), rows_in_use(problem), problem.options["accepted"]
    state, pending = problem.options["state"], problem.options["pending"]
    ends = np.cumsum(problem.op.numbers(*problem.shape("K V")))[:-1]
    for t in range(0 if accepted is None else accepted.max(initial=0)):
        advanced = np.arange(len(state))[rows][accepted > t]
        decay, *vectors = np.split(pending[advanced, :, t].astype(problem.compute_dtype), ends, axis=-1)
        S = decay[..., None] * state[advanced]
        for k, u in zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :]):
            add_outer(S, k, u)
        state[advanced] = S
    S = state[rows].astype(problem.compute_dtype)
    for t in range(problem.sizes["T"]):
        token = list(tokens(problem, inputs, t))
        decay, added = equation.writes(problem, S, *token)
        pending[rows, :, t] = np.concatenate([decay, *(k for k, _ in added), *(u for _, u in added)], axis=-1)
        (S,), o[:, :, t] = equation.step(problem, (S,), *token)


def rows_in_use(problem):
    """An index of the rows of a step's state that its sequences use."""
    slots = problem.options["slots"]
    return slice(None) if slots is None else slots
