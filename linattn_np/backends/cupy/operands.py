"""A problem's arrays and tokens as kernels take them: rows with strides, alignment, the table of chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...contract import CHUNK

FLOAT32 = np.dtype(np.float32)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def pointer(device, array) -> int | None:
    return None if array is None else device.pointer(array)


def output(problem, device):
    """o where the caller wants it, or new in the memory order of q."""
    if problem.out is not None and has_rows(problem.out):
        return problem.out
    shape = problem.shape(problem.op.out)
    o = device.empty_like(next(iter(problem.arrays.values())), shape, problem.dtype)
    return o if has_rows(o) else device.empty(shape, problem.dtype)


def give_back(problem, o):
    if problem.out is not None and o is not problem.out:
        problem.out[...] = o
        return problem.out
    return o


def states(problem, device):
    """The initial state as the kernels read it and room for the final one, contiguous float32, or None."""
    initial = problem.initial_state and contiguous(problem.initial_state[0])
    return initial, device.empty(problem.shape("N H K V"), FLOAT32) if problem.output_final_state else None


def stored(problem, final):
    return None if final is None else (final.astype(problem.state_dtype, copy=False),)


def is_plain(x) -> bool:
    return x.dtype == FLOAT32 and x.flags.c_contiguous


def contiguous(x):
    """`x` as contiguous float32."""
    return x if is_plain(x) else x.astype(FLOAT32, order="C")


def gate(problem):
    return problem[problem.op.gates[0]]


def one_gate(problem) -> bool:
    """Whether all channels share a gate: [B, H, T, 1], a size of 1 also for other axes along which it is the same."""
    return "K" in problem.sizes and "g" in problem.arrays and problem["g"].shape[-1] < problem.sizes["K"]


def has_rows(x) -> bool:
    """Kernels take any strides but the last, which must be that of neighbours."""
    return x.strides[-1] == x.dtype.itemsize or x.shape[-1] == 1 or x.size == 0


def in_pieces(problem, device) -> bool:
    """Whether every row starts on 16 bytes and is a whole number of them: what 16-byte copies need."""
    arrays = [x for name, x in problem.arrays.items() if name != "u" and not (name == "g" and one_gate(problem))]
    if problem.out is not None:
        arrays.append(problem.out)
    aligned = all(device.pointer(x) % 16 == 0 and not any(stride % 16 for stride in x.strides[:-1])
                  for x in arrays if has_rows(x))               # others are copied to where they are
    return aligned and not any(x.shape[-1] * x.dtype.itemsize % 16 for x in arrays)


def mappable(problem, device) -> bool:
    """Whether tensor maps can describe the arrays: whole pieces, none empty, no axis repeated or backwards."""
    arrays = [x for name, x in problem.arrays.items() if not (name == "g" and one_gate(problem))]
    arrays += [] if problem.out is None else [problem.out]
    return in_pieces(problem, device) and all(
        x.size and all(stride > 0 or size == 1 for stride, size in zip(x.strides, x.shape)) for x in arrays)


def in_rows(x):
    """`x`, or a copy of it where its last axis is not contiguous."""
    return x if has_rows(x) else x.copy(order="C")


def inputs(problem):
    """The arrays of the call except the bonus, in the order of the declaration."""
    return tuple(in_rows(x) for name, x in problem.arrays.items() if name != "u")


def bonus(problem):
    """u as contiguous float32 [H, K], or None."""
    return contiguous(problem["u"]) if "u" in problem.arrays else None


def rows(device, **arrays) -> dict:
    """The fields of a kernel's `Rows`: pointer and element strides of all axes but the last, at most three.

    Of an axis of one the stride is 0, so that a kernel may take it for a longer one along which nothing changes.
    """
    fields = {}
    for name, x in arrays.items():
        size = x.dtype.itemsize
        b, h, t = *(stride // size if n > 1 else 0 for stride, n in zip(x.strides[:-1], x.shape)), *[0] * (4 - x.ndim)
        fields |= {name: device.pointer(x), f"{name}_b": b, f"{name}_h": h, f"{name}_t": t}
    return fields


@dataclass(frozen=True)
class Place:
    """Where the tokens are: the fields of a kernel's `Shape`, and the device table that its pointers point into."""

    shape: dict
    table: object = None            # held so that its memory is not handed out again before the launch

    @property
    def chunks(self) -> int:
        """(batch, head, chunk) triples: the blocks of a kernel that takes a chunk a block."""
        return self.shape["B"] * self.shape["H"] * self.shape["NC"]


def place(problem, device, segments=None) -> Place:
    """`segments`: the token ranges to take in place of the sequences."""
    B, H, T = problem.shape("B H T")
    spans, chunk = segments or problem.spans, problem.chunk_size or CHUNK
    fields = {"B": B, "H": H, "T": T, "K": problem.sizes.get("K", 0), "V": problem.sizes.get("V", 0),
              "count": spans.count, "bounds": None, "chunk": chunk, "NC": ceil_div(T, chunk), "chunks": None,
              "chunk_bounds": None}
    if not problem.varlen and segments is None:
        return Place(fields)
    chunks, chunk_bounds = spans.chunks(chunk), spans.chunk_bounds(chunk)
    table = device.upload(np.concatenate([spans.bounds, chunk_bounds, chunks.ravel()]))
    at = device.pointer(table)
    fields |= {"NC": len(chunks), "bounds": at, "chunk_bounds": at + spans.bounds.nbytes,
               "chunks": at + spans.bounds.nbytes + chunk_bounds.nbytes}
    return Place(fields, table)
