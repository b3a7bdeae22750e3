"""The planner of gla with gates of channels and of columns: S_t = diag(exp g_t) S_{t-1} diag(exp gv_t) + k_t v_t^T.

The forward pass goes in chunks or token by token, the pullback in chunks. The transposed state obeys the same
recurrence with values in place of keys and gv in place of g. Therefore the same backward kernels run twice, for two
sides: the keys' side reads q, k and g; the values' side, the transposed one, reads do, v and gv in their places.

Sizes: B batch, N sequences, H heads, T tokens, K channels, V columns, NC chunks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from . import aligned_copies, float64, gated, gated_backward, segments
from .arguments import members
from .arithmetic import ceil_div, padded
from .gated_forward import PortableForward, SmallForward
from .gated_kernels import (
    CHANNELS,
    SEGMENT_STATE,
    SINGLE_PASS,
    SPLIT_CHANNELS,
    TILES,
    ForwardInChunks,
    GatedBackwardChannels,
    GatedShortBackward,
    Recurrent,
    channels,
    tile_for,
)
from .kernel import CTYPES, DOUBLE, Kernel, no_kernels
from .plan import FLOAT32, Draft, aligned16
from .segments import PORTABLE, SHORT, BackwardCut

# A class describes a kernel: its annotated fields are the template's arguments, in order; `arguments` the members of
# struct Args, which the compiler checks, with `?` if they may be null.
#
# Arguments: scale: the factor of o; channel: the first channel of a launch; sums: o of the channels of earlier
# launches; segments, computed: of a sequence: all, and how many of them a launch computes; channel_decays,
# column_decays: products of decays of K's channels and V's columns over a chunk (of a segment: sums of gates);
# channel_growth, column_growth: the largest sums of their positive log gates


class ValueGateForward(ForwardInChunks):
    """The forward pass in chunks, BK channels per launch."""

    file = "value_gate/forward"
    arguments = members(
        "strided q k v g gv o, pointers initial final, shape, float64s scale, pointers sums channel_decays "
        "column_decays, int64s channel segments computed bytes"
    )
    shared_memory = ("ValueShared<{schedule}, {dtype}, {gate}, {BK}, {BV}>",)

    @classmethod
    def fitting(cls, schedule, dtype, gate, products, K, V, shared):
        """The instance with the largest tile whose shared memory is at most `shared` bytes.

        Columns are reduced first, then channels; a tile with fewer than K channels has the schedule SPLIT_CHANNELS.
        """
        most_channels, columns = tile_for(K), tile_for(V)
        tiles = [
            (schedule, most_channels, columns),
            (schedule, most_channels, TILES[0]),
            (SPLIT_CHANNELS, TILES[0], columns),
        ]
        if schedule == SPLIT_CHANNELS:
            del tiles[1]
        kernels = [cls(schedule, dtype, gate, products, BK, BV) for schedule, BK, BV in tiles]
        return next(kernel for kernel in kernels if kernel.shared_bytes <= shared)


class ValueGateBackwardScores(Kernel):
    """For one side and each chunk of 64 tokens:

    starts : the queries decayed from the chunk's start
    ends : the keys decayed to its end
    scores, diagonal : the scores of each query with the keys of earlier tokens; the score with its own token's key
    decays : the product of the chunk's decays
    growth : the logarithm of the largest factor by which the chunk's gates let the state grow; 0 if no gate is far
        above 0
    """

    file = "value_gate/backward_scores"
    arguments = members(
        "strided q k g starts ends, pointers scores diagonal decays growth, shape, int64s first heads, float64s scale"
    )
    shared_memory = ("Shared<{dtype}, {gate}, {products}>",)
    threads = 128
    ROW_MULTIPLE: ClassVar[int] = 8  # rows of `starts`, `ends` and `decays` are padded to multiples of it
    constants = (("ROW_MULTIPLE", "ROW_MULTIPLE"),)
    dtype: np.dtype
    gate: np.dtype
    products: int


class ValueGateBackwardStates(Kernel):
    """`chunk_states`: the states before all chunks and the gradients of the states after them. It reads what
    `ValueGateBackwardScores` wrote, `starts` and `ends` of both sides, as q, k, do_ and v; in chunks whose gates let
    the state grow too much it reads the call's own arrays instead (`given_q` ...)."""

    file = "value_gate/backward_states"
    arguments = members(
        "strided q k v do_ given_q given_k given_v given_do g gv, "
        "pointers channel_decays column_decays channel_growth column_growth initial dht chunk_states dh0, shape, "
        "int64s first heads, float64s scale"
    )
    shared_memory = ("Shared<{dtype}, {products}>",)
    threads = 128
    dtype: np.dtype
    gate: np.dtype
    products: int


