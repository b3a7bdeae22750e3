"""Fine-tuning of a model: of all its weights, of a low-rank adapter, or of its initial state.

Each class implements `protocols.Trainable`, which describes title, beside, trainable and loss, for a `Base`.

    Training(tokens, settings, kind=LowRank(Base.from_file("model.pth"), rank=16))
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import ContractError
from . import checkpoint
from .number_checks import checked_int, checked_number, shown
from .quantised import Stored
from .rwkv.adapters import LORA_A, LORA_ALPHA, LORA_B, adapter_name
from .rwkv.model import Model
from .rwkv.version import (
    GROUP_NORM_EPS,
    LAYER_NORM_EPS,
    NORM_EPS_NAME,
    SQRELU,
    hidden_act,
    name_in_block,
    number_of,
)
from .training_products import HostProducts
from .versions import kind_of

STATE = "att.time_state"


@dataclass
class Base:
    """The model from which training starts.

    kind : its class
    weights : {official name: float32 array}, copies; norms' eps are among them if they are not those of RWKV's files
    sizes : {axis of `Version.parameter_axes`: its size}
    quantised : "int8" or "int4" if the file's matrices were, which are float32 here
    """

    kind: type[Model]
    weights: dict[str, np.ndarray]
    sizes: dict[str, int]
    quantised: str | None = None

    @classmethod
    def from_file(cls, path) -> Base:
        """The model in any file that `models.load` reads; raises the same errors."""
        weights = checkpoint.read(path)
        try:
            return cls.of(weights, checkpoint.config(path))
        except ContractError as error:
            raise type(error)(f"{path}: {error}") from None

    @classmethod
    def of(cls, weights: Mapping, config: Mapping | None = None) -> Base:
        """The base with these weights, by any names that files have; ContractError if they are no model's."""
        kind = kind_of(weights)
        official, sizes = kind.parameters(weights, config)
        if (act := hidden_act(official)) != SQRELU:
            refuse(f"the channel mix has {act} (hidden_act), expected {SQRELU}: gradients of no other are computed")
        formats = [array.format for array in official.values() if isinstance(array, Stored)]
        # Copies: a file, or an array of the caller, may be written to while the training runs.
        copies = {name: np.array(array, np.float32) for name, array in official.items()}
        if np.allclose(kind.version.norm_eps(official), (LAYER_NORM_EPS, GROUP_NORM_EPS), rtol=1e-6, atol=0):
            copies.pop(NORM_EPS_NAME, None)
        return cls(kind, copies, sizes, formats[0] if formats else None)


class Whole:
    """All weights are trained."""

    beside = b""

    def __init__(self, base: Base):
        self.base, self.loss = base, base.kind.loss

    @cached_property
    def title(self) -> str:
        digest = hashlib.sha256()
        for array in self.base.weights.values():
            digest.update(np.ascontiguousarray(array).data)
        return f"{self.base.kind.title} from the model {digest.hexdigest()[:16]}"

    def trainable(self, layers, width, head_size):
        return self.base.kind.layout(self.base.sizes, self.base.weights)

    def model_weights(self, layout, vector) -> dict:
        """{official name: array} of the model, from the vector of trained parameters."""
        return layout.named(vector)


