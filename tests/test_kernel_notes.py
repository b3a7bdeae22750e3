"""kernels_cu/README.md says what is so: its table has every kernel, who launches it, and a test; its pictures are those
that the scripts draw. And the kernels' own notes, their comments, are no wider than code."""

import ast
import re
import runpy
import shutil
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import catalog  # noqa: F401, imports every class of kernels
import pytest

from linattn_np.backends.cupy.kernel import Kernel

ROOT = Path(__file__).parents[1]
KERNELS, PICTURES = ROOT / "kernels_cu", ROOT / "docs" / "pictures"
NOTES = (KERNELS / "README.md").read_text()
ROW = re.compile(r"^\| (\S+)\.cu \| (.+) \| (\S+) \|$", re.MULTILINE)
FILES = sorted(path.relative_to(KERNELS).with_suffix("").as_posix() for path in KERNELS.rglob("*.cu"))
LAUNCH_NOTHING = ("gated_kernels", "rwkv6_model_kernels", "rwkv6_training_kernels", "rwkv7_model_kernels")
VERSIONS = ("", ".rwkv", ".rwkv6", ".rwkv7")
HOSTS = [
    (package, path)
    for package in ("linattn_np.backends.cupy", *(f"linattn_np.models{version}" for version in VERSIONS))
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
    """The files whose functions speak of the class, those of models with their version's folder."""
    found = (path for package, path in HOSTS if speaks_of(import_module(f"{package}.{path.stem}"), kernel))
    return ", ".join(
        path.name if path.parent.name in ("cupy", "models") else f"{path.parent.name}/{path.name}" for path in found
    )


def speaks_of(module, kernel) -> bool:
    names, members = spoken(module.__file__)
    return kernel.__name__ in members or any(getattr(module, name, None) is kernel for name in names)


@cache
def spoken(path):
    """The names, and the members of names, that the functions of a file speak of."""
    tree = ast.parse(Path(path).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    nodes = [node for function in functions for node in ast.walk(function)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names, {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}


def test_comments_are_no_wider_than_code():
    """clang-format breaks lines of code at its limit, and leaves comments as they are."""
    limit = int(re.search(r"^ColumnLimit: (\d+)$", (ROOT / ".clang-format").read_text(), re.MULTILINE)[1])
    lines = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in (KERNELS, ROOT / "tests" / "emulator")
        for path in sorted(folder.rglob("*.cu*"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > limit
    ]
    assert not lines, f"wider than {limit} columns: {lines}"


def test_branches_of_if_constexpr_have_braces():
    """NVRTC took the branch of the wrong type where a loop's pragma followed `if constexpr` without a brace, and `else`
    came after the loop: g++ does not, so the emulator shows nothing."""
    bare = re.compile(r"^( *)if constexpr [^\n{]*\n#pragma.*\n(?:\1 .*\n|#pragma.*\n)+\1else", re.MULTILINE)
    found = [path.name for path in KERNELS.rglob("*.cu*") if bare.search(path.read_text())]
    assert not found


def test_every_kernel_has_one_row():
    assert [file for file, _, _ in ROW.findall(NOTES)] == FILES


@pytest.mark.parametrize("file, planner, test", ROW.findall(NOTES))
def test_rows(file, planner, test):
    assert planner == launchers(classes()[file])
    assert (ROOT / "tests" / test).is_file()
    said = re.search(r"^// grid +(.+\.py) launch", (KERNELS / f"{file}.cu").read_text(), re.MULTILINE)
    assert said is None or said[1].replace(" and ", ", ") == planner


def test_heads_name_tests_that_there_are():
    tests = "".join(f"{path.stem}\n{path.read_text()}" for path in sorted((ROOT / "tests").glob("test_*.py")))
    there = set(re.findall(r"^(?:def )?(test_\w+)", tests, re.MULTILINE))
    for path in sorted(KERNELS.rglob("*.cu*")):
        for said in re.findall(r"^// tests +(.*\n(?:// {11}.*\n)*)", path.read_text(), re.MULTILINE):
            assert set(re.findall(r"\btest_\w+", said)) <= there, path


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
