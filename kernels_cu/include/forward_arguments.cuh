// what      What every forward kernel of the gated family takes: GLA, and RWKV-6, whose u is the bonus of a token's own
//           key. The classes of gated/forward.cu, gated/small_forward.cu and recurrent/forward.cu in
//           backends/cupy/gated_kernels.py declare the same members in the same order, and their own behind them, or
//           compiling fails.
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
