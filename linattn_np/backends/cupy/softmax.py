"""Softmax attention: one kernel forwards; backwards one for dq, then one for dk and dv. Of each there is one for half
data on Hopper's tensor cores, one for those of every card, and a plain one for every dtype and size.

The backward recomputes the scores from lse, the logarithm of each query's sum, so that memory stays linear in T;
nothing is added atomically, so that the same call gives the same bits. `softmax_tiles` says who does what.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar

import numpy as np

from ... import varlen
from . import softmax_tiles as work
from .arguments import integers, maps, pointers, reals, rows
from .gated_kernels import SM90
from .kernel import FLOATS, HALF, Kernel, padded
from .plan import Array, Draft, TensorMap, aligned16, ceil_div, mappable

MASK = "left right"


# -- on every card's tensor cores --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Softmax(Kernel):
    """Queries and keys at once are as many as leave no value without a register."""

    QUERIES: ClassVar[int]
    KEYS: ClassVar[int]
    COLUMNS: ClassVar[tuple[int, ...]] = (64, 128)  # D: the whole of K and of V in one tile, padded up
    shared = ("Shared<{dtype}, {D}>",)
    threads = 128
    dtype: np.dtype
    D: int
    capped: bool

    @classmethod
    def fitting(cls, problem):
        D = next(D for D in cls.COLUMNS if max(problem.shape("K V")) <= D)
        return cls(problem.dtype, D, problem.options["softcap"] > 0)


class SoftmaxForward(Softmax):
    file, KEYS = "softmax/forward", 64
    shared = ("Shared<{dtype}, {D}, {capped}>",)
    arguments = (
        *rows("q k v o"),
        *pointers("works L sinks"),
        *integers(f"H group Tq K V {MASK}"),
        *reals("scale softcap"),
        *integers("vectors"),
    )

    @property
    def QUERIES(self):
        return 64 if self.D == 128 and self.capped else 128

    @property
    def shared_bytes(self):
        return 2 * self.D * (self.QUERIES + 4 * self.KEYS) + 128


class SoftmaxBackwardQueries(Softmax):
    file, QUERIES, KEYS = "softmax/backward_queries", 128, 32
    arguments = (
        *rows("q k v o g dq"),
        *pointers("works L dL statistics"),
        *integers(f"H group Tq K V {MASK} chunks"),
        *reals("scale softcap"),
        *integers("vectors"),
    )

    @property
    def shared_bytes(self):
        return 2 * self.D * (2 * self.QUERIES + 4 * self.KEYS) + 8 * self.QUERIES + 128


class SoftmaxBackwardKeys(Softmax):
    file, QUERIES, KEYS = "softmax/backward_keys", work.STATISTICS, 64
    arguments = (
        *rows("q k v g dk dv"),
        *pointers("works statistics"),
        *integers(f"H group K V {MASK} chunks"),
        *reals("scale softcap"),
        *integers("vectors"),
    )

    @property
    def shared_bytes(self):
        return 2 * self.D * (2 * self.KEYS + 4 * self.QUERIES) + 4 * 4 * self.QUERIES + 128


# -- on Hopper ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SoftmaxSm90(Kernel):
    arch, threads = SM90, 3 * 128
    BOX: ClassVar[int] = 64  # columns of a copy, and tokens that it brings
    LEAVES: ClassVar[dict[str, str]] = {}  # the results, and as what they are rows too
    dtype: np.dtype

    def tokens_of(self, name) -> int:
        """Of a copy: a warp stores 16."""
        return 16 if name in self.LEAVES else self.BOX


@dataclass(frozen=True)
class SoftmaxForwardSm90(SoftmaxSm90):
    file, LEAVES = "softmax/sm90/forward", {"o": "out"}
    shared = ("Shared<{dtype}, {K}, {V}, {capped}>",)
    arguments = (
        *maps("q k v o"),
        *rows("out"),
        *pointers("works L sinks"),
        *integers(f"H group Tq V {MASK}"),
        *reals("scale softcap"),
    )
    COLUMNS: ClassVar[tuple[tuple[int, int], ...]] = ((64, 64), (128, 128), (192, 128))
    K: int
    V: int
    capped: bool

    @classmethod
    def fitting(cls, problem):
        """None where K or V is too large."""
        sizes = problem.shape("K V")
        fit = [tile for tile in cls.COLUMNS if sizes[0] <= tile[0] and sizes[1] <= tile[1]]
        return cls(problem.dtype, *fit[0], problem.options["softcap"] > 0) if fit else None

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

    @property
    def shared_bytes(self):
        stages = 4 if self.K == 64 else 2
        return 2 * (2 * self.QUERIES * self.K + stages * self.KEYS * (self.K + self.V)) + 1024


@dataclass(frozen=True)
class SoftmaxBackwardSm90(SoftmaxSm90):
    shared = ("Shared<{dtype}, {D}>",)
    COLUMNS: ClassVar[tuple[int, ...]] = (64, 128)
    D: int
    capped: bool

    @classmethod
    def fitting(cls, problem):
        """None where K or V is too large."""
        fit = [D for D in cls.COLUMNS if max(problem.shape("K V")) <= D]
        return cls(problem.dtype, fit[0], problem.options["softcap"] > 0) if fit else None


class SoftmaxBackwardQueriesSm90(SoftmaxBackwardSm90):
    file, QUERIES, KEYS = "softmax/sm90/backward_queries", 128, 64
    LEAVES = {"dq": "out"}
    arguments = (
        *maps("q k v o g dq"),
        *rows("out"),
        *pointers("works L dL statistics"),
        *integers(f"H group Tq K {MASK} chunks"),
        *reals("scale softcap"),
    )

    @property
    def shared_bytes(self):
        stages = 8 if self.D == 64 else 7
        return 2 * self.D * (3 * self.QUERIES + stages * self.KEYS) + 1024


class SoftmaxBackwardKeysSm90(SoftmaxBackwardSm90):
    file, QUERIES, KEYS = "softmax/sm90/backward_keys", work.STATISTICS, 128
    LEAVES = {"dk": "dk_out", "dv": "dv_out"}
    arguments = (
        *maps("q k v g dk dv"),
        *rows("dk_out dv_out"),
        *pointers("works statistics"),
        *integers(f"H group K V {MASK} chunks"),
        *reals("scale softcap"),
    )

    @property
    def shared_bytes(self):
        tiles = 2 * self.D * (4 * self.KEYS + 6 * self.QUERIES)
        return padded(tiles + 3 * 8 * self.QUERIES + 3 * 4 * work.WORDS + 16 * 8, 1024)


# -- without tensor cores ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SoftmaxPlain(Kernel):
    """A warp a token, and 128 of its columns; or the gradient of the sinks, a block a head;
    or one result of those over parts of the keys, a warp a query."""

    file = "softmax/plain"
    WARPS: ClassVar[int] = 4
    WIDTH: ClassVar[int] = 128
    QUERIES: ClassVar[int] = work.STATISTICS
    KEYS: ClassVar[int] = work.STATISTICS
    PASSES: ClassVar[tuple[str, ...]] = ("Forward", "Queries", "Keys", "Sinks", "Merge")
    threads = 32 * WARPS
    arguments = (
        *rows("q k v o g out dq dk dv"),
        *pointers("works L dL statistics sinks dsinks merged"),
        *integers(f"B H group Tq K V {MASK} chunks tiles parts"),
        *reals("scale softcap unit"),
    )
    what: str
    dtype: np.dtype


# -- plans -------------------------------------------------------------------------------------------------------------
def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem; None when they can."""
    return None if problem.dtype in FLOATS else f"no {problem.dtype} kernels; it has {', '.join(map(str, FLOATS))}"


