"""The gated family: recurrences with a gate for every channel. One pass on every card, and Hopper's own.

Both may cut sequences; `tuning` says how. Nothing here knows of gates that channels share.
"""

from __future__ import annotations

from functools import cached_property

from ...arrays import BFLOAT16
from ...contract import SUB_CHUNK
from . import float64, gated_vjp, pieces, stages, tuning
from .instances import (
    CHANNELS,
    CLUSTER_SPLIT_K,
    CLUSTER_SPLIT_V,
    PANEL,
    SEGMENT_STATE,
    SINGLE_PASS,
    SPLIT_CHANNELS,
    TILES,
    GatedForward,
    GatedForwardSm90,
    GatedSegmentStates,
    Recurrent,
    ScanSegments,
    channels,
    read_order,
)
from .kernel import CTYPES, DOUBLE
from .message import MessageDraft
from .plan import FLOAT32, Draft, TensorMap, ceil_div, common_bytes, has_rows, mappable, mappable_once_copied
from .small_heads import GatedSmallForward, GatedSmallStates, are_small
from .wide_heads import GatedWideForward, GatedWideOperands

MODES = ("auto", "recurrent", "chunk", "staged")


def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    if problem.dtype == DOUBLE:
        return None if mode_of(problem) == "staged" else float64.unsupported(problem)
    if problem.dtype not in CTYPES:
        return f"no {problem.dtype} kernels; it has {', '.join(map(str, CTYPES))}"
    if problem.mode not in MODES:
        return f"no mode {problem.mode!r}; it has {', '.join(map(repr, MODES))}"
    if mode_of(problem) == "chunk" and problem.materialize:
        return "mode 'chunk' is one pass that keeps no chunk's state; mode 'staged' keeps them"
    if problem.sizes["K"] > CHANNELS[-1] and mode_of(problem) != "chunk":
        return f"K={problem.sizes['K']} is over {CHANNELS[-1]}"
    return None


def mode_of(problem) -> str:
    """The mode that runs: "auto" is the one-pass kernel, or the stages when every chunk's state is to be kept."""
    if problem.mode != "auto":
        return problem.mode
    return "staged" if problem.materialize else "chunk"


def plan_vjp(problem, device, do, dht, saved=(), kept=()):
    if problem.dtype == DOUBLE:
        return float64.plan_vjp(problem, device, do, dht)

    def starts(draft, arrays):
        """As the forward pass of mode "chunk" has them, so that every mode's gradients have the same bits."""
        return OnHopper(draft, problem, device, arrays, o=arrays[2]).starts_of(gated_vjp.segments(problem, device))

    return gated_vjp.plan_vjp(problem, device, do, dht, saved, kept, starts=starts)


plan_summary_vjp = gated_vjp.plan_summary_vjp


def plan(problem, device, kept=()):
    """`kept`: what `plan_summary` of the same tokens has left."""
    if problem.dtype != DOUBLE and mode_of(problem) == "chunk" and pieces.forward_gains(problem):
        return plan_wider(problem, device)
    draft, mode, saved = Draft(), mode_of(problem), ()
    if problem.dtype == DOUBLE and mode != "staged":
        return float64.plan(problem, device)
    by_hopper = mode == "chunk" and on_hopper(problem, device)
    o, final = draft.output(problem, mappable if by_hopper else has_rows), draft.final(problem)
    if mode == "staged":
        tiles = staged(draft, problem, o, final)
    elif mode == "recurrent":
        q, k, v, g = draft.inputs(problem)
        kernel = Recurrent(read_order(problem.op), problem.dtype, g.dtype, channels(problem.sizes["K"]))
        tiles = recurrent(draft, problem, kernel, {"q": q, "k": k, "v": v, "g": g, "u": draft.bonus(problem)}, o, final)
    elif by_hopper:
        launches = OnHopper(draft, problem, device, draft.mapped_inputs(problem), o)
        if problem.gradient:
            launches.leave_marks(gated_vjp.segments(problem, device))
        tiles, saved = launches.run(final, kept), launches.saved()
    else:
        tiles = one_pass(problem, device)(draft, problem, device, draft.inputs(problem), o).run(final)
    results = draft.give_back(problem, o), draft.stored(problem, final)
    return draft.plan(results, mode=mode, tiles=tiles, saved=saved)


