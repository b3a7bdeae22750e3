// what      What the backward kernels for every card share: chunks of tokens in shared memory, the decays of a warp's
//           channels, and states as they are kept between chunks.
// math      a_t = exp g_t. In a sub-chunk of 8 tokens: from its start to where token i reads, prod_{m<=i} a_m (RWKV-6:
//           m < i); from after token j to its end, prod_{m>j} a_m; and both about its middle, one of them an inverse.
// shapes    a warp has channels, and all tokens of them: a lane has channel g = lane / 4, and of every sub-chunk the
//           pair of tokens 2t, 2t + 1, t = lane % 4, as in fragment.cuh.
//           states [direction, B, heads, NC, tiles of K, tiles of V, 8, 8, 8, 8]: 64 x 64 in matrices of 8 x 8
// numerics  Decays are multiplied, not subtracted, so that gates of any size leave the others as they are. About the
//           middle a gate counts as at least -20, so that inverses stay in range: e^-20 of a token passes a reset
//           there.
#include "fragment.cuh"
#include "read_order.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int CHUNK = 64, SUB = 8, SUBS = CHUNK / SUB;  // tokens; sub-chunks a chunk
constexpr int TILE = 64;                                // channels and columns of a tile of a state
constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr float LEAST = 2.0611536e-9f;  // e^-20

// Rows of so many values lie so far apart that those of ldmatrix, and of pairs, touch every bank once.
template <typename T> constexpr int PAD = sizeof(T) == 2 ? 8 : 4;
template <typename T, int COLS> constexpr int LD = COLS + PAD<T>;

// [ROWS, COLS] of (batch, head): rows first..., columns column...; zeros where the row is past `stop` or the column
// past `width`. With `vectors` (rows start on 16 bytes, and `width` columns end on them) it comes in the background.
template <int ROWS, int COLS, int LD, typename T>
__device__ __forceinline__ void fetch_rows(T* s, const Rows<const T>& x, i64 batch, i64 head, i64 first, i64 stop,
                                           i64 column, i64 width, bool vectors) {
  const int rows = stop - first < ROWS ? int(stop - first) : ROWS;
  const int columns = width - column < COLS ? int(width - column) : COLS;
  if (vectors) {
    constexpr int PIECE = 16 / sizeof(T), ACROSS = COLS / PIECE, DOWN = THREADS / ACROSS;
    const int row = threadIdx.x / ACROSS, col = threadIdx.x % ACROSS * PIECE;
    const bool there = rows > 0 && col < columns;
    const T* from = x.row(batch, head, there ? first + row : 0) + (there ? column + col : 0);
#pragma unroll
    for (int n = 0; n < ROWS / DOWN; ++n, from += DOWN * x.t)  // nothing is read where it is not valid
      cp_async<16>(s + (row + n * DOWN) * LD + col, from, there && row + n * DOWN < rows);
  } else {
#pragma unroll 1
    for (int at = threadIdx.x; at < ROWS * COLS; at += THREADS) {
      const int row = at / COLS, col = at % COLS;
      const bool inside = row < rows && col < columns;
      s[row * LD + col] = inside ? x.row(batch, head, first + row)[column + col] : from_float<T>(0.f);
    }
  }
}

// What scores of one sub-chunk are multiplied by between kernels, where both sides have gates: e^-20 of either, and
// e^-70 about the middle, would leave float32's range.
constexpr float NEAR = 4194304.f;

// Of rows that kernels leave for one another: all pieces whole, zeros where the arrays end.
__device__ __forceinline__ i64 padded_width(i64 width) { return (width + 7) / 8 * 8; }

// The other way: a tile's rows and columns that there are go to memory.
template <int ROWS, int COLS, int LD, typename T>
__device__ __forceinline__ void store_rows(const Rows<T>& x, const T* s, i64 batch, i64 head, i64 first, i64 stop,
                                           i64 column, i64 width, bool vectors) {
  const int rows = stop - first < ROWS ? int(stop - first) : ROWS;
  const int columns = width - column < COLS ? int(width - column) : COLS;
  if (vectors) {
    constexpr int PIECE = 16 / sizeof(T), ACROSS = COLS / PIECE, DOWN = THREADS / ACROSS;
    const int row = threadIdx.x / ACROSS, col = threadIdx.x % ACROSS * PIECE;
    T* to = x.row(batch, head, first + row) + column + col;
#pragma unroll
    for (int n = 0; n < ROWS / DOWN; ++n, to += DOWN * x.t)
      if (row + n * DOWN < rows && col < columns)
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(s + (row + n * DOWN) * LD + col);
  } else {
#pragma unroll 1
    for (int at = threadIdx.x; at < ROWS * COLS; at += THREADS) {
      const int row = at / COLS, col = at % COLS;
      if (row < rows && col < columns) x.row(batch, head, first + row)[column + col] = s[row * LD + col];
    }
  }
}

// ---- decays -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float2 operator*(float a, float2 x) { return {a * x.x, a * x.y}; }
__device__ __forceinline__ float2 operator*(float2 a, float2 x) { return {a.x * x.x, a.y * x.y}; }
__device__ __forceinline__ float2 operator+(float2 a, float2 x) { return {a.x + x.x, a.y + x.y}; }
__device__ __forceinline__ float2 decays_of(float2 gates) { return {decay_of(gates.x), decay_of(gates.y)}; }

