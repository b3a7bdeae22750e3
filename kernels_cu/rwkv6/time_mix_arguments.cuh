// what      What RWKV-6's time mixes of one token take, time_mix_step.cu and time_mix_batch.cu: weights of type T,
//           states of type S, outputs of type Y. TIME_MIX in backends/cupy/rwkv6_model_kernels.py declares the same
//           members in the same order, or compiling fails; rwkv6/cuda_decode.py passes them.
// math      w = exp(-exp(decay_base + tanh(decay_low) decay_up)), W the rank;  y = GroupNorm_H(o) silu(gate). weight,
//           bias and eps are the group norm's
// shapes    k v r gate [P, 4, B, H, N]: the pointers are to the four arrays of the first part; decay_low [P, B, W];
//           both are to be summed over P parts (a member of time_mix_batch.cu's Args; elsewhere P = 1); y [TERMS, B, H,
//           N], the sum of TERMS arrays; decay_up [W, H, N], decay_base bonus weight bias [H, N], state [pool, H, N,
//           N], the key's channel first, slots [B] or null
#include "decode.cuh"

template <typename T, typename Y, typename S> struct TimeMixArgs {
  const float* k;
  const float* v;
  const float* r;
  const float* gate;
  const float* decay_low;
  const T* decay_up;
  const float* decay_base;
  const float* bonus;
  const float* weight;
  const float* bias;
  S* state;
  const i64* slots;  // or null: sequence b has state b
  Y* y;
  i64 B, H, N, W;
  double eps;

  // The state of head h of sequence b; `n` is N, which some kernels know when they are compiled.
  template <typename I> __device__ __forceinline__ S* state_of(i64 b, i64 h, I n) const {
    return state + ((slots ? slots[b] : b) * H + h) * n * n;
  }
};
