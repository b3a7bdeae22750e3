"""RWKV models in GGUF files, as llama.cpp's converter writes them.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Parameters get the official names and shapes. Matrices in float32, float16 or bfloat16 keep their dtype. Quantised ones
(Q8_0, Q4_0 and all others that the package `gguf` can convert) become float32.
"""

import math
import struct
from importlib.util import find_spec
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ..argument_checks import is_int, is_real
from ..errors import NotSupported
from .files import FileError, refuse
from .number_checks import shown
from .stored_zip import MAX_AXES

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_HEADER = 1 << 25  # the most bytes before the tensors, with the words of a vocabulary
MAX_NAME = 1024
# {the file's number of a type: its letter in `struct`}, then the numbers of other types
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))
STRING, ARRAY = 8, 9
FLOATS = {0: np.dtype(np.float32), 1: np.dtype(np.float16), 30: np.dtype(ml_dtypes.bfloat16)}
ALIGNMENT = "general.alignment"

OUTSIDE_BLOCKS = {
    "token_embd.weight": "emb.weight",
    "token_embd_norm.weight": "blocks.0.ln0.weight",
    "token_embd_norm.bias": "blocks.0.ln0.bias",
    "output_norm.weight": "ln_out.weight",
    "output_norm.bias": "ln_out.bias",
    "output.weight": "head.weight",
}
NORMS = {"attn_norm": "ln1", "attn_norm_2": "ln2", "time_mix_ln": "att.ln_x"}
LINEAR = ("receptance", "key", "value", "gate", "output")
MIXES = {"rwkv6": "time_maa_{}", "rwkv7": "x_{}"}  # the official names of the mixes' weights
MIX_ORDER = {"rwkv6": "wkvrg", "rwkv7": "rwkvag"}  # the order of the mixes in a file's array of all of them
LOW_RANK = ("w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2", "decay_w1", "decay_w2")
# The eps of the layer norms if the file does not say it, of the group norm, and the name in the result that has both
# if they are others: those of rwkv/version.py, as a test compares.
EPS, GROUP_EPS, EPS_NAME = 1e-5, 64e-5, "norm_eps"
MAX_DIGITS, MAX_HALVINGS = 4, 15  # of a layer's number; of the residual, since 2^15 is in every dtype's range


class Numbers(NamedTuple):
    """Numbers of the model in a file's header.

    rescale : llama.cpp halves the residual after every `rescale` layers, 0 for never. Accordingly the converter has
        halved the matrices whose products are added to the residual
    """

    head_size: int
    rescale: int
    eps: float

    @classmethod
    def of(cls, fields, architecture) -> "Numbers":
        """Those in the header's `fields`, {name: value}; FileError for others than a model can have."""
        eps = fields.get(f"{architecture}.attention.layer_norm_epsilon", EPS)
        if not is_real(eps) or not 0 < eps < math.inf:
            refuse(f"has the layer_norm_epsilon {shown(eps)}", "a number above 0")
        head_size = number(fields, f"{architecture}.wkv.head_size", 64, 1)
        return cls(head_size, number(fields, f"{architecture}.rescale_every_n_layers", 0, 0), eps)


@np.errstate(all="ignore")  # a damaged file may have numbers that overflow when they are converted
def read(data, path) -> dict[str, np.ndarray]:
    """The weights in a GGUF file with the bytes `data`. FileError if it has no RWKV-6 or RWKV-7 model, or is damaged;
    NotSupported if its weights are quantised and the package `gguf` is missing."""
    fields, tensors, start = Header(data).read()
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in MIXES:
        refuse(f"is a GGUF file of the architecture {shown(architecture)}", "rwkv6 or rwkv7")
    numbers = Numbers.of(fields, architecture)
    weights: dict[str, np.ndarray] = {}
    claimed, quantised = 0, [name for name, tensor in tensors.items() if tensor.type not in FLOATS]
    if quantised and not find_spec("gguf"):
        raise NotSupported(
            f"{path}: {shown(quantised[0])} is quantised, which the package gguf reads: pip install 'linattn-np[gguf]'"
        )
    for name, tensor in tensors.items():
        array = stored(data, start, name, tensor)
        if (claimed := claimed + array.nbytes) > len(data):
            refuse(f"has tensors of {claimed} bytes up to {shown(name)}", f"at most the {len(data)} of the file")
        array = array if tensor.type in FLOATS else dequantised(array, tensor.type, name)
        try:
            parts = official(architecture, name, array, numbers)
        except FileError:  # is a ValueError, too
            raise
        except ValueError:
            refuse(f"{shown(name)} is {array.shape}", f"the shape that {architecture} has there")
        if twice := sorted(weights.keys() & parts.keys()):
            refuse(f"has {shown(twice[0])} twice, the second time as {shown(name)}", "it once")
        weights |= parts
    if "head.weight" not in weights and "emb.weight" in weights:  # the head and the embedding are one matrix
        weights["head.weight"] = weights["emb.weight"]
    if numbers.eps != np.float32(EPS):
        weights[EPS_NAME] = np.array([numbers.eps, GROUP_EPS])
    return weights


