"""What the functions for torch and JAX share: reading a call, computing it, and a framework's CUDA stream."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ..autodiff import pullback_of
from ..contract import Op
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


WRITTEN = ("slots", "pending", "accepted", "out")  # keywords of steps that speak of memory which they write


@dataclass(frozen=True)
class Operator:
    """A declared operator, and the signature of a framework's function of it."""

    declared: Op
    signature: inspect.Signature

    @classmethod
    def of(cls, declared, without=("out",), more=()) -> Operator:
        """The operator without the keyword arguments `without`, and with the arguments `more`, by default None."""
        accepted = [parameter for name, parameter in declared.signature.parameters.items() if name not in without]
        accepted += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in more]
        return cls(declared, inspect.Signature(accepted))

    def document(self, public, kind: str):
        given, kept = self.declared.signature.parameters, self.signature.parameters
        without = " and ".join(f"`{name}`" for name in given if name not in kept)
        doc = DOC.format(name=self.declared.name, kind=kind, without=without)
        return named_function(public, self.declared.name, doc, self.signature)

    def take_apart(self, positional, named):
        """(declaration, arrays, parts of the initial state or None, everything else) of a call."""
        declared, arrays, arguments = self.declared.taken_apart(positional, named, self.signature)
        state = arguments.pop("initial_state", None)
        if "precision" in self.signature.parameters:  # settled here: frameworks call back from threads of their own
            arguments["precision"] = arguments.get("precision") or current()
        return declared, arrays, state if state is None or isinstance(state, tuple) else (state,), arguments

    def run(self, arrays, state, arguments) -> list:
        """[o, *parts of the final state], where one is asked for."""
        return flat(call(self.declared, arrays, **arguments, **initial(state)))

    def gradients(self, arrays, state, arguments, do, dht) -> list:
        """The gradients of the arrays, then those of the initial state's parts."""
        pull = pullback_of(self.declared, arrays, **arguments, **initial(state))
        return flat(pull(do, tuple(dht) or None))


def functions(differentiable, kind: str) -> dict:
    """{name: function} of every operator and step; ``differentiable(op)`` is a framework's function of an operator."""
    found = {op.name: differentiable(op) for op in OPERATORS}
    return found | {op.name: step(found[op.name.removesuffix("_step")], op, kind) for op in STEPS}


def named_function(public, name, doc, signature):
    """Gives the function `public` a name, a docstring and a signature."""
    public.__name__ = public.__qualname__ = name
    public.__doc__, public.__signature__ = doc, signature
    return public


def bound(name, signature, positional, named):
    """The arguments by their names; a TypeError names the function, as Python's own do."""
    try:
        return signature.bind(*positional, **named)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def step(operator, declared: Op, kind: str):
    """A declared step by the framework's function `operator`, on a sequence of one token."""
    accepted = [x for name, x in declared.signature.parameters.items() if name not in WRITTEN]
    signature = inspect.Signature(accepted, return_annotation=tuple)

    def public(*positional, **named):
        arguments = bound(declared.name, signature, positional, named).arguments
        *arrays, state = (arguments.pop(name) for name in (*declared.arrays, "state"))
        for name, x in zip((*declared.arrays, "state"), (*arrays, state)):
            if not hasattr(x, "ndim"):
                declared.refuse(name, f"is a {kind_of(x)}, expected an array", ContractTypeError)
        tokens = [
            declared.logical(name, x, axes, "bhtd")[:, :, None] if axes.startswith("B") else x
            for (name, axes), x in zip(declared.arrays.items(), arrays)
        ]
        kept = str(state.dtype).removeprefix("torch.")
        o, state = operator(*tokens, initial_state=state, output_final_state=True, state_dtype=kept, **arguments)
        return o[:, :, 0], state

    return named_function(public, declared.name, STEP_DOC.format(name=declared.name, kind=kind), signature)


def outline(declared, arrays, state, arguments, library: str):
    """(problem, [o, *final state's parts] without memory) of a call on blank arrays, once it is seen to fit.

    `library` is that of the caller's arrays, for what an error advises.
    """
    declared, arrays = declared.fitting(arrays)
    declared.dtype(dict(zip(declared.arrays, arrays)), library)
    bound = {name: x for name, x in arguments.items() if name != "backend"}
    problem = declared.bind(arrays, initial_state=state and tuple(state), **bound)
    axes = problem.op.state if problem.output_final_state else ()
    parts = [state_to_caller(problem, blank(problem.shape(part), problem.state_dtype), part) for part in axes]
    o = blank(problem.shape(problem.op.out), problem.dtype)
    return problem, [to_caller(problem.replace(mask=None), o, problem.op.out), *parts]


def blank(shape, dtype):
    """A NumPy array in the memory of one number."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def initial(state) -> dict:
    return {} if state is None else {"initial_state": tuple(state)}


def as_returned(results, parted: bool):
    """o, or with `parted` (o, final state), from [o, *parts of the final state]."""
    o, *parts = results
    return o if not parted else (o, parts[0] if len(parts) == 1 else tuple(parts))


def is_pair(arguments) -> bool:
    """Whether a call returns more than o: a final state, or softmax attention's sums."""
    return bool(arguments.get("output_final_state") or arguments.get("return_lse"))


def flat(result) -> list:
    """The arrays of a result or of gradients, whose last may be a pair."""
    return [x for part in result for x in flat(part)] if isinstance(result, tuple) else [result]


@contextmanager
def on_stream(device: int, pointer: int):
    """CuPy enqueues its work on another library's stream of CUDA device `device`."""
    import cupy

    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(pointer, device):
        yield
