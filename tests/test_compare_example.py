"""`linattn-np compare`, as a person runs it."""

import errno
import itertools
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from conftest import PATIENCE
from test_examples import ENVIRONMENT

from linattn_np.command import measuring
from linattn_np.command.compare import LINES, Curve, call_of_torch, draw, ends, go_on, our_call


def compare(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "linattn_np", "compare", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=ENVIRONMENT,
    )


def test_it_draws(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "lines.png"
    done = compare("--device", "cpu", "--longest", 1024, "--heads", 2, "--width", 16, "--out", picture)
    assert (done.returncode, done.stdout) == (0, f"{picture}\n")
    assert not done.stderr or done.stderr.startswith("compiling loops ") and done.stderr.count("\n") == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_room_the_picture_before_stays(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    def savefig(self, file, **how):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", savefig)
    picture = tmp_path / "lines.png"
    picture.write_bytes(b"whole")
    options = SimpleNamespace(heads=2, width=16, out=picture)
    with pytest.raises(OSError, match="lines.png"):
        draw({op: Curve(T=[512], ms=[0.1], bytes=[1]) for op in LINES}, 1e-6, measuring.Cpu(), options)
    assert picture.read_bytes() == b"whole"


class OutOfMemory(measuring.Cpu):
    def with_peak(self, call):
        raise MemoryError


@pytest.mark.parametrize(
    "machine, seconds, end",
    [
        (measuring.Cpu, 1e-9, "1,024 tokens would take 0.0002 s, more than --seconds 1e-09"),
        (OutOfMemory, 2, "1,024 tokens take more memory than there is"),
    ],
)
def test_a_line_that_ends_says_why(machine, seconds, end):
    """On the picture, and it is not tried again."""
    options = SimpleNamespace(seconds=seconds)
    curve = Curve(T=[512], ms=[0.1], bytes=[1])
    for T in (1024, 2048):
        go_on(curve, machine(), lambda: int, T, options)
    assert curve.T == [512] and ends({"gla": curve}) == [f"× GLA ends: {end}"]


def test_the_memory_of_a_call():
    def call():
        bytes(3 << 20)
        return bytes(1 << 20)

    result, peak = measuring.Cpu().with_peak(call)
    assert len(result) == 1 << 20 and 3 << 20 <= peak < 4 << 20


def test_torch_computes_the_same():
    torch = pytest.importorskip("torch")
    sizes = dict(B=1, H=2, T=40, K=8, V=8)
    ours, theirs = (make(measuring.Cpu(), sizes)() for make in (partial(our_call, "softmax_attention"), call_of_torch))
    torch.testing.assert_close(torch.from_numpy(ours), theirs)


def test_lines_that_coincide_stay_visible():
    """A line that is drawn later is thinner than those beneath it."""
    widths, markers = ([style[i] for style in LINES.values()] for i in (2, 3))
    for sizes in (widths, markers):
        assert all(later < earlier - 1 for earlier, later in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--out", "no/such/folder/x.png"), "No such file or directory"),
        (("--out", "."), "Is a directory"),
        (("--longest", "511"), "expected a whole number from 512 up"),
        (("--heads", "0"), "expected a whole number from 1 up"),
        (("--device", "tpu"), "invalid choice"),
        (("--seconds", "0"), "expected a number above 0"),
    ],
)
def test_misuse_is_one_line(arguments, said):
    done = compare(*arguments)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
