"""The delta rule by Hopper's own kernels: without gates, or with one that the channels of a token share.

A *walk* goes from chunk to chunk of a sequence, or of a segment of it. `delta_segments` says what F, G and G' are, by
which segments are summarised.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

from ...declarations import DELTA_RULE, GATED_DELTA_RULE
from .arguments import members
from .arithmetic import ceil_div
from .delta_kernels import sum_parts
from .delta_segments import CutInChunks, SegmentCut, join_segments, join_time, memory_of_segments
from .gated_kernels import PANEL, TILES
from .kernel import DOUBLE, HopperKernel, Kernel
from .plan import FLOAT32, Draft, TensorMap, mappable
from .segments import mappable_once_copied

# A class describes a kernel: its annotated fields are the template's arguments, in order; `arguments` the members of
# struct Args, which the compiler checks, with `?` if they may be null.
#
# Arguments: scale: the factor of o; dht: the gradient of the final state; others: see `delta_kernels`


class DeltaScalarForwardSm90(HopperKernel):
    """o and the final state, by a block for BV columns of every (sequence, head of values). In `arguments`,
    "tensor_maps+strided" are arrays both as tensor maps and as pointers with strides. group: heads of values that share
    a head of q and k; state_k, state_v: strides of the states along K and V; wide_gate, wide_beta: whether g and beta
    are float32; lengths: what `inverse_lengths` returns."""

    file = "delta/sm90/scalar_forward"
    arguments = members(
        "tensor_maps+strided q k v o, strided? g, strided beta, strided? lengths, shape, "
        "pointers? initial final starts, int64s P group state_k state_v wide_gate wide_beta, float64s scale"
    )
    shared_memory = ("Shared<{dtype}, {BK}, {BV}>",)
    CHUNK: ClassVar[int] = 32
    constants = (("CHUNK", "CHUNK"),)
    dtype: np.dtype
    BK: int
    BV: int

    @property
    def threads(self):
        return 2 * self.BV + 256


class DeltaScalarSummarySm90(DeltaScalarForwardSm90):
    """What segments of sequences do to a state, F and G. The first blocks compute BV columns of G each, the others BV
    columns of F."""

    file = "delta/sm90/scalar_summary"
    arguments = members(
        "tensor_maps+strided k v, strided? g, strided beta, strided? lengths, shape, pointers? initial, "
        "pointers starts F forgets, int64s P group state_k state_v wide_gate wide_beta, float64s scale"
    )


class DeltaScalarBackwardStatesSm90(DeltaScalarForwardSm90):
    """The first of two kernels of gradients, backwards in time: dv, dh0, and the gradient of the state after every
    chunk. Without `outputs` it computes only G'."""

    file = "delta/sm90/scalar_backward_states"
    arguments = members(
        "tensor_maps+strided q k do_ dv, tensor_maps state_gradients, strided? g, strided beta, strided? lengths, "
        "shape, pointers? dht dh0 starts, int64s P group state_k state_v wide_gate wide_beta, float64s scale"
    )
    shared_memory = ("Shared<{dtype}, {BK}, {BV}, {outputs}>",)
    outputs: bool = True


class DeltaScalarBackwardTokensSm90(DeltaScalarForwardSm90):
    """The second kernel of gradients, forwards in time: dq, dk, dbeta and dg. BV is at least V."""

    file = "delta/sm90/scalar_backward_tokens"
    arguments = members(
        "tensor_maps state_gradients, tensor_maps+strided q k v do_ dv dq dk, strided? g, strided beta, "
        "strided? lengths, strided dbeta, strided? dg, pointers? initial starts parts, shape, "
        "int64s P group state_k state_v wide_gate wide_beta, float64s scale"
    )


class DeltaInverseLengths(Kernel):
    """The inverse lengths of queries and keys. So many `lanes` of a warp as `lanes` returns have a token."""

    file = "delta/inverse_lengths"
    arguments = members("strided q k, pointers lengths, int64s B H T_ K lanes")
    threads = 256
    PIECE: ClassVar[int] = 8  # numbers of a lane
    constants = (("PIECE", "PIECE"),)
    dtype: np.dtype

    @classmethod
    def lanes(cls, K) -> int:
        """The lanes that have K numbers."""
        return 1 << (ceil_div(K, cls.PIECE) - 1).bit_length()


