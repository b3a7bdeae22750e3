// what      Operands of the delta rules' products in chunks, for data of 16 bits and for float32 data, which kernels
//           call `single`: one product of these is three products in tf32.
// math      A *word* is two neighbouring numbers of a row. An operand's words are those of the products of 16-bit types
//           (ptx.cuh); the tf32 instruction sums over 8 numbers, of which a lane has numbers t and t + 4: it is given
//           2t as its number t and 2t + 1 as its number t + 4, in both operands (t = lane % 4). So accumulators are
//           operands without any move, of either type
// numerics  a `single` is the sum of two tf32 numbers, to 21 bits; of their four products three are added
#include "gated/forward_tiles.cuh"
#include "ptx.cuh"
#include "tf32.cuh"

// float32 data, as the kernels' template argument T: a type of its own, which chooses the functions below.
struct single {
  float x;
};
__device__ __forceinline__ float to_float(single x) { return x.x; }
template <> __device__ __forceinline__ single from_float<single>(float x) { return {x}; }

// OfSingle if T is `single`, otherwise OfHalf.
template <typename T, typename OfSingle, typename OfHalf> struct Chosen {
  using Type = OfHalf;
};
template <typename OfSingle, typename OfHalf> struct Chosen<single, OfSingle, OfHalf> {
  using Type = OfSingle;
};
// Two neighbouring numbers of type T.
template <typename T> using Word = typename Chosen<T, float2, u32>::Type;
// The type of operands for data T: `single` for float32 data, Half for 16-bit data of either type, where only Half has
// the range or the precision that they need.
template <typename T, typename Half> using Operand = typename Chosen<T, single, Half>::Type;

// Two numbers as a word, rounded to T.
template <typename T> __device__ __forceinline__ Word<T> word_of(float x, float y) {
  if constexpr (sizeof(T) == 4) return {x, y};
  else return pack<T>(x, y);
}
// As unpack of two 16-bit numbers.
__device__ __forceinline__ float2 unpack(float2 two, single) { return two; }

// Two neighbouring numbers, as floats; x is aligned to both.
template <typename T> __device__ __forceinline__ float2 unpack_pair(const T* x) {
  return unpack(*reinterpret_cast<const Word<T>*>(x), T{});
}
__device__ __forceinline__ void put_pair(single* to, float2 x) { *reinterpret_cast<float2*>(to) = x; }

// A matrix of 8 x 8 numbers transposed, of which a lane has two: x = M[g][2t], M[g][2t + 1] becomes M[2t][g], M[2t +
// 1][g].
__device__ __forceinline__ float2 transpose_pairs(float2 x) {
  const int lane = own_lane(), first = (lane & 3) * 8 + (lane >> 3);
  const auto from = [&](int other) {
    const float even = __shfl_sync(0xffffffffu, x.x, other), odd = __shfl_sync(0xffffffffu, x.y, other);
    return lane >> 2 & 1 ? odd : even;
  };
  return {from(first), from(first + 4)};
}

// D[16, 8] += A[16, 16] B[16, 8], as mma_m16n8k16 of 16-bit types (ptx.cuh): words a[m] are row g + 8 (m %
// 2), columns 8 (m / 2) + 2t and the next; b[m] rows 8m + 2t and the next, column g.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const float2 (&a)[4], const float2 (&b)[2], single) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 &upper = a[2 * half], &lower = a[2 * half + 1];
    const TwoTf32 left[4] = {two_tf32<CUT_OFF>(upper.x), two_tf32<CUT_OFF>(lower.x), two_tf32<CUT_OFF>(upper.y),
                             two_tf32<CUT_OFF>(lower.y)};
    const TwoTf32 right[2] = {two_tf32<CUT_OFF>(b[half].x), two_tf32<CUT_OFF>(b[half].y)};
    mma_tf32(d, {left[0].low, left[1].low, left[2].low, left[3].low}, {right[0].high, right[1].high});
    mma_tf32(d, {left[0].high, left[1].high, left[2].high, left[3].high}, {right[0].low, right[1].low});
    mma_tf32(d, {left[0].high, left[1].high, left[2].high, left[3].high}, {right[0].high, right[1].high});
  }
}

