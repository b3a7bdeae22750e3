"""RWKV models of every version on CUDA: prompts by the layers, steps by `CudaDecoder`, one set of weights; on the
emulated device too."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import islice
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from emulator import EmulatedDevice
from fla_names import named_activation, rwkv6_to_fla, with_narrow_keys
from test_decode_kernels import (
    DTYPES,
    SIZES,
    SMALL,
    begun,
    close,
    decoder_of,
    host,
    in_eight_bits,
    random_weights,
    relative_error,
)

from linattn_np import ContractError, NotSupported
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy import delta, gated_backward
from linattn_np.backends.cupy import rwkv6_model_kernels as kernels
from linattn_np.backends.cupy.device import CupyDevice
from linattn_np.backends.cupy.execute import OneAllocation
from linattn_np.backends.cupy.rwkv7_model_kernels import TimeMixOfHeads
from linattn_np.models import RWKV6, Batch, Sampling, State, austen, checkpoint
from linattn_np.models.rwkv import cuda_decoder, cuda_prompts

HALF = np.dtype(np.float16)


@pytest.fixture
def on_cuda(device, kind, monkeypatch):
    """A model on the device under test. Emulated, a graph is the launches that were bound when it was captured."""

    def capture(decoder, tokens, state, slots=None):
        decoder.bind(tokens, state, slots)
        decoder.graph = decoder.launches

    def replay(decoder):
        for launch in decoder.graph:
            launch()
        return decoder.logits

    if "Emulated" in type(device).__name__:
        of_host = kind.layers_on("cpu")  # what the device is held against stays itself
        layers_on = staticmethod(lambda on: of_host if on == "cpu" else kind.cuda_layers())
        monkeypatch.setattr(kind, "layers_on", layers_on)
        monkeypatch.setattr(cuda_decoder, "current_device", lambda: device)
        monkeypatch.setattr(cuda_decoder.CudaDecoder, "capture", capture)
        monkeypatch.setattr(cuda_decoder.CudaDecoder, "replay", replay)
    return lambda weights, dtype=None, **how: kind(weights, "cuda", dtype, **how)


def in_calls(model, tokens, lengths, start=None):
    """Host logits [B, T, V] and the state, `tokens` [B, T] given in calls of `lengths`; from a state on the host."""
    state, logits = None if start is None else model.on_device(start.copy()), []
    for part in np.split(tokens, np.cumsum(lengths)[:-1], axis=1):
        found, state = model.forward(part, state)
        logits.append(model.to_host(found))
    return np.concatenate(logits, axis=1), state


def tolerance(dtype):
    """Of logits: prompts round what meets a half-precision matrix, steps of few sequences nothing."""
    return 1e-5 if dtype == np.float32 else 8 * float(ml_dtypes.finfo(dtype).eps)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[9], [1] * 5, [7, 1, 1, 3, 1]], ids=str)
def test_logits_and_states_are_the_cpus(on_cuda, kind, lengths, dtype, rng):
    weights, tokens = random_weights(kind, rng, dtype), rng.integers(0, SMALL["V"], (2, sum(lengths)))
    reference = kind(weights)
    start = begun(reference, 2, rng)
    found, state = in_calls(on_cuda(weights, dtype), tokens, lengths, start)
    wanted, wanted_state = in_calls(reference, tokens, lengths, start)
    limit = 1e-5 if set(lengths) == {1} else tolerance(dtype)
    close(found, wanted, limit)
    assert relative_error(found, wanted, -1).max() <= 2 * limit
    for part, wanted_part in zip(state.arrays, wanted_state.arrays):
        close(host(part), wanted_part, limit)


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", [RWKV6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 9])
def test_keys_of_flas_rwkv6_with_fewer_channels_than_values(on_cuda, batch, dtype, rng):
    """fla's `expand_k` below 1: such keys are as wide as values on the device, with zeros."""
    named = rwkv6_to_fla(with_narrow_keys(random_weights(RWKV6, rng, dtype), SMALL["N"] // 2))
    tokens, config = rng.integers(0, SMALL["V"], (batch, 5)), {"norm_eps": 1e-4, "expand_k": 0.5}
    reference = RWKV6(named, config=config)
    found, state = in_calls(on_cuda(named, dtype, config=config), tokens, [3, 1, 1])
    wanted, wanted_state = in_calls(reference, tokens, [3, 1, 1])
    close(found, wanted, tolerance(dtype))
    assert not host(state.wkv)[..., SMALL["N"] // 2 :, :].any() and wanted_state.wkv.any()


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", [RWKV6])
@pytest.mark.parametrize("sizes", [{"N": 320}, {"N": 512}, {"W": 520, "N": 64}], ids=str)
def test_sizes_of_rwkv6_beyond_the_kernels_of_steps(on_cuda, kind, sizes, rng):
    """As fla's default ones, four heads of 512 channels: tokens are read as prompts."""
    sizes = SMALL | sizes | {"H": 2, "D": 2 * sizes["N"]}
    weights, tokens = random_weights(kind, rng, sizes=sizes), rng.integers(0, SMALL["V"], (2, 5))
    reference = kind(weights)
    start = begun(reference, 2, rng)
    found, state = in_calls(on_cuda(weights), tokens, [3, 1, 1], start)
    wanted, wanted_state = in_calls(reference, tokens, [3, 1, 1], start)
    close(found, wanted, 1e-5)
    for part, wanted_part in zip(state.arrays, wanted_state.arrays):
        close(host(part), wanted_part, 1e-5)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
@pytest.mark.parametrize("act", ["relu", "gelu", "silu", "sigmoid", "logsigmoid"])
def test_other_activations_of_the_channel_mix(on_cuda, kind, act, dtype, rng):
    weights = random_weights(kind, rng, dtype) | named_activation(act)
    tokens, reference = rng.integers(0, SMALL["V"], (2, 5)), kind(weights)
    start = begun(reference, 2, rng)
    found, state = in_calls(on_cuda(weights, dtype), tokens, [3, 1, 1], start)
    wanted, wanted_state = in_calls(reference, tokens, [3, 1, 1], start)
    close(found, wanted, tolerance(dtype))
    close(host(state.ffn_shift), wanted_state.ffn_shift, tolerance(dtype))
    with pytest.raises(ContractError, match="dtype is float16, expected bfloat16 or float32 beside hidden_act"):
        on_cuda(weights, "float16")


@pytest.mark.pairwise
@pytest.mark.parametrize("lengths", [[5], [4, 1]], ids=str)
def test_hidden_states_are_the_cpus(on_cuda, kind, lengths, rng):
    weights, tokens = random_weights(kind, rng), rng.integers(0, SMALL["V"], (2, 5))
    model, wanted_by = on_cuda(weights), kind(weights)
    wanted_state = begun(wanted_by, 2, rng)
    state = model.on_device(wanted_state.copy())
    for part in np.split(tokens, np.cumsum(lengths)[:-1], axis=1):
        found, state = model.forward(part, state, hidden=True)
        wanted, wanted_state = wanted_by.forward(part, wanted_state, hidden=True)
        close(model.to_host(found), wanted, 1e-5)
        close(model.to_host(model.head(found)), wanted_by.head(wanted), 1e-5)
    found, _ = model.forward([[1], [2]], state, hidden=True, last=True)
    wanted, _ = wanted_by.forward([[1], [2]], wanted_state, hidden=True, last=True)
    assert found.shape == (2, SMALL["D"])
    close(model.to_host(found), wanted, 1e-5)


@pytest.mark.pairwise(half="device")
def test_logits_are_the_golden_ones(on_cuda, kind):
    path = austen(kind.version.number)
    model = on_cuda(checkpoint.read(path))
    with np.load(path.with_name("golden.npz")) as file:
        prompt, wanted = file["prompt"][None, :24], file["logits"][:24]
    for lengths, limit in (([24], 0.02), ([20, 1, 1, 1, 1], 0.02)):
        close(in_calls(model, prompt, lengths)[0][0], wanted, limit)


@pytest.mark.pairwise
def test_a_saved_state_goes_on_with_the_same_bits(on_cuda, kind, rng, tmp_path):
    model = on_cuda(random_weights(kind, rng))
    _, state = model.forward([[1, 2, 3]])
    state.save(tmp_path / "state.npz")
    loaded = model.on_device(State.load(tmp_path / "state.npz"))
    for tokens in ([[4]], [[5]], [[6, 7]], [[8]]):
        wanted, _ = model.forward(tokens, state)
        np.testing.assert_array_equal(host(model.forward(tokens, loaded)[0]), host(wanted))


def changed(D, N):
    return SMALL | {"D": D, "H": D // N, "N": N}


# A step's threads hold a part of a wide head's state, and read the rest twice.
@pytest.mark.pairwise
@pytest.mark.parametrize("sizes", [SIZES["wide heads"], SIZES["odd"], changed(24, 12), changed(128, 128)], ids=str)
@pytest.mark.parametrize("lengths", [[37], [2, 1, 1]], ids=str)
def test_other_sizes(on_cuda, sizes, lengths, kind, rng):
    weights, tokens = random_weights(kind, rng, sizes=sizes), rng.integers(0, 50, (2, sum(lengths)))
    reference = kind(weights)
    start = begun(reference, 2, rng)
    found, state = in_calls(on_cuda(weights), tokens, lengths, start)
    wanted, wanted_state = in_calls(reference, tokens, lengths, start)
    close(found, wanted, 1e-5)
    for part, wanted_part in zip(state.arrays, wanted_state.arrays):
        close(host(part), wanted_part, 1e-5)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B", [1, 3, 9])
def test_one_layer(on_cuda, kind, dtype, B, rng):
    """The file of such an RWKV-7 has no v0, v1 and v2, which the first layer lacks."""
    weights, tokens = random_weights(kind, rng, dtype, layers=1), rng.integers(0, SMALL["V"], (B, 4))
    reference = kind(weights)
    start = begun(reference, B, rng)
    found, state = in_calls(on_cuda(weights, dtype), tokens, [2, 1, 1], start)
    wanted, wanted_state = in_calls(reference, tokens, [2, 1, 1], start)
    close(found, wanted, tolerance(dtype))
    for part, wanted_part in zip(state.arrays, wanted_state.arrays):
        close(host(part), wanted_part, tolerance(dtype))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("state_dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
@pytest.mark.parametrize("few", [0, TimeMixOfHeads.FEW])  # of RWKV-7: rows in shared memory, or all in registers
@pytest.mark.parametrize("B", [3, 20, 70])
def test_steps_of_heads_of_64_channels(on_cuda, kind, dtype, state_dtype, few, B, rng, monkeypatch):
    """From states as they are stored: these are rounded once, and logits as if they were not."""
    monkeypatch.setattr(TimeMixOfHeads, "FEW", few)
    weights, slots = random_weights(kind, rng, dtype, changed(128, 64)), rng.permutation(B + 2)[:B]
    model, reference = on_cuda(weights, dtype, state_dtype=state_dtype), kind(weights)
    wanted_pool = reference.initial_state(B + 2)
    for part in wanted_pool.arrays:
        part[:] = rng.standard_normal(part.shape).astype(state_dtype)
    pool, tokens = model.on_device(wanted_pool), rng.integers(0, SMALL["V"], (B, 1))
    found, _ = model.forward(tokens, pool, slots=slots)
    wanted, _ = reference.forward(tokens, wanted_pool, slots=slots)
    limit = 1e-5 if B < 8 else tolerance(dtype)
    close(model.to_host(found), wanted, limit)
    for part, wanted_part in zip(pool.arrays, wanted_pool.arrays):
        rounded = ml_dtypes.finfo(part.dtype).eps / 2 if part.dtype == BFLOAT16 else 0
        close(host(part).astype(np.float32), wanted_part, limit + rounded)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [np.float32, HALF], ids=str)
def test_packed_prompts_and_slots_are_the_cpus(on_cuda, kind, dtype, rng):
    weights, bounds, slots = random_weights(kind, rng, dtype), [0, 3, 4, 9], [4, 0, 2]
    model, reference = on_cuda(weights, dtype), kind(weights)
    wanted_pool = begun(reference, 5, rng)
    for part in wanted_pool.arrays:
        part[:, [1, 3]] = 7
    pool = model.on_device(wanted_pool.copy())
    packed, column = rng.integers(0, SMALL["V"], (1, 9)), rng.integers(0, SMALL["V"], (3, 1))
    for tokens, how in (
        (packed, {"cu_seqlens": bounds, "last": True}),
        (column, {}),
        (column.T, {"cu_seqlens": [0, 1, 2, 3]}),
    ):
        found, _ = model.forward(tokens, pool, slots=slots, **how)
        wanted, _ = reference.forward(tokens, wanted_pool, slots=slots, **how)
        assert found.shape == wanted.shape
        close(model.to_host(found), wanted, tolerance(dtype))
    for part, wanted in zip(pool.arrays, wanted_pool.arrays):
        assert (host(part)[:, [1, 3]] == 7).all()
        close(host(part), wanted, tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("in_turn", [False, True])
def test_prompts_of_heads_of_64_channels(on_cuda, kind, dtype, in_turn, rng, monkeypatch):
    """In half precision, RWKV-7's keys and values are made by the kernel that prepares chunks, also of one head after
    the other."""
    if in_turn:
        monkeypatch.setattr(gated_backward, "STATE_BYTES", 1)
        monkeypatch.setattr(delta, "FREE_BYTES", 1)
        monkeypatch.setattr(delta.InChunks, "MOST", 0)
    weights, bounds = random_weights(kind, rng, dtype, sizes=changed(128, 64)), [0, 1, 40, 45, 120]
    model, reference, tokens = on_cuda(weights, dtype), kind(weights), rng.integers(0, 50, (1, bounds[-1]))
    start = begun(reference, 4, rng)
    found, state = model.forward(tokens, model.on_device(start.copy()), cu_seqlens=bounds)
    wanted, wanted_state = reference.forward(tokens, start, cu_seqlens=bounds)
    close(model.to_host(found), wanted, tolerance(dtype))
    for part, wanted_part in zip(state.arrays, wanted_state.arrays):
        close(host(part), wanted_part, tolerance(dtype))


@pytest.mark.pairwise
def test_a_row_of_a_pool_is_updated_in_place(on_cuda, kind, rng):
    """It is not contiguous, and a plan of prompts alike may have met a state that is."""
    model = on_cuda(random_weights(kind, rng))
    tokens, pool = rng.integers(0, SMALL["V"], (1, 5)), model.initial_state(3)
    wanted, state = model.forward(tokens)
    found, _ = model.forward(tokens, pool.row(1))
    np.testing.assert_array_equal(host(found), host(wanted))
    for part, wanted_part in zip(pool.arrays, state.arrays):
        np.testing.assert_array_equal(host(part)[:, 1], host(wanted_part)[:, 0])
        assert not host(part)[:, [0, 2]].any()


@pytest.mark.pairwise
def test_prompts_packed_alike_share_their_plans(on_cuda, kind, rng, monkeypatch):
    """Whatever their tokens and states are."""
    weights, bounds = random_weights(kind, rng), [0, 4, 9]
    model, reference = on_cuda(weights), kind(weights)
    wanted_state = begun(reference, 2, rng)
    state = model.on_device(wanted_state.copy())
    for n in range(3):
        tokens = rng.integers(0, SMALL["V"], (1, 9))
        found, _ = model.forward(tokens, state, cu_seqlens=bounds)
        wanted, _ = reference.forward(tokens, wanted_state, cu_seqlens=bounds)
        close(host(found), wanted, 1e-5)
        if n == 0:
            monkeypatch.setattr(cuda_prompts, "Draft", None)  # nothing is drawn from now on


@pytest.mark.pairwise
def test_prompts_that_come_back_to_their_memory_become_a_graph(on_cuda, kind, rng, monkeypatch):
    """The second time; of other tokens and states, and to the same logits. Those of new states have another graph."""
    weights, lengths = random_weights(kind, rng), [4, 5]
    model, reference = on_cuda(weights), kind(weights)
    device = type(model.layers.decoder.device)
    memory, captured, graphs, allocated = {}, device.captured, [], OneAllocation.allocated
    monkeypatch.setattr(
        device, "captured", lambda self, launches: graphs.append(len(launches)) or captured(self, launches)
    )
    monkeypatch.setattr(OneAllocation, "allocated", lambda self: memory.setdefault(self, allocated(self)))
    wanted_state = begun(reference, 2, rng)
    state = model.on_device(wanted_state.copy())
    for n in range(6):
        tokens, is_new = rng.integers(0, SMALL["V"], (1, 9)), n % 2
        found, _ = model.forward(tokens, None if is_new else state, cu_seqlens=np.cumsum([0, *lengths]))
        wanted, _ = reference.forward(tokens, None if is_new else wanted_state, cu_seqlens=np.cumsum([0, *lengths]))
        close(host(found), wanted, 1e-5)
        assert len(graphs) == (n > 1) + (n > 2)
    assert graphs[0] > 10 * len(model.layers.decoder.layers)


@pytest.mark.parametrize("B", [1, 8, 9, 64])
def test_a_step_takes_the_shared_memory_of_any_card(kind, B, rng):
    """Of cards of compute capability 8.6, 8.9 and 12.0, where a block has 99 KB, which the emulator does not check."""

    class Card(EmulatedDevice):
        shared_per_block, shared_per_multiprocessor, multiprocessors = 99 * 1024, 100 * 1024, 128

        def prepared(self, kernel, blocks, args, smem, together):
            assert smem <= self.shared_per_block, kernel
            return lambda: None

    decoder = decoder_of(kind, random_weights(kind, rng), np.float32, B, Card())
    decoder.step(np.zeros(B, np.int64), decoder.initial_state())


@pytest.mark.pairwise
@pytest.mark.parametrize("calls", [[9], [1, 1]], ids=str)
def test_float16_holds_large_squares_and_outputs(on_cuda, kind, calls, rng):
    """The channel mix's squares and the recurrence's output pass 65,504, where float16 ends; the logits do not."""
    weights = random_weights(kind, rng)
    for i in range(2):
        for name, factor in (("ffn.key", 300), ("ffn.value", 1e-6), ("att.key", 100), ("att.value", 100)):
            weights[f"blocks.{i}.{name}.weight"] *= factor
        if kind.version.number == 7:
            weights[f"blocks.{i}.att.r_k"] *= 1e-4  # of its bonus, which no norm makes small
    weights, tokens = {n: a.astype(HALF) for n, a in weights.items()}, rng.integers(0, SMALL["V"], (9, sum(calls)))
    found, _ = in_calls(on_cuda(weights), tokens, calls)
    wanted, _ = in_calls(kind(weights), tokens, calls)
    assert np.median(relative_error(found, wanted, -1)) <= tolerance(HALF)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
def test_weights_beyond_float16_are_refused(on_cuda, dtype, kind, rng):
    weights = {name: array.astype(dtype) for name, array in random_weights(kind, rng).items()}
    weights["blocks.1.att.key.weight"][3, 4] = 1e5
    complaint = f"{kind.version.owner}: blocks.1.att.key.weight has numbers beyond float16, expected dtype"
    with pytest.raises(ContractError, match=complaint):
        on_cuda(weights, HALF)


@pytest.mark.pairwise(half="device")
def test_threads_and_streams_share_a_model(on_cuda, kind, rng):
    """Prompts and steps of each thread are what they are alone; on a card also where each has a stream of its own."""
    model, how, streams = on_cuda(random_weights(kind, rng)), Sampling(temperature=0), [nullcontext]
    if isinstance(model.layers.device, CupyDevice):
        import cupy

        streams.append(partial(cupy.cuda.Stream, non_blocking=True))
    prompts = rng.integers(0, SMALL["V"], (3, 4))

    def write(prompt, stream=nullcontext):
        with stream():
            batch = Batch(model, 1)
            (slot,) = batch.join([prompt], how)
            return [batch.step()[slot] for _ in range(2)] + list(islice(model.generate(prompt, temperature=0), 3))

    wanted = [write(prompt) for prompt in prompts]
    for stream in streams:
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(partial(write, stream=stream), prompts)) == wanted


def test_memory_of_tokens_waits_for_the_device():
    """Other numbers may lie there next, while the device still reads the tokens of a model that was dropped."""
    waited = []
    prompts = object.__new__(cuda_prompts.Prompts)
    prompts.device, prompts.copied = SimpleNamespace(finish=waited.append), "an event"
    del prompts
    assert waited == ["an event"]


@pytest.mark.pairwise
def test_copies_share_the_weights_or_are_refused(on_cuda, kind, rng):
    model = on_cuda(random_weights(kind, rng))
    _, state = model.forward([[1, 2]])
    assert copy.copy(model).layers is model.layers
    for one in (model, model.layers.decoder, Batch(model, 1)):
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(NotSupported, match="what is on the GPU cannot be copied or pickled"):
                copied(one)
    twin = copy.copy(state)
    wanted, _ = model.forward([[3]], state)
    np.testing.assert_array_equal(host(model.forward([[3]], twin)[0]), host(wanted))


@pytest.mark.pairwise
def test_the_eps_of_norms_is_that_of_the_weights(on_cuda, kind, rng):
    weights, tokens = (
        random_weights(kind, rng) | {"norm_eps": np.array([0.1, 0.5])},
        rng.integers(0, SMALL["V"], (2, 5)),
    )
    found, _ = in_calls(on_cuda(weights), tokens, [4, 1])
    close(found, in_calls(kind(weights), tokens, [4, 1])[0], 1e-5)


@pytest.mark.pairwise
def test_a_tuned_state_is_where_sequences_start(on_cuda, kind, rng):
    weights = random_weights(kind, rng)
    weights |= {f"blocks.{i}.att.time_state": rng.standard_normal((4, 16, 16), np.float32) for i in range(2)}
    for tokens in ([[1], [2]], [[1, 2, 3]]):
        found, _ = on_cuda(weights).forward(tokens)
        close(host(found), kind(weights).forward(tokens)[0], 1e-5)


@pytest.mark.pairwise
def test_joining_and_leaving_is_the_cpus(on_cuda, kind):
    """Of weights that draw the same tokens when each is changed by a thousandth: of others rounding may turn a draw."""
    weights, how = random_weights(kind, np.random.default_rng(1)), Sampling(temperature=1, seed=1)
    batches = [Batch(model, 3) for model in (on_cuda(weights), kind(weights))]
    for batch in batches:
        (first,) = batch.join([[1, 2, 3]], how)
        drawn = [batch.step(), batch.step()]
        second, third = batch.join([[4], [5, 6]], how)
        drawn += [batch.step()]
        batch.leave(first)
        drawn += [batch.step(), batch.step()]
        batch.leave(second)
        (fourth,) = batch.join([[7]], how, [batch.state(third)])
        batch.drawn = [*drawn, batch.step(), batch.step()]
        assert (second, third, fourth) == (1, 2, 0)
    assert batches[0].drawn == batches[1].drawn


@pytest.mark.pairwise(half="device")
def test_generating_is_the_cpus(on_cuda, kind):
    """Of weights as in `test_joining_and_leaving_is_the_cpus`."""
    weights = random_weights(kind, np.random.default_rng(1))
    texts = [list(islice(model.generate([1, 2, 3], temperature=0), 8)) for model in (on_cuda(weights), kind(weights))]
    assert texts[0] == texts[1]


# -- graphs and what they share --------------------------------------------------------------------------------
@pytest.fixture
def calls(on_cuda, monkeypatch):
    """What the decoders are asked to do, in order."""
    done = []

    def noted(name):
        original = getattr(cuda_decoder.CudaDecoder, name)

        def method(decoder, *arguments):
            done.append(f"{name} {decoder.batch}")
            return original(decoder, *arguments)

        return method

    for name in ("step", "capture", "replay"):
        monkeypatch.setattr(cuda_decoder.CudaDecoder, name, noted(name))
    return done


@pytest.mark.pairwise
def test_a_graph_is_captured_once_a_state_comes_again(on_cuda, calls, kind):
    model, reference = (make(random_weights(kind, np.random.default_rng(0))) for make in (on_cuda, kind))
    state, other, wanted = model.initial_state(1), model.initial_state(1), reference.initial_state(1)

    def step(state, token):
        del calls[:]
        found, _ = model.forward([[token]], state)
        return found, [call for call in calls if call != "step 1" or "capture 1" not in calls]

    kept = []
    for token, expected in ((1, ["step 1"]), (2, ["capture 1", "replay 1"]), (3, ["replay 1"])):
        found, done = step(state, token)
        kept.append((found, reference.forward([[token]], wanted)[0]))
        assert done == expected
    assert step(other, 1)[1] == ["step 1"]  # new arrays, no graph yet
    assert step(state, 4)[1] == ["replay 1"]  # states that alternate keep theirs
    close(model.to_host(step(state, 5)[0]), [reference.forward([[token]], wanted)[0] for token in (4, 5)][1], 1e-5)
    for found, expected in kept:  # no later step has written over them
        close(model.to_host(found), expected, 1e-5)


@pytest.mark.pairwise(half="device")
def test_batch_sizes_share_the_weights_and_few_are_kept(on_cuda, kind, rng):
    model = on_cuda(random_weights(kind, rng))
    pool = model.initial_state(12)
    first = model.layers.steps_of(1).decoder
    for batch in (*range(1, 12), 4):
        model.forward(np.ones((batch, 1), int), pool, slots=list(range(batch)))
    assert list(model.layers.steps) == [5, 6, 7, 8, 9, 10, 11, 4]
    for batch, steps in model.layers.steps.items():
        assert (steps.decoder.batch, steps.decoder.logits.shape) == (batch, (batch, SMALL["V"]))
        assert steps.decoder.layers is first.layers and steps.decoder.model_weights is first.model_weights
    model.forward([[1]])
    assert model.layers.steps_of(1).decoder.layers is first.layers


# -- dtypes, progress, refusals --------------------------------------------------------------------------------
@pytest.mark.pairwise
@pytest.mark.parametrize(
    "stored, asked, kept",
    [
        ("float32", None, "float32"),
        ("float64", None, "float32"),
        ("float16", None, "float16"),
        ("bfloat16", None, "bfloat16"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", np.float32, "float32"),
    ],
)
def test_dtype_is_what_was_asked_for_or_the_files_half(on_cuda, stored, asked, kept, kind, rng):
    weights = {name: array.astype(stored) for name, array in random_weights(kind, rng).items()}
    assert on_cuda(weights, asked).layers.steps_of(1).decoder.dtype == np.dtype(kept)


def test_dtypes_that_are_refused(on_cuda, kind, rng):
    for dtype, shown in ((np.float64, "float64"), ("q4", "'q4'")):
        complaint = f"{kind.version.owner}: dtype is {shown}, expected float32, float16, bfloat16, int8"
        with pytest.raises(TypeError, match=complaint):
            on_cuda(random_weights(kind, rng), dtype)


def test_progress_counts_the_bytes_of_the_weights(on_cuda, kind, rng):
    weights, seen = random_weights(kind, rng), []
    weights |= {f"blocks.{i}.att.time_state": rng.standard_normal((4, 16, 16), np.float32) for i in range(2)}
    on_cuda(weights, HALF, progress=lambda *bytes_: seen.append(bytes_))
    total = sum(array.nbytes for array in weights.values())
    assert {of for _, of in seen} == {total} and seen[-1][0] == total and len(seen) == len(weights)


def test_states_of_another_place_are_refused(on_cuda, device, kind, rng):
    if isinstance(device.zeros((1,), np.float32), np.ndarray):
        pytest.skip("the emulated device has NumPy arrays too")
    model = on_cuda(random_weights(kind, rng))
    state = kind(random_weights(kind, rng)).initial_state()
    with pytest.raises(TypeError, match="state.att_shift is a numpy.ndarray, expected one of the model's device"):
        model.forward([[1]], state)
    model.forward([[1]], model.on_device(state))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype(np.int8)], ids=str)
def test_logits_come_in_parts(on_cuda, kind, device, dtype, rng):
    if dtype == np.int8 and device.capability != 90:
        pytest.skip("int8 is for Hopper cards")
    model, tokens = on_cuda(random_weights(kind, rng), dtype), rng.integers(0, SMALL["V"], (2, 9))
    wanted, _ = model.forward(tokens)
    hidden, _ = model.forward(tokens, hidden=True)
    for part in (np.s_[:, 2:5], np.s_[:, ::2], np.s_[1], np.s_[1, 3]):
        found = model.head(hidden[part])
        assert found.dtype == np.float32
        close(model.to_host(found), model.to_host(wanted[part]), tolerance(dtype if dtype in DTYPES else BFLOAT16) / 8)


@pytest.mark.pairwise
def test_a_quantised_checkpoint_is_widened(on_cuda, kind, rng):
    few = kind.quantise(random_weights(kind, rng, np.float32), "int8")
    tokens = rng.integers(0, SMALL["V"], (2, 6))
    reference = kind(few, dtype="float32")
    start = begun(reference, 2, rng)
    found, _ = in_calls(on_cuda(few), tokens, [5, 1], start)
    wanted, _ = in_calls(reference, tokens, [5, 1], start)
    close(found, wanted, 1e-5)


@pytest.mark.pairwise
def test_int8_matrices_serve_prompts_and_steps(on_cuda, kind, device, rng):
    weights = random_weights(kind, rng)
    if device.capability != 90:
        with pytest.raises(NotSupported, match=f"{kind.version.owner}: dtype int8 on the GPU needs a Hopper card"):
            on_cuda(weights, "int8")
        return
    tokens, lengths = rng.integers(0, SMALL["V"], (2, 9)), [7, 1, 1]
    reference = kind(in_eight_bits(weights))
    start = begun(reference, 2, rng)
    wanted, _ = in_calls(reference, tokens, lengths, start)
    for given in (weights, kind.quantise(weights, "int8")):
        rows = relative_error(in_calls(on_cuda(given, "int8"), tokens, lengths, start)[0], wanted, -1)
        # In 900 draws medians were at most .4 of their limit. Steps had at most .026; of their errors, an eighth as
        # many are twice as large: hence ten times that.
        assert np.median(rows) <= tolerance(BFLOAT16) / 2
        assert rows[:, lengths[0] :].max() <= 4 * tolerance(BFLOAT16)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16], ids=str)
def test_a_rounded_state_goes_through_prompts_pools_and_files(on_cuda, kind, dtype, rng, tmp_path):
    weights, tokens = random_weights(kind, rng), rng.integers(0, SMALL["V"], (2, 9))
    model = on_cuda(weights, state_dtype=dtype)
    _, state = model.forward(tokens[:, :7])
    assert state.wkv.dtype == dtype and state.att_shift.dtype == np.float32
    wanted, wanted_state = kind(weights).forward(tokens[:, :7])
    close(host(state.wkv).astype(np.float32), wanted_state.wkv, ml_dtypes.finfo(dtype).eps)
    state.save(tmp_path / "state.npz")
    loaded = model.on_device(State.load(tmp_path / "state.npz"))
    pool = model.initial_state(3)
    for slot in range(2):
        pool.put(2 * slot, model.on_device(State(*(host(part)[:, slot : slot + 1] for part in state.arrays))))
    for column in tokens[:, 7:].T:
        found = host(model.forward(column[:, None], state)[0]).copy()
        np.testing.assert_array_equal(host(model.forward(column[:, None], loaded)[0]), found)
        np.testing.assert_array_equal(host(model.forward(column[:, None], pool, slots=[0, 2])[0]), found)
        wanted, _ = kind(weights).forward(column[:, None], wanted_state)
        close(found, wanted, 8 * ml_dtypes.finfo(dtype).eps)
    with pytest.raises(TypeError, match=f"state.wkv has dtype float32, expected {dtype}"):
        model.forward(tokens, on_cuda(weights).initial_state(2))


@pytest.mark.pairwise
def test_blocks_that_go_on_with_later_tokens(on_cuda, kind, rng, monkeypatch):
    weights, tokens = random_weights(kind, rng), rng.integers(0, SMALL["V"], (1, 61))
    wanted = host(on_cuda(weights).forward(tokens)[0])
    monkeypatch.setattr(kernels.HeadKernel, "ENOUGH", 1)
    np.testing.assert_array_equal(host(on_cuda(weights).forward(tokens)[0]), wanted)


@pytest.mark.pairwise
@pytest.mark.parametrize("D", [8, 2056, 4104])
@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_shifts_of_narrow_and_wide_rows(device, most, D, rng):
    """Five tokens of two prompts: one goes on where an earlier call ended, the other starts in the middle."""
    x, before, (weight, bias, *maa) = (
        rng.standard_normal((5, D)),
        rng.standard_normal((2, D)),
        rng.standard_normal((4, D)),
    )
    given = {"x": x, "before": before, "weight": weight, "bias": bias, "maa": np.stack(maa)}
    arrays = {name: device.upload(array.astype(np.float32)) for name, array in given.items()}
    arrays |= {
        "starts": device.upload(np.array([0, -1, -1, 1, -1])),
        "ends": device.upload(np.array([-1, -1, 0, -1, 1])),
    }
    shapes = {"shift": (2, D), "xx": (5, D), "d": (5, D), "mixed": (2, 5, D)}
    arrays |= {name: device.empty(shape, np.float32) for name, shape in shapes.items()}
    kernel, tokens_per_block = kernels.ShiftMix.fitting(np.dtype(np.float32), D, 2 * most, 1)
    assert tokens_per_block == min(most, kernel.TOKENS)
    at = {name: device.pointer(array) for name, array in arrays.items()}
    args = kernel.pack(**at, T=5, D=D, C=2, tokens_per_block=tokens_per_block, eps=1e-5)
    device.launch(kernel, -(-5 // tokens_per_block), args)
    xx = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight + bias
    d = np.stack([before[0], *xx[:2], before[1], xx[3]]) - xx
    mixed = xx + d * np.stack(maa)[:, None]
    for name, wanted in {"xx": xx, "d": d, "shift": xx[[2, 4]], "mixed": mixed}.items():
        np.testing.assert_allclose(host(arrays[name]), wanted, rtol=1e-5, atol=2e-5, err_msg=name)


@pytest.mark.pairwise
def test_warming_up_runs_what_is_asked_for(on_cuda, kind, rng):
    weights = random_weights(kind, rng)
    model, reference = on_cuda(weights), kind(weights)
    model.warm_up(batches=(2, 9), prompt=5)
    assert {2, 9} <= set(model.layers.steps) and len(model.layers.prompts) == 1
    for tokens in ([[1, 2, 3]], [[4], [5]]):
        state = begun(reference, len(tokens), rng)
        close(host(model.forward(tokens, model.on_device(state.copy()))[0]), reference.forward(tokens, state)[0], 1e-5)
