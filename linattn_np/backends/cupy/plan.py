"""A plan is data: the memory that a call needs, the steps that it takes in order, and the arrays that it returns.

Planners write plans with a `Draft`. They see arrays as `Array`, which has a shape, strides and a place in some memory,
and no numbers. `execute` runs a plan on a device, again and again on other arrays; `explain` and tests read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from math import gcd, prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...contract import CHUNK
from ...summary import Transition

FLOAT32 = np.dtype(np.float32)
WORTH_A_LAUNCH = 1 << 20  # bytes of copied arrays


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# -- memory ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Given:
    """An array of the caller."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    start: int  # its address modulo 16, which is the same in all calls that share a plan


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory that every execution allocates, without gaps. `axes` is the memory order of the axes: the one with the
    largest stride first."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[int, ...]
    start = 0

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
    """Numbers of the host that are the same in every execution; they are sent to the device once."""

    host: np.ndarray
    start = 0

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
    """An address: `offset` bytes behind the start of `memory`."""

    memory: Given | Buffer | Table
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Array:
    """Numbers in some memory, with strides in bytes as NumPy has them."""

    memory: Given | Buffer | Table
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
    def start(self) -> int:
        """The address modulo 16."""
        return (self.memory.start + self.offset) % 16

    @property
    def is_whole(self) -> bool:
        """Whether it has all numbers of its memory, with the shape and strides that the memory has."""
        return not self.offset and self.shape == self.memory.shape and self.strides == self.memory.strides

    def __getitem__(self, key) -> Array:
        """A view, by slices, integers, None and one Ellipsis."""
        keys = list(key) if isinstance(key, tuple) else [key]
        axes = sum(part is not None and part is not Ellipsis for part in keys)
        at = next((n for n, part in enumerate(keys) if part is Ellipsis), len(keys))
        keys[at : at + 1] = [slice(None)] * (self.ndim - axes)
        shape, strides, offset, axis = [], [], self.offset, 0
        for part in keys:
            if part is None:
                shape.append(1)
                strides.append(0)
                continue
            step, size = self.strides[axis], self.shape[axis]
            axis += 1
            if isinstance(part, slice):
                first, stop, by = part.indices(size)
                shape.append(len(range(first, stop, by)))
                strides.append(step * by)
                offset += first * step
            else:
                offset += range(size)[part] * step
        return Array(self.memory, tuple(shape), tuple(strides), self.dtype, offset)

    def swapaxes(self, a: int, b: int) -> Array:
        def swapped(values):
            values = list(values)
            values[a], values[b] = values[b], values[a]
            return tuple(values)

        return Array(self.memory, swapped(self.shape), swapped(self.strides), self.dtype, self.offset)

    def transpose(self, axes) -> Array:
        shape, strides = (tuple(values[axis] for axis in axes) for values in (self.shape, self.strides))
        return Array(self.memory, shape, strides, self.dtype, self.offset)

    def in_heads(self, heads: int) -> Array:
        """[..., heads, D / heads] for [..., D]."""
        size, step = self.shape[-1] // heads, self.strides[-1]
        shape, strides = (*self.shape[:-1], heads, size), (*self.strides[:-1], size * step, step)
        return Array(self.memory, shape, strides, self.dtype, self.offset)


def whole(memory) -> Array:
    """All of some memory as an array."""
    return Array(memory, memory.shape, memory.strides, memory.dtype)


# -- how arrays lie ----------------------------------------------------------------------------------------------------
def has_rows(x) -> bool:
    """Whether the numbers of a row are neighbours in memory, as kernels ask for; all other strides are free."""
    return x.strides[-1] == x.dtype.itemsize or x.shape[-1] == 1 or x.size == 0


def is_contiguous(x) -> bool:
    step = x.dtype.itemsize
    for size, stride in zip(reversed(x.shape), reversed(x.strides)):
        if size > 1 and stride != step:
            return x.size == 0
        step *= size
    return True


def aligned16(*arrays) -> bool:
    """Whether every row of every array starts on 16 bytes and has a multiple of 16 bytes, as 16-byte copies need."""
    return not any(at % 16 for x in arrays for at in (x.start, *x.strides[:-1], x.shape[-1] * x.dtype.itemsize))


def common_bytes(*arrays) -> int:
    """How many bytes copies may move at once: the largest power of 2, at most 16, of which the start and the length of
    every row are multiples."""
    return gcd(16, *(at for x in arrays for at in (x.start, *x.strides[:-1], x.shape[-1] * x.dtype.itemsize)))


