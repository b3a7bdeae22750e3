// what      The token shift, mixed: the inputs of a mix's products.
// math      of MIXES = 5: mixed_c = xx + d (maa_c + m_c), d = xx_{t-1} - xx_t with zero before a sequence's first token
// shapes    xx [tokens, D], maa [5, D], m mixed [5, tokens, D]
// grid      rwkv/cuda_grad.py launches a thread for 8 channels of a token and all mixes; 256 threads
// numerics  float32, rounded once
// source    Peng et al., 2024, "Eagle and Finch", eq. 3-4 and 14-15
// limits    D a multiple of 8
#include "training.cuh"

// From training.cuh:
//   EightFloats x: eight neighbouring channels, x.x[0] to x.x[7]; load8, store8: at addresses of whole 16 bytes

constexpr int THREADS = 256, MIXES = 5;

template <typename T> struct Args {
  const T* xx;
  const float* maa;
  const T* m;
  T* mixed;
  i64 tokens, T_;  // T_: of a sequence
  i64 D;
};

template <typename T> __global__ void __launch_bounds__(THREADS) training_mix_forward(const Args<T> args) {
  const i64 D = args.D, index = 8 * (i64(blockIdx.x) * THREADS + threadIdx.x), t = index / D, j = index - t * D;
  if (t >= args.tokens) return;
  const EightFloats xx = load8(args.xx + index);
  EightFloats d = {};
  if (t % args.T_) d = load8(args.xx + index - D);
#pragma unroll
  for (int n = 0; n < 8; ++n) d.x[n] -= xx.x[n];
#pragma unroll
  for (int c = 0; c < MIXES; ++c) {
    const i64 to = c * args.tokens * D + index;
    const EightFloats m = load8(args.m + to);
    EightFloats mixed = load8(args.maa + c * D + j);
#pragma unroll
    for (int n = 0; n < 8; ++n) mixed.x[n] = fmaf(d.x[n], mixed.x[n] + m.x[n], xx.x[n]);
    store8(args.mixed + to, mixed);
  }
}
