// what      The arrays by which wide_operands.cu hands chunks to wide_forward.cu.
// shapes    operands [B, H, NC, tiles of K, 2, 32 * 128]: tiles of queries, then of keys, with the layout of shared
//           memory; scores [B, H, NC, 2 * 32 * 40]; decays [B, H, NC, tiles of K * 128] float32
#include "gated/forward_storage.cuh"
#include "gated/forward_tiles.cuh"
#include "ptx.cuh"

constexpr int WIDE = 128;                      // channels of a tile
constexpr int TILE_SIZE = CHUNK<bf16> * WIDE;  // numbers
using WideScores = ScoreStorage<SinglePass, bf16, WIDE>;
constexpr int SCORES = sizeof(WideScores::A) / sizeof(bf16);  // numbers, of a chunk

// Starts copying NUMBERS neighbouring numbers to shared memory.
template <int NUMBERS, int THREADS, typename T> __device__ __forceinline__ void copy_tile(T* to, const T* from) {
  constexpr int PIECE = 16 / sizeof(T);
  static_assert(NUMBERS % PIECE == 0);
  for (int index = threadIdx.x * PIECE; index < NUMBERS; index += THREADS * PIECE)
    cp_async<16>(to + index, from + index, true);
}
