// what      The producer warps of Hopper's forward kernel: they multiply queries and keys of a chunk (32 tokens, in 4
//           sub-chunks of 8) by decays, and compute the scores of pairs of tokens.
// math      a_t = e^(g_t). The decay over several tokens is a product of their a_t, from or to a border between
//           sub-chunks, and never a quotient of cumulative decays: so a reset (a_t = 0) is exact
// barriers  of a group, two a chunk: the decays over all sub-chunks are in shared memory | all operands of scores are;
//           a third before scores are sent to another block; one more if gates are above a limit
// numerics  Within a sub-chunk decays are measured from its middle, and each a_t is at least LEAST: see below. If data
//           are bfloat16, operands at borders are float16, which has more digits; rows beyond its range are scaled
// limits    sm_90a; K and V multiples of 8; rows start on 16 bytes
//
// A producer warp has a sub-chunk (BK = 64: two), a lane 4 channels of it: so decays need no shuffles. All warps run
// one program. (A program for each sub-chunk took a third fewer instructions a warp, but all of them together exceeded
// the instruction cache, and the kernel took 1.5 times as long.) Gates are read first; queries and keys are read row by
// row as they are needed, since registers are scarce. The score of a query and a key, by their distance:
//   in different halves of the chunk       the query decayed from the end of the first half, the key decayed to it
//   in different sub-chunks of a half      the same, for the end of the half's first sub-chunk
//   in a sub-chunk                         the same, for its middle; a query before the middle, and a key after it, is
//                                          multiplied by an inverse decay, over three tokens at most: if no gate is
//                                          above 0 the largest factor is e^(3 * 20)
//   the same token                         q . k (GLA) or q . u k (RWKV-6): no gate, exact but for the sum
//   RWKV-6: a key and the next query       q . k: no gate lies between
// Since a_t is at least LEAST there, e^-20 of a token passes a reset within its own sub-chunk.
#include "read_order.cuh"
#include "gated/sm90/forward_growth.cuh"
#include "gated/sm90/forward_rows.cuh"
#include "gated/sm90/forward_scales.cuh"
#include "gated/sm90/forward_scores.cuh"

constexpr float LEAST = 2.0611536e-9f;  // e^-20
constexpr int MIDDLE = BC / 2;          // a sub-chunk's middle is before this token

// Stores 4 neighbouring values, which the caller has both as they were `loaded` (of type T) and as floats x.
template <typename T> __device__ __forceinline__ void put_loaded(T* to, uint2 loaded, const float (&)[4]) {
  *reinterpret_cast<uint2*>(to) = loaded;
}
__device__ __forceinline__ void put_loaded(float* to, uint2, const float (&x)[4]) { put_four(to, x); }

// 4 neighbouring values rounded to B.
template <typename B> __device__ __forceinline__ uint2 packed(const float (&x)[4]) {
  return {pack<B>(x[0], x[1]), pack<B>(x[2], x[3])};
}
// x times the scale of row i, rounded to B. loaded: the row's 4 values in memory; same: whether x are these values, so
// that no rounding is needed if T and B are one type.
template <typename T, typename B, class Scales>
__device__ __forceinline__ uint2 at_border(bool same, uint2 loaded, const float (&x)[4], const Scales& scales, int i) {
  if constexpr (SCALED<Scales>) {
    const float by = scales.of(i), y[4] = {x[0] * by, x[1] * by, x[2] * by, x[3] * by};
    return packed<B>(y);
  }
  return same && COARSE<T> == COARSE<B> ? loaded : packed<B>(x);
}

// The decays over whole sub-chunks. The lanes of a sub-chunk write its decays, and all warps of the group read all.
template <int BK> using Decays = float[NUM_SUBCHUNKS][BK];
template <int BK>
__device__ __forceinline__ void put_decay(Decays<BK>& decays, const ProducerCoord<BK>& me, const float (&x)[4]) {
  *reinterpret_cast<float4*>(&decays[me.subchunk][me.channel]) = {x[0], x[1], x[2], x[3]};
}
template <int BK>
__device__ __forceinline__ void put_decay(Decays<BK>& decays, const ProducerCoord<BK>& me, const float (&x)[1]) {
  if (me.channel == 0) decays[me.subchunk][0] = x[0];
}
template <int BK>
__device__ __forceinline__ void get_decay(float (&x)[4], const Decays<BK>& decays, const ProducerCoord<BK>& me,
                                          int subchunk) {
  unpack(x, &decays[subchunk][me.channel]);
}
template <int BK>
__device__ __forceinline__ void get_decay(float (&x)[1], const Decays<BK>& decays, const ProducerCoord<BK>&,
                                          int subchunk) {
  x[0] = decays[subchunk][0];
}

