"""Which instantiation of which kernel computes which problem, each choice with its reason."""

from itertools import product

import numpy as np

from ...arrays import BFLOAT16
from .build import Kernel

CTYPES = {np.dtype(np.float32): "float", np.dtype(np.float16): "f16", BFLOAT16: "bf16"}
POLICIES = ("Gla", "Rwkv6")
THREADS = 128           # of every kernel: four warps share a tile of 64 columns of V
CHUNK_COLUMNS = 64      # columns of V a block of chunk_forward and the tiled stages
TOKEN_COLUMNS = 32      # columns of V a block of the recurrences: one lane a column
CHANNELS = (64, 128, 256)           # BK: the whole of K in one tile, padded up; smaller ones would save nothing
                                    # that a block of 128 threads notices


def channels(K: int) -> int:
    """BK, the smallest tile that holds K."""
    return next(size for size in CHANNELS if K <= size)


def policy(op) -> str:
    return "Rwkv6" if op.reads_before_write else "Gla"


def chunk_forward(policy, T, G, K) -> Kernel:
    return Kernel("chunk/chunk_forward", (policy, CTYPES[T], CTYPES[G], str(channels(K))), THREADS)


def recurrent_forward(policy, T, G, K) -> Kernel:
    return Kernel("recurrent/recurrent_forward", (policy, CTYPES[T], CTYPES[G], str(channels(K))), THREADS)


def step(policy, T, G, S) -> Kernel:
    return Kernel("recurrent/step", (policy, CTYPES[T], CTYPES[G], CTYPES[S]), THREADS)


def chunk_cumsum(G) -> Kernel:
    return Kernel("stages/chunk_cumsum", (CTYPES[G],), THREADS)


def gated_qk(policy, T) -> Kernel:
    return Kernel("stages/gated_qk", (policy, CTYPES[T]), THREADS)


def inter_chunk(T) -> Kernel:
    return Kernel("stages/inter_chunk", (CTYPES[T],), THREADS)


def intra_chunk(policy, T, G, K) -> Kernel:
    return Kernel("stages/intra_chunk", (policy, CTYPES[T], CTYPES[G], str(channels(K))), THREADS)


def combine(T) -> Kernel:
    return Kernel("stages/combine", (CTYPES[T],), THREADS)


def shared_bytes(kernel: Kernel) -> int:
    """Dynamic shared memory of a block: the size of the kernel's tile struct, member by member."""
    words = {
        "chunk_forward": lambda BK: 3 * 16 * (BK + 8) + 16 * (64 + 8) + 16 * (16 + 4) + 2 * BK,
        "recurrent_forward": lambda BK: 3 * 16 * BK + 16 * 32 + BK + 4 * 16 * 32,
        "step": lambda: 4 * 32,
        "chunk_cumsum": lambda: 0,
        "gated_qk": lambda: 0,
        "inter_chunk": lambda: 2 * 16 * (64 + 8),
        "intra_chunk": lambda BK: 3 * 16 * (BK + 8) + 2 * BK + 4 * 16 * 16,
        "combine": lambda: 64 * (16 + 4) + 16 * (64 + 8),
    }[kernel.name]
    BK = kernel.template[-1:] if kernel.name in ("chunk_forward", "recurrent_forward", "intra_chunk") else ()
    return 4 * words(*map(int, BK))


def kernels():
    """Every instantiation that the host plans can ask for: what the compile check walks."""
    half = tuple(CTYPES)[1:]
    single = np.dtype(np.float32)
    pairs = [(T, T) for T in CTYPES] + [(T, single) for T in half]        # a gate is like q, or float32
    for (T, G), p in product(pairs, POLICIES):
        for K in CHANNELS:
            yield chunk_forward(p, T, G, K)
            yield recurrent_forward(p, T, G, K)
            yield intra_chunk(p, T, G, K)
        for S in CTYPES:
            yield step(p, T, G, S)
    for T in CTYPES:
        yield chunk_cumsum(T)
        yield inter_chunk(T)
        yield combine(T)
        for p in POLICIES:
            yield gated_qk(p, T)
