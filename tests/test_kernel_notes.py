"""kernels_cu/README.md says what is so: its table has every kernel, who launches it, and a test; its pictures are those
that the scripts draw."""

import ast
import re
import runpy
import shutil
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from linattn_np.backends.cupy import catalog  # noqa: F401, every class of kernels is known
from linattn_np.backends.cupy.kernel import Kernel

ROOT = Path(__file__).parents[1]
KERNELS, PICTURES = ROOT / "kernels_cu", ROOT / "docs" / "pictures"
NOTES = (KERNELS / "README.md").read_text()
ROW = re.compile(r"^\| (\S+)\.cu \| (.+) \| (\S+) \|$", re.MULTILINE)
FILES = sorted(path.relative_to(KERNELS).with_suffix("").as_posix() for path in KERNELS.rglob("*.cu"))
LAUNCH_NOTHING = ("catalog", "instances", "rwkv6", "training", "tuning")
HOSTS = [
    (package, path)
    for package in ("linattn_np.backends.cupy", "linattn_np.models", "linattn_np.models.rwkv6")
    for path in sorted((ROOT / package.replace(".", "/")).glob("*.py"))
    if path.stem not in LAUNCH_NOTHING
]


def classes(base=Kernel):
    """By their files, those that have one of their own."""
    found = {base.file: base} if "file" in vars(base) else {}
    for inner in base.__subclasses__():
        found |= classes(inner)
    return found


def launchers(kernel) -> str:
    """The files whose functions speak of the class."""
    return ", ".join(path.name for package, path in HOSTS if speaks_of(import_module(f"{package}.{path.stem}"), kernel))


def speaks_of(module, kernel) -> bool:
    functions = [x for x in ast.walk(syntax(module.__file__)) if isinstance(x, ast.FunctionDef)]
    for node in (node for function in functions for node in ast.walk(function)):
        if isinstance(node, ast.Name) and getattr(module, node.id, None) is kernel:
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr == kernel.__name__:
            return True
    return False


@cache
def syntax(path):
    return ast.parse(Path(path).read_text())


def test_every_kernel_has_one_row():
    assert [file for file, _, _ in ROW.findall(NOTES)] == FILES


@pytest.mark.parametrize("file, planner, test", ROW.findall(NOTES))
def test_rows(file, planner, test):
    assert planner == launchers(classes()[file])
    assert (ROOT / "tests" / test).is_file()


@pytest.mark.parametrize("script", ["draw", "draw_kernels"])
def test_pictures_are_what_the_scripts_draw(script, tmp_path, monkeypatch):
    for path in PICTURES.glob("*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "draw", raising=False)
    runpy.run_path(str(tmp_path / f"{script}.py"), run_name="__main__")
    monkeypatch.delitem(sys.modules, "draw", raising=False)
    drawn = list(tmp_path.glob("*.svg"))
    assert drawn
    for path in drawn:
        assert path.read_text() == (PICTURES / path.name).read_text()


def test_pictures_are_there():
    shown = re.findall(r"!\[[^]]+\]\((\S+)\)", NOTES)
    assert shown
    for path in shown:
        assert (KERNELS / path).is_file()
