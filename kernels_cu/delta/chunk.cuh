// what      A chunk's tokens in the delta rules' kernels of every card: copies, decays by one gate for all channels of
//           a token, products of rows, and products of matrices of tokens with tokens.
// shapes    BT = 32 tokens a chunk. A tile has the chunk's rows of COLS numbers in shared memory: place<COLS>(tile,
//           row, column) is a number's address; Readers load operands of tensor cores from it. A Matrix is [BT, BT], in
//           16 bits the sum of two numbers, a rounded one and its rounding error; a LowerMatrix is a
//           lower triangle. T: the type of data; Word<T>: two neighbouring numbers
// numerics  products of T are summed in float32; matrices of tokens are, for 16-bit data, the sum of two numbers of T
// source    Yang et al., 2024 (2412.06464), section 3.3, with the products of a chunk in another order: N, the inverse
//           in prepare.cu, multiplies the rows that read and write a state, which N does not enlarge, and not the
//           residuals
#include "delta/chunk_storage.cuh"
#include "delta/lengths.cuh"
#include "gated/forward_copies.cuh"
#include "lanes.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

// From the includes:
//   Word<T>: two neighbouring numbers
//   LeftReader, RowsReader, RightReader: operands from a tile
//   Matrix: [32, 32] numbers, each the sum of NUMBERS, two for 16-bit data, which are REST apart; LDA: the distance of
//     its rows; TokenFactors: decays, betas and inverse lengths
//   LEAST_SQUARE = 1e-6 is added to the square of a length

// A warp's sums [all tokens of a chunk, 16 columns] as tensor cores leave them, in blocks of 16 tokens (first index) by
// 8 columns (second). With g = lane / 4 and t = lane % 4 a lane has four numbers of a block: at 0 and 1 row g, columns
// 2t and 2t + 1; at 2 and 3 row g + 8, the same columns.
using Accumulators = float[BT / 16][2][4];

// Stores x as a Matrix has it: of 16-bit T the sum of two numbers, which are REST apart.
template <typename T, int REST = Matrix<T>::REST> __device__ __forceinline__ void put_split(T* to, float x) {
  *to = from_float<T>(x);
  if constexpr (sizeof(T) == 2) to[REST] = from_float<T>(x - to_float(*to));
}
// Stores x and y, side by side, each as the sum of two numbers of T: rounded, and its rounding error REST numbers
// later. A `single` is the number itself.
template <typename T, int REST = Matrix<T>::REST>
__device__ __forceinline__ void put_split_pair(T* to, float x, float y) {
  const Word<T> pair = word_of<T>(x, y);
  const float2 rounded = unpack(pair, T{});
  *reinterpret_cast<Word<T>*>(to) = pair;
  if constexpr (sizeof(T) == 2) *reinterpret_cast<u32*>(to + REST) = pack<T>(x - rounded.x, y - rounded.y);
}

// Stores numbers (i, j) and (i, j + 1), or (i, j) alone, of a lower triangle; of two j is even. Does nothing where M
// has no such numbers, which are 0.
template <typename T> __device__ __forceinline__ void put_split_pair(LowerMatrix<T>& M, int i, int j, float2 x) {
  if (M.has(i, j)) put_split_pair<T, LowerMatrix<T>::REST>(M.x + M.place(i, j), x.x, x.y);
}
template <typename T> __device__ __forceinline__ void put_split(LowerMatrix<T>& M, int i, int j, float x) {
  if (M.has(i, j)) put_split<T, LowerMatrix<T>::REST>(M.x + M.place(i, j), x);
}

// ---- tokens ---------------------------------------------------------------------------------------------------------

// The decay and the write strength beta of a lane's token; 1 and 0 for tokens from `rows` on.
struct TokenNumbers {
  float decay = 1.f, beta = 0.f;

