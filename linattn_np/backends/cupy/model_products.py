"""Products of a model's weights with the vectors of a step: by rows for few, on tensor cores for a batch.

X is the dtype of what a kernel hands to the next product.
"""

from __future__ import annotations

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
    shared = ("Shared<{dtype}, {COLUMNS}>",)
    arch, threads = "sm_90a", 320
    ROWS: ClassVar[int] = 128  # of a weight in a block
    constants = (("ROWS", "ROWS"),)
    dtype: np.dtype
    COLUMNS: int
    SPLIT: int

    @classmethod
    def fitting(cls, dtype, B, K, rows, device) -> BatchProduct | None:
        """The fastest kernel for stacks (C, M) of products; None where none serves, or the library is faster."""
        few_rows = sum(C * M for C, M in rows) <= cls.FEW_ROWS
        if device.capability != 90 or dtype not in cls.DTYPES or B > cls.MOST and not few_rows:
            return None
        return min(cls.choices(dtype, B), key=lambda kernel: kernel.steps(B, K, rows, device))

    @classmethod
    def choices(cls, dtype, B) -> list[BatchProduct]:
        """The kernels for B vectors that `fitting` chooses from."""
        columns = next((width for width in cls.WIDTHS if B <= width), cls.WIDTHS[-1])
        return [cls(dtype, columns, split) for split in cls.SPLITS]

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
        return SWIZZLED // self.dtype.itemsize

    @property
    def terms(self):
        return FLOAT_TERMS if self.COLUMNS == self.EXACT else 1

    @property
    def cluster(self):
        return self.SPLIT
