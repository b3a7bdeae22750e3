// what      What the gradients within a chunk of 32 tokens and 64 channels share where channels have gates of their
//           own. A token reads the state as rows of two kinds, and is written to it as columns of one or two kinds.
// math      Terms of pairs of tokens (i, j), j < i, of a kind of rows and one of columns, with the decay D_ij between
//           both: of a row  sum_j pair_ij D_ij column_j,  of a column  sum_i pair_ij D_ij row_i
// numerics  Pairs that a border parts meet there: rows are decayed from it, columns up to it; these and pairs are the
//           sum of two bfloat16, of which three products are taken
#include "delta/backward_storage.cuh"
#include "delta/chunk.cuh"

constexpr int THREADS = 2 * KEPT, HALF = C / 2;  // HALF: tokens on a side of the border between 16
constexpr int BLOCK = 8, BLOCKS = C / BLOCK;     // tokens whose pairs are added up one by one

// What a kernel has in shared memory of pairs and of blocks.
template <int KINDS_OF_COLUMNS> struct Borders {
  static constexpr int ROWS = 2, COLUMNS = KINDS_OF_COLUMNS;  // kinds; terms of columns come behind those of rows
  // Pairs that a border of 16, of 8 tokens parts, of a kind of rows and one of columns, each in two numbers.
  bf16 borders[2][ROWS * COLUMNS][2][HALF * HALF];
  float over_blocks[BLOCKS][KEPT];                   // decays over blocks
  float reads[BLOCKS][KEPT], written[BLOCKS][KEPT];  // dg's terms of S, of C: sums over a block's rows, its columns
  float across[2][KEPT];  // `reads` of the last block, `written` of the first, with those of the border of 16 tokens
  float dots[KEPT];       // <S, C>
};

// A place in a matrix of `borders`.
__device__ __forceinline__ int border_place(int i, int j) { return i * HALF + ((j / 8 ^ i >> 2 & 1) * 8 | j % 8); }

// The place of neighbouring channels of a token in terms [C, KEPT].
__device__ __forceinline__ int term_place(int i, int c) { return i * KEPT + (c ^ (i & 3) * 8); }

__device__ __forceinline__ float2 times(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }
__device__ __forceinline__ float2 plus(float2 x, float2 y) { return {x.x + y.x, x.y + y.y}; }
__device__ __forceinline__ float2 plus_times(float2 sum, float2 x, float2 y) {
  return {fmaf(x.x, y.x, sum.x), fmaf(x.y, y.y, sum.y)};
}
__device__ __forceinline__ float2 plus_times(float2 sum, float x, float2 y) { return plus_times(sum, {x, x}, y); }

__device__ __forceinline__ float2 pair_at(const float* x) { return *reinterpret_cast<const float2*>(x); }
template <typename T> __device__ __forceinline__ float2 pair_at(const T* x) { return unpack_pair(x); }

// Starts to copy a chunk's rows of 64 numbers, by one warp; zeros behind the last of them.
template <typename T>
__device__ __forceinline__ void fetch_rows(T* tile, const T* from, i64 stride, int rows, int width, int bytes) {
  const int lane = own_lane(), first = lane / 8, c = lane % 8 * 8;
  if (bytes == 16) {
    const char* piece = reinterpret_cast<const char*>(from + first * stride + c);
    const i64 down = 4 * stride * i64(sizeof(T));
    rows = c < width ? rows - first : 0;
#pragma unroll
    for (int n = 0; n < C; n += 4, piece += down) cp_async<16>(place<KEPT>(tile, first + n, c), piece, n < rows);
  } else {
#pragma unroll 1
    for (int at = lane; at < C * KEPT; at += 32) {
      const int row = at / KEPT, column = at % KEPT;
      *place<KEPT>(tile, row, column) = row < rows && column < width ? from[row * stride + column] : from_float<T>(0.f);
    }
  }
}

// Adds <S, C> of 16 columns of V, which ldmatrix_x4_trans has loaded for the warp's 16 channels, to the diagonals of
// `dots`.
template <typename T>
__device__ __forceinline__ void multiply_diagonals(float (&dots)[4], const u32 (&of_S)[4], const u32 (&of_C)[4]) {
  const u32 a[4] = {of_S[0], of_S[2], of_S[1], of_S[3]};
  float d[2][4] = {{dots[0], dots[1]}, {0.f, 0.f, dots[2], dots[3]}};
#pragma unroll
  for (int n = 0; n < 2; ++n) multiply_halves(d[n], a, {of_C[2 * n], of_C[2 * n + 1]}, T{});
  dots[0] = d[0][0], dots[1] = d[0][1], dots[2] = d[1][2], dots[3] = d[1][3];
}

// Stores <S, C> of the warp's channels from the diagonals.
__device__ __forceinline__ void put_diagonals(float (&to)[KEPT], const float (&dots)[4]) {
  const int g = own_lane() >> 2, odd = g & 1, at = threadIdx.x / 32 * 16 + g;
  if (g / 2 == (own_lane() & 3)) { to[at] = odd ? dots[1] : dots[0], to[at + 8] = odd ? dots[3] : dots[2]; }
}

