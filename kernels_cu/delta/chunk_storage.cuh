// what      Types of shared memory for a chunk of tokens, in the delta rules' kernels of every card.
// limits    T of bfloat16, float16
#include "gated/forward_tiles.cuh"
#include "ptx.cuh"

constexpr int BT = 32;      // tokens of a chunk
constexpr int LD = BT + 4;  // distance of rows in a float matrix [BT, BT]: rows are in different banks

// A matrix [BT, BT] of which each number is the sum of two of T: the rounded number at x, and its rounding error REST
// numbers later. LDA: the distance of rows.
template <typename T> struct alignas(16) Matrix {
  static constexpr int LDA = BT + 8, REST = BT * LDA;
  T x[2 * REST];
  __device__ __forceinline__ T* at(int i, int j) { return x + i * LDA + j; }
};

// Numbers of a chunk's tokens. Kernels without normalized rows have inverse lengths of 1.
struct alignas(16) TokenFactors {
  float decay_between[BT][LD];  // [i][j]: from after token j through token i; 0 for i < j
  float beta[BT];
  float decay_from_start[BT], decay_to_end[BT];  // from the chunk's start through token i; from after it to the end
  float inverse_length[2 * BT];                  // of keys, then of queries
};
