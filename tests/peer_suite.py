"""flash-linear-attention's own test files on `linattn_np.interop.fla`: a plugin of pytest.

    git clone https://github.com/fla-org/flash-linear-attention peer; cd peer/tests/ops
    PYTHONPATH=.../tests pytest -p peer_suite --noconftest test_{gla,rwkv6,simple_gla,retention,linear_attn}.py

It wants torch and flash-linear-attention (fla). A test of a recurrent kernel compares it with literal torch, and here
compares ours with that; every other test compares a kernel with the recurrent one. On a card that stays fla's. Without
a card no kernel of fla's runs, nor is Triton imported: the recurrent one is ours, token by token (mode "recurrent").
The end of the run names the tests that called nothing of ours.
"""

import re
import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

CALLS = pytest.StashKey[int]()


def ours(name):
    """What stands for a function of fla's, or None."""
    from linattn_np.interop import fla

    return getattr(fla, name, None) if name.startswith(("fused_", "chunk_", "parallel_")) else None


# -- without a card --------------------------------------------------------------------------------------------------
OPS = {
    "gla": "gla",
    "rwkv6": "rwkv6",
    "simple_gla": "simple_gla",
    "retention": "retention",
    "linear_attn": "linear_attention",
}


def literal(name, op, *arrays, **options):
    """Ours by that name, token by token."""
    from linattn_np.interop import fla

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fla.operators, OPS[op], partial(getattr(fla.operators, OPS[op]), mode="recurrent"))
        return ours(name)(*arrays, **options)


def put_in_the_place_of_kernels():
    """Modules without kernels under the names from which fla's tests import them; its literal torch stays."""
    fla = Path(find_spec("fla").submodule_search_locations[0])
    (version,) = re.findall(r'__version__ = "(.*)"', (fla / "__init__.py").read_text())
    root = fla / "ops"
    module("fla", fla).__version__ = version
    module("fla.ops", root)
    import_module("fla.utils").device = "cpu"
    for op in OPS:
        names = {f"{way}_{op}" for way in ("chunk", "fused_chunk", "parallel") if ours(f"{way}_{op}")}
        functions = {name: ours(name) for name in names} | {
            f"fused_recurrent_{op}": partial(literal, f"fused_recurrent_{op}", op)
        }
        vars(module(f"fla.ops.{op}", root / op)).update(functions)
        for way in ("chunk", "fused_chunk", "fused_recurrent", "parallel"):
            vars(module(f"fla.ops.{op}.{way}", root / op / way)).update(functions)


def module(name, folder):
    made = sys.modules[name] = ModuleType(name)
    made.__path__ = [str(folder)]
    return made


def pytest_configure():
    import torch

    if not torch.cuda.is_available():
        put_in_the_place_of_kernels()


# -- the plugin -------------------------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def replaced(request, monkeypatch):
    """fla's functions in a test's module and among its parameters replaced by ours, but for its reference."""
    recurrent = request.function.__name__.startswith("test_fused_recurrent")
    for name in vars(request.module).copy():
        if ours(name) and (recurrent or not name.startswith("fused_recurrent_")):
            monkeypatch.setattr(request.module, name, counting(request.node, name))
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "fn" in parameters:
        monkeypatch.setitem(parameters, "fn", counting(request.node, parameters["fn"].__name__))


def counting(item, name):
    def call(*arrays, **options):
        item.stash[CALLS] = item.stash.get(CALLS, 0) + 1
        return ours(name)(*arrays, **options)

    return call


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    finally:
        item.user_properties.append(("calls of linattn_np", item.stash.get(CALLS, 0)))


def pytest_terminal_summary(terminalreporter):
    idle = [
        report.nodeid
        for report in terminalreporter.getreports("passed")
        if report.when == "call" and not dict(report.user_properties)["calls of linattn_np"]
    ]
    terminalreporter.section(f"{len(idle)} passed without a call of linattn_np")
    for name in idle:
        terminalreporter.write_line(name)
