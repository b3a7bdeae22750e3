"""Files at the border: those of others are read with suspicion, our own are written whole or not at all."""

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
from functools import cache
from typing import BinaryIO, NoReturn

import numpy as np

from ..errors import ContractError
from .number_checks import shown

PART = re.compile(r"\.linattn-[0-9a-f]{16}\.part")


class FileError(ContractError):
    """A file that cannot be used: what was found and what was wanted."""


def refuse(found, wanted) -> NoReturn:
    raise FileError(f"{found}, expected {wanted}")


# -- reading ----------------------------------------------------------------------------------------------------------
def opened(path) -> BinaryIO:
    """A regular file to read. FileError for a folder, a FIFO or a device, which could wait or go on for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        refuse("is a folder or a device", "a file")
    return os.fdopen(descriptor, "rb")


def contents(path) -> bytes:
    """What a file or a pipe holds. FileError for a device, which could go on for ever."""
    with open(path, "rb") as file:
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode):
            refuse("is a device", "a file or a pipe")
        return file.read()


def mapped(path, wanted: str) -> mmap.mmap:
    """The bytes of a regular file that is not empty, read as they are used."""
    with opened(path) as file:
        if not os.fstat(file.fileno()).st_size:
            refuse("is empty", wanted)
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def lines(file: BinaryIO, most: int) -> Iterator[tuple[int, bytes]]:
    """``(number from 1 up, line)``; FileError for a line of more than `most` bytes, before more of it is read."""
    number = 1
    while line := file.readline(most + 1):
        if len(line) > most:
            refuse(f"line {number} has more than {most} bytes", "shorter lines")
        yield number, line
        number += 1


def json_object(text) -> dict:
    """The JSON object in `text`; FileError for anything else, and where a key is there twice, at any depth."""

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
    """A file to write that takes the place of `path` at one moment, once it is whole and on the disk.

    Until then, and after any error, `path` holds what it held; OSError names it. The new file has the old one's mode; a
    symbolic link stays, and what it points to is replaced. A FIFO or a device is written as such.
    """
    old = check_writable(path)
    if old is not None and not stat.S_ISREG(old.st_mode):
        whole = io.BytesIO()  # in which a writer can seek
        yield whole
        with named(path), open(path, "wb") as file:
            file.write(whole.getbuffer())
        return
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    remove_left(folder)
    mode = 0o666 if old is None else stat.S_IMODE(old.st_mode)  # the umask is the system's to take off
    with named(path), part_in(folder, mode) as (file, part):
        if old is not None:
            os.fchmod(file.fileno(), mode)
        yield file
        file.flush()
        os.fsync(file.fileno())
        os.replace(part, target)
    with suppress(OSError):  # some file systems cannot sync a folder; the file is in its place all the same
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def named(path):
    """An OSError inside that names no file, as of a disk that is full, names this one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, path) and not PART.search(str(error.filename)):
            raise
        raise problem(error.errno, path) from None


@contextmanager
def part_in(folder, mode) -> Iterator[tuple[BinaryIO, str]]:
    """A new file in `folder` and its name, of which no two writers may share one, and no user has one.

    It is locked while it is written, which a writer that is killed no longer does; after an error it is removed.
    """
    while True:
        part = os.path.join(folder, f".linattn-{secrets.token_hex(8)}.part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with suppress(OSError):  # some file systems have no locks; there nobody removes anything
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # `remove_left` saw it before it was locked
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file, part
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(part)
        raise


def lock(descriptor: int, path):
    """Locks an open file or folder until it is closed, or the process ends, however it does; OSError where another
    process has locked it. Some file systems have no locks; there nobody is refused."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise problem(errno.EBUSY, path) from None
    except OSError:
        pass


@cache
def remove_left(folder):
    """Removes what writers left in `folder` that were killed: once in a process, as it takes a look at every name."""
    with suppress(OSError):
        for name in filter(PART.fullmatch, os.listdir(folder)):
            path = os.path.join(folder, name)
            with suppress(OSError, FileError), opened(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)


def write_arrays(path, arrays):
    """A safetensors file in the place of an older one, at one moment: whoever dies, one of the two is there, whole."""
    from safetensors.numpy import save

    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    with replaced(path) as file:
        file.write(content)


def check_writable(path) -> os.stat_result | None:
    """What is at `path`, None for nothing; OSError where `replaced` could not write: to be asked before long work."""
    try:
        old = os.stat(path)
    except FileNotFoundError:
        old = None
    if old is not None and stat.S_ISDIR(old.st_mode):
        raise problem(errno.EISDIR, path)
    places = [] if old is None else [path]
    if old is None or stat.S_ISREG(old.st_mode):
        places.append(os.path.dirname(os.path.realpath(path)))
    for place in places:
        if not os.path.exists(place):
            raise problem(errno.ENOENT, path)
        if not os.access(place, os.W_OK):
            raise problem(errno.EACCES, path)
    return old


def problem(number, path) -> OSError:
    return OSError(number, os.strerror(number), os.fspath(path))


def same_file(path, other) -> bool:
    """Whether both names lead to one file, there or not yet."""
    with suppress(OSError):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)
