"""Gradients of gla and rwkv6: one sweep forwards in time for dq and du, one backwards for dk, dg and dh0, one for dv.

No state is kept but one every `tiles.KEPT` tokens. On Hopper two sweeps of its own keep one every `tiles.WARPGROUP_KEPT`,
and two more are for a gate that all channels share; both for any gate. `device` is where, as in `plans`.
"""

from __future__ import annotations

import math

import numpy as np

from ...arrays import BFLOAT16
from ...contract import SUB_CHUNK
from . import tiles, warpgroup_one_gate
from .build import pack, with_maps
from .operands import (FLOAT32, bonus, ceil_div, contiguous, gate, has_rows, in_rows, inputs, mappable, one_gate, place,
                       pointer, rows)

def unsupported(problem) -> str | None:
    """Why there is no backward of a forward that these kernels compute; None where there is one or none is asked for."""
    if problem.gradient and problem.sizes["V"] > tiles.CHANNELS[-1]:
        return f"V={problem.sizes['V']} is over {tiles.CHANNELS[-1]}, the columns its gradients hold at once"
    return None


def sweeps(problem, device) -> tuple[tiles.Kernel, ...]:
    """What `pullback` launches, in order."""
    return sum(chosen(problem, device), ())


def chosen(problem, device) -> tuple[tuple[tiles.Kernel, ...], ...]:
    """What comes before Hopper's own sweeps, these, or those for every card, what sums du: the only choice."""
    policy, T, G = tiles.policy(problem.op), problem.dtype, tiles.ONE if one_gate(problem) else gate(problem).dtype
    K, V = problem.shape("K V")
    P, before, own = segments(problem, device), (), ()
    if P and not wants_gate(problem):
        own = warpgroup_one_gate.gradient_kernels(problem, longest(problem))
    elif P:
        own = tuple(tiles.warpgroup_backward(what, policy, T, G, K, V) for what in ("queries", "keys"))
    if P > 1:
        before = (tiles.warpgroup_backward("segments", policy, T, G, K, V), *(P > 2) * (tiles.scan_both_ways(),))
    if G is tiles.ONE:
        return before, own, (), ()
    general = () if P else (tiles.chunk_backward_queries(policy, T, G, V), tiles.chunk_backward_keys(policy, T, G, V),
                            tiles.chunk_backward_values(policy, T, G, K, V))
    return before, own, general, (tiles.bonus_gradient(problem["u"].dtype),) if "u" in problem.arrays else ()


def segments(problem, device) -> int:
    """Into how many Hopper's own sweeps cut a sequence; 0 where they do not run."""
    N, H, K, V = problem.shape("N H K V")
    if device.capability != 90 or problem.dtype == FLOAT32 or max(K, V) > tiles.WARPGROUP_TILES[-1]:
        return 0
    if one_gate(problem) and problem.dtype != BFLOAT16:
        return 0
    if not mappable(problem, device):
        return 0
    return tiles.segments(N * H, longest(problem)) if wants_gate(problem) else warpgroup_one_gate.segments(problem, longest(problem))


def longest(problem) -> int:
    """Tokens of the longest sequence."""
    return int(problem.spans.lengths.max())


def wants_gate(problem) -> bool:
    """Whether there is a gradient of the gate: not of one that tokens share."""
    return not one_gate(problem) or gate(problem).shape[:3] == problem.shape("B H T")


def reads_one_gate(problem, device) -> tuple[np.dtype, ...]:
    """Of which dtypes the sweeps take a gate that all channels share as it is."""
    return (FLOAT32,) if segments(problem, device) else ()


def tiles_of(problem, device) -> dict:
    """The sizes that the sweeps over K work in, whatever the mode; Hopper's own where they run."""
    if P := segments(problem, device):
        kernel = chosen(problem, device)[1][-1]
        BK, BV = (int(size) for size in kernel.template[-2:])
        return {"BK": BK, "BV": BV, "chunk": chunk_of(kernel)} | ({"segments": P} if P > 1 else {})
    return {"BK": tiles.BACKWARD_CHANNELS, "BV": tiles.channels(problem.sizes["V"]), "chunk": SUB_CHUNK, "kept": tiles.KEPT}


def pullback(problem, device, do, dht):
    """(gradients in the order of the arrays, that of the initial state or None), all work enqueued.

    `do` and `dht` are as a caller may give them; `dht` is None or a tuple of one. Of a gate that all channels share: float32
    [B, H, T], or None where tokens share it too.
    """
    q, k, v, g = inputs(problem)
    do = in_rows(do.astype(problem.dtype, copy=False))
    dht = None if dht is None else contiguous(dht[0])
    dq, dk, dv = (like(x, device) for x in (q, k, v))
    dg = None
    if wants_gate(problem):
        dg = device.empty(problem.shape("B H T"), FLOAT32) if one_gate(problem) else like(g, device)
    dh0 = None if problem.initial_state is None else device.empty(problem.shape("N H K V"), FLOAT32)
    arrays, gradients = (q, k, v, g, do), (dq, dk, dv, dg)
    gradients += (under_one_gate if one_gate(problem) else under_any_gates)(problem, device, arrays, gradients, dht, dh0)
    return gradients, None if dh0 is None else (dh0.astype(problem.initial_state[0].dtype, copy=False),)


