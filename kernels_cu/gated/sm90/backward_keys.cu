// what      GLA and RWKV-6 backward on Hopper, second pass: backwards in time, with the gradient dS [K, V] of the state
//           S in registers. Computes dk, dv, the gradient dg of the log gates, and the initial state's gradient dh0.
// modes     P is the number of segments of a sequence.
//           ReadOrder         template: AfterWrite, GLA, or BeforeWrite, RWKV-6 (reads_before_write)
//           OneEach, InTurn   template: a block computes one segment, or whole sequences (P = 1), one after the other
//           joined            of a launch, OneEach with P = 3 only: half of the blocks have segments 0 and 1, as one,
//                             the others segment 2 (backward_schedules.cuh)
//           BK = 64, 128      consumers make dv, or a warpgroup of its own does (HAS_SCORE_WARPGROUP)
//           by_token          of a chunk, alike in all threads of the block: it is computed token by token
//                             (growth.cuh), since the first pass has set a flag (gates too far above 0), or dS is too
//                             large for float16 data
// math      per chunk of 32 tokens in four sub-chunks of 8, dS being the gradient of the state S' after it and S the
//           state before it. Decays [K] are e^(sum of log gates g): D over all gates of the chunk, D_ij over gates j +
//           1 to i, E_i over those up to i, L_j over those after j. RWKV-6: D_ij and E_i end with gate i - 1.
//           A_ij = scale q_i . D_ij k_j, dA_ij = scale do_i . v_j for j <= i (RWKV-6: j < i, A_ii = scale q_i . u k_i)
//           dk_j = sum_i dA_ij D_ij q_i + L_j dS v_j (RWKV-6: + u q_j scale do_j . v_j)
//           dv_j = sum_i A_ij do_i + (L_j k_j) dS
//           dg_t = query_share_t + sum_{j<t} k_j L_j dS v_j + D sum_v S dS, where backward_queries.cu has computed
//           query_share_t = sum_{j<t<=i} q_i dA_ij D_ij k_j + sum_{i>=t} q_i scale E_i S do_i (RWKV-6: i > t)
//           D sum_v S dS = c - sum_j k_j L_j dS v_j, with c = sum_v S' dS, which is carried from chunk to chunk: for
//           the chunk before, c <- D sum_v S dS + query_sums
//           dS <- D dS + scale sum_i E_i q_i do_i^T
// shapes    q k g query_share dk dg [B, H, T, K], v do dv [B, H, T, V], u [H, K]; dht [N P, H, K, V], the gradients of
//           the states at the ends of segments; dh0 [N, H, K, V]. Float32: u, dht, dh0. From backward_queries.cu:
//             query_share   in dg's memory, which dg overwrites. With `adds` it is an array of its own, and results are
//                           added to what dk and dg hold; with `adds_dv` dv is added to what dv holds
//             query_sums    [B, H, chunks, K + FLAGS]: for each channel sum_i q_i scale E_i S do_i. Then the memory of
//                           FLAGS = 2 floats, in which each warp of consumers has a byte (WarpFlags): 1 if the chunk is
//                           by_token because of the warp's channels. query_share may be stored divided by a power of 2,
//                           its unit: then the 9 lowest bits of the sum are the unit's exponent (query_share.cuh)
//             ends          [N P, H, K], c of a segment's last chunk
//             checkpoints   the states S before every CHECKPOINT_EVERY-th token (states.cuh)
// grid      a block for every segment of a sequence and head (OneEach), or for several whole sequences (InTurn):
//           backward_schedules.cuh. Warpgroups: one for every 64 channels (consumers); if BK = 128, one that makes A
//           and dv; last, one that makes dA and copies chunks. If BK = 64, the last one makes A, too, and the consumers
//           make dv. BK and BV: K and V rounded up to 64 or 128
// barriers  mbarriers, defined in backward_keys_storage.cuh. A chunk's way, in time, and the barriers that end steps:
//           last warpgroup   copies q, k, g, query_share (full), v and do (arrived); makes dA and, if TF32_READ,
//                            float_v, a float32 copy of v, after the previous chunk's `operands` (dA_stored)
//           consumers        wait for full, dA_stored; store decayed queries and keys, and dS for dv (operands)
//           makers of A      wait for operands; read queries and keys within sub-chunks (within); store A (scores); if
//                            BK = 128: store dv over v (done)
//           consumers        wait for within; store dk over q, dg over g; if BK = 64: wait for scores, store dv over v
//                            (done)
//           last warpgroup   waits for done; copies the results to memory, and the next chunk to their place
//           Iterations of a block count the chunks of all its segments; an iteration's stage is its number modulo
//           STAGES, or VALUE_STAGES, and it waits for phase (number / stages) of that stage's barriers. `operands`,
//           `within` and `scores` have one stage: their phase is the iteration. Every thread that arrives at a barrier
//           (a comment in the kernel counts them) does so once for each chunk, by_token or not; else the block hangs
// smem      Who writes and who reads each array, and why the next write is safe; i is an iteration:
//           q, k, g, query_share   Copied; read by consumers. put_within overwrites q and g once all of the warpgroup,
//                                  for float16 all consumers, have read them (named barriers). Decayed keys overwrite
//                                  k without a barrier: a warp reads and writes its own channels alone. dk and dg
//                                  overwrite q and g after `within`. The next copies come after `done` (store)
//           v, do                  Copied; read by the last warpgroup before dA_stored, by consumers. v has been read
//                                  at `operands`: dv overwrites it. The next copies come after `done` (store)
//           dA                     By the last warpgroup; read by consumers. Written again after `done`, as v is there
//           float_v                By the last warpgroup, of i + 1 after `operands` of i: consumers have read it then
//           keys_within,           By consumers; makers of A have read them at `within`, for which consumers wait
//           self_scores            before they end i
//           by8, by16, dS          By consumers; by8 and by16 are read for A, dS and the decayed keys for dv. In i + 1
//                                  consumers write after `done` of i (wait_for_dv) if BK = 128. If BK = 64 they have
//                                  waited for `scores` of i, made dv themselves, and passed a named barrier
//           A                      By makers of A, in i + 1 after `operands`, where all consumers arrive after dv of i
//                                  is complete, as the row above says
//           largest, flags,        Two rows, for even and odd i. The comments at the writes say why two are enough
//           query_sums
// order     What compute_chunk, in `consume`, must keep, and which test fails where it does not (the emulator computes
//           a product when it is waited for; test_compile finds operands that are overwritten before):
//             q and g are read before put_within overwrites them           test_gradient_kernels
//             s.dS and the product with v take dS before it is decayed     test_gradient_kernels, test_compile
//             dS times `up`, a power of 2, is multiplied by its inverse    test_gradient_kernels, test_large_values
//             `down` before anybody else reads it
//             dk and dg are stored after the wait for `within`             test_gradient_kernels
//             kept_ratio (numerics) is 2^-7 after a chunk by_token         test_growth
//           Other orders change registers and latencies alone: test_compile fails where a kernel spills more
// numerics  A and dA are tf32; dS: states.cuh. c [K] is carried from chunk to chunk, and computed anew from stored
//           states. In a channel with D < 2^-20 D sum_v S dS is nearly all rounding error: it is set to 0 (is_forgotten
//           in growth.cuh) unless it is larger than kept_ratio c. kept_ratio is infinite; it is 2^-7 (ROUNDING) after
//           the segment's first chunk by_token, or from the start if a later segment has a flag: growth may have made
//           dS so large that it counts
// source    Yang et al., 2024, section 4.4; Peng et al., 2024, eq. 18-19
// limits    sm_90a; bfloat16, float16; K <= BK, V <= BV, multiples of 8; BK and BV of 64, 128; rows start on 16 bytes
// instances, tests  those of backward_queries.cu
//
// From warpgroup.cuh and its includes
//   Tile<X, D>          D numbers of type X of each of the chunk's tokens
//   Values, Operand     accumulators [channel, token] of a chunk; the same numbers in 16 bits
//   warpgroup_panels    a tile's panels of the warpgroup's channels; each_pair_of_state: calls f for numbers of a state
//   k_major_tile        wgmma's descriptor of a tile; wgmma_fence_operand(d): d is not read before it
// From decays.cuh
//   each_token_pair     calls f(sub-chunk n, channel h) for the lane's pairs of tokens; token_pair_of finds a pair in
//                       an Operand
//   LaneChunk           numbers [n][2h + p] of a lane: sub-chunk n, its channel h, the pair's token p
//   LaneGates           a lane's gates as left operands [channel, 16 depths] of products that sum gates times counts: a
//                       sub-chunk's 8 gates are depths 0 to 7 and again 8 to 15. Gates of 16 bits are the same twice,
//                       and the counts of both halves add up to log2 e; of float32 gates the second half has what
//                       rounding the first to 16 bits has lost. SECOND_NEGATED: depths 8 to 15 are negated, of gates
//                       and of counts, so that the sum stays the same. Else the operand would have equal registers,
//                       which the compiler would copy for each product
//   GateCounts          these counts, right operands [16 depths, token]: how often the exponent of a token's decay has
//                       each gate. Decays within a sub-chunk are measured from its middle: in RWKV-6 the border before
//                       token 4, in GLA halfway through the gate of token 4. A gate counts 1 between the middle and a
//                       later token, -1 between an earlier token and the middle, gate 4 of GLA 1/2 or -1/2, others 0
//   decays_from_*, decays_to_end: decays of tokens; decay_within, decay_queries, decay_keys: tokens times decays
//                       (IN_FULL: not cut off to tf32); SubChunkDecays: sub[n] over sub-chunk n, after(n) from its end
//                       to the chunk's end, all over the chunk
//   LaneSubChunk        one sub-chunk's four numbers of a LaneChunk, [2h + p]
//   Across              operands, or sums, of pairs of tokens in different sub-chunks. by8[x]: queries of sub-chunk
//                       2x + 1, keys of 2x; by16[x]: queries of 2 + x, keys of x
//   PairReader          add_queries(sum, queries, n, m): adds to the sums of keys of sub-chunk m the queries of
//                       sub-chunk n times dA
//   QueryRow            stores dA of a query and pairs of keys; rounded_to_tf32(x): as A and dA are stored
//   self_weights        RWKV-6: scale do_i . v_i of the lane's two tokens of a sub-chunk, from dA
//   load_operand, store_operand, store_chunk_values: move a warp's 16 of a panel's 64 channels
// From states.cuh
//   put_float_tile<warps>: a tile in float32; start_state_read_part, start_state_write start products that read dS or
//     add to it; largest_of<BV>(dS): the largest magnitude of the warp's part of dS
//   Scale {up, down}, of scale_to_float16; QueryScale, of scale_of_queries, for each of the lane's two channels: powers
//     of 2, `up` and its inverse `down`; QueryScale's `up` is at most 2^MOST_UP
//   StateOperand        decayed queries as start_state_write takes them; put(n, h, x, y): the lane's tokens x and y
//   state_values        keys, rounded as they are in a product with a state
//   scale_state, decay_state: a state times factors of channels, times decays; sum_tokens_by_shuffles,
//     sum_earlier_tokens: sums over the tokens before each (BEFORE_TOKEN), by shuffles or on tensor cores, and over all
//   checkpoint_at       where a stored state is; first_checkpoint: the number of the state before a segment's token 0
// From backward_schedules.cuh
//   WorkTile            a segment of a head: `sequence`, the segment's number, of P for each sequence; head; tokens;
//                       chunk_row, the row of query_sums of its first chunk; sequence_head = sequence * H + head
//   Segment, segment_of<BACKWARDS>, segment_at, each_segment: what a block computes: a WorkTile, and
//                       last_sequence_head: sequence_head of the later one of two joined segments, else of the same.
//                       in_turn: InTurn
//   ChunkPlaces         InTurn: next(shape, n) stores in places[n % VALUE_STAGES] where iteration n's chunk lies;
//                       false: none left
//   wait_for            waits for an iteration's phase of its stage's barrier
// From backward_scores.cuh and backward_keys_storage.cuh
//   multiply_*, put_within, put_across: products of pairs, and stores of their operands; put_state: stores dS for dv.
//                       multiply_rows: by wgmma, so that all of the warpgroup calls it together
//   self_scores.parts_of(stage, warp): RWKV-6: the warp's terms of q_i . u k_i, [sub-chunk][lane]; float2: two tokens
//   score_offset        the byte offset in A of a lane's first score
//   ChannelStage, ValueStage: a chunk's arrays of K, of V numbers, and what q, g and v hold one after the other
//   WarpFlags           a byte for each warp of consumers, as one integer: 0 if no flag is set
// From backward_lookups.cuh, growth.cuh and query_share.cuh
//   computed_entry      constants of a thread, a uint4 for each Lookup:
//                         OFFSETS       x, y: of set_pairs_within; z: of PairReader; w: a mask of GateCounts, of
//                                       queries
//                         FROM_MIDDLE   counts in decays from the middle; x, y: of queries; z, w: of keys
//                         MASKS         x, y: right operand of sum_earlier_tokens; z: identity_of_lane(); w: a mask of
//                                       GateCounts, of keys
//                       s.lookups has the first LOOKUPS of these entries, where registers are too few. LookedUpCounts:
//                       the GateCounts, made of FROM_MIDDLE, OFFSETS.w and MASKS.w
//   compute_keys_by_token: a chunk token by token; channel_sum: the sum over the four lanes of equal lane / 4
//   add_query_share(dg, ...): adds query_share, and a term of each channel, by a product with an identity matrix, of
//                       which identity_of_lane() is this lane's register
// From ptx.cuh: hide_origin(x), opaque(x): the compiler no longer knows what x was made of, and computes numbers that
//   depend on x again instead of holding them in registers
// From chunk_copies.cuh: fetch_chunk and store_chunk copy by a tensor map, or by rows (q_rows ...: a pointer and
//   strides) where a sequence ends in the chunk, but its batch row does not, or where strides are negative
#include "gated/sm90/backward_keys_storage.cuh"

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
// Named barriers: one that all consumers share, and WARPGROUP_BARRIER + warpgroup for each of their warpgroups.
constexpr int CONSUMERS_BARRIER = 1, WARPGROUP_BARRIER = 2;

