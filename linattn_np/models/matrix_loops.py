"""Products y = x W^T in Numba, with matrices W [M, K] as the module `matrices` stores them.

An *input* is a number of x; it is multiplied by a column of W. W in few bits is stored in tiles of TILE rows, in which
the numbers of one column are neighbours. W in float32 is stored by rows; these loops multiply it by few tokens, BLAS by
more (`matrices.MOST_BY_LOOPS`).

The sums of a tile's rows stay in registers while its columns are read. Up to ONE_BY_ONE tokens read a tile one by one;
a token whose inputs are mostly zero skips their columns. More tokens read a tile TOKENS_AT_ONCE at a time, so that the
tile's numbers are converted to float32 once for all of them.

Several threads share products that do not depend on each other. The caller publishes them on a *board*, an array of
int64, with a range of *tickets*, one for each part of a product. Every thread that looks at the board claims tickets,
and the caller returns when all parts are done. The caller does not wait for a thread that has claimed nothing. A claim
takes several tickets while many are left: the board is in another core's cache, and a claim costs the time of reading
20 KB of a matrix. One thread calls `multiply`, all others `assist`.

A product has S matrices [M, K] and T tokens. Loops get arrays by their addresses: callers guarantee shapes, dtypes and
C order, and keep the arrays until the loop returns.
"""

import os

import numpy as np
from llvmlite import binding, ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..numba_cache import cfunc, njit

