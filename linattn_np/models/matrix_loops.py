"""Numba's loops over matrices as `matrices` keeps them: rows of float32, and tiles of TILE rows of fewer bits, in which
input follows input.

A tile's sums stay in registers while its inputs pass, so that there is nothing to add up across lanes. A core reads one
stream of neighbours at twice the speed of several, or of one with gaps. So rows of float32 are read one by one; and
inputs that are zero are passed over, their numbers not read, only where most of them are.

Of many tokens, some inputs' numbers of a tile are widened, or float32's rows transposed, into a core's own cache, and
multiplied with some tokens at a time, whose sums stay in registers.

Several threads share a product: the caller's publishes it in `board`, each thread claims tiles, and the caller goes on
when all are done. Nobody waits for a thread that is late.
"""

import os

import numpy as np
from llvmlite import binding, ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..numba_cache import cfunc, njit

TILE = 64  # rows of W that are summed side by side
LANES = 16  # numbers in a vector: what AVX-512 has in a register, and others in two
VECTORS = TILE // LANES
WORDS_OF_INT4 = 8  # of an input in a tile
OFFSETS = [264.0] * WORDS_OF_INT4 + [24.0] * WORDS_OF_INT4  # of int4: 256 + q and 16 + q, less the 8 of q - 8
BLOCK = 32  # inputs that share a scale in int4
CODES = {"bfloat16": 0, "int8": 1, "int4": 2, "float32": 3}
TILED = tuple(CODES)[:3]
BYTES = {"bfloat16": 2 * TILE, "int8": TILE, "int4": TILE // 2}  # of an input's numbers in a tile
CACHE_LINE = 64
# How many inputs before its turn an input's numbers are asked for. Where all are read, of the formats that take more
# instructions than memory takes time: their loops come too late to what the processor would fetch by itself. bfloat16
# is slower with it.
AHEAD = {"int8": 48, "int4": 96}
SOME_AHEAD = 16  # of inputs that are chosen, which the processor cannot guess
FEW = 8  # tokens up to which a product reads the matrix for each of them
DEPTH = 128  # inputs that are widened at a time: their numbers of a tile take 32 KiB
CHUNK = 192  # tokens that they are widened for, a multiple of SIDE
SIDE = 6  # tokens that are summed side by side, with as many vectors of a tile as there are registers for
AT_ONCE = VECTORS if binding.get_host_cpu_features().get("avx512f") else 1
FEW_INPUTS = 0.2  # the part of inputs that are not zero up to which it is faster to pass over the others

# What the caller tells the others, int64 each, with the two that are contended in cache lines of their own. A claim has
# the number of the job, its tiles, and how many of them have been claimed, in fields of FIELD bits but for the
# first, which counts up to NUMBERS.
CLAIM, DONE, WORK = 0, 8, 16
FIELD, NUMBERS = 22, 1 << 19  # which fill 63 bits: a product of more tiles has 200 GB of results
(FORMAT, BITS, SCALES, X, Y, CHOSEN, COUNTS, STARTS, TOTALS, ROWS, COLUMNS, BLOCKS, TOKENS, TILES, STACK, NUMBER) = (
    range(WORK, WORK + 16)
)
BOARD = WORK + 16
STOP = -1
SPINS = 200  # looks at the board between two offers of the core to others

LOOP = {"nogil": True, "fastmath": {"contract", "nsz", "arcp", "reassoc"}}
yields = types.ExternalFunction("sched_yield", types.int32()) if hasattr(os, "sched_yield") else njit()(lambda: 0)


# -- what Numba has no words for --------------------------------------------------------------------------------------
WORD, SINGLE = ir.IntType(32), ir.FloatType()
WORDS, SINGLES = ir.VectorType(WORD, LANES), ir.VectorType(SINGLE, LANES)


def at(builder, base, offset, type):
    return builder.inttoptr(builder.add(base, offset), type.as_pointer())


@intrinsic
def load_atomic(typing, address):
    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.intp), generate


