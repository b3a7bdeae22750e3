"""The operators as torch.compile and torch.func see them: two custom operators that nothing looks into.

`torch.ops.linattn_np.forward` and `.backward` take tensors and the rest of a call as text, so that a compiled graph can
hold them; torch knows their shapes without running them, that the second is the first one's gradient, and how to map
over either.
"""

from __future__ import annotations

import ast
from contextlib import nullcontext
from functools import cache

import numpy as np
import torch
from torch import library

from .. import ops
from ..arrays import BFLOAT16
from ..errors import NotSupported
from .calls import Operator, blank, on_stream, outline

DTYPES = {
    torch.float64: np.dtype("f8"),
    torch.float32: np.dtype("f4"),
    torch.float16: np.dtype("f2"),
    torch.bfloat16: BFLOAT16,
    torch.bool: np.dtype(bool),
}
OF_TORCH = {theirs: ours for ours, theirs in DTYPES.items()}


COMPILES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)  # earlier Dynamo loses a gradient's operator


def watching(tensors) -> bool:
    """Whether torch records or transforms what is called, instead of running it."""
    if torch.compiler.is_compiling():
        if not COMPILES:
            raise NotSupported(
                "linattn_np.interop.torch: torch.compile needs torch 2.15 or newer; call the operator "
                "in a function under torch.compiler.disable"
            )
        return True
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def compute(name, arrays, state, arguments):
    """[o, *final state's parts] of the operator `name`, for torch to compile, differentiate and map."""
    rest = dict(arguments)
    tensors, mask = [*arrays, *(state or ())], rest.pop("mask", None)
    given = len(arrays), len(state or ()), mask is not None
    call = repr((name, given, [(key, plain(x)) for key, x in rest.items()]))
    return Transformed.apply(call, *tensors, *(() if mask is None else (mask,)))


def plain(x):
    """`x` as Python writes it and reads it again."""
    if isinstance(x, (np.ndarray, np.generic)):
        return x.tolist()
    return np.dtype(x).name if isinstance(x, (type, np.dtype)) else x


def taken_apart(tensors, call):
    """(operator, arrays, initial state's parts or None, everything else) of a call."""
    name, (arrays, parts, masked), arguments = ast.literal_eval(call)
    arguments = dict(arguments)
    if masked:
        arguments["mask"] = tensors[arrays + parts]
    return operator_named(name), tensors[:arrays], tensors[arrays : arrays + parts] or None, arguments


def split(given, call):
    """(a call's tensors, the cotangents behind them)."""
    _, counts, _ = ast.literal_eval(call)
    return given[: sum(counts)], given[sum(counts) :]


@cache
def operator_named(name) -> Operator:
    return Operator.of(getattr(ops, name))


def stream_of(tensor):
    """torch's current stream, or the host."""
    if not tensor.is_cuda:
        return nullcontext()
    return on_stream(tensor.device.index, torch.cuda.current_stream(tensor.device).cuda_stream)


# -- the forward pass -------------------------------------------------------------------------------------------------
@library.custom_op("linattn_np::forward", mutates_args=())
def forward(tensors: list[torch.Tensor], call: str) -> list[torch.Tensor]:
    operator, arrays, state, arguments = taken_apart(tensors, call)
    with torch.no_grad(), stream_of(tensors[0]):
        return [x.contiguous() for x in operator.run(arrays, state, arguments)]


@forward.register_fake
def shapes_forward(tensors, call):
    operator, arrays, state, arguments = taken_apart([blank_of(x) for x in tensors], call)
    _, results = outline(operator.taking(len(arrays)), arrays, state, arguments)
    return [tensors[0].new_empty(x.shape, dtype=OF_TORCH[x.dtype]) for x in results]


def blank_of(x):
    return blank(tuple(map(int, x.shape)), DTYPES[x.dtype])


# -- its gradient, which has none -------------------------------------------------------------------------------------
@library.custom_op("linattn_np::backward", mutates_args=())
def backward(given: list[torch.Tensor], call: str) -> list[torch.Tensor]:
    tensors, (do, *dht) = split(given, call)
    operator, arrays, state, arguments = taken_apart(tensors, call)
    with torch.no_grad(), stream_of(do):
        return [x.contiguous() for x in operator.gradients(arrays, state, arguments, do, dht)]


@backward.register_fake
def shapes_backward(given, call):
    _, arrays, state, _ = taken_apart(split(given, call)[0], call)
    return [x.new_empty(x.shape) for x in (*arrays, *(state or ()))]


# -- transformations --------------------------------------------------------------------------------------------------
class Transformed(torch.autograd.Function):
    """(call, *tensors) -> (o, *parts of the final state)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call, *tensors):
        return tuple(forward(list(tensors), call))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, *cotangents):
        tensors = list(ctx.saved_tensors)
        found = Gradients.apply(ctx.call, *tensors, *cotangents)
        return None, *found, *[None] * (len(tensors) - len(found))


class Gradients(torch.autograd.Function):
    """(call, *tensors, *cotangents) -> the tensors' gradients, which have none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call, *given):
        return tuple(backward(list(given), call))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *cotangents):
        raise NotImplementedError("linattn_np.interop.torch: gradients are first-order, these have none of their own")


def one_by_one(operator):
    """How torch.func.vmap maps `operator`: over its elements one after the other."""

    def mapped(info, in_dims, *arguments):
        results = [
            operator(*(element(x, dims, i) for x, dims in zip(arguments, in_dims))) for i in range(info.batch_size)
        ]
        return [torch.stack(parts) for parts in zip(*results)], [0] * len(results[0])

    return mapped


def element(x, dims, i):
    """Element `i` of each mapped tensor of an argument."""
    if isinstance(x, list):
        return [element(y, each, i) for y, each in zip(x, dims)]
    return x if dims is None else x.select(dims, i)


forward.register_vmap(one_by_one(forward))
backward.register_vmap(one_by_one(backward))
