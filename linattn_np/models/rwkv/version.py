"""The tables in which versions of RWKV differ: parameters, their names in files, and the arrays that the layers take.

One set of tables for all: the layers on the CPU, those on the GPU, and the views of the parameters that a training
changes. Each of them decides on its own how an array is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NoReturn

import numpy as np

from ...errors import ContractError, ContractTypeError

LAYER_NORM_EPS = 1e-5
GROUP_NORM_EPS = 64e-5  # whatever the head size is
EPS = "norm_eps"  # may be among the weights, [2]: the eps of layer norms and of the group norm, unless official ones
TUNED = {"att.time_state": "H N N"}  # in every block or in none: a tuned initial state, value by key


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


# Of every version: the parameters of the whole model with their axes, and the arrays that the layers take of them.
EMBEDDING = {"emb.weight": "V D", "blocks.0.ln0.weight": "D", "blocks.0.ln0.bias": "D"}
HEAD = {"ln_out.weight": "D", "ln_out.bias": "D", "head.weight": "V D"}
MODEL = {
    "embedding": Weight(("emb.weight",), matrix=True),
    "head": Weight(("head.weight",), matrix=True),
    "ln0": norm("blocks.0.ln0"),
    "ln_out": norm("ln_out"),
}


@dataclass(frozen=True)
class Version:
    """A version of RWKV.

    owner : the class of its models, which errors begin with
    title : what errors call the version
    block : every parameter of a layer's block and its axes; an axis gets its size where it is first named. Linear
        weights are (out, in)
    layer : the arrays that a layer takes, by field
    first_layer_lacks : parameters of a block that the first block does not have; files may bring them, unread
    naming : of weights the prefix of their blocks, and a function from an official name to the name in the file and
        what makes the official array of the file's
    others : of weights, the parts of names that give other versions away, with these versions
    fla_fields : flash-linear-attention's fields that change what is computed, with the one value of each that is
        computed here
    fla_eps : of its norms, where its config says nothing
    fla_group_factor : of weights with its names, the group norm's eps as a multiple of the layer norms'
    """

    owner: str
    title: str
    block: dict[str, str]
    layer: dict[str, Weight]
    naming: Callable[[Mapping], tuple[str, Callable]]
    others: Callable[[Mapping], Mapping[str, str]]
    fla_fields: dict[str, object]
    fla_eps: float
    fla_group_factor: Callable[[Mapping], float]
    first_layer_lacks: frozenset[str] = frozenset()

    # -- refusals ----------------------------------------------------------------------------------------------------
    def refuse(self, complaint: str, error=ContractError) -> NoReturn:
        raise error(f"{self.owner}: {complaint}")

    def one_of(self, dtype, accepted, where=""):
        """`dtype` as NumPy's, once it is one of those `accepted`."""
        try:
            found = np.dtype(dtype)
        except TypeError:
            found = repr(dtype)
        if not any(found == one for one in accepted):
            expected = f"expected {', '.join(map(str, accepted))}{where}"
            self.refuse(f"dtype is {found}, {expected}", ContractTypeError)
        return found

    # -- parameters --------------------------------------------------------------------------------------------------
    def declared(self, layers, tuned=False) -> dict[str, str]:
        """Official names of all the parameters of a model, and their axes."""
        block = self.block | TUNED if tuned else self.block
        blocks = {
            f"blocks.{i}.{name}": axes
            for i in range(layers)
            for name, axes in block.items()
            if i or name not in self.first_layer_lacks
        }
        return EMBEDDING | blocks | HEAD

    @property
    def matrices(self) -> list[str]:
        """The names of all matrices, in a layer's block or in the whole model, in the order of the tables."""
        weights = (*self.layer.values(), *MODEL.values())
        return [name for weight in weights if weight.matrix for name in weight.names]

    def is_matrix(self, name) -> bool:
        return in_block(name) in self.matrices

    def linears(self, layers: int) -> list[str]:
        """The names of the large matrices, all of them (out, in), but not the embedding."""
        found = ["head.weight"]
        for weight in self.layer.values():
            if weight.matrix and not weight.inputs_first:  # the first block lacks none of them
                found += [f"blocks.{i}.{name}" for i in range(layers) for name in weight.names]
        return found

    # -- arrays ------------------------------------------------------------------------------------------------------
    def layer_arrays(self, prefix: str, array_of: Callable) -> SimpleNamespace:
        """The arrays of a layer: ``array_of(field, weight, full names)`` makes each of them."""
        lacking = self.first_layer_lacks if prefix == "blocks.0." else frozenset()
        return SimpleNamespace(
            **{
                field: array_of(field, weight, [prefix + name for name in weight.names])
                for field, weight in self.layer.items()
                if not lacking.issuperset(weight.names)
            }
        )

    def whole_arrays(self, array_of: Callable) -> SimpleNamespace:
        """The arrays of a model outside its layers."""
        return SimpleNamespace(
            **{field: array_of(field, weight, list(weight.names)) for field, weight in MODEL.items()}
        )

    def plain(self, weights, names) -> list:
        """The named parameters, without the leading axes of 1 that files have."""
        ones = self.block.get(in_block(names[0]), "").split().count("1")
        return [weights[name].reshape(weights[name].shape[ones:]) for name in names]

    def norm_eps(self, weights) -> tuple[float, float]:
        """Of the layer norms and of the group norm."""
        found = weights.get(EPS, (LAYER_NORM_EPS, GROUP_NORM_EPS))
        return float(found[0]), float(found[1])


def in_block(name: str) -> str:
    """A name without its block's prefix."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def stacked(arrays):
    """A new array of one array, or of several as a stack: a model's weights are neither a file's nor the caller's."""
    return np.stack(arrays) if len(arrays) > 1 else np.array(arrays[0])


def tuned(weights) -> list:
    """Initial states, [H, N, N] of each layer, or none; files have value by key, states key by value."""
    return [array.swapaxes(1, 2) for name, array in weights.items() if name.endswith("time_state")]


def output_scale(dtype) -> float:
    """The scale of the recurrence where its result is kept in `dtype`, whose numbers may be few: float16 ends at 65504.

    It is a power of two, and a group norm with its square times eps takes it away again.
    """
    return 2.0**-6 if dtype == np.float16 else 1.0


def unit_of_squares(dtype) -> int:
    """The unit in which kernels keep the channel mix's squares in `dtype`: float16 has none from 256 on."""
    return 2048 if dtype == np.float16 else 1
