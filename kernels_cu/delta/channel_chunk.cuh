// what      A chunk of the delta rule under gates for every channel: decays of rows and columns of scores, scores of
//           pairs of tokens, and products of matrices of tokens.
// math      D_ij the decays from token j to token i, of each channel; a score is sum_c D_ij x_i y_j
// shapes    a thread decays 4 channels of 4 tokens: a row of a tile has BK / 4 threads. Pairs of different blocks of 4
//           tokens meet at the border between the halves of 8, 16 or 32 tokens, one of LEVELS; rows are in the upper
//           half, columns in the lower one
// numerics  Tokens are divided by powers of 2 that bring their lengths to [1, 2). Pairs within 4 tokens are multiplied
//           in float32 as the recurrence does. All others meet at a border between them: rows are decayed from it,
//           columns up to it, and rounded to float16, as are keys that go to the chunk's end. A decay is a product of
//           those of the tokens between, so that any gate is exact
#include "delta/chunk.cuh"

constexpr int BLOCK = 4;  // tokens whose pairs are multiplied one by one
constexpr int PAIRS = BLOCK * (BLOCK - 1) / 2, PAIRS_WITH_SELF = PAIRS + BLOCK, PAIRS_OF_BOTH = PAIRS + PAIRS_WITH_SELF;
constexpr int BLOCKS = C / BLOCK, LEVELS = 3;

// The block of tokens of a thread, and the first of its channels.
template <int BK> struct BlockTask {
  static constexpr int LANES = BK / 4;
  int lane = threadIdx.x & LANES - 1, block = threadIdx.x / u32(LANES), first = BLOCK * block, c = 4 * lane;

  // The place of token n of the block, in a tile of all tokens.
  template <typename X> __device__ __forceinline__ X* at(X* tile, int n) const {
    return Spot<BK, 4, X>(4 * (block & 1), c).at(tile, block >> 1, n);
  }
};

__device__ __forceinline__ float4 times(float4 x, float4 y) { return {x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w}; }
__device__ __forceinline__ float4 times(float x, float4 y) { return {x * y.x, x * y.y, x * y.z, x * y.w}; }
__device__ __forceinline__ void add_product(float& sum, float4 x, float4 y) {
  sum = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, sum))));
}

__device__ __forceinline__ float4 unpack_four(const float* x) { return *reinterpret_cast<const float4*>(x); }
template <typename T> __device__ __forceinline__ float4 unpack_four(const T* x) {
  const uint2 pairs = *reinterpret_cast<const uint2*>(x);
  const float2 low = unpack(pairs.x, T{}), high = unpack(pairs.y, T{});
  return {low.x, low.y, high.x, high.y};
}
template <typename G> __device__ __forceinline__ float4 decays_at(const G* g) {
  const float4 x = unpack_four(g);
  return {decay_of(x.x), decay_of(x.y), decay_of(x.z), decay_of(x.w)};
}
template <typename T> __device__ __forceinline__ void put_four(T* to, float4 x) {
  *reinterpret_cast<uint2*>(to) = {pack<T>(x.x, x.y), pack<T>(x.z, x.w)};
}
template <typename T> __device__ __forceinline__ void put_one(T* to, float x) {
  *to = from_float<T>(x), to[Matrix<T>::REST] = from_float<T>(x - to_float(*to));
}

// Starts to copy a chunk's rows, which are whole pieces of 16 bytes; zeros behind the last of them.
template <int BK, int THREADS, typename T>
__device__ __forceinline__ void copy_pieces(T* tile, const T* from, i64 stride, int rows, int width) {
  constexpr int PIECE = 16 / sizeof(T), ACROSS = BK / PIECE, AT_ONCE = THREADS / ACROSS;
  const int first = threadIdx.x / ACROSS, c = threadIdx.x % ACROSS * PIECE;
  from += first * stride + c;
  rows = c < width ? rows - first : 0;
#pragma unroll
  for (int down = 0; down < C; down += AT_ONCE, from += AT_ONCE * stride)
    cp_async<16>(place<BK>(tile, first + down, c), from, down < rows);
}

