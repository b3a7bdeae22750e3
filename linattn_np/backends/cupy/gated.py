"""The gated family: recurrences with a gate for every channel. One pass on every card, and Hopper's own.

Hopper's kernel may cut sequences; `tuning` says how. Nothing here knows of gates that channels share.
"""

from __future__ import annotations

from ...contract import CHUNK, SUB_CHUNK
from . import gated_vjp, stages, tuning
from .instances import (
    CHANNELS,
    CLUSTER_SPLIT_K,
    CLUSTER_SPLIT_V,
    PANEL,
    SEGMENT_STATE,
    SINGLE_PASS,
    TILES,
    GatedForward,
    GatedForwardSm90,
    Recurrent,
    ScanSegments,
    channels,
    columns,
    read_order,
)
from .kernel import CTYPES
from .plan import FLOAT32, Draft, TensorMap, aligned16_in_rows, ceil_div, mappable_in_rows

MODES = ("auto", "recurrent", "chunk", "staged")
plan_vjp = gated_vjp.plan_vjp


def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    if problem.dtype not in CTYPES:
        return f"no {problem.dtype} kernels; it has {', '.join(map(str, CTYPES))}"
    if problem.mode not in MODES:
        return f"no mode {problem.mode!r}; it has {', '.join(map(repr, MODES))}"
    if mode_of(problem) == "chunk" and problem.materialize:
        return "mode 'chunk' is one pass that keeps no chunk's state; mode 'staged' keeps them"
    if problem.sizes["K"] > CHANNELS[-1]:
        return f"K={problem.sizes['K']} is over {CHANNELS[-1]}"
    return gated_vjp.unsupported(problem)


def mode_of(problem) -> str:
    """The mode that runs: "auto" is the one-pass kernel, or the stages when every chunk's state is to be kept."""
    if problem.mode != "auto":
        return problem.mode
    return "staged" if problem.materialize else "chunk"


def plan(problem, device):
    draft, mode = Draft(), mode_of(problem)
    o, final = draft.output(problem), draft.final(problem)
    if mode == "staged":
        tiles = staged(draft, problem, o, final)
    elif mode == "recurrent":
        tiles = recurrent(draft, problem, o, final)
    elif on_hopper(problem, device):
        tiles = OnHopper(draft, problem, device, draft.inputs(problem), o).run(final)
    else:
        tiles = one_pass(draft, problem, o, final)
    return draft.plan((draft.give_back(problem, o), draft.stored(problem, final)), mode=mode, tiles=tiles)


def read_by_tiles(problem) -> list:
    """The caller's arrays that kernels read or write many numbers of at a time."""
    arrays = [x for name, x in problem.arrays.items() if name != "u"]
    return [*arrays, *([] if problem.out is None else [problem.out])]


def on_hopper(problem, device) -> bool:
    """Whether Hopper's own kernel can compute a problem."""
    return device.capability == 90 and problem.dtype.itemsize == 2 and mappable_in_rows(read_by_tiles(problem))


# -- for every card ----------------------------------------------------------------------------------------------------
def one_pass(draft, problem, o, final):
    q, k, v, g = draft.inputs(problem)
    N, H, K, V = problem.shape("N H K V")
    kernel = GatedForward(read_order(problem.op), problem.dtype, g.dtype, channels(K), columns(V))
    draft.launch(
        kernel,
        N * H * ceil_div(V, kernel.BV),
        q=q,
        k=k,
        v=v,
        g=g,
        o=o,
        u=draft.bonus(problem),
        initial=draft.initial(problem),
        final=final,
        shape=draft.shape(problem),
        scale=problem.scale,
        vectors=aligned16_in_rows(read_by_tiles(problem)),
    )
    return kernel.tiles


