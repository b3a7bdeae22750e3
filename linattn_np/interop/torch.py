"""The operators as torch functions, to train with: tensors on the CPU or on CUDA, without a copy.

NumPy computes CPU tensors; the CUDA kernels compute CUDA tensors through CuPy, on torch's current stream. bfloat16
tensors work on both. The inputs alone are kept for the backward pass, which computes again what it needs of the
forward pass. Gradients are first-order; torch refuses gradients of gradients. `torch.compile` and the transforms of
`torch.func` see each call as one operator of torch's; `vmap` computes its elements one after the other: a batch is
faster as the operators' B.

With ``comm=ProcessGroup()``, or another engine of `linattn_np.distributed`, the tokens are cut over ranks, with
gradients; `segment_size`, states and errors are as there. What is computed from a final state must be computed on all
ranks alike, and counts once.

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

import torch
from torch.autograd.function import once_differentiable

from .. import distributed, ops
from ..distributed import ProcessGroup as ProcessGroup
from ..errors import ContractTypeError
from ..typing import F
from ..wording import kind_of
from .calls import Operator, flat, initial, is_pair, together
from .torch_transforms import compute, stream_of, watching

ON_RANKS = {operator: function for function, operator in distributed.operators.OPERATORS.items()}


def differentiable(function: F) -> F:
    """The torch function that computes what the operator `function` does."""
    more = ("comm", "segment_size") if function in ON_RANKS else ()
    operator = Operator.of(function, more=more)

    def public(*positional, **named):
        given = {name: named.pop(name) for name in more if name in named}
        declared, arrays, state, arguments = operator.take_apart(positional, named)
        for name, x in [*zip(declared.arrays, arrays), *(("initial_state", x) for x in state or ())]:
            if not isinstance(x, torch.Tensor):
                declared.refuse(name, f"is a {kind_of(x)}, expected a torch.Tensor", ContractTypeError)
        tensors = *arrays, *(state or ())
        if given.get("comm") is not None:
            results = ComputeOnRanks.apply(ON_RANKS[function], len(arrays), arguments | given, *tensors)
        elif given.get("segment_size") is not None:
            declared.refuse("segment_size", "has no meaning without comm")
        elif watching(tensors):
            results = compute(operator.declared.name, arrays, state, arguments)
        else:
            results = Compute.apply(operator, len(arrays), arguments, *tensors)
        return together(results, is_pair(arguments))

    return operator.document(public, "torch tensors")


class Compute(torch.autograd.Function):
    """(operator, how many arrays, its other arguments, *arrays, *parts of the initial state) -> (o, *parts of the final
    state)."""

    @staticmethod
    def forward(context, operator, count, arguments, *tensors):
        context.operator, context.count, context.arguments = operator, count, arguments
        context.save_for_backward(*tensors)
        with stream_of(tensors[0]):
            return tuple(operator.run(*parted(count, tensors), arguments))

    @staticmethod
    @once_differentiable
    def backward(context, do, *dht):
        operator = context.operator
        with stream_of(do):
            arrays, state = parted(context.count, context.saved_tensors)
            return None, None, None, *operator.gradients(arrays, state, context.arguments, do, dht)


class ComputeOnRanks(torch.autograd.Function):
    """The same with a function of linattn_np.distributed, whose pullback is kept: the ranks compute nothing twice."""

    @staticmethod
    def forward(context, function, count, arguments, *tensors):
        arrays, state = parted(count, tensors)
        given = {**arguments, **initial(state)}
        with stream_of(tensors[0]):
            if not any(context.needs_input_grad):
                return tuple(flat(function(*arrays, **given)))
            result, context.pullback = distributed.vjp(function, *arrays, **given)
            return tuple(flat(result))

    @staticmethod
    @once_differentiable
    def backward(context, do, *dht):
        with stream_of(do):
            return None, None, None, *flat(context.pullback(do, dht or None))


def parted(count, tensors):
    """(`count` arrays, parts of the initial state or None)."""
    return tensors[:count], tensors[count:] or None


gla = differentiable(ops.gla)
rwkv6 = differentiable(ops.rwkv6)
simple_gla = differentiable(ops.simple_gla)
retention = differentiable(ops.retention)
linear_attention = differentiable(ops.linear_attention)
softmax_attention = differentiable(ops.softmax_attention)
