// what      The channel mix's activation, for the products that have no epilogue of their own.
// math      y = relu(x)^2, in units of UNIT_OF_SQUARES<Y>
// shapes    x y [count]
// grid      a thread eight elements; 256 threads
// smem      none
// barriers  none
// numerics  float32, rounded once
// source    Peng et al., 2024, "Eagle and Finch", section 4
// limits    count a multiple of 8; x and y start on 16 bytes
#include "decode.cuh"

constexpr int THREADS = 256;

template <typename X, typename Y> struct Args {
  const X* x;
  Y* y;
  i64 count;
};

template <typename X, typename Y> __global__ void __launch_bounds__(THREADS) rwkv6_relu_squared(const Args<X, Y> args) {
  launch_next();
  wait_for_previous();
  const i64 at = 8 * (i64(blockIdx.x) * THREADS + threadIdx.x);
  if (at >= args.count) return;
  float x[8];
  load8(x, args.x + at);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = relu_squared<Y>(x[i]);
  store8(args.y + at, x);
}
