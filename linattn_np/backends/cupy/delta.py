"""The delta rules: what a state holds for a token's key is erased before the token is written.

A call goes by the first of `FORWARD_WAYS` that has no reason against it; `explain` tells those of the ways before it.
Gradients go in chunks where `why_not_in_chunks` has no reason against it, and else token by token.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ... import declarations
from .delta_hopper import ScalarOnHopper, why_no_chunks
from .delta_kernels import (
    DPLR,
    GATED_DELTA,
    KDA,
    DeltaBackwardChunks,
    DeltaBackwardStates,
    DeltaChannelForward,
    DeltaDplrForward,
    DeltaForward,
    DeltaRecurrentBackward,
    DeltaRecurrentForward,
    DeltaSumParts,
    GradientKernel,
)
from .elementwise_kernels import sum_arrays
from .gated_backward import heads_at_once
from .gated_kernels import CHANNELS, TILES
from .kernel import FLOATS, no_kernels
from .plan import FLOAT32, Draft, ceil_div, common_bytes

KERNEL_NAMES = {"r": "q", "w": "g"}  # where an operator has another name for an array than the kernels
IN_CHUNKS = "in chunks"  # the way's name in explanations
KEYS = ("q", "k", "a", "b")  # arrays that may have fewer heads than values


def unsupported(problem) -> str | None:
    """Why the kernels cannot compute a problem; None when they can."""
    if problem.sizes["K"] > CHANNELS[-1]:
        return f"K={problem.sizes['K']} is over {CHANNELS[-1]}"
    return no_kernels(problem.dtype, FLOATS)


def why_not_in_chunks(problem, device) -> str | None:
    """Why a call goes token by token on every card; None where it does not."""
    if reason := why_no_chunks(problem):
        return reason
    if forward_kernel(problem, device).shared_bytes > device.shared_per_block:
        return f"the card has no shared memory for {problem.sizes['K']} channels with gates of their own"
    return None


def why_no_gradients_in_chunks(problem, device) -> str | None:
    """The same of gradients."""
    if problem.op in (declarations.KDA, declarations.RWKV7):
        return "every channel has a gate of its own"
    return why_not_in_chunks(problem, device)


def forward_kernel(problem, device):
    """That of chunks."""
    N, H, K, V = problem.shape("N H K V")
    kinds = {declarations.KDA: DeltaChannelForward, declarations.RWKV7: DeltaDplrForward}
    return kinds.get(problem.op, DeltaForward).fitting(problem.dtype, gate_dtype(problem), K, V, N * H, device)


def gate_dtype(problem):
    """In which gates and write strengths reach the kernels."""
    dtypes = {problem[name].dtype for name in (*problem.op.decays, *problem.op.strengths)}
    return dtypes.pop() if len(dtypes) == 1 else FLOAT32


def plan(problem, device):
    against = {}
    for way in FORWARD_WAYS:
        reason = way.why_not(problem, device)
        if reason is None:
            return replace(way.plan(problem, device), against=against)
        against[way.name] = reason


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
        self.gate = gate_dtype(problem)
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

    name = "token by token"

    @staticmethod
    def why_not(problem, device) -> None:
        return None

    @staticmethod
    def plan(problem, device):
        draft = Draft()
        inputs, o, final = Inputs(draft, problem), draft.output(problem), draft.final(problem)
        kernel = recurrent_kernel(inputs, problem.shape("N H"), device)
        launch_recurrent(draft, inputs, kernel, inputs.arrays, initial=draft.initial(problem), o=o, final=final)
        return draft.plan(draft.results(problem, o, final), mode="recurrent", tiles=kernel.tiles)


class InChunks:
    """Delta rules of data in half precision and at most 128 channels: on tensor cores."""

    name, why_not = IN_CHUNKS, staticmethod(why_not_in_chunks)

    @staticmethod
    def plan(problem, device):
        draft = Draft()
        inputs, o, final = Inputs(draft, problem), draft.output(problem), draft.final(problem)
        kernel, (N, H, V) = forward_kernel(problem, device), problem.shape("N H V")
        how = {"scale": problem.scale, "bytes": inputs.common_bytes(o)}
        if inputs.rule != DPLR:
            how |= {"group": inputs.group, "normalized": inputs.normalized}
        how |= {"initial": draft.initial(problem), "final": final}
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
    way = GradientsByToken if why_no_gradients_in_chunks(problem, device) else GradientsInChunks
    return way(problem, device, do, dht).plan()


class Gradients:
    """Of a call, of some heads at a time, by `launch`: what is kept between a way's kernels then takes no more memory
    than MOST times the inputs."""

    MOST = 1
    kernel: GradientKernel  # that which computes most of them

    def __init__(self, problem, device, do, dht):
        self.problem, self.device, draft = problem, device, Draft()
        reason = why_no_gradients_in_chunks(problem, device)
        self.against = {} if reason is None else {IN_CHUNKS: reason}
        self.draft, self.inputs = draft, Inputs(draft, problem)
        self.do, dht = draft.cotangents(problem, do, dht)
        self.states = {"initial": draft.initial(problem), "dht": dht, "dh0": draft.gradient_of_state(problem)}
        self.gradients = {name: draft.like(problem[own]) for name, own in self.inputs.names.items()}

    def plan(self):
        inputs, H, group = self.inputs, self.problem.sizes["H"], self.inputs.group
        read = self.MOST * sum(x.nbytes for x in inputs.arrays.values())
        heads = group * heads_at_once(H // group, self.kernel.kept_bytes(self.problem, inputs), read)
        for first in range(0, H, heads):
            self.launch(first, min(heads, H - first))
        found = tuple(self.gradients.values()), self.draft.stored_gradient(self.problem, self.states["dh0"])
        return self.draft.plan(found, tiles=self.kernel.tiles, against=self.against)

    def of_heads(self, first, heads):
        """(states, do and dv of some heads)."""

        def some(x):
            return None if x is None else x[:, first : first + heads]

        states = {name: some(x) for name, x in self.states.items()}
        return states, {"do_": some(self.do), "dv": some(self.gradients["v"])}

    def common(self, shape, *arrays) -> dict:
        """What kernels are told about a call that reads `arrays` besides its own."""
        inputs, problem = self.inputs, self.problem
        how = {"group": inputs.group, "scale": problem.scale, "normalized": inputs.normalized, "shape": shape}
        return how | {"bytes": inputs.common_bytes(self.do, *arrays)}


class GradientsByToken(Gradients):
    """Of any call, token by token backwards in time, from states that a forward pass keeps."""

    def __init__(self, problem, device, do, dht):
        super().__init__(problem, device, do, dht)
        self.kernel = DeltaRecurrentBackward.fitting(*self.inputs.instance, problem.sizes["K"], device.shared_per_block)

    def launch(self, first, heads):
        """The states that are kept, the gradients of values and of states, parts of all others, and their sums."""
        draft, problem, inputs, kernel = self.draft, self.problem, self.inputs, self.kernel
        arrays, (states, columns) = inputs.of_heads(first, heads), self.of_heads(first, heads)
        B, T, K, V, N = problem.shape("B T K V N")
        shape = replace(draft.shape(problem, chunk=kernel.TOKENS), H=heads)
        tiles, real = ceil_div(V, kernel.BV), problem.compute_dtype
        kept = draft.empty((B, heads, shape.NC, K, V), real)
        before = recurrent_kernel(inputs, (N, heads), self.device)
        launch_recurrent(draft, inputs, before, arrays, kernel.TOKENS, initial=states["initial"], kept=kept)

        parts = draft.empty((len(kernel.kinds), tiles, B, heads, T, K), real)
        token_parts = draft.empty((2, tiles, B, heads, T), real)
        how = self.common(shape) | {"kept": kept, "parts": parts, "token_parts": token_parts}
        draft.launch(kernel, N * heads * tiles, **arrays, **columns, **states, **how)
        for part, kind in enumerate(kernel.kinds):
            total = inputs.some_heads(kind, self.gradients[kind], first, heads)
            add_up(draft, parts[part], total, arrays[kind] if inputs.normalized and kind in "qk" else None)
        for part, name in enumerate(("beta", "g")):
            if name in self.gradients and name not in kernel.kinds:
                total = draft.empty((B, heads, T), real)
                sum_arrays(draft, token_parts[part], total)
                draft.copy(total, self.gradients[name][:, first : first + heads])


class GradientsInChunks(Gradients):
    """Of what is computed in chunks: one kernel goes from chunk to chunk in both directions, and keeps states and what
    else hangs on them; one then computes all chunks at the same time."""

    MOST = (
        3  # 2.6 times are kept at 128 channels and columns: heads in turns would leave multiprocessors without blocks
    )

    def __init__(self, problem, device, do, dht):
        super().__init__(problem, device, do, dht)
        self.kernel = DeltaBackwardChunks(problem.dtype, self.inputs.gate, TILES[problem.sizes["K"] > TILES[0]])

    def launch(self, first, heads):
        draft, problem, inputs, kernel, gradients = self.draft, self.problem, self.inputs, self.kernel, self.gradients
        arrays, (states, columns) = inputs.of_heads(first, heads), self.of_heads(first, heads)
        B, T, K, V, N = problem.shape("B T K V N")
        shape = replace(draft.shape(problem, chunk=kernel.CHUNK), H=heads)
        walk = DeltaBackwardStates.fitting(problem.dtype, inputs.gate, K, V, 2 * N * heads, self.device)
        wide, dtype = kernel.kept_columns(V), problem.dtype
        kept = {"kept": draft.empty((2, B, heads, shape.NC, kernel.BK, wide), dtype)}
        kept |= {name: draft.empty((B, heads, T, wide), dtype) for name in ("X", "w")}
        how = self.common(shape, gradients["q"], gradients["k"], gradients["v"])
        draft.launch(walk, 2 * N * heads * walk.grid(V), **arrays, **columns, **states, **kept, **how)

        found = {name: inputs.some_heads(name, gradients[name], first, heads) for name in "qk"}
        parts = draft.empty((2, B, heads, T, K), FLOAT32) if inputs.group > 1 else None
        for name in {"beta", "g"} & set(gradients):
            x = gradients[name][:, first : first + heads]
            found[name] = x if x.dtype == FLOAT32 else draft.empty((B, heads, T), FLOAT32)
        del arrays["v"], columns["dv"]
        rows = {"d" + name: x if x.ndim == 4 else x[..., None] for name, x in found.items()}
        draft.launch(kernel, B * heads * shape.NC, **arrays, **columns, **kept, **rows, parts=parts, **how)
        if parts is not None:
            for part, name in enumerate("qk"):
                add_up(draft, parts[part][None], found[name], arrays[name] if inputs.normalized else None)
        for name in ("beta", "g"):
            if name in gradients and gradients[name].dtype != FLOAT32:
                draft.copy(found[name], gradients[name][:, first : first + heads])


def add_up(draft, parts, total, normalized):
    """`total` [B, H, T, K] of parts [tiles, B, heads, T, K]; `normalized`: the rows that were divided by their lengths,
    if they were."""
    kernel, (tiles, _, heads, T, K), (B, H) = DeltaSumParts(total.dtype), parts.shape, total.shape[:2]
    sizes = {"B": B, "H": H, "T_": T, "K": K, "group": heads // max(H, 1), "tiles": tiles}
    blocks = ceil_div(B * H * T, kernel.threads // 32)
    draft.launch(kernel, blocks, parts=parts, x=normalized, dx=total, **sizes)
