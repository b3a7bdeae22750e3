// what      The log of the decay from its low-rank product.
// math      w = -exp(decay + low)
// shapes    low [count / D, D], decay [D], w [count / D, D] float32
// grid      rwkv/cuda_grad.py launches a thread for 8 channels of a token; 256 threads
// numerics  float32
// source    Peng et al., 2024, "Eagle and Finch", eq. 16-17
// limits    D a multiple of 8
#include "training.cuh"

// From training.cuh:
//   EightFloats x: eight neighbouring channels, x.x[0] to x.x[7]; load8, store8: at addresses of whole 16 bytes

constexpr int THREADS = 256;

template <typename T> struct Args {
  const T* low;
  const float* decay;
  float* w;
  i64 count, D;
};

template <typename T> __global__ void __launch_bounds__(THREADS) training_log_decay_forward(const Args<T> args) {
  const i64 index = 8 * (i64(blockIdx.x) * THREADS + threadIdx.x);
  if (index >= args.count) return;
  EightFloats low = load8(args.low + index);
  const EightFloats decay = load8(args.decay + index % args.D);
#pragma unroll
  for (int n = 0; n < 8; ++n) low.x[n] = -expf(decay.x[n] + low.x[n]);
  store8(args.w + index, low);
}