// ---- tiles of `single` ----------------------------------------------------------------------------------------------

// The permutation of 16-byte pieces in tiles of `single` (see row_swap in gated/forward_tiles.cuh). These reads have no
// bank conflicts: one piece of eight rows; two neighbouring pieces of rows 0 to 3, of rows 4 to 7, of the even rows, or
// of the odd rows.
template <> __device__ __forceinline__ constexpr int row_swap<single>(int row) {
  return ((row ^ row >> 2) & 3) * 2 | row >> 2;
}
template <> __device__ __forceinline__ constexpr int row_swap<const single>(int row) { return row_swap<single>(row); }
// An odd row's swap differs by 2 from that of the row before: the reader below finds the next row's number so.
__device__ constexpr bool next_rows_differ_by_two() {
  for (int row = 0; row < 8; row += 2)
    if (row_swap<single>(row + 1) != (row_swap<single>(row) ^ 2)) return false;
  return true;
}
static_assert(next_rows_differ_by_two());

// How the four matrices of 8 x 8 numbers that a warp loads at a time follow each other: matrix 1 is below matrix 0
// (DOWN) or to its right (ACROSS), and matrices 2 and 3 are beside, or below, them; ALONG: all four are side by side.
enum Order { DOWN, ACROSS, ALONG };

// Loads four matrices of a tile of `single` with rows of COLS numbers, from row `row` and column `col` (multiples of
// 8), and `column`, on: r[m] are two neighbours of matrix m: row g, columns 2t and 2t + 1; or, TRANSPOSED, column g,
// rows 2t and 2t + 1. g = lane / 4, t = lane % 4. The four readers below are those of 16-bit tiles
// (gated/forward_tiles.cuh) for `single`.
template <int COLS, Order ORDER, bool TRANSPOSED> struct SingleReader : Reader<COLS, single> {
  __device__ __forceinline__ SingleReader(int column, int lane)
      : Reader<COLS, single>(TRANSPOSED ? 2 * (lane & 3) : lane >> 2,
                             column / 4 + (TRANSPOSED ? lane >> 4 : lane >> 1 & 1),
                             TRANSPOSED ? lane >> 2 & 3 : 2 * (lane & 1)) {}

  __device__ __forceinline__ void load(float2 (&r)[4], const single* tile, int row, int col) const {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int i = row + (ORDER == ALONG ? 0 : 8 * (ORDER == DOWN ? m & 1 : m >> 1));
      const int j = col + 8 * (ORDER == ALONG ? m : ORDER == DOWN ? m >> 1 : m & 1);
      if (TRANSPOSED) r[m] = {this->at(tile, i, j)->x, this->at(tile, i + 1, j ^ 8)->x};
      else r[m] = *reinterpret_cast<const float2*>(this->at(tile, i, j));
    }
  }
};
template <int COLS> struct LeftReader<COLS, single> : SingleReader<COLS, DOWN, AS_STORED> {
  __device__ __forceinline__ LeftReader(int lane = own_lane()) : SingleReader<COLS, DOWN, AS_STORED>(0, lane) {}
};
template <int COLS> struct RowsReader<COLS, single> : SingleReader<COLS, ALONG, AS_STORED> {
  __device__ __forceinline__ RowsReader(int lane = own_lane()) : SingleReader<COLS, ALONG, AS_STORED>(0, lane) {}
};
template <int COLS> struct RightReader<COLS, single> : SingleReader<COLS, DOWN, TRANSPOSED> {
  __device__ __forceinline__ RightReader(int column = 0, int lane = own_lane())
      : SingleReader<COLS, DOWN, TRANSPOSED>(column, lane) {}
};
template <int COLS> struct TransposedReader<COLS, single> : SingleReader<COLS, ACROSS, TRANSPOSED> {
  __device__ __forceinline__ TransposedReader(int column, int lane = own_lane())
      : SingleReader<COLS, ACROSS, TRANSPOSED>(column, lane) {}
};
