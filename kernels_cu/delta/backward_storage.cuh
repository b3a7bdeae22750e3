// what      The arrays `chunk_states` and `state_gradients`, which backward_states.cu writes and the kernels
//           *backward_chunks.cu read: of every chunk of 32 tokens the state before it, and the gradient of the state
//           after it.
// shapes    [B, H, NC, K / 64, V / 8, K / 8 of 64, 8, 8]: matrices of 8 columns of V (rows) by 8 channels of K, as
//           ldmatrix loads them. H: heads of values; NC: chunks of a row of the batch. V and K are padded with
//           zeros to a multiple of 64. Of 129 to 192 channels there is room for 256, but the last 64 are not written.
//           A token's residual and its gradient, which are read with them, are rows of V numbers padded likewise; a
//           residual of 16 bits has behind these as many rounding errors, but for RWKV-7
#include "delta/operands.cuh"
#include "tensor.cuh"

// From the includes:
//   shape.H: heads of values; shape.NC: chunks of a batch row
//   Word<T>: two neighbouring numbers

constexpr int TILE = 64;  // channels, or columns, that kernels read together

// `size` rounded up to a multiple of 64.
__device__ __forceinline__ int padded(i64 size) { return int((size + TILE - 1) / TILE) * TILE; }

// K as it is stored.
__device__ __forceinline__ constexpr int stored_channels(i64 K) { return K <= 64 ? 64 : K <= 128 ? 128 : 256; }

// The index in either array of channels `channel` ... `channel` + 63 of a chunk, `channel` a multiple of 64. `chunk`:
// its number in the batch row.
__device__ __forceinline__ i64 state_index(const Shape& shape, i64 batch, i64 head, i64 chunk, int channel) {
  const i64 state = (batch * shape.H + head) * shape.NC + chunk;
  return (state * stored_channels(shape.K) + channel) * padded(shape.V);
}

// Loads 16 columns of V by 16 channels of a tile of 64 channels, as four matrices of 8 x 8: r[0] has the first 8
// columns and channels, r[1] the next 8 columns, r[2] the next 8 channels, r[3] both. With g = lane / 4 and t = lane %
// 4 a lane has of each matrix, in one Word, column g, channels 2t and 2t + 1; TRANSPOSED, columns 2t and 2t + 1,
// channel g.
// load() takes `from`: the tile's address + first(matrix, lane), where `matrix` is the first one's number, 8 (column /
// 8) + channel / 8.
template <bool TRANSPOSED, typename T> struct StateReader {
  __device__ __forceinline__ static int first(int matrix, int lane) {
    if constexpr (sizeof(T) == 2) {
      const int own = lane >> 3;
      return ((own & 1) * (TILE / 8) + matrix + (own >> 1)) * 64 + (lane & 7) * 8;
    } else {
      const int g = lane >> 2, t = lane & 3;
      return matrix * 64 + (TRANSPOSED ? 16 * t + g : 8 * g + 2 * t);
    }
  }
  __device__ __forceinline__ static void load(Word<T> (&r)[4], const T* from) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const T* matrix = from + (m % 2 * (TILE / 8) + m / 2) * 64;
        if (TRANSPOSED) r[m] = {matrix[0].x, matrix[8].x};
        else r[m] = unpack_pair(matrix);
      }
    } else if (TRANSPOSED) {
      ldmatrix_x4_trans(r, from);
    } else {
      ldmatrix_x4(r, from);
    }
  }
};