def mappable(*arrays) -> bool:
    """Whether tensor maps can describe the arrays: their rows allow 16-byte copies, and strides are positive."""
    return aligned16(*arrays) and have_positive_strides(arrays)


def mappable_either_way(x) -> bool:
    """Whether a tensor map can describe an array, or the array with its tokens in the opposite order. Then kernels copy
    rows themselves."""
    return mappable(x) or mappable(forwards(x))


def forwards(x):
    """[B, H, T, D] with tokens in the order of memory: reversed if their stride is negative."""
    return x[:, :, ::-1] if x.strides[2] < 0 else x


def have_positive_strides(arrays) -> bool:
    """Whether no axis is repeated or runs backwards, and no array is empty."""
    return all(x.size and all(stride > 0 or size == 1 for stride, size in zip(x.strides, x.shape)) for x in arrays)


def mappable_once_copied(arrays) -> bool:
    """Whether tensor maps can describe the arrays or contiguous copies of them: none is empty, and rows have a multiple
    of 16 bytes."""
    return all(x.size and x.shape[-1] * x.dtype.itemsize % 16 == 0 for x in arrays)


def token_arrays(problem) -> list:
    """The arrays of a call that have a row for every token."""
    return [x for name, x in problem.arrays.items() if "T" in problem.op.arrays[name].split()]


def are_worth_a_launch(arrays) -> bool:
    """Whether copies of the arrays, none of which is empty, take much longer than a launch."""
    return all(x.size for x in arrays) and sum(x.nbytes for x in arrays) >= WORTH_A_LAUNCH


# -- steps -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class TensorMap:
    """The description of an array [B, H, T, D] from which Hopper's tensor copies (TMA) fetch boxes: each of `columns`
    columns, `tokens` tokens and `heads` heads.

    In shared memory the rows of a box follow each other without gaps; or, if `swizzled`, each has 128 bytes in the
    128-byte swizzle.
    """

    array: Array
    columns: int
    tokens: int
    swizzled: bool
    heads: int = 1


@dataclass(frozen=True)
class Shape:
    """The kernels' struct `Shape`, member by member: the sizes of a problem, and which tokens each sequence has."""

    B: int
    H: int
    T: int
    K: int
    V: int
    count: int  # sequences in a row of the batch
    bounds: Ref | None  # the first token of every sequence, and the end of the last; null if all have T tokens
    chunk: int  # tokens of a chunk
    NC: int  # chunks in a row of the batch
    chunks: Ref | None  # of every chunk, its first token and its end
    chunk_bounds: Ref | None  # the first chunk of every sequence, and the number of chunks

    @property
    def all_chunks(self) -> int:
        """(batch, head, chunk) triples: the blocks of a kernel that takes a chunk a block."""
        return self.B * self.H * self.NC


SHAPE = tuple(member.name for member in fields(Shape))


@dataclass(frozen=True, eq=False)
class Launch:
    """A launch of a kernel with `blocks` blocks; `args` by the names of the kernel's declaration."""

    kernel: Any
    blocks: int
    args: dict
    reason: str = ""  # why the kernel copies an array of the caller, if it does
    more_shared: int = 0  # bytes of shared memory behind those that the kernel declares
    together: bool = False  # whether blocks wait for each other, so that the card must run all at the same time


@dataclass(frozen=True, eq=False)
class Product:
    """y = x w^T, or y += x w^T, by cuBLAS: w [C, M, K] and x [C, B, K] of one dtype, y [C, B, M]."""

    w: Array
    x: Array
    y: Array
    add: bool


@dataclass(frozen=True, eq=False)
class Copy:
    """target[...] = source, in the target's dtype."""

    source: Array
    target: Array
    reason: str = ""  # why an array of the caller is copied

    @property
    def is_of_bytes(self) -> bool:
        """Whether it copies one run of bytes to another, unchanged."""
        same = self.source.dtype == self.target.dtype and self.source.shape == self.target.shape
        return same and is_contiguous(self.source) and is_contiguous(self.target)


@dataclass(frozen=True, eq=False)
class Fill:
    """Zeros for all of a buffer."""

    target: Array


@dataclass(frozen=True, eq=False)
class Upload:
    """The numbers of a table go to the device, once for all executions."""

    table: Table


