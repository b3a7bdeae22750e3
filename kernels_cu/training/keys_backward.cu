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
//           parts = sums over a block's tokens: gradients of decay_base, icl_base, value_base (but in the first layer),
//           removal, replacement
// shapes    Keys: as in training/keys_forward.cu. r and all gradients but those of parameters [tokens, H, N]; bonus [H,
//           N]; scores [tokens, H]: pairs (score, dscore); parts [blocks of tokens, 5, H, N], in the first layer 4. An
//           output may be the array of an input. The first layer has no value_logits_gradient: it is null
// grid      LANES neighbouring lanes a head of `tokens_per_block` tokens, one after the other, eight neighbouring
//           channels each; 128 threads
// smem      none
// barriers  none
// numerics  float32, rounded once; sums always in the same order
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N even, up to 8 LANES; a multiple of 8 if ALIGNED
#include "training_keys.cuh"

// From training_keys.cuh:
//   DECAY = e^(-1/2); LEAST_NORM = 1e-12; THREADS = 128
//   HeadLanes: the lanes of a head; load, store: a lane's eight channels; sum: over the lanes
//   head_tokens: the lane's head and tokens
//   kept: 1 + (icl - 1) replacement

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

template <typename T, int LANES, bool ALIGNED>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 4 ? 2 : 3) training_keys_backward(const Args<T> args) {
  const HeadLanes<LANES, ALIGNED> lanes(args.N);
  const HeadTokens work = head_tokens<LANES>(args.tokens, args.H, args.tokens_per_block);
  const Keys<T>& keys = args.keys;
  const i64 channel = work.head * args.N, count = args.tokens * args.H * args.N;
  EightFloats ddecay_base = {}, dicl_base = {}, dvalue_base = {}, dremoval = {}, dreplacement = {};
  for (i64 n_token = 0; n_token < args.tokens_per_block; ++n_token) {  // equally often in all lanes of a warp
    const i64 t = work.begin + n_token, token_head = t * args.H + work.head, index = token_head * args.N;
    const bool computes = lanes.inside() && t < work.end;
    EightFloats k = {}, icl = {}, dkappa = {}, db = {}, r = {}, dr = {}, dkey = {};
    float2 score = {};                 // x: score; y: dscore
    float squares = 0.f, along = 0.f;  // of removed, k removal: its square, its product with dkappa
    if (computes) {
      score = args.scores[token_head];
      // Each half, of the decay and the value, then of the key, loads before it stores: the compiler moves no load over
      // a store, which could be to the same address.
      const EightFloats decay = lanes.load(keys.decay_logits, index), decay_base = lanes.load(keys.decay_base, channel),
                        dgated = lanes.load(args.dgated, index), gate = lanes.load(args.gate, index);
      EightFloats dw = lanes.load(args.w_gradient, index), dv = lanes.load(args.v_gradient, index),
                  dfirst_v = lanes.load_halves(args.first_v_gradient, index, count), v = {}, first_v = {}, share = {},
                  share_base = {};
      if (keys.first_v) {  // not the first layer
        first_v = lanes.load(keys.first_v, index), v = lanes.load(keys.v, index);
        share = lanes.load(keys.value_logits, index), share_base = lanes.load(keys.value_base, channel);
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float opening = sigmoid_for<T>(decay.x[n] + decay_base.x[n]);
        dw.x[n] *= opening * (1.f - opening) * -DECAY;
        ddecay_base.x[n] += dw.x[n];
        dv.x[n] = fmaf(dgated.x[n] * gate.x[n], score.x, dv.x[n]);
      }
      lanes.store(args.decay_logits_gradient, index, dw);
      if (keys.first_v) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const float opening = sigmoid_for<T>(share.x[n] + share_base.x[n]);
          share.x[n] = dv.x[n] * (first_v.x[n] - v.x[n]) * opening * (1.f - opening);
          dvalue_base.x[n] += share.x[n];
          dfirst_v.x[n] = fmaf(dv.x[n], opening, dfirst_v.x[n]);
          dv.x[n] *= 1.f - opening;
        }
        lanes.store(args.value_logits_gradient, index, share);
        lanes.store_halves(args.first_v_gradient, index, count, dfirst_v);
      } else {
#pragma unroll
        for (int n = 0; n < 8; ++n) dv.x[n] += dfirst_v.x[n];
      }
      lanes.store(args.dv, index, dv);

      k = lanes.load(keys.k, index), icl = lanes.load(keys.icl_logits, index);
      dkappa = lanes.load(args.a_gradient, index), db = lanes.load(args.b_gradient, index);
      r = lanes.load(args.r, index), dr = lanes.load(args.r_gradient, index);
      dkey = lanes.load(args.key_gradient, index);
      const EightFloats icl_base = lanes.load(keys.icl_base, channel), removal = lanes.load(keys.removal, channel);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        icl.x[n] = sigmoid_for<T>(icl.x[n] + icl_base.x[n]);
        dkappa.x[n] = icl.x[n] * db.x[n] - dkappa.x[n];
        const float removed = k.x[n] * removal.x[n];
        squares = fmaf(removed, removed, squares), along = fmaf(removed, dkappa.x[n], along);
      }
    }
    const float norm = sqrtf(lanes.sum(squares)), inverse = 1.f / fmaxf(norm, LEAST_NORM);
    along = lanes.sum(along) * (norm > LEAST_NORM ? inverse : 0.f);
    if (!computes) continue;
    const EightFloats bonus = lanes.load(args.bonus, channel), removal = lanes.load(keys.removal, channel),
                      replacement = lanes.load(keys.replacement, channel);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float kappa = k.x[n] * removal.x[n] * inverse, dremoved = (dkappa.x[n] - kappa * along) * inverse,
                  share = kept(icl.x[n], replacement.x[n]), shut = 1.f - icl.x[n], dscored = bonus.x[n] * score.y;
      dr.x[n] = fmaf(k.x[n] * share, dscored, dr.x[n]);  // k share is key
      const float dkey_n = fmaf(r.x[n], dscored, dkey.x[n]), dshare = dkey_n * k.x[n];
      dremoval.x[n] = fmaf(dremoved, k.x[n], dremoval.x[n]);
      dreplacement.x[n] = fmaf(-dshare, shut, dreplacement.x[n]);
      k.x[n] = fmaf(dkey_n, share, dremoved * removal.x[n]);
      icl.x[n] = fmaf(kappa, db.x[n], dshare * replacement.x[n]) * icl.x[n] * shut;
      dicl_base.x[n] += icl.x[n];
    }
    lanes.store(args.dr, index, dr);
    lanes.store(args.icl_logits_gradient, index, icl);  // the gradients have replaced icl and k
    lanes.store(args.dk, index, k);
  }
  if (!lanes.inside() || work.begin >= work.end) return;
  const i64 stride = args.H * args.N, parameters = keys.first_v ? 5 : 4;
  i64 part = work.block * parameters * stride + channel;
  lanes.store(args.parts, part, ddecay_base);
  lanes.store(args.parts, part += stride, dicl_base);
  if (keys.first_v) lanes.store(args.parts, part += stride, dvalue_base);
  lanes.store(args.parts, part += stride, dremoval);
  lanes.store(args.parts, part += stride, dreplacement);
}
