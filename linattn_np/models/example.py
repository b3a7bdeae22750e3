"""The small models that come with the package."""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("data", "../examples/data")  # inside the package when installed, beside it in a checkout


def austen(version: int = 6) -> Path:
    """The checkpoint of a small RWKV that reads and writes bytes, trained on Jane Austen's novels.

    version : of RWKV, 6 (4.0 million parameters) or 7 (3.7 million)

    FileNotFoundError if the installation lacks it.

    Example
    -------
    >>> from linattn_np import models
    >>> models.load(models.austen(7)).sizes["V"]
    256
    """
    if version not in (6, 7):
        raise ValueError(f"austen: version is {version!r}, expected 6 or 7")
    package, name = Path(__file__).resolve().parents[1], f"austen-x0{version}0"
    for folder in FOLDERS:
        path = (package / folder).resolve() / name / "model.safetensors"
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"the example's model, {name}/model.safetensors, is missing in "
        f"{package / FOLDERS[0]}: a wheel of linattn-np brings it, and a checkout has it in "
        "examples/data"
    )
