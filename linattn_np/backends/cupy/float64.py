"""Gated operators in float64, by two kernels that go token by token: one forwards and one backwards in time.

`Forwards` computes the rows of a state X [R, C], one warp per row; `Backwards` computes them again in each chunk:

    X_t = a_t (b_t * X_{t-1}) + x_t y_t^T,      result_t = scale X_t z_t

with decays a [R] and b [C]. X is either the operator's state S [K, V], with x = k and y = v; or its transpose [V, K],
with x = v and y = k. Transposed, z = q gives o; not transposed, z = do gives dq. The gradients of x and of the gate of
X's rows come from the kernel that goes backwards. This code is simple and exact, not fast.

Sizes: B batch, N sequences, H heads, T tokens, K channels, V columns.
"""

# With a bonus u (the read order of RWKV-6): result_t = scale (X_{t-1} + u_rows u_columns x_t y_t^T) z_t. If X is S,
# u_rows is u and u_columns is 1; if X is the transpose, the reverse. Backwards in time, from dX_T = dht, with p_t what
# reads the rows of X: q if X is S, do if X is the transpose; without u, whose terms the kernel adds:
#     D = dX_t + scale p_t z_t^T,     dx_t = D y_t
#     da_t, the gradient of log a_t: the sums of a_t (b_t * X_{t-1}) * D over the columns
#     dX_{t-1} = a_t (b_t * D)
from __future__ import annotations

from typing import ClassVar

import numpy as np

from .arguments import members
from .arithmetic import ceil_div
from .elementwise_kernels import FeatureMap, sum_arrays
from .gated_kernels import read_order
from .kernel import DOUBLE, Kernel
from .plan import Draft

# A class describes a kernel: its annotated fields are the template's arguments, in order; `arguments` the members of
# struct Args, which the compiler checks. Pointers may be null.

COLUMNS = (64, 256, 512)  # columns of X that a launch can take; if X has more, several launches add up their results
CHUNK = 64  # tokens between the states that the forward kernel stores for the backward one, which computes the others
MODES = ("auto", "recurrent", "chunk")  # the modes that these kernels serve, always token by token


class Float64(Kernel):
    """The base of the two kernels."""

    threads = 128
    ROWS: ClassVar[int] = 4  # rows of X per block
    constants = (("WARPS", "ROWS"),)
    read_order: str
    columns: int

    @classmethod
    def fitting(cls, op, columns):
        """The instance with the fewest columns that are at least `columns`, or with the most of all."""
        return cls(read_order(op), next((size for size in COLUMNS if columns <= size), COLUMNS[-1]))


# R, C: the sizes of X. columns: how many of the C this launch computes. adds: whether it adds to the results of earlier
# launches. row_stride, column_stride: of X in the arrays of states. a_step, b_step: 0 if all rows, or columns, have one
# decay, else 1. chunk_starts: the state at the start of every chunk of CHUNK tokens
STATE = members(
    "shape, int64s R C columns adds row_stride column_stride a_step b_step, float64s scale, strided x a y b z, "
    "pointers u_rows u_columns chunk_starts"
)


class Forwards(Float64):
    """`result`, the `final` state, and `chunk_starts`."""

    file = "float64/forwards"
    arguments = (*STATE, *members("strided result, pointers initial final"))


class Backwards(Float64):
    """dx, da, du and dh0. It reads what `Forwards` stored in `chunk_starts`; `chunk_states` is memory for all states of
    a chunk; p reads the rows of X as z reads its columns: q if X is S, do if X is its transpose."""

    file = "float64/backwards"
    arguments = (*STATE, *members("strided p dx da, pointers du dht dh0 chunk_states"))


# -- plans -------------------------------------------------------------------------------------------------------------
def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    if problem.mode == "chunk" and problem.materialize:
        return "the states of chunks (materialize=True) are not kept in float64, which goes token by token"
    if problem.mode not in MODES:
        return f"no mode {problem.mode!r} in float64, which goes token by token; it has {', '.join(map(repr, MODES))}"
    return None


def plan(problem, device):
    """The plan of a call."""
    draft = Draft()
    o, final, launches = draft.output(problem), draft.final(problem), StateLaunches(draft, problem)
    launches.forwards(transposed=True, z=launches.q, result=o, initial=draft.initial(problem), final=final)
    return draft.plan(draft.results(problem, o, final), mode="recurrent")


