"""What benchmarks/results holds is whole, the tables say the same, and a wrong result is not timed."""

import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from reference import LIMITS

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import attention  # noqa: E402  (from benchmarks)
import attention_table  # noqa: E402
import cases  # noqa: E402
import complete  # noqa: E402
import devices  # noqa: E402
import fit_segments  # noqa: E402
import other_cards  # noqa: E402
import random_calls  # noqa: E402
import run  # noqa: E402
import speed_table  # noqa: E402
import sweep  # noqa: E402
from devices import Cpu  # noqa: E402

META = {"card", "driver", "cuda", "numpy", "cupy", "date", "commit", "copy_tb_per_s"}
FIELDS = {
    "op",
    "pass",
    "B",
    "T",
    "H",
    "K",
    "V",
    "dtype",
    "gate",
    "sequences",
    "peer",
    "ours_ms",
    "mhz",
    "wall_ms",
    "peer_ms",
    "peer_mhz",
    "peer_wall_ms",
    "floor_ms",
    "error",
    "errors",
    "peer_error",
    "peer_errors",
    "peer_date",
    "peak_mib",
}
LATER = {"mhz", "errors", "peer_mhz", "peer_errors", "peer_date"}  # which a completed file may lack


def of_small_case(op, dtype="float32", **options):
    case = cases.Case(op, 2, 1 if op.endswith("_step") else 70, 3, 16, dtype, **options)
    return run.measure(case, Cpu(), 1e9, lambda *_: {}, 1)


# -- the files --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path, marks, text", speed_table.pages(), ids=["README", "README-claim", "page"])
def test_the_tables_have_the_measured_figures(path, marks, text):
    page = path.read_text()
    assert speed_table.between(page, *marks, text) == page


@pytest.mark.parametrize("path", speed_table.results(), ids=lambda path: path.stem)
def test_results_are_whole(path):
    result = json.loads(path.read_text())
    assert META <= set(result["meta"])
    assert len({run.key(row) for row in result["rows"]}) == len(result["rows"]) > 0
    for row in result["rows"]:
        assert FIELDS - LATER <= set(row) - {"commit", "date"} <= FIELDS
        assert row["error"] < run.LIMITS[row["dtype"]] and row["ours_ms"] > 0 and row["wall_ms"] > 0
        assert row["peak_mib"] > 0 and row["floor_ms"] > 0
        assert row["peer_error"] is None or row["peer_ms"] is None or row["peer_error"] < run.LIMITS[row["dtype"]]


