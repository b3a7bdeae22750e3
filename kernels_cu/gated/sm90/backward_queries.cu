// what      GLA and RWKV-6 backward on Hopper, first pass: forwards in time, with the state S [K, V] in registers.
//           Computes dq, du, and query_share: the part of dg, the log gates' gradient, that needs S. The second pass
//           (backward_keys.cu) adds the part that needs dS, the gradient of S
// modes     P is the number of segments of a sequence.
//           ReadOrder         template: AfterWrite, GLA, or BeforeWrite, RWKV-6 (reads_before_write)
//           OneEach, InTurn   template: a block computes one segment, or whole sequences (P = 1), one after the other
//           joined            of a launch, OneEach with P = 3 only: half of the blocks have two segments, as one
//           units             of a chunk: query_share is stored in multiples of a power of 2, its unit. G bfloat16:
//                             unless by_token. G float16: if by_token, or if float16 does not hold it. Float32: never
//           by_token          of a chunk and a warp's 16 channels: gates grow too much for products (growth.cuh)
// math      per chunk of 32 tokens in four sub-chunks of 8, S being the state before it; i, j and t are its tokens.
//           Decays [K] are e^(sum of log gates g): D over all gates of the chunk, D_ij over gates j + 1 to i, E_i over
//           those up to i, L_j over those after j. RWKV-6: D_ij and E_i end with gate i - 1.
//           dA_ij = scale do_i . v_j for j <= i (RWKV-6: j < i);  from_state_i = scale E_i S do_i
//           dq_i = sum_j dA_ij D_ij k_j + from_state_i (RWKV-6: + u k_i scale do_i . v_i)
//           query_share_t = sum_{i>=t} q_i (sum_{j<t} dA_ij D_ij k_j + from_state_i) (RWKV-6: i > t), computed as
//           sum_{i>=t} q_i (sum_j dA_ij D_ij k_j + from_state_i) (RWKV-6: i > t) - sum_{j>=t} k_j sum_i dA_ij D_ij q_i
//           du = sum_t q_t k_t scale do_t . v_t;  S <- D S + sum_j L_j k_j v_j^T
// shapes    q k g dq query_share [B, H, T, K], v do [B, H, T, V]; query_share: of g's type G; in units float16 numbers
//           in the same memory. The others are float32. u [H, K]. Each of N sequences has P segments:
//           initial, dht [N P, H, K, V]: the states at their starts, and the gradients of those at their ends
//           du, ends [N P, H, K]: their terms of du; sum_v (the state at the end) dht
//           query_sums [B, H, chunks, K + FLAGS]: K sums, of each channel sum_i q_i from_state_i; in units the 9 lowest
//           bits of a sum are the unit's exponent. The last FLAGS numbers are bytes, the flags, one for each consumer
//           warp: 1 if the second pass is to compute the chunk token by token
//           checkpoints [B, H, T / CHECKPOINT_EVERY + 1, BK, BV]: the states before every CHECKPOINT_EVERY-th token
//           (states.cuh). BK and BV: K and V rounded up to 64 or 128
// grid      a block for every segment of a sequence and head, or as many as the card holds (InTurn):
//           backward_schedules.cuh. A warpgroup for every 64 channels (consumers), then one: three warps make dA, one
//           copies chunks
// smem      Stage, STAGES times. Iterations of a block count the chunks of all its segments; an iteration's stage is
//           its number modulo STAGES, and it waits for phase (number / STAGES) of that stage's barriers. Who writes and
//           who reads each array of a stage, and why the next write is safe:
//           q, g           copied; read by consumers. dq overwrites q, query_share g: a warp its own channels, once all
//                          its lanes have read them (__syncwarp). The next copies come after `done`
//           k, v, do       copied; read by consumers, and v and do for dA. The next copies come after `done`
//           dA, float_do   by the three warps, after `arrived`; read by consumers. The stage's next chunk has `arrived`
//                          only after consumers came to `done` of this one
// barriers  mbarriers of each stage. A chunk's way, in time, and the barrier that ends a step:
//           copying warp   copies v and do                                                        arrived
//                          copies q, k and g                                                      full
//           three warps    wait for arrived; store dA and float_do                                dA_stored
//           consumers      wait for dA_stored and full; store dq over q and query_share over g    done
//           copying warp   waits for done; copies the results to memory, then the next chunk to the stage
// order     What `consume` must keep, and which test fails where it does not (the emulator computes a product when it
//           is waited for; test_compile finds operands that are overwritten before):
//             the product that reads S ends before S changes              test_gradient_kernels
//             the product that adds to S ends before start_chunk          test_gradient_kernels, test_compile
//             by_token is known before S changes                          test_growth_gradients
//             add_sizes sees single tokens' terms, before their sums      test_gate_paths
//             q and g are read before dq and query_share overwrite them   test_gradient_kernels
//             a share beyond float16 sets the flag                        test_growth
//             InTurn: after the last chunk start_chunk reads its stage    none: a race that only a card has
//           Other orders change registers and latencies alone: test_compile fails where a kernel spills more
// numerics  dA, and queries and keys within the chunk, are tf32, whose range is float32's. Queries and keys are cut off
//           to tf32 before both sums that make query_share_t (AS_MULTIPLIED), so that pairs with both tokens after t
//           cancel but for float32's rounding. The state: states.cuh
// source    Yang et al., 2024, section 4; Peng et al., 2024, eq. 18-19
// limits    sm_90a; bfloat16, float16; K and V of a launch up to 128, multiples of 8; rows start on 16 bytes
// instances all of both orders, both T, G of T and float32, BK and BV, OneEach and InTurn
// tests     test_gradient_kernels; test_gradient_segments (joined, InTurn); test_growth_gradients (by_token);
//           test_gate_paths (units); test_gradient_tiles (args.adds); test_compile (SPILLED)
//
// From warpgroup.cuh and its includes
//   Tile<X, D>          D numbers of type X of each of the chunk's tokens, in panels of PANEL<X> (128 bytes)
//   Values, Operand     accumulators [channel, token] of a chunk; the same numbers in 16 bits
//   warpgroup_panels    a tile's panels of the warpgroup's channels; WorkTile: batch row, head and tokens of a segment
//   each_pair_of_state  calls f for numbers of a state; HAS_FULL_PATH: without a branch for each if V is BV
// From decays.cuh
//   each_token_pair     calls f(sub-chunk n, channel h) for the lane's pairs of tokens
//   ldmatrix_offset()   `offset` below: the byte in a panel of the 16 bytes that a lane gives to ldmatrix and stmatrix
//   GateCounts          how often a token's sum of gates has each gate of its sub-chunk, made by each lane: 0 or 1;
//                       in sums from the sub-chunk's middle also -1, before it, and 1/2 or -1/2 of GLA's gate 4,
//                       halfway through which the middle is
//   SubChunkDecays      sub[n][h]: the decay over sub-chunk n; before(n, h): over all sub-chunks before it
//   decays_from_*, decays_to_*: decays of tokens; decay_within, decay_queries, decay_keys: tokens times these,
//                       AS_MULTIPLIED: cut off to tf32
//   QueryRow            stores dA of a query and pairs of keys; pair_index: a pair's index in dA; self_weights(dA, n):
//                       RWKV-6's scale do_i . v_i of the lane's two tokens of sub-chunk n
//   PairReader          add_keys(sums, keys, n, m): sums over keys of sub-chunk m, times dA, for queries of n;
//                       add_queries(sums, queries, n, m): over queries of n, for keys of m
//   Across              queries or keys decayed from, or to, the borders between sub-chunks; see DecayedKeys
//   in_register(x)      x, which the compiler and the assembler hold in a register
// From backward_schedules.cuh
//   Segment, segment_of<BACKWARDS>, each_segment: what a block computes; ChunkPlaces: with InTurn, where the chunks lie
//                       that are copied; wait_for: waits for an iteration's phase of its stage's barrier
// From states.cuh
//   FloatTile           a tile in float32; start_state_read, start_state_write start products that read S or add to it
//   StateOperand        decayed keys as start_state_write takes them, set by put(n, h, two tokens)
//   state_values        keys, rounded as they are in a product with a state; sum_tokens_by_shuffles: sums over tokens
//   checkpoint_at       where a stored state is, by its index; first_checkpoint: the index from which a segment's count
//   scale_of_queries    a QueryScale, of powers of 2: not 1 only for decays of the first gate below 2^-8 (STRONG)
//   FROM_TOKEN_ON       of sum_tokens_by_shuffles: over a token and all after it
// From query_share.cuh
//   IN_UNITS<G>         G is bfloat16; units_for chooses units by the magnitudes that add_sizes adds up;
//                       store_query_share stores shares, sum_with_unit puts the exponent into a sum's lowest bits.
//                       exceeds_float16: whether one of the warp's shares is infinite in float16
// From growth.cuh and ptx.cuh
//   compute_queries_by_token: a chunk token by token; also moves S to the state after it
//   exceeds_growth      looks at the lane's gates, and only if one of the warp's is large at all of the warp's channels
//   convert_to_units    divides shares by units and returns their sums with units
//   hide_origin(x), opaque(x): x, of an origin that the compiler does not see: it computes what depends on x again, and
//                       holds nothing from before; x itself only the assembler can compute again
//   channel_sum         the sum over the four lanes of a channel
#include "gated/sm90/backward_schedules.cuh"
#include "gated/sm90/growth.cuh"

