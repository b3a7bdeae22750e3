// what      Every PTX instruction of the project behind a typed function; no other file writes `asm`.
// limits    sm_80 and later; no toolkit header, so NVRTC needs no include path.
// twin      tests/emulator/ptx.cuh has the same names for the CPU: a change here is a change there.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

struct bf16 { u16 bits; };  // storage only: arithmetic is in float
struct f16 { u16 bits; };

// ---- conversions ------------------------------------------------------------------------------------------

// The value itself, so that templates over the storage type read alike.
__device__ __forceinline__ float to_float(float x) { return x; }

// bfloat16 is the upper half of a float: exact.
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }

// Half to float: exact.
__device__ __forceinline__ float to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// float to the storage type T, to nearest, ties to even.
template <typename T> __device__ __forceinline__ T from_float(float x);

template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }

template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// float to tf32 (10 fraction bits), to nearest, ties away from zero; the bits are those of a float.
__device__ __forceinline__ u32 to_tf32(float x) {
  u32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// 2^x, 2 ulp; 2^-inf is 0, and results below the normal range are 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- warp: matrix products and reductions; all 32 lanes take part -----------------------------------------
// With g = lane / 4 and t = lane % 4 the accumulator of all three products holds
//   d[0], d[1] = D[g][2t], D[g][2t+1]      d[2], d[3] = D[g+8][2t], D[g+8][2t+1]

// D[16, 8] += A[16, 8] B[8, 8] in tf32.
//   a = A[g][t], A[g+8][t], A[g][t+4], A[g+8][t+4]      b = B[t][g], B[t+4][g]
__device__ __forceinline__ void mma_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// D[16, 8] += A[16, 16] B[16, 8] in bfloat16, two values a register, the first in its lower half.
//   a = A[g][2t,+1], A[g+8][2t,+1], A[g][2t+8,+9], A[g+8][2t+8,+9]      b = B[2t,+1][g], B[2t+8,+9][g]
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same in half precision.
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8x8 matrices of 16-bit values: lane l gives the 16-byte row l % 8 of matrix l / 8.
//   r[m] = M_m[g][2t,+1]
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(u32(__cvta_generic_to_shared(row)))
               : "memory");
}

// The same with each matrix transposed.
//   r[m] = M_m[2t,+1][g]
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(u32(__cvta_generic_to_shared(row)))
               : "memory");
}

// The sum over the warp, the same bits in every lane.
__device__ __forceinline__ float warp_sum(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// ---- shared memory ----------------------------------------------------------------------------------------

// The block's dynamic shared memory.
__device__ __forceinline__ unsigned char* dynamic_smem() {
  extern __shared__ __align__(128) unsigned char smem[];
  return smem;
}

// Start copying BYTES (4, 8 or 16, both sides aligned to them) to shared memory; zeros where not valid.
template <int BYTES>
__device__ __forceinline__ void cp_async(void* smem_dst, const void* gmem_src, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  const u32 dst = u32(__cvta_generic_to_shared(smem_dst));
  const int read = valid ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(gmem_src), "r"(read)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(gmem_src), "n"(BYTES),
                 "r"(read)
                 : "memory");
}

// Close the group of this thread's copies started since the last commit.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most N of this thread's latest groups are under way; others see the data after a barrier.
template <int N> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- kernels that overlap: from sm_90 on, nothing before ----------------------------------------------------

// Ask for `bytes` (a multiple of 16, as is the address) to come to L2; nobody waits for them.
__device__ __forceinline__ void prefetch_l2(const void* gmem, u32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(gmem), "r"(bytes) : "memory");
#endif
}

// The next kernel may take the room that this one leaves, once every block has come here.
__device__ __forceinline__ void launch_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait until the kernel before this one has ended and what it wrote can be read.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
