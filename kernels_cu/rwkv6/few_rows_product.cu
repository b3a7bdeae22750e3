// what      The product of few rows of weights with up to eight vectors, by blocks that take next to no room.
// math      the sum of y_b's parts is W x_b
// shapes    w [M, K] of type T, with int8 scales [M], rows of both padded to 16, x [TERMS, B, K] of type T, or bfloat16
//           beside int8, y [PARTS, B, M]
// grid      a block for every part of K of every 16 rows, parts fastest; 256 threads: a warp has an eighth of the part,
//           a lane neighbours of it in two rows
// smem      Shared: the warps' sums
// barriers  one: the warps' sums stand
// numerics  tensor cores: the three terms of x that hold a float, and weights as they are, int8 ones as bfloat16
//           numbers; float32 sums in a fixed order, times the row's scale
// source    Peng et al., 2024, "Eagle and Finch", eq. 14, for the products
// limits    B up to 8, K a multiple of 8, with int8 of 16; w and x start on 16 bytes; sm_90a
//
// Weights are in registers before x stands. A block leaves the shared memory to the product that comes next, whose own
// weights are on their way meanwhile.
#include "rwkv6/products.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, ROWS = 16, COLUMNS = 8, TERMS = FLOAT_TERMS;
constexpr int STEP = 32, STEPS = 2, SLICE = WARPS * STEPS * STEP;  // of K: a warp's at a time, times, a block's

template <typename T> struct Args {
  const T* w;
  const float* scales;
  const typename MultipliedAs<T>::Type* x;
  float* y;
  i64 B, K, M;
};

struct Shared {
  float sums[WARPS][COLUMNS][ROWS + 1];  // no bank conflicts
};

template <typename T> __global__ void __launch_bounds__(THREADS) rwkv6_few_rows_product(const Args<T> args) {
  typedef typename MultipliedAs<T>::Type X;
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  launch_next();
  const int tid = threadIdx.x, warp = tid >> 5, g = (tid & 31) >> 2, t = tid & 3;
  const int K = int(args.K), B = int(args.B), parts = (K + SLICE - 1) / SLICE;
  const int part = blockIdx.x % parts, row = blockIdx.x / parts * ROWS;
  const uint4 none = {0, 0, 0, 0};
  const auto column = [&](int step) { return (part * WARPS + warp) * STEPS * STEP + step * STEP + 8 * t; };
  uint4 upper[STEPS], lower[STEPS], x[STEPS][TERMS];
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int k = column(step);
    const T* from = args.w + i64(row + g) * K + k;
    upper[step] = k < K ? eight(from) : none;
    lower[step] = k < K ? eight(from + 8 * i64(K)) : none;
  }
  const int of = tid / ROWS, m = tid % ROWS;
  const float scale = sizeof(T) > 1 ? 1.f : args.scales[row + m];
  wait_for_previous();

#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
      const int k = column(step);
      const X* from = args.x + (i64(term) * B + g) * K + k;
      x[step][term] = k < K && g < B ? *reinterpret_cast<const uint4*>(from) : none;
    }
  float sums[TERMS][4] = {};
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
      // Any order of K will do if w and x have the same.
      const uint4 &a = upper[step], &b = lower[step], &v = x[step][term];
      const u32 first[4] = {a.x, b.x, a.y, b.y}, second[4] = {a.z, b.z, a.w, b.w};
      const u32 x_first[2] = {v.x, v.y}, x_second[2] = {v.z, v.w};
      multiply_halves(sums[term], first, x_first, X{});
      multiply_halves(sums[term], second, x_second, X{});
    }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float sum = 0.f;  // of the terms, the least first
#pragma unroll
    for (int term = TERMS - 1; term >= 0; --term) sum = fmaf(unit_of_term<X, TERMS>(term), sums[term][i], sum);
    s.sums[warp][2 * t + i % 2][g + i / 2 * 8] = sum;
  }
  __syncthreads();  // the warps' sums stand
  if (of >= B || row + m >= args.M) return;
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < WARPS; ++n) sum += s.sums[n][of][m];
  args.y[(i64(part) * B + of) * args.M + row + m] = scale * sum;
}
