// what      A warp's products D[16, 8] += A[16, 16] B[16, 8] on tensor cores, of operands loaded from shared memory or
//           computed by the lanes. All 32 lanes call the functions that load or multiply together, and a barrier or a
//           __syncwarp has passed since what they load was written.
// math      The depth is the axis that is summed over: A's columns, B's rows. With g = lane / 4 and t = lane % 4 a lane
//           holds pairs of neighbours along it:
//           left operand A: pair p is row g + 8 (p % 2), depths 8 (p / 2) + 2t and the next;
//           right operand B: pair p is column g, depths 8 p + 2t and the next
//           A result D has d[0], d[1] in row g at columns 2t, 2t + 1, and d[2], d[3] in row g + 8. These are the
//           pairs of a left operand: two results side by side are one without any move.
//           A tf32 instruction takes 8 depths, of which a lane has t and t + 4. It is given depth 2t as its depth t,
//           and depth 2t + 1 as its depth t + 4, in both operands: the sum is over the same products.
// numerics  bfloat16 data: one product in bfloat16. Other data: in tf32, which has float32's range and float16's
//           fraction: one product, or three of operands split in two tf32 numbers, which keep 21 bits. Kernels that
//           compute gradients load operands unrounded (load_left, load_right): tf32 cuts these off, and the kernels
//           multiply their products by TF32_CORRECTION
#include "tf32.cuh"

// How data of type T are multiplied: in PRODUCTS products of the tensor cores, 1 or 3 (of operands SPLIT in two
// numbers). In shared memory operands have the type `Stored`.
template <typename T, int PRODUCTS> struct Math {
  using Stored = float;
  static constexpr bool SPLIT = PRODUCTS == 3;
};
template <> struct Math<bf16, 1> {
  using Stored = bf16;
  static constexpr bool SPLIT = false;
};

// A caller that passes operands unrounded to a single tf32 product multiplies the result by TF32_CORRECTION<M, E> for
// one operand, whose type in shared memory is E, and by TF32_CORRECTION_OF_BOTH for two. Both are 1 for bfloat16
// products, for operands of 16-bit types, which tf32 holds, and for split operands.
template <class M, typename E = typename M::Stored>
constexpr float TF32_CORRECTION =
    sizeof(typename M::Stored) == 4 && sizeof(E) == 4 && !M::SPLIT ? CUT_OFF_CORRECTION : 1.f;
template <class M, typename E = typename M::Stored>
constexpr float TF32_CORRECTION_OF_BOTH = TF32_CORRECTION<M, E> * TF32_CORRECTION<M, E>;

