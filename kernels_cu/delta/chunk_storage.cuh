// what      Types of shared memory for a chunk of tokens, in the delta rules' kernels of every card.
// limits    T of bfloat16, float16
#include "gated/forward_tiles.cuh"
#include "ptx.cuh"

constexpr int C = 32, LD = C + 4;  // tokens of a chunk; distance of rows in a float matrix [C, C]

// A matrix [C, C] of which each number is the sum of two of T: the rounded number at x, and its rounding error REST
// numbers later. LDA: the distance of rows.
template <typename T> struct alignas(16) Matrix {
  static constexpr int LDA = C + 8, REST = C * LDA;
  T x[2 * REST];
  __device__ __forceinline__ T* at(int i, int j) { return x + i * LDA + j; }
};

// Numbers of a chunk's tokens. between[i][j]: the decay from after token j through token i; 0 for i < j.
struct alignas(16) Decayed {
  float between[C][LD];
  float beta[C], start[C], end[C];  // start, end: decays from the chunk's start, to its end
  float unit[2 * C];                // 1 / lengths of keys, then of queries, or 1
};
