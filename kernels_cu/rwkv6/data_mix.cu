// what      The five inputs of the time mix, their token shift mixed by the data.
// math      mixed_c = xx + d (maa_c + tanh(low_c) up_c), for the inputs c = w k v r g; xx is LN(x) of a token, d the
//           previous token's LN(x) less xx
// shapes    low [P, T, 5, A], to be summed over P parts, A the rank, up [5, A, D], maa [5, D], xx d [T, D], mixed
//           [TERMS, 5, T, D], the sum of TERMS arrays; T: all tokens of some prompts, or one token of each sequence
// grid      a block for every (16 TILES tokens, INPUTS of the five, 128 channels), tokens slowest; 256 threads
// smem      LowRank: 32 of the rank at a time
// barriers  two for every 32: the previous operands have been read | the operands are in shared memory
// numerics  tensor cores (rwkv6/low_rank.cuh), float32; rounded once, or in three terms exactly
// source    Peng et al., 2024, "Eagle and Finch", eq. 14-15
// limits    D a multiple of 8; P = 1, or up to 8 if TILES and INPUTS are 1 and X has 16 bits
#include "rwkv6/low_rank.cuh"

// From the includes:
//   THREADS = 256, COLUMNS = 128 channels of a block, TILE_TOKENS = 16
//   LowRank, low_rank: the product tanh(low) up
//   Tanh: as exact as the weights need; store4_terms: four numbers as sums of TERMS terms

constexpr int MIXES = 5;  // w k v r g

template <typename T, typename X> struct Args {
  const float* low;
  const T* up;
  const float* maa;
  const float* xx;
  const float* d;
  X* mixed;
  i64 tokens, D, A, P;
};

// The most parts of `low`. Blocks that take several are small, so that several share a multiprocessor: otherwise the
// loads of all parts would take all registers.
template <typename X, int TILES, int INPUTS>
constexpr int MOST_PARTS = sizeof(X) == 2 && TILES == 1 && INPUTS == 1 ? 8 : 1;

// LOW_TERMS: numbers whose sum is a number of tanh(low), see LowRank; TERMS: of a number of `mixed`.
template <typename T, typename X, int LOW_TERMS, int TILES, int INPUTS, int TERMS>
__global__ void __launch_bounds__(THREADS, MOST_PARTS<X, TILES, INPUTS> > 1 ? 3 : 1)
    rwkv6_data_mix(const Args<T, X> args) {
  auto& s = *reinterpret_cast<LowRank<T, TILES, LOW_TERMS>*>(dynamic_smem());
  launch_next();  // the next kernel may begin
  const i64 A = args.A, D = args.D, across = (D + COLUMNS - 1) / COLUMNS, rest = blockIdx.x / across;
  const i64 column = blockIdx.x % across * COLUMNS, input = rest % (MIXES / INPUTS) * INPUTS;
  const i64 first = rest / (MIXES / INPUTS) * (TILES * TILE_TOKENS), tokens = args.tokens - first;
  const i64 token = (threadIdx.x & 31) >> 2, j = column_of_lane(column);
  constexpr bool EARLY = TILES == 1 && INPUTS == 1 && TERMS == 1;  // whether xx and d are loaded before the product
  float4 xx[TILES][2], d[TILES][2];
  const auto load_tokens = [&] {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i64 t = tile * TILE_TOKENS + half * 8 + token, index = (first + t) * D + j;
        if (t < tokens && j < D) xx[tile][half] = load4(args.xx + index), d[tile][half] = load4(args.d + index);
      }
  };
#pragma unroll 1
  for (int n = 0; n < INPUTS; ++n) {
    const i64 c = input + n;
    const float4 maa = j < D ? load4(args.maa + c * D + j) : float4{};  // long before it is needed
    const auto load_early = [&] {
      if (EARLY && n == 0) load_tokens();
    };
    // sums.of[tile][half]: tanh(low) up of this lane's four channels from j on, of token 16 tile + 8 half + `token`.
    // load_early is called when the previous kernel has ended.
    const auto sums = low_rank<MOST_PARTS<X, TILES, INPUTS>>(s, args.low + (first * MIXES + c) * A, MIXES * A, args.P,
                                                             args.tokens * MIXES * A, tokens, args.up + c * A * D, A, D,
                                                             column, Tanh<T>(), load_early);
    if (!EARLY && n == 0) load_tokens();
    if (j >= D) continue;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i64 t = tile * TILE_TOKENS + half * 8 + token, index = (first + t) * D + j;
        if (t >= tokens) continue;
        store4_terms<TERMS>(args.mixed + c * args.tokens * D + index, MIXES * args.tokens * D,
                            fma4(d[tile][half], plus(maa, sums.of[tile][half]), xx[tile][half]));
      }
  }
}
