// what      Softmax attention in tiles with an online softmax: no Tq x Tk matrix, memory linear in both.
// math      per tile of keys:  m' = max(m, max_j s_ij),  l <- e^(m - m') l + sum_j e^(s_ij - m'), o <- e^(m - m') o +
//           sum_j e^(s_ij - m') v_j;  at the end o / l;  s_ij = scale q_i . k_j, or cap tanh(scale q_i . k_j / cap);
//           lse_i = log sum_j e^s_ij;  a head's sink is one more weight of every row
// shapes    q [B, H, Tq, K], k [B, H / group, Tk, K], v [.., V], o [B, H, Tq, V], L [B, H, Tq] float32 or null: lse
// grid      a block for every tile of `works`, the longest first; a warp has 16 ROWS queries
// smem      Shared: the queries, then o; two tiles of keys and values, one at hand and one under way
// barriers  one a tile of keys: it has arrived, and nobody reads the one before
// numerics  scores, m, l and o in float32; e^(s - m) is rounded to T before it multiplies v
// source    Dao et al., "FlashAttention", 2022, algorithm 1; Dao, "FlashAttention-2", 2023, section 3.1: o / l at the
//           end
// limits    half data; K, V <= D; D of 64, 128
#include "softmax.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int KEYS = 64;

// 16 queries of a warp: capped scores leave registers for fewer.
template <int D, bool CAPPED> constexpr int ROWS = D == 128 && CAPPED ? 1 : 2;

template <typename T> struct Args {
  Rows<const T> q, k, v;
  Rows<T> o;
  const Work* works;
  float* L;
  const float* sinks;  // [H] or null
  i64 H, group, Tq, K, V, left, right;
  double scale, softcap;
  i64 vectors;  // whether all rows are whole pieces of 16 bytes
};

template <typename T, int D, bool CAPPED> struct alignas(128) Shared {
  static constexpr int QUERIES = 64 * ROWS<D, CAPPED>;
  T q[QUERIES * D];
  T k[2][KEYS * D];
  T v[2][KEYS * D];
  Work work;
};

template <typename T, int D, bool CAPPED>
__global__ void __launch_bounds__(THREADS, 2) softmax_forward(const Args<T> args) {
  using S = Shared<T, D, CAPPED>;
  constexpr int M = ROWS<D, CAPPED>, QUERIES = S::QUERIES;
  S& s = *reinterpret_cast<S*>(dynamic_smem());
  static_assert(sizeof(s) == 2 * D * (QUERIES + 4 * KEYS) + 128, "what the host asks for");
  if (threadIdx.x == 0) s.work = args.works[blockIdx.x];
  __syncthreads();  // the place stands
  const Work& work = s.work;
  const int row = threadIdx.x / 32 * 16 * M, diagonal = work.diagonal + row,
            lane = threadIdx.x & 31;  // of the warp's first
  const int left = int(args.left), right = int(args.right), end = work.first_tile + work.tiles;
  auto fetch_keys = [&](int block, int stage) {
    const int head = work.head / int(args.group), rows = work.other_length - block * KEYS,
              token = work.other_start + block * KEYS;
    fetch<KEYS, D>(s.k[stage], args.k, work.batch, head, token, rows, args.K, args.vectors);
    fetch<KEYS, D>(s.v[stage], args.v, work.batch, head, token, rows, args.V, args.vectors);
    cp_async_commit();
  };

  fetch<QUERIES, D>(s.q, args.q, work.batch, work.head, work.start, work.tokens, args.K, args.vectors);
  fetch_keys(work.first_tile, 0);
  const float scale = size_of_scale(CAPPED ? args.softcap : args.scale);

  Fragment<M, D> o = {};
  RowMaximum most[M][2];
  float sum[M][2] = {};
  for (auto& pair : most) pair[0].factor = pair[1].factor = scale;
  for (int block = work.first_tile, stage = 0; block < end; ++block, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // this tile has arrived; the other may be overwritten
    if (block + 1 < end) fetch_keys(block + 1, stage ^ 1);
    const int key = block * KEYS;
    if (key > diagonal + 16 * M - 1 + right || key + KEYS <= diagonal - left) continue;  // the warp sees none of it
    Fragment<M, KEYS> p = {};
    multiply_transposed<D, M, KEYS>(p, s.q, row, s.k[stage]);
    if (CAPPED) {
      const float inner = float(args.scale) * inverse(float(args.softcap));
      each<M, KEYS>(p, [&](float& x, int, int, int) { x = tanh_of(inner * x); });
    } else if (args.scale < 0) each<M, KEYS>(p, [](float& x, int, int, int) { x = -x; });
    if (partly_seen<16 * M, KEYS>(key, diagonal, left, right, work.other_length))
#pragma unroll
      for (int m = 0; m < M; ++m)
        mask_rows(p[m], key, diagonal + 16 * m + lane / 4, left, right, work.other_length, minus_infinity());
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float kept = weigh<KEYS>(p[m], half, scale, most[m][half], sum[m][half]);
        if (kept != 1.f)  // few tiles bring a larger score
#pragma unroll
          for (int n = 0; n < D / 8; ++n) o[m][n][2 * half] *= kept, o[m][n][2 * half + 1] *= kept;
      }
    multiply_rows<D, M, KEYS>(o, p, s.v[stage]);
  }

  const float sink = args.sinks ? LOG2E * args.sinks[work.head] : minus_infinity();
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowEnd found = row_end(RowMaximum::score_of(most[m][half].shift, scale), row_sum(sum[m][half]), sink);
      const int down = row + 16 * m + 8 * half + lane / 4;
      if (args.L && lane % 4 == 0 && down < work.tokens)
        args.L[(i64(work.output_batch) * args.H + work.head) * args.Tq + work.start + down] = found.logarithm / LOG2E;
      sum[m][half] = found.factor;
    }
  store<D, M>(o, [&](int m, int half) { return sum[m][half]; }, s.q, row, args.o, work, args.V, args.vectors);
}
