"""A model's matrices W [M, K] on the CPU, stored with 32, 16, 8 or 4 bits per number, and the products y = x W^T.

    float32
    bfloat16    exact for a checkpoint in bfloat16
    int8        w = scale q,         q in -127..127, a float32 scale for every row
    int4        w = scale (q - 8),   q in 0..15, a bfloat16 scale for every 32 neighbours of a row: 4.5 bits per number

The product with one token takes as long as reading the matrix, so half of the bits takes half of the time. Numba's
loops (`matrix_loops`) convert the numbers to float32 in registers. For up to MOST_BY_LOOPS tokens they also multiply
float32 matrices, at up to twice the speed of BLAS; for more tokens BLAS is faster. So all formats need Numba; a float32
model without Numba has no `Matrix` (`rwkv.numpy_layers`). Sums are float32; they are added in another order than
NumPy's, so results differ by rounding.
"""

from functools import cache

import numpy as np

from ..array_kinds import BFLOAT16
from ..errors import ContractError, NotSupported
from ..signals import signals_held
from .helper_threads import Board

FORMATS = ("float32", "bfloat16", "int8", "int4")
TILE, BLOCK = 64, 32  # rows of a tile, in int4 eight words of eight; numbers of a row that share a scale in int4
MOST_BY_LOOPS = 8  # the most tokens for which the loops multiply float32 faster than BLAS
PRODUCTS_PER_BYTE = 4  # multiplications that take as long as reading a byte
# int4's scales of a block that are tried, divided by the scale with which its largest |w| becomes q - 8 = -8.
CANDIDATES = np.linspace(0.7, 1.1, 9, dtype=np.float32)
CACHED = 1 << 16  # numbers that are rounded at a time; they fit in the cache
POOL_BLOCK, CACHE_LINE = 1 << 26, 64  # bytes
NO_SCALES = np.zeros(1, np.float32)


