// what      The gradients of `training_keys_forward`, whose values are computed again, and of the bonus.
// math      With score = sum_N r key bonus and dungated, the gradient of the gate's input
//           (training/bonus_norm_backward):
//           dr = r_gradient + dscore key bonus;  dkey = key_gradient + dscore r bonus;
//           dv' = v_gradient + score dungated;
//           dk = dkey (1 + (icl - 1) replacement) + dremoved removal, where removed = k removal and, with its norm R,
//           dremoved = (dkappa - kappa (sum_N kappa dkappa)) / R,  dkappa = icl b_gradient - a_gradient; the sum counts
//           as 0 where R is at most 1e-12;
//           dicl = kappa b_gradient + dkey k replacement;
//           dv = dv' (1 - share), dshare = dv' (first_v - v), first_v_gradient += dv' share, share being the sigmoid of
//           the value; in the first layer dv = dv' + first_v_gradient, which the other layers have added up.
//           The logits' gradients are those of w, icl and share times the sigmoids' slopes.
//           parts = sums over a warp's tokens: gradients of decay_base, icl_base, value_base, removal, replacement
// shapes    Keys: as in training/keys_forward.cu. r and all gradients but those of parameters [tokens, H, N]; bonus [H,
//           N]; scores [tokens, H]: pairs (score, dscore); parts [blocks of tokens, 5, H, N]. An output may be the
//           array of an input. The first layer has no value_logits_gradient: it is null
// grid      a warp a head of `tokens_per_block` tokens, one after the other, a lane PAIRS pairs of neighbouring
//           channels, the pairs 64 channels apart; 128 threads
// smem      none
// barriers  none
// numerics  float32, rounded once; sums always in the same order
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N even, up to 64 PAIRS
#include "training_keys.cuh"

// From training_keys.cuh:
//   DECAY = e^(-1/2); LEAST_NORM = 1e-12; THREADS = 128, WARPS = 4
//   kept: 1 + (icl - 1) replacement

constexpr int PARAMETERS = 5;  // of which parts are summed

template <typename T> struct Args {
  Keys<T> keys;
  const T* r;
  const T* gate;
  const T* dgated;
  const float* bonus;
  const float2* scores;
  const T* r_gradient;  // these six: the recurrence's gradients
  const T* w_gradient;
  const T* key_gradient;
  const T* v_gradient;
  const T* a_gradient;
  const T* b_gradient;
  float* first_v_gradient;
  T* dr;
  T* dk;
  T* dv;
  T* decay_logits_gradient;
  T* icl_logits_gradient;
  T* value_logits_gradient;
  float* parts;
  i64 tokens, H, N, tokens_per_block;
};

