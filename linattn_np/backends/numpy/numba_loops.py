"""float32 loops that Numba compiles: softmax attention by tiles, the gated recurrence by chunks, and float16 casts.

Softmax attention takes TILE_ROWS query rows against panels of PANEL keys: scores, mask, running maximum and sum of each
row, then weights times values. The gated recurrence takes a chunk of tokens at a time and carries its state.

Matrix products run in blocks of BLOCK_ROWS x BLOCK_COLUMNS results, without tests at the edges. So each operand's row
count and column count is rounded up: columns of the right operand and of the result to a multiple of BLOCK_COLUMNS,
rows of the left operand and of the result to a multiple of BLOCK_ROWS. Padding holds zeros, or its results are ignored.
"""

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...numba_cache import njit

# Infinity and NaN keep their meaning: 0 * x is NaN unless x is finite, and sums of 0 * x named `check` find that out.
LOOP = {
    "nogil": True,
    "error_model": "numpy",  # Python's test for a zero divisor would prevent vectorisation
    "fastmath": {"contract", "nsz", "arcp", "reassoc"},
}
INLINED = LOOP | {"fastmath": {"contract"}, "forceinline": True}  # polynomials: their additions keep their order
float32 = np.float32
INT_TYPE, FLOAT_TYPE = ir.IntType(32), ir.FloatType()
LANES = 16  # numbers in a vector, which is one register with AVX-512 and two with AVX2
BLOCK_ROWS, BLOCK_VECTORS = (8, 2) if binding.get_host_cpu_features().get("avx512f") else (4, 1)  # as registers allow
BLOCK_COLUMNS = LANES * BLOCK_VECTORS
FLOAT_VECTOR, INT_VECTOR = ir.VectorType(FLOAT_TYPE, LANES), ir.VectorType(INT_TYPE, LANES)
EXPONENT_SHIFT = float32(1.5 * 2**23 + 127)  # n + EXPONENT_SHIFT has the exponent field of 2^n in its lowest bits
LOWEST_EXPONENT = float32(-87)  # exp returns 0 below
TANH_LIMIT = float32(7.90531110763549805)  # tanh of larger numbers rounds to 1
PANEL = 64  # keys of a panel
TILE_ROWS = 64  # query rows of a tile: tokens times the query heads that share a key head
# `multiply` writes whole blocks: what is rounded up to BLOCK_COLUMNS, and a panel's keys, are whole BLOCK_ROWS, too.
assert BLOCK_COLUMNS % BLOCK_ROWS == PANEL % BLOCK_ROWS == 0
SHORT = 256  # tokens up to which the forward pass takes half a tile's rows: of fewer rows fewer scores are masked


# -- instructions that Numba does not offer, as LLVM code -------------------------------------------------------------
@intrinsic
def maximum(typing, x, y):
    """max(x, y), which LLVM vectorises as Python's max is not. The result for NaN is undefined."""

    def generate(context, builder, signature, arguments):
        x, y = arguments
        flags = ("nnan", "nsz")
        return builder.select(builder.fcmp_ordered(">", x, y, flags=flags), x, y, flags=flags)

    return types.float32(types.float32, types.float32), generate


@intrinsic
def power_of_two(typing, shifted):
    """2^n, for shifted = n + EXPONENT_SHIFT with an integer n from -126 to 127."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.shl(builder.bitcast(arguments[0], INT_TYPE), INT_TYPE(23)), FLOAT_TYPE)

    return types.float32(types.float32), generate


@intrinsic
def float32_of_half(typing, bits):
    """The float32 value of a float16, which is given as its 16 bits."""

    def generate(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), FLOAT_TYPE)

    return types.float32(types.uint16), generate


@intrinsic
def half_of_float32(typing, x):
    """The 16 bits of the float16 nearest to x."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@njit(**INLINED)
