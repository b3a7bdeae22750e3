// what      float32 numbers as one or two tf32 numbers, which tensor cores read as the first 19 bits of a float32.
// source    Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022, eq. 5-8, for two numbers
#include "ptx.cuh"

// x as a product in tf32 reads it, which ignores the last 13 bits.
__device__ __forceinline__ float cut_off(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// The factor of a product for each operand that is not rounded (that would take four instructions) but cut off: then
// the average error is 0. On average 0.7213 * 2^-11 of a number is cut off, half of the last digit that is read; 0.7213
// is 1 / (2 ln 2), the mean of 1/m over mantissas m with uniform logarithms.
constexpr float CUT_OFF_CORRECTION = 1.f + 0.7213f / 2048;

// Whether an operand is the sum of two tf32 numbers, or one number.
constexpr bool SPLIT = true, UNSPLIT = false;

// The bits of two tf32 numbers whose sum is x: to 22 bits if both are ROUNDED, else, in half the time, to 21 bits.
struct TwoTf32 {
  u32 high, low;
};
constexpr bool ROUNDED = true, CUT_OFF = false;
template <bool ROUNDED> __device__ __forceinline__ TwoTf32 two_tf32(float x) {
  const u32 high = ROUNDED ? to_tf32(x) : __float_as_uint(cut_off(x));
  const float rest = x - __uint_as_float(high);
  return {high, ROUNDED ? to_tf32(rest) : __float_as_uint(rest)};
}
