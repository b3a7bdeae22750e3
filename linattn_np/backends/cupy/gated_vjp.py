"""Gradients of the gated family.

On every card: one kernel keeps the state at every chunk's start and its gradient at every chunk's end, and then all
chunks are computed at once, dq, dk and dg by one kernel and dv by another. On Hopper: one kernel forwards in time for
dq and du, one backwards for all else.
"""

from __future__ import annotations

from . import tuning
from .instances import (
    TILES,
    BonusGradient,
    GatedBackwardChannels,
    GatedBackwardKeysSm90,
    GatedBackwardQueriesSm90,
    GatedBackwardSegmentsSm90,
    GatedBackwardSm90,
    GatedBackwardStates,
    GatedBackwardValues,
    ScanBothWays,
    read_order,
)
from .plan import FLOAT32, Draft, TensorMap, aligned16, ceil_div, mappable_in_rows


def plan_vjp(problem, device, do, dht, saved=(), exact=False):
    """(gradients in the order of the arrays, that of the initial state or None). `exact`: half-precision data too are
    multiplied in float32, for a gate that many channels share, whose gradient is a sum of theirs."""
    draft = Draft()
    q, k, v, g = draft.inputs(problem)
    do = draft.in_rows(draft.cast(do, problem.dtype, "do: in the dtype of the inputs"), "do")
    dht, dh0 = cotangent(draft, dht), gradient_of_state(draft, problem)
    arrays, gradients = (q, k, v, g, do), tuple(draft.like(x) for x in (q, k, v, g))
    if fits_hopper(problem, device, inputs_of(problem)):
        tiles, shares = on_hopper(draft, problem, device, arrays, gradients, dht, dh0)
    else:
        products = 3 if exact else tuning.tf32_products(problem.dtype)
        tiles, shares = on_every_card(draft, problem, device, products, arrays, gradients, dht, dh0)
    if (bonus := problem.arrays.get("u")) is not None:
        H, K = problem.shape("H K")
        du, kernel = draft.empty((H, K), bonus.dtype), BonusGradient(bonus.dtype)
        draft.launch(kernel, ceil_div(8 * H * K, kernel.threads), shares=shares, du=du, N=shares.shape[0], H=H, K=K)
        gradients = (*gradients, du)
    return draft.plan((gradients, stored(draft, problem, dh0)), tiles=tiles)


def inputs_of(problem) -> list:
    """The caller's arrays but the bonus."""
    return [x for name, x in problem.arrays.items() if name != "u"]


def cotangent(draft, dht):
    """The gradient of the final state as the kernels read it."""
    return draft.plain(None if dht is None else dht[0], "dht")


def gradient_of_state(draft, problem):
    return None if problem.initial_state is None else draft.empty(problem.shape("N H K V"), FLOAT32)


def stored(draft, problem, dh0):
    """The gradient of the initial state in its dtype."""
    return None if dh0 is None else (draft.cast(dh0, problem.initial_state[0].dtype),)


# -- for every card ----------------------------------------------------------------------------------------------------
def on_every_card(draft, problem, device, products, arrays, gradients, dht, dh0):
    """The kernels for every card; the sizes of what runs, and the shares of du."""
    (q, k, v, g, do), (dq, dk, dv, dg) = arrays, gradients
    B, N, H, K, V = problem.shape("B N H K V")
    instance = read_order(problem.op), problem.dtype, g.dtype, products
    states, channels = GatedBackwardStates(*instance), GatedBackwardChannels(*instance)
    values = GatedBackwardValues.fitting(*instance, V, device.shared_per_block)
    tiles = ceil_div(K, states.TILE) * ceil_div(V, states.TILE)
    P = tuning.summarised_segments(states, 2 * N * H * tiles, problem, device)
    shape = draft.shape(problem, problem.spans.segments(P, states.CHUNK) if P > 1 else None, states.CHUNK)
    u, initial, read = draft.bonus(problem), draft.initial(problem), {"q": q, "k": k, "v": v, "do_": do, "g": g}
    both = {"shape": shape, "scale": problem.scale, "vectors": aligned16(*arrays, *gradients)}
    shares = None if u is None else draft.empty((B * shape.NC, H, K), FLOAT32)
    walk = {**read, **both, "P": P}

    if P > 1:
        starts, decays = draft.empty((2, N * P, H, K, V), FLOAT32), draft.empty((2, N * P, H, K), FLOAT32)
        nothing = {"kept": None, "dh0": None, "first": 0, "heads": H}
        given = {"initial": initial, "dht": dht, "states": starts, "decays": decays}
        draft.launch(states, 2 * N * P * H * tiles, **walk, **nothing, **given)
        scan_both_ways(draft, problem, starts, decays, P)
        initial, dht = starts[0], starts[1]
    of_a_head = 2 * B * shape.NC * tiles * states.TILE**2
    heads = tuning.heads_at_once(H, of_a_head * states.stored.itemsize, sum(x.nbytes for x in arrays[:4]))
    kept = draft.empty((heads * of_a_head,), states.stored)
    for first in range(0, H, heads):
        here = {"kept": kept, "first": first, "heads": min(heads, H - first)}
        nothing = {"states": None, "decays": None}
        given = {"initial": initial, "dht": dht, "dh0": dh0}
        draft.launch(states, 2 * N * P * here["heads"] * tiles, **walk, **here, **given, **nothing)
        chunks = B * shape.NC * here["heads"]
        draft.launch(
            channels,
            chunks * ceil_div(K, channels.TILE),
            **read,
            **both,
            **here,
            dq=dq,
            dk=dk,
            dg=dg,
            u=u,
            shares=shares,
        )
        draft.launch(values, chunks * ceil_div(V, values.BV), q=q, k=k, do_=do, g=g, dv=dv, u=u, **both, **here)
    return states.tiles | ({"segments": P} if P > 1 else {}), shares


def scan_both_ways(draft, problem, states, decays, P):
    """From what segments leave by themselves to what each starts from."""
    if P > 2:
        N, H, K, V = problem.shape("N H K V")
        scan, sizes = ScanBothWays(), {"N": N, "P": P, "H": H, "K": K, "V": V}
        draft.launch(scan, 2 * N * H * ceil_div(K * V, 4 * scan.threads), states=states, decays=decays, **sizes)


# -- Hopper's own ------------------------------------------------------------------------------------------------------
def fits_hopper(problem, device, arrays) -> bool:
    """Whether Hopper's own backward kernels can read a problem's arrays."""
    narrow = max(problem.shape("K V")) <= TILES[-1]
    return device.capability == 90 and problem.dtype.itemsize == 2 and narrow and mappable_in_rows(arrays)


def on_hopper(draft, problem, device, arrays, gradients, dht, dh0):
    """Hopper's own kernels, the first of which leaves in dg and `kept` what the second needs; the sizes of what
    runs, and the shares of du."""
    (q, k, v, g, do), (dq, dk, dv, dg) = arrays, gradients
    B, N, H, T, K, V = problem.shape("B N H T K V")
    P = tuning.segments(N * H, int(problem.spans.lengths.max()), device.multiprocessors)
    du = draft.empty((N * P, H, K), FLOAT32) if "u" in problem.arrays else None
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
    return keys.tiles | ({"segments": P} if P > 1 else {}), du


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
        scan_both_ways(draft, self.problem, states, decays, P)
        return states[0], states[1]
