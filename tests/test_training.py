"""Training: every gradient, the optimiser, the order of the text, and checkpoints that outlive whatever ends a run."""

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
from conftest import PATIENCE
from safetensors.numpy import load_file, save_file

import linattn_np
from linattn_np.__main__ import main
from linattn_np.errors import ContractError
from linattn_np.models import austen, checkpoint, training, training_steps
from linattn_np.models.checkpoint import CheckpointError
from linattn_np.models.training import Settings, Text, Training
from linattn_np.models.training_products import HostProducts
from linattn_np.models.training_steps import StepInputs, keep
from linattn_np.models.versions import VERSIONS

WROTE = "wrote {0}/model.safetensors. To write with it: linattn-np generate --model {0}/model.safetensors 'The '"
TRAIN = [sys.executable, "-m", "linattn_np", "train"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(linattn_np.__file__).parents[1])}  # the package under test
TEXT = b"It is a truth universally acknowledged, that a single man in possession of a good fortune... " * 30
SMALL = Settings(layers=2, width=16, head_size=8, batch=4, context=24, steps=30, lr=1e-2, dropout=0.1)
V = 11


@pytest.fixture
def train(kind):
    """`Training` of a model of each version."""
    return partial(Training, kind=kind)


# -- gradients --------------------------------------------------------------------------------------------------------
@pytest.fixture
def model(kind, rng):
    """A layout, float64 weights away from the many zeros of the first ones, and tokens [B, T + 1]."""
    layout = kind.layout(kind.layout.sizes_of(layers=2, width=16, head_size=4, vocabulary=V))
    return layout, layout.initial(0) + 0.1 * rng.standard_normal(layout.size), rng.integers(0, V, (3, 20))


def value_and_gradient(layout, vector, tokens, drop=keep, products=HostProducts(), matrices=None):
    gradient = np.full(layout.size, np.nan, vector.dtype)
    value, pull = VERSIONS[layout.version.number].loss(layout.tree(vector, matrices), tokens, products, drop)
    pull(layout.tree(gradient))
    return float(value), gradient


def test_the_loss_is_that_of_the_models_logits(kind, model):
    layout, vector, tokens = model
    logits, _ = kind(layout.named(vector.astype(np.float32))).forward(tokens[:, :-1])
    logits = logits.astype(np.float64)
    log_sums = np.log(np.exp(logits).sum(-1))
    wanted = (log_sums - np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]).mean()
    assert value_and_gradient(layout, vector, tokens)[0] == pytest.approx(wanted, rel=1e-5)


class Rounded(HostProducts):
    """Products as a GPU has them: of bfloat16, with float32 sums."""

    dtype = np.dtype(ml_dtypes.bfloat16)

    def cast(self, x):
        return x.astype(self.dtype, copy=False)

    def matmul(self, a, b, out=None):
        return np.matmul(a.astype(np.float32), b.astype(np.float32), out=out)


@pytest.fixture
def wide(kind, rng):
    """The same of a model close to its first weights, with gradients that rounding moves by 4e-3 (60 seeds)."""
    layout = kind.layout(kind.layout.sizes_of(layers=2, width=64, head_size=32))
    return layout, layout.initial(0) + 0.02 * rng.standard_normal(layout.size), rng.integers(0, 256, (4, 130))


def close(value, gradient, wanted_value, wanted, limit):
    assert value == pytest.approx(wanted_value, rel=limit)
    assert np.linalg.norm(gradient - wanted) < limit * np.linalg.norm(wanted)


def test_half_precision_products_round_and_no_more(wide):
    layout, vector, tokens = wide
    single = vector.astype(np.float32)
    matrices = Rounded().cast(single[: layout.matrices])
    found = value_and_gradient(layout, single, tokens, products=Rounded(), matrices=matrices)
    assert found[1].dtype == np.float32
    close(*found, *value_and_gradient(layout, vector, tokens), 1e-2)


