// what      Two blocks of a cluster that hand each other 64 floats a step, through shared memory.
// shapes    in, out: [2, n, 64], block by block; out gets what the other block read of in
// grid      clusters of two blocks of 64 threads
// barriers  full: what the other block sent is there; empty: it has read what this one sent
// smem      1024 bytes
// limits    sm_90a
#include "ptx.cuh"

struct ExchangeArgs {
  const float* in;
  float* out;
  i64 n;
};

struct Sent {
  float of[2][64];
  MBarrier full, empty;
};

__global__ void __cluster_dims__(2) exchange(const ExchangeArgs args) {
  Sent& s = *reinterpret_cast<Sent*>(dynamic_smem());
  const int thread = threadIdx.x, rank = blockIdx.x % 2;
  if (thread == 0) {
    mbarrier_init(s.full, 1);
    mbarrier_init(s.empty, 64);
    fence_proxy_async();
  }
  cluster_sync();
  for (int step = 0; step < args.n; ++step) {
    const i64 at = (blockIdx.x * args.n + step) * 64 + thread;
    if (step) mbarrier_wait(s.empty, step - 1 & 1);
    s.of[rank][thread] = args.in[at];
    fence_proxy_async();
    __syncthreads();
    if (thread == 0) copy_to_other_block(s.of[rank], sizeof s.of[rank], s.full);
    mbarrier_wait(s.full, step & 1);
    args.out[at] = s.of[rank ^ 1][thread];
    mbarrier_arrive_at_other_block(s.empty);
  }
  cluster_sync();  // nobody leaves while others arrive
}
