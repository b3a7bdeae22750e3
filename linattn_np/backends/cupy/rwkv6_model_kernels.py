"""The kernels of RWKV-6 models besides those of the operators: for decoding steps, which compute one token of B
sequences, and for prompts, whose T tokens are computed at once. RWKV-7 uses some of them, too.

A class declares one CUDA kernel: its annotated fields are the template's arguments, in order, and `arguments` the
members of struct Args, with `?` if they may be null. The kernel's file has its equations and shapes. Words:

    D, H, N     channels of the model, its heads, channels of a head
    B, T        sequences of a step, tokens of a prompt
    dtype       that of the weight matrices
    X           the dtype of a kernel's output that is an operand of the next matrix product
    TERMS       how many numbers of dtype X, whose sum is exact, represent each float32 number of such an output
    mix         an input of a matrix product: a token's normed channels xx, interpolated with the previous token's:
                mixed_c = xx + (previous - xx) maa_c. The half of a layer has C mixes, with the weights maa [C, D]
    shift       [.., D], a part of the recurrent state: the previous token's normed channels
    slots       [B], the row of the states that each sequence uses
    parts       arrays whose sum is the result of a product, which has divided its columns among blocks
    EACH        groups of four channels (or what the class says) per thread
"""

from __future__ import annotations

from math import gcd
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from ...array_kinds import BFLOAT16
from ...problem import Problem
from . import PLANNERS
from .arguments import members
from .arithmetic import ceil_div, padded
from .kernel import HALF, INT8, SM90, ModelKernel
from .plan import FLOAT32, Array, Draft

# Where a name is not what the docstring says. X: in ChosenNorm and ReluSquared the dtype of the input, and Y that of
# the output; in GatedAdd, whose arrays are float32, the dtype of the hidden layer, which sets the unit of `value`.
# PARTS: in DataMix and Openings, numbers of `up`'s dtype whose sum is one tanh(low). slots: in DecodeFew also places of
# 16 KB in shared memory.
# padded(n, m): n rounded up to a multiple of m; shared_bytes: the size of the types in `shared`.


# -- decoding ----------------------------------------------------------------------------------------------------------
class NormShift(ModelKernel):
    """For a step: sum = x + sigmoid(gate) * value; layer norm; token shift; C mixes. `shares` blocks compute a
    sequence, and each stores a part of the results."""

    file = "rwkv6/norm_shift"
    arguments = members(
        "pointers x sum value gate weight bias maa shift slots xx d mixed, int64s B D C P squares shares, float64s eps"
    )
    shared_memory = ("Shared<{EACH}, {MIXES}>",)
    SHARES: ClassVar[int] = 4  # the decoder's `shares` in a step of at most FEW sequences; of more sequences 1
    FEW: ClassVar[int] = 16
    # `squares`: whether `value` is a product of squares, in a unit of its own
    PARTS_AT_MOST: ClassVar[tuple[int, ...]] = (1, 4, 8)  # the possible PARTS, the most parts of `value`
    MIXES_AT_MOST: ClassVar[tuple[int, ...]] = (2, 6)  # the possible MIXES
    WIDTHS: ClassVar[tuple[int, ...]] = (1, 2, 4)  # the possible EACH; a block has threads for 2048 EACH channels
    threads = 512
    X: np.dtype
    EACH: int
    PARTS: int
    TERMS: int
    MIXES: int

    @classmethod
    def fitting(cls, X, D, C, parts, terms=1):
        """The instance with the least PARTS and MIXES: with few of both, two blocks fit on a multiprocessor."""
        each = next(width for width in cls.WIDTHS if D <= width * 4 * cls.threads)
        parts, mixes = (
            next(most for most in limits if n <= most)
            for n, limits in ((parts, cls.PARTS_AT_MOST), (C, cls.MIXES_AT_MOST))
        )
        return cls(X, each, parts, terms, mixes)


TIME_MIX = members(
    "pointers k v r gate decay_low decay_up decay_base bonus weight bias state slots y, int64s B H N W, float64s eps"
)


