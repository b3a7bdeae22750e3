// what      Sums of several values at once over lanes of a warp, of which each lane keeps a share. Every step halves
//           the number of a lane's values.
#include "ptx.cuh"

// One step, of all lanes. A lane and the one `distance` lanes away have 2 COUNT values x each, and exchange one half:
// the lane that is `upper` of the two gets the sums of values COUNT to 2 COUNT - 1, the other one those of values 0 to
// COUNT - 1, as its x[0] to x[COUNT - 1].
template <int COUNT, int N> __device__ __forceinline__ void exchange_halves(float (&x)[N], int distance, bool upper) {
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    const float other = __shfl_xor_sync(0xffffffffu, upper ? x[n] : x[n + COUNT], distance);
    x[n] = (upper ? x[n + COUNT] : x[n]) + other;
  }
}
