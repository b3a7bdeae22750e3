// what      The channel mix's activation, where the product has no epilogue of its own; or the gradient of its input.
// math      forward: y = relu(x)^2, in units of UNIT_OF_SQUARES<Y>;  backward: dy <- dy times the slope at x, by the y
//           that forward has left
// shapes    x y dy [count]; y may be x. dy null: forward; else backward, which reads no x
// grid      a thread for 8 elements; 256 threads
// numerics  float32, rounded once
// source    Peng et al., 2024, "Eagle and Finch", section 4
// limits    x, y and dy start on 16 bytes
#include "activations.cuh"

// From activations.cuh:
//   activate, activate8: apply ReluSquared, or without dy null its slope, to a number, to eight neighbours

constexpr int THREADS = 256;

template <typename X, typename Y> struct Args {
  const X* x;
  Y* y;
  Y* dy;
  i64 count;
};

template <typename X, typename Y> __global__ void __launch_bounds__(THREADS) rwkv6_relu_squared(const Args<X, Y> args) {
  launch_next();        // the next kernel may begin
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read
  const i64 index = 8 * (i64(blockIdx.x) * THREADS + threadIdx.x);
  if (index + 8 <= args.count) return activate8<ReluSquared>(args.x, args.y, args.dy, index);
  for (i64 n = index; n < args.count; ++n) activate<ReluSquared>(args.x, args.y, args.dy, n);
}
