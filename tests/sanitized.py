"""Small calls that between them launch every kernel and pass of kernels_cu, for compute-sanitizer to watch on a Hopper
card.

    python tests/sanitized.py --compile
    compute-sanitizer --tool memcheck python tests/sanitized.py

The first command launches no kernel: it compiles those of all calls side by side, for CuPy to find them compiled. Every
array is an allocation of its own, so that what lies beside it is nobody's. The results are for other tests to
judge. Prints how many calls there were; a kernel file that none of them launched is an error.
"""

import sys
from functools import partial
from inspect import signature
from itertools import chain, cycle, product
from unittest import mock

import numpy as np
from fla_names import named_activation
from reference import DECAYS, draw, draw_states
from test_decode_kernels import SIZES, SMALL, decoder_of, random_weights, squared_product
from test_delta_on_hopper import call as delta_call
from test_delta_on_hopper import drawn as delta_tokens
from test_delta_on_hopper import gradients as delta_gradients
from test_training_kernels import SEEDS, adamw, model, on_device

from linattn_np import (
    delta_rule,
    delta_rule_step,
    gated_delta_rule,
    gated_delta_rule_step,
    gla,
    gla_step,
    kda,
    kda_step,
    linear_attention,
    rwkv6,
    rwkv6_step,
    rwkv7,
    rwkv7_step,
    simple_gla,
    softmax_attention,
    vjp,
)
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import device as devices
from linattn_np.backends.cupy import segments, softmax_tiles, source
from linattn_np.backends.cupy.blas import Cublas
from linattn_np.backends.cupy.delta_hopper import DeltaScalarForwardSm90
from linattn_np.backends.cupy.rwkv6_model_kernels import HiddenActivation
from linattn_np.declarations import (
    DELTA_RULE_STEPS,
    DELTA_RULES,
    GATED_DELTA_RULE,
    GLA,
    GLA_STEP,
    GLA_VALUE_GATE,
    KDA,
    LINEAR_ATTENTION,
    RWKV6_STEP,
    SIMPLE_GLA,
    SOFTMAX_ATTENTION,
    SOFTMAX_SINKS,
)
from linattn_np.declarations import RWKV6 as RWKV6_OP
from linattn_np.declarations import STEPS as DECLARED_STEPS
from linattn_np.dispatch import summarise
from linattn_np.kernel_choice import choose_kernels
from linattn_np.models import RWKV6, RWKV7

