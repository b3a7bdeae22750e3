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

    It refuses what other readers might read differently: the directory and its end record must be the end of the file,
    names must be unique, entries must not be compressed, and checksums must be right.
    """
    at = len(data) - 22
    *_, count, size, start, _ = fields(data, "<4s4H2IH", at, b"PK\5\6", "an end record in the last 22 bytes")
    if data[max(at - 20, 0) : at][:4] == b"PK\6\7":
        _, _, at, _ = fields(data, "<4sIQI", at - 20, b"PK\6\7", "a zip64 locator")
        *_, count, size, start = fields(data, "<4sQ2H2I4Q", at, b"PK\6\6", "a zip64 end record")
    if start + size != at or size > MAX_INDEX:
        refuse(
            f"the zip's directory has {size} bytes from byte {start}, and its end record is at byte {at}",
            f"at most {MAX_INDEX} bytes, right before its end record",
        )
    entries, checksums, here = {}, {}, start
    while here < at:
        entry = fields(data, "<4s6H3I5H2I", here, b"PK\1\2", "the next entry of the zip's directory")
        _, _, _, flags, method, _, _, checksum, packed, unpacked, *sizes, _, _, _, header = entry
        name_size, extra_size, comment_size = sizes
        here += 46
        raw = data[here : here + name_size]
        name = raw.decode("utf-8", "backslashreplace")
        extra = data[here + name_size : here + name_size + extra_size]
        here += name_size + extra_size + comment_size
        unpacked, packed, header = widened((unpacked, packed, header), extra)
        if method or flags & 1 or packed != unpacked:
            refuse(
                f"entry {shown(name)} is compressed or encrypted (method {method}, {packed} bytes for {unpacked})",
                "it stored as it is",
            )
        if name in entries:
            refuse(f"entry {shown(name)} is there twice", "names that differ")
        entries[name], checksums[name] = body(data, header, raw, unpacked, start), checksum
    if here != at or len(entries) != count:
        refuse(f"the zip's directory has {len(entries)} entries up to byte {here}", f"{count}, up to byte {at}")
    check_sums(data, entries, checksums)
    return entries


def check_sums(data, entries, checksums):
    """Refuses a zip with an entry of another checksum than its directory says."""
    # entries that overlap would let a small file take long
    if (claimed := sum(size for _, size in entries.values())) > len(data):
        refuse(f"the entries claim {claimed} bytes of a file of {len(data)}", "entries that do not overlap")
    for name, (start, size) in entries.items():
        with memoryview(data) as view, view[start : start + size] as content:
            found = zlib.crc32(content)
        if checksums[name] not in (found, 0):  # 0: torch can be told to write no checksums
            refuse(f"entry {shown(name)} is damaged, with the checksum {found:#010x}", f"{checksums[name]:#010x}")


def body(data, header, name, size, end):
    """(first byte, size) of the entry with its local header at byte `header`; it must end by byte `end`."""
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


def fields(data, layout, at, signature, wanted):
    """The fields of a record at byte `at`, by its `layout` as in `struct`; its first four bytes must be `signature`."""
    if not 0 <= at <= len(data) - struct.calcsize(layout) or data[at : at + 4] != signature:
        refuse(f"the zip is cut short or damaged at byte {at}", wanted)
    return struct.unpack_from(layout, data, at)


def widened(values, extra):
    """The `values` of a directory entry, with those that are WIDE replaced by the numbers of its zip64 field, which has
    them in this order."""
    here = 0
    while here + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, here)
        if kind == 1:
            field = extra[here + 4 : here + 4 + size]
            wide = iter(struct.unpack_from(f"<{len(field) // 8}Q", field))
            return [next(wide, value) if value == WIDE else value for value in values]
        here += 4 + size
    return values


def floats(data, place, name) -> np.ndarray:
    """A copy of the float32 array of the .npy at `place` (first byte, size), after checking its header."""
    start, size = place
    head = data[start : start + min(size, MAX_HEADER)]
    length = int.from_bytes(head[8:10], "little")
    match = HEADER.fullmatch(head[10 : 10 + length])
    if head[:8] != b"\x93NUMPY\1\0" or not match:
        refuse(f"has {name} with another header", "that of a plain array, as numpy.savez writes it")
    descr, fortran, axes = match.groups()
    if descr != b"<f4":
        refuse(f"has {name} in {named(descr)}", "float32")
    shape = tuple(int(axis) for axis in axes.replace(b",", b" ").split())
    if len(shape) > MAX_AXES or size - 10 - length != 4 * math.prod(shape):
        sizes = f"{len(shape)} axes" if len(shape) > MAX_AXES else " x ".join(map(shown, shape)) or "one number"
        refuse(f"has {name} in {size - 10 - length} bytes", f"as many as an array of {sizes} has")
    return np.ndarray(shape, np.float32, data, start + 10 + length, order="F" if fortran == b"True" else "C").copy()


def named(descr: bytes) -> str:
    """The name of a dtype in an .npy's header, for an error."""
    try:
        return str(np.dtype(descr.decode()))
    except (TypeError, ValueError, SyntaxError):
        return shown(descr.decode("latin-1"))
