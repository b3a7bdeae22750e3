// what      Shared memory of the delta rule's kernels of every card that go from chunk to chunk.
// limits    T of bfloat16, float16; K <= BK; BK and BV of 64, 128
#include "gated/forward_tiles.cuh"
#include "ptx.cuh"

constexpr int C = 32, LD = C + 4;  // tokens of a chunk; a row of a float matrix of tokens

// A matrix of tokens whose numbers are sums of two of T.
template <typename T> struct alignas(16) Matrix {
  static constexpr int LDA = C + 8, REST = C * LDA;
  T x[2 * REST];
  __device__ __forceinline__ T* at(int i, int j) { return x + i * LDA + j; }
};

// What is known of a chunk's tokens, and of pairs of them.
struct alignas(16) Scored {
  float M[C][LD], A[C][LD], N[C][LD], between[C][LD];
  float decay[C], beta[C], start[C], end[C];  // of a token; from the chunk's start, to its end
  float unit[2 * C];                          // 1 / lengths of keys, then of queries, or 1
};

template <typename T, int BK, int BV> struct alignas(16) DeltaShared {
  T q[2][C * BK], k[2][C * BK], v[2][C * BV];  // of the present chunk, and the next; backwards do in place of v
  T W[C * BK], Z[C * BK], X[C * BV];
  Matrix<T> B, of_W, of_Z;
  Scored of;
  float whole[BK];  // the chunk's decay, for every channel
};
