// what      What the softmax attention kernels share: tiles in shared memory, a warp's products, where a block works.
// shapes    A tile is [rows, D] of 16-bit values, D of 64 or 128; arrays of fewer columns are padded with zeros.
// numerics  Products of bf16 or f16 with sums in float32. What a product makes is rounded to the same type before it is
//           a factor of the next one.
#include "cards.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int THREADS = 128;

template <typename T> struct SoftmaxForwardArgs {
  Rows<const T> q, k, v;
  Rows<T> o;
  Shape shape;  // a chunk is the queries of a block
  float* L;     // [B, H, T] or null
  double scale;
  i64 causal;
  i64 vectors;  // whether all rows are whole pieces of 16 bytes
};

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// Piece `piece` of 16 bytes of a tile's row. Pieces change places within 128 bytes, so that the same one of eight rows,
// which is what ldmatrix takes, lies in all banks.
template <int D, typename T> __device__ __forceinline__ T* piece_of(T* tile, int row, int piece) {
  return tile + row * D + (piece ^ (row & 7)) * 8;
}

__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], bf16) {
  mma_bf16(d, a, b);
}
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], f16) { mma_f16(d, a, b); }

// A warp's [16 M, N] values: 16 x 8 at a time, as the tensor cores leave them.
template <int M, int N> using Fragment = float[M][N / 8][4];

// d += A B^T, A the rows row... of tile a, B all N rows of tile b.
template <int D, int M, int N, typename T>
__device__ __forceinline__ void multiply_transposed(Fragment<M, N>& d, T* a, int row, T* b) {
  const int lane = opaque(threadIdx.x & 31);  // so that addresses are made anew, not held in registers
  constexpr int AT_ONCE = M * N > 64 || SINCE_SM100 ? 4 : D / 16;  // more would want more registers than there are
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
        multiply(d[m][2 * n], rows[m], {columns[0], columns[1]}, T{});
        multiply(d[m][2 * n + 1], rows[m], {columns[2], columns[3]}, T{});
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
        multiply(d[m][2 * n], rows[m], {columns[0], columns[1]}, T{});
        multiply(d[m][2 * n + 1], rows[m], {columns[2], columns[3]}, T{});
      }
    }
  }
}

// Calls f(value, m, half, column) for every value of this lane: its row is 16 m + 8 half + lane / 4.
template <int M, int N, class F> __device__ __forceinline__ void each(Fragment<M, N>& d, F f) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int x = 0; x < 2; ++x) f(d[m][n][2 * half + x], m, half, 8 * n + 2 * (threadIdx.x & 3) + x);
}

// Of the four lanes that share a row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The size of the scale, in base 2, above 0, so that it leaves -inf as it is; its sign goes with the queries, so that
// the largest product is the largest score.
__device__ __forceinline__ float size_of_scale(double scale) { return max(float(fabs(scale)) * LOG2E, 1e-37f); }

// A row's next N scores become weights e^(s - m), m the largest so far; returns what the weights before are to be
// multiplied by, since m has grown. `scale` makes scores of products, in base 2.
template <int N>
__device__ __forceinline__ float weigh(float (&s)[N / 8][4], int half, float scale, float& most, float& sum) {
  float higher = most;
#pragma unroll
  for (int n = 0; n < N / 8; ++n) higher = max(higher, max(s[n][2 * half], s[n][2 * half + 1]));
  higher = row_max(higher);
  const float kept = exp2_approx(scale * (most - higher)), shift = scale * higher;
  most = higher;
  sum *= kept;
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int x = 2 * half; x < 2 * half + 2; ++x) {
      s[n][x] = exp2_approx(fmaf(scale, s[n][x], -shift));
      sum += s[n][x];
    }
  return kept;
}

// Where a block works: a chunk of the tokens of one sequence and head. Tokens count from the sequence's start. It
// stands in shared memory, since the products leave no registers for it.
struct WorkTile {
  int batch, head, start;  // the sequence's first token among all
  int first, length;       // the chunk's first token, the sequence's tokens
  i64 row;                 // where the sequence begins in an array [B, H, T]
};

__device__ __forceinline__ WorkTile work_tile(const Shape& shape, int chunk, u32 pair) {
  int sequence = 0, last = int(shape.count) - 1;
  while (sequence < last) {  // the last sequence whose chunks do not begin after this one
    const int middle = (sequence + last + 1) / 2;
    if (shape.chunk_bounds[middle] <= chunk) sequence = middle;
    else last = middle - 1;
  }
  const Span span = tokens_of(shape, sequence);
  const u32 H = u32(shape.H);
  return {int(pair / H),
          int(pair % H),
          int(span.start),
          int(chunk_tokens(shape, chunk).start - span.start),
          int(span.stop - span.start),
          i64(pair) * shape.T + span.start};
}

// Fill a tile with columns `column`... of tokens first... of the sequence, zeros beyond it and beyond `width` columns:
// with `vectors` (rows start on 16 bytes and end on them) in the background until the next cp_async_wait, otherwise at
// once.
template <int ROWS, int D, typename T>
__device__ __forceinline__ void fetch(T* tile, const Rows<const T>& x, const WorkTile& at, int first, i64 width,
                                      bool vectors, int column = 0) {
  constexpr int ACROSS = D / 8, DOWN = THREADS / ACROSS;
  const int thread = opaque(threadIdx.x % THREADS), piece = thread % ACROSS;
  const int columns = int(width) - column - 8 * piece;
  const int rows = columns > 0 ? at.length - first : 0;
  const T* from = x.row(at.batch, at.head, at.start + i64(first)) + column + 8 * piece;
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

// Store a warp's [16 M, D] values, each times the factor of its row, as tokens first... of the sequence, through rows
// `row`... of a tile that only this warp uses.
template <int D, int M, typename T, class F>
__device__ __forceinline__ void store(Fragment<M, D>& d, F factor, T* tile, int row, const Rows<T>& x,
                                      const WorkTile& at, int first, i64 width, bool vectors) {
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
    if (first + down >= at.length || columns <= 0) continue;
    const T* from = piece_of<D>(tile, row + down, piece);
    T* to = x.row(at.batch, at.head, i64(at.start) + first + down) + 8 * piece;
    if (vectors) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    else
      for (int i = 0; i < 8 && i < columns; ++i) to[i] = from[i];
  }
}
