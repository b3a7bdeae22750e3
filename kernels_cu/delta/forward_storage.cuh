// what      Shared memory of the delta rule's forward kernel of every card.
// limits    K <= BK; BK and BV of 64, 128
#include "gated/forward_tiles.cuh"
#include "ptx.cuh"

constexpr int C = 32, LD = C + 4;  // tokens of a chunk; a row of a float matrix of tokens

// A matrix of tokens whose numbers are sums of two bfloat16 numbers.
struct alignas(16) Matrix {
  using X = bf16;
  static constexpr int LDA = C + 8, NUMBERS = 2, REST = C * LDA;
  bf16 x[NUMBERS * REST];
  __device__ __forceinline__ bf16* at(int i, int j) { return x + i * LDA + j; }
};

template <int BK, int BV> struct alignas(16) DeltaShared {
  bf16 q[2][C * BK], k[2][C * BK], v[2][C * BV];  // of the present chunk, and the next
  bf16 W[C * BK], Z[C * BK], X[C * BV];
  Matrix B, of_W, of_Z;
  float L[C][LD], A[C][LD], N[C][LD], between[C][LD];
  float decay[C], beta[C], start[C], end[C];  // of a token; from the chunk's start, to its end
  float unit[2 * C];                          // 1 / lengths of keys, then of queries, or 1
  float whole[BK];                            // the chunk's decay, for every channel
};
