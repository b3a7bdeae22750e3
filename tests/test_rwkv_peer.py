"""The models' logits against the `rwkv` package's on random float32 checkpoints; both are fed the same tokens.

Both round in float32, and both are held to the equations in float64. A head whose output nearly vanishes is blown up
by its GroupNorm, rounding and all: there the package is off by more than 5e-5 as well, and no two float32
implementations agree. It happens all the time with decays around exp(-1), where a head's output is that of one or two
tokens, and seldom with those of trained models, which these checkpoints have: on most tokens the package is good
enough to be compared with to 5e-5. Elsewhere, and for a while after, our error may be a few times the package's.
"""

import importlib.util

import numpy as np
import pytest
from test_rwkv_versions import LITERAL

torch = pytest.importorskip("torch", reason="the rwkv package computes with torch")
pytest.importorskip("rwkv", reason="the rwkv package is what the logits are compared with")

TOLERANCE = 5e-5
SHAPES = {
    "heads of 64": {"L": 2, "H": 2, "N": 64, "A": 32, "W": 64, "G": 64, "Q": 32, "F": 448},
    "heads of 32": {"L": 5, "H": 3, "N": 32, "A": 8, "W": 16, "G": 24, "Q": 8, "F": 320},
    "heads of 16, odd ranks": {"L": 5, "H": 4, "N": 16, "A": 5, "W": 7, "G": 9, "Q": 3, "F": 100},
    "heads of 8": {"L": 3, "H": 4, "N": 8, "A": 3, "W": 4, "G": 5, "Q": 2, "F": 99},
    "one head, one layer": {"L": 1, "H": 1, "N": 64, "A": 64, "W": 128, "G": 160, "Q": 32, "F": 64},
    "heads of 128": {"L": 2, "H": 2, "N": 128, "A": 16, "W": 32, "G": 40, "Q": 16, "F": 896},
    "many heads": {"L": 2, "H": 12, "N": 16, "A": 32, "W": 64, "G": 64, "Q": 32, "F": 672},
    "twelve layers": {"L": 12, "H": 2, "N": 64, "A": 32, "W": 64, "G": 64, "Q": 32, "F": 448},
}


@pytest.fixture
def peer(kind, monkeypatch):
    """The package's model of this version, which its module asks the environment for when it is imported; not compiled
    by torch, which takes longer than the tests."""
    monkeypatch.setenv("RWKV_V7_ON", str(int(kind.version.number == 7)))
    monkeypatch.setattr(torch.jit, "ScriptModule", torch.nn.Module)
    for name in ("script_method", "script"):
        monkeypatch.setattr(torch.jit, name, lambda function: function)
    spec = importlib.util.find_spec("rwkv.model")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RWKV


def checkpoint(version, rng, L, H, N, A, V=97, **sizes):
    sizes |= {"1": 1, "5": 5, "V": V, "D": H * N, "H": H, "N": N, "A": A, "5A": 5 * A}
    names = version.parameter_axes(L)

    def parameter(name, shape):
        noise = rng.standard_normal(shape, np.float32)
        if name[-1] in "12":  # small, as trained ones are: large ones amplify either model's rounding
            return np.float32(0.3 * shape[-2] ** -0.5) * noise
        if name.endswith(".weight"):
            return 1 + np.float32(0.3) * noise if len(shape) == 1 else np.float32(shape[-1] ** -0.5) * noise
        if name.endswith(("time_decay", "w0")):
            return np.float32(1.5) * noise - 3  # decays from 0.4 to 0.999; RWKV-7's, from 0.6
        return np.float32(0.3) * noise + np.float32(0.5 * any(mix in name for mix in ("time_maa", ".x_", ".k_")))

    return {name: parameter(name, [sizes[axis] for axis in axes.split()]) for name, axes in names.items()}


@pytest.mark.pairwise
@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_logits_are_the_rwkv_packages(kind, peer, sizes, rng, tmp_path):
    weights, tokens = checkpoint(kind.version, rng, **sizes), rng.integers(0, 97, 90).tolist()
    torch.save({name: torch.from_numpy(x) for name, x in weights.items()}, tmp_path / "model.pth")
    model, peer = kind(weights), peer(str(tmp_path / "model"), "cpu fp32")
    ours, theirs, state, peer_state = [], [], None, None
    for part in (tokens[:80], *([token] for token in tokens[80:])):  # a prompt, then token by token
        found, state = model.forward([part], state)
        wanted, peer_state = peer.forward(part, peer_state, full_output=True)
        ours.append(found[0])
        theirs.append(np.atleast_2d(wanted.numpy()))
    ours, theirs, exact = np.concatenate(ours), np.concatenate(theirs), LITERAL[kind].logits_of(weights, tokens)

    def largest(difference):
        return np.abs(difference).max(axis=1)  # of a token's logits

    its_error = largest(theirs - exact)
    good = its_error < TOLERANCE / 2
    assert good.mean() > 0.5
    assert largest(ours - theirs)[good].max() < TOLERANCE
    assert (largest(ours - exact) < np.maximum(TOLERANCE, 5 * its_error)).all()
