"""An operator's call as torch knows it: two functions of autograd, and two custom operators that no graph looks into.

`Compute` and `ComputeGradients` are what autograd records. Where torch traces or transforms a call, they hold the call
as text: `torch.ops.linattn_np.forward` and `.backward` take tensors and that text, so that a compiled graph can hold
them. torch knows their shapes without running them, that the second is the first one's gradient, and how to map over
either.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import library

from .. import accepted_arrays
from ..accepted_arrays import host_array
from ..array_kinds import BFLOAT16, from_native
from ..declarations import OPERATORS
from .calls import Operator, blank, outline
from .torch_memory import as_torch

DTYPES = {
    torch.float64: np.dtype("f8"),
    torch.float32: np.dtype("f4"),
    torch.float16: np.dtype("f2"),
    torch.bfloat16: BFLOAT16,
    torch.bool: np.dtype(bool),
}
OF_TORCH = {theirs: ours for ours, theirs in DTYPES.items()}
REVERSE_MODE = "linattn_np.interop.torch: gradients are first-order and reverse-mode: "


@dataclass(frozen=True)
class Call:
    """A call but for its tensors: arrays, parts of the initial state, a mask. Nobody else can change what it holds."""

    operator: Operator
    counts: tuple[int, int, bool]  # of arrays and of parts of the initial state, and whether there is a mask
    arguments: dict

    @classmethod
    def of_text(cls, text) -> Call:
        name, counts, arguments = ast.literal_eval(text)
        return cls(operator_named(name), counts, dict(arguments))

    def text(self) -> str:
        return repr((self.operator.declared.name, self.counts, [(n, plain(x)) for n, x in self.arguments.items()]))

    def taken_apart(self, tensors):
        """(arrays, initial state's parts or None, everything else, what tensors are left)."""
        arrays, parts, masked = self.counts
        end = arrays + parts
        rest = {**self.arguments, "mask": tensors[end]} if masked else self.arguments
        return tensors[:arrays], tensors[arrays:end] or None, rest, tensors[end + masked :]

    def run(self, tensors) -> tuple:
        """(o, *parts of the final state)."""
        with as_torch(tensors[0]):
            arrays, state, arguments, _ = self.taken_apart(natively(tensors))
            return tuple(map(tensor, self.operator.run(arrays, state, arguments)))

    def gradients(self, given) -> tuple:
        """The gradients of the arrays and of the initial state's parts. `given`: the tensors, then the results'
        gradients."""
        with as_torch(given[0]):
            arrays, state, arguments, (do, *dht) = self.taken_apart(natively(given))
            return tuple(map(tensor, self.operator.gradients(arrays, state, arguments, do, dht)))

    def outline(self, tensors):
        """[o, *parts of the final state] without memory."""
        arrays, state, rest, _ = self.taken_apart([blank_of(x) for x in tensors])
        return outline(self.operator.declared, arrays, state, rest, "torch")[1]


def natively(tensors):
    """CUDA tensors as CuPy arrays in the same memory: calls alike on such arrays are compiled once, and may be captured
    in a graph. Tensors on the CPU, and those that the operator refuses, stay as they are.
    """
    if not all(x.is_cuda for x in tensors):
        return tensors
    try:
        return tuple(accepted_arrays.accepted("", x)[0] for x in tensors)
    except accepted_arrays.Refusal:
        return tensors


def tensor(x):
    """A result as a tensor in the same memory."""
    return x if isinstance(x, torch.Tensor) else from_native(x, "torch", None)


@cache
def operator_named(name) -> Operator:
    return Operator.of(next(op for op in OPERATORS if op.name == name))


def settled(x):
    """An argument as its owner cannot change it any more."""
    if isinstance(x, torch.Tensor) and (numbers := host_array(x)) is not None:
        x = numbers
    return x.copy() if isinstance(x, np.ndarray) else tuple(x) if isinstance(x, list) else x


def plain(x):
    """An argument as Python writes it and reads it again."""
    if isinstance(x, (np.ndarray, np.generic)):
        return x.tolist()
    return np.dtype(x).name if isinstance(x, (type, np.dtype)) else x


def blank_of(x):
    return blank(tuple(map(int, x.shape)), DTYPES[x.dtype])


# -- what autograd records --------------------------------------------------------------------------------------------
class Compute(torch.autograd.Function):
    """(call, *tensors) -> (o, *parts of the final state)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call, *tensors):
        return tuple(forward_whole(list(tensors), call)) if isinstance(call, str) else call.run(tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)  # torch notices where one is written to before the backward pass

    @staticmethod
    def backward(ctx, *cotangents):
        tensors = ctx.saved_tensors
        found = ComputeGradients.apply(ctx.call, *tensors, *cotangents)
        return None, *found, *[None] * (len(tensors) - len(found))


class ComputeNow(Compute):
    """The same outside of compiled graphs, which take no function that knows of forward mode."""

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(REVERSE_MODE + "torch.func.jvp and forward_ad have none to take")


class ComputeGradients(torch.autograd.Function):
    """(call, *tensors, *cotangents) -> the tensors' gradients, which have none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call, *given):
        return tuple(backward_whole(list(given), call)) if isinstance(call, str) else call.gradients(given)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *cotangents):
        raise NotImplementedError(REVERSE_MODE + "these have none of their own")


# -- what a graph holds -----------------------------------------------------------------------------------------------
def graph_operator(name, compute, outline):
    """A custom operator of torch's on tensors and a call's text: its results are ``compute(call, tensors)``, and
    ``outline(tensors, call)`` tells their shapes. `torch.func.vmap` maps it over its elements one after the other."""

    def whole(tensors, call):
        with torch.no_grad():
            return [x.contiguous() for x in compute(Call.of_text(call), tensors)]

    def mapped(info, in_dims, *arguments):
        results = [
            operator(*(element(x, dims, i) for x, dims in zip(arguments, in_dims))) for i in range(info.batch_size)
        ]
        return [torch.stack(parts) for parts in zip(*results)], [0] * len(results[0])

    schema = "(Tensor[] tensors, str call) -> Tensor[]"
    operator = library.custom_op(f"linattn_np::{name}", whole, mutates_args=(), schema=schema)
    operator.register_fake(outline)
    operator.register_vmap(mapped)
    return operator


def shapes_forward(tensors, call):
    results = Call.of_text(call).outline(tensors)
    return [tensors[0].new_empty(x.shape, dtype=OF_TORCH[x.dtype]) for x in results]


def shapes_backward(given, call):
    arrays, state, *_ = Call.of_text(call).taken_apart(given)
    return [x.new_empty(x.shape) for x in (*arrays, *(state or ()))]


def element(x, dims, i):
    """Element `i` of each mapped tensor of an argument."""
    if isinstance(x, list):
        return [element(y, each, i) for y, each in zip(x, dims)]
    return x if dims is None else x.select(dims, i)


forward_whole = graph_operator("forward", Call.run, shapes_forward)
backward_whole = graph_operator("backward", Call.gradients, shapes_backward)
