"""What is installed, what an import costs, and that imports point one way only."""

import ast
import graphlib
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

import linattn_np

ROOT = Path(__file__).parents[1]
PACKAGE = Path(linattn_np.__file__).parent
KERNELS = ROOT / "kernels_cu"
LAZY = {"cupy", "numba", "numba_cuda", "torch", "jax", "scipy", "safetensors", "mpi4py"}


# -- the wheel ------------------------------------------------------------------------------------------------------
def test_wheel_holds_every_module_and_kernel(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="the build needs setuptools 77 or newer")
    source = tmp_path / "source"  # a copy: building leaves its traces in the tree
    for name in ("linattn_np", "kernels_cu"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "examples" / "data", source / "examples" / "data")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--disable-pip-version-check",
            "--wheel-dir",
            str(tmp_path),
            str(source),
        ],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"linattn_np-{linattn_np.__version__}-py3-none-any.whl"
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [path.relative_to(ROOT) for path in (ROOT / "linattn_np").rglob("*.py*")]
    modules = {path.as_posix() for path in files if path.suffix in (".py", ".pyi")}
    kernels = {f"linattn_np/kernels_cu/{path.relative_to(KERNELS).as_posix()}" for path in KERNELS.rglob("*.cu*")}
    folders, files = ("austen-x060", "austen-x070"), ("README.md", "model.safetensors")
    model = {f"linattn_np/data/{folder}/{name}" for folder in folders for name in files}
    others = {"linattn_np/py.typed", "linattn_np/kernels_cu/shared_memory.json"}
    assert held == modules | kernels | model | others
    assert any(name.endswith(".cu") for name in kernels) and any(name.endswith(".cuh") for name in kernels)


def test_source_distribution_can_test_itself(tmp_path):
    """It holds the whole tree: tests with their data, examples, benchmarks, documentation."""
    pytest.importorskip("setuptools", minversion="77", reason="the build needs setuptools 77 or newer")
    source = tmp_path / "source"
    made_later = shutil.ignore_patterns("__pycache__", "_build", "pages", "sg_execution_times.rst", ".*_cache")
    for name in ("linattn_np", "kernels_cu", "tests", "benchmarks", "examples", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=made_later)
    (source / ".ci").mkdir()
    for name in (
        "setup.cfg",
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        ".ci/run",
        ".ci/exhaustive",
    ):
        shutil.copy(ROOT / name, source / name)
    wanted = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    build = "import setuptools.build_meta as backend; backend.build_sdist('..')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    with tarfile.open(tmp_path / f"linattn_np-{linattn_np.__version__}.tar.gz") as archive:
        held = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    assert wanted <= held, f"not in the source distribution: {sorted(wanted - held)}"
    assert {name for name in held - wanted if ".egg-info/" not in name} == {"PKG-INFO"}


# -- importing ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("module", ["linattn_np", "linattn_np.models", "linattn_np.interop", "linattn_np.distributed"])
def test_import_is_fast_and_loads_no_array_library(module):
    code = (
        "import json, sys, time; start = time.process_time()\n"
        "import numpy; middle = time.process_time()\n"
        f"import {module}; end = time.process_time()\n"
        "print(json.dumps([(end - middle) / (middle - start), sorted(sys.modules)]))"
    )
    times_numpys, modules = min(
        json.loads(
            subprocess.run(
                [sys.executable, "-c", code], cwd=PACKAGE.parent, check=True, capture_output=True, text=True
            ).stdout
        )
        for _ in range(3)
    )
    assert not LAZY & set(modules)
    assert times_numpys < 7  # NumPy's takes 0.07 seconds of a core


# -- arrows ---------------------------------------------------------------------------------------------------------
MODULES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imports(module):
    """(name, at the top) of every import in a module's file; relative ones as absolute names."""
    return [*imports_of(MODULES[module])]


def imports_of(path):
    """The same, of a file."""
    package = ("linattn_np", *path.relative_to(PACKAGE).parent.parts)
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in tree.body) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join((*package[: len(package) - node.level + 1], *filter(None, [node.module])))
                if node.level
                else node.module
            )
            inside = node.level and (PACKAGE.parent / base.replace(".", "/")).is_dir()
            yield from ((f"{base}.{alias.name}" if inside else base, node in tree.body) for alias in node.names)


