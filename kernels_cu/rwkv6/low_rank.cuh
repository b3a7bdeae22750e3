// what      The second product of a low rank, f(low) up, of some tokens and 128 channels: the part of mixes and decays
//           that depends on the data. f is tanh in RWKV-6.
// numerics  tensor cores: 16-bit weights as they are, and f(low) as a sum of TERMS numbers of their type (three
//           bfloat16, or two float16, hold a float32); float32 weights and f(low) as two tf32 numbers each
// source    Peng et al., 2024, "Eagle and Finch", eq. 14-17; Ootomo and Yokota, 2022, for the split
//
// A warp has 16 channels of all tokens, the columns of two products [16, 8].
#include "decode.cuh"
#include "product.cuh"

// From product.cuh:
//   Operand, Data: a lane's numbers of an operand as tf32 numbers, split or not; load_a, load_b: from a tile; multiply:
//     d[16, 8] += a b

constexpr int THREADS = 256, COLUMNS = 128, COLUMNS_OF_WARP = 16, TILE_TOKENS = 16;
static_assert(COLUMNS == THREADS / 32 * COLUMNS_OF_WARP);
constexpr int UNIT = 32;  // numbers of the rank that are multiplied at a time; there are zeros behind its end

// Operands in shared memory, of at most PASS numbers of the rank at a time: f(low) [tokens, rank] as a sum of TERMS
// numbers, and up [rank, channels]. TILES: of 16 tokens. put_low stores a token's numbers a and a + 1. In the sums of
// `multiply` a lane has [tile of 16 tokens][8 channels][tokens lane / 4 and 8 later, of each channels 2 (lane % 4) and
// the next].
template <typename T, int TILES, int TERMS, int PASS = 32> struct alignas(16) LowRank {
  static constexpr int CHAINS = TILES == 1 ? TERMS : 1;  // separate sums, so that fewer products wait for each other
  T low[TERMS][TILES * TILE_TOKENS][PASS + 8], up[PASS][COLUMNS + 8];  // + 8: no bank conflicts

  __device__ __forceinline__ void put_low(int token, int a, float2 x) {
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
      const u32 rounded = pack<T>(x.x, x.y);
      *reinterpret_cast<u32*>(&low[term][token][a]) = rounded;
      x = {x.x - to_float(T{u16(rounded)}), x.y - to_float(T{u16(rounded >> 16)})};
    }
  }

  // Adds low up, over the first `depth` numbers of the rank.
  __device__ __forceinline__ void multiply(float (&sums)[CHAINS][TILES][2][4], int depth) const {
    const int lane = threadIdx.x & 31, row = lane % 16, side = lane / 16 * 8;
#pragma unroll 1
    for (int start = 0; start < depth; start += UNIT)
#pragma unroll
      for (int a = start; a < start + UNIT; a += 16) {
        u32 of_up[4];
        ldmatrix_x4_trans(of_up, &up[a + row][(threadIdx.x >> 5) * COLUMNS_OF_WARP + side]);
        const u32 columns[2][2] = {{of_up[0], of_up[1]}, {of_up[2], of_up[3]}};
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
          for (int term = TERMS - 1; term >= 0; --term) {
            u32 of_low[4];
            ldmatrix_x4(of_low, &low[term][tile * TILE_TOKENS + row][a + side]);
#pragma unroll
            for (int i = 0; i < 2; ++i) mma_m16n8k16(sums[term % CHAINS][tile][i], of_low, columns[i], T{});
          }
      }
  }
};

template <int TILES, int TERMS, int PASS> struct alignas(16) LowRank<float, TILES, TERMS, PASS> {
  static constexpr int CHAINS = 1;
  float low[TILES * TILE_TOKENS][PASS + 4], up[PASS][COLUMNS + 8];  // no bank conflicts

  __device__ __forceinline__ void put_low(int token, int a, float2 x) { store2(&low[token][a], x); }

  __device__ __forceinline__ void multiply(float (&sums)[CHAINS][TILES][2][4], int depth) const {
#pragma unroll 1
    for (int start = 0; start < depth; start += UNIT)
#pragma unroll
      for (int a = start; a < start + UNIT; a += 8) {
        Data<float, 2> of_up[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) load_b(of_up[i], &up[a][(threadIdx.x >> 5) * COLUMNS_OF_WARP + 8 * i], COLUMNS + 8);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          Operand<SPLIT, 4> of_low;
          load_a(of_low, &low[tile * TILE_TOKENS][a], PASS + 4);
#pragma unroll
          for (int i = 0; i < 2; ++i) ::multiply(sums[0][tile][i], of_low, of_up[i]);
        }
      }
  }
};

// tanh, as accurate as weights of type T need.
template <typename T> struct Tanh {
  __device__ __forceinline__ float operator()(float x) const { return sizeof(T) == 4 ? tanhf(x) : tanh_approx(x); }
};

