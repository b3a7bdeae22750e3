// what      The sum of arrays that follow each other in memory: gradients of u, of which a backward pass stores one for
//           every sequence or segment, or gradients of a shared gate, one for every tile of the state.
// math      sum = sum_n array_n
// shapes    arrays [N, H, K] float32 or float64; sum [H, K] of type T, with rows `row_stride` apart. H: the rows of an
//           array, heads or, of gates, all tokens of all heads
// grid      a warp for every NUMBERS numbers of sum: each of LANES lanes adds every LANES-th array, then their sums are
//           added. A block has THREADS / 32 warps
// numerics  float32, for float64 data float64; always in the same order
// source    Peng et al., 2024, eq. 18-19
#include "ptx.cuh"
#include "real.cuh"

// From real.cuh: FloatOrDouble<T>: double for double, else float; widened, narrowed: a number to it, and back.
constexpr int THREADS = 128;
constexpr int LANES = 8, NUMBERS = 32 / LANES;  // of a warp: lanes for each number of sum, and such numbers

template <typename T> struct Args {
  const FloatOrDouble<T>* arrays;
  T* sum;
  i64 N, H, K;
  i64 row_stride;  // of sum, in numbers
};

template <typename T> __global__ void __launch_bounds__(THREADS) elementwise_sum_arrays(const Args<T> args) {
  const i64 size = args.H * args.K,
            index = (i64(blockIdx.x) * THREADS + threadIdx.x) / 32 * NUMBERS + threadIdx.x % NUMBERS;
  FloatOrDouble<T> sum = 0;
  if (index < size)
    for (i64 n = threadIdx.x % 32 / NUMBERS; n < args.N; n += LANES) sum += args.arrays[n * size + index];
#pragma unroll
  for (int distance = 16; distance >= NUMBERS; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (index < size && threadIdx.x % 32 < NUMBERS)
    args.sum[index / args.K * args.row_stride + index % args.K] = narrowed<T>(sum);
}
