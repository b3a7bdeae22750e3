"""Softmax attention: a forward kernel, and two backward kernels, the first for dq, the second for dk and dv.

Each of the three has a version for half-precision data on Hopper, one for half-precision data on every card, and a
plain one (without tensor cores) for every dtype and size. A plan takes the first version that can compute the call.

The backward pass recomputes the scores from each query's log-sum-exp (lse), so that memory is linear in
T. It does so twice, or on Hopper once if scores are many: then the kernel of dk and dv stores their gradients, ds, in a
bounded part of memory, for dq. There are no atomic additions, so that equal calls give equal bits. `softmax_tiles`
makes the tables that assign tiles to blocks. `group` is the number of query heads that share a key head.
"""

from __future__ import annotations

from math import log
from typing import ClassVar

import numpy as np

from ... import varlen
from . import softmax_tiles
from .arguments import members
from .arithmetic import ceil_div
from .kernel import FLOATS, HALF, SM90, Kernel, no_kernels
from .plan import Array, Draft, TensorMap, aligned16, mappable
from .softmax_tiles import CHUNK_QUERIES, DS_ENTRY_BYTES, DS_KEYS, WORDS

# A class describes a kernel: its annotated fields are the template's arguments, in order; `arguments` the members of
# struct Args, which the compiler checks, with `?` if they may be null.
#
# Arguments:
#     H, group             heads of queries, and how many of them share a head of keys; Tq: the tokens of q
#     scale, softcap       scores are s = scale q . k, or softcap tanh(s / softcap) if a class is `capped`
#     left, right          how many keys a query sees before and after its position
#     works                the table of tiles: an entry for each block, or a list of entries on Hopper
#     statistics           of each of `chunks` chunks of CHUNK_QUERIES queries: the log-sum-exps, and do . o - dlse
#     unit                 the factor that makes natural logarithms of those in `statistics`: log 2 or 1
#     ds                   gradients of scores, a matrix for each entry of `softmax_tiles`: from head ds_head on,
#                          ds_entries of each head; ds_offsets: the first entry of each tile of keys
#     vectors              whether rows allow 16-byte accesses

IN_ROWS = "q k v o do_ dq dk dv".split()  # arrays with a row of K or V numbers for every token and head


# -- on every card's tensor cores --------------------------------------------------------------------------------------
class Softmax(Kernel):
    """A kernel whose blocks multiply tiles of QUERIES queries and KEYS keys, with all columns of K and V."""

    QUERIES: ClassVar[int]
    KEYS: ClassVar[int]
    COLUMNS: ClassVar[tuple[tuple[int, ...], ...]] = ((64,), (128,))  # the possible columns of K and V; (D,): of both
    threads = 128
    WORK_BYTES: ClassVar[int] = 4 * WORDS  # of an entry in the table of tiles
    constants: ClassVar[tuple] = (("QUERIES", "QUERIES"), ("KEYS", "KEYS"), ("sizeof(Work)", "WORK_BYTES"))

    @classmethod
    def fitting(cls, problem):
        """The instance with the fewest columns that hold the problem's K and V; None if no instance holds them."""
        K, V = problem.shape("K V")
        columns = next((columns for columns in cls.COLUMNS if K <= columns[0] and V <= columns[-1]), None)
        return columns and cls(problem.dtype, *columns, problem.options["softcap"] > 0)

    def given(self, arrays) -> dict:
        """The kernel's arguments that are arrays, or depend on them; `vectors`: whether rows allow 16-byte accesses."""
        return arrays | {"vectors": aligned16(*(x for name, x in arrays.items() if name in IN_ROWS))}


class SoftmaxSquare(Softmax):
    """A kernel whose tiles have as many columns of K as of V."""

    shared_memory = ("Shared<{dtype}, {D}>",)
    dtype: np.dtype
    D: int
    capped: bool