def on_device(x):
    """What products ask of a CuPy array."""
    names = "shape", "strides", "itemsize", "dtype", "nbytes"
    return SimpleNamespace(**{name: getattr(x, name) for name in names}, data=SimpleNamespace(ptr=x.ctypes.data))


def without_library(kind):
    """A `Cublas` or `CublasLt` that has loaded no library."""
    cublas = object.__new__(kind)
    cublas.current_stream = lambda: SimpleNamespace(ptr=0, is_capturing=lambda: False)
    cublas.handle, cublas.workspace, cublas.of_handle = None, on_device(np.zeros(1)), None
    cublas.multiprocessors, cublas.lock = 132, nullcontext()
    return cublas


def test_cublas_reads_matrices_and_transposed_ones(rng, monkeypatch):
    """`Cublas.product` against what the documentation of cublasGemmStridedBatchedEx says of its arguments."""
    from linattn_np.backends.cupy import blas

    def call(name, *arguments):
        if name != "cublasGemmStridedBatchedEx":
            return
        (_, of_a, of_b, m, n, k, _, a, _, lda, next_a, b, _, ldb, next_b, beta, c, _, ldc, next_c, count, *_) = (
            arguments
        )

        def matrices(pointer, how, rows, columns, leading, apart):
            """By columns, `leading` apart; transposed if `how` says so."""
            stored = (columns, rows) if how else (rows, columns)
            size = 4 * (apart.value * (count - 1) + leading * (stored[1] - 1) + stored[0])
            flat = np.frombuffer((ctypes.c_char * size).from_address(pointer.value), np.float32)
            view = np.ndarray((count, *stored), np.float32, flat, strides=(4 * apart.value, 4, 4 * leading))
            return view.swapaxes(1, 2) if how else view

        y = matrices(c, 0, m, n, ldc, next_c)
        before = beta._obj.value * y if beta._obj.value else 0
        y[...] = matrices(a, of_a, m, k, lda, next_a) @ matrices(b, of_b, k, n, ldb, next_b) + before

    cublas = without_library(blas.Cublas)
    monkeypatch.setattr(cublas, "call", call, raising=False)
    a, b = rng.standard_normal((2, 5, 3), dtype=np.float32), rng.standard_normal((2, 3, 4), dtype=np.float32)
    rows_apart = np.concatenate([a, a], axis=2)[:, :, :3]
    for left in (a, a.swapaxes(1, 2).copy().swapaxes(1, 2), rows_apart):
        for right in (b, b.swapaxes(1, 2).copy().swapaxes(1, 2)):
            y = np.full((2, 5, 4), np.nan, np.float32)
            cublas.product(*map(on_device, (left, right, y)))
            np.testing.assert_allclose(y, a @ b, rtol=1e-5, atol=1e-5)
            cublas.product(*map(on_device, (left, right, y)), add=True)
            np.testing.assert_allclose(y, 2 * (a @ b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("status, of_algorithms, taken", [(15, [], []), (0, [], []), (0, [7, 7], []), (0, [7, 0], [1])])
def test_cublas_makes_a_large_product_that_cublaslt_has_no_algorithm_for(monkeypatch, status, of_algorithms, taken):
    """Algorithms whose own status is an error are not taken."""
    from linattn_np.backends.cupy import blas, blas_lt

    class Library:
        def cublasLtMatmulAlgoGetHeuristic(self, *arguments):
            *_, found, count = arguments
            for n, own in enumerate(of_algorithms):
                found[n].algorithm[0], found[n].status = n, own
            count._obj.value = len(of_algorithms)
            return status

        def cublasLtMatmul(self, *arguments):
            made.append(arguments[-4]._obj.algorithm[0])
            return 0

        def __getattr__(self, name):
            return lambda *_: 0

    made = []
    products = without_library(blas_lt.CublasLt)
    products.cupy, products.device, products.lt = Mock(), 0, Library()
    products.cupy.cuda.get_elapsed_time.return_value = 1.0
    monkeypatch.setattr(blas_lt, "LEAST", 1)
    monkeypatch.setattr(blas_lt, "ALIGNED", 1)
    monkeypatch.setattr(blas_lt, "CHOSEN", {})
    monkeypatch.setattr(blas.Cublas, "prepared", lambda *_: lambda: made.append("cuBLAS"))
    arrays = [on_device(np.zeros(shape, np.float16)) for shape in ((1, 4, 8), (1, 8, 2), (1, 4, 2))]
    for _ in range(2):
        products.product(*arrays)
    assert made == (taken * (blas_lt.ROUNDS + 2) or ["cuBLAS"] * 2)
    products.prepared(*arrays)()  # 4 rows, of a plan
    monkeypatch.setattr(blas_lt, "ROWS", 2)
    products.prepared(*arrays)()
    assert made[-2:] == ["cuBLAS", *(taken or ["cuBLAS"])]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_fastest_algorithm_of_a_large_product(card, rng, monkeypatch, dtype):
    """All have the same bits; the next product of the shape takes it, and may be added."""
    import cupy

    from linattn_np.backends.cupy import blas_lt

    monkeypatch.setattr(blas_lt, "LEAST", 1)
    monkeypatch.setattr(blas_lt, "CHOSEN", {})
    a, b = rng.standard_normal((2, 128, 256)), rng.standard_normal((2, 256, 64))
    a, b = (cupy.asarray(x.astype(np.float32)).astype(np.dtype(dtype)) for x in (a, b))
    exact = cupy.asnumpy(a).astype(float) @ cupy.asnumpy(b).astype(float)
    for left in (a, a.swapaxes(1, 2).copy().swapaxes(1, 2)):
        for right in (b, b.swapaxes(1, 2).copy().swapaxes(1, 2)):
            y, products = cupy.full((2, 128, 64), np.nan, np.float32), blas_lt.CublasLt()
            for times in (1, 1, 2):
                products.product(left, right, y, add=times == 2)
                np.testing.assert_allclose(cupy.asnumpy(y), times * exact, atol=1e-3)
            (description, layouts, _), found = blas_lt.CHOSEN.popitem()[1], []
            addresses = [x.data.ptr for x in (left, right, y)]
            for proposal in products.proposals(description, layouts, 0):
                products.run(description, layouts, proposal, *addresses, False)
                found.append((products.split(proposal), cupy.asnumpy(y)))
            for numbers in [numbers for split, numbers in found if split == found[0][0]]:
                np.testing.assert_array_equal(numbers, found[0][1])
            products.product(left, right, y, add=True)  # measures, too, and keeps what y holds
            np.testing.assert_allclose(cupy.asnumpy(y), found[-1][1] + exact, atol=1e-3)


# -- parameters -------------------------------------------------------------------------------------------------------
def test_a_tree_is_views_of_every_element(kind):
    layout = kind.layout(kind.layout.sizes_of(layers=2, width=16, head_size=8))
    vector = np.zeros(layout.size)
    tree = layout.tree(vector)
    arrays = [array for part in (tree, *tree.layers) for array in vars(part).values() if isinstance(array, np.ndarray)]
    for array in arrays:
        array += 1
    assert (vector == 1).all()
    version = kind.version
    assert list(layout.named(vector)) == list(version.parameter_axes(2))
    assert sum(end - start for name, (start, end) in layout.spans.items() if version.is_matrix(name)) == layout.matrices


def test_the_example_models_sizes_are_those_of_its_width(kind):
    weights = load_file(austen(kind.version.number))
    layout = kind.layout(kind.layout.sizes_of(layers=4, width=256, head_size=64))
    assert layout.shapes == {name: weights[name].shape for name in layout.shapes} and len(weights) == len(layout.shapes)


# -- the optimiser and the text ---------------------------------------------------------------------------------------
def test_a_step_is_adamws(train):
    """Loshchilov and Hutter, algorithm 2, with the gradient clipped to its greatest norm."""
    one = train(TEXT, replace(SMALL, dropout=0.0, weight_decay=0.5))
    weights, first, second = one.steps.weights.astype(np.float64), 0, 0
    decayed = np.arange(one.layout.size) < one.layout.matrices
    for step in range(1, 4):
        tokens, rate = one.text.batch(step - 1), one.learning_rate()
        _, gradient = value_and_gradient(one.layout, weights, tokens)
        gradient *= min(1, training_steps.CLIP / np.linalg.norm(gradient))
        first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
        update = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.99**step)) + 1e-8)
        weights -= rate * (update + 0.5 * decayed * weights)
        one.step()
    assert np.abs(one.steps.weights - weights).max() < 2e-4


