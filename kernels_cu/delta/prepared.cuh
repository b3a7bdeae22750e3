// what      What a chunk of a delta rule does to a state, as one kernel leaves it for another in global memory.
// math      For a chunk, S is the state before it, V its values, D its decays. Y = E S, o = scale (W S + B V);
//           gated delta rule and KDA, E = -kd:  S <- D S + Z^T (V + Y);   rwkv7, E = ad:  S <- D S + Zb^T Y + Z^T V.
//           Backwards, C is the gradient of the state after the chunk:  P = Z C (rwkv7: Zb C),
//           dv = Z C + scale B^T do,   C <- D C + scale W^T do + E^T P
// shapes    a chunk of a head of values has one Prepared; those of a head lie one behind another
#include "delta/chunk_storage.cuh"

// TWO: values and what the state returns are written by different rows, Z[0] (Z) and Z[1] (Zb).
template <typename T, int BK, bool TWO> struct alignas(16) Prepared {
  static constexpr int OF_STATES = (2 + TWO) * C * BK * sizeof(T) + BK * sizeof(float);  // bytes before W

  T E[C * BK], Z[1 + TWO][C * BK];  // tiles, as place<BK> lays them out
  float whole[BK];                  // the chunk's decays
  T W[C * BK];                      // W and B are for outputs alone
  Matrix<T> B;
};

constexpr u32 SIGNS = 0x80008000;  // of two numbers of T

// Stores an array of shared memory, whose bits in `flipped` change.
template <int THREADS, typename X, int SIZE>
__device__ __forceinline__ void store_pieces(X (&to)[SIZE], const X (&from)[SIZE], u32 flipped = 0) {
  constexpr int PIECES = SIZE * sizeof(X) / 16;
  static_assert(SIZE * sizeof(X) % 16 == 0);
  for (int at = threadIdx.x; at < PIECES; at += THREADS) {
    uint4 x = reinterpret_cast<const uint4*>(from)[at];
    x.x ^= flipped, x.y ^= flipped, x.z ^= flipped, x.w ^= flipped;
    reinterpret_cast<uint4*>(to)[at] = x;
  }
}
