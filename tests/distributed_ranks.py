"""What a process of a distributed test does: `mpiexec -n 3 python distributed_ranks.py operators`.

test_distributed_engines.py starts it, under mpiexec or with torchrun's environment variables, and reads what it prints.
"""

import os
import signal
import sys
import time
from functools import partial

import numpy as np
import pytest
from conftest import DOUBLE, PATIENCE, SINGLE
from reference import assert_close, same_bits
from test_distributed import LENGTHS, VARIANTS, Call, flat

from linattn_np import ContractError, distributed


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
    waits = [comm.all_gather(np.full(size, 10 * size + comm.rank)) for size in (1, 2, 3)]
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    if comm.rank % 2 == 0:
        comm.send(np.array([comm.rank]), after)
    comm.recv(own := np.empty(1, np.int64), before)
    if comm.rank % 2:
        comm.send(np.array([comm.rank]), after)
    assert own == before
    for size, wait in reversed(list(enumerate(waits, 1))):  # in any order
        assert (wait() == 10 * size + np.arange(comm.size)[:, None]).all()
    say(f"rank {comm.rank} of {comm.size}: {type(comm).__name__}")


def compute(comm, **more):
    call = Call("gla", np.random.default_rng(0), dtype=DOUBLE)
    return call.on_rank(LENGTHS[comm.size], False, comm, **more)


def differ(comm):
    try:
        compute(comm, scale=0.5 if comm.rank == 1 else 0.25)
    except distributed.Disagreement as error:
        say(f"rank {comm.rank}: {error}")
    compute(comm)  # the engine is as good as before


def killed(comm):
    compute(comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    lose_a_rank(comm)


def hangs(comm):
    compute(comm)
    if comm.rank == 1:
        time.sleep(2 * PATIENCE)
    if comm.rank == 0:
        comm.limit_s = 2
    lose_a_rank(comm)


def lose_a_rank(comm):
    """A call during which another rank ends or hangs; this one ends, too."""
    try:
        compute(comm)
    except distributed.RankLost as error:
        say(f"rank {comm.rank}: {error}")
        sys.exit(3)


def autograd(comm, device="cpu", dtype=DOUBLE):
    """torch's gradients of every rank's tokens, u's and the initial state's, against linattn_np.vjp of all of them."""
    import torch

    from linattn_np.interop import torch as interop

    call, tensor = Call("rwkv6", np.random.default_rng(0), dtype=dtype), partial(torch.tensor, device=device)
    start = sum(LENGTHS[comm.size][: comm.rank])
    tokens = slice(start, start + LENGTHS[comm.size][comm.rank])
    inputs = [tensor(x[:, :, tokens] if x.ndim == 4 else x, requires_grad=True) for x in call.arrays]
    state = tensor(call.state[0], requires_grad=True)
    do, dht = tensor(call.do[:, :, tokens]), tensor(call.dht[0])
    o, final = interop.rwkv6(*inputs, initial_state=state, output_final_state=True, comm=comm)
    found = torch.autograd.grad((o * do).sum() + (final * dht).sum(), [*inputs, state])
    _, wanted = call.exactly()
    for place, (x, y) in enumerate(zip(found, wanted, strict=True)):
        assert_close(f"gradient {place}", x.cpu().numpy(), y[:, :, tokens] if place < 4 else y, dtype, factor=10)
    with torch.no_grad():
        again = interop.rwkv6(*inputs, initial_state=state, comm=comm)
    assert torch.equal(o, again)
    plain = [x.detach() for x in (*inputs, state)]
    options = {"initial_state": plain[-1], "output_final_state": True, "comm": comm}
    results, pullback = distributed.vjp(distributed.rwkv6, *plain[:-1], **options)
    for x, y in zip((*results, *pullback(do, dht)), (o, final, *found), strict=True):
        assert torch.equal(x, y)
    with pytest.raises(ContractError, match="rwkv6: segment_size has no meaning without comm"):
        interop.rwkv6(*inputs, segment_size=16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'comm'"):
        interop.softmax_attention(*inputs[:3], comm=comm)
    say(f"autograd on rank {comm.rank}")


def autograd_on_cards(comm):
    autograd(comm, f"cuda:{comm.device.id}", SINGLE)


def strays(comm):
    """Rank 1 gathers something while the others make a call; all are told, and go on."""
    compute(comm)
    for size in (16, 32, 4000, 800_000):
        try:
            comm.all_gather(np.zeros(size, np.uint8))() if comm.rank == 1 else compute(comm)
        except distributed.Disagreement as error:
            say(f"rank {comm.rank}: {error}")
        comm.number = 1  # the same words again
    assert (comm.all_gather(np.array([comm.rank]))().ravel() == np.arange(comm.size)).all()


def receives(comm):
    """Rank 0 waits for a message, rank 1 makes a call."""
    compute(comm)
    if comm.rank == 0:
        comm.limit_s = 2
        while not comm.communicator.Iprobe(1):
            time.sleep(0.01)
    try:
        compute(comm) if comm.rank else comm.recv(np.zeros(4), 1)
    except distributed.RankLost as error:
        say(f"rank {comm.rank}: {error}")


if __name__ == "__main__":
    names = sys.argv[1:]
    functions = operators, messages, differ, strays, receives, killed, hangs, autograd, autograd_on_cards
    what = {function.__name__: function for function in functions}
    comm = distributed.connect("cuda" if "autograd_on_cards" in names else "cpu")
    for name in names:
        what[name](comm)
