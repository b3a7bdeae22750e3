// what      The gradient of an activation's input, from the activation's value; it replaces the value's gradient.
// math      dy <- dy F'(x), as a function of y = F(x): F::slope<T>(y), T being the type in which y was stored
// shapes    dy y [count]
// grid      rwkv/cuda_grad.py launches a thread for 8 elements; 256 threads
// numerics  float32, rounded once
// source    Peng et al., 2024, "Eagle and Finch", section 4
// limits    dy and y start on 16 bytes
#include "activations.cuh"

// From the includes:
//   EightFloats x: eight neighbouring channels, x.x[0] to x.x[7]; load8, store8: at addresses of whole 16 bytes
//   F, one of ReluSquared, Tanh: F::slope<T>(y) is the derivative

constexpr int THREADS = 256;

template <typename T> struct Args {
  T* dy;
  const T* y;
  i64 count;
};

template <class F, typename T>
__global__ void __launch_bounds__(THREADS) training_activation_backward(const Args<T> args) {
  const i64 index = 8 * (i64(blockIdx.x) * THREADS + threadIdx.x);
  if (index + 8 <= args.count) {
    EightFloats dy = load8(args.dy + index);
    const EightFloats y = load8(args.y + index);
#pragma unroll
    for (int n = 0; n < 8; ++n) dy.x[n] *= F::template slope<T>(y.x[n]);
    store8(args.dy + index, dy);
  } else {
    for (i64 n = index; n < args.count; ++n)
      args.dy[n] = from_float<T>(to_float(args.dy[n]) * F::template slope<T>(to_float(args.y[n])));
  }
}
