"""Gradients of the gated family: one kernel forwards in time for dq and du, one backwards for dk, dg and dh0, one for
dv.

No state is kept but one every `CHECKPOINT_EVERY` tokens. Two kernels of Hopper's own keep none; they are for gates
that are mild, and leave the (sequences, heads) where any is not to those three.
"""

from __future__ import annotations

import numpy as np

from ...arrays import BFLOAT16
from . import tuning
from .instances import (
    CHANNELS,
    TILES,
    BonusGradient,
    GatedBackward,
    GatedBackwardKeys,
    GatedBackwardKeysSm90,
    GatedBackwardQueries,
    GatedBackwardQueriesSm90,
    GatedBackwardSegmentsSm90,
    GatedBackwardValues,
    ScanBothWays,
    channels,
    columns,
    read_order,
)
from .plan import FLOAT32, Draft, TensorMap, aligned16, ceil_div, mappable_in_rows

INT32 = np.dtype(np.int32)


def unsupported(problem) -> str | None:
    """Why there is no backward of a forward that these kernels compute; None where there is one or none is asked
    for."""
    if problem.gradient and problem.sizes["V"] > CHANNELS[-1]:
        return f"V={problem.sizes['V']} is over {CHANNELS[-1]}, the columns its gradients hold at once"
    return None


def plan_vjp(problem, device, do, dht, saved=()):
    """(gradients in the order of the arrays, that of the initial state or None)."""
    draft = Draft()
    q, k, v, g = draft.inputs(problem)
    do, dht = (
        draft.in_rows(draft.cast(do, problem.dtype, "do: in the dtype of the inputs"), "do"),
        cotangent(draft, dht),
    )
    arrays, gradients = (q, k, v, g, do), tuple(draft.like(x) for x in (q, k, v, g))
    dh0 = gradient_of_state(draft, problem)
    P, bonus = segments(problem, device), problem.arrays.get("u")
    N, H, K = problem.shape("N H K")
    shares, strong = None, None  # of du: of segments, then of sequences
    if bonus is not None:
        shares = draft.empty((N * P + N, H, K), FLOAT32)
    tiles = None
    if P:
        strong, tiles = mild(draft, problem, P, arrays, gradients, dht, dh0, shares)
    every_gate = any_gates(draft, problem, arrays, gradients, dht, dh0, shares and shares[N * P :], strong)
    if bonus is not None:
        du, kernel = draft.empty((H, K), bonus.dtype), BonusGradient(bonus.dtype)
        draft.launch(
            kernel, ceil_div(8 * H * K, kernel.threads), shares=shares, strong=strong, du=du, N=N, P=P, H=H, K=K
        )
        gradients = (*gradients, du)
    return draft.plan((gradients, stored(draft, problem, dh0)), tiles=tiles or every_gate)


def cotangent(draft, dht):
    """The gradient of the final state as the kernels read it."""
    return draft.plain(None if dht is None else dht[0], "dht")


def gradient_of_state(draft, problem):
    return None if problem.initial_state is None else draft.empty(problem.shape("N H K V"), FLOAT32)


def stored(draft, problem, dh0):
    """The gradient of the initial state in its dtype."""
    return None if dh0 is None else (draft.cast(dh0, problem.initial_state[0].dtype),)


# -- for every card ----------------------------------------------------------------------------------------------------
def any_gates(draft, problem, arrays, gradients, dht, dh0, du, strong) -> dict:
    """The kernels for any gates, of all (sequences, heads) or of those that are not 0 in `strong`; the sizes of what
    runs."""
    (q, k, v, g, do), (dq, dk, dv, dg) = arrays, gradients
    N, H, K, V = problem.shape("N H K V")
    order, every = read_order(problem.op), GatedBackward.CHECKPOINT_EVERY
    queries = GatedBackwardQueries(order, problem.dtype, g.dtype, channels(V))
    keys = GatedBackwardKeys(order, problem.dtype, g.dtype, channels(V))
    values = GatedBackwardValues(order, problem.dtype, g.dtype, channels(K), columns(V))
    u, initial, shape = draft.bonus(problem), draft.initial(problem), draft.shape(problem, chunk=every)
    blocks = ceil_div(K, queries.BK)
    kept = draft.empty((*problem.shape("B H"), shape.NC, blocks * queries.BK, queries.BV), FLOAT32)
    weight = dg if dg.dtype == FLOAT32 else draft.like(dg, FLOAT32)
    both = {"shape": shape, "scale": problem.scale, "vectors": aligned16(*arrays, *gradients), "strong": strong, "u": u}
    draft.launch(
        queries,
        N * H * blocks,
        q=q,
        k=k,
        v=v,
        do_=do,
        g=g,
        dq=dq,
        weight=weight,
        initial=initial,
        kept=kept,
        du=du,
        **both,
    )
    draft.launch(
        keys,
        N * H * blocks,
        q=q,
        k=k,
        v=v,
        do_=do,
        g=g,
        dk=dk,
        dg=dg,
        weight=weight,
        dht=dht,
        kept=kept,
        dh0=dh0,
        **both,
    )
    draft.launch(values, N * H * ceil_div(V, values.BV), q=q, k=k, do_=do, g=g, dv=dv, dht=dht, **both)
    return queries.tiles


