"""Zips without compression, as torch and `numpy.savez` write them: the places of their entries in a memory map."""

import math
import re
import struct
import zlib
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from .files import refuse
from .number_checks import shown

MAX_INDEX = 1 << 21  # the most bytes of a zip's directory, of a pickle, or of a JSON header
WIDE = 0xFFFFFFFF  # a 32-bit field with this value has its number in a 64-bit field elsewhere
ZIP64_EXTRA = 1  # the id of the extra field that has these numbers of an entry
MAX_AXES = 8
MAX_HEADER = 1 << 10  # bytes of an .npy's header
NPY_START, NPY_PREFIX = b"\x93NUMPY\1\0", 10  # an .npy's first bytes; the byte after the two of its header's length
# Of other descriptions NumPy might end the process: "m8[s/0]" divides by zero.
PLAIN_DESCR = re.compile(rb"[<>|=]?[a-zA-Z?]\d{0,3}")
HEADER = re.compile(rb"\{'descr': '([^']{1,20})', 'fortran_order': (False|True), 'shape': \(([\d, ]{0,200})\), \} *\n")


class Record(NamedTuple):
    """A kind of record in a zip.

    signature : its first four bytes
    layout, names : of the fields after them, the layout as in `struct`, and the names; "_" if nobody reads a field
    """

    signature: bytes
    layout: str
    names: str

    @property
    def size(self) -> int:
        return struct.calcsize(f"<4s{self.layout}")

    def read(self, data, start, wanted) -> SimpleNamespace:
        """The fields of the record from byte `start` on. FileError, which says that `wanted` was expected, unless the
        record is inside the file and has the signature."""
        if not 0 <= start <= len(data) - self.size or data[start : start + 4] != self.signature:
            refuse(f"the zip is cut short or damaged at byte {start}", wanted)
        _, *values = struct.unpack_from(f"<4s{self.layout}", data, start)
        return SimpleNamespace(**dict(zip(self.names.split(), values, strict=True)))


# count, size, start: the directory's entries, bytes and first byte; end64: the first byte of END64; packed, unpacked:
# sizes of an entry; ..._bytes: lengths of the name, the extra fields and the comment, which follow the record in turn.
END = Record(b"PK\5\6", "4H2IH", "_ _ _ count size start comment_bytes")
END64 = Record(b"PK\6\6", "Q2H2I4Q", "_ _ _ _ _ _ count size start")
LOCATOR64 = Record(b"PK\6\7", "IQI", "_ end64 _")  # the place of END64
ENTRY = Record(
    b"PK\1\2",
    "6H3I5H2I",
    "_ _ flags method _ _ checksum packed unpacked name_bytes extra_bytes comment_bytes _ _ _ local_header",
)
LOCAL_HEADER = Record(b"PK\3\4", "5H3I2H", "_ flags method _ _ _ packed unpacked name_bytes extra_bytes")
ENCRYPTED, SIZES_FOLLOW = 1, 8  # bits of `flags`; the latter: the sizes are behind the entry, 0 in its local header


def directory(data) -> dict[str, tuple[int, int]]:
    """{name: (first byte, size)} of all entries, as the zip's directory says and the local headers confirm.

    It refuses files that another reader could read differently. The directory and its end records must end the file,
    and agree with each other. Names must be unique. Entries must not be compressed. Checksums must be right, or 0:
    torch can be told to write none.
    """
    count, start, stop = place_of_directory(data)
    entries, checksums, position = {}, {}, start
    while position < stop:
        entry = ENTRY.read(data, position, "the next entry of the zip's directory")
        position += ENTRY.size
        raw_name = data[position : position + entry.name_bytes]
        name = raw_name.decode("utf-8", "backslashreplace")
        extra = data[position + entry.name_bytes : position + entry.name_bytes + entry.extra_bytes]
        position += entry.name_bytes + entry.extra_bytes + entry.comment_bytes
        unpacked, packed, local_header = zip64_values((entry.unpacked, entry.packed, entry.local_header), extra)
        if entry.method or entry.flags & ENCRYPTED or packed != unpacked:
            sizes = f"{packed} bytes for {unpacked}"
            refuse(
                f"entry {shown(name)} is compressed or encrypted (method {entry.method}, {sizes})", "it stored as it is"
            )
        if name in entries:
            refuse(f"entry {shown(name)} is there twice", "names that differ")
        entries[name], checksums[name] = body(data, local_header, raw_name, unpacked, start), entry.checksum
    if position != stop or len(entries) != count:
        refuse(f"the zip's directory has {len(entries)} entries up to byte {position}", f"{count}, up to byte {stop}")
    verify_checksums(data, entries, checksums)
    return entries


