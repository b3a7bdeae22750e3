// what      The producer groups of Hopper's forward kernel: the BK / 32 warps of a group make the operands of a chunk
//           (32 tokens, in 4 sub-chunks of 8, two in each half) by forward_operands.cuh, and compute the scores of
//           pairs of tokens. make_chunk makes a chunk, `produce` all chunks of a group
// smem      of Shared (forward_storage.cuh), for each group:
//             inputs          q, k, g [32 tokens, BK], read (without a ScalarDecay's g, which lanes read from memory)
//             decays          [4 sub-chunks, BK], of each channel over each sub-chunk, written and read
//             score_operands  32 rows of queries decayed from, and keys decayed to, their sub-chunk's middle, and
//                             borders between sub-chunks; written and read
//           and for each stage, which holds a chunk's operands, written for consumers:
//             operands        q [32, BK] decayed from the chunk's start, k [32, BK] decayed to its end, scores [32, 32]
//             headers         of BK channels the decays over the chunk; and row[0] = WHOLE_CHUNK
// grid      a Schedule (forward_schedules.cuh) says what the two blocks of a cluster share. K_RANKS = 2: each block
//           makes the operands and scores of half of the channels of every chunk; CHUNK_RANKS = 2: of all channels of
//           every second chunk. It copies them to the other block. has_outputs: there are queries and scores, not keys
//           alone
// barriers  mbarriers: waits for gates_copied and qk_copied (inputs are there) and empty (consumers have read the
//           stage), arrives at full (its operands are complete). Of a group, two a chunk: the decays over all
//           sub-chunks are in shared memory | all operands of scores are; a third before scores are sent to the
//           cluster's other block; one more if gates are above a limit. In order: make_chunk
// limits    sm_90a; T of float16, bfloat16; BK of 64, 128; K and V multiples of 8; rows start on 16 bytes
// tests     test_growth_on_hopper: GROWS in test_few_tokens, OUT_OF_FLOAT16 in test_rows_of_any_size
//
// T: the type of q and k. Border<K_RANKS, T>: that of operands at borders, float16, but T if K_RANKS is 2.
// BORDER_IS_NARROWER: it is float16, but T is bfloat16. GATES: the gates that a lane has of a token: 4, of its
// channels, or 1 if G is ScalarDecay. coord, a ProducerCoord: the lane's group, its thread in the group, its sub-chunk
// and the chunk's row first_row with which that starts, and the first of its 4 channels. PRODUCER_GROUPS: how many
// groups of the cluster take chunks in turn. s.u: RWKV-6's bonus u of each channel. Order: AfterWrite (GLA) or
// BeforeWrite (RWKV-6)
//
// From forward_storage.cuh and forward_rows.cuh
//   WHOLE_CHUNK    the header's row[0] where the stage has a whole chunk. make_tokens, which fills a stage with one
//                  token at a time, stores the token's row there
//   fetch_inputs   starts copying a chunk's LOG_GATES, or its QUERIES_AND_KEYS, if there is such a chunk; send_operands
//                  and send_scores start copies to the cluster's other block
//   clear_gates    and clear_keys set to 0 what is after the sequence's end. put_decays stores decays in the consumers'
//                  order
//   load_gates     a token's log gates; load_scalar_gate: if G is ScalarDecay, a lane's log gate of a chunk, of token
//                  lane % 8 of its sub-chunk
//   scores(stage)  the stage's tile of scores; scores_offset(stage): where two stages share a tile, the bytes to the
//                  stage's half of it, else 0
//   PRODUCER_BARRIER + group  the group's named barrier, which only its threads use
// From ptx.cuh
//   named_barrier_any  a barrier of a group that returns whether any of its threads votes yes
// From forward_growth.cuh
//   SUBCHUNK_GROWTH  7 nats: see store_decays_and_vote
//   EIGHTH         1/8 in a gate's type, as bits. update_largest_gate(x, ..): x becomes the largest of itself and a
//                  token's gates. exceeds, exceeds_growth: see store_decays_and_vote
//   send_vote      and wait_for_votes: votes of the cluster's two blocks. make_tokens: makes a chunk token by token,
//                  and starts copying the next chunk's inputs
// From forward_operands.cuh
//   NeighbourDecay  the decay over the half's other sub-chunk. IN_FLOAT16, that is if BORDER_IS_NARROWER, it multiplies
//                  operands that are float16 already, and so have their row's scale
// From forward_scales.cuh
//   RowScales      (rows, coord, above_limit): the rows' scales, powers of 2. If no gate is above LIMIT: 1 for a row
//                  that float16 holds; of others the largest number becomes 2^LARGEST_EXPONENT to twice that. Else that
//                  of every row becomes 2^GROWN_EXPONENT to twice that. NoScales: none
//   put_undo       stores the inverses of the scales for make_scores
//   fetch_again    waits for the copies of the next chunk's inputs, then copies this chunk's once more, waits for them,
//                  and clears gates after the sequence's end, as `produce` does
// From forward_scores.cuh
//   TF32_CORRECTION_OF_BOTH  makes up for what a product in tf32 cuts off both operands; consumers multiply q and the
//                  state so if T is float16
//   DirectProducts  products of undecayed queries and keys, without a gate between them; `scores`: their sums over
//                  channels; out_of_range(lane): whether the lane has a row that float16 may not hold
//   make_scores    stores a warp's share of the scores. A query with its own key: from `direct`. RWKV-6: a query with
//                  its own key from self_scores, with the key before it from `direct`. All others: products of
//                  score_operands
//   ScoreShare::N  the sub-chunks whose scores a warp computes, 4 / warps of the group
#include "read_order.cuh"
#include "gated/sm90/forward_growth.cuh"
#include "gated/sm90/forward_operands.cuh"
#include "gated/sm90/forward_rows.cuh"
#include "gated/sm90/forward_scales.cuh"
#include "gated/sm90/forward_scores.cuh"