// ---- lengths --------------------------------------------------------------------------------------------------------

// The power of 2 below the root of a sum of squares; 1 for 0.
__device__ __forceinline__ float power_below(float squares) {
  if (squares == 0.f) return 1.f;
  const int exponent = int(floorf(0.5f * log2_approx(squares)));
  return __uint_as_float(u32(127 + min(max(exponent, -126), 126)) << 23);
}

__device__ __forceinline__ float max_of_lanes(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

// What tokens are multiplied by to come to lengths of [1, 2), and the powers of 2 that they, or what is left of them
// after a division by their lengths, are divided by.
struct Lengths {
  float factor[C], power[C];

  __device__ __forceinline__ void set(int i, float squares, bool normalized) {
    const float unit = normalized ? inverse_root(squares + float(LEAST_SQUARE)) : 1.f;
    const float below = power_below(unit * unit * squares);
    power[i] = below, factor[i] = unit * __uint_as_float(0x7f000000u - __float_as_uint(below));  // unit / below
  }
};

// The sum over lanes of x[lane], in each lane its own.
template <int HALF> __device__ __forceinline__ float sum_in_turn(const float* x) {
  const bool upper = threadIdx.x & HALF;
  float half[HALF];
#pragma unroll
  for (int n = 0; n < HALF; ++n)
    half[n] = (upper ? x[n + HALF] : x[n]) + __shfl_xor_sync(0xffffffffu, upper ? x[n] : x[n + HALF], HALF);
  if constexpr (HALF == 1) return half[0];
  else return sum_in_turn<HALF / 2>(half);
}

// COUNT sums over the channels of a block, over the lanes that have it: so many each, LANES apart.
template <int BK, int COUNT> struct SumsOfLanes {
  static constexpr int LANES = BlockTask<BK>::LANES, EACH = (COUNT + LANES - 1) / LANES;
  float x[EACH];

  __device__ __forceinline__ SumsOfLanes(const float (&sums)[EACH * LANES]) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) x[n] = sum_in_turn<LANES / 2>(sums + n * LANES);
  }
  // Calls f(number of a sum, the sum) for the lane's sums.
  template <class F> __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int n = 0; n < EACH; ++n) f(n * LANES + BlockTask<BK>().lane, x[n]);
  }
};

// Pairs of a block's tokens by number: PAIRS_WITH_SELF with j <= i, and behind them PAIRS with j < i.
struct PairOfBlock {
  bool apart;
  int i, j;
  __device__ __forceinline__ PairOfBlock(int n) : apart(n >= PAIRS_WITH_SELF) {
    n -= apart ? PAIRS_WITH_SELF : 0;
    const int row = (n >= 1) + (n >= 3) + (n >= 6);
    i = row + apart, j = n - row * (row + 1) / 2;
  }
  static constexpr int with_self(int i, int j) { return i * (i + 1) / 2 + j; }
  static constexpr int before(int i, int j) { return PAIRS_WITH_SELF + i * (i - 1) / 2 + j; }
};

// ---- decays ---------------------------------------------------------------------------------------------------------

// Calls rows(level, decays from the level's border to a block) or columns(level, those from the block to the border)
// for each level. `before` and `behind` get decays from the chunk's start to the block, and from it to the chunk's end.
template <int BK, class Rows, class Columns>
__device__ __forceinline__ void each_border(const float (&over)[BLOCKS][BK], const BlockTask<BK>& task, float4& before,
                                            float4& behind, Rows rows, Columns columns) {
  before = behind = {1.f, 1.f, 1.f, 1.f};
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) {
    const float* other = over[(task.block >> level ^ 1) << level] + task.c;  // the half on the border's other side
    float4 all = unpack_four(other);
#pragma unroll
    for (int n = 1; n < 1 << level; ++n) all = times(all, unpack_four(other + n * BK));
    if (task.block >> level & 1) rows(level, before), before = times(before, all);
    else columns(level, behind), behind = times(behind, all);
  }
}