// decay *= max(a, LEAST): extends a decay within a sub-chunk by one token.
template <int W> __device__ __forceinline__ void go_on(float (&decay)[W], const float (&a)[W]) {
#pragma unroll
  for (int c = 0; c < W; ++c) decay[c] *= fmaxf(a[c], LEAST);
}
template <int W> __device__ __forceinline__ void invert(float (&y)[W], const float (&x)[W]) {
#pragma unroll
  for (int c = 0; c < W; ++c) y[c] = inverse(x[c]);
}

// `put` stores 4 neighbouring values times the decays over their half's other sub-chunk: the operands of the chunk's
// middle. If data are bfloat16 and operands at borders float16, it multiplies in float16 (`four`: the rounded values),
// which has three bits more than bfloat16; otherwise in float32 (x: the values).
template <typename T, typename B, int W> struct PastNear {
  static constexpr bool ROUNDED = COARSE<T> && !COARSE<B>;
  float near[ROUNDED ? 1 : W];
  uint2 rounded;
  __device__ __forceinline__ PastNear(const float (&x)[W]) {
    if constexpr (ROUNDED) {
      rounded = {pack<f16>(x[0], x[1 % W]), pack<f16>(x[2 % W], x[3 % W])};
    } else {
#pragma unroll
      for (int c = 0; c < W; ++c) near[c] = x[c];
    }
  }
  __device__ __forceinline__ void put(B* to, uint2 four, const float (&x)[4]) const {
    if constexpr (ROUNDED) {
      *reinterpret_cast<uint2*>(to) = {mul_f16(four.x, rounded.x), mul_f16(four.y, rounded.y)};
    } else {
      float y[4];
      times(y, x, near);
      put_four(to, y);
    }
  }
};

// Stores the sub-chunk's keys, from the last token to the first: decayed to the end of the sub-chunk, of the half (by
// `near`), and of the chunk (by `after`, the decay over all later sub-chunks); those before the middle decayed to it.
// a: decays of single tokens.
template <bool READS, typename T, int W, int BK, class Keys, class Scores, class Near, class Scales>
__device__ __forceinline__ void put_keys(Keys& keys, Scores& s, const T (&loaded)[CHUNK][BK], const float (&a)[BC][W],
                                         const ProducerCoord<BK>& me, const Near& near, const float (&after)[W],
                                         const Scales& scales) {
  const auto load = [&](int i) { return *reinterpret_cast<const uint2*>(loaded[me.first + i] + me.channel); };
  char* const first = in_tile(keys, me.first, me.channel);
  uint2 next = load(BC - 1);
  // Keys of sub-chunk 0 are stored for two borders. The vote tells the compiler that all lanes take the same branch; if
  // the warp also has sub-chunk 1, its lanes store the same values again.
  bool two_borders = false;
  char* border = nullptr;  // the address of this lane's values of the first row
  if constexpr (READS) {
    two_borders = __any_sync(0xffffffffu, me.subchunk == 0);
    border = reinterpret_cast<char*>(&s.rows[near_keys(s, me.subchunk)].border_k[me.channel]);
  }
  float to_end[W], to_middle[W];
#pragma unroll
  for (int c = 0; c < W; ++c) to_end[c] = to_middle[c] = 1.f;
#pragma unroll
  for (int i = BC - 1; i >= 0; --i) {
    float k[4], x[4];
    const uint2 own = next;
    unpack<T>(k, own);
    if (i > 0) next = load(i - 1);
    times(x, k, to_end);
    if constexpr (READS) {
      using B = typename Scores::Border;
      const uint2 four = at_border<T, B>(i == BC - 1, own, x, scales, i);
      store_if(me.subchunk < 3, border + i * sizeof s.rows[0], four);
      if (two_borders) near.put(&s.rows[s.HALF + me.first + i].border_k[me.channel], four, x);
    }
    times(x, x, after);
    put_key<T>(first, i, x);
#pragma unroll
    for (int c = 0; c < W; ++c) to_end[c] *= a[i][c];
    if constexpr (READS)
      if (i < MIDDLE) {
        times(x, k, to_middle);
        if (i == MIDDLE - 1) put_loaded(&s.rows[me.first + i].middle_k[me.channel], own, k);
        else put_four(&s.rows[me.first + i].middle_k[me.channel], x);
        go_on(to_middle, a[i]);
      }
  }
}

