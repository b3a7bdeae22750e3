"""What segments do to a state, and that another recurrence fits: a toy whose tokens have rank-one transitions."""

import numpy as np
import pytest
from conftest import DOUBLE
from reference import assert_close

import linattn_np
from linattn_np import OPS, distributed
from linattn_np.backends.numpy import EQUATIONS
from linattn_np.contract import Op
from linattn_np.declarations import QKV
from linattn_np.distributed import operators, run_threads
from linattn_np.errors import ContractError
from linattn_np.public_function import public_function
from linattn_np.summary import Summary, Transition, factor_shapes

N, H, K, V = 2, 3, 4, 5
SIZES = {"N": N, "H": H, "HV": 2 * H, "K": K, "V": V}
LIBRARIES = {"numpy": "numpy", "jax": "jax.numpy"}


# -- the map itself ----------------------------------------------------------------------------------------------------
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
    back = one.turned((np.zeros_like(S),))
    assert np.isclose((dS * one.moved(S)).sum(), (back.moved(dS) * S).sum())


def test_a_normaliser_never_decays(rng):
    one = Summary(Transition.NONE, (np.ones((N, H, K, V)), np.ones((N, H, K))))
    S, z = one.apply(one.apply(None))
    assert (S == 2).all() and (z == 2).all()


# -- another recurrence ------------------------------------------------------------------------------------------------
TOY = Op(
    "toy",
    QKV | {"g": "B H T K", "a": "B H T K", "b": "B H T K"},
    gates=("g",),
    modes=("recurrent",),
    transition=Transition.RANK_ONE,
    gates_per_value_head=True,
)


class Equation:
    """S_t = (diag(exp g_t) + b_t a_t^T) S_{t-1} + k_t v_t^T,     o_t = scale q_t^T S_t"""

    @staticmethod
    def step(problem, state, q, k, v, g, a, b):
        (S,) = state
        S = np.exp(g)[..., None] * S + b[..., None] * (a[..., None, :] @ S) + k[..., None] * v[..., None, :]
        return (S,), problem.scale * (q[..., None, :] @ S)[..., 0, :]

    @staticmethod
    def step_vjp(problem, state, q, k, v, g, a, b, dstate, do):
        (S,), (dS,), do = state, dstate, problem.scale * do
        aS, (after,) = a[..., None, :] @ S, Equation.step(problem, state, q, k, v, g, a, b)[0]
        dS = dS + q[..., None] * do[..., None, :]
        daS = b[..., None, :] @ dS
        dg, da, db = np.exp(g) * (S * dS).sum(-1), (S * daS).sum(-1), (dS * aS).sum(-1)
        before = np.exp(g)[..., None] * dS + a[..., None] * daS
        return (
            (before,),
            (after * do[..., None, :]).sum(-1),
            (dS * v[..., None, :]).sum(-1),
            (dS * k[..., None]).sum(-2),
            dg,
            da,
            db,
        )


@public_function(TOY)
def toy():
    """Its equation is that of `Equation`."""


@pytest.fixture
def declared(monkeypatch):
    monkeypatch.setitem(OPS, TOY, toy)
    monkeypatch.setitem(EQUATIONS, TOY, Equation)
    function = operators.on_ranks(TOY)
    yield function
    del operators.OPERATORS[function]


@pytest.fixture
def arrays(rng):
    q, k, g, a, b = rng.standard_normal((5, N, H, 12, K))
    return [q, k, rng.standard_normal((N, H, 12, V)), -np.exp(g), a, 0.5 * b]


def exactly(arrays, state, scale):
    """A head and a token at a time."""
    o = np.empty_like(arrays[2])
    S = state.copy()
    for n, h, t in np.ndindex(o.shape[:3]):
        q, k, v, g, a, b = (x[n, h, t] for x in arrays)
        S[n, h] = (np.diag(np.exp(g)) + np.outer(b, a)) @ S[n, h] + np.outer(k, v)
        o[n, h, t] = scale * q @ S[n, h]
    return o, S


