"""The forward pass, in chunks, of GLA, RWKV-6 and the other operators that their kernels compute (the gated family):
S_t = diag(exp g_t) S_{t-1} + k_t v_t^T. `segments.ForwardCut` says how sequences are cut into segments.

A pass over whole sequences has one launch. A pass in segments has three: (1) the summary of each segment, which is its
final state if its initial state is 0, and the product of its decays; (2) a scan, which computes the state at each
segment's start from the summaries; (3) o. A *way* is a set of kernels, such as Hopper's; each subclass of `ForwardPass`
launches those of one way. The *pullback* is the backward pass; it reads what a plan has `saved`, if that has run.

Sizes: B batch, N sequences, H heads, K channels, V columns, P segments of a sequence, R parts of a segment. The decays
over a segment have two rows of K numbers, whose product they are: the decay itself may leave float32's range.
"""

from __future__ import annotations

from functools import cached_property

from . import aligned_copies, segments
from .arithmetic import ceil_div
from .gated_kernels import PANEL, SPLIT_CHANNELS, GatedWideOperands, ScanSegments, columns_of_decays, read_order
from .kernel import DOUBLE
from .plan import FLOAT32, Draft, TensorMap, common_bytes
from .rank_summary import RankSummary
from .segments import COPIED, HOPPER, PORTABLE, SHORT, SMALL, WIDE, tiles_at_once


def plan_in_chunks(problem, device, summaries=()):
    """The plan of mode "chunk". `summaries`: those that a plan of `plan_summary` has saved for the same arrays."""
    cut = segments.forward_cut(problem, device)
    if cut.way == COPIED:  # rows are copied to aligned ones, with zeros at their ends
        return aligned_copies.plan_on_copies(problem, lambda padded: plan_in_chunks(padded, device))
    draft = Draft()
    o = draft.output(problem, cut.fits)
    inputs = draft.mapped_inputs(problem, cut.fits) if cut.way == HOPPER else draft.inputs(problem)
    return PASS_OF_WAY[cut.way](draft, problem, cut, inputs, o).plan(draft.final(problem), summaries)


def plan_summary(problem, device):
    """A plan of ((the final state for an initial state of 0,), the product of all decays [N, H, K]), without o: what a
    rank that has a part of every sequence tells the other ranks. Both results are in one buffer, sent at once.

    The plan saves the segments' summaries for `plan_in_chunks`. None if it would take as long as a plan with o, which
    is so for all ways but Hopper's.
    """
    if problem.mode != "chunk" or problem.dtype == DOUBLE:
        return None
    cut = segments.forward_cut(problem, device)
    if cut.way != HOPPER:
        return None
    cut = segments.without_a_short_segment(problem, device, cut)
    draft = Draft()
    inputs = draft.mapped_inputs(problem)
    # o is not written, but the kernel needs a tensor map of some array in its place: v
    return HopperForward(draft, problem, cut, inputs, o=inputs[2]).summary_plan(problem.sizes["K"])


