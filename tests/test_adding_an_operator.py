"""What a new member of the gated family costs: two files and two lines, after which every backend computes it."""

import difflib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import linattn_np

ROOT = Path(linattn_np.__file__).parents[1]

# GLA under another name.
PUBLIC = '''"""A recurrence of the tests' own."""

from ..declarations import DECAYED
from ..dispatch import call


def decayed(q, k, v, f, *, backend="auto", **arguments):
    """S_t = diag(exp f_t) S_{t-1} + k_t v_t^T,     o_t = scale q_t^T S_t"""
    return call(DECAYED, (q, k, v, f), backend=backend, **arguments)
'''
EQUATION = '''"""S_t = diag(exp f_t) S_{t-1} + k_t v_t^T,     o_t = scale q_t^T S_t"""

from .gla import member, step, step_vjp  # noqa: F401
'''
FILES = {"ops/decayed.py": PUBLIC, "backends/numpy/decayed.py": EQUATION}
LINES = {
    "declarations.py": (
        "OPERATORS = (",
        'DECAYED = gated(Op("decayed", QKV | {"f": "B H T K"}, gates=("f",)))\n',
    ),
    "__init__.py": ("__version__", "from .ops.decayed import decayed\n"),
}
USE = """
import json, sys
import numpy as np
import linattn_np
from linattn_np import decayed, gla, vjp
from linattn_np.backends import cupy
from linattn_np.declarations import DECAYED

sys.path.append({tests!r})
from emulator import EmulatedDevice
from linattn_np.backends.cupy import execute

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 1, 2, 40, 16)).astype(np.float32)
f = -rng.random((1, 2, 40, 16)).astype(np.float32)
wanted, pull = vjp(gla, q, k, v, f)
found, mine = vjp(decayed, q, k, v, f)
assert decayed in linattn_np.OPS.values() and np.array_equal(found, wanted)
for mode in DECAYED.modes:
    np.testing.assert_allclose(decayed(q, k, v, f, mode=mode), wanted, rtol=1e-3, atol=1e-5)
assert all(map(np.array_equal, mine(v), pull(v)))
problem, device = DECAYED.bind((q, k, v, f), gradient=True), EmulatedDevice()
(o, _), saved = execute.run(cupy.PLANNERS[DECAYED], problem, device)
np.testing.assert_allclose(o, wanted, rtol=1e-4, atol=1e-5)
gradients, _ = execute.pull(cupy.PLANNERS[DECAYED], problem, device, v, None, saved)
for x, y in zip(gradients, pull(v), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)
print(json.dumps([kernel.name for kernel in cupy.plan_of(problem, device).kernels]))
"""


def added_lines(old, new):
    return [line for line in difflib.ndiff(old.splitlines(), new.splitlines()) if line.startswith(("+ ", "- "))]


def test_a_member_of_the_gated_family_costs_two_files_and_two_lines(tmp_path):
    for name in ("linattn_np", "kernels_cu"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    package, changed = tmp_path / "linattn_np", []
    for path, text in FILES.items():
        assert not (package / path).exists()
        (package / path).write_text(text)
    for path, (before, line) in LINES.items():
        old = (package / path).read_text()
        (package / path).write_text(old.replace(before, line + before, 1))
        changed += added_lines(old, (package / path).read_text())
    assert len(FILES) == 2 and len(changed) == 2
    program = USE.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env=None)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["gated_backward_states", "gated_backward_channels", "gated_backward_values"]
