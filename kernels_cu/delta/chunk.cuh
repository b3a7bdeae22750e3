// what      A chunk of the delta rule under a gate for all channels of a token: pairs of its tokens, and the matrices
//           that hang on no state.
// math      D_ij the decay from token j to token i. M = D_ij k_i . k_j below the diagonal, A = D_ij q_i . k_j up to it,
//           N = (I + diag(beta) M)^-1, B = A N diag(beta); W = q D_i - B D_j k, Z = beta_j N^T D_end k
// numerics  M, A and N in float32; W and Z in T, matrices that multiply tokens in two numbers of T
// source    Yang et al., 2024 (2412.06464), section 3.3, with the products of a chunk in another order: N is multiplied
//           into what is read and written, which it does not enlarge, and not into what a state lacks
#include "delta/chunk_storage.cuh"
#include "delta/lengths.cuh"
#include "gated/forward_copies.cuh"
#include "half_products.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

using Columns = float[C / 16][2][4];  // of a warp: all tokens of a chunk, 16 columns

__device__ __forceinline__ float2 unpack_pair(const bf16* x) {
  return unpack(*reinterpret_cast<const u32*>(x), bf16{});
}
__device__ __forceinline__ float2 unpack_pair(const f16* x) { return unpack(*reinterpret_cast<const u32*>(x), f16{}); }

// Stores x and y, and REST numbers behind them what rounding leaves of them.
template <typename T, int REST = Matrix<T>::REST> __device__ __forceinline__ void put_two(T* to, float x, float y) {
  const u32 pair = pack<T>(x, y);
  const float2 rounded = unpack(pair, T{});
  *reinterpret_cast<u32*>(to) = pair;
  *reinterpret_cast<u32*>(to + REST) = pack<T>(x - rounded.x, y - rounded.y);
}

// Stores zeros between the rows of a matrix in global memory, which are copied with the matrix.
template <int THREADS, typename T> __device__ __forceinline__ void clear_padding(Matrix<T>& M) {
  for (int row = threadIdx.x; row < 2 * C; row += THREADS)
    *reinterpret_cast<uint4*>(M.x + row / C * M.REST + row % C * M.LDA + C) = uint4{};
}

// Stores neighbouring numbers of a row from an even `column` on, those of its `columns`. The row is whole pieces of
// `bytes`.
template <typename T>
__device__ __forceinline__ void store_pair(T* row, int column, int columns, int bytes, float x, float y) {
  if (bytes >= 4) {
    if (column < columns) *reinterpret_cast<u32*>(row + column) = pack<T>(x, y);
  } else {
    if (column < columns) row[column] = from_float<T>(x);
    if (column + 1 < columns) row[column + 1] = from_float<T>(y);
  }
}

// ---- tokens ---------------------------------------------------------------------------------------------------------

// The gate and the write strength of a token that a thread has asked for, C threads one each.
struct TokenNumbers {
  float gate = 0.f, beta = 0.f;

  template <typename G>
  __device__ __forceinline__ void ask(const Rows<const G>& g, const Rows<const G>& b, i64 batch, i64 head, i64 first,
                                      int rows) {
    ask_strength(b, batch, head, first, rows);
    if (threadIdx.x < C) gate = int(threadIdx.x) < rows ? to_float(*g.row(batch, head, first + threadIdx.x)) : 0.f;
  }
  template <typename G>
  __device__ __forceinline__ void ask_strength(const Rows<const G>& b, i64 batch, i64 head, i64 first, int rows) {
    if (threadIdx.x < C) beta = int(threadIdx.x) < rows ? to_float(*b.row(batch, head, first + threadIdx.x)) : 0.f;
  }
  __device__ __forceinline__ void put(Decayed& s) const {
    if (threadIdx.x < C) s.decay[threadIdx.x] = decay_of(gate), s.beta[threadIdx.x] = beta;
  }
};

// The same number in neighbouring lanes, LANES of them: the sum of theirs.
template <int LANES> __device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// Copies a chunk's rows, number by number; zeros behind the last of them.
template <int COLS, int THREADS, typename T>
__device__ __forceinline__ void copy_numbers(T* tile, const T* from, i64 stride, int rows, int width) {
#pragma unroll 1
  for (int at = threadIdx.x; at < C * COLS; at += THREADS) {
    const int row = at / COLS, column = at % COLS;
    *place<COLS>(tile, row, column) = row < rows && column < width ? from[row * stride + column] : from_float<T>(0.f);
  }
}

// Starts to copy a chunk's rows, which are whole pieces of `bytes`.
template <int COLS, int THREADS, typename T>
__device__ __forceinline__ void copy_chunk(T* tile, const T* from, i64 stride, int rows, int width, int bytes) {
  if (bytes == 16) copy_rows<16, 8, C, COLS, THREADS>(tile, from, stride, rows, width);
  else copy_numbers<COLS, THREADS>(tile, from, stride, rows, width);
}