def exp(x):
    """e^x within 2 units in the last place for x <= 88, by Cephes' polynomial: the C library's is not vectorised."""
    shifted = x * float32(1.44269504088896341) + EXPONENT_SHIFT
    n = shifted - EXPONENT_SHIFT
    r = x - n * float32(0.693359375) + n * float32(2.12194440e-4)
    p = float32(1.9875691500e-4) * r + float32(1.3981999507e-3)
    p = p * r + float32(8.3334519073e-3)
    p = p * r + float32(4.1665795894e-2)
    p = p * r + float32(1.6666665459e-1)
    p = p * r + float32(5.0000001201e-1)
    return float32(0) if x < LOWEST_EXPONENT else (p * r * r + r + float32(1)) * power_of_two(shifted)


@njit(forceinline=True, **LOOP)
def tanh(x):
    """tanh by Eigen's rational function, within 6 units in the last place; it vectorises, which libm's does not."""
    s = x * x
    p = float32(2.00018790482477e-13) - float32(2.76076847742355e-16) * s
    p = float32(-8.60467152213735e-11) + p * s
    p = float32(5.12229709037114e-08) + p * s
    p = float32(1.48572235717979e-05) + p * s
    p = float32(6.37261928875436e-04) + p * s
    p = float32(4.89352455891786e-03) + p * s
    q = float32(1.18534705686654e-04) + float32(1.19825839466702e-06) * s
    q = float32(2.26843463243900e-03) + q * s
    q = float32(4.89352518554385e-03) + q * s
    one = float32(1)
    return one if x > TANH_LIMIT else -one if x < -TANH_LIMIT else x * p / q


@intrinsic
def multiply_block(typing, a, a_row, a_column, b, b_row, depth, c, c_row, add):
    """c [BLOCK_ROWS, BLOCK_COLUMNS] = a [BLOCK_ROWS, depth] b [depth, BLOCK_COLUMNS], or c += a b if `add`.

    a, b and c are addresses; a_row, a_column, b_row and c_row are strides in bytes.
    """

    def generate(context, builder, signature, arguments):
        a, a_row, a_column, b, b_row, depth, c, c_row, add = arguments
        zero = ir.Constant(FLOAT_VECTOR, [0.0] * LANES)
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(FLOAT_VECTOR, [FLOAT_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
        )

        def pointer(address, type, vector=0):
            """A pointer to the vector of this index behind `address`."""
            offset = ir.Constant(address.type, 4 * LANES * vector)
            return builder.inttoptr(builder.add(address, offset), type.as_pointer())

        def row_addresses(address, stride):
            for _ in range(BLOCK_ROWS):
                yield address
                address = builder.add(address, stride)

        def broadcast(number):
            vector = builder.insert_element(ir.Constant(FLOAT_VECTOR, ir.Undefined), number, ir.Constant(INT_TYPE, 0))
            return builder.shuffle_vector(vector, vector, ir.Constant(INT_VECTOR, [0] * LANES))

        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(BLOCK_VECTORS)] for _ in range(BLOCK_ROWS)]
        a_rows = list(row_addresses(a, a_row))
        with cgutils.for_range(builder, depth) as loop:
            a_offset = builder.mul(loop.index, a_column)
            b_address = builder.add(b, builder.mul(loop.index, b_row))
            b_vectors = [builder.load(pointer(b_address, FLOAT_VECTOR, i), align=4) for i in range(BLOCK_VECTORS)]
            for address, row_sums in zip(a_rows, sums):
                a_vector = broadcast(builder.load(pointer(builder.add(address, a_offset), FLOAT_TYPE)))
                for b_vector, total in zip(b_vectors, row_sums):
                    builder.store(builder.call(fma, [b_vector, a_vector, builder.load(total)]), total)
        for address, row_sums in zip(row_addresses(c, c_row), sums):
            for vector, total in enumerate(row_sums):
                c_pointer = pointer(address, FLOAT_VECTOR, vector)
                before = builder.select(add, builder.load(c_pointer, align=4), zero)
                builder.store(builder.fadd(before, builder.load(total)), c_pointer, align=4)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 8, types.boolean), generate