class SoftmaxForward(SoftmaxSquare):
    file, KEYS = "softmax/forward", 64
    shared_memory = ("Shared<{dtype}, {D}, {capped}>",)
    constants = (("Shared<{dtype}, {D}, {capped}>::QUERIES", "QUERIES"), ("KEYS", "KEYS"))
    arguments = members(
        "strided q k v o, pointers works lse sinks, int64s H group Tq K V left right, float64s scale softcap, "
        "int64s vectors"
    )

    @property
    def QUERIES(self):
        return 64 if self.D == 128 and self.capped else 128


class SoftmaxBackwardQueries(SoftmaxSquare):
    file, QUERIES, KEYS = "softmax/backward_queries", 128, 32
    arguments = members(
        "strided q k v o do_ dq, pointers works lse dlse statistics, int64s H group Tq K V left right chunks, "
        "float64s scale softcap, int64s vectors"
    )


class SoftmaxBackwardKeys(SoftmaxSquare):
    file, QUERIES, KEYS = "softmax/backward_keys", CHUNK_QUERIES, 64
    arguments = members(
        "strided q k v do_ dk dv, pointers works statistics, int64s H group K V left right chunks, float64s scale "
        "softcap, int64s vectors"
    )


# -- on Hopper ---------------------------------------------------------------------------------------------------------
class SoftmaxSm90(Softmax):
    arch, threads = SM90, 3 * 128
    BOX: ClassVar[int] = 64  # columns, and tokens, that one tensor copy (TMA) reads
    STORED: ClassVar[int] = 16  # tokens that one tensor copy writes: those of one warp
    constants = (*Softmax.constants, ("PANEL", "BOX"), ("BOX_TOKENS", "BOX"))
    RESULTS: ClassVar[dict[str, str]] = {}  # result -> the argument that describes the same array by its rows

    def tokens_of(self, name) -> int:
        """Tokens per tensor copy of the array `name`."""
        return self.STORED if name in self.RESULTS else self.BOX

    def given(self, arrays):
        maps = {x: TensorMap(arrays[x], self.BOX, self.tokens_of(x), swizzled=True) for x in IN_ROWS if x in arrays}
        return arrays | maps | {rows: arrays[name] for name, rows in self.RESULTS.items()}


class SoftmaxForwardSm90(SoftmaxSm90):
    file, RESULTS = "softmax/sm90/forward", {"o": "out"}
    shared_memory = ("Shared<{dtype}, {K}, {V}, {capped}>",)
    arguments = members(
        "tensor_maps q k v o, strided out, pointers works lse sinks, int64s H group Tq V left right, float64s scale "
        "softcap"
    )
    COLUMNS = ((64, 64), (128, 128), (192, 128))
    constants = (
        ("Shared<{dtype}, {K}, {V}, {capped}>::QUERIES", "QUERIES"),
        ("Shared<{dtype}, {K}, {V}, {capped}>::KEYS", "KEYS"),
        ("PANEL", "BOX"),
        ("BOX_TOKENS", "BOX"),
    )
    dtype: np.dtype
    K: int
    V: int
    capped: bool

    def tokens_of(self, name):
        return self.KEYS if name in ("k", "v") else super().tokens_of(name)

    @property
    def warpgroups(self):
        return 3 if self.K == 64 and not self.capped else 2

    @property
    def threads(self):
        return 128 * (self.warpgroups + 1)

    @property
    def QUERIES(self):
        return 64 * self.warpgroups

    @property
    def KEYS(self):
        return 96 if self.K > 128 else 128


class SoftmaxBackwardQueriesSm90(SoftmaxSm90, SoftmaxSquare):
    file, QUERIES, KEYS = "softmax/sm90/backward_queries", 128, 64
    RESULTS = {"dq": "out"}
    arguments = members(
        "tensor_maps q k v o do_ dq, strided out, pointers works lse dlse statistics, int64s H group Tq K left right "
        "chunks, float64s scale softcap"
    )


