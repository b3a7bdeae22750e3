"""The map that a segment of tokens applies to the state before it."""

import numpy as np
import pytest

from linattn_np.contract import Op
from linattn_np.declarations import QKV
from linattn_np.summary import Summary, Transition, factor_shapes

N, H, K, V = 2, 3, 4, 5
SIZES = {"N": N, "H": H, "HV": 2 * H, "K": K, "V": V}
LIBRARIES = {"numpy": "numpy", "jax": "jax.numpy"}


def tokens(rng, transition, count=1, xp=np):
    """`count` maps of one token each, with random numbers; the value heads of a group share their head's factors."""
    op = Op("random", QKV, gates=(), transition=transition)
    shapes = {
        Transition.NONE: [],
        Transition.SCALAR: [(N, H)],
        Transition.DIAGONAL: [(N, H, K), (N, 2 * H, V)],
        Transition.RANK_ONE: factor_shapes(op, **SIZES),
    }[transition]

    def drawn(shape):
        return xp.asarray(rng.standard_normal(shape))

    return [Summary(transition, (drawn((N, 2 * H, K, V)),), tuple(map(drawn, shapes))) for _ in range(count)]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("transition", Transition)
def test_segments_in_a_row_are_one_segment(transition, library, rng):
    """As many bits as the library has: JAX's default is float32."""
    xp = pytest.importorskip(LIBRARIES[library])
    first, second, third = tokens(rng, transition, 3, xp)
    state = (xp.asarray(rng.standard_normal((N, 2 * H, K, V))),)
    wanted = third.apply(second.apply(first.apply(state)))
    for joined in (first.join(second).join(third), first.join(second.join(third))):
        np.testing.assert_allclose(joined.apply(state)[0], wanted[0], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(first.join(second).apply(None)[0], second.apply(first.own)[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("transition", Transition)
def test_the_gradients_map_is_the_adjoint(transition, rng):
    """<dS, F S> = <F^T dS, S>."""
    (one,) = tokens(rng, transition)
    S, dS = rng.standard_normal((2, N, 2 * H, K, V))
    back = one.of_gradient((np.zeros_like(S),))
    assert np.isclose((dS * one.transitioned(S)).sum(), (back.transitioned(dS) * S).sum())


def test_a_normaliser_never_decays(rng):
    one = Summary(Transition.NONE, (np.ones((N, H, K, V)), np.ones((N, H, K))))
    S, z = one.apply(one.apply(None))
    assert (S == 2).all() and (z == 2).all()
