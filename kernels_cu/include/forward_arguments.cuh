// what      What every forward kernel of the gated family takes.
#include "tensor.cuh"

template <typename T, typename G> struct ForwardArgs {
  Rows<const T> q, k, v;
  Rows<const G> g;
  Rows<T> o;
  const float *u, *initial;  // [H, K] and [N, H, K, V]; null where there is none
  float* final;              // [N, H, K, V] or null
  Shape shape;
  double scale;
};
