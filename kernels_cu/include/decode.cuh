// what      What the kernels of one decoding step share: sums over a block, gates, four values at a time.
#include "ptx.cuh"
#include "tensor.cuh"

// The sum over the block, the same bits in every thread; `s_parts` is not used again before a barrier.
template <int WARPS> __device__ __forceinline__ float block_sum(float x, float* s_parts) {
  x = warp_sum(x);
  if ((threadIdx.x & 31) == 0) s_parts[threadIdx.x >> 5] = x;
  __syncthreads();  // the warps' sums stand
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sum += s_parts[warp];
  return sum;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

__device__ __forceinline__ float4 load4(const float* x) { return *reinterpret_cast<const float4*>(x); }

template <typename X> __device__ __forceinline__ void store4(X* to, float4 x) {
  to[0] = from_float<X>(x.x);
  to[1] = from_float<X>(x.y);
  to[2] = from_float<X>(x.z);
  to[3] = from_float<X>(x.w);
}
