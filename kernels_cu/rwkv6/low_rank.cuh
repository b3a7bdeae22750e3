// what      The second product of a low rank, f(low) up, of some tokens and 128 channels: the part of mixes and decays
//           that depends on the data. f is tanh in RWKV-6.
// numerics  tensor cores: half weights as they are, and f(low) as a sum of PARTS numbers of their type (three bfloat16,
//           or two float16, hold a float32); float32 weights and f(low) as two tf32 numbers each
// source    Peng et al., 2024, "Eagle and Finch", eq. 14-17; Ootomo and Yokota, 2022, for the split
//
// A warp has 16 channels of all tokens, the columns of two products [16, 8], in such an order that a lane has four
// neighbouring channels.
#include "decode.cuh"
#include "product.cuh"

constexpr int THREADS = 256, COLUMNS = 128, COLUMNS_OF_WARP = 16, TILE_TOKENS = 16;

// The index in shared memory of pair p of a warp's 16 channels.
__device__ __forceinline__ int place_of_pair(int p) { return p % 2 * 8 + p / 2 * 2; }

// Operands in shared memory: PASS numbers of the rank at a time.
template <typename T, int TILES, int PARTS, int PASS = 32> struct alignas(16) LowRank {
  T low[PARTS][TILES * TILE_TOKENS][PASS + 8], up[PASS][COLUMNS + 8];  // + 8: no bank conflicts
  typedef uint4 Eight;                                                 // eight channels of a row of `up`

  static __device__ __forceinline__ Eight eight(const T* from) { return *reinterpret_cast<const uint4*>(from); }
  __device__ __forceinline__ void put_up(int a, int column, const Eight& x) {
    T* to = &up[a][column / COLUMNS_OF_WARP * COLUMNS_OF_WARP];
    const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<u32*>(to + place_of_pair(column % COLUMNS_OF_WARP / 2 + i)) = pairs[i];
  }
  __device__ __forceinline__ void put_low(int token, int a, float x) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const T rounded = from_float<T>(x);
      low[part][token][a] = rounded;
      x -= to_float(rounded);
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[TILES][2][4]) const {
    const int lane = threadIdx.x & 31, row = lane % 16, side = lane / 16 * 8;
#pragma unroll
    for (int a = 0; a < PASS; a += 16) {
      u32 of_up[4];
      ldmatrix_x4_trans(of_up, &up[a + row][(threadIdx.x >> 5) * COLUMNS_OF_WARP + side]);
      const u32 columns[2][2] = {{of_up[0], of_up[1]}, {of_up[2], of_up[3]}};
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int part = PARTS - 1; part >= 0; --part) {
          u32 of_low[4];
          ldmatrix_x4(of_low, &low[part][tile * TILE_TOKENS + row][a + side]);
#pragma unroll
          for (int i = 0; i < 2; ++i) multiply_halves(sums[tile][i], of_low, columns[i], T{});
        }
    }
  }
};

template <int TILES, int PARTS, int PASS> struct alignas(16) LowRank<float, TILES, PARTS, PASS> {
  float low[TILES * TILE_TOKENS][PASS + 4], up[PASS][COLUMNS + 8];  // no bank conflicts
  struct Eight {
    float4 first, second;
  };

  static __device__ __forceinline__ Eight eight(const float* from) { return {load4(from), load4(from + 4)}; }
  __device__ __forceinline__ void put_up(int a, int column, const Eight& x) {
    float* to = &up[a][column / COLUMNS_OF_WARP * COLUMNS_OF_WARP];
    const float2 pairs[4] = {
        {x.first.x, x.first.y}, {x.first.z, x.first.w}, {x.second.x, x.second.y}, {x.second.z, x.second.w}};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<float2*>(to + place_of_pair(column % COLUMNS_OF_WARP / 2 + i)) = pairs[i];
  }
  __device__ __forceinline__ void put_low(int token, int a, float x) { low[token][a] = x; }

  __device__ __forceinline__ void multiply(float (&sums)[TILES][2][4]) const {
#pragma unroll
    for (int a = 0; a < PASS; a += 8) {
      Data<float, 2> of_up[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) load_b(of_up[i], &up[a][(threadIdx.x >> 5) * COLUMNS_OF_WARP + 8 * i], COLUMNS + 8);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        Operand<true, 4> of_low;
        load_a(of_low, &low[tile * TILE_TOKENS][a], PASS + 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) ::multiply(sums[tile][i], of_low, of_up[i]);
      }
    }
  }
};

