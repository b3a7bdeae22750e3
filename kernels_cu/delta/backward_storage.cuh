// what      The array `chunk_states`, which backward_states.cu writes and the kernels *backward_chunks.cu read: of
//           every chunk of 32 tokens the state before it (direction 0) and the gradient of the state after it
//           (direction 1).
// shapes    [direction, B, H, NC, K / 64, V / 8, K / 8 of 64, 8, 8]: matrices of 8 columns of V by 8 channels of K, as
//           ldmatrix loads them. K and V are padded with zeros to multiples of 64
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int TILE = 64;  // channels, or columns, that kernels read together

__device__ __forceinline__ int padded(i64 size) { return int((size + TILE - 1) / TILE) * TILE; }

// The index in `chunk_states` of channels `channel` ... `channel` + 63 of a chunk. `chunk`: its number in the batch
// row.
__device__ __forceinline__ i64 state_index(const Shape& shape, bool backwards, i64 batch, i64 head, i64 chunk,
                                           int channel) {
  const i64 state = ((backwards * shape.B + batch) * shape.H + head) * shape.NC + chunk;
  return (state * padded(shape.K) + channel) * padded(shape.V);
}
