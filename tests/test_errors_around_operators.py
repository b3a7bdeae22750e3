"""Wrong arguments of steps, pullbacks, explain and stages; test_errors has those of operators."""

import numpy as np
import pytest
from conftest import Numpy
from reference import draw, guarded, same_bits
from wrong_calls import SIZES, B, H, K, T, V, assert_refused, good_call, read_only, zeros

from linattn_np import (
    ContractError,
    ContractTypeError,
    explain,
    gla,
    gla_step,
    rwkv6_step,
    softmax_attention,
    stages,
    vjp,
)
from linattn_np.declarations import GLA_STEP


@pytest.fixture
def numpy_host():
    return Numpy("numpy")


# -- steps -------------------------------------------------------------------------------------------------------------
def wrong_steps():
    state = zeros(B, H, K, V)
    return {
        "rank": ({"q": zeros(B, H, 1, K)}, ContractError, ["q has 4 axes", "[B, H, K]"]),
        "B": ({"v": zeros(3, H, V)}, ContractError, ["v has B=3", "[B, H, V]"]),
        "dtype": ({"k": zeros(B, H, K, dtype=np.float64)}, ContractTypeError, ["k has dtype float64"]),
        "state-shape": ({"state": zeros(B, H, V, K)}, ContractError, ["state is (2, 3, 5, 4)", "(2, 3, 4, 5)"]),
        "state-pool": ({"state": zeros(5, H, K, V)}, ContractError, ["state is (5, 3, 4, 5)", "(2, 3, 4, 5)"]),
        "state-dtype": ({"state": zeros(B, H, K, V, dtype=np.int32)}, ContractTypeError, ["state has dtype int32"]),
        "state-none": ({"state": None}, ContractTypeError, ["state is a builtins.NoneType", "expected an array"]),
        "state-read-only": ({"state": read_only(state.copy())}, ContractError, ["state is read-only"]),
        "slots-twice": ({"slots": [1, 1]}, ContractError, ["slots", "twice"]),
        "slots-out-of-range": ({"slots": [0, 2]}, ContractError, ["slots runs from 0 to 2", "2 slots"]),
        "slots-negative": ({"slots": [-1, 0]}, ContractError, ["slots runs from -1 to 0", "2 slots"]),
        "slots-short": ({"slots": [1]}, ContractError, ["slots is (1,)", "[B] = (2,)"]),
        "slots-floats": ({"slots": [0.0, 1.0]}, ContractError, ["slots is (2,) float64", "integers"]),
        "slots-bools": ({"slots": [True, False]}, ContractError, ["slots is (2,) bool", "integers"]),
        "slots-matrix": ({"slots": [[0, 1]]}, ContractError, ["slots is (1, 2)", "[B] = (2,)"]),
        "slots-ragged": ({"slots": [[0], [1, 2]]}, ContractTypeError, ["slots is [[0], [1, 2]]", "host integers"]),
        "slots-kind": ({"slots": "01"}, ContractTypeError, ["slots is '01'", "expected host integers"]),
        "scale": ({"scale": "1"}, ContractTypeError, ["scale is '1'"]),
        "backend": ({"backend": "torch"}, ContractError, ["backend is 'torch'"]),
    }


@pytest.mark.parametrize("wrong", wrong_steps())
def test_wrong_step(wrong, numpy_host):
    changes, error, pieces = wrong_steps()[wrong]
    out = guarded(numpy_host, (B, H, V), np.float32)
    arrays = dict(zip(GLA_STEP.arrays, draw(GLA_STEP, np.random.default_rng(0), SIZES, np.float32)))
    given = {**arrays, "state": np.random.default_rng(1).standard_normal((B, H, K, V)).astype(np.float32), **changes}
    unchanged = [x for x in given.values() if isinstance(x, np.ndarray)]
    assert_refused(
        numpy_host, lambda: gla_step(**given, out=out.view), error, "gla_step", pieces, out=out, unchanged=unchanged
    )


@pytest.mark.parametrize("victim", ["state", "q", "g"])
def test_step_state_and_out_must_not_overlap(victim):
    arrays = dict(zip(GLA_STEP.arrays, draw(GLA_STEP, np.random.default_rng(0), SIZES, np.float32)))
    buffer = np.random.default_rng(1).standard_normal(2 * B * H * K * V).astype(np.float32)
    state, out = buffer[: B * H * K * V].reshape(B, H, K, V), buffer[5 : 5 + B * H * V].reshape(B, H, V)
    if victim == "state":
        message, given = "out shares memory with state", {**arrays, "state": state, "out": out}
    else:
        message = f"state shares memory with {victim}"
        given = {**arrays, victim: buffer[5 : 5 + B * H * K].reshape(B, H, K), "state": state}
    before = buffer.copy()
    with pytest.raises(ContractError, match=f"gla_step: {message}"):
        gla_step(**given)
    assert same_bits(buffer, before)


def test_step_wants_a_state():
    with pytest.raises(TypeError):
        rwkv6_step(*(zeros(B, H, K) for _ in range(4)), zeros(H, K))


