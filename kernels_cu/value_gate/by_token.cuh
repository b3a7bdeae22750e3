// what      For chunks that grow by more than BY_CHUNK, which the kernels of the value gate compute token by token: the
//           growth of a chunk, and loads of single tokens. They do so because a large log gate of a channel and a log
//           gate far below 0 of a column may cancel: e^ of their sum is then in float32's range, e^ of each alone is
//           not
// numerics  float32
#include "ptx.cuh"
#include "tensor.cuh"

// The largest growth of a chunk, in nats, of a channel and a column together, for which products are used. Decays below
// e^-87 are 0 in products (float32's normal numbers end there); a growth of e^16 makes of what was lost e^-71 at most.
// The callers compare this limit with growth_of the channels plus growth_of the columns.
constexpr float BY_CHUNK = 16.f;

// Rows of a chunk in memory, from its first token and from a channel or a column on. at: a token's number in a channel,
// counted from that first one as `width` is; 0 from `width` on.
template <typename X> struct Tokens {
  const X* first;
  i64 stride;
  __device__ __forceinline__ float at(int row, int channel, int width) const {
    return channel < width ? to_float(first[row * stride + channel]) : 0.f;
  }
};

// An array's tokens from `token` on and channels from `channel` on, of batch row b and head h.
template <typename X>
__device__ __forceinline__ Tokens<X> tokens_at(const StridedRows<const X>& x, i64 b, i64 h, i64 token, i64 channel) {
  return {x.row(b, h, token) + channel, x.token_stride};
}

// The largest, of `width` channels, of the sums of max(gate, 0) over the chunk's `rows` tokens; NaN counts as 0. All
// lanes of a warp call this together, and get the same number.
template <typename G> __device__ __forceinline__ float growth_of(Tokens<G> gates, int rows, int width) {
  float largest = 0.f;
#pragma unroll 1
  for (int c = threadIdx.x & 31; c < width; c += 32) {
    float sum = 0.f;
#pragma unroll 8
    for (int i = 0; i < rows; ++i) sum += fmaxf(gates.at(i, c, width), 0.f);
    largest = fmaxf(largest, sum);
  }
#pragma unroll 1
  for (int distance = 1; distance < 32; distance *= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  return largest;
}
