"""The record of the last run of the tests on a card, and whether it still speaks of these sources.

    python tests/gpu_record.py --write [--legs cupy,memcheck] [--again] [--workers 4] [--sanitizer PROGRAM] [--out FILE]
    python tests/gpu_record.py --check [--out FILE]

--write wants a card, --check runs anywhere. --write runs every case of a test that names a backend, the others being
for any machine, and stores what passed, on what, what NVIDIA's compute-sanitizer says of sanitized.py where there is
one, and a hash of every file that decides what runs on a device. Its legs are the backends and the sanitizer's tools.
A leg that does not run keeps what the file says of it, if the file speaks of the same sources. With --again, for tests
that were wrong themselves, a backend runs only the cases that failed by that file, and says how many. Of several cards
the sanitizer has one, beside the tests. Before 2026.1 (pip install nvidia-cuda-sanitizer-api has later ones) it reports
races between warps that wait for each other's mbarriers. --check needs the standard library alone; it exits 0 when
every hash still matches and nothing failed, and else prints why not and exits 1.
"""

import argparse
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
import xml.etree.ElementTree as xml
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "gpu_record.json"
SOURCES = (
    "kernels_cu/**/*.cu",
    "kernels_cu/**/*.cuh",
    "linattn_np/backends/cupy/*.py",
    "linattn_np/backends/numba/*.py",
    "linattn_np/models/**/cuda_*.py",
    "linattn_np/models/devices.py",
    "linattn_np/models/training_*.py",
    "linattn_np/distributed/nccl.py",
)
LONGEST = 60  # seconds of a test, after which it says where it stands
BACKENDS = ("cupy", "numba")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
LIBRARIES = (
    "numpy",
    "ml_dtypes",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "numba",
    "numba-cuda",
    "cuda-core",
    "torch",
    "jax",
    "pytest",
)


def hashes(root) -> dict[str, str]:
    """sha256 of what every device source says to a compiler, by its path in the repository."""
    files = sorted({path for pattern in SOURCES for path in root.glob(pattern)})
    said = {path: (python_code if path.suffix == ".py" else cuda_code)(path.read_text()) for path in files}
    return {path.relative_to(root).as_posix(): hashlib.sha256(code.encode()).hexdigest() for path, code in said.items()}


def python_code(source: str) -> str:
    """Python without comments and empty lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return without_empty_lines(lines)


# A literal, which is kept whole, or a comment.
LITERAL_OR_COMMENT = re.compile(
    r"""(?P<literal>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])+')|//(?:\\\n|[^\n])*|/\*.*?\*/""", re.DOTALL
)


def cuda_code(source: str) -> str:
    """CUDA C++ without comments and empty lines."""
    return without_empty_lines(LITERAL_OR_COMMENT.sub(lambda found: found["literal"] or " ", source).splitlines())


def without_empty_lines(lines) -> str:
    return "\n".join(filter(None, map(str.rstrip, lines)))


def complaints(record, found) -> list[str]:
    """Why the record does not vouch for the sources `found`; empty when it does."""
    said = [f"{name}: {backend['failed']} failed" for name, backend in record["backends"].items() if backend["failed"]]
    said += [f"{name}: nothing passed" for name, backend in record["backends"].items() if not backend["passed"]]
    tools = (record.get("sanitizer") or {"tools": {}})["tools"]
    said += [f"{tool}: {found['errors']} errors" for tool, found in tools.items() if found["errors"]]
    legs = BACKENDS + (SANITIZERS if tools else ())
    said += [f"{leg}: was not run" for leg in legs if leg not in record["backends"] and leg not in tools]
    known = record["sources"]
    for path in sorted({*known, *found}):
        if path not in known:
            said.append(f"{path}: new since")
        elif path not in found:
            said.append(f"{path}: gone since")
        elif known[path] != found[path]:
            said.append(f"{path}: changed since")
    return said


