"""Products with matrices as `matrices` stores them, in Numba: tiles of TILE rows, in which the numbers of one input
are neighbours. Float32 is stored in rows, and read here for few tokens; BLAS multiplies more (`matrices.FEW`).

The sums of a tile stay in registers while its inputs are read. Few tokens read a tile one after another, and pass over
inputs that are zero where most of them are. More tokens read it SIDE at a time, and share what widens its numbers.

Several threads share a product. The caller publishes it on a board as a range of tickets, one for each part of the
product; every thread claims tickets, and the caller returns when all parts are done. It never waits for a thread that
has claimed nothing.
"""

import os

import numpy as np
from llvmlite import binding, ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..numba_cache import cfunc, njit

TILE = 64  # rows of W that are summed side by side
LANES = 16  # numbers in a vector: one register of AVX-512, two of other CPUs
VECTORS = TILE // LANES
WORDS_OF_INT4 = 8  # of an input in a tile
OFFSETS = [264.0] * WORDS_OF_INT4 + [24.0] * WORDS_OF_INT4  # of int4: 256 + q and 16 + q, less the 8 of q - 8
BLOCK = 32  # inputs that share a scale in int4
CODES = {"bfloat16": 0, "int8": 1, "int4": 2, "float32": 3}
BFLOAT16, INT8, INT4, FLOAT32 = CODES.values()
BYTES = {"bfloat16": 2 * TILE, "int8": TILE, "int4": TILE // 2}  # of an input's numbers in a tile
AHEAD = {"int8": 48, "int4": 96}  # inputs between the one that is read and the one that is prefetched, where all are
# read: the processor prefetches bfloat16's by itself, but the loops of the others come too late to what it fetches
SOME_AHEAD = 16  # the same where some inputs are read, which the processor cannot guess
CACHE_LINE = 64
FEW = 4  # tokens up to which a tile of fewer bits is read once for each of them
AVX512 = binding.get_host_cpu_features().get("avx512f")
# Tokens whose sums are made side by side, and vectors of each: as many as there are registers for.
SIDE, SIDE_VECTORS = (10, 2) if AVX512 else (6, 1)
DEPTH = 16  # blocks of inputs that all tokens read before the next ones: their part of a tile stays in the cache
CHUNK = 20 * SIDE  # tokens of one part of a product
FEW_INPUTS = 0.2  # the share of inputs other than zero up to which it is faster to pass over the zeros

# The board: int64 each, those that threads contend for in cache lines of their own. NEXT and LIMIT only grow, so that
# a thread which read them long ago claims no ticket of a later product.
NEXT, DONE, LIMIT = 0, 8, 16  # the next ticket, the parts that are done, the end of the tickets
STOPPED, START = 17, 18  # whether helpers return; the first ticket of the product
(FORMAT, BITS, BYTES_OF_INPUT, SCALES, X, Y, INPUTS, STARTS, TOTALS, ROWS, COLUMNS, TOKENS, GIVEN, TILES, STACK) = (
    range(24, 39)
)
COMPUTE = 39  # the address of `compute`: loops that called it by its name would each compile it again
BOARD = 40
SPINS = 200  # looks at the board between two offers of the core to other threads

LOOP = {"nogil": True, "fastmath": {"contract", "nsz", "arcp", "reassoc"}}
yields = types.ExternalFunction("sched_yield", types.int32()) if hasattr(os, "sched_yield") else njit()(lambda: 0)


# -- atomics and addresses, which Numba lacks -------------------------------------------------------------------------
INT64 = ir.IntType(64)


@intrinsic
def load_atomic(typing, address):
    def generate(context, builder, signature, arguments):
        return builder.load_atomic(builder.inttoptr(arguments[0], INT64.as_pointer()), "acquire", 8)

    return types.int64(types.intp), generate


@intrinsic
def add_atomic(typing, address, value):
    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "acq_rel")

    return types.int64(types.intp, types.int64), generate


@intrinsic
def exchanged(typing, address, old, new):
    """Whether `old` was there, and `new` is now."""

    def generate(context, builder, signature, arguments):
        address, old, new = arguments
        pointer = builder.inttoptr(address, INT64.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, old, new, "acq_rel", "acquire"), 1)

    return types.boolean(types.intp, types.int64, types.int64), generate


@intrinsic
def pointer(typing, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), generate


