// what      Softmax attention without tensor cores: every dtype, any K and V.
// math      o_i = sum_j p_ij v_j,   p_ij = exp(scale q_i . k_j - L_i),   L_i = log sum_j exp(scale q_i . k_j), j <= i
//           where causal
// shapes    see plain_softmax.cuh; L [B, H, T] or null
// grid      a block for every (batch, head, chunk, 128 columns of V, 4 queries), batch slowest; a warp a query
// smem      none
// barriers  none
// numerics  float32, or float64 for float64; the largest score so far is subtracted
// source    Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax", algorithm 3
// limits    none
#include "plain_softmax.cuh"

template <typename T> struct Args {
  Rows<const T> q, k, v;
  Rows<T> o;
  Shape shape;
  Real<T>* L;
  double scale;
  i64 causal;
};

// 4 blocks a multiprocessor: without a word the compiler takes few registers and spills.
template <typename T> __global__ void __launch_bounds__(32 * WARPS, 4) softmax_plain_forward(const Args<T> args) {
  using R = Real<T>;
  const Shape& shape = args.shape;
  const WorkTile at(shape, (shape.V + WIDTH - 1) / WIDTH);
  if (at.t < 0) return;  // the whole warp
  const int lane = threadIdx.x % 32;
  const T* q = args.q.row(at.b, at.h, at.t);
  const i64 stop = args.causal ? at.t + 1 : at.span.stop;
  const R nothing = __uint_as_float(0xff800000u);  // -inf
  R sums[EACH] = {}, most = nothing, total = 0;
  for (i64 first = at.span.start; first < stop; first += 32) {
    const int count = int(min(i64(32), stop - first));
    R score = nothing;
    if (lane < count) score = R(args.scale) * dot(q, args.k.row(at.b, at.h, first + lane), shape.K);
    R larger = score;
    for (int distance = 16; distance > 0; distance /= 2)
      larger = max(larger, __shfl_xor_sync(0xffffffffu, larger, distance));
    larger = max(larger, most);
    const R weight = lane < count ? decay_of(score - larger) : R(0), before = decay_of(most - larger);
    R sum = weight;
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    most = larger, total = fma(total, before, sum);
#pragma unroll
    for (int n = 0; n < EACH; ++n) sums[n] *= before;
    add_rows(sums, weight, args.v.row(at.b, at.h, first), args.v.t, count, at.column, shape.V);
  }
#pragma unroll
  for (int n = 0; n < EACH; ++n) sums[n] /= total;
  put_row(args.o.row(at.b, at.h, at.t), sums, at.column, shape.V);
  if (args.L && at.column == 0) args.L[(at.b * shape.H + at.h) * shape.T + at.t] = most + log(total);
}
