// what      Layer norm of chosen rows: the embeddings of tokens, or the inputs of the head for some tokens of a prompt.
// math      y_i = weight (r - mean) / sqrt(variance + eps) + bias, r being row chosen_i of x
// shapes    chosen [B] int64, x [V, D] of V rows, weight bias [D], y [B, D]
// grid      a block a row; 512 threads, up to EACH times 4 channels each
// smem      the warps' parts of two sums
// barriers  two: mean, then variance
// numerics  float32; the variance from centred values; rounded once
// source    Peng et al., 2024, "Eagle and Finch", section 4
// limits    D a multiple of 4, up to 4 THREADS EACH = 8192; chosen rows are in range
#include "decode.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, EACH = 4;

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
  // The next kernel may start now, not earlier: this is a step's first launch, and has waited for the step before, so
  // that all later kernels of this step may read what that step wrote.
  launch_next();
  const X* from = args.x + args.chosen[blockIdx.x] * args.D;
  const auto channel = [](int n) { return 4 * (n * THREADS + i64(threadIdx.x)); };  // the thread's n-th four begin here
  float4 x[EACH];
  float sum = 0.f, squares = 0.f;
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    x[n] = channel(n) < args.D ? load4(from + channel(n)) : float4{};
    sum += (x[n].x + x[n].y) + (x[n].z + x[n].w);
  }
  const float mean = block_sum<WARPS>(sum, s.sum) / args.D;
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    if (channel(n) >= args.D) continue;
    x[n] = minus(x[n], {mean, mean, mean, mean});
    squares += (x[n].x * x[n].x + x[n].y * x[n].y) + (x[n].z * x[n].z + x[n].w * x[n].w);
  }
  const float scale = 1.f / sqrtf(block_sum<WARPS>(squares, s.squares) / args.D + float(args.eps));
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const i64 j = channel(n);
    if (j >= args.D) continue;
    const float4 normed = {x[n].x * scale, x[n].y * scale, x[n].z * scale, x[n].w * scale};
    store4(args.y + blockIdx.x * args.D + j, fma4(normed, load4(args.weight + j), load4(args.bias + j)));
  }
}
