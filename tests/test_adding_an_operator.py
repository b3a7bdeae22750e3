"""What a new member of the gated family costs, two files and a line, and a new delta rule, a file and a line; after
which every backend computes it."""

import difflib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import linattn_np

ROOT = Path(linattn_np.__file__).parents[1]

# GLA under another name.
PUBLIC = '''"""A recurrence of the tests' own."""

from ..declarations import DECAYED
from ..public_function import public_function


@public_function(DECAYED)
def decayed():
    """S_t = diag(exp f_t) S_{t-1} + k_t v_t^T,     o_t = scale q_t^T S_t"""
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
import planned

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 1, 2, 80, 16)).astype(np.float32)
f = -rng.random((1, 2, 80, 16)).astype(np.float32)
wanted, pull = vjp(gla, q, k, v, f)
found, mine = vjp(decayed, q, k, v, f)
assert decayed in linattn_np.OPS.values() and np.array_equal(found, wanted)
for mode in DECAYED.modes:
    np.testing.assert_allclose(decayed(q, k, v, f, mode=mode), wanted, rtol=1e-3, atol=1e-5)
assert all(map(np.array_equal, mine(v), pull(v)))
problem, device = DECAYED.bind((q, k, v, f), gradient=True), EmulatedDevice()
(o, _), saved = planned.run_and_save(problem, device)
np.testing.assert_allclose(o, wanted, rtol=1e-4, atol=1e-5)
gradients, _ = planned.pull(problem, device, v, None, saved)
for x, y in zip(gradients, pull(v), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)
print(json.dumps([kernel.name for kernel in cupy.plan_of(problem, device).kernels]))
"""


# HGRN2 with another key: the declaration alone says what k is.
ECHOED = (ROOT / "linattn_np/ops/hgrn2.py").read_text()
ECHOED = ECHOED.replace("HGRN2", "ECHOED").replace("hgrn2", "echoed")
ECHOED_FILES = {"ops/echoed.py": ECHOED}
ECHOED_LINES = {
    "declarations.py": (
        "OPERATORS = (",
        'ECHOED = gated(Op("echoed", QGV, gates=("g",), derived=KeyFromGate(GLA, np.exp, np.exp)))\n',
    ),
}
ECHOED_USE = """
import sys
from importlib.util import find_spec
import numpy as np
from linattn_np import distributed, gla, echoed, vjp

sys.path.append({tests!r})
from conftest import Emulated

rng = np.random.default_rng(0)
q, v = rng.standard_normal((2, 1, 2, 40, 16)).astype(np.float32)
f = -rng.random((1, 2, 40, 16)).astype(np.float32)
k = np.exp(f)
wanted, pull = vjp(gla, q, k, v, f)
dq, dk, dv, df = pull(v)
expected = dq, df + k * dk, dv

def check(on, modes):
    for mode in modes:
        o, mine = on(vjp, echoed, q, f, v, mode=mode)
        np.testing.assert_allclose(o, wanted, rtol=1e-3, atol=1e-4)
        for x, y in zip(mine(v), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)

def direct(function, *arrays, **options):
    return function(*arrays, **options)

check(direct, ("recurrent", "chunk", "staged", "parallel"))
parts = [slice(0, 17), slice(17, 40)]
rows = distributed.run_threads(
    lambda comm: distributed.echoed(*(x[:, :, parts[comm.rank]] for x in (q, f, v)), comm=comm), 2
)
np.testing.assert_allclose(np.concatenate(rows, axis=2), wanted, rtol=1e-3, atol=1e-4)

if find_spec("torch"):
    import torch
    from linattn_np.interop import torch as library

    tensors = [torch.tensor(x, requires_grad=True) for x in (q, f, v)]
    library.echoed(*tensors).backward(torch.tensor(v))
    for x, y in zip(tensors, expected, strict=True):
        np.testing.assert_allclose(x.grad, y, rtol=1e-3, atol=1e-3)

check(Emulated("emulated").run, ("chunk",))  # test_contract has HGRN2's other modes, and Hopper's
"""
ECHOED_SIMULATED = """
import numpy as np
from linattn_np import gla, echoed

rng = np.random.default_rng(0)
q, v = rng.standard_normal((2, 1, 1, 5, 4)).astype(np.float32)
f = -rng.random((1, 1, 5, 4)).astype(np.float32)
o = echoed(q, f, v, mode="recurrent", backend="numba")
np.testing.assert_allclose(o, gla(q, np.exp(f), v, f), rtol=1e-3, atol=1e-4)
"""


# KDA under another name: a delta rule's equation takes whatever gates are declared.
ERASED = (ROOT / "linattn_np/ops/kda.py").read_text().replace("KDA", "ERASED").replace("def kda", "def erased")
ERASED_LINES = {"declarations.py": ("RWKV7 = ", 'ERASED = delta_rule("erased", g="B H T K")\n')}
ERASED_USE = """
import numpy as np
from linattn_np import erased, kda, vjp
from linattn_np.backends import cupy, numba
from linattn_np.declarations import ERASED

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 1, 2, 40, 16)).astype(np.float32)
g, beta = -rng.random((1, 2, 40, 16)).astype(np.float32), rng.random((1, 2, 40)).astype(np.float32)
for mode in ERASED.modes:
    results = [vjp(op, q, k, v, g, beta, mode=mode, qk_l2norm=True) for op in (erased, kda)]
    (found, mine), (wanted, pull) = results
    assert np.array_equal(found, wanted) and all(map(np.array_equal, mine(v), pull(v)))
assert cupy.unsupported(ERASED.bind((q, k, v, g, beta), gradient=True)) is None
assert "on the host" in numba.why_not(ERASED.bind((q, k, v, g, beta)))
"""


def added_lines(old, new):
    return [line for line in difflib.ndiff(old.splitlines(), new.splitlines()) if line.startswith(("+ ", "- "))]


def added(package, files, lines):
    """The lines that adding an operator to a copy of the package changes in files that were there."""
    changed = []
    for path, text in files.items():
        assert not (package / path).exists()
        (package / path).write_text(text)
    for path, (before, line) in lines.items():
        old = (package / path).read_text()
        (package / path).write_text(old.replace(before, line + before, 1))
        changed += added_lines(old, (package / path).read_text())
    return changed


def copied(folder):
    for name in ("linattn_np", "kernels_cu"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "linattn_np"


def used(program, folder, **variables):
    """What a program prints that imports the copy."""
    program = program.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, env=os.environ | variables
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def linted(folder):
    shutil.copy(ROOT / "pyproject.toml", folder)
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "linattn_np"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_member_of_the_gated_family_costs_two_files_and_a_line(tmp_path):
    assert len(FILES) == 2 and len(added(copied(tmp_path), FILES, LINES)) == 1
    kernels = ["gated_backward_states", "gated_backward_channels", "gated_backward_values"]
    assert json.loads(used(USE, tmp_path)) == kernels


def test_a_delta_rule_costs_a_file_and_a_line(tmp_path):
    assert len(added(copied(tmp_path), {"ops/erased.py": ERASED}, ERASED_LINES)) == 1
    used(ERASED_USE, tmp_path)


def test_a_member_whose_key_is_a_function_of_its_gate_costs_a_file_and_a_line(tmp_path):
    assert len(ECHOED_FILES) == 1 and len(added(copied(tmp_path), ECHOED_FILES, ECHOED_LINES)) == 1
    ruff = linted(tmp_path)
    assert ruff.returncode == 0, ruff.stdout
    used(ECHOED_USE, tmp_path)
    used(ECHOED_SIMULATED, tmp_path, NUMBA_ENABLE_CUDASIM="1")
