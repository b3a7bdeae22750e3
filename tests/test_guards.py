"""guards.py chooses a file's tests, and mutations.py finds places to change: neither may come to find nothing."""

import subprocess
import sys

import guards
import mutations
from conftest import PATIENCE


def test_a_kernel_has_cases_that_launch_and_judge_it():
    command = [sys.executable, guards.TESTS / "guards.py", "float64/inter_chunk", "--collect-only", "--seed=1"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    assert "test_stages.py::" in found and guards.STATIC[0] in found


def test_headers_and_planners_have_kernels():
    assert "delta/prepare" in guards.guarded(guards.KERNELS / "delta" / "chunk.cuh")
    assert "delta/scan" in guards.guarded(guards.ROOT / "linattn_np" / "backends" / "cupy" / "delta_segments.py")


def test_every_kind_of_change_has_places():
    files = [path for family in mutations.families(guards.ROOT).values() for path in family]
    assert {what for path in files for what in mutations.sites(path)} == {*mutations.DEVICE, *mutations.PLANNER}