def test_the_learning_rate_rises_and_falls(train):
    one = train(TEXT, replace(SMALL, steps=100, lr=1.0))
    rates = []
    for one.step_number in range(101):
        rates.append(one.learning_rate())
    assert rates[0] == pytest.approx(0.5) and max(rates) == rates[2] > 0.99 and rates[-1] == 0
    assert rates[50] == pytest.approx(0.5) and rates[2:] == sorted(rates[2:], reverse=True)


def test_every_row_is_read_once_an_epoch_and_none_that_is_held_out():
    numbers = np.arange(2000, dtype=np.uint16).astype(np.uint8)
    text = Text(numbers, replace(SMALL, batch=1, context=10))
    epoch = [text.batch(step)[0] for step in range(text.rows)]
    starts = sorted(text.start(row) for row in range(text.rows))
    assert np.diff(starts).tolist() == [10] * (text.rows - 1) and starts[-1] + 11 <= len(text.learned) == 1900
    assert all((np.diff(row) % 256 == 1).all() for row in epoch)
    assert [text.start(row) for row in range(text.rows)] != [text.start(row) for row in range(text.rows, 2 * text.rows)]
    held = [byte for batch in text.held_out() for row in batch for byte in row[1:]]
    assert held == numbers[1901:].tolist()


def test_of_a_long_text_no_more_is_held_out_than_32_steps_read():
    text = Text(np.zeros(100_000, np.uint8), replace(SMALL, batch=2, context=10))
    assert len(text.held) == 640 and len(text.learned) == 99_360


