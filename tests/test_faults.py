"""What ends the command, or goes wrong around it: signals, full disks, closed streams, folders that cannot be written,
no threads. Nobody sees a traceback, and what is done is kept."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import PATIENCE
from test_examples import ENVIRONMENT, interruptible
from test_training import WROTE

from linattn_np import LinattnWarning, cupy_folder
from linattn_np.__main__ import main
from linattn_np.backends.cupy import device
from linattn_np.backends.numpy import cores
from linattn_np.command import COMMANDS, batch_texts, cards, generate, option_values, signals, terminal, train
from linattn_np.errors import ContractError, NotSupported
from linattn_np.models import Batch, State, files, helper_threads, sampling
from linattn_np.models.training import Settings, Training

SMALLEST = {
    "generate": ["--device", "cpu"],
    "train": ["--text", __file__, "--out", "never"],
    "quantise": ["--dtype", "int8", "--text", __file__, "--out", "never.safetensors"],
    "merge": ["--model", "never", "--adapter", "never", "--out", "never.safetensors"],
    "evaluate": ["never", __file__, "--device", "cpu"],
}
SMALL = ["--layers", 1, "--width", 16, "--head-size", 8, "--batch", 2, "--context", 24, "--steps", 4, "--device", "cpu"]


def called(capsys, *words):
    """Its exit code, and its messages by lines."""
    try:
        code = main(list(map(str, words)))
    except SystemExit as end:
        code = end.code
    return code, capsys.readouterr().err.splitlines()


# -- errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", COMMANDS)
def test_any_error_is_one_line(command, capsys, monkeypatch):
    """With 1 where nobody foresaw it, and 2 where the user can help it."""
    module = import_module(f"linattn_np.command.{command}")
    for error, code, wanted in (
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), 2, "a/b: No space left on device; free some room"),
        (OSError("the process of card 1 has ended"), 2, "the process of card 1 has ended"),
        (MemoryError(), 2, "out of memory"),
        (ImportError("no module"), 2, "no module"),
        (RuntimeError("the driver\nsays 700"), 1, "a fault of linattn-np: RuntimeError in .*: the driver says 700. P"),
        (KeyError("x"), 1, "a fault of linattn-np: KeyError in terminal.py, line [0-9]+: 'x'. Please report it"),
        (AssertionError(), 1, "a fault of linattn-np: AssertionError"),
    ):
        monkeypatch.setattr(module, "run", lambda options, error=error: (_ for _ in ()).throw(error))
        found, lines = called(capsys, command, *SMALLEST.get(command, []))
        assert (found, len(lines)) == (code, 1) and re.match(f"linattn-np {command}: {wanted}", lines[0]), lines


def test_a_signal_while_a_class_is_built_is_a_signal(capsys, monkeypatch):
    """As an import does; and an error on the way out is told."""

    def run(options):
        class Attribute:
            def __set_name__(self, owner, name):
                os.kill(os.getpid(), signal.SIGTERM)

        type("Built", (), {"attribute": Attribute()})

    def saved(options):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            raise OSError(errno.ENOSPC, "No space left on device", "a/b")

    monkeypatch.setattr(import_module("linattn_np.command.info"), "run", run)
    assert called(capsys, "info") == (128 + signal.SIGTERM, [])
    monkeypatch.setattr(import_module("linattn_np.command.info"), "run", saved)
    code, lines = called(capsys, "info")
    assert code == 2 and "a/b: No space left on device" in lines[0]


def test_hostile_words_are_one_line(capsys, tmp_path):
    """A command that is none, and a text that has no end."""
    assert called(capsys, "--")[0] == 2
    train = ("train", "--device", "cpu", "--out", str(tmp_path), "--text")
    code, said = called(capsys, *train, "/dev/zero")
    assert code == 2 and "/dev/zero: is a device, expected a file or a pipe" in said[-1]


@pytest.mark.parametrize(
    "error, line",
    [
        ("KeyboardInterrupt", "interrupted while it was loading"),  # which OpenBLAS raises where it gets no threads
        ("OSError(24, 'Too many open files')", "cannot be loaded: OSError: [Errno 24] Too many open files"),
    ],
)
def test_an_end_while_numpy_is_imported_is_one_line(error, line, tmp_path):
    (tmp_path / "numpy.py").write_text(f"raise {error}")
    paths = os.pathsep.join((str(tmp_path), str(Path(terminal.PACKAGE).parent)))
    command = [sys.executable, "-m", "linattn_np", "info"]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode and done.stderr == f"linattn-np: {line}\n"


@pytest.mark.parametrize("words", [["-m", "other"], ["-m", "other", "-m", "linattn_np"], ["-c", "import linattn_np"]])
def test_an_end_of_another_program_keeps_its_traceback(words, tmp_path):
    """Python's -m imports a package, and with it ours, before it tells which one it runs."""
    (tmp_path / "numpy.py").write_text("raise OSError")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "__init__.py").write_text("import linattn_np")
    paths = os.pathsep.join((str(tmp_path), str(Path(terminal.PACKAGE).parent)))
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=ENVIRONMENT | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode and done.stderr.startswith("Traceback")