DOUBLE, HALF, SINGLE = (np.dtype(t) for t in (np.float64, np.float16, np.float32))
DECLARED = ((gla, GLA), (rwkv6, RWKV6_OP))
RULES = delta_rule, gated_delta_rule, kda, rwkv7
RULE_STEPS = delta_rule_step, gated_delta_rule_step, kda_step, rwkv7_step
DELTA_DTYPES = SINGLE, BFLOAT16, DOUBLE, HALF
PACKED = [0, 5, 5, 70, 133]
GROWS = "grows"  # logsigmoid's gates, and growth that chunks compute another way
TINY = "tiny"  # logsigmoid's gates; keys now and then of a size that float16 does not hold
OPERATORS = (  # B H T K V, dtype, gates, the gates' dtype, keywords
    ((2, 2, 100, 64, 64), BFLOAT16, "some-inf", None, {}),
    ((1, 2, 70, 128, 136), HALF, "logsigmoid", SINGLE, {}),
    ((1, 1, 40, 40, 24), BFLOAT16, "by_channel", None, {}),
    ((1, 2, 133, 64, 128), BFLOAT16, "logsigmoid", None, {"cu_seqlens": PACKED}),
    ((1, 1, 70, 256, 64), BFLOAT16, "spikes-40", None, {}),
    ((1, 1, 133, 200, 256), BFLOAT16, "logsigmoid", None, {}),  # two joined blocks that share out registers
    ((1, 1, 1100, 64, 64), BFLOAT16, "logsigmoid", None, {}),  # in segments, here and below
    ((1, 1, 1100, 256, 64), BFLOAT16, "logsigmoid", None, {}),
    ((1, 66, 200, 128, 128), BFLOAT16, "trained", None, {}),  # columns of V over a cluster, here and below
    ((1, 32, 600, 64, 136), HALF, "trained", SINGLE, {}),
    ((1, 67, 133, 128, 128), HALF, "trained", None, {}),  # many heads in the finer type
    ((1, 1, 70, 20, 9), BFLOAT16, "logsigmoid", None, {}),  # no whole pieces: on copies
    ((1, 2, 600, 264, 72), BFLOAT16, "trained", SINGLE, {}),  # the kernels of every card, here and below; in segments
    ((1, 1, 133, 100, 129), HALF, "some-inf", None, {"cu_seqlens": PACKED}),
    ((1, 1, 70, 300, 128), SINGLE, "logsigmoid", None, {}),
    ((1, 2, 70, 64, 64), SINGLE, "some-1e30", None, {}),
    ((1, 1, 133, 20, 100), SINGLE, "logsigmoid", None, {"cu_seqlens": PACKED}),
    ((1, 1, 133, 20, 24), SINGLE, "logsigmoid", None, {"cu_seqlens": PACKED, "mode": "staged"}),
    ((1, 2, 100, 64, 64), BFLOAT16, "logsigmoid", None, {"mode": "staged"}),
    ((1, 1, 133, 20, 24), DOUBLE, "logsigmoid", None, {"cu_seqlens": PACKED, "mode": "staged"}),
    ((1, 1, 1100, 64, 64), BFLOAT16, GROWS, None, {}),
    ((1, 2, 70, 128, 136), HALF, GROWS, SINGLE, {}),
    ((1, 1, 70, 200, 64), BFLOAT16, GROWS, None, {}),
    ((1, 2, 70, 64, 64), SINGLE, GROWS, None, {}),
    ((1, 2, 133, 64, 64), BFLOAT16, TINY, None, {}),
    ((1, 2, 133, 128, 128), BFLOAT16, TINY, None, {}),
    ((1, 2, 40, 20, 9), SINGLE, "logsigmoid", None, {"mode": "recurrent"}),
    ((1, 1, 133, 64, 64), BFLOAT16, "logsigmoid", None, {"cu_seqlens": PACKED, "mode": "recurrent"}),
)
GRADIENTS = (  # as for OPERATORS, all with gradients of the final state
    ((1, 2, 70, 64, 64), BFLOAT16, "some-inf", None, {}),
    ((1, 1, 530, 20, 24), HALF, "logsigmoid", SINGLE, {}),
    ((1, 1, 1100, 64, 64), BFLOAT16, "logsigmoid", None, {}),
    ((1, 1, 1100, 64, 64), BFLOAT16, GROWS, None, {}),
    ((1, 2, 70, 128, 72), HALF, GROWS, SINGLE, {}),
    ((1, 66, 40, 136, 200), BFLOAT16, "logsigmoid", None, {}),  # tiles of the state, which add up
    ((3, 48, 37, 64, 64), BFLOAT16, "logsigmoid", None, {}),  # blocks take several sequences in turn, here and below
    ((1, 48, 133, 128, 72), BFLOAT16, GROWS, None, {"cu_seqlens": PACKED}),
    ((1, 1, 133, 70, 100), SINGLE, GROWS, None, {"cu_seqlens": PACKED}),
    ((1, 1, 133, 70, 100), SINGLE, "logsigmoid", None, {"cu_seqlens": PACKED}),
)
UNEVEN_ROWS = (1, 2, 1100, 60, 65)  # gradients in bfloat16 by copies with longer rows
SMALL_HEADS = (  # as for OPERATORS, and with gradients; in segments, but for the last
    ((1, 3, 300, 8, 8), BFLOAT16, "some-inf", None, {}),
    ((1, 1, 300, 16, 12), SINGLE, "logsigmoid", None, {}),
    ((1, 9, 133, 6, 5), HALF, GROWS, SINGLE, {"cu_seqlens": PACKED}),
)
GATED_VALUES = (  # as for OPERATORS, and with gradients
    ((2, 2, 13, 72, 40), BFLOAT16, GROWS, SINGLE, {}),  # few tokens
    ((1, 2, 40, 64, 64), BFLOAT16, "some-inf", None, {}),
    ((1, 1, 37, 136, 40), HALF, "logsigmoid", SINGLE, {}),
    ((1, 1, 133, 20, 9), SINGLE, "some-1e30", None, {"cu_seqlens": PACKED}),
    ((1, 2, 70, 200, 130), BFLOAT16, "trained", SINGLE, {}),  # more channels than a launch has
    ((1, 1, 1100, 64, 64), BFLOAT16, "logsigmoid", None, {}),  # in segments
    ((1, 2, 70, 64, 64), BFLOAT16, GROWS, None, {}),
    ((1, 2, 37, 20, 24), SINGLE, "logsigmoid", None, {"mode": "recurrent"}),
)
ATTENTION = (  # B H T K V, dtype, keywords
    ((1, 2, 150, 64, 64), BFLOAT16, {}),
    ((1, 1, 133, 100, 60), HALF, {"cu_seqlens": PACKED}),
    ((1, 1, 70, 20, 9), BFLOAT16, {"causal": False}),
    ((1, 1, 133, 20, 9), SINGLE, {"cu_seqlens": PACKED}),
    ((1, 2, 37, 136, 20), BFLOAT16, {}),
    ((1, 2, 300, 128, 128), BFLOAT16, {"softcap": 5.0, "window": (90, 0)}),
    ((1, 2, 200, 192, 128), HALF, {"scale": -0.1}),
)
FAMILY = (  # operator, B H T K V, dtype, keywords
    (simple_gla, SIMPLE_GLA, (1, 2, 133, 64, 128), BFLOAT16, {"cu_seqlens": PACKED}),
    (simple_gla, SIMPLE_GLA, (1, 1, 1100, 256, 64), HALF, {}),
    (simple_gla, SIMPLE_GLA, (1, 1, 1100, 64, 64), BFLOAT16, {}),
    (simple_gla, SIMPLE_GLA, (1, 1, 1100, 128, 64), BFLOAT16, {}),  # segments summarised by two blocks each
    (linear_attention, LINEAR_ATTENTION, (2, 2, 40, 20, 9), BFLOAT16, {"feature_map": "elu", "normalize": True}),
    (linear_attention, LINEAR_ATTENTION, (2, 2, 70, 64, 128), BFLOAT16, {"feature_map": "exp"}),
    (linear_attention, LINEAR_ATTENTION, (2, 2, 70, 20, 9), DOUBLE, {"feature_map": "elu", "normalize": True}),
    (simple_gla, SIMPLE_GLA, (1, 2, 133, 20, 300), DOUBLE, {"cu_seqlens": PACKED}),
    (rwkv6, RWKV6_OP, (2, 2, 70, 20, 300), DOUBLE, {}),
    (simple_gla, SIMPLE_GLA, (1, 66, 70, 128, 128), BFLOAT16, {}),  # dk and dv in wide blocks
    (linear_attention, LINEAR_ATTENTION, (1, 66, 70, 128, 128), BFLOAT16, {"feature_map": "relu"}),
)  # dq apart
STEPS = (  # B H K V, dtype, the state's dtype, slots or None
    ((3, 2, 64, 64), BFLOAT16, SINGLE, None),
    ((2, 2, 100, 60), SINGLE, BFLOAT16, None),
    ((2, 1, 20, 9), HALF, HALF, [3, 0]),
    ((2, 1, 300, 136), SINGLE, SINGLE, [1, 2]),
    ((2, 1, 20, 9), DOUBLE, DOUBLE, None),
)