def test_the_first_plot_has_every_operator_and_pass_at_its_shapes(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib")
    import speed_plot

    result = json.loads((speed_table.RESULTS / f"{speed_table.CARD}.json").read_text())
    found = speed_table.led(result["rows"])
    assert {op for op, _ in found} == set(speed_table.LED) and len(found) == 4
    assert all(set(speed_table.LEAD) <= set(rows) for rows in found.values())
    speed_plot.draw_lead(result, tmp_path / "lead.png")
    assert (tmp_path / "lead.png").read_bytes().startswith(b"\x89PNG")


def test_the_readme_has_the_slowest_row_of_every_family():
    rows = [
        of_small_case(op, "bfloat16", backward=backward) | {"ours_ms": ms, "floor_ms": 1.0, "peer_ms": peer}
        for op, backward, ms, peer in (
            ("kda", False, 2.0, 3.0),
            ("rwkv7", False, 4.0, 3.0),
            ("kda", True, 9.0, None),
            ("retention", False, 1.0, 2.0),
        )
    ]
    families = speed_table.families(rows)
    assert [(ops[0], kind) for ops, kind, _ in families] == [
        ("simple_gla", "forward"),
        ("gated_delta_rule", "forward"),
        ("gated_delta_rule", "backward"),
    ]
    assert speed_table.span(speed_table.gains(families[1][2]), 2) == "0.75 to 1.50"
    assert speed_table.span(speed_table.gains(families[2][2])) == ""


# -- measuring --------------------------------------------------------------------------------------------------------
def test_limits_are_those_of_the_tests():
    assert run.LIMITS == {dtype: LIMITS.get(dtype, LIMITS["float16"])[0] for dtype in cases.DTYPES}


@pytest.mark.parametrize("op", cases.DECLARED)
def test_a_row(op):
    row = of_small_case(op)
    assert set(row) == FIELDS
    assert row["error"] < LIMITS["float32"][0] and row["ours_ms"] > 0 and row["peer_ms"] is None


@pytest.mark.parametrize("op", ["gla", "rwkv6_step"])
@pytest.mark.parametrize("wrong", [lambda x: x * 1.01, lambda x: np.where(x == x.max(), np.nan, x)])
def test_a_wrong_result_is_not_timed(op, wrong, monkeypatch):
    right = run.exact
    monkeypatch.setattr(run, "exact", lambda *args: tuple(map(wrong, right(*args))))
    row = of_small_case(op)
    assert row["error"] > 1e-3 and row["ours_ms"] is None and row["wall_ms"] is None


@pytest.mark.parametrize("op", [name for name in cases.DECLARED if not name.endswith("_step")])
def test_a_backward_pass_is_checked_and_timed(op, monkeypatch):
    row = of_small_case(op, backward=True)
    assert row["pass"] == "backward" and row["ours_ms"] > 0 and row["error"] < LIMITS["float32"][0]
    right = run.exact
    monkeypatch.setattr(run, "exact", lambda *args: tuple(1.01 * x for x in right(*args)))
    assert of_small_case(op, backward=True)["ours_ms"] is None


@pytest.mark.parametrize("gate", (*run.gates.NAMES, "rwkv7"))
def test_gates_by_name(gate):
    rng = np.random.default_rng(0)
    g = run.gates.draw(gate, rng, np, (2, 20, 130, 64))
    assert g.shape == (2, 20, 130, 64) and g.dtype == np.float32 and (g <= 0).all()
    assert np.isinf(g).any() == (gate == "reset")
    if gate in ("trained", "model"):  # weak in the middle, strong at the end, in one head
        assert -0.2 < np.median(g[0, 0]) and g.min() < -5
    if gate == "rwkv7":
        assert run.gates.LEAST_OF_RWKV7 <= g.min() < -0.6 < -0.1 < np.median(g[0, 0])


def test_a_gates_gradient_is_as_large_as_its_terms():
    """With -20 everywhere it is e**-20 of them, below their rounding."""
    row = of_small_case("gla", backward=True, gate="all-20")
    assert row["ours_ms"] > 0 and row["errors"]["dg"][0] < 1e-6


def test_a_sample_waits_for_the_clock(monkeypatch):
    """Until it is near the highest that was seen, and not for ever."""
    rests, card = [], devices.Gpu.__new__(devices.Gpu)
    monkeypatch.setattr(devices.time, "sleep", rests.append)
    clocks = iter([1980.0, 1979.0, 1365.0, 1995.0, 1950.0, 1350.0, 1974.0])  # 1995 is a miscount
    monkeypatch.setattr(devices.Gpu, "wait", lambda self: None)
    monkeypatch.setattr(devices.Gpu, "hold", lambda self, nanoseconds: None)
    monkeypatch.setattr(devices.Gpu, "clock", lambda self: next(clocks, 1900.0))
    card.highest = card.last = 0.0
    for waited in (1, 1, 2, 3, devices.RESTS):
        rests.clear()
        card.rest()
        assert len(rests) == waited and card.highest <= 1979


def test_a_sample_is_short(monkeypatch):
    called, now = [], [0.0]

    def slow_call():
        now[0] += 0.006

    monkeypatch.setattr(devices, "time", SimpleNamespace(perf_counter=lambda: now[0] + 1e-6 * len(called)))
    turns = devices.Turns(Cpu(), [partial(called.append, n) for n in range(10)])
    assert turns.count == 10 and called == [*range(10)] * 2
    slow = devices.Turns(Cpu(), [slow_call] * 10)
    assert slow.count == 1


def test_arrays_lie_as_asked():
    x = np.arange(2 * 3 * 5 * 8, dtype=np.float32).reshape(2, 3, 5, 8)
    for memory in cases.MEMORY:
        found = run.laid(x, memory, np)
        assert (found == x).all() and found.strides[-1] == 4
        assert (memory == "aligned") == (found is x)


def test_packed_sequences():
    found = cases.lengths(64, 32768)
    assert len(found) == 64 and sum(found) == 32768 and (min(found), max(found)) == (24, 2047)


def test_figures_of_a_peer_are_kept_for_the_same_versions(tmp_path):
    meta = {"card": "a card", "fla-core": "1", "torch": "2", "triton": "3"}
    kept = {
        "peer_ms": 2.0,
        "peer_mhz": 9.0,
        "peer_wall_ms": 3.0,
        "peer_error": 1e-3,
        "peer_errors": {"o": [1e-3, 2e-3]},
    }
    row = of_small_case("gla") | kept
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps({"meta": meta | {"date": "a day"}, "rows": [row, of_small_case("rwkv6")]}))
    later, newer = tmp_path / "later.json", row | {"T": 71, "peer_ms": 4.0, "peer_date": "a later day"}
    later.write_text(json.dumps({"meta": meta, "rows": [newer]}))
    found, kept = run.kept_figures([path], meta), kept | {"peer_date": "a day"}
    without_errors = kept | {"peer_error": None, "peer_errors": None}
    assert found[run.key(row)] == kept and found[run.key(row | {"gate": None})] == without_errors
    both = run.kept_figures([path, later], meta)
    assert both[run.key(newer)] == kept | {"peer_ms": 4.0, "peer_date": "a later day"}
    assert run.kept_figures([path], meta | {"torch": "2.1"}) == run.kept_figures([], meta) == {}


