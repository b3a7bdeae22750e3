// what      Blocks of a cluster of up to 16 that share boxes of tensors: each copies some of them to all.
// limits    sm_90 and later
// twin      tests/emulator/clusters.cuh has the same names for the CPU: a change here is a change there.
#include "ptx.cuh"

// From ptx.cuh and ptx_sm90.cuh:
//   mbarrier_arrive: at a barrier of this block; tensor_load: copies a box to this block

#if __CUDA_ARCH__ >= 900
// mbarrier_arrive at the barrier of block `rank` of the cluster that corresponds to `b`, to say that this block has
// read that block's data. It publishes nothing: other blocks may not see this thread's earlier stores (.cta).
__device__ __forceinline__ void arrive_at_block(MBarrier& b, u32 rank) {
  asm volatile(
      "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.release.cta.shared::cluster.b64 _, [there];\n}" ::"r"(u32(__cvta_generic_to_shared(&b))),
      "r"(rank)
      : "memory");
}

// tensor_load to the corresponding address of every block of the cluster whose bit, by its rank, is in `blocks`; each
// counts the bytes at its own `b`, and announces them there. One thread calls it, once all of these blocks have read
// what was there (arrive_at_block). No block may end before the last copy to it and the last
// arrival at it (cluster_leave). map: of a __grid_constant__ argument.
__device__ __forceinline__ void tensor_load_to(u16 blocks, void* box, const TensorMap& map, MBarrier& b, i32 column,
                                               i32 token, i32 head, i32 batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(u32(__cvta_generic_to_shared(box))),
      "l"(&map), "r"(u32(__cvta_generic_to_shared(&b))), "r"(column), "r"(token), "r"(head), "r"(batch), "h"(blocks)
      : "memory");
}
#endif
