"""The kernels of RWKV-6 models besides those of the operators: a decoding step, and what a prompt takes.

X is the dtype of what a kernel hands to the next product.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar

import numpy as np

from ...array_kinds import BFLOAT16
from ...problem import Problem
from . import PLANNERS
from .arguments import members
from .kernel import HALF, INT8, ModelKernel, padded
from .plan import FLOAT32, Array, Draft, ceil_div


# -- decoding ----------------------------------------------------------------------------------------------------------
class NormShift(ModelKernel):
    file = "rwkv6/norm_shift"
    arguments = members(
        "pointers x value gate weight bias maa shift slots xx d mixed, integers B D C P squares, reals eps"
    )
    shared = ("Shared",)
    PARTS_AT_MOST: ClassVar[tuple[int, ...]] = (1, 4, 8)  # of value
    MIXES_AT_MOST: ClassVar[tuple[int, ...]] = (2, 6)
    WIDTHS: ClassVar[tuple[int, ...]] = (1, 2, 4)  # times 2048 channels
    threads = 512
    X: np.dtype
    EACH: int
    PARTS: int
    TERMS: int
    MIXES: int

    @classmethod
    def fitting(cls, X, D, C, parts, terms=1):
        """Few parts, and few mixes, take so few registers that two blocks share a multiprocessor."""
        each = next(width for width in cls.WIDTHS if D <= width * 4 * cls.threads)
        parts, mixes = (
            next(most for most in limits if n <= most)
            for n, limits in ((parts, cls.PARTS_AT_MOST), (C, cls.MIXES_AT_MOST))
        )
        return cls(X, each, parts, terms, mixes)


TIME_MIX = members("pointers k v r gate low up decay u weight bias state slots y, integers B H N W, reals eps")


class TimeMixStep(ModelKernel):
    file = "rwkv6/time_mix_step"
    arguments = TIME_MIX
    shared = ("TimeMixScratch",)
    threads, parts = 256, 1
    dtype: np.dtype
    X: np.dtype
    state: np.dtype
    TERMS: int

    def blocks(self, B, H) -> int:
        return B * H


class TimeMixBatch(ModelKernel):
    """The time mix of one token of many sequences with heads of 64 channels: a warp computes one sequence."""

    file = "rwkv6/time_mix_batch"
    arguments = (*TIME_MIX, *members("integers P"))
    shared = ("Shared<{SEQUENCES}>",)
    N: ClassVar[int] = 64
    MOST_PARTS: ClassVar[int] = 2  # of what it takes, where a block has fewer than the most sequences
    WIDTHS: ClassVar[tuple[int, ...]] = (8, 4, 2)  # sequences of a block
    dtype: np.dtype
    state: np.dtype
    TERMS: int
    SEQUENCES: int

    @classmethod
    def fitting(cls, dtype, state, terms, B, H, N, W, device) -> tuple[TimeMixBatch, int] | None:
        """The kernel, and the bytes of shared memory behind its own; None where it does not serve. So many sequences a
        block that almost every multiprocessor has one."""
        kernels = [cls(dtype, state, terms, width) for width in cls.WIDTHS]
        busy = (kernel for kernel in kernels if kernel.blocks(B, H) >= 0.9 * device.multiprocessors)
        kernel = next(busy, kernels[-1])
        more = W * (4 * kernel.SEQUENCES + N * dtype.itemsize)
        room = device.shared_per_multiprocessor // 2 - 1024
        return (kernel, more) if N == cls.N and W % 2 == 0 and kernel.shared_bytes + more <= room else None

    @property
    def threads(self):
        return 32 * self.SEQUENCES

    @property
    def parts(self) -> int:
        return self.MOST_PARTS if self.SEQUENCES < max(self.WIDTHS) else 1

    def blocks(self, B, H) -> int:
        return ceil_div(B, self.SEQUENCES) * H


class DecodeFew(ModelKernel):
    """All layers of one sequence's token in one launch, whose blocks hand each other words in place of barriers."""

    file = "rwkv6/decode_few"
    arguments = members(
        "pointers maa_down decay_down kvrg output ffn_key ffn_receptance ffn_value head maa_down_scales "
        "decay_down_scales kvrg_scales output_scales ffn_key_scales ffn_receptance_scales ffn_value_scales "
        "head_scales maa_up decay_up ln1 ln2 ln_x ln_out maa_x maa ffn_maa decay bonus att_shift ffn_shift wkv slots "
        "xx low mixed kvrg_out decay_low y activated gate x logits arrived, integers L P D H N A W F V staged "
        "first last, reals eps group_eps, pointers tokens likeliest brought"
    )
    shared, arch, threads = ("Shared<{stages}>",), "sm_90a", 384
    ROWS: ClassVar[int] = 16  # of a weight a block: a tensor-core tile
    STAGES: ClassVar[tuple[int, ...]] = (11, 8, 4)  # 16 KB of weights on their way each
    DIGITS_AT_ONCE: ClassVar[int] = 7168  # numbers whose digits have one unit a warp
    dtype: np.dtype
    state: np.dtype
    stages: int

    @classmethod
    def fitting(cls, dtype, state, sizes, device) -> tuple[DecodeFew, int] | None:
        """The kernel and the bytes of its stage: two mixes of a norm, and all that the widest product takes, if that
        costs few stages."""
        widest, scratch = max(sizes["D"], sizes["F"]), TimeMixStep(dtype, dtype, state, 1).shared_bytes
        for count, least in ((widest, 8), (sizes["D"], cls.STAGES[-1])):
            for stages in cls.STAGES:
                kernel = cls(dtype, state, stages)
                count = padded(count, kernel.slot)
                norm = (2 * kernel.bytes_of_operand + kernel.bytes_of_float) * sizes["D"]
                room = max(kernel.bytes_of_operand * count, norm, scratch, 4 * sizes["A"])
                if stages >= least and kernel.shared_bytes + room <= device.shared_per_block:
                    return kernel, room
        return None

    def staged(self, room) -> int:
        """Numbers that a stage of so many bytes holds, in whole slots."""
        room = room // self.bytes_of_operand
        return (min(room, self.DIGITS_AT_ONCE) if self.dtype == INT8 else room) // self.slot * self.slot

    @property
    def slot(self) -> int:
        """Columns of a slot of weights."""
        return 1024 // self.dtype.itemsize

    @property
    def bytes_of_operand(self) -> int:
        """Bytes of a float as an operand in the stage: of three bfloat16 numbers, of four digits, or its own."""
        return 6 if self.dtype == BFLOAT16 else 4

    @property
    def bytes_of_float(self) -> int:
        """Bytes of a norm's float beside its operands; 0 if the operands replace it."""
        return {BFLOAT16: 4, INT8: 8}.get(self.dtype, 0)


