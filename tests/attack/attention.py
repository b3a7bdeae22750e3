"""Softmax attention with what no other operator has: sinks, windows, a softcap, keys of their own number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from reference import literal_attention

from attack.calls import DTYPES, TOLERANCES, double
from attack.harness import Refused, holds_for, require
from linattn_np import NotSupported, softmax_attention, vjp


@dataclass(frozen=True)
class Attention:
    """A call, its gradients too; `sinks` has a number of each head, or of none."""

    T: int = 1
    S: int = 1
    heads: int = 1  # of k and v
    groups: int = 1
    K: int = 1
    V: int = 1
    dtype: str = "float32"
    causal: bool = True
    window: tuple | None = None
    softcap: float | None = None
    sinks: tuple | None = None
    loudness: float = 1.0  # factor of q
    chunk_size: int | None = None
    seed: int = 0

    @property
    def arguments(self):
        own = dict(causal=self.causal, window=self.window, softcap=self.softcap)
        return own | ({"chunk_size": self.chunk_size} if self.chunk_size else {})

    def arrays(self):
        rng, H = np.random.default_rng(self.seed), self.heads * self.groups
        shapes = [(2, H, self.T, self.K), (2, self.heads, self.S, self.K), (2, self.heads, self.S, self.V)]
        arrays = [rng.standard_normal(shape) for shape in shapes]
        arrays[0] *= self.loudness
        return [x.astype(DTYPES[self.dtype]) for x in arrays + ([np.array(self.sinks)] if self.sinks else [])]


SINKS = st.sampled_from((-np.inf, -np.inf, 0.0, 1.0, -1.0, -60.0, 60.0, -1e4, 1e4))


@st.composite
def attentions(draw, machine):
    heads, groups = draw(st.sampled_from((1, 1, 2))), draw(st.sampled_from((1, 1, 2, 3)))
    sizes, tokens = st.sampled_from((1, 3, 8, 16, 17, 32)), st.sampled_from((1, 2, 7, 16, 17, 33, 64, 70))
    return Attention(
        draw(tokens),
        draw(tokens),
        heads,
        groups,
        draw(sizes),
        draw(sizes),
        draw(st.sampled_from([str(dtype) for dtype in machine.dtypes])),
        draw(st.booleans()),
        draw(st.none() | st.tuples(*[st.sampled_from((-1, 0, 1, 5, 20))] * 2)),
        draw(st.sampled_from((None, None, 0.5, 30.0))),
        draw(st.none() | st.lists(SINKS, min_size=heads * groups, max_size=heads * groups).map(tuple)),
        draw(st.sampled_from((1.0, 1.0, 0.0, 30.0, 300.0))),
        draw(st.sampled_from((None, 16, 32, 64))) if machine.name == "numpy" else None,
        draw(st.integers(0, 999)),
    )


@holds_for(attentions, machines=("numpy", "cupy"))
def attention(case, machine):
    """The equation, and its gradients: finite, of a sink of -inf nothing, and each as near as its rounding allows."""
    arrays = case.arrays()
    rng = np.random.default_rng([case.seed, 1])
    do, dlse = rng.standard_normal((2, len(arrays[0][0]), case.T, case.V)), rng.standard_normal(arrays[0].shape[:3])
    do, dlse = do.astype(arrays[0].dtype), dlse.astype(np.float64 if case.dtype == "float64" else np.float32)
    try:
        there = [machine.asarray(x) for x in arrays]
        (o, lse), pull = machine.run(vjp, softmax_attention, *there, return_lse=True, **case.arguments)
        found = [o, lse, *pull(machine.asarray(do), machine.asarray(dlse))]
    except NotSupported as error:
        raise Refused from error
    exact = [double(x) for x in (*arrays, do, dlse)]
    *inputs, of_o, of_lse = exact
    own = {name: x for name, x in case.arguments.items() if name != "chunk_size"}
    with np.errstate(all="ignore"):
        o, lse, gradients = literal_attention(*inputs, do=of_o, dlse=of_lse, return_lse=True, **own)
    # What the rounding of a score comes to, which enters every weight as a factor.
    largest = 1 + case.K**-0.5 * float((abs(inputs[0]).sum(-1).max(initial=0)) * abs(inputs[1]).max(initial=0))
    names = ("o", "lse", "dq", "dk", "dv", "dsinks")
    for name, x, wanted in zip(names, map(machine.tohost, found), (o, lse, *gradients)):
        require(x.shape == wanted.shape, f"attention: {name}: shape", f"{x.shape}, expected {wanted.shape}")
        x = double(x)
        with np.errstate(invalid="ignore"):
            same = (x == wanted) | (abs(x - wanted) <= allowed(case, name, wanted, inputs, largest))
        require(same.all(), f"attention: {name}: wrong", f"{x[~same][:3]} for {wanted[~same][:3]}")
    if case.sinks:
        law = "attention: a gradient of a sink of -inf"
        require(not (np.isneginf(case.sinks) & (machine.tohost(found[-1]) != 0)).any(), law)


def allowed(case, name, wanted, inputs, largest):
    """The largest element is what the others are rounded beside."""
    size = abs(inputs[2]).max(initial=0) if name == "o" else largest if name == "lse" else 0
    size = max(size, abs(np.where(np.isfinite(wanted), wanted, 0)).max(initial=0))
    terms = 1 if name in ("o", "lse") else case.T * (1 + largest * case.loudness)
    return 4 * TOLERANCES[case.dtype] * largest * (size + terms * 1e-3) + 1e-30
