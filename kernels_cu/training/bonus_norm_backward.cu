// what      The gradients of RWKV-7's group norm with bonus and gate (`rwkv6_gated_norm` with BONUS); the norm and the
//           score are computed again.
// math      with n = GroupNorm_H(o), score = sum_N r key bonus, ungated = n weight + bias + score v, y = ungated gate:
//           dgate = dy ungated, dungated = dy gate, do = the norm's pullback of dungated weight,
//           dscore = sum_N dungated v;
//           parts = sums over a run of tokens: dweight = dungated n, dbias = dungated, dbonus = dscore r key, which
//           column_sums.cu adds up; keys_backward.cu makes the gradients of r, key and v from scores
// shapes    dy o gate r key v do dgate [tokens, H, N]; weight bias bonus [H, N]; scores [tokens, H]: pairs (score,
//           dscore); parts [runs of tokens, 3, H, N]
// grid      rwkv7/cuda_grad.py launches for every (run of tokens_per_block tokens, head), runs slowest, LANES
//           neighbouring lanes, a lane for eight neighbouring channels; they take the run's tokens one by one. 128
//           threads a block
// smem      none
// barriers  none
// numerics  float32, rounded once; the variance from centred values; sums always in the same order
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N even, up to 8 LANES; a multiple of 8 if ALIGNED
#include "training_keys.cuh"

// From training_keys.cuh:
//   THREADS = 128
//   HeadLanes: the lanes of a head. j: a lane's first channel; inside(): whether j < N. load gives the lane's eight
//     channels, 0 beyond N; store leaves out those beyond N: both only for lanes inside. sum: over the head's lanes
//   HeadTokens: of a lane `head`, `block`, the number of the run of tokens, and its tokens begin ... end - 1

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

template <typename T, int LANES, bool ALIGNED>
__global__ void __launch_bounds__(THREADS) training_bonus_norm_backward(const Args<T> args) {
  const HeadLanes<LANES, ALIGNED> lanes(args.N);
  const HeadTokens work = head_tokens<LANES>(args.tokens, args.H, args.tokens_per_block);
  const i64 channel = work.head * args.N;
  const float inverse_N = 1.f / args.N, eps = float(args.eps);
  const bool inside = lanes.inside();
  EightFloats weight = {}, bias = {}, bonus = {}, dweight = {}, dbias = {}, dbonus = {};
  if (inside) {
    weight = lanes.load(args.weight, channel), bias = lanes.load(args.bias, channel);
    bonus = lanes.load(args.bonus, channel);
  }
  for (i64 n_token = 0; n_token < args.tokens_per_block; ++n_token) {  // equally often in all lanes of a warp
    const i64 t = work.begin + n_token, token_head = t * args.H + work.head, index = token_head * args.N;
    const bool computes = inside && t < work.end;
    EightFloats o = {}, r_key = {}, v = {}, dy = {}, gate = {};
    float total = 0.f, squares = 0.f, score = 0.f, dscore = 0.f, mean_gradient = 0.f, along = 0.f;
    if (computes) {
      o = lanes.load(args.o, index), v = lanes.load(args.v, index);
      dy = lanes.load(args.dy, index), gate = lanes.load(args.gate, index);
      r_key = lanes.load(args.r, index);
      const EightFloats key = lanes.load(args.key, index);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        r_key.x[n] *= key.x[n];
        total += o.x[n];
        score = fmaf(r_key.x[n], bonus.x[n], score);
        dscore = fmaf(dy.x[n] * gate.x[n], v.x[n], dscore);
      }
    }
    const float mean = lanes.sum(total) * inverse_N;
    score = lanes.sum(score), dscore = lanes.sum(dscore);
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
      const float normed = o.x[n] * scale, dungated = dy.x[n] * gate.x[n];
      dgate.x[n] = dy.x[n] * (fmaf(normed, weight.x[n], bias.x[n]) + v.x[n] * score);
      dweight.x[n] = fmaf(dungated, normed, dweight.x[n]);
      dbias.x[n] += dungated;
      dbonus.x[n] = fmaf(r_key.x[n], dscore, dbonus.x[n]);
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
    if (lanes.j == 0) args.scores[token_head] = {score, dscore};
  }
  if (!inside || work.begin >= work.end) return;
  const i64 stride = args.H * args.N, part = work.block * PARAMETERS * stride + channel;
  lanes.store(args.parts, part, dweight);
  lanes.store(args.parts, part + stride, dbias);
  lanes.store(args.parts, part + 2 * stride, dbonus);
}