static_assert(LARGEST_EXPONENT == 12, "a row's numbers, below 2^13, times e^2 are in float16's range: see LIMIT");
static_assert(GROWN_EXPONENT == -9 && 2 * SUBCHUNK_GROWTH <= 16.f, "below 2^-8, times e^16 they are, too");

// One chunk whose operands a producer group makes.
struct ChunkJob {
  int group;         // the producer group in its block
  int rank;          // the block in its cluster if K_RANKS > 1, which selects its channels; else 0
  int chunk, next;   // this chunk's number, and that of the group's next chunk
  int tokens;        // s.work.tokens, of what the block computes: a sequence, a segment or a part of one
  u32 stage, fills;  // the stage for the operands, and how often it was filled before
  u32 parity;        // of the phases of gates_copied[group] and qk_copied[group] that this chunk's copies complete

  // The number of tokens in the sequence's last chunk if that is this one and not full; otherwise 0.
  __device__ __forceinline__ int partial() const { return chunk * CHUNK + CHUNK > tokens ? tokens - chunk * CHUNK : 0; }
};

// The result of make_chunk.
//   MADE            the operands are complete
//   GROWS           no operand was made: log gates exceed the limits, or an earlier chunk was OUT_OF_FLOAT16
//   OUT_OF_FLOAT16  a row of q or k exceeds float16's range: the operands are wrong, and were not sent. The next
//                   chunk's inputs are being copied over this chunk's
// After the last two `produce` calls make_scaled, or make_tokens if not BORDER_IS_NARROWER. In any case it then arrives
// at full[stage], for the stage's last fill by this chunk.
//
// Each copy of inputs ends a phase of the group's gates_copied and one of its qk_copied (ScalarDecay: of qk_copied
// alone). Phases of one chunk, if the copy that `produce` waits for is phase n, and who starts the later ones:
//                   n           n + 1                      n + 2                          n + 3
//   MADE            this chunk  next chunk: make_chunk
//   GROWS           this chunk  next chunk: make_scaled
//                               or make_tokens
//   OUT_OF_FLOAT16  this chunk  next chunk: make_chunk     this chunk again: fetch_again  next chunk: make_scaled,
//                                                                                         or make_tokens in it
// The next chunk's inputs are thus there after n + 1 or n + 3, which have one parity: that for which `produce` waits.
// After the last chunk, fetch_again's copy is n + 1.
//
// Phases of the stage's `empty`: make_chunk waits for the one of the stage's previous fill; so does make_scaled, for
// which it has ended. make_tokens fills the stage 33 or 65 times (with zeros, then once or twice for each token): an
// odd number leaves the parity that one fill leaves.
enum class ChunkResult { MADE, GROWS, OUT_OF_FLOAT16 };