def number(fields, name, default, least) -> int:
    """The whole number that a field of the header has, or `default` if there is no such field."""
    value = fields.get(name, default)
    if not is_int(value) or value < least:
        refuse(f"has the {name} {shown(value)}", f"a whole number from {least} up")
    return value


# -- the file ---------------------------------------------------------------------------------------------------------
class Tensor(NamedTuple):
    """A tensor of the header: the number of its type in the file, its shape in NumPy's order, and its first byte,
    counted from where the tensors begin: the header's end, rounded up to the alignment."""

    type: int
    shape: tuple[int, ...]
    offset: int


class Header:
    """Reads the part of a file before the tensors, from its first byte to its last. Sizes in it are checked against the
    file's length before they cost memory or time."""

    def __init__(self, data):
        self.data, self.position, self.end = data, 0, min(len(data), MAX_HEADER)

    def read(self) -> tuple[dict, dict[str, Tensor], int]:
        """(single values by name, tensors by name, the byte at which their numbers begin)."""
        self.skip(len(MAGIC))  # which the caller of `read` has seen
        if (version := self.number("I")) not in VERSIONS:
            refuse(f"is a GGUF file of version {version}", f"{' or '.join(map(str, VERSIONS))}, little-endian")
        tensors, fields = self.number("Q"), self.number("Q")
        values = self.named(fields, lambda: self.value(self.number("I")))
        descriptions = self.named(tensors, self.tensor)
        alignment = number(values, ALIGNMENT, 32, 1)
        if alignment & (alignment - 1):
            refuse(f"has the {ALIGNMENT} {shown(alignment)}", "a power of 2")
        return values, descriptions, self.position + -self.position % alignment

    def named(self, count, read) -> dict:
        """{name: read()} for the next `count` entries."""
        found = {}
        for _ in range(count):
            if (name := self.text(MAX_NAME)) in found:
                refuse(f"has {shown(name)} twice", "names that differ")
            found[name] = read()
        return found

    def value(self, kind):
        """The next value, of the type number `kind`: a number or a text; None for an array, which is skipped."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text(MAX_HEADER)
        inner, count = (self.number("I"), self.number("Q")) if kind == ARRAY else (kind, 0)
        if inner in SCALARS:
            self.skip(count * struct.calcsize(SCALARS[inner]))
        elif inner == STRING:
            for _ in range(count):
                self.skip(self.number("Q"))
        else:
            refuse(f"has a value of type {inner} at byte {self.position}", "numbers, texts, and arrays of them")
        return None

    def tensor(self) -> Tensor:
        """The next tensor's description."""
        if (axes := self.number("I")) > MAX_AXES:
            refuse(f"has a tensor of {axes} axes", f"up to {MAX_AXES}")
        shape = tuple(self.number("Q") for _ in range(axes))[::-1]
        return Tensor(self.number("I"), shape, self.number("Q"))

    def number(self, layout):
        """The next number; `layout`: its letter in `struct`."""
        return struct.unpack_from(f"<{layout}", self.data, self.skip(struct.calcsize(layout)))[0]

    def text(self, most) -> str:
        """The next text, of at most so many bytes."""
        if (size := self.number("Q")) > most:
            refuse(f"has a text of {size} bytes", f"up to {most}")
        start = self.skip(size)
        return self.data[start : start + size].decode("utf-8", "backslashreplace")

    def skip(self, size) -> int:
        """Skips `size` bytes; returns the first of them."""
        start = self.position
        if size > self.end - start:
            refuse(f"is damaged: its header has {size} more bytes at byte {start} of {self.end}", "a sound GGUF file")
        self.position += size
        return start


