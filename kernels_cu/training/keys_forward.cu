// what      RWKV-7's recurrence's arguments in a training step, from products of the time mix.
// math      w = -exp(-1/2) sigmoid(decay_base + decay_logits);  icl = sigmoid(icl_base + icl_logits);
//           mixed_v = v + (first_v - v) sigmoid(value_base + value_logits);
//           kappa = k removal / max(|k removal|, 1e-12), the norm over each head;  a = -kappa;  b = kappa icl;
//           key = k (1 + (icl - 1) replacement). icl is the paper's a, the in-context learning rate; first_v is v of
//           the first layer; removal and replacement are the paper's xi and alpha
// shapes    k v decay_logits icl_logits value_logits first_v w key mixed_v a b [tokens, H, N]; bases, removal and
//           replacement [H, N]. The first layer has no first_v, value_logits, value_base and mixed_v: they are null
// grid      a warp a (token, head), a lane PAIRS pairs of neighbouring channels, the pairs 64 channels apart; 128
//           threads
// smem      none
// barriers  none
// numerics  float32, rounded once
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N even, up to 64 PAIRS
#include "training_keys.cuh"

// From training_keys.cuh:
//   DECAY = e^(-1/2); LEAST_NORM = 1e-12; THREADS = 128, WARPS = 4
//   kept: 1 + (icl - 1) replacement

template <typename T> struct Args {
  Keys<T> keys;
  T* w;
  T* key;
  T* mixed_v;
  T* a;
  T* b;
  i64 tokens, H, N;
};

template <typename T, int PAIRS> __global__ void __launch_bounds__(THREADS) training_keys_forward(const Args<T> args) {
  const i64 token_head = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
  if (token_head >= args.tokens * args.H) return;
  const int lane = threadIdx.x % 32, N = int(args.N);
  const i64 first = token_head * N, first_channel = token_head % args.H * N;
  float2 removed[PAIRS], icl[PAIRS];
  float squares = 0.f;
#pragma unroll
  for (int n = 0; n < PAIRS; ++n) {
    const int j = 2 * (32 * n + lane);
    removed[n] = icl[n] = {};
    if (j >= N) continue;
    const i64 index = first + j, channel = first_channel + j;
    // All loads come first: the compiler does not move them over the branches of divisions.
    const float2 k = load2(args.keys.k + index), removal = load2(args.keys.removal + channel),
                 replacement = load2(args.keys.replacement + channel),
                 decay_logits = load2(args.keys.decay_logits + index) + load2(args.keys.decay_base + channel),
                 icl_logits = load2(args.keys.icl_logits + index) + load2(args.keys.icl_base + channel);
    float2 v = {}, first_v = {}, value_logits = {};
    if (args.keys.first_v) {  // not the first layer
      v = load2(args.keys.v + index), first_v = load2(args.keys.first_v + index);
      value_logits = load2(args.keys.value_logits + index) + load2(args.keys.value_base + channel);
    }

    icl[n] = sigmoid(icl_logits);
    removed[n] = k * removal;
    squares += sum(removed[n] * removed[n]);
    store2(args.w + index, sigmoid(decay_logits) * -DECAY);
    store2(args.key + index, k * kept(icl[n], replacement));  // kept: 1 + (icl - 1) replacement
    if (args.keys.first_v) store2(args.mixed_v + index, v + (first_v - v) * sigmoid(value_logits));
  }
  const float inverse = 1.f / fmaxf(sqrtf(warp_sum(squares)), LEAST_NORM);
#pragma unroll
  for (int n = 0; n < PAIRS; ++n) {
    const int j = 2 * (32 * n + lane);
    if (j >= N) continue;
    const float2 kappa = removed[n] * inverse;
    store2(args.a + first + j, kappa * -1.f);
    store2(args.b + first + j, kappa * icl[n]);
  }
}