class Matrix:
    """W [M, K], or S matrices of this shape [S, M, K], in one of FORMATS.

    bits : float32 [S, M, K]. In other formats the rows are in tiles of TILE, and the numbers of a tile's column are
        neighbours: bfloat16 (as uint16) or int8 [S, tiles, K, TILE]; int4 [S, tiles, K, TILE / 8] words of eight
        numbers, where row r has bits 4 (r // 8) to 4 (r // 8) + 3 of word r % 8
    scales : for int8 [S, tiles, TILE]; for int4 [S, tiles, blocks, TILE], bfloat16 as uint16

    `matrix_loops` reads these layouts by the addresses in `description`, which are valid until a `Pool` moves the
    matrix or this object dies.
    """

    def __init__(self, format: str, shape, bits: np.ndarray, scales: np.ndarray | None):
        self.format, self.shape, self.bits = format, tuple(shape), bits
        self.scales = NO_SCALES if scales is None else scales
        self.code, self.nbytes = loops().CODES[format], self.bits.nbytes + self.scales.nbytes

    @property
    def description(self) -> np.ndarray:
        """int64 [4] for the loops: the code of the format, the addresses of bits and of scales, and M."""
        return np.array([self.code, self.bits.ctypes.data, self.scales.ctypes.data, self.shape[-2]], np.int64)

    def __repr__(self):
        return f"Matrix({list(self.shape)}, {self.format}, {self.nbytes:,} bytes)"

    def __call__(self, x, board: Board):
        """x W^T in float32, for x [T, K], or [S, T, K] for S matrices. The helper threads of `board` compute parts."""
        x = np.asarray(x, np.float32)
        if self.format == "float32" and x.shape[-2] > MOST_BY_LOOPS:
            return x @ self.bits.reshape(self.shape).swapaxes(-1, -2)
        stack = np.ascontiguousarray(x.reshape(-1, *x.shape[-2:]))
        y = np.empty((*stack.shape[:2], self.shape[-2]), np.float32)
        products = y[..., 0].size * self.shape[-2] * self.shape[-1]
        # helped gets the time of the product, as the bytes that are read in this time. multiply_at calls the compiled
        # `multiply` by its address; its tuples hold the matrices, inputs and outputs of several products, here of one.
        with board.helped(max(self.nbytes, products // PRODUCTS_PER_BYTE)):
            loops().multiply_at(loops().multiply.address, board.array, (self.description,), (stack,), (y,))
        return y if x.ndim == 3 else y[0]

    def widened(self) -> np.ndarray:
        """The float32 numbers of W, in `shape`, by which products multiply."""
        if self.format == "float32":
            return self.bits.reshape(self.shape)
        M, K = self.shape[-2:]
        S, tiles = self.bits.shape[:2]
        if self.format == "bfloat16":
            wide = (self.bits.astype(np.uint32) << 16).view(np.float32)
        elif self.format == "int8":
            wide = self.bits * self.scales[:, :, None]
        else:
            nibbles = self.bits[:, :, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)[:, None] & 15
            scales = np.repeat((self.scales.astype(np.uint32) << 16).view(np.float32), BLOCK, axis=2)[:, :, :K]
            wide = (nibbles.reshape(S, tiles, K, TILE).astype(np.float32) - 8) * scales
        return wide.swapaxes(2, 3).reshape(S, tiles * TILE, K)[:, :M].reshape(self.shape)


class Pool:
    """Memory for the numbers of matrices that are read one after the other, in blocks of POOL_BLOCK bytes.

    The system maps a large array by pages of 2 MB, if it has them, except at the array's ends. A matrix with an array
    of its own has pages of 4 KB at the ends, or only such pages if it has less than 4 MB; its product then has more
    misses in the cache of page addresses (TLB).
    """

    def __init__(self):
        self.rest = np.empty(0, np.uint8)  # of the last block

    def move(self, matrix: Matrix) -> Matrix:
        """Moves the matrix's numbers to the pool; returns the matrix."""
        matrix.bits, matrix.scales = self.moved(matrix.bits), self.moved(matrix.scales)
        return matrix

    def moved(self, array):
        """A copy in the pool, from the beginning of a cache line on; an array that is larger than a block as it is."""
        size = -(-array.nbytes // CACHE_LINE) * CACHE_LINE
        if size > POOL_BLOCK:
            return array
        if size > len(self.rest):
            block = np.empty(POOL_BLOCK + CACHE_LINE, np.uint8)
            self.rest = block[-block.ctypes.data % CACHE_LINE :]
        place, self.rest = self.rest[: array.nbytes].view(array.dtype).reshape(array.shape), self.rest[size:]
        place[...] = array
        return place


def pack(w, format: str) -> Matrix:
    """The matrix of floats `w` [M, K], or [S, M, K], in one of FORMATS. In float32 it may share w's memory."""
    w = np.asarray(w)
    q, scales = quantised(w.reshape(-1, *w.shape[-2:]), format)
    return of_rows(format, q, scales, w.shape)


def of_rows(format, q, scales, shape) -> Matrix:
    """The matrix of `shape` [M, K] or [S, M, K], from (q, scales) as `quantised` returns them."""
    if format == "float32":
        return Matrix(format, shape, np.ascontiguousarray(q), None)
    if format == "bfloat16":
        return Matrix(format, shape, tiled(q), None)
    if format == "int8":
        return Matrix(format, shape, tiled(q), np.ascontiguousarray(tiled(scales[..., None])[:, :, 0]))
    nibbles = tiled(q, 8).reshape(len(q), -1, q.shape[-1], 8, 8)
    words = np.zeros((*nibbles.shape[:-2], 8), np.uint32)
    for position in range(8):
        words |= nibbles[..., position, :].astype(np.uint32) << np.uint32(4 * position)
    return Matrix(format, shape, words, tiled(scales))


def quantised(w, format):
    """(numbers [S, M, K], scales or None) for floats w [S, M, K]:

    float32     float32, no scales
    bfloat16    as uint16, no scales
    int8        int8 from -127 to 127, and float32 [S, M]
    int4        uint8 from 0 to 15, and bfloat16 as uint16 [S, M, blocks]
    """
    if format not in FORMATS:
        raise ContractError(f"pack: format is {format!r}, expected one of {', '.join(map(repr, FORMATS))}")
    if format == "bfloat16":
        return w.astype(BFLOAT16).view(np.uint16), None
    w = w.astype(np.float32, copy=False)
    if format == "float32":
        return w, None
    if not np.isfinite(w).all():
        raise ContractError(f"pack: w has numbers that are not finite, which {format} cannot hold")
    if format == "int4":
        return four_bits(w)
    scales = np.abs(w).max(-1) / np.float32(127)
    return np.rint(w / np.where(scales > 0, scales, 1)[..., None]).astype(np.int8), scales


def tiled(w, blank=0):
    """w [S, M, K] as [S, tiles, K, TILE]; the last tile is filled up with rows of `blank`."""
    S, M, K = w.shape
    tiles = -(-M // TILE)
    padded = np.full((S, tiles * TILE, K), blank, w.dtype)
    padded[:, :M] = w
    return np.ascontiguousarray(padded.reshape(S, tiles, TILE, K).swapaxes(2, 3))


def four_bits(w):
    """`quantised` in int4, for finite float32 w [S, M, K]."""
    S, M, K = w.shape
    rows, blocks = w.reshape(-1, K), -(-K // BLOCK)
    q, scales = np.empty(rows.shape, np.uint8), np.empty((len(rows), blocks), np.uint16)
    for first in range(0, len(rows), step := max(1, CACHED // K)):
        part = slice(first, first + step)
        q[part], scales[part] = rounded_to_four_bits(rows[part])
    return q.reshape(w.shape), scales.reshape(S, M, blocks)


def rounded_to_four_bits(w):
    """(q, scales) for rows w [M, K]. Each block gets the scale, of CANDIDATES, with the least square error; its sign is
    that with which the largest number becomes -8."""
    M, K = w.shape
    blocks = -(-K // BLOCK)
    parts = np.zeros((M, blocks * BLOCK), np.float32)
    parts[:, :K] = w
    parts = parts.reshape(M, blocks, BLOCK)
    # With the candidate 1, a block's number of the largest absolute value becomes q - 8 = -8, the farthest from 0.
    extreme = np.take_along_axis(parts, np.abs(parts).argmax(-1, keepdims=True), -1)
    extreme, power = np.frexp(extreme)  # without powers of 2, squares are within float32's range
    parts = np.ldexp(parts, -power)
    best, scales = np.full(extreme.shape, np.inf, np.float32), np.zeros_like(extreme)
    best_q = np.full(parts.shape, 8, np.uint8)
    for candidate in CANDIDATES:
        scale = (extreme * (candidate / -8)).astype(BFLOAT16).astype(np.float32)
        q = parts * (1 / np.where(scale == 0, 1, scale))
        np.clip(np.rint(q, out=q), -8, 7, out=q)
        error = q * scale - parts
        error = np.einsum("mbk,mbk->mb", error, error)[..., None]
        better = error < best
        best, scales = np.where(better, error, best), np.where(better, scale, scales)
        np.copyto(best_q, (q + 8).astype(np.uint8), where=better)
    return best_q.reshape(M, -1)[:, :K], np.ldexp(scales, power)[..., 0].astype(BFLOAT16).view(np.uint16)


@cache
@signals_held()  # a signal might leave half of Numba imported
def loops():
    """The module of Numba's loops; NotSupported if Numba cannot be imported."""
    try:
        from .. import numba_cache  # noqa: F401  its ImportError says why Numba cannot be used
        from . import matrix_loops
    except ImportError as error:
        raise NotSupported(
            "matrices in fewer than 32 bits need Numba on the CPU, pip install 'linattn-np[cpu]': "
            f"{str(error).splitlines()[0]}"
        ) from None
    assert (matrix_loops.TILE, matrix_loops.BLOCK, {*matrix_loops.CODES}) == (TILE, BLOCK, {*FORMATS})
    return matrix_loops