// Whether dS is tf32 in its product with v, which then needs a float32 copy of v. Otherwise dS is the sum of two
// bfloat16 numbers, or one float16 number (IS_FLOAT16: T is float16), and v is used as it is. With 128 channels two
// bfloat16 numbers cost more than the copy. With float32 gates and float16 data dS is tf32, since dg, in float32, must
// be more accurate.
template <typename T, typename G, int BK> constexpr bool TF32_READ = IS_FLOAT16<T> ? sizeof(G) == 4 : BK == 128;

// Whether a warpgroup of its own makes A and dv. With BK = BV = 64 a multiprocessor has two blocks, too many for it.
template <int BK> constexpr bool HAS_SCORE_WARPGROUP = BK == 128;
constexpr int SCORE_WARPS = 4;  // of that warpgroup
static_assert(NUM_SUBCHUNKS == 4 && SCORE_WARPS == 4, "make_A: a warp a sub-chunk; add_pairs_across names them");
template <int BK> constexpr int CONSUMERS = 2 * BK;
template <int BK> constexpr int THREADS = CONSUMERS<BK> + (HAS_SCORE_WARPGROUP<BK> ? 256 : 128);
// The largest magnitude of dS for which float16 products are used. They take dS times a power of 2 that makes its
// largest number at most 2^14: a number of size 1 in it is then at least 2^-15, which float16 holds in 10 bits.
constexpr float LARGEST_DS = 0x1p29f;
static_assert(LARGEST_DS * 0x1p90f < LARGEST_FLOAT && MOST_UP == 90, "dS times QueryScale::up is finite");

