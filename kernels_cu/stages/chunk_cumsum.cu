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

constexpr int FLIGHT = 16;  // tokens that are read before the first of them is written

template <typename G> struct Args {
  Rows<const G> g;
  Rows<Real<G>> b, e;
  Shape shape;
};

// The gates of tokens first, first + step, ...: zeros from `stop` on, or before `start`.
template <typename G>
__device__ __forceinline__ void read(G (&x)[FLIGHT], const G* channel, i64 stride, Span span, i64 first, int step) {
#pragma unroll
  for (int n = 0; n < FLIGHT; ++n) {
    const i64 t = first + n * step;
    x[n] = t >= span.start && t < span.stop ? channel[t * stride] : from_real<G>(0);
  }
}

template <typename G> __global__ void __launch_bounds__(128) stages_chunk_cumsum(const Args<G> args) {
  const Shape& shape = args.shape;
  const i64 c = blockIdx.x % shape.NC, h = blockIdx.x / shape.NC % shape.H, batch = blockIdx.x / shape.NC / shape.H;
  const Span span = chunk_tokens(shape, c);
  G x[FLIGHT];
  for (i64 channel = threadIdx.x; channel < shape.K; channel += blockDim.x) {
    const G* const gates = args.g.row(batch, h, 0) + channel;
    Real<G>* const b = args.b.row(batch, h, 0) + channel;
    Real<G>* const e = args.e.row(batch, h, 0) + channel;
    Real<G> sum = 0;
#pragma unroll 1
    for (i64 first = span.start; first < span.stop; first += FLIGHT) {
      read(x, gates, args.g.t, span, first, 1);
#pragma unroll
      for (int n = 0; n < FLIGHT; ++n) {
        sum += to_real(x[n]);
        if (first + n < span.stop) b[(first + n) * args.b.t] = sum;
      }
    }
    sum = 0;
#pragma unroll 1
    for (i64 first = span.stop - 1; first >= span.start; first -= FLIGHT) {
      read(x, gates, args.g.t, span, first, -1);
#pragma unroll
      for (int n = 0; n < FLIGHT; ++n) {
        if (first - n >= span.start) e[(first - n) * args.e.t] = sum;
        sum += to_real(x[n]);
      }
    }
  }
}
