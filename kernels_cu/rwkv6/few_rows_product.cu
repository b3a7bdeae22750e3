// what      The product of few rows of weights with up to eight vectors, by blocks that take next to no room.
// math      the sum of y_b's parts is W x_b
// shapes    w [M, K], its rows padded to 16, x [TERMS, B, K] of type T, y [PARTS, B, M]
// grid      a block for every part of K of every 16 rows, parts fastest; 256 threads: a warp has SLICE / 8 columns, a lane
//           neighbours of them in two rows
// smem      Shared: the warps' sums
// barriers  one: the warps' sums stand
// numerics  tensor cores: the three terms of x that hold a float, and weights as they are; float32 sums in a fixed order
// source    Peng et al., 2024, "Eagle and Finch", eq. 14, for the products
// limits    B up to 8, K a multiple of 8; w and x start on 16 bytes
//
// Weights are in registers before x stands. A block leaves the shared memory to the product that comes next, whose own
// weights are on their way meanwhile.
#include "decode.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, ROWS = 16, COLUMNS = 8, TERMS = FLOAT_TERMS;
constexpr int STEP = 32, STEPS = 2, SLICE = WARPS * STEPS * STEP;  // of K: a warp's at a time, times, a block's

template <typename T> struct Args {
  const T* w;
  const T* x;
  float* y;
  i64 B, K, M;
};

struct Shared {
  float sums[WARPS][COLUMNS][ROWS + 1];  // no bank conflicts
};

__device__ __forceinline__ void multiply_halves(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], bf16) {
  mma_bf16(d, a, b);
}
__device__ __forceinline__ void multiply_halves(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], f16) {
  mma_f16(d, a, b);
}

template <typename T> __global__ void __launch_bounds__(THREADS) rwkv6_few_rows_product(const Args<T> args) {
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
    upper[step] = k < K ? *reinterpret_cast<const uint4*>(from) : none;
    lower[step] = k < K ? *reinterpret_cast<const uint4*>(from + 8 * i64(K)) : none;
  }
  wait_for_previous();

#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
      const int k = column(step);
      const T* from = args.x + (i64(term) * B + g) * K + k;
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
      multiply_halves(sums[term], first, x_first, T{});
      multiply_halves(sums[term], second, x_second, T{});
    }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float sum = 0.f;  // of the terms, the least first
#pragma unroll
    for (int term = TERMS - 1; term >= 0; --term) sum = fmaf(unit_of_term<T, TERMS>(term), sums[term][i], sum);
    s.sums[warp][2 * t + i % 2][g + i / 2 * 8] = sum;
  }
  __syncthreads();  // the warps' sums stand
  const int b = tid / ROWS, m = tid % ROWS;
  if (b >= B || row + m >= args.M) return;
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < WARPS; ++n) sum += s.sums[n][b][m];
  args.y[(i64(part) * B + b) * args.M + row + m] = sum;
}
