// what      Softmax attention's gradients of k and v on Hopper: one thread copies, two warpgroups multiply.
// math      s_ij = scale q_i . k_j, or cap tanh(scale q_i . k_j / cap);  p_ij = e^(s_ij - lse_i), lse_i = log sum_j
//           e^s_ij;  dv_j = sum_i p_ij do_i,  dk_j = scale sum_i p_ij (do_i . v_j - delta_i) q_i, delta_i = do_i . o_i
//           - dlse_i, over the queries of all heads that share the keys; with a cap each term of dk times 1 - (s_ij /
//           cap)^2.  o is the forward pass's output; dk, dv, do, dlse are gradients of k, v, o, lse.  Code: `scores`
//           holds q . k, then p, with keys as rows; dp holds do_i . v_j; ds = p (dp - delta). A query sees the keys
//           from `left` tokens before its own position to `right` tokens after it
// shapes    k dk [B, H / group, Tk, K], v dv [.., V], q [B, H, Tq, K], do [B, H, Tq, V]; statistics [B, H, chunks, 2,
//           64] float32: of every 64 queries of a sequence (a chunk) first L = lse / ln 2, then delta; ds: DsEntry
//           (softmax_sm90.cuh), for query_gradient.cu; null if backward_queries.cu computes dq
// grid      softmax.py launches as many blocks as multiprocessors; a block computes the key tiles (Work in
//           softmax_work.cuh) of its column of `works`, in turn. A warpgroup has 64 keys
// smem      Shared: two tiles of k and v, later of dk and dv; a ring of tiles of q, do and statistics
// barriers  full: k and v have arrived; empty: the copy engine has read dk and dv, which overwrote them; q_full: q and
//           statistics have arrived; do_full: do has; q_empty, do_empty: they have been read. Named: ZERO_ROWS_BARRIER
//           in zero_rows: the warpgroup's zeros are written
// numerics  scores, weights and sums in float32; p and ds are rounded to T for their products
// source    Dao et al., "FlashAttention", 2022, algorithm 4; products have keys as rows, so that p and ds go from one
//           product to the next in registers
// limits    sm_90a; 16-bit data; rows of whole 16 bytes; K, V <= D; D of 64, 128; CAPPED: softcap > 0. `statistics`
//           are there: from backward_queries.cu, or statistics.cu if ds is stored
// order     Statements that neither data nor a comment bind to a place stand where the kernel is fastest: measure it
//           after a change of their order
// tests     test_softmax_attention; its backend `hopper` computes a product only when it is waited for, and lets the
//           producer go on as soon as a barrier does: a wait or a release in a wrong place changes results.
//           test_compile: no spills, no product that the assembler serialises, no write to a running product's operand
#include "softmax_sm90.cuh"

// From the includes:
//   RingPosition: the stage and its barrier's parity; warp_uniform(x): x, which all lanes of the warp have
//   consume_and_produce<2>: two warpgroups call the first function, one more thread the second
//   take_prefetched_work: the block's next Work; starts to copy the one at `next`, which it moves on. start_tile_copy:
//     starts tensor copies of a tile, whose bytes the caller announces at the barrier; load_operand_rows: 64 rows as
//     operands; copy_bulk: starts a copy whose bytes the caller announces likewise
//   issue_scores(sum, a, tile): starts sum = a @ tile^T, a product over columns; issue_weighted_sum(sum, a, tile,
//     accumulates): sum += a @ tile, or, if false (OVERWRITE), sum = a @ tile. Each is a group of its own.
//     wait_for<N>(sum): waits until the N latest groups at most run; `sum` is complete then
//   wgmma_fence_operand(x): the compiler moves no access of x over it
//   round_operands(a, x): sums x, rounded, as the operand of a product over their columns
//   release(barrier): this warp arrives; order_reads_before_copies: orders a warp's reads before the copies that a
//     later arrival at a barrier allows
//   store_rows(map, rows, width, x, factor, factor, ...): stores a warp's 16 rows; a factor for each of the lane's two
//   zero_rows: zeros in rows of other sequences; all warpgroups write the same, and each waits for its own threads only
//   needs_mask, mask_rows: whether some query of a tile does not see some key; weights of such pairs become 0. Rows are
//     keys here: a key is seen from `right` tokens before its position to `left` after it, hence the arguments' order
//   slope_of_cap: 1 - tanh^2, from p = 2^(scale tanh - L); 0 if p is 0
//   PendingStore: whether the copy engine may still read what the warp's store_rows stored last; release(barrier): if
//     so, waits for that, and arrives, once for each begin(); else does nothing. init_stages<WARPS>: barriers that a
//     producer and WARPS warps arrive at
//   scale_over_cap: scale / cap; tanh_of: tanh; prefetch_work: starts copying the block's next Work
//   CHUNK_QUERIES = 64; CHUNK_STATISTICS = 128: numbers of a chunk in `statistics`
//   Work: a tile of keys. `start`: its first token in k; `tokens`: how many are its own. `other_...`: the sequence of
//     queries; `first_tile`, `tiles`: its tiles that see the keys, 0 at the end of the list; `diagonal`: the position
//     of the first key among the queries; `statistics_chunk`: the sequence's first chunk in `statistics`; `ds_index` +
//     c: the entry of chunk c in a head's ds
//   Tile: panels of PANEL = 64 columns, swizzled; ScoreGradients: ds of 64 keys and 64 queries

