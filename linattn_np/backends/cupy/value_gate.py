"""gla with a gate on either side of the state, in chunks, and forwards also token by token.

Turned over, a state with its gates is one of values for keys. So the gradients come from kernels that run twice, once
for either side: queries, keys and g; and do, values and gv.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from . import float64, gated, gated_vjp, segments
from .arguments import integers, pointers, reals, rows, shape
from .gated_forward import PortableForward
from .instances import (
    CHANNELS,
    SEGMENT_STATE,
    SINGLE_PASS,
    SPLIT_CHANNELS,
    TILES,
    GatedBackwardChannels,
    GatedForward,
    channels,
    tile_bytes,
)
from .kernel import CTYPES, DOUBLE, Kernel, TiledKernel
from .plan import FLOAT32, Draft, aligned16, ceil_div
from .segments import PORTABLE


@dataclass(frozen=True)
class ValueGateForward(TiledKernel):
    """Forward in chunks: BK channels a launch, tiles and schedules as `GatedForward` has them."""

    file = "value_gate/forward"
    arguments = (
        *rows("q k v g gv o"),
        *pointers("initial final"),
        *shape,
        *reals("scale"),
        *pointers("sums channel_decays column_decays"),
        *integers("channel of needed bytes"),
    )
    shared = ("ValueShared<{schedule}, {dtype}, {gate}, {BK}, {BV}>",)
    ALIKE: ClassVar[type] = GatedForward  # whose tiles, schedules and operands these are
    SUB_CHUNK = GatedForward.SUB_CHUNK
    schedule: str
    dtype: np.dtype
    gate: np.dtype
    products: int  # as `GatedForward` has them
    BK: int
    BV: int

    @classmethod
    def fitting(cls, schedule, dtype, gate, products, K, V, shared):
        """For a device whose blocks may have so many bytes of shared memory: as many columns, then channels, as that
        allows. Fewer channels than there are make it `SplitChannels`."""
        wide, columns = TILES[K > TILES[0]], TILES[V > TILES[0]]
        tiles = [(schedule, wide, columns), (schedule, wide, TILES[0]), (SPLIT_CHANNELS, TILES[0], columns)]
        if schedule == SPLIT_CHANNELS:
            del tiles[1]
        kernels = [cls(schedule, dtype, gate, products, BK, BV) for schedule, BK, BV in tiles]
        return next(kernel for kernel in kernels if kernel.shared_bytes <= shared)

    @property
    def ungated(self):
        """The same without gates of columns."""
        return self.ALIKE("AfterWrite", self.schedule, self.dtype, self.gate, self.products, self.BK, self.BV)

    def with_channels(self, _left):
        """The instance for a launch: the last one's channels are as many as the others'."""
        return self

    @property
    def CHUNK(self):
        return self.ungated.CHUNK

    @property
    def threads(self):
        return self.ungated.threads

    @property
    def resident(self):
        return self.ungated.resident

    @property
    def shared_bytes(self):
        return self.ungated.shared_bytes + self.CHUNK * self.BV * self.gate.itemsize


@dataclass(frozen=True)
class ValueGateRecurrent(TiledKernel):
    """Forward token by token."""

    file = "value_gate/recurrent"
    arguments = (*rows("q k v g gv o"), *pointers("initial final"), *shape, *reals("scale"))
    shared = ("Shared<{BK}>",)
    threads = 128
    BV: ClassVar[int] = 32
    dtype: np.dtype
    gate: np.dtype
    BK: int

    @property
    def shared_bytes(self):
        return 4 * (3 * 16 * self.BK + 2 * 16 * 32 + 4 * 16 * 32)


@dataclass(frozen=True)
class ValueGateBackwardScores(Kernel):
    """Backward, of one side: scores, and tokens decayed to the ends of chunks."""

    file = "value_gate/backward_scores"
    arguments = (
        *rows("q k g starts ends"),
        *pointers("pairs own decays"),
        *shape,
        *integers("first heads"),
        *reals("scale"),
        *integers("vectors"),
    )
    shared = ("Shared<{dtype}, {gate}, {products}>",)
    threads = 128
    dtype: np.dtype
    gate: np.dtype
    products: int

    @property
    def shared_bytes(self):
        channels = GatedBackwardChannels("AfterWrite", self.dtype, self.gate, self.products)
        tokens = 2 * tile_bytes(64, 32, self.dtype) + tile_bytes(64, 32, self.gate)
        left = 5 * tile_bytes(32, 64, channels.stored) + 2 * tile_bytes(64, 32, channels.stored)
        return tokens + left + 4 * 4 * 64


@dataclass(frozen=True)
class ValueGateBackwardStates(Kernel):
    file = "value_gate/backward_states"
    arguments = (
        *rows("q k v do_"),
        *pointers("channel_decays column_decays initial dht kept dh0"),
        *shape,
        *integers("first heads"),
        *reals("scale"),
    )
    shared = ("Shared<{dtype}, {products}>",)
    threads = 128
    dtype: np.dtype
    products: int

    @property
    def shared_bytes(self):
        stored = GatedBackwardChannels("AfterWrite", self.dtype, self.dtype, self.products).stored
        return 3 * (2 * tile_bytes(32, 64, stored) + 4 * 2 * 64)


# -- plans -------------------------------------------------------------------------------------------------------------
def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    if problem.dtype == DOUBLE:
        return float64.unsupported(problem)
    if problem.dtype not in CTYPES:
        return f"no {problem.dtype} kernels; it has {', '.join(map(str, CTYPES))}"
    if problem.mode == "recurrent" and problem.sizes["K"] > CHANNELS[-1]:
        return f"K={problem.sizes['K']} is over {CHANNELS[-1]}"
    return None


def plan(problem, device):
    if problem.dtype == DOUBLE:
        return float64.plan(problem, device)
    draft = Draft()
    o, final, arrays = draft.output(problem), draft.final(problem), operands(draft, problem)
    if problem.mode == "recurrent":
        named = dict(zip(("q", "k", "v", "g", "gv"), arrays, strict=True))
        kernel = ValueGateRecurrent(problem.dtype, named["g"].dtype, channels(problem.sizes["K"]))
        return gated.launch_recurrent(draft, problem, kernel, named, o, final)
    launches = ValueGateForwardPass(draft, problem, forward_cut(problem, device, arrays[3].dtype), arrays, o)
    launches.run(final)
    results = draft.give_back(problem, o), draft.stored(problem, final)
    return draft.plan(results, mode=problem.mode, tiles=launches.cut.tiles)


def forward_cut(problem, device, gate):
    """How the forward pass is cut, whose gates are both of one dtype. More channels than a launch has are more launches
    even if sequences are summarised."""
    instance = problem.dtype, gate, segments.tf32_products(problem), *problem.shape("K V"), device.shared_per_block
    schedule = SPLIT_CHANNELS if problem.sizes["K"] > TILES[-1] else SINGLE_PASS
    kernels = (ValueGateForward.fitting(schedule, *instance) for schedule in (schedule, SEGMENT_STATE))
    return segments.filled(problem, device, PORTABLE, *kernels)


class ValueGateForwardPass(PortableForward):
    """In chunks, with gates on either side of the state."""

    gates_columns = True

    def __init__(self, draft, problem, cut, arrays, o):
        *ungated, self.gv = arrays
        super().__init__(draft, problem, cut, ungated, o)

    @property
    def rows(self):
        return super().rows | {"gv": self.gv}

    def launch_outputs(self, shape, initial, final):
        self.launch_decays(self.cut.kernel, shape, initial, final)

    def launch_summaries(self, parts, left, of, needed):
        self.launch_decays(self.cut.summary, self.finer_shape(parts), None, *left, of * parts, needed * parts)

    def launch_decays(self, kernel, shape, initial, final, channels=None, columns=None, of=1, needed=1):
        """`channels`, `columns`: the decays that a segment leaves, if it is to leave any."""
        decays = {"channel_decays": channels, "column_decays": columns}
        self.launch(kernel, shape, initial=initial, final=final, **decays, of=of, needed=needed)


def plan_vjp(problem, device, do, dht, saved=()):
    if problem.dtype == DOUBLE:
        return float64.plan_vjp(problem, device, do, dht, saved)
    draft = Draft()
    arrays, do = operands(draft, problem), gated_vjp.as_inputs(draft, problem, do)
    dht, dh0 = gated_vjp.cotangent(draft, dht), gated_vjp.gradient_of_state(draft, problem)
    gradients = ValueGateBackward(draft, problem, arrays, do, draft.initial(problem), dht, dh0)
    found = tuple(draft.cast(x, given.dtype) for x, given in zip(gradients.launched(), problem.arrays.values()))
    return draft.plan((found, gated_vjp.stored(draft, problem, dh0)), tiles=gradients.channels.tiles)


class ValueGateSide:
    """The keys' side of the state, or the values': what takes the place of queries, keys and their gates there, their
    gradients, and what kernels leave for one another. `turned`: with values for keys."""

    def __init__(self, draft, problem, instance, heads, arrays, turned):
        self.draft, self.problem, self.turned, (self.q, self.k, self.g) = draft, problem, turned, arrays
        B, T, K, V = problem.shape("B T K V")
        self.K, self.V = (V, K) if turned else (K, V)
        self.shape = draft.shape(problem, None, instance.CHUNK, K=self.K, V=self.V)
        self.dq = None if turned else draft.like(self.q)
        self.dk, self.dg = draft.like(self.k), draft.like(self.g)
        stored, chunks, width = instance.stored, (B, heads, self.shape.NC), ceil_div(self.K, 8) * 8
        self.starts, self.ends = (draft.empty((B, heads, T, width), stored) for _ in range(2))
        self.pairs, self.own = draft.empty((*chunks, 64, 64), stored), draft.empty((*chunks, 64), FLOAT32)
        self.decays = draft.empty((*chunks, width), FLOAT32)
        self.instance = replace(instance, columns="GatedTurned" if turned else "Gated")
        given = [self.q, self.k, self.g, self.dk, self.dg, *([] if turned else [self.dq])]
        self.more = {"shape": self.shape, "scale": problem.scale, "vectors": aligned16(*given)}

    def launch_scores(self, blocks, **here):
        instance = self.instance
        self.draft.launch(
            ValueGateBackwardScores(instance.dtype, instance.gate, instance.products),
            blocks,
            q=self.q,
            k=self.k,
            g=self.g,
            starts=self.starts,
            ends=self.ends,
            pairs=self.pairs,
            own=self.own,
            decays=self.decays,
            **self.more,
            **here,
        )

    def launch_channels(self, blocks, other, kept, **here):
        """`other`: the other side."""
        self.draft.launch(
            self.instance,
            blocks * ceil_div(self.K, self.instance.TILE),
            q=self.q,
            k=self.k,
            v=other.ends,
            do_=other.starts,
            g=self.g,
            dq=self.dq,
            dk=self.dk,
            dg=self.dg,
            u=None,
            kept=kept,
            partial_du=None,
            pairs=other.pairs,
            own=other.own,
            decays=other.decays,
            **self.more,
            **here,
        )


class ValueGateBackward:
    """The gradients, some heads at a time: scores of either side, states between chunks, then all chunks at once, the
    keys' side and the values'."""

    def __init__(self, draft, problem, arrays, do, initial, dht, dh0):
        (q, k, v, g, gv), (B, H, K, V) = arrays, problem.shape("B H K V")
        self.draft, self.problem = draft, problem
        self.given = {"initial": initial, "dht": dht, "dh0": dh0}
        self.channels = GatedBackwardChannels("AfterWrite", problem.dtype, g.dtype, segments.tf32_products(problem))
        shape = draft.shape(problem, None, self.channels.CHUNK)
        self.tiles = ceil_div(K, self.channels.TILE) * ceil_div(V, self.channels.TILE)
        of_a_head = 2 * B * shape.NC * self.tiles * self.channels.TILE**2
        inputs = sum(x.nbytes for x in arrays)
        self.heads = segments.heads_at_once(H, of_a_head * self.channels.stored.itemsize, inputs)
        self.kept = draft.empty((max(1, self.heads * of_a_head),), self.channels.stored)
        self.keys = ValueGateSide(draft, problem, self.channels, self.heads, (q, k, g), False)
        self.values = ValueGateSide(draft, problem, self.channels, self.heads, (do, v, gv), True)

    def launched(self):
        """The gradients in the order of the arrays."""
        (B, N, H), keys, values = self.problem.shape("B N H"), self.keys, self.values
        for first in range(0, H, self.heads):
            here = {"first": first, "heads": min(self.heads, H - first)}
            blocks = B * keys.shape.NC * here["heads"]
            keys.launch_scores(blocks, **here)
            values.launch_scores(blocks, **here)
            self.draft.launch(
                ValueGateBackwardStates(self.channels.dtype, self.channels.products),
                2 * N * here["heads"] * self.tiles,
                q=keys.starts,
                k=keys.ends,
                v=values.ends,
                do_=values.starts,
                channel_decays=keys.decays,
                column_decays=values.decays,
                kept=self.kept,
                shape=keys.shape,
                scale=self.problem.scale,
                **self.given,
                **here,
            )
            keys.launch_channels(blocks, values, self.kept, **here)
            values.launch_channels(blocks, keys, self.kept, **here)
        return keys.dq, keys.dk, values.dk, keys.dg, values.dg


def operands(draft, problem):
    """The arrays with both gates in one dtype: float32 where they differ."""
    q, k, v, g, gv = draft.inputs(problem)
    dtype = g.dtype if g.dtype == gv.dtype else FLOAT32
    return (
        q,
        k,
        v,
        *(draft.cast(x, dtype, f"{name}: in float32, as the other gate") for name, x in (("g", g), ("gv", gv))),
    )
