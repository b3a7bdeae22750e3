// what      Scores of a chunk from the operands that its producers have made: the same for every warp.
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

// Stores two scores in a row's piece, and 32 columns on, 64 bytes in the swizzle, what rounding left over.
template <class Schedule, typename T>
__device__ __forceinline__ void put_scores(char* row, int piece, float x, float y) {
  const u32 two = pack<T>(x, y);
  *reinterpret_cast<u32*>(row + piece) = two;
  if constexpr (TWO_NUMBERS<Schedule, T>)
    *reinterpret_cast<u32*>(row + (piece ^ 64)) = pack<T>(x - to_float(T{u16(two)}), y - to_float(T{u16(two >> 16)}));
}

// The share of a warp, one of WARPS: the scores within N of the four sub-chunks, and N of the four tiles of 16 queries
// and 8 keys that meet at borders: sub-chunks 1 and 3 with 0 or 2, of which half counts, and the second half with 0 or
// 1.
template <int WARPS> struct ScoreShare {
  static constexpr int N = NUM_SUBCHUNKS / WARPS;
  static_assert(N == 1 || N == 2);
  int subchunk, keys;  // the first; 8 keys
  bool halves;
  __device__ __forceinline__ ScoreShare(int warp)
      : subchunk(warp * N), keys(N == 1 ? warp & 1 : 0), halves(warp >= WARPS / 2) {}
};

// within[m]: of 8 queries and 8 keys of the share's sub-chunk m, where a product's other 8 queries are none;
// border[m]: of 16 and 8. A product waits for the one before on its sum: the many of a warp in tf32 have two in turn.
template <int WARPS, typename M, typename T, int BK>
__device__ __forceinline__ void score_products(Sums (&within)[ScoreShare<WARPS>::N],
                                               Sums (&border)[ScoreShare<WARPS>::N],
                                               const ScoreOperands<true, M, T, BK>& s, const ScoreShare<WARPS>& share,
                                               int lane) {
  constexpr int N = ScoreShare<WARPS>::N, ROW = sizeof s.rows[0], PIECE = 16 / sizeof(T);
  constexpr int TURNS = N == 1 && sizeof(M) > sizeof(T) ? 2 : 1;
  // This lane's row of the 8x8 matrices, of 16 bytes a row: within, queries and keys lie pieces first, then the others;
  // borders' queries rows of 8, then pieces, their keys the other way round, or, where they are 8, pieces alone.
  const auto& near = s.rows[BC * share.subchunk + (lane & 7)];
  const char* const own = reinterpret_cast<const char*>(lane < 16 ? near.middle_q : near.middle_k) + (lane & 8) * 2;
  const auto* const at = s.rows + (share.halves ? s.HALF : s.NEAR);
  const char* const queries = reinterpret_cast<const char*>(at[lane & 15].border_q) + (lane & 16);
  const char* const keys =
      reinterpret_cast<const char*>(at[BC * (N == 1 ? share.keys : lane >> 4) + (lane & 7)].border_k) +
      (N == 1 ? lane >> 3 : lane >> 3 & 1) * 16;
  Sums turns[TURNS][N] = {};
#pragma unroll
  for (int m = 0; m < N; ++m)
#pragma unroll
    for (int x = 0; x < 4; ++x) border[m][x] = 0.f;
  u32 k[4];
#pragma unroll
  for (int c = 0; c < BK; c += 2 * PIECE) {
    u32 q[4];
    ldmatrix_x4(q, queries + c * sizeof(T));
    if (N == 2 || c % (4 * PIECE) == 0) ldmatrix_x4(k, keys + c * sizeof(T));
#pragma unroll
    for (int byte = 0; byte < 2 * PIECE * int(sizeof(M)); byte += 32)
#pragma unroll
      for (int m = 0; m < N; ++m) {
        u32 both[4];
        ldmatrix_x4(both, own + m * BC * ROW + c * sizeof(M) + byte);
        const u32 a[4] = {both[0], 0, both[1], 0}, b[2] = {both[2], both[3]};
        multiply(M{}, turns[(c * int(sizeof(M)) + byte) / 32 % TURNS][m], a, b);
      }
#pragma unroll
    for (int m = 0; m < N; ++m) {
      const int pair = N == 2 ? m : c / (2 * PIECE) & 1;
      const u32 b[2] = {k[2 * pair], k[2 * pair + 1]};
      multiply(T{}, border[m], q, b);
    }
  }
#pragma unroll
  for (int m = 0; m < N; ++m)
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      within[m][x] = TURNS == 1 ? turns[0][m][x] : turns[0][m][x] + turns[TURNS - 1][m][x];
      if (sizeof(M) > sizeof(T)) within[m][x] *= TRUNCATED;
    }
}

// A warp's share of the scores; flip: see Operands.
template <int WARPS, class Order, class Schedule, typename M, typename T, int BK>
__device__ __forceinline__ void make_scores(T (&A)[CHUNK][PANEL], const ScoreOperands<true, M, T, BK>& s, int flip,
                                            float scale, int warp, int lane) {
  using Share = ScoreShare<WARPS>;
  const int g = lane >> 2, t = lane & 3;
  const Share share(warp);
  Sums within[Share::N], border[Share::N];
  score_products<WARPS>(within, border, s, share, lane);
  char* const first = reinterpret_cast<char*>(A) + g * 128 + t * 4;
  const auto put = [&](int queries, int keys, float x, float y) {  // of two sub-chunks
    put_scores<Schedule, T>(first + queries * (BC * 128), (keys ^ g) * 16 ^ flip, scale * x, scale * y);
  };
  // With the last token's key, which is not decayed yet.
  const auto last = [&](int queries) { return s.direct[1][BC * queries + g]; };
#pragma unroll
  for (int m = 0; m < Share::N; ++m) {
    const int own = share.subchunk + m;
    const float itself = s.direct[0][BC * own + g];
    float x = 2 * t < g ? within[m][0] : 2 * t == g ? itself : 0.f;
    float y = 2 * t + 1 < g ? within[m][1] : 2 * t + 1 == g ? itself : 0.f;
    if (Order::reads_before_write) {
      const float before = last(own);
      if (2 * t + 1 == g) x = before;
      if (2 * t + 2 == g) y = before;
    }
    put(own, own, x, y);
  }
#pragma unroll
  for (int m = 0; m < Share::N; ++m) {
    const int n = share.keys + m, queries = share.halves ? 2 : 2 * n + 1, keys = share.halves ? n : 2 * n;
    const bool upper = !share.halves && n;
    const float x = upper ? border[m][2] : border[m][0];
    float y = upper ? border[m][3] : border[m][1];
    if (Order::reads_before_write && lane == 3 && queries == keys + 1) y = last(queries);
    put(queries, keys, x, y);
    if (share.halves) put(3, n, border[m][2], border[m][3]);
  }
}
