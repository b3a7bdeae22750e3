// what      Sums over lanes of a warp. All 32 lanes call these functions together.
#include "ptx.cuh"

// The sum of x over LANES neighbouring lanes, a power of 2 of them; each gets the same bits.
template <int LANES, typename R> __device__ __forceinline__ R sum_over_lanes(R x) {
  static_assert(LANES <= 32 && (LANES & (LANES - 1)) == 0);
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// The sum of x over the warp, the same bits in every lane.
template <typename R> __device__ __forceinline__ R warp_sum(R x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
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

// One step of the sums of several values at once, of which each lane keeps a share. A lane and the one whose number
// differs in the bit `distance` have 2 COUNT values x each, and exchange one half: the lane that is `upper` of the two
// gets the sums of values COUNT to 2 COUNT - 1, the other one those of values 0 to COUNT - 1, as its x[0] to x[COUNT -
// 1].
template <int COUNT, int N>
__device__ __forceinline__ void exchange_and_add_halves(float (&x)[N], int distance, bool upper) {
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    const float other = __shfl_xor_sync(0xffffffffu, upper ? x[n] : x[n + COUNT], distance);
    x[n] = (upper ? x[n + COUNT] : x[n]) + other;
  }
}

// Sums each of COUNT values x over the lanes whose numbers differ in the bits FIRST, FIRST / 2, ... LAST alone. A lane
// keeps as many of the sums as all of these lanes have one share of, in x[0] on: of the values in their order the first
// share is that of the lane that has none of these bits.
template <int COUNT, int FIRST, int LAST, int N> __device__ __forceinline__ void sum_and_share(float (&x)[N]) {
  exchange_and_add_halves<COUNT / 2>(x, FIRST, threadIdx.x & FIRST);
  if constexpr (FIRST > LAST) sum_and_share<COUNT / 2, FIRST / 2, LAST>(x);
}
