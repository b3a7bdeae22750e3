// what      Products of a warp on tensor cores, as exact as the storage type. All 32 lanes call `multiply` together.
// numerics  EXACT (float32 data): each operand is split into two tf32 numbers and three products keep 22 bits.
//           Otherwise (16-bit data): one tf32 product; tf32 has float16's fraction and float32's range, so no
//           operand overflows. If one operand is EXACT and the other 16-bit data, two products.
#include "tf32.cuh"

// An operand's registers: a lane's N values, ROUNDED to tf32 numbers (4 of a left operand, 2 of a right one); if SPLIT
// (tf32.cuh: true), also what rounding to them left. EXACT: SPLIT, for code that has only the type.
template <bool SPLIT, int N> struct Operand {
  static constexpr bool EXACT = SPLIT;
  u32 high[N];
  u32 low[EXACT ? N : 1];

  __device__ __forceinline__ void set(int i, float x) {
    const TwoTf32 two = two_tf32<ROUNDED>(x);
    high[i] = two.high;
    if constexpr (EXACT) low[i] = two.low;
  }
};

// An operand's registers for N values as they are stored: 16-bit data are tf32 numbers already.
template <typename T, int N> struct Data {
  static constexpr bool EXACT = false;
  u32 high[N];

  __device__ __forceinline__ void set(int i, float x) { high[i] = __float_as_uint(x); }
};
template <int N> struct Data<float, N> : Operand<SPLIT, N> {};

// d[16, 8] += a[16, 8] b[8, 8]; with g = lane / 4, t = lane % 4: d holds rows g, g + 8 and columns 2t, 2t + 1.
template <class A, class B> __device__ __forceinline__ void multiply(float (&d)[4], const A& a, const B& b) {
  if constexpr (A::EXACT) mma_tf32(d, a.low, b.high);
  if constexpr (B::EXACT) mma_tf32(d, a.high, b.low);
  mma_tf32(d, a.high, b.high);
}

// a = rows 0...15, columns 0...7 of a row-major tile, whose rows are `ld` numbers apart, as a left operand.
template <class A> __device__ __forceinline__ void load_a(A& a, const float* tile, int ld) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  a.set(0, tile[g * ld + t]);
  a.set(1, tile[(g + 8) * ld + t]);
  a.set(2, tile[g * ld + t + 4]);
  a.set(3, tile[(g + 8) * ld + t + 4]);
}

// b = rows 0...7, columns 0...7 of a row-major tile, whose rows are `ld` numbers apart, as a right operand: rows are
// summed over.
template <class B> __device__ __forceinline__ void load_b(B& b, const float* tile, int ld) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  b.set(0, tile[t * ld + g]);
  b.set(1, tile[(t + 4) * ld + g]);
}
