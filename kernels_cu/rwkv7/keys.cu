// what      RWKV-7's time mix in prompts: the recurrence's log decay w, key k, vectors a and b and value v of each
//           token, from its products.
// math      w = -exp(-1/2) sigmoid(base_w + w);  rate = sigmoid(base_a + rate_logits), the paper's a, the in-context
//           learning rate;  v += (first - v) sigmoid(base_v + share_logits), first being the first layer's v;
//           kappa = k removal / |k removal| over each head;  a = -kappa;  b = kappa rate;
//           k = k (1 + (rate - 1) replacement). removal and replacement are the paper's xi and alpha
// shapes    k v w rate_logits share_logits first a b [T, H, N], k, v and w in place; bases [3, H, N] of w, a, v;
//           removal replacement [H, N]. In the first layer the bases of v are -inf: v stays as it is and is stored in
//           `first`, which the other layers read
// grid      a warp a (token, head), a lane PAIRS pairs of neighbouring channels, the pairs 64 channels apart; 256
//           threads
// smem      none
// barriers  none
// numerics  float32, rounded once
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N even, up to 64 PAIRS
#include "decode.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr float DECAY = 0.6065306597126334f;  // exp(-1/2): a token's log decay is -DECAY to 0
constexpr float LEAST_NORM = 1e-12f;          // |k removal| counts as at least this

template <typename X> struct Args {
  X* k;
  X* v;
  X* w;
  const X* rate_logits;
  const X* share_logits;
  X* first;
  X* a;
  X* b;
  const float* bases;
  const float* removal;
  const float* replacement;
  i64 token_heads, H, N;  // token_heads: T H
};

__device__ __forceinline__ float2 sigmoid(float2 base, float2 x) {
  return {sigmoid(base.x + x.x), sigmoid(base.y + x.y)};
}

template <typename X, int PAIRS> __global__ void __launch_bounds__(THREADS) rwkv7_keys(const Args<X> args) {
  launch_next();        // the next kernel may begin
  wait_for_previous();  // nothing is read before
  const i64 token_head = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
  if (token_head >= args.token_heads) return;
  const int lane = threadIdx.x % 32, N = int(args.N);
  const i64 D = args.H * N, first = token_head * N, first_channel = token_head % args.H * N;
  float2 removed[PAIRS], rate[PAIRS];
  float squares = 0.f;
#pragma unroll
  for (int n = 0; n < PAIRS; ++n) {
    const int j = 2 * (32 * n + lane);
    removed[n] = rate[n] = {};
    if (j >= N) continue;
    const i64 index = first + j, channel = first_channel + j;
    // All loads come first: the compiler does not move them over the branches of divisions.
    const float2 k = load2(args.k + index), v = load2(args.v + index), w = load2(args.w + index),
                 rate_logits = load2(args.rate_logits + index), share_logits = load2(args.share_logits + index),
                 base_w = load2(args.bases + channel), base_a = load2(args.bases + D + channel),
                 base_v = load2(args.bases + 2 * D + channel), removal = load2(args.removal + channel),
                 replacement = load2(args.replacement + channel);
    const bool is_first_layer = base_v.x < -3e38f;
    float2 first_v = {};
    if (!is_first_layer) first_v = load2(args.first + index);

    const float2 decay = sigmoid(base_w, w), share = sigmoid(base_v, share_logits);
    rate[n] = sigmoid(base_a, rate_logits), removed[n] = {k.x * removal.x, k.y * removal.y};
    squares += removed[n].x * removed[n].x + removed[n].y * removed[n].y;
    store2(args.w + index, {-DECAY * decay.x, -DECAY * decay.y});
    store2(args.k + index,
           {k.x * fmaf(rate[n].x - 1.f, replacement.x, 1.f), k.y * fmaf(rate[n].y - 1.f, replacement.y, 1.f)});
    if (is_first_layer) store2(args.first + index, v);
    else store2(args.v + index, {fmaf(first_v.x - v.x, share.x, v.x), fmaf(first_v.y - v.y, share.y, v.y)});
  }
  const float inverse = 1.f / fmaxf(sqrtf(warp_sum(squares)), LEAST_NORM);
#pragma unroll
  for (int n = 0; n < PAIRS; ++n) {
    const int j = 2 * (32 * n + lane);
    if (j >= N) continue;
    const float2 kappa = {removed[n].x * inverse, removed[n].y * inverse};
    store2(args.a + first + j, {-kappa.x, -kappa.y});
    store2(args.b + first + j, {kappa.x * rate[n].x, kappa.y * rate[n].y});
  }
}
