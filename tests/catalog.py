"""Every instance of a kernel that planners and models can ask for: the compile check compiles all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np

from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import delta_kernels as delta
from linattn_np.backends.cupy import elementwise_kernels as passes
from linattn_np.backends.cupy import (
    float64,
    model_products,
    softmax,
    stages,
    step,
    value_gate,
)
from linattn_np.backends.cupy import gated_kernels as gated
from linattn_np.backends.cupy import rwkv6_model_kernels as rwkv6
from linattn_np.backends.cupy import rwkv6_training_kernels as training
from linattn_np.backends.cupy import rwkv7_model_kernels as rwkv7
from linattn_np.backends.cupy.delta_hopper import (
    DeltaInverseLengths,
    DeltaScalarBackwardStatesSm90,
    DeltaScalarBackwardTokensSm90,
    DeltaScalarForwardSm90,
    DeltaScalarSummarySm90,
)
from linattn_np.backends.cupy.kernel import CTYPES, DOUBLE, FLOATS, HALF, INT8
from linattn_np.backends.cupy.rank_summary import Message
from linattn_np.backends.cupy.scalar_decay_kernels import WeightedSums

SINGLE = np.dtype(np.float32)
READ_ORDERS = ("AfterWrite", "BeforeWrite")
GATES = [(T, T) for T in CTYPES] + [(T, SINGLE) for T in HALF]  # a gate is like q, or float32
WIDTHS = tuple(product(gated.TILES, gated.TILES))
LEAST_SHARED, MOST_SHARED = 99 * 1024, 227 * 1024  # bytes that a block may have, by card
ROOMS = LEAST_SHARED, 163 * 1024, MOST_SHARED  # the same on all cards that are served


def kernels():
    yield from on_every_card()
    yield from gated_on_hopper()
    yield from scalar_decays()
    yield from delta_rules()
    yield from steps_of_several()
    yield from value_gates()
    yield from element_by_element()
    yield from in_float64()
    yield from softmax_attention()
    yield from of_models()
    yield from of_training()


def on_every_card():
    for (T, G), (K, V) in product(GATES, WIDTHS):
        for products in (1, 3) if T == SINGLE else (1,):
            instance = T, G, products, K, V
            for order in READ_ORDERS:
                yield gated.GatedForward.fitting(order, gated.SINGLE_PASS, *instance, MOST_SHARED)
            if T != HALF[0] or V == gated.TILES[0]:
                yield gated.GatedSegmentStates.fitting(*instance, MOST_SHARED)
    for (T, G), order in product(GATES, READ_ORDERS):
        for products in (1, 3) if T == SINGLE else (1,):
            yield from split_channels(order, T, G, products)
        if T == BFLOAT16:
            yield gated.GatedWideOperands(order, T, G)
        for size, gates_columns in product(gated.SMALL_SIZES, (False, True) if order == "AfterWrite" else (False,)):
            yield from (gated.GatedSmallForward(order, T, G, size, gates_columns, outputs) for outputs in (True, False))
            yield gated.GatedSmallBackward(order, T, G, size, gates_columns)
        for longest in gated.SHORT_SEQUENCES:
            yield gated.GatedShortForward(order, T, G, longest)
            yield gated.GatedShortBackward(order, T, G, TOKENS=longest)
        for size in gated.CHANNELS:
            yield gated.Recurrent(order, T, G, size)
            yield stages.IntraChunk(order, T, G, size)
        exact = T == SINGLE or (order == "AfterWrite" and G == SINGLE)  # half data under a scalar decay
        for products in (1, 3) if exact else (1,):
            for V in gated.GatedBackwardStates.widths(T, products):
                yield gated.GatedBackwardStates(order, T, G, products, V)
            yield gated.GatedBackwardChannels(order, T, G, products)
            for V in gated.TILES:
                yield gated.GatedBackwardValues(order, T, G, products, V)
        for S in CTYPES:
            yield step.RecurrentStep(order, T, G, S)
    for T in CTYPES:
        yield stages.ChunkCumsum(T)
        yield stages.InterChunk(T)
        yield stages.Combine(T)
        for order in READ_ORDERS:
            yield stages.GatedQk(order, T)
    for tiles in range(2, gated.GatedWideForward.MOST_TILES + 1):
        yield gated.GatedWideForward(BFLOAT16, tiles)
    for width in (1, 4):
        yield from (gated.ScanSegments(width, grouped) for grouped in (False, True))
    yield from (gated.ScanBothWays(grouped) for grouped in (False, True))
    yield Message()


def split_channels(order, T, G, products):
    """Of K over 128: whole launches, and the last one of few channels."""
    K, found = gated.TILES[-1] + 1, {}
    for V, shared in product(gated.TILES, (MOST_SHARED, LEAST_SHARED)):
        kernel = gated.GatedForward.fitting(order, gated.SPLIT_CHANNELS, T, G, products, K, V, shared)
        found |= dict.fromkeys((kernel, kernel.with_channels(1)))
    return found


def gated_on_hopper():
    for T, order in product(HALF, READ_ORDERS):
        for G in (T, SINGLE, *[gated.SCALAR] * (order == "AfterWrite")):
            for V in gated.TILES:
                yield gated.GatedForwardSm90.fitting(order, gated.CLUSTER_SPLIT_K, T, G, 256, 2 * V)
            for K, V in WIDTHS:
                if order == "AfterWrite":
                    yield gated.GatedForwardSm90.fitting(order, gated.SEGMENT_STATE, T, G, K, V)
                if (T, G) != (BFLOAT16, gated.SCALAR):  # that is `WeightedSums`
                    yield gated.GatedForwardSm90.fitting(order, gated.SINGLE_PASS, T, G, K, V)
            for K in gated.TILES:
                if G != gated.SCALAR:
                    yield gated.GatedForwardSm90.fitting(order, gated.CLUSTER_SPLIT_V, T, G, K, gated.TILES[-1])
    main = (gated.GatedBackwardQueriesSm90, gated.GatedBackwardKeysSm90)
    for order, (T, G), (K, V) in product(READ_ORDERS, GATES[1:], WIDTHS):
        yield gated.GatedBackwardSegmentsSm90.fitting(order, T, G, K, V)
        for cls, schedule in product(main, (gated.ONE_EACH, gated.IN_TURN)):
            yield cls.fitting(order, T, G, K, V, schedule)


def scalar_decays():
    for G, (K, V) in product((BFLOAT16, SINGLE), WIDTHS):
        yield WeightedSums("Whole", G, K, V)
        yield WeightedSums("Summary", G, K, V)
        if G == SINGLE and V <= K:
            yield WeightedSums("Gradients", G, K, V)
    for K in gated.TILES:
        yield WeightedSums("Queries", SINGLE, K, gated.PANEL)
    yield WeightedSums("Keys", SINGLE, gated.TILES[-1], gated.TILES[-1])
    for what, G, (K, V) in product(("GatedQueries", "GatedKeys"), (BFLOAT16, SINGLE), WIDTHS):
        if V <= K:
            yield WeightedSums(what, G, K, V)
    for K, V in WIDTHS:
        yield WeightedSums("BothSummaries", SINGLE, K, V)


def delta_rules():
    """On every card and on Hopper."""
    for (T, G), rule in product([*GATES, (DOUBLE, DOUBLE)], (delta.GATED_DELTA, delta.KDA, delta.DPLR)):
        for size in gated.CHANNELS:
            for columns in delta.DeltaRecurrentForward.widths(T):
                yield delta.DeltaRecurrentForward(rule, T, G, size, columns)
            rooms = (*ROOMS, delta.SHARING)
            backward = dict.fromkeys(delta.DeltaRecurrentBackward.fitting(rule, T, G, size, room) for room in rooms)
            yield from (replace(kernel, outputs=outputs) for kernel in backward for outputs in (True, False))
            yield from (delta.DeltaStep(rule, T, G, S, size, BV) for S, BV in product(FLOATS, delta.DeltaStep.WIDTHS))
        yield from (delta.DeltaStep(rule, T, G, S, *delta.DeltaStep.FEW) for S in FLOATS if S != DOUBLE)
    for (T, G), rule, size in product(GATES, (delta.GATED_DELTA, delta.KDA, delta.DPLR), gated.SMALL_SIZES):
        for walk in (delta.DeltaSmallForward, delta.DeltaSmallBackward):
            yield from (walk(rule, T, G, size, outputs) for outputs in (True, False))
    for T in FLOATS:
        yield delta.DeltaSumParts(T)
    prepares = (delta.DeltaPrepare, delta.DeltaChannelPrepare, delta.DeltaDplrPrepare)
    for prepare, (T, G), K, gradient in product(prepares, GATES, gated.CHANNELS, (False, True)):
        yield prepare(T, G, K, gradient)
    yield from (delta.DeltaDplrPrepare(T, T, 64, False, logits=True) for T in HALF)
    yield from dict.fromkeys(kernel for walk in walks() for kernel in (walk, walk.summary))
    yield from (delta.DeltaJoinSegments(R, K) for R, K in product((SINGLE, DOUBLE), gated.CHANNELS))
    for T, G in GATES:
        yield from (delta.DeltaBackwardChunks(T, G, K) for K in gated.CHANNELS)
        yield delta.DplrBackwardChunks(T, G)
        yield delta.KdaBackwardChunks(T, G)
    yield from map(DeltaInverseLengths, HALF)
    for T, (K, V) in product(HALF, WIDTHS):
        yield DeltaScalarForwardSm90(T, K, V)
        yield DeltaScalarSummarySm90(T, K, V)
        yield from (DeltaScalarBackwardStatesSm90(T, K, V, outputs) for outputs in (True, False))
        yield DeltaScalarBackwardTokensSm90(T, K, V)


def walks():
    """Those in chunks on the cards that are served, by the shared memory of a block. A card of one multiprocessor has
    blocks of all V columns."""
    for room, T, K, V, rule in product(ROOMS, CTYPES, gated.CHANNELS, gated.TILES, (delta.GATED_DELTA, delta.DPLR)):
        sizes = T, K, V, rule, 1, SimpleNamespace(shared_per_block=room, multiprocessors=1)
        yield delta.DeltaScan.fitting(*sizes)
        for of in delta.DeltaBackwardStates.DIRECTIONS[: None if K in gated.TILES else 1]:
            yield delta.DeltaBackwardStates.fitting(*sizes, of=of)
    for T, two_writes, of in product(HALF, (False, True), delta.DeltaBackwardStates.DIRECTIONS):
        yield delta.DeltaBackwardStates(T, 64, delta.DeltaBackwardStates.NARROW, two_writes, 2, of=of)


def steps_of_several():
    for (T, G), S, size in product([*GATES, (DOUBLE, DOUBLE)], FLOATS, gated.CHANNELS):
        for rule in (step.GLA, step.BEFORE_WRITE, delta.GATED_DELTA, delta.KDA):
            yield step.StepOfSeveral(rule, T, G, S, size)
        if size <= 128 or DOUBLE not in (T, S):
            yield step.StepOfSeveral(delta.DPLR, T, G, S, size)


def value_gates():
    for T, G in GATES:
        for products in (1, 3) if T == SINGLE else (1,):
            for K, V in WIDTHS:
                yield value_gate.ValueGateForward(gated.SINGLE_PASS, T, G, products, K, V)
                yield value_gate.ValueGateForward(gated.SEGMENT_STATE, T, G, products, K, V)
                if T == BFLOAT16 or K == gated.TILES[-1]:
                    yield value_gate.ValueGateForward(gated.SPLIT_CHANNELS, T, G, products, K, V)
            yield value_gate.ValueGateBackwardScores(T, G, products)
            for columns in ("Gated", "GatedTurned"):
                yield gated.GatedBackwardChannels("AfterWrite", T, G, products, columns)
            yield value_gate.ValueGateBackwardStates(T, G, products)
        yield gated.GatedShortBackward("AfterWrite", T, G, gates_columns=True)
        for size in gated.CHANNELS:
            yield gated.Recurrent("AfterWrite", T, G, size, gates_columns=True)


def softmax_attention():
    for T in HALF:
        for cls in (softmax.SoftmaxForward, softmax.SoftmaxBackwardQueries, softmax.SoftmaxBackwardKeys):
            for (D,), capped in product(cls.COLUMNS, (False, True)):
                yield cls(T, D, capped)
        for capped in (False, True):
            for K, V in softmax.SoftmaxForwardSm90.COLUMNS:
                yield softmax.SoftmaxForwardSm90(T, K, V, capped)
            for cls in (softmax.SoftmaxBackwardQueriesSm90, softmax.SoftmaxBackwardKeysSm90):
                for (D,) in cls.COLUMNS:
                    yield cls(T, D, capped)
        yield softmax.SoftmaxStatistics(T)
        for (D,) in softmax.SoftmaxQueryGradient.COLUMNS:
            yield softmax.SoftmaxQueryGradient(T, D)
    for T in FLOATS:
        for what in softmax.SoftmaxPlain.PASSES:
            yield softmax.SoftmaxPlain(what, T)


ROW_BY_ROW = passes.Divide, passes.DivideGradient, passes.SumArrays, passes.SumHeads, passes.GateGradient


def element_by_element():
    for pieces in (1, 4):
        yield passes.CopyRows(pieces)
    for T in HALF:
        yield passes.FeatureMap("Identity", SINGLE, T)
    for (T, Y), phi in product(GATES, passes.FEATURE_MAPS.values()):
        yield passes.FeatureMap(phi, T, Y)
        if phi != "Identity":
            yield passes.FeatureGradient(phi, T, Y)
    for T, cls in product(CTYPES, ROW_BY_ROW):
        yield cls(T)


def in_float64():
    for cls, order, columns in product((float64.Forwards, float64.Backwards), READ_ORDERS, float64.COLUMNS):
        yield cls(order, columns)
    for order, (T, G), S in product(READ_ORDERS, [*GATES, (DOUBLE, DOUBLE)], FLOATS):
        if DOUBLE in (T, S):
            yield step.RecurrentStep(order, T, G, S)
    yield stages.ChunkCumsum(DOUBLE)
    for order in READ_ORDERS:
        yield stages.GatedQk(order, DOUBLE)
        yield stages.Float64IntraChunk(order)
    yield stages.Float64InterChunk()
    yield stages.Float64Combine()
    for phi in passes.FEATURE_MAPS.values():
        yield passes.FeatureMap(phi, DOUBLE, DOUBLE)
        if phi != "Identity":
            yield passes.FeatureGradient(phi, DOUBLE, DOUBLE)
    for cls in ROW_BY_ROW:
        yield cls(DOUBLE)


def terms_of(X) -> tuple[int, ...]:
    """Numbers of type X that a step hands to products for a float."""
    return (1, model_products.FLOAT_TERMS) if X in HALF else (1,)


def of_models():
    for T in CTYPES:
        yield rwkv6.Openings.of_prompt(T)
        norm = rwkv6.NormShift
        for how in product(norm.WIDTHS, norm.PARTS_AT_MOST, terms_of(T), norm.MIXES_AT_MOST):
            yield norm(T, *how)
        for shape in rwkv6.ShiftMix.SHAPES:
            yield rwkv6.ShiftMix(T, *shape)
        for how in product(rwkv6.GatedNorm.WIDTHS, rwkv6.GatedNorm.DEPTHS, (False, True)):
            yield rwkv6.GatedNorm(T, *how)
        yield rwkv6.GatedNorm.fitting(T, rwkv6.GatedNorm.MOST_N, BONUS=False)
        for threads in model_products.Matvec.THREADS:
            yield model_products.Matvec(T, threads)
        yield rwkv6.DataMix.of_prompt(T)
        yield rwkv6.DataMix.of_step(T, T, 256)
        steps = (1, 1), (1, terms_of(T)[-1]), (256, 1)  # sequences, and terms of a float
        yield from dict.fromkeys(rwkv6.Openings.of_step(T, T, *how, rwkv7.DOWNS) for how in steps)
        for S, terms, width in product(CTYPES, terms_of(T), rwkv6.TimeMixBatch.WIDTHS):
            yield rwkv6.TimeMixBatch(T, S, terms, width)
        for X in dict.fromkeys((T, SINGLE)):
            for terms in terms_of(X):
                yield rwkv6.DataMix.of_step(T, X, 1, terms)
                for S in CTYPES:
                    yield rwkv6.TimeMixStep(T, X, S, terms)
            yield rwkv6.ReluSquared(X, T)
            yield rwkv6.ChosenNorm(X, T)
        if T != np.float16:
            names = dict.fromkeys(rwkv6.HiddenActivation.NAMES.values())
            yield from (rwkv6.HiddenActivation(T, name) for name in names)
        if T != SINGLE:
            yield rwkv6.ChosenNorm(T, SINGLE)
    for cls in (rwkv6.DecodeFew, rwkv7.DecodeOne):
        for T, S, depth in product((*CTYPES, INT8), CTYPES, cls.STAGES):
            yield cls(T, S, depth)
    many = model_products.BatchProduct
    for T in many.DTYPES:
        for kernel in dict.fromkeys(kernel for B in range(1, many.MOST + 1) for kernel in many.choices(T, B)):
            yield from (replace(kernel, DEEP=deep) for deep in (False, True) if kernel.may_be_deep or not deep)
    for T in HALF:
        yield from model_products.WideProduct.all(T)
        yield model_products.SquaredProduct(T)
    yield rwkv6.Widen(BFLOAT16)
    for X in CTYPES:
        yield rwkv6.GatedAdd(X)
        yield rwkv6.LowActivations(X)
        for how in product(rwkv7.Keys.WIDTHS, rwkv7.Keys.DEPTHS):
            yield rwkv7.Keys(X, *how)
        for S, terms in product(CTYPES, terms_of(X)):
            yield rwkv7.TimeMixOfToken(X, S, terms)
            yield from (rwkv7.TimeMixOfHeads(X, S, terms, held) for held in (4, rwkv7.TimeMixOfHeads.ROWS))


def of_training():
    for T in CTYPES:
        for cls in (
            training.LogDecayForward,
            training.MixForward,
            training.LowRanks,
            training.LowRanksBackward,
            training.CrossEntropy,
            training.AdamW,
        ):
            yield cls(T)
        for head in product(training.OfHeads.WIDTHS, (False, True)):
            yield training.KeysBackward(T, *head)
            yield from (training.GatedNormBackward(T, *head, bonus) for bonus in (False, True))
        yield from (training.MixBackward(T, threads) for threads in training.MixBackward.WIDTHS)
        for threads in training.WIDTHS:
            yield training.LogDecayBackward(T, threads)
            for change, C in product(training.AddNorm.CHANGES, training.AddNorm.MIXES):
                yield training.AddNorm(T, threads, change, C)
            for change, C in product(training.NormBackward.CHANGES, training.NormBackward.MIXES):
                if C <= 2 or change == "Added":  # RWKV-7's channel mix has no gate
                    yield training.NormBackward(T, threads, change, C)
    yield training.ColumnSums()
    yield training.SquareSums()
