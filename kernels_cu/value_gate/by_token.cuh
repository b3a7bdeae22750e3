// what      Chunks that grow by more than BY_CHUNK, whose tokens go one by one: gates of channels and of columns may
//           leave the range of float32 each, where their sum does not.
// numerics  float32
#include "ptx.cuh"
#include "tensor.cuh"

// What a chunk's products take of growth, in nats, of a channel and a column together: decays count as 0 below e^-87,
// and scores meet values whose factors are that large.
constexpr float BY_CHUNK = 16.f;

// Rows of a chunk in memory, from its first token and from a channel or a column on.
template <typename X> struct Tokens {
  const X* first;
  i64 stride;
  __device__ __forceinline__ float at(int row, int channel, int width) const {
    return channel < width ? to_float(first[row * stride + channel]) : 0.f;
  }
};

template <typename X>
__device__ __forceinline__ Tokens<X> tokens_at(const Rows<const X>& x, i64 b, i64 h, i64 token, i64 channel) {
  return {x.row(b, h, token) + channel, x.t};
}

// The most that one of so many channels grows by, in nats; for a warp.
template <typename G> __device__ __forceinline__ float growth_of(Tokens<G> gates, int rows, int width) {
  float most = 0.f;
#pragma unroll 1
  for (int c = threadIdx.x & 31; c < width; c += 32) {
    float sum = 0.f;
#pragma unroll 1
    for (int i = 0; i < rows; ++i) sum += fmaxf(gates.at(i, c, width), 0.f);
    most = fmaxf(most, sum);
  }
#pragma unroll 1
  for (int distance = 1; distance < 32; distance *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
  return most;
}
