"""The operators as JAX functions, to train with: under `jit`, `grad`, `vmap`, `scan` and `checkpoint`.

JAX runs the operators as callbacks (`jax.experimental.buffer_callback`, JAX 0.6.2 or newer) on its own buffers: on the
CPU NumPy reads and writes them in place; on CUDA the kernels do, enqueued on XLA's stream without synchronising. CUDA
requires CuPy and memory that JAX leaves free (`XLA_PYTHON_CLIENT_PREALLOCATE=false`, or a smaller
`XLA_PYTHON_CLIENT_MEM_FRACTION`).

All keyword arguments except `initial_state` are static. Shapes, dtypes and options are checked while JAX traces, with
`linattn_np`'s errors. float64 needs JAX's `jax_enable_x64`. The backward pass stores the inputs only and recomputes
what it needs of the forward pass. `vmap` computes its elements one after the other; a batch is faster as the operators'
axis B. Gradients are reverse-mode and first-order; `jvp` and gradients of gradients are refused. JAX cannot export
functions with callbacks.

Arrays that are sharded along batch or heads stay sharded where JAX tells the sharding: outside of `jit`, and under
`jit` on a mesh with explicit axes (`jax.sharding.AxisType.Explicit`). On a mesh with automatic axes `jit` gathers the
arrays; use `jax.shard_map` there.

Under `jax.shard_map` arrays may be sharded along batch and heads, and, if ``axis_name=`` names a mesh axis, along the
tokens. The initial and final states are then those of the whole sequence, the same on every device of that axis;
devices exchange only states, K * V + K floats per head. With ``axis_name=`` the operator is called twice, so that the
backward pass costs two of its backward passes, and `cu_seqlens` is refused. (`retention`'s default decays depend on the
number of heads on the device: pass `gamma` if heads are sharded.)

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
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ..accepted_arrays import REFUSALS, host_array
from ..array_kinds import kind, to_native
from ..bounded_cache import Cache
from ..checked_calls import exact_key
from ..contract import Op
from ..errors import ContractTypeError, NotSupported
from ..gates import Gates, of_library
from .calls import Operator, as_returned, blank, functions, is_pair, on_stream, outline
from .jax_axis import along
from .jax_partition import over_devices, sharding_of

HOST = 1  # DLPack's kDLCPU
REVERSE_MODE = "gradients are first-order and reverse-mode"
FUNCTIONS = Cache(most=1 << 26, entries=1024)  # those of `cached_function`
pcast, pvary = (getattr(jax.lax, name, None) for name in ("pcast", "pvary"))  # pvary: JAX before 0.8
mark_varying = partial(pcast, to="varying") if pcast else pvary


def differentiable(op: Op):
    """The JAX function of a declared operator."""
    more = ("axis_name",) if op.state else ()  # softmax attention has no state, which devices could exchange
    operator = Operator.of(op, without=("out", "mask"), more=more)  # keywords are static, and a mask cannot be

    def public(*positional, **named):
        axis_name = named.pop("axis_name", None) if more else None
        # declared: `op`, or its form with the optional array that was passed; state: a tuple of the state's parts.
        declared, arrays, state, arguments = operator.take_apart(positional, named)
        arrays = tuple(as_jax(declared, name, x) for name, x in zip(declared.arrays, arrays))
        state = state and tuple(as_jax(declared, "initial_state", x) for x in state)

        def run(arrays, state, arguments):
            inputs = arrays, state and tuple(state)
            # An array may be replicated over a mesh axis over which others vary. Its gradients are then to be summed
            # over that axis: the transpose of this marking is that sum.
            arrays, state = varying(inputs, *jax.tree.leaves(inputs))
            results = result_shapes(declared, arrays, state, arguments)
            compute = cached_function(operator, results, tuple((name, static(x)) for name, x in arguments.items()))
            try:
                return compute(arrays, state)
            except TypeError as error:
                if "custom_vjp" in str(error):  # the message of JAX when a tangent reaches the function
                    raise NotSupported(f"{declared.name}: {REVERSE_MODE}: jax.jvp needs forward-mode ones") from error
                raise

        results = None
        if axis_name is not None:  # `along` always returns results
            problem, _ = on_blanks(declared, arrays, state, arguments)
            results = along(axis_name, run, problem, arrays, state, arguments)
        elif any(map(sharding_of, jax.tree.leaves((arrays, state)))):
            problem, _ = on_blanks(declared, arrays, state, arguments)
            results = over_devices(lambda arrays, state: run(arrays, state, arguments), problem, arrays, state)
        if results is None:  # `over_devices` gives none if no array is sharded along an axis
            results = run(arrays, state, arguments)
        return as_returned(results, is_pair(arguments))  # o, or (o, final state) if the call asks for both

    return operator.document(public, "JAX arrays")


def as_jax(declared, name, x):
    """`x`, an array of any library, as JAX's; ContractTypeError for anything else."""
    if not isinstance(x, jax.core.Tracer):
        if kind(x) != "jax":
            x, _ = declared.native(name, x)
        elif found := REFUSALS["jax"](x, "computed", None):  # why it cannot be computed with; None: no advice
            declared.refuse(name, found, ContractTypeError)
    if not isinstance(x.dtype, np.dtype) or x.dtype.kind in "OSUMm":
        declared.refuse(name, f"has dtype {x.dtype}, expected floats", ContractTypeError)
    return jnp.asarray(x)