def inverse_lengths(draft, q, k):
    """Launches what computes the inverse lengths of the rows of q and k, [B, H, T, 2]: Hopper's kernels would wait for
    these longer than this takes. Returns the array."""
    kernel, (B, H, T, K) = DeltaInverseLengths(q.dtype), q.shape
    lengths, lanes = draft.empty((B, H, T, 2), FLOAT32), kernel.lanes(K)
    blocks = ceil_div(B * H * T * lanes, kernel.threads)
    draft.launch(kernel, blocks, q=q, k=k, lengths=lengths, B=B, H=H, T_=T, K=K, lanes=lanes)
    return lengths


def why_no_chunks(problem) -> str | None:
    """Why no card can compute a call in chunks, whatever its gates are; None if some can."""
    if problem.mode == "recurrent":
        return "mode='recurrent' is token by token"
    if problem.dtype == DOUBLE:
        return "the data are float64, and kernels in chunks compute in float32"
    return None


def why_never_on_hopper(problem, device) -> str | None:
    """Why Hopper's own kernels cannot compute a call, nor one on copies of its rows; None if they can."""
    if device.capability != 90:
        return "the card is another, or kernels of every card are asked for"
    if problem.op not in (DELTA_RULE, GATED_DELTA_RULE):
        return "every channel has a gate of its own"
    if problem.dtype == FLOAT32:
        return "the data are float32, and these kernels multiply half precision"
    if reason := why_no_chunks(problem):
        return reason
    if problem.sizes["K"] > TILES[-1]:
        return f"K={problem.sizes['K']} is over {TILES[-1]}"
    return None


def why_not_on_hopper(problem, device) -> str | None:
    """Why Hopper's own kernels cannot compute a call; None if they can."""
    if reason := why_never_on_hopper(problem, device):
        return reason
    if not mappable_once_copied([problem[name] for name in "qkv"]):
        return "rows are no whole pieces of 16 bytes, or there are none"
    return None


