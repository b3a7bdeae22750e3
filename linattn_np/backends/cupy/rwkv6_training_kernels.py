"""The kernels of training steps of RWKV models besides those of the operators, and how they are launched.

A class declares one CUDA kernel: its annotated fields are the template's arguments, in order, and `arguments` the
members of struct Args, with `?` if they may be null. The kernel's file has its equations and shapes. Words:

    T           the dtype of activations; as a kernel argument it is T_, the tokens of a sequence
    D, N, V     channels of the model, channels of a head, tokens of the vocabulary
    C           mixes of a layer's half: mixed_c = xx + (previous xx - xx) (maa_c + m_c)
    parts       sums over the tokens of each block, which `ColumnSums` adds up
    d...        a gradient: dy is that of y

A thread computes eight channels.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import numpy as np

from .arguments import Packed, members, structs
from .arithmetic import ceil_div
from .kernel import Kernel

# Names of arguments: dx or x_gradient, the gradient of x; six of `KeysBackward` (of r, w, key, v, a, b) come from the
# recurrence's backward pass. dd, of d, the previous token's xx less the token's. table: the embedding; weight, bias,
# eps: of a norm; H: heads. mixed_v: v mixed with the first layer's; bases: added to logits before their sigmoid.
# scores: of each token and head the bonus's factor of v, and its gradient. `AdamW`: first, second: moments; squares: P
# sums of squares of the gradient; schedule: rate, 1 - rate decay and the corrections of both moments; clip: the largest
# norm; matrices: how many numbers, from the first on, are in matrices, which decay and have a `copy` in T

NO_ADDRESSES = np.zeros(0, np.int64)  # the words of a launch without a plan have them already
WIDTHS = (32, 64, 96, 128, 192, 256, 320, 512)  # the possible THREADS of `TokenKernel`
MOST_CHANNELS = 8 * WIDTHS[-1]  # the most D
# Arguments that kernels share. tokens: those of all sequences; tokens_per_block: those that a block takes one after the
# other; token_ids: the text, T + 1 of each sequence; count: the numbers of an array; moments [tokens, 2]: mean and
# 1 / deviation of a norm; first, value: the arrays of the change that `AddNorm` adds.
#
# The argument of kernels that apply dropout. `site`: the number of the place in the model where it is applied, so that
# places have different zeros; `rate`: the share of zeros.
DROPOUT = structs("drop", None, members("pointers seeds, int64s site, float64s rate"))


def width(D: int) -> int:
    """THREADS of a `TokenKernel` for D channels."""
    return next(threads for threads in WIDTHS if D <= 8 * threads)


def launch(device, kernel, blocks: int, /, **args):
    """Launches a kernel at once, without a plan; `args`: the members of its argument struct, arrays of the device as
    they are."""
    packed = Packed(
        kernel.arguments, kernel.complete({name: address(device, value) for name, value in args.items()}), {}
    )
    device.launch(kernel, blocks, packed.filled(NO_ADDRESSES, partial(encoded, device)))


def encoded(device, tensor_map):
    """The driver's CUtensorMap of a `TensorMap` of an array of the device."""
    return device.tensor_map(tensor_map.array, tensor_map.columns, tensor_map.tokens, tensor_map.swizzled)


def address(device, value):
    """The address of an array; any other value unchanged."""
    return device.pointer(value) if hasattr(value, "strides") else value


class TokenKernel(Kernel):
    """The base of kernels whose blocks compute all channels of a token at a time."""

    T: np.dtype
    THREADS: int

    @property
    def threads(self):
        return self.THREADS

    @property
    def blocks_per_multiprocessor(self):
        return max(1, 1024 // self.THREADS)


class Elementwise(Kernel):
    """The base of kernels whose threads compute eight elements of an array."""

    threads = 256
    T: np.dtype


class AddNorm(TokenKernel):
    """y = x + dropout(change), xx = LayerNorm(y), and C plain mixes of xx. `change` is one of CHANGES: "Added": it is
    the array `first`; "Gated": sigmoid(first) value; "Embedded": y is the embedding of the token, with dropout; "Kept":
    there is none, y = x."""

    file = "training/add_norm"
    arguments = (
        *members(
            "pointers x first value table token_ids weight bias y moments xx d maa mixed, int64s tokens T_ D normed_row"
        ),
        *DROPOUT,
        *members("float64s eps"),
    )
    shared_memory = ("Shared<{THREADS} / 32>",)
    TOKENS: ClassVar[int] = 4  # of a block
    constants = (("TOKENS", "TOKENS"),)
    CHANGES: ClassVar[tuple[str, ...]] = ("Added", "Gated", "Embedded", "Kept")
    MIXES: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)  # the possible C
    change: str
    C: int


