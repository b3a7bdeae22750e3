"""`linattn-np generate` as a person runs it: its output and its exit code, of each version's small model."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from ast import literal_eval
from dataclasses import fields
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE
from safetensors.numpy import load_file, save_file

import linattn_np
from linattn_np import models
from linattn_np.__main__ import main
from linattn_np.command import generate as generating
from linattn_np.models import Sampling

AUSTEN = models.austen()
ON_THE_CPU = rb"on the CPU \(\d+ threads?, .+\)\n"
GENERATE = [sys.executable, "-m", "linattn_np", "generate"]
COMMAND = [*GENERATE, "--device", "cpu"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(linattn_np.__file__).parents[1])}  # the package under test


def decode(*arguments, stdin=b""):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], input=stdin, capture_output=True, timeout=PATIENCE, env=ENVIRONMENT
    )


def by_a_process(*arguments):
    """Its exit code and what it wrote."""
    done = decode(*arguments)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture
def here(capsys, monkeypatch, tmp_path_factory):
    """The same in this process, which saves the start of one, a second of a core."""

    def run(*arguments, stdin=b""):
        file = tmp_path_factory.mktemp("stdin") / "file"
        file.write_bytes(stdin)
        with open(file) as lines, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", lines if stdin else empty)
            try:
                code = main(["generate", "--device", "cpu", *map(str, arguments)])
            except SystemExit as end:
                code = end.code
        return code, *capsys.readouterr()

    with open(os.devnull) as empty:
        yield run


@pytest.fixture
def path(kind):
    return models.austen(kind.version.number)


@pytest.fixture
def generate(here, path):
    """`here` with each version's model."""
    return partial(here, "--model", path)


def start(*arguments, **options):
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        **{"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, **options},
    )


def interruptible(*arguments, **options):
    return start(
        *map(str, arguments), **options, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    )


def until(descriptor, wanted):
    """Reads until `wanted` is there."""
    seen = b""
    while wanted not in seen:
        piece = os.read(descriptor, 1000)
        assert piece, seen
        seen += piece
    return seen


def numbers_of(path):
    """The weights of a model, in float32."""
    return {name: array.astype(np.float32) for name, array in load_file(path).items()}


COMMON = set("the and of to a in was her it that i he she not be his had as for with you is have at by".split())


def test_it_writes_english_with_no_argument():
    done = subprocess.run(GENERATE, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, env=ENVIRONMENT)
    text, messages = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0, messages
    assert text.startswith("It is a truth universally acknowledged, that ")
    words = re.findall(r"[a-z]+", text.lower())
    assert sum(word in COMMON for word in words) > len(words) / 5
    assert re.match(
        r"on the (CPU \(\d+ threads?, .+\)|GPU \(.+\))\n"
        r"prefill 45 tokens at \d+ tokens/s\ndecode 400 tokens at \d+ tokens/s\n$",
        messages,
    )


def test_greedy_text(generate):
    code, out, err = generate("--prompt", "Mr. Knight", *GREEDY, "--tokens", 18)
    assert (code, out) == (0, "Mr. Knightley and his sister\n")
    assert re.match(r"on the CPU \(.+\)\nprefill 10 tokens at ", err)


def test_a_prompt_may_be_a_word_or_several(generate):
    for words in (["-p", "Mr. Knight"], ["Mr.", "Knight"]):
        assert generate(*words, "-n", 3, *GREEDY)[:2] == (0, "Mr. Knightley\n")
    assert generate("Emma", "-p", "Emma")[0] == 2


def test_a_seed_writes_the_same_text(generate):
    first, again, other = (generate("--tokens", 30, "--seed", seed)[1] for seed in "334")
    assert first == again != other


def test_the_cpus_dtype_may_be_named(generate):
    words = ("--prompt", "Mr. Knight", *GREEDY, "--tokens", 5)
    assert generate("--dtype", "float32", *words)[1] == "Mr. Knightley a\n"


def test_one_token(generate):
    code, out, err = generate("--tokens", 1, *GREEDY, "--prompt", "Emm")
    assert out == "Emma\n" and "decode 1 tokens at " in err


def following(kind, path, vocabulary, pairs):
    """Writes a model to `path` whose next token depends on the last alone: `pairs` of both."""
    layout = kind.layout(kind.layout.sizes_of(layers=1, width=16, head_size=8, vocabulary=vocabulary))
    weights = layout.named(np.zeros(layout.size, np.float32))
    for n, (last, then) in enumerate(pairs):
        weights["emb.weight"][last, n] = weights["head.weight"][then, n] = 1
    for name in ("blocks.0.ln0.weight", "ln_out.weight"):
        weights[name][:] = 1
    save_file(weights, path)
    return path


