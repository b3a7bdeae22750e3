// what      An activation of the mixes, for products that have no epilogue of their own.
// math      y = relu(x)^2 in units of UNIT_OF_SQUARES<Y> or y = tanh(x)
// shapes    x y [count]; y may be x
// grid      a thread for 8 elements; 256 threads
// numerics  float32, rounded once
// source    Peng et al., 2024, "Eagle and Finch", section 4
// limits    x and y start on 16 bytes
#include "activations.cuh"

// From the includes:
//   F, one of ReluSquared, Tanh: F::value<Y>(x) is y

constexpr int THREADS = 256;

template <typename X, typename Y> struct Args {
  const X* x;
  Y* y;
  i64 count;
};

template <class F, typename X, typename Y>
__global__ void __launch_bounds__(THREADS) rwkv6_activation(const Args<X, Y> args) {
  launch_next();        // the next kernel may begin
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read
  const i64 index = 8 * (i64(blockIdx.x) * THREADS + threadIdx.x);
  if (index + 8 <= args.count) {
    EightFloats x = load8(args.x + index);
#pragma unroll
    for (int n = 0; n < 8; ++n) x.x[n] = F::template value<Y>(x.x[n]);
    store8(args.y + index, x);
  } else {
    for (i64 n = index; n < args.count; ++n) args.y[n] = from_float<Y>(F::template value<Y>(to_float(args.x[n])));
  }
}
