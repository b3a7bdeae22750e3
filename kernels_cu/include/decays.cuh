// what      The decays of a lane's pair of tokens in a sub-chunk of 8 tokens.
// math      a_t = e^(the log gate of token t). The decay from the sub-chunk's start to the state that token i reads:
//           prod_{m<=i} a_m (RWKV-6: m < i).
//           From after token j to the sub-chunk's end: prod_{m>j} a_m. The sub-chunk's middle is between its tokens 3
//           and 4. The factors of queries after it and of keys before it are products of the decays in between, those
//           of queries before it and of keys after it are inverses of such products.
// shapes    a lane has channel (or column) lane / 4, and of every sub-chunk the pair of tokens 2p, 2p + 1,
//           p = lane % 4, as in fragments.cuh
// numerics  Decays are products; gates are not subtracted, so that a large gate does not swallow small ones. About the
//           middle a gate counts as at least -20, so that inverses are finite: e^-20 of a token passes a reset (a_t =
//           0) in its sub-chunk. For RWKV-6 and OWN (MiddleFactors), which invert products of four gates, a gate counts
//           as at least -16.
#include "read_order.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr float LEAST_DECAY = 2.0611536e-9f;  // the least decay about a middle, e^-20

__device__ __forceinline__ float2 operator*(float a, float2 x) { return {a * x.x, a * x.y}; }
__device__ __forceinline__ float2 operator*(float2 a, float2 x) { return {a.x * x.x, a.y * x.y}; }
__device__ __forceinline__ float2 operator+(float2 a, float2 x) { return {a.x + x.x, a.y + x.y}; }
__device__ __forceinline__ float2 decays_of(float2 gates) { return {decay_of(gates.x), decay_of(gates.y)}; }

// The sum, or the product, of the values x of the four lanes with the same lane / 4: of the lanes before this one, of
// the lanes after it, and of all four. combine_lanes: `join` adds with `neutral` 0, or multiplies with `neutral` 1. All
// lanes of the warp call these functions together.
struct FourLanes {
  float before, after, all;
};
template <class F> __device__ __forceinline__ FourLanes combine_lanes(float x, float neutral, F join) {
  const int t = threadIdx.x & 3;
  const float other = __shfl_xor_sync(0xffffffffu, x, 1), two = join(x, other);
  const float other_two = __shfl_xor_sync(0xffffffffu, two, 2);
  return {join(t & 1 ? other : neutral, t & 2 ? other_two : neutral),
          join(t & 1 ? neutral : other, t & 2 ? neutral : other_two), join(two, other_two)};
}
__device__ __forceinline__ FourLanes four_lane_products(float x) {
  return combine_lanes(x, 1.f, [](float a, float b) { return a * b; });
}
__device__ __forceinline__ FourLanes four_lane_sums(float x) {
  return combine_lanes(x, 0.f, [](float a, float b) { return a + b; });
}

// The decay of this lane's channel over the whole sub-chunk: exp of the sum of gates. PairDecays::whole is the product
// of the tokens' decays instead, which differs in rounding. All lanes of the warp call this, and make PairDecays and
// MiddleFactors, together.
__device__ __forceinline__ float decay_over_subchunk(float2 gates) {
  return decay_of(four_lane_sums(gates.x + gates.y).all);
}

// The decays of a lane's pair of tokens: `start`, from the sub-chunk's start to the state that each token reads; `end`,
// from after each token to the sub-chunk's end; `whole`, over the sub-chunk. a: the decays of the two tokens
// themselves.
template <class ReadOrder> struct PairDecays {
  float2 start, end;
  float whole;

  __device__ __forceinline__ explicit PairDecays(float2 a) {
    const FourLanes others = four_lane_products(a.x * a.y);
    whole = others.all;
    end = {a.y * others.after, others.after};
    if (ReadOrder::reads_before_write) start = {others.before, others.before * a.x};
    else start = {others.before * a.x, others.before * a.x * a.y};
  }
};

// The factors of a lane's pair of queries and of keys, from and to the sub-chunk's middle, of the decays a of the two
// tokens. OWN: GLA's scores of tokens with themselves are computed by these factors, too. Without
// OWN, scores use no factor of query 0 or key 7, since a score's query is later than its key.
constexpr bool WITH_OWN_PAIR = true;  // of OWN
template <class ReadOrder, bool OWN = false> struct MiddleFactors {
  static constexpr float LEAST = OWN || ReadOrder::reads_before_write ? 1.1253517e-7f : LEAST_DECAY;  // e^-16
  // Multiplies queries' factors and divides keys'. Without it GLA's would be e^-80 to e^60 for queries, e^-60 to e^80
  // for keys. With CENTRE, about e^10, both are e^-70 to e^70, so that their rounding errors in tf32 are normal
  // numbers, too; the largest that scores use, of query 1 and key 6, are e^50. RWKV-6's are e^-48 to e^64 for both, and
  // the largest that scores use, of query 1 and key 6, e^48. OWN: about e^8, for factors from e^-56 to e^56.
  static constexpr float CENTRE = ReadOrder::reads_before_write ? 1.f : OWN ? 4096.f : 16384.f;
  float2 queries, keys;

  __device__ __forceinline__ explicit MiddleFactors(float2 a) {
    const int t = threadIdx.x & 3;
    const bool is_after = t & 2;                    // whether the pair is after the middle
    const bool is_outer = is_after == bool(t & 1);  // whether another pair lies between it and the middle
    const float x = max_nan(a.x, LEAST), y = max_nan(a.y, LEAST), xy = x * y;
    const float other = __shfl_xor_sync(0xffffffffu, xy, 1);
    // The decays between the pair and the middle, times CENTRE or its inverse.
    const float base = (is_after ? CENTRE : 1.f / CENTRE) * (is_outer ? other : 1.f);
    // direct: products of decays, for queries after the middle and keys before it; inverted: inverses of such products,
    // for queries before it and keys after it.
    const float2 queries_after = {base * x, base * xy}, keys_before = {base * y, base};
    if (ReadOrder::reads_before_write) {
      const float2 direct = {is_after ? base : keys_before.x, is_after ? queries_after.x : base};
      const float2 inverted = {inverse(is_after ? queries_after.x : base * xy),
                               inverse(is_after ? queries_after.y : keys_before.x)};
      queries = {is_after ? direct.x : inverted.x, is_after ? direct.y : inverted.y};
      keys = {is_after ? inverted.x : direct.x, is_after ? inverted.y : direct.y};
    } else {
      const float2 direct = {is_after ? queries_after.x : keys_before.x, is_after ? queries_after.y : base};
      const float2 inverted = {inverse(direct.x), inverse(direct.y)};
      queries = {is_after ? direct.x : inverted.x, is_after ? direct.y : inverted.y};
      keys = {is_after ? inverted.x : direct.x, is_after ? inverted.y : direct.y};
    }
  }
};

// `product` times factors[first ... end - 1], multiplied in this order.
template <int N>
__device__ __forceinline__ float product_over(const float (&factors)[N], int first, int end, float product = 1.f) {
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (n >= first && n < end) product *= factors[n];
  return product;
}