// The first of this lane's four channels in LowRankSums, of 128 from `column` on. Of every tile the lane has tokens
// lane / 4 and lane / 4 + 8.
__device__ __forceinline__ i64 column_of_lane(i64 column) {
  return column + (threadIdx.x >> 5) * COLUMNS_OF_WARP + 8 * (threadIdx.x & 1) + 2 * (threadIdx.x & 2);
}

template <int TILES> struct LowRankSums {
  float4 of[TILES][2];  // four channels of token lane / 4 + 8 half of a tile
};

// Returns activate(low) up, of the block's tokens and 128 channels, in registers; all threads call it, and it waits for
// the previous kernel. Two barriers for every PASS numbers of the rank: the previous operands have been read | the
// operands are in shared memory. low: `tokens` rows of `rank` numbers, `apart` numbers apart, given as the sum of
// `parts` such arrays, at most MAX_PARTS, which are `part_apart` numbers apart. up: `rank` rows of D, of which 128
// columns from `column` on are used. load_more: called after the previous kernel has ended, to start loads that the
// caller needs later.
template <int MAX_PARTS, int TILES, int TERMS, int PASS, typename T, typename A, typename F>
__device__ __forceinline__ LowRankSums<TILES> low_rank(LowRank<T, TILES, TERMS, PASS>& s, const float* low, i64 apart,
                                                       i64 parts, i64 part_apart, i64 tokens, const T* up, i64 rank,
                                                       i64 D, i64 column, const A& activate, const F& load_more) {
  typedef LowRank<T, TILES, TERMS, PASS> Operands;
  constexpr int EACH = 16 / sizeof(T), ACROSS = COLUMNS / EACH, ROWS = THREADS / ACROSS;
  constexpr int AT_ONCE = 2 * THREADS / PASS, PAIRS = TILES * TILE_TOKENS / AT_ONCE;  // tokens of all threads, of one
  static_assert(PASS % UNIT == 0 && AT_ONCE * PASS == 2 * THREADS && PAIRS * AT_ONCE == TILES * TILE_TOKENS);
  float sums[Operands::CHAINS][TILES][2][4] = {};
  const int first = threadIdx.x / (PASS / 2), a = threadIdx.x % (PASS / 2) * 2;  // a thread's first token, its pair
  const int first_row = threadIdx.x / ACROSS, j = threadIdx.x % ACROSS * EACH;   // of what the thread copies from `up`
  const int existing = int(min(tokens, i64(TILES * TILE_TOKENS)));               // tokens
  const auto pass = [&](i64 start, const auto& load_more) {
    const int rows = int(min(rank - start, i64(PASS))), depth = (rows + UNIT - 1) / UNIT * UNIT;
    __syncthreads();  // the previous pass's operands have been read
    const T* of_up = up + (start + first_row) * D + column + j;
    for (int row = first_row; row < depth; row += ROWS, of_up += ROWS * D) {
      const bool inside = row < rows && column + j < D;
      cp_async<16>(&s.up[row][j], inside ? of_up : up, inside);
    }
    cp_async_commit();
    wait_for_previous();
    float2 pairs[PAIRS][MAX_PARTS] = {};  // all loads are issued before the first is used
    const float* from = low + first * apart + start + a;
#pragma unroll
    for (int n = 0; n < PAIRS; ++n, from += AT_ONCE * apart)
#pragma unroll
      for (int p = 0; p < MAX_PARTS; ++p) {
        if (p > 0 && p >= parts || first + n * AT_ONCE >= existing) continue;
        if (a < rows) pairs[n][p].x = from[p * part_apart];
        if (a + 1 < rows) pairs[n][p].y = from[p * part_apart + 1];
      }
    load_more();
#pragma unroll
    for (int n = 0; n < PAIRS; ++n) {
      float2 sum = pairs[n][0];
#pragma unroll
      for (int p = 1; p < MAX_PARTS; ++p) sum = {sum.x + pairs[n][p].x, sum.y + pairs[n][p].y};
      if (a < depth) s.put_low(first + n * AT_ONCE, a, {activate(sum.x), activate(sum.y)});
    }
    cp_async_wait<0>();
    __syncthreads();  // the operands are in shared memory
    s.multiply(sums, depth);
  };
  i64 start = 0;
#pragma unroll 1
  for (; start + PASS < rank; start += PASS) pass(start, [] {});
  pass(start, load_more);  // the last one

  LowRankSums<TILES> result;
  const bool odd = threadIdx.x & 1;
  const auto sum = [&](int tile, int i, int n) {
    float sum = 0.f;
#pragma unroll
    for (int chain = Operands::CHAINS - 1; chain >= 0; --chain) sum += sums[chain][tile][i][n];
    return sum;
  };
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 lower = {sum(tile, 0, 2 * half), sum(tile, 0, 2 * half + 1)};
      const float2 upper = {sum(tile, 1, 2 * half), sum(tile, 1, 2 * half + 1)};
      result.of[tile][half] = pairs_of_two_lanes(lower, upper, odd);  // four neighbouring channels
    }
  return result;
}
