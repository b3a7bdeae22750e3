"""Every public function says what it computes, and its example runs as printed."""

import doctest
import inspect
import re

import pytest

import linattn_np
from linattn_np import stages
from linattn_np.ops import OPS

PUBLIC = {name: x for name in linattn_np.__all__ if inspect.isfunction(x := getattr(linattn_np, name))}
PUBLIC |= {f"stages.{name}": getattr(stages, name) for name in
           ("chunk_cumsum", "gated_qk", "inter_chunk", "intra_chunk", "combine")}


@pytest.mark.parametrize("name", PUBLIC)
def test_example_runs_as_printed(name):
    (found,) = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, globs={})
    assert found.examples, "no example"
    output = []
    result = doctest.DocTestRunner(verbose=False).run(found, out=output.append)
    assert not result.failed, "".join(output)


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
