// what      Shared by the kernels that multiply weights W [M, K] with a batch's vectors by wgmma: stacks of products in
//           one launch, and how blocks share rows and K.
// limits    sm_90a
#include "decode.cuh"

constexpr int STACKS = 2;
constexpr int SWIZZLED = 128;  // bytes of a row in a box of weights or of vectors

// A stack: C products [M, K] with equal numbers of rows. Finish::Parts stores parts of a product, each over a part of
// K. The reader adds them.
struct Stack {
  TensorMap w;  // boxes [a block's rows, a step of K]
  TensorMap x;  // boxes [terms, a block's vectors, a step of K]
  void* y;
  const float* scales;  // [C, M] of int8 weights, or null
  i64 C, M;
  Finish finish;
};

// A block's rows: from `row` on of product `which` of a stack.
struct RowTile {
  int stack, which, row;
};

// Tile number `tile` of ROWS rows, counted over all products of both stacks.
template <int ROWS> __device__ __forceinline__ RowTile rows_of_tile(const Stack (&stacks)[STACKS], int tile) {
  const auto tiles_of = [&](int stack) { return int(stacks[stack].M + ROWS - 1) / ROWS; };
  int stack = 0, tiles = tiles_of(0);
  if (const int before = tiles * int(stacks[0].C); tile >= before) tile -= before, stack = 1, tiles = tiles_of(1);
  return {stack, tile / tiles, tile % tiles * ROWS};
}

// The steps along K of one of `parts` parts: the first number of K, and how many steps.
struct Steps {
  int k, count;
};

// Part number `part` of K, in steps of DEPTH numbers; the last parts may have no step.
template <int DEPTH> __device__ __forceinline__ Steps steps_of_part(i64 K, int part, int parts) {
  const int all = int(K + DEPTH - 1) / DEPTH, each = (all + parts - 1) / parts;
  return {part * each * DEPTH, min(each, max(0, all - part * each))};
}
