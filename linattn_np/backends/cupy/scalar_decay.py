"""Scalar decays: simple_gla, retention and linear_attention, whose channels all share a gate.

Each call becomes a problem of gla with a gate [B, H, T, 1]. Hopper's own kernels read such a gate as it is. On other
cards the gate is first copied to every channel, and `gated` plans the rest. A feature map is a pass over q and k. The
normaliser z is computed as one more column of v, all ones: the state becomes [S | z] and the output [y | z], columns
side by side. Both are in float32, since z sums many tokens, and zeros fill their rows to a multiple of 16 bytes. A last
pass divides y by z.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...array_kinds import BFLOAT16
from ...declarations import GLA
from . import float64, gated, gated_backward, segments
from .backward_tiles import Reused, tiles_of
from .elementwise_kernels import (
    FEATURE_MAPS,
    Divide,
    DivideGradient,
    FeatureGradient,
    FeatureMap,
    GateGradient,
    sum_arrays,
)
from .gated_forward import ForwardPass, HopperForward
from .gated_kernels import PANEL
from .kernel import DOUBLE
from .plan import FLOAT32, Draft, TensorMap, aligned16, ceil_div
from .scalar_decay_kernels import SUMS_AT_ONCE, WeightedSums
from .segments import HOPPER, PORTABLE, SHARED_GATE, TILED, UNWANTED_GATE

WHOLE = 4  # float32 columns in 16 bytes: [S | z] has a multiple of them
# Why the gate is copied to every channel, by operator, as `explain` prints it.
SPREAD = {"simple_gla": "g: spread over the channels", "retention": "log gamma: spread over tokens and channels"}
NO_GATE = "a gate of 0: spread over tokens and channels"


def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    if normalized(problem) and problem.dtype == DOUBLE and problem.sizes["V"] >= float64.COLUMNS[-1]:
        return f"V={problem.sizes['V']} and the normaliser are over {float64.COLUMNS[-1]} in float64"
    return gated.unsupported(problem)


def plan(problem, device, kept=()):
    """The plan of a forward pass. `kept`: what `plan_summary` of the same tokens has saved."""
    draft = Draft()
    gla = as_gla(draft, problem)
    inner = plan_gla(draft, gla, device, reason_to_spread(problem), kept)
    y, final = draft.include(inner)
    if not normalized(problem):
        return draft.plan((y, final), mode=inner.mode, tiles=inner.tiles)
    o = draft.output(problem)
    by_token(draft, problem, Divide(problem.dtype), yz=y, o=o, V=problem.sizes["V"])
    if final is not None:
        final = split(draft, problem, final[0], (problem.state_dtype,) * 2)
    return draft.plan((draft.give_back(problem, o), final), mode=inner.mode, tiles=inner.tiles)


def plan_summary(problem, device):
    """What `gated_forward.plan_summary` returns, by Hopper's kernels for a gate that channels share."""
    draft = Draft()
    gla = as_gla(draft, problem)
    cut = segments.scalar_forward_cut(gla, device)
    if cut is None:
        return None
    cut = segments.without_a_short_segment(gla, device, cut)
    launches = scalar_forward_pass(draft, gla, cut, gla["v"])  # o is not written: v's tensor map stands for it
    inner = launches.summary(len(problem.op.gates))
    return replace(inner, buffers=tuple(draft.buffers), steps=tuple(draft.steps))


def plan_summary_vjp(problem, device, do, saved=()):
    """What `gated_backward.plan_summary_vjp` returns, by Hopper's kernels for a gate that channels share."""
    draft = Draft()
    gla = as_gla(draft, problem)
    cut = segments.scalar_backward_cut(gla, device)
    if normalized(problem) or cut.way != HOPPER:
        return None
    gla = in_float32(draft, gla)
    read = {name: draft.mapped(gla[name], name) for name in "qkv"}
    do, _ = draft.cotangents(gla, do, None)
    launches = gated_backward.HopperBackward(draft, gla, cut.segments, WeightedSums.CHUNK, framed=True)
    read["do_"] = draft.mapped(do, "do")
    return launches.summary(cut.summary, read, len(problem.op.gates), g=gla["g"])


