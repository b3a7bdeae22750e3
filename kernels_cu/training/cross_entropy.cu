// what      The cross entropy of the wanted tokens; its gradient overwrites the logits.
// math      loss_t = log sum_v exp(logits_tv) - logits_t,wanted;
//           logits_tv <- share (softmax(logits_t)_v - [v = wanted])
// shapes    share: of a token's loss in the total, 1 / tokens; logits [tokens, V], losses [tokens], token_ids [tokens /
//           T, T + 1]
// grid      rwkv/cuda_grad.py launches a warp a token; 256 threads
// numerics  float32, the gradient rounded once
// source    Peng et al., 2024, "Eagle and Finch", section 4
// limits    wanted ids from 0 to V - 1, and `tokens` a multiple of T: the kernel checks neither
#include "lanes.cuh"
#include "training.cuh"

constexpr int THREADS = 256;

template <typename T> struct Args {
  T* logits;
  const i64* token_ids;
  float* losses;
  i64 tokens, T_;  // T_: of a sequence
  i64 V;
  double share;
};

template <typename T> __global__ void __launch_bounds__(THREADS) training_cross_entropy(const Args<T> args) {
  const i64 t = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32, V = args.V;
  if (t >= args.tokens) return;
  const int lane = threadIdx.x % 32;
  T* logits = args.logits + t * V;
  // The token after t: each sequence has one id more than T.
  const i64 wanted = args.token_ids[t + t / args.T_ + 1];
  float largest = to_float(logits[0]), sum = 0.f;
  for (i64 v = lane; v < V; v += 32) largest = fmaxf(largest, to_float(logits[v]));
  for (int distance = 16; distance > 0; distance /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  for (i64 v = lane; v < V; v += 32) sum += expf(to_float(logits[v]) - largest);
  const float log_sum = logf(warp_sum(sum)) + largest;
  if (lane == 0) args.losses[t] = log_sum - to_float(logits[wanted]);
  __syncwarp();  // the wanted logit is read before it is replaced
  for (i64 v = lane; v < V; v += 32)
    logits[v] = from_float<T>(float(args.share) * (expf(to_float(logits[v]) - log_sum) - (v == wanted ? 1.f : 0.f)));
}
