"""Packing: tokens [B, H, T, D] of any strides as n chunks [B, H, n, C, D] of C tokens each, and back. Chunks with fewer
tokens are padded with zeros."""

import math
import threading
from functools import cached_property

import numpy as np

from .casts import assign


class Segment:
    """Neighbouring chunks, given by rows of a table [n, 2] of first tokens and last tokens + 1. A chunk has tokens of
    one sequence only. `chunk` is C."""

    def __init__(self, table, chunk):
        self.count, self.chunk = len(table), chunk
        self.starts, self.stops = table[:, 0], table[:, 1]

    @cached_property
    def runs(self):
        """[(row in n * C, first token, last token + 1)] of the longest runs of tokens that are neighbours both in the
        packed array and in the original one."""
        if not self.count:
            return []
        breaks = np.flatnonzero(np.diff(self.starts) != self.chunk) + 1
        first, last = np.concatenate([[0], breaks]), np.concatenate([breaks, [self.count]]) - 1
        return list(zip((first * self.chunk).tolist(), self.starts[first].tolist(), self.stops[last].tolist()))

    @cached_property
    def whole(self):
        """If all chunks are full and neighbours, their tokens as a slice; then packing is a view. Else None."""
        if self.count and self.stops[-1] - self.starts[0] == self.count * self.chunk:
            return slice(int(self.starts[0]), int(self.stops[-1]))

    def view(self, x, dtype):
        """A view [B, H, n, C, D] of x [B, H, T, D] in `dtype`; None if that takes a copy."""
        if self.whole and x.dtype == dtype:
            return x[:, :, self.whole].reshape(*x.shape[:2], self.count, self.chunk, x.shape[-1])

    def pack(self, x, dtype):
        """x [B, H, T, D] packed as [B, H, n, C, D] in `dtype`: a view of x if possible, else a copy."""
        packed = self.view(x, dtype)
        if packed is None:
            packed = np.empty((*x.shape[:2], self.count, self.chunk, x.shape[-1]), dtype)
            for chunks, rows, tokens in self.slices:
                to = packed[:, :, chunks, rows]
                assign(to, x[:, :, tokens].reshape(to.shape))
            for chunk, filled in self.short:
                packed[:, :, chunk, filled:] = 0
        return packed

    def unpack_into(self, out, packed):
        """Writes the tokens of packed [B, H, n, C, D], without padding, to out [B, H, T, D]."""
        for chunks, rows, tokens in self.slices:
            assign(out[:, :, tokens], packed[:, :, chunks, rows].reshape(out[:, :, tokens].shape))

    @cached_property
    def slices(self):
        """[(slice of chunks, slice of their rows, slice of tokens)]: one entry for each series of full chunks, and one
        for each short chunk."""
        C, slices = self.chunk, []
        for row, start, stop in self.runs:
            full, c = (stop - start) // C, row // C
            end_of_full = start + full * C
            if full:
                slices.append((slice(c, c + full), slice(0, C), slice(start, end_of_full)))
            if end_of_full < stop:
                slices.append((slice(c + full, c + full + 1), slice(0, stop - end_of_full), slice(end_of_full, stop)))
        return slices

    @cached_property
    def short(self):
        """[(number of a chunk, its tokens)] for the chunks that are padded."""
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
    """Arrays that a task reuses for every segment: the operating system would take as long to provide new memory as the
    arithmetic takes.

    most : larger arrays, in bytes, are allocated anew each time
    """

    def __init__(self, dtype, most=math.inf):
        self.dtype, self.most, self.buffers, self.parts = dtype, most, {}, {}

    def __call__(self, name, shape):
        """An array of this shape, whose numbers are undefined, in the memory called `name`: earlier arrays of this name
        lose theirs."""
        size = math.prod(shape)
        if size * self.dtype.itemsize > self.most:
            return np.empty(shape, self.dtype)
        if name not in self.buffers or self.buffers[name].size < size:
            self.buffers[name] = np.empty(size, self.dtype)
        return self.buffers[name][:size].reshape(shape)

    def part(self, name):
        """Other scratch memory, for a part of the task that uses the same names."""
        return self.parts.setdefault(name, Scratch(self.dtype, self.most))

    def product(self, name, x, y):
        """x @ y, in the memory called `name`."""
        return np.matmul(x, y, out=self(name, (*y.shape[:-2], x.shape[-2], y.shape[-1])))


MOST_BYTES = 1 << 24  # of an array that is kept from call to call: more than those of a segment have
THREAD = threading.local()


def thread_scratch(dtype):
    """The scratch memory of the calling thread, which is kept from call to call."""
    return vars(THREAD).setdefault(dtype.char, Scratch(dtype, MOST_BYTES))