// Stores the sub-chunk's queries, from the first token to the last: decayed from the start of the sub-chunk, of the
// half (by `near`), and of the chunk (by `before`, the decay over all earlier sub-chunks, times scale); and from the
// middle, by inverse decays if they are before it. Also stores keys after the middle, by inverse decays. If queries
// read before the write, itself[i] becomes this lane's part of q_i . u k_i. Between rows `direct` takes its steps.
template <class Order, typename T, int W, int BK, class Queries, class Scores, class Near, class Scales, class Direct>
__device__ __forceinline__ void put_queries(Queries& queries, Scores& s, const T (&loaded)[CHUNK][BK],
                                            const T (&keys)[CHUNK][BK], const float (&a)[BC][W],
                                            const ProducerCoord<BK>& me, const Near& near, const Scales& scales,
                                            const float (&before)[W], const float (&u)[4], float (&itself)[BC],
                                            Direct& direct) {
  constexpr int INCLUSIVE = !Order::reads_before_write;
  float from_start[W], from_middle[W], back[BC][W];
#pragma unroll
  for (int c = 0; c < W; ++c) from_start[c] = from_middle[c] = 1.f;
#pragma unroll
  for (int i = MIDDLE - 1; i > 0; --i) {  // the first query has no earlier key in its sub-chunk
    if (INCLUSIVE) invert(back[i], from_middle);
    go_on(from_middle, a[i]);
    if (!INCLUSIVE) invert(back[i], from_middle);
  }
#pragma unroll
  for (int c = 0; c < W; ++c) from_middle[c] = 1.f;
  const auto load = [&](const T(&rows)[CHUNK][BK], int i) {
    return *reinterpret_cast<const uint2*>(rows[me.first + i] + me.channel);
  };
  char* const first = in_tile(queries, me.first, me.channel);
  constexpr int FIRST_KEY = INCLUSIVE ? MIDDLE : 0, LAST_KEY = INCLUSIVE ? BC - 2 : BC - 1;
  uint2 next = load(loaded, 0), next_key = load(keys, FIRST_KEY);
  const bool two_borders = __any_sync(0xffffffffu, me.subchunk == 3);  // as in put_keys
  const int border = near_queries(s, me.subchunk);
#pragma unroll
  for (int i = 0; i < BC; ++i) {
    float q[4], k[4], x[4];
    const uint2 own = next;
    if (i == 0) direct.load(0);  // row 0 takes two steps, so that the last step's result is not waited for
    else if (i + 1 < BC) direct.load(i + 1);
    unpack<T>(q, own);
    if (i + 1 < BC) next = load(loaded, i + 1);
    if (i >= FIRST_KEY && i <= LAST_KEY) unpack<T>(k, next_key);
    if (i >= FIRST_KEY && i < LAST_KEY) next_key = load(keys, i + 1);
    if (!INCLUSIVE) times(x, q, from_start);
#pragma unroll
    for (int c = 0; c < W; ++c) from_start[c] *= a[i][c];
    if (INCLUSIVE) times(x, q, from_start);
    using B = typename Scores::Border;
    const uint2 four = at_border<T, B>(!INCLUSIVE && i == 0, own, x, scales, i);
    store_if(me.subchunk > 0, &s.rows[border + i].border_q[me.channel], four);
    if (two_borders) near.put(&s.rows[s.HALF + me.first - 16 + i].border_q[me.channel], four, x);
    if (i == 0) direct.multiply_step(0), direct.load(1);
    times(x, x, before);
    put_state_query<T>(first, i, x);
    if (i > 0) {
      if (!INCLUSIVE && i >= MIDDLE) times(x, q, from_middle);
      if (i >= MIDDLE) go_on(from_middle, a[i]);
      if (INCLUSIVE && i >= MIDDLE) times(x, q, from_middle);
      if (i < MIDDLE) times(x, q, back[i]);
      if (i == MIDDLE - INCLUSIVE) put_loaded(&s.rows[me.first + i].middle_q[me.channel], own, q);
      else put_four(&s.rows[me.first + i].middle_q[me.channel], x);
    }
    if (i >= MIDDLE && i + 1 < BC) {  // the last key has no later query in its sub-chunk
      invert(back[i], from_middle);
      times(x, k, back[i]);
      put_four(&s.rows[me.first + i].middle_k[me.channel], x);
    }
    if (!INCLUSIVE) {
      times(k, k, u);
      itself[i] = dot(q, k);
    }
    if (i + 1 < BC) direct.multiply_step(i + 1);
  }
}

