// what      Softmax attention on every card's tensor cores.
// math      for each tile of keys:  m' = max(m, max_j s_ij),  l <- e^(m - m') l + sum_j e^(s_ij - m'),  o <- e^(m - m')
//           o + sum_j e^(s_ij - m') v_j;  at the end o / l;  s_ij = scale q_i . k_j, or cap tanh(scale q_i . k_j /
//           cap); lse_i = log sum_j e^s_ij;  a head's sink is one more score of every row, without a value.
//           Code: `scale` and scores are to base 2; `scale` is a size, its sign is given to products or to tanh_scale
// shapes    q [B, H, Tq, K], k [B, H / group, Tk, K], v [.., V], o [B, H, Tq, V], lse [B, H, Tq] float32 or null
// grid      softmax.py launches a block for every tile of queries in the host's table `works` (Work in
//           softmax_work.cuh), the longest first; a warp has 16 SIXTEENS queries
// smem      Shared: a tile of q, later of o; two tiles of k and v: one is multiplied while the next one is
//           copied. At most 99 KiB, which a block may have on sm_86
// barriers  one: the block's work is in shared memory; one for each tile of keys: it has arrived, and all warps have
//           read the previous one
// numerics  scores, m, l and o in float32; e^(s - m) is rounded to T before it multiplies v
// source    Dao et al., "FlashAttention", 2022, algorithm 1; Dao, "FlashAttention-2", 2023, section 3.1: o / l at the
//           end
// limits    16-bit data; K, V <= D; D of 64, 128
// tests     test_softmax_attention, also of Shared's size; test_compile (no spills)
#include "softmax.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

// From the includes:
//   THREADS = 128
//   Fragment<M, N>: a warp's sums [16 M, N]; multiply_transposed: d += A B^T; multiply_rows: d += A B
//   RowMaximum: a product x has the weight 2^(factor x - shift). factor is `scale`, or a power of two for scores beyond
//     2^27; shift, NONE at first, is factor times the row's largest x so far; score_of is that x's score
//   row_end: a RowEnd, of `factor`, 1 / l, and `logarithm`, log2 of l e^m; row_sum: over the four lanes of a row
//   fetch: starts to copy tokens to a tile, with zeros in rows and columns that do not exist: sums and products read
//     these, too; store: stores a warp's sums, times a factor, by way of its rows of a tile
//   each_value: calls f(number, m, half, column) for a lane's numbers of a Fragment
//   weigh: makes weights of a row's scores, updates its maximum and sum, and returns the factor of earlier weights
//   needs_mask: whether one of the rows does not see one of the columns; mask_rows: sets those numbers
//   size_of_scale: |scale| log2 e, at least 1e-37; tanh_of: tanh

constexpr int KEYS = 64;

// Groups of 16 queries that a warp has: capped scores leave registers for fewer.
template <int D, bool CAPPED> constexpr int SIXTEENS = D == 128 && CAPPED ? 1 : 2;

template <typename T> struct Args {
  StridedRows<const T> q, k, v;
  StridedRows<T> o;
  const Work* works;
  float* lse;
  const float* sinks;  // [H] or null
  // group: heads of queries that share keys; left, right: a query sees so many tokens before and after its position,
  // all if it is 2^30 (UNBOUNDED in softmax_tiles.py)
  i64 H, group, Tq, K, V, left, right;
  double scale, softcap;
  i64 vectors;  // whether all rows start and end at multiples of 16 bytes
};

template <typename T, int D, bool CAPPED> struct alignas(128) Shared {
  static_assert(D == 64 || D == 128);
  static constexpr int QUERIES = 64 * SIXTEENS<D, CAPPED>;
  T q[QUERIES * D];
  T k[2][KEYS * D];
  T v[2][KEYS * D];
  Work work;
};