# -- gradients ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "op", [gla_step, np.sum, "gla", None, stages.combine], ids=["step", "ufunc", "name", "none", "stage"]
)
def test_vjp_and_explain_want_an_operator(op):
    for function in (vjp, explain):
        with pytest.raises(TypeError, match=f"{function.__name__}: op is .*expected one of.*gla, rwkv6"):
            function(op, zeros(B, H, T, K))


def test_vjp_refuses_out():
    out = zeros(B, H, T, V)
    with pytest.raises(ContractError, match="gla: out .*vjp"):
        vjp(gla, *good_call(gla).values(), out=out)


@pytest.mark.parametrize(
    "do, error, pieces",
    [
        (zeros(B, H, T, K), ContractError, ["do is (2, 3, 7, 4)", "(2, 3, 7, 5)"]),
        (zeros(T, V), ContractError, ["do has 2 axes", "[B, H, T, V]"]),
        (zeros(B, H, T, V, dtype=np.int8), ContractTypeError, ["do has dtype int8"]),
        ([1.0], ContractTypeError, ["do is a builtins.list", "expected an array"]),
        (None, ContractTypeError, ["do is a builtins.NoneType"]),
    ],
    ids=["shape", "rank", "dtype", "list", "none"],
)
def test_wrong_do(do, error, pieces):
    _, pull = vjp(gla, *good_call(gla).values())
    with pytest.raises(error) as caught:
        pull(do)
    assert type(caught.value) is error
    assert all(piece in str(caught.value) for piece in ["gla: ", *pieces]), str(caught.value)


def test_wrong_dht():
    do = zeros(B, H, T, V)
    _, pull = vjp(gla, *good_call(gla).values())
    for dht, piece in (
        (zeros(B, H, V, K), "dht is (2, 3, 5, 4)"),
        ((do, do), "dht has 2 parts"),
        ([1.0], "dht is a builtins.list"),
    ):
        with pytest.raises(ContractError) as caught:
            pull(do, dht)
        assert f"gla: {piece}" in str(caught.value)
    _, pull = vjp(softmax_attention, *list(good_call(softmax_attention).values()))
    with pytest.raises(ContractError, match="softmax_attention: dht"):
        pull(do, zeros(1))


@pytest.mark.parametrize("function", [vjp, explain])
def test_the_operator_forgotten(function):
    """What is missing is named, and no array is printed."""
    with pytest.raises(TypeError) as caught:
        function(*good_call(gla).values())
    message = str(caught.value)
    assert message.startswith(
        f"{function.__name__}: op is missing, as in {function.__name__}(linattn_np.gla, q, k, v, g)"
    )
    assert "a numpy.ndarray (2, 3, 7, 4) of float32" in message and "\n" not in message


# -- stages ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "call, error, pieces",
    [
        (lambda x: stages.chunk_cumsum(x[0]), ContractError, ["chunk_cumsum: g has 3 axes", "[B, H, T, K]"]),
        (
            lambda x: stages.chunk_cumsum(x, chunk_size=10),
            ContractError,
            ["chunk_cumsum: chunk_size is 10", "multiple of 16"],
        ),
        (lambda x: stages.chunk_cumsum(x, layout="x"), ContractError, ["chunk_cumsum: layout is 'x'"]),
        (lambda x: stages.chunk_cumsum(x, backend="x"), ContractError, ["chunk_cumsum: backend is 'x'"]),
        (lambda x: stages.chunk_cumsum(x, cu_seqlens=[0, 1]), ContractError, ["chunk_cumsum: cu_seqlens"]),
        (
            lambda x: stages.gated_qk(x, x, x, x, exclusive="no"),
            ContractTypeError,
            ["gated_qk: exclusive is 'no'", "True or False"],
        ),
        (lambda x: stages.gated_qk(x, x, x, x[:, :, :2]), ContractError, ["gated_qk: e has T=2", "T=7"]),
        (
            lambda x: stages.gated_qk(x, x, x.astype(np.float64), x),
            ContractTypeError,
            ["gated_qk: b has dtype float64", "float32"],
        ),
        (lambda x: stages.inter_chunk(x, x, x, initial_state=x), ContractError, ["inter_chunk: initial_state is"]),
        (lambda x: stages.intra_chunk(x, x, x, u=x), ContractError, ["intra_chunk: u has 4 axes", "[H, K]"]),
        (
            lambda x: stages.combine(x, zeros(B, H, 2, K, K), zeros(B, H, T, 64), x),
            ContractError,
            ["combine: h has NC=2", "makes it 1"],
        ),
        (
            lambda x: stages.combine(x, zeros(B, H, 1, K, K), zeros(B, H, T, 16), x),
            ContractError,
            ["combine: A has C=16", "makes it 64"],
        ),
    ],
    ids=[
        "rank",
        "chunk_size",
        "layout",
        "backend",
        "cu_seqlens",
        "exclusive",
        "T",
        "computed",
        "state",
        "u",
        "NC",
        "C",
    ],
)
def test_wrong_stage(call, error, pieces):
    with pytest.raises(error) as caught:
        call(zeros(B, H, T, K))
    assert type(caught.value) is error
    assert all(piece in str(caught.value) for piece in pieces), str(caught.value)
