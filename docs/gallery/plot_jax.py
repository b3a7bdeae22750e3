"""
Gradients in JAX
================

`linattn_np.interop.jax.gla` works under `jit` and `grad`. Here the decays of eight channels are found from what they
have made of a sequence.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

from linattn_np.interop.jax import gla

T, K = 64, 8
q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 1, T, K))
true = jnp.linspace(0.5, 0.98, K)


def outputs(decay):
    return gla(q, k, v, jnp.broadcast_to(jnp.log(decay), q.shape))


wanted = outputs(true)


@jax.jit
def step(x):
    """One step down the gradient; a decay is sigmoid(x)."""
    loss, slope = jax.value_and_grad(
        lambda x: ((outputs(jax.nn.sigmoid(x)) - wanted) ** 2).mean()
    )(x)
    return x - 0.1 * jnp.sign(slope) * jnp.minimum(1, jnp.abs(slope) * 50), loss


x, found = jnp.zeros(K), []
for _ in range(120):
    x, loss = step(x)
    found.append(jax.nn.sigmoid(x))

# %%
# Every channel begins at 0.5; the dotted lines are the decays that made the sequence.
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
axis.plot(jnp.stack(found), color="C0")
for decay in true:
    axis.axhline(decay, linestyle=":", color="0.5")
axis.annotate("what made the sequence", (0, true[-1]), (2, true[-1] + 0.01))
axis.annotate(
    "what the gradient finds",
    (30, found[30][4]),
    (32, found[30][4] - 0.05),
    color="C0",
)
axis.set_xlabel("step")
axis.set_ylabel("decay of a channel")
plt.show()
print(
    f"the loss is {loss:.1e}, "
    f"the largest error {jnp.abs(found[-1] - true).max():.3f}"
)
