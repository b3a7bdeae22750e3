// what      Stage 4 in float64: the scores of a chunk, A_ij the weight of token j in the output of token i.
// math      A_ij = sum_c q_ic k_jc exp(g_{j+1,c} + ... + g_ic) over channels c, j <= i   (RWKV-6: to g_{i-1,c};
//           A_ii = sum_c q_ic u_c k_ic)
// shapes    q k g [B, H, T, K], g log gates, u [H, K], C tokens a chunk, A [B, H, T, C], zero above the diagonal
// grid      a block for every (batch, head, chunk), batch slowest; 128 threads over the pairs
// numerics  float64 throughout; the gates between two tokens are summed alone, no cumulated sums are subtracted
// source    Yang et al., 2024, section 4.3
#include "read_order.cuh"
#include "real.cuh"
#include "tensor.cuh"

struct Args {
  StridedRows<const double> q, k, g;
  const double* u;  // [H, K], null for GLA
  StridedRows<double> A;
  Shape shape;
};

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6), read_order.cuh.
template <class ReadOrder> __global__ void __launch_bounds__(128) float64_intra_chunk(const Args args) {
  const Shape& shape = args.shape;
  const i64 c = blockIdx.x % shape.NC, h = blockIdx.x / shape.NC % shape.H, b = blockIdx.x / shape.NC / shape.H;
  const Span span = chunk_tokens(shape, c);
  for (i64 at = threadIdx.x; at < (span.stop - span.start) * shape.chunk; at += blockDim.x) {
    const i64 i = span.start + at / shape.chunk, j = span.start + at % shape.chunk;
    double sum = 0.;
    for (i64 channel = 0; j <= i && channel < shape.K; ++channel) {
      double gates = 0.;
      for (i64 m = j + 1; m < i + !ReadOrder::reads_before_write; ++m) gates += args.g.row(b, h, m)[channel];
      const double factor = ReadOrder::reads_before_write && i == j ? args.u[h * shape.K + channel] : decay_of(gates);
      sum = fma(args.q.row(b, h, i)[channel] * factor, args.k.row(b, h, j)[channel], sum);
    }
    args.A.row(b, h, i)[at % shape.chunk] = sum;
  }
}
