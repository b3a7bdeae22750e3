"""The operators as torch functions, to train with: tensors on the CPU or on CUDA, without a copy.

NumPy computes CPU tensors; CUDA kernels compute CUDA tensors through CuPy, on torch's current stream and in memory of
torch's allocator. bfloat16 tensors work on both. Only the inputs are stored for the backward pass, which recomputes
what it needs of the forward pass. Gradients are first-order and reverse-mode; others are refused. For `torch.compile`
(torch 2.15 or newer; older versions break the graph at a call) and the transforms of `torch.func` each call is one
torch operator; `vmap` computes its elements one after the other, and a batch is faster as the operators' axis B.

With ``comm=ProcessGroup()``, or another communicator of `linattn_np.distributed`, the tokens are divided over ranks,
also for gradients; `segment_size`, states and errors are as described there. All ranks must compute the same from a
final state; its gradient is counted once.

Example
-------
>>> import torch
>>> from linattn_np.interop.torch import gla
>>> q, k, v, g = torch.randn(4, 1, 2, 50, 8).unbind()
>>> q.requires_grad_().shape
torch.Size([1, 2, 50, 8])
>>> gla(q, k, v, -g.exp()).square().mean().backward()
>>> q.grad.shape
torch.Size([1, 2, 50, 8])
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from .. import accepted_arrays, distributed, warnings_of_misuse
from ..contract import Op
from ..distributed import ProcessGroup as ProcessGroup
from ..errors import ContractTypeError
from ..gates import Gates, of_library
from ..messages import kind_of
from .calls import Operator, as_returned, flattened, functions, initial_state_argument, is_pair
from .torch_calls import Call, Compute, ComputeNow, as_torch, is_recorded, unchangeable

ON_RANKS = {op: function for function, op in distributed.operators.OPERATORS.items()}
TRACED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)  # older Dynamo loses the operator of a gradient


# The decorator that breaks torch.compile's graph. The private one loads the compiler only when it is needed; the public
# one loads it at once, which takes as long as importing torch.
disabled: Callable = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def differentiable(op: Op):
    """The torch function of a declared operator."""
    more = ("comm", "segment_size") if op in ON_RANKS else ()
    operator = Operator.of(op, more=more)

    def public(*positional, **named):
        if torch.compiler.is_dynamo_compiling() and (not TRACED or named.get("comm") is not None):
            return beside_the_graph(public, positional, named)
        rank_options = {name: named.pop(name) for name in more if name in named}
        declared, arrays, state, arguments = operator.take_apart(positional, named)
        mask = as_mask(declared, arguments.pop("mask", None))
        tensors = [*arrays, *(state or ()), *mask]
        check_tensors(declared, [*declared.arrays, *["initial_state"] * len(state or ()), "mask"], tensors)
        tensors[: len(arrays)] = under_autocast(declared, arrays)
        counts = len(arrays), len(state or ()), bool(mask)
        call = Call(operator, counts, {name: unchangeable(x) for name, x in arguments.items()})
        if rank_options.get("comm") is not None:
            call.arguments.update(rank_options)
            needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
            results = ComputeNow.apply(CallOnRanks(call, ON_RANKS[op], needs_gradients), *tensors)
        elif rank_options.get("segment_size") is not None:
            declared.refuse("segment_size", "has no meaning without comm")
        elif torch.compiler.is_compiling():
            results = Compute.apply(call.text(), *tensors)
        else:  # transforms of torch.func need the operator that they can map over
            is_transformed = any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))
            results = ComputeNow.apply(call.text() if is_transformed else call, *tensors)
        return as_returned(results, is_pair(arguments))

    return operator.document(public, "torch tensors")


def check_tensors(declared, names, tensors):
    """ContractTypeError, with its name, for the first that is no tensor."""
    for name, x in zip(names, tensors):
        if not isinstance(x, torch.Tensor):
            way_out = "" if x is None else ": torch.as_tensor(x) is one"
            declared.refuse(name, f"is a {kind_of(x)}, expected a torch.Tensor{way_out}", ContractTypeError)


def single(x):
    """`x` in float32 at least."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


GATES = Gates(("torch",), torch.exp, torch.nn.functional.softplus, torch.sigmoid, single)


def under_autocast(declared, tensors) -> list:
    """The tensors in autocast's dtype if autocast is enabled; gates that are not in that dtype become float32."""
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return list(tensors)
    for name, x in zip(declared.arrays, tensors):
        refuse_unreadable(declared, name, x)
    half, result = torch.get_autocast_dtype(device), []
    for name, x in zip(declared.arrays, tensors):
        is_cast = x.is_floating_point() and x.dtype != torch.float64  # as in torch's own autocast
        dtype = half if name not in declared.gates or x.dtype == half else torch.float32
        result.append(x.to(dtype) if is_cast else x)
    return result


def refuse_unreadable(declared, name, x):
    """ContractTypeError for a tensor that is no plain array of numbers, unless torch traces it: it has none then."""
    traced = torch.compiler.is_compiling() or is_recorded() or torch._C._functorch.is_functorch_wrapped_tensor(x)
    if not traced and (misfit := accepted_arrays.not_plain(torch, x)):
        declared.refuse(name, misfit, ContractTypeError)


def as_mask(declared, mask) -> list:
    """[a copy of the mask as a tensor], or [] without a mask."""
    if mask is None:
        return []
    if isinstance(mask, torch.Tensor):
        refuse_unreadable(declared, "mask", mask)
        return [mask.clone()]
    native, _ = declared.native("mask", mask)
    return [torch.tensor(native) if isinstance(native, np.ndarray) else mask]


@disabled
def beside_the_graph(public, positional, named):
    """Calls `public` outside of torch.compile's graph."""
    warn_of_graph_break()
    return public(*positional, **named)


@cache
def warn_of_graph_break():
    """Warns once, since its result is cached, that torch.compile's graph ends at a call."""
    warnings_of_misuse.warn(
        "linattn_np.interop.torch: torch.compile leaves its graph for a call of an operator, and goes on behind it: in "
        "one graph torch 2.15 holds it, without comm"
    )


class CallOnRanks:
    """A `Call` of a function of linattn_np.distributed; its pullback is stored, so that nothing is computed twice.

    needs_gradients : whether gradients are needed
    """

    def __init__(self, call, function, needs_gradients):
        self.call, self.function, self.needs_gradients = call, function, needs_gradients

    def text(self) -> None:
        """None, as no graph can hold messages."""
        if accepted_arrays.recorded(torch):
            declared = self.call.operator.declared
            declared.refuse("comm", "is given where torch records a graph, which cannot hold messages")

    def run(self, tensors):
        arrays, state, arguments, _ = self.call.taken_apart(tensors)
        arguments = {**arguments, **initial_state_argument(state)}
        with as_torch(tensors[0]):
            if not self.needs_gradients:
                return tuple(flattened(self.function(*arrays, **arguments)))
            result, self.pullback = distributed.vjp(self.function, *arrays, **arguments)
            return tuple(flattened(result))

    def gradients(self, tensors):
        *_, (do, *dht) = self.call.taken_apart(tensors)
        with as_torch(do):
            return tuple(flattened(self.pullback(do, tuple(dht) or None)))


if TYPE_CHECKING:
    from .signatures import *  # noqa: F403
else:
    globals().update(functions(differentiable, "torch tensors"))
    globals().update(of_library(GATES))