def plan_vjp(problem, device, do, dht, saved=(), kept=()):
    """The plan of a pullback. `kept`: what `plan_summary_vjp` of the same `do` has saved. `saved` is always empty."""
    draft = Draft()
    gla, reason = as_gla(draft, problem), reason_to_spread(problem)
    if normalized(problem):
        y, _ = draft.include(plan_gla(draft, gla, device, reason))
        do, _ = draft.cotangents(problem, do, None)
        dyz, kernel = draft.empty(y.shape, y.dtype), DivideGradient(problem.dtype)
        by_token(draft, problem, kernel, yz=y, do_=do, dyz=dyz, V=problem.sizes["V"], columns=y.shape[-1])
        do, dht = dyz, dht and (joined_state(draft, problem, dht, "dht"),)
    inner = plan_gla_vjp(draft, gla, device, do, dht, reason, kept, exact_gate=bool(problem.op.gates))
    (dq, dk, dv, dg), dh0 = draft.include(inner)
    if phi := feature_map(problem):
        dq, dk = (feature_gradient(draft, phi, problem[name], x, name) for name, x in (("q", dq), ("k", dk)))
    if normalized(problem):
        dtypes = [part.dtype for part in problem.initial_state or ()]
        dv, dh0 = dv[..., : problem.sizes["V"]], dh0 and split(draft, problem, dh0[0], dtypes)
    found = tuple(draft.cast(x, problem.dtype) for x in (dq, dk, dv))
    if problem.op.gates:
        found += (gradient_of_gate(draft, problem, dg),)
    return draft.plan((found, dh0), mode=inner.mode, tiles=inner.tiles)


# -- from these operators to gla ---------------------------------------------------------------------------------------
def feature_map(problem) -> str | None:
    return problem.options.get("feature_map")


def normalized(problem) -> bool:
    return bool(problem.options.get("normalize"))


def as_gla(draft, problem):
    """The call as a problem of gla with a gate [B, H, T, 1], whose axes B, H and T have size 1 where the gate is the
    same along them. Adds the passes that map q and k to features, and that append a column of ones to v."""
    B, N, H, T, K, V = problem.shape("B N H T K V")
    q, k, v = (problem[name] for name in "qkv")
    changed, phi = {"dtype": problem.dtype}, feature_map(problem)
    if normalized(problem):
        columns = ceil_div(V + 1, WHOLE) * WHOLE
        dtype, sizes = dtype_of_sums(problem.dtype), problem.sizes | {"V": columns}
        ones = draft.table(np.ones((1, 1, 1, 1), dtype))
        v = with_last(draft, v, ones, (B, H, T, columns), f"v: in {dtype} beside a column of ones for the normaliser")
        changed = {"dtype": dtype, "state_dtype": dtype, "scale": 1.0, "sizes": sizes, "out": None}
        if problem.initial_state:
            changed["initial_state"] = (joined_state(draft, problem, problem.initial_state, "initial_state"),)
    if phi or changed["dtype"] != q.dtype:
        wide = " in float32" if changed["dtype"] != q.dtype else ""
        q, k = (
            beside(draft, [(x, K)], x.shape, changed["dtype"], phi, f"{name}: mapped to its features{wide}")
            for name, x in (("q", q), ("k", k))
        )
    arrays = {"q": q, "k": k, "v": v, "g": gate(draft, problem)}
    return problem.replace(op=GLA, arrays=arrays, options={}, **changed)


def gate(draft, problem):
    """The natural logarithm of the decay, [B, H, T, 1], or [1, H or 1, 1, 1] if tokens share it."""
    if problem.op.gates:
        return problem["g"][..., None]
    log_decay = np.asarray(problem.options.get("log_decay", [0.0]))
    return draft.table(log_decay.astype(dtype_of_sums(problem.dtype)).reshape(1, -1, 1, 1))


def dtype_of_sums(dtype):
    """The dtype of sums over many tokens."""
    return DOUBLE if dtype == DOUBLE else FLOAT32


def reason_to_spread(problem) -> str:
    """Why the gate is copied to every channel, for `explain`."""
    return SPREAD.get(problem.op.name, NO_GATE)


def spread(draft, gla, reason):
    """The problem with a gate for every channel."""
    wide = gla.shape("B H T K")
    g = beside(draft, [(gla["g"], wide[-1])], wide, gla.compute_dtype, None, reason)
    return gla.replace(arrays=gla.arrays | {"g": g})


def in_float32(draft, gla):
    """The problem with its scalar decay in float32, for kernels that take no other."""
    if gla["g"].dtype == FLOAT32:
        return gla
    B, H, T = gla.shape("B H T")
    return gla.replace(
        arrays=gla.arrays | {"g": beside(draft, [(gla["g"], 1)], (B, H, T, 1), FLOAT32, None, "g: in float32")}
    )


def joined_state(draft, problem, parts, name):
    """[S | z] of the state's `parts` S [N, H, K, V] and z [N, H, K]."""
    N, H, K, V = problem.shape("N H K V")
    S, z = (draft.as_contiguous(part, name, problem.compute_dtype) for part in parts)
    return with_last(draft, S, z[..., None], (N, H, K, ceil_div(V + 1, WHOLE) * WHOLE), "")


