// what      Blocks of a cluster of any size that share boxes of tensors: each copies some of them to all.
// limits    sm_90 and later
// twin      tests/emulator/clusters.cuh has the same names for the CPU: a change here is a change there.
#include "ptx.cuh"

#if __CUDA_ARCH__ >= 900
// mbarrier_arrive at the barrier of block `rank` of the cluster that corresponds to `b`, to say that this block has
// read that block's data. Does not order this thread's stores before the arrival.
__device__ __forceinline__ void arrive_at_block(MBarrier& b, u32 rank) {
  asm volatile(
      "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.release.cta.shared::cluster.b64 _, [there];\n}" ::"r"(u32(__cvta_generic_to_shared(&b))),
      "r"(rank)
      : "memory");
}

// tensor_load to the corresponding address of every block of the cluster whose bit is in `blocks`; each counts the
// bytes at its own `b`.
__device__ __forceinline__ void tensor_load_to(u16 blocks, void* box, const TensorMap& map, MBarrier& b, i32 column,
                                               i32 token, i32 head, i32 batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(u32(__cvta_generic_to_shared(box))),
      "l"(&map), "r"(u32(__cvta_generic_to_shared(&b))), "r"(column), "r"(token), "r"(head), "r"(batch), "h"(blocks)
      : "memory");
}
#endif