class BesideBase:
    """The base class of those that train parameters of their own, beside the model's, which do not change."""

    name: str  # of the trained parameters, in titles
    shapes: Callable[[], dict[str, tuple[int, ...]]]  # {name: shape} of the trained parameters
    constants: Callable[[], dict[str, np.ndarray]]  # {name: array} of further arrays in their files
    decays: bool  # whether weight decay applies to the trained parameters
    initial_value: Callable  # as in `Parameters`

    def __init__(self, base: Base):
        self.base = base
        self.layout = base.kind.layout(base.sizes, base.weights)
        self.vector: np.ndarray = self.layout.vector(base.weights)
        self.on_device: Any = None  # a copy of `vector` on the GPU, once a loss has been computed there
        self.title = f"{self.name} of {base.kind.title}"

    @cached_property
    def beside(self) -> bytes:
        constants = b"".join(array.tobytes() for array in (self.layout.constants | self.constants()).values())
        return hashlib.sha256(self.vector.data).digest() + constants + " ".join(self.shapes()).encode()

    def trainable(self, layers, width, head_size):
        constants = self.constants() | number_of(self.base.kind.version)
        return Parameters(self.base.sizes, self.shapes(), self.decays, self.initial_value, constants)

    def vector_for(self, products):
        """The vector of the model's parameters on the device of `products`."""
        if isinstance(products, HostProducts):
            return self.vector
        if self.on_device is None:
            self.on_device = products.device.upload(self.vector)
        return self.on_device

    def tree(self, vector, products):
        """The `Layout.tree` of `vector`, with matrices in the dtype of `products`."""
        return self.layout.tree(vector, products.cast(vector[: self.layout.matrices]))


class LowRank(BesideBase):
    """Low-rank adapters (Hu et al., 2021, arXiv:2106.09685): W + (alpha / rank) B A replaces each chosen matrix W.

    A [rank, in] starts from random numbers and B [out, rank] from zeros. Files name them as the matrix, with `lora_A`
    and `lora_B` in place of `weight`, as in RWKV-PEFT.

    rank : from 1 up to the model's channels
    alpha : by default `rank`, so that the factor is 1
    matrices : names in a layer, such as ["att.key", "ffn.value"]; by default those of all large matrices

    ContractError for a rank, an alpha or matrices of other values.
    """

    name, decays = "a low-rank adapter", True

    def __init__(self, base: Base, rank: int, alpha: float | None = None, matrices: Iterable[str] | None = None):
        super().__init__(base)
        self.rank = checked_int("LowRank", "rank", rank, 1, base.sizes["D"])
        self.alpha = checked_number(
            "LowRank", "alpha", rank if alpha is None else alpha, "a number above 0", lambda x: x > 0
        )
        large = [name for name in self.base.kind.version.large_matrices(base.sizes["L"]) if name.startswith("blocks.")]
        usual = dict.fromkeys(map(name_in_layer, large))
        chosen = set(usual if matrices is None else matrices)
        if not chosen or chosen - usual.keys():
            found = shown(", ".join(sorted(map(str, chosen))))
            refuse(f"LowRank: matrices is {found}, expected some of {', '.join(usual)}")
        self.matrices = sorted((name for name in large if name_in_layer(name) in chosen), key=block_of)

    def shapes(self):
        shapes = {}
        for name in self.matrices:
            out, inputs = self.base.weights[name].shape
            shapes |= {adapter_name(name, LORA_A): (self.rank, inputs), adapter_name(name, LORA_B): (out, self.rank)}
        return shapes

    def constants(self):
        return {LORA_ALPHA: np.full(1, self.alpha, np.float32)}

    def initial_value(self, name, shape, rng):
        return rng.normal(0, shape[1] ** -0.5, shape) if name.endswith(LORA_A) else 0

    def merged(self, adapter, products):
        """The vector of the model's parameters with `adapter` added, {name: array}; in the dtype of the adapter."""
        vector = self.vector_for(products).astype(adapter[adapter_name(self.matrices[0], LORA_A)].dtype)
        views = self.layout.named(vector)
        for name in self.matrices:
            down, up = adapter[adapter_name(name, LORA_A)], adapter[adapter_name(name, LORA_B)]
            views[name] += self.factor * products.matmul(up, down)
        return vector

    def loss(self, adapter, tokens, products, dropout, **options):
        """As in `protocols.Trainable`. The adapter is float32 on every device."""
        vector = self.merged(adapter, products)
        value, pull = self.base.kind.loss(self.tree(vector, products), tokens, products, dropout, **options)

        def pull_trained(gradients, layer_done=lambda i: None):
            model_gradient = np.zeros_like(vector)
            pull(self.layout.tree(model_gradient))
            views = self.layout.named(model_gradient)
            for name in self.matrices:
                down, up = adapter_name(name, LORA_A), adapter_name(name, LORA_B)
                gradients[down][...] = self.factor * products.matmul(adapter[up].T, views[name])
                gradients[up][...] = self.factor * products.matmul(views[name], adapter[down].T)
            for i in range(self.base.sizes["L"]):
                layer_done(i)

        return value, pull_trained

    @property
    def factor(self):
        return self.alpha / self.rank

    def model_weights(self, layout, vector) -> dict:
        return self.layout.named(self.merged(layout.tree(vector), HostProducts()))


