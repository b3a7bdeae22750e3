// what      Shared by the kernels of RWKV models: sums over a block, activations, a step of the time mix, loads and
//           stores of neighbours, floats as sums of half-precision terms.
// tests     test_decode_kernels, test_rwkv_on_cuda, test_training_kernels
#include "lanes.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

// From the includes:
//   warp_sum: the sum, the same bits in every lane; inverse: 1 / x, 1 ulp; pack: two numbers in a word, the first one
//     in its low half; load_in_turn: a load that the compiler does not move to an earlier place

// The sum over the block of WARPS warps, the same bits in every thread; all threads call this, and it has one barrier.
// s_parts: a number for each warp in shared memory, which the caller does not use again before another barrier.
template <int WARPS> __device__ __forceinline__ float block_sum(float x, float* s_parts) {
  x = warp_sum(x);
  if ((threadIdx.x & 31) == 0) s_parts[threadIdx.x >> 5] = x;
  __syncthreads();  // the warps' sums are in shared memory
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sum += s_parts[warp];
  return sum;
}

// Two such sums with one barrier; without one if WARPS is 1, so that no caller may count on it.
template <int WARPS> __device__ __forceinline__ float2 block_sum(float2 x, float2* s_parts) {
  x = {warp_sum(x.x), warp_sum(x.y)};
  if constexpr (WARPS == 1) return x;
  if ((threadIdx.x & 31) == 0) s_parts[threadIdx.x >> 5] = x;
  __syncthreads();  // the warps' sums are in shared memory
  float2 sum = {};
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sum = {sum.x + s_parts[warp].x, sum.y + s_parts[warp].y};
  return sum;
}

// 1 / (1 + e^-x), and x times that.
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// sigmoid, as accurate as results of type X need.
template <typename X> __device__ __forceinline__ float sigmoid_for(float x) {
  return sizeof(X) == 4 ? sigmoid(x) : inverse(1.f + exp2_approx(-LOG2E * x));
}

// tanh with an error of 2e-7, far below the rounding of half-precision mixes.
__device__ __forceinline__ float tanh_approx(float x) {
  return fmaf(-2.f, inverse(1.f + exp2_approx(2.f * LOG2E * x)), 1.f);
}

// Channel by channel: x + y, x - y, x y + z.
__device__ __forceinline__ float4 plus(const float4& x, const float4& y) {
  return {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
}
__device__ __forceinline__ float4 minus(float4 x, float4 y) { return {x.x - y.x, x.y - y.y, x.z - y.z, x.w - y.w}; }
__device__ __forceinline__ float4 fma4(const float4& x, const float4& y, const float4& z) {
  return {fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y), fmaf(x.z, y.z, z.z), fmaf(x.w, y.w, z.w)};
}

// Two neighbouring lanes exchange pairs. The even one gets `lower` of both lanes, the odd one `upper` of both; the even
// lane's pair comes first. odd: threadIdx.x & 1. All lanes of the warp call this.
__device__ __forceinline__ float4 pairs_of_two_lanes(const float2& lower, const float2& upper, bool odd) {
  const float2 other = {__shfl_xor_sync(0xffffffffu, odd ? lower.x : upper.x, 1),
                        __shfl_xor_sync(0xffffffffu, odd ? lower.y : upper.y, 1)};
  return odd ? float4{other.x, other.y, upper.x, upper.y} : float4{lower.x, lower.y, other.x, other.y};
}

// Reads and steps four columns of one channel of RWKV-6's state: adds the channel's terms r (old + k u v) to the
// token's o in these columns, and returns the columns after the token, decay old + k v. old: those before; ku: k times
// the bonus.
__device__ __forceinline__ float4 read_and_step(float4& o, float4 old, float4 v, float k, float r, float decay,
                                                float ku) {
  o = {fmaf(r, fmaf(ku, v.x, old.x), o.x), fmaf(r, fmaf(ku, v.y, old.y), o.y), fmaf(r, fmaf(ku, v.z, old.z), o.z),
       fmaf(r, fmaf(ku, v.w, old.w), o.w)};
  return {fmaf(decay, old.x, k * v.x), fmaf(decay, old.y, k * v.y), fmaf(decay, old.z, k * v.z),
          fmaf(decay, old.w, k * v.w)};
}

