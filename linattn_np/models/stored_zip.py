"""Zips without compression, as torch and `numpy.savez` write them: the places of their entries in a memory map."""

import math
import re
import struct
import zlib

import numpy as np

from .files import refuse
from .number_checks import shown

MAX_INDEX = 1 << 21  # the most bytes of a zip's directory, of a pickle, or of a JSON header
WIDE = 0xFFFFFFFF  # a 32-bit field with this value has its number in a 64-bit field elsewhere
MAX_AXES = 8
MAX_HEADER = 1 << 10  # bytes of an .npy's header
HEADER = re.compile(rb"\{'descr': '([^']{1,20})', 'fortran_order': (False|True), 'shape': \(([\d, ]{0,200})\), \} *\n")


def directory(data) -> dict[str, tuple[int, int]]:
    """{name: (first byte, size)} of all entries, as the zip's directory says and the local headers confirm.

    It refuses what other readers might read differently: the directory and its end records must be the end of the file
    and agree with each other, names must be unique, entries must not be compressed, and checksums must be right.
    """
    end = len(data) - 22  # the end of the directory, which is the first byte of its first end record
    *_, count, size, start, comment = fields(data, "<4s4H2IH", end, b"PK\5\6", "an end record in the last 22 bytes")
    if comment:
        refuse(f"the zip ends with a comment of {comment} bytes", "none")
    if data[max(end - 20, 0) : end][:4] == b"PK\6\7":  # a zip64 end record, its locator, and the plain end record
        narrow, locator = (count, size, start), end - 20
        _, _, end, _ = fields(data, "<4sIQI", locator, b"PK\6\7", "a zip64 locator")
        *_, count, size, start = fields(data, "<4sQ2H2I4Q", end, b"PK\6\6", "a zip64 end record")
        if end + struct.calcsize("<4sQ2H2I4Q") != locator:
            refuse(
                f"the zip64 end record is at byte {end}, and its locator at byte {locator}", "one right after the other"
            )
        wide = (min(count, 0xFFFF), min(size, WIDE), min(start, WIDE))
        if any(number not in (here, limit) for number, here, limit in zip(narrow, wide, (0xFFFF, WIDE, WIDE))):
            refuse(f"the zip's end records say {narrow} and {(count, size, start)}", "the same of both")
    if start + size != end or size > MAX_INDEX:
        refuse(
            f"the zip's directory has {size} bytes from byte {start}, and its end record is at byte {end}",
            f"at most {MAX_INDEX} bytes, right before its end record",
        )
    entries, checksums, position = {}, {}, start
    while position < end:
        entry = fields(data, "<4s6H3I5H2I", position, b"PK\1\2", "the next entry of the zip's directory")
        _, _, _, flags, method, _, _, checksum, packed, unpacked, *sizes, _, _, _, header = entry
        name_size, extra_size, comment_size = sizes
        position += 46
        raw = data[position : position + name_size]
        name = raw.decode("utf-8", "backslashreplace")
        extra = data[position + name_size : position + name_size + extra_size]
        position += name_size + extra_size + comment_size
        unpacked, packed, header = zip64_values((unpacked, packed, header), extra)
        if method or flags & 1 or packed != unpacked:
            refuse(
                f"entry {shown(name)} is compressed or encrypted (method {method}, {packed} bytes for {unpacked})",
                "it stored as it is",
            )
        if name in entries:
            refuse(f"entry {shown(name)} is there twice", "names that differ")
        entries[name], checksums[name] = body(data, header, raw, unpacked, start), checksum
    if position != end or len(entries) != count:
        refuse(f"the zip's directory has {len(entries)} entries up to byte {position}", f"{count}, up to byte {end}")
    verify_checksums(data, entries, checksums)
    return entries


