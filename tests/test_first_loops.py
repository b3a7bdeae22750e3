"""A text begins on NumPy where Numba's loops are not on the disk, and goes on by them once another process is done."""

import sys
from types import SimpleNamespace

import pytest

from linattn_np import NotSupported
from linattn_np.command import terminal
from linattn_np.command.first_loops import LoopsMissing, begun_on_numpy, compiling

numba_cache = pytest.importorskip("linattn_np.numba_cache", reason="Numba is not installed")


def compile_a_loop():
    """What Numba does before it compiles: tells all who asked for it."""
    numba_cache.NoCache().load_overload(None, None)


def model_of_a_cold_cache(progress=None):
    """As `RWKV6`: layers that cannot have their loops are NumPy's."""
    try:
        compile_a_loop()
    except LoopsMissing:
        return SimpleNamespace(layers="NumPy's")
    return SimpleNamespace(layers="Numba's")


def model_of_a_warm_cache(progress=None):
    return SimpleNamespace(layers="Numba's")


def model_in_few_bits(progress=None):
    """Has no layers without loops."""
    try:
        compile_a_loop()
    except LoopsMissing as error:
        raise NotSupported("it needs Numba") from error
    return SimpleNamespace(layers="Numba's")


def quiet(line):
    pass


def test_a_text_begins_on_numpy_and_goes_on_by_loops():
    model, loops = begun_on_numpy(model_of_a_cold_cache, quiet, quiet)
    assert model.layers == "NumPy's"
    loops.wait()
    loops.process.join()
    loops.new_model = model_of_a_warm_cache  # as the process has left it
    loops.hasten(model)
    assert model.layers == "Numba's" and not numba_cache.COMPILING
    loops.wait()


def test_loops_that_cannot_be_kept_are_not_compiled_in_the_midst_of_a_text():
    model, loops = begun_on_numpy(model_of_a_cold_cache, quiet, quiet)
    loops.process.join()
    loops.hasten(model)
    assert model.layers == "NumPy's"


@pytest.mark.parametrize("made", [model_of_a_warm_cache, model_in_few_bits])
def test_other_models_begin_with_loops(made, capsys):
    model, loops = begun_on_numpy(made, quiet, quiet)
    assert model.layers == "Numba's" and loops is None
    assert ("compiling loops" in capsys.readouterr().err) == (made is model_in_few_bits)


def test_a_bar_moves_while_a_loop_is_compiled(monkeypatch):
    lines = []
    monkeypatch.setattr(terminal, "TICK", 0.001)
    with compiling(lines.append):
        compile_a_loop()
        while len(lines) < 4:  # the first one clears the line before
            pass
    assert all(line.startswith("compiling [") for line in lines[1:])


@pytest.mark.parametrize("watched", [True, False])
def test_a_call_says_once_that_it_compiles_where_somebody_may_watch(watched, monkeypatch, capsys):
    numba_cache.say_once.cache_clear()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: watched)
    with compiling(quiet):
        compile_a_loop()
    assert capsys.readouterr().err.startswith("compiling loops")  # the command's own line
    compile_a_loop()
    compile_a_loop()
    assert capsys.readouterr().err == f"linattn_np: {numba_cache.COMPILES}\n" * watched
    numba_cache.say_once.cache_clear()