// -- loads and stores of 2, 4 or 8 neighbours as floats; addresses are aligned to their size, or to 16 bytes ----------
// If a function does not ask for sizeof(X), its X has 16 bits; so has store4_terms' with several terms.
template <typename X> __device__ __forceinline__ float2 load2(const X* x) {
  if constexpr (sizeof(X) == 4) return *reinterpret_cast<const float2*>(x);
  else {
    const u32 both = *reinterpret_cast<const u32*>(x);
    return {to_float(X{u16(both)}), to_float(X{u16(both >> 16)})};
  }
}

template <typename X> __device__ __forceinline__ void store2(X* to, float2 x) {
  if constexpr (sizeof(X) == 4) *reinterpret_cast<float2*>(to) = x;
  else *reinterpret_cast<u32*>(to) = pack<X>(x.x, x.y);
}

__device__ __forceinline__ float4 load4(const float* x) { return *reinterpret_cast<const float4*>(x); }

template <typename X> __device__ __forceinline__ float4 load4(const X* x) {
  static_assert(sizeof(X) == 2);
  const uint2 both = *reinterpret_cast<const uint2*>(x);
  return {to_float(X{u16(both.x)}), to_float(X{u16(both.x >> 16)}), to_float(X{u16(both.y)}),
          to_float(X{u16(both.y >> 16)})};
}

template <typename X> __device__ __forceinline__ void store4(X* to, float4 x) {
  if constexpr (sizeof(X) == 4) *reinterpret_cast<float4*>(to) = x;
  else *reinterpret_cast<uint2*>(to) = {pack<X>(x.x, x.y), pack<X>(x.z, x.w)};
}

// store4 of numbers that are not read again soon.
template <typename X> __device__ __forceinline__ void store4_evict_first(X* to, float4 x) {
  if constexpr (sizeof(X) == 4)
    store_evict_first(*reinterpret_cast<uint4*>(to),
                      {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)});
  else store_evict_first(*reinterpret_cast<uint2*>(to), {pack<X>(x.x, x.y), pack<X>(x.z, x.w)});
}

// Four columns of a state of type S, as they are in memory.
template <typename S> struct Four {
  uint2 bits;
  __device__ __forceinline__ explicit operator float4() const {
    return {to_float(S{u16(bits.x)}), to_float(S{u16(bits.x >> 16)}), to_float(S{u16(bits.y)}),
            to_float(S{u16(bits.y >> 16)})};
  }
};
template <> struct Four<float> {
  float4 bits;
  __device__ __forceinline__ explicit operator float4() const { return bits; }
};
// Loads four columns where the call stands: an earlier load would take registers for longer (load_in_turn).
template <typename S> __device__ __forceinline__ Four<S> load_four(const S* x) {
  Four<S> found;
  load_in_turn(found.bits, x);
  return found;
}

// The type in which tensor cores multiply weights of type T: int8 weights as bfloat16.
template <typename T> struct MultipliedAs {
  typedef T Type;
};
template <> struct MultipliedAs<i8> {
  typedef bf16 Type;
};

// -- a float as a sum of TERMS numbers of a half type, each in an array of its own ------------------------------------
// A float is the sum over n of unit_of_term(n) * term n; three terms hold it. Who multiplies terms multiplies sums by
// their units (rwkv6/batch_product.cu): 2048, 1 and 1/2048 of float16, for a larger range, else 1, as for a single
// term. TERM_STEP is a power of two, so that dividing by a unit is exact. An x beyond the first of several terms
// becomes NaN.
constexpr int FLOAT_TERMS = 3;
template <typename X> constexpr float TERM_STEP = 1.f;
template <> constexpr float TERM_STEP<f16> = 2048.f;
template <typename X, int TERMS> __device__ __forceinline__ constexpr float unit_of_term(int term) {
  if (TERMS == 1) return 1.f;
  return term == 0 ? TERM_STEP<X> : term == 1 ? 1.f : 1.f / TERM_STEP<X>;
}