class SoftmaxBackwardKeysSm90(SoftmaxSm90, SoftmaxSquare):
    file, QUERIES, KEYS = "softmax/sm90/backward_keys", CHUNK_QUERIES, DS_KEYS
    ENTRY_BYTES: ClassVar[int] = DS_ENTRY_BYTES
    constants = (*SoftmaxSm90.constants, ("sizeof(DsEntry)", "ENTRY_BYTES"))
    RESULTS = {"dk": "dk_out", "dv": "dv_out"}
    arguments = members(
        "tensor_maps q k v do_ dk dv, strided dk_out dv_out, pointers works statistics, pointers? ds, "
        "int64s H group K V left right chunks ds_head ds_entries, float64s scale softcap"
    )


class SoftmaxStatistics(Softmax):
    """The statistics of queries, for the gradients of k and v; it reads rows of whole 16 bytes."""

    file, threads, QUERIES, KEYS = "softmax/statistics", 4 * CHUNK_QUERIES, CHUNK_QUERIES, CHUNK_QUERIES
    constants = (("CHUNK_QUERIES", "QUERIES"),)
    arguments = members("strided o do_, pointers works lse dlse statistics, int64s H Tq V chunks")
    dtype: np.dtype


class SoftmaxQueryGradient(SoftmaxSm90):
    """dq from the gradients of scores that SoftmaxBackwardKeysSm90 has stored."""

    file, QUERIES, KEYS = "softmax/sm90/query_gradient", 256, 64
    RESULTS = {"dq": "out"}
    shared_memory = ("Shared<{dtype}, {D}>",)
    arguments = members(
        "tensor_maps k dq, strided out, pointers works ds ds_offsets, int64s H group K left right ds_head ds_entries, "
        "float64s scale"
    )
    dtype: np.dtype
    D: int


# -- without tensor cores ----------------------------------------------------------------------------------------------
class SoftmaxPlain(Kernel):
    """Kernels for every dtype and size, chosen by `what`. "Forward" computes o, "Queries" dq, "Keys" dk and dv: a warp
    has WIDTH columns of one token's result. Two are also used beside the kernels of the other versions: "Sinks"
    computes the gradient of the sinks, one block per head; "Merge" combines the results of parts of the keys, one warp
    per query.
    """

    file = "softmax/plain"
    WARPS: ClassVar[int] = 4
    WIDTH: ClassVar[int] = 128
    QUERIES: ClassVar[int] = CHUNK_QUERIES
    KEYS: ClassVar[int] = CHUNK_QUERIES
    constants = (("WARPS", "WARPS"), ("WIDTH", "WIDTH"), ("CHUNK_QUERIES", "QUERIES"), ("CHUNK_QUERIES", "KEYS"))
    PASSES: ClassVar[tuple[str, ...]] = ("Forward", "Queries", "Keys", "Sinks", "Merge")
    threads = 32 * WARPS
    arguments = members(
        "strided q k v o do_ out dq dk dv, pointers works lse dlse statistics sinks dsinks merged, "
        "int64s B H group Tq K V left right chunks tiles parts, float64s scale softcap unit"
    )
    what: str
    dtype: np.dtype

    def column_tiles(self, K, V) -> int:
        return ceil_div({"Forward": V, "Queries": K, "Keys": max(K, V)}[self.what], self.WIDTH)

    def given(self, arrays):
        """The kernel's arguments; those that `what` does not use are null."""
        nulls = dict.fromkeys([member.name for member in self.arguments if member.kind in ("rows", "pointer")])
        arguments = nulls | {"tiles": 0, "parts": 1, "unit": 1.0} | arrays
        return arguments | {"out": arrays["o"], "o": None} if self.what == "Forward" else arguments


# -- plans -------------------------------------------------------------------------------------------------------------
def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    return no_kernels(problem.dtype, FLOATS)


