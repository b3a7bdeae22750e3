// what      A tile of tanh(low) up, tokens by 128 channels: what data adds to RWKV-6's mixes and decays.
// numerics  tensor cores on tf32: tanh(low), and float32 weights, as two tf32 numbers each, half weights as they are
// source    Peng et al., 2024, "Eagle and Finch", eq. 14-17
//
// A warp has 16 channels of all tokens: two products' columns, in such an order that a lane has four neighbours.
#include "decode.cuh"
#include "product.cuh"

constexpr int THREADS = 256, COLUMNS = 128, COLUMNS_OF_WARP = 16, TILE_TOKENS = 16;
constexpr int PASS = 32;  // of the rank at a time

template <int TILES> struct LowRank {
  float low[TILES * TILE_TOKENS][PASS + 4], up[PASS][COLUMNS + 8];  // no bank conflicts
};

// Four channels from this one on are the lane's, of tokens lane / 4 and 8 more in every tile.
__device__ __forceinline__ i64 column_of_lane(i64 column) {
  return column + (threadIdx.x >> 5) * COLUMNS_OF_WARP + 4 * (threadIdx.x & 3);
}

template <int TILES> struct LowRankSums {
  float x[TILES][2][4];

  // Of the lane's token lane / 4 + 8 half in a tile.
  __device__ __forceinline__ float4 of(int tile, int half) const {
    const auto& two = x[tile];
    return {two[0][2 * half], two[0][2 * half + 1], two[1][2 * half], two[1][2 * half + 1]};
  }
};

// low has `tokens` rows of `rank` numbers, so far apart; up `rank` rows of D, of which this takes 128 from `column` on.
template <int TILES, typename T>
__device__ __forceinline__ LowRankSums<TILES> low_rank(LowRank<TILES>& s, const float* low, i64 apart, i64 tokens,
                                                       const T* up, i64 rank, i64 D, i64 column) {
  LowRankSums<TILES> sums = {};
  const int warp = threadIdx.x >> 5;
#pragma unroll 1
  for (i64 start = 0; start < rank; start += PASS) {
    constexpr int EIGHTS = PASS * COLUMNS / 8 / THREADS, LOWS = TILES * TILE_TOKENS * PASS / THREADS;
    float eights[EIGHTS][8], lows[LOWS];  // all on their way at once
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) {
      const int at = n * THREADS + threadIdx.x, a = at / (COLUMNS / 8), j = at % (COLUMNS / 8) * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) eights[n][i] = 0.f;
      if (start + a < rank && column + j < D) load8(eights[n], up + (start + a) * D + column + j);
    }
    wait_for_previous();
#pragma unroll
    for (int n = 0; n < LOWS; ++n) {
      const int at = n * THREADS + threadIdx.x, token = at / PASS, a = at % PASS;
      lows[n] = token < tokens && start + a < rank ? low[token * apart + start + a] : 0.f;
    }
    __syncthreads();  // the tiles may change
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) {
      const int at = n * THREADS + threadIdx.x, a = at / (COLUMNS / 8), eight = at % (COLUMNS / 8);
      float* to = &s.up[a][eight / 2 * COLUMNS_OF_WARP + eight % 2 * 4];
#pragma unroll
      for (int i = 0; i < 8; i += 2)
        *reinterpret_cast<float2*>(to + i / 2 % 2 * 8 + i / 4 * 2) = {eights[n][i], eights[n][i + 1]};
    }
#pragma unroll
    for (int n = 0; n < LOWS; ++n) {
      const int at = n * THREADS + threadIdx.x;
      s.low[at / PASS][at % PASS] = tanhf(lows[n]);
    }
    __syncthreads();  // the tiles stand
#pragma unroll
    for (int a = 0; a < PASS; a += 8) {
      Data<T, 2> of_up[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) load_b(of_up[i], &s.up[a][warp * COLUMNS_OF_WARP + 8 * i], COLUMNS + 8);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        Operand<true, 4> of_low;
        load_a(of_low, &s.low[tile * TILE_TOKENS][a], PASS + 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply(sums.x[tile][i], of_low, of_up[i]);
      }
    }
  }
  return sums;
}