def place_of_directory(data) -> tuple[int, int, int]:
    """(the number of entries, the directory's first byte, the byte after it): there its first end record begins."""
    last = len(data) - END.size
    record = end_record = END.read(data, last, f"an end record in the last {END.size} bytes")
    if record.comment_bytes:
        refuse(f"the zip ends with a comment of {record.comment_bytes} bytes", "none")
    stop, locator = last, last - LOCATOR64.size
    if data[max(locator, 0) : last][:4] == LOCATOR64.signature:  # END64, LOCATOR64 and END end the file
        stop = LOCATOR64.read(data, locator, "a zip64 locator").end64
        record = END64.read(data, stop, "a zip64 end record")
        if stop + END64.size != locator:
            refuse(
                f"the zip64 end record is at byte {stop}, and its locator at byte {locator}",
                "one right after the other",
            )
        narrow, wide = ((each.count, each.size, each.start) for each in (end_record, record))
        limits = 0xFFFF, WIDE, WIDE  # of the narrow fields, which then have these values
        if any(number not in (min(full, limit), limit) for number, full, limit in zip(narrow, wide, limits)):
            refuse(f"the zip's end records say {narrow} and {wide}", "the same of both")
    count, size, start = record.count, record.size, record.start
    if start + size != stop or size > MAX_INDEX:
        refuse(
            f"the zip's directory has {size} bytes from byte {start}, and its end record is at byte {stop}",
            f"at most {MAX_INDEX} bytes, right before its end record",
        )
    return count, start, stop


def verify_checksums(data, entries, checksums):
    """FileError if the bytes of an entry have another checksum than `checksums` says; both dicts are by name."""
    # Entries that share bytes would let a small file keep the reader busy for long: their sum is bounded.
    if (claimed := sum(size for _, size in entries.values())) > len(data):
        refuse(f"the entries claim {claimed} bytes of a file of {len(data)}", "entries that do not overlap")
    for name, (start, size) in entries.items():
        with memoryview(data) as view, view[start : start + size] as content:
            found = zlib.crc32(content)
        if checksums[name] not in (found, 0):  # 0: none, see `directory`
            refuse(f"entry {shown(name)} is damaged, with the checksum {found:#010x}", f"{checksums[name]:#010x}")


def body(data, local_header, raw_name, size, limit):
    """(first byte, size) of the entry whose local header is at byte `local_header`. FileError if that header has
    another name or size, or if the entry goes beyond byte `limit`."""
    entry = f"entry {shown(raw_name.decode('latin-1'))}"
    header = LOCAL_HEADER.read(data, local_header, f"the local header of {entry}")
    name_start = local_header + LOCAL_HEADER.size
    start = name_start + header.name_bytes + header.extra_bytes
    same_name = data[name_start : name_start + header.name_bytes] == raw_name
    sizes = {size, WIDE, 0} if header.flags & SIZES_FOLLOW else {size, WIDE}
    if header.method or header.flags & ENCRYPTED or not same_name or not {header.packed, header.unpacked} <= sizes:
        refuse(
            f"the local header of {entry} disagrees with the zip's directory", f"the same name, stored, {size} bytes"
        )
    if start + size > limit:
        refuse(f"{entry} runs to byte {start + size}", f"its end before byte {limit}")
    return start, size


def zip64_values(values, extra):
    """The `values` of a directory entry. Those that are WIDE are replaced by the numbers, in this order, of the zip64
    field among the entry's `extra` fields."""
    position = 0
    while position + 4 <= len(extra):
        field_id, size = struct.unpack_from("<2H", extra, position)
        if field_id == ZIP64_EXTRA:
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
    begin = NPY_PREFIX + int.from_bytes(head[len(NPY_START) : NPY_PREFIX], "little")  # of the numbers, from `start` on
    match = HEADER.fullmatch(head[NPY_PREFIX:begin])
    if head[: len(NPY_START)] != NPY_START or not match:
        refuse(f"has {name} with another header", "that of a plain array, as numpy.savez writes it")
    descr, fortran, axes = match.groups()
    if descr != b"<f4":
        refuse(f"has {name} in {dtype_name(descr)}", "float32")
    shape = tuple(int(axis) for axis in axes.replace(b",", b" ").split())
    numbers = math.prod(max(1, axis) for axis in shape)  # NumPy refuses large axes beside one of 0, too
    if len(shape) > MAX_AXES or numbers >= 1 << 60 or size - begin != 4 * math.prod(shape):
        sizes = f"{len(shape)} axes" if len(shape) > MAX_AXES else " x ".join(map(shown, shape)) or "one number"
        refuse(f"has {name} in {size - begin} bytes", f"as many as an array of {sizes} has")
    return np.ndarray(shape, np.float32, data, start + begin, order="F" if fortran == b"True" else "C").copy()


def dtype_name(descr: bytes) -> str:
    """The name of a dtype in an .npy's header, for an error."""
    if PLAIN_DESCR.fullmatch(descr):
        try:
            return str(np.dtype(descr.decode()))
        except TypeError:
            pass
    return shown(descr.decode("latin-1"))
