"""Ctrl-C, or a task that fails, ends a call: no thread of its goes on to write into the caller's arrays."""

import _thread
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from conftest import PATIENCE

from linattn_np import dispatch, distributed
from linattn_np.backends.numpy import cores
from linattn_np.models import helper_threads, locks, training_steps
from linattn_np.models.training import VECTORS, Settings, Training

MANY = 10_000  # tasks that take many minutes together
pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system has no signals for threads")


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.setattr(cores, "workers", lambda: 3)
    cores.pool.cache_clear()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    yield
    signal.signal(signal.SIGINT, before)
    cores.pool().shutdown()
    cores.pool.cache_clear()


def wake_main_thread():
    """Ctrl-C, which ends a wait of the main thread."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


# As if Ctrl-C came when the main thread is about to wait: the handler runs when the wait has ended.
let_main_thread_wait = _thread.interrupt_main


class Tasks:
    """Slow ones, counted: begun and done. Those of other threads than the main one end once all keys are pressed: a
    key pressed later would end the test itself.
    """

    def __init__(self, pause=0.15):
        self.begun, self.done, self.pause = [], [], pause
        self.some, self.pressed = threading.Event(), threading.Event()

    def __call__(self, n):
        self.begun.append(n)
        if len(self.begun) == 3:
            self.some.set()
        if threading.current_thread() is threading.main_thread():
            for _ in range(50):  # Python code, which an interrupt can stop
                time.sleep(self.pause / 50)
        else:
            time.sleep(self.pause)
            self.pressed.wait(PATIENCE)
            self.done.append(n)


@pytest.mark.parametrize("press_once", [wake_main_thread, let_main_thread_wait])
@pytest.mark.parametrize("presses", [1, 3])
@pytest.mark.parametrize("caller", [False, True])
def test_ctrl_c_waits_for_those_at_work(caller, presses, press_once):
    tasks = Tasks()

    def press():
        tasks.some.wait(PATIENCE)
        for _ in range(presses):
            time.sleep(0.03)
            press_once()
        tasks.pressed.set()

    finger = threading.Thread(target=press)
    finger.start()
    with pytest.raises(KeyboardInterrupt):
        cores.in_parallel(tasks, range(MANY), caller=caller)
    begun, done = list(tasks.begun), list(tasks.done)
    assert len(done) >= len(begun) - caller and len(begun) < MANY  # the main thread's own task was cut short
    finger.join()
    time.sleep(2 * tasks.pause)
    assert tasks.begun == begun and tasks.done == done
    assert cores.in_parallel(lambda n: n * n, range(5), caller=caller) == [0, 1, 4, 9, 16]


@pytest.mark.parametrize("caller", [False, True])
def test_a_task_that_fails_waits_for_the_others(caller):
    done = []

    def task(n):
        if n == 1:
            raise ZeroDivisionError
        time.sleep(0.1)
        done.append(n)

    with pytest.raises(ZeroDivisionError):
        cores.in_parallel(task, range(MANY), caller=caller)
    kept = list(done)
    time.sleep(0.25)
    assert done == kept and len(done) < MANY - 1


def test_out_is_nobodys_after_ctrl_c():
    """What a call that is dead leaves behind is not written over what comes later."""
    program = """
import signal, threading, time, numpy as np
from linattn_np import gla
from linattn_np.backends.numpy import cores
signal.signal(signal.SIGINT, signal.default_int_handler)
cores.workers = lambda: 3
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 20_000, 32), dtype=np.float32)
g, out = -np.abs(q), np.empty_like(v)
for pause in (0.005, 0.02, 0.05, 0.1):
    finger = threading.Timer(pause, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    try:
        finger.start()
        while True:
            gla(q, k, v, g, out=out)
    except KeyboardInterrupt:
        out[...] = 7.0
    time.sleep(0.2)
    assert (out == 7.0).all(), pause
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)


def test_ctrl_c_leaves_no_lock_taken():
    """It may come at any line of Python; then other threads would wait for ever."""

    class Counter:
        count = 0

        def __init__(self):
            self.lock = locks.Lock()

        @locks.one_at_a_time
        def __call__(self):
            self.count += 1

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for n in range(100):
            counter = Counter()
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (n + 1))
                while True:
                    counter()
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(counter.lock.acquire, blocking=False).result()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_ctrl_c_stops_the_helpers_of_a_model(monkeypatch):
    """Helpers that were woken, and not told to stop, would look at their board for ever."""
    pytest.importorskip("numba")
    board, woken = helper_threads.Board(), []

    def wake(array, wanted):
        woken.append(array[board.loops.STOPPED])
        raise KeyboardInterrupt

    monkeypatch.setattr(board, "most", 2)
    monkeypatch.setattr(helper_threads.HELPERS, "wake", wake)
    with pytest.raises(KeyboardInterrupt), board.helped(1 << 30):
        pass
    assert woken == [0] and board.array[board.loops.STOPPED] == 1 and not board.busy