// The two 16-bit numbers of a word as floats, the lower half first. The second argument only gives their type.
__device__ __forceinline__ float2 unpack(u32 two, bf16) {
  return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpack(u32 two, f16) {
  return {to_float(f16{u16(two)}), to_float(f16{u16(two >> 16)})};
}

// A lane's N pairs of an operand: pair p in words[p] if bfloat16, else as the tf32 numbers high[2p] and high[2p + 1],
// SPLIT with their remainders in `low`. set(p, pair) rounds floats, or splits them (`high` is x cut off, `low` the
// rest, which the product cuts off); set(i, x) sets number i alone. `set_unrounded` does the same without rounding: for
// floats that are rounded already, or that the product may cut off. In place of two floats a pair may be given as a
// word of two 16-bit numbers, followed by a value of their type.
template <bool SPLIT, typename Stored, int N> struct Pairs;
template <int N> struct Pairs<UNSPLIT, bf16, N> {
  static constexpr bool IS_BF16 = true;
  u32 words[N];

  __device__ __forceinline__ void set(int p, float2 x) { words[p] = pack<bf16>(x.x, x.y); }
  __device__ __forceinline__ void set(int p, u32 two, bf16) { words[p] = two; }
  template <typename... X> __device__ __forceinline__ void set_unrounded(int p, X... x) { set(p, x...); }
  __device__ __forceinline__ float2 get(int p) const { return unpack(words[p], bf16{}); }
};
template <bool SPLIT, int N> struct Pairs<SPLIT, float, N> {
  static constexpr bool IS_BF16 = false;
  u32 high[2 * N], low[SPLIT ? 2 * N : 1];

  __device__ __forceinline__ void set(int i, float x) {
    if constexpr (SPLIT) {
      const TwoTf32 two = two_tf32<CUT_OFF>(x);
      high[i] = two.high, low[i] = two.low;
    } else {
      high[i] = to_tf32(x);
    }
  }
  __device__ __forceinline__ void set(int p, float2 x) {
    set(2 * p, x.x);
    set(2 * p + 1, x.y);
  }
  __device__ __forceinline__ void set_unrounded(int i, float x) {
    if constexpr (SPLIT) set(i, x);
    else high[i] = __float_as_uint(x);
  }
  __device__ __forceinline__ void set_unrounded(int p, float2 x) {
    set_unrounded(2 * p, x.x);
    set_unrounded(2 * p + 1, x.y);
  }
  template <typename E> __device__ __forceinline__ void set_unrounded(int p, u32 two, E e) { set(p, two, e); }
  // 16-bit numbers are tf32 numbers. Not for SPLIT pairs, whose `low` would stay unset: of 16-bit data LeftData and
  // RightData are not split.
  template <typename E> __device__ __forceinline__ void set(int p, u32 two, E e) {
    const float2 x = unpack(two, e);
    high[2 * p] = __float_as_uint(x.x), high[2 * p + 1] = __float_as_uint(x.y);
  }
};
template <class M> using Left = Pairs<M::SPLIT, typename M::Stored, 4>;
template <class M> using Right = Pairs<M::SPLIT, typename M::Stored, 2>;

// Operands that are data of type T as they are in memory: 16-bit data are tf32 numbers already and need no split.
template <class M, typename T> using LeftData = Pairs<M::SPLIT && sizeof(T) == 4, typename M::Stored, 4>;
template <class M, typename T> using RightData = Pairs<M::SPLIT && sizeof(T) == 4, typename M::Stored, 2>;

// A left operand that is held in registers for a later product, in as few as possible: as floats, which the product
// splits or cuts off, or as bfloat16 pairs.
template <class M, typename Stored> struct HeldLeftOperand {
  float2 x[4];

  __device__ __forceinline__ void set(int p, float2 pair) { x[p] = pair; }
  // The pair as the product reads it.
  __device__ __forceinline__ float2 get(int p) const {
    return M::SPLIT ? x[p] : float2{cut_off(x[p].x), cut_off(x[p].y)};
  }
  __device__ __forceinline__ Left<M> left() const {
    Left<M> a;
#pragma unroll
    for (int p = 0; p < 4; ++p) a.set_unrounded(p, x[p]);
    return a;
  }
};
template <class M> struct HeldLeftOperand<M, bf16> : Left<M> {
  __device__ __forceinline__ const Left<M>& left() const { return *this; }
};
template <class M> using HeldLeft = HeldLeftOperand<M, typename M::Stored>;

// Which of a left operand's numbers is the i-th number a[i] of the tf32 instruction for depths 8 half to 8 half + 7.
__device__ __forceinline__ constexpr int left_register(int half, int i) { return 4 * half + 2 * (i & 1) + (i >> 1); }

// d += one of up to three products of a b over half of the depth, `half` 0 or 1. `product` 0 is a.low b.high, nothing
// unless a is split; 1 is a.high b.low, nothing unless b is split; 2 is a.high b.high.
template <bool A, bool B>
__device__ __forceinline__ void multiply_part(float (&d)[4], const Pairs<A, float, 4>& a, const Pairs<B, float, 2>& b,
                                              int half, int product) {
  if ((product == 0 && !A) || (product == 1 && !B)) return;
  const auto left = [&](int i) { return (product == 0 ? a.low : a.high)[left_register(half, i)]; };
  const auto right = [&](int i) { return (product == 1 ? b.low : b.high)[2 * half + i]; };
  const u32 left_words[4] = {left(0), left(1), left(2), left(3)}, right_words[2] = {right(0), right(1)};
  mma_tf32(d, left_words, right_words);
}

// d += a b over half of the depth.
template <bool A, bool B>
__device__ __forceinline__ void multiply_half(float (&d)[4], const Pairs<A, float, 4>& a, const Pairs<B, float, 2>& b,
                                              int half) {
#pragma unroll
  for (int product = 0; product < 3; ++product) multiply_part(d, a, b, half, product);
}
__device__ __forceinline__ void multiply_half(float (&d)[4], const Pairs<UNSPLIT, bf16, 4>& a,
                                              const Pairs<UNSPLIT, bf16, 2>& b, int half) {
  const u32 half_of_b[2] = {half == 0 ? b.words[0] : 0, half == 1 ? b.words[1] : 0};
  mma_m16n8k16(d, a.words, half_of_b, bf16{});
}

// d += a b.
template <bool A, bool B>
__device__ __forceinline__ void multiply(float (&d)[4], const Pairs<A, float, 4>& a, const Pairs<B, float, 2>& b) {
  multiply_half(d, a, b, 0);
  multiply_half(d, a, b, 1);
}
__device__ __forceinline__ void multiply(float (&d)[4], const Pairs<UNSPLIT, bf16, 4>& a,
                                         const Pairs<UNSPLIT, bf16, 2>& b) {
  mma_m16n8k16(d, a.words, b.words, bf16{});
}

// d[0] += a b[0], d[1] += a b[1]. Instructions for the two results alternate, since an instruction waits for the one
// before it that adds to the same result.
template <class L, class R> __device__ __forceinline__ void multiply(float (&d)[2][4], const L& a, const R (&b)[2]) {
  if constexpr (R::IS_BF16) {
    multiply(d[0], a, b[0]);
    multiply(d[1], a, b[1]);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int product = 0; product < 3; ++product)
#pragma unroll
        for (int n = 0; n < 2; ++n) multiply_part(d[n], a, b[n], half, product);
  }
}