@njit(forceinline=True, **LOOP)
def array_at(address, shape, dtype):
    """A view of contiguous numbers at an address."""
    return carray(pointer(address), shape, dtype)


# -- a tile's sums, in vectors: Numba's own loops keep them in memory -------------------------------------------------
WORD, SINGLE = ir.IntType(32), ir.FloatType()
WORDS, SINGLES = ir.VectorType(WORD, LANES), ir.VectorType(SINGLE, LANES)


def load(builder, base, offset, type, align=None):
    """What lies `offset` bytes behind an address; a number's alignment is its size, a vector's is not known."""
    place = builder.add(base, ir.Constant(base.type, offset))
    return builder.load(builder.inttoptr(place, type.as_pointer()), align=align)


def widened(builder, format, base, vector):
    """The float32 of a vector of a tile's row; int4's are too large by OFFSETS: such bits need no conversion."""
    if format == "bfloat16":
        wide = load(builder, base, 2 * LANES * vector, ir.VectorType(ir.IntType(16), LANES), 2)
        return builder.bitcast(builder.shl(builder.zext(wide, WORDS), ir.Constant(WORDS, [16] * LANES)), SINGLES)
    if format == "int8":
        wide = load(builder, base, LANES * vector, ir.VectorType(ir.IntType(8), LANES), 1)
        return builder.sitofp(builder.sext(wide, WORDS), SINGLES)
    # 256 + q has q in its bits 15 to 18, and 16 + q in its bits 19 to 22: one shift serves both halves of a vector.
    words = load(builder, base, 0, ir.VectorType(WORD, WORDS_OF_INT4), 4)
    twice = builder.shuffle_vector(words, words, ir.Constant(WORDS, [*range(WORDS_OF_INT4)] * 2))
    shift = 15 - 8 * vector
    amount = ir.Constant(WORDS, [abs(shift)] * LANES)
    moved = builder.shl(twice, amount) if shift > 0 else builder.lshr(twice, amount)
    masks, exponents = (
        ir.Constant(WORDS, [first] * WORDS_OF_INT4 + [second] * WORDS_OF_INT4)
        for first, second in ((0xF << 15, 0xF << 19), (0x43800000, 0x41800000))
    )
    return builder.bitcast(builder.or_(builder.and_(moved, masks), exponents), SINGLES)


def everywhere(builder, value):
    one = builder.insert_element(ir.Constant(SINGLES, ir.Undefined), value, ir.Constant(WORD, 0))
    return builder.shuffle_vector(one, ir.Constant(SINGLES, ir.Undefined), ir.Constant(WORDS, [0] * LANES))


def fused_multiply_add(builder, *vectors):
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(SINGLES, [SINGLES] * 3), f"llvm.fma.v{LANES}f32"
    )
    return builder.call(fma, vectors)


def prefetch(builder, base, format):
    """Asks for an input's numbers in a tile, to read, for all levels of the cache."""
    signature = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), WORD, WORD, WORD])
    ask = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0i8")
    for line in range(0, BYTES[format], CACHE_LINE):
        place = builder.inttoptr(builder.add(base, ir.Constant(base.type, line)), ir.IntType(8).as_pointer())
        builder.call(ask, [place, ir.Constant(WORD, 0), ir.Constant(WORD, 3), ir.Constant(WORD, 1)])


WAYS = ((1, False), (1, True), (SIDE, False))  # tokens that are summed side by side; whether some inputs are read
ALL, SOME, ALL_OF_SIDE = range(len(WAYS))


@intrinsic
def add_sums(typing, variant, tile, scales, x, columns, inputs, first, last, totals, to):
    """``to [tokens, TILE] += scales (sum of x[k] W[k] - totals OFFSETS)``; `variant` is a format's code * 3 + a way.

    The sum is over the inputs k from `first` up to `last`, or over inputs[first:last]. x [tokens, columns] and
    totals [tokens] are float32. Only int4 has OFFSETS, and as totals the sums of x.
    """

    def generate(context, builder, signature, arguments):
        variant, *others = arguments
        end = builder.append_basic_block()
        switch = builder.switch(variant, end)
        for format in BYTES:
            for way, (tokens, some) in enumerate(WAYS):
                case = builder.append_basic_block()
                switch.add_case(ir.Constant(INT64, len(WAYS) * CODES[format] + way), case)
                builder.position_at_end(case)
                TileSums(builder, format, tokens, some, *others).add()
                builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 10), generate