@pytest.mark.pairwise(half="kind")
def test_characters_are_written_whole(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "PYTHONIOENCODING", "ascii")
    bytes_ = "€".encode()
    echo = following(kind, tmp_path / "echo.safetensors", 256, zip(bytes_, bytes_[1:] + bytes_[:1]))
    process = start("--model", echo, "--prompt", "€", "--tokens", "7", "--temperature", "0")
    pieces = []
    while piece := os.read(process.stdout.fileno(), 100):
        pieces.append(piece.decode())  # raises on a part of a character
    process.communicate()
    assert "".join(pieces) == "€€€\ufffd\n"  # the last of the 7 begins a character that ends there


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--tokens", "0"], "argument -n/--tokens: is '0', expected a whole number from 1 to 2147483647"),
        (["--tokens", "many"], "argument -n/--tokens: is 'many', expected"),
        (["--seed=-1"], "argument --seed: is '-1', expected a whole number from 0 up"),
        (["--temperature=-1"], "temperature is -1.0, expected a number from 0 up"),
        (["--temperature=hot"], "argument --temperature: invalid float value: 'hot'"),
        (["--top-p=0"], "top_p is 0.0, expected a number above 0 and up to 1"),
        (["--prompt="], "argument -p/--prompt: is empty, expected some text"),
        (["--device=tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--dtype=int3"], "argument --dtype: invalid choice: 'int3'"),
        (
            ["--dtype=float16"],
            "argument --dtype: float16 does not go with --device cpu, which takes float32, bfloat16, int8",
        ),
        (
            ["--device=cuda", "--dtype=int4"],
            "argument --dtype: int4 does not go with --device cuda, which takes float32, float16",
        ),
        (["--fast"], "unrecognized arguments: --fast"),
        (["--model=nowhere.safetensors"], "nowhere.safetensors: No such file or directory"),
        (["--model=examples"], "is a folder without a checkpoint, expected a file, or a folder with model.safetensors"),
        (["--tokens", "9" * 5000], "argument -n/--tokens: is '99"),
        (["--model", __file__], "expected a .pth that torch wrote, a .safetensors, a .gguf, or the ending .index.json"),
        (["--top-k=-1"], "argument --top-k: is '-1', expected a whole number from 0 up"),
        (["--stop="], "argument --stop: is empty, expected some text"),
        (["--presence=nan"], "Sampling: presence is nan, expected a finite number"),
        (["--prompt=-"], "argument --prompt: stdin is empty, expected some text"),
        (["--chat", "--prompt=-"], "argument --chat: reads its lines from stdin, so --prompt cannot be -"),
        (["--output=o"], "argument --output: goes with --batch-file only"),
        (["--slots=2"], "argument --slots: goes with --batch-file only"),
        (["--cards=2"], "argument --cards: goes with --batch-file only"),
        (["--batch-file=i"], "argument --batch-file: wants --output"),
        (["--batch-file=i", "--output=o", "--chat"], "argument --batch-file: does not go with --chat"),
        (["--batch-file=nowhere.jsonl", "--output=o"], "nowhere.jsonl: No such file or directory"),
        (
            ["--save-state=nowhere/s.npz"],
            "argument --save-state: nowhere/s.npz cannot be written: No such file or directory; name a",
        ),
        (["--load-state=nowhere.npz", "--prompt=a"], "nowhere.npz: No such file or directory"),
        (["--load-state", AUSTEN, "--prompt=a"], "is no saved state, or a damaged one"),
        (["--load-state", __file__, "--prompt=a"], 'starts with b\'"""`lina\', expected what State.save has written'),
        (["--load-state=/dev/zero", "--prompt=a"], "is a folder or a device, expected a file"),
        (["--vocab=/dev/zero"], "World.from_file: /dev/zero is a folder or a device"),
        (["--batch-file=/dev/zero", "--output=o"], "/dev/zero, line 1 has more than 16777216 bytes"),
        (["--tokenizer=bytes", "--vocab=v"], "argument --vocab: does not go with --tokenizer bytes"),
        (["--vocab=nowhere.txt"], "nowhere.txt: No such file or directory"),
        (["--vocab", __file__], "World.from_file: "),
        (["--bias=101"], "argument --bias: is '101', expected ID=NUMBER, as in 0=-inf"),
        (["--bias=-1=2"], "Sampling: an id of bias is -1, expected"),
        (["--bias=300=2"], "Sampling: bias has the id 300, expected one below 256"),
        (["--fading=2"], "Sampling: fading is 2.0, expected a number from 0 to 1"),
        (["-e", r"--prompt=\ud800"], r"argument --escapes: '\ud800' is half a character, expected a whole one"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, complaint, here):
    code, out, err = here(*arguments)
    last = err.splitlines()[-1]
    assert (code, out) == (2, "")
    assert last.startswith("linattn-np generate: ") and complaint in last
    assert "Traceback" not in err and "usage" not in err