class ForwardPass:
    """Adds the launches of one forward pass to a draft.

    cut : a `segments.ForwardCut`
    arrays : q, k, v, g in a layout that the kernels of the way can read
    o : the array to which they write
    """

    # Of the cut: kernel and summary, the kernels of launches (3) and (1); segments, P; spans, the token ranges of all
    # segments; parts, R without and with the last segment of a sequence; tiles, the sizes that `explain` shows.
    # For the pullback: (the states [N * its segments, H, K, V] at the starts of its segments,), or nothing if it
    # computes them itself
    saved: tuple = ()
    gates_columns = False  # whether columns of V have gates, too
    last_segment_writes_final = False  # whether launch (3) writes the final state; else the scan does

    def __init__(self, draft, problem, cut, arrays, o):
        self.draft, self.problem, self.cut, self.o = draft, problem, cut, o
        self.q, self.k, self.v, self.g = arrays
        self.u, self.initial = draft.bonus(problem), draft.initial(problem)
        self.starts = None  # the states [N * P, H, K, V] at the starts of this pass's segments, once they are computed

    def launch_outputs(self, spans, initial, final):
        """Launches the kernel of o on the segments `spans`, or on whole sequences if that is None: they start from the
        states `initial`, and their last states are written to `final` unless it is None."""
        raise NotImplementedError

    def launch_summaries(self, parts, summaries, segments, computed):
        """Launches the kernel of summaries for the first `computed` of the `segments` of each sequence. Each segment is
        divided into `parts`, and the summary of each part is written to `summaries`: (states, decays, ...)."""
        raise NotImplementedError

    def plan(self, final, summaries=()):
        """The plan of a call by this pass; parameters as in `launch_all`."""
        self.launch_all(final, summaries)
        results = self.draft.results(self.problem, self.o, final)
        return self.draft.plan(results, mode=self.problem.mode, tiles=self.cut.tiles, saved=self.saved)

    # -- the launches of a pass --
    def launch_all(self, final, summaries=()):
        """Launches all kernels of the pass. `summaries`: those that the plan of `summary_plan` has saved, if it has run
        for the same arrays."""
        if self.cut.segments == 1:
            self.launch_outputs(spans=None, initial=self.initial, final=final)
            return
        from_scan, from_last_segment = (None, final) if self.last_segment_writes_final else (final, None)
        summaries = summaries or self.segment_summaries(with_last=from_scan is not None)
        self.starts = self.states_at_starts(summaries, self.initial, from_scan)
        self.launch_outputs(self.cut.spans, self.starts, from_last_segment)

    def summary_plan(self, channels):
        """The plan that `plan_summary` returns; the product of decays has `channels` channels."""
        results = RankSummary(self.draft, self.problem, channels)
        summaries = self.segment_summaries(with_last=True)
        self.states_at_starts(summaries, initial=None, final=results.state)
        return self.draft.plan(results.finish(summaries[1]), saved=summaries)

    def segment_summaries(self, with_last):
        """Launches the summaries of R parts of each of P segments; returns them.

        These are states [N * P * R, H, K, V] and decays [N * P * R, H, 2, K]: a part's decay is the product of its two
        rows, of which each block of `columns_of_decays` has two. If columns have gates, too, these rows are logarithms,
        to be added, and there are the logarithms [N * P * R, H, V] of the columns' decays. Without `with_last` the
        summaries of each sequence's last segment are not computed.
        """
        N, H, K, V = self.problem.shape("N H K V")
        P, R = self.cut.segments, self.cut.parts[with_last]
        count, rows = N * P * R, 2 * ceil_div(V, columns_of_decays(self.cut.summary, V))
        summaries = self.draft.empty((count, H, K, V), FLOAT32), self.draft.empty((count, H, rows, K), FLOAT32)
        if self.gates_columns:
            summaries += (self.draft.empty((count, H, V), FLOAT32),)
        self.launch_summaries(R, summaries, P, P if with_last else P - 1)
        return summaries

    def states_at_starts(self, summaries, initial, final):
        """Launches the scan of the summaries, from the states `initial`. Returns the states [N * P, H, K, V] at the
        segments' starts. The scan also writes the sequences' last states to `final` unless it is None."""
        (N, H, K, V), P = self.problem.shape("N H K V"), self.cut.segments
        starts, R = self.draft.empty((N * P, H, K, V), FLOAT32), summaries[0].shape[0] // (N * P)
        scan = ScanSegments.fitting(K, V, P * R)
        arrays = dict(zip(("states", "decays", "column_decays"), summaries)) | {"initial": initial, "final": final}
        sizes = {"P": P, "R": R, "H": H, "K": K, "V": V}
        sizes["BV"] = columns_of_decays(self.cut.summary, V)
        blocks = N * H * ceil_div(K * V, scan.width * scan.threads)
        self.draft.launch(scan, blocks, **arrays, starts=starts, **sizes)
        return starts

    def finer_spans(self, parts):
        """The token ranges of all parts of all segments, for kernels that take a part as a segment of its own."""
        spans = self.cut.spans
        return spans.segments(parts, self.cut.summary.CHUNK) if parts > 1 else spans


