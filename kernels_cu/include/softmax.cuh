// what      What softmax attention's tensor-core kernels for every card share: tiles in shared memory and a warp's
//           products.
// shapes    A tile is [rows, D] of 16-bit values, D of 64 or 128; arrays of fewer columns are padded with zeros.
// barriers  the caller's: between the stores of a tile and the products that read it. All lanes of a warp multiply
//           together
// numerics  Products of bf16 or f16 with sums in float32. A sum is rounded to the same type before it is an operand of
//           the next product.
#include "cards.cuh"
#include "ptx.cuh"
#include "softmax_work.cuh"

// From the includes:
//   RowMaximum: the largest score of a row so far

constexpr int THREADS = 128;

// The address of the 16-byte piece `piece` of a row of a tile. Pieces are permuted within 128 bytes: ldmatrix reads the
// same piece of eight rows, which then lie in different banks.
template <int D, typename T> __device__ __forceinline__ T* piece_of(T* tile, int row, int piece) {
  return tile + row * D + (piece ^ (row & 7)) * 8;
}

// A lane's part of a warp's sums [16 M, N]: four of every 16 x 8, in the places of `mma.sync`: 0 and 1 are in row
// lane / 4, columns 2 (lane % 4) and the next; 2 and 3 are in the same columns 8 rows further down.
template <int M, int N> using Fragment = float[M][N / 8][4];

// d += A B^T. A is the 16 M rows from `row` on of tile a, B all N rows of tile b; the sum is over D columns. FEW: use
// fewer registers.
template <int D, int M, int N, bool FEW = false, typename T>
__device__ __forceinline__ void multiply_transposed(Fragment<M, N>& d, T* a, int row, T* b) {
  const int lane = opaque(threadIdx.x & 31);  // so that addresses are computed again, not held in registers
  constexpr int AT_ONCE =
      FEW || M * N > 64 || SINCE_SM100 ? 4 : D / 16;  // more would need more registers than there are
#pragma unroll AT_ONCE
  for (int step = 0; step < D / 16; ++step) {
    u32 rows[M][4], columns[4];
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4(rows[m], piece_of<D>(a, row + 16 * m + lane % 16, 2 * step + lane / 16));
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
      ldmatrix_x4(columns, piece_of<D>(b, 16 * n + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16(d[m][2 * n], rows[m], {columns[0], columns[1]}, T{});
        mma_m16n8k16(d[m][2 * n + 1], rows[m], {columns[2], columns[3]}, T{});
      }
    }
  }
}

// d += A B. A [16 M, N] is in registers, as the sums of a product, and is rounded to T here. B is the N rows, D
// columns, of tile b.
template <int D, int M, int N, typename T>
__device__ __forceinline__ void multiply_rows(Fragment<M, D>& d, const Fragment<M, N>& a, T* b) {
  const int lane = opaque(threadIdx.x & 31);  // so that addresses are computed again, not held in registers
#pragma unroll
  for (int step = 0; step < N / 16; ++step) {
    u32 rows[M][4], columns[4];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float (&x)[4] = a[m][2 * step + r / 2];
        rows[m][r] = pack<T>(x[r % 2 * 2], x[r % 2 * 2 + 1]);
      }
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      ldmatrix_x4_trans(columns, piece_of<D>(b, 16 * step + lane % 16, 2 * n + lane / 16));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16(d[m][2 * n], rows[m], {columns[0], columns[1]}, T{});
        mma_m16n8k16(d[m][2 * n + 1], rows[m], {columns[2], columns[3]}, T{});
      }
    }
  }
}

// Calls f(value of a, value of b, m, half, column) for every value of this lane: its row in the warp's 16 M is 16 m + 8
// half + lane / 4.
template <int M, int N, class F>
__device__ __forceinline__ void each_two_values(Fragment<M, N>& a, Fragment<M, N>& b, F f) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int x = 0; x < 2; ++x)
          f(a[m][n][2 * half + x], b[m][n][2 * half + x], m, half, 8 * n + 2 * int(threadIdx.x & 3) + x);
}
// Calls f(value, m, half, column) for every value of this lane, as each_two_values does.
template <int M, int N, class F> __device__ __forceinline__ void each_value(Fragment<M, N>& a, F f) {
  each_two_values<M, N>(a, a, [&](float& x, float&, int m, int half, int column) { f(x, m, half, column); });
}

