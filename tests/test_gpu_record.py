"""The record vouches for exactly the sources that ran, and only where nothing failed."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import catalog
import conftest
import gpu_record
import numpy as np
import pytest
import sanitized

from linattn_np.backends.cupy import gated_kernels
from linattn_np.models import RWKV6, RWKV7
from linattn_np.models.rwkv import cuda_decoder

TREE = {
    "kernels_cu/include/tile.cuh": "header",
    "kernels_cu/gated/forward.cu": "kernel",
    "linattn_np/backends/cupy/plan.py": "plans",
    "linattn_np/backends/numba/kernels.py": "kernels",
    "linattn_np/models/rwkv7/cuda_decode.py": "launches",
    "linattn_np/models/training_products.py": "products",
    "linattn_np/distributed/nccl.py": "messages",
    "linattn_np/backends/numpy/chunked.py": "runs on no card",
    "README.md": "neither",
}
WATCHED = {"calls": 4, "kernel_files": 2, "errors": 0, "seconds": 1.5}
PASSED = {"passed": 3, "failed": 0, "skipped": 1, "seconds": 0.5, "failures": []}


def clean(tools=gpu_record.SANITIZERS):
    """A sanitizer's entry in a record when these tools found nothing."""
    return {"version": "1.0", "tools": dict.fromkeys(tools, WATCHED)}


@pytest.fixture
def root(tmp_path):
    for path, text in TREE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.fixture
def path(root):
    """A record of a good run of the tree."""
    record = {
        "card": "card",
        "date": "day",
        "backends": {"cupy": PASSED, "numba": PASSED},
        "sanitizer": clean(),
        "sources": gpu_record.hashes(root),
    }
    (root / "record.json").write_text(json.dumps(record))
    return root / "record.json"


def test_a_good_record(root, path, capsys):
    assert gpu_record.check(root, path) == 0
    assert capsys.readouterr().out == "card, day: cupy 3 passed, numba 3 passed and compute-sanitizer found nothing\n"


@pytest.mark.parametrize("changed", [path for path in TREE if "numpy" not in path and "README" not in path])
def test_a_source_that_changed(root, path, changed, capsys):
    (root / changed).write_text("other")
    assert gpu_record.check(root, path) == 1
    assert capsys.readouterr().out == f"{changed}: changed since\n"


def test_what_runs_on_no_card_may_change(root, path):
    (root / "README.md").write_text("other")
    (root / "linattn_np/backends/numpy/chunked.py").write_text("other")
    assert gpu_record.check(root, path) == 0


@pytest.mark.parametrize(
    "code_of, text, other_comments, kept",
    [
        (
            gpu_record.python_code,
            "x = '# one'  # two\n\n# three\ny = 1\n",
            "# four\nx = '# one'\ny = 1\n",
            "x = '# one'\ny = 1",
        ),
        (
            gpu_record.cuda_code,
            'x = \'"\'; // two\n\n/* three\n*/\ny = "// one \\" /*"; // four \\\nfive\nz = 1 / 2;\n',
            '// six\'s\nx = \'"\';\ny = "// one \\" /*";\n  // "seven\nz = 1 / 2; /**/\n',
            'x = \'"\';\ny = "// one \\" /*";\nz = 1 / 2;',
        ),
    ],
    ids=["python", "cuda"],
)
def test_comments_may_change_and_strings_may_not(code_of, text, other_comments, kept):
    assert code_of(text) == code_of(other_comments) == kept
    assert code_of(text) != code_of(text.replace("// one", "// 1").replace("# one", "# 1"))


def test_sources_that_came_and_went(root, path, capsys):
    (root / "kernels_cu/gated/forward.cu").rename(root / "kernels_cu/gated/backward.cu")
    assert gpu_record.check(root, path) == 1
    assert (
        capsys.readouterr().out == "kernels_cu/gated/backward.cu: new since\nkernels_cu/gated/forward.cu: gone since\n"
    )


