"""The state that sequences carry from token to token, and the bounds and state rows of the sequences of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from ...array_kinds import BFLOAT16
from ...errors import ContractError, ContractTypeError
from .. import checkpoint, stored_zip
from ..devices import on_host
from ..files import mapped, replaced
from ..number_checks import checked_int, shown
from ..stored_zip import MAX_INDEX
from .names import unwrapped
from .version import INITIAL_STATE_PARAMETER, VERSION_NAME, number_in


@dataclass
class State:
    """The state of B sequences, or a pool of P rows, each a sequence's; a model's `forward` updates it in place.

    The arrays are not checked here: `forward`, `on_device` and `save` check them.

    Example
    -------
    >>> import tempfile
    >>> from linattn_np.models import RWKV6, State
    >>> model = RWKV6.from_file("examples/data/austen-x060/model.safetensors")
    >>> _, state = model.forward([list(b"a long prompt")])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state.save(f"{folder}/prompt.npz")
    ...     again = State.load(f"{folder}/prompt.npz")
    >>> bool((again.wkv == state.wkv).all())
    True
    """

    att_shift: np.ndarray  # [L, B, D], the last token's input of each time mix
    wkv: np.ndarray  # [L, B, H, N (keys), N (values)], the recurrent state, in the model's `state_dtype`
    ffn_shift: np.ndarray  # [L, B, D], the last token's input of each channel mix
    version: int | None = field(default=None, kw_only=True)  # of RWKV; None if the caller or the file did not say it

    @property
    def arrays(self):
        """The three arrays, on the host or on the device."""
        return self.att_shift, self.wkv, self.ffn_shift

    @classmethod
    def made(cls, array: Callable, sizes: dict[str, int], rows: int, wkv) -> State:
        """A state whose arrays are ``array(shape, dtype)``; `wkv` is the recurrent state's dtype."""
        return cls(
            **{name: array(*shape_and_dtype) for name, shape_and_dtype in shapes_and_dtypes(sizes, rows, wkv).items()}
        )

    @classmethod
    def without_arrays(cls, version):
        """A state of a model's version that begins with zeros, and whose arrays its layers will make."""
        return cls(None, None, None, version=version)

    def copy(self) -> State:
        """A state with the same numbers in memory of its own."""
        return State(*(array.copy() for array in self.arrays), version=self.version)

    __copy__ = copy  # deep, as `forward` updates a state in place

    def row(self, slot: int) -> State:
        """One row, as the state of one sequence: views of this state's arrays."""
        return State(*(array[:, slot : slot + 1] for array in self.arrays), version=self.version)

    def put(self, slots: int | Sequence[int], state: State):
        """Writes `state`, of one sequence, to the row `slots`, or to each row of a list of them."""
        for array, row in zip(self.arrays, state.arrays):
            array[:, slots] = row if np.ndim(slots) else row[:, 0]

    def save(self, path):
        """Writes a `.npz` file in float32, whose numbers `load` returns unchanged. If it fails, no file is changed."""
        check_state(self, {}, wkv=None)
        arrays = {name: on_host(getattr(self, name)).astype(FLOAT32, copy=False) for name in STATE}
        if self.version is not None:
            arrays[VERSION_NAME] = np.full(1, checked_int("State", "version", self.version, 1, 99), np.float32)
        with replaced(path) as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path) -> State:
        """The state in a file that `save` wrote, on the host; a model's `on_device` moves it to the model's device.

        The file may also be a checkpoint (`checkpoint.read`) that contains `blocks.N.att.time_state` of every block, a
        trained initial state, and nothing else; or a folder with such a `state.pth`, as `train --state` writes it.
        ContractError for every other file, OSError if it cannot be read.
        """
        path = checkpoint.located(path, "load_state")
        try:
            data = mapped(path, "what State.save has written")
            if data.find(b".time_state", 0, MAX_INDEX) >= 0:
                return cls.of_initial_states(checkpoint.read(path))
            if data[:4] != b"PK\3\4":
                refuse(f"starts with {data[:8]!r}, expected what State.save has written")
            entries = stored_zip.directory(data)  # {file name: (first byte, size)}
            if entries.keys() - {f"{VERSION_NAME}.npy"} != {f"{name}.npy" for name in STATE}:
                found = ", ".join(sorted(file_name.removesuffix(".npy") for file_name in entries))
                refuse(f"holds {shown(found)[1:-1] or 'nothing'}, expected {', '.join(sorted(STATE))}")
            named = {file_name.removesuffix(".npy"): entry for file_name, entry in entries.items()}
            arrays = {name: stored_zip.floats(data, entry, name) for name, entry in named.items()}
            state = cls(*(arrays[name] for name in STATE), version=number_in(arrays))
            check_state(state, {})
            return state
        except ContractError as error:
            why = str(error).removeprefix("State: ")
            raise ContractError(f"State: {path} is no saved state, or a damaged one: {why}") from None

    @classmethod
    def of_initial_states(cls, weights) -> State:
        """The state of one sequence from `weights`: trained initial states [H, N (values), N (keys)], by full name,
        which may have a trainer's prefix."""
        weights = unwrapped(weights)
        number = number_in(weights)
        weights = {name: array for name, array in weights.items() if name != VERSION_NAME}
        names = [f"blocks.{i}.{name}" for name in INITIAL_STATE_PARAMETER for i in range(len(weights) or 1)]
        if unmatched := sorted(set(weights) ^ set(names)):
            refuse(f"has {shown(unmatched[0])}, expected att.time_state of every block and nothing else")
        shape = weights[names[0]].shape
        if unmatched := [
            name for name in names if weights[name].shape != shape or len(shape) != 3 or shape[1] != shape[2]
        ]:
            refuse(
                f"has {shown(unmatched[0])} in {weights[unmatched[0]].shape}, expected [H, N, N], alike in all blocks"
            )
        wkv = np.stack([np.asarray(weights[name], np.float32).swapaxes(1, 2) for name in names])[:, None]
        zeros = np.zeros((len(names), 1, shape[0] * shape[1]), np.float32)
        return cls(zeros, np.ascontiguousarray(wkv), zeros.copy(), version=number)


