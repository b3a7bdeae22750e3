// what      The PTX instructions of all kernels, each behind a typed function; ptx_sm90.cuh, which this file includes,
//           wgmma.cuh, words.cuh and clusters.cuh have the others.
// limits    sm_80 and later, unless a section names a later card; no toolkit header, so NVRTC needs no include path.
// twin      tests/emulator/ptx.cuh has the same names for the CPU: a change here is a change there.
//
// `asm` without volatile is arithmetic: the compiler may move, join or drop it. `volatile` keeps an instruction and its
// order among such instructions; "memory" also keeps accesses of memory on their side of it.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

struct bf16 {
  u16 bits;
};  // for storage: arithmetic is in float
struct f16 {
  u16 bits;
};
typedef signed char i8;
struct tf32 {};  // names the format: the upper 19 bits of a float, which products read

// offsetof, a constant: NVRTC has no __builtin_offsetof before CUDA 13.5.
#define OFFSET_OF(type, member) ((unsigned long long)__INTADDR__(&(((type*)0)->member)))

// ---- conversions ------------------------------------------------------------------------------------------

// The value itself, for templates over the storage type.
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

// Two floats as T, to nearest, the first in the lower half.
template <typename T> __device__ __forceinline__ u32 pack(float low, float high);

template <> __device__ __forceinline__ u32 pack<bf16>(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

template <> __device__ __forceinline__ u32 pack<f16>(float low, float high) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// 1 / x, 1 ulp; x and results below the normal range count as 0.
__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / sqrt(x), 2 ulp.
__device__ __forceinline__ float inverse_root(float x) { return rsqrtf(x); }

// 2^x, 2 ulp; 2^-inf is 0, and results below the normal range are 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x) of x above 0: the error is 2^-22 at most, for x between 1/2 and 2, else 2^-22 of the result; -inf of 0, and
// of x below the normal range.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of x and `least`; NaN stays NaN.
__device__ __forceinline__ float max_nan(float x, float least) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(least));
  return y;
}

// max_nan of both values of T in a register.
template <typename T> __device__ __forceinline__ u32 max_nan(u32 x, u32 least);

template <> __device__ __forceinline__ u32 max_nan<bf16>(u32 x, u32 least) {
  u32 y;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(least));
  return y;
}

template <> __device__ __forceinline__ u32 max_nan<f16>(u32 x, u32 least) {
  u32 y;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(least));
  return y;
}

// Hides the origin of x from the compiler, which would otherwise keep values computed from it in registers.
__device__ __forceinline__ void hide_origin(int& x) { asm volatile("" : "+r"(x)); }
// The same for a tile's descriptor (wgmma.cuh): the compiler then computes those of other tiles by an addition to x.
__device__ __forceinline__ void hide_origin(u64& x) { asm volatile("" : "+l"(x)); }

// A copy of x in a register of its own, for operands of products that still run while x changes; -0 becomes 0. Computed
// by an addition: CUDA 13.2's assembler drops a move, and then has products wait for each other if such operands take
// half of a thread's registers.
__device__ __forceinline__ u32 copy_of(float x) {
  u32 y;
  asm volatile("add.f32 %0, %1, 0f00000000;" : "=r"(y) : "f"(x));
  return y;
}

// x, its origin hidden from the compiler.
__device__ __forceinline__ int opaque(int x) {
  hide_origin(x);
  return x;
}

// ---- warp: matrix products; all 32 lanes take part --------------------------------------------------------
// With g = lane / 4 and t = lane % 4, here and below, the accumulator of each of these products holds
//   d[0], d[1] = D[g][2t], D[g][2t+1]      d[2], d[3] = D[g+8][2t], D[g+8][2t+1]
// [2t,+1] are numbers 2t and 2t + 1, [2t+8,+9] numbers 2t + 8 and 2t + 9, [4t..+3] numbers 4t to 4t + 3.

// D[16, 8] += A[16, 8] B[8, 8] in tf32.
//   a = A[g][t], A[g+8][t], A[g][t+4], A[g+8][t+4]      b = B[t][g], B[t+4][g]
__device__ __forceinline__ void mma_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// D[16, 8] += A[16, 16] B[16, 8] in the type of the last argument, whose value is not used; two values a register, the
// first in its lower half.
//   a = A[g][2t,+1], A[g+8][2t,+1], A[g][2t+8,+9], A[g+8][2t+8,+9]      b = B[2t,+1][g], B[2t+8,+9][g]
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], f16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// D[16, 8] = A[16, 16] B[16, 8] + C[16, 8] of float16 operands, with float32 sums: a and b as above, c as d.
__device__ __forceinline__ void mma_f16_plus(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// D[16, 8] += A[16, 8] B[8, 8] in the type of the last argument, whose value is not used.
//   a = A[g][2t,+1], A[g+8][2t,+1]      b = B[2t,+1][g]
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const u32 (&a)[2], u32 b, bf16) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const u32 (&a)[2], u32 b, f16) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}