def plan_wider(problem, device):
    """The same by copies whose rows are whole pieces of 16 bytes, which Hopper's own kernel may take too."""
    draft, found = pieces.widened(problem, lambda wide: plan(wide, device))
    found_o, final = draft.include(found)
    o = draft.output(problem, fits=lambda out: True)
    end = final and (pieces.narrower(draft, final[0], problem.shape("N H K V")),)
    pieces.copy_rows(draft, [(found_o, o), *zip(final or (), end or ())])
    return draft.plan((o, end), mode=found.mode, tiles=found.tiles)


def plan_summary(problem, device):
    """A plan of ((the final state from zero,), the decay [N, H, K] of any other), side by side in memory, without o;
    what it saves spares `plan` the same pass. None where nothing is cheaper than a whole call."""
    if mode_of(problem) != "chunk" or not on_hopper(problem, device):
        return None
    draft = Draft()
    inputs = draft.mapped_inputs(problem)
    launches = OnHopper(draft, problem, device, inputs, o=inputs[2])  # o is not written: v's map stands for its
    return launches.summary(problem.sizes["K"])


def read_by_tiles(problem) -> list:
    """The caller's arrays that kernels read or write many numbers of at a time."""
    arrays = [x for name, x in problem.arrays.items() if name != "u"]
    return [*arrays, *([] if problem.out is None else [problem.out])]


def on_hopper(problem, device) -> bool:
    """Whether Hopper's own kernel computes a problem: of arrays that tensor maps cannot describe, copies cost less than
    the kernels for every card. Small heads have those of theirs."""
    return (
        not are_small(problem, device) and has_hoppers(problem, device) and mappable_once_copied(read_by_tiles(problem))
    )


def has_hoppers(problem, device) -> bool:
    """Whether there is an instance of Hopper's own kernel for a problem on a device: two blocks' channels at most."""
    return device.capability == 90 and problem.dtype.itemsize == 2 and problem.sizes["K"] <= 2 * TILES[-1]


# -- token by token, and in stages -------------------------------------------------------------------------------------
def recurrent(draft, problem, kernel, arrays, o, final):
    """By a kernel for BV columns a block; the sizes of what runs."""
    N, H, V = problem.shape("N H V")
    draft.launch(
        kernel,
        N * H * ceil_div(V, kernel.BV),
        **arrays,
        o=o,
        initial=draft.initial(problem),
        final=final,
        shape=draft.shape(problem),
        scale=problem.scale,
    )
    return kernel.tiles


def staged(draft, problem, o, final):
    q, k, v, g = draft.inputs(problem)
    B, H, T, K, V = problem.shape("B H T K V")
    shape, order, initial = draft.shape(problem), read_order(problem.op), draft.initial(problem)
    real = problem.compute_dtype
    b, e, qg, kg = (draft.empty((B, H, T, K), real) for _ in range(4))
    A = draft.empty((B, H, T, shape.chunk), real)
    h = draft.empty((B, H, shape.NC, K, V), real)
    stages.launch_chunk_cumsum(draft, shape, g, b, e)
    stages.launch_gated_qk(draft, shape, order, q, k, b, e, qg, kg)
    stages.launch_inter_chunk(draft, shape, kg, v, b, h, initial, final)
    stages.launch_intra_chunk(draft, shape, order, q, k, g, draft.bonus(problem), A)
    stages.launch_combine(draft, shape, qg, h, A, v, o, problem.scale)
    if problem.dtype == DOUBLE:
        return {"chunk": shape.chunk}
    return {"BK": channels(K), "BV": stages.STAGE_COLUMNS, "chunk": shape.chunk, "sub_chunk": SUB_CHUNK}