class TimeMixStep(ModelKernel):
    """For a step: decay, state update, group norm and gate. A block computes one head of one sequence. W is the rank of
    the decay's factors."""

    file = "rwkv6/time_mix_step"
    arguments = TIME_MIX
    shared_memory = ("TimeMixScratch",)
    threads, parts = 256, 1  # parts: the most parts of k, v, r and gate that the kernel adds up
    MOST_N: ClassVar[int] = 256
    MOST_W: ClassVar[int] = 512
    constants = (("MAX_N", "MOST_N"), ("MAX_W", "MOST_W"))
    dtype: np.dtype
    X: np.dtype
    state: np.dtype
    TERMS: int

    def blocks(self, B, H) -> int:
        return B * H


class TimeMixBatch(ModelKernel):
    """`TimeMixStep` for many sequences with heads of 64 channels: a warp computes one head of one sequence."""

    file = "rwkv6/time_mix_batch"
    arguments = (*TIME_MIX, *members("int64s P"))
    shared_memory = ("Shared<{SEQUENCES}>",)
    N: ClassVar[int] = 64
    constants = (("N", "N"), ("MOST_PARTS<{SEQUENCES}>", "parts"))
    MOST_PARTS: ClassVar[int] = 2  # the most parts of k, v, r and gate, in blocks of fewer than 8 sequences
    WIDTHS: ClassVar[tuple[int, ...]] = (8, 4, 2)  # the possible SEQUENCES
    dtype: np.dtype
    state: np.dtype
    TERMS: int
    SEQUENCES: int

    @classmethod
    def fitting(cls, dtype, state, terms, B, H, N, W, device) -> tuple[TimeMixBatch, int] | None:
        """(the instance, the bytes of shared memory for the decay's factors of rank W); None if the
        kernel cannot compute the step. The instance has the most sequences per block for which almost every
        multiprocessor has a block."""
        kernels = [cls(dtype, state, terms, width) for width in cls.WIDTHS]
        filling = (kernel for kernel in kernels if kernel.blocks(B, H) >= 0.9 * device.multiprocessors)
        kernel = next(filling, kernels[-1])
        more_shared = W * (4 * kernel.SEQUENCES + N * dtype.itemsize)
        limit = device.shared_per_multiprocessor // 2 - 1024  # two blocks; the driver takes 1024 bytes of each
        serves = N == cls.N and W % 2 == 0 and kernel.shared_bytes + more_shared <= limit
        return (kernel, more_shared) if serves else None

    @property
    def threads(self):
        return 32 * self.SEQUENCES

    @property
    def parts(self) -> int:
        """The most parts of k, v, r and gate that this instance adds up."""
        return self.MOST_PARTS if self.SEQUENCES < 8 else 1

    def blocks(self, B, H) -> int:
        return ceil_div(B, self.SEQUENCES) * H


