"""The map that a segment of tokens applies to the state before it."""

import numpy as np
import pytest

from linattn_np.contract import Op
from linattn_np.declarations import QKV
from linattn_np.summary import Summary, Transition, factor_shapes

N, H, K, V = 2, 3, 4, 5
SIZES = {"N": N, "H": H, "HV": 2 * H, "K": K, "V": V}
LIBRARIES = {"numpy": "numpy", "jax": "jax.numpy"}


def token(rng, transition):
    """The map of a token, with random numbers; the value heads of a group share their head's factors."""
    op = Op("random", QKV, gates=(), transition=transition)
    shapes = {
        Transition.NONE: [],
        Transition.SCALAR: [(N, H)],
        Transition.DIAGONAL: [(N, H, K), (N, 2 * H, V)],
        Transition.RANK_ONE: factor_shapes(op, **SIZES),
    }[transition]
    return Summary(transition, (rng.standard_normal((N, 2 * H, K, V)),), tuple(map(rng.standard_normal, shapes)))


@pytest.mark.parametrize("transition", Transition)
def test_the_gradients_map_is_the_adjoint(transition, rng):
    """<dS, F S> = <F^T dS, S>."""
    one = token(rng, transition)
    S, dS = rng.standard_normal((2, N, 2 * H, K, V))
    back = one.of_gradient((np.zeros_like(S),))
    assert np.isclose((dS * one.transitioned(S)).sum(), (back.transitioned(dS) * S).sum())


@pytest.mark.parametrize("transition", list(Transition)[1:])
def test_jax_differentiates_at_zeros(transition, rng):
    """As a trained initial state has them at first."""
    jax, of = pytest.importorskip("jax"), token(rng, transition)
    summary = Summary(transition, (), tuple(map(jax.numpy.asarray, of.factors)))
    weights = rng.standard_normal((N, 2 * H, K, V))
    gradient = jax.grad(lambda S: (summary.transitioned(S) * weights).sum())(jax.numpy.zeros(weights.shape))
    transposed = Summary(transition, (), of.factors).of_gradient(()).transitioned(weights)
    np.testing.assert_allclose(gradient, transposed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("transition", list(Transition)[1:])
def test_zeros_stay_where_a_segment_grows_out_of_range(transition, library, rng):
    """Infinite factors, and what they make of zeros elsewhere in a matrix, meet nothing but 0 in the first channel."""
    xp = pytest.importorskip(LIBRARIES[library])
    S, factors = rng.standard_normal((N, 2 * H, K, V)), list(token(rng, transition).factors)
    if transition is Transition.SCALAR:
        S[:], factors[0][:] = 0, np.inf
    else:
        S[:, :, 0], factors[0][..., 0] = 0, np.inf
        if transition is Transition.RANK_ONE:
            factors[0][..., 1, 0] = np.nan
    with np.errstate(invalid="ignore"):
        found = Summary(transition, (), tuple(map(xp.asarray, factors))).transitioned(xp.asarray(S))
    if transition is Transition.RANK_ONE:
        others = factors[0][..., 1:].repeat(2, axis=1) @ S[:, :, 1:]
        np.testing.assert_allclose(found, others, rtol=1e-3, atol=1e-4)
    else:
        assert np.isfinite(found).all() and (np.asarray(found)[S == 0] == 0).all()


def test_a_normaliser_never_decays(rng):
    one = Summary(Transition.NONE, (np.ones((N, H, K, V)), np.ones((N, H, K))))
    S, z = one.apply(one.apply(None))
    assert (S == 2).all() and (z == 2).all()


@pytest.mark.parametrize("transition", Transition)
def test_no_heads(transition):
    shapes = {Transition.SCALAR: [(1, 0)], Transition.DIAGONAL: [(1, 0, K)], Transition.RANK_ONE: [(1, 0, K, K)]}
    summary = Summary(transition, (), tuple(map(np.zeros, shapes.get(transition, []))))
    assert summary.transitioned(np.zeros((1, 0, K, V))).shape == (1, 0, K, V)
