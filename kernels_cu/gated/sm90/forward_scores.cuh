// what      Scores of a chunk from the operands that its producers have made: four tasks of the same size, a warp each.
// math      A[i, j] = sum_c (q_i decayed from z) (k_j decayed to z), z the middle of their sub-chunk or a border
//           between theirs
// numerics  the middle's operands in bfloat16 or tf32, the others in T; sums in float32; A as two bfloat16 numbers or
//           one of float16
// limits    sm_90a
#include "gated/sm90/forward_storage.cuh"

// Tensor cores drop the last 13 bits of a tf32 operand, which takes 2^-11 / (2 ln 2) of it on average: a product of two
// truncated operands is put right by this factor.
constexpr float TRUNCATED = 1.f + 2 * 3.522e-4f;

using Sums = float[4];
__device__ __forceinline__ void multiply(bf16, Sums& d, const u32 (&a)[4], const u32 (&b)[2]) { mma_bf16(d, a, b); }
__device__ __forceinline__ void multiply(f16, Sums& d, const u32 (&a)[4], const u32 (&b)[2]) { mma_f16(d, a, b); }
__device__ __forceinline__ void multiply(float, Sums& d, const u32 (&a)[4], const u32 (&b)[2]) { mma_tf32(d, a, b); }

// d[n] = the scores of 16 queries, from row `first` on, and 8 keys, from row first + 8n on.
// q, k: of row 0; rows are STRIDE numbers apart.
template <int STRIDE, typename X, int BK>
__device__ __forceinline__ void score_tile(Sums (&d)[2], const X (&q)[BK], const X (&k)[BK], int first, int lane) {
  constexpr int PIECE = 16 / sizeof(X);
  // This lane's row of the 8x8 matrices: q's lie rows of 8, then pieces of 16 bytes, k's the other way round.
  const X* const from_q = q + (first + (lane & 15)) * STRIDE + (lane >> 4) * PIECE;
  const X* const from_k = k + (first + (lane & 7) + (lane >> 4) * 8) * STRIDE + (lane >> 3 & 1) * PIECE;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int x = 0; x < 4; ++x) d[n][x] = 0;
#pragma unroll
  for (int c = 0; c < BK; c += 2 * PIECE) {
    u32 a[4], b[4];
    ldmatrix_x4(a, from_q + c);
    ldmatrix_x4(b, from_k + c);
    const u32 left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
    multiply(X{}, d[0], a, left);
    multiply(X{}, d[1], a, right);
  }
}

// Stores two scores in a row's piece, and 32 columns on, 64 bytes in the swizzle, what rounding left over.
template <class Schedule, typename T>
__device__ __forceinline__ void put_scores(char* row, int piece, float x, float y) {
  const u32 two = pack<T>(x, y);
  *reinterpret_cast<u32*>(row + piece) = two;
  if constexpr (TWO_NUMBERS<Schedule, T>)
    *reinterpret_cast<u32*>(row + (piece ^ 64)) = pack<T>(x - to_float(T{u16(two)}), y - to_float(T{u16(two >> 16)}));
}

// Of a chunk's scores: within the sub-chunks of either half, between them, between the halves.
constexpr int TASKS = 4;

// One task; flip: see Operands.
template <class Order, class Schedule, typename M, typename T, int BK>
__device__ __forceinline__ void make_scores(T (&A)[CHUNK][PANEL], const ScoreOperands<true, M, T, BK>& s, int flip,
                                            float scale, int task, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const bool within = task < 2, halves = task == 3;
  const auto& at = s.rows[0];
  constexpr int STRIDE = sizeof at / sizeof(T), MIDDLE_STRIDE = sizeof at / sizeof(M);
  Sums d[2];
  if constexpr (sizeof(M) == sizeof(T)) {  // tiles of one type, one place in the program
    score_tile<STRIDE>(d, within ? at.middle_q : at.border_q, within ? at.middle_k : at.border_k, 16 * (task & 1),
                       lane);
  } else if (within) {
    score_tile<MIDDLE_STRIDE>(d, at.middle_q, at.middle_k, 16 * task, lane);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int x = 0; x < 4; ++x) d[n][x] *= TRUNCATED;
  } else {
    score_tile<STRIDE>(d, at.border_q, at.border_k, 16 * (task & 1), lane);
  }
  // Where the blocks of 8x8 belong: sub-chunks of their queries and keys, two bits each, four for a task; of the halves
  // those beside them too.
  constexpr u32 QUERIES = 0xede4, KEYS = 0x48e4;
  char* const first = reinterpret_cast<char*>(A) + g * 128 + t * 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int queries = QUERIES >> 4 * task + 2 * n & 3, keys = KEYS >> 4 * task + 2 * n & 3;
    float x = d[n][2 * n], y = d[n][2 * n + 1];
    if (within) {
      const float itself = s.direct[0][BC * queries + g];
      x = 2 * t < g ? x : 2 * t == g ? itself : 0.f;
      y = 2 * t + 1 < g ? y : 2 * t + 1 == g ? itself : 0.f;
    }
    if (Order::reads_before_write) {  // the last token's key is not decayed yet
      const float last = s.direct[1][BC * queries + g];
      if (within && 2 * t + 1 == g) x = last;
      if (within ? 2 * t + 2 == g : !halves && g == 0 && t == 3) y = last;
      if (halves && n == 0 && g == 0 && t == 3) d[1][1] = last;
    }
    char* const row = first + queries * (BC * 128);
    const int piece = (keys ^ g) * 16 ^ flip;
    put_scores<Schedule, T>(row, piece, scale * x, scale * y);
    if (halves) put_scores<Schedule, T>(row, piece ^ 16, scale * d[1 - n][2 * n], scale * d[1 - n][2 * n + 1]);
  }
}