class MixForward(Elementwise):
    """RWKV-6's five mixes of all tokens, with weights that depend on the data."""

    file = "training/mix_forward"
    arguments = members("pointers xx maa m mixed, int64s tokens T_ D")
    MIXES: ClassVar[int] = 5
    constants = (("MIXES", "MIXES"),)


class MixBackward(TokenKernel):
    """The gradients of RWKV-6's five data-dependent mixes: of m, xx, the token shift and maa. Several blocks, `pieces`,
    compute the channels of a token if there are more than 8 of the largest of WIDTHS."""

    file = "training/mix_backward"
    arguments = members("pointers dmixed m maa xx dxx dd parts, int64s tokens T_ D tokens_per_block")
    shared_memory = ("Shared<{THREADS}>",)
    MIXES: ClassVar[int] = MixForward.MIXES
    constants = (("MIXES", "MIXES"),)
    WIDTHS: ClassVar[tuple[int, ...]] = tuple(threads for threads in WIDTHS if threads <= 256)  # the possible THREADS

    @classmethod
    def fitting(cls, T, D) -> MixBackward:
        """The instance with the fewest threads for D channels in the fewest pieces."""
        return cls(T, width(ceil_div(D, ceil_div(D, 8 * cls.WIDTHS[-1]))))

    def pieces(self, D) -> int:
        return ceil_div(D, 8 * self.THREADS)


