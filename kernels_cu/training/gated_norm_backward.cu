// what      The gradients of `rwkv6_gated_norm`, the group norm with gate, and with BONUS that of RWKV-7; the norm and
//           the score are computed again.
// math      with n = GroupNorm_H(o), ungated = n weight + bias, y = ungated silu(gate):
//           dgate = dy ungated silu'(gate), dungated = dy silu(gate), do = the norm's pullback of dungated weight;
//           with BONUS: score = sum_N r key bonus, ungated = n weight + bias + score v, the identity in place of silu,
//           dscore = sum_N dungated v;
//           parts = sums over a run of tokens: dweight = dungated n, dbias = dungated, with BONUS dbonus = dscore r
//           key, which column_sums.cu adds up; keys_backward.cu makes the gradients of r, key and v from scores
// shapes    dy o gate r key v do dgate [tokens, H, N]; weight bias bonus [H, N]; scores [tokens, H]: pairs (score,
//           dscore); parts [runs of tokens, PARAMETERS, H, N]. r, key, v, bonus and scores only with BONUS
// grid      rwkv/cuda_grad.py launches for every (run of tokens_per_block tokens, head), runs
//           slowest, LANES neighbouring lanes, a lane for eight neighbouring channels; they take the run's tokens one
//           by one. 128 threads a block
// numerics  float32, rounded once; the variance from centred values; sums always in the same order
// source    Peng et al., 2024, "Eagle and Finch", eq. 19; Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N even, up to 8 LANES; a multiple of 8 if ALIGNED
#include "training_heads.cuh"

// From training_heads.cuh:
//   THREADS = 128
//   HeadLanes: the lanes of a head. j: a lane's first channel; inside(): whether j < N. load gives the lane's eight
//     channels, 0 beyond N; store leaves out those beyond N: both only for lanes inside. sum: over the head's lanes
//   HeadTokens: of a lane `head`, `block`, the number of the run of tokens, and its tokens begin ... end - 1

template <bool BONUS> constexpr int PARAMETERS = BONUS ? 3 : 2;  // of which parts are summed

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

template <typename T, int LANES, bool ALIGNED, bool BONUS>
__global__ void __launch_bounds__(THREADS) training_gated_norm_backward(const Args<T> args) {
  const HeadLanes<LANES, ALIGNED> lanes(args.N);
  const HeadTokens work = head_tokens<LANES>(args.tokens, args.H, args.tokens_per_block);
  const i64 channel = work.head * args.N;
  const float inverse_N = 1.f / args.N, eps = float(args.eps);
  const bool inside = lanes.inside();
  EightFloats weight = {}, bias = {}, bonus = {}, dweight = {}, dbias = {}, dbonus = {};
  if (inside) {
    weight = lanes.load(args.weight, channel), bias = lanes.load(args.bias, channel);
    if constexpr (BONUS) bonus = lanes.load(args.bonus, channel);
  }
  for (i64 n_token = 0; n_token < args.tokens_per_block; ++n_token) {  // equally often in all lanes of a warp
    const i64 t = work.begin + n_token, token_head = t * args.H + work.head, index = token_head * args.N;
    const bool computes = inside && t < work.end;
    EightFloats o = {}, r_key = {}, v = {}, dy = {}, gate = {};
    float total = 0.f, squares = 0.f, score = 0.f, dscore = 0.f, mean_gradient = 0.f, along = 0.f;
    if (computes) {
      o = lanes.load(args.o, index);
      if constexpr (BONUS) v = lanes.load(args.v, index);
      dy = lanes.load(args.dy, index), gate = lanes.load(args.gate, index);
      EightFloats key = {};
      if constexpr (BONUS) r_key = lanes.load(args.r, index), key = lanes.load(args.key, index);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        total += o.x[n];
        if constexpr (BONUS) {
          r_key.x[n] *= key.x[n];
          score = fmaf(r_key.x[n], bonus.x[n], score);
          dscore = fmaf(dy.x[n] * gate.x[n], v.x[n], dscore);
        }
      }
    }
    const float mean = lanes.sum(total) * inverse_N;
    if constexpr (BONUS) score = lanes.sum(score), dscore = lanes.sum(dscore);
    if (computes)
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        o.x[n] = lanes.j + n < lanes.N ? o.x[n] - mean : 0.f;
        squares = fmaf(o.x[n], o.x[n], squares);
      }
    const float scale = 1.f / sqrtf(lanes.sum(squares) * inverse_N + eps);
    EightFloats dgate, dn;  // dn: the gradient of the norm before its weight
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      // The factor by which y's gate multiplies, and its slope: of gate, or of silu(gate).
      const float opening = BONUS ? 1.f : sigmoid(gate.x[n]), factor = gate.x[n] * opening;
      const float slope = BONUS ? 1.f : fmaf(factor, 1.f - opening, opening);
      const float normed = o.x[n] * scale, dungated = dy.x[n] * factor, y = fmaf(normed, weight.x[n], bias.x[n]);
      dgate.x[n] = dy.x[n] * (BONUS ? y + v.x[n] * score : y) * slope;
      dweight.x[n] = fmaf(dungated, normed, dweight.x[n]);
      dbias.x[n] += dungated;
      if constexpr (BONUS) dbonus.x[n] = fmaf(r_key.x[n], dscore, dbonus.x[n]);
      dn.x[n] = dungated * weight.x[n];
      mean_gradient += dn.x[n];
      along = fmaf(dn.x[n], normed, along);
      o.x[n] = normed;
    }
    mean_gradient = lanes.sum(mean_gradient) * inverse_N, along = lanes.sum(along) * inverse_N;
    if (!computes) continue;
#pragma unroll
    for (int n = 0; n < 8; ++n) dn.x[n] = (dn.x[n] - mean_gradient - o.x[n] * along) * scale;
    lanes.store(args.dgate, index, dgate);
    lanes.store(args.do_, index, dn);
    if (BONUS && lanes.j == 0) args.scores[token_head] = {score, dscore};
  }
  if (!inside || work.begin >= work.end) return;
  const i64 stride = args.H * args.N, part = work.block * PARAMETERS<BONUS> * stride + channel;
  lanes.store(args.parts, part, dweight);
  lanes.store(args.parts, part + stride, dbias);
  if constexpr (BONUS) lanes.store(args.parts, part + 2 * stride, dbonus);
}