@pytest.mark.parametrize("view", ["array", "read-only", "map", "bytearray"])
def test_the_text_is_no_memory_that_others_write_to(train, view, tmp_path):
    """What a caller does with an array afterwards changes neither steps nor the text's fingerprint."""
    (tmp_path / "text.bin").write_bytes(TEXT)
    owner = bytearray(TEXT) if view == "bytearray" else np.frombuffer(TEXT, np.uint8).copy()
    if view == "map":
        owner = np.memmap(tmp_path / "text.bin", mode="r+")
    given = np.frombuffer(owner, np.uint8) if view == "bytearray" else owner[:]
    given.flags.writeable = view != "read-only"
    found, wanted = train(given, SMALL), train(TEXT, SMALL)
    np.asarray(owner)[:] = 0
    assert [float(found.step()) for _ in range(3)] == [float(wanted.step()) for _ in range(3)]


def test_bytes_are_not_copied(train):
    assert np.shares_memory(train(TEXT, SMALL).text.tokens, np.frombuffer(TEXT, np.uint8))


# -- checkpoints ------------------------------------------------------------------------------------------------------
def test_a_restored_training_goes_on_bit_for_bit(train, kind, tmp_path):
    whole, part = train(TEXT, SMALL), train(TEXT, SMALL)
    for _ in range(12):
        whole.step()
    for _ in range(7):
        part.step()
    part.save(tmp_path / "training.safetensors")
    again = Training.restore(tmp_path / "training.safetensors", TEXT, kind=kind)
    assert 0 < again.seconds == part.seconds
    for _ in range(5):
        again.step()
    for name in training.VECTORS:
        np.testing.assert_array_equal(getattr(again.steps, name), getattr(whole.steps, name))


