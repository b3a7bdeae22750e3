// what      The log of the decay of every token and channel.
// math      w = -exp(decay + tanh(low) up)
// shapes    low [T, W], up [W, D], decay [D], w [T, D]
// grid      a block for every (32 tokens, 128 channels), tokens slowest; 128 threads: a channel each
// smem      Shared: 32 tanh(low) of each token
// barriers  two a pass of 32: read the tile before it changes, and after
// numerics  float32
// source    Peng et al., 2024, "Eagle and Finch", eq. 16-17
// limits    none
#include "decode.cuh"

constexpr int THREADS = 128, TOKENS = 32, PASS = 32;

template <typename T> struct Args {
  const float* low;
  const T* up;
  const float* decay;
  float* w;
  i64 tokens, D, W;
};

struct alignas(16) Shared {
  float low[PASS][TOKENS];
};

template <typename T> __global__ void __launch_bounds__(THREADS) rwkv6_log_decay(const Args<T> args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  launch_next();
  const i64 W = args.W, D = args.D, tiles = (D + THREADS - 1) / THREADS;
  const i64 j = blockIdx.x % tiles * THREADS + threadIdx.x, first = blockIdx.x / tiles * TOKENS;

  float z[TOKENS] = {};
  for (i64 start = 0; start < W; start += PASS) {
    float weight[PASS];
#pragma unroll
    for (int a = 0; a < PASS; ++a) weight[a] = j < D && start + a < W ? to_float(args.up[(start + a) * D + j]) : 0.f;
    if (start == 0) wait_for_previous();
    __syncthreads();  // the tile may change
    for (int at = threadIdx.x; at < PASS * TOKENS; at += THREADS) {
      const i64 a = start + at % PASS, t = first + at / PASS;
      s.low[at % PASS][at / PASS] = a < W && t < args.tokens ? tanhf(args.low[t * W + a]) : 0.f;
    }
    __syncthreads();  // the tile stands
#pragma unroll
    for (int a = 0; a < PASS; ++a)
#pragma unroll
      for (int n = 0; n < TOKENS; ++n) z[n] = fmaf(s.low[a][n], weight[a], z[n]);
  }
  if (j >= D) return;
  const float decay = args.decay[j];
#pragma unroll
  for (int n = 0; n < TOKENS; ++n)
    if (first + n < args.tokens) args.w[(first + n) * D + j] = -expf(decay + z[n]);
}