@intrinsic
def store_atomic(typing, address, value):
    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), generate


@intrinsic
def add_atomic(typing, address, value):
    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "acq_rel")

    return types.int64(types.intp, types.int64), generate


@intrinsic
def exchanged(typing, address, old, new):
    """Whether `old` was there, and `new` is now."""

    def generate(context, builder, signature, arguments):
        address, old, new = arguments
        pointer = builder.inttoptr(address, ir.IntType(64).as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, old, new, "acq_rel", "acquire"), 1)

    return types.boolean(types.intp, types.int64, types.int64), generate


@intrinsic
def floats(typing, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], SINGLE.as_pointer())

    return types.CPointer(types.float32)(types.intp), generate


@intrinsic
def integers(typing, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.intp), generate


@intrinsic
def float_at(typing, address):
    def generate(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], SINGLE.as_pointer()))

    return types.float32(types.intp), generate


@intrinsic
def int_at(typing, address):
    def generate(context, builder, signature, arguments):
        return builder.sext(builder.load(builder.inttoptr(arguments[0], WORD.as_pointer())), ir.IntType(64))

    return types.intp(types.intp), generate


@intrinsic
def store_float(typing, address, value):
    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], builder.inttoptr(arguments[0], SINGLE.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), generate


def vector_at(builder, base, offset):
    """The address of a vector that begins `offset` numbers behind another."""
    return at(builder, base, ir.Constant(base.type, 4 * offset), SINGLES)


def widened(builder, format, base, vector):
    """The float32 of a vector of a tile's row; int4's are too large by OFFSETS: such bits need no conversion."""
    if format == "bfloat16":
        halves = ir.VectorType(ir.IntType(16), LANES)
        wide = builder.load(at(builder, base, ir.Constant(base.type, 2 * LANES * vector), halves), align=2)
        return builder.bitcast(builder.shl(builder.zext(wide, WORDS), ir.Constant(WORDS, [16] * LANES)), SINGLES)
    if format == "int8":
        bytes_ = ir.VectorType(ir.IntType(8), LANES)
        wide = builder.load(at(builder, base, ir.Constant(base.type, LANES * vector), bytes_), align=1)
        return builder.sitofp(builder.sext(wide, WORDS), SINGLES)
    # 256 + q has q in its bits 15 to 18, and 16 + q in its bits 19 to 22: one shift serves both halves of a vector.
    half = ir.VectorType(WORD, WORDS_OF_INT4)
    words = builder.load(builder.inttoptr(base, half.as_pointer()), align=4)
    twice = builder.shuffle_vector(words, words, ir.Constant(WORDS, [*range(WORDS_OF_INT4)] * 2))
    shift = 15 - 8 * vector
    amount = ir.Constant(WORDS, [abs(shift)] * LANES)
    moved = builder.shl(twice, amount) if shift > 0 else builder.lshr(twice, amount)
    masks, exponents = (
        ir.Constant(WORDS, [first] * WORDS_OF_INT4 + [second] * WORDS_OF_INT4)
        for first, second in ((0xF << 15, 0xF << 19), (0x43800000, 0x41800000))
    )
    return builder.bitcast(builder.or_(builder.and_(moved, masks), exponents), SINGLES)


def scale(builder, format, base, vector):
    """A vector of scales: int8's are one a row, int4's one a row and block, in bfloat16."""
    if format == "int8":
        return builder.load(at(builder, base, ir.Constant(base.type, 4 * LANES * vector), SINGLES), align=4)
    return widened(builder, "bfloat16", base, vector)


def everywhere(builder, value):
    one = builder.insert_element(ir.Constant(SINGLES, ir.Undefined), value, ir.Constant(WORD, 0))
    return builder.shuffle_vector(one, ir.Constant(SINGLES, ir.Undefined), ir.Constant(WORDS, [0] * LANES))


def fused_multiply_add(builder, *vectors):
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(SINGLES, [SINGLES] * 3), f"llvm.fma.v{LANES}f32"
    )
    return builder.call(fma, vectors)


