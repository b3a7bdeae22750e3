// what      Softmax attention on Hopper: one thread copies tiles of q, k and v, and whole warpgroups multiply them.
// math      o = softmax(s) v,  s_ij = scale q_i . k_j, or cap tanh(scale q_i . k_j / cap);  lse_i = log sum_j e^s_ij; a
//           head's sink is one more score of every row, without a value. A query sees the keys from `left` tokens
//           before its own position to `right` tokens after it; the host replaces a missing limit by 2^30.
//           A warpgroup holds 64 queries and visits their key tiles from the last to the first. For each: S = q k^T;
//           mask; weights e^(S - m) with the running row maximum m; o = rescale * o + weights v. The product with v of
//           one key tile runs while the weights of the next are computed
// shapes    q [B, H, Tq, K], k [B, H / group, Tk, K], v [.., V], o [B, H, Tq, V], lse [B, H, Tq] float32 or null
// grid      softmax.py launches as many blocks as multiprocessors; a block computes the query tiles (Work in
//           softmax_work.cuh) of its column of `works`, in turn. Two warpgroups consume, three if K = 64 without a cap,
//           each 64 queries of the tile; in one more warpgroup a single thread, the producer, copies
// smem      Shared: rings of q (later o), k and v tiles, and the Work of each tile in the ring of q
// barriers  q_full, k_full, v_full: a tile has arrived; k_empty, v_empty: all consuming warps have read it; q_empty: o,
//           which has overwritten q, has been stored, and the stage's Work is no longer read. Named: ZERO_ROWS_BARRIER
//           (1) + warpgroup, in zero_rows: zeros are written; FIRST_TURN_BARRIER (4) + warpgroup: its turn to issue
//           products
// numerics  scores, m, sums of weights and o in float32; e^(S - m) is rounded to T. m is raised only if it would grow
//           by more than SLACK in base 2: o and the sums use the same m, so the result is exact
// source    Shah et al., "FlashAttention-3", 2024: the roles, and the overlap of a key tile's product with v with the
//           softmax of the next tile. Here that next tile may belong to the block's next query tile
// limits    sm_90a; float16 or bfloat16; rows of whole 16 bytes; the template's K of 64, 128, 192, V of 64, 128, at
//           most K. A call may have fewer channels or columns (args.V): copies fill the rest of a tile with zeros
// order     Statements that neither data nor a comment bind to a place stand where the kernel is fastest: measure it
//           after a change of their order
// tests     test_softmax_attention; its backend `hopper` computes a product only when it is waited for, and runs the
//           producer as far ahead as barriers allow: a wait or a release in a wrong place changes results.
//           test_compile: no spills, no product that the assembler serialises, no write to a running product's operand
#include "softmax_sm90.cuh"

