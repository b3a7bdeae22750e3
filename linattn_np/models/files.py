"""Reading and writing of files: what is read is checked, and what is written replaces an older file at one moment."""

import errno
import fcntl
import io
import json
import mmap
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import BinaryIO, NoReturn

import numpy as np

from ..errors import ContractError
from .number_checks import shown

# The names of files that are being written.
PART = re.compile(r"\.linattn-[0-9a-f]{16}\.part")


class FileError(ContractError):
    """A file that cannot be used; the text says what was found and what was expected."""


def refuse(found, wanted) -> NoReturn:
    """FileError: what a file has or is, and what was expected."""
    raise FileError(f"{found}, expected {wanted}")


# -- reading ----------------------------------------------------------------------------------------------------------
def opened(path) -> BinaryIO:
    """A regular file, open for reading. FileError for a folder, a FIFO or a device: reading one might never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        refuse("is a folder or a device", "a file")
    return os.fdopen(descriptor, "rb")


def contents(path) -> bytes:
    """The bytes of a file or a pipe. FileError for a device: reading it might never end."""
    with open(path, "rb") as file:
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode):
            refuse("is a device", "a file or a pipe")
        return file.read()


def mapped(path, wanted: str) -> mmap.mmap:
    """A memory map of a regular file; FileError if it is empty, which says that `wanted` was expected."""
    with opened(path) as file:
        if not os.fstat(file.fileno()).st_size:
            refuse("is empty", wanted)
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def lines(file: BinaryIO, most: int) -> Iterator[tuple[int, bytes]]:
    """Yields ``(number, line)``, with numbers from 1 on. FileError for a line of more than `most` bytes, of which no
    more is read."""
    for number, line in enumerate(iter(partial(file.readline, most + 1), b""), 1):
        if len(line) > most:
            refuse(f"line {number} has more than {most} bytes", "shorter lines")
        yield number, line


def json_object(text) -> dict:
    """The JSON object in `text`; FileError for anything else, and if an object in it has a key twice."""

    def unique(pairs):
        if len(pairs) != len(dict(pairs)):
            refuse("the JSON has a key twice", "keys that differ")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except FileError:
        raise
    except (ValueError, RecursionError) as error:
        refuse(f"the JSON is damaged ({str(error)[:100]})", "a JSON object")
    if not isinstance(value, dict):
        refuse(f"the JSON is {shown(value)}", "an object")
    return value


# -- writing ----------------------------------------------------------------------------------------------------------
@contextmanager
def replaced(path) -> Iterator[BinaryIO]:
    """A context with a new file to write. At its end the file is on the disk and takes the place of `path` at one
    moment; after an error, the older file at `path` is unchanged.

    The new file has the older one's mode. If `path` is a symbolic link, the file to which it points is replaced. A FIFO
    or a device is written directly. OSErrors have the name `path`.
    """
    old = check_writable(path)
    if old is not None and not stat.S_ISREG(old.st_mode):
        content = io.BytesIO()  # unlike a FIFO it can seek, as writers do
        yield content
        with errors_naming(path), open(path, "wb") as file:
            file.write(content.getbuffer())
        return
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    remove_abandoned(folder)
    mode = 0o666 if old is None else stat.S_IMODE(old.st_mode)  # the system removes the umask from the mode
    with errors_naming(path), new_part(folder, mode) as (file, part):
        if old is not None:
            os.fchmod(file.fileno(), mode)
        yield file
        file.flush()
        os.fsync(file.fileno())
        os.replace(part, target)
    with suppress(OSError):  # some file systems cannot sync a folder; the file has been replaced nevertheless
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def errors_naming(path):
    """A context in which OSErrors get the name `path` if they name no file, or a `new_part`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, path) and not PART.search(str(error.filename)):
            raise
        raise os_error(error.errno, path) from None


@contextmanager
def new_part(folder, mode) -> Iterator[tuple[BinaryIO, str]]:
    """A context with (a new file in `folder`, its path); the name is random, so that no other file has it.

    The file is locked until the context ends, or until the process is killed: `remove_abandoned` removes files without
    a lock. After an error this removes the file itself.
    """
    while True:
        part = os.path.join(folder, f".linattn-{secrets.token_hex(8)}.part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with suppress(OSError):  # some file systems have no locks; `remove_abandoned` removes nothing there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # `remove_abandoned` removed the file before it was locked: make another one
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file, part
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(part)
        raise


def lock(descriptor: int, path):
    """Locks an open file or folder until it is closed or the process ends, even by a crash. OSError if another process
    has locked it; on a file system without locks this does nothing."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise os_error(errno.EBUSY, path) from None
    except OSError:
        pass


@cache
def remove_abandoned(folder):
    """Removes the unfinished files of killed writers from `folder`; once in a process, as it reads all names there."""
    with suppress(OSError):
        for name in filter(PART.fullmatch, os.listdir(folder)):
            path = os.path.join(folder, name)
            with suppress(OSError, FileError), opened(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)


def write_arrays(path, arrays):
    """Writes a safetensors file by `replaced`: at any moment `path` is the older file or the complete new one."""
    from safetensors.numpy import save

    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    with replaced(path) as file:
        file.write(content)


def check_writable(path) -> os.stat_result | None:
    """The status of the file at `path`, or None if there is none. OSError if `replaced` could not write there: callers
    call this before long work."""
    try:
        old = os.stat(path)
    except FileNotFoundError:
        old = None
    if old is not None and stat.S_ISDIR(old.st_mode):
        raise os_error(errno.EISDIR, path)
    to_write = [] if old is None else [path]
    if old is None or stat.S_ISREG(old.st_mode):
        to_write.append(os.path.dirname(os.path.realpath(path)))
    for file_or_folder in to_write:
        if not os.path.exists(file_or_folder):
            raise os_error(errno.ENOENT, path)
        if not os.access(file_or_folder, os.W_OK):
            raise os_error(errno.EACCES, path)
    return old


def os_error(number, path) -> OSError:
    """The OSError with this number of the system's errors, such as `errno.ENOENT`, and the file name `path`."""
    return OSError(number, os.strerror(number), os.fspath(path))


def same_file(path, other) -> bool:
    """Whether both paths are those of one file, which may not exist yet."""
    with suppress(OSError):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)