def recurrent(draft, problem, o, final):
    q, k, v, g = draft.inputs(problem)
    N, H, K, V = problem.shape("N H K V")
    kernel = Recurrent(read_order(problem.op), problem.dtype, g.dtype, channels(K))
    draft.launch(
        kernel,
        N * H * ceil_div(V, kernel.BV),
        q=q,
        k=k,
        v=v,
        g=g,
        o=o,
        u=draft.bonus(problem),
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
    b, e, qg, kg = (draft.empty((B, H, T, K), FLOAT32) for _ in range(4))
    A = draft.empty((B, H, T, shape.chunk), FLOAT32)
    h = draft.empty((B, H, shape.NC, K, V), FLOAT32)
    stages.launch_chunk_cumsum(draft, shape, g, b, e)
    stages.launch_gated_qk(draft, shape, order, q, k, b, e, qg, kg)
    stages.launch_inter_chunk(draft, shape, kg, v, b, h, initial, final)
    stages.launch_intra_chunk(draft, shape, order, q, k, g, draft.bonus(problem), A)
    stages.launch_combine(draft, shape, qg, h, A, v, o, problem.scale)
    return {"BK": channels(K), "BV": stages.STAGE_COLUMNS, "chunk": problem.chunk_size or CHUNK, "sub_chunk": SUB_CHUNK}


# -- Hopper's own ------------------------------------------------------------------------------------------------------
class OnHopper:
    """The forward pass by Hopper's kernel, whose sequences are whole or in segments."""

    def __init__(self, draft, problem, device, arrays, o):
        self.draft, self.problem, self.device = draft, problem, device
        (self.q, self.k, self.v, self.g), self.o = arrays, o
        self.u = draft.bonus(problem)

    def kernel(self, schedule):
        N, H, K, V = self.problem.shape("N H K V")
        order = "AfterWrite" if schedule == SEGMENT_STATE else read_order(self.problem.op)
        return GatedForwardSm90.fitting(order, schedule, self.problem.dtype, self.gate, K, self.width(schedule))

    @property
    def gate(self):
        """The type of the gate that the kernel reads."""
        return self.g.dtype

    def width(self, schedule) -> int:
        """The columns of V that a block would take if it could."""
        return self.problem.sizes["V"]

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

    def run(self, final) -> dict:
        """Everything from the caller's arrays to `o` and `final`; the sizes of what runs."""
        problem, whole = self.problem, self.kernel(self.schedule)
        N, H, V = problem.shape("N H V")
        initial, longest = self.draft.initial(problem), int(problem.spans.lengths.max())
        blocks = N * H * tuning.grid(whole, V)
        P = tuning.segments(blocks, longest, tuning.resident_blocks(whole, self.device))
        if P == 1:
            self.launch(whole, self.draft.shape(problem), initial, final)
            return whole.tiles
        self.in_segments(whole, P, initial, final)
        return whole.tiles | {"segments": P}

    def in_segments(self, whole, P, initial, final):
        """What each part of P segments leaves behind, then the states between segments, then all segments at once."""
        draft, problem, summary = self.draft, self.problem, self.kernel(SEGMENT_STATE)
        N, H, K, V = problem.shape("N H K V")
        R = tuning.parts(summary, N * H, V, P, int(problem.spans.lengths.max()), final is not None, self.device)
        segments = problem.spans.segments(P, whole.CHUNK)
        left, decays = draft.empty((N * P * R, H, K, V), FLOAT32), draft.empty((N * P * R, H, 2, K), FLOAT32)
        starts, shape = draft.empty((N * P, H, K, V), FLOAT32), draft.shape(problem, segments)
        parts = draft.shape(problem, segments.segments(R, GatedForwardSm90.CHUNK)) if R > 1 else shape
        for channel in range(0, K, TILES[-1]):
            self.launch(
                summary, parts, None, left, decays=decays, channel=channel, of=P * R, needed=(P - (final is None)) * R
            )
        scan = ScanSegments()
        draft.launch(
            scan,
            N * H * ceil_div(K * V, 4 * scan.threads),
            left=left,
            decays=decays,
            initial=initial,
            starts=starts,
            final=final,
            P=P,
            R=R,
            H=H,
            K=K,
            V=V,
        )
        self.launch(whole, shape, starts, None)

    def launch(self, kernel, shape, initial, final, decays=None, channel=0, of=1, needed=1):
        """On the sequences or segments that `shape` names, from `channel` on."""
        B, H, V = self.problem.shape("B H V")
        arrays = self.inputs_of(kernel)
        self.draft.launch(
            kernel,
            B * H * shape.count * tuning.grid(kernel, V),
            **arrays,
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
        )

    def inputs_of(self, kernel) -> dict:
        channels = {
            name: TensorMap(x, kernel.BK, kernel.CHUNK, False)
            for name, x in (("q", self.q), ("k", self.k), ("g", self.g))
        }
        return channels | self.columns_of(kernel) | {"one": None}

    def columns_of(self, kernel) -> dict:
        return {name: TensorMap(x, PANEL, kernel.CHUNK, True) for name, x in (("v", self.v), ("o_boxes", self.o))}
