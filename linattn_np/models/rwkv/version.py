"""The tables in which versions of RWKV differ: parameters, their names in files, and the arrays that the layers take.

The layers on the CPU, the layers on the GPU, and training (whose arrays are views of one parameter vector) read the
same tables. Each of them decides by itself in which dtype and layout it keeps an array.

A *block* is the parameters of one layer, as files name them: ``blocks.0.att.key.weight`` is of block 0. An official
name is that of the RWKV project's own files. Axes are letters with spaces between, such as ``"H N N"``: V tokens of the
vocabulary, D channels, H heads of N channels; 1 for an axis that files have with one element.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NoReturn

import numpy as np

from ...errors import ContractError, ContractTypeError

LAYER_NORM_EPS = 1e-5
GROUP_NORM_EPS = 64e-5  # whatever the head size is
NORM_EPS_NAME = "norm_eps"  # entry [2] of a model's weights: eps of layer norms and of the group norm, if not these two
# Entry of a model's weights: the letters, in uint8, of a name in `array_math.ACTIVATIONS`, the channel mix's; without
# it, RWKV's own.
HIDDEN_ACT_NAME = "hidden_act"
SQRELU = "sqrelu"  # RWKV's own
VERSION_NAME = "rwkv_version"  # array [1] in files of states and of adapters; older files lack it
# The trained initial state, in every block or in none; of its last two axes the first is that of values.
INITIAL_STATE_PARAMETER = {"att.time_state": "H N N"}


@dataclass(frozen=True)
class Weight:
    """An array that the layers read, made of one parameter, or of several that are stacked along a new first axis.

    names : the parameters, in the order of the stack; names within a block, or full names outside the layers
    matrix : whether it is an operand of a matrix product; half precision, weight decay and quantisation are for these
    inputs_first : whether files store the matrix as (in, out), as they do low-rank matrices; the others are (out, in)
    """

    names: tuple[str, ...]
    matrix: bool = False
    inputs_first: bool = False


def vector(*names) -> Weight:
    """A vector, or a stack of vectors."""
    return Weight(names)


def norm(name) -> Weight:
    """The weight and the bias of a norm."""
    return Weight((f"{name}.weight", f"{name}.bias"))


def linear(part, *names) -> Weight:
    """A matrix, or a stack of matrices, of the mix `part`, "att" or "ffn"."""
    return Weight(tuple(f"{part}.{name}.weight" for name in names), matrix=True)


def low_rank(name) -> Weight:
    """A matrix of low rank."""
    return Weight((name,), matrix=True, inputs_first=True)


# The same in every version: {parameter: axes} before the layers, of norms in a block, and after the layers; the arrays
# outside of layers, {field: Weight}.
EMBEDDING = {"emb.weight": "V D", "blocks.0.ln0.weight": "D", "blocks.0.ln0.bias": "D"}
NORMS = dict.fromkeys(("ln1.weight", "ln1.bias", "ln2.weight", "ln2.bias"), "D")  # of a block
GROUP_NORM = dict.fromkeys(("att.ln_x.weight", "att.ln_x.bias"), "D")  # likewise
HEAD = {"ln_out.weight": "D", "ln_out.bias": "D", "head.weight": "V D"}
MODEL = {
    "embedding": Weight(("emb.weight",), matrix=True),
    "head": Weight(("head.weight",), matrix=True),
    "ln0": norm("blocks.0.ln0"),
    "ln_out": norm("ln_out"),
}

# Fields of flash-linear-attention's config that every version has, and the axes whose sizes they are.
FLA_SIZES = {"vocab_size": "V", "hidden_size": "D", "intermediate_size": "F", "num_hidden_layers": "L"}


@dataclass(frozen=True)
class Version:
    """A version of RWKV.

    number : 6 or 7
    owner : the name of the class of its models, with which errors begin
    title : the version's name in errors
    block : {parameter of a block: axes}. The first parameter with an axis, in the order EMBEDDING, blocks, HEAD, gives
        the axis its size
    layer : {field: Weight}, the arrays of a layer
    first_layer_lacks : parameters of a block that the first block does not have; files may contain them, unread
    naming : a function of the weights in a file. It returns (the prefix of block names in the file, a function of an
        official name, which returns (the name in the file, the function that converts the file's array))
    foreign_parts : a function of the weights in a file. It returns {part of a name: the version that has such names}
    fla_complete : a function of weights with flash-linear-attention's names, and of their config. It returns weights by
        these names in shapes that `naming` can convert
    fla_fields : {field of flash-linear-attention's config: the only value that is supported}
    fla_sizes : {field of flash-linear-attention's config: the axis whose size it is}
    fla_eps : flash-linear-attention's eps of norms if its config has none
    fla_group_eps_factor : a function of weights with flash-linear-attention's names: the group norm's eps divided by
        the layer norms'
    """

    number: int
    owner: str
    title: str
    block: dict[str, str]
    layer: dict[str, Weight]
    naming: Callable[[Mapping], tuple[str, Callable]]
    foreign_parts: Callable[[Mapping], Mapping[str, str]]
    fla_fields: dict[str, object]
    fla_sizes: dict[str, str]
    fla_eps: float
    fla_group_eps_factor: Callable[[Mapping], float]
    fla_complete: Callable[[Mapping, Mapping], Mapping] = lambda weights, config: weights
    first_layer_lacks: frozenset[str] = frozenset()

    # -- refusals ----------------------------------------------------------------------------------------------------
    def refuse(self, complaint: str, error=ContractError) -> NoReturn:
        raise error(f"{self.owner}: {complaint}")

    def check_number(self, number: int | None, what: str):
        """ContractError if `number`, the `number_in` of the file of `what`, is another version's. None is accepted."""
        if number not in (None, self.number):
            wanted = f"expected RWKV-{self.number}: it goes with the model that it was made with"
            self.refuse(f"{what} is of RWKV-{number}, {wanted}")

    def checked_dtype(self, dtype, accepted, purpose=""):
        """`dtype` as a NumPy dtype; ContractTypeError if it is none of `accepted`. `purpose` ends the error's text."""
        try:
            checked = np.dtype(dtype)
        except TypeError:
            checked = repr(dtype)
        if not any(checked == accepted_dtype for accepted_dtype in accepted):
            expected = f"expected {', '.join(map(str, accepted))}{purpose}"
            self.refuse(f"dtype is {checked}, {expected}", ContractTypeError)
        return checked

    # -- parameters --------------------------------------------------------------------------------------------------
    def parameter_axes(self, layers, has_initial_state=False) -> dict[str, str]:
        """{official name: axes} of all parameters of a model with this number of layers."""
        block = self.block | INITIAL_STATE_PARAMETER if has_initial_state else self.block
        blocks = {
            f"blocks.{i}.{name}": axes
            for i in range(layers)
            for name, axes in block.items()
            if i or name not in self.first_layer_lacks
        }
        return EMBEDDING | blocks | HEAD

    @property
    def matrix_names(self) -> list[str]:
        """The names of all matrices, within a block or outside the layers, in the order of `layer` and MODEL."""
        weights = (*self.layer.values(), *MODEL.values())
        return [name for weight in weights if weight.matrix for name in weight.names]

    def is_matrix(self, name) -> bool:
        return name_in_block(name) in self.matrix_names

    def large_matrices(self, layers: int) -> list[str]:
        """The full names of all matrices except for the embedding and those of low rank."""
        names = ["head.weight"]
        for weight in self.layer.values():
            if weight.matrix and not weight.inputs_first:  # the first block has all of these
                names += [f"blocks.{i}.{name}" for i in range(layers) for name in weight.names]
        return names

    # -- arrays ------------------------------------------------------------------------------------------------------
    def layer_arrays(self, prefix: str, array_of: Callable) -> SimpleNamespace:
        """{field: array} of the layer whose parameters' names begin with `prefix`, as a namespace. ``array_of(field,
        weight, full names)`` makes each array."""
        lacking = self.first_layer_lacks if prefix == "blocks.0." else frozenset()
        return SimpleNamespace(
            **{
                field: array_of(field, weight, [prefix + name for name in weight.names])
                for field, weight in self.layer.items()
                if not lacking.issuperset(weight.names)
            }
        )

    def model_arrays(self, array_of: Callable) -> SimpleNamespace:
        """The arrays of the model outside its layers, made by ``array_of`` as in `layer_arrays`."""
        return SimpleNamespace(
            **{field: array_of(field, weight, list(weight.names)) for field, weight in MODEL.items()}
        )

    def norm_eps(self, weights) -> tuple[float, float]:
        """(the eps of the layer norms, the eps of the group norm)."""
        eps = weights.get(NORM_EPS_NAME, (LAYER_NORM_EPS, GROUP_NORM_EPS))
        return float(eps[0]), float(eps[1])


def hidden_act(weights) -> str:
    """The name of the channel mix's activation."""
    letters = weights.get(HIDDEN_ACT_NAME)
    return SQRELU if letters is None else letters.tobytes().decode(errors="replace")


def number_in(arrays: Mapping) -> int | None:
    """The version of the model to which a file's arrays belong, or None if the file does not say it."""
    array = arrays.get(VERSION_NAME)
    if array is None:
        return None
    if array.shape != (1,) or array[0] not in range(1, 100):
        raise ContractError(f"{VERSION_NAME} is {array.dtype} {array.shape}, expected the number of a version")
    return int(array[0])


def number_of(version: Version) -> dict[str, np.ndarray]:
    """{name: array} to be written to a file, which `number_in` reads."""
    return {VERSION_NAME: np.full(1, version.number, np.float32)}


def name_in_block(name: str) -> str:
    """A name without its block's prefix."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def stacked(arrays):
    """A copy of one array, or a stack of several: a model does not share memory with a file or with the caller."""
    return np.stack(arrays) if len(arrays) > 1 else np.array(arrays[0])


def initial_states(weights) -> list:
    """The trained initial state [H, N (keys), N (values)] of each layer, or []; in files it is [H, values, keys]."""
    return [array.swapaxes(1, 2) for name, array in weights.items() if name.endswith("time_state")]


def output_scale(dtype) -> float:
    """The factor that the recurrence's result has if it is stored in `dtype`, since float16 has no numbers above 65504.

    It is a power of two, so products with it are exact. The group norm that follows removes it; the norm's eps is
    multiplied by the factor's square.
    """
    return 2.0**-6 if dtype == np.float16 else 1.0


def unit_of_squares(dtype) -> int:
    """The number by which kernels divide the channel mix's squares in `dtype`, UNIT_OF_SQUARES in include/decode.cuh:
    squares of numbers from 256 up are beyond float16's range."""
    return 2048 if dtype == np.float16 else 1
