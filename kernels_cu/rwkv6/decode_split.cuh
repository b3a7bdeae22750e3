// what      Vectors split into sums of numbers that tensor cores read exactly, and their products with 16 rows of
//           weights.
// numerics  a number of x is the sum of three bfloat16 numbers (exact) with bfloat16 weights, of four digits of 8 bits
//           with int8 weights, and of two tf32 numbers otherwise; float32 weights are two tf32 numbers, too
// source    Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022, for the split; Ootomo,
//           Ozaki and Yokota, "DGEMM on integer matrix multiplication unit", 2024, for the digits
#include "rwkv6/decode_weights.cuh"

// The type of sums of products with weights of type T.
template <typename T> struct Sum {
  typedef float Type;
};
template <> struct Sum<i8> {
  typedef i32 Type;
};

// How each number of x is split into TERMS for weights of type T. Terms are columns of one product [16 rows of weights,
// 8]: column n has term n of every number. multiply: sums += weights times terms; a lane has the rows `upper` and
// `lower` of the weights, 8 apart, and of each EACH neighbours along K, whose terms are WORDS words x. Products go to
// SUMS sums in turn, since a product waits for the one before it that adds to the same sum.
template <typename T> struct Split {
  static constexpr int EACH = Lane<T>::EACH, TERMS = 2, WORDS = EACH, SUMS = EACH / 4;

  // The two tf32 numbers. Adding 0x1000 makes the tensor cores' cut of `rest` a rounding to nearest.
  static __device__ __forceinline__ u32 high(u32 x) { return x & 0xffffe000u; }
  static __device__ __forceinline__ u32 rest(u32 x) {
    return __float_as_uint(__uint_as_float(x) - __uint_as_float(high(x))) + 0x1000u;
  }
  // Term number `which` of each of a lane's numbers x, as float32 bits.
  static __device__ __forceinline__ void term(u32 (&to)[WORDS], const u32 (&x)[EACH], int which) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) to[i] = which ? rest(x[i]) : high(x[i]);
  }

  // Weight number i of the 16 bytes w, as float32 bits.
  static __device__ __forceinline__ u32 weight(const uint4& w, int i) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    if constexpr (sizeof(T) == 4) return words[i];
    else return __float_as_uint(to_float(T{u16(words[i / 2] >> 16 * (i % 2))}));
  }
  static __device__ __forceinline__ void multiply(float (&sums)[SUMS][4], const uint4& upper, const uint4& lower,
                                                  const u32 (&x)[WORDS]) {
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
      const u32 w[4] = {weight(upper, i), weight(lower, i), weight(upper, i + 1), weight(lower, i + 1)};
      const u32 pair[2] = {x[i], x[i + 1]};
      if constexpr (sizeof(T) == 4) {
        const u32 small[4] = {rest(w[0]), rest(w[1]), rest(w[2]), rest(w[3])};
        mma_tf32(sums[i / 4], small, pair);
      }
      mma_tf32(sums[i / 4], w, pair);
    }
  }
};

// What weights have in common whose words are multiplied as they are: 16 bytes of terms by 16 bytes of each row.
template <typename T> struct PackedSplit {
  static constexpr int EACH = Lane<T>::EACH, WORDS = 4, SUMS = 2;

  static __device__ __forceinline__ void multiply(typename Sum<T>::Type (&sums)[SUMS][4], const uint4& upper,
                                                  const uint4& lower, const u32 (&x)[WORDS]) {
    const u32 first[4] = {upper.x, lower.x, upper.y, lower.y}, second[4] = {upper.z, lower.z, upper.w, lower.w};
    const u32 x_first[2] = {x[0], x[1]}, x_second[2] = {x[2], x[3]};
    if constexpr (sizeof(T) == 1) mma_i8(sums[0], first, x_first), mma_i8(sums[1], second, x_second);
    else mma_m16n8k16(sums[0], first, x_first, T{}), mma_m16n8k16(sums[1], second, x_second, T{});
  }
};

// Three bfloat16 numbers; two neighbours a word.
template <> struct Split<bf16> : PackedSplit<bf16> {
  static constexpr int TERMS = 3;
};

// For int8 weights: four digits of base 256, the lowest first, of a number of 31 bits; four neighbours a word.
template <> struct Split<i8> : PackedSplit<i8> {
  static constexpr int TERMS = 4;

  // Digits from -128 to 127 of the integers nearest to four numbers x times `times`, the inverse of their unit:
  // words[d] has the d-th digit of each, the lowest first. of_number: the four digits of one integer, a byte each;
  // adding and flipping 0x80 in the lower three carries from a digit above 127 to the next.
  static __device__ __forceinline__ void digits(u32 (&words)[TERMS], const float4& x, float times) {
    const u32 a = of_number(x.x * times), b = of_number(x.y * times);
    const u32 c = of_number(x.z * times), d = of_number(x.w * times);
    const u32 low[2] = {__byte_perm(a, b, 0x5140), __byte_perm(c, d, 0x5140)};
    const u32 high[2] = {__byte_perm(a, b, 0x7362), __byte_perm(c, d, 0x7362)};
    words[0] = __byte_perm(low[0], low[1], 0x5410), words[1] = __byte_perm(low[0], low[1], 0x7632);
    words[2] = __byte_perm(high[0], high[1], 0x5410), words[3] = __byte_perm(high[0], high[1], 0x7632);
  }
  static __device__ __forceinline__ u32 of_number(float x) {
    return (u32(__float2int_rn(x)) + 0x00808080u) ^ 0x00808080u;
  }
};
