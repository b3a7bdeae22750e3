// what      Softmax attention in tiles with an online softmax: no T x T matrix, memory linear in T.
// math      per tile of keys:  m' = max(m, max_j s_ij),  l <- e^(m - m') l + sum_j e^(s_ij - m'),
//           o <- e^(m - m') o + sum_j e^(s_ij - m') v_j;  at the end o / l;  s_ij = scale q_i . k_j, j <= i when causal
// shapes    q k [B, H, T, K], v o [B, H, T, V], L [B, H, T] float32: log2 sum_j 2^(s_ij log2 e)
// grid      a block for every QUERIES queries of a (sequence, head), those that see most keys first; a warp has 32
// smem      Shared: the queries, then o; two tiles of keys and values, one at hand and one under way
// barriers  one a tile of keys: it has arrived, and nobody reads the one before
// numerics  scores, m, l and o in float32; e^(s - m) is rounded to T before it multiplies v
// source    Dao et al., "FlashAttention", 2022, algorithm 1; Dao, "FlashAttention-2", 2023, section 3.1: o / l at the
//           end
// limits    half data; K, V <= D; D of 64, 128
#include "softmax.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int QUERIES = 128, KEYS = 64;

template <typename T, int D> struct alignas(128) Shared {
  T q[QUERIES * D];
  T k[2][KEYS * D];
  T v[2][KEYS * D];
  WorkTile at;
};

template <typename T, int D>
__global__ void __launch_bounds__(THREADS, 2) softmax_forward(const SoftmaxForwardArgs<T> args) {
  Shared<T, D>& s = *reinterpret_cast<Shared<T, D>*>(dynamic_smem());
  static_assert(sizeof(s) == 2 * D * (QUERIES + 4 * KEYS) + 128, "what the host asks for");
  const Shape& shape = args.shape;
  const u32 pairs = u32(shape.B * shape.H);
  if (threadIdx.x == 0) s.at = work_tile(shape, int(shape.NC - 1 - blockIdx.x / pairs), blockIdx.x % pairs);
  __syncthreads();  // the place stands
  const WorkTile& at = s.at;
  const int row = threadIdx.x / 32 * 32, query = at.first + row, lane = threadIdx.x & 31;  // the warp's first
  const int seen = args.causal ? min(at.first + QUERIES, at.length) : at.length;
  auto fetch_keys = [&](int first, int stage) {
    fetch<KEYS, D>(s.k[stage], args.k, at, first, shape.K, args.vectors);
    fetch<KEYS, D>(s.v[stage], args.v, at, first, shape.V, args.vectors);
    cp_async_commit();
  };

  fetch<QUERIES, D>(s.q, args.q, at, at.first, shape.K, args.vectors);
  fetch_keys(0, 0);
  if (args.scale < 0) {
    cp_async_wait<0>();
    __syncthreads();  // q stands
    for (int n = threadIdx.x; n < QUERIES * D; n += THREADS) s.q[n].bits ^= 0x8000;
  }
  const float scale = size_of_scale(args.scale);

  Fragment<2, D> o = {};
  float most[2][2], sum[2][2] = {};
  for (auto& pair : most) pair[0] = pair[1] = minus_infinity();
  for (int first = 0, stage = 0; first < seen; first += KEYS, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // this tile has arrived; the other may be overwritten
    if (first + KEYS < seen) fetch_keys(first + KEYS, stage ^ 1);
    if (args.causal && first > query + 31) continue;  // the warp sees none of it
    Fragment<2, KEYS> p = {};
    multiply_transposed<D, 2, KEYS>(p, s.q, row, s.k[stage]);
    if (first + KEYS > at.length || args.causal && first + KEYS - 1 > query)
      each<2, KEYS>(p, [&](float& x, int m, int half, int column) {
        const int last = args.causal ? min(query + 16 * m + 8 * half + lane / 4, at.length - 1) : at.length - 1;
        if (first + column > last) x = minus_infinity();
      });
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float kept = weigh<KEYS>(p[m], half, scale, most[m][half], sum[m][half]);
        if (kept != 1.f)  // few tiles bring a larger score
#pragma unroll
          for (int n = 0; n < D / 8; ++n) o[m][n][2 * half] *= kept, o[m][n][2 * half + 1] *= kept;
      }
    multiply_rows<D, 2, KEYS>(o, p, s.v[stage]);
  }

#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[m][half] = row_sum(sum[m][half]);
      const int token = query + 16 * m + 8 * half + lane / 4;
      if (args.L && lane % 4 == 0 && token < at.length)
        args.L[at.row + token] = scale * most[m][half] + log2f(sum[m][half]);
    }
  auto normaliser = [&](int m, int half) { return 1.f / sum[m][half]; };
  store<D, 2>(o, normaliser, s.q, row, args.o, at, query, shape.V, args.vectors);
}
