// what      What RWKV-7's time mixes of one token take and share: states of type S, outputs of type X.
#include "decode.cuh"

constexpr float LEAST_NORM = 1e-12f;

template <typename X, typename S> struct Args {
  const float* v;
  const float* k;
  const float* r;
  const float* w;
  const float* openings;
  float* first;
  const float* removal;
  const float* replacement;
  const float* bonus;
  const float* weight;
  const float* bias;
  S* state;
  const i64* slots;  // or null: sequence b has state b
  X* y;
  i64 B, H, N;
  double eps;
};

__device__ __forceinline__ float4 add_scaled(float4 a, float x, float4 b) {
  return {fmaf(x, b.x, a.x), fmaf(x, b.y, a.y), fmaf(x, b.z, a.z), fmaf(x, b.w, a.w)};
}
