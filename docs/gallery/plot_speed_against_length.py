"""
Speed against length
====================

Softmax attention compares every token with every other; linear attention carries a state. On your own CPU:
"""

import time

import matplotlib.pyplot as plt
import numpy as np

import linattn_np

rng = np.random.default_rng(0)
lengths = [256, 512, 1024, 2048, 4096]


def seconds(call):
    """The least of three calls, after one that warms up."""
    times = []
    for _ in range(4):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times[1:])


found = {"softmax_attention": [], "gla": [], "rwkv6": []}
for T in lengths:
    q, k, v = rng.standard_normal((3, 1, 4, T, 64), dtype=np.float32)
    g = -np.exp(np.linspace(-4.2, -2.5, 64) + 2 * rng.standard_normal((1, 4, T, 64))).astype(np.float32)
    u = rng.standard_normal((4, 64), dtype=np.float32)
    found["softmax_attention"].append(seconds(lambda q=q, k=k, v=v: linattn_np.softmax_attention(q, k, v)))
    found["gla"].append(seconds(lambda q=q, k=k, v=v, g=g: linattn_np.gla(q, k, v, g)))
    found["rwkv6"].append(seconds(lambda q=q, k=k, v=v, g=g, u=u: linattn_np.rwkv6(q, k, v, g, u)))

# %%
# A straight line of slope 1 is linear in the length, one of slope 2 quadratic.
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for name, times in found.items():
    axis.loglog(lengths, np.array(times) * 1e3, marker="o", label=name)
axis.set_xticks(lengths, map(str, lengths))
axis.minorticks_off()
axis.set_xlabel("tokens")
axis.set_ylabel("milliseconds, 4 heads of 64")
axis.grid(color="#e4e4e4")
axis.legend(frameon=False)
plt.show()
