"""A plan describes how a call is computed: the memory it needs, the steps it takes in order, the arrays it returns.

A planner (a module with a function `plan`, such as `gated`) writes a plan with a `Draft`. It sees each array as an
`Array`: a shape, strides and a place in some memory, without numbers. The module `execute` runs a plan on a device, any
number of times and on other arrays each time; `explain` and tests read it.

Axes: B batch, H heads, T tokens, K channels of queries and keys, V columns of values, N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from math import gcd, prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ...contract import CHUNK
from ...summary import Transition
from .arithmetic import ceil_div

FLOAT32 = np.dtype(np.float32)


# -- memory ------------------------------------------------------------------------------------------------------------
# eq=False: an object equals itself alone, and dictionaries may have it as a key.
@dataclass(frozen=True, eq=False)
class CallerArray:
    """The description of an array that the caller gives, or that another plan has computed."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    address_mod_16: int  # the address modulo 16; the same in all calls that share a plan


@dataclass(frozen=True, eq=False)
class Buffer:
    """An array that every execution allocates, without gaps between its numbers.

    `axes` lists the axes by falling stride: (0, 2, 1) for [B, H, T] whose heads are neighbours in memory. Buffers start
    at multiples of 16 bytes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[int, ...]
    address_mod_16 = 0  # without a type, hence no field

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @cached_property
    def strides(self) -> tuple[int, ...]:
        strides, step = [0] * len(self.shape), self.dtype.itemsize
        for axis in reversed(self.axes):
            strides[axis] = step
            step *= self.shape[axis]
        return tuple(strides)


@dataclass(frozen=True, eq=False)
class Table:
    """An array on the host whose numbers are the same in every execution; it is copied to the device once."""

    host: np.ndarray
    address_mod_16 = 0  # without a type, hence no field

    @property
    def shape(self):
        return self.host.shape

    @property
    def strides(self):
        return self.host.strides

    @property
    def dtype(self):
        return self.host.dtype


@dataclass(frozen=True)
class Ref:
    """An address: `offset` bytes after the start of `memory`."""

    memory: CallerArray | Buffer | Table
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Array:
    """A view of some memory, with a shape and with strides in bytes, as a NumPy array has."""

    memory: CallerArray | Buffer | Table
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    offset: int = 0  # bytes from the memory's start to the first number

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def ref(self) -> Ref:
        return Ref(self.memory, self.offset)

    @property
    def address_mod_16(self) -> int:
        return (self.memory.address_mod_16 + self.offset) % 16

    @property
    def covers_memory(self) -> bool:
        """Whether the view has the same numbers, shape and strides as its memory."""
        return not self.offset and self.shape == self.memory.shape and self.strides == self.memory.strides

    @property
    def with_ascending_tokens(self) -> Array:
        """A view of an array [B, H, T, D] whose tokens are in the order of their addresses: reversed if their stride is
        below 0."""
        return self[:, :, ::-1] if self.strides[2] < 0 else self

    def view(self, slice_or_permute) -> Array:
        """The view that the function `slice_or_permute` makes of a NumPy array with this shape and these strides. The
        function must not read the array's numbers: there are none."""
        x = as_strided(np.empty(1, np.uint8), self.shape, self.strides)
        y = slice_or_permute(x)
        first = y.__array_interface__["data"][0] - x.__array_interface__["data"][0]
        return Array(self.memory, y.shape, y.strides, self.dtype, self.offset + first)

    def __getitem__(self, key) -> Array:
        """A view by slices, integers, None and at most one Ellipsis, as in NumPy."""
        key = key if isinstance(key, tuple) else (key,)
        return self.view(lambda x: x[key if Ellipsis in key else (*key, ...)])

    def swapaxes(self, a: int, b: int) -> Array:
        return self.view(lambda x: x.swapaxes(a, b))

    def transpose(self, axes) -> Array:
        return self.view(lambda x: x.transpose(axes))

    def in_heads(self, heads: int) -> Array:
        """A view [..., D] as [..., heads, D / heads]."""
        size, stride = self.shape[-1] // heads, self.strides[-1]
        assert heads * size == self.shape[-1]
        shape, strides = (*self.shape[:-1], heads, size), (*self.strides[:-1], size * stride, stride)
        return Array(self.memory, shape, strides, self.dtype, self.offset)


def as_array(memory) -> Array:
    """The view of all numbers of `memory`, a `CallerArray`, `Buffer` or `Table`."""
    return Array(memory, memory.shape, memory.strides, memory.dtype)


