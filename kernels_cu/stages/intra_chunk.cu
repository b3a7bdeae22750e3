// what      Stage 4 of the chunked form: the scores of a chunk, A_ij the weight of token j in the output of token i.
// math      A_ij = sum_k q_ik k_jk exp(g_{j+1,k} + ... + g_ik), j <= i   (RWKV-6: to g_{i-1,k}; A_ii = sum_k q_ik u_k
//           k_ik). The decay of a pair is the query's decay since a border between both tokens, times the key's decay
//           up to it. Borders: the end of the key's 16 tokens; for pairs in 16 tokens, the end of the key's 8; for
//           pairs in 8 tokens, their middle, where a query before it or a key after it is divided by the decay
// shapes    q k g [B, H, T, K], u [H, K], A [B, H, T, C] float32, zero above the diagonal
// grid      a block for every (batch, head, chunk, ROWS rows of it), batch slowest; a warp has 16 rows
// smem      Shared
// barriers  two for every ROWS keys: decayed queries and keys are stored | they have been read. Within its 16 rows a
//           warp uses __syncwarp
// numerics  scores within 16 tokens in three tf32 products; a token's with itself in float32; others: copies.cuh.
//           A decay is a product of tokens' decays, each at least e^-20 if it is from or to a middle: so a divisor is
//           not 0, and e^-20 of a token passes a reset within its 8 tokens. If a gate is above GROWTH, pairs in its 8
//           tokens are computed one by one
// source    Yang et al., 2024, section 4.3 (secondary chunking)
// limits    K <= BK; BK of 64, 128, 256; C a multiple of 16
#include "read_order.cuh"
#include "decays.cuh"
#include "gated/forward_tiles.cuh"
#include "growth.cuh"
#include "ptx.cuh"
#include "stages/copies.cuh"
#include "tensor.cuh"

constexpr int SUB = 16, UNIT = 8, HALF = UNIT / 2;  // tokens of a warp; of a unit with a middle; on each side of this

template <typename T, typename G> struct Args {
  Rows<const T> q, k;
  Rows<const G> g;
  const float* u;  // [H, K], null for GLA
  Rows<float> A;
  Shape shape;
  i64 bytes;  // 16, 8, 4 or 2: all rows of q, k and g start on multiples of it, and are multiples long
};

// The warps and the rows of a block.
template <int BK> constexpr int WARPS = BK > 128 ? 2 : 4;
template <int BK> constexpr int ROWS = WARPS<BK> * SUB;
// The distance of rows of BK channels in floats: tensor cores' loads of pairs then touch every bank once.
template <int BK> constexpr int ROW = BK + 8;
// Neighbouring channels of a lane.
template <typename T> constexpr int WIDTH = 4 / sizeof(T);

template <int BK> struct alignas(16) Shared {
  float q[ROWS<BK> * ROW<BK>];  // queries, decayed from the border that is used next
  float k[ROWS<BK> * ROW<BK>];  // keys, decayed to it
  float total[WARPS<BK>][BK];   // the decay over each 16 keys
  float carry[WARPS<BK>][BK];   // the decay from the end of the block's keys to the start of each 16 rows
};

// Loads a lane's W channels of 16 tokens; zeros from token `rows` and channel `channels` on. bytes: as in Args.
template <int W, typename X>
__device__ __forceinline__ void load(Piece<W, X> (&x)[SUB], const X* from, i64 stride, int rows, int channels,
                                     int bytes) {
  const bool aligned = bytes >= W * int(sizeof(X));
#pragma unroll
  for (int i = 0; i < SUB; ++i) {
    x[i] = {};
    if (aligned) {
      if (i < rows && channels > 0) x[i].load(from + i * stride);
    } else {
      float y[W];
#pragma unroll
      for (int c = 0; c < W; ++c) y[c] = i < rows && c < channels ? to_float(from[i * stride + c]) : 0.f;
      x[i].set(y);
    }
  }
}