def stored(data, start, name, tensor) -> np.ndarray:
    """A view of a tensor: its floats, or uint8 for quantised numbers, which are in blocks of bytes."""
    *rows, row = tensor.shape or (1,)
    if tensor.type in FLOATS:
        dtype = FLOATS[tensor.type]
    else:
        block, size = block_of(name, tensor.type)
        if row % block:
            refuse(f"{shown(name)} has rows of {row} numbers", f"a multiple of {block}")
        dtype, row = np.dtype(np.uint8), row // block * size
    size, first = math.prod(rows) * row * dtype.itemsize, start + tensor.offset
    if not 0 < size <= len(data) - first:
        refuse(f"is damaged: {shown(name)} has {size} bytes from byte {first} of {len(data)}", "a sound GGUF file")
    return np.ndarray((*rows, row), dtype, data, first)


def block_of(name, type) -> tuple[int, int]:
    """(the numbers, the bytes) of a block of a quantised tensor."""
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        return GGML_QUANT_SIZES[GGMLQuantizationType(type)]
    except (ValueError, KeyError):
        refuse(f"{shown(name)} has the type {type}", "one that the package gguf knows")


def dequantised(array, type, name) -> np.ndarray:
    """The float32 array of a quantised tensor."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        return dequantize(array, GGMLQuantizationType(type))
    except NotImplementedError:
        refuse(f"{shown(name)} is {GGMLQuantizationType(type).name}", "a format that the package gguf widens")


# -- names and shapes -------------------------------------------------------------------------------------------------
def official(architecture, name, array, numbers) -> dict[str, np.ndarray]:
    """{official name: array} of a tensor, or of the several parameters that it holds. A tensor without an official name
    keeps its own."""
    if name in OUTSIDE_BLOCKS:
        return {OUTSIDE_BLOCKS[name]: array}
    if not name.startswith("blk.") or name.count(".") != 3:
        return {name: array}
    _, i, part, ending = name.split(".")
    block = f"blocks.{i}"
    if part in NORMS:
        return {f"{block}.{NORMS[part]}.{ending}": array.reshape(-1)}
    _, _, leaf = part.removeprefix("channel_").removeprefix("time_").partition("_")
    prefix = f"{block}.{'ffn' if part.startswith('channel_') else 'att'}"
    if leaf in LINEAR:
        return {f"{prefix}.{leaf}.weight": rescaled(array, prefix, leaf, i, numbers)}
    if leaf == "lerp_fused":
        mixes, order = MIXES[architecture], MIX_ORDER[architecture]
        weights = array.reshape(len(order), 1, 1, -1)
        return {f"{prefix}.{mixes.format(mix)}": weight for mix, weight in zip(order, weights)}
    if leaf.startswith("lerp_"):
        return {f"{prefix}.{MIXES[architecture].format(leaf[-1])}": array.reshape(1, 1, -1)}
    if leaf in LOW_RANK:  # the converter has transposed them
        array = array.swapaxes(-1, -2)
    if architecture == "rwkv7":
        shape = array.shape if leaf in LOW_RANK else (-1, numbers.head_size) if leaf == "r_k" else (1, 1, -1)
        return {f"{prefix}.{leaf}": array.reshape(shape)}
    if leaf == "first":
        return {f"{prefix}.time_faaaa": array.reshape(-1, numbers.head_size)}
    if leaf in ("w1", "w2"):
        leaf = f"maa_{leaf}"
    return {f"{prefix}.time_{leaf}": array.reshape(1, 1, -1) if leaf == "decay" else array}


def rescaled(array, prefix, leaf, i, numbers):
    """The matrix `leaf` of layer i as it was before the converter halved it, see `Numbers`."""
    is_added = leaf == "output" or prefix.endswith(".ffn") and leaf == "value"  # to the residual
    if not is_added or not numbers.rescale or not i.isdecimal() or len(i) > MAX_DIGITS:
        return array
    if (halvings := int(i) // numbers.rescale) > MAX_HALVINGS:
        refuse(f"has a residual that is halved {halvings} times by layer {i}", f"at most {MAX_HALVINGS}")
    return array * array.dtype.type(2**halvings)