# -- plans -------------------------------------------------------------------------------------------------------------
def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    if problem.dtype == DOUBLE:
        return float64.unsupported(problem)
    if problem.mode == "recurrent" and problem.sizes["K"] > CHANNELS[-1]:
        return f"K={problem.sizes['K']} is over {CHANNELS[-1]}"
    return no_kernels(problem.dtype, CTYPES)


def plan(problem, device):
    """The plan of a call."""
    if problem.dtype == DOUBLE:
        return float64.plan(problem, device)
    if problem.mode == "chunk" and segments.loads_forward_slowly(problem, device, problem.token_arrays):
        return aligned_copies.plan_on_copies(problem, lambda copies: plan(copies, device))
    draft = Draft()
    o, final, arrays = draft.output(problem), draft.final(problem), operands(draft, problem)
    if problem.mode == "recurrent":
        named = dict(zip(("q", "k", "v", "g", "gv"), arrays, strict=True))
        size = channels(problem.sizes["K"])
        kernel = Recurrent("AfterWrite", problem.dtype, named["g"].dtype, size, gates_columns=True)
        return gated.launch_recurrent(draft, problem, kernel, named, o, final)
    read = problem.replace(arrays=dict(zip(problem.arrays, arrays)))
    if segments.are_small(problem, device):
        return ValueGateSmallPass(draft, read, segments.small_forward_cut(read, device), arrays, o).plan(final)
    return ValueGateForwardPass(draft, read, forward_cut(read, device), arrays, o).plan(final)


def forward_cut(problem, device):
    """How the forward pass is cut into segments: a `segments.ForwardCut`. Both gates have one dtype."""
    gate = segments.gate_dtype(problem)
    instance = problem.dtype, gate, segments.tf32_products(problem), *problem.shape("K V"), device.shared_per_block
    schedule = SPLIT_CHANNELS if problem.sizes["K"] > TILES[-1] else SINGLE_PASS
    kernels = (ValueGateForward.fitting(schedule, *instance) for schedule in (schedule, SEGMENT_STATE))
    return segments.cut_that_fills(problem, device, PORTABLE, *kernels)


class WithColumnGates:
    """What a `gated_forward.ForwardPass` with gates of channels and of columns has besides."""

    gates_columns = True

    def __init__(self, draft, problem, cut, arrays, o):
        *without_gv, self.gv = arrays
        super().__init__(draft, problem, cut, without_gv, o)

    @property
    def rows(self):
        return super().rows | {"gv": self.gv}


class ValueGateSmallPass(WithColumnGates, SmallForward):
    """The forward pass by the kernels for small heads."""


class ValueGateForwardPass(WithColumnGates, PortableForward):
    """The forward pass in chunks."""

    def launch_outputs(self, spans, initial, final):
        self.launch_with_decays(self.cut.kernel, spans, initial, final)

    def launch_summaries(self, parts, summaries, segments, computed):
        spans = self.finer_spans(parts)
        self.launch_with_decays(self.cut.summary, spans, None, *summaries, segments * parts, computed * parts)

    def launch_with_decays(
        self, kernel, spans, initial, final, channel_decays=None, column_decays=None, segments=1, computed=1
    ):
        """Launches `kernel` for the first `computed` of the `segments` of each sequence. It writes the products of a
        segment's decays to `channel_decays` and `column_decays` unless these are None."""
        decays = {"channel_decays": channel_decays, "column_decays": column_decays}
        self.launch(kernel, spans, initial=initial, final=final, **decays, segments=segments, computed=computed)


