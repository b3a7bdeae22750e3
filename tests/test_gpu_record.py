"""The record vouches for exactly the sources that ran, and only where nothing failed."""

import json
import subprocess
import sys
from pathlib import Path

import gpu_record
import pytest

TREE = {
    "kernels_cu/include/tile.cuh": "header",
    "kernels_cu/chunk/forward.cu": "kernel",
    "linattn_np/backends/cupy/plans.py": "plans",
    "linattn_np/backends/numba/kernels.py": "kernels",
    "linattn_np/backends/numpy/chunked.py": "runs on no card",
    "README.md": "neither",
}
PASSED = {"passed": 3, "failed": 0, "skipped": 1, "seconds": 0.5}


@pytest.fixture
def root(tmp_path):
    for path, text in TREE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.fixture
def path(root):
    """A record of a good run of the tree."""
    record = {"card": "card", "date": "day", "backends": {"cupy": PASSED, "numba": PASSED}, "sources": gpu_record.hashes(root)}
    (root / "record.json").write_text(json.dumps(record))
    return root / "record.json"


def test_a_good_record(root, path, capsys):
    assert gpu_record.check(root, path) == 0
    assert capsys.readouterr().out == "card, day: cupy 3 passed, numba 3 passed\n"


@pytest.mark.parametrize("changed", [path for path in TREE if "numpy" not in path and "README" not in path])
def test_a_source_that_changed(root, path, changed, capsys):
    (root / changed).write_text("other")
    assert gpu_record.check(root, path) == 1
    assert capsys.readouterr().out == f"{changed}: changed since\n"


def test_what_runs_on_no_card_may_change(root, path):
    (root / "README.md").write_text("other")
    (root / "linattn_np/backends/numpy/chunked.py").write_text("other")
    assert gpu_record.check(root, path) == 0


def test_sources_that_came_and_went(root, path, capsys):
    (root / "kernels_cu/chunk/forward.cu").rename(root / "kernels_cu/chunk/backward.cu")
    assert gpu_record.check(root, path) == 1
    assert capsys.readouterr().out == "kernels_cu/chunk/backward.cu: new since\nkernels_cu/chunk/forward.cu: gone since\n"


@pytest.mark.parametrize("backends, said", [
    ({"cupy": PASSED, "numba": {**PASSED, "failed": 2}}, "numba: 2 failed"),
    ({"cupy": {**PASSED, "passed": 0}}, "cupy: nothing passed"),
    ({}, "no backend was run")], ids=["failed", "nothing", "none"])
def test_a_run_that_was_not_good(root, path, backends, said, capsys):
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "backends": backends}))
    assert gpu_record.check(root, path) == 1
    assert capsys.readouterr().out == f"{said}\n"


def test_no_record(root, capsys):
    assert gpu_record.check(root, root / "none.json") == 1
    assert "does not exist" in capsys.readouterr().out


SUITE = {
    "good": "def test_a(): pass\ndef test_b(): __import__('pytest').skip('no')\n",
    "failing": "def test_a(): pass\ndef test_b(): assert False\n",
    "erring": "import pytest\n@pytest.fixture\ndef x(): raise OSError\ndef test_a(): pass\ndef test_b(x): pass\n",
    "broken": "import no_such_module\n",
}


@pytest.mark.parametrize("suite, passed, failed, skipped",
                         [("good", 1, 0, 1), ("failing", 1, 1, 0), ("erring", 1, 1, 0), ("broken", 0, 1, 0)])
def test_counts_of_a_run(tmp_path, suite, passed, failed, skipped):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--backends')\n")
    (tmp_path / "tests" / "test_cupy.py").write_text(SUITE[suite])
    found = gpu_record.run_tests(tmp_path, "cupy", 1, [])
    assert (found["passed"], found["failed"], found["skipped"]) == (passed, failed, skipped)


def test_a_run_without_a_report_has_failed(tmp_path):
    found = gpu_record.run_tests(tmp_path, "cupy", 1, ["--no-such-option"])
    assert (found["passed"], found["failed"]) == (0, 1)


def test_write_stores_what_ran(root, monkeypatch, capsys):
    monkeypatch.setattr(gpu_record, "machine", lambda: {"card": "card", "driver": "1"})
    monkeypatch.setattr(gpu_record, "run_tests", lambda root, backend, workers, more: PASSED)
    path = root / "new" / "record.json"
    assert gpu_record.write(root, path, ["cupy"], 1, []) == 0
    record = json.loads(path.read_text())
    assert record["backends"] == {"cupy": PASSED} and record["sources"] == gpu_record.hashes(root)
    assert {"card", "driver", "date", "commit", "versions"} <= set(record) and "numpy" in record["versions"]
    assert list(path.parent.iterdir()) == [path]


def test_check_needs_the_standard_library_alone(path):
    """Run as a program without site-packages. Whether the sources match is another matter."""
    program = Path(gpu_record.__file__)
    found = subprocess.run([sys.executable, "-I", "-S", str(program), "--check", "--out", str(path)], capture_output=True, text=True)
    assert found.returncode == 1 and not found.stderr
    assert "kernels_cu/include/tile.cuh: gone since" in found.stdout
    assert subprocess.run([sys.executable, "-I", "-S", str(program), "--check", "--nonsense"], capture_output=True).returncode == 2


def test_the_repository_has_device_sources():
    found = gpu_record.hashes(gpu_record.ROOT)
    assert "kernels_cu/chunk/chunk_forward.cu" in found and "linattn_np/backends/cupy/plans.py" in found
    assert any(path.startswith("linattn_np/backends/numba/") for path in found)
    assert not any("backends/numpy" in path for path in found)