template <typename T, typename G> struct Args {
  TensorMap q, k, v, do_, g, dq, query_share;            // boxes: a chunk's tokens, 128 bytes each, swizzled
  StridedRows<const T> q_rows, k_rows, v_rows, do_rows;  // the same arrays, for chunks that boxes cannot copy
  StridedRows<const G> g_rows;
  StridedRows<T> dq_rows;
  StridedRows<G> query_share_rows;
  const float *u, *initial, *dht;  // null: GLA; zero; no gradient of the final state
  float *ends, *query_sums, *du, *checkpoints;
  Shape shape;
  double scale;
  i64 P;  // segments of a sequence
  // Only if P = 3: whether each sequence and head has two blocks. One computes segment 0, the other segments 1 and 2 as
  // one; in the second pass one computes 2, the other 0 and 1. So backward_segments.cu summarises only 0 and 2.
  i64 joined;
  i64 adds;  // whether dq is added to what dq holds: its sum over the columns of V that earlier launches had
};

// One chunk. Tile<X, D> (chunk_copies.cuh): the chunk's tokens, D numbers of type X each.
template <typename T, typename G, int BK, int BV> struct alignas(1024) Stage {
  Tile<T, BK> q, k;  // q is overwritten by dq
  Tile<G, BK> g;     // overwritten by query_share
  Tile<T, BV> v, do_;
  FloatTile<BV> float_do;  // do in float32, for products with the state: columns in the order of states.cuh
  Pairs dA;  // dA_ij is at pair_at(dA, i, j) (decays.cuh). RWKV-6: scale do_i . v_i: self_weight_at(dA, i)
};

