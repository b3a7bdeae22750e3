// what      The PTX instructions of all kernels, each behind a typed function; wgmma.cuh, words.cuh and clusters.cuh
//           have the others.
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

// log2(x) of x above 0, to 2^-22; -inf of 0, and of x below the normal range.
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
// by an addition: CUDA 13.2's assembler drops a move, and then has products wait for each other if x is half of all
// registers.
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

// D[16, 8] += A[16, 16] B[16, 8] in bfloat16, two values a register, the first in its lower half.
//   a = A[g][2t,+1], A[g+8][2t,+1], A[g][2t+8,+9], A[g+8][2t+8,+9]      b = B[2t,+1][g], B[2t+8,+9][g]
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// D[16, 8] += A[16, 8] B[8, 8] in bfloat16, of two registers that need not be neighbours in an array.
//   a0 = A[g][2t,+1]    a1 = A[g+8][2t,+1]    b = B[2t,+1][g]
__device__ __forceinline__ void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}

// D[16, 8] += A[16, 16] B[16, 8] in float16; a and b are laid out as those of bfloat16.
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// D[16, 8] = A[16, 16] B[16, 8] + C[16, 8] in float16; c is laid out as d.
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// D[16, 8] += A[16, 8] B[8, 8] in bfloat16, and in float16.
//   a = A[g][2t,+1], A[g+8][2t,+1]      b = B[2t,+1][g]
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[2], u32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[2], u32 b) {
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

// ---- warps in different roles: sm_90 and later ------------------------------------------------------------

#if __CUDA_ARCH__ >= 900
// An mbarrier in shared memory: counts the arrivals of a phase, then the arrivals of the next phase. The first phase
// has parity 0, the next 1, then 0.
struct MBarrier {
  u64 state;
};

// Sets the number of arrivals that end a phase; by one thread, once, before a barrier of the block.
__device__ __forceinline__ void mbarrier_init(MBarrier& b, u32 arrivals) {
  const u32 address = u32(__cvta_generic_to_shared(&b));
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
}

// Arrives. Threads that wait for the end of the phase can read what this thread has written before.
__device__ __forceinline__ void mbarrier_arrive(MBarrier& b) {
  const u32 address = u32(__cvta_generic_to_shared(&b));
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}

// Waits for the end of the phase of this parity: returns once the current phase has the other parity. So parity 1
// returns at once during the first phase.
__device__ __forceinline__ void mbarrier_wait(MBarrier& b, u32 parity) {
  const u32 address = u32(__cvta_generic_to_shared(&b));
  asm volatile(
      "{\n.reg .pred over;\nwait_%=:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 over, [%0], %1;\n"
      "@!over bra wait_%=;\n}" ::"r"(address),
      "r"(parity)
      : "memory");
}

// Arrives, and announces `bytes` of copies: the phase ends when these have been copied, too.
__device__ __forceinline__ void mbarrier_arrive_and_expect(MBarrier& b, u32 bytes) {
  const u32 address = u32(__cvta_generic_to_shared(&b));
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes)
               : "memory");
}

// ---- blocks of a cluster, with the same layout of shared memory; "the other block" is that of two: sm_90 -----

// The address in the other block's shared memory that corresponds to one in this block's.
__device__ __forceinline__ u32 address_in_other_block(const void* p) {
  u32 there;
  asm volatile(
      "{\n.reg .u32 rank;\nmov.u32 rank, %%cluster_ctarank;\nxor.b32 rank, rank, 1;\n"
      "mapa.shared::cluster.u32 %0, %1, rank;\n}"
      : "=r"(there)
      : "r"(u32(__cvta_generic_to_shared(p))));
  return there;
}

// mbarrier_arrive at the other block's barrier that corresponds to `b`, to say that data have been read. The function
// does not order this thread's stores before the arrival, since waiting for stores takes longer than a chunk's
// products.
__device__ __forceinline__ void mbarrier_arrive_at_other_block(MBarrier& b) {
  asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(address_in_other_block(&b)) : "memory");
}

// Starts copying `bytes` (a multiple of 16, as is the address) to the corresponding address of the other block, after
// fence_proxy_async by the threads that wrote them. Arrives at the other block's `b`, whose phase ends after the copy.
__device__ __forceinline__ void copy_to_other_block(const void* from, u32 bytes, MBarrier& b) {
  const u32 barrier = address_in_other_block(&b);
  asm volatile("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   address_in_other_block(from)),
               "r"(u32(__cvta_generic_to_shared(from))), "r"(bytes), "r"(barrier)
               : "memory");
}

