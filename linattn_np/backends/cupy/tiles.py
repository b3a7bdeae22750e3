"""Which instantiation of which kernel computes which problem, each choice with its reason."""

from itertools import product

import numpy as np

from ...arrays import BFLOAT16
from .build import Kernel

CTYPES = {np.dtype(np.float32): "float", np.dtype(np.float16): "f16", BFLOAT16: "bf16"}
POLICIES = ("Gla", "Rwkv6")
THREADS = 128           # of every kernel but chunk_forward, which has a warp for every 16 columns of V
STAGE_COLUMNS = 64      # columns of V a block of the tiled stages
CHUNK_COLUMNS = (64, 128)           # BV of chunk_forward: blocks that share a head repeat its scores, so the wider
                                    # one where V needs it: 2.68 to 2.21 ms at 4,4096,64,128 on an H200
TOKENS = {"chunk_forward": {"chunk": 16}, "warpgroup_forward": {"chunk": 32, "sub_chunk": 8}}   # at a time
WARPGROUP_CHUNK, PANEL = 32, 64     # tokens of warpgroup_forward's chunks, columns of V a warpgroup
WARPGROUP_TILES = (64, 128)         # BK and BV of warpgroup_forward
MULTIPROCESSORS = 132               # of a Hopper card
SEGMENT = 512                      # tokens that are worth a pass of their own
TOKEN_COLUMNS = 32      # columns of V a block of recurrent_forward: one lane a column
STEP_COLUMNS = 64       # columns of V a block of step: four a lane
CHANNELS = (64, 128, 256)           # BK: the whole of K in one tile, padded up; smaller ones would save nothing
                                    # that a block of 128 threads notices


def channels(K: int) -> int:
    """BK, the smallest tile that holds K."""
    return next(size for size in CHANNELS if K <= size)


def policy(op) -> str:
    return "Rwkv6" if op.reads_before_write else "Gla"


def columns(V: int) -> int:
    """BV of chunk_forward."""
    return CHUNK_COLUMNS[V > CHUNK_COLUMNS[0]]


def chunk_forward(policy, T, G, K, V) -> Kernel:
    BV = columns(V)
    return Kernel("chunk/chunk_forward", (policy, CTYPES[T], CTYPES[G], str(channels(K)), str(BV)), 2 * BV)


def warpgroup_forward(policy, T, G, K, V, only="Whole") -> Kernel:
    """`only`: "First" and "Last" of more channels than a tile has, "Summary" of segments."""
    BK, BV = WARPGROUP_TILES[K > 64], WARPGROUP_TILES[V > 64]
    return Kernel("chunk/warpgroup_forward", (policy, only, CTYPES[T], CTYPES[G], str(BK), str(BV)), 2 * (BK + BV), "sm_90a")


