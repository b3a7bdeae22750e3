// what      The states that the delta rules' kernel backward_states.cu stores for kernels *backward_chunks.cu, of every
//           chunk of 32 tokens: forwards the state before it, backwards the gradient of the state after it.
// shapes    states [direction, B, H, NC, K / 64, columns / 8, 8, 8, 8]: matrices of 8 columns of V by 8 channels of K,
//           of 64 channels side by side. Columns and channels are padded with zeros to multiples of 64
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int KEPT = 64;  // channels whose matrices lie together; columns are padded to a multiple of as many

__device__ __forceinline__ int padded(i64 size) { return int((size + KEPT - 1) / KEPT) * KEPT; }

// The index at which 64 channels, from `channel` on, of a chunk's state begin.
__device__ __forceinline__ i64 kept_at(const Shape& shape, bool backwards, i64 batch, i64 head, i64 chunk,
                                       int channel) {
  const i64 state = ((backwards * shape.B + batch) * shape.H + head) * shape.NC + chunk;
  return (state * padded(shape.K) + channel) * padded(shape.V);
}
