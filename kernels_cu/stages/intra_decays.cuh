// what      The decayed queries and keys of a warp's 16 tokens in intra_chunk.cu, which multiplies them: a lane decays
//           W neighbouring channels of all 16.
// math      a_m = exp g_m is token m's decay. A sub-chunk is 8 tokens. Queries are decayed from, and keys to, the
//           middle of their sub-chunk, its start and end, or the end of the 16 tokens; see each function
// shapes    rows [16, BK] in shared memory, ROW<BK> floats apart; a function gets the address of the lane's first
//           channel in the first row. W channels are WIDTH<T>
// barriers  none: callers have a __syncwarp before they read what other lanes have stored
// numerics  a decay is a product of tokens' decays. From or to a middle each of these counts as at least e^-20
// limits    K <= BK
#include "read_order.cuh"
#include "decays.cuh"
#include "gated/forward_tiles.cuh"
#include "growth.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

// From the includes:
//   Piece<W, X>: W numbers of type X side by side, loaded and stored at once: get(c) is number c as a float
//   ReadOrder::reads_before_write: RWKV-6, whose queries read before their token's write; else GLA
//   LEAST_DECAY: e^-20; inverse(x): 1 / x

constexpr int WARP_ROWS = 16;        // tokens of a warp, whose queries are its rows of A
constexpr int HALF = SUB_CHUNK / 2;  // tokens on each side of a sub-chunk's middle

// The distance of rows of BK channels in floats: tensor cores' loads of pairs then touch every bank once.
template <int BK> constexpr int ROW = BK + 8;
// The neighbouring channels that a lane decays at a time: 4 bytes of data.
template <typename T> constexpr int WIDTH = 4 / sizeof(T);

// Loads a lane's W channels (a Piece) of the warp's 16 tokens, from `from` on; zeros from token `rows` and channel
// `channels` on. stride: the distance of tokens in memory; bytes: of which all rows are multiples. If of W numbers, the
// lane's channels all exist or none does.
template <int W, typename X>
__device__ __forceinline__ void load(Piece<W, X> (&x)[WARP_ROWS], const X* from, i64 stride, int rows, int channels,
                                     int bytes) {
  const bool aligned = bytes >= W * int(sizeof(X));
#pragma unroll
  for (int i = 0; i < WARP_ROWS; ++i) {
    x[i] = {};
    if (aligned) {
      if (i < rows && channels > 0) x[i].load(from + i * stride);
    } else {
      float numbers[W];
#pragma unroll
      for (int c = 0; c < W; ++c) numbers[c] = i < rows && c < channels ? to_float(from[i * stride + c]) : 0.f;
      x[i].set(numbers);
    }
  }
}

// Stores W neighbouring floats; `to` is aligned to them.
template <int W> __device__ __forceinline__ void put(float* to, const float (&x)[W]) {
  Piece<W, float> piece;
  piece.set(x);
  piece.store(to);
}