def plan_vjp(problem, device, do, dht, saved=()):
    """The plan of a pullback: (gradients in the order of the arrays, that of the initial state or None). The gradient
    of a gate that channels share is [B, H, T, K], not yet summed over the channels. `saved` is always empty."""
    draft = Draft()
    launches = StateLaunches(draft, problem)
    (do, dht), initial = draft.cotangents(problem, do, dht), draft.initial(problem)
    dq, dk, dv = (draft.like(x) for x in (launches.q, launches.k, launches.v))
    dg, dgv = (gate and draft.empty(x.shape, DOUBLE) for gate, x in ((launches.g, dq), (launches.gv, dv)))
    dh0 = draft.gradient_of_state(problem)
    N, H, K = problem.shape("N H K")
    partial_du = draft.empty((N, H, K), DOUBLE) if launches.u else None
    states = {"initial": initial, "dht": dht}
    launches.gradients(transposed=False, z=do, p=launches.q, results=(dq, dk, dg), dh0=dh0, du=partial_du, **states)
    unused = draft.like(dv)  # the kernel that goes forwards writes o once more. du is that of the launches above
    launches.gradients(transposed=True, z=launches.q, p=do, results=(unused, dv, dgv), **states)
    gradients = [dx for dx in (dq, dk, dv, dg, dgv) if dx is not None]
    if launches.u:
        du = draft.empty((H, K), DOUBLE)
        sum_arrays(draft, partial_du, du)
        gradients.append(draft.cast(du, problem["u"].dtype))
    return draft.plan((tuple(gradients), draft.stored_gradient(problem, dh0)))


class StateLaunches:
    """Adds launches of the kernels to a draft, with X the operator's state or, if `transposed`, its transpose."""

    def __init__(self, draft, problem):
        self.draft, self.problem = draft, problem
        self.q, self.k, self.v, *gates = draft.inputs(problem)
        self.g, self.gv = (*gates, None)[:2]  # every operator here has g; only gla with gv has two gates
        self.a, self.b = (self.decays(gate) for gate in (self.g, self.gv))
        self.u = draft.bonus(problem)

    def decays(self, gate):
        """exp(gate) in a new array; the number 1 [1, 1, 1, 1] if `gate` is None."""
        if gate is None:
            return self.draft.table(np.ones((1, 1, 1, 1)))
        decays, kernel = self.draft.empty(gate.shape, DOUBLE), FeatureMap("Exp", DOUBLE, DOUBLE)
        # step=1: a gate for every channel of `decays`; vectors=0: a thread computes one channel
        kernel.launch(self.draft, gate, decays, step=1, vectors=0)
        return decays

    def launch(self, kernel_class, transposed, *, z, chunk_starts, states, **args):
        """Launches a kernel for all columns of X, with as many launches as that takes. `states`: the arguments that are
        [N, H, K, V]; `args`: those of the class that are not named here."""
        K, V = self.problem.shape("K V")
        # for the channels and the columns of S: (the array that writes them, their decays, their number, their stride)
        axes = [(self.k, self.a, K, V), (self.v, self.b, V, 1)]
        (x, a, R, row_stride), (y, b, C, column_stride) = reversed(axes) if transposed else axes
        kernel, (N, H) = kernel_class.fitting(self.problem.op, C), self.problem.shape("N H")
        decay_per_column, blocks = b.shape[-1] > 1, N * H * ceil_div(R, kernel.ROWS)
        sizes = {"R": R, "C": C, "row_stride": row_stride, "column_stride": column_stride}
        sizes |= {"a_step": int(a.shape[-1] > 1), "b_step": int(decay_per_column)}
        args |= sizes | {"shape": self.draft.shape(self.problem, chunk=CHUNK), "scale": self.problem.scale}
        # Later launches add to sums over columns (the result, dx, da, du); arrays with columns (states) are cut.
        # `or (0,)`: without columns there is one launch, too
        for first in range(0, C, kernel.columns) or (0,):
            columns = (..., slice(first, None))
            columns_of_states = (*columns, slice(None)) if transposed else columns
            arrays = {"x": x, "a": a, "y": y[columns], "b": b[columns] if decay_per_column else b, "z": z[columns]}
            arrays |= {"chunk_starts": chunk_starts and chunk_starts[columns]}
            arrays["u_rows"] = None if transposed else self.u
            arrays["u_columns"] = self.u[columns] if transposed and self.u else None
            arrays |= {name: state and state[columns_of_states] for name, state in states.items()}
            count = min(C - first, kernel.columns)
            self.draft.launch(kernel, blocks, **arrays, columns=count, adds=first > 0, **args)

    def forwards(self, *, transposed, initial, final=None, chunk_starts=None, **args):
        """Launches `Forwards`."""
        states = {"initial": initial, "final": final}
        self.launch(Forwards, transposed, chunk_starts=chunk_starts, states=states, **args)

    def gradients(self, *, transposed, z, p, results, initial, dh0=None, du=None, dht):
        """Launches `Forwards` and then `Backwards`. `results`: the arrays for scale X z (dq if X is not transposed),
        for the gradient of x, and for that of the gate of X's rows."""
        result, dx, da = results
        N, H, K, V = self.problem.shape("N H K V")
        R, C = (V, K) if transposed else (K, V)
        NC = self.draft.shape(self.problem, chunk=CHUNK).NC
        chunk_starts = self.draft.empty((*self.problem.shape("B H"), NC, R, C), DOUBLE)
        chunk_states = self.draft.empty((N, H, R, CHUNK, min(C, COLUMNS[-1])), DOUBLE)
        self.forwards(transposed=transposed, z=z, result=result, initial=initial, chunk_starts=chunk_starts)
        args = {"z": z, "p": p, "chunk_starts": chunk_starts, "chunk_states": chunk_states}
        self.launch(Backwards, transposed, states={"dht": dht, "dh0": dh0}, dx=dx, da=da, du=du, **args)