class Argmax(ModelKernel):
    file = "rwkv6/argmax"
    arguments = members("pointers logits tokens, integers V")
    shared = ("Shared",)
    threads = 1024


# -- of both -----------------------------------------------------------------------------------------------------------
class ChosenNorm(ModelKernel):
    file = "rwkv6/chosen_norm"
    arguments = members("pointers chosen x weight bias y, integers D, reals eps")
    shared = ("Shared",)
    threads = 512
    X: np.dtype
    Y: np.dtype

    @classmethod
    def launch(cls, draft: Draft, chosen, x, norm, y, eps):
        """The `norm` of the rows of x that are `chosen`, to y."""
        draft.launch(cls(x.dtype, y.dtype), chosen.size, chosen=chosen, x=x, **affine(norm), y=y, eps=eps)


LOW_RANK_TOKENS, LOW_RANK_COLUMNS = 16, 128  # of a tile


def low_rank_blocks(tiles, tokens, D) -> int:
    return ceil_div(tokens, tiles * LOW_RANK_TOKENS) * ceil_div(D, LOW_RANK_COLUMNS)


class DataMix(ModelKernel):
    """A step of many sequences takes all five inputs a block, and reads what they share once; others take one, so that
    more multiprocessors are busy."""

    file = "rwkv6/data_mix"
    arguments = members("pointers low up maa xx d mixed, integers tokens D A P")
    shared = ("LowRank<{dtype}, {TILES}, {PARTS}>",)
    threads = 256
    dtype: np.dtype
    X: np.dtype
    PARTS: int
    TILES: int
    INPUTS: int
    TERMS: int

    @classmethod
    def of_step(cls, dtype, X, B, terms=1):
        exact = dtype == BFLOAT16 and (X == FLOAT32 or terms > 1)
        return cls(dtype, X, 3 if exact else 2, 1, 5 if B > 128 else 1, terms)

    @classmethod
    def of_prompt(cls, dtype):
        return cls(dtype, dtype, 2, 2, 1, 1)

    @property
    def most_parts(self) -> int:
        """The most parts whose sum is `low`."""
        return 8 if self.TILES == self.INPUTS == 1 and self.X != FLOAT32 else 1

    def blocks(self, tokens, D) -> int:
        return low_rank_blocks(self.TILES, tokens, D) * 5 // self.INPUTS


class FiveMixes(ModelKernel):
    """`DataMix` for a batch on Hopper, after a `NarrowProduct`: a block has all five inputs."""

    file = "rwkv6/five_mixes"
    arguments = members("pointers low up maa xx d mixed, integers B D A")
    shared = ("Shared<{dtype}, {RANK}, {TOKENS}>",)
    COLUMNS: ClassVar[int] = 128
    RANKS: ClassVar[tuple[int, ...]] = (32, 64)
    LEAST: ClassVar[int] = 17  # sequences; fewer make too few blocks to fill the card
    LEAST_INT8: ClassVar[int] = 65  # the same beside int8 matrices
    arch = "sm_90a"
    dtype: np.dtype
    RANK: int
    TOKENS: int

    @classmethod
    def all(cls, dtype) -> list[FiveMixes]:
        return [cls(dtype, rank, tokens) for rank in cls.RANKS for tokens in (16, 32) if rank * tokens <= 1024]

    @classmethod
    def fitting(cls, matrices, X, B, A, device) -> FiveMixes | None:
        """The kernel with blocks of 16 sequences, or of 32 if a multiprocessor had two blocks that read the same `up`;
        None where `DataMix` serves."""
        rank = next((rank for rank in cls.RANKS if A <= rank and A % 2 == 0), None)
        if device.capability != 90 or X not in HALF or rank is None:
            return None
        least = cls.LEAST_INT8 if matrices == INT8 else cls.LEAST
        tokens = 32 if B > 128 and rank == 32 else 16
        return cls(X, rank, tokens) if B >= least else None

    @property
    def threads(self):
        return 16 * self.TOKENS

    def blocks(self, B, D) -> int:
        return ceil_div(B, self.TOKENS) * ceil_div(D, self.COLUMNS)


