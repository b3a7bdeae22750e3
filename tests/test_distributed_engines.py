"""What carries distributed calls: processes under mpiexec and by torchrun's variables, NCCL, torch's groups, JAX."""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from reference import LIMITS
from test_distributed import VARIANTS

from linattn_np import distributed
from linattn_np.distributed import RankLost, Sockets, nccl, run_threads
from linattn_np.distributed.nccl import FLAGS, GREETING, Watch

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
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)


def mpi_version():
    done = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True)
    return done.stdout + ("Open MPI" if "OpenRTE" in done.stdout else "")


def under_torchrun(ranks, *what):
    """The same with the environment variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1)}
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
        said = [process.communicate(timeout=60)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], said


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_operators_under_mpi(ranks):
    done = under_mpi(ranks, "messages", "operators")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert {f"rank {rank} of {ranks}: Mpi" for rank in range(ranks)} <= set(lines)
    assert {f"{variant} {form}" for variant in VARIANTS for form in ("dense", "packed")} <= set(lines)


def test_operators_by_torchruns_variables():
    codes, said = under_torchrun(3, "messages", "operators")
    assert codes == [0, 0, 0], said
    assert [f"rank {rank} of 3: Sockets" in words for rank, words in enumerate(said)] == [True] * 3
    assert {f"{variant} {form}" for variant in VARIANTS for form in ("dense", "packed")} <= set(said[0].splitlines())


def test_operators_and_autograd_on_a_process_group_of_torch():
    pytest.importorskip("torch", reason="torch is not installed")
    codes, said = under_torchrun(2, "messages", "differ", "autograd")
    assert codes == [0, 0], said
    for rank, words in enumerate(said):
        assert {f"rank {rank} of 2: ProcessGroup", f"autograd on rank {rank}"} <= set(words.splitlines())


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
    start = time.monotonic()
    done = under_mpi(3, "hangs")
    assert done.returncode != 0 and time.monotonic() - start < 30
    assert "waited 2 s for all 3 ranks" in done.stdout


def test_a_killed_rank_ends_the_others_by_torchruns_variables():
    codes, said = under_torchrun(3, "killed")
    assert codes == [3, -9, 3]
    assert all(re.search("rank 1 has ended|rank [02] has ended", said[rank]) for rank in (0, 2)), said


def test_a_rank_that_does_not_come(monkeypatch):
    with pytest.raises(RankLost, match="rank 0 does not answer at 127.0.0.1:1: "):
        distributed.Sockets(1, 2, "127.0.0.1", 1, limit_s=0.2)
    with pytest.raises(RankLost, match="waited 0.2 s for rank 1, 2 to connect"):
        distributed.Sockets(0, 3, "127.0.0.1", 0, limit_s=0.2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="connect: WORLD_SIZE is set, but not RANK, MASTER_ADDR, MASTER_PORT"):
        distributed.connect()


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
            barrier.wait(10)
            for rank in range(self.size):
                ctypes.memmove(to + rank * count, sources[rank], count)
            barrier.wait(10)

        def send(self, source, count, dtype, peer, stream):
            barrier, sources = self.shared
            sources[self.rank, peer] = source
            barrier.wait(10)
            barrier.wait(10)

        def recv(self, to, count, dtype, peer, stream):
            barrier, sources = self.shared
            barrier.wait(10)
            ctypes.memmove(to, sources[peer, self.rank], count)
            barrier.wait(10)

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
    with pytest.raises(RuntimeError, match="3 ranks want as many CUDA devices, there are 2"):
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
    assert aborted.wait(5)
    with pytest.raises(RankLost, match="NCCL, rank 0 of 2: waited 0.2 s for the other ranks"):
        watch.check()
    assert "waited 0.2 s" in capsys.readouterr().err


def test_a_rank_that_has_ended_is_not_waited_for(monkeypatch, capsys):
    monkeypatch.setattr(nccl, "GRACE_S", 0.1)
    aborted, ended = threading.Event(), [None]
    watch = Watch(aborted.set, "NCCL, rank 0 of 2", 4.0, lambda: ended[0])
    ended[0] = "rank 1 has ended"  # in good time: nothing is under way
    arrive(watch, watch.begin())
    assert not aborted.wait(1.5)
    watch.begin()
    assert aborted.wait(2.5)
    with pytest.raises(RankLost, match="NCCL, rank 0 of 2: rank 1 has ended"):
        watch.check()


def two_sockets(limit_s=20):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ThreadPoolExecutor(2) as threads:
        return threads.map(lambda rank: Sockets(rank, 2, "127.0.0.1", port, limit_s=limit_s), range(2))


def test_long_messages_arrive_before_anyone_waits():
    first, second = two_sockets()
    x = np.arange(1 << 22)  # more than lies between two sockets
    waits = [
        (comm.all_gather(x + rank), comm.all_gather(np.array([rank]))) for rank, comm in enumerate((first, second))
    ]
    for comm in first, second:
        comm.sender.submit(lambda: None).result(10)  # has sent what came before
    for long, short in waits:
        assert short().tolist() == [[0], [1]] and (long() == [x, x + 1]).all()


def test_sockets_put_messages_together():
    """However they are cut on their way."""
    first, second = two_sockets()
    x = np.arange(5)
    whole = (x.nbytes.to_bytes(8, "little") + x.tobytes()) * 2
    received, receiving = np.zeros((2, 5), int), ThreadPoolExecutor(1)
    done = receiving.submit(lambda: [first.recv(row, 1) for row in received])
    for n in range(0, len(whole), 7):
        second.peers[0].sendall(whole[n : n + 7])
        time.sleep(0.005)
    done.result(10)
    assert (received == x).all()


@pytest.mark.parametrize("sent, expected", [(3, 4), (4, 3), (3, 1000), (1000, 3), (1000, 2000)])
def test_ranks_in_different_calls_do_not_hang(sent, expected):
    first, second = two_sockets()
    second.send(np.zeros(sent), 0)
    with pytest.raises(RankLost, match=f"rank 1 sent {8 * sent} bytes where {8 * expected} were expected: it is in"):
        first.recv(np.zeros(expected), 1)


def test_sockets_wait_no_longer_than_their_limit():
    first, _ = two_sockets(limit_s=0.3)
    for size in (1, 10_000):
        start = time.monotonic()
        with pytest.raises(RankLost, match="waited 0.3 s for rank 1"):
            first.recv(np.zeros(size), 1)
        assert 0.2 < time.monotonic() - start < 5
    with pytest.raises(RankLost, match="waited 0.3 s for rank 1"):
        first.all_gather(np.zeros(1 << 23))()  # nobody takes it


def test_sockets_tell_who_has_ended():
    first, second = two_sockets()
    assert first.ended() is None
    second.send(np.arange(3), 0)  # what has been sent is there to be read, and stays
    time.sleep(0.2)
    received = np.zeros(3, np.int64)
    assert first.ended() is None and first.recv(received, 1) is None and received.tolist() == [0, 1, 2]
    second.abandon()
    time.sleep(0.2)
    assert first.ended().startswith("rank 1 has ended")


# -- the benchmark ----------------------------------------------------------------------------------------------------
def test_the_benchmark_runs_on_threads(tmp_path):
    sizes = ["--tokens", "40", "--total", "80", "--heads", "2", "--dim", "8"]
    command = [sys.executable, "benchmarks/cards.py", "--threads", "2", *sizes, "--out", str(tmp_path / "rows.json")]
    subprocess.run(command, cwd=HERE.parent, check=True, capture_output=True, timeout=60, env=ENVIRONMENT)
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


def check_shard_map(*cards, names=("gla", "rwkv6", "simple_gla", "retention", "linear_attention")):
    command = [sys.executable, "sharded_jax.py", *cards]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=200, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = [*(f"{name} over heads" for name in names), "gla over batch", "rwkv6 over batch"]
    wanted += [
        "rwkv6 over batch unchecked",
        *(f"{name} over the sequence" for name in names),
        "gla over the sequence in reverse",
        "rwkv6 over the sequence unchecked",
        "the normaliser over the sequence",
        "a gate of values over the sequence",
    ]
    lines = done.stdout.splitlines()
    assert lines[: len(wanted)] == wanted
    refusal, *lines = lines[len(wanted) :]
    assert refusal.startswith("gla: cu_seqlens cannot be combined with axis_name")
    wanted = [f"{name} under jit over {axis}" for name in names for axis in ("batch", "heads")]
    assert lines[: len(wanted) + 4] == wanted + ["cut as they are"] * 4
    assert lines[len(wanted) + 4 :] == [
        "gla: q is cut over 'devices' along T, which jax.shard_map with axis_name= takes",
        "gla: q is cut over 'devices' along K, which meets in every state",
        "retention: q is cut over 'devices' along H, whose decays differ by head: name one gamma for all",
    ]
