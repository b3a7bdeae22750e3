"""Which instantiation of which kernel computes which problem, each choice with its reason."""

from itertools import product

import numpy as np

from ...arrays import BFLOAT16
from .build import Kernel

CTYPES = {np.dtype(np.float32): "float", np.dtype(np.float16): "f16", BFLOAT16: "bf16"}
POLICIES = ("Gla", "Rwkv6")
PASSES = ("Forwards", "ForwardsApart", "Backwards")     # of two_gates
THREADS = 128           # of every kernel but chunk_forward, which has a warp for every 16 columns of V
STAGE_COLUMNS = 64      # columns of V a block of the tiled stages
CHUNK_COLUMNS = (64, 128)           # BV of chunk_forward: blocks that share a head repeat its scores, so the wider
                                    # one where V needs it: 2.68 to 2.21 ms at 4,4096,64,128 on an H200
TOKENS = {"chunk_forward": {"chunk": 16}, "warpgroup_forward": {"chunk": 32, "sub_chunk": 8},    # at a time
          "warpgroup_one_gate": {"chunk": 64}}
WARPGROUP_CHUNK, PANEL = 32, 64     # tokens of warpgroup_forward's chunks, columns of V a warpgroup
WARPGROUP_TILES = (64, 128)         # BK and BV of warpgroup_forward
ONE = "One"                         # to warpgroup_forward, the type of a gate that all channels of a token share, float32
MULTIPROCESSORS = 132               # of a Hopper card
LATER = 64              # tokens, where a sequence's second half begins: its block goes through some of the first's too
LOOK, START = 64, 256   # tokens that take as long as a block's look at the gates before a cut, and its start behind one
SEGMENT = 128                      # tokens that are worth a pass of their own
WARPGROUP_KEPT = 1024   # tokens between the states that Hopper's own sweeps keep: what is cut off of those they read adds
                        # up in the gates' gradient from one to the next
KEPT = 256              # tokens between the states that the backward keeps: a quarter of bfloat16's inputs at K = V = 128;
                        # the gates' gradient is a sum over as many tokens at most, which float32 carries without loss
