// what      Softmax attention's gradients of k and v on every card's tensor cores.
// math      dv_j = sum_i p_ij do_i,   dk_j = scale sum_i p_ij (do_i . v_j - delta_i) q_i,   p_ij = e^(s_ij - lse_i),
//           delta_i = do_i . o_i - dlse_i, over the queries of all heads that share the keys;  s_ij = scale q_i . k_j,
//           or cap tanh(scale q_i . k_j / cap): with a cap each term of dk times 1 - (s_ij / cap)^2
// shapes    q [B, H, Tq, K], do [B, H, Tq, V], k dk [B, H / group, Tk, K], v dv [.., V]; from backward_queries.cu
//           statistics [B, H, chunks, 2, 64] float32: of every 64 queries of a sequence (a chunk) first L = lse / ln 2,
//           then delta. After a sequence's end L is infinite, so that p is 0, and delta is 0
// grid      softmax.py launches a block for every tile of keys (Work in softmax_work.cuh) of `works`, the longest
//           first; a warp has 16 keys
// smem      Shared: a tile of k and of v, later of dk and dv; two tiles of q, do and statistics: one is multiplied
//           while the next one is copied. At most 99 KiB, which a block may have on sm_86
// barriers  one: the block's work is in shared memory; one for each tile of queries: it has arrived, and all warps have
//           read the previous one
// numerics  scores and p are computed again, in float32; p and p (dp - delta) are rounded to T for their products
// source    Dao et al., "FlashAttention", 2022, algorithm 4; keys are the rows here, so that p and its gradient go from
//           one product to the next in registers
// limits    16-bit data; K, V <= D; D of 64, 128
// tests     test_softmax_attention, also of Shared's size; test_compile (no spills)
#include "softmax.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

// From the includes:
//   THREADS = 128, CHUNK_QUERIES = 64; CHUNK_STATISTICS: numbers of a chunk in `statistics`
//   Fragment<M, N>: a warp's sums [16 M, N]; multiply_transposed<D, M, N, FEW>: d += A B^T, if FEW in fewer registers;
//     multiply_rows: d += A B
//   slope_of_cap: 1 - tanh^2, from the weight p = 2^(scale tanh - L); 0 if p is 0
//   fetch: starts to copy tokens to a tile, with zeros in rows and columns that do not exist: sums and products read
//     these, too; store: stores a warp's sums, times a factor, by way of its rows of a tile
//   each_value, each_two_values: call f for a lane's numbers of one Fragment, of two; exp2_approx(x): 2^x
//   needs_mask: whether one of the rows does not see one of the columns; mask_rows: sets those numbers

constexpr int KEYS = 64, QUERIES = CHUNK_QUERIES;
constexpr int M = 1;  // a warp's keys, in blocks of 16
static_assert(KEYS == THREADS / 32 * 16 * M && M == 1, "mask_rows masks one block of 16");

template <typename T> struct Args {
  StridedRows<const T> q, k, v, do_;
  StridedRows<T> dk, dv;
  const Work* works;
  const float* statistics;
  // group: heads of queries that share keys; left, right: a query sees so many tokens before and after its position,
  // all if it is 2^30 (UNBOUNDED in softmax_tiles.py); chunks: of `statistics`, of a batch row
  i64 H, group, K, V, left, right, chunks;
  double scale, softcap;
  i64 vectors;  // whether all rows start and end at multiples of 16 bytes
};

template <typename T, int D> struct alignas(128) Shared {
  static_assert(D == 64 || D == 128);
  T k[KEYS * D];
  T v[KEYS * D];
  T q[2][QUERIES * D];
  T do_[2][QUERIES * D];
  float statistics[2][2][QUERIES];  // L, delta
  Work work;
};

