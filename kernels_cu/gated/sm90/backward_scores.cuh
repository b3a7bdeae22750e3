// what      Products for scores of a chunk of 32 tokens: A, of decayed queries and keys, and dA, of do and v; and the
//           layouts of their operands. For the second pass of Hopper's backward of GLA and RWKV-6 (backward_keys.cu).
//           Tile, Operand, LaneSubChunk, Across and the lane's channels and tokens: decays.cuh. ChannelStage,
//           keys_within, by8, by16: backward_keys_storage.cuh. All lanes of a warp multiply together, and by
//           multiply_rows all threads of a warpgroup. Queries and keys "within sub-chunks" are those times their decays
//           from the middle of their sub-chunk, for pairs in one sub-chunk
// barriers  none: between put_within, put_across, put_state and the products that read what they store, callers have
//           the mbarrier `operands` and, for wgmma, a fence_proxy_async
// limits    sm_90a; T of bfloat16, float16
//
// From the includes:
//   ldmatrix_offset(): a lane's offset for ldmatrix and stmatrix, by which store_operand stores an Operand
//   each_token_pair: calls f(sub-chunk n, channel h) for the lane's pairs of tokens; token_pair_of: their register in
//     an Operand
#include "ptx.cuh"
#include "gated/sm90/states.cuh"

// The byte offset of channel c of token `row` in a panel [32 tokens][32 channels] of float32 operands within
// sub-chunks. There are no bank conflicts: eight lanes load 16 channels of two neighbouring tokens (multiply_within),
// and a warp stores 8 channels of the four tokens 2t of a sub-chunk (put_within).
__device__ __forceinline__ int within_offset(int row, int c) {
  return row * 128 + (c / 4 ^ (row & 2) ^ ((row >> 2 ^ row) & 1) * 4) * 16 + c % 4 * 4;
}
// The byte offset in ChannelStage, which begins with q, k and g, of panel `panel`, 32 channels, of the queries within
// sub-chunks. Panel 2w takes the place of warpgroup w's panel of q, panel 2w + 1 that of its part of g, which is as
// long or longer; q and g have been read.
template <typename T, typename G, int BK> __device__ __forceinline__ int queries_within(int panel) {
  return panel % 2 ? int(2 * sizeof(Tile<T, BK>)) + panel / 2 * int(CHUNK * 64 * sizeof(G)) : panel / 2 * CHUNK * 128;
}

// The byte offset in A [key, query] of a lane's first score in a block of 8 queries and 8 keys: of query g and key 2t,
// with g = lane / 4, t = lane % 4. queries, keys: the block's first ones. Key 2t + 1 is at (offset XOR 16) + 128, in
// the next row; 8 queries later is offset XOR 32. Of a sub-chunk's 8 columns, query 2t has column t and query 2t + 1
// column t + 4: the order of tokens in tf32 operands.
__device__ __forceinline__ int score_offset(int queries, int keys, int lane) {
  return swizzled_offset(keys + 2 * (lane & 3), queries / 4 + (lane >> 2 & 1)) + (lane >> 3) * 4;
}