BACKWARD_CHANNELS = 64              # of K a block of the backward sweeps; they hold all columns of V
TOKEN_COLUMNS = 32      # columns of V a block of recurrent_forward: one lane a column
STEP_COLUMNS = 64       # columns of V a block of step
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
    """`only`: "Joined" of more channels than a tile has, "Resumed" of sequences in two, "Summary" of segments. `G` may be
    `ONE`."""
    cluster = 2 if only == "Joined" else 1              # blocks that share producers
    BK, BV = WARPGROUP_TILES[K > 64], WARPGROUP_TILES[V > 64 * cluster]
    return Kernel("chunk/warpgroup_forward", (policy, only, CTYPES[T], CTYPES.get(G, G), str(BK), str(BV)),
                  2 * BV + 2 * BK // cluster, "sm_90a", cluster)


def warpgroup_one_gate(only, G, K, V) -> Kernel:
    """`only`: "Whole", "Summary" of segments, "Gradients", or of these "Queries" for dq and "Keys" for the others; bfloat16
    alone, whose range holds states."""
    BK, BV = WARPGROUP_TILES[K > 64], WARPGROUP_TILES[V > 64]
    return Kernel("chunk/warpgroup_one_gate", (only, CTYPES[G], str(BK), str(BV)), 2 * BV + 256, "sm_90a")


def narrow_blocks(heads, V, longest) -> bool:
    """Whether blocks of 64 columns of V, all on the card at once, spare its sequences to be cut into segments: under one gate
    they take two thirds of a wider block's time, and no pass that summarises: 0.049 for 0.075 ms at 4,2048,16,128."""
    blocks = heads * -(-V // WARPGROUP_TILES[0])
    return blocks <= MULTIPROCESSORS and segments(blocks, longest) == 1


def blocks(kernel, V) -> int:
    """Blocks of a sequence and head: one for every BV columns, in whole clusters."""
    return -(-V // (int(kernel.template[-1]) * kernel.cluster)) * kernel.cluster


def room(kernel) -> int:
    """How many of a kernel's blocks fit on the card at once: shared memory holds two of the smallest."""
    BK, BV = (int(size) for size in kernel.template[-2:])
    return MULTIPROCESSORS * (2 if BK + BV == 128 else 1)


def segments(blocks, longest, most=MULTIPROCESSORS) -> int:
    """Into how many a sequence is cut, so that `blocks` blocks of the uncut problem become at most as many as fit."""
    return max(1, min(most // max(blocks, 1), longest // SEGMENT))


def halves(kernel, blocks, longest) -> bool:
    """Whether sequences are cut in two, and the second half's block makes the state between by itself, instead of a pass that
    summarises segments. gla's milliseconds in halves / segments, and both with weak gates, where nothing is forgotten:
    1,4096,64,128 .121/.142, .175/.166; 1,16384,64,128 .423/.444, .645/.549. Where two blocks share a multiprocessor,
    segments are quarters: 1,2048,64,64 .040/.049, .059/.059; 4096 .068/.071, .111/.096; 8192 .127/.119, .210/.164."""
    if segments(blocks, longest, room(kernel)) == 2:
        return longest <= 8192
    return segments(blocks, longest) == 2 and longest < 4096


def tail(kernel, blocks, lengths) -> int:
    """Tokens at the ends of sequences of one length that get blocks of their own, on what the other blocks' last wave leaves
    idle: as many as make those that follow one another there take as long as one of the others. 0 where that gains less
    than a 20th, or than twice what the look costs where gates do not forget. At 1,8192,96,128 it is 1872 tokens, and gla
    takes 0.333 ms for 0.416."""
    longest, idle = int(lengths.max()), -blocks % room(kernel)
    if not idle or lengths.min() < longest:
        return 0
    each = -(-blocks // idle)
    tokens = (longest + LOOK - each * START) // (each + 1)
    return tokens if tokens - LOOK > max(2 * LOOK, longest // 20) else 0


def in_two(kernel, blocks, lengths) -> tuple[int, bool] | None:
    """Of sequences that are cut in two: where, in tokens behind their middle, and what becomes of a second part where gates do
    not forget: its block goes through the first half as well, or, for a tail, the first part's block goes on to the end."""
    longest = int(lengths.max())
    if halves(kernel, blocks, longest):
        return LATER, False
    tokens = tail(kernel, blocks, lengths) if segments(blocks, longest, room(kernel)) == 1 else 0
    middle = -(-longest // (2 * WARPGROUP_CHUNK)) * WARPGROUP_CHUNK
    return ((longest - tokens) // WARPGROUP_CHUNK * WARPGROUP_CHUNK - middle, True) if tokens else None


def parts(summary, heads, V, P, longest, final) -> int:
    """Into how many parts each of P segments is cut for the pass that summarises them, so that those whose state is needed,
    all but the last without a final state, fill the card: at 4,2048,16,128 one part leaves half of it idle."""
    blocks = heads * -(-V // int(summary.template[-1])) * (P if final else P - 1)
    return max(1, min(room(summary) // blocks, longest // P // SEGMENT))


def scan_segments() -> Kernel:
    return Kernel("chunk/scan_segments", (), 256)


def chunk_backward_queries(policy, T, G, V) -> Kernel:
    return Kernel("chunk/chunk_backward_queries", (policy, CTYPES[T], CTYPES[G], str(channels(V))), 2 * channels(V))


def chunk_backward_keys(policy, T, G, V) -> Kernel:
    return Kernel("chunk/chunk_backward_keys", (policy, CTYPES[T], CTYPES[G], str(channels(V))), 2 * channels(V))


def chunk_backward_values(policy, T, G, K, V) -> Kernel:
    BV = columns(V)
    return Kernel("chunk/chunk_backward_values", (policy, CTYPES[T], CTYPES[G], str(channels(K)), str(BV)), 2 * BV)


def warpgroup_backward(what, policy, T, G, K, V) -> Kernel:
    """`what`: the sweep, or "segments" before both. `G` may be `ONE`, for bfloat16 alone."""
    BK, BV = WARPGROUP_TILES[K > 64], WARPGROUP_TILES[V > 64]
    threads = 2 * BK + (32 if what == "segments" else 128)
    if G is ONE:
        return Kernel(f"chunk/warpgroup_backward_one_{what}", (str(BK), str(BV)), threads, "sm_90a")
    return Kernel(f"gated/sm90/backward_{what}", (policy, CTYPES[T], CTYPES[G], str(BK), str(BV)), threads, "sm_90a")


def scan_both_ways() -> Kernel:
    return Kernel("chunk/scan_both_ways", (), 256)


def bonus_gradient(U) -> Kernel:
    return Kernel("stages/bonus_gradient", (CTYPES[U],), 128)


def recurrent_forward(policy, T, G, K) -> Kernel:
    return Kernel("recurrent/recurrent_forward", (policy, CTYPES[T], CTYPES[G], str(channels(K))), THREADS)


def two_gates(only, T, G, K) -> Kernel:
    """`only`: one of PASSES."""
    return Kernel("recurrent/two_gates", (only, CTYPES[T], CTYPES[G], str(channels(K))), THREADS)


def gate_sums(T, G) -> Kernel:
    return Kernel("recurrent/gate_sums", (CTYPES[T], CTYPES[G]), THREADS)


def step(policy, T, G, S) -> Kernel:
    threads = 64 * STEP_COLUMNS * S.itemsize // (4 * 16)           # 64 channels at a time, four pieces of 16 bytes each
    return Kernel("recurrent/step", (policy, CTYPES[T], CTYPES[G], CTYPES[S]), threads)


def chunk_cumsum(G) -> Kernel:
    return Kernel("stages/chunk_cumsum", (CTYPES[G],), THREADS)


def gated_qk(policy, T) -> Kernel:
    return Kernel("stages/gated_qk", (policy, CTYPES[T]), THREADS)


def inter_chunk(T) -> Kernel:
    return Kernel("stages/inter_chunk", (CTYPES[T],), THREADS)


def intra_chunk(policy, T, G, K) -> Kernel:
    return Kernel("stages/intra_chunk", (policy, CTYPES[T], CTYPES[G], str(channels(K))), THREADS)


# -- what simple_gla, retention and linear_attention do besides gla's kernels -------------------------------------------
FEATURE_MAPS = {None: "Identity", "elu": "Elu", "relu": "Relu", "exp": "Exp"}
PIECE = 8               # numbers that a thread of feature_map moves at once


def feature_map(phi, T, Y) -> Kernel:
    return Kernel("stages/feature_map", (FEATURE_MAPS[phi], CTYPES[T], CTYPES[Y]), 256)


def feature_gradient(phi, T, Y) -> Kernel:
    return Kernel("stages/feature_gradient", (FEATURE_MAPS[phi], CTYPES[T], CTYPES[Y]), 256)


def gate_gradient(G) -> Kernel:
    return Kernel("stages/gate_gradient", (CTYPES[G],), 128)


def divide(T) -> Kernel:
    return Kernel("stages/divide", (CTYPES[T],), 128)


def divide_gradient(T) -> Kernel:
    return Kernel("stages/divide_gradient", (CTYPES[T],), 128)


def combine(T) -> Kernel:
    return Kernel("stages/combine", (CTYPES[T],), THREADS)


# -- softmax attention --------------------------------------------------------------------------------------------------
ATTENTION_DTYPES = tuple(CTYPES)[1:]
ATTENTION_COLUMNS = (64, 128)       # D: the whole of K and of V in one tile, padded up
ATTENTION_TILES = {"softmax_forward": (128, 64), "softmax_warpgroup_forward": (128, 128),       # queries, keys: as many
                   "softmax_dq": (128, 32), "softmax_dkdv": (64, 64)}       # as leave no value without a register


def softmax(name, T, K, V) -> Kernel:
    """One of ATTENTION_TILES."""
    threads, arch = (3 * THREADS, "sm_90a") if name == "softmax_warpgroup_forward" else (THREADS, "")
    D = next(D for D in ATTENTION_COLUMNS if max(K, V) <= D)
    return Kernel(f"attention/{name}", (CTYPES[T], str(D)), threads, arch)


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
            BK, BV, half, gate, groups = int(BK), int(BV), size[T], size.get(G, 0), 2 // kernel.cluster
            handed = 1024 * -(-kernel.cluster * (32 * BK * 4 + 32 * BK * half + 32 * 64 * half + 4 * BK) // 1024)
            slots = BV // 64 * (4 if gate <= 2 else 3)
            group = 32 * BK * (2 * half + gate) + 64 * (BK + 8) * 4 + 4 * BK * 4 + 33 * 4 + 8
            used = 2 * handed + slots * 32 * 64 * half + groups * group + 4 * BK + BK // 8 + 48 + 8 * (5 + slots)
            return 1024 * -(-used // 1024)
        case "warpgroup_one_gate", (*_, BK, BV):
            BK, BV = int(BK), int(BV)
            stages, gates = 3 if BK == BV else 4, 4 * 64 * (2 * 6 + 2)
            stage = 1024 * -(-(64 * 2 * (2 * BK + BV + 64) + gates) // 1024)
            return 1024 * -(-(stages * stage + 8 * 3 * stages) // 1024)
        case ("chunk_backward_queries" | "chunk_backward_keys"), (_, T, G, BV):
            BK, BV, keys = BACKWARD_CHANNELS, int(BV), kernel.name == "chunk_backward_keys"
            groups, warps = BV // 64, BV // 16
            floats = (3 + groups) * 16 * (BK + 8) + 2 * 16 * (BV + 8) + (1 + warps) * 16 * 16 + (1 + groups) * BK
            return 4 * floats + 16 * (BK * (2 * size[T] + size[G] + 4 * keys) + 2 * BV * size[T])
        case "chunk_backward_values", (_, T, G, BK, BV):
            BK, BV = int(BK), int(BV)
            floats = 3 * 16 * (BK + 8) + 16 * (BV + 8) + 16 * (16 + 8) + 2 * BK
            return 4 * floats + 16 * (2 * BK * size[T] + BK * size[G] + BV * size[T])
        case "softmax_forward", (_, D):
            return 2 * int(D) * (128 + 4 * 64) + 128
        case "softmax_warpgroup_forward", (_, D):
            return 2 * int(D) * (128 + 4 * 128) + 1024
        case "softmax_dq", (_, D):
            return 2 * int(D) * (2 * 128 + 4 * 32) + 4 * 128 + 128
        case "softmax_dkdv", (_, D):
            return 2 * int(D) * (2 * 64 + 4 * 64) + 4 * 4 * 64 + 128
        case ("gated_sm90_backward_segments" | "gated_sm90_backward_queries" | "gated_sm90_backward_keys"), _:
            *_, G, BK, BV = kernel.template
            BK, BV, gate = int(BK), int(BV), size[G]
            stages, channels, gates, columns, pairs, rest = {           # tiles of [32, BK] and [32, BV] a stage
                "gated_sm90_backward_segments": (4 if gate == 2 else 3, 1, 1, 1, 0, 0),
                "gated_sm90_backward_queries": (3, 2, 1, 2, 32 * 32 * 4 + 4 * 32 * BV, 0),
                "gated_sm90_backward_keys": (2, 2, 2, 2, 32 * 32 * 4,
                                             2 * BK * BV + 32 * (8 * BK + 4 * BV) + 32 * 32 * 4 + 4 * 33 * BK // 16
                                             + 40),
            }[kernel.name]
            stage = 32 * (2 * channels * BK + gates * gate * BK + 2 * columns * BV) + pairs
            return 1024 * -(-(stages * stage + rest + 8 * (3 * stages + 2)) // 1024)
        case ("warpgroup_backward_one_segments" | "warpgroup_backward_one_queries" | "warpgroup_backward_one_keys"), (BK, BV):
            BK, BV = int(BK), int(BV)
            decays, shares = 4 * 32 * (1 + 32 + 8), 4 * 32 * BK // 16
            stages, arrays, more, rest = {                              # tiles of [32, BK] and [32, BV] a stage
                "warpgroup_backward_one_segments": (4, 1, 4 * 33, 0),
                "warpgroup_backward_one_queries": (3 if BK + BV == 128 else 4, 2, 32 * 128 + decays + shares, 4 * BK // 16),
                "warpgroup_backward_one_keys": (4 if BK + BV == 192 else 3, 2, 2 * 32 * 128 + decays + 2 * 4 * 32 + shares, 4 * BK * BV),
            }[kernel.name]
            stage = 1024 * -(-(32 * 2 * arrays * (BK + BV) + more) // 1024)
            return 1024 * -(-(stages * stage + rest + 8 * 3 * stages) // 1024)
        case "recurrent_forward", (*_, BK):
            BK = int(BK)
            return 4 * (3 * 16 * BK + 16 * 32 + BK + 4 * 16 * 32)
        case "two_gates", (only, *_, BK):
            return 4 * (3 * 16 * int(BK) + 2 * 16 * 32 + (1 if only == "Forwards" else 2) * 4 * 16 * 32)
        case "intra_chunk", (*_, BK):
            BK = int(BK)
            return 4 * (3 * 16 * (BK + 8) + 2 * BK + 4 * 16 * 16)
        case "inter_chunk", _:
            return 4 * (2 * 16 * (64 + 8))
        case "combine", _:
            return 4 * (64 * (16 + 4) + 16 * (64 + 8))
        case "step", _:
            return 4 * 64 * kernel.threads // 32
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
            yield chunk_backward_queries(p, T, G, K)
            yield chunk_backward_keys(p, T, G, K)
            for V in CHUNK_COLUMNS:
                yield chunk_forward(p, T, G, K, V)
                yield chunk_backward_values(p, T, G, K, V)
            yield recurrent_forward(p, T, G, K)
            yield intra_chunk(p, T, G, K)
        for S in CTYPES:
            yield step(p, T, G, S)
    for T, G in pairs:
        yield gate_sums(T, G)
        for only, K in product(PASSES, CHANNELS):
            yield two_gates(only, T, G, K)
    for T, V in product(half, WARPGROUP_TILES):
        for G, p in ((T, POLICIES[0]), (single, POLICIES[0]), (ONE, POLICIES[0]), (T, POLICIES[1]), (single, POLICIES[1])):
            yield warpgroup_forward(p, T, G, CHANNELS[-1], 2 * V, "Joined")
            for K, only in product(WARPGROUP_TILES, ("Whole", "Resumed", "Summary")):
                own = only == "Summary" or (T, G) != (BFLOAT16, ONE)    # else warpgroup_one_gate computes it
                if own and (only != "Summary" or p == POLICIES[0]):
                    yield warpgroup_forward(p, T, G, K, V, only)
    for T in half:
        yield feature_map(None, single, T)
    for (T, Y), phi in product(pairs, FEATURE_MAPS):
        yield feature_map(phi, T, Y)
        if phi:
            yield feature_gradient(phi, T, Y)
    for G, K, V in product((BFLOAT16, single), WARPGROUP_TILES, WARPGROUP_TILES):
        yield warpgroup_one_gate("Whole", G, K, V)
        yield warpgroup_one_gate("Summary", G, K, V)
        if G == single and V <= K:
            yield warpgroup_one_gate("Gradients", G, K, V)
    for K in WARPGROUP_TILES:
        yield warpgroup_one_gate("Queries", single, K, PANEL)
    yield warpgroup_one_gate("Keys", single, *2 * WARPGROUP_TILES[-1:])
    yield scan_segments()
    yield scan_both_ways()
    for what, (T, G), p, K, V in product(("segments", "queries", "keys"), pairs[1:], POLICIES, *2 * (WARPGROUP_TILES,)):
        yield warpgroup_backward(what, p, T, G, K, V)
    for what, K, V in product(("segments", "queries", "keys"), WARPGROUP_TILES, WARPGROUP_TILES):
        yield warpgroup_backward(what, POLICIES[0], BFLOAT16, ONE, K, V)
    for name, T, D in product(ATTENTION_TILES, ATTENTION_DTYPES, ATTENTION_COLUMNS):
        yield softmax(name, T, D, D)
    for T in CTYPES:
        yield chunk_cumsum(T)
        yield inter_chunk(T)
        yield combine(T)
        yield divide(T)
        yield divide_gradient(T)
        yield bonus_gradient(T)
        yield gate_gradient(T)
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
