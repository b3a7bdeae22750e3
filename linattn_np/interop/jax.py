"""The operators as JAX functions, to train with: under `jit`, `grad`, `vmap`, `scan` and `checkpoint`.

JAX calls back (`jax.experimental.buffer_callback`, JAX 0.6.2 or newer) and hands over its buffers: on the CPU NumPy
reads and writes them in place, on CUDA the kernels do, enqueued on XLA's own stream without waiting. That needs CuPy,
and memory that JAX leaves it (`XLA_PYTHON_CLIENT_PREALLOCATE=false`, or a smaller `XLA_PYTHON_CLIENT_MEM_FRACTION`).

Keyword arguments but `initial_state` are static. Shapes, dtypes and options are checked while JAX traces, with
`linattn_np`'s errors. float64 needs JAX's `jax_enable_x64`. The backward pass is given the inputs alone and computes
again what it needs of the forward pass. `vmap` computes its elements one after the other: a batch is faster as the
operators' B. Gradients are reverse-mode and first-order; JAX refuses `jvp` and gradients of gradients.

Under `jax.shard_map` arrays may be cut along batch and heads, and with ``axis_name=`` of a mesh axis along the tokens:
then the initial and final state are those of the whole sequence, the same on every device of that axis, and only states
travel, K * V + K floats a head. `cu_seqlens` does not go with it. The backward pass takes two backward passes of the
operator. (`retention`'s default decays are those of the heads that a device has: name them where heads are cut.)

Example
-------
>>> import jax, jax.numpy as jnp
>>> from linattn_np.interop.jax import gla
>>> q, k, v, g = jax.random.normal(jax.random.key(0), (4, 1, 2, 50, 8))
>>> loss = jax.jit(lambda q: (gla(q, k, v, -jnp.exp(g)) ** 2).mean())
>>> jax.grad(loss)(q).shape
(1, 2, 50, 8)
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from .. import ops
from ..arrays import to_native
from .calls import Operator, on_stream, together
from .jax_axis import along

HOST = 1        # DLPack's kDLCPU
mark_varying = partial(jax.lax.pcast, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary    # JAX before 0.8


def differentiable(function):
    """The JAX function that computes what the operator `function` does."""
    more = () if function is ops.softmax_attention else ("axis_name",)
    operator = Operator.of(function, without=("out", "mask"), more=more)    # keyword arguments are static, no mask is

    def public(*positional, **named):
        axis_name = named.pop("axis_name", None) if more else None
        declared, arrays, state, arguments = operator.take_apart(positional, named)
        arrays, state = jax.tree.map(jnp.asarray, (arrays, state))

        def run(arrays, state, arguments):
            arrays, state = equally_varying((arrays, state and tuple(state)))
            results = outline(bind(declared, arrays, state, arguments))
            compute = primitive(operator, results, tuple((name, static(x)) for name, x in arguments.items()))
            return compute(arrays, state)

        if axis_name is None:
            results = run(arrays, state, arguments)
        else:
            results = along(axis_name, run, bind(declared, arrays, state, arguments), arrays, state, arguments)
        return together(results, bool(arguments.get("output_final_state")))

    return operator.document(public, "JAX arrays")


def bind(declared, arrays, state, arguments):
    """The call as a problem of empty arrays, once it is seen to fit the declaration."""
    arguments = {name: x for name, x in arguments.items() if name != "backend"}
    arrays, state = jax.tree.map(blank, (arrays, state))
    return declared.bind(arrays, initial_state=state, **arguments)


def outline(problem):
    """Shapes and dtypes of o and of the final state's parts."""
    if jax.dtypes.canonicalize_dtype(problem.state_dtype) != problem.state_dtype:
        problem.op.refuse("state_dtype", f"is {problem.state_dtype}, which JAX has with jax_enable_x64 alone")
    o = problem.in_layout(blank(jax.ShapeDtypeStruct(problem.shape(problem.op.out), problem.dtype)), problem.op.out)
    axes = problem.op.state if problem.output_final_state else ()
    parts = (blank(jax.ShapeDtypeStruct(problem.shape(part), problem.state_dtype)) for part in axes)
    return like(o), *(like(x) for x in map(problem.given_state, parts, axes))


def equally_varying(arrays):
    """All of `arrays` varying over the mesh axes of `shard_map` that any of them varies over.

    JAX then sums the gradient of what was the same on every device, as it must be.
    """
    return varying(arrays, *jax.tree.leaves(arrays))


def varying(results, *inputs):
    """`results` marked as varying over the mesh axes that `inputs` vary over: a callback's result does not say so."""
    axes = frozenset().union(*map(manual_axes, inputs))

    def marked(x):
        missing = axes - manual_axes(x)
        return mark_varying(x, tuple(sorted(missing))) if missing else x

    return jax.tree.map(marked, results)


def manual_axes(x) -> frozenset:
    """The axes of `shard_map` over which `x` is known to vary; none outside of it."""
    kind = jax.typeof(x)
    return kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())      # JAX before 0.10


def blank(x):
    """A NumPy array of the shape and dtype of `x` in the memory of one number."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def static(x):
    """`x` so that equal arguments are one key: JAX compiles once for each."""
    return tuple(np.asarray(x).tolist()) if isinstance(x, (list, np.ndarray)) else x


@lru_cache(1024)
def primitive(operator, results, arguments):
    """(arrays, initial state's parts or None) -> (o, *final state's parts), for JAX to differentiate."""
    arguments = dict(arguments)

    def forward(context, written, arrays, state):
        with stream_of(context, written):
            written, arrays, state = jax.tree.map(native, (written, arrays, state))
            o, *parts = written
            _, *found = operator.run(arrays, state, {**arguments, "out": o})
            fill(parts, found)

    def backward(context, written, arrays, state, do, *dht):
        with stream_of(context, written):
            written, arrays, state, do, dht = jax.tree.map(native, (written, arrays, state, do, dht))
            fill(jax.tree.leaves(written), operator.gradients(arrays, state, arguments, do, dht))

    @jax.custom_vjp
    def compute(arrays, state):
        found = buffer_callback(forward, results, vmap_method="sequential")(arrays, state)
        return varying(found, *arrays)

    def keep(arrays, state):
        return compute(arrays, state), (arrays, state)

    def pull(kept, cotangents):
        found = buffer_callback(backward, jax.tree.map(like, kept), vmap_method="sequential")(*kept, *cotangents)
        return varying(found, *kept[0])

    compute.defvjp(keep, pull)
    return compute


def native(buffer):
    """A buffer of XLA's as a NumPy or CuPy array over the same memory."""
    return np.asarray(buffer) if buffer.__dlpack_device__()[0] == HOST else to_native(buffer, "dlpack")


def stream_of(context, buffers):
    """What XLA runs a callback on: a CUDA stream, or the host."""
    kind, ordinal = jax.tree.leaves(buffers)[0].__dlpack_device__()
    return nullcontext() if kind == HOST else on_stream(ordinal, context.stream)


def fill(written, found):
    for to, x in zip(written, found, strict=True):
        to[...] = x


gla = differentiable(ops.gla)
rwkv6 = differentiable(ops.rwkv6)
simple_gla = differentiable(ops.simple_gla)
retention = differentiable(ops.retention)
linear_attention = differentiable(ops.linear_attention)
softmax_attention = differentiable(ops.softmax_attention)
