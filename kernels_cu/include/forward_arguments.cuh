// what      What every forward kernel of the gated family takes: GLA, and RWKV-6, whose u is the bonus of a token's own
//           key.
#include "tensor.cuh"

template <typename T, typename G> struct ForwardArgs {
  StridedRows<const T> q, k, v;
  StridedRows<const G> g;
  StridedRows<T> o;
  const float *u, *initial;  // [H, K], null for GLA; [N, H, K, V], null: zero
  float* final;              // [N, H, K, V]; null: not wanted
  Shape shape;
  double scale;
};