def plan_vjp(problem, device, do, dht, saved=()):
    """The plan of a pullback. `saved` is always empty: plans of calls save nothing."""
    if problem.dtype == DOUBLE:
        return float64.plan_vjp(problem, device, do, dht, saved)
    if segments.load_slowly([*problem.token_arrays, do], segments.LEAST_PIECE_BACKWARD):
        return aligned_copies.plan_on_copies(problem, lambda copies, *given: plan_vjp(copies, device, *given), do, dht)
    draft = Draft()
    arrays, (do, dht) = operands(draft, problem), draft.cotangents(problem, do, dht)
    gradients, dh0 = tuple(map(draft.like, arrays)), draft.gradient_of_state(problem)
    read = problem.replace(arrays=dict(zip(problem.arrays, arrays)))
    cut = backward_cut(read, device)
    backward = gated_backward.GatedBackwardPass(read, arrays, do, gradients, dht, dh0)
    launch = launch_gradients if cut.way == PORTABLE else gated_backward.LAUNCH_OF_WAY[cut.way]
    tiles, _ = launch(draft, backward, cut)
    results = tuple(draft.cast(dx, x.dtype) for dx, x in zip(gradients, problem.arrays.values(), strict=True))
    return draft.plan((results, draft.stored_gradient(problem, dh0)), tiles=tiles)


def backward_cut(problem, device) -> BackwardCut:
    """How the pullback is computed, if no rows are copied. Both gates have one dtype."""
    if segments.are_small(problem, device):
        return segments.small_backward_cut(problem, device)
    instance = "AfterWrite", problem.dtype, segments.gate_dtype(problem)
    tile = 0 if problem.dtype == FLOAT32 else GatedBackwardChannels.TILE  # see `takes_short_backward`
    fits = max(problem.shape("K V")) <= GatedShortBackward.MOST_GATED  # what the kernel's shared memory holds
    if fits and segments.takes_short_backward(problem, tile):
        return BackwardCut(SHORT, device, kernels=(GatedShortBackward(*instance, gates_columns=True),))
    kernel = GatedBackwardChannels(*instance, segments.tf32_products(problem))
    return BackwardCut(PORTABLE, device, kernels=(kernel,))


def launch_gradients(draft, backward, cut):
    """Launches, for some heads at a time, both sides' scores, the states between chunks, and both sides' gradients.
    Returns what the functions in `gated_backward.LAUNCH_OF_WAY` return."""
    (kernel,), problem, do, (q, k, v, g, gv) = cut.kernels, backward.problem, backward.do, backward.inputs
    B, N, H, K, V = problem.shape("B N H K V")
    tiles = ceil_div(K, kernel.TILE) * ceil_div(V, kernel.TILE)
    elements_per_head = 2 * B * draft.shape(problem, None, kernel.CHUNK).NC * tiles * kernel.TILE**2
    input_bytes = sum(x.nbytes for x in backward.inputs)
    heads = gated_backward.heads_at_once(H, elements_per_head * kernel.stored.itemsize, input_bytes)
    chunk_states = draft.empty((max(1, heads * elements_per_head),), kernel.stored)
    all_zero = problem.initial_state is None and backward.dht is None and problem.spans.longest <= kernel.CHUNK
    if all_zero:
        draft.fill(chunk_states)
    states = {"initial": draft.initial(problem), "dht": backward.dht, "dh0": backward.dh0, "chunk_states": chunk_states}
    between_chunks = ValueGateBackwardStates(kernel.dtype, kernel.gate, kernel.products)
    dq, dk, dv, dg, dgv = backward.gradients
    keys = ValueGateSide(draft, problem, kernel, heads, {"q": q, "k": k, "g": g}, {"dq": dq, "dk": dk, "dg": dg})
    written = {"dq": None, "dk": dv, "dg": dgv}
    values = ValueGateSide(draft, problem, kernel, heads, {"q": do, "k": v, "g": gv}, written, transposed=True)
    for first in range(0, H, heads):
        group = {"first": first, "heads": min(heads, H - first)}
        blocks = B * keys.shape.NC * group["heads"]
        keys.launch_scores(blocks, **group)
        values.launch_scores(blocks, **group)
        read = {"q": keys.starts, "k": keys.ends, "v": values.ends, "do_": values.starts}
        read |= {"channel_decays": keys.scores["decays"], "column_decays": values.scores["decays"]}
        read |= {"channel_growth": keys.growth, "column_growth": values.growth}
        read |= {"given_q": q, "given_k": k, "given_v": v, "given_do": do, "g": g, "gv": gv}
        common = {"shape": keys.shape, "scale": problem.scale} | group
        if not all_zero:
            draft.launch(between_chunks, 2 * N * group["heads"] * tiles, **read, **states, **common)
        keys.launch_gradients(blocks, values, chunk_states=chunk_states, **group)
        values.launch_gradients(blocks, keys, chunk_states=chunk_states, **group)
    return kernel.tiles, None