def summaries(arrays, chunk):
    """Of every chunk: as the toy itself computes them, with K more columns that begin as the identity."""
    B, H, T, V = arrays[2].shape
    start = np.broadcast_to(np.concatenate([np.zeros((K, V)), np.eye(K)], axis=1), (B, H, K, V + K))
    for first in range(0, T, chunk):
        q, k, v, *others = (x[:, :, first : first + chunk] for x in arrays)
        v = np.concatenate([v, np.zeros_like(k)], axis=-1)
        final = toy(q, k, v, *others, initial_state=start, output_final_state=True)[1]
        yield Summary(TOY.transition, (final[..., :V],), (final[..., V:],))


def test_token_by_token_and_in_chunks(declared, arrays, rng):
    state = rng.standard_normal((N, H, K, V))
    o, final = toy(*arrays, initial_state=state, output_final_state=True)
    for found, wanted in zip((o, final), exactly(arrays, state, K**-0.5), strict=True):
        assert_close("toy", found, wanted, DOUBLE)
    before, joined, parts = (state,), None, []
    for n, summary in enumerate(summaries(arrays, 5)):
        parts.append(toy(*(x[:, :, 5 * n : 5 * n + 5] for x in arrays), initial_state=before[0]))
        before, joined = summary.apply(before), summary if joined is None else joined.join(summary)
    assert_close("o in chunks", np.concatenate(parts, axis=2), o, DOUBLE)
    assert_close("the state behind the last chunk", before[0], final, DOUBLE)
    assert_close("the state of all chunks joined", joined.apply((state,))[0], final, DOUBLE)


def test_gradients(declared, arrays, rng):
    """Against differences of the function's value along a random direction."""
    state, do, dht = (
        rng.standard_normal((N, H, K, V)),
        rng.standard_normal((N, H, 12, V)),
        rng.standard_normal((N, H, K, V)),
    )

    def value(inputs):
        o, final = toy(*inputs[:-1], initial_state=inputs[-1], output_final_state=True)
        return (o * do).sum() + (final * dht).sum()

    _, pullback = linattn_np.vjp(toy, *arrays, initial_state=state, output_final_state=True)
    for number, gradient in enumerate(pullback(do, dht)):
        inputs, step = [*arrays, state], rng.standard_normal(gradient.shape)
        ends = [value([*inputs[:number], inputs[number] + e * step, *inputs[number + 1 :]]) for e in (1e-6, -1e-6)]
        assert np.isclose((ends[0] - ends[1]) / 2e-6, (gradient * step).sum(), rtol=1e-5, atol=1e-5), number


@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
def test_on_ranks(declared, arrays, reverse, rng):
    """Results and gradients of three ranks, one of which has no token."""
    state, do, dht = (
        rng.standard_normal((N, H, K, V)),
        rng.standard_normal((N, H, 12, V)),
        rng.standard_normal((N, H, K, V)),
    )
    arguments = {"initial_state": state, "output_final_state": True, "reverse": reverse}
    (o, final), pullback = linattn_np.vjp(toy, *arrays, **arguments)

    def on_rank(comm):
        part = (slice(None), slice(None), slice(*((0, 7), (7, 7), (7, 12))[comm.rank]))
        result, pull = distributed.vjp(declared, *(x[part] for x in arrays), comm=comm, **arguments)
        return *result, *pull(do[part], dht)

    by_rank = list(zip(*run_threads(on_rank, 3)))
    for number, (parts, wanted) in enumerate(zip(by_rank, (o, final, *pullback(do, dht)), strict=True)):
        found = parts[0] if wanted.shape == state.shape else np.concatenate(parts, axis=2)
        assert_close(f"result {number}", found, wanted, DOUBLE)


def test_value_heads_with_gates_of_their_own_share_no_head(declared, arrays):
    arrays[2] = np.repeat(arrays[2], 2, axis=1)
    with pytest.raises(ContractError, match="v has H=6, but H=3 elsewhere"):
        toy(*arrays)
