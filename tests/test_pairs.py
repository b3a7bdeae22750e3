"""What is left of a product has every value, of all pairs a part, and --exhaustive leaves all of it."""

import os
import subprocess
import sys
from itertools import combinations, product

import pairs
import pytest

AXES = {"op": "abcde", "mode": "rcs", "dtype": "dsh", "gate": range(7)}
CASES = [dict(zip(AXES, values)) for values in product(*AXES.values())]


@pytest.mark.parametrize("together", [1, 2, 3])
def test_every_combination_of_a_few_axes_is_there(together):
    kept = pairs.choose(CASES, dict.items, together)
    for axes in combinations(AXES, together):
        wanted = set(product(*(AXES[axis] for axis in axes)))
        assert {tuple(case[axis] for axis in axes) for case in kept} == wanted
    assert len(kept) < len(CASES) / 2 and kept == [case for case in CASES if case in kept]


def test_pairs_that_no_case_has_are_not_wanted():
    cases = [case for case in CASES if case["dtype"] != "d" or case["mode"] == "r"]
    assert all(case in cases for case in pairs.choose(cases, dict.items))


def test_a_single_axis_is_whole():
    assert pairs.choose(range(5), lambda case: [("joined", ()), ("only", case)]) == [*range(5)]


def test_a_part_has_every_value_and_parts_have_all():
    kept = pairs.choose(CASES, dict.items)
    parts = [pairs.part([*range(len(kept))], lambda n: kept[n].items(), 1 / 2, seed) for seed in range(20)]
    for part in parts:
        assert part == sorted(part) and len(part) == round(len(kept) / 2)
        assert all({kept[n][axis] for n in part} == set(values) for axis, values in AXES.items())
    assert set().union(*parts) == {*range(len(kept))}
    assert parts[3] == pairs.part([*range(len(kept))], lambda n: kept[n].items(), 1 / 2, 3) != parts[4]


def test_few_cases_with_all_values_are_a_part():
    assert pairs.part([*range(5)], lambda case: [("only", case)], 1 / 5, 0) == [*range(5)]


SUITE = """
import pytest
@pytest.mark.pairwise
@pytest.mark.parametrize("op", range(4))
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("c", range(4))
def test_marked(op, b, c): pass
@pytest.mark.pairwise("b", "dtype")
@pytest.mark.parametrize("a", range(2))
@pytest.mark.parametrize("b", range(2))
@pytest.mark.parametrize("dtype", range(2))
@pytest.mark.parametrize("d", range(2))
def test_joined(a, b, dtype, d): pass
@pytest.mark.pairwise(half="a")
@pytest.mark.parametrize("a", range(5))
@pytest.mark.parametrize("b", range(2))
def test_halved(a, b): pass
@pytest.mark.pairwise
@pytest.mark.parametrize("a", range(6))
def test_of_one_axis(a): pass
@pytest.mark.parametrize("a, b", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("c", range(4))
def test_other(a, b, c): pass
"""


@pytest.mark.parametrize(
    "arguments, marked, joined, halved, alone",
    [([], range(4, 6), range(4, 6), [1], [2]), (["--exhaustive"], [64], [16], [10], [6])],
)
def test_what_pytest_runs(tmp_path, arguments, marked, joined, halved, alone):
    (tmp_path / "test_product.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    tests = os.path.dirname(__file__)
    paths = os.pathsep.join([tests, os.path.dirname(tests), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "--backends=numpy", *arguments, str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    wanted = {"marked": marked, "joined": joined, "halved": halved, "of_one_axis": alone, "other": [16]}
    found = {name: done.stdout.count(f"::test_{name}[") for name in wanted}
    assert all(found[name] in wanted[name] for name in wanted), done.stdout