# -- strides and alignment ---------------------------------------------------------------------------------------------
def has_rows(x) -> bool:
    """Whether the numbers of each row (the last axis) are neighbours in memory. Kernels need this of every array that
    they read or write by rows; the other strides may have any value."""
    return x.strides[-1] == x.dtype.itemsize or x.shape[-1] == 1 or x.size == 0


def is_contiguous(x) -> bool:
    return as_strided(np.empty(1, x.dtype), x.shape, x.strides).flags.c_contiguous


def aligned16(*arrays) -> bool:
    """Whether every row of every array starts at a multiple of 16 bytes and is a multiple of 16 bytes long, as copies
    of 16 bytes at a time need."""
    return common_bytes(*arrays) == 16


def common_bytes(*arrays) -> int:
    """The most bytes that a kernel may copy at a time: the largest power of 2, at most 16, that divides the address and
    the length in bytes of every row."""
    return gcd(16, *(n for x in arrays for n in (x.address_mod_16, *x.strides[:-1], x.shape[-1] * x.dtype.itemsize)))


def mappable(*arrays) -> bool:
    """Whether tensor maps can describe the arrays: none is empty, all have rows (`has_rows`), which allow 16-byte
    copies, and no axis of more than one number has a stride of 0 or less."""
    positive = all(x.size and all(n > 0 or size == 1 for n, size in zip(x.strides, x.shape)) for x in arrays)
    return positive and all(map(has_rows, arrays)) and aligned16(*arrays)


def mappable_either_way(x) -> bool:
    """Whether a tensor map can describe `x` [B, H, T, D], or `x` with its tokens in the opposite order. A kernel that
    gets such a map of reversed tokens does not use it: it copies the rows of `x` itself."""
    # Its argument struct has a map in any case: `execute` makes that of x.with_ascending_tokens. The kernel sees by the
    # sign of the rows' token_stride that it must not use the map (chunk_copies.cuh).
    return mappable(x) or mappable(x.with_ascending_tokens)


# -- the steps of a plan, and the arguments of kernels -----------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class TensorMap:
    """A kernel argument that describes an array [B, H, T, D] to Hopper's tensor copies (TMA). One tensor copy moves a
    box of `heads` heads, `tokens` tokens and `columns` of the D columns between the array and shared memory.

    In shared memory the rows of a box follow each other without gaps. If `swizzled`, a row has 128 bytes, and its
    pieces of 16 bytes are permuted by the hardware's 128-byte swizzle.
    """

    array: Array
    columns: int
    tokens: int
    swizzled: bool
    heads: int = 1


@dataclass(frozen=True)
class Shape:
    """The members of the kernels' C++ struct `Shape`, in order: a problem's sizes, and which tokens each sequence has.
    A row of the batch holds one sequence, or several packed ones, or the segments into which a planner cuts one."""

    B: int
    H: int
    T: int
    K: int
    V: int
    row_sequences: int  # sequences, or segments, of a batch row; 1 if `bounds` is null
    bounds: Ref | None  # int64 [row_sequences + 1]: each sequence's first token, then T; null if all have T tokens
    chunk: int  # tokens of a chunk
    NC: int  # chunks in a row of the batch
    chunks: Ref | None  # int64 [NC, 2]: each chunk's first token and last token + 1; null where `bounds` is
    chunk_bounds: Ref | None  # int64 [row_sequences + 1]: each sequence's first chunk, then NC; null where `bounds` is

    @property
    def all_chunks(self) -> int:
        """The chunks of all heads and batch rows: the blocks of a kernel whose blocks compute one chunk each."""
        return self.B * self.H * self.NC


# `arguments` writes the words of a Shape in this order, and `source` has the compiler compare it with the C++ struct.
SHAPE = tuple(member.name for member in fields(Shape))


@dataclass(frozen=True, eq=False)
class Launch:
    """A launch of a `kernel.Kernel` with `blocks` blocks."""

    kernel: Any
    blocks: int
    args: dict  # {a member of the kernel's argument struct: its value}
    reason: str = ""  # if the kernel copies arrays of the caller: which ones and why, for `explain`
    more_shared: int = 0  # bytes of shared memory per block besides `kernel.shared_bytes`
    together: bool = False  # whether blocks wait for each other, so that the card must run all of them at the same time


# C, M and K are the product's own: K is the length of its sums.
@dataclass(frozen=True, eq=False)
class Product:
    """C products y = x w^T, or y += x w^T, by cuBLAS: w [C, M, K] and x [C, B, K] of one dtype, y [C, B, M]."""

    w: Array
    x: Array
    y: Array
    add: bool