# The arguments of DecodeFew: weights by their names in `rwkv6.weights`, their int8 scales; parts of the state; buffers
# between phases (`rwkv6.cuda_decode`), and `arrived`, how many layers each block has computed. L layers, P rows of the
# state, A and W the ranks, F channels of the channel mix, V tokens of the vocabulary. first, last: a range of phases.
class DecodeFew(ModelKernel):
    """A whole decoding step of one sequence in one launch, on Hopper. Blocks wait for each other's results without
    barriers: each number is stored as a word that also says of which layer it is.

    In each matrix product a block computes tiles of ROWS rows. Shared memory holds a ring of `stages` *slots* of 16 KB
    for weights, and an *input area* for the product's input.
    """

    file = "rwkv6/decode_few"
    arguments = members(
        "pointers maa_down decay_down kvrg output ffn_key ffn_receptance ffn_value head maa_down_scales "
        "decay_down_scales kvrg_scales output_scales ffn_key_scales ffn_receptance_scales ffn_value_scales "
        "head_scales maa_up decay_up ln1 ln2 ln_x ln_out maa_x maa ffn_maa decay bonus att_shift ffn_shift wkv slots "
        "xx low mixed kvrg_out decay_low y activated gate x logits arrived, int64s L P D H N A W F V staged "
        "first last, float64s eps group_eps"
    )
    shared_memory, arch, threads = ("Shared<{stages}>",), SM90, 384
    PHASES: ClassVar[int] = 7  # of a layer
    ROWS: ClassVar[int] = 16  # of a weight matrix per tile of the tensor cores
    STAGES: ClassVar[tuple[int, ...]] = (11, 8, 4)  # the possible `stages`
    DIGITS_AT_ONCE: ClassVar[int] = 8192  # the most input numbers in the area for int8 weights, which take digits
    # the compiler compares these pairs
    constants = (
        ("PHASES", "PHASES"),
        ("ROWS", "ROWS"),
        ("Lane<{dtype}>::STAGE", "slot"),
        ("MOST_DIGITS", "DIGITS_AT_ONCE"),
        ("DecodeOperands<{dtype}, {state}, {stages}>::OPERAND_BYTES", "bytes_of_operand"),
        ("DecodeOperands<{dtype}, {state}, {stages}>::NORM_BYTES", "bytes_of_norm"),
    )
    dtype: np.dtype
    state: np.dtype
    stages: int

    @classmethod
    def fitting(cls, dtype, state, sizes, device) -> tuple[DecodeFew, int] | None:
        """(the instance, the bytes of its input area), or None if shared memory is too small.

        The area holds what a norm and a head's time mix need. It also holds the whole input of the widest product, or
        half of it, if at least 11 stages then fit; else the whole if 8 fit. Otherwise that input is copied piece by
        piece.
        """
        D, largest = sizes["D"], max(sizes["D"], sizes["F"])
        for input_size, least_stages in ((largest, 11), (ceil_div(largest, 2), 11), (largest, 8), (D, cls.STAGES[-1])):
            for stages in cls.STAGES:
                kernel = cls(dtype, state, stages)
                area = max(kernel.bytes_of_operand * padded(max(D, input_size), kernel.slot), kernel.least_area(sizes))
                if stages >= least_stages and kernel.shared_bytes + area <= device.shared_per_block:
                    return kernel, area
        return None

    def least_area(self, sizes) -> int:
        """Bytes for whichever needs the most: the operands of two mixes and the norm from which they are computed; a
        head's time mix; tanh(low) of one of the five mixes, A numbers in float32."""
        norm = self.bytes_of_norm * sizes["D"]
        return max(norm, TimeMixStep(self.dtype, self.dtype, self.state, 1).shared_bytes, 4 * sizes["A"])

    def staged(self, area) -> int:
        """Numbers of a product's input that an input area of so many bytes holds at a time: a multiple of `slot`."""
        numbers = area // self.bytes_of_operand
        return (min(numbers, self.DIGITS_AT_ONCE) if self.dtype == INT8 else numbers) // self.slot * self.slot

    @property
    def slot(self) -> int:
        """Columns of a weight matrix in one slot of shared memory."""
        return 1024 // self.dtype.itemsize

    @property
    def bytes_of_operand(self) -> int:
        """Bytes of an input number in the input area: three bfloat16 numbers whose sum it is (bfloat16 weights), four
        int8 digits (int8 weights), or the float32 number itself."""
        return 6 if self.dtype == BFLOAT16 else 4

    @property
    def bytes_of_norm(self) -> int:
        """Bytes per channel in the input area during a norm: the operands of two mixes, the float32 norm, and with int8
        weights also the float32 mix that becomes digits. float32 operands overwrite the norm."""
        return 2 * self.bytes_of_operand + {BFLOAT16: 4, INT8: 8}.get(self.dtype, 0)


# -- decoding and prompts ----------------------------------------------------------------------------------------------
class ChosenNorm(ModelKernel):
    """Layer norms of some rows of x, those with the indices `chosen`: tokens' embeddings, or tokens of a prompt."""

    file = "rwkv6/chosen_norm"
    arguments = members("pointers chosen x weight bias y, int64s D, float64s eps")
    MOST_CHANNELS: ClassVar[int] = 8192
    constants = (("4 * THREADS * EACH", "MOST_CHANNELS"),)
    shared_memory = ("Shared",)
    threads = 512
    X: np.dtype
    Y: np.dtype

    @classmethod
    def launch(cls, draft: Draft, chosen, x, norm, y, eps):
        """Launches y = the norms of the rows `chosen` [B] of x. `norm`: its (weight, bias)."""
        draft.launch(cls(x.dtype, y.dtype), chosen.size, chosen=chosen, x=x, **affine(norm), y=y, eps=eps)


