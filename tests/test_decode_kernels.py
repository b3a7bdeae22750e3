"""The kernels of a decoding step through their host plan, token by token, against the NumPy model."""

from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import catalog
import ml_dtypes
import numpy as np
import pytest
from fla_names import named_activation
from planned import host

from linattn_np import ContractError, NotSupported
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import model_products as products
from linattn_np.backends.cupy import rwkv6_model_kernels as kernels
from linattn_np.backends.cupy.execute import CompiledPlan, describe_array
from linattn_np.backends.cupy.plan import Draft, Plan, as_array
from linattn_np.models import RWKV6, State
from linattn_np.models.matrices import quantised
from linattn_np.models.rwkv import cuda_decoder

SMALL = {"V": 50, "D": 64, "H": 4, "N": 16, "A": 8, "W": 8, "G": 16, "Q": 8, "F": 224}
SIZES = {
    "small": SMALL,
    "wide heads": {"V": 50, "D": 128, "H": 2, "N": 64, "A": 32, "W": 64, "G": 56, "Q": 16, "F": 448},
    "odd": {"V": 51, "D": 72, "H": 6, "N": 12, "A": 35, "W": 5, "G": 33, "Q": 2, "F": 2056},
}
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]
LIMIT = 2e-5  # emulated, states that have begun have at most 5e-7, in hundreds of draws


def random_weights(kind, rng, dtype=np.float32, sizes=SMALL, layers=2):
    """Random weights, rounded to `dtype`, that keep every activation near one.

    Decays are slow, as trained ones are: after ten tokens a state that has begun (see `begun`) still has its beginning.
    """
    axes_of = {**sizes, "1": 1, "5": 5, "5A": 5 * sizes["A"]}
    weights = {}
    for name, axes in kind.version.parameter_axes(layers).items():
        shape = [axes_of[axis] for axis in axes.split()]
        low_rank, linear = name[-1] in "12", name.endswith(".weight") and len(shape) == 2
        scale = shape[-2 if low_rank else -1] ** -0.5 if low_rank or linear else 0.5
        array = scale * rng.standard_normal(shape) - 3 * name.endswith(("time_decay", "w0"))
        weights[name] = array.astype(dtype).astype(np.float32)
    return weights


def decoder_of(kind, weights, *how, **others):
    """A `CudaDecoder` of the version."""
    return kind.module("cuda_decode").CudaDecoder(weights, *how, **others)


def begun(model, B, rng):
    """A state on the CPU of B sequences that have begun: random numbers in place of zeros.

    From zeros, a head's output is v times one number. If that nearly cancels, the head's norm multiplies its rounding:
    one draw in a hundred had ten times the limit that the others kept by a factor of ten. From a state that has begun,
    all numbers of a head's output would have to cancel.
    """
    state = model.initial_state(B)
    for part in state.arrays:
        part[...] = rng.standard_normal(part.shape)
    return state


def uploaded(state, device):
    """A copy of a state, on the device."""
    return State(*(device.upload(part.copy()) for part in state.arrays), version=state.version)


def decoded(decoder, device, tokens, state, slots=None):
    """Logits [B, T, V] of tokens [B, T], a step at a time."""
    slots = slots if slots is None else device.upload(np.asarray(slots))
    logits = []
    for column in tokens.T:
        found = decoder.step(device.upload(np.ascontiguousarray(column)), state, slots)
        logits.append(host(found).copy())
    return np.stack(logits, axis=1)


def close(found, wanted, tolerance):
    assert relative_error(found, wanted) <= tolerance


def relative_error(found, wanted, axis=None):
    return np.sqrt(np.mean((found - wanted) ** 2, axis) / np.mean(wanted**2, axis))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_token_by_token_equals_the_numpy_model(device, sizes, dtype, kind, rng):
    weights, B = random_weights(kind, rng, dtype, SIZES[sizes]), 3
    decoder, model = decoder_of(kind, weights, dtype, B, device), kind(weights)
    wanted_state, tokens = begun(model, B, rng), rng.integers(0, decoder.sizes["V"], (B, 3))
    state = uploaded(wanted_state, device)
    found = decoded(decoder, device, tokens, state)
    for t in range(tokens.shape[1]):
        wanted, _ = model.forward(tokens[:, t : t + 1], wanted_state)
        close(found[:, t], wanted[:, 0], LIMIT)
    for part, wanted_part in zip(state.arrays, wanted_state.arrays):
        close(host(part), wanted_part, LIMIT)