def with_last(draft, x, last, shape, reason):
    """[x | last | zeros], columns side by side in an array of `shape`; `last` is one column."""
    V, rest, dtype = x.shape[-1], shape[-1] - x.shape[-1] - 1, dtype_of_sums(x.dtype)
    zeros = [(draft.table(np.zeros((1, 1, 1, 1), dtype)), rest)] if rest else []
    return beside(draft, [(x, V), (last, 1), *zeros], shape, dtype, None, reason)


def beside(draft, parts, shape, dtype, phi, reason):
    """phi of the `parts`, each (array, columns), side by side in one array; arrays are repeated along axes of size 1.

    The result has the first part's memory order if that part fills it.
    """
    first, at = parts[0][0], 0
    found = draft.like(first, dtype) if first.shape == shape else draft.empty(shape, dtype)
    for x, columns in parts:
        rows = draft.in_rows(x, reason.partition(":")[0])
        fill(draft, found[..., at : at + columns], rows, phi, reason if at == 0 else "")
        at += columns
    return found


def split(draft, problem, joined, dtypes):
    """(S, z) of [S | z], in `dtypes`."""
    V = problem.sizes["V"]
    return tuple(draft.cast(x, dtype) for x, dtype in zip((joined[..., :V], joined[..., V]), dtypes))


def gradient_of_gate(draft, problem, dg):
    """The gradient [B, H, T] in the dtype of the gate, from `dg`: the same in another dtype, or [B, H, T, C], whose C
    channels, or parts, are added."""
    if dg.ndim == 3 and dg.dtype == problem["g"].dtype:
        return dg
    found = draft.empty(problem.shape("B H T"), problem["g"].dtype)
    if dg.ndim == 3:
        fill(draft, found[:, :, None], dg[:, :, None], None)  # the tokens take the place of channels
    else:
        by_token(draft, problem, GateGradient(found.dtype), dg_channels=dg, dg=found[..., None], C=dg.shape[-1])
    return found


# -- launches of elementwise kernels -----------------------------------------------------------------------------------
def feature_gradient(draft, phi, x, dy, name):
    """dx of y = phi(x), with x the array `name`."""
    dx, kernel = draft.empty(x.shape, x.dtype), FeatureGradient(FEATURE_MAPS[phi], x.dtype, dy.dtype)
    blocks, sizes = ceil_div(x.size, kernel.threads), dict(zip(("B", "H", "T_", "C"), x.shape))
    draft.launch(kernel, blocks, x=draft.in_rows(x, name), dy=dy, dx=dx, **sizes)
    return dx


def by_token(draft, problem, kernel, **args):
    """Launches a kernel with one warp for each token of each head."""
    B, H, T = problem.shape("B H T")
    draft.launch(kernel, ceil_div(32 * B * H * T, kernel.threads), **args, B=B, H=H, T_=T)


def fill(draft, y, x, phi, reason=""):
    """y = phi(x); `x` is repeated along axes of size 1."""
    step, kernel = int(x.shape[-1] > 1), FeatureMap(FEATURE_MAPS[phi], x.dtype, y.dtype)
    vectors = y.shape[-1] % kernel.PIECE == 0 and aligned16(y) and (not step or aligned16(x))
    threads = y.size // (kernel.PIECE if vectors else 1)
    sizes = dict(zip(("B", "H", "T_", "C"), y.shape))
    draft.launch(kernel, ceil_div(threads, kernel.threads), reason, x=x, y=y, **sizes, step=step, vectors=int(vectors))


# -- forward on Hopper -------------------------------------------------------------------------------------------------
def plan_gla(draft, gla, device, reason, kept=()):
    """A plan of gla with a scalar decay: by Hopper's kernels if they can, else by `gated` with a copy of the gate for
    every channel, for the `reason` that `explain` prints."""
    if gla.dtype == DOUBLE and gla.mode != "staged":
        return float64.plan(gla, device)
    cut = segments.scalar_forward_cut(gla, device)
    if cut is None:
        return gated.plan(spread(draft, gla, reason), device)
    own = Draft()
    o, final = own.output(gla, cut.fits), own.final(gla)
    scalar_forward_pass(own, gla, cut, o).run(final, kept)
    return own.plan(own.results(gla, o, final), mode="chunk", tiles=cut.tiles)


