"""The equation of the delta rule without gates, with gates of heads (Yang et al., 2024), or of channels (KDA, 2025).

The arrays of a token are q, k [N, HK, K], v [N, H, V] and `gates`: a log gate [N, H] or [N, H, K] if the operator has
one, and then beta [N, H]. `state` is a tuple of one S [N, H, K, V]; dstate and do are gradients. From `recurrent`:
outer(k, v) = k v^T; read(q, S) = S^T q; decayed(problem, S, g) = exp(g) S, in the memory of S unless a gradient needs
S; add_outer(S, k, v) = S + k v^T, in place; `read_vjp` is the pullback of `read` to q, `write_vjp` that of a sum with k
v^T.
"""

import numpy as np

from ...declarations import LEAST_SQUARE
from .recurrent import add_outer, decayed, outer, read, read_vjp, write_vjp


def step(problem, state, q, k, v, *gates):
    """S' = diag(exp g_t) S_{t-1},    S_t = S' + beta_t k_t (v_t - S'^T k_t)^T,     o_t = scale q_t^T S_t."""
    (S,), (*g, beta) = state, gates
    q, k = keys(problem, q), keys(problem, k)
    S = decayed(problem, S, *g)
    S = add_outer(S, k, beta[..., None] * (v - read(k, S)))
    return (S,), problem.scale * read(q, S)


def writes(problem, S, q, k, v, *gates):
    """(decay [B, H, K] or [B, H, 1], [(k, u)]) of a token: S_t = diag(decay) S + k u^T."""
    (*g, beta), k = gates, keys(problem, k)
    decay = np.exp(g[0] if g else np.zeros_like(beta))
    decay = decay if decay.ndim > beta.ndim else decay[..., None]
    return decay, [(k, beta[..., None] * (v - read(k, decay[..., None] * S)))]


def step_vjp(problem, state, q, k, v, *gates_and_gradients):
    """The gradients of `step`: (that of the state before it, dq, dk, dv, maybe dg, dbeta). decayed_S is S' there; the
    residual is v_t - S'^T k_t, and `callers` are q and k as the call has them, before `keys`."""
    *g, beta, (dS,), do = gates_and_gradients
    (S,), do, callers, beta = state, problem.scale * do, (q, k), beta[..., None]
    q, k = keys(problem, q), keys(problem, k)
    decayed_S = decayed(problem, S, *g)
    residual = v - read(k, decayed_S)
    dq = read_vjp(decayed_S + outer(k, beta * residual), do)
    dS = dS + outer(q, do)
    dk, dwritten = write_vjp(k, beta * residual, dS)
    dv = beta * dwritten
    dk -= read_vjp(decayed_S, dv)
    dS -= outer(k, dv)
    dg = []
    if g:
        gate_terms = (decayed_S * dS).sum(-1)
        dg = [gate_terms if g[0].ndim == gate_terms.ndim else gate_terms.sum(-1)]
        dS = decayed(problem, dS, *g)
    dq, dk = (keys_vjp(problem, x, dx) for x, dx in zip(callers, (dq, dk)))
    return (dS,), dq, dk, dv, *dg, (dwritten * residual).sum(-1)


def of_every_head(problem):
    """The problem with a query and a key for every head of values, divided by their lengths if the call asks for it."""
    arrays = {name: keys(problem, x.astype(problem.compute_dtype, copy=False)) for name, x in qk(problem)}
    return problem.replace(
        arrays=problem.arrays | arrays,
        sizes=problem.sizes | {"HK": problem.sizes["H"]},
        options=problem.options | {"qk_l2norm": False},
    )


def of_the_callers(problem, gradients):
    """The gradients of the problem's arrays from those of `of_every_head`."""
    found = [
        keys_vjp(problem, x.astype(problem.compute_dtype, copy=False), dx) for (_, x), dx in zip(qk(problem), gradients)
    ]
    return [*found, *gradients[2:]]


def qk(problem):
    """[(name, array)] of the query and the key."""
    return [(name, problem[name]) for name in problem.op.shared]


def keys(problem, x):
    """Queries or keys [B, H, ..., K] of all heads of values from x [B, HK, ..., K], divided by their lengths if the
    call asks for it."""
    if problem.options["qk_l2norm"]:
        x = x / length(x)
    H, HK = problem.shape("H HK")
    return x if H == HK else np.repeat(x, H // HK, axis=1)


def keys_vjp(problem, x, dx):
    """The pullback of `keys`: the gradient of x [B, HK, ..., K] from dx [B, H, ..., K]."""
    H, HK = problem.shape("H HK")
    if H != HK:
        dx = dx.reshape(len(dx), HK, H // HK, *dx.shape[2:]).sum(2)
    if problem.options["qk_l2norm"]:
        size = length(x)
        unit = x / size
        dx = (dx - unit * np.vecdot(unit, dx)[..., None]) / size
    return dx


def length(x):
    """The Euclidean lengths of the rows of x [..., K], [..., 1]."""
    return np.sqrt(np.vecdot(x, x)[..., None] + x.dtype.type(LEAST_SQUARE))
