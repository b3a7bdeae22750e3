"""What the functions for torch and for JAX have in common: signatures, reading a call's arguments, computing a call."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ..autodiff import pullback_of
from ..contract import Op, bound_arguments
from ..conversions import state_to_caller, to_caller
from ..declarations import OPERATORS, STEPS
from ..dispatch import call
from ..errors import ContractTypeError
from ..messages import kind_of
from ..precisions import current

DOC = """`linattn_np.{name}` as a differentiable function of {kind}.

    Arguments, result, equation and errors are those of `linattn_np.{name}`, without {without}. Gradients are
    those of `linattn_np.vjp`, for the arrays and `initial_state`, with the final state's gradient where there is one.
    """


STEP_DOC = """`linattn_np.{name}` as a differentiable function of {kind}: ``(o, the state after the token)``.

    Arguments, equation and errors are those of `linattn_np.{name}`, without `slots`, `pending`, `accepted` and `out`;
    `state` [B, H, K, V] is not written to, and the one that comes back has its dtype.
    """


WRITTEN = ("slots", "pending", "accepted", "out")  # keywords of steps that concern memory updated in place


@dataclass(frozen=True)
class Operator:
    """A declared operator and the signature of its function for a framework."""

    declared: Op
    signature: inspect.Signature

    @classmethod
    def of(cls, declared, without=("out",), more=()) -> Operator:
        """An operator whose function lacks the keywords `without` and has the keywords `more`, with default None."""
        kept = [parameter for name, parameter in declared.signature.parameters.items() if name not in without]
        kept += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in more]
        return cls(declared, inspect.Signature(kept))

    def document(self, public, kind: str):
        """Gives the function `public` this operator's name, docstring and signature; `kind` names its arrays."""
        declared, kept = self.declared.signature.parameters, self.signature.parameters
        without = " and ".join(f"`{name}`" for name in declared if name not in kept)
        doc = DOC.format(name=self.declared.name, kind=kind, without=without)
        return named_function(public, self.declared.name, doc, self.signature)

    def take_apart(self, positional, named):
        """A call as (declaration, arrays, tuple of the initial state's parts or None, dict of all other arguments)."""
        declared, arrays, arguments = self.declared.taken_apart(positional, named, self.signature)
        state = arguments.pop("initial_state", None)
        if "precision" in self.signature.parameters:
            # The precision in force is read in the caller's thread: frameworks run callbacks in other threads.
            arguments["precision"] = arguments.get("precision") or current()
        return declared, arrays, state if state is None or isinstance(state, tuple) else (state,), arguments

    def run(self, arrays, state, arguments) -> list:
        """Computes a call from what `take_apart` returns: [o, *parts of the final state, or the log-sum-exp of softmax
        attention, if requested]."""
        return flattened(call(self.declared, arrays, **arguments, **initial_state_argument(state)))

    def gradients(self, arrays, state, arguments, do, dht) -> list:
        """The gradients of the arrays, then those of the initial state's parts."""
        pull = pullback_of(self.declared, arrays, **arguments, **initial_state_argument(state))
        return flattened(pull(do, tuple(dht) or None))


def functions(differentiable, kind: str) -> dict:
    """{name: function} for all operators and steps; ``differentiable(op)`` makes an operator's."""
    operators = {op.name: differentiable(op) for op in OPERATORS}
    return operators | {op.name: step(operators[op.name.removesuffix("_step")], op, kind) for op in STEPS}


def named_function(public, name, doc, signature):
    """Gives the function `public` a name, a docstring and a signature."""
    public.__name__ = public.__qualname__ = name
    public.__doc__, public.__signature__ = doc, signature
    return public


def step(operator, declared: Op, kind: str):
    """The framework's function of a declared step: it calls the operator's function on a sequence of one token."""
    kept = [parameter for name, parameter in declared.signature.parameters.items() if name not in WRITTEN]
    signature = inspect.Signature(kept, return_annotation=tuple)

    def public(*positional, **named):
        arguments = bound_arguments(declared.name, signature, positional, named).arguments
        *arrays, state = (arguments.pop(name) for name in (*declared.arrays, "state"))  # a step has no optional array
        for name, x in zip((*declared.arrays, "state"), (*arrays, state)):
            if not hasattr(x, "ndim"):
                declared.refuse(name, f"is a {kind_of(x)}, expected an array", ContractTypeError)
        # Arrays of a token, those with an axis B, as [B, H, 1, ...]; `logical` checks how many axes they have. Others,
        # such as u [H, K], as they are.
        inputs = [
            declared.logical(name, x, axes, "bhtd")[:, :, None] if axes.startswith("B") else x
            for (name, axes), x in zip(declared.arrays.items(), arrays)
        ]
        state_dtype = str(state.dtype).removeprefix("torch.")
        o, state = operator(*inputs, initial_state=state, output_final_state=True, state_dtype=state_dtype, **arguments)
        return o[:, :, 0], state

    return named_function(public, declared.name, STEP_DOC.format(name=declared.name, kind=kind), signature)


def outline(declared, arrays, state, arguments, library: str):
    """Checks a call on `blank` arrays: (problem, [o, *parts of the final state], also blank).

    Frameworks that trace a call want its results' shapes and dtypes, and its errors, before there are numbers.

    library : the name of the caller's array library, for the advice in errors
    """
    declared, arrays = declared.fitting(arrays)  # the declaration with the optional array only if it was passed
    # Called to raise an error with the advice for `library`: that of `bind`, below, has none.
    declared.dtype(dict(zip(declared.arrays, arrays)), library)
    options = {name: x for name, x in arguments.items() if name != "backend"}
    problem = declared.bind(arrays, initial_state=state and tuple(state), **options)
    axes = problem.op.state if problem.output_final_state else ()
    parts = [
        state_to_caller(problem, blank(problem.shape(part_axes), problem.state_dtype), part_axes) for part_axes in axes
    ]
    o = blank(problem.shape(problem.op.out), problem.dtype)
    # Without the mask, by which padding would be written to o, a read-only array.
    return problem, [to_caller(problem.replace(mask=None), o, problem.op.out), *parts]


def blank(shape, dtype):
    """A NumPy array of this shape and dtype that occupies the memory of one number."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def initial_state_argument(state) -> dict:
    """The keyword argument for an initial state, if there is one."""
    return {} if state is None else {"initial_state": tuple(state)}


def as_returned(results, pair: bool):
    """The public result from [o, *parts of the final state]: o or, if `pair`, (o, final state); see `is_pair`."""
    o, *parts = results
    return o if not pair else (o, parts[0] if len(parts) == 1 else tuple(parts))


def is_pair(arguments) -> bool:
    """Whether a call returns a pair: o with a final state or, for softmax attention, with the log-sum-exp."""
    return bool(arguments.get("output_final_state") or arguments.get("return_lse"))


def flattened(result) -> list:
    """The arrays in a result or in gradients, which may be nested tuples, as one list."""
    return [x for part in result for x in flattened(part)] if isinstance(result, tuple) else [result]


@contextmanager
def on_stream(device: int, pointer: int):
    """A context in which CuPy enqueues its work on another library's CUDA stream `pointer` of device `device`."""
    import cupy

    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(pointer, device):
        yield