// From the includes:
//   issue_scores(sum, a, row, tile): starts sum = a @ tile^T, a product over columns, for 64 rows of a from `row` on;
//     issue_weighted_sum(sum, a, tile, accumulates): sum = a @ tile, or sum += a @ tile. Each is a group of its own.
//     wait_for<N>(sum): waits until the N latest groups at most run; `sum` is complete then
//   wgmma_fence_operand(x): the compiler moves no access of x over it
//   round_operands(a, x): sets a, the left operand of a product over x's columns, to the accumulators x, rounded
//   RingPosition: the `stage` of a ring, and the parity to wait for: 0 in the ring's first round, then 1, and so on;
//     parity ^ 1 is that of the round before, for which the first round does not wait. next(): the next stage
//   init_stages<WARPS>(full, empty): `full` waits for the producer and the announced bytes, `empty` for WARPS warps
//   release(barrier): this warp arrives at a barrier that lets the producer overwrite what the warp has read
//   PendingStore: whether the copy engine may still read o of this warp's last store_rows from shared memory. begin():
//     it may. release(barrier): if it may, lane 0 waits until it has read o (tensor_store_wait), and arrives at the
//     barrier. Other lanes do nothing
//   consume_and_produce: makes thread 0's barriers visible to all. Then the consuming warpgroups call the first
//     function, and a thread of the next warpgroup the second
//   prefetch_work(to, next) starts copying the entry at `next` to shared memory; `next` then is the block's next entry.
//     take_prefetched_work(from, next) waits for the copied entry, calls prefetch_work, and returns the entry
//   store_rows(boxes, rows, width, x, factor0, factor1, tile, row, work): stores `width` columns of a warp's 16 rows of
//     x. A lane has two of the rows and multiplies them by factor0 and factor1. They pass through `tile`, in the warp's
//     16 of the warpgroup's 64 rows from `row` on, to memory: by boxes, or, if some are no tokens of `work`, by lanes
//   zero_rows: zeros in rows of other sequences. Every warpgroup writes all of them, so that none waits for another
//   needs_mask<ROWS, COLUMNS>: whether one of ROWS queries, whose positions start at `diagonal`, does not see one of
//     COLUMNS keys
//   RowMaximum: a row's m, in base 2. The weight of a product x (or of its tanh) is 2^(factor x - shift). `factor` is
//     `scale`, |scale| log2 e (with a cap, cap log2 e), unless |m| > 2^27: then it is the least power of two not below
//     `scale`, so that factor x has no rounding error. That does no harm: float32 products so large have scores at
//     least 2^3 apart, so by either factor all products but the largest have at most 2^-8 of its weight. `shift` is
//     factor times the x to which m was raised last. If factor is `scale`, that is m; if a power of two, it is not, and
//     score_of(shift, scale), which tells the two cases apart by the size of `shift`, returns m in both. While the row
//     has no key, as in RowMaximum{scale}, `shift` is NONE, a finite number below all scores. raise(x, scale, slack):
//     if m grows by more than `slack`, sets m to the score of x, and so both members. It returns the factor for earlier
//     weights: 1 if m stays, 0 if `shift` was NONE
//   row_end(m, sum, sink): a RowEnd, of `factor`, by which o is multiplied (1 / the sum of all weights about m, 0 if
//     the row sees no key), and `logarithm`, log2 sum_j e^s_ij
//   Work: a tile of queries. `start`: its first token in q; `other_...`: the sequence of keys; `first_tile`, `tiles`:
//     the first of the key tiles that the queries see, and how many: 0 ends the list, so softmax_tiles.py gives queries
//     without a key a tile, too, all masked; `tokens`: how many rows of the tile are queries; `diagonal`: the position
//     of the first query among the keys; `output_batch`: `batch`, or another index for each part where softmax.py
//     splits the keys of few queries: plain.cu then merges the parts' o and lse
//   start_tile_copy<BOX>: starts copying a tile by boxes of BOX tokens; `full` counts its bytes
//   row_max, row_sum: over the four lanes that have a row; exp2_approx(x): 2^x; warp_uniform(x): x, which all lanes of
//     the warp have, so that the compiler needs one register for it
//   Tile: panels of PANEL = 64 columns, swizzled
//   opaque: hides a value's origin from the compiler, which then cannot compute the value again
//   size_of_scale: |scale| log2 e, at least 1e-37; scale_over_cap: scale / cap; tanh_of: tanh; mask_rows: sets scores
//     of keys that a query does not see

constexpr int BOX_TOKENS = 64;  // of q
constexpr float SLACK = 8.f;    // in base 2: weights are at most 2^8

template <typename T> struct Args {
  TensorMap q, k, v, o;  // boxes [tokens, 64 columns] of q [64, 64], k and v [KEYS, 64], o [16, 64]
  StridedRows<T> out;    // o again, for a warp's 16 rows that are not all tokens of the tile
  const Work* works;     // [rounds, gridDim.x]
  float* lse;            // null: not wanted
  const float* sinks;    // [H]: the sinks' scores, or null
  i64 H, group, Tq, V, left, right;
  double scale, softcap;
};