class NormBackward(TokenKernel):
    """The gradients of `AddNorm`."""

    file = "training/norm_backward"
    arguments = (
        *members(
            "pointers dxx dd dmixed maa x moments weight bias dy dx first value dfirst dvalue parts, "
            "int64s tokens T_ D tokens_per_block"
        ),
        *DROPOUT,
    )
    shared_memory = ("Shared<{T}, {THREADS}, {C}>",)
    constants = (("blocks_with_registers({THREADS}, {C})", "blocks_per_multiprocessor"),)
    CHANGES: ClassVar[tuple[str, ...]] = ("Added", "Gated")  # the possible `change`, as in `AddNorm`
    MIXES: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)  # the possible C
    change: str
    C: int

    @property
    def blocks_per_multiprocessor(self):
        return max(1, (512 if self.C < 2 else 384) // self.THREADS)


class OfHeads(Kernel):
    """The base of kernels in which LANES lanes of a warp compute a head of one token, or of several, one after the
    other; a lane has eight channels. ALIGNED: whether heads have a multiple of 8 channels."""

    WIDTHS: ClassVar[tuple[int, ...]] = (8, 16, 32)  # the possible LANES
    MOST_CHANNELS: ClassVar[int] = 8 * WIDTHS[-1]  # of a head
    threads = 128
    T: np.dtype
    LANES: int
    ALIGNED: bool

    @classmethod
    def fitting(cls, T, N, **fields):
        """The instance for heads of N channels; `fields`: those of the derived class."""
        return cls(T, next(lanes for lanes in cls.WIDTHS if N <= 8 * lanes), N % 8 == 0, **fields)

    def blocks(self, heads) -> int:
        """Blocks for so many heads, each of one token, or of several."""
        return ceil_div(self.LANES * heads, self.threads)


class KeysBackward(OfHeads):
    """The gradients of `rwkv7_model_kernels.Keys`, and those of r, the key and the value through the bonus."""

    file = "training/keys_backward"
    arguments = members(
        "pointers k v decay_logits icl_logits, pointers? value_logits first_v, pointers bases removal replacement "
        "r gate dgated bonus scores r_gradient w_gradient key_gradient v_gradient a_gradient b_gradient "
        "first_v_gradients dr dk dv decay_logits_gradient icl_logits_gradient, pointers? value_logits_gradient, "
        "pointers parts, int64s tokens H N tokens_per_block later_layers"
    )
    constants = (("BLOCKS<{T}>", "blocks_per_multiprocessor"),)
    PARAMETERS: ClassVar[tuple[str, ...]] = ("decay", "icl", "value", "removal", "replacement")  # in `parts`

    @property
    def blocks_per_multiprocessor(self):
        return 2 if self.T == np.float32 else 3


class GatedNormBackward(OfHeads):
    """The gradients of `rwkv6_model_kernels.GatedNorm`. With BONUS those of r, key and v are left to `KeysBackward`,
    which computes them from the scores."""

    file = "training/gated_norm_backward"
    arguments = members(
        "pointers dy o gate, pointers? r key v, pointers weight bias, pointers? bonus, pointers do_ dgate, "
        "pointers? scores, pointers parts, int64s tokens H N tokens_per_block, float64s eps"
    )
    constants = (("PARAMETERS<{BONUS}>", "parameters"),)
    BONUS: bool

    @property
    def parameters(self) -> int:
        """The vectors in `parts`: weight, bias, and with BONUS the bonus."""
        return 2 + self.BONUS

    @property
    def blocks_per_multiprocessor(self):
        return 4 if self.BONUS else 5


class LowRanks(Kernel):
    """The joint matrix of the first matrices of RWKV-7's products of low rank: a token's xx and d times this matrix are
    the products with their mixes."""

    PRODUCTS: ClassVar[int] = 4
    LOW_RANK = members("pointers down ddown, int64s R mix_row")
    file = "training/low_ranks"
    arguments = (*structs("products", PRODUCTS, LOW_RANK), *members("pointers mix joint, int64s D"))
    constants = (("PRODUCTS", "PRODUCTS"), ("THREADS / 32 / PRODUCTS", "CHANNELS"))
    threads = 256
    CHANNELS: ClassVar[int] = 2  # of a block: a warp computes one of a product
    T: np.dtype


class LowRanksBackward(LowRanks):
    """The gradients of `LowRanks`: those of the first matrices and of the mixes' weights."""

    file = "training/low_ranks_backward"
    arguments = (
        *structs("products", LowRanks.PRODUCTS, LowRanks.LOW_RANK),
        *members("pointers mix dmix djoint, int64s D"),
    )


class LogDecayForward(Elementwise):
    """w = -exp(decay + low), the log of RWKV-6's decay."""

    file = "training/log_decay_forward"
    arguments = members("pointers low decay w, int64s count D")


class LogDecayBackward(TokenKernel):
    """The gradients of `LogDecayForward`."""

    file = "training/log_decay_backward"
    arguments = members("pointers dw w dlow parts, int64s tokens D tokens_per_block")


class CrossEntropy(Kernel):
    """The losses of all tokens, and their gradient in the place of the logits."""

    file = "training/cross_entropy"
    arguments = members("pointers logits token_ids losses, int64s tokens T_ V, float64s share")
    constants = (("THREADS / 32", "TOKENS"),)
    threads = 256
    TOKENS: ClassVar[int] = 8  # tokens per block: a warp computes one
    T: np.dtype


class ColumnSums(Kernel):
    """Up to MOST sums of P rows of `parts`: the first `split` columns go to the array `first`, the others to `rest`, to
    which they are added if `add`. first_block: the first block of a sum."""

    MOST: ClassVar[int] = 6  # RWKV-6 has five in a layer, and one of the norm after the last layer
    SUM = members("pointers parts first rest, int64s P columns split add first_block")
    file = "training/column_sums"
    arguments = (*structs("sums", MOST, SUM), *members("int64s count"))
    constants = (("MOST", "MOST"), ("COLUMNS", "COLUMNS"))
    shared_memory = ("Shared",)
    threads = 1024
    COLUMNS: ClassVar[int] = 32  # columns per block


class SquareSums(Kernel):
    """The sum of the squares of each block's part of x, from which the norm of a gradient is computed."""

    file = "training/square_sums"
    arguments = members("pointers x parts, int64s count blocks")
    shared_memory = ("Shared",)
    threads = 512


class AdamW(Kernel):
    """A step of AdamW over all parameters, with the gradient clipped by its norm, and a copy of the matrices in T."""

    file = "training/adamw"
    arguments = members(
        "pointers weights gradient first second copy squares schedule, int64s count matrices P blocks, "
        "float64s clip beta1 beta2 eps"
    )
    shared_memory = ("Shared",)
    threads = 512
    T: np.dtype
