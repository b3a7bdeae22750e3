// what      Softmax attention's gradients of keys and values.
// math      dv_j = sum_i p_ij do_i,   dk_j = scale sum_i p_ij (do_i . v_j - delta_i) q_i,   p_ij = e^(s_ij - L_i)
// shapes    q k dk [B, H, T, K], v do dv [B, H, T, V], L delta [B, H, T] float32, as the forward and
//           softmax_backward_queries leave them
// grid      a block for every KEYS keys of a (sequence, head), those that most queries see first; a warp has 16
// smem      Shared: keys and values, then dk and dv; two tiles of queries, one at hand and one under way
// barriers  one a tile of queries: it has arrived, and nobody reads the one before
// numerics  p is recomputed in float32 from L, the scores in float32 as well; p and p (dp - delta) are rounded to T
// source    Dao et al., "FlashAttention", 2022, algorithm 4; keys are the rows here, so that p and its gradient go from
//           one product to the next in registers
// limits    half data; K, V <= D; D of 64, 128
#include "softmax.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int KEYS = 64, QUERIES = 64;

template <typename T> struct Args {
  Rows<const T> q, k, v, g;  // g is do
  Rows<T> dk, dv;
  Shape shape;  // a chunk is KEYS tokens
  const float *L, *delta;
  double scale;
  i64 causal;
  i64 vectors;  // whether all rows are whole pieces of 16 bytes
};

template <typename T, int D> struct alignas(128) Shared {
  T k[KEYS * D];
  T v[KEYS * D];
  T q[2][QUERIES * D];
  T g[2][QUERIES * D];
  float L[2][QUERIES];
  float delta[2][QUERIES];
  WorkTile at;
};

template <typename T, int D> __global__ void __launch_bounds__(THREADS, 2) softmax_backward_keys(const Args<T> args) {
  Shared<T, D>& s = *reinterpret_cast<Shared<T, D>*>(dynamic_smem());
  static_assert(sizeof(s) == 2 * D * (2 * KEYS + 4 * QUERIES) + 4 * 4 * QUERIES + 128, "what the host asks for");
  const Shape& shape = args.shape;
  const u32 pairs = u32(shape.B * shape.H);
  if (threadIdx.x == 0) s.at = work_tile(shape, int(blockIdx.x / pairs), blockIdx.x % pairs);
  __syncthreads();  // the place stands
  const WorkTile& at = s.at;
  const int row = threadIdx.x / 32 * 16, key = at.first + row, lane = threadIdx.x & 31;  // the warp's first
  auto fetch_queries = [&](int first, int stage) {
    fetch<QUERIES, D>(s.q[stage], args.q, at, first, shape.K, args.vectors);
    fetch<QUERIES, D>(s.g[stage], args.g, at, first, shape.V, args.vectors);
    if (const int n = threadIdx.x; n < QUERIES) {
      const bool inside = first + n < at.length;
      const i64 token = inside ? at.row + first + n : 0;
      cp_async<4>(&s.L[stage][n], args.L + token, inside);
      cp_async<4>(&s.delta[stage][n], args.delta + token, inside);
    }
    cp_async_commit();
  };

  const int earliest = args.causal ? at.first : 0;  // a query that sees the keys, at the start of a tile
  fetch<KEYS, D>(s.k, args.k, at, at.first, shape.K, args.vectors);
  fetch<KEYS, D>(s.v, args.v, at, at.first, shape.V, args.vectors);
  fetch_queries(earliest, 0);
  const float scale = float(args.scale) * LOG2E;
  Fragment<1, D> dk = {}, dv = {};
  for (int first = earliest, stage = 0; first < at.length; first += QUERIES, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // this tile has arrived; the other may be overwritten
    if (first + QUERIES < at.length) fetch_queries(first + QUERIES, stage ^ 1);
    Fragment<1, QUERIES> p = {}, dp = {};
    multiply_transposed<D, 1, QUERIES>(p, s.k, row, s.q[stage]);
    each<1, QUERIES>(p, [&](float& x, int, int, int column) { x = exp2_approx(fmaf(scale, x, -s.L[stage][column])); });
    if (args.causal && first < key + 15)
      each<1, QUERIES>(p, [&](float& x, int, int half, int column) {
        if (first + column < key + 8 * half + lane / 4) x = 0.f;
      });
    multiply_rows<D, 1, QUERIES>(dv, p, s.g[stage]);
    multiply_transposed<D, 1, QUERIES>(dp, s.v, row, s.g[stage]);
#pragma unroll
    for (int n = 0; n < QUERIES / 8; ++n)
#pragma unroll
      for (int x = 0; x < 4; ++x) p[0][n][x] *= dp[0][n][x] - s.delta[stage][8 * n + 2 * (lane & 3) + x % 2];
    multiply_rows<D, 1, QUERIES>(dk, p, s.q[stage]);
  }
  store<D, 1>(dk, [&](int, int) { return float(args.scale); }, s.k, row, args.dk, at, key, shape.K, args.vectors);
  store<D, 1>(dv, [](int, int) { return 1.f; }, s.v, row, args.dv, at, key, shape.V, args.vectors);
}
