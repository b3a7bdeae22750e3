"""Softmax attention: one kernel forwards; backwards one for dq, then one for dk and dv.

The backward recomputes the scores from L, the logarithm of each query's sum, so that memory stays linear in T; nothing
is added atomically, so that the same call gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .arguments import integers, pointers, reals, rows, shape
from .instances import SM90
from .kernel import HALF, Kernel
from .plan import FLOAT32, Draft, aligned16

COLUMNS = (64, 128)  # D: the whole of K and of V in one tile, padded up


@dataclass(frozen=True)
class Softmax(Kernel):
    """Queries and keys at once are as many as leave no value without a register."""

    QUERIES: ClassVar[int]
    KEYS: ClassVar[int]
    shared = ("Shared<{dtype}, {D}>",)
    threads = 128
    dtype: np.dtype
    D: int

    @classmethod
    def fitting(cls, dtype, K, V):
        return cls(dtype, next(D for D in COLUMNS if max(K, V) <= D))


class SoftmaxForward(Softmax):
    file, QUERIES, KEYS = "softmax/forward", 128, 64
    arguments = (*rows("q k v o"), *shape, *pointers("L"), *reals("scale"), *integers("causal vectors"))

    @property
    def shared_bytes(self):
        return 2 * self.D * (self.QUERIES + 4 * self.KEYS) + 128


class SoftmaxForwardSm90(Softmax):
    file, QUERIES, KEYS = "softmax/sm90/forward", 128, 128
    arguments = SoftmaxForward.arguments
    arch, threads = SM90, 3 * 128

    @property
    def shared_bytes(self):
        return 2 * self.D * (self.QUERIES + 4 * self.KEYS) + 1024


class SoftmaxBackwardQueries(Softmax):
    file, QUERIES, KEYS = "softmax/backward_queries", 128, 32
    arguments = (*rows("q k v o g dq"), *shape, *pointers("L delta"), *reals("scale"), *integers("causal vectors"))

    @property
    def shared_bytes(self):
        return 2 * self.D * (2 * self.QUERIES + 4 * self.KEYS) + 4 * self.QUERIES + 128


class SoftmaxBackwardKeys(Softmax):
    file, QUERIES, KEYS = "softmax/backward_keys", 64, 64
    arguments = (*rows("q k v g dk dv"), *shape, *pointers("L delta"), *reals("scale"), *integers("causal vectors"))

    @property
    def shared_bytes(self):
        return 2 * self.D * (2 * self.KEYS + 4 * self.QUERIES) + 4 * 4 * self.QUERIES + 128


# -- plans -------------------------------------------------------------------------------------------------------------
def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    if problem.dtype not in HALF:
        return f"no {problem.dtype} kernels of {problem.op.name}; it has {', '.join(map(str, HALF))}"
    for axis in "KV":
        if problem.sizes[axis] > COLUMNS[-1]:
            return f"{axis}={problem.sizes[axis]} is over {COLUMNS[-1]}"
    return None


def plan(problem, device):
    """Saves o and L where a gradient is asked for: what the pullback needs besides the caller's arrays."""
    draft = Draft()
    q, k, v = draft.inputs(problem)
    o, L = draft.output(problem), draft.empty(problem.shape("B H T"), FLOAT32) if problem.gradient else None
    kernel = (SoftmaxForwardSm90 if device.capability == 90 else SoftmaxForward).fitting(
        problem.dtype, *problem.shape("K V")
    )
    launch(draft, problem, kernel, kernel.QUERIES, dict(q=q, k=k, v=v, o=o), L=L)
    tiles = {"D": kernel.D, "queries": kernel.QUERIES, "keys": kernel.KEYS}
    return draft.plan((draft.give_back(problem, o), None), saved=(o, L) if problem.gradient else (), tiles=tiles)


def plan_vjp(problem, device, do, dht, saved):
    """(dq, dk, dv), None"""
    draft = Draft()
    arrays, (o, L) = draft.inputs(problem), saved
    q, k, v = arrays
    do = draft.in_rows(draft.cast(do, problem.dtype, "do: in the dtype of the inputs"), "do")
    dq, dk, dv = (draft.like(x) for x in arrays)
    delta = draft.empty(L.shape, FLOAT32)
    queries, keys = (
        kernel.fitting(problem.dtype, *problem.shape("K V")) for kernel in (SoftmaxBackwardQueries, SoftmaxBackwardKeys)
    )
    launch(draft, problem, queries, queries.QUERIES, dict(q=q, k=k, v=v, o=o, g=do, dq=dq), L=L, delta=delta)
    launch(draft, problem, keys, keys.KEYS, dict(q=q, k=k, v=v, g=do, dk=dk, dv=dv), L=L, delta=delta)
    tiles = {
        f"{kernel.name} {side}": size
        for kernel in (queries, keys)
        for side, size in (("queries", kernel.QUERIES), ("keys", kernel.KEYS))
    }
    return draft.plan(((dq, dk, dv), None), tiles={"D": queries.D} | tiles)


def saved(problem) -> tuple[tuple, ...]:
    """(shape, dtype) of what `plan` saves."""
    return (problem.shape("B H T V"), problem.dtype), (problem.shape("B H T"), FLOAT32)


def launch(draft, problem, kernel, chunk, arrays, **by_token):
    """A block for every `chunk` tokens of a sequence and head."""
    where = draft.shape(problem, chunk=chunk)
    draft.launch(
        kernel,
        where.all_chunks,
        **arrays,
        **by_token,
        shape=where,
        scale=problem.scale,
        causal=problem.options["causal"],
        vectors=aligned16(*arrays.values()),
    )