// d[query, key] = a b^T for the 8 queries from 8 w on of warp w, and all keys. A warp has 16 rows of the product,
// blocks 2w and 2w + 1 of 8 rows. With 512 bytes between blocks, half a block, block 2w starts at byte 1024 w, its
// first query. Block 2w + 1 is not used. The last one ends 512 bytes behind a's panel: in the next one, or in dA, which
// follows do in ValueStage.
template <typename T, int PANELS>
__device__ __forceinline__ void multiply_rows(float (&d)[CHUNK / 2], T (&a)[PANELS][CHUNK][64],
                                              T (&b)[PANELS][CHUNK][64]) {
  const u64 queries = k_major_tile(a, 512), keys = k_major_tile(b);
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < PANELS * 4; ++c) {
    const int step = (c / 4 * CHUNK * 128 + c % 4 * 32) / 16;  // to the next 16 columns; descriptors count 16 bytes
    wgmma<T, CHUNK, K_MAJOR>(d, queries + step, keys + step, c > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_fence_operand(d);
}

// d[query, key] of the 8 keys from row `keys` of x on and 16 queries from row `queries` on. has_16_queries: if false,
// the product takes 8 queries twice.
template <typename T, int PANELS>
__device__ __forceinline__ void multiply_across(float (&d)[4], T (&x)[PANELS][CHUNK][64], int queries,
                                                bool has_16_queries, int keys, int lane) {
  float d_of_second[4] = {};  // the sum over the second 16 channels of each step
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = 0.f;
  const int key = swizzled_offset(keys + (lane & 7), lane >> 3);
  const int query = swizzled_offset(queries + (lane & (has_16_queries ? 15 : 7)), lane >> 4);
#pragma unroll
  for (int c = 0; c < PANELS * 2; ++c) {  // 32 channels a step
    const int flip = c % 2 * 64;
    u32 a[4], b[4];
    ldmatrix_x4(b, at_byte_offset(x[c / 2], key ^ flip));
    ldmatrix_x4(a, at_byte_offset(x[c / 2], query ^ flip));
    const u32 first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
    mma_m16n8k16(d, a, first, T{});
    ldmatrix_x4(a, at_byte_offset(x[c / 2], query ^ flip ^ 32));
    mma_m16n8k16(d_of_second, a, second, T{});
  }
  for (int i = 0; i < 4; ++i) d[i] += d_of_second[i];
}

// d[query, key] for the 8 queries and keys within a warp's sub-chunk: query g and keys 2t and 2t + 1, with g = lane /
// 4, t = lane % 4. A lane loads 4 channels at once, as depths t and t + 4 of two products. One query operand `a` serves
// both products: rows g (a[0], a[2]) hold channels 0 and 2 and are used in the first, rows g + 8 (a[1], a[3]) hold
// channels 1 and 3 and are used in the second. To fit, the consumers of backward_keys.cu have stored keys_within with
// channels 1 and 2 of every four swapped.
template <int BK, typename T, typename G, class Stage>
__device__ __forceinline__ void multiply_within(float (&d)[2], Tile<float, BK>& keys_within, Stage& in, int warp,
                                                int lane) {
  const int offset = within_offset(8 * warp + (lane >> 2), 4 * (lane & 3));
  float sums[2][2][4] = {};  // four sums, since products of one sum wait for each other
#pragma unroll
  for (int c = 0; c < BK / 16; ++c) {
    const int channels = offset ^ c % 2 * 64;
    const float4 q = *reinterpret_cast<const float4*>(at_byte_offset(in, queries_within<T, G, BK>(c / 2) + channels));
    const float4 k = *reinterpret_cast<const float4*>(at_byte_offset(keys_within[c / 2], channels));
    const u32 a[4] = {__float_as_uint(q.x), __float_as_uint(q.y), __float_as_uint(q.z), __float_as_uint(q.w)};
    const u32 b[2] = {__float_as_uint(k.x), __float_as_uint(k.y)},
              more_b[2] = {__float_as_uint(k.z), __float_as_uint(k.w)};
    mma_tf32(sums[c % 2][0], a, b);
    mma_tf32(sums[c % 2][1], a, more_b);
  }
  for (int i = 0; i < 2; ++i) d[i] = (sums[0][0][i] + sums[1][0][i]) + (sums[0][1][2 + i] + sums[1][1][2 + i]);
}

// Stores x, this lane's numbers of the queries or keys within sub-chunk n, at within_offset in `tiles`. first: the byte
// offset in `tiles` of the lane's first number of sub-chunk 0. Its other channel is at that offset XOR 32; its other
// token at that offset XOR 64, a row of 128 bytes later.
template <class Tiles>
__device__ __forceinline__ void put_within(Tiles& tiles, const LaneSubChunk& x, int first, int n) {
  const auto put = [&](int flip, float value) {
    *reinterpret_cast<float*>(at_byte_offset(tiles, (first ^ flip) + (flip / 64 + 8 * n) * 128)) = value;
  };
  put(0, x[0]), put(64, x[1]), put(32, x[2]), put(96, x[3]);
}

// Stores a warp's channels of the operands of scores across sub-chunks: each token in its row. by8 has the queries of
// sub-chunks 1 and 3 and the keys of 0 and 2; by16 the queries of 2 and 3 and the keys of 0 and 1. offset:
// ldmatrix_offset().
template <typename T>
__device__ __forceinline__ void put_across(T (&by8)[CHUNK][64], T (&by16)[CHUNK][64], const Across& q, const Across& k,
                                           int offset) {
  Operand x;
  each_token_pair([&](int n, int h) {
    const LaneSubChunk& from = n % 2 ? q.by8[n / 2] : k.by8[n / 2];
    token_pair_of(x, n, h) = pack<T>(from[2 * h], from[2 * h + 1]);
  });
  store_operand(by8, x, offset);
  each_token_pair([&](int n, int h) {
    const LaneSubChunk& from = n > 1 ? q.by16[n - 2] : k.by16[n];
    token_pair_of(x, n, h) = pack<T>(from[2 * h], from[2 * h + 1]);
  });
  store_operand(by16, x, offset);
}

// Stores a warp's 16 channels of dS as an operand of dv: transposed, [column of V, channel], and rounded to T. offset:
// ldmatrix_offset().
template <typename T, int BV>
__device__ __forceinline__ void put_state(T (*to)[BV][64], const float (&dS)[BV / 2], int warpgroup, int offset) {
  offset = opaque(warpgroup * int(sizeof *to) + offset);  // `opaque`: computed only once
#pragma unroll
  for (int part = 0; part < BV / 16; ++part) {
    u32 columns[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) columns[m] = pack<T>(dS[8 * part + 2 * m], dS[8 * part + 2 * m + 1]);
    stmatrix_x4_trans(reinterpret_cast<char*>(to) + offset + 2048 * part, columns);
  }
}
