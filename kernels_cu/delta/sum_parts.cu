// what      Gradients of queries, keys and gates: adds the parts that tiles of columns and heads of values computed.
// math      dx = the sum of the parts. If rows x were divided by their lengths, y = x / |x|, the sum is dy, and dx =
//           (dy - y (y . dy)) / |x|; |x| is the square root of the sum of squares and 10^-6
// shapes    parts [tiles, B, H group, T, K]; x dx [B, H, T, K]
// grid      a warp for every row of K numbers
// numerics  float32, for float64 data float64; added in the order of tiles, then of heads
// source    the pullback of a division by the square root of the sum of squares and 10^-6
// limits    K <= 256
#include "delta/tokens.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

// From the includes:
//   THREADS = 128, WARPS = 4
//   LEAST_SQUARE = 1e-6

constexpr int LANE_CHANNELS = 8;  // numbers of a lane: K is 32 times as many at most
constexpr int AT_ONCE = 4;        // parts whose loads are under way together

template <typename T> struct Args {
  const FloatOrDouble<T>* parts;
  StridedRows<const T> x;  // null if rows were not divided by their lengths
  StridedRows<T> dx;
  i64 B, H, T_, K;  // T_: tokens of a batch row
  i64 group;        // heads of values that share a head of x
  i64 tiles;        // of columns of V
};

template <typename T> __global__ void __launch_bounds__(THREADS) delta_sum_parts(const Args<T> args) {
  using R = FloatOrDouble<T>;
  const i64 row = blockIdx.x * i64(WARPS) + threadIdx.x / 32, t = row % args.T_, head = row / args.T_;
  if (head >= args.B * args.H) return;
  const i64 b = head / args.H, h = head % args.H;
  const int lane = threadIdx.x % 32, K = int(args.K);
  const R* from = args.parts + (head * args.group * args.T_ + t) * K;
  R dx[LANE_CHANNELS] = {};
  const i64 head_size = args.T_ * K, tile_size = args.B * args.H * args.group * head_size;
  const int group = int(args.group), parts = int(args.tiles) * group;
#pragma unroll 1
  for (int first = 0; first < parts; first += AT_ONCE) {
    R terms[AT_ONCE][LANE_CHANNELS];
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const R* part = from + (first + n) / group * tile_size + (first + n) % group * head_size;
#pragma unroll
      for (int i = 0; i < LANE_CHANNELS; ++i)
        terms[n][i] = first + n < parts && lane + 32 * i < K ? part[lane + 32 * i] : R(0);
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
      for (int i = 0; i < LANE_CHANNELS; ++i) dx[i] += terms[n][i];
  }
  if (args.x.p) {
    const T* x_row = args.x.row(b, h, t);
    R x[LANE_CHANNELS], squares = 0, dot = 0;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; ++i) {
      x[i] = lane + 32 * i < K ? R(widened(x_row[lane + 32 * i])) : R(0);
      squares = fma(x[i], x[i], squares), dot = fma(x[i], dx[i], dot);
    }
    const R inverse_length = inverse_root(sum_over_lanes<32>(squares) + R(LEAST_SQUARE));
    dot = sum_over_lanes<32>(dot) * inverse_length * inverse_length;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; ++i) dx[i] = inverse_length * fma(-dot, x[i], dx[i]);
  }
#pragma unroll
  for (int i = 0; i < LANE_CHANNELS; ++i)
    if (lane + 32 * i < K) args.dx.row(b, h, t)[lane + 32 * i] = narrowed<T>(dx[i]);
}