// Stores a block's rows, or columns, of a level, times `by`. Tokens on a side of the level's borders are in their
// order; rows of KINDS alternate by 8.
template <int KINDS, int BK>
__device__ __forceinline__ void put_level(f16* tile, int level, int kind, const BlockTask<BK>& task,
                                          const float4 (&x)[BLOCK], float4 by) {
  const int at = task.block >> (level + 1) << level | task.block & (1 << level) - 1;
  const Spot<BK, 4, f16> spot(4 * (at & 1), task.c);
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) put_four(spot.at(tile, (at >> 1) * KINDS + kind, n), times(by, x[n]));
}

// Stores zeros to the rows of a block's tokens.
template <int BK> __device__ __forceinline__ void clear_rows(Matrix<f16>& M, const BlockTask<BK>& task) {
#pragma unroll
  for (int piece = 0; piece < BLOCK * 8; piece += task.LANES) {
    const int n = piece + task.lane;
    *reinterpret_cast<uint4*>(M.at(task.first + n / 8, n % 4 * 8) + n / 4 % 2 * M.REST) = uint4{};
  }
}
template <int BK> __device__ __forceinline__ void clear_rows(float (&M)[C][LD], const BlockTask<BK>& task) {
#pragma unroll
  for (int piece = 0; piece < BLOCK * 8; piece += task.LANES) {
    const int n = piece + task.lane;
    *reinterpret_cast<uint4*>(&M[task.first + n / 8][n % 8 * 4]) = uint4{};
  }
}

// Calls f(i, j, scores of rows of the first kind, of the second kind) for the scores at borders of tokens i with tokens
// j and j + 1.
template <int BK, class F>
__device__ __forceinline__ void score_borders(const f16 (&rows)[LEVELS][C * BK],
                                              const f16 (&columns)[LEVELS][C / 2 * BK], int task, F f) {
  const int lane = own_lane(), g = lane >> 2, t = lane & 3, level = min(task / 2, LEVELS - 1);
  const int right = task % 2, left = level == LEVELS - 1 ? task / 2 % 2 : right;
  float d[2][4] = {};
  multiply_rows<BK>(d, rows[level], columns[level], 16 * left, 8 * right);
  int i = 16 * left + 8 + g, j = 16 * right + 2 * t;
  if (level == 0) i = 16 * left + (g >> 2) * 8 + 4 + (g & 3), j = 16 * right + (t >> 1) * 8 + (t & 1) * 2;
  if (level == LEVELS - 1) i = 16 + 8 * left + g, j = 8 * right + 2 * t;
  if (level || g >> 2 == t >> 1)  // else they are of different borders
    f(i, j, float2{d[0][0] + d[1][0], d[0][1] + d[1][1]}, float2{d[0][2] + d[1][2], d[0][3] + d[1][3]});
}

// ---- matrices of tokens times tokens --------------------------------------------------------------------------------

// x <- (1 - diag(weight) M)^-1 x by forward substitution, M below the diagonal; for one warp, a lane a column.
__device__ __forceinline__ void solve_column(float (&x)[C], const float (&M)[C][LD], const float (&weight)[C]) {
#pragma unroll
  for (int i = 0; i < C; ++i) {
    float sums[2] = {};
#pragma unroll
    for (int j = 0; j + 1 < i; j += 4) {
      if (j + 4 < i) {
        const float4 row = unpack_four(&M[i][j]);
        sums[0] = fmaf(row.y, x[j + 1], fmaf(row.x, x[j], sums[0]));
        sums[1] = fmaf(row.w, x[j + 3], fmaf(row.z, x[j + 2], sums[1]));
      } else {
#pragma unroll
        for (int n = j; n + 1 < i; ++n) sums[n % 2] = fmaf(M[i][n], x[n], sums[n % 2]);
      }
    }
    x[i] = fmaf(weight[i], sums[0] + sums[1], x[i]);
    if (i) x[i] = fmaf(weight[i] * M[i][i - 1], x[i - 1], x[i]);  // the last product waits for the row before
  }
}

