"""What benchmarks/results holds is whole, the README says the same, and a wrong result is not timed."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from reference import LIMITS

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import run  # noqa: E402  (from benchmarks)
import speed_table  # noqa: E402
from devices import Cpu  # noqa: E402

README = (ROOT / "README.md").read_text()
META = {"card", "driver", "cuda", "numpy", "cupy", "date", "commit", "copy_tb_per_s"}
FIELDS = {"op", "pass", "B", "T", "H", "K", "V", "dtype", "gate", "sequences", "ours_ms", "wall_ms", "fla_ms",
          "fla_wall_ms", "floor_ms", "error", "fla_error", "peak_mib"}


def of_small_case(op, dtype="float32", **options):
    case = run.Case(op, 2, 1 if op.endswith("_step") else 70, 3, 16, dtype, **options)
    return run.measure(case, Cpu(), 1e9, lambda *_: {}, 1)


# -- the files --------------------------------------------------------------------------------------------------------
def test_the_readme_has_the_measured_figures():
    assert speed_table.with_tables(README) == README


@pytest.mark.parametrize("path", speed_table.results(), ids=lambda path: path.stem)
def test_results_are_whole(path):
    result = json.loads(path.read_text())
    assert META <= set(result["meta"])
    assert len({run.key(row) for row in result["rows"]}) == len(result["rows"]) > 0
    for row in result["rows"]:
        assert set(row) == FIELDS
        assert row["error"] < LIMITS[row["dtype"]][0] and row["ours_ms"] > 0 and row["wall_ms"] > 0
        assert row["peak_mib"] > 0 and row["floor_ms"] > 0
        assert row["fla_ms"] is None or row["fla_error"] < LIMITS[row["dtype"]][0]


# -- measuring --------------------------------------------------------------------------------------------------------
def test_limits_are_those_of_the_tests():
    assert run.LIMITS == {dtype: LIMITS[dtype][0] for dtype in run.LIMITS}


@pytest.mark.parametrize("op", run.DECLARED)
def test_a_row(op):
    row = of_small_case(op)
    assert set(row) == FIELDS
    assert row["error"] < LIMITS["float32"][0] and row["ours_ms"] > 0 and row["fla_ms"] is None


@pytest.mark.parametrize("op", ["gla", "rwkv6_step"])
@pytest.mark.parametrize("wrong", [lambda x: x * 1.01, lambda x: np.where(x == x.max(), np.nan, x)])
def test_a_wrong_result_is_not_timed(op, wrong, monkeypatch):
    right = run.exact
    monkeypatch.setattr(run, "exact", lambda *args: tuple(map(wrong, right(*args))))
    row = of_small_case(op)
    assert row["error"] > 1e-3 and row["ours_ms"] is None and row["wall_ms"] is None


@pytest.mark.parametrize("op", run.OPS.values(), ids=lambda op: op.__name__)
def test_a_backward_pass_is_checked_and_timed(op, monkeypatch):
    row = of_small_case(op.__name__, backward=True)
    assert row["pass"] == "backward" and row["ours_ms"] > 0 and row["error"] < LIMITS["float32"][0]
    right = run.exact
    monkeypatch.setattr(run, "exact", lambda *args: tuple(1.01 * x for x in right(*args)))
    assert of_small_case(op.__name__, backward=True)["ours_ms"] is None


def test_packed_sequences():
    found = run.lengths(64, 32768)
    assert len(found) == 64 and sum(found) == 32768 and (min(found), max(found)) == (24, 2047)


def test_figures_of_a_peer_are_kept_for_the_same_versions(tmp_path):
    meta = {"card": "a card", "fla-core": "1", "torch": "2", "triton": "3"}
    row = of_small_case("gla") | {"fla_ms": 2.0, "fla_wall_ms": 3.0, "fla_error": 1e-3}
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps({"meta": meta, "rows": [row, of_small_case("rwkv6")]}))
    assert run.kept_figures(path, meta) == {run.key(row): {"fla_ms": 2.0, "fla_wall_ms": 3.0, "fla_error": 1e-3}}
    assert run.kept_figures(path, meta | {"torch": "2.1"}) == {}


# -- the table --------------------------------------------------------------------------------------------------------
def test_losses_are_said():
    row = of_small_case("gla", "bfloat16") | {"ours_ms": 1.0, "wall_ms": 1.0, "error": 3e-3}
    better = row | {"fla_ms": 0.5, "fla_wall_ms": 0.8, "fla_error": 2e-3}
    assert speed_table.faster([better]) == [
        "fla (gla 2, 70, 3, 16, 2.00 times)", "fla (gla 2, 70, 3, 16, eager, 1.25 times)"]
    assert "Ours is larger than fla's: gla 2, 70, 3, 16 (3.00e-03, fla 2.00e-03)." in speed_table.errors([better])
    wrong = row | {"fla_error": 0.5}
    assert speed_table.faster([wrong]) == [] and "was not timed: gla" in speed_table.errors([row, wrong])
