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

// Tokens that are read before the first of them is written. A chunk of so many is read once, for both sums.
template <typename G> constexpr int FLIGHT = sizeof(G) == 8 ? 32 : 64;

template <typename G> struct Args {
  Rows<const G> g;
  Rows<Real<G>> b, e;
  Shape shape;
};

// The gates of FLIGHT tokens from `first` on; zeros from `stop` on.
template <typename G>
__device__ __forceinline__ void read(G (&x)[FLIGHT<G>], const G* channel, i64 stride, i64 first, i64 stop) {
#pragma unroll
  for (int n = 0; n < FLIGHT<G>; ++n) x[n] = first + n < stop ? channel[(first + n) * stride] : from_real<G>(0);
}

template <typename G> __global__ void __launch_bounds__(128) stages_chunk_cumsum(const Args<G> args) {
  const Shape& shape = args.shape;
  const u32 NC = u32(shape.NC), H = u32(shape.H), head = blockIdx.x / NC, h = head % H, batch = head / H;
  const Span span = chunk_tokens(shape, blockIdx.x % NC);
  if (span.start >= span.stop) return;
  G x[FLIGHT<G>];
  for (i64 channel = threadIdx.x; channel < shape.K; channel += blockDim.x) {
    const G* const gates = args.g.row(batch, h, 0) + channel;
    Real<G>* const b = args.b.row(batch, h, 0) + channel;
    Real<G>* const e = args.e.row(batch, h, 0) + channel;
    Real<G> sum = 0;
    i64 first = span.start;
#pragma unroll 1
    for (;; first += FLIGHT<G>) {
      read(x, gates, args.g.t, first, span.stop);
#pragma unroll
      for (int n = 0; n < FLIGHT<G>; ++n) {
        sum += to_real(x[n]);
        if (first + n < span.stop) b[(first + n) * args.b.t] = sum;
      }
      if (first + FLIGHT<G> >= span.stop) break;
    }
    sum = 0;  // and back, from the tokens that were read last
#pragma unroll 1
    for (;; first -= FLIGHT<G>) {
#pragma unroll
      for (int n = FLIGHT<G> - 1; n >= 0; --n) {
        if (first + n < span.stop) e[(first + n) * args.e.t] = sum;
        sum += to_real(x[n]);
      }
      if (first == span.start) break;
      read(x, gates, args.g.t, first - FLIGHT<G>, span.stop);
    }
  }
}
