"""Writes arrays as torch.save writes a state dict, for programs that read no other format; `checkpoint` reads them."""

import math
import struct
import zipfile
from collections.abc import Mapping

import numpy as np

from .files import replaced

FOLDER = "archive"
ORDERED_DICT = b"ccollections\nOrderedDict\n)R"  # a call without arguments


def write(path, arrays: Mapping[str, np.ndarray]):
    """Writes a `.pth` of float32 arrays: a zip of a pickle and each array's bytes. If this fails, an older file at
    `path` is unchanged."""
    with replaced(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as out:
        out.writestr(f"{FOLDER}/data.pkl", pickled(arrays))
        out.writestr(f"{FOLDER}/byteorder", "little")
        for key, array in enumerate(arrays.values()):
            out.writestr(f"{FOLDER}/data/{key}", np.ascontiguousarray(array, "<f4").tobytes())
        out.writestr(f"{FOLDER}/version", "3\n")


def pickled(arrays) -> bytes:
    """The pickle, protocol 2, of an OrderedDict of tensors."""
    items = b"".join(text(name) + tensor(str(key), array.shape) for key, (name, array) in enumerate(arrays.items()))
    return b"\x80\x02" + ORDERED_DICT + b"(" + items + b"u."


def tensor(key, shape) -> bytes:
    """The opcodes of a tensor: a call of torch's function that makes it from the storage with this key."""
    count, strides = math.prod(shape), [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    storage = [text("storage"), b"ctorch\nFloatStorage\n", text(key), text("cpu"), number(count)]
    sizes = (parts(map(number, axes)) for axes in (shape, strides))
    arguments = [parts(storage) + b"Q", number(0), *sizes, b"\x89", ORDERED_DICT]
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + parts(arguments) + b"R"


def parts(items) -> bytes:
    """The opcodes of a tuple."""
    return b"(" + b"".join(items) + b"t"


def text(value) -> bytes:
    """The opcode of a string."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value) -> bytes:
    """The opcode of an integer."""
    return b"\x8a\x08" + struct.pack("<q", value)
