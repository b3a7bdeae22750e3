"""RWKV models in GGUF files, as llama.cpp's converter writes them.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Parameters come back under the official names and in the official shapes: matrices in float32, float16 and bfloat16 as
the file has them, quantised ones (Q8_0, Q4_0 and what else the `gguf` package widens) in float32.
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
MAX_HEADER = 1 << 25  # bytes before the tensors; a vocabulary's words are among them
MAX_NAME = 1024
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))  # by the file's number of a type, as in struct
STRING, ARRAY = 8, 9
FLOATS = {0: np.dtype(np.float32), 1: np.dtype(np.float16), 30: np.dtype(ml_dtypes.bfloat16)}
ALIGNMENT = "general.alignment"

WHOLE = {
    "token_embd.weight": "emb.weight",
    "token_embd_norm.weight": "blocks.0.ln0.weight",
    "token_embd_norm.bias": "blocks.0.ln0.bias",
    "output_norm.weight": "ln_out.weight",
    "output_norm.bias": "ln_out.bias",
    "output.weight": "head.weight",
}
NORMS = {"attn_norm": "ln1", "attn_norm_2": "ln2", "time_mix_ln": "att.ln_x"}
LINEAR = ("receptance", "key", "value", "gate", "output")
ARRAYS = {"rwkv6": "time_maa_{}", "rwkv7": "x_{}"}  # what the official names call the mixes
LERPS = {"rwkv6": "wkvrg", "rwkv7": "rwkvag"}  # the order of the mixes in one array
LOW_RANK = ("w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2", "decay_w1", "decay_w2")
EPS, GROUP_EPS = 1e-5, 64e-5  # of the layer norms, where the file says nothing, and of the group norm
MAX_DIGITS, MAX_HALVINGS = 4, 15  # of a layer's number, and of its residual: 2^15 is in every dtype's range


class Numbers(NamedTuple):
    """What a file says of its model.

    rescale : after how many layers llama.cpp halves the residual, and the converter what is added to it; 0 for never
    """

    head_size: int
    rescale: int
    eps: float


@np.errstate(all="ignore")  # damaged numbers become what they become
def read(data, path) -> dict[str, np.ndarray]:
    """The weights in a GGUF file, whose bytes are `data`; FileError where it holds no RWKV-6 or RWKV-7, or is damaged,
    NotSupported where they are quantised and the package is missing."""
    fields, tensors, start = Header(data).read()
    kind = fields.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARRAYS:
        refuse(f"is a GGUF file of the architecture {shown(kind)}", "rwkv6 or rwkv7")
    numbers = Numbers(
        number(fields, f"{kind}.wkv.head_size", 64, 1),
        number(fields, f"{kind}.rescale_every_n_layers", 0, 0),
        fields.get(f"{kind}.attention.layer_norm_epsilon", EPS),
    )
    if not is_real(numbers.eps) or not 0 < numbers.eps < math.inf:
        refuse(f"has the layer_norm_epsilon {shown(numbers.eps)}", "a number above 0")
    found: dict[str, np.ndarray] = {}
    claimed, quantised = 0, [name for name, tensor in tensors.items() if tensor.type not in FLOATS]
    if quantised and not find_spec("gguf"):
        raise NotSupported(
            f"{path}: {shown(quantised[0])} is quantised, which the package gguf reads: pip install 'linattn-np[gguf]'"
        )
    for name, tensor in tensors.items():
        array = stored(data, start, name, tensor)
        if (claimed := claimed + array.nbytes) > len(data):
            refuse(f"has tensors of {claimed} bytes up to {shown(name)}", f"the {len(data)} of the file, each once")
        array = array if tensor.type in FLOATS else dequantised(array, tensor.type, name)
        try:
            parts = official(kind, name, array, numbers)
        except FileError:
            raise
        except ValueError:
            refuse(f"{shown(name)} is {array.shape}", f"the shape that {kind} has there")
        if twice := sorted(found.keys() & parts.keys()):
            refuse(f"has {shown(twice[0])} twice, the second time as {shown(name)}", "it once")
        found |= parts
    if "head.weight" not in found and "emb.weight" in found:  # tied
        found["head.weight"] = found["emb.weight"]
    if numbers.eps != np.float32(EPS):
        found["norm_eps"] = np.array([numbers.eps, GROUP_EPS])
    return found


def number(fields, name, default, least) -> int:
    """A whole number that the file says, or what holds where it says nothing."""
    value = fields.get(name, default)
    if not is_int(value) or value < least:
        refuse(f"has the {name} {shown(value)}", f"a whole number from {least} up")
    return value


# -- the file ---------------------------------------------------------------------------------------------------------
class Tensor(NamedTuple):
    """A tensor of the header: its type's number in the file, its shape as NumPy has it, and its first byte behind the
    header."""

    type: int
    shape: tuple[int, ...]
    offset: int


class Header:
    """Reads what stands before the tensors, from its first byte to its last; nothing that it claims takes memory or
    time before the file is found to hold it."""

    def __init__(self, data):
        self.data, self.at, self.end = data, 0, min(len(data), MAX_HEADER)

    def read(self) -> tuple[dict, dict[str, Tensor], int]:
        """(single values by name, tensors by name, the byte at which their numbers begin)."""
        version = (self.skip(len(MAGIC)), self.number("I"))[1]
        if version not in VERSIONS:
            refuse(f"is a GGUF file of version {version}", f"{' or '.join(map(str, VERSIONS))}, little-endian")
        tensors, fields = self.number("Q"), self.number("Q")
        values = self.named(fields, lambda: self.value(self.number("I")))
        places = self.named(tensors, self.tensor)
        alignment = number(values, ALIGNMENT, 32, 1)
        if alignment & (alignment - 1):
            refuse(f"has the {ALIGNMENT} {shown(alignment)}", "a power of 2")
        return values, places, self.at + -self.at % alignment

    def named(self, count, read) -> dict:
        found = {}
        for _ in range(count):
            if (name := self.text(MAX_NAME)) in found:
                refuse(f"has {shown(name)} twice", "names that differ")
            found[name] = read()
        return found

    def value(self, kind):
        """A number, a text, or None for an array, which is passed over."""
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
            refuse(f"has a value of type {inner} at byte {self.at}", "numbers, texts, and arrays of them")
        return None

    def tensor(self) -> Tensor:
        if (axes := self.number("I")) > MAX_AXES:
            refuse(f"has a tensor of {axes} axes", f"up to {MAX_AXES}")
        shape = tuple(self.number("Q") for _ in range(axes))[::-1]
        return Tensor(self.number("I"), shape, self.number("Q"))

    def number(self, layout):
        return struct.unpack_from(f"<{layout}", self.data, self.skip(struct.calcsize(layout)))[0]

    def text(self, most) -> str:
        if (size := self.number("Q")) > most:
            refuse(f"has a text of {size} bytes", f"up to {most}")
        start = self.skip(size)
        return self.data[start : start + size].decode("utf-8", "backslashreplace")

    def skip(self, size) -> int:
        """The byte behind which it goes on."""
        start = self.at
        if size > self.end - start:
            refuse(f"is damaged: its header has {size} more bytes at byte {start} of {self.end}", "a sound GGUF file")
        self.at += size
        return start


def stored(data, start, name, tensor) -> np.ndarray:
    """A view of a tensor: floats, or the bytes of blocks of quantised numbers."""
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
    """How many numbers a block of a quantised tensor has, and how many bytes."""
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        return GGML_QUANT_SIZES[GGMLQuantizationType(type)]
    except (ValueError, KeyError):
        refuse(f"{shown(name)} has the type {type}", "one that the package gguf knows")


def dequantised(array, type, name) -> np.ndarray:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        return dequantize(array, GGMLQuantizationType(type))
    except NotImplementedError:
        refuse(f"{shown(name)} is {GGMLQuantizationType(type).name}", "a format that the package gguf widens")


# -- names and shapes -------------------------------------------------------------------------------------------------
def official(kind, name, array, numbers) -> dict[str, np.ndarray]:
    """A tensor under its official name, or the several that it holds; what has no such name keeps its own."""
    if name in WHOLE:
        return {WHOLE[name]: array}
    if not name.startswith("blk.") or name.count(".") != 3:
        return {name: array}
    _, i, part, ending = name.split(".")
    block = f"blocks.{i}"
    if part in NORMS:
        return {f"{block}.{NORMS[part]}.{ending}": array.reshape(-1)}
    module, _, leaf = part.removeprefix("channel_").removeprefix("time_").partition("_")
    to = f"{block}.{'ffn' if part.startswith('channel_') else 'att'}"
    if leaf in LINEAR:
        return {f"{to}.{leaf}.weight": rescaled(array, to, leaf, i, numbers)}
    if leaf == "lerp_fused":
        mixes = array.reshape(len(LERPS[kind]), 1, 1, -1)
        return {f"{to}.{ARRAYS[kind].format(mix)}": its for mix, its in zip(LERPS[kind], mixes)}
    if leaf.startswith("lerp_"):
        return {f"{to}.{ARRAYS[kind].format(leaf[-1])}": array.reshape(1, 1, -1)}
    if leaf in LOW_RANK:
        array = array.swapaxes(-1, -2)
    if kind == "rwkv7":
        heads = leaf == "r_k"
        shape = (-1, numbers.head_size) if heads else (1, 1, -1) if leaf not in LOW_RANK else array.shape
        return {f"{to}.{leaf}": array.reshape(shape)}
    if leaf == "first":
        return {f"{to}.time_faaaa": array.reshape(-1, numbers.head_size)}
    if leaf in ("w1", "w2"):
        leaf = f"maa_{leaf}"
    return {f"{to}.time_{leaf}": array.reshape(1, 1, -1) if leaf == "decay" else array}


def rescaled(array, to, leaf, i, numbers):
    added = leaf == "output" or to.endswith(".ffn") and leaf == "value"
    if not added or not numbers.rescale or not i.isdecimal() or len(i) > MAX_DIGITS:
        return array
    if (halvings := int(i) // numbers.rescale) > MAX_HALVINGS:
        refuse(f"has a residual that is halved {halvings} times by layer {i}", f"at most {MAX_HALVINGS}")
    return array * array.dtype.type(2**halvings)
