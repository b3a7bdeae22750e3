"""Short messages through memory that the processes of a host share."""

import socket
import threading
import time

import numpy as np
import pytest

from linattn_np.distributed import RankLost, Sockets, mailbox
from linattn_np.distributed.mailbox import ROOM, SLOTS


@pytest.fixture
def connected():
    """A function that connects so many ranks of this process, as processes do."""
    engines = []

    def connect(size, limit_s=20):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        found = [None] * size

        def of(rank):
            found[rank] = Sockets(rank, size, "127.0.0.1", port, limit_s=limit_s)

        threads = [threading.Thread(target=of, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        engines.extend(found)
        return found

    yield connect
    for engine in engines:
        engine.abandon()


def test_messages_of_every_length_come_in_any_order(connected):
    first, second = connected(2)
    assert first.mailbox and second.mailbox
    sizes = 0, 1, ROOM, ROOM + 1, 5, 100_000, 7
    waits = {
        engine: [engine.all_gather(np.full(size, engine.rank, np.uint8)) for size in sizes]
        for engine in (first, second)
    }
    for engine, of_engine in waits.items():
        for size, wait in reversed(list(zip(sizes, of_engine))):
            assert (wait() == [[0] * size, [1] * size]).all(), engine.rank


def test_a_rank_that_is_far_behind_loses_nothing(connected):
    """More messages than there is room for: who is ahead reads its own first, then waits for the other."""
    first, second = connected(2)
    count = 3 * SLOTS
    gathered = []

    def all_of(engine):
        waits = [engine.all_gather(np.array([n, engine.rank])) for n in range(count)]
        gathered.append([wait() for wait in waits])

    ahead = threading.Thread(target=all_of, args=(first,))
    ahead.start()
    time.sleep(0.2)
    assert first.mailbox.number == SLOTS and ahead.is_alive()
    all_of(second)
    ahead.join(20)
    for found in gathered:
        assert [x.tolist() for x in found] == [[[n, 0], [n, 1]] for n in range(count)]


def test_a_rank_in_another_call_is_told(connected):
    first, second = connected(2)
    second.all_gather(np.zeros(3, np.uint8))
    with pytest.raises(RankLost, match="rank 1 sent 3 bytes where 8 were expected: it is in another call"):
        first.all_gather(np.zeros(1))()


def test_ranks_that_end_or_hang_are_not_waited_for(connected):
    first, second, third = connected(3, limit_s=0.5)
    start = time.monotonic()
    with pytest.raises(RankLost, match="waited 0.5 s for rank"):
        first.all_gather(np.zeros(1))()
    assert 0.4 < time.monotonic() - start < 5
    second.abandon()
    with pytest.raises(RankLost, match="rank 1 has ended"):
        third.all_gather(np.zeros(1))()


@pytest.mark.parametrize("why", ["hosts", "machine", "file"])
def test_ranks_that_share_no_memory_use_their_sockets(connected, monkeypatch, why):
    if why == "hosts":
        monkeypatch.setattr(mailbox, "hosts", lambda comm: comm.all_gather(np.array([comm.rank]))())
    elif why == "machine":
        monkeypatch.setattr(mailbox.platform, "machine", lambda: "aarch64")
    else:
        monkeypatch.setattr(mailbox.tempfile, "mkstemp", lambda **_: (_ for _ in ()).throw(OSError("no room")))
    engines = connected(3)
    assert [engine.mailbox for engine in engines] == [None] * 3
    waits = [engine.all_gather(np.array([engine.rank])) for engine in engines]
    assert all(wait().ravel().tolist() == [0, 1, 2] for wait in waits)
