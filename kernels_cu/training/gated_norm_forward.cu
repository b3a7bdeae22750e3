// what      What stands between the recurrence and its output product: group norm over each head, and the gate.
// math      y = (GroupNorm_H(o) weight + bias) silu(gate)
// shapes    o gate y [tokens, D], weight bias [D]; heads of N channels
// grid      a thread for 8 channels of a token, N / 8 neighbours a head; 256 threads
// smem      none
// barriers  none
// numerics  float32, rounded once; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", eq. 19
// limits    N 8, 16, 32, 64, 128 or 256
#include "training_heads.cuh"

constexpr int THREADS = 256;

template <typename T> struct Args {
  const T* o;
  const T* gate;
  const float* weight;
  const float* bias;
  T* y;
  i64 tokens, D, N;
  double eps;
};

template <typename T> __global__ void __launch_bounds__(THREADS) training_gated_norm_forward(const Args<T> args) {
  const i64 count = args.tokens * args.D, at = 8 * (i64(blockIdx.x) * THREADS + threadIdx.x), j = at % args.D;
  Eight o = {};
  if (at < count) o = load8(args.o + at);
  normalise(o, int(args.N), float(args.eps));
  if (at >= count) return;
  const Eight gate = load8(args.gate + at), weight = load8(args.weight + j), bias = load8(args.bias + j);
#pragma unroll
  for (int n = 0; n < 8; ++n) o.x[n] = fmaf(o.x[n], weight.x[n], bias.x[n]) * gate.x[n] * sigmoid(gate.x[n]);
  store8(args.y + at, o);
}
