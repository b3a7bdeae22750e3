"""The layout of a trained model's parameters in one vector, which an optimiser updates as one array."""

from math import prod
from types import SimpleNamespace

import numpy as np

from .version import NORM_EPS_NAME, Version, initial_states, name_in_block


class Layout:
    """The place of each parameter of a version's model in a vector.

    Matrices come first, because only they are rounded and have weight decay. Parameters that are stacked as one weight
    are adjacent, in the order of the stack.

    sizes, axes, shapes : {axis: size}; {official name: axes}; {official name: shape} in the vector's order
    spans : {official name: (start, end) in the vector}; `size` is the vector's length
    matrices : the number of the vector's first elements that are matrices'
    parts : (start, end) of each layer's matrices; the first part includes the matrices outside the layers
    eps : of the layer norms, and of the group norm, which are not trained
    """

    version: Version

    @classmethod
    def sizes_of(cls, layers: int, width: int, head_size: int, vocabulary: int = 256) -> dict[str, int]:
        """{axis: size} for `Version.parameter_axes`; ContractError if the sizes do not fit each other.

        A version's low ranks and the width of its channel mix depend on `width`.
        """
        refuse = cls.version.refuse
        for name, size in (("layers", layers), ("width", width), ("head_size", head_size)):
            if size < 1:
                refuse(f"{name} is {size}, expected at least 1")
        if width % head_size:
            refuse(f"width {width} is no multiple of the head size {head_size}")
        sizes = {"1": 1, "5": 5, "L": layers, "D": width, "H": width // head_size, "N": head_size, "V": vocabulary}
        return sizes | cls.version_sizes(width)

    @staticmethod
    def version_sizes(width: int) -> dict[str, int]:
        """{axis: size} of the axes that a version adds."""
        raise NotImplementedError

    def __init__(self, sizes, weights=None):
        """`weights`, by official name, are the initial weights of a training; None for random ones. They say the norms'
        eps, and whether a trained initial state is among the parameters."""
        known = weights or {}
        self.eps = self.version.norm_eps(known)
        self.constants = {name: known[name] for name in (NORM_EPS_NAME,) if name in known}
        self.has_initial_state = any(name.endswith("time_state") for name in known)
        self.initial_weights, self.sizes = weights, sizes
        self.axes = self.version.parameter_axes(sizes["L"], self.has_initial_state)
        names = sorted(self.axes, key=self.sort_key)
        self.shapes = {name: tuple(sizes[axis] for axis in self.axes[name].split()) for name in names}
        ends = np.cumsum([prod(shape) for shape in self.shapes.values()]).tolist()
        self.spans = dict(zip(self.shapes, zip([0, *ends], ends)))
        self.size = ends[-1]
        matrix_ends = {name: end for name, (_, end) in self.spans.items() if self.version.is_matrix(name)}
        self.matrices = max(matrix_ends.values())
        layer_ends = [
            max(end for name, end in matrix_ends.items() if name.startswith(f"blocks.{i}.")) for i in range(sizes["L"])
        ]
        self.parts = list(zip([0, *layer_ends], layer_ends))

    def named(self, vector) -> dict:
        """Views of `vector` by official name, in the official shapes and order; and norms' eps, if not the usual."""
        return self.views(vector) | self.constants

    def views(self, vector) -> dict:
        """The views of `named`."""
        return {name: vector[slice(*self.spans[name])].reshape(self.shapes[name]) for name in self.axes}

    def tree(self, vector, matrices=None) -> SimpleNamespace:
        """Views of `vector` as the weights of `Version.model_arrays`, with `eps`, and `layers`, a list of
        `Version.layer_arrays`. A layer's trained initial state is `start` [H, N (keys), N (values)].

        Matrices are views of `matrices`, if it is given: a copy of the vector's matrices in another dtype. A matrix is
        [K, M], for products x W, or a stack of such if a weight has several.
        """

        def array_of(field, weight, names):
            """The named parameters, which are adjacent in the vector, as one array; a stack if there are several."""
            source = matrices if weight.matrix and matrices is not None else vector
            first, last = self.spans[names[0]][0], self.spans[names[-1]][1]
            shape = tuple(self.sizes[axis] for axis in self.axes[names[0]].split() if axis != "1")
            stack = source[first:last].reshape(len(names), *shape)[slice(None) if names[1:] else 0]
            return stack if not weight.matrix or weight.inputs_first or field == "embedding" else stack.swapaxes(-1, -2)

        tree = self.version.model_arrays(array_of)
        tree.eps = self.eps
        tree.layers = [self.version.layer_arrays(f"blocks.{i}.", array_of) for i in range(self.sizes["L"])]
        if self.has_initial_state:
            for layer, start in zip(tree.layers, initial_states(self.views(vector))):
                layer.start = start
        return tree

    def initial(self, seed) -> np.ndarray:
        """The float32 vector of the initial weights."""
        if self.initial_weights is not None:
            return self.vector(self.initial_weights)
        rng, vector = np.random.default_rng(seed), np.empty(self.size, np.float32)
        for name, array in self.views(vector).items():
            depth = int(name.split(".")[1]) if name.startswith("blocks.") else 0
            array[...] = self.initial_value(name_in_block(name), array.shape, depth, rng)
        return vector

    def vector(self, weights) -> np.ndarray:
        """The float32 vector of `weights`, by official name."""
        vector = np.empty(self.size, np.float32)
        for name, array in self.views(vector).items():
            array[...] = weights[name]
        return vector

    def initial_value(self, name, shape, depth, rng):
        """The initial value of a parameter, or an array that broadcasts to it. `name`: its name within a block, whose
        number is `depth`; outside of blocks `depth` is 0."""
        raise NotImplementedError

    def sort_key(self, name):
        """The sort key of a parameter: matrices before others, by layer (those outside the layers first), then in the
        order of `Version.matrix_names`."""
        layer = int(name.split(".")[1]) if name.startswith("blocks.") else -1
        matrix = self.version.is_matrix(name)
        return (0, layer, self.version.matrix_names.index(name_in_block(name))) if matrix else (1, layer, 0)
