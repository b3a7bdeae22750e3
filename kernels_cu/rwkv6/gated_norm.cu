// what      What stands between the recurrence and its output product: group norm over each head, and the gate.
// math      y = GroupNorm_H(o) silu(gate)
// shapes    o gate y [T, H, N], weight bias [H, N]
// grid      a warp a (token, head); 256 threads
// smem      none
// barriers  none
// numerics  float32, rounded once; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", eq. 19
// limits    N up to 256
#include "decode.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, EACH = 8;

template <typename X> struct Args {
  const X* o;
  const X* gate;
  const float* weight;
  const float* bias;
  X* y;
  i64 rows, H, N;
  double eps;
};

template <typename X> __global__ void __launch_bounds__(THREADS) rwkv6_gated_norm(const Args<X> args) {
  launch_next();
  wait_for_previous();
  const i64 row = i64(blockIdx.x) * WARPS + threadIdx.x / 32, N = args.N;
  if (row >= args.rows) return;
  const int lane = threadIdx.x % 32;
  const i64 at = row * N, h = row % args.H * N;
  float x[EACH], sum = 0.f, squares = 0.f;
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const i64 j = 32 * n + lane;
    x[n] = j < N ? to_float(args.o[at + j]) : 0.f;
    sum += x[n];
  }
  const float mean = warp_sum(sum) / N;
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    x[n] = 32 * n + lane < N ? x[n] - mean : 0.f;
    squares += x[n] * x[n];
  }
  const float scale = 1.f / sqrtf(warp_sum(squares) / N + float(args.eps));
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const i64 j = 32 * n + lane;
    if (j >= N) continue;
    const float gate = to_float(args.gate[at + j]);
    const float normed = fmaf(x[n] * scale, args.weight[h + j], args.bias[h + j]);
    args.y[at + j] = from_float<X>(normed * gate * sigmoid(gate));
  }
}
