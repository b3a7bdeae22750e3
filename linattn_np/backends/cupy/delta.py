"""The planner of the delta rules, which erase what the state holds for a token's key before they write the token.

A call is planned by the first of `FORWARD_WAYS` whose `why_not` gives no reason, its gradients by the first of
`GRADIENT_WAYS`; `explain` shows the reasons against the ways before it. In chunks, a first kernel prepares all chunks
in parallel, and a *walk* goes from chunk to chunk; `delta_segments` says how walks are cut into segments.

Sizes: B batch, H heads of values, T tokens, K channels, V columns, NC chunks. `group` heads of values share a head of
keys.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from .aligned_copies import plan_on_copies
from .arithmetic import ceil_div, padded
from .delta_hopper import (
    ScalarCut,
    ScalarGradientCut,
    ScalarGradientsOnHopper,
    ScalarOnHopper,
    Way,
    why_never_on_hopper,
    why_no_chunks,
    why_not_on_hopper,
)
from .delta_kernels import (
    DPLR,
    GATED_DELTA,
    KDA,
    SHARING,
    DeltaBackwardChunks,
    DeltaRecurrentBackward,
    DplrBackwardChunks,
    KdaBackwardChunks,
    sum_parts,
)
from .delta_segments import (
    CutByToken,
    CutInChunks,
    CutOfSmallHeads,
    are_few_tokens,
    chunk_kernels,
    gate_dtype,
    instance_of,
    launch_by_token,
    launch_reading,
    rows_of,
    rule_of,
    shape_of_F,
)
from .elementwise_kernels import sum_arrays
from .gated_backward import heads_at_once
from .gated_kernels import CHANNELS, SMALL_SIZES, TILES, channels
from .kernel import FLOATS, Kernel, no_kernels
from .plan import FLOAT32, Draft, aligned16, common_bytes

KERNEL_NAMES = {"r": "q", "w": "g"}  # an operator's name of an array -> the kernels' name, where they differ
KEY_ARRAYS = ("q", "k", "a", "b")  # the kernels' names of arrays with the heads of keys; others have those of values
BYTES = np.dtype(np.uint8)
COPY_TIME = 1e-6  # microseconds to copy a byte to a padded row
# What passes between kernels may take so many bytes, however small the inputs are: 256 channels and columns token by
# token, and chunks of few channels and columns, need up to 64 times the inputs, and few heads leave a card idle.
FREE_BYTES = 1 << 30
IN_CHUNKS = "in chunks"  # the name of this way in explanations


def unsupported(problem) -> str | None:
    """Why the kernels cannot compute a problem; None when they can."""
    if problem.sizes["K"] > CHANNELS[-1]:
        return f"K={problem.sizes['K']} is over {CHANNELS[-1]}"
    return no_kernels(problem.dtype, FLOATS)


def why_not_in_chunks(problem, device, gradient=False) -> str | None:
    """Why the portable kernels in chunks cannot compute a call, or its gradients if `gradient`; None if they can."""
    if reason := why_no_chunks(problem):
        return reason
    kernels = *chunk_kernels(problem, device, gradient), *([last_kernel(problem)] if gradient else ())
    if max(kernel.shared_bytes for kernel in kernels) > device.shared_per_block:
        return f"the card has no shared memory for {problem.sizes['K']} channels of {problem.dtype} in chunks"
    if problem.mode == "auto" and are_few_tokens(problem, gradient):
        return f"sequences of at most {problem.spans.longest} tokens take less time token by token"
    return None


def last_kernel(problem):
    """The last kernel of gradients in chunks, which computes those of all chunks in parallel."""
    instance = problem.dtype, gate_dtype(problem)
    if rule_of(problem.op) == GATED_DELTA:
        return DeltaBackwardChunks(*instance, channels(problem.sizes["K"]))
    return (DplrBackwardChunks if rule_of(problem.op) == DPLR else KdaBackwardChunks)(*instance)


def needs_copies(problem, device, gradient=False) -> bool:
    """Whether a call, or its pullback if `gradient`, is computed on copies whose rows are whole pieces of 16 bytes.

    Hopper's own way takes rows of whole pieces only, and copies arrays itself where their addresses are not such. The
    kernels of every card in chunks, and those of small heads, copy other rows number by number, and wait for each
    number. So do the kernels token by token, for numbers of two bytes.
    """
    rows = rows_of(problem)
    if aligned16(*rows) or not all(x.size for x in rows) or "final_state" in problem.options:
        return False
    if why_not_small(problem, device, gradient) is None:
        return False
    if why_not_small_on_copies(problem, device, gradient) is None:
        return True
    if (ScalarGradientsOnHopper(problem, device).why_not() if gradient else why_not_on_hopper(problem, device)) is None:
        return False
    return common_bytes(*rows) < 4 or why_not_in_chunks(problem, device, gradient) is None


def plan(problem, device):
    """The plan of a call."""
    if needs_copies(problem, device):
        return plan_on_copies(problem, lambda copies: plan(copies.replace(gradient=False), device))
    way, reasons = chosen(FORWARD_WAYS, problem, device)
    return replace(way.plan(), reasons=reasons)


def chosen(ways, problem, device):
    """(the first of the `ways` with no reason against it, for this call; the reasons against those before it, by
    name)."""
    reasons = {}
    for way in (way_class(problem, device) for way_class in ways):
        reason = way.why_not()
        if reason is None:
            return way, reasons
        reasons[way.name] = reason


class Inputs:
    """The arrays of a call, or of a step, as the kernels read them.

    names : {the kernels' name of an array: the operator's}
    arrays : {the kernels' name: the array}; a scalar per token and head is a row of length 1
    gate : the dtype of g and beta
    """

    def __init__(self, draft, problem):
        self.draft, self.problem, axes = draft, problem, problem.op.arrays
        self.names = {KERNEL_NAMES.get(name, name): name for name in axes}
        self.rule = rule_of(problem.op)
        self.group = max(1, problem.sizes["H"] // max(1, problem[next(iter(axes))].shape[1]))
        self.normalized = problem.options.get("qk_l2norm", False)
        self.arrays = {name: self.rows_of(name_in_call) for name, name_in_call in self.names.items()}
        self.gate = gate_dtype(problem)
        for name in ("g", "beta"):
            if name in self.arrays:
                self.arrays[name] = draft.cast(self.arrays[name], self.gate, f"{name}: in float32, as other gates")
        if "g" not in self.arrays:  # without gates, a log decay of 0 is broadcast to all tokens
            self.arrays["g"] = draft.table(np.zeros((1,) * self.arrays["beta"].ndim, self.gate))
        # In prompts of RWKV-7 models: what `DeltaDplrPrepare` reads and writes besides, with an axis of heads.
        self.logits = problem.options.get("logits", {})

    def rows_of(self, name):
        """The array that the call names so, with rows of K or V numbers, or of 1 for a scalar per token and head."""
        x, last = self.problem[name], self.problem.op.arrays[name].split()[-1]
        return self.draft.in_rows(x, name) if last in "KV" else x[..., None]

    def common_bytes(self, *more) -> int:
        """The most bytes that kernels may copy at a time of all rows, also of those of `more`."""
        copied = [x for name, x in self.arrays.items() if name != "beta" and (name != "g" or self.rule != GATED_DELTA)]
        return common_bytes(*copied, *more)

    def common_args(self, shape, *arrays) -> dict:
        """The arguments that all kernels of a call have; `arrays`: those that they read or write by rows besides the
        inputs."""
        args = {"group": self.group, "scale": self.problem.scale, "normalized": self.normalized, "shape": shape}
        return args | {"bytes": self.common_bytes(*arrays)}

    def heads_at_once(self, group_bytes, most) -> int:
        """How many heads of values are computed at a time, if what passes between kernels may take `most` times the
        inputs' memory, or FREE_BYTES. `group_bytes`: what it takes for those that share a head of keys."""
        groups, most_bytes = self.problem.sizes["H"] // self.group, most * sum(x.nbytes for x in self.arrays.values())
        return self.group * heads_at_once(groups, group_bytes, max(FREE_BYTES, most_bytes))

    def of_heads(self, first, heads) -> dict:
        """`arrays` for `heads` heads of values from head `first` on."""
        arrays = self.arrays | self.logits
        return {name: self.part_of(name, x, first, heads) for name, x in arrays.items()}

    def part_of(self, name, x, first, heads):
        """The part of an array x, which kernels name so, for these heads of values or for the heads of keys that these
        share."""
        if x.shape[1] == 1:
            return x
        sharing = self.group if name in KEY_ARRAYS else 1
        return x[:, first // sharing : (first + heads) // sharing]


# -- forward -----------------------------------------------------------------------------------------------------------
class TokenByToken(Way):
    """The way that can compute every call: one kernel, token by token."""

    name = "token by token"

    def plan(self):
        problem, draft = self.problem, Draft()
        inputs, o, final = Inputs(draft, problem), draft.output(problem), draft.final(problem)
        cut = CutByToken(problem, self.device, problem.sizes["H"])
        read = inputs.arrays | inputs.common_args(cut.shape(draft)) | {"initial": draft.initial(problem)}
        launch_by_token(draft, cut.forward, read | cut.launch_starts(draft, read), o=o, final=final)
        return draft.plan(draft.results(problem, o, final), mode="recurrent", tiles=cut.forward.tiles | cut.tiles)


SMALL_HEADS = "small heads"  # the name of this way in explanations
LONGEST_OF_SMALL = 1 << 17  # tokens of a sequence whose gradients are computed so
# This way is chosen if its estimate is less than such a part of that for chunks. {(whether Hopper's own kernels compute
# chunks, whether gradients are computed): the part}. Fitted to 62 calls on an H200 by estimates, of which the worst one
# takes 1.15 times as long as by the other way; but for forward calls by Hopper's own kernel, whose part is older.
WORTH_OF_SMALL = {(False, False): 1.15, (False, True): 0.72, (True, False): 0.7, (True, True): 0.98}


def why_not_small(problem, device, gradient=False):
    """Why the kernels of small heads are not taken for a call, or its gradients if `gradient`; None if they are."""
    if reason := why_not_small_on_copies(problem, device, gradient):
        return reason
    if common_bytes(*rows_of(problem)) < 4:
        return "rows are no whole pieces of 4 bytes, and others are waited for"
    return None


def why_not_small_on_copies(problem, device, gradient=False):
    """Why these kernels are not taken for a call on copies of its rows; None if they are."""
    if max(problem.shape("K V")) > SMALL_SIZES[-1]:
        return f"heads have more than {SMALL_SIZES[-1]} channels or columns"
    if reason := why_no_chunks(problem):
        return reason
    if gradient and problem.spans.longest > LONGEST_OF_SMALL:
        return f"a sequence has more than {LONGEST_OF_SMALL} tokens, which may have to be computed in one piece"
    cut = CutOfSmallHeads(problem, device, gradient)
    if cut.kernel.shared_bytes > device.shared_per_block:
        return f"the card has no shared memory for {cut.kernel.heads} heads of {problem.dtype}"
    worth = WORTH_OF_SMALL[not why_never_on_hopper(problem, device), gradient]
    if cut.time(cut.segments) > worth * time_in_chunks(problem, device, gradient):
        return "chunks are faster"
    return None


class SmallHeads(Way):
    """The way token by token for heads of at most 16 channels and columns, of which a warp computes several."""

    name = SMALL_HEADS

    def why_not(self):
        return why_not_small(self.problem, self.device)

    def plan(self):
        problem, draft, cut = self.problem, Draft(), CutOfSmallHeads(self.problem, self.device)
        inputs, o, final = Inputs(draft, problem), draft.output(problem), draft.final(problem)
        shape = draft.shape(problem, spans=cut.spans(1))
        read = inputs.arrays | inputs.common_args(shape, o) | {"initial": draft.initial(problem)}
        cut.launch(draft, read, o=o, final=final)
        return draft.plan(draft.results(problem, o, final), mode="recurrent", tiles=cut.kernel.tiles | cut.tiles)


def time_in_chunks(problem, device, gradient) -> float:
    """An estimate, in microseconds, for a call in chunks, or its gradients, and for the copies that it needs
    (`needs_copies`)."""
    copying = COPY_TIME * sum(x.nbytes for x in rows_of(problem) if not aligned16(x))
    if not why_never_on_hopper(problem, device):
        cut = (ScalarGradientCut if gradient else ScalarCut)(problem, device)
        return copying + cut.time(cut.segments)
    return copying + CutInChunks(problem, device, gradient).call_time


class InChunks(Way):
    """The way in chunks, on tensor cores of every card: for all data but float64, if shared memory has room for K.

    A call that has something to save computes all heads at a time, and its walk is that of gradients. Others take heads
    in groups, so that the prepared chunks take at most MOST times the inputs' memory, or FREE_BYTES.
    """

    MOST = 2  # 64 channels and columns need 1.7; groups of heads would leave multiprocessors without blocks
    name = IN_CHUNKS

    def why_not(self):
        return why_not_in_chunks(self.problem, self.device)

    def plan(self):
        problem, draft, keeps = self.problem, Draft(), bool(saved(self.problem, self.device))
        inputs, o, final = Inputs(draft, problem), draft.output(problem), draft.final(problem)
        cut, initial = CutInChunks(problem, self.device, gradient=keeps, kept=keeps), draft.initial(problem)
        H, shape, walk = problem.sizes["H"], cut.shape(draft), cut.walk_of("ONLY_FORWARDS") if keeps else cut.walk
        kept = {name: draft.empty(*array) for name, array in kept_arrays(problem, cut).items()} if keeps else {}
        head_bytes = shape.B * shape.NC * walk.prepared_bytes
        at_once = H if keeps else inputs.heads_at_once(inputs.group * head_bytes, self.MOST)
        prepared = kept["prepared"] if keeps else draft.empty((at_once * head_bytes,), BYTES)
        read = {"scale": problem.scale, "prepared": prepared, "bytes": inputs.common_bytes(o)}
        kept_by_walk = {name: x for name, x in kept.items() if name in ("chunk_states", "residual")}
        for first in range(0, H, at_once):
            heads = slice(first, min(H, first + at_once))
            part_shape = replace(shape, H=heads.stop - first)
            arrays = inputs.of_heads(first, part_shape.H)
            states = {name: None if x is None else x[:, heads] for name, x in (("initial", initial), ("final", final))}
            launch_prepare(draft, cut, part_shape, inputs, arrays, prepared)
            written = {"o": o[:, heads]} | kept_by_walk
            cut.launch_walk(draft, part_shape, read | {"v": arrays["v"]}, states, written, walk, kept.get("F"))
        results, tiles = draft.results(problem, o, final), walk.tiles | cut.tiles
        return draft.plan(results, mode="chunk", tiles=tiles, saved=tuple(kept.values()))


def launch_prepare(draft, cut, shape, inputs, arrays, prepared):
    """Launches the kernel that prepares chunks for walks. `arrays`: the inputs of the heads of `shape`."""
    # o = scale (W S + B v), prepared.cuh: for gradients W is stored times the scale. Other walks multiply o by it.
    w_scale = inputs.problem.scale if cut.prepare.gradient else 1.0
    read = arrays | inputs.common_args(shape)
    launch_reading(draft, cut.prepare, shape.all_chunks, read, w_scale=w_scale, prepared=prepared)


FORWARD_WAYS = (SmallHeads, ScalarOnHopper, InChunks, TokenByToken)


# -- gradients ---------------------------------------------------------------------------------------------------------
# A call keeps at most so many times its inputs' memory for its pullback, which then takes a third less time. KDA needs
# 1.9 to 2.6 for 64 to 128 channels and columns, RWKV-7 1.6 to 2, and F of short segments up to .4 more. The inputs of
# other rules are smaller.
KEPT = 3


def saved(problem, device) -> tuple[tuple, ...]:
    """(shape, dtype) of what a call keeps for its pullback: the prepared chunks, the states before them, the residuals,
    and F, if sequences are cut into segments. Calls of KDA and RWKV-7 keep them if K is at most 128, they and their
    pullback are in chunks, and no array is copied. Other calls keep nothing, and their pullback computes it again."""
    if not problem.gradient or rule_of(problem.op) == GATED_DELTA or problem.sizes["K"] > TILES[-1]:
        return ()
    ways = (chosen(ways, problem, device)[0] for ways in (FORWARD_WAYS, GRADIENT_WAYS))
    if any(way.name != IN_CHUNKS for way in ways) or needs_copies(problem, device):
        return ()
    cut = CutInChunks(problem, device, gradient=True, kept=True)
    if cut.walk_of("ONLY_FORWARDS").shared_bytes > device.shared_per_block:
        return ()  # of all walks, this has the most in shared memory, and 128 channels of it do not fit on every card
    arrays = tuple(kept_arrays(problem, cut).values())
    needed = sum(np.prod(shape) * dtype.itemsize for shape, dtype in arrays)
    return arrays if 0 < needed <= KEPT * sum(x.nbytes for x in problem.arrays.values()) else ()


def kept_arrays(problem, cut) -> dict[str, tuple]:
    """(shape, dtype) of what `saved` describes, in its order, by the argument of the walks."""
    (B, H, T, K, V, N), walk, P = problem.shape("B H T K V N"), cut.walk, cut.segments
    chunks, columns = int(problem.spans.chunk_bounds(walk.CHUNK)[-1]), walk.padded_columns(V)
    return {
        "prepared": ((B * H * chunks * walk.prepared_bytes,), BYTES),
        "chunk_states": ((B, H, chunks, walk.BK, columns), problem.dtype),
        "residual": ((B, H, T, walk.residual_numbers * columns), problem.dtype),
    } | ({"F": (shape_of_F(N * P, H, K), FLOAT32)} if P > 1 else {})


def plan_vjp(problem, device, do, dht, saved=()):
    """The plan of the pullback: (gradients in the order of the arrays, the initial state's gradient or None). `saved`:
    what the plan of the call has saved."""
    if needs_copies(problem, device, gradient=True):
        return plan_on_copies(problem, lambda copies, *given: plan_vjp(copies, device, *given), do, dht)
    way, reasons = chosen(GRADIENT_WAYS, problem, device)
    return replace(way.plan(do, dht, saved), reasons=reasons)


class Gradients(Way):
    """Plans a call's gradients; each subclass has one way to compute them.

    Heads are taken in groups, so that the arrays passed between kernels take at most MOST times the inputs' memory, or
    FREE_BYTES.
    `plan` sets these:

    inputs : the call's arrays as the kernels read them
    do : the gradient of o
    states : {"initial", "dht", "dh0"}: the initial state, the final state's gradient, the memory for dh0
    gradients : {the kernels' name of an input: the memory for its gradient}
    """

    dtype_of_scalars = FLOAT32  # of the gradients of gates and beta, one a token, as the last kernel writes them
    MOST = 6  # 128 channels and columns need 5.1 in chunks; groups of heads would leave multiprocessors without blocks
    kernel: Kernel  # the last kernel of a group, which computes most gradients
    tiles: dict  # the sizes that `explain` shows

    def __init__(self, problem, device):
        super().__init__(problem, device)
        self.draft = Draft()

    def bytes_between_kernels(self) -> int:
        """Bytes of the arrays passed between kernels, for the heads of values that share a head of keys."""
        raise NotImplementedError

    def launch(self, first, heads):
        """Adds to the draft the launches for `heads` heads of values from head `first` on."""
        raise NotImplementedError

    def plan(self, do, dht, saved):
        draft, problem, self.saved = self.draft, self.problem, saved
        self.inputs = Inputs(draft, problem)
        self.do, dht = draft.cotangents(problem, do, dht)
        self.states = {"initial": draft.initial(problem), "dht": dht, "dh0": draft.gradient_of_state(problem)}
        self.gradients = {name: draft.like(problem[in_call]) for name, in_call in self.inputs.names.items()}
        H = problem.sizes["H"]
        # What a call has saved is of all heads.
        heads = H if self.saved else self.inputs.heads_at_once(self.bytes_between_kernels(), self.MOST)
        for first in range(0, H, heads):
            self.launch(first, min(heads, H - first))
        results = tuple(self.gradients.values()), draft.stored_gradient(problem, self.states["dh0"])
        return draft.plan(results, tiles=self.tiles)

    def of_heads(self, first, heads):
        """(the parts of `states`, of do, and of dv) for `heads` heads of values from head `first` on."""

        def part(x):
            return None if x is None else x[:, first : first + heads]

        return {name: part(x) for name, x in self.states.items()}, part(self.do), part(self.gradients["v"])

    @property
    def has_parts(self) -> bool:
        """Whether the last kernel writes float32 terms of dq, [0], and dk, [1], which `DeltaSumParts` adds up."""
        return self.inputs.group > 1

    def launch_last(self, first, heads, args, launch):
        """Launches the last kernel by `launch`, a function of `args` and of the results that this adds to them, and
        then the sums and casts of what it writes."""
        draft, inputs, (B, T, K) = self.draft, self.inputs, self.problem.shape("B T K")
        parts = {"parts": draft.empty((2, B, heads, T, K), FLOAT32)} if self.has_parts else {}
        gradients = {name: inputs.part_of(name, x, first, heads) for name, x in self.gradients.items() if name != "v"}
        written = {}
        for name, x in gradients.items():
            dtype = self.dtype_of_scalars if x.ndim == 3 else inputs.gate if name == "g" else x.dtype
            written[name] = x if x.dtype == dtype else draft.empty(x.shape, dtype)
        launch(**args, **parts, **{f"d{name}": x if x.ndim == 4 else x[..., None] for name, x in written.items()})
        for part, name in enumerate("qk" if self.has_parts else ""):
            x = inputs.part_of(name, inputs.arrays[name], first, heads)
            sum_parts(draft, parts["parts"][part][None], gradients[name], x if inputs.normalized else None)
        for name, x in gradients.items():
            if written[name] is not x:
                draft.copy(written[name], x)


class SmallGradients(Gradients):
    """The gradients of heads of at most 16 channels and columns, token by token by one kernel, of which a warp has
    several heads. A walk forwards stores the state before every step of a few tokens, from which a walk backwards
    computes those between."""

    name = SMALL_HEADS

    def why_not(self):
        return why_not_small(self.problem, self.device, gradient=True)

    def plan(self, do, dht, saved):
        self.cut = CutOfSmallHeads(self.problem, self.device, gradient=True)
        self.kernel, self.tiles = self.cut.kernel, self.cut.kernel.tiles | self.cut.tiles
        return super().plan(do, dht, saved)

    @property
    def dtype_of_scalars(self):
        return self.inputs.gate

    def bytes_between_kernels(self):
        group, (B, T, K), kernel = self.inputs.group, self.problem.shape("B T K"), self.kernel
        parts = 2 * K if self.has_parts else 0
        return FLOAT32.itemsize * B * group * T * (kernel.D**2 // kernel.STEP + parts)

    def launch(self, first, heads):
        draft, problem, inputs, cut, kernel = self.draft, self.problem, self.inputs, self.cut, self.kernel
        arrays, (states, do, dv) = inputs.of_heads(first, heads), self.of_heads(first, heads)
        shape = replace(draft.shape(problem, spans=cut.spans(kernel.STEP), chunk=kernel.STEP), H=heads)
        rows = self.do, *(x for x in self.gradients.values() if x.ndim == 4)
        read = arrays | inputs.common_args(shape, *rows) | {"do_": do} | states
        step_states = draft.empty((shape.B, shape.NC, heads, kernel.D**2), FLOAT32)
        self.launch_last(first, heads, {"dv": dv, "step_states": step_states}, partial(cut.launch, draft, read))


class GradientsByToken(Gradients):
    """The gradients of any call, token by token backwards in time, from states that a forward walk stores. Sequences
    that are no longer than the distance of two such states need only their initial states."""

    name = TokenByToken.name

    @cached_property
    def kernel(self):
        """The kernel with the most tokens at a time that fits; if there are more blocks than multiprocessors, that of
        which two blocks fit on one."""
        (N, H, K, V), device = self.problem.shape("N H K V"), self.device
        instance = instance_of(self.problem)
        kernel = DeltaRecurrentBackward.fitting(*instance, K, device.shared_per_block)
        if N * H * ceil_div(V, kernel.BV) <= device.multiprocessors:
            return kernel
        return DeltaRecurrentBackward.fitting(*instance, K, min(device.shared_per_block, SHARING))

    def bytes_between_kernels(self):
        return self.kernel.bytes_between_kernels(self.problem, self.inputs.group, self.device.multiprocessors)

    def launch(self, first, heads):
        """Launches the forward walk, the backward walk, and the sums of what its blocks compute parts of."""
        draft, problem, inputs, kernel = self.draft, self.problem, self.inputs, self.kernel
        arrays, (states, do, dv) = inputs.of_heads(first, heads), self.of_heads(first, heads)
        B, T, K, V = problem.shape("B T K V")
        cut = CutByToken(problem, self.device, heads, kernel)
        self.tiles, shape = kernel.tiles | cut.tiles, cut.shape(draft)
        of_block = kernel.tiles_of_block(problem, self.device.multiprocessors)
        tiles, real = ceil_div(V, kernel.BV * of_block), problem.compute_dtype
        read = arrays | inputs.common_args(shape, self.do) | {"do_": do, "tiles": of_block} | states
        read |= cut.launch_starts(draft, read)
        kept = None
        if not kernel.holds(problem):
            kept = draft.empty((B, heads, shape.NC, V, padded(K, 4)), real)
            launch_by_token(draft, cut.forward, read, kept=kept)

        parts = draft.empty((len(kernel.channel_gradients), tiles, B, heads, T, K), real)
        token_parts = draft.empty((2, tiles, B, heads, T), real)
        launch_by_token(draft, kernel, read, dv=dv, kept=kept, parts=parts, token_parts=token_parts)
        for part, name in enumerate(kernel.channel_gradients):
            total = inputs.part_of(name, self.gradients[name], first, heads)
            sum_parts(draft, parts[part], total, arrays[name] if inputs.normalized and name in "qk" else None)
        for part, name in enumerate(("beta", "g")):
            if name in self.gradients and name not in kernel.channel_gradients:
                total = draft.empty((B, heads, T), real)
                sum_arrays(draft, token_parts[part], total)
                draft.copy(total, self.gradients[name][:, first : first + heads])


# `walk` is the kernel of the walk, `prepare` that of the chunks; `prepared` is the memory that one writes and the other
# reads.
class GradientsInChunks(Gradients):
    """The gradients in chunks.

    A first kernel prepares all chunks in parallel. A second one walks from chunk to chunk in both directions; it stores
    the states, each token's residual (v minus what its key reads) and its gradient, and dv. A last kernel computes the
    other gradients of all chunks in parallel.
    """

    name = IN_CHUNKS

    def why_not(self):
        return why_not_in_chunks(self.problem, self.device, gradient=True)

    @property
    def has_parts(self) -> bool:
        """As in `Gradients`. A block of KDA's last kernel has 64 channels, so that it cannot compute the pullback of
        dividing q and k by their lengths: `DeltaSumParts` does."""
        return self.inputs.group > 1 or self.inputs.rule == KDA and self.inputs.normalized

    def plan(self, do, dht, saved):
        problem, device = self.problem, self.device
        self.kernel, self.cut = last_kernel(problem), CutInChunks(problem, device, gradient=True, kept=bool(saved))
        self.walk, self.tiles = self.cut.walk, self.kernel.tiles | self.cut.tiles
        return super().plan(do, dht, saved)

    def bytes_between_kernels(self):
        group, (B, T, K) = self.inputs.group, self.problem.shape("B T K")
        parts = 2 * FLOAT32.itemsize * B * group * T * K if self.has_parts else 0
        return self.walk.bytes_between_kernels(self.problem, group) + parts

    def launch(self, first, heads):
        draft, problem, inputs, walk = self.draft, self.problem, self.inputs, self.walk
        arrays, (states, do, dv) = inputs.of_heads(first, heads), self.of_heads(first, heads)
        B, T, K, V = problem.shape("B T K V")
        shape = replace(self.cut.shape(draft), H=heads)
        columns = walk.padded_columns(V)
        dresidual = draft.empty((B, heads, T, columns), problem.dtype)
        args = inputs.common_args(shape, self.do, *(x for x in self.gradients.values() if x.ndim == 4))
        read = {"do_": do} | {name: args[name] for name in ("scale", "bytes")}
        written = {"dresidual": dresidual, "dv": dv}
        if self.saved:
            kept = dict(zip(kept_arrays(problem, self.cut), self.saved, strict=True))
            chunk_states, residual, F = kept["chunk_states"], kept["residual"], kept.get("F")
            state_gradients = draft.empty(chunk_states.shape, problem.dtype)
            del states["initial"]  # the walk backwards in time reads the saved states
            written |= {"state_gradients": state_gradients}
            read, backwards = read | {"prepared": kept["prepared"]}, self.cut.walk_of("ONLY_BACKWARDS")
            self.cut.launch_walk(draft, shape, read, states, written, backwards, F)
        else:
            prepared = draft.empty((shape.all_chunks * walk.prepared_bytes,), BYTES)
            chunk_states, state_gradients = draft.empty((2, B, heads, shape.NC, walk.BK, columns), problem.dtype)
            residual = draft.empty((B, heads, T, walk.residual_numbers * columns), problem.dtype)
            launch_prepare(draft, self.cut, shape, inputs, arrays, prepared)
            read |= {"v": arrays["v"], "prepared": prepared}
            written |= {"chunk_states": chunk_states, "state_gradients": state_gradients, "residual": residual}
            self.cut.launch_walk(draft, shape, read, states, written)
        blocks = self.kernel.blocks(B * heads * shape.NC, K)
        launch = partial(launch_reading, draft, self.kernel, blocks, args | arrays | {"do_": do})
        states_of_chunks = {"chunk_states": chunk_states, "state_gradients": state_gradients}
        self.launch_last(first, heads, states_of_chunks | {"residual": residual, "dresidual": dresidual}, launch)


GRADIENT_WAYS = (SmallGradients, ScalarGradientsOnHopper, GradientsInChunks, GradientsByToken)  # the fastest first
