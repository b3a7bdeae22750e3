// what      The gradients of RWKV-7's group norm with bonus and gate (`rwkv6_gated_norm` with BONUS); the norm and the
//           score are computed again.
// math      with n = GroupNorm_H(o), score = sum_N r key bonus, ungated = n weight + bias + score v, y = ungated gate:
//           dgate = dy ungated, dungated = dy gate, do = the norm's pullback of dungated weight,
//           dscore = sum_N dungated v;
//           parts = sums over a warp's tokens: dweight = dungated n, dbias = dungated, dbonus = dscore r key, which
//           column_sums.cu adds up; keys_backward.cu makes the gradients of r, key and v from scores
// shapes    dy o gate r key v do dgate [tokens, H, N]; weight bias bonus [H, N]; scores [tokens, H]: pairs (score,
//           dscore); parts [blocks of tokens, 3, H, N]
// grid      a warp a head of `tokens_per_block` tokens, one after the other, a lane PAIRS pairs of neighbouring
//           channels, the pairs 64 channels apart; 128 threads
// smem      none
// barriers  none
// numerics  float32, rounded once; the variance from centred values; sums always in the same order
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N even, up to 64 PAIRS
#include "training_keys.cuh"

// From training_keys.cuh:
//   THREADS = 128, WARPS = 4

constexpr int PARAMETERS = 3;  // of which parts are summed

template <typename T> struct Args {
  const T* dy;
  const T* o;
  const T* gate;
  const T* r;
  const T* key;
  const T* v;
  const float* weight;
  const float* bias;
  const float* bonus;
  T* do_;
  T* dgate;
  float2* scores;
  float* parts;
  i64 tokens, H, N, tokens_per_block;
  double eps;
};

template <typename T, int PAIRS>
__global__ void __launch_bounds__(THREADS) training_bonus_norm_backward(const Args<T> args) {
  const WarpTokens work = warp_tokens(args.tokens, args.H, args.tokens_per_block);
  if (work.begin >= args.tokens) return;
  const i64 head = work.head;
  const int lane = threadIdx.x % 32, N = int(args.N);
  const float inverse_N = 1.f / N;
  float2 sums[PARAMETERS][PAIRS] = {};
  for (i64 t = work.begin; t < work.end; ++t) {
    const i64 token_head = t * args.H + head;
    float2 x[PAIRS], r_key[PAIRS], v[PAIRS], dungated[PAIRS];  // x: o, then centred, then normed
    float total = 0.f, squares = 0.f, score = 0.f, dscore = 0.f, mean_gradient = 0.f, along = 0.f;
#pragma unroll
    for (int n = 0; n < PAIRS; ++n) {
      const int j = 2 * (32 * n + lane);
      x[n] = r_key[n] = v[n] = dungated[n] = {};
      if (j >= N) continue;
      const i64 index = token_head * N + j;
      x[n] = load2(args.o + index), v[n] = load2(args.v + index);
      r_key[n] = load2(args.r + index) * load2(args.key + index);
      dungated[n] = load2(args.dy + index) * load2(args.gate + index);
      total += sum(x[n]);
      score += sum(r_key[n] * load2(args.bonus + head * N + j));
      dscore += sum(dungated[n] * v[n]);
    }
    const float mean = warp_sum(total) * inverse_N;
    score = warp_sum(score), dscore = warp_sum(dscore);
#pragma unroll
    for (int n = 0; n < PAIRS; ++n) {
      if (2 * (32 * n + lane) < N) x[n] = {x[n].x - mean, x[n].y - mean};
      squares += sum(x[n] * x[n]);
    }
    const float scale = 1.f / sqrtf(warp_sum(squares) * inverse_N + float(args.eps));
#pragma unroll
    for (int n = 0; n < PAIRS; ++n) {
      const int j = 2 * (32 * n + lane);
      if (j >= N) continue;
      const i64 index = token_head * N + j, channel = head * N + j;
      const float2 weight = load2(args.weight + channel);
      x[n] = x[n] * scale;
      store2(args.dgate + index, load2(args.dy + index) * (x[n] * weight + load2(args.bias + channel) + v[n] * score));
      sums[0][n] = sums[0][n] + dungated[n] * x[n];
      sums[1][n] = sums[1][n] + dungated[n];
      sums[2][n] = sums[2][n] + r_key[n] * dscore;
      dungated[n] = dungated[n] * weight;
      mean_gradient += sum(dungated[n]);
      along += sum(dungated[n] * x[n]);
    }
    mean_gradient = warp_sum(mean_gradient) * inverse_N, along = warp_sum(along) * inverse_N;
#pragma unroll
    for (int n = 0; n < PAIRS; ++n) {
      const int j = 2 * (32 * n + lane);
      if (j >= N) continue;
      const float2 centred = {dungated[n].x - mean_gradient, dungated[n].y - mean_gradient};
      store2(args.do_ + token_head * N + j, (centred - x[n] * along) * scale);
    }
    if (lane == 0) args.scores[token_head] = {score, dscore};
  }
  store_parts(args.parts, work, args.H, N, sums);
}
