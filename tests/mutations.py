"""Wrong changes drawn at random, and whether the tests of the file notice them.

    python tests/mutations.py [--seconds 600] [--seed 1] [--family delta]

A kernel, a header or a planner of a copy of this checkout loses a barrier or a boundary, or has another constant. Then
the cases run that `guards.py` chooses for that file: the compiler notices the change, or a case does, or nobody. Prints
each change, then a table. Some changes that nobody notices change nothing: that is for the reader to say.
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import guards

PATIENCE = 300  # seconds of one change
OF_A_HEADER = 2  # kernels that include it, whose cases run
COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"""(?:.|\n)*?"""|"[^"\n]*"')
PLANNED_COMMENT = re.compile(r'#[^\n]*|"""(?:.|\n)*?"""|"[^"\n]*"')
WAITS = r"\b(?:named_barrier_sync|mbarrier_wait|wgmma_wait|cp_async_wait|tensor_store_wait|wait_for\w*|sync)"
ARGUMENTS = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
# {what changes: (where, by what)}
ANYWHERE = {
    "<= for <": (r"(?<= )<(?= )", "<="),
    "> for >=": (r"(?<= )>=(?= )", ">"),
    "no + 1": (r" \+ 1\b(?!\.)", ""),
    "no - 1": (r" - 1\b(?!\.)", ""),
}
DEVICE = ANYWHERE | {
    "no __syncthreads": (r"\b__syncthreads\(\);", ";"),
    "no __syncwarp": (r"\b__syncwarp\(\);", ";"),
    "no fence": (r"\b(?:fence_proxy_async|wgmma_fence|fence_copies|__threadfence\w*)\(\);", ";"),
    "no wait": (rf"{WAITS}(?:<[^<>;]*>)?{ARGUMENTS};", ";"),
    "a later group": (r"(?<=wait<)\d+(?=>)|(?<=wait_for<)\d+(?=>)", lambda x: str(int(x[0]) + 1)),
    "one arrival more": (rf"(?<=mbarrier_init){ARGUMENTS}", lambda x: f"{x[0][:-1]} + 1)"),
    "no arrival": (rf"\bmbarrier_arrive{ARGUMENTS};", ";"),
    "a constant + 1": (r"(?<=constexpr int )\w+ = [^;{]*?\b\d+\b", lambda x: f"{x[0]} + 1"),
    "a padding + 1": (r"(?<=\[)[A-Z]\w* \+ \d+(?=\])", lambda x: f"{x[0]} + 1"),
    "no condition": (r"(?m)^( *)if \((?:[^()]|\([^()]*\))*\) (?=[^{\n]*;$)", lambda x: x[1]),
    "no alternative": (r"(?<= && )[^&|;?()\n]+ < [^&|;?()\n]+(?= \?|\))", "true"),
}
PLANNER = ANYWHERE | {
    "a number + 1": (r"(?<![\w.])\d+(?![\w.])", lambda x: str(int(x[0]) + 1)),
    "another dtype": (r"\b(?:SINGLE|np\.float32)\b", "np.float64"),
    "another argument": (r"\b([a-z]\w*)=(?!=)(?=\1\b)", lambda x: f"{x[1]}="),
    "or for and": (r"(?<= )and(?= )", "or"),
    "no not": (r"\bnot (?!in\b)", ""),
}


def sites(path):
    """{what changes: [(where it starts, where it ends, what is there then)]}, of the code of a file."""
    planned = path.suffix == ".py"
    text = path.read_text()
    code = (PLANNED_COMMENT if planned else COMMENT).sub(lambda x: re.sub(r"[^\n]", "\0", x[0]), text)
    found = {}
    for what, (where, then) in (PLANNER if planned else DEVICE).items():
        for x in re.finditer(where, code):
            line = code[code.rfind("\n", 0, x.start()) + 1 : code.find("\n", x.end())]
            if not re.match(r" *(#|static_assert|assert|raise|import)", line):
                found.setdefault(what, []).append((*x.span(), x.expand(then) if isinstance(then, str) else then(x)))
    return found


def families(root):
    """{family: its files}: folders of kernels, and the planners."""
    found = {}
    for path in sorted((root / "kernels_cu").rglob("*.cu*")):
        found.setdefault(path.parent.relative_to(root / "kernels_cu").as_posix(), []).append(path)
    hosts = {host for _, hosts, _ in guards.rows() for host in hosts}
    folder = root / "linattn_np" / "backends" / "cupy"
    return found | {"planners": sorted(folder / host for host in hosts if (folder / host).exists())}


def draw(rng, paths):
    """(the file, what changes, where, to what): a file as often as it has lines, and every kind of change alike."""
    while True:
        (path,) = rng.choices(paths, [path.read_text().count("\n") for path in paths])
        if found := sites(path):
            what = rng.choice(sorted(found))
            return path, what, *rng.choice(found[what])


def outcome(copy, cases, seed):
    """Who notices, and the line that says it."""
    options = "-x", "-q", "--tb=short", "-p", "no:cacheprovider", f"--seed={seed}"
    command = [sys.executable, "-m", "pytest", *options, *cases, *guards.in_folder(guards.STATIC)]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    try:
        run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return "time", f"not over in {PATIENCE} s"
    if not run.returncode:
        return "nobody", ""
    said = re.findall(r"^E +(.*)|^(\S.*Error.*)", run.stdout, re.MULTILINE)
    why = next((a or b for a, b in said), run.stdout[-200:])
    return "the compiler" if "does not compile" in run.stdout else "a case", why[:150]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--family", action="append", help="of these folders of kernels_cu alone, or planners")
    options = parser.parse_args()
    end, rng, counts = time.time() + options.seconds, random.Random(options.seed), Counter()
    tests = {*guards.ALSO, *(test for *_, test in guards.rows())}
    launches = guards.Survey().of(tests, f"--seed={options.seed}")
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        for name in ("linattn_np", "kernels_cu", "tests", "examples", "pyproject.toml", "setup.cfg"):
            source = guards.ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
        files = families(copy)
        names = options.family or sorted(files)
        for number in range(10**6):
            if time.time() > end:
                break
            name = names[number % len(names)]
            path, what, start, stop, then = draw(rng, files[name])
            place = path.relative_to(copy)
            kernels = guards.guarded(guards.ROOT / place)
            cases = guards.chosen(launches, sorted(rng.sample(sorted(kernels), min(OF_A_HEADER, len(kernels)))))
            text = path.read_text()
            path.write_text(text[:start] + then + text[stop:])
            began = time.time()
            who, why = outcome(copy, cases, options.seed)
            path.write_text(text)
            counts[name, who] += 1
            line = text.count("\n", 0, start) + 1
            took = f"{time.time() - began:.0f}s, {len(cases)} cases"
            print(f"{who:12} {place}:{line} {what}: {text[start:stop]!r} ({took}) {why}", flush=True)
    for name in names:
        print(name, {who: n for (of, who), n in counts.items() if of == name})


if __name__ == "__main__":
    main()
