"""Checkpoints as torch and safetensors write them, to the byte and without either; parts of them may be wrong."""

import io
import json
import math
import pickle
import struct
import zlib
from functools import cache

import ml_dtypes
import numpy as np

TYPES = {
    np.dtype(dtype): name
    for dtype, name in (
        (np.float64, "Double"),
        (np.float32, "Float"),
        (np.float16, "Half"),
        (ml_dtypes.bfloat16, "BFloat16"),
        (np.int64, "Long"),
        (np.int32, "Int"),
        (np.int16, "Short"),
        (np.int8, "Char"),
        (np.uint8, "Byte"),
        (np.bool, "Bool"),
    )
}
SAFETENSORS = {
    "Double": "F64",
    "Float": "F32",
    "Half": "F16",
    "BFloat16": "BF16",
    "Long": "I64",
    "Int": "I32",
    "Short": "I16",
    "Char": "I8",
    "Byte": "U8",
    "Bool": "BOOL",
}
MAGIC, PROTOCOL, SYSTEM = (
    0x1950A86A20F9469CFC6C,
    1001,
    {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}},
)


# -- pickles -------------------------------------------------------------------------------------------------
class Callable:
    def __call__(self):
        raise AssertionError("a pickler asks only whether a function can be called")


class Global(Callable):
    """A module's attribute in a pickle."""

    def __init__(self, module, name):
        self.text = f"c{module}\n{name}\n".encode()


class Call(Callable):
    """What `function(*arguments)` gives, with items set and a state built, in a pickle."""

    def __init__(self, function, *arguments, state=None, items=()):
        self.reduction = function, arguments, state, None, items


class Persistent:
    def __init__(self, *identity):
        self.identity = identity


class Raw:
    """Opcodes as they are, that leave one value on the stack."""

    def __init__(self, opcodes):
        self.opcodes = opcodes


class Pickler(pickle._Pickler):
    def save(self, value, save_persistent_id=True):
        if isinstance(value, Raw):
            self.write(value.opcodes)
        elif isinstance(value, (Global, Call)) and id(value) in self.memo:
            self.write(self.get(self.memo[id(value)][0]))
        elif isinstance(value, Global):
            self.write(value.text)
            self.memoize(value)
        elif isinstance(value, Call):
            *reduction, items = value.reduction
            self.save_reduce(*reduction, iter(items), obj=value)
        else:
            super().save(value, save_persistent_id)

    def persistent_id(self, value):
        return value.identity if isinstance(value, Persistent) else None


def pickled(value, protocol=2):
    stream = io.BytesIO()
    Pickler(stream, protocol).dump(value)
    return stream.getvalue()


@cache
def named(module, name):
    return Global(module, name)


ORDERED_DICT = named("collections", "OrderedDict")
REBUILD = named("torch._utils", "_rebuild_tensor_v2")
PARAMETER = named("torch._utils", "_rebuild_parameter")


def storage(dtype, key, count, *view):
    return Persistent("storage", named("torch", f"{TYPES[np.dtype(dtype)]}Storage"), key, "cpu", count, *view)


def tensor(base, shape, strides=None, offset=0):
    if strides is None:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Call(REBUILD, base, offset, shape, strides, False, Call(ORDERED_DICT))


# -- files as they are written -------------------------------------------------------------------------------
def stored(weights):
    """Contiguous little-endian bytes of each array."""
    return [np.ascontiguousarray(array).tobytes() for array in weights.values()]


def zipped_pth(weights, stem="model", serialization_id="0" * 40, around=()):
    """`weights` as torch.save writes them, under the keys `around` of dicts, the outer one first."""
    root = state_dict(weights)
    for key in reversed(around):
        root = {key: root}
    return zipped(root, stored(weights), stem, serialization_id)


def state_dict(weights, *view):
    return {
        name: tensor(storage(array.dtype, str(key), array.size, *view), array.shape)
        for key, (name, array) in enumerate(weights.items())
    }


def zipped(root, storages, stem="model", serialization_id="0" * 40):
    return archive(entries(pickled(root), storages, stem, serialization_id))


def entries(pickle_bytes, storages, stem="model", serialization_id="0" * 40, order=b"little"):
    return [
        (f"{stem}/{name}", body)
        for name, body in (
            ("data.pkl", pickle_bytes),
            (".format_version", b"1"),
            (".storage_alignment", b"64"),
            ("byteorder", order),
            *((f"data/{key}", body) for key, body in enumerate(storages)),
            ("version", b"3\n"),
            (".data/serialization_id", serialization_id.encode()),
        )
    ]


