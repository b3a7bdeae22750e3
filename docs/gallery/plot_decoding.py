"""
A token against what was before
===============================

Softmax attention reads a cache of all tokens for every new one. Linear attention updates a state of fixed size.
"""

import time

import matplotlib.pyplot as plt
import numpy as np

import linattn_np

rng = np.random.default_rng(0)
H, K, lengths = 16, 64, [512, 1024, 2048, 4096, 8192]


def microseconds(call):
    """The least of 30 calls."""
    times = []
    for _ in range(30):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times) * 1e6


q, k, v = rng.standard_normal((3, 1, H, K), dtype=np.float32)
g, state = (
    np.full((1, H, K), -0.1, np.float32),
    np.zeros((1, H, K, K), np.float32),
)
step = microseconds(lambda: linattn_np.gla_step(q, k, v, g, state))
attention = []
for T in lengths:
    keys, values = rng.standard_normal((2, 1, H, T, K), dtype=np.float32)
    attention.append(
        microseconds(
            lambda: linattn_np.softmax_attention(q[:, :, None], keys, values)
        )
    )  # noqa: B023

# %%
# The time of one token, and what is kept for the next ones.
figure, (left, right) = plt.subplots(
    1, 2, figsize=(9, 3.6), layout="constrained"
)
kept = 2 * H * K * 4 * np.array(lengths) / 2**20
for axis, growing, fixed, what in (
    (left, attention, step, "microseconds a token"),
    (right, kept, state.nbytes / 2**20, "MiB kept"),
):
    for name, values, place, offset in (
        ("GLA's state", [fixed] * len(lengths), 0, (0, 9)),
        ("cache of keys and values", growing, 2, (4, -16)),
    ):
        (line,) = axis.loglog(lengths, values, marker="o", base=2)
        axis.annotate(
            name,
            (lengths[place], values[place]),
            xytext=offset,
            textcoords="offset points",
            color=line.get_color(),
        )
    axis.set_yscale("log", base=10)
    axis.set_xticks(lengths, map(str, lengths))
    axis.minorticks_off()
    axis.set_xlabel("tokens before, log scale")
    axis.set_ylabel(f"{what}, log scale")
    axis.grid()
plt.show()
# sphinx_gallery_thumbnail_path = "pictures/gallery_decoding.png"

# %%
# .. image:: /pictures/gallery_decoding.png
#    :alt: Time and memory of a token, of GLA and of softmax attention
