// what      Scores of a chunk's queries and keys, and of do and v, for the second pass of the Hopper backward of GLA
//           and RWKV-6: where they lie, and products that make them.
#include "gated/sm90/states.cuh"

// Where channel c of token `row` is in a panel of 32 channels, in bytes. Eight tokens of 4 channels, and 8 channels of
// every second token, lie in different banks.
__device__ __forceinline__ int within_offset(int row, int c) {
  return row * 128 + (c / 4 ^ (row & 2) ^ ((row >> 2 ^ row) & 1) * 4) * 16 + c % 4 * 4;
}
// Where A has a lane's first pair of a block of scores, queries and keys multiples of 8, in bytes: query g, key 2t. Key
// 2t + 1 is 16 XOR that and a row on; 8 queries on are 32 XOR that. A product in tf32 takes the operand that has 2t at
// depth t of a sub-chunk, and 2t + 1 at t + 4; so have queries their columns.
__device__ __forceinline__ int score_offset(int queries, int keys, int lane) {
  return swizzled_offset(keys + 2 * (lane & 3), queries / 4 + (lane >> 2 & 1)) + (lane >> 3) * 4;
}

__device__ __forceinline__ float score_value(float x) { return __uint_as_float(to_tf32(x)); }

// D[query, key] = a b^T for a warp's 8 queries, twice.
template <typename T, int PANELS>
__device__ __forceinline__ void multiply_rows(float (&d)[CHUNK / 2], T (&a)[PANELS][CHUNK][64],
                                              T (&b)[PANELS][CHUNK][64], int warp, int lane) {
  const int first = swizzled_offset(8 * warp + (lane & 7), lane >> 4);
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel) {  // one after the other: registers are scarce
    u32 x[4][4];
#pragma unroll
    for (int c = 0; c < 4; ++c) ldmatrix_x4(x[c], at_offset(a[panel], first ^ 32 * c));
    const u64 keys = wgmma_tile(b[panel], 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < 4; ++c) wgmma<T, CHUNK, false>(d, x[c], keys + c * 32 / 16, panel || c);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_keep(d);
  }
}

// D[query, key] of 16 queries from row `queries` on (or 8, twice) and 8 keys from row `keys` on of a tile.
template <typename T, int PANELS>
__device__ __forceinline__ void multiply_across(float (&d)[4], T (&x)[PANELS][CHUNK][64], int queries, bool sixteen,
                                                int keys, int lane) {
  float other[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = 0.f;
  const int key = swizzled_offset(keys + (lane & 7), lane >> 3);
  const int query = swizzled_offset(queries + (lane & (sixteen ? 15 : 7)), lane >> 4);
#pragma unroll
  for (int c = 0; c < PANELS * 2; ++c) {  // 32 channels
    const int turn = c % 2 * 64;
    u32 a[4], b[4];
    ldmatrix_x4(b, at_offset(x[c / 2], key ^ turn));
    ldmatrix_x4(a, at_offset(x[c / 2], query ^ turn));
    const u32 first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
    multiply(d, a, first, T{});
    ldmatrix_x4(a, at_offset(x[c / 2], query ^ turn ^ 32));
    multiply(other, a, second, T{});
  }
  for (int i = 0; i < 4; ++i) d[i] += other[i];
}