@dataclass(frozen=True, eq=False)
class Plan:
    """A call as data. `results` is a tree of tuples, arrays and None; `saved` is what the pullback needs besides."""

    buffers: tuple[Buffer, ...]
    steps: tuple
    results: object
    saved: tuple[Array, ...] = ()
    given: tuple[Given, ...] = ()  # the caller's arrays, in the order in which `execute` is handed them
    mode: str | None = None
    tiles: dict = field(default_factory=dict)  # the sizes that the main kernels work in, for `explain`
    against: dict = field(default_factory=dict)  # {another way of computing the call: why it is not taken}, likewise

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(step for step in self.steps if isinstance(step, Launch))

    @property
    def kernels(self) -> tuple:
        return tuple(launch.kernel for launch in self.launches)

    @property
    def copies(self) -> tuple[str, ...]:
        """Which of the caller's arrays are copied, and why."""
        return tuple(step.reason for step in self.steps if isinstance(step, (Copy, Launch)) and step.reason)

    @property
    def scratch(self) -> int:
        """Bytes that an execution allocates besides the results and what the pullback needs."""
        kept = {id(x.memory) for x in arrays_in((self.results, self.saved))}
        return sum(buffer.nbytes for buffer in self.buffers if id(buffer) not in kept)


def arrays_in(tree) -> list:
    """The leaves of a tree of tuples, without None."""
    if isinstance(tree, (tuple, list)):
        return [x for part in tree for x in arrays_in(part)]
    return [] if tree is None else [tree]