constexpr int KEYS = 128, QUERIES = CHUNK_QUERIES, BOX_TOKENS = 64;
constexpr int WARPGROUPS = 2, THREADS = 128 * (WARPGROUPS + 1);  // of consumers; with the producer's warpgroup

template <typename T> struct Args {
  TensorMap q, k, v, do_, dk, dv;  // boxes of 64 columns and 64 tokens, of dk and dv 16
  StridedRows<T> dk_out, dv_out;   // dk, dv again, for a warp's 16 rows that are not all tokens of the tile
  const Work* works;               // [rounds, gridDim.x]
  const float* statistics;
  DsEntry* ds;                              // null: ds is not stored
  i64 H, group, K, V, left, right, chunks;  // H: heads of queries; chunks: of a head, in `statistics`
  i64 ds_head, ds_entries;  // the head of queries, of B H, that ds begins with; a head's number of entries
  double scale, softcap;
};

template <typename T, int D> struct alignas(1024) Shared {
  static_assert(D == 64 || D == 128);
  static constexpr int STAGES = 3;
  static_assert(STAGES >= 2, "the product with ds reads the previous stage");
  Tile<T, D, KEYS> k[2], v[2];
  Tile<T, D, QUERIES> q[STAGES];
  Tile<T, D, QUERIES> do_[STAGES];
  alignas(16) float statistics[STAGES][2][QUERIES];  // L, delta
  Work works[2], prefetched;  // of the tiles in k and v; the entry of args.works that is copied ahead
  MBarrier full[2], empty[2], q_full[STAGES], q_empty[STAGES], do_full[STAGES], do_empty[STAGES];
};

// The producing thread: copies the tiles of all of the block's work.
template <typename T, int D> __device__ __forceinline__ void produce(Shared<T, D>& s, const Args<T>& args) {
  using Memory = Shared<T, D>;
  const Work* next = args.works + blockIdx.x;
  prefetch_work(s.prefetched, next);
  prefetch_tensor_map(args.q), prefetch_tensor_map(args.k), prefetch_tensor_map(args.v), prefetch_tensor_map(args.do_),
      prefetch_tensor_map(args.dk), prefetch_tensor_map(args.dv);
  RingPosition<2> kv;
  RingPosition<Memory::STAGES> q;
  while (true) {
    Work work = take_prefetched_work(s.prefetched, next);
    const i64 first_head = i64(work.batch) * args.H + work.head * args.group - args.ds_head;
    // So far ds_index + c is the entry of chunk c of `statistics`, within a head. From here on ds_index + t is the
    // entry in all of args.ds of query tile t of the sequence, for the first head that shares the keys; the same tile
    // of the next head is args.ds_entries further on (store_ds). Without args.ds nobody reads it. All entries are at
    // most 4 GiB: softmax_tiles.py asserts that an int32 is enough (MOST_DS_BYTES).
    work.ds_index += i32(first_head * args.ds_entries) + work.statistics_chunk;
    mbarrier_wait(s.empty[kv.stage], kv.parity ^ 1);
    fence_proxy_async();  // consumers' accesses to k and v, which `empty` waits for, precede the copies
    s.works[kv.stage] = work;
    if (!work.tiles) return mbarrier_arrive(s.full[kv.stage]);
    mbarrier_arrive_and_expect(s.full[kv.stage], 2 * sizeof s.k[0]);
    start_tile_copy<BOX_TOKENS>(s.k[kv.stage], args.k, s.full[kv.stage], work.start, work.head, work.batch);
    start_tile_copy<BOX_TOKENS>(s.v[kv.stage], args.v, s.full[kv.stage], work.start, work.head, work.batch);
    kv.next();
#pragma unroll 1
    for (int query_head = work.head * int(args.group), last = query_head + int(args.group); query_head < last;
         ++query_head) {
      const i64 chunk = (i64(work.batch) * args.H + query_head) * args.chunks + work.statistics_chunk;
#pragma unroll 1
      for (int tile = work.first_tile; tile < work.first_tile + work.tiles; ++tile) {
        const int token = work.other_start + tile * QUERIES;
        mbarrier_wait(s.q_empty[q.stage], q.parity ^ 1);
        fence_proxy_async();  // the same for the statistics, which consumers read by ordinary loads
        mbarrier_arrive_and_expect(s.q_full[q.stage], sizeof s.q[0] + sizeof s.statistics[0]);
        start_tile_copy<BOX_TOKENS>(s.q[q.stage], args.q, s.q_full[q.stage], token, query_head, work.batch);
        copy_bulk(s.statistics[q.stage], args.statistics + (chunk + tile) * CHUNK_STATISTICS, sizeof s.statistics[0],
                  s.q_full[q.stage]);
        // No fence here: only wgmma reads do, and zero_rows fences its own writes.
        mbarrier_wait(s.do_empty[q.stage], q.parity ^ 1);
        mbarrier_arrive_and_expect(s.do_full[q.stage], sizeof s.do_[0]);
        start_tile_copy<BOX_TOKENS>(s.do_[q.stage], args.do_, s.do_full[q.stage], token, query_head, work.batch);
        q.next();
      }
    }
  }
}