// d = the products of rows x and y [8 tokens from `column` on] over their COLS numbers.
template <int COLS, typename T>
__device__ __forceinline__ void multiply_rows(float (&d)[2][4], const T* x, const T* y, int row, int column) {
  const RowsReader<COLS, T> right;
  const LeftReader<COLS, T> left;
#pragma unroll
  for (int c = 0; c < COLS; c += 32) {
    u32 r[4];
    ldmatrix_x4(r, right.at(y, column, c));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      u32 a[4];
      ldmatrix_x4(a, left.at(x, row, c + 16 * n));
      multiply_halves(d[n], a, {r[2 * n], r[2 * n + 1]}, T{});
    }
  }
}

// Computes the decays of pairs, and from the chunk's start and to its end; a warp has C / WARPS rows. The block's
// threads have passed a barrier since `decay` was put, and pass another before they read results.
template <int WARPS> __device__ __forceinline__ void decay_pairs(Decayed& s) {
  constexpr int ROWS = C / WARPS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const float first = s.decay[0];
  float since = 1.f;  // from token `lane` to token i
#pragma unroll
  for (int i = 0; i < C; ++i) {
    since = i > lane ? since * s.decay[i] : 1.f;
    if (i / ROWS != warp) continue;
    s.between[i][lane] = i < lane ? 0.f : since;
    if (lane == 0) s.start[i] = first * since;
  }
  if (warp == 0) s.end[lane] = since;
}

// Computes what rows of keys and queries are multiplied by; a barrier must follow.
template <int BK, int WARPS, typename T>
__device__ __forceinline__ void measure_rows(Decayed& s, const T* q, const T* k, bool normalized) {
  const int lane = threadIdx.x & 31;
  for (int row = threadIdx.x >> 5; row < 2 * C; row += WARPS) {
    float squares = 0.f;
    if (normalized) {
#pragma unroll
      for (int c = 2 * lane; c < BK; c += 64) {
        const float2 two = unpack_pair(place<BK>(row < C ? k : q, row % C, c));
        squares = fmaf(two.x, two.x, fmaf(two.y, two.y, squares));
      }
      squares = warp_sum(squares);
    }
    if (lane == 0) s.unit[row] = normalized ? inverse_root(squares + float(LEAST_SQUARE)) : 1.f;
  }
}

// M and A of queries and keys that have arrived, with what is to know of their tokens. The block's threads
// have passed a barrier since `decay` and `beta` were put; they pass another here, and one before they read results.
template <int BK, int THREADS, typename T>
__device__ __forceinline__ void score_pairs(Scored& s, const T* q, const T* k, bool normalized) {
  constexpr int WARPS = THREADS / 32, TASKS = 16 / WARPS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  decay_pairs<WARPS>(s);
  measure_rows<BK, WARPS>(s, q, k, normalized);
  float d[TASKS][2][4] = {};  // in two sums, added to in turn: a product waits for the previous one of its sum
#pragma unroll
  for (int n = 0; n < TASKS; ++n) {  // 16 rows, of keys and then of queries, with 8 keys
    const int task = warp + n * WARPS, rows = task / 4, key = task % 4 * 8, row = rows % 2 * 16;
    if (key <= row + 15) multiply_rows<BK>(d[n], rows < 2 ? k : q, k, row, key);
  }
  __syncthreads();  // decays and lengths stand
#pragma unroll
  for (int n = 0; n < TASKS; ++n) {
    const int task = warp + n * WARPS, rows = task / 4, key = task % 4 * 8, row = rows % 2 * 16;
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int i = row + g + x / 2 * 8, j = key + 2 * t + x % 2;
      const float score = s.unit[rows / 2 * C + i] * s.unit[j] * s.between[i][j] * (d[n][0][x] + d[n][1][x]);
      if (rows >= 2) s.A[i][j] = j <= i ? score : 0.f;
      else s.M[i][j] = j < i ? score : 0.f;
    }
  }
}

