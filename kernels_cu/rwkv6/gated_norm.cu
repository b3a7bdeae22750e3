// what      The steps between the recurrence and its output product: group norm over each head, bonus, and gate.
// math      y = GroupNorm_H(o) silu(gate); with BONUS (RWKV-7) y = (GroupNorm_H(o) + (sum_N r k bonus) v) gate
// shapes    o r k v gate y [T, H, N], weight bias bonus [H, N]; r k v and bonus only with BONUS
// grid      a warp a (token, head), a lane PAIRS pairs of neighbouring channels, the pairs 64 channels apart; 256
//           threads
// smem      none
// barriers  none
// numerics  float32, rounded once; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", eq. 19; Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N even, up to 64 PAIRS
#include "decode.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

template <typename X> struct Args {
  const X* o;
  const X* r;
  const X* k;
  const X* v;
  const X* gate;
  const float* weight;
  const float* bias;
  const float* bonus;
  X* y;
  i64 rows, H, N;
  double eps;
};

template <typename X, int PAIRS, bool BONUS>
__global__ void __launch_bounds__(THREADS) rwkv6_gated_norm(const Args<X> args) {
  launch_next();        // the next kernel may begin
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read
  const i64 row = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
  if (row >= args.rows) return;
  const int lane = threadIdx.x % 32, N = int(args.N);
  const i64 index = row * N, h = row % args.H * N;
  const float inverse_N = 1.f / N;
  float2 x[PAIRS], gate[PAIRS];
  float sum = 0.f, bonus_score = 0.f, squares = 0.f;
#pragma unroll
  for (int n = 0; n < PAIRS; ++n) {
    const int j = 2 * (32 * n + lane);
    x[n] = gate[n] = {};
    if (j >= N) continue;
    x[n] = load2(args.o + index + j), gate[n] = load2(args.gate + index + j);
    sum += x[n].x + x[n].y;
    if constexpr (BONUS) {
      const float2 r = load2(args.r + index + j), k = load2(args.k + index + j), bonus = load2(args.bonus + h + j);
      bonus_score += r.x * k.x * bonus.x + r.y * k.y * bonus.y;
    }
  }
  const float mean = warp_sum(sum) * inverse_N;
  if constexpr (BONUS) bonus_score = warp_sum(bonus_score);
#pragma unroll
  for (int n = 0; n < PAIRS; ++n) {
    if (2 * (32 * n + lane) < N) x[n] = {x[n].x - mean, x[n].y - mean};
    squares += x[n].x * x[n].x + x[n].y * x[n].y;
  }
  const float scale = inverse_root(warp_sum(squares) * inverse_N + float(args.eps));
#pragma unroll
  for (int n = 0; n < PAIRS; ++n) {
    const int j = 2 * (32 * n + lane);
    if (j >= N) continue;
    const float2 weight = load2(args.weight + h + j), bias = load2(args.bias + h + j);
    float2 y = {fmaf(x[n].x * scale, weight.x, bias.x), fmaf(x[n].y * scale, weight.y, bias.y)};
    if constexpr (BONUS) {
      const float2 v = load2(args.v + index + j);
      y = {fmaf(bonus_score, v.x, y.x) * gate[n].x, fmaf(bonus_score, v.y, y.y) * gate[n].y};
    } else {
      y = {y.x * gate[n].x * sigmoid(gate[n].x), y.y * gate[n].y * sigmoid(gate[n].y)};
    }
    store2(args.y + index + j, y);
  }
}