// Stores W neighbouring floats; `to` is aligned to them.
template <int W> __device__ __forceinline__ void put(float* to, const float (&x)[W]) {
  Piece<W, float> piece;
  piece.set(x);
  piece.store(to);
}

// Stores queries decayed from the middle of their 8 tokens, and keys decayed to it, for a lane's channels. a: decays.
template <class ReadOrder, int BK, int W, typename T>
__device__ __forceinline__ void decay_about_middles(float* q, float* k, const Piece<W, T> (&queries)[SUB],
                                                    const Piece<W, T> (&keys)[SUB], const float (&a)[SUB][W]) {
  constexpr bool INCLUSIVE = !ReadOrder::reads_before_write;  // a query is decayed by its own token's gate, too
#pragma unroll
  for (int first = 0; first < SUB; first += HALF) {
    const bool after = first & HALF;  // the middle
    float between[W];                 // the decay of the tokens between the middle and this one
#pragma unroll
    for (int c = 0; c < W; ++c) between[c] = 1.f;
#pragma unroll
    for (int n = 0; n < HALF; ++n) {
      const int i = first + (after ? n : HALF - 1 - n);
      float x[W], y[W];
#pragma unroll
      for (int c = 0; c < W; ++c) {
        const float without = between[c], with = without * fmaxf(a[i][c], LEAST_DECAY);  // this token's decay
        const float query = after == INCLUSIVE ? with : without;
        x[c] = queries[i].get(c) * (after ? query : inverse(query));
        y[c] = keys[i].get(c) * (after ? inverse(with) : without);
        between[c] = with;
      }
      put(q + i * ROW<BK>, x);
      put(k + i * ROW<BK>, y);
    }
  }
}

// Stores queries decayed from the start of their 8 tokens. `unit_decays`: decays over the first and the second 8.
template <class ReadOrder, int BK, int W, typename T>
__device__ __forceinline__ void decay_from_starts(float* q, const Piece<W, T> (&queries)[SUB], const float (&a)[SUB][W],
                                                  float (&unit_decays)[2][W]) {
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
    for (int c = 0; c < W; ++c) unit_decays[unit][c] = 1.f;
#pragma unroll
    for (int i = UNIT * unit; i < UNIT * (unit + 1); ++i) {
      float x[W];
#pragma unroll
      for (int c = 0; c < W; ++c) {
        const float before = unit_decays[unit][c], after = before * a[i][c];
        x[c] = queries[i].get(c) * (ReadOrder::reads_before_write ? before : after);
        unit_decays[unit][c] = after;
      }
      put(q + i * ROW<BK>, x);
    }
  }
}

// Stores keys decayed to the end of their TOKENS tokens. Sets `all` to the decay over the first TOKENS.
template <int TOKENS, int BK, int W, typename T>
__device__ __forceinline__ void decay_to_ends(float* k, const Piece<W, T> (&keys)[SUB], const float (&a)[SUB][W],
                                              float (&all)[W]) {
#pragma unroll
  for (int i = SUB - 1; i >= 0; --i) {
    float x[W];
#pragma unroll
    for (int c = 0; c < W; ++c) {
      if (i % TOKENS == TOKENS - 1) all[c] = 1.f;
      x[c] = keys[i].get(c) * all[c];
      all[c] *= a[i][c];
    }
    put(k + i * ROW<BK>, x);
  }
}

// Multiplies a lane's channels of 8 rows by `factor`.
template <int BK, int W> __device__ __forceinline__ void multiply_unit(float* rows, const float (&factor)[W]) {
#pragma unroll
  for (int i = 0; i < UNIT; ++i) {
    float x[W];
#pragma unroll
    for (int c = 0; c < W; ++c) x[c] = rows[i * ROW<BK> + c] * factor[c];
    put(rows + i * ROW<BK>, x);
  }
}

