"""The examples run as a person runs them: a process, its output, its exit code."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import linattn_np

DECODE = Path(__file__).parents[1] / "examples" / "rwkv6_decode.py"
AUSTEN = DECODE.parent / "data" / "austen-x060" / "model.safetensors"
COMMAND = [sys.executable, str(DECODE), "--device", "cpu"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(linattn_np.__file__).parents[1])}   # the package under test


def decode(*arguments):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, timeout=60, env=ENVIRONMENT)


def start(*arguments, **options):
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, **options)


def austen():
    with safe_open(AUSTEN, framework="numpy") as file:
        return {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}


def test_it_writes_english_with_no_argument():
    done = subprocess.run([sys.executable, str(DECODE)], capture_output=True, timeout=60, env=ENVIRONMENT)
    text, messages = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0, messages
    assert text.startswith("It is a truth universally acknowledged, that ")
    words = re.findall(r"[a-z]+", text.lower())
    assert sum(word in {"the", "and", "of", "to", "a", "in", "was", "her", "it", "that", "i", "he", "she", "not", "be",
                        "his", "had", "as", "for", "with", "you", "is", "have", "at", "by"} for word in words) > len(words) / 5
    assert re.match(r"device (cpu: RWKV6: device 'cuda' cannot be used: .+|cuda)\n"
                    r"prefill 45 tokens at \d+ tokens/s\ndecode 399 tokens at \d+ tokens/s\n$", messages)


def test_greedy_text():
    done = decode("--prompt", "Mr. Knight", "--temperature", "0", "--tokens", "19")
    assert done.stdout == b"Mr. Knightley and Mrs. Weston\n"
    assert done.stderr.decode().startswith("device cpu\nprefill 10 tokens at ")


def test_a_seed_writes_the_same_text():
    first, again, other = (decode("--tokens", "30", "--seed", seed).stdout for seed in "334")
    assert first == again != other


def test_one_token():
    done = decode("--tokens", "1", "--temperature", "0", "--prompt", "Emm")
    assert done.stdout == b"Emma\n"
    assert b"decode" not in done.stderr


@pytest.fixture
def echo_model(tmp_path):
    """Writes the bytes of a three-byte character over and over, whatever it reads."""
    weights = {name: np.zeros_like(array) for name, array in austen().items()}
    cycle = "€".encode()
    for here, there in zip(cycle, cycle[1:] + cycle[:1]):
        weights["emb.weight"][here, here] = weights["head.weight"][there, here] = 1
    for name in ("blocks.0.ln0.weight", "ln_out.weight"):
        weights[name][:] = 1
    save_file(weights, tmp_path / "echo.safetensors")
    return tmp_path / "echo.safetensors"


def test_characters_are_written_whole(echo_model, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "PYTHONIOENCODING", "ascii")
    process = start("--model", echo_model, "--prompt", "€", "--tokens", "7", "--temperature", "0")
    pieces = []
    while piece := os.read(process.stdout.fileno(), 100):
        pieces.append(piece.decode())           # raises on a part of a character
    process.communicate()
    assert "".join(pieces) == "€€€\ufffd\n"     # the last of the 7 begins a character that ends there


@pytest.mark.parametrize("arguments, complaint", [
    (["--tokens", "0"], "argument --tokens: is '0', expected a whole number from 1 up"),
    (["--tokens", "many"], "argument --tokens: is 'many', expected"),
    (["--seed=-1"], "argument --seed: is '-1', expected a whole number from 0 up"),
    (["--temperature=-1"], "temperature is -1.0, expected a number from 0 up"),
    (["--temperature=hot"], "argument --temperature: invalid float value: 'hot'"),
    (["--top-p=0"], "top_p is 0.0, expected a number above 0 and up to 1"),
    (["--prompt="], "argument --prompt: is empty, expected some text"),
    (["--device=tpu"], "argument --device: invalid choice: 'tpu'"),
    (["--fast"], "unrecognized arguments: --fast"),
    (["--model=nowhere.safetensors"], "No such file or directory: 'nowhere.safetensors'"),
    (["--model=examples"], "is a folder or a device, expected a file"),
    ([f"--model={__file__}"], "expected a .pth that torch wrote, or the ending .safetensors"),
])
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, complaint):
    done = decode(*arguments)
    last = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 2 and done.stdout == b""
    assert last.startswith("rwkv6_decode.py: ") and complaint in last
    assert b"Traceback" not in done.stderr and b"usage" not in done.stderr


def test_other_files_are_one_line_and_exit_code_2(tmp_path):
    path = tmp_path / "model.safetensors"
    weights = austen()
    wide = {name: weights[name][:200] for name in ("emb.weight", "head.weight")}
    for change, complaint in (({"blocks.0.att.gate_w1": np.zeros((256, 8), np.float32)}, "belongs to RWKV-6 x060a, expected"),
                              (wide, "has a vocabulary of 200 tokens, expected 256: this example reads bytes")):
        save_file({**weights, **change}, path)
        done = decode(f"--model={path}")
        assert (done.returncode, done.stdout) == (2, b"")
        assert complaint in done.stderr.decode().splitlines()[-1]
    path.write_bytes(path.read_bytes()[:-1])
    assert b"damaged" in decode(f"--model={path}").stderr


def test_a_closed_pipe_ends_it_quietly():
    process = start("--tokens", "100000")
    process.stdout.read(60)
    process.stdout.close()
    messages = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), messages) == (0, b"device cpu\n")


def test_an_interrupt_ends_it_quietly():
    process = start("--tokens", "1000000", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    process.stdout.read(60)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=60)
    assert (process.returncode, messages) == (130, b"device cpu\n")
