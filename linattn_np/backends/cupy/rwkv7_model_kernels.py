"""The kernels of RWKV-7 models besides those of the operator and those of `rwkv6_model_kernels`. As there, X is the
dtype of a kernel's output that is an operand of the next matrix product, and TERMS is how many numbers of dtype X,
whose sum is exact, represent each float32 number of it; H heads have N channels each.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from . import rwkv6_model_kernels as rwkv6
from .arguments import members
from .arithmetic import padded
from .kernel import INT8, ModelKernel

# A class describes a kernel: its annotated fields are the template's arguments, in order; `arguments` the members of
# struct Args, which the compiler checks, with `?` if they may be null.
#
# Arguments of time mixes: v k r: products; w: the log of the decay; openings [3, ...]: the learning rate, the gate, and
# the share of the first layer's v, which is `first`, in the mixed v; removal, replacement: xi and alpha of the paper,
# which make keys of k; weight, bias, eps: of the group norm; slots: rows of `state`; y: the gated output in TERMS
# terms; token_heads: T H. Arguments of DecodeOne: as of `rwkv6.DecodeFew`; struct Args in rwkv7/decode_phases.cuh
# describes the others

DOWNS = 4  # products of low rank in a layer's time mix: for the decay, the learning rate, the gate and the value


class TimeMixOfToken(ModelKernel):
    """For a decoding step: the state update of one head of one sequence, its group norm, bonus and gate."""

    file = "rwkv7/time_mix_step"
    arguments = members(
        "pointers v k r w openings first removal replacement bonus weight bias state slots y, int64s B H N, float64s "
        "eps"
    )
    shared_memory = ("Scratch",)
    MOST_N: ClassVar[int] = 256
    constants: ClassVar[tuple] = (("MAX_N", "MOST_N"),)
    threads = 256
    X: np.dtype
    state: np.dtype
    TERMS: int


class TimeMixOfHeads(TimeMixOfToken):
    """`TimeMixOfToken` for heads of 64 channels: a warp computes one head of one sequence. A lane has ROWS rows of the
    state, the first HELD of them in registers and the others in shared memory."""

    file = "rwkv7/time_mix_batch"
    shared_memory = ("Shared",)
    threads = 32
    N: ClassVar[int] = 64
    ROWS: ClassVar[int] = 32
    constants = (("N", "N"), ("ROWS", "ROWS"))
    FEW: ClassVar[int] = 8  # blocks per multiprocessor, which has registers for so many with HELD = ROWS
    HELD: int

    @classmethod
    def fitting(cls, X, state, terms, blocks, device) -> tuple[TimeMixOfHeads, int]:
        """(the instance for so many blocks, the bytes of shared memory for rows of the state). Few blocks leave shared
        memory to those of the next kernel, which copy weights meanwhile. Of many, more fit on a multiprocessor with
        HELD = 4, and copies to shared memory are faster than loads, which L1 holds up."""
        kernel, more_shared = cls(X, state, terms, 4), (cls.ROWS - 4) * 2 * cls.N * state.itemsize
        of_block = kernel.shared_bytes + more_shared + 1024  # the driver takes 1024 bytes
        if blocks > cls.FEW * device.multiprocessors and device.shared_per_multiprocessor > cls.FEW * of_block:
            return kernel, more_shared
        return cls(X, state, terms, cls.ROWS), 0


class DecodeOne(rwkv6.DecodeFew):
    """A whole decoding step of one sequence in one launch, as RWKV-6's."""

    file = "rwkv7/decode_one"
    arguments = members(
        "pointers down vkr output ffn_key ffn_value head down_scales vkr_scales output_scales ffn_key_scales "
        "ffn_value_scales head_scales up ln1 ln2 ln_x ln_out mix ffn_mix bases removal replacement bonus att_shift "
        "ffn_shift wkv slots xx low vkr_out y activated first_v x logits arrived, int64s L P D H N W A G Q F V "
        "staged first last, float64s eps group_eps"
    )
    PHASES = 5
    STAGES = (12, 11, 8, 4)

    def least_area(self, sizes) -> int:
        """Bytes for the operands of one mix and the norm of which all are made, or for a head's time mix: the inputs of
        four products of low rank, and the threads' sums of these or that of `TimeMixOfToken`."""
        rank = padded(max(sizes[axis] for axis in "WAGQ"), self.ROWS)
        head = TimeMixOfToken(self.dtype, self.state, 1)
        norm = self.bytes_of_norm * sizes["D"]
        return max(norm, 4 * DOWNS * rank + max(head.shared_bytes, 4 * DOWNS * 4 * head.threads))

    @property
    def bytes_of_norm(self) -> int:
        """Bytes per channel during a norm: one mix's operands, the kept norm, and with int8 the mix that becomes
        digits."""
        return self.bytes_of_operand + (8 if self.dtype == INT8 else 4)


class Keys(rwkv6.HeadKernel):
    """For prompts and training: the operator's w, k (`key`), a, b and v (`mixed_v`), from the time mix's products.
    Those of low rank, to which `bases` are added, are the logits of the decay, of the in-context learning rate and of
    the share of the first layer's value, `first_v`. Training's first layer has no such share."""

    file = "rwkv7/keys"
    arguments = members(
        "pointers k v decay_logits icl_logits, pointers? value_logits first_v, pointers w key, pointers? mixed_v, "
        "pointers a b bases removal replacement, int64s token_heads H N"
    )
