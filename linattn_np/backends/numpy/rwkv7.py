"""RWKV-7 (Peng et al., 2025, eq. 17): a transition that is a diagonal matrix and one of rank one.

The arrays of a token are r, w, k, a, b [N, H, K] and v [N, H, V]; `state` is a tuple of one S [N, H, K, V]; dstate and
do are gradients. From `recurrent`: outer(k, v) = k v^T; read(q, S) = S^T q; decayed(problem, S, g) = exp(g) S, in the
memory of S unless a gradient needs S; add_outer(S, k, v) = S + k v^T, in place; `read_vjp` is the pullback of `read` to
q, `write_vjp` that of a sum with k v^T to k and v. In an RWKV-7 model a is minus a unit vector and b a positive
multiple of that vector, so that b (S^T a)^T removes a part of what S holds for it.
"""

import numpy as np

from .recurrent import add_outer, decayed, outer, read, read_vjp, write_vjp


def step(problem, state, r, w, k, v, a, b):
    """S_t = diag(exp w_t) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T,     o_t = scale r_t^T S_t."""
    (S,) = state
    removed = read(a, S)  # before `decayed`, which may overwrite S
    S = add_outer(add_outer(decayed(problem, S, w), b, removed), k, v)
    return (S,), problem.scale * read(r, S)


def writes(problem, S, r, w, k, v, a, b):
    """(decay [N, H, K], [(k, u), ...]) of a token: S_t = diag(decay) S + sum of k u^T."""
    return np.exp(w), [(k, v), (b, read(a, S))]


def step_vjp(problem, state, r, w, k, v, a, b, dstate, do):
    """The gradients of `step`: (those of the state before it, that of each array)."""
    (before,), (dS,), do = state, dstate, problem.scale * do
    # `before` stays as it is: nothing overwrites the states of a call with gradients
    ((after,), _), removed = step(problem, state, r, w, k, v, a, b), read(a, before)
    dr = read_vjp(after, do)
    dS = dS + outer(r, do)
    (dk, dv), (db, dremoved) = write_vjp(k, v, dS), write_vjp(b, removed, dS)
    dw = np.exp(w) * (before * dS).sum(-1)
    dbefore = decayed(problem, dS, w) + outer(a, dremoved)
    return (dbefore,), dr, dw, dk, dv, read_vjp(before, dremoved), db


def of_every_head(problem):
    """The problem itself. The functions of this name and the next in `delta_rule` repeat keys of fewer heads than
    values, and sum their gradients; RWKV-7 has no such keys."""
    return problem


def of_the_callers(problem, gradients):
    """The gradients themselves."""
    return gradients
