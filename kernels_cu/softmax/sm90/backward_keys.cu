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
// grid      as many blocks as multiprocessors; a block computes the key tiles (Work in softmax_work.cuh) of its column
//           of `works`, in turn. A warpgroup has 64 keys
// smem      Shared: two tiles of k and v, later of dk and dv; a ring of tiles of q, do and statistics
// barriers  full: k and v have arrived; empty: the copy engine has read dk and dv, which overwrote them; q_full: q and
//           statistics have arrived; do_full: do has; q_empty, do_empty: they have been read. Named: ZERO_ROWS_BARRIER
//           in zero_rows: the warpgroup's zeros are written
// numerics  scores, weights and sums in float32; p and ds are rounded to T for their products
// source    Dao et al., "FlashAttention", 2022, algorithm 4; products have keys as rows, so that p and ds go from one
//           product to the next in registers
// limits    sm_90a; 16-bit data; rows of whole 16 bytes; K, V <= D; D of 64, 128
// order     `consume`: a tile is released after the wait for the product that reads it. Waits are where the assembler
//           lets products run beside other work
// tests     test_softmax_attention; test_compile (no spills)
#include "softmax_sm90.cuh"

// From the includes:
//   wgmma_fence_operand(x): the compiler moves no access of x over it
//   RingPosition: the stage and its barrier's parity; warp_uniform(x): x, which all lanes of the warp have
//   consume_and_produce<2, n, m>: two warpgroups, of n registers a thread, call the first function; one more thread, of
//     m registers, the second
//   k_major_tile(tile), mn_major_tile(tile, panel): wgmma's descriptor of a tile of which columns, or rows, are summed.
//     panel: the bytes from a panel of 64 columns to the next
//   take_prefetched_work: the block's next Work; start_tile_copy: starts tensor copies of a tile, whose bytes the
//     caller announces at the barrier; load_operand_rows: 64 rows as operands
//   order_reads_before_copies: orders a warp's reads before the copies that a later arrival at a barrier allows
//   store_rows(map, rows, width, x, factor, factor, ...): stores a warp's 16 rows; a factor for each of the lane's two
//   zero_rows: zeros in rows of other sequences; all warpgroups write the same, and each waits for its own threads only
//   needs_mask, mask_rows: whether some query of a tile does not see some key; weights of such pairs become 0. Rows are
//     keys here: a key is seen from `right` tokens before its position to `left` after it, hence the arguments' order
//   copy_bulk: starts a copy whose bytes the caller announces likewise
//   slope_of_cap: 1 - tanh^2, from p = 2^(scale tanh - L); 0 if p is 0
//   Work: a tile of keys. `other_...`: the sequence of queries; `first_tile`, `tiles`: its tiles that see the keys, 0
//     at the end of the list; `diagonal`: the position of the first key among the queries; `statistics_chunk`: the
//     sequence's first chunk in `statistics`; `ds_index` + c: the entry of chunk c in a head's ds
//   Tile: panels of PANEL = 64 columns, swizzled; ScoreGradients: ds of 64 keys and 64 queries

constexpr int KEYS = 128, QUERIES = CHUNK_QUERIES, BOX_TOKENS = 64;

template <typename T> struct Args {
  TensorMap q, k, v, do_, dk, dv;  // boxes of 64 columns and 64 tokens, of dk and dv 16
  StridedRows<T> dk_out, dv_out;   // dk, dv again, for a warp's 16 rows that are not all tokens of the tile
  const Work* works;               // [rounds, gridDim.x]
  const float* statistics;
  DsEntry* ds;                              // null: ds is not stored
  i64 H, group, K, V, left, right, chunks;  // H: heads of queries
  i64 ds_head, ds_entries;  // the head of queries, of B H, that ds begins with; a head's number of entries
  double scale, softcap;
};

template <typename T, int D> struct alignas(1024) Shared {
  static constexpr int STAGES = 3;
  Tile<T, D, KEYS> k[2], v[2];
  Tile<T, D, QUERIES> q[STAGES];
  Tile<T, D, QUERIES> do_[STAGES];
  alignas(16) float statistics[STAGES][2][QUERIES];  // L, delta
  Work works[2], prefetched;  // of the tiles in k and v; the entry of args.works that is copied ahead
  MBarrier full[2], empty[2], q_full[STAGES], q_empty[STAGES], do_full[STAGES], do_empty[STAGES];
};

