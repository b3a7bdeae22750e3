// what      Stage 1: prefix and suffix sums of the gate within each chunk.
// math      b_i = g_1 + ... + g_i,   e_j = g_{j+1} + ... + g_C, of the log gates g of a chunk's C tokens
// shapes    g [B, H, T, K], b e [B, H, T, K] float32, or all float64
// grid      stages.py launches a block for every (batch, head, chunk, 128 channels), batch slowest; a thread a channel
// numerics  float32 sums (or float64) in token order; e is summed from the chunk's end, not taken as b_C - b_j
// source    Yang et al., 2024, section 4.2
#include "real.cuh"
#include "tensor.cuh"

// From the includes:
//   FloatOrDouble<G>: float, or double if G is; widened, narrowed: numbers to it, and to G; chunk_tokens: those of a
//     chunk

constexpr int THREADS = 128;
// Tokens that a thread loads before it stores their first result, so that the loads overlap. A chunk of at most as many
// is loaded once, for both sums.
template <typename G> constexpr int FLIGHT = sizeof(G) == 8 ? 32 : 64;

template <typename G> struct Args {
  StridedRows<const G> g;
  StridedRows<FloatOrDouble<G>> b, e;
  Shape shape;
};

// Sets x to one channel's gates of FLIGHT tokens, `stride` apart; zeros from token `rows` on.
template <typename G> __device__ __forceinline__ void read(G (&x)[FLIGHT<G>], const G* from, i64 stride, int rows) {
#pragma unroll
  for (int n = 0; n < FLIGHT<G>; ++n, from += stride) x[n] = n < rows ? *from : narrowed<G>(0);
}

template <typename G> __global__ void __launch_bounds__(THREADS) stages_chunk_cumsum(const Args<G> args) {
  const Shape& shape = args.shape;
  const u32 NC = u32(shape.NC), H = u32(shape.H), groups = u32(shape.K + THREADS - 1) / THREADS;
  const u32 chunk = blockIdx.x / groups, head = chunk / NC, h = head % H, batch = head / H;
  const Span span = chunk_tokens(shape, chunk % NC);
  const int tokens = int(span.stop - span.start), channel = int(blockIdx.x % groups * THREADS + threadIdx.x);
  if (tokens == 0 || channel >= shape.K) return;
  G x[FLIGHT<G>];
  const G* const gates = args.g.row(batch, h, span.start) + channel;
  FloatOrDouble<G>* b = args.b.row(batch, h, span.start) + channel;
  FloatOrDouble<G>* e = args.e.row(batch, h, span.stop - 1) + channel;
  FloatOrDouble<G> sum = 0;
  int first = 0;
#pragma unroll 1
  for (;; first += FLIGHT<G>) {
    read(x, gates + first * args.g.token_stride, args.g.token_stride, tokens - first);
#pragma unroll
    for (int n = 0; n < FLIGHT<G>; ++n, b += args.b.token_stride) {
      sum += widened(x[n]);
      if (n < tokens - first) *b = sum;
    }
    if (first + FLIGHT<G> >= tokens) break;
  }
  sum = 0;  // e, from the chunk's last token back: x still holds the tokens that were read last, from `first` on
#pragma unroll 1
  for (;; first -= FLIGHT<G>) {
#pragma unroll
    for (int n = FLIGHT<G> - 1; n >= 0; --n) {
      if (n >= tokens - first) continue;
      *e = sum, e -= args.e.token_stride;
      sum += widened(x[n]);
    }
    if (first == 0) break;
    read(x, gates + (first - FLIGHT<G>)*args.g.token_stride, args.g.token_stride, FLIGHT<G>);
  }
}
