// what      Types of shared memory for a chunk of tokens, in the delta rules' kernels of every card.
// limits    T of bfloat16, float16, single
#include "delta/operands.cuh"
#include "ptx.cuh"

constexpr int BT = 32;      // tokens of a chunk
constexpr int LD = BT + 4;  // distance of rows in a float matrix [BT, BT]: rows are in different banks

// A matrix [BT, BT] of which each number is the sum of two of T: the rounded number at x, and its rounding error REST
// numbers later. A `single` stands alone. LDA: the distance of rows.
template <typename T> struct alignas(16) Matrix {
  static constexpr int NUMBERS = sizeof(T) == 4 ? 1 : 2, LDA = BT + 8, REST = BT * LDA;
  T x[NUMBERS * REST];
  __device__ __forceinline__ T* at(int i, int j) { return x + i * LDA + j; }
  __device__ __forceinline__ float number(int i, int j) const {
    const T* two = x + i * LDA + j;
    if constexpr (NUMBERS == 1) return to_float(two[0]);
    else return to_float(two[0]) + to_float(two[REST]);
  }
  // The rounding errors of numbers i, j and i, j + 1; j is even.
  __device__ __forceinline__ float2 errors_at(int i, int j) const {
    if constexpr (NUMBERS == 1) return {};
    else return unpack_pair(x + REST + i * LDA + j);
  }

  // Loads words of rows row + 0...15, columns column + 0...15 of all first (0) or second (1) numbers: a left operand,
  // or TRANSPOSED two right operands.
  template <bool TRANSPOSED = false>
  __device__ __forceinline__ void load(Word<T> (&a)[4], int number, int row, int column, int lane) const {
    if constexpr (sizeof(T) == 4) {
      const int g = lane >> 2, t = lane & 3;
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const T* matrix = x + (row + m % 2 * 8) * LDA + column + m / 2 * 8;
        if (TRANSPOSED) a[m] = {matrix[2 * t * LDA + g].x, matrix[(2 * t + 1) * LDA + g].x};
        else a[m] = unpack_pair(matrix + g * LDA + 2 * t);
      }
    } else {
      const T* from = x + number * REST + (row + (lane & 15)) * LDA + column + (lane >> 4) * 8;
      if (TRANSPOSED) ldmatrix_x4_trans(a, from);
      else ldmatrix_x4(a, from);
    }
  }
};

// Numbers of a chunk's tokens. Kernels without normalized rows have inverse lengths of 1.
struct alignas(16) TokenFactors {
  float decay_between[BT][LD];  // [i][j]: from after token j through token i; 0 for i < j
  float beta[BT];
  float decay_from_start[BT], decay_to_end[BT];  // from the chunk's start through token i; from after it to the end
  float inverse_length[2 * BT];                  // of keys, then of queries
};
