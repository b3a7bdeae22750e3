// what      The activations between the two matrices of RWKV-7's products of low rank in prompts, in place: the decay's
//           and the gate's; the learning rate's and the value's have none.
// math      low_w = tanh(low_w);  low_g = sigmoid(low_g)
// shapes    low [4, count] in the order w a g v
// grid      rwkv7/cuda_prefill.py launches a thread for 8 elements, the blocks of w before those of g; 256 threads
// numerics  float32, rounded once
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    low starts on 16 bytes; fast where count is a multiple of 8
#include "activations.cuh"

// From activations.cuh:
//   Tanh, Sigmoid: value<X>(x), as accurate as results of type X need
//   EightFloats x: eight neighbouring channels, x.x[0] to x.x[7]; load8, store8: at addresses of whole 16 bytes

constexpr int THREADS = 256, GATE = 2;  // GATE: the place of g

template <typename X> struct Args {
  X* low;
  i64 count;
};

template <typename X> __global__ void __launch_bounds__(THREADS) rwkv7_low_activations(const Args<X> args) {
  launch_next();        // the next kernel may begin
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read
  const bool gate = blockIdx.x >= gridDim.x / 2;
  const auto activate = [&](float x) { return gate ? Sigmoid::value<X>(x) : Tanh::value<X>(x); };
  X* low = args.low + (gate ? GATE * args.count : 0);
  const i64 index = 8 * (i64(blockIdx.x % (gridDim.x / 2)) * THREADS + threadIdx.x);
  if (args.count % 8 == 0) {
    if (index >= args.count) return;
    EightFloats x = load8(low + index);
#pragma unroll
    for (int n = 0; n < 8; ++n) x.x[n] = activate(x.x[n]);
    store8(low + index, x);
  } else {
    for (i64 n = index; n < min(index + 8, args.count); ++n) low[n] = from_float<X>(activate(to_float(low[n])));
  }
}
