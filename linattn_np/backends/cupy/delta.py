"""The delta rules: what a state holds for a token's key is erased before the token is written.

A call goes by the first of `FORWARD_WAYS` that takes it, the last of which takes every call, token by token. Gradients
go token by token backwards in time, from states that a forward pass keeps. A block has some columns, so that sums over
columns are parts of blocks, which a kernel adds up.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...array_kinds import BFLOAT16
from .delta_hopper import ScalarOnHopper
from .delta_kernels import (
    DPLR,
    GATED_DELTA,
    KDA,
    DeltaForward,
    DeltaRecurrentBackward,
    DeltaRecurrentForward,
    DeltaSumParts,
)
from .elementwise_kernels import sum_of_parts
from .gated_backward import heads_at_once
from .gated_kernels import CHANNELS, TILES
from .kernel import FLOATS, no_kernels
from .plan import FLOAT32, Draft, ceil_div, common_bytes

KERNEL_NAMES = {"r": "q", "w": "g"}  # where an operator has another name for an array than the kernels
KEYS = ("q", "k", "a", "b")  # arrays that may have fewer heads than values


def unsupported(problem) -> str | None:
    """Why the kernels cannot compute a problem; None when they can."""
    if problem.sizes["K"] > CHANNELS[-1]:
        return f"K={problem.sizes['K']} is over {CHANNELS[-1]}"
    return no_kernels(problem.dtype, FLOATS)


def plan(problem, device):
    return next(way for way in FORWARD_WAYS if way.takes(problem, device)).plan(problem, device)


class Inputs:
    """The arrays of a call, or of a step, by the kernels' names. A number that a token has is a row of one. `group`
    heads of values share a head of keys."""

    def __init__(self, draft, problem):
        self.draft, self.problem, axes = draft, problem, problem.op.arrays
        self.names = {KERNEL_NAMES.get(name, name): name for name in axes}
        gates = "K" in axes.get(self.names.get("g"), "").split()
        self.rule = DPLR if "a" in axes else KDA if gates else GATED_DELTA
        self.group = max(1, problem.sizes["H"] // max(1, problem[next(iter(axes))].shape[1]))
        self.normalized = problem.options.get("qk_l2norm", False)
        self.arrays = {name: self.rows_of(own) for name, own in self.names.items()}
        dtypes = {self.arrays[name].dtype for name in ("g", "beta") if name in self.arrays}
        self.gate = FLOAT32 if len(dtypes) > 1 else dtypes.pop()
        for name in ("g", "beta"):
            if name in self.arrays:
                self.arrays[name] = draft.cast(self.arrays[name], self.gate, f"{name}: in float32, as other gates")
        if "g" not in self.arrays:  # one number for all tokens
            self.arrays["g"] = draft.table(np.zeros((1,) * self.arrays["beta"].ndim, self.gate))

    def rows_of(self, name):
        x, last = self.problem[name], self.problem.op.arrays[name].split()[-1]
        return self.draft.in_rows(x, name) if last in "KV" else x[..., None]

    @property
    def instance(self) -> tuple:
        """The first template arguments of a kernel."""
        return self.rule, self.problem.dtype, self.gate

    def common_bytes(self, *more) -> int:
        """How many bytes copies may move at once."""
        copied = [x for name, x in self.arrays.items() if name != "beta" and (name != "g" or self.rule != GATED_DELTA)]
        return common_bytes(*copied, *more)

    def of_heads(self, first, heads) -> dict:
        """The arrays of some heads of values."""
        return {name: self.some_heads(name, x, first, heads) for name, x in self.arrays.items()}

    def some_heads(self, name, x, first, heads):
        if x.shape[1] == 1:
            return x
        by = self.group if name in KEYS else 1
        return x[:, first // by : (first + heads) // by]


# -- forward -----------------------------------------------------------------------------------------------------------
class TokenByToken:
    """Any call, by one kernel."""

    @staticmethod
    def takes(problem, device) -> bool:
        return True

    @staticmethod
    def plan(problem, device):
        draft = Draft()
        inputs, o, final = Inputs(draft, problem), draft.output(problem), draft.final(problem)
        kernel = recurrent_kernel(inputs, problem.shape("N H"), device)
        launch_recurrent(draft, inputs, kernel, inputs.arrays, initial=draft.initial(problem), o=o, final=final)
        return draft.plan(draft.results(problem, o, final), mode="recurrent", tiles=kernel.tiles)


class InChunks:
    """bfloat16 data, a gate for all channels of a token or none, and heads of at most 128 channels: on tensor cores."""

    @staticmethod
    def takes(problem, device) -> bool:
        gates = problem.op.arrays.get("g", "B H T")
        fits = problem.op.strengths and gates == "B H T" and problem.dtype == BFLOAT16
        return bool(fits) and problem.sizes["K"] <= TILES[-1] and problem.mode != "recurrent"

    @staticmethod
    def plan(problem, device):
        draft = Draft()
        inputs, o, final = Inputs(draft, problem), draft.output(problem), draft.final(problem)
        N, H, K, V = problem.shape("N H K V")
        kernel = DeltaForward.fitting(inputs.gate, K, V, N * H, device)
        how = {"group": inputs.group, "scale": problem.scale, "normalized": inputs.normalized}
        how |= {"bytes": inputs.common_bytes(o), "initial": draft.initial(problem), "final": final}
        draft.launch(kernel, N * H * kernel.grid(V), **inputs.arrays, **how, o=o, shape=draft.shape(problem))
        return draft.plan(draft.results(problem, o, final), mode="chunk", tiles=kernel.tiles)


FORWARD_WAYS = (ScalarOnHopper, InChunks, TokenByToken)


def recurrent_kernel(inputs, pairs, device):
    K, V = inputs.problem.shape("K V")
    return DeltaRecurrentForward.fitting(*inputs.instance, K, V, pairs[0] * pairs[1], device.multiprocessors)


def launch_recurrent(draft, inputs, kernel, arrays, every=None, **written):
    """Of all heads of `arrays`. `every`: how many tokens lie between states that are kept."""
    problem, (heads, V) = inputs.problem, arrays["v"].shape[1::2]
    shape = replace(draft.shape(problem, chunk=every), H=heads)
    blocks = problem.sizes["N"] * heads * ceil_div(V, kernel.BV)
    how = {"group": inputs.group, "scale": problem.scale, "normalized": inputs.normalized}
    how |= {"bytes": inputs.common_bytes(), "every": every or 0}
    draft.launch(kernel, blocks, **arrays, **written, **how, shape=shape)


# -- gradients ---------------------------------------------------------------------------------------------------------
def plan_vjp(problem, device, do, dht, saved=()):
    """(gradients in the order of the arrays, that of the initial state or None)."""
    draft = Draft()
    inputs, (do, dht) = Inputs(draft, problem), draft.cotangents(problem, do, dht)
    H, K = problem.shape("H K")
    kernel = DeltaRecurrentBackward.fitting(*inputs.instance, K, device.shared_per_block)
    states = {"initial": draft.initial(problem), "dht": dht, "dh0": draft.gradient_of_state(problem)}
    gradients = {name: draft.like(problem[own]) for name, own in inputs.names.items()}
    read = sum(x.nbytes for x in inputs.arrays.values())
    heads = inputs.group * heads_at_once(H // inputs.group, kernel.kept_bytes(problem, inputs), read)
    for first in range(0, H, heads):
        launch_gradients(draft, inputs, kernel, device, do, states, gradients, first, min(heads, H - first))
    found = tuple(gradients.values())
    return draft.plan((found, draft.stored_gradient(problem, states["dh0"])), tiles=kernel.tiles)


def launch_gradients(draft, inputs, kernel, device, do, states, gradients, first, heads):
    """Those of some heads: the states that are kept, the gradients of values and of states, parts of all others, and
    their sums."""
    problem, arrays = inputs.problem, inputs.of_heads(first, heads)
    B, T, K, V, N = problem.shape("B T K V N")
    some = {name: x if x is None else x[:, first : first + heads] for name, x in states.items()}
    shape = replace(draft.shape(problem, chunk=kernel.TOKENS), H=heads)
    tiles, real = ceil_div(V, kernel.BV), problem.compute_dtype
    kept = draft.empty((B, heads, shape.NC, K, V), real)
    before = recurrent_kernel(inputs, (N, heads), device)
    launch_recurrent(draft, inputs, before, arrays, kernel.TOKENS, initial=some["initial"], kept=kept)

    parts = draft.empty((len(kernel.kinds), tiles, B, heads, T, K), real)
    token_parts = draft.empty((2, tiles, B, heads, T), real)
    read, written = {"do_": do[:, first : first + heads]}, {"dv": gradients["v"][:, first : first + heads]}
    how = {"group": inputs.group, "scale": problem.scale, "normalized": inputs.normalized, "shape": shape}
    how |= {"bytes": inputs.common_bytes(do), "kept": kept, "parts": parts, "token_parts": token_parts}
    draft.launch(kernel, N * heads * tiles, **arrays, **read, **written, **some, **how)
    for kind, part in zip(kernel.kinds, range(len(kernel.kinds))):
        total = inputs.some_heads(kind, gradients[kind], first, heads)
        add_up(draft, parts[part], total, arrays[kind] if inputs.normalized and kind in "qk" else None)
    for name, part in zip(("beta", "g"), range(2)):
        if name in gradients and name not in kernel.kinds:
            total = draft.empty((B, heads, T), real)
            sum_of_parts(draft, token_parts[part], total)
            draft.copy(total, gradients[name][:, first : first + heads])


def add_up(draft, parts, total, normalized):
    """`total` [B, H, T, K] of parts [tiles, B, heads, T, K]; `normalized`: the rows that were divided by their lengths,
    if they were."""
    kernel, (tiles, _, heads, T, K), (B, H) = DeltaSumParts(total.dtype), parts.shape, total.shape[:2]
    sizes = {"B": B, "H": H, "T_": T, "K": K, "group": heads // max(H, 1), "tiles": tiles}
    blocks = ceil_div(B * H * T, kernel.threads // 32)
    draft.launch(kernel, blocks, parts=parts, x=normalized, dx=total, **sizes)
