"""A call of an operator in torch: two autograd functions and two custom operators, which are opaque to graphs.

Autograd records `Compute` and `ComputeGradients`. When torch traces or transforms a call, they call the custom
operators `torch.ops.linattn_np.forward` and `.backward`. The arguments of these are tensors and the rest of the call as
text, so that a compiled graph can contain them. For `vmap`, and for shapes without a computation, they have rules.

`torch.differentiable` makes the `Call`, and applies `Compute` where torch.compile traces, else `ComputeNow`.
"""

from __future__ import annotations

import ast
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import library

from .. import accepted_arrays
from ..accepted_arrays import host_array
from ..array_kinds import BFLOAT16, from_native
from ..declarations import OPERATORS
from ..errors import ContractTypeError
from .calls import Operator, blank, on_stream, outline

DTYPES = {
    torch.float64: np.dtype("f8"),
    torch.float32: np.dtype("f4"),
    torch.float16: np.dtype("f2"),
    torch.bfloat16: BFLOAT16,
    torch.bool: np.dtype(bool),
}
TORCH_DTYPES = {theirs: ours for ours, theirs in DTYPES.items()}
SYMBOLS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
REVERSE_MODE = "linattn_np.interop.torch: gradients are first-order and reverse-mode: "


@dataclass(frozen=True)
class Call:
    """A call without its tensors, which are passed separately: the arrays, the initial state's parts, the mask."""

    operator: Operator
    counts: tuple[int, int, bool]  # (number of arrays, number of the initial state's parts, whether there is a mask)
    arguments: dict  # all other arguments, as immutable values or copies

    @classmethod
    def of_text(cls, text) -> Call:
        """The call from what `text` has returned."""
        name, counts, arguments = ast.literal_eval(text)
        return cls(operator_named(name), counts, dict(arguments))

    def text(self) -> str:
        """The call as text, for the custom operators. ContractTypeError if an argument is a tensor."""
        for name, x in self.arguments.items():
            if isinstance(x, torch.Tensor):
                wanted = "where torch records a graph, expected numbers: pass x.tolist(), read outside of the graph"
                self.operator.declared.refuse(name, f"is a tensor {wanted}", ContractTypeError)
        return repr((self.operator.declared.name, self.counts, [(n, as_literal(x)) for n, x in self.arguments.items()]))

    def taken_apart(self, tensors):
        """(arrays, initial state's parts or None, all other arguments, the tensors after those of the call)."""
        arrays, parts, has_mask = self.counts
        end = arrays + parts
        arguments = {**self.arguments, "mask": tensors[end]} if has_mask else self.arguments
        return tensors[:arrays], tensors[arrays:end] or None, arguments, tensors[end + has_mask :]

    def run(self, tensors) -> tuple:
        """Computes (o, *parts of the final state)."""
        with as_torch(tensors[0]):
            arrays, state, arguments, _ = self.taken_apart(as_cupy(tensors))
            return tuple(map(tensor, self.operator.run(arrays, state, arguments)))

    def gradients(self, tensors) -> tuple:
        """The gradients of the arrays and of the initial state's parts.

        `tensors`: the call's tensors, then the gradients of o and of the final state's parts.
        """
        with as_torch(tensors[0]):
            arrays, state, arguments, (do, *dht) = self.taken_apart(as_cupy(tensors))
            return tuple(map(tensor, self.operator.gradients(arrays, state, arguments, do, dht)))

    def blank_results(self, tensors):
        """[o, *parts of the final state] as `blank` arrays: of the right shapes and dtypes, without numbers."""
        arrays, state, arguments, _ = self.taken_apart([blank_of(x) for x in tensors])
        return outline(self.operator.declared, arrays, state, arguments, "torch")[1]


def as_cupy(tensors):
    """CUDA tensors as CuPy arrays in the same memory, for which plans are cached and graphs can be captured.

    CPU tensors, and tensors that the operator will refuse, are returned as they are.
    """
    if not all(x.is_cuda for x in tensors):
        return tensors
    try:
        return tuple(accepted_arrays.accepted("", x)[0] for x in tensors)
    except accepted_arrays.Refusal:
        return tensors


def tensor(x):
    """A result (NumPy or CuPy array) as a torch tensor in the same memory."""
    return x if isinstance(x, torch.Tensor) else from_native(x, "torch", None)


@cache
def operator_named(name) -> Operator:
    """The operator of this name."""
    return Operator.of(next(op for op in OPERATORS if op.name == name))


def unchangeable(x):
    """An argument that the caller can no longer change: a copy of an array, a tuple of a list, and of a tensor on the
    host a NumPy array, unless torch records a graph."""
    if isinstance(x, torch.Tensor) and not accepted_arrays.recorded(torch) and (numbers := host_array(x)) is not None:
        x = numbers
    return x.copy() if isinstance(x, np.ndarray) else tuple(x) if isinstance(x, list) else x


def as_literal(x):
    """An argument as a Python literal, whose repr `ast.literal_eval` reads."""
    if isinstance(x, tuple):
        return tuple(map(as_literal, x))
    if isinstance(x, (np.ndarray, np.generic)):
        return x.tolist()
    for symbol, number in SYMBOLS.items():
        if isinstance(x, symbol):  # torch then uses the recorded graph for this number only
            return number(x)
    return np.dtype(x).name if isinstance(x, (type, np.dtype)) else x