// Sums each of a lane's first 2 HALF values over 2 HALF neighbouring lanes. Lane l returns the sum of value
// l % (2 HALF).
template <int HALF> __device__ __forceinline__ float sum_each(float (&x)[SUB]) {
  const bool upper = threadIdx.x & HALF;
#pragma unroll
  for (int n = 0; n < HALF; ++n) {
    const float other = __shfl_xor_sync(0xffffffffu, upper ? x[n] : x[n + HALF], HALF);
    x[n] = (upper ? x[n + HALF] : x[n]) + other;
  }
  if constexpr (HALF > 1) return sum_each<HALF / 2>(x);
  else return x[0];
}

// A warp's 16 tokens in memory. rows, channels: how many of them exist.
template <typename T, typename G> struct WarpTokens {
  const T *q, *k;
  const G* g;
  int rows, channels;
};

// Sets `within` to a lane's scores of the warp's 16 queries with its 16 keys, and stores in q the queries, decayed from
// the start of these tokens, in k the keys, decayed to their end, and in `total` the decay over these tokens.
template <class ReadOrder, typename T, typename G, int BK>
__device__ __forceinline__ void score_within(float (&within)[2][4], float* q, float* k, float* total,
                                             const WarpTokens<T, G>& from, const Args<T, G>& args, const float* u) {
  constexpr int W = WIDTH<T>;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float across[4] = {};  // products [16, 8]; across[2] and [3]: scores of the last 8 queries with the first 8 keys
  float self_scores[SUB] = {};  // this lane's part of each token's score with itself
  bool grows = false;
#pragma unroll 1
  for (int slice = 0; slice < BK; slice += 32 * W) {
    const int channel = slice + lane * W;
    Piece<W, T> queries[SUB], keys[SUB];
    Piece<W, G> gates[SUB];
    const int channels = from.channels - channel, bytes = int(args.bytes);
    load(queries, from.q + channel, args.q.t, from.rows, channels, bytes);
    load(keys, from.k + channel, args.k.t, from.rows, channels, bytes);
    load(gates, from.g + channel, args.g.t, from.rows, channels, bytes);
    float a[SUB][W];
#pragma unroll
    for (int c = 0; c < W; ++c) {
      const float bonus = !ReadOrder::reads_before_write ? 1.f : c < channels ? u[channel + c] : 0.f;
#pragma unroll
      for (int i = 0; i < SUB; ++i) {
        const float gate = gates[i].get(c);
        grows |= !(gate <= GROWTH);
        a[i][c] = decay_of(gate);
        self_scores[i] = fmaf(queries[i].get(c), bonus * keys[i].get(c), self_scores[i]);
      }
    }

    decay_about_middles<ReadOrder, BK>(q + channel, k + channel, queries, keys, a);
    __syncwarp();  // queries and keys are stored
#pragma unroll 2
    for (int c = slice; c < slice + 32 * W; c += 16) {
      Pairs<true, float, 4> left;
      Pairs<true, float, 2> right[2];
      load_rounded<false>(left, q + c, ROW<BK>);
      load_rounded<true>(right, k + c, ROW<BK>);
      multiply(within, left, right);
    }
    __syncwarp();  // they have been read
    float unit_decays[2][W], all[W];
    decay_from_starts<ReadOrder, BK>(q + channel, queries, a, unit_decays);
    decay_to_ends<UNIT, BK>(k + channel, keys, a, all);
    __syncwarp();  // queries and keys for the border after 8 tokens are stored
#pragma unroll 2
    for (int c = slice; c < slice + 32 * W; c += 16) {
      Pairs<true, float, 4> left;
      Pairs<true, float, 2> right[2];
      load_rounded<false>(left, q + c, ROW<BK>);
      load_rounded<true>(right, k + c, ROW<BK>);
      multiply(across, left, right[0]);
    }
    __syncwarp();  // they have been read
    multiply_unit<BK>(q + UNIT * ROW<BK> + channel, unit_decays[0]);
    multiply_unit<BK>(k + channel, unit_decays[1]);
#pragma unroll
    for (int c = 0; c < W; ++c) all[c] = unit_decays[0][c] * unit_decays[1][c];
    put(total + channel, all);
  }
  if (__any_sync(0xffffffffu, grows)) {
#pragma unroll 1
    for (int unit = 0; unit < 2; ++unit) {
      const int first = UNIT * unit;
      const float score =
          score_of_pair<ReadOrder>(from.q + first * args.q.t, from.k + first * args.k.t, from.g + first * args.g.t,
                                   args.q.t, args.k.t, args.g.t, from.rows - first, from.channels);
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        // Lane i (i - 1) / 2 + j has the score of query i with the earlier key j.
        const float x = __shfl_sync(0xffffffffu, score, g * (g - 1) / 2 + 2 * t + p);
        within[0][p] = unit == 0 ? x : within[0][p];
        within[1][2 + p] = unit == 1 ? x : within[1][2 + p];
      }
    }
  }
  float sum = sum_each<SUB / 2>(self_scores);
  sum += __shfl_xor_sync(0xffffffffu, sum, SUB);
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
    const float score = __shfl_sync(0xffffffffu, sum, UNIT * unit + g);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      float& x = within[unit][2 * unit + p];
      x = 2 * t + p > g ? 0.f : 2 * t + p == g ? score : x;
    }
  }
  within[1][0] = within[1][1] = 0.f, within[0][2] = across[2], within[0][3] = across[3];
}