def drawn(declared, rng, sizes, dtype, gate="logsigmoid", gate_dtype=None, cu_seqlens=()):
    """(the arrays of a call, an initial state or none)."""
    sizes = dict(zip("BHTKV", sizes), N=len(cu_seqlens) - 1 if cu_seqlens else sizes[0])
    arrays = draw(declared, rng, sizes, dtype, "logsigmoid" if gate in (GROWS, TINY) else gate, gate_dtype)
    if gate == GROWS:
        for name, x in zip(declared.arrays, arrays):
            if name in DECAYS:
                x[:, :, 5::16] = 1.5
    if gate == TINY:
        arrays[1][:, :, 40::7] *= 1e-7
    return arrays, draw_states(declared, rng, sizes, SINGLE)


def on_copies(sizes, dtype) -> bool:
    """Whether rows of K or V numbers are not whole pieces of 16 bytes: copies of the results read what tensor stores
    wrote."""
    return any(n * dtype.itemsize % 16 for n in sizes[-2:])


def operators(rng, run, as_filled):
    """`run` takes a function and its arrays and keywords, on the host. Yields after every call, as the others do."""
    for op, declared in DECLARED:
        for sizes, dtype, gate, gate_dtype, keywords in OPERATORS:
            call = partial(as_filled, run) if on_copies(sizes, dtype) else run
            arrays, (state,) = drawn(declared, rng, sizes, dtype, gate, gate_dtype, keywords.get("cu_seqlens"))
            yield call(op, *arrays, **keywords, initial_state=state, output_final_state=True)
        arrays, _ = drawn(declared, rng, (2, 80, 7, 70, 20), BFLOAT16)  # few tokens of many heads
        yield run(op, *arrays, output_final_state=True)


