"""Runs calls on CUDA tensors on torch's current stream and in memory of torch's allocator.

Therefore results can be freed or kept (`record_stream`) as any tensor, and memory that a graph of `torch.cuda.graph`
needs is in the graph's own pool.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import torch

from .calls import on_stream


@contextmanager
def as_torch(tensor):
    """A context in which CuPy uses torch's current stream of the tensor's device and torch's allocator."""
    if not tensor.is_cuda:
        yield
        return
    import cupy

    device = tensor.device
    stream = torch.cuda.current_stream(device).cuda_stream
    with on_stream(device.index, stream), cupy.cuda.using_allocator(partial(memory_of_torch, device)):
        yield


def memory_of_torch(device, size: int):
    """CuPy memory of `size` bytes, owned by a torch tensor, which `array_kinds.from_native` finds again."""
    import cupy

    memory = torch.empty(size, dtype=torch.uint8, device=device)
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(memory.data_ptr(), size, memory, device.index or 0), 0)
