// what      Decays of a lane's pairs of tokens within sub-chunks.
// math      a_t = exp g_t. In a sub-chunk of 8 tokens: from its start to where token i reads, prod_{m<=i} a_m (RWKV-6:
//           m < i); from after token j to its end, prod_{m>j} a_m; and both about its middle, one of them an inverse.
// shapes    a lane has channel (or column) g = lane / 4, and of every sub-chunk the pair of tokens 2t, 2t + 1,
//           t = lane % 4, as in fragments.cuh
// numerics  Decays are multiplied, not subtracted, so that gates of any size leave the others as they are. About the
//           middle a gate counts as at least -20, so that inverses stay in range: e^-20 of a token passes a reset
//           there. Where four gates are inverted, and not three about the centre, it is -16.
#include "read_order.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr float LEAST = 2.0611536e-9f;  // the least decay about a middle, e^-20

__device__ __forceinline__ float2 operator*(float a, float2 x) { return {a * x.x, a * x.y}; }
__device__ __forceinline__ float2 operator*(float2 a, float2 x) { return {a.x * x.x, a.y * x.y}; }
__device__ __forceinline__ float2 operator+(float2 a, float2 x) { return {a.x + x.x, a.y + x.y}; }
__device__ __forceinline__ float2 decays_of(float2 gates) { return {decay_of(gates.x), decay_of(gates.y)}; }

// Of a lane's four values, what those before it, behind it and all of them make.
struct Around {
  float before, behind, all;
};
template <class F> __device__ __forceinline__ Around around(float x, float nothing, F join) {
  const int t = threadIdx.x & 3;
  const float other = __shfl_xor_sync(0xffffffffu, x, 1), two = join(x, other);
  const float far = __shfl_xor_sync(0xffffffffu, two, 2);
  return {join(t & 1 ? other : nothing, t & 2 ? far : nothing), join(t & 1 ? nothing : other, t & 2 ? nothing : far),
          join(two, far)};
}
__device__ __forceinline__ Around products(float x) {
  return around(x, 1.f, [](float a, float b) { return a * b; });
}
__device__ __forceinline__ Around sums(float x) {
  return around(x, 0.f, [](float a, float b) { return a + b; });
}

// Of a lane's channel over a whole sub-chunk: the sum of gates, in float32, goes into one exp.
__device__ __forceinline__ float whole_decay(float2 gates) { return decay_of(sums(gates.x + gates.y).all); }

// A lane's pair of a sub-chunk: from its start to where the tokens read, from after them to its end, and over all of
// it.
template <class ReadOrder> struct Decays {
  float2 start, end;
  float all;

  __device__ __forceinline__ explicit Decays(float2 a) {
    const Around others = products(a.x * a.y);
    all = others.all;
    end = {a.y * others.behind, others.behind};
    if (ReadOrder::reads_before_write) start = {others.before, others.before * a.x};
    else start = {others.before * a.x, others.before * a.x * a.y};
  }
};

// About the middle of the sub-chunk: what queries and keys are multiplied by. OWN: GLA's tokens meet themselves, too.
template <class ReadOrder, bool OWN = false> struct Middle {
  static constexpr float LEAST = OWN || ReadOrder::reads_before_write ? 1.1253517e-7f : ::LEAST;  // e^-16
  // About e^10, for GLA, whose factors would lie between e^-80 and e^60: between e^-70 and e^70 what tf32 leaves of
  // them is in range too (e^50 where tokens meet others), as it is of RWKV-6's, of e^-48 to e^64 (e^48). OWN: about
  // e^8, from e^-56 to e^56.
  static constexpr float CENTRE = ReadOrder::reads_before_write ? 1.f : OWN ? 4096.f : 16384.f;
  float2 queries, keys;

  __device__ __forceinline__ explicit Middle(float2 a) {
    const int t = threadIdx.x & 3;
    const bool behind = t & 2, beside = behind == bool(t & 1);  // the middle; it, with no pair between
    const float x = at_least(a.x, LEAST), y = at_least(a.y, LEAST), xy = x * y;
    const float other = __shfl_xor_sync(0xffffffffu, xy, 1);
    const float base = (behind ? CENTRE : 1.f / CENTRE) * (beside ? other : 1.f);
    // one side as it is, the other inverted: queries behind the middle, keys before it
    const float2 queries_behind = {base * x, base * xy}, keys_before = {base * y, base};
    if (ReadOrder::reads_before_write) {
      const float2 near = {behind ? base : keys_before.x, behind ? queries_behind.x : base};
      const float2 far = {inverse(behind ? queries_behind.x : base * xy),
                          inverse(behind ? queries_behind.y : keys_before.x)};
      queries = {behind ? near.x : far.x, behind ? near.y : far.y};
      keys = {behind ? far.x : near.x, behind ? far.y : near.y};
    } else {
      const float2 near = {behind ? queries_behind.x : keys_before.x, behind ? queries_behind.y : base};
      const float2 far = {inverse(near.x), inverse(near.y)};
      queries = {behind ? near.x : far.x, behind ? near.y : far.y};
      keys = {behind ? far.x : near.x, behind ? far.y : near.y};
    }
  }
};

// The product of all[from...to-1], in this order, and of `x` before them.
template <int N> __device__ __forceinline__ float product_of(const float (&all)[N], int from, int to, float x = 1.f) {
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (n >= from && n < to) x *= all[n];
  return x;
}
