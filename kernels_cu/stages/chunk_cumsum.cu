// what      Stage 1: prefix and suffix sums of the gate within each chunk.
// math      b_i = g_1 + ... + g_i,   e_j = g_{j+1} + ... + g_C
// shapes    g [B, H, T, K], b e [B, H, T, K] float32, or all float64
// grid      a block for every (batch, head, chunk), batch slowest; 128 threads, a channel a thread
// smem      none
// barriers  none
// numerics  float32 sums (or float64) in token order; e is summed from the chunk's end, not taken as b_C - b_j
// source    Yang et al., 2024, section 4.2
// limits    none
#include "real.cuh"
#include "tensor.cuh"

template <typename G> struct Args {
  Rows<const G> g;
  Rows<Real<G>> b, e;
  Shape shape;
};

template <typename G> __global__ void __launch_bounds__(128) stages_chunk_cumsum(const Args<G> args) {
  const Shape& shape = args.shape;
  const i64 c = blockIdx.x % shape.NC, h = blockIdx.x / shape.NC % shape.H, batch = blockIdx.x / shape.NC / shape.H;
  const Span span = chunk_tokens(shape, c);
  for (i64 channel = threadIdx.x; channel < shape.K; channel += blockDim.x) {
    Real<G> sum = 0;
    for (i64 t = span.start; t < span.stop; ++t) {
      sum += to_real(args.g.row(batch, h, t)[channel]);
      args.b.row(batch, h, t)[channel] = sum;
    }
    sum = 0;
    for (i64 t = span.stop - 1; t >= span.start; --t) {
      args.e.row(batch, h, t)[channel] = sum;
      sum += to_real(args.g.row(batch, h, t)[channel]);
    }
  }
}
