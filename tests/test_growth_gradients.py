"""Gradients where gates above 0 let the state grow, beside decays of any strength in the same tokens.

Every value is held to what it is made of: the sum of the magnitudes of its terms, which no other value's size hides.
"""

import numpy as np
import planned
import pytest
from reference import double, draw, draw_states

from linattn_np.arrays import BFLOAT16
from linattn_np.declarations import GLA, RWKV6

CHUNK = 32
HALF = np.dtype("float16")
CLOSE = {BFLOAT16: 2**-6, HALF: 2**-8}
LEAST = {BFLOAT16: 1e-6, HALF: 1e-5}  # what is left of the smallest terms, of size 1
DELIVERED = {BFLOAT16: 1e37, HALF: 3e4}


def bursts(rng, shape):
    """One +50 in a while, and before the next one a -60 or a reset; every channel on its own."""
    g = np.zeros(shape)
    for b, h, c in np.ndindex(shape[0], shape[1], shape[3]):
        at = rng.integers(0, 9)
        while at + 8 < shape[2]:
            g[b, h, at, c] = 50
            at += rng.integers(1, 7)
            g[b, h, at, c] = (-60, -np.inf)[rng.integers(2)]
            at += rng.integers(1, 9)
    return g


def first(decay, growth, at=0, apart=1):
    """A decay, and behind it growth; in sub-chunks of 8, from token `at` of each on."""

    def gates(rng, shape):
        g = rng.uniform(-0.1, 0, shape)
        g[:, :, at::16] += decay
        g[:, :, at + apart :: 16] += growth
        return g

    return gates


def moderate(rng, shape):
    """+1 to +30 beside -25, often in the same 8 tokens."""
    g = rng.uniform(-0.5, 0, shape)
    up = rng.random(shape) < 0.06
    up[:, :, 1:] &= ~up[:, :, :-1]
    down = np.zeros(shape, bool)
    down[:, :, 1:] = up[:, :, :-1]
    g[up] = rng.uniform(1, 30, up.sum())
    g[down] = -25
    g[:, :, ::8][rng.random(g[:, :, ::8].shape) < 0.5] = -25
    return g


def gentle(rng, shape):
    """+6 beside decays: float16 holds what there is."""
    return np.clip(bursts(rng, shape), -20, 6)


GATES = {
    "bursts": bursts,
    "gentle": gentle,
    "moderate": moderate,
    "one channel": lambda rng, shape: np.where(np.arange(shape[3]) == 21, bursts(rng, shape), -0.1),
    "-25, then +24": first(-25, 24),
    "-60, then +50": first(-60, 50, at=5),
    "-inf, then +50": first(-np.inf, 50, at=2),
    "+50, then -60": first(50, -60, at=3),
    "+50, a chunk later -60": first(50, -60, at=6, apart=9),
}


def by_token(op, arrays, do, initial, dht, scale, bounds):
    """The gradients of the recurrence, token by token in float64, and sum_v S C by token."""
    q, k, v, g, *u = arrays
    dq, dk, dv, dg = map(np.zeros_like, (q, k, v, g))
    du, dh0 = np.zeros_like(u[0]) if u else None, np.zeros_like(initial)
    for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:])):
        b, sequence = (n, range(start, stop)) if len(q) > 1 else (0, range(start, stop))
        S, states = initial[n].copy(), {}
        for t in sequence:
            states[t] = S
            decay = np.exp(g[b, :, t])[..., None]
            before, S = S, decay * S + k[b, :, t, :, None] * v[b, :, t, None]
            dq[b, :, t] = scale * np.einsum("hkv,hv->hk", before if u else S, do[b, :, t])
            if u:
                own = scale * (do[b, :, t] * v[b, :, t]).sum(-1, keepdims=True)
                dq[b, :, t] += u[0] * k[b, :, t] * own
                dk[b, :, t] += u[0] * q[b, :, t] * own
                du += q[b, :, t] * k[b, :, t] * own
                dv[b, :, t] += scale * (u[0] * q[b, :, t] * k[b, :, t]).sum(-1, keepdims=True) * do[b, :, t]
        C = dht[n].copy()
        for t in reversed(sequence):
            decay, read = np.exp(g[b, :, t])[..., None], scale * q[b, :, t, :, None] * do[b, :, t, None]
            if not u:
                C = C + read
            dk[b, :, t] += np.einsum("hkv,hv->hk", C, v[b, :, t])
            dv[b, :, t] += np.einsum("hkv,hk->hv", C, k[b, :, t])
            dg[b, :, t] = (decay * states[t] * C).sum(-1)
            C = decay * C + (read if u else 0)
        dh0[n] = C
    return [dq, dk, dv, dg, *([du] if u else []), dh0]


