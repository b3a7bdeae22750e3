// what      The likeliest token of each sequence, the lowest of equals.
// math      token = argmax_v logits_v
// shapes    logits [B, V], tokens [B] int64
// grid      a block for each sequence; 1024 threads, each for every 1024th token
// smem      Shared: the warps' best
// barriers  one: the warps' best are in shared memory
// numerics  exact
// limits    V up to 2^31
#include "decode.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / 32;

struct Args {
  const float* logits;
  i64* tokens;
  i64 V;
};

struct Best {
  float logit;
  int token;

  __device__ __forceinline__ void take_if_better(float other_logit, int other_token) {
    if (other_logit < logit || (other_logit == logit && other_token >= token)) return;
    logit = other_logit;
    token = other_token;
  }
};

struct Shared {
  Best best[WARPS];
};

// Sets `best` to the best one of all lanes of the warp.
__device__ __forceinline__ void take_best_of_warp(Best& best) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const float logit = __shfl_xor_sync(0xffffffffu, best.logit, distance);
    const int token = __shfl_xor_sync(0xffffffffu, best.token, distance);
    best.take_if_better(logit, token);
  }
}

__global__ void __launch_bounds__(THREADS) rwkv6_argmax(const Args args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  launch_next();        // the next kernel may begin
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read
  const float* logits = args.logits + blockIdx.x * args.V;
  Best best = {logits[0], 0};
#pragma unroll 32
  for (i64 v = threadIdx.x; v < args.V; v += THREADS) best.take_if_better(logits[v], int(v));
  take_best_of_warp(best);
  if ((threadIdx.x & 31) == 0) s.best[threadIdx.x >> 5] = best;
  __syncthreads();  // the warps' best are in shared memory
  if (threadIdx.x >= 32) return;
  best = s.best[threadIdx.x];
  take_best_of_warp(best);
  if (threadIdx.x == 0) args.tokens[blockIdx.x] = best.token;
}