class Attention:
    """A problem's plan while it is drawn: its launches on one family of kernels."""

    def __init__(self, problem, device, draft):
        self.problem, self.device, self.draft = problem, device, draft
        B, H, T, S, K, V = problem.shape("B H T S K V")
        left, right = work.reach(problem)
        self.group = H // max(problem.sizes["HK"], 1)
        self.numbers = dict(
            B=B, H=H, group=self.group, Tq=T, K=K, V=V, left=left, right=right, chunks=int(work.pieces(problem)[-1])
        )
        self.numbers |= {"scale": problem.scale, "softcap": problem.options["softcap"]}
        self.tiles: dict = {}

    def is_plain(self) -> bool:
        return self.problem.dtype not in HALF or max(self.problem.shape("K V")) > Softmax.COLUMNS[-1]

    def hopper(self, cls, arrays):
        """The instance of Hopper's kernel, or None; `tiles` says why it is not."""
        if self.device.capability != 90 or self.problem.dtype not in HALF:
            return None
        kernel = cls.fitting(self.problem)
        if kernel is None:
            K, V = self.problem.shape("K V")
            self.tiles["not Hopper's kernels"] = f"K={K} and V={V} are over {cls.COLUMNS[-1]}"
        elif named := [name for name, x in arrays.items() if not mappable(x)]:
            self.tiles["not Hopper's kernels"] = f"a tensor map cannot describe {', '.join(named)}"
            kernel = None
        return kernel

    def launch(self, kernel, by_keys=False, what="Forward", **arrays):
        """One of the three passes by a kernel of any of the three families; None for the plain one."""
        if kernel is None:
            return self.launch_plain(what, by_keys, self.numbers | arrays)
        own, other = (kernel.KEYS, kernel.QUERIES) if by_keys else (kernel.QUERIES, kernel.KEYS)
        self.tiles |= {f"{kernel.name} queries": kernel.QUERIES, f"{kernel.name} keys": kernel.KEYS}
        tiles = work.works(self.problem, own, other, by_keys)
        parts = work.parts(self.problem, tiles, self.device.multiprocessors) if what == "Forward" else 1
        if parts > 1:
            return self.launch_parts(kernel, tiles, parts, arrays)
        self.launch_tiles(kernel, tiles, by_keys, arrays)

    def launch_parts(self, kernel, tiles, parts, arrays):
        """Forwards, a part of the keys after the other in `parts` times the batch, which are merged."""
        B, H, T, V = self.problem.shape("B H T V")
        self.tiles["parts of the keys"] = parts
        o = self.draft.empty((parts * B, H, T, V), self.problem.dtype)
        lse = self.draft.empty((parts * B, H, T), self.problem.compute_dtype)
        self.launch_tiles(kernel, work.split(tiles, parts, B), False, arrays | {"o": o, "L": lse, "sinks": None})
        merged = {"o": o, "L": lse, "out": arrays["o"], "merged": arrays["L"], "sinks": arrays["sinks"], "parts": parts}
        self.launch_over_heads("Merge", ceil_div(B * H * T, SoftmaxPlain.WARPS), **merged)

    def launch_tiles(self, kernel, tiles, by_keys, arrays):
        arguments = self.numbers | arrays
        if isinstance(kernel, SoftmaxSm90):
            K, V = self.problem.shape("K V")
            side = self.problem.sizes["T" if by_keys else "S"]
            group = 1 if by_keys else self.group
            at_once = work.heads_at_once(len(tiles), side * (K + V) * self.problem.dtype.itemsize, group)
            table = work.balanced(tiles, self.device.multiprocessors, at_once)
            blocks = table.shape[1]
            for name, x in arrays.items():
                if name in MAPPED:
                    arguments[name] = TensorMap(x, kernel.BOX, kernel.tokens_of(name), True)
            arguments |= {out: arrays[name] for name, out in kernel.LEAVES.items()}
        else:
            table = work.longest_first(tiles)
            blocks = len(table)
            arguments["vectors"] = aligned16(*(x for name, x in arrays.items() if name in MAPPED))
        arguments["works"] = self.draft.table(table)
        self.draft.launch(kernel, blocks, **{member.name: arguments[member.name] for member in kernel.arguments})

    def launch_plain(self, what, by_keys, arguments):
        kernel = SoftmaxPlain(what, self.problem.dtype)
        table = work.longest_first(work.works(self.problem, kernel.QUERIES, kernel.KEYS, by_keys))
        K, V = self.problem.shape("K V")
        tiles = ceil_div({"Forward": V, "Queries": K, "Keys": max(K, V)}[what], kernel.WIDTH)
        blocks = len(table) * (kernel.QUERIES // kernel.WARPS) * tiles
        if what == "Forward":
            arguments["out"], arguments["o"] = arguments["o"], None
        arguments |= {"works": self.draft.table(table), "tiles": tiles, "parts": 1, "unit": 1.0}
        self.draft.launch(kernel, blocks, **{member.name: arguments.get(member.name) for member in kernel.arguments})

    def launch_over_heads(self, what, blocks, **arrays):
        """A pass of the plain kernel that takes no tiles."""
        kernel, given = (
            SoftmaxPlain(what, self.problem.dtype),
            {"tiles": 0, "parts": 1, "unit": 1.0} | self.numbers | arrays,
        )
        self.draft.launch(kernel, blocks, **{member.name: given.get(member.name) for member in kernel.arguments})


MAPPED = "q k v o g dq dk dv".split()


def begin(problem, device, draft):
    """(what launches, its q, k and v in rows, its sinks as the kernels read them)."""
    q, k, v = (draft.in_rows(problem.arrays[name], name) for name in "qkv")
    sinks = draft.plain(problem.arrays.get("sinks"), "sinks", problem.compute_dtype)
    return Attention(problem, device, draft), {"q": q, "k": k, "v": v}, sinks


def folded(problem, o):
    """(a call, its o) of one query a head, as one of a key head with a query for each head that shares its keys: they
    see the same keys. The call itself where they do not, or sinks are a head's."""
    B, H, T, HK = problem.shape("B H T HK")
    if problem.varlen or T != 1 or not 0 < HK < H or max(problem.options["window"]) >= 0 or "sinks" in problem.arrays:
        return problem, o

    def fold(x):
        batch, head, _, column = x.strides
        return Array(x.memory, (B, HK, H // HK, x.shape[-1]), (batch, H // HK * head, head, column), x.dtype, x.offset)

    arrays = dict(problem.arrays) | {"q": fold(problem.arrays["q"])}
    sizes = dict(problem.sizes) | {"H": HK, "T": H // HK}
    return problem.replace(arrays=arrays, sizes=sizes, spans=varlen.dense(H // HK)), fold(o)


def plan(problem, device):
    """Saves o and lse where a gradient is asked for: what the pullback needs besides the caller's arrays."""
    draft, lse = Draft(), None
    o = draft.output(problem)
    attended, its_o = folded(problem, o)
    call, arrays, sinks = begin(attended, device, draft)
    arrays["o"] = its_o
    if problem.gradient or problem.output_final_state:
        lse = draft.empty(problem.shape("B H T"), problem.compute_dtype)
    kernel = call.hopper(SoftmaxForwardSm90, arrays)
    if kernel is None and not call.is_plain():
        kernel = SoftmaxForward.fitting(attended)
    call.launch(kernel, **arrays, L=lse, sinks=sinks)
    results = draft.give_back(problem, o), (lse,) if problem.output_final_state else None
    return draft.plan(results, saved=(o, lse) if problem.gradient else (), tiles=call.tiles)


def plan_vjp(problem, device, do, dht, saved):
    """(dq, dk, dv, and of sinks), None"""
    draft, (o, lse) = Draft(), saved
    call, arrays, sinks = begin(problem, device, draft)
    g = draft.in_rows(draft.cast(do, problem.dtype, "do: in the dtype of the inputs"), "do")
    if device.capability == 90 and problem.dtype in HALF and not mappable(g) and mappable(*arrays.values()):
        g = draft.contiguous(g, reason="do: a tensor map cannot describe it")
    dL = draft.plain(dht and dht[0], "dlse", problem.compute_dtype)
    gradients = {f"d{name}": draft.like(x) for name, x in arrays.items()}
    statistics = draft.empty((*problem.shape("B H"), call.numbers["chunks"], 2, work.STATISTICS), problem.compute_dtype)
    arrays |= {"g": g}
    queries = call.hopper(SoftmaxBackwardQueriesSm90, arrays | {"o": o} | gradients)
    keys = queries and SoftmaxBackwardKeysSm90.fitting(problem)
    if queries is None and not call.is_plain():
        queries, keys = SoftmaxBackwardQueries.fitting(problem), SoftmaxBackwardKeys.fitting(problem)
    dq, dk, dv = gradients.values()
    call.launch(queries, what="Queries", **arrays, o=o, dq=dq, L=lse, dL=dL, statistics=statistics)
    call.launch(keys, True, what="Keys", **arrays, dk=dk, dv=dv, statistics=statistics)
    results = [dq, dk, dv]
    if sinks is not None:
        dsinks = draft.empty(sinks.shape, sinks.dtype)
        unit = 1.0 if queries is None else log(2.0)
        call.launch_over_heads(
            "Sinks", problem.sizes["H"], statistics=statistics, sinks=sinks, dsinks=dsinks, unit=unit
        )
        results.append(draft.cast(dsinks, problem.arrays["sinks"].dtype))
    return draft.plan((tuple(results), None), tiles=call.tiles)


def saved(problem) -> tuple[tuple, ...]:
    """(shape, dtype) of what `plan` saves."""
    return (problem.shape("B H T V"), problem.dtype), (problem.shape("B H T"), problem.compute_dtype)