// Of a lane's four values, what those before it, behind it and all of them make.
struct Around {
  float before, behind, all;
};
template <class F> __device__ __forceinline__ Around around(float x, float nothing, F join) {
  const int t = threadIdx.x & 3;
  const float other = __shfl_xor_sync(0xffffffffu, x, 1), two = join(x, other);
  const float far = __shfl_xor_sync(0xffffffffu, two, 2);
  return {join(t & 1 ? other : nothing, t & 2 ? far : nothing), join(t & 1 ? nothing : other, t & 2 ? nothing : far),
          join(two, far)};
}
__device__ __forceinline__ Around products(float x) {
  return around(x, 1.f, [](float a, float b) { return a * b; });
}
__device__ __forceinline__ Around sums(float x) {
  return around(x, 0.f, [](float a, float b) { return a + b; });
}

// Of a lane's channel over a whole sub-chunk: the sum of gates, in float32, goes into one exp.
__device__ __forceinline__ float whole_decay(float2 gates) { return decay_of(sums(gates.x + gates.y).all); }

// A lane's pair of a sub-chunk: from its start to where the tokens read, from after them to its end, and over all of
// it.
template <class ReadOrder> struct Decays {
  float2 start, end;
  float all;

  __device__ __forceinline__ explicit Decays(float2 a) {
    const Around others = products(a.x * a.y);
    all = others.all;
    end = {a.y * others.behind, others.behind};
    if (ReadOrder::reads_before_write) start = {others.before, others.before * a.x};
    else start = {others.before * a.x, others.before * a.x * a.y};
  }
};

// About the middle of the sub-chunk: what queries and keys are multiplied by.
template <class ReadOrder> struct Middle {
  // About e^10, for GLA, whose factors would lie between e^-80 and e^60: between e^-70 and e^70 what tf32 leaves of
  // them is in range too, as it is of RWKV-6's, of e^-60 to e^80.
  static constexpr float CENTRE = ReadOrder::reads_before_write ? 1.f : 16384.f;
  float2 queries, keys;

  __device__ __forceinline__ explicit Middle(float2 a) {
    const int t = threadIdx.x & 3;
    const bool behind = t & 2, beside = behind == bool(t & 1);  // the middle; it, with no pair between
    const float x = at_least(a.x, LEAST), y = at_least(a.y, LEAST), xy = x * y;
    const float other = __shfl_xor_sync(0xffffffffu, xy, 1);
    const float base = (behind ? CENTRE : 1.f / CENTRE) * (beside ? other : 1.f);
    // one side as it is, the other inverted: queries behind the middle, keys before it
    const float2 queries_behind = {base * x, base * xy}, keys_before = {base * y, base};
    if (ReadOrder::reads_before_write) {
      const float2 near = {behind ? base : keys_before.x, behind ? queries_behind.x : base};
      const float2 far = {inverse(behind ? queries_behind.x : base * xy),
                          inverse(behind ? queries_behind.y : keys_before.x)};
      queries = {behind ? near.x : far.x, behind ? near.y : far.y};
      keys = {behind ? far.x : near.x, behind ? far.y : near.y};
    } else {
      const float2 near = {behind ? queries_behind.x : keys_before.x, behind ? queries_behind.y : base};
      const float2 far = {inverse(near.x), inverse(near.y)};
      queries = {behind ? near.x : far.x, behind ? near.y : far.y};
      keys = {behind ? far.x : near.x, behind ? far.y : near.y};
    }
  }
};

// The product of all[from...to-1].
template <int N> __device__ __forceinline__ float product_of(const float (&all)[N], int from, int to) {
  float x = 1.f;
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (n >= from && n < to) x *= all[n];
  return x;
}

// ---- states that are kept ---------------------------------------------------------------------------------------

// A tile of 64 x 64: matrices of 8 x 8, side by side, then one below the other.
__device__ __forceinline__ i64 tile_at(const Shape& shape, i64 heads, bool backwards, i64 batch, i64 head, i64 chunk,
                                       int k_tile, int v_tile) {
  const i64 k_tiles = (shape.K + TILE - 1) / TILE, v_tiles = (shape.V + TILE - 1) / TILE;
  const i64 state = ((backwards * shape.B + batch) * heads + head) * shape.NC + chunk;
  return ((state * k_tiles + k_tile) * v_tiles + v_tile) * (TILE * TILE);
}
__device__ __forceinline__ int matrix_at(int row, int column) { return (row * (TILE / 8) + column) * 64; }

// Two right operands side by side from such a tile, of matrices that are 8 rows deep.
template <class R, typename E> __device__ __forceinline__ void load_matrices(R (&b)[2], const E* tile) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if constexpr (sizeof(E) == 2) {
    u32 r[4];
    ldmatrix_x4_trans(r, tile + matrix_at(lane >> 3 & 1, lane >> 4) + (lane & 7) * 8);
#pragma unroll
    for (int m = 0; m < 4; ++m) b[m >> 1].set(m & 1, r[m], E{});
  } else {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float* matrix = tile + matrix_at(m & 1, m >> 1);
      b[m >> 1].set(m & 1, float2{matrix[2 * t * 8 + g], matrix[(2 * t + 1) * 8 + g]});
    }
  }
}