constexpr bool SCALED_ROWS = true, UNSCALED_ROWS = false;  // arguments for the template parameters SCALES_ROWS

// Steps 1 and 2 of make_chunk. Sets a, the decays of single tokens, and above_limit: whether a lane of the group has a
// gate above LIMIT, or after_overflow. Returns whether the chunk grows, by the votes of this block:
//   BORDER_IS_NARROWER, not SCALES_ROWS  above_limit: make_scaled then makes it, SCALED_ROWS
//   otherwise                            whether a lane has both (forward_growth.cuh)
//                                          `exceeds`: a gate above GATE_LIMIT, 1, or 1/8 if T is float16
//                                          exceeds_growth: a channel whose gates above 0 sum to more than 7 nats over a
//                                          sub-chunk, or to more than 32 (T float16: 4) over the chunk. ScalarDecay: to
//                                          more than 7 (T float16: 1) over the lane's sub-chunk
template <bool SCALES_ROWS, class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ bool store_decays_and_vote(float (&a)[SUB_CHUNK][GATES_PER_TOKEN<G>], bool& above_limit,
                                                      Shared<Schedule, T, G, BK, BV>& s, const ProducerCoord<BK>& coord,
                                                      float scalar_gate, bool after_overflow) {
  constexpr int GATES = GATES_PER_TOKEN<G>, THREADS = ProducerCoord<BK>::THREADS;
  // As bits of G's type: 1/8 nat if BORDER_IS_NARROWER, else GATE_LIMIT. At most 16 gates, of 1/8 each, lie between a
  // token and its border. Numbers of a row that is not out_of_range, or of a scaled one, are at most 2^13, and 2^13 e^2
  // = 60531 is in float16's range, which ends at 65504.
  constexpr u32 LIMIT = BORDER_IS_NARROWER<Schedule, T> ? EIGHTH<G> : GATE_LIMIT<T, G>;
  const auto& in = s.inputs[coord.group];
  u32 largest_gate = LIMIT;  // of this lane's gates, as bits, if one is above LIMIT; else LIMIT
  float decay[GATES];        // over the sub-chunk
#pragma unroll
  for (int c = 0; c < GATES; ++c) decay[c] = 1.f;
#pragma unroll
  for (int i = 0; i < SUB_CHUNK; ++i) {
    float g[GATES];
    load_gates(g, in, coord, scalar_gate, i);
    update_largest_gate(largest_gate, in, coord, scalar_gate, i);
#pragma unroll
    for (int c = 0; c < GATES; ++c) decay[c] *= a[i][c] = decay_of(g[c]);
  }
  put_decay(s.decays[coord.group], coord, decay);
  // The sub-chunks' decays are in shared memory; all warps have read their gates and the previous chunk's
  // score_operands.
  bool grows = named_barrier_any(PRODUCER_BARRIER + coord.group, THREADS, largest_gate != LIMIT || after_overflow);
  above_limit = grows;
  if ((SCALES_ROWS || !BORDER_IS_NARROWER<Schedule, T>) && above_limit) {
    bool exceeds_here = exceeds<G>(largest_gate, GATE_LIMIT<T, G>);
    if constexpr (!HAS_CHANNEL_GATES<G>) exceeds_here &= exceeds_growth<T>(scalar_gate);
    else exceeds_here = exceeds_here && exceeds_growth<T>(in, coord.channel);
    grows = named_barrier_any(PRODUCER_BARRIER + coord.group, THREADS, exceeds_here);
  }
  return grows;
}