  template <typename G>
  __device__ __forceinline__ TokenNumbers(const StridedRows<const G>& gates, const StridedRows<const G>& betas,
                                          i64 batch, i64 head, i64 first, int rows) {
    const int lane = threadIdx.x & 31;
    if (lane < rows) {
      decay = decay_of(to_float(*gates.row(batch, head, first + lane)));
      beta = to_float(*betas.row(batch, head, first + lane));
    }
  }
};

// Copies a chunk's rows, which are `stride` numbers apart, number by number; zeros from row `rows` and column `width`
// on.
template <int COLS, int THREADS, typename T>
__device__ __forceinline__ void copy_numbers(T* tile, const T* from, i64 stride, int rows, int width) {
#pragma unroll 1
  for (int index = threadIdx.x; index < BT * COLS; index += THREADS) {
    const int row = index / COLS, column = index % COLS;
    *place<COLS>(tile, row, column) = row < rows && column < width ? from[row * stride + column] : from_float<T>(0.f);
  }
}

// Starts to copy a chunk's rows, which start on multiples of `bytes` bytes and are multiples long; if `bytes` is less
// than 16, copies them number by number.
template <int COLS, int THREADS, typename T>
__device__ __forceinline__ void copy_chunk(T* tile, const T* from, i64 stride, int rows, int width, int bytes) {
  if (bytes == 16) copy_rows<16, BT, COLS, THREADS>(tile, from, stride, rows, width);
  else copy_numbers<COLS, THREADS>(tile, from, stride, rows, width);
}

// d[0] + d[1] += the products [16, 8] of 16 rows of tile x from `row` on and 8 rows of tile y from `column` on, over
// their COLS numbers. There are two sums, of every other 16 numbers, since a product waits for the previous one of its
// sum; the caller adds them. With g = lane / 4 and t = lane % 4 a lane has, in d[n][2 h + p], row g + 8h of x and row
// 2t + p of y.
template <int COLS, typename T>
__device__ __forceinline__ void multiply_rows(float (&d)[2][4], const T* x, const T* y, int row, int column) {
  static_assert(COLS % 32 == 0);
  const RowsReader<COLS, T> right;
  const LeftReader<COLS, T> left;
#pragma unroll
  for (int c = 0; c < COLS; c += 32) {
    Word<T> r[4];
    right.load(r, y, column, c);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      Word<T> a[4];
      left.load(a, x, row, c + 16 * n);
      mma_m16n8k16(d[n], a, {r[2 * n], r[2 * n + 1]}, T{});
    }
  }
}

// d[n] += the products [16, 8] of 16 rows of x from `row` on and, for n of 0 and 1, rows 8n ... 8n + 7 of the 16 rows
// of y from `column` on, over their COLS numbers.
template <int COLS, typename T>
__device__ __forceinline__ void multiply_squares(float (&d)[2][4], const T* x, const T* y, int row, int column) {
  const LeftReader<COLS, T> reader;
#pragma unroll
  for (int c = 0; c < COLS; c += 16) {
    Word<T> a[4], b[4];
    reader.load(a, x, row, c);
    reader.load(b, y, column, c);
    mma_m16n8k16(d[0], a, {b[0], b[2]}, T{});
    mma_m16n8k16(d[1], a, {b[1], b[3]}, T{});
  }
}

// Fills s.decay_between, s.decay_from_start and s.decay_to_end (TokenFactors, chunk_storage.cuh) by all warps, each of
// which has BT / WARPS rows i. In row i lane j has D_ij, the decay from after token j through token i; 0 for j > i.
// `decay`: of token `lane`. A barrier must follow.
template <int WARPS, class Decays> __device__ __forceinline__ void set_decays(Decays& s, float decay) {
  static_assert(BT == 32 && BT % WARPS == 0);  // a lane for each token, and as many rows for each warp
  constexpr int ROWS = BT / WARPS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = warp * ROWS;
  const float next = __shfl_down_sync(0xffffffffu, decay, 1);
  // D_ij for j = lane; i is at first the warp's first row.
  float since = lane < first ? next : 1.f;
#pragma unroll
  for (int distance = 1; distance < BT; distance *= 2) {
    const float further = __shfl_down_sync(0xffffffffu, since, distance);
    if (lane + distance < BT) since *= further;
  }
#pragma unroll
  for (int i = first; i < first + ROWS; ++i) {
    if (i > first) {
      const float own = __shfl_sync(0xffffffffu, decay, i);
      since = i > lane ? since * own : 1.f;
    }
    s.decay_between[i][lane] = i < lane ? 0.f : since;
    if (lane == 0) s.decay_from_start[i] = decay * since;
  }
  if (warp == WARPS - 1) s.decay_to_end[lane] = since;
}

