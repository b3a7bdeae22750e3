"""Every public function says what it computes, and its example runs as printed."""

import doctest
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import linattn_np
from linattn_np import stages
from linattn_np.gates import of_library
from linattn_np.ops import OPS

PUBLIC = {name: x for name in linattn_np.__all__ if inspect.isfunction(x := getattr(linattn_np, name))}
PUBLIC |= {
    f"stages.{name}": getattr(stages, name)
    for name in ("chunk_cumsum", "gated_qk", "inter_chunk", "intra_chunk", "combine")
}


ROOT = Path(__file__).parents[1]
# A module of Numba's CUDA kernels cannot be imported without numba-cuda, and has no examples.
MODULES = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for path in (ROOT / "linattn_np").rglob("*.py")
    if "numba" not in path.parts
)

OPTIONAL = "numba", "llvmlite"
NEEDED = {
    f"linattn_np.interop.{module}": library
    for library, modules in (
        ("jax", ("jax", "jax_axis", "jax_partition")),
        ("torch", ("fla", "torch", "torch_calls")),
    )
    for module in modules
}


@pytest.mark.parametrize("gate", ["gdn_gate", "kda_gate", "rwkv7_gate"])
def test_a_gate_of_another_library_has_no_example_of_numpys(gate):
    """Python 3.13 takes the indentation of a docstring away."""
    numpys, other = inspect.getdoc(getattr(linattn_np, gate)), of_library(None)[gate].__doc__
    assert numpys.startswith(other) and ">>>" in numpys and ">>>" not in other and "Returns" in other


@pytest.mark.parametrize("module", MODULES)
def test_examples_run_as_printed(module, monkeypatch):
    if module in NEEDED:
        pytest.importorskip(NEEDED[module], reason=f"{NEEDED[module]} is not installed")
    monkeypatch.chdir(ROOT)
    try:
        examples = import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
    assert doctest.testmod(examples).failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_have_an_example(name):
    assert doctest.DocTestParser().get_examples(inspect.getdoc(PUBLIC[name]))


@pytest.mark.parametrize("function", OPS.values(), ids=[op.name for op in OPS])
def test_operators_give_equation_and_source(function):
    text = inspect.getdoc(function)
    assert "o_t = " in text, "no equation"
    assert re.search(r"\(\w+[^()]*, 20\d\d, ", text), "no paper with its year"
    for argument in inspect.signature(function).parameters:
        shared = "those of `gla`" in text
        assert argument in text or shared, f"{argument} is not explained"


def test_all_is_what_there_is():
    for name in linattn_np.__all__:
        assert hasattr(linattn_np, name)
    assert sorted(set(linattn_np.__all__)) == sorted(linattn_np.__all__)
    assert {function.__name__ for function in OPS.values()} <= set(linattn_np.__all__)
