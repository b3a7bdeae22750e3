// what      A feature map of every number, for queries and keys of linear attention. The identity copies arrays. Phi:
//           the map (feature.cuh).
// math      y = phi(x):  x,  elu(x) + 1,  max(x, 0)  or  exp(x)
// shapes    x y [B, H, T, C]; a stride of x may be 0: x is then repeated along that axis
// grid      a thread for every PIECE neighbouring numbers of y, or for every number if `vectors` is 0
// numerics  float32, for float64 data float64
// source    Katharopoulos et al., 2020, section 3.2.1
// limits    `step` is 0 or 1
#include "feature.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

// From real.cuh: FloatOrDouble<T>: double for double, else float; widened, narrowed: a number to it, and back.
template <typename T, typename Y> struct Args {
  StridedRows<const T> x;
  StridedRows<Y> y;
  i64 B, H, T_, C;  // T_: tokens of a row of the batch
  i64 step;         // the stride of x's channels: 1, or 0 if x has one number for all channels of a row
  i64 vectors;      // whether all rows start on 16 bytes and are multiples of 16 bytes
};

// Maps N neighbouring channels of a row, those of this thread.
template <class Phi, int N, typename T, typename Y> __device__ __forceinline__ void map_piece(const Args<T, Y>& args) {
  const i64 across = args.C / N, index = i64(blockIdx.x) * blockDim.x + threadIdx.x, row = index / across;
  const i64 c = index % across * N, t = row % args.T_, h = row / args.T_ % args.H, b = row / args.T_ / args.H;
  if (b >= args.B) return;
  const T* from = args.x.row(b, h, t);
  Piece<T, N> x;
  if (args.step) x = *reinterpret_cast<const Piece<T, N>*>(from + c);
  else
#pragma unroll
    for (int i = 0; i < N; ++i) x.x[i] = *from;
  Piece<Y, N> y;
#pragma unroll
  for (int i = 0; i < N; ++i) y.x[i] = narrowed<Y>(Phi::value(widened(x.x[i])));
  *reinterpret_cast<Piece<Y, N>*>(args.y.row(b, h, t) + c) = y;
}

template <class Phi, typename T, typename Y>
__global__ void __launch_bounds__(256) elementwise_feature_map(const Args<T, Y> args) {
  if (args.vectors) map_piece<Phi, PIECE>(args);
  else map_piece<Phi, 1>(args);
}
