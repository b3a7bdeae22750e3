// what      Shared by kernels of which some lanes of a warp compute a head of a token: these lanes and their channels,
//           loads and stores. A lane has GROUPS groups of WIDTH neighbouring channels, 2 or 8, and the groups are 64
//           channels apart: so 64 / WIDTH lanes have a head.
#include "decode.cuh"

constexpr int THREADS = 128, CHANNELS_APART = 64;  // of groups

// This thread's head, of all tokens' heads, and the first channel of its first group. If the grid does not have all
// heads of all tokens, its heads are whole tokens (HeadKernel.blocks), so that `go_on` goes to the same head of a later
// token, whose parameters a kernel has loaded.
template <int WIDTH> struct LaneOfHead {
  static constexpr int LANES = CHANNELS_APART / WIDTH;
  i64 token_head = (i64(blockIdx.x) * THREADS + threadIdx.x) / LANES;
  int channel = int(threadIdx.x) % LANES * WIDTH;

  // Whether the warp's first head is: the same for all lanes, which then sum together.
  __device__ __forceinline__ bool some_head_is_below(i64 heads) const {
    return token_head - i64(threadIdx.x) % 32 / LANES < heads;
  }
  __device__ __forceinline__ void go_on() { token_head += i64(gridDim.x) * (THREADS / LANES); }
};

// Eight numbers start on 16 bytes.
template <int WIDTH, typename X> __device__ __forceinline__ void load_group(float (&x)[WIDTH], const X* from) {
  if constexpr (WIDTH == 8) load8(x, from);
  else {
    const float2 both = load2(from);
    x[0] = both.x, x[1] = both.y;
  }
}

template <int WIDTH, typename X> __device__ __forceinline__ void store_group(X* to, const float (&x)[WIDTH]) {
  if constexpr (WIDTH == 8) store8(to, x);
  else store2(to, {x[0], x[1]});
}