// Fills s.inverse_length with 1 / sqrt(|x|^2 + LEAST_SQUARE) of the rows x of k (first BT numbers) and of q (next BT),
// or with ones if not normalized. q, k: tiles in which all channels from K on are zeros. A barrier must follow.
template <int BK, int WARPS, typename T>
__device__ __forceinline__ void set_inverse_lengths(TokenFactors& s, const T* q, const T* k, bool normalized) {
  const int lane = threadIdx.x & 31;
  if (!normalized) {
    if (threadIdx.x < 2 * BT) s.inverse_length[threadIdx.x] = 1.f;
    return;
  }
  for (int row = threadIdx.x >> 5; row < 2 * BT; row += WARPS) {
    float squares = 0.f;
#pragma unroll
    for (int c = 2 * lane; c < BK; c += 64) {
      const float2 two = unpack_pair(place<BK>(row < BT ? k : q, row % BT, c));
      squares = fmaf(two.x, two.x, fmaf(two.y, two.y, squares));
    }
    squares = warp_sum(squares);
    if (lane == 0) s.inverse_length[row] = inverse_root(squares + float(LEAST_SQUARE));
  }
}

// ---- matrices of tokens times tokens --------------------------------------------------------------------------------

enum Filled { LOWER, UPPER, WHOLE };  // where a matrix of tokens is not 0: up to, or from, its diagonal on

// d += `matrix` [BT, BT], a Matrix or a LowerMatrix, times 16 columns from `column` on of the tile `tokens` [BT, COLS].
// FILLED says where the matrix is not 0: blocks of 16 x 16 elsewhere are skipped, but zeros within a block must be
// stored.
template <Filled FILLED, int COLS, class M, typename T>
__device__ __forceinline__ void multiply_tokens(Accumulators& d, const M& matrix, const T* tokens, int column) {
  const RightReader<COLS, T> reader;
  const int lane = own_lane();
#pragma unroll
  for (int token = 0; token < BT; token += 16) {
    Word<T> b[4];
    reader.load(b, tokens, token, column);
#pragma unroll
    for (int row = 0; row < BT; row += 16) {
      if (FILLED == UPPER && token < row || FILLED == LOWER && token > row) continue;
#pragma unroll
      for (int number = 0; number < M::NUMBERS; ++number) {
        Word<T> a[4];
        matrix.load(a, number, row, token, lane);
        mma_m16n8k16(d[row / 16][0], a, {b[0], b[1]}, T{});
        mma_m16n8k16(d[row / 16][1], a, {b[2], b[3]}, T{});
      }
    }
  }
}

// Calls f(i, column, m, across, down) for this lane's pairs of neighbouring columns in Accumulators x, if warp w has
// the block's columns from 16 w on. i: the token in the chunk; column: the pair's first one, in the block. The pair is
// x[m][across][2 down] and x[m][across][2 down + 1].
template <class F> __device__ __forceinline__ void each_pair(F f) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int m = 0; m < BT / 16; ++m)
#pragma unroll
    for (int across = 0; across < 2; ++across)
#pragma unroll
      for (int down = 0; down < 2; ++down) f(16 * m + g + 8 * down, 16 * warp + 8 * across + 2 * t, m, across, down);
}
