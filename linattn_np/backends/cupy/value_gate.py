"""gla with a gate on either side of the state: one kernel, token by token, forwards and for the gradients.

`linattn_np.two_gates` says what the gradients are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ... import two_gates
from . import float64, gated_vjp
from .arguments import integers, pointers, reals, rows, shape
from .instances import CHANNELS, channels
from .kernel import CTYPES, DOUBLE, Kernel
from .plan import FLOAT32, Draft, ceil_div


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
    if problem.mode == "chunk":
        return "no mode 'chunk' with gv, which goes token by token; it has 'auto', 'recurrent'"
    if problem.dtype == DOUBLE:
        return float64.unsupported(problem)
    if problem.dtype not in CTYPES:
        return f"no {problem.dtype} kernels; it has {', '.join(map(str, CTYPES))}"
    if problem.sizes["K"] > CHANNELS[-1]:
        return f"K={problem.sizes['K']} is over {CHANNELS[-1]}"
    if problem.gradient and problem.sizes["V"] > CHANNELS[-1]:
        return f"V={problem.sizes['V']} is over {CHANNELS[-1]}, the columns its gradients hold at once"
    return None


def plan(problem, device):
    if problem.dtype == DOUBLE:
        return float64.plan(problem, device)
    draft = Draft()
    o, final = draft.output(problem), draft.final(problem)
    kernel = launch(draft, problem, "Forwards", operands(draft, problem), draft.initial(problem), final, o=o)
    return draft.plan((draft.give_back(problem, o), draft.stored(problem, final)), mode="recurrent", tiles=kernel.tiles)


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
