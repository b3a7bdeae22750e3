// what      What the kernels of one decoding step share: sums over a block, gates, and a look ahead.
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

// Weights of a later kernel: a small kernel leaves the memory idle, so spare blocks have L2 fetch them.
struct Ahead {
  const unsigned char* p;
  i64 bytes;
};

constexpr i64 PIECE = 4096;  // bytes a request

// Block `index` of `count` asks for its share.
__device__ __forceinline__ void prefetch_share(const Ahead& ahead, i64 index, i64 count) {
  for (i64 at = (threadIdx.x * count + index) * PIECE; at < ahead.bytes; at += blockDim.x * count * PIECE)
    prefetch_l2(ahead.p + at, u32(ahead.bytes - at < PIECE ? ahead.bytes - at : PIECE));
}
