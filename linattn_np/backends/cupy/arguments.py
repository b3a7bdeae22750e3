"""The one argument of a kernel: a struct of 8-byte members, declared once, beside the kernel.

The same declaration packs it here and is checked against the compiler's `sizeof` and `offsetof` in the kernel's text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .plan import SHAPE, Array, Ref, TensorMap

WORD, MAP_WORDS, MAP_ALIGNMENT = 8, 16, 64  # bytes of a word, words of a tensor map, bytes on which one starts


@dataclass(frozen=True)
class StructMember:
    """A member of a struct: `kind` is rows, pointer, integer, real, map, shape or structs."""

    name: str
    kind: str
    words: int
    inner: tuple[StructMember, ...] = ()
    optional: bool = False  # null if a launch does not name it


KINDS = {  # by the words of a declaration: (kind, words of a member)
    "rows": ("rows", 4),  # `Rows`: a pointer and three strides, in elements
    "pointers": ("pointer", 1),
    "integers": ("integer", 1),
    "reals": ("real", 1),
    "maps": ("map", MAP_WORDS),
    "shape": ("shape", len(SHAPE)),
}


def members(declaration: str) -> tuple[StructMember, ...]:
    """The members that a text like "rows q k v o, pointers? initial final, shape, reals scale" declares: a kind, and
    the names of its members. `?`: null if a launch does not name it. "maps+rows q k": tensor maps q and k, and the same
    arrays as rows q_rows and k_rows, for tokens that a tensor map's boxes do not cover."""
    found: list[StructMember] = []
    for part in declaration.split(", "):
        kind, *names = part.split()
        if kind == "maps+rows":
            found += members("maps " + " ".join(names))
            found += members("rows " + " ".join(f"{name.removesuffix('_')}_rows" for name in names))
        else:
            found += [
                StructMember(name, *KINDS[kind.rstrip("?")], optional=kind.endswith("?")) for name in names or [kind]
            ]
    return tuple(found)


def structs(name, count, inner) -> tuple[StructMember, ...]:
    """`count` structs, one behind the other."""
    return (StructMember(name, "structs", count * size_of(inner) // WORD, inner),)


def size_of(declared) -> int:
    """Bytes of a struct."""
    size = WORD * sum(member.words for member in declared)
    return -(-size // MAP_ALIGNMENT) * MAP_ALIGNMENT if has_maps(declared) else size


def has_maps(declared) -> bool:
    return any(member.kind == "map" or has_maps(member.inner) for member in declared)


def offsets(declared, at=0):
    """(name, byte) of every member."""
    for member in declared:
        yield member.name, at
        at += WORD * member.words


def words_of(declared, args) -> list:
    """The struct's words: integers, floats, None for null, `Ref`, and a `TensorMap` for the 16 words that it takes."""
    words = []
    for member in declared:
        words += WORDS[member.kind](args[member.name], member)
    return words


def row_words(x, _):
    """A pointer and three strides. The stride of an axis of size 1 is 0: kernels may read the array as if it were
    repeated along that axis."""
    if x is None:
        return [None, 0, 0, 0]
    strides = [stride // x.dtype.itemsize if size > 1 else 0 for stride, size in zip(x.strides[:-1], x.shape)]
    return [x.ref, *strides, *[0] * (3 - len(strides))]


def struct_words(values, member):
    size, words = size_of(member.inner) // WORD, []
    for value in values:
        inner = words_of(member.inner, value)
        taken = sum(MAP_WORDS if isinstance(word, TensorMap) else 1 for word in inner)
        words += [*inner, *[0] * (size - taken)]
    return words


WORDS = {
    "rows": row_words,
    "pointer": lambda x, _: [x.ref if isinstance(x, Array) else x],
    "integer": lambda x, _: [int(x)],
    "real": lambda x, _: [float(x)],
    "map": lambda x, _: [x],
    "shape": lambda x, _: [getattr(x, name) for name in SHAPE],
    "structs": struct_words,
}


class Packed:
    """The arguments of a launch with a gap for every address, which `filled` puts in place."""

    def __init__(self, declared, args, number):
        """`number` is the place of every memory among an execution's arrays."""
        size = size_of(declared)
        self.words, at = np.zeros(size // WORD, np.int64), 0
        reals, where, which, offset, self.maps = self.words.view(np.float64), [], [], [], []
        for word in words_of(declared, args):
            if isinstance(word, Ref):
                where.append(at)
                which.append(number[word.memory])
                offset.append(word.offset)
            elif isinstance(word, TensorMap):
                self.maps.append((at, word))
                at += MAP_WORDS - 1
            elif isinstance(word, float):
                reals[at] = word
            elif word is not None:
                self.words[at] = word
            at += 1
        self.where, self.which, self.offset = (np.array(found, np.int64) for found in (where, which, offset))

    def filled(self, addresses, tensor_map) -> np.ndarray:
        """The struct; `tensor_map` makes the bytes of one."""
        words = self.words.copy()
        words[self.where] = addresses[self.which] + self.offset
        for at, described in self.maps:
            words[at : at + MAP_WORDS] = np.frombuffer(tensor_map(described), np.int64)
        return words


def pack(declared, args) -> np.ndarray:
    """The struct from addresses that are integers already."""
    return Packed(declared, args, {}).words