def test_a_write_that_fails_leaves_the_older_file(train, tmp_path, monkeypatch):
    one, path = train(TEXT, SMALL), tmp_path / "training.safetensors"
    one.save(path)
    before = path.read_bytes()
    one.step()
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError):
        one.save(path)
    assert path.read_bytes() == before


def until_exists(path, writer):
    """Waits for the file that a process writes."""
    while not path.exists():
        assert writer.poll() is None or path.exists()
        time.sleep(0.01)


@pytest.mark.pairwise(half="kind")
def test_killed_at_a_random_moment_it_goes_on_as_if_it_had_not_been(train, kind, tmp_path):
    (tmp_path / "text").write_bytes(TEXT)
    steps = dict(asdict(SMALL), steps=60)
    command = [*TRAIN, "--text", str(tmp_path / "text"), "--device", "cpu", "--every", "0"]
    command += ["--version", str(kind.version.number)]
    new = [f"--{name.replace('_', '-')}={value}" for name, value in steps.items() if value is not None]
    whole = train(TEXT, Settings(**steps))
    for _ in range(60):
        whole.step()
    whole.save_model(tmp_path / "whole.safetensors")

    killed = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out"), *new], env=ENVIRONMENT, stderr=subprocess.DEVNULL
    )
    until_exists(tmp_path / "out" / "training.safetensors", killed)
    time.sleep(random.uniform(0, 0.2))
    killed.send_signal(signal.SIGKILL)
    if killed.wait(PATIENCE):  # else the training ended before, as this test was slow
        assert killed.returncode == -signal.SIGKILL
        again = [*command, "--out", str(tmp_path / "out"), "--resume"]
        done = subprocess.run(again, env=ENVIRONMENT, capture_output=True, timeout=PATIENCE)
        assert done.returncode == 0 and b"step 60, " in done.stderr, done.stderr
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def about(**changes):
    return np.frombuffer(json.dumps({**asdict(SMALL), **changes}).encode(), np.uint8)


@pytest.mark.parametrize(
    "change, complaint",
    [
        (dict(weights=None), "holds first, second, seconds, .*, expected a training"),
        (dict(extra=np.zeros(3)), "holds extra"),
        (dict(weights=np.zeros(5, np.float32)), "has 5 weights for 2 layers of 16"),
        (dict(second=np.zeros(5, np.float32)), "has 5 elements of second, expected"),
        (dict(first=np.zeros((2, 5), np.float32)), "has first in float32 with 2 axes"),
        (dict(weights=np.zeros(5)), "has weights in float64"),
        (dict(step=np.array([-1])), "is at step -1"),
        (dict(seconds=np.array([np.nan])), "is at step 0 after nan seconds"),
        (dict(text=np.zeros(32, np.uint8)), "is the training on another text"),
        (dict(settings=np.frombuffer(b"[" * 100_000, np.uint8)), "has settings that are none"),
        (dict(settings=np.frombuffer(b"{}", np.uint8)), "has settings that are none"),
        (dict(settings=about(layers=10**9)), "layers is 1000000000, expected a whole number from 1 to 1024"),
        (dict(settings=about(layers=1024, width=1 << 20)), "has .* weights for 1024 layers"),
        (dict(settings=about(layers="2")), "layers is '2', expected a whole number"),
        (dict(settings=about(lr=float("nan"))), "lr is nan, expected"),
        (dict(settings=about(head_size=5)), "width 16 is no multiple of the head size 5"),
        (dict(settings=about(width=32)), "elements of weights, expected"),
        (dict(settings=about(lr=10**400)), "lr is a whole number of 1329 bits, expected a number above 0"),
        (dict(settings=about(steps=None, minutes=10**400)), "minutes is a whole number of 1329 bits"),
        (dict(settings=about(steps=10**400)), "steps is a whole number of 1329 bits, expected a whole number from 1"),
        (
            dict(settings=about(batch=(1 << 31) - 1)),
            "batch x context is 2147483647 x 24, expected at most 16777216 tokens",
        ),
        (dict(settings=about(context=1 << 30)), "batch x context is 4 x 1073741824, expected at most"),
        (dict(settings=np.frombuffer(b'{"lr": 1, "lr": 1}', np.uint8)), "are none .*: the JSON has a key twice"),
    ],
    ids=range(23),
)
def test_a_hostile_checkpoint_is_refused(train, kind, change, complaint, tmp_path):
    path = tmp_path / "training.safetensors"
    train(TEXT, SMALL).save(path)
    held = {name: array for name, array in {**load_file(path), **change}.items() if array is not None}
    save_file(held, path)
    with pytest.raises(CheckpointError, match=complaint):
        Training.restore(path, TEXT, kind=kind)