// The unit in which the squares of the channel mix, and products of them, are stored if they are one number of type X:
// float16 ends at 65504, and a square of 256 is larger. Several terms have units of their own. Who reads the products
// multiplies them by it: rwkv6/gated_add.cu, norm_shift.cu, training/add_norm.cu.
template <typename X, int TERMS = 1> constexpr float UNIT_OF_SQUARES = TERMS == 1 ? TERM_STEP<X> : 1.f;
template <typename X, int TERMS = 1> __device__ __forceinline__ float relu_squared(float x) {
  return x <= 0.f ? 0.f : x * x * (1.f / UNIT_OF_SQUARES<X, TERMS>);  // NaN for NaN
}

// Stores x, or four neighbouring numbers, as TERMS terms; `apart`: the distance of the terms' arrays.
template <int TERMS, typename X> __device__ __forceinline__ void store_terms(X* to, i64 apart, float x) {
  static_assert(sizeof(X) == 2 || TERMS == 1, "float32 numbers need no second term");
#pragma unroll
  for (int term = 0; term < TERMS; ++term, to += apart) {
    const float unit = unit_of_term<X, TERMS>(term);
    const X taken = from_float<X>(x * (1.f / unit));
    *to = taken;
    if (term + 1 < TERMS) x = fmaf(-unit, to_float(taken), x);
  }
}

template <int TERMS, typename X> __device__ __forceinline__ void store4_terms(X* to, i64 apart, float4 x) {
  static_assert(sizeof(X) == 2 || TERMS == 1, "float32 numbers need no second term");
#pragma unroll
  for (int term = 0; term < TERMS; ++term, to += apart) {
    const float unit = unit_of_term<X, TERMS>(term), inverse = 1.f / unit;
    if constexpr (TERMS == 1) store4(to, x);
    else {
      const uint2 both = {pack<X>(x.x * inverse, x.y * inverse), pack<X>(x.z * inverse, x.w * inverse)};
      *reinterpret_cast<uint2*>(to) = both;
      const float4 taken = load4(reinterpret_cast<const X*>(&both));
      x = {fmaf(-unit, taken.x, x.x), fmaf(-unit, taken.y, x.y), fmaf(-unit, taken.z, x.z), fmaf(-unit, taken.w, x.w)};
    }
  }
}

// What is done with a product: model_products.py has the same numbers. matvec.cu has no Parts, other kernels no Add.
enum class Finish : i64 { Write, Add, ReluSquared, Parts };

// Sets x to the eight values of a 16-bit type T that lie in 16 bytes.
template <typename T> __device__ __forceinline__ void unpack(float (&x)[8], const uint4& both) {
  const u32 words[4] = {both.x, both.y, both.z, both.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = to_float(T{u16(words[i / 2] >> 16 * (i % 2))});
}

template <typename T> __device__ __forceinline__ void load8(float (&x)[8], const T* from) {
  if constexpr (sizeof(T) == 4) {
    const float4 low = load4(from), high = load4(from + 4);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  } else {
    unpack<T>(x, *reinterpret_cast<const uint4*>(from));
  }
}

template <typename X> __device__ __forceinline__ void store8(X* to, const float (&x)[8]) {
  if constexpr (sizeof(X) == 4) {
    store4(to, {x[0], x[1], x[2], x[3]});
    store4(to + 4, {x[4], x[5], x[6], x[7]});
  } else {
    *reinterpret_cast<uint4*>(to) = {pack<X>(x[0], x[1]), pack<X>(x[2], x[3]), pack<X>(x[4], x[5]),
                                     pack<X>(x[6], x[7])};
  }
}