# -- drafts ------------------------------------------------------------------------------------------------------------
class Draft:
    """A plan that is being written: its methods allocate buffers and append steps.

    numbers : of a kernel's arguments by their names; a launch that does not name one of them takes it from here
    """

    def __init__(self, **numbers):
        self.buffers, self.steps, self.made_plain, self.numbers = [], [], {}, numbers

    def plan(self, results, **more) -> Plan:
        return Plan(tuple(self.buffers), tuple(self.steps), results, **more)

    def include(self, plan: Plan):
        """Appends the buffers and steps of another plan, and returns its results."""
        self.buffers += plan.buffers
        self.steps += plan.steps
        return plan.results

    def empty(self, shape, dtype, axes=None) -> Array:
        buffer = Buffer(tuple(shape), np.dtype(dtype), tuple(range(len(shape))) if axes is None else axes)
        self.buffers.append(buffer)
        return whole(buffer)

    def zeros(self, shape, dtype) -> Array:
        x = self.empty(shape, dtype)
        self.fill(x)
        return x

    def fill(self, x: Array):
        """Zeros for all of a new array."""
        self.steps.append(Fill(x))

    def like(self, prototype: Array, dtype=None, shape=None) -> Array:
        """A new array with the axes in the memory order of `prototype`; contiguous where `has_rows` would fail."""
        shape, dtype = prototype.shape if shape is None else shape, prototype.dtype if dtype is None else dtype
        axes = sorted(range(len(shape)), key=lambda axis: -abs(prototype.strides[axis]))
        ordered = Buffer(tuple(shape), np.dtype(dtype), tuple(axes))
        return self.empty(shape, dtype, ordered.axes if has_rows(whole(ordered)) else None)

    def with_shape(self, x: Array, shape) -> Array:
        """`x` if it has the shape, or new memory in the same order."""
        return x if x.shape == shape else self.like(x, shape=shape)

    def table(self, host) -> Array:
        table = Table(np.ascontiguousarray(host))
        self.steps.append(Upload(table))
        return whole(table)

    def launch(self, kernel, blocks: int, /, reason="", more_shared=0, together=False, **args):
        numbers = {name: self.numbers[name] for name in kernel.names & self.numbers.keys()}
        self.steps.append(Launch(kernel, blocks, kernel.complete(numbers | args), reason, more_shared, together))

    def product(self, w: Array, x: Array, y: Array, add=False):
        self.steps.append(Product(w, x, y, add))

    def copy(self, source: Array, target: Array, reason=""):
        self.steps.append(Copy(source, target, reason))

    # -- copies that are made only where they are needed --
    def cast(self, x: Array, dtype, reason="") -> Array:
        """`x` in `dtype`, in the same memory order."""
        if x.dtype == dtype:
            return x
        found = self.like(x, dtype)
        self.copy(x, found, reason)
        return found

    def contiguous(self, x: Array, dtype=None, reason="") -> Array:
        """A contiguous copy of `x`."""
        found = self.empty(x.shape, x.dtype if dtype is None else dtype)
        self.copy(x, found, reason)
        return found

    def plain(self, x: Array | None, name: str, dtype=FLOAT32) -> Array | None:
        """`x` as a contiguous array of `dtype`."""
        if x is None or x.dtype == dtype and is_contiguous(x):
            return x
        if (x, dtype) not in self.made_plain:
            reason = f"{name}: the kernels read it as contiguous {dtype}"
            self.made_plain[x, dtype] = self.contiguous(x, dtype, reason)
        return self.made_plain[x, dtype]

    def in_rows(self, x: Array, name: str) -> Array:
        return x if has_rows(x) else self.contiguous(x, reason=f"{name}: its last axis is not contiguous")

    def mapped(self, x: Array, name: str, fits=mappable_either_way) -> Array:
        """`x`, or a copy of it where a tensor map cannot describe it, whichever way its tokens run."""
        x = self.in_rows(x, name)
        return x if fits(x) else self.contiguous(x, reason=f"{name}: a tensor map cannot describe it")

    def aligned(self, x: Array | None, name: str) -> Array | None:
        """`x`, or a copy of it where it does not start on 16 bytes."""
        return x if x is None or x.start == 0 else self.contiguous(x, reason=f"{name}: it does not start on 16 bytes")

    # -- a problem's arrays --
    def inputs(self, problem) -> tuple[Array, ...]:
        """The arrays of the call except the bonus u, in the order of the declaration; copies where `has_rows` fails."""
        return tuple(self.in_rows(x, name) for name, x in problem.arrays.items() if name != "u")

    def mapped_inputs(self, problem, fits=mappable_either_way) -> tuple[Array, ...]:
        """The same; copies where `fits` fails, by default where tensor maps cannot describe an array."""
        return tuple(self.mapped(x, name, fits) for name, x in problem.arrays.items() if name != "u")

    def bonus(self, problem) -> Array | None:
        """u as contiguous [H, K]."""
        return self.plain(problem.arrays.get("u"), "u", problem.compute_dtype)

    def initial(self, problem) -> Array | None:
        given = problem.initial_state and problem.initial_state[0]
        return self.plain(given, "initial_state", problem.compute_dtype)

    def final(self, problem) -> Array | None:
        """The final state, in the memory that a model has for it, or new."""
        if "final_state" in problem.options:
            return problem.options["final_state"]
        return self.empty(problem.shape("N H K V"), problem.compute_dtype) if problem.output_final_state else None

    def stored(self, problem, final):
        """(the final state in the dtype that the caller wants,), or None."""
        return None if final is None else (self.cast(final, problem.state_dtype),)

    def output(self, problem, fits=has_rows) -> Array:
        """o where the caller wants it, if kernels can write it there, or new in the memory order of the first input."""
        if problem.out is not None and fits(problem.out):
            return problem.out
        return self.like(next(iter(problem.arrays.values())), problem.dtype, problem.shape(problem.op.out))

    def give_back(self, problem, o) -> Array:
        """The caller's `out`, to which o is copied if the kernels could not write there, or o if there is no `out`."""
        if problem.out is None or o is problem.out:
            return o
        self.copy(o, problem.out, "out: the kernels cannot write it as it lies")
        return problem.out

    def results(self, problem, o, final) -> tuple:
        """(o, the final state's parts or None) as the caller wants them."""
        return self.give_back(problem, o), self.stored(problem, final)

    # -- the arrays of its pullback --
    def cotangents(self, problem, do, dht) -> tuple[Array, Array | None]:
        """(do in the dtype of the inputs, as `has_rows` asks for; the final state's gradient, contiguous, or None)."""
        do = self.in_rows(self.cast(do, problem.dtype, "do: in the dtype of the inputs"), "do")
        return do, self.plain(None if dht is None else dht[0], "dht", problem.compute_dtype)

    def gradient_of_state(self, problem) -> Array | None:
        """Memory for the initial state's gradient, if there is an initial state."""
        return None if problem.initial_state is None else self.empty(problem.shape("N H K V"), problem.compute_dtype)

    def stored_gradient(self, problem, dh0):
        """The initial state's gradient in the dtype of the state."""
        return None if dh0 is None else (self.cast(dh0, problem.initial_state[0].dtype),)

    def shape(self, problem, spans=None, chunk=None, **changed) -> Shape:
        """The `Shape` of a problem. `spans`: token ranges that take the place of sequences; `changed`: other K or V."""
        B, H, T = problem.shape("B H T")
        dense, chunk = spans is None and not problem.varlen, chunk or problem.chunk_size or CHUNK
        spans = spans or problem.spans
        K, V = (changed.get(axis, problem.sizes.get(axis, 0)) for axis in "KV")
        sizes = {"B": B, "H": H, "T": T, "K": K, "V": V, "count": spans.count, "chunk": chunk}
        if dense:
            return Shape(**sizes, NC=ceil_div(T, chunk), bounds=None, chunks=None, chunk_bounds=None)
        bounds, chunk_bounds, chunks = spans.bounds, spans.chunk_bounds(chunk), spans.chunks(chunk)
        table = self.table(np.concatenate([bounds, chunk_bounds, chunks.ravel()])).memory
        ends = np.cumsum([bounds.nbytes, chunk_bounds.nbytes]).tolist()
        places = Ref(table), Ref(table, ends[0]), Ref(table, ends[1])
        return Shape(**sizes, NC=len(chunks), bounds=places[0], chunk_bounds=places[1], chunks=places[2])