constexpr int STAGES = 3;       // chunks in shared memory at a time
constexpr int SCORE_WARPS = 3;  // they compute dA
template <int BK> constexpr int CONSUMERS = 2 * BK;
template <int BK> constexpr int THREADS = CONSUMERS<BK> + (SCORE_WARPS + 1) * 32;  // one more warp copies chunks
// Schedule: OneEach or InTurn (backward_schedules.cuh).
template <typename T, typename G, int BK, int BV, class Schedule> struct Shared {
  Stage<T, G, BK, BV> stages[STAGES];
  // InTurn: at(iteration) is where its chunk lies; next() finds it. STAGES + 1: iterations n to n + STAGES are used.
  ChunkPlaces<Schedule, FORWARDS, STAGES + 1> places;
  WorkTile segment;  // OneEach, RWKV-6: the block's
  MBarrier arrived[STAGES], full[STAGES], dA_stored[STAGES], done[STAGES];
};
static_assert(CHUNK == 32 && SCORE_WARPS == 3, "a warp for each 16 x 16 block of dA on or below the diagonal");
static_assert(FLAGS * sizeof(float) >= 128 / 16, "a byte for each of the consumers' warps, which have 16 channels");

// ---- a warp that copies chunks -------------------------------------------------------------------------------------

// Copies every chunk of the block to its stage, and its results from there to memory. `next`: the number of the
// iteration whose inputs are copied, STAGES ahead of `iteration`, whose results are stored; token: the chunk's first
// token, counted from that of `work`.
template <class ReadOrder, typename T, typename G, int BK, int BV, class Schedule>
__device__ __forceinline__ void move_chunks(Shared<T, G, BK, BV, Schedule>& s, const Args<T, G>& args) {
  const i64 K = args.shape.K, V = args.shape.V;
  // store_chunk and fetch_chunk (chunk_copies.cuh) copy rows of a chunk for each f(tile, tensor map, rows, width). All
  // lanes arrive at the barrier of fetch_chunk, whose phase ends when the bytes are there; store_chunk returns when the
  // tiles may be overwritten.
  const auto store = [&](int iteration, const WorkTile& work, int token) {
    Stage<T, G, BK, BV>& out = s.stages[iteration % STAGES];
    store_chunk(work, token, [&](auto f) {
      f(out.q, args.dq, args.dq_rows, K, 0, args.adds);  // 0: the tile's first column
      f(out.g, args.query_share, args.query_share_rows, K);
    });
  };
  const auto fetch_values = [&](int next, const WorkTile& work, int token) {  // copied first, since dA needs them
    Stage<T, G, BK, BV>& stage = s.stages[next % STAGES];
    fetch_chunk(s.arrived[next % STAGES], work, token, [&](auto f) {
      f(stage.do_, args.do_, args.do_rows, V);
      f(stage.v, args.v, args.v_rows, V);
    });
    __syncwarp();  // lanes that fetch_chunk has parted (lane 0 starts copies) go on together; no data depend on it
  };
  const auto fetch_channels = [&](int next, const WorkTile& work, int token) {
    Stage<T, G, BK, BV>& stage = s.stages[next % STAGES];
    fetch_chunk(s.full[next % STAGES], work, token, [&](auto f) {
      f(stage.g, args.g, args.g_rows, K);
      f(stage.k, args.k, args.k_rows, K);
      f(stage.q, args.q, args.q_rows, K);
    });
  };
  const auto wait_for_results = [&](int iteration) {
    wait_for(s.done, iteration);  // results are stored, inputs have been read
    fence_proxy_async();  // orders what consumers did before this warp's copies, and spares them a fence (ptx.cuh)
  };
  if constexpr (Schedule::in_turn) {
    int count = 0;  // of the chunks whose copies have been started
    s.places.begin(args.shape);
#pragma unroll 1
    for (int iteration = -STAGES; iteration < count; ++iteration) {
      if (iteration >= 0) wait_for_results(iteration);
      const int next = iteration + STAGES;
      const bool more = s.places.next(args.shape, next);
      const WorkTile& place = s.places.at(next);
      if (more) fetch_values(next, place, 0), ++count;
      if (iteration >= 0) store(iteration, s.places.at(iteration), 0);
      if (more) fetch_channels(next, place, 0);
      __syncwarp();  // as in fetch_values
    }
  } else {
    const WorkTile segment = segment_of<FORWARDS>(args.shape, args.P, args.joined);
    const WorkTile& work = ReadOrder::reads_before_write ? s.segment : segment;
    const int tokens = segment.tokens;  // unlike s.segment.tokens, the compiler knows that it is equal for all lanes
    if constexpr (ReadOrder::reads_before_write) {
      // The segment is in shared memory: RWKV-6's consumers lack registers, and have fewer if this code takes more.
      if ((threadIdx.x & 31) == 0) s.segment = segment_of<FORWARDS>(args.shape, args.P, args.joined);
      __syncwarp();  // s.segment may be read
    }
#pragma unroll 1
    for (int iteration = -STAGES; iteration * CHUNK < tokens; ++iteration) {
      if (iteration >= 0) wait_for_results(iteration);
      const int next = iteration + STAGES;
      const bool more = next * CHUNK < tokens;
      if (more) fetch_values(next, work, next * CHUNK);
      if (iteration >= 0) store(iteration, work, iteration * CHUNK);
      if (more) fetch_channels(next, work, next * CHUNK);
      __syncwarp();  // as in fetch_values
    }
  }
}

// ---- three warps that make dA ---------------------------------------------------------------------------------------

// The first query and the first key of each of the three 16 x 16 blocks, of 32 x 32 pairs, that have keys up to their
// queries.
__device__ __forceinline__ int queries_of(int block) { return block ? 16 : 0; }
__device__ __forceinline__ int keys_of(int block) { return block == 2 ? 16 : 0; }