def test_a_damaged_checkpoint_is_refused(train, kind, tmp_path):
    path = tmp_path / "training.safetensors"
    train(TEXT, SMALL).save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        Training.restore(path, TEXT, kind=kind)


# -- the command line -------------------------------------------------------------------------------------------------
def test_one_training_writes_into_a_folder(tmp_path):
    """As many as srun started, without MPI, trained into one --out each for itself."""
    (tmp_path / "text").write_bytes(TEXT)
    how = dict(stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=tmp_path)
    command = [*TRAIN, "--text=text", "--out=out", "--device=cpu"]
    new = [*command, "--layers=1", "--width=16", "--head-size=8", "--batch=2", "--context=24", "--every=0"]
    started = [subprocess.Popen([*new, "--steps=1000000"], **how) for _ in range(3)]
    while not (tmp_path / "out" / "model.safetensors").exists() or sum(one.poll() is None for one in started) > 1:
        assert any(one.poll() is None for one in started)
        time.sleep(0.02)
    (trains,) = [one for one in started if one.poll() is None]
    busy = "argument --out: another process trains into out; name another folder. Processes share a training if mpiexec"
    for one in started:
        if one is not trains:
            said = one.communicate()[1]  # one that is late finds a checkpoint there
            assert one.returncode == 2 and (busy in said or "argument --out: out holds a training" in said)
    done = subprocess.run([*command, "--resume", "--steps=3"], timeout=PATIENCE, **how)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(f"linattn-np train: {busy}")
    trains.kill()
    trains.communicate()
    done = subprocess.run([*command, "--resume", "--steps=3"], timeout=PATIENCE, **how)
    assert done.returncode == 0  # death unlocks the folder