def test_other_files_are_one_line_and_exit_code_2(kind, path, tmp_path, here):
    weights, path = numbers_of(path), tmp_path / "model.safetensors"
    wide = {name: weights[name][:200] for name in ("emb.weight", "head.weight")}
    other, version = {6: ("att.gate_w1", "RWKV-6 x060a"), 7: ("ffn.s_emb.weight", "RWKV-7a")}[kind.version.number]
    for change, complaint in (
        ({f"blocks.0.{other}": np.zeros((256, 8), np.float32)}, f"belongs to {version}"),
        (wide, "has a vocabulary of 200 tokens, expected 256 (bytes) or 65536 (World)"),
    ):
        save_file({**weights, **change}, path)
        code, out, err = here(f"--model={path}")
        assert (code, out) == (2, "")
        assert complaint in err.splitlines()[-1]
    path.write_bytes(path.read_bytes()[:-1])
    assert "damaged" in here(f"--model={path}")[2]


GREEDY = ("--temperature", "0")


@pytest.mark.pairwise(half="kind")
def test_the_prompt_is_on_stdin(generate, path):
    arguments, prompt = ("--tokens", 5, *GREEDY), b"Mr. Knight\n"
    for words in ((), ("--prompt", "-")):
        assert generate(*words, *arguments, stdin=prompt)[1] == "Mr. Knightley a\n"
    assert decode("--model", path, *arguments, stdin=prompt).stdout == b"Mr. Knightley a\n"  # of a pipe


def test_a_pipe_that_nobody_writes_to_is_not_waited_for():
    with start("--tokens", "1", stdin=subprocess.PIPE) as process:
        assert process.stdout.read().startswith(b"It is a truth")


def test_a_stop_string_is_not_written(generate):
    arguments = ("--prompt", "Mr. Knight", "--tokens", 40, *GREEDY)
    assert generate(*arguments, "--stop", "nowhere", "--stop", " his")[1] == "Mr. Knightley and\n"


@pytest.mark.pairwise(half="kind")
def test_a_saved_state_goes_on(tmp_path, generate, path):
    state, again, whole = (tmp_path / f"{name}.npz" for name in ("state", "again", "whole"))
    by_a_process("--model", path, "--prompt", "Mr. Knightley an", "--tokens", 1, *GREEDY, "--save-state", state)
    goes_on = generate("--prompt", " Mrs. W", "--tokens", 5, *GREEDY, "--load-state", state, "--save-state", again)
    assert goes_on[1] == " Mrs. Weston\n"
    at_once = generate("--prompt", "Mr. Knightley and Mrs. W", "--tokens", 5, *GREEDY, "--save-state", whole)
    assert at_once[1] == "Mr. Knightley and Mrs. Weston\n"
    np.testing.assert_allclose(np.load(again)["wkv"], np.load(whole)["wkv"], rtol=0, atol=1e-4)
    code, _, err = generate("--load-state", state)
    assert code == 2 and "wants a --prompt to read, as a state holds no next token" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.npz", "state.npz", "whole.npz"]


def test_a_chat_answers_every_line_and_carries_its_state(generate):
    def chat(lines):
        code, out, err = generate("--chat", "--tokens", 20, *GREEDY, stdin=lines)
        assert code == 0 and "Traceback" not in err
        return out

    one, two = chat(b"How do you do?\n"), chat(b"How do you do?\n\nEmma\n")
    assert two.startswith(one) and len(two) > len(one)
    assert two != one + chat(b"Emma\n")


@pytest.fixture(scope="module")
def world():
    try:
        return models.World.installed()
    except FileNotFoundError:
        pytest.skip("no package with the vocabulary is installed")