def scalar_forward_pass(draft, gla, cut, o) -> ForwardPass:
    """The forward pass by the Hopper kernel that the cut has chosen."""
    by_sums = isinstance(cut.kernel, WeightedSums)
    if not by_sums:
        gla = in_float32(draft, gla)
    arrays = *(draft.mapped(gla[name], name, cut.fits) for name in "qkv"), gla["g"]
    return (SumsForward if by_sums else ScalarHopperForward)(draft, gla, cut, arrays, o)


class ScalarHopperForward(HopperForward):
    """The forward pass by the kernel for gates of every channel, which here reads one float32 gate a token."""

    def inputs_of(self, kernel):
        return super().inputs_of(kernel) | {
            "g": TensorMap(self.k, kernel.BK, kernel.CHUNK, False),
            "g_rows": self.k,
            "scalar_gate": self.g,
        }


class SumsForward(ForwardPass):
    """The forward pass as sums of values weighted by decayed products of queries with keys."""

    def launch_outputs(self, shape, initial, final):
        self.launch(self.cut.kernel, shape, initial, final)

    def launch_summaries(self, parts, left, of, needed):
        states, decays = left
        self.launch(self.cut.summary, self.finer_shape(parts), None, states, decays, of * parts, needed * parts)

    def launch(self, kernel, shape, initial, final, *decays):
        sums = [weighted_sum((self.q, self.k, self.v, self.o), initial, final, read=self.problem.scale, write=1.0)]
        launch_sums(self.draft, self.problem, kernel, sums, self.g, shape, self.problem.sizes["V"], *decays)


def weighted_sum(parts, initial, final, *, read, write, partner=None, turned=False, backwards=False, adds=False):
    """The kernel's struct `WeightedSum`. `parts`: the arrays in the places of queries, keys, values and the result.

    read, write : factors of what a state gives to the result, and of what a token adds to the state
    turned : the keys of this sum are the columns of the state in memory, not its rows
    partner : the array whose gradient the sum is, if the gate's gradient is wanted
    backwards : the sum runs from the last token to the first
    adds : the result already has the sums of other tiles, to which these are added
    """
    arrays = dict(zip(("q", "k", "v", "o"), parts)) | {"partner": partner or parts[2]}
    K, V = arrays["k"].shape[-1], arrays["v"].shape[-1]
    return {
        **{name: TensorMap(x, PANEL, WeightedSums.CHUNK, True) for name, x in arrays.items()},
        **{f"{name}_rows": x for name, x in arrays.items()},
        **{"initial": initial, "final": final, "output_scale": read, "value_scale": write},
        **{"backwards": backwards, "adds_to_o": adds},
        **{"K": K, "V": V, "state_k": 1 if turned else V, "state_v": K if turned else 1},
    }


def launch_sums(draft, problem, kernel, sums, g, shape, widest, decays=None, of=1, needed=1, **gate):
    """Launches `kernel` for so many `sums` of at most `widest` columns. Of `of` segments of each sequence the first
    `needed` are computed. `gate`: the arrays of `gate_sums`, if the gate's gradient is wanted."""
    blocks = problem.sizes["B"] * shape.count * problem.sizes["H"] * ceil_div(widest, kernel.BV) * len(sums)
    gate = {"parts": 0} | gate
    draft.launch(kernel, blocks, sums=sums, g=g, shape=shape, decays=decays, of=of, needed=needed, **gate)


# -- backward on Hopper ------------------------------------------------------------------------------------------------
# The arrays that take the places of queries, keys and values in the weighted sum that is each gradient.
SUMS = {"dq": ("do_", "v", "k"), "dk": ("v", "do_", "q"), "dv": ("k", "q", "do_")}


def plan_gla_vjp(draft, gla, device, do, dht, reason, kept=(), exact_gate=True):
    """A plan of gla's pullback with a scalar decay. Its dg is [B, H, T] in the dtype in which the kernels read g, or
    [B, H, T, C] in float32, whose C parts are to be added, or None if tokens share the gate. `exact_gate`: whether dg
    is wanted."""
    if gla.dtype == DOUBLE:
        return float64.plan_vjp(gla, device, do, dht)
    cut = segments.scalar_backward_cut(gla, device, bool(kept))
    if cut.way == PORTABLE:
        gate = SHARED_GATE if exact_gate else UNWANTED_GATE
        return gated_backward.plan_vjp(spread(draft, gla, reason), device, do, dht, gate=gate)
    own = Draft()
    if cut.way == TILED or cut.kernels[0].gate == FLOAT32:
        gla = in_float32(own, gla)
    inputs = *(own.mapped(gla[name], name) for name in "qkv"), gla["g"]
    do, dht = own.cotangents(gla, do, dht)
    gradients, dh0 = (*map(own.like, inputs[:3]), None), own.gradient_of_state(gla)
    backward = gated_backward.GatedBackwardPass(gla, inputs, do, gradients, dht, dh0)
    if cut.way == TILED:
        dg, tiles = sums_tile_after_tile(own, backward, device)
    else:
        dg, tiles = gradients_by_sums(own, backward, cut, kept)
    return own.plan(((*gradients[:3], dg), own.stored_gradient(gla, dh0)), tiles=tiles)


