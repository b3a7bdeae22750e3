"""Packed sequences of different lengths: their token ranges, and the chunks and segments that they are cut into."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .accepted_arrays import host_array
from .messages import kind_of, shown


@dataclass(frozen=True, eq=False)
class Spans:
    """The token ranges of N sequences. Dense batches have one span, 0..T, for each of the B rows."""

    bounds: np.ndarray  # [N+1] int64, cumulated lengths; sequence n is bounds[n]:bounds[n+1]

    def __post_init__(self):
        self.bounds.flags.writeable = False  # calls alike share them

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def lengths(self) -> np.ndarray:  # [N]
        return np.diff(self.bounds)

    @cached_property
    def longest(self) -> int:
        """The tokens of the longest sequence."""
        return int(self.lengths.max(initial=0))

    def __iter__(self):
        """(start, stop) of each sequence as Python ints."""
        bounds = self.bounds.tolist()
        return zip(bounds[:-1], bounds[1:])

    def backwards(self) -> Spans:
        """The ranges of the same tokens in reverse order."""
        return Spans(self.bounds[-1] - self.bounds[::-1])

    def chunk_bounds(self, chunk: int) -> np.ndarray:
        """[N+1] int64: chunks of sequence n are rows chunk_bounds[n]:chunk_bounds[n+1] of the chunk table."""
        counts = -(-self.lengths // chunk)
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def chunks(self, chunk: int) -> np.ndarray:
        """[NC, 2] int64, the token range of every chunk; a chunk never crosses a sequence's end."""
        offsets = self.chunk_bounds(chunk)
        sequence = np.repeat(np.arange(self.count), np.diff(offsets))
        start = self.bounds[sequence] + (np.arange(offsets[-1]) - offsets[sequence]) * chunk
        return np.stack([start, np.minimum(start + chunk, self.bounds[sequence + 1])], axis=1)

    def segments(self, count: int, aligned: int) -> Spans:
        """Every sequence cut into `count` ranges, all of as many tokens, a multiple of `aligned`, as the longest
        sequence needs; the last ones of a shorter sequence are empty, and the one before may be shorter."""
        length = -(-self.longest // (count * aligned)) * aligned
        starts = self.bounds[:-1, None] + np.arange(count) * length
        starts = np.minimum(starts, self.bounds[1:, None])
        return Spans(np.append(starts.ravel(), self.bounds[-1]))

    def split_at_ends(self, length: int) -> Spans:
        """Every sequence, of at least 2 `length` tokens, as its first `length`, those between, and its last
        `length`."""
        starts, stops = self.bounds[:-1], self.bounds[1:]
        return Spans(np.append(np.column_stack([starts, starts + length, stops - length]).ravel(), self.bounds[-1]))

    def split_at(self, length: int) -> Spans:
        """Every sequence, of at least `length` tokens, as its first `length` and the rest."""
        starts = self.bounds[:-1]
        return Spans(np.append(np.column_stack([starts, starts + length]).ravel(), self.bounds[-1]))

    def with_empty_ends(self, count: int) -> Spans:
        """These spans with an empty one before and after every `count` of them."""
        starts, ends = self.bounds[:-1].reshape(-1, count), self.bounds[count::count]
        return Spans(np.append(np.column_stack([starts[:, 0], starts, ends]).ravel(), self.bounds[-1]))


def parse(cu_seqlens, total: int) -> Spans:
    """Checks host integers [N+1] against the packed length; ValueError says what is wrong."""
    bounds = host_array(cu_seqlens)
    if bounds is None:
        array_like = isinstance(cu_seqlens, (list, tuple)) or hasattr(cu_seqlens, "shape")
        got = shown(cu_seqlens) if array_like else kind_of(cu_seqlens)
        raise ValueError(
            f"must be host integers in a list, tuple or plain array, got {got}; reading a device's would synchronise"
        )
    if bounds.ndim != 1 or bounds.size < 2:
        raise ValueError(f"must be 1-d with at least 2 entries, got shape {bounds.shape}")
    if bounds.dtype.kind not in "iu":
        raise ValueError(f"must be integers, got {bounds.dtype}")
    if bounds[0] != 0 or bounds[-1] != total:
        raise ValueError(f"must run from 0 to T={total}, got {bounds[0]} to {bounds[-1]}")
    shrinks = bounds[1:] < bounds[:-1]
    if shrinks.any():
        outside = (bounds < 0) | (bounds > total)
        if outside.any():
            index = int(np.argmax(outside))
            raise ValueError(f"must lie between 0 and T={total}, got {bounds[index]} at index {index}")
        index = int(np.argmax(shrinks))
        raise ValueError(f"must not decrease, got {bounds[index]} then {bounds[index + 1]} at index {index + 1}")
    return Spans(bounds.astype(np.int64))


def dense(length: int) -> Spans:
    """One sequence of `length` tokens: what every row of a dense batch holds."""
    return Spans(np.array([0, length], np.int64))
