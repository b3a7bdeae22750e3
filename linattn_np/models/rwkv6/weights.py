"""Which arrays RWKV-6's layers take, and the parameters that each of them holds.

One table for all: the layers on the CPU, those on the GPU, and the views of the parameters that a training changes.
Each of them decides on its own how an array is kept; what it is made of stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from .math import GROUP_NORM_EPS, LAYER_NORM_EPS
from .names import BLOCK, EPS, in_block


@dataclass(frozen=True)
class Weight:
    """An array that the layers take. Several parameters become a stack along a first axis, in this order.

    names : of the parameters, within a layer's block or in the whole model
    matrix : whether a product takes it; matrices are what half precision, weight decay and quantisation are for
    inputs_first : whether files have the matrix as (in, out), as those of low rank; the others are (out, in)
    """

    names: tuple[str, ...]
    matrix: bool = False
    inputs_first: bool = False


def vector(*names) -> Weight:
    return Weight(names)


def norm(name) -> Weight:
    return Weight((f"{name}.weight", f"{name}.bias"))


def linear(part, *names) -> Weight:
    return Weight(tuple(f"{part}.{name}.weight" for name in names), matrix=True)


def low_rank(name) -> Weight:
    return Weight((name,), matrix=True, inputs_first=True)


# The matrices come in the order in which a training's files have them.
LAYER = {
    "kvrg": linear("att", "key", "value", "receptance", "gate"),
    "output": linear("att", "output"),
    "ffn_key": linear("ffn", "key"),
    "ffn_receptance": linear("ffn", "receptance"),
    "ffn_value": linear("ffn", "value"),
    "maa_down": low_rank("att.time_maa_w1"),
    "maa_up": low_rank("att.time_maa_w2"),  # five, one for each of w k v r g
    "decay_down": low_rank("att.time_decay_w1"),
    "decay_up": low_rank("att.time_decay_w2"),
    "ln1": norm("ln1"),
    "ln2": norm("ln2"),
    "ln_x": norm("att.ln_x"),
    "maa_x": vector("att.time_maa_x"),
    "maa": vector(*(f"att.time_maa_{x}" for x in "wkvrg")),
    "decay": vector("att.time_decay"),
    "bonus": vector("att.time_faaaa"),
    "ffn_maa": vector("ffn.time_maa_k", "ffn.time_maa_r"),
}
MODEL = {
    "embedding": Weight(("emb.weight",), matrix=True),
    "head": Weight(("head.weight",), matrix=True),
    "ln0": norm("blocks.0.ln0"),
    "ln_out": norm("ln_out"),
}


def layer(prefix: str, array_of: Callable) -> SimpleNamespace:
    """The arrays of a layer: ``array_of(field, weight, full names)`` makes each of them."""
    return SimpleNamespace(
        **{field: array_of(field, weight, [prefix + name for name in weight.names]) for field, weight in LAYER.items()}
    )


def whole(array_of: Callable) -> SimpleNamespace:
    """The arrays of a model outside its layers."""
    return SimpleNamespace(**{field: array_of(field, weight, list(weight.names)) for field, weight in MODEL.items()})


def plain(weights, names) -> list:
    """The named parameters, without the leading axes of 1 that files have."""
    ones = BLOCK.get(in_block(names[0]), "").split().count("1")
    return [weights[name].reshape(weights[name].shape[ones:]) for name in names]


def stacked(arrays):
    """A new array of one array, or of several as a stack: a model's weights are neither a file's nor the caller's."""
    return np.stack(arrays) if len(arrays) > 1 else np.array(arrays[0])


def linears(layers: int) -> list[str]:
    """The names of the large matrices, all of them (out, in); the embedding, of which a token reads a row, is none."""
    found = ["head.weight"]
    for weight in LAYER.values():
        if weight.matrix and not weight.inputs_first:
            found += [f"blocks.{i}.{name}" for i in range(layers) for name in weight.names]
    return found


def eps(weights) -> tuple[float, float]:
    """Of the layer norms and of the group norm."""
    found = weights.get(EPS, (LAYER_NORM_EPS, GROUP_NORM_EPS))
    return float(found[0]), float(found[1])


def tuned(weights) -> list:
    """Initial states, [H, N, N] of each layer, or none; files have value by key, states key by value."""
    return [array.swapaxes(1, 2) for name, array in weights.items() if name.endswith("time_state")]
