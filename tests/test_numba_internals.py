"""The Numba kernels that the plans launch compile without a GPU, and the backend says why it cannot run."""

import dataclasses
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from linattn_np import declarations
from linattn_np.backends import numba as backend_package
from linattn_np.contract import SUB_CHUNK
from linattn_np.declarations import GLA, GLA_STEP, RWKV6, RWKV6_STEP, SIMPLE_GLA

SIMULATOR = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
CHUNK = 2 * SUB_CHUNK
SHARED = 48 * 1024  # bytes of shared memory a block has without asking

needs_numba = pytest.mark.skipif(find_spec("numba_cuda") is None, reason="numba-cuda is not installed")
needs_compiler = pytest.mark.skipif(SIMULATOR, reason="Numba's simulator compiles nothing")

SIZES = {"B": 1, "H": 2, "T": 40, "K": 60, "V": 20, "C": CHUNK, "NC": 2}
DTYPES = {"float32": np.float32, "float16": np.float16, "float64": np.float64}


def bound(op, dtype=np.float32, strided=False, **arguments):
    """A problem of arrays of the sizes above; `strided` ones are in the order of Fortran."""

    def array(name, axes):
        single = np.float64 if dtype == np.float64 else np.float32
        shape = [SIZES[axis] for axis in axes.split()]
        made = np.zeros(shape[::-1] if strided else shape, single if name in op.computed else dtype)
        return made.T if strided else made

    if op in declarations.STAGES:
        arguments["chunk_size"] = CHUNK
    problem = op.bind([array(name, axes) for name, axes in op.arrays.items()], **arguments)
    if op is declarations.GATED_QK:
        problem = problem.replace(options={**problem.options, "exclusive": True})
    return problem


def step(op, dtype=np.float32, strided=False):
    return bound(op, dtype, strided, state=np.zeros([SIZES[axis] for axis in "BHKV"], dtype))


CALLS = {
    **{
        f"{op.name}-{mode}": lambda op=op, mode=mode, **kw: bound(op, mode=mode, **kw)
        for op in (GLA, RWKV6)
        for mode in ("staged", "recurrent")
    },
    **{f"{op.name}-recurrent": lambda op=op, **kw: bound(op, **kw) for op in (declarations.KDA, declarations.RWKV7)},
    **{
        op.name: lambda op=op, **kw: step(op, **kw) for op in (GLA_STEP, RWKV6_STEP, declarations.GATED_DELTA_RULE_STEP)
    },
    **{f"{op.name}-{'u' in op.arrays}": lambda op=op, **kw: bound(op, **kw) for op in declarations.STAGES},
}


@pytest.fixture(scope="module")
def compiled():
    """PTX by kernel, argument types and capability."""
    return {}


def ptx_of_launches(monkeypatch, compiled, problem, capability):
    """(kernel's name, PTX) of every launch of a host plan, which is run without any kernel being launched."""
    from numba import cuda

    from linattn_np.backends.numba import plans

    found = []

    def compile_only(kernel, blocks, *arguments):
        assert 0 < blocks < 2**31
        types = tuple(kernel.typeof_pyval(x) for x in arguments)
        key = kernel.py_func, types, capability
        if key not in compiled:
            compiled[key], _ = cuda.compile(kernel.py_func, types, device=False, abi="numba", cc=capability)
        found.append((kernel.py_func.__name__, compiled[key]))

    monkeypatch.setattr(plans, "launch", compile_only)
    backend_package.run(problem)
    return found


@pytest.mark.pairwise(half="call")
@needs_numba
@needs_compiler
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids="sm_{0[0]}{0[1]}".format)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS)
def test_what_is_launched_compiles(monkeypatch, compiled, call, dtype, capability):
    problem = CALLS[call](dtype=DTYPES[dtype], strided="recurrent" in call)
    launched = ptx_of_launches(monkeypatch, compiled, problem, capability)
    assert {name for name, _ in launched} == set(backend_package.describe(problem, 0)["kernels"])
    for name, ptx in launched:
        assert f".target sm_{capability[0]}{capability[1]}" in ptx
        assert sum(map(int, re.findall(r"\.shared [^;]*\[(\d+)\]", ptx))) <= SHARED, name
        assert "__local_depot" not in ptx, f"{name} keeps in local memory what should be in registers"
        assert dtype == "float64" or ".f64" not in ptx, f"{name} computes in float64"


@pytest.mark.pairwise(half="channels")
@needs_numba
@needs_compiler
@pytest.mark.parametrize("channels, op", [*((n, RWKV6) for n in (16, 32, 64, 128, 256)), (256, declarations.RWKV7)])
def test_every_recurrence_fits(monkeypatch, compiled, channels, op):
    monkeypatch.setitem(SIZES, "K", channels)
    ((_, ptx),) = ptx_of_launches(monkeypatch, compiled, bound(op, np.float64, mode="recurrent"), (9, 0))
    assert sum(map(int, re.findall(r"\.shared [^;]*\[(\d+)\]", ptx))) <= SHARED
    assert "__local_depot" not in ptx


@needs_numba
@pytest.mark.parametrize("has_row_stack", [True, False])
def test_row_stack_is_lent_only_while_importing(has_row_stack):
    """numba-cuda needs np.row_stack, which NumPy 2.5 dropped; nobody else gets to see the loan."""
    change = "np.row_stack = np.vstack" if has_row_stack else "vars(np).pop('row_stack', None)"
    code = f"""
import numpy as np
import numba.core
{change}
before = "row_stack" in vars(np)
import linattn_np.backends.numba.runtime
assert ("row_stack" in vars(np)) == before == {has_row_stack}
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


# -- reasons -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "problem, reason",
    [
        (lambda: bound(GLA, mode="chunk"), "it has modes 'staged' and 'recurrent', not 'chunk'"),
        (lambda: bound(GLA, mode="parallel"), "it has modes 'staged' and 'recurrent', not 'parallel'"),
        (lambda: bound(GLA, gradient=True), "it has no gradients"),
        (lambda: bound(GLA, materialize=False), "materialize=False asks for a fused kernel"),
        (
            lambda: bound(SIMPLE_GLA),
            "it has the gated family, the delta rules, their steps of one token and the five stages only",
        ),
    ],
)
def test_reasons(problem, reason):
    assert reason in backend_package.why_not(problem())


def test_longest_key(monkeypatch):
    monkeypatch.setitem(SIZES, "K", 257)
    for problem in (bound(GLA, mode="recurrent"), step(GLA_STEP)):
        assert (
            backend_package.why_not(problem) == "K=257 is more than the 256 channels its recurrence keeps in registers"
        )


@needs_numba
@pytest.mark.parametrize(
    "setting, home, reason",
    [
        ("0", "host", "the arrays are on the host"),
        ("0", "cuda:0", None),
        ("1", "host", None),
        ("1", "cuda:0", "Numba's simulator is on (NUMBA_ENABLE_CUDASIM), and it takes host arrays only"),
    ],
)
def test_home(monkeypatch, setting, home, reason):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", setting)
    assert backend_package.why_not(dataclasses.replace(bound(GLA), home=home)) == reason


def test_missing_numba(monkeypatch):
    monkeypatch.setattr(backend_package, "find_spec", lambda name: None)
    assert backend_package.why_not(bound(GLA)) == "numba-cuda is not installed"
