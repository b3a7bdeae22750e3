// what      The channel mix's activation in models whose config names another than the square of relu; in place.
// math      y <- F(y): relu, gelu (by tanh), silu, the sigmoid or its log
// shapes    y [count]
// grid      a thread for 8 elements; 256 threads
// numerics  float32, rounded once
// source    flash-linear-attention's `hidden_act`; Hendrycks and Gimpel, 2016, "Gaussian error linear units"
// limits    y starts on 16 bytes; float16, whose channel mix has a unit (decode.cuh), is not taken
#include "training.cuh"

// From training.cuh:
//   EightFloats x: eight neighbours, x.x[0] to x.x[7]; load8, store8: at addresses of whole 16 bytes
//   sigmoid, silu

constexpr int THREADS = 256;

struct Relu {
  static __device__ __forceinline__ float value(float x) { return fmaxf(x, 0.f); }
};

struct Gelu {
  static __device__ __forceinline__ float value(float x) {
    return 0.5f * x * (1.f + tanhf(0.7978845608f * fmaf(0.044715f * x * x, x, x)));
  }
};

struct Silu {
  static __device__ __forceinline__ float value(float x) { return silu(x); }
};

struct Sigmoid {
  static __device__ __forceinline__ float value(float x) { return sigmoid(x); }
};

struct LogSigmoid {
  static __device__ __forceinline__ float value(float x) { return fminf(x, 0.f) - log1pf(expf(-fabsf(x))); }
};

template <typename X> struct Args {
  X* y;
  i64 count;
};

template <typename X, class F> __global__ void __launch_bounds__(THREADS) rwkv6_hidden_activation(const Args<X> args) {
  launch_next();        // the next kernel may begin
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read
  const i64 index = 8 * (i64(blockIdx.x) * THREADS + threadIdx.x);
  if (index + 8 <= args.count) {
    EightFloats y = load8(args.y + index);
#pragma unroll
    for (int n = 0; n < 8; ++n) y.x[n] = F::value(y.x[n]);
    return store8(args.y + index, y);
  }
  for (i64 n = index; n < args.count; ++n) args.y[n] = from_float<X>(F::value(to_float(args.y[n])));
}
