"""The model's logits against the `rwkv` package's on random float32 checkpoints; both are fed the same tokens."""

import numpy as np
import pytest

from linattn_np.models import RWKV6
from linattn_np.models.names import BLOCK, EMBEDDING, HEAD

torch = pytest.importorskip("torch", reason="the rwkv package computes with torch")
peer_model = pytest.importorskip("rwkv.model", reason="the rwkv package is what the logits are compared with")

SHAPES = {"heads of 64": {"L": 2, "H": 2, "N": 64, "A": 32, "W": 64, "F": 448},
          "heads of 32": {"L": 5, "H": 3, "N": 32, "A": 8, "W": 16, "F": 320},
          "heads of 16, odd ranks": {"L": 3, "H": 4, "N": 16, "A": 5, "W": 7, "F": 100},
          "one head, one layer": {"L": 1, "H": 1, "N": 64, "A": 64, "W": 128, "F": 64},
          "heads of 128": {"L": 2, "H": 2, "N": 128, "A": 16, "W": 32, "F": 896}}


def checkpoint(rng, L, H, N, A, W, F, V=97):
    sizes = {"1": 1, "5": 5, "V": V, "D": H * N, "H": H, "N": N, "A": A, "5A": 5 * A, "W": W, "F": F}
    names = {**EMBEDDING, **{f"blocks.{i}.{name}": axes for i in range(L) for name, axes in BLOCK.items()}, **HEAD}

    def parameter(name, shape):
        noise = rng.standard_normal(shape, np.float32)
        if name.endswith(("_w1", "_w2")):       # small, as trained ones are: large ones amplify either model's rounding
            return 0.3 * shape[-2] ** -0.5 * noise
        if name.endswith(".weight"):
            return 1 + 0.3 * noise if len(shape) == 1 else shape[-1] ** -0.5 * noise
        return 0.3 * noise

    return {name: parameter(name, [sizes[axis] for axis in axes.split()]) for name, axes in names.items()}


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_logits_are_the_rwkv_packages(sizes, rng, tmp_path):
    weights = checkpoint(rng, **sizes)
    torch.save({name: torch.from_numpy(x) for name, x in weights.items()}, tmp_path / "model.pth")
    model, peer = RWKV6(weights), peer_model.RWKV(str(tmp_path / "model"), "cpu fp32", verbose=False)
    tokens = rng.integers(0, 97, 90).tolist()
    state = peer_state = None
    for part in (tokens[:80], *([token] for token in tokens[80:])):         # a prompt, then token by token
        logits, state = model.forward([part], state)
        wanted, peer_state = peer.forward(part, peer_state, full_output=True)
        np.testing.assert_allclose(logits[0], np.atleast_2d(wanted.numpy()), rtol=0, atol=5e-5)
