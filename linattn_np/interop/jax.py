"""The operators as JAX functions, to train with: under `jit`, `grad`, `vmap`, `scan` and `checkpoint`.

JAX calls back (`jax.experimental.buffer_callback`, JAX 0.6.2 or newer) and hands over its buffers: on the CPU NumPy
reads and writes them in place, on CUDA the kernels do, enqueued on XLA's own stream without waiting. That needs CuPy,
and memory that JAX leaves it (`XLA_PYTHON_CLIENT_PREALLOCATE=false`, or a smaller `XLA_PYTHON_CLIENT_MEM_FRACTION`).

Keyword arguments but `initial_state` are static. Shapes, dtypes and options are checked while JAX traces, with
`linattn_np`'s errors. float64 needs JAX's `jax_enable_x64`. The backward pass is given the inputs alone and computes
again what it needs of the forward pass. `vmap` computes its elements one after the other: a batch is faster as the
operators' B. Gradients are reverse-mode and first-order; JAX refuses `jvp` and gradients of gradients.

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

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from .. import ops
from ..arrays import to_native
from ..caches import Cache
from ..call_cache import exactly
from ..errors import ContractTypeError
from ..foreign import is_subclass, of_subclass
from ..typing import F
from .calls import Operator, blank, on_stream, outline, together

HOST = 1        # DLPack's kDLCPU
PRIMITIVES = Cache(most=1 << 26, entries=1024)


def differentiable(function: F) -> F:
    """The JAX function that computes what the operator `function` does."""
    operator = Operator.of(function, without=("out", "mask"))       # keyword arguments are static, which no mask is

    def public(*positional, **named):
        declared, arrays, state, arguments = operator.take_apart(positional, named)
        for name, x in [*zip(declared.arrays, arrays), *(("initial_state", x) for x in state or ())]:
            if is_subclass(x):
                declared.refuse(name, of_subclass(x), ContractTypeError)
        arrays, state = jax.tree.map(jnp.asarray, (arrays, state))
        results = shapes(declared, arrays, state, arguments)
        compute = primitive(operator, results, tuple((name, static(x)) for name, x in arguments.items()))
        return together(compute(arrays, state), bool(arguments.get("output_final_state")))

    return operator.document(public, "JAX arrays")


def shapes(declared, arrays, state, arguments):
    """Shapes and dtypes of o and of the final state's parts, once the call is seen to fit the declaration."""
    arrays, state = jax.tree.map(lambda x: blank(x.shape, x.dtype), (arrays, state))
    problem, results = outline(declared, arrays, state, arguments)
    if jax.dtypes.canonicalize_dtype(problem.state_dtype) != problem.state_dtype:
        problem.op.refuse("state_dtype", f"is {problem.state_dtype}, which JAX has with jax_enable_x64 alone")
    return tuple(map(like, results))


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def static(x):
    """`x` as it cannot be changed any more."""
    return tuple(np.asarray(x).tolist()) if isinstance(x, (list, np.ndarray)) else x


def primitive(operator, results, arguments):
    """`new_primitive`, the same for equal arguments: JAX compiles once for each."""
    key = operator, results, *((name, told_apart(x)) for name, x in arguments)
    found = PRIMITIVES.get(key)
    if found is None:
        numbers = sum(len(x) for _, x in arguments if isinstance(x, tuple))
        found = PRIMITIVES.keep(key, new_primitive(operator, results, dict(arguments)), 4096 + 256 * numbers)
    return found


def told_apart(x):
    """`x` so that only what is the same in every way equals it."""
    if isinstance(x, tuple):
        return tuple(map(told_apart, x))
    return x if x is None or type(x) in (str, bool) else exactly(x) or id(x)


def new_primitive(operator, results, arguments):
    """(arrays, initial state's parts or None) -> (o, *final state's parts), for JAX to differentiate."""

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
        return buffer_callback(forward, results, vmap_method="sequential")(arrays, state)

    def keep(arrays, state):
        return compute(arrays, state), (arrays, state)

    def pull(kept, cotangents):
        return buffer_callback(backward, jax.tree.map(like, kept), vmap_method="sequential")(*kept, *cotangents)

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