def check(root, path) -> int:
    if not path.exists():
        print(f"{path} does not exist: no run on a card is recorded")
        return 1
    record = json.loads(path.read_text())
    said = complaints(record, hashes(root))
    for line in said:
        print(line)
    if not said:
        print(
            f"{record['card']}, {record['date']}: "
            + ", ".join(f"{name} {backend['passed']} passed" for name, backend in record["backends"].items()),
            "and compute-sanitizer found nothing" if record.get("sanitizer") else "without compute-sanitizer",
        )
    return bool(said)


def counts(report) -> dict:
    """What a junit report says: passed, failed (errors too), skipped, seconds; and which have failed, as pytest names
    them, unless a worker crashed, which leaves other cases out."""
    root = xml.parse(report).getroot()
    suites = list(root.iter("testsuite"))
    failures = [case for case in root.iter("testcase") if {"failure", "error"} & {x.tag for x in case}]
    crashed = any("crashed while running" in (x.get("message") or "") for case in failures for x in case)
    total, skipped = (sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "skipped"))
    failed = sum(int(suite.get(key, 0)) for suite in suites for key in ("failures", "errors"))
    return {
        "passed": total - failed - skipped,
        "failed": failed,
        "skipped": skipped,
        "seconds": round(sum(float(suite.get("time", 0)) for suite in suites), 1),
        "failures": [] if crashed else sorted({node(case) for case in failures}),
    }


def node(case) -> str:
    """The name by which pytest runs a case of a junit report again."""
    return f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"


def run_again(root, backend, workers, more, earlier) -> dict:
    """Runs the failures of an earlier run and joins the counts; runs all cases where that run has no name for each."""
    if not earlier or len(earlier["failures"]) != earlier["failed"]:
        return run_tests(root, backend, workers, more)
    if not earlier["failed"]:
        return earlier
    found = run_tests(root, backend, 1, more, earlier["failures"])
    joined = {name: earlier[name] + found[name] for name in ("passed", "skipped", "seconds")}
    return found | joined | {"again": len(earlier["failures"])}


def on_card(place) -> dict[str, str]:
    """An environment with one of the visible cards: tests have the first, the sanitizer the last."""
    cards = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = [str(n) for n in range(card_count())] if cards is None else cards.split(",")
    return os.environ | ({"CUDA_VISIBLE_DEVICES": cards[place]} if len(cards) > 1 else {})


@cache
def card_count() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("UUID")


def run_tests(root, backend, workers, more, cases=("tests",)) -> dict:
    """The tests that name one backend; a run that leaves no report, or ends ill beside a good one, counts as failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            *cases,
            f"--backends={backend}",
            "-k",
            backend,
            "--exhaustive",
            f"--junitxml={report}",
            "-v",  # a run that is cut short has said by then what failed, and on which worker
            "-o",
            f"faulthandler_timeout={LONGEST}",
            *more,
        ]
        if workers > 1:  # with a new worker for one that crashed, loadgroup waits for ever near the end
            command += ["-n", str(workers), "--dist", "loadgroup", "--max-worker-restart", "0"]
        status = subprocess.run(command, cwd=root, env=on_card(0)).returncode
        found = (
            counts(report)
            if report.exists()
            else dict.fromkeys(("passed", "failed", "skipped", "seconds"), 0) | {"failures": []}
        )
        if status and not found["failed"]:
            found["failed"] = 1
        return found


def sanitize(root, sanitizer, tools) -> dict | None:
    """What these tools of compute-sanitizer say of sanitized.py, side by side; None where there is no such program."""
    if not tools or shutil.which(sanitizer) is None:
        return None
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True).stdout
    # Alone, each tool would compile all kernels, one after the other, which takes longer than all else that it does.
    compiled = run_sanitized(root, [], ["--compile"])
    if compiled.returncode:
        print(compiled.stderr)
    with ThreadPoolExecutor(len(tools)) as pool:
        found = pool.map(lambda tool: run_sanitizer(root, sanitizer, tool), tools)
    return {"version": re.search(r"Version (\S+)", version)[1], "tools": dict(zip(tools, found))}


def run_sanitized(root, before, arguments):
    """Runs sanitized.py with these arguments and this program `before` it."""
    paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [*before, sys.executable, "sanitized.py", *arguments],
        cwd=root / "tests",
        env=on_card(-1) | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        errors="replace",
    )


def run_sanitizer(root, sanitizer, tool) -> dict[str, float]:
    """Errors, warnings among them; a run that ends ill or counts no calls has at least one."""
    begun = time.monotonic()
    run = run_sanitized(root, [sanitizer, "--tool", tool, "--error-exitcode", "1"], [])
    said = run.stdout + run.stderr
    errors, calls, files = (
        re.search(pattern, said) for pattern in (r"SUMMARY: (\d+) ", r"(\d+) calls of", r"calls of (\d+) kernel files")
    )
    count = int(errors[1]) if errors else 0
    if run.returncode or not errors or not calls:
        count = max(count, 1)
    if count:
        print(said)
    return {
        "calls": int(calls[1]) if calls else 0,
        "kernel_files": int(files[1]) if files else 0,
        "errors": count,
        "seconds": round(time.monotonic() - begun, 1),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """The card, its driver, and CUDA as CuPy and the driver see it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    card, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    import cupy

    runtime, supported = cupy.cuda.runtime.runtimeGetVersion(), cupy.cuda.runtime.driverGetVersion()
    return {
        "card": card,
        "driver": driver,
        "cuda": f"{runtime // 1000}.{runtime % 1000 // 10}",
        "cuda_of_driver": f"{supported // 1000}.{supported % 1000 // 10}",
    }