template <typename T, int D, bool CAPPED>
__global__ void __launch_bounds__(THREADS, 2) softmax_backward_keys(const Args<T> args) {
  static_assert(sizeof(Shared<T, D>) <= 99 * 1024, "sm_86 gives a block no more");
  Shared<T, D>& s = *reinterpret_cast<Shared<T, D>*>(dynamic_smem());
  if (threadIdx.x == 0) s.work = args.works[blockIdx.x];
  __syncthreads();  // the work has been written
  // The block's tile of keys: tokens work.start on, work.tokens of them; work.head is a head of k and v. The other_...
  // are the queries' sequence; first_tile, tiles: its tiles of QUERIES queries that see the keys; statistics_chunk: the
  // sequence's first chunk.
  const Work& work = s.work;
  const int row = threadIdx.x / 32 * 16 * M, lane = threadIdx.x & 31;  // row: the warp's first key
  auto diagonal = [&] { return work.diagonal + row; };  // the position of the warp's first key among the queries
  // Step n multiplies a tile of queries: those of the first head that shares the keys, then those of the next, ... A
  // head has work.tiles of them, 1 at least (tile_table in softmax_tiles.py).
  auto tile_of = [&](int n) { return work.first_tile + n % work.tiles; };
  auto fetch_queries = [&](int n) {
    const int stage = n & 1, tile = tile_of(n), head = work.head * int(args.group) + n / work.tiles;
    const int rows = work.other_length - tile * QUERIES, token = work.other_start + tile * QUERIES;
    fetch<QUERIES, D>(s.q[stage], args.q, work.batch, head, token, rows, args.K, args.vectors);
    fetch<QUERIES, D>(s.do_[stage], args.do_, work.batch, head, token, rows, args.V, args.vectors);
    static_assert(CHUNK_STATISTICS == THREADS);  // a thread copies a number
    const i64 chunk = (i64(work.batch) * args.H + head) * args.chunks + work.statistics_chunk + tile;
    const float* from = args.statistics + chunk * CHUNK_STATISTICS + threadIdx.x;
    cp_async<4>(&s.statistics[stage][0][threadIdx.x], rows > 0 ? from : args.statistics, rows > 0);
    cp_async_commit();
  };

  fetch<KEYS, D>(s.k, args.k, work.batch, work.head, work.start, work.tokens, args.K, args.vectors);
  fetch<KEYS, D>(s.v, args.v, work.batch, work.head, work.start, work.tokens, args.V, args.vectors);
  fetch_queries(0);
  const float scale = float(CAPPED ? args.softcap : args.scale) * LOG2E;  // of products, or of tanh, to base 2
  Fragment<M, D> dk = {}, dv = {};
  for (int n = 0; n < work.tiles * int(args.group); ++n) {
    cp_async_wait<0>();
    __syncthreads();  // this tile has arrived; the other may be overwritten
    if (n + 1 < work.tiles * int(args.group)) fetch_queries(n + 1);
    const int stage = n & 1, query = tile_of(n) * QUERIES;
    const float (&L)[QUERIES] = s.statistics[stage][0], (&deltas)[QUERIES] = s.statistics[stage][1];
    // [the warp's 16 keys, QUERIES queries]. scores: q . k, then weights p, then gradients ds; dp: do . v. A lane's
    // values have a row and a column, the query in the tile.
    Fragment<M, QUERIES> scores = {}, dp = {};
    multiply_transposed<D, M, QUERIES, CAPPED>(scores, s.k, row, s.q[stage]);
    if (CAPPED) {
      const float tanh_scale = float(args.scale) * inverse(float(args.softcap));
      each_value<M, QUERIES>(scores, [&](float& x, int, int, int) { x = tanh_of(tanh_scale * x); });
    }
    each_value<M, QUERIES>(scores,
                           [&](float& x, int, int, int column) { x = exp2_approx(fmaf(scale, x, -L[column])); });
    // `right` and `left` change places: a key is seen by queries up to `right` before it, and `left` after it.
    if (needs_mask<16 * M, QUERIES>(query, diagonal(), int(args.right), int(args.left), work.other_length))
      mask_rows(scores[0], query, diagonal() + lane / 4, int(args.right), int(args.left), work.other_length, 0.f);
    multiply_rows<D, M, QUERIES>(dv, scores, s.do_[stage]);
    if (CAPPED)
      each_value<M, QUERIES>(scores, [&](float& x, int, int, int column) { x *= slope_of_cap(x, L[column], scale); });
    multiply_transposed<D, M, QUERIES, CAPPED>(dp, s.v, row, s.do_[stage]);
    each_two_values<M, QUERIES>(scores, dp, [&](float& x, float d, int, int, int column) { x *= d - deltas[column]; });
    multiply_rows<D, M, QUERIES>(dk, scores, s.q[stage]);
  }
  // By way of the warp's own rows of k and v, which no other warp reads: no barrier.
  store<D, M>(dk, [&](int, int) { return float(args.scale); }, s.k, row, args.dk, work, args.K, args.vectors);
  store<D, M>(dv, [](int, int) { return 1.f; }, s.v, row, args.dv, work, args.V, args.vectors);
}
