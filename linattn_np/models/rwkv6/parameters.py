"""The parameters of an RWKV-6 model to be trained, all in one vector: an optimiser's step is a step of one array."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace

import numpy as np

from . import weights as table
from .names import declared, in_block
from .refusals import refuse
from .weights import LAYER, MODEL

# Matrices come first in the vector, as weight decay and rounding are theirs alone; those that one product takes as a
# stack lie side by side in its order, as do the mixes.
MATRICES = [name for weight in (*LAYER.values(), *MODEL.values()) if weight.matrix for name in weight.names]

# What the first outputs of a layer are scaled by: at first the residual passes everything by.
SCALES = {
    "att.output.weight": 0,
    "ffn.value.weight": 0,
    "ffn.receptance.weight": 0,
    "att.key.weight": 0.1,
    "att.gate.weight": 0.1,
    "att.time_maa_w1": 0,
    "att.time_decay_w1": 0,
    "head.weight": 0.5,
}


def sizes_of(layers: int, width: int, head_size: int, vocabulary: int = 256) -> dict[str, int]:
    """The size of every axis that `names.declared` has; ContractError where they do not go together.

    The ranks and the channel mix's width follow the width: 32, 64 and 896 at 256.
    """
    for name, size in (("layers", layers), ("width", width), ("head_size", head_size)):
        if size < 1:
            refuse(f"{name} is {size}, expected at least 1")
    if width % head_size:
        refuse(f"width {width} is no multiple of the head size {head_size}")
    A, W = max(8, width // 8), max(8, width // 4)
    return {
        "1": 1,
        "5": 5,
        "L": layers,
        "D": width,
        "H": width // head_size,
        "N": head_size,
        "V": vocabulary,
        "F": width * 7 // 2,
        "A": A,
        "5A": 5 * A,
        "W": W,
    }


class Layout:
    """Where each parameter lies in the vector.

    Example
    -------
    >>> layout = Layout(sizes_of(layers=2, width=64, head_size=16))
    >>> weights = layout.named(layout.initial(seed=0))
    >>> weights["blocks.1.att.time_faaaa"].shape, layout.size == sum(array.size for array in weights.values())
    ((4, 16), True)
    """

    def __init__(self, sizes):
        self.sizes, self.axes = sizes, declared(sizes["L"])
        self.shapes = {
            name: tuple(sizes[axis] for axis in self.axes[name].split()) for name in sorted(self.axes, key=place)
        }
        ends = np.cumsum([prod(shape) for shape in self.shapes.values()]).tolist()
        self.spans = dict(zip(self.shapes, zip([0, *ends], ends)))
        self.size = ends[-1]
        self.matrices = max(end for name, (_, end) in self.spans.items() if is_matrix(name))  # up to here
        ends = [max(end for name, (_, end) in self.spans.items() if of_layer(name, i)) for i in range(sizes["L"])]
        self.parts = list(zip([0, *ends], ends))  # of each layer's matrices; the first has the whole model's too

    def named(self, vector) -> dict:
        """Views of `vector` by official name, in the official shapes and order."""
        views = {name: vector[slice(*self.spans[name])].reshape(shape) for name, shape in self.shapes.items()}
        return {name: views[name] for name in self.axes}

    def tree(self, vector, matrices=None) -> SimpleNamespace:
        """Views of `vector`, and of `matrices` instead where it is given, as `weights` has them, with `layers`.

        A matrix is [K, M], for products x W; those that meet several inputs side by side are stacks of such.
        """

        def array_of(field, weight, names):
            """The named parameters, neighbours in the vector, as one array; a stack if there are several."""
            whose = matrices if weight.matrix and matrices is not None else vector
            first, last = self.spans[names[0]][0], self.spans[names[-1]][1]
            shape = tuple(self.sizes[axis] for axis in self.axes[names[0]].split() if axis != "1")
            stack = whose[first:last].reshape(len(names), *shape)[slice(None) if names[1:] else 0]
            return stack if not weight.matrix or weight.inputs_first or field == "embedding" else stack.swapaxes(-1, -2)

        tree = table.whole(array_of)
        tree.layers = [table.layer(f"blocks.{i}.", array_of) for i in range(self.sizes["L"])]
        return tree

    def initial(self, seed) -> np.ndarray:
        """A float32 vector to start from (Peng et al., "Eagle and Finch", 2024, appendix on initialisation)."""
        rng, vector = np.random.default_rng(seed), np.empty(self.size, np.float32)
        for name, array in self.named(vector).items():
            array[...] = initial(name, array.shape, self.sizes, rng)
        return vector


def is_matrix(name):
    return in_block(name) in MATRICES


def of_layer(name, layer):
    return is_matrix(name) and name.startswith(f"blocks.{layer}.")


def place(name):
    """What sorts the parameters: matrices before the others, in their order within a layer."""
    layer = int(name.split(".")[1]) if name.startswith("blocks.") else -1
    return (0, layer, MATRICES.index(in_block(name))) if is_matrix(name) else (1, layer, 0)


def initial(name, shape, sizes, rng):
    """The first value of a parameter, or what broadcasts to it."""
    D, L, part = sizes["D"], sizes["L"], in_block(name)
    depth = int(name.split(".")[1]) if name.startswith("blocks.") else 0
    rising, falling = depth / max(1, L - 1), 1 - depth / L  # 0 to 1, and 1 to almost 0
    channel = np.arange(D) / D
    if part == "emb.weight":
        return rng.normal(0, 0.1, shape)
    if part in ("att.time_maa_w2", "att.time_decay_w2"):
        return rng.uniform(-0.01, 0.01, shape)
    if is_matrix(name):
        inputs = shape[0] if part in ("att.time_maa_w1", "att.time_decay_w1") else shape[-1]
        return rng.normal(0, inputs**-0.5, shape) * SCALES.get(part, 1)
    if part == "att.time_decay":
        return -6 + 5 * (np.arange(D) / max(1, D - 1)) ** (0.7 + 1.3 * rising)
    if part == "att.time_faaaa":
        zigzag = (np.arange(D) + 1) % 3 - 1
        return (rising * (1 - np.arange(D) / max(1, D - 1)) + 0.1 * zigzag).reshape(shape)
    if "time_maa" in part:
        power = {"r": 0.5, "g": 0.5}.get(part[-1], 1) if part.startswith("att") else 1
        return 1 - channel ** (power * falling) - (0.3 * rising if part == "att.time_maa_v" else 0)
    return float(part.endswith("weight"))  # of a norm; its bias is 0
