"""The kernels. Arrays are [B, H, T, ...] with any strides; the grid of blocks has one axis, x. `plans` launches as many
blocks as the list after *grid* says, of which the last item changes fastest.

A block has `THREADS` threads, which exchange data by tiles in shared memory, with barriers (`syncthreads`). The
arithmetic is in the dtype of the float32 or float64 arrays that each docstring lists after *Real*. `chunks` [NC, 2]
holds the first token and the last token + 1 of every chunk, so that chunks may have any length.

Names: s_... are arrays in shared memory, r_... in registers. row: a row of the batch; c: a chunk; n, s: a sequence
among all, and within its batch row, which has S; k0, v0, t0, j0: the first channel, column, token and score of a tile.
"""

import math
from functools import cache

from ...contract import SUB_CHUNK
from .runtime import THREADS, cuda

COLS = 16  # columns of V in a tile
GROUPS = THREADS // COLS  # threads that compute the same column of a tile, each for its own rows
ROWS = 64  # rows of a tile of the state or of the output
ROWS_EACH = ROWS // GROUPS  # rows of a tile that one thread keeps in registers
INNER = 32  # terms of a product's sums whose operands are in shared memory at a time
SUB = SUB_CHUNK  # tokens of a sub-chunk
SUB_EACH = SUB // GROUPS  # tokens of a sub-chunk that one thread keeps in registers
PADDED = INNER + 1  # the length of a tile's rows in shared memory: they then start in different banks
# What kernels take for granted: a thread for each row of a tile, or two for each channel of INNER; and that a thread's
# number within a column's group is that of a column of V, or of a key of a sub-chunk.
assert THREADS == ROWS == 2 * INNER and SUB == COLS


@cuda.jit(device=True, inline="always")
def coordinates(i, x, y, z):
    """The four indices of element i of an array [any number, z, y, x], the last axis first."""
    return i % x, i // x % y, i // (x * y) % z, i // (x * y * z)


@cuda.jit(device=True, inline="always")
def load(tile, rows, columns, x, first, stop, channel):
    """Copies rows first ... stop - 1 of x [T, K], from `channel` on, to tile [rows, columns]; the rest of it becomes
    0."""
    for i in range(cuda.threadIdx.x, rows * columns, THREADS):
        m, y = i // columns, i % columns
        if first + m < stop and channel + y < x.shape[1]:
            tile[m, y] = x[first + m, channel + y]
        else:
            tile[m, y] = 0


