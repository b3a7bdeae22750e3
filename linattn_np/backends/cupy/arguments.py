"""The argument struct of a kernel: its declaration, its layout and its bytes.

Members consist of 8-byte words. A kernel class declares them by `members`. `Packed` makes the bytes. The module
`source` makes the compiler compare the declaration's size and offsets with its own `sizeof` and `offsetof`.

In this module `declared` is a struct's tuple of `StructMember`, and `args` are its values by member: a `plan.Array`, a
`plan.TensorMap`, a `plan.Shape`, a number or None.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .plan import SHAPE, Array, Ref, TensorMap

WORD, MAP_WORDS, MAP_ALIGNMENT = 8, 16, 64  # bytes per word, words per tensor map, bytes to which it is aligned


@dataclass(frozen=True)
class StructMember:
    """A member of a struct: `kind` is a key of `WORDS`, a function that makes its words."""

    name: str
    kind: str
    words: int
    inner: tuple[StructMember, ...] = ()
    optional: bool = False  # null if a launch does not pass it


KINDS = {  # first word of a part of a declaration -> (kind of its members, 8-byte words per member)
    "strided": ("rows", 4),  # `StridedRows`: a pointer and three strides, in elements
    "pointers": ("pointer", 1),
    "int64s": ("integer", 1),
    "float64s": ("real", 1),
    "tensor_maps": ("map", MAP_WORDS),
    "shape": ("shape", len(SHAPE)),
}


def members(declaration: str) -> tuple[StructMember, ...]:
    """The members that a text such as "strided q k v o, pointers? initial final, shape, float64s scale" declares.

    Each part is a kind and the members' names; `?` marks optional members. "tensor_maps+strided q k" declares tensor
    maps q and k, and the same arrays, strided, as q_rows and k_rows, for tokens that the boxes of a tensor map do not
    cover.
    """
    found: list[StructMember] = []
    for part in declaration.split(", "):
        kind, *names = part.split()
        if kind == "tensor_maps+strided":
            found += members("tensor_maps " + " ".join(names))
            found += members("strided " + " ".join(f"{name.removesuffix('_')}_rows" for name in names))
        else:
            found += [
                StructMember(name, *KINDS[kind.rstrip("?")], optional=kind.endswith("?")) for name in names or [kind]
            ]
    return tuple(found)


def structs(name, count, inner) -> tuple[StructMember, ...]:
    """A member that is an array of `count` structs of the members `inner`; None: one struct, and no array."""
    return (StructMember(name, "structs" if count else "struct", (count or 1) * size_of(inner) // WORD, inner),)


def size_of(declared) -> int:
    """Bytes of a struct of these members, with padding at its end if it holds tensor maps."""
    size = WORD * sum(member.words for member in declared)
    return -(-size // MAP_ALIGNMENT) * MAP_ALIGNMENT if has_maps(declared) else size


def has_maps(declared) -> bool:
    """Whether a struct of these members, or one inside it, has tensor maps."""
    return any(member.kind == "map" or has_maps(member.inner) for member in declared)


def offsets(declared):
    """Yields (C++ name, first byte) of every member, and of those of a struct, or of the first struct of an array."""
    at = 0
    for member in declared:
        yield member.name, at
        struct = member.name if member.kind == "struct" else f"{member.name}[0]"
        yield from ((f"{struct}.{name}", at + offset) for name, offset in offsets(member.inner))
        at += WORD * member.words


def words_of(declared, args) -> list:
    """The struct's contents: an integer, float, None (null) or `Ref` (address) per word, a `TensorMap` per 16 words."""
    words = []
    for member in declared:
        words += WORDS[member.kind](args[member.name], member)
    return words


def row_words(x, _):
    """An array's address and three strides in elements. The stride of an axis of size 1 is 0, which broadcasts it."""
    if x is None:
        return [None, 0, 0, 0]
    strides = [stride if size > 1 else 0 for stride, size in zip(x.strides[:-1], x.shape)]
    assert len(strides) <= 3 and not any(stride % x.dtype.itemsize for stride in strides)
    return [x.ref, *(stride // x.dtype.itemsize for stride in strides), *[0] * (3 - len(strides))]


def struct_words(values, member):
    """The words of several structs, one after the other, each padded to its size; `values`: the `args` of each."""
    size, words = size_of(member.inner) // WORD, []
    for value in values:
        inner = words_of(member.inner, value)
        used = sum(MAP_WORDS if isinstance(word, TensorMap) else 1 for word in inner)
        words += [*inner, *[0] * (size - used)]
    assert len(values) * size == member.words, f"{member.name}: {len(values)} structs"
    return words


WORDS = {
    "rows": row_words,
    "pointer": lambda x, _: [x.ref if isinstance(x, Array) else x],
    "integer": lambda x, _: [int(x)],
    "real": lambda x, _: [float(x)],
    "map": lambda x, _: [x],
    "shape": lambda x, _: [getattr(x, name) for name in SHAPE],
    "struct": struct_words,
    "structs": struct_words,
}


class Packed:
    """The argument struct of a launch without addresses and tensor maps, which `filled` adds for each execution.

    index_of : {memory of the plan (such as `plan.Buffer`): its index among the arrays of an execution}
    """

    def __init__(self, declared, args, index_of):
        size = size_of(declared)
        self.words, word_index = np.zeros(size // WORD, np.int64), 0
        reals = self.words.view(np.float64)  # the same memory
        address_indices, memory_indices, byte_offsets, self.maps = [], [], [], []
        for word in words_of(declared, args):
            if isinstance(word, Ref):
                address_indices.append(word_index)
                memory_indices.append(index_of[word.memory])
                byte_offsets.append(word.offset)
            elif isinstance(word, TensorMap):
                self.maps.append((word_index, word))
                word_index += MAP_WORDS - 1
            elif isinstance(word, float):
                reals[word_index] = word
            elif word is not None:
                self.words[word_index] = word
            word_index += 1
        self.address_indices, self.memory_indices, self.byte_offsets = (
            np.array(numbers, np.int64) for numbers in (address_indices, memory_indices, byte_offsets)
        )

    def filled(self, addresses, encode) -> np.ndarray:
        """The words of the struct for an execution on arrays at these `addresses`; `encode` makes the bytes of a
        CUtensorMap of a `TensorMap`."""
        words = self.words.copy()
        words[self.address_indices] = addresses[self.memory_indices] + self.byte_offsets
        for index, tensor_map in self.maps:
            words[index : index + MAP_WORDS] = np.frombuffer(encode(tensor_map), np.int64)
        return words