def plan(problem, device):
    """The plan of the forward pass; it saves o and lse if the problem asks for gradients."""
    draft, lse = Draft(), None
    o = draft.output(problem)
    attended, attended_o = with_queries_of_a_group(problem, o)
    attention = SoftmaxLaunches(draft, attended, device)
    arrays = attention.inputs | {"o": attended_o}
    if problem.gradient or problem.output_final_state:
        lse = draft.empty(problem.shape("B H T"), problem.compute_dtype)
    (kernel,) = attention.choose({"Forward": (SoftmaxForwardSm90, SoftmaxForward)}, arrays)
    attention.forward(kernel, arrays | {"lse": lse, "sinks": attention.sinks})
    results = draft.give_back(problem, o), (lse,) if problem.output_final_state else None
    return draft.plan(results, saved=(o, lse) if problem.gradient else (), tiles=attention.tiles)


def plan_vjp(problem, device, do, dht, saved):
    """The plan of the pullback, with results ((dq, dk, dv[, dsinks]), None); `saved` is (o, lse)."""
    draft, (o, lse) = Draft(), saved
    attention = SoftmaxLaunches(draft, problem, device)
    inputs, sinks = attention.inputs, attention.sinks
    do, _ = draft.cotangents(problem, do)
    if device.capability == 90 and problem.dtype in HALF and not mappable(do) and mappable(*inputs.values()):
        do = draft.contiguous_copy(do, reason="do: a tensor map cannot describe it")
    dlse = draft.as_contiguous(dht and dht[0], "dlse", problem.compute_dtype)
    dq, dk, dv = (draft.like(x) for x in inputs.values())
    statistics = draft.empty(
        (*problem.shape("B H"), attention.numbers["chunks"], 2, CHUNK_QUERIES), problem.compute_dtype
    )
    passes = {
        "Queries": (SoftmaxBackwardQueriesSm90, SoftmaxBackwardQueries),
        "Keys": (SoftmaxBackwardKeysSm90, SoftmaxBackwardKeys),
    }
    inputs_and_do = inputs | {"do_": do}
    queries, keys = attention.choose(passes, inputs_and_do | {"o": o, "dq": dq, "dk": dk, "dv": dv})
    key_tiles = attention.tiles_of(keys, by_keys=True)
    query_arrays = inputs_and_do | {"o": o, "dq": dq, "lse": lse, "dlse": dlse, "statistics": statistics}
    key_arrays = inputs_and_do | {"dk": dk, "dv": dv, "statistics": statistics}
    per_turn = 0
    if isinstance(keys, SoftmaxSm90):
        per_turn = softmax_tiles.heads_per_turn(key_tiles, attention.numbers["group"], device)
    if per_turn:
        attention.backward_in_turns(keys, key_tiles, per_turn, query_arrays, key_arrays)
    else:
        attention.launch(queries, attention.tiles_of(queries), query_arrays)
        attention.launch(keys, key_tiles, key_arrays, by_keys=True)
    results = [dq, dk, dv]
    if sinks is not None:
        dsinks = draft.empty(sinks.shape, sinks.dtype)
        unit = 1.0 if isinstance(queries, SoftmaxPlain) else log(2.0)  # other kernels store logarithms to base 2
        arrays = {"statistics": statistics, "sinks": sinks, "dsinks": dsinks, "unit": unit}
        attention.launch_blocks(SoftmaxPlain("Sinks", problem.dtype), problem.sizes["H"], arrays)
        results.append(draft.cast(dsinks, problem.arrays["sinks"].dtype))
    return draft.plan((tuple(results), None), tiles=attention.tiles)


def saved(problem, device) -> tuple[tuple, ...]:
    """(shape, dtype) of what `plan` saves."""
    return (problem.shape("B H T V"), problem.dtype), (problem.shape("B H T"), problem.compute_dtype)