// Loads four floats, aligned to 16 bytes, from the address in block `rank` of the cluster that corresponds to `p`.
__device__ __forceinline__ float4 load4_of_block(const float* p, u32 rank) {
  float4 x;
  asm volatile(
      "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
      : "r"(u32(__cvta_generic_to_shared(p))), "r"(rank)
      : "memory");
  return x;
}

// Waits until all threads of the cluster's blocks have reached this barrier.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// cluster_sync if other blocks read only what was written to shared memory: one thread's fence, after the block's
// writes, takes a quarter of the time of a fence by every thread.
__device__ __forceinline__ void cluster_sync_shared() {
  __syncthreads();  // the block's writes are done
  if (threadIdx.x == 0) asm volatile("fence.acq_rel.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// cluster_sync at the end, when the blocks have read each other's shared memory: does not wait for writes.
__device__ __forceinline__ void cluster_leave() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

// Starts copying `bytes` (a multiple of 16, as are the addresses) of data that are not read again soon to shared
// memory; the phase of `b` ends after the copy (mbarrier_arrive_and_expect).
__device__ __forceinline__ void copy_bulk_evict_first(void* to, const void* from, u32 bytes, MBarrier& b) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(u32(__cvta_generic_to_shared(to))),
      "l"(from), "r"(bytes), "r"(u32(__cvta_generic_to_shared(&b))), "l"(policy)
      : "memory");
}

// copy_bulk_evict_first for data that are read again.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, u32 bytes, MBarrier& b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   u32(__cvta_generic_to_shared(to))),
               "l"(from), "r"(bytes), "r"(u32(__cvta_generic_to_shared(&b)))
               : "memory");
}

// ---- boxes of tensors: sm_90 and later --------------------------------------------------------------------

// The driver's CUtensorMap of an array [B, H, T, D], for boxes of some columns and tokens; a kernel's argument.
struct alignas(64) TensorMap {
  char bytes[128];
};

// Starts loading the map itself, which the card reads before it copies a box.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Starts copying the box at (batch, head, token, column) to shared memory, by one thread; the phase of `b` ends after
// the copy (mbarrier_arrive_and_expect). Outside of the array the box has zeros: it may extend beyond the array's end,
// not before its beginning.
__device__ __forceinline__ void tensor_load(void* box, const TensorMap& map, MBarrier& b, i32 column, i32 token,
                                            i32 head, i32 batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(u32(__cvta_generic_to_shared(box))),
      "l"(&map), "r"(u32(__cvta_generic_to_shared(&b))), "r"(column), "r"(token), "r"(head), "r"(batch)
      : "memory");
}

// tensor_load of data that are not read again soon: they leave the cache first.
__device__ __forceinline__ void tensor_load_evict_first(void* box, const TensorMap& map, MBarrier& b, i32 column,
                                                        i32 token, i32 head, i32 batch) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(u32(__cvta_generic_to_shared(box))),
      "l"(&map), "r"(u32(__cvta_generic_to_shared(&b))), "r"(column), "r"(token), "r"(head), "r"(batch), "l"(policy)
      : "memory");
}

// Starts copying a box to L2.
__device__ __forceinline__ void tensor_prefetch(const TensorMap& map, i32 column, i32 token, i32 head, i32 batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(column),
               "r"(token), "r"(head), "r"(batch)
               : "memory");
}

// Starts copying a box to the array, after fence_proxy_async by the threads that filled it, and closes a group of this
// copy. The part outside of the array is not stored.
__device__ __forceinline__ void tensor_store(const TensorMap& map, const void* box, i32 column, i32 token, i32 head,
                                             i32 batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(u32(__cvta_generic_to_shared(box))), "r"(column), "r"(token), "r"(head), "r"(batch)
      : "memory");
}

// tensor_store, or, if `adds`, adds the box to the array, each sum rounded to the array's type. Predicated instead of a
// branch, since the threads that store have few registers.
template <typename T>
__device__ __forceinline__ void tensor_store_or_add(const TensorMap& map, const T* box, i32 column, i32 token, i32 head,
                                                    i32 batch, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %6, 0;\n"
      "@adds cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n"
      "@!adds cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n"
      "cp.async.bulk.commit_group;\n}" ::"l"(&map),
      "r"(u32(__cvta_generic_to_shared(box))), "r"(column), "r"(token), "r"(head), "r"(batch), "r"(i32(adds))
      : "memory");
}

