"""gla with a gate on either side of the state: forwards in chunks by one kernel, or token by token; the gradients token
by token.

`linattn_np.two_gates` says what the gradients are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ... import two_gates
from ...arrays import BFLOAT16
from . import float64, gated_vjp, tuning
from .arguments import integers, pointers, reals, rows, shape
from .instances import CHANNELS, SINGLE_PASS, SPLIT_CHANNELS, TILES, GatedForward, channels
from .kernel import CTYPES, DOUBLE, Kernel
from .plan import FLOAT32, Draft, ceil_div, common_bytes


@dataclass(frozen=True)
class ValueGateForward(Kernel):
    """Forward in chunks: BK channels a launch, tiles and schedules as `GatedForward` has them."""

    file = "value_gate/forward"
    arguments = (
        *rows("q k v g gv o"),
        *pointers("initial final"),
        *shape,
        *reals("scale"),
        *pointers("sums"),
        *integers("channel bytes"),
    )
    shared = ("ValueShared<{schedule}, {dtype}, {gate}, {BK}, {BV}>",)
    MOST_OF_TWO: ClassVar[int] = 113 * 1024  # bytes of shared memory: of blocks with more no card has two at once
    constants = (("MOST_OF_TWO", "MOST_OF_TWO"),)
    schedule: str
    dtype: np.dtype
    gate: np.dtype
    products: int  # as `GatedForward` has them
    BK: int
    BV: int

    @classmethod
    def fitting(cls, dtype, gate, products, K, V, shared):
        """For a device whose blocks may have so many bytes of shared memory: as many columns, then channels, as that
        allows."""
        split = K > TILES[-1]
        wide = TILES[K > TILES[0] and not (split and dtype == BFLOAT16)]  # whose scores then are wider
        columns, schedule = TILES[V > TILES[0]], SPLIT_CHANNELS if split else SINGLE_PASS
        tiles = (schedule, wide, columns), (schedule, wide, TILES[0]), (SPLIT_CHANNELS, TILES[0], columns)
        kernels = [cls(schedule, dtype, gate, products, BK, BV) for schedule, BK, BV in tiles]
        return next((kernel for kernel in kernels if kernel.shared_bytes <= shared), kernels[-1])

    @property
    def by_channels(self):
        return GatedForward("AfterWrite", self.schedule, self.dtype, self.gate, self.products, self.BK, self.BV)

    @property
    def threads(self):
        return self.by_channels.threads

    @property
    def resident(self):
        return 1 if self.shared_bytes > self.MOST_OF_TWO else self.by_channels.resident

    @property
    def shared_bytes(self):
        return self.by_channels.shared_bytes + self.by_channels.CHUNK * self.BV * self.gate.itemsize

    @property
    def tiles(self):
        return self.by_channels.tiles


@dataclass(frozen=True)
class ValueGate(Kernel):
    """`direction` is "Forwards", or "ForwardsApart" and "Backwards" for the gradients."""

    file = "value_gate/recurrent"
    arguments = (*rows("q k v g gv o apart"), *pointers("initial final"), *shape, *reals("scale"))
    shared = ("Shared<{direction}, {BK}>",)
    threads = 128
    BV: ClassVar[int] = 32
    direction: str
    dtype: np.dtype
    gate: np.dtype
    BK: int

    @property
    def shared_bytes(self):
        results = 1 if self.direction == "Forwards" else 2
        return 4 * (3 * 16 * self.BK + 2 * 16 * 32 + results * 4 * 16 * 32)

    @property
    def tiles(self):
        return {"BK": self.BK, "BV": self.BV}


@dataclass(frozen=True)
class ValueGateGradient(Kernel):
    file = "value_gate/gate_gradient"
    arguments = (*rows("x y dx dy gate dgate"), *pointers("last dlast"), *integers("C D last_c last_d"), *shape)
    threads = 128
    dtype: np.dtype
    gate: np.dtype


# -- plans -------------------------------------------------------------------------------------------------------------
def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    if problem.dtype == DOUBLE:
        return float64.unsupported(problem)
    if problem.dtype not in CTYPES:
        return f"no {problem.dtype} kernels; it has {', '.join(map(str, CTYPES))}"
    if problem.sizes["K"] > CHANNELS[-1] and (problem.gradient or problem.mode == "recurrent"):
        return f"K={problem.sizes['K']} is over {CHANNELS[-1]}"
    if problem.gradient and problem.sizes["V"] > CHANNELS[-1]:
        return f"V={problem.sizes['V']} is over {CHANNELS[-1]}, the columns its gradients hold at once"
    return None


def plan(problem, device):
    if problem.dtype == DOUBLE:
        return float64.plan(problem, device)
    draft, mode = Draft(), "recurrent" if problem.mode == "recurrent" else "chunk"
    o, final = draft.output(problem), draft.final(problem)
    arrays, initial = operands(draft, problem), draft.initial(problem)
    if mode == "recurrent":
        kernel = launch(draft, problem, "Forwards", arrays, initial, final, o=o)
    else:
        kernel = in_chunks(draft, problem, device, arrays, initial, final, o)
    return draft.plan((draft.give_back(problem, o), draft.stored(problem, final)), mode=mode, tiles=kernel.tiles)


def in_chunks(draft, problem, device, arrays, initial, final, o):
    """A launch for as many channels as the kernel takes at once, whose outputs add up."""
    q, k, v, g, gv = arrays
    N, H, K, V = problem.shape("N H K V")
    products = tuning.tf32_products(problem)
    kernel = ValueGateForward.fitting(problem.dtype, g.dtype, products, K, V, device.shared_per_block)
    sums = draft.empty(problem.shape("B H T V"), FLOAT32) if kernel.schedule == SPLIT_CHANNELS else None
    for channel in range(0, K, kernel.BK):
        draft.launch(
            kernel,
            N * H * ceil_div(V, kernel.BV),
            q=q,
            k=k,
            v=v,
            g=g,
            gv=gv,
            o=o,
            initial=initial,
            final=final,
            shape=draft.shape(problem),
            scale=problem.scale,
            sums=sums,
            channel=channel,
            bytes=common_bytes(*arrays, o),
        )
    return kernel


def plan_vjp(problem, device, do, dht, saved=()):
    if problem.dtype == DOUBLE:
        return float64.plan_vjp(problem, device, do, dht, saved)
    draft = Draft()
    do = draft.in_rows(draft.cast(do, problem.dtype, "do: in the dtype of the inputs"), "do")
    arrays, initial, dht = operands(draft, problem), draft.initial(problem), gated_vjp.cotangent(draft, dht)
    last = None if dht is None else draft.empty(problem.shape("N H K V"), FLOAT32)
    o = draft.empty(problem.shape("B H T V"), FLOAT32)
    kernel = launch(draft, problem, "ForwardsApart", arrays, initial, last, apart=o)
    found, dh0 = two_gates.gradients(Passes(draft, problem), arrays, o, last, initial, do, dht)
    found = tuple(draft.cast(x, given.dtype) for x, given in zip(found, problem.arrays.values()))
    return draft.plan((found, None if initial is None else gated_vjp.stored(draft, problem, dh0)), tiles=kernel.tiles)


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


class Passes:
    """What `linattn_np.two_gates` computes with: each of its steps is a launch."""

    def __init__(self, draft, problem):
        self.draft, self.problem = draft, problem

    def forwards(self, *arrays):
        return self.swept("ForwardsApart", arrays, None)

    def backwards(self, q, k, v, *gates_and_last):
        final = None
        if self.problem.initial_state:
            final = self.draft.empty((*self.problem.shape("N H"), k.shape[-1], v.shape[-1]), FLOAT32)
        return self.swept("Backwards", (q, k, v, *gates_and_last), final)

    def swept(self, direction, arrays, final):
        *arrays, initial = arrays
        v, initial = arrays[2], self.draft.plain(initial, "the state")
        o, apart = self.draft.like(v), self.draft.empty(v.shape, FLOAT32)
        launch(self.draft, self.problem, direction, arrays, initial, final, o=o, apart=apart)
        return o, apart, final

    def gate_gradient(self, gate, x, y, last, dht):
        (x, dx), (y, dy) = x, y
        dgate, kernel, C = self.draft.like(gate), ValueGateGradient(x.dtype, gate.dtype), gate.shape[-1]
        D, last_c, last_d = 0, 0, 0
        if dht is not None:
            D = last.shape[-1]
            last_c, last_d = (stride // last.dtype.itemsize for stride in last.strides[2:])
        N, H = self.problem.shape("N H")
        self.draft.launch(
            kernel,
            N * H * ceil_div(C, kernel.threads),
            x=x,
            y=y,
            dx=dx,
            dy=dy,
            gate=gate,
            dgate=dgate,
            last=last,
            dlast=dht,
            C=C,
            D=D,
            last_c=last_c,
            last_d=last_d,
            shape=self.draft.shape(self.problem),
        )
        return dgate


def launch(draft, problem, direction, arrays, initial, final, o=None, apart=None):
    q, k, v, g, gv = arrays
    K, V = q.shape[-1], v.shape[-1]
    kernel = ValueGate(direction, problem.dtype, g.dtype, channels(K))
    N, H = problem.shape("N H")
    draft.launch(
        kernel,
        N * H * ceil_div(V, kernel.BV),
        q=q,
        k=k,
        v=v,
        g=g,
        gv=gv,
        o=o,
        apart=apart,
        initial=initial,
        final=final,
        shape=draft.shape(problem, K=K, V=V),
        scale=problem.scale,
    )
    return kernel
