// what      Hopper's forward kernel for a chunk with large growth: log gates so far above 0 that a chunk's operands
//           would leave their types' ranges. It says which chunks have it, and makes their tokens one by one, for the
//           same products as whole chunks.
// math      a token in two steps:  S <- diag(a_t) S;  o_t = scale (q_t S + (q_t . k_t) v_t),  S <- S + k_t v_t^T;
//           RWKV-6, in one:        o_t = scale (q_t S + (q_t . u k_t) v_t),  S <- diag(a_t) S + k_t v_t^T
//           a_t = e^(g_t) [K]
// barriers  of a group, two: first, scores are zero; then one a step: the step's operands are in shared memory
// numerics  it multiplies by decays of single tokens, never by their inverses: results are finite wherever the
//           recurrence token by token is
// limits    sm_90a. 33 or 65 times a chunk's products: hardly any model has such gates
//
// The chunk's stage is filled once with zeros, then once for every step, with one row. The number of fills is odd: so
// `full` and `empty` have the same parity afterwards as if the stage had been filled once.
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

// If no gate of a chunk exceeds this one, the chunk is computed as a whole. With 32 such gates ordinary operands stay
// in T's range. A reset (a_t = 0) counts as e^-20 within its sub-chunk, and at most 7 gates of 1 follow it: so at most
// e^-13 of a token passes a reset.
template <typename T, typename G> constexpr u32 LARGEST_GATE = COARSE<T> ? ONE<G> : EIGHTH<G>;

// A chunk with larger gates is computed as a whole, too, if each channel's gates above 0 sum to at most this many nats,
// over each sub-chunk and over the chunk.
constexpr float SUBCHUNK_GROWTH = 7.f;
template <typename T> constexpr float CHUNK_GROWTH = COARSE<T> ? 32.f : 4.f;

// Whether `most` is larger than the gate `other`. Of 16-bit gates both hold two, and one larger gate is enough.
template <typename G> __device__ __forceinline__ bool exceeds(u32 most, u32 other) {
  if (sizeof(G) == 2) return larger_of_halves(most, other) != other;
  return i32(most) > i32(other);
}

// most <- the larger of it and the gates of this lane's token i.
template <bool READS, typename T, int BK>
__device__ __forceinline__ void note_growth(u32& most, const InputStage<READS, T, ScalarDecay, BK>&,
                                            const ProducerCoord<BK>&, float scalar_gate, int i) {
  if (i == 0) most = max(i32(most), i32(__float_as_uint(scalar_gate)));  // each lane has one token's gate
}
template <bool READS, typename T, int BK>
__device__ __forceinline__ void note_growth(u32& most, const InputStage<READS, T, float, BK>& in,
                                            const ProducerCoord<BK>& me, float, int i) {
  const uint4 four = *reinterpret_cast<const uint4*>(in.g[me.first + i] + me.channel);
  most = max(max(max(i32(most), i32(four.x)), max(i32(four.y), i32(four.z))), i32(four.w));
}
template <bool READS, typename T, typename G, int BK>
__device__ __forceinline__ void note_growth(u32& most, const InputStage<READS, T, G, BK>& in,
                                            const ProducerCoord<BK>& me, float, int i) {
  const uint2 four = *reinterpret_cast<const uint2*>(in.g[me.first + i] + me.channel);
  most = larger_of_halves(larger_of_halves(most, four.x), four.y);
}

