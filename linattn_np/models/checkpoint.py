"""Reads weights from files without torch: `.pth` in both of its forms, `.safetensors`, `.gguf`, and shards.

A pickle is a program. Therefore this module interprets the pickles of `.pth` files by itself. Values are tuples, dicts,
lists, strings, bytes, numbers, `Tensor` records, and an `Unmade` for any other object, such as a trainer's settings. No
opcode looks up an attribute, imports a module or calls anything but the functions in GLOBALS. Arrays are views of the
file. A *span* is (first byte, size) of a part of the file.
"""

from __future__ import annotations

import io
import math
import os
import pickletools
import struct
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, NoneType
from typing import NoReturn

import ml_dtypes
import numpy as np

from . import gguf_files
from .files import FileError, json_object, mapped
from .number_checks import shown
from .stored_zip import MAX_AXES, MAX_INDEX, directory

# Enough for a thousand layers, and small enough that a hostile file cannot keep the reader busy for long.
MAX_OPCODES = 1 << 18  # in one pickle; a tensor takes about 40
MAX_NAME = 1024

# The files of a Hugging Face folder that hold weights; the first one that exists is read.
IN_FOLDER = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# {what is asked for: the files of a folder that may be it}. Of a folder of `train` these are its own, which come first:
# the model may be there, too.
FILES_OF = {"model": IN_FOLDER, "adapter": ("adapter.safetensors", *IN_FOLDER), "load_state": ("state.pth",)}
SHARD_ENDINGS = (".safetensors", ".bin")

LFS_START = b"version https://git-lfs.github.com/spec/v1"  # the first bytes of a Git LFS pointer file
WRAPPER_KEYS = ("state_dict", "model_state_dict", "module", "model")  # keys under which trainers save the weights
MOST_WRAPPERS = 4  # dicts around the weights, one in the other
PROTOCOLS = range(2, 6)  # pickle protocols that are read
PICKLE_STARTS = [bytes([0x80, protocol]) for protocol in PROTOCOLS]  # the first bytes of pickles

# torch's older form: the values of the first two of its five pickles
TORCH_MAGIC, TORCH_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001

DTYPES = {  # {dtype: (its name in torch's pickles, its name in safetensors files)}
    np.float64: ("Double", "F64"),
    np.float32: ("Float", "F32"),
    np.float16: ("Half", "F16"),
    ml_dtypes.bfloat16: ("BFloat16", "BF16"),
    np.int64: ("Long", "I64"),
    np.int32: ("Int", "I32"),
    np.int16: ("Short", "I16"),
    np.int8: ("Char", "I8"),
    np.uint8: ("Byte", "U8"),
    np.bool: ("Bool", "BOOL"),
}
SAFETENSORS = {name: np.dtype(dtype) for dtype, (_, name) in DTYPES.items()}


class CheckpointError(FileError):
    """A file, or its weights, cannot be used; the message says what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A one-dimensional array of `count` elements in a file, with the key by which tensors refer to it."""

    key: str
    dtype: np.dtype
    count: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A view of a storage, with offset and strides in elements. It is not yet checked against the storage's size."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Unmade:
    """What stands for an object that a pickle would make by calling `name`, "<module> <name>", or for `name` itself."""

    name: str


