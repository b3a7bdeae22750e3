"""The base classes of kernels: a kernel's template arguments, argument struct, threads and shared memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from typing import ClassVar, dataclass_transform

import numpy as np

from ...array_kinds import BFLOAT16
from .arguments import Packed
from .arithmetic import ceil_div
from .plan import FLOAT32
from .source import root

HALF = np.dtype(np.float16), BFLOAT16
DOUBLE = np.dtype(np.float64)
INT8 = np.dtype(np.int8)
SM90 = "sm_90a"  # `Kernel.arch` of kernels for Hopper alone
# {dtype: its name in C++}: of most operators' kernels; with those in float64; with all that models have
CTYPES = {np.dtype(np.float32): "float", HALF[0]: "f16", HALF[1]: "bf16"}
FLOATS = CTYPES | {DOUBLE: "double"}
CPP_NAMES = FLOATS | {INT8: "i8"}


def cpp_text(value) -> str:
    """A template argument (a dtype, a bool, a number or a C++ name) as C++ text."""
    if isinstance(value, np.dtype):
        return CPP_NAMES[value]
    return str(value).lower() if isinstance(value, bool) else str(value)


def no_kernels(dtype, dtypes) -> str | None:
    """What `explain` prints if the kernels, which exist for `dtypes`, cannot compute `dtype`; None if they can."""
    return None if dtype in dtypes else f"no {dtype} kernels; it has {', '.join(map(str, dtypes))}"


RESERVED = 1024  # bytes of shared memory that the driver reserves for every block
SHARED_MEMORY = "shared_memory.json"  # in kernels_cu: what `struct_sizes` reads; tests/shared_memory.py writes it


@cache
def struct_sizes() -> dict[str, dict[str, int]]:
    """{kernel's file: {C++ type of its shared memory: bytes}}."""
    return json.loads((root() / SHARED_MEMORY).read_text())


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Kernel:
    """One instantiation of one `__global__` template. A subclass declares a template. It is a frozen dataclass: its
    fields are the template's arguments in their order.

    `file` is the path under `kernels_cu` without `.cu`; joined by underscores it is the name of the `__global__`.
    `arch`, such as "sm_90a", is the only compile target that has the kernel's instructions; "" means every target.
    """

    def __init_subclass__(cls):
        dataclass(frozen=True)(cls)

    file: ClassVar[str]
    arguments: ClassVar[tuple] = ()  # the members of the kernel's argument struct
    shared_memory: ClassVar[tuple[str, ...]] = ()  # C++ types in shared memory: format strings with this class's fields
    arch: ClassVar[str] = ""
    constants: ClassVar[tuple] = ()  # (C++ format string, name in this class) of constants that must be equal
    overlaps: ClassVar[bool] = False  # whether it may start before the previous kernel ends: it calls wait_for_previous

    @property
    def name(self) -> str:
        return self.file.replace("/", "_")

    @property
    def template(self) -> tuple[str, ...]:
        """The template's arguments as C++ text."""
        return tuple(cpp_text(getattr(self, field.name)) for field in fields(self))

    @property
    def expression(self) -> str:
        """The instance in C++, such as "gated_forward<AfterWrite, float, float, 64, 64>"."""
        return f"{self.name}<{', '.join(self.template)}>" if self.template else self.name

    def filled_in(self, text) -> str:
        """The C++ text with the template's arguments in the place of the names in braces."""
        return text.format(**{field.name: argument for field, argument in zip(fields(self), self.template)})

    @property
    def shared_types(self) -> tuple[str, ...]:
        """The C++ types in `shared_memory`, with the template's arguments filled in."""
        return tuple(map(self.filled_in, self.shared_memory))

    @property
    def threads(self) -> int:
        """Threads per block, as many as the kernel's `__launch_bounds__` say: the compiler compares them."""
        raise NotImplementedError

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory per block: the sum over `shared_types`."""
        return sum(map(self.bytes_of, self.shared_types))

    def bytes_of(self, cpp_type) -> int:
        """The size of a type of the kernel's file."""
        try:
            return struct_sizes()[self.file][cpp_type]
        except KeyError:
            missing = f"{SHARED_MEMORY} lacks {self.expression}: run python tests/shared_memory.py"
            raise LookupError(missing) from None

    @property
    def blocks_per_cluster(self) -> int:
        """Blocks per cluster: the kernel's `__cluster_dims__`."""
        return 1

    @property
    def blocks_per_multiprocessor(self) -> int:
        """Blocks whose registers fit on one multiprocessor at a time."""
        return 1

    def resident_blocks(self, device) -> int:
        """The blocks that the card holds at the same time."""
        fitting = device.shared_per_multiprocessor // (self.shared_bytes + RESERVED)
        return device.multiprocessors * max(1, min(self.blocks_per_multiprocessor, fitting))

    @property
    def names(self) -> set[str]:
        """The names of the argument struct's members."""
        return {member.name for member in self.arguments}

    def complete(self, args) -> dict:
        """All members of the argument struct by name: `args`, and None for optional members not in `args`. TypeError if
        others are missing or too many."""
        declared = self.names
        complete = dict.fromkeys(member.name for member in self.arguments if member.optional) | args
        if declared != set(complete):
            raise TypeError(f"{self.name} takes {sorted(declared)}, got {sorted(args)}")
        return complete

    def pack(self, **args) -> np.ndarray:
        """The words of the argument struct; `args` are addresses, numbers and None."""
        return Packed(self.arguments, self.complete(args), {}).words


class ReadOrderKernel(Kernel):
    """The base of kernels with a template argument for whether a token's output reads the state before or after the
    token is written: "BeforeWrite" or "AfterWrite"."""

    read_order: str


class GatedKernel(ReadOrderKernel):
    """The base of kernels with template arguments for the read order and for the dtypes of data and gates."""

    dtype: np.dtype
    gate: np.dtype


class StepKernel(Kernel):
    """The base of steps, with template arguments for the dtypes of data and of the stored state. In C++ texts {real} is
    the type of the arithmetic."""

    constants: ClassVar[tuple] = (("sizeof(Wider<{dtype}, {state}>)", "real_bytes"),)

    @property
    def real(self):
        """The dtype of the arithmetic."""
        return DOUBLE if DOUBLE in (self.dtype, self.state) else FLOAT32

    @property
    def real_bytes(self) -> int:
        return self.real.itemsize

    def filled_in(self, cpp_text) -> str:
        return super().filled_in(cpp_text.replace("{real}", CPP_NAMES[self.real]))


class TiledKernel(Kernel):
    """The base of kernels whose blocks each compute a tile of the state [K, V]: BK channels and BV columns."""

    CHUNK: ClassVar[int] = 0  # tokens per chunk; 0 if the kernel goes token by token
    SUB_CHUNK: ClassVar[int] = 0  # tokens per sub-chunk; 0 if chunks are not divided

    @property
    def channels(self):
        """Channels per launch."""
        return self.BK

    def grid(self, V):
        """Blocks per sequence and head: one for every BV of V columns, rounded up to whole clusters."""
        return ceil_div(V, self.BV * self.blocks_per_cluster) * self.blocks_per_cluster

    @property
    def tiles(self):
        """The sizes that `explain` shows."""
        sizes = {"BK": self.BK, "BV": self.BV, "chunk": self.CHUNK, "sub_chunk": self.SUB_CHUNK}
        return {name: size for name, size in sizes.items() if size}


class HopperKernel(TiledKernel):
    """The base of tiled kernels for Hopper alone. Two blocks share a multiprocessor if their tile is the smallest, 64
    channels by 64 columns."""

    arch = SM90

    @property
    def blocks_per_multiprocessor(self):
        return 2 if self.BK + self.BV == 128 else 1


class ModelKernel(Kernel):
    """The base of the language models' kernels, all of which may start before the previous kernel ends."""

    overlaps = True