template <typename T, int PAIRS>
__global__ void __launch_bounds__(THREADS, PAIRS == 1 ? 5 : 2) training_keys_backward(const Args<T> args) {
  const WarpTokens work = warp_tokens(args.tokens, args.H, args.tokens_per_block);
  if (work.begin >= args.tokens) return;
  const i64 head = work.head;
  const int lane = threadIdx.x % 32, N = int(args.N);
  float2 sums[PARAMETERS][PAIRS] = {};
  for (i64 t = work.begin; t < work.end; ++t) {
    const i64 token_head = t * args.H + head;
    const float2 score = args.scores[token_head];  // x: score; y: dscore
    float2 k[PAIRS], icl[PAIRS], removed[PAIRS], dkappa[PAIRS], dkey[PAIRS], db[PAIRS];
    float squares = 0.f, along = 0.f;  // of removed: its square, its product with dkappa
#pragma unroll
    for (int n = 0; n < PAIRS; ++n) {
      const int j = 2 * (32 * n + lane);
      k[n] = icl[n] = removed[n] = dkappa[n] = dkey[n] = db[n] = {};
      if (j >= N) continue;
      const i64 index = token_head * N + j, channel = head * N + j;
      // All loads come first: the compiler moves them neither over stores, which could be to the same addresses, nor
      // over the branches of divisions.
      const float2 r = load2(args.r + index), r_gradient = load2(args.r_gradient + index),
                   key_gradient = load2(args.key_gradient + index), v_gradient = load2(args.v_gradient + index),
                   a_gradient = load2(args.a_gradient + index), w_gradient = load2(args.w_gradient + index),
                   dungated = load2(args.dgated + index) * load2(args.gate + index),
                   first_v_gradient = load2(args.first_v_gradient + index), bonus = load2(args.bonus + channel),
                   replacement = load2(args.keys.replacement + channel), removal = load2(args.keys.removal + channel),
                   decay_logits = load2(args.keys.decay_logits + index) + load2(args.keys.decay_base + channel),
                   icl_logits = load2(args.keys.icl_logits + index) + load2(args.keys.icl_base + channel);
      k[n] = load2(args.keys.k + index), db[n] = load2(args.b_gradient + index);
      float2 change = {}, value_logits = {};
      if (args.keys.first_v) {  // not the first layer
        change = load2(args.keys.first_v + index) - load2(args.keys.v + index);
        value_logits = load2(args.keys.value_logits + index) + load2(args.keys.value_base + channel);
      }

      const float2 decay = sigmoid(decay_logits), share = sigmoid(value_logits);
      icl[n] = sigmoid(icl_logits);
      dkappa[n] = icl[n] * db[n] - a_gradient;
      removed[n] = k[n] * removal;
      squares += sum(removed[n] * removed[n]);
      along += sum(removed[n] * dkappa[n]);
      dkey[n] = key_gradient + r * bonus * score.y;
      // k times kept, 1 + (icl - 1) replacement, is key.
      store2(args.dr + index, r_gradient + k[n] * kept(icl[n], replacement) * bonus * score.y);

      const float2 ddecay_logits = w_gradient * decay * (1.f - decay) * -DECAY;
      store2(args.decay_logits_gradient + index, ddecay_logits);
      sums[0][n] = sums[0][n] + ddecay_logits;

      const float2 dv = v_gradient + dungated * score.x;
      if (args.keys.first_v) {
        const float2 dvalue_logits = dv * change * share * (1.f - share);
        store2(args.value_logits_gradient + index, dvalue_logits);
        store2(args.first_v_gradient + index, first_v_gradient + dv * share);
        store2(args.dv + index, dv * (1.f - share));
        sums[2][n] = sums[2][n] + dvalue_logits;
      } else {
        store2(args.dv + index, dv + first_v_gradient);
      }
    }
    const float norm = sqrtf(warp_sum(squares)), inverse = 1.f / fmaxf(norm, LEAST_NORM);
    along = norm > LEAST_NORM ? warp_sum(along) * inverse : warp_sum(along) * 0.f;
#pragma unroll
    for (int n = 0; n < PAIRS; ++n) {
      const int j = 2 * (32 * n + lane);
      if (j >= N) continue;
      const i64 index = token_head * N + j, channel = head * N + j;
      const float2 removal = load2(args.keys.removal + channel), replacement = load2(args.keys.replacement + channel);
      const float2 kappa = removed[n] * inverse, dremoved = (dkappa[n] - kappa * along) * inverse;
      const float2 dicl_logits = (kappa * db[n] + dkey[n] * k[n] * replacement) * icl[n] * (1.f - icl[n]);
      store2(args.icl_logits_gradient + index, dicl_logits);
      store2(args.dk + index, dkey[n] * kept(icl[n], replacement) + dremoved * removal);
      sums[1][n] = sums[1][n] + dicl_logits;
      sums[3][n] = sums[3][n] + dremoved * k[n];
      sums[4][n] = sums[4][n] - dkey[n] * k[n] * (1.f - icl[n]);
    }
  }
  store_parts(args.parts, work, args.H, N, sums);
}