class TileSums:
    """Writes the code of `add_sums` for one format and one way; the addresses and numbers are LLVM's values."""

    def __init__(self, builder, format, tokens, some, tile, scales, x, columns, inputs, first, last, totals, to):
        self.builder, self.format, self.tokens, self.some = builder, format, tokens, some
        self.tile, self.scales, self.inputs, self.totals, self.to = tile, scales, inputs, totals, to
        self.first, self.last = first, last
        self.rows = [self.element(x, builder.mul(columns, ir.Constant(INT64, n)), 4) for n in range(tokens)]

    def element(self, base, n, size):
        return self.builder.add(base, self.builder.mul(n, ir.Constant(INT64, size)))

    def add(self):
        together = VECTORS if self.tokens == 1 else SIDE_VECTORS
        builder = self.builder
        for group in range(0, VECTORS, together):
            sums = {}
            for token in range(self.tokens):
                for vector in range(group, group + together):
                    sums[token, vector] = cgutils.alloca_once(builder, SINGLES)
                    builder.store(self.start(token), sums[token, vector])
            with cgutils.for_range_slice(builder, self.first, self.last, ir.Constant(INT64, 1)) as (n, _):
                self.add_input(n, sums)
            for (token, vector), place in sums.items():
                offset = 4 * (TILE * token + LANES * vector)
                before, factor = load(builder, self.to, offset, SINGLES, 4), self.scale(vector)
                found = fused_multiply_add(builder, builder.load(place), factor, before)
                target = builder.add(self.to, ir.Constant(INT64, offset))
                builder.store(found, builder.inttoptr(target, SINGLES.as_pointer()), align=4)

    def start(self, token):
        if self.format != "int4":
            return ir.Constant(SINGLES, [0.0] * LANES)
        total = everywhere(self.builder, load(self.builder, self.totals, 4 * token, SINGLE))
        return self.builder.fmul(total, ir.Constant(SINGLES, [-offset for offset in OFFSETS]))

    def scale(self, vector):
        """int8 has a scale for every row, int4 one for every row and block, in bfloat16."""
        if self.format == "bfloat16":
            return ir.Constant(SINGLES, [1.0] * LANES)
        if self.format == "int8":
            return load(self.builder, self.scales, 4 * LANES * vector, SINGLES, 4)
        return widened(self.builder, "bfloat16", self.scales, vector)

    def listed(self, n, ahead):
        return self.builder.sext(load(self.builder, self.element(self.inputs, n, 4), 4 * ahead, WORD), INT64)

    def add_input(self, n, sums):
        builder, format, later = self.builder, self.format, None
        k = self.listed(n, 0) if self.some else n
        if self.some:
            later = self.listed(n, SOME_AHEAD)
        elif self.tokens == 1 and format in AHEAD:
            later = builder.add(k, ir.Constant(INT64, AHEAD[format]))
        if later is not None:
            prefetch(builder, self.element(self.tile, later, BYTES[format]), format)
        numbers = [everywhere(builder, load(builder, self.element(row, k, 4), 0, SINGLE)) for row in self.rows]
        base = self.element(self.tile, k, BYTES[format])
        wide = {vector: widened(builder, format, base, vector) for _, vector in sums}
        for (token, vector), place in sums.items():
            builder.store(fused_multiply_add(builder, wide[vector], numbers[token], builder.load(place)), place)


# -- a part of a product ----------------------------------------------------------------------------------------------
@njit(**LOOP)
def add_blocks(board, tile, row, side, first, last, to):
    """to [T, TILE] += the products of a tile and x [row : row + T], over inputs of blocks from `first` up to `last`.

    T is SIDE or, with a list of inputs where few are not zero, 1.
    """
    format, columns, blocks = board[FORMAT], board[COLUMNS], (board[COLUMNS] + BLOCK - 1) // BLOCK
    x, bits, way = board[X] + 4 * row * columns, board[BITS] + board[BYTES_OF_INPUT] * columns * tile, ALL_OF_SIDE
    inputs = board[INPUTS] + 4 * row * (columns + SOME_AHEAD)
    starts = array_at(board[STARTS] + 4 * row * (blocks + 1), (blocks + 1,), np.int32)
    if not side:
        way = SOME if starts[-1] >= 0 else ALL
    variant, scales, totals = len(WAYS) * format + way, board[SCALES] + 4 * TILE * tile, board[TOTALS] + 4 * row
    if format != INT4:
        begin, end = BLOCK * first, min(columns, BLOCK * last)
        if way == SOME:
            begin, end = starts[first], starts[last]
        add_sums(variant, bits, scales, x, columns, inputs, begin, end, totals, to)
        return
    scales, next_totals = board[SCALES] + 2 * TILE * tile * blocks, 4 * board[STACK] * board[GIVEN]
    for block in range(first, last):
        begin, end = BLOCK * block, min(columns, BLOCK * (block + 1))
        if way == SOME:
            begin, end = starts[block], starts[block + 1]
        its = scales + 2 * TILE * block
        add_sums(variant, bits, its, x, columns, inputs, begin, end, totals + next_totals * block, to)


