"""precision: which products float32 arrays take on a GPU, said by a call or by a context."""

import threading

import numpy as np
import pytest

import linattn_np
from linattn_np import ContractError, gla, softmax_attention, vjp
from linattn_np.declarations import GLA

ARRAYS = [np.zeros((1, 1, 4, 8), np.float32)] * 4


def bound(**arguments):
    return GLA.bind(ARRAYS, **arguments).precision


def test_a_call_says_more_than_its_context():
    assert bound() == "float32" and bound(precision="tf32") == "tf32"
    with linattn_np.precision("tf32"):
        assert bound() == "tf32" and bound(precision="float32") == "float32"  # nor is one taken for the other
        with linattn_np.precision("float32"):
            assert bound() == "float32"
        assert bound() == "tf32"
    assert bound() == "float32"


def test_other_threads_have_a_context_of_their_own():
    found = []
    with linattn_np.precision("tf32"):
        thread = threading.Thread(target=lambda: found.append(bound()))
        thread.start()
        thread.join()
    assert found == ["float32"]


@pytest.mark.parametrize("wrong", ["bfloat16", "TF32", 1, np.float32])
def test_other_words_are_refused(wrong):
    for call in (lambda: gla(*ARRAYS, precision=wrong), lambda: vjp(gla, *ARRAYS, precision=wrong)):
        with pytest.raises(ContractError, match="^gla: precision is .*, expected one of None, 'float32', 'tf32'"):
            call()
    with pytest.raises(ValueError, match="^precision: is .*, expected one of 'float32', 'tf32'"):
        with linattn_np.precision(wrong):
            pass
    assert bound() == "float32"


def test_softmax_attention_has_none():
    with pytest.raises(TypeError, match="precision"):
        softmax_attention(*ARRAYS[:3], precision="tf32")


def test_numpy_takes_no_notice(rng):
    arrays = [*rng.standard_normal((3, 1, 2, 40, 8), dtype=np.float32), -np.ones((1, 2, 40, 8), np.float32)]
    assert (gla(*arrays, precision="tf32") == gla(*arrays)).all()


def test_frameworks_settle_it_when_they_are_called(monkeypatch):
    from linattn_np.interop.calls import Operator

    with linattn_np.precision("tf32"):
        *_, arguments = Operator.of(GLA).take_apart(ARRAYS, {})
    assert arguments["precision"] == "tf32"
