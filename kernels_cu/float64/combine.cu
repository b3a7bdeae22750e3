// what      Stage 5 in float64: the outputs, from the state before each chunk and from the chunk's own tokens.
// math      o = scale (qg h_c + A v); qg are the queries decayed from their chunk's start, h_c the state before chunk
//           c; A: the scores of a token with its chunk's tokens, without the scale. Those with later ones are not read
// shapes    C: tokens of a chunk; NC: chunks of a batch row. qg [B, H, T, K], A [B, H, T, C], h [B, H, NC, K, V],
//           v o [B, H, T, V]
// grid      a block for every (batch, head, chunk), batch slowest; 128 threads over (token, column)
// numerics  float64 throughout, sums in the order of channels, then of tokens
// source    Yang et al., 2024, eq. 5
#include "real.cuh"
#include "tensor.cuh"

struct Args {
  StridedRows<const double> qg;
  StridedRows<const double> h;  // rows are channels: [B, H, NC * K, V]
  StridedRows<const double> A, v;
  StridedRows<double> o;
  Shape shape;
  double scale;
};

__global__ void __launch_bounds__(128) float64_combine(const Args args) {
  const Shape& shape = args.shape;
  const i64 c = blockIdx.x % shape.NC, h = blockIdx.x / shape.NC % shape.H, b = blockIdx.x / shape.NC / shape.H;
  const Span span = chunk_tokens(shape, c);  // the tokens of chunk c of batch row b
  for (i64 at = threadIdx.x; at < (span.stop - span.start) * shape.V; at += blockDim.x) {
    const i64 t = span.start + at / shape.V, column = at % shape.V;
    double sum = 0.;
    for (i64 channel = 0; channel < shape.K; ++channel)
      sum = fma(args.qg.row(b, h, t)[channel], args.h.row(b, h, c * shape.K + channel)[column], sum);
    for (i64 j = 0; j <= t - span.start; ++j)
      sum = fma(args.A.row(b, h, t)[j], args.v.row(b, h, span.start + j)[column], sum);
    args.o.row(b, h, t)[column] = args.scale * sum;
  }
}
