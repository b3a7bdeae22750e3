// what      For Hopper's backward of GLA and RWKV-6, beside warpgroup.cuh: products of tokens, and sums over the lanes
//           of a channel. The including file defines CHUNK, the tokens of a chunk, before it includes this file.
// limits    sm_90a
#include "ptx.cuh"
#include "lanes.cuh"
#include "warpgroup.cuh"

// ---- products of tokens with tokens: a warp ------------------------------------------------------------------

// The first query and the first key of each of the three 16 x 16 blocks, of 32 x 32 pairs, that have keys up to their
// queries.
__device__ __forceinline__ int queries_of(int block) { return block ? 16 : 0; }
__device__ __forceinline__ int keys_of(int block) { return block == 2 ? 16 : 0; }

// d = block `block` of a b^T [queries, keys], summed over all columns of the panels: d[n] is [16 queries, 8 keys], keys
// 8n on. a, b: the tiles of a chunk's queries and keys, or of what takes their place (do and v).
template <typename T, int PANELS>
__device__ __forceinline__ void pair_products(float (&d)[2][4], T (&a)[PANELS][CHUNK][64], T (&b)[PANELS][CHUNK][64],
                                              int block, int lane) {
#pragma unroll
  for (int i = 0; i < 8; ++i) d[i / 4][i % 4] = 0.f;
  const int query = swizzled_offset(queries_of(block) + (lane & 15), lane >> 4);
  const int key = swizzled_offset(keys_of(block) + (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel)
#pragma unroll
    for (int flip = 0; flip < 128; flip += 32) {  // 16 channels
      u32 x[4], y[4];
      ldmatrix_x4(x, at_byte_offset(a[panel], query ^ flip));
      ldmatrix_x4(y, at_byte_offset(b[panel], key ^ flip));
      mma_m16n8k16(d[0], x, {y[0], y[1]}, T{});
      mma_m16n8k16(d[1], x, {y[2], y[3]}, T{});
    }
}

// ---- channels -----------------------------------------------------------------------------------------------

// The sum over the four lanes of a channel.
__device__ __forceinline__ float channel_sum(float x) { return sum_over_lanes<4>(x); }

// sum_and_share (lanes.cuh) over the eight lanes with the same lane % 4: lane g = lane / 4 gets COUNT / 8 of the sums,
// from number g COUNT / 8 on, as its x[0], x[1] ... In each step two lanes that are LANES apart keep one half each;
// `opaque`: which half is computed again, not held in a register.
template <int COUNT, int LANES = 16, int N> __device__ __forceinline__ void share_sums(float (&x)[N]) {
  exchange_and_add_halves<COUNT / 2>(x, LANES, opaque(threadIdx.x) & LANES);
  if constexpr (LANES > 4) share_sums<COUNT / 2, LANES / 2>(x);
}
