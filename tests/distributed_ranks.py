"""What a process of a distributed test does: `mpiexec -n 3 python distributed_ranks.py operators`.

test_distributed.py starts it, under mpiexec or with torchrun's environment variables, and reads what it prints.
"""

import os
import signal
import sys
import time
from functools import partial

import numpy as np
from conftest import DOUBLE, SINGLE
from reference import same_bits
from test_distributed import LENGTHS, VARIANTS, Call, flat

from linattn_np import distributed


def say(*words):
    print(*words, flush=True)


def operators(comm):
    """Every operator, dense and packed, has the bits of ranks that are threads, and those are right."""
    lengths = LENGTHS[comm.size]
    for variant in VARIANTS:
        for packed in (False, True):
            call = Call(variant, np.random.default_rng(0), packed=packed, dtype=SINGLE)
            own = flat(call.on_rank(lengths, True, comm))
            if comm.rank:
                for x in own:
                    comm.send(np.ascontiguousarray(x), 0)
                continue
            wanted = distributed.run_threads(partial(call.on_rank, lengths, True), comm.size)
            for rank, found in enumerate(wanted):
                for place, x in enumerate(flat(found)):
                    y = np.empty_like(x, order="C")
                    if rank:
                        comm.recv(y, rank)
                    assert same_bits(x, y if rank else own[place])
            call.compare(call.whole(wanted), call.exactly(), SINGLE)
            say(variant, "packed" if packed else "dense")


def messages(comm):
    """send, recv and all_gather, of every dtype, larger than a socket's buffer, and of nothing."""
    for dtype in (np.uint8, np.float16, np.float32, np.float64):
        for size in (0, 1, 1_000_000):
            x = np.full((2, size), comm.rank, dtype)
            wait = comm.all_gather(x)
            assert (wait() == np.arange(comm.size, dtype=dtype)[:, None, None]).all()
            after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            y = np.empty_like(x)
            if comm.rank % 2:
                comm.recv(y, before)
            comm.send(x, after)
            if comm.rank % 2 == 0:
                comm.recv(y, before)
            assert (y == before).all()
    say(f"rank {comm.rank} of {comm.size}: {type(comm).__name__}")


def compute(comm, **more):
    call = Call("gla", np.random.default_rng(0), dtype=DOUBLE)
    return call.on_rank(LENGTHS[comm.size], False, comm, **more)


def differ(comm):
    try:
        compute(comm, scale=0.5 if comm.rank == 1 else 0.25)
    except distributed.Disagreement as error:
        say(f"rank {comm.rank}: {error}")
    compute(comm)                               # the engine is as good as before


def killed(comm):
    compute(comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        compute(comm)
    except distributed.RankLost as error:
        say(f"rank {comm.rank}: {error}")
        sys.exit(3)


def hangs(comm):
    compute(comm)
    if comm.rank == 1:
        time.sleep(60)
    try:
        compute(comm)
    except distributed.RankLost as error:
        say(f"rank {comm.rank}: {error}")
        sys.exit(3)


if __name__ == "__main__":
    what = {function.__name__: function for function in (operators, messages, differ, killed, hangs)}
    engine = distributed.connect(limit_s=2 if sys.argv[1] == "hangs" else 60)
    for name in sys.argv[1:]:
        what[name](engine)
