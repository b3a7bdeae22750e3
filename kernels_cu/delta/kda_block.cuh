// what      The sums of pairs of tokens in a block of 4 tokens of KDA's chunks. A thread has 4 channels of the block.
// math      sums: q_i . k_j decayed, j <= i; k_i . k_j decayed, j < i; squares of keys and of queries
// numerics  float32, in the recurrence's order
#include "delta/channel_chunk.cuh"

enum Kind { OF_K, OF_Q };

// The sums of a block: scores numbered by PairOfBlock (j <= i: of queries, strict: of keys); then squares of keys, and
// of queries. Sets `decays` and `keys` to the block's. task.at(tile, n): the thread's numbers of token n of the block.
constexpr int SQUARES = PAIRS_OF_BOTH, SUMS = SQUARES + 2 * BLOCK;

template <int BK, class Task = BlockTask<BK>, class Tile, class Gates>
__device__ __forceinline__ SumsOfLanes<BK, SUMS> sum_block(Tile* q, Tile* k, Gates* g, float4 (&decays)[BLOCK],
                                                           float4 (&keys)[BLOCK]) {
  const Task task;
  float sums[SumsOfLanes<BK, SUMS>::EACH * Task::LANES] = {};
  float4 decayed[BLOCK];  // keys of the block, decayed to token i
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) {
    const float4 query = unpack_four(task.at(q, i)), key = keys[i] = unpack_four(task.at(k, i));
    decays[i] = decays_at(task.at(g, i));
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      decayed[j] = j == i ? key : times(decayed[j], decays[i]);
      add_product(sums[PairOfBlock::with_self(i, j)], query, decayed[j]);
      if (j < i) add_product(sums[PairOfBlock::before(i, j)], key, decayed[j]);
    }
    add_product(sums[SQUARES + BLOCK * OF_K + i], key, key),
        add_product(sums[SQUARES + BLOCK * OF_Q + i], query, query);
  }
  return sums;
}
