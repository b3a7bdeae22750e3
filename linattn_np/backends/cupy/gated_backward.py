"""Gradients of the gated family: o_t = scale q_t S_t of a state S_t [K, V] that decays channel by channel.

On every card: one kernel stores the state at every chunk's start and the state's gradient at every chunk's end; then
all chunks are computed in parallel, dq, dk and dg by one kernel and dv by another. On Hopper: one kernel goes forwards
in time and computes dq and du, another goes backwards in time and computes the rest. If the state is larger than a
block's tile, the two kernels are launched for one tile after the other.

Sequences may be cut into P segments. A segment's summary forwards in time is its final state if its initial state is 0,
and the product of its decays. Its summary backwards in time is the gradient of its initial state if that of its final
state is 0, and the same product. From the summaries a scan computes the states at the segments' starts and the states'
gradients at their ends.

Sizes: B batch, N sequences, H heads, T tokens, K channels, V columns. dht and dh0 are the gradients of the final and of
the initial state.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...problem import Problem
from . import aligned_copies, segments
from .arithmetic import ceil_div
from .backward_tiles import DraftOfTiles, StateTile, tiles_of
from .elementwise_kernels import sum_arrays
from .gated_forward import HopperForward
from .gated_kernels import TILES, GatedBackwardSegmentsSm90, ScanBothWays, columns_of_decays, read_order
from .plan import FLOAT32, Array, Draft, TensorMap, aligned16, common_bytes
from .rank_summary import RankSummary
from .segments import COPIED, HOPPER, PORTABLE, SHORT, SMALL, TILED

STATE_BYTES = 1 << 27  # the states and gradients of so many bytes may be stored at a time, however small the inputs are


def plan_vjp(problem, device, do, dht, saved=None, summaries=(), sums_dg=False):
    """The plan of the pullback: (gradients in the order of the arrays, the initial state's gradient or None).

    saved : what the plan of the forward pass has saved: (the states at the segments' starts,) or (). If these were not
        saved because the problem had no `gradient`, they are computed again in the same way, so that the gradients have
        the same bits. None: forward passes of such problems never save them
    summaries : those that a plan of `plan_summary_vjp` has saved for the same `do`
    sums_dg : whether dg is then summed over the channels, which share a gate; `segments.backward_cut` says what that
        changes
    """

    def plan_of_copies(copied_problem, do, dht):
        return plan_vjp(copied_problem, device, do, dht, sums_dg=sums_dg)

    cut = segments.backward_cut(problem, device, do, sums_dg, saved, bool(summaries))
    if cut.way == COPIED:
        return aligned_copies.plan_on_copies(problem, plan_of_copies, do, dht)
    draft, bonus = Draft(), problem.arrays.get("u")
    inputs = draft.mapped_inputs(problem) if cut.way in (HOPPER, TILED) else draft.inputs(problem)
    do, dht = draft.cotangents(problem, do, dht)
    gradients, dh0 = tuple(map(draft.like, inputs)), draft.gradient_of_state(problem)
    starts = saved[0] if saved else None
    if cut.forward is not None:  # the forward pass that computes these states again
        # inputs[2] is v, in the place of o, which has its shape and dtype: this pass writes its own o, or none
        starts = HopperForward(draft, problem, cut.forward, inputs, inputs[2]).starts_of_backward_segments()
    backward = GatedBackwardPass(problem, inputs, do, gradients, dht, dh0, summaries=summaries, starts=starts)
    tiles, partial_du = LAUNCH_OF_WAY[cut.way](draft, backward, cut)
    if bonus is not None:
        gradients = (*gradients, draft.empty(bonus.shape, bonus.dtype))
        sum_arrays(draft, partial_du, gradients[-1])
    return draft.plan((gradients, draft.stored_gradient(problem, dh0)), tiles=tiles)


def plan_summary_vjp(problem, device, do, saved=()):
    """A plan of ((the initial state's gradient for dht = 0,), the product of all decays [N, H, K]). Both results are in
    one buffer, so that a rank can send them to the others at once.

    The plan saves the segments' summaries for `plan_vjp`. None where computing all gradients takes no longer. `saved`
    is as in `plan_vjp`; if it has states, only the summaries backwards in time are computed.
    """
    if segments.backward_way(problem, device) != HOPPER:
        return None
    draft, (K, V), P = Draft(), problem.shape("K V"), segments.segments_of_pullback(problem, device).count
    read = dict(zip("qkvg", draft.mapped_inputs(problem), strict=True))
    read["do_"] = draft.mapped(draft.cotangents(problem, do)[0], "do")
    kernel = GatedBackwardSegmentsSm90.fitting(read_order(problem.op), problem.dtype, read["g"].dtype, K, V)
    launches = HopperBackward(draft, problem, P, kernel.CHUNK, empty_ends=True)
    return launches.summary_plan(kernel, read, K, only_backwards=int(bool(saved) or P == 1), only_first=0)


@dataclass(frozen=True)
class GatedBackwardPass:
    """The arrays that a backward pass reads and writes, for a whole problem or for one tile of the state."""

    problem: Problem
    inputs: tuple[Array, ...]  # q, k, v, g, and the columns' gates gv if columns have gates, too
    do: Array
    gradients: tuple[Array | None, ...]  # those of `inputs`
    dht: Array | None  # the gradient of the final state
    dh0: Array | None  # the memory for the gradient of the initial state
    adds: bool = False  # whether kernels add to dq, dk and dg, which then hold the terms of other tiles' columns
    adds_dv: bool = False  # whether kernels add to dv, which then holds the terms of other tiles' channels
    # Of Hopper's own kernels: the summaries of segments that the plan of `HopperBackward.summary_plan` has saved; the
    # states at the starts of equal segments, if they are known
    summaries: tuple[Array, ...] = ()
    starts: Array | None = None

    @property
    def read(self) -> dict[str, Array]:
        """The arrays that kernels read, by the names of their arguments."""
        return dict(zip(("q", "k", "v", "g", "gv"), self.inputs)) | {"do_": self.do}

    @property
    def written(self) -> dict[str, Array | None]:
        """The gradients that kernels write, by the names of their arguments."""
        return dict(zip(("dq", "dk", "dv", "dg", "dgv"), self.gradients))

    def of_tile(self, tile: StateTile, draft, u=None) -> GatedBackwardPass:
        """The pass of one tile of the state, with the tile's channels and columns of all arrays. `u`: the bonus of the
        tile's channels. The tile's dht is a copy and its dh0 is new memory, since kernels need them contiguous."""
        problem = tile.problem(self.problem, **({} if u is None else {"u": u}))
        inputs = tuple(tile.part(x, axis) for x, axis in zip(self.inputs, "KKVK", strict=True))
        gradients = tuple(tile.part(x, axis) for x, axis in zip(self.gradients, "KKVK", strict=True))
        dht, dh0 = draft.as_contiguous(tile.state(self.dht), "dht"), draft.gradient_of_state(problem)
        return GatedBackwardPass(problem, inputs, tile.part(self.do, "V"), gradients, dht, dh0, tile.adds, tile.adds_dv)


# -- on every card -----------------------------------------------------------------------------------------------------
def launch_portable(draft, backward, cut):
    """Launches the kernels that run on every card; returns (their tile sizes, du of each chunk or None).

    For a group of heads at a time, kernel `states` stores the states and their gradients between chunks; `channels`
    (for dq, dk, dg and du) and `values` (for dv) then compute the gradients of all chunks of these heads.
    """
    problem, read, P, (dq, dk, dv, dg) = backward.problem, backward.read, cut.segments, backward.gradients
    B, N, H, K, V = problem.shape("B N H K V")
    states, (channels, values) = cut.summary, cut.kernels
    shape = draft.shape(problem, problem.spans.segments(P, states.CHUNK) if P > 1 else None, states.CHUNK)
    u, initial, dht = draft.bonus(problem), draft.initial(problem), backward.dht
    assert not shape.all_chunks or aligned16(*read.values(), *backward.gradients)  # others are copied: `backward_cut`
    common = {"shape": shape, "scale": problem.scale}
    partial_du = None if u is None else draft.empty((B * shape.NC, H, K), FLOAT32)
    blocks = P * N * states.blocks(K, V)  # per head

    if P > 1:
        args = read | common | {"P": P, "first": 0, "heads": H}
        initial, dht = joined_summaries(draft, problem, P, states, H * blocks, initial, dht, **args)
    tiles = ceil_div(K, states.TILE) * ceil_div(V, states.TILE)
    elements_per_head = 2 * B * shape.NC * tiles * states.TILE**2
    group = heads_at_once(H, elements_per_head * states.stored.itemsize, sum(x.nbytes for x in backward.inputs))
    # at least one number, as the kernel computes summaries instead if `chunk_states` is null
    chunk_states = draft.empty((max(1, group * elements_per_head),), states.stored)
    all_zero = initial is None and dht is None and problem.spans.longest <= states.CHUNK
    if all_zero:
        draft.fill(chunk_states)
    for first in range(0, H, group):
        heads = min(group, H - first)
        chunks = B * shape.NC * heads
        group_args = common | {"chunk_states": chunk_states, "first": first, "heads": heads}
        if not all_zero:
            draft.launch(states, heads * blocks, **read, **group_args, P=P, initial=initial, dht=dht, dh0=backward.dh0)
        channel_arrays = {"dq": dq, "dk": dk, "dg": dg, "u": u, "partial_du": partial_du}
        draft.launch(channels, chunks * ceil_div(K, channels.TILE), **read, **group_args, **channel_arrays)
        without_v = {name: x for name, x in read.items() if name != "v"}
        draft.launch(values, chunks * ceil_div(V, values.BV), **without_v, **group_args, dv=dv, u=u)
    return states.tiles | ({"segments": P} if P > 1 else {}), partial_du


def heads_at_once(heads, bytes_of_a_head, input_bytes) -> int:
    """How many heads a group has, if groups are nearly equal and the stored states of a group take at most
    max(input_bytes, STATE_BYTES). `bytes_of_a_head`: the stored states of one head."""
    most = max(1, max(input_bytes, STATE_BYTES) // max(1, bytes_of_a_head))
    return max(1, ceil_div(heads, ceil_div(heads, most)) if heads else 1)


def launch_small(draft, backward, cut):
    """Launches the kernels for small heads, which run on every card; returns (their tile sizes, du of each segment or
    None)."""
    problem, read, written, P = backward.problem, backward.read, backward.written, cut.segments
    B, N, H, K, V = problem.shape("B N H K V")
    (main,), states = cut.kernels, cut.summary
    shape = draft.shape(problem, problem.spans.segments(P, main.CHUNK) if P > 1 else None, main.CHUNK)
    common = {"shape": shape, "scale": problem.scale, "bytes": common_bytes(*read.values(), *written.values())}
    starts, ends = draft.initial(problem), backward.dht
    if P > 1:
        args, blocks = read | common | {"segments": P, "computed": P, "both": True}, 2 * states.blocks(N * P * H)
        args["column_decays"] = draft.empty((2, N * P, H, V), FLOAT32) if "gv" in read else None
        starts, ends = joined_summaries(draft, problem, P, states, blocks, starts, ends, **args)
    partial_du = draft.empty((N * P, H, K), FLOAT32) if "u" in problem.arrays else None
    arrays = {"starts": starts, "ends": ends, "dh0": backward.dh0, "u": draft.bonus(problem), "partial_du": partial_du}
    arrays["step_states"] = draft.empty((B, shape.NC, H, main.D**2), FLOAT32)
    draft.launch(main, main.blocks(N * P * H), **read, **written, **common, **arrays, P=P)
    return main.tiles | ({"segments": P} if P > 1 else {}), partial_du


def launch_short(draft, backward, cut):
    """Launches the kernel for short sequences, which runs on every card; returns (its tile sizes, du of each sequence
    or None)."""
    problem, (kernel,) = backward.problem, cut.kernels
    N, H, K = problem.shape("N H K")
    partial_du = draft.empty((N, H, K), FLOAT32) if "u" in problem.arrays else None
    states = {"initial": draft.initial(problem), "dht": backward.dht, "dh0": backward.dh0}
    common = {"u": draft.bonus(problem), "partial_du": partial_du, "scale": problem.scale}
    draft.launch(kernel, N * H, **backward.read, **backward.written, **states, **common, shape=draft.shape(problem))
    return kernel.tiles, partial_du


def joined_summaries(draft, problem, P, kernel, blocks, initial, dht, /, **args):
    """Launches the summaries of P segments of each sequence by `blocks` blocks of `kernel`, and the scan that joins
    them. Returns (the states at the segments' starts, the states' gradients at their ends), both [N P, H, K, V].

    initial, dht : the initial states and the gradients of the final ones, or None
    args : the kernel's other arguments, which may include its own P
    """
    N, H, K, V = problem.shape("N H K V")
    columns = columns_of_decays(kernel, V)
    # of the first axis 0 is forwards in time, 1 backwards
    states = draft.empty((2, N * P, H, K, V), FLOAT32)
    decays = draft.empty((2, N * P, H, ceil_div(V, columns), K), FLOAT32)
    draft.launch(kernel, blocks, **args, initial=initial, dht=dht, states=states, decays=decays)
    if P > 2:  # in each direction the kernel has written what the first two segments need
        scan_both_ways(draft, problem, states, decays, P, columns=columns, column_decays=args.get("column_decays"))
    return states[0], states[1]


def scan_both_ways(draft, problem, states, decays, P, only_backwards=False, columns=None, column_decays=None):
    """Launches the scan of the summaries `states`, `decays` and maybe `column_decays` of P segments. In place of the
    first it writes to states[0] the state at each segment's start (not if `only_backwards`), and to states[1] the
    state's gradient at its end. So many neighbouring `columns` share `decays`: None for all."""
    N, H, K, V = problem.shape("N H K V")
    scan, sizes = ScanBothWays.fitting(K, V, P), {"N": N, "P": P, "H": H, "K": K, "V": V, "BV": columns or V}
    assert V % scan.COLUMNS == 0 and sizes["BV"] % scan.COLUMNS == 0  # as rows are whole pieces of 16 bytes
    sizes["only_backwards"] = only_backwards
    # `states` is overwritten
    summaries = {"states": states, "decays": decays, "column_decays": column_decays}
    draft.launch(scan, 2 * N * H * ceil_div(K * V, scan.COLUMNS * scan.threads), **summaries, **sizes)


# -- on Hopper ---------------------------------------------------------------------------------------------------------
def launch_hopper(draft, backward, cut):
    """Launches Hopper's two kernels; returns (their tile sizes, du of each segment or None).

    The first kernel writes its terms of dg to `query_share` and stores states in `checkpoints`; the second reads both.
    """
    problem, read, (dq, dk, dv, dg) = backward.problem, backward.read, backward.gradients
    summaries, starts = backward.summaries, backward.starts
    B, N, H, T, K, V = problem.shape("B N H T K V")
    # The second kernel reads a chunk of query_share before it writes dg there, so they share memory; not if it adds to
    # the terms of other tiles that dg then holds
    query_share, (queries, keys), short = draft.like(dg) if backward.adds else dg, cut.kernels, cut.short
    launches = HopperBackward(draft, problem, cut.segments, keys.CHUNK, empty_ends=bool(summaries), short=short)
    P = launches.P
    du = draft.empty((N * P, H, K), FLOAT32) if "u" in problem.arrays else None
    read["do_"], initial, dht = draft.mapped(backward.do, "do"), launches.initial, draft.aligned(backward.dht, "dht")
    u, ends = draft.bonus(problem), draft.empty((N * P, H, K), FLOAT32)
    # From the first kernel to the second: `ends`, [N P, H, K], sum_v (the state at a segment's end) dht; query_sums, a
    # row of K sums and of flags for each chunk, at most so many; checkpoints (backward_keys.cu describes all)
    query_sums = draft.empty((B, H, T // keys.CHUNK + launches.shape.row_sequences, K + keys.FLAGS), FLOAT32)
    checkpoints = draft.empty((B, H, T // keys.CHECKPOINT_EVERY + 1, keys.BK, keys.BV), FLOAT32)
    if summaries:
        initial, dht = launches.joined_saved_summaries(*summaries, dht, starts)
    elif P > 1:
        # short: a block computes two of the three segments as one (`joined`), so each direction needs one summary
        args = {"only_backwards": int(starts is not None), "only_first": int(short > 0)}
        initial, dht = launches.joined_summaries(cut.summary, read, initial, dht, starts, **args)
    common = {"u": u, "dht": dht, "ends": ends, "query_sums": query_sums, "checkpoints": checkpoints, "P": P}
    common |= {"joined": int(short > 0), "adds": backward.adds}
    read |= {"query_share": query_share}
    launches.launch_mapped(queries, cut.blocks, read | {"dq": dq}, initial=initial, du=du, **common)
    common |= {"adds_dv": backward.adds_dv, "dh0": backward.dh0}
    launches.launch_mapped(keys, cut.blocks, read | {"dk": dk, "dv": dv, "dg": dg}, **common)
    return keys.tiles | ({"segments": P} if P > 1 else {}), du


def launch_tile_by_tile(draft, backward, cut):
    """Launches Hopper's kernels for one tile of the state after the other, all in the same memory. Returns (the tile
    sizes of the first tile's kernels, du of each tile of columns or None)."""
    problem = backward.problem
    (H, K, V), u, tiles = problem.shape("H K V"), problem.arrays.get("u"), tiles_of(problem)
    draft_of_tiles, sizes = DraftOfTiles(draft), []
    tile_segments = segments.BackwardSegments(cut.segments, cut.short)
    # a row for each range of columns, of which all but the last have TILES[-1]
    du = None if u is None else draft.empty((ceil_div(V, TILES[-1]), H, K), FLOAT32)
    bonus = {}  # first channel of a tile -> u of its channels
    if u is not None:
        first_columns = [tile for tile in tiles if not tile.adds]
        bonus = {tile.channels.start: draft.contiguous_copy(tile.part(u, "K"), FLOAT32) for tile in first_columns}
    for tile in tiles:
        tile_draft = draft_of_tiles.next_tile()
        tile_pass = backward.of_tile(tile, tile_draft, bonus.get(tile.channels.start))
        tile_cut = segments.hoppers_backward_cut(tile_pass.problem, cut.device, tile_segments, starts_known=False)
        tile_sizes, partial_du = launch_hopper(tile_draft, tile_pass, tile_cut)
        sizes.append(tile_sizes)
        if backward.dh0 is not None:
            draft.copy(tile_pass.dh0, tile.state(backward.dh0))
        if du is not None:
            sum_arrays(draft, partial_du, tile.part(du[tile.columns.start // TILES[-1]], "K"))
    return sizes[0] | {"tiles": len(tiles)}, du


class HopperBackward:
    """Adds launches of Hopper's backward kernels to a draft. `P`: the segments of a sequence, with the empty ones.

    empty_ends : whether a sequence has an empty segment before its P segments and another one after them. Summaries can
        then be computed before dht is known: `joined_saved_summaries` writes dht to the last two segments. The gradient
        of the initial state is that of the state at the end of the first segment
    short : 0 for P segments of equal length; else each sequence has three segments, and the first and the last of them
        have so many tokens
    """

    def __init__(self, draft, problem, P, chunk, empty_ends=False, short=0):
        self.draft, self.problem, self.short, self.P = draft, problem, short, 3 if short else P + 2 * empty_ends
        if short:
            spans = problem.spans.split_at_ends(short)
        elif empty_ends:
            spans = problem.spans.segments(P, chunk).with_empty_ends(P)
        else:
            spans = problem.spans.segments(P, chunk) if P > 1 else None
        self.shape = draft.shape(problem, spans)
        self.initial = draft.aligned(draft.initial(problem), "initial_state")

    def launch_mapped(self, kernel, blocks, mapped, **args):
        """Launches `blocks` blocks of a kernel. It gets each array of `mapped` (argument -> array) twice: as a tensor
        map, and as rows, for tokens that the boxes of the map do not cover."""
        maps = {name: TensorMap(x, 128 // x.dtype.itemsize, kernel.CHUNK, swizzled=True) for name, x in mapped.items()}
        rows = {f"{name.removesuffix('_')}_rows": x for name, x in mapped.items()}
        self.draft.launch(kernel, blocks, **maps, **rows, **args, shape=self.shape, scale=self.problem.scale)

    def joined_summaries(self, kernel, mapped, initial, dht, starts=None, **args):
        """Launches the summaries by `kernel` and their scan. Returns (the states at the segments' starts, or
        `starts` if given; the states' gradients at their ends)."""
        states, decays = self.segment_summaries(kernel, mapped, initial, dht, **args)
        if self.P > 2 and not self.short:  # else the kernel has written what the segments start from
            scan_both_ways(self.draft, self.problem, states, decays, self.P, starts is not None)
        return states[0] if starts is None else starts, states[1]

    def summary_plan(self, kernel, mapped, channels, **args):
        """The plan that `plan_summary_vjp` returns; the product of decays has `channels` channels."""
        draft, results = self.draft, RankSummary(self.draft, self.problem, channels)
        states, decays = self.segment_summaries(kernel, mapped, self.initial, dht=None, **args)
        joined = draft.empty(states.shape, states.dtype)
        draft.copy(states[1], joined[1])
        scan_both_ways(draft, self.problem, joined, decays, self.P, only_backwards=True)
        # index 0: the first, empty segment, at whose end the state's gradient is the initial state's
        return draft.plan(results.finish(decays[1][:, 1:], joined[1][:, 0]), saved=(states, decays))

    def joined_saved_summaries(self, states, decays, dht, starts=None):
        """What `joined_summaries` returns, from the summaries that the plan of `summary_plan` has saved. These are left
        unchanged for another pullback. `starts`, if given, has no states for the two empty segments."""
        draft, states_known = self.draft, starts is not None or self.P == 3
        joined = draft.empty(states.shape, states.dtype)
        draft.copy(states[1], joined[1])
        if dht is not None:  # the state after the last segment with tokens is the one after the empty segment, too
            for segment in (self.P - 2, self.P - 1):
                draft.copy(dht, joined[1][:, segment])
        if states_known:
            draft.fill(joined[0])  # kernels also read the states of empty segments; any finite numbers will do there
        if starts is not None:
            for n, first_start in enumerate(range(0, starts.shape[0], self.P - 2)):
                draft.copy(starts[first_start : first_start + self.P - 2], joined[0][n, 1:-1])
        elif not states_known:
            draft.copy(states[0], joined[0])
        elif self.initial is not None:  # P is 3: one segment has tokens, between two empty ones
            draft.copy(self.initial, joined[0][:, 1])
        scan_both_ways(draft, self.problem, joined, decays, self.P, states_known)
        return joined[0], joined[1]

    def segment_summaries(self, kernel, mapped, initial, dht, **args):
        """Launches the summaries forwards (index 0) and backwards (index 1) in time: (states [2, N, P, H, K, V], decays
        [2, N, P, H, 1, K])."""
        draft, P = self.draft, self.P
        N, H, K, V = self.problem.shape("N H K V")
        states, decays = draft.empty((2, N, P, H, K, V), FLOAT32), draft.empty((2, N, P, H, 1, K), FLOAT32)
        self.launch_summaries(kernel, mapped, initial, dht, states, decays, **args)
        return states, decays

    def launch_summaries(self, kernel, mapped, initial, dht, states, decays, **args):
        """Launches `kernel` for the arguments of `segment_summaries`, and its results."""
        N, H, K = self.problem.shape("N H K")
        arrays = {"initial": initial, "dht": dht, "states": states, "decays": decays}
        self.launch_mapped(kernel, 2 * self.P * N * H * ceil_div(K, kernel.BK), mapped, **arrays, P=self.P, **args)


# Of every way but COPIED
LAUNCH_OF_WAY = {
    HOPPER: launch_hopper,
    TILED: launch_tile_by_tile,
    SMALL: launch_small,
    SHORT: launch_short,
    PORTABLE: launch_portable,
}