def read(path) -> dict[str, np.ndarray]:
    """{name: array} of the weights in a file, as read-only views of its memory map. No array is copied, and no code of
    the file is executed. Trainers' dicts around the weights, and what they hold besides, are ignored.

    path : str or path
        `model.pth` (the zip that torch writes, or its older five pickles), `model.safetensors`, or
        `model.safetensors.index.json` with its shards beside it; or a folder of Hugging Face with one of
        these, or with `pytorch_model.bin`; or `model.gguf` of llama.cpp. A file must not change while its arrays
        are in use.

    Arrays have the dtypes of the file; bfloat16 is `ml_dtypes.bfloat16`. The checksums of a zip are checked, for which
    it is read once; the other forms have none.

    Raises
    ------
    CheckpointError
        The file is damaged, hostile, or none of these; the text has its name, what was found and what was expected.
    OSError
        The file cannot be opened.

    Example
    -------
    >>> from linattn_np.models import checkpoint
    >>> weights = checkpoint.read("examples/data/austen-x060/model.safetensors")
    >>> weights["emb.weight"].shape, str(weights["emb.weight"].dtype)
    ((256, 256), 'bfloat16')
    """
    path = located(path)
    try:
        if path.is_dir():
            refuse("is a folder without a checkpoint", "a file, or a folder with " + " or ".join(IN_FOLDER))
        data = mapped(path, "a checkpoint")
        # The ending decides before the first bytes: those of a safetensors file are its header's size, any number.
        if path.suffix == ".json":
            return shards(data, path.parent)
        if path.suffix == ".safetensors" and data[: len(LFS_START)] != LFS_START:
            return safetensors(data, path)
        if data[:4] == b"PK\3\4":
            return zipped(data)
        if data[8:9] == b"{":
            return safetensors(data, path)
        if data[:4] == gguf_files.MAGIC:
            return gguf_files.read(data, path)
        if data[:2] in PICKLE_STARTS:
            return five_pickles(data)
        if data[: len(LFS_START)] == LFS_START:
            refuse("is a pointer of Git LFS, which stands for a file that was not fetched", "it: git lfs pull")
        refuse(
            f"starts with {data[:8]!r}", "a .pth that torch wrote, a .safetensors, a .gguf, or the ending .index.json"
        )
    except FileError as error:
        raise CheckpointError(f"{path}: {error}") from None


def located(path, what="model") -> Path:
    """The first file of `FILES_OF[what]` that exists in the folder `path`; `path` itself if there is none."""
    path = Path(os.fsdecode(path))
    return next((path / name for name in FILES_OF.get(what, ()) if os.path.isfile(path / name)), path)


def config(path) -> dict | None:
    """The contents of the `config.json` in the checkpoint's folder; None if there is no such file."""
    path = located(path).with_name("config.json")
    if not path.is_file():
        return None
    try:
        return json_object(mapped(path, "a JSON object")[:MAX_INDEX])
    except FileError as error:
        raise CheckpointError(f"{path}: {error}") from None


def refuse(found, wanted) -> NoReturn:
    raise CheckpointError(f"{found}, expected {wanted}")


# -- the arrays ----------------------------------------------------------------------------------------------
def arrays(data, tensors, spans) -> dict[str, np.ndarray]:
    """{name: view of `data`} of `tensors`, {name: `Tensor`}; `spans` is {key of a storage: its span within `data`}."""
    views, claimed_bytes = {}, 0
    for name, tensor in tensors.items():
        if tensor.storage.key not in spans:
            refuse(f"{shown(name)} has no storage {shown(tensor.storage.key)} in the file", "its bytes")
        start, size = spans[tensor.storage.key]
        array = checked_view(data, start, size, tensor, name)
        claimed_bytes += array.nbytes
        if claimed_bytes > 2 * len(data):  # twice the file, because tied tensors share a storage
            refuse(
                f"the tensors up to {shown(name)} claim {claimed_bytes} bytes of a file of {len(data)}",
                "weights that the file holds",
            )
        views[name] = array
    return views


