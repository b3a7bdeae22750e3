"""The device that a benchmark runs on, and its clocks: CuPy on a GPU, NumPy where there is none.

A card that works at its limit of power lowers its clock, by a third if need be, and for a while after. So a sample is
a hundredth of a second at most, and begins when the clock is back at the highest that was seen, or after 0.3 s. What
the clock is as a sample ends is measured with it.
"""

import json
import statistics
import subprocess
import sys
import time
from itertools import cycle, islice

import numpy as np

from linattn_np.command import measuring

LONGEST_S = 0.01  # of a sample, if it is not a single call
REST_S, RESTS = 0.01, 30  # before a sample, and so often at most
WAKING = (
    1_000_000  # nanoseconds more for which the card is held before a sample: after a rest the host is slow at first
)
AS_HIGH = 0.995  # of the highest clock: NVIDIA's go by steps of 15 MHz


def current():
    try:
        import cupy
    except ImportError:
        return Cpu()
    return Gpu() if cupy.cuda.is_available() else Cpu()


def store(path, row, case):
    """Puts a row into a JSON file of {"meta", "rows"}, in the place of one with the same values of the keys `case`."""
    found = json.loads(path.read_text()) if path.exists() else {"meta": current().meta(), "rows": []}
    same = [old for old in found["rows"] if all(old.get(key) == row[key] for key in case)]
    found["rows"] = [old for old in found["rows"] if old not in same] + [row]
    path.write_text(json.dumps(found, indent=1) + "\n")


class Gpu(measuring.Cuda):
    HOLD = r"""extern "C" __global__ void hold(long long nanoseconds, double* mhz) {
        long long start, now, cycles = clock64();
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
        do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
        *mhz = 1e3 * (clock64() - cycles) / (now - start);
    }"""
    COUNTED = 400_000  # nanoseconds in which cycles are counted: some cards' timer goes by microseconds

    def __init__(self):
        super().__init__()
        self.host = self.xp.asnumpy
        self.kernel, self.mhz = self.xp.RawKernel(self.HOLD, "hold"), self.xp.empty(1)
        self.highest = self.last = 0.0

    def meta(self):
        runtime = self.xp.cuda.runtime
        version = runtime.runtimeGetVersion()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        return {
            "card": runtime.getDeviceProperties(0)["name"].decode(),
            "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
            "cuda": f"{version // 1000}.{version % 1000 // 10}",
        }

    def wait(self):
        self.xp.cuda.Device().synchronize()

    def hold(self, nanoseconds):
        """Has the device wait, and count its clock."""
        self.kernel((1,), (1,), (nanoseconds, self.mhz))

    def clock(self) -> float:
        """MHz of the multiprocessors during the last `hold`."""
        return float(self.mhz.get()[0])

    def rest(self, first=lambda: None):
        """Until the clock is back; then `first`, which wakes what slept."""
        self.wait()
        for _ in range(RESTS):
            time.sleep(REST_S)
            self.hold(self.COUNTED)
            before, self.last = self.last, self.clock()
            self.highest = max(self.highest, min(before, self.last))  # a count may be off
            if self.last > AS_HIGH * self.highest:
                break
        first()
        self.wait()

    def device_ms(self, calls, samples):
        """(milliseconds of a call on the device, which waits until the host has enqueued a sample; the clock in MHz as
        it ends)."""
        turns = Turns(self, calls)
        return medians(lambda: self.sample(turns), samples)

    def sample(self, turns):
        ms, mhz = self.ms_and_clock(turns.go, int(1.5e9 * turns.enqueued_s) + WAKING)
        return ms / turns.count, mhz

    def ms_and_clock(self, call, held=0):
        """(milliseconds of a call, the clock in MHz right after it). The device waits so many nanoseconds before, in
        which the host enqueues the call."""
        self.rest()
        if held:
            self.hold(held)
        start, stop = self.enqueued(call)
        self.hold(self.COUNTED)
        stop.synchronize()
        return self.xp.cuda.get_elapsed_time(start, stop), self.clock()

    def captured(self, calls):
        """One call that does them all: a CUDA graph."""
        for call in calls:
            call()
        stream = self.xp.cuda.Stream(non_blocking=True)
        self.wait()
        with stream:
            stream.begin_capture()
            for call in calls:
                call()
            return stream.end_capture().launch

    def free(self):
        self.xp.get_default_memory_pool().free_all_blocks()
        if torch := sys.modules.get("torch"):
            torch.cuda.empty_cache()

    def finite(self, o):
        return bool(self.xp.isfinite(o.astype(np.float32)).all())


class Cpu(measuring.Cpu):
    host, highest = staticmethod(np.asarray), None

    def meta(self):
        return {"card": self.name, "driver": None, "cuda": None}

    def wait(self):
        pass

    def rest(self, first=None):
        pass

    def device_ms(self, calls, samples):
        return wall_ms(self, calls, samples), None

    def captured(self, calls):
        return lambda: [call() for call in calls]

    def free(self):
        pass

    def finite(self, o):
        return bool(np.isfinite(o).all())


class Turns:
    """Calls that take turns, as many a sample as take LONGEST_S."""

    def __init__(self, device, calls):
        self.calls, self.count = cycle(calls), len(calls)
        self.go()
        device.wait()
        begun = time.perf_counter()
        self.go()
        enqueued = time.perf_counter()
        device.wait()
        taken_s = time.perf_counter() - begun
        self.count = max(1, min(len(calls), int(LONGEST_S / taken_s * len(calls))))
        self.enqueued_s = (enqueued - begun) / len(calls) * self.count

    def go(self):
        for call in islice(self.calls, self.count):
            call()

    def one(self):
        next(self.calls)()


def wall_ms(device, calls, samples):
    """Milliseconds of a call on the host's clock, when calls follow one another and the last is waited for."""
    turns = Turns(device, calls)

    def sample():
        device.rest(turns.one)
        start = time.perf_counter()
        turns.go()
        device.wait()
        return ((time.perf_counter() - start) / turns.count * 1e3,)

    return medians(sample, samples)[0]


def medians(sample, count) -> list[float]:
    """Of each of the numbers that a sample has."""
    return [statistics.median(numbers) for numbers in zip(*(sample() for _ in range(count)))]