// A consuming warpgroup: its 64 keys of each of the block's key tiles. A step is a query tile and its four products:
//   issued in                product            waited for in               then free
//   issue_scores_and_dp      scores = k q^T     the loop                    -
//   issue_scores_and_dp      dp = v do^T        add_dv                      -
//   add_dv                   dv += p do         end_step                    do's stage
//   the loop, in the next    dk += ds q         add_dv of the next step     q's stage, which has the statistics, too
//   step
// A stage is released (q_empty, do_empty) after the last wait for a product that reads it. After the last query tile of
// a key tile the next step is the first one of the next key tile, so that the product with ds runs beside its scores.
// In a lane's accumulators of products [64, N], numbers 4 n + 2 half + i are of key `row` + 8 half and column 8 n + 2
// (lane % 4) + i.
template <typename T, int D, bool CAPPED>
__device__ __forceinline__ void consume(Shared<T, D>& s, const Args<T>& args) {
  using Memory = Shared<T, D>;
  const int warpgroup = warp_uniform(threadIdx.x / 128), warpgroup_row = 64 * warpgroup, lane = threadIdx.x & 31;
  const int row = warpgroup_row + threadIdx.x / 32 % 4 * 16 + lane / 4;   // this lane's first of two rows
  const float scale = float(CAPPED ? args.softcap : args.scale) * LOG2E;  // of products, or of tanh, to base 2
  const float tanh_scale = scale_over_cap(args.scale, args.softcap);      // tanh(tanh_scale q . k)
  RingPosition<2> kv;
  RingPosition<Memory::STAGES> q;
  float scores[QUERIES / 2], dp[QUERIES / 2], dk[D / 2], dv[D / 2];
  u32 p[QUERIES / 16][4], ds[QUERIES / 16][4];
  constexpr bool IN_REGISTERS = D == 64;  // whether k and v are operands in registers, which have room for 64 columns
  u32 k[IN_REGISTERS ? D / 16 : 1][4], v[IN_REGISTERS ? D / 16 : 1][4];
  PendingStore stored;         // lane 0: the copy engine may still read this warp's dk and dv of the previous key tile
  int tiles, end;              // the number of a head's query tiles; the last one's index plus 1
  int tiles_left, heads_left;  // the current query tile is end - tiles_left; heads_left: with the current one
  int first_diagonal, length;  // query position of the key tile's first row; number of queries of the sequence

  auto skip_hidden_tiles = [&] {  // skips query tiles that see none of the warpgroup's keys, but not the last one
    while (tiles_left > 1 &&
           (end - tiles_left) * QUERIES + QUERIES - 1 < first_diagonal + warpgroup_row - int(args.right)) {
      mbarrier_wait(s.q_full[q.stage], q.parity);
      release(s.q_empty[q.stage]);
      mbarrier_wait(s.do_full[q.stage], q.parity);
      release(s.do_empty[q.stage]);
      q.next();
      --tiles_left;
    }
  };
  auto begin_tile = [&](const Work& work) {  // loads a key tile's numbers, and k and v IN_REGISTERS
    tiles = tiles_left = warp_uniform(work.tiles), end = warp_uniform(work.first_tile + work.tiles),
    heads_left = int(args.group);
    first_diagonal = warp_uniform(work.diagonal), length = warp_uniform(work.other_length);
    if constexpr (IN_REGISTERS)
      load_operand_rows(k, s.k[kv.stage], warpgroup_row), load_operand_rows(v, s.v[kv.stage], warpgroup_row);
    skip_hidden_tiles();
  };
  // A sequence's last tile has rows of the next sequence, which become zeros. Their L is infinite, their delta is 0.
  auto issue_scores_and_dp = [&] {  // two products with keys as rows: scores = k q^T, dp = v do^T
    const int valid = length - (end - tiles_left) * QUERIES;
    mbarrier_wait(s.q_full[q.stage], q.parity);
    if (valid < QUERIES) zero_rows(s.q[q.stage], valid, warpgroup);
    if constexpr (IN_REGISTERS) issue_scores(scores, k, s.q[q.stage]);
    else issue_scores(scores, s.k[kv.stage], warpgroup_row, s.q[q.stage]);
    mbarrier_wait(s.do_full[q.stage], q.parity);
    if (valid < QUERIES) zero_rows(s.do_[q.stage], valid, warpgroup);
    if constexpr (IN_REGISTERS) issue_scores(dp, v, s.do_[q.stage]);
    else issue_scores(dp, s.v[kv.stage], warpgroup_row, s.do_[q.stage]);
  };
  // Calls f(index of an element of this lane's accumulators, L and delta of the element's query).
  auto each_column = [&](auto f) {
    const float* const L = s.statistics[q.stage][0] + 2 * (lane & 3);
#pragma unroll
    for (int n = 0; n < QUERIES / 8; ++n) {
      const float2 Ls = *reinterpret_cast<const float2*>(L + 8 * n);
      const float2 deltas = *reinterpret_cast<const float2*>(L + QUERIES + 8 * n);
#pragma unroll
      for (int half = 0; half < 2; ++half) f(4 * n + 2 * half, Ls.x, deltas.x), f(4 * n + 2 * half + 1, Ls.y, deltas.y);
    }
  };
  auto weigh_scores = [&] {  // replaces `scores` by the weights p
    if (CAPPED) {
#pragma unroll
      for (int n = 0; n < QUERIES / 2; ++n) scores[n] = tanh_of(tanh_scale * scores[n]);
    }
    each_column([&](int n, float L, float) { scores[n] = exp2_approx(fmaf(scale, scores[n], -L)); });
    const int query = (end - tiles_left) * QUERIES, diagonal = first_diagonal + warpgroup_row;
    if (needs_mask<64, QUERIES>(query, diagonal, int(args.right), int(args.left), length))
      mask_rows(scores, query, first_diagonal + row, int(args.right), int(args.left), length, 0.f);
  };
  auto differentiate_scores = [&] {  // replaces dp by ds = p (dp - delta)
    each_column([&](int n, float, float delta) { dp[n] -= delta; });
#pragma unroll
    for (int n = 0; n < QUERIES / 2; ++n) dp[n] *= scores[n];
    const int tokens = warp_uniform(s.works[kv.stage].tokens);
    if (warpgroup_row + 64 > tokens)  // keys of another sequence: ds may be NaN, which dq would multiply by 0
#pragma unroll
      for (int n = 0; n < QUERIES / 2; ++n)
        if (row + n / 2 % 2 * 8 >= tokens) dp[n] = 0.f;
  };
  auto store_ds = [&] {  // if args.ds is given
    if (!args.ds) return;
    const int head_of_group = int(args.group) - heads_left;  // among those that share the keys
    const int entry = s.works[kv.stage].ds_index + head_of_group * int(args.ds_entries) + end - tiles_left;
    ScoreGradients& to = args.ds[entry][warpgroup];
#pragma unroll
    for (int n = 0; n < QUERIES / 16; ++n) store_evict_first(to.of_warp[threadIdx.x / 32 % 4][n][lane], ds[n]);
  };
  auto finish_tile = [&](int stage) {  // stores dk and dv of the key tile in this stage
    const Work& work = s.works[stage];
    const float factor = float(args.scale);
    // A sequence without queries has one query tile, too. Its statistics were another sequence's: delta may be NaN, and
    // so ds times the zeros of q. dv is 0 already: p is masked, and do is zeros.
    if (work.other_length == 0)
#pragma unroll
      for (int n = 0; n < D / 2; ++n) dk[n] = 0.f;
    store_rows(args.dk, args.dk_out, args.K, dk, factor, factor, s.k[stage], warpgroup_row, work);
    store_rows(args.dv, args.dv_out, args.V, dv, 1.f, 1.f, s.v[stage], warpgroup_row, work);
    stored.begin();
  };
  // Issues dv = p do, or dv += p do if `accumulates`. Then waits until no product but this latest one runs: dp is
  // complete, and so is dk, which was issued before.
  auto add_dv = [&](bool accumulates) {
    if (D == 128) wgmma_wait<0>();  // for dk: registers are too few for p beside ds, which dk's product reads
    round_operands<T>(p, scores);
    if (CAPPED) each_column([&](int n, float L, float) { scores[n] *= slope_of_cap(scores[n], L, scale); });
    issue_weighted_sum(dv, p, s.do_[q.stage], accumulates);
    wait_for<1>(dp);
  };
  auto end_step = [&] {  // computes ds while dv's product runs, then waits for dv
    differentiate_scores();
    round_operands<T>(ds, dp);
    wgmma_fence_operand(ds);      // ds is computed before the wait for dv
    order_reads_before_copies();  // this warp has read the statistics
    wait_for<0>(dv);
    release(s.do_empty[q.stage]);
    store_ds();
  };

  mbarrier_wait(s.full[0], 0);
  if (!warp_uniform(s.works[0].tiles)) return;
  begin_tile(s.works[0]);
  issue_scores_and_dp();
  wait_for<1>(scores);
  weigh_scores();
  add_dv(OVERWRITE);
  end_step();
  int previous_stage = q.stage;  // the previous query tile's stage of q: its product with ds is issued next
  bool accumulates = false;      // dk holds sums of this key tile's earlier query tiles
  // No product runs where the loop jumps back: the assembler would serialise all of them.
  while (true) {
    q.next();
    bool next_is_new_tile = false;  // the next query tile is for the block's next key tile
    if (--tiles_left == 0) {
      next_is_new_tile = --heads_left == 0;
      if (next_is_new_tile) {
        // Before the wait for `full`: the producer copies the tile that is waited for to this other stage, once the
        // copy engine has read the previous tile's dk and dv there.
        stored.release(s.empty[kv.stage ^ 1]);
        kv.next();
        mbarrier_wait(s.full[kv.stage], kv.parity);
        if (!warp_uniform(s.works[kv.stage].tiles)) break;
        begin_tile(s.works[kv.stage]);
      } else {
        tiles_left = tiles;
        skip_hidden_tiles();
      }
    }
    issue_scores_and_dp();
    issue_weighted_sum(dk, ds, s.q[previous_stage], accumulates);
    if (!next_is_new_tile) stored.release(s.empty[kv.stage ^ 1]);  // waits for the stores while products run
    wait_for<CAPPED && D == 128 ? 0 : 2>(scores);  // dp and dk run on; with a cap, registers are too few for that
    weigh_scores();
    if (next_is_new_tile) {
      wait_for<0>(dk);
      finish_tile(kv.stage ^ 1);
    }
    add_dv(!next_is_new_tile);
    wgmma_fence_operand(dk);  // add_dv has waited for it
    release(s.q_empty[previous_stage]);
    previous_stage = q.stage;
    end_step();
    accumulates = !next_is_new_tile;
  }
  issue_weighted_sum(dk, ds, s.q[previous_stage], accumulates);
  wait_for<0>(dk);
  finish_tile(kv.stage ^ 1);
  if (lane == 0) tensor_store_wait();
}

template <typename T, int D, bool CAPPED>
__global__ void __launch_bounds__(THREADS, 1) softmax_sm90_backward_keys(const __grid_constant__ Args<T> args) {
  using Memory = Shared<T, D>;
  Memory& s = *reinterpret_cast<Memory*>(dynamic_smem());
  if (threadIdx.x == 0) {
    constexpr int WARPS = 4 * WARPGROUPS;  // that consume
    init_stages<WARPS>(s.full, s.empty);
    init_stages<WARPS>(s.q_full, s.q_empty), init_stages<WARPS>(s.do_full, s.do_empty);
  }
  consume_and_produce<WARPGROUPS>([&] { consume<T, D, CAPPED>(s, args); }, [&] { produce(s, args); });
}