// Stores a chunk's header; for lanes of the last sub-chunk. earlier_decay: over the other sub-chunks.
template <class Header, int GATES, int BK>
__device__ __forceinline__ void put_header(Header& header, int rank, const ProducerCoord<BK>& coord,
                                           const Decays<BK>& decays, const float (&earlier_decay)[GATES]) {
  float whole[4] = {1.f, 1.f, 1.f, 1.f}, last[GATES];  // decays over the chunk, and over its last sub-chunk
  load_decay(last, decays, coord, coord.subchunk);
  times(whole, whole, earlier_decay);
  times(whole, whole, last);
  put_decays(header.decay[rank], coord.channel, whole);
  header.row[0] = WHOLE_CHUNK;
}

// Makes the operands of a chunk, and starts copying the inputs of the group's next chunk as soon as this chunk's have
// been read. SCALES_ROWS: whether operands at borders have the scales of their rows (forward_scales.cuh), so that none
// is OUT_OF_FLOAT16; args.scale is the operator's. scalar_gate: if G is ScalarDecay, the log gate of token lane % 8
// of the lane's sub-chunk; next_scalar_gate: set to that of the next chunk. after_overflow: whether an earlier chunk
// was OUT_OF_FLOAT16. In order:
//    1  gates are read, decays over sub-chunks are stored
//    2  barrier and vote of the group: decays are stored; gates have been read, and the previous chunk's
//       score_operands. A second vote if a gate is above LIMIT and the gates' sums decide
//    3  unless the chunk grows, the next chunk's gates are copied over this chunk's (K_RANKS > 1: after 5, which
//       decides it)
//    4  wait: consumers have read the stage
//    5  K_RANKS > 1: wait for both blocks' votes. GROWS is returned here, before any operand is stored
//    6  wait: q and k have been copied
//    7  keys and header, then queries, are stored
//    8  barrier of the group: operands are stored, q and k have been read; so have the decays, which 1 stores again
//    9  the next chunk's q and k are copied over this chunk's; operands are sent to the cluster's other block
//   10  scores are stored; cluster: barrier of the group, then scores are sent
// Between the group's own accesses and later copies from or to the same memory are a barrier, and then a
// fence_proxy_async of the copying thread, thread 0: at the start of 3, of 9 and of the sending in 10. That of 9 is
// also after the reads by the other block's consumers, which 4 waits for, of what the sent operands overwrite there.
template <class Order, bool SCALES_ROWS, class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ ChunkResult make_chunk(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args,
                                                  const ProducerCoord<BK>& coord, const ChunkJob& job,
                                                  float scalar_gate, float& next_scalar_gate,
                                                  bool after_overflow = false) {
  using Coord = ProducerCoord<BK>;
  constexpr int GATES = GATES_PER_TOKEN<G>;
  // Scales need BORDER_IS_NARROWER: K_RANKS is then 1, so that no block votes, and NeighbourDecay is IN_FLOAT16: it
  // multiplies operands with their scales.
  static_assert(!SCALES_ROWS || BORDER_IS_NARROWER<Schedule, T>,
                "no votes of two blocks, and NeighbourDecay in float16");
  constexpr bool HAS_OUTPUTS = Schedule::has_outputs;
  const auto& in = s.inputs[coord.group];
  auto& score_operands = s.score_operands[coord.group];
  MBarrier& full = s.full[job.stage];
  const auto& decays = s.decays[coord.group];
  const float scale = float(args.scale);
  float a[SUB_CHUNK][GATES];  // decays of single tokens
  bool above_limit;
  bool grows = store_decays_and_vote<SCALES_ROWS>(a, above_limit, s, coord, scalar_gate, after_overflow);
  const auto fence_copies = [&] {
    if (coord.thread == 0) fence_proxy_async();
  };
  const auto fetch_next_gates = [&] {
    if constexpr (HAS_CHANNEL_GATES<G>) fence_copies();
    fetch_inputs<LOG_GATES>(s, args, coord.thread, job.group, job.next, job.tokens);
    next_scalar_gate = load_scalar_gate(s, args, coord, job.next);
  };
  const auto fetch_next_qk = [&] {
    fetch_inputs<QUERIES_AND_KEYS>(s, args, coord.thread, job.group, job.next, job.tokens);
  };
  if constexpr (Schedule::K_RANKS > 1) {
    if (coord.thread == 0) send_vote(s.votes, job.rank, job.stage, grows);
  } else if (!grows) fetch_next_gates();  // before the wait for the stage, which hides some of the copy's latency
  // Decays over the half's other sub-chunk, over the other half, and over all sub-chunks after this one.
  // border_neighbour: `neighbour` for sub-chunks 0 and 3, whose keys and queries are also stored for the border between
  // the halves; 1 for the others if a warp has two sub-chunks, since their lanes then store their rows at that border
  // twice, with the same numbers: see two_borders in put_keys.
  float neighbour[GATES], other_half[GATES], last_decay[GATES], border_neighbour[GATES], later_decay[GATES];
  load_decay(neighbour, decays, coord, coord.subchunk ^ 1);
  load_decay(other_half, decays, coord, coord.subchunk ^ 2);
  load_decay(last_decay, decays, coord, coord.subchunk ^ 3);
#pragma unroll
  for (int c = 0; c < GATES; ++c) {
    other_half[c] *= last_decay[c];
    border_neighbour[c] = Coord::LANES == 32 || coord.subchunk == 0 || coord.subchunk == 3 ? neighbour[c] : 1.f;
  }
  // Sets x to the decay over the neighbour, the other half, both, or neither.
  const auto set_decay = [&](float (&x)[GATES], bool with_neighbour, bool with_other_half) {
#pragma unroll
    for (int c = 0; c < GATES; ++c) {
      x[c] = with_other_half ? other_half[c] : 1.f;
      if (with_neighbour) x[c] *= neighbour[c];
    }
  };
  set_decay(later_decay, coord.subchunk % 2 == 0, coord.subchunk < 2);
  const NeighbourDecay<T, Border<Schedule::K_RANKS, T>, GATES> neighbour_decay(border_neighbour);
  if (job.fills) mbarrier_wait(s.empty[job.stage], job.fills - 1 & 1);  // consumers have read the stage
  if constexpr (Schedule::K_RANKS > 1) grows = wait_for_votes(s.votes, job.stage, job.fills & 1);
  if (__builtin_expect(grows, false)) return ChunkResult::GROWS;
  if constexpr (Schedule::K_RANKS > 1) fetch_next_gates();
  mbarrier_wait(s.qk_copied[coord.group], job.parity);  // q and k are in `in`
  if (job.partial()) clear_keys(s.inputs[coord.group], coord.first_row, job.partial(), coord.channel);
  constexpr int WARPS = Coord::THREADS / 32, N = ScoreShare<WARPS>::N;
  constexpr bool BEFORE = Order::reads_before_write;
  using Scales = Select<SCALES_ROWS, RowScales<BK>, NoScales>;
  const Scales k_scales(in.k, coord, above_limit);
  put_keys<HAS_OUTPUTS, T>(s.operands.k[job.stage][job.rank], score_operands, in.k, a, coord, neighbour_decay,
                           later_decay, k_scales);
  float earlier_decay[GATES];  // over all sub-chunks before this one
  set_decay(earlier_decay, coord.subchunk % 2 == 1, coord.subchunk >= 2);
  if (coord.subchunk == NUM_SUBCHUNKS - 1) put_header(s.headers[job.stage], job.rank, coord, decays, earlier_decay);
  if constexpr (HAS_OUTPUTS) {
    float self_scores[SUB_CHUNK], u[4];
#pragma unroll
    for (int c = 0; c < GATES; ++c) earlier_decay[c] *= IS_BFLOAT16<T> ? scale : scale * TF32_CORRECTION_OF_BOTH;
    if (BEFORE) unpack(u, &s.u[coord.channel]);  // else nothing reads u and self_scores
    const int lane = u32(coord.thread) % 32, warp = u32(coord.thread) / 32;
    __syncwarp();  // zeros that other lanes stored to keys after the sequence's end are visible
    const Scales q_scales(in.q, coord, above_limit);
    if constexpr (SCALES_ROWS) put_undo(score_operands, coord, q_scales, k_scales);
    constexpr bool CHECKS_RANGE = BORDER_IS_NARROWER<Schedule, T> && !SCALES_ROWS;
    DirectProducts<BEFORE, CHECKS_RANGE, N, T, BK> direct(in.q, in.k, warp * N, lane);
    put_queries<Order>(s.operands.q[job.stage][job.rank], score_operands, in.q, in.k, a, coord, neighbour_decay,
                       q_scales, earlier_decay, u, self_scores, direct);
    // forward.cu sets the flag to false. It is never reset: later chunks of the group return GROWS above, because of
    // after_overflow.
    if (CHECKS_RANGE && direct.out_of_range(lane)) score_operands.out_of_float16 = true;
    // All operands are in shared memory; q and k have been read.
    named_barrier_sync(PRODUCER_BARRIER + coord.group, Coord::THREADS);
    fence_copies();
    const bool out_of_float16 = CHECKS_RANGE && score_operands.out_of_float16;
    fetch_next_qk();
    if (Schedule::CLUSTER_SIZE > 1 && coord.thread == 0 && !out_of_float16) send_operands(s, job.stage, job.rank, full);
    make_scores<WARPS, Order, Schedule, SCALES_ROWS>(s.operands.scores(job.stage)[job.rank], score_operands,
                                                     direct.scores, self_scores, s.operands.scores_offset(job.stage),
                                                     scale, warp, lane);
    // All threads of the group have read the same: the vote tells the compiler that no warp diverges.
    if (CHECKS_RANGE && __builtin_expect(__any_sync(0xffffffffu, out_of_float16), false))
      return ChunkResult::OUT_OF_FLOAT16;
    if constexpr (Schedule::CLUSTER_SIZE > 1) {
      // All scores are in shared memory: one thread may send them.
      named_barrier_sync(PRODUCER_BARRIER + coord.group, Coord::THREADS);
      fence_copies();
      if (coord.thread == 0) send_scores(s, job.stage, job.rank, full);
    }
  } else {
    // Keys and the sub-chunks' decays have been read.
    named_barrier_sync(PRODUCER_BARRIER + coord.group, Coord::THREADS);
    fence_copies();
    fetch_next_qk();
  }
  return ChunkResult::MADE;
}

