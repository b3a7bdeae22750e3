// what      The gradients of rows of queries, keys and gates, from what tiles of columns and heads of values add.
// math      dx = the sum over tiles and heads; of rows that were divided by their length, y = x / |x|, it is
//           (dy - y (y . dy)) / |x|
// shapes    parts [tiles, B, H group, T, K]; x dx [B, H, T, K]
// grid      a warp for every row of K numbers
// smem      none
// barriers  none
// numerics  float32, of float64 data float64; tiles, then heads in their order
// source    the pullback of a division by the square root of the sum of squares and 10^-6
// limits    K <= 256
#include "delta/tokens.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

constexpr int EACH = 8;  // numbers of a lane

template <typename T> struct Args {
  const Real<T>* parts;
  Rows<const T> x;  // null where rows were not divided by their lengths
  Rows<T> dx;
  i64 B, H, T_, K, group, tiles;
};

template <typename T> __global__ void __launch_bounds__(THREADS) delta_sum_parts(const Args<T> args) {
  using R = Real<T>;
  const i64 row = blockIdx.x * i64(WARPS) + threadIdx.x / 32, t = row % args.T_, head = row / args.T_;
  if (head >= args.B * args.H) return;
  const i64 b = head / args.H, h = head % args.H;
  const int lane = threadIdx.x % 32, K = int(args.K);
  const R* from = args.parts + (head * args.group * args.T_ + t) * K;
  R dx[EACH] = {};
  for (i64 part = 0; part < args.tiles * args.group; ++part) {
    const i64 heads = part / args.group * args.B * args.H * args.group + part % args.group;
    const R* mine = from + heads * args.T_ * K;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (lane + 32 * i < K) dx[i] += mine[lane + 32 * i];
  }
  if (args.x.p) {
    const T* x = args.x.row(b, h, t);
    R y[EACH], squares = 0, along = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      y[i] = lane + 32 * i < K ? R(to_real(x[lane + 32 * i])) : R(0);
      squares = fma(y[i], y[i], squares), along = fma(y[i], dx[i], along);
    }
    const R over = inverse_root(sum_over_lanes<32>(squares) + R(LEAST_SQUARE));
    along = sum_over_lanes<32>(along) * over * over;
#pragma unroll
    for (int i = 0; i < EACH; ++i) dx[i] = over * fma(-along, y[i], dx[i]);
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    if (lane + 32 * i < K) args.dx.row(b, h, t)[lane + 32 * i] = from_real<T>(dx[i]);
}
