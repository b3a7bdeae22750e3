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
  i32* strong;                                  // null where no gate is too strong
  i64 N, P, H, K, V;
};

__global__ void __launch_bounds__(256) scan_both_ways(const ScanBothWaysArgs args) {
  const u32 size = u32(args.K * args.V), tiles = (size + 1023) / 1024, H = u32(args.H), pairs = u32(args.N) * H;
  const u32 at = blockIdx.x % tiles * 1024 + threadIdx.x * 4;         // divisions of 64 bits take longer than all else here
  const u32 pair = blockIdx.x / tiles % pairs, n = pair / H, h = pair % H;
  const bool backwards = blockIdx.x / tiles >= pairs;
  const int P = int(args.P);
  if (at >= size) return;
  if (args.strong && at == 0) args.strong[pair] = 0;
  const float* from = backwards ? args.dht : args.initial;
  float4 S = {0.f, 0.f, 0.f, 0.f};
  if (from) S = *reinterpret_cast<const float4*>(from + i64(pair) * size + at);
  const auto segment = [&](int step) {
    return ((backwards * args.N + n) * P + (backwards ? P - 1 - step : step)) * H + h;
  };
  const auto state = [&](int step) -> float4& { return *reinterpret_cast<float4*>(args.states + segment(step) * size + at); };
  const auto decay = [&](int step) { return args.decays[segment(step) * args.K + at / u32(args.V)]; };
  float4 local = state(0);
  float by = decay(0);
  for (int step = 0; step < P - 1; ++step) {
    const float4 x = local;
    const float d = by;
    if (step < P - 2) local = state(step + 1), by = decay(step + 1);
    state(step) = S;
    S = {fmaf(d, S.x, x.x), fmaf(d, S.y, x.y), fmaf(d, S.z, x.z), fmaf(d, S.w, x.w)};
  }
  state(P - 1) = S;
}
