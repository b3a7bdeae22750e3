// what      Heads in a training step: lanes that compute a head's gradients, token after token.
#include "training.cuh"

constexpr int THREADS = 128;

// The lanes of a head of N channels: LANES neighbouring lanes of a warp, of which each has eight neighbouring channels,
// from channel `j` on; those with j >= N have none, so that N is at most 8 LANES. ALIGNED: N is a multiple of 8; else N
// is even.
template <int LANES, bool ALIGNED> struct HeadLanes {
  int j, N;

  __device__ __forceinline__ explicit HeadLanes(i64 N) : j(8 * (int(threadIdx.x) % LANES)), N(int(N)) {}
  __device__ __forceinline__ bool inside() const { return j < N; }

  // The lane's channels of an array whose head starts at `index`; zeros beyond N. Only lanes inside may call this.
  template <typename T> __device__ __forceinline__ EightFloats load(const T* from, i64 index) const {
    from += index + j;
    if constexpr (ALIGNED) return load8(from);
    EightFloats x = {};
#pragma unroll
    for (int n = 0; n < 8; n += 2)
      if (j + n < N) {
        const float2 both = load2(from + n);
        x.x[n] = both.x, x.x[n + 1] = both.y;
      }
    return x;
  }

  template <typename T> __device__ __forceinline__ void store(T* to, i64 index, const EightFloats& x) const {
    to += index + j;
    if constexpr (ALIGNED) return store8(to, x);
#pragma unroll
    for (int n = 0; n < 8; n += 2)
      if (j + n < N) store2(to + n, float2{x.x[n], x.x[n + 1]});
  }

  // The sum over the head's lanes, the same bits in each of them. All lanes of the warp call this.
  static __device__ __forceinline__ float sum(float x) { return sum_over_lanes<LANES>(x); }
};

// The head of a lane, and its tokens begin ... end - 1: the `block`-th tokens_per_block of all; none if begin >= end.
struct HeadTokens {
  i64 head, block, begin, end;
};
template <int LANES> __device__ __forceinline__ HeadTokens head_tokens(i64 tokens, i64 H, i64 tokens_per_block) {
  const i64 task = (i64(blockIdx.x) * THREADS + threadIdx.x) / LANES, block = task / H,
            begin = block * tokens_per_block;
  return {task % H, block, begin, begin + tokens_per_block < tokens ? begin + tokens_per_block : tokens};
}