// d[0] += a b[0], d[1] += a b[1], e[0] += x y[0], e[1] += x y[1], with instructions for the four results in turn.
template <class L, class R>
__device__ __forceinline__ void multiply(float (&d)[2][4], const L& a, const R (&b)[2], float (&e)[2][4], const L& x,
                                         const R (&y)[2]) {
  if constexpr (R::IS_BF16) {
    multiply(d, a, b);
    multiply(e, x, y);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int product = 0; product < 3; ++product)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          multiply_part(d[n], a, b[n], half, product);
          multiply_part(e[n], x, y[n], half, product);
        }
  }
}

// d += a b, for a sum d over many tokens. An instruction cuts its sum off, always towards 0. So a product of two split
// operands, whose own error is smaller than all these cuts, is summed by itself and added to d in float32, which
// rounds.
template <class D, class L, class R> __device__ __forceinline__ void accumulate(D& d, const L& a, const R& b) {
  multiply(d, a, b);
}
__device__ __forceinline__ void accumulate(float (&d)[4], const Pairs<SPLIT, float, 4>& a,
                                           const Pairs<SPLIT, float, 2>& b) {
  float product[4] = {};
  multiply(product, a, b);
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] += product[i];
}
__device__ __forceinline__ void accumulate(float (&d)[2][4], const Pairs<SPLIT, float, 4>& a,
                                           const Pairs<SPLIT, float, 2> (&b)[2]) {
  float products[2][4] = {};
  multiply(products, a, b);
#pragma unroll
  for (int i = 0; i < 8; ++i) d[i / 4][i % 4] += products[i / 4][i % 4];
}

// ---- operands from shared memory: rows of a tile are `ld` values apart, of a 16-bit type an odd multiple of 16 bytes

// How a tile holds a matrix: values of the functions' template parameter TRANSPOSED.
constexpr bool AS_STORED = false, TRANSPOSED = true;