@pytest.fixture
def command(kind, tmp_path, capsys):
    """A function that trains on a text, and returns the command's exit code and the last line of its messages."""
    (tmp_path / "text").write_bytes(TEXT)
    small = ["--layers", 1, "--width", 16, "--head-size", 8, "--context", 24, "--steps", 3]
    always = ["--text", tmp_path / "text", "--out", tmp_path / "out", "--device", "cpu"]
    always += ["--version", kind.version.number]

    def run(*arguments, small=small):
        try:
            code = main(["train", *map(str, [*always, *small, *arguments])])
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().err.splitlines()[-1]

    return run


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--text=nowhere.txt"], "nowhere.txt: No such file or directory"),
        (["--text", os.devnull], f"{os.devnull}: is a device, expected a file or a pipe"),
        (["--context=2000"], "expected at least 4001 and 2 for a context of 2000"),
        (["--head-size=7"], ": width 16 is no multiple of the head size 7"),
        (["--batch=0"], "argument --batch: is '0', expected a whole number from 1 up"),
        (["--lr=-1"], "Training: lr is -1.0, expected a number above 0"),
        (["--dropout=1"], "Training: dropout is 1.0, expected a number from 0 up and below 1"),
        (["--minutes=3"], "argument --minutes: not allowed with argument --steps"),
        (["--every=-1"], "argument --every: is -1.0, expected"),
        (["--resume"], "holds no training; without --resume one begins there"),
        (["--device=tpu"], "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, complaint, command):
    code, line = command(*arguments)
    assert code == 2 and line.startswith("linattn-np train: ") and complaint in line


def test_a_training_in_the_folder_is_neither_lost_nor_mixed_up(command, tmp_path):
    assert command() == (0, WROTE.format(tmp_path / "out"))
    assert "holds a training; --resume goes on with it" in command()[1]
    assert command("--resume")[0] == 0
    code, line = command("--resume", "--width", 32, small=[])
    assert code == 2 and line.endswith(f"argument --width: is 32, but the training in {tmp_path / 'out'} has 16")


def test_a_loss_that_is_lost_is_not_saved(command, tmp_path):
    code, line = command("--lr", 1e30, "--every", 1000)
    assert code == 2 and "the loss is nan by step 3; " in line and "A lower --lr may help" in line
    assert checkpoint.read(tmp_path / "out" / "training.safetensors")["step"] == [0]


def test_cuda_without_cupy_is_said_so(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    code, line = command("--device", "cuda")
    assert code == 2 and "Training: device 'cuda' cannot be used: " in line


def test_settings_of_numpy_are_those_of_python(train, kind, tmp_path):
    odd = replace(SMALL, layers=np.int64(2), lr=np.float32(0.01), dropout=0)
    assert {type(value) for value in asdict(odd).values()} == {int, float, type(None)}
    train(TEXT, odd).save(tmp_path / "x.safetensors")
    assert Training.restore(tmp_path / "x.safetensors", TEXT, kind=kind).settings == odd


def test_a_text_that_would_be_replaced_is_refused(command, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(TEXT)
    code, line = command("--text", tmp_path / "out" / "model.safetensors")
    assert code == 2 and "argument --text: is model.safetensors in --out, which the training would replace" in line
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == TEXT


def test_too_much_for_the_memory_is_one_line(command, monkeypatch):
    monkeypatch.setattr(training.Training, "step", lambda self: np.empty(1 << 50))
    code, line = command()
    assert code == 2 and line.startswith("linattn-np train: out of memory: Unable to allocate")


def test_settings_are_refused_with_their_reason():
    for change, complaint in (
        (dict(steps=None), "expected either steps or minutes"),
        (dict(steps=0), "steps is 0"),
        (dict(minutes=1), "expected either"),
        (dict(batch=True), "batch is True"),
    ):
        with pytest.raises(ContractError, match=complaint):
            replace(SMALL, **change)


def test_a_step_is_fed_by_one_copy(monkeypatch):
    """With a stand-in for CuPy: tokens, seeds and schedule arrive as they are, through memory used in turns."""
    fed, waited = [], []

    class Event:
        def __init__(self, block, disable_timing):
            self.recorded = 0

        def record(self):
            self.recorded += 1

        def synchronize(self):
            waited.append(self.recorded)

    def copy(address, size):
        memory = np.frombuffer((ctypes.c_byte * size).from_address(address), np.int64)
        target[...] = memory
        fed.append(address)

    cuda = SimpleNamespace(alloc_pinned_memory=bytearray, Event=Event)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(zeros=np.zeros, cuda=cuda))
    feed = StepInputs(2, 3)
    target = feed.device
    feed.device = SimpleNamespace(data=SimpleNamespace(copy_from_host_async=copy))
    for number in range(4):
        tokens = np.arange(6).reshape(2, 3) + number
        feed(tokens, [9, number], [0.5, 1, 2, number])
        assert (feed.tokens == tokens).all() and feed.seeds.tolist() == [9, number]
        assert feed.schedule.tolist() == [0.5, 1, 2, number]
    assert waited == [0, 0, 1, 1] and fed[:2] == fed[2:] and fed[0] != fed[1]


def test_warming_up_changes_nothing(train):
    """What is compiled meanwhile takes nothing of `minutes`."""
    one, other = (train(TEXT, SMALL) for _ in range(2))
    one.warm_up()
    assert one.seconds == 0 and one.latest is None
    assert [float(one.step()) for _ in range(2)] == [float(other.step()) for _ in range(2)]