TILE = 64  # rows of W in a tile
LANES = 16  # float32 numbers in a vector: one register of AVX-512, two of other CPUs
VECTORS = TILE // LANES  # vectors of a tile's column
WORDS_OF_INT4 = 8  # 32-bit words of a tile's column in int4
# int4 stores q = w / scale + 8. Its bits are not converted, but read as the float32 number 256 + q in the first half of
# a vector, and 16 + q in the second. OFFSETS are the differences of these numbers from q - 8.
OFFSETS = [264.0] * WORDS_OF_INT4 + [24.0] * WORDS_OF_INT4
BLOCK = 32  # columns that share a scale in int4
CODES = {"bfloat16": 0, "int8": 1, "int4": 2, "float32": 3}
INT4, FLOAT32 = CODES["int4"], CODES["float32"]
BYTES_BY_CODE = (2 * TILE, TILE, TILE // 2, 0)  # of a tile's column; float32 has no tiles
BYTES = dict(zip(CODES, BYTES_BY_CODE[:-1]))  # {format in tiles: the same}
assert (TILE, LANES, BLOCK) == (64, 16, 32)  # `widened` shifts int4's words by 15, 7, -1 and -9 bits for four vectors
# While column k is read, column k + PREFETCHED is prefetched. In bfloat16 the processor does this by itself; in fewer
# bits its own prefetches come too late.
PREFETCHED = {"int8": 48, "int4": 96}
PREFETCHED_OF_LIST = 16  # the same distance in a list of columns, whose order the processor cannot foresee
CACHE_LINE = 64
ONE_BY_ONE = 4  # up to so many tokens read a tile one after the other
AVX512 = binding.get_host_cpu_features().get("avx512f")
# The sums of this many tokens, for this many vectors of a column, fit in the registers.
TOKENS_AT_ONCE, VECTORS_AT_ONCE = (10, 2) if AVX512 else (6, 1)
DEPTH = 16  # all tokens of a part read DEPTH blocks of columns, which then are in the cache, before the next blocks
CHUNK = 20 * TOKENS_AT_ONCE  # tokens of one part of a product
CLAIM = 2  # a claim takes the tickets that are left, divided by CLAIM times the number of threads
PART_OF_FLOAT32 = 1 << 14  # numbers of W in a part of a product in float32, in whole rows; at most TILE rows
SPARSE = 0.2  # if at most this share of a token's inputs is not zero, it is faster to skip the zeros

# The board is an int64 array. Its indices: numbers that threads change at the same time have cache lines of their own.
# NEXT and LIMIT only grow, so that a thread that has read old values cannot claim a ticket of later products.
NEXT = 0  # the next ticket
DONE = 8  # the number of parts that are done, of all calls
LIMIT = 16  # the end of tickets: only those below it may be claimed
STOPPED = 17  # 1 if helpers must return
START = 18  # the first ticket of the products
THREADS = 19  # the number of threads that may look at the board
COMPUTE = 20  # the address of `compute`: a loop that called it by its name would compile it again
PRODUCTS, COUNT = 21, 22  # the address of the products' descriptions, and how many there are
BOARD = COUNT + 1  # numbers of a board

# The description of a product is an int64 array, too. `multiply_at` sets the first nine numbers, `multiply` the others.
FORMAT = 0  # one of CODES
BITS, SCALES = 1, 2  # the addresses of `Matrix.bits` and `Matrix.scales`
X, Y = 3, 4  # the addresses of x [STACK, TOKENS, COLUMNS] and of the result [STACK, TOKENS, ROWS]
STACK = 5  # the number of matrices, which have the same size
TOKENS, COLUMNS, ROWS = 6, 7, 8  # T, K, M
BYTES_OF_INPUT = 9  # of a tile's column, which an input is multiplied by
LISTS = 10  # the number of rows of x with a list of inputs
PADDED_TOKENS = 11  # TOKENS, rounded up to what a tile is read for at a time; `prepare` then makes X a padded copy
INPUTS, STARTS = 12, 13  # the addresses of the lists, see `list_inputs`
TOTALS = 14  # for int4 the address of the sums of x over each block, see `add_totals`
TILE_ROWS = 15  # rows of W in a part: TILE, or in float32 maybe less
TILES, PARTS = 16, 17  # parts of one matrix, for one CHUNK of tokens; of the whole product
PRODUCT = PARTS + 1  # numbers of a description

LOOKS = 200  # a thread yields its core to other threads after this many looks at a board without a part for it

LOOP_OPTIONS = {"nogil": True, "fastmath": {"contract", "nsz", "arcp", "reassoc"}}
yield_core = types.ExternalFunction("sched_yield", types.int32()) if hasattr(os, "sched_yield") else njit()(lambda: 0)


# -- atomics and addresses, which Numba lacks -------------------------------------------------------------------------
INT64 = ir.IntType(64)


@intrinsic
def load_atomic(typing, address):
    """The int64 at an address, read atomically."""

    def generate(context, builder, signature, arguments):
        return builder.load_atomic(builder.inttoptr(arguments[0], INT64.as_pointer()), "acquire", 8)

    return types.int64(types.intp), generate


@intrinsic
def add_atomic(typing, address, value):
    """Adds `value` to the int64 at an address, atomically; returns the number before."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "acq_rel")

    return types.int64(types.intp, types.int64), generate


@intrinsic
def compare_exchange_atomic(typing, address, old, new):
    """Replaces the int64 at an address by `new` if it is `old`, atomically; returns whether it did."""

    def generate(context, builder, signature, arguments):
        address, old, new = arguments
        pointer = builder.inttoptr(address, INT64.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, old, new, "acq_rel", "acquire"), 1)

    return types.boolean(types.intp, types.int64, types.int64), generate


@intrinsic
def pointer_to(typing, address):
    """An address as a pointer, for `carray`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), generate


@njit(forceinline=True, **LOOP_OPTIONS)
def array_at(address, shape, dtype):
    """A view of contiguous numbers at an address."""
    return carray(pointer_to(address), shape, dtype)


# -- the sums of a tile, written in LLVM's language: Numba's own loops would keep them in memory, not in registers ----
WORD, SINGLE = ir.IntType(32), ir.FloatType()
WORDS, SINGLES = ir.VectorType(WORD, LANES), ir.VectorType(SINGLE, LANES)


def load(builder, base, offset, type, align=None):
    """Loads a value of an LLVM `type`, `offset` bytes after the address `base`. `align`: the alignment in bytes, which
    must be given for vectors."""
    place = builder.add(base, ir.Constant(base.type, offset))
    return builder.load(builder.inttoptr(place, type.as_pointer()), align=align)


def widened(builder, format, base, vector):
    """Vector number `vector` of a tile's column at the address `base`, as LANES float32 numbers; in int4 too large by
    OFFSETS."""
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