// D[16, 8] += A[16, 32] B[32, 8] in int8, four values a register, the first in its lowest byte.
//   a = A[g][4t..+3], A[g+8][4t..+3], A[g][4t+16..+19], A[g+8][4t+16..+19]      b = B[4t..+3][g], B[4t+16..+19][g]
__device__ __forceinline__ void mma_i8(i32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
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

// ldmatrix_x4 of the row at byte address (base XOR flip) + offset, which saves an addition in loops over a swizzled
// tile.
__device__ __forceinline__ void ldmatrix_x4_flipped(u32 (&r)[4], const void* base, int flip, int offset) {
  const u32 row = (u32(__cvta_generic_to_shared(base)) ^ flip) + offset;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// ldmatrix_x4 with each matrix transposed.
//   r[m] = M_m[2t,+1][g]
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(u32(__cvta_generic_to_shared(row)))
               : "memory");
}

// A matrix of 8 x 8 halves transposed: x = M[g][2t,+1] becomes M[2t,+1][g].
__device__ __forceinline__ u32 transpose_pairs(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// ---- shared memory ----------------------------------------------------------------------------------------

// The block's dynamic shared memory, at a multiple of 1024 bytes, where the pattern of the tiles' swizzle starts.
__device__ __forceinline__ unsigned char* dynamic_smem() {
  extern __shared__ __align__(1024) unsigned char smem[];
  return smem;
}

// Stores 8 bytes to shared memory if `wanted`: one predicated instruction instead of a branch.
__device__ __forceinline__ void store_if(bool wanted, void* to, uint2 x) {
  asm volatile("{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %0, 0;\n@wanted st.shared.v2.u32 [%1], {%2, %3};\n}" ::"r"(
                   int(wanted)),
               "r"(u32(__cvta_generic_to_shared(to))), "r"(x.x), "r"(x.y)
               : "memory");
}

// Stores 8 or 4 bytes to shared memory at (base XOR flip) + offset, in bytes, which saves an addition in loops over a
// swizzled tile.
__device__ __forceinline__ void store_flipped(void* base, int flip, int offset, uint2 x) {
  const u32 to = (u32(__cvta_generic_to_shared(base)) ^ flip) + offset;
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(x.x), "r"(x.y) : "memory");
}
__device__ __forceinline__ void store_flipped(void* base, int flip, int offset, u32 x) {
  const u32 to = (u32(__cvta_generic_to_shared(base)) ^ flip) + offset;
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

// Starts copying BYTES (4, 8 or 16, both addresses aligned to them) to shared memory; stores zeros if not valid.
template <int BYTES> __device__ __forceinline__ void cp_async(void* smem_dst, const void* gmem_src, bool valid = true) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  const u32 dst = u32(__cvta_generic_to_shared(smem_dst));
  const int read = valid ? BYTES : 0;
  if constexpr (BYTES == 16)  // past L1; smaller copies have to go through it
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(gmem_src), "r"(read) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(gmem_src), "n"(BYTES), "r"(read)
                 : "memory");
}

// Closes the group of the copies that this thread has started since the last commit.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's latest groups are unfinished; other threads see the data after a barrier.
template <int N> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Waits until `threads` threads (a multiple of 32, whole warps) have reached barrier `id`, 1 to 15.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts this warp as one that has reached barrier `id`, for which `threads` threads are waited, without waiting
// itself.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// named_barrier_sync; returns whether `some` is true for any of the threads.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool some) {
  u32 any;
  asm volatile(
      "{\n.reg .pred some, any;\nsetp.ne.b32 some, %3, 0;\n"
      "barrier.cta.red.or.pred any, %1, %2, some;\nselp.u32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(u32(some))
      : "memory");
  return any;
}

// Loads from global memory that neither compiler nor assembler moves to an earlier place, which would take registers
// for longer.
__device__ __forceinline__ void load_in_turn(float4& x, const void* from) {
  asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from)
               : "memory");
}
__device__ __forceinline__ void load_in_turn(uint2& x, const void* from) {
  asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from) : "memory");
}

// Starts loading the line of 128 bytes at an address to L2.
__device__ __forceinline__ void prefetch_line(const void* gmem) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(gmem) : "memory");
}

// Stores 16 or 8 bytes that are not read again soon: they leave the cache first.
__device__ __forceinline__ void store_evict_first(uint4& to, const u32 (&x)[4]) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(&to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3]), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void store_evict_first(uint2& to, const u32 (&x)[2]) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(&to), "r"(x[0]), "r"(x[1]), "l"(policy)
               : "memory");
}

// ---- kernels that overlap: without effect before sm_90 ----------------------------------------------------

// Starts copying `bytes` (a multiple of 16, as is the address) to L2.
__device__ __forceinline__ void prefetch_l2(const void* gmem, u32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(gmem), "r"(bytes) : "memory");
#endif
}

// Lets the next kernel begin, in the multiprocessors' free room, once every block of this one has called this.
__device__ __forceinline__ void launch_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous kernel has ended and its results can be read.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#include "ptx_sm90.cuh"  // last: it needs the types above
