// what      Softmax attention's gradient of the queries without tensor cores, and delta for that of keys and values.
// math      delta_i = do_i . o_i,   dq_i = scale sum_j p_ij (do_i . v_j - delta_i) k_j,   p as in plain_forward
// shapes    see plain_softmax.cuh; g is do
// grid      a block for every (batch, head, chunk, 128 channels, 4 queries), batch slowest; a warp a query
// smem      none
// barriers  none
// numerics  float32, or float64 for float64
// source    Dao et al., 2022, "FlashAttention", algorithm 4
// limits    none
#include "plain_softmax.cuh"

template <typename T> struct Args {
  Rows<const T> q, k, v, o, g;
  Rows<T> dq;
  Shape shape;
  Real<T>*L, *delta;
  double scale;
  i64 causal;
};

// 4 blocks a multiprocessor: without a word the compiler takes few registers and spills.
template <typename T>
__global__ void __launch_bounds__(32 * WARPS, 4) softmax_plain_backward_queries(const Args<T> args) {
  using R = Real<T>;
  const Shape& shape = args.shape;
  const WorkTile at(shape, (shape.K + WIDTH - 1) / WIDTH);
  if (at.t < 0) return;  // the whole warp
  const int lane = threadIdx.x % 32;
  const T *q = args.q.row(at.b, at.h, at.t), *g = args.g.row(at.b, at.h, at.t);
  const i64 stop = args.causal ? at.t + 1 : at.span.stop, row = (at.b * shape.H + at.h) * shape.T + at.t;
  const R L = args.L[row], delta = dot(g, args.o.row(at.b, at.h, at.t), shape.V);
  R sums[EACH] = {};
  for (i64 first = at.span.start; first < stop; first += 32) {
    const int count = int(min(i64(32), stop - first));
    const i64 j = first + min(lane, count - 1);
    const R weight = decay_of(R(args.scale) * dot(q, args.k.row(at.b, at.h, j), shape.K) - L);
    const R change = R(args.scale) * weight * (dot(g, args.v.row(at.b, at.h, j), shape.V) - delta);
    add_rows(sums, change, args.k.row(at.b, at.h, first), args.k.t, count, at.column, shape.K);
  }
  put_row(args.dq.row(at.b, at.h, at.t), sums, at.column, shape.K);
  if (at.column == 0) args.delta[row] = delta;
}
