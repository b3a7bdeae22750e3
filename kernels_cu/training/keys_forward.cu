// what      RWKV-7's recurrence's arguments in a training step, from products of the time mix.
// math      w = -exp(-1/2) sigmoid(decay_base + decay_logits);  icl = sigmoid(icl_base + icl_logits);
//           mixed_v = v + (first_v - v) sigmoid(value_base + value_logits);
//           kappa = k removal / max(|k removal|, 1e-12), the norm over each head;  a = -kappa;  b = kappa icl;
//           key = k (1 + (icl - 1) replacement). icl is the paper's a, the in-context learning rate; first_v is v of
//           the first layer; removal and replacement are the paper's xi and alpha
// shapes    k v decay_logits icl_logits value_logits first_v w key mixed_v a b [tokens, H, N]; bases, removal and
//           replacement [H, N]. The first layer has no first_v, value_logits, value_base and mixed_v: they are null
// grid      rwkv7/cuda_grad.py launches LANES neighbouring lanes a (token, head), eight neighbouring channels each; 128
//           threads
// numerics  float32, rounded once
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N even, up to 8 LANES; a multiple of 8 if ALIGNED
#include "training_keys.cuh"

// From training_keys.cuh:
//   DECAY = e^(-1/2); LEAST_NORM = 1e-12; THREADS = 128
//   HeadLanes: the lanes of a head; load, store: a lane's eight channels (EightFloats); sum: over the lanes; inside():
//     whether the lane has channels. Keys: the arrays that are read
//   kept: 1 + (icl - 1) replacement. sigmoid_for<T>: the sigmoid, as accurate as results of type T need

template <typename T> struct Args {
  Keys<T> keys;
  T* w;
  T* key;
  T* mixed_v;
  T* a;
  T* b;
  i64 tokens, H, N;
};

template <typename T, int LANES, bool ALIGNED>
__global__ void __launch_bounds__(THREADS) training_keys_forward(const Args<T> args) {
  const i64 token_head = (i64(blockIdx.x) * THREADS + threadIdx.x) / LANES;
  const HeadLanes<LANES, ALIGNED> lanes(args.N);
  const bool inside = lanes.inside() && token_head < args.tokens * args.H;
  const i64 index = token_head * args.N, channel = token_head % args.H * args.N;
  const Keys<T>& keys = args.keys;
  EightFloats removed = {}, icl = {};
  float squares = 0.f;
  if (inside) {
    // All loads come first: the compiler does not move them over the branches of divisions.
    const EightFloats k = lanes.load(keys.k, index), decay = lanes.load(keys.decay_logits, index),
                      decay_base = lanes.load(keys.decay_base, channel), icl_base = lanes.load(keys.icl_base, channel),
                      removal = lanes.load(keys.removal, channel), replacement = lanes.load(keys.replacement, channel);
    icl = lanes.load(keys.icl_logits, index);
    EightFloats v = {}, first_v = {}, value = {}, value_base = {};
    if (keys.first_v) {  // not the first layer
      v = lanes.load(keys.v, index), first_v = lanes.load(keys.first_v, index);
      value = lanes.load(keys.value_logits, index), value_base = lanes.load(keys.value_base, channel);
    }
    EightFloats w, key;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      w.x[n] = -DECAY * sigmoid_for<T>(decay.x[n] + decay_base.x[n]);
      icl.x[n] = sigmoid_for<T>(icl.x[n] + icl_base.x[n]);
      key.x[n] = k.x[n] * kept(icl.x[n], replacement.x[n]);
      removed.x[n] = k.x[n] * removal.x[n];
      squares = fmaf(removed.x[n], removed.x[n], squares);
    }
    lanes.store(args.w, index, w);
    lanes.store(args.key, index, key);
    if (keys.first_v) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
        v.x[n] = fmaf(first_v.x[n] - v.x[n], sigmoid_for<T>(value.x[n] + value_base.x[n]), v.x[n]);
      lanes.store(args.mixed_v, index, v);
    }
  }
  const float inverse = 1.f / fmaxf(sqrtf(lanes.sum(squares)), LEAST_NORM);
  if (!inside) return;
  EightFloats a, b;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float kappa = removed.x[n] * inverse;
    a.x[n] = -kappa, b.x[n] = kappa * icl.x[n];
  }
  lanes.store(args.a, index, a);
  lanes.store(args.b, index, b);
}
