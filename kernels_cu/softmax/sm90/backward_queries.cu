// what      Softmax attention's gradient of q on Hopper: one thread copies, two warpgroups multiply. Also writes the
//           statistics of queries for the gradients of k and v.
// math      s_ij = scale q_i . k_j, or cap tanh(scale q_i . k_j / cap);  p_ij = e^(s_ij - lse_i), lse_i = log sum_j
//           e^s_ij;  dq_i = scale sum_j p_ij (do_i . v_j - delta_i) k_j, delta_i = do_i . o_i - dlse_i; with a cap each
//           term times 1 - (s_ij / cap)^2.  o is the forward pass's output, do and dlse are gradients of o and lse.
//           Code: `scores` holds q . k, then p, then ds = p (dp - delta); dp holds do_i . v_j. A query sees the keys
//           from `left` tokens before its own position to `right` tokens after it
// shapes    q dq [B, H, Tq, K], k [B, H / group, Tk, K], v [.., V], o do [B, H, Tq, V]; lse dlse [B, H, Tq] float32,
//           dlse or null; statistics [B, H, chunks, 2, 64] float32: of every 64 queries of a sequence (a chunk) first
//           L = lse / ln 2, then delta
// grid      softmax.py launches as many blocks as multiprocessors; a block computes the query tiles (Work in
//           softmax_work.cuh) of its column of `works`, in turn. A warpgroup has 64 queries, and holds their q and do
//           in registers
// smem      Shared: a tile of q, of do, and of o, later of dq; rings of k and v tiles of 64 keys
// barriers  full: q, do and o have arrived; empty: q and do are in registers; o_empty: o has been read, or dq that
//           overwrote it has been stored; k_full, v_full: a tile has arrived; k_empty, v_empty: it has been read.
//           Named: ZERO_ROWS_BARRIER in zero_rows: zeros are written
// numerics  scores, weights and sums in float32; ds is rounded to T for its product with k. delta is computed
//           from the rounded o. L, lse to base 2: see logarithm_or_infinity
// source    Dao et al., "FlashAttention", 2022, algorithm 4, with the loop over queries outside, so that dq is summed
//           in registers
// limits    sm_90a; 16-bit data; rows of whole 16 bytes; K, V <= D; D of 64, 128; CAPPED: softcap > 0
// order     Statements that neither data nor a comment bind to a place stand where the kernel is fastest: measure it
//           after a change of their order
// tests     test_softmax_attention; its backend `hopper` computes a product only when it is waited for, and lets the
//           producer go on as soon as a barrier does: a wait or a release in a wrong place changes results.
//           test_compile: no spills, no product that the assembler serialises, no write to a running product's operand
#include "softmax_sm90.cuh"

// From the includes:
//   RingPosition: the stage and its barrier's parity; warp_uniform(x): x, which all lanes of the warp have
//   consume_and_produce<2>: two warpgroups call the first function, one more thread the second
//   take_prefetched_work: the block's next Work; start_tile_copy: starts tensor copies of a tile, whose bytes the
//     caller announces at the barrier; load_operand_rows: 64 rows as operands
//   issue_scores(sum, a, tile): starts sum = a @ tile^T, a product over columns; issue_weighted_sum(sum, a, tile,
//     accumulates): sum = a @ tile, or sum += a @ tile. Each is a group of its own. wait_for<N>(sum): waits until the N
//     latest groups at most run; `sum` is complete then
//   wgmma_fence_operand(x): the compiler moves no access of x over it
//   round_operands(a, x): sums x, rounded, as the operand of a product over their columns
//   release(barrier): this warp arrives; order_reads_before_copies: orders a warp's reads before the copies that a
//     later arrival at a barrier allows
//   zero_rows: zeros in rows of other sequences; all warpgroups write the same, and each waits for its own threads only
//   slope_of_cap: 1 - tanh^2, from the weight p; 0 if p is 0
//   PendingStore: whether the copy engine may still read what the warp's store_rows stored last; release(barrier):
//     waits for that, and arrives. init_stages<WARPS>: barriers that a producer and WARPS warps arrive at
//   scale_over_cap: scale / cap; tanh_of: tanh; prefetch_work: starts copying the block's next Work; CHUNK_QUERIES = 64
//   add_dot: adds products of two do and o; row_sum: over the four lanes that have a row; ldmatrix_row: a lane's
//     address
//   logarithm_or_infinity: L; or infinity, so that weights are 0, if the query sees no key (L is -infinity) or if |L|
//     is above 2^24: the roundings of lse, of log2(e) and of their product then add up to about 2, which is a factor of
//     2^2 of a weight
//   needs_mask, mask_rows: whether some query of a tile does not see some key; weights of such pairs become 0
//   store_rows(map, rows, width, x, factor0, factor1, tile, ...): stores x, times these factors for a lane's two rows,
//     by way of `tile`, here that of o
//   Work: a tile of queries. `other_...`: the sequence of keys; `first_tile`, `tiles`: its tiles that the queries see,
//     0 at the end of the list; `diagonal`: the position of the first query among the keys; `statistics_chunk`: the
//     tile's first chunk in `statistics`
//   Tile: panels of PANEL = 64 columns, swizzled

