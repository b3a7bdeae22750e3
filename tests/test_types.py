"""Types and names of the public face: the signatures for type checkers are those of the functions."""

import inspect
import runpy
from pathlib import Path
from typing import get_args, is_typeddict

import pytest

import linattn_np
from linattn_np import typing
from linattn_np.declarations import STAGES, STEPS
from linattn_np.dispatch import ORDER
from linattn_np.layouts import LAYOUTS
from linattn_np.ops import OPS
from linattn_np.typing import DEFAULTS, Backend, Layout, Mode

ROOT = Path(__file__).parents[1]


def test_stubs_and_lists_are_those_of_the_declarations():
    """Where they are not: python docs/write_operators.py"""
    pytest.importorskip("ruff", reason="ruff, which formats the stubs, is not installed")
    for path, text in runpy.run_path(str(ROOT / "docs" / "write_operators.py"))["written"]().items():
        assert path.read_text() == text, path


def test_defaults_are_those_of_arguments():
    """A misspelled one would be the default of no argument."""
    classes = filter(is_typeddict, vars(typing).values())
    known = {name for options in classes for name in options.__annotations__} | {op.second_result for op in OPS}
    assert DEFAULTS.keys() <= known


@pytest.mark.parametrize("op", [*OPS, *STEPS, *STAGES], ids=lambda op: op.name)
def test_checks_have_the_defaults_of_signatures(op):
    """A public function passes all its arguments, an internal call may leave out some."""
    for owner in type(op).__mro__:
        if "check" in vars(owner):
            for name, argument in inspect.signature(owner.check).parameters.items():
                if name in DEFAULTS:
                    assert argument.default == DEFAULTS[name], f"{owner.__name__}.check: {name}"


def test_literals_are_the_words_that_are_taken():
    assert get_args(Layout) == LAYOUTS
    assert get_args(Backend) == ("auto", *ORDER)
    assert set(get_args(Mode)) == {"auto"} | {mode for op in OPS for mode in op.modes}


def test_dir_shows_the_public_names():
    shown = dir(linattn_np)
    assert {name for name in shown if not name.startswith("__")} == set(linattn_np.__all__)
    assert all(hasattr(linattn_np, name) for name in shown)