// The largest magnitude of dS, from the largest one of each warp's channels.
template <int WARPS> __device__ __forceinline__ float largest_of_all(const float (&of_warps)[WARPS]) {
  float largest = of_warps[0];
  for (int warp = 1; warp < WARPS; ++warp) largest = fmaxf(largest, of_warps[warp]);
  return largest;
}

// Whether the chunk is computed token by token (growth.cuh): because backward_queries.cu set a flag (gates are too far
// above 0, or float16 does not hold query_share), or because dS exceeds float16's range. All threads get the same
// result; the vote tells the compiler so.
template <typename T, typename Shared>
__device__ __forceinline__ bool computes_by_token(const Shared& s, int iteration) {
  return __any_sync(0xffffffffu,
                    s.flags[iteration & 1] || IS_FLOAT16<T> && largest_of_all(s.largest[iteration & 1]) >= LARGEST_DS);
}

// Whether a flag is set among those that thread `thread` of COUNT reads. The threads together read the flags of all
// chunks of the sequence's later segments. Threads are divided among the segments, `threads_each` for one, and read
// all at the same time: one segment after the other would take a memory latency each.
template <int BK, int COUNT, typename T, typename G>
__device__ __forceinline__ bool later_segment_grows(const Args<T, G>& args, int thread) {
  const i64 last = segment_of<BACKWARDS>(args.shape, args.P, args.joined).last_sequence_head, H = args.shape.H;
  const int later = int(args.P - 1 - last / H % args.P);   // later segments of the sequence; last: segment * H + head
  const int threads_each = max(1, COUNT / max(1, later));  // for each later segment
  bool found = false;
  for (int n = 1 + thread / threads_each; n <= later; n += COUNT / threads_each) {
    const WorkTile work = segment_at(args.shape, u32(last + n * H), args.P);
    for (int chunk = thread % threads_each; chunk * CHUNK < work.tokens; chunk += threads_each) {
      const float* row = args.query_sums + (work.chunk_row + chunk) * (args.shape.K + FLAGS);
      found |= *reinterpret_cast<const WarpFlags<BK>*>(row + args.shape.K) != 0;
    }
  }
  return found;
}

// Calls f(iteration, first token of the chunk) for the chunks of a segment, from the last to the first. chunks_before:
// how many chunks of other segments this block has computed before; `iteration` counts on from there.
template <class F> __device__ __forceinline__ void each_chunk(int tokens, int chunks_before, F f) {
  int iteration = chunks_before;
#pragma unroll 1
  for (int token = (tokens - 1) / CHUNK * CHUNK; tokens && token >= 0; token -= CHUNK) f(iteration++, token);
}

// ---- a warpgroup that makes A and dv: a warp has 8 queries of A, and 16 of every 64 columns of dv ------------------

// Computes A, and arrives at `within`; of a chunk without A the caller arrives. Scores of sub-chunks whose keys are
// later than the queries are not stored: the kernel has set them to 0 at its start. Each warp multiplies its
// sub-chunk's queries and keys, and one block of queries and keys of different sub-chunks. Warps 0 and 2: queries 16 to
// 31 by 8 keys from 0, or 8, on. Warps 1 and 3: the queries of sub-chunk 1, or 3, by the keys of the sub-chunk before.
template <class ReadOrder, typename T, typename G, int BK, int BV, class Schedule>
__device__ __forceinline__ void make_A(Shared<T, G, BK, BV, Schedule>& s, ChannelStage<T, G, BK>& in, float scale,
                                       int warp, int lane) {
  const int query = lane >> 2, key_pair = lane & 3;  // of a sub-chunk; keys 2 key_pair and 2 key_pair + 1
  const bool has_16_queries = warp % 2 == 0;
  const int queries = has_16_queries ? 16 : 8 * warp, keys = has_16_queries ? 4 * warp : 8 * (warp - 1);
  const float to_scores =
      CUT_OFF_CORRECTION * CUT_OFF_CORRECTION * scale;  // products cut off bits of both tf32 operands
  const auto put = [&](int offset, float score) {
    *reinterpret_cast<float*>(at_byte_offset(s.A, offset)) = rounded_to_tf32(score);
  };
  // within: products of `query` and the two keys of the warp's sub-chunk. across: those of queries lane / 4 and
  // lane / 4 + 8 and keys 2 key_pair and the next, from `queries` and `keys` on. self_score: q . u k of the sub-chunk's
  // `query`.
  float within[2], across[4], self_score = 0.f;
  if (ReadOrder::reads_before_write) {
    for (int other = 0; other < BK / 16; ++other) {
      // The terms of warp `other`'s channels, stored by lanes 4 g + t as float2 of tokens 2t and 2t + 1, so [g][token]:
      // g, 0 to 7, has the sum of channels g and g + 8. This lane adds those of its token `query` at g = key_pair and
      // key_pair + 4; channel_sum adds those of the other six g.
      const float* parts = &s.self_scores.parts_of(in, other)[warp][0].x + 8 * key_pair + query;
      self_score += parts[0] + parts[32];
    }
    self_score = channel_sum(self_score);
  }
  // backward_scores.cuh: products over all channels of the operands that consumers have stored.
  multiply_within<BK, T, G>(within, s.keys_within, in, warp, lane);
  mbarrier_arrive(s.within);  // the operands of pairs within sub-chunks have been read: dk and dg may overwrite them
  multiply_across(across, has_16_queries ? s.by16 : s.by8, queries, has_16_queries, keys, lane);
  // A is [key, query] in rows of 128 bytes, swizzled; of every 8 columns t is query 2t and t + 4 is query 2t + 1. From
  // byte `score`, of an even key, the next key is at (score XOR 16) + 128, and 8 queries later is score XOR 32.
  int score = score_offset(8 * warp, 8 * warp, lane);  // of the lane's first score
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const float diagonal = ReadOrder::reads_before_write ? scale * self_score : to_scores * within[p];
    const int key = 2 * key_pair + p;
    put(p ? (score ^ 16) + 128 : score, key < query ? to_scores * within[p] : key > query ? 0.f : diagonal);
  }
  score = score_offset(queries, keys, lane);
#pragma unroll
  for (int p = 0; p < 4; ++p)  // not to_scores: operands of T lose no bits in their product
    if (p < 2 || has_16_queries) put((score ^ (p % 2 * 16 + p / 2 * 32)) + p % 2 * 128, scale * across[p]);
  // Orders A, and with BK = 128 what consumers stored before `operands`, before the wgmma of dv that reads them.
  fence_proxy_async();
}

// Starts the product (L_j k_j) dS for dv's columns 64 panel to 64 panel + 63, and does not wait for its result. in.k
// has the decayed keys L_j k_j, s.dS a copy of dS in T.
template <typename T, typename G, int BK, int BV, class Schedule>
__device__ __forceinline__ void start_dv(Values& dv, Shared<T, G, BK, BV, Schedule>& s, ChannelStage<T, G, BK>& in,
                                         int panel) {
  const u64 state_tile = k_major_tile(s.dS[0][64 * panel]), keys_tile = k_major_tile(in.k);
  wgmma_fence();
  // Descriptors count 16 bytes: 16 channels are 32 bytes, 64 a panel of BV, or CHUNK, rows of 128 bytes.
#pragma unroll
  for (int c = 0; c < BK / 16; ++c)
    wgmma<T, CHUNK, K_MAJOR>(dv, state_tile + (c / 4 * BV * 128 + c % 4 * 32) / 16,
                             keys_tile + (c / 4 * CHUNK * 128 + c % 4 * 32) / 16, c > 0);
  wgmma_commit();
}