// tanh, as accurate as weights of type T need.
template <typename T> struct Tanh {
  __device__ __forceinline__ float operator()(float x) const { return sizeof(T) == 4 ? tanhf(x) : tanh_approx(x); }
};

// The first of this lane's four channels, of 128 from `column` on. Of every tile it has tokens lane / 4, lane / 4 + 8.
__device__ __forceinline__ i64 column_of_lane(i64 column) {
  return column + (threadIdx.x >> 5) * COLUMNS_OF_WARP + 4 * (threadIdx.x & 3);
}

template <int TILES> struct LowRankSums {
  float x[TILES][2][4];

  // Four channels of token lane / 4 + 8 half of a tile.
  __device__ __forceinline__ float4 of(int tile, int half) const {
    const auto& two = x[tile];
    return {two[0][2 * half], two[0][2 * half + 1], two[1][2 * half], two[1][2 * half + 1]};
  }
};

// Returns activate(low) up. low: `tokens` rows of `rank` numbers, `apart` numbers apart; the sum of `parts` such
// arrays, at most MAX_PARTS, which are `part_apart` numbers apart. up: `rank` rows of D, of which 128 columns from
// `column` on are used. load_more: called after the previous kernel has ended, to start loads that the caller needs
// later.
template <int MAX_PARTS, int TILES, int PARTS, int PASS, typename T, typename A, typename F>
__device__ __forceinline__ LowRankSums<TILES> low_rank(LowRank<T, TILES, PARTS, PASS>& s, const float* low, i64 apart,
                                                       i64 parts, i64 part_apart, i64 tokens, const T* up, i64 rank,
                                                       i64 D, i64 column, const A& activate, const F& load_more) {
  constexpr int ROWS = THREADS / (COLUMNS / 8), EIGHTS = PASS * COLUMNS / 8 / THREADS,
                LOWS = TILES * TILE_TOKENS * PASS / THREADS;
  LowRankSums<TILES> sums = {};
  const auto pass = [&](i64 start, const auto& load_more) {
    typename LowRank<T, TILES, PARTS, PASS>::Eight eights[EIGHTS];
    const int row = threadIdx.x / (COLUMNS / 8), j = threadIdx.x % (COLUMNS / 8) * 8;
    const T* from = up + (start + row) * D + column + j;
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n, from += ROWS * D) {
      eights[n] = {};
      if (start + row + n * ROWS < rank && column + j < D) eights[n] = s.eight(from);
    }
    wait_for_previous();
    float from_parts[MAX_PARTS][LOWS];  // all loads are issued before the first is used
#pragma unroll
    for (int n = 0; n < LOWS; ++n) {
      const int index = n * THREADS + threadIdx.x, token = index / PASS, a = index % PASS;
#pragma unroll
      for (int p = 0; p < MAX_PARTS; ++p) {
        const bool inside = (p == 0 || p < parts) && token < tokens && start + a < rank;
        from_parts[p][n] = inside ? low[p * part_apart + token * apart + start + a] : 0.f;
      }
    }
    load_more();
    __syncthreads();  // the previous pass's operands have been read
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) { s.put_up(row + n * ROWS, j, eights[n]); }
#pragma unroll
    for (int n = 0; n < LOWS; ++n) {
      const int index = n * THREADS + threadIdx.x;
      float sum = from_parts[0][n];
#pragma unroll
      for (int p = 1; p < MAX_PARTS; ++p) sum += from_parts[p][n];
      s.put_low(index / PASS, index % PASS, activate(sum));
    }
    __syncthreads();  // the operands are in shared memory
    s.multiply(sums.x);
  };
  i64 start = 0;
#pragma unroll 1
  for (; start + PASS < rank; start += PASS) pass(start, [] {});
  pass(start, load_more);  // the last one
  return sums;
}
