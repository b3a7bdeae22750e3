"""Token by token: the papers' recurrences as they stand, forward and backward. Everything else is held to these.

An operator's file gives `step`, its equation for one token, and `step_vjp`, that step's gradient by hand. Here is only
the walk over tokens and sequences.
"""

import numpy as np

from .packing import thread_scratch


def run(problem, equation, o):
    """Fills o [B, H, T, V], returns the final state's parts."""
    inputs = cast_inputs(problem)
    final = initial_states(problem)
    for s, (start, stop) in enumerate(problem.spans):
        state = sequence(final, s, problem)
        for t in range(start, stop):
            state, o[:, :, t] = equation.step(problem, state, *tokens(problem, inputs, t))
        put_sequence(final, s, problem, state)
    return final


def vjp(problem, equation, o):
    """(final state's parts, pull), o filled: backpropagation through every token, all states kept."""
    inputs = cast_inputs(problem)
    final, before = initial_states(problem), {}
    for s, (start, stop) in enumerate(problem.spans):
        state = sequence(final, s, problem)
        for t in range(start, stop):
            before[t] = state
            state, o[:, :, t] = equation.step(problem, state, *tokens(problem, inputs, t))
        put_sequence(final, s, problem, state)

    def pull(do, dht):
        gradients = [np.zeros_like(x) for x in inputs]
        dstates = cast_states(dht, problem)
        for s, (start, stop) in enumerate(problem.spans):
            dstate = sequence(dstates, s, problem)
            for t in reversed(range(start, stop)):
                dstate, *dtokens = equation.step_vjp(
                    problem, before[t], *tokens(problem, inputs, t), dstate, do[:, :, t].astype(problem.compute_dtype)
                )
                for gradient, axes, dtoken in zip(gradients, problem.op.arrays.values(), dtokens, strict=True):
                    if has_time(axes):
                        gradient[:, :, t] = dtoken
                    else:
                        gradient += dtoken
            put_sequence(dstates, s, problem, dstate)
        return gradients, dstates

    return final, pull


def has_time(axes):
    return "T" in axes.split()


def cast_inputs(problem):
    return [x.astype(problem.compute_dtype, copy=False) for x in problem.arrays.values()]


def tokens(problem, inputs, t):
    return (x[:, :, t] if has_time(axes) else x for x, axes in zip(inputs, problem.op.arrays.values()))


def initial_states(problem):
    return cast_states(problem.initial_state, problem)


def cast_states(parts, problem):
    """A fresh tuple of states [N, H, ...], zeros for None."""
    if parts is None:
        return tuple(np.zeros(problem.shape(axes), problem.compute_dtype) for axes in problem.op.state)
    return tuple(part.astype(problem.compute_dtype) for part in parts)


def sequence(parts, s, problem):
    """Sequence s of every row, copies [B, H, ...]."""
    return tuple(part[s :: problem.spans.count].copy() for part in parts)


def put_sequence(parts, s, problem, state):
    for part, new in zip(parts, state, strict=True):
        part[s :: problem.spans.count] = new


def outer(k, v):
    return k[..., :, None] * v[..., None, :]


def decayed(problem, S, g=None):
    """exp(g) S of a gate [...] or [..., K]: in place, unless a gradient will need S as it was. Without a gate S.

    New arrays of this size would cost a token's step three times its arithmetic: their memory comes from the system.
    """
    if g is None:
        return S.copy() if problem.gradient else S
    decay = np.exp(g).reshape(*g.shape, *(1,) * (S.ndim - g.ndim))
    return np.multiply(decay, S, out=np.empty_like(S) if problem.gradient else S)


def add_outer(S, k, v):
    """S + k v^T, in place."""
    S += np.multiply(k[..., :, None], v[..., None, :], out=thread_scratch(S.dtype)("outer", S.shape))
    return S


def write(problem, S, g, k, v):
    """exp(g) S + k v^T of a gate, in place likewise."""
    return add_outer(decayed(problem, S, g), k, v)


def read(q, S):
    """q^T S."""
    return (q[..., None, :] @ S)[..., 0, :]


def write_vjp(k, v, dS):
    """Gradients of k and v in S = ... + k v^T."""
    return (dS @ v[..., None])[..., 0], read(k, dS)


def read_vjp(S, do):
    """Gradient of q in o = q^T S."""
    return (S @ do[..., None])[..., 0]


def step(problem, equation):
    """One token for B sequences: o; the state, or its rows `slots`, is updated in place."""
    state, rows = problem.options["state"], rows_in_use(problem)
    before = state[rows].astype(problem.compute_dtype, copy=False)
    (new,), o = equation.step(problem, (before,), *cast_inputs(problem))
    if not np.may_share_memory(new, state):
        state[rows] = new
    return o


def step_of_several(problem, equation, o):
    """Fills o [B, H, T, V]. The states take the accepted tokens of the call before, and `pending` these.

    A pending token is the decays and the matrices k u^T of rank one that it adds, whatever the state behind it.
    """
    inputs, rows, accepted = cast_inputs(problem), rows_in_use(problem), problem.options["accepted"]
    state, pending = problem.options["state"], problem.options["pending"]
    ends = np.cumsum(problem.op.numbers(*problem.shape("K V")))[:-1]
    for t in range(0 if accepted is None else accepted.max(initial=0)):
        taken = np.arange(len(state))[rows][accepted > t]
        decay, *written = np.split(pending[taken, :, t].astype(problem.compute_dtype), ends, axis=-1)
        S = decay[..., None] * state[taken]
        for k, u in zip(written[: len(written) // 2], written[len(written) // 2 :]):
            add_outer(S, k, u)
        state[taken] = S
    S = state[rows].astype(problem.compute_dtype)
    for t in range(problem.sizes["T"]):
        token = list(tokens(problem, inputs, t))
        decay, written = equation.writes(problem, S, *token)
        pending[rows, :, t] = np.concatenate([decay, *(k for k, _ in written), *(u for _, u in written)], axis=-1)
        (S,), o[:, :, t] = equation.step(problem, (S,), *token)


def rows_in_use(problem):
    slots = problem.options["slots"]
    return slice(None) if slots is None else slots