ONE_SEQUENCE = {  # more and fewer tiles, or heads, than blocks; an input in halves; ranks beyond what a thread holds
    "odd": SIZES["odd"],
    "narrow": {"D": 80, "H": 10, "N": 8, "F": 80, "W": 5, "A": 35, "G": 16, "Q": 8},
    "widest inputs": {"D": 80, "H": 20, "N": 4, "F": 8208, "W": 5, "A": 24, "G": 33, "Q": 2},
    "many heads": {"D": 1104, "H": 138, "N": 8, "F": 1024, "W": 5, "A": 35, "G": 33, "Q": 2},
    "wide heads": {"D": 128, "H": 2, "N": 64, "F": 512, "W": 32, "A": 160, "G": 288, "Q": 16},
    "widest heads": {"D": 256, "H": 1, "N": 256, "F": 96, "W": 40, "A": 20, "G": 70, "Q": 3},
    "stages": {"D": 1040, "H": 5, "N": 208, "F": 96, "W": 8, "A": 8, "G": 16, "Q": 8},  # of weights in registers
}


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype(np.int8)], ids=str)
@pytest.mark.parametrize("state_dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
@pytest.mark.parametrize("sizes", ONE_SEQUENCE)
@pytest.mark.parametrize("blocks", [16, 70])
def test_one_sequence_of_any_size(hopper, monkeypatch, blocks, sizes, state_dtype, dtype, kind, rng):
    """A row of a pool, from a state as it is stored: this is rounded after every token, and logits are as if not."""
    monkeypatch.setattr(cuda_decoder, "PHASE_BLOCKS", blocks)
    sizes = {"V": 51} | ONE_SEQUENCE[sizes]
    if dtype == np.int8 and sizes["D"] % 16:
        sizes |= {"D": 80, "H": 10, "N": 8, "F": 2064}
    weights = random_weights(kind, rng, np.float32 if dtype == np.int8 else dtype, sizes, layers=3)
    decoder = decoder_of(kind, weights, dtype, 1, hopper, state_dtype=state_dtype)
    assert decoder.kernel
    reference = kind(in_eight_bits(weights) if dtype == np.int8 else weights)
    state, wanted_state = decoder.initial_state(3), reference.initial_state(1)
    for part, wanted_part in zip(state.arrays, wanted_state.arrays):
        part[...] = 7
        wanted_part[...] = rng.standard_normal(wanted_part.shape).astype(part.dtype)
        part[:, 1] = hopper.upload(wanted_part[:, 0].astype(part.dtype))
    tokens = rng.integers(0, sizes["V"], (1, 3))
    for column in tokens.T:
        found = decoded(decoder, hopper, column[None], state, [1])
        wanted, wanted_state = reference.forward(column[None], wanted_state)
        close(found, wanted, LIMIT)
        for part, wanted_part in zip(state.arrays, wanted_state.arrays):
            assert (host(part)[:, ::2] == 7).all()
            rounded = ml_dtypes.finfo(part.dtype).eps / 2 if part.dtype == BFLOAT16 else 0
            close(host(part)[:, 1].astype(np.float32), wanted_part[:, 0], LIMIT + rounded)
            wanted_part[:, 0] = host(part)[:, 1].astype(np.float32)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B", [1, 2, 5, 8, 9, 17, 60, 70, 130])
@pytest.mark.parametrize("sizes", ["small", "wide heads"])
def test_batches(device, sizes, B, dtype, kind, rng):
    """Above eight sequences products take their inputs rounded. Now and then a head's output nearly vanishes,
    and its norm makes much of the rounding: hence the median sequence, and little asked of the others."""
    weights = random_weights(kind, rng, dtype, SIZES[sizes])
    decoder, model = decoder_of(kind, weights, dtype, B, device), kind(weights)
    tokens, state = rng.integers(0, SMALL["V"], (B, 2)), begun(model, B, rng)
    found = decoded(decoder, device, tokens, uploaded(state, device))
    wanted, state = model.forward(tokens[:, :1], state)
    wanted = np.concatenate([wanted, model.forward(tokens[:, 1:], state)[0]], axis=1)
    if B <= 8 or dtype == np.float32:
        return close(found, wanted, LIMIT)
    error = relative_error(found, wanted, axis=(1, 2))
    assert np.median(error) <= 4 * ml_dtypes.finfo(dtype).eps and error.max() <= 0.2


def in_eight_bits(weights):
    """The numbers that int8 on the GPU has of `weights`."""

    def rounded(name, array):
        if name[-1] == "2" or name == "emb.weight":
            return array.astype(BFLOAT16)
        if array.squeeze().ndim < 2 or name.endswith(("time_faaaa", "r_k")):
            return array
        rows = array.T if name[-1] == "1" else array
        (q,), (scales,) = quantised(rows[None], "int8")
        found = scales[:, None] * q
        return found.T if name[-1] == "1" else found

    return {name: rounded(name, array).astype(np.float32) for name, array in weights.items()}


@pytest.mark.pairwise
@pytest.mark.parametrize("B", [1, 3, 8, 20, 130])
def test_int8_has_the_numbers_of_the_cpu(hopper, B, kind, rng):
    weights = random_weights(kind, rng, sizes=SIZES["wide heads"])
    decoder, model = decoder_of(kind, weights, np.int8, B, hopper), kind(in_eight_bits(weights))
    tokens, state = rng.integers(0, 50, (B, 2)), begun(model, B, rng)
    found = decoded(decoder, hopper, tokens, uploaded(state, hopper))
    wanted, state = model.forward(tokens[:, :1], state)
    wanted = np.concatenate([wanted, model.forward(tokens[:, 1:], state)[0]], axis=1)
    if B <= 8:
        return close(found, wanted, LIMIT)
    # A token may leave one head next to no variance to be divided by, and all that begin with it have the norm's share
    # of rounding: of fifty one or two.
    median, most, worst = np.quantile(relative_error(found, wanted, axis=(1, 2)), (0.5, 0.9, 1))
    assert median <= 4 * ml_dtypes.finfo(BFLOAT16).eps and most <= 0.1 and worst <= 0.5


def test_int8_is_refused_where_it_is_not_served(device, kind, rng):
    if device.capability == 90:
        with pytest.raises(ContractError, match="D is 72, expected a multiple of 16 on the GPU with int8"):
            decoder_of(kind, random_weights(kind, rng, sizes=SIZES["odd"]), np.int8, 1, device)
    else:
        with pytest.raises(NotSupported, match=f"{kind.version.owner}: dtype int8 on the GPU needs a Hopper card"):
            decoder_of(kind, random_weights(kind, rng), np.int8, 1, device)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("B", [1, 9])
def test_a_rounded_state_is_the_float32_one_rounded_after_every_token(device, B, dtype, kind, rng):
    weights, tokens = random_weights(kind, rng), rng.integers(0, SMALL["V"], (B, 4))
    decoder, exact = (decoder_of(kind, weights, np.float32, B, device, state_dtype=one) for one in (dtype, np.float32))
    state, wanted = decoder.initial_state(), exact.initial_state()
    assert state.wkv.dtype == dtype
    for column in tokens.T:
        column = device.upload(np.ascontiguousarray(column))
        found = host(decoder.step(column, state)).copy()
        np.testing.assert_array_equal(found, host(exact.step(column, wanted)))
        wanted.wkv[...] = device.upload(host(wanted.wkv).astype(dtype).astype(np.float32))
        np.testing.assert_array_equal(host(state.wkv).astype(np.float32), host(wanted.wkv))
    with pytest.raises(TypeError, match=f"state.wkv has dtype float32, expected {dtype}"):
        decoder.step(column, wanted)
    with pytest.raises(TypeError, match="dtype is float64, expected float32, bfloat16, float16 for the state"):
        decoder_of(kind, weights, np.float32, B, device, state_dtype=np.float64)


def test_turns_of_words_begin_anew(hopper, kind, rng):
    """A word has the lower 16 bits of its turn's number."""
    weights, tokens = random_weights(kind, rng), rng.integers(0, SMALL["V"], (1, 4))
    decoder = decoder_of(kind, weights, BFLOAT16, 1, hopper)
    wanted = decoded(decoder, hopper, tokens, decoder.initial_state())
    decoder.buffers.arrived[...] = 2**32 - 3 * decoder.sizes["L"]
    np.testing.assert_array_equal(decoded(decoder, hopper, tokens, decoder.initial_state()), wanted)


TILES = list(  # columns, split, rows
    dict.fromkeys(
        (kernel.COLUMNS, kernel.SPLIT, kernel.ROWS)
        for B in range(1, products.BatchProduct.MOST + 1)
        for kernel in products.BatchProduct.choices(BFLOAT16, B)
    )
)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", products.BatchProduct.DTYPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("first", [products.WRITE, products.PARTS])
@pytest.mark.parametrize("K", [48, 656])
def test_products_with_many_vectors(hopper, rng, dtype, tile, first, K):
    """Two stacks, of which one has a few rows more than a tile, and one fewer; what there is of y beside stays."""
    columns, split, rows = tile
    kernel, B = (
        products.BatchProduct(dtype, columns, split, ROWS=rows),
        columns + (5 if first == products.WRITE else -3),
    )
    kernel = replace(kernel, DEEP=kernel.may_be_deep and K > 48)
    check_products(hopper, rng, kernel.launch, dtype, B, K, ((2, 150), (1, 33)), first, split, kernel.terms)


@pytest.mark.parametrize("blocks, threads", [(1, (512, 1024)), (200, (512, 512)), (1000, (256, 256))])
def test_a_block_of_matvec_fits_in_shared_memory(blocks, threads):
    """Threads on a card with 99 KB a block, and on one with 227 KB."""
    for kib, wanted in zip((99, 227), threads, strict=True):
        card = SimpleNamespace(multiprocessors=132, shared_per_block=kib * 1024)
        kernel = products.Matvec.fitting(np.dtype(np.float32), blocks, card)
        assert kernel.threads == wanted and kernel.shared_bytes <= card.shared_per_block


def test_some_model_asks_for_each_product():
    """Of those that are compiled; the early one has keys, values, receptance and gates, and the decay's low rank."""
    card, cls, asked = SimpleNamespace(capability=90, multiprocessors=132), products.BatchProduct, set()
    early = (*range(16, 1024, 16), *range(1024, 4097, 128)), True, lambda D: [(4, D), (1, 64)]
    value = (224, 896, 1792, 3584, 7168, 14336), False, lambda F: [(1, F * 2 // 7)]
    head = (64, 512, 2048, 8192), False, lambda D: [(1, 65536)]
    for widths, is_early, rows in (early, value, head):
        for dtype, B, K in product(cls.DTYPES, (1, 6, 9, 17, 33), widths):
            asked.add(cls.fitting(dtype, B, K, rows(K), card, is_early))
    assert {kernel for kernel in catalog.kernels() if isinstance(kernel, cls)} <= asked


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("shape", range(len(products.WideProduct.all(BFLOAT16))))
@pytest.mark.parametrize("first, parts", [(products.WRITE, 1), (products.PARTS, 1), (products.PARTS, 4)])
@pytest.mark.parametrize("more", [-60, 0, 3])
@pytest.mark.parametrize("K", [40, 1032])
def test_products_with_a_wide_batch(hopper, rng, dtype, shape, first, parts, more, K):
    """Two stacks, of which one has a few rows more than a cluster's tiles, and one fewer than a tile."""
    kernel = products.WideProduct.all(dtype)[shape]
    launch, B = partial(kernel.launch, parts=parts), kernel.HALVES * kernel.vectors + more
    check_products(hopper, rng, launch, dtype, B, K, ((2, 312), (1, 40)), first, parts, squared=parts == 1)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("T", [130, 512])
@pytest.mark.parametrize("M", [40, 520])
@pytest.mark.parametrize("K", [40, 200, 648])
def test_squares_of_products_with_a_prompt(hopper, rng, dtype, T, M, K):
    """Several tiles of a cluster, whose ring goes on from tile to tile; clusters with one tile less than others."""
    x, w = (rng.standard_normal((rows, K)).astype(dtype) for rows in (T, M))
    y = squared_product(hopper, x, w)
    wanted = np.maximum(x.astype(float) @ w.astype(float).T, 0) ** 2 / (2048 if dtype == np.float16 else 1)
    assert relative_error(host(y).astype(float), wanted) <= ml_dtypes.finfo(dtype).eps


def squared_product(device, x, w):
    """relu(x w^T)^2 on the device, by two clusters."""
    y = device.upload(np.full((len(x), len(w)), np.nan, x.dtype))

    def launch(draft, given, *_):
        products.SquaredProduct(x.dtype).launch(draft, *given[0][:3], SimpleNamespace(multiprocessors=4))

    run_products(device, launch, [((*map(device.upload, (w, x)), y), None)], *x.shape)
    return y


def check_products(device, rng, launch, dtype, B, K, rows, first, parts, terms=1, squared=True):
    """Two stacks of products (C, M), of which the first ends as told, and the second in a relu squared, or in parts.
    int8 weights meet bfloat16 vectors.

    Hopper's tensor cores add 16 channels at a time to a sum, and cut off its last bits: at most 2**-23 of it a step.
    Half of that for every step is the limit, where it is more than 1e-6. Measured: 1.5e-6 over 1,032 channels.
    """
    exact = max(1e-6, K / 16 * 2**-24)
    found, given, wanted = [], [], []
    of_w, dtype = dtype, BFLOAT16 if dtype == np.int8 else dtype
    for (C, M), finish in zip(rows, (first, products.RELU_SQUARED if squared else products.PARTS)):
        w, scales = weights_of(rng, of_w, C, M, K)
        x = rng.standard_normal((C, B, K)).astype(np.float32)
        x = in_terms(x, dtype, terms)
        y = rng.standard_normal((C, B, M)).astype(np.float32)
        product = np.float32(of_terms(x) @ w.astype(float).swapaxes(1, 2))
        if scales is not None:
            product *= scales[:, None]
        if finish == products.RELU_SQUARED:
            y = in_terms(y, dtype, terms)
        elif finish == products.PARTS:
            y = np.stack([y] * parts)
        unit = 2048 if dtype == np.float16 and terms == 1 else 1  # in which squares come
        wanted.append(np.maximum(product, 0) ** 2 / unit if finish == products.RELU_SQUARED else product)
        found.append(device.upload(y))
        arrays = [None if array is None else device.upload(array) for array in (w, scales, x)]
        given.append(((*arrays, found[-1]), finish))
    run_products(device, launch, given, B, K)
    for y, product in zip(found, wanted):
        rounded = y.dtype == dtype and terms == 1
        y = of_terms(host(y)) if y.dtype == dtype else host(y).sum(0) if y.ndim == 4 else host(y)
        assert relative_error(y, product) <= (ml_dtypes.finfo(dtype).eps if rounded else exact)


def weights_of(rng, dtype, C, M, K):
    """Random [C, M, K] of a type, and scales [C, M] where that is int8."""
    if dtype != np.int8:
        return rng.standard_normal((C, M, K)).astype(dtype), None
    return rng.integers(-127, 128, (C, M, K)).astype(dtype), rng.uniform(0.01, 0.02, (C, M)).astype(np.float32)


def launched(device, kernel, blocks, arrays, **numbers):
    """Runs it on `arrays`, which are then what it left."""
    uploaded = {name: None if array is None else device.upload(array) for name, array in arrays.items()}
    at = {name: None if array is None else device.pointer(array) for name, array in uploaded.items()}
    device.launch(kernel, blocks, kernel.pack(**at, **numbers))
    arrays.update((name, host(array)) for name, array in uploaded.items() if array is not None)


@pytest.mark.pairwise
@pytest.mark.parametrize("width", kernels.TimeMixBatch.WIDTHS)
@pytest.mark.parametrize("state", [DTYPES[0], BFLOAT16], ids=str)
def test_sequences_of_a_block_do_not_change_them_in_rwkv6(hopper, monkeypatch, rng, width, state):
    """RWKV-7's blocks have one sequence each."""
    kind = RWKV6
    weights, tokens = random_weights(kind, rng, BFLOAT16, SIZES["wide heads"]), rng.integers(0, 50, (21, 2))
    decoder = decoder_of(kind, weights, BFLOAT16, 21, hopper, state_dtype=state)
    wanted = decoded(decoder, hopper, tokens, decoder.initial_state())
    monkeypatch.setattr(kernels.TimeMixBatch, "WIDTHS", (width,))
    np.testing.assert_array_equal(decoded(decoder.resized(21), hopper, tokens, decoder.initial_state()), wanted)


def in_terms(x, dtype, terms):
    """[terms, ...] of type `dtype`, whose sum is x."""
    found = []
    for unit in units(dtype, terms):
        found.append((x / unit).astype(dtype))
        x = x - unit * found[-1].astype(np.float32)
    return np.stack(found)


def of_terms(x):
    return sum(unit * term.astype(float) for unit, term in zip(units(x.dtype, len(x)), x))


def units(dtype, terms):
    return (np.array([2048, 1, 1 / 2048]) if dtype == np.float16 else np.ones(3))[:terms] if terms > 1 else np.ones(1)


def run_products(device, launch, given, B, K):
    draft = Draft()
    every = [array for arrays, _ in given for array in arrays if array is not None]
    seen = {id(array): as_array(describe_array("array", array, device)) for array in every}
    launch(draft, [(*(seen.get(id(array)) for array in arrays), finish) for arrays, finish in given], B, K)
    plan = Plan((), tuple(draft.steps), None, given=tuple(array.memory for array in seen.values()))
    for command in CompiledPlan(plan, device).commands(every):
        command(None)


@pytest.mark.pairwise
def test_a_sequence_does_not_depend_on_its_neighbours(device, kind, rng):
    """One sequence alone has kernels of its own on Hopper: so two are compared with four."""
    weights, tokens = random_weights(kind, rng), rng.integers(0, SMALL["V"], (4, 2))
    four, two = (decoder_of(kind, weights, np.float32, B, device) for B in (4, 2))
    found = decoded(four, device, tokens, four.initial_state())
    for rows in (slice(2), slice(2, 4)):
        np.testing.assert_array_equal(decoded(two, device, tokens[rows], two.initial_state()), found[rows])


@pytest.mark.pairwise
@pytest.mark.parametrize("B", [1, 2, 9])
def test_slots_choose_rows_of_a_pool(device, B, kind, rng):
    weights, tokens = random_weights(kind, rng), rng.integers(0, SMALL["V"], (B, 2))
    decoder = decoder_of(kind, weights, np.float32, B, device)
    rows, slots = decoder.initial_state(), rng.permutation(B + 3)[:B]
    pool = decoder.initial_state(B + 3)
    for part in pool.arrays:
        part[...] = 7
        part[:, slots] = 0
    wanted = decoded(decoder, device, tokens, rows)
    np.testing.assert_array_equal(decoded(decoder, device, tokens, pool, slots), wanted)
    others = np.setdiff1d(np.arange(B + 3), slots)
    for part, wanted_part in zip(pool.arrays, rows.arrays):
        np.testing.assert_array_equal(host(part[:, slots]), host(wanted_part))
        assert (host(part)[:, others] == 7).all()


@pytest.mark.pairwise
@pytest.mark.parametrize("parts", [1, 3, 7])
@pytest.mark.parametrize("D", [8, 2056, 4104])
@pytest.mark.parametrize("shares", [1, kernels.NormShift.SHARES])
def test_norms_of_narrow_and_wide_rows(device, D, parts, shares, rng):
    x, gate, shift, weight, bias, maa = rng.standard_normal((6, D), np.float32)
    value = rng.standard_normal((parts, D), np.float32)
    arrays = {name: device.upload(array) for name, array in locals().items() if isinstance(array, np.ndarray)}
    arrays |= {name: device.empty(D, np.float32) for name in ("sum", "xx", "d", "mixed")}
    at = {name: device.pointer(array) for name, array in arrays.items()}
    kernel, before = (
        kernels.NormShift.fitting(np.dtype(np.float32), D, 1, parts),
        "x sum value gate weight bias maa shift".split(),
    )
    args = kernel.pack(
        **{name: at[name] for name in before},
        slots=None,
        xx=at["xx"],
        d=at["d"],
        mixed=at["mixed"],
        B=1,
        D=D,
        C=1,
        P=parts,
        squares=True,
        shares=shares,
        eps=1e-5,
    )
    device.launch(kernel, shares, args)
    x += value.sum(0) / (1 + np.exp(-gate))
    xx = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * weight + bias
    wanted = {"sum": x, "xx": xx, "d": shift - xx, "shift": xx, "mixed": xx + (shift - xx) * maa}
    for name, array in wanted.items():
        np.testing.assert_allclose(host(arrays[name]), array, rtol=1e-5, atol=2e-5, err_msg=name)


def test_replays_of_a_graph_equal_steps(request, kind, rng):
    if "cupy" not in request.config.backends:
        pytest.skip("graphs are captured on a card")
    import cupy

    for B in (1, 9):
        decoder = decoder_of(kind, random_weights(kind, rng), np.float32, B)
        tokens, state = cupy.asarray(rng.integers(0, SMALL["V"], B)), decoder.initial_state()
        decoder.capture(tokens, state)
        replayed = [decoder.replay().get() for _ in range(3)]
        state = decoder.initial_state()
        for wanted in replayed:
            np.testing.assert_array_equal(decoder.step(tokens, state).get(), wanted)


def test_weight_bytes_count_what_a_step_reads(device, kind, rng):
    """Low ranks are equal here: RWKV-7 pads the smaller ones, and reads zeros for what its first layer lacks."""
    weights = random_weights(kind, rng, sizes=SMALL | {"G": 8})
    lacked = sum(weights[f"blocks.1.{name}"].nbytes for name in kind.version.first_layer_lacks)
    everything = sum(array.nbytes for array in weights.values()) - weights["emb.weight"].nbytes
    decoder = decoder_of(kind, weights, np.float32, 2, device)
    assert decoder.weight_bytes == everything + lacked + 2 * 4 * SMALL["D"]


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"D": 60, "H": 5, "N": 12}, "D is 60, expected a multiple of 8"),
        ({"F": 100}, "F is 100, expected a multiple of 8"),
        ({"H": 32, "N": 2}, "N is 2, expected a multiple of 4"),
    ],
)
def test_sizes_that_are_refused(device, change, complaint, kind, rng):
    with pytest.raises(ContractError, match=f"{kind.version.owner}: {complaint}"):
        decoder_of(kind, random_weights(kind, rng, sizes=SMALL | change), np.float32, 1, device)


