// what      What products of weights with vectors have in common: stacks of them in one launch; weights as they come.
// limits    sm_90a
#include "decode.cuh"

constexpr int STACKS = 2;
constexpr int SWIZZLED = 128;  // bytes of a row in a box of weights or of vectors

enum class Finish : i64 { Write, ReluSquared = 2, Parts };

// Products that have their number of rows in common.
struct Stack {
  TensorMap w;  // boxes of some of K by a block's rows
  TensorMap x;  // by its vectors, in all their terms
  void* y;
  const float* scales;  // [C, M] of int8 weights, or null
  i64 C, M;
  Finish finish;
};

// A block's rows of a product.
struct RowTile {
  int stack, which, row;
};

template <int ROWS> __device__ __forceinline__ RowTile rows_of_tile(const Stack (&stacks)[STACKS], int tile) {
  const auto tiles_of = [&](int stack) { return int(stacks[stack].M + ROWS - 1) / ROWS; };
  int stack = 0, tiles = tiles_of(0);
  if (const int before = tiles * int(stacks[0].C); tile >= before) tile -= before, stack = 1, tiles = tiles_of(1);
  return {stack, tile / tiles, tile % tiles * ROWS};
}

// Steps through K of one of so many parts, and where they begin.
struct Steps {
  int k, count;
};

template <int DEPTH> __device__ __forceinline__ Steps steps_of_part(i64 K, int part, int parts) {
  const int all = int(K + DEPTH - 1) / DEPTH, each = (all + parts - 1) / parts;
  return {part * each * DEPTH, min(each, max(0, all - part * each))};
}
