"""What is said of several cards' speed is what was measured."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from conftest import PATIENCE
from test_distributed_engines import ENVIRONMENT, mpiexec

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ROW = {"op": "gla", "pass": "forward", "scaling": "weak", "ranks": 2, "tokens": 131072, "H": 16, "D": 128}
ROW |= {
    "dtype": "bfloat16",
    "engine": "Nccl",
    "graphs": False,
    "ms": 1.5,
    "one_ms": 1.35,
    "efficiency": 0.9,
    "sent": 10**6,
}
ROW |= {"error": 3e-3}
RESULT = {
    "meta": {"card": "a card"},
    "rows": [
        ROW | {"pass": "backward", "efficiency": 0.95, "sent": 2 * 10**6, "error": 4e-3},
        ROW,
        ROW | {"ranks": 4, "graphs": True, "efficiency": 0.88},
        ROW | {"graphs": True, "efficiency": 0.97},
        {"training": "more batch", "size": "2x64@8x64", "ranks": 2, "tokens_s": 3e6, "one_tokens_s": 1.6e6}
        | {"efficiency": 0.9375, "apart": 1e-7},
        {"texts": 1000, "tokens_each": 32, "slots": 64, "ranks": 2, "seconds": 5.0, "one_seconds": 9.0}
        | {"tokens_s": 7000, "one_tokens_s": 4000, "efficiency": 0.9, "same_lines": True, "size": None},
        {"texts": 500, "tokens_each": 128, "slots": 64, "ranks": 2, "seconds": 6.0, "one_seconds": 11.0}
        | {"tokens_s": 7000, "one_tokens_s": 4000, "efficiency": 0.9, "same_lines": True, "size": "24x1024"},
    ],
}


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module


def test_what_is_said_of_measured_rows(load, tmp_path):
    page = load("cards_table")
    text = page.speeds(RESULT)
    lines = text.splitlines()
    assert "| `gla` forward | weak | 2 x 131,072 | 1.50 | 1.35 | 90% |" in lines
    assert lines.index("| `gla` backward | weak | 2 x 131,072 | 1.50 | 1.35 | 95% |") > 3
    assert "| `gla` forward, as a graph | weak | 2 x 131,072 | 1.50 | 1.35 | 97% |" in lines
    assert "| 2x64, 8x64 | more batch | 2 | 3,000,000 | 1,600,000 | 94% |" in lines
    said = " ".join(lines)
    assert "sends 1.00 to 2.00 MB" in said and "The largest error against float64 is 4.0e-03." in said
    assert "5.0 s on 2 cards, 9.0 s on one" in said and "to the byte" in said
    assert "the package's own model: 5.0 s" in said and "random weights of 24x1024 in bfloat16: 6.0 s" in said
    assert page.summary(RESULT) == (
        "Efficiency on 2 (4) a card in CUDA graphs: `gla` forward 97% (88%), training 94%.\n"
    )
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    page.draw(RESULT, tmp_path / "cards.png")
    assert (tmp_path / "cards.png").read_bytes().startswith(b"\x89PNG")


def test_the_pages_have_the_measured_figures(load):
    page = load("cards_table")
    found = page.read()
    assert found and all(page.speeds(result) in page.PAGE.read_text() for result in found)
    assert page.summary(found[0]) in page.README.read_text()


def test_rows_are_kept_as_they_come(load, tmp_path):
    devices, path = load("devices"), tmp_path / "rows.json"
    for row in (ROW, ROW | {"pass": "backward"}, ROW | {"ms": 1.4}):
        devices.store(path, row, ("op", "pass"))
    assert [(row["pass"], row["ms"]) for row in json.loads(path.read_text())["rows"]] == [
        ("backward", 1.5),
        ("forward", 1.4),
    ]


@pytest.mark.mpi
def test_trainings_are_timed(tmp_path):
    out = tmp_path / "rows.json"
    command = [
        str(BENCHMARKS / "cards_training.py"),
        "--device=cpu",
        "--size=1x64@2x32",
        "--steps=1",
        "--out",
        str(out),
    ]
    done = mpiexec(2, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["training"] for row in rows] == ["same batch", "more batch", "more context"]
    assert rows[0]["apart"] < 1e-5 and all(row["tokens_s"] > 0 and row["efficiency"] > 0 for row in rows)


@pytest.mark.parametrize("size", [pytest.param([], marks=pytest.mark.exhaustive), ["--size=1x64"]])
def test_texts_are_timed(size, tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(BENCHMARKS / "cards_texts.py"), "--texts=3", "--tokens=2", "--slots=1", *size]
    environment = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*command, "--out", str(out)], check=True, env=environment, timeout=PATIENCE, cwd=tmp_path)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["same_lines"] and row["seconds"] > 0 and row["texts"] == 3


GRAPHS = [str(BENCHMARKS / "cards.py"), "--graphs", "--tokens=1024", "--total=1024", "--heads=2", "--dim=64"]


@pytest.mark.parametrize("where", [["--device=cpu"], ["--device=cuda", "--threads=2"]])
def test_graphs_are_of_processes_with_cards(where):
    done = subprocess.run([sys.executable, *GRAPHS, *where], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2 and "--graphs takes --device cuda and ranks that are processes" in done.stderr


def test_graphs_are_timed(card, tmp_path):
    if card.name != "cupy":
        pytest.skip("Numba has no graphs")
    command = [sys.executable, *GRAPHS, "--device=cuda", "--out", str(tmp_path / "rows.json")]
    subprocess.run(command, check=True, env=ENVIRONMENT, timeout=PATIENCE, cwd=tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 8 and all(row["graphs"] and row["ms"] > 0 for row in rows)
