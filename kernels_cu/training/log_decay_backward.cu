// what      The gradient of the decay's exponent, and of its base.
// math      w = -exp(decay + low): dlow = dw w; parts = sum_t dlow of the block's tokens: ddecay
// shapes    dw w [tokens, D] float32, dlow [tokens, D], parts [blocks, D]
// grid      rwkv/cuda_grad.py launches a block for every `tokens_per_block` tokens, which it takes one after the other;
//           a thread has 8 channels
// numerics  float32, dlow rounded once; sums always in the same order
// source    Peng et al., 2024, "Eagle and Finch", eq. 16-17
// limits    D a multiple of 8, up to 8 THREADS
#include "training.cuh"

// From training.cuh:
//   EightFloats x: eight neighbouring channels, x.x[0] to x.x[7]; load8, store8: at addresses of whole 16 bytes

template <typename T> struct Args {
  const float* dw;
  const float* w;
  T* dlow;
  float* parts;
  i64 tokens, D, tokens_per_block;
};

template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS) training_log_decay_backward(const Args<T> args) {
  const i64 D = args.D, j = 8 * threadIdx.x;
  if (j >= D) return;
  const i64 first = blockIdx.x * args.tokens_per_block,
            last = first + args.tokens_per_block < args.tokens ? first + args.tokens_per_block : args.tokens;
  EightFloats sums = {};
#pragma unroll 4
  for (i64 t = first; t < last; ++t) {
    EightFloats dlow = load8(args.dw + t * D + j);
    const EightFloats w = load8(args.w + t * D + j);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      dlow.x[n] *= w.x[n];
      sums.x[n] += dlow.x[n];
    }
    store8(args.dlow + t * D + j, dlow);
  }
  store8(args.parts + blockIdx.x * D + j, sums);
}
