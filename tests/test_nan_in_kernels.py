"""NaN stays NaN in kernels, through the activations, bounds and divisions by 0 that a comparison would turn into a
number."""

import numpy as np
import planned
import pytest
from test_decode_kernels import decoder_of, random_weights

from linattn_np import gla, linear_attention, softmax_attention
from linattn_np.backends.cupy import softmax_tiles
from linattn_np.declarations import GLA_VALUE_GATE, LINEAR_ATTENTION, SOFTMAX_ATTENTION


@pytest.mark.pairwise
@pytest.mark.parametrize("B", [1, 3, 9])
def test_relu_squared_of_a_model(device, kind, B, rng):
    """One row of a key matrix of the channel mix is NaN, and so is one hidden number, and with it every logit."""
    weights = random_weights(kind, rng)
    weights["blocks.0.ffn.key.weight"][5] = np.nan
    decoder = decoder_of(kind, weights, np.float32, B, device)
    logits = decoder.step(device.upload(rng.integers(0, decoder.sizes["V"], B)), decoder.initial_state())
    assert np.isnan(planned.host(logits)).all()


def on(backend, op, function, *arrays, **options):
    """o of a call of `function`, which is operator `op`, on a backend; as a host array."""
    if not backend.takes(op, options.get("mode", "chunk"), arrays[0].dtype):
        pytest.skip(f"{backend.name} has no {op.name} of this mode")
    return backend.tohost(backend.run(function, *map(backend.asarray, arrays), **options))


@pytest.mark.parametrize("feature_map", ["relu", "elu", "exp"])
def test_feature_maps(backend, feature_map, rng):
    q, k, v = rng.standard_normal((3, 1, 1, 20, 8)).astype(np.float32)
    q[0, 0, 7, 3] = np.nan
    o = on(backend, LINEAR_ATTENTION, linear_attention, q, k, v, feature_map=feature_map, mode="recurrent")
    assert np.isnan(o[0, 0, 7]).all() and np.isfinite(np.delete(o, 7, axis=2)).all()


def test_a_gate_beside_one_that_grows(backend, rng):
    """The state before the gate is 0."""
    q, k, v = rng.standard_normal((3, 1, 1, 20, 8)).astype(np.float32)
    g, gv = -np.ones_like(q), -np.ones_like(q)
    g[0, 0, 0, 3], g[0, 0, 1, 2] = np.nan, 50
    o = on(backend, GLA_VALUE_GATE, gla, q, k, v, g, gv, mode="recurrent")
    assert np.isnan(o).all()


@pytest.mark.parametrize("poisoned", ["q", "sink"])
@pytest.mark.parametrize("D, parts", [(64, 1), (64, 3), (272, 1)])
def test_softmax(backend, monkeypatch, D, parts, poisoned, rng):
    monkeypatch.setattr(softmax_tiles, "parts", lambda *sizes: parts)
    q, k, v = rng.standard_normal((3, 1, 1, 200, D)).astype(np.float16)
    sinks = np.zeros(1, np.float32)
    if poisoned == "q":
        q[0, 0, 7, 3] = np.nan
    else:
        sinks[0] = np.nan
    o = on(backend, SOFTMAX_ATTENTION, softmax_attention, q, k, v, sinks=backend.asarray(sinks), causal=False)
    assert np.isnan(o[0, 0, 7] if poisoned == "q" else o).all()