constexpr int QUERIES = 128, KEYS = 64, BOX_TOKENS = 64;
constexpr int WARPGROUPS = 2, THREADS = 128 * (WARPGROUPS + 1);  // of consumers; with the producer's warpgroup

template <typename T> struct Args {
  TensorMap q, k, v, o, do_, dq;  // boxes of 64 columns and 64 tokens, of dq 16
  StridedRows<T> out;             // dq again, for a warp's 16 rows that are not all tokens of the tile
  const Work* works;              // [rounds, gridDim.x]
  const float *lse, *dlse;        // dlse: or null
  float* statistics;
  i64 H, group, Tq, K, left, right, chunks;
  double scale, softcap;
};

template <typename T, int D> struct alignas(1024) Shared {
  static_assert(D == 64 || D == 128);
  static constexpr int K_STAGES = 4, V_STAGES = D == 64 ? 4 : 3;
  static_assert(K_STAGES >= 2, "the product with ds reads the previous stage");
  Tile<T, D, QUERIES> q, do_, o;
  Tile<T, D, KEYS> k[K_STAGES];
  Tile<T, D, KEYS> v[V_STAGES];
  Work works[2], prefetched;  // of this query tile and the next; the entry of args.works that is copied ahead
  MBarrier full, empty, o_empty, k_full[K_STAGES], k_empty[K_STAGES], v_full[V_STAGES], v_empty[V_STAGES];
};

// The producing thread: copies the tiles of all of the block's work.
template <typename T, int D> __device__ __forceinline__ void produce(Shared<T, D>& s, const Args<T>& args) {
  using Memory = Shared<T, D>;
  const Work* next = args.works + blockIdx.x;
  prefetch_work(s.prefetched, next);
  prefetch_tensor_map(args.q), prefetch_tensor_map(args.k), prefetch_tensor_map(args.v), prefetch_tensor_map(args.o),
      prefetch_tensor_map(args.do_), prefetch_tensor_map(args.dq);
  RingPosition<Memory::K_STAGES> k;
  RingPosition<Memory::V_STAGES> v;
  // parity: of the phase of `empty` and o_empty that the copies wait for, the one before; 1 at first, which counts as
  // ended. Query tiles use s.works[1] and s.works[0] in turn.
  for (u32 parity = 1;; parity ^= 1) {
    const Work work = take_prefetched_work(s.prefetched, next);
    mbarrier_wait(s.empty, parity);
    fence_proxy_async();  // consumers' accesses to q and do, which `empty` waits for, precede the copies
    // The copies of q and do start before `o_empty` is waited for, which ends later; mbarrier_arrive_and_expect below
    // announces the bytes of all three.
    if (work.tiles) {
      start_tile_copy<BOX_TOKENS>(s.q, args.q, s.full, work.start, work.head, work.batch);
      start_tile_copy<BOX_TOKENS>(s.do_, args.do_, s.full, work.start, work.head, work.batch);
    }
    mbarrier_wait(s.o_empty, parity);
    fence_proxy_async();     // the same for o, which `o_empty` waits for
    s.works[parity] = work;  // its previous entry is no longer read: that tile's dq has been stored
    if (!work.tiles) return mbarrier_arrive(s.full);
    mbarrier_arrive_and_expect(s.full, 3 * sizeof s.q);
    start_tile_copy<BOX_TOKENS>(s.o, args.o, s.full, work.start, work.head, work.batch);
    const int head = int(u32(work.head) / u32(args.group));
#pragma unroll 1
    for (int tile = work.first_tile + work.tiles - 1; tile >= work.first_tile; --tile) {
      const int token = work.other_start + tile * KEYS;
      mbarrier_wait(s.k_empty[k.stage], k.parity ^ 1);  // no fence: only wgmma reads k and v; zero_rows has its own
      mbarrier_arrive_and_expect(s.k_full[k.stage], sizeof s.k[0]);
      start_tile_copy<BOX_TOKENS>(s.k[k.stage], args.k, s.k_full[k.stage], token, head, work.batch);
      k.next();
      mbarrier_wait(s.v_empty[v.stage], v.parity ^ 1);
      mbarrier_arrive_and_expect(s.v_full[v.stage], sizeof s.v[0]);
      start_tile_copy<BOX_TOKENS>(s.v[v.stage], args.v, s.v_full[v.stage], token, head, work.batch);
      v.next();
    }
  }
}

