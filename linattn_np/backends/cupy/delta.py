"""Plans of the delta rules, which erase what the state holds for a token's key before they write the token.

A call is planned by the first of `FORWARD_WAYS` whose `why_not` gives no reason; `explain` shows the reasons against
the ways before it. Gradients are computed in chunks unless `why_no_gradients_in_chunks` gives a reason, else token by
token.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ... import declarations
from .delta_hopper import ScalarOnHopper, why_no_chunks
from .delta_kernels import (
    DPLR,
    GATED_DELTA,
    DeltaBackwardChunks,
    DeltaRecurrentBackward,
    DeltaSumParts,
    DplrBackwardChunks,
    GradientKernel,
    KdaBackwardChunks,
)
from .delta_segments import Cut, CutByToken, chunk_kernels, gate_dtype, launch_by_token, rule_of
from .elementwise_kernels import sum_arrays
from .gated_backward import heads_at_once
from .gated_kernels import CHANNELS, TILES
from .kernel import FLOATS, no_kernels
from .plan import FLOAT32, Draft, ceil_div, common_bytes

KERNEL_NAMES = {"r": "q", "w": "g"}  # an operator's name of an array -> the kernels' name, where they differ
BYTES = np.dtype(np.uint8)
IN_CHUNKS = "in chunks"  # the way's name in explanations
KEYS = ("q", "k", "a", "b")  # arrays that may have fewer heads than values


def unsupported(problem) -> str | None:
    """Why the kernels cannot compute a problem; None when they can."""
    if problem.sizes["K"] > CHANNELS[-1]:
        return f"K={problem.sizes['K']} is over {CHANNELS[-1]}"
    return no_kernels(problem.dtype, FLOATS)


def why_not_in_chunks(problem, device) -> str | None:
    """Why the chunk kernels for every card cannot compute a call; None if they can."""
    return why_no_chunks(problem) or no_room(chunk_kernels(problem, device, gradient=False), problem, device)


def no_room(kernels, problem, device) -> str | None:
    """Why a card lacks the shared memory for any of these kernels; None if it does not."""
    if max(kernel.shared_bytes for kernel in kernels) > device.shared_per_block:
        return f"the card has no shared memory for {problem.sizes['K']} channels with gates of their own"
    return None


def why_no_gradients_in_chunks(problem, device) -> str | None:
    """Why the chunk kernels cannot compute the gradients of a call; None if they can."""
    return why_no_chunks(problem) or no_room(chunk_kernels(problem, device, gradient=True), problem, device)


def plan(problem, device):
    reasons = {}
    for way in FORWARD_WAYS:
        reason = way.why_not(problem, device)
        if reason is None:
            return replace(way.plan(problem, device), against=reasons)
        reasons[way.name] = reason


class Inputs:
    """The arrays of a call, or of a step, by the kernels' names; a scalar per token and head is a row of length 1.

    `group` value heads share a key head.
    """

    def __init__(self, draft, problem):
        self.draft, self.problem, axes = draft, problem, problem.op.arrays
        self.names = {KERNEL_NAMES.get(name, name): name for name in axes}
        self.rule = rule_of(problem.op)
        self.group = max(1, problem.sizes["H"] // max(1, problem[next(iter(axes))].shape[1]))
        self.normalized = problem.options.get("qk_l2norm", False)
        self.arrays = {name: self.rows_of(name_in_call) for name, name_in_call in self.names.items()}
        self.gate = gate_dtype(problem)
        for name in ("g", "beta"):
            if name in self.arrays:
                self.arrays[name] = draft.cast(self.arrays[name], self.gate, f"{name}: in float32, as other gates")
        if "g" not in self.arrays:  # without gates, a log decay of 0 is broadcast to all tokens
            self.arrays["g"] = draft.table(np.zeros((1,) * self.arrays["beta"].ndim, self.gate))

    def rows_of(self, name):
        """An array with rows of K or V numbers, or of 1 for a scalar per token and head."""
        x, last = self.problem[name], self.problem.op.arrays[name].split()[-1]
        return self.draft.in_rows(x, name) if last in "KV" else x[..., None]

    @property
    def instance(self) -> tuple:
        """The first template arguments of a kernel: rule, dtype of data, dtype of gates."""
        return self.rule, self.problem.dtype, self.gate

    def common_bytes(self, *more) -> int:
        """The largest access, in bytes, for which all rows (also those of `more`) are aligned."""
        copied = [x for name, x in self.arrays.items() if name != "beta" and (name != "g" or self.rule != GATED_DELTA)]
        return common_bytes(*copied, *more)

    def common(self, shape, *arrays) -> dict:
        """The arguments that all kernels of a call take; `arrays`: those they access by rows beside the inputs."""
        how = {"group": self.group, "scale": self.problem.scale, "normalized": self.normalized, "shape": shape}
        return how | {"bytes": self.common_bytes(*arrays)}

    def of_heads(self, first, heads) -> dict:
        """The arrays of `heads` value heads from head `first` on."""
        return {name: self.some_heads(name, x, first, heads) for name, x in self.arrays.items()}

    def some_heads(self, name, x, first, heads):
        """The part of array `name` that belongs to these value heads: their key heads, if it is one of KEYS."""
        if x.shape[1] == 1:
            return x
        by = self.group if name in KEYS else 1
        return x[:, first // by : (first + heads) // by]


# -- forward -----------------------------------------------------------------------------------------------------------
class TokenByToken:
    """The way that can compute every call: one kernel, token by token."""

    name = "token by token"

    @staticmethod
    def why_not(problem, device) -> None:
        return None

    @staticmethod
    def plan(problem, device):
        draft = Draft()
        inputs, o, final = Inputs(draft, problem), draft.output(problem), draft.final(problem)
        cut = CutByToken(problem, device, inputs.instance, problem.sizes["H"])
        read = inputs.arrays | inputs.common(cut.shape(draft)) | {"initial": draft.initial(problem)}
        launch_by_token(draft, cut.forward, read | cut.launch_starts(draft, read), o=o, final=final)
        return draft.plan(draft.results(problem, o, final), mode="recurrent", tiles=cut.forward.tiles | cut.tiles)


class InChunks:
    """The way for half-precision data and at most 128 channels: chunks, on tensor cores.

    A kernel prepares all chunks in parallel; another goes from chunk to chunk. Heads are taken in groups, so that what
    is passed between both takes at most MOST times the inputs' memory.
    """

    MOST = 2  # 64 channels and columns need 1.7; groups of heads would leave multiprocessors without blocks
    name = IN_CHUNKS
    why_not = staticmethod(why_not_in_chunks)

    @staticmethod
    def plan(problem, device):
        draft = Draft()
        inputs, o, final = Inputs(draft, problem), draft.output(problem), draft.final(problem)
        cut = Cut(problem, device)
        prepare, initial = cut.prepare, draft.initial(problem)
        (B, H), group, shape = problem.shape("B H"), inputs.group, cut.shape(draft)
        bytes_of_a_head = B * shape.NC * cut.walk.prepared_bytes
        most_bytes = InChunks.MOST * sum(x.nbytes for x in inputs.arrays.values())
        at_once = group * heads_at_once(H // group, group * bytes_of_a_head, most_bytes)
        prepared = draft.empty((at_once * bytes_of_a_head,), BYTES)
        of_prepare = {"w_scale": 1.0, "prepared": prepared, "bytes": inputs.common_bytes()}
        if inputs.rule != DPLR:
            of_prepare |= {"group": group, "normalized": inputs.normalized}
        of_scan = {"scale": problem.scale, "prepared": prepared, "bytes": inputs.common_bytes(o)}
        for first in range(0, H, at_once):
            heads = slice(first, min(H, first + at_once))
            of_heads = replace(shape, H=heads.stop - first)
            arrays = inputs.of_heads(first, of_heads.H)
            states = {name: None if x is None else x[:, heads] for name, x in (("initial", initial), ("final", final))}
            v = arrays.pop("v")
            draft.launch(prepare, B * of_heads.H * shape.NC, **arrays, **of_prepare, shape=of_heads)
            cut.launch_walk(draft, of_heads, {"v": v} | of_scan, states, {"o": o[:, heads]})
        return draft.plan(draft.results(problem, o, final), mode="chunk", tiles=cut.walk.tiles | cut.tiles)


FORWARD_WAYS = (ScalarOnHopper, InChunks, TokenByToken)


# -- gradients ---------------------------------------------------------------------------------------------------------
def plan_vjp(problem, device, do, dht, saved=()):
    """The plan of the pullback: (gradients in the order of the arrays, the initial state's gradient or None)."""
    ways = {declarations.KDA: KdaGradientsInChunks, declarations.RWKV7: DplrGradientsInChunks}
    in_chunks = ways.get(problem.op, GradientsInChunks)
    way = GradientsByToken if why_no_gradients_in_chunks(problem, device) else in_chunks
    return way(problem, device, do, dht).plan()


class Gradients:
    """The plan of a call's gradients.

    A subclass's `launch` adds the launches for some heads to the draft. Its `bytes_of_heads` are those that kernels
    pass to each other, for the heads of values that share a head of keys.

    Heads are taken in groups, so that the arrays passed between kernels take at most MOST times the inputs' memory.
    """

    MOST = 1
    kernel: GradientKernel  # the last kernel of a group, which computes most gradients
    tiles: dict  # the sizes that `explain` shows

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
        most_bytes = self.MOST * sum(x.nbytes for x in inputs.arrays.values())
        heads = group * heads_at_once(H // group, self.bytes_of_heads(), most_bytes)
        for first in range(0, H, heads):
            self.launch(first, min(heads, H - first))
        results = tuple(self.gradients.values()), self.draft.stored_gradient(self.problem, self.states["dh0"])
        return self.draft.plan(results, tiles=self.tiles, against=self.against)

    def of_heads(self, first, heads):
        """(initial, dht and dh0; do and dv): the parts of `heads` value heads from head `first` on."""

        def part(x):
            return None if x is None else x[:, first : first + heads]

        states = {name: part(x) for name, x in self.states.items()}
        return states, {"do_": part(self.do), "dv": part(self.gradients["v"])}


class GradientsByToken(Gradients):
    """The gradients of any call, token by token backwards in time, from states that a forward pass stores."""

    def __init__(self, problem, device, do, dht):
        super().__init__(problem, device, do, dht)
        self.kernel = DeltaRecurrentBackward.fitting(*self.inputs.instance, problem.sizes["K"], device.shared_per_block)
        self.tiles = self.kernel.tiles

    def bytes_of_heads(self):
        return self.kernel.kept_bytes(self.problem, self.inputs)

    def launch(self, first, heads):
        """Launches the forward pass, the gradients, and the sums of those that several blocks compute parts of."""
        draft, problem, inputs, kernel = self.draft, self.problem, self.inputs, self.kernel
        arrays, (states, columns) = inputs.of_heads(first, heads), self.of_heads(first, heads)
        B, T, K, V = problem.shape("B T K V")
        cut = CutByToken(problem, self.device, inputs.instance, heads, kernel)
        self.tiles, shape = kernel.tiles | cut.tiles, cut.shape(draft)
        tiles, real = ceil_div(V, kernel.BV), problem.compute_dtype
        dv = columns.pop("dv")
        read = arrays | inputs.common(shape, self.do) | columns | states
        read |= cut.launch_starts(draft, read)
        kept = draft.empty((B, heads, shape.NC, K, V), real)
        launch_by_token(draft, cut.forward, read, kept=kept)

        parts = draft.empty((len(kernel.kinds), tiles, B, heads, T, K), real)
        token_parts = draft.empty((2, tiles, B, heads, T), real)
        launch_by_token(draft, kernel, read, dv=dv, kept=kept, parts=parts, token_parts=token_parts)
        for part, kind in enumerate(kernel.kinds):
            total = inputs.some_heads(kind, self.gradients[kind], first, heads)
            add_up(draft, parts[part], total, arrays[kind] if inputs.normalized and kind in "qk" else None)
        for part, name in enumerate(("beta", "g")):
            if name in self.gradients and name not in kernel.kinds:
                total = draft.empty((B, heads, T), real)
                sum_arrays(draft, token_parts[part], total)
                draft.copy(total, self.gradients[name][:, first : first + heads])


class GradientsInChunks(Gradients):
    """The gradients in chunks.

    A first kernel prepares all chunks in parallel. A second goes from chunk to chunk in both directions, and stores the
    states, what depends on them, and dv. The last computes the other gradients of all chunks in parallel.
    """

    MOST = 6  # 128 channels and columns need 5.1; groups of heads would leave multiprocessors without blocks
    residuals = ("e", "w")  # the last kernel's names of a token's residual, and of its gradient

    def __init__(self, problem, device, do, dht):
        super().__init__(problem, device, do, dht)
        self.kernel, self.cut = self.last_kernel(), Cut(problem, device, gradient=True)
        self.walk, self.tiles = self.cut.walk, self.kernel.tiles | self.cut.tiles

    def last_kernel(self):
        return DeltaBackwardChunks(self.problem.dtype, self.inputs.gate, TILES[self.problem.sizes["K"] > TILES[0]])

    def bytes_of_heads(self):
        inputs = self.inputs
        return self.walk.kept_bytes(self.problem, inputs.group) + self.kernel.parts_bytes(self.problem, inputs)

    def launch(self, first, heads):
        draft, problem, inputs, walk, prepare = self.draft, self.problem, self.inputs, self.walk, self.cut.prepare
        arrays, (states, columns) = inputs.of_heads(first, heads), self.of_heads(first, heads)
        B, T, K, V = problem.shape("B T K V")
        shape = replace(self.cut.shape(draft), H=heads)
        channels, wide = walk.kept_size(K), walk.kept_size(V)
        v, prepared = arrays.pop("v"), draft.empty((B * heads * shape.NC * walk.prepared_bytes,), BYTES)
        kept = draft.empty((2, B, heads, shape.NC, channels, wide), problem.dtype)
        numbers = 2 - walk.two  # of a residual
        residual, dresidual = (draft.empty((B, heads, T, n * wide), problem.dtype) for n in (numbers, 1))

        how = inputs.common(shape, self.do, *(x for x in self.gradients.values() if x.ndim == 4))
        of_prepare = {name: x for name, x in how.items() if name in prepare.names} | {"w_scale": problem.scale}
        draft.launch(prepare, B * heads * shape.NC, **arrays, **of_prepare, prepared=prepared)
        written = {"kept": kept, "residual": residual, "dresidual": dresidual, "dv": columns.pop("dv")}
        read = {"v": v, "prepared": prepared} | columns | {name: how[name] for name in ("scale", "bytes")}
        self.cut.launch_walk(draft, shape, read, states, written)
        found = dict(zip(self.residuals, (residual, dresidual), strict=True)) | {"kept": kept}
        arguments = arrays | columns | found | how | {"v": v}
        arguments = {name: x for name, x in arguments.items() if name in self.kernel.names}
        self.launch_last(first, heads, shape, arguments)

    def launch_last(self, first, heads, shape, arguments):
        draft, problem, inputs, kernel, gradients = self.draft, self.problem, self.inputs, self.kernel, self.gradients
        B, T, K = problem.shape("B T K")
        float32_gradients = {name: inputs.some_heads(name, gradients[name], first, heads) for name in "qk"}
        parts = draft.empty((2, B, heads, T, K), FLOAT32) if inputs.group > 1 else None
        for name in {"beta", "g"} & set(gradients):
            x = gradients[name][:, first : first + heads]
            float32_gradients[name] = x if x.dtype == FLOAT32 else draft.empty((B, heads, T), FLOAT32)
        rows = {"d" + name: x if x.ndim == 4 else x[..., None] for name, x in float32_gradients.items()}
        draft.launch(kernel, B * heads * shape.NC, **arguments, **rows, parts=parts)
        if parts is not None:
            self.add_parts(parts, first, heads)
        for name in ("beta", "g"):
            if name in gradients and gradients[name].dtype != FLOAT32:
                draft.copy(float32_gradients[name], gradients[name][:, first : first + heads])

    def add_parts(self, parts, first, heads):
        """Launches the sums of dq and dk over the heads of values that share a head of keys."""
        for part, name in enumerate("qk"):
            total = self.inputs.some_heads(name, self.gradients[name], first, heads)
            x = self.inputs.some_heads(name, self.inputs.arrays[name], first, heads)
            add_up(self.draft, parts[part][None], total, x if self.inputs.normalized else None)


class DplrGradientsInChunks(GradientsInChunks):
    """The same for rwkv7, whose last kernel also takes gates of channels and vectors a and b."""

    residuals = ("u", "du")

    def last_kernel(self):
        return DplrBackwardChunks(self.problem.dtype, self.inputs.gate)

    def launch_last(self, first, heads, shape, arguments):
        gradients = {"d" + name: self.gradients[name][:, first : first + heads] for name in ("q", "k", "a", "b", "g")}
        blocks = shape.B * heads * shape.NC * self.walk.kept_size(shape.K) // self.kernel.KEPT
        self.draft.launch(self.kernel, blocks, **arguments, **gradients)


class KdaGradientsInChunks(GradientsInChunks):
    """The same for kda. A block has 64 channels: where queries and keys are divided by their lengths, their gradients
    are float32 parts, as they are where heads of values share them, and another kernel adds them up."""

    def last_kernel(self):
        return KdaBackwardChunks(self.problem.dtype, self.inputs.gate)

    def launch_last(self, first, heads, shape, arguments):
        draft, inputs, (B, T, K) = self.draft, self.inputs, self.problem.shape("B T K")
        in_parts = inputs.group > 1 or inputs.normalized
        parts = draft.empty((2, B, heads, T, K), FLOAT32) if in_parts else None
        own = {name: self.gradients[name][:, first : first + heads] for name in ("g", "beta")}
        dtypes = {"g": inputs.gate, "beta": FLOAT32}
        found = {name: x if x.dtype == dtypes[name] else draft.empty(x.shape, dtypes[name]) for name, x in own.items()}
        written = {"parts": parts, "dg": found["g"], "dbeta": found["beta"][..., None]}
        for name in "qk":
            written["d" + name] = None if in_parts else self.gradients[name][:, first : first + heads]
        blocks = B * heads * shape.NC * self.walk.kept_size(K) // self.kernel.KEPT
        draft.launch(self.kernel, blocks, **arguments, **written)
        if in_parts:
            self.add_parts(parts, first, heads)
        for name, x in own.items():
            if found[name] is not x:
                draft.copy(found[name], x)


def add_up(draft, parts, total, normalized):
    """Launches total [B, H, T, K] = the sum of parts [tiles, B, heads, T, K] over tiles and heads of a group.

    `normalized`: q or k, if the forward pass divided its rows by their norms; the kernel then applies the pullback of
    this division to the sum. None otherwise.
    """
    kernel, (tiles, _, heads, T, K), (B, H) = DeltaSumParts(total.dtype), parts.shape, total.shape[:2]
    sizes = {"B": B, "H": H, "T_": T, "K": K, "group": heads // max(H, 1), "tiles": tiles}
    blocks = ceil_div(B * H * T, kernel.threads // 32)
    draft.launch(kernel, blocks, parts=parts, x=normalized, dx=total, **sizes)
