// include/clusters.cuh on the CPU.
#include "ptx.cuh"

namespace emulator {

// Calls f(the place there of `p`) while that block's shared memory is the one that places must lie in.
template <class X, class F> void in_block(int there, X* p, F f) {
  const int here = rank;
  const u64 offset = reinterpret_cast<u64>(p) - reinterpret_cast<u64>(shared_storage[here]);
  enter(there);
  f(reinterpret_cast<X*>(shared_storage[there] + offset));
  enter(here);
}

}  // namespace emulator

inline void arrive_at_block(MBarrier& b, u32 rank, emulator::Where where = emulator::here()) {
  EMULATOR_CHECK(int(rank) < emulator::cluster, "arrive_at_block %u of %d (%s:%d)", rank, emulator::cluster, where.file,
                 where.line);
  emulator::phases("arrive_at_block", b, where);
  emulator::in_block(rank, &b, [&](MBarrier* there) { emulator::arrive_once(*there, where); });
}

inline void tensor_load_to(u16 blocks, void* box, const TensorMap& map, MBarrier& b, i32 column, i32 token, i32 head,
                           i32 batch, emulator::Where where = emulator::here()) {
  EMULATOR_CHECK(blocks > 0 && blocks >> emulator::cluster == 0, "tensor_load_to blocks %x of %d (%s:%d)", blocks,
                 emulator::cluster, where.file, where.line);
  emulator::phases("tensor_load_to", b, where);
  const u64 distance = reinterpret_cast<u64>(&b) - reinterpret_cast<u64>(box);
  for (int block = 0; block < emulator::cluster; ++block)
    if (blocks >> block & 1)
      emulator::in_block(block, static_cast<unsigned char*>(box), [&](unsigned char* there) {
        tensor_load(there, map, *reinterpret_cast<MBarrier*>(there + distance), column, token, head, batch, where);
      });
}