// Makes a chunk again, for which make_chunk returned GROWS or OUT_OF_FLOAT16: with rows scaled, or token by token if
// its log gates are too large for that. Either way it starts copying the next chunk's inputs. Only if
// BORDER_IS_NARROWER; K_RANKS is then 1, so that the two blocks do not vote, and the rank is 0. producer: the thread's
// number among the block's producer threads; stage, fills, parity: as in ChunkJob. inputs_lost: after OUT_OF_FLOAT16,
// the chunk's inputs must be copied once more. fetch_again then sets `parity`, which is make_scaled's own, to that of
// the phase of this copy: n + 2, or n + 1 after the last chunk (table at ChunkResult).
template <class Order, class Schedule, typename T, typename G, int BK, int BV>
__device__ __noinline__ void make_scaled(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args, u32 producer,
                                         int chunk, int stage, u32 fills, u32 parity, bool inputs_lost) {
  const ProducerCoord<BK> coord(producer);
  if (inputs_lost) fetch_again(s, args, coord, chunk, parity);
  else  // all have read the decays, which make_chunk stores again
    named_barrier_sync(PRODUCER_BARRIER + coord.group, coord.THREADS);
  const ChunkJob job{coord.group, 0, chunk, chunk + s.PRODUCER_GROUPS, s.work.tokens, u32(stage), fills, parity};
  float next_scalar_gate;  // not used: the caller loads it itself
  if (make_chunk<Order, SCALED_ROWS>(s, args, coord, job, load_scalar_gate(s, args, coord, chunk), next_scalar_gate) !=
      ChunkResult::MADE)
    make_tokens<Order>(s, args, producer, chunk, stage, fills, parity);
}