def archive(members, local=None, central=None, end=None):
    """The zip of torch's writer, entries on 64 bytes; the last three change fields of headers, by number."""
    out, directory = io.BytesIO(), b""
    for number, (name, body) in enumerate(members):
        at, raw = out.tell(), name.encode()
        pad = -(at + 34 + len(raw)) % 64
        header = {
            "flags": 0x808,
            "method": 0,
            "crc": zlib.crc32(body),
            "packed": len(body),
            "unpacked": len(body),
            "name": raw,
            "at": at,
            "extra": b"",
        }
        here = {**header, "crc": 0, "packed": 0, "unpacked": 0, **(local or {}).get(number, {})}
        out.write(struct.pack("<4s5H3I2H", b"PK\3\4", 0, *fields_of_both(here), pad + 4) + here["name"])
        out.write(b"FB" + struct.pack("<H", pad) + b"Z" * pad + body)
        out.write(struct.pack("<4s3I", b"PK\7\10", zlib.crc32(body), len(body), len(body)))
        here = {**header, **(central or {}).get(number, {})}
        rest = len(here["extra"]), 0, 0, 0, 0, here["at"]
        directory += struct.pack("<4s6H3I5H2I", b"PK\1\2", 0, 0, *fields_of_both(here), *rest)
        directory += here["name"] + here["extra"]
    here = {"count": len(members), "size": len(directory), "start": out.tell(), **(end or {})}
    out.write(directory)
    at = here.get("end64", out.tell())
    out.write(
        struct.pack(
            "<4sQ2H2I4Q", b"PK\6\6", 44, 0x31E, 45, 0, 0, here["count"], here["count"], here["size"], here["start"]
        )
    )
    out.write(here.get("before_locator", b"") + struct.pack("<4sIQI", b"PK\6\7", 0, at, 1))
    limits = {"count": 0xFFFF, "size": 0xFFFFFFFF, "start": 0xFFFFFFFF}
    plain = {name: min(here[name], limit) for name, limit in limits.items()} | {"comment": 0, **here.get("plain", {})}
    out.write(
        struct.pack(
            "<4s4H2IH",
            b"PK\5\6",
            *(0, 0, plain["count"], plain["count"], plain["size"], plain["start"], plain["comment"]),
        )
    )
    return out.getvalue()


def fields_of_both(here):
    """The fields that an entry's local header and the directory have alike; between the method and the checksum is the
    time."""
    return here["flags"], here["method"], 0, 0, here["crc"], here["packed"], here["unpacked"], len(here["name"])


def older_pth(weights, keys=None):
    """`weights` as torch.save writes them without its zip; torch's keys are addresses."""
    keys = [str(key) for key in (keys or range(len(weights)))]
    root = {
        name: tensor(storage(array.dtype, key, array.size, None), array.shape)
        for key, (name, array) in zip(keys, weights.items())
    }
    bodies = {key: counted(array.size, body) for key, array, body in zip(keys, weights.values(), stored(weights))}
    return older(root, sorted(bodies), b"".join(bodies[key] for key in sorted(bodies)))


def counted(count, body):
    return struct.pack("<q", count) + body


def older(root, keys, bodies, magic=MAGIC, protocol=PROTOCOL, system=SYSTEM):
    return b"".join(map(pickled, (magic, protocol, system, root, keys))) + bodies


def safetensors(header, body=b"", size=None):
    """A header, a dict or JSON text, and the bytes behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + body


def described(shape, first, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


def good_safetensors(weights):
    header, end = {}, 0
    for name, array in weights.items():
        header[name] = described(array.shape, end, end + array.nbytes, SAFETENSORS[TYPES[array.dtype]])
        end += array.nbytes
    return safetensors(header, b"".join(stored(weights)))


# -- GGUF ----------------------------------------------------------------------------------------------------
def gguf_text(words):
    return struct.pack("<Q", len(words)) + words


def gguf_file(fields=(), tensors=(), counts=None, version=3, data=bytes(64)):
    """A file of rwkv6; fields are (name, type's number, its bytes), tensors (name, axes, type's number, offset)."""
    fields = [(b"general.architecture", 8, gguf_text(b"rwkv6")), *fields]
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(fields))))
    head += b"".join(gguf_text(name) + struct.pack("<I", kind) + value for name, kind, value in fields)
    for name, axes, kind, offset in tensors:
        head += gguf_text(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, kind, offset)
    return head + bytes(-len(head) % 32) + data