@dataclass(frozen=True, eq=False)
class Copy:
    """target[...] = source, converted to the target's dtype."""

    source: Array
    target: Array
    reason: str = ""  # if an array of the caller is copied: which one and why, for `explain`

    @property
    def is_of_bytes(self) -> bool:
        """Whether it copies all bytes of one contiguous range of memory to another."""
        same = self.source.dtype == self.target.dtype and self.source.shape == self.target.shape
        return same and is_contiguous(self.source) and is_contiguous(self.target)


@dataclass(frozen=True, eq=False)
class Fill:
    """Zeros for all of a contiguous array."""

    target: Array


@dataclass(frozen=True, eq=False)
class Upload:
    """Copies a table to the device, once, when the plan is compiled."""

    table: Table


@dataclass(frozen=True, eq=False)
class Plan:
    """How a call is computed; see the module."""

    buffers: tuple[Buffer, ...]
    steps: tuple  # of Launch, Product, Copy, Fill and Upload
    results: object  # nested tuples whose leaves are arrays and None
    saved: tuple[Array, ...] = ()  # arrays that a later plan reads, such as the pullback's
    given: tuple[CallerArray, ...] = ()  # the caller's arrays, in the order in which `execute` gets them
    mode: str | None = None  # the mode in which the call is computed, such as "chunk"
    tiles: dict = field(default_factory=dict)  # {name: size} of tiles, chunks and segments, for `explain`
    reasons: dict = field(default_factory=dict)  # {another way of computing the call: why it is not taken}, likewise

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(step for step in self.steps if isinstance(step, Launch))

    @property
    def kernels(self) -> tuple:
        return tuple(launch.kernel for launch in self.launches)

    @property
    def copies(self) -> tuple[str, ...]:
        """The reasons of all steps that copy arrays of the caller: which ones, and why."""
        return tuple(step.reason for step in self.steps if isinstance(step, (Copy, Launch)) and step.reason)

    @property
    def scratch(self) -> int:
        """Bytes of the buffers that are neither results nor saved."""
        returned = {id(x.memory) for x in arrays_in((self.results, self.saved))}
        return sum(buffer.nbytes for buffer in self.buffers if id(buffer) not in returned)


def arrays_in(tree) -> list:
    """The leaves of nested tuples and lists, without None."""
    if isinstance(tree, (tuple, list)):
        return [x for part in tree for x in arrays_in(part)]
    return [] if tree is None else [tree]


