// what      The arrays by which wide_operands.cu hands chunks of 32 tokens to wide_forward.cu, NC chunks a batch row.
// shapes    operands [B, H, NC, tiles of K, 2, 32 * 128]: a tile [32 tokens, 128 channels] of queries decayed from the
//           chunk's start, then one of keys decayed to its end, with the layout of shared memory (forward_tiles.cuh);
//           scores [B, H, NC, 2, 32 queries, 40]: 32 keys and padding; first the rounded scores, then their rounding
//           errors; decays [B, H, NC, tiles of K * 128] float32: over the chunk
#include "gated/forward_storage.cuh"
#include "gated/forward_tiles.cuh"
#include "ptx.cuh"

constexpr int WIDE = 128;                                     // channels of a tile
constexpr int TILE_SIZE = CHUNK<bf16> * WIDE;                 // numbers
using WideScores = ScoreStorage<SinglePass, bf16, WIDE>;      // its member A is a chunk's scores
constexpr int SCORES = sizeof(WideScores::A) / sizeof(bf16);  // numbers of scores of a chunk

// Starts copying NUMBERS neighbouring numbers to shared memory.
template <int NUMBERS, int THREADS, typename T> __device__ __forceinline__ void copy_tile(T* to, const T* from) {
  constexpr int PIECE = 16 / sizeof(T);
  static_assert(NUMBERS % PIECE == 0);
  for (int index = threadIdx.x * PIECE; index < NUMBERS; index += THREADS * PIECE)
    cp_async<16>(to + index, from + index);
}
