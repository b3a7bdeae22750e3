// what      Scores of a chunk's queries and keys, and of do and v, for the second pass of the Hopper backward of GLA
//           and RWKV-6: where they lie, and products that make them.
#include "half_products.cuh"
#include "gated/sm90/states.cuh"

// Where channel c of token `row` is in a panel of 32 channels, in bytes. Eight tokens of 4 channels, and 8 channels of
// every second token, lie in different banks.
__device__ __forceinline__ int within_offset(int row, int c) {
  return row * 128 + (c / 4 ^ (row & 2) ^ ((row >> 2 ^ row) & 1) * 4) * 16 + c % 4 * 4;
}
// Where in the second pass's stage of channels the panel with a warpgroup's 32 first or last channels of the queries
// within is: nobody reads q and g of its 64 any more.
template <typename T, typename G, int BK> __device__ __forceinline__ int queries_within(int panel) {
  return panel % 2 ? int(2 * sizeof(Tile<T, BK>)) + panel / 2 * int(CHUNK * 64 * sizeof(G)) : panel / 2 * CHUNK * 128;
}

// Where A has a lane's first pair of a block of scores, queries and keys multiples of 8, in bytes: query g, key 2t. Key
// 2t + 1 is 16 XOR that and a row on; 8 queries on are 32 XOR that. A product in tf32 takes the operand that has 2t at
// depth t of a sub-chunk, and 2t + 1 at t + 4; so have queries their columns.
__device__ __forceinline__ int score_offset(int queries, int keys, int lane) {
  return swizzled_offset(keys + 2 * (lane & 3), queries / 4 + (lane >> 2 & 1)) + (lane >> 3) * 4;
}

__device__ __forceinline__ float score_value(float x) { return __uint_as_float(to_tf32(x)); }

// D[query, key] = a b^T for a warp's 8 queries: of the 16 rows that a warp has of a product, 8 begin 512 bytes before
// the next warp's and are nobody's.
template <typename T, int PANELS>
__device__ __forceinline__ void multiply_rows(float (&d)[CHUNK / 2], T (&a)[PANELS][CHUNK][64],
                                              T (&b)[PANELS][CHUNK][64]) {
  const u64 queries = wgmma_tile(a, 16, 512), keys = wgmma_tile(b, 16, 1024);
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < PANELS * 4; ++c) {
    const int at = (c / 4 * CHUNK * 128 + c % 4 * 32) / 16;
    wgmma<T, CHUNK, false>(d, queries + at, keys + at, c > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_keep(d);
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
    const int flip = c % 2 * 64;
    u32 a[4], b[4];
    ldmatrix_x4(b, at_offset(x[c / 2], key ^ flip));
    ldmatrix_x4(a, at_offset(x[c / 2], query ^ flip));
    const u32 first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
    multiply_halves(d, a, first, T{});
    ldmatrix_x4(a, at_offset(x[c / 2], query ^ flip ^ 32));
    multiply_halves(other, a, second, T{});
  }
  for (int i = 0; i < 4; ++i) d[i] += other[i];
}

// D[query, key] for the 8 queries and keys of a warp's sub-chunk, from its middle. A lane's 4 channels are depths t and
// t + 4 of two products: of queries, the first and third as rows g of one, the others as rows g + 8 of the other, whose
// other halves nobody needs; keys have them in the order in which these do.
template <int BK, typename T, typename G, class Stage>
__device__ __forceinline__ void multiply_within(float (&d)[2], Tile<float, BK>& keys_within, Stage& in, int warp,
                                                int lane) {
  const int offset = within_offset(8 * warp + (lane >> 2), 4 * (lane & 3));
  float sums[2][2][4] = {};  // since products of one sum wait for each other
#pragma unroll
  for (int c = 0; c < BK / 16; ++c) {
    const int at = offset ^ c % 2 * 64;
    const float4 q = *reinterpret_cast<const float4*>(at_offset(in, queries_within<T, G, BK>(c / 2) + at));
    const float4 k = *reinterpret_cast<const float4*>(at_offset(keys_within[c / 2], at));
    const u32 a[4] = {__float_as_uint(q.x), __float_as_uint(q.y), __float_as_uint(q.z), __float_as_uint(q.w)};
    const u32 b[2] = {__float_as_uint(k.x), __float_as_uint(k.y)},
              more_b[2] = {__float_as_uint(k.z), __float_as_uint(k.w)};
    mma_tf32(sums[c % 2][0], a, b);
    mma_tf32(sums[c % 2][1], a, more_b);
  }
  for (int i = 0; i < 2; ++i) d[i] = (sums[0][0][i] + sums[1][0][i]) + (sums[0][1][2 + i] + sums[1][1][2 + i]);
}

// A warp's 16 channels of what meets in sub-chunk n; `at`: where in `place` this lane's first value of sub-chunk 0 is,
// in bytes. Its others are an XOR away, and the next token a row further.
template <class Where> __device__ __forceinline__ void put_within(Where& place, const SubChunk& x, int at, int n) {
  const auto put = [&](int flip, float value) {
    *reinterpret_cast<float*>(at_offset(place, (at ^ flip) + (flip / 64 + 8 * n) * 128)) = value;
  };
  put(0, x[0]), put(64, x[1]), put(32, x[2]), put(96, x[3]);
}

// Queries and keys that meet across sub-chunks, each where it has rows.
template <typename T>
__device__ __forceinline__ void put_across(T (&by8)[CHUNK][64], T (&by16)[CHUNK][64], const Across& q, const Across& k,
                                           int at) {
  Operand x;
  each_pair([&](int n, int h) {
    const SubChunk& from = n % 2 ? q.by8[n / 2] : k.by8[n / 2];
    pair_of(x, n, h) = pack<T>(from[2 * h], from[2 * h + 1]);
  });
  store_operand(by8, x, at);
  each_pair([&](int n, int h) {
    const SubChunk& from = n > 1 ? q.by16[n - 2] : k.by16[n];
    pair_of(x, n, h) = pack<T>(from[2 * h], from[2 * h + 1]);
  });
  store_operand(by16, x, at);
}

// C for dv, transposed and rounded to T.
template <typename T, int BV>
__device__ __forceinline__ void put_state(T (*to)[BV][64], const float (&C)[BV / 2], int warpgroup, int at) {
  at = opaque(warpgroup * int(sizeof *to) + at);  // else it is made anew for each part
#pragma unroll
  for (int part = 0; part < BV / 16; ++part) {
    u32 columns[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) columns[m] = pack<T>(C[8 * part + 2 * m], C[8 * part + 2 * m + 1]);
    stmatrix_x4_trans(reinterpret_cast<char*>(to) + at + 2048 * part, columns);
  }
}