// Stores a lane's neighbouring products of pairs: row g of block `row`, column 2t of block `column` of 8 tokens. Calls
// `within` for pairs of one block. Stores zeros instead of what is above the diagonal: the matrix of borders of 8
// tokens has them there.
template <class S, class F>
__device__ __forceinline__ void put_pair_of_blocks(S& s, int matrix, int row, int column, float x, float y, F within) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const auto put = [&](int border, int i, int j, float x, float y) {
    put_two<bf16, HALF * HALF>(s.borders[border][matrix][0] + border_place(8 * i + g, 8 * j + 2 * t), x, y);
  };
  if (row == column) within(g, 2 * t);
  else if (row < column) put(1, row / 2, 1 - column / 2, 0.f, 0.f);
  else if (row >= 2 && column < 2) put(0, row - 2, column, x, y);
  else put(1, row / 2, column / 2, x, y);
}

// Decays terms of rows, or OF_COLUMNS, of columns, beside borders of TOKENS tokens to these, and adds those of pairs
// that the borders part; a warp has 16 channels. S: Borders, with `terms` of all kinds [C, KEPT], and with rows and
// columns `decayed` to the border, in two numbers.
template <int TOKENS, bool OF_COLUMNS, class S> __device__ __forceinline__ void cross_borders(S& s) {
  constexpr int OWN = OF_COLUMNS ? S::COLUMNS : S::ROWS, OTHERS = OF_COLUMNS ? S::ROWS : S::COLUMNS;  // kinds
  constexpr int FIRST = OF_COLUMNS ? S::ROWS : 0, own = OF_COLUMNS ? 0 : TOKENS, other = TOKENS - own;
  const int lane = own_lane(), g = lane >> 2, t = lane & 3, channel = threadIdx.x / 32 * 16;
  const auto before = [](int n) { return TOKENS == BLOCK ? n + (n & 8) : n; };  // token n of those before a border
  float d[OWN][2][4];
  const auto each = [&](auto f) {
#pragma unroll
    for (int n = 0; n < OWN; ++n)
#pragma unroll
      for (int across = 0; across < 2; ++across)
#pragma unroll
        for (int down = 0; down < 2; ++down)
          f(d[n][across] + 2 * down, s.terms[FIRST + n], before(g + 8 * down) + own, channel + 8 * across + 2 * t,
            down);
  };
  each([&](float* to, const float* terms, int i, int c, int down) {
    const auto over = [&](int n) { return pair_at(&s.over_blocks[n][c]); };
    float2 decay = over(TOKENS == BLOCK ? 2 * down + OF_COLUMNS : 2 * OF_COLUMNS);
    if (TOKENS > BLOCK) decay = times(decay, over(2 * OF_COLUMNS + 1));
    const float2 x = times(decay, pair_at(terms + term_place(i, c)));
    to[0] = x.x, to[1] = x.y;
  });
#pragma unroll
  for (int m = 0; m < OTHERS; ++m) {
    u32 b[2][4];
#pragma unroll
    for (int number = 0; number < 2; ++number)
      ldmatrix_x4_trans(b[number],
                        place<KEPT>(s.decayed[m][number], before(lane & 15) + other, channel + (lane >> 4) * 8));
#pragma unroll
    for (int n = 0; n < OWN; ++n)
#pragma unroll
      for (int number = 0; number < 2; ++number) {
        const int row = OF_COLUMNS ? m : n, column = OF_COLUMNS ? n : m;  // kinds
        const bf16* matrix = s.borders[TOKENS == BLOCK][row * S::COLUMNS + column][number];
        u32 a[4];
        if (OF_COLUMNS) ldmatrix_x4_trans(a, matrix + border_place((lane & 7) + (lane >> 4) * 8, (lane >> 3 & 1) * 8));
        else ldmatrix_x4(a, matrix + border_place(lane & 15, (lane >> 4) * 8));
#pragma unroll
        for (int across = 0; across < 2; ++across) {
          mma_bf16(d[n][across], a, {b[0][2 * across], b[0][2 * across + 1]});
          if (number == 0) mma_bf16(d[n][across], a, {b[1][2 * across], b[1][2 * across + 1]});
        }
      }
  }
  each([&](float* from, float* terms, int i, int c, int) { put_pair(terms + term_place(i, c), {from[0], from[1]}); });
}

// Stores neighbouring numbers of a block's rows, of which there are `rows`, with so many columns from these on.
template <typename T, class F>
__device__ __forceinline__ void store_block(T* to, i64 stride, int rows, int columns, int bytes, F value) {
  if (columns <= 0) return;
  if (bytes >= int(2 * sizeof(T))) {
#pragma unroll
    for (int n = 0; n < BLOCK; ++n, to += stride)
      if (n < rows) put_pair(to, value(n));
  } else {
#pragma unroll
    for (int n = 0; n < BLOCK; ++n, to += stride) {
      if (n < rows) to[0] = from_float<T>(value(n).x);
      if (n < rows && columns > 1) to[1] = from_float<T>(value(n).y);
    }
  }
}