class ScalarCut(SegmentCut):
    """How the walks of Hopper's own forward kernel are cut, and its kernels: `forward`, and `summary` of segments.

    A segment *forgets* if its gates let nothing remain of the state before it. It is then summarised by a walk over its
    last tokens alone. Only the card sees the gates: with gates, the estimated time is the mean of two, if all segments
    forget and if none does. Times are in microseconds, fitted to an H200 except that of a launch.
    """

    CHUNK_TIMES, TWO_CHUNKS_TIME = {64: 1.45, 128: 1.7}, 1.85  # by BV; for two blocks that share a multiprocessor
    SUMMARY_TIMES, TWO_SUMMARIES_TIME = {64: 0.85, 128: 1.0}, 1.2  # the same of a chunk of a summary
    LAUNCH_TIME = 8.0  # of a launch
    START = 2
    LAST_CHUNKS = 32  # that are summarised of a segment that forgets, with the gates of trained models
    WORTH = 0.95  # sequences are cut if that takes less than this part of the time

    def __init__(self, problem, device):
        self.problem, self.device = problem, device
        self.steps = ceil_div(problem.spans.longest, DeltaScalarForwardSm90.CHUNK)
        self.segments = min((1, *range(2, min(self.steps // 4, 64) + 1)), key=self.time)

    @property
    def forward(self):
        """The kernel of o."""
        return self.kernel(DeltaScalarForwardSm90, self.segments)

    @property
    def summary(self):
        """The kernel of summaries."""
        return self.kernel(DeltaScalarSummarySm90, 2 * (self.segments - 1))

    def kernel(self, cls, walks):
        """The instance of a class for so many walks of every sequence and head."""
        N, H, K, V = self.problem.shape("N H K V")
        return cls(self.problem.dtype, *tile_sizes(N * H * walks, K, V, self.device.multiprocessors))

    def chunk_time(self, segments, kernel, tiles, times, of_two) -> float:
        """An estimate for one chunk of every walk, of which each sequence and head has `tiles`: one for each tile of
        columns of each of so many segments. times, of_two: such as CHUNK_TIMES and TWO_CHUNKS_TIME."""
        blocks, alone = self.waves(segments, tiles), times[kernel.BV]
        shared, single = divmod(blocks, 2) if kernel.blocks_per_multiprocessor == 2 else (0, blocks)
        return shared * of_two + single * alone

    def outputs_time(self, segments) -> float:
        """An estimate for the walks that write results."""
        kernel = self.kernel(DeltaScalarForwardSm90, segments)
        tiles = segments * kernel.grid(self.problem.sizes["V"])
        of_chunk = self.chunk_time(segments, kernel, tiles, self.CHUNK_TIMES, self.TWO_CHUNKS_TIME)
        return self.LAUNCH_TIME + self.chunks_of_walk(segments) * of_chunk

    def chunks_of_walk(self, segments) -> int:
        """The chunks of a segment, and those that its start is worth."""
        return ceil_div(self.steps, segments) + self.START

    def summary_time(self, segments, of_all, of_values) -> float:
        """An estimate for the walks that summarise so many segments. of_all, of_values: a chunk's time if F and G are
        computed, as no segment forgets, and if G alone is, as all forget."""
        chunks = self.chunks_of_walk(segments)
        times = [chunks * of_all]
        if self.problem.op.decays:
            times.append(min(chunks, self.LAST_CHUNKS) * of_values)
        return self.LAUNCH_TIME + sum(times) / len(times)

    def time(self, segments) -> float:
        """An estimate for a call whose sequences are cut into so many segments; of whole sequences it is WORTH times
        the estimated time, so that a small gain is no reason to cut them."""
        outputs, (K, V) = self.outputs_time(segments), self.problem.shape("K V")
        if segments == 1:
            return self.WORTH * outputs
        summary = self.kernel(DeltaScalarSummarySm90, 2 * (segments - 1))
        tiles_of_G, tiles_of_F = (segments - 1) * summary.grid(V), (segments - 2) * summary.grid(K)
        of_values, of_all = (
            self.chunk_time(segments, summary, tiles, self.SUMMARY_TIMES, self.TWO_SUMMARIES_TIME)
            for tiles in (tiles_of_G, tiles_of_G + tiles_of_F)
        )
        joining = join_time(segments, K) / (2 if self.problem.op.decays else 1)  # none if all segments forget
        launch = self.LAUNCH_TIME if segments > 2 else 0.0
        return outputs + self.summary_time(segments, of_all, of_values) + joining + launch


class Way:
    """The base of the ways of computing a call, or its gradients. `name`: what explanations call it."""

    name: ClassVar[str]

    def __init__(self, problem, device):
        self.problem, self.device = problem, device

    def why_not(self) -> str | None:
        """Why this way is not taken; None if it can be."""
        return None

    def plan(self, *pullback):
        """The plan of the call; or, for `pullback` = (do, dht, saved), that of its pullback: do and dht as
        `Draft.cotangents` takes them, `saved` what the plan of the call has saved, which is empty for most ways."""
        raise NotImplementedError


class ScalarOnHopper(Way):
    """The way by Hopper's own kernels, for half-precision data that tensor maps can describe."""

    name = "by Hopper's own kernel"

    def why_not(self):
        return why_not_on_hopper(self.problem, self.device)

    def plan(self):
        problem, draft, cut = self.problem, Draft(), ScalarCut(self.problem, self.device)
        tokens = [draft.mapped(problem[name], name) for name in "qkv"] + [problem.arrays.get("g"), problem["beta"]]
        o, final, initial = draft.output(problem, mappable), draft.final(problem), draft.initial(problem)
        kernel, chunk = cut.forward, DeltaScalarForwardSm90.CHUNK
        shape = draft.shape(problem, spans=cut.spans(chunk), chunk=chunk)
        how = {"lengths": inverse_lengths(draft, *tokens[:2]) if problem.options.get("qk_l2norm") else None}
        if cut.segments > 1:
            how |= {"P": cut.segments, "starts": launch_starts(draft, cut, tokens, shape, initial, how["lengths"])}
        launch_forward(draft, kernel, tokens, o, shape, problem.scale, initial, final, **how)
        return draft.plan(draft.results(problem, o, final), mode="chunk", tiles=kernel.tiles | cut.tiles)


def tile_sizes(heads, K, V, multiprocessors) -> tuple[int, int]:
    """(BK, BV) of forward kernels: PANEL = 64 columns per block if V is no more, or if each of these blocks has a
    multiprocessor for itself; else 128. TILES are the sizes 64 and 128. `heads`: of all sequences."""
    few_blocks = heads * ceil_div(V, PANEL) <= multiprocessors
    return TILES[K > PANEL], TILES[V > PANEL and not few_blocks]


def all_heads(shape) -> int:
    """The heads of all sequences."""
    return shape.B * shape.row_sequences * shape.H


def launch_starts(draft, cut, tokens, shape, initial, lengths, first_args=None):
    """Launches what computes the states from which the segments of `cut` start, and returns these.

    tokens, lengths : as in `launch_forward`
    first_args : the arguments of the gradients' first walk, if that is cut, too: then this also computes the gradients
        of states from which its segments start
    """
    (q, k, v, g, beta), kernel = tokens, cut.summary
    F, starts = memory_of_segments(draft, shape, 1 if first_args is None else 2, FLOAT32)
    forgets = draft.empty((shape.B * shape.row_sequences, shape.H), np.dtype(np.int64))
    draft.launch(
        kernel,
        all_heads(shape) * (kernel.grid(shape.V) + kernel.grid(shape.K)),
        **mapped(kernel, k=k, v=v),
        **token_args(q, g, beta, shape, 1.0, lengths),
        initial=initial,
        starts=starts,
        F=F,
        forgets=forgets,
        P=cut.segments,
    )
    if first_args is not None:
        blocks = all_heads(shape) * cut.first_summary.grid(shape.V)
        draft.launch(cut.first_summary, blocks, **first_args, starts=starts)
    if cut.segments > 2:
        join_segments(draft, F, starts, cut.segments, forgets)
    return starts


def launch_forward(draft, kernel, tokens, o, shape, scale, initial, final, lengths=None, starts=None, P=1):
    """Launches the kernel on `tokens`: (q, k, v, g or None, beta). The heads of `shape` are those of v. initial, final:
    float32 states [N, H, K, V]; None for zeros, and for a state that is not wanted. lengths: what `inverse_lengths`
    returns if q and k are to be divided by their lengths; or None. starts: the states from which P segments of each
    sequence start; None if sequences are not cut."""
    q, k, v, g, beta = tokens
    draft.launch(
        kernel,
        all_heads(shape) * ceil_div(shape.V, kernel.BV),
        **mapped(kernel, q=q, k=k, v=v, o=o),
        **token_args(q, g, beta, shape, scale, lengths),
        initial=initial,
        final=final,
        starts=starts,
        P=P,
    )


def mapped(kernel, **arrays) -> dict:
    """The arguments that describe arrays [B, H, T, D]: tensor maps, and rows for tokens that their boxes do not
    cover."""
    maps = {name: TensorMap(x, PANEL, kernel.CHUNK, swizzled=True) for name, x in arrays.items()}
    return maps | {f"{name.removesuffix('_')}_rows": x for name, x in arrays.items()}


def token_args(q, g, beta, shape, scale, lengths) -> dict:
    """The arguments that all of these kernels have."""
    return {
        "shape": shape,
        "scale": scale,
        "g": None if g is None else g[..., None],
        "beta": beta[..., None],
        "group": shape.H // q.shape[1],
        "state_k": shape.V,
        "state_v": 1,
        "wide_gate": g is None or g.dtype == FLOAT32,
        "wide_beta": beta.dtype == FLOAT32,
        "lengths": lengths,
    }


# -- gradients ---------------------------------------------------------------------------------------------------------
class ScalarGradientCut(ScalarCut):
    """How the walks of Hopper's own kernels of gradients are cut: the second one, forwards in time, into `segments`;
    the first, backwards in time, into `first_segments`, which are as many, or 1 if whole sequences are faster."""

    gradient = True
    FIRST_TIMES, TWO_FIRST_TIME = {64: 1.6, 128: 2.5}, 2.0  # as CHUNK_TIMES and TWO_CHUNKS_TIME, of the first walk
    # The same of the kernel without outputs. By all these times the cut that is chosen at each of six shapes is the
    # fastest of the two to five that were timed.
    FIRST_SUMMARY_TIMES, TWO_FIRST_SUMMARIES_TIME = {64: 1.4, 128: 1.7}, 1.7
    SECOND_TIMES, TWO_SECOND_TIME = {64: 3.7, 128: 5.2}, 5.0  # the same of the second walk

    def __init__(self, problem, device):
        super().__init__(problem, device)
        self.first_segments = min((1, self.segments), key=self.first_time)

    def waves(self, segments, tiles):
        """As `SegmentCut.waves`; of more than 64 channels or columns as if all sequences were as long: others are not
        faster by the mean, 2.76 -> 2.97 ms for 50 sequences of 60,000 tokens, 8 heads."""
        (N, H), wide = self.problem.shape("N H"), max(self.problem.shape("K V")) > PANEL
        return ceil_div(N * H * tiles, self.device.multiprocessors) if wide else super().waves(segments, tiles)

    @property
    def first(self):
        """The kernel of the first walk."""
        return self.kernel(DeltaScalarBackwardStatesSm90, self.first_segments)

    @property
    def first_summary(self):
        """The kernel of what segments add to the gradients of the states before them."""
        return replace(self.kernel(DeltaScalarBackwardStatesSm90, self.first_segments - 1), outputs=False)

    @property
    def second(self):
        """The kernel of the second walk, whose blocks have all columns."""
        K, V = self.problem.shape("K V")
        return DeltaScalarBackwardTokensSm90(self.problem.dtype, TILES[K > PANEL], TILES[V > PANEL])

    def first_time(self, segments) -> float:
        """An estimate for the first walk, cut into so many segments, and for what summarises these."""
        V, of_one = self.problem.sizes["V"], self.kernel(DeltaScalarBackwardStatesSm90, segments)
        of_chunk = self.chunk_time(segments, of_one, segments * of_one.grid(V), self.FIRST_TIMES, self.TWO_FIRST_TIME)
        time = self.LAUNCH_TIME + self.chunks_of_walk(segments) * of_chunk
        if segments == 1:
            return time
        summary, times = (
            self.kernel(DeltaScalarBackwardStatesSm90, segments - 1),
            (self.FIRST_SUMMARY_TIMES, self.TWO_FIRST_SUMMARIES_TIME),
        )
        of_summary = self.chunk_time(segments, summary, (segments - 1) * summary.grid(V), *times)
        return time + self.summary_time(segments, of_summary, of_summary)

    def outputs_time(self, segments):
        of_chunk = self.chunk_time(segments, self.second, segments, self.SECOND_TIMES, self.TWO_SECOND_TIME)
        of_second = self.LAUNCH_TIME + self.chunks_of_walk(segments) * of_chunk
        return min(self.first_time(1), self.first_time(segments)) + of_second


class ScalarGradientsOnHopper(Way):
    """The gradients by Hopper's own two kernels: the first goes backwards in time and stores the gradient of the
    state after every chunk, the second goes forwards."""

    name = "by Hopper's own kernels"

    @cached_property
    def cut(self):
        """How the walks are cut."""
        return ScalarGradientCut(self.problem, self.device)

    def why_not(self):
        problem, device = self.problem, self.device
        if reason := why_not_on_hopper(problem, device):
            return reason
        V = problem.sizes["V"]
        if V > TILES[-1]:
            return f"V={V} is over {TILES[-1]}"
        if self.cut.time(self.cut.segments) > CutInChunks(problem, device, gradient=True).call_time:
            return "few heads of long sequences are faster by the kernels of every card"
        return None

    def plan(self, do, dht, saved):
        problem, draft, cut = self.problem, Draft(), self.cut
        given, x = problem.arrays, SimpleNamespace(**{name: draft.mapped(problem[name], name) for name in "qkv"})
        x.g, x.beta, x.initial = given.get("g"), problem["beta"], draft.initial(problem)
        do, x.dht = draft.cotangents(problem, do, dht)
        x.do = draft.mapped(do, "do")
        gradients = SimpleNamespace(**{name: draft.like(array) for name, array in given.items()})
        gradients.h0 = draft.gradient_of_state(problem)
        chunk = DeltaScalarForwardSm90.CHUNK
        whole, segments = (draft.shape(problem, spans=spans, chunk=chunk) for spans in (None, cut.spans(chunk)))
        x.lengths = inverse_lengths(draft, x.q, x.k) if problem.options.get("qk_l2norm") else None
        launch_backward(draft, cut, x, gradients, whole, segments, problem.scale)
        results = tuple(getattr(gradients, name) for name in given), draft.stored_gradient(problem, gradients.h0)
        return draft.plan(results, tiles=cut.second.tiles | cut.tiles)


def launch_backward(draft, cut, x, gradients, whole, segments, scale):
    """Launches the two kernels of gradients, before them what computes the states and gradients from which segments
    start, and after them the sums and casts of what they write.

    x : q, k, v, g or None, beta, initial, do, dht, lengths as in `launch_forward`
    gradients : the memory for their gradients by name, and h0, or None
    whole, segments : the shapes of sequences, and of the segments of `cut`; their heads are those of v
    """
    first, second, dtype, (T, K, V) = cut.first, cut.second, x.q.dtype, (whole.T, whole.K, whole.V)
    args = token_args(x.q, x.g, x.beta, whole, scale, x.lengths)
    # As many as WorkTile::chunk_row (chunk_copies.cuh) counts; the kernels' number of a row is an int32.
    chunks = whole.B * whole.H * (T // second.CHUNK + whole.row_sequences)
    assert chunks * second.BV < 1 << 31
    state_gradients = draft.empty((1, 1, chunks * second.BV, second.BK), dtype)
    first_shape, starts = segments if cut.first_segments > 1 else whole, None
    first_args = args | {
        **mapped(first, q=x.q, k=x.k, do_=x.do, dv=gradients.v),
        "shape": first_shape,
        "state_gradients": TensorMap(state_gradients, PANEL, 16, swizzled=True),  # each warp stores 16 columns of V
        "dht": x.dht,
        "P": cut.first_segments,
    }
    if cut.segments > 1:
        tokens, args_if_cut = (x.q, x.k, x.v, x.g, x.beta), first_args if cut.first_segments > 1 else None
        starts = launch_starts(draft, cut, tokens, segments, x.initial, x.lengths, args_if_cut)
    draft.launch(first, all_heads(first_shape) * first.grid(V), **first_args, dh0=gradients.h0, starts=starts)

    def in_float32(name):
        """The memory of a scalar's gradient as the kernel writes it."""
        array = getattr(gradients, name, None)
        return array if array is None or array.dtype == FLOAT32 else draft.like(array, FLOAT32)

    scalars = {name: in_float32(name) for name in ("beta", "g")}
    grouped = args["group"] > 1
    parts = draft.empty((2, whole.B, whole.H, T, K), FLOAT32) if grouped else None
    draft.launch(
        second,
        all_heads(segments),
        **mapped(second, q=x.q, k=x.k, v=x.v, do_=x.do, dv=gradients.v, dq=gradients.q, dk=gradients.k),
        **args | {"shape": segments},
        **{f"d{name}": None if array is None else array[..., None] for name, array in scalars.items()},
        state_gradients=TensorMap(state_gradients, PANEL, PANEL, swizzled=True),
        initial=x.initial,
        starts=starts,
        P=cut.segments,
        parts=parts,
    )
    for part, name in enumerate("qk" if grouped else ""):
        divided = None if x.lengths is None else getattr(x, name)
        sum_parts(draft, parts[part][None], getattr(gradients, name), divided)
    for name, array in scalars.items():
        if array is not None and array is not getattr(gradients, name):
            draft.copy(array, getattr(gradients, name))