// N, by one warp: both diagonal blocks of 16 tokens by forward substitution, a column a lane; then what is below them,
// N21 = -N22 diag(beta) M21 N11, 8 rows of a column a lane.
__device__ __forceinline__ void solve_column(Scored& s) {
  constexpr int HALF = C / 2, ROWS = HALF / 2;
  const int lane = threadIdx.x & 31, column = lane % HALF, first = lane - column;
  float x[HALF] = {};
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    x[i] = fmaf(-s.beta[first + i], x[i], i == column ? 1.f : 0.f);
#pragma unroll
    for (int j = i + 1; j < HALF; ++j) x[j] = fmaf(s.M[first + j][first + i], x[i], x[j]);
  }
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    s.N[first + i][lane] = x[i];
    if (first) s.N[i][lane] = 0.f;
    x[i] = __shfl_sync(0xffffffffu, x[i], column);  // N11's
  }
  __syncwarp();  // N22 is in shared memory
  const int row = HALF + first / 2;
  float product[HALF];  // a column of diag(beta) M21 N11
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float sum = 0.f;
#pragma unroll
    for (int m = 0; m < HALF; ++m) sum = fmaf(s.M[row + i][m], x[m], sum);
    sum *= s.beta[row + i];
    const float other = __shfl_xor_sync(0xffffffffu, sum, HALF);
    product[i] = first ? other : sum, product[ROWS + i] = first ? sum : other;
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float sum = 0.f;
#pragma unroll
    for (int m = 0; m < HALF; ++m) sum = fmaf(s.N[row + i][HALF + m], product[m], sum);
    s.N[row + i][column] = -sum;
  }
}

// ---- matrices of tokens times tokens --------------------------------------------------------------------------------

// Calls f(i, j, (x y)_ij, (x y)_i(j + 1)) for the pairs of columns of a thread; x and y have rows of LD numbers.
template <int THREADS, int LD, class F>
__device__ __forceinline__ void multiply_scores(const float (&x)[C][LD], const float (&y)[C][LD], F f) {
  constexpr int EACH = C * C / THREADS;  // neighbouring columns
  const int i = threadIdx.x / (C / EACH), first = threadIdx.x % (C / EACH) * EACH;
  float sums[EACH] = {};
#pragma unroll 8
  for (int m = 0; m < C; ++m)
#pragma unroll
    for (int j = 0; j < EACH; ++j) sums[j] = fmaf(x[i][m], y[m][first + j], sums[j]);
#pragma unroll
  for (int j = 0; j < EACH; j += 2) f(i, first + j, sums[j], sums[j + 1]);
}

enum Filled { LOWER, UPPER, WHOLE };  // where a matrix of tokens is not 0

// d[16 tokens, 16 columns] += rows of M, a matrix of tokens in two numbers, times tokens. FILLED says where M is not 0.
template <Filled FILLED, int COLS, typename T>
__device__ __forceinline__ void multiply_tokens(float (&d)[2][4], const Matrix<T>& M, const T* tokens, int row,
                                                int column) {
  const RightReader<COLS, T> reader;
  const int lane = own_lane();
#pragma unroll
  for (int token = 0; token < C; token += 16) {
    if (FILLED == UPPER && token < row || FILLED == LOWER && token > row) continue;
    u32 b[4];
    ldmatrix_x4_trans(b, reader.at(tokens, token, column));
#pragma unroll
    for (int number = 0; number < 2; ++number) {
      u32 a[4];
      ldmatrix_x4(a, M.x + number * M.REST + (row + (lane & 15)) * M.LDA + token + (lane >> 4) * 8);
      multiply_halves(d[0], a, {b[0], b[1]}, T{});
      multiply_halves(d[1], a, {b[2], b[3]}, T{});
    }
  }
}

// Z, and W times `scale`, from queries, keys and the matrices that multiply keys.
template <int BK, int THREADS, class Shared, typename T>
__device__ __forceinline__ void make_wide(Shared& s, const T* q, const T* k, float scale) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int task = threadIdx.x >> 5; task < BK / 8; task += THREADS / 32) {
    const int channel = task / 2 * 16, row = task % 2 * 16;
    float w[2][4] = {}, z[2][4] = {};
    multiply_tokens<LOWER, BK>(w, s.of_W, k, row, channel);
    multiply_tokens<UPPER, BK>(z, s.of_Z, k, row, channel);
#pragma unroll
    for (int across = 0; across < 2; ++across)
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        const int i = row + g + 8 * down, c = channel + 8 * across + 2 * t;
        const float2 query = unpack_pair(place<BK>(q, i, c));
        const float* of_w = w[across] + 2 * down;
        const float from_start = s.of.unit[C + i] * s.of.start[i];
        put_pair(place<BK>(s.W, i, c),
                 {scale * (from_start * query.x - of_w[0]), scale * (from_start * query.y - of_w[1])});
        put_pair(place<BK>(s.Z, i, c), {z[across][2 * down], z[across][2 * down + 1]});
      }
  }
}

// Calls f(i, column, index of a pair in Columns) for a warp's pairs of neighbouring columns.
template <class F> __device__ __forceinline__ void each_pair(F f) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int m = 0; m < C / 16; ++m)
#pragma unroll
    for (int across = 0; across < 2; ++across)
#pragma unroll
      for (int down = 0; down < 2; ++down) f(16 * m + g + 8 * down, 16 * warp + 8 * across + 2 * t, m, across, down);
}