def test_an_error_of_a_thread_and_a_warning_are_one_line(capsys, monkeypatch):
    import warnings

    def run(options):
        warnings.warn("\nbeware\nTraceback", LinattnWarning, stacklevel=1)
        thread = threading.Thread(target=lambda: [][0])
        thread.start()
        thread.join()

    monkeypatch.setattr(import_module("linattn_np.command.info"), "run", run)
    code, lines = called(capsys, "info")
    assert code == 0 and lines[0] == "linattn-np info: beware" and lines[1].startswith("a fault of linattn-np: Index")


def test_a_file_that_is_not_there_has_a_neighbour(tmp_path):
    (tmp_path / "prompts.jsonl").touch()
    found = terminal.error_line(
        FileNotFoundError(errno.ENOENT, "No such file or directory", str(tmp_path / "prompt.jsonl"))
    )
    assert found.endswith(f"prompt.jsonl: No such file or directory; did you mean {tmp_path / 'prompts.jsonl'}?")


# -- streams ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "how, code, written, said",
    [
        ("generate --device cpu --tokens 1 --temperature 0 --prompt Emm <&- 2>&-", 0, "Emma\n", ""),
        ("generate --prompt - --device cpu <&- ", 2, "", "stdin is empty, expected some text\n"),
        ("generate --prompt - --device cpu 0>/dev/null", 2, "", "stdin cannot be read: Bad file descriptor\n"),
        ("generate --prompt - --device cpu </dev/zero", 2, "", "stdin has more than 268,435,456 bytes"),
        ("--version >&-", 2, "", "linattn-np: stdout: Bad file descriptor; it is closed: send it to a file, a pipe or"),
        ("--help >/dev/full", 2, "", "linattn-np: stdout: No space left on device; free some room"),
        ("dance 2>/dev/full", 2, "", ""),
    ],
)
def test_closed_and_full_streams(how, code, written, said):
    command = f"{sys.executable} -m linattn_np {how}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=PATIENCE, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (code, written), done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_python_without_docstrings():
    command = [sys.executable, "-OO", "-m", "linattn_np", "train", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=ENVIRONMENT)
    assert done.returncode == 0 and "usage: linattn-np train" in done.stdout, done.stderr


def test_one_process_writes_texts_into_a_file(capsys, tmp_path):
    (tmp_path / "in").write_text('{"prompt": "Emma was", "tokens": 2}\n')
    words = ["generate", "--device", "cpu", "--batch-file", tmp_path / "in", "--output", tmp_path / "out"]
    first = batch_texts.Output(tmp_path / "out")
    first.add(0, {"text": "She"})
    code, lines = called(capsys, *words)
    assert code == 2 and lines[-1].endswith(
        "out: Device or resource busy; another process writes there: wait for it, or name another place"
    )
    assert first.finish(1) == 1 and (tmp_path / "out").read_text() == '{"text": "She"}\n'
    assert called(capsys, *words)[0] == 0