@pytest.mark.parametrize(
    "backends, said",
    [
        ({"cupy": PASSED, "numba": {**PASSED, "failed": 2}}, "numba: 2 failed"),
        ({"cupy": {**PASSED, "passed": 0}, "numba": PASSED}, "cupy: nothing passed"),
        ({"numba": PASSED}, "cupy: was not run"),
    ],
    ids=["failed", "nothing", "one"],
)
def test_a_run_that_was_not_good(root, path, backends, said, capsys):
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "backends": backends}))
    assert gpu_record.check(root, path) == 1
    assert capsys.readouterr().out == f"{said}\n"


def test_a_sanitizer_that_found_something(root, path, capsys):
    record = json.loads(path.read_text())
    record["sanitizer"]["tools"] = {"memcheck": WATCHED, "racecheck": {**WATCHED, "errors": 2}, "initcheck": WATCHED}
    path.write_text(json.dumps(record))
    assert gpu_record.check(root, path) == 1
    assert capsys.readouterr().out == "racecheck: 2 errors\nsynccheck: was not run\n"


def test_a_run_without_a_sanitizer_says_so(root, path, capsys):
    path.write_text(json.dumps({**json.loads(path.read_text()), "sanitizer": None}))
    assert gpu_record.check(root, path) == 0
    assert capsys.readouterr().out.endswith("without compute-sanitizer\n")


CALLS, TWO = "4 calls of 2 kernel files", "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)"