// d = block `block` of a b^T [queries, keys], summed over all columns of the panels: d[n] is [16 queries, 8 keys], keys
// 8n on. a, b: the tiles of a chunk's queries and keys, or of what takes their place (do and v).
template <typename T, int PANELS>
__device__ __forceinline__ void pair_products(float (&d)[2][4], T (&a)[PANELS][CHUNK][64], T (&b)[PANELS][CHUNK][64],
                                              int block, int lane) {
#pragma unroll
  for (int i = 0; i < 8; ++i) d[i / 4][i % 4] = 0.f;
  const int query = swizzled_offset(queries_of(block) + (lane & 15), lane >> 4);
  const int key = swizzled_offset(keys_of(block) + (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel)
#pragma unroll
    for (int flip = 0; flip < 128; flip += 32) {  // 16 channels
      u32 x[4], y[4];
      ldmatrix_x4(x, at_byte_offset(a[panel], query ^ flip));
      ldmatrix_x4(y, at_byte_offset(b[panel], key ^ flip));
      mma_m16n8k16(d[0], x, {y[0], y[1]}, T{});
      mma_m16n8k16(d[1], x, {y[2], y[3]}, T{});
    }
}

// Makes dA and float_do for the chunks of a segment of `tokens` tokens. chunks_before: how many chunks of other
// segments this block has computed before; block: the warp's number, 0 to 2, which is also its 16 x 16 block of dA.
template <class ReadOrder, typename T, typename G, int BK, int BV, class Schedule>
__device__ __forceinline__ void make_dA(Shared<T, G, BK, BV, Schedule>& s, int tokens, int chunks_before, float scale,
                                        int block, int lane) {
#pragma unroll 1
  for (int iteration = chunks_before; (iteration - chunks_before) * CHUNK < tokens; ++iteration) {
    // Hides where `lane` comes from: addresses are computed again, which is cheaper than to hold them in registers.
    hide_origin(lane);
    Stage<T, G, BK, BV>& in = s.stages[iteration % STAGES];
    // Also means that consumers have read dA and float_do of this stage's previous chunk, which are overwritten below:
    // v and do were copied only after the consumers had arrived at `done`.
    wait_for(s.arrived, iteration);  // v and do are in shared memory
    // products[n]: do . v of the block's 16 queries and of its keys 8n to 8n + 7, as accumulators [query, key]: [2 half
    // + j] is query lane / 4 + 8 half, key 2 (lane % 4) + j.
    float products[2][4];
    pair_products(products, in.do_, in.v, block, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = queries_of(block) + (lane >> 2) + 8 * half, key = keys_of(block) + 2 * (lane & 3);
      const QueryRow<ReadOrder> row(in.dA, query, key, scale);
#pragma unroll
      for (int n = 0; n < 2; ++n) row.put(n, products[n][2 * half], products[n][2 * half + 1]);
    }
    put_float_tile<SCORE_WARPS, T, BV>(in.float_do, in.do_, block, lane);
    fence_proxy_async();
    mbarrier_arrive(s.dA_stored[iteration % STAGES]);
  }
}

// ---- warpgroups with 64 channels each -------------------------------------------------------------------------------

// Lane 4 g + t of a warp, t < 4, has the channels g and g + 8 of the warp's 16. Its numbers of a chunk are a LaneChunk
// (decays.cuh): [n][2h + p] is sub-chunk n of 8 tokens, channel g + 8h, token 2t + p. Operands hold the same numbers,
// two tokens in a register (token_pair_of).

// A lane's results of a chunk. query_share holds terms of single tokens first, and after the sum over tokens
// query_share_t. With query_term_i = q_i (sum_j dA_ij D_ij k_j + from_state_i) and key_term_j = k_j sum_i dA_ij D_ij
// q_i the term of token i is query_term_i - key_term_i in GLA. In RWKV-6 it is query_term_i, and key_term_i is in
// key_terms: there query_share_t is the sum of query_term over tokens from t + 1 on less that of key_term over tokens
// from t on.
struct Gradients {
  LaneChunk dq, query_share, key_terms;
};

// A lane's inputs of a chunk.
template <typename T, typename G> struct TokenOperands {
  LaneGates<G> gates;
  Operand queries, keys;

  // CLAMPED: a gate below LEAST_GATE is loaded as LEAST_GATE. Such gates serve for decays within sub-chunks only.
  template <bool CLAMPED>
  __device__ __forceinline__ void load(G (*g)[CHUNK][PANEL<G>], T (&q)[CHUNK][64], T (&k)[CHUNK][64], int offset) {
    gates.template load<CLAMPED>(g, offset);
    load_operand(queries, q, offset);
    load_operand(keys, k, offset);
  }
};
// When a lane loads the TokenOperands of a chunk. It depends on how many registers are free: SPILLED in test_compile
// shows what another choice spills.
//   ONCE    at the end of the previous chunk; registers hold them until their last use
//   EARLY   at the end of the previous chunk, with clamped gates, for pairs within sub-chunks; then again for all else
//   LATE    as EARLY, but the first time at the start of the chunk itself
enum Loads { ONCE, EARLY, LATE };
template <class ReadOrder, typename G, int BV>
constexpr Loads LOADS = sizeof(G) == 4                  ? LATE
                        : BV == 64                      ? ONCE
                        : ReadOrder::reads_before_write ? EARLY
                                                        : LATE;

// Sets `results` to the terms of pairs within sub-chunks, and adds their terms to du. CLAMPED: gates were loaded so;
// counts: which gates the sum for each decay has (GateCounts); dA_reader reads `pairs`, the chunk's dA; u, du: those
// of this lane's two channels.
template <bool CLAMPED, class ReadOrder, typename T, typename G>
__device__ __forceinline__ void set_pairs_within(Gradients& results, const TokenOperands<T, G>& tokens,
                                                 const GateCounts<ReadOrder, G>& counts, const PairReader& dA_reader,
                                                 Pairs& pairs, const float (&u)[2], float (&du)[2]) {
#pragma unroll
  for (int n = 0; n < NUM_SUBCHUNKS; ++n) {
    // queries, keys: these tokens times their factors about the sub-chunk's middle (decays.cuh). over_keys: for each
    // query i the sum over j of dA_ij times these keys, without i's factor. over_queries: for each key j the sum over i
    // of dA_ij times these queries, without j's factor.
    LaneSubChunk queries, keys, query_decays, key_decays, over_keys = {}, over_queries = {};
    float self_terms[4] = {};  // RWKV-6: dq's terms of tokens with themselves
    const float2 self_weight = ReadOrder::reads_before_write ? self_weights(pairs, n) : float2{};
    const auto add_self_pair = [&](int i, float q, float k) {  // i: 2h + p
      if (!ReadOrder::reads_before_write) return;
      const float weighted_key = (i % 2 ? self_weight.y : self_weight.x) * k;
      du[i / 2] = fmaf(q, weighted_key, du[i / 2]);
      self_terms[i] = u[i / 2] * weighted_key;
    };
    decays_from_middle<CLAMPED>(query_decays, key_decays, tokens.gates, counts, n);
    decay_within<AS_MULTIPLIED, T>(queries, keys, query_decays, key_decays, tokens.queries, tokens.keys, n,
                                   add_self_pair);
    dA_reader.add_keys(over_keys, keys, n, n);
    dA_reader.add_queries(over_queries, queries, n, n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float key_term = keys[i] * over_queries[i];
      results.dq[n][i] = fmaf(query_decays[i], over_keys[i], self_terms[i]);
      if (ReadOrder::reads_before_write) results.key_terms[n][i] = key_term;
      results.query_share[n][i] =
          ReadOrder::reads_before_write ? queries[i] * over_keys[i] : fmaf(queries[i], over_keys[i], -key_term);
    }
  }
  __syncwarp();  // keeps the compiler from mixing this with what follows, for which registers are too few
}

// A chunk's keys after their decays, and what products with them give.
template <typename T> struct DecayedKeys {
  SubChunkDecays decays;   // over each sub-chunk
  Across across;           // decayed to borders between sub-chunks
  Across over_keys = {};   // for the queries that are paired with these keys: sums over keys of dA_ij times these
  StateOperand<T> to_end;  // decayed to the chunk's end
};
// by8[x] of an Across has the queries of sub-chunk 2x + 1, or the keys of 2x, with which these are paired: both decayed
// to the border between them. by16[x] has the queries of 2 + x, or the keys of x: queries of 2 and of 3 are paired with
// keys of 0 and of 1. They are decayed to the chunk's middle, queries of 3 also over 2, keys of 0 also over 1; sums of
// pairs lack the decays of the query or key that they are for.

// Sets `keys`. Returns whether the chunk must be computed token by token: exceeds_growth (growth.cuh), a vote of the
// warp. LOADS_AGAIN: loads gates and keys again, each where it is needed.
template <bool LOADS_AGAIN, class ReadOrder, typename T, typename G>
__device__ __forceinline__ bool decay_keys_of_chunk(DecayedKeys<T>& keys, TokenOperands<T, G>& tokens,
                                                    G (*g)[CHUNK][PANEL<G>], T (&k)[CHUNK][64],
                                                    const GateCounts<ReadOrder, G>& counts, const PairReader& dA_reader,
                                                    int offset) {
  LaneChunk to_end_of_subchunk;
  if (LOADS_AGAIN) tokens.gates.load(g, offset);
  const bool by_token = exceeds_growth<T>(tokens.gates, g);
  decays_of(keys.decays, tokens.gates);
  if (LOADS_AGAIN) load_operand(tokens.keys, k, offset);
  decays_to_end(to_end_of_subchunk, tokens.gates, counts);
  decay_keys<AS_MULTIPLIED, T>(keys.across, tokens.keys, to_end_of_subchunk, keys.decays,
                               [&](auto... x) { keys.to_end.put(x...); });
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    dA_reader.add_keys(keys.over_keys.by8[x], keys.across.by8[x], 2 * x + 1, 2 * x);
    dA_reader.add_keys(keys.over_keys.by16[x], keys.across.by16[0], 2 + x, 0);
    dA_reader.add_keys(keys.over_keys.by16[x], keys.across.by16[1], 2 + x, 1);
  }
  return by_token;
}