# -- training ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def trained(tmp_path, capsys):
    """A function that trains: its exit code and messages. Signals are as in a terminal, where the tests may run behind
    nohup.
    """
    before = {number: signal.getsignal(number) for number in signals.NUMBERS}
    for number in before:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    (tmp_path / "text").write_bytes(b"It is a truth universally acknowledged. " * 60)
    where = ["train", "--text", tmp_path / "text", "--out", tmp_path / "out"]
    yield lambda *words: called(capsys, *where, *words)
    for number, handler in before.items():
        signal.signal(number, handler)


def at_step(monkeypatch, number, act):
    """Has `act` called while step `number` is made, from 1 on."""
    step = Training.step

    def stepped(self):
        if self.step_number + 1 == number:
            act()
        return step(self)

    monkeypatch.setattr(Training, "step", stepped)


def kept(folder):
    """The step of the checkpoint; the files are whole, and there is nothing else."""
    assert sorted(os.listdir(folder)) == ["model.safetensors", "training.safetensors"]
    return int(train.read(folder / "training.safetensors")["step"][0])


@pytest.mark.parametrize("number", signals.NUMBERS)
def test_a_signal_saves_the_training(number, trained, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: signal.raise_signal(number))
        code, lines = trained(*SMALL)
    again = f"linattn-np train --text {tmp_path / 'text'} --out {tmp_path / 'out'} --device cpu --resume"
    assert code == 128 + number and lines[-1] == f"stopped at step 2. To go on: {again}"
    assert kept(tmp_path / "out") == 2 and lines[-2] == WROTE.format(tmp_path / "out")
    code, lines = trained("--resume", "--device", "cpu")
    assert code == 0 and kept(tmp_path / "out") == 4


def test_a_signal_before_the_first_step_says_how_to_go_on(trained, tmp_path, monkeypatch):
    def warm_up(self):
        shutil.rmtree(tmp_path / "out")
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "warm_up", warm_up)
        code, lines = trained(*SMALL)
    assert code == 128 + signal.SIGTERM and lines[-1].startswith("stopped at step 0. To go on: linattn-np train")
    assert trained("--resume", "--device", "cpu")[0] == 0 and kept(tmp_path / "out") == 4


@pytest.mark.parametrize(
    "numbers", [[signal.SIGINT] * 5, [signal.SIGINT, *signals.NUMBERS], [*signals.NUMBERS[1:]] * 2]
)
def test_a_burst_of_signals_is_one(numbers, trained, tmp_path, monkeypatch):
    """A key bounces, and launchers pass on what a terminal has sent, too: the step is finished and saved."""
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: 0.0))
    at_step(monkeypatch, 2, lambda: [signal.raise_signal(number) for number in numbers])
    code, lines = trained(*SMALL)
    assert code - 128 in numbers and kept(tmp_path / "out") == 2
    assert lines[-1].startswith("stopped at step 2. To go on: ")


def test_a_second_ctrl_c_ends_it_at_once(trained, tmp_path, monkeypatch):
    def press_twice():
        signal.raise_signal(signal.SIGINT)
        time.sleep(signals.BURST)
        signal.raise_signal(signal.SIGTERM)  # which waits for the first one's end
        time.sleep(signals.BURST)
        signal.raise_signal(signal.SIGINT)

    at_step(monkeypatch, 2, press_twice)
    assert trained(*SMALL)[0] == 130 and kept(tmp_path / "out") == 0
    assert trained(*SMALL, "--seed", 1)[0] == 130  # a training without a step is no training to be lost


def test_a_held_out_loss_that_is_no_number_keeps_the_checkpoint_before(trained, tmp_path, monkeypatch):
    losses = [2.0, float("nan")]
    monkeypatch.setattr(Training, "held_out_loss", lambda self, progress: losses.pop(0))
    code, lines = trained(*SMALL, "--every", 0)
    assert code == 2 and kept(tmp_path / "out") == 1
    assert "the loss on what is held out is nan by step 2; " in lines[-1] and "A lower --lr may help" in lines[-1]


