// what      In place: forward the activations between the two matrices of products of low rank, backward dy through
//           them. RWKV-7's decay has a tanh there, its gate a sigmoid, its other two products nothing; RWKV-6's have a
//           tanh.
// math      forward: y <- f(y), f being tanh or sigmoid by y's column;  backward: dy <- dy f'(x) by the y = f(x) that
//           forward has left, f' being 1 - y^2 or y (1 - y); y stays
// shapes    y dy [count / columns, columns]: tanh applies to the columns 0 ... tanh_end - 1, the sigmoid to those from
//           sigmoid_begin to sigmoid_end - 1, which are others. A row has the products of a token with all first
//           matrices, in training; in prompts there is one row, with all tokens' products with one matrix after those
//           with another. dy null: forward
// grid      rwkv/cuda_grad.py and rwkv7/cuda_prefill.py launch a thread for 8 elements; 256 threads
// numerics  float32, rounded once
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    y and dy start on 16 bytes. Numbers are computed one by one if `columns` is no multiple of 8; if tanh_end,
//           sigmoid_begin or sigmoid_end is none, the eight that it cuts
#include "activations.cuh"

// From activations.cuh:
//   activate, activate8: apply F, Tanh or Sigmoid, or without dy null its slope, to a number, to eight neighbours

constexpr int THREADS = 256;

template <typename T> struct Args {
  T* y;
  T* dy;
  i64 count, columns, tanh_end, sigmoid_begin, sigmoid_end;
};

// Applies F to those of the 8 numbers from `index` on, fewer at the end, whose column is one of begin ... end - 1.
// column: that of number `index`. The 8 may go on in the next row unless `columns` is a multiple of 8.
template <class F, typename T>
__device__ __forceinline__ void activate_columns(const Args<T>& args, i64 index, i64 column, i64 begin, i64 end) {
  const bool in_one_row = args.columns % 8 == 0;
  if (in_one_row && (column + 8 <= begin || column >= end)) return;
  if (in_one_row && column >= begin && column + 8 <= end) return activate8<F>(args.y, args.y, args.dy, index);
  for (int n = 0; n < 8 && index + n < args.count; ++n) {
    const i64 own = (column + n) % args.columns;
    if (own >= begin && own < end) activate<F>(args.y, args.y, args.dy, index + n);
  }
}

template <typename T> __global__ void __launch_bounds__(THREADS) rwkv6_low_activations(const Args<T> args) {
  launch_next();        // the next kernel may begin
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read
  const i64 index = 8 * (i64(blockIdx.x) * THREADS + threadIdx.x), column = index % args.columns;
  if (index >= args.count) return;
  activate_columns<Tanh>(args, index, column, 0, args.tanh_end);
  activate_columns<Sigmoid>(args, index, column, args.sigmoid_begin, args.sigmoid_end);
}