// One chunk that a producer group makes.
struct Turn {
  int group, rank, chunk;
  int next;         // the group's next chunk
  int tokens;       // of the sequence
  u32 stage, used;  // the stage for the operands, and how often it was filled before
  u32 parity;       // of gates[group] and rows[group]

  // The number of tokens in the sequence's last chunk if that is this one and not full; otherwise 0.
  __device__ __forceinline__ int partial() const { return chunk * CHUNK + CHUNK > tokens ? tokens - chunk * CHUNK : 0; }
};

// The result of make_chunk. MADE: the operands are complete. GROWS: no operand was made, since a gate exceeds the limit
// or an earlier chunk was BEYOND. BEYOND: a row exceeds float16's range, so that the operands are wrong, and the copies
// of the next chunk's inputs have been started. After GROWS and BEYOND the caller calls make_scaled or make_tokens.
enum class Chunk { MADE, GROWS, BEYOND };

// Makes the operands of a chunk, and starts copying the inputs of the group's next chunk as soon as this chunk's have
// been read. gate, next_gate: this lane's ScalarDecay of this chunk and of the next. SCALE: rows are scaled
// (forward_scales.cuh). scaled: an earlier chunk was BEYOND. GROWS is returned only before any operand is stored.
template <class Order, bool SCALE, class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ Chunk make_chunk(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args,
                                            const ProducerCoord<BK>& me, const Turn& turn, float gate, float& next_gate,
                                            bool scaled) {
  using P = ProducerCoord<BK>;
  constexpr int W = WIDTH<G>;
  constexpr bool READS = Schedule::reads;
  const auto& in = s.inputs[me.group];
  auto& scores = s.scores[me.group];
  auto& numbers = s.numbers[turn.stage];
  Barrier& full = s.full[turn.stage];
  const auto& decays = s.decays[me.group];
  const float scale = float(args.scale);
  float a[BC][W], decay[W];
  using Border = typename BorderOf<Schedule::K_RANKS, T>::type;
  constexpr u32 LARGEST = NARROWS<Schedule, T> ? EIGHTH<G> : LARGEST_GATE<T, G>;
  u32 most = LARGEST;
#pragma unroll
  for (int c = 0; c < W; ++c) decay[c] = 1.f;
#pragma unroll
  for (int i = 0; i < BC; ++i) {
    float g[W];
    gates_of(g, in, me, gate, i);
    note_growth(most, in, me, gate, i);
#pragma unroll
    for (int c = 0; c < W; ++c) decay[c] *= a[i][c] = decay_of(g[c]);
  }
  put_decay(s.decays[me.group], me, decay);
  if constexpr (W == 4) fence_async();  // orders these reads before the next copy of gates
  // The sub-chunks' decays are in shared memory; all warps have read their gates and the previous chunk's `scores`.
  bool grows = barrier_any(PRODUCERS + me.group, P::THREADS, most != LARGEST || scaled);
  const bool grown = grows;
  if ((SCALE || !NARROWS<Schedule, T>) && grown) {
    bool mine = exceeds<G>(most, LARGEST_GATE<T, G>);
    if constexpr (W == 1) mine &= outgrows<T>(gate);
    else mine = mine && outgrows<T>(in, me.channel);
    grows = barrier_any(PRODUCERS + me.group, P::THREADS, mine);
  }
  const auto fetch_next_gates = [&] {
    fetch_gates(s, args, me.thread, turn.group, turn.next, turn.tokens);
    next_gate = gate_of(s, args, me, turn.next);
  };
  const auto fetch_next_rows = [&] { fetch_rows(s, args, me.thread, turn.group, turn.next, turn.tokens); };
  if constexpr (Schedule::K_RANKS > 1) {
    if (me.thread == 0) tell_both(s.votes, turn.rank, turn.stage, grows);
  } else if (!grows) fetch_next_gates();  // before the wait for the stage, since the copy's latency is not hidden
  // near: the decay over the half's other sub-chunk; far: over the other half. The decay over all sub-chunks after this
  // one, or before it, is the product of none, one or both of them. outer: near for sub-chunks 0 and 3, whose keys and
  // queries are also stored for the chunk's middle; 1 for the others if a warp has two sub-chunks: see two_borders.
  float near[W], far[W], across[W], outer[W];
  get_decay(near, decays, me, me.subchunk ^ 1);
  get_decay(far, decays, me, me.subchunk ^ 2);
  get_decay(across, decays, me, me.subchunk ^ 3);
#pragma unroll
  for (int c = 0; c < W; ++c) {
    far[c] *= across[c];
    outer[c] = P::LANES == 32 || me.subchunk == 0 || me.subchunk == 3 ? near[c] : 1.f;
  }
  const auto join = [&](bool half, bool other) {
#pragma unroll
    for (int c = 0; c < W; ++c) {
      across[c] = other ? far[c] : 1.f;
      if (half) across[c] *= near[c];
    }
  };
  join(me.subchunk % 2 == 0, me.subchunk < 2);  // across: the decay over all sub-chunks after this one
  const PastNear<T, Border, W> past_near(outer);
  if (turn.used) barrier_wait(s.empty[turn.stage], turn.used - 1 & 1);
  if constexpr (Schedule::K_RANKS > 1) grows = either_grows(s.votes, turn.stage, turn.used & 1);
  if (__builtin_expect(grows, false)) return Chunk::GROWS;
  if constexpr (Schedule::K_RANKS > 1) fetch_next_gates();
  barrier_wait(s.rows[me.group], turn.parity);
  if (turn.partial()) clear_keys(s.inputs[me.group], me.first, turn.partial(), me.channel);
  constexpr int WARPS = P::THREADS / 32, N = ScoreShare<WARPS>::N;
  constexpr bool BEFORE = Order::reads_before_write;
  const auto k_scales = scales_of<SCALE>(in.k, me, grown);
  put_keys<READS, T>(s.operands.k[turn.stage][turn.rank], scores, in.k, a, me, past_near, across, k_scales);
  join(me.subchunk % 2 == 1, me.subchunk >= 2);  // across: the decay over all sub-chunks before this one
  if (me.subchunk == NUM_SUBCHUNKS - 1) {
    float whole[4] = {1.f, 1.f, 1.f, 1.f}, own[W];
    get_decay(own, decays, me, me.subchunk);
    times(whole, whole, across);
    times(whole, whole, own);
    put_decays(numbers.decay[turn.rank], me.channel, whole);
    numbers.row[0] = ALL_ROWS;
  }
  if constexpr (READS) {
    float itself[BC], u[4];
#pragma unroll
    for (int c = 0; c < W; ++c) across[c] *= COARSE<T> ? scale : scale * TRUNCATED;
    if (BEFORE) unpack(u, &s.u[me.channel]);
    const int lane = u32(me.thread) % 32, warp = u32(me.thread) / 32;
    __syncwarp();  // zeros that other lanes stored to keys after the sequence's end are visible
    const auto q_scales = scales_of<SCALE>(in.q, me, grown);
    if constexpr (SCALE) put_undo(scores, me, q_scales, k_scales);
    constexpr bool LOOK = NARROWS<Schedule, T> && !SCALE;
    DirectProducts<BEFORE, LOOK, N, T, BK> direct(in.q, in.k, warp * N, lane);
    put_queries<Order>(s.operands.q[turn.stage][turn.rank], scores, in.q, in.k, a, me, past_near, q_scales, across, u,
                       itself, direct);
    if (LOOK && direct.out_of_range(lane)) scores.beyond = true;
    fence_async();                                   // orders these reads before the next copies of q and k
    barrier_sync(PRODUCERS + me.group, P::THREADS);  // all operands are in shared memory; q and k have been read
    const bool beyond = LOOK && scores.beyond;
    fetch_next_rows();
    if (Schedule::CLUSTER_SIZE > 1 && me.thread == 0 && !beyond) send_operands(s, turn.stage, turn.rank, full);
    make_scores<WARPS, Order, Schedule, SCALE>(s.operands.scores(turn.stage)[turn.rank], scores, direct.scores, itself,
                                               s.operands.flip(turn.stage), scale, warp, lane);
    if (LOOK && __builtin_expect(__any_sync(0xffffffffu, beyond), false)) return Chunk::BEYOND;
    if constexpr (Schedule::CLUSTER_SIZE > 1) {
      fence_async();
      barrier_sync(PRODUCERS + me.group, P::THREADS);  // all scores are in shared memory: one thread may send them
      if (me.thread == 0) send_scores(s, turn.stage, turn.rank, full);
    }
  } else {
    fence_async();                                   // orders these reads before the next copy of k
    barrier_sync(PRODUCERS + me.group, P::THREADS);  // keys and the sub-chunks' decays have been read
    fetch_next_rows();
  }
  return Chunk::MADE;
}

