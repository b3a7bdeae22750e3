"""Ctrl-C at `linattn-np generate`: what is done is kept, and the exit code is 130."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import PATIENCE
from test_examples import ENVIRONMENT, GREEDY, ON_THE_CPU, decode, interruptible, until

from linattn_np.command import signals


@pytest.mark.parametrize("finished", [True, False])
def test_an_interrupt_keeps_the_texts_that_are_done(finished, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    first = {"prompt": "Emm", "tokens": 1 if finished else 10**9, "temperature": 0}
    source.write_text(f'{json.dumps(first)}\n{{"prompt": "a", "tokens": 10000000}}')
    leader, follower = pty.openpty()
    process = interruptible("--batch-file", source, "--output", target, stderr=follower)
    os.close(follower)
    until(leader, b"1 of 2 texts" if finished else b"writing ...")
    process.send_signal(signal.SIGINT)
    wanted = f"1 of 2 texts are done, {target} has" if finished else f"0 of 2 texts are done, {target} is not written"
    until(leader, wanted.encode())
    assert process.wait(PATIENCE) == 130
    process.stdout.close()
    os.close(leader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"][: 1 + finished]
    if finished:
        assert json.loads(target.read_text()) == {"prompt": "Emm", "text": "a", "tokens": 1, "finish": "length"}


# Numba's callbacks drop what is raised in them; its and other code is run from strings.
IN_A_CALLBACK = "ctypes.CFUNCTYPE(None)(press)()"
IN_A_STRING = "exec('press()')"
MODULE = """
import ctypes, os, signal, sys
from linattn_np.__main__ import main
from linattn_np.models import RWKV6
def press():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(10**5): pass
plain, calls = RWKV6.{where}, []
def pressed(*arguments, **options):
    calls.append(options)
    if len(calls) == {call}:
        {how}
    return plain(*arguments, **options)
