// what      Copies of rows of an array to a tile in shared memory, by cp.async where the alignment allows it, and loads
//           of such tiles as operands of products in tf32 (fragments.cuh).
// numerics  EXACT (float32 data): an operand is two tf32 numbers, and three products keep 22 bits. float16 and bfloat16
//           data are tf32 numbers already; float32 operands beside them are rounded to tf32
#include "fragments.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int THREADS = 128;  // of a block: all of them call copy_tile together

// The distance of a tile's rows of COLS numbers in shared memory: 16 bytes more than they take, so that the lanes of a
// warp read pairs, or rows by ldmatrix, from different banks.
template <typename T, int COLS> constexpr int LD = COLS + (sizeof(T) == 2 ? 8 : 4);

// Starts to copy a tile [ROWS, COLS], in pieces of BYTES bytes, from rows of `width` numbers, which are `stride` apart;
// zeros from row `rows` and column `width` on. from, `stride` and `width` are multiples of BYTES bytes. Pieces of 4
// bytes or more are copied in the background, smaller ones at once: callers of both commit the group, wait for it, and
// have a barrier. A row has ACROSS pieces. A thread has one column of pieces, or every THREADS-th one, and every
// DOWN-th row.
template <int BYTES, int ROWS, int COLS, typename T>
__device__ __forceinline__ void copy_pieces(T* tile, const T* from, i64 stride, int rows, int width) {
  constexpr u32 PIECE = BYTES / sizeof(T), ACROSS = COLS / PIECE, DOWN = THREADS < ACROSS ? 1 : THREADS / ACROSS;
  static_assert(COLS % PIECE == 0 && ROWS % DOWN == 0, "whole pieces, and whole rounds");
  static_assert(THREADS % ACROSS == 0 || ACROSS % THREADS == 0, "a thread has one column of pieces in each round");
  const u32 thread = opaque(threadIdx.x);  // opaque: computed again, not held in a register
  const int row = thread / ACROSS;
  rows -= row;
#pragma unroll 1
  for (int column = thread % ACROSS * PIECE; column < COLS; column += THREADS * PIECE) {
    T* to = tile + row * LD<T, COLS> + column;
    const T* piece = from + row * stride + column;
#pragma unroll
    for (int down = 0; down < ROWS; down += DOWN, to += DOWN * LD<T, COLS>, piece += DOWN * stride) {
      const bool inside = down < rows && column < width;
      if constexpr (BYTES >= 4) cp_async<BYTES>(to, piece, inside);  // reads nothing that is not inside
      else *to = inside ? *piece : from_float<T>(0.f);
    }
  }
}
// The same for rows that are multiples of `bytes` only: 8, 4, or one number. Rare, and so not inlined.
template <int ROWS, int COLS, typename T>
__device__ __noinline__ void copy_small_pieces(T* tile, const T* from, i64 stride, int rows, int width, int bytes) {
  if (bytes == 8) copy_pieces<8, ROWS, COLS>(tile, from, stride, rows, width);
  else if (bytes == 4) copy_pieces<4, ROWS, COLS>(tile, from, stride, rows, width);
  else copy_pieces<sizeof(T), ROWS, COLS>(tile, from, stride, rows, width);
}
// Starts to copy [ROWS, COLS] of (batch, head) of `x` from row `first` and column `column` on; zeros from row `stop`
// and column `width` on. `bytes`: 16, 8, 4 or 2; rows of x start on multiples of it, and `column` and `width` are
// multiples of it, in bytes.
template <int ROWS, int COLS, typename T>
__device__ __forceinline__ void copy_tile(T* tile, const StridedRows<const T>& x, i64 batch, i64 head, i64 first,
                                          i64 stop, i64 column, i64 width, i64 bytes) {
  const int rows = int(stop - first < ROWS ? stop - first : ROWS);
  const int columns = int(width - column < COLS ? width - column : COLS);
  const T* from = rows > 0 ? x.row(batch, head, first) + column : x.p;
  if (bytes == 16) copy_pieces<16, ROWS, COLS>(tile, from, x.token_stride, rows, columns);
  else copy_small_pieces<ROWS, COLS>(tile, from, x.token_stride, rows, columns, int(bytes));
}

// Operands of products of data of type T, and of the float32 numbers that these data are multiplied with: 4 pairs of
// numbers of a left operand, 2 of a right one.
template <typename T> constexpr bool EXACT = sizeof(T) == 4;
template <typename T> using LeftOf = Pairs<EXACT<T>, float, 4>;
template <typename T> using RightOf = Pairs<EXACT<T>, float, 2>;

// Loads a left operand from a tile [16, depth 16], or, TRANSPOSED, [depth 16, 16]; the depth is summed over. Numbers
// are rounded to tf32, or split in two (`set` in fragments.cuh). each_matrix (there): calls f(m, the lane's pair) for
// the 8 x 8 matrices m of the tile, down first or to the right first, as stored or transposed.
template <bool TRANSPOSED, class L, typename E>
__device__ __forceinline__ void load_rounded(L& a, const E* tile, int ld) {
  each_matrix<!TRANSPOSED, TRANSPOSED>(tile, ld, [&](int m, auto... x) { a.set(m, x...); });
}
// Loads two right operands side by side from a tile [depth 16, 16], or, TRANSPOSED, [16, depth 16].
template <bool TRANSPOSED, class R, typename E>
__device__ __forceinline__ void load_rounded(R (&b)[2], const E* tile, int ld) {
  each_matrix<!TRANSPOSED, !TRANSPOSED>(tile, ld, [&](int m, auto... x) { b[m >> 1].set(m & 1, x...); });
}