// Makes a chunk whose rows exceed float16's range, or which has gates above 1/8: rows are scaled; token by token if the
// gates are too large for that. parity: of rows[group]. again: make_chunk returned BEYOND, so that the chunk's inputs
// must be copied once more.
template <class Order, class Schedule, typename T, typename G, int BK, int BV>
__device__ __noinline__ void make_scaled(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args, u32 producer,
                                         int chunk, int stage, u32 used, u32 parity, bool again) {
  const ProducerCoord<BK> me(producer);
  if (again) fetch_again(s, args, me, chunk, parity);
  else barrier_sync(PRODUCERS + me.group, me.THREADS);  // all have read the decays, which make_chunk stores again
  const Turn turn{me.group, 0, chunk, chunk + s.MAKERS, s.work.tokens, u32(stage), used, parity};
  float next_gate;  // not used: the caller loads it itself
  if (make_chunk<Order, true>(s, args, me, turn, gate_of(s, args, me, chunk), next_gate, false) != Chunk::MADE)
    make_tokens<Order>(s, args, producer, chunk, stage, used, parity);
}

// The producers' loop over the chunks of their group. thread: the number among the block's producer threads.
template <class Order, class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void produce(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args, int thread) {
  using P = ProducerCoord<BK>;
  using S = Shared<Schedule, T, G, BK, BV>;
  constexpr int GROUPS = S::GROUPS, CHUNK_RANKS = Schedule::CHUNK_RANKS;
  const WorkTile& at = s.work;
  const int tokens = at.tokens;
  int group = GROUPS > 1 ? u32(thread) / P::THREADS : 0;
  const int rank = Schedule::K_RANKS > 1 ? rank_of<Schedule>() : 0;
  int maker = group * CHUNK_RANKS + (CHUNK_RANKS > 1 ? rank_of<Schedule>() : 0);
  fetch_gates(s, args, thread % P::THREADS, group, maker, tokens);
  fetch_rows(s, args, thread % P::THREADS, group, maker, tokens);
  float next_gate = gate_of(s, args, P(thread), maker);
  u32 iteration = 0;
  bool scaled =
      false;  // whether a chunk was BEYOND: later ones are scaled at once, since it is slow to make them twice
  for (int chunk = maker; chunk * CHUNK < tokens; chunk += S::MAKERS, ++iteration) {
    // `forget` hides a value's origin: the compiler computes addresses again instead of holding them in registers.
    // PLENTY: these instances have registers enough.
    constexpr bool PLENTY = NARROWS<Schedule, T> && Schedule::CLUSTER_SIZE > 1 && BK + BV > 128 && sizeof(G) <= 2;
    if constexpr (!PLENTY) {
      if constexpr (BK + BV > 128 || sizeof(G) == 4 || Schedule::CLUSTER_SIZE > 1) forget(thread);
      if constexpr (NARROWS<Schedule, T> && (BK + BV > 128 || Order::reads_before_write)) forget(group), forget(maker);
      if constexpr (sizeof(G) == 4) forget(maker);
    }
    const P me{GROUPS > 1 ? u32(thread) : u32(thread) % P::THREADS};  // `%` tells the compiler that the group is 0
    const float gate = next_gate;
    const u32 stage = S::MAKERS == S::STAGES ? u32(maker) : u32(chunk) % S::STAGES;
    const u32 used = S::MAKERS == S::STAGES ? iteration : u32(chunk) / S::STAGES;
    const Turn turn{group, rank, chunk, chunk + S::MAKERS, tokens, stage, used, iteration & 1};
    if (WIDTH<G> == 4) {
      barrier_wait(s.gates[group], turn.parity);
      if (turn.partial()) clear_gates(s.inputs[group], me.first, turn.partial(), me.channel);
    }
    const Chunk found = make_chunk<Order, false>(s, args, me, turn, gate, next_gate, scaled);
    if (__builtin_expect(found != Chunk::MADE, false)) {
      const bool again = found == Chunk::BEYOND;
      scaled |= again;
      if constexpr (NARROWS<Schedule, T>) make_scaled<Order>(s, args, thread, chunk, stage, used, turn.parity, again);
      else make_tokens<Order>(s, args, thread, chunk, stage, used, turn.parity);
      next_gate = gate_of(s, args, P(thread), turn.next);
    }
    fence_async();
    barrier_arrive(s.full[stage]);
  }
}
