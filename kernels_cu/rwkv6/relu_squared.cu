// what      The channel mix's activation, for the products that have no epilogue of their own.
// math      y = relu(x)^2
// shapes    x y [count]
// grid      a thread an element; 256 threads
// smem      none
// barriers  none
// numerics  float32, rounded once
// source    Peng et al., 2024, "Eagle and Finch", section 4
// limits    none
#include "decode.cuh"

constexpr int THREADS = 256;

template <typename X> struct Args {
  const float* x;
  X* y;
  i64 count;
};

template <typename X> __global__ void __launch_bounds__(THREADS) rwkv6_relu_squared(const Args<X> args) {
  launch_next();
  wait_for_previous();
  const i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
  if (at >= args.count) return;
  const float x = args.x[at] > 0.f ? args.x[at] : 0.f;
  args.y[at] = from_float<X>(x * x);
}
