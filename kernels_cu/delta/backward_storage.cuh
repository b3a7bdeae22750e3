// what      What the delta rule's backward kernels keep between each other: states by chunks of 32 tokens.
// shapes    states [direction, B, HV, NC, columns / 8, BK / 8, 8, 8]: matrices of 8 columns by 8 channels. Columns are
//           padded with zeros to whole tiles of 64, channels to BK
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int KEPT_COLUMNS = 64;

__device__ __forceinline__ int padded_columns(i64 V) {
  return int((V + KEPT_COLUMNS - 1) / KEPT_COLUMNS) * KEPT_COLUMNS;
}

// Where the state of a chunk begins: the one before it, or backwards the gradient of the one behind it.
template <int BK>
__device__ __forceinline__ i64 kept_at(const Shape& shape, bool backwards, i64 batch, i64 head, i64 chunk) {
  return (((backwards * shape.B + batch) * shape.H + head) * shape.NC + chunk) * BK * padded_columns(shape.V);
}
