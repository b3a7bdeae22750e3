// what      Joins the segments of sequences for the backward passes, from the third segment of either direction on: the
//           state at each one's start, and the gradient of the state at each one's end, from what its neighbour leaves
//           by itself.
// math      S_p = diag(decay_{p-1}) S_{p-1} + local_{p-1};   C_{p+1} = diag(decay_{p+1}) C_{p+2} + local_{p+1}
// shapes    states [2, N, P, H, K, V] float32: the first two in the direction as they are to be, then local of the one
//           before;
//           S_p and C_{p+1} on exit; decays [2, N, P, H, K] float32
// grid      a block for every (direction, sequence, head, 1024 values of K x V), directions slowest; 256 threads, 4
//           values each
// smem      none
// barriers  none
// numerics  float32. Nothing stays nothing, where gates above 0 add up to a decay that float32 does not hold
// source    Blelloch, 1990, "Prefix sums and their applications", section 1.4.1, one after the other
// limits    V a multiple of 4
#include "ptx.cuh"

constexpr int AHEAD = 8;  // segments that are read at once: each waits for memory, none for the one before

struct Args {
  float* states;
  const float* decays;
  i64 N, P, H, K, V;
  i64 first;  // direction: 1 where the states are known
};

__global__ void __launch_bounds__(256) gated_scan_both_ways(const Args args) {
  const u32 size = u32(args.K * args.V), tiles = (size + 1023) / 1024, H = u32(args.H), pairs = u32(args.N) * H;
  const u32 at = blockIdx.x % tiles * 1024 + threadIdx.x * 4;  // divisions of 64 bits take longer than all else here
  const u32 pair = blockIdx.x / tiles % pairs, n = pair / H, h = pair % H;
  const bool backwards = blockIdx.x / tiles >= pairs;
  const int P = int(args.P);
  if (at >= size || backwards < args.first) return;
  const auto segment = [&](int step) {
    return ((backwards * args.N + n) * P + (backwards ? P - 1 - step : step)) * H + h;
  };
  const auto state = [&](int step) -> float4& {
    return *reinterpret_cast<float4*>(args.states + segment(step) * size + at);
  };
  const auto decay = [&](int step) { return args.decays[segment(step) * args.K + at / u32(args.V)]; };
  float4 S = state(1);
  for (int first = 2; first < P; first += AHEAD) {
    float4 local[AHEAD];
    float by[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (first + i < P) local[i] = state(first + i), by[i] = decay(first + i - 1);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (first + i < P) {
        const float4& x = local[i];
        const auto join = [&](float S, float own) { return S == 0.f ? own : fmaf(by[i], S, own); };
        S = {join(S.x, x.x), join(S.y, x.y), join(S.z, x.z), join(S.w, x.w)};
        state(first + i) = S;
      }
  }
}
