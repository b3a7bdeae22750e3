// what      Sums over neighbouring heads: the gradients of queries and keys whose heads several heads of values share.
// math      sum_h = x_(h group) + ... + x_(h group + group - 1)
// shapes    x [B, H group, T, C], sum [B, H, T, C]
// grid      a thread for every 16 bytes, or every channel if `vectors` is 0, of a row of `sum`
// numerics  float32, for float64 data float64; in the order of heads
// source    the pullback of reading a head several times
#include "feature.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

// From the includes:
//   Piece<T, N>: N neighbouring numbers; FloatOrDouble<T>: double for double, else float; widened, narrowed: a number
//     to it, and back
template <typename T> struct Args {
  StridedRows<const T> x;
  StridedRows<T> sum;
  i64 B, H, T_, C;  // of `sum`; T_: tokens of a row of the batch
  i64 group;
  i64 vectors;  // whether all rows start on 16 bytes and are multiples of 16 bytes
};

template <int N, typename T> __device__ __forceinline__ void sum_piece(const Args<T>& args) {
  const i64 across = args.C / N, index = i64(blockIdx.x) * blockDim.x + threadIdx.x, row = index / across;
  const i64 c = index % across * N, t = row % args.T_, head = row / args.T_, h = head % args.H, b = head / args.H;
  if (b >= args.B) return;
  const T* x = args.x.row(b, h * args.group, t) + c;
  FloatOrDouble<T> sums[N] = {};
#pragma unroll 4
  for (i64 n = 0; n < args.group; ++n, x += args.x.head_stride) {
    const auto piece = *reinterpret_cast<const Piece<T, N>*>(x);
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] += widened(piece.x[i]);
  }
  Piece<T, N> sum;
#pragma unroll
  for (int i = 0; i < N; ++i) sum.x[i] = narrowed<T>(sums[i]);
  *reinterpret_cast<Piece<T, N>*>(args.sum.row(b, h, t) + c) = sum;
}

template <typename T> __global__ void __launch_bounds__(256) elementwise_sum_heads(const Args<T> args) {
  if (args.vectors) sum_piece<16 / sizeof(T)>(args);
  else sum_piece<1>(args);
}