# -- drafts ------------------------------------------------------------------------------------------------------------
class Draft:
    """A plan that is being written: its methods allocate buffers and append steps.

    A method with a parameter `name` or `reason` may copy an array of the caller: `name` is the array's, and `reason` is
    the text that `explain` prints for the copy.

    default_args : arguments by the names of members of kernels' structs. A launch passes those that its kernel has,
        unless it passes others of these names
    """

    def __init__(self, **default_args):
        self.buffers, self.steps, self.default_args = [], [], default_args
        self.contiguous_versions: dict[tuple, Array] = {}  # (array, dtype) -> its copy by `as_contiguous`

    def plan(self, results, **fields) -> Plan:
        """The finished plan; `fields`: those of `Plan` besides buffers, steps and results."""
        return Plan(tuple(self.buffers), tuple(self.steps), results, **fields)

    def include(self, plan: Plan):
        """Appends the buffers and steps of another plan, and returns its results."""
        self.buffers += plan.buffers
        self.steps += plan.steps
        return plan.results

    def empty(self, shape, dtype, axes=None) -> Array:
        """A new array; `axes`: its axes by falling stride, those of C order if None."""
        buffer = Buffer(tuple(shape), np.dtype(dtype), tuple(range(len(shape))) if axes is None else axes)
        self.buffers.append(buffer)
        return as_array(buffer)

    def fill(self, x: Array):
        """Writes zeros to `x`, which must be contiguous."""
        assert is_contiguous(x)
        self.steps.append(Fill(x))

    def like(self, prototype: Array, dtype=None, shape=None) -> Array:
        """A new array whose axes have the memory order of the `prototype`'s, or C order if `has_rows` would fail."""
        shape, dtype = prototype.shape if shape is None else shape, prototype.dtype if dtype is None else dtype
        axes = sorted(range(len(shape)), key=lambda axis: -abs(prototype.strides[axis]))
        ordered = Buffer(tuple(shape), np.dtype(dtype), tuple(axes))
        return self.empty(shape, dtype, ordered.axes if has_rows(as_array(ordered)) else None)

    def with_shape(self, x: Array, shape) -> Array:
        """`x` if it has this shape, else a new array of this shape (`like` x)."""
        return x if x.shape == shape else self.like(x, shape=shape)

    def table(self, host) -> Array:
        """An array on the device with the numbers of the NumPy array `host`."""
        table = Table(np.ascontiguousarray(host))
        self.steps.append(Upload(table))
        return as_array(table)

    def launch(self, kernel, blocks: int, /, reason="", more_shared=0, together=False, **args):
        """Appends a `Launch`; `args`: the members of the kernel's argument struct that `default_args` lacks."""
        # kernel.names: those of the struct's members; `complete` checks that all are there, or optional and then None
        defaults = {name: self.default_args[name] for name in kernel.names & self.default_args.keys()}
        self.steps.append(Launch(kernel, blocks, kernel.complete(defaults | args), reason, more_shared, together))

    def product(self, w: Array, x: Array, y: Array, add=False):
        self.steps.append(Product(w, x, y, add))

    def copy(self, source: Array, target: Array, reason=""):
        self.steps.append(Copy(source, target, reason))

    # -- copies that are made only where they are needed --
    def cast(self, x: Array, dtype, reason="") -> Array:
        """`x`, or a copy in `dtype` with the same memory order if its dtype is another one."""
        if x.dtype == dtype:
            return x
        copied = self.like(x, dtype)
        self.copy(x, copied, reason)
        return copied

    def contiguous_copy(self, x: Array, dtype=None, reason="") -> Array:
        """A contiguous copy of `x`, in its own dtype if `dtype` is None."""
        copied = self.empty(x.shape, x.dtype if dtype is None else dtype)
        self.copy(x, copied, reason)
        return copied

    def as_contiguous(self, x: Array | None, name: str, dtype=FLOAT32) -> Array | None:
        """`x`, or a contiguous copy in `dtype` if it is not contiguous or has another dtype. An array is copied once,
        however often this is called."""
        if x is None or x.dtype == dtype and is_contiguous(x):
            return x
        # The key is the object x: another view of the same memory is copied again. x must not be written later.
        if (x, dtype) not in self.contiguous_versions:
            reason = f"{name}: the kernels read it as contiguous {dtype}"
            self.contiguous_versions[x, dtype] = self.contiguous_copy(x, dtype, reason)
        return self.contiguous_versions[x, dtype]

    def in_rows(self, x: Array, name: str) -> Array:
        """`x`, or a contiguous copy if `has_rows` fails."""
        return x if has_rows(x) else self.contiguous_copy(x, reason=f"{name}: its last axis is not contiguous")

    def mapped(self, x: Array, name: str, fits=mappable_either_way) -> Array:
        """`x`, or a contiguous copy if `fits` fails: by default, if a tensor map cannot describe `x`, nor `x` with its
        tokens reversed."""
        x = self.in_rows(x, name)
        return x if fits(x) else self.contiguous_copy(x, reason=f"{name}: a tensor map cannot describe it")

    def aligned(self, x: Array | None, name: str) -> Array | None:
        """`x`, or a contiguous copy if its address is not a multiple of 16 bytes."""
        if x is None or x.address_mod_16 == 0:
            return x
        return self.contiguous_copy(x, reason=f"{name}: it does not start on 16 bytes")

    # -- the arrays of a call: `problem` as `execute.describe` returns it --
    def inputs(self, problem) -> tuple[Array, ...]:
        """The arrays of the call except the bonus u, in the order of the declaration, each as `in_rows` returns it."""
        return tuple(self.in_rows(x, name) for name, x in problem.arrays.items() if name != "u")

    def mapped_inputs(self, problem, fits=mappable_either_way) -> tuple[Array, ...]:
        """The arrays of the call except the bonus u, in the order of the declaration, each as `mapped` returns it."""
        return tuple(self.mapped(x, name, fits) for name, x in problem.arrays.items() if name != "u")

    def bonus(self, problem) -> Array | None:
        """The bonus u [H, K] of RWKV-6, contiguous; None for an operator without one."""
        return self.as_contiguous(problem.arrays.get("u"), "u", problem.compute_dtype)

    def initial(self, problem) -> Array | None:
        """The initial state [N, H, K, V], contiguous; None if the caller gives none."""
        given = problem.initial_state and problem.initial_state[0]
        return self.as_contiguous(given, "initial_state", problem.compute_dtype)

    def final(self, problem) -> Array | None:
        """The array [N, H, K, V] to which kernels write the final state: a model's own (the option "final_state"), or a
        new one if the caller asks for the final state, else None."""
        if "final_state" in problem.options:
            return problem.options["final_state"]
        return self.empty(problem.shape("N H K V"), problem.compute_dtype) if problem.output_final_state else None

    def in_state_dtype(self, problem, final):
        """(`final` in the dtype that the caller asked for,), or None if `final` is None."""
        return None if final is None else (self.cast(final, problem.state_dtype),)

    def output(self, problem, fits=has_rows) -> Array:
        """The array to which kernels write o: the caller's `out` if there is one and `fits(out)`, else a new array with
        the memory order of the first input. `give_back` copies it to `out` if necessary."""
        if problem.out is not None and fits(problem.out):
            return problem.out
        # op.out: the axes of o, such as "B H T V"
        return self.like(next(iter(problem.arrays.values())), problem.dtype, problem.shape(problem.op.out))

    def give_back(self, problem, o) -> Array:
        """What a call returns for `o`: the caller's `out`, to which o is copied if kernels wrote o elsewhere; `o` if
        there is no `out`."""
        if problem.out is None or o is problem.out:  # the object that `output` returned, not a view of it
            return o
        self.copy(o, problem.out, "out: the kernels cannot write it as it lies")
        return problem.out

    def results(self, problem, o, final) -> tuple:
        """What a call returns: (o, the final state), by `give_back` and `in_state_dtype`."""
        return self.give_back(problem, o), self.in_state_dtype(problem, final)

    # -- the arrays of the call's pullback --
    def cotangents(self, problem, do, dht=None) -> tuple[Array, Array | None]:
        """(do in the dtype of the inputs and with `has_rows`; the final state's gradient [N, H, K, V], contiguous, or
        None). `dht`: (the final state's gradient,) or None."""
        do = self.in_rows(self.cast(do, problem.dtype, "do: in the dtype of the inputs"), "do")
        return do, self.as_contiguous(None if dht is None else dht[0], "dht", problem.compute_dtype)

    def gradient_of_state(self, problem) -> Array | None:
        """A new array for the initial state's gradient [N, H, K, V]; None if there is no initial state."""
        return None if problem.initial_state is None else self.empty(problem.shape("N H K V"), problem.compute_dtype)

    def stored_gradient(self, problem, dh0):
        """(the initial state's gradient in the dtype of the caller's initial state,), or None if `dh0` is None."""
        return None if dh0 is None else (self.cast(dh0, problem.initial_state[0].dtype),)

    def shape(self, problem, spans=None, chunk=None, **changed) -> Shape:
        """The argument `Shape` of a kernel.

        spans : ranges of tokens (`varlen.Spans`) that the kernel treats as sequences, such as segments; by default the
            problem's own sequences
        chunk : tokens of a chunk, by default as the caller gave it, or `CHUNK`
        changed : K or V, if the kernel's arrays have other sizes than the problem's
        """
        B, H, T = problem.shape("B H T")
        # dense: every batch row is one sequence
        dense, chunk = spans is None and not problem.varlen, chunk or problem.chunk_size or CHUNK
        spans = spans or problem.spans
        K, V = (changed.get(axis, problem.sizes.get(axis, 0)) for axis in "KV")
        sizes = {"B": B, "H": H, "T": T, "K": K, "V": V, "row_sequences": spans.count, "chunk": chunk}
        if dense:
            return Shape(**sizes, NC=ceil_div(T, chunk), bounds=None, chunks=None, chunk_bounds=None)
        bounds, chunk_bounds, chunks = spans.bounds, spans.chunk_bounds(chunk), spans.chunks(chunk)
        # The order is that of the offsets below.
        table = self.table(np.concatenate([bounds, chunk_bounds, chunks.ravel()])).memory  # one table: one upload
        assert table.dtype == np.int64
        chunk_bounds_ref = Ref(table, bounds.nbytes)
        chunks_ref = Ref(table, bounds.nbytes + chunk_bounds.nbytes)
        return Shape(**sizes, NC=len(chunks), bounds=Ref(table), chunk_bounds=chunk_bounds_ref, chunks=chunks_ref)


# -- descriptions of calls ---------------------------------------------------------------------------------------------
def mode_of(problem) -> str:
    """The mode that "auto" stands for on a GPU: "chunk", or "staged" if the caller asks to materialize the states of
    all chunks and a sequence has several. For delta rules "auto" is returned: their planner chooses."""
    # A mode that the caller names stays. RANK_ONE: the delta rules.
    if problem.mode != "auto" or problem.op.transition is Transition.RANK_ONE:
        return problem.mode
    several_chunks = problem.spans.longest > (problem.chunk_size or CHUNK)
    return "staged" if problem.materialize and several_chunks else "chunk"


def caller_array(name, shape, dtype) -> CallerArray:
    """The description of a contiguous array whose address is a multiple of 16 bytes."""
    buffer = Buffer(tuple(shape), dtype, tuple(range(len(shape))))
    return CallerArray(name, buffer.shape, buffer.strides, dtype, 0)