class OfElements(ModelKernel):
    """A thread has EACH neighbours of an array."""

    EACH: ClassVar[int]
    threads = 256

    def blocks(self, count) -> int:
        return ceil_div(count, self.EACH * self.threads)


class Activation(OfElements):
    file = "rwkv6/activation"
    arguments = members("pointers x y, integers count")
    KINDS: ClassVar[tuple[str, ...]] = ("ReluSquared", "Tanh")
    EACH = 8
    kind: str
    X: np.dtype
    Y: np.dtype


class Widen(OfElements):
    file = "rwkv6/widen"
    arguments = members("pointers q scales w, integers count K")
    EACH = 16
    dtype: np.dtype


# -- prompts: all tokens at once ---------------------------------------------------------------------------------------
class ShiftMix(ModelKernel):
    file = "rwkv6/shift_mix"
    arguments = members("pointers x weight bias maa before shift starts ends xx d mixed, integers T D C, reals eps")
    shared = ("Shared",)
    WIDTHS: ClassVar[tuple[int, ...]] = (1, 2, 4)  # times 2048 channels
    threads = 512
    X: np.dtype
    EACH: int

    @classmethod
    def fitting(cls, X, D):
        """With the fewest registers, so that many tokens are under way."""
        return cls(X, next(width for width in cls.WIDTHS if D <= width * 4 * cls.threads))


class Openings(ModelKernel):
    """What data open by MATRICES of low rank: the decay, and of RWKV-7, which has four, three more. Y: their dtype."""

    file = "rwkv6/openings"
    arguments = members("pointers low up bases w, pointers? openings, integers tokens D R")
    shared = ("LowRank<{dtype}, {TILES}, {PARTS}>",)
    threads = 256
    dtype: np.dtype
    Y: np.dtype
    PARTS: int
    TILES: int
    MATRICES: int

    @classmethod
    def of_step(cls, dtype, matrices):
        return cls(dtype, FLOAT32, 3 if dtype == BFLOAT16 else 2, 1, matrices)

    @classmethod
    def of_prompt(cls, dtype, matrices):
        return cls(dtype, dtype, 2, 2, matrices)

    def blocks(self, tokens, D) -> int:
        return self.MATRICES * low_rank_blocks(self.TILES, tokens, D)


class OfHeads(ModelKernel):
    """A warp has a head of a token."""

    WIDTHS: ClassVar[tuple[int, ...]] = (1, 2, 4)  # times 64 channels
    threads = 256
    X: np.dtype
    PAIRS: int

    @classmethod
    def fitting(cls, X, N, **more):
        return cls(X, next(width for width in cls.WIDTHS if N <= 64 * width), **more)

    def blocks(self, rows) -> int:
        return ceil_div(rows * 32, self.threads)


class GatedNorm(OfHeads):
    file = "rwkv6/gated_norm"
    arguments = members(
        "pointers o, pointers? r k v, pointers gate weight bias, pointers? bonus, pointers y, "
        "integers rows H N, reals eps"
    )
    BONUS: bool  # of RWKV-7, whose gate is open already


class GatedAdd(OfElements):
    file = "rwkv6/gated_add"
    arguments = members("pointers x gate value, integers count")
    EACH = 4
    X: np.dtype


def affine(norm) -> dict:
    """The arguments of a kernel that applies a norm's weight and bias."""
    weight, bias = norm
    return {"weight": weight, "bias": bias}


def recurrence(draft: Draft, device, op, arrays: dict, o: Array, state, spans, scale):
    """The operator `op` on packed sequences, as a part of another plan.

    arrays : by name, those of tokens [1, H, T, N]
    state : (before, after), [N, H, N, N] each
    """
    before, after = state
    B, H, T, N = o.shape
    problem = Problem(
        op=op,
        arrays=MappingProxyType(arrays),
        sizes=MappingProxyType({"B": B, "H": H, "T": T, "K": N, "V": N, "N": spans.count}),
        options=MappingProxyType({"final_state": after}),
        dtype=o.dtype,
        spans=spans,
        varlen=True,
        layout="bthd",
        reverse=False,
        state_v_first=False,
        mode="chunk",
        chunk_size=None,
        materialize=None,
        precision="float32",
        scale=scale,
        initial_state=(before,),
        output_final_state=True,
        state_dtype=FLOAT32,
        out=o,
        home="cuda",
        kind="cupy",
    )
    draft.include(PLANNERS[op].plan(problem, device))
