// what      The scores A of a chunk's pairs of tokens in Hopper's forward kernel. Every warp of a producer group
//           computes a share, from operands that all warps of the group have stored (ScoreOperands in
//           forward_storage.cuh).
// math      A[i, j] = scale sum_c (q_i decayed from z) (k_j decayed to z) over channels c, j < i: z is the middle of
//           their sub-chunk of 8 tokens or a border between their sub-chunks; "decayed" is defined in
//           forward_storage.cuh. Pairs without a gate between them need no decays: A[i, i] = scale q_i . k_i (RWKV-6:
//           scale q_i . u k_i) and, in RWKV-6, A[i, i - 1] = scale q_i . k_(i - 1)
// numerics  operands about a middle are bfloat16 or tf32; those at borders float16, or T if two blocks' scores are
//           added; sums float32; a score in A is the sum of two numbers of type T, or one if T is float16 and K_RANKS
//           is 1
// limits    sm_90a; all lanes of a warp call functions with products or shuffles together
#include "gated/sm90/forward_storage.cuh"
#include "tf32.cuh"

// From the includes:
//   CHUNK = 32; NUM_SUBCHUNKS = 4; PANEL = 64: columns of a tile of scores
//   SPLIT_SCORES: whether a score is stored as two numbers, the second its rounding error
//   score_operands.rows: a chunk's ScoreOperands; NEAR_ROW, HALF_ROW: their first rows for borders in a half, and for
//     the border between the halves
//   ldmatrix_x4_flipped, store_flipped: at the address (base XOR flip) + offset, in bytes

// The factor of a product of two tf32 operands, both of them cut off.
constexpr float TF32_CORRECTION_OF_BOTH = CUT_OFF_CORRECTION * CUT_OFF_CORRECTION;

// d += a b on tensor cores, for operands of the type of the first argument. Sums: a lane's accumulators of [16, 8]:
// with g = lane / 4, t = lane % 4, number 2h + p is in row g + 8h, column 2t + p.
using Sums = float[4];
template <typename T> __device__ __forceinline__ void multiply(T, Sums& d, const u32 (&a)[4], const u32 (&b)[2]) {
  mma_m16n8k16(d, a, b, T{});
}
template <typename T> __device__ __forceinline__ void multiply(T, Sums& d, const u32 (&a)[2], u32 b) {
  mma_m16n8k8(d, a, b, T{});
}
__device__ __forceinline__ void multiply(float, Sums& d, const u32 (&a)[4], const u32 (&b)[2]) { mma_tf32(d, a, b); }

// Stores two scores x and y of neighbouring keys at (base XOR flip) + offset, in bytes. If SPLIT_SCORES, a score is two
// numbers of type T: the rounding errors are stored 32 columns later, which in the swizzle is an XOR with 64 bytes.
template <class Schedule, typename T>
__device__ __forceinline__ void put_scores(void* base, int flip, int offset, float x, float y) {
  const u32 two = pack<T>(x, y);
  store_flipped(base, flip, offset, two);
  if constexpr (SPLIT_SCORES<Schedule, T>)
    store_flipped(base, flip ^ 64, offset, pack<T>(x - to_float(T{u16(two)}), y - to_float(T{u16(two >> 16)})));
}

// The limits, as bits of float32, of the sum of squares of a bfloat16 row between which float16 holds the row: 16 log
// gates of 1/8 then make no number infinite, and numbers that underflow are less than bfloat16's rounding error. A sum
// of 0 is allowed, too.
constexpr u32 LEAST_SQUARE = 0x31800000, LARGEST_SQUARE = 0x4c800000;  // 2^-28 and 2^26

// A warp's share of the scores, in a group of WARPS warps: those within N of the four sub-chunks, and N of four tiles
// of 16 queries and 8 keys of different sub-chunks. The tiles are of two kinds, two of each. In one half of the chunk:
// tile 0 has the queries of sub-chunks 1 and 3 and the keys of 0, tile 1 the same queries and the keys of 2; only
// scores of neighbouring sub-chunks are used, half of each tile. Across the halves: both tiles have the queries of
// sub-chunks 2 and 3, and the keys of 0 or of 1.
template <int WARPS> struct ScoreShare {
  static constexpr int N = NUM_SUBCHUNKS / WARPS;
  static_assert(N == 1 || N == 2);
  int subchunk, first_tile;  // the first of its N sub-chunks, and of its N tiles, which are of one kind
  bool is_across_halves;
  __device__ __forceinline__ ScoreShare(int warp)
      : subchunk(warp * N), first_tile(N == 1 ? warp & 1 : 0), is_across_halves(warp >= WARPS / 2) {}
};

