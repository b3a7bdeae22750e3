"""The five stages: each held to its own equation, written out; together they are the operators."""

import numpy as np
import pytest
from reference import GATES, assert_close, double, guarded, same_bits

from linattn_np import gla, rwkv6, stages
from linattn_np.array_kinds import BFLOAT16

CHUNK = 16


class Inputs:
    """Everything a pipeline of stages takes, and every stage's exact result, in float64."""

    def __init__(self, rng, *, bounds, K=8, V=6, H=2, gate="logsigmoid", dtype=np.float32, chunk=CHUNK):
        T, self.chunk, self.bounds = bounds[-1], chunk, bounds
        self.q, self.k, self.v = (rng.standard_normal((1, H, T, D)).astype(dtype) for D in (K, K, V))
        self.g, self.u = GATES[gate](rng, (1, H, T, K)).astype(dtype), rng.standard_normal((H, K)).astype(dtype)
        self.start = rng.standard_normal((len(bounds) - 1, H, K, V)).astype(np.float32)
        self.table = [
            (n, a, min(a + chunk, stop))
            for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:]))
            for a in range(start, stop, chunk)
        ]

    def cumsum(self):
        g = double(self.g)
        b, e = np.zeros_like(g), np.zeros_like(g)
        for _, start, stop in self.table:
            for t in range(start, stop):
                b[:, :, t], e[:, :, t] = g[:, :, start : t + 1].sum(2), g[:, :, t + 1 : stop].sum(2)
        return b, e

    def gated(self, exclusive):
        b, e = self.cumsum()
        d = b.copy()
        if exclusive:
            for _, start, stop in self.table:
                d[:, :, start], d[:, :, start + 1 : stop] = 0, b[:, :, start : stop - 1]
        return double(self.q) * np.exp(d), double(self.k) * np.exp(e)

    def states(self):
        """(h [1, H, NC, K, V], final [N, H, K, V])."""
        (b, _), (_, kg), state = self.cumsum(), self.gated(False), double(self.start)
        h = np.empty((1, state.shape[1], len(self.table), *state.shape[2:]))
        for c, (n, start, stop) in enumerate(self.table):
            h[0, :, c] = state[n]
            state[n] = np.exp(b[0, :, stop - 1])[..., None] * state[n] + np.einsum(
                "htk,htv->hkv", kg[0, :, start:stop], double(self.v)[0, :, start:stop]
            )
        return h, state

    def scores(self, exclusive):
        q, k, g, u = map(double, (self.q, self.k, self.g, self.u))
        A = np.zeros((*q.shape[:3], self.chunk))
        for _, start, stop in self.table:
            for i in range(start, stop):
                for j in range(start, i + 1):
                    decay = np.exp(g[:, :, j + 1 : i + (not exclusive)].sum(2)) if i > j else u if exclusive else 1.0
                    A[:, :, i, j - start] = (q[:, :, i] * k[:, :, j] * decay).sum(-1)
        return A

    def combined(self, exclusive, scale):
        (qg, _), (h, _), A = self.gated(exclusive), self.states(), self.scores(exclusive)
        o = np.empty(self.v.shape)
        for c, (_, start, stop) in enumerate(self.table):
            o[:, :, start:stop] = scale * (
                qg[:, :, start:stop] @ h[:, :, c]
                + A[:, :, start:stop, : stop - start] @ double(self.v)[:, :, start:stop]
            )
        return o


SHAPES = {
    "one-chunk": {"bounds": [0, 16]},
    "short": {"bounds": [0, 5], "K": 3, "V": 4},
    "uneven": {"bounds": [0, 39], "K": 12, "V": 5},
    "packed": {"bounds": [0, 0, 1, 18, 18, 21, 21]},
    "all-20": {"bounds": [0, 33], "gate": "all-20"},
    "some-inf": {"bounds": [0, 33], "gate": "some-inf"},
    "all-1e30": {"bounds": [0, 20], "gate": "all-1e30"},
    "positive": {"bounds": [0, 20], "gate": "positive"},
    "bfloat16": {"bounds": [0, 20], "dtype": BFLOAT16},
    "float16": {"bounds": [0, 20], "dtype": np.float16},
    "chunk-of-64": {"bounds": [0, 30, 130], "K": 70, "V": 66, "H": 1, "chunk": 64},
    "channels-of-two-launches": {"bounds": [0, 20], "K": 260, "V": 4, "H": 1},
    "float64": {"bounds": [0, 20], "dtype": np.float64},
}
FOR_A_SIMULATOR = ("short", "packed", "some-inf", "bfloat16")


def pytest_generate_tests(metafunc):
    metafunc.parametrize(
        "backend, shape",
        [
            pytest.param(name, shape, id=f"{name}-{shape}")
            for name, backend in metafunc.config.backends.items()
            for shape in (FOR_A_SIMULATOR if backend.sizes == ("tiny",) else SHAPES)
            if np.dtype(SHAPES[shape].get("dtype", np.float32)) in backend.dtypes
        ],
        indirect=["backend"],
    )


@pytest.fixture
def inputs(shape, rng):
    return Inputs(rng, **SHAPES[shape])


def accuracy(inputs):
    """Results are float32 but for float64; the inputs' own rounding is in the exact result too."""
    return np.float64 if inputs.q.dtype == np.float64 else np.float32


