// what      What the softmax attention kernels share: tiles in shared memory, a warp's products, where a block works.
// shapes    A tile is [rows, D] of 16-bit values, D of 64 or 128; arrays of fewer columns are padded with zeros.
// numerics  Products of bf16 or f16 with sums in float32. What a product makes is rounded to the same type before it is
//           a factor of the next one.
#include "cards.cuh"
#include "half_products.cuh"
#include "softmax_work.cuh"

constexpr int THREADS = 128;

// Piece `piece` of 16 bytes of a tile's row. Pieces change places within 128 bytes, so that the same one of eight rows,
// which is what ldmatrix takes, lies in all banks.
template <int D, typename T> __device__ __forceinline__ T* piece_of(T* tile, int row, int piece) {
  return tile + row * D + (piece ^ (row & 7)) * 8;
}

// A warp's [16 M, N] values: 16 x 8 at a time, as the tensor cores leave them.
template <int M, int N> using Fragment = float[M][N / 8][4];

// d += A B^T, A the rows row... of tile a, B all N rows of tile b. FEW: in fewer registers.
template <int D, int M, int N, bool FEW = false, typename T>
__device__ __forceinline__ void multiply_transposed(Fragment<M, N>& d, T* a, int row, T* b) {
  const int lane = opaque(threadIdx.x & 31);  // so that addresses are made anew, not held in registers
  constexpr int AT_ONCE =
      FEW || M * N > 64 || SINCE_SM100 ? 4 : D / 16;  // more would want more registers than there are
#pragma unroll AT_ONCE
  for (int k = 0; k < D / 16; ++k) {
    u32 rows[M][4], columns[4];
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4(rows[m], piece_of<D>(a, row + 16 * m + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
      ldmatrix_x4(columns, piece_of<D>(b, 16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply_halves(d[m][2 * n], rows[m], {columns[0], columns[1]}, T{});
        multiply_halves(d[m][2 * n + 1], rows[m], {columns[2], columns[3]}, T{});
      }
    }
  }
}

// d += A B, A in registers, B the N rows of tile b.
template <int D, int M, int N, typename T>
__device__ __forceinline__ void multiply_rows(Fragment<M, D>& d, const Fragment<M, N>& a, T* b) {
  const int lane = opaque(threadIdx.x & 31);  // so that addresses are made anew, not held in registers
#pragma unroll
  for (int k = 0; k < N / 16; ++k) {
    u32 rows[M][4], columns[4];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float (&from)[4] = a[m][2 * k + r / 2];
        rows[m][r] = pack<T>(from[r % 2 * 2], from[r % 2 * 2 + 1]);
      }
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      ldmatrix_x4_trans(columns, piece_of<D>(b, 16 * k + lane % 16, 2 * n + lane / 16));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply_halves(d[m][2 * n], rows[m], {columns[0], columns[1]}, T{});
        multiply_halves(d[m][2 * n + 1], rows[m], {columns[2], columns[3]}, T{});
      }
    }
  }
}

// Calls f(value of a, value of b, m, half, column) for every value of this lane: its row is 16 m + 8 half + lane / 4.
template <int M, int N, class F>
__device__ __forceinline__ void each_of_two(Fragment<M, N>& a, Fragment<M, N>& b, F f) {
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
template <int M, int N, class F> __device__ __forceinline__ void each(Fragment<M, N>& a, F f) {
  each_of_two<M, N>(a, a, [&](float& x, float&, int m, int half, int column) { f(x, m, half, column); });
}

// A row's next N products become weights; returns what earlier weights are to be multiplied by.
template <int N>
__device__ __forceinline__ float weigh(float (&s)[N / 8][4], int half, float scale, RowMaximum& most, float& sum) {
  float largest = minus_infinity();
#pragma unroll
  for (int n = 0; n < N / 8; ++n) largest = max(largest, max(s[n][2 * half], s[n][2 * half + 1]));
  const float hidden = __uint_as_float(opaque(__float_as_uint(scale)));  // nothing made of it stays in a register
  const float kept = most.raise(row_max(largest), hidden, 0.f);
  sum *= kept;
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int x = 2 * half; x < 2 * half + 2; ++x) {
      s[n][x] = exp2_approx(fmaf(most.factor, s[n][x], -most.shift));
      sum += s[n][x];
    }
  return kept;
}

// Fill a tile with tokens of a sequence: those from `token` on of (batch, head), zeros from the first `rows` on and
// beyond `width` columns: with `vectors` (rows start on 16 bytes and end on them) in the background until the next
// cp_async_wait, otherwise at once.
template <int ROWS, int D, typename T>
__device__ __forceinline__ void fetch(T* tile, const Rows<const T>& x, i32 batch, i32 head, i32 token, int rows,
                                      i64 width, bool vectors) {
  constexpr int ACROSS = D / 8, DOWN = THREADS / ACROSS;
  const int thread = opaque(threadIdx.x), piece = thread % ACROSS, columns = int(width) - 8 * piece;
  const T* from = x.row(batch, head, token) + 8 * piece;
  if (columns <= 0) rows = 0;
  if (vectors) {
#pragma unroll
    for (int n = 0; n < ROWS / DOWN; ++n) {
      const int row = thread / ACROSS + n * DOWN;
      cp_async<16>(piece_of<D>(tile, row, piece), from + (row < rows ? row * x.t : 0), row < rows);
    }
  } else {
#pragma unroll 1
    for (int row = thread / ACROSS; row < ROWS; row += DOWN)
#pragma unroll 1
      for (int i = 0; i < 8; ++i)
        piece_of<D>(tile, row, piece)[i] = row < rows && i < columns ? from[row * x.t + i] : from_float<T>(0.f);
  }
}

// Store a warp's [16 M, D] values, each times the factor of its row, as tokens of a work tile, through rows `row`... of
// a tile that only this warp uses.
template <int D, int M, typename T, class F>
__device__ __forceinline__ void store(Fragment<M, D>& d, F factor, T* tile, int row, const Rows<T>& x, const Work& work,
                                      i64 width, bool vectors) {
  const int lane = threadIdx.x & 31;
  __syncwarp();  // the warp has read what the tile held
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
  __syncwarp();  // all of it stands
  for (int n = lane; n < 16 * M * D / 8; n += 32) {
    const int down = n / (D / 8), piece = n % (D / 8), columns = int(width) - 8 * piece;
    if (row + down >= work.tokens || columns <= 0) continue;
    const T* from = piece_of<D>(tile, row + down, piece);
    T* to = x.row(work.output_batch, work.head, work.start + row + down) + 8 * piece;
    if (vectors) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    else
      for (int i = 0; i < 8 && i < columns; ++i) to[i] = from[i];
  }
}
