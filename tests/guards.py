"""The tests of a file that runs on a card: the fewest cases that launch the kernels it is part of, on the CPU.

    python tests/guards.py delta/prepare [FILE ...] [pytest's options]

FILE is a kernel, as here, or the path of a kernel, of a header or of a planner. Its kernels' tests are those of the
table in kernels_cu/README.md. First they run without their kernels, which takes seconds and says which case launches
what; then the chosen cases run.
"""

import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
KERNELS = ROOT / "kernels_cu"
ROW = re.compile(r"^\| (\S+)\.cu \| (.+) \| (\S+) \|$", re.MULTILINE)
ALSO = ("test_growth.py", "test_growth_gradients.py", "test_growth_on_hopper.py")  # of every kernel that they launch
STATIC = ("test_plans.py::test_kernels_that_overlap_wait_for_the_one_before",)  # what only a kernel's text shows


@cache
def rows():
    """(kernel, the files that launch it, its tests) of kernels_cu/README.md."""
    table = ROW.findall((KERNELS / "README.md").read_text())
    return [(kernel, hosts.split(", "), test) for kernel, hosts, test in table]


@cache
def included(kernel) -> set[str]:
    """The headers in a kernel's text."""
    from linattn_np.backends.cupy import source

    lines = re.findall(r'^#line \d+ "(.+)"$', source.text(kernel), re.MULTILINE)
    return {os.path.relpath(path, source.root()) for path in lines}


def guarded(path) -> dict[str, str]:
    """The tests of each kernel that a file is part of."""
    path = Path(path if Path(path).suffix else KERNELS / f"{path}.cu").resolve()
    if path.suffix == ".py":
        launched = [(hosts, kernel, test) for kernel, hosts, test in rows() if path.name in hosts]
        fewest = min((len(hosts) for hosts, *_ in launched), default=0)  # its own kernels, where it has some
        return {kernel: test for hosts, kernel, test in launched if len(hosts) == fewest}
    name = path.relative_to(KERNELS).as_posix()
    return {kernel: test for kernel, _, test in rows() if name in included(kernel)}


def in_folder(tests) -> list[str]:
    return sorted(f"tests/{test}" for test in tests)


class Survey:
    """Runs tests without their kernels: `launches` has, by case, the instances that it launches, by file, of the cases
    that fail then: others do not judge results."""

    def __init__(self):
        self.launches = {}
        self.launched = {}

    def pytest_runtest_logstart(self, nodeid):
        self.launched = {}

    def record(self, kernel, *_):
        self.launched.setdefault(kernel.file, set()).add(kernel.expression)

    def pytest_runtest_logreport(self, report):
        if report.failed and self.launched:
            self.launches[report.nodeid] = self.launched

    def of(self, tests, *options):
        import pytest
        from emulator import EmulatedDevice

        EmulatedDevice.launch, EmulatedDevice.wait_for = self.record, lambda *_: None
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            options = "--tb=no", "-p", "no:xdist", "--backends=emulated,hopper", *options
            pytest.main([*options, *in_folder(tests)], plugins=[self])
        return self.launches


def held(case, launched, kernels):
    """What a case says of these kernels: it is of a test, and launches instances with values of template arguments."""
    instances = [(kernel, instance) for kernel in kernels for instance in launched.get(kernel, ())]
    words = {
        (kernel, place, word)
        for kernel, instance in instances
        for place, word in enumerate(instance.partition("<")[2].strip(">").split(", "))
    }
    return words | {(kernel, case.partition("[")[0]) for kernel, _ in instances}


def chosen(launches, kernels) -> list[str]:
    """Few cases, in which every value of every template argument of the kernels occurs, and every test."""
    left = {case: found for case, launched in launches.items() if (found := held(case, launched, kernels))}
    cases, had = [], set()
    while any(found - had for found in left.values()):
        best = max(left, key=lambda case: len(left[case] - had))
        had |= left.pop(best)
        cases.append(best)
    return cases


def main():
    files = [word for word in sys.argv[1:] if not word.startswith("-")]
    options = [word for word in sys.argv[1:] if word.startswith("-")]
    kernels = {kernel: test for file in files for kernel, test in guarded(file).items()}
    os.chdir(ROOT)
    seed = [option for option in options if option.startswith("--seed=")]
    cases = chosen(Survey().of({*kernels.values(), *ALSO}, *seed), kernels)
    return subprocess.call([sys.executable, "-m", "pytest", "-q", *options, *cases, *in_folder(STATIC)])


if __name__ == "__main__":
    sys.exit(main())
