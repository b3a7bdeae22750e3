"""The README and the documentation say what is so: their code runs, the tables match the package."""

import json
import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import zipped_pth

import linattn_np
from linattn_np.__main__ import main
from linattn_np.models import austen
from linattn_np.models.checkpoint import read
from linattn_np.models.versions import VERSIONS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "kernels_cu").glob("*.md"))]
LINK = re.compile(r"(?:\]\(|^\[\w+\]: )(?!http)([^)#\s]+)", re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = {f"{path.stem}-{n}": block for path in PAGES for n, block in enumerate(PYTHON.findall(path.read_text()))}

COMMANDS = {path.stem: "".join(SHELL.findall(path.read_text())).replace("\\\n", "").splitlines() for path in PAGES}
SHORTER = {  # added to a page's command: of an option the last value counts
    "generate": ["--tokens", "3"],
    "train": ["--steps", "1", "--batch", "1", "--context", "32"],
    "compare": ["--longest", "512"],
    "bench": ["--tokens", "64", "--heads", "1"],
}
SMALLER = ["--layers", "2", "--width", "64"]  # of a model whose size the command says
NOT_RUN = {
    "pip": "needs the network; .ci/run runs the README's",
    "python": "benchmarks take minutes: test_benchmarks.py runs them small; releasing needs the network",
    "/tmp/fresh/bin/pip": "needs the network",
    "/tmp/fresh/bin/linattn-np": "is of a release",
    "twine": "needs the network",
    "git": "is of a release",
    "mpiexec": "needs several hosts; on one a command runs here as one process, by test_training_ranks.py as several",
    "torchrun": "needs torch; test_training_ranks.py has what it starts",
}


def no_device() -> str | None:
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    return None if cupy.cuda.is_available() else "CuPy finds no CUDA device"


@pytest.mark.parametrize("block", BLOCKS)
def test_code_runs(block, monkeypatch):
    if "import cupy" in BLOCKS[block] and (reason := no_device()):
        pytest.skip(reason)
    for library in ("jax", "torch"):
        if f"import {library}" in BLOCKS[block]:
            pytest.importorskip(library, reason=f"{library} is not installed")
    if re.search('dtype="int[48]"', BLOCKS[block]):
        pytest.importorskip("numba", reason="matrices in few bits need Numba on the CPU")
    monkeypatch.chdir(ROOT)
    exec(compile(BLOCKS[block], f"python block {block}", "exec"), {})


@pytest.mark.parametrize("page", [page for page, lines in COMMANDS.items() if lines])
def test_commands_run(page, tmp_path, monkeypatch):
    """In a folder with the files that the pages name, in the page's order."""
    monkeypatch.chdir(tmp_path)
    for name in ("novel.txt", "long.txt"):
        Path(name).write_text(README[:1200])
    Path("texts.jsonl").write_text("".join(json.dumps({"text": README[n : n + 999]}) + "\n" for n in range(9)))
    Path("prompts.jsonl").write_text('{"prompt": "Emma was"}\n' * 2)
    Path("folder").mkdir()
    shutil.copy(austen(), "folder/model.safetensors")
    for name in ("model.pth", "rwkv7-g1k-1.5b-20260930-ctx25600.pth"):
        Path(name).write_bytes(zipped_pth(read(austen())))
    for line in COMMANDS[page]:
        line = re.sub(r"^mpiexec -n \d+ ", "", line)
        line, _, stdin = line.partition(" < ")
        program, *words = shlex.split(re.sub(r"--minutes \d+", "", line), comments=True) or ["#"]
        if program != "linattn-np":
            assert program in NOT_RUN, line
            continue
        if "int4" in line or "int8" in line or words[0] == "quantise":
            pytest.importorskip("numba", reason="matrices in few bits need Numba on the CPU")
        with open(stdin or "/dev/null") as file:
            monkeypatch.setattr("sys.stdin", file)
            assert main([*words, *SHORTER.get(words[0], []), *SMALLER * ("--layers" in words)]) == 0, line


def test_the_loop_is_the_operator(rng):
    names = {}
    (loop,) = (block for block in PYTHON.findall(README) if "def gla_of_one_head" in block)
    exec(loop, names)
    q, k, v, g = rng.standard_normal((4, 30, 8))
    g = -np.exp(g)
    o = linattn_np.gla(*(x[None, None] for x in (q, k, v, g)), scale=0.3)
    np.testing.assert_allclose(o[0, 0], names["gla_of_one_head"](q, k, v, g, 0.3), rtol=1e-12, atol=1e-12)


def table(page, heading):
    """The rows of the first table under a page's heading, a list of cells each."""
    section = (ROOT / page).read_text().split(f"# {heading}\n", 1)[1].split("\n#", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    return rows[2:]


def test_operators_are_listed():
    listed = re.findall(r"^- `(\w+\([\w, ]+\))`: ", README.split("# Operators\n")[1].split("\n#")[0], re.MULTILINE)
    assert listed == [f"{op.name}({', '.join(op.arrays)})" for op in linattn_np.OPS]


def test_modes_table():
    assert {mode for mode, _ in table("docs/backends.md", "Modes")} == {
        f'`"{mode}"`' for op in linattn_np.OPS for mode in op.modes
    }


def test_files_and_folders_exist():
    rooms = (ROOT / "CONTRIBUTING.md").read_text().split("```text\n", 1)[1].split("```", 1)[0]
    for line in rooms.splitlines():
        for name in re.findall(r"(?:^|[ ;])([\w/]+(?:/|\.py))(?=[ :]|$)", line):
            assert (ROOT / name).exists() or (ROOT / "linattn_np" / name).exists(), name


def test_speeds_of_rwkv6_are_the_measured_ones(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    speeds = import_module("rwkv6_table")
    page = (ROOT / "docs" / "performance.md").read_text()
    assert speeds.between(page, speeds.BEGIN, speeds.END, speeds.tables()) == page


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module("write_models")


def test_the_table_of_published_models_is_computed(published):
    """Where it is not: python docs/write_models.py"""
    page = published.PAGE.read_text()
    assert published.BEGIN + published.table() + published.END in page


def test_published_models_have_the_sizes_that_were_seen(published):
    """Bytes of their .pth files, which have headers, and some of them vectors of the first block that nobody reads."""
    seen = {(6, "1B6-v2.1-20240328"): 3199845663, (6, "3B-v2.1-20240417"): 6199859158}
    seen |= {(6, "14B-v2.1-20240719"): 28138429796, (7, "2.9B-v3-20250211"): 5895796446}
    seen |= {(7, "g1k-13.3b-20260930-ctx25600"): 26540868485}
    for version, layers, channels, ranks, *files in published.MODELS:
        count = published.parameters(version, published.sizes_of(version, layers, channels, ranks))
        for file in files:
            assert 1 <= seen.pop((version, file), 2 * count) / (2 * count) < 1.0002, file
    assert not seen


@pytest.mark.parametrize("version, ranks", [(6, {"W": 64, "A": 64, "5A": 320}), (7, dict(W=64, A=64, Q=64, G=128))])
def test_the_memory_of_published_models_is_that_of_the_layers(version, ranks, published, rng):
    pytest.importorskip("numba")
    sizes = published.sizes_of(version, 2, 128, ranks, vocabulary=256)
    weights = {name: rng.standard_normal(x, np.float32) for name, x in published.shapes(version, sizes).items()}
    for name in published.FORMATS:
        found = VERSIONS[version](weights, dtype=name).layers.nbytes
        assert found == pytest.approx(published.nbytes(version, sizes, name), rel=1e-3), name


def test_commands_are_what_ci_runs():
    ci = (ROOT / ".ci" / "run").read_text()
    commands = re.findall(r"^```sh\n(.*?)\n```", README, re.MULTILINE | re.DOTALL)
    assert len(commands) == 2 and all(command in ci for command in commands)


def test_the_readme_is_short():
    """All of it, code and tables too."""
    assert len([word for word in README.split() if re.search(r"\w", word)]) <= 1200


def test_code_is_not_cut_at_the_right():
    """A page of GitHub's or of the documentation shows 88 columns of code."""
    for page in (*PAGES, *NOTES):
        for block in re.findall(r"^```\w+\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            assert not [line for line in block.splitlines() if len(line) > 88], page.name


def test_code_of_the_gallery_is_not_cut_at_the_right():
    """Its pages show 80 columns; docstrings at the top and comments of `# %%` cells are prose there."""
    for page in (ROOT / "docs" / "gallery").glob("*.py"):
        code = page.read_text().split('"""', 2)[2]
        assert not [line for line in code.splitlines() if len(line) > 80 and line[0] != "#"], page.name


def test_pages_of_the_gallery_that_take_times_or_need_torch_have_kept_pictures():
    for page in (ROOT / "docs" / "gallery").glob("*.py"):
        code = page.read_text()
        kept = re.findall(r"image:: /(pictures/\S+)", code)
        assert len(kept) == bool(re.search(r"^import (time|torch)$", code, re.MULTILINE)), page.name
        assert all((ROOT / "docs" / picture).exists() for picture in kept), page.name


def test_no_page_has_directives_that_only_sphinx_knows():
    assert not [page.name for page in PAGES if re.search(r"^(```|:::+)\{", page.read_text(), re.MULTILINE)]


def test_links_lead_somewhere():
    for page in (*PAGES, *NOTES):
        for link in LINK.findall(page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
