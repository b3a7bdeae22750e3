// what      What the delta rules' kernels of every card have in shared memory of a chunk's tokens.
// limits    T of bfloat16, float16
#include "gated/forward_tiles.cuh"
#include "ptx.cuh"

constexpr int C = 32, LD = C + 4;  // tokens of a chunk; a row of a float matrix of tokens

// A matrix of tokens whose numbers are sums of two of T.
template <typename T> struct alignas(16) Matrix {
  static constexpr int LDA = C + 8, REST = C * LDA;
  T x[2 * REST];
  __device__ __forceinline__ T* at(int i, int j) { return x + i * LDA + j; }
};

// What is known of a chunk's tokens, and the decay from token j to token i, between[i][j]; 0 for i < j.
struct alignas(16) Decayed {
  float between[C][LD];
  float beta[C], start[C], end[C];  // start, end: decays from the chunk's start, to its end
  float unit[2 * C];                // 1 / lengths of keys, then of queries, or 1
};