@njit(**LOOP)
def multiply(a, b, c, depth, add):
    """c = a b, or c += a b if `add`, with the first `depth` columns of a and rows of b.

    a [rows, >= depth] may have any strides; rows of b [>= depth, columns] and of c [rows, columns] are contiguous. The
    rows of a and c must be a multiple of BLOCK_ROWS, their columns of BLOCK_COLUMNS: others' memory is overwritten.
    """
    assert c.shape[0] % BLOCK_ROWS == c.shape[1] % BLOCK_COLUMNS == 0 and a.shape[0] >= c.shape[0]
    assert b.shape[1] >= c.shape[1] and min(a.shape[1], b.shape[0]) >= depth
    a_row, a_column = a.strides
    for j in range(0, c.shape[1], BLOCK_COLUMNS):
        for i in range(0, c.shape[0], BLOCK_ROWS):
            multiply_block(
                a.ctypes.data + i * a_row,
                a_row,
                a_column,
                b.ctypes.data + 4 * j,
                b.strides[0],
                depth,
                c.ctypes.data + i * c.strides[0] + 4 * j,
                c.strides[0],
                add,
            )


# -- softmax attention: o = softmax(q k^T) v ---------------------------------------------------------------------------
# G query heads share a key head. Row g * tokens + t of a tile is head g's query of the tile's token t. Scores have the
# shape [keys of a panel, rows of a tile]: a vector holds rows, so a row's maximum and sum need no work across lanes.
@njit(**LOOP)
def copy_tokens(x, first, tokens, scale, tile):
    """Fills rows of tile [rows, D] with scale times `tokens` tokens of x [G, T, D], from token `first` on."""
    for g in range(x.shape[0]):
        for t in range(tokens):
            for c in range(x.shape[2]):
                tile[g * tokens + t, c] = scale * x[g, first + t, c]


