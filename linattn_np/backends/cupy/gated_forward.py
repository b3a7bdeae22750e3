"""The forward pass of the gated family in chunks. `segments.ForwardCut` says how sequences are cut into segments.

A pass over whole sequences has one launch. A pass in segments has three: (1) each segment's summary, which is its final
state from the initial state 0 and its total decay; (2) a scan, which computes the state at each segment's start; (3) o.
A way is a set of kernels; each subclass of `ForwardPass` launches those of one way.
"""

from __future__ import annotations

from functools import cached_property

from . import aligned_copies, segments
from .gated_kernels import PANEL, SPLIT_CHANNELS, ScanSegments, read_order
from .kernel import DOUBLE
from .plan import FLOAT32, Draft, TensorMap, ceil_div, common_bytes
from .rank_summary import RankSummary
from .segments import COPIED, HOPPER, PORTABLE, SMALL, WIDE
from .wide_head_kernels import GatedWideForward, GatedWideOperands


def plan_in_chunks(problem, device, kept=()):
    """The plan of mode "chunk". `kept`: the summaries that a plan of `plan_summary` has saved for the same arrays."""
    cut = segments.forward_cut(problem, device)
    if cut.way == COPIED:
        return aligned_copies.plan_on_copies(problem, lambda wide: plan_in_chunks(wide, device))
    draft = Draft()
    o, final = draft.output(problem, cut.fits), draft.final(problem)
    inputs = draft.mapped_inputs(problem, cut.fits) if cut.way == HOPPER else draft.inputs(problem)
    launches = PASSES[cut.way](draft, problem, cut, inputs, o)
    launches.run(final, kept)
    results = draft.results(problem, o, final)
    return draft.plan(results, mode=problem.mode, tiles=cut.tiles, saved=launches.saved)


def plan_summary(problem, device):
    """A plan of ((the final state from the state 0,), the total decay [N, H, K]), adjacent in memory, without o.

    The plan saves the segments' summaries, which `plan_in_chunks` takes as `kept`. None if a whole call costs no more.
    """
    if problem.mode != "chunk" or problem.dtype == DOUBLE:
        return None
    cut = segments.forward_cut(problem, device)
    if cut.way != HOPPER:
        return None
    cut = segments.without_a_short_segment(problem, device, cut)
    draft = Draft()
    inputs = draft.mapped_inputs(problem)
    # o is not written; v is passed in its place for the tensor map
    launches = HopperForward(draft, problem, cut, inputs, o=inputs[2])
    return launches.summary(problem.sizes["K"])


