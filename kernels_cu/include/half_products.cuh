// what      A warp's product of 16-bit operands on tensor cores, for either of the two types.
#include "ptx.cuh"

// D[16, 8] += A[16, 16] B[16, 8] in the type of the last argument, whose value is not used; sums are float32. Which
// lane has which numbers: mma_bf16 in ptx.cuh.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], bf16) {
  mma_bf16(d, a, b);
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], f16) {
  mma_f16(d, a, b);
}
