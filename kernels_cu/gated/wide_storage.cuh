// what      How the two forward kernels of wide heads leave chunks to one another.
// shapes    operands [B, H, NC, tiles of K, 2, 32 * 128]: tiles of queries, then keys, as they lie in shared memory;
//           scores [B, H, NC, 2 * 32 * 40]; decays [B, H, NC, tiles of K * 128] float32
#include "gated/forward_storage.cuh"
#include "gated/forward_tiles.cuh"
#include "ptx.cuh"

constexpr int WIDE = 128;                      // channels of a tile
constexpr int TILE_SIZE = CHUNK<bf16> * WIDE;  // numbers
using WideScores = ScoreStorage<SinglePass, bf16, WIDE>;
constexpr int SCORES = sizeof(WideScores::A) / sizeof(bf16);

// Starts to copy so many numbers that lie side by side in both memories.
template <int NUMBERS, int THREADS, typename T> __device__ __forceinline__ void copy_tile(T* to, const T* from) {
  constexpr int PIECE = 16 / sizeof(T);
  static_assert(NUMBERS % PIECE == 0);
  for (int at = threadIdx.x * PIECE; at < NUMBERS; at += THREADS * PIECE) cp_async<16>(to + at, from + at, true);
}