def checked_view(data, start, size, tensor, name):
    """The array of a tensor whose storage has `size` bytes from byte `start` of `data` on, after all checks."""
    storage, shape, strides = tensor.storage, tensor.shape, tensor.strides
    itemsize = storage.dtype.itemsize
    if size != storage.count * itemsize:
        refuse(
            f"{shown(name)} has a storage of {size} bytes",
            f"{storage.count} of {storage.dtype}, {storage.count * itemsize} bytes",
        )
    if len(shape) != len(strides) or len(shape) > MAX_AXES:
        refuse(f"{shown(name)} has {len(shape)} axes and {len(strides)} strides", f"as many, up to {MAX_AXES}")
    if any(not 0 <= number < 1 << 63 for number in (tensor.offset, *shape, *strides)):
        refuse(f"{shown(name)} has a negative or a huge offset, size or stride", "63 bits, from 0 up")
    elements = math.prod(shape)
    end = tensor.offset + (1 + sum((n - 1) * stride for n, stride in zip(shape, strides)) if elements else 0)
    if max(end, elements) > storage.count:
        refuse(
            f"{shown(name)} with offset {tensor.offset}, shape {shape}, strides {strides} takes "
            f"{elements} elements up to the {end}th",
            f"no more than its storage of {storage.count}",
        )
    try:
        return np.ndarray(
            shape, storage.dtype, data, start + tensor.offset * itemsize, [stride * itemsize for stride in strides]
        )
    except (ValueError, OverflowError) as error:  # the array is empty, but an axis exceeds NumPy's integers
        refuse(f"{shown(name)} has shape {shape}, strides {strides} ({error})", "an array")


# -- .pth, the zip: <stem>/data.pkl, and <stem>/data/<key> for each storage ----------------------------------
def zipped(data):
    """The arrays of a zip that torch wrote."""
    entries = directory(data)
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        refuse(f"the zip has {len(pickles)} entries named <stem>/data.pkl", "one, as torch writes it")
    stem = pickles[0].removesuffix("data.pkl")
    order = small_entry(data, entries.get(f"{stem}byteorder", (0, 0)))
    if order not in (b"", b"little"):  # older versions of torch write no byteorder; they were little-endian
        refuse(f"the byte order is {order[:20]!r}", "little")
    stream = io.BytesIO(small_entry(data, entries[pickles[0]]))
    tensors = state_dict(unpickle(stream))
    if rest := stream.read():
        refuse(f"{len(rest)} bytes follow the pickle in data.pkl", "none")
    prefix = f"{stem}data/"
    spans = {name.removeprefix(prefix): span for name, span in entries.items() if name.startswith(prefix)}
    return arrays(data, tensors, spans)


def small_entry(data, span) -> bytes:
    """The bytes of an entry of at most MAX_INDEX bytes."""
    start, size = span
    if size > MAX_INDEX:
        refuse(f"an entry beside the weights has {size} bytes", f"at most {MAX_INDEX}")
    return data[start : start + size]


# -- .pth, the older form: magic, protocol, system, state dict, keys; then each storage, its count first -----
def five_pickles(data):
    """The arrays of a file in the older form."""
    stream = io.BytesIO(data[:MAX_INDEX])
    magic, protocol, system = (unpickle(stream) for _ in range(3))
    if magic != TORCH_MAGIC or protocol != TORCH_PROTOCOL:
        refuse(
            f"the pickle starts with {told(magic)} and {told(protocol)}",
            f"torch's {TORCH_MAGIC:#x} and {TORCH_PROTOCOL}",
        )
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        refuse("the byte order is not little", "little")
    storages: dict[str, Storage] = {}
    tensors, keys = state_dict(unpickle(stream, storages)), unpickle(stream)
    if not isinstance(keys, list):
        refuse(f"the fifth pickle holds {told(keys)}", "a list of the storages")
    spans, position = {}, stream.tell()
    for key in keys:
        if not isinstance(key, str) or key not in storages or key in spans:
            refuse(f"storage {shown(key)} is listed twice or belongs to no tensor", "each tensor's storage once")
        (count,) = struct.unpack("<q", data[position : position + 8].ljust(8, b"\xff"))  # -1 at the end of the file
        size = count * storages[key].dtype.itemsize
        position += 8
        if not 0 <= size <= len(data) - position:
            refuse(
                f"storage {shown(key)} has {count} elements from byte {position}", f"its end before byte {len(data)}"
            )
        spans[key] = position, size
        position += size
    if position != len(data):
        refuse(f"{len(data) - position} bytes follow the last storage", "none")
    return arrays(data, tensors, spans)


# -- the interpreter of pickles; the next five functions stand for those of Python and torch that pickles call -------
def ordered_dict():
    return {}


