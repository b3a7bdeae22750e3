// what      D = A B for one 16 x 8 x 8 tile of tf32 a warp; A and B come by cp.async in two groups.
// shapes    a [blocks, 16, 8], b [blocks, 8, 8], d [blocks, 16, 8], all float
// grid      a block of one warp a tile
// smem      16 * 8 + 8 * 8 floats
#include "ptx.cuh"

struct Tf32ProductArgs {
  const float* a;
  const float* b;
  float* d;
};

__global__ void __launch_bounds__(32) tf32_product(const Tf32ProductArgs args) {
  float* s_a = reinterpret_cast<float*>(dynamic_smem());  // [16, 8]
  float* s_b = s_a + 16 * 8;                              // [8, 8]
  const i64 tile = blockIdx.x;
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;

  cp_async<16>(s_a + 4 * lane, args.a + tile * 128 + 4 * lane);
  cp_async_commit();
  if (lane < 16) cp_async<16>(s_b + 4 * lane, args.b + tile * 64 + 4 * lane);
  cp_async_commit();

  cp_async_wait<1>();
  __syncthreads();  // s_a is whole
  const u32 a[4] = {to_tf32(s_a[g * 8 + t]), to_tf32(s_a[(g + 8) * 8 + t]), to_tf32(s_a[g * 8 + t + 4]),
                    to_tf32(s_a[(g + 8) * 8 + t + 4])};
  cp_async_wait<0>();
  __syncthreads();  // s_b is whole
  const u32 b[2] = {to_tf32(s_b[t * 8 + g]), to_tf32(s_b[(t + 4) * 8 + g])};

  float d[4] = {};
  mma_tf32(d, a, b);
#pragma unroll
  for (int i = 0; i < 4; ++i) args.d[tile * 128 + (g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}