template <typename T, int K, int V, bool CAPPED> struct alignas(1024) Shared {
  static_assert((K == 64 || K == 128 || K == 192) && (V == 64 || V == 128) && V <= K);
  static constexpr int WARPGROUPS = K == 64 && !CAPPED ? 3 : 2, QUERIES = 64 * WARPGROUPS, KEY_STAGES = K == 64 ? 4 : 2;
  static constexpr int KEYS = K > 128 ? 96 : 128, QUERY_STAGES = K > 128 ? 2 : 3;
  // So many that Shared fits into shared memory.
  static_assert(QUERY_STAGES >= 2, "a tile's o is stored after the next tile's scores have begun");
  Tile<T, K, QUERIES> q[QUERY_STAGES];
  Tile<T, K, KEYS> k[KEY_STAGES];
  Tile<T, V, KEYS> v[KEY_STAGES];
  Work q_works[QUERY_STAGES], prefetched;  // prefetched: the entry of `works` that is copied ahead
  MBarrier q_full[QUERY_STAGES], q_empty[QUERY_STAGES], k_full[KEY_STAGES], k_empty[KEY_STAGES], v_full[KEY_STAGES],
      v_empty[KEY_STAGES];
};

// The producing thread: fills the rings with the tiles of all of the block's work. A tile of v is copied after the next
// tile of k, as the consumers use them.
template <typename T, class Memory> __device__ __forceinline__ void produce(Memory& s, const Args<T>& args) {
  const Work* next = args.works + blockIdx.x;
  prefetch_work(s.prefetched, next);
  prefetch_tensor_map(args.q), prefetch_tensor_map(args.k), prefetch_tensor_map(args.v), prefetch_tensor_map(args.o);
  RingPosition<Memory::KEY_STAGES> k, v;
  RingPosition<Memory::QUERY_STAGES> q;
  int value_token = -1, value_head = 0, value_batch = 0;  // the tile of v to copy next; token -1: none
  auto fetch_values = [&] {
    if (value_token < 0) return;
    mbarrier_wait(s.v_empty[v.stage], v.parity ^ 1);
    mbarrier_arrive_and_expect(s.v_full[v.stage], sizeof s.v[0]);
    start_tile_copy<Memory::KEYS>(s.v[v.stage], args.v, s.v_full[v.stage], value_token, value_head, value_batch);
    v.next();
    value_token = -1;
  };
  while (true) {
    const Work work = take_prefetched_work(s.prefetched, next);
    fetch_values();  // before the wait for q_empty, which may be long
    mbarrier_wait(s.q_empty[q.stage], q.parity ^ 1);
    fence_proxy_async();  // consumers' accesses to this stage, which q_empty waits for, precede the copies
    s.q_works[q.stage] = work;
    if (!work.tiles) {
      mbarrier_arrive(s.q_full[q.stage]);
      return;
    }
    mbarrier_arrive_and_expect(s.q_full[q.stage], sizeof s.q[0]);
    start_tile_copy<BOX_TOKENS>(s.q[q.stage], args.q, s.q_full[q.stage], work.start, work.head, work.batch);
    q.next();
    const int key_head = int(u32(work.head) / u32(args.group));
#pragma unroll 1
    for (int tile = work.first_tile + work.tiles - 1; tile >= work.first_tile; --tile) {
      mbarrier_wait(s.k_empty[k.stage], k.parity ^ 1);  // no fence: only wgmma reads k and v; zero_rows has its own
      mbarrier_arrive_and_expect(s.k_full[k.stage], sizeof s.k[0]);
      start_tile_copy<Memory::KEYS>(s.k[k.stage], args.k, s.k_full[k.stage], work.other_start + tile * Memory::KEYS,
                                    key_head, work.batch);
      k.next();
      fetch_values();
      value_token = work.other_start + tile * Memory::KEYS, value_head = key_head, value_batch = work.batch;
    }
  }
}