def broadcast(builder, value):
    """A vector of LANES times the same float32 number."""
    one = builder.insert_element(ir.Constant(SINGLES, ir.Undefined), value, ir.Constant(WORD, 0))
    return builder.shuffle_vector(one, ir.Constant(SINGLES, ir.Undefined), ir.Constant(WORDS, [0] * LANES))


def fused_multiply_add(builder, *vectors):
    """a * b + c of three vectors."""
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(SINGLES, [SINGLES] * 3), f"llvm.fma.v{LANES}f32"
    )
    return builder.call(fma, vectors)


def prefetch(builder, base, format):
    """Prefetches a tile's column at the address `base`, for reading, to all levels of the cache."""
    signature = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), WORD, WORD, WORD])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0i8")
    read, all_levels, data = (ir.Constant(WORD, number) for number in (0, 3, 1))
    for line in range(0, BYTES[format], CACHE_LINE):
        address = builder.inttoptr(builder.add(base, ir.Constant(base.type, line)), ir.IntType(8).as_pointer())
        builder.call(function, [address, read, all_levels, data])


# The loops that add up a tile's products: (tokens at a time, whether only listed columns are read), in this order.
TILE_LOOPS = ((1, False), (1, True), (TOKENS_AT_ONCE, False))
ALL, LISTED, ALL_OF_SEVERAL = range(len(TILE_LOOPS))


@intrinsic
def add_sums(typing, variant, tile, scales, x, columns, inputs, first, last, totals, sums):
    """``sums [tokens, TILE] += scales * (sum over k of x[:, k] W[:, k] - totals * OFFSETS)`` for one tile.

    variant : the format's code * len(TILE_LOOPS) + ALL, LISTED or ALL_OF_SEVERAL
    first, last : the columns k are first ... last - 1, or for LISTED inputs[first:last] (int32)
    x, totals : float32 [tokens, columns], and [tokens]: the sums of x over k, for int4 alone, which has OFFSETS
    All arrays are given by their addresses.
    """

    def generate(context, builder, signature, arguments):
        variant, *others = arguments
        end = builder.append_basic_block()
        switch = builder.switch(variant, end)
        for format in BYTES:
            for index, (tokens, is_listed) in enumerate(TILE_LOOPS):
                case = builder.append_basic_block()
                switch.add_case(ir.Constant(INT64, len(TILE_LOOPS) * CODES[format] + index), case)
                builder.position_at_end(case)
                TileSums(builder, format, tokens, is_listed, *others).add()
                builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 10), generate