// Starts adding 16 bytes of numbers in shared memory to numbers in global memory, as `tensor_store_or_add` does, but
// closes no group: one `commit_adds` after many pieces does.
__device__ __forceinline__ void add_piece(bf16* to, const bf16* piece) {
  const u32 from = u32(__cvta_generic_to_shared(piece));
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%0], [%1], 16;" ::"l"(to), "r"(from)
               : "memory");
}
__device__ __forceinline__ void add_piece(f16* to, const f16* piece) {
  const u32 from = u32(__cvta_generic_to_shared(piece));
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%0], [%1], 16;" ::"l"(to), "r"(from)
               : "memory");
}
__device__ __forceinline__ void add_piece(float* to, const float* piece) {
  const u32 from = u32(__cvta_generic_to_shared(piece));
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 16;" ::"l"(to), "r"(from)
               : "memory");
}
__device__ __forceinline__ void commit_adds() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the groups that this thread has closed, of tensor_store, tensor_store_or_add and add_piece, have read
// shared memory; global memory may still lack their numbers.
__device__ __forceinline__ void tensor_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Makes this thread arrive at `b` when all copies that it has started by cp_async are complete.
__device__ __forceinline__ void mbarrier_arrive_after_copies(MBarrier& b) {
  const u32 address = u32(__cvta_generic_to_shared(&b));
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address) : "memory");
}

// ---- arithmetic of pairs, and stores of matrices: sm_90 and later ------------------------------------------

// Values 2 PAIR and 2 PAIR + 1 of four int8 as bfloat16, exactly: 128 + the lower seven bits is a bfloat16 number, from
// which 128 is subtracted, or 256 if the sign bit is set.
template <int PAIR> __device__ __forceinline__ u32 bf16_of_i8(u32 four) {
  u32 y;
  asm("{\n.reg .b32 all, low, sign;\nprmt.b32 all, %1, 0x43, %2;\nand.b32 low, all, 0xff7fff7f;\n"
      "and.b32 sign, all, 0xff80ff80;\nsub.rn.bf16x2 %0, low, sign;\n}"
      : "=r"(y)
      : "r"(four), "n"(PAIR ? 0x4342 : 0x4140));
  return y;
}

// x y + z of two pairs of bfloat16 side by side.
__device__ __forceinline__ u32 fma_bf16(u32 x, u32 y, u32 z) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(y), "r"(z));
  return d;
}

// x y of two pairs of float16 side by side.
__device__ __forceinline__ u32 mul_f16(u32 x, u32 y) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(x), "r"(y));
  return d;
}

// For each of two pairs of bfloat16 numbers: the one of larger magnitude, with any sign.
__device__ __forceinline__ u32 larger_magnitudes_of_halves(u32 a, u32 b) {
  u32 y;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// For each of two pairs of signed 16-bit integers: the larger one.
__device__ __forceinline__ u32 max_of_each_half(u32 a, u32 b) {
  u32 y;
  asm("max.s16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// Orders ordinary accesses of shared memory before later ones of wgmma and of bulk copies, which see the stores, and
// overwrite nothing before the loads have read it. The rule: between other threads' accesses and a copy, either they
// call this before the barrier at which they arrive, or the copying thread after it has waited for that barrier, which
// costs less. Ordinary accesses do not need it among themselves, nor after wgmma and copies whose end has been waited
// for.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The inverse of ldmatrix_x4: lane l gives the 16-byte row l % 8 of matrix l / 8.
//   M_m[g][2t,+1] = r[m]
__device__ __forceinline__ void stmatrix_x4(void* row, const u32 (&r)[4]) {
  const u32 address = u32(__cvta_generic_to_shared(row));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// The inverse of ldmatrix_x4_trans: lane l gives the 16-byte row l % 8 of matrix l / 8.
//   M_m[2t,+1][g] = r[m]
__device__ __forceinline__ void stmatrix_x4_trans(void* row, const u32 (&r)[4]) {
  const u32 address = u32(__cvta_generic_to_shared(row));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
#endif
