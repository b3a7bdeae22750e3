// what      The normaliser of linear attention: divides weighted sums by the sum of their weights.
// math      o = y / z, where 0 / 0 is 0
// shapes    yz [B, H, T, more than V] float32 or float64, column V is z; o [B, H, T, V]
// grid      a warp for every token
// numerics  float32, for float64 data float64
// source    Katharopoulos et al., 2020, eq. 12
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

// From real.cuh: FloatOrDouble<T>: double for double, else float; widened, narrowed: a number to it, and back.
template <typename T> struct Args {
  StridedRows<const FloatOrDouble<T>> yz;
  StridedRows<T> o;
  i64 B, H, T_, V;  // T_: tokens of a row of the batch
};

template <typename T> __global__ void __launch_bounds__(128) elementwise_divide(const Args<T> args) {
  const i64 row = i64(blockIdx.x) * 4 + threadIdx.x / 32, t = row % args.T_, h = row / args.T_ % args.H;
  const i64 b = row / args.T_ / args.H;
  if (b >= args.B) return;
  const FloatOrDouble<T>*y = args.yz.row(b, h, t), z = y[args.V];
  for (i64 c = threadIdx.x % 32; c < args.V; c += 32)
    args.o.row(b, h, t)[c] = narrowed<T>(z == 0 && y[c] == 0 ? 0 : y[c] / z);
}
