"""
A sequence on several ranks
===========================

`linattn_np.distributed` cuts a sequence over ranks: processes of `mpiexec` or `torchrun`, or here threads. A rank sends
the state that its tokens make of nothing, and the product of their decays: the same few numbers however long its part
is.
"""

import matplotlib.pyplot as plt
import numpy as np

import linattn_np
from linattn_np import distributed

rng = np.random.default_rng(0)
B, H, T, K, RANKS = 1, 2, 1200, 32, 4
q, k, v = rng.standard_normal((3, B, H, T, K), dtype=np.float32)
g = -np.exp(rng.standard_normal((B, H, T, K), dtype=np.float32) - 3)


def on_rank(comm):
    """o of this rank's tokens."""
    own = slice(comm.rank * T // RANKS, (comm.rank + 1) * T // RANKS)
    arrays = (np.ascontiguousarray(x[:, :, own]) for x in (q, k, v, g))
    return distributed.gla(*arrays, comm=comm)


o = np.concatenate(distributed.run_threads(on_rank, RANKS), axis=2)
whole = linattn_np.gla(q, k, v, g)
alone = np.concatenate(
    [
        linattn_np.gla(*part)
        for part in zip(*(np.split(x, RANKS, 2) for x in (q, k, v, g)))
    ],
    axis=2,
)

# %%
# The difference from the whole sequence on one rank is rounding. Parts that know nothing of each other are wrong until
# the decays have forgotten what was before.
figure, axis = plt.subplots(figsize=(8, 3.8), layout="constrained")
for name, found, place, width in (
    ("four ranks", o, 6e-9, 3),
    ("parts alone", alone, 0.5, 1),
):
    off = np.abs(found - whole).max((0, 1, 3)) / np.abs(whole).max()
    (line,) = axis.semilogy(np.maximum(off, 1e-9), linewidth=width)
    axis.annotate(name, (T * 0.8, place), color=line.get_color())
for rank in range(1, RANKS):
    axis.axvline(rank * T // RANKS, linestyle=":", color="0.5")
axis.set_xlabel("token; dotted lines are the borders of the ranks")
axis.set_ylabel("error, log scale; none is at 1e-9")
plt.show()
print(
    f"a rank sends {H * (K * K + K)} numbers, "
    f"and holds {4 * H * K * T // RANKS}"
)
