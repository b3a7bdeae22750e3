"""The declaration of an operator, and the checks of single arguments.

A declaration names the axes of each array, `{"q": "B H T K", "v": "B H T V"}`: B rows of the batch, H heads, T tokens,
K channels of keys, V of values; N sequences. Checks, shapes of results, signatures, random inputs of tests and the
documentation follow from it. An error names the operator, the argument, what was expected and what was given.
"""

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np

from . import accepted_arrays, aliasing, array_kinds, value_heads
from .errors import ContractError, ContractTypeError
from .layouts import in_layout, swap_heads
from .messages import shown
from .summary import Transition
from .typing import MaskedOptions


@dataclass(frozen=True, eq=False)
class Declaration:
    """An operator's name, its arrays with their axes, and its other properties."""

    name: str
    arrays: Mapping[str, str]  # {"q": "B H T K", ...} in the order of the call
    out: str = "B H T V"
    gates: tuple[str, ...] = ()  # arrays that may be float32 if the others are in half precision
    strengths: tuple[str, ...] = ()  # gates that say how strongly a token is written
    computed: tuple[str, ...] = ()  # arrays that an earlier stage has returned: float32, or float64 if the others are
    modes: tuple[str, ...] = ("recurrent", "chunk", "staged", "parallel")  # staged: "chunk" by its five public stages
    state: tuple[str, ...] = ("N H K V",)  # axes of each part of the recurrent state, N sequences
    reads_before_write: bool = False  # RWKV-6: o_t sees S_{t-1} and a bonus; GLA: o_t sees S_t
    feature: str = "K"  # the axis whose size ** -0.5 is the default scale
    transition: Transition = Transition.NONE  # what a token does to the state before it
    keywords: type = MaskedOptions  # a TypedDict of its keyword arguments
    second_result: str = "output_final_state"  # the keyword argument that requests a second result; "" for none
    derived: Any = None  # an object of a class in derived.py, if backends compute another operator in place of this one
    differentiable: ClassVar[bool] = True  # of a class of operators: whether linattn_np.interop has a function of each

    @property
    def value(self) -> str:
        """The name of the array of values, v."""
        return next(name for name, axes in self.arrays.items() if axes.endswith("V"))

    @property
    def decays(self) -> list[str]:
        """The names of the gates that are the log of a token's decay: not `strengths`, nor gates without tokens."""
        return [name for name in self.gates if self.arrays[name].startswith("B") and name not in self.strengths]

    def refuse(self, argument: str, complaint: str, error: type[ContractError] = ContractError) -> NoReturn:
        """Raises an error that begins with the operator and the argument."""
        raise error(f"{self.name}: {argument} {complaint}")

    def one_of(self, argument: str, x, choices):
        """`x`, which must be one of the words `choices`, or None if that is among them."""
        if not (x is None or isinstance(x, str)) or x not in choices:
            self.refuse(argument, f"is {shown(x)}, expected one of {', '.join(map(repr, choices))}")
        return x

    def flag(self, argument: str, x) -> bool:
        """`x`, which must be True or False."""
        if not isinstance(x, (bool, np.bool_)):
            self.refuse(argument, f"is {shown(x)}, expected True or False", ContractTypeError)
        return bool(x)

    def native(self, name, x, use="computed"):
        """(`x` as a NumPy or CuPy array over the same memory, the library of `x`). `use`: what the call does with it,
        "computed", "written" or only "copied". An error recommends the function of linattn_np.interop, if there is one:
        that of the name's first word, which for "gla with gv", gla with its optional array, is gla."""
        try:
            return accepted_arrays.accepted(name, x, use, self.name.split()[0] if self.differentiable else None)
        except accepted_arrays.Refusal as refusal:
            self.refuse(name, str(refusal), ContractTypeError)

    def logical(self, name, array, axes, layout):
        """A view of the caller's `array` with its axes in the order `axes`; in layout "bthd", H and T are swapped."""
        if array.ndim != len(axes.split()):
            self.refuse(name, f"has {array.ndim} axes, shape {tuple(array.shape)}, expected {in_layout(axes, layout)}")
        return swap_heads(array, axes, layout)

    def placed(self, name, x, axes, sizes, home, dtypes=array_kinds.FLOATS, use="computed"):
        """`x` as a NumPy or CuPy array; it must have exactly these sizes, one of the dtypes, and the call's device."""
        native, _ = self.native(name, x, use)
        wanted = tuple(sizes[axis] for axis in axes.split())
        if tuple(native.shape) != wanted:
            self.refuse(name, f"is {tuple(native.shape)}, expected [{', '.join(axes.split())}] = {wanted}")
        if native.dtype not in dtypes:
            self.refuse(
                name,
                f"has dtype {native.dtype}, expected "
                + ("one of " if len(dtypes) > 1 else "")
                + ", ".join(map(str, dtypes)),
                ContractTypeError,
            )
        if array_kinds.home(native) != home:
            self.refuse(name, f"lives on {array_kinds.home(native)}, but the other arrays on {home}", ContractTypeError)
        return native

    def placed_states(self, name, parts, sizes, home, v_first, groups):
        """`placed` for the parts of a state, or of its gradient, in the caller's order of axes: V before K with
        `v_first`. groups: heads of values for each head of q."""
        wanted = [value_heads.grouped_axes(axes, groups) for axes in self.state]
        if v_first:
            wanted = [axes.replace("K V", "V K") for axes in wanted]
        return tuple(self.placed(name, part, axes, sizes, home) for part, axes in zip(parts, wanted, strict=True))

    def writable(self, name, x, home):
        """Refuses an array that cannot be written to, or whose elements share memory."""
        if home == "host" and not x.flags.writeable:
            self.refuse(name, "is read-only, but it is written")
        if not aliasing.elements_apart(x):
            self.refuse(name, f"has strides {x.strides} for shape {tuple(x.shape)}, by which elements may share memory")


def is_int(x) -> bool:
    """Whether x is an integer and not a bool."""
    return isinstance(x, numbers.Integral) and not isinstance(x, (bool, np.bool_))


def is_real(x) -> bool:
    """Whether x is a real number and not a bool."""
    return type(x) is float or isinstance(x, (numbers.Real, np.floating)) and not isinstance(x, (bool, np.bool_))


def whole_of(text: str) -> int | None:
    """The integer of a text of at most 18 decimal digits, else None."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def array_on_host(name: str, x, refuse) -> np.ndarray:
    """`x`, an array of any library or a list, as a NumPy array. If that is not possible, ``refuse(complaint, error)``
    must raise the error; for a ragged list NumPy raises ValueError."""
    try:
        array = accepted_arrays.accepted(name, x, "copied")[0] if array_kinds.kind(x) else np.asarray(x)
    except (TypeError, RuntimeError) as error:  # a Refusal is a TypeError
        refuse(f"{name} {error}", ContractTypeError)
    if not isinstance(array, np.ndarray):
        refuse(f"{name} is on the GPU, expected an array on the host", ContractTypeError)
    return array
