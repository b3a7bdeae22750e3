"""The command in a process: signals at any moment, streams that are closed or full, disks without room, folders that
are removed."""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st
from safetensors.numpy import save

from attack.harness import Refused, holds_for, require
from linattn_np.models import RWKV6, RWKV7, checkpoint
from linattn_np.models.fine_tuning import Base, LowRank

LINES = '{"prompt": "Emma was", "tokens": 3}\n' * 400
FROM = "train --device cpu --text in --out trained --batch 2 --context 16 --every 0 --from"
WORK = {
    "text": "generate --device cpu --tokens 400",
    "batch": "generate --device cpu --batch-file in --output out --slots 4",
    "cards": "generate --device cpu --batch-file in --output out --slots 4 --cards 2",
    "train": "train --device cpu --text in --out trained --layers 1 --width 16 --head-size 8 --batch 2 --context 16 "
    "--steps 40 --every 0",
    "all weights": f"{FROM} six.safetensors --steps 40",
    "adapter": f"{FROM} six.safetensors --lora 2 --steps 40",
    "state": f"{FROM} seven.safetensors --state --steps 40",
    "version 7": f"{FROM.replace('--from', '--version')} 7 --layers 1 --width 16 --head-size 8 --steps 40",
    "quantise": "quantise --dtype bfloat16 --text in --tokens 64 --out few.safetensors",
    "merge": "merge --model six.safetensors --adapter adapter.safetensors --out merged.safetensors",
    "evaluate": "evaluate seven.safetensors in --device cpu --dtype float32",
    "chat": "generate --device cpu --chat --tokens 3 --save-state chat.npz",
    "stdin": "generate --device cpu --prompt - --tokens 20 --save-state state.npz",
    "info": "info",
    "help": "--help",
}
# What is wrong with the process, but for its streams and its disk: variables, limits, a word for the interpreter.
TROUBLES = {
    "none": {},
    "no docstrings": {"python": ["-OO"]},
    "no home": {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere", "NUMBA_CACHE_DIR": None},
    "no folder for Numba": {"NUMBA_CACHE_DIR": "/proc/nowhere"},
    "no compiler": {"NUMBA_DISABLE_JIT": "1"},
    "few files": {"limit": (resource.RLIMIT_NOFILE, 40)},
    "no threads": {"limit": (resource.RLIMIT_NPROC, 1)},
    "C locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "no temporary folder": {"TMPDIR": "/proc/nowhere"},
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
# Root has no limit of processes. Another user, who may read root's files, has.
NOBODY, AS_NOBODY = 65534, "setpriv --reuid=65534 --inh-caps=-all,+dac_override --ambient-caps=-all,+dac_override"
PATIENCE = 60  # seconds that the process may take, on a machine with much else to do


@dataclass(frozen=True)
class Ending:
    """A command, the signals that come some seconds after it takes them, and what is wrong with its surroundings."""

    work: str = "batch"
    signals: tuple = ()
    after: float = 0.5
    apart: float = 0.0  # seconds between two signals
    closed: tuple = ()
    full: tuple = ()
    room: int | None = None  # bytes that a file may have
    disk: int | None = None  # bytes that are left in the folder
    trouble: str = "none"
    removed: str | None = None  # "before": the working folder is gone; "while": what is in it, when the signals come


def endings(machine):
    streams = st.lists(st.sampled_from((0, 1, 2)), max_size=2, unique=True).map(tuple)
    return st.builds(
        Ending,
        st.sampled_from(list(WORK)),
        st.one_of(
            st.lists(st.sampled_from([*map(int, SIGNALS)]), max_size=2).map(tuple),
            st.lists(st.sampled_from([*map(int, SIGNALS[:3])]), min_size=3, max_size=6).map(tuple),
        ),
        st.floats(0, 3),
        st.sampled_from((0.0, 0.0, 0.0005, 0.003, 0.02)),
        streams,
        streams,
        st.none() | st.sampled_from((0, 100, 10_000, 100_000)),
        st.none() | st.sampled_from((0, 1 << 13, 1 << 16)),
        st.sampled_from(list(TROUBLES)),
        st.sampled_from((None, None, "before", "while")),
    )


@functools.cache
def models():
    """The bytes of two small models and of an adapter of the first one, by name of file."""
    found = {}
    for name, kind in (("six", RWKV6), ("seven", RWKV7)):
        layout = kind.trainable(2, 32, 8)
        found[name] = layout.named(layout.initial(0))
    adapter = LowRank(Base.of(found["six"]), 2).trainable(2, 32, 8)
    found["adapter"] = adapter.named(adapter.initial(0))
    return {f"{name}.safetensors": save(arrays) for name, arrays in found.items()}


@holds_for(endings, machines=("numpy",), round=3, patience=2 * PATIENCE)
def ends(case, machine):
    """A documented exit code, no traceback, and files that are whole."""
    with tempfile.TemporaryDirectory() as parent, disk_of(parent, case.disk) as folder:
        code, messages = ended(case, folder)
        killed = -signal.SIGKILL in (code, *(-number for number in case.signals))
        wanted = {0, 2, *(128 + number for number in case.signals), *(-number for number in case.signals)}
        require(code in wanted, f"endings: exit code {code}", messages[-300:])
        for word in ("Traceback", "Exception ignored", "a fault of linattn-np"):
            require(word not in messages, f"endings: {word}", messages[-600:])
        left = [path.name for path in Path(folder).rglob("*.part")]
        require(killed or not left, "endings: a part is left", str(left))
        whole(Path(folder))


@contextmanager
def disk_of(parent, left):
    """A folder with what the commands read; `left`: on a disk of its own that has so many bytes more, where one may be
    mounted."""
    if left is not None and not mounts(parent, "-t", "tmpfs", "none"):
        raise Refused("no disk may be mounted here")
    try:
        (Path(parent) / "in").write_text(LINES)
        for name, content in models().items():
            (Path(parent) / name).write_bytes(content)
        if left is not None:
            disk = os.statvfs(parent)
            mounts(parent, "-o", f"remount,size={(disk.f_blocks - disk.f_bfree) * disk.f_bsize + left}")
        yield parent
    finally:
        if left is not None:
            subprocess.run(["umount", parent], check=True)


def mounts(folder, *how) -> bool:
    """Whether `mount` does this to the folder."""
    try:
        return subprocess.run(["mount", *how, folder], stderr=subprocess.DEVNULL).returncode == 0
    except FileNotFoundError:
        return False


def ended(case, folder):
    """The exit code and what was written on stderr."""

    trouble = dict(TROUBLES[case.trouble])
    python, limit = trouble.pop("python", []), trouble.pop("limit", None)
    user = []
    if case.trouble == "no threads" and os.geteuid() == 0 and shutil.which("setpriv"):
        user = AS_NOBODY.split()
        os.chown(folder, NOBODY, -1)

    def surroundings():
        if limit:
            resource.setrlimit(limit[0], (limit[1], limit[1]))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the attack may run behind nohup
        if case.room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (case.room, case.room))
        if case.removed == "before":
            os.mkdir("gone")
            os.chdir("gone")
            os.rmdir("../gone")
        for number in case.full:
            os.dup2(os.open("/dev/full", os.O_RDWR), number)
        for number in case.closed:
            os.close(number)

    command = [*user, sys.executable, *python, "-m", "linattn_np", *WORK[case.work].split()]
    # Python would leave half a file of bytecode where files have no room.
    own = {"PYTHONPATH": str(Path(checkpoint.__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = os.environ | own | trouble
    environment = {name: value for name, value in environment.items() if value is not None}
    stdin = open(Path(folder) / "in") if case.work in ("chat", "stdin") else subprocess.DEVNULL
    how = dict(stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    process = subprocess.Popen(command, cwd=folder, env=environment, preexec_fn=surroundings, **how)
    until = time.monotonic() + PATIENCE
    while process.poll() is None and not takes_signals(process.pid):
        time.sleep(0.01)
    time.sleep(case.after if case.signals or case.removed == "while" else 0)
    if case.removed == "while":
        shutil.rmtree(folder, ignore_errors=True)  # the folder itself stays where it is a disk
    for number in case.signals:
        process.send_signal(number)
        time.sleep(case.apart)
    try:
        messages = process.communicate(timeout=until - time.monotonic())[1]
    finally:
        process.kill()
        process.wait()  # its folder cannot be unmounted before
    return process.returncode, messages.decode()


def takes_signals(pid) -> bool:
    """Whether its own handlers are in place."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> signal.SIGTERM - 1 & 1)


def whole(folder):
    if (folder / "out").exists():
        for line in (folder / "out").read_text().splitlines():
            try:
                json.loads(line)
            except ValueError:
                require(False, "endings: a line is cut", line[:200])
    for path in (*folder.rglob("*.safetensors"), *folder.rglob("*.pth")):
        checkpoint.read(path)
