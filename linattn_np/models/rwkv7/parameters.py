"""The sizes and the initial values of the parameters of an RWKV-7 model to be trained."""

import numpy as np

from ..rwkv import parameters
from .names import VERSION

RANKS = {"W": 2.5, "A": 2.5, "Q": 1.7, "G": 5.0}  # of the low-rank matrices, times the root of the width
# Factors of initial values: with 0 in a layer's last matrix, the layer at first adds nothing to the residual.
SCALES = {"att.output.weight": 0, "ffn.value.weight": 0, "att.key.weight": 0.1, "head.weight": 0.5}
MIX_POWERS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}


class Layout(parameters.Layout):
    """The place of each parameter in the vector; see `rwkv.parameters.Layout`.

    Example
    -------
    >>> layout = Layout(Layout.sizes_of(layers=2, width=64, head_size=16))
    >>> weights = layout.named(layout.initial(seed=0))
    >>> weights["blocks.1.att.r_k"].shape, layout.size == sum(array.size for array in weights.values())
    ((4, 16), True)
    """

    version = VERSION

    @staticmethod
    def version_sizes(width) -> dict[str, int]:
        ranks = {axis: max(8, 8 * round(factor * width**0.5 / 8)) for axis, factor in RANKS.items()}
        return {"F": 4 * width, **ranks}

    def initial_value(self, name, shape, depth, rng):
        """The initial value, or an array that broadcasts to it (Peng et al., "RWKV-7 'Goose'", 2025, appendix)."""
        D, L, N = (self.sizes[axis] for axis in "DLN")
        rising, falling = depth / max(1, L - 1), 1 - depth / L  # by layers: 0 to 1; 1 to almost 0
        channel, place = np.arange(D) / D, np.arange(D) / max(1, D - 1)
        zigzag = 2 * (np.arange(D) % N) / max(1, N - 1) - 1  # in every head from -1 to 1, most of it near 0
        zigzag *= np.abs(zigzag)
        module, _, leaf = name.rpartition(".")
        if name == "emb.weight":
            return rng.normal(0, 0.1, shape)
        if module == "att" and leaf in ("w1", "a1", "v1", "g1"):
            return 0
        if module == "att" and leaf in ("w2", "a2", "v2", "g2"):
            return rng.normal(0, 0.1 * shape[-1] ** -0.5, shape)
        if VERSION.is_matrix(name):
            return rng.normal(0, shape[-1] ** -0.5, shape) * SCALES.get(name, 1)
        if module == "att" and leaf.startswith("x_"):
            return 1 - channel ** (MIX_POWERS[leaf[-1]] * falling)
        if name == "ffn.x_k":
            return 1 - channel ** (falling**4)
        values = {
            "att.w0": -5.5 + 6 * place ** (1 + rising**0.3) + 2.5 * zigzag,
            "att.a0": -0.19 + 0.3 * zigzag + 0.4 * (place - 0.5),
            "att.v0": 0.73 - 0.4 * (place - 0.5),
            "att.k_k": 0.71 - 0.1 * (place - 0.5),
            "att.k_a": 1.02,
            "att.r_k": -0.04,
            "att.ln_x.weight": ((1 + depth) / L) ** 0.7,
        }
        return values.get(name, float(name.endswith("weight")))  # of a norm; its bias is 0