def parts_of_low(dtype, X, terms) -> int:
    """How many numbers of the dtype of `up` a step takes for a number of `low`: so many that its sum is as exact as
    products whose vectors are `terms` numbers of dtype X."""
    return 3 if dtype == BFLOAT16 and (X == FLOAT32 or terms > 1) else 2


class LowRankKernel(ModelKernel):
    """The base of kernels with a product by a matrix of low rank [rank, D]. A block computes COLUMNS of its columns for
    TILES tiles of tokens."""

    TILE_TOKENS: ClassVar[int] = 16
    COLUMNS: ClassVar[int] = 128
    constants: ClassVar[tuple] = (("TILE_TOKENS", "TILE_TOKENS"), ("COLUMNS", "COLUMNS"))
    threads = 256

    def blocks_of_product(self, tokens, D):
        return ceil_div(tokens, self.TILES * self.TILE_TOKENS) * ceil_div(D, self.COLUMNS)


class DataMix(LowRankKernel):
    """The five mixes w, k, v, r, g of RWKV-6's time mix, whose weights depend on the data: mixed_c = xx + (previous -
    xx) (maa_c + tanh(low_c) up_c), with `low` [5, T, A] and `up` [5, A, D] of low rank A.

    A block computes INPUTS of the five: all of them in a step of many sequences, so that it reads xx once; else one, so
    that more multiprocessors have a block. It computes TILES tiles of tokens. In its products each number tanh(low) is
    a sum of PARTS numbers of the dtype of `up`.
    """

    file = "rwkv6/data_mix"
    arguments = members("pointers low up maa xx d mixed, int64s tokens D A P")
    shared_memory = ("LowRank<{dtype}, {TILES}, {PARTS}>",)
    dtype: np.dtype
    X: np.dtype
    PARTS: int
    TILES: int
    INPUTS: int
    TERMS: int
    MIXES: ClassVar[int] = 5
    constants = (*LowRankKernel.constants, ("MOST_PARTS<{X}, {TILES}, {INPUTS}>", "most_parts"), ("MIXES", "MIXES"))

    # Both make cls(dtype, X, PARTS, TILES, INPUTS, TERMS).
    @classmethod
    def of_step(cls, dtype, X, B, terms=1):
        return cls(dtype, X, parts_of_low(dtype, X, terms), 1, cls.MIXES if B > 128 else 1, terms)

    @classmethod
    def of_prompt(cls, dtype):
        return cls(dtype, dtype, 2, 2, 1, 1)

    @property
    def most_parts(self) -> int:
        """The most parts of `low` that this instance adds up."""
        return 8 if self.TILES == self.INPUTS == 1 and self.X != FLOAT32 else 1

    def blocks(self, tokens, D) -> int:
        return self.blocks_of_product(tokens, D) * self.MIXES // self.INPUTS


class ElementwiseKernel(ModelKernel):
    """The base of kernels whose threads compute EACH neighbouring elements of an array each."""

    EACH: ClassVar[int]
    threads = 256

    def blocks(self, count) -> int:
        return ceil_div(count, self.EACH * self.threads)


class ReluSquared(ElementwiseKernel):
    """y = relu(x)^2, where the product that made x could not apply it; with `dy` its pullback, by y alone: dy is
    multiplied by the slope."""

    file = "rwkv6/relu_squared"
    arguments = members("pointers? x, pointers y, pointers? dy, int64s count")
    EACH = 8
    X: np.dtype
    Y: np.dtype


class HiddenActivation(ElementwiseKernel):
    """y = f(y) for one of NAMES, those of flash-linear-attention's `hidden_act` besides that of `ReluSquared`."""

    file = "rwkv6/hidden_activation"
    arguments = members("pointers y, int64s count")
    EACH = 8
    NAMES: ClassVar[dict[str, str]] = {
        **{"relu": "Relu", "gelu": "Gelu", "silu": "Silu", "swish": "Silu"},
        **{"sigmoid": "Sigmoid", "logsigmoid": "LogSigmoid"},
    }
    X: np.dtype
    function: str  # a value of NAMES


