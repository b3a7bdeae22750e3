// what      RWKV-7's time mix in prompts: from each token's key and value, the recurrence's key k, its vectors a and b
//           and its value v.
// math      v += (first - v) share, first being the first layer's v;  kappa = k removal / |k removal| over each head;
//           a = -kappa;  b = kappa rate;  k = k (1 + (rate - 1) replacement). rate is the paper's a, the in-context
//           learning rate; removal and replacement are its xi and alpha, parameters of the layer
// shapes    k v rate share first a b [T, H, N], k and v in place; removal replacement [H, N]. In the first layer every
//           share is -1: v stays as it is and is stored in `first`, which the other layers read
// grid      a warp a (token, head), a lane PAIRS pairs of neighbouring channels, the pairs 64 channels apart; 256
//           threads
// smem      none
// barriers  none
// numerics  float32, rounded once
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N even, up to 64 PAIRS
#include "decode.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr float LEAST_NORM = 1e-12f;  // |k removal| counts as at least this

template <typename X> struct Args {
  X* k;
  X* v;
  const X* rate;
  const X* share;
  X* first;
  X* a;
  X* b;
  const float* removal;
  const float* replacement;
  i64 token_heads, H, N;  // token_heads: T H
};

template <typename X, int PAIRS> __global__ void __launch_bounds__(THREADS) rwkv7_keys(const Args<X> args) {
  launch_next();        // the next kernel may begin
  wait_for_previous();  // nothing is read before
  const i64 token_head = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
  if (token_head >= args.token_heads) return;
  const int lane = threadIdx.x % 32, N = int(args.N);
  const i64 offset = token_head * N, head_offset = token_head % args.H * N;  // of [T, H, N] and of [H, N]
  float2 removed[PAIRS], rate[PAIRS];
  float squares = 0.f;
#pragma unroll
  for (int n = 0; n < PAIRS; ++n) {
    const int j = 2 * (32 * n + lane);
    removed[n] = rate[n] = {};
    if (j >= N) continue;
    const float2 k = load2(args.k + offset + j), removal = load2(args.removal + head_offset + j),
                 replacement = load2(args.replacement + head_offset + j);
    rate[n] = load2(args.rate + offset + j), removed[n] = {k.x * removal.x, k.y * removal.y};
    squares += removed[n].x * removed[n].x + removed[n].y * removed[n].y;
    store2(args.k + offset + j,
           {k.x * fmaf(rate[n].x - 1.f, replacement.x, 1.f), k.y * fmaf(rate[n].y - 1.f, replacement.y, 1.f)});
    const float2 v = load2(args.v + offset + j), share = load2(args.share + offset + j);
    if (share.x < 0.f) {
      store2(args.first + offset + j, v);
    } else {
      const float2 first = load2(args.first + offset + j);
      store2(args.v + offset + j, {fmaf(first.x - v.x, share.x, v.x), fmaf(first.y - v.y, share.y, v.y)});
    }
  }
  const float inverse = 1.f / fmaxf(sqrtf(warp_sum(squares)), LEAST_NORM);
#pragma unroll
  for (int n = 0; n < PAIRS; ++n) {
    const int j = 2 * (32 * n + lane);
    if (j >= N) continue;
    const float2 kappa = {removed[n].x * inverse, removed[n].y * inverse};
    store2(args.a + offset + j, {-kappa.x, -kappa.y});
    store2(args.b + offset + j, {kappa.x * rate[n].x, kappa.y * rate[n].y});
  }
}
