"""Calls on CUDA tensors as torch's own are: on its current stream, and in memory of its allocator.

So a result may be dropped or held (`record_stream`) as any tensor may, and what a graph of `torch.cuda.graph` needs is
in the graph's own pool.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import torch

from .calls import on_stream


@contextmanager
def as_torch(tensor):
    """CuPy enqueues its work on torch's current stream of a tensor's device, and takes its memory from torch."""
    if not tensor.is_cuda:
        yield
        return
    import cupy

    device = tensor.device
    stream = torch.cuda.current_stream(device).cuda_stream
    with on_stream(device.index, stream), cupy.cuda.using_allocator(partial(lent, device)):
        yield


def lent(device, size: int):
    """Memory of torch's for CuPy; `array_kinds.from_native` knows the tensor that owns it."""
    import cupy

    memory = torch.empty(size, dtype=torch.uint8, device=device)
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(memory.data_ptr(), size, memory, device.index or 0), 0)