// Adds to `results` the terms of pairs across sub-chunks and of the state. from_state: S do, without the factors scale
// and E_i. LOADS_AGAIN: loads queries again.
template <bool LOADS_AGAIN, class ReadOrder, typename T, typename G>
__device__ __forceinline__ void add_pairs_across(Gradients& results, TokenOperands<T, G>& tokens,
                                                 const DecayedKeys<T>& keys, const Values& from_state,
                                                 T (&q)[CHUNK][64], const GateCounts<ReadOrder, G>& counts,
                                                 const PairReader& dA_reader, float scale, int offset) {
  Across queries_across;
  LaneChunk outer_decays;  // of queries from their sub-chunk's start
  if (LOADS_AGAIN) load_operand(tokens.queries, q, offset);
  decays_from_start(outer_decays, tokens.gates, counts);
  // The second pass multiplies queries, rounded to T, by do and adds the products to dS. If T is float16 and the first
  // gate of GLA's chunk is strong, it first multiplies the queries by a power of 2, `up`, for float16's range; `down`
  // is the inverse. The same rounded values are taken here: whoever changes the rounding, there (queries.put in
  // backward_keys.cu) or here, changes both, else terms of dg that should cancel do not.
  const QueryScale query_scale = scale_of_queries<ReadOrder, T>(outer_decays);
  decay_queries<AS_MULTIPLIED, T>(
      queries_across, tokens.queries, outer_decays, keys.decays, {scale * query_scale.up[0], scale * query_scale.up[1]},
      [&](int n, int h, float x, float y) {
        const float2 rounded = state_values<T>(x, y);
        const int i = 2 * h;
        results.query_share[n][i] =
            fmaf(query_scale.down[h] * rounded.x, from_state[4 * n + i], results.query_share[n][i]);
        results.query_share[n][i + 1] =
            fmaf(query_scale.down[h] * rounded.y, from_state[4 * n + i + 1], results.query_share[n][i + 1]);
      });
#pragma unroll
  for (int x = 0; x < 2; ++x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      results.query_share[2 * x + 1][i] =
          fmaf(queries_across.by8[x][i], keys.over_keys.by8[x][i], results.query_share[2 * x + 1][i]);
      results.query_share[2 + x][i] =
          fmaf(queries_across.by16[x][i], keys.over_keys.by16[x][i], results.query_share[2 + x][i]);
    }
  }
  each_token_pair([&](int n, int h) {
    const float factor = scale * keys.decays.before(n, h);  // `before`: the decay over all sub-chunks before n
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int i = 2 * h + p;
      const float state_sum = from_state[4 * n + i];
      float at_start = factor * state_sum;  // dq's terms without the decay from the sub-chunk's start
      if (n % 2) at_start += keys.over_keys.by8[n / 2][i];
      if (n == 2) at_start += keys.over_keys.by16[0][i];
      if (n == 3) at_start += keys.decays.sub[2][h] * keys.over_keys.by16[1][i];
      results.dq[n][i] = fmaf(outer_decays[n][i], at_start, results.dq[n][i]);
    }
  });
  // Takes a key's term off the share: key times its sum over queries, of sub-chunk n and the lane's number i = 2h + p.
  // RWKV-6: adds it to key_terms, which sum_later_tokens subtracts.
  const auto take_off_share = [&](int n, int i, float key, float over_queries) {
    if (ReadOrder::reads_before_write) results.key_terms[n][i] = fmaf(key, over_queries, results.key_terms[n][i]);
    else results.query_share[n][i] = fmaf(-key, over_queries, results.query_share[n][i]);
  };
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    LaneSubChunk by8 = {}, by16 = {};
    dA_reader.add_queries(by8, queries_across.by8[x], 2 * x + 1, 2 * x);
    dA_reader.add_queries(by16, queries_across.by16[0], 2, x);
    dA_reader.add_queries(by16, queries_across.by16[1], 3, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      take_off_share(2 * x, i, keys.across.by8[x][i], by8[i]);
      take_off_share(x, i, keys.across.by16[x][i], by16[i]);
    }
  }
  __syncwarp();  // keeps the compiler from mixing this with what follows, for which registers are too few
}

