// what      The log of the decay of every token and channel.
// math      w = -exp(decay + tanh(low) up)
// shapes    low [T, W], up [W, D], decay [D], w [T, D]
// grid      a block for every (32 tokens, 128 channels), tokens slowest; 256 threads
// smem      LowRank: 32 of the rank at a time
// barriers  two a pass over 32 of the rank: the tiles may change, and are there
// numerics  tensor cores (rwkv6/low_rank.cuh), float32
// source    Peng et al., 2024, "Eagle and Finch", eq. 16-17
// limits    D a multiple of 8
#include "rwkv6/low_rank.cuh"

constexpr int TILES = 2, PARTS = 2;

template <typename T> struct Args {
  const float* low;
  const T* up;
  const float* decay;
  float* w;
  i64 tokens, D, W;
};

template <typename T> __global__ void __launch_bounds__(THREADS) rwkv6_log_decay(const Args<T> args) {
  auto& s = *reinterpret_cast<LowRank<T, TILES, PARTS>*>(dynamic_smem());
  launch_next();
  const i64 W = args.W, D = args.D, across = (D + COLUMNS - 1) / COLUMNS, column = blockIdx.x % across * COLUMNS;
  const i64 first = blockIdx.x / across * (TILES * TILE_TOKENS), tokens = args.tokens - first;
  const auto sums = low_rank<1>(s, args.low + first * W, W, 1, 0, tokens, args.up, W, D, column, Tanh<T>(), [] {});

  const i64 token = (threadIdx.x & 31) >> 2, j = column_of_lane(column);
  if (j >= D) return;
  const float4 decay = load4(args.decay + j);
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 t = tile * TILE_TOKENS + half * 8 + token;
      const float4 z = sums.of(tile, half);
      if (t < tokens)
        store4(args.w + (first + t) * D + j,
               {-expf(decay.x + z.x), -expf(decay.y + z.y), -expf(decay.z + z.z), -expf(decay.w + z.w)});
    }
}
