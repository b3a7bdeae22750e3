"""The command `linattn-np`: what it offers, its help, what it tells, and how many threads it takes."""

import json
import multiprocessing
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import threading
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import PATIENCE
from test_examples import AUSTEN, ENVIRONMENT

import linattn_np
from linattn_np.__main__ import main
from linattn_np.backends.numpy import cores
from linattn_np.command import COMMANDS, bench, blas_threads, cards, compare, info, measuring, quantise, terminal, train
from linattn_np.command.terminal import Parser
from linattn_np.models import Bytes, austen, devices, example
from linattn_np.models.training import Settings

ROOT = Path(__file__).parents[1]
SCRIPTS = {
    "rwkv6_decode.py": "generate",
    "train_rwkv6.py": "train",
    "compare_attention.py": "compare",
    "quantise.py": "quantise",
}


def called(capsys, *words):
    """Its exit code and what it wrote on stdout and stderr."""
    try:
        code = main(list(map(str, words)))
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_it_tells_its_commands(capsys):
    for words in ([], ["--help"]):
        code, out, err = called(capsys, *words)
        assert (code, err) == (0, "")
        assert all(f"  {name:<10}{what}\n" in out for name, what in COMMANDS.items())
    assert called(capsys, "--version") == (0, f"linattn-np {linattn_np.__version__}\n", "")


