"""Training by several ranks: the loss curve of one, one set of weights, and a kill that costs no step."""

import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from conftest import DOUBLE, PATIENCE, SINGLE
from reference import assert_close, same_bits
from test_distributed import Call
from test_distributed_engines import mpiexec, torchrun_variables
from test_training import ENVIRONMENT, SMALL, TEXT, TRAIN, until_exists

from linattn_np import distributed
from linattn_np.__main__ import main
from linattn_np.command import train
from linattn_np.distributed import DataParallel, Disagreement, RankLost, SequenceParallel, run_threads
from linattn_np.distributed import data_parallel as module
from linattn_np.errors import ContractError
from linattn_np.models import RWKV6
from linattn_np.models.training import VECTORS, Training

CALM = replace(SMALL, dropout=0.0, steps=12)


def on_rank(comm, steps=12, ranks=DataParallel, kind=RWKV6):
    training = Training(TEXT, CALM, ranks=ranks(comm), kind=kind)
    return [float(training.step()) for _ in range(steps)], training


@pytest.mark.parametrize("ranks", [DataParallel, SequenceParallel])
@pytest.mark.parametrize("count", [2, 4])
def test_the_loss_curve_is_that_of_one_process_with_the_same_batch(count, ranks, kind, monkeypatch):
    monkeypatch.setattr(module, "BUCKET", 1000)  # several buckets, the last one smaller
    alone = Training(TEXT, CALM, kind=kind)
    wanted = [float(alone.step()) for _ in range(6)]
    found = run_threads(partial(on_rank, steps=6, ranks=ranks, kind=kind), count)
    for losses, training in found:
        np.testing.assert_allclose(losses, wanted, rtol=2e-5)
        assert all(same_bits(getattr(training.steps, name), getattr(found[0][1].steps, name)) for name in VECTORS)
    assert found[0][1].layout.size > 3 * module.BUCKET


def test_gradients_travel_while_the_backward_pass_runs(kind):
    """A layer's part leaves before the layers below are computed, whose numbers still are what they were."""

    def begun(comm):
        missing = []

        class Telling(DataParallel):
            def begin(self, numbers):
                missing.append(np.isnan(training.steps.sums).sum())
                super().begin(numbers)

        training = Training(TEXT, replace(CALM, layers=3), ranks=Telling(comm), kind=kind)
        training.steps.sums[...] = np.nan
        training.step()
        return missing, training.layout.parts

    for missing, (_, (start, stop), _) in run_threads(begun, 2):
        assert missing[0] >= missing[1] + stop - start and missing[1] > 0 and missing[2:] == [0, 0]


def test_a_layers_part_is_whole_when_it_leaves(kind):
    def changed(comm):
        sent = []

        class Keeping(DataParallel):
            def begin(self, numbers):
                sent.append((numbers, numbers.copy()))

        training = Training(TEXT, replace(CALM, layers=3), ranks=Keeping(comm), kind=kind)
        training.step()
        parts = [numbers for numbers, _ in sent]
        assert all(same_bits(now, then) for now, then in sent)
        return sum(map(len, parts)) == training.layout.size + 1

    assert all(run_threads(changed, 2))


def test_dropout_differs_by_rank():
    def dropped(comm):
        training = Training(TEXT, SMALL, ranks=DataParallel(comm))
        return training.steps.dropout(0)(np.ones((4, 50), SINGLE))[0]

    first, second = run_threads(dropped, 2)
    assert not same_bits(first, second)


def test_ranks_that_mean_other_trainings_are_named():
    def differs(comm):
        with pytest.raises(Disagreement) as raised:
            Training(TEXT, replace(CALM, seed=comm.rank), ranks=DataParallel(comm))
        return str(raised.value)

    for words in run_threads(differs, 2):
        assert words.startswith("Training: the settings is ") and "seed=1" in words and "on rank 1" in words
    with pytest.raises(ContractError, match="Training: batch is 4, expected a multiple of the 3 ranks"):
        run_threads(on_rank, 3)
    with pytest.raises(ContractError, match="Training: context is 24, expected a multiple of the 5 ranks"):
        run_threads(partial(on_rank, ranks=SequenceParallel), 5)

    def of_another_kind(comm):
        with pytest.raises(Disagreement, match="the ranks is DataParallel on rank 0, but SequenceParallel on rank 1"):
            Training(TEXT, CALM, ranks=(SequenceParallel if comm.rank else DataParallel)(comm))

    run_threads(of_another_kind, 2)