def test_weights_that_are_not_finite_are_never_written(tmp_path):
    text, path = b"It is a truth universally acknowledged. " * 60, tmp_path / "training.safetensors"
    training = Training(text, Settings(layers=1, width=16, head_size=8, batch=2, context=24, steps=4))
    training.save(path)
    before = path.read_bytes()
    training.steps.second[3] = np.inf
    with pytest.raises(ContractError, match="second at step 0 has numbers that are not finite"):
        training.save(path)
    training.steps.weights[3] = np.nan
    with pytest.raises(ContractError, match="emb.weight at step 0 has numbers that are not finite"):
        training.save_model(tmp_path / "model.safetensors")
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]
    arrays = {name: np.array(array) for name, array in train.read(path).items()}
    arrays["first"][0] = np.nan
    files.write_arrays(path, arrays)
    with pytest.raises(ContractError, match="has numbers in first that are not finite"):
        Training.restore(path, text)


def test_a_full_disk_is_waited_for_until_the_end(trained, tmp_path, monkeypatch):
    save, full = Training.save, []

    def saved(self, path):
        if self.step_number in full:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        save(self, path)

    monkeypatch.setattr(Training, "save", saved)
    full += [1, 2]
    code, lines = trained(*SMALL, "--every", 0)
    assert code == 0 and kept(tmp_path / "out") == 4
    assert sum("is not saved, and the training goes on: " in line for line in lines) == 2
    full[:] = [5]
    code, lines = trained("--resume", "--steps", 5)
    assert code == 2 and kept(tmp_path / "out") == 4 and "training.safetensors: No space left on device;" in lines[-1]


def test_more_layers_than_a_file_holds_are_refused_at_once(trained):
    code, lines = trained(*SMALL, "--layers", 10**9)
    assert code == 2 and lines[-1].endswith("layers is 1000000000, expected a whole number from 1 to 1024")


def test_a_folder_that_was_removed_is_made_anew(trained, tmp_path, monkeypatch):
    at_step(monkeypatch, 3, lambda: shutil.rmtree(tmp_path / "out"))
    assert trained(*SMALL)[0] == 0 and kept(tmp_path / "out") == 4


def test_a_training_that_is_done_says_so_and_can_be_extended(trained, tmp_path):
    trained(*SMALL)
    code, lines = trained("--resume")
    assert code == 0 and re.search("a training that is done, of 4 steps in .+ minutes; more --steps or", lines[-1])
    assert trained("--resume", "--steps", 6, "--lr", 1e-4)[0] == 0 and kept(tmp_path / "out") == 6


