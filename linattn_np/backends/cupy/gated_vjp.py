"""Gradients of the gated family: one kernel forwards in time for dq and du, one backwards for dk, dg and dh0, and on
cards before Hopper one for dv.

No state is kept but one every `CHECKPOINT_EVERY` tokens.
"""

from __future__ import annotations

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
    GatedBackwardSm90,
    GatedBackwardValues,
    ScanBothWays,
    channels,
    columns,
    read_order,
)
from .plan import FLOAT32, Draft, TensorMap, aligned16, ceil_div, mappable_in_rows


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
    do = draft.in_rows(draft.cast(do, problem.dtype, "do: in the dtype of the inputs"), "do")
    dht, dh0 = cotangent(draft, dht), gradient_of_state(draft, problem)
    arrays, gradients = (q, k, v, g, do), tuple(draft.like(x) for x in (q, k, v, g))
    P, bonus = segments(problem, device), problem.arrays.get("u")
    N, H, K = problem.shape("N H K")
    shares = None if bonus is None else draft.empty((N * max(P, 1), H, K), FLOAT32)  # of du: of sequences or segments
    if P:
        tiles = on_hopper(draft, problem, P, arrays, gradients, dht, dh0, shares)
    else:
        tiles = on_every_card(draft, problem, arrays, gradients, dht, dh0, shares)
    if bonus is not None:
        du, kernel = draft.empty((H, K), bonus.dtype), BonusGradient(bonus.dtype)
        draft.launch(kernel, ceil_div(8 * H * K, kernel.threads), shares=shares, du=du, N=shares.shape[0], H=H, K=K)
        gradients = (*gradients, du)
    return draft.plan((gradients, stored(draft, problem, dh0)), tiles=tiles)


def cotangent(draft, dht):
    """The gradient of the final state as the kernels read it."""
    return draft.plain(None if dht is None else dht[0], "dht")


def gradient_of_state(draft, problem):
    return None if problem.initial_state is None else draft.empty(problem.shape("N H K V"), FLOAT32)


def stored(draft, problem, dh0):
    """The gradient of the initial state in its dtype."""
    return None if dh0 is None else (draft.cast(dh0, problem.initial_state[0].dtype),)


# -- for every card ----------------------------------------------------------------------------------------------------
def on_every_card(draft, problem, arrays, gradients, dht, dh0, du) -> dict:
    """The kernels for every card; the sizes of what runs."""
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
    both = {"shape": shape, "scale": problem.scale, "vectors": aligned16(*arrays, *gradients), "u": u}
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
    narrow = max(problem.shape("K V")) <= TILES[-1]
    return device.capability == 90 and problem.dtype.itemsize == 2 and narrow and mappable_in_rows(arrays)


def segments(problem, device) -> int:
    """Into how many Hopper's own kernels cut a sequence; 0 where they do not run."""
    N, H = problem.shape("N H")
    if not fits_hopper(problem, device, [x for name, x in problem.arrays.items() if name != "u"]):
        return 0
    return tuning.backward_segments(N * H, int(problem.spans.lengths.max()), device.multiprocessors)


def on_hopper(draft, problem, P, arrays, gradients, dht, dh0, du) -> dict:
    """Hopper's own kernels, the first of which leaves in dg and `kept` what the second needs; the sizes of what
    runs."""
    (q, k, v, g, do), (dq, dk, dv, dg) = arrays, gradients
    B, N, H, T, K, V = problem.shape("B N H T K V")
    launches = OnHopper(draft, problem, P, GatedBackwardSm90.CHUNK)
    do, initial, dht = draft.mapped(do, "do"), launches.initial, draft.aligned(dht, "dht")
    u, instance = draft.bonus(problem), (read_order(problem.op), problem.dtype, g.dtype, K, V)
    queries, keys = GatedBackwardQueriesSm90.fitting(*instance), GatedBackwardKeysSm90.fitting(*instance)
    ends = draft.empty((N * P, H, K), FLOAT32)
    sums = draft.empty((B, H, T // keys.CHUNK + launches.shape.count, K), FLOAT32)
    kept = draft.empty((B, H, T // keys.CHECKPOINT_EVERY + 1, keys.BK, keys.BV), FLOAT32)
    read = {"q": q, "k": k, "v": v, "do_": do, "g": g}
    if P > 1:
        summary = GatedBackwardSegmentsSm90.fitting(*instance)
        initial, dht = launches.between_segments(summary, read, initial, dht)
    both = {"u": u, "dht": dht, "ends": ends, "sums": sums, "kept": kept}
    launches.launch(queries, read | {"dq": dq, "weight": dg}, initial=initial, du=du, **both)
    launches.launch(keys, read | {"weight": dg, "dk": dk, "dv": dv, "dg": dg}, dh0=dh0, P=P, **both)
    return keys.tiles | ({"segments": P} if P > 1 else {})


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
        )

    def between_segments(self, summary, mapped, initial, dht, **more):
        """The state at every segment's start, the gradient of that at its end."""
        draft, P = self.draft, self.P
        N, H, K, V = self.problem.shape("N H K V")
        states, decays = draft.empty((2, N * P, H, K, V), FLOAT32), draft.empty((2, N * P, H, K), FLOAT32)
        self.launch(summary, mapped, directions=2, initial=initial, dht=dht, states=states, decays=decays, P=P, **more)
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