# What knows a model by its face alone; a training names one kind as its default.
AROUND = (
    "array_math",
    "batch",
    "checkpoint",
    "number_checks",
    "devices",
    "corpus",
    "example",
    "protocols",
    "files",
    "gguf_files",
    "matrices",
    "matrix_loops",
    "training_products",
    "prompt_reading",
    "pth_files",
    "quantised",
    "single_process",
    "sampling",
    "stored_zip",
    "text",
    "helper_threads",
    "tokenizers",
    "locks",
)
CHECKED = ["argument_checks", "cupy_folder", "errors", "typing"]  # what public functions beside the operators share

# What the files of a room may import: prefixes of our own modules, and libraries beside the standard one.
ROOMS = {
    "messages": ([], []),
    "errors": ([], []),
    "layouts": ([], []),
    "summary": ([], ["numpy"]),
    "bounded_cache": ([], []),
    "cupy_folder": (["errors", "warnings_of_misuse"], ["cupy"]),
    "signals": ([], []),
    "numba_cache": (["signals"], ["numba"]),
    "precisions": ([], []),
    "varlen": (["accepted_arrays", "messages"], ["numpy"]),
    "array_kinds": (["cupy_folder"], ["numpy", "ml_dtypes", "cupy"]),
    "typing": ([], ["numpy"]),
    "value_heads": ([], []),
    "gates": (["argument_checks", "array_kinds", "errors", "messages", "typing"], ["numpy"]),
    "warnings_of_misuse": ([], ["numpy"]),
    "accepted_arrays": (["array_kinds", "messages"], ["numpy"]),
    "aliasing": ([], ["numpy"]),
    "argument_checks": (
        [
            "array_kinds",
            "errors",
            "accepted_arrays",
            "value_heads",
            "layouts",
            "aliasing",
            "summary",
            "messages",
            "typing",
        ],
        ["numpy"],
    ),
    "problem": (["argument_checks", "varlen"], ["numpy"]),
    "graph_capture": (["errors"], ["cupy"]),
    "derived": (["graph_capture", "problem", "value_heads"], ["numpy"]),
    "conversions": (["array_kinds", "graph_capture", "value_heads", "layouts", "problem"], ["numpy"]),
    "checked_calls": (
        ["array_kinds", "bounded_cache", "accepted_arrays", "layouts", "precisions", "problem"],
        ["numpy"],
    ),
    "contract": (
        [
            "argument_checks",
            "array_kinds",
            "checked_calls",
            "warnings_of_misuse",
            "errors",
            "value_heads",
            "layouts",
            "aliasing",
            "precisions",
            "problem",
            "varlen",
            "conversions",
            "messages",
            "typing",
        ],
        ["numpy"],
    ),
    "declarations": (
        [
            "argument_checks",
            "array_kinds",
            "contract",
            "derived",
            "errors",
            "accepted_arrays",
            "summary",
            "varlen",
            "messages",
            "typing",
        ],
        ["numpy"],
    ),
    "dispatch": (["contract", "derived", "errors", "problem", "conversions", "signals"], []),
    "shared_documentation": ([], []),
    "public_function": (["contract", "dispatch", "shared_documentation"], []),
    "ops": (["ops", "array_kinds", "declarations", "dispatch", "messages", "public_function"], []),
    "stages": (["declarations", "dispatch", "public_function"], []),
    "autodiff": (["contract", "derived", "dispatch", "value_heads", "ops", "conversions", "typing"], []),
    "kernel_choice": ([], []),
    "explanation": (["kernel_choice", "derived", "dispatch", "errors", "ops", "problem", "typing"], []),
    "layers": (
        ["layers", "argument_checks", "array_kinds", "autodiff", "errors", "gates", "accepted_arrays", "ops", "typing"],
        ["numpy"],
    ),
    "layers/delta": (["layers", "argument_checks", "autodiff", "gates", "ops", "typing", "varlen"], ["numpy"]),
    "distributed": (
        [
            "distributed",
            "array_kinds",
            "checked_calls",
            "dispatch",
            "errors",
            "accepted_arrays",
            "layouts",
            "varlen",
            "conversions",
        ],
        ["numpy"],
    ),
    "distributed/engine": (["argument_checks", "errors", "messages"], ["numpy"]),
    "distributed/nccl": (["distributed.engine", "errors"], ["numpy", "cupy"]),
    "distributed/operators": (["distributed", "contract", "ops", "public_function"], []),
    "distributed/recurrence": (
        ["distributed", "declarations", "dispatch", "summary", "conversions"],
        ["numpy", "cupy"],
    ),
    "distributed/sequence_pass": (
        ["distributed", "autodiff", "backends.cupy", "conversions", "dispatch", "graph_capture"],
        ["numpy"],
    ),
    "distributed/process_ranks": (
        ["distributed", "argument_checks", "errors", "messages", "models.devices"],
        ["numpy", "cupy", "mpi4py", "torch"],
    ),
    "distributed/thread_ranks": (
        ["distributed", "argument_checks", "errors", "messages", "models.devices"],
        ["numpy", "cupy"],
    ),
    "interop/__init__": ([], []),
    "interop/calls": (
        ["autodiff", "contract", "conversions", "declarations", "dispatch", "errors", "messages", "precisions"],
        ["numpy", "cupy"],
    ),
    "interop/jax": (
        [
            "gates",
            "interop.calls",
            "interop.jax_axis",
            "interop.jax_partition",
            "interop.signatures",
            "array_kinds",
            "bounded_cache",
            "checked_calls",
            "contract",
            "errors",
            "accepted_arrays",
            "ops",
        ],
        ["numpy", "jax"],
    ),
    "interop/jax_axis": (["summary"], ["numpy", "jax"]),
    "interop/jax_partition": ([], ["jax"]),
    "interop/torch": (
        [
            "gates",
            "interop.calls",
            "interop.signatures",
            "interop.torch_calls",
            "accepted_arrays",
            "contract",
            "distributed",
            "warnings_of_misuse",
            "errors",
            "ops",
            "messages",
        ],
        ["numpy", "torch"],
    ),
    "interop/fla": (["contract", "errors", "interop.calls", "interop.torch"], ["torch"]),
    "interop/torch_calls": (
        ["interop.calls", "accepted_arrays", "array_kinds", "declarations", "errors"],
        ["numpy", "torch", "cupy"],
    ),
    "models": ([f"models.{name}" for name in AROUND] + CHECKED, ["numpy", "ml_dtypes", "cupy", "safetensors"]),
    "models/__init__": (["models"], []),
    "models/gguf_files": (
        ["models.files", "models.number_checks", "models.stored_zip", "argument_checks", "errors"],
        ["numpy", "ml_dtypes", "gguf"],
    ),
    "models/matrices": (
        [f"models.{name}" for name in AROUND] + ["array_kinds", "errors", "numba_cache", "signals"],
        ["numpy"],
    ),
    "models/quantised": ([f"models.{name}" for name in AROUND] + ["array_kinds", "errors"], ["numpy"]),
    "models/matrix_loops": (["numba_cache"], ["numpy", "numba", "llvmlite"]),
    "models/rwkv/numba_loops": (
        ["backends.numpy.numba_loops", "numba_cache", "models.matrix_loops"],
        ["numpy", "numba"],
    ),
    "models/rwkv6/numba_loops": (["numba_cache", "models.rwkv"], ["numpy", "numba"]),
    "models/training": (
        [f"models.{name}" for name in AROUND] + [*CHECKED, "models.rwkv6", "models.training_steps"],
        ["numpy", "cupy", "safetensors"],
    ),
    "models/single_process": (["autodiff"], []),
    "models/training_steps": (
        [
            "models.devices",
            "models.training_products",
            "models.locks",
            "backends.cupy",
            "graph_capture",
        ],
        ["numpy", "cupy"],
    ),
    "models/training_products": (["backends.cupy"], ["numpy", "cupy"]),
    "models/rwkv": (
        [f"models.{name}" for name in (*AROUND, "rwkv")] + [*CHECKED, "array_kinds", "signals", "varlen"],
        ["numpy"],
    ),
    "models/rwkv6": (["models", *CHECKED, "array_kinds", "autodiff", "ops", "varlen"], ["numpy"]),
    "models/rwkv7": (["models", *CHECKED, "array_kinds", "autodiff", "ops", "varlen"], ["numpy"]),
    "models/rwkv7/numba_loops": (["numba_cache", "models.rwkv", "models.rwkv7"], ["numpy", "numba"]),
    "models/versions": (["models"], ["numpy"]),
    "models/fine_tuning": (["models", "errors"], ["numpy"]),
    "models/rwkv/cuda_decoder": (["models", *CHECKED, "array_kinds", "backends.cupy"], ["numpy", "cupy"]),
    "models/rwkv/cuda_weights": (["models", *CHECKED, "array_kinds", "backends.cupy"], ["numpy"]),
    "models/rwkv/cuda_layers": (["models", "backends.cupy"], ["numpy"]),
    "models/rwkv/cuda_prompts": (["models", "backends.cupy", "varlen"], ["numpy"]),
    "models/rwkv6/cuda_decode": (["models", "backends.cupy"], ["numpy"]),
    "models/rwkv/cuda_grad": (["models", "backends.cupy"], ["numpy"]),
    "models/rwkv6/cuda_grad": (["models", "ops", "backends.cupy"], []),
    "models/rwkv7/cuda_grad": (["models", "ops", "backends.cupy"], []),
    "models/rwkv6/cuda_prefill": (["models.rwkv", "models.rwkv6", "backends.cupy", "declarations"], []),
    "models/rwkv7/cuda_decode": (["models", "backends.cupy"], ["numpy"]),
    "models/rwkv7/cuda_prefill": (["models.rwkv", "backends.cupy", "declarations"], ["numpy"]),
    "command/__init__": ([], []),
    "command": (
        [
            "command",
            "argument_checks",
            "array_kinds",
            "backends.numpy.cores",
            "cupy_folder",
            "numba_cache",
            "distributed",
            "explain",
            "gla",
            "models",
            "ops",
            "vjp",
            "ContractError",
            "NotSupported",
            "__version__",
        ],
        ["numpy", "cupy", "matplotlib", "threadpoolctl", "torch"],
    ),
    "__main__": (["command", "__version__"], []),
    "backends/__init__": ([], []),
    "backends/numpy": (
        [
            "backends.numpy",
            "array_kinds",
            "bounded_cache",
            "contract",
            "declarations",
            "numba_cache",
            "signals",
            "varlen",
        ],
        ["numpy"],
    ),
    "backends/numpy/numba_loops": (["numba_cache"], ["numpy", "numba", "llvmlite"]),
    "backends/cupy": (
        [
            "backends.cupy",
            "array_kinds",
            "contract",
            "declarations",
            "derived",
            "graph_capture",
            "kernel_choice",
            "problem",
            "summary",
            "varlen",
        ],
        ["numpy", "cupy"],
    ),
    "backends/numba": (
        ["backends.numba", "backends.cupy", "array_kinds", "contract", "declarations"],
        ["numpy", "numba"],
    ),
    "__init__": ([""], []),
}


