"""Arrays whose batch rows, or heads, are more than 2**31 numbers apart, so that offsets need 64 bits. An array takes
9 GB of addresses or more, and little memory: the system gives none to pages that nobody touches."""

import mmap

import numpy as np
import pytest
from conftest import Emulated
from emulator import EmulatedDevice
from reference import draw, same_bits

from linattn_np import OPS, vjp
from linattn_np.array_kinds import BFLOAT16
from linattn_np.backends.cupy.rank_summary import Message

DISTANCE = 2**31 + 2**16  # numbers
SIZES = {"B": 2, "H": 2, "HK": 2, "T": 70, "S": 70, "K": 64, "V": 64, "N": 2}
MAP_NORESERVE = 0x4000  # Linux: addresses alone, which Python's mmap has no name for


def with_distance(x, axis):
    """A copy of x whose entries along `axis` are DISTANCE numbers apart; the other axes are contiguous."""
    strides, step = [DISTANCE * x.itemsize] * x.ndim, x.itemsize
    for other in reversed([n for n in range(x.ndim) if n != axis]):
        strides[other] = step
        step *= x.shape[other]
    size = (x.shape[axis] - 1) * strides[axis] + step
    copy = np.ndarray(x.shape, x.dtype, addresses(size), strides=strides)
    copy[...] = x
    return copy


def addresses(size):
    """So many bytes of zeros."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)


@pytest.mark.pairwise
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("axis", [0, 1], ids=["batch rows", "heads"])
def test_results_and_gradients_are_those_of_contiguous_arrays(kernel_backend, op, dtype, axis, rng):
    if not isinstance(kernel_backend, Emulated):
        pytest.skip("test_large has such arrays on a card")
    arrays = draw(op, rng, SIZES, dtype)
    do = rng.standard_normal([SIZES[letter] for letter in op.out.split()]).astype(dtype)
    results = []
    for given in ([*arrays, do], [with_distance(x, axis) for x in (*arrays, do)]):
        o, pull = kernel_backend.run(vjp, OPS[op], *given[:-1])
        with kernel_backend.in_dispatch():
            results.append([o, *pull(given[-1])])
    assert all(same_bits(found, wanted) for found, wanted in zip(*results, strict=True))


def test_a_rank_s_message_of_more_than_2_to_the_32_numbers(device):
    """Two states of 2^32 numbers each, which it has, and the product of each one's decays."""
    if not isinstance(device, EmulatedDevice):
        pytest.skip("the message is 34 GB")
    K = V = 2**16
    states = 2 * K * V
    message = np.frombuffer(addresses(4 * (states + 2)), np.float32)
    decays = np.zeros((2, 2, K), np.float32)  # of two sequences, in two parts each
    decays[:, :, 0] = [[0.5, 0.5], [0.5, 0.25]]
    sizes = {"N": 2, "H": 1, "K": K, "V": V, "parts": 2, "factors": 1, "channels": 1}
    strides = {"state_stride": 0, "decays_stride": 2 * K}
    pointers = {"state": None, "decays": device.pointer(decays), "message": device.pointer(message)}
    device.launch(Message(), 1, Message().pack(**pointers, **strides, **sizes))
    np.testing.assert_array_equal(message[states:], [0.25, 0.125])