def backward(op, *arrays, initial_state=None, **keywords):
    """Gradients of the arrays; v and the initial state stand for those of the result, as they have its shapes."""
    given = {} if initial_state is None else {"initial_state": initial_state}
    _, pull = vjp(op, *arrays, **given, **keywords)
    return pull(arrays[[*signature(op).parameters].index("v")], *given.values())


def gradients(rng, run, as_filled):
    for op, declared in DECLARED:
        for sizes, dtype, gate, gate_dtype, keywords in GRADIENTS:
            call = partial(as_filled, run) if on_copies(sizes, dtype) else run
            arrays, (state,) = drawn(declared, rng, sizes, dtype, gate, gate_dtype, keywords.get("cu_seqlens"))
            yield call(backward, op, *arrays, **keywords, initial_state=state)
        arrays, (state,) = drawn(declared, rng, (2, 3, 13, 70, 20), BFLOAT16)  # few tokens
        yield run(backward, op, *arrays, initial_state=state)
        arrays, (state,) = drawn(declared, rng, UNEVEN_ROWS, BFLOAT16)
        yield as_filled(run, backward, op, *arrays, initial_state=state)


def small_heads(rng, run):
    """By kernels that take many more tokens, where nobody asks otherwise."""
    least = segments.SMALL_TOKENS, segments.SMALL_TOKENS_ON_HOPPER
    segments.SMALL_TOKENS = segments.SMALL_TOKENS_ON_HOPPER = 0
    try:
        for op, declared in (*DECLARED, (gla, GLA_VALUE_GATE)):
            for sizes, dtype, gate, gate_dtype, keywords in SMALL_HEADS:
                arrays, (state,) = drawn(declared, rng, sizes, dtype, gate, gate_dtype, keywords.get("cu_seqlens"))
                yield run(op, *arrays, **keywords, initial_state=state, output_final_state=True)
                yield run(backward, op, *arrays, **keywords, initial_state=state)
    finally:
        segments.SMALL_TOKENS, segments.SMALL_TOKENS_ON_HOPPER = least


