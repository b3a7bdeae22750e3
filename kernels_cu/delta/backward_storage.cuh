// what      The states that the delta rule's kernel backward_states.cu stores for backward_chunks.cu, of every chunk of
//           32 tokens: forwards the state before it, backwards the gradient of the state after it.
// shapes    states [direction, B, HV, NC, columns / 8, BK / 8, 8, 8]: matrices of 8 columns of V by 8 channels of K.
//           Columns are padded with zeros to a multiple of 64, channels to BK
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int KEPT_COLUMNS = 64;

__device__ __forceinline__ int padded_columns(i64 V) {
  return int((V + KEPT_COLUMNS - 1) / KEPT_COLUMNS) * KEPT_COLUMNS;
}

// The index at which a chunk's state begins.
template <int BK>
__device__ __forceinline__ i64 kept_at(const Shape& shape, bool backwards, i64 batch, i64 head, i64 chunk) {
  return (((backwards * shape.B + batch) * shape.H + head) * shape.NC + chunk) * BK * padded_columns(shape.V);
}