// The producing thread: copies the tiles of all of the block's work.
template <typename T, int D> __device__ __forceinline__ void produce(Shared<T, D>& s, const Args<T>& args) {
  using S = Shared<T, D>;
  const Work* next = args.works + blockIdx.x;
  prefetch_work(s.prefetched, next);
  prefetch_tensor_map(args.q), prefetch_tensor_map(args.k), prefetch_tensor_map(args.v), prefetch_tensor_map(args.do_),
      prefetch_tensor_map(args.dk), prefetch_tensor_map(args.dv);
  RingPosition<2> kv;
  RingPosition<S::STAGES> q;
  while (true) {
    Work work = take_prefetched_work(s.prefetched, next);
    const i64 first_head = i64(work.batch) * args.H + work.head * args.group - args.ds_head;
    // ds_index, so far within a head, becomes an index in all of args.ds: of the entry of this key tile, query tile 0
    // of the sequence, and the first head that shares the keys.
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
    for (int head = work.head * int(args.group), last = head + int(args.group); head < last; ++head) {
      const i64 chunk = (i64(work.batch) * args.H + head) * args.chunks + work.statistics_chunk;
#pragma unroll 1
      for (int tile = work.first_tile; tile < work.first_tile + work.tiles; ++tile) {
        const int token = work.other_start + tile * QUERIES;
        mbarrier_wait(s.q_empty[q.stage], q.parity ^ 1);
        fence_proxy_async();  // the same for the statistics, which consumers read by ordinary loads
        mbarrier_arrive_and_expect(s.q_full[q.stage], sizeof s.q[0] + sizeof s.statistics[0]);
        start_tile_copy<BOX_TOKENS>(s.q[q.stage], args.q, s.q_full[q.stage], token, head, work.batch);
        copy_bulk(s.statistics[q.stage], args.statistics + (chunk + tile) * (2 * CHUNK_QUERIES), sizeof s.statistics[0],
                  s.q_full[q.stage]);
        // No fence here: only wgmma reads do, and zero_rows fences its own writes.
        mbarrier_wait(s.do_empty[q.stage], q.parity ^ 1);
        mbarrier_arrive_and_expect(s.do_full[q.stage], sizeof s.do_[0]);
        start_tile_copy<BOX_TOKENS>(s.do_[q.stage], args.do_, s.do_full[q.stage], token, head, work.batch);
        q.next();
      }
    }
  }
}