def gated_values(rng, run):
    for sizes, dtype, gate, gate_dtype, keywords in GATED_VALUES:
        arrays, (state,) = drawn(GLA_VALUE_GATE, rng, sizes, dtype, gate, gate_dtype, keywords.get("cu_seqlens"))
        yield run(gla, *arrays, **keywords, initial_state=state, output_final_state=True)
        yield run(backward, gla, *arrays, **keywords, initial_state=state)


def attention(rng, run):
    for sizes, dtype, keywords in ATTENTION:
        arrays, _ = drawn(SOFTMAX_ATTENTION, rng, sizes, dtype, cu_seqlens=keywords.get("cu_seqlens"))
        yield run(backward, softmax_attention, *arrays, **keywords)
    arrays, _ = drawn(SOFTMAX_SINKS, rng, (1, 2, 70, 64, 64), BFLOAT16)
    yield run(backward, softmax_attention, *arrays)
    with mock.patch.object(
        softmax_tiles, "LEAST_CHUNKS", 0
    ):  # gradients of scores are kept, as those of long sequences
        for D in (64, 128):
            kept, _ = drawn(SOFTMAX_ATTENTION, rng, (1, 2, 300, D, D), BFLOAT16)
            yield run(backward, softmax_attention, *kept, window=(200, 0))
    cache, _ = drawn(SOFTMAX_ATTENTION, rng, (1, 2, 4000, 64, 64), BFLOAT16)  # a token against it: its keys are split
    yield run(softmax_attention, cache[0][:, :, -1:], *cache[1:], arrays[3])


def family(rng, run, as_filled):
    for op, declared, sizes, dtype, keywords in FAMILY:
        arrays, _ = drawn(declared, rng, sizes, dtype, cu_seqlens=keywords.get("cu_seqlens"))
        yield run(op, *arrays, **keywords)
        yield as_filled(run, backward, op, *arrays, **keywords)
    for dtype in (BFLOAT16, DOUBLE):  # heads of v that share those of q and k
        (q, k, *others), _ = drawn(SIMPLE_GLA, rng, (2, 4, 70, 64, 64), dtype)
        yield as_filled(run, backward, simple_gla, q[:, ::2], k[:, ::2], *others)


def messages(rng, run, as_filled):
    """What ranks tell each other of their tokens, before the others' messages are there."""
    for op, declared in (*DECLARED, (simple_gla, SIMPLE_GLA)):
        arrays, _ = drawn(declared, rng, (1, 1, 1100, 64, 64), BFLOAT16)
        yield as_filled(run, told, op, declared, *arrays)


def told(op, declared, *arrays, **how):
    return summarise(declared, arrays, **how), vjp(op, *arrays, **how)[1].summarise(arrays[2])


def steps(rng, run):
    for op, declared in ((gla_step, GLA_STEP), (rwkv6_step, RWKV6_STEP)):
        for sizes, dtype, state_dtype, slots in STEPS:
            B, *rest = sizes
            state = rng.standard_normal((B + 2, *rest) if slots else sizes).astype(state_dtype)
            yield run(op, *draw(declared, rng, dict(zip("BHKV", sizes)), dtype), state, slots=slots)


