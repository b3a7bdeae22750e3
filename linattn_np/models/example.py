"""The small model that comes with the package."""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("data", "../examples/data")  # inside the package when installed, beside it in a checkout


def austen() -> Path:
    """The checkpoint of an RWKV-6 of 4 million parameters that reads and writes bytes, trained on Jane Austen's novels.

    FileNotFoundError where it has been left out of an installation.

    Example
    -------
    >>> from linattn_np.models import RWKV6, austen
    >>> RWKV6.from_file(austen()).sizes["V"]
    256
    """
    package = Path(__file__).resolve().parents[1]
    for folder in FOLDERS:
        path = (package / folder).resolve() / "austen-x060" / "model.safetensors"
        if path.is_file():
            return path
    raise FileNotFoundError(
        "the example's model, austen-x060/model.safetensors, is missing in "
        f"{package / FOLDERS[0]}: a wheel of linattn-np brings it, and a checkout has it in "
        "examples/data"
    )
