// what      The gradient through the normaliser of linear attention, o = y / z.
// math      dy = do / z,   dz = -sum_v dy o;   all 0 where z is 0
// shapes    yz dyz [B, H, T, columns] float32 or float64, column V is z, later columns are padding with gradient 0;
//           do [B, H, T, V]
// grid      a warp for every token
// numerics  float32, for float64 data float64
// source    Katharopoulos et al., 2020, eq. 12
#include "lanes.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

// From real.cuh: FloatOrDouble<T>: double for double, else float; widened, narrowed: a number to it, and back.
template <typename T> struct Args {
  StridedRows<const FloatOrDouble<T>> yz;
  StridedRows<const T> do_;
  StridedRows<FloatOrDouble<T>> dyz;
  i64 B, H, T_, V, columns;  // T_: tokens of a row of the batch
};

template <typename T> __global__ void __launch_bounds__(128) elementwise_divide_gradient(const Args<T> args) {
  const i64 row = i64(blockIdx.x) * 4 + threadIdx.x / 32, t = row % args.T_, h = row / args.T_ % args.H;
  const i64 b = row / args.T_ / args.H;
  if (b >= args.B) return;
  const FloatOrDouble<T>*y = args.yz.row(b, h, t), z = y[args.V];
  FloatOrDouble<T>* dy = args.dyz.row(b, h, t);
  FloatOrDouble<T> dz = 0;
  for (i64 c = threadIdx.x % 32; c < args.V; c += 32) {
    dy[c] = z == 0 ? 0 : widened(args.do_.row(b, h, t)[c]) / z;
    if (dy[c] != 0) dz = fma(-dy[c], y[c] / z, dz);
  }
  dz = warp_sum(dz);
  for (i64 c = args.V + threadIdx.x % 32; c < args.columns; c += 32) dy[c] = c == args.V ? dz : 0;
}
