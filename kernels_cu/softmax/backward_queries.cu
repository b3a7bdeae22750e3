// what      Softmax attention's gradient of q on every card's tensor cores, and the statistics that the gradients of k
//           and v read.
// math      dq_i = scale sum_j p_ij (do_i . v_j - delta_i) k_j,   p_ij = e^(s_ij - lse_i),   delta_i = do_i . o_i -
//           dlse_i;  s_ij = scale q_i . k_j, or cap tanh(scale q_i . k_j / cap): with a cap each term times 1 - (s_ij /
//           cap)^2;  lse_i = log sum_j e^s_ij, do and dlse are gradients of o and lse
// shapes    q dq [B, H, Tq, K], k [B, H / group, Tk, K], v [.., V], o do [B, H, Tq, V], lse dlse [B, H, Tq],
//           dlse or null; statistics [B, H, chunks, 2, 64] float32: of every 64 queries of a sequence (a chunk) first
//           L = lse / ln 2, then delta
// grid      softmax.py launches a block for every tile of queries (Work in softmax_work.cuh) of `works`, the longest
//           first; a warp has 32 queries
// smem      Shared: a tile of q, later of dq; a tile of do; a tile of o, later two tiles of k and v: one is multiplied
//           while the next one is copied. At most 99 KiB, which a block may have on sm_86
// barriers  the block's work is in shared memory | q, do and o have arrived | o has been read, and L and delta are in
//           shared memory; then one for each tile of keys: it has arrived, and all warps have read the previous one
// numerics  scores and p are computed again, in float32; p (dp - delta) is rounded to T for its product. delta is
//           computed from the rounded o: where one key has nearly all the weight, dq and dk are small and carry this
//           rounding
// source    Dao et al., "FlashAttention", 2022, algorithm 4, with the loop over queries outside, so that nothing is
//           added atomically
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
//   logarithm_or_infinity: L; infinity, so that weights are 0, if no key is seen (L is -infinity) or |L| is above 2^24
//   fetch: starts to copy tokens to a tile, with zeros in rows and columns that do not exist: sums and products read
//     these, too; store: stores a warp's sums, times a factor, by way of its rows of a tile
//   each_value, each_two_values: call f for a lane's numbers of one Fragment, of two
//   needs_mask: whether one of the rows does not see one of the columns; mask_rows: sets those numbers
//   piece_of: the address of 8 numbers of a tile's row

constexpr int QUERIES = 128, KEYS = 32;
constexpr int M = 2;  // a warp's queries, in blocks of 16
static_assert(QUERIES == THREADS / 32 * 16 * M && QUERIES % CHUNK_QUERIES == 0);

template <typename T> struct Args {
  StridedRows<const T> q, k, v, o, do_;
  StridedRows<T> dq;
  const Work* works;
  const float *lse, *dlse;
  float* statistics;
  // group: heads of queries that share keys; left, right: a query sees so many tokens before and after its position,
  // all if it is 2^30 (UNBOUNDED in softmax_tiles.py); chunks: of `statistics`, of a batch row
  i64 H, group, Tq, K, V, left, right, chunks;
  double scale, softcap;
  i64 vectors;  // whether all rows start and end at multiples of 16 bytes
};

template <typename T, int D> struct alignas(128) Shared {
  static_assert(D == 64 || D == 128);
  T q[QUERIES * D];
  T do_[QUERIES * D];
  union {
    T o[QUERIES * D];
    struct {
      T k[KEYS * D], v[KEYS * D];
    } stages[2];
  };
  float L[QUERIES], delta[QUERIES];
  Work work;
};