class ValueGateSide:
    """The arrays and launches of one side: the keys' side, or, if `transposed`, the values' side.

    read : {"q", "k", "g"}: the arrays that the kernels read in these places
    written : {"dq", "dk", "dg"}: memory for their gradients; dq is None on the values' side, where do is in q's place
    starts, ends, scores, growth : what `ValueGateBackwardScores` writes for the other kernels
    """

    def __init__(self, draft, problem, kernel, heads, read, written, transposed=False):
        self.draft, self.read, self.written = draft, read, written
        B, T, K, V = problem.shape("B T K V")
        self.K, self.V = (V, K) if transposed else (K, V)
        self.shape = draft.shape(problem, None, kernel.CHUNK, K=self.K, V=self.V)
        stored, chunks, width = (
            kernel.stored,
            (B, heads, self.shape.NC),
            padded(self.K, ValueGateBackwardScores.ROW_MULTIPLE),
        )
        self.starts, self.ends = (draft.empty((B, heads, T, width), stored) for _ in range(2))
        scores = draft.empty((*chunks, kernel.CHUNK, kernel.CHUNK), stored)
        diagonal = draft.empty((*chunks, kernel.CHUNK), FLOAT32)
        self.scores = {"scores": scores, "diagonal": diagonal, "decays": draft.empty((*chunks, width), FLOAT32)}
        self.growth = draft.empty(chunks, FLOAT32)
        self.kernel = replace(kernel, columns="GatedTurned" if transposed else "Gated")
        rows = [x for x in (*read.values(), *self.written.values()) if x is not None]
        assert not self.shape.all_chunks or aligned16(*rows)  # `plan_vjp` has others copied
        self.common = {"shape": self.shape, "scale": problem.scale}

    def launch_scores(self, blocks, **group):
        """Launches this side's kernel of scores; `group`: the first head and the number of heads."""
        kernel = ValueGateBackwardScores(self.kernel.dtype, self.kernel.gate, self.kernel.products)
        written = self.scores | {"starts": self.starts, "ends": self.ends, "growth": self.growth}
        self.draft.launch(kernel, blocks, **self.read, **written, **self.common, **group)

    def launch_gradients(self, blocks, other, **args):
        """Launches the kernel of dq, dk and dg of this side, which also reads what the `other` side's kernel of scores
        wrote; `args`: the stored states and the group of heads."""
        blocks *= ceil_div(self.K, self.kernel.TILE)
        arrays = self.read | self.written | other.scores | {"v": other.ends, "do_": other.starts}
        arrays |= {"given_do": other.read["q"], "given_v": other.read["k"], "gv": other.read["g"]}
        arrays |= {"row_growth": self.growth, "column_growth": other.growth}
        self.draft.launch(self.kernel, blocks, **arrays, **self.common, **args)


def operands(draft, problem):
    """The call's arrays (q, k, v, g, gv), with both gates in one dtype: float32 if theirs differ."""
    q, k, v, g, gv = draft.inputs(problem)
    dtype = g.dtype if g.dtype == gv.dtype else FLOAT32
    gates = (draft.cast(x, dtype, f"{name}: in float32, as the other gate") for name, x in (("g", g), ("gv", gv)))
    return q, k, v, *gates
