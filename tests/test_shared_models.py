"""What a model on the CPU shares: with threads that call it at once, with its copies, with its file and its caller."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_decode_kernels import random_weights

from linattn_np.models import Batch, Sampling, State, austen, load
from linattn_np.models.matrices import FORMATS
from linattn_np.models.prompt_reading import PIECE
from linattn_np.models.rwkv import cpu_layers
from linattn_np.models.training import Settings, Training

PROMPTS = [b"Emma was", b"Mr. Darcy", b"It is a truth", b"Bath"]
COPIES = [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
GREEDY = Sampling(temperature=0)


@pytest.fixture(params=["numpy", *FORMATS])
def model(request, kind, monkeypatch):
    """The small model by NumPy, and with matrices of every format by Numba."""
    if request.param == "numpy":
        monkeypatch.setattr(cpu_layers, "has_loops", lambda: False)
    elif not cpu_layers.has_loops():
        pytest.skip("Numba is not installed")
    return load(austen(kind.version.number), dtype="float32" if request.param == "numpy" else request.param)


def text(model, prompt):
    return bytes(islice(model.generate(prompt, temperature=0), 8))


@pytest.mark.pairwise
def test_threads_that_call_one_model(model):
    wanted = [text(model, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: text(model, prompt), PROMPTS)) == wanted


@pytest.mark.pairwise
def test_steps_of_strided_states_compile_nothing(model, kind):
    """A row of a pool, as `State.row` gives it, and a state from its end; both are updated in place."""
    _, pool = model.forward([[72], [73]])
    wanted, last = model.forward([[74]], pool.row(1).copy())
    backwards = State(*(x[..., ::-1].copy()[..., ::-1] for x in pool.row(1).arrays))
    before = len(compiled(kind))
    for state in (pool.row(1), backwards):
        np.testing.assert_allclose(model.forward([[74]], state)[0], wanted, rtol=1e-4, atol=1e-4)
        for x, y in zip(state.arrays, last.arrays):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    assert len(compiled(kind)) == before


def compiled(kind):
    """The types that a step was compiled for."""
    return kind.module("numba_loops").step.signatures if cpu_layers.has_loops() else ()


@pytest.mark.pairwise
def test_generators_that_take_turns_in_threads(model):
    wanted = [text(model, prompt) for prompt in PROMPTS]
    writing = [model.generate(prompt, temperature=0) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        tokens = [list(pool.map(next, writing)) for _ in range(8)]
    assert [*map(bytes, zip(*tokens))] == wanted


@pytest.mark.pairwise
@pytest.mark.parametrize("copied", COPIES)
def test_copies_outlive_the_model(model, copied):
    """Their matrices are where the copy has them: what the model had is written over."""
    prompt = [list(PROMPTS[0])]
    wanted, _ = model.forward(prompt)
    step, _ = model.forward([[1]])
    twin = copied(model)
    for layer in model.layers.layers if twin.layers is not model.layers else ():
        for array in vars(layer).values():
            getattr(array, "bits", array)[...] = 7
    np.testing.assert_allclose(twin.forward(prompt)[0], wanted, rtol=0, atol=1e-4)  # a pickle has other strides
    np.testing.assert_allclose(twin.forward([[1]])[0], step, rtol=0, atol=1e-4)


@pytest.mark.parametrize("copied", COPIES)
def test_copies_of_states_and_batches_go_on_by_themselves(austen, copied):
    _, state = austen.forward([list(PROMPTS[0])])
    twin, wanted = copied(state), austen.forward([[1]], state.copy())[0]
    austen.forward([[2]], state)
    np.testing.assert_array_equal(austen.forward([[1]], twin)[0], wanted)

    batch = Batch(austen, 2)
    slots = batch.join(PROMPTS[:2], GREEDY)
    twin = copied(batch)
    assert (twin.model is austen) == (copied is copy.copy)
    drawn = [[one.step() for _ in range(5)] for one in (batch, twin)]
    assert drawn[0] == drawn[1] and set(drawn[0][0]) == set(slots)
    batch.leave(slots[0])
    assert (batch.free, twin.free) == (1, 0)


def test_threads_that_call_one_batch(austen):
    """A step is whole whichever thread makes it; those that are made at once come in some order."""
    batch, wanted = Batch(austen, 4), [text(austen, prompt) for prompt in PROMPTS]
    slots = {prompt: batch.join([prompt], GREEDY)[0] for prompt in PROMPTS}
    with ThreadPoolExecutor(4) as pool:
        steps = list(pool.map(lambda _: batch.step(), range(8)))
    for prompt, whole in zip(PROMPTS, wanted):
        assert sorted(step[slots[prompt]] for step in steps) == sorted(whole)


@pytest.mark.parametrize("copied", COPIES[1:])
def test_copies_of_a_training_learn(kind, copied):
    settings = Settings(layers=1, width=16, head_size=8, batch=2, context=20, steps=9)
    one = Training(b"It is a truth universally acknowledged, " * 20, settings, kind=kind)
    one.step()
    twin = copied(one)
    assert [float(one.step()) for _ in range(3)] == [float(twin.step()) for _ in range(3)]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [np.float32, "bfloat16"])
def test_a_model_owns_its_weights(model, kind, dtype, rng, tmp_path):
    """Neither its file, which is written again in its place, nor the dict of its caller changes it."""
    weights = {name: array.astype(dtype) for name, array in random_weights(kind, rng).items()}
    weights |= {f"blocks.{i}.att.time_state": rng.standard_normal((4, 16, 16), np.float32) for i in range(2)}
    path, format = tmp_path / "model.safetensors", model.layers.dtype
    save_file(weights, path)
    models = kind(weights, dtype=format), kind.from_file(path, dtype=format)
    wanted = [model.forward([[1, 2, 3]])[0] for model in models]
    for array in weights.values():
        array[...] = 3
    with open(path, "r+b") as file:
        file.write(b"\x3f" * path.stat().st_size)
    for model, logits in zip(models, wanted):
        np.testing.assert_array_equal(model.forward([[1, 2, 3]])[0], logits)


@pytest.mark.pairwise(half="kind")
def test_no_call_reads_more_than_a_piece(kind, monkeypatch):
    """A prompt takes as much memory as a piece of it; logits are within the rounding of another order of sums."""
    model, prompt, lengths = load(austen(kind.version.number), dtype="float32"), list(b"Anne " * (PIECE // 2)), []
    run = type(model.layers).logits

    def logits(self, tokens, *how):
        lengths.append(len(tokens))
        return run(self, tokens, *how)

    monkeypatch.setattr(type(model.layers), "logits", logits)
    first, batch = next(model.generate(prompt, temperature=0)), Batch(model, 1)
    batch.join([prompt], GREEDY)
    found = batch.sequences[0].logits
    assert max(lengths) == PIECE and first == batch.step()[0]
    np.testing.assert_allclose(found, model.forward([prompt], last=True)[0][0], rtol=0, atol=1e-4)