def input_of(builder, n, chosen, tile, format):
    """(the n-th input k, of those that are chosen or of all, the address of its numbers in a tile)."""
    k = n
    if chosen is not None:
        k = builder.sext(builder.load(at(builder, chosen, builder.mul(n, ir.Constant(n.type, 4)), WORD)), n.type)
    return k, builder.add(tile, builder.mul(k, ir.Constant(k.type, BYTES[format])))


def ahead(builder, n, chosen, tile, base, format):
    """Where the numbers lie that will be wanted soon: of all inputs, or of those that are chosen."""
    if chosen is None:
        return builder.add(base, ir.Constant(base.type, AHEAD[format] * BYTES[format]))
    return input_of(builder, builder.add(n, ir.Constant(n.type, SOME_AHEAD)), chosen, tile, format)[1]


def prefetch(builder, address, format):
    """Asks for an input's numbers in a tile, to read, for all levels of the cache."""
    signature = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), WORD, WORD, WORD])
    ask = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0i8")
    for line in range(0, BYTES[format], CACHE_LINE):
        where = at(builder, address, ir.Constant(address.type, line), ir.IntType(8))
        builder.call(ask, [where, ir.Constant(WORD, 0), ir.Constant(WORD, 3), ir.Constant(WORD, 1)])


def sums(format, some):
    """The intrinsic (tile, scales, x, chosen, first, last, start, to) for inputs from `first` up to `last`, of all or,
    where `some` are read, of the chosen ones.

    to[TILE] = the sum of x[k] W[k]. For int4 these are the inputs of one block, `start` is minus the sum of x[k], which
    takes the OFFSETS away, and the sum is added to what is there.
    """

    @intrinsic
    def tile_sums(typing, tile, scales, x, chosen, first, last, start, to):
        def generate(context, builder, signature, arguments):
            tile, scales, x, chosen, first, last, start, to = arguments
            chosen = chosen if some else None
            totals = [cgutils.alloca_once(builder, SINGLES) for _ in range(VECTORS)]
            offsets = ir.Constant(SINGLES, OFFSETS if format == "int4" else [0.0] * LANES)
            for total in totals:
                builder.store(builder.fmul(everywhere(builder, start), offsets), total)
            with cgutils.for_range_slice(builder, first, last, ir.Constant(first.type, 1)) as (n, _):
                k, base = input_of(builder, n, chosen, tile, format)
                if some or format in AHEAD:
                    prefetch(builder, ahead(builder, n, chosen, tile, base, format), format)
                number = everywhere(
                    builder, builder.load(at(builder, x, builder.mul(k, ir.Constant(k.type, 4)), SINGLE))
                )
                for vector, total in enumerate(totals):
                    wide = widened(builder, format, base, vector)
                    builder.store(fused_multiply_add(builder, wide, number, builder.load(total)), total)
            for vector, total in enumerate(totals):
                place = at(builder, to, ir.Constant(to.type, 4 * LANES * vector), SINGLES)
                found = builder.load(total)
                if format == "int8":
                    found = builder.fmul(found, scale(builder, format, scales, vector))
                if format == "int4":
                    before = builder.load(place, align=4)
                    found = fused_multiply_add(builder, found, scale(builder, format, scales, vector), before)
                builder.store(found, place, align=4)
            return context.get_dummy_value()

        return types.void(*(types.intp,) * 6, types.float32, types.intp), generate

    return tile_sums


