// what      Softmax attention's gradients of keys and values without tensor cores.
// math      dv_j = sum_i p_ij do_i,   dk_j = scale sum_i p_ij (do_i . v_j - delta_i) q_i,   p as in plain_forward
// shapes    see plain_softmax.cuh; g is do
// grid      a block for every (batch, head, chunk, 128 channels and columns, 4 keys), batch slowest; a warp a key
// smem      none
// barriers  none
// numerics  float32, or float64 for float64
// source    Dao et al., 2022, "FlashAttention", algorithm 4
// limits    none
#include "plain_softmax.cuh"

template <typename T> struct Args {
  Rows<const T> q, k, v, g;
  Rows<T> dk, dv;
  Shape shape;
  Real<T>*L, *delta;
  double scale;
  i64 causal;
};

// 4 blocks a multiprocessor: without a word the compiler takes few registers and spills.
template <typename T> __global__ void __launch_bounds__(32 * WARPS, 4) softmax_plain_backward_keys(const Args<T> args) {
  using R = Real<T>;
  const Shape& shape = args.shape;
  const WorkTile at(shape, (max(shape.K, shape.V) + WIDTH - 1) / WIDTH);
  if (at.t < 0) return;  // the whole warp
  const int lane = threadIdx.x % 32;
  const T *k = args.k.row(at.b, at.h, at.t), *v = args.v.row(at.b, at.h, at.t);
  const i64 rows = (at.b * shape.H + at.h) * shape.T;
  R dk[EACH] = {}, dv[EACH] = {};
  for (i64 first = args.causal ? at.t : at.span.start; first < at.span.stop; first += 32) {
    const int count = int(min(i64(32), at.span.stop - first));
    const i64 i = first + min(lane, count - 1);
    const T *q = args.q.row(at.b, at.h, first), *g = args.g.row(at.b, at.h, first);
    const R weight = decay_of(R(args.scale) * dot(args.q.row(at.b, at.h, i), k, shape.K) - args.L[rows + i]);
    const R change = R(args.scale) * weight * (dot(args.g.row(at.b, at.h, i), v, shape.V) - args.delta[rows + i]);
    add_rows(dk, change, q, args.q.t, count, at.column, shape.K);
    add_rows(dv, weight, g, args.g.t, count, at.column, shape.V);
  }
  put_row(args.dk.row(at.b, at.h, at.t), dk, at.column, shape.K);
  put_row(args.dv.row(at.b, at.h, at.t), dv, at.column, shape.V);
}