// A producer thread's loop over the chunks of its group. thread: its number among the block's producer threads.
template <class Order, class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void produce(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args, int thread) {
  using Coord = ProducerCoord<BK>;
  using Storage = Shared<Schedule, T, G, BK, BV>;
  constexpr int GROUPS = Storage::GROUPS, CHUNK_RANKS = Schedule::CHUNK_RANKS;
  const WorkTile& work = s.work;
  const int tokens = work.tokens;
  int group = GROUPS > 1 ? u32(thread) / Coord::THREADS : 0;
  const int rank = Schedule::K_RANKS > 1 ? rank_in_cluster<Schedule>() : 0;
  // The group's number among the PRODUCER_GROUPS that take chunks in turn, and so its first chunk.
  int maker = group * CHUNK_RANKS + (CHUNK_RANKS > 1 ? rank_in_cluster<Schedule>() : 0);
  fetch_inputs<LOG_GATES>(s, args, thread % Coord::THREADS, group, maker, tokens);
  fetch_inputs<QUERIES_AND_KEYS>(s, args, thread % Coord::THREADS, group, maker, tokens);
  float next_scalar_gate = load_scalar_gate(s, args, Coord(thread), maker);
  u32 iteration = 0;
  // Whether a chunk was OUT_OF_FLOAT16: later ones are then scaled at once, since it is slow to make them twice.
  bool after_overflow = false;
  for (int chunk = maker; chunk * CHUNK < tokens; chunk += Storage::PRODUCER_GROUPS, ++iteration) {
    // `hide_origin` hides a value's origin, so that the compiler computes addresses again instead of holding them in
    // registers. Instances with spare registers are faster without it. Measured times decided which instances hide
    // which values.
    constexpr bool HAS_SPARE_REGISTERS =
        BORDER_IS_NARROWER<Schedule, T> && Schedule::CLUSTER_SIZE > 1 && BK + BV > 128 && sizeof(G) <= 2;
    if constexpr (!HAS_SPARE_REGISTERS) {
      if constexpr (BK + BV > 128 || sizeof(G) == 4 || Schedule::CLUSTER_SIZE > 1) hide_origin(thread);
      if constexpr (BORDER_IS_NARROWER<Schedule, T> && (BK + BV > 128 || Order::reads_before_write))
        hide_origin(group), hide_origin(maker);
      if constexpr (sizeof(G) == 4) hide_origin(maker);
    }
    // `%` tells the compiler that the group is 0.
    const Coord coord{GROUPS > 1 ? u32(thread) : u32(thread) % Coord::THREADS};
    const float scalar_gate = next_scalar_gate;
    const u32 stage = Storage::PRODUCER_GROUPS == Storage::STAGES ? u32(maker) : u32(chunk) % Storage::STAGES;
    const u32 fills = Storage::PRODUCER_GROUPS == Storage::STAGES ? iteration : u32(chunk) / Storage::STAGES;
    const ChunkJob job{group, rank, chunk, chunk + Storage::PRODUCER_GROUPS, tokens, stage, fills, iteration & 1};
    if (HAS_CHANNEL_GATES<G>) {
      mbarrier_wait(s.gates_copied[group], job.parity);
      if (job.partial()) clear_gates(s.inputs[group], coord.first_row, job.partial(), coord.channel);
    }
    const ChunkResult result =
        make_chunk<Order, UNSCALED_ROWS>(s, args, coord, job, scalar_gate, next_scalar_gate, after_overflow);
    if (__builtin_expect(result != ChunkResult::MADE, false)) {
      const bool inputs_lost = result == ChunkResult::OUT_OF_FLOAT16;
      after_overflow |= inputs_lost;
      if constexpr (BORDER_IS_NARROWER<Schedule, T>)
        make_scaled<Order>(s, args, thread, chunk, stage, fills, job.parity, inputs_lost);
      else make_tokens<Order>(s, args, thread, chunk, stage, fills, job.parity);
      next_scalar_gate = load_scalar_gate(s, args, Coord(thread), job.next);
    }
    fence_proxy_async();  // orders the stores of operands before the consumers' wgmma, which read them
    mbarrier_arrive(s.full[stage]);
  }
}