def test_out_is_tried_before_the_first_step(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(Training, "step", lambda self: pytest.fail("a step was made"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_text("another model")
    code, lines = trained(*SMALL)
    assert code == 2 and "out holds model.safetensors, which the training would replace" in lines[-1]
    code, lines = trained(*SMALL, "--out", "/proc/nowhere")
    assert code == 2 and "/proc/nowhere: No such file or directory" in lines[-1]


# -- texts ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_texts_are_kept_as_they_are_done(number, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    quick, slow = {"prompt": "Emm", "tokens": 1, "temperature": 0}, {"prompt": "a", "tokens": 10**9}
    source.write_text("\n".join(map(json.dumps, [slow, quick, quick])))
    process = interruptible("--batch-file", source, "--output", target, "--slots", 2)
    while not target.exists() or target.read_text().count("\n") < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, messages = process.communicate(timeout=PATIENCE)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), messages
    assert [json.loads(line)["text"] for line in target.read_text().splitlines()] == ["a", "a"]
    assert number == signal.SIGKILL or b"2 of 3 texts are done, " in messages


def test_a_line_without_room_is_not_begun(tmp_path):
    output = batch_texts.Output(tmp_path / "out.jsonl")
    output.add(1, {"text": "b"})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large: .*/out.jsonl"):
            output.add(2, {"text": "c" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    output.add(0, {"text": "a"})
    assert (tmp_path / "out.jsonl").read_text() == '{"text": "b"}\n{"text": "a"}\n'
    assert output.finish(3) == 2
    assert (tmp_path / "out.jsonl").read_text() == '{"text": "a"}\n{"text": "b"}\n'


def test_a_file_of_texts_that_was_removed_is_written_anew(tmp_path):
    output = batch_texts.Output(tmp_path / "out.jsonl")
    output.add(0, {"text": "a"})
    (tmp_path / "out.jsonl").unlink()
    output.add(1, {"text": "b"})
    assert output.finish(2) == 2 and (tmp_path / "out.jsonl").read_text() == '{"text": "a"}\n{"text": "b"}\n'


def test_a_signal_with_the_last_token_ends_it(trained, capsys, monkeypatch):
    """It was forgotten, and later ones too, while the loops of the next text were compiled."""

    def put(text="", end="\n"):
        if end:  # the end of the text
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(generate, "to_stdout", put)
    words = ["generate", "--device", "cpu", "--tokens", 1, "--prompt", "Emm"]
    assert called(capsys, *words)[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize("words", [["--prompt", "Emm"], ["--chat"]])
@pytest.mark.parametrize("error", [errno.EPIPE, errno.ENOSPC])
def test_a_state_is_kept_where_nobody_reads_the_text(words, error, tmp_path, capsys, monkeypatch):
    def put(text="", end="\n"):
        put.calls += 1
        if put.calls == 3:
            raise OSError(error, os.strerror(error), "stdout")

    put.calls = 0
    monkeypatch.setattr(generate, "to_stdout", put)
    monkeypatch.setattr(generate, "ask", lambda: "Emm")
    state = tmp_path / "state.npz"
    code, _ = called(capsys, "generate", "--device", "cpu", "--save-state", state, *words)
    assert code == (0 if error == errno.EPIPE else 2) and State.load(state).wkv.any()


def test_slots_beyond_the_texts_take_no_memory(tmp_path, capsys, monkeypatch):
    made = []
    monkeypatch.setattr("linattn_np.models.text.Batch", lambda *how: made.append(how[1]) or Batch(*how))
    (tmp_path / "in").write_text('{"prompt": "a", "tokens": 1}\n' * 2)
    files_named = ["--batch-file", tmp_path / "in", "--output", tmp_path / "out"]
    assert called(capsys, "generate", "--device", "cpu", "--slots", 10**6, *files_named)[0] == 0 and made == [2]


def test_what_is_refused_is_told_shortly(tmp_path, capsys):
    for line, wanted in (
        ({"prompt": "a", "stop": ["x" * 100_000, ""]}, "Text: stop holds '', expected strings"),
        ({"prompt": "a", "stop": [["x" * 100_000]]}, "Text: stop holds a list, expected"),
        ({"prompt": "a", "tokens": 10**30}, "tokens is 1000000000000000000000000000000, expected a whole number"),
    ):
        (tmp_path / "in").write_text(json.dumps(line))
        words = ["--batch-file", tmp_path / "in", "--output", tmp_path / "out", "--device", "cpu"]
        code, lines = called(capsys, "generate", *words)
        assert code == 2 and wanted in lines[-1] and len(lines[-1]) < 200 + 2 * len(str(tmp_path))


# -- files of writers that were killed --------------------------------------------------------------------------------
def test_parts_of_those_that_were_killed_are_removed(tmp_path):
    left, users = tmp_path / f".linattn-{'a' * 16}.part", tmp_path / ".linattn-mine.part"
    left.write_bytes(b"half a checkpoint")
    users.touch()
    with files.new_part(tmp_path, 0o666) as (_, at_work):
        files.remove_abandoned.cache_clear()
        with files.replaced(tmp_path / "whole") as file:
            file.write(b"all")
        assert sorted(os.listdir(tmp_path)) == sorted([os.path.basename(at_work), users.name, "whole"])
    os.unlink(at_work)


# -- processes --------------------------------------------------------------------------------------------------------
ORPHANS = """
import os, signal, time
from linattn_np.command import cards
started = cards.Cards(time.sleep)
started.begin(3)
print(*(process.pid for _, process in started.started.values()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there is no prctl")
def test_processes_end_with_the_one_that_started_them():
    process = subprocess.Popen([sys.executable, "-c", ORPHANS], env=ENVIRONMENT, stdout=subprocess.PIPE)
    children = process.stdout.readline().split()
    assert process.wait(PATIENCE) == -signal.SIGKILL and len(children) == 3
    process.stdout.read()  # ends when the last of them has
    process.stdout.close()


def test_a_fault_of_a_process_is_one_of_the_first(monkeypatch):
    sent = []
    monkeypatch.setattr(cards, "begin_for", lambda parent: None)
    for error, kind, words in (
        (OSError(errno.ENOSPC, "No space left on device", "x"), OSError, "x: No space left on device; free"),
        (KeyError("x"), RuntimeError, "KeyError: 'x'"),
    ):
        cards.work(
            0, lambda card, error=error: (_ for _ in ()).throw(error), None, SimpleNamespace(send=sent.append), 0
        )
        with pytest.raises(kind, match=words):
            cards.receive(SimpleNamespace(recv=sent.pop), 0, None)


def test_processes_that_are_stopped_end_too():
    """They took no SIGTERM, and the first process waited for them for ever."""
    with cards.Cards(time.sleep) as started:
        started.begin(2)
        processes = [process for _, process in started.started.values()]
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2


def test_a_signal_to_all_processes_is_no_fault_of_one(monkeypatch):
    """As scancel and systemd send it: the exit code was 2, and the message that a process had ended."""

    def recv():
        raise EOFError

    monkeypatch.setattr(signals.noted, "number", signal.SIGTERM)
    with pytest.raises(signals.Ended) as ended:
        cards.receive(SimpleNamespace(recv=recv), 1, SimpleNamespace(join=lambda: None, exitcode=-signal.SIGTERM))
    assert ended.value.code == 128 + signal.SIGTERM


# -- no threads -------------------------------------------------------------------------------------------------------
def test_without_threads_one_does_it_all(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(cores, "workers", lambda: 3)
    monkeypatch.setattr(sampling, "count", lambda: 3)
    cores.pool.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert cores.in_parallel(lambda n: n * n, range(5)) == [0, 1, 4, 9, 16]
        assert sampling.in_threads(abs, [-1, 2, -3]) == [1, 2, 3]
        helpers = helper_threads.Helpers()
        helpers.wake("board", 2)
        assert helpers.started == 0 and helpers.boards.empty()
        with terminal.ticking(lambda: None):
            pass
    cores.pool.cache_clear()


def test_with_too_few_threads_those_do_it(monkeypatch):
    monkeypatch.setattr(cores, "workers", lambda: 3)
    cores.pool.cache_clear()
    start, started = threading.Thread.start, []

    def some(self):
        if len(started) == 3:  # one that starts the others, and two of them
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", some)
        for _ in range(3):
            assert cores.in_parallel(lambda n: n * n, range(5)) == [0, 1, 4, 9, 16]
    cores.pool().shutdown()
    cores.pool.cache_clear()


# -- caches -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def loop(tmp_path, monkeypatch):
    """A function that loads a loop of Numba's as a new process would, whose machine code is in `tmp_path`."""
    numba = pytest.importorskip("numba")
    from linattn_np import numba_cache

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "loops.py").write_text("def twice(x):\n    return 2 * x\n")

    def load():
        space = {"__name__": "loops", "__file__": str(tmp_path / "loops.py")}
        exec(compile((tmp_path / "loops.py").read_text(), str(tmp_path / "loops.py"), "exec"), space)
        return numba_cache.njit()(space["twice"])

    return load


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_damaged_file_of_numbas_is_written_anew(loop, kind, tmp_path):
    assert loop()(3) == 6
    (path,) = (tmp_path / "cache").rglob(f"*.{kind}")
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-50] + bytes(50)):
        path.write_bytes(damaged)
        assert loop()(3) == 6
        again = loop()
        assert again(3) == 6 and (sum(again.stats.cache_hits.values()) == 1 or damaged.startswith(whole[:-50]))


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("put", [os.mkfifo, partial(os.symlink, "/dev/zero")], ids=["pipe", "device"])
def test_what_is_no_file_of_numbas_is_not_read(loop, kind, put, tmp_path):
    """Reading it would never end."""
    assert loop()(3) == 6
    (path,) = (tmp_path / "cache").rglob(f"*.{kind}")
    path.unlink()
    put(path)
    assert loop()(3) == 6
    again = loop()
    assert again(3) == 6 and sum(again.stats.cache_hits.values()) == 1


def test_a_file_of_another_loop_of_numbas_is_not_run(loop, tmp_path):
    """Two processes that write at the same time may give two loops one name."""
    one = loop()
    assert one(3) == 6
    (path,) = (tmp_path / "cache").rglob("*.1.nbc")
    whole = path.read_bytes()
    assert one(0.25) == 0.5
    (other,) = (tmp_path / "cache").rglob("*.2.nbc")
    other.write_bytes(whole)
    assert loop()(0.25) == 0.5


def test_a_loop_is_compiled_again_when_what_it_calls_has_changed(loop, tmp_path, monkeypatch):
    """Its machine code holds the functions and constants of other files, too."""
    from linattn_np import numba_cache

    stamp = numba_cache.stamp_of_sources.__wrapped__
    monkeypatch.setattr(numba_cache, "stamp_of_sources", lambda: stamp(tmp_path))
    for changed in ("models/matrix_loops.py", "models/rwkv7/mixes.py", "backends/numpy/numba_loops.py"):
        (tmp_path / changed).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / changed).write_text("DECAY = 1\n")
        for hits in (0, 1):
            twice = loop()
            assert twice(3) == 6 and sum(twice.stats.cache_hits.values()) == hits


def test_without_a_folder_each_process_compiles(loop, tmp_path, monkeypatch):
    from linattn_np import numba_cache

    monkeypatch.setattr(numba_cache.caching.IndexDataCacheFile, "_save_index", lambda *_: os.listdir("/nowhere"))
    assert loop()(3) == 6
    monkeypatch.setattr(numba_cache.caching.CacheImpl, "_locator_classes", [])
    assert loop()(3) == 6


@pytest.mark.parametrize(
    "name, value",
    [
        ("NUMBA_DISABLE_JIT", "1"),
        ("NUMBA_NUM_THREADS", "0"),
        ("NUMBA_CPU_FEATURES", "avx2"),
        ("NUMBA_CPU_FEATURES", "+avx2,-64bit"),
        ("NUMBA_CPU_FEATURES", "-cx8"),
    ],
)
def test_where_numba_compiles_nothing_numpy_computes(name, value):
    program = "from linattn_np.models import RWKV6, austen; print(RWKV6.from_file(austen()).layers)"
    environment = ENVIRONMENT | {name: value}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=PATIENCE)
    assert done.stdout.startswith(b"NumpyLayers("), done.stderr