@cuda.jit(device=True, inline="always")
def load_decay(tile, rows, columns, g, first, stop, channel):
    """As `load`, with exp(g) in place of g; the rest of the tile becomes 1."""
    load(tile, rows, columns, g, first, stop, channel)
    for i in range(cuda.threadIdx.x, rows * columns, THREADS):
        tile[i // columns, i % columns] = math.exp(tile[i // columns, i % columns])


@cuda.jit
def chunk_cumsum(g, chunks, b, e):
    """Stage 1: the gate's inclusive prefix and exclusive suffix sums within each chunk. Real: b, e.

        b_i = g_1 + ... + g_i,      e_j = g_{j+1} + ... + g_C

    grid: a thread for each (batch row, head, chunk, channel), which goes through the chunk forwards, then backwards; no
    shared memory.
    """
    real = b.dtype.type
    B, H, _, K = g.shape
    NC = chunks.shape[0]
    i = cuda.grid(1)
    if i >= B * H * NC * K:
        return
    x, c, head, row = coordinates(i, K, NC, H)
    start, stop = chunks[c, 0], chunks[c, 1]
    total = real(0)
    for t in range(start, stop):
        total += real(g[row, head, t, x])
        b[row, head, t, x] = total
    total = real(0)
    for t in range(stop - 1, start - 1, -1):
        e[row, head, t, x] = total
        total += real(g[row, head, t, x])


@cuda.jit
def gated_qk(q, k, b, e, chunks, qg, kg, exclusive):
    """Stage 2: the query decayed from the chunk's start, the key decayed to its end. Real: b, e, qg, kg.

        qg_i = q_i exp(d_i),     d_i = b_i, or b_{i-1} when `exclusive` (RWKV-6)
        kg_j = k_j exp(e_j)

    grid: a thread for each (batch row, head, chunk, channel); no shared memory.
    """
    real = b.dtype.type
    B, H, _, K = q.shape
    NC = chunks.shape[0]
    i = cuda.grid(1)
    if i >= B * H * NC * K:
        return
    x, c, head, row = coordinates(i, K, NC, H)
    d = real(0)
    for t in range(chunks[c, 0], chunks[c, 1]):
        after = b[row, head, t, x]
        if not exclusive:
            d = after
        qg[row, head, t, x] = real(q[row, head, t, x]) * real(math.exp(d))
        kg[row, head, t, x] = real(k[row, head, t, x]) * real(math.exp(e[row, head, t, x]))
        d = after


@cuda.jit
def inter_chunk(kg, v, b, chunks, first_chunk, h, state):
    """Stage 3: the state before every chunk, and after the last one. Real: kg, b, h, state.

        h_{c+1} = diag(exp b_C) h_c + kg_c^T v_c

    `state` [N, H, K, V] is h before a sequence's first chunk and is overwritten with h after its last; the
    chunks of sequence s are first_chunk[s]:first_chunk[s+1].

    grid: a block for each (sequence, head, tile of 64 channels of K, tile of 16 columns of V), which computes one chunk
    after the other.
    shared memory: 32 tokens of both tiles and the chunk's decay, 20.5 KiB in float64. The state stays in
    registers: a thread has one column and 16 rows.
    """
    real = b.dtype.type
    s_kg = cuda.shared.array((INNER, ROWS), b.dtype)
    s_v = cuda.shared.array((INNER, COLS), b.dtype)
    s_decay = cuda.shared.array(ROWS, b.dtype)
    r_h = cuda.local.array(ROWS_EACH, b.dtype)

    _, H, _, K = kg.shape
    V = v.shape[3]
    S = first_chunk.shape[0] - 1
    v_tiles, k_tiles = (V + COLS - 1) // COLS, (K + ROWS - 1) // ROWS
    v_tile, k_tile, head, n = coordinates(cuda.blockIdx.x, v_tiles, k_tiles, H)
    v0, k0, row, s = v_tile * COLS, k_tile * ROWS, n // S, n % S
    thread = cuda.threadIdx.x
    col, first = thread % COLS, thread // COLS * ROWS_EACH

    for r in range(ROWS_EACH):
        r_h[r] = real(0)
        if k0 + first + r < K and v0 + col < V:
            r_h[r] = state[n, head, k0 + first + r, v0 + col]

    for c in range(first_chunk[s], first_chunk[s + 1]):
        for r in range(ROWS_EACH):
            if k0 + first + r < K and v0 + col < V:
                h[row, head, c, k0 + first + r, v0 + col] = r_h[r]
        start, stop = chunks[c, 0], chunks[c, 1]
        for t0 in range(start, stop, INNER):
            cuda.syncthreads()  # the previous tiles have been read
            load(s_kg, INNER, ROWS, kg[row, head], t0, stop, k0)
            load(s_v, INNER, COLS, v[row, head], t0, stop, v0)
            if t0 == start:  # a thread for each of the ROWS rows
                inside = k0 + thread < K
                s_decay[thread] = real(math.exp(b[row, head, stop - 1, k0 + thread])) if inside else real(0)
            cuda.syncthreads()  # the tile is complete
            if t0 == start:
                for r in range(ROWS_EACH):
                    r_h[r] *= s_decay[first + r]
            for m in range(INNER):
                for r in range(ROWS_EACH):
                    r_h[r] += s_kg[m, first + r] * s_v[m, col]

    for r in range(ROWS_EACH):
        if k0 + first + r < K and v0 + col < V:
            state[n, head, k0 + first + r, v0 + col] = r_h[r]


@cuda.jit
def intra_chunk_below(q, k, g, chunks, subs, A, exclusive):
    """Stage 4, the tiles of A below the diagonal, as products of decayed queries and decayed keys. Real: A.

        A_ij = sum_k q_ik k_jk exp(g_{j+1,k} + ... + g_ik) = (q_i exp(d_i)) . (k_j exp(e_j))
        d_i = the sum of the gates from the start of the queries' sub-chunk to query i (to i - 1 if `exclusive`: RWKV-6)
        e_j = the sum of the gates after key j up to that start

    Both are sums of gates, so that for g <= 0 no exponent is positive, and gates may be -inf.

    grid: a block for each (batch row, head, chunk, sub-chunk of 16 queries, earlier sub-chunk of 16 keys); `subs` is
    the number of sub-chunks of the longest chunk.
    shared memory: two tiles of 16 x 32, 8.3 KiB in float64. Half of the threads decay the queries, a channel
    each, the other half the keys; then a thread sums one column and 4 rows of the product.
    """
    real = A.dtype.type
    s_q = cuda.shared.array((SUB, PADDED), A.dtype)
    s_k = cuda.shared.array((SUB, PADDED), A.dtype)
    r_a = cuda.local.array(SUB_EACH, A.dtype)

    _, H, _, K = q.shape
    NC, pairs = chunks.shape[0], subs * (subs - 1) // 2
    j, c, head, row = coordinates(cuda.blockIdx.x, pairs, NC, H)
    i = 1  # the sub-chunk of the queries: row i of the triangle of pairs has i sub-chunks j of keys
    while j >= i:
        j -= i
        i += 1
    queries, keys, stop = chunks[c, 0] + i * SUB, chunks[c, 0] + j * SUB, chunks[c, 1]
    if queries >= stop:
        return
    thread = cuda.threadIdx.x
    col, first = thread % SUB, thread // SUB * SUB_EACH
    x = thread % INNER
    for r in range(SUB_EACH):
        r_a[r] = real(0)

    for k0 in range(0, K, INNER):
        total = real(0)
        if k0 + x >= K:
            for m in range(SUB):
                s_q[m, x] = real(0)
                s_k[m, x] = real(0)
        elif thread < INNER:
            for m in range(stop - queries, SUB):
                s_q[m, x] = real(0)
            for t in range(queries, min(queries + SUB, stop)):
                before = total
                total += real(g[row, head, t, k0 + x])
                d = before if exclusive else total
                s_q[t - queries, x] = real(q[row, head, t, k0 + x]) * real(math.exp(d))
        else:
            for t in range(queries - 1, keys + SUB - 1, -1):
                total += real(g[row, head, t, k0 + x])
            for m in range(SUB - 1, -1, -1):
                s_k[m, x] = real(k[row, head, keys + m, k0 + x]) * real(math.exp(total))
                total += real(g[row, head, keys + m, k0 + x])
        cuda.syncthreads()  # both tiles are complete
        for m in range(INNER):
            for r in range(SUB_EACH):
                r_a[r] += s_q[first + r, m] * s_k[col, m]
        cuda.syncthreads()  # both tiles have been read

    for r in range(SUB_EACH):
        if queries + first + r < stop:
            A[row, head, queries + first + r, j * SUB + col] = r_a[r]


@cuda.jit
def intra_chunk_diagonal(q, k, g, u, chunks, subs, A, exclusive):
    """Stage 4, the tiles of A on the diagonal, token by token, and the zeros to the right of them. Real: u, A.

        w = k_j;    for i = j + 1, j + 2, ...:    w <- w exp(g_i),  A_ij = q_i . w   (`exclusive`, RWKV-6: A_ij first)
        A_jj = q_j . (u k_j), with u = 1 for GLA

    There are no differences of cumulated gates, so that scores are exact for any gate.

    grid: a block for each (batch row, head, chunk, sub-chunk of 16 tokens); `subs` is the number of sub-chunks of the
    longest chunk.
    shared memory: three tiles of 16 x 32 and the partial sums, 20.4 KiB in float64. A thread computes the column of
    one key for a quarter of the channels; the quarters are summed at the end.
    """
    real = A.dtype.type
    s_q = cuda.shared.array((SUB, PADDED), A.dtype)
    s_k = cuda.shared.array((SUB, PADDED), A.dtype)
    s_decay = cuda.shared.array((SUB, PADDED), A.dtype)
    s_part = cuda.shared.array((GROUPS, SUB, SUB), A.dtype)

    _, H, _, K = q.shape
    C, NC = A.shape[3], chunks.shape[0]
    sub, c, head, row = coordinates(cuda.blockIdx.x, subs, NC, H)
    first = sub * SUB
    start, stop = chunks[c, 0] + first, chunks[c, 1]
    if start >= stop:
        return
    thread = cuda.threadIdx.x
    j, group = thread % SUB, thread // SUB
    for i in range(SUB):
        s_part[group, i, j] = real(0)

    for k0 in range(0, K, INNER):
        load(s_q, SUB, INNER, q[row, head], start, stop, k0)
        load(s_k, SUB, INNER, k[row, head], start, stop, k0)
        load_decay(s_decay, SUB, INNER, g[row, head], start, stop, k0)
        cuda.syncthreads()  # the three tiles are complete
        for x in range(group, min(INNER, K - k0), GROUPS):
            w = s_k[j, x]
            for i in range(SUB):
                before = w
                if i > j:
                    w *= s_decay[i, x]
                    s_part[group, i, j] += s_q[i, x] * (before if exclusive else w)
                elif i == j:
                    s_part[group, i, j] += s_q[i, x] * (u[head, k0 + x] * w)
        cuda.syncthreads()  # the tiles have been read; after the last ones, all partial sums are written

    for p in range(thread, SUB * SUB, THREADS):
        m, x = p // SUB, p % SUB
        total = real(0)
        for quarter in range(GROUPS):
            total += s_part[quarter, m, x]
        if start + m < stop:
            A[row, head, start + m, first + x] = total
    for p in range(thread, SUB * (C - first - SUB), THREADS):
        m, x = p % SUB, p // SUB
        if start + m < stop:
            A[row, head, start + m, first + SUB + x] = 0


@cuda.jit
def combine(qg, h, A, v, chunks, subs, o, scale):
    """Stage 5: o, from the state before the chunk and from the chunk's own tokens. Real: qg, h, A, scale.

        o = scale * (qg h_c + A v)

    grid: a block for each (batch row, head, chunk, tile of 64 of its tokens, tile of 16 columns of V); `subs` is the
    number of sub-chunks of the longest chunk.
    shared memory: 32 columns of the left and 32 rows of the right factor, 20.5 KiB in float64. A thread sums
    one column and 16 rows in registers.
    """
    real = A.dtype.type
    s_left = cuda.shared.array((ROWS, PADDED), A.dtype)
    s_right = cuda.shared.array((INNER, COLS), A.dtype)
    r_o = cuda.local.array(ROWS_EACH, A.dtype)

    _, H, _, K = qg.shape
    V, NC = v.shape[3], chunks.shape[0]
    v_tiles, t_tiles = (V + COLS - 1) // COLS, (subs * SUB + ROWS - 1) // ROWS
    v_tile, t_tile, c, n = coordinates(cuda.blockIdx.x, v_tiles, t_tiles, NC)
    v0, first_row, head, row = v_tile * COLS, t_tile * ROWS, n % H, n // H
    start, stop = chunks[c, 0], chunks[c, 1]
    t0 = start + first_row
    if t0 >= stop:
        return
    thread = cuda.threadIdx.x
    col, first = thread % COLS, thread // COLS * ROWS_EACH
    for r in range(ROWS_EACH):
        r_o[r] = real(0)

    for k0 in range(0, K, INNER):  # qg h
        load(s_left, ROWS, INNER, qg[row, head], t0, stop, k0)
        load(s_right, INNER, COLS, h[row, head, c], k0, K, v0)
        cuda.syncthreads()  # both tiles are complete
        for m in range(INNER):
            for r in range(ROWS_EACH):
                r_o[r] += s_left[first + r, m] * s_right[m, col]
        cuda.syncthreads()  # both tiles have been read

    for j0 in range(0, min(stop, t0 + ROWS) - start, INNER):  # A v, up to the diagonal
        load(s_left, ROWS, INNER, A[row, head], t0, stop, j0)
        load(s_right, INNER, COLS, v[row, head], start + j0, stop, v0)
        cuda.syncthreads()  # both tiles are complete
        for m in range(INNER):
            for r in range(ROWS_EACH):
                if j0 + m <= first_row + first + r:  # 0 times a later token's NaN would be NaN
                    r_o[r] += s_left[first + r, m] * s_right[m, col]
        cuda.syncthreads()  # both tiles have been read

    for r in range(ROWS_EACH):
        if t0 + first + r < stop and v0 + col < V:
            o[row, head, t0 + first + r, v0 + col] = scale * r_o[r]


@cache
def recurrent(key_channels, delta):
    """The kernel for K up to `key_channels`, a power of 2 of at most 256, which determines the registers for the state.

    `delta`: whether for a delta rule. Those kernels read a and b, the others u.
    """
    each = key_channels // GROUPS
    # of which the arrays below fit in 48 KiB, the most that Numba compiles
    tokens = min(INNER // 2, 512 // key_channels) if delta else min(INNER, 1024 // key_channels)
    delta_tokens = tokens if delta else 1

    @cuda.jit
    def recurrent(q, k, v, g, u, a, b, bounds, slots, state, o, scale, exclusive):
        """The recurrence, token by token. Real: u, scale.

            S_t = diag(exp g_t) S_{t-1} + k_t v_t^T,      o_t = scale q_t^T S_t
            `exclusive` (RWKV-6): o_t = scale q_t^T (S_{t-1} + diag(u) k_t v_t^T)

        With `delta` b_t (a_t^T S')^T is added to S_t, where S' is diag(exp g_t) S_{t-1}, or if `exclusive` (RWKV-7)
        S_{t-1}, and o_t = scale q_t^T S_t always.

        `state` [N, H, K, V], or a pool with sequence n in row slots[n], is read first and overwritten with
        the final state; sequence s of a row has the tokens bounds[s]:bounds[s+1].

        grid: a block for each (sequence, head, tile of 16 columns of V). A thread keeps every fourth channel of one
        column of S in registers; the four threads of a column add their parts of q^T S and a^T S' in shared memory.
        shared memory: `tokens` tokens (4 for K = 256, 32 up to K = 32; with `delta` half as many) and their partial
        sums, up to 46 KiB in float64.
        """
        real = u.dtype.type
        s_q = cuda.shared.array((tokens, key_channels), u.dtype)
        s_k = cuda.shared.array((tokens, key_channels), u.dtype)
        s_a = cuda.shared.array((delta_tokens, key_channels), u.dtype)
        s_b = cuda.shared.array((delta_tokens, key_channels), u.dtype)
        s_decay = cuda.shared.array((tokens, key_channels), u.dtype)
        s_v = cuda.shared.array((tokens, COLS), u.dtype)
        s_part = cuda.shared.array((tokens, GROUPS, COLS), u.dtype)
        s_read = cuda.shared.array((2, GROUPS, COLS), u.dtype)  # parts of a^T S', for even and for odd tokens
        s_u = cuda.shared.array(key_channels, u.dtype)
        r_s = cuda.local.array(each, u.dtype)

        _, H, _, K = q.shape
        V = v.shape[3]
        S = bounds.shape[0] - 1
        v_tiles = (V + COLS - 1) // COLS
        block = cuda.blockIdx.x
        v0, head, n = block % v_tiles * COLS, block // v_tiles % H, block // (v_tiles * H)
        row, s = n // S, n % S
        slot = slots[n]
        thread = cuda.threadIdx.x
        col, group = thread % COLS, thread // COLS

        for r in range(each):
            x = group + r * GROUPS
            r_s[r] = real(state[slot, head, x, v0 + col]) if x < K and v0 + col < V else real(0)

        for x in range(thread, key_channels, THREADS):
            s_u[x] = u[head, x] if x < K else real(0)

        start, stop = bounds[s], bounds[s + 1]
        for t0 in range(start, stop, tokens):
            count = min(tokens, stop - t0)
            load(s_q, count, key_channels, q[row, head], t0, stop, 0)
            load(s_k, count, key_channels, k[row, head], t0, stop, 0)
            load_decay(s_decay, count, key_channels, g[row, head], t0, stop, 0)
            load(s_v, count, COLS, v[row, head], t0, stop, v0)
            if delta:
                load(s_a, count, key_channels, a[row, head], t0, stop, 0)
                load(s_b, count, key_channels, b[row, head], t0, stop, 0)
            cuda.syncthreads()  # the tokens are in shared memory; the previous tokens' parts have been summed
            for m in range(count):
                read = real(0)
                if delta:
                    part = real(0)
                    for r in range(each):
                        x = group + r * GROUPS
                        part += s_a[m, x] * (r_s[r] if exclusive else s_decay[m, x] * r_s[r])
                    s_read[m % 2, group, col] = part
                    cuda.syncthreads()  # the four parts are written; those of the previous token have been read
                    for quarter in range(GROUPS):
                        read += s_read[m % 2, quarter, col]
                part = real(0)
                for r in range(each):
                    x = group + r * GROUPS
                    write = s_k[m, x] * s_v[m, col]
                    if exclusive and not delta:
                        part += s_q[m, x] * (r_s[r] + s_u[x] * write)
                    if delta:
                        write += s_b[m, x] * read
                    r_s[r] = s_decay[m, x] * r_s[r] + write
                    if delta or not exclusive:
                        part += s_q[m, x] * r_s[r]
                s_part[m, group, col] = part
            cuda.syncthreads()  # all parts are written; the tokens have been read
            for i in range(thread, count * COLS, THREADS):
                m, y = i // COLS, i % COLS
                total = real(0)
                for quarter in range(GROUPS):
                    total += s_part[m, quarter, y]
                if v0 + y < V:
                    o[row, head, t0 + m, v0 + y] = scale * total

        for r in range(each):
            x = group + r * GROUPS
            if x < K and v0 + col < V:
                state[slot, head, x, v0 + col] = r_s[r]

    return recurrent
