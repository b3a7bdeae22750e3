"""The base of all kernel classes: template arguments as fields, the argument struct, threads, shared memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from typing import ClassVar, dataclass_transform

import numpy as np

from ...array_kinds import BFLOAT16
from .arguments import pack
from .plan import ceil_div
from .source import root

CTYPES = {np.dtype(np.float32): "float", np.dtype(np.float16): "f16", BFLOAT16: "bf16"}
HALF = tuple(CTYPES)[1:]
DOUBLE = np.dtype(np.float64)
INT8 = np.dtype(np.int8)
FLOATS = CTYPES | {DOUBLE: "double"}
SPELLED = FLOATS | {INT8: "i8"}


def spelled(value) -> str:
    """A template's argument in C++."""
    if isinstance(value, np.dtype):
        return SPELLED[value]
    return str(value).lower() if isinstance(value, bool) else str(value)


def no_kernels(dtype, dtypes) -> str | None:
    """Why there are no kernels for data of a dtype, if these `dtypes` have kernels; None when there are."""
    return None if dtype in dtypes else f"no {dtype} kernels; it has {', '.join(map(str, dtypes))}"


def padded(size: int, to: int) -> int:
    return ceil_div(size, to) * to


SHARED_MEMORY = "shared_memory.json"  # in kernels_cu: `struct_sizes`, which tests/shared_memory.py writes


@cache
def struct_sizes() -> dict[str, dict[str, int]]:
    """Bytes of the C++ types that kernels have in shared memory, by the kernel's file."""
    return json.loads((root() / SHARED_MEMORY).read_text())


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Kernel:
    """One instantiation of one `__global__` template. A subclass declares a template: it is a frozen dataclass, whose
    fields are the template's arguments in their order.

    `file` is the path under `kernels_cu` without `.cu`; joined by underscores it is the name of the `__global__`.
    `arch` names the only target that has its instructions, as "sm_90a"; without one it runs on every card.
    """

    def __init_subclass__(cls):
        dataclass(frozen=True)(cls)

    file: ClassVar[str]
    entry: ClassVar[str] = ""  # the name of the `__global__`, if it differs from the file's
    arguments: ClassVar[tuple] = ()  # the members of its argument struct
    shared: ClassVar[tuple[str, ...]] = ()  # the C++ types of its shared memory, with fields in braces
    arch: ClassVar[str] = ""
    constants: ClassVar[tuple] = ()  # (the kernel's name, ours) of constants that the compiler compares
    overlaps: ClassVar[bool] = False  # whether it calls `wait_for_previous`, so that it may begin before that one ends

    @property
    def name(self) -> str:
        return self.entry or self.file.replace("/", "_")

    @property
    def template(self) -> tuple[str, ...]:
        return tuple(spelled(getattr(self, member.name)) for member in fields(self))

    @property
    def expression(self) -> str:
        """As "gated_forward<AfterWrite, float, float, 64, 64>"."""
        return f"{self.name}<{', '.join(self.template)}>" if self.template else self.name

    @property
    def shared_types(self) -> tuple[str, ...]:
        arguments = {member.name: word for member, word in zip(fields(self), self.template)}
        return tuple(found.format(**arguments) for found in self.shared)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        raise NotImplementedError

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: all of `shared`."""
        try:
            return sum(struct_sizes()[self.file][name] for name in self.shared_types)
        except KeyError:
            missing = f"{SHARED_MEMORY} lacks {self.expression}: run python tests/shared_memory.py"
            raise LookupError(missing) from None

    @property
    def cluster(self) -> int:
        """Blocks that run together, as the kernel's `__cluster_dims__` say."""
        return 1

    @property
    def resident(self) -> int:
        """Blocks that can share a multiprocessor's registers."""
        return 1

    @property
    def names(self) -> set[str]:
        """Of what its argument holds."""
        return {member.name for member in self.arguments}

    def complete(self, args) -> dict:
        """What the kernel's argument holds, by name: `args` and null for the optional ones that they leave out."""
        declared = self.names
        complete = dict.fromkeys(member.name for member in self.arguments if member.optional) | args
        if declared != set(complete):
            raise TypeError(f"{self.name} takes {sorted(declared)}, got {sorted(args)}")
        return complete

    def pack(self, **args) -> np.ndarray:
        """The argument, of addresses, numbers and None."""
        return pack(self.arguments, self.complete(args))


class GatedKernel(Kernel):
    """A kernel for data of a dtype and gates of another, whose o reads a state before or after a token's write."""

    read_order: str
    dtype: np.dtype
    gate: np.dtype


class TiledKernel(Kernel):
    """A kernel whose blocks have a tile of a state: BK channels and BV columns."""

    CHUNK: ClassVar[int] = 0  # tokens that are computed together; 0 if they are computed one after the other
    SUB_CHUNK: ClassVar[int] = 0  # tokens of a sub-chunk; 0 if chunks are not cut further

    @property
    def channels(self):
        """Channels of a launch."""
        return self.BK

    def grid(self, V):
        """Blocks of a sequence and head: one for every BV columns, in whole clusters."""
        return ceil_div(V, self.BV * self.cluster) * self.cluster

    @property
    def tiles(self):
        """The sizes that `explain` shows."""
        sizes = {"BK": self.BK, "BV": self.BV, "chunk": self.CHUNK, "sub_chunk": self.SUB_CHUNK}
        return {name: size for name, size in sizes.items() if size}


class ModelKernel(Kernel):
    overlaps = True