def test_cupy_without_a_folder_gets_one(monkeypatch):
    def again():
        monkeypatch.setenv("CUPY_CACHE_DIR", "/proc/nowhere")
        cupy_folder.folder_for_cupy.__wrapped__()

    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with pytest.warns(
        LinattnWarning, match="cannot keep kernels in /proc/nowhere .*: every process compiles its own. CU"
    ):
        again()
    assert Path(os.environ["CUPY_CACHE_DIR"]).is_dir()
    monkeypatch.setattr(cupy_folder.tempfile, "mkdtemp", lambda **_: os.listdir("/nowhere"))
    with pytest.raises(ContractError, match="CUPY_CACHE_DIR names another folder"):
        again()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    with pytest.warns(LinattnWarning):
        again()
    assert os.environ["CUPY_CACHE_IN_MEMORY"] == "1"


def test_a_device_is_opened_early_or_later(monkeypatch):
    """Where CuPy has no folder, the CPU may still write the text."""

    def no_folder():
        raise NotSupported("no folder")

    monkeypatch.setattr(option_values, "folder_for_cupy", no_folder)
    option_values.open_device_early("auto", 0)


def test_cupy_with_a_full_folder_keeps_kernels_in_memory(monkeypatch):
    def module(**_):
        if os.environ.get("CUPY_CACHE_IN_MEMORY") != "1":
            raise OSError(errno.ENOSPC, "No space left on device")
        return SimpleNamespace(get_function=lambda name: name, compile=lambda: None)

    cuda = SimpleNamespace(Device=lambda number: nullcontext())
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, RawModule=module))
    monkeypatch.setattr(device, "program", lambda kernels: "")
    monkeypatch.setattr(device, "USED_OPTIONS", set())
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
    assert device.compiled(SimpleNamespace(arch="", expression="kernel<1>"), 0) == "kernel<1>"