// Whether gates above 0 of this lane's 4 channels sum to more than SUBCHUNK_GROWTH or CHUNK_GROWTH; also true for NaN.
template <typename T, bool READS, typename G, int BK>
__device__ __noinline__ bool outgrows(const InputStage<READS, T, G, BK>& in, int channel) {
  float in_subchunk[4] = {}, in_chunk[4] = {};
  bool found = false;
#pragma unroll 1
  for (int row = 0; row < CHUNK; ++row) {
    float g[4];
    unpack(g, in.g[row] + channel);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float x = at_least(g[c], 0.f);
      in_subchunk[c] = row % BC ? in_subchunk[c] + x : x, in_chunk[c] += x;
      found |= !(in_subchunk[c] <= SUBCHUNK_GROWTH && in_chunk[c] <= CHUNK_GROWTH<T>);
    }
  }
  return found;
}
// The same for a ScalarDecay, of which a lane has one token's: each sub-chunk may have its share of CHUNK_GROWTH.
template <typename T> __device__ __forceinline__ bool outgrows(float scalar_gate) {
  float x = at_least(scalar_gate, 0.f);
  for (int distance = 1; distance < BC; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return !(x <= SUBCHUNK_GROWTH && x <= CHUNK_GROWTH<T> / NUM_SUBCHUNKS);
}

// Two blocks with half of the channels each must both make a chunk as a whole, or both token by token. tell_both, for
// one thread: writes this block's vote to both blocks. either_grows: waits for both votes, and returns whether one of
// them is for single tokens. Threads read their own block's vote from shared memory, too, which saves a register.
template <int K_RANKS>
__device__ __forceinline__ void tell_both(Votes<K_RANKS>& votes, int rank, int stage, bool grows) {
  votes.grows[rank][stage][0] = grows;
  fence_async();
  copy_to_peer(votes.grows[rank][stage], sizeof votes.grows[0][0], votes.told[stage]);
  barrier_arrive(votes.told[stage]);
}
template <int K_RANKS> __device__ __forceinline__ bool either_grows(Votes<K_RANKS>& votes, int stage, u32 parity) {
  barrier_wait(votes.told[stage], parity);
  return votes.grows[0][stage][0] | votes.grows[1][stage][0];
}

// Makes a chunk's tokens one by one in its stage, and then starts copying the group's next chunk. used: how often the
// stage was filled before this chunk; parity: of rows[group]. The caller arrives at full[stage] for the last step.
template <class Order, class Schedule, typename T, typename G, int BK, int BV>
__device__ __noinline__ void make_tokens(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args, u32 producer,
                                         int chunk, int stage, u32 used, u32 parity) {
  constexpr bool READS = Schedule::reads;
  constexpr int W = WIDTH<G>, LANES = ProducerCoord<BK>::LANES, THREADS = ProducerCoord<BK>::THREADS;
  constexpr int STEPS = READS && !Order::reads_before_write ? 2 : 1;  // for each token
  const ProducerCoord<BK> me(producer);
  const int rank = Schedule::K_RANKS > 1 ? rank_of<Schedule>() : 0, tokens = s.work.tokens - chunk * CHUNK;
  const float scale = float(args.scale);
  const auto& in = s.inputs[me.group];
  auto& numbers = s.numbers[stage];
  const auto put = [&](int i, const float (&q)[4], const float (&k)[4], float score) {  // stores row i of the sub-chunk
    put_key<T>(in_tile(s.operands.k[stage][rank], me.first, me.channel), i, k);
    if constexpr (READS) {
      put_state_query<T>(in_tile(s.operands.q[stage][rank], me.first, me.channel), i, q);
      const int t = i / 2;
      if (me.channel == 0)
        put_scores<Schedule, T>(reinterpret_cast<char*>(s.operands.scores(stage)[rank]) + me.first * 128 + t * 4,
                                (me.subchunk ^ i) * 16 ^ s.operands.flip(stage), i * 128, i & 1 ? 0.f : score,
                                i & 1 ? score : 0.f);
    }
  };
  const float scalar_gate = gate_of(s, args, me, chunk), zeros[4] = {}, ones[4] = {1.f, 1.f, 1.f, 1.f};
  barrier_wait(s.rows[me.group], parity);
  for (int step = 0; step <= STEPS * CHUNK; ++step) {
    if (used + step) barrier_wait(s.empty[stage], used + step - 1 & 1);
    const int token = (step - 1) / STEPS, i = token % BC;
    const bool decays = STEPS == 1 || step % STEPS == 1, acts = STEPS == 1 || step % STEPS == 0;
    if (step == 0) {
      if constexpr (READS)
        for (int at = me.thread; at < CHUNK * PANEL / 2; at += THREADS) {
          const bool other = (at ^ at / 8) & 16;  // whether `at` is in the tile's columns of stage 1
          if (!s.SHARED || other == (stage == 1)) reinterpret_cast<u32*>(s.operands.scores(stage)[rank])[at] = 0;
        }
      barrier_sync(PRODUCERS + me.group, THREADS);  // the stage's scores are zero before a score is stored
      for (int row = 0; row < BC; ++row) put(row, zeros, zeros, 0.f);
      put_decays(numbers.decay[rank], me.channel, ones);
    } else {
      float g[W], q[4] = {}, k[4] = {}, score = 0.f;
      gates_of(g, in, me, scalar_gate, i);
      if (token < tokens) {
        unpack(k, in.k[me.first + i] + me.channel);
        if constexpr (READS) {
          float uk[4];
          for (int c = 0; c < 4; ++c) uk[c] = Order::reads_before_write ? s.u[me.channel + c] * k[c] : k[c];
          unpack(q, in.q[me.first + i] + me.channel);
          score = scale * dot(q, uk);
          for (float& x : q) x *= COARSE<T> ? scale : scale * TRUNCATED;
        }
      }
      for (int distance = LANES / 2; distance > 0; distance /= 2)
        score += __shfl_xor_sync(0xffffffffu, score, distance);
      if (decays && token % CHUNK > 0 && me.subchunk == (token - 1) / BC) put((token - 1) % BC, zeros, zeros, 0.f);
      if (acts && me.subchunk == token / BC) put(i, q, k, score);
      float by[4];
      for (int c = 0; c < 4; ++c) by[c] = decays ? decay_of(g[c % W]) : 1.f;
      if (me.subchunk == token / BC) put_decays(numbers.decay[rank], me.channel, by);
    }
    if (me.thread == 0) numbers.row[0] = max(token, 0) + (step < STEPS * CHUNK ? AGAIN : 0);
    fence_async();
    barrier_sync(PRODUCERS + me.group, THREADS);  // the step's operands are in shared memory: they may be sent
    if constexpr (READS && Schedule::CLUSTER_SIZE > 1)
      if (me.thread == 0) send_operands(s, stage, rank, s.full[stage]), send_scores(s, stage, rank, s.full[stage]);
    if (step < STEPS * CHUNK) barrier_arrive(s.full[stage]);
  }
  const int next = chunk + Shared<Schedule, T, G, BK, BV>::MAKERS;
  fetch_gates(s, args, me.thread, me.group, next, s.work.tokens);
  fetch_rows(s, args, me.thread, me.group, next, s.work.tokens);
}