@pytest.mark.parametrize("words", [["dance"], ["--dance"], ["bench", "--dance"], ["bench", "dance"], ["info", "dance"]])
def test_misuse_is_one_line(words, capsys):
    code, out, err = called(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("linattn-np") and "dance" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_reads_well(name, capsys):
    """It opens with the module's words, explains every option, and names itself as it is called."""
    code, out, _ = called(capsys, name, "--help")
    module = import_module(f"linattn_np.command.{name}")
    assert code == 0 and out.startswith(f"usage: linattn-np {name}") and module.__doc__ in out
    assert f"    linattn-np {name}" in out and ".py" not in out.replace("benchmarks/run.py", "")
    parser = Parser()
    module.add_options(parser)
    assert all(action.help for action in parser._actions)


def test_the_page_is_what_help_tells():
    """Where it is not: python docs/write_command.py"""
    found = runpy.run_path(str(ROOT / "docs" / "write_command.py"))
    assert found["PAGE"].read_text() == found["page"]()


@pytest.mark.parametrize(
    "words, meant",
    [
        (["trian"], "train"),
        (["generate", "--promt", "x"], "--prompt"),
        (["generate", "--device", "cdua"], "cuda"),
        (["generate", "--device", "gpu"], "cuda"),
        (["gen"], "generate"),
        (["bench", "--heds=3"], "--heads"),
        (["train", "--txt", "novel.txt", "--out", "novel"], "--text"),
    ],
)
def test_what_was_probably_meant(words, meant, capsys):
    code, _, err = called(capsys, *words)
    assert code == 2 and err.endswith(f"; did you mean {meant}?\n")


def test_reasons_are_told_to_those_who_ask(capsys, monkeypatch):
    def missing(owner, device):
        raise linattn_np.NotSupported("no card is here")

    monkeypatch.setattr(terminal, "check_device", missing)
    monkeypatch.setattr(train, "start", lambda *_: [][0])
    words = ["train", "--text", "x", "--out", "y"]
    code, _, err = called(capsys, *words)
    first, fault = err.splitlines()
    assert code == 1 and re.fullmatch(r"on the CPU \(\d+ threads?, NumPy\)", first) and fault.count(" in ") == 1
    lines = called(capsys, *words, "-v")[2].splitlines()
    assert lines[0] == "no card is here" and lines[2].count(" from in ") > 2


@pytest.mark.parametrize("script, name", SCRIPTS.items())
def test_the_examples_are_the_commands(script, name):
    def run(word):
        return subprocess.run(
            [sys.executable, ROOT / "examples" / script, word],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=ENVIRONMENT,
        )

    done = run("--help")
    assert done.returncode == 0 and import_module(f"linattn_np.command.{name}").__doc__ in done.stdout
    done = run("--dance")
    assert done.returncode == 2 and done.stderr.startswith(f"{script}: ")


# -- bench and info ---------------------------------------------------------------------------------------------------
FLOOR = "the floor is every array read and every result written once"


def test_bench_times_every_operator(capsys):
    code, out, err = called(capsys, "bench", "--device", "cpu", "--tokens", 65, "--heads", 2, "--width", 16)
    assert (code, err) == (0, f"float32 on {measuring.cpu()}; B 1, H 2, T 65, K 16, V 16; {FLOOR}\n")
    memory, _, *rows = out.splitlines()
    assert re.fullmatch(r"memory [\d,]+ GB/s", memory)
    assert [row.split()[0] for row in rows] == list(bench.TIMED)
    number, floors = r"[\d.e+-]+", r"[\d.]+x"
    assert all(re.fullmatch(rf"\w+ +{number} +{floors} +{number} +{floors}", row) for row in rows)


def test_a_system_without_cpuinfo_names_its_architecture(monkeypatch):
    def no_file(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(measuring, "open", no_file, raising=False)
    assert measuring.cpu() == platform.machine()


def test_a_line_stands_while_the_memory_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(measuring, "COPIED", 8)
    assert measuring.ms_of_a_byte(measuring.Cpu()) > 0
    assert "measuring the memory ..." in capsys.readouterr().err


def test_bench_says_what_is_not_there(capsys, monkeypatch):
    def full(*arrays):
        raise MemoryError

    monkeypatch.setitem(bench.TIMED, "gla", (bench.TIMED["gla"][0], full))
    code, out, _ = called(capsys, "bench", "--device", "cpu", "--tokens", 8, "gla")
    assert code == 0 and out.splitlines()[-1].split() == ["gla", "no", "memory", "no", "memory"]


def test_info_tells_what_a_report_needs(capsys):
    code, out, err = called(capsys, "info")
    assert (code, err) == (0, "")
    for line in (
        f"linattn_np +{linattn_np.__version__} in ",
        r"Python +3\.",
        r"numpy +\d",
        r"CPU +.* \d+ cores",
        "operators, numpy +run",
        "operators, cupy +(run|do not run: .+)",
        "operators, numba +(run|do not run: .+)",
        "models on the CPU +run, by (Numba's loops|NumPy: .+)",
        "models on the GPU +(run|do not run: .+)",
        r"CuPy's kernels +/.*: \d+ files, [\d.]+ MB",
        "NumPy's BLAS +.+",
        f"example's model +{re.escape(str(AUSTEN))}",
    ):
        assert re.search(f"^  {line}", out, re.M), line


def test_info_tells_what_a_user_has_set(capsys, monkeypatch):
    for name in info.SET_BY_USER:
        monkeypatch.delenv(name, raising=False)
    assert re.search("^environment\n  none set +of .*OPENBLAS_NUM_THREADS", called(capsys, "info")[1], re.M)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert re.search("^environment\n  OPENBLAS_NUM_THREADS +1$", called(capsys, "info")[1], re.M)


def test_info_goes_on_where_something_is_broken(capsys, monkeypatch):
    def broken_section():
        yield "first", 3
        raise RuntimeError("no reply")

    monkeypatch.setattr(info, "devices", broken_section)
    monkeypatch.setattr("numpy.show_config", lambda mode: {})
    code, out, err = called(capsys, "info")
    assert (code, err) == (0, "")
    assert re.search("^devices\n  first +3\n  more +cannot be told: RuntimeError: no reply\nbackends$", out, re.M)
    assert re.search("^  NumPy's BLAS +cannot be told: KeyError: ", out, re.M)


def test_info_of_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert len(list(info.caches())) == 4


def test_info_tells_the_version_of_cuda():
    assert info.version(12040) == "12.4"


def test_quantise_writes_nothing_that_cannot_be_read_again(tmp_path, capsys, monkeypatch):
    def missing():
        raise linattn_np.NotSupported("Numba is missing")

    monkeypatch.setattr(quantise, "loops", missing)
    (tmp_path / "text").write_bytes(b"It is a truth universally acknowledged")
    words = ["--model", AUSTEN, "--text", tmp_path / "text", "--out", tmp_path / "few.safetensors", "--dtype"]
    assert called(capsys, "quantise", *words, "int8") == (2, "", "linattn-np quantise: Numba is missing\n")
    assert not (tmp_path / "few.safetensors").exists()
    assert called(capsys, "quantise", *words, "bfloat16")[0] == 0


def test_quantise_wants_no_text(tmp_path, capsys):
    out = tmp_path / "half.safetensors"
    code, _, err = called(capsys, "quantise", "--dtype", "bfloat16", "--out", out)
    assert code == 0 and err.startswith(f"wrote {out}, ") and "loss" not in err
    assert err.endswith(f". To write with it: linattn-np generate --model {out} 'The '\n")


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setattr(compare, "measured", None)
    code, _, err = called(capsys, "compare", "--device", "cpu", "--out", tmp_path / "picture.xyz")
    assert code == 2 and "picture.xyz, expected one of the endings " in err


def test_the_command_that_continues_a_training_has_every_option():
    _, parser = terminal.module_and_parser("train", "linattn-np train")
    elsewhere = {"help", "verbose", "text", "out", "resume", "state", "recompute"}  # flags, and what it always has
    elsewhere |= {field.name for field in fields(Settings)}  # in the checkpoint
    own = [action for action in parser._actions if action.dest not in elsewhere]
    assert {action.option_strings[0].removeprefix("--"): action.default for action in own} == train.OPTION_DEFAULTS


def test_a_folder_without_a_training_cannot_be_resumed(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_bytes(b"It is a truth universally acknowledged" * 20)
    words = ["--device", "cpu", "--text", text, "--out", tmp_path, "--resume"]
    assert f"argument --resume: {tmp_path} holds no training; without" in called(capsys, "train", *words)[2]


def test_a_device_that_is_not_there_says_what_brings_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for words in (["generate"], ["bench", "gla"]):
        code, _, err = called(capsys, *words, "--device", "cuda")
        assert code == 2 and "CuPy is not installed; pip install 'linattn-np[cuda13]', or [cuda12], brings it" in err


# -- the model that comes along ---------------------------------------------------------------------------------------
def test_the_example_model_stands_in_the_checkout_and_in_the_package(tmp_path, monkeypatch):
    assert austen() == AUSTEN.resolve() and austen(7).parent.name == "austen-x070"
    with pytest.raises(ValueError, match="austen: version is 5, expected 6 or 7"):
        austen(5)
    monkeypatch.setattr(example, "__file__", str(tmp_path / "linattn_np" / "models" / "example.py"))
    with pytest.raises(FileNotFoundError, match="model.safetensors, is missing in .*a wheel of linattn-np brings it"):
        austen()
    inside = tmp_path / "linattn_np" / "data" / "austen-x060"
    inside.mkdir(parents=True)
    shutil.copy(AUSTEN, inside)
    assert austen() == inside / "model.safetensors"


# -- threads ----------------------------------------------------------------------------------------------------------
def threads_of_blas():
    from threadpoolctl import threadpool_info

    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


@pytest.fixture
def two_threads(monkeypatch):
    limits = pytest.importorskip("threadpoolctl").threadpool_limits
    for name in blas_threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with limits(2, "blas"):
        if 2 not in threads_of_blas():
            pytest.skip("this BLAS has one thread")
        yield


def test_small_models_take_one_thread_of_blas(two_threads, monkeypatch):
    before = threads_of_blas()
    with blas_threads.blas_for("cpu", {"D": 256, "F": 896}):
        assert set(threads_of_blas()) == {1}
    assert threads_of_blas() == before
    with blas_threads.blas_for("cuda", {"D": 256, "F": 896}):
        assert threads_of_blas() == before
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")  # the user has chosen
    with blas_threads.blas_for("cpu", {"D": 256, "F": 896}):
        assert threads_of_blas() == before


def test_without_threadpoolctl_it_says_what_would_help(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)  # cannot be imported
    monkeypatch.setattr(cores, "workers", lambda: 2)
    for name in blas_threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for sizes, said in (({"D": 256, "F": 896}, 1), ({"D": 4096, "F": 14336}, 0)):
        with blas_threads.blas_for("cpu", sizes):
            pass
        assert capsys.readouterr().err.count("or set OPENBLAS_NUM_THREADS=1\n") == said


def test_larger_models_take_more():
    assert [blas_threads.best_count(4 * D * 7 * D // 2, 8) for D in (256, 768, 1024, 2048, 4096)] == [1, 1, 3, 8, 8]
    assert blas_threads.best_count(1 << 40, 1) == 1


def test_decoding_runs_with_them(two_threads, monkeypatch, capsys):
    from linattn_np.command import generate

    seen = []
    monkeypatch.setattr(generate, "write", lambda options, model, state, loops: seen.extend(threads_of_blas()))
    code, *_ = called(capsys, "generate", "--device", "cpu")
    assert code == 0 and set(seen) == {1}


class Driver:
    """CUDA's, of a host with two devices; notes what it was asked for."""

    def __init__(self, status=0):
        self.status, self.opened = status, []

    def cuInit(self, flags):
        return self.status

    def cuDeviceGetCount(self, count):
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device, number):
        device._obj.value = number
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        self.opened.append(device.value)
        return 0


def test_devices_are_counted_and_opened_without_cupy(monkeypatch):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name)
    driver = Driver()
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: driver)
    assert devices.cuda_devices() == 2
    devices.open_beside(1).join()
    assert driver.opened == [1]
    driver.status = 100  # no device
    assert devices.cuda_devices() == 0
    devices.open_beside().join()
    assert driver.opened == [1]
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    driver.status = 0
    assert devices.cuda_devices() == 0


def test_a_process_of_its_own_counts_the_devices(monkeypatch):
    monkeypatch.setattr(cards, "start_method", lambda: multiprocessing.get_context("fork"))
    monkeypatch.setattr(cards, "cuda_devices", lambda: 3)
    for several, found in ((True, 3), (False, 1)):
        monkeypatch.setattr(cards, "may_be_several", lambda: several)
        assert cards.devices("auto") == cards.devices("cuda") == found and cards.devices("cpu") == 0
    monkeypatch.setattr(cards, "may_be_several", lambda: True)
    monkeypatch.setattr(cards, "cuda_devices", lambda: os._exit(1))  # a driver that ends the process
    assert cards.devices("auto") == 1


def test_several_devices_are_told_without_the_driver(monkeypatch):
    nodes = ["nvidiactl", "nvidia-uvm", "nvidia0"]
    monkeypatch.setattr(devices.Path, "glob", lambda path, pattern: map(devices.Path, nodes))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not devices.may_be_several()
    nodes.append("nvidia1")
    for shown, several in (("0,1", True), ("1", False), ("", False)):
        assert devices.may_be_several()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert devices.may_be_several() is several
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def test_processes_are_forked_where_nothing_is_lost(monkeypatch):
    for active, driver, system, method in (
        (1, False, "linux", "fork"),
        (2, False, "linux", "spawn"),
        (1, True, "linux", "spawn"),
        (1, False, "darwin", "spawn"),
    ):
        monkeypatch.setattr(cards.sys, "platform", system)
        monkeypatch.setattr(cards.threading, "active_count", lambda: active)
        monkeypatch.setattr(cards, "uses_cuda", lambda: driver)
        assert cards.start_method().get_start_method() == method


@pytest.mark.parametrize("process, count, given", [(0, 1, None), (0, 1, 1), (0, 2, 2), (1, 2, 2), (1, 2, None)])
def test_every_thread_of_a_process_uses_its_device(process, count, given, monkeypatch):
    from linattn_np.command import batch_texts

    current, seen = threading.local(), {}

    class Model:
        device, sizes = "cuda", {"V": 256}

        def warm_up(self, batches, prompt):
            seen["warm_up"] = getattr(current, "device", 0), batches

    def load(options, *how):
        seen["load"] = getattr(current, "device", 0)
        return Model(), None

    monkeypatch.setattr(batch_texts, "load", load)
    monkeypatch.setattr(batch_texts, "open_device_early", lambda device, process: None)
    monkeypatch.setattr(batch_texts, "use", lambda number, options: setattr(current, "device", number))
    monkeypatch.setattr(batch_texts, "tokenizer_of", lambda options, model: Bytes())
    options = parsed("generate", "--batch-file", "in", "--output", "out", *(["--cards", str(given)] if given else []))
    asked = [(n, {"prompt": "a"}) for n in range(5)]
    batch_texts.Texts(options, asked)(process, count)
    assert seen == {"load": process, "warm_up": (process, (5,))}  # one process may take all texts at once


def parsed(command, *words):
    """A subcommand's options."""
    parser = Parser()
    import_module(f"linattn_np.command.{command}").add_options(parser)
    return parser.parse_args(words)


THREADED = """
import sys, threading
from linattn_np.__main__ import main
if __name__ == "__main__":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    sys.exit(main())
"""


def test_processes_share_texts_beside_a_thread_too(tmp_path):
    (tmp_path / "threaded.py").write_text(THREADED)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": "Emm", "tokens": 1, "temperature": 0}) for _ in range(3)))
    options = ["--batch-file", source, "--output", target, "--slots", "1", "--cards", "2", "--device", "cpu"]
    command = [sys.executable, tmp_path / "threaded.py", "generate", *options]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["text"] for line in target.read_text().splitlines()] == ["a"] * 3


def test_the_time_left_is_told_once_it_is_known(monkeypatch):
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: 90.0))
    half_done = SimpleNamespace(done=0.5, settings=SimpleNamespace(minutes=None))
    assert train.time_left(half_done, (0.5, 90.0)) == ""
    assert train.time_left(half_done, (0.25, 0.0)) == ", 3 min 0 s left"
    half_done.settings.minutes = 2
    assert train.time_left(half_done, (0.5, 90.0)) == ", 1 min 0 s left"
