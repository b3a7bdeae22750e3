// what      A feature map of every number, for queries and keys of linear attention. The identity copies arrays. Phi:
//           the map (feature.cuh).
// math      y = phi(x):  x,  elu(x) + 1,  max(x, 0)  or  exp(x)
// shapes    x y [B, H, T, C]; a stride of x may be 0: x is then repeated along that axis
// grid      a thread for every PIECE neighbouring channels, or every channel if `vectors` is 0, of TOKENS tokens of y
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

constexpr int TOKENS = 4;  // neighbouring tokens of a thread, which divides once for all of them

// Maps N neighbouring channels of TOKENS tokens, those of this thread.
template <class Phi, int N, typename T, typename Y> __device__ __forceinline__ void map_piece(const Args<T, Y>& args) {
  const i64 across = args.C / N, groups = (args.T_ + TOKENS - 1) / TOKENS;
  const i64 index = i64(blockIdx.x) * blockDim.x + threadIdx.x, group = index / across, head = group / groups;
  const i64 c = index % across * N, t = group % groups * TOKENS, h = head % args.H, b = head / args.H;
  if (b >= args.B) return;
  Piece<T, N> x[TOKENS];
#pragma unroll
  for (int n = 0; n < TOKENS; ++n) {
    if (t + n >= args.T_) break;
    const T* from = args.x.row(b, h, t + n);
    if (args.step) x[n] = *reinterpret_cast<const Piece<T, N>*>(from + c);
    else
#pragma unroll
      for (int i = 0; i < N; ++i) x[n].x[i] = *from;
  }
#pragma unroll
  for (int n = 0; n < TOKENS; ++n) {
    if (t + n >= args.T_) break;
    Piece<Y, N> y;
#pragma unroll
    for (int i = 0; i < N; ++i) y.x[i] = narrowed<Y>(Phi::value(widened(x[n].x[i])));
    *reinterpret_cast<Piece<Y, N>*>(args.y.row(b, h, t + n) + c) = y;
  }
}

template <class Phi, typename T, typename Y>
__global__ void __launch_bounds__(256) elementwise_feature_map(const Args<T, Y> args) {
  if (args.vectors) map_piece<Phi, PIECE>(args);
  else map_piece<Phi, 1>(args);
}
