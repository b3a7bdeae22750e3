"""float64: every recurrence by two kernels that go token by token, one forwards and one backwards in time.

A kernel sums over the columns of the state, a row a warp: over the values for the gradients of queries and keys. For
outputs and the gradients of values it takes the state turned over. Plain and exact; nothing here is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .arguments import integers, pointers, reals, rows, shape
from .elementwise import BonusGradient, FeatureMap
from .instances import read_order
from .kernel import DOUBLE, Kernel
from .plan import Draft, ceil_div

COLUMNS = (64, 256, 512)  # of a state's row, in the registers of a warp
CHUNK = 64  # tokens between the states that are kept for a gradient, all of which one chunk keeps in turn
MODES = ("auto", "recurrent", "chunk")  # all of them token by token


@dataclass(frozen=True)
class Float64(Kernel):
    threads = 128
    ROWS: ClassVar[int] = 4  # of a state, a block
    read_order: str
    columns: int

    @classmethod
    def fitting(cls, op, columns):
        return cls(read_order(op), next(size for size in COLUMNS if columns <= size))


STATE = integers("R C row column a_step b_step")


class Forwards(Float64):
    file = "float64/forwards"
    arguments = (
        *rows("x a y b z result"),
        *pointers("u_rows u_columns initial final kept"),
        *shape,
        *STATE,
        *reals("scale"),
    )


class Backwards(Float64):
    file = "float64/backwards"
    arguments = (
        *rows("x a y b z p dx da"),
        *pointers("u_rows u_columns du dht dh0 kept before"),
        *shape,
        *STATE,
        *reals("scale"),
    )


# -- plans -------------------------------------------------------------------------------------------------------------
def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    if problem.mode not in MODES or problem.materialize:
        return f"no mode {problem.mode!r} in float64, which goes token by token; it has {', '.join(map(repr, MODES))}"
    return too_large(problem)


def too_large(problem) -> str | None:
    for axis in "KV":
        if problem.sizes[axis] > COLUMNS[-1]:
            return f"{axis}={problem.sizes[axis]} is over {COLUMNS[-1]} in float64"
    return None


def plan(problem, device):
    draft = Draft()
    o, final, sides = draft.output(problem), draft.final(problem), Sides(draft, problem)
    sides.forwards(True, z=sides.q, result=o, initial=draft.initial(problem), final=final)
    return draft.plan((draft.give_back(problem, o), draft.stored(problem, final)), mode="recurrent")


def plan_vjp(problem, device, do, dht, saved=()):
    """(gradients in the order of the arrays, that of the initial state or None). A decay that channels share gets
    theirs one by one."""
    draft = Draft()
    sides = Sides(draft, problem)
    do = draft.in_rows(draft.cast(do, DOUBLE, "do: in the dtype of the inputs"), "do")
    initial, dht = draft.initial(problem), draft.plain(dht and dht[0], "dht", DOUBLE)
    dq, dk, dv = (draft.like(x) for x in (sides.q, sides.k, sides.v))
    dg, dgv = (gate and draft.empty(x.shape, DOUBLE) for gate, x in ((sides.g, dq), (sides.gv, dv)))
    dh0 = None if initial is None else draft.empty(initial.shape, DOUBLE)
    N, H, K = problem.shape("N H K")
    shares = draft.empty((N, H, K), DOUBLE) if sides.u else None
    states = {"initial": initial, "dht": dht}
    sides.gradients(False, z=do, p=sides.q, results=(dq, dk, dg), dh0=dh0, du=shares, **states)
    sides.gradients(True, z=sides.q, p=do, results=(draft.like(dv), dv, dgv), **states)
    found = [x for x in (dq, dk, dv, dg, dgv) if x is not None]
    if sides.u:
        du, kernel = draft.empty((H, K), DOUBLE), BonusGradient(DOUBLE)
        draft.launch(kernel, ceil_div(8 * H * K, kernel.threads), shares=shares, du=du, N=N, H=H, K=K)
        found.append(draft.cast(du, problem["u"].dtype))
    return draft.plan((tuple(found), None if dh0 is None else (draft.cast(dh0, problem.initial_state[0].dtype),)))


class Sides:
    """The state's rows and columns: its channels and values, or, turned over, its values and channels."""

    def __init__(self, draft, problem):
        self.draft, self.problem = draft, problem
        self.q, self.k, self.v, *gates = draft.inputs(problem)
        self.g, self.gv = (*gates, None)[:2]
        self.a, self.b = (self.decays(gate) for gate in (self.g, self.gv))
        self.u = draft.bonus(problem)

    def decays(self, gate):
        """exp of a gate; 1 where there is none."""
        if gate is None:
            return self.draft.table(np.ones((1, 1, 1, 1)))
        found, kernel = self.draft.empty(gate.shape, DOUBLE), FeatureMap("Exp", DOUBLE, DOUBLE)
        B, H, T, C = gate.shape
        self.draft.launch(
            kernel, ceil_div(B * H * T * C, kernel.threads), x=gate, y=found, B=B, H=H, T_=T, C=C, step=1, vectors=0
        )
        return found

    def launch(self, kind, turned, **more):
        """A kernel on the state as it is, or turned over."""
        K, V = self.problem.shape("K V")
        sides = [(self.k, self.a, K, V), (self.v, self.b, V, 1)]
        (x, a, R, row), (y, b, C, column) = reversed(sides) if turned else sides
        kernel = kind.fitting(self.problem.op, C)
        N, H = self.problem.shape("N H")
        self.draft.launch(
            kernel,
            N * H * ceil_div(R, kernel.ROWS),
            x=x,
            a=a,
            y=y,
            b=b,
            u_rows=None if turned else self.u,
            u_columns=self.u if turned else None,
            R=R,
            C=C,
            row=row,
            column=column,
            a_step=int(a.shape[-1] > 1),
            b_step=int(b.shape[-1] > 1),
            shape=self.draft.shape(self.problem, chunk=CHUNK),
            scale=self.problem.scale,
            **more,
        )

    def forwards(self, turned, *, final=None, kept=None, **more):
        self.launch(Forwards, turned, final=final, kept=kept, **more)

    def gradients(self, turned, *, z, p, results, initial, dh0=None, du=None, dht):
        """The gradients of what reads a state's rows, writes them, and of their gates."""
        read, written, gates = results
        N, H, K, V = self.problem.shape("N H K V")
        R = V if turned else K
        shape = self.draft.shape(self.problem, chunk=CHUNK)
        kept = self.draft.empty((*self.problem.shape("B H"), shape.NC, K, V), DOUBLE)
        before = self.draft.empty((N, H, R, CHUNK, K * V // R if R else 0), DOUBLE)
        self.forwards(turned, z=z, result=read, initial=initial, kept=kept)
        self.launch(
            Backwards, turned, z=z, p=p, dx=written, da=gates, du=du, dht=dht, dh0=dh0, kept=kept, before=before
        )