# -- in one pass -------------------------------------------------------------------------------------------------------
class OnePass:
    """The forward pass by one kernel, whose sequences are whole or in segments. Subclasses say which and launch it."""

    def __init__(self, draft, problem, device, arrays, o):
        self.draft, self.problem, self.device = draft, problem, device
        (self.q, self.k, self.v, self.g), self.o = arrays, o
        self.u = draft.bonus(problem)

    schedule = SINGLE_PASS  # that of uncut sequences
    column_decays = None  # of the parts of segments, where columns have gates too
    starts = None  # the states that segments start from
    spared = 0  # tokens of a block that a cut has to spare
    finishes = False  # whether the last segments leave the final states, which the join of summaries gives otherwise

    def kernel(self, schedule):
        """The instance that computes the problem by a schedule."""
        raise NotImplementedError

    def launch(self, kernel, shape, initial, final, decays=None, channel=0, of=1, needed=1):
        """On the sequences or segments that `shape` names, from `channel` on."""
        raise NotImplementedError

    def shape(self, spans=None):
        """Where the tokens are, to the kernel that gives o."""
        return self.draft.shape(self.problem, spans)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.problem.spans.lengths.max())

    def run(self, final, kept=()) -> dict:
        """Everything from the caller's arrays to `o` and `final`; the sizes of what runs."""
        problem, whole = self.problem, self.kernel(self.schedule)
        initial, P = self.draft.initial(problem), self.segments(whole)
        if P == 1:
            self.launches(whole, self.shape(), initial, final)
            return whole.tiles
        joined, last = (None, final) if self.finishes else (final, None)
        left, decays = kept or self.left_by_segments(P, joined is not None)
        self.starts = self.between_segments(P, left, decays, initial, joined)
        self.launches(whole, self.shape(self.cut(P)), self.starts, last, of=P if self.finishes else 1)
        return whole.tiles | {"segments": P}

    def summary(self, channels):
        """The plan of the final state from zero and so many channels of its decay; it saves what `run` may go on
        from."""
        P, message = self.segments(self.kernel(self.schedule)), MessageDraft(self.draft, self.problem, channels)
        left, decays = self.left_by_segments(P, True)
        self.between_segments(P, left, decays, None, message.state)
        return self.draft.plan(message.finish(decays), saved=(left, decays))

    def segments(self, whole) -> int:
        """Into how many a sequence is cut."""
        N, H, V = self.problem.shape("N H V")
        resident = tuning.resident_blocks(whole, self.device)
        return tuning.segments(N * H * tuning.grid(whole, V), self.longest, resident, self.spared)

    def parts(self, P, final) -> int:
        """Into how many each of P segments is cut to be summarised."""
        N, H, V = self.problem.shape("N H V")
        return tuning.parts(self.kernel(SEGMENT_STATE), N * H, V, P, self.longest, final, self.device)

    def cut(self, P):
        """P segments of every sequence."""
        return self.problem.spans.segments(P, self.kernel(SEGMENT_STATE).CHUNK)

    def left_by_segments(self, P, final):
        """What each part of P segments leaves behind, (states [N * P * R, H, K, V], decays [N * P * R, H, 2, K]); of
        the last segment only for a `final` state."""
        draft, problem, summary = self.draft, self.problem, self.kernel(SEGMENT_STATE)
        N, H, K, V = problem.shape("N H K V")
        R, segments = self.parts(P, final), self.cut(P)
        left, decays = draft.empty((N * P * R, H, K, V), FLOAT32), draft.empty((N * P * R, H, 2, K), FLOAT32)
        self.summarise(summary, segments, R, left, decays, of=P, needed=P if final else P - 1)
        return left, decays

    def summarise(self, kernel, segments, R, left, decays, of, needed, initial=None):
        """`needed` of each `of` segments in R parts, to `left` and `decays`; the first from `initial`, if any."""
        parts = self.draft.shape(self.problem, segments.segments(R, kernel.CHUNK) if R > 1 else segments)
        self.launches(kernel, parts, initial, left, decays=decays, of=of * R, needed=needed * R)

    def summarise_remembered(self, kernel, segments, R, left, decays, of, needed, initial=None):
        """The same by a kernel that makes the parts, of what it finds that a segment's end remembers."""
        shape = self.draft.shape(self.problem, segments)
        self.launches(kernel, shape, initial, left, decays=decays, of=of, needed=needed, parts=R)

    def between_segments(self, P, left, decays, initial, final):
        """The states [N * P, H, K, V] at the starts of segments, and `final`."""
        draft = self.draft
        N, H, K, V = self.problem.shape("N H K V")
        starts, scan = draft.empty((N * P, H, K, V), FLOAT32), ScanSegments.fitting(V)
        draft.launch(
            scan,
            N * H * ceil_div(K * V, scan.width * scan.threads),
            left=left,
            decays=decays,
            column_decays=self.column_decays,
            initial=initial,
            starts=starts,
            final=final,
            P=P,
            R=left.shape[0] // (N * P),
            H=H,
            K=K,
            V=V,
        )
        return starts

    def launches(self, kernel, *args, **more):
        """One for all channels that the kernel takes at once."""
        for channel in range(0, self.problem.sizes["K"], kernel.channels):
            self.launch(kernel, *args, channel=channel, **more)