def run(backend, inputs, stage, *arrays, **arguments):
    """A stage's results on the host; float64 host arrays are rounded to what the stage takes."""
    there = [backend.asarray(x.astype(accuracy(inputs)) if x.dtype == np.float64 else x.copy()) for x in arrays]
    before = [backend.tohost(x).copy() for x in there]
    given = {name: backend.asarray(x.copy()) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    result = backend.run(stage, *there, chunk_size=inputs.chunk, cu_seqlens=inputs.bounds, **given)
    for x, copy in zip(there, before):
        assert same_bits(backend.tohost(x), copy), "an input was changed"
    return tuple(map(backend.tohost, result)) if isinstance(result, tuple) else backend.tohost(result)


def finite(x):
    """-inf and -1e30 are ordinary sums of gates: judged as numbers by their decay."""
    return np.exp(double(x))


def test_chunk_cumsum(backend, inputs):
    for found, wanted in zip(run(backend, inputs, stages.chunk_cumsum, inputs.g), inputs.cumsum()):
        assert found.dtype == accuracy(inputs)
        assert_close("exp", finite(found), finite(wanted), accuracy(inputs))
        small = np.abs(wanted) < 1e3
        assert_close("sum", np.where(small, found, 0), np.where(small, wanted, 0), accuracy(inputs))


@pytest.mark.parametrize("exclusive", [False, True])
def test_gated_qk(backend, inputs, exclusive):
    b, e = inputs.cumsum()
    found = run(backend, inputs, stages.gated_qk, inputs.q, inputs.k, b, e, exclusive=exclusive)
    for x, wanted in zip(found, inputs.gated(exclusive)):
        assert x.dtype == accuracy(inputs)
        assert_close("gated", x, wanted, accuracy(inputs))


def test_inter_chunk(backend, inputs):
    (_, kg), (b, _), (h, final) = inputs.gated(False), inputs.cumsum(), inputs.states()
    found = run(
        backend, inputs, stages.inter_chunk, kg, inputs.v, b, initial_state=inputs.start, output_final_state=True
    )
    for x, wanted in zip(found, (h, final)):
        assert x.dtype == accuracy(inputs)
        assert_close("state", x, wanted, inputs.v.dtype)  # beside a half v, kg may be rounded for the product


@pytest.mark.parametrize("exclusive", [False, True])
def test_intra_chunk(backend, inputs, exclusive):
    bonus = {"u": inputs.u} if exclusive else {}
    A = run(backend, inputs, stages.intra_chunk, inputs.q, inputs.k, inputs.g, **bonus)
    assert A.dtype == accuracy(inputs)
    assert_close("A", A, inputs.scores(exclusive), accuracy(inputs))
    for _, start, stop in inputs.table:
        for i in range(start, stop):
            assert not A[:, :, i, i - start + 1 :].any(), "a weight above the diagonal"


@pytest.mark.parametrize("exclusive", [False, True])
def test_combine(backend, inputs, exclusive):
    (qg, _), (h, _), A = inputs.gated(exclusive), inputs.states(), inputs.scores(exclusive)
    out = guarded(backend, inputs.v.shape, inputs.v.dtype)
    o = run(backend, inputs, stages.combine, qg, h, A, inputs.v, scale=0.3, out=None)
    assert o.dtype == inputs.v.dtype
    assert_close("o", o, inputs.combined(exclusive, 0.3), inputs.v.dtype)
    there = [backend.asarray(x.astype(accuracy(inputs))) for x in (qg, h, A)] + [backend.asarray(inputs.v)]
    assert (
        backend.run(stages.combine, *there, scale=0.3, chunk_size=inputs.chunk, cu_seqlens=inputs.bounds, out=out.view)
        is out.view
    )
    out.assert_rest_untouched()
    assert same_bits(backend.tohost(out.view), o)


@pytest.mark.pairwise
@pytest.mark.parametrize("exclusive", [False, True])
def test_the_pipeline_is_the_operator(backend, inputs, exclusive):
    """Stage after stage gives what mode "staged" gives, in either layout."""
    q, k, v, g, u = (
        backend.asarray(np.ascontiguousarray(x)) for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.u)
    )
    how = {"chunk_size": inputs.chunk, "cu_seqlens": inputs.bounds}
    wanted = backend.run(rwkv6 if exclusive else gla, q, k, v, g, *([u] if exclusive else []), mode="staged", **how)
    for layout in ("bthd",) if backend.sizes == ("tiny",) else ("bhtd", "bthd"):
        there = [x if layout == "bhtd" else x.swapaxes(1, 2) for x in (q, k, v, g)]
        o = pipeline(backend, *there, u if exclusive else None, layout=layout, **how)
        o = o if layout == "bhtd" else o.swapaxes(1, 2)
        assert_close(layout, backend.tohost(o), backend.tohost(wanted), inputs.v.dtype)


def pipeline(backend, q, k, v, g, u, **how):
    b, e = backend.run(stages.chunk_cumsum, g, **how)
    qg, kg = backend.run(stages.gated_qk, q, k, b, e, exclusive=u is not None, **how)
    h = backend.run(stages.inter_chunk, kg, v, b, **how)
    A = backend.run(stages.intra_chunk, q, k, g, u=u, **how)
    return backend.run(stages.combine, qg, h, A, v, **how)
