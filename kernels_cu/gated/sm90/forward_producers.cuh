// what      The producer warps of Hopper's forward kernel: they decay queries and keys, and score tokens.
// math      a_t = e^(g_t), multiplied up from and to borders; no difference of cumulated gates: resets are exact there
// barriers  two a chunk of a group: every sub-chunk's decay stands | all operands stand; one more where another block
//           gets the scores
// numerics  within a sub-chunk factors about its middle, of decays of at least LEAST: see below. What meets at borders
//           is float16 beside bfloat16, whose digits are few; rows for which it lacks the range are scaled
// limits    sm_90a; K and V multiples of 8; rows start on 16 bytes
//
// A producer warp has a sub-chunk of 8 tokens (BK = 64: two), a lane 4 channels of it: no decay needs a shuffle. All
// warps go through one program: with one for each sub-chunk, shorter by a third, instructions left their cache, and it
// took half as long again. Gates are read ahead of the rest, which is read as it is needed, since registers are scarce.
// Scores of two tokens, whatever the gates:
//   in different halves of a chunk        queries decayed from, keys decayed to the end of the first half
//   in different sub-chunks of a half     queries decayed from, keys decayed to the end of the first sub-chunk
//   in a sub-chunk                        queries and keys decayed to its middle, backwards for those on the same side:
//                                         three tokens at most, so e^(3 * 20) is the largest factor where gates decay
//   a token with itself                   q . k (GLA) or q . u k (RWKV-6), which no gate touches, exact but for a sum
//   a token with the last one             in float32; likewise in RWKV-6, within a chunk, for rows of few scores
// A clamped decay lets e^-20 of a token through, to its own sub-chunk alone.
#include "read_order.cuh"
#include "gated/sm90/forward_growth.cuh"
#include "gated/sm90/forward_rows.cuh"
#include "gated/sm90/forward_scales.cuh"
#include "gated/sm90/forward_scores.cuh"

constexpr float LEAST = 2.0611536e-9f;  // e^-20
constexpr int MIDDLE = BC / 2;          // of a sub-chunk: before this token

// Stores 4 neighbours as they came: x is what `loaded` holds.
template <typename T> __device__ __forceinline__ void put_loaded(T* to, uint2 loaded, const float (&)[4]) {
  *reinterpret_cast<uint2*>(to) = loaded;
}
__device__ __forceinline__ void put_loaded(float* to, uint2, const float (&x)[4]) { put_four(to, x); }

// 4 neighbours in B.
template <typename B> __device__ __forceinline__ uint2 packed(const float (&x)[4]) {
  return {pack<B>(x[0], x[1]), pack<B>(x[2], x[3])};
}
// Row i in B, scaled; loaded: what it came as, which it still is where it is `same`.
template <typename T, typename B, class Scales>
__device__ __forceinline__ uint2 at_border(bool same, uint2 loaded, const float (&x)[4], const Scales& scales, int i) {
  if constexpr (SCALED<Scales>) {
    const float by = scales.of(i), y[4] = {x[0] * by, x[1] * by, x[2] * by, x[3] * by};
    return packed<B>(y);
  }
  return same && COARSE<T> == COARSE<B> ? loaded : packed<B>(x);
}

// The sub-chunks' decays, each put by its own warp for the group's others.
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

// decay *= a token's decays, of at least LEAST.
template <int W> __device__ __forceinline__ void go_on(float (&decay)[W], const float (&a)[W]) {
#pragma unroll
  for (int c = 0; c < W; ++c) decay[c] *= fmaxf(a[c], LEAST);
}
template <int W> __device__ __forceinline__ void invert(float (&y)[W], const float (&x)[W]) {
#pragma unroll
  for (int c = 0; c < W; ++c) y[c] = inverse(x[c]);
}

// 4 neighbours, x or packed in B, times the decays of a half's other sub-chunk. Beside bfloat16 float16 has digits
// enough to take both factors rounded.
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