def sums_tile_after_tile(draft, whole, device):
    """Launches the kernels for one tile of the state after the other, as `gated_backward.tile_after_tile` does:
    (the gate's gradient, or None if tokens share the gate; the sizes of the first tile's kernels)."""
    memory, tiles, sizes = Reused(draft), tiles_of(whole.problem), []
    shape, own_gates = whole.problem.shape("B H T"), segments.has_own_gates(whole.problem)
    parts = draft.empty((len(tiles), *shape), FLOAT32) if own_gates else None
    for n, tile in enumerate(tiles):
        own = memory.again()
        backward = whole.of_tile(tile, own)
        cut = segments.sums_backward_cut(backward.problem, device, one_part=own_gates)
        sizes.append(gradients_by_sums(own, backward, cut, dg=parts and parts[n])[1])
        if whole.dh0 is not None:
            draft.copy(backward.dh0, tile.state(whole.dh0))
    if parts is None:
        return None, sizes[0] | {"tiles": len(tiles)}
    dg = draft.empty(shape, FLOAT32)
    sum_arrays(draft, parts, dg)
    return dg, sizes[0] | {"tiles": len(tiles)}


def gradients_by_sums(draft, backward, cut, kept=(), dg=None):
    """Launches `WeightedSums` for dq, dk and dv: (the gate's gradient, or None if tokens share the gate; the sizes of
    the kernels).

    One launch computes all three sums, or the first of two launches dq. If the gate's gradient is wanted there are two
    launches: the second computes it from what the first writes (`gate_sums`). `dg`: where one tile of the state writes
    it.
    """
    gla, read, written = backward.problem, backward.read, backward.written
    (K, V), gate = gla.shape("K V"), cut.kernels[0].gives_gate
    hopper = gated_backward.HopperBackward(draft, gla, cut.segments, WeightedSums.CHUNK, framed=bool(kept))
    read["do_"] = draft.mapped(backward.do, "do")
    mapped = {name: x for name, x in read.items() if name != "g"}
    initial, dht, P = hopper.initial, draft.aligned(backward.dht, "dht"), hopper.P
    if kept:
        initial, dht = hopper.resumed(*kept, dht)
    elif P > 1:
        initial, dht = hopper.between_segments(cut.summary, mapped, initial, dht, g=read["g"])
    sums, adds = [], {"dq": backward.adds, "dk": backward.adds, "dv": backward.adds_dv}
    for name, parts in SUMS.items():
        of, partner = (*(read[part] for part in parts), written[name]), read[name[1:]] if gate else None
        more = {"partner": partner, "turned": name != "dv", "adds": adds[name]}
        if name == "dq":
            sums.append(weighted_sum(of, initial, None, read=gla.scale, write=1.0, **more))
        else:
            final = backward.dh0 if name == "dv" else None
            sums.append(weighted_sum(of, dht, final, read=1.0, write=gla.scale, backwards=True, **more))
    of_gate = gate_sums(draft, gla, hopper.shape, *cut.kernels) | ({"dg": dg} if dg else {}) if gate else {}
    for kernel in cut.kernels:
        count, widest = SUMS_AT_ONCE[kernel.what], K if kernel.what.endswith("Queries") else max(K, V)
        launch_sums(draft, gla, kernel, sums[:count], read["g"], hopper.shape, widest, of=P, **of_gate)
        sums = sums[count:]
    return of_gate.get("dg"), cut.kernels[-1].tiles | ({"segments": P} if P > 1 else {})


def gate_sums(own, gla, shape, queries, keys):
    """The arrays that the kernel of dq writes for the kernel of dk and dv, which computes dg from them; and dg, with a
    part for every tile of K."""
    B, H, T, K = gla.shape("B H T K")
    stretches, parts, tiles = T // queries.STRETCH + shape.count, ceil_div(K, queries.BV), ceil_div(K, keys.BV)
    return {
        "kept": own.empty((B, H, stretches, queries.BK, queries.BK), BFLOAT16),
        "token_sums": own.empty((B, H, parts, T), FLOAT32),
        "dg": own.empty((B, H, T), keys.gate) if tiles == 1 else own.empty((B, H, T, tiles), FLOAT32),
        "parts": parts,
    }