// Waits for the product that start_dv started, adds sum_i A_ij do_i, and stores dv over v. down: s.dS had been
// multiplied by 1 / down, since float16 does not hold all of dS's range. offset: ldmatrix_offset() (decays.cuh).
template <typename T, typename G, int BK, int BV, class Schedule>
__device__ __forceinline__ void finish_dv(Values& dv, Shared<T, G, BK, BV, Schedule>& s, ValueStage<T, BV>& in,
                                          int panel, float down, int offset) {
  u32 columns[NUM_SUBCHUNKS][4];  // do's columns as left operands: a lane's queries 2t and 2t + 1 of each sub-chunk
  Operand do_operand;
  load_operand(do_operand, in.do_[panel], offset);
  each_token_pair([&](int n, int h) {  // depths t and t + 4: queries 2t and 2t + 1, as in A's columns
    const float2 two = unpack<T>(token_pair_of(do_operand, n, h));
    columns[n][h] = __float_as_uint(two.x), columns[n][2 + h] = __float_as_uint(two.y);
  });
  if (IS_FLOAT16<T>) {
    wgmma_wait<0>();
    wgmma_fence_operand(dv);
#pragma unroll
    for (int i = 0; i < CHUNK / 2; ++i) dv[i] *= down;
  }
  wgmma_fence();
  const u64 scores_tile = k_major_tile(s.A);
#pragma unroll
  for (int n = 0; n < NUM_SUBCHUNKS; ++n)
    wgmma<tf32, CHUNK, K_MAJOR>(dv, columns[n], scores_tile + n * 32 / 16, ACCUMULATE);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_fence_operand(dv);
  LaneChunk result;
#pragma unroll
  for (int i = 0; i < CHUNK / 2; ++i) result[i / 4][i % 4] = dv[i];
  store_chunk_values(&in.v[panel], result, offset);
}

// The loop of the warpgroup that makes A and dv, over all chunks of the block.
template <class ReadOrder, typename T, typename G, int BK, int BV, class Schedule>
__device__ __forceinline__ void make_A_and_dv(Shared<T, G, BK, BV, Schedule>& s, const Args<T, G>& args) {
  constexpr int STAGES = Shared<T, G, BK, BV, Schedule>::STAGES,
                VALUE_STAGES = Shared<T, G, BK, BV, Schedule>::VALUE_STAGES;
  const int warp = threadIdx.x / 32 % 4;
  int lane = threadIdx.x & 31;
  // Makes A and dv of the chunk of an iteration.
  const auto compute_chunk = [&](u32 iteration, int) {
    hide_origin(lane);  // addresses are computed again, which is cheaper than to hold them in registers
    ChannelStage<T, G, BK>& in = s.channels[iteration % STAGES];
    mbarrier_wait(s.operands, iteration & 1);  // the decayed queries and keys, and dS for dv, are in shared memory
    const bool by_token = computes_by_token<T>(s, iteration);
    // s.largest is read before this thread arrives at `within`: consumers wait there before they write the row again.
    const float down = IS_FLOAT16<T> ? scale_to_float16(largest_of_all(s.largest[iteration & 1])).down : 1.f;
    if (by_token) mbarrier_arrive(s.within);
    else make_A<ReadOrder>(s, in, float(args.scale), warp, lane);
    mbarrier_arrive(s.scores);
    if (!by_token) {
      mbarrier_wait(s.scores, iteration & 1);  // all of A is in shared memory
#pragma unroll 1
      for (int panel = 0; panel < BV / 64; ++panel) {
        Values dv;
        start_dv(dv, s, in, panel);
        finish_dv(dv, s, s.values[iteration % VALUE_STAGES], panel, down, opaque(ldmatrix_offset()));
      }
    }
    mbarrier_arrive(s.done[iteration % STAGES]);
  };
  each_segment<Schedule, BACKWARDS>(args, [&](const Segment& segment, int chunks_before) {
    each_chunk(segment.tokens, chunks_before, compute_chunk);
  });
}

// ---- a warpgroup that makes dA and copies chunks: a warp has 8 queries of dA, and copies one or two of the arrays ---

