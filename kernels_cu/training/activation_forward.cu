// what      An activation, in place.
// math      x <- relu(x)^2 in units of UNIT_OF_SQUARES<T>, or tanh(x)
// shapes    x [count]
// grid      a thread for 8 elements; 256 threads
// smem      none
// barriers  none
// numerics  float32, rounded once
// source    Peng et al., 2024, "Eagle and Finch", section 4
// limits    none
#include "activations.cuh"

constexpr int THREADS = 256;

template <typename T> struct Args {
  T* x;
  i64 count;
};

template <class F, typename T>
__global__ void __launch_bounds__(THREADS) training_activation_forward(const Args<T> args) {
  const i64 at = 8 * (i64(blockIdx.x) * THREADS + threadIdx.x);
  if (at + 8 <= args.count) {
    Eight x = load8(args.x + at);
#pragma unroll
    for (int n = 0; n < 8; ++n) x.x[n] = F::template value<T>(x.x[n]);
    store8(args.x + at, x);
  } else {
    for (i64 n = at; n < args.count; ++n) args.x[n] = from_float<T>(F::template value<T>(to_float(args.x[n])));
  }
}