def rebuild_tensor(storage, offset, shape, strides, requires_grad, hooks):
    if isinstance(storage, Unmade):  # of a dtype that NumPy lacks
        return storage
    if not (
        isinstance(storage, Storage)
        and type(shape) is type(strides) is tuple
        and all(type(number) is int for number in (offset, *shape, *strides))
    ):
        refuse("_rebuild_tensor_v2 is given something else", "a storage, an offset, a shape and strides")
    if isinstance(hooks, Unmade):
        refuse(f"a tensor has the hooks {told(hooks)}", "none")
    return Tensor(storage, offset, shape, strides)


def rebuild_parameter(tensor, requires_grad, hooks):
    return tensor


def rebuild_parameter_with_state(tensor, requires_grad, hooks, attributes):
    return tensor


def size(axes):
    return axes


GLOBALS = {
    "collections OrderedDict": ordered_dict,
    "torch._utils _rebuild_tensor_v2": rebuild_tensor,
    "torch._utils _rebuild_parameter": rebuild_parameter,
    "torch._utils _rebuild_parameter_with_state": rebuild_parameter_with_state,
    "torch Size": size,
    **{f"torch {name}Storage": np.dtype(dtype) for dtype, (name, _) in DTYPES.items()},
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
NUMBERS_AND_TEXT = frozenset(  # the opcodes whose argument is the value
    "BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 BININT BININT1 BININT2 "
    "LONG1 BINFLOAT".split()
)
KEYS = (str, int, float, bool, bytes, NoneType, Unmade)  # the types of keys of dicts


def unpickle(stream, storages=None):
    """The value of the pickle at the stream's position, which moves to its end; adds {key: storage} to `storages`."""
    try:
        return interpret(pickletools.genops(stream), {} if storages is None else storages)
    except CheckpointError:
        raise
    except (ValueError, IndexError, KeyError) as error:  # a truncated pickle, an empty stack, an unset memo
        refuse(f"the pickle is damaged ({type(error).__name__}: {str(error)[:100]})", "one that torch wrote")


def state_dict(value) -> dict[str, Tensor]:
    """The {name: tensor} that a pickle's value is, or holds under one of WRAPPER_KEYS, or under several."""
    for _ in range(MOST_WRAPPERS):
        if isinstance(value, dict):
            inner = (value[key] for key in WRAPPER_KEYS if isinstance(value.get(key), dict) and value[key])
            value = next(inner, value)
    if not isinstance(value, dict):
        refuse(f"the pickle holds {told(value)}", "a state dict, as torch.save(model.state_dict(), path) writes it")
    for name, tensor in value.items():
        if type(name) is not str or not isinstance(tensor, Tensor):
            wanted = f"tensors alone, a plain state dict, or one under {', '.join(WRAPPER_KEYS)}"
            refuse(f"{told(name)} is {told(tensor)}", wanted)
    return value


def told(value) -> str:
    """A pickle's value as short text for an error."""
    return f"an object of {shown(value.name)}" if isinstance(value, Unmade) else shown(value)


def interpret(program, storages):
    """The value of a pickle, from its opcodes `program`; adds {key: storage} to `storages`."""
    frames, memo = [[]], {}  # MARK opens a frame, a list of items; a later opcode removes the frame and uses its items
    for step, (opcode, argument, _) in enumerate(program):
        if step == MAX_OPCODES:
            refuse(f"the pickle has more than {MAX_OPCODES} opcodes", "a state dict")
        top = frames[-1]
        match opcode.name:
            case "BINGET" | "LONG_BINGET":
                top.append(memo[argument])
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = top[-1]
            case "MEMOIZE":
                memo[len(memo)] = top[-1]
            case name if name in NUMBERS_AND_TEXT:
                top.append(argument)
            case name if name in CONSTANTS:
                top.append(CONSTANTS[name])
            case "EMPTY_DICT":
                top.append({})
            case "EMPTY_LIST":
                top.append([])
            case "EMPTY_SET":
                top.append(Unmade("builtins set"))
            case "FROZENSET":
                frames[-2].append(Unmade("builtins frozenset"))
                frames.pop()
            case "MARK":
                frames.append([])
            case "TUPLE":
                frames[-2].append(tuple(frames.pop()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                top.append(tuple(popped(top, int(opcode.name[-1]))))
            case "SETITEM":
                items = popped(top, 2)
                set_items(top[-1], items)
            case "SETITEMS":
                set_items(frames[-2][-1], frames.pop())
            case "APPEND":
                items = popped(top, 1)
                append_items(top[-1], items)
            case "APPENDS" | "ADDITEMS":
                append_items(frames[-2][-1], frames.pop())
            case "GLOBAL":
                top.append(GLOBALS.get(argument, Unmade(argument)))
            case "STACK_GLOBAL":
                name = " ".join(map(checked_text, popped(top, 2)))
                top.append(GLOBALS.get(name, Unmade(name)))
            case "BINPERSID":
                top.append(storage_of(top.pop(), storages))
            case "REDUCE":
                top.append(call_global(*popped(top, 2)))
            case "NEWOBJ" | "NEWOBJ_EX":
                made, *_ = popped(top, 3 if opcode.name == "NEWOBJ_EX" else 2)
                if not isinstance(made, Unmade):
                    refuse(f"the pickle makes an object of {told(made)}", "a class")
                top.append(made)
            case "BUILD":  # sets attributes, such as `_metadata` of a state dict; they are ignored
                (attributes,) = popped(top, 1)
                if not isinstance(top[-1], Unmade) and [type(attributes), type(top[-1])] != [dict, dict]:
                    refuse("the pickle sets attributes", "at most those of a state dict")
            case "PROTO" if argument in PROTOCOLS:
                pass
            case "FRAME":  # tells the size of the next part; not needed
                pass
            case "STOP":
                return top.pop()
            case name:
                refuse(f"the pickle has the opcode {name} {shown(argument)}", "those of a state dict, protocols 2 to 5")


def checked_text(value):
    """`value`, after checking that it is a string."""
    if type(value) is not str:
        refuse(f"the pickle asks for {shown(value)}", "a module and a name")
    return value


def popped(stack, count):
    """Removes the last `count` items from the stack and returns them."""
    if len(stack) < count:
        raise IndexError("the stack is too short")
    items = stack[-count:]
    del stack[-count:]
    return items


def set_items(target, items):
    """Adds keys and values, alternating in `items`, to a dict; an `Unmade` ignores them."""
    if isinstance(target, Unmade):
        return
    if type(target) is not dict or len(items) % 2:
        refuse(f"the pickle sets {len(items)} keys and values of {shown(target)}", "pairs, of a dict")
    for name, value in zip(items[::2], items[1::2]):
        if type(name) not in KEYS or (type(name) is str and len(name) > MAX_NAME):
            refuse(f"a key is {told(name)}", f"a whole number or a string of up to {MAX_NAME} characters")
        if name in target:
            refuse(f"the key {shown(name)} is there twice", "keys that differ")
        target[name] = value


def append_items(target, items):
    """Adds `items` to a list; an `Unmade`, such as a set, ignores them."""
    if isinstance(target, Unmade):
        return
    if type(target) is not list:
        refuse(f"the pickle appends to {shown(target)}", "a list")
    target.extend(items)


def call_global(function, arguments):
    """The result of `function`, after checking that it is one of GLOBALS and gets as many arguments as it takes. An
    `Unmade` is not called: it stands for its result, too."""
    if isinstance(function, Unmade):
        return function
    if type(function) is not FunctionType or type(arguments) is not tuple:
        refuse(f"the pickle calls {shown(function)}", "a function of " + ", ".join(GLOBALS))
    if len(arguments) != function.__code__.co_argcount:
        refuse(f"{function.__name__} gets {len(arguments)} arguments", f"{function.__code__.co_argcount}")
    return function(*arguments)


def storage_of(reference, storages):
    """The storage for a pickle's persistent id ('storage', type, key, device, count); in the older form None follows.
    Adds the storage to `storages`."""
    if type(reference) is not tuple or len(reference) not in (5, 6) or any(item is not None for item in reference[5:]):
        refuse(f"a persistent id is {shown(reference)}", "('storage', type, key, device, count)")
    tag, dtype, key, _, count = reference[:5]
    if (
        type(tag) is not str
        or tag != "storage"
        or not isinstance(dtype, (np.dtype, Unmade))
        or type(key) is not str
        or type(count) is not int
    ):
        refuse(
            f"a persistent id holds {shown(tag)}, {shown(dtype)}, {shown(key)}, {shown(count)}",
            "'storage', a storage type, a key, a count",
        )
    if isinstance(dtype, Unmade):
        return dtype
    storage = Storage(key, dtype, count)
    if storages.setdefault(key, storage) != storage:
        refuse(f"storage {shown(key)} is described in two ways", "one dtype and one size")
    return storage


# -- .safetensors --------------------------------------------------------------------------------------------
def safetensors(data, path):
    """The arrays of a safetensors file, whose header the safetensors package has checked for overlaps and gaps."""
    from safetensors import SafetensorError, safe_open

    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= min(MAX_INDEX, len(data) - 8):
        refuse(f"the header claims {size} bytes in a file of {len(data)}", f"at most {MAX_INDEX}, inside of the file")
    try:
        with safe_open(path, framework="numpy"):
            header = json_object(data[8 : 8 + size])
    except SafetensorError as error:
        refuse(f"is damaged ({str(error)[:200]})", "a sound safetensors file")
    header.pop("__metadata__", None)
    tensors, spans = {}, {}
    for name, entry in header.items():
        if not isinstance(entry, dict):  # the package also accepts a list of the values
            refuse(f"{shown(name)} is {shown(entry)} in the header", "a dict")
        dtype, shape, (first, end) = (entry[key] for key in ("dtype", "shape", "data_offsets"))
        if len(shape) > MAX_AXES:  # checked before the strides, which take quadratic time
            refuse(f"{shown(name)} has {len(shape)} axes", f"up to {MAX_AXES}")
        if not isinstance(dtype, str) or dtype not in SAFETENSORS:
            refuse(f"{shown(name)} has dtype {shown(dtype)}", "one of " + ", ".join(SAFETENSORS))
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        storage = Storage(name, SAFETENSORS[dtype], math.prod(shape))
        tensors[name] = Tensor(storage, 0, tuple(shape), strides)
        spans[name] = 8 + size + first, end - first
    return arrays(data, tensors, spans)


def shards(data, folder):
    """The weights of all shards that the index `data` names, which are files in the index's folder."""
    if len(data) > MAX_INDEX:
        refuse(f"the index has {len(data)} bytes", f"at most {MAX_INDEX}")
    index = json_object(data[:])
    shard_of_name = index.get("weight_map")
    if not isinstance(shard_of_name, dict) or not shard_of_name:
        refuse(f"weight_map is {shown(shard_of_name)}", "a dict from names to shards")
    names = {}
    for name, shard in shard_of_name.items():
        if not isinstance(shard, str) or set(shard) & set("/\\:\0") or not shard.endswith(SHARD_ENDINGS):
            refuse(f"a shard is {shown(shard)}", "the name of a .safetensors file, or a .bin one, in the same folder")
        if not os.path.isfile(folder / shard):  # also False for a name that is not valid
            refuse(f"the shard {shown(shard)} is not there", "it in the same folder")
        names.setdefault(shard, set()).add(name)
    weights_by_name = {}
    for shard, wanted in names.items():
        weights = read(folder / shard)
        if unmatched := sorted(wanted ^ weights.keys()):
            refuse(f"the index and {shown(shard)} disagree on {shown(unmatched[0])}", "the same names in both")
        weights_by_name.update(weights)
    return weights_by_name