class LowActivations(ElementwiseKernel):
    """tanh and sigmoid of some columns of `y`, between the matrices of products of low rank, in place; with `dy` their
    pullback, by y alone: dy is multiplied by the slopes."""

    file = "rwkv6/low_activations"
    arguments = members("pointers y, pointers? dy, int64s count columns tanh_end sigmoid_begin sigmoid_end")
    EACH = 8
    T: np.dtype


class Widen(ElementwiseKernel):
    """w = scale q: an int8 matrix q, with a scale for each row, in the dtype of products."""

    file = "rwkv6/widen"
    arguments = members("pointers q scales w, int64s count K")
    EACH = 16
    dtype: np.dtype


# -- prompts: all tokens at once ---------------------------------------------------------------------------------------
class ShiftMix(ModelKernel):
    """`NormShift` for prompts: layer norm, token shift and C mixes of all tokens. A block computes `tokens_per_block`
    tokens together. `before` and `shift` are the states at the sequences' starts and ends; `starts` and `ends` say
    which tokens these are."""

    file = "rwkv6/shift_mix"
    arguments = members(
        "pointers x weight bias maa before shift starts ends xx d mixed, int64s T D C tokens_per_block, float64s eps"
    )
    shared_memory = ("Shared",)
    # The possible (EACH, TOKENS): a block has threads for 2048 EACH channels, and registers for TOKENS tokens at most.
    SHAPES: ClassVar[tuple[tuple[int, int], ...]] = (1, 2), (1, 8), (2, 3), (4, 3)
    RESIDENT: ClassVar[int] = 2  # blocks of a multiprocessor with EACH = 1: registers are for so many
    constants = (("BLOCKS<1>", "RESIDENT"),)
    threads = 512
    X: np.dtype
    EACH: int
    TOKENS: int

    @classmethod
    def fitting(cls, X, D, T, multiprocessors) -> tuple[ShiftMix, int]:
        """(the instance, the tokens of a block): so many of T that all blocks run at the same time, if registers hold
        them: a block normalises one token more than it has."""
        wanted = ceil_div(T, cls.RESIDENT * multiprocessors)
        EACH = next(each for each, _ in cls.SHAPES if D <= each * 4 * cls.threads)
        kernels = [cls(X, each, tokens) for each, tokens in cls.SHAPES if each == EACH]
        kernel = next((kernel for kernel in kernels if wanted <= kernel.TOKENS), kernels[-1])
        return kernel, min(kernel.TOKENS, wanted)