@pytest.mark.parametrize(
    "said, status, errors, calls",
    [
        ([CALLS, "========= ERROR SUMMARY: 0 errors"], 0, 0, 4),
        ([CALLS, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"], 0, 0, 4),
        ([CALLS, TWO], 1, 2, 4),
        ([CALLS, TWO], 0, 2, 4),
        (
            [CALLS, "========= ERROR SUMMARY: 300 errors", "========= ERROR SUMMARY: 200 errors were not printed."],
            1,
            300,
            4,
        ),
        (["Traceback", "========= ERROR SUMMARY: 0 errors"], 1, 1, 0),
        (["========= Error: Target application terminated before first instrumented API call"], 0, 1, 0),
        ([CALLS], 0, 1, 4),
    ],
)
def test_what_a_sanitizer_says(tmp_path, said, status, errors, calls):
    """A stand-in for the program, which in place of the calls prints what is given."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        "\n".join(
            [
                "#!/bin/sh",
                "echo Version 1.2.3 public",
                *(f"echo '{line}'" for line in said),
                f'[ "$1" = --version ] || exit {status}\n',
            ]
        )
    )
    program.chmod(0o755)
    (tmp_path / "tests").mkdir()
    found = gpu_record.sanitize(tmp_path, str(program), gpu_record.SANITIZERS)
    assert found["version"] == "1.2.3" and list(found["tools"]) == list(gpu_record.SANITIZERS)
    for tool in found["tools"].values():
        assert (tool["errors"], tool["calls"], tool["kernel_files"]) == (errors, calls, calls // 2)


def test_no_sanitizer(tmp_path):
    assert gpu_record.sanitize(tmp_path, str(tmp_path / "none"), gpu_record.SANITIZERS) is None


def test_the_sanitized_calls_launch_every_kernel(monkeypatch, rng, backends):
    """On devices that note what they are to launch, and launch nothing."""
    hopper, older, launched = conftest.made("hopper", backends), conftest.made("emulated", backends), set()
    for backend in (hopper, older):
        monkeypatch.setattr(backend.device, "launch", lambda kernel, *_, **__: launched.add(kernel))
        monkeypatch.setattr(backend.device, "prepared", lambda kernel, *_, **__: partial(launched.add, kernel))
    monkeypatch.setattr(hopper.device, "cooperative", True)  # as the card's is
    for kind in (RWKV6, RWKV7):
        monkeypatch.setattr(kind, "layers_on", staticmethod(lambda _, kind=kind: kind.cuda_layers()))
    monkeypatch.setattr(cuda_decoder, "current_device", lambda: hopper.device)
    with np.errstate(all="ignore"):
        for _ in sanitized.calls(
            rng, hopper.run, older.run, lambda function, *a, **k: function(*a, **k), hopper.device, hopper.device
        ):
            pass
    assert {kernel.file for kernel in launched} == sanitized.kernel_files()
    assert set(map(passes, launched)) >= set(map(passes, catalog.kernels()))


def passes(kernel):
    """A kernel's file and which of its passes it is, whatever the types and sizes."""
    others = (*catalog.READ_ORDERS, gated_kernels.SCALAR)
    return kernel.file, *(word for word in kernel.template if word[0].isupper() and word not in others)


def test_no_record(root, capsys):
    assert gpu_record.check(root, root / "none.json") == 1
    assert "does not exist" in capsys.readouterr().out


SUITE = {
    "good": "def test_a(): pass\ndef test_b(): __import__('pytest').skip('no')\n",
    "failing": "def test_a(): pass\ndef test_b(): assert False\n",
    "erring": "import pytest\n@pytest.fixture\ndef x(): raise OSError\ndef test_a(): pass\ndef test_b(x): pass\n",
    "broken": "import no_such_module\n",
}


@pytest.mark.parametrize(
    "suite, passed, failed, skipped",
    [("good", 1, 0, 1), ("failing", 1, 1, 0), ("erring", 1, 1, 0), ("broken", 0, 1, 0)],
)
def test_counts_of_a_run(tmp_path, suite, passed, failed, skipped):
    write_suite(tmp_path, SUITE[suite])
    found = gpu_record.run_tests(tmp_path, "cupy", 1, [])
    assert (found["passed"], found["failed"], found["skipped"]) == (passed, failed, skipped)


@pytest.mark.parametrize("suite, again", [("failing", (2, 0, 0)), ("erring", (2, 0, 0)), ("good", (1, 0, 1))])
def test_what_failed_runs_again(tmp_path, suite, again):
    """After the tests were mended. Cases that passed do not run: they would fail now."""
    write_suite(tmp_path, SUITE[suite])
    found = gpu_record.run_tests(tmp_path, "cupy", 1, [])
    assert len(found["failures"]) == found["failed"]
    (tmp_path / "tests" / "test_cupy.py").write_text("def test_a(): assert False\ndef test_b(): pass\n")
    found = gpu_record.run_again(tmp_path, "cupy", 1, [], found)
    assert (found["passed"], found["failed"], found["skipped"]) == again


def test_a_run_without_names_of_failures_is_repeated(tmp_path):
    write_suite(tmp_path, SUITE["good"])
    found = gpu_record.run_again(tmp_path, "cupy", 1, [], {**PASSED, "failed": 1})
    assert (found["passed"], found["failed"]) == (1, 0)


def write_suite(folder, text):
    """A repository with one file of tests. Its own pytest.ini makes names of cases start at `folder`: without one, a
    pyproject.toml in a parent folder, such as /tmp, decides where they start."""
    (folder / "tests").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "tests" / "conftest.py").write_text(
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--backends')\n"
        "    parser.addoption('--exhaustive', action='store_true')\n"
    )
    (folder / "tests" / "test_cupy.py").write_text(text)


CRASHING = """
import os, pathlib, pytest

@pytest.mark.parametrize("n", range(60))
def test(n):
    crashed = pathlib.Path(__file__).with_name("crashed")
    if n == 40 and not crashed.exists():
        crashed.touch()
        os.abort()
"""


def test_a_run_ends_when_a_worker_crashes(tmp_path, monkeypatch, capfd):
    """And says on which test it was."""
    write_suite(tmp_path, CRASHING)
    monkeypatch.setattr(subprocess, "run", partial(subprocess.run, timeout=conftest.PATIENCE))
    found = gpu_record.run_tests(tmp_path, "cupy", 2, [])
    assert found["failed"] == 1 and 20 < found["passed"] < 60 and not found["failures"]
    assert "crashed while running 'tests/test_cupy.py::test[40]'" in capfd.readouterr().out


def test_a_run_without_a_report_has_failed(tmp_path):
    found = gpu_record.run_tests(tmp_path, "cupy", 1, ["--no-such-option"])
    assert (found["passed"], found["failed"]) == (0, 1)


@pytest.fixture
def card_where_all_passes(monkeypatch):
    """Stands in for a card, its tests and its sanitizer. Under the name `card` it would run on cards alone."""
    monkeypatch.setattr(gpu_record, "machine", lambda: {"card": "card", "driver": "1"})
    monkeypatch.setattr(gpu_record, "card_count", lambda: 1)
    monkeypatch.setattr(gpu_record, "run_tests", lambda root, backend, workers, more, cases=(): PASSED)
    monkeypatch.setattr(gpu_record, "sanitize", lambda root, sanitizer, tools: clean(tools) if tools else None)
    monkeypatch.setattr(gpu_record, "commit", lambda root: "commit")


def test_write_stores_what_ran(root, card_where_all_passes):
    path, legs = root / "new" / "record.json", (*gpu_record.BACKENDS, *gpu_record.SANITIZERS)
    assert gpu_record.write(root, path, legs, 1, "compute-sanitizer", []) == 0
    record = json.loads(path.read_text())
    assert record["backends"] == dict.fromkeys(gpu_record.BACKENDS, PASSED) and record["sanitizer"] == clean()
    assert record["sources"] == gpu_record.hashes(root)
    assert {"card", "driver", "date", "commit", "versions"} <= set(record) and "numpy" in record["versions"]
    assert list(path.parent.iterdir()) == [path]


def test_legs_of_one_state_of_the_sources_make_one_record(root, card_where_all_passes):
    path, statuses = root / "record.json", []
    for legs in (["cupy"], ["numba", "racecheck", "synccheck"], ["memcheck", "initcheck"]):
        statuses.append(gpu_record.write(root, path, legs, 1, "compute-sanitizer", []))
    assert statuses == [1, 1, 0]
    (root / "kernels_cu/gated/forward.cu").write_text("other")
    assert gpu_record.write(root, path, ["numba"], 1, "compute-sanitizer", []) == 1
    assert list(json.loads(path.read_text())["backends"]) == ["numba"]


def test_check_needs_the_standard_library_alone(path):
    """Run as a program without site-packages. Whether the sources match is another matter."""
    program = Path(gpu_record.__file__)
    found = subprocess.run(
        [sys.executable, "-I", "-S", str(program), "--check", "--out", str(path)], capture_output=True, text=True
    )
    assert found.returncode == 1 and not found.stderr
    assert "kernels_cu/include/tile.cuh: gone since" in found.stdout
    assert (
        subprocess.run(
            [sys.executable, "-I", "-S", str(program), "--check", "--nonsense"], capture_output=True
        ).returncode
        == 2
    )


def test_the_repository_has_device_sources():
    found = gpu_record.hashes(gpu_record.ROOT)
    assert "kernels_cu/gated/forward.cu" in found and "linattn_np/backends/cupy/plan.py" in found
    assert any(path.startswith("linattn_np/backends/numba/") for path in found)
    assert not any("backends/numpy" in path for path in found)
    models = [*gpu_record.ROOT.glob("linattn_np/models/**/*.py"), gpu_record.ROOT / "linattn_np/distributed/nccl.py"]
    on_card = [path for path in models if re.search(r"import cupy|from \.+backends\.cupy", path.read_text())]
    assert {path.relative_to(gpu_record.ROOT).as_posix() for path in on_card} <= {*found}
