"""Softmax attention's host plans: one kernel forwards; backwards one for dq, then one for dk and dv.

The backward recomputes the scores from L, the logarithm of each query's sum, so that memory stays linear in T; nothing
is added atomically, so that the same call gives the same bits. `device` is where, as in `plans`.
"""

from __future__ import annotations

import math

from . import tiles
from .build import pack
from .gradients import in_pieces, like
from .operands import FLOAT32, give_back, in_rows, inputs, output, place, pointer, rows

NAME = "softmax_attention"


def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    if problem.dtype not in tiles.ATTENTION_DTYPES:
        return f"no {problem.dtype} kernels of {NAME}; it has {', '.join(map(str, tiles.ATTENTION_DTYPES))}"
    for axis in "KV":
        if problem.sizes[axis] > tiles.ATTENTION_COLUMNS[-1]:
            return f"{axis}={problem.sizes[axis]} is over {tiles.ATTENTION_COLUMNS[-1]}"
    return None


def kernels_of(problem, device) -> tuple[tiles.Kernel, ...]:
    """What `run` launches: Hopper has a kernel of its own."""
    name = "softmax_warpgroup_forward" if device.capability == 90 else "softmax_forward"
    return (tiles.softmax(name, problem.dtype, *problem.shape("K V")),)


def sweeps(problem, device) -> tuple[tiles.Kernel, ...]:
    """What a pullback launches, in order."""
    return tuple(tiles.softmax(name, problem.dtype, *problem.shape("K V")) for name in ("softmax_dq", "softmax_dkdv"))


def tiles_of(problem, device) -> dict:
    """Columns, and the queries and keys at once in each kernel."""
    kernels = (sweeps if problem.gradient else kernels_of)(problem, device)
    return {"D": int(kernels[0].template[-1])} | {
        side if len(kernels) == 1 else f"{kernel.name} {side}": size for kernel in kernels
        for side, size in zip(("queries", "keys"), tiles.ATTENTION_TILES[kernel.name])}


def scratch(problem) -> int:
    """Bytes that a pullback takes besides the gradients: delta; L is as large and stays with it."""
    return FLOAT32.itemsize * math.prod(problem.shape("B H T"))


def run(problem, device):
    o = output(problem, device)
    forward(problem, device, inputs(problem), o, None)
    return give_back(problem, o), None


def vjp(problem, device):
    """((o, None), pull): o and L are what the pullback needs besides the caller's arrays."""
    o, L = output(problem, device), device.empty(problem.shape("B H T"), FLOAT32)
    forward(problem, device, inputs(problem), o, L)

    def pull(do, dht):
        do = in_rows(do.astype(problem.dtype, copy=False))
        return backward(problem, device, inputs(problem), o, L, do), None

    return (o, None), pull


def forward(problem, device, arrays, o, L):
    """Fills o, and L where it is an array."""
    q, k, v = arrays
    kernel, = kernels_of(problem, device)
    launch(problem, device, kernel, tiles.ATTENTION_TILES[kernel.name][0], dict(q=q, k=k, v=v, o=o), L=L)


def backward(problem, device, arrays, o, L, do):
    """[dq, dk, dv]"""
    q, k, v = arrays
    dq, dk, dv = (like(x, device) for x in arrays)
    delta = device.empty(L.shape, FLOAT32)
    queries, keys = sweeps(problem, device)
    launch(problem, device, queries, tiles.ATTENTION_TILES[queries.name][0], dict(q=q, k=k, v=v, o=o, do=do, dq=dq),
           L=L, delta=delta)
    launch(problem, device, keys, tiles.ATTENTION_TILES[keys.name][1], dict(q=q, k=k, v=v, do=do, dk=dk, dv=dv),
           L=L, delta=delta)
    return [dq, dk, dv]


def launch(problem, device, kernel, chunk, arrays, **by_token):
    """A block for every `chunk` tokens of a sequence and head."""
    where = place(problem.but(chunk_size=chunk), device)
    args = pack(**rows(device, **arrays), **where.shape, **{name: pointer(device, x) for name, x in by_token.items()},
                scale=problem.scale, causal=int(problem.options["causal"]),
                vectors=int(all(in_pieces(x, device) for x in arrays.values())))
    device.launch(kernel, where.chunks, args, tiles.shared_bytes(kernel))
