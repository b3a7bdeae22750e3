"""
What a gate does to memory
==========================

The quadratic form of an operator is a matrix of weights: how much of token j reaches token i. Here it is read out of
`gla` itself: with the identity as values, an output's row is the row of weights.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LinearSegmentedColormap

import linattn_np

T, K = 96, 32
rng = np.random.default_rng(0)
q = k = np.full(
    (1, 1, T, K), K**-0.5, np.float32
)  # every token asks the same, so that only gates differ
v = np.eye(T, dtype=np.float32)[None, None]

trained = -np.exp(
    np.linspace(-4.2, -2.5, K) + 2 * rng.standard_normal((1, 1, T, K))
)
resets = np.full((1, 1, T, K), -0.02)
resets[:, :, ::24] = -np.inf
gates = {
    "no gate: all of the past": np.zeros((1, 1, T, K)),
    "-0.1 everywhere": np.full((1, 1, T, K), -0.1),
    "as a trained RWKV-6 has them": trained,
    "a reset every 24 tokens": resets,
}

# %%
# Rows are the tokens that read, columns the tokens that wrote. The fainter, the less weight.
shades = LinearSegmentedColormap.from_list("", [("C0", 0), "C0"])
figure, axes = plt.subplots(
    1, 4, figsize=(12, 3.4), sharey=True, layout="constrained"
)
for axis, (name, g) in zip(axes, gates.items(), strict=True):
    weights = linattn_np.gla(q, k, v, g.astype(np.float32), scale=1.0)[0, 0]
    image = axis.imshow(
        np.log10(np.maximum(weights, 1e-4)), vmin=-4, vmax=0, cmap=shades
    )
    axis.set_title(name, fontsize=10)
    axis.set_xlabel("token that wrote")
axes[0].set_ylabel("token that reads")
figure.colorbar(image, ax=axes, label="log10 of the weight", shrink=0.9)
plt.show()