class PortableForward(ForwardPass):
    """The forward pass by kernels that run on every card. If the channels take several launches, each launch adds its
    channels' terms to the float32 array `sums`, and the last one writes the sum to o."""

    @cached_property
    def sums(self):
        """float32 memory for the sum of o over the launches for channels; None if one launch takes all channels."""
        split = self.cut.kernel.schedule == SPLIT_CHANNELS
        return self.draft.empty(self.problem.shape("B H T V"), FLOAT32) if split else None

    @property
    def rows(self) -> dict:
        """The arrays with a row for every token and head."""
        return {"q": self.q, "k": self.k, "v": self.v, "g": self.g, "o": self.o}

    def launch_outputs(self, spans, initial, final):
        self.launch(self.cut.kernel, spans, initial=initial, final=final, u=self.u)

    def launch(self, kernel, spans, **args):
        """Launches `kernel` for all channels; `args`: its arguments besides those that every launch of a pass has."""
        (B, H, K, V), rows, shape = self.problem.shape("B H K V"), self.rows, self.draft.shape(self.problem, spans)
        args |= {"shape": shape, "scale": self.problem.scale, "sums": self.sums, "bytes": common_bytes(*rows.values())}
        blocks = B * H * shape.row_sequences * kernel.grid(V)
        for channel in range(0, K, kernel.channels):
            self.draft.launch(kernel.with_channels(K - channel), blocks, **rows, **args, channel=channel)

    def launch_summaries(self, parts, summaries, segments, computed):
        (N, H, K, V), kernel = self.problem.shape("N H K V"), self.cut.summary
        rows = {"k": self.k, "v": self.v, "g": self.g}
        args = {"states": summaries[0], "decays": summaries[1], "bytes": common_bytes(*rows.values())}
        args |= {"segments": segments, "computed": computed, "parts": parts}
        args["shape"] = self.draft.shape(self.problem, self.cut.spans)
        blocks = N * H * computed * parts * kernel.grid(V) * tiles_at_once(kernel, K)
        self.draft.launch(kernel, blocks, **rows, **args)


class WideForward(PortableForward):
    """The forward pass by two kernels for more than 128 channels, on every card: the first computes the operands and
    scores of all chunks, the second multiplies them."""

    def launch_outputs(self, spans, initial, final):
        draft, problem, kernel = self.draft, self.problem, self.cut.kernel
        (B, H, V), shape = problem.shape("B H V"), draft.shape(problem, spans, kernel.CHUNK)
        chunks, tiles, size = (B, H, shape.NC), kernel.channel_tiles, kernel.CHUNK * kernel.TILE
        intermediate = {
            "operands": draft.empty((*chunks, tiles, 2, size), problem.dtype),
            "scores": draft.empty((*chunks, kernel.SCORES), problem.dtype),
            "decays": draft.empty((*chunks, kernel.channels), FLOAT32),
        }
        prepare = GatedWideOperands(read_order(problem.op), problem.dtype, self.g.dtype)
        rows = {"q": self.q, "k": self.k, "g": self.g}
        rows["bytes"] = common_bytes(self.q, self.k, self.g)
        draft.launch(prepare, shape.all_chunks, **rows, u=self.u, **intermediate, shape=shape)
        rows = {"v": self.v, "o": self.o, "bytes": common_bytes(self.v, self.o)}
        states = {"initial": initial, "final": final}
        blocks = B * H * shape.row_sequences * kernel.grid(V)
        draft.launch(kernel, blocks, **rows, **intermediate, **states, shape=shape, scale=problem.scale)


class ShortForward(ForwardPass):
    """The forward pass by the kernel for short sequences without initial states, which reads any rows."""

    def launch_outputs(self, spans, initial, final):
        N, H = self.problem.shape("N H")
        arrays = {"q": self.q, "k": self.k, "v": self.v, "g": self.g, "o": self.o, "u": self.u}
        common = {"shape": self.draft.shape(self.problem, spans), "scale": self.problem.scale}
        self.draft.launch(self.cut.kernel, N * H, **arrays, **common, final=final)


class SmallForward(ForwardPass):
    """The forward pass by kernels for heads of at most 16 channels and columns, of which a warp computes several."""

    def launch_outputs(self, spans, initial, final):
        args = {"u": self.u, "initial": initial, "final": final, "segments": 1, "computed": 1, "both": False}
        self.launch(self.cut.kernel, spans, self.cut.segments, {"o": self.o}, **args)

    @property
    def rows(self) -> dict:
        """The arrays with a row for every token and head that the kernels read."""
        return {"k": self.k, "v": self.v, "g": self.g, "q": self.q}

    def launch_summaries(self, parts, summaries, segments, computed):
        args = dict(zip(("states", "decays", "column_decays"), summaries))
        args |= {"segments": segments, "computed": computed, "both": False}
        self.launch(self.cut.summary, self.cut.spans, computed, {}, **args)

    def launch(self, kernel, spans, segments, written, /, **args):
        """Launches `kernel` for all heads of so many segments of each sequence; `written`: the arrays with a row for
        every token that it writes."""
        arrays, (N, H) = self.rows | written, self.problem.shape("N H")
        args |= {"scale": self.problem.scale, "bytes": common_bytes(*arrays.values())}
        args |= {"shape": self.draft.shape(self.problem, spans)}
        self.draft.launch(kernel, kernel.blocks(N * segments * H), **arrays, **args)


