"""Every wrong argument raises the right class, says operator, argument, wanted and got, and nothing is written."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import SIMULATOR, Numpy
from reference import assert_close, draw, guarded, same_bits
from wrong_calls import DECLARED, SIZES, B, H, K, T, V, assert_refused, good_call, read_only, zeros

import linattn_np
from linattn_np import (
    ContractError,
    ContractTypeError,
    NotSupported,
    accepted_arrays,
    explain,
    gla,
    gla_step,
    linear_attention,
    retention,
    rwkv6,
    simple_gla,
    softmax_attention,
    vjp,
)
from linattn_np.array_kinds import BFLOAT16
from linattn_np.declarations import GLA_STEP
from linattn_np.ops import OPS

# what is wrong: (operator, changes to a call that is right, class, pieces of the message)
WRONG_CALLS = {
    # shapes and ranks
    "rank": (gla, {"k": zeros(B, T, K)}, ContractError, ["k has 3 axes", "(2, 7, 4)", "[B, H, T, K]"]),
    "rank-bthd": (gla, {"k": zeros(B, T, K), "layout": "bthd"}, ContractError, ["k has 3 axes", "[B, T, H, K]"]),
    "scalar": (
        gla,
        {"q": np.float32(1) * zeros(1)[0]},
        ContractTypeError,
        ["q is a numpy.float32", "expected an array"],
    ),
    "T": (gla, {"v": zeros(B, H, 3, V)}, ContractError, ["v has T=3", "T=7 elsewhere", "(2, 3, 3, 5)", "[B, H, T, V]"]),
    "B": (gla, {"k": zeros(1, H, T, K)}, ContractError, ["k has B=1", "B=2 elsewhere"]),
    "H": (gla, {"g": zeros(B, 1, T, K)}, ContractError, ["g has H=1", "H=3 elsewhere"]),
    "K": (rwkv6, {"k": zeros(B, H, T, 9)}, ContractError, ["k has K=9", "K=4 elsewhere"]),
    "K-of-u": (rwkv6, {"u": zeros(H, 9)}, ContractError, ["u has K=9", "[H, K]"]),
    "axes-of-u": (rwkv6, {"u": zeros(K)}, ContractError, ["u has 1 axes", "(4,)", "[H, K]"]),
    "axes-of-g": (simple_gla, {"g": zeros(B, H, T, K)}, ContractError, ["g has 4 axes", "[B, H, T]"]),
    "no-channels": (gla, {name: zeros(B, H, T, 0) for name in "qkg"}, ContractError, ["q has K=0", "at least 1"]),
    "no-values": (gla, {"v": zeros(B, H, T, 0)}, ContractError, ["v has V=0", "at least 1"]),
    "layout-swapped": (gla, {"layout": "bthd", "v": zeros(B, T, H, V)}, ContractError, ["v has ", "[B, T, H, V]"]),
    # dtypes and kinds
    "integers": (
        gla,
        {"q": zeros(B, H, T, K, dtype=np.int32)},
        ContractTypeError,
        ["q has dtype int32", "float64", "bfloat16: q.astype('float32') is one"],
    ),
    "complex": (gla, {"v": zeros(B, H, T, V, dtype=np.complex64)}, ContractTypeError, ["v has dtype complex64"]),
    "long-double": (gla, {"v": zeros(B, H, T, V, dtype=np.longdouble)}, ContractTypeError, ["v has dtype"]),
    "mixed-dtypes": (
        gla,
        {"k": zeros(B, H, T, K, dtype=np.float64)},
        ContractTypeError,
        ["k has dtype float64", "expected float32: k.astype('float32') is one"],
    ),
    "half-k": (gla, {"k": zeros(B, H, T, K, dtype=BFLOAT16)}, ContractTypeError, ["k has dtype bfloat16", "float32"]),
    "half-gate": (
        gla,
        {"g": zeros(B, H, T, K, dtype=np.float16)},
        ContractTypeError,
        ["g has dtype float16", "float32"],
    ),
    "double-gate": (gla, {"g": zeros(B, H, T, K, dtype=np.float64)}, ContractTypeError, ["g has dtype float64"]),
    "list": (
        gla,
        {"q": zeros(B, H, T, K).tolist()},
        ContractTypeError,
        ["q is a builtins.list", "expected an array: np.asarray(q) is one"],
    ),
    "none": (gla, {"v": None}, ContractTypeError, ["v is a builtins.NoneType"]),
    # the way it is computed
    "layout": (gla, {"layout": "btdh"}, ContractError, ["layout is 'btdh'", "'bhtd'", "'bthd'"]),
    "mode": (gla, {"mode": "fast"}, ContractError, ["mode is 'fast'", "'recurrent'", "'staged'"]),
    "mode-of-softmax": (softmax_attention, {"mode": "recurrent"}, ContractError, ["mode is 'recurrent'", "'chunk'"]),
    "backend": (gla, {"backend": "torch"}, ContractError, ["backend is 'torch'", "'numpy'", "'cupy'", "'numba'"]),
    "chunk_size-zero": (gla, {"chunk_size": 0}, ContractError, ["chunk_size is 0", "multiple of 16"]),
    "chunk_size-odd": (gla, {"chunk_size": 40}, ContractError, ["chunk_size is 40", "multiple of 16"]),
    "chunk_size-negative": (gla, {"chunk_size": -64}, ContractError, ["chunk_size is -64"]),
    "chunk_size-float": (gla, {"chunk_size": 64.0}, ContractError, ["chunk_size is 64.0", "multiple of 16"]),
    "chunk_size-huge": (
        gla,
        {"chunk_size": 16 * 10**5000},
        ContractError,
        ["chunk_size is a builtins.int", "multiple of 16"],
    ),
    "chunk_size-bool": (gla, {"chunk_size": True}, ContractError, ["chunk_size is True"]),
    "chunk_size-recurrent": (
        gla,
        {"chunk_size": 64, "mode": "recurrent"},
        ContractError,
        ["chunk_size", "'recurrent'"],
    ),
    "materialize": (gla, {"materialize": "yes"}, ContractError, ["materialize is 'yes'", "True, False or None"]),
    "materialize-recurrent": (
        gla,
        {"materialize": True, "mode": "recurrent"},
        ContractError,
        ["materialize", "'recurrent'"],
    ),
    "materialize-staged": (
        gla,
        {"materialize": False, "mode": "staged"},
        ContractError,
        ["materialize is False", "'staged'"],
    ),
    "scale-text": (gla, {"scale": "1"}, ContractTypeError, ["scale is '1'", "finite number"]),
    "scale-nan": (gla, {"scale": float("nan")}, ContractError, ["scale is nan", "finite number"]),
    "scale-inf": (gla, {"scale": float("inf")}, ContractError, ["scale is inf", "finite number"]),
    "scale-huge": (gla, {"scale": 10**400}, ContractError, ["scale is 1000", "finite number in float32"]),
    "scale-digits": (
        gla,
        {"scale": -(10**5000)},
        ContractError,
        ["scale is a builtins.int", "finite number in float32"],
    ),
    "scale-double": (gla, {"scale": 1e300}, ContractError, ["scale is 1e+300", "finite number in float32"]),
    "scale-half": (gla, {"scale": np.float64(4e38)}, ContractError, ["scale is", "finite number in float32"]),
    "scale-array": (gla, {"scale": zeros(1)}, ContractTypeError, ["scale is", "finite number"]),
    "scale-bool": (gla, {"scale": True}, ContractTypeError, ["scale is True"]),
    # booleans are booleans
    "reverse-text": (gla, {"reverse": "False"}, ContractTypeError, ["reverse is 'False'", "True or False"]),
    "reverse-number": (gla, {"reverse": 1}, ContractTypeError, ["reverse is 1", "True or False"]),
    "reverse-none": (gla, {"reverse": None}, ContractTypeError, ["reverse is None", "True or False"]),
    "output_final_state": (gla, {"output_final_state": "no"}, ContractTypeError, ["output_final_state is 'no'"]),
    "state_v_first": (gla, {"state_v_first": zeros(2)}, ContractTypeError, ["state_v_first is a numpy.ndarray (2,)"]),
    "state_v_first-state": (
        gla,
        {"state_v_first": zeros(2), "initial_state": zeros(B, H, K, V)},
        ContractTypeError,
        ["state_v_first is a numpy.ndarray (2,)"],
    ),
    "normalize": (linear_attention, {"normalize": "no"}, ContractTypeError, ["normalize is 'no'", "True or False"]),
    "causal": (softmax_attention, {"causal": 0}, ContractTypeError, ["causal is 0", "True or False"]),
    "materialize-number": (gla, {"materialize": 0}, ContractError, ["materialize is 0", "True, False or None"]),
    # states
    "state-shape": (
        gla,
        {"initial_state": zeros(B, H, V, K)},
        ContractError,
        ["initial_state is (2, 3, 5, 4)", "[N, H, K, V]", "(2, 3, 4, 5)"],
    ),
    "state-count": (
        gla,
        {"initial_state": zeros(3, H, K, V)},
        ContractError,
        ["initial_state is (3, 3, 4, 5)", "(2, 3, 4, 5)"],
    ),
    "state-dtype": (
        gla,
        {"initial_state": zeros(B, H, K, V, dtype=np.int64)},
        ContractTypeError,
        ["initial_state has dtype int64"],
    ),
    "state-list": (gla, {"initial_state": [1.0]}, ContractTypeError, ["initial_state is a builtins.list"]),
    "state-of-two": (
        gla,
        {"initial_state": (zeros(B, H, K, V), zeros(B, H, K))},
        ContractTypeError,
        ["initial_state has 2 parts", "expected 1"],
    ),
    "state-without-normaliser": (
        linear_attention,
        {"normalize": True, "initial_state": zeros(B, H, K, V)},
        ContractTypeError,
        ["initial_state has 1 parts", "expected 2"],
    ),
    "state-normaliser-shape": (
        linear_attention,
        {"normalize": True, "initial_state": (zeros(B, H, K, V), zeros(B, H, V))},
        ContractError,
        ["initial_state is (2, 3, 5)", "[N, H, K]"],
    ),
    "state_dtype": (gla, {"state_dtype": np.int32}, ContractTypeError, ["state_dtype is int32", "float32"]),
    "state_dtype-text": (gla, {"state_dtype": "no such"}, ContractTypeError, ["state_dtype is 'no such'"]),
    # options of single operators
    "gamma-shape": (retention, {"gamma": [0.5, 0.5]}, ContractError, ["gamma is (2,)", "[H] = (3,)"]),
    "gamma-above": (retention, {"gamma": 1.5}, ContractError, ["gamma is 1.5", "between 0 and 1"]),
    "gamma-log": (retention, {"gamma": [-0.1] * H}, ContractError, ["gamma is", "between 0 and 1"]),
    "gamma-nan": (retention, {"gamma": float("nan")}, ContractError, ["gamma is nan", "between 0 and 1"]),
    "gamma-text": (retention, {"gamma": "0.5"}, ContractTypeError, ["gamma is a builtins.str"]),
    "gamma-words": (retention, {"gamma": ["half"] * H}, ContractTypeError, ["gamma is", "host numbers"]),
    "gamma-long": (retention, {"gamma": [2.0] * 10**5}, ContractError, ["gamma is (100000,)"]),
    "gamma-huge": (retention, {"gamma": [10**400] * H}, ContractTypeError, ["gamma is [1000", "host numbers"]),
    "gamma-masked": (
        retention,
        {"gamma": np.ma.masked_array([0.5] * H, [True, False, False])},
        ContractTypeError,
        ["gamma is a numpy.ma.MaskedArray (3,)", "host numbers"],
    ),
    "feature_map-array": (
        linear_attention,
        {"feature_map": zeros(2)},
        ContractError,
        ["feature_map is a numpy.ndarray (2,)"],
    ),
    "feature_map": (
        linear_attention,
        {"feature_map": "gelu"},
        ContractError,
        ["feature_map is 'gelu'", "'elu'", "'exp'"],
    ),
    "feature_map-function": (linear_attention, {"feature_map": np.exp}, ContractError, ["feature_map is", "'elu'"]),
}
WRONG_BOUNDS = {  # cu_seqlens, and what the message says beside its name
    "short": ([0, T - 1], ["from 0 to T=7", "0 to 6"]),
    "long": ([0, T + 1], ["from 0 to T=7", "0 to 8"]),
    "late": ([1, T], ["from 0 to T=7", "1 to 7"]),
    "decreasing": ([0, 5, 3, T], ["must not decrease", "5 then 3", "index 2"]),
    "wrapping": ([0, 2**63 - 1, -2, 2, T], ["between 0 and T=7", "9223372036854775807 at index 1"]),
    "negative": ([0, -3, T], ["between 0 and T=7", "-3 at index 1"]),
    "beyond": ([0, 9, T], ["between 0 and T=7", "9 at index 1"]),
    "unsigned": (np.array([0, 2**64 - 2, T], np.uint64), ["between 0 and T=7", "18446744073709551614 at index 1"]),
    "digits": ([0, 10**30, T], ["integers", "got [0, 1000"]),
    "masked": (np.ma.masked_array([0, 3, T], [False, True, False]), ["plain array", "numpy.ma.MaskedArray (3,)"]),
    "floats": ([0.0, 7.0], ["integers", "float64"]),
    "bools": ([False, True], ["integers", "bool"]),
    "scalar": (np.array(T), ["1-d", "()"]),
    "matrix": ([[0, T]], ["1-d", "(1, 2)"]),
    "ragged": ([[0], [1, 2]], ["integers"]),
    "one": ([0], ["at least 2", "(1,)"]),
    "empty": ([], ["at least 2", "(0,)"]),
    "range": (range(0, 8, 7), ["host integers", "builtins.range"]),
    "text": ("07", ["host integers", "builtins.str"]),
}


@pytest.fixture
def numpy_host():
    return Numpy("numpy")


@pytest.mark.parametrize("wrong", WRONG_CALLS)
def test_wrong_argument(wrong, numpy_host):
    function, changes, error, pieces = WRONG_CALLS[wrong]
    out = guarded(numpy_host, (B, H, T, V) if changes.get("layout") != "bthd" else (B, T, H, V), np.float32)
    given = good_call(function)
    if changes.get("layout") == "bthd":
        given = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in given.items()}
        if "rank" not in wrong:
            changes = {**changes, "v": zeros(B, H, T, V)}
    state = given | changes
    assert_refused(
        numpy_host,
        lambda: function(**{**given, **changes, "out": out.view}),
        error,
        DECLARED[function].name,
        pieces,
        out=out,
        unchanged=[x for x in state.values() if isinstance(x, np.ndarray)],
    )


@pytest.mark.parametrize("wrong", WRONG_BOUNDS)
@pytest.mark.parametrize("function", OPS.values(), ids=[op.name for op in OPS])
def test_wrong_cu_seqlens(function, wrong, numpy_host):
    bounds, pieces = WRONG_BOUNDS[wrong]
    out = guarded(numpy_host, (1, H, T, V), np.float32)
    assert_refused(
        numpy_host,
        lambda: function(**good_call(function, batch=1), cu_seqlens=bounds, out=out.view),
        ContractError,
        DECLARED[function].name,
        ["cu_seqlens", *pieces],
        out=out,
    )


def test_cu_seqlens_wants_one_row(numpy_host):
    out = guarded(numpy_host, (B, H, T, V), np.float32)
    assert_refused(
        numpy_host,
        lambda: gla(**good_call(gla), cu_seqlens=[0, T], out=out.view),
        ContractError,
        "gla",
        ["cu_seqlens", "B must be 1", "B=2"],
        out=out,
    )


def outs():
    good = zeros(B, H, T, V)
    return {
        "shape": (zeros(B, H, T, K), ContractError, ["out is (2, 3, 7, 4)", "[B, H, T, V]", "(2, 3, 7, 5)"]),
        "rank": (zeros(B, T, V), ContractError, ["out has 3 axes", "[B, H, T, V]"]),
        "dtype": (zeros(B, H, T, V, dtype=np.float64), ContractTypeError, ["out has dtype float64", "float32"]),
        "read-only": (read_only(good.copy()), ContractError, ["out is read-only"]),
        "repeated": (np.broadcast_to(zeros(1, 1, 1, V), (B, H, T, V)), ContractError, ["out is read-only"]),
        "list": (good.tolist(), ContractTypeError, ["out is a builtins.list"]),
    }


@pytest.mark.parametrize("wrong", outs())
def test_wrong_out(wrong):
    out, error, pieces = outs()[wrong]
    with pytest.raises(error) as caught:
        gla(**good_call(gla), out=out)
    assert type(caught.value) is error
    assert all(piece in str(caught.value) for piece in ["gla: ", *pieces]), str(caught.value)
    assert not np.any(out)


class Mine(np.ndarray):
    pass


SUBCLASSES = {
    "masked": (lambda x: np.ma.masked_array(x, x > 0), "numpy.ma.MaskedArray, whose mask would be ignored.*x.filled"),
    "matrix": (
        lambda x: x.reshape(-1, x.shape[-1]).view(np.matrix),
        r"numpy.matrix, a subclass of numpy.ndarray.*np.asarray\(x\)",
    ),
    "own": (lambda x: x.view(Mine), r"test_errors.Mine, a subclass of numpy.ndarray.*np.asarray\(x\)"),
    "records": (lambda x: x.view(np.recarray), r"numpy.rec.*, a subclass of numpy.ndarray.*np.asarray\(x\)"),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("kind", SUBCLASSES)
def test_subclasses_are_refused(kind):
    """Their rules would hold in one mode and not in another; the error says how to be rid of them."""
    make, message = SUBCLASSES[kind]
    given = {
        **good_call(gla),
        "initial_state": zeros(B, H, K, V),
        "out": zeros(B, H, T, V),
        "mask": np.ones((B, T), bool),
    }
    for name in given:
        with pytest.raises(ContractTypeError, match=f"gla: {name} is a .*{message}"):
            gla(**{**given, name: make(given[name])})
    _, pull = vjp(gla, *good_call(gla).values())
    with pytest.raises(ContractTypeError, match=f"gla: do is a .*{message}"):
        pull(make(zeros(B, H, T, V)))


def test_numbers_that_no_gpu_can_read_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=SimpleNamespace))

    def refusal(strides, address=512):
        places = {"shape": (2, 1, 8), "strides": strides, "data": SimpleNamespace(ptr=address)}
        return accepted_arrays.cupy_refusal(
            SimpleNamespace(dtype=np.dtype(np.float32), itemsize=4, **places), "computed", None
        )

    assert refusal((36, 34, 4)) is None  # the stride of an axis of one number has no meaning
    for wrong in (refusal((34, 32, 4)), refusal((32, 32, 6)), refusal((36, 32, 4), 514)):
        assert re.match(r"has numbers, of float32 with strides .* on multiples of 4 bytes, where no GPU", wrong)


def test_memory_maps_are_arrays(tmp_path):
    """They are subclasses without rules of their own."""
    given = good_call(gla)
    mapped = {name: np.memmap(tmp_path / name, np.float32, "w+", shape=x.shape) for name, x in given.items()}
    for name, x in given.items():
        mapped[name][...] = x
    o = gla(**mapped)
    assert type(o) is np.ndarray and same_bits(o, gla(**given))
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=o.shape)
    assert gla(**mapped, out=out) is out and same_bits(np.asarray(out), o)


def test_no_error_prints_an_array():
    """Nor a list, whatever it is given for."""
    wide, numbers = zeros(1000, 100), list(range(10**4))
    given = good_call(gla)
    for name in (
        "layout",
        "mode",
        "scale",
        "chunk_size",
        "materialize",
        "state_dtype",
        "reverse",
        "backend",
        "cu_seqlens",
        "output_final_state",
        "initial_state",
        "out",
        "mask",
    ):
        for wrong in (wide, numbers, ["text" * 1000], "text" * 1000):
            with pytest.raises((ContractError, TypeError)) as caught:
                gla(**given, **{name: wrong})
            assert len(str(caught.value)) < 400 and "\n" not in str(caught.value), name
    for gamma in (wide, ["x" * 999]):
        with pytest.raises(ContractError) as caught:
            retention(*list(given.values())[:3], gamma=gamma)
        assert len(str(caught.value)) < 400
    with pytest.raises(ContractError) as caught:
        gla_step(*(x[:, :, 0] for x in given.values()), zeros(B, H, K, V), slots=[[0], [1] * 999])
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("victim", ["v", "q", "initial_state"])
def test_out_must_not_overlap(victim):
    """Neither with an array nor with the initial state: what is read later would be what was just written."""
    buffer = np.random.default_rng(0).standard_normal(4 * B * H * T * V).astype(np.float32)
    given = {**good_call(gla), "initial_state": zeros(B, H, K, V)}
    shape = given[victim].shape
    given[victim] = buffer[: np.prod(shape)].reshape(shape)
    before = buffer.copy()
    with pytest.raises(ContractError, match=f"gla: out shares memory with {victim}"):
        gla(**given, out=buffer[8 : 8 + B * H * T * V].reshape(B, H, T, V))
    assert same_bits(buffer, before)


def test_unknown_keywords_are_typeerrors():
    arrays = good_call(gla).values()
    for call in (
        lambda: gla(*arrays, scal=1.0),
        lambda: vjp(gla, *arrays, scal=1.0),
        lambda: explain(gla, *arrays, scal=1.0),
        lambda: gla(*arrays, 1.0),
        lambda: vjp(gla, *arrays, gamma=0.5),
        lambda: linattn_np.softmax_attention(*list(arrays)[:3], initial_state=None),
    ):
        with pytest.raises(TypeError):
            call()


def test_missing_arrays_are_typeerrors():
    for function in (gla, lambda *arrays: vjp(gla, *arrays), lambda *arrays: explain(gla, *arrays)):
        with pytest.raises(TypeError):
            function(zeros(B, H, T, K))


# -- backends ----------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(SIMULATOR, reason="host arrays are what the simulator takes")
def test_named_backends_that_cannot_run_say_why():
    arrays = good_call(gla).values()
    for name in ("cupy", "numba"):
        with pytest.raises(
            NotSupported, match=f"^gla: {name}: (the arrays are on the host|{name}.* is not installed)"
        ) as caught:
            gla(*arrays, backend=name)
        assert isinstance(caught.value, ValueError)


def test_more_channels_than_a_tile_holds(backend):
    """K = 257 is computed right, or refused with the number in the reason."""
    sizes = {"B": 1, "H": 1, "T": 1, "K": 257, "V": 1, "N": 1}
    host = draw(DECLARED[gla], np.random.default_rng(0), sizes, np.float32)
    wanted = gla(*host, backend="numpy")
    for mode in backend.modes["gla"]:
        try:
            o = backend.run(gla, *map(backend.asarray, host), mode=mode)
        except NotSupported as refusal:
            assert "257" in str(refusal)
        else:
            assert_close(mode, backend.tohost(o), wanted, np.float32)


def test_classes_of_errors():
    assert issubclass(ContractError, ValueError) and issubclass(ContractTypeError, (ContractError, TypeError))
    assert issubclass(ContractTypeError, TypeError) and issubclass(NotSupported, ContractError)


def test_host_and_device_do_not_mix(card):
    q, k, v, g = good_call(gla).values()
    there = card.asarray
    refused = [
        (lambda: gla(there(q), k, there(v), there(g)), "arrays must share one library"),
        (
            lambda: gla(there(q), there(k), there(v), there(g), initial_state=zeros(B, H, K, V)),
            "initial_state lives on host",
        ),
        (lambda: gla(there(q), there(k), there(v), there(g), out=zeros(B, H, T, V)), "out lives on host"),
        (lambda: gla(q, k, v, g, out=there(zeros(B, H, T, V))), "out lives on cuda:0"),
        (lambda: gla_step(*(there(x[:, :, 0]) for x in (q, k, v, g)), zeros(B, H, K, V)), "state lives on host"),
    ]
    for call, message in refused:
        with pytest.raises(ContractTypeError, match=message):
            call()
    with pytest.raises(NotSupported, match="gla: numpy: .*cuda:0"):
        gla(*map(there, (q, k, v, g)), backend="numpy")


def test_device_integers_are_refused_where_they_would_synchronise(card):
    arrays = [card.asarray(x) for x in good_call(gla, batch=1).values()]
    with pytest.raises(ContractError, match="cu_seqlens must be host integers.*cupy"):
        gla(*arrays, cu_seqlens=card.asarray(np.array([0, T])))
    step = [card.asarray(x) for x in draw(GLA_STEP, np.random.default_rng(0), SIZES, np.float32)]
    state = card.asarray(zeros(B, H, K, V))
    with pytest.raises(ContractError, match="slots is a CuPy array .*int32.*int64"):
        gla_step(*step, state, slots=card.asarray(np.array([0, 1], np.int32)))
