"""Products of a model's weights with the vectors of a step: by rows for few, on tensor cores for a batch.

X is the dtype of what a kernel hands to the next product.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import ClassVar

import numpy as np

from .arguments import members, structs
from .kernel import HALF, INT8, ModelKernel
from .plan import Draft, TensorMap, ceil_div

FLOAT_TERMS = 3  # numbers of a half type, each in an array of its own, whose sum is a float
# The products' `Finish`. `Matvec` has no PARTS, `BatchProduct` no ADD.
WRITE, ADD, RELU_SQUARED, PARTS = range(4)
PRODUCTS = 7  # in one launch
PRODUCT = members("pointers w x y, integers M finish")


class Matvec(ModelKernel):
    file = "rwkv6/matvec"
    ROWS: ClassVar[int] = 16  # rows of a weight in a block: one side of a tensor-core tile
    COLUMNS: ClassVar[int] = 8  # sequences at most: the tile's other side
    THREADS: ClassVar[tuple[int, ...]] = (256, 512, 1024)
    arguments = (*structs("products", PRODUCTS, PRODUCT), *members("integers B K"))
    shared = ("Shared<{THREADS_A_BLOCK}>",)
    dtype: np.dtype
    THREADS_A_BLOCK: int

    @classmethod
    def fitting(cls, dtype, blocks, device):
        """The kernel with so many threads a block that a multiprocessor has about 1,024; with many blocks the fewest,
        so that blocks end one after the other."""
        most = device.multiprocessors * 1024
        return cls(dtype, max((size for size in cls.THREADS if size * blocks <= most), default=cls.THREADS[0]))

    @property
    def threads(self):
        return self.THREADS_A_BLOCK


STACKS = 2  # in one launch
STACK = members("maps w x, pointers y scales, integers C M finish")
SWIZZLED = 128  # bytes of K in a box of weights or of vectors


def stacked(products, rows, vectors) -> list[dict]:
    """The kernels' stacks of products (w, scales, x, y, finish), copied in boxes of `rows` of w and `vectors` of x."""

    def boxes(array, many, heads=1):
        return TensorMap(array, SWIZZLED // array.dtype.itemsize, many, True, heads)

    stacks = [
        {
            "w": boxes(w[None], rows),
            "x": boxes(x.swapaxes(0, 1), vectors, x.shape[0]),
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
    """Products of half-precision or int8 weights and the vectors of a batch. `SPLIT` blocks compute a tile together,
    each a part of K."""

    file = "rwkv6/batch_product"
    WIDTHS: ClassVar[tuple[int, ...]] = (8, 16, 32, 64)  # vectors of a block
    EXACT: ClassVar[int] = 8  # vectors at most that are given as `FLOAT_TERMS` terms
    SPLITS: ClassVar[tuple[int, ...]] = (1, 2, 4, 8)
    FEW_ROWS: ClassVar[int] = 256
    DTYPES: ClassVar[tuple[np.dtype, ...]] = (*HALF, INT8)
    MOST: ClassVar[int] = 128  # vectors up to which it is faster than the library, whatever the weights are
    arguments = (*structs("stacks", STACKS, STACK), *members("integers B K"))
    shared = ("Shared<{dtype}, {COLUMNS}, {DEEP}, {ROWS}>",)
    arch, threads = "sm_90a", 320
    DEEP_COLUMNS: ClassVar[int] = 16  # vectors at most of a block with `DEEP`
    DEEP_STEP: ClassVar[int] = 512  # columns of K at most that its cluster multiplies in a step
    SHARED: ClassVar[range] = range(6, 17)  # numbers of vectors for which ROWS = 64 is considered
    dtype: np.dtype
    COLUMNS: int
    SPLIT: int
    DEEP: bool = False  # whether a block has more stages, and a multiprocessor almost for itself
    ROWS: int = 128  # of a weight: 64 for each of two warpgroups; or 64 in all, and each warpgroup half of a step's K

    @classmethod
    def fitting(cls, dtype, B, K, rows, device, early=False) -> BatchProduct | None:
        """The fastest kernel for stacks (C, M) of products; None where none serves, or the library is faster.

        `early`: whether small kernels run before it, while which it can copy weights already.
        """
        few_rows = sum(C * M for C, M in rows) <= cls.FEW_ROWS
        if device.capability != 90 or dtype not in cls.DTYPES or B > cls.MOST and not few_rows:
            return None
        kernel = min(cls.choices(dtype, B), key=lambda kernel: kernel.steps(B, K, rows, device))
        deep = early and kernel.may_be_deep and kernel.blocks(B, rows) <= device.multiprocessors
        return replace(kernel, DEEP=deep)

    @classmethod
    def choices(cls, dtype, B) -> list[BatchProduct]:
        """The kernels for B vectors that `fitting` chooses from."""
        columns = next((width for width in cls.WIDTHS if B <= width), cls.WIDTHS[-1])
        if B not in cls.SHARED:
            return [cls(dtype, columns, split) for split in cls.SPLITS]
        # Blocks with all rows of 128 and twice the split are as many, and take as many steps: no faster.
        return [*(cls(dtype, columns, split, ROWS=64) for split in cls.SPLITS), cls(dtype, columns, 1)]

    @property
    def may_be_deep(self) -> bool:
        """Whether some `early` product has few enough blocks for `DEEP`. Such a product has four times as many rows as
        columns, and more columns than half of a cluster's step (else K would be split less)."""
        return self.COLUMNS <= self.DEEP_COLUMNS and self.depth * self.SPLIT <= self.DEEP_STEP

    def steps(self, B, K, rows, device) -> float:
        """The cost: steps that a multiprocessor takes one after the other, with 4 for a block's beginning and end. Two
        blocks of a multiprocessor share its part of the memory's rate, so only the total of blocks counts."""
        waves = max(1.0, self.blocks(B, rows) / device.multiprocessors)
        return waves * (ceil_div(K, self.depth * self.SPLIT) + 4)

    def blocks(self, B, rows) -> int:
        return sum(C * ceil_div(M, self.ROWS) for C, M in rows) * ceil_div(B, self.COLUMNS) * self.SPLIT

    def launch(self, draft: Draft, products, B, K):
        """`products`: stacks (w [C, M, K], scales [C, M] or None, x [terms, C, B, K], y [C, B, M], in parts
        [SPLIT, C, B, M], or as x, finish)."""
        blocks = self.blocks(B, [w.shape[:2] for w, *_ in products])
        draft.launch(self, blocks, stacks=stacked(products, self.ROWS, self.COLUMNS), B=B, K=K)

    @property
    def depth(self) -> int:
        """Columns of K that a block multiplies in a step."""
        return SWIZZLED // self.dtype.itemsize * (128 // self.ROWS)

    @property
    def terms(self):
        return FLOAT_TERMS if self.COLUMNS == self.EXACT else 1

    @property
    def cluster(self):
        return self.SPLIT


class NarrowProduct(ModelKernel):
    """A product of few rows with a batch's vectors, left in parts."""

    file = "rwkv6/narrow_product"
    arguments = members("pointers w scales x y, integers B K M")
    shared = ("Shared<{VECTORS}>",)
    ROWS: ClassVar[int] = 32  # of a weight
    PARTS: ClassVar[int] = 4
    WIDTHS: ClassVar[tuple[int, ...]] = (16, 32)
    arch, threads = "sm_90a", 256
    dtype: np.dtype
    VECTORS: int

    @classmethod
    def fitting(cls, dtype, B) -> NarrowProduct:
        """The kernel with so many vectors a block that all blocks run at once, two a multiprocessor."""
        return cls(dtype, cls.WIDTHS[B > BatchProduct.MOST])

    def blocks(self, B, M) -> int:
        return self.PARTS * ceil_div(M, self.ROWS) * ceil_div(B, self.VECTORS)


class WideProduct(ModelKernel):
    """Products of half-precision weights with at least `LEAST` vectors: a block has `ROWS` rows, and `GROUPS`
    warpgroups with 64 vectors each. `HALVES` = 2 blocks of a cluster share the copies of weights. A split of K leaves
    parts."""

    file = "rwkv6/wide_product"
    # (rows, halves, groups) by the most vectors. With one of these numbers of rows the blocks of a model's product fill
    # one wave.
    SHAPES: ClassVar[dict[int, tuple]] = {64: ((64, 1, 1), (72, 1, 1)), 256: ((128, 2, 2), (144, 2, 2))}
    LEAST: ClassVar[int] = 56  # vectors; with fewer too much of its tiles is empty
    DEPTH: ClassVar[int] = 64  # columns of K in a step
    PARTS: ClassVar[tuple[int, ...]] = (1, 2, 3, 4, 8)
    WAVES: ClassVar[int] = 2  # at most; beyond, BatchProduct's and cuBLAS's tiles of more rows are faster
    arguments = (*structs("stacks", STACKS, STACK), *members("integers B K parts"))
    shared = ("Shared<{dtype}, Layout<{ROWS}, {HALVES}, {GROUPS}, {DEEP}>>",)
    arch = "sm_90a"
    dtype: np.dtype
    ROWS: int
    HALVES: int
    GROUPS: int
    DEEP: bool = False

    @classmethod
    def all(cls, dtype) -> list[WideProduct]:
        kernels = [cls(dtype, *shape) for shapes in cls.SHAPES.values() for shape in shapes]
        return kernels + [replace(kernel, DEEP=True) for kernel in kernels if kernel.HALVES == 1]

    @classmethod
    def fitting(cls, dtype, B, K, rows, in_parts, device, early=False) -> tuple[WideProduct, int] | None:
        """The fastest kernel for stacks (C, M) of products and how many parts it leaves; None where none serves, or
        another is faster. `early` as `BatchProduct.fitting` has it."""
        many = 64 < B <= BatchProduct.MOST
        if device.capability != 90 or dtype not in HALF or many or not cls.LEAST <= B <= max(cls.SHAPES):
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
        """The cost: steps of 64 or 128 rows that a multiprocessor takes one after the other, with 4 for a block's
        beginning and end, and half of one for each part that the next kernel reads."""
        waves = self.blocks(B, rows, parts) / device.multiprocessors
        waves = max(1.0, waves) if self.HALVES == 1 else ceil(waves)  # two blocks may share a multiprocessor, or not
        return waves * (ceil_div(K, self.DEPTH * parts) * self.ROWS / (64 * self.HALVES) + 4) + parts / 2

    def blocks(self, B, rows, parts) -> int:
        tiles = sum(C * ceil_div(M, self.ROWS) for C, M in rows)
        return tiles * parts * ceil_div(B, self.HALVES * self.vectors) * self.cluster

    def launch(self, draft: Draft, products, B, K, parts):
        """`products`: stacks (w [C, M, K], None, x [1, C, B, K], y [C, B, M], in parts [parts, C, B, M], or as x,
        finish)."""
        blocks = self.blocks(B, [w.shape[:2] for w, *_ in products], parts)
        stacks = stacked(products, self.ROWS, self.vectors)
        draft.launch(self, blocks, stacks=stacks, B=B, K=K, parts=parts)

    @property
    def vectors(self) -> int:
        """Vectors of a block."""
        return 64 * self.GROUPS

    @property
    def cluster(self):
        return self.HALVES

    @property
    def threads(self):
        return 128 * self.GROUPS + 64
