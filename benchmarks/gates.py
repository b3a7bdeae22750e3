"""The log decays of a benchmark, by name: what trained models have, and the extremes on both sides of them.

trained      -exp(linspace(-4.2, -2.5, K) + 2 normal): the log of a trained RWKV-6's decay is close to normal, with
             these means over its channels and this deviation over tokens. The median is weak, the tail strong
weak         a 16th of logsigmoid's: GLA's own gates
logsigmoid   of standard normal numbers
strong       20 times that
all-20       -20 everywhere
reset        logsigmoid's, and -inf at every 64th token
rwkv7        -exp(-0.5) sigmoid of the same normal numbers as trained's: RWKV-7's own form, which stays above -0.61
model        what the example's model computes on its text, head by head and piece by piece
"""

from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "data" / "austen-x060" / "model.safetensors"
NAMES = ("trained", "weak", "logsigmoid", "strong", "all-20", "reset", "model")  # of any operator
LEAST_OF_RWKV7 = -0.6065306597126334  # -exp(-0.5)
FACTORS = {"weak": 1 / 16, "strong": 20}  # of logsigmoid's


def draw(name, rng, xp, shape):
    """[B, H, T, K], or [B, H, T] of a gate that a head's channels share, float32 on the device of `xp`."""
    if name == "model":
        return xp.asarray(of_the_model(shape))
    if name == "all-20":
        return xp.full(shape, -20, np.float32)
    x = rng.standard_normal(shape, dtype=np.float32)
    if name in ("trained", "rwkv7"):
        means = xp.linspace(-4.2, -2.5, shape[3], dtype=np.float32) if len(shape) == 4 else np.float32(-3.35)
        log = means + 2 * x
        return -xp.exp(log) if name == "trained" else np.float32(LEAST_OF_RWKV7) / (1 + xp.exp(-log))
    g = -np.float32(FACTORS.get(name, 1)) * xp.log1p(xp.exp(-x))
    if name == "reset":
        g[:, :, 63::64] = -np.inf
    return g


def of_the_model(shape):
    """The gates of the example's model on a text: its layers' heads one after the other, as often as `shape` has
    heads.
    """
    found = model_gates(shape[2])
    if found.shape[2] != shape[3]:
        raise ValueError(f"the example's model has heads of {found.shape[2]} channels, not {shape[3]}")
    pairs = np.arange(shape[0] * shape[1]) % len(found)
    return found[pairs].reshape(shape)


@cache
def model_gates(tokens):
    """[layers * heads, T, K]"""
    from unittest import mock

    from linattn_np.models import RWKV6
    from linattn_np.models.rwkv6 import numpy_layers as layers

    kept, operator = [], layers.rwkv6

    def keeping(r, k, v, w, *others, **keywords):
        kept.append(np.moveaxis(w[0], 1, 0))  # [1, T, H, K]
        return operator(r, k, v, w, *others, **keywords)

    model = RWKV6.from_file(MODEL)
    text = (ROOT / "README.md").read_bytes()
    text = (text * (tokens // len(text) + 1))[:tokens]
    with mock.patch.object(layers, "rwkv6", keeping):
        model.forward([list(text)], last=True)
    return np.concatenate(kept).astype(np.float32)
