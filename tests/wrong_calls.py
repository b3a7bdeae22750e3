"""Calls that are right but for one argument, and what a refusal is: the class, the words, and nothing written."""

import numpy as np
import pytest
from reference import draw, same_bits

from linattn_np.ops import OPS

B, H, T, K, V = 2, 3, 7, 4, 5
SIZES = {"B": B, "H": H, "T": T, "K": K, "V": V, "N": B}
DECLARED = {function: op for op, function in OPS.items()}


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def read_only(x):
    x.flags.writeable = False
    return x


def good_call(function, batch=B):
    op = DECLARED[function]
    return dict(zip(op.arrays, draw(op, np.random.default_rng(0), {**SIZES, "B": batch}, np.float32)))


def assert_refused(backend, call, error, operator, pieces, *, out, unchanged=()):
    """`call` raises exactly `error` with all pieces in its message and writes nowhere."""
    before = [(x, x.copy()) for x in unchanged if isinstance(x, np.ndarray)]
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error, repr(caught.value)
    message = str(caught.value)
    assert message.startswith(f"{operator}: "), message
    for piece in pieces:
        assert piece in message, f"{piece!r} is not in {message!r}"
    out.assert_untouched()
    assert all(same_bits(x, copy) for x, copy in before)