def test_the_first_rank_restores(kind, tmp_path):
    """Only its file is read; what is wrong with it is said on all ranks."""
    wanted = run_threads(lambda comm: on_rank(comm, steps=9, kind=kind)[1], 2)[0]
    run_threads(lambda comm: on_rank(comm, steps=5, kind=kind)[1], 2)[0].save(tmp_path / "rank 0.safetensors")

    def again(comm):
        path = tmp_path / f"rank {comm.rank}.safetensors"
        training = Training.restore(path, TEXT, ranks=DataParallel(comm), kind=kind)
        for _ in range(4):
            training.step()
        return training

    for training in run_threads(again, 2):
        assert all(same_bits(getattr(training.steps, name), getattr(wanted.steps, name)) for name in VECTORS)

    def missing(comm):
        with pytest.raises((OSError, ContractError), match="No such file"):
            Training.restore(tmp_path / "nothing.safetensors", TEXT, ranks=DataParallel(comm))

    run_threads(missing, 2)


# -- processes --------------------------------------------------------------------------------------------------------
def commands(tmp_path, *more, ranks=2, device="cpu"):
    """The processes of `linattn-np train` with the environment variables that torchrun sets."""
    if ranks > 1:
        pytest.importorskip("torch", reason="torch is not installed")
    given = torchrun_variables(ranks)
    command = [*TRAIN, "--text", str(tmp_path / "text"), "--device", device, *more]
    environment = ENVIRONMENT | given | {"OPENBLAS_NUM_THREADS": "1"}
    return [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]


SIZES = ["--layers=2", "--width=16", "--head-size=8", "--batch=4", "--context=24", "--lr=0.01"]


