"""RWKV models in GGUF files, as llama.cpp's converter writes them, through the `gguf` package.

Parameters come back under the official names and in the official shapes: matrices in float32, float16 and bfloat16 as
the file has them, quantised ones (Q8_0, Q4_0 and what else the package widens) in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import NotSupported
from .files import refuse
from .number_checks import shown

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


def read(path) -> dict[str, np.ndarray]:
    """The weights in a GGUF file; FileError where it holds no RWKV-6 or RWKV-7, NotSupported without the package."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise NotSupported(
            f"{path}: GGUF files are read by the package gguf, pip install 'linattn-np[gguf]': {error}"
        ) from None
    try:
        reader = GGUFReader(Path(path))
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, UnicodeDecodeError) as error:
        refuse(f"is damaged ({type(error).__name__}: {str(error)[:100]})", "a sound GGUF file")
    kind = value_of(reader, "general.architecture")
    if kind not in ARRAYS:
        refuse(f"is a GGUF file of the architecture {shown(kind)}", "rwkv6 or rwkv7")
    number: Callable = lambda name, default: value_of(reader, f"{kind}.{name}", default)
    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        found |= official(kind, name, array_of(tensor), number)
    if "head.weight" not in found and "emb.weight" in found:  # tied
        found["head.weight"] = found["emb.weight"]
    if (eps := float(number("attention.layer_norm_epsilon", EPS))) != np.float32(EPS):
        found["norm_eps"] = np.array([eps, GROUP_EPS])
    return found


def value_of(reader, name, default=None) -> Any:
    """What the file says under a name; `default` where it says nothing."""
    field = reader.get_field(name)
    return default if field is None else field.contents()


def array_of(tensor) -> np.ndarray:
    """A tensor's numbers, in the file's dtype if that is a float's."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return tensor.data
    if tensor.tensor_type == GGMLQuantizationType.BF16:
        return tensor.data.view(ml_dtypes.bfloat16)
    try:
        return dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        refuse(f"{shown(tensor.name)} is {tensor.tensor_type.name}", "a format that the package gguf widens")


def official(kind, name, array, number) -> dict[str, np.ndarray]:
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
        return {f"{to}.{leaf}.weight": rescaled(array, to, leaf, int(i) // rescale_of(number) if i.isdecimal() else 0)}
    if leaf == "lerp_fused":
        mixes = array.reshape(len(LERPS[kind]), 1, 1, -1)
        return {f"{to}.{ARRAYS[kind].format(mix)}": its for mix, its in zip(LERPS[kind], mixes)}
    if leaf.startswith("lerp_"):
        return {f"{to}.{ARRAYS[kind].format(leaf[-1])}": array.reshape(1, 1, -1)}
    if leaf in LOW_RANK:
        array = array.swapaxes(-1, -2)
    if kind == "rwkv7":
        heads = leaf == "r_k"
        shape = (-1, number("wkv.head_size", 64)) if heads else (1, 1, -1) if leaf not in LOW_RANK else array.shape
        return {f"{to}.{leaf}": array.reshape(shape)}
    if leaf == "first":
        return {f"{to}.time_faaaa": array.reshape(-1, number("wkv.head_size", 64))}
    if leaf in ("w1", "w2"):
        leaf = f"maa_{leaf}"
    return {f"{to}.time_{leaf}": array.reshape(1, 1, -1) if leaf == "decay" else array}


def rescale_of(number) -> int:
    """After how many layers llama.cpp halves the residual, and the converter what is added to it."""
    return int(number("rescale_every_n_layers", 0)) or 1 << 30


def rescaled(array, to, leaf, halvings):
    added = leaf == "output" or to.endswith(".ffn") and leaf == "value"
    return array * array.dtype.type(2**halvings) if added and halvings else array
