// what      The gradients of rwkv7/keys.cu, whose values are computed again; r, key and v get their
//           gradients through the bonus term, too. The gradient of `bonus` itself: training/gated_norm_backward.cu
// math      dx and x_gradient are the gradient of x. The forward pass: s(x) is the sigmoid of x's logits plus its base,
//             w = -e^(-1/2) s(decay);  icl = s(icl);  share = s(value);  v' = v + (first_v - v) share;
//             removed = k removal;  R = max(|removed|, 1e-12), the norm over a head;  kappa = removed / R;
//             a = -kappa;  b = kappa icl;  key = k (1 + (icl - 1) replacement);
//             score = sum_N r key bonus, the factor of v' in the output before the gate.
//           r_gradient, w_gradient, key_gradient, v_gradient, a_gradient and b_gradient come from the recurrence,
//           score and dscore from gated_norm_backward.cu. This kernel computes
//             dr = r_gradient + dscore key bonus;  dkey = key_gradient + dscore r bonus;
//             dv' = v_gradient + score dgated gate;
//             dkappa = icl b_gradient - a_gradient;
//             dremoved = (dkappa - kappa (sum_N kappa dkappa)) / R, the sum 0 where |removed| is at most 1e-12;
//             dk = dkey (1 + (icl - 1) replacement) + dremoved removal;  dicl = kappa b_gradient + dkey k replacement;
//             dv = dv' (1 - share);  dshare = dv' (first_v - v);  first_v_gradient = dv' share.
//           The first layer has no share: dv = dv' + the sum of the other layers' first_v_gradient.
//           The gradient of logits is w_gradient (-e^(-1/2)), dicl or dshare, times s (1 - s), the sigmoid's slope.
//           parts = sums over a block's tokens: gradients of decay_base, icl_base, value_base (not in the first layer),
//           removal, replacement
// shapes    k, v, first_v, logits, r, gate, dgated and all gradients but those of parameters [tokens, H, N]; bases,
//           removal, replacement and bonus [H, N] float32; scores [tokens, H]: pairs (score, dscore); parts [blocks of
//           tokens, 5, H, N], in the first layer [.., 4, ..]. The first layer has no first_v, value_logits and
//           value_logits_gradient: they are null; bases are [3, H, N] of decay, icl and value, there [2, H, N].
//           first_v_gradients: in the first layer an input [later_layers,
//           tokens, H, N], in others an output [tokens, H, N]. dr, dk and icl_logits_gradient may be arrays of inputs.
//           The other outputs are stored before k, icl_logits, r and the gradients of r, key, a and b are loaded, and
//           must not be the arrays of these
// grid      rwkv7/cuda_grad.py launches LANES neighbouring lanes for a head: they walk over `tokens_per_block` tokens,
//           each lane with eight neighbouring channels; 128 threads
// numerics  float32, rounded once; sums always in the same order
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N even, up to 8 LANES; a multiple of 8 if ALIGNED
#include "rwkv7/time_mix_sums.cuh"
#include "training_heads.cuh"

// From time_mix_sums.cuh: DECAY_SCALE = e^(-1/2), LEAST_NORM = 1e-12
// From training_heads.cuh: THREADS = 128
//   HeadLanes: the lanes of a head; load, store: a lane's eight channels (EightFloats); sum: over the lanes; inside():
//     whether the lane has channels
//   head_tokens: the lane's head and its tokens begin ... end - 1; block: the number of this range of tokens
// From decode.cuh: sigmoid_for<T>: the sigmoid, as accurate as results of type T need

template <typename T> struct Args {
  const T* k;
  const T* v;
  const T* decay_logits;
  const T* icl_logits;
  const T* value_logits;
  const T* first_v;
  const float* bases;
  const float* removal;
  const float* replacement;
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
  T* first_v_gradients;
  T* dr;
  T* dk;
  T* dv;
  T* decay_logits_gradient;
  T* icl_logits_gradient;
  T* value_logits_gradient;
  float* parts;
  i64 tokens, H, N, tokens_per_block, later_layers;
};

template <typename T>
constexpr int BLOCKS = sizeof(T) == 4 ? 2 : 3;  // of a multiprocessor that registers have room for