template <typename T, int D, bool CAPPED>
__global__ void __launch_bounds__(THREADS, 2) softmax_backward_queries(const Args<T> args) {
  static_assert(sizeof(Shared<T, D>) <= 99 * 1024, "sm_86 gives a block no more");
  Shared<T, D>& s = *reinterpret_cast<Shared<T, D>*>(dynamic_smem());
  if (threadIdx.x == 0) s.work = args.works[blockIdx.x];
  __syncthreads();  // the work has been written
  // The block's tile of queries: tokens work.start on, work.tokens of them. The other_... are the keys' sequence;
  // first_tile, tiles: its tiles of KEYS keys that the queries see; statistics_chunk: the tile's first chunk.
  const Work& work = s.work;
  const int row = threadIdx.x / 32 * 16 * M, lane = threadIdx.x & 31;  // row: of the warp's first query in the tile
  // Functions, since there are too few registers to hold these numbers.
  auto diagonal = [&] { return work.diagonal + row; };  // the position of the warp's first query among the keys
  auto end = [&] { return work.first_tile + work.tiles; };
  auto fetch_keys = [&](int tile, int stage) {
    const int head = work.head / int(args.group), rows = work.other_length - tile * KEYS,
              token = work.other_start + tile * KEYS;
    fetch<KEYS, D>(s.stages[stage].k, args.k, work.batch, head, token, rows, args.K, args.vectors);
    fetch<KEYS, D>(s.stages[stage].v, args.v, work.batch, head, token, rows, args.V, args.vectors);
    cp_async_commit();
  };

  fetch<QUERIES, D>(s.q, args.q, work.batch, work.head, work.start, work.tokens, args.K, args.vectors);
  fetch<QUERIES, D>(s.do_, args.do_, work.batch, work.head, work.start, work.tokens, args.V, args.vectors);
  fetch<QUERIES, D>(s.o, args.o, work.batch, work.head, work.start, work.tokens, args.V, args.vectors);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();                    // q, do and o have arrived
  static_assert(QUERIES == THREADS);  // a thread has a query
  {
    const int query = threadIdx.x;
    float delta = 0.f;
#pragma unroll
    for (int piece = 0; piece < D / 8; ++piece) {
      const T *do_ = piece_of<D>(s.do_, query, piece), *o = piece_of<D>(s.o, query, piece);
#pragma unroll
      for (int i = 0; i < 8; ++i) delta = fmaf(to_float(do_[i]), to_float(o[i]), delta);
    }
    const i64 head = i64(work.batch) * args.H + work.head, token = head * args.Tq + work.start + query;
    float L = minus_infinity();
    if (query < work.tokens) {
      L = LOG2E * args.lse[token];
      if (args.dlse) delta -= args.dlse[token];
    }
    s.L[query] = L = logarithm_or_infinity(L);
    s.delta[query] = delta;
    // Whole chunks, as the gradients of k, v and sinks read them: L is infinite and delta 0 after the sequence's end.
    if (query / CHUNK_QUERIES * CHUNK_QUERIES < work.tokens) {
      float* const to =
          args.statistics + (head * args.chunks + work.statistics_chunk + query / CHUNK_QUERIES) * CHUNK_STATISTICS;
      to[query % CHUNK_QUERIES] = L, to[CHUNK_QUERIES + query % CHUNK_QUERIES] = delta;
    }
  }
  __syncthreads();  // o has been read; L and delta have been written
  fetch_keys(work.first_tile, 0);

  const float scale = float(CAPPED ? args.softcap : args.scale) * LOG2E;  // of products, or of tanh, to base 2
  // L of one of the lane's rows, from shared memory: there are too few registers to hold it.
  auto L = [&](int m, int half) { return s.L[row + 16 * m + 8 * half + lane / 4]; };
  float delta[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) delta[m][half] = s.delta[row + 16 * m + 8 * half + lane / 4];
  Fragment<M, D> dq = {};
  for (int tile = work.first_tile, stage = 0; tile < end(); ++tile, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // this tile has arrived; the other may be overwritten
    if (tile + 1 < end()) fetch_keys(tile + 1, stage ^ 1);
    const int key = tile * KEYS;
    if (key > diagonal() + 16 * M - 1 + int(args.right) || key + KEYS <= diagonal() - int(args.left))
      continue;  // unseen
    // [the warp's 32 queries, KEYS keys]. scores: q . k, then weights p, then gradients ds; dp: do . v. A lane's values
    // (each) have row 16 m + 8 half + lane / 4.
    Fragment<M, KEYS> scores = {}, dp = {};
    multiply_transposed<D, M, KEYS, CAPPED>(scores, s.q, row, s.stages[stage].k);
    multiply_transposed<D, M, KEYS, CAPPED>(dp, s.do_, row, s.stages[stage].v);
    if (CAPPED) {
      const float tanh_scale = float(args.scale) * inverse(float(args.softcap));
      each_value<M, KEYS>(scores, [&](float& x, int, int, int) { x = tanh_of(tanh_scale * x); });
    }
    each_value<M, KEYS>(scores, [&](float& x, int m, int half, int) { x = exp2_approx(fmaf(scale, x, -L(m, half))); });
    if (needs_mask<16 * M, KEYS>(key, diagonal(), int(args.left), int(args.right), work.other_length))
#pragma unroll
      for (int m = 0; m < M; ++m)
        mask_rows(scores[m], key, diagonal() + 16 * m + lane / 4, int(args.left), int(args.right), work.other_length,
                  0.f);
    if (CAPPED)
      each_value<M, KEYS>(scores, [&](float& x, int m, int half, int) { x *= slope_of_cap(x, L(m, half), scale); });
    each_two_values<M, KEYS>(scores, dp, [&](float& x, float d, int m, int half, int) { x *= d - delta[m][half]; });
    multiply_rows<D, M, KEYS>(dq, scores, s.stages[stage].k);
  }
  // By way of the warp's own rows of q, which no other warp reads: no barrier.
  store<D, M>(dq, [&](int, int) { return float(args.scale); }, s.q, row, args.dq, work, args.K, args.vectors);
}
