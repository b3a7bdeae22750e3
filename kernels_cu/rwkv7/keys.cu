// what      RWKV-7's time mix in prompts and in training: the recurrence's log decay w, key, vectors a and b and value
//           mixed_v of each token, from its products.
// math      w = -exp(-1/2) sigmoid(base_w + decay_logits);  icl = sigmoid(base_a + icl_logits), the in-context learning
//           rate, the paper's a;  mixed_v = v + (first_v - v) sigmoid(base_v + value_logits), first_v being the first
//           layer's v;  kappa = k removal / max(|k removal|, LEAST_NORM), the norm over each head;  a = -kappa;
//           b = kappa icl;  key = k (1 + (icl - 1) replacement). removal and replacement: the paper's xi and alpha
// shapes    k v ..._logits first_v w key mixed_v a b [T, H, N]; bases [3, H, N] of w, a, v; removal replacement [H, N].
//           Each of w, key, mixed_v, a and b may be an array that is read, but for first_v: a lane loads all numbers of
//           a channel before it stores one there. The first layer's v stays as it is. In prompts the bases of v are
//           -inf there, and v is stored in first_v, which the other layers read; in training value_logits, first_v and
//           mixed_v are null there, and bases [2, H, N], behind which other numbers are read and not used
// grid      rwkv7/cuda_grad.py and rwkv7/cuda_prefill.py launch 64 / WIDTH lanes a (token, head), a lane GROUPS groups
//           of WIDTH neighbouring channels; 128 threads. If the grid does not have all tokens, blocks go on with later
//           ones (LaneOfHead)
// numerics  float32, rounded once
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N a multiple of WIDTH, up to 64 GROUPS; for WIDTH 8 arrays start on 16 bytes
#include "rwkv6/lanes_of_heads.cuh"
#include "rwkv7/time_mix_sums.cuh"

// From the includes:
//   LaneOfHead: token_head, this lane's head of a token, and its first channel. load_group, store_group: WIDTH
//     neighbours; CHANNELS_APART = 64: the distance of a lane's groups; THREADS = 128
//   LEAST_NORM = 1e-12: the least |k removal|; channel_of_key, mixed_value: the math of one channel, but for norms
//   sum_over_lanes: over a head's lanes

template <typename X> struct Args {
  const X* k;
  const X* v;
  const X* decay_logits;
  const X* icl_logits;
  const X* value_logits;
  X* first_v;
  X* w;
  X* key;
  X* mixed_v;
  X* a;
  X* b;
  const float* bases;
  const float* removal;
  const float* replacement;
  i64 token_heads, H, N;  // token_heads: T H
};

template <typename X, int WIDTH, int GROUPS> __global__ void __launch_bounds__(THREADS) rwkv7_keys(const Args<X> args) {
  launch_next();        // the next kernel may begin
  wait_for_previous();  // nothing is read before
  LaneOfHead<WIDTH> lane;
  const int N = int(args.N);
  const i64 first_channel = lane.token_head % args.H * N + lane.channel;  // of [H, N]
  struct Parameters {
    float w[WIDTH], a[WIDTH], v[WIDTH], removal[WIDTH], replacement[WIDTH];  // w, a, v: the bases
  };
  // Those of a group of channels; 0 beyond N.
  const auto load_parameters = [&](int n) {
    Parameters to = {};
    if (const int j = CHANNELS_APART * n; lane.channel + j < N) {
      const i64 channel = first_channel + j;
      load_group(to.w, args.bases + channel);
      load_group(to.a, args.bases + args.H * N + channel);
      load_group(to.v, args.bases + 2 * args.H * N + channel);
      load_group(to.removal, args.removal + channel);
      load_group(to.replacement, args.replacement + channel);
    }
    return to;
  };
  const Parameters of_first_group = load_parameters(0);  // those of other groups would take too many registers
  const bool is_first_layer = !args.value_logits || args.bases[2 * args.H * N] < -3e38f;
  X* const to_v = is_first_layer ? args.first_v : args.mixed_v;  // null in training's first layer
#pragma unroll 1
  for (; lane.some_head_is_below(args.token_heads); lane.go_on()) {
    const i64 first = lane.token_head * N + lane.channel;  // of [T, H, N]
    const int channels = lane.token_head < args.token_heads ? N - lane.channel : 0;
    float removed[GROUPS][WIDTH], icl[GROUPS][WIDTH], squares = 0.f;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      const int j = CHANNELS_APART * n;
      if (j >= channels) continue;
      const i64 index = first + j;
      float k[WIDTH], v[WIDTH], w[WIDTH], share[WIDTH] = {}, first_v[WIDTH] = {};
      load_group(k, args.k + index);
      load_group(v, args.v + index);
      load_group(w, args.decay_logits + index);
      load_group(icl[n], args.icl_logits + index);
      if (!is_first_layer) {
        load_group(share, args.value_logits + index);
        load_group(first_v, args.first_v + index);
      }
      const Parameters parameters = n == 0 ? of_first_group : load_parameters(n);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        const ChannelOfKey x = channel_of_key<X>(k[i], parameters.w[i] + w[i], parameters.a[i] + icl[n][i],
                                                 parameters.removal[i], parameters.replacement[i]);
        w[i] = x.w, icl[n][i] = x.icl, removed[n][i] = x.removed, k[i] = x.key;
        squares += x.removed * x.removed;
        if (!is_first_layer) v[i] = mixed_value<X>(v[i], first_v[i], parameters.v[i] + share[i]);
      }
      store_group(args.w + index, w);
      store_group(args.key + index, k);
      if (to_v) store_group(to_v + index, v);
    }
    const float inverse_norm = 1.f / fmaxf(sqrtf(sum_over_lanes<lane.LANES>(squares)), LEAST_NORM);
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      const int j = CHANNELS_APART * n;
      if (j >= channels) continue;
      float a[WIDTH], b[WIDTH];
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        const float kappa = removed[n][i] * inverse_norm;
        a[i] = -kappa, b[i] = kappa * icl[n][i];
      }
      store_group(args.a + first + j, a);
      store_group(args.b + first + j, b);
    }
  }
}
