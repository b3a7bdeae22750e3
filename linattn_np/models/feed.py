"""What a training's step on a device takes from the host."""

from __future__ import annotations

import numpy as np

AHEAD = 2  # steps that the host may be before the device


class Feed:
    """Tokens [batch, length], two seeds and four numbers of the schedule, on the current CUDA device.

    They go there in one copy, out of memory that the device reads by itself: the host need not wait for a step's end.
    """

    def __init__(self, batch, length):
        import cupy

        count = batch * length
        self.device = cupy.zeros(count + 4, np.int64)
        self.tokens, self.seeds = self.device[:count].reshape(batch, length), self.device[count : count + 2]
        self.schedule = self.device[count + 2 :].view(np.float32)
        self.hosts = [
            np.frombuffer(cupy.cuda.alloc_pinned_memory(self.device.nbytes), np.int64, count + 4) for _ in range(AHEAD)
        ]
        self.copied = [cupy.cuda.Event(block=True, disable_timing=True) for _ in range(AHEAD)]
        self.next = 0

    def __call__(self, tokens, seeds, schedule):
        host, copied = self.hosts[self.next], self.copied[self.next]
        copied.synchronize()
        host[: tokens.size], host[tokens.size :][:2] = tokens.reshape(-1), seeds
        host[tokens.size + 2 :].view(np.float32)[...] = schedule
        self.device.data.copy_from_host_async(host.ctypes.data, host.nbytes)
        copied.record()
        self.next = (self.next + 1) % AHEAD
