"""The kernels of RWKV-6's training steps besides those of the operators, and how they are launched.

T is the dtype of what products take and give, the activations'. THREADS have eight channels each.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .arguments import members, structs
from .kernel import Kernel

WIDTHS = (32, 64, 96, 128, 192, 256)  # threads of a block that has a token's channels
MOST_CHANNELS = 8 * WIDTHS[-1]
HEADS = (8, 16, 32, 64, 128, 256)  # channels of a head that neighbouring lanes can share
DROPOUT = structs("drop", 1, members("pointers seeds, integers site, reals rate"))


def width(D: int) -> int:
    """THREADS of the kernels that have a token's D channels at once."""
    return next(threads for threads in WIDTHS if D <= 8 * threads)


def launch(device, kernel, blocks: int, /, **fields):
    """`fields` are those of the kernel's argument, arrays as they are."""
    device.launch(kernel, blocks, kernel.pack(**{name: address(device, value) for name, value in fields.items()}))


def address(device, value):
    """The address of an array; any other value unchanged."""
    return device.pointer(value) if hasattr(value, "strides") else value


class OfTokens(Kernel):
    """A block has all channels of a token."""

    T: np.dtype
    THREADS: int

    @property
    def threads(self):
        return self.THREADS


class Elementwise(Kernel):
    """A thread has eight elements."""

    threads = 256
    T: np.dtype


class AddNorm(OfTokens):
    file = "training/add_norm"
    arguments = (
        *members("pointers x first value table read weight bias y moments xx, integers T_ D"),
        *DROPOUT,
        *members("reals eps"),
    )
    shared = ("Shared<{THREADS} / 32>",)
    CHANGES: ClassVar[tuple[str, ...]] = ("Added", "Gated", "Embedded", "Kept")
    change: str


class MixForward(Elementwise):
    file = "training/mix_forward"
    arguments = members("pointers xx maa m mixed, integers tokens T_ D")
    MIXES: ClassVar[tuple[int, ...]] = (1, 2, 5, 6)
    C: int


class MixBackward(OfTokens):
    file = "training/mix_backward"
    arguments = members("pointers dmixed m maa xx dxx dd parts, integers tokens T_ D each")
    shared = ("Shared<{THREADS}>",)


class NormBackward(OfTokens):
    file = "training/norm_backward"
    arguments = (
        *members(
            "pointers dxx dd dmixed maa xx x moments weight dy dx first value dfirst dvalue parts, "
            "integers tokens T_ D each"
        ),
        *DROPOUT,
    )
    shared = ("Shared<{THREADS} / 32>",)
    CHANGES: ClassVar[tuple[str, ...]] = ("Added", "Gated")
    MIXES: ClassVar[tuple[int, ...]] = (0, 1, 2, 6)
    change: str
    C: int


class GatedNormBackward(OfTokens):
    file = "training/gated_norm_backward"
    arguments = members("pointers dy o gate weight bias do_ dgate parts, integers tokens D N each, reals eps")


class LogDecayForward(Elementwise):
    file = "training/log_decay_forward"
    arguments = members("pointers low decay w, integers count D")


class LogDecayBackward(OfTokens):
    file = "training/log_decay_backward"
    arguments = members("pointers dw w dlow parts, integers tokens D each")


class ActivationBackward(Kernel):
    file = "training/activation_backward"
    arguments = members("pointers dy y, integers count")
    threads = 256
    kind: str  # of `Activation.KINDS`
    T: np.dtype


class CrossEntropy(Kernel):
    file = "training/cross_entropy"
    arguments = members("pointers logits read losses, integers tokens T_ V, reals share")
    threads = 256
    TOKENS: ClassVar[int] = 8  # of a block, a warp each
    T: np.dtype


class ColumnSums(Kernel):
    file = "training/column_sums"
    arguments = members("pointers parts first rest, integers P columns split")
    shared = ("Shared",)
    threads = 1024
    COLUMNS: ClassVar[int] = 32  # of a block


class SquareSums(Kernel):
    file = "training/square_sums"
    arguments = members("pointers x parts, integers count blocks")
    shared = ("Shared",)
    threads = 512


class AdamW(Kernel):
    file = "training/adamw"
    arguments = members(
        "pointers weights gradient first second copy squares schedule, integers count matrices P blocks, "
        "reals clip beta1 beta2 eps"
    )
    shared = ("Shared",)
    threads = 512
    T: np.dtype