// A consuming warpgroup: its 64 rows of each of the block's query tiles. A step is a key tile and its three products:
//   issued in                         product         waited for in                       then free
//   issue_scores_and_dp               scores = q k^T  the loop, before weigh_scores       -
//   issue_scores_and_dp               dp = do v^T     the loop, after weigh_scores        v's stage
//   the loop, in the next step        dq += ds k      wait_for_dq of the next step        k's stage
// A stage is released (k_empty, v_empty) after the last wait for a product that reads it. After the last key tile of a
// query tile the next step is the first one of the next query tile, so that the product with ds runs beside its scores.
// In a lane's accumulators of products [64, N], numbers 4 n + 2 half + i are of row `row` + 8 half and column 8 n + 2
// (lane % 4) + i.
template <typename T, int D, bool CAPPED>
__device__ __forceinline__ void consume(Shared<T, D>& s, const Args<T>& args) {
  using Memory = Shared<T, D>;
  const int warpgroup = warp_uniform(threadIdx.x / 128), warpgroup_row = 64 * warpgroup, lane = threadIdx.x & 31;
  const int row = warpgroup_row + threadIdx.x / 32 % 4 * 16 + lane / 4;   // this lane's first of two rows
  const float scale = float(CAPPED ? args.softcap : args.scale) * LOG2E;  // of products, or of tanh, to base 2
  const float tanh_scale = scale_over_cap(args.scale, args.softcap);      // tanh(tanh_scale q . k)
  RingPosition<Memory::K_STAGES> k;
  RingPosition<Memory::V_STAGES> v;
  u32 q[D / 16][4], do_[D / 16][4], ds[KEYS / 16][4];
  float scores[KEYS / 2], dp[KEYS / 2], dq[D / 2], L[2], delta[2];
  u32 parity = 0;              // of `full`; works[parity ^ 1] is the current query tile, works[parity] the one before
  PendingStore stored;         // lane 0: the copy engine may still read this warp's dq, which has overwritten o
  int first_tile, tiles_left;  // the current key tile is first_tile + tiles_left; tiles_left tiles follow it
  int first_diagonal, length;  // key position of the query tile's first row; number of keys of the sequence

  // Loads a query tile's q, do and L, computes delta, and skips key tiles that the warpgroup's queries do not see. Rows
  // after the tile's end get an infinite L, so that their weights are 0.
  auto begin_tile = [&](const Work& work) {
    load_operand_rows(q, s.q, warpgroup_row);
    load_operand_rows(do_, s.do_, warpgroup_row);
    delta[0] = delta[1] = 0.f;
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      u32 o[4];
      ldmatrix_x4(o, ldmatrix_row(s.o, warpgroup_row, n));
#pragma unroll
      for (int r = 0; r < 4; ++r) delta[r & 1] = add_dot<T>(do_[n][r], o[r], delta[r & 1]);
    }
    order_reads_before_copies();  // this warp has read q, do and o
    release(s.empty);
    const i64 head = i64(work.batch) * args.H + work.head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = row + 8 * half;
      const i64 token = head * args.Tq + work.start + n;
      delta[half] = row_sum(delta[half]);
      L[half] = minus_infinity();
      if (n < work.tokens) {
        L[half] = LOG2E * args.lse[token];
        if (args.dlse) delta[half] -= args.dlse[token];
      } else delta[half] = 0.f;
      L[half] = logarithm_or_infinity(L[half]);
      if (lane % 4 == 0 && warpgroup_row < work.tokens) {
        float* const to = args.statistics +
                          (head * args.chunks + work.statistics_chunk + warpgroup) * CHUNK_STATISTICS + n -
                          warpgroup_row;
        to[0] = L[half], to[CHUNK_QUERIES] = delta[half];
      }
    }
    first_tile = warp_uniform(work.first_tile), tiles_left = warp_uniform(work.tiles) - 1;
    first_diagonal = warp_uniform(work.diagonal), length = warp_uniform(work.other_length);
    while (tiles_left > 0 && (first_tile + tiles_left) * KEYS > first_diagonal + warpgroup_row + 63 + int(args.right)) {
      mbarrier_wait(s.k_full[k.stage], k.parity);  // of a key tile that no query sees
      release(s.k_empty[k.stage]);
      k.next();
      mbarrier_wait(s.v_full[v.stage], v.parity);
      release(s.v_empty[v.stage]);
      v.next();
      --tiles_left;
    }
  };
  auto issue_scores_and_dp = [&] {  // two products: scores = q k^T, dp = do v^T
    const int valid = length - (first_tile + tiles_left) * KEYS;
    mbarrier_wait(s.k_full[k.stage], k.parity);
    if (valid < KEYS) zero_rows(s.k[k.stage], valid, warpgroup);
    issue_scores(scores, q, s.k[k.stage]);
    mbarrier_wait(s.v_full[v.stage], v.parity);
    if (valid < KEYS) zero_rows(s.v[v.stage], valid, warpgroup);
    issue_scores(dp, do_, s.v[v.stage]);
  };
  // Called at the start of a branch of the whole warpgroup: the assembler moves a wait to the start of its basic block,
  // and so before the computation that is to run during the product.
  auto wait_for_dq = [&] { wait_for<0>(dq); };
  auto weigh_scores = [&] {  // replaces `scores` by weights, times the cap's slope if CAPPED
    if (CAPPED) {
#pragma unroll
      for (int n = 0; n < KEYS / 2; ++n) scores[n] = tanh_of(tanh_scale * scores[n]);
    }
#pragma unroll
    for (int n = 0; n < KEYS / 2; ++n) scores[n] = exp2_approx(fmaf(scale, scores[n], -L[n / 2 % 2]));
    const int key = (first_tile + tiles_left) * KEYS, diagonal = first_diagonal + warpgroup_row;
    if (needs_mask<64, KEYS>(key, diagonal, int(args.left), int(args.right), length))
      mask_rows(scores, key, first_diagonal + row, int(args.left), int(args.right), length, 0.f);
    if (CAPPED)
#pragma unroll
      for (int n = 0; n < KEYS / 2; ++n) scores[n] *= slope_of_cap(scores[n], L[n / 2 % 2], scale);
  };
  auto differentiate_scores = [&] {  // replaces `scores`, the weights p, by p (dp - delta)
#pragma unroll
    for (int n = 0; n < KEYS / 2; ++n) scores[n] *= dp[n] - delta[n / 2 % 2];
  };
  auto finish_tile = [&](const Work& work) {  // stores dq of a query tile
    const float factor = float(args.scale);
    store_rows(args.dq, args.out, args.K, dq, factor, factor, s.o, warpgroup_row, work);
    stored.begin();
  };

  mbarrier_wait(s.full, 0);
  if (!warp_uniform(s.works[1].tiles)) return;
  begin_tile(s.works[1]);
  release(s.o_empty);
  issue_scores_and_dp();
  wait_for<1>(scores);
  weigh_scores();
  wait_for<0>(dp);
  release(s.v_empty[v.stage]);
  v.next();
  int previous_stage = k.stage;  // the previous key tile's stage of k: its product with ds is issued next
  k.next();
  differentiate_scores();
  round_operands<T>(ds, scores);
  bool accumulates = false;  // dq holds sums of this query tile's earlier key tiles
  // No product runs where the loop jumps back: the assembler would serialise all of them.
  while (true) {
    const bool next_is_new_tile = tiles_left == 0;  // the next key tile is for the block's next query tile
    if (next_is_new_tile) {
      stored.release(s.o_empty);  // before the wait for `full`: the producer needs the place of o for the next tile
      parity ^= 1;
      mbarrier_wait(s.full, parity);
      if (!warp_uniform(s.works[parity ^ 1].tiles)) break;
      begin_tile(s.works[parity ^ 1]);
    } else --tiles_left;
    issue_scores_and_dp();
    issue_weighted_sum(dq, ds, s.k[previous_stage], accumulates);
    if (!next_is_new_tile) stored.release(s.o_empty);  // waits for the store while products run
    wait_for<2>(scores);                               // dp and dq run on
    weigh_scores();
    wait_for<1>(dp);
    release(s.v_empty[v.stage]);
    v.next();
    differentiate_scores();
    wgmma_fence_operand(scores);  // otherwise the compiler moves `differentiate_scores` after the wait
    if (next_is_new_tile) {
      wait_for_dq();
      finish_tile(s.works[parity]);
    } else wait_for_dq();
    release(s.k_empty[previous_stage]);
    previous_stage = k.stage;
    k.next();
    accumulates = !next_is_new_tile;
    round_operands<T>(ds, scores);
  }
  issue_weighted_sum(dq, ds, s.k[previous_stage], accumulates);
  wait_for_dq();
  finish_tile(s.works[parity]);
  if (lane == 0) tensor_store_wait();
}

template <typename T, int D, bool CAPPED>
__global__ void __launch_bounds__(THREADS, 1) softmax_sm90_backward_queries(const __grid_constant__ Args<T> args) {
  using Memory = Shared<T, D>;
  Memory& s = *reinterpret_cast<Memory*>(dynamic_smem());
  if (threadIdx.x == 0) {
    constexpr int WARPS = 4 * WARPGROUPS;  // that consume
    mbarrier_init(s.full, 1), mbarrier_init(s.empty, WARPS), mbarrier_init(s.o_empty, WARPS);
    init_stages<WARPS>(s.k_full, s.k_empty), init_stages<WARPS>(s.v_full, s.v_empty);
  }
  consume_and_produce<WARPGROUPS>([&] { consume<T, D, CAPPED>(s, args); }, [&] { produce(s, args); });
}
