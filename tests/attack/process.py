"""What happens beside a call: threads, interrupts, memory that is kept, streams."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from reference import same_bits

from attack.calls import Call, calls, given, home
from attack.harness import Refused, holds_for, require
from attack.operators import run
from linattn_np import ContractError, NotSupported
from linattn_np.models import State


# -- threads -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Together:
    """Calls that are made at once."""

    calls: tuple


def together(machine, count=4):
    return st.lists(calls(machine), min_size=2, max_size=count).map(lambda x: Together(tuple(x)))


@holds_for(together, machines=("numpy", "cupy"), round=20)
def host_threads(case, machine):
    """Four host threads that call at once get what each gets alone."""
    ready = [(call, *given(call, machine)) for call in case.calls]
    alone = [home(machine, call, run(machine, call, arrays, arguments)) for call, arrays, arguments in ready]
    start = threading.Barrier(4)

    def work(n):
        start.wait()
        call, arrays, arguments = ready[n % len(ready)]
        return [home(machine, call, run(machine, call, arrays, arguments)) for _ in range(3)]

    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(work, n) for n in range(4)]
    for n, future in enumerate(done):
        for again in future.result():
            same = all(same_bits(x, y) for x, y in zip(again, alone[n % len(alone)]))
            require(same, "threads: other bits than alone", case.calls[n % len(alone)].op)


@holds_for(lambda machine: together(machine, 2), machines=("cupy",), round=20)
def two_streams(case, machine):
    """Calls that are enqueued on two streams, one after the other without waiting, give what each gives alone."""
    cupy, ready = machine.cupy, [(call, *given(call, machine)) for call in case.calls[:2]]
    alone = [home(machine, call, run(machine, call, arrays, arguments)) for call, arrays, arguments in ready]
    cupy.cuda.Device().synchronize()
    streams, results = [cupy.cuda.Stream(non_blocking=True) for _ in ready], []
    for _ in range(3):
        for stream, (call, arrays, arguments) in zip(streams, ready):
            with stream:
                results.append(run(machine, call, arrays, arguments))
    for stream in streams:
        stream.synchronize()
    for n, result in enumerate(results):
        call = ready[n % 2][0]
        same = all(same_bits(x, y) for x, y in zip(home(machine, call, result), alone[n % 2]))
        require(same, "streams: other bits than alone", call.op)


# -- interrupts --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Interrupted:
    """A call of some size, and when Ctrl-C is pressed."""

    call: Call
    after: float = 0.001


def interrupted(machine):
    sizes = st.sampled_from(((4, 4, 600, 32, 32), (1, 8, 400, 64, 64), (2, 2, 1500, 16, 64)))
    large = st.builds(
        lambda call, sizes: Call(
            call.op,
            call.mode,
            call.dtype if call.dtype != "bfloat16" else "float32",
            *(sizes if call.mode != "parallel" else (2, 4, 300, 16, 16)),
            seed=call.seed,
            gate="logsigmoid",
        ),
        calls(machine, plants=False, edges=False),
        sizes,
    )
    return st.builds(Interrupted, large, st.floats(0.0002, 0.02))


@holds_for(interrupted, machines=("numpy",), round=5)
def interrupts(case, machine):
    """After a KeyboardInterrupt nothing writes into `out` any more, and the next call is as ever."""
    call = case.call
    arrays, arguments = given(call, machine)
    out = np.zeros(call.shape("B H T V"), call.dtype)
    timer = threading.Timer(case.after, _thread.interrupt_main)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs are without
    broken = True
    try:
        timer.start()
        run(machine, call, arrays, arguments | {"out": out})
        broken = False
        timer.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        pass
    timer.join()
    if not broken:
        raise Refused  # too late to interrupt anything
    before = out.copy()
    time.sleep(0.03)
    require(same_bits(out, before), "interrupts: a dead call writes into out", call.op)
    wanted = run(machine, call, arrays, arguments)
    run(machine, call, arrays, arguments | {"out": out})
    require(same_bits(out, np.ascontiguousarray(wanted)), "interrupts: the next call is wrong", call.op)


# -- memory ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Kept:
    """A call made again and again with another of its arguments."""

    op: str = "gla"
    argument: str = "cu_seqlens"
    gradient: bool = False


def held(machine) -> int:
    """Bytes of memory that the process has, a card's among them."""
    there = machine.cupy.get_default_memory_pool().used_bytes() if hasattr(machine, "cupy") else 0
    with open("/proc/self/statm") as file:
        return there + int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


