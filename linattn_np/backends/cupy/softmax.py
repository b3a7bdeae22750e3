"""Softmax attention: one kernel forwards; backwards one for dq, then one for dk and dv. Of each there is one for half
data on tensor cores, and a plain one for every dtype and size.

The backward recomputes the scores from L, the logarithm of each query's sum, so that memory stays linear in T; nothing
is added atomically, so that the same call gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .arguments import integers, pointers, reals, rows, shape
from .instances import SM90
from .kernel import FLOATS, HALF, Kernel
from .plan import Draft, aligned16, ceil_div

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


@dataclass(frozen=True)
class PlainSoftmax(Kernel):
    """Without tensor cores: a warp a token, and 128 of its columns."""

    QUERIES: ClassVar[int] = 64
    KEYS: ClassVar[int] = 64
    WARPS: ClassVar[int] = 4
    WIDTH: ClassVar[int] = 128
    threads = 32 * WARPS
    dtype: np.dtype


class PlainSoftmaxForward(PlainSoftmax):
    file = "softmax/plain_forward"
    arguments = (*rows("q k v o"), *shape, *pointers("L"), *reals("scale"), *integers("causal"))


class PlainSoftmaxBackwardQueries(PlainSoftmax):
    file = "softmax/plain_backward_queries"
    arguments = (*rows("q k v o g dq"), *shape, *pointers("L delta"), *reals("scale"), *integers("causal"))


class PlainSoftmaxBackwardKeys(PlainSoftmax):
    file = "softmax/plain_backward_keys"
    arguments = (*rows("q k v g dk dv"), *shape, *pointers("L delta"), *reals("scale"), *integers("causal"))


# -- plans -------------------------------------------------------------------------------------------------------------
def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    if problem.dtype not in FLOATS:
        return f"no {problem.dtype} kernels; it has {', '.join(map(str, FLOATS))}"
    sizes, options = problem.sizes, problem.options
    reaches = options["window"][0] < 0 and options["window"][1] == (0 if options["causal"] and sizes["T"] > 1 else -1)
    missing = {
        "k and v with fewer heads than q (np.repeat them)": sizes["HK"] != sizes["H"],
        "k and v with other tokens than q": options["key_spans"].bounds.tolist() != problem.spans.bounds.tolist(),
        "window": not reaches,
        "softcap": options["softcap"] > 0,
        "sinks": "sinks" in problem.arrays,
        "return_lse": problem.output_final_state,
    }
    if any(missing.values()):
        asked = ", ".join(name for name, given in missing.items() if given)
        return f"no kernels for {asked}; the NumPy backend computes it on host arrays"
    return None


def is_plain(problem) -> bool:
    """Whether the plain kernels compute a problem."""
    return problem.dtype not in HALF or max(problem.shape("K V")) > COLUMNS[-1]


def plan(problem, device):
    """Saves o and L where a gradient is asked for: what the pullback needs besides the caller's arrays."""
    draft = Draft()
    q, k, v = draft.inputs(problem)
    o, L = (
        draft.output(problem),
        draft.empty(problem.shape("B H T"), problem.compute_dtype) if problem.gradient else None,
    )
    if is_plain(problem):
        kernel = PlainSoftmaxForward(problem.dtype)
        tiles = {}
    else:
        tiled = SoftmaxForwardSm90 if device.capability == 90 else SoftmaxForward
        kernel = tiled.fitting(problem.dtype, *problem.shape("K V"))
        tiles = {"D": kernel.D, "queries": kernel.QUERIES, "keys": kernel.KEYS}
    launch(draft, problem, kernel, kernel.QUERIES, dict(q=q, k=k, v=v, o=o), problem.sizes["V"], L=L)
    return draft.plan((draft.give_back(problem, o), None), saved=(o, L) if problem.gradient else (), tiles=tiles)


def plan_vjp(problem, device, do, dht, saved):
    """(dq, dk, dv), None"""
    draft = Draft()
    arrays, (o, L) = draft.inputs(problem), saved
    q, k, v = arrays
    do = draft.in_rows(draft.cast(do, problem.dtype, "do: in the dtype of the inputs"), "do")
    dq, dk, dv = (draft.like(x) for x in arrays)
    delta, (K, V) = draft.empty(L.shape, L.dtype), problem.shape("K V")
    if is_plain(problem):
        queries, keys = PlainSoftmaxBackwardQueries(problem.dtype), PlainSoftmaxBackwardKeys(problem.dtype)
        tiles = {}
    else:
        queries, keys = (
            kernel.fitting(problem.dtype, K, V) for kernel in (SoftmaxBackwardQueries, SoftmaxBackwardKeys)
        )
        tiles = {"D": queries.D} | {
            f"{kernel.name} {side}": size
            for kernel in (queries, keys)
            for side, size in (("queries", kernel.QUERIES), ("keys", kernel.KEYS))
        }
    launch(draft, problem, queries, queries.QUERIES, dict(q=q, k=k, v=v, o=o, g=do, dq=dq), K, L=L, delta=delta)
    launch(draft, problem, keys, keys.KEYS, dict(q=q, k=k, v=v, g=do, dk=dk, dv=dv), max(K, V), L=L, delta=delta)
    return draft.plan(((dq, dk, dv), None), tiles=tiles)


def saved(problem) -> tuple[tuple, ...]:
    """(shape, dtype) of what `plan` saves."""
    return (problem.shape("B H T V"), problem.dtype), (problem.shape("B H T"), problem.compute_dtype)


def launch(draft, problem, kernel, chunk, arrays, columns, **by_token):
    """A block for every `chunk` tokens of a sequence and head; a plain kernel has one for every few of these, and for
    128 of so many columns."""
    where = draft.shape(problem, chunk=chunk)
    more = {"shape": where, "scale": problem.scale, "causal": problem.options["causal"], **arrays, **by_token}
    if isinstance(kernel, PlainSoftmax):
        blocks = where.all_chunks * ceil_div(chunk, kernel.WARPS) * ceil_div(columns, kernel.WIDTH)
        draft.launch(kernel, blocks, **more)
    else:
        draft.launch(kernel, where.all_chunks, **more, vectors=aligned16(*arrays.values()))