class Openings(LowRankKernel):
    """The MATRICES quantities of a token that products of low rank compute from its channels, in float32: w, the log of
    the decay; and, in RWKV-7's steps, three `openings`: the learning rate, the gate, and the share of the first layer's
    value. Their ranks are W, A, G and Q; all matrices have R rows."""

    file = "rwkv6/openings"
    arguments = members("pointers low up bases w, pointers? openings, int64s tokens D R W A G Q")
    shared_memory = ("LowRank<{dtype}, {TILES}, {PARTS}, {PASS}>",)
    dtype: np.dtype
    PARTS: int
    TILES: int
    MATRICES: int
    PASS: int = 64  # the numbers of a rank that shared memory holds at a time

    @classmethod
    def of_step(cls, dtype, X, B, terms, matrices):
        """The instance for a step. TILES is 1 for few sequences, so that there are enough blocks, and for float32, as
        registers do not hold the numbers of 4 tiles; else it is 4. PASS is 512 bytes, since each pass waits for memory.
        Numbers of `low` are rounded to `dtype` where the vectors of products are."""
        parts = 1 if X in HALF and terms == 1 else parts_of_low(dtype, X, terms)
        return cls(dtype, parts, 1 if B <= 64 or dtype == FLOAT32 else 4, matrices, 512 // dtype.itemsize)

    @classmethod
    def of_prompt(cls, dtype):
        """The instance for RWKV-6's prompts."""
        return cls(dtype, 2, 2, 1)

    def blocks(self, tokens, D) -> int:
        return self.MATRICES * self.blocks_of_product(tokens, D)


class HeadKernel(ModelKernel):
    """The base of kernels of which some lanes of a warp compute a head of a token: a lane has GROUPS groups of WIDTH
    neighbouring channels, and the groups are 64 channels apart."""

    CHANNELS_APART: ClassVar[int] = 64
    constants = (("CHANNELS_APART", "CHANNELS_APART"),)
    WIDTHS: ClassVar[tuple[int, ...]] = (8, 2)  # the possible WIDTH, of which heads have a multiple
    DEPTHS: ClassVar[tuple[int, ...]] = (1, 2, 4)  # the possible GROUPS
    PASSES: ClassVar[int] = 4
    ENOUGH: ClassVar[int] = 1000  # blocks
    threads = 128
    X: np.dtype
    WIDTH: int
    GROUPS: int

    @classmethod
    def fitting(cls, X, N, **fields):
        """The instance with the widest groups, and the fewest, for heads of N channels; `fields`: those of the derived
        class."""
        width = next(width for width in cls.WIDTHS if N % width == 0)
        return cls(X, width, next(groups for groups in cls.DEPTHS if N <= cls.CHANNELS_APART * groups), **fields)

    def blocks(self, tokens, H) -> int:
        """Blocks for H heads of so many tokens. If ENOUGH blocks are left, each computes the heads of up to PASSES
        blocks, so that it loads parameters less often; then the heads of all blocks together are whole tokens."""
        of_block = self.threads * self.WIDTH // self.CHANNELS_APART
        blocks = ceil_div(tokens * H, of_block)
        passes, whole = min(self.PASSES, blocks // self.ENOUGH), H // gcd(H, of_block)
        return blocks if passes < 2 else ceil_div(blocks, passes * whole) * whole


class GatedNorm(HeadKernel):
    """y = GroupNorm(o) silu(gate), a group for each head. With BONUS, for RWKV-7: y = (GroupNorm(o) + (sum r k bonus)
    v) gate, the sum over a head's channels."""

    file = "rwkv6/gated_norm"
    arguments = members(
        "pointers o, pointers? r k v, pointers gate weight bias, pointers? bonus, pointers y, "
        "int64s rows H N, float64s eps"
    )
    MANY: ClassVar[int] = 8  # GROUPS of more than 256 channels, which only RWKV-6's heads have
    MOST_N: ClassVar[int] = HeadKernel.CHANNELS_APART * MANY
    BONUS: bool

    @classmethod
    def fitting(cls, X, N, **fields):
        """As `HeadKernel.fitting`. Registers have no room for so many groups of 8 channels."""
        if N > cls.CHANNELS_APART * cls.DEPTHS[-1]:
            return cls(X, cls.WIDTHS[-1], cls.MANY, **fields)
        return super().fitting(X, N, **fields)


class GatedAdd(ElementwiseKernel):
    """x += sigmoid(gate) value, or x += value if `gate` is None."""

    file = "rwkv6/gated_add"
    arguments = members("pointers x gate value, int64s count")
    EACH = 4
    X: np.dtype


def affine(norm) -> dict:
    """The kernel arguments of a `norm`, given as (weight, bias)."""
    weight, bias = norm
    return {"weight": weight, "bias": bias}


def recurrence(draft: Draft, device, op, arrays: dict, o: Array, state, spans, scale, **options):
    """Adds to a draft the plan of the operator `op` in mode "chunk", on packed sequences.

    arrays : those of the operator by name; those with tokens are [1, H, T, N]
    o : the array [1, H, T, N] that gets the output
    state : (the states before, the array for those after all tokens), each [sequences, H, N, N]
    spans : the token ranges of the sequences, a `varlen.Spans`
    options : of the operator's planner
    """
    before, after = state
    B, H, T, N = o.shape
    problem = Problem(
        op=op,
        arrays=MappingProxyType(arrays),
        sizes=MappingProxyType({"B": B, "H": H, "T": T, "K": N, "V": N, "N": spans.count}),
        options=MappingProxyType({"final_state": after} | options),
        dtype=o.dtype,
        spans=spans,
        varlen=True,
        layout="bthd",  # the caller's order of axes, which planners do not read: the arrays here have heads first
        mode="chunk",
        scale=scale,
        initial_state=(before,),
        output_final_state=True,
        state_dtype=FLOAT32,
        out=o,
        home="cuda",
        kind="cupy",
    )
    draft.include(PLANNERS[op].plan(problem, device))
