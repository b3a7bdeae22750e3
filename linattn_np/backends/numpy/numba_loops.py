"""Numba's loops for float32: whole tiles of softmax attention, products and what stands between them, in one call.

Products take their left side number by number, at any strides, and of the right side rows of whole vectors. So matrices
come with COLUMNS-fold numbers a row, and rooms of ROWS-fold rows; what stands behind their own numbers is 0 or unread.
"""

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...numba_cache import njit

LOOP = {
    "nogil": True,
    "error_model": "numpy",  # a look for zeros at every division keeps a loop from vectors
    "fastmath": {"contract", "nsz", "arcp", "reassoc"},
}
IN_ORDER = LOOP | {"fastmath": {"contract"}, "forceinline": True}
single = np.float32
WORD, SINGLE = ir.IntType(32), ir.FloatType()
LANES = 16  # numbers in a vector: what AVX-512 has in a register, and others in two
ROWS, VECTORS = (8, 2) if binding.get_host_cpu_features().get("avx512f") else (4, 1)  # sums that registers hold
COLUMNS = LANES * VECTORS
VECTOR, LANE_NUMBERS = ir.VectorType(SINGLE, LANES), ir.VectorType(WORD, LANES)
TO_EXPONENT = single(1.5 * 2**23 + 127)  # added to n, the lowest bits are the exponent of 2^n
LOWEST = single(-87)  # exp of less is 0 here
PANEL = 64  # keys of a panel
TILE = 64  # rows of a tile


# -- what Numba has no words for --------------------------------------------------------------------------------------
@intrinsic
def larger(typing, x, y):
    """The larger of two numbers, in vectors; either one where one is NaN."""

    def generate(context, builder, signature, arguments):
        x, y = arguments
        flags = ("nnan", "nsz")
        return builder.select(builder.fcmp_ordered(">", x, y, flags=flags), x, y, flags=flags)

    return types.float32(types.float32, types.float32), generate


@intrinsic
def power_of(typing, shifted):
    """2^n of TO_EXPONENT + n."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.shl(builder.bitcast(arguments[0], WORD), WORD(23)), SINGLE)

    return types.float32(types.float32), generate


@intrinsic
def float32_of_half(typing, bits):
    """float32 of a float16's bits."""

    def generate(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), SINGLE)

    return types.float32(types.uint16), generate


@intrinsic
def half_of_float32(typing, x):
    """The bits of the float16 that is nearest."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@njit(**IN_ORDER)
def exp(x):
    """Within 2 units in the last place for x <= 88, and in vectors, as libm's is not: the polynomial of Cephes."""
    shifted = x * single(1.44269504088896341) + TO_EXPONENT
    n = shifted - TO_EXPONENT
    r = x - n * single(0.693359375) + n * single(2.12194440e-4)
    p = single(1.9875691500e-4) * r + single(1.3981999507e-3)
    p = p * r + single(8.3334519073e-3)
    p = p * r + single(4.1665795894e-2)
    p = p * r + single(1.6666665459e-1)
    p = p * r + single(5.0000001201e-1)
    return single(0) if x < LOWEST else (p * r * r + r + single(1)) * power_of(shifted)


@njit(**IN_ORDER)
def tanh(x):
    """Within 2 units in the last place: Cephes' polynomial near 0, exp beyond."""
    s, e = x * x, exp(single(-2) * abs(x))
    p = single(2.06390887954e-2) - single(5.70498872745e-3) * s
    p = p * s - single(5.37397155531e-2)
    p = p * s + single(1.33314422036e-1)
    p = p * s - single(3.33332819422e-1)
    beyond = single(1) - single(2) * e / (single(1) + e)
    return p * s * x + x if s < single(0.390625) else (beyond if x > 0 else -beyond)