// The loop of the warpgroup that makes dA and copies chunks, over all chunks of the block.
template <class ReadOrder, typename T, typename G, int BK, int BV, class Schedule>
__device__ __forceinline__ void move_chunks(Shared<T, G, BK, BV, Schedule>& s, const Args<T, G>& args) {
  constexpr int STAGES = Shared<T, G, BK, BV, Schedule>::STAGES,
                VALUE_STAGES = Shared<T, G, BK, BV, Schedule>::VALUE_STAGES;
  // Not read from s.segment: the compiler would not know that it is the same for all threads.
  const int tokens = Schedule::in_turn ? 0 : segment_of<BACKWARDS>(args.shape, args.P, args.joined).tokens;
  const i64 K = args.shape.K, V = args.shape.V;
  const float scale = float(args.scale);
  const int warp = threadIdx.x / 32 % 4;
  // count: with InTurn, how many chunks this warp has started to copy. It is always STAGES chunks ahead or more, or has
  // started the block's last one. So all warps agree whether a chunk follows: whether iteration + 1 < count.
  static_assert(STAGES >= 2 && VALUE_STAGES >= STAGES);
  int lane = threadIdx.x & 31, count = 0;
  // Where the chunk of an iteration lies: token_of is its first token in place_of. With InTurn place_of starts at the
  // chunk; else it is the block's segment.
  const auto place_of = [&](int iteration) -> const WorkTile& {
    if constexpr (Schedule::in_turn) return s.places[warp].places[iteration % VALUE_STAGES];
    else return s.segment;
  };
  const auto token_of = [&](int iteration) {
    return Schedule::in_turn ? 0 : ((tokens - 1) / CHUNK - iteration) * CHUNK;
  };
  // fetch_chunk and store_chunk (chunk_copies.cuh) copy rows of a chunk for each f(tile, tensor map, rows, width[,
  // first column, whether to add to what the array holds]). All lanes arrive at the barrier of fetch_chunk, whose phase
  // ends when the bytes are there; store_chunk returns when the tiles may be overwritten.
  const auto fetch = [&](int iteration) {
    const int stage = iteration % STAGES;  // not of warp 1, whose first iterations are below 0
    // v and do, warp 1's, have VALUE_STAGES stages: so they are copied so many iterations earlier.
    if (warp == 1) iteration += VALUE_STAGES - STAGES;
    if constexpr (Schedule::in_turn) {
      if (!s.places[warp].next(args.shape, iteration)) return;
      ++count;
    } else if (iteration * CHUNK >= tokens) return;
    ChannelStage<T, G, BK>& in = s.channels[stage];  // not used by warp 1
    ValueStage<T, BV>& values = s.values[iteration % VALUE_STAGES];
    MBarrier& barrier = warp == 1 ? s.arrived[iteration % VALUE_STAGES] : s.full[stage];
    fetch_chunk(barrier, place_of(iteration), token_of(iteration), [&](auto f) {
      if (warp == 0) f(in.q, args.q, args.q_rows, K), f(in.k, args.k, args.k_rows, K);
      if (warp == 1) f(values.v, args.v, args.v_rows, V), f(values.do_, args.do_, args.do_rows, V);
      if (warp == 2) f(in.g, args.g, args.g_rows, K);
      if (warp == 3) f(in.query_share, args.query_share, args.query_share_rows, K);
    });
  };
  // Copies this warp's array of a chunk's results to memory: dk from q, dv from v, dg from g; warp 3 has none.
  const auto store = [&](int iteration, int token) {
    ChannelStage<T, G, BK>& out = s.channels[iteration % STAGES];
    wait_for(s.done, iteration);  // results are stored, and inputs have been read
    fence_proxy_async();  // orders the consumers' stores before this warp's copies; here, since this warp has time
    store_chunk(place_of(iteration), token, [&](auto f) {
      if (warp == 0) f(out.q, args.dk, args.dk_rows, K, 0, args.adds);
      if (warp == 1) f(s.values[iteration % VALUE_STAGES].v, args.dv, args.dv_rows, V, 0, args.adds_dv);
      if (warp == 2) f(out.g, args.dg, args.dg_rows, K, 0, args.adds);
    });
  };
  const auto sums_row_of = [&](int iteration) {  // the chunk's row of query_sums
    return place_of(iteration).chunk_row + (Schedule::in_turn ? 0 : (tokens - 1) / CHUNK - iteration);
  };
  const auto query_sum_of = [&](int iteration) {  // the chunk's query sum of this lane's channel
    const i64 row = sums_row_of(iteration);
    return 32 * warp + lane < K ? args.query_sums[row * (K + FLAGS) + 32 * warp + lane] : 0.f;
  };
  const auto flags_of = [&](int iteration) {  // its bytes, one for each warp of consumers
    const i64 row = sums_row_of(iteration);
    return *reinterpret_cast<const WarpFlags<BK>*>(args.query_sums + row * (K + FLAGS) + K);
  };
  // Stores dA of this warp's 8 queries of a chunk, and, for consumers, the chunk's query sums, flags and float_v.
  const auto make_dA = [&](int iteration, float query_sum, WarpFlags<BK> flags) {
    ValueStage<T, BV>& in = s.values[iteration % VALUE_STAGES];
    const int query = 8 * warp + (lane >> 2), channel = 32 * warp + lane;
    float products[CHUNK / 2];  // [4n + p]: do . v of the query and key 8n + 2 (lane & 3) + p, p = 0, 1
    // v and do are in shared memory. They were copied after the stage's previous chunk had been stored, so its dA has
    // been read.
    wait_for(s.arrived, iteration);
    multiply_rows(products, in.do_, in.v);
    const QueryRow<ReadOrder> row(in.dA, query, 2 * (lane & 3), scale);
#pragma unroll
    for (int n = 0; n < NUM_SUBCHUNKS; ++n) {
      if (n > warp) continue;  // keys after this warp's queries: never read, and RWKV-6's self weights lie there
      row.put(n, products[4 * n], products[4 * n + 1]);
    }
    if (TF32_READ<T, G, BK>) {
      if (iteration)
        mbarrier_wait(s.operands, (iteration - 1) & 1);  // s.float_v of the previous iteration has been read
      put_float_tile<SCORE_WARPS, T, BV>(s.float_v, in.v, warp, lane);
    }
    // Two rows are enough: this row's last readers were those of iteration - 2. This thread has waited in store() for
    // that chunk's `done`, at which consumers arrive after they and the makers of A have read the row.
    if (channel < BK) s.query_sums[iteration & 1][channel] = query_sum;
    if (channel == 0) s.flags[iteration & 1] = flags;
    fence_proxy_async();  // orders float_v before the consumers' wgmma that reads it
    mbarrier_arrive(s.dA_stored[iteration % VALUE_STAGES]);
  };
  if constexpr (Schedule::in_turn) s.places[warp].begin(args.shape);
  for (int iteration = warp == 1 ? STAGES - VALUE_STAGES : 0; iteration < STAGES; ++iteration) fetch(iteration);
  __syncwarp();  // lanes that fetch_chunk has parted go on together, as make_dA's wgmma (multiply_rows) needs them
  if (Schedule::in_turn ? count : tokens) make_dA(0, query_sum_of(0), flags_of(0));
  // What this warpgroup does while consumers compute the chunk of an iteration. has_next: whether one follows, which
  // `count` tells, as a warp is two chunks ahead or more (STAGES).
  const auto compute_chunk = [&](int iteration, int token, bool has_next) {
    hide_origin(lane);  // addresses are computed again, which is cheaper than to hold them in registers
    const float query_sum = has_next ? query_sum_of(iteration + 1) : 0.f;  // early, to hide the load's latency
    const WarpFlags<BK> flags = has_next ? flags_of(iteration + 1) : 0;
    if (!HAS_SCORE_WARPGROUP<BK>) {
      mbarrier_wait(s.operands, iteration & 1);  // the decayed queries and keys are in shared memory
      if (computes_by_token<T>(s, iteration)) mbarrier_arrive(s.within);  // no scores are needed
      else make_A<ReadOrder>(s, s.channels[iteration % STAGES], scale, warp, lane);
      mbarrier_arrive(s.scores);
    }
    if (has_next) make_dA(iteration + 1, query_sum, flags);
    store(iteration, token);
    fetch(iteration + STAGES);  // each warp copies to the memory whose results it has just stored
    __syncwarp();               // as above
  };
  if constexpr (Schedule::in_turn) {
#pragma unroll 1
    for (int iteration = 0; iteration < count; ++iteration) compute_chunk(iteration, 0, iteration + 1 < count);
  } else each_chunk(tokens, 0, [&](int iteration, int token) { compute_chunk(iteration, token, token > 0); });
}

// ---- warpgroups with 64 channels each -------------------------------------------------------------------------------

// How consumers compute a chunk, as far as registers and measured times decide it.
template <class ReadOrder, typename T, typename G, int BK, int BV> struct ConsumerPlan {
  static constexpr int DV_PANELS = HAS_SCORE_WARPGROUP<BK> ? 0 : BV / 64;  // panels of dv that consumers make
  // Sub-chunks whose decays are computed before the barriers; limited by registers.
  static constexpr int AHEAD = IS_FLOAT16<T> || sizeof(G) == 4 ? 0 : BK == 64 || ReadOrder::reads_before_write ? 1 : 2;
  // Whether products with dA within a sub-chunk come before the stores: what was measured to be faster.
  static constexpr bool SUM_FIRST = IS_FLOAT16<T> && !ReadOrder::reads_before_write;
  // Whether tokens are summed by shuffles. On tensor cores the sums would wait for dS's products in RWKV-6, and need
  // more registers than float16 leaves. ADDS_LATE: dk's terms are added while tensor cores sum.
  static constexpr bool BY_SHUFFLES = ReadOrder::reads_before_write || IS_FLOAT16<T>;
  static constexpr bool ADDS_LATE = !BY_SHUFFLES && BK == 128;
};

// c of this lane's two channels: sum_v S' dS. stored: the checkpoint of S', at this thread's first numbers.
template <int BK, int BV>
__device__ __forceinline__ void sum_from_checkpoint(float (&carried)[2], const float4* stored,
                                                    const float (&dS)[BV / 2]) {
  carried[0] = carried[1] = 0.f;
#pragma unroll
  for (int n = 0; n < BV / 8; ++n) {
    const float4 S = stored[n * 2 * BK];
    carried[0] += S.x * dS[4 * n] + S.y * dS[4 * n + 1], carried[1] += S.z * dS[4 * n + 2] + S.w * dS[4 * n + 3];
  }
  for (int h = 0; h < 2; ++h) carried[h] = channel_sum(carried[h]);
}