class Call:
    """A call with states at both ends, its gradients, and what they are made of."""

    def __init__(self, op, rng, gate, dtype, gate_dtype=None, lengths=(70,), K=64, V=64):
        self.op, self.scale, self.bounds = op, K**-0.5, np.concatenate([[0], np.cumsum(lengths)])
        sizes = {"B": 1, "H": 1, "T": sum(lengths), "K": K, "V": V, "N": len(lengths)}
        self.arrays = draw(op, rng, sizes, dtype, "weak", gate_dtype)
        self.arrays[3] = gate(rng, self.arrays[3].shape).astype(self.arrays[3].dtype)
        self.do = rng.standard_normal((1, 1, sizes["T"], V)).astype(dtype)
        self.initial, self.dht = (draw_states(op, rng, sizes, np.float32)[0] for _ in range(2))

    def gradients(self, device):
        options = {"cu_seqlens": self.bounds} if len(self.bounds) > 2 else {}
        arrays, initial = list(map(device.upload, self.arrays)), device.upload(self.initial)
        problem = self.op.bind(arrays, gradient=True, initial_state=initial, **options)
        found, (dh0,) = planned.pull(problem, device, device.upload(self.do), (device.upload(self.dht),))
        return [double(x if isinstance(x, np.ndarray) else x.get()) for x in (*found, dh0)]

    def exact(self, of=double):
        q, k, v, g, *u = self.arrays
        arrays = [of(q), of(k), of(v), double(g), *map(of, u)]
        with np.errstate(all="ignore"):
            return by_token(self.op, arrays, of(self.do), of(self.initial), of(self.dht), self.scale, self.bounds)

    def made_of(self):
        return self.exact(lambda x: abs(double(x)))


def check(op, device, rng, gate, dtype, *more, **sizes):
    call = Call(op, rng, gate, dtype, *more, **sizes)
    found, wanted, made_of = call.gradients(device), call.exact(), call.made_of()
    # A gate's gradient is a sum over all later tokens: it carries what is left of the largest one's rounding.
    dq, dk, _, dg = made_of[:4]
    sums = abs(double(call.arrays[0])) * dq + abs(double(call.arrays[1])) * dk + dg
    behind = np.maximum.accumulate(sums[:, :, ::-1], axis=2)[:, :, ::-1]
    noise = behind[:, :, [max(0, t - CHUNK) for t in range(dg.shape[2])]]
    made_of[3] = dg + np.where(noise < DELIVERED[dtype], noise * 2**-4, np.inf)
    for name, x, exact, size in zip([*op.arrays, "h0"], found, wanted, made_of, strict=True):
        inside = size < DELIVERED[BFLOAT16 if name == "h0" else dtype]
        error = abs(x - exact)[inside] / (CLOSE[dtype] * size[inside] + LEAST[dtype])
        worst = error.max(initial=0)  # NaN where one is
        assert worst <= 1, f"d{name} is off by {worst:.1e} times the limit"


@pytest.fixture
def hopper(device):
    if device.capability != 90:
        pytest.skip("Hopper's own kernels")
    return device


@pytest.mark.pairwise
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("gate_dtype", (None, "float32"))
@pytest.mark.parametrize("K, V", ((64, 64), (40, 128), (128, 72)))
@pytest.mark.parametrize("dtype", (BFLOAT16, HALF), ids=str)
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_growth_beside_decay(op, hopper, rng, gate, dtype, K, V, gate_dtype):
    check(op, hopper, rng, gate, dtype, gate_dtype, K=K, V=V)


@pytest.mark.pairwise
@pytest.mark.parametrize("gate", (bursts, gentle), ids=("bursts", "gentle"))
@pytest.mark.parametrize("dtype", (BFLOAT16, HALF), ids=str)
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_growth_in_segments(op, hopper, rng, dtype, gate):
    """Of packed sequences, some of which end within a chunk."""
    check(op, hopper, rng, gate, dtype, lengths=(7, 520, 40))


@pytest.mark.parametrize("dtype", (BFLOAT16, HALF), ids=str)
@pytest.mark.parametrize("op", (GLA, RWKV6), ids=lambda op: op.name)
def test_what_overflows_leaves_other_tokens_alone(op, hopper, rng, dtype):
    """100 nats in two tokens: what comes before them gets its queries' gradient, what comes behind all others."""
    call = Call(op, rng, first(0, 0), dtype)
    at = 3 * CHUNK // 2 + 4
    call.arrays[3][:, :, at : at + 2] = 50
    found, wanted, made_of = call.gradients(hopper), call.exact(), call.made_of()
    for name, n, tokens in ("dq", 0, slice(at)), ("dk", 1, slice(at + 2, None)), ("dv", 2, slice(at + 2, None)):
        error = abs(found[n] - wanted[n]) / (CLOSE[dtype] * made_of[n] + LEAST[dtype])
        assert error[:, :, tokens].max() <= 1, name
