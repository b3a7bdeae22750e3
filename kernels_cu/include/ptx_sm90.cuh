// what      PTX instructions of sm_90 and later, each behind a typed function: mbarriers, clusters of two blocks, bulk
//           copies, boxes of tensors, stores of matrices. ptx.cuh, which includes this file, has those of all cards.
// limits    sm_90 and later: kernels for cards before do not see these functions
// twin      tests/emulator/ptx.cuh has the same names for the CPU: a change here is a change there.
//
// "memory" keeps accesses of memory on their side of an instruction.
#include "ptx.cuh"

#if __CUDA_ARCH__ >= 900
// ---- mbarriers --------------------------------------------------------------------------------------------

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

// ---- blocks of a cluster, with the same layout of shared memory; "the other block" is that of two -----

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

// ---- boxes of tensors --------------------------------------------------------------------

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

// ---- arithmetic of pairs, and stores of matrices ------------------------------------------

// Two int8, the lower 16 bits of `two`, as bfloat16, exactly: 128 + the lower seven bits is a bfloat16 number, from
// which 128 is subtracted, or 256 if the sign bit is set.
__device__ __forceinline__ u32 bf16_of_i8(u32 two) {
  u32 y;
  asm("{\n.reg .b32 all, low, sign;\nprmt.b32 all, %1, 0x43, 0x4140;\nand.b32 low, all, 0xff7fff7f;\n"
      "and.b32 sign, all, 0xff80ff80;\nsub.rn.bf16x2 %0, low, sign;\n}"
      : "=r"(y)
      : "r"(two));
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

// The inverse of ldmatrix_x4: lane l gives the 16-byte row l % 8 of matrix l / 8. With g = lane / 4, t = lane % 4, here
// and below, and [2t,+1] for numbers 2t and 2t + 1:
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
