// what      What RWKV-7's time mixes of one token take: states of type S, outputs of type X.
// shapes    v k r and log decays w [B, H, N], openings [3, B, H, N]: rate, gate, share; first [B, H, N]: the first
//           layer's v; removal replacement bonus, and weight bias of the group norm [H, N]; state [pool, H, N, N]; y
//           [TERMS, B, H, N], the sum of TERMS arrays
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
  const float* weight;
  const float* bias;
  S* state;
  const i64* slots;  // or null: sequence b has state b
  X* y;
  i64 B, H, N;
  double eps;
};