class OnEveryCard(OnePass):
    """By the kernel of every card. More channels than it has are more launches, whose outputs add up."""

    summarise = OnePass.summarise_remembered

    @property
    def schedule(self):
        return SPLIT_CHANNELS if self.problem.sizes["K"] > TILES[-1] else SINGLE_PASS

    def kernel(self, schedule):
        products, sizes = tuning.tf32_products(self.problem), self.problem.shape("K V")
        instance = self.problem.dtype, self.g.dtype, products, *sizes, self.device.shared_per_block
        if schedule == SEGMENT_STATE:
            return GatedSegmentStates.fitting(*instance)
        return GatedForward.fitting(read_order(self.problem.op), schedule, *instance)

    @cached_property
    def sums(self):
        """What outputs are of the channels so far."""
        split = self.kernel(self.schedule).schedule == SPLIT_CHANNELS
        return self.draft.empty(self.problem.shape("B H T V"), FLOAT32) if split else None

    def rows(self) -> dict:
        """The arrays with a row for every token."""
        return {"q": self.q, "k": self.k, "v": self.v, "g": self.g, "o": self.o}

    def more(self, decays=None, of=1, needed=1) -> dict:
        """What else a launch takes that gives o: here none leaves decays."""
        return {"u": self.u}

    def launch(self, kernel, shape, initial, final, channel=0, **summary):
        if isinstance(kernel, GatedSegmentStates):
            self.launch_summary(kernel, shape, final, channel=channel, **summary)
            return
        (B, H, K, V), arrays = self.problem.shape("B H K V"), self.rows()
        kernel = kernel.with_channels(K - channel)
        self.draft.launch(
            kernel,
            B * H * shape.count * tuning.grid(kernel, V),
            **arrays,
            **self.more(**summary),
            initial=initial,
            final=final,
            shape=shape,
            scale=self.problem.scale,
            sums=self.sums,
            channel=channel,
            bytes=common_bytes(*arrays.values()),
        )

    def launch_summary(self, kernel, shape, left, of, needed, parts, **more):
        """What `shape`'s segments leave behind, of `of` in turn the first `needed`."""
        B, H, V = self.problem.shape("B H V")
        arrays = {"k": self.k, "v": self.v, "g": self.g}
        more |= {"shape": shape, "of": of, "needed": needed, "parts": parts, "bytes": common_bytes(*arrays.values())}
        blocks = B * H * shape.count // of * needed * parts * tuning.grid(kernel, V)
        self.draft.launch(kernel, blocks, **arrays, left=left, **more)


def one_pass(problem, device) -> type[OnePass]:
    """Which kernels of every card compute a problem."""
    if are_small(problem, device):
        return SmallHeads
    return WideHeads if has_wide_heads(problem, device) else OnEveryCard