# -- Hopper's own ------------------------------------------------------------------------------------------------------
def fits_hopper(problem, device, arrays) -> bool:
    """Whether Hopper's own backward kernels can read a problem's arrays."""
    return (
        device.capability == 90
        and problem.dtype == BFLOAT16
        and max(problem.shape("K V")) <= TILES[-1]
        and mappable_in_rows(arrays)
    )


def segments(problem, device) -> int:
    """Into how many Hopper's own kernels cut a sequence; 0 where they do not run."""
    N, H = problem.shape("N H")
    if not fits_hopper(problem, device, [x for name, x in problem.arrays.items() if name != "u"]):
        return 0
    return tuning.segments(N * H, int(problem.spans.lengths.max()), device.multiprocessors)


def mild(draft, problem, P, arrays, gradients, dht, dh0, du):
    """Hopper's own kernels: (which (sequences, heads) they leave undone, int32 [N, H]; the sizes of what runs)."""
    (q, k, v, g, do), (dq, dk, dv, dg) = arrays, gradients
    B, N, H, T, K, V = problem.shape("B N H T K V")
    on_hopper = OnHopper(draft, problem, P, GatedBackwardQueriesSm90.CHUNK)
    do, initial, dht = draft.mapped(do, "do"), on_hopper.initial, draft.aligned(dht, "dht")
    order, u = read_order(problem.op), draft.bonus(problem)
    strong = draft.zeros((N, H), INT32) if P == 1 else draft.empty((N, H), INT32)  # what comes before clears it
    ends = draft.empty((N * P, H, K), FLOAT32)
    sums = draft.empty((B, H, T // GatedBackwardQueriesSm90.CHUNK + on_hopper.shape.count, K), FLOAT32)
    if P > 1:
        summary = GatedBackwardSegmentsSm90.fitting(order, g.dtype, K, V)
        initial, dht = on_hopper.between_segments(
            summary, dict(q=q, k=k, v=v, do_=do, g=g), initial, dht, strong=strong
        )
    queries = GatedBackwardQueriesSm90.fitting(order, g.dtype, K, V)
    on_hopper.launch(
        queries,
        dict(q=q, k=k, v=v, do_=do, g=g, dq=dq, weight=dg),
        u=u,
        initial=initial,
        dht=dht,
        ends=ends,
        sums=sums,
        du=du,
        strong=strong,
    )
    keys = GatedBackwardKeysSm90.fitting(order, g.dtype, K, V)
    on_hopper.launch(
        keys,
        dict(q=q, k=k, v=v, do_=do, g=g, weight=dg, dk=dk, dv=dv, dg=dg),
        u=u,
        dht=dht,
        ends=ends,
        sums=sums,
        strong=strong,
        dh0=dh0,
    )
    return strong, keys.tiles | ({"segments": P} if P > 1 else {})


class OnHopper:
    """Launches of Hopper's own backward kernels, of P segments a sequence."""

    def __init__(self, draft, problem, P, chunk):
        self.draft, self.problem, self.P = draft, problem, P
        self.shape = draft.shape(problem, problem.spans.segments(P, chunk) if P > 1 else None)
        self.initial = draft.aligned(draft.initial(problem), "initial_state")

    def launch(self, kernel, mapped, directions=1, **more):
        """A block for every (direction, segment, head); tensor maps and rows of `mapped`."""
        N, H = self.problem.shape("N H")
        maps = {name: TensorMap(x, 128 // x.dtype.itemsize, kernel.CHUNK, True) for name, x in mapped.items()}
        rows = {f"{name.removesuffix('_')}_rows": x for name, x in mapped.items()}
        self.draft.launch(
            kernel,
            directions * N * self.P * H,
            **maps,
            **rows,
            **more,
            shape=self.shape,
            scale=self.problem.scale,
            P=self.P,
        )

    def between_segments(self, summary, mapped, initial, dht, **more):
        """The state at every segment's start, the gradient of that at its end."""
        draft, P = self.draft, self.P
        N, H, K, V = self.problem.shape("N H K V")
        states, decays = draft.empty((2, N * P, H, K, V), FLOAT32), draft.empty((2, N * P, H, K), FLOAT32)
        self.launch(summary, mapped, directions=2, initial=initial, dht=dht, states=states, decays=decays, **more)
        if P > 2:
            scan = ScanBothWays()
            draft.launch(
                scan,
                2 * N * H * ceil_div(K * V, 4 * scan.threads),
                states=states,
                decays=decays,
                N=N,
                P=P,
                H=H,
                K=K,
                V=V,
            )
        return states[0], states[1]