// RWKV-6: query_terms_t <- sum_{i>t} query_terms_i - sum_{j>=t} key_terms_j over tokens of the chunk. all[h]: the sum
// over all tokens of query_terms - key_terms, of the lane's channel h.
__device__ __forceinline__ void sum_later_tokens(LaneChunk& query_terms, const LaneChunk& key_terms, float (&all)[2]) {
  // Of the four lanes of a channel, lane t has tokens 2t and 2t + 1 of a sub-chunk. Its neighbour is lane t ^ 1; the
  // others are the other two lanes.
  const int t = opaque(threadIdx.x) & 3;
  const bool neighbour_is_later = t % 2 == 0, others_are_later = t / 2 == 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    all[h] = 0.f;
#pragma unroll
    for (int n = NUM_SUBCHUNKS - 1; n >= 0; --n) {
      // The difference of the sums of the lane's two tokens: the first token's less the second's.
      const float between = query_terms[n][2 * h + 1] - key_terms[n][2 * h];
      const float lane_sum = between + (query_terms[n][2 * h] - key_terms[n][2 * h + 1]);
      const float neighbour = __shfl_xor_sync(0xffffffffu, lane_sum, 1), sum_of_two = lane_sum + neighbour;
      const float others = __shfl_xor_sync(0xffffffffu, sum_of_two, 2);
      float after = all[h] - key_terms[n][2 * h + 1];
      if (neighbour_is_later) after += neighbour;
      if (others_are_later) after += others;
      all[h] += sum_of_two + others;
      query_terms[n][2 * h] = after + between, query_terms[n][2 * h + 1] = after;
    }
  }
}

// After a segment's last chunk: stores `ends`, the sums over V of S, the last state, times dht; and du, of this lane's
// two channels. channel: the first of them.
template <class ReadOrder, int BV, class Args>
__device__ __forceinline__ void store_ends(float (&S)[BV / 2], const float (&du)[2], const Args& args,
                                           const Segment& segment, int channel) {
  const i64 K = args.shape.K;
  float end_terms[2] = {};  // this lane's terms of sum_v S dht
  // Whether a block of the second pass, which goes backwards, starts at the end of this block's tokens.
  const bool stores_end = args.dht && (!args.joined || segment.last_sequence_head != segment.sequence_head);
  if (stores_end)
    each_pair_of_state<BV, HAS_FULL_PATH>(S, args.dht + segment.last_sequence_head * K * args.shape.V, args.shape,
                                          channel, [&](float& x, float& y, const float* from) {
                                            const float2 two = *reinterpret_cast<const float2*>(from);
                                            // S[4n + 2h] and S[4n + 2h + 1] are of channel h; x is a number of S.
                                            end_terms[&x - S >> 1 & 1] += x * two.x + y * two.y;
                                          });
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float end_sum = channel_sum(end_terms[h]), du_sum = channel_sum(du[h]);
    if (threadIdx.x % 4 || channel + 8 * h >= K) continue;
    if (stores_end) args.ends[segment.last_sequence_head * K + channel + 8 * h] = end_sum;
    if (!ReadOrder::reads_before_write) continue;
    // Of joined segments the first gets the terms of both.
    if (segment.last_sequence_head != segment.sequence_head)
      args.du[segment.last_sequence_head * K + channel + 8 * h] = 0.f;
    args.du[segment.sequence_head * K + channel + 8 * h] = du_sum;
  }
}

