// what      Gradients of queries, keys and gates: adds the parts that tiles of columns and heads of values computed.
// math      dx = the sum of the parts. If rows x were divided by their lengths, y = x / |x|, the sum is dy, and dx =
//           (dy - y (y . dy)) / |x|; |x| is the square root of the sum of squares and 10^-6
// shapes    of every sum: parts [tiles, B, H group, T, K]; x dx [B, H, T, K]
// grid      `lanes` neighbouring threads for every row of K numbers; the sums one after the other
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

constexpr int SUMS = 5;  // of a launch, at most

template <typename T> struct Sum {
  const FloatOrDouble<T>* parts;
  StridedRows<const T> x;  // null if rows were not divided by their lengths
  StridedRows<T> dx;
  i64 H, K;
  i64 group;        // heads of values that share a head of x
  i64 lanes;        // a power of 2 up to 32
  i64 wide;         // whether dx has float32 numbers, whatever T is
  i64 first_block;  // the sum's; of sums that there are not, the launch's number of blocks
};
template <typename T> struct Args {
  Sum<T> sums[SUMS];
  i64 B, T_;  // T_: tokens of a batch row
  i64 tiles;  // of columns of V
};

template <typename R> __device__ __forceinline__ R sum_over(R x, u32 lanes) {
  for (u32 distance = lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

template <typename T> __global__ void __launch_bounds__(THREADS) delta_sum_parts(const Args<T> args) {
  using R = FloatOrDouble<T>;
  int which = 0;
#pragma unroll
  for (int n = 1; n < SUMS; ++n)
    if (blockIdx.x >= args.sums[n].first_block) which = n;
  const Sum<T>& sum = args.sums[which];
  const u32 lanes = u32(sum.lanes);
  const i64 row = ((blockIdx.x - sum.first_block) * THREADS + threadIdx.x) / lanes, head = row / args.T_,
            t = row - head * args.T_, b = head / sum.H, h = head - b * sum.H;
  const int lane = threadIdx.x % lanes, K = b < args.B ? int(sum.K) : 0, group = int(sum.group);
  const R* from = sum.parts + (head * group * args.T_ + t) * K;
  R dx[LANE_CHANNELS] = {};
  const i64 head_size = args.T_ * K, tile_size = args.B * sum.H * group * head_size;
  const int parts = int(args.tiles) * group;
  // The lane's i-th channel.
  const auto channel = [&](int i) { return lane + int(lanes) * i; };
#pragma unroll 1
  for (int first = 0; first < parts; first += AT_ONCE) {
    R terms[AT_ONCE][LANE_CHANNELS];
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const R* part = from + (first + n) / group * tile_size + (first + n) % group * head_size;
#pragma unroll
      for (int i = 0; i < LANE_CHANNELS; ++i)
        terms[n][i] = first + n < parts && channel(i) < K ? part[channel(i)] : R(0);
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
      for (int i = 0; i < LANE_CHANNELS; ++i) dx[i] += terms[n][i];
  }
  if (sum.x.p) {
    const T* x_row = sum.x.row(b, h, t);
    R x[LANE_CHANNELS], squares = 0, dot = 0;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; ++i) {
      x[i] = channel(i) < K ? R(widened(x_row[channel(i)])) : R(0);
      squares = fma(x[i], x[i], squares), dot = fma(x[i], dx[i], dot);
    }
    const R inverse_length = inverse_root(sum_over(squares, lanes) + R(LEAST_SQUARE));
    dot = sum_over(dot, lanes) * inverse_length * inverse_length;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; ++i) dx[i] = inverse_length * fma(-dot, x[i], dx[i]);
  }
  const i64 place = b * sum.dx.batch_stride + h * sum.dx.head_stride + t * sum.dx.token_stride;
#pragma unroll
  for (int i = 0; i < LANE_CHANNELS; ++i)
    if (channel(i) < K) {
      if (sum.wide) reinterpret_cast<float*>(sum.dx.p)[place + channel(i)] = float(dx[i]);
      else sum.dx.p[place + channel(i)] = narrowed<T>(dx[i]);
    }
}
