"""Operators on sequences whose tokens are sharded along a mesh axis of `shard_map`, with JAX's collectives.

    S_b = diag(exp(g_{a+1} + ... + g_b)) S_a + S_own

for a device's tokens a + 1 ... b, where S_own is their final state if their initial state is 0. Every device computes
S_own and the product of its decays. An all-gather sends both to all devices: K * V + K numbers per head, or K * V + K *
K for the delta rules, whose transition is a matrix. Each device applies the maps of all earlier devices to the initial
state of the sequence, and computes its outputs from the result. JAX differentiates all of this, collectives included.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..summary import Summary, Transition


def along(axis_name, run, problem, arrays, state, arguments):
    """(o of this device's tokens, *parts of the whole sequence's final state, which are the same on all devices).

    run(arrays, state, arguments) : computes the operator on this device's tokens
    problem : the checked call of the operator on this device's tokens
    state : the whole sequence's initial state, or None
    """
    if problem.varlen:
        problem.op.refuse(
            "cu_seqlens",
            "cannot be combined with axis_name, as sequences would end elsewhere on every "
            "device; linattn_np.distributed takes it",
        )
    dtype, v_first = problem.compute_dtype, problem.state_v_first
    arguments = {**arguments, "state_v_first": False, "state_dtype": dtype}
    own, factors = jax.lax.all_gather(summary(run, problem, arrays, arguments), axis_name)
    index, count = jax.lax.axis_index(axis_name), own[0].shape[0]
    start = [jnp.zeros_like(part[0]) for part in own]
    if state is not None:
        start = [with_axes_swapped(part, v_first).astype(dtype) for part in state]
    states = start
    for device in reversed(range(count)) if problem.reverse else range(count):
        is_earlier = device > index if problem.reverse else device < index
        device_summary = ([part[device] for part in parts] for parts in (own, factors))
        joined = Summary(problem.op.transition, *device_summary).apply(states)
        states = [jnp.where(is_earlier, new, old) for new, old in zip(joined, states, strict=True)]
    o, *final = run(arrays, states, arguments)
    is_last = index == (0 if problem.reverse else count - 1)
    return o, *(
        jax.lax.psum(jnp.where(is_last, with_axes_swapped(part, v_first), 0), axis_name).astype(problem.state_dtype)
        for part in final
    )


def summary(run, problem, arrays, arguments):
    """(the parts of S_own, the factors of the transition) of this device's tokens, as in `linattn_np.summary.Summary`.

    For delta rules the transition matrix is the final state of K more columns of v, whose values are 0 and whose
    initial state is the identity.
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


def with_axes_swapped(state, v_first):
    """A state [N, H, K, V] from [N, H, V, K], or the reverse, if `v_first`; otherwise the state as it is."""
    return state.swapaxes(2, 3) if v_first and state.ndim == 4 else state


def factors_of(problem, arrays):
    """The factors of this device's `Summary`: the product of the decays of all its tokens."""
    if "log_decay" in problem.options:
        decay = problem.op.decay_over(problem.options["log_decay"], problem.sizes["T"])
        return [jnp.asarray(decay[None], problem.compute_dtype)]
    tokens = 1 if problem.layout == "bthd" else 2
    named = dict(zip(problem.op.arrays, arrays))
    decays = [named[name].astype(problem.compute_dtype) for name in problem.op.decays]
    return [jnp.exp(total(g, tokens)) for g in decays]


def total(g, axis):
    """The pairwise sum over an axis; adding a million weak gates one after the other would lose digits in float32.

    It avoids concatenations: on several GPUs XLA (JAX 0.11.2) ends the process if a part is empty.
    """
    odd = []
    while (count := g.shape[axis]) > 1:
        half = count // 2
        if count % 2:
            odd.append(jax.lax.index_in_dim(g, count - 1, axis, keepdims=False))
        g = jax.lax.slice_in_dim(g, 0, half, axis=axis) + jax.lax.slice_in_dim(g, half, 2 * half, axis=axis)
    return sum(odd, g.sum(axis=axis))
