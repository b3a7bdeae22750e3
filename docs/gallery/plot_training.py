"""
Training a small layer
======================

A GLA layer learns to average: the answer at every token is a moving average of the inputs so far, some channels' over
few tokens, some over many. The gates have to find out how fast to forget. The gradients are the package's own, and the
optimiser is Adam in four lines.
"""

import matplotlib.pyplot as plt
import numpy as np

from linattn_np.layers import GatedLinearAttention, random_weights

rng = np.random.default_rng(0)
B, T, D, STEPS = 8, 64, 16, 400
keep = np.linspace(0.5, 0.95, D)  # of the average, per channel


def draw():
    """Inputs, and their moving averages."""
    x = rng.standard_normal((B, T, D)).astype(np.float32)
    average, wanted = np.zeros((B, D)), np.empty_like(x)
    for t in range(T):
        average = keep * average + np.sqrt(1 - keep**2) * x[:, t]
        wanted[:, t] = average
    return np.concatenate([x, np.ones((B, T, D), np.float32)], -1), wanted


layer = GatedLinearAttention(
    random_weights(rng, hidden_size=2 * D, num_heads=4),
    num_heads=4,
    gate_logit_normalizer=1,
)
mean = {name: np.zeros_like(w) for name, w in layer.weights.items()}
square = {name: np.zeros_like(w) for name, w in layer.weights.items()}

losses = []
for step in range(1, STEPS + 1):
    x, wanted = draw()
    (y, _), pullback = layer.vjp(x)
    error = np.zeros_like(y)
    error[..., :D] = y[..., :D] - wanted
    losses.append(float((error**2).sum() / wanted.size))
    _, gradients = pullback(2 * error / wanted.size)
    for name, gradient in gradients.items():
        mean[name] = 0.9 * mean[name] + 0.1 * gradient
        square[name] = 0.99 * square[name] + 0.01 * gradient**2
        size = np.sqrt(square[name] / (1 - 0.99**step)) + 1e-8
        layer.weights[name] -= 0.01 * mean[name] / (1 - 0.9**step) / size

# %%
# The loss falls far below that of a layer that says nothing, which is 1 but for the first tokens.
figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
axis.semilogy(losses)
axis.set_xlabel("step")
axis.set_ylabel("mean squared error, log scale")
axis.grid()
plt.show()
print(f"from {losses[0]:.2f} to {np.mean(losses[-20:]):.2f}")
