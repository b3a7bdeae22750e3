// what      Values of a chunk and their decays, by columns: a warp has 16 columns and all tokens of them.
// math      b_t = exp gv_t. In a sub-chunk of 8 tokens: from its start to token i, prod_{m<=i} b_m; from after token j
//           to its end, prod_{m>j} b_m; and both about its middle, one of them an inverse.
// shapes    with g = lane / 4, t = lane % 4: of 16 tokens a lane has the pairs p of tokens 8 (p / 2) + 2t and the next
//           one, of column g + 8 (p % 2), as the left operand of a product that is deep in tokens has them
// numerics  Decays are multiplied, so that gates of any size leave the others as they are. About the middle they count
//           as LEAST at least: e^-20 of a token passes a reset there. Where gates grow, nobody looks at these.
#include "fragments.cuh"
#include "gated/forward_operands.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

using Pairs = float2[4];  // of 16 tokens

__device__ __forceinline__ float2 operator*(float2 a, float2 x) { return {a.x * x.x, a.y * x.y}; }
__device__ __forceinline__ float2 operator*(float a, float2 x) { return {a * x.x, a * x.y}; }

// From tiles with rows of COLS, 16 columns from `column` on.
template <int COLS, typename X> struct PairsReader : TransposedReader<COLS, X> {
  __device__ __forceinline__ PairsReader(int column) : TransposedReader<COLS, X>(column) {}

  __device__ __forceinline__ void load(Pairs& x, const X* tile, int row) const {
    if constexpr (sizeof(X) == 2) {
      u32 r[4];
      ldmatrix_x4_trans(r, this->at(tile, row, 0));
#pragma unroll
      for (int p = 0; p < 4; ++p) x[p] = {to_float(X{u16(r[p])}), to_float(X{u16(r[p] >> 16)})};
    } else {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int first = row + 8 * (p >> 1), right = 8 * (p & 1);
        x[p] = {*this->at(tile, first, right), *this->at(tile, first + 1, right ^ 4)};
      }
    }
  }
};

__device__ __forceinline__ void put_pair(Left<bf16, 1>& a, int p, float2 x) { a.r[p] = pack<bf16>(x.x, x.y); }
template <typename T, int PRODUCTS> __device__ __forceinline__ void put_pair(Left<T, PRODUCTS>& a, int p, float2 x) {
  a.half[p / 2].set(p % 2, x.x);
  a.half[p / 2].set(p % 2 + 2, x.y);
}

// ---- decays: the four lanes of a column have a sub-chunk between them ------------------------------------------------

__device__ __forceinline__ float2 decays_of(float2 gates) { return {decay_of(gates.x), decay_of(gates.y)}; }

// Of a sub-chunk: the sum of gates, in float32, goes into one exp.
__device__ __forceinline__ float whole_decay(float2 gates) {
  float sum = gates.x + gates.y;
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  return decay_of(sum + __shfl_xor_sync(0xffffffffu, sum, 2));
}

// A pair's decays from after its tokens to the sub-chunk's end, and from the start to them.
struct ToEnd {
  float2 by;
  __device__ __forceinline__ explicit ToEnd(float2 b) {
    const int t = threadIdx.x & 3;
    const float own = b.x * b.y, other = __shfl_xor_sync(0xffffffffu, own, 1);
    const float far = __shfl_xor_sync(0xffffffffu, own * other, 2);
    const float behind = (t & 1 ? 1.f : other) * (t & 2 ? 1.f : far);
    by = {b.y * behind, behind};
  }
};
struct FromStart {
  float2 by;
  __device__ __forceinline__ explicit FromStart(float2 b) {
    const int t = threadIdx.x & 3;
    const float own = b.x * b.y, other = __shfl_xor_sync(0xffffffffu, own, 1);
    const float far = __shfl_xor_sync(0xffffffffu, own * other, 2);
    const float before = (t & 1 ? other : 1.f) * (t & 2 ? far : 1.f);
    by = {before * b.x, before * own};
  }
};

// About the middle: what outputs are multiplied by, and values, of which a token's are each other's inverse.
struct Middle {
  float2 outputs, values;
  __device__ __forceinline__ explicit Middle(float2 b) {
    const int t = threadIdx.x & 3;
    const bool behind = t & 2;  // the middle
    const float x = fmaxf(b.x, LEAST), y = fmaxf(b.y, LEAST), own = x * y;
    const float other = __shfl_xor_sync(0xffffffffu, own, 1), between = behind == bool(t & 1) ? other : 1.f;
    const float2 near = behind ? float2{between * x, between * own} : float2{between * y, between};
    const float2 far = {inverse(near.x), inverse(near.y)};
    outputs = behind ? near : far, values = behind ? far : near;
  }
};
