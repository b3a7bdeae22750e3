// what      The five inputs of the time mix, their token shift mixed by the data, of all tokens of the prompts.
// math      mixed_c = xx + d (maa_c + tanh(low_c) up_c), c = w k v r g
// shapes    low [T, 5, A], up [5, A, D], maa [5, D], xx d [T, D], mixed [5, T, D]
// grid      a block for every (32 tokens, c, 128 channels), tokens slowest; 128 threads: a channel each
// smem      Shared: 32 tanh(low) of each token
// barriers  two a pass of 32: read the tile before it changes, and after
// numerics  float32, rounded once
// source    Peng et al., 2024, "Eagle and Finch", eq. 14-15
// limits    none
#include "decode.cuh"

constexpr int THREADS = 128, TOKENS = 32, PASS = 32;

template <typename T> struct Args {
  const float* low;
  const T* up;
  const float* maa;
  const float* xx;
  const float* d;
  T* mixed;
  i64 tokens, D, A;
};

struct alignas(16) Shared {
  float low[PASS][TOKENS];
};

template <typename T> __global__ void __launch_bounds__(THREADS) rwkv6_data_mix(const Args<T> args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  launch_next();
  const i64 A = args.A, D = args.D, tiles = (D + THREADS - 1) / THREADS;
  const i64 j = blockIdx.x % tiles * THREADS + threadIdx.x, c = blockIdx.x / tiles % 5;
  const i64 first = blockIdx.x / tiles / 5 * TOKENS;
  const T* up = args.up + c * A * D + j;

  float m[TOKENS] = {};
  for (i64 start = 0; start < A; start += PASS) {
    float weight[PASS];
#pragma unroll
    for (int a = 0; a < PASS; ++a) weight[a] = j < D && start + a < A ? to_float(up[(start + a) * D]) : 0.f;
    if (start == 0) wait_for_previous();
    __syncthreads();  // the tile may change
    for (int at = threadIdx.x; at < PASS * TOKENS; at += THREADS) {
      const i64 a = start + at % PASS, t = first + at / PASS;
      s.low[at % PASS][at / PASS] = a < A && t < args.tokens ? tanhf(args.low[(t * 5 + c) * A + a]) : 0.f;
    }
    __syncthreads();  // the tile stands
#pragma unroll
    for (int a = 0; a < PASS; ++a)
#pragma unroll
      for (int n = 0; n < TOKENS; ++n) m[n] = fmaf(s.low[a][n], weight[a], m[n]);
  }
  if (j >= D) return;
  const float maa = args.maa[c * D + j];
#pragma unroll
  for (int n = 0; n < TOKENS; ++n) {
    const i64 at = (first + n) * D + j;
    if (first + n < args.tokens)
      args.mixed[c * args.tokens * D + at] = from_float<T>(fmaf(args.d[at], maa + m[n], args.xx[at]));
  }
}
