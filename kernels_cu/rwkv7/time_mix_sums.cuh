// what      What RWKV-7's time mixes of one token share: kappa = x / max(|x|, LEAST_NORM), x = k removal; and a + x b
//           of four numbers.
#include "decode.cuh"

constexpr float LEAST_NORM = 1e-12f;  // the least |k removal| by which kappa is divided

__device__ __forceinline__ float4 add_scaled(float4 a, float x, float4 b) {
  return {fmaf(x, b.x, a.x), fmaf(x, b.y, a.y), fmaf(x, b.z, a.z), fmaf(x, b.w, a.w)};
}
