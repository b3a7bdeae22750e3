// what      For chunks with large growth in Hopper's forward kernel, whose log gates are so far above 0 that the
//           chunk's operands would exceed the range of their types: the tests that find such chunks, and make_tokens,
//           by which a producer group stores the operands of one token after the other. Consumers multiply them as they
//           multiply those of whole chunks.
// math      GLA, two steps a token:  S <- diag(a_t) S;  o_t = scale (q_t S + (q_t . k_t) v_t),  S <- S + k_t v_t^T;
//           RWKV-6, one step:        o_t = scale (q_t S + (q_t . u k_t) v_t),  S <- diag(a_t) S + k_t v_t^T
//           a_t = e^(g_t) [K], g_t the log gates. A consumer's step: o = scale q S + A v, then S <- diag(decay) S + k
//           v^T
// barriers  of a group: the stage's scores are zero; then one a step: the step's operands are in shared memory.
//           mbarriers, every step: waits for empty (consumers have read the stage), arrives at full
// numerics  factors are decays of single tokens, never their inverses, so that results are finite if those of the
//           recurrence token by token are. But a token's score with itself is stored as T, so that float16 must hold it
// limits    sm_90a. The consumers' products are computed 33 or 65 times for such a chunk. Few models have such gates
//
// make_tokens fills the chunk's stage once with zeros, then once for every step, with one row that is not zero: 33
// fills, or 65. Because the number is odd, the phases of `full` and `empty` have the same parity afterwards as after a
// single fill.
//
// From the includes:
//   T: the type of q and k; G: the gates' type, ScalarDecay if all channels of a token have one. GATES: a lane's gates
//     of a token, 4 or 1
//   ProducerCoord (`coord`): a lane's sub-chunk, its first row and the lane's 4 channels; LANES: lanes of a sub-chunk.
//     PRODUCER_GROUPS: producer groups that take chunks in turn
//   InputStage: a chunk's q, k and g
//   in_tile, put_key, put_state_query: store 4 channels of a row in a tile of operands; put_scores, put_decays: store
//     scores and decays; send_operands, send_scores: copy them to the other block of the cluster
//   fetch_inputs: starts copying a chunk's log gates, or its queries and keys
//   header.row[0]: the row of the token that the stage holds, plus MORE_FILLS if the stage will be filled again for
//     this chunk. s.SHARED: whether two stages share a tile of scores, each with half of its columns;
//     scores_offset(stage): the byte offset of the stage's half
//   K_RANKS = 2: two blocks have half of the channels each
#include "read_order.cuh"
#include "gated/sm90/forward_rows.cuh"
#include "gated/sm90/forward_scores.cuh"

// The bits of 1/8 and 1 in a gate's type, twice for types of 16 bits. Gates are compared as signed integers: the bits
// of positive numbers have the numbers' order, and those of negative numbers are less than those of positive ones.
template <typename G> constexpr u32 EIGHTH = 0x3e000000;
template <> constexpr u32 EIGHTH<bf16> = 0x3e003e00;
template <> constexpr u32 EIGHTH<f16> = 0x30003000;
template <typename G> constexpr u32 ONE = 0x3f800000;
template <> constexpr u32 ONE<bf16> = 0x3f803f80;
template <> constexpr u32 ONE<f16> = 0x3c003c00;

// If no gate of a chunk exceeds this one (as bits), 1 for bfloat16 and 1/8 for float16, the chunk is computed as a
// whole: after 32 such gates operands of ordinary size are still in T's range. A reset (a_t = 0) counts as e^-20 within
// its sub-chunk, and at most 7 gates of 1 follow it: so at most e^-13 of a token passes a reset.
template <typename T, typename G> constexpr u32 GATE_LIMIT = IS_BFLOAT16<T> ? ONE<G> : EIGHTH<G>;

// A chunk with larger gates is computed as a whole, too, if each channel's gates above 0 sum to at most this many nats,
// over each sub-chunk and over the chunk.
constexpr float SUBCHUNK_GROWTH = 7.f;
template <typename T> constexpr float CHUNK_GROWTH = IS_BFLOAT16<T> ? 32.f : 4.f;

// Whether largest_gate is larger than the gate `other`, both as bits. If G has 16 bits, both hold two gates: then
// whether one of largest_gate's is larger.
template <typename G> __device__ __forceinline__ bool exceeds(u32 largest_gate, u32 other) {
  if (sizeof(G) == 2) return max_of_each_half(largest_gate, other) != other;
  return i32(largest_gate) > i32(other);
}

