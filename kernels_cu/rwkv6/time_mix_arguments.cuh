// what      What every time mix of one token takes: weights of type T, states of type S, outputs of type Y.
// shapes    k v r gate [P, 4, B, H, N]: the pointers are to the four arrays of the first part; low [P, B, W]; both are
//           to be summed over P parts (P = 1 but in time_mix_batch.cu); y [TERMS, B, H, N],
//           up [W, H, N], decay u weight bias [H, N], state [slots, H, N, N], slots [B] or null
#include "decode.cuh"

template <typename T, typename Y, typename S> struct TimeMixArgs {
  const float* k;
  const float* v;
  const float* r;
  const float* gate;
  const float* low;
  const T* up;
  const float* decay;
  const float* u;
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
