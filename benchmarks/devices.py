"""The device that a benchmark runs on, and its clocks: CuPy on a GPU, NumPy where there is none."""

import json
import statistics
import subprocess
import sys
import time
import tracemalloc

import numpy as np


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


class Gpu:
    HOLD = r"""extern "C" __global__ void hold(long long nanoseconds) {
        long long start, now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
        do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
    }"""

    def __init__(self):
        import cupy

        self.xp, self.host = cupy, cupy.asnumpy
        self.hold = cupy.RawKernel(self.HOLD, "hold")

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

    def device_ms(self, calls, samples):
        """Milliseconds of a call on the device, which waits until the host has enqueued them all."""

        def enqueue():
            begun = time.perf_counter()
            for call in calls:
                call()
            return time.perf_counter() - begun

        enqueue()
        self.wait()
        held = int(1.5e9 * enqueue()) + 100_000
        times = []
        for _ in range(samples):
            self.wait()
            start, stop = self.xp.cuda.Event(), self.xp.cuda.Event()
            self.hold((1,), (1,), (held,))
            start.record()
            enqueue()
            stop.record()
            stop.synchronize()
            times.append(self.xp.cuda.get_elapsed_time(start, stop) / len(calls))
        return statistics.median(times)

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

    def with_peak(self, call):
        """(what the call returns, bytes that it took from the device)."""
        pool = self.xp.cuda.MemoryPool()
        with self.xp.cuda.using_allocator(pool.malloc):
            return call(), pool.total_bytes()

    def free(self):
        self.xp.get_default_memory_pool().free_all_blocks()
        if torch := sys.modules.get("torch"):
            torch.cuda.empty_cache()

    def finite(self, o):
        return bool(self.xp.isfinite(o.astype(np.float32)).all())


class Cpu:
    xp, host = np, staticmethod(np.asarray)

    def meta(self):
        from rwkv6_cpu import cpu

        return {"card": cpu(), "driver": None, "cuda": None}

    def wait(self):
        pass

    def device_ms(self, calls, samples):
        return wall_ms(self, calls, samples)

    def captured(self, calls):
        return lambda: [call() for call in calls]

    def with_peak(self, call):
        tracemalloc.start()
        result = call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result, peak

    def free(self):
        pass

    def finite(self, o):
        return bool(np.isfinite(o).all())


def wall_ms(device, calls, samples):
    """Milliseconds of a call on the host's clock, when calls follow one another and the last is waited for."""
    times = []
    for _ in range(samples):
        device.wait()
        start = time.perf_counter()
        for call in calls:
            call()
        device.wait()
        times.append((time.perf_counter() - start) / len(calls) * 1e3)
    return statistics.median(times)