// Sets dk to the terms of pairs within sub-chunk n, and stores the operands of their scores: queries at offsets.x, keys
// at offsets.y (put_within). query_decays, key_decays: from the sub-chunk's middle; u: RWKV-6's, of this lane.
template <class ReadOrder, typename T, typename G, int BK, int BV, class Schedule>
__device__ __forceinline__ void set_pairs_within(LaneSubChunk& dk, Shared<T, G, BK, BV, Schedule>& s,
                                                 ChannelStage<T, G, BK>& in, ValueStage<T, BV>& values,
                                                 const Operand& q, const Operand& k, const LaneSubChunk& query_decays,
                                                 const LaneSubChunk& key_decays, const PairReader& dA_reader,
                                                 const float (&u)[2], const uint4& offsets, int n, int warp, int lane) {
  constexpr bool SUM_FIRST = ConsumerPlan<ReadOrder, T, G, BK, BV>::SUM_FIRST;
  LaneSubChunk queries_within, keys_within, sum = {};
  float self_terms[4] = {}, self_scores[2] = {};  // RWKV-6: of tokens with themselves, in dk and in A
  const float2 weights = ReadOrder::reads_before_write ? self_weights(values.dA, n) : float2{};
  const auto add_self_pair = [&](int i, float query, float key) {  // i: 2h + p
    if constexpr (ReadOrder::reads_before_write) {
      const float u_query = u[i / 2] * query;
      self_scores[i % 2] = fmaf(u_query, key, self_scores[i % 2]);
      self_terms[i] = (i % 2 ? weights.y : weights.x) * u_query;
    }
  };
  decay_within<IN_FULL, T>(queries_within, keys_within, query_decays, key_decays, q, k, n, add_self_pair);
  if (SUM_FIRST) dA_reader.add_queries(sum, queries_within, n, n);
  put_within(in, queries_within, int(offsets.x), n);
  put_within(s.keys_within, keys_within, int(offsets.y), n);
  if (ReadOrder::reads_before_write) s.self_scores.parts_of(in, warp)[n][lane] = {self_scores[0], self_scores[1]};
  if (!SUM_FIRST) dA_reader.add_queries(sum, queries_within, n, n);
#pragma unroll
  for (int i = 0; i < 4; ++i) dk[i] = fmaf(key_decays[i], sum[i], self_terms[i]);
}

// Adds to `sums`, for each key, dA_ij times these decayed queries of other sub-chunks.
__device__ __forceinline__ void sum_over_queries(Across& sums, const Across& queries, const PairReader& dA_reader) {
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    dA_reader.add_queries(sums.by8[x], queries.by8[x], 2 * x + 1, 2 * x);
    dA_reader.add_queries(sums.by16[x], queries.by16[0], 2, x);
    dA_reader.add_queries(sums.by16[x], queries.by16[1], 3, x);
  }
}

// Adds to dk the terms of dS and of other sub-chunks' queries. from_state: dS v_j; over_queries: of sum_over_queries;
// to_end: decays of keys to their sub-chunk's end. On the way to queries of sub-chunks 2 and 3, keys of sub-chunk 0
// decay over sub-chunk 1, too.
__device__ __forceinline__ void add_pairs_across(LaneChunk& dk, const Values& from_state, const Across& over_queries,
                                                 const LaneChunk& to_end, const SubChunkDecays& decays) {
  each_token_pair([&](int n, int h) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int i = 2 * h + p;
      const float state_sum = from_state[4 * n + i];
      // dk's terms without the decay to the sub-chunk's end.
      float at_end = n == 3 ? state_sum : decays.after(n, h) * state_sum;
      if (n == 1) at_end += over_queries.by16[1][i];
      if (n == 2) at_end += over_queries.by8[1][i];
      if (n == 0) at_end += fmaf(decays.sub[1][h], over_queries.by16[0][i], over_queries.by8[0][i]);
      dk[n][i] = fmaf(to_end[n][i], at_end, dk[n][i]);
    }
  });
}

