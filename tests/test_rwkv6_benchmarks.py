"""What the RWKV-6 benchmarks say of themselves: tables with every loss in them, peers that have the same weights."""

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from linattn_np.models import RWKV7
from linattn_np.models.rwkv import names
from linattn_np.models.rwkv.names import official
from linattn_np.models.rwkv6.names import VERSION

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module


@pytest.fixture
def measured():
    (path,) = (BENCHMARKS / "results").glob("nvidia-h200-rwkv6.json")
    return json.loads(path.read_text())


def test_a_faster_peer_is_named_with_its_factor(load, measured):
    speeds = load("rwkv6_table")
    peer = {
        "version": "1.2",
        "date": "a day",
        "error": 0.01,
        "rows": [{"batch": 8, "ms": measured["rows"][1]["ms"] / 2}],
        "prefill": {"ms": measured["prefill"]["ms"] * 2},
    }
    measured["peers"] = {"other": peer, "absent": {"skipped": "ImportError: no module"}}
    text = " ".join(speeds.on_a_gpu(measured).split())
    assert "Peers that are faster: other (decode, 8 sequences, 2.0 times)." in text
    assert "absent was not measured: ImportError: no module." in text
    assert "other is version 1.2." in text and "| other, a day, tokens/s |" in text
    measured["peers"]["other"] |= {"date": measured["date"], "tuned_over": 6}
    text = " ".join(speeds.on_a_gpu(measured).split())
    assert "1.2, tuned over at most 6 configurations a kernel." in text and "| other, tokens/s |" in text
    measured["peers"] = {}
    assert "No peer that was measured is faster." in " ".join(speeds.on_a_gpu(measured).split())


def test_a_prompts_share_of_the_matrix_rate(load, measured):
    D, L, T = 2048, 24, 2048
    operations = 2 * T * L * (6 * D * D + 2 * D * int(3.5 * D) + 2 * D * (5 * 32 + 64))
    measured["prefill"]["ms"] = operations / 790e12 / 0.73 * 1e3
    assert "| 73% of the rate |" in load("rwkv6_table").on_a_gpu(measured)


def test_decoding_is_drawn_beside_its_floor_and_its_peers(load, measured, tmp_path):
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib")
    plot = load("rwkv6_plot")
    one, eight = measured["rows"][:2]
    assert plot.rate(one) == pytest.approx(one["tokens_per_s"])
    assert plot.floor(eight) / plot.rate(eight) == pytest.approx(eight["ratio"])
    peer = {"rows": [{"batch": 1, "ms": 10.0}]}
    measured["peers"] = {"single": peer, "both": {"rows": [one, eight]}, "absent": {"skipped": "ImportError"}}
    assert [name for name, _ in plot.measured(measured)] == ["single", "both"]
    plot.draw(measured, tmp_path / "decoding.png")
    assert (tmp_path / "decoding.png").read_bytes().startswith(b"\x89PNG")