FLOAT32 = np.dtype(np.float32)
DTYPES = (FLOAT32, BFLOAT16, np.dtype(np.float16))  # possible dtypes of the recurrent state


def refuse(complaint: str, error=ContractError) -> NoReturn:
    raise error(f"State: {complaint}")


# The axes of a state's parts: L layers, B sequences (or rows of a pool), D channels, H heads of N.
STATE = {"att_shift": "L B D", "wkv": "L B H N N", "ffn_shift": "L B D"}


def shapes_and_dtypes(sizes: dict[str, int], rows: int, wkv) -> dict[str, tuple]:
    """{part of a state: (shape, dtype)} for `rows` rows; `wkv` is the recurrent state's dtype."""
    sizes = sizes | {"B": rows}
    shapes = {name: tuple(sizes[axis] for axis in axes.split()) for name, axes in STATE.items()}
    return {name: (shape, wkv if name == "wkv" else FLOAT32) for name, shape in shapes.items()}


def check_state(state, sizes, array_types=None, wkv=FLOAT32, refuse=refuse):
    """Checks that a state's arrays fit each other and `sizes` and have one of the `array_types` (None: any).

    wkv : the dtype of the recurrent state (None: any of DTYPES); the other parts are float32
    sizes : {axis: size}; an axis that it lacks gets the size that the first array has
    refuse : the function that raises the error
    """
    if not isinstance(state, State):
        refuse(f"state is a {type(state).__qualname__}, expected a State", ContractTypeError)
    sizes = dict(sizes)
    for name, axes in STATE.items():
        array, axes = getattr(state, name), axes.split()
        # Subclasses of NumPy's array are refused: a masked array's mask, for example, would be ignored.
        if isinstance(array, np.ndarray) and type(array) not in (np.ndarray, np.memmap) or not hasattr(array, "dtype"):
            refuse(
                f"state.{name} is a {type(array).__module__}.{type(array).__qualname__}, expected a plain array",
                ContractTypeError,
            )
        if array_types is not None and type(array) not in array_types:
            refuse(
                f"state.{name} is a {type(array).__module__}.{type(array).__qualname__}, expected one of the "
                "model's device: `on_device` moves it",
                ContractTypeError,
            )
        dtypes = (FLOAT32,) if name != "wkv" else DTYPES if wkv is None else (wkv,)
        if array.dtype not in dtypes:
            expected = ", ".join(map(str, dtypes))
            refuse(f"state.{name} has dtype {array.dtype}, expected {expected}", ContractTypeError)
        if len(array.shape) == len(axes):
            for axis, size in zip(axes, array.shape):
                sizes.setdefault(axis, size)
        shape = tuple(sizes.get(axis, axis) for axis in axes)
        if tuple(array.shape) != shape:
            refuse(f"state.{name} is {tuple(array.shape)}, expected {shape}")
    if sizes["H"] * sizes["N"] != sizes["D"]:
        refuse(f"state.wkv has H={sizes['H']} heads of N={sizes['N']}, expected H x N = D = {sizes['D']}")


class CallSequences:
    """The N sequences of a call, among its packed tokens and in the state. `Model.sequences` checks the arguments.

    bounds : host integers [N + 1]; sequence n is the tokens bounds[n] to bounds[n + 1] - 1, at least one
    slots : host integers [N], all different: the row of each sequence in the state; None if they are 0 to N - 1
    """

    def __init__(self, bounds, slots):
        self.bounds, self.slots = bounds, slots
        self.first_tokens, self.last_tokens = bounds[:-1], bounds[1:] - 1
        self.one_token_each = len(self.first_tokens) == bounds[-1]
        self.state_rows = slice(None) if slots is None else slots  # an index of a state's arrays