// Stores a column, times `by`, as a row of a matrix in two numbers.
__device__ __forceinline__ void put_column(Matrix<f16>& to, const float (&x)[C], float by = 1.f) {
  f16* row = to.at(threadIdx.x & 31, 0);
#pragma unroll
  for (int i = 0; i < C; i += 8) {
    u32 high[4], low[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float one = by * x[i + 2 * n], next = by * x[i + 2 * n + 1];
      high[n] = pack<f16>(one, next);
      const float2 rounded = unpack(high[n], f16{});
      low[n] = pack<f16>(one - rounded.x, next - rounded.y);
    }
    *reinterpret_cast<uint4*>(row + i) = {high[0], high[1], high[2], high[3]};
    *reinterpret_cast<uint4*>(row + Matrix<f16>::REST + i) = {low[0], low[1], low[2], low[3]};
  }
}

// Loads rows row + 0...15, columns column + 0...15 as a left operand in two numbers.
__device__ __forceinline__ void load_left(u32 (&a)[2][4], const Matrix<f16>& x, int row, int column) {
  const int lane = own_lane();
#pragma unroll
  for (int n = 0; n < 2; ++n)
    ldmatrix_x4(a[n], x.x + n * x.REST + (row + (lane & 15)) * x.LDA + column + (lane >> 4) * 8);
}
// The same of what is below the diagonal.
__device__ __forceinline__ void load_left(u32 (&a)[2][4], const float (&x)[C][LD], int row, int column) {
  const int lane = own_lane(), g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int i = row + g + n % 2 * 8, j = column + 2 * t + n / 2 * 8;
    const float one = j < i ? x[i][j] : 0.f, next = j + 1 < i ? x[i][j + 1] : 0.f;
    a[0][n] = pack<f16>(one, next);
    const float2 rounded = unpack(a[0][n], f16{});
    a[1][n] = pack<f16>(one - rounded.x, next - rounded.y);
  }
}

// Calls f(i, j, sums of X y_ij and of X y_i(j + 1) for each y); X and all y are lower triangles, `turned` their
// transposes.
template <int THREADS, class X, class F, class... Y>
__device__ __forceinline__ void multiply_triangles(const X& x, F f, const Y&... turned) {
  const int lane = own_lane(), g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int task = threadIdx.x >> 5; task < 8; task += THREADS / 32) {
    const int row = task / 4 * 16, column = task % 4 * 8;
    const int from = (lane >> 4) * Matrix<f16>::REST + (column + (lane & 7)) * Matrix<f16>::LDA + (lane >> 3 & 1) * 8;
    float d[sizeof...(Y)][4] = {};
#pragma unroll
    for (int token = 0; token < C; token += 16) {
      if (token > row || token + 15 < column) continue;
      u32 a[2][4];
      load_left(a, x, row, token);
      int n = 0;
      const auto multiply = [&](const Matrix<f16>& y) {
        u32 b[4];
        ldmatrix_x4(b, y.x + from + token);
        multiply_halves(d[n], a[1], {b[0], b[1]}, f16{});
        multiply_halves(d[n], a[0], {b[2], b[3]}, f16{});
        multiply_halves(d[n], a[0], {b[0], b[1]}, f16{});
        ++n;
      };
      (multiply(turned), ...);
    }
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      float2 sums[sizeof...(Y)];
#pragma unroll
      for (int n = 0; n < int(sizeof...(Y)); ++n) sums[n] = {d[n][2 * down], d[n][2 * down + 1]};
      f(row + g + 8 * down, column + 2 * t, sums);
    }
  }
}

// Stores a warp's 16 channels of a tile, which its lanes have written.
template <int BK, typename T> __device__ __forceinline__ void store_channels(T* to, const T* tile) {
  const int lane = own_lane(), c = int(threadIdx.x) / 32 * 16 + lane % 2 * 8;
  __syncwarp();
#pragma unroll
  for (int n = 0; n < C; n += 16) {
    const int row = n + lane / 2;
    *reinterpret_cast<uint4*>(place<BK>(to, row, c)) = *reinterpret_cast<const uint4*>(place<BK>(tile, row, c));
  }
}
