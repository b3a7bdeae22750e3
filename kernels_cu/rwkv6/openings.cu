// what      Functions of the data for every token and channel: the log of the decay and, with four MATRICES, the
//           learning rate, the gate, and the share of the first layer's value. MATRICES = 1: RWKV-6, its prompts;
//           4: RWKV-7, its steps, a token of each sequence. Prompts of RWKV-7 do not use this kernel
// math      RWKV-6: w = -exp(base_w + tanh(low_w) up_w)
//           RWKV-7: w = -exp(-1/2) sigmoid(base_w + tanh(low_w) up_w);  rate = sigmoid(base_a + low_a up_a)
//           gate = sigmoid(low_g) up_g;  share = sigmoid(base_v + low_v up_v), or -1 in the first layer
// shapes    low [MATRICES, T, R], up [MATRICES, R, D] in the order w a g v, of whose R rows the first W, A, G, Q are
//           used (Q: of v); bases [3, D] of w a v, where v's are -inf in the first layer, or [1, D]; w [T, D]; openings
//           [3, T, D] of rate, gate, share
// grid      a block for every (one of MATRICES, 16 TILES tokens, 128 channels), MATRICES slowest; 256 threads
// smem      LowRank: PASS of the rank at a time
// barriers  two for every PASS: the previous operands have been read | the operands are in shared memory
// numerics  tensor cores (rwkv6/low_rank.cuh), float32
// source    Peng et al., 2024, "Eagle and Finch", eq. 16-17; Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    D a multiple of 8
#include "rwkv6/low_rank.cuh"
#include "rwkv7/time_mix_sums.cuh"

// From the includes:
//   THREADS = 256, COLUMNS = 128 channels of a block, TILE_TOKENS = 16; DECAY_SCALE = exp(-1/2)
//   LowRank: operands in shared memory, activate(low) as the sum of TERMS numbers of T; if T is float32, of two of tf32
//   low_rank<1>(s, low, apart, 1, 0, tokens, up, rank, D, column, activate, [] {}): the product activate(low) up of 128
//     columns, for rows of `low` that are `apart` numbers apart. 1, 1 and 0: `low` is one array, no sum of several;
//     [] {}: nothing more to load. It waits for the previous kernel before it reads `low`; `up` it reads before
//   Tanh<T>: tanhf for float32 weights, else the hardware's approximation

enum Kind { DECAY, RATE, GATE, SHARE, KINDS };  // in the order of low and up; bases have none of GATE

template <typename T> struct Args {
  const float* low;
  const T* up;
  const float* bases;
  float* w;
  float* openings;
  i64 tokens, D, R, W, A, G, Q;
};

// TERMS: of LowRank, above; TILES: of 16 tokens in a block.
template <typename T, int TERMS, int TILES, int MATRICES, int PASS>
__global__ void __launch_bounds__(THREADS, TILES == 2 ? 3 : 2) rwkv6_openings(const Args<T> args) {
  static_assert(MATRICES == 1 || MATRICES == KINDS);
  auto& s = *reinterpret_cast<LowRank<T, TILES, TERMS, PASS>*>(dynamic_smem());
  launch_next();  // the next kernel may begin. What the previous one writes, `low`, may be read from low_rank on
  constexpr int TOKENS = TILES * TILE_TOKENS;
  const i64 R = args.R, D = args.D, across = (D + COLUMNS - 1) / COLUMNS, column = blockIdx.x % across * COLUMNS;
  const i64 tiles = (args.tokens + TOKENS - 1) / TOKENS, first = blockIdx.x / across % tiles * TOKENS;
  const i64 tokens = args.tokens - first;
  // The gate's blocks come first: its rank is the largest.
  const i64 kind = MATRICES == 1 ? DECAY : (blockIdx.x / across / tiles + GATE) % MATRICES;
  const i64 rank = kind == DECAY ? args.W : kind == RATE ? args.A : kind == GATE ? args.G : args.Q;
  const auto activate = [&](float x) {
    return kind == DECAY ? Tanh<T>()(x) : kind == GATE ? 0.5f * Tanh<T>()(0.5f * x) + 0.5f : x;
  };
  // sums.of[tile][half]: the product of this lane's four channels from j on, of token 16 tile + 8 half + `token`.
  const auto sums = low_rank<1>(s, args.low + (kind * args.tokens + first) * R, R, 1, 0, tokens, args.up + kind * R * D,
                                rank, D, column, activate, [] {});

  const i64 token = (threadIdx.x & 31) >> 2, j = column_of_lane(column);
  if (j >= D) return;
  const float4 base = kind == GATE ? float4{} : load4(args.bases + (kind - (kind == SHARE)) * D + j);
  const auto opened = [&](float x, float base) {
    if constexpr (MATRICES == 1) return -expf(base + x);
    if (kind == GATE) return x;
    if (base < -3e38f) return -1.f;
    const float opening = sigmoid(base + x);
    return kind == DECAY ? -DECAY_SCALE * opening : opening;
  };
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 t = tile * TILE_TOKENS + half * 8 + token;
      const i64 index =
          ((first + t) * D + j) / 4 * 4;  // D and j are multiples of 4; `/ 4 * 4` tells the compiler that this is one
      if (t >= tokens) continue;
      const float4 z = sums.of[tile][half];
      const float4 y = {opened(z.x, base.x), opened(z.y, base.y), opened(z.z, base.z), opened(z.w, base.w)};
      if (kind == DECAY) store4(args.w + index, y);
      else store4(args.openings + (kind - 1) * args.tokens * D + index, y);
    }
}
