"""A sequence whose tokens are cut along a mesh axis of `shard_map`, by JAX's own collectives.

    S_b = diag(exp(g_{a+1} + ... + g_b)) S_a + F       for a device's tokens a+1 ... b; F is their final state from zero

Every device computes F, an all-gather brings K * V + K floats a head to all, each adds up those before its own and
computes its outputs from there. The delta rules have a matrix of K * K in the place of the K decays. All of it is
differentiable as it stands: JAX turns the collectives round.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..summary import Summary, Transition


def along(axis_name, run, problem, arrays, state, arguments):
    """[o, *final state's parts] of this device's tokens, the states those of the whole sequence, alike on all devices.

    `run(arrays, state, arguments)` is the operator on this device's tokens; `problem` one call of it, checked.
    """
    if problem.varlen:
        problem.op.refuse(
            "cu_seqlens",
            "cannot be combined with axis_name, as sequences would end elsewhere on every "
            "device; linattn_np.distributed takes it",
        )
    dtype, v_first = problem.compute_dtype, problem.state_v_first
    plain = {**arguments, "state_v_first": False, "state_dtype": dtype}
    own, factors = jax.lax.all_gather(summary(run, problem, arrays, plain), axis_name)
    place, count = jax.lax.axis_index(axis_name), own[0].shape[0]
    start = [jnp.zeros_like(part[0]) for part in own]
    if state is not None:
        start = [turned(part, v_first).astype(dtype) for part in state]
    before = start
    for device in reversed(range(count)) if problem.reverse else range(count):
        earlier = device > place if problem.reverse else device < place
        of_device = ([part[device] for part in parts] for parts in (own, factors))
        behind = Summary(problem.op.transition, *of_device).apply(before)
        before = [jnp.where(earlier, after, x) for after, x in zip(behind, before, strict=True)]
    o, *final = run(arrays, before, plain)
    last = place == (0 if problem.reverse else count - 1)
    return o, *(
        jax.lax.psum(jnp.where(last, turned(part, v_first), 0), axis_name).astype(problem.state_dtype) for part in final
    )


def summary(run, problem, arrays, arguments):
    """(the final state's parts of this device's tokens from zero, the factors of their transition).

    The matrix of transitions of rank one is the final state of K more columns, which begin as the identity; their
    values are zeros.
    """
    arguments = {**arguments, "output_final_state": True}
    if problem.op.transition is not Transition.RANK_ONE:
        _, *own = run(arrays, None, arguments)
        return own, factors_of(problem, arrays)
    named, K = dict(zip(problem.op.arrays, arrays)), problem.sizes["K"]
    v = named[problem.op.value]
    named[problem.op.value] = jnp.concatenate([v, jnp.zeros((*v.shape[:-1], K), v.dtype)], axis=-1)
    heads, V = v.shape[2 if problem.layout == "bthd" else 1], v.shape[-1]
    start = jnp.concatenate([jnp.zeros((K, V)), jnp.eye(K)], axis=1).astype(problem.compute_dtype)
    start = jnp.broadcast_to(start, (v.shape[0], heads, K, V + K))
    _, final = run(list(named.values()), [start], arguments)
    return [final[..., :V]], [final[..., V:]]


def turned(state, v_first):
    return state.swapaxes(2, 3) if v_first and state.ndim == 4 else state


def factors_of(problem, arrays):
    """The factors of this device's `Summary`."""
    if "log_decay" in problem.options:
        decay = problem.op.decay_over(problem.options["log_decay"], problem.sizes["T"])
        return [jnp.asarray(decay[None], problem.compute_dtype)]
    tokens = 1 if problem.layout == "bthd" else 2
    named = dict(zip(problem.op.arrays, arrays))
    decays = [named[name].astype(problem.compute_dtype) for name in problem.op.decays]
    return [jnp.exp(total(g, tokens)) for g in decays]


def total(g, axis):
    """The sum over an axis by halves: one after the other a million weak gates would lose digits in float32.

    Without concatenations: of an empty part XLA (JAX 0.11.2), on several cards, makes none but ends the process.
    """
    odd = []
    while (count := g.shape[axis]) > 1:
        half = count // 2
        if count % 2:
            odd.append(jax.lax.index_in_dim(g, count - 1, axis, keepdims=False))
        g = jax.lax.slice_in_dim(g, 0, half, axis=axis) + jax.lax.slice_in_dim(g, half, 2 * half, axis=axis)
    return sum(odd, g.sum(axis=axis))
