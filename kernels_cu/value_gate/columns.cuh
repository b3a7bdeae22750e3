// what      Values and gates of a chunk by columns: a warp has 16 columns and all tokens of them.
// shapes    of 16 tokens a lane has the pairs p of tokens 8 (p / 2) + 2t and the next one, of column g + 8 (p % 2), as
//           a left operand that is deep in tokens has them; g = lane / 4, t = lane % 4
#include "gated/forward_tiles.cuh"
#include "ptx.cuh"

// From tiles with rows of COLS, 16 columns from `column` on.
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

// Outputs of 8 tokens times one factor for either column.
__device__ __forceinline__ void scale_columns(float (&d)[4], float x, float y) {
  d[0] *= x, d[1] *= x, d[2] *= y, d[3] *= y;
}
