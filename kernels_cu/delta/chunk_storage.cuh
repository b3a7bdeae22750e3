// what      Types of shared memory for a chunk of tokens, in the delta rules' kernels of every card.
// limits    T of bfloat16, float16, single
//
// From operands.cuh: `single`: a float x, the type of float32 data; Word<T>: two numbers of T, 32 bits of two 16-bit
// numbers or the float2 of two `single`
#include "delta/operands.cuh"
#include "ptx.cuh"

constexpr int BT = 32;  // tokens of a chunk
// The distance of rows in a float matrix [BT, BT]: 16 bytes of each of eight neighbouring rows are in different banks.
constexpr int LD = BT + 4;

// Loads 16 rows, from `row` on, by 16 columns, from `column` on, of a matrix as tensor cores' operands. at(i, j): the
// address of number (i, j). column: a multiple of 8, for ldmatrix's 16 bytes. Not TRANSPOSED: a left operand, whose
// words are neighbours in a row. TRANSPOSED: a[0] and a[1] are a right operand of the first 8 columns, a[2] and a[3] of
// the last 8, for a sum over rows; words are neighbours in a column.
template <bool TRANSPOSED, typename T, class At>
__device__ __forceinline__ void load_operand(Word<T> (&a)[4], At at, int row, int column, int lane) {
  if constexpr (sizeof(T) == 4) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int i = row + m % 2 * 8, j = column + m / 2 * 8;
      if (TRANSPOSED) a[m] = {at(i + 2 * t, j + g)->x, at(i + 2 * t + 1, j + g)->x};
      else a[m] = unpack_pair(at(i + g, j + 2 * t));
    }
  } else {
    const T* from = at(row + (lane & 15), column + (lane >> 4) * 8);
    if (TRANSPOSED) ldmatrix_x4_trans(a, from);
    else ldmatrix_x4(a, from);
  }
}

// A matrix [BT, BT]. If T has 16 bits, each number is the sum of two: the rounded number, and its rounding error REST
// numbers later. A `single` has no second number. NUMBERS: how many; LDA: the distance of rows, by which the 16 bytes
// of eight rows that ldmatrix reads at a time are in different banks. at(i, j): the address of the rounded number;
// number(i, j): the sum.
template <typename T> struct alignas(16) Matrix {
  static constexpr int NUMBERS = sizeof(T) == 4 ? 1 : 2, LDA = BT + 8, REST = BT * LDA;
  T x[NUMBERS * REST];
  __device__ __forceinline__ T* at(int i, int j) { return x + i * LDA + j; }
  __device__ __forceinline__ float number(int i, int j) const {
    const T* two = x + i * LDA + j;
    if constexpr (NUMBERS == 1) return to_float(two[0]);
    else return to_float(two[0]) + to_float(two[REST]);
  }
  // The rounding errors of numbers i, j and i, j + 1, 0 of `single`; j is even.
  __device__ __forceinline__ float2 errors_at(int i, int j) const {
    if constexpr (NUMBERS == 1) return {};
    else return unpack_pair(x + REST + i * LDA + j);
  }

  // load_operand of the rounded numbers (number 0) or of their errors (1, which callers, whose loops end at NUMBERS,
  // never ask of `single`).
  __device__ __forceinline__ void load(Word<T> (&a)[4], int number, int row, int column, int lane) const {
    load_operand<false, T>(a, [&](int i, int j) { return x + number * REST + i * LDA + j; }, row, column, lane);
  }
};

// A lower triangle [BT, BT]: three blocks [16, 16], without that above the diagonal. Numbers are as in Matrix. In half
// of a block's rows the first and last 8 columns are swapped, by which the 16 bytes of eight neighbouring rows are in
// different banks.
template <typename T> struct alignas(16) LowerMatrix {
  static constexpr int NUMBERS = Matrix<T>::NUMBERS, SIDE = BT / 2, REST = 3 * SIDE * SIDE;
  T x[NUMBERS * REST];
  __device__ __forceinline__ static bool has(int i, int j) { return i >= SIDE || j < SIDE; }
  // The place of number (i, j), which must be there.
  __device__ __forceinline__ static int place(int i, int j) {
    const int swapped = i >> (sizeof(T) == 4 ? 1 : 2) & 1;
    return (i / SIDE + j / SIDE) * SIDE * SIDE + i % SIDE * SIDE + ((j / 8 & 1 ^ swapped) * 8 | j % 8);
  }
  // Row and column of the n-th number, in the order of blocks, rows, columns.
  __device__ __forceinline__ static int row(int n) { return (n >= SIDE * SIDE) * SIDE + n / SIDE % SIDE; }
  __device__ __forceinline__ static int column(int n) { return (n >= 2 * SIDE * SIDE) * SIDE + n % SIDE; }

  // As Matrix has it. row, column: multiples of 16, of a block that is there.
  template <bool TRANSPOSED = false>
  __device__ __forceinline__ void load(Word<T> (&a)[4], int number, int row, int column, int lane) const {
    load_operand<TRANSPOSED, T>(a, [&](int i, int j) { return x + number * REST + place(i, j); }, row, column, lane);
  }
};

// Numbers of a chunk's tokens for GatedDelta, the rule with one gate a token. Inverse lengths are 1 if rows are not
// normalized. A token's decay is e^g of its log gate g; past the sequence's end it is 1, and beta is 0.
struct alignas(16) TokenFactors {
  float decay_between[BT][LD];  // [i][j]: from after token j through token i; 1 for i = j, 0 for i < j
  float beta[BT];
  float decay_from_start[BT], decay_to_end[BT];  // from the chunk's start through token i; from after it to the end
  float inverse_length[2 * BT];                  // of keys, then of queries
};
