// what      What RWKV-7's time mixes share: kappa = x / max(|x|, LEAST_NORM), x = k removal; the largest decay; and
//           a + x b of four numbers.
#include "decode.cuh"

constexpr float LEAST_NORM = 1e-12f;                // the least |k removal| by which kappa is divided
constexpr float DECAY_SCALE = 0.6065306597126334f;  // exp(-1/2): a token's log decay is -DECAY_SCALE to 0

__device__ __forceinline__ float4 add_scaled(float4 a, float x, float4 b) {
  return {fmaf(x, b.x, a.x), fmaf(x, b.y, a.y), fmaf(x, b.z, a.z), fmaf(x, b.w, a.w)};
}
