// what      Sums of columns: adds the parts that the blocks of other kernels computed of gradients that all tokens
//           share.
// math      for each of `count` sums, column by column: first = sum_p parts[p];  rest = sum_p parts[p], or += if `add`
// shapes    parts [P, columns]; first [split] has the first columns, rest the others
// grid      rwkv/cuda_grad.py launches a block for 32 columns of a sum, those of a sum from first_block on; 1024
//           threads: 32 rows at a time
// smem      Shared: a sum for every thread
// barriers  one: the sums are in shared memory
// numerics  float32, always in the same order
#include "training.cuh"

constexpr int ROWS = 32, COLUMNS = 32, MOST = 6;  // of parts, at a time and of a block; sums of a launch

struct Sum {
  const float* parts;
  float* first;
  float* rest;
  i64 P, columns, split, add, first_block;
};

struct Args {
  Sum sums[MOST];
  i64 count;
};

struct Shared {
  float sums[ROWS][COLUMNS];
};

__global__ void __launch_bounds__(COLUMNS* ROWS) training_column_sums(const Args args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  const int lane = threadIdx.x % COLUMNS, row = threadIdx.x / COLUMNS;
  int n = 0;
  while (n + 1 < args.count && blockIdx.x >= args.sums[n + 1].first_block) ++n;
  const Sum& own = args.sums[n];
  const i64 column = (blockIdx.x - own.first_block) * COLUMNS + lane;
  float sum = 0.f;
  if (column < own.columns)
#pragma unroll 8
    for (i64 p = row; p < own.P; p += ROWS) sum += own.parts[p * own.columns + column];
  s.sums[row][lane] = sum;
  __syncthreads();  // the rows' sums are in shared memory
  if (row > 0 || column >= own.columns) return;
#pragma unroll
  for (int other = 1; other < ROWS; ++other) sum += s.sums[other][lane];
  if (column < own.split) own.first[column] = sum;
  else own.rest[column - own.split] = sum + (own.add ? own.rest[column - own.split] : 0.f);
}
