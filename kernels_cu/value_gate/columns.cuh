// what      Loads of values and of gates of columns: a warp has 16 columns and all tokens of a chunk.
// shapes    of 16 tokens a lane has four pairs p: tokens 8 (p / 2) + 2t and the next one of column g + 8 (p % 2), with
//           g = lane / 4, t = lane % 4: a left operand that is contracted over tokens
#include "gated/forward_tiles.cuh"
#include "ptx.cuh"

// Loads from tiles with rows of COLS values; 16 columns from `column` on.
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
        x[p] = {*this->at(tile, first, right), *this->at(tile, first + 1, right ^ 4)};
      }
    }
  }
};

// Multiplies the outputs of 8 tokens by x in this lane's first column, by y in its second one.
__device__ __forceinline__ void scale_columns(float (&d)[4], float x, float y) {
  d[0] *= x, d[1] *= x, d[2] *= y, d[3] *= y;
}