def test_ctrl_c_ends_the_ranks_of_run_threads():
    """They went on in the background, and wrote into the caller's arrays."""
    under_way, ranks = threading.Event(), []

    def on_rank(comm):
        ranks.append(threading.current_thread())
        while True:
            comm.all_gather(np.array([1]))()
            under_way.set()

    def press():
        under_way.wait(PATIENCE)
        let_main_thread_wait()

    finger = threading.Thread(target=press)
    finger.start()
    with pytest.raises(KeyboardInterrupt):
        distributed.run_threads(on_rank, 2)
    finger.join()
    for rank in ranks:
        rank.join(PATIENCE)
    assert len(ranks) == 2 and not any(rank.is_alive() for rank in ranks)


def test_ctrl_c_leaves_a_training_between_two_steps(monkeypatch):
    """Its matrices had decayed already, and decayed again in the step that was made anew."""
    settings = Settings(layers=1, width=16, head_size=8, batch=2, context=20, steps=3)
    one, whole = (Training(b"It is a truth universally acknowledged, " * 20, settings) for _ in range(2))

    def interrupted(*arguments):
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(training_steps, "adam", interrupted)
            one.step()
        one.step()
        whole.step()
    for name in VECTORS:
        assert (getattr(one.steps, name) == getattr(whole.steps, name)).all()


def test_no_thread_is_started_where_an_interrupt_can_find_it():
    """One that is interrupted while it is started is never told to end, and the process waits for it for ever."""
    started = set(cores.pool()._threads)
    cores.in_parallel(abs, range(100))
    assert len(started) == cores.workers() and set(cores.pool()._threads) == started


@pytest.mark.parametrize("name", ["numpy", "cupy", "numba"])
def test_a_signal_waits_for_an_import(monkeypatch, name):
    """One that came while SciPy or Numba was imported was dropped by their extension modules."""

    def import_module(name):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.01)
            return name

    monkeypatch.setattr(dispatch, "import_module", import_module)
    dispatch.backend_module.cache_clear()
    with pytest.raises(KeyboardInterrupt):
        dispatch.backend_module(name)
    dispatch.backend_module.cache_clear()


@pytest.mark.parametrize(
    "work, imported",
    [
        ("from linattn_np.backends.numpy import loop_choice; loop_choice.module()", "numba"),
        ("from linattn_np.backends.numpy import loop_choice; loop_choice.module()", "numba.extending"),
        ("from linattn_np.models import matrices; matrices.loops()", "numba"),
        ("from linattn_np.models import matrices; matrices.loops()", "numba.extending"),
        ("from linattn_np.command import first_loops; first_loops.before_compiling(abs).__enter__()", "numba"),
        ("from linattn_np.models import RWKV6, austen; RWKV6.from_file(austen())", "numba.extending"),
    ],
)
def test_a_signal_waits_for_the_import_of_numba_and_loops(work, imported):
    """A module of loops imports numba.extending when Numba is there, and then makes loops by LLVM."""
    pytest.importorskip("numba")
    program = f"""
import builtins, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
real, met = builtins.__import__, []
def dropped(*arguments, **named):
    if arguments[0] == "{imported}" and arguments[1]["__name__"].startswith("linattn_np") and not met:
        met.append(1)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise SystemExit("the signal did not wait")
    return real(*arguments, **named)
builtins.__import__ = dropped
try:
    {work}
except KeyboardInterrupt:
    raise SystemExit(0)
raise SystemExit("the signal was dropped")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)


def test_a_signal_waits_for_a_loop(monkeypatch):
    """One that came while LLVM's lock was taken left it so, and another thread's loop waited for ever."""
    numba_cache = pytest.importorskip("linattn_np.numba_cache")
    loaded, handler = [], signal.getsignal(signal.SIGINT)

    class Interrupted(numba_cache.NoCache):
        def load_overload(self, signature, context):
            signal.raise_signal(signal.SIGINT)
            loaded.append(signature)

    monkeypatch.setattr(numba_cache, "cache_of", lambda function: Interrupted())
    loop = numba_cache.njit()(lambda x: x + 1)
    with pytest.raises(KeyboardInterrupt):
        loop(1)
    assert len(loaded) == len(loop.signatures) == 1 and loop(1) == 2
    assert signal.getsignal(signal.SIGINT) is handler