def delta_rules(rng, run, as_older, as_filled):
    """Token by token, in chunks on every card, in segments, and steps."""
    for K, V, keywords in ((60, 72, {"cu_seqlens": PACKED}), (128, 136, {"qk_l2norm": True})):
        arrays, _ = drawn(GATED_DELTA_RULE, rng, (1, 2, 133, K, V), BFLOAT16)
        yield as_older(gated_delta_rule, *arrays, **keywords)
        yield as_filled(run, backward, gated_delta_rule, *arrays, **keywords)
        arrays, _ = drawn(KDA, rng, (1, 2, 133, K, V), BFLOAT16)
        arrays[3][:, :, 40] = 1  # a chunk that grows
        yield run(kda, *arrays, **keywords, mode="chunk")
        yield as_filled(run, backward, kda, *arrays, **keywords)
        arrays, _ = drawn(DELTA_RULES[-1], rng, (1, 2, 133, K, V), BFLOAT16)
        arrays[1][:, :, 40] = 1  # a chunk that grows
        yield run(rwkv7, *arrays, mode="chunk")
        yield as_filled(run, backward, rwkv7, *arrays)
    for (op, function), T in product(((KDA, kda), (DELTA_RULES[-1], rwkv7)), (128, 2048)):
        arrays, _ = drawn(op, rng, (1, 2, T, 64, 64), BFLOAT16)
        yield run(backward, function, *arrays)  # from what the call keeps; long sequences in segments
    for dtype, T in ((BFLOAT16, 4096), (SINGLE, 700), (DOUBLE, 700)):
        arrays, _ = drawn(KDA, rng, (1, 1, T, 60, 64), dtype)
        yield run(kda, *arrays)
        yield run(backward, kda, *arrays)
    for op, function in ((GATED_DELTA_RULE, gated_delta_rule), (DELTA_RULES[-1], rwkv7)):
        arrays, _ = drawn(op, rng, (1, 2, 37, 130, 64), SINGLE)
        for mode in ("chunk", "recurrent"):
            yield run(function, *arrays, mode=mode)
            yield as_filled(run, backward, function, *arrays, mode=mode)
    for op, declared, (K, V), dtype in zip(
        RULES, DELTA_RULES, cycle(((64, 40), (130, 64))), DELTA_DTYPES, strict=False
    ):
        arrays, _ = drawn(declared, rng, (1, 2, 37, K, V), dtype)
        yield run(op, *arrays)
        yield as_filled(run, backward, op, *arrays)
    for op, declared, dtype in zip(RULES, DELTA_RULES, cycle((BFLOAT16, SINGLE)), strict=False):
        arrays, _ = drawn(declared, rng, (2, 200, 61, 5, 8), dtype)  # many small heads
        yield run(op, *arrays)
        yield as_filled(run, backward, op, *arrays)
    arrays, _ = drawn(DELTA_RULES[-1], rng, (1, 1, 4096, 1, 3), SINGLE)  # few of them, in segments
    yield run(rwkv7, *arrays)
    yield run(backward, rwkv7, *arrays)
    for op, declared, state_dtype in zip(RULE_STEPS, DELTA_RULE_STEPS, cycle((SINGLE, BFLOAT16)), strict=False):
        for K, V in ((64, 70), (3, 130)):
            state = rng.standard_normal((3, 2, K, V)).astype(state_dtype)
            yield run(op, *draw(declared, rng, {"B": 2, "H": 2, "K": K, "V": V}, BFLOAT16), state, slots=[2, 0])


def steps_of_several(rng, run):
    """Those that were accepted, and new ones."""
    for op, declared, dtype in zip(
        (gla_step, rwkv6_step, *RULE_STEPS), DECLARED_STEPS, cycle((BFLOAT16, SINGLE, DOUBLE)), strict=False
    ):
        sizes = dict(zip("BHTKV", (2, 2, 3, 60, 70)))
        real = DOUBLE if dtype == DOUBLE else SINGLE
        state = rng.standard_normal((3, 2, 60, 70)).astype(dtype)
        pending = rng.standard_normal((3, 2, 4, sum(declared.numbers(60, 70)))).astype(real)
        accepted = np.array([4, 0], np.int64)
        arrays = draw(declared.of_several, rng, sizes, dtype)
        yield run(op, *arrays, state, slots=[2, 0], pending=pending, accepted=accepted)


def delta_rules_on_hopper(rng, device):
    """Seven chunks and nine: more than a block has stages."""
    for dtype, K, V in product((BFLOAT16, HALF), (64, 128), (64, 128)):
        kernel, bounds = DeltaScalarForwardSm90(dtype, K, V), [0, 5, 5, 200, 261] if V == 64 else None
        tokens = delta_tokens(rng, 1, 2, 4, 261, K, V, dtype, "some -inf", "alike", "sigmoid")
        state = rng.standard_normal((len(bounds) - 1 if bounds else 1, 4, K, V)).astype(SINGLE)
        for P in (1, 3):
            yield delta_call(device, kernel, tokens, K**-0.5, state, bounds, P)
        do = rng.standard_normal(tokens[2].shape).astype(dtype)
        P = 3 if bounds else 1
        how = {"normalized": K == 128, "P": P, "first_P": P}
        yield delta_gradients(device, tokens, do, K**-0.5, state, state, bounds, **how)