class TileSums:
    """Writes the code of `add_sums` for one format and one of TILE_LOOPS. Arguments from `tile` on are LLVM values."""

    def __init__(self, builder, format, tokens, is_listed, tile, scales, x, columns, inputs, first, last, totals, sums):
        self.builder, self.format, self.tokens, self.is_listed = builder, format, tokens, is_listed
        self.tile, self.scales, self.inputs, self.totals, self.sums = tile, scales, inputs, totals, sums
        self.first, self.last = first, last
        self.rows = [self.element(x, builder.mul(columns, ir.Constant(INT64, n)), 4) for n in range(tokens)]

    def element(self, base, n, size):
        """The address of element n of an array at `base` with elements of `size` bytes."""
        return self.builder.add(base, self.builder.mul(n, ir.Constant(INT64, size)))

    def add(self):
        """Writes the code at the builder's position."""
        vectors_at_once = VECTORS if self.tokens == 1 else VECTORS_AT_ONCE
        builder = self.builder
        for group in range(0, VECTORS, vectors_at_once):
            registers = {}  # (token, vector) -> the variable of its sum, which LLVM keeps in a register
            for token in range(self.tokens):
                for vector in range(group, group + vectors_at_once):
                    registers[token, vector] = cgutils.alloca_once(builder, SINGLES)
                    builder.store(self.initial_sum(token), registers[token, vector])
            with cgutils.for_range_slice(builder, self.first, self.last, ir.Constant(INT64, 1)) as (n, _):
                self.add_column(n, registers)
            for (token, vector), register in registers.items():
                offset = 4 * (TILE * token + LANES * vector)
                before, factor = load(builder, self.sums, offset, SINGLES, 4), self.scale(vector)
                total = fused_multiply_add(builder, builder.load(register), factor, before)
                target = builder.add(self.sums, ir.Constant(INT64, offset))
                builder.store(total, builder.inttoptr(target, SINGLES.as_pointer()), align=4)

    def initial_sum(self, token):
        """The vector with which a sum begins: -totals * OFFSETS for int4, else 0."""
        if self.format != "int4":
            return ir.Constant(SINGLES, [0.0] * LANES)
        total = broadcast(self.builder, load(self.builder, self.totals, 4 * token, SINGLE))
        return self.builder.fmul(total, ir.Constant(SINGLES, [-offset for offset in OFFSETS]))

    def scale(self, vector):
        """The vector of the rows' scales: 1 for bfloat16; int8 has a float32 scale for every row; int4 a bfloat16 scale
        for every row and block."""
        if self.format == "bfloat16":
            return ir.Constant(SINGLES, [1.0] * LANES)
        if self.format == "int8":
            return load(self.builder, self.scales, 4 * LANES * vector, SINGLES, 4)
        return widened(self.builder, "bfloat16", self.scales, vector)

    def listed(self, n, ahead):
        """inputs[n + ahead], the number of a column."""
        return self.builder.sext(load(self.builder, self.element(self.inputs, n, 4), 4 * ahead, WORD), INT64)

    def add_column(self, n, registers):
        """Adds the products of column n, or inputs[n], to the sums."""
        builder, format, prefetched = self.builder, self.format, None
        k = self.listed(n, 0) if self.is_listed else n
        if self.is_listed:
            prefetched = self.listed(n, PREFETCHED_OF_LIST)
        elif self.tokens == 1 and format in PREFETCHED:
            prefetched = builder.add(k, ir.Constant(INT64, PREFETCHED[format]))
        if prefetched is not None:
            prefetch(builder, self.element(self.tile, prefetched, BYTES[format]), format)
        numbers = [broadcast(builder, load(builder, self.element(row, k, 4), 0, SINGLE)) for row in self.rows]
        base = self.element(self.tile, k, BYTES[format])
        column = {vector: widened(builder, format, base, vector) for _, vector in registers}
        for (token, vector), register in registers.items():
            total = fused_multiply_add(builder, column[vector], numbers[token], builder.load(register))
            builder.store(total, register)


# -- a part of a product ----------------------------------------------------------------------------------------------
@njit(**LOOP_OPTIONS)
def blocks_of(product):
    """The number of blocks of columns."""
    return (product[COLUMNS] + BLOCK - 1) // BLOCK


@njit(**LOOP_OPTIONS)
def add_blocks(product, tile, row, several_tokens, first, last, sums):
    """Adds the products of tile number `tile` and rows row ... row + N - 1 of x to the sums [N, TILE] at the address
    `sums`, over the blocks of columns first ... last - 1.

    N is TOKENS_AT_ONCE if `several_tokens`, else 1. One token reads the listed columns alone, if its row has a list:
    its starts[-1] is then at least 0, see `list_inputs`.
    """
    format, columns, blocks = product[FORMAT], product[COLUMNS], blocks_of(product)
    x, bits = product[X] + 4 * row * columns, product[BITS] + product[BYTES_OF_INPUT] * columns * tile
    inputs = product[INPUTS] + 4 * row * (columns + PREFETCHED_OF_LIST)
    starts = array_at(product[STARTS] + 4 * row * (blocks + 1), (blocks + 1,), np.int32)
    loop = ALL_OF_SEVERAL
    if not several_tokens:
        loop = LISTED if starts[-1] >= 0 else ALL
    variant, totals = len(TILE_LOOPS) * format + loop, product[TOTALS] + 4 * row
    scales, at_once = product[SCALES] + 4 * TILE * tile, last - first  # blocks at once: all that share scales
    bytes_of_scales, bytes_of_totals = 0, 0  # of one block
    if format == INT4:
        scales, at_once = product[SCALES] + 2 * TILE * tile * blocks, 1
        bytes_of_scales, bytes_of_totals = 2 * TILE, 4 * product[STACK] * product[PADDED_TOKENS]
    for block in range(first, last, at_once):
        begin, end = BLOCK * block, min(columns, BLOCK * (block + at_once))
        if loop == LISTED:
            begin, end = starts[block], starts[block + at_once]
        scales_of_block, totals_of_block = scales + bytes_of_scales * block, totals + bytes_of_totals * block
        add_sums(variant, bits, scales_of_block, x, columns, inputs, begin, end, totals_of_block, sums)