@njit(**LOOP)
def multiply_tile(board, part):
    """A tile of a product, for up to CHUNK tokens."""
    rows, tokens, given, tiles, stack = board[ROWS], board[TOKENS], board[GIVEN], board[TILES], board[STACK]
    tile, token = part % (stack * tiles), part // (stack * tiles) * CHUNK
    matrix, m, blocks = tile // tiles, tile % tiles * TILE, (board[COLUMNS] + BLOCK - 1) // BLOCK
    count, row, side = min(CHUNK, given - token), matrix * given + token, SIDE if tokens > FEW else 1
    sums, depth = np.zeros((count, TILE), np.float32), DEPTH if tokens > FEW else blocks
    for block in range(0, blocks, depth):
        for n in range(0, count, side):
            last = min(blocks, block + depth)
            add_blocks(board, tile, row + n, tokens > FEW, block, last, sums.ctypes.data + 4 * TILE * n)
    y = array_at(board[Y], (stack, tokens, rows), np.float32)
    for n in range(min(CHUNK, tokens - token)):
        for r in range(min(TILE, rows - m)):
            y[matrix, token + n, m + r] = sums[n, r]


@njit(**LOOP)
def multiply_rows(board, tile):
    """TILE rows of a product of float32, for all its tokens."""
    rows, columns, tokens, tiles = board[ROWS], board[COLUMNS], board[TOKENS], board[TILES]
    which, row = tile // tiles, tile % tiles * TILE
    w = array_at(board[BITS], (board[STACK], rows, columns), np.float32)[which]
    x = array_at(board[X], (board[STACK], tokens, columns), np.float32)[which]
    y = array_at(board[Y], (board[STACK], tokens, rows), np.float32)[which]
    for m in range(row, min(rows, row + TILE)):
        for token in range(tokens):
            total = np.float32(0)
            for k in range(columns):
                total += w[m, k] * x[token, k]
            y[token, m] = total


@cfunc(types.void(types.intp, types.intp))
def compute(address, part):
    """A part of the product on the board at an address."""
    board = array_at(address, (BOARD,), np.int64)
    if board[FORMAT] == FLOAT32:
        multiply_rows(board, part)
    else:
        multiply_tile(board, part)


@intrinsic
def call(typing, address, arguments):
    """A function of integers that is at an address."""

    def generate(context, builder, signature, values):
        address, arguments = values
        numbers = cgutils.unpack_tuple(builder, arguments)
        function = ir.FunctionType(ir.VoidType(), [number.type for number in numbers])
        builder.call(builder.inttoptr(address, function.as_pointer()), numbers)
        return context.get_dummy_value()

    return types.void(types.intp, types.UniTuple(types.intp, len(arguments))), generate


# -- threads ----------------------------------------------------------------------------------------------------------
@njit(**LOOP)
def claimed(board):
    """The number of a part for this thread to compute; -1 where there is none now."""
    address = board.ctypes.data
    while True:
        limit, ticket = load_atomic(address + 8 * LIMIT), load_atomic(address + 8 * NEXT)
        if ticket >= limit:
            return -1
        if exchanged(address + 8 * NEXT, ticket, ticket + 1):
            return ticket - board[START]


@njit(**LOOP)
def work(board):
    """Computes the parts that are left, and returns whether there was one."""
    part = claimed(board)
    found = part >= 0
    while part >= 0:
        call(board[COMPUTE], (board.ctypes.data, part))
        add_atomic(board.ctypes.data + 8 * DONE, 1)
        part = claimed(board)
    return found


@njit(**LOOP)
def idle(looks):
    """Counts one more look at the board that found nothing, and offers the core to other threads now and then."""
    if looks % SPINS == SPINS - 1:
        yields()
    return looks + 1


