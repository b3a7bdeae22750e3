// what      What RWKV-7's time mixes of one token take, time_mix_step.cu and time_mix_batch.cu: states of type S,
//           outputs of type X. TimeMixOfToken in backends/cupy/rwkv7_model_kernels.py declares the same members in the
//           same order, or compiling fails; rwkv7/cuda_decode.py passes them.
// shapes    v k r and log decays w [B, H, N], openings [3, B, H, N]: rate, gate, share; rate and share are sigmoids,
//           share is -1 in the first layer; first [B, H, N]: that layer's v; removal replacement bonus, and weight bias
//           (and eps) of the group norm [H, N]; state [pool, H, N, N], the key's channel first; y [TERMS, B, H, N]:
//           the output is the sum of TERMS arrays
#include "rwkv7/time_mix_sums.cuh"

template <typename X, typename S> struct Args {
  const float* v;
  const float* k;
  const float* r;
  const float* w;
  const float* openings;
  float* first;
  const float* removal;
  const float* replacement;
  const float* bonus;
  const float* weight;  // and bias, eps: of the group norm
  const float* bias;
  S* state;
  const i64* slots;  // [B]: sequence b has state slots[b] of the pool; null: state b
  X* y;
  i64 B, H, N;
  double eps;
};
