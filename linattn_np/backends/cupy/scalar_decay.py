"""The planner of operators whose channels all share a gate (a scalar decay): simple_gla, retention, linear_attention.

Each call becomes a problem of gla with a gate [B, H, T, 1]. Hopper's own kernels read such a gate as it is. On other
cards the gate is first copied to every channel, and `gated` plans the rest. A feature map is applied to q and k by an
elementwise kernel beforehand. The normaliser z of linear_attention is computed as one more column of v, all ones: the
state becomes [S | z] and the output [y | z], columns side by side. Both are in float32, since z sums many tokens, and
zeros fill their rows to a multiple of 16 bytes. A last kernel computes o = y / z.

Sizes: B batch, N sequences, H heads, T tokens, K channels, V columns, P segments of a sequence.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...array_kinds import BFLOAT16
from ...declarations import GLA
from ...derived import RepeatedKeyHeads
from . import aligned_copies, float64, gated, gated_backward, segments
from .arithmetic import ceil_div
from .backward_tiles import DraftOfTiles, tiles_of
from .elementwise_kernels import (
    FEATURE_MAPS,
    Divide,
    DivideGradient,
    FeatureGradient,
    FeatureMap,
    GateGradient,
    SumHeads,
    sum_arrays,
)
from .gated_forward import ForwardPass, HopperForward
from .gated_kernels import PANEL
from .kernel import DOUBLE
from .plan import FLOAT32, Array, Draft, TensorMap, aligned16
from .scalar_decay_kernels import SUMS_AT_ONCE, WeightedSums
from .segments import COPIED, HOPPER, PORTABLE, TILED

WARP = 32  # threads
COLUMNS_MULTIPLE = 4  # of which [S | z] has a multiple: float32 columns in 16 bytes
# What `explain` prints if the gate is copied to every channel, by operator; NO_GATE_REASON for operators without gates.
SPREAD_REASONS = {
    "simple_gla": "g: spread over the channels",
    "retention": "log gamma: spread over tokens and channels",
}
NO_GATE_REASON = "a gate of 0: spread over tokens and channels"


def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    if normalized(problem) and problem.dtype == DOUBLE and problem.sizes["V"] >= float64.COLUMNS[-1]:
        return f"V={problem.sizes['V']} and the normaliser are over {float64.COLUMNS[-1]} in float64"
    return gated.unsupported(problem)


def plan(problem, device, summaries=()):
    """The plan of a forward pass. `summaries`: what a plan of `plan_summary` has saved for the same arrays."""
    draft = Draft()
    gla = as_gla(draft, problem)
    gla_plan = plan_gla(draft, gla, device, spread_reason(problem), summaries)
    y, final = draft.include(gla_plan)
    if not normalized(problem):
        return draft.plan((y, final), mode=gla_plan.mode, tiles=gla_plan.tiles)
    o = draft.output(problem)
    launch_by_tokens(draft, problem, Divide(problem.dtype), WARP, yz=y, o=o, V=problem.sizes["V"])
    if final is not None:
        final = split_state(draft, problem, final[0], (problem.state_dtype,) * 2)
    return draft.plan((draft.give_back(problem, o), final), mode=gla_plan.mode, tiles=gla_plan.tiles)


def plan_summary(problem, device):
    """What `gated_forward.plan_summary` returns: the plan of a call's final state for an initial state of 0. It takes
    Hopper's kernels; None on other cards."""
    draft = Draft()
    gla = as_gla(draft, problem)
    cut = segments.scalar_forward_cut(gla, device, only_summary=True)
    if cut.way != HOPPER:
        return None
    if shares_heads(gla) and not isinstance(cut.kernel, WeightedSums):
        gla = with_all_heads(draft, gla)
    cut = segments.without_a_short_segment(gla, device, cut)
    # o is not written, but the kernel needs a tensor map of some array in its place: v
    plan = scalar_forward_pass(draft, gla, cut, gla["v"]).summary_plan(len(problem.op.gates))
    return replace(plan, buffers=tuple(draft.buffers), steps=tuple(draft.steps))