def on_blanks(declared, arrays, state, arguments):
    """(the `Problem` of a call, its blank results), as `calls.outline` makes them, from shapes and dtypes alone."""
    arrays, state = jax.tree.map(lambda x: blank(x.shape, x.dtype), (arrays, state))
    return outline(declared, arrays, state, arguments, "jax")


def result_shapes(declared, arrays, state, arguments):
    """Checks a call; returns the shapes and dtypes of o and of the final state's parts."""
    problem, results = on_blanks(declared, arrays, state, arguments)
    if jax.dtypes.canonicalize_dtype(problem.state_dtype) != problem.state_dtype:
        problem.op.refuse("state_dtype", f"is {problem.state_dtype}, which JAX has with jax_enable_x64 alone")
    return tuple(map(shape_and_dtype, results))


def varying(results, *inputs):
    """`results` marked as varying over the mesh axes over which `inputs` vary, which JAX cannot infer for callbacks."""
    axes = frozenset().union(*map(manual_axes, inputs))

    def marked(x):
        missing = axes - manual_axes(x)
        return mark_varying(x, tuple(sorted(missing))) if missing else x

    return jax.tree.map(marked, results)


def manual_axes(x) -> frozenset:
    """The mesh axes of `shard_map` over which `x` varies; none outside of `shard_map`."""
    array_type = jax.typeof(x)
    if hasattr(array_type, "mat"):
        return array_type.mat.varying
    return getattr(array_type, "vma", frozenset())  # JAX before 0.10


