// what      RWKV-7's time mix in a training step: the arrays and functions that `keys_forward` and its gradient share.
#include "decode.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr float DECAY = 0.6065306597126334f;  // exp(-1/2): a token's log decay is -DECAY to 0
constexpr float LEAST_NORM = 1e-12f;          // |k removal| counts as at least this

// Products of the time mix, k to value_logits, and the first layer's values first_v [tokens, H, N]; parameters, from
// decay_base on, [H, N]. training/keys_forward.cu says what they are; the first layer has no value_logits, first_v and
// value_base: null.
template <typename T> struct Keys {
  const T* k;
  const T* v;
  const T* decay_logits;
  const T* icl_logits;
  const T* value_logits;
  const T* first_v;
  const float* decay_base;
  const float* icl_base;
  const float* value_base;
  const float* removal;
  const float* replacement;
};

// A warp's head, and its tokens begin ... end - 1: the `block`-th tokens_per_block of all; none if begin >= `tokens`.
struct WarpTokens {
  i64 head, block, begin, end;
};
__device__ __forceinline__ WarpTokens warp_tokens(i64 tokens, i64 H, i64 tokens_per_block) {
  const i64 task = i64(blockIdx.x) * WARPS + threadIdx.x / 32, block = task / H, begin = block * tokens_per_block;
  return {task % H, block, begin, begin + tokens_per_block < tokens ? begin + tokens_per_block : tokens};
}
// Stores the sums over a warp's tokens of gradients of parameters [H, N]: parts [blocks of tokens, PARAMETERS, H, N].
template <int PARAMETERS, int PAIRS>
__device__ __forceinline__ void store_parts(float* parts, const WarpTokens& work, i64 H, int N,
                                            const float2 (&sums)[PARAMETERS][PAIRS]) {
#pragma unroll
  for (int parameter = 0; parameter < PARAMETERS; ++parameter)
#pragma unroll
    for (int n = 0; n < PAIRS; ++n)
      if (const int j = 2 * (32 * n + int(threadIdx.x) % 32); j < N)
        store2(parts + ((work.block * PARAMETERS + parameter) * H + work.head) * N + j, sums[parameter][n]);
}

__device__ __forceinline__ float2 operator+(float2 x, float2 y) { return {x.x + y.x, x.y + y.y}; }
__device__ __forceinline__ float2 operator-(float2 x, float2 y) { return {x.x - y.x, x.y - y.y}; }
__device__ __forceinline__ float2 operator*(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }
__device__ __forceinline__ float2 operator*(float2 x, float y) { return {x.x * y, x.y * y}; }
__device__ __forceinline__ float2 operator-(float x, float2 y) { return {x - y.x, x - y.y}; }
__device__ __forceinline__ float sum(float2 x) { return x.x + x.y; }

__device__ __forceinline__ float2 sigmoid(float2 x) { return {sigmoid(x.x), sigmoid(x.y)}; }

// key / k, the share of the key that is written: 1 + (icl - 1) replacement.
__device__ __forceinline__ float2 kept(float2 icl, float2 replacement) { return 1.f - (1.f - icl) * replacement; }
