// what      Layer norm of chosen rows: the embeddings of tokens, or the inputs of the head for some tokens of a prompt.
// math      y_i = LN(x[chosen_i])
// shapes    chosen [B] int64, x [V, D], weight bias [D], y [B, D]
// grid      a block a row; 512 threads, up to 16 channels each
// smem      the warps' parts of two sums
// barriers  two: mean, then variance
// numerics  float32; the variance from centred values; rounded once
// source    Peng et al., 2024, "Eagle and Finch", section 4
// limits    D up to 8192; chosen rows are in range
#include "decode.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, EACH = 16;

template <typename X, typename Y> struct Args {
  const i64* chosen;
  const X* x;
  const float* weight;
  const float* bias;
  Y* y;
  i64 D;
  double eps;
};

struct Shared {
  float sum[WARPS], squares[WARPS];
};

template <typename X, typename Y> __global__ void __launch_bounds__(THREADS) rwkv6_chosen_norm(const Args<X, Y> args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read
  launch_next();        // a step's first launch: all others find what the step before it wrote
  const X* from = args.x + args.chosen[blockIdx.x] * args.D;
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
    if (j < args.D)
      args.y[blockIdx.x * args.D + j] = from_float<Y>((x[n] - mean) * scale * args.weight[j] + args.bias[j]);
  }
}