// The address of the row's piece `piece`, of 16 bytes.
template <typename X> __device__ __forceinline__ const char* piece_of(const X* row, int piece) {
  return reinterpret_cast<const char*>(row) + piece * 16;
}

// Adds to the sums of N tiles the products of STEP bytes along the channels: queries and keys of type X from byte
// `offset` of their rows on. `queries`, `keys`: the addresses that this lane gives to ldmatrix at offset 0. One
// ldmatrix loads the keys of two tiles, or of one tile in two steps: k holds them.
constexpr int STEP = 32;  // bytes of a row
template <typename X, int N>
__device__ __forceinline__ void multiply_step(Sums (&to)[N], const char* queries, const char* keys, u32 (&k)[4],
                                              int offset) {
  u32 q[4];
  ldmatrix_x4(q, queries + offset);
  if (N == 2 || offset % (2 * STEP) == 0) ldmatrix_x4(k, keys + offset);
#pragma unroll
  for (int m = 0; m < N; ++m) {
    const int pair = N == 2 ? m : offset / STEP & 1;
    const u32 b[2] = {k[2 * pair], k[2 * pair + 1]};
    multiply(X{}, to[m], q, b);
  }
}

// Adds to `to` the products of STEP bytes along the channels of 8 queries and 8 keys within a sub-chunk, which one
// ldmatrix loads from `both`. The 16 rows of the product are these queries and keys; products of keys with keys are not
// used.
template <typename X> __device__ __forceinline__ void multiply_step(Sums (&to)[1], const char* both, int offset) {
  u32 x[4];
  ldmatrix_x4(x, both + offset);
  if constexpr (sizeof(X) == 2)  // products of 8 channels, so that no register has to move
    multiply(X{}, to[0], {x[0], x[1]}, x[1]), multiply(X{}, to[0], {x[2], x[3]}, x[3]);
  else multiply(X{}, to[0], x, {x[1], x[3]});
}

// Computes this warp's share. within[m]: the scores of 8 queries and 8 keys of the share's sub-chunk m, in numbers 0
// and 1. The product has 8 more rows, of the other sub-chunk's queries or of this one's keys, which are not used.
// border[m]: the scores of the 16 queries and 8 keys of tile m. TURNS: a warp that has many products, because they are
// in tf32, adds them to two sums in turn, since a product waits for the previous product of the same sum.
template <int WARPS, typename M, typename B, int BK>
__device__ __forceinline__ void score_products(Sums (&within)[ScoreShare<WARPS>::N],
                                               Sums (&border)[ScoreShare<WARPS>::N],
                                               const ScoreOperands<true, M, B, BK>& score_operands,
                                               const ScoreShare<WARPS>& share, int lane) {
  constexpr int N = ScoreShare<WARPS>::N;
  constexpr int TURNS = N == 1 && sizeof(M) == 4 ? 2 : 1;
  // An ldmatrix loads four 8 x 8 matrices: of 8 rows a piece of 16 bytes each. Queries: matrices 0 and 1 are piece 0 of
  // 16 rows (N = 1, within a sub-chunk: of 8 queries and 8 keys), 2 and 3 are piece 1 of the same rows. Keys, N = 2:
  // matrices 0 and 1 are pieces 0 and 1 of 8 keys, 2 and 3 of the next 8 keys; N = 1: pieces 0 to 3 of 8 keys.
  const int key = N == 1 ? 0 : lane >> 4, piece = N == 1 ? lane >> 3 : lane >> 3 & 1;
  const auto* const subchunk_rows = score_operands.rows + SUB_CHUNK * share.subchunk;
  const auto* const rows =
      score_operands.rows + (share.is_across_halves ? score_operands.HALF_ROW : score_operands.NEAR_ROW);
  const auto& row = subchunk_rows[N == 1 ? lane & 7 : lane & 15];
  const char* const middle_queries = piece_of(N == 1 && lane & 8 ? row.middle_k : row.middle_q, lane >> 4);
  const char* const middle_keys = piece_of(subchunk_rows[SUB_CHUNK * key + (lane & 7)].middle_k, piece);
  const char* const queries = piece_of(rows[lane & 15].border_q, lane >> 4);
  const char* const keys = piece_of(rows[SUB_CHUNK * (N == 1 ? share.first_tile : key) + (lane & 7)].border_k, piece);
  Sums turns[TURNS][N] = {};
#pragma unroll
  for (int m = 0; m < N; ++m)
#pragma unroll
    for (int x = 0; x < 4; ++x) border[m][x] = 0.f;
  u32 k[4], middle_k[4];
#pragma unroll
  for (int offset = 0; offset < BK * int(sizeof(B)); offset += STEP) {
    multiply_step<B>(border, queries, keys, k, offset);
#pragma unroll
    for (int part = 0; part < int(sizeof(M)); part += sizeof(B)) {  // two steps of M for one of B, if M is tf32
      const int middle_offset = (offset * int(sizeof(M)) + part * STEP) / int(sizeof(B));
      auto& sums = turns[middle_offset / STEP % TURNS];
      if constexpr (N == 1) multiply_step<M>(sums, middle_queries, middle_offset);
      else multiply_step<M>(sums, middle_queries, middle_keys, middle_k, middle_offset);
    }
  }
#pragma unroll
  for (int m = 0; m < N; ++m)
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int from = 2 * m + x;
      within[m][x] = TURNS == 1 ? turns[0][m][from] : turns[0][m][from] + turns[TURNS - 1][m][from];
      if (sizeof(M) == 4) within[m][x] *= TF32_CORRECTION_OF_BOTH;
    }
}

