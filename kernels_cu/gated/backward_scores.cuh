// what      The scores of a chunk of 64 tokens in the backward kernels of every card: each of four warps computes some
//           16 x 16 blocks of the lower triangle, from decayed queries and keys of CHANNELS channels at a time.
// shapes    operands are [32, 64]: channel, token; scores are blocks of 16 x 16 tokens in accumulators of mma.sync
#include "backward.cuh"

constexpr int CHANNELS = 32;  // channels in shared memory at a time; a warp decays 8 of them

template <typename Stored> using Across = Stored[CHANNELS * LD<Stored, CHUNK>];  // [32, 64]: channel, token

// d += queries^T keys of 16 x 16 tokens over 16 channels from c on.
template <class M, typename Stored>
__device__ __forceinline__ void score(float (&d)[2][4], const Stored* queries, const Stored* keys, int c) {
  constexpr int LDT = LD<Stored, CHUNK>;
  Left<M> a;
  Right<M> b[2];
  load_left<true>(a, queries + c * LDT, LDT);
  load_right<false>(b, keys + c * LDT, LDT);
  multiply(d, a, b);
}

// A warp's blocks: on the diagonal, in the lower left quarter, and beside the diagonal. Of the block on the diagonal
// `diagonal` holds the pairs within a sub-chunk, `eights` the pairs of its two sub-chunks.
struct ChunkScores {
  const int warp, half_row, half_column, quarter;
  float diagonal[2][4], eights[4], quarters[2][4], halves[2][4];

  __device__ __forceinline__ explicit ChunkScores(int warp)
      : warp(warp),
        half_row(2 + (warp >> 1)),
        half_column(warp & 1),
        quarter(2 * warp),
        diagonal{},
        eights{},
        quarters{},
        halves{} {}

  // Adds the products over 16 channels from c on.
  template <class M, class Operands> __device__ __forceinline__ void add(const Operands& from, int c) {
    constexpr int LDT = LD<typename M::Stored, CHUNK>;
    score<M>(diagonal, from.queries + 16 * warp, from.keys + 16 * warp, c);
    score<M>(halves, from.halves + 16 * half_row, from.halves + 16 * half_column, c);
    if (warp < 2) score<M>(quarters, from.quarters + 16 * (quarter + 1), from.quarters + 16 * quarter, c);
    Left<M> a;
    Right<M> b[2];
    load_left<true>(a, from.eights + c * LDT + 16 * warp, LDT);
    load_right<false>(b, from.eights + c * LDT + 16 * warp, LDT);
    multiply(eights, a, b[0]);
  }
};