// Sets largest_gate to the largest of itself and the gates of this lane's token i.
template <bool HAS_OUTPUTS, typename T, int BK>
__device__ __forceinline__ void update_largest_gate(u32& largest_gate,
                                                    const InputStage<HAS_OUTPUTS, T, ScalarDecay, BK>&,
                                                    const ProducerCoord<BK>&, float scalar_gate, int i) {
  if (i == 0)
    largest_gate = max(i32(largest_gate), i32(__float_as_uint(scalar_gate)));  // each lane has one token's gate
}
template <bool HAS_OUTPUTS, typename T, int BK>
__device__ __forceinline__ void update_largest_gate(u32& largest_gate, const InputStage<HAS_OUTPUTS, T, float, BK>& in,
                                                    const ProducerCoord<BK>& coord, float, int i) {
  const uint4 four = *reinterpret_cast<const uint4*>(in.g[coord.first_row + i] + coord.channel);
  largest_gate = max(max(max(i32(largest_gate), i32(four.x)), max(i32(four.y), i32(four.z))), i32(four.w));
}
template <bool HAS_OUTPUTS, typename T, typename G, int BK>
__device__ __forceinline__ void update_largest_gate(u32& largest_gate, const InputStage<HAS_OUTPUTS, T, G, BK>& in,
                                                    const ProducerCoord<BK>& coord, float, int i) {
  const uint2 four = *reinterpret_cast<const uint2*>(in.g[coord.first_row + i] + coord.channel);
  largest_gate = max_of_each_half(max_of_each_half(largest_gate, four.x), four.y);
}