@njit(**LOOP)
def copy_token_scalars(x, first, tokens, tile):
    """Copies `tokens` tokens of x [G, T], from token `first` on, to tile [rows]."""
    for row in range(x.shape[0] * tokens):
        tile[row] = x[row // tokens, first + row % tokens]


@njit(**LOOP)
def tile_key_ranges(first_key, last_key, first, tokens, key_ranges):
    """Fills key_ranges [2, padded rows]: the first key that each row sees, and the key after the last one.

    Returns the smallest range that holds the ranges of all rows.
    """
    begin, end = first_key[first], last_key[first]
    for row in range(key_ranges.shape[1]):
        t = first + row % tokens
        key_ranges[0, row], key_ranges[1, row] = first_key[t], last_key[t]
        begin, end = min(begin, first_key[t]), max(end, last_key[t])
    return begin, end


@njit(**INLINED)
def sees(key_ranges, row, key):
    return (key_ranges[0, row] <= key) & (key < key_ranges[1, row])


@njit(**LOOP)
def cap_scores(scores, softcap, checks):
    """scores = softcap tanh(scores / softcap), in place; checks [rows] becomes NaN where a score is not finite."""
    for j in range(scores.shape[0]):
        for i in range(scores.shape[1]):
            checks[i] += scores[j, i] * float32(0)
            scores[j, i] = softcap * tanh(scores[j, i] / softcap)


@njit(**LOOP)
def weigh_scores(scores, first, key_ranges, maxima, sums, rescale, checks):
    """Replaces a panel's scores [keys, rows] by weights exp(score - row maximum), and updates the rows' statistics.

    first : the panel's first key; the weight is 0 where the row does not see the key
    maxima, sums : [rows], each row's maximum score and sum of weights over all panels so far; updated in place
    rescale : [rows], filled with exp(old maximum - new maximum), by which the caller multiplies earlier outputs
    checks : [rows], becomes NaN where a score is not finite: the maximum and exp would hide it
    """
    some_hidden = False
    for i in range(scores.shape[1]):
        rescale[i] = maxima[i]
        some_hidden |= not sees(key_ranges, i, first) or not sees(key_ranges, i, first + scores.shape[0] - 1)
    for j in range(scores.shape[0]):
        for i in range(scores.shape[1]):
            checks[i] += scores[j, i] * float32(0)
            if some_hidden:
                scores[j, i] = scores[j, i] if sees(key_ranges, i, first + j) else float32(-np.inf)
            maxima[i] = maximum(scores[j, i], maxima[i])
    for i in range(scores.shape[1]):
        rescale[i] = exp(rescale[i] - maxima[i])
        sums[i] *= rescale[i]
    for j in range(scores.shape[0]):
        for i in range(scores.shape[1]):
            scores[j, i] = exp(scores[j, i] - maxima[i])
            sums[i] += scores[j, i]


@njit(**LOOP)
def tile_size(G, first, stop, most):
    """(tokens, rows, padded rows) of the tile of `most` rows that begins with token `first` of those up to `stop`."""
    tokens = min(stop - first, max(1, most // G))
    return tokens, G * tokens, -(-G * tokens // BLOCK_COLUMNS) * BLOCK_COLUMNS


@njit(**LOOP)
def attention_forward(heads, q, keys, values, first_key, last_key, begin, end, softcap, scale, o, maxima, sums):
    """Fills o [heads, G, T, V] of the tokens `begin` to `end` - 1 for the key heads heads[0] to heads[1] - 1.

    Returns whether it is all finite there. A row's o is NaN if one of its scores is not finite.

    q : [heads, G, T, K]
    keys, values : [heads, panels, PANEL, K or V, rounded up to whole BLOCK_COLUMNS], padded with zeros
    first_key, last_key : [T]; token t sees the keys from first_key[t] to last_key[t] - 1
    softcap : scores are capped to +-softcap by tanh; None for none
    maxima, sums : [heads, G, T], each row's maximum score and sum of weights: on entry those of the attention sink (or
        the lowest number and 0), on return those of all keys
    """
    (G, T, K), check = q.shape[1:], float32(0)
    for head in range(heads[0], heads[1]):
        first = begin
        while first < end:
            tokens, rows, padded_rows = tile_size(G, first, end, TILE_ROWS if T > SHORT else TILE_ROWS // 2)
            q_transposed, panel_scores = np.zeros((K, padded_rows), float32), np.empty((PANEL, padded_rows), float32)
            o_tile, checks = np.zeros((padded_rows, values.shape[3]), float32), np.zeros(padded_rows, float32)
            tile_maxima, tile_sums = np.zeros(padded_rows, float32), np.ones(padded_rows, float32)
            rescale, key_ranges = np.empty(padded_rows, float32), np.empty((2, padded_rows), np.int32)
            copy_tokens(q[head], first, tokens, scale, q_transposed.T)
            copy_token_scalars(maxima[head], first, tokens, tile_maxima)
            copy_token_scalars(sums[head], first, tokens, tile_sums)
            first_seen, end_seen = tile_key_ranges(first_key, last_key, first, tokens, key_ranges)
            for panel in range(first_seen // PANEL, -(-end_seen // PANEL)):
                count = min(PANEL, -(-(end_seen - panel * PANEL) // BLOCK_ROWS) * BLOCK_ROWS)  # up to the last seen
                scores = panel_scores[:count]
                multiply(keys[head, panel], q_transposed, scores, K, False)
                if softcap is not None:
                    cap_scores(scores, softcap, checks)
                weigh_scores(scores, panel * PANEL, key_ranges, tile_maxima, tile_sums, rescale, checks)
                for row in range(rows):
                    if rescale[row] != 1:
                        for c in range(o_tile.shape[1]):
                            o_tile[row, c] *= rescale[row]
                multiply(scores.T, values[head, panel], o_tile, count, True)
            for row in range(rows):
                g, t = row // tokens, first + row % tokens
                maxima[head, g, t], sums[head, g, t] = tile_maxima[row], tile_sums[row]
                sees_no_key = key_ranges[0, row] >= key_ranges[1, row]
                inverse_sum = checks[row] + float32(1) / (float32(1) if sees_no_key else tile_sums[row])
                for c in range(o.shape[3]):
                    o[head, g, t, c] = o_tile[row, c] * inverse_sum
                    check += o[head, g, t, c] * float32(0)
            first += tokens
    return check == 0


@njit(**LOOP)
def score_gradients(weights, dscores, first, key_ranges, maxima, sums, delta, softcap, checks):
    """Replaces a panel's scores [keys, rows] in `weights` by the weights, and do v^T in `dscores` by the gradients of
    the scores. `first`: the panel's first key; the others as in `weigh_scores`, `delta` as in `attention_backward`."""
    for j in range(weights.shape[0]):
        for i in range(weights.shape[1]):
            dscores[j, i] -= delta[i]
    if softcap is not None:
        cap_scores(weights, softcap, checks)
        for j in range(weights.shape[0]):
            for i in range(weights.shape[1]):
                dscores[j, i] *= float32(1) - (weights[j, i] / softcap) * (weights[j, i] / softcap)
    for j in range(weights.shape[0]):
        for i in range(weights.shape[1]):
            weight = exp(weights[j, i] - maxima[i]) / sums[i]
            weights[j, i] = weight if sees(key_ranges, i, first + j) else float32(0)
            dscores[j, i] *= weights[j, i]


@njit(**LOOP)
def attention_backward(q, do, maxima, sums, delta, keys, values, first_key, last_key, softcap, scale, dq, dk, dv):
    """The gradients of `attention_forward`, whose arguments these are, for one key head: arrays have no first axis.

    Returns whether they are all finite.

    With the weights P = exp(score - maximum) / sum: dv = P^T do, dscore = P (do v^T - delta), dk = dscore^T q.

    do : [G, T, V], the gradient of o
    delta : [G, T] = <do, o> - dL, where dL is the gradient of L = maximum + log sum
    dq : [G, T, K], filled with scale dscore k
    dk, dv : like keys and values; the gradients are added
    """
    (G, T, K), V, check, first = q.shape, do.shape[2], float32(0), 0
    while first < T:
        tokens, rows, padded_rows = tile_size(G, first, T, TILE_ROWS)
        q_tile, q_transposed = np.zeros((padded_rows, dk.shape[2]), float32), np.zeros((K, padded_rows), float32)
        do_tile, do_transposed = np.zeros((padded_rows, dv.shape[2]), float32), np.zeros((V, padded_rows), float32)
        weights, dscores = np.empty((PANEL, padded_rows), float32), np.empty((PANEL, padded_rows), float32)
        dq_tile = np.zeros((padded_rows, dk.shape[2]), float32)
        tile_maxima, tile_sums = np.zeros(padded_rows, float32), np.ones(padded_rows, float32)
        tile_delta, key_ranges = np.zeros(padded_rows, float32), np.empty((2, padded_rows), np.int32)
        checks = np.zeros(padded_rows, float32)
        copy_tokens(q, first, tokens, scale, q_tile)
        copy_tokens(q, first, tokens, scale, q_transposed.T)
        copy_tokens(do, first, tokens, float32(1), do_tile)
        copy_tokens(do, first, tokens, float32(1), do_transposed.T)
        copy_token_scalars(maxima, first, tokens, tile_maxima)
        copy_token_scalars(sums, first, tokens, tile_sums)
        copy_token_scalars(delta, first, tokens, tile_delta)
        begin, end = tile_key_ranges(first_key, last_key, first, tokens, key_ranges)
        for row in range(rows):
            if key_ranges[0, row] >= key_ranges[1, row]:  # sees no key: its sum may be 0
                tile_sums[row] = 1
        for panel in range(begin // PANEL, -(-end // PANEL)):
            multiply(keys[panel], q_transposed, weights, K, False)
            multiply(values[panel], do_transposed, dscores, V, False)
            score_gradients(
                weights, dscores, panel * PANEL, key_ranges, tile_maxima, tile_sums, tile_delta, softcap, checks
            )
            multiply(weights, do_tile, dv[panel], rows, True)
            multiply(dscores, q_tile, dk[panel], rows, True)
            multiply(dscores.T, keys[panel], dq_tile, PANEL, True)
        for row in range(rows):
            check += checks[row]
            for c in range(K):
                dq[row // tokens, first + row % tokens, c] = scale * dq_tile[row, c]
                check += dq_tile[row, c] * float32(0)
        first += tokens
    for gradient in (dk, dv):
        for panel in range(gradient.shape[0]):
            for j in range(PANEL):
                for c in range(gradient.shape[2]):
                    check += gradient[panel, j, c] * float32(0)
    return check == 0


# -- casts between float16, as its bits, and float32: 1-D arrays -------------------------------------------------------
HAS_CASTS = bool(binding.get_host_cpu_features().get("f16c"))  # without, LLVM calls functions that may be missing


@njit(nogil=True)
def float16_to_float32(bits, x):
    for i in range(len(bits)):
        x[i] = float32_of_half(bits[i])


@njit(nogil=True)
def float32_to_float16(x, bits):
    for i in range(len(x)):
        bits[i] = half_of_float32(x[i])


# -- the gated recurrence: S_t = diag(e^g_t) S_{t-1} + k_t v_t^T, o_t = scale q_t^T S_t --------------------------------
@njit(**LOOP)
def sum_gates_from_middle(g, first, tokens, middle, gate_sums):
    """Fills gate_sums [tokens, K or 1]: row t is the gates' sum from after token `middle` to token t, of a chunk of
    `tokens` tokens of g [T, K or 1] that begins at `first`; before `middle` minus the sum of the gates in between.

    Returns the largest absolute value in gate_sums; NaN if one of them is infinite or NaN.
    """
    largest, check = float32(0), float32(0)
    for i in range(g.shape[1]):
        gate_sums[middle, i] = 0
    for t in range(middle + 1, tokens):
        for i in range(g.shape[1]):
            gate_sums[t, i] = gate_sums[t - 1, i] + g[first + t, i]
    for t in range(middle - 1, -1, -1):
        for i in range(g.shape[1]):
            gate_sums[t, i] = gate_sums[t + 1, i] - g[first + t + 1, i]
    for t in range(tokens):
        for i in range(g.shape[1]):
            largest = maximum(abs(gate_sums[t, i]), largest)
            check += gate_sums[t, i] * float32(0)
    return largest + check


@njit(**LOOP)
def exponentiate_rows(x, count):
    """e^x of the first `count` rows of x, in place."""
    for t in range(count):
        for i in range(x.shape[1]):
            x[t, i] = exp(x[t, i])


@njit(**LOOP)
def broadcast_rows(x, count, to):
    """Copies the first `count` rows of x [tokens, K or 1] to to [tokens, K]."""
    for t in range(count):
        for i in range(to.shape[1]):
            to[t, i] = x[t, i] if x.shape[1] > 1 else x[t, 0]


@njit(**LOOP)
def copy_part(x, rows, columns, to):
    """Copies the first rows and columns of x to those of to."""
    for i in range(rows):
        for j in range(columns):
            to[i, j] = x[i, j]


@njit(**LOOP)
def decay_chunk(q, k, first, tokens, decays, half_decay, exclusive, queries, keys, keys_transposed):
    """Fills queries and keys [tokens, K] with q times `decays` and k over `decays`, for the tokens from `first` on.

    With `exclusive` a query has the decays of the token before; the first one those of no token of the chunk.
    """
    for t in range(tokens):
        for i in range(q.shape[1]):
            queries[t, i] = q[first + t, i] * decays[t, i]
            keys[t, i] = k[first + t, i] / decays[t, i]
            keys_transposed[i, t] = keys[t, i]
    if exclusive:
        for t in range(tokens - 1, -1, -1):
            for i in range(q.shape[1]):
                before = decays[t - 1, i] if t > 0 else float32(1) / half_decay[i]
                queries[t, i] = q[first + t, i] * before


@njit(**LOOP)
def mask_scores(scores, q, k, first, tokens, u, exclusive):
    """Sets scores with later keys to 0; with `exclusive` those with the token's own key to the bonus q u k."""
    for t in range(tokens):
        for s in range(t + 1 - exclusive, scores.shape[1]):
            scores[t, s] = 0
        for i in range(len(u)):
            scores[t, t] += q[first + t, i] * u[i] * k[first + t, i]


@njit(**LOOP)
def gated_rows(q, k, v, g, u, table, begins, ends, limit, scale, exclusive, initial, o, final, states, undone):
    """Fills o and the final states by chunks, and undone [rows] with the rows whose results must not be used.

    Such a row has results that are not finite, or a gate sum from a chunk's middle that is not finite or over `limit`.

    q, k, v, g, u, o : [rows, T, K], [rows, T, K], [rows, T, V], [rows, T, K or 1], [rows, K or 0], [rows, T, V]
    table, begins, ends : [chunks, 2], [chunks], [chunks]; chunk n has the tokens table[n, 0] to table[n, 1] - 1,
        begins[n] and ends[n] are the sequences that begin and end with it, or -1
    exclusive : whether o_t = scale q_t^T (S_{t-1} + diag(u) k_t v_t^T), without the second term if u has no columns
    initial, final : [rows, sequences, K, V]
    states : [rows, chunks, K, V], filled with the state before each chunk; or [rows, 0, K, V]
    """
    K, V, padded_tokens = q.shape[2], v.shape[2], 0
    for n in range(table.shape[0]):
        padded_tokens = max(padded_tokens, -(-(table[n, 1] - table[n, 0]) // BLOCK_COLUMNS) * BLOCK_COLUMNS)
    padded_K, padded_V = -(-K // BLOCK_COLUMNS) * BLOCK_COLUMNS, -(-V // BLOCK_COLUMNS) * BLOCK_COLUMNS
    gate_sums, decays = np.zeros((padded_tokens, g.shape[2]), float32), np.zeros((padded_tokens, K), float32)
    queries, keys = np.zeros((padded_tokens, K), float32), np.zeros((padded_tokens, padded_K), float32)
    keys_transposed = np.zeros((K, padded_tokens), float32)
    values, scores = np.zeros((padded_tokens, padded_V), float32), np.zeros((padded_tokens, padded_tokens), float32)
    state, outputs = np.zeros((padded_K, padded_V), float32), np.zeros(values.shape, float32)
    half_decay = np.zeros(K, float32)  # from before the chunk's first token to after its middle token
    for row in range(q.shape[0]):
        check = float32(0)
        for n in range(table.shape[0]):
            first, tokens = table[n, 0], table[n, 1] - table[n, 0]
            if begins[n] >= 0:
                copy_part(initial[row, begins[n]], K, V, state)
            if states.shape[1] > 0:
                copy_part(state, K, V, states[row, n])
            middle = min(padded_tokens // 2, tokens) - 1
            if not sum_gates_from_middle(g[row], first, tokens, middle, gate_sums) <= limit:
                check = float32(np.nan)
                break
            for i in range(K):
                channel = i if g.shape[2] > 1 else 0
                half_decay[i] = exp(g[row, first, channel] - gate_sums[0, channel])
            exponentiate_rows(gate_sums, tokens)
            broadcast_rows(gate_sums, tokens, decays)
            # Decayed from the middle: the scores need the decays between two tokens, which are quotients of these.
            decay_chunk(q[row], k[row], first, tokens, decays, half_decay, exclusive, queries, keys, keys_transposed)
            copy_part(v[row, first:], tokens, V, values)
            multiply(queries, keys_transposed, scores, K, False)
            mask_scores(scores, q[row], k[row], first, tokens, u[row], exclusive)
            # Decayed from the chunk's start, and to its end: for the state.
            for t in range(tokens):
                for i in range(K):
                    queries[t, i] *= half_decay[i]
                    keys[t, i] *= decays[tokens - 1, i]
            multiply(scores, values, outputs, tokens, False)
            multiply(queries, state, outputs, K, True)
            for t in range(tokens):
                for j in range(V):
                    o[row, first + t, j] = scale * outputs[t, j]
                    check += outputs[t, j] * float32(0)
            for i in range(K):
                for j in range(V):
                    state[i, j] *= half_decay[i] * decays[tokens - 1, i]
            multiply(keys.T, values, state, tokens, True)
            if ends[n] >= 0:
                copy_part(state, K, V, final[row, ends[n]])
                for i in range(K):
                    for j in range(V):
                        check += state[i, j] * float32(0)
        undone[row] = not check == 0
