"""Types and names of the public face: the signatures for type checkers are those of the functions."""

import inspect
from typing import get_args, get_overloads, get_type_hints

import pytest

import linattn_np
from linattn_np import softmax_attention
from linattn_np.dispatch import ORDER
from linattn_np.layouts import LAYOUTS
from linattn_np.ops import OPS
from linattn_np.typing import Backend, Layout, Mode

OVERLOADED = [function for function in OPS.values() if get_overloads(function)]


def test_operators_with_two_results_are_overloaded():
    assert OVERLOADED == [function for op, function in OPS.items() if op.state or function is softmax_attention]


@pytest.mark.parametrize("function", OVERLOADED, ids=lambda function: function.__name__)
def test_overloads_take_what_the_function_takes(function):
    wanted = inspect.signature(function).parameters
    for overload in get_overloads(function):
        parameters = inspect.signature(overload).parameters
        *named, options = parameters
        assert parameters[options].kind is inspect.Parameter.VAR_KEYWORD
        (options,) = get_args(get_type_hints(overload)[options])
        assert {*named, *options.__optional_keys__} == set(wanted)
        positional = [name for name in wanted if wanted[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert named[: len(positional)] == positional and not options.__required_keys__


def test_literals_are_the_words_that_are_taken():
    assert get_args(Layout) == LAYOUTS
    assert get_args(Backend) == ("auto", *ORDER)
    assert set(get_args(Mode)) == {"auto"} | {mode for op in OPS for mode in op.modes}


def test_dir_shows_the_public_names():
    shown = dir(linattn_np)
    assert {name for name in shown if not name.startswith("__")} == set(linattn_np.__all__)
    assert all(hasattr(linattn_np, name) for name in shown)