template <typename T, int LANES, bool ALIGNED>
__global__ void __launch_bounds__(THREADS, BLOCKS<T>) training_keys_backward(const Args<T> args) {
  const HeadLanes<LANES, ALIGNED> lanes(args.N);
  const HeadTokens work = head_tokens<LANES>(args.tokens, args.H, args.tokens_per_block);
  // channel: the head's first one, of all `width` ones of a token; count: the numbers of an array [tokens, H, N].
  const i64 channel = work.head * args.N, width = args.H * args.N, count = args.tokens * width;
  EightFloats ddecay_base = {}, dicl_base = {}, dvalue_base = {}, dremoval = {}, dreplacement = {};
  for (i64 n_token = 0; n_token < args.tokens_per_block; ++n_token) {  // equally often in all lanes of a warp
    const i64 t = work.begin + n_token, token_head = t * args.H + work.head, index = token_head * args.N;
    const bool computes = lanes.inside() && t < work.end;
    EightFloats k = {}, icl = {}, dkappa = {}, db = {}, r = {}, dr = {}, dkey = {};
    float2 score = {};                 // x: score; y: dscore
    float squares = 0.f, along = 0.f;  // sums over this lane's channels: removed^2, and removed dkappa
    if (computes) {
      score = args.scores[token_head];
      // First the decay and the value, then the key: each part loads all its inputs before its first store. The
      // compiler moves no load before a store, which could be to the same address.
      const EightFloats decay = lanes.load(args.decay_logits, index), decay_base = lanes.load(args.bases, channel),
                        dgated = lanes.load(args.dgated, index), gate = lanes.load(args.gate, index);
      EightFloats dw = lanes.load(args.w_gradient, index), dv = lanes.load(args.v_gradient, index), v = {},
                  first_v = {}, value = {}, value_base = {};
      if (args.first_v) {  // not the first layer
        first_v = lanes.load(args.first_v, index), v = lanes.load(args.v, index);
        value = lanes.load(args.value_logits, index), value_base = lanes.load(args.bases, channel + 2 * width);
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float sigmoid = sigmoid_for<T>(decay.x[n] + decay_base.x[n]);  // s(decay)
        dw.x[n] *= sigmoid * (1.f - sigmoid) * -DECAY_SCALE;
        ddecay_base.x[n] += dw.x[n];
        dv.x[n] = fmaf(dgated.x[n] * gate.x[n], score.x, dv.x[n]);
      }
      lanes.store(args.decay_logits_gradient, index, dw);
      if (args.first_v) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const float share = sigmoid_for<T>(value.x[n] + value_base.x[n]);  // s(value)
          // Until here `value` has the value's logits, from here on their gradient.
          value.x[n] = dv.x[n] * (first_v.x[n] - v.x[n]) * share * (1.f - share);
          dvalue_base.x[n] += value.x[n];
          first_v.x[n] = dv.x[n] * share;  // the gradient has replaced first_v
          dv.x[n] *= 1.f - share;
        }
        lanes.store(args.value_logits_gradient, index, value);
        lanes.store(args.first_v_gradients, index, first_v);
      } else {
#pragma unroll 4
        for (i64 layer = 0; layer < args.later_layers; ++layer) {
          const EightFloats dfirst_v = lanes.load(args.first_v_gradients, layer * count + index);
#pragma unroll
          for (int n = 0; n < 8; ++n) dv.x[n] += dfirst_v.x[n];
        }
      }
      lanes.store(args.dv, index, dv);

      k = lanes.load(args.k, index), icl = lanes.load(args.icl_logits, index);
      dkappa = lanes.load(args.a_gradient, index), db = lanes.load(args.b_gradient, index);
      r = lanes.load(args.r, index), dr = lanes.load(args.r_gradient, index);
      dkey = lanes.load(args.key_gradient, index);
      const EightFloats icl_base = lanes.load(args.bases, channel + width), removal = lanes.load(args.removal, channel);
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
    const EightFloats bonus = lanes.load(args.bonus, channel), removal = lanes.load(args.removal, channel),
                      replacement = lanes.load(args.replacement, channel);
    // dkey_over_k: the gradient of key_over_k = 1 + (icl - 1) replacement; dscored: dscore bonus.
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float kappa = k.x[n] * removal.x[n] * inverse, dremoved = (dkappa.x[n] - kappa * along) * inverse,
                  shut = 1.f - icl.x[n], key_over_k = 1.f - shut * replacement.x[n], dscored = bonus.x[n] * score.y;
      dr.x[n] = fmaf(k.x[n] * key_over_k, dscored, dr.x[n]);
      const float dkey_n = fmaf(r.x[n], dscored, dkey.x[n]), dkey_over_k = dkey_n * k.x[n];
      dremoval.x[n] = fmaf(dremoved, k.x[n], dremoval.x[n]);
      dreplacement.x[n] = fmaf(-dkey_over_k, shut, dreplacement.x[n]);
      k.x[n] = fmaf(dkey_n, key_over_k, dremoved * removal.x[n]);
      icl.x[n] = fmaf(kappa, db.x[n], dkey_over_k * replacement.x[n]) * icl.x[n] * shut;
      dicl_base.x[n] += icl.x[n];
    }
    lanes.store(args.dr, index, dr);
    lanes.store(args.icl_logits_gradient, index, icl);  // the gradients have replaced icl and k
    lanes.store(args.dk, index, k);
  }
  if (!lanes.inside() || work.begin >= work.end) return;
  const int parameters = args.first_v ? 5 : 4;
  i64 part = work.block * parameters * width + channel;
  lanes.store(args.parts, part, ddecay_base);
  lanes.store(args.parts, part += width, dicl_base);
  if (args.first_v) lanes.store(args.parts, part += width, dvalue_base);
  lanes.store(args.parts, part += width, dremoval);
  lanes.store(args.parts, part += width, dreplacement);
}
