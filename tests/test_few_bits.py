"""Matrices in 32, 16, 8 and 4 bits on the CPU: products, whole models, files, threads, and what is refused."""

import importlib.util
import os
import sys
import threading
from contextlib import contextmanager
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from literal_rwkv6 import moved_by_rounding
from reference import rms
from safetensors.numpy import load_file
from test_command import called
from test_rwkv_versions import LITERAL

import linattn_np
from linattn_np import ContractError, NotSupported, models
from linattn_np.models import Batch, Sampling, checkpoint, helper_threads, matrices
from linattn_np.models.files import write_arrays
from linattn_np.models.helper_threads import Board

pytest.importorskip("numba", reason="matrices of few bits are multiplied by Numba's loops")
from linattn_np.models import matrix_loops  # they import Numba
from linattn_np.models.rwkv import numba_loops

FEW_BITS = ("bfloat16", "int8", "int4")
BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4.5}
# Of products, relative; int4's numbers come with an offset, which cancels.
# Of float32 sums, one number after the other: 1.2e-6 at most in 4,000 draws of 277.
LIMIT = {"float32": 2e-6, "bfloat16": 1e-5, "int8": 1e-5, "int4": 1e-4}
GREEDY = Sampling(temperature=0)


@pytest.fixture(autouse=True)
def helped(monkeypatch):
    """Small matrices are shared by threads, too."""
    monkeypatch.setattr(helper_threads, "SHARE", 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")


@pytest.fixture
def path(kind):
    return models.austen(kind.version.number)


loaded = cache(models.load)


@pytest.fixture
def weights(kind, rng):
    layout = kind.layout(kind.layout.sizes_of(layers=2, width=48, head_size=16, vocabulary=70))
    return layout.named((layout.initial(0) + 0.2 * rng.standard_normal(layout.size)).astype(np.float32))


def close(found, wanted, limit):
    assert np.abs(found - wanted).max() <= limit * np.abs(wanted).max()


# -- products ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("format", matrices.FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 16, 17, 40, 205])
@pytest.mark.parametrize("shape", [(64, 32), (1, 1), (65, 33), (200, 96), (3, 130, 40), (150, 277)], ids=str)
def test_a_product_is_float32s_with_the_numbers_that_are_stored(format, tokens, shape, rng):
    matrix = matrices.pack(rng.standard_normal(shape), format)
    x = rng.standard_normal((*shape[:-2], tokens, shape[-1]), np.float32)
    wide = matrix.widened()
    assert wide.shape == shape and wide.dtype == np.float32
    close(matrix(x, Board()), x.astype(float) @ wide.astype(float).swapaxes(-1, -2), LIMIT[format])


def test_matrices_of_a_pool_are_neighbours_in_memory_with_the_same_numbers(rng, monkeypatch):
    monkeypatch.setattr(matrices, "POOL_BLOCK", 1 << 13)
    shapes = {"float32": (5, 3), "bfloat16": (2, 65, 3), "int8": (70, 33), "int4": (1, 40)}
    pool, places, sizes = matrices.Pool(), [], []
    for format, shape in 2 * [*shapes.items()]:
        matrix = matrices.pack(rng.standard_normal(shape), format)
        bits, scales = matrix.bits, matrix.scales
        assert pool.move(matrix) is matrix and matrix.bits is not bits
        np.testing.assert_array_equal(matrix.bits, bits, strict=True)
        np.testing.assert_array_equal(matrix.scales, scales, strict=True)
        places += matrix.bits.ctypes.data, matrix.scales.ctypes.data
        sizes += bits.nbytes, scales.nbytes
    assert not any(place % 64 for place in places)
    gaps = np.diff(places) - sizes[:-1]
    assert ((gaps >= 0) & (gaps < 64)).sum() == len(gaps) - 1  # all but from the first block to the second
    large = matrices.pack(rng.standard_normal((100, 100)), "float32")
    bits = large.bits
    assert pool.move(large).bits is bits  # larger than a block


@pytest.mark.parametrize("format", FEW_BITS)
def test_most_inputs_are_zero_and_are_not_read(format, rng):
    """What is not read may be anything: here a matrix without numbers for them."""
    w, x = rng.standard_normal((100, 70)), rng.standard_normal((3, 70), np.float32)
    few = [0, 5, 31, 32, 33, 64, 69]
    zero = np.setdiff1d(np.arange(70), few)
    x[:, zero] = 0
    x[2, 32:] = 0
    matrix = matrices.pack(w, format)
    wanted = matrix(x, Board())
    close(wanted, x @ matrix.widened().T, LIMIT[format])
    if format == "bfloat16":
        matrix.bits[:, :, zero] = 0x7FC0  # NaN
        np.testing.assert_array_equal(matrix(x, Board()), wanted)
    assert not matrix(np.zeros((1, 70), np.float32), Board()).any()


@pytest.mark.parametrize("format", matrices.FORMATS)
def test_a_token_has_the_same_bits_whatever_is_beside_it(format, monkeypatch, rng):
    matrix, x = matrices.pack(rng.standard_normal((100, 70)), format), rng.standard_normal((20, 70), np.float32)
    x[rng.random(x.shape) < np.linspace(0, 1, 20)[:, None]] = 0
    alone = [matrix(row[None], Board())[0] for row in x]
    close(np.array(alone), x @ matrix.widened().T, LIMIT[format])
    together = np.concatenate([matrix(part, Board()) for part in np.split(x, 4)])
    np.testing.assert_array_equal(together, alone)


def test_bfloat16_is_what_numpy_rounds_to(rng):
    w = rng.standard_normal((30, 20), np.float32)
    wanted = w.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(matrices.pack(w, "bfloat16").widened(), wanted)


def test_int8_has_a_scale_for_every_row(rng):
    w = rng.standard_normal((30, 20), np.float32) * 10.0 ** np.arange(-15, 15)[:, None].astype(np.float32)
    error = np.abs(matrices.pack(w, "int8").widened() - w).max(-1)
    assert (error <= np.abs(w).max(-1) / 254 * 1.01).all()


def test_int4_has_a_scale_for_every_block(rng):
    w = rng.standard_normal((30, 20), np.float32).repeat(8, -1) * rng.choice([1e-6, 1, 1e6], (30, 5)).repeat(32, -1)
    blocks, found = w.reshape(30, 5, 32), matrices.pack(w, "int4").widened().reshape(30, 5, 32)
    assert (np.abs(found - blocks).max(-1) <= np.abs(blocks).max(-1) / 8 * 1.4).all()


@pytest.mark.parametrize("power", [-100, -60, 60, 100])
def test_int4_rounds_alike_in_any_unit(power, rng):
    """Also where the squares of errors are no float32."""
    w = rng.standard_normal((5, 96)).astype(np.float32)
    found = matrices.pack(np.ldexp(w, power), "int4").widened()
    assert (found == np.ldexp(matrices.pack(w, "int4").widened(), power)).all()


@pytest.mark.parametrize("format", matrices.FORMATS)
def test_a_matrix_of_zeros(format):
    matrix = matrices.pack(np.zeros((70, 40)), format)
    assert not matrix.widened().any() and not matrix(np.ones((2, 40), np.float32), Board()).any()


def test_memory_is_in_proportion_to_the_bits(rng):
    w = rng.standard_normal((640, 512), np.float32)
    for format, bits in BITS.items():
        assert matrices.pack(w, format).nbytes == pytest.approx(w.size * bits / 8, rel=0.01)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_numbers_that_cannot_be_kept(format):
    w = np.ones((4, 32), np.float32)
    w[1, 2] = np.inf
    with pytest.raises(ContractError, match=f"pack: w has numbers that are not finite, which {format} cannot hold"):
        matrices.pack(w, format)
    with pytest.raises(ContractError, match="pack: format is 'int3', expected one of 'float32', 'bfloat16',"):
        matrices.pack(w, "int3")


# -- threads ----------------------------------------------------------------------------------------------------------
def test_calls_of_several_threads_at_once(rng):
    matrix = matrices.pack(rng.standard_normal((512, 256)), "int8")
    xs = rng.standard_normal((4, 1, 256), np.float32)
    wanted, found = [matrix(x, Board()) for x in xs], [[] for _ in xs]

    def call(n):
        for _ in range(200):
            found[n].append(matrix(xs[n], Board()))

    running = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for results, one in zip(found, wanted):
        assert len(results) == 200 and all((result == one).all() for result in results)


def test_no_helper_compiles_what_it_runs():
    """The import compiles it: a process may end before its helpers have, and would keep nothing on the disk."""
    spec = importlib.util.spec_from_file_location(matrix_loops.__name__, matrix_loops.__file__)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert fresh.assist.signatures


def test_nobody_waits_for_a_thread_that_never_comes(monkeypatch, rng):
    monkeypatch.setattr(helper_threads.HELPERS, "wake", lambda board, wanted: None)
    matrix, x = matrices.pack(rng.standard_normal((300, 64)), "int4"), rng.standard_normal((1, 64), np.float32)
    close(matrix(x, Board()), x @ matrix.widened().T, LIMIT["int4"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_has_threads_of_its_own(rng):
    matrix, x = matrices.pack(rng.standard_normal((300, 64)), "int8"), rng.standard_normal((1, 64), np.float32)
    wanted = matrix(x, Board())
    script = os.fork()
    if not script:
        board = Board()
        os._exit(0 if (matrix(x, board) == wanted).all() and helper_threads.HELPERS.started == board.most else 1)
    assert os.waitpid(script, 0)[1] == 0


def test_threads_that_may_be_used(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "9" * 5000)
    assert helper_threads.count() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert helper_threads.count() == 1 and Board().most == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert helper_threads.count() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("size", [0, 10])
def test_a_board_says_when_it_is_over(size):
    """Whoever still looks at it then, helped or not, would look for ever."""
    board = Board()
    for _ in range(2):
        with board.helped(size):
            assert board.busy and not board.array[matrix_loops.STOPPED]
            with board.helped(size):
                assert board.busy
            assert not board.array[matrix_loops.STOPPED]
        assert not board.busy and board.array[matrix_loops.STOPPED]


# -- models -----------------------------------------------------------------------------------------------------------
def test_steps_of_more_sequences_than_the_loops_read_float32_for(kind, weights, rng):
    """BLAS multiplies these, as many sequences' as it does a prompt's tokens."""
    weights |= {f"blocks.{i}.att.time_state": rng.standard_normal((3, 16, 16), np.float32) for i in range(2)}
    model, count = kind(weights, dtype="float32"), matrices.MOST_BY_LOOPS + 3
    tokens, together, alone = rng.integers(0, 70, (count, 2)), None, [None] * count
    for part in tokens.T:
        logits, together = model.forward(part[:, None], together)
        singles = [model.forward([[token]], state) for token, state in zip(part, alone)]
        alone = [state for _, state in singles]
    literal = LITERAL[kind].logits_and_state
    moved = rms([moved_by_rounding(weights, row, rng, draws=2, literal=literal)[0] for row in tokens])
    error = rms([x - single[0, 0] for x, (single, _) in zip(logits[:, 0], singles, strict=True)])
    assert error <= 6 * moved  # in 240 draws the logarithm of their ratio was .41 +- .12, and the ratio 2.2 at most


def loss(model, tokens):
    logits = model.forward([tokens[:-1]])[0][0].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return (np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(logits)), tokens[1:]]).mean()


@pytest.mark.parametrize("dtype, limit", [("bfloat16", 1e-5), ("int8", 0.005), ("int4", 0.04)])
def test_loss_on_the_examples_text(path, dtype, limit):
    """Of the example's model, whose checkpoint is in bfloat16."""
    tokens = np.load(path.with_name("golden.npz"))["prompt"].tolist()
    found, wanted = (loss(loaded(path, dtype=one), tokens) for one in (dtype, "float32"))
    assert found == pytest.approx(wanted, rel=limit)


@pytest.mark.parametrize("dtype", matrices.FORMATS)
def test_any_split_gives_the_same_logits_and_state(path, dtype):
    model, tokens = loaded(path, dtype=dtype), [list(b"It is a truth universally acknowledged")]
    wanted, wanted_state = model.forward(tokens)
    for first in (1, 7, 37):
        logits, state = model.forward([tokens[0][:first]])
        for token in tokens[0][first:]:
            logits, state = model.forward([[token]], state)
        close(logits[0, -1], wanted[0, -1], 1e-4)
        for part, its in zip(state.arrays, wanted_state.arrays):
            close(part, its, 1e-4)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", matrices.FORMATS)
@pytest.mark.parametrize("slots", [2, 6, 20])
def test_join_and_leave(path, dtype, slots):
    """Sequences write what each writes alone, whoever is beside it, in a step of few and of many."""
    prompts = [b"Miss Woodh", b"Captain Went", b"Mr. Knight", *[b"Lady Russ"] * 17][:slots]
    model, alone = loaded(path, dtype=dtype), {}
    for prompt in set(prompts):
        batch = Batch(model, 1)
        (slot,) = batch.join([prompt], GREEDY)
        alone[prompt] = [batch.step()[slot] for _ in range(6)]
    batch = Batch(model, slots)
    taken = dict(zip(batch.join(prompts[:-1], GREEDY), prompts))
    written = {slot: [] for slot in range(slots)}
    for _ in range(3):
        for slot, token in batch.step().items():
            written[slot].append(token)
    state = batch.state(0)
    batch.leave(0)
    taken |= dict(zip(batch.join([prompts[-1]], GREEDY), prompts[-1:]))
    assert written[0] == alone[prompts[0]][:3] and state.wkv.shape[1] == 1
    written[0] = []
    for _ in range(6):
        for slot, token in batch.step().items():
            written[slot].append(token)
    for slot, prompt in taken.items():
        assert written[slot][:6] == alone[prompt], prompt


@pytest.mark.parametrize("dtype", matrices.FORMATS)
def test_what_is_said_of_it(path, kind, dtype):
    model = loaded(path, dtype=dtype)
    assert repr(model) == f"{kind.__name__}(4 layers, 256 channels, 4 heads of 64, 256 tokens, {dtype} on cpu)"
    assert repr(model.layers) == f"NumbaLayers(4 layers, {dtype}, {model.layers.nbytes:,} bytes)"
    assert (
        repr(model.layers.model_weights.head)
        == f"Matrix([256, 256], {dtype}, {model.layers.model_weights.head.nbytes:,} bytes)"
    )


def test_tanh_is_float32s():
    size = np.logspace(-30, 2, 10_001, dtype=np.float32)
    x = np.stack([-size, size])
    found, wanted = x.copy(), np.tanh(x.astype(np.float64))
    numba_loops.tanh_in_place(found)
    assert (np.abs(found - wanted) <= 6 * np.spacing(np.abs(wanted).astype(np.float32))).all()
    found = np.array([[np.nan, np.inf, -np.inf, 0]], np.float32)
    numba_loops.tanh_in_place(found)
    np.testing.assert_array_equal(found, [[np.nan, 1, -1, 0]])


# -- which dtype ------------------------------------------------------------------------------------------------------
@contextmanager
def no_numba():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "linattn_np.models.matrix_loops", None)
        patch.delattr(linattn_np.models, "matrix_loops")
        matrices.loops.cache_clear()
        yield
    matrices.loops.cache_clear()


