// what      Stage 2 of the five stages of a forward pass in chunks: queries decayed from their chunk's start, keys
//           decayed to its end. Stage 1 writes b and e; stage 3 reads kg, stage 5 qg.
// math      qg_i = q_i exp(b_i)  (RWKV-6: b_{i-1}, and 0 for the chunk's first),   kg_j = k_j exp(e_j);
//           b_i the sum of log gates from the chunk's start through token i, e_j from after j to its end
// shapes    q k b e qg kg [B, H, T, K]; q k float32, float16 or bfloat16, b e qg kg float32; or all six float64
// grid      stages.py launches a block for every (batch, head, chunk, 128 channels), batch slowest; 128 threads: each
//           has a channel, and with K <= 64 every second, fourth, ... group of FLIGHT tokens
// numerics  one exp a value; exp(-inf) is 0
// source    Yang et al., 2024, section 4.2
#include "read_order.cuh"
#include "real.cuh"
#include "tensor.cuh"

// From the includes:
//   Shape::NC: chunks of a batch row, of all its packed sequences together
//   chunk_tokens: those of a chunk; decay_of(x): e^x; widened(x): x as FloatOrDouble<T>

constexpr int THREADS = 128;
constexpr int FLIGHT = 4;  // tokens that are loaded before the first result is stored

template <typename T> struct Args {
  StridedRows<const T> q, k;
  StridedRows<const FloatOrDouble<T>> b, e;
  StridedRows<FloatOrDouble<T>> qg, kg;
  Shape shape;
};

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6), read_order.cuh. T: the type of q and k. FloatOrDouble<T>: float,
// or double if T is double.
template <class ReadOrder, typename T>
__global__ void __launch_bounds__(THREADS, 3) stages_gated_qk(const Args<T> args) {
  const Shape& shape = args.shape;
  const u32 NC = u32(shape.NC), H = u32(shape.H), groups = u32(shape.K + THREADS - 1) / THREADS;
  const u32 chunk = blockIdx.x / groups, head = chunk / NC, h = head % H, batch = head / H;
  const Span span = chunk_tokens(shape, chunk % NC);
  // `lanes` threads, K rounded up to a power of 2, take a group of tokens; as many groups as fit are taken at a time.
  u32 lanes = 1;
  while (lanes < THREADS && lanes < shape.K) lanes *= 2;
  const i64 own_start = span.start + threadIdx.x / lanes * FLIGHT;
  const u32 others = (THREADS / lanes - 1) * FLIGHT;  // tokens of other threads between two groups of this one
  const i64 channel = blockIdx.x % groups * THREADS + threadIdx.x % lanes;
  if (channel >= shape.K) return;
  const auto first_row = [&](const auto& x) { return x.row(batch, h, own_start) + channel; };
  auto q = first_row(args.q), k = first_row(args.k);
  // RWKV-6: the pointer b is a token behind the others. For the chunk's first token it is not read.
  auto b = first_row(args.b) - (ReadOrder::reads_before_write ? args.b.token_stride : 0), e = first_row(args.e);
  auto qg = first_row(args.qg), kg = first_row(args.kg);
#pragma unroll 1
  for (i64 first = own_start; first < span.stop; first += FLIGHT + others) {
    FloatOrDouble<T> query[FLIGHT], key[FLIGHT], from_start[FLIGHT], to_end[FLIGHT];
#pragma unroll
    for (int n = 0; n < FLIGHT;
         ++n, q += args.q.token_stride, k += args.k.token_stride, b += args.b.token_stride, e += args.e.token_stride) {
      const bool inside = first + n < span.stop;
      query[n] = inside ? widened(*q) : FloatOrDouble<T>(0), key[n] = inside ? widened(*k) : FloatOrDouble<T>(0);
      from_start[n] = inside && (!ReadOrder::reads_before_write || first + n > span.start) ? *b : FloatOrDouble<T>(0);
      to_end[n] = inside ? *e : FloatOrDouble<T>(0);
    }
#pragma unroll
    for (int n = 0; n < FLIGHT; ++n, qg += args.qg.token_stride, kg += args.kg.token_stride) {
      if (first + n >= span.stop) continue;
      *qg = query[n] * decay_of(from_start[n]);
      *kg = key[n] * decay_of(to_end[n]);
    }
    q += others * args.q.token_stride, k += others * args.k.token_stride;
    b += others * args.b.token_stride, e += others * args.e.token_stride;
    qg += others * args.qg.token_stride, kg += others * args.kg.token_stride;
  }
}
