"""The parameters of a model to be trained, all in one vector: an optimiser's step is a step of one array."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace

import numpy as np

from .version import Version, name_in_block


class Layout:
    """Where each parameter of a version's model lies in a vector.

    Matrices come first, as weight decay and rounding are theirs alone; those that one product takes as a stack lie side
    by side in its order, as do the mixes.
    """

    version: Version

    @classmethod
    def sizes_of(cls, layers: int, width: int, head_size: int, vocabulary: int = 256) -> dict[str, int]:
        """The size of every axis that `Version.parameter_axes` has; ContractError where they do not go together.

        The ranks of a version and its channel mix's width follow the width.
        """
        refuse = cls.version.refuse
        for name, size in (("layers", layers), ("width", width), ("head_size", head_size)):
            if size < 1:
                refuse(f"{name} is {size}, expected at least 1")
        if width % head_size:
            refuse(f"width {width} is no multiple of the head size {head_size}")
        sizes = {"1": 1, "5": 5, "L": layers, "D": width, "H": width // head_size, "N": head_size, "V": vocabulary}
        return sizes | cls.more_sizes(width)

    @staticmethod
    def more_sizes(width: int) -> dict[str, int]:
        """Of the axes that a version adds."""
        raise NotImplementedError

    def __init__(self, sizes, weights=None):
        """`weights`, by official name, are what a training starts from; without them, first values."""
        version, self.weights = self.version, weights
        self.sizes, self.axes = sizes, version.parameter_axes(sizes["L"])
        is_matrix, place = version.is_matrix, self.place
        self.shapes = {
            name: tuple(sizes[axis] for axis in self.axes[name].split()) for name in sorted(self.axes, key=place)
        }
        ends = np.cumsum([prod(shape) for shape in self.shapes.values()]).tolist()
        self.spans = dict(zip(self.shapes, zip([0, *ends], ends)))
        self.size = ends[-1]
        self.matrices = max(end for name, (_, end) in self.spans.items() if is_matrix(name))  # up to here
        layer_ends = (
            [end for name, (_, end) in self.spans.items() if is_matrix(name) and name.startswith(f"blocks.{i}.")]
            for i in range(sizes["L"])
        )
        ends = [max(found) for found in layer_ends]
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

        tree = self.version.model_arrays(array_of)
        tree.layers = [self.version.layer_arrays(f"blocks.{i}.", array_of) for i in range(self.sizes["L"])]
        return tree

    def initial(self, seed) -> np.ndarray:
        """A float32 vector to start from."""
        if self.weights is not None:
            return self.vector(self.weights)
        rng, vector = np.random.default_rng(seed), np.empty(self.size, np.float32)
        for name, array in self.named(vector).items():
            array[...] = self.first(name, array.shape, rng)
        return vector

    def vector(self, weights) -> np.ndarray:
        """The float32 vector of `weights`, by official name."""
        vector = np.empty(self.size, np.float32)
        for name, array in self.named(vector).items():
            array[...] = weights[name]
        return vector

    def first(self, name, shape, rng):
        """The first value of a parameter, or what broadcasts to it."""
        raise NotImplementedError

    def place(self, name):
        """What sorts the parameters: matrices before the others, in their order within a layer."""
        layer = int(name.split(".")[1]) if name.startswith("blocks.") else -1
        matrix = self.version.is_matrix(name)
        return (0, layer, self.version.matrices.index(name_in_block(name))) if matrix else (1, layer, 0)