def new_board():
    board = np.zeros(BOARD, np.int64)
    board[COMPUTE], board[STOPPED] = compute.address, 1
    return board


@njit(**LOOP)
def assist(board):
    """Computes parts of every product on the board until it is stopped."""
    looks = 0
    while not load_atomic(board.ctypes.data + 8 * STOPPED):
        looks = 0 if work(board) else idle(looks)


# Compiled here, not by the threads that run it: a process that ends would not wait for them.
assist.compile((types.int64[::1],))


@njit(**LOOP)
def share(board, parts):
    """Computes the product on the board, together with the threads that look at it."""
    address, looks = board.ctypes.data, 0
    board[START] = board[LIMIT]
    limit = board[START] + parts
    add_atomic(address + 8 * LIMIT, parts)  # from here on other threads claim tickets
    work(board)
    while load_atomic(address + 8 * DONE) < limit:
        looks = idle(looks)


# -- a product --------------------------------------------------------------------------------------------------------
@njit(**LOOP)
def list_inputs(x, inputs, starts):
    """Lists the inputs that are not zero of x [K] where these are few, and where each block of them begins. Behind the
    list are inputs to prefetch. Where they are not few, starts[-1] is -1.
    """
    n, starts[-1] = 0, -1
    for k in range(len(x)):
        n += x[k] != 0
    if n > FEW_INPUTS * len(x):
        return
    n = 0
    for k in range(len(x)):
        if k % BLOCK == 0:
            starts[k // BLOCK] = n
        inputs[n] = k
        n += x[k] != 0
    starts[-1] = n
    for k in range(n, n + SOME_AHEAD):
        inputs[k] = 0


@njit(**LOOP)
def add_totals(x, totals):
    """totals [blocks, T] += the sums of x [T, K] over each block of inputs."""
    for block in range(totals.shape[0]):
        for token in range(x.shape[0]):
            total = np.float32(0)
            for k in range(BLOCK * block, min(x.shape[1], BLOCK * (block + 1))):
                total += x[token, k]
            totals[block, token] += total


@cfunc(types.void(*(types.intp,) * 10))
def multiply(board, format, bits, scales, x, y, S, T, K, M):
    """y [S, T, M] = x [S, T, K] W^T, with all threads that look at the board. Arrays are given by their addresses."""
    board, read = array_at(board, (BOARD,), np.int64), array_at(x, (S * T, K), np.float32)
    blocks, given, listed = (K + BLOCK - 1) // BLOCK, T, 0
    if format != FLOAT32 and T <= FEW:
        listed = S * T
    elif format != FLOAT32:
        given = (T + SIDE - 1) // SIDE * SIDE
        filled = np.zeros((S * given, K), np.float32)
        for s in range(S):
            for t in range(T):
                for k in range(K):
                    filled[s * given + t, k] = read[s * T + t, k]
        read = filled
    inputs, starts = np.empty((listed, K + SOME_AHEAD), np.int32), np.empty((listed, blocks + 1), np.int32)
    for row in range(listed):
        list_inputs(read[row], inputs[row], starts[row])
    totals = np.zeros((blocks if format == INT4 else 0, S * given), np.float32)
    add_totals(read, totals)
    board[FORMAT], board[BITS], board[SCALES], board[X], board[Y] = format, bits, scales, read.ctypes.data, y
    board[BYTES_OF_INPUT] = 2 * TILE if format == BFLOAT16 else TILE if format == INT8 else TILE // 2
    board[INPUTS], board[STARTS], board[TOTALS] = inputs.ctypes.data, starts.ctypes.data, totals.ctypes.data
    board[ROWS], board[COLUMNS], board[TOKENS], board[GIVEN], board[STACK] = M, K, T, given, S
    board[TILES] = (M + TILE - 1) // TILE
    share(board, S * board[TILES] * (1 if format == FLOAT32 else (T + CHUNK - 1) // CHUNK))
    board[GIVEN] = inputs.size + starts.size + totals.size + read.size  # Numba frees an array after its last use


@njit(**LOOP)
def product_at(address, board, format, bits, scales, x, y):
    """`multiply` for loops in another module: Numba's cache of theirs would not see that this one has changed, so that
    they are told its address. x and y are contiguous.
    """
    S, T, K = x.shape
    call(address, (board.ctypes.data, format, bits, scales, x.ctypes.data, y.ctypes.data, S, T, K, y.shape[2]))
