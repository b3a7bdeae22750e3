// what      Inputs of the recurrence for the tokens of prompts: keys that remove, keys that write, and mixed values.
// math      v += (first - v) share, first being the first layer's v;  kappa = k removal / |k removal| over each head
//           a = -kappa;  b = kappa rate;  k = k (1 + (rate - 1) replacement)
// shapes    k v rate share first a b [T, H, N], k and v in place; removal replacement [H, N]. A share of -1 means
//           the first layer, which writes `first`
// grid      a warp a (token, head), PAIRS neighbouring channels a lane; 256 threads
// smem      none
// barriers  none
// numerics  float32, rounded once
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N even, up to 64 PAIRS
#include "decode.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr float LEAST_NORM = 1e-12f;

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
  i64 rows, H, N;
};

template <typename X, int PAIRS> __global__ void __launch_bounds__(THREADS) rwkv7_keys(const Args<X> args) {
  launch_next();
  wait_for_previous();
  const i64 row = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
  if (row >= args.rows) return;
  const int lane = threadIdx.x % 32, N = int(args.N);
  const i64 at = row * N, h = row % args.H * N;
  float2 removed[PAIRS], rate[PAIRS];
  float squares = 0.f;
#pragma unroll
  for (int n = 0; n < PAIRS; ++n) {
    const int j = 2 * (32 * n + lane);
    removed[n] = rate[n] = {};
    if (j >= N) continue;
    const float2 k = load2(args.k + at + j), removal = load2(args.removal + h + j),
                 by = load2(args.replacement + h + j);
    rate[n] = load2(args.rate + at + j), removed[n] = {k.x * removal.x, k.y * removal.y};
    squares += removed[n].x * removed[n].x + removed[n].y * removed[n].y;
    store2(args.k + at + j, {k.x * fmaf(rate[n].x - 1.f, by.x, 1.f), k.y * fmaf(rate[n].y - 1.f, by.y, 1.f)});
    const float2 v = load2(args.v + at + j), share = load2(args.share + at + j);
    if (share.x < 0.f) {
      store2(args.first + at + j, v);
    } else {
      const float2 first = load2(args.first + at + j);
      store2(args.v + at + j, {fmaf(first.x - v.x, share.x, v.x), fmaf(first.y - v.y, share.y, v.y)});
    }
  }
  const float inverse = 1.f / fmaxf(sqrtf(warp_sum(squares)), LEAST_NORM);
#pragma unroll
  for (int n = 0; n < PAIRS; ++n) {
    const int j = 2 * (32 * n + lane);
    if (j >= N) continue;
    const float2 kappa = {removed[n].x * inverse, removed[n].y * inverse};
    store2(args.a + at + j, {-kappa.x, -kappa.y});
    store2(args.b + at + j, {kappa.x * rate[n].x, kappa.y * rate[n].y});
  }
}
