// what      Sums of columns: adds the parts that the blocks of another kernel computed of gradients that all tokens
//           share.
// math      first, then rest: [C, D] = sum_p parts[p];  rest += if `add`
// shapes    parts [P, columns]; first takes `split` columns, rest the others
// grid      a block for 32 columns; 1024 threads: 32 rows at a time
// smem      Shared: a sum for every thread
// barriers  one: the sums are in shared memory
// numerics  float32, always in the same order
// source    none
// limits    none
#include "training.cuh"

constexpr int ROWS = 32;

struct Args {
  const float* parts;
  float* first;
  float* rest;
  i64 P, columns, split, add;
};

struct Shared {
  float sums[ROWS][32];
};

__global__ void __launch_bounds__(32 * ROWS) training_column_sums(const Args args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32;
  const i64 column = i64(blockIdx.x) * 32 + lane;
  float sum = 0.f;
  if (column < args.columns)
#pragma unroll 8
    for (i64 p = row; p < args.P; p += ROWS) sum += args.parts[p * args.columns + column];
  s.sums[row][lane] = sum;
  __syncthreads();  // the rows' sums are in shared memory
  if (row > 0 || column >= args.columns) return;
#pragma unroll
  for (int other = 1; other < ROWS; ++other) sum += s.sums[other][lane];
  if (column < args.split) args.first[column] = sum;
  else args.rest[column - args.split] = sum + (args.add ? args.rest[column - args.split] : 0.f);
}
