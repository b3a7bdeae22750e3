// what      Sums over lanes of a warp. All 32 lanes call these functions together.
#include "ptx.cuh"

// The sum of x over LANES neighbouring lanes, a power of 2 of them; each gets the same bits.
template <int LANES, typename R> __device__ __forceinline__ R sum_over_lanes(R x) {
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// The sum of the x of all lanes with lower numbers than this one.
__device__ __forceinline__ float sum_of_lower_lanes(float x, int lane) {
  x = __shfl_up_sync(0xffffffffu, x, 1);
  if (lane == 0) x = 0.f;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, x, distance);
    if (lane >= distance) x += other;
  }
  return x;
}

// The sum of the x of this lane and of all lanes with higher numbers.
__device__ __forceinline__ float sum_of_this_and_higher_lanes(float x, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_down_sync(0xffffffffu, x, distance);
    if (lane + distance < 32) x += other;
  }
  return x;
}
