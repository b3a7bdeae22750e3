// what      Copies of rows of inputs to tiles in shared memory, by cp.async if rows are aligned; and the addresses in
//           memory of a warp's numbers of the state.
// limits    a tile's rows are multiples of 16 bytes
#include "gated/forward_tiles.cuh"
#include "ptx.cuh"

// From the includes:
//   place<COLS>(tile, row, column): the address of a value in a tile, whose swizzle is that of row % 8
//   cp_async<BYTES>(to, from, exists): starts copying; if not `exists` it stores zeros, and does not read `from`
//   opaque(x): x, which the compiler takes for any number: it computes what follows from x again at each call

// Starts copying a tile [ROWS, COLS], as forward_tiles.cuh lays it out, in pieces of BYTES bytes, by all THREADS
// threads of the block. The caller commits the copies and waits for them; pieces of 2 bytes are stored at once. from:
// the tile's first value in memory; stride: the distance of rows. Rows from `rows` on and columns from `width` on
// become zero; `width` and `stride` are multiples of a piece. A thread has one column of pieces and every AT_ONCE-th
// row. If AT_ONCE is a multiple of 8, its pieces have the same place within all of these rows, and `place` is computed
// once.
template <int BYTES, int ROWS, int COLS, int THREADS, typename T>
__device__ __forceinline__ void copy_rows(T* tile, const T* from, i64 stride, int rows, int width) {
  constexpr u32 PIECE = BYTES / sizeof(T), ACROSS = COLS / PIECE;
  constexpr int AT_ONCE = THREADS / ACROSS, UNROLLED = BYTES == 8 || BYTES == 4 ? 4 : 8;
  static_assert(THREADS % ACROSS == 0);
  // opaque: between calls no register holds what is computed of the thread's number
  const u32 thread = opaque(threadIdx.x), col = thread % ACROSS * PIECE;
  const int first_row = thread / ACROSS;
  T* const to = place<COLS>(tile, first_row, col);
  from += first_row * stride + col;
  rows = int(col) < width ? rows - first_row : 0;
#pragma unroll UNROLLED
  for (int down = 0; down < ROWS; down += AT_ONCE) {
    if (ROWS % AT_ONCE && first_row + down >= ROWS) break;
    T* const row = AT_ONCE % 8 ? place<COLS>(tile, first_row + down, col) : to + down * COLS;
    if constexpr (BYTES >= 4) cp_async<BYTES>(row, from, down < rows);
    else *row = down < rows ? *from : from_float<T>(0.f);
    from += AT_ONCE * stride;
  }
}
// As copy_rows, for rows that are multiples of `bytes` only: 8, 4, or one number. They are rare: not inlined.
template <int ROWS, int COLS, int THREADS, typename T>
__device__ __noinline__ void copy_unaligned_rows(T* tile, const T* from, i64 stride, int rows, int width, int bytes) {
  if (bytes == 8) copy_rows<8, ROWS, COLS, THREADS>(tile, from, stride, rows, width);
  else if (bytes == 4) copy_rows<4, ROWS, COLS, THREADS>(tile, from, stride, rows, width);
  else copy_rows<sizeof(T), ROWS, COLS, THREADS>(tile, from, stride, rows, width);
}
// copy_rows for rows that start on multiples of `bytes` bytes and are multiples long: 16, 8, 4 or one number.
template <int ROWS, int COLS, int THREADS, typename T>
__device__ __forceinline__ void fetch_rows(T* tile, const T* from, i64 stride, int rows, int width, int bytes) {
  if (bytes == 16) copy_rows<16, ROWS, COLS, THREADS>(tile, from, stride, rows, width);
  else copy_unaligned_rows<ROWS, COLS, THREADS>(tile, from, stride, rows, width, bytes);
}

// A lane's numbers of the state, transposed: accumulators [16 columns of the warp, 8 channels], BK / 8 times. With g =
// lane / 4, t = lane % 4: S[c][2h + p] is column g + 8h of the warp's, channel 8c + 2t + p.
template <int BK> using State = float[BK / 8][4];

// Calls f(value, its index in the array of states [..., K, V], whether it is inside that array) for this lane's values
// of a state. row: (number of the state) * K + the block's first channel; the block has `channels` channels, and
// `columns` columns from first_column on.
template <int BK, class F>
__device__ __forceinline__ void each_number(State<BK>& S, i64 row, i64 V, int first_column, int channels, int columns,
                                            F f) {
  const int thread = opaque(threadIdx.x), warp = thread >> 5, g = thread >> 2 & 7, t = thread & 3;
  i64 index = (row + 2 * t) * V + first_column + 16 * warp + g;
#pragma unroll
  for (int c = 0; c < BK / 8; ++c) {
#pragma unroll
    for (int x = 0; x < 4; ++x)
      f(S[c][x], index + (x & 1) * V + 8 * (x >> 1),
        8 * c + 2 * t + (x & 1) < channels && 16 * warp + g + 8 * (x >> 1) < columns);
    index += 8 * opaque(int(V));  // keeps the compiler from computing all addresses at once, which takes many registers
  }
}