def blank_of(x):
    """A `blank` array with the shape and dtype of a tensor."""
    return blank(tuple(map(int, x.shape)), DTYPES[x.dtype])


def is_recorded() -> bool:
    """Whether torch records its operators or passes them to a dispatch mode. A call must then be a torch operator."""
    modes = torch._C._len_torch_dispatch_stack() + torch._ops._len_torch_dispatch_stack_pre_dispatch()
    return modes > 0 or accepted_arrays.recorded(torch)


def graph_text(call) -> str | None:
    """The text of the call if the custom operator must compute it, else None.

    call : a `Call`, or its text. Whether torch records is asked now: it may have begun after the `Call` was made
    """
    return call if isinstance(call, str) else call.text() if is_recorded() else None


# -- torch's stream and memory on CUDA --------------------------------------------------------------------------------
# Results can be freed or kept (`record_stream`) as any tensor, and memory that a graph of `torch.cuda.graph` needs is
# in the graph's own pool.
@contextmanager
def as_torch(x):
    """A context in which CuPy uses torch's current stream of the device of the tensor x, and torch's allocator."""
    if not x.is_cuda:
        yield
        return
    import cupy

    device = x.device
    stream = torch.cuda.current_stream(device).cuda_stream
    with on_stream(device.index, stream), cupy.cuda.using_allocator(partial(memory_of_torch, device)):
        yield


def memory_of_torch(device, size: int):
    """CuPy memory of `size` bytes, owned by a torch tensor, which `array_kinds.from_native` finds again."""
    import cupy

    memory = torch.empty(size, dtype=torch.uint8, device=device)
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(memory.data_ptr(), size, memory, device.index or 0), 0)


# -- autograd functions -----------------------------------------------------------------------------------------------
class Compute(torch.autograd.Function):
    """(call, *tensors) -> (o, *parts of the final state); `call` is a `Call`, or its text for the custom operator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call, *tensors):
        text = graph_text(call)
        return tuple(graph_forward(list(tensors), text)) if text else call.run(tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)  # torch then detects if they are written to before the backward pass

    @staticmethod
    def backward(ctx, *cotangents):
        tensors = ctx.saved_tensors
        gradients = ComputeGradients.apply(ctx.call, *tensors, *cotangents)
        return None, *gradients, *[None] * (len(tensors) - len(gradients))


class ComputeNow(Compute):
    """`Compute` outside of compiled graphs. Its `jvp` refuses forward mode; torch.compile refuses any `jvp`."""

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(REVERSE_MODE + "torch.func.jvp and forward_ad have none to take")


class ComputeGradients(torch.autograd.Function):
    """(call, *tensors, *gradients of the results) -> gradients of the tensors; it refuses second derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call, *tensors):
        text = graph_text(call)
        return tuple(graph_backward(list(tensors), text)) if text else call.gradients(tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *cotangents):
        raise NotImplementedError(REVERSE_MODE + "these have none of their own")


# -- custom operators, for graphs -------------------------------------------------------------------------------------
def graph_operator(name, compute, shapes):
    """A torch custom operator on tensors and a call's text.

    Its results are ``compute(call, tensors)``; ``shapes(tensors, call)`` gives empty tensors of their shapes.
    `torch.func.vmap` computes the elements one after the other.
    """

    def run(tensors, call):
        with torch.no_grad():
            return [x.contiguous() for x in compute(Call.of_text(call), tensors)]

    def run_mapped(info, in_dims, *arguments):
        results = [
            operator(*(element(x, dims, i) for x, dims in zip(arguments, in_dims))) for i in range(info.batch_size)
        ]
        return [torch.stack(parts) for parts in zip(*results)], [0] * len(results[0])

    schema = "(Tensor[] tensors, str call) -> Tensor[]"
    operator = library.custom_op(f"linattn_np::{name}", run, mutates_args=(), schema=schema)
    operator.register_fake(shapes)
    operator.register_vmap(run_mapped)
    return operator


def shapes_forward(tensors, call):
    """Empty tensors with the shapes and dtypes of `Call.run`'s results."""
    results = Call.of_text(call).blank_results(tensors)
    return [tensors[0].new_empty(x.shape, dtype=TORCH_DTYPES[x.dtype]) for x in results]


def shapes_backward(tensors, call):
    """Empty tensors with the shapes and dtypes of `Call.gradients`'s results."""
    arrays, state, *_ = Call.of_text(call).taken_apart(tensors)
    return [x.new_empty(x.shape) for x in (*arrays, *(state or ()))]


def element(x, dims, i):
    """Element `i` of x along its mapped axis `dims`, None if x is not mapped. For a list x, `dims` has one of each."""
    if isinstance(x, list):
        return [element(y, dim, i) for y, dim in zip(x, dims)]
    return x if dims is None else x.select(dims, i)


graph_forward = graph_operator("forward", Call.run, shapes_forward)
graph_backward = graph_operator("backward", Call.gradients, shapes_backward)
