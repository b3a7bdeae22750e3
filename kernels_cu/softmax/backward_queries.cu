// what      Softmax attention's gradient of the queries, and what the gradients of keys and values need of o.
// math      dq_i = scale sum_j p_ij (do_i . v_j - delta_i) k_j,   p_ij = e^(s_ij - L_i),   delta_i = do_i . o_i
// shapes    q k dq [B, H, T, K], v o do [B, H, T, V], L delta [B, H, T] float32, L as the forward leaves it
// grid      a block for every QUERIES queries of a (sequence, head), those that see most keys first; a warp has 32
// smem      Shared: the queries, then dq; the gradients of o; o, then two tiles of keys and values, one at hand and one
//           under way
// barriers  queries and o arrived | o read; then one a tile of keys: it has arrived, nobody reads the one before
// numerics  p is recomputed in float32 from L, the scores in float32 as well; p (dp - delta) is rounded to T. delta is
//           made of the rounded o: where one key has nearly all the weight, dq and dk are small and carry its rounding
// source    Dao et al., "FlashAttention", 2022, algorithm 4, its loops turned so that nothing is added atomically
// limits    half data; K, V <= D; D of 64, 128
#include "softmax.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int QUERIES = 128, KEYS = 32;

template <typename T> struct Args {
  Rows<const T> q, k, v, o, g;  // g is do
  Rows<T> dq;
  Shape shape;  // a chunk is QUERIES tokens
  const float* L;
  float* delta;
  double scale;
  i64 causal;
  i64 vectors;  // whether all rows are whole pieces of 16 bytes
};

template <typename T, int D> struct alignas(128) Shared {
  T q[QUERIES * D];
  T g[QUERIES * D];
  union {
    T o[QUERIES * D];
    T kv[2][2][KEYS * D];  // keys, values of two tiles
  };
  float delta[QUERIES];
  WorkTile at;
};

template <typename T, int D>
__global__ void __launch_bounds__(THREADS, 2) softmax_backward_queries(const Args<T> args) {
  Shared<T, D>& s = *reinterpret_cast<Shared<T, D>*>(dynamic_smem());
  static_assert(sizeof(s) == 2 * D * (2 * QUERIES + 4 * KEYS) + 4 * QUERIES + 128, "what the host asks for");
  const Shape& shape = args.shape;
  const u32 pairs = u32(shape.B * shape.H);
  if (threadIdx.x == 0) s.at = work_tile(shape, int(shape.NC - 1 - blockIdx.x / pairs), blockIdx.x % pairs);
  __syncthreads();  // the place stands
  const WorkTile& at = s.at;
  const int row = threadIdx.x / 32 * 32, lane = threadIdx.x & 31;
  // The warp's first query and the keys that the block sees, made anew each time for want of registers.
  auto query = [&] { return at.first + row; };
  auto seen = [&] { return args.causal ? min(at.first + QUERIES, at.length) : at.length; };
  auto fetch_keys = [&](int first, int stage) {
    fetch<KEYS, D>(s.kv[stage][0], args.k, at, first, shape.K, args.vectors);
    fetch<KEYS, D>(s.kv[stage][1], args.v, at, first, shape.V, args.vectors);
    cp_async_commit();
  };

  fetch<QUERIES, D>(s.q, args.q, at, at.first, shape.K, args.vectors);
  fetch<QUERIES, D>(s.g, args.g, at, at.first, shape.V, args.vectors);
  fetch<QUERIES, D>(s.o, args.o, at, at.first, shape.V, args.vectors);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();  // q, do and o have arrived
  static_assert(QUERIES == THREADS);
  float own = 0.f;
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    const T *g = piece_of<D>(s.g, threadIdx.x, n), *o = piece_of<D>(s.o, threadIdx.x, n);
#pragma unroll
    for (int i = 0; i < 8; ++i) own = fmaf(to_float(g[i]), to_float(o[i]), own);
  }
  s.delta[threadIdx.x] = own;
  if (at.first + int(threadIdx.x) < at.length) args.delta[at.row + at.first + threadIdx.x] = own;
  __syncthreads();  // o is read, delta stands
  fetch_keys(0, 0);

  const float scale = float(args.scale) * LOG2E;
  float L[2][2], delta[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int down = 16 * m + 8 * half + lane / 4;
      L[m][half] = query() + down < at.length ? args.L[at.row + query() + down] : 0.f;
      delta[m][half] = s.delta[row + down];
    }
  Fragment<2, D> dq = {};
  for (int first = 0, stage = 0; first < seen(); first += KEYS, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // this tile has arrived; the other may be overwritten
    if (first + KEYS < seen()) fetch_keys(first + KEYS, stage ^ 1);
    if (args.causal && first > query() + 31) continue;  // the warp sees none of it
    Fragment<2, KEYS> p = {}, dp = {};
    multiply_transposed<D, 2, KEYS>(p, s.q, row, s.kv[stage][0]);
    multiply_transposed<D, 2, KEYS>(dp, s.g, row, s.kv[stage][1]);
    each<2, KEYS>(p, [&](float& x, int m, int half, int) { x = exp2_approx(fmaf(scale, x, -L[m][half])); });
    if (first + KEYS > at.length || args.causal && first + KEYS - 1 > query())
      each<2, KEYS>(p, [&](float& x, int m, int half, int column) {
        const int last = args.causal ? min(query() + 16 * m + 8 * half + lane / 4, at.length - 1) : at.length - 1;
        if (first + column > last) x = 0.f;
      });
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x) p[m][n][x] *= dp[m][n][x] - delta[m][x / 2];
    multiply_rows<D, 2, KEYS>(dq, p, s.kv[stage][0]);
  }
  auto factor = [&](int, int) { return float(args.scale); };
  store<D, 2>(dq, factor, s.q, row, args.dq, at, query(), shape.K, args.vectors);
}