EIGHT_BITS = np.dtype(np.int8)


def decoding(rng, device):
    """A model's steps: all layers in one launch, of as many weights as go around a block's ring; in several; and beyond
    128 sequences, where cuBLAS multiplies int8."""
    few, wide, around = ((RWKV6, SIZES[sizes]) for sizes in ("small", "wide heads", "odd"))
    seven, seven_of_64 = ((RWKV7, SIZES["wide heads"] | {"H": 128 // N, "N": N}) for N in (16, 64))
    decoders = (
        decoder_of(kind, random_weights(kind, rng, BFLOAT16, sizes), dtype, B, device)
        for (kind, sizes), dtype, B in (
            (seven_of_64, BFLOAT16, 1),
            (seven, SINGLE, 1),
            (seven_of_64, EIGHT_BITS, 1),
            (seven_of_64, BFLOAT16, 3),
            (seven_of_64, HALF, 9),
            (seven_of_64, BFLOAT16, 600),  # rows of states in shared memory
            (seven, SINGLE, 3),
            (seven, BFLOAT16, 3),
            (seven, HALF, 9),
            (around, BFLOAT16, 1),
            (around, SINGLE, 1),
            (few, SINGLE, 3),
            (few, HALF, 3),
            (few, BFLOAT16, 9),
            (wide, BFLOAT16, 33),
            (few, BFLOAT16, 130),
            (wide, EIGHT_BITS, 1),
            (few, EIGHT_BITS, 9),
            (wide, EIGHT_BITS, 130),
        )
    )
    for decoder in decoders:
        tokens, state = device.upload(rng.integers(0, SMALL["V"], decoder.batch)), decoder.initial_state()
        for _ in range(2):
            yield decoder.step(tokens, state)


def squares(rng, device):
    """Five tiles of two clusters, which go around their ring."""
    for dtype in (BFLOAT16, HALF):
        x, w = (rng.standard_normal((rows, 328)).astype(dtype) for rows in (130, 1032))
        yield squared_product(device, x, w)


def model_in_filled_memory(kind, weights, dtype):
    """Its memory is filled as `as_filled` has it for operators: initcheck does not see what tensor stores write."""
    model = kind(weights, "cuda", dtype)
    model.layers.device.empty = model.layers.device.zeros
    return model


def prompts(rng, as_filled):
    for kind, dtype in product((RWKV6, RWKV7), (SINGLE, BFLOAT16)):
        model = model_in_filled_memory(kind, random_weights(kind, rng, BFLOAT16), dtype)
        yield as_filled(model.forward, rng.integers(0, SMALL["V"], (2, 37)))
        yield as_filled(model.forward, rng.integers(0, SMALL["V"], (1, 9)), cu_seqlens=[0, 3, 4, 9])
    weights = random_weights(RWKV7, rng, BFLOAT16, sizes=SMALL | {"D": 128, "H": 2, "N": 64})
    model = model_in_filled_memory(RWKV7, weights, BFLOAT16)
    yield as_filled(model.forward, rng.integers(0, SMALL["V"], (1, 70)), cu_seqlens=[0, 33, 70])
    for act in HiddenActivation.NAMES:
        weights = random_weights(RWKV6, rng, BFLOAT16) | named_activation(act)
        model = model_in_filled_memory(RWKV6, weights, BFLOAT16)
        yield as_filled(model.forward, rng.integers(0, SMALL["V"], (2, 5)))


def trainings(rng, as_filled, device):
    """Gradients of a model, its activations kept and recomputed; a step of AdamW."""
    for dtype, recompute in ((SINGLE, False), (BFLOAT16, True)):
        for kind in (RWKV6, RWKV7):
            yield as_filled(on_device, device, dtype, *model(kind, rng, (2, 11)), SEEDS, 0.3, recompute)
        yield adamw(device, dtype, rng.random((4, 808), np.float32), 400, 0.01, 0.99, 3)


def calls(rng, run, as_older, as_filled, device, filled):
    """`as_older`: `run` as on a card before Hopper; `as_filled`: any function, with something in every array before
    it is written, as arrays of the device `filled` have."""
    return chain(
        operators(rng, run, as_filled),
        gradients(rng, run, as_filled),
        small_heads(rng, run),
        gated_values(rng, run),
        attention(rng, partial(as_filled, run)),
        attention(rng, partial(as_filled, as_older)),
        family(rng, run, as_filled),
        messages(rng, run, as_filled),
        steps(rng, run),
        steps_of_several(rng, run),
        delta_rules(rng, run, as_older, as_filled),
        delta_rules_on_hopper(rng, filled),
        decoding(rng, device),
        squares(rng, device),
        prompts(rng, as_filled),
        trainings(rng, as_filled, device),
    )


class Filled(devices.CupyDevice):
    def empty(self, shape, dtype):
        return self.zeros(shape, dtype)


def kernel_files():
    return {path.relative_to(source.root()).with_suffix("").as_posix() for path in source.root().rglob("*.cu")}


def compile_all(calls):
    """Compiles the kernels of `calls`, each on a thread of its own; `calls` prepare launches, but launch nothing."""
    kernels = set()

    def note(_, kernel, *__, **___):
        kernels.add(kernel)
        return lambda *_: None

    with (
        mock.patch.object(devices.CupyDevice, "prepared", note),
        mock.patch.object(devices.OverlappedDevice, "prepared", note),
        mock.patch.object(Cublas, "prepared", lambda *_, **__: lambda: None),
    ):
        for _ in calls:
            pass
    devices.CupyDevice().wait_for(kernels)
    print(f"{len(kernels)} kernels are compiled")


def main(arguments):
    import cupy

    from linattn_np.backends import cupy as kernels

    def there(x):
        return cupy.asarray(x) if isinstance(x, np.ndarray) else x

    def run(function, *arrays, **keywords):
        return function(*map(there, arrays), **{name: there(x) for name, x in keywords.items()})

    def as_older(*call, **keywords):
        with choose_kernels("portable"):
            return run(*call, **keywords)

    def as_filled(function, *arguments, **keywords):
        """initcheck does not see what tensor stores write, which in these calls other kernels read."""
        device, kernels.DEVICE = kernels.DEVICE, Filled()
        try:
            return function(*arguments, **keywords)
        finally:
            kernels.DEVICE = device

    def filled_before(self, a, b, y, add=False):
        """initcheck does not see what cuBLAS writes by tensor copies, so something must be there before."""
        multiply = prepared(self, a, b, y, add)
        return multiply if add else lambda: (y.fill(0), multiply())

    prepared, Cublas.prepared = Cublas.prepared, filled_before
    cupy.cuda.set_allocator(None)
    devices.OPTIONS += ("-lineinfo",)  # reports name lines
    compiled, program = set(), devices.program

    def noted(kernels):
        compiled.update(kernel.file for kernel in kernels)
        return program(kernels)

    devices.program = noted
    every = calls(np.random.default_rng(), run, as_older, as_filled, devices.best_device(), Filled())
    if arguments == ["--compile"]:
        return compile_all(every)
    count = 0
    for _ in every:
        cupy.cuda.Device().synchronize()
        count += 1
    print(f"{count} calls of {len(compiled)} kernel files")
    if missed := kernel_files() - compiled:
        sys.exit(f"launched by no call: {', '.join(sorted(missed))}")


if __name__ == "__main__":
    main(sys.argv[1:])
