// what      The gradient of a feature map's input.
// math      dx = dy phi'(x)
// shapes    x dx [B, H, T, C], dy [B, H, T, C]
// grid      a thread for every number
// numerics  float32; float64 for float64 inputs
// source    Katharopoulos et al., 2020, section 3.2.1
#include "feature.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

// From real.cuh: FloatOrDouble<T>: double for double, else float; widened, narrowed: a number to it, and back.
template <typename T, typename Y> struct Args {
  StridedRows<const T> x;
  StridedRows<const Y> dy;
  StridedRows<T> dx;
  i64 B, H, T_, C;  // T_: tokens of a row of the batch
};

template <class Phi, typename T, typename Y>
__global__ void __launch_bounds__(256) elementwise_feature_gradient(const Args<T, Y> args) {
  const i64 index = i64(blockIdx.x) * blockDim.x + threadIdx.x, c = index % args.C, row = index / args.C;
  const i64 t = row % args.T_, h = row / args.T_ % args.H, b = row / args.T_ / args.H;
  if (b >= args.B) return;
  const FloatOrDouble<Y> dy = widened(args.dy.row(b, h, t)[c]);
  args.dx.row(b, h, t)[c] = narrowed<T>(dy * Phi::slope(widened(args.x.row(b, h, t)[c])));
}
