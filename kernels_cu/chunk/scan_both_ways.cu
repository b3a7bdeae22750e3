// what      Joins the segments of sequences for the backward sweeps: the state at each one's start, and the gradient of the
//           state at each one's end, from what each leaves behind by itself. Clears what the first sweep marks.
// math      S_0 = initial, S_{p+1} = diag(decay_p) S_p + local_p;   C_P = dht, C_p = diag(decay_p) C_{p+1} + local_p
// shapes    states [2, N, P, H, K, V]: local on entry, S_p and C_{p+1} on exit; decays [2, N, P, H, K];
//           initial, dht [N, H, K, V]; all float32; strong [N, H]
// grid      a block for every (direction, sequence, head, 1024 values of K x V), directions slowest; 256 threads, 4 values each
// smem      none
// barriers  none
// numerics  float32; the last local values are not read
// source    Blelloch, 1990, "Prefix sums and their applications", section 1.4.1, one after the other
// limits    V a multiple of 4
#include "ptx.cuh"

struct ScanBothWaysArgs {
  float* states;
  const float *decays, *initial, *dht;          // initial, dht null: zeros
  i32* strong;
  i64 N, P, H, K, V;
};

__global__ void __launch_bounds__(256) scan_both_ways(const ScanBothWaysArgs args) {
  const i64 size = args.K * args.V, tiles = (size + 1023) / 1024, at = blockIdx.x % tiles * 1024 + threadIdx.x * 4;
  const i64 pairs = args.N * args.H, pair = blockIdx.x / tiles % pairs, n = pair / args.H, h = pair % args.H;
  const bool backwards = blockIdx.x / tiles >= pairs;
  if (at >= size) return;
  if (at == 0) args.strong[pair] = 0;
  const float* from = backwards ? args.dht : args.initial;
  float4 S = {0.f, 0.f, 0.f, 0.f};
  if (from) S = *reinterpret_cast<const float4*>(from + pair * size + at);
  for (i64 step = 0; step < args.P; ++step) {
    const i64 p = backwards ? args.P - 1 - step : step, segment = ((backwards * args.N + n) * args.P + p) * args.H + h;
    float4& state = *reinterpret_cast<float4*>(args.states + segment * size + at);
    const float4 local = state;
    const float decay = args.decays[segment * args.K + at / args.V];
    state = S;
    S = {fmaf(decay, S.x, local.x), fmaf(decay, S.y, local.y), fmaf(decay, S.z, local.z), fmaf(decay, S.w, local.w)};
  }
}