// Stores queries decayed from the middle of their sub-chunk, and keys decayed to it, for a lane's channels of the
// warp's 16 tokens. token_decays: the tokens' decays exp g, here and below, a_m in what follows. With the middle before
// token M:
//   i >= M   query i times prod_{M <= m <= i} a_m (RWKV-6: m < i),   key i divided by prod_{M <= m <= i} a_m
//   i < M    query i divided by prod_{i < m < M} a_m (RWKV-6: i <= m),   key i times prod_{i < m < M} a_m
// The last key of a sub-chunk, and RWKV-6's first query, are divided by four decays, so by as little as e^-80. The only
// tokens of the sub-chunk that such a key or query meets are itself and later keys. score_within replaces these
// products, which may be infinite.
template <class ReadOrder, int BK, int W, typename T>
__device__ __forceinline__ void decay_about_middles(float* q, float* k, const Piece<W, T> (&queries)[WARP_ROWS],
                                                    const Piece<W, T> (&keys)[WARP_ROWS],
                                                    const float (&token_decays)[WARP_ROWS][W]) {
  constexpr bool INCLUSIVE = !ReadOrder::reads_before_write;  // a query is decayed by its own token's gate, too
#pragma unroll
  for (int first = 0; first < WARP_ROWS; first += HALF) {
    const bool after = first & HALF;  // whether these 4 tokens are after the middle
    float between[W];                 // the decay over the tokens between the middle and token i
#pragma unroll
    for (int c = 0; c < W; ++c) between[c] = 1.f;
#pragma unroll
    for (int n = 0; n < HALF; ++n) {
      const int i = first + (after ? n : HALF - 1 - n);
      float decayed_query[W], decayed_key[W];
#pragma unroll
      for (int c = 0; c < W; ++c) {
        const float excluding_i = between[c], including_i = excluding_i * fmaxf(token_decays[i][c], LEAST_DECAY);
        const float query = after == INCLUSIVE ? including_i : excluding_i;
        decayed_query[c] = queries[i].get(c) * (after ? query : inverse(query));
        decayed_key[c] = keys[i].get(c) * (after ? inverse(including_i) : excluding_i);
        between[c] = including_i;
      }
      put(q + i * ROW<BK>, decayed_query);
      put(k + i * ROW<BK>, decayed_key);
    }
  }
}

// Stores queries decayed from the start of their sub-chunk. Sets `sub_chunk_decays` to the decay over each sub-chunk.
template <class ReadOrder, int BK, int W, typename T>
__device__ __forceinline__ void decay_from_starts(float* q, const Piece<W, T> (&queries)[WARP_ROWS],
                                                  const float (&token_decays)[WARP_ROWS][W],
                                                  float (&sub_chunk_decays)[2][W]) {
#pragma unroll
  for (int sub_chunk = 0; sub_chunk < 2; ++sub_chunk) {
#pragma unroll
    for (int c = 0; c < W; ++c) sub_chunk_decays[sub_chunk][c] = 1.f;
#pragma unroll
    for (int i = SUB_CHUNK * sub_chunk; i < SUB_CHUNK * (sub_chunk + 1); ++i) {
      float x[W];
#pragma unroll
      for (int c = 0; c < W; ++c) {
        const float before = sub_chunk_decays[sub_chunk][c], after = before * token_decays[i][c];
        x[c] = queries[i].get(c) * (ReadOrder::reads_before_write ? before : after);
        sub_chunk_decays[sub_chunk][c] = after;
      }
      put(q + i * ROW<BK>, x);
    }
  }
}

// Stores keys decayed to the end of their group of TOKENS tokens, 8 or 16. Sets `group_decay` to the decay over the
// first group.
template <int TOKENS, int BK, int W, typename T>
__device__ __forceinline__ void decay_to_ends(float* k, const Piece<W, T> (&keys)[WARP_ROWS],
                                              const float (&token_decays)[WARP_ROWS][W], float (&group_decay)[W]) {
#pragma unroll
  for (int i = WARP_ROWS - 1; i >= 0; --i) {
    float x[W];
#pragma unroll
    for (int c = 0; c < W; ++c) {
      if (i % TOKENS == TOKENS - 1) group_decay[c] = 1.f;
      x[c] = keys[i].get(c) * group_decay[c];
      group_decay[c] *= token_decays[i][c];
    }
    put(k + i * ROW<BK>, x);
  }
}

// Multiplies a lane's channels of a sub-chunk's 8 rows in shared memory by `factor`.
template <int BK, int W> __device__ __forceinline__ void multiply_sub_chunk(float* rows, const float (&factor)[W]) {
#pragma unroll
  for (int i = 0; i < SUB_CHUNK; ++i) {
    float x[W];
#pragma unroll
    for (int c = 0; c < W; ++c) x[c] = rows[i * ROW<BK> + c] * factor[c];
    put(rows + i * ROW<BK>, x);
  }
}
