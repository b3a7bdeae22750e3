// what      Joins the segments of sequences: the state at each one's start, from what each leaves behind by itself.
// math      S_0 = initial;  S_{p+1} = diag(decay_p) S_p + local_p;  final = S_P
// shapes    states [N, P, H, K, V], local_p on entry, S_p on exit; decays [N, P, H, 2, K], whose product is decay_p;
//           initial, final [N, H, K, V]
// grid      a block for every (sequence, head, 1024 values of K x V), sequence slowest; 256 threads, 4 values each
// smem      none
// barriers  none
// numerics  float32; without `final` the last local state is not read
// source    Blelloch, 1990, "Prefix sums and their applications", section 1.4.1, one after the other
// limits    V a multiple of 4
#include "ptx.cuh"

struct ScanSegmentsArgs {
  float* states;
  const float *decays, *initial;  // null: zeros
  float* final;                   // or null
  i64 P, H, K, V;
};

__global__ void __launch_bounds__(256) scan_segments(const ScanSegmentsArgs args) {
  const i64 size = args.K * args.V, tiles = (size + 1023) / 1024, tile = blockIdx.x % tiles;
  const i64 h = blockIdx.x / tiles % args.H, n = blockIdx.x / tiles / args.H, at = tile * 1024 + threadIdx.x * 4;
  if (at >= size) return;
  float4 S = {0.f, 0.f, 0.f, 0.f};
  if (args.initial) S = *reinterpret_cast<const float4*>(args.initial + (n * args.H + h) * size + at);
  const i64 segments = args.final ? args.P : args.P - 1;
  for (i64 p = 0; p < args.P; ++p) {
    const i64 segment = (n * args.P + p) * args.H + h;
    float4& state = *reinterpret_cast<float4*>(args.states + segment * size + at);
    const float4 local = p < segments ? state : float4{0.f, 0.f, 0.f, 0.f};
    state = S;
    if (p == segments) break;
    const float* decays = args.decays + segment * 2 * args.K + at / args.V;
    const float decay = decays[0] * decays[args.K];
    S = {fmaf(decay, S.x, local.x), fmaf(decay, S.y, local.y), fmaf(decay, S.z, local.z), fmaf(decay, S.w, local.w)};
  }
  if (args.final) *reinterpret_cast<float4*>(args.final + (n * args.H + h) * size + at) = S;
}