KEPT = st.builds(
    Kept,
    st.sampled_from(("gla", "rwkv6", "simple_gla", "retention", "linear_attention", "softmax_attention")),
    st.sampled_from(("cu_seqlens", "chunk_size", "gamma", "scale")),
)


@holds_for(lambda machine: KEPT, machines=("numpy", "cupy"), round=3, memory=1 << 30)
def memory_that_is_kept(case, machine):
    """Calls that differ in one argument leave no more than a bounded cache behind."""
    T, count = (2, 100) if case.argument == "cu_seqlens" else (64, 30)
    call = Call(case.op, "chunk", H=1, T=T)
    if case.argument not in call.takes:
        raise Refused
    arrays, arguments = given(call, machine)
    values = {
        "cu_seqlens": lambda n: np.repeat([0, 1, 2], [1 + n, 100_000 - n, 1]),
        "chunk_size": lambda n: 128 * (n + 1),
        "gamma": lambda n: n / 100,
        "scale": lambda n: n / 100,
    }
    gc.collect()
    before = held(machine)
    for n in range(count):
        try:
            run(machine, call, arrays, arguments | {case.argument: values[case.argument](n)})
        except ContractError as error:
            raise Refused from error
        if held(machine) - before > 256 << 20:
            break
    gc.collect()
    grown = (held(machine) - before) >> 20
    require(grown <= 100, f"memory: {case.argument} is kept", f"{grown} MB after {n + 1} calls of {case.op}")


@dataclass(frozen=True)
class LargeChunk:
    """A short call in chunks that are larger than it."""

    call: Call
    chunk_size: int = 1 << 20


@holds_for(
    lambda machine: st.builds(
        LargeChunk,
        calls(machine, plants=False).filter(
            lambda call: (
                "chunk_size" in call.takes and (call.mode in ("chunk", "staged") or call.op == "softmax_attention")
            )
        ),
        st.sampled_from((1 << 9, 1 << 11, 1 << 12, 1 << 31, 1 << 62, 1 << 70)),
    ),
    machines=("numpy", "cupy"),
    memory=192 << 20,
    seconds=2.0,
)
def large_chunks(case, machine):
    """A chunk takes no more time and memory than the tokens that there are; or it is refused."""
    arrays, arguments = given(case.call, machine)
    arguments["mode"] = "chunk"
    try:
        run(machine, case.call, arrays, arguments | {"chunk_size": case.chunk_size})
    except (ContractError, NotSupported) as error:
        raise Refused from error


# -- saving ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Saving:
    """States that are saved to one path at once."""

    writers: int = 2
    rows: int = 50


@holds_for(
    lambda machine: st.builds(Saving, st.integers(2, 4), st.sampled_from((1, 50, 400))), machines=("numpy",), round=3
)
def saving(case, machine):
    """Whoever reads gets one whole state; nothing else is in the folder in the end, and a user's own file stays."""
    rng = np.random.default_rng(0)
    states = [
        State(*(rng.standard_normal((2, case.rows, *axes), dtype=np.float32) for axes in ((8,), (2, 4, 4), (8,))))
        for _ in range(case.writers)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.npz"
        (Path(folder) / "state.npz.part").write_text("a user's own")
        states[0].save(path)
        with ThreadPoolExecutor(case.writers) as pool:
            done = [pool.submit(lambda state=state: [state.save(path) for _ in range(6)]) for state in states]
            while not all(future.done() for future in done):
                found = State.load(path)
                require(
                    any(
                        same_bits(found.wkv, state.wkv) and same_bits(found.att_shift, state.att_shift)
                        for state in states
                    ),
                    "saving: a mixture is read",
                )
        for future in done:
            future.result()
        left = sorted(os.listdir(folder))
        require(left == ["state.npz", "state.npz.part"], "saving: other files are left or lost", str(left))
        require((Path(folder) / "state.npz.part").read_text() == "a user's own", "saving: a user's file is written")
