// what      Norms of heads in a training step: N / 8 neighbouring lanes have a head of N channels, eight each.
#include "training.cuh"

// The sum over the lanes of a head, the same bits in each of them.
__device__ __forceinline__ float head_sum(float x, int N) {
  for (int distance = N / 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// x becomes (x - mean) / deviation over its head; the result is 1 / deviation. All lanes of the warp call this.
__device__ __forceinline__ float normalise(EightFloats& x, int N, float eps) {
  float sum = 0.f, squares = 0.f;
#pragma unroll
  for (int n = 0; n < 8; ++n) sum += x.x[n];
  const float mean = head_sum(sum, N) / N;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    x.x[n] -= mean;
    squares = fmaf(x.x[n], x.x[n], squares);
  }
  const float scale = 1.f / sqrtf(head_sum(squares, N) / N + eps);
#pragma unroll
  for (int n = 0; n < 8; ++n) x.x[n] *= scale;
  return scale;
}