class HopperForward(ForwardPass):
    """The forward pass by Hopper's kernel. It can also store the states at which the pullback's segments start, those
    before every `cut.mark_every`-th chunk: `marks` [N * segments, H, K, V]."""

    last_segment_writes_final = True
    marks = None

    def launch_all(self, final, summaries=()):
        if self.cut.mark_every:
            N, H, K, V = self.problem.shape("N H K V")
            self.marks = self.draft.empty((N * self.cut.backward_segments, H, K, V), FLOAT32)
            self.saved = (self.marks,)
        if not self.cut.first_tokens:
            super().launch_all(final, summaries)
            if self.cut.same_as_pullback:
                self.saved = (self.starts,)
            return
        # Two unequal segments: the first one's last state is the second one's initial state, so no scan is needed. The
        # summary starts from the initial state; of each pair of entries only the first is written, then read.
        N, H, K, V = self.problem.shape("N H K V")
        states, decays = self.draft.empty((2 * N, H, K, V), FLOAT32), self.draft.empty((2 * N, H, 2, K), FLOAT32)
        self.launch_summaries(1, (states, decays), 2, 1, self.initial)
        self.launch_outputs(self.cut.spans, self.initial, final, states)

    def starts_of_backward_segments(self):
        """Launches what computes the states at the starts of the pullback's segments; returns them as `saved` does."""
        if self.cut.same_as_pullback:
            summaries = self.segment_summaries(with_last=False)
            return self.states_at_starts(summaries, self.initial, final=None)
        self.o = self.draft.empty(self.o.shape, self.o.dtype)  # the kernel that stores the states also writes o
        self.launch_all(final=None)
        return self.marks

    def launch_outputs(self, spans, initial, final, segment_states=None):
        """`segment_states` [2 N, H, K, V]: for two unequal segments, the last state of each sequence's first segment in
        the place of that segment."""
        states = {"initial": initial, "final": final, "segment_states": segment_states}  # all but `final` are read
        # the kernel of o ignores `computed`
        self.launch(self.cut.kernel, spans, 1, states, segments=self.cut.segments, computed=1)

    def launch_summaries(self, parts, summaries, segments, computed, initial=None):
        # blocks of the segments from `computed` on end at once
        states = {"initial": initial, "final": summaries[0], "decays": summaries[1]}
        self.launch(self.cut.summary, self.cut.spans, parts, states, segments=segments, computed=computed)

    def launch(self, kernel, spans, parts, states, **args):
        """Launches `kernel` for all channels; `states`: its arguments that are states and decays."""
        arrays = self.inputs_of(kernel) | states | {"o": self.o, "u": self.u}
        (B, H, K, V), shape = self.problem.shape("B H K V"), self.draft.shape(self.problem, spans)
        marks = self.marks if kernel.reads else None  # reads: whether the kernel computes outputs, not only a summary
        marks_per_sequence = 0 if marks is None else marks.shape[0] // (B * shape.row_sequences)
        args |= {"marks": marks, "mark_every": self.cut.mark_every if self.marks is not None else 0}
        args |= {"marks_per_sequence": marks_per_sequence, "parts": parts}
        # whether tokens lie in reverse order in memory, which tensor maps do not allow: threads then copy the rows
        args |= {"backwards": any(x.strides[2] < 0 for x in (self.q, self.k, self.v, self.o))}
        blocks = B * H * shape.row_sequences * parts * kernel.grid(V)
        for channel in range(0, K, kernel.channels):
            self.draft.launch(kernel, blocks, **arrays, **args, shape=shape, scale=self.problem.scale, channel=channel)

    def inputs_of(self, kernel) -> dict:
        """The kernel's arguments that describe q, k, g, v and o: tensor maps of all five (that of o is `o_boxes`), and
        rows of the first four."""
        channels, columns = {"q": self.q, "k": self.k, "g": self.g}, {"v": self.v, "o_boxes": self.o}
        maps = {name: TensorMap(x, kernel.BK, kernel.CHUNK, swizzled=False) for name, x in channels.items()}
        maps |= {name: TensorMap(x, PANEL, kernel.CHUNK, swizzled=True) for name, x in columns.items()}
        return maps | {f"{name}_rows": x for name, x in zip("qkgv", (self.q, self.k, self.g, self.v))}


PASS_OF_WAY = {
    SMALL: SmallForward,
    SHORT: ShortForward,
    HOPPER: HopperForward,
    WIDE: WideForward,
    PORTABLE: PortableForward,
}