def test_the_default_is_the_checkpoints(kind, weights, path):
    assert kind(weights).layers.dtype == "float32"
    half = {name: array.astype(np.float16) for name, array in weights.items()}
    assert kind(half).layers.dtype == "float32"
    assert loaded(path).layers.dtype == "bfloat16"


def test_without_numba_all_is_float32(kind, weights, path):
    with no_numba():
        model = kind.from_file(path)
        assert repr(model.layers) == "NumpyLayers(4 layers, float32)"
        with pytest.raises(NotSupported, match="fewer than 32 bits need Numba on the CPU, pip install 'linattn-np"):
            kind(weights, dtype="int8")


# -- files ------------------------------------------------------------------------------------------------------------
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", FEW_BITS)
def test_a_quantised_file_is_the_same_model(path, kind, dtype, tmp_path):
    few, weights = tmp_path / "few.safetensors", checkpoint.read(path)
    write_arrays(few, kind.quantise(weights, dtype))
    model, tokens = kind.from_file(few), [list(b"Emma was")]
    assert model.layers.dtype == dtype
    np.testing.assert_array_equal(model.forward(tokens)[0], kind(weights, dtype=dtype).forward(tokens)[0])
    wide = kind.from_file(few, dtype="float32")  # with the matrices of low rank in bfloat16
    close(wide.forward(tokens)[0], model.forward(tokens)[0], 1e-4 if dtype == "bfloat16" else 1e-2)
    write_arrays(few, kind.quantise(checkpoint.read(few), dtype))  # once more changes little
    close(kind.from_file(few).forward(tokens)[0], model.forward(tokens)[0], 0.1)


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"head.weight.scales": np.ones(3, np.float32)}, r"scales' is float32 \(3,\), expected float32 \(70,\)"),
        ({"head.weight.scales": np.ones(70, np.float16)}, r"is float16 \(70,\), expected float32"),
        ({"head.weight.scales": np.full(70, np.nan, np.float32)}, "has numbers that are not finite"),
        ({"head.weight": np.ones((70, 48), np.int16)}, "'head.weight' is int16 with 2 axes and has scales"),
        ({"head.weight": np.ones((2, 70, 48), np.int8)}, "'head.weight' is int8 with 3 axes and has scales"),
        ({"head.weight": np.ones((70, 47), np.int8)}, r"head.weight is \(70, 47\), expected"),
        ({"neck.weight.scales": np.ones(3, np.float32)}, "'neck.weight.scales' are the scales of no matrix"),
    ],
)
def test_files_that_are_refused(kind, weights, change, complaint, tmp_path):
    few = tmp_path / "few.safetensors"
    write_arrays(few, kind.quantise(weights, "int8") | change)
    with pytest.raises(ContractError, match=f"{few}: .*{complaint}"):
        kind.from_file(few)