def with_queries_of_a_group(problem, o):
    """(problem, o) in which the query heads that share a key head have become tokens of one head, as views.

    This fills tiles when there is one query per head (decoding). `problem` and `o` themselves are returned if there are
    more queries, if they do not all see the same keys, or if heads have sinks of their own.
    """
    B, H, T, HK = problem.shape("B H T HK")
    if problem.varlen or T != 1 or not 0 < HK < H or max(problem.options["window"]) >= 0 or "sinks" in problem.arrays:
        return problem, o

    def fold(x):
        batch, head, _, column = x.strides
        return Array(x.memory, (B, HK, H // HK, x.shape[-1]), (batch, H // HK * head, head, column), x.dtype, x.offset)

    arrays = dict(problem.arrays) | {"q": fold(problem.arrays["q"])}
    sizes = dict(problem.sizes) | {"H": HK, "T": H // HK}
    return problem.replace(arrays=arrays, sizes=sizes, spans=varlen.dense(H // HK)), fold(o)


class SoftmaxLaunches:
    """Adds the launches of a call's kernels to a draft of its plan."""

    def __init__(self, draft, problem, device):
        self.draft, self.problem, self.device = draft, problem, device
        self.inputs = {name: draft.in_rows(problem.arrays[name], name) for name in "qkv"}
        self.sinks = draft.as_contiguous(problem.arrays.get("sinks"), "sinks", problem.compute_dtype)
        B, H, T, K, V, HK = problem.shape("B H T K V HK")
        left, right = softmax_tiles.window(problem)
        self.numbers = {"B": B, "H": H, "group": H // max(HK, 1), "Tq": T, "K": K, "V": V, "left": left, "right": right}
        self.numbers |= {"chunks": int(softmax_tiles.statistics_bounds(problem)[-1])}
        self.numbers |= {"scale": problem.scale, "softcap": problem.options["softcap"]}
        self.tiles: dict = {}  # name -> size, for `explain`

    def choose(self, passes, arrays) -> list:
        """A kernel for each of `passes`, all of one version: Hopper's, every card's, or plain.

        `passes` maps a pass to its classes (Hopper's, every card's); `arrays` are those that Hopper's read by tensor
        maps.
        """
        problem = self.problem
        plain = [SoftmaxPlain(what, problem.dtype) for what in passes]
        if problem.dtype not in HALF:
            return plain
        hopper, portable = ([kernel.fitting(problem) for kernel in kernels] for kernels in zip(*passes.values()))
        unmapped = ", ".join(name.rstrip("_") for name, x in arrays.items() if not mappable(x))
        if self.device.capability == 90:
            if None not in hopper and not unmapped:
                return hopper
            largest = " and ".join(map(str, next(iter(passes.values()))[0].COLUMNS[-1]))
            too_many = f"K={problem.sizes['K']} and V={problem.sizes['V']} are over {largest}"
            reason = too_many if None in hopper else f"a tensor map cannot describe {unmapped}"
            self.tiles["not Hopper's kernels"] = reason
        return plain if None in portable else portable

    def forward(self, kernel, arrays):
        """Launches the forward pass.

        If there are too few tiles of queries for the card, the keys are split into parts. Their results are stored as a
        batch of `parts * B` and merged by a second kernel.
        """
        B, H, T, V = self.problem.shape("B H T V")
        tiles = self.tiles_of(kernel)
        parts = softmax_tiles.parts(self.problem, tiles, self.device.multiprocessors)
        if parts == 1 or isinstance(kernel, SoftmaxPlain):
            self.launch(kernel, tiles, arrays)
            return
        self.tiles["parts of the keys"] = parts
        o = self.draft.empty((parts * B, H, T, V), self.problem.dtype)
        lse = self.draft.empty((parts * B, H, T), self.problem.compute_dtype)
        self.launch(kernel, softmax_tiles.split(tiles, parts, B), arrays | {"o": o, "lse": lse, "sinks": None})
        merged = {
            "o": o,
            "lse": lse,
            "out": arrays["o"],
            "merged": arrays["lse"],
            "sinks": arrays["sinks"],
            "parts": parts,
        }
        self.launch_blocks(SoftmaxPlain("Merge", self.problem.dtype), ceil_div(B * H * T, SoftmaxPlain.WARPS), merged)

    def backward_in_turns(self, keys, key_tiles, per_turn, query_arrays, key_arrays):
        """Launches the gradients in turns for `per_turn` heads of keys: the kernel of dk and dv stores the gradients of
        scores, ds, from which another one computes dq. All turns use the same memory for ds."""
        statistics, queries = SoftmaxStatistics(keys.dtype), SoftmaxQueryGradient(keys.dtype, keys.D)
        table = self.draft.table(softmax_tiles.longest_first(self.tiles_of(statistics)))
        read = {name: query_arrays[name] for name in ("o", "do_", "lse", "dlse", "statistics")}
        self.launch_blocks(statistics, table.shape[0], read | {"works": table})
        group, query_tiles = self.numbers["group"], self.tiles_of(queries)
        entries = softmax_tiles.ds_entries(key_tiles)
        self.tiles["heads at once"] = per_turn
        ds = self.draft.empty((per_turn * group * entries, DS_KEYS, CHUNK_QUERIES), keys.dtype)
        offsets = self.draft.table(key_tiles[0, :, softmax_tiles.WORK.index("ds_index")])
        for first in range(0, len(key_tiles), per_turn):
            own = {"ds": ds, "ds_head": first * group, "ds_entries": entries}
            self.launch(keys, key_tiles[first : first + per_turn], key_arrays | own, by_keys=True)
            query_heads, own["ds_offsets"] = slice(first * group, (first + per_turn) * group), offsets
            self.launch(queries, query_tiles[query_heads], own | {name: query_arrays[name] for name in ("k", "dq")})

    def tiles_of(self, kernel, by_keys=False):
        """The table of tiles of queries, or of keys (`by_keys`), for this kernel."""
        if not isinstance(kernel, SoftmaxPlain):
            self.tiles |= {f"{kernel.name} queries": kernel.QUERIES, f"{kernel.name} keys": kernel.KEYS}
        tile_size, other_size = (kernel.KEYS, kernel.QUERIES) if by_keys else (kernel.QUERIES, kernel.KEYS)
        return softmax_tiles.tile_table(self.problem, tile_size, other_size, by_keys)

    def launch(self, kernel, tiles, arrays, by_keys=False):
        """Orders the tiles, so that blocks finish at about the same time, and launches the kernel on them."""
        K, V = self.problem.shape("K V")
        if isinstance(kernel, SoftmaxSm90):
            bytes_of_head = self.problem.sizes["T" if by_keys else "S"] * (K + V) * self.problem.dtype.itemsize
            multiprocessors, group = self.device.multiprocessors, 1 if by_keys else self.numbers["group"]
            turns = softmax_tiles.turns(tiles, bytes_of_head, group, multiprocessors)
            table = softmax_tiles.balanced(tiles, multiprocessors, turns)
            blocks = table.shape[1]
        else:
            table = softmax_tiles.longest_first(tiles)
            blocks = len(table)
        if isinstance(kernel, SoftmaxPlain):
            columns = kernel.column_tiles(K, V)
            arrays = arrays | {"tiles": columns}
            blocks *= kernel.QUERIES // kernel.WARPS * columns
        self.launch_blocks(kernel, blocks, arrays | {"works": self.draft.table(table)})

    def launch_blocks(self, kernel, blocks, arrays):
        names = [member.name for member in kernel.arguments]
        assert arrays.keys() <= set(names), "a kernel takes every array that it is given"
        arguments = {"ds": None, "ds_head": 0, "ds_entries": 0} | self.numbers | kernel.given(arrays)
        self.draft.launch(kernel, blocks, **{name: arguments[name] for name in names})
