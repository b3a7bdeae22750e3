"""Arrays written as torch.save writes a state dict, for programs that read nothing else; `checkpoint` reads them."""

import math
import struct
import zipfile
from collections.abc import Mapping

import numpy as np

from .files import replaced

FOLDER = "archive"
ORDERED_DICT = b"ccollections\nOrderedDict\n)R"  # a call without arguments


def write(path, arrays: Mapping[str, np.ndarray]):
    """A `.pth` of float32 arrays in the place of an older one, whole or not at all: a zip of a pickle and each array's
    bytes."""
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
    """A call of torch's function that makes a tensor of a storage, which is known by its key."""
    count, strides = math.prod(shape), [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    storage = [text("storage"), b"ctorch\nFloatStorage\n", text(key), text("cpu"), number(count)]
    sizes = (parts(map(number, axes)) for axes in (shape, strides))
    arguments = [parts(storage) + b"Q", number(0), *sizes, b"\x89", ORDERED_DICT]
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + parts(arguments) + b"R"


def parts(items) -> bytes:
    return b"(" + b"".join(items) + b"t"


def text(value) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)