// Replaces N products of a row, `scores`, by weights 2^(score - maximum), and updates the row's maximum and this lane's
// part of its sum of weights. Four lanes share the row; they agree on the maximum. Returns the factor by which earlier
// weights, and o, are to be multiplied. scale: |scale| log2 e. half: 0 for the lane's first row, 1 for the row 8
// further down.
template <int N>
__device__ __forceinline__ float weigh(float (&scores)[N / 8][4], int half, float scale, RowMaximum& maximum,
                                       float& sum) {
  float largest = minus_infinity();
#pragma unroll
  for (int n = 0; n < N / 8; ++n) largest = max(largest, max(scores[n][2 * half], scores[n][2 * half + 1]));
  const float hidden = __uint_as_float(opaque(__float_as_uint(scale)));  // nothing computed from it stays in a register
  const float rescale = maximum.raise(row_max(largest), hidden, 0.f);
  sum *= rescale;
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int x = 2 * half; x < 2 * half + 2; ++x) {
      scores[n][x] = exp2_approx(fmaf(maximum.factor, scores[n][x], -maximum.shift));
      sum += scores[n][x];
    }
  return rescale;
}

// Fills a tile [ROWS, D] with the `rows` tokens from `token` on of (batch, head), of any number below or above ROWS,
// `width` columns of each, and with zeros elsewhere. With `vectors` (the rows start and end at multiples of 16 bytes)
// by asynchronous copies, for which the caller waits, otherwise by plain ones. All threads of the block call this, and
// synchronise before they read the tile.
template <int ROWS, int D, typename T>
__device__ __forceinline__ void fetch(T* tile, const StridedRows<const T>& x, i32 batch, i32 head, i32 token, int rows,
                                      i64 width, bool vectors) {
  constexpr int ACROSS = D / 8, DOWN = THREADS / ACROSS;
  static_assert(THREADS % ACROSS == 0 && ROWS % DOWN == 0, "the threads have whole rows in each round");
  const int thread = opaque(threadIdx.x), piece = thread % ACROSS, columns = int(width) - 8 * piece;
  const T* from = x.row(batch, head, token) + 8 * piece;
  if (columns <= 0) rows = 0;
  if (vectors) {
#pragma unroll
    for (int n = 0; n < ROWS / DOWN; ++n) {
      const int row = thread / ACROSS + n * DOWN;
      cp_async<16>(piece_of<D>(tile, row, piece), from + (row < rows ? row * x.token_stride : 0), row < rows);
    }
  } else {
#pragma unroll 1
    for (int row = thread / ACROSS; row < ROWS; row += DOWN)
#pragma unroll 1
      for (int i = 0; i < 8; ++i)
        piece_of<D>(tile, row, piece)[i] =
            row < rows && i < columns ? from[row * x.token_stride + i] : from_float<T>(0.f);
  }
}

// Stores a warp's [16 M, D] values, each times factor(m, half) of its row, as tokens of `work`, through the 16 M rows
// from `row` on of a tile. No other warp uses these rows. Rows from work.tokens on and columns from `width` on are not
// stored.
template <int D, int M, typename T, class F>
__device__ __forceinline__ void store(Fragment<M, D>& d, F factor, T* tile, int row, const StridedRows<T>& x,
                                      const Work& work, i64 width, bool vectors) {
  const int lane = threadIdx.x & 31;
  __syncwarp();  // the warp has read these rows
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float f = factor(m, half);
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        *reinterpret_cast<u32*>(piece_of<D>(tile, row + 16 * m + 8 * half + lane / 4, n) + 2 * (lane & 3)) =
            pack<T>(f * d[m][n][2 * half], f * d[m][n][2 * half + 1]);
    }
  __syncwarp();  // the warp's rows have been written
  for (int n = lane; n < 16 * M * D / 8; n += 32) {
    const int i = n / (D / 8), piece = n % (D / 8), columns = int(width) - 8 * piece;
    if (row + i >= work.tokens || columns <= 0) continue;
    const T* from = piece_of<D>(tile, row + i, piece);
    T* to = x.row(work.output_batch, work.head, work.start + row + i) + 8 * piece;
    if (vectors) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    else
      for (int i = 0; i < 8 && i < columns; ++i) to[i] = from[i];
  }
}
