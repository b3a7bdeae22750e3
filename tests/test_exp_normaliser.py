"""linear_attention with exp and the normaliser on NumPy, where exp of a query or a key is beyond float32."""

import numpy as np
import pytest
from reference import double

from linattn_np import linear_attention, vjp

NORMALIZED = {"feature_map": "exp", "normalize": True}
MODES = ("auto", "chunk", "staged", "parallel", "recurrent")
SHIFTS = {
    "large keys": lambda q, k: (q, k + 100),
    "large queries": lambda q, k: (q + 100, k),
    "small keys": lambda q, k: (q, k - 120),
    "keys that rise": lambda q, k: (q, k + np.linspace(0, 200, k.shape[2])[:, None]),
    "keys that fall": lambda q, k: (q, k - np.linspace(0, 200, k.shape[2])[:, None]),
    "wide": lambda q, k: (60 * q, 60 * k),
}


def compared(arrays, do, mode, **arguments):
    """(found, wanted), each o and the gradients; float64 holds exp up to 709."""
    results = []
    for of, how in ((np.float32, mode), (double, "recurrent")):
        given = {name: tuple(map(of, x)) if name == "initial_state" else x for name, x in arguments.items()}
        o, pull = vjp(linear_attention, *map(of, arrays), mode=how, **NORMALIZED, **given)
        *gradients, dh0 = (*pull(of(do)), None) if "initial_state" not in given else pull(of(do))
        results.append([o, *gradients, *(dh0 or ())])
    return results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shift", SHIFTS)
def test_is_finite_and_right_where_exp_is_not(shift, mode, rng):
    q, k, v, do = rng.standard_normal((4, 2, 1, 50, 8))
    arrays = [np.float32(x) for x in (*SHIFTS[shift](q, k), v)]
    for arguments in ({}, {"reverse": True}, {"mask": rng.random((2, 50)) < 0.8}):
        for x, y in zip(*compared(arrays, do, mode, **arguments)):
            # an exponent of up to 300 is right to 300 * 2^-23 nats, twice: of the query and of the key
            np.testing.assert_allclose(x, y, rtol=0, atol=4 * 300 * 2**-23 * max(1, np.abs(y).max()))


@pytest.mark.parametrize("mode", MODES)
def test_goes_on_from_a_state(mode, rng):
    q, k, v = (np.float32(x) for x in rng.standard_normal((3, 1, 1, 40, 8)))
    whole = {"feature_map": "exp", "normalize": True, "mode": mode, "output_final_state": True}
    for more in (0, 60):  # a state's own numbers are exp of its keys: they are to fit
        o, final = linear_attention(q, k + more, v, **whole)
        first, state = linear_attention(*(x[:, :, :17] for x in (q, k + more, v)), **whole)
        rest, last = linear_attention(*(x[:, :, 17:] for x in (q, k + more, v)), initial_state=state, **whole)
        np.testing.assert_allclose(np.concatenate([first, rest], axis=2), o, atol=1e-5 * np.abs(v).max())
        for x, y in zip(last, final):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * np.abs(y).max())
        assert np.isfinite(o).all()


def test_a_state_of_itself_overflows_and_o_does_not(rng):
    q, k, v = (np.float32(x) for x in rng.standard_normal((3, 1, 1, 40, 8)))
    o, (S, z) = linear_attention(q, k + 100, v, output_final_state=True, **NORMALIZED)
    assert np.isfinite(o).all() and np.isinf(z).all() and np.isinf(S).any()


@pytest.mark.parametrize("more", [-60, 60])
def test_is_right_on_every_backend_where_sums_of_products_fit(more, backend, rng):
    """As docs/numerics.md restricts it on a GPU, which takes exp as it is."""
    if backend.name == "numba":
        pytest.skip("Numba has no linear_attention")
    q, k, v = rng.standard_normal((3, 1, 1, 40, 8)).astype(np.float32)
    k += np.float32(more)
    o = backend.run(linear_attention, *map(backend.asarray, (q, k, v)), **NORMALIZED)
    wanted = linear_attention(*map(double, (q, k, v)), mode="recurrent", **NORMALIZED)
    np.testing.assert_allclose(backend.tohost(o), wanted, atol=1e-4)