@pytest.mark.parametrize(
    "answer, options, written, between",
    [
        (" Well.\n\n", (), " Well.", ""),  # the state has read the empty line that ends a turn
        (" Well.", (), " Well.", "\n\n"),  # followed by the id that ends a text
        (" Well. I am", ("-n", 2), " Well.", "\n\n"),
        (" Well.", ("-e", "--stop", r".", "-p", r"Emma\nwas here."), " Well", ""),
    ],
)
def test_turns_of_a_chat_with_a_world_model(
    kind, world, here, tmp_path, monkeypatch, answer, options, written, between
):
    """A turn has the form with which World models were trained, and the next one follows its end."""
    read, turns = generating.read, []

    def noted(model, tokens, state, progress):
        turns.append((world.decode(tokens), state is None))
        return read(model, tokens, state, progress)

    monkeypatch.setattr(generating, "read", noted)
    monkeypatch.setattr(models.World, "installed", lambda: world)
    ids = [*world.encode("User: a\n\nAssistant:")[-1:], *world.encode(answer), world.end]
    path = following(kind, tmp_path / "model.safetensors", 65536, zip(ids, ids[1:]))
    code, out, err = here("--model", path, "--chat", *GREEDY, *options, stdin=b"How do you do?\n\nI am well. \n")
    assert (code, out) == (0, f"{written}\n" * 2), err
    system = "Emma\nwas here.\n\n" if "-p" in options else ""
    first, second = (f"User: {line}\n\nAssistant:" for line in ("How do you do?", "I am well."))
    assert turns == [(system + first, True), (between + second, False)]
    assert 'which answers if it was taught to: "User: ...\\n\\nAssistant:"' in err


def test_help_says_what_the_model_cannot_do(here):
    assert "no chat model" in " ".join(here("--help")[1].split())