def segments(blocks, longest) -> int:
    """Into how many a sequence is cut, so that `blocks` blocks of the uncut problem become as many as fit on the card."""
    return max(1, min(MULTIPROCESSORS // max(blocks, 1), longest // SEGMENT))


def scan_segments() -> Kernel:
    return Kernel("chunk/scan_segments", (), 256)


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


# -- a model's decoding step: X is the dtype of what a kernel hands to the next product --------------------------------
MATVEC_ROWS = 16        # rows of a weight a block of matvec: a tensor-core tile
MATVEC_COLUMNS = 8      # sequences it serves at most: the tile's other side
MATVEC_PRODUCTS = 5     # products in one launch
MATVEC_THREADS = (256, 512, 1024)   # a block's; few blocks take many, so that the 132 multiprocessors of a Hopper
                                    # card have about 1024 each at work, many blocks few, so that they end one by one
DECODE_ROWS = 16        # rows of a weight a block of decode_step takes: a tensor-core tile
DECODE_COLUMNS = 8      # sequences it serves at most: the tile's other side
DECODE_SLOTS = (12, 11, 10, 8, 6, 4)    # 16 KB of weights on their way each: as many as leave room for the vectors
MOST_SHARED = 227 * 1024            # bytes of shared memory a block of a Hopper card can have
MIX_COLUMNS = 128       # channels a block of mix


def embed(T) -> Kernel:
    return Kernel("model/embed", (CTYPES[T],), 512)


def norm_shift(X) -> Kernel:
    return Kernel("model/norm_shift", (CTYPES[X],), 512)


def mix(T, X) -> Kernel:
    return Kernel("model/mix", (CTYPES[T], CTYPES[X]), MIX_COLUMNS)


def time_mix_step(T, X) -> Kernel:
    return Kernel("model/time_mix_step", (CTYPES[T], CTYPES[X]), 256)


def matvec(T, blocks) -> Kernel:
    threads = max((size for size in MATVEC_THREADS if size * blocks <= 132 * 1024), default=MATVEC_THREADS[0])
    return Kernel("model/matvec", (CTYPES[T], str(threads)), threads)


def decode_step(T, B, D, F) -> tuple[Kernel, int] | None:
    """The kernel and the vectors' bytes of shared memory, those of the widest product if that costs few slots."""
    parts = 3 if T == BFLOAT16 else 2
    for K, least in ((F, 8), (D, DECODE_SLOTS[-1])):
        for slots in DECODE_SLOTS:
            kernel = Kernel("model/decode_step", (CTYPES[T], str(slots), "true" if parts * B <= DECODE_COLUMNS else "false"),
                            384, "sm_90a")
            if B <= DECODE_COLUMNS and slots >= least and shared_bytes(kernel) + 4 * B * K <= MOST_SHARED:
                return kernel, 4 * B * K
    return None


def relu_squared(X) -> Kernel:
    return Kernel("model/relu_squared", (CTYPES[X],), 256)


def argmax() -> Kernel:
    return Kernel("model/argmax", (), 1024)


# -- a model's prompts: all tokens at once ------------------------------------------------------------------------------
PROMPT_COLUMNS, PROMPT_TOKENS = 128, 32     # channels and tokens of a block of data_mix and log_decay


def shift_mix(X) -> Kernel:
    return Kernel("prompt/shift_mix", (CTYPES[X],), 512)


def data_mix(T) -> Kernel:
    return Kernel("prompt/data_mix", (CTYPES[T],), PROMPT_COLUMNS)


def log_decay(T) -> Kernel:
    return Kernel("prompt/log_decay", (CTYPES[T],), PROMPT_COLUMNS)


def gated_norm(X) -> Kernel:
    return Kernel("prompt/gated_norm", (CTYPES[X],), 256)


def gated_add() -> Kernel:
    return Kernel("prompt/gated_add", (), 256)


def shared_bytes(kernel: Kernel) -> int:
    """Dynamic shared memory of a block: the size of the kernel's tile structs, member by member."""
    size = {ctype: dtype.itemsize for dtype, ctype in CTYPES.items()}
    match kernel.name, kernel.template:
        case "chunk_forward", (_, T, G, BK, BV):
            BK, BV = int(BK), int(BV)
            floats = 3 * 16 * (BK + 8) + 16 * (BV + 8) + 16 * (16 + 4) + 2 * BK
            return 4 * floats + 16 * (2 * BK * size[T] + BK * size[G] + BV * size[T])
        case "warpgroup_forward", (*_, T, G, BK, BV):
            BK, BV, half, gate = int(BK), int(BV), size[T], size[G]
            handed = 1024 * -(-(32 * BK * 4 + 32 * BK * half + 32 * 64 * half + 4 * BK) // 1024)
            values = BV // 64 * (4 if gate == 2 else 3) * 32 * 64 * half
            used = 2 * handed + values + 2 * 32 * BK * (2 * half + gate) + 2 * 64 * (BK + 8) * 4 + 2 * 4 * BK * 4 + 8 * (6 + BV // 64 * (4 if gate == 2 else 3))
            return 1024 * -(-used // 1024)
        case "recurrent_forward", (*_, BK):
            BK = int(BK)
            return 4 * (3 * 16 * BK + 16 * 32 + BK + 4 * 16 * 32)
        case "intra_chunk", (*_, BK):
            BK = int(BK)
            return 4 * (3 * 16 * (BK + 8) + 2 * BK + 4 * 16 * 16)
        case "inter_chunk", _:
            return 4 * (2 * 16 * (64 + 8))
        case "combine", _:
            return 4 * (64 * (16 + 4) + 16 * (64 + 8))
        case "step", _:
            return 4 * (4 * 64 + 8 * 64)
        case ("embed" | "norm_shift"), _:
            return 4 * 2 * 16
        case "shift_mix", _:
            return 4 * 4 * 16
        case "mix", _:
            return 4 * 32 * 8
        case ("data_mix" | "log_decay"), _:
            return 4 * 32 * 32
        case "time_mix_step", _:
            return 4 * (5 * 256 + 512 + 4 * 256 + 2 * 8)
        case "matvec", (_, threads):
            return int(threads) * (2 * 4 * 16 + 4 * 8 * 16 // 32)
        case "decode_step", (_, slots, _):
            return int(slots) * (16 * (1024 + 64) + 2 * 8) + 4 * (2 * 8 + 5 * 256 + 512 + 4 * 256 + 2 * 8)
        case "argmax", _:
            return 32 * 8
    return 0


def kernels():
    """Every instantiation that the host plans can ask for: what the compile check walks."""
    half = tuple(CTYPES)[1:]
    single = np.dtype(np.float32)
    pairs = [(T, T) for T in CTYPES] + [(T, single) for T in half]        # a gate is like q, or float32
    for (T, G), p in product(pairs, POLICIES):
        for K in CHANNELS:
            for V in CHUNK_COLUMNS:
                yield chunk_forward(p, T, G, K, V)
                if T != single:
                    for only in ("First", "Last") if K > WARPGROUP_TILES[-1] else ("Whole",):
                        yield warpgroup_forward(p, T, G, K, V, only)
                    if p == POLICIES[0] and K <= WARPGROUP_TILES[-1]:
                        yield warpgroup_forward(p, T, G, K, V, "Summary")
            yield recurrent_forward(p, T, G, K)
            yield intra_chunk(p, T, G, K)
        for S in CTYPES:
            yield step(p, T, G, S)
    yield scan_segments()
    for T in CTYPES:
        yield chunk_cumsum(T)
        yield inter_chunk(T)
        yield combine(T)
        for p in POLICIES:
            yield gated_qk(p, T)
        yield embed(T)
        yield norm_shift(T)
        for blocks in (1, 200, 1000):
            yield matvec(T, blocks)
        for slots in DECODE_SLOTS:
            for paired in ("true", "false"):
                yield Kernel("model/decode_step", (CTYPES[T], str(slots), paired), 384, "sm_90a")
        yield relu_squared(T)
        yield shift_mix(T)
        yield data_mix(T)
        yield log_decay(T)
        yield gated_norm(T)
        for X in dict.fromkeys((T, single)):
            yield mix(T, X)
            yield time_mix_step(T, X)
    yield argmax()
    yield gated_add()