// Computes a segment, or two that are joined. segment.sequence_head and segment.last_sequence_head: the
// indices of the first and of the last of them in dht and ends. chunks_before: how many chunks of other segments this
// block has computed before.
template <class ReadOrder, typename T, typename G, int BK, int BV, class Schedule>
__device__ __forceinline__ void consume(Shared<T, G, BK, BV, Schedule>& s, const Args<T, G>& args,
                                        const Segment& segment, int chunks_before) {
  constexpr int STAGES = Shared<T, G, BK, BV, Schedule>::STAGES,
                VALUE_STAGES = Shared<T, G, BK, BV, Schedule>::VALUE_STAGES;
  constexpr int CONSUMERS = ::CONSUMERS<BK>;
  using Plan = ConsumerPlan<ReadOrder, T, G, BK, BV>;
  const int warp = threadIdx.x / 32, warpgroup = warp / 4, lane = threadIdx.x & 31;
  const int channel = warp * 16 + (lane >> 2), offset = opaque(ldmatrix_offset());
  const i64 K = args.shape.K;
  const float scale = __uint_as_float(opaque(__float_as_uint(float(args.scale))));  // `opaque`: else converted again
  const bool inside[2] = {channel < K, channel + 8 < K};
  // Offsets and masks of this thread (backward_lookups.cuh): from a table in shared memory, or computed again.
  const auto entry_of = [&](Lookup what) {
    return what < LOOKUPS<G, BK> ? s.lookups.at(what, warpgroup, offset) : computed_entry<ReadOrder, T, G, BK>(what);
  };
  const GateCounts<ReadOrder, G, SECOND_NEGATED> computed_counts;
  const auto counts = [&] {  // which gates count in the decays of this lane's tokens (decays.cuh)
    if constexpr (LOOKUPS<G, BK> > MASKS)
      return LookedUpCounts<ReadOrder, G>{entry_of(FROM_MIDDLE), entry_of(OFFSETS).w, entry_of(MASKS).w};
    else return computed_counts;
  };

  // Infinite, but ROUNDING = 2^-7 once a later chunk is computed token by token, whose growth may have made dS so large
  // that D sum_v S dS is more than rounding error.
  float& kept_ratio = s.kept_ratio[Schedule::in_turn ? warp : 0];
  if constexpr (Schedule::in_turn) {
    __syncwarp();  // all lanes have read `kept_ratio` of the previous segment
    if (lane == 0) kept_ratio = infinity();
  }
  // Segments 0 and 1. Of the end of segment 1 the first pass has stored no `ends`, but the state S, a checkpoint, of
  // which compute_chunk makes c.
  const bool is_joined = segment.last_sequence_head != segment.sequence_head;
  float dS[BV / 2], u[2] = {}, carried[2] = {};  // carried: c, of this lane's two channels
  load_state<BV>(dS, args.dht ? args.dht + segment.last_sequence_head * K * args.shape.V : nullptr, args.shape,
                 channel);
  for (int h = 0; h < 2; ++h) {
    if (ReadOrder::reads_before_write && inside[h]) u[h] = args.u[segment.head * K + channel + 8 * h];
    if (args.dht && inside[h] && !is_joined) carried[h] = args.ends[segment.sequence_head * K + channel + 8 * h];
  }

  // Waits until dv of the previous iteration is complete: then s.dS, by8, by16 and A have been read.
  const auto wait_for_dv = [&](u32 iteration) {
    if (HAS_SCORE_WARPGROUP<BK> && iteration) wait_for(s.done, iteration - 1);
  };
  // Computes a chunk. Returns false if it must be computed token by token. Then it has waited for the chunk's `full`
  // and dA_stored, set s.largest, and computed `carried` anew where a state is stored; it has arrived nowhere.
  const auto compute_chunk = [&](u32 iteration, int token) {
    ChannelStage<T, G, BK>& in = s.channels[iteration % STAGES];
    ValueStage<T, BV>& values = s.values[iteration % VALUE_STAGES];
    const int next = token + CHUNK;
    // From a stored state, c is computed anew, so that its rounding errors do not add up. Joined segments start so,
    // too: their end is a multiple of CHECKPOINT_EVERY (segments.short_segment), else c would stay 0.
    if (next % CHECKPOINT_EVERY == 0 && (next < segment.tokens || is_joined)) {
      const int checkpoint = first_checkpoint(args.shape, segment) + next / CHECKPOINT_EVERY;
      sum_from_checkpoint<BK, BV>(carried, checkpoint_at<BK, BV>(args.checkpoints, checkpoint), dS);
    }
    // Two rows are enough: this row's last readers, of iteration - 2, arrived at `within`, where this thread waited.
    if (IS_FLOAT16<T>) s.largest[iteration & 1][warp] = largest_of<BV>(dS);
    wait_for(s.full, iteration);  // q, k, g and query_share are in shared memory
    LaneGates<G, SECOND_NEGATED> gates;
    Operand q, k, keys;       // keys: L_j k_j
    StateOperand<T> queries;  // scale E_i q_i
    gates.load(warpgroup_panels(in.g, warpgroup), offset);
    load_operand(q, in.q[warpgroup], offset);
    load_operand(k, in.k[warpgroup], offset);
    LaneChunk query_decays, key_decays;  // from the middle of the token's sub-chunk
    const auto middle_counts = counts();
    const auto set_decays = [&](int n) { decays_from_middle(query_decays[n], key_decays[n], gates, middle_counts, n); };
#pragma unroll
    for (int n = 0; n < Plan::AHEAD; ++n) set_decays(n);
    if (IS_FLOAT16<T>)
      named_barrier_sync(CONSUMERS_BARRIER, CONSUMERS);           // q and g have been read; s.largest is complete
    else named_barrier_sync(WARPGROUP_BARRIER + warpgroup, 128);  // q and g have been read: put_within overwrites them
    // dA, and v for its product with dS, are in shared memory.
    wait_for(s.dA_stored, iteration);
    if (computes_by_token<T>(s, iteration)) return false;
    const Scale dS_scale = IS_FLOAT16<T> ? scale_to_float16(largest_of_all(s.largest[iteration & 1])) : Scale{1.f, 1.f};
    const bool scaled = IS_FLOAT16<T> && dS_scale.up != 1.f;
    if (scaled) scale_state<BV>(dS, dS_scale.up, dS_scale.up);
    Values from_state;                       // dS v_j [channel, token j]
    u32 columns[BV / 8 / NUM_SUBCHUNKS][4];  // the part of dS that is being multiplied by v
    LaneChunk dk, dg;
    const uint4 offsets = entry_of(OFFSETS);  // x, y: of set_pairs_within; z: PairReader::queries_index
    // keys_index is 0 and not used: only sums over queries are computed here.
    const PairReader dA_reader(values.dA, 0, int(offsets.z));
#pragma unroll
    for (int n = 0; n < NUM_SUBCHUNKS; ++n) {
      // Starts a quarter of from_state = dS v^T, which sums over a quarter of the columns of V (states.cuh).
      if constexpr (TF32_READ<T, G, BK>) start_state_read_part<BV>(from_state, columns, dS, s.float_v, n);
      else
        start_state_read_part<BV>(from_state, columns, dS, values.v, n,
                                  [&](int tile, const u32(&two)[4]) {  // stores dS for dv: 16 columns, 2048 bytes
                                    if (!HAS_SCORE_WARPGROUP<BK>)
                                      stmatrix_x4_trans(at_byte_offset(s.dS[warpgroup], offset + 2048 * tile), two);
                                  });
      if (n + Plan::AHEAD < NUM_SUBCHUNKS) set_decays(n + Plan::AHEAD);
      set_pairs_within<ReadOrder>(dk[n], s, in, values, q, k, query_decays[n], key_decays[n], dA_reader, u, offsets, n,
                                  warp, lane);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(from_state);
    if constexpr (TF32_READ<T, G, BK> || HAS_SCORE_WARPGROUP<BK>) {
      wait_for_dv(iteration);
      put_state<T, BV>(s.dS, dS, warpgroup, offset);
    }
    if (scaled) {
      scale_state<BV>(dS, dS_scale.down, dS_scale.down);
      for (float& x : from_state) x *= dS_scale.down;
    }
    __syncwarp();  // keeps the compiler from computing all decays first, for which registers are too few
    // Decays of queries from the start of their sub-chunk, and of keys to its end; over sub-chunks.
    LaneChunk from_start, to_end;
    SubChunkDecays decays;
    decays_to_end(to_end, gates, counts());
    decays_from_start(from_start, gates, counts());
    decays_of<ReadOrder>(decays, from_start, to_end);
    // first_gate_strong, of float16 and GLA only: the decay of the chunk's first gate is below 2^-8. Queries decayed
    // from the chunk's start would leave float16's range: they, and dS while they are added, are multiplied by `up`.
    const bool first_gate_strong = first_gate_is_strong<ReadOrder, T>(from_start);
    QueryScale query_scale;
    float to_state[2] = {scale, scale};  // the factor of queries, for each channel
    if (first_gate_strong) {
      query_scale = scale_of_queries<ReadOrder, T>(from_start);
      scale_state<BV>(dS, query_scale.up[0], query_scale.up[1]);
      for (int h = 0; h < 2; ++h) to_state[h] *= query_scale.up[h];
    }
    Across queries_across, keys_across;  // decayed from, and to, the borders of sub-chunks
    decay_queries<IN_FULL, T>(queries_across, q, from_start, decays, to_state, [&](auto... x) { queries.put(x...); });
    decay_keys<IN_FULL, T>(keys_across, k, to_end, decays, [&](int n, int h, float x, float y) {
      const float2 rounded = state_values<T>(x, y);
      token_pair_of(keys, n, h) = pack<T>(x, y);
      dg[n][2 * h] = rounded.x * from_state[4 * n + 2 * h];
      dg[n][2 * h + 1] = rounded.y * from_state[4 * n + 2 * h + 1];
    });
    put_across(s.by8[warpgroup], s.by16[warpgroup], queries_across, keys_across, offset);
    store_operand(in.k[warpgroup], keys, offset);
    mbarrier_arrive(s.operands);  // decayed queries and keys, and dS for dv, are stored; v for dS has been read

    decay_state<BV>(dS, decays);
    wgmma_fence();
    start_state_write<T, BV>(dS, queries, values.do_);
    wgmma_commit();
    if (first_gate_strong) {
      wgmma_wait<0>();
      wgmma_fence_operand(dS);
      scale_state<BV>(dS, query_scale.down[0], query_scale.down[1]);
    }
    Across over_queries = {};
    sum_over_queries(over_queries, queries_across, dA_reader);
    constexpr int DV_PANELS = Plan::DV_PANELS;
    Values dv[DV_PANELS + !DV_PANELS];
    if (DV_PANELS) {
      // dS for dv and decayed keys of all warpgroups are in shared memory.
      named_barrier_sync(CONSUMERS_BARRIER, CONSUMERS);
      fence_proxy_async();  // orders these stores before wgmma; here, where it costs less
    }
#pragma unroll
    for (int panel = 0; panel < DV_PANELS; ++panel) start_dv(dv[panel], s, in, panel);

    float query_sums[2];                  // from the first pass; the unit in the lowest bits is < 2^-14 of a sum
    float key_sums[2];                    // sum_j k_j L_j dS v_j
    float state_term[2];                  // D sum_v S dS
    const uint4 masks = entry_of(MASKS);  // x, y: sum_earlier_tokens' operand; z: identity_of_lane()
    if (!Plan::ADDS_LATE) add_pairs_across(dk, from_state, over_queries, to_end, decays);
    // dg_t has been k_t L_t dS v_t, and becomes the sum of these over j < t.
    if constexpr (Plan::BY_SHUFFLES) sum_tokens_by_shuffles<BEFORE_TOKEN>(dg, key_sums);
    else sum_earlier_tokens(dg, key_sums, {masks.x, masks.y});
    if (Plan::ADDS_LATE) add_pairs_across(dk, from_state, over_queries, to_end, decays);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // is_forgotten (growth.cuh): whether `rest` is no more than rounding error, since the chunk's gates forget S.
      const float rest = carried[h] - key_sums[h];
      state_term[h] = is_forgotten(decays.all(h), rest, carried[h], kept_ratio) ? 0.f : rest;
      query_sums[h] = s.query_sums[iteration & 1][channel + 8 * h];
      carried[h] = state_term[h] + query_sums[h];
    }
    add_query_share(dg, warpgroup_panels(in.query_share, warpgroup), state_term, query_sums, offset, masks.z);
    mbarrier_wait(s.within, iteration & 1);  // the queries within sub-chunks have been read: dk and dg overwrite them
    store_chunk_values(warpgroup_panels(in.g, warpgroup), dg, offset);
    store_chunk_values(&in.q[warpgroup], dk, offset);
    if (DV_PANELS) mbarrier_wait(s.scores, iteration & 1);  // A is in shared memory
#pragma unroll
    for (int panel = 0; panel < DV_PANELS; ++panel) finish_dv(dv[panel], s, values, panel, dS_scale.down, offset);
    wgmma_wait<0>();
    wgmma_fence_operand(dS);
    mbarrier_arrive(s.done[iteration % STAGES]);
    return true;
  };
  // Computes a chunk token by token, after compute_chunk has returned false for it.
  const auto compute_by_token = [&](u32 iteration) {
    ChannelStage<T, G, BK>& in = s.channels[iteration % STAGES];
    ValueStage<T, BV>& values = s.values[iteration % VALUE_STAGES];
    wait_for_dv(iteration);
    mbarrier_arrive(s.operands);
    // kept_ratio has been read for the chunk before: with 128 channels wait_for_dv has waited for all consumers, with
    // 64 the barrier in compute_chunk. They read it for the next chunk after the barriers of compute_keys_by_token.
    if ((Schedule::in_turn ? lane : threadIdx.x) == 0) kept_ratio = ROUNDING;
    const bool grew = reinterpret_cast<const bool*>(&s.flags[iteration & 1])[warp];  // this warp's flag
    compute_keys_by_token<ReadOrder, T, G, BK, BV>(dS, carried, s.query_sums[iteration & 1],
                                                   reinterpret_cast<float*>(s.dS), in, values, u, scale, grew,
                                                   CONSUMERS_BARRIER);
    mbarrier_wait(s.within, iteration & 1);  // `within` and `scores` go through the same phases as for other chunks
    mbarrier_wait(s.scores, iteration & 1);
    mbarrier_arrive(s.done[iteration % STAGES]);
  };
  int iteration = chunks_before, token = (segment.tokens - 1) / CHUNK * CHUNK;
  // compute_by_token is rare: it is outside of the inner loop, in which registers are scarce.
#pragma unroll 1
  while (segment.tokens && token >= 0) {
#pragma unroll 1
    while (token >= 0 && compute_chunk(iteration, token)) ++iteration, token -= CHUNK;
    if (token >= 0) compute_by_token(iteration), ++iteration, token -= CHUNK;
  }
  if (args.dh0 && segment.sequence % args.P == 0) {  // a sequence's first segment
    float* dh0 = args.dh0 + (segment.sequence / args.P * args.shape.H + segment.head) * K * args.shape.V;
    each_pair_of_state<BV>(dS, dh0, args.shape, channel,
                           [&](float& x, float& y, float* to) { *reinterpret_cast<float2*>(to) = {x, y}; });
  }
}

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6); T: the type of q, k, v and do; G: the gates' type, T or float;
// Schedule: OneEach or InTurn.
template <class ReadOrder, typename T, typename G, int BK, int BV, class Schedule>
__global__ void __launch_bounds__(THREADS<BK>, BK + BV == 128 ? 2 : 1)
    gated_sm90_backward_keys(const __grid_constant__ Args<T, G> args) {
  auto& s = *reinterpret_cast<Shared<T, G, BK, BV, Schedule>*>(dynamic_smem());
  if (threadIdx.x == 0) {
    s.segment = segment_of<BACKWARDS>(args.shape, args.P, args.joined);
    // For each chunk, by_token or not, every thread named here arrives once: of move_chunks warps 0, 2 and 3 at `full`,
    // warp 1 at `arrived`, all at `dA_stored`; consumers at `operands` and `done`; those that make A, 128, at `within`
    // and `scores`, and in a warpgroup of their own at `done`, too.
    for (MBarrier& full : s.full) mbarrier_init(full, 3 * 32);
    for (MBarrier& done : s.done) mbarrier_init(done, CONSUMERS<BK> + (HAS_SCORE_WARPGROUP<BK> ? 128 : 0));
    for (MBarrier& arrived : s.arrived) mbarrier_init(arrived, 32);
    for (MBarrier& dA_stored : s.dA_stored) mbarrier_init(dA_stored, 128);
    mbarrier_init(s.operands, CONSUMERS<BK>);
    mbarrier_init(s.within, 128);
    mbarrier_init(s.scores, 128);
  }
  for (int i = threadIdx.x; i < CHUNK * CHUNK; i += THREADS<BK>)
    s.A[i / CHUNK][i % CHUNK] = 0.f;  // scores of keys later than the query stay 0
  if constexpr (LOOKUPS<G, BK> > 0)
    if (threadIdx.x < CONSUMERS<BK>)
      for (int what = 0; what < LOOKUPS<G, BK>; ++what)
        s.lookups.at(what, threadIdx.x / 128, ldmatrix_offset()) = computed_entry<ReadOrder, T, G, BK>(Lookup(what));
  bool later_growth = false;
  if (args.P > 1) later_growth = __syncthreads_or(later_segment_grows<BK, THREADS<BK>>(args, threadIdx.x));
  if (threadIdx.x == 0) s.kept_ratio[0] = later_growth ? ROUNDING : infinity();  // InTurn: each warp sets one
  fence_proxy_async();
  __syncthreads();  // barriers are initialised; A's zeros, lookups and `kept_ratio` are in shared memory
  const int warpgroup = threadIdx.x / 128;
  // Registers of a consumer, of a thread of the warpgroup that makes A, and of one of the last warpgroup. A
  // multiprocessor has 65536, 512 for each of 128 threads: so those of one thread of every warpgroup of its blocks add
  // up to at most 512. If BK = 64 and BV = 128 one block of two warpgroups is alone, and needs no change.
  constexpr bool FEW_REGISTERS = BK == 128 || BV == 64;
  constexpr int BLOCKS = BK + BV == 128 ? 2 : 1, MOST = BK == 64 ? 184 : 200, SCORES = HAS_SCORE_WARPGROUP<BK> ? 64 : 0,
                LAST = HAS_SCORE_WARPGROUP<BK> ? 48 : 72;
  static_assert(BLOCKS * (BK / 64 * MOST + SCORES + LAST) <= 512);
  if (warpgroup < BK / 64) {
    if constexpr (FEW_REGISTERS) registers_up<MOST>();
    each_segment<Schedule, BACKWARDS>(
        args, [&](const Segment& segment, int chunks_before) { consume<ReadOrder>(s, args, segment, chunks_before); });
  } else if (HAS_SCORE_WARPGROUP<BK> && warpgroup == BK / 64) {
    registers_down<SCORES>();
    make_A_and_dv<ReadOrder>(s, args);
  } else {
    if constexpr (FEW_REGISTERS) registers_down<LAST>();
    move_chunks<ReadOrder>(s, args);
  }
}