class States(BesideBase):
    """The initial states of the layers: `blocks.i.att.time_state` [H, N (values), N (keys)]. They start from those of
    the model, or from zeros."""

    name, decays = "a state", False

    def shapes(self):
        H, N = self.base.sizes["H"], self.base.sizes["N"]
        return {f"blocks.{i}.{STATE}": (H, N, N) for i in range(self.base.sizes["L"])}

    def constants(self):
        return {}

    def initial_value(self, name, shape, rng):
        return self.base.weights.get(name, 0)

    def loss(self, states, tokens, products, dropout, **options):
        """As in `protocols.Trainable`; the model's loss reads the states as `start` of each layer."""
        vector = self.vector_for(products)
        tree = self.tree(vector, products)
        for layer, state in zip(tree.layers, states.values()):
            layer.start = state.swapaxes(1, 2)
        value, pull = self.base.kind.loss(tree, tokens, products, dropout, **options)

        def pull_trained(gradients, layer_done=lambda i: None):
            model_gradients = self.layout.tree(np.zeros_like(vector))
            for layer, gradient in zip(model_gradients.layers, gradients.values()):
                layer.start = gradient.swapaxes(1, 2)  # the pullback writes to this view
            pull(model_gradients)
            for i in range(self.base.sizes["L"]):
                layer_done(i)

        return value, pull_trained

    def model_weights(self, layout, vector) -> dict:
        return self.base.weights | layout.named(vector)


class Parameters:
    """A `protocols.Layout` of named parameters, which are in the vector in the order of `shapes`, layer by layer.

    decays : whether weight decay applies to the parameters
    initial_value : a function of a name, a shape and a random generator; it returns the initial value
    constants : {name: array} of further arrays in files of the parameters
    """

    def __init__(self, sizes, shapes, decays, initial_value, constants):
        self.sizes, self.shapes, self.initial_value, self.constants = sizes, shapes, initial_value, constants
        ends = np.cumsum([np.prod(shape) for shape in shapes.values()]).tolist()
        self.spans = dict(zip(shapes, zip([0, *ends], ends)))
        self.size = ends[-1]
        self.matrices = self.size if decays else 0
        spans = [[span for name, span in self.spans.items() if block_of(name) == i] for i in range(sizes["L"])]
        self.parts = [(layer_spans[0][0], layer_spans[-1][1]) if decays else (0, 0) for layer_spans in spans]

    def tree(self, vector, matrices=None) -> dict:
        """Views of `vector` by name; `matrices` is not used, as these parameters are float32 in every training."""
        return {name: vector[slice(*self.spans[name])].reshape(shape) for name, shape in self.shapes.items()}

    def named(self, vector) -> dict:
        return self.tree(vector) | self.constants

    def initial(self, seed) -> np.ndarray:
        rng, vector = np.random.default_rng(seed), np.empty(self.size, np.float32)
        for name, array in self.tree(vector).items():
            array[...] = self.initial_value(name, array.shape, rng)
        return vector


def block_of(name: str) -> int:
    """The index of the layer of a parameter."""
    return int(name.split(".")[1])


def name_in_layer(name: str) -> str:
    """A matrix's name within its layer, "att.key" of "blocks.0.att.key.weight"."""
    return name_in_block(name).removesuffix(".weight")


def refuse(complaint: str):
    raise ContractError(f"fine-tuning: {complaint}")