class ForwardPass:
    """Adds the launches of one forward pass to a draft; `arrays` are q, k, v, g in the layout that kernels read."""

    saved: tuple = ()  # the states at the starts of the pullback's segments, which it need not compute then
    gates_columns = False  # whether columns of V have gates, too
    last_leaves_final = False  # whether launch (3) writes the final state; else the scan does

    def __init__(self, draft, problem, cut, arrays, o):
        self.draft, self.problem, self.cut, self.o = draft, problem, cut, o
        self.q, self.k, self.v, self.g = arrays
        self.u, self.starts = draft.bonus(problem), None

    def launch_outputs(self, shape, initial, final):
        """Launches the kernel of o on sequences or segments that start from `initial` and write `final`, or None."""
        raise NotImplementedError

    def launch_summaries(self, parts, left, of, needed):
        """Launches the kernel of summaries for the first `needed` of the `of` segments of each sequence.

        Each segment is divided into `parts`, whose summaries are written to `left` (states, decays).
        """
        raise NotImplementedError

    # -- the launches of a pass --
    def shape(self, spans=None):
        """The kernel argument that tells the bounds of sequences, or of the segments `spans`."""
        return self.draft.shape(self.problem, spans)

    def run(self, final, kept=()):
        """Launches all kernels of the pass. `kept`: the summaries, if `summary` has computed and saved them."""
        initial, cut = self.draft.initial(self.problem), self.cut
        if cut.segments == 1:
            self.launch_outputs(self.shape(), initial, final)
            return
        from_scan, from_last_segment = (None, final) if self.last_leaves_final else (final, None)
        left = kept or self.left_by_segments(from_scan is not None)
        self.starts = self.states_at_starts(left, initial, from_scan)
        self.launch_outputs(self.shape(cut.spans), self.starts, from_last_segment)

    def summary(self, channels):
        """The plan that `plan_summary` returns: the final state from the state 0 and `channels` channels of decays."""
        results = RankSummary(self.draft, self.problem, channels)
        left = self.left_by_segments(True)
        self.states_at_starts(left, None, results.state)
        return self.draft.plan(results.finish(left[1]), saved=left)

    def left_by_segments(self, last):
        """Launches the summaries of R parts of each of P segments; returns them.

        These are states [N * P * R, H, K, V], decays [N * P * R, H, 2, K], and if columns have gates, their decays
        [N * P * R, H, V]. Each sequence's last segment is left out unless `last`.
        """
        N, H, K, V = self.problem.shape("N H K V")
        P, R = self.cut.segments, self.cut.parts[last]
        count = N * P * R
        left = self.draft.empty((count, H, K, V), FLOAT32), self.draft.empty((count, H, 2, K), FLOAT32)
        if self.gates_columns:
            left += (self.draft.empty((count, H, V), FLOAT32),)
        self.launch_summaries(R, left, P, P if last else P - 1)
        return left

    def states_at_starts(self, left, initial, final):
        """Launches the scan; returns the states [N * P, H, K, V] at the segments' starts. It writes `final`, too."""
        (N, H, K, V), P = self.problem.shape("N H K V"), self.cut.segments
        starts, scan = self.draft.empty((N * P, H, K, V), FLOAT32), ScanSegments.fitting(V)
        arrays = dict(zip(("left", "decays", "column_decays"), left)) | {"initial": initial, "final": final}
        sizes = {"P": P, "R": left[0].shape[0] // (N * P), "H": H, "K": K, "V": V}
        blocks = N * H * ceil_div(K * V, scan.width * scan.threads)
        self.draft.launch(scan, blocks, **arrays, starts=starts, **sizes)
        return starts

    def channels_of(self, kernel) -> range:
        """The first channel of each launch of `kernel`, which takes `kernel.channels` of the K channels."""
        return range(0, self.problem.sizes["K"], kernel.channels)

    def finer_shape(self, parts):
        """As `shape`, with every part of a segment as a segment of its own."""
        spans = self.cut.spans
        return self.draft.shape(self.problem, spans.segments(parts, self.cut.summary.CHUNK) if parts > 1 else spans)


class PortableForward(ForwardPass):
    """The forward pass by kernels that run on every card. With several launches for the channels, each adds to o."""

    @cached_property
    def sums(self):
        """float32 memory for the sum of o over the launches for channels; None if one launch takes all channels."""
        split = self.cut.kernel.schedule == SPLIT_CHANNELS
        return self.draft.empty(self.problem.shape("B H T V"), FLOAT32) if split else None

    @property
    def rows(self) -> dict:
        """The arrays with a row for every token and head."""
        return {"q": self.q, "k": self.k, "v": self.v, "g": self.g, "o": self.o}

    def launch_outputs(self, shape, initial, final):
        self.launch(self.cut.kernel, shape, initial=initial, final=final, u=self.u)

    def launch(self, kernel, shape, **more):
        (B, H, K, V), rows = self.problem.shape("B H K V"), self.rows
        more |= {"shape": shape, "scale": self.problem.scale, "sums": self.sums, "bytes": common_bytes(*rows.values())}
        blocks = B * H * shape.count * kernel.grid(V)
        for channel in self.channels_of(kernel):
            self.draft.launch(kernel.with_channels(K - channel), blocks, **rows, **more, channel=channel)

    def launch_summaries(self, parts, left, of, needed):
        kernel, (N, H, V), rows = self.cut.summary, self.problem.shape("N H V"), {"k": self.k, "v": self.v, "g": self.g}
        options = {"left": left[0], "decays": left[1], "of": of, "needed": needed, "parts": parts}
        options |= {"shape": self.draft.shape(self.problem, self.cut.spans), "bytes": common_bytes(*rows.values())}
        blocks = N * H * needed * parts * kernel.grid(V)
        for channel in self.channels_of(kernel):
            self.draft.launch(kernel, blocks, **rows, **options, channel=channel)


class WideForward(PortableForward):
    """The forward pass by two kernels: the first prepares operands and scores of all chunks, the second multiplies."""

    def shape(self, spans=None):
        return self.draft.shape(self.problem, spans, GatedWideForward.CHUNK)

    def launch_outputs(self, shape, initial, final):
        draft, problem, kernel = self.draft, self.problem, self.cut.kernel
        B, H, V = problem.shape("B H V")
        chunks, tiles, size = (B, H, shape.NC), kernel.channel_tiles, kernel.CHUNK * kernel.TILE
        intermediate = {
            "operands": draft.empty((*chunks, tiles, 2, size), problem.dtype),
            "scores": draft.empty((*chunks, kernel.SCORES), problem.dtype),
            "decays": draft.empty((*chunks, kernel.channels), FLOAT32),
        }
        prepare, q_k_g = (
            GatedWideOperands(read_order(problem.op), problem.dtype, self.g.dtype),
            (self.q, self.k, self.g),
        )
        rows = dict(zip("qkg", q_k_g))
        draft.launch(
            prepare, shape.all_chunks, **rows, u=self.u, **intermediate, shape=shape, bytes=common_bytes(*q_k_g)
        )
        rows = {"v": self.v, "o": self.o, "bytes": common_bytes(self.v, self.o)}
        states = {"initial": initial, "final": final}
        blocks = B * H * shape.count * kernel.grid(V)
        draft.launch(kernel, blocks, **rows, **intermediate, **states, shape=shape, scale=problem.scale)


class SmallForward(ForwardPass):
    """The forward pass by kernels in which a warp computes several heads."""

    def launch_outputs(self, shape, initial, final):
        more = {"u": self.u, "initial": initial, "final": final}
        self.launch(self.cut.kernel, shape, self.problem.sizes["B"] * shape.count, {"o": self.o}, **more)

    def launch_summaries(self, parts, left, of, needed):
        (states, decays), shape = left, self.draft.shape(self.problem, self.cut.spans)
        more = {"left": states, "decays": decays, "of": of, "needed": needed, "both": False}
        self.launch(self.cut.summary, shape, self.problem.sizes["N"] * needed, {}, **more)

    def launch(self, kernel, shape, sequences, written, **more):
        arrays = {"k": self.k, "v": self.v, "g": self.g, "q": self.q} | written
        more |= {"shape": shape, "scale": self.problem.scale, "bytes": common_bytes(*arrays.values())}
        self.draft.launch(kernel, kernel.blocks(sequences * self.problem.sizes["H"]), **arrays, **more)


class HopperForward(ForwardPass):
    """The forward pass by Hopper's kernel, which can also store the states at every `cut.marks` chunks (`marks`)."""

    last_leaves_final = True
    marks = None

    def run(self, final, kept=()):
        if self.cut.marks:
            N, H, K, V = self.problem.shape("N H K V")
            self.marks = self.draft.empty((N * self.cut.backward_segments, H, K, V), FLOAT32)
            self.saved = (self.marks,)
        if not self.cut.first:
            super().run(final, kept)
            if self.cut.starts_are_the_backwards:
                self.saved = (self.starts,)
            return
        (N, H, K, V), initial = self.problem.shape("N H K V"), self.draft.initial(self.problem)
        left, decays = self.draft.empty((2 * N, H, K, V), FLOAT32), self.draft.empty((2 * N, H, 2, K), FLOAT32)
        self.launch_summaries(1, (left, decays), 2, 1, initial)
        self.launch_outputs(self.shape(self.cut.spans), initial, final, left)

    def starts_of_the_backward(self):
        """Launches what computes the states at the starts of the pullback's segments, and returns these states."""
        if self.cut.starts_are_the_backwards:
            return self.states_at_starts(self.left_by_segments(False), self.draft.initial(self.problem), None)
        self.o = self.draft.empty(self.o.shape, self.o.dtype)  # the kernel writes o, which is not used
        self.run(None)
        return self.marks

    def launch_outputs(self, shape, initial, final, left=None):
        """`left`: if each sequence has two segments, the state that the first leaves and the second starts from."""
        states = {"initial": initial, "final": final, "segment_states": left}
        self.launch(self.cut.kernel, shape, 1, states, segments=self.cut.segments, computed=1)

    def launch_summaries(self, parts, left, of, needed, initial=None):
        states = {"initial": initial, "final": left[0], "decays": left[1]}
        shape = self.draft.shape(self.problem, self.cut.spans)
        self.launch(self.cut.summary, shape, parts, states, segments=of, computed=needed)

    def launch(self, kernel, shape, parts, states, **which):
        B, H, V = self.problem.shape("B H V")
        marks = self.marks if kernel.reads else None
        marks_per_sequence = 0 if marks is None else marks.shape[0] // (B * shape.count)
        which |= {"marks": marks, "mark_every": self.cut.marks if self.marks is not None else 0}
        which |= {"marks_per_sequence": marks_per_sequence, "parts": parts}
        arrays = self.inputs_of(kernel) | states | {"o": self.o, "u": self.u}
        which |= {"backwards": any(x.strides[2] < 0 for x in (self.q, self.k, self.v, self.o))}
        blocks = B * H * shape.count * parts * kernel.grid(V)
        for channel in self.channels_of(kernel):
            self.draft.launch(kernel, blocks, **arrays, **which, shape=shape, scale=self.problem.scale, channel=channel)

    def inputs_of(self, kernel) -> dict:
        """q, k, g, v as tensor maps and as rows, and o as tensor map `o_boxes`, by the names of kernel arguments."""
        channels, columns = {"q": self.q, "k": self.k, "g": self.g}, {"v": self.v, "o_boxes": self.o}
        maps = {name: TensorMap(x, kernel.BK, kernel.CHUNK, False) for name, x in channels.items()}
        maps |= {name: TensorMap(x, PANEL, kernel.CHUNK, True) for name, x in columns.items()}
        return maps | {f"{name}_rows": x for name, x in zip("qkgv", (self.q, self.k, self.g, self.v))}


PASSES = {SMALL: SmallForward, HOPPER: HopperForward, WIDE: WideForward, PORTABLE: PortableForward}