RWKV6.{where} = pressed
sys.exit(main())
"""


@pytest.mark.parametrize(
    "where, call, how",  # after the two calls that compile
    [("forward", 3, IN_A_CALLBACK), ("forward", 3, IN_A_STRING), ("of_file", 1, IN_A_STRING)],
)
@pytest.mark.parametrize("alone", [True, False])
def test_no_moment_loses_an_interrupt(where, call, how, alone, tmp_path):
    (tmp_path / "pressed.py").write_text(MODULE.format(where=where, how=how, call=call))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "Emm"}')
    what = ["--prompt", "Emm"] if alone else ["--batch-file", source, "--output", target]
    process = subprocess.run(
        [sys.executable, "-m", "pressed", "generate", "--device", "cpu", "--tokens", str(10**9), *map(str, what)],
        env=ENVIRONMENT,
        cwd=tmp_path,
        capture_output=True,
        timeout=PATIENCE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.returncode == 130, process.stderr
    assert b"Traceback" not in process.stderr
    if where == "forward" and not alone:
        assert b"0 of 1 texts are done" in process.stderr


def test_an_interrupt_writes_the_state(tmp_path):
    state = tmp_path / "state.npz"
    process = interruptible("--tokens", 1000000, "--prompt", "Mr. Knight", *GREEDY, "--save-state", state)
    until(process.stdout.fileno(), b"Mr. Knightley and")
    process.send_signal(signal.SIGINT)
    rest, messages = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and re.fullmatch(ON_THE_CPU, messages) and rest.endswith(b"\n")
    done = decode("--load-state", state, "--prompt", " and", "--tokens", 1, *GREEDY)
    assert done.returncode == 0, done.stderr


def test_an_interrupt_stops_an_answer_and_the_chat_goes_on(tmp_path):
    state = tmp_path / "state.npz"
    process = interruptible(
        "--chat", "--tokens", 1000000, "--stop", "nowhere", *GREEDY, "--save-state", state, stdin=subprocess.PIPE
    )
    for line in (b"How do you do?\n", b"And you?\n"):
        process.stdin.write(line)
        process.stdin.flush()
        assert os.read(process.stdout.fileno(), 10)
        process.send_signal(signal.SIGINT)
        until(process.stdout.fileno(), b"\n")
    process.stdin.close()
    process.stdout.read()
    messages = process.stderr.read()
    assert process.wait(PATIENCE) == 0, messages
    assert re.fullmatch(
        ON_THE_CPU + rb"model.safe.*\nprefill \d+ tokens at .*\ndecode \d+ tokens at \d+ tokens/s\n", messages
    )
    assert decode("--load-state", state, "--prompt", "And", "--tokens", 1).returncode == 0
    process.stdout.close()
    process.stderr.close()


@pytest.mark.parametrize("reading", [True, False])
def test_a_signal_that_is_no_ctrl_c_ends_the_chat(reading, tmp_path):
    """While a long line is read, or while an answer is written, which Ctrl-C alone stops without ending the chat."""
    state, tokens = tmp_path / "state.npz", 3 if reading else 1000000
    process = interruptible(
        "--chat", "--tokens", tokens, "--stop", "nowhere", *GREEDY, "--save-state", state, stdin=subprocess.PIPE
    )
    process.stdin.write(b"How do you do?\n" + reading * (b"And you? " * 100000 + b"\n"))
    process.stdin.flush()
    until(process.stdout.fileno(), b"\n" if reading else b" ")
    process.send_signal(signal.SIGTERM)
    _, messages = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM and state.exists(), messages


def test_an_interrupt_between_answers_ends_the_chat_and_writes_the_state(tmp_path):
    state = tmp_path / "state.npz"
    leader, follower = pty.openpty()
    process = interruptible("--chat", "--tokens", 3, *GREEDY, "--save-state", state, stdin=follower)
    os.close(follower)
    os.write(leader, b"How do you do?\n")
    for _ in range(2):  # the second one comes when the answer has ended
        until(process.stderr.fileno(), b"> ")
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130 and state.exists()
    os.close(leader)
    for stream in (process.stdout, process.stderr):
        stream.close()


def test_an_interrupt_ends_it_quietly():
    process = interruptible("--tokens", 1000000)
    process.stdout.read(60)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and re.fullmatch(ON_THE_CPU, messages)


PRESSED = """
import atexit, os, signal, sys
press = lambda: os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(press)
{}
sys.exit(main())
"""


@pytest.mark.parametrize("before", ["from linattn_np.__main__ import main", "import linattn_np; press()"])
def test_an_interrupt_while_python_ends_is_quiet(before, tmp_path):
    script = tmp_path / "linattn-np"
    script.write_text(PRESSED.format(before))
    command = [sys.executable, script, "--version"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == -signal.SIGINT and done.stderr in ("", "linattn-np: interrupted while it was loading\n")


def raised(number) -> bool:
    """Whether Ended is raised by a signal that is in no burst with the one before."""
    time.sleep(signals.BURST)
    try:
        signal.raise_signal(number)
    except signals.Ended:
        return True
    return False


@pytest.fixture
def terminal():
    """Signals are as there, where the tests may run behind nohup; SIGHUP is ignored."""
    before = {number: signal.getsignal(number) for number in signals.NUMBERS}
    for number, handler in zip(signals.NUMBERS, (signal.default_int_handler, signal.SIG_DFL, signal.SIG_IGN)):
        signal.signal(number, handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_third_ctrl_c_ends_the_process(terminal, monkeypatch):
    """The second one may come where the work ends, so that nobody would catch a third."""
    codes = []
    monkeypatch.setattr(signals, "OWN_PROCESS", True)
    monkeypatch.setattr(os, "_exit", codes.append)
    with signals.handled():
        assert raised(signal.SIGTERM) and not raised(signal.SIGTERM) and raised(signal.SIGINT) and not codes
        assert raised(signal.SIGINT) and codes == [130]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # Python's end takes a while, and has a code of its own
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with signals.handled():
        pass
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_third_ctrl_c_ends_deferred_work_too(terminal, monkeypatch):
    codes = []
    monkeypatch.setattr(signals, "OWN_PROCESS", True)
    monkeypatch.setattr(os, "_exit", codes.append)
    with signals.handled(), signals.deferred() as noted:
        assert not raised(signal.SIGINT) and noted() == signal.SIGINT
        assert raised(signal.SIGINT) and not codes
        assert raised(signal.SIGINT) and codes == [130]


def test_a_signal_that_was_noted_ends_the_work_after_it(terminal, monkeypatch):
    monkeypatch.setattr(signals, "OWN_PROCESS", True)
    with pytest.raises(signals.Ended), signals.handled():
        with signals.deferred():
            assert not raised(signal.SIGTERM)
        signals.forget_ctrl_c()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_signal_while_the_work_ends_leaves_no_handler(terminal, monkeypatch):
    """An exception out of the end of `handled` left its handlers, whose next exception nobody caught."""
    with signals.handled():
        pass
    signal.signal(signal.SIGTERM, signals.noted)
    signal.raise_signal(signal.SIGTERM)  # the work is over
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    plain = signals.Noted.__setattr__

    def at_the_end(self, name, value):
        if name == "over":
            signal.raise_signal(signal.SIGTERM)
        plain(self, name, value)

    monkeypatch.setattr(signals.Noted, "__setattr__", at_the_end)
    with pytest.raises(signals.Ended), signals.handled():
        pass
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_ctrl_c_that_bounces_ends_no_chat(terminal, monkeypatch):
    """The first has stopped an answer, and the chat goes on; another signal of the burst is none of it."""
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: 0.0))
    with signals.handled():
        with signals.deferred():
            signal.raise_signal(signal.SIGINT)
        signals.forget_ctrl_c()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(signals.Ended):
            signal.raise_signal(signal.SIGTERM)


IN_AN_IMPORT = """
import importlib._bootstrap as imports, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Press:
    def __del__(self):  # what is raised here is dropped with a traceback, as in callbacks of imports
        for _ in range({}):
            os.kill(os.getpid(), signal.SIGINT)
class Finder:
    def find_spec(name, *_):
        if name == "linattn_np.ops":
            Press()
sys.meta_path.insert(0, Finder)
from linattn_np.__main__ import main
sys.exit(main(["--version"]))
"""


@pytest.mark.parametrize("times", [1, 4])
def test_an_interrupt_of_an_import_is_quiet(times, tmp_path):
    (tmp_path / "linattn-np").write_text(IN_AN_IMPORT.format(times))
    command = [sys.executable, tmp_path / "linattn-np"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "linattn-np: interrupted while it was loading\n")
