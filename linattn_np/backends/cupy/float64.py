"""float64: every recurrence by two kernels that go token by token, one forwards and one backwards in time.

A kernel sums over the columns of the state, a row a warp: over the values for the gradients of queries and keys. For
outputs and the gradients of values it takes the state turned over. Plain and exact; nothing here is fast.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .arguments import members
from .elementwise_kernels import FeatureMap, sum_arrays
from .gated_kernels import read_order
from .kernel import DOUBLE, Kernel
from .plan import Draft, ceil_div

COLUMNS = (64, 256, 512)  # of a state's row, in the registers of a warp; more are more launches, which add up
CHUNK = 64  # tokens between the states that are kept for a gradient, all of which one chunk keeps in turn
MODES = ("auto", "recurrent", "chunk")  # all of them token by token


class Float64(Kernel):
    threads = 128
    ROWS: ClassVar[int] = 4  # of a state, a block
    read_order: str
    columns: int

    @classmethod
    def fitting(cls, op, columns):
        return cls(read_order(op), next((size for size in COLUMNS if columns <= size), COLUMNS[-1]))


STATE = members("integers R C columns adds row column a_step b_step")


class Forwards(Float64):
    file = "float64/forwards"
    arguments = (
        *members("rows x a y b z result, pointers u_rows u_columns initial final kept, shape"),
        *STATE,
        *members("reals scale"),
    )


class Backwards(Float64):
    file = "float64/backwards"
    arguments = (
        *members("rows x a y b z p dx da, pointers u_rows u_columns du dht dh0 kept before, shape"),
        *STATE,
        *members("reals scale"),
    )


# -- plans -------------------------------------------------------------------------------------------------------------
def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    if problem.mode not in MODES or problem.materialize:
        return f"no mode {problem.mode!r} in float64, which goes token by token; it has {', '.join(map(repr, MODES))}"
    return None


def plan(problem, device):
    draft = Draft()
    o, final, sides = draft.output(problem), draft.final(problem), Sides(draft, problem)
    sides.forwards(True, z=sides.q, result=o, initial=draft.initial(problem), final=final)
    return draft.plan(draft.results(problem, o, final), mode="recurrent")


def plan_vjp(problem, device, do, dht, saved=()):
    """(gradients in the order of the arrays, that of the initial state or None). A decay that channels share gets
    theirs one by one."""
    draft = Draft()
    sides = Sides(draft, problem)
    (do, dht), initial = draft.cotangents(problem, do, dht), draft.initial(problem)
    dq, dk, dv = (draft.like(x) for x in (sides.q, sides.k, sides.v))
    dg, dgv = (gate and draft.empty(x.shape, DOUBLE) for gate, x in ((sides.g, dq), (sides.gv, dv)))
    dh0 = draft.gradient_of_state(problem)
    N, H, K = problem.shape("N H K")
    partial_du = draft.empty((N, H, K), DOUBLE) if sides.u else None
    states = {"initial": initial, "dht": dht}
    sides.gradients(False, z=do, p=sides.q, results=(dq, dk, dg), dh0=dh0, du=partial_du, **states)
    sides.gradients(True, z=sides.q, p=do, results=(draft.like(dv), dv, dgv), **states)
    found = [x for x in (dq, dk, dv, dg, dgv) if x is not None]
    if sides.u:
        du = draft.empty((H, K), DOUBLE)
        sum_arrays(draft, partial_du, du)
        found.append(draft.cast(du, problem["u"].dtype))
    return draft.plan((tuple(found), draft.stored_gradient(problem, dh0)))


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
        sizes = dict(zip(("B", "H", "T_", "C"), gate.shape))
        self.draft.launch(kernel, ceil_div(gate.size, kernel.threads), x=gate, y=found, **sizes, step=1, vectors=0)
        return found

    def launch(self, kind, turned, *, z, kept, states, **more):
        """A kernel on the state as it is, or turned over; of more columns than it has, some after the others."""
        K, V = self.problem.shape("K V")
        sides = [(self.k, self.a, K, V), (self.v, self.b, V, 1)]
        (x, a, R, row), (y, b, C, column) = reversed(sides) if turned else sides
        kernel, (N, H) = kind.fitting(self.problem.op, C), self.problem.shape("N H")
        gated, blocks = b.shape[-1] > 1, N * H * ceil_div(R, kernel.ROWS)
        sizes = {"R": R, "C": C, "row": row, "column": column, "a_step": int(a.shape[-1] > 1), "b_step": int(gated)}
        more |= sizes | {"shape": self.draft.shape(self.problem, chunk=CHUNK), "scale": self.problem.scale}
        for first in range(0, C, kernel.columns) or (0,):
            here = (..., slice(first, None))
            in_states = (*here, slice(None)) if turned else here
            arrays = {
                "x": x,
                "a": a,
                "y": y[here],
                "b": b[here] if gated else b,
                "z": z[here],
                "kept": kept and kept[here],
            }
            arrays |= {"u_columns": self.u[here] if turned and self.u else None, "u_rows": None if turned else self.u}
            arrays |= {name: state and state[in_states] for name, state in states.items()}
            columns = min(C - first, kernel.columns)
            self.draft.launch(kernel, blocks, **arrays, columns=columns, adds=first > 0, **more)

    def forwards(self, turned, *, initial, final=None, kept=None, **more):
        self.launch(Forwards, turned, kept=kept, states={"initial": initial, "final": final}, **more)

    def gradients(self, turned, *, z, p, results, initial, dh0=None, du=None, dht):
        """The gradients of what reads a state's rows, writes them, and of their gates."""
        read, written, gates = results
        N, H, K, V = self.problem.shape("N H K V")
        R, C = (V, K) if turned else (K, V)
        NC = self.draft.shape(self.problem, chunk=CHUNK).NC
        kept = self.draft.empty((*self.problem.shape("B H"), NC, R, C), DOUBLE)
        before = self.draft.empty((N, H, R, CHUNK, min(C, COLUMNS[-1])), DOUBLE)
        self.forwards(turned, z=z, result=read, initial=initial, kept=kept)
        states = {"dht": dht, "dh0": dh0}
        self.launch(Backwards, turned, z=z, kept=kept, states=states, p=p, dx=written, da=gates, du=du, before=before)
