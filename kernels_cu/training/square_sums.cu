// what      The sum of a vector's squares, by blocks.
// math      parts_p = sum of x^2 of the block's share
// shapes    x [count], parts [blocks]
// grid      training_steps.py launches any number of blocks, which take turns; 512 threads of 8 elements each
// smem      the warps' sums
// barriers  one: the warps' sums are in shared memory
// numerics  float32, always in the same order
// limits    x starts on 16 bytes, count a multiple of 8
#include "training.cuh"

// From training.cuh:
//   EightFloats x: eight neighbouring channels, x.x[0] to x.x[7]; load8, store8: at addresses of whole 16 bytes
//   block_sum: the sum over the block, by one barrier

constexpr int THREADS = 512, WARPS = THREADS / 32;

struct Args {
  const float* x;
  float* parts;
  i64 count, blocks;
};

struct Shared {
  float sums[WARPS];
};

__global__ void __launch_bounds__(THREADS) training_square_sums(const Args args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  float sum = 0.f;
  const i64 step = 8 * args.blocks * THREADS;  // elements of all blocks at a time
#pragma unroll 2
  for (i64 index = 8 * (i64(blockIdx.x) * THREADS + threadIdx.x); index < args.count; index += step) {
    const EightFloats x = load8(args.x + index);
#pragma unroll
    for (int n = 0; n < 8; ++n) sum = fmaf(x.x[n], x.x[n], sum);
  }
  sum = block_sum<WARPS>(sum, s.sums);
  if (threadIdx.x == 0) args.parts[blockIdx.x] = sum;
}
