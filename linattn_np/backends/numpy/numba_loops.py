"""Numba's loops for float32: what stands between the products of softmax attention, in one pass over memory each."""

import numpy as np
from llvmlite import ir
from numba import types
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
TO_INTEGER = single(1.5 * 2**23)  # added to a number below 2^22, its integer is in the lowest bits
LOWEST = single(-87)  # exp of less is 0 here


@intrinsic
def larger(typing, x, y):
    """The larger of two numbers, in vectors; either one where one is NaN."""

    def generate(context, builder, signature, arguments):
        x, y = arguments
        flags = ("nnan", "nsz")
        return builder.select(builder.fcmp_ordered(">", x, y, flags=flags), x, y, flags=flags)

    return types.float32(types.float32, types.float32), generate


@intrinsic
def times_power(typing, x, n):
    """x 2^n, n from the lowest bits of TO_INTEGER + n."""

    def generate(context, builder, signature, arguments):
        x, n = (builder.bitcast(argument, WORD) for argument in arguments)
        return builder.bitcast(builder.add(x, builder.shl(n, WORD(23))), SINGLE)

    return types.float32(types.float32, types.float32), generate


@njit(**IN_ORDER)
def exp(x):
    """Within 2 units in the last place for x <= 88, and in vectors, as libm's is not: the polynomial of Cephes."""
    shifted = x * single(1.44269504088896341) + TO_INTEGER
    n = shifted - TO_INTEGER
    r = x - n * single(0.693359375) + n * single(2.12194440e-4)
    p = single(1.9875691500e-4) * r + single(1.3981999507e-3)
    p = p * r + single(8.3334519073e-3)
    p = p * r + single(4.1665795894e-2)
    p = p * r + single(1.6666665459e-1)
    p = p * r + single(5.0000001201e-1)
    return single(0) if x < LOWEST else times_power(p * r * r + r + single(1), shifted)


# -- softmax attention -------------------------------------------------------------------------------------------------
@njit(**LOOP)
def weigh(s, l, m, margin, kept):
    """Scores s [rows, keys] become exp(s - m), m [rows] higher by `margin` than all so far; l [rows] gets their sum.

    kept [rows]: what earlier weights are multiplied with.
    """
    for i in range(s.shape[0]):
        highest = s[i, 0]
        for j in range(s.shape[1]):
            highest = larger(s[i, j], highest)
        highest = larger(highest + margin, m[i])
        total = single(0)
        for j in range(s.shape[1]):
            s[i, j] = exp(s[i, j] - highest)
            total += s[i, j]
        kept[i] = exp(m[i] - highest)
        l[i] = kept[i] * l[i] + total
        m[i] = highest


@njit(**LOOP)
def accumulate(o, kept, parts):
    """o [heads, rows, V] = kept [heads, rows] o + the sum of parts [heads, n, rows, V] over n."""
    heads, n, rows, V = parts.shape
    for h in range(heads):
        for i in range(rows):
            for c in range(V):
                o[h, i, c] *= kept[h, i]
            for p in range(n):
                for c in range(V):
                    o[h, i, c] += parts[h, p, i, c]
