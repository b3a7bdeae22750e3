"""Tokens in chunks: [B, H, T, D] of any strides <-> [B, H, n, C, D], short chunks padded with zeros."""

import math
import threading
from functools import cached_property

import numpy as np


class Segment:
    """A run of the chunk table's rows; chunks do not cross sequences."""

    def __init__(self, table, chunk):
        self.count, self.chunk = len(table), chunk
        self.starts, self.stops = table[:, 0], table[:, 1]

    @cached_property
    def runs(self):
        """[(packed row, first token, token after the last)]: as few slices as the sequences allow."""
        if not self.count:
            return []
        breaks = np.flatnonzero(np.diff(self.starts) != self.chunk) + 1
        first, last = np.concatenate([[0], breaks]), np.concatenate([breaks, [self.count]]) - 1
        return list(zip((first * self.chunk).tolist(), self.starts[first].tolist(), self.stops[last].tolist()))

    @cached_property
    def whole(self):
        """The tokens as one slice of full chunks, so that packing is a view, or None: chunks leave no token out."""
        if self.count and self.stops[-1] - self.starts[0] == self.count * self.chunk:
            return slice(int(self.starts[0]), int(self.stops[-1]))

    def view(self, x, dtype):
        """x [B, H, T, D] as [B, H, n, C, D], or None where tokens would have to move or be cast."""
        if self.whole and x.dtype == dtype:
            return x[:, :, self.whole].reshape(*x.shape[:2], self.count, self.chunk, x.shape[-1])

    def pack(self, x, dtype):
        """[B, H, n, C, D] in `dtype`, a view of x where that can be."""
        packed = self.view(x, dtype)
        if packed is None:
            packed = np.empty((*x.shape[:2], self.count, self.chunk, x.shape[-1]), dtype)
            for chunks, rows, tokens in self.slices:
                packed[:, :, chunks, rows] = x[:, :, tokens].reshape(packed[:, :, chunks, rows].shape)
            for chunk, filled in self.short:
                packed[:, :, chunk, filled:] = 0
        return packed

    def unpack_into(self, out, packed):
        """Writes the real tokens of [B, H, n, C, D] to their places in out [B, H, T, D]."""
        for chunks, rows, tokens in self.slices:
            out[:, :, tokens] = packed[:, :, chunks, rows].reshape(out[:, :, tokens].shape)

    @cached_property
    def slices(self):
        """[(chunks, rows within them, tokens)]: full chunks side by side in one slice, a short one on its own."""
        C, found = self.chunk, []
        for at, start, stop in self.runs:
            full, c = (stop - start) // C, at // C
            whole = start + full * C
            if full:
                found.append((slice(c, c + full), slice(0, C), slice(start, whole)))
            if whole < stop:
                found.append((slice(c + full, c + full + 1), slice(0, stop - whole), slice(whole, stop)))
        return found

    @cached_property
    def short(self):
        """[(chunk, tokens in it)] of the chunks that need padding."""
        lengths = self.stops - self.starts
        short = np.flatnonzero(lengths < self.chunk)
        return list(zip(short.tolist(), lengths[short].tolist()))


def row_blocks(B, H, rows):
    """Slices of batch and heads that hold about `rows` rows each: whole batch entries, or heads of one."""
    if rows >= H:
        step = max(1, rows // max(H, 1))
        return [(slice(b, min(b + step, B)), slice(0, H)) for b in range(0, B, step)]
    return [(slice(b, b + 1), slice(h, min(h + rows, H))) for b in range(B) for h in range(0, H, rows)]


class Scratch:
    """Arrays that a task uses again for every segment: fresh pages cost as much as the arithmetic on them."""

    def __init__(self, dtype, most=math.inf):
        self.dtype, self.most, self.buffers, self.parts = dtype, most, {}, {}

    def __call__(self, name, shape):
        size = math.prod(shape)
        if size * self.dtype.itemsize > self.most:
            return np.empty(shape, self.dtype)
        if name not in self.buffers or self.buffers[name].size < size:
            self.buffers[name] = np.empty(size, self.dtype)
        return self.buffers[name][:size].reshape(shape)

    def part(self, name):
        """Memory of its own."""
        return self.parts.setdefault(name, Scratch(self.dtype, self.most))

    def product(self, name, x, y):
        """x @ y."""
        return np.matmul(x, y, out=self(name, (*y.shape[:-2], x.shape[-2], y.shape[-1])))


KEPT_BYTES = 1 << 24  # of one array between calls: more than a segment has
of_thread = threading.local()


def thread_scratch(dtype):
    """The calling thread's own, kept from call to call; larger arrays are not kept."""
    return vars(of_thread).setdefault(dtype.char, Scratch(dtype, KEPT_BYTES))