// Stores keys decayed to the end of a warp's 16 tokens, and the decay over these tokens.
template <typename T, typename G, int BK>
__device__ __forceinline__ void store_earlier_keys(float* k, float* total, const WarpTokens<T, G>& from,
                                                   const Args<T, G>& args) {
  constexpr int W = WIDTH<T>;
#pragma unroll 1
  for (int channel = (threadIdx.x & 31) * W; channel < BK; channel += 32 * W) {
    const int channels = from.channels - channel, bytes = int(args.bytes);
    Piece<W, T> keys[SUB];
    Piece<W, G> gates[SUB];
    load(keys, from.k + channel, args.k.t, from.rows, channels, bytes);
    load(gates, from.g + channel, args.g.t, from.rows, channels, bytes);
    float a[SUB][W], all[W];
#pragma unroll
    for (int i = 0; i < SUB; ++i)
#pragma unroll
      for (int c = 0; c < W; ++c) a[i][c] = decay_of(gates[i].get(c));
    decay_to_ends<SUB, BK>(k + channel, keys, a, all);
    put(total + channel, all);
  }
}

__device__ __forceinline__ float2 load_float2(const float* x) { return *reinterpret_cast<const float2*>(x); }

// Sets d[n] to the scores of the warp's 16 queries with the n-th 16 keys of the block, n < `count`. Multiplies s.carry
// by the decays over these keys.
template <typename T, int BK>
__device__ __forceinline__ void score_earlier(float (&d)[WARPS<BK>][2][4], Shared<BK>& s, int warp, int count) {
  const int lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll 1
  for (int c = 0; c < BK; c += 16) {
    float2 queries[4], decays[2];
    each_matrix<true, false>(s.q + warp * SUB * ROW<BK> + c, ROW<BK>, [&](int m, float2 x) { queries[m] = x; });
#pragma unroll
    for (int half = 0; half < 2; ++half) decays[half] = load_float2(s.carry[warp] + c + 8 * half + 2 * t);
#pragma unroll
    for (int n = WARPS<BK> - 1; n >= 0; --n) {
      if (n >= count) continue;
      LeftOf<T> a;
      RightOf<T> b[2];
#pragma unroll
      for (int m = 0; m < 4; ++m) a.set(m, float2{queries[m].x * decays[m >> 1].x, queries[m].y * decays[m >> 1].y});
      load_rounded<true>(b, s.k + n * SUB * ROW<BK> + c, ROW<BK>);
      multiply(d[n], a, b);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 total = load_float2(s.total[n] + c + 8 * half + 2 * t);
        decays[half].x *= total.x, decays[half].y *= total.y;
      }
    }
    __syncwarp();  // all lanes have read s.carry
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (lane == t) *reinterpret_cast<float2*>(s.carry[warp] + c + 8 * half + 2 * t) = decays[half];
  }
  __syncwarp();  // s.carry is stored
}