template <typename T, int D, bool CAPPED>
__global__ void __launch_bounds__(THREADS, 2) softmax_forward(const Args<T> args) {
  using Memory = Shared<T, D, CAPPED>;
  constexpr int M = SIXTEENS<D, CAPPED>, QUERIES = Memory::QUERIES;
  static_assert(sizeof(Memory) <= 99 * 1024, "sm_86 gives a block no more");
  Memory& s = *reinterpret_cast<Memory*>(dynamic_smem());
  if (threadIdx.x == 0) s.work = args.works[blockIdx.x];
  __syncthreads();  // the work has been written
  // The block's tile of queries: tokens work.start on, work.tokens of them. The other_... are the keys' sequence;
  // first_tile, tiles: its tiles of KEYS keys that the queries see, or one without a token (tile_table in
  // softmax_tiles.py): the loop below, which also waits for the copies of q, runs at least once. output_batch: `batch`,
  // or another index for each part if softmax.py splits the keys.
  const Work& work = s.work;
  // Of the warp's first query: its row in the tile, and its position among the keys.
  const int row = threadIdx.x / 32 * 16 * M, diagonal = work.diagonal + row;
  const int lane = threadIdx.x & 31;
  const int left = int(args.left), right = int(args.right), end = work.first_tile + work.tiles;
  auto fetch_keys = [&](int tile, int stage) {
    const int head = work.head / int(args.group), rows = work.other_length - tile * KEYS,
              token = work.other_start + tile * KEYS;
    fetch<KEYS, D>(s.k[stage], args.k, work.batch, head, token, rows, args.K, args.vectors);
    fetch<KEYS, D>(s.v[stage], args.v, work.batch, head, token, rows, args.V, args.vectors);
    cp_async_commit();
  };

  fetch<QUERIES, D>(s.q, args.q, work.batch, work.head, work.start, work.tokens, args.K, args.vectors);
  fetch_keys(work.first_tile, 0);
  const float scale = size_of_scale(CAPPED ? args.softcap : args.scale);  // |scale|, of products or of tanh, to base 2

  Fragment<M, D> o = {};
  RowMaximum maximum[M][2];  // [m][half]: of the lane's row 16 m + 8 half + lane / 4 of the warp's
  float sum[M][2] = {};      // this lane's part of the row's sum of weights; at the end the factor of o
  for (auto& pair : maximum) pair[0].factor = pair[1].factor = scale;
  for (int tile = work.first_tile, stage = 0; tile < end; ++tile, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // this tile has arrived; the other may be overwritten
    if (tile + 1 < end) fetch_keys(tile + 1, stage ^ 1);
    const int key = tile * KEYS;
    if (key > diagonal + 16 * M - 1 + right || key + KEYS <= diagonal - left) continue;  // unseen by this warp
    Fragment<M, KEYS> p = {};  // q . k, with the scale's sign; then weights
    multiply_transposed<D, M, KEYS>(p, s.q, row, s.k[stage]);
    if (CAPPED) {
      const float tanh_scale = float(args.scale) * inverse(float(args.softcap));
      each_value<M, KEYS>(p, [&](float& x, int, int, int) { x = tanh_of(tanh_scale * x); });
    } else if (args.scale < 0) each_value<M, KEYS>(p, [](float& x, int, int, int) { x = -x; });
    if (needs_mask<16 * M, KEYS>(key, diagonal, left, right, work.other_length))
#pragma unroll
      for (int m = 0; m < M; ++m)
        mask_rows(p[m], key, diagonal + 16 * m + lane / 4, left, right, work.other_length, minus_infinity());
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float rescale = weigh<KEYS>(p[m], half, scale, maximum[m][half], sum[m][half]);
        if (rescale != 1.f)  // few tiles have a larger score than all earlier ones
#pragma unroll
          for (int n = 0; n < D / 8; ++n) o[m][n][2 * half] *= rescale, o[m][n][2 * half + 1] *= rescale;
      }
    multiply_rows<D, M, KEYS>(o, p, s.v[stage]);
  }

  const float sink = args.sinks ? LOG2E * args.sinks[work.head] : minus_infinity();
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowEnd result = row_end(RowMaximum::score_of(maximum[m][half].shift, scale), row_sum(sum[m][half]), sink);
      const int query = row + 16 * m + 8 * half + lane / 4;
      if (args.lse && lane % 4 == 0 && query < work.tokens)
        args.lse[(i64(work.output_batch) * args.H + work.head) * args.Tq + work.start + query] =
            result.logarithm / LOG2E;
      sum[m][half] = result.factor;
    }
  // Without a barrier: no other warp reads this one's rows of q, which o overwrites.
  store<D, M>(o, [&](int m, int half) { return sum[m][half]; }, s.q, row, args.o, work, args.V, args.vectors);
}
