"""
Speed against length, on NumPy or CuPy
======================================

Softmax attention compares every token with every other; linear attention carries a state. Code is the same for NumPy
and for CuPy arrays: where a call runs follows from its arrays.
"""

import time

import matplotlib.pyplot as plt
import numpy as np

import linattn_np

try:
    import cupy as xp

    xp.cuda.Device().synchronize()
except Exception:  # there is no CuPy, or no GPU
    xp = np

rng = xp.random.default_rng(0)
lengths = [256, 512, 1024, 2048, 4096]


def seconds(operator, *arrays):
    """The least of ten calls, after one that warms up.

    A call does not wait for a GPU, so that this must.
    """
    times = []
    for _ in range(11):
        begun = time.perf_counter()
        float(operator(*arrays).sum())
        times.append(time.perf_counter() - begun)
    return min(times[1:])


found = {"GLA": [], "softmax attention": []}
for T in lengths:
    q, k, v, g = (
        rng.standard_normal((1, 4, T, 64), dtype=xp.float32) for _ in range(4)
    )
    found["softmax attention"].append(
        seconds(linattn_np.softmax_attention, q, k, v)
    )
    found["GLA"].append(seconds(linattn_np.gla, q, k, v, -xp.exp(2 * g - 3)))

# %%
# A straight line of slope 1 is linear in the length, one of slope 2 quadratic.
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for name, times in found.items():
    (line,) = axis.loglog(lengths, np.array(times) * 1e3, marker="o")
    end = lengths[-1], times[-1] * 1e3
    axis.annotate(
        name,
        end,
        xytext=(8, 0),
        textcoords="offset points",
        color=line.get_color(),
    )
axis.set_xticks(lengths, map(str, lengths))
axis.minorticks_off()
axis.set_xlabel("tokens, log scale")
axis.set_ylabel("milliseconds, log scale")
axis.set_title(f"4 heads of 64, {xp.__name__}", loc="left")
axis.grid()
plt.show()
# sphinx_gallery_thumbnail_path = "pictures/gallery_speed_against_length.png"

# %%
# .. image:: /pictures/gallery_speed_against_length.png
#    :alt: Time against the length of the sequence, of GLA and of softmax attention