def verify_checksums(data, entries, checksums):
    """FileError if the bytes of an entry have another checksum than `checksums` says; both dicts are by name."""
    # Overlapping entries would let a small file keep the reader busy for long.
    if (claimed := sum(size for _, size in entries.values())) > len(data):
        refuse(f"the entries claim {claimed} bytes of a file of {len(data)}", "entries that do not overlap")
    for name, (start, size) in entries.items():
        with memoryview(data) as view, view[start : start + size] as content:
            found = zlib.crc32(content)
        if checksums[name] not in (found, 0):  # 0: torch can be told to write no checksums
            refuse(f"entry {shown(name)} is damaged, with the checksum {found:#010x}", f"{checksums[name]:#010x}")


def body(data, header, name, size, end):
    """(first byte, size) of the entry with its local header at byte `header`. FileError if that header has another name
    or size, or if the entry goes beyond byte `end`."""
    entry = f"entry {shown(name.decode('latin-1'))}"
    _, _, flags, method, _, _, _, packed, unpacked, name_size, extra_size = fields(
        data, "<4s5H3I2H", header, b"PK\3\4", f"the local header of {entry}"
    )
    start = header + 30 + name_size + extra_size
    same_name = data[header + 30 : header + 30 + name_size] == name
    sizes = {size, WIDE, 0} if flags & 8 else {size, WIDE}  # 8: the sizes follow the entry
    if method or flags & 1 or not same_name or not {packed, unpacked} <= sizes:
        refuse(
            f"the local header of {entry} disagrees with the zip's directory", f"the same name, stored, {size} bytes"
        )
    if start + size > end:
        refuse(f"{entry} runs to byte {start + size}", f"its end before byte {end}")
    return start, size


def fields(data, layout, start, signature, wanted):
    """The fields of the record from byte `start` on, of a `layout` as in `struct`. FileError, which says that `wanted`
    was expected, unless the record is inside the file and begins with the four bytes `signature`."""
    if not 0 <= start <= len(data) - struct.calcsize(layout) or data[start : start + 4] != signature:
        refuse(f"the zip is cut short or damaged at byte {start}", wanted)
    return struct.unpack_from(layout, data, start)


def zip64_values(values, extra):
    """The `values` of a directory entry. Those that are WIDE are replaced by the numbers, in this order, of the zip64
    field among the entry's `extra` fields."""
    position = 0
    while position + 4 <= len(extra):
        field_id, size = struct.unpack_from("<2H", extra, position)
        if field_id == 1:
            field = extra[position + 4 : position + 4 + size]
            wide = iter(struct.unpack_from(f"<{len(field) // 8}Q", field))
            return [next(wide, value) if value == WIDE else value for value in values]
        position += 4 + size
    return values


def floats(data, span, name) -> np.ndarray:
    """A copy of the float32 array of the .npy at `span` (first byte, size); FileError for another header than NumPy
    writes. `name` is for the error."""
    start, size = span
    head = data[start : start + min(size, MAX_HEADER)]
    length = int.from_bytes(head[8:10], "little")
    match = HEADER.fullmatch(head[10 : 10 + length])
    if head[:8] != b"\x93NUMPY\1\0" or not match:
        refuse(f"has {name} with another header", "that of a plain array, as numpy.savez writes it")
    descr, fortran, axes = match.groups()
    if descr != b"<f4":
        refuse(f"has {name} in {dtype_name(descr)}", "float32")
    shape = tuple(int(axis) for axis in axes.replace(b",", b" ").split())
    numbers = math.prod(max(1, axis) for axis in shape)  # NumPy refuses large axes beside one of 0, too
    if len(shape) > MAX_AXES or numbers >= 1 << 60 or size - 10 - length != 4 * math.prod(shape):
        sizes = f"{len(shape)} axes" if len(shape) > MAX_AXES else " x ".join(map(shown, shape)) or "one number"
        refuse(f"has {name} in {size - 10 - length} bytes", f"as many as an array of {sizes} has")
    return np.ndarray(shape, np.float32, data, start + 10 + length, order="F" if fortran == b"True" else "C").copy()


def dtype_name(descr: bytes) -> str:
    """The name of a dtype in an .npy's header, for an error."""
    try:
        return str(np.dtype(descr.decode()))
    except (TypeError, ValueError, SyntaxError):
        return shown(descr.decode("latin-1"))