def plan_summary_vjp(problem, device, do, saved=()):
    """What `gated_backward.plan_summary_vjp` returns: the plan of the initial state's gradient for dht = 0. It takes
    Hopper's kernels; None on other cards, and for normalised calls. `saved` is always empty."""
    draft = Draft()
    gla = as_gla(draft, problem)
    cut = segments.scalar_backward_cut(gla, device)
    if normalized(problem) or cut.way != HOPPER:
        return None
    gla = with_float32_gate(draft, gla)
    read = {name: draft.mapped(gla[name], name) for name in "qkv"}
    do, _ = draft.cotangents(gla, do)
    launches = SumsBackward(draft, gla, cut.segments, WeightedSums.CHUNK, empty_ends=True)
    read["do_"] = draft.mapped(do, "do")
    return launches.summary_plan(cut.summary, read, len(problem.op.gates), g=gla["g"])


def plan_vjp(problem, device, do, dht, saved=(), summaries=()):
    """The plan of a pullback. `summaries`: what a plan of `plan_summary_vjp` has saved for the same `do`. `saved` is
    always empty: plans of forward passes save nothing."""
    draft = Draft()
    gla, reason = as_gla(draft, problem), spread_reason(problem)
    if normalized(problem):
        y, _ = draft.include(plan_gla(draft, gla, device, reason))
        do, _ = draft.cotangents(problem, do)
        dyz, kernel = draft.empty(y.shape, y.dtype), DivideGradient(problem.dtype)
        sizes = {"V": problem.sizes["V"], "columns": y.shape[-1]}
        launch_by_tokens(draft, problem, kernel, WARP, yz=y, do_=do, dyz=dyz, **sizes)
        do, dht = dyz, dht and (joined_state(draft, problem, dht, "dht"),)
    gla_plan = plan_gla_vjp(draft, gla, device, do, dht, reason, summaries, wants_dg=bool(problem.op.gates))
    (dq, dk, dv, dg), dh0 = draft.include(gla_plan)
    if problem["q"].shape != dq.shape:  # heads of v share them
        dq, dk = (sum_of_heads(draft, problem[name], dx) for name, dx in (("q", dq), ("k", dk)))
    if phi := feature_map(problem):
        dq, dk = (feature_gradient(draft, phi, problem[name], dx, name) for name, dx in (("q", dq), ("k", dk)))
    if normalized(problem):
        dtypes = [part.dtype for part in problem.initial_state or ()]
        dv, dh0 = dv[..., : problem.sizes["V"]], dh0 and split_state(draft, problem, dh0[0], dtypes)
    gradients = tuple(draft.cast(dx, problem.dtype) for dx in (dq, dk, dv))
    if problem.op.gates:
        gradients += (gradient_of_gate(draft, problem, dg),)
    return draft.plan((gradients, dh0), mode=gla_plan.mode, tiles=gla_plan.tiles)


# -- from these operators to gla ---------------------------------------------------------------------------------------
def feature_map(problem) -> str | None:
    """The name of the function that is applied to q and k (a key of `FEATURE_MAPS`), or None."""
    return problem.options.get("feature_map")


def normalized(problem) -> bool:
    """Whether o is divided by the normaliser z."""
    return bool(problem.options.get("normalize"))


def as_gla(draft, problem):
    """The call as a problem of gla with a gate [B, H, T, 1]; the gate's axes B, H and T have size 1 if it is the same
    along them. Adds to the draft what this takes: q and k are mapped to features, and v gets a column of ones."""
    B, N, H, T, K, V = problem.shape("B N H T K V")
    q, k, v = (problem[name] for name in "qkv")
    changed, phi = {"dtype": problem.dtype}, feature_map(problem)
    if normalized(problem):
        columns = ceil_div(V + 1, COLUMNS_MULTIPLE) * COLUMNS_MULTIPLE
        dtype, sizes = dtype_of_sums(problem.dtype), problem.sizes | {"V": columns}
        ones = draft.table(np.ones((1, 1, 1, 1), dtype))
        reason = f"v: in {dtype} beside a column of ones for the normaliser"
        v = append_column(draft, v, ones, (B, H, T, columns), reason)
        changed = {"dtype": dtype, "state_dtype": dtype, "scale": 1.0, "sizes": sizes, "out": None}
        if problem.initial_state:
            changed["initial_state"] = (joined_state(draft, problem, problem.initial_state, "initial_state"),)
    if phi or changed["dtype"] != q.dtype:
        in_float32 = " in float32" if changed["dtype"] != q.dtype else ""
        q, k = (
            side_by_side(draft, [(x, K)], x.shape, changed["dtype"], phi, f"{name}: mapped to its features{in_float32}")
            for name, x in (("q", q), ("k", k))
        )
    arrays = {"q": q, "k": k, "v": v, "g": log_gate(draft, problem)}
    return problem.replace(op=GLA, arrays=arrays, options={}, **changed)


