// what      Copies boxes of an array [B, H, T, D] to shared memory and from there to another array, by tensor maps.
// shapes    from, to: [B, H, T, D]; raw: bytes of the box as they lie in shared memory
// grid      one block of one warp
// smem      1024 bytes for the barrier, then the box
// limits    sm_90a
#include "ptx.cuh"

struct TensorCopiesArgs {
  TensorMap from, to;
  unsigned char* raw;
  i64 bytes, column, token, head, batch;
};

__global__ void tensor_copies(const __grid_constant__ TensorCopiesArgs args) {
  MBarrier& arrived = *reinterpret_cast<MBarrier*>(dynamic_smem());
  unsigned char* box = dynamic_smem() + 1024;
  if (threadIdx.x == 0) {
    mbarrier_init(arrived, 1);
    fence_proxy_async();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_and_expect(arrived, u32(args.bytes));
    tensor_load(box, args.from, arrived, i32(args.column), i32(args.token), i32(args.head), i32(args.batch));
  }
  mbarrier_wait(arrived, 0);
  for (i64 i = threadIdx.x; i < args.bytes; i += 32) args.raw[i] = box[i];
  if (threadIdx.x == 0) {
    tensor_store(args.to, box, i32(args.column), i32(args.token), i32(args.head), i32(args.batch));
    tensor_store_wait();
  }
}
