// what      Sequences of at most 16 tokens, which short_forward.cu and short_backward.cu compute: a block has a head of
//           one, a thread a channel or a column with all its tokens in registers. Loads, stores and scores.
#include "lanes.cuh"
#include "tensor.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;
// Of kernels for sequences of at most TOKENS tokens, 8 or 16: numbers from one channel's or column's tokens to the
// next's. 8 lanes that read 16 bytes each are in different banks.
template <int TOKENS> constexpr int ROW = TOKENS + 4;
static_assert(WARPS == 4, "finish_scores names four warps' sums");

// The sequence and head of a block, from token `start` of batch row b on. The sequence has `tokens` tokens.
struct Sequence {
  i64 b, h, start;
  int tokens;

  // The tokens' numbers in column `column` of x, which has `width` columns; 0 where there is none.
  template <int TOKENS, typename T>
  __device__ __forceinline__ void load(float (&to)[TOKENS], const StridedRows<T>& x, i64 column, i64 width) const {
    const T* from = x.row(b, h, start) + column;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) to[t] = t < tokens && column < width ? to_float(from[t * x.token_stride]) : 0.f;
  }
  // Stores the numbers of the tokens that there are, if x has the column.
  template <int TOKENS, typename T>
  __device__ __forceinline__ void store(const float (&from)[TOKENS], const StridedRows<T>& x, i64 column,
                                        i64 width) const {
    T* to = x.row(b, h, start) + column;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
      if (t < tokens && column < width) to[t * x.token_stride] = from_float<T>(from[t]);
  }
};

// Calls f(i, four numbers) for i = 0, 4 and so on, as far as there are tokens: those of a channel or column in shared
// memory. Numbers after the last token, up to three, must be zeros, or not be used.
template <int TOKENS, class F> __device__ __forceinline__ void each_four(const float* numbers, int tokens, F f) {
#pragma unroll
  for (int i = 0; i < TOKENS; i += 4)
    if (i < tokens) f(i, *reinterpret_cast<const float4*>(numbers + i));
}

// x[t ... t + 3] += factor times four numbers.
template <int TOKENS> __device__ __forceinline__ void add_four(float (&x)[TOKENS], int t, float factor, float4 four) {
  x[t] = fmaf(factor, four.x, x[t]);
  x[t + 1] = fmaf(factor, four.y, x[t + 1]);
  x[t + 2] = fmaf(factor, four.z, x[t + 2]);
  x[t + 3] = fmaf(factor, four.w, x[t + 3]);
}

// Adds x[s], summed over the warp's lanes, to score [t, s] of the warp's `sums`; if `first`, stores it there.
// sum_and_share (lanes.cuh) leaves each 32 / TOKENS lanes one of the sums, over every so many lanes. Lanes are added in
// the same order for any TOKENS, so a sequence has the same bits packed with longer ones as alone.
template <int TOKENS> __device__ __forceinline__ void add_scores(float (&x)[TOKENS], float* sums, int t, bool first) {
  constexpr int LANES = 32 / TOKENS;
  const int lane = threadIdx.x & 31;
  sum_and_share<TOKENS, 16, LANES>(x);
  float sum = x[0];
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  float& score = sums[t * TOKENS + lane / LANES];
  if (lane % LANES == 0) score = first ? sum : score + sum;
}

// Stores scores: `scale` times the sums of all warps. Warps may write to `sums` again afterwards.
template <int TOKENS, class Shared>
__device__ __forceinline__ void finish_scores(Shared& s, float* scores, int tokens, float scale) {
  __syncthreads();  // all warps have written their sums
  for (int i = threadIdx.x; i < tokens * TOKENS; i += THREADS)
    scores[i] = scale * ((s.sums[0][i] + s.sums[1][i]) + (s.sums[2][i] + s.sums[3][i]));
  __syncthreads();  // the scores are complete, and the warps' sums have been read
}