@intrinsic
def sums(typing, a, a_row, a_column, b, b_row, depth, c, c_row, add):
    """c [ROWS, COLUMNS] = a [ROWS, depth] b [depth, COLUMNS], or c += a b: addresses, and strides in bytes."""

    def generate(context, builder, signature, arguments):
        a, a_row, a_column, b, b_row, depth, c, c_row, add = arguments
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(VECTOR, [VECTOR] * 3), f"llvm.fma.v{LANES}f32"
        )

        def at(base, type, vector=0):
            return builder.inttoptr(builder.add(base, ir.Constant(base.type, 4 * LANES * vector)), type.as_pointer())

        def rows_of(base, stride):
            for _ in range(ROWS):
                yield base
                base = builder.add(base, stride)

        def everywhere(number):
            one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), number, ir.Constant(WORD, 0))
            return builder.shuffle_vector(one, one, ir.Constant(LANE_NUMBERS, [0] * LANES))

        totals = [[cgutils.alloca_once_value(builder, zero) for _ in range(VECTORS)] for _ in range(ROWS)]
        starts = list(rows_of(a, a_row))
        with cgutils.for_range(builder, depth) as loop:
            place, row = builder.mul(loop.index, a_column), builder.add(b, builder.mul(loop.index, b_row))
            numbers = [builder.load(at(row, VECTOR, vector), align=4) for vector in range(VECTORS)]
            for start, its in zip(starts, totals):
                one = everywhere(builder.load(at(builder.add(start, place), SINGLE)))
                for number, total in zip(numbers, its):
                    builder.store(builder.call(fma, [number, one, builder.load(total)]), total)
        for row, its in zip(rows_of(c, c_row), totals):
            for vector, total in enumerate(its):
                before = builder.select(add, builder.load(at(row, VECTOR, vector), align=4), zero)
                builder.store(builder.fadd(before, builder.load(total)), at(row, VECTOR, vector), align=4)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 8, types.boolean), generate


