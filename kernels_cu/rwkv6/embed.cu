// what      A token's embedding, layer-normed.
// math      x = LN(emb[token])
// shapes    tokens [B] int64, embedding [V, D], weight bias [D], x [B, D]
// grid      a block a sequence; 512 threads, up to 16 channels each
// smem      the warps' parts of two sums
// barriers  two: mean, then variance
// numerics  float32; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", section 4
// limits    D a multiple of 4, up to 8192; tokens are in range
#include "decode.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, EACH = 16;

template <typename T> struct Args {
  const i64* tokens;
  const T* embedding;
  const float* weight;
  const float* bias;
  float* x;
  i64 D;
  double eps;
};

struct Shared {
  float sum[WARPS], squares[WARPS];
};

template <typename T> __global__ void __launch_bounds__(THREADS) rwkv6_embed(const Args<T> args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  launch_next();
  wait_for_previous();
  const T* from = args.embedding + args.tokens[blockIdx.x] * args.D;
  float x[EACH], sum = 0.f, squares = 0.f;
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const i64 j = n * THREADS + threadIdx.x;
    x[n] = j < args.D ? to_float(from[j]) : 0.f;
    sum += x[n];
  }
  const float mean = block_sum<WARPS>(sum, s.sum) / args.D;
#pragma unroll
  for (int n = 0; n < EACH; ++n)
    if (n * THREADS + threadIdx.x < args.D) squares += (x[n] - mean) * (x[n] - mean);
  const float scale = 1.f / sqrtf(block_sum<WARPS>(squares, s.squares) / args.D + float(args.eps));
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const i64 j = n * THREADS + threadIdx.x;
    if (j < args.D) args.x[blockIdx.x * args.D + j] = (x[n] - mean) * scale * args.weight[j] + args.bias[j];
  }
}