// Replaces a lane's scores of two rows and KEYS keys by weights, and updates each row's maximum and sum. rescale: the
// factors for earlier weights, and so for o.
template <int KEYS>
__device__ __forceinline__ void weigh_rows(float (&scores)[KEYS / 2], RowMaximum (&maximum)[2], float (&sum)[2],
                                           float (&rescale)[2], float scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest[4];  // of every fourth group of columns: four maxima do not wait for each other
#pragma unroll
    for (int n = 0; n < 4; ++n) largest[n] = max(scores[4 * n + 2 * half], scores[4 * n + 2 * half + 1]);
#pragma unroll
    for (int n = 4; n < KEYS / 8; ++n)
      largest[n % 4] = max(largest[n % 4], max(scores[4 * n + 2 * half], scores[4 * n + 2 * half + 1]));
    const float row_largest = row_max(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
    rescale[half] = maximum[half].raise(row_largest, scale, SLACK);
    float partial[2] = {sum[half] * rescale[half], 0.f};
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& p = scores[4 * n + 2 * half + i];
        p = exp2_approx(fmaf(maximum[half].factor, p, -maximum[half].shift));
        partial[i] += p;
      }
    sum[half] = partial[0] + partial[1];
  }
  wgmma_fence_operand(sum);  // otherwise the compiler moves the additions after the wait for o
}

