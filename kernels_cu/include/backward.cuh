// what      Shared by the backward kernels of every card: copies of chunks of tokens, and the layout in memory of the
//           states between chunks, which one kernel writes for another.
// shapes    A warp has some channels of all tokens of a chunk; a lane has channel lane / 4 of 8, and of every 8 tokens
//           the pair 2 (lane % 4) and the next, as in decays.cuh.
//           states [direction, B, heads, NC, tiles of K, tiles of V, 8, 8, 8, 8]: 64 x 64 in matrices of 8 x 8
#include "decays.cuh"
#include "fragments.cuh"
#include "growth.cuh"
#include "read_order.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int CHUNK = 64, NUM_SUBCHUNKS = CHUNK / SUB_CHUNK;  // tokens; sub-chunks of a chunk
constexpr int TILE = 64;                                      // channels and columns of a tile of a state
constexpr int THREADS = 128, WARPS = THREADS / 32;
static_assert(CHUNK == 16 * WARPS && TILE == 16 * WARPS, "a warp has 16 tokens of a chunk, or 16 channels of a tile");

// The distance, in numbers, of the rows of a tile [rows, COLS] in shared memory: PAD more than COLS, so that loads by
// ldmatrix, and of pairs, touch every bank once.
template <typename T> constexpr int PAD = sizeof(T) == 2 ? 8 : 4;
template <typename T, int COLS> constexpr int LD = COLS + PAD<T>;

// Starts to copy a tile [ROWS, COLS] of (batch, head) to s in shared memory, from row (token) first_row and column
// `column` of x on; zeros from row `stop` and column `width` of x on. DISTANCE: of the tile's rows. Rows of x start on
// 16 bytes and are multiples of them (the host copies others). All threads of the block call this; they wait for their
// copies, and synchronise before they read s.
template <int ROWS, int COLS, typename T, int DISTANCE = LD<T, COLS>>
__device__ __forceinline__ void fetch_rows(T* s, const StridedRows<const T>& x, i64 batch, i64 head, i64 first_row,
                                           i64 stop, i64 column, i64 width) {
  constexpr int PIECE = 16 / sizeof(T), ACROSS = COLS / PIECE, DOWN = THREADS / ACROSS;
  static_assert(THREADS % ACROSS == 0 && ROWS % DOWN == 0 && DISTANCE * sizeof(T) % 16 == 0, "whole rounds of pieces");
  const int rows = stop - first_row < ROWS ? int(stop - first_row) : ROWS;
  const int columns = width - column < COLS ? int(width - column) : COLS;
  const int row = threadIdx.x / ACROSS, col = threadIdx.x % ACROSS * PIECE;
  const bool exists = rows > 0 && col < columns;
  const T* from = x.row(batch, head, exists ? first_row + row : 0) + (exists ? column + col : 0);
#pragma unroll
  for (int n = 0; n < ROWS / DOWN; ++n, from += DOWN * x.token_stride)  // reads nothing if not valid
    cp_async<16>(s + (row + n * DOWN) * DISTANCE + col, from, exists && row + n * DOWN < rows);
}

// Stores the rows and columns of a tile that are inside the array; arguments as in fetch_rows.
template <int ROWS, int COLS, typename T>
__device__ __forceinline__ void store_rows(const StridedRows<T>& x, const T* s, i64 batch, i64 head, i64 first_row,
                                           i64 stop, i64 column, i64 width) {
  constexpr int PIECE = 16 / sizeof(T), ACROSS = COLS / PIECE, DOWN = THREADS / ACROSS;
  static_assert(THREADS % ACROSS == 0 && ROWS % DOWN == 0 && LD<T, COLS> * sizeof(T) % 16 == 0,
                "whole rounds of pieces");
  const int rows = stop - first_row < ROWS ? int(stop - first_row) : ROWS;
  const int columns = width - column < COLS ? int(width - column) : COLS;
  const int row = threadIdx.x / ACROSS, col = threadIdx.x % ACROSS * PIECE;
  T* to = x.row(batch, head, first_row + row) + column + col;
#pragma unroll
  for (int n = 0; n < ROWS / DOWN; ++n, to += DOWN * x.token_stride)
    if (row + n * DOWN < rows && col < columns)
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(s + (row + n * DOWN) * LD<T, COLS> + col);
}

// The factor of scores that are stored for products with keys and queries: these cut both operands off.
template <class M> constexpr float STORED_SCORE = TF32_CORRECTION_OF_BOTH<M>;
// The factor of scores within a sub-chunk that one kernel stores for another, if channels and columns have gates. The
// columns' decays may make such a score as small as e^-20, and the channels' factors about the sub-chunk's middle are
// e^-70 at least (decays.cuh): e^-90 is below float32's normal numbers, which end at e^-87. 2^22 is e^15.
constexpr float NEAR_SCALE = 4194304.f;  // 2^22

