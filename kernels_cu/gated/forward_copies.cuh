// what      Copies of rows of inputs to tiles in shared memory; of aligned rows in the background (cp.async).
// limits    a tile's rows are whole pieces of 16 bytes
#include "gated/forward_tiles.cuh"
#include "ptx.cuh"

// Starts copying a tile [ROWS, COLS] from rows of `width` values; zeros from row `rows` and column `width` on.
template <int BYTES, int UNROLL, int ROWS, int COLS, int THREADS, typename T>
__device__ __forceinline__ void copy_rows(T* tile, const T* from, i64 stride, int rows, int width) {
  constexpr u32 PIECE = BYTES / sizeof(T), ACROSS = COLS / PIECE;
  constexpr int AT_ONCE = THREADS / ACROSS;
  static_assert(THREADS % ACROSS == 0);
  const u32 thread = opaque(threadIdx.x), col = thread % ACROSS * PIECE;
  const int first = thread / ACROSS;
  T* const to = place<COLS>(tile, first, col);
  from += first * stride + col;
  rows = int(col) < width ? rows - first : 0;
#pragma unroll UNROLL
  for (int down = 0; down < ROWS; down += AT_ONCE) {
    if (ROWS % AT_ONCE && first + down >= ROWS) break;
    T* const here = AT_ONCE % 8 ? place<COLS>(tile, first + down, col) : to + down * COLS;
    if constexpr (BYTES >= 4) cp_async<BYTES>(here, from, down < rows);
    else *here = down < rows ? *from : from_float<T>(0.f);
    from += AT_ONCE * stride;
  }
}
// The same for rows that are no multiples of 16 bytes. Not inline: most rows are.
template <int ROWS, int COLS, int THREADS, typename T>
__device__ __noinline__ void copy_slowly(T* tile, const T* from, i64 stride, int rows, int width, int bytes) {
  if (bytes == 8) copy_rows<8, 4, ROWS, COLS, THREADS>(tile, from, stride, rows, width);
  else if (bytes == 4) copy_rows<4, 4, ROWS, COLS, THREADS>(tile, from, stride, rows, width);
  else copy_rows<sizeof(T), 8, ROWS, COLS, THREADS>(tile, from, stride, rows, width);
}