def products_of(tokens):
    """The intrinsic (wide, x, columns, inputs, to) for that many tokens.

    to [tokens, TILE] += x [tokens, inputs] wide [inputs, TILE], where x has rows of `columns`.
    """

    @intrinsic
    def products(typing, wide, x, columns, inputs, to):
        def generate(context, builder, signature, arguments):
            wide, x, columns, inputs, to = arguments
            size = ir.Constant(columns.type, 4)
            rows = [x]
            for _ in range(tokens - 1):
                rows.append(builder.add(rows[-1], builder.mul(columns, size)))
            for first in range(0, VECTORS, AT_ONCE):
                offsets = [LANES * vector for vector in range(first, first + AT_ONCE)]
                places = [[vector_at(builder, to, TILE * token + n) for n in offsets] for token in range(tokens)]
                totals = [[cgutils.alloca_once(builder, SINGLES) for _ in offsets] for _ in rows]
                for place, total in zip(sum(places, []), sum(totals, [])):
                    builder.store(builder.load(place, align=4), total)
                with cgutils.for_range(builder, inputs) as loop:
                    k = builder.mul(loop.index, size)
                    base = builder.add(wide, builder.mul(k, ir.Constant(k.type, TILE)))
                    numbers = [builder.load(vector_at(builder, base, n), align=4) for n in offsets]
                    for row, its in zip(rows, totals):
                        one = everywhere(builder, builder.load(at(builder, row, k, SINGLE)))
                        for total, number in zip(its, numbers):
                            builder.store(fused_multiply_add(builder, number, one, builder.load(total)), total)
                for place, total in zip(sum(places, []), sum(totals, [])):
                    builder.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        return types.void(*(types.intp,) * 5), generate

    return products


@intrinsic
def transpose(typing, rows, stride, to):
    """to [LANES, TILE] = the columns of LANES float32 in each of LANES rows, `stride` bytes apart."""

    def generate(context, builder, signature, arguments):
        row, stride, to = arguments
        vectors = []
        for _ in range(LANES):
            vectors.append(builder.load(at(builder, row, ir.Constant(row.type, 0), SINGLES), align=4))
            row = builder.add(row, stride)
        for size in (1, 2, 4, 8):  # of the squares that change places, beside the diagonal of larger ones
            for n in (n for n in range(LANES) if not n & size):
                pair = vectors[n], vectors[n + size]
                upper = [m + LANES - size if m & size else m for m in range(LANES)]
                lower = [m + LANES if m & size else m + size for m in range(LANES)]
                vectors[n], vectors[n + size] = (
                    builder.shuffle_vector(*pair, ir.Constant(WORDS, lanes)) for lanes in (upper, lower)
                )
        for n, vector in enumerate(vectors):
            builder.store(vector, vector_at(builder, to, TILE * n), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


def wide_row(format):
    """The intrinsic (row, scales, to): to[TILE] = an input's numbers in a tile."""

    @intrinsic
    def wide(typing, row, scales, to):
        def generate(context, builder, signature, arguments):
            row, scales, to = arguments
            for vector in range(VECTORS):
                found = widened(builder, format, row, vector)
                if format == "int4":
                    found = builder.fsub(found, ir.Constant(SINGLES, OFFSETS))
                if format != "bfloat16":
                    found = builder.fmul(found, scale(builder, format, scales, vector))
                builder.store(found, at(builder, to, ir.Constant(to.type, 4 * LANES * vector), SINGLES), align=4)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp), generate

    return wide


bfloat16_sums, int8_sums, int4_sums = (sums(format, some=False) for format in TILED)
bfloat16_some, int8_some, int4_some = (sums(format, some=True) for format in TILED)
wide_bfloat16, wide_int8, wide_int4 = map(wide_row, TILED)
six_products, four_products, two_products, one_product = map(products_of, (SIDE, 4, 2, 1))


# -- a tile of a product ----------------------------------------------------------------------------------------------
@njit(**LOOP)
def tile_of_bfloat16(tile, x, columns, chosen, count, to):
    if count < 0:
        bfloat16_sums(tile, 0, x, 0, 0, columns, np.float32(0), to)
    else:
        bfloat16_some(tile, 0, x, chosen, 0, count, np.float32(0), to)


@njit(**LOOP)
def tile_of_int8(tile, scales, x, columns, chosen, count, to):
    if count < 0:
        int8_sums(tile, scales, x, 0, 0, columns, np.float32(0), to)
    else:
        int8_some(tile, scales, x, chosen, 0, count, np.float32(0), to)