@njit(**LOOP)
def multiply(a, b, c, depth, add):
    """c = a b over the first `depth` columns of a, or c += a b; rows of b and c are contiguous."""
    a_row, a_column = a.strides
    for j in range(0, c.shape[1], COLUMNS):
        for i in range(0, c.shape[0], ROWS):
            sums(
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


# -- softmax attention -------------------------------------------------------------------------------------------------
# Scores are turned, [keys of a panel, rows of a tile], so that a row's maximum and sum are taken across no lanes.
@njit(**LOOP)
def gather(x, first, count, scale, to):
    """to [rows, D] = scale times the tokens from `first` on of x [G, T, D]."""
    for g in range(x.shape[0]):
        for t in range(count):
            for c in range(x.shape[2]):
                to[g * count + t, c] = scale * x[g, first + t, c]


@njit(**LOOP)
def gather_numbers(x, first, count, to):
    """Copy a chunk's tokens of x [G, T]."""
    for row in range(x.shape[0] * count):
        to[row] = x[row // count, first + row % count]


@njit(**LOOP)
def seen(first_key, last_key, first, count, rows, keys):
    """keys [2, rows'] = the first key that each row sees and the one behind the last, none of rows beyond `rows`; the
    same for all rows together.
    """
    begin, end = first_key[first], last_key[first]
    for row in range(keys.shape[1]):
        t = first + row % count
        keys[0, row], keys[1, row] = first_key[t], last_key[t] if row < rows else 0
        begin, end = min(begin, first_key[t]), max(end, last_key[t])
    return begin, end


@njit(**LOOP)
def hide(s, key, keys, rows):
    """-inf in place of scores s [keys, rows] that are not seen, `key` being the first."""
    whole = True
    for i in range(rows):
        whole &= keys[0, i] <= key and key + s.shape[0] <= keys[1, i]
    if not whole:
        for j in range(s.shape[0]):
            for i in range(s.shape[1]):
                s[j, i] = s[j, i] if (keys[0, i] <= key + j) & (key + j < keys[1, i]) else single(-np.inf)


@njit(**LOOP)
def zero_of(s):
    """0, or NaN where a score is not finite; a sum that once overflowed is never finite again."""
    total = single(0)
    for j in range(s.shape[0]):
        for i in range(s.shape[1]):
            total += s[j, i] * single(0)
    return total


@njit(**LOOP)
def cap(s, softcap):
    for j in range(s.shape[0]):
        for i in range(s.shape[1]):
            s[j, i] = softcap * tanh(s[j, i] / softcap)


@njit(**LOOP)
def weigh(s, m, l, kept):
    """Scores s [keys, rows] become exp(s - m); m and l [rows] are of all keys so far; o takes `kept` [rows]."""
    for i in range(s.shape[1]):
        kept[i] = m[i]
    for j in range(s.shape[0]):
        for i in range(s.shape[1]):
            m[i] = larger(s[j, i], m[i])
    for i in range(s.shape[1]):
        kept[i] = exp(kept[i] - m[i])
        l[i] *= kept[i]
    for j in range(s.shape[0]):
        for i in range(s.shape[1]):
            s[j, i] = exp(s[j, i] - m[i])
            l[i] += s[j, i]


@njit(**LOOP)
def tokens_of_tile(G, first, stop):
    """(tokens, rows, rows for whole vectors) of a tile from `first` on."""
    count = min(stop - first, max(1, TILE // G))
    return count, G * count, -(-G * count // COLUMNS) * COLUMNS


@njit(**LOOP)
def attend(heads, q, keys, values, first_key, last_key, first, stop, softcap, scale, o, m, l):
    """`attend_head` for every head from heads[0] to before heads[1] of arrays with one more axis."""
    well = True
    for head in range(heads[0], heads[1]):
        arrays, sums = (q[head], keys[head], values[head]), (o[head], m[head], l[head])
        well &= attend_head(*arrays, first_key, last_key, first, stop, softcap, scale, *sums)
    return well


@njit(**LOOP)
def attend_head(q, keys, values, first_key, last_key, first, stop, softcap, scale, o, m, l):
    """Fills o [G, T, V] of the tokens `first` to `stop`, and tells whether it is finite; m and l [G, T] come in as they
    are before any key. Where a score is not finite, o is NaN.

    Of q [G, T, K]; keys [n, PANEL, K'] and values [n, PANEL, V'] are panels. Token t sees the keys from first_key[t] to
    before last_key[t].
    """
    G, K, check = q.shape[0], q.shape[2], single(0)
    while first < stop:
        count, rows, size = tokens_of_tile(G, first, stop)
        turned, s, results = (
            np.zeros((K, size), single),
            np.empty((PANEL, size), single),
            np.zeros((size, values.shape[2]), single),
        )
        highest, total, kept = np.zeros(size, single), np.ones(size, single), np.empty(size, single)
        its = np.empty((2, size), np.int32)
        gather(q, first, count, scale, turned.T)
        gather_numbers(m, first, count, highest)
        gather_numbers(l, first, count, total)
        begin, end = seen(first_key, last_key, first, count, rows, its)
        zero = single(0)
        for panel in range(begin // PANEL, -(-end // PANEL)):
            multiply(keys[panel], turned, s, K, False)
            zero += zero_of(s)
            if softcap > 0:
                cap(s, softcap)
            hide(s, panel * PANEL, its, rows)
            weigh(s, highest, total, kept)
            for row in range(rows):
                if kept[row] != 1:
                    for c in range(results.shape[1]):
                        results[row, c] *= kept[row]
            multiply(s.T, values[panel], results, PANEL, True)
        for row in range(rows):
            g, t = row // count, first + row % count
            m[g, t], l[g, t] = highest[row], total[row]
            share = zero + single(1) / (single(1) if its[0, row] >= its[1, row] else total[row])
            for c in range(o.shape[2]):
                o[g, t, c] = results[row, c] * share
                check += o[g, t, c] * single(0)
        first += count
    return check == 0


@njit(**LOOP)
def pull(q, do, m, l, own, keys, values, first_key, last_key, softcap, scale, dq, dk, dv):
    """Fills dq [G, T, K], adds to dk [n, PANEL, K'] and dv [n, PANEL, V'], and tells whether all are finite.

    The arrays are those of `attend`, and `own` [G, T] is do . o less L's gradient.
    """
    (G, T, K), V, check, first = q.shape, do.shape[2], single(0), 0
    while first < T:
        count, rows, size = tokens_of_tile(G, first, T)
        queries, turned = np.zeros((size, dk.shape[2]), single), np.zeros((K, size), single)
        results, turned_results = np.zeros((size, dv.shape[2]), single), np.zeros((V, size), single)
        p, ds, dqueries = (
            np.empty((PANEL, size), single),
            np.empty((PANEL, size), single),
            np.zeros((size, dk.shape[2]), single),
        )
        highest, total, share = np.zeros(size, single), np.ones(size, single), np.zeros(size, single)
        its = np.empty((2, size), np.int32)
        gather(q, first, count, scale, queries)
        gather(q, first, count, scale, turned.T)
        gather(do, first, count, single(1), results)
        gather(do, first, count, single(1), turned_results.T)
        gather_numbers(m, first, count, highest)
        gather_numbers(l, first, count, total)
        gather_numbers(own, first, count, share)
        begin, end = seen(first_key, last_key, first, count, rows, its)
        for row in range(rows):
            if its[0, row] >= its[1, row]:
                total[row] = 1
        for panel in range(begin // PANEL, -(-end // PANEL)):
            multiply(keys[panel], turned, p, K, False)
            multiply(values[panel], turned_results, ds, V, False)
            for j in range(PANEL):
                for i in range(size):
                    ds[j, i] -= share[i]
            if softcap > 0:
                cap(p, softcap)
                for j in range(PANEL):
                    for i in range(size):
                        ds[j, i] *= single(1) - (p[j, i] / softcap) * (p[j, i] / softcap)
            hide(p, panel * PANEL, its, rows)
            for j in range(PANEL):
                for i in range(size):
                    p[j, i] = exp(p[j, i] - highest[i]) / total[i]
                    ds[j, i] *= p[j, i]
            multiply(p, results, dv[panel], rows, True)
            multiply(ds, queries, dk[panel], rows, True)
            multiply(ds.T, keys[panel], dqueries, PANEL, True)
        for row in range(rows):
            for c in range(K):
                dq[row // count, first + row % count, c] = scale * dqueries[row, c]
                check += dqueries[row, c] * single(0)
        first += count
    for parts in (dk, dv):
        for panel in range(parts.shape[0]):
            for j in range(PANEL):
                for c in range(parts.shape[2]):
                    check += parts[panel, j, c] * single(0)
    return check == 0


# -- casts ------------------------------------------------------------------------------------------------------------
CASTS = bool(binding.get_host_cpu_features().get("f16c"))  # without, LLVM calls functions that may not be there


@njit(nogil=True)
def widen(bits, to):
    for i in range(len(bits)):
        to[i] = float32_of_half(bits[i])


@njit(nogil=True)
def narrow(x, bits):
    for i in range(len(x)):
        bits[i] = half_of_float32(x[i])


# -- the gated family -------------------------------------------------------------------------------------------------
@njit(**LOOP)
def sums_from_middle(g, first, count, middle, c):
    """c [tokens, K or 1] = the gates' sums from a chunk's middle token; the largest of them, NaN or inf if one is."""
    worst, check = single(0), single(0)
    for i in range(g.shape[1]):
        c[middle, i] = 0
    for t in range(middle + 1, count):
        for i in range(g.shape[1]):
            c[t, i] = c[t - 1, i] + g[first + t, i]
    for t in range(middle - 1, -1, -1):
        for i in range(g.shape[1]):
            c[t, i] = c[t + 1, i] - g[first + t + 1, i]
    for t in range(count):
        for i in range(g.shape[1]):
            worst = larger(abs(c[t, i]), worst)
            check += c[t, i] * single(0)
    return worst + check


@njit(**LOOP)
def exp_of(x, count):
    for t in range(count):
        for i in range(x.shape[1]):
            x[t, i] = exp(x[t, i])


@njit(**LOOP)
def spread(x, count, to):
    """to [tokens, K] = x [tokens, K or 1]."""
    for t in range(count):
        for i in range(to.shape[1]):
            to[t, i] = x[t, i] if x.shape[1] > 1 else x[t, 0]


@njit(**LOOP)
def chunks_of_row(q, k, v, g, u, table, begins, ends, limit, scale, exclusive, initial, o, final, states):
    """`chunked.streamed` of one row, all of whose chunks are weak and finite; whether they are."""
    K, V, chunk, bonus = q.shape[1], v.shape[1], 0, u.shape[0] > 0
    for n in range(table.shape[0]):
        chunk = max(chunk, -(-(table[n, 1] - table[n, 0]) // COLUMNS) * COLUMNS)
    width = -(-K // COLUMNS) * COLUMNS
    c, E = np.zeros((chunk, g.shape[1]), single), np.zeros((chunk, K), single)
    queries, keys, turned = np.zeros((chunk, K), single), np.zeros((chunk, width), single), np.zeros((K, chunk), single)
    values, A = np.zeros((chunk, -(-V // COLUMNS) * COLUMNS), single), np.zeros((chunk, chunk), single)
    h, results, check = np.zeros((width, values.shape[1]), single), np.zeros(values.shape, single), single(0)
    start = np.zeros(K, single)
    for n in range(table.shape[0]):
        first, count = table[n, 0], table[n, 1] - table[n, 0]
        if begins[n] >= 0:
            for i in range(K):
                for j in range(V):
                    h[i, j] = initial[begins[n], i, j]
        if states.shape[0] > 0:
            for i in range(K):
                for j in range(V):
                    states[n, i, j] = h[i, j]
        if not sums_from_middle(g, first, count, min(chunk // 2, count) - 1, c) <= limit:
            return False
        for i in range(K):
            start[i] = exp(g[first, i if g.shape[1] > 1 else 0] - c[0, i if g.shape[1] > 1 else 0])
        exp_of(c, count)
        spread(c, count, E)
        for t in range(count):
            for i in range(K):
                queries[t, i] = q[first + t, i] * E[t, i]
                keys[t, i] = k[first + t, i] / E[t, i]
                turned[i, t] = keys[t, i]
            for j in range(V):
                values[t, j] = v[first + t, j]
        if exclusive:
            for t in range(count - 1, -1, -1):
                for i in range(K):
                    queries[t, i] = q[first + t, i] * (E[t - 1, i] if t > 0 else single(1) / start[i])
        multiply(queries, turned, A, K, False)
        for t in range(count):
            for s in range(t + 1 - exclusive, chunk):
                A[t, s] = 0
            if bonus:
                for i in range(K):
                    A[t, t] += q[first + t, i] * u[i] * k[first + t, i]
            for i in range(K):
                queries[t, i] *= start[i]
                keys[t, i] *= E[count - 1, i]
        multiply(A, values, results, count, False)
        multiply(queries, h, results, K, True)
        for t in range(count):
            for j in range(V):
                o[first + t, j] = scale * results[t, j]
                check += results[t, j] * single(0)
        for i in range(K):
            for j in range(V):
                h[i, j] *= start[i] * E[count - 1, i]
        multiply(keys.T, values, h, count, True)
        if ends[n] >= 0:
            for i in range(K):
                for j in range(V):
                    final[ends[n], i, j] = h[i, j]
                    check += h[i, j] * single(0)
    return check == 0


@njit(**LOOP)
def chunks(q, k, v, g, u, table, begins, ends, limit, scale, exclusive, initial, o, final, states, undone):
    """The same of rows: q and k [rows, T, K], v and o [rows, T, V], g [rows, T, K or 1], u [rows, K or 0], the initial
    and final states [rows, sequences, K, V], and `states` [rows, chunks or 0, K, V], those before each chunk. Tells
    which rows are `undone` [rows].

    Chunk n holds the tokens from table[n, 0] to before table[n, 1]. It begins sequence begins[n] and ends sequence
    ends[n], or none where that is -1.
    """
    for row in range(q.shape[0]):
        of_row = q[row], k[row], v[row], g[row], u[row], table, begins, ends, limit, scale, exclusive
        undone[row] = not chunks_of_row(*of_row, initial[row], o[row], final[row], states[row])
