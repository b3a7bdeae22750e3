// what      In place: forward the activations between the two matrices of RWKV-7's products of low rank, backward
//           dy through them. Only the decay's and the gate's products have one there.
// math      forward: y <- f(y), f being tanh in the decay's columns, sigmoid in the gate's;  backward: dy <- dy f'(x)
//           by the y = f(x) that forward has left, f' being 1 - y^2 or y (1 - y); y stays
// shapes    y dy [tokens, ranks], ranks being the columns of all products' first matrices, side by side; the decay's
//           are 0 ... decay_end - 1, the gate's gate_begin ... gate_end - 1, behind them. dy null: forward
// grid      rwkv7/cuda_grad.py launches a thread for 8 elements; 256 threads
// numerics  float32, rounded once
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    y and dy start on 16 bytes. Numbers are computed one by one if `ranks` is no multiple of 8; if decay_end,
//           gate_begin or gate_end is none, the eight that it cuts
#include "activations.cuh"

// From activations.cuh:
//   EightFloats x: eight neighbouring channels, x.x[0] to x.x[7]; load8, store8: at addresses of whole 16 bytes
//   Tanh, Sigmoid: value<T>(x) is y = f(x); slope<T>(y) the derivative at x

constexpr int THREADS = 256;

template <typename T> struct Args {
  T* y;
  T* dy;
  i64 tokens, ranks, decay_end, gate_begin, gate_end;
};

// Applies F, backward its slope, to those of the 8 numbers from `index` on, fewer at the end, whose column is one of
// begin ... end - 1. column: that of number `index`. The 8 may go on in the next row unless ranks is a multiple of 8.
template <class F, typename T>
__device__ __forceinline__ void activate(const Args<T>& args, i64 index, i64 column, i64 begin, i64 end) {
  const i64 count = args.tokens * args.ranks;
  const bool in_one_row = args.ranks % 8 == 0;
  if (in_one_row && (column + 8 <= begin || column >= end)) return;
  T* y = args.y + index;
  if (in_one_row && column >= begin && column + 8 <= end) {
    EightFloats x = load8(y);  // forward what F is applied to, backward F's result
    if (args.dy) {
      EightFloats dy = load8(args.dy + index);
#pragma unroll
      for (int n = 0; n < 8; ++n) dy.x[n] *= F::template slope<T>(x.x[n]);
      store8(args.dy + index, dy);
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n) x.x[n] = F::template value<T>(x.x[n]);
      store8(y, x);
    }
    return;
  }
  for (int n = 0; n < 8 && index + n < count; ++n) {
    const i64 own = (column + n) % args.ranks;
    if (own < begin || own >= end) continue;
    const float x = to_float(y[n]);  // as above
    if (args.dy) args.dy[index + n] = from_float<T>(to_float(args.dy[index + n]) * F::template slope<T>(x));
    else y[n] = from_float<T>(F::template value<T>(x));
  }
}

template <typename T> __global__ void __launch_bounds__(THREADS) training_low_activations(const Args<T> args) {
  const i64 index = 8 * (i64(blockIdx.x) * THREADS + threadIdx.x), column = index % args.ranks;
  if (index >= args.tokens * args.ranks) return;
  activate<Tanh>(args, index, column, 0, args.decay_end);
  activate<Sigmoid>(args, index, column, args.gate_begin, args.gate_end);
}
