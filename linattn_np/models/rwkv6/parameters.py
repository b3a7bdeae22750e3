"""The sizes and the initial values of the parameters of an RWKV-6 model to be trained."""

import numpy as np

from ..rwkv import parameters
from .names import VERSION

# Factors of initial values: with 0 in a layer's last matrix, the layer at first adds nothing to the residual.
SCALES = {
    "att.output.weight": 0,
    "ffn.value.weight": 0,
    "ffn.receptance.weight": 0,
    "att.key.weight": 0.1,
    "att.gate.weight": 0.1,
    "att.time_maa_w1": 0,
    "att.time_decay_w1": 0,
    "head.weight": 0.5,
}


class Layout(parameters.Layout):
    """The place of each parameter in the vector; see `rwkv.parameters.Layout`.

    Example
    -------
    >>> layout = Layout(Layout.sizes_of(layers=2, width=64, head_size=16))
    >>> weights = layout.named(layout.initial(seed=0))
    >>> weights["blocks.1.att.time_faaaa"].shape, layout.size == sum(array.size for array in weights.values())
    ((4, 16), True)
    """

    version = VERSION

    @staticmethod
    def version_sizes(width) -> dict[str, int]:
        A, W = max(8, width // 8), max(8, width // 4)
        return {"F": width * 7 // 2, "A": A, "5A": 5 * A, "W": W}

    def initial_value(self, name, shape, depth, rng):
        """The initial value, or an array that broadcasts to it (Peng et al., "Eagle and Finch", 2024, appendix)."""
        D, L = self.sizes["D"], self.sizes["L"]
        rising, falling = depth / max(1, L - 1), 1 - depth / L  # by layers: 0 to 1; 1 to almost 0
        channel = np.arange(D) / D
        if name == "emb.weight":
            return rng.normal(0, 0.1, shape)
        if name in ("att.time_maa_w2", "att.time_decay_w2"):
            return rng.uniform(-0.01, 0.01, shape)
        if VERSION.is_matrix(name):
            inputs = shape[0] if name in ("att.time_maa_w1", "att.time_decay_w1") else shape[-1]
            return rng.normal(0, inputs**-0.5, shape) * SCALES.get(name, 1)
        if name == "att.time_decay":
            return -6 + 5 * (np.arange(D) / max(1, D - 1)) ** (0.7 + 1.3 * rising)
        if name == "att.time_faaaa":
            zigzag = (np.arange(D) + 1) % 3 - 1
            return (rising * (1 - np.arange(D) / max(1, D - 1)) + 0.1 * zigzag).reshape(shape)
        if "time_maa" in name:
            power = {"r": 0.5, "g": 0.5}.get(name[-1], 1) if name.startswith("att") else 1
            return 1 - channel ** (power * falling) - (0.3 * rising if name == "att.time_maa_v" else 0)
        return float(name.endswith("weight"))  # of a norm; its bias is 0