def under_any_gates(problem, device, arrays, gradients, dht, dh0):
    """(du,) where there is a bonus."""
    P = segments(problem, device)
    N, H, K = problem.shape("N H K")
    before, own, general, last = chosen(problem, device)
    shares = device.empty((N * max(P, 1), H, K), FLOAT32) if last else None     # of du: of segments, or of sequences
    if own:
        on_warpgroups(problem, device, before, own, P, arrays, gradients, dht, dh0, shares)
    else:
        in_chunks(problem, device, general, arrays, gradients, dht, dh0, shares)
    if not last:
        return ()
    (kernel,), du = last, device.empty((H, K), problem["u"].dtype)
    args = pack(shares=device.pointer(shares), du=device.pointer(du), N=len(shares), H=H, K=K)
    device.launch(kernel, ceil_div(8 * H * K, kernel.threads), args)
    return (du,)


def on_warpgroups(problem, device, before, own, P, arrays, gradients, dht, dh0, du):
    """Hopper's own sweeps; the first leaves in dg what the second needs."""
    queries, keys = own
    (q, k, v, g, do), (dq, dk, dv, dg) = arrays, gradients
    B, N, H, T, K = problem.shape("B N H T K")
    warpgroups, u = OnWarpgroups(problem, device, P), bonus(problem)
    do, initial, dht = warpgroups.described(do), warpgroups.initial, warpgroups.aligned(dht)
    ends = device.empty((N * P, H, K), FLOAT32)
    sums = device.empty((B, H, T // tiles.WARPGROUP_CHUNK + warpgroups.where.shape["count"], K), FLOAT32)
    kept = device.empty((B, H, T // tiles.WARPGROUP_KEPT + 1, *(int(size) for size in keys.template[-2:])), FLOAT32)
    if before:
        initial, dht = warpgroups.between_segments(before, dict(q=q, k=k, v=v, do=do, g=g), {}, initial, dht)
    warpgroups.launch(queries, dict(q=q, k=k, v=v, do=do, g=g, dq=dq, weight=dg), u=u, initial=initial, dht=dht, ends=ends,
                      sums=sums, du=du, kept=kept)
    warpgroups.launch(keys, dict(q=q, k=k, v=v, do=do, g=g, weight=dg, dk=dk, dv=dv, dg=dg), u=u, dht=dht, ends=ends,
                      sums=sums, kept=kept, dh0=dh0)


def under_one_gate(problem, device, arrays, gradients, dht, dh0):
    """Hopper's sweeps for a gate that all channels share; the first leaves in dg what the second needs."""
    before, own, *_ = chosen(problem, device)
    (q, k, v, g, do), (dq, dk, dv, dg) = arrays, gradients
    N, H, P = *problem.shape("N H"), segments(problem, device)
    warpgroups, one = OnWarpgroups(problem, device, P, chunk_of(own[-1])), dict(g=g)
    do, initial, dht = warpgroups.described(do), warpgroups.initial, warpgroups.aligned(dht)
    if before:
        initial, dht = warpgroups.between_segments(before, dict(q=q, k=k, v=v, do=do), one, initial, dht)
    if dg is None:
        warpgroup_one_gate.gradients(problem, device, own, dict(q=q, k=k, v=v, do=do, g=g), dict(dq=dq, dk=dk, dv=dv), initial,
                                     dht, dh0, warpgroups.where, P)
        return ()
    (queries, keys), room = own, device.empty((N * P, H), FLOAT32)
    ends = None if dht is None else room
    warpgroups.launch(queries, dict(q=q, k=k, v=v, do=do, dq=dq), one, initial=initial, dht=dht, ends=ends, weights=dg)
    warpgroups.launch(keys, dict(q=q, k=k, v=v, do=do, dk=dk, dv=dv), one, dht=dht, ends=ends, dg=dg, dh0=dh0)
    return ()


class OnWarpgroups:
    """Launches of Hopper's own sweeps, of P segments a sequence."""

    def __init__(self, problem, device, P, chunk=tiles.WARPGROUP_CHUNK):
        self.problem, self.device, self.P = problem, device, P
        self.where = place(problem, device, problem.spans.segments(P, chunk) if P > 1 else None)
        self.initial = self.aligned(problem.initial_state and contiguous(problem.initial_state[0]))

    def aligned(self, x):
        return x if x is None or self.device.pointer(x) % 16 == 0 else x.copy()

    def described(self, x):
        """`x`, or a copy of it where a tensor map cannot describe it."""
        able = in_pieces(x, self.device) and all(stride > 0 or size == 1 for stride, size in zip(x.strides, x.shape))
        return x if able else x.copy(order="C")

    def launch(self, kernel, mapped, others={}, directions=1, **pointers):
        """A block for every (direction, segment, head); tensor maps of `mapped`, rows of `others` too."""
        N, H = self.problem.shape("N H")
        maps = [self.device.tensor_map(x, 128 // x.dtype.itemsize, tiles.WARPGROUP_CHUNK, True) for x in mapped.values()]
        fields = pack(**rows(self.device, **mapped, **others), **{name: pointer(self.device, x) for name, x in pointers.items()},
                      **self.where.shape, scale=self.problem.scale, P=self.P)
        self.device.launch(kernel, directions * N * self.P * H, with_maps(maps, fields), tiles.shared_bytes(kernel))

    def between_segments(self, kernels, mapped, others, initial, dht):
        """The state at every segment's start, the gradient of that at its end."""
        (summary, *scans), device, P = kernels, self.device, self.P
        N, H, K, V = self.problem.shape("N H K V")
        states, decays = device.empty((2, N * P, H, K, V), FLOAT32), device.empty((2, N * P, H, K), FLOAT32)
        self.launch(summary, mapped, others, directions=2, initial=initial, dht=dht, states=states, decays=decays)
        for scan in scans:
            args = pack(states=device.pointer(states), decays=device.pointer(decays), N=N, P=P, H=H, K=K, V=V)
            device.launch(scan, 2 * N * H * ceil_div(K * V, 4 * scan.threads), args)
        return states


def in_chunks(problem, device, kernels, arrays, gradients, dht, dh0, du):
    """The sweeps for every card."""
    queries, keys, values = kernels
    (q, k, v, g, do), (dq, dk, dv, dg) = arrays, gradients
    N, H, T, V = problem.shape("N H T V")
    where = place(problem.but(chunk_size=tiles.KEPT), device)
    u, initial = bonus(problem), problem.initial_state and contiguous(problem.initial_state[0])
    kept = device.empty(kept_shape(problem, where.shape["NC"]), FLOAT32)
    weight = dg if dg.dtype == FLOAT32 else device.empty_like(dg, dg.shape, FLOAT32)
    vectors = int(all(in_pieces(x, device) for x in (*arrays, *gradients)))
    ends = dict(**where.shape, scale=problem.scale, vectors=vectors)
    blocks = N * H * ceil_div(problem.sizes["K"], tiles.BACKWARD_CHANNELS)
    args = pack(**rows(device, q=q, k=k, v=v, do=do, g=g, dq=dq, weight=weight), u=pointer(device, u),
                initial=pointer(device, initial), kept=device.pointer(kept), du=pointer(device, du), **ends)
    device.launch(queries, blocks, args, tiles.shared_bytes(queries))
    args = pack(**rows(device, q=q, k=k, v=v, do=do, g=g, dk=dk, dg=dg, weight=weight), u=pointer(device, u),
                dht=pointer(device, dht), kept=device.pointer(kept), dh0=pointer(device, dh0), **ends)
    device.launch(keys, blocks, args, tiles.shared_bytes(keys))
    args = pack(**rows(device, q=q, k=k, do=do, g=g, dv=dv), u=pointer(device, u), dht=pointer(device, dht), **ends)
    device.launch(values, N * H * ceil_div(V, tiles.columns(V)), args, tiles.shared_bytes(values))


def like(x, device):
    """Room for the gradient of `x`, in its memory order where that has rows."""
    room = device.empty_like(x, x.shape, x.dtype)
    return room if has_rows(room) else device.empty(x.shape, x.dtype)


def chunk_of(kernel) -> int:
    """The tokens that one of Hopper's own sweeps takes at a time."""
    return tiles.TOKENS.get(kernel.name, {"chunk": tiles.WARPGROUP_CHUNK})["chunk"]


def in_pieces(x, device) -> bool:
    """Whether every row of `x` starts on 16 bytes and is a whole number of them: what 16-byte copies need."""
    starts = device.pointer(x), *x.strides[:-1], x.shape[-1] * x.dtype.itemsize
    return not any(start % 16 for start in starts)


def kept_shape(problem, chunks) -> tuple[int, ...]:
    """Of the states between the sweeps, a row for every chunk of `tiles.KEPT` tokens."""
    K = ceil_div(problem.sizes["K"], tiles.BACKWARD_CHANNELS) * tiles.BACKWARD_CHANNELS
    return (*problem.shape("B H"), chunks, K, tiles.channels(problem.sizes["V"]))


def scratch(problem, device) -> int:
    """Bytes that `pullback` takes besides the gradients, all free again at its end."""
    B, N, H, T, K, V = problem.shape("B N H T K V")
    P = segments(problem, device)
    if one_gate(problem):
        elements = N * P * H * wants_gate(problem)
    elif P:
        elements = N * P * H * K + B * H * (T // tiles.WARPGROUP_CHUNK + problem.spans.count * P) * K
        tile = math.prod(tiles.WARPGROUP_TILES[size > 64] for size in (K, V))
        elements += B * H * (T // tiles.WARPGROUP_KEPT + 1) * tile
    else:
        chunks = int(problem.spans.chunk_bounds(tiles.KEPT)[-1])
        elements = math.prod(kept_shape(problem, chunks))
        if gate(problem).dtype != FLOAT32:
            elements += gate(problem).size
    if "u" in problem.arrays:
        elements += N * max(P, 1) * H * K
    if P > 1:
        elements += 2 * N * P * H * K * (V + 1)
    return FLOAT32.itemsize * elements