def test_a_run_without_peers_keeps_their_figures_and_says_their_versions(tmp_path):
    meta = {"card": "a card", "fla-core": "1", "torch": "2", "triton": "3"}
    row = of_small_case("gla") | {"peer_ms": 2.0}
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps({"meta": meta, "rows": [row]}))
    second.write_text(json.dumps({"meta": meta | {"fla-core": "2"}, "rows": [row | {"T": 71}]}))
    here = {"card": "a card", "numpy": "4"}
    assert list(run.kept_figures([first, second], here)) == [run.key(row), run.key(row | {"gate": None})]
    assert here == meta | {"numpy": "4"}


# -- the peers --------------------------------------------------------------------------------------------------------
def of_peer(kept=(), limit_s=math.inf):
    return run.Peers(Cpu(), {}, dict(kept), limit_s, 1)


def case_of(op, **options):
    return cases.Case(op, 2, 1 if op.endswith("_step") else 33, 3, 16, **options)


def row_beside(peer, case):
    return run.measure(replace(case, dtype="float32"), Cpu(), 1e9, lambda _, *its: peer(case, *its), 1)


@pytest.mark.parametrize("backward", [False, True])
def test_what_an_earlier_file_lacks_is_measured(backward, monkeypatch):
    case, kept = case_of("gla", backward=backward), {"peer_ms": 2.0, "peer_wall_ms": 3.0, "peer_error": 1e-3}
    measured = kept | {"peer_ms": 5.0}
    monkeypatch.setattr(run.Peers, "measure", lambda *_: measured)
    peer = of_peer({run.key(case.fields): kept})
    assert kept.items() <= row_beside(peer, case).items()
    assert measured.items() <= row_beside(peer, replace(case, T=34)).items()


def test_a_peer_is_measured_once_for_all_gates(monkeypatch):
    """But for its errors: its kernels do the same work for every gate."""
    measured = {"peer_ms": 5.0, "peer_wall_ms": 6.0, "peer_error": 1e-3, "peer_errors": {"o": [1e-3, 2e-3]}}
    found = [measured, {"peer_error": 1.0}]
    monkeypatch.setattr(run.Peers, "measure", lambda *_: found.pop(0))
    peer, case = of_peer(), case_of("gla", gate="trained")
    assert measured.items() <= row_beside(peer, case).items()
    weak = row_beside(peer, replace(case, gate="weak"))
    assert (weak["peer_ms"], weak["peer_error"], weak["peer_errors"]) == (5.0, None, None)
    longer = replace(case, T=34)
    assert row_beside(peer, longer)["peer_error"] == 1.0  # wrong, and so not timed
    found.append(measured)
    assert row_beside(peer, replace(longer, gate="weak"))["peer_ms"] == 5.0