@njit(**LOOP_OPTIONS)
def multiply_tile(product, part):
    """Computes part number `part` of a product in few bits: one tile, for up to CHUNK tokens. Parts are numbered chunk
    by chunk, in a chunk matrix by matrix, in a matrix tile by tile."""
    rows, tokens, padded = product[ROWS], product[TOKENS], product[PADDED_TOKENS]
    tiles, stack = product[TILES], product[STACK]
    tile, first_token = part % (stack * tiles), part // (stack * tiles) * CHUNK  # tile: counted over all matrices
    matrix, first_row = tile // tiles, tile % tiles * TILE
    blocks = blocks_of(product)
    count, row_of_x = min(CHUNK, padded - first_token), matrix * padded + first_token  # x is [STACK * padded, COLUMNS]
    several = tokens > ONE_BY_ONE
    at_once, depth = (TOKENS_AT_ONCE, DEPTH) if several else (1, blocks)
    sums = np.zeros((count, TILE), np.float32)
    for block in range(0, blocks, depth):
        last = min(blocks, block + depth)
        for n in range(0, count, at_once):
            add_blocks(product, tile, row_of_x + n, several, block, last, sums.ctypes.data + 4 * TILE * n)
    y = array_at(product[Y], (stack, tokens, rows), np.float32)
    for n in range(min(CHUNK, tokens - first_token)):
        for r in range(min(TILE, rows - first_row)):
            y[matrix, first_token + n, first_row + r] = sums[n, r]


@njit(**LOOP_OPTIONS)
def multiply_rows(product, tile):
    """Computes TILE_ROWS rows of a product in float32, for all its tokens."""
    rows, columns, tokens, tiles = product[ROWS], product[COLUMNS], product[TOKENS], product[TILES]
    matrix, first_row = tile // tiles, tile % tiles * product[TILE_ROWS]
    w = array_at(product[BITS], (product[STACK], rows, columns), np.float32)[matrix]
    x = array_at(product[X], (product[STACK], tokens, columns), np.float32)[matrix]
    y = array_at(product[Y], (product[STACK], tokens, rows), np.float32)[matrix]
    for m in range(first_row, min(rows, first_row + product[TILE_ROWS])):
        for token in range(tokens):
            total = np.float32(0)
            for k in range(columns):
                total += w[m, k] * x[token, k]
            y[token, m] = total


@cfunc(types.void(types.intp, types.intp))
def compute(address, part):
    """Computes part number `part` of the products on the board at an address."""
    board = array_at(address, (BOARD,), np.int64)
    products = array_at(board[PRODUCTS], (board[COUNT], PRODUCT), np.int64)
    n = 0
    while part >= products[n, PARTS]:
        part -= products[n, PARTS]
        n += 1
    if products[n, FORMAT] == FLOAT32:
        multiply_rows(products[n], part)
    else:
        multiply_tile(products[n], part)


@intrinsic
def call_at(typing, address, arguments):
    """Calls the compiled function at an address with a tuple of integers."""

    def generate(context, builder, signature, values):
        address, arguments = values
        numbers = cgutils.unpack_tuple(builder, arguments)
        function = ir.FunctionType(ir.VoidType(), [number.type for number in numbers])
        builder.call(builder.inttoptr(address, function.as_pointer()), numbers)
        return context.get_dummy_value()

    return types.void(types.intp, types.UniTuple(types.intp, len(arguments))), generate