// Computes a segment, or two that are joined. segment.sequence_head and segment.last_sequence_head: the indices of the
// first and of the last of them in initial, dht, ends and du, equal for one segment; segment.chunk_row: that of its
// first chunk in query_sums. chunks_before: how many chunks of other segments this block has computed before.
template <class ReadOrder, typename T, typename G, int BK, int BV, class Schedule>
__device__ __forceinline__ void consume(Shared<T, G, BK, BV, Schedule>& s, const Args<T, G>& args,
                                        const Segment& segment, int chunks_before) {
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x & 31, t = lane & 3, tokens = segment.tokens;
  const int checkpoint = first_checkpoint(args.shape, segment);
  constexpr Loads LOADS = ::LOADS<ReadOrder, G, BV>;
  constexpr bool LOADS_AGAIN = LOADS != ONCE;  // the first gates are then clamped, for pairs within sub-chunks alone
  // With float16 data and gates and 128 columns, registers are too few to hold a lane's offsets: after `opaque` the
  // assembler may compute them again, after in_register it cannot.
  constexpr bool HOLDS_OFFSETS = !(IS_FLOAT16<T> && sizeof(G) == 2 && BV == 128);
  const auto held = [](int x) { return HOLDS_OFFSETS ? in_register(x) : opaque(x); };
  const int channel = threadIdx.x / 32 * 16 + (lane >> 2), offset = held(ldmatrix_offset());
  const i64 K = args.shape.K, state = segment.sequence_head * K * args.shape.V;
  const float scale = __uint_as_float(opaque(__float_as_uint(float(args.scale))));  // `opaque`: converted only once
  const bool inside[2] = {channel < K, channel + 8 < K};
  const GateCounts<ReadOrder, G> counts;
  // Where the lane's numbers of dA's first 8 x 8 lie, for sums over keys and for sums over queries (PairReader).
  const int keys_index = held(pair_index(lane >> 2, 2 * t)), queries_index = held(pair_index(2 * t, lane >> 2));

  // query_sums: the row of the chunk that is being computed, at this lane's first channel
  float S[BV / 2], u[2] = {}, du[2] = {}, *query_sums = args.query_sums + segment.chunk_row * (K + FLAGS) + channel;
  load_state<BV>(S, args.initial ? args.initial + state : nullptr, args.shape, channel);
  if (ReadOrder::reads_before_write)
    for (int h = 0; h < 2; ++h)
      if (inside[h]) u[h] = args.u[segment.head * K + channel + 8 * h];

  Values from_state;
  TokenOperands<T, G> operands;
  const auto has_chunk = [&](int iteration) { return (iteration - chunks_before) * CHUNK < tokens; };
  const auto load_for_pairs_within = [&](Stage<T, G, BK, BV>& in) {
    operands.template load<LOADS_AGAIN>(warpgroup_panels(in.g, warpgroup), in.q[warpgroup], in.k[warpgroup], offset);
  };
  // Starts the product S do of a chunk; unless LATE, loads its inputs. What it does after the last chunk is not used.
  const auto start_chunk = [&](int iteration) {
    if (has_chunk(iteration)) wait_for(s.dA_stored, iteration);  // dA and float_do are stored
    Stage<T, G, BK, BV>& in = s.stages[iteration % STAGES];
    start_state_read<BV>(from_state, S, in.float_do);
    if (has_chunk(iteration)) wait_for(s.full, iteration);  // q, k and g are in shared memory
    if (LOADS != LATE) load_for_pairs_within(in);
  };
  if (!Schedule::in_turn || tokens)
    start_chunk(chunks_before);  // InTurn: an empty segment has no stage, another's chunk may be on its way there
#pragma unroll 1
  for (int iteration = chunks_before; has_chunk(iteration); ++iteration, query_sums += K + FLAGS) {
    Stage<T, G, BK, BV>& in = s.stages[iteration % STAGES];
    Gradients results;
    DecayedKeys<T> keys;
    const PairReader dA_reader(in.dA, keys_index, queries_index);
    // Stores the warp's byte of query_sums: whether the second pass computes the chunk token by token. One lane stores:
    // `value` is a vote of the warp (exceeds_growth, exceeds_float16), and so the same for all lanes.
    const auto set_flag = [&](bool value) {
      if (lane == 0) reinterpret_cast<bool*>(query_sums - channel + K)[threadIdx.x / 32] = value;
    };
    if (LOADS == LATE) load_for_pairs_within(in);
    wgmma_wait<0>();  // from_state, which start_chunk computes, is complete; start_state_write below may change S
    wgmma_fence_operand(from_state);
    set_pairs_within<LOADS_AGAIN, ReadOrder>(results, operands, counts, dA_reader, in.dA, u, du);
    const bool by_token = decay_keys_of_chunk<LOADS_AGAIN, ReadOrder>(keys, operands, warpgroup_panels(in.g, warpgroup),
                                                                      in.k[warpgroup], counts, dA_reader, offset);
    // If by_token, the rest of this function computes infinite or NaN numbers for the chunk, which are not used. Its
    // terms of du, which have no decays, are.
    if (by_token) {
      compute_queries_by_token<ReadOrder, T, G, BV>(S, query_sums, inside, in, u, scale);
      // S is now the state after the chunk: by decays of 1 and keys of 0 the write below leaves it as it is.
      each_token_pair([&](int n, int h) { keys.to_end.put(n, h, 0.f, 0.f), keys.decays.sub[n][h] = 1.f; });
    }
    set_flag(by_token);
    decay_state<BV>(S, keys.decays);
    wgmma_fence();
    start_state_write<T, BV>(S, keys.to_end, in.v);  // runs beside what follows, until the next wgmma_wait
    wgmma_commit();
    add_pairs_across<LOADS_AGAIN, ReadOrder>(results, operands, keys, from_state, in.q[warpgroup], counts, dA_reader,
                                             scale, offset);

    // Of the lane's two channels sum_i q_i from_state_i: the sum over all tokens of query_term - key_term, in which the
    // two terms of each pair of the chunk cancel.
    float sum[2];  // neither `sum` nor `unit` is set, or read, if by_token
    u32 unit[2];   // IN_UNITS, which is G bfloat16, alone: the exponents of the units; see query_share.cuh
    if (!by_token) {
      if constexpr (IN_UNITS<G>) {
        float size[2] = {};
        add_sizes(size, results.query_share);
        if (ReadOrder::reads_before_write) add_sizes(size, results.key_terms);
        units_for(unit, size);
      }
      if (ReadOrder::reads_before_write) sum_later_tokens(results.query_share, results.key_terms, sum);
      else sum_tokens_by_shuffles<FROM_TOKEN_ON>(results.query_share, sum);
      // G float16: a share beyond float16's range is stored in units, whose exponents convert_to_units puts into `sum`.
      // Only the second pass's code for chunks token by token reads it: hence the flag, though no gates grow.
      if (IS_FLOAT16<G> && exceeds_float16(results.query_share)) {
        convert_to_units(results.query_share, sum);
        set_flag(true);
      }
      __syncwarp();  // all lanes have read the warp's channels of q and g
      store_chunk_values(&in.q[warpgroup], results.dq, offset);
      store_query_share(warpgroup_panels(in.g, warpgroup), results.query_share, unit, offset);
    }
    wgmma_wait<0>();  // S is the state after this chunk
    wgmma_fence_operand(S);
    // After the last chunk InTurn reads this stage again, since another segment may be copied to the next one just now.
    // That product's result is not used: float_do may change while it runs.
    start_chunk(iteration + (!Schedule::in_turn || has_chunk(iteration + 1)));
    mbarrier_arrive(s.done[iteration % STAGES]);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (!by_token && t == 0 && inside[h]) query_sums[8 * h] = IN_UNITS<G> ? sum_with_unit(sum[h], unit[h]) : sum[h];
    const int next = (iteration + 1 - chunks_before) * CHUNK;
    if (next % CHECKPOINT_EVERY == 0 && (next < tokens || args.joined)) {
      // The state before the segment's token `next`. joined: also the one after segment 0, which lies in the middle of
      // a block of the second pass; segments then start on multiples of CHECKPOINT_EVERY (segments.short_segment).
      float4* to = checkpoint_at<BK, BV>(args.checkpoints, checkpoint + next / CHECKPOINT_EVERY);
#pragma unroll
      for (int n = 0; n < BV / 8; ++n) to[n * 2 * BK] = {S[4 * n], S[4 * n + 1], S[4 * n + 2], S[4 * n + 3]};
    }
  }

  wgmma_wait<0>();  // start_chunk's last product, whose registers are free only then
  wgmma_fence_operand(from_state);
  store_ends<ReadOrder, BV>(S, du, args, segment, channel);
}

