// what      Stage 2: queries decayed from their chunk's start, keys decayed to its end.
// math      qg_i = q_i exp(b_i)  (RWKV-6: b_{i-1}, and 0 for the chunk's first),   kg_j = k_j exp(e_j)
// shapes    q k b e qg kg [B, H, T, K]; b e qg kg float32, or all float64
// grid      a block for every (batch, head, chunk), batch slowest; 128 threads over (token, channel)
// smem      none
// barriers  none
// numerics  one exp a value; exp(-inf) is 0
// source    Yang et al., 2024, section 4.2
// limits    none
#include "read_order.cuh"
#include "real.cuh"
#include "tensor.cuh"

template <typename T> struct Args {
  Rows<const T> q, k;
  Rows<const Real<T>> b, e;
  Rows<Real<T>> qg, kg;
  Shape shape;
};

// 4 blocks a multiprocessor: without a word the compiler takes few registers and spills.
template <class ReadOrder, typename T> __global__ void __launch_bounds__(128, 4) stages_gated_qk(const Args<T> args) {
  const Shape& shape = args.shape;
  const i64 c = blockIdx.x % shape.NC, h = blockIdx.x / shape.NC % shape.H, batch = blockIdx.x / shape.NC / shape.H;
  const Span span = chunk_tokens(shape, c);
#pragma unroll 1
  for (i64 at = threadIdx.x; at < (span.stop - span.start) * shape.K; at += blockDim.x) {
    const i64 t = span.start + at / shape.K, channel = at % shape.K;
    const i64 read = ReadOrder::reads_before_write ? t - 1 : t;
    const Real<T> d = read < span.start ? Real<T>(0) : args.b.row(batch, h, read)[channel];
    args.qg.row(batch, h, t)[channel] = to_real(args.q.row(batch, h, t)[channel]) * decay_of(d);
    args.kg.row(batch, h, t)[channel] =
        to_real(args.k.row(batch, h, t)[channel]) * decay_of(args.e.row(batch, h, t)[channel]);
  }
}