# -- threads ----------------------------------------------------------------------------------------------------------
@njit(**LOOP_OPTIONS)
def claim_parts(board):
    """Claims parts of the products for this thread; returns the first one's number, and how many: 0 if none is left."""
    address = board.ctypes.data
    while True:
        limit, ticket = load_atomic(address + 8 * LIMIT), load_atomic(address + 8 * NEXT)
        if ticket >= limit:
            return 0, 0
        count = max(1, (limit - ticket) // (CLAIM * board[THREADS]))
        if compare_exchange_atomic(address + 8 * NEXT, ticket, ticket + count):
            return ticket - board[START], count


@njit(**LOOP_OPTIONS)
def compute_parts(board):
    """Claims and computes parts until none is left; returns whether this thread has computed one."""
    done = 0
    part, count = claim_parts(board)
    while count:
        for n in range(part, part + count):
            call_at(board[COMPUTE], (board.ctypes.data, n))
        done += count
        part, count = claim_parts(board)
    if done:
        add_atomic(board.ctypes.data + 8 * DONE, done)
    return done > 0


@njit(**LOOP_OPTIONS)
def count_look(looks):
    """Returns looks + 1, the number of looks at the board without a part; yields the core at every LOOKS-th."""
    if looks % LOOKS == LOOKS - 1:
        yield_core()
    return looks + 1


def new_board():
    """A board without products, on which helpers would return at once."""
    board = np.zeros(BOARD, np.int64)
    board[COMPUTE], board[STOPPED], board[THREADS] = compute.address, 1, 1
    return board


@njit(**LOOP_OPTIONS)
def assist(board):
    """Computes parts of all products on the board until STOPPED is 1. A helper thread runs this."""
    looks = 0
    while not load_atomic(board.ctypes.data + 8 * STOPPED):
        looks = 0 if compute_parts(board) else count_look(looks)


# `assist` is compiled here, not by helpers: a process that ends does not wait for a helper that compiles.
assist.compile((types.int64[::1],))


@njit(**LOOP_OPTIONS)
def compute_together(board, parts):
    """Publishes the board's products, of this many parts; returns when this thread and helpers have computed them."""
    address, looks = board.ctypes.data, 0
    board[START] = board[LIMIT]
    limit = board[START] + parts
    add_atomic(address + 8 * LIMIT, parts)  # from here on other threads claim tickets
    compute_parts(board)
    while load_atomic(address + 8 * DONE) < limit:
        looks = count_look(looks)


# -- a product --------------------------------------------------------------------------------------------------------
@njit(**LOOP_OPTIONS)
def list_inputs(x, inputs, starts):
    """Lists the inputs of x [K] that are not zero, if they are at most the share SPARSE; else starts[-1] becomes -1.

    inputs : [K + PREFETCHED_OF_LIST], gets their indices in x, then zeros, which are prefetched but not read
    starts : [blocks + 1], gets the index in `inputs` at which each block of columns begins, and the end
    """
    n, starts[-1] = 0, -1
    for k in range(len(x)):
        n += x[k] != 0
    if n > SPARSE * len(x):
        return
    n = 0
    for k in range(len(x)):
        if k % BLOCK == 0:
            starts[k // BLOCK] = n
        inputs[n] = k
        n += x[k] != 0
    starts[-1] = n
    for k in range(n, n + PREFETCHED_OF_LIST):
        inputs[k] = 0


@njit(**LOOP_OPTIONS)
def add_totals(x, totals):
    """totals [blocks, T] += the sums of x [T, K] over each block of columns."""
    for block in range(totals.shape[0]):
        for token in range(x.shape[0]):
            total = np.float32(0)
            for k in range(BLOCK * block, min(x.shape[1], BLOCK * (block + 1))):
                total += x[token, k]
            totals[block, token] += total


@njit(**LOOP_OPTIONS)
def set_sizes(product):
    """Sets the sizes that `multiply_at` has not set."""
    format, S, T, K = product[FORMAT], product[STACK], product[TOKENS], product[COLUMNS]
    padded, lists, rows, chunks = T, 0, TILE, (T + CHUNK - 1) // CHUNK
    if format == FLOAT32:
        rows, chunks = min(TILE, max(1, PART_OF_FLOAT32 // max(1, K))), 1
    elif T <= ONE_BY_ONE:
        lists = S * T
    else:
        padded = (T + TOKENS_AT_ONCE - 1) // TOKENS_AT_ONCE * TOKENS_AT_ONCE
    product[PADDED_TOKENS], product[LISTS], product[BYTES_OF_INPUT] = padded, lists, BYTES_BY_CODE[format]
    product[TILE_ROWS], product[TILES] = rows, (product[ROWS] + rows - 1) // rows
    product[PARTS] = S * product[TILES] * chunks


@njit(**LOOP_OPTIONS)
def place(product, address):
    """Places what `prepare` stores: from `address` on, one array after the other. Returns the address after them."""
    S, K, padded, blocks = product[STACK], product[COLUMNS], product[PADDED_TOKENS], blocks_of(product)
    product[INPUTS] = address + (4 * S * padded * K if padded > product[TOKENS] else 0)  # x comes before
    product[STARTS] = product[INPUTS] + 4 * product[LISTS] * (K + PREFETCHED_OF_LIST)
    product[TOTALS] = product[STARTS] + 4 * product[LISTS] * (blocks + 1)
    return product[TOTALS] + (4 * blocks * S * padded if product[FORMAT] == INT4 else 0)


@njit(**LOOP_OPTIONS)
def prepare(product):
    """Computes what all parts of a product read, and stores it in zeros, where `place` says: x with rows of zeros, if
    PADDED_TOKENS is more than TOKENS; the lists of inputs; for int4 the sums of inputs by blocks."""
    S, T, K, padded = product[STACK], product[TOKENS], product[COLUMNS], product[PADDED_TOKENS]
    blocks, listed = blocks_of(product), product[LISTS]
    if padded > T:
        given_x = array_at(product[X], (S, T, K), np.float32)
        product[X] = product[INPUTS] - 4 * S * padded * K
        padded_x = array_at(product[X], (S, padded, K), np.float32)
        for s in range(S):
            for t in range(T):
                for k in range(K):
                    padded_x[s, t, k] = given_x[s, t, k]
    x = array_at(product[X], (S * padded, K), np.float32)
    inputs = array_at(product[INPUTS], (listed, K + PREFETCHED_OF_LIST), np.int32)
    starts = array_at(product[STARTS], (listed, blocks + 1), np.int32)
    for row in range(listed):
        list_inputs(x[row], inputs[row], starts[row])
    if product[FORMAT] == INT4:
        add_totals(x, array_at(product[TOTALS], (blocks, S * padded), np.float32))


@cfunc(types.void(types.intp, types.intp, types.intp))
def multiply(board, products, count):
    """Computes products with all threads that look at the board; `count` descriptions are at the address `products`."""
    board, products = array_at(board, (BOARD,), np.int64), array_at(products, (count, PRODUCT), np.int64)
    parts, size = 0, 0
    for n in range(count):
        set_sizes(products[n])
        size = place(products[n], size)  # as if the memory began at 0
        parts += products[n, PARTS]
    shared = np.zeros(size // 4, np.int32)
    address = shared.ctypes.data
    for n in range(count):
        address = place(products[n], address)
        prepare(products[n])
    board[PRODUCTS], board[COUNT] = products.ctypes.data, count
    compute_together(board, parts)
    board[COUNT] = shared.size  # Numba frees an array after its last use, so this must be used once more


@njit(**LOOP_OPTIONS)
def multiply_at(address, board, matrices, x, y):
    """y[n] = x[n] W[n]^T by `multiply`, whose address is given, for loops of other modules: if they called it by its
    name, Numba's cache of them would not notice a change of `multiply`.

    matrices : a tuple of int64 [4], the `Matrix.description` of each stack of matrices
    x, y : tuples of contiguous float32 arrays [S, T, K] and [S, T, M]
    """
    products = np.empty((len(matrices), PRODUCT), np.int64)
    for n in range(len(matrices)):
        product, matrix = products[n], matrices[n]
        product[FORMAT], product[BITS], product[SCALES] = matrix[0], matrix[1], matrix[2]
        product[X], product[Y], product[ROWS] = x[n].ctypes.data, y[n].ctypes.data, y[n].shape[2]
        product[STACK], product[TOKENS], product[COLUMNS] = x[n].shape
    call_at(address, (board.ctypes.data, products.ctypes.data, len(products)))
    board[COUNT] = products.size  # once more, as in `multiply`