def test_no_peer_of_one_sequence_hides_another(load, measured, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib")
    plot, drawn = load("rwkv6_plot"), []
    monkeypatch.setattr(plot.plt, "close", drawn.append)
    measured["peers"] = {name: {"rows": [{"batch": 1, "ms": ms}]} for name, ms in (("one", 10.0), ("other", 10.2))}
    plot.draw(measured, tmp_path / "decoding.png")
    (axis,) = drawn[0].axes
    one, other = (axis.transData.transform(line.get_xydata()[0]) for line in axis.lines if line.get_marker() == "s")
    assert np.hypot(*(one - other)) >= 6 * drawn[0].dpi / 72  # a mark is 6 points wide


def test_the_page_keeps_what_is_around_its_tables(load):
    begin, end = (speeds := load("rwkv6_table")).BEGIN, speeds.END
    assert (
        speeds.between(f"before\n{begin}old\n{end}after\n", begin, end, "new\n") == f"before\n{begin}new\n{end}after\n"
    )


def test_fla_gets_the_same_weights(load, rng):
    pytest.importorskip("cupy", reason="the benchmark on a GPU computes with CuPy")
    gpu, make = load("rwkv6_gpu"), load("rwkv6_synthetic")
    weights = {
        name: make.scaled(name, rng.standard_normal(shape, np.float32))
        for name, shape in make.shapes(2, 128, V=30).items()
    }
    found = official(VERSION, gpu.fla_weights(weights, 2))
    assert list(found) == list(weights)
    for name, array in weights.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_rwkv_cpps_file_has_every_value_of_rwkv7(load, rng, tmp_path):
    peer, make = load("rwkv_cpp"), load("rwkv6_synthetic")
    weights = {
        name: rng.standard_normal(shape, np.float32) for name, shape in make.shapes(2, 128, V=30, version=7).items()
    }
    unread = {f"blocks.0.att.v{i}": np.zeros((1, 1, 128), np.float32) for i in range(3)}  # which some files have
    found = {name: (x, matrix) for name, x, matrix in peer.of_rwkv7(weights | unread)}
    assert not found.keys() & unread.keys() and sum(x.size for x, _ in found.values()) == sum(
        x.size for x in weights.values()
    )
    mixes, matrix = found["blocks.1.att.x_rwkvag"]
    assert mixes.shape == (6, 1, 128) and not matrix
    np.testing.assert_array_equal(mixes[3, 0], weights["blocks.1.att.x_v"].ravel())
    turned, matrix = found["blocks.1.att.w1"]
    assert matrix
    np.testing.assert_array_equal(turned, weights["blocks.1.att.w1"].T)
    with open(tmp_path / "model.bin", "wb") as file:
        peer.write(file, weights, half=True)
        sizes = (12 + 4 * x.ndim + len(name) + x.size * (2 if matrix else 4) for name, (x, matrix) in found.items())
        assert file.tell() == 24 + sum(sizes)


def test_fla_gets_the_same_weights_of_rwkv7(load, rng):
    pytest.importorskip("cupy", reason="the benchmark on a GPU computes with CuPy")
    gpu, make = load("rwkv6_gpu"), load("rwkv6_synthetic")
    weights = {
        name: rng.standard_normal(shape, np.float32) for name, shape in make.shapes(2, 128, V=30, version=7).items()
    }
    found, _ = names.parameters(RWKV7.version, gpu.fla_weights_of_7(weights))
    assert list(found) == list(weights)
    for name, array in weights.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def trainings():
    row = {"size": "4x256@64x512", "ms": 6.6, "tokens_per_s": 5e6, "matrix_rate_share": 0.15, "memory_gib": 2.5}
    rows = [row | {"who": "linattn-np"}, row | {"who": "fla", "tokens_per_s": 2.5e6}]
    return {"device": "a card", "date": "2026-01-02", "matrix_rate": 790e12, "rows": rows}


def test_trainings_beside_their_peer(load):
    speeds = load("rwkv_training_table").speeds
    found, text = trainings(), speeds(trainings())
    assert speeds(trainings() | {"note": "Seen once."}).split("\n\n")[0].endswith("Seen once.")
    assert "| 4x256, 64x512 | fla | 6.6 | 2,500,000 | 15% | 2.5 | 0.50 |" in text and "not faster in any row" in text
    assert "in the same run." in text and "tuned over at most 6 " in " ".join(speeds(found | {"tuned_over": 6}).split())
    found["rows"][1]["tokens_per_s"] = 1e7
    assert "Peers that are faster: fla (4x256, 64x512, 2.00 times)." in " ".join(speeds(found).split())
    found["rows"][1] = {"size": "4x256@64x512", "who": "fla", "skipped": "ImportError: no fla"}
    assert "not measured: ImportError: no fla" in speeds(found)


def test_a_size_that_is_not_measured_is_kept_with_its_day(load, tmp_path):
    earlier, kept = tmp_path / "earlier.json", load("rwkv_training").kept
    earlier.write_text(json.dumps(trainings() | {"curve": {"size": "4x256@64x512"}, "tuned_over": 6}))
    assert kept(None, "a card", []) == kept(earlier, "another card", []) == {"rows": [], "curve": {}}
    assert kept(earlier, "a card", ["4x256@64x512"])["rows"] == []
    found = trainings() | {"date": "2026-01-03"} | kept(earlier, "a card", ["12x768@16x1024"])
    assert found["curve"] and "| 4x256, 64x512 | fla, 2026-01-02 | 6.6 |" in load("rwkv_training_table").speeds(found)


def test_a_trainings_size_is_read(load):
    settings = load("rwkv_training").settings_of("12x768@16x1024", 5)
    assert (settings.layers, settings.width, settings.batch, settings.context) == (12, 768, 16, 1024)


def test_the_trainings_page_has_the_measured_table(load):
    page = load("rwkv_training_table")
    found = [json.loads(path.read_text()) for path in sorted(page.RESULTS.glob("*.json"))]
    assert found and all(page.speeds(result) in page.PAGE.read_text() for result in found)