def shares_heads(gla) -> bool:
    """Whether heads of v share those of q and k. Of all kernels `WeightedSums` reads these as they are."""
    return gla["q"].shape[1] < gla.sizes["H"]


def with_all_heads(draft, gla):
    """The problem of gla with copies of q and k that have a head for every head of v."""
    H, pairs, copies = gla.sizes["H"], [], {}
    for name in "qk":
        B, HK, T, K = gla[name].shape
        copies[name], grouped = draft.like(gla[name], shape=(B, H, T, K)), (B, HK, H // HK, T, K)
        source = gla[name].view(lambda x: np.broadcast_to(x[:, :, None], grouped))
        target = copies[name].view(lambda x: x.reshape(grouped))  # a view, as one axis is split
        pairs += [(source[b], target[b]) for b in range(B)]
    aligned_copies.copy_rows(draft, pairs, RepeatedKeyHeads.copy_note)
    return gla.replace(arrays=gla.arrays | copies)


def log_gate(draft, problem):
    """The natural logarithm of the decay: [B, H, T, 1] from the caller's gate; or, from options, [1, H, 1, 1] if each
    head has a constant decay, and [1, 1, 1, 1] if there is none (then it is 0)."""
    if problem.op.gates:
        return problem["g"][..., None]
    log_decay = np.asarray(problem.options.get("log_decay", [0.0]))
    return draft.table(log_decay.astype(dtype_of_sums(problem.dtype)).reshape(1, -1, 1, 1))


def dtype_of_sums(dtype):
    """The dtype of sums over many tokens of arrays in `dtype`."""
    return DOUBLE if dtype == DOUBLE else FLOAT32


def spread_reason(problem) -> str:
    """What `explain` prints if the gate is copied to every channel."""
    return SPREAD_REASONS.get(problem.op.name, NO_GATE_REASON)


def with_gate_of_every_channel(draft, gla, reason):
    """The problem of gla with a copy of the gate for every channel, [B, H, T, K]: one for all that share the gate."""
    shape, given = gla.shape("B H T K"), gla["g"]
    copied = (*given.shape[:3], shape[-1])
    g = side_by_side(draft, [(given, shape[-1])], copied, gla.compute_dtype, phi=None, reason=reason)
    strides = tuple(stride if n == size else 0 for stride, n, size in zip(g.strides, copied, shape))
    return gla.replace(arrays=gla.arrays | {"g": Array(g.memory, shape, strides, g.dtype, g.offset)})


def with_float32_gate(draft, gla):
    """The problem of gla with its gate as float32 [B, H, T, 1], for kernels that read no other dtype."""
    if gla["g"].dtype == FLOAT32:
        return gla
    g = side_by_side(draft, [(gla["g"], 1)], (*gla.shape("B H T"), 1), FLOAT32, phi=None, reason="g: in float32")
    return gla.replace(arrays=gla.arrays | {"g": g})


def joined_state(draft, problem, parts, name):
    """[S | z | zeros] of the state's `parts` S [N, H, K, V] and z [N, H, K]. `name`: the caller's, for `explain`."""
    N, H, K, V = problem.shape("N H K V")
    S, z = (draft.as_contiguous(part, name, problem.compute_dtype) for part in parts)
    columns = ceil_div(V + 1, COLUMNS_MULTIPLE) * COLUMNS_MULTIPLE
    return append_column(draft, S, z[..., None], (N, H, K, columns), "")


def append_column(draft, x, column, shape, reason):
    """[x | column | zeros] of the given `shape`, in float32 or float64."""
    V, zero_columns, dtype = x.shape[-1], shape[-1] - x.shape[-1] - 1, dtype_of_sums(x.dtype)
    zeros = [(draft.table(np.zeros((1, 1, 1, 1), dtype)), zero_columns)] if zero_columns else []
    return side_by_side(draft, [(x, V), (column, 1), *zeros], shape, dtype, phi=None, reason=reason)


def side_by_side(draft, parts, shape, dtype, phi, reason):
    """phi (a feature map, or None) of the `parts`, side by side in a new array of `shape` and `dtype`.

    Each part is (array, its columns in the result). Arrays are repeated along axes of size 1. The result has the memory
    order of the first part if there is no other. `reason`: why the first part, an array of the caller, is copied.
    """
    first, column = parts[0][0], 0
    joined = draft.like(first, dtype) if first.shape == shape else draft.empty(shape, dtype)
    for x, columns in parts:
        rows = draft.in_rows(x, reason.partition(":")[0])
        launch_feature_map(draft, rows, joined[..., column : column + columns], phi, reason if column == 0 else "")
        column += columns
    return joined


def split_state(draft, problem, joined, dtypes):
    """(S, z) of the state `joined`, [S | z | zeros], in `dtypes`."""
    V = problem.sizes["V"]
    return tuple(draft.cast(x, dtype) for x, dtype in zip((joined[..., :V], joined[..., V]), dtypes))


def gradient_of_gate(draft, problem, dg):
    """The gradient [B, H, T] in the dtype of the gate. `dg` is [B, H, T] in any dtype, or [B, H, T, C], whose last axis
    is summed."""
    if dg.ndim == 3 and dg.dtype == problem["g"].dtype:
        return dg
    result = draft.empty(problem.shape("B H T"), problem["g"].dtype)
    if dg.ndim == 3:  # the identity as a feature map converts the dtype; tokens take the place of channels
        launch_feature_map(draft, dg[:, :, None], result[:, :, None], phi=None)
    else:
        kernel, lanes = GateGradient(result.dtype), GateGradient.lanes(dg.shape[-1])
        arrays = {"dg_channels": dg, "dg": result[..., None]}
        launch_by_tokens(draft, problem, kernel, lanes, kernel.TOKENS, **arrays, C=dg.shape[-1], lanes=lanes)
    return result


def sum_of_heads(draft, x, dx):
    """The gradient of x [B, HK, T, K] from that of its copy `dx` [B, H, T, K]."""
    total = draft.like(x)
    SumHeads(x.dtype).launch(draft, draft.in_rows(dx, ""), total)
    return total


# -- launches of elementwise kernels -----------------------------------------------------------------------------------
def feature_gradient(draft, phi, x, dy, name):
    """dx of y = phi(x); x is the caller's array `name`."""
    dx, kernel = draft.empty(x.shape, x.dtype), FeatureGradient(FEATURE_MAPS[phi], x.dtype, dy.dtype)
    blocks, sizes = ceil_div(x.size, kernel.threads), dict(zip(("B", "H", "T_", "C"), x.shape))
    draft.launch(kernel, blocks, x=draft.in_rows(x, name), dy=dy, dx=dx, **sizes)
    return dx


def launch_by_tokens(draft, problem, kernel, threads, tokens=1, /, **args):
    """Launches a kernel with so many threads for so many neighbouring tokens of each head."""
    B, H, T = problem.shape("B H T")
    draft.launch(kernel, ceil_div(threads * B * H * ceil_div(T, tokens), kernel.threads), **args, B=B, H=H, T_=T)


def launch_feature_map(draft, x, y, phi, reason=""):
    """Launches y = phi(x), or y = x if phi is None; `x` is repeated along axes of size 1. `reason`: why x is copied."""
    step, kernel = int(x.shape[-1] > 1), FeatureMap(FEATURE_MAPS[phi], x.dtype, y.dtype)
    vectors = y.shape[-1] % kernel.PIECE == 0 and aligned16(y) and (not step or aligned16(x))
    kernel.launch(draft, x, y, step, int(vectors), reason)


# -- forward on Hopper -------------------------------------------------------------------------------------------------
def plan_gla(draft, gla, device, reason, summaries=()):
    """A plan of gla with a gate [B, H, T, 1], as `segments.scalar_forward_cut` says; `draft` makes the copies of the
    gate for every channel, for which `reason` is what `explain` prints."""
    cut = segments.scalar_forward_cut(gla, device)
    if shares_heads(gla) and not isinstance(cut.kernel, WeightedSums):
        return plan_gla(draft, with_all_heads(draft, gla), device, reason, summaries)
    if gla.dtype == DOUBLE and gla.mode != "staged":
        return float64.plan(gla, device)
    if cut.way == COPIED:
        return aligned_copies.plan_on_copies(gla, lambda copies: plan_gla(draft, copies, device, reason), keep="g")
    if cut.way == PORTABLE:
        return gated.plan(with_gate_of_every_channel(draft, gla, reason), device)
    gla_draft = Draft()
    o = gla_draft.output(gla, cut.fits)
    return scalar_forward_pass(gla_draft, gla, cut, o).plan(gla_draft.final(gla), summaries)


def scalar_forward_pass(draft, gla, cut, o) -> ForwardPass:
    """The forward pass by the Hopper kernel that `cut`, a `segments.ForwardCut`, has chosen."""
    forward_pass = SumsForward if isinstance(cut.kernel, WeightedSums) else ScalarHopperForward
    if forward_pass is ScalarHopperForward:
        gla = with_float32_gate(draft, gla)
    arrays = *(draft.mapped(gla[name], name, cut.fits) for name in "qkv"), gla["g"]
    return forward_pass(draft, gla, cut, arrays, o)


class ScalarHopperForward(HopperForward):
    """The forward pass by Hopper's kernel for gates of every channel, which here reads one float32 gate per token and
    head: `scalar_gate`. Its arguments for a gate of every channel are not read, and get k."""

    def inputs_of(self, kernel):
        return super().inputs_of(kernel) | {
            "g": TensorMap(self.k, kernel.BK, kernel.CHUNK, swizzled=False),
            "g_rows": self.k,
            "scalar_gate": self.g,
        }


class SumsForward(ForwardPass):
    """The forward pass by `WeightedSums`: o is a sum of values weighted by decayed products of queries with keys."""

    def launch_outputs(self, spans, initial, final):
        self.launch(self.cut.kernel, spans, initial, final)

    def launch_summaries(self, parts, summaries, segments, computed):
        states, decays = summaries
        self.launch(self.cut.summary, self.finer_spans(parts), None, states, decays, segments * parts, computed * parts)

    def launch(self, kernel, spans, initial, final, *segment_args):
        """Launches the sum of o; `segment_args`: the last parameters of `launch_sums`, for summaries."""
        arrays, shape = (self.q, self.k, self.v, self.o), self.draft.shape(self.problem, spans)
        sums = [weighted_sum(arrays, initial, final, output_scale=self.problem.scale)]
        launch_sums(self.draft, self.problem, kernel, sums, self.g, shape, self.problem.sizes["V"], *segment_args)


def weighted_sum(
    arrays,
    initial,
    final,
    *,
    output_scale=1.0,
    value_scale=1.0,
    partner=None,
    transposed=False,
    backwards=False,
    adds=False,
):
    """The members of the kernels' C++ struct `WeightedSum`: o = a sum of v weighted by decayed products of q with k.

    arrays : those that the kernel reads as q, k and v and writes as o
    initial, final : the states before and after all tokens of each sequence or segment, or None
    output_scale : the factor of o
    value_scale : the factor of what a token adds to the state
    partner : the array whose gradient o is, if the gate's gradient is computed as well
    transposed : whether the state's memory is [V, K] for the K channels of k and the V columns of v
    backwards : whether the sum runs from the last token to the first
    adds : whether the sum is added to what o holds, which is the sum of other tiles
    """
    read = dict(zip("qkv", arrays)) | {"partner": partner or arrays[2]}
    named, H = read | {"o": arrays[3]}, arrays[3].shape[1]
    K, V = named["k"].shape[-1], named["v"].shape[-1]
    return {
        **{name: TensorMap(x, PANEL, WeightedSums.CHUNK, swizzled=True) for name, x in named.items()},
        **{f"{name}_rows": x for name, x in named.items()},
        **{"initial": initial, "final": final, "output_scale": output_scale, "value_scale": value_scale},
        **{"backwards": backwards, "adds_to_o": adds},
        **{f"{name}_group": H // max(1, x.shape[1]) for name, x in read.items()},
        **{"K": K, "V": V, "state_k": 1 if transposed else V, "state_v": K if transposed else 1},
    }


def launch_sums(draft, problem, kernel, sums, g, shape, columns, decays=None, segments=1, computed=1, **gate_arrays):
    """Launches `kernel` for the given `sums`, which have at most so many `columns`.

    decays : where the products of the segments' decays are written, or None
    segments, computed : each sequence has so many segments in `shape`, of which the first `computed` are computed
    gate_arrays : those of `arrays_for_gate`, if the gate's gradient is wanted
    """
    blocks = problem.sizes["B"] * shape.row_sequences * problem.sizes["H"] * ceil_div(columns, kernel.BV) * len(sums)
    gate_arrays = {"dq_tiles": 0} | gate_arrays
    draft.launch(
        kernel, blocks, sums=sums, g=g, shape=shape, decays=decays, segments=segments, computed=computed, **gate_arrays
    )


# -- backward on Hopper ------------------------------------------------------------------------------------------------
# Each gradient is a weighted sum (see `weighted_sum`) of these arrays in the places of q, k and v.
SUMS = {"dq": ("do_", "v", "k"), "dk": ("v", "do_", "q"), "dv": ("k", "q", "do_")}


def plan_gla_vjp(draft, gla, device, do, dht, reason, summaries=(), wants_dg=True):
    """A plan of the pullback of gla with a gate [B, H, T, 1]; `draft` and `reason` are as in `plan_gla`.

    Its dg is [B, H, T] in the dtype in which the kernels read g, or [B, H, T, C] in float32, whose last axis is to be
    summed, or None if tokens share the gate. `wants_dg`: whether the caller wants it.
    """
    cut = segments.scalar_backward_cut(gla, device, do, bool(summaries))
    if shares_heads(gla) and cut.way not in (HOPPER, TILED):
        return plan_gla_vjp(draft, with_all_heads(draft, gla), device, do, dht, reason, summaries, wants_dg)
    if gla.dtype == DOUBLE:
        return float64.plan_vjp(gla, device, do, dht)
    if cut.way == COPIED:

        def plan_of_copies(copies, do, dht):
            return plan_gla_vjp(draft, copies, device, do, dht, reason, wants_dg=wants_dg)

        return aligned_copies.plan_on_copies(gla, plan_of_copies, do, dht, keep="g")
    if cut.way == PORTABLE:
        spread = with_gate_of_every_channel(draft, gla, reason)
        return gated_backward.plan_vjp(spread, device, do, dht, sums_dg=wants_dg)
    gla_draft = Draft()
    if cut.way == TILED or cut.kernels[0].gate == FLOAT32:
        gla = with_float32_gate(gla_draft, gla)
    inputs = *(gla_draft.mapped(gla[name], name) for name in "qkv"), gla["g"]
    do, dht = gla_draft.cotangents(gla, do, dht)
    (B, H), dh0 = gla.shape("B H"), gla_draft.gradient_of_state(gla)
    gradients = (*(gla_draft.like(x, shape=(B, H, *x.shape[2:])) for x in inputs[:3]), None)
    backward = gated_backward.GatedBackwardPass(gla, inputs, do, gradients, dht, dh0, summaries=summaries)
    if cut.way == TILED:
        dg, tiles = launch_sums_tile_by_tile(gla_draft, backward, device)
    else:
        dg, tiles = launch_gradient_sums(gla_draft, backward, cut)
    return gla_draft.plan(((*gradients[:3], dg), gla_draft.stored_gradient(gla, dh0)), tiles=tiles)


def launch_sums_tile_by_tile(draft, backward, device):
    """Launches the kernels for one tile of the state after the other, as `gated_backward.launch_tile_by_tile` does.
    Returns (the gate's gradient, or None if tokens share the gate; the tile sizes of the first tile's kernels)."""
    draft_of_tiles, tiles, sizes = DraftOfTiles(draft), tiles_of(backward.problem), []
    shape, own_gates = backward.problem.shape("B H T"), segments.has_own_gates(backward.problem)
    dg_of_tiles = draft.empty((len(tiles), *shape), FLOAT32) if own_gates else None
    for n, tile in enumerate(tiles):
        tile_draft = draft_of_tiles.next_tile()
        tile_pass = backward.of_tile(tile, tile_draft)
        cut = segments.sums_backward_cut(tile_pass.problem, device, one_part=own_gates)
        sizes.append(launch_gradient_sums(tile_draft, tile_pass, cut, dg=dg_of_tiles and dg_of_tiles[n])[1])
        if backward.dh0 is not None:
            draft.copy(tile_pass.dh0, tile.state(backward.dh0))
    if dg_of_tiles is None:
        return None, sizes[0] | {"tiles": len(tiles)}
    dg = draft.empty(shape, FLOAT32)
    sum_arrays(draft, dg_of_tiles, dg)
    return dg, sizes[0] | {"tiles": len(tiles)}


def launch_gradient_sums(draft, backward, cut, dg=None):
    """Launches `WeightedSums` for dq, dk and dv. Returns (the gate's gradient, or None if tokens share the gate; the
    tile sizes of the kernels).

    Either one launch computes all three sums, or a first launch computes dq and a second one dk and dv. If the gate's
    gradient is wanted there are two launches, and the second computes it from arrays that the first writes (see
    `arrays_for_gate`).

    `dg`: the array for the gate's gradient, if this pass is that of one tile of the state; else it is made here.
    """
    gla, read, written, summaries = backward.problem, backward.read, backward.written, backward.summaries
    (K, V), computes_dg = gla.shape("K V"), cut.kernels[0].gives_gate
    hopper = SumsBackward(draft, gla, cut.segments, WeightedSums.CHUNK, empty_ends=bool(summaries))
    read["do_"] = draft.mapped(backward.do, "do")
    mapped = {name: x for name, x in read.items() if name != "g"}
    initial, dht, P = hopper.initial, draft.aligned(backward.dht, "dht"), hopper.P
    if summaries:
        initial, dht = hopper.joined_saved_summaries(*summaries, dht)
    elif P > 1:
        initial, dht = hopper.joined_summaries(cut.summary, mapped, initial, dht, g=read["g"])
    sums, adds = [], {"dq": backward.adds, "dk": backward.adds, "dv": backward.adds_dv}
    for gradient, places in SUMS.items():
        arrays = *(read[name] for name in places), written[gradient]
        options = {"transposed": gradient != "dv", "adds": adds[gradient]}
        options["partner"] = read[gradient.removeprefix("d")] if computes_dg else None
        if gradient == "dq":
            sums.append(weighted_sum(arrays, initial, final=None, output_scale=gla.scale, **options))
        else:
            final, options["backwards"] = backward.dh0 if gradient == "dv" else None, True
            sums.append(weighted_sum(arrays, dht, final, value_scale=gla.scale, **options))
    gate_arrays = {}
    if computes_dg:
        gate_arrays = arrays_for_gate(draft, gla, hopper.shape, *cut.kernels) | ({"dg": dg} if dg else {})
    for kernel in cut.kernels:
        count, columns = SUMS_AT_ONCE[kernel.what], K if kernel.what.endswith("Queries") else max(K, V)
        launch_sums(draft, gla, kernel, sums[:count], read["g"], hopper.shape, columns, segments=P, **gate_arrays)
        sums = sums[count:]
    return gate_arrays.get("dg"), cut.kernels[-1].tiles | ({"segments": P} if P > 1 else {})


class SumsBackward(gated_backward.HopperBackward):
    """The segments of sequences in a pullback by `WeightedSums`."""

    def launch_summaries(self, kernel, mapped, initial, dht, states, decays, g):
        problem, V = self.problem, self.problem.sizes["V"]
        k, v, q, do = (mapped[name] for name in ("k", "v", "q", "do_"))
        sums = [  # without o, and without q for it: any arrays take their places
            weighted_sum((k, k, v, v), initial, states[0]),
            weighted_sum((q, q, do, do), dht, states[1], value_scale=problem.scale, backwards=True),
        ]
        launch_sums(
            self.draft, problem, kernel, sums, g, self.shape, V, decays=decays, segments=self.P, computed=self.P - 1
        )


def arrays_for_gate(draft, gla, shape, dq_kernel, dk_dv_kernel):
    """The arrays for the gate's gradient dg, by argument. The kernel of dq writes `stretch_states`, a state of every
    STRETCH tokens, and `token_sums`, one sum per token for each of its `dq_tiles` tiles of K. From these the kernel of
    dk and dv computes dg: [B, H, T], or [B, H, T, tiles] if K takes several of its tiles."""
    B, H, T, K = gla.shape("B H T K")
    states = T // dq_kernel.STRETCH + shape.row_sequences
    dq_tiles, tiles = ceil_div(K, dq_kernel.BV), ceil_div(K, dk_dv_kernel.BV)
    assert dq_kernel.BK == dk_dv_kernel.BK >= K, "both kernels address states [BK, BK], and sums of BK / 64 tiles"
    return {
        "stretch_states": draft.empty((B, H, states, dq_kernel.BK, dq_kernel.BK), BFLOAT16),
        "token_sums": draft.empty((B, H, dq_tiles, T), FLOAT32),
        "dg": draft.empty((B, H, T), dk_dv_kernel.gate) if tiles == 1 else draft.empty((B, H, T, tiles), FLOAT32),
        "dq_tiles": dq_tiles,
    }