# -- calls -------------------------------------------------------------------------------------------------------------
def arrays_of(problem) -> list:
    """The caller's arrays on the device."""
    arrays = [*problem.arrays.values(), *(problem.initial_state or ())]
    if problem.out is not None:
        arrays.append(problem.out)
    return arrays + [problem.options[name] for name in array_options(problem)]


def array_options(problem) -> list[str]:
    """The options of a step that are arrays on the device: slots may be numbers of the host."""
    names, option = ("state", "pending", "accepted"), problem.options.get
    found = [name for name in names if option(name) is not None]
    return found if isinstance(option("slots"), (type(None), np.ndarray)) else [*found, "slots"]


def describe(problem, device) -> tuple:
    """(the problem as planners see it: with an `Array` for each of the caller's arrays, and without the mode "auto";
    the memory of these arrays, in the order of `arrays_of`)."""
    given = []

    def seen(name, x):
        if x is None:
            return None
        given.append(describe_array(name, x, device))
        return whole(given[-1])

    arrays = {name: seen(name, x) for name, x in problem.arrays.items()}
    initial = problem.initial_state and tuple(seen("initial_state", part) for part in problem.initial_state)
    out, options = seen("out", problem.out), dict(problem.options)
    for name in array_options(problem):
        options[name] = seen(name, options[name])
    seen_problem = problem.replace(
        arrays=arrays, initial_state=initial, out=out, options=options, mode=mode_of(problem), memo=None, example=None
    )
    return seen_problem, tuple(given)


def mode_of(problem) -> str:
    """The mode that "auto" stands for on a GPU: "chunk", or "staged" if the state of every chunk is asked for. A delta
    rule's planner chooses."""
    if problem.mode != "auto" or problem.op.transition is Transition.RANK_ONE:
        return problem.mode
    return "staged" if problem.materialize else "chunk"


def contiguous(name, shape, dtype) -> Given:
    """The description of a contiguous array of a caller that starts on 16 bytes."""
    buffer = Buffer(tuple(shape), dtype, tuple(range(len(shape))))
    return Given(name, buffer.shape, buffer.strides, dtype, 0)


def describe_array(name, x, device) -> Given:
    """The description of a caller's array `x`, or `x` if it is one."""
    if isinstance(x, Given):
        return x
    return Given(name, tuple(x.shape), tuple(x.strides), x.dtype, device.pointer(x) % 16)


def describe_parts(device, **parts: dict) -> tuple[SimpleNamespace, tuple[Given, ...], list]:
    """(a namespace for each part, with an `Array` for each array by its name; their memory; the arrays, in the order
    of it). None stays None."""
    given: list[Given] = []
    found = {
        part: SimpleNamespace(**{name: describe_tree(name, x, device, given) for name, x in arrays.items()})
        for part, arrays in parts.items()
    }
    return SimpleNamespace(**found), tuple(given), [x for part in parts.values() for x in arrays_in([*part.values()])]


def describe_tree(name, tree, device, given):
    """A tree of arrays with an `Array` for each; their memory is appended to `given`."""
    if isinstance(tree, tuple):
        return tuple(describe_tree(name, part, device, given) for part in tree)
    if tree is None:
        return None
    given.append(describe_array(name, tree, device))
    return whole(given[-1])
