// what      Stage 3 in float64: the state before every chunk, carried from chunk to chunk.
// math      h_{c+1} = diag(exp b_C) h_c + kg_c^T v_c; kg are the keys decayed to their chunk's end, b the sums of log
//           gates from the chunk's start, b_C that of its last token
// shapes    kg b [B, H, T, K], v [B, H, T, V], h [B, H, NC, K, V], initial and final [N, H, K, V]
// grid      a block for every (sequence, head, 128 numbers of the state), sequence slowest; a number a thread
// numerics  float64 throughout, tokens in their order
// source    Yang et al., 2024, eq. 4
#include "real.cuh"
#include "tensor.cuh"

struct Args {
  StridedRows<const double> kg, b, v;
  double* h;
  const double* initial;  // or null
  double* final;          // or null
  Shape shape;
};

__global__ void __launch_bounds__(128) float64_inter_chunk(const Args args) {
  const Shape& shape = args.shape;
  const i64 size = shape.K * shape.V, tiles = (size + 127) / 128, head = blockIdx.x / tiles;
  const i64 at = blockIdx.x % tiles * 128 + threadIdx.x, h = head % shape.H;
  // at: the thread's number of the state; head: the number among all sequences' heads; n: sequence, of batch row b
  const i64 n = head / shape.H, b = n / shape.row_sequences;
  if (at >= size) return;
  const i64 channel = at / shape.V, column = at % shape.V;
  const Span chunks = chunks_of(shape, n % shape.row_sequences);
  double S = args.initial ? args.initial[head * size + at] : 0.;
  for (i64 c = chunks.start; c < chunks.stop; ++c) {
    const Span span = chunk_tokens(shape, c);
    args.h[((b * shape.H + h) * shape.NC + c) * size + at] = S;
    S *= decay_of(args.b.row(b, h, span.stop - 1)[channel]);
    for (i64 t = span.start; t < span.stop; ++t) S = fma(args.kg.row(b, h, t)[channel], args.v.row(b, h, t)[column], S);
  }
  if (args.final) args.final[head * size + at] = S;
}