@njit(**LOOP)
def tile_of_int4(tile, scales, x, columns, chosen, count, starts, totals, to):
    for block in range((columns + BLOCK - 1) // BLOCK):
        its, less = scales + 2 * TILE * block, -float_at(totals + 4 * block)
        if count < 0:
            int4_sums(tile, its, x, 0, BLOCK * block, min(columns, BLOCK * (block + 1)), less, to)
        else:
            int4_some(tile, its, x, chosen, int_at(starts + 4 * block), int_at(starts + 4 * block + 4), less, to)


@njit(**LOOP)
def multiply_tile(board, tile, sums):
    """A tile of a product, for all its tokens."""
    format, bits, scales = board[FORMAT], board[BITS], board[SCALES]
    rows, columns, blocks, tokens, tiles = board[ROWS], board[COLUMNS], board[BLOCKS], board[TOKENS], board[TILES]
    which, within = tile // tiles, tile % tiles  # of several matrices, and of its rows
    to, first = sums.ctypes.data, tile * columns
    for token in range(tokens):
        row = which * tokens + token
        x, chosen, count = (
            board[X] + 4 * row * columns,
            board[CHOSEN] + 4 * row * (columns + SOME_AHEAD),
            int_at(board[COUNTS] + 4 * row),
        )
        starts, totals = board[STARTS] + 4 * row * (blocks + 1), board[TOTALS] + 4 * row * blocks
        if format == 0:
            tile_of_bfloat16(bits + 2 * TILE * first, x, columns, chosen, count, to)
        elif format == 1:
            tile_of_int8(bits + TILE * first, scales + 4 * TILE * tile, x, columns, chosen, count, to)
        else:
            sums[:] = 0
            its = scales + 2 * TILE * tile * blocks
            tile_of_int4(bits + TILE // 2 * first, its, x, columns, chosen, count, starts, totals, to)
        y = board[Y] + 4 * (row * rows + within * TILE)
        for m in range(min(TILE, rows - within * TILE)):
            store_float(y + 4 * m, sums[m])


@njit(**LOOP)
def multiply_rows(board, tile):
    """TILE rows of a product of float32, for all its tokens."""
    rows, columns, tokens, tiles = board[ROWS], board[COLUMNS], board[TOKENS], board[TILES]
    which, within = tile // tiles, tile % tiles
    for m in range(within * TILE, min(rows, within * TILE + TILE)):
        w = carray(floats(board[BITS] + 4 * columns * (which * rows + m)), (columns,))
        for row in range(which * tokens, (which + 1) * tokens):
            x, total = carray(floats(board[X] + 4 * columns * row), (columns,)), np.float32(0)
            for k in range(columns):
                total += w[k] * x[k]
            store_float(board[Y] + 4 * (row * rows + m), total)


@njit(**LOOP)
def widen_tile(board, tile, first, inputs, to):
    """to [inputs, TILE] = a tile's numbers in float32, of inputs from `first` on."""
    format, bits, scales, columns = board[FORMAT], board[BITS], board[SCALES], board[COLUMNS]
    for k in range(first, first + inputs):
        place, row = to + 4 * TILE * (k - first), tile * columns + k
        if format == 0:
            wide_bfloat16(bits + 2 * TILE * row, 0, place)
        elif format == 1:
            wide_int8(bits + TILE * row, scales + 4 * TILE * tile, place)
        else:
            wide_int4(bits + TILE // 2 * row, scales + 2 * TILE * (tile * board[BLOCKS] + k // BLOCK), place)


@njit(**LOOP)
def transpose_rows(rows, columns, inputs, from_, to):
    """The same of float32: of up to TILE rows of `columns`; what is left of `to` is not read."""
    whole_rows, whole_inputs = rows // LANES * LANES, inputs // LANES * LANES
    for m in range(0, whole_rows, LANES):
        for k in range(0, whole_inputs, LANES):
            transpose(from_ + 4 * (m * columns + k), 4 * columns, to + 4 * (k * TILE + m))
    for m in range(rows):
        for k in range(whole_inputs if m < whole_rows else 0, inputs):
            store_float(to + 4 * (k * TILE + m), float_at(from_ + 4 * (m * columns + k)))


@njit(**LOOP)
def multiply_chunk(board, number):
    """A tile of a product for up to CHUNK of many tokens."""
    rows, columns, tokens, tiles = board[ROWS], board[COLUMNS], board[TOKENS], board[TILES]
    tile, token = number % (board[STACK] * tiles), number // (board[STACK] * tiles) * CHUNK
    which, row = tile // tiles, tile % tiles * TILE
    tokens, its, first = min(CHUNK, tokens - token), min(TILE, rows - row), which * tokens + token
    sums, wide = np.zeros((tokens, TILE), np.float32), np.zeros((DEPTH, TILE), np.float32)
    for k in range(0, columns, DEPTH):
        inputs = min(DEPTH, columns - k)
        if board[FORMAT] == 3:
            from_ = board[BITS] + 4 * ((which * rows + row) * columns + k)
            transpose_rows(its, columns, inputs, from_, wide.ctypes.data)
        else:
            widen_tile(board, tile, k, inputs, wide.ctypes.data)
        add_products(wide.ctypes.data, board[X] + 4 * (first * columns + k), columns, inputs, tokens, sums.ctypes.data)
    for n in range(tokens):
        y = carray(floats(board[Y] + 4 * ((first + n) * rows + row)), (its,))
        for m in range(its):
            y[m] = sums[n, m]
    # The arrays live until here, where nobody reads them any more.
    return sums.size + wide.size


@njit(**LOOP)
def add_products(wide, x, columns, inputs, tokens, to):
    """to [tokens, TILE] += x W^T of some inputs."""
    row, its = 4 * columns, 4 * TILE
    n = tokens // SIDE * SIDE
    for token in range(0, n, SIDE):
        six_products(wide, x + token * row, columns, inputs, to + token * its)
    if tokens - n >= 4:
        four_products(wide, x + n * row, columns, inputs, to + n * its)
        n += 4
    if tokens - n >= 2:
        two_products(wide, x + n * row, columns, inputs, to + n * its)
        n += 2
    if tokens > n:
        one_product(wide, x + n * row, columns, inputs, to + n * its)


@njit(**LOOP)
def compute(board, tile, sums):
    """One tile of the product on the board; `sums` [TILE] is room to work in."""
    if board[TOKENS] > FEW:
        multiply_chunk(board, tile)
    elif board[FORMAT] == 3:
        multiply_rows(board, tile)
    else:
        multiply_tile(board, tile, sums)


@njit(**LOOP)
def claimed(board):
    """The number of a tile for this thread to compute; -1 where there is none now, -2 where there will be none."""
    claim = board.ctypes.data + 8 * CLAIM
    while True:
        value = load_atomic(claim)
        if value == STOP:
            return -2
        free, tiles = value & ((1 << FIELD) - 1), (value >> FIELD) & ((1 << FIELD) - 1)
        if free >= tiles:
            return -1
        if exchanged(claim, value, value + 1):
            return free


@njit(**LOOP)
def assist(board):
    """Computes tiles of every product on the board until it says STOP."""
    sums, idle = np.empty(TILE, np.float32), 0
    while True:
        tile = claimed(board)
        if tile == -2:
            return
        if tile >= 0:
            compute(board, tile, sums)
            add_atomic(board.ctypes.data + 8 * DONE, 1)
            idle = 0
        else:
            idle += 1
            if idle == SPINS:
                yields()
                idle = 0


@njit(**LOOP)
def start(board):
    """Nothing to do yet."""
    store_atomic(board.ctypes.data + 8 * CLAIM, 0)


@njit(**LOOP)
def stop(board):
    store_atomic(board.ctypes.data + 8 * CLAIM, STOP)


@njit(**LOOP)
def share(board, tiles):
    """Computes what is on the board, together with the threads that look at it."""
    address = board.ctypes.data
    store_atomic(address + 8 * DONE, 0)
    board[NUMBER] = (board[NUMBER] + 1) % NUMBERS
    store_atomic(address + 8 * CLAIM, (board[NUMBER] << (2 * FIELD)) | (tiles << FIELD))
    sums = np.empty(TILE, np.float32)
    while True:
        tile = claimed(board)
        if tile < 0:
            break
        compute(board, tile, sums)
        add_atomic(address + 8 * DONE, 1)
    idle = 0
    while load_atomic(address + 8 * DONE) < tiles:
        idle += 1
        if idle == SPINS:
            yields()
            idle = 0


@njit(**LOOP)
def choose(x, chosen, counts, starts, totals):
    """Of each row of x [S, T, K] each block's sum; and where few inputs are not zero, which and how many they are, and
    where each block of them begins. Where they are not few, their number is -1.
    """
    S, T, K = x.shape
    for s in range(S):
        for t in range(T):
            count = 0
            for block in range(totals.shape[2]):
                total = np.float32(0)
                for k in range(block * BLOCK, min(K, (block + 1) * BLOCK)):
                    count += x[s, t, k] != 0
                    total += x[s, t, k]
                totals[s, t, block] = total
            counts[s, t] = -1
            if count <= FEW_INPUTS * K:
                counts[s, t] = count
                n = 0
                for block in range(totals.shape[2]):
                    starts[s, t, block] = n
                    for k in range(block * BLOCK, min(K, (block + 1) * BLOCK)):
                        chosen[s, t, n] = k
                        n += x[s, t, k] != 0
                starts[s, t, -1] = n
                chosen[s, t, n : n + SOME_AHEAD] = 0  # for those who ask ahead


@njit(**LOOP)
def multiply(board, format, bits, scales, x, y):
    """y [S, T, M] = x [S, T, K] W^T, with all threads that look at the board; `bits` and `scales` are addresses."""
    S, T, K = x.shape
    blocks = (K + BLOCK - 1) // BLOCK
    seen = T if T <= FEW and format != 3 else 0
    chosen, counts = np.empty((S, seen, K + SOME_AHEAD), np.int32), np.empty((S, seen), np.int32)
    starts, totals = np.empty((S, seen, blocks + 1), np.int32), np.empty((S, seen, blocks), np.float32)
    choose(x[:, :seen], chosen, counts, starts, totals)
    board[FORMAT], board[BITS], board[SCALES] = format, bits, scales
    board[X], board[Y], board[TOTALS] = x.ctypes.data, y.ctypes.data, totals.ctypes.data
    board[CHOSEN], board[COUNTS], board[STARTS] = chosen.ctypes.data, counts.ctypes.data, starts.ctypes.data
    board[ROWS], board[COLUMNS], board[BLOCKS], board[TOKENS] = y.shape[2], K, blocks, T
    board[TILES], board[STACK] = (y.shape[2] + TILE - 1) // TILE, S
    share(board, S * board[TILES] * (1 if T <= FEW else (T + CHUNK - 1) // CHUNK))
    # The arrays live until here, where nobody reads them any more.
    return chosen.size + counts.size + starts.size + totals.size


@cfunc(types.void(*(types.intp,) * 10))
def multiply_at(board, format, bits, scales, x, y, S, T, K, M):
    """`multiply` of arrays at addresses."""
    multiply(
        carray(integers(board), (BOARD,)),
        format,
        bits,
        scales,
        carray(floats(x), (S, T, K)),
        carray(floats(y), (S, T, M)),
    )


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


@njit(**LOOP)
def product_at(address, board, format, bits, scales, x, y):
    """`multiply` for loops in another module: Numba's cache of theirs would not see that this one has changed, so that
    they are told its address. x and y are contiguous.
    """
    S, T, K = x.shape
    call(address, (board.ctypes.data, format, bits, scales, x.ctypes.data, y.ctypes.data, S, T, K, y.shape[2]))