// Whether gates above 0 of this lane's 4 channels sum to more than SUBCHUNK_GROWTH or CHUNK_GROWTH; also true for NaN.
template <typename T, bool HAS_OUTPUTS, typename G, int BK>
__device__ __noinline__ bool exceeds_growth(const InputStage<HAS_OUTPUTS, T, G, BK>& in, int channel) {
  float in_subchunk[4] = {}, in_chunk[4] = {};
  bool found = false;
#pragma unroll 1
  for (int row = 0; row < CHUNK; ++row) {
    float g[4];
    unpack(g, in.g[row] + channel);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float x = max_nan(g[c], 0.f);
      in_subchunk[c] = row % SUB_CHUNK ? in_subchunk[c] + x : x, in_chunk[c] += x;
      found |= !(in_subchunk[c] <= SUBCHUNK_GROWTH && in_chunk[c] <= CHUNK_GROWTH<T>);
    }
  }
  return found;
}
// Whether a ScalarDecay's gates above 0 sum to more than SUBCHUNK_GROWTH or a fourth of CHUNK_GROWTH over a sub-chunk.
// scalar_gate: the gate of this lane's token; SUB_CHUNK neighbouring lanes have the tokens of a sub-chunk.
template <typename T> __device__ __forceinline__ bool exceeds_growth(float scalar_gate) {
  float x = max_nan(scalar_gate, 0.f);
  for (int distance = 1; distance < SUB_CHUNK; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return !(x <= SUBCHUNK_GROWTH && x <= CHUNK_GROWTH<T> / NUM_SUBCHUNKS);
}

// Two blocks with half of the channels each must both make a chunk as a whole, or both token by token. send_vote, for
// one thread: writes this block's vote to both blocks' shared memory; grows: whether the vote is for single tokens.
// wait_for_votes: waits for both votes, and returns whether one of them is for single tokens. Threads read their own
// block's vote from shared memory, too, which saves a register.
template <int K_RANKS>
__device__ __forceinline__ void send_vote(Votes<K_RANKS>& votes, int rank, int stage, bool grows) {
  votes.grows[rank][stage][0] = grows;
  fence_proxy_async();
  copy_to_other_block(votes.grows[rank][stage], sizeof votes.grows[0][0], votes.arrived[stage]);
  mbarrier_arrive(votes.arrived[stage]);
}
template <int K_RANKS> __device__ __forceinline__ bool wait_for_votes(Votes<K_RANKS>& votes, int stage, u32 parity) {
  mbarrier_wait(votes.arrived[stage], parity);
  return votes.grows[0][stage][0] | votes.grows[1][stage][0];
}

// Stores the operands of a chunk's tokens one by one in its stage, and then starts copying the inputs of the group's
// next chunk. producer: the thread's number among the block's producer threads; fills: how often the stage was filled
// before this chunk; parity: that of the phase of qk_copied[group] that says that q and k have been copied. The caller
// arrives at full[stage] for the last step.
template <class Order, class Schedule, typename T, typename G, int BK, int BV>
__device__ __noinline__ void make_tokens(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args, u32 producer,
                                         int chunk, int stage, u32 fills, u32 parity) {
  constexpr bool HAS_OUTPUTS = Schedule::has_outputs;
  constexpr int GATES = GATES_PER_TOKEN<G>, LANES = ProducerCoord<BK>::LANES, THREADS = ProducerCoord<BK>::THREADS;
  constexpr int STEPS =
      HAS_OUTPUTS && !Order::reads_before_write ? 2 : 1;  // for each token: GLA's decay, then the rest
  static_assert(STEPS * CHUNK % 2 == 0, "with the first fill an odd number");
  const ProducerCoord<BK> coord(producer);
  const int rank = Schedule::K_RANKS > 1 ? rank_in_cluster<Schedule>() : 0, tokens = s.work.tokens - chunk * CHUNK;
  const float scale = float(args.scale);
  const auto& in = s.inputs[coord.group];
  auto& header = s.headers[stage];
  // Stores row i of the lane's sub-chunk: 4 channels of q and k, and the token's score with itself. In row r of the
  // tile of scores the swizzle puts columns 8n to 8n + 7 at piece n ^ r % 8 of 16 bytes: the token's own at subchunk ^
  // i.
  const auto put = [&](int i, const float (&q)[4], const float (&k)[4], float score) {
    put_key<T>(in_tile(s.operands.k[stage][rank], coord.first_row, coord.channel), i, k);
    if constexpr (HAS_OUTPUTS) {
      put_state_query<T>(in_tile(s.operands.q[stage][rank], coord.first_row, coord.channel), i, q);
      const int lane_pair = i / 2;  // two neighbouring scores are stored at once
      if (coord.channel == 0)
        put_scores<Schedule, T>(
            reinterpret_cast<char*>(s.operands.scores(stage)[rank]) + coord.first_row * 128 + lane_pair * 4,
            (coord.subchunk ^ i) * 16 ^ s.operands.scores_offset(stage), i * 128, i & 1 ? 0.f : score,
            i & 1 ? score : 0.f);
    }
  };
  const float scalar_gate = load_scalar_gate(s, args, coord, chunk), zeros[4] = {}, ones[4] = {1.f, 1.f, 1.f, 1.f};
  mbarrier_wait(s.qk_copied[coord.group], parity);
  // Step 0 stores zeros. With STEPS of 2 token n has steps 2n + 1 (decay) and 2n + 2 (write and read), else step n + 1.
  for (int step = 0; step <= STEPS * CHUNK; ++step) {
    if (fills + step) mbarrier_wait(s.empty[stage], fills + step - 1 & 1);
    const int token = (step - 1) / STEPS, i = token % SUB_CHUNK;
    const bool decays = STEPS == 1 || step % STEPS == 1, writes = STEPS == 1 || step % STEPS == 0;
    if (step == 0) {
      if constexpr (HAS_OUTPUTS)
        for (int index = coord.thread; index < CHUNK * PANEL / 2; index += THREADS) {
          const bool second = (index ^ index / 8) & 16;  // whether `index` is in the tile's columns of stage 1
          if (!s.SHARED || second == (stage == 1)) reinterpret_cast<u32*>(s.operands.scores(stage)[rank])[index] = 0;
        }
      // The stage's scores are zero before a score is stored.
      named_barrier_sync(PRODUCER_BARRIER + coord.group, THREADS);
      for (int row = 0; row < SUB_CHUNK; ++row) put(row, zeros, zeros, 0.f);
      put_decays(header.decay[rank], coord.channel, ones);
    } else {
      float g[GATES], q[4] = {}, k[4] = {}, score = 0.f;
      load_gates(g, in, coord, scalar_gate, i);
      if (token < tokens) {
        unpack(k, in.k[coord.first_row + i] + coord.channel);
        if constexpr (HAS_OUTPUTS) {
          float uk[4];
          for (int c = 0; c < 4; ++c) uk[c] = Order::reads_before_write ? s.u[coord.channel + c] * k[c] : k[c];
          unpack(q, in.q[coord.first_row + i] + coord.channel);
          score = scale * dot(q, uk);
          for (float& x : q) x *= IS_BFLOAT16<T> ? scale : scale * TF32_CORRECTION_OF_BOTH;
        }
      }
      for (int distance = LANES / 2; distance > 0; distance /= 2)
        score += __shfl_xor_sync(0xffffffffu, score, distance);
      // the previous token's row becomes zero again
      if (decays && token % CHUNK > 0 && coord.subchunk == (token - 1) / SUB_CHUNK)
        put((token - 1) % SUB_CHUNK, zeros, zeros, 0.f);
      if (writes && coord.subchunk == token / SUB_CHUNK) put(i, q, k, score);
      float decay[4];
      for (int c = 0; c < 4; ++c) decay[c] = decays ? decay_of(g[c % GATES]) : 1.f;
      if (coord.subchunk == token / SUB_CHUNK) put_decays(header.decay[rank], coord.channel, decay);
    }
    if (coord.thread == 0) header.row[0] = max(token, 0) + (step < STEPS * CHUNK ? MORE_FILLS : 0);
    fence_proxy_async();
    // The step's operands are in shared memory: they may be sent.
    named_barrier_sync(PRODUCER_BARRIER + coord.group, THREADS);
    if constexpr (HAS_OUTPUTS && Schedule::CLUSTER_SIZE > 1)
      if (coord.thread == 0) send_operands(s, stage, rank, s.full[stage]), send_scores(s, stage, rank, s.full[stage]);
    if (step < STEPS * CHUNK) mbarrier_arrive(s.full[stage]);
  }
  const int next = chunk + Shared<Schedule, T, G, BK, BV>::PRODUCER_GROUPS;
  fetch_inputs<LOG_GATES>(s, args, coord.thread, coord.group, next, s.work.tokens);
  fetch_inputs<QUERIES_AND_KEYS>(s, args, coord.thread, coord.group, next, s.work.tokens);
}
