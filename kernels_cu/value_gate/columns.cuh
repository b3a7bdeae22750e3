// what      Loads of values and of gates of columns: a warp has 16 columns and all tokens of a chunk.
// shapes    of 16 tokens a lane has four pairs p: tokens 8 (p / 2) + 2t and the next one of column g + 8 (p % 2), with
//           g = lane / 4, t = lane % 4: a left operand [column, token] of a sum over tokens. Tiles are laid out by
//           `place` (forward_tiles.cuh), which moves each row's pieces of 16 bytes
#include "gated/forward_tiles.cuh"
#include "ptx.cuh"

// Loads from tiles with rows of COLS values; 16 columns from `column` on. load: x[p] from the 16 tokens from `row` on.
// at(tile, row, col): the lane's first address, `row` rows and `col` columns further on.
template <int COLS, typename X> struct ColumnsReader : TransposedReader<COLS, X> {
  __device__ __forceinline__ ColumnsReader(int column) : TransposedReader<COLS, X>(column) {}

  __device__ __forceinline__ void load(float2 (&x)[4], const X* tile, int row) const {
    if constexpr (sizeof(X) == 2) {
      u32 r[4];
      ldmatrix_x4_trans(r, this->at(tile, row, 0));
#pragma unroll
      for (int p = 0; p < 4; ++p) x[p] = unpack(r[p], X{});
    } else {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int first = row + 8 * (p >> 1), right = 8 * (p & 1);
        // right ^ 4: a row further, the place of the same piece of 4 floats differs in bit 0
        x[p] = {*this->at(tile, first, right), *this->at(tile, first + 1, right ^ 4)};
      }
    }
  }
};

// Multiplies a lane's outputs d of 8 tokens by x in its first column, by y in its second one.
__device__ __forceinline__ void scale_columns(float (&d)[4], float x, float y) {
  d[0] *= x, d[1] *= x, d[2] *= y, d[3] *= y;
}
