"""flash-linear-attention's own test files on `linattn_np.interop.fla`: a plugin of pytest.

    git clone https://github.com/fla-org/flash-linear-attention peer; cd peer/tests/ops
    PYTHONPATH=.../tests pytest -p peer_suite --noconftest test_{gla,rwkv6,simple_gla,retention,linear_attn}.py
    PYTHONPATH=.../tests pytest -p peer_suite --noconftest test_{delta,gdn,kda,rwkv7,dplr_delta}.py

It wants torch, Triton, einops and flash-linear-attention (fla). A test of a recurrent kernel compares it with literal
torch, and here compares ours with that; every other test compares a kernel with the recurrent one. On a card that stays
fla's. Without a card no kernel of fla's runs: the recurrent one is ours, token by token (mode "recurrent"), fla's
literal torch stays, and a test of another kernel, which is no operator, is skipped when it calls it. The end of the run
names the tests that called nothing of ours.
"""

import ast
import re
import sys
from functools import cache, partial
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
OPS = {  # by the folder of fla.ops: the end of its functions' names, and our operators
    "gla": ("gla", "gla"),
    "rwkv6": ("rwkv6", "rwkv6"),
    "simple_gla": ("simple_gla", "simple_gla"),
    "retention": ("retention", "retention"),
    "linear_attn": ("linear_attn", "linear_attention"),
    "delta_rule": ("delta_rule", "delta_rule"),
    "gated_delta_rule": ("gated_delta_rule", "gated_delta_rule kda delta_rule"),
    "kda": ("kda", "kda"),
    "rwkv7": ("rwkv7", "rwkv7"),
    "generalized_delta_rule/dplr": ("dplr_delta_rule", "rwkv7"),
}
WAYS = ("chunk", "fused_chunk", "parallel", "fused_recurrent", "fused_mul_recurrent")
LITERAL = re.compile("naive_|torch_|.*_ref$")  # fla's functions that are torch alone


def literal(name, operators, *arrays, **options):
    """Ours by that name, token by token."""
    from linattn_np.interop import fla

    with pytest.MonkeyPatch.context() as patch:
        for op in operators.split():
            patch.setattr(fla.operators, op, partial(getattr(fla.operators, op), mode="recurrent"))
        return ours(name)(*arrays, **options)


def put_in_the_place_of_kernels():
    """Modules without kernels under the names from which fla's tests import them; its literal torch stays."""
    fla = Path(find_spec("fla").submodule_search_locations[0])
    (version,) = re.findall(r'__version__ = "(.*)"', (fla / "__init__.py").read_text())
    root = fla / "ops"
    module("fla", fla).__version__ = version
    module("fla.ops", root)
    import_module("fla.utils").device = "cpu"
    module("fla.ops.utils", root / "utils")
    for folder, (end, operators) in OPS.items():
        functions = {
            name: partial(literal, name, operators) if "recurrent" in name else ours(name)
            for name in (f"{way}_{end}" for way in WAYS)
            if ours(name)
        }
        package, parent = "fla.ops." + folder.replace("/", "."), root / folder
        if "/" in folder:
            module(package.rpartition(".")[0], parent.parent)
        vars(module(package, parent)).update(functions)
        for file in parent.glob("*.py"):
            if file.stem not in ("__init__", "naive"):
                vars(module(f"{package}.{file.stem}", file)).update(functions)


def module(name, path):
    made = sys.modules[name] = WithoutKernels(name)
    made.__path__ = [str(path)]
    return made


class WithoutKernels(ModuleType):
    """A file of fla's, or a folder: its functions of torch alone, and in the place of every other one that skips."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        (path,) = self.__path__
        found = of_torch(Path(path)).get(name) if path.endswith(".py") else None
        return found or partial(skipped, name)


def skipped(name, *arguments, **named):
    pytest.skip(f"{name} is a kernel of fla's")


@cache
def of_torch(file) -> dict:
    """The functions of a file that are torch alone."""
    kept, libraries = [], ("torch", "einops", "math")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and LITERAL.match(node.name):
            node.decorator_list = []
            kept.append(node)
        named = node.names[0].name if isinstance(node, ast.Import) else getattr(node, "module", None)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and (named or "").split(".")[0] in (*libraries, "__future__"):
            kept.append(node)
    made = {}
    exec(compile(ast.Module(kept, []), str(file), "exec"), made)
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