// A consuming warpgroup: its 64 keys of each of the block's key tiles. In a lane's accumulators of products [64, N],
// numbers 4 n + 2 half + i are of key `row` + 8 half and column 8 n + 2 (lane % 4) + i.
template <typename T, int D, bool CAPPED>
__device__ __forceinline__ void consume(Shared<T, D>& s, const Args<T>& args) {
  using S = Shared<T, D>;
  const int warpgroup = warp_uniform(threadIdx.x / 128), warpgroup_row = 64 * warpgroup, lane = threadIdx.x & 31;
  const int row = warpgroup_row + threadIdx.x / 32 % 4 * 16 + lane / 4;   // this lane's first of two rows
  const float scale = float(CAPPED ? args.softcap : args.scale) * LOG2E;  // of products, or of tanh, to base 2
  const float tanh_scale = scale_over_cap(args.scale, args.softcap);      // tanh(tanh_scale q . k)
  RingPosition<2> kv;
  RingPosition<S::STAGES> q;
  float scores[QUERIES / 2], dp[QUERIES / 2], dk[D / 2], dv[D / 2];
  u32 p[QUERIES / 16][4], ds[QUERIES / 16][4];
  constexpr bool IN_REGISTERS = D == 64;  // whether k and v are operands in registers, which have room for 64 columns
  u32 k[IN_REGISTERS ? D / 16 : 1][4], v[IN_REGISTERS ? D / 16 : 1][4];
  bool store_pending = false;  // lane 0: the copy engine may still read this warp's dk and dv of the previous key tile
  int tiles, end;              // the number of a head's query tiles; the last one's index plus 1
  int tiles_left, heads_left;  // the current query tile is end - tiles_left; heads_left: with the current one
  int first_diagonal, length;  // query position of the key tile's first row; number of queries of the sequence

  auto release = [&](MBarrier& b) {
    if (lane == 0) mbarrier_arrive(b);
  };
  auto release_stored_tile = [&] {  // lane 0: once dk and dv have been stored, the producer may copy k and v there
    if (store_pending) {
      tensor_store_wait();
      mbarrier_arrive(s.empty[kv.stage ^ 1]);
      store_pending = false;
    }
  };
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
  auto begin_tile = [&](const Work& work) {
    tiles = tiles_left = warp_uniform(work.tiles), end = warp_uniform(work.first_tile + work.tiles),
    heads_left = int(args.group);
    first_diagonal = warp_uniform(work.diagonal), length = warp_uniform(work.other_length);
    if constexpr (IN_REGISTERS)
      load_operand_rows(k, s.k[kv.stage], warpgroup_row), load_operand_rows(v, s.v[kv.stage], warpgroup_row);
    skip_hidden_tiles();
  };
  // Issues a product of 16 columns, from 16 n on, of keys or values with a tile of q or do. The keys or values are the
  // registers `a` if IN_REGISTERS, otherwise the tile described by `a_tile`. Descriptors count 16 bytes: the next 16
  // columns are 2 on, the next panel of 64 columns KEYS * 128 / 16 on in tiles of k and v, QUERIES * 128 / 16 on in
  // tiles of q and do.
  auto multiply_columns = [&](float (&sum)[QUERIES / 2], const u32(&a)[4], u64 a_tile, u64 b_tile, int n) {
    const u64 b = b_tile + n / 4 * (QUERIES * 128 / 16) + n % 4 * 2;
    if constexpr (IN_REGISTERS) wgmma<T, QUERIES, K_MAJOR>(sum, a, b, n > 0);
    else wgmma<T, QUERIES, K_MAJOR>(sum, a_tile + n / 4 * (KEYS * 128 / 16) + n % 4 * 2, b, n > 0);
  };
  // A sequence's last tile has rows of the next sequence, which become zeros. Their L is infinite, their delta is 0.
  auto multiply_keys_and_values = [&] {  // issues two products with keys as rows: scores = k q^T, dp = v do^T
    const int valid = length - (end - tiles_left) * QUERIES;
    const u64 k_tile = k_major_tile(s.k[kv.stage][0] + warpgroup_row * PANEL),
              v_tile = k_major_tile(s.v[kv.stage][0] + warpgroup_row * PANEL);
    const u64 q_tile = k_major_tile(s.q[q.stage][0]), do_tile = k_major_tile(s.do_[q.stage][0]);
    mbarrier_wait(s.q_full[q.stage], q.parity);
    if (valid < QUERIES) zero_rows(s.q[q.stage], valid, warpgroup);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < D / 16; ++n) multiply_columns(scores, k[IN_REGISTERS ? n : 0], k_tile, q_tile, n);
    wgmma_commit();
    mbarrier_wait(s.do_full[q.stage], q.parity);
    if (valid < QUERIES) zero_rows(s.do_[q.stage], valid, warpgroup);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < D / 16; ++n) multiply_columns(dp, v[IN_REGISTERS ? n : 0], v_tile, do_tile, n);
    wgmma_commit();
  };
  // Issues the product of the operand `a` and a tile of q or do: sum = a @ tile, or sum += a @ tile if `accumulates`
  // (OVERWRITE is false).
  auto multiply_tile = [&](float (&sum)[D / 2], const u32(&a)[QUERIES / 16][4], const T* tile, bool accumulates) {
    const u64 b = mn_major_tile(tile, QUERIES * 128);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < QUERIES / 16; ++n)
      wgmma<T, D, MN_MAJOR>(sum, a[n], b + n * (16 * 128 / 16), n > 0 || accumulates);
    wgmma_commit();
  };
  // Rounds x to T, as operand A.
  auto pack_operand = [&](u32(&a)[QUERIES / 16][4], const float (&x)[QUERIES / 2]) {
#pragma unroll
    for (int n = 0; n < QUERIES / 16; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[n][i] = pack<T>(x[8 * n + 2 * i], x[8 * n + 2 * i + 1]);
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
  auto store_ds = [&] {
    if (!args.ds) return;
    const int head = int(args.group) - heads_left;
    const int entry = s.works[kv.stage].ds_index + head * int(args.ds_entries) + end - tiles_left;
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
    store_pending = lane == 0;
  };
  // Issues dv = p do, or dv += p do if `accumulates`, and waits for dp.
  auto multiply_do = [&](bool accumulates) {
    // Registers are too few for p beside ds, which dk's product reads: it ends before p is written.
    if (D == 128) wgmma_wait<0>();
    pack_operand(p, scores);
    if (CAPPED) each_column([&](int n, float L, float) { scores[n] *= slope_of_cap(scores[n], L, scale); });
    multiply_tile(dv, p, s.do_[q.stage][0], accumulates);
    wgmma_wait<1>();
    wgmma_fence_operand(dp);
  };
  auto end_step = [&] {  // computes ds while dv's product runs, then waits for dv
    differentiate_scores();
    pack_operand(ds, dp);
    wgmma_fence_operand(ds);      // ds is computed before the wait for dv
    order_reads_before_copies();  // this warp has read the statistics
    wgmma_wait<0>();
    wgmma_fence_operand(dv);
    release(s.do_empty[q.stage]);
    store_ds();
  };

  mbarrier_wait(s.full[0], 0);
  if (!warp_uniform(s.works[0].tiles)) return;
  begin_tile(s.works[0]);
  multiply_keys_and_values();
  wgmma_wait<1>();
  wgmma_fence_operand(scores);
  weigh_scores();
  multiply_do(OVERWRITE);
  end_step();
  int previous_stage = q.stage;  // of the previous query tile, whose product with ds is issued next
  bool accumulates = false;      // dk holds sums of this key tile's earlier query tiles
  // An iteration issues a query tile's scores and the previous tile's product with ds, and waits for both: the
  // assembler would serialise products that are still running where the loop jumps back. Groups under way before
  // wgmma_wait<2>: scores, dp, dk.
  while (true) {
    q.next();
    bool next_is_new_tile = false;  // the next query tile is for the block's next key tile
    if (--tiles_left == 0) {
      next_is_new_tile = --heads_left == 0;
      if (next_is_new_tile) {
        release_stored_tile();  // before the wait for `full`: the producer needs this stage for the next tile
        kv.next();
        mbarrier_wait(s.full[kv.stage], kv.parity);
        if (!warp_uniform(s.works[kv.stage].tiles)) break;
        begin_tile(s.works[kv.stage]);
      } else {
        tiles_left = tiles;
        skip_hidden_tiles();
      }
    }
    multiply_keys_and_values();
    multiply_tile(dk, ds, s.q[previous_stage][0], accumulates);
    if (!next_is_new_tile) release_stored_tile();  // waits for the stores while products run
    wgmma_wait<CAPPED && D == 128 ? 0 : 2>();      // with a cap, registers are too few for ds's product to run on
    wgmma_fence_operand(scores);
    weigh_scores();
    if (next_is_new_tile) {
      wgmma_wait<0>();
      wgmma_fence_operand(dk);
      finish_tile(kv.stage ^ 1);
    }
    multiply_do(!next_is_new_tile);
    wgmma_fence_operand(dk);
    release(s.q_empty[previous_stage]);
    previous_stage = q.stage;
    end_step();
    accumulates = !next_is_new_tile;
  }
  multiply_tile(dk, ds, s.q[previous_stage][0], accumulates);
  wgmma_wait<0>();
  wgmma_fence_operand(dk);
  finish_tile(kv.stage ^ 1);
  if (lane == 0) tensor_store_wait();
}

template <typename T, int D, bool CAPPED>
__global__ void __launch_bounds__(384, 1) softmax_sm90_backward_keys(const __grid_constant__ Args<T> args) {
  using S = Shared<T, D>;
  S& s = *reinterpret_cast<S*>(dynamic_smem());
  if (threadIdx.x == 0) {
    for (int n = 0; n < 2; ++n) mbarrier_init(s.full[n], 1), mbarrier_init(s.empty[n], 8);  // consuming warps
    for (int n = 0; n < S::STAGES; ++n) {
      mbarrier_init(s.q_full[n], 1), mbarrier_init(s.q_empty[n], 8);
      mbarrier_init(s.do_full[n], 1), mbarrier_init(s.do_empty[n], 8);
    }
  }
  constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
  consume_and_produce<2, CONSUMER_REGISTERS, PRODUCER_REGISTERS>([&] { consume<T, D, CAPPED>(s, args); },
                                                                 [&] { produce(s, args); });
}