@pytest.mark.parametrize("reason", ["out of memory\nand more", ""])
def test_a_peer_that_fails_leaves_our_row(reason, monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError(reason)

    monkeypatch.setattr(run.peers, "bound", fails)
    row = row_beside(of_peer(), case_of("gla", backward=True))
    assert row["ours_ms"] > 0 and row["peer_ms"] is row["peer_error"] is None
    assert f"fla fails: RuntimeError: {reason.partition(chr(10))[0]}\n" in capsys.readouterr().err


def test_a_peer_that_is_absent_leaves_the_others(monkeypatch):
    monkeypatch.setattr(run.Peers, "measure", lambda *_: {"peer_ms": 5.0})
    peer = run.Peers(Cpu(), {"fla": "No module named 'fla'"}, {}, math.inf, 1)
    rows = [row_beside(peer, case_of(op)) for op in ("gla", "gla with gv")]
    assert [(row["peer"], row["peer_ms"]) for row in rows] == [("fla", None), (None, None)]


def test_a_peer_without_time_left_is_said(capsys):
    row = row_beside(of_peer(limit_s=-1), case_of("gla"))
    assert row["ours_ms"] > 0 and row["peer_ms"] is None and "its time is up" in capsys.readouterr().err


def recurrence(q, k, v, g=None, u=None, *, scale, normalize=False, initial_state=None, output_final_state=False):
    """Every operator of fla's as torch computes it, [B, T, H, ..]; g is [B, T, H], [B, T, H, K] or for each head."""
    torch = sys.modules["torch"]
    assert not normalize
    state = torch.zeros(*k.shape[::2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    g = torch.zeros(k.shape) if g is None else g.expand(k.shape[:3])[..., None] if g.ndim < 4 else g
    outputs = []
    for t in range(q.shape[1]):
        pair = k[:, t, :, :, None] * v[:, t, :, None]
        after = g[:, t].exp()[..., None] * state + pair
        read = after if u is None else state + u[..., None] * pair
        outputs.append(scale * (q[:, t, :, None] @ read)[:, :, 0])
        state = after
    return torch.stack(outputs, 1), state


def dplr(r, w, k, v, a, b, *, scale, initial_state=None, output_final_state=False, **bounded):
    """RWKV-7's recurrence likewise."""
    torch = sys.modules["torch"]
    assert w.min() >= bounded.get("lower_bound", -np.inf)
    state = torch.zeros(*k.shape[::2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    outputs = []
    for t in range(r.shape[1]):
        erased = a[:, t, :, None] @ state
        state = w[:, t].exp()[..., None] * state + b[:, t, :, :, None] * erased + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append((r.shape[-1] ** -0.5 if scale is None else scale) * (r[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, 1), state


def delta_rule(q, k, v, g=None, *, beta, **keywords):
    """The delta rule as RWKV-7's, which erases before a state decays."""
    torch = sys.modules["torch"]
    w = torch.zeros(k.shape) if g is None else g.expand(k.shape) if g.ndim == 4 else g[..., None].expand(k.shape)
    return dplr(q, w, k, beta[..., None] * v, -w.exp() * k, beta[..., None] * k, **keywords)


@pytest.fixture
def installed(monkeypatch):
    """torch, and fla's functions by what they mean."""
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def retention(q, k, v, **keywords):
        return recurrence(q, k, v, torch.log(1 - 2.0 ** (-5 - torch.arange(q.shape[2]))), **keywords)

    ops = ModuleType("fla.ops")
    others = dict.fromkeys(run.peers.WITH_STRENGTH, delta_rule) | {"retention": retention, "rwkv7": dplr}
    for module, name in run.peers.FUNCTIONS.values():
        function = others.get(module, recurrence)
        setattr(ops, module, SimpleNamespace(**vars(getattr(ops, module, SimpleNamespace())), **{name: function}))
    package = ModuleType("fla")
    package.ops = ops
    monkeypatch.setitem(sys.modules, "fla", package)
    monkeypatch.setitem(sys.modules, "fla.ops", ops)
    monkeypatch.setattr(run.peers, "captured", Cpu().captured)
    monkeypatch.setattr(run.peers, "tune_over", lambda most: None)


PEERS = [case_of(op) for op in run.peers.FUNCTIONS] + [case_of("rwkv7", gate="rwkv7")]
PEERS += [replace(case, backward=True) for case in PEERS if not case.step]


@pytest.mark.pairwise
@pytest.mark.parametrize("case", PEERS, ids=str)
def test_a_peer_gives_what_ours_gives(case, installed):
    row = row_beside(lambda _, *its: of_peer().measure(replace(case, dtype="float32"), *its), case)
    assert row["peer_error"] < LIMITS["float32"][0] and row["peer_ms"] > 0 and row["peer_wall_ms"] > 0
    assert row["error"] < LIMITS["float32"][0] and row["ours_ms"] > 0


def test_a_wrong_gradient_of_a_peer_is_not_timed(installed, monkeypatch):
    right = run.peers.Pullback.results
    monkeypatch.setattr(run.peers.Pullback, "results", lambda self: tuple(1.01 * x for x in right(self)))
    case = case_of("rwkv6", dtype="float32", backward=True)
    row = row_beside(lambda _, *its: of_peer().measure(case, *its), case)
    assert row["peer_error"] > 1e-3 and row["peer_ms"] is None and row["ours_ms"] > 0


def test_wide_heads_and_rwkv7_are_tuned_over_few_configurations(monkeypatch):
    compiled = []

    class Autotuner:
        nargs, fn = {"x": 1}, SimpleNamespace(warmup=lambda x, grid, n: compiled.append(n) if n else 1 / 0)

        def prune_configs(self, arguments):
            return [SimpleNamespace(all_kwargs=lambda n=n: {"n": n}) for n in range(100)]

    for name in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", SimpleNamespace(Autotuner=Autotuner))
    monkeypatch.setitem(sys.modules, "triton.testing", SimpleNamespace(do_bench=lambda call, **its: (call(), its)))
    monkeypatch.setattr(run.peers, "Pullback", lambda *_: None)
    monkeypatch.setattr(run.peers, "Call", lambda *_: None)
    run.peers.every_configuration.cache_clear()
    wide, usual = (replace(case_of("gla", backward=True), D=D) for D in (256, 128))
    for case, few in ((usual, False), (wide, True), (usual, False), (case_of("rwkv7"), True)):
        compiled.clear()
        run.peers.bound(case, {}, {})
        tried = [its.all_kwargs()["n"] for its in Autotuner().prune_configs({"grid": (8,), "warmup": False})]
        assert 1 <= len(tried) <= run.peers.MOST if few else len(tried) == 100
        assert sorted(compiled) == tried[1:] or not (few or compiled)  # 0 cannot be compiled
    assert Autotuner().do_bench(lambda: "a time") == ("a time", run.peers.BRIEFLY)
    run.peers.every_configuration.cache_clear()


# -- the table --------------------------------------------------------------------------------------------------------
def test_losses_are_said():
    row = of_small_case("gla", "bfloat16", gate="trained") | {"ours_ms": 1.0, "wall_ms": 1.0, "error": 3e-3}
    better = row | {"peer_ms": 0.5, "peer_wall_ms": 0.8, "peer_error": 2e-3}
    assert speed_table.faster([better]) == ["fla (gla 2, 70, 3, 16, 2.00 times)"]
    assert speed_table.faster([better | {"peer_ms": 1.1}]) == ["fla (gla 2, 70, 3, 16, 1.25 times eager)"]
    assert speed_table.name(better | {"gate": "weak"}) == "gla 2, 70, 3, 16, weak gates"
    slow = row | {"floor_ms": 0.5, "T": 71, "peer_ms": None}
    assert speed_table.worst([better | {"floor_ms": 1.0}, slow]) == (
        "Slowest: gla 2, 71, 3, 16 takes 2.0 times its floor, and gla 2, 70, 3, 16 takes 2.00 times fla's time."
    )
    wider = better | {"T": 71, "error": 4e-3}
    assert "Ours are larger than the peers': gla (up to 2.00 times)." in speed_table.errors([better, wider])
    gradient = better | {"pass": "backward", "error": 4e-3, "peer_error": 5e-3}
    assert speed_table.faster([gradient | {"wall_ms": 0.7}]) == ["fla (gla backward 2, 70, 3, 16, 2.00 times)"]
    assert speed_table.errors([better | {"error": 2e-3}, gradient]) == (
        "Relative errors against float64, in bfloat16: ours 2.0e-03 to 2.0e-03, the peers' 2.0e-03 to 2.0e-03; "
        "of gradients ours 4.0e-03 to 4.0e-03, the peers' 5.0e-03 to 5.0e-03."
    )
    wrong = row | {"peer_error": 0.5}
    assert speed_table.faster([wrong]) == []
    assert "Wrong, and so not timed: fla (gla 2, 70, 3, 16)." in speed_table.errors([row, wrong])


def test_the_days_of_kept_figures_are_said():
    rows = [{"peer_date": day} for day in ("2026-02-02", "2026-02-01", None, "2026-02-02")]
    meta = {"date": "2026-02-03"}
    assert speed_table.of_days(meta, rows) == ", measured on 2026-02-01 and 2026-02-02"
    kept = rows[0] | {"peer_ms": 1.0, "peer_mhz": None}
    assert speed_table.of_days(meta | {"mhz": 1980.0}, [kept]).endswith("2026-02-02, in longer samples without rests")
    rested = kept | {"peer_date": "2026-02-03", "peer_mhz": 1980.0}
    assert speed_table.of_days(meta | {"mhz": 1980.0}, [kept, rested]).endswith("without rests, and on 2026-02-03")
    assert speed_table.of_days(meta, [{}]) == speed_table.of_days({"date": "2026-02-02"}, rows[:1]) == ""


def test_lower_clocks_are_said():
    rows = [{"mhz": mhz} for mhz in (1980.0, 1905.0, 1950.0, None, 1975.0)]
    meta = {"mhz": 1980.4}
    assert speed_table.of_clocks(meta, rows[:1]) == " Samples begin at the full clock of 1,980 MHz."
    assert "end below 99 % of it in 2 rows, at no less than 1,905." in speed_table.of_clocks(meta, rows)
    assert speed_table.of_clocks({}, rows) == ""


def test_a_run_that_ended_early_is_completed():
    row = of_small_case("gla", "bfloat16") | {"ours_ms": 1.0, "floor_ms": 0.5, "peer_ms": None}
    backward, other = row | {"pass": "backward"}, row | {"op": "retention", "T": 71}
    old, new = (
        {"meta": {"card": "a card", "commit": commit, "date": "2026-01-02"}, "rows": rows}
        for commit, rows in (
            ("0ld", [row | {"ours_ms": 2.0}, backward, other, other | {"pass": "backward"}]),
            ("new", [row]),
        )
    )
    found = complete.completed(new, old, ["retention backward"])
    assert found["meta"] == new["meta"]
    assert found["rows"] == [row, *(taken | {"commit": "0ld", "date": "2026-01-02"} for taken in (backward, other))]
    assert complete.completed(new, found | {"meta": old["meta"] | {"commit": "older"}})["rows"][1]["commit"] == "0ld"
    assert speed_table.cells({"gla": found["rows"][1]}, "gla") == ["1.00† (2.00x)", ""]
    assert speed_table.older(found["rows"]) == "† measured at commit 0ld."
    assert speed_table.older([row]) == ""
    with pytest.raises(SystemExit, match="differ in card"):
        complete.completed(new, old | {"meta": {"card": "another"}})


def test_a_peers_day_stands_beside_a_row_of_another_run():
    row = of_small_case("gla", "bfloat16") | {
        "ours_ms": 1.0,
        "floor_ms": 0.5,
        "peer_ms": 2.0,
        "peer_date": "2026-01-02",
    }
    taken = row | {"commit": "0ld"}
    rows = [row, row | {"peer_date": "2026-01-01"}, taken, taken | {"date": "2026-01-02"}, row | {"peer_date": None}]
    dated = speed_table.with_days({"meta": {"date": "2026-01-02"}, "rows": rows})
    assert [its["peer_day"] for its in dated] == ["", "2026-01-01", "2026-01-02", "", ""]
    assert [speed_table.cells({"gla": its}, "gla")[1] for its in dated[:2]] == [
        "2.00 (2.0x)",
        "2.00 (2.0x, 2026-01-01)",
    ]
    step = {"gla_step": dated[1] | {"wall_ms": 1.0, "peer_wall_ms": 3.0}}
    assert speed_table.step_cells(step, "gla_step") == ["1,000 / 1,000", "2,000 / 3,000 (2026-01-01)"]


def test_a_second_card_stands_on_the_page_alone(tmp_path, monkeypatch):
    first = json.loads((speed_table.RESULTS / f"{speed_table.CARD}.json").read_text())
    second = first | {"meta": first["meta"] | {"card": "NVIDIA H100 80GB HBM3"}}
    for name, result in ((speed_table.CARD, first), ("nvidia-h100", second)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    monkeypatch.setattr(speed_table, "RESULTS", tmp_path)
    assert [path.stem for path in speed_table.results()] == [speed_table.CARD, "nvidia-h100"]
    page, readme = speed_table.tables(), speed_table.summary()
    own, other = page.split("## On the NVIDIA H100 80GB HBM3\n")
    assert "H100" not in readme and "H100" not in own
    assert other.count("| 4, 4096, 64, 128 |") == own.count("| 4, 4096, 64, 128 |") > 0


def test_steps_of_delta_rules_have_a_table_of_their_own():
    rows = [of_small_case("kda_step"), of_small_case("kda"), of_small_case("gla_step")]
    assert [line[:2] for line in speed_table.steps_of_delta_rules(rows)] == [["2", "`kda_step`"]]
    assert [line[1] for line in speed_table.others(rows)] == ["`kda`"]


# -- softmax attention ------------------------------------------------------------------------------------------------
ATTENTION = (
    attention.Case(2, 70, 4, 16, HK=2, V=8),
    attention.Case(3, 1, 4, 16, causal=False, HK=2, S=33),
    attention.Case(1, 2400, 2, 16, sequences=3),
    attention.Case(1, 70, 2, 16, backward=True),
)


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_a_row_of_attention(case):
    row = attention.measure(case, Cpu())
    assert row["error"] < attention.LIMIT and row["ours_ms"] > 0 and row["cudnn_ms"] is row["flash_ms"] is None


def test_wrong_attention_is_not_timed(monkeypatch):
    monkeypatch.setattr(attention, "ours", lambda case, arrays, do: lambda: 1.01 * arrays[2])
    assert attention.measure(attention.Case(1, 70, 2, 16), Cpu())["ours_ms"] is None


def test_the_table_of_attention_is_beside_the_faster_backend():
    case = attention.asdict(attention.Case(4, 2048, 32, 128, HK=8))
    forward = case | {"cudnn_ms": 0.2, "flash_ms": 0.4, "ours_ms": 0.15}
    backward = forward | {"backward": True, "ours_ms": 0.5, "flash_ms": None}
    meta = {"card": "C", "date": "D", "commit": "c", "torch": "2"}
    text = attention_table.of_card({"meta": meta, "rows": [forward, backward]})
    assert "| 4, 2048, 32/8, 128 | 0.150 (0.75x) | 0.200 | 0.400 | 0.500 (2.50x) | 0.200 |  |" in text
    assert "0.75 to 0.75 times torch's time forward" in text


def test_the_page_has_the_table_of_attention():
    page = attention_table.PAGE.read_text()
    assert attention_table.between(page, *attention_table.MARKS, attention_table.tables()) == page


def test_errors_stand_beside_the_peers():
    row = of_small_case("gla", "bfloat16", gate="trained")
    assert speed_table.errors_by_name([row | {"peer_errors": None}]) == []
    backward = {name: [3e-3, 2e-2] for name in ("dq", "dk", "dv", "dg")}
    rows = [
        row | {"errors": {"o": [1e-3, 2e-3]}, "peer_errors": {"o": [2e-3, 4e-3]}},
        row | {"pass": "backward", "errors": backward, "peer_errors": backward},
    ]
    ours, its = speed_table.errors_by_name(rows)
    assert ours == ["2, 70, 3, 16", "`gla`, trained gates", "ours", "1.0e-03 / 2.0e-03", *["3.0e-03 / 2.0e-02"] * 4]
    assert its[2:4] == ["fla", "2.0e-03 / 4.0e-03"]


def test_estimates_for_other_cards(tmp_path):
    rows = [
        of_small_case("gla", gate="trained", backward=backward) | {"ours_ms": ours, "dtype": "bfloat16"}
        for backward, ours in ((False, 1.0), (True, 3.0))
    ]
    path = tmp_path / "card.json"
    run.write(path, {"card": "NVIDIA H200"}, [*rows, rows[0] | {"gate": "weak", "ours_ms": 9.0}])
    text = other_cards.of(path, ("bfloat16",))
    assert "| 2, 70, 3, 16 | bfloat16 | 1 / 3 | ~3.2 / 9.5 | ~5.6 / 17 |" in text and "estimated" in text
    assert "RTX 5090 1,792 GB/s" in " ".join(text.split())  # lines may break anywhere


# -- the sweep --------------------------------------------------------------------------------------------------------
def test_a_sweep_says_what_is_slow(monkeypatch, capsys):
    small = replace(cases.Case("gla", 1, 33, 2, 16), gate="trained", dtype="float32")
    monkeypatch.setattr(sweep, "BASES", (small,))
    groups = sweep.wanted(["gla"], ["forward", "backward"])
    rows = list(sweep.swept(groups, 60, Cpu(), 1e9, lambda *_: {"peer_ms": 1.0}))
    assert {row["pass"] for row in rows} == {"forward", "backward"}
    assert {"", "weak gates", "reset gates", "bthd", "off by 8 bytes"} <= {row["changed"] for row in rows}
    assert all(row["multiple"] > 0 for row in rows)
    assert rows[0]["beside_usual"] == 1 and rows[0]["of_peer"] == rows[0]["ours_ms"]
    assert "x of the floor" in sweep.line(rows[0]) and "x of fla" in sweep.line(rows[0])
    assert not list(sweep.swept(groups, -1, Cpu(), 1e9, None)) and "time is up" in capsys.readouterr().err


def test_the_worst_of_a_sweep(tmp_path):
    assert speed_table.worst_of_sweep(tmp_path / "card.json") == ""
    row = of_small_case("gla", "bfloat16") | {"changed": "bthd", "multiple": 3.0, "beside_usual": 1.5, "of_peer": None}
    slower = row | {"pass": "backward", "changed": "K=60, V=64", "multiple": 9.0, "of_peer": 0.5}
    run.write(tmp_path / "sweep" / "card.json", {}, [row, row | {"multiple": 2.0}, slower, row | {"multiple": None}])
    assert speed_table.worst_of_sweep(tmp_path / "card.json") == (
        "Of 3 calls with other sizes and gates (benchmarks/sweep.py) the slowest takes 3.0 times its floor, the "
        "slowest gradient 9.0 times, and the nearest to fla is 2.0 times as fast."
    )
    assert speed_table.where(row | {"changed": "another shape"}) == " 2, 70, 3, 16, 16"
    assert speed_table.slowest_of_sweep(tmp_path / "card.json") == [
        ["gla backward", "2, 70, 3, 16, 16", "K=60, V=64", "9.00", "1.50", "0.50"],
        ["gla", "2, 70, 3, 16, 16", "rows of [B, T, H, K]", "3.00", "1.50", ""],
    ]


def test_a_sweep_reaches_both_sides_of_every_tile():
    changed = dict(sweep.variations(sweep.BASES[0]))
    assert {"K=60, V=64", "K=128, V=136", "K=320, V=64", "model gates"} <= set(changed)
    assert changed["K=60, V=64"].columns == 64 and "60x64" in str(changed["K=60, V=64"])


def test_a_random_call_can_be_replayed():
    rng = np.random.default_rng(0)
    calls = [random_calls.draw_call(rng) for _ in range(300)]
    assert [random_calls.read(str(call)) for call in calls] == calls
    for field in ("op", "dtype", "gate", "layout", "memory", "groups", "reverse", "materialize", "mode", "backward"):
        assert len({getattr(call, field) for call in calls}) > 1, field


def test_random_calls_are_timed_and_checked(monkeypatch, capsys):
    monkeypatch.setattr(random_calls, "ELEMENTS", (1 << 6, 1 << 10))
    rng = np.random.default_rng(1)
    calls = [random_calls.draw_call(rng) for _ in range(12)]
    assert not sweep.random_sweep(calls, 60, Cpu(), 1e9, {}, None)
    assert "of max(floor, 10 us)" in capsys.readouterr().out
    monkeypatch.setattr(random_calls, "SPREAD", 0)  # nothing is as exact as that
    assert sweep.random_sweep(calls, 60, Cpu(), 1e9, {}, None) and "WRONG" in capsys.readouterr().out


# -- the cuts of sequences ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, nanoseconds", [("forward", 21.0), ("backward", 55.0)])
def test_the_constants_of_a_cost_are_found_again(name, nanoseconds):
    """From times that other constants make: then the least cost is the least time."""
    secret = [1.25 * getattr(fit_segments.segments, constant) for constant in fit_segments.FITTED[name]]
    with fit_segments.with_constants(name, secret):
        rows = [
            (case, P, nanoseconds * 1e-6 * fit_segments.cost(name, P, case, 132))
            for case in fit_segments.SHAPES
            for P in fit_segments.SEGMENTS
            if P <= case.T // 32
        ]
    found = fit_segments.fit(name, rows, 132)
    np.testing.assert_allclose(found, secret, rtol=1e-6)
    assert max(fit_segments.losses(name, found, rows, 132)) < 1 + 1e-9
    assert max(fit_segments.losses(name, np.zeros_like(secret), rows, 132)) > 1.1