// Keys, from the last token to the first: decayed to the sub-chunk's end, to the half's by `near`, to the chunk's by
// `after`; and about the middle.
template <bool READS, typename T, int W, int BK, class Keys, class Scores, class Near, class Scales>
__device__ __forceinline__ void put_keys(Keys& keys, Scores& s, const T (&loaded)[CHUNK][BK], const float (&a)[BC][W],
                                         const ProducerCoord<BK>& me, const Near& near, const float (&after)[W],
                                         const Scales& scales) {
  const auto load = [&](int i) { return *reinterpret_cast<const uint2*>(loaded[me.first + i] + me.channel); };
  char* const first = in_tile(keys, me.first, me.channel);
  uint2 next = load(BC - 1);
  // Sub-chunk 0 has two borders to come. A vote, so that the compiler knows that all lanes of a warp go one way.
  bool two_borders = false;
  char* border = nullptr;  // this lane's place in the first row
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

// Queries, from the first token to the last: decayed from the sub-chunk's start, from the half's by `near`, from the
// chunk's by `before`, and about the middle; where these read before the write, with their own keys (`itself`). Then
// keys behind the middle.
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
  for (int i = MIDDLE - 1; i > 0; --i) {  // the first query meets nobody
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
  const bool two_borders = __any_sync(0xffffffffu, me.subchunk == 3);  // behind it, likewise
  const int border = near_queries(s, me.subchunk);
#pragma unroll
  for (int i = 0; i < BC; ++i) {
    float q[4], k[4], x[4];
    const uint2 own = next;
    if (i == 0) direct.load(0);  // a step early, so that nobody waits for the last one
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
    if (i >= MIDDLE && i + 1 < BC) {  // the last key meets nobody
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

// A group's turn to make a chunk: which one it is and which one follows, the tokens of the sequence, and the stage that
// takes the operands, with how often it was used before. parity: of rows[group].
struct Turn {
  int group, rank, chunk, next, tokens;
  u32 stage, used, parity;

  // How many tokens of the chunk there are, 0 for all.
  __device__ __forceinline__ int partial() const { return chunk * CHUNK + CHUNK > tokens ? tokens - chunk * CHUNK : 0; }
};

// What became of a chunk: it is made; or it must be made otherwise, since its gates grow, or a chunk before was scaled;
// or since some of its rows are beyond the range of borders: then all of it was made, and the next one is asked for.
enum class Chunk { MADE, GROWS, BEYOND };

// Makes what consumers need of a chunk, and asks for the group's next one as soon as its place has been read. Gates
// that all channels share are `gate`, and `next_gate` becomes the next chunk's. SCALE: rows are scaled.
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
  // Decays stand; gates and the last operands of scores are read.
  bool grows = barrier_any(PRODUCERS + me.group, P::THREADS, most != LARGEST || scaled);
  const bool grown = grows;
  if (SCALE && grown) grows = barrier_any(PRODUCERS + me.group, P::THREADS, exceeds<G>(most, LARGEST_GATE<T, G>));
  const auto fetch_next_gates = [&] {
    if (me.thread == 0) fetch_gates(s, args, turn.group, turn.next, turn.tokens);
    next_gate = gate_of(s, args, me, turn.next);
  };
  const auto fetch_next_rows = [&] {
    if (me.thread == 0) fetch_rows(s, args, turn.group, turn.next, turn.tokens);
  };
  if constexpr (Schedule::K_RANKS > 1) {
    if (me.thread == 0) tell_both(s.votes, turn.rank, turn.stage, grows);
  } else if (!grows) fetch_next_gates();  // not after the wait for the stage: how long gates are on their way shows
  // Decays of the half's other sub-chunk, and of the other half. Those of what lies behind this sub-chunk, or before
  // it, are products of one, both or none. outer: of the half's other sub-chunk if it is the outer one; where all of a
  // warp are in one sub-chunk, nobody asks for it otherwise.
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
  join(me.subchunk % 2 == 0, me.subchunk < 2);  // behind
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
  join(me.subchunk % 2 == 1, me.subchunk >= 2);  // before
  if (me.subchunk == NUM_SUBCHUNKS - 1) {
    float whole[4] = {1.f, 1.f, 1.f, 1.f}, own[W];
    get_decay(own, decays, me, me.subchunk);
    times(whole, whole, across);
    times(whole, whole, own);
    put_decays(numbers.decay[turn.rank], me.channel, whole);
    numbers.row[0] = ALL;
  }
  if constexpr (READS) {
    float itself[BC], u[4];
#pragma unroll
    for (int c = 0; c < W; ++c) across[c] *= COARSE<T> ? scale : scale * TRUNCATED;
    if (BEFORE) unpack(u, &s.u[me.channel]);
    const int lane = u32(me.thread) % 32, warp = u32(me.thread) / 32;
    __syncwarp();  // keys that other lanes cleared
    const auto q_scales = scales_of<SCALE>(in.q, me, grown);
    if constexpr (SCALE) put_undo(scores, me, q_scales, k_scales);
    constexpr bool LOOK = NARROWS<Schedule, T> && !SCALE;
    DirectProducts<BEFORE, LOOK, N, T, BK> direct(in.q, in.k, warp * N, lane);
    put_queries<Order>(s.operands.q[turn.stage][turn.rank], scores, in.q, in.k, a, me, past_near, q_scales, across, u,
                       itself, direct);
    if (LOOK && direct.out_of_range(lane)) scores.beyond = true;
    if constexpr (Schedule::CLUSTER_SIZE > 1) fence_async();
    barrier_sync(PRODUCERS + me.group, P::THREADS);  // all operands stand, queries and keys are read
    const bool beyond = LOOK && scores.beyond;
    fetch_next_rows();
    if (Schedule::CLUSTER_SIZE > 1 && me.thread == 0 && !beyond) send_operands(s, turn.stage, turn.rank, full);
    make_scores<WARPS, Order, Schedule, SCALE>(s.operands.scores(turn.stage)[turn.rank], scores, direct.scores, itself,
                                               s.operands.flip(turn.stage), scale, warp, lane);
    if (LOOK && __builtin_expect(__any_sync(0xffffffffu, beyond), false)) return Chunk::BEYOND;
    if constexpr (Schedule::CLUSTER_SIZE > 1) {
      fence_async();
      barrier_sync(PRODUCERS + me.group, P::THREADS);  // the scores stand
      if (me.thread == 0) send_scores(s, turn.stage, turn.rank, full);
    }
  } else {
    barrier_sync(PRODUCERS + me.group, P::THREADS);  // keys and the sub-chunks' decays have been read
    fetch_next_rows();
  }
  return Chunk::MADE;
}

// Makes a chunk of which rows are beyond the range of borders, or gates between 1/8 and 1, or any other one. parity: of
// rows[group]; again: it was made before, and the next one has already been asked for.
template <class Order, class Schedule, typename T, typename G, int BK, int BV>
__device__ __noinline__ void make_scaled(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args, u32 producer,
                                         int chunk, int stage, u32 used, u32 parity, bool again) {
  const ProducerCoord<BK> me(producer);
  if (again) fetch_again(s, args, me, chunk, parity);
  else barrier_sync(PRODUCERS + me.group, me.THREADS);  // sub-chunks' decays, put once more below, have been read
  const Turn turn{me.group, 0, chunk, chunk + s.MAKERS, s.work.tokens, u32(stage), used, parity};
  float next_gate;  // the caller has it
  if (make_chunk<Order, true>(s, args, me, turn, gate_of(s, args, me, chunk), next_gate, false) != Chunk::MADE)
    make_tokens<Order>(s, args, producer, chunk, stage, used, parity);
}

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
  if (thread % P::THREADS == 0) fetch_gates(s, args, group, maker, tokens), fetch_rows(s, args, group, maker, tokens);
  float next_gate = gate_of(s, args, P(thread), maker);
  u32 iteration = 0;
  bool scaled = false;  // since rows were beyond the range of borders: to make every such chunk twice would take long
  for (int chunk = maker; chunk * CHUNK < tokens; chunk += S::MAKERS, ++iteration) {
    // Addresses are cheaper made anew than held in registers, where these are scarce.
    constexpr bool PLENTY = NARROWS<Schedule, T> && Schedule::CLUSTER_SIZE > 1 && BK + BV > 128 && sizeof(G) <= 2;
    if constexpr (!PLENTY) {
      if constexpr (BK + BV > 128 || sizeof(G) == 4 || Schedule::CLUSTER_SIZE > 1) forget(thread);
      if constexpr (NARROWS<Schedule, T> && (BK + BV > 128 || Order::reads_before_write)) forget(group), forget(maker);
      if constexpr (sizeof(G) == 4) forget(maker);
    }
    const P me{GROUPS > 1 ? u32(thread) : u32(thread) % P::THREADS};  // of one group, which the compiler then knows
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
