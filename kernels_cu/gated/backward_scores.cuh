// what      The scores of a chunk of 64 tokens in the backward kernels of every card: each of four warps computes some
//           16 x 16 blocks of the lower triangle, from queries and keys times decays (the including kernel's Operands),
//           CHANNELS channels at a time. A chunk has two halves of 32 tokens, a half two blocks of 16, a block two
//           sub-chunks of 8; a score takes its query decayed from, and its key decayed to, a border between both: that
//           of the halves (border32), else of the blocks (border16), else of the sub-chunks (border8), else the middle
//           of the sub-chunk. Of warps w, the blocks are
//             keys of    block 0      1            2            3
//             queries 0  diagonal 0
//                     1  border16 0   diagonal 1
//                     2  border32 0   border32 1   diagonal 2
//                     3  border32 2   border32 3   border16 1   diagonal 3
// shapes    operands are [32, 64]: channel, token; scores are blocks of 16 x 16 tokens in accumulators of mma.sync.
//           Operands: a struct of the including kernel with the members queries, keys, border8, border16 and border32,
//           each a pointer to ChannelTokens. M: how operands are stored and multiplied, with the type M::Stored. All
//           lanes of a warp call functions with products together
// barriers  the caller's: between put_operands of all warps and `add`, and between `add` and the next put_operands
//
// From backward.cuh's includes: Left, Right: a lane's part of A and of B in D[16, 8] += A[16, 16] B[16, 8]; load_left,
// load_right (two B side by side): load them from a tile, AS_STORED or TRANSPOSED; multiply: d += A B for two B.
// MiddleFactors: the factors about a sub-chunk's middle; product_over(x, first, end) = x[first ... end - 1] multiplied;
// put_pair: stores two neighbours
#include "backward.cuh"

constexpr int CHANNELS = 32;  // channels in shared memory at a time; a warp decays 8 of them
static_assert(CHANNELS == 8 * WARPS);

// A tile [channel, token]; LD (backward.cuh): the distance of neighbouring channels.
template <typename Stored> using ChannelTokens = Stored[CHANNELS * LD<Stored, CHUNK>];

// d += queries^T keys over 16 channels from c on, for 16 queries and 16 keys. queries, keys: the columns of their first
// token. As tensor cores take the left operand as [query, channel], its tile is TRANSPOSED; the right one,
// [channel, key], is not.
template <class M, typename Stored>
__device__ __forceinline__ void add_scores(float (&d)[2][4], const Stored* queries, const Stored* keys, int c) {
  constexpr int LDT = LD<Stored, CHUNK>;
  Left<M> a;
  Right<M> b[2];
  load_left<TRANSPOSED>(a, queries + c * LDT, LDT);
  load_right<AS_STORED>(b, keys + c * LDT, LDT);
  multiply(d, a, b);
}

// Stores the operands of scores of a lane's two tokens of sub-chunk m, in one channel: the queries and keys, times
// their factors about the sub-chunk's middle; and, in the tiles of borders, the queries after a border decayed from it,
// the keys before it decayed to it. start: the queries decayed from the sub-chunk's start; end: the keys decayed to its
// end; sub_chunk_decays: those of the channel; index: of the tokens in a tile.
template <class ReadOrder, class Operands>
__device__ __forceinline__ void put_operands(Operands& to, int index, int m, float2 query, float2 key, float2 start,
                                             float2 end, const MiddleFactors<ReadOrder>& middle,
                                             const float (&sub_chunk_decays)[NUM_SUBCHUNKS]) {
  // The first sub-chunk after the middle of the half that m is in, and after the middle of the chunk.
  const int after_block = m / 4 * 4 + 2, after_half = NUM_SUBCHUNKS / 2;
  const auto decayed = [&](int border) {
    return m < border ? product_over(sub_chunk_decays, m + 1, border) * end
                      : product_over(sub_chunk_decays, border, m) * start;
  };
  put_pair(to.queries + index, middle.queries * query);
  put_pair(to.keys + index, middle.keys * key);
  put_pair(to.border8 + index, m % 2 ? start : end);
  put_pair(to.border16 + index, decayed(after_block));
  put_pair(to.border32 + index, decayed(after_half));
}

// A warp's 16 x 16 scores [query, key]: (row, column) is the pair of a block of queries and a block of keys, each 0 to
// 3. `diagonal`: of (warp, warp), used for the pairs within a sub-chunk; border8: of (warp, warp), used for the second
// sub-chunk's queries and the first one's keys (border8[2] and [3]); border32: (half_row, half_column), pairs of both
// halves of the chunk; border16, of warps 0 and 1 only: (quarter + 1, quarter), pairs of the two blocks of a half, for
// which `quarter` is the number of a block. All other numbers of `diagonal` and border8, and those of keys after their
// query, have no meaning: the including kernel masks them.
struct ChunkScores {
  const int warp, half_row, half_column, quarter;
  float diagonal[2][4], border8[4], border16[2][4], border32[2][4];

  __device__ __forceinline__ explicit ChunkScores(int warp)
      : warp(warp),
        half_row(2 + (warp >> 1)),
        half_column(warp & 1),
        quarter(2 * warp),
        diagonal{},
        border8{},
        border16{},
        border32{} {}

  // Adds the products over 16 channels from c on of the tiles [channel, token] of `from`: queries and keys, of
  // `diagonal`; border8, border16 and border32, which have keys in the columns before, and queries in those after, the
  // border.
  template <class M, class Operands> __device__ __forceinline__ void add(const Operands& from, int c) {
    constexpr int LDT = LD<typename M::Stored, CHUNK>;
    add_scores<M>(diagonal, from.queries + 16 * warp, from.keys + 16 * warp, c);
    add_scores<M>(border32, from.border32 + 16 * half_row, from.border32 + 16 * half_column, c);
    if (warp < 2) add_scores<M>(border16, from.border16 + 16 * (quarter + 1), from.border16 + 16 * quarter, c);
    Left<M> a;
    Right<M> b[2];
    load_left<TRANSPOSED>(a, from.border8 + c * LDT + 16 * warp, LDT);
    load_right<AS_STORED>(b, from.border8 + c * LDT + 16 * warp, LDT);
    multiply(border8, a, b[0]);
  }
};
