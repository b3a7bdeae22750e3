// what      float32 numbers as one or two tf32 numbers, which tensor cores read as the first 19 bits of a float32.
// source    Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022, eq. 5-8, for two numbers
#include "ptx.cuh"

// x as a product in tf32 reads it, which ignores the last 13 bits.
__device__ __forceinline__ float cut_off(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

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