// Calls f(m, this lane's pair of matrix m) for the four 8 x 8 matrices of a 16 x 16 tile. Matrix 0 is the upper left
// one, 3 the lower right one. Matrix 1 is below matrix 0 (DOWN_FIRST) or to its right. With g and t as above a lane's
// pair of a matrix is in row g at columns 2t and 2t + 1, or, TRANSPOSED, in column g at rows 2t and 2t + 1. If E has 16
// bits, f gets the pair as a word, followed by a value of type E, else as float2.
constexpr bool DOWN_FIRST = true, RIGHT_FIRST = false;
template <bool DOWN, bool TRANSPOSED, typename E, class F>
__device__ __forceinline__ void each_matrix(const E* tile, int ld, F f) {
  const int lane = threadIdx.x & 31, first = lane >> 3 & 1, second = lane >> 4;
  if constexpr (sizeof(E) == 2) {
    u32 r[4];
    const E* row = tile + ((lane & 7) + 8 * (DOWN ? first : second)) * ld + 8 * (DOWN ? second : first);
    if constexpr (TRANSPOSED) ldmatrix_x4_trans(r, row);
    else ldmatrix_x4(r, row);
#pragma unroll
    for (int m = 0; m < 4; ++m) f(m, r[m], E{});
  } else {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float* matrix = tile + 8 * (DOWN ? m & 1 : m >> 1) * ld + 8 * (DOWN ? m >> 1 : m & 1);
      if constexpr (TRANSPOSED) f(m, float2{matrix[2 * t * ld + g], matrix[(2 * t + 1) * ld + g]});
      else f(m, *reinterpret_cast<const float2*>(matrix + g * ld + 2 * t));
    }
  }
}

// Loads a left operand, by `set_unrounded`, from a tile [16, depth 16], or, TRANSPOSED, [depth 16, 16].
template <bool TRANSPOSED, class L, typename E> __device__ __forceinline__ void load_left(L& a, const E* tile, int ld) {
  each_matrix<!TRANSPOSED, TRANSPOSED>(tile, ld, [&](int m, auto... x) { a.set_unrounded(m, x...); });
}

// Loads two right operands side by side, by `set_unrounded`, from a tile [depth 16, 16], or, TRANSPOSED, [16, depth
// 16].
template <bool TRANSPOSED, class R, typename E>
__device__ __forceinline__ void load_right(R (&b)[2], const E* tile, int ld) {
  each_matrix<!TRANSPOSED, !TRANSPOSED>(tile, ld, [&](int m, auto... x) { b[m >> 1].set_unrounded(m & 1, x...); });
}

// Loads a tile [16 tokens, 16 channels] by channels: x[p] are the tokens 8 (p / 2) + 2t and the next of channel
// g + 8 (p % 2).
template <typename E> __device__ __forceinline__ void load_channels(float2 (&x)[4], const E* tile, int ld) {
  if constexpr (sizeof(E) == 2)
    each_matrix<RIGHT_FIRST, TRANSPOSED>(tile, ld, [&](int m, u32 two, E e) { x[m] = unpack(two, e); });
  else each_matrix<RIGHT_FIRST, TRANSPOSED>(tile, ld, [&](int m, float2 two) { x[m] = two; });
}

// Stores a pair at neighbouring places of a tile, aligned to the pair's size.
__device__ __forceinline__ void put_pair(bf16* to, float2 x) { *reinterpret_cast<u32*>(to) = pack<bf16>(x.x, x.y); }
__device__ __forceinline__ void put_pair(f16* to, float2 x) { *reinterpret_cast<u32*>(to) = pack<f16>(x.x, x.y); }
__device__ __forceinline__ void put_pair(float* to, float2 x) { *reinterpret_cast<float2*>(to) = x; }

// Loads a tile [32 tokens, 8 channels] by channels: x[p] are the tokens 8 p + 2t and the next of channel g.
template <typename E> __device__ __forceinline__ void load_column(float2 (&x)[4], const E* tile, int ld) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if constexpr (sizeof(E) == 2) {
    u32 r[4];
    ldmatrix_x4_trans(r, tile + lane * ld);
#pragma unroll
    for (int p = 0; p < 4; ++p) x[p] = unpack(r[p], E{});
  } else {
#pragma unroll
    for (int p = 0; p < 4; ++p) x[p] = {tile[(8 * p + 2 * t) * ld + g], tile[(8 * p + 2 * t + 1) * ld + g]};
  }
}
