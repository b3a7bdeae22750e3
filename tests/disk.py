"""Where tests keep what takes long to compile: in the user's cache, so that the same text is compiled once."""

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path

from linattn_np.backends.cupy import source

CHECKOUT = Path(__file__).resolve().parent.parent


@cache
def folder(name):
    """A writable folder, the same for every process."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for parent in (Path(cache_home), Path(tempfile.gettempdir())):
        found = parent / "linattn_np" / name
        try:
            found.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(found, os.W_OK):
            return found
    raise OSError("no writable folder for what is compiled")


def key(*texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def anywhere(text):
    """A kernel's text without the folders of this checkout and of the package in its `#line`s: a copy's is the same."""
    for folder in (CHECKOUT, source.root().parent):
        text = text.replace(f'"{folder.as_posix()}/', '"')
    return text


def write(path, text):
    """At once, since another process may be reading or writing the same file."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