def room_of(module):
    return max((room for room in ROOMS if module == room or module.startswith(f"{room}/")), key=len, default=None)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module):
    room = room_of(module)
    assert room, f"linattn_np/{module}.py stands in no room of this test's table"
    ours, libraries = ROOMS[room]
    for name, _ in imports(module):
        top = name.split(".")[0]
        if top == "linattn_np":
            inner = name.removeprefix("linattn_np").removeprefix(".")
            assert any(prefix == "" or inner == prefix or inner.startswith(f"{prefix}.") for prefix in ours), (
                f"linattn_np/{module}.py imports {name}; its room may import {ours}"
            )
        else:
            assert top in libraries or top in sys.stdlib_module_names, f"linattn_np/{module}.py imports {name}"


def test_no_circle_of_imports():
    """Functions' imports count as well: what is imported late is still needed."""
    names = {f"linattn_np.{module}".replace("/", ".").removesuffix(".__init__"): module for module in MODULES}

    def needed(name):
        """The module of that name, or the package that it is a name of."""
        return names.get(name) or names.get(name.rpartition(".")[0])

    needs = {module: {needed(name) for name, _ in imports(module)} - {module, None} for module in MODULES}
    graphlib.TopologicalSorter(needs).prepare()  # CycleError names a circle
    assert needs["models/batch"] - {"errors", "typing"} == {
        "models/number_checks",
        "models/protocols",
        "models/prompt_reading",
        "models/sampling",
        "models/locks",
    }


def test_array_libraries_are_imported_where_they_are_used():
    """Numba's runtime, which only a call reaches, and what is there for one library need it to be imported at all."""
    at_the_top = {
        module for module in MODULES if any(name.split(".")[0] in LAZY and top for name, top in imports(module))
    }
    assert at_the_top <= {
        "backends/numba/runtime",
        "backends/numpy/numba_loops",
        "numba_cache",
        "interop/jax",
        "interop/jax_axis",
        "interop/jax_partition",
        "interop/torch",
        "interop/fla",
        "interop/torch_calls",
        "models/matrix_loops",
        "models/rwkv/numba_loops",
        "models/rwkv6/numba_loops",
        "models/rwkv7/numba_loops",
    }
    assert not any(
        name.startswith("linattn_np.interop")
        for module in MODULES
        if not module.startswith("interop/")
        for name, _ in imports(module)
    )


def test_arrow_test_sees_imports():
    assert ("linattn_np.declarations", True) in imports("ops/gla")
    assert ("linattn_np.problem", True) in imports("contract")
    assert any(name == "cupy" and not top for name, top in imports("backends/cupy/device"))