# -- batches ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def batch(tmp_path, here):
    """A function that runs --batch-file on lines, objects or bytes: (exit code, messages, the file of its output)."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def run(lines, *arguments, generate=here):
        source.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
        code, _, messages = generate("--batch-file", source, "--output", target, *arguments)
        assert not list(tmp_path.glob("*.part"))
        return code, messages, target

    return run


def test_a_batch_is_what_the_texts_are_alone(batch, generate):
    lines = [
        {"prompt": "It is a truth", "seed": 3},
        b"",
        {"prompt": "Mr. Knight", "temperature": 0, "stop": " his"},
        {"prompt": "Emm", "temperature": 0, "tokens": 1},
        {"prompt": "Anne " * 200, "top_p": 0.5, "top_k": 3},
    ]
    code, messages, target = batch(lines, "--slots", 2, "--tokens", 25, generate=generate)
    assert code == 0, messages
    out = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["prompt"] for line in out] == [line["prompt"] for line in lines if line]
    assert [(line["finish"], line["tokens"]) for line in out] == [
        ("length", 25),
        ("stop", 11),
        ("length", 1),
        ("length", 25),
    ]
    assert out[1]["text"] == "ley and" and out[2]["text"] == "a"
    alone = generate("--prompt", "It is a truth", "--seed", 3, "--tokens", 25)
    assert alone[1] == f"It is a truth{out[0]['text']}\n"


def test_every_way_of_drawing_is_an_option_and_a_field_of_a_line(batch, generate, path):
    """Both draw what `Model.generate` draws by the same fields."""
    bias = {ord("e"): -np.inf, ord("a"): 1.5}
    how = dict(temperature=1.5, top_k=20, top_p=0.95, min_p=0.01, temperature_last=True, presence=0.2, frequency=0.1)
    how |= dict(fading=0.9, repetition=1.1, bias=bias, logprobs=True, seed=7)
    assert {*how, "vocabulary"} == {field.name for field in fields(Sampling)}
    wanted = bytes(islice(models.load(path).generate(b"Emma\n", **how), 25)).decode()
    of_numbers = [name for name in how if name not in ("bias", "temperature_last", "logprobs")]
    words = [word for name in of_numbers for word in (f"--{name.replace('_', '-')}", how[name])]
    words += [word for id, number in bias.items() for word in ("--bias", f"{id}={number}")]
    code, out, err = generate("-e", "-p", r"Emma\n", "-n", 25, "--temperature-last", "--logprobs", *words)
    assert (code, out) == (0, f"Emma\n{wanted}\n")
    tokens = re.findall(r"^ +(-\d+\.\d{4})  (.+)$", err, re.M)
    assert [literal_eval(token) for _, token in tokens] == [*wanted]
    code, messages, target = batch([{"prompt": "Emma\n", "tokens": 25, **how}], generate=generate)
    line = json.loads(target.read_text())
    assert (code, line["text"]) == (0, wanted), messages
    np.testing.assert_allclose(line["logprobs"], [float(number) for number, _ in tokens], atol=1e-4)


@pytest.mark.exhaustive
def test_a_batch_over_processes_is_that_of_one(batch):
    """In the order of the lines, whichever process wrote them; a text that cannot go on is one of them."""
    lines = [{"prompt": f"Emma was {number}", "seed": number, "tokens": 5 + number % 3} for number in range(11)]
    code, messages, target = batch(lines, "--slots", 2, generate=by_a_process)
    assert code == 0, messages
    alone = target.read_bytes()
    code, messages, target = batch(lines, "--slots", 2, "--cards", 3, generate=by_a_process)
    assert code == 0 and target.read_bytes() == alone, messages
    assert messages.count("on the CPU") == 1
    code, _, target = batch(lines[:2], "--cards", 3, generate=by_a_process)  # one process has slots enough
    assert code == 0 and target.read_bytes() == b"".join(alone.splitlines(keepends=True)[:2])


def test_a_damaged_line_is_named_by_any_process(batch):
    lines = [{"prompt": "a"}, {"prompt": "a", "top_p": 2}]
    code, messages, target = batch(lines, "--slots", 1, "--cards", 2, generate=by_a_process)
    assert code == 2 and "line 2: Sampling: top_p is 2, expected" in messages.splitlines()[-1]
    assert "Traceback" not in messages and not target.exists()


def children(process):
    """The ids of the processes that it started."""
    return [int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "a process is killed"])
def test_what_ends_one_of_several_processes_keeps_the_texts_that_are_done(how, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    long = {"prompt": "a", "tokens": 10**9}
    source.write_text("\n".join(map(json.dumps, [{"prompt": "Emm", "tokens": 1, "temperature": 0}, long, long])))
    leader, follower = pty.openpty()
    options = ["--batch-file", source, "--output", target, "--slots", 1, "--cards", 2]
    process = interruptible(*options, stderr=follower)
    os.close(follower)
    until(leader, b"1 of 3 texts")
    if how == signal.SIGINT:
        process.send_signal(how)
    else:
        os.kill(children(process)[-1], how)
    said = until(leader, b"1 of 3 texts are done, ")
    if how == signal.SIGKILL and b"has ended with exit code -9" not in said:
        said += until(leader, b"has ended with exit code -9")
    assert process.wait(PATIENCE) == (130 if how == signal.SIGINT else 2), said
    process.stdout.close()
    os.close(leader)
    assert json.loads(target.read_text()) == {"prompt": "Emm", "text": "a", "tokens": 1, "finish": "length"}


@pytest.mark.parametrize(
    "line, complaint",
    [
        (b"Emma was", "line 2: the JSON is damaged (Expecting value"),
        (b"\xff", "line 2: "),
        (b"[" * 100_000, "line 2: "),
        (["Emma"], "line 2: the JSON is a list, expected an object"),
        ({"prompt": ""}, "line 2: expected an object"),
        ({"prompt": 3}, "line 2: prompt is a int, expected str"),
        ({"prompt": "a", "length": 3}, "line 2: has an unknown 'length', expected prompt, tokens"),
        ({"prompt": "a", "tokens": 0}, "line 2: tokens is 0, expected a whole number from 1 to 2147483647"),
        (
            {"prompt": "a", "tokens": 1 << 31},
            "line 2: tokens is 2147483648, expected a whole number from 1 to 2147483647",
        ),
        ({"prompt": "a", "tokens": True}, "line 2: tokens is a bool, expected int"),
        ({"prompt": "a", "logprobs": 1}, "line 2: logprobs is a int, expected bool"),
        ({"prompt": "a", "bias": {"e": 1}}, "line 2: Sampling: an id of bias is 'e', expected"),
        ({"prompt": "a", "seed": -1}, "line 2: seed is -1, expected"),
        ({"prompt": "a", "top_p": 2}, "line 2: Sampling: top_p is 2, expected"),
        ({"prompt": "a", "stop": [""]}, "line 2: Text: stop holds '', expected"),
        ({"prompt": "\ud800"}, "line 2: Bytes.encode: text has"),
        (b'{"prompt": "a", "prompt": "b"}', "line 2: the JSON has a key twice"),
        (
            {"prompt": "a", "temperature": 10**400},
            "line 2: Sampling: temperature is a whole number of 1329 bits, expected",
        ),
        ({"prompt": "a", "seed": -(10**400)}, "line 2: seed is a whole number of 1329 bits, expected"),
    ],
    ids=range(19),
)
def test_a_damaged_line_is_named_and_nothing_is_written(tmp_path, here, line, complaint):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b'{"prompt": "a"}\n' + (line if isinstance(line, bytes) else json.dumps(line).encode()))
    code, _, err = here("--batch-file", source, "--output", target)
    assert code == 2 and complaint in err.splitlines()[-1] and "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_output_that_is_the_input_is_refused(batch, tmp_path, here):
    source = tmp_path / "in.jsonl"
    os.symlink(source, tmp_path / "link")
    for name in ("in.jsonl", "link"):
        code, messages, _ = batch([{"prompt": "a"}], "--output", tmp_path / name)
        assert code == 2
        assert "argument --output: is the file of --batch-file, which would be lost" in messages
        assert source.read_text() == '{"prompt": "a"}'
    shutil.copy(AUSTEN, tmp_path)
    for model in (tmp_path / "model.safetensors", tmp_path):
        _, _, err = here("--model", model, "--save-state", tmp_path / "model.safetensors", "--tokens", 1)
        assert "argument --save-state: is the file of --model, which would be lost" in err
    assert (tmp_path / "model.safetensors").read_bytes() == AUSTEN.read_bytes()


def test_a_text_that_cannot_go_on_leaves_the_others(batch, path, tmp_path):
    weights = numbers_of(path)
    weights["emb.weight"][ord("~")] = np.nan
    save_file(weights, tmp_path / "model.safetensors")
    code, messages, target = batch(
        [{"prompt": "Emm", "tokens": 1}, {"prompt": "a~"}, {"prompt": "Mr. Knight", "tokens": 3}],
        "--model",
        tmp_path / "model.safetensors",
        *GREEDY,
    )
    assert code == 2
    last = messages.splitlines()[-1]
    assert "in.jsonl, line 2: logits are nan for token 0, expected numbers below inf; the" in last
    assert [json.loads(line) for line in target.read_text().splitlines()] == [
        {"prompt": "Emm", "text": "a", "tokens": 1, "finish": "length"},
        {
            "prompt": "a~",
            "text": "",
            "tokens": 0,
            "finish": "error",
            "error": "logits are nan for token 0, expected numbers below inf",
        },
        {"prompt": "Mr. Knight", "text": "ley", "tokens": 3, "finish": "length"},
    ]


def test_a_folder_of_hugging_face_by_its_path(tmp_path, path, here, generate):
    """With the vocabulary that stands in such a folder."""
    os.symlink(path, tmp_path / "model.safetensors")
    wanted = generate("--prompt", "Mr. Knight", "--tokens", 5, *GREEDY)[1]
    assert here("--model", tmp_path, "--prompt", "Mr. Knight", "--tokens", 5, *GREEDY)[1] == wanted
    (tmp_path / "rwkv_vocab_v20230424.txt").write_text("damaged")
    _, _, err = here("--model", tmp_path, "--tokenizer", "world")
    assert f"World.from_file: {tmp_path}/rwkv_vocab_v20230424.txt, line 1 is b'damaged'" in err


def test_progress_shows_on_a_terminal():
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "--tokens", "1", "--prompt", "Anne " * 300],
        stdout=subprocess.DEVNULL,
        stderr=follower,
        env=ENVIRONMENT,
    )
    os.close(follower)
    seen = b""
    try:
        while piece := os.read(leader, 1000):
            seen += piece
    except OSError:  # how a terminal says that its last writer has left
        pass
    os.close(leader)
    assert process.wait(PATIENCE) == 0
    megabytes = [int(done) for done in re.findall(rb"loading model.safetensors \[[# ]{30}\] (\d+) of 8 MB", seen)]
    assert megabytes == sorted(megabytes) and megabytes[-1] == 8 and len(set(megabytes)) > 4
    assert b"1024 of 1500 tokens" in seen


def test_a_closed_pipe_ends_it_quietly():
    process = start("--tokens", "100000")
    process.stdout.read(60)
    process.stdout.close()
    messages = process.stderr.read()
    process.stderr.close()
    assert process.wait(PATIENCE) == 0 and re.fullmatch(ON_THE_CPU, messages)
