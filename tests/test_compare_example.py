"""The example that draws operators beside each other, as a person runs it."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_examples import ENVIRONMENT

COMPARE = Path(__file__).parents[1] / "examples" / "compare_attention.py"


def compare(*arguments):
    return subprocess.run([sys.executable, COMPARE, *map(str, arguments)], capture_output=True, text=True, timeout=60,
                          env=ENVIRONMENT)


def test_it_draws(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "lines.png"
    done = compare("--device", "cpu", "--longest", 1024, "--heads", 2, "--width", 16, "--out", picture)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{picture}\n", "")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments, said", [
    (("--out", "no/such/folder/x.png"), "there is no folder"),
    (("--longest", "511"), "expected a whole number from 512 up"),
    (("--heads", "0"), "expected a whole number from 1 up"),
    (("--device", "tpu"), "invalid choice"),
])
def test_misuse_is_one_line(arguments, said):
    done = compare(*arguments)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