def shape_and_dtype(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def static(x):
    """An immutable copy of an argument that `result_shapes` has checked: of arrays and lists, which have one axis at
    most, a tuple or a number."""
    numbers = x if kind(x) is None else host_array(x)
    if not isinstance(numbers, (list, np.ndarray)):
        return x
    copied = np.asarray(numbers).tolist()
    return tuple(copied) if isinstance(copied, list) else copied


def cached_function(operator, results, arguments):
    """`new_function`, cached: equal arguments give the same function, which JAX compiles once."""
    key = operator, results, *((name, exact_argument(x)) for name, x in arguments)
    function = FUNCTIONS.get(key)
    if function is None:
        numbers = sum(len(x) for _, x in arguments if isinstance(x, tuple))
        nbytes = 4096 + 256 * numbers  # about what the function, the key and the arguments take
        function = FUNCTIONS.keep(key, new_function(operator, results, dict(arguments)), nbytes)
    return function


def exact_argument(x):
    """A cache key for `x`, which distinguishes values that compare equal, such as 1, 1.0 and True. Of a type without
    such a key it is the id, which no other value gets: the function that is cached by it holds `x`."""
    if isinstance(x, tuple):
        return tuple(map(exact_argument, x))
    return x if x is None or type(x) in (str, bool) else exact_key(x) or id(x)


def new_function(operator, results, arguments):
    """A differentiable JAX function: (arrays, initial state's parts or None) -> (o, *final state's parts)."""

    # The callbacks, which write to JAX's buffers `out`.
    def forward(context, out, arrays, state):
        with stream_of(context, out):
            out, arrays, state = jax.tree.map(native, (out, arrays, state))
            o, *parts = out
            _, *final_parts = operator.run(arrays, state, {**arguments, "out": o})
            fill(parts, final_parts)

    def backward(context, out, arrays, state, do, *dht):
        with stream_of(context, out):
            out, arrays, state, do, dht = jax.tree.map(native, (out, arrays, state, do, dht))
            fill(jax.tree.leaves(out), operator.gradients(arrays, state, arguments, do, dht))

    def call_back(function, results, arrays, *others):
        first, *rest = arrays
        arrays = not_exported.bind(first, op=operator.declared.name), *rest
        return varying(buffer_callback(function, results, vmap_method="sequential")(arrays, *others), *arrays)

    @jax.custom_vjp
    def compute(arrays, state):
        return call_back(forward, results, arrays, state)

    def compute_and_save(arrays, state):
        return compute(arrays, state), (arrays, state)

    @jax.custom_vjp
    def pull(saved, cotangents):
        return call_back(backward, jax.tree.map(shape_and_dtype, saved), *saved, *cotangents)

    def refuse(*_):
        raise NotSupported(f"{operator.declared.name}: {REVERSE_MODE}, these have none of their own")

    compute.defvjp(compute_and_save, pull)
    pull.defvjp(refuse, refuse)
    return compute


def lower(context, x, *, op):
    """The lowering of `not_exported`: its argument; NotSupported if JAX lowers it for an export."""
    if context.module_context.lowering_parameters.for_export:
        raise NotSupported(f"{op}: jax.export cannot take it: it calls back into Python. Export what is around {op}")
    return [x]


not_exported = Primitive("linattn_np_not_exported")  # the identity, which jax.export cannot lower
not_exported.def_impl(lambda x, op: x)
not_exported.def_abstract_eval(lambda x, op: x)
batching.primitive_batchers[not_exported] = lambda xs, axes, op: (not_exported.bind(*xs, op=op), *axes)
mlir.register_lowering(not_exported, lower)


def single(x):
    """`x` in float32 at least."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# The module also has the gates of layers, gdn_gate, kda_gate and rwkv7_gate, for arrays of these libraries.
GATES = Gates(("jax", "numpy"), exp=jnp.exp, softplus=jax.nn.softplus, sigmoid=jax.nn.sigmoid, single=single)


def native(buffer):
    """An XLA buffer as a NumPy or CuPy array in the same memory."""
    return np.asarray(buffer) if buffer.__dlpack_device__()[0] == HOST else to_native(buffer, "dlpack")


def stream_of(context, buffers):
    """A context in which CuPy uses the CUDA stream on which XLA runs the callback; no effect on the CPU."""
    device_type, ordinal = jax.tree.leaves(buffers)[0].__dlpack_device__()
    return nullcontext() if device_type == HOST else on_stream(ordinal, context.stream)


def fill(targets, sources):
    """Copies arrays to other arrays of the same shapes."""
    for target, source in zip(targets, sources, strict=True):
        target[...] = source


if TYPE_CHECKING:
    from .signatures import *  # noqa: F403
else:
    globals().update(functions(differentiable, "JAX arrays"))
    globals().update(of_library(GATES))