// A consuming warpgroup: its 64 rows of each of the block's query tiles. A step is a key tile and its two products:
//   issued in                         product           waited for in                              then free
//   the loop                          scores = q k^T    the loop, before weigh_scores              k's stage
//   the loop, in the next step        o += weights v    wait_for_values, after its weigh_scores    v's stage
// After the last key tile of a query tile the next step is the first one of the next query tile.
// In a lane's accumulators of products [64, N], numbers 4 n + 2 half + i are of row `row` + 8 half and column 8 n + 2
// (lane % 4) + i.
template <typename T, int K, int V, bool CAPPED, class Memory>
__device__ __forceinline__ void consume(Memory& s, const Args<T>& args) {
  constexpr int KEYS = Memory::KEYS, WARPGROUPS = Memory::WARPGROUPS, FIRST_TURN_BARRIER = 4;
  static_assert(FIRST_TURN_BARRIER >= ZERO_ROWS_BARRIER + WARPGROUPS, "named barriers differ");
  constexpr bool TURNS = WARPGROUPS == 3;  // warpgroups issue their products in turn
  const int warpgroup = warp_uniform(threadIdx.x / 128), warpgroup_row = 64 * warpgroup, lane = threadIdx.x & 31;
  const int row = warpgroup_row + threadIdx.x / 32 % 4 * 16 + lane / 4;  // this lane's first of two rows
  // |scale| log2 e, of products or tanh, but at least 1e-37: 0 times a masked score, -inf, would be NaN.
  const float scale = size_of_scale(CAPPED ? args.softcap : args.scale);
  const bool negative = opaque(u32(args.scale < 0));  // else the loop would compare float64 again
  const float tanh_scale = scale_over_cap(args.scale, args.softcap);
  RingPosition<Memory::KEY_STAGES> k, v;
  RingPosition<Memory::QUERY_STAGES> q;
  float scores[KEYS / 2], o[V / 2], sum[2], rescale[2];
  RowMaximum maximum[2];       // of the lane's two rows
  u32 weights[KEYS / 16][4];   // e^(S - m), rounded, as operands A
  PendingStore stored;         // lane 0: the copy engine may still read this warp's o, in stage previous_q_stage of q
  int previous_q_stage = 0;    // the stage of the last query tile that is complete
  int first_tile, tiles_left;  // the current key tile is first_tile + tiles_left; tiles_left tiles follow it
  int first_diagonal, length;  // key position of the query tile's first row; number of keys of the sequence
  int valid_values;  // keys in the tile of v that is multiplied next (weigh_scores sets it for the next iteration's
                     // product); the rest belongs to other sequences

  // With three warpgroups one at a time issues the two products of an iteration of its loop. All have the same tiles,
  // and so as many turns: one that left the loop alone would keep the next one waiting for ever. The first scores,
  // before the loop, and the last product with v, after it, wait for no turn. Warpgroup 2 passes the first turn to
  // warpgroup 0 before the loop; no warpgroup takes the turn that it passes last, and the barrier ends with the block.
  constexpr int TURN_THREADS = 2 * 128;  // of the warpgroup that takes a turn and of the one that passes it
  auto take_turn = [&] {
    if (TURNS) named_barrier_sync(FIRST_TURN_BARRIER + warpgroup, TURN_THREADS);
  };
  auto pass_turn = [&] {
    if (TURNS)
      named_barrier_arrive(FIRST_TURN_BARRIER + (warpgroup + 1 == WARPGROUPS ? 0 : warpgroup + 1), TURN_THREADS);
  };
  auto begin_tile = [&](const Work& work) {
    first_tile = warp_uniform(work.first_tile), tiles_left = warp_uniform(work.tiles) - 1;
    first_diagonal = warp_uniform(work.diagonal), length = warp_uniform(work.other_length);
  };
  auto multiply_values = [&](bool accumulates) {  // issues o = weights v, or o += weights v
    // Rows of k of other sequences need no zeros: their scores are masked. Those of v do, since 0 times NaN is NaN.
    if (valid_values < KEYS) zero_rows(s.v[v.stage], valid_values, warpgroup);
    issue_weighted_sum(o, weights, s.v[v.stage], accumulates);
  };
  auto wait_for_values = [&] {
    wait_for<0>(o);
    release(s.v_empty[v.stage]);
    v.next();
  };
  // Replaces products by weights; the caller multiplies o by `rescale`.
  auto weigh_scores = [&] {
    const int key = (first_tile + tiles_left) * KEYS, diagonal = first_diagonal + warpgroup_row;
    valid_values = min(KEYS, length - key);
    if (CAPPED) {  // tanh_scale has the sign of args.scale: nothing is negated
#pragma unroll
      for (int n = 0; n < KEYS / 2; ++n) scores[n] = tanh_of(tanh_scale * scores[n]);
    } else if (negative)
#pragma unroll
      for (int n = 0; n < KEYS / 2; ++n) scores[n] = -scores[n];
    if (needs_mask<64, KEYS>(key, diagonal, int(args.left), int(args.right), length))
      mask_rows(scores, key, first_diagonal + row, int(args.left), int(args.right), length, minus_infinity());
    weigh_rows<KEYS>(scores, maximum, sum, rescale, scale);
  };
  // Divides o by the sum of weights (with the sink's) and stores it and lse, for the query tile in this stage of q.
  auto finish_tile = [&](int stage, const float (&shift)[2], const float (&sum)[2]) {
    const Work& work = s.q_works[stage];
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sink = args.sinks ? LOG2E * args.sinks[work.head] : minus_infinity();
      const RowEnd end = row_end(RowMaximum::score_of(shift[half], scale), row_sum(sum[half]), sink);
      factor[half] = end.factor;
      if (args.lse && lane % 4 == 0 && row + 8 * half < work.tokens)
        args.lse[(i64(work.output_batch) * args.H + work.head) * args.Tq + work.start + row + 8 * half] =
            end.logarithm / LOG2E;
    }
    store_rows(args.o, args.out, args.V, o, factor[0], factor[1], s.q[stage], warpgroup_row, work);
    stored.begin();
  };

  mbarrier_wait(s.q_full[0], 0);
  if (!warp_uniform(s.q_works[0].tiles)) return;
  begin_tile(s.q_works[0]);
  maximum[0] = maximum[1] = {scale}, sum[0] = sum[1] = 0.f;
  if (TURNS && warpgroup == WARPGROUPS - 1) pass_turn();  // warpgroup 0 may begin
  mbarrier_wait(s.k_full[0], 0);
  issue_scores(scores, s.q[q.stage], warpgroup_row, s.k[k.stage]);
  wait_for<0>(scores);
  release(s.k_empty[0]);
  k.next();
  weigh_scores();
  round_operands<T>(weights, scores);
  bool accumulates = false;  // o holds sums of this query tile's earlier key tiles
  // An iteration issues the scores of the next key tile and the product of the current weights with v, and waits for
  // both. No product runs where the loop jumps back: the assembler would serialise all of them.
  while (true) {
    const bool next_is_new_tile = tiles_left == 0;  // the next key tile is for the block's next query tile
    if (next_is_new_tile) {
      // Before the wait for q_full: the producer may need stage previous_q_stage for the very tile that is waited for.
      // Before previous_q_stage changes: `stored` is about that stage.
      stored.release(s.q_empty[previous_q_stage]);
      previous_q_stage = q.stage;
      q.next();
      mbarrier_wait(s.q_full[q.stage], q.parity);
      if (!warp_uniform(s.q_works[q.stage].tiles)) break;
    } else --tiles_left;
    mbarrier_wait(s.k_full[k.stage], k.parity);
    take_turn();
    issue_scores(scores, s.q[q.stage], warpgroup_row, s.k[k.stage]);
    mbarrier_wait(s.v_full[v.stage], v.parity);
    multiply_values(accumulates);
    pass_turn();
    if (next_is_new_tile) begin_tile(s.q_works[q.stage]);
    else stored.release(s.q_empty[previous_q_stage]);  // waits for the store while products run
    // The product with v, which was issued after the scores, still runs.
    wait_for<1>(scores);
    release(s.k_empty[k.stage]);
    k.next();
    const float previous_shift[2] = {maximum[0].shift, maximum[1].shift}, previous_sum[2] = {sum[0], sum[1]};
    // `shift` alone: the first raise() sets `factor`, too.
    if (next_is_new_tile) maximum[0].shift = maximum[1].shift = RowMaximum::NONE, sum[0] = sum[1] = 0.f;
    weigh_scores();
    // Both branches begin with the same call: the assembler moves a wait to the start of its basic block. In this block
    // that would be before weigh_scores, which is to run during the product.
    if (next_is_new_tile) {
      wait_for_values();
      finish_tile(previous_q_stage, previous_shift, previous_sum);
    } else {
      wait_for_values();
      if (__any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f))
#pragma unroll
        for (int n = 0; n < V / 2; ++n) o[n] *= rescale[n / 2 % 2];
    }
    accumulates = !next_is_new_tile;
    round_operands<T>(weights, scores);
  }
  mbarrier_wait(s.v_full[v.stage], v.parity);
  multiply_values(accumulates);
  wait_for_values();
  finish_tile(previous_q_stage, {maximum[0].shift, maximum[1].shift}, sum);
  if (lane == 0) tensor_store_wait();  // o has been read before the block's shared memory ends
}

template <typename T, int K, int V, bool CAPPED>
__global__ void __launch_bounds__(128 * Shared<T, K, V, CAPPED>::WARPGROUPS + 128, 1)
    softmax_sm90_forward(const __grid_constant__ Args<T> args) {
  using Memory = Shared<T, K, V, CAPPED>;
  static_assert(sizeof(Memory) <= 227 * 1024, "a block's most shared memory");
  Memory& s = *reinterpret_cast<Memory*>(dynamic_smem());
  constexpr int WARPS = 4 * Memory::WARPGROUPS;  // that consume
  if (threadIdx.x == 0) {
    init_stages<WARPS>(s.q_full, s.q_empty);
    init_stages<WARPS>(s.k_full, s.k_empty), init_stages<WARPS>(s.v_full, s.v_empty);
  }
  consume_and_produce<Memory::WARPGROUPS>([&] { consume<T, K, V, CAPPED>(s, args); }, [&] { produce(s, args); });
}
