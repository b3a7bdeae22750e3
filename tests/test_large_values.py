"""Large queries, keys, values and cotangents under strong gates: factors about the middle of a sub-chunk leave float32
what it can hold, and nothing on the way to a finite result is not finite. Hopper's kernels in half precision, the
others in every dtype, against float64.
"""

import numpy as np
import pytest
from conftest import Kernels
from reference import DECAYS, LIMITS, double, draw, exact_vjp, rms

from linattn_np import gla, rwkv6, vjp
from linattn_np.declarations import GLA, GLA_VALUE_GATE, RWKV6

SHAPE = {"B": 1, "H": 1, "T": 75, "K": 64, "V": 64}
OPERATORS = {"gla": (gla, GLA), "rwkv6": (rwkv6, RWKV6)}


def strong(rng, shape):
    return np.full(shape, -20.0)


def resets(rng, shape):
    return rng.choice([-20.0, -1e30, -np.inf], shape, p=[0.8, 0.1, 0.1])


def runs(rng, shape):
    """Of -20 for five tokens, and four weak ones."""
    return np.where(np.arange(shape[2])[:, None] % 9 < 5, -20.0, -0.05 * rng.random(shape))


def mixed(rng, shape):
    return rng.choice([-20.0, -14.0, -2.0, -0.01], shape)


GATES = (strong, resets, runs, mixed)
SIZES = {  # of queries, keys, values and cotangents
    "do-1": (1, 1, 1, 1),
    "do-64": (1, 1, 1, 64),
    "do-4096": (1, 1, 1, 4096),
    "do-1e6": (1, 1, 1, 1e6),
    "v-1e6": (1, 1, 1e6, 1),
    "q-and-k-1e4": (1e4, 1e4, 1, 1),
    "all-1e4": (1e4, 1e4, 1e4, 1e4),
    "qkv-1e6": (1e6, 1e6, 1e6, 1e-6),
}
NARROW_SIZES = {  # that float16 holds, as it does the results
    "do-1": (1, 1, 1, 1),
    "do-64": (1, 1, 1, 64),
    "do-4096": (0.01, 0.1, 1, 4096),
    "k-1e4": (0.01, 1e4, 0.1, 0.1),
    "q-1e4": (1e4, 0.01, 0.1, 0.1),
}
CASES = [
    *((dtype, size) for dtype in ("bfloat16", "float32") for size in SIZES),
    *(("float16", size) for size in NARROW_SIZES),
]


BACKENDS = Kernels


def assert_as_exact(function, op, backend, gate, dtype, size, rng):
    sizes = (NARROW_SIZES if dtype == "float16" else SIZES)[size]
    arrays, do = draw(op, rng, SHAPE, np.float64), rng.standard_normal((1, 1, SHAPE["T"], SHAPE["V"]))
    for n, name in enumerate(op.arrays):
        arrays[n] = gate(rng, arrays[n].shape) if name in DECAYS else arrays[n] * (*sizes, 1)[n if n < 3 else -1]
    with np.errstate(over="ignore"):  # -1e30 is -inf in float16
        *arrays, do = [x.astype(np.dtype(dtype)) for x in (*arrays, sizes[3] * do)]
    found, pull = backend.run(vjp, function, *map(backend.asarray, arrays))
    found = [found, *pull(backend.asarray(do))]
    o, _, gradients = exact_vjp(function, arrays, do)
    for name, x, exact in zip(("o", *op.arrays), found, (o, *gradients), strict=True):
        x, terms = double(backend.tohost(x)), rms(exact)
        assert np.isfinite(x).all(), f"{name}: {np.count_nonzero(~np.isfinite(x))} of {x.size} are not finite"
        if name in DECAYS:  # a difference of sums that are far larger
            terms = max(terms, rms(double(arrays[0]) * gradients[0]), rms(double(arrays[2]) * gradients[2]))
        error = rms(x - exact) / terms
        assert error <= LIMITS[dtype][0], f"{name} is off by {error:.1e}"


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype, size", CASES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", OPERATORS)
def test_values_of_any_size(name, gate, dtype, size, backend, rng):
    assert_as_exact(*OPERATORS[name], backend, gate, dtype, size, rng)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype, size", [case for case in CASES if case[1] not in ("all-1e4", "qkv-1e6")])
@pytest.mark.parametrize("gate", GATES)
def test_values_of_any_size_with_gates_of_their_own(gate, dtype, size, backend, rng):
    assert_as_exact(gla, GLA_VALUE_GATE, backend, gate, dtype, size, rng)