// Products of undecayed queries and keys of N sub-chunks from `first` on: of the 8 queries and 8 keys, as 16 rows, with
// the 8 keys (scores) and with the 8 queries (squares). make_scores uses scores[m] at places [i, i] of queries, that is
// q_i . k_i, or, if BEFORE, at [i, i - 1], q_i . k_(i - 1), which are in a lane's numbers 0 and 1. out_of_range, if
// SQUARES, uses scores[m] at [i, i] of keys, |k_i|^2, in numbers 2 and 3, and squares[m] at [i, i] of queries, |q_i|^2,
// in numbers 0 and 1. Only rows of one token, or if BEFORE of q_i and k_(i - 1), need the same order of their 16-byte
// pieces: each token begins with another piece, so that 8 rows are in all banks. put_queries (forward_operands.cuh)
// takes a step for each row of queries that it stores, which hides the step's latency. Each product is of 8 channels,
// so that no register has to move.
template <bool BEFORE, bool SQUARES, int N, typename T, int BK> struct DirectProducts {
  static constexpr int STEPS = BK * sizeof(T) / STEP;  // for each sub-chunk
  static_assert(N * STEPS == SUB_CHUNK);
  const char* both;  // this lane's row of 8 queries and 8 keys, which are the product's 16 rows
  Sums scores[N] = {}, squares[N] = {};
  u32 x[4];

  __device__ __forceinline__ DirectProducts(const T (&q)[CHUNK][BK], const T (&k)[CHUNK][BK], int first, int lane) {
    const int row = lane & 7;
    both = piece_of((lane & 8 ? k : q)[SUB_CHUNK * first + row], lane >> 4 ^ (BEFORE && lane & 8 ? row + 1 & 7 : row));
  }
  __device__ __forceinline__ void load(int step) {
    const int m = step / STEPS, index = step % STEPS * STEP;
    ldmatrix_x4_flipped(x, both, index % 128, index / 128 * 128 + m * (SUB_CHUNK * BK * int(sizeof(T))));
  }
  __device__ __forceinline__ void multiply_step(int step) {
#pragma unroll
    for (int half = 0; half < 4; half += 2) {  // the first register of a half of the step's channels
      multiply(T{}, scores[step / STEPS], {x[half], x[half + 1]}, x[half + 1]);
      if (SQUARES) multiply(T{}, squares[step / STEPS], {x[half], x[half + 1]}, x[half]);
    }
  }
  // Whether this lane has the square of a query or key that float16 may not hold.
  __device__ __forceinline__ bool out_of_range(int lane) const {
    const int row = lane >> 2;
    u32 largest = 0, least = ~0u;  // least: the least square - 1, by which 0 becomes the largest number
    // two: the lane's numbers of row `row`, of which one is on the diagonal in the lane that has it.
    const auto compare = [&](const float* two) {
      const u32 square = __float_as_uint(row & 1 ? two[1] : two[0]);
      largest = max(largest, square), least = min(least, square - 1);
    };
#pragma unroll
    for (int m = 0; m < N; ++m) compare(scores[m] + 2), compare(squares[m]);
    return (largest > LARGEST_SQUARE || least < LEAST_SQUARE - 1) && row / 2 == (lane & 3);
  }
};

// Reduces each of 8 values over LANES lanes by `join`, such as a sum; lane l returns the result of value l % 8.
template <int LANES, typename X, class Join> __device__ __forceinline__ X reduce_each(X (&x)[8], int lane, Join join) {
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = lane & half;
#pragma unroll
    for (int n = 0; n < half; ++n) {
      const X other = __shfl_xor_sync(0xffffffffu, upper ? x[n] : x[n + half], half);
      x[n] = join(upper ? x[n + half] : x[n], other);
    }
  }
  X all = x[0];
