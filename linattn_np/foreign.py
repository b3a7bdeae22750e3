"""Arrays that can be read but must not be: what they carry besides their numbers would be lost without a word."""

from __future__ import annotations

import sys

import numpy as np

from .wording import kind_of

NATIVE = (np.ndarray, np.memmap)  # a memory map is an array like any other, in a file


def is_subclass(x) -> bool:
    """Whether `x` is a NumPy array with rules of its own, which half of an operator would follow and half would not."""
    return isinstance(x, np.ndarray) and type(x) not in NATIVE


def obstacle(x, whose: str, operator: str) -> str | None:
    """Why an operator does not take `x`, of kind `whose`, with the way out; None where it does."""
    if is_subclass(x):
        return of_subclass(x)
    if whose == "torch":
        return of_torch(x, operator)
    if whose == "jax" and isinstance(x, sys.modules["jax"].core.Tracer):
        return (
            f"is a {kind_of(x)}, which has no numbers yet: under JAX's transformations import {operator} from "
            "linattn_np.interop.jax"
        )
    return None


def of_subclass(x) -> str:
    if isinstance(x, np.ma.MaskedArray):
        return (
            f"is a {kind_of(x)}, whose mask would be ignored, expected a plain array: x.filled(0) and, for "
            "padding, the operator's own mask="
        )
    return f"is a {kind_of(x)}, a subclass of numpy.ndarray, expected a plain array: np.asarray(x)"


def of_torch(x, operator: str) -> str | None:
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling():
        return (
            "is traced by torch.compile, which cannot look into this call: import "
            f"{operator} from linattn_np.interop.torch"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return (
            "is a tensor under a transformation of torch.func, which would not see this call: import "
            f"{operator} from linattn_np.interop.torch"
        )
    if x.requires_grad and torch.is_grad_enabled():
        return (
            f"requires grad, which this call would cut: import {operator} from linattn_np.interop.torch to train, "
            "or pass x.detach() or call under torch.no_grad() to compute alone"
        )
    return None
