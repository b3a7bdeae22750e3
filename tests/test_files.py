"""Files: ours are whole or as they were, whatever goes wrong beside them; others' are read with suspicion."""

import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import linattn_np
from linattn_np import ContractError
from linattn_np.models import State
from linattn_np.models.files import (
    FileError,
    check_writable,
    json_object,
    lines,
    opened,
    replaced,
    same_file,
    write_arrays,
)
from linattn_np.models.number_checks import checked_int, checked_number, shown

SHAPES = (2, 1, 6), (2, 1, 2, 3, 3), (2, 1, 6)
SAVERS = {
    "State.save": lambda path: State(*(np.ones(shape, np.float32) for shape in SHAPES)).save(path),
    "Training.write": lambda path: write_arrays(path, {"weights": np.ones(50_000, np.float32)}),
}


@pytest.fixture(params=SAVERS)
def save(request):
    return SAVERS[request.param]


def fill(path, content):
    with replaced(path) as file:
        file.write(content)


# -- writing ----------------------------------------------------------------------------------------------------------
def test_a_users_own_part_is_never_touched(save, tmp_path):
    (tmp_path / "x.part").write_text("mine")
    save(tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.part"]
    assert (tmp_path / "x.part").read_text() == "mine"


def test_two_processes_that_save_to_one_path_tear_nothing(tmp_path):
    path, writers = tmp_path / "x", []
    script = (
        "import sys; from linattn_np.models.files import replaced\n"
        "for _ in range(60):\n"
        "    with replaced(sys.argv[1]) as file:\n"
        "        for _ in range(100): file.write(sys.argv[2].encode() * 5000)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(linattn_np.__file__).parents[1])}
    for letter in "ab":
        writers.append(subprocess.Popen([sys.executable, "-c", script, str(path), letter], env=environment))
    seen = set()
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            seen.add(path.read_bytes())
    assert [writer.returncode for writer in writers] == [0, 0]
    seen.add(path.read_bytes())
    assert seen <= {b"a" * 500_000, b"b" * 500_000}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_the_mode_of_the_old_file_is_kept(save, mode, tmp_path):
    (tmp_path / "x").write_text("old")
    (tmp_path / "x").chmod(mode)
    save(tmp_path / "x")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == mode


def test_a_new_file_has_the_mode_of_any_other(save, tmp_path):
    save(tmp_path / "x")
    (tmp_path / "y").touch()
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "y").stat().st_mode


@pytest.mark.parametrize("there", [True, False])
def test_a_symbolic_link_stays_one(save, there, tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    if there:
        target.write_text("old")
    link.symlink_to(target)
    save(link)
    assert link.is_symlink() and target.stat().st_size > 100
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_a_fifo_is_written_as_such(save, tmp_path):
    fifo, read = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()))
    reader.start()
    save(fifo)
    reader.join()
    assert stat.S_ISFIFO(fifo.stat().st_mode) and len(read[0]) > 100
    assert list(tmp_path.iterdir()) == [fifo]


def test_a_device_is_written_as_such(save):
    save("/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OSError, match="No space left"):
        save("/dev/full")


def test_an_error_while_writing_leaves_what_was_there(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    for error in (OSError("no space left"), KeyboardInterrupt()):
        with pytest.raises(type(error)), replaced(path) as file:
            file.write(b"new")
            raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.fixture
def small_files():
    """No file may grow beyond 1000 bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_leaves_what_was_there(save, tmp_path, small_files):
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(OSError, match="File too large"):
        save(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(os.fstat(descriptor)))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda part, path: (done.append(part), replace(part, path)))
    fill(tmp_path / "x", b"new")
    file, part, folder = done
    assert stat.S_ISREG(file.st_mode) and file.st_size == 3
    assert Path(part).parent == tmp_path and stat.S_ISDIR(folder.st_mode)


def test_what_cannot_be_written_is_said_before(tmp_path):
    for path, wanted in ((tmp_path, IsADirectoryError), (tmp_path / "no" / "x", FileNotFoundError)):
        for ask in (check_writable, lambda path: fill(path, b"")):
            with pytest.raises(wanted):
                ask(path)
    assert check_writable(tmp_path / "x") is None and not list(tmp_path.iterdir())
    (tmp_path / "x").touch()
    assert check_writable(tmp_path / "x").st_size == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_read_only_file_is_not_replaced(tmp_path):
    (tmp_path / "x").touch(0o444)
    with pytest.raises(PermissionError):
        fill(tmp_path / "x", b"new")


def test_files_with_two_names_are_the_same(tmp_path):
    (tmp_path / "x").touch()
    (tmp_path / "link").symlink_to("x")
    os.link(tmp_path / "x", tmp_path / "hard")
    (tmp_path / "to nothing").symlink_to("y")
    assert same_file(tmp_path / "x", tmp_path / "link") and same_file(tmp_path / "x", tmp_path / "hard")
    assert same_file(tmp_path / "y", tmp_path / "to nothing")
    assert not same_file(tmp_path / "x", tmp_path / "y")


# -- reading ----------------------------------------------------------------------------------------------------------
def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "x").write_bytes(b"12")
    for path in (tmp_path / "fifo", "/dev/zero", tmp_path):
        with pytest.raises(FileError, match="is a folder or a device, expected a file"):
            opened(path)
    with opened(tmp_path / "x") as file:
        assert file.read() == b"12"


def test_lines_end_somewhere(tmp_path):
    (tmp_path / "x").write_bytes(b"1\n22\n333")
    with open(tmp_path / "x", "rb") as file:
        assert list(lines(file, 3)) == [(1, b"1\n"), (2, b"22\n"), (3, b"333")]
    with open("/dev/zero", "rb") as file, pytest.raises(FileError, match="line 1 has more than 1000 bytes, expected"):
        list(lines(file, 1000))


@pytest.mark.parametrize(
    "text, complaint",
    [
        ('{"a": 1, "a": 1}', "the JSON has a key twice"),
        ('{"a": {"b": 1, "b": 2}}', "the JSON has a key twice"),
        ("[1]", "the JSON is a list, expected an object"),
        ("{a}", "the JSON is damaged .Expecting"),
        ("[" * 100_000, "the JSON is damaged"),
        ("9" * 5000, "the JSON is damaged"),
        (b"\xff\xff", "the JSON is damaged"),
    ],
)
def test_json_that_is_refused(text, complaint):
    with pytest.raises(FileError, match=complaint):
        json_object(text)
    assert json_object('{"a": [1]}') == {"a": [1]}


# -- numbers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [-1, 10**400, 0.0, True, "1", None, [1], float("nan")], ids=shown)
def test_whole_numbers_that_are_refused(value):
    with pytest.raises(ContractError, match="Op: name is .{1,40}, expected a whole number from 0 to 9$"):
        checked_int("Op", "name", value, 0, 9)
    assert type(checked_int("Op", "name", np.int64(3), 0, 9)) is int


@pytest.mark.parametrize("value", [-1, 10**400, float("inf"), float("nan"), True, "1", None, 1j, np.ones(1)], ids=shown)
def test_real_numbers_that_are_refused(value):
    with pytest.raises(ContractError, match="Op: name is .{1,40}, expected a number from 0 up$"):
        checked_number("Op", "name", value, "a number from 0 up", lambda x: x >= 0)
    assert type(checked_number("Op", "name", np.float32(0.5), "any", lambda x: True)) is float


def test_what_is_shown_is_short():
    deep = []
    for _ in range(10_000):
        deep = [deep]
    for value in (deep, "x" * 10**6, 10**10**5, np.zeros(10**6), object()):
        assert len(shown(value)) < 100