def commit(root) -> str | None:
    """The commit whose sources were run, marked when the tree has changes of its own; None where git cannot say."""

    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--", *SOURCES) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def earlier_legs(path, sources) -> tuple[dict, dict | None]:
    """(backends, sanitizer) of the record at `path`; nothing where there is none, or one of other sources."""
    record = json.loads(path.read_text()) if path.exists() else {}
    if record.get("sources") != sources:
        return {}, None
    return record["backends"], record["sanitizer"]


def write(root, path, legs, workers, sanitizer, more, again=False) -> int:
    sources = hashes(root)
    tools = [leg for leg in legs if leg in SANITIZERS]
    tested, sanitized = earlier_legs(path, sources)
    with ThreadPoolExecutor(1) as beside:
        watched = beside.submit(sanitize, root, sanitizer, tools) if card_count() > 1 else None
        for backend in filter(BACKENDS.__contains__, legs):
            earlier = tested.get(backend) if again else None
            tested[backend] = run_again(root, backend, workers, more, earlier)
        found = watched.result() if watched else sanitize(root, sanitizer, tools)
        if found and sanitized:
            found["tools"] = sanitized["tools"] | found["tools"]
        record = {
            **machine(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "commit": commit(root),
            "versions": versions(),
            "backends": tested,
            "sanitizer": found or sanitized,
            "sources": sources,
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(fresh, path)
    return check(root, path)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument(
        "--write", action="store_true", help="run the tests on this machine's card and store the record"
    )
    action.add_argument("--check", action="store_true", help="compare the record with the sources")
    parser.add_argument("--out", type=Path, default=RECORD, help="the record's file")
    every = (*BACKENDS, *SANITIZERS)
    parser.add_argument("--legs", default=",".join(every), help="what runs, of %(default)s")
    parser.add_argument("--again", action="store_true", help="of a backend's cases run those that failed before")
    parser.add_argument("--workers", type=int, default=1, help="processes that run tests side by side")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program, where it is not on the path")
    given, more = parser.parse_known_args(arguments)
    if given.check:
        if more:
            parser.error(f"unknown arguments: {' '.join(more)}")
        return check(ROOT, given.out)
    legs = given.legs.split(",")
    if unknown := sorted({*legs} - {*every}):
        parser.error(f"--legs: {', '.join(unknown)} is none of {', '.join(every)}")
    return write(ROOT, given.out, legs, given.workers, given.sanitizer, more, given.again)


if __name__ == "__main__":
    sys.exit(main())
