"""Products of a model's weight matrices with the vectors of a decoding step, one vector per sequence: row by row for
few sequences, on tensor cores for a batch.

A product is y = x w^T. C matrices of the same size form a stack w [C, M, K], which multiplies vectors x [C, B, K] and
gives y [C, B, M]. Words:

    rows, columns   the M rows and the K columns of a matrix
    vectors         the B sequences' vectors
    parts           a kernel may divide the K columns among blocks; it then leaves as many arrays, whose sum is y
    terms           a float32 vector may be given as FLOAT_TERMS vectors of a half type, whose sum it is
    step            what a block multiplies at a time: a box of columns of its rows
    finish          what is done with a product: one of WRITE, ADD, RELU_SQUARED, PARTS
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import ClassVar

import numpy as np

from .arguments import members, structs
from .arithmetic import ceil_div
from .kernel import HALF, INT8, SM90, ModelKernel
from .plan import Draft, TensorMap

# A class describes a kernel: its annotated fields are the template's arguments, in order; `arguments` the members of
# struct Args, which the compiler checks, with `?` if they may be null.

FLOAT_TERMS = 3
# `finish`: y = p; y += p; y = relu(p)^2; y gets the parts of p. `Matvec` has no PARTS, `BatchProduct` no ADD. The
# numbers are those of `Finish` in kernels_cu/include/decode.cuh.
WRITE, ADD, RELU_SQUARED, PARTS = range(4)
PRODUCTS = 7  # the most products in one launch of `Matvec`
PRODUCT = members("pointers w x y, int64s M finish")


class Matvec(ModelKernel):
    """Products of matrices with at most 8 float32 vectors, on every card."""

    file = "rwkv6/matvec"
    ROWS: ClassVar[int] = 16  # rows of a matrix per block: one side of a tensor-core tile
    COLUMNS: ClassVar[int] = 8  # the most vectors: the tile's other side
    constants = (("ROWS", "ROWS"), ("COLUMNS", "COLUMNS"))
    THREADS: ClassVar[tuple[int, ...]] = (256, 512, 1024)  # the possible THREADS_A_BLOCK
    arguments = (*structs("products", PRODUCTS, PRODUCT), *members("int64s B K"))
    shared_memory = ("Shared<{THREADS_A_BLOCK}>",)
    dtype: np.dtype
    THREADS_A_BLOCK: int

    @classmethod
    def fitting(cls, dtype, blocks, device):
        """The instance with the most threads per block with which a multiprocessor gets at most about 1,024 of them;
        or with the fewest if there are many blocks: then blocks end at different times, and others take their places.
        A block of 1,024 threads takes 144 KB of shared memory, which some cards do not have.
        """
        kernels = [cls(dtype, size) for size in cls.THREADS]
        kernels = [kernel for kernel in kernels if kernel.shared_bytes <= device.shared_per_block]
        most = device.multiprocessors * 1024
        return next((kernel for kernel in reversed(kernels) if kernel.threads * blocks <= most), kernels[0])

    @property
    def threads(self):
        return self.THREADS_A_BLOCK


STACKS = 2  # the most stacks in one launch of the other kernels
STACK = members("tensor_maps w x, pointers y scales, int64s C M finish")
SWIZZLED = 128  # bytes of a row, or of a vector, in a box that a tensor copy moves


def stack_args(products, rows, vectors) -> list[dict]:
    """The members STACK of each of STACKS stacks. `products`: tuples (w, scales, x, y, finish), with x [terms, C, B,
    K]. Tensor copies move boxes of so many `rows` of w and `vectors` of x. Stacks that are not needed have C = 0."""

    def tensor_map(array, rows, heads=1):
        return TensorMap(array, SWIZZLED // array.dtype.itemsize, rows, swizzled=True, heads=heads)

    stacks = [
        {
            "w": tensor_map(w[None], rows),
            "x": tensor_map(x.swapaxes(0, 1), vectors, x.shape[0]),
            "y": y,
            "scales": scales,
            "C": w.shape[0],
            "M": w.shape[1],
            "finish": finish,
        }
        for w, scales, x, y, finish in products
    ]
    return stacks + [stacks[0] | {"C": 0}] * (STACKS - len(stacks))


class BatchProduct(ModelKernel):
    """Products of half-precision or int8 matrices with the vectors of a batch, on Hopper. `SPLIT` blocks, a cluster,
    compute a tile of y together, each with a part of K; with the finish PARTS they leave SPLIT parts."""

    file = "rwkv6/batch_product"
    WIDTHS: ClassVar[tuple[int, ...]] = (8, 16, 32, 64)  # the possible COLUMNS: vectors per block
    EXACT: ClassVar[int] = 8  # blocks of so many vectors take them as `FLOAT_TERMS` terms, others as one term
    SPLITS: ClassVar[tuple[int, ...]] = (1, 2, 4, 8)  # the possible SPLIT
    FEW_ROWS: ClassVar[int] = 256  # matrices of at most so many rows in all are faster here for any number of vectors
    DTYPES: ClassVar[tuple[np.dtype, ...]] = (*HALF, INT8)  # of matrices
    MOST: ClassVar[int] = 128  # vectors up to which this is faster than cuBLAS for all matrices
    arguments = (*structs("stacks", STACKS, STACK), *members("int64s B K"))
    shared_memory = ("Shared<{dtype}, {COLUMNS}, {DEEP}, {ROWS}>",)
    constants = (("SWIZZLED", "box_bytes"), ("TERMS<{COLUMNS}>", "terms"), (f"{shared_memory[0]}::STEP", "depth"))
    arch, threads, box_bytes = SM90, 320, SWIZZLED
    DEEP_COLUMNS: ClassVar[int] = 16  # the most vectors of a block with `DEEP`
    DEEP_STEP: ClassVar[int] = 512  # the most columns of K that the cluster of such a block multiplies in a step
    FEWER_ROWS_FOR: ClassVar[range] = range(6, 17)  # numbers of vectors for which ROWS = 64 is considered
    dtype: np.dtype
    COLUMNS: int
    SPLIT: int
    DEEP: bool = False  # whether shared memory holds the weights of more steps; a multiprocessor then holds one block
    # Rows per block: 128, of which each of the two warpgroups computes 64; or 64, of which each warpgroup multiplies
    # half of a step's columns.
    ROWS: int = 128

    @classmethod
    def fitting(cls, dtype, B, K, rows, device, early=False) -> BatchProduct | None:
        """The fastest instance for stacks of the sizes `rows`, (C, M) each; None if there is none, or cuBLAS is faster.

        `early`: whether small kernels run just before; the instance can copy weights at that time already.
        """
        few_rows = sum(C * M for C, M in rows) <= cls.FEW_ROWS
        if device.capability != 90 or dtype not in cls.DTYPES or B > cls.MOST and not few_rows:
            return None
        kernel = min(cls.choices(dtype, B), key=lambda kernel: kernel.steps(B, K, rows, device))
        deep = early and kernel.may_be_deep and kernel.blocks(B, rows) <= device.multiprocessors
        return replace(kernel, DEEP=deep)

    @classmethod
    def choices(cls, dtype, B) -> list[BatchProduct]:
        """The instances for B vectors among which `fitting` chooses."""
        columns = next((width for width in cls.WIDTHS if B <= width), cls.WIDTHS[-1])
        if B not in cls.FEWER_ROWS_FOR:
            return [cls(dtype, columns, split) for split in cls.SPLITS]
        # ROWS = 128 with SPLIT > 1 is no candidate: ROWS = 64 with half of that SPLIT has as many blocks and steps.
        return [*(cls(dtype, columns, split, ROWS=64) for split in cls.SPLITS), cls(dtype, columns, 1)]

    @property
    def may_be_deep(self) -> bool:
        """Whether `early` products may use this instance with `DEEP`. RWKV-6's have four times as many rows as columns;
        with at most half of the columns of a cluster's step, SPLIT would be smaller. RWKV-7's have at least three times
        as many: those of 513 to 704 columns in int8 do without `DEEP`."""
        return self.COLUMNS <= self.DEEP_COLUMNS and self.depth * self.SPLIT <= self.DEEP_STEP

    def steps(self, B, K, rows, device) -> float:
        """The cost: the steps that a multiprocessor takes one after the other, where a block's start and end count as 4
        steps. Two blocks on a multiprocessor share its memory bandwidth and are no faster than one after the other."""
        waves = max(1.0, self.blocks(B, rows) / device.multiprocessors)
        return waves * (ceil_div(K, self.depth * self.SPLIT) + 4)

    def blocks(self, B, rows) -> int:
        """Blocks for B vectors and stacks of the sizes `rows`, (C, M) each."""
        return sum(C * ceil_div(M, self.ROWS) for C, M in rows) * ceil_div(B, self.COLUMNS) * self.SPLIT

    def launch(self, draft: Draft, products, B, K):
        """Adds a launch to a draft. `products`: stacks (w [C, M, K], scales [C, M] or None, x [terms, C, B, K], y,
        finish). y is [C, B, M]; with PARTS it is [SPLIT, C, B, M]; as the input of a next product it may have the shape
        [terms, C, B, M]."""
        blocks = self.blocks(B, [w.shape[:2] for w, *_ in products])
        draft.launch(self, blocks, stacks=stack_args(products, self.ROWS, self.COLUMNS), B=B, K=K)

    @property
    def depth(self) -> int:
        """Columns that a block multiplies in a step."""
        return SWIZZLED // self.dtype.itemsize * (128 // self.ROWS)

    @property
    def terms(self):
        """The terms of each vector."""
        return FLOAT_TERMS if self.COLUMNS == self.EXACT else 1

    @property
    def blocks_per_cluster(self):
        return self.SPLIT


class SquaredProduct(ModelKernel):
    """relu(x w^T)^2 for a prompt's tokens x, on Hopper: as fast as cuBLAS's product, without its activation."""

    file = "rwkv6/squared_product"
    arguments = members("tensor_maps x w, pointers y, int64s tokens M K")
    shared_memory = ("Shared<{dtype}>",)
    BOX: ClassVar[int] = 128  # rows of x, or of w, that a copy moves
    TOKENS: ClassVar[int] = 256  # these, and ROWS of w, are what a cluster computes at a time
    ROWS: ClassVar[int] = 256
    BUSY: ClassVar[float] = 0.95  # the least part of clusters that have a tile, over all rounds of tiles
    arch, threads, blocks_per_cluster = SM90, 288, 2
    constants = (
        ("BLOCKS", "blocks_per_cluster"),
        ("BLOCKS * TOKENS", "TOKENS"),
        ("ROWS", "ROWS"),
        ("TOKENS", "BOX"),
        ("ROWS / BLOCKS", "BOX"),
    )
    dtype: np.dtype

    @classmethod
    def fitting(cls, w, x, device) -> SquaredProduct | None:
        """The instance for a matrix w [M, K] and tokens x [T, K]; None where cuBLAS is to be used: on other cards, and
        for so few tiles, or such a number, that these leave multiprocessors idle: cuBLAS chooses among tiles."""
        sizes_fit = device.capability == 90 and w.dtype in HALF and not any(size % 8 for size in w.shape)
        tiles, clusters = cls.tiles(w, x), cls.clusters(device)
        rounds = ceil_div(tiles, clusters)
        return cls(w.dtype) if sizes_fit and rounds > 1 and tiles >= cls.BUSY * rounds * clusters else None

    @classmethod
    def tiles(cls, w, x) -> int:
        """Tiles of all clusters."""
        return ceil_div(x.shape[0], cls.TOKENS) * ceil_div(w.shape[0], cls.ROWS)

    @classmethod
    def clusters(cls, device) -> int:
        """The most clusters, of which all run at the same time."""
        return device.multiprocessors // cls.blocks_per_cluster

    def launch(self, draft: Draft, w, x, y, device):
        """Adds the launch to a draft."""
        draft.launch(self, self.blocks(w, x, device), **self.args(w, x, y))

    def blocks(self, w, x, device):
        """The blocks of a launch."""
        return min(self.tiles(w, x), self.clusters(device)) * self.blocks_per_cluster

    def args(self, w, x, y):
        """The members of the argument struct."""
        maps = {
            name: TensorMap(array[None, None], SWIZZLED // array.dtype.itemsize, self.BOX, swizzled=True)
            for name, array in {"x": x, "w": w}.items()
        }
        return {**maps, "y": y, "tokens": x.shape[0], "M": w.shape[0], "K": w.shape[1]}


class WideProduct(ModelKernel):
    """Products of half-precision matrices with at least LEAST vectors, on Hopper. A block computes ROWS rows for 64
    vectors of each of its GROUPS warpgroups. The HALVES blocks of a cluster share the copies of weights. Blocks may
    divide K; then they leave parts."""

    file = "rwkv6/wide_product"
    # {the most vectors: the possible (ROWS, HALVES, GROUPS)}. Of the two numbers of rows, one divides the product of a
    # usual model into about as many blocks as a card has multiprocessors.
    SHAPES: ClassVar[dict[int, tuple]] = {64: ((64, 1, 1), (72, 1, 1)), 256: ((128, 2, 2), (144, 2, 2))}
    LEAST: ClassVar[int] = 56  # vectors: with fewer, too much of its tiles is empty
    DEPTH: ClassVar[int] = 64  # columns that a block multiplies in a step
    constants = (("DEPTH", "DEPTH"),)
    PARTS: ClassVar[tuple[int, ...]] = (1, 2, 3, 4, 8)  # the possible numbers of parts
    WAVES: ClassVar[int] = 2  # the most blocks per multiprocessor; with more, BatchProduct and cuBLAS are faster
    arguments = (*structs("stacks", STACKS, STACK), *members("int64s B K parts"))
    shared_memory = ("Shared<{dtype}, Layout<{ROWS}, {HALVES}, {GROUPS}, {DEEP}>>",)
    arch = SM90
    dtype: np.dtype
    ROWS: int
    HALVES: int
    GROUPS: int
    DEEP: bool = False  # as in `BatchProduct`

    @classmethod
    def all(cls, dtype) -> list[WideProduct]:
        """Every instance for a dtype."""
        kernels = [cls(dtype, *shape) for shapes in cls.SHAPES.values() for shape in shapes]
        return kernels + [replace(kernel, DEEP=True) for kernel in kernels if kernel.HALVES == 1]

    @classmethod
    def fitting(cls, dtype, B, K, rows, in_parts, device, early=False) -> tuple[WideProduct, int] | None:
        """(the fastest instance for stacks of the sizes `rows`, (C, M) each; how many parts it leaves), or None if
        there is none or another kernel is faster. `in_parts`: whether it may leave parts. `early` is as in
        `BatchProduct`."""
        batch_product_is_faster = 64 < B <= BatchProduct.MOST
        if device.capability != 90 or dtype not in HALF or batch_product_is_faster:
            return None
        if not cls.LEAST <= B <= max(cls.SHAPES):
            return None
        if any(M % 8 for _, M in rows) or sum(C * M for C, M in rows) <= BatchProduct.FEW_ROWS:
            return None
        shapes = next(shapes for most, shapes in cls.SHAPES.items() if B <= most)
        choices = [(cls(dtype, *shape), parts) for shape in shapes for parts in (cls.PARTS if in_parts else (1,))]
        kernel, parts = min(choices, key=lambda choice: choice[0].steps(B, K, rows, choice[1], device))
        blocks = kernel.blocks(B, rows, parts)
        deep = early and kernel.HALVES == 1 and blocks <= device.multiprocessors
        return None if blocks > cls.WAVES * device.multiprocessors else (replace(kernel, DEEP=deep), parts)

    def steps(self, B, K, rows, parts, device) -> float:
        """The cost: the steps of 64 x HALVES rows that a multiprocessor takes one after the other, where a block's
        start and end count as 4 steps, and each part that the next kernel reads as half a step."""
        waves = self.blocks(B, rows, parts) / device.multiprocessors
        # with HALVES = 1 two blocks share a multiprocessor, so a part of a wave takes a part of its time
        waves = max(1.0, waves) if self.HALVES == 1 else ceil(waves)
        return waves * (ceil_div(K, self.DEPTH * parts) * self.ROWS / (64 * self.HALVES) + 4) + parts / 2

    def blocks(self, B, rows, parts) -> int:
        """Blocks for B vectors and stacks of the sizes `rows`, (C, M) each."""
        tiles = sum(C * ceil_div(M, self.ROWS) for C, M in rows)
        return tiles * parts * ceil_div(B, self.HALVES * self.vectors) * self.blocks_per_cluster

    def launch(self, draft: Draft, products, B, K, parts):
        """As `BatchProduct.launch`, with x [1, C, B, K] and no scales; in `parts` parts y is [parts, C, B, M]."""
        blocks = self.blocks(B, [w.shape[:2] for w, *_ in products], parts)
        stacks = stack_args(products, self.ROWS, self.vectors)
        draft.launch(self, blocks, stacks=stacks, B=B, K=K, parts=parts)

    @property
    def vectors(self) -> int:
        """Vectors per block."""
        return 64 * self.GROUPS

    @property
    def blocks_per_cluster(self):
        return self.HALVES

    @property
    def threads(self):
        return 128 * self.GROUPS + 64