// The width of rows that one kernel stores for another: a multiple of ROW_MULTIPLE, with zeros after `width`.
constexpr int ROW_MULTIPLE = 8;
__device__ __forceinline__ i64 padded_width(i64 width) {
  return (width + ROW_MULTIPLE - 1) / ROW_MULTIPLE * ROW_MULTIPLE;
}

// ---- states in memory -------------------------------------------------------------------------------------------

// The number of a chunk of a batch row in arrays that one kernel stores for another, of the launch's `heads` heads.
__device__ __forceinline__ i64 chunk_of_launch(const Shape& shape, i64 heads, i64 batch, i64 head, i64 chunk) {
  return (batch * heads + head) * shape.NC + chunk;
}

// state_tile_index: the index in `states` of a tile of 64 channels by 64 columns of V: tile k_tile, v_tile of a state
// S, or, `backwards`, of dS. A tile consists of 8 x 8 matrices, first the eight of the upper 8 rows, then the next
// eight: matrix_index is the index in a tile of the matrix in matrix row `row` and column `column`, 0 to 7.
__device__ __forceinline__ i64 state_tile_index(const Shape& shape, i64 heads, bool backwards, i64 batch, i64 head,
                                                i64 chunk, int k_tile, int v_tile) {
  const i64 k_tiles = (shape.K + TILE - 1) / TILE, v_tiles = (shape.V + TILE - 1) / TILE;
  const i64 state = ((backwards * shape.B + batch) * heads + head) * shape.NC + chunk;
  return ((state * k_tiles + k_tile) * v_tiles + v_tile) * (TILE * TILE);
}
__device__ __forceinline__ int matrix_index(int row, int column) { return (row * (TILE / 8) + column) * 64; }

// A warp's 16 channels of S, or dS, in registers: accumulators [16 channels, 8 columns] twice, N times. With g = lane /
// 4 and t = lane % 4, S[n / 2][n % 2][2h + p] is channel g + 8h, column 8n + 2t + p.
//
// Calls f(number, its offset in a state [K, V]) for the lane's numbers that are inside. channel, column: of its first.
template <int N, class F>
__device__ __forceinline__ void each_number(float (&S)[N][2][4], int channel, int column, int K, int V, F f) {
#pragma unroll
  for (int n = 0; n < 2 * N; ++n)
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int row = channel + 8 * (x >> 1), across = column + 8 * n + (x & 1);
      if (row < K && across < V) f(S[n / 2][n % 2][x], i64(row) * V + across);
    }
}
// Stores S, rounded, in its tile at `to`, and columns from TILE on in the next tile if has_next: if that exists.
template <typename Stored, int N>
__device__ __forceinline__ void store_in_tiles(Stored* to, const float (&S)[N][2][4], bool has_next) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < 2 * N; ++n)
#pragma unroll
    for (int x = 0; x < 2; ++x)
      if (n < TILE / 8 || has_next)
        put_pair(to + n / 8 * (TILE * TILE) + matrix_index(2 * warp + x, n % 8) + 2 * lane,
                 float2{S[n / 2][n % 2][2 * x], S[n / 2][n % 2][2 * x + 1]});
}

// The place of a row in an 8 x 8 matrix in shared memory. Of numbers of four bytes, rows are in an order in which reads
// have no bank conflicts.
template <typename E> __device__ __forceinline__ int row_in_matrix(int row) {
  return sizeof(E) == 4 ? row ^ row >> 2 : row;
}

// Loads two right operands [16 rows, 8 columns] side by side (Pairs, fragments.cuh) from a tile of a state in shared
// memory: 16 rows, which the product sums over, and 16 columns, from those of `tile` on.
template <class R, typename E> __device__ __forceinline__ void load_matrices(R (&b)[2], const E* tile) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if constexpr (sizeof(E) == 2) {
    u32 r[4];
    ldmatrix_x4_trans(r, tile + matrix_index(lane >> 3 & 1, lane >> 4) + (lane & 7) * 8);
#pragma unroll
    for (int m = 0; m < 4; ++m) b[m >> 1].set_unrounded(m & 1, r[m], E{});
  } else {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float* matrix = tile + matrix_index(m & 1, m >> 1);
      b[m >> 1].set_unrounded(
          m & 1, float2{matrix[row_in_matrix<E>(2 * t) * 8 + g], matrix[row_in_matrix<E>(2 * t + 1) * 8 + g]});
    }
  }
}