def test_models_of_rwkv6_without_kernels_of_steps(device, rng):
    """Layers read their tokens as prompts."""
    wide = random_weights(RWKV6, rng, sizes=SMALL | {"W": 520})
    for weights in (wide, random_weights(RWKV6, rng) | named_activation("relu")):
        decoder = decoder_of(RWKV6, weights, np.float32, 1, device)
        with pytest.raises(
            ContractError, match="no kernel computes a step, expected hidden_act sqrelu, N up to 256, W"
        ):
            decoder.step(device.upload(np.zeros(1, np.int64)), decoder.initial_state())
    with pytest.raises(ContractError, match="N is 516, expected at most 512 on the GPU; the CPU takes any"):
        sizes = SMALL | {"H": 2, "N": 516, "D": 1032}
        decoder_of(RWKV6, random_weights(RWKV6, rng, sizes=sizes), np.float32, 1, device)


def test_arrays_that_are_refused(device, kind, rng):
    decoder = decoder_of(kind, random_weights(kind, rng), np.float32, 2, device)
    state, tokens = decoder.initial_state(), device.upload(np.zeros(2, np.int64))
    with pytest.raises(ContractError, match=r"tokens is \(3,\), expected contiguous \(2,\)"):
        decoder.step(device.upload(np.zeros(3, np.int64)), state)
    with pytest.raises(TypeError, match="tokens has dtype int32, expected int64"):
        decoder.step(tokens.astype(np.int32), state)
    with pytest.raises(ContractError, match=r"state.att_shift is \(2, 3, 64\), expected \(2, 2, 64\)"):
        decoder.step(tokens, decoder.initial_state(3))
    with pytest.raises(TypeError, match="slots has dtype int32"):
        decoder.step(tokens, state, tokens.astype(np.int32))
    with pytest.raises(TypeError, match="dtype is float64, expected float32, float16, bfloat16, int8"):
        decoder_of(kind, random_weights(kind, rng), np.float64, 1, device)