@pytest.mark.exhaustive
@pytest.mark.mpi
def test_a_killed_rank_costs_no_step(tmp_path):
    """The others end with its name, the first saves what it had, and --resume ends with the bits of a whole run.

    torch connects the ranks of which one is killed, since mpiexec would end the others; MPI has the same bits.
    """
    (tmp_path / "text").write_bytes(TEXT)
    command = ["-m", "linattn_np", "train", "--text", "text", "--device", "cpu"]
    whole = mpiexec(2, *command, "--out=whole", *SIZES, "--steps=150", cwd=tmp_path)
    assert whole.returncode == 0 and whole.stderr.count(" NumPy), 2 ranks") == 1, whole.stderr

    out = tmp_path / "out"
    first, second = commands(tmp_path, "--out", str(out), *SIZES, "--steps=150", "--every=0")
    until_exists(out / "training.safetensors", first)
    second.send_signal(signal.SIGKILL)
    words = first.communicate(timeout=PATIENCE)[1]
    second.communicate(timeout=PATIENCE)
    if first.returncode:  # else the training ended before, as this test was slow
        assert first.returncode == 2 and "rank 0: rank 1 has ended" in words and "--resume goes on with what" in words
        again = mpiexec(2, *command, "--out=out", "--resume", cwd=tmp_path)
        assert again.returncode == 0, again.stderr
    for name in ("model.safetensors",):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_ranks_that_do_not_meet_are_told_in_a_line(tmp_path, monkeypatch, capsys):
    def lost(device):
        raise RankLost("rank 0 of 2 does not reach the others")

    monkeypatch.setattr(train, "connect", lost)
    assert main(["train", "--text", "text", "--out", str(tmp_path), "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "linattn-np train: rank 0 of 2 does not reach the others\n"


def one_process(tmp_path):
    """The first words of the lines that one process says of its training."""
    (tmp_path / "text").write_bytes(TEXT)
    command = [*TRAIN, "--text", "text", "--out", "one", "--device", "cpu", "--steps=12", *SIZES]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    return said_of(done)


def said_of(done):
    assert done.returncode == 0, done.stderr
    loss, held_out = re.search(r"step 12, loss ([\d.]+).*held out ([\d.]+)", done.stderr).groups()
    return float(loss), float(held_out)


def need_two_cards(card):
    if card.name != "cupy" or card.cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one CUDA device")


@pytest.mark.parametrize("share", ["batch", "context"])
def test_two_cards_train_as_one(card, share, tmp_path):
    """Their steps are CUDA graphs with the messages in them."""
    need_two_cards(card)
    (tmp_path / "text").write_bytes(TEXT)
    options = [*SIZES, "--steps=12", "--dtype=float32", "--dropout=0", f"--share={share}"]
    one = commands(tmp_path, *options, "--out", str(tmp_path / "one"), ranks=1, device="cuda")
    two = commands(tmp_path, *options, "--out", str(tmp_path / "two"), device="cuda")
    said = [process.communicate(timeout=PATIENCE)[1] for process in one + two]
    assert [process.returncode for process in one + two] == [0, 0, 0], said
    wanted, found = (said_of(subprocess.CompletedProcess("", 0, stderr=words)) for words in said[:2])
    assert found == pytest.approx(wanted, abs=2e-3)


def test_a_card_whose_process_is_killed_ends_the_other(card, tmp_path):
    need_two_cards(card)
    (tmp_path / "text").write_bytes(TEXT)
    out = tmp_path / "out"
    first, second = commands(tmp_path, "--out", str(out), *SIZES, "--steps=100000", "--every=0.3", device="cuda")
    until_exists(out / "model.safetensors", first)
    time.sleep(1)
    os.kill(second.pid, signal.SIGKILL)
    words = first.communicate(timeout=PATIENCE)[1]
    second.communicate(timeout=PATIENCE)
    assert first.returncode == 2 and "rank 1 has ended" in words and "--resume goes on with what" in words
    assert Training.restore(out / "training.safetensors", TEXT).step_number > 0


@pytest.mark.mpi
@pytest.mark.parametrize("share", ["batch", pytest.param("context", marks=pytest.mark.exhaustive)])
def test_batches_and_contexts_are_shared_under_mpi(share, tmp_path):
    wanted = one_process(tmp_path)
    command = ["-m", "linattn_np", "train", "--text", "text", "--out", "out", "--device", "cpu", "--steps=12", *SIZES]
    done = mpiexec(4, *command, f"--share={share}", cwd=tmp_path)
    assert said_of(done) == pytest.approx(wanted, abs=2e-3)


@pytest.mark.mpi
def test_an_error_of_one_rank_ends_all_under_mpi(tmp_path):
    (tmp_path / "text").write_bytes(TEXT)
    command = ["-m", "linattn_np", "train", "--text", "text", "--out", "out", "--device", "cpu", "--steps=3", *SIZES]
    done = mpiexec(2, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" NumPy), 2 ranks") == done.stderr.count("wrote ") == 1
    done = mpiexec(2, *command, cwd=tmp_path)
    assert done.returncode != 0 and "out holds a training; --resume goes on with it" in done.stderr


def test_gradients_over_nccl_are_averaged_in_place():
    """On a card there is `all_mean`; here it stands in for one."""
    said = []

    class OnCard:
        def __init__(self, words):
            self.words = words

    class Averaging(distributed.Alone):
        def all_mean(self, x):
            said.append(f"{x.words} begins")
            return lambda: said.append(f"{x.words} is waited for")

        def launched(self):
            said.append("launched")

    ranks = DataParallel(Averaging())
    ranks.begin(OnCard("last"))
    ranks.begin(OnCard("first"))
    ranks.finish()
    ranks.launched()
    assert said == ["last begins", "first begins", "last is waited for", "first is waited for", "launched"]


def test_the_gradient_of_what_has_no_tokens_may_be_left_in_parts(rng):
    call = Call("rwkv6", rng, states=False)

    def pulled(comm):
        own = [x[:, :, 50 * comm.rank :][:, :, :50] if x.ndim > 2 else x for x in call.arrays]
        o, pullback = distributed.vjp(distributed.rwkv6, *own, comm=comm, segment_size=25)
        return pullback(o, summed=False)[4], pullback(o)[4]

    parts, whole = zip(*run_threads(pulled, 3))
    assert_close("du", sum(parts), whole[0], DOUBLE)
    assert not np.allclose(parts[0], parts[1])