#pragma unroll
  for (int distance = 8; distance < LANES; distance *= 2) all = join(all, __shfl_xor_sync(0xffffffffu, all, distance));
  return all;
}

// Multiplies a tile's scores by the inverses of its operands' scales. queries, keys: the first row of each in
// score_operands.rows.
template <typename M, typename B, int BK>
__device__ __forceinline__ void undo_scales(Sums& scores, const ScoreOperands<true, M, B, BK>& score_operands,
                                            int queries, int keys, int lane) {
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    const float undo_q = score_operands.rows[queries + (lane >> 2) + 8 * (x >> 1)].undo_q;
    // Finite, since 0 times infinity would be NaN.
    scores[x] *= fminf(undo_q * score_operands.rows[keys + 2 * (lane & 3) + (x & 1)].undo_k, LARGEST_FLOAT);
  }
}

// Computes a warp's share of the scores, and stores it in A, times `scale`. Scores of sub-chunks whose keys are later
// than the queries are not stored: forward.cu has set them to 0. SCALED: rows have scales
// (forward_scales.cuh), whose inverses are undo_q and undo_k of score_operands.rows. direct: the scores of the warp's
// DirectProducts; self_scores: in RWKV-6, this lane's part, of its 4 channels, of q_i . u k_i of its sub-chunk's
// tokens; flip: see Operands (forward_storage.cuh).
template <int WARPS, class Order, class Schedule, bool SCALED, typename M, typename B, typename T, int BK>
__device__ __forceinline__ void make_scores(T (&A)[CHUNK][PANEL], const ScoreOperands<true, M, B, BK>& score_operands,
                                            const Sums (&direct)[ScoreShare<WARPS>::N], float (&self_scores)[SUB_CHUNK],
                                            int flip, float scale, int warp, int lane) {
  using Share = ScoreShare<WARPS>;
  const int g = lane >> 2, t = lane & 3;
  const Share share(warp);
  Sums within[Share::N], border[Share::N];
  constexpr int LANES = 32 / Share::N;  // lanes that share a sub-chunk
  float sum = 0.f;
  if (Order::reads_before_write) sum = reduce_each<LANES>(self_scores, lane, [](float x, float y) { return x + y; });
  score_products<WARPS>(within, border, score_operands, share, lane);
  if constexpr (SCALED) {
    const int first = share.is_across_halves ? score_operands.HALF_ROW : score_operands.NEAR_ROW;
#pragma unroll
    for (int m = 0; m < Share::N; ++m)
      undo_scales(border[m], score_operands, first, first + SUB_CHUNK * (share.first_tile + m), lane);
  }
  constexpr int ROWS = SUB_CHUNK * 128;  // bytes of the rows of a sub-chunk
  // Stores two scores of the queries of sub-chunk `queries` + `next` and the keys of sub-chunk `keys`.
  const auto put = [&](int queries, int keys, int next, float x, float y) {
    // Of row g the piece g of 16 bytes. XOR 16 keys makes it piece g ^ keys, where the swizzle puts columns 8 keys on.
    char* const place = reinterpret_cast<char*>(A) + queries * ROWS + g * (128 + 16) + t * 4;
    put_scores<Schedule, T>(place, keys * 16 ^ flip, next * ROWS, scale * x, scale * y);
  };
#pragma unroll
  for (int m = 0; m < Share::N; ++m) {
    float self_score[2] = {direct[m][0], direct[m][1]};
    if (Order::reads_before_write) self_score[0] = self_score[1] = __shfl_sync(0xffffffffu, sum, LANES * m + g);
    float x = 2 * t < g ? within[m][0] : 2 * t == g ? self_score[0] : 0.f;
    float y = 2 * t + 1 < g ? within[m][1] : 2 * t + 1 == g ? self_score[1] : 0.f;
    if (Order::reads_before_write) {
      if (2 * t + 1 == g) x = direct[m][0];
      if (2 * t + 2 == g) y = direct[m][1];
    }
    put(share.subchunk, share.subchunk + m, m, x, y);
  }
#pragma unroll
  for (int m = 0; m < Share::N; ++m) {
    const int n = share.first_tile + m;
    const int queries = share.is_across_halves ? 2 : 2 * n + 1, keys = share.is_across_halves ? n : 2 * n;
    const bool uses_last_rows = !share.is_across_halves && n;  // of the tile: queries of sub-chunk 3
    put(queries, keys, 0, uses_last_rows ? border[m][2] : border[m][0], uses_last_rows ? border[m][3] : border[m][1]);
    if (share.is_across_halves) put(queries, keys, 1, border[m][2], border[m][3]);
  }
}