class SmallHeads(OnePass):
    """By kernels of which a warp has several heads."""

    def kernel(self, schedule):
        of = GatedSmallStates if schedule == SEGMENT_STATE else GatedSmallForward
        return of.fitting(read_order(self.problem.op), self.problem, self.g.dtype)

    def segments(self, whole):
        N, H = self.problem.shape("N H")
        return whole.segments(N * H, self.longest, self.device)

    def parts(self, P, final):
        return 1

    def launch(self, kernel, shape, initial, final, decays=None, channel=0, of=1, needed=1):
        B, H = self.problem.shape("B H")
        arrays = {"k": self.k, "v": self.v, "g": self.g, "q": self.q}
        both = {"initial": initial, "shape": shape, "scale": self.problem.scale}
        blocks = kernel.blocks(B * H * shape.count // of * needed)
        if isinstance(kernel, GatedSmallForward):
            arrays |= {"o": self.o}
            both |= {"u": self.u, "final": final, "bytes": common_bytes(*arrays.values())}
            self.draft.launch(kernel, blocks, **arrays, **both)
            return
        unasked = {"do_": None, "dht": None, "both": False}
        given = {"left": final, "decays": decays, "of": of, "needed": needed, "bytes": common_bytes(*arrays.values())}
        self.draft.launch(kernel, blocks, **arrays, **both, **given, **unasked)


def has_wide_heads(problem, device) -> bool:
    """Whether the kernels of wide heads compute a problem: of more channels than one launch has, if a block holds all
    of them, and has room for their operands."""
    kernel = GatedWideForward.fitting(problem.dtype, problem.sizes["K"])
    most = max(kernel.shared_bytes, GatedWideOperands(read_order(problem.op), problem.dtype, FLOAT32).shared_bytes)
    fits = kernel.channel_tiles <= kernel.MOST_TILES and most <= device.shared_per_block
    return fits and problem.dtype == BFLOAT16 and problem.sizes["K"] > TILES[-1]


class WideHeads(OnEveryCard):
    """By two kernels: one makes operands and scores, of all chunks at once, and one multiplies."""

    schedule = SINGLE_PASS
    sums = None

    def kernel(self, schedule):
        if schedule == SEGMENT_STATE:
            return super().kernel(schedule)
        return GatedWideForward.fitting(self.problem.dtype, self.problem.sizes["K"])

    def shape(self, spans=None):
        return self.draft.shape(self.problem, spans, GatedWideForward.CHUNK)

    def launch(self, kernel, shape, initial, final, **more):
        if not isinstance(kernel, GatedWideForward):
            super().launch(kernel, shape, initial, final, **more)
            return
        draft, problem, dtype = self.draft, self.problem, self.problem.dtype
        B, N, H, V = problem.shape("B N H V")
        chunks, tiles, size = (B, H, shape.NC), kernel.channel_tiles, kernel.CHUNK * kernel.TILE
        left = {
            "operands": draft.empty((*chunks, tiles, 2, size), dtype),
            "scores": draft.empty((*chunks, kernel.SCORES), dtype),
            "decays": draft.empty((*chunks, kernel.channels), FLOAT32),
        }
        first, read = GatedWideOperands(read_order(problem.op), dtype, self.g.dtype), (self.q, self.k, self.g)
        q, k, g = read
        draft.launch(first, shape.all_chunks, q=q, k=k, g=g, u=self.u, **left, shape=shape, bytes=common_bytes(*read))
        draft.launch(
            kernel,
            B * H * shape.count * tuning.grid(kernel, V),
            v=self.v,
            o=self.o,
            **left,
            initial=initial,
            final=final,
            shape=shape,
            scale=problem.scale,
            bytes=common_bytes(self.v, self.o),
        )


class OnHopper(OnePass):
    """By Hopper's own kernel."""

    finishes = True
    spared = property(lambda self: tuning.SPARED - tuning.SPARED_BACKWARD * self.problem.gradient)
    summarise = OnePass.summarise_remembered

    def kernel(self, schedule):
        N, H, K, V = self.problem.shape("N H K V")
        order = "AfterWrite" if schedule == SEGMENT_STATE else read_order(self.problem.op)
        return GatedForwardSm90.fitting(order, schedule, self.problem.dtype, self.gate, K, self.width(schedule))

    @property
    def gate(self):
        """The type of the gate that the kernel reads."""
        return self.g.dtype

    def width(self, schedule) -> int:
        """The columns of V that a block would take if it could: half of them in float16 where that spares a cut. For
        bfloat16 blocks of a cluster do better."""
        N, H, V = self.problem.shape("N H V")
        halves = schedule == SINGLE_PASS and self.problem.dtype != BFLOAT16
        narrow = halves and tuning.narrow_blocks(N * H, V, self.longest, self.device)
        return TILES[0] if narrow else V

    @property
    def schedule(self):
        """That of uncut sequences: more channels than a block has are two blocks' work, and so may be columns."""
        if self.problem.sizes["K"] > TILES[-1]:
            return CLUSTER_SPLIT_K
        return CLUSTER_SPLIT_V if self.split_columns() else SINGLE_PASS

    def split_columns(self) -> bool:
        N, H, V = self.problem.shape("N H V")
        kernels = self.kernel(SINGLE_PASS), self.kernel(CLUSTER_SPLIT_V)
        return tuning.split_columns(N * H, V, int(self.problem.spans.lengths.max()), self.device, *kernels)

    def run(self, final, kept=()):
        short = self.short_first_segment()
        return self.run_in_two(short, final) if short else super().run(final, kept)

    def short_first_segment(self) -> int:
        """How many tokens the first of two segments has; 0 where sequences are whole, or segments as long."""
        whole, (N, H, T, V) = self.kernel(self.schedule), self.problem.shape("N H T V")
        if self.problem.varlen or self.segments(whole) > 1:
            return 0
        blocks = N * H * tuning.grid(whole, V)
        return tuning.short_first_segment(blocks, T, tuning.resident_blocks(whole, self.device))

    def run_in_two(self, short, final) -> dict:
        """As `run`, of a first segment and the rest, which goes on from the state that the first one's summary has."""
        draft, whole, summary = self.draft, self.kernel(self.schedule), self.kernel(SEGMENT_STATE)
        N, H, K, V = self.problem.shape("N H K V")
        spans, initial = self.problem.spans.split_at(short), draft.initial(self.problem)
        left, decays = draft.empty((2 * N, H, K, V), FLOAT32), draft.empty((2 * N, H, 2, K), FLOAT32)
        self.summarise(summary, spans, 1, left, decays, of=2, needed=1, initial=initial)
        self.launches(whole, self.shape(spans), initial, final, of=2, left=left)
        return whole.tiles | {"segments": 2}

    marks, every = None, 0  # states that the kernel leaves on its way, before every so many chunks: a power of two

    def leave_marks(self, P):
        """Has `run` leave them at the starts of the gradients' P segments, where each of its own is some of those.

        Where these begin with a short segment they need none.
        """
        if not P or gated_vjp.short_segment(self.problem, self.device, P):
            return
        whole, (N, H, K, V) = self.kernel(self.schedule), self.problem.shape("N H K V")
        mine = self.segments(whole)
        if self.short_first_segment():
            return
        shortest, longest = int(self.problem.spans.lengths.min()), self.longest
        length, of_mine = (ceil_div(longest, n * GatedForwardSm90.CHUNK) * GatedForwardSm90.CHUNK for n in (P, mine))
        every = length // GatedForwardSm90.CHUNK
        nested = P > mine and P % mine == 0 and (mine == 1 or of_mine * mine == length * P)
        if nested and every & every - 1 == 0 and shortest == longest > (P - 1) * length:
            self.marks, self.every = self.draft.empty((N * P, H, K, V), FLOAT32), every

    def saved(self) -> tuple:
        """What spares the pullback half of its summaries: the states at its segments' starts, where `run` has them."""
        if self.marks is not None or self.starts is None or not self.problem.gradient:
            return () if self.marks is None else (self.marks,)
        P = self.segments(self.kernel(self.schedule))
        alike = P > 1 and P == gated_vjp.segments(self.problem, self.device)
        return (self.starts,) if alike else ()

    def starts_of(self, P):
        """The states that P segments start from, by themselves; None where `run` does not have them."""
        if self.segments(self.kernel(self.schedule)) == P:
            return self.between_segments(P, *self.left_by_segments(P, False), self.draft.initial(self.problem), None)
        self.leave_marks(P)
        if self.marks is not None:
            self.o = self.draft.empty(self.o.shape, self.o.dtype)
            self.run(None)
        return self.marks

    def launch(self, kernel, shape, initial, final, decays=None, channel=0, of=1, needed=1, parts=1, left=None):
        """On the sequences or segments that `shape` names, from `channel` on."""
        B, H, V = self.problem.shape("B H V")
        arrays = self.inputs_of(kernel)
        marked = self.marks is not None and kernel.reads
        self.draft.launch(
            kernel,
            B * H * shape.count * parts * tuning.grid(kernel, V),
            **arrays,
            marks=self.marks if marked else None,
            every=self.every,
            per=self.marks.shape[0] // (B * shape.count) if marked else 0,
            o=self.o,
            u=self.u,
            initial=initial,
            final=final,
            shape=shape,
            scale=self.problem.scale,
            decays=decays,
            channel=channel,
            of=of,
            needed=needed,
            parts=parts,
            left=left,
        )

    def inputs_of(self, kernel) -> dict:
        channels = {
            name: TensorMap(x, kernel.BK, kernel.CHUNK, False)
            for name, x in (("q", self.q), ("k", self.k), ("g", self.g))
        }
        return channels | self.columns_of(kernel) | {"one": None}

    def columns_of(self, kernel) -> dict:
        return {name: TensorMap(x, PANEL, kernel.CHUNK, True) for name, x in (("v", self.v), ("o_boxes", self.o))}