def test_a_file_without_its_scales_is_refused(kind, weights, tmp_path):
    few, stored = tmp_path / "few.safetensors", kind.quantise(weights, "int4")
    write_arrays(few, {name: array for name, array in stored.items() if name != "head.weight.scales"})
    with pytest.raises(ContractError, match=f"{few}: .*head.weight"):
        kind.from_file(few)


# -- the command ------------------------------------------------------------------------------------------------------
@pytest.fixture
def novel(path, tmp_path):
    novel = tmp_path / "novel.txt"
    novel.write_bytes(bytes(np.load(path.with_name("golden.npz"))["prompt"].tolist()))
    return novel


def test_quantise_writes_a_file_and_tells_the_loss(path, kind, novel, tmp_path, capsys):
    out = tmp_path / "few.safetensors"
    code, _, err = called(capsys, "quantise", "--model", path, "--dtype", "int4", "--out", out, "--text", novel)
    assert code == 0, err
    said, wrote = err.splitlines()
    before, after = (float(said.split(f"{word} ")[1].split(",")[0].split(" ")[0]) for word in ("before", "after"))
    assert before < after < 1.05 * before and said.endswith("on 160 tokens")
    sizes = {6: "3.1 MB of 8.1", 7: "2.8 MB of 7.4"}
    assert wrote.startswith(f"wrote {out}, {sizes[kind.version.number]}") and "head.weight.scales" in load_file(out)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--out=few.bin"], "argument --out: is few.bin, expected the ending .safetensors"),
        (["--out={model}"], "argument --out: is the file of --model, which would be lost"),
        (["--out=few.safetensors", "--dtype=int3"], "argument --dtype: invalid choice: 'int3'"),
        (["--out=few.safetensors", "--model={empty}"], "is empty"),
    ],
)
def test_what_quantise_refuses(path, novel, tmp_path, capsys, arguments, complaint):
    model, empty = tmp_path / "model.safetensors", tmp_path / "empty.safetensors"
    model.write_bytes(path.read_bytes())
    empty.write_bytes(b"")
    arguments = [argument.format(model=model, empty=empty) for argument in arguments]
    code, _, err = called(capsys, "quantise", "--dtype=int8", f"--model={model}", f"--text={novel}", *arguments)
    assert code == 2 and complaint in err and err.count("\n") == 1