// Stores a lane's scores d [16, 16] from (row, column) on; only rows before `stop`.
__device__ __forceinline__ void store_scores(const Rows<float>& A, u32 batch, u32 h, i64 row, i64 stop, i64 column,
                                             const float (&d)[2][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int down = 0; down < 2; ++down) {
    if (row + g + 8 * down >= stop) continue;
    float* const to = A.row(batch, h, row + g + 8 * down) + column + 2 * t;
#pragma unroll
    for (int across = 0; across < 2; ++across)
      *reinterpret_cast<float2*>(to + 8 * across) = {d[across][2 * down], d[across][2 * down + 1]};
  }
}

template <class ReadOrder, typename T, typename G, int BK>
__global__ void __launch_bounds__(32 * WARPS<BK>, 3) stages_intra_chunk(const Args<T, G> args) {
  Shared<BK>& s = *reinterpret_cast<Shared<BK>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const u32 groups = u32(shape.chunk + ROWS<BK> - 1) / ROWS<BK>, NC = u32(shape.NC), H = u32(shape.H);
  const u32 query_group = blockIdx.x % groups, chunk = blockIdx.x / groups, c = chunk % NC, h = chunk / NC % H;
  const u32 batch = chunk / NC / H;
  const Span span = chunk_tokens(shape, c);
  if (span.start + query_group * ROWS<BK> >= span.stop)
    return;  // the chunk is a last, shorter one: no thread has a row
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const i64 first_row = span.start + query_group * ROWS<BK> + warp * SUB;  // the warp's first row
  float* const k = s.k + warp * SUB * ROW<BK>;

  const auto tokens_from = [&](i64 token) {
    const i64 rows = span.stop - token;
    const i64 first_token = rows > 0 ? token : span.start;
    return WarpTokens<T, G>{args.q.row(batch, h, first_token), args.k.row(batch, h, first_token),
                            args.g.row(batch, h, first_token),
                            int(rows > SUB ? SUB
                                : rows > 0 ? rows
                                           : 0),
                            int(shape.K)};
  };
  for (int x = lane; x < BK; x += 32) s.carry[warp][x] = 1.f;
  if (first_row < span.stop) {
    float d[2][4] = {};
    score_within<ReadOrder, T, G, BK>(d, s.q + warp * SUB * ROW<BK>, k, s.total[warp], tokens_from(first_row), args,
                                      args.u ? args.u + h * shape.K : nullptr);
    store_scores(args.A, batch, h, first_row, span.stop, first_row - span.start, d);
    constexpr int LANES = 32 / SUB;  // of a row, which write zeros to its later columns, four at a time
    if (const i64 row = first_row + lane / LANES; row < span.stop)
      for (i64 column = first_row - span.start + SUB + lane % LANES * 4; column < shape.chunk; column += 4 * LANES)
        *reinterpret_cast<float4*>(args.A.row(batch, h, row) + column) = {0.f, 0.f, 0.f, 0.f};
  }
#pragma unroll 1
  for (int group = query_group;; --group) {
    __syncthreads();  // decayed queries and keys, and the decays over 16 keys, are in shared memory
    if (first_row < span.stop) {
      const int count = group == int(query_group) ? warp : WARPS<BK>;
      float d[WARPS<BK>][2][4] = {};
      score_earlier<T, BK>(d, s, warp, count);
#pragma unroll
      for (int n = 0; n < WARPS<BK>; ++n)
        if (n < count) store_scores(args.A, batch, h, first_row, span.stop, group * ROWS<BK> + n * SUB, d[n]);
    }
    if (group == 0) return;
    __syncthreads();  // keys and their decays have been read: those of the group before may overwrite them
    store_earlier_keys<T, G, BK>(k, s.total[warp], tokens_from(span.start + (group - 1) * ROWS<BK> + warp * SUB), args);
  }
}