// T: the type of q, k, v and do; G: the gates' type, T or float; Schedule: OneEach or InTurn.
template <class ReadOrder, typename T, typename G, int BK, int BV, class Schedule>
__global__ void __launch_bounds__(THREADS<BK>, BK + BV == 128 ? 2 : 1)
    gated_sm90_backward_queries(const __grid_constant__ Args<T, G> args) {
  auto& s = *reinterpret_cast<Shared<T, G, BK, BV, Schedule>*>(dynamic_smem());
  if (threadIdx.x == 0)
    for (int stage = 0; stage < STAGES; ++stage) {  // each thread that is counted here arrives once for every chunk
      mbarrier_init(s.arrived[stage], 32);
      mbarrier_init(s.full[stage], 32);
      mbarrier_init(s.dA_stored[stage], SCORE_WARPS * 32);
      mbarrier_init(s.done[stage], CONSUMERS<BK>);
    }
  fence_proxy_async();
  __syncthreads();  // barriers are initialised
  // Registers of a consumer and of another thread. A multiprocessor has 65536, 512 for each of 128 threads: so those of
  // one thread of every warpgroup of its blocks add up to at most 512. If BK = 64 and BV = 128 one block of two
  // warpgroups is alone, and needs no change.
  constexpr bool FEW_REGISTERS = BK == 128 || BV == 64;
  constexpr int BLOCKS = BK + BV == 128 ? 2 : 1, MORE = BK == 64 ? 216 : 232, LESS = 40;
  static_assert(BLOCKS * (BK / 64 * MORE + LESS) <= 512);
  if (threadIdx.x < CONSUMERS<BK>) {
    if constexpr (FEW_REGISTERS) registers_up<MORE>();
    each_segment<Schedule, FORWARDS>(
        args, [&](const Segment& segment, int chunks_before) { consume<ReadOrder>(s, args, segment, chunks_before); });
    return;
  }
  if constexpr (FEW_REGISTERS) registers_down<LESS>();
  const int warp = (threadIdx.x - CONSUMERS<BK>) / 32;
  if (warp == SCORE_WARPS) return move_chunks<ReadOrder>(s, args);
  each_segment<Schedule, FORWARDS>(args, [&](const Segment& segment, int chunks_before) {
    make_dA<ReadOrder>(s, segment.tokens, chunks_before, float(args.scale), warp, threadIdx.x & 31);
  });
}
