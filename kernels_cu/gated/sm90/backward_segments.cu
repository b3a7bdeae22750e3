// what      GLA and RWKV-6 backward on Hopper, for sequences cut into segments: computes, for each segment, its final
//           state S and, in the other direction, the gradient dS of the state before it; and the segment's decay. The
//           direction of S is forwards in time, that of dS backwards.
// math      per chunk of 32 tokens (4 sub-chunks of 8), with decays [K], e^(sum of log gates g): C over all gates of
//           the chunk, L_j over those after j, E_i over those up to i (RWKV-6: up to i - 1); D over all gates between
//           the chunk and the segment's border, which is its end for S, its start for dS.
//           S, from the last chunk to the first: S += sum_j D L_j k_j v_j^T, D <- D C, until D is almost 0.
//           dS, from the first chunk to the last: dS += scale sum_i D E_i q_i do_i^T, D <- D C.
//           If gates are too far above 0, or a number of S or dS is below 2^21 times the decay of what is left out, so
//           that it may not hide that (hides_forgotten), a second walk in the other direction, to the border:
//           S <- C S + sum_j L_j k_j v_j^T, or dS <- C dS + scale sum_i E_i q_i do_i^T
// shapes    q k g [B, H, T, K], v do [B, H, T, V]; states [2, N, H, K, V] float32: first S, then dS, with which each of
//           the N segments starts in its direction; decays [2, N, H, K]. A sequence has P segments. The first one in a
//           direction starts with initial or dht [N / P, H, K, V]; the others from zero. A segment's result is stored
//           as the start of the next one in its direction, and scan_both_ways.cu joins them; the last has no result
// grid      a block for every (direction, segment, head, BK channels), directions slowest. A warpgroup for every 64
//           channels (consumers) and one warp that copies chunks
// smem      Stage: a chunk's inputs
// barriers  full: a chunk's inputs have been copied; VOTE: consumers have read the previous chunk, and vote whether
//           they need another one; voted: the vote's result is stored
// numerics  S and dS in float32; tokens whose decay to the border is below e^-48 are left out
// source    Blelloch, 1990, "Prefix sums and their applications", section 1.4.1
// limits    sm_90a; bfloat16, float16; V <= BV; K and V multiples of 8; BK and BV of 64, 128; rows start on 16 bytes
// instances all of both orders, both T, G of T and float32, BK and BV
// tests     test_gradient_segments; test_growth_gradients (the second walk)
//
// From warpgroup.cuh and its includes
//   Operand             a lane's numbers of a chunk in 16 bits
//   warpgroup_panels    the panels of a tile that have a warpgroup's 64 channels
// From decays.cuh
//   LaneChunk           a lane's numbers of a chunk: x[n][2h + p] is sub-chunk n, the lane's channel h, its token p;
//                       ldmatrix_offset: the byte in a panel of the 16 bytes that a lane gives to ldmatrix
//   each_token_pair     calls f(n, h); token_pair_of finds both tokens in an Operand
//   LaneGates           the gates of the lane's numbers; GateCounts: how often a token's sum of gates has each: 0 or 1
//   SubChunkDecays      over each sub-chunk, with before(n), after(n), all()
//   decays_from_start, decays_to_end: decays of tokens, from or to the border of their sub-chunk
//   decay_queries, decay_keys: tokens times decays (IN_FULL: not cut off to tf32)
// From states.cuh
//   QueryScale          powers of 2, `up` and its inverse `down`, and whether all are 1; scale_of_queries makes it
//   start_state_write   starts the product that adds tokens to a state
// From growth.cuh
//   exceeds_growth      whether gates are too far above 0 for products; then update_state_by_token and
//                       update_gradient_by_token compute the chunk
// From warpgroup.cuh and its includes
//   work_tile           the head and the tokens of a block's segment; WorkTile::sequence numbers segments, P of each
//                       sequence
//   each_pair_of_state  calls f(x, y, address) for two neighbours
#include "gated/sm90/growth.cuh"

template <typename T, typename G> struct Args {
  TensorMap q, k, v, do_, g;                             // boxes: a chunk's tokens, 128 bytes each, swizzled
  StridedRows<const T> q_rows, k_rows, v_rows, do_rows;  // the same arrays, for chunks that boxes cannot copy
  StridedRows<const G> g_rows;
  const float *initial, *dht;  // or null
  float *states, *decays;
  Shape shape;
  double scale;
  i64 P;               // segments of a sequence
  i64 only_backwards;  // whether only dS is computed, as the states are known
  i64 only_first;      // whether only a sequence's first segment in each direction is computed
};

template <typename T, typename G, int BK, int BV> struct alignas(1024) Stage {
  Tile<T, BK> keys;  // k, or q for dS
  Tile<G, BK> g;
  Tile<T, BV> values;  // v, or do for dS
};

template <typename T, typename G, int BK, int BV> struct Shared {
  static constexpr int STAGES = sizeof(G) == 2 ? 4 : 3;
  Stage<T, G, BK, BV> stages[STAGES];
  MBarrier full[STAGES];
  MBarrier voted[STAGES];  // consumers have read the chunks before the vote, and `wanted` has its result
  u32 wanted[STAGES];
};

constexpr int VOTE = 1;  // the named barrier of consumers
template <int BK> __device__ __forceinline__ u32 tiles_of(const Shape& shape) { return (u32(shape.K) + BK - 1) / BK; }
template <int BK> constexpr int CONSUMERS = 2 * BK;
template <int BK> constexpr int THREADS = CONSUMERS<BK> + 32;

// Whether a segment is its sequence's first one in a direction; in the other direction it is then the last.
__device__ __forceinline__ bool is_first_segment(const WorkTile& work, i64 P, bool backwards) {
  return work.sequence % P == (backwards ? P - 1 : 0);
}
// The segment's index in `states`. The grid has half of its blocks for each direction; a block has one of `tiles` tiles
// of a state.
__device__ __forceinline__ i64 state_index_of(const WorkTile& work, bool backwards, u32 tiles) {
  return (backwards ? gridDim.x / tiles / 2 : 0) + work.sequence_head;
}

// A walk over a segment's chunks, of the consumers and the copying warp together, until no consumer needs another
// chunk. A segment takes one walk, or two. chunks: how many the segment has; copied_before, votes_before: how many
// chunks were copied, and votes taken, in the walk before, 0 for the first walk; the second one continues with the next
// stages and phases of the barriers. n counts the walk's chunks, or votes, from 0. The first STAGES - 1 chunks are
// copied at the start. Vote n comes at the end of chunk n, when chunks before n have been read; then chunk n + STAGES -
// 1 is copied to the stage of chunk n - 1.
template <typename T, typename G, int BK, int BV> struct Walk {
  static constexpr int STAGES = Shared<T, G, BK, BV>::STAGES;
  Shared<T, G, BK, BV>& s;
  int chunks, copied_before, votes_before;

  __device__ __forceinline__ Walk(Shared<T, G, BK, BV>& s, const WorkTile& work)
      : s(s), chunks((work.tokens + CHUNK - 1) / CHUNK), copied_before(0), votes_before(0) {}
  // The second walk, after a first one of which consumers used `taken` chunks, and after the vote for a second one.
  __device__ __forceinline__ Walk second(int taken) const {
    Walk walk = *this;
    walk.copied_before = copied(taken), walk.votes_before = taken + 1;
    return walk;
  }
  __device__ __forceinline__ int stage(int n) const { return (copied_before + n) % STAGES; }
  __device__ __forceinline__ void wait(int n) const {
    mbarrier_wait(s.full[stage(n)], (copied_before + n) / STAGES & 1);  // the n-th chunk has been copied
  }
  // The n-th vote: whether any consumer needs another chunk. All consumers vote, at the end of the n-th chunk, whose
  // product may still run: they have read the chunks before it. named_barrier_any: a barrier, and whether any is
  // `wanted`.
  __device__ __forceinline__ bool vote(int n, bool wanted) const {
    const int slot = (votes_before + n) % STAGES;
    const bool any = named_barrier_any(VOTE, CONSUMERS<BK>, wanted);
    if (threadIdx.x == 0) s.wanted[slot] = any;
    mbarrier_arrive(s.voted[slot]);
    return any;
  }
  // Returns the result of the n-th vote to the copying warp.
  __device__ __forceinline__ bool result(int n) const {
    const int slot = (votes_before + n) % STAGES;
    mbarrier_wait(s.voted[slot], (votes_before + n) / STAGES & 1);
    fence_proxy_async();  // orders the consumers' reads before the next copies to the same stages
    return s.wanted[slot];
  }
  // Whether the walk goes on after the n-th chunk: a consumer needs another one, and the segment has it.
  __device__ __forceinline__ bool goes_on(int n, bool wanted) const { return wanted && n + 1 < chunks; }
  // How many chunks are copied if consumers use the first `taken`: the copying warp is STAGES - 2 ahead.
  __device__ __forceinline__ int copied(int taken) const { return min(chunks, taken + STAGES - 2); }
};

// The copying warp's walk. backwards: whether for dS; from_last: whether chunks are copied from the segment's last one
// to its first. Returns how many chunks were used.
template <typename T, typename G, int BK, int BV>
__device__ __forceinline__ int copy_chunks(const Walk<T, G, BK, BV>& walk, const Args<T, G>& args, const WorkTile& work,
                                           int first_channel, bool backwards, bool from_last) {
  constexpr int STAGES = Walk<T, G, BK, BV>::STAGES;
  const i64 K = args.shape.K, V = args.shape.V;
  // Starts copying the walk's n-th chunk. fetch_chunk (chunk_copies.cuh) copies its rows for each f(tile, tensor map,
  // rows, width, first column); all lanes arrive at the barrier, whose phase ends when the bytes are there.
  const auto fetch = [&](int n) {
    if (n >= walk.chunks) return;
    Stage<T, G, BK, BV>& in = walk.s.stages[walk.stage(n)];
    const int chunk = from_last ? walk.chunks - 1 - n : n;
    fetch_chunk(walk.s.full[walk.stage(n)], work, chunk * CHUNK, [&](auto f) {
      f(in.g, args.g, args.g_rows, K, first_channel);
      f(in.keys, backwards ? args.q : args.k, backwards ? args.q_rows : args.k_rows, K, first_channel);
      f(in.values, backwards ? args.do_ : args.v, backwards ? args.do_rows : args.v_rows, V);
    });
    __syncwarp();  // lanes that fetch_chunk has parted (lane 0 starts copies) go on together; no data depend on it
  };
  if (!walk.chunks) return 0;
#pragma unroll 1
  for (int n = 0; n < STAGES - 1; ++n) fetch(n);
  int n = 0;
#pragma unroll 1
  for (; walk.goes_on(n, walk.result(n)); ++n) fetch(n + STAGES - 1);
  return n + 1;
}

// ---- first walk, from the border: S += (keys decayed to the border)^T values ----------------------------------------

// e^-48 (FORGOTTEN_NATS in tensor.cuh). A state that has decayed so far changes a later one by less than float32's
// rounding, unless the early state was 4e13 times as large as the later one.
constexpr float NEGLIGIBLE = 1.4251641e-21f;
constexpr float LEAST_FLOAT16_DECAY = 0x1p-86f;  // of D, for which float16 keys keep all digits: 2^-72 2^-14
constexpr float LARGEST_DECAY = 0x1p60f;         // if a gate above 0 makes D larger, products may overflow
// The least exponent of BorderDecay::down: 2^-72 is below NEGLIGIBLE = 2^-69.2, and float16's least digit is 2^-14.
constexpr int LEAST_EXPONENT = -72;
static_assert(NEGLIGIBLE > 0x1p-72f && LEAST_FLOAT16_DECAY == 0x1p-72f * 0x1p-14f);

// D, the decay between a chunk and the border, of this lane's two channels h: `decay` times `down`. `down` is a power
// of 2, and registers hold S / down: float16 has no numbers as small as D, but holds keys times `decay`.
struct BorderDecay {
  float decay[2] = {1.f, 1.f}, down[2] = {1.f, 1.f};

  __device__ __forceinline__ float product(int h) const { return decay[h] * down[h]; }
};

// Changes `decay` and `down` by inverse powers of 2, and S with them, so that the factor of the chunk's token nearest
// to the border is between 2^-8 and 2. This factor is `decay`; FIRST_DECAYS (GLA's dS): `decay` times the decay of the
// chunk's first gate. outer_decays: decays from the start of a sub-chunk to its queries, or from its keys to its end. A
// factor of 0 has the least exponent; if it is infinite or NaN, out_of_range is set, and S is not used.
template <bool FIRST_DECAYS, int BV>
__device__ __forceinline__ void fit_range(float (&S)[BV / 2], BorderDecay& to_border, const LaneChunk& outer_decays) {
  float up[2] = {1.f, 1.f}, down[2] = {1.f, 1.f};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float nearest = to_border.decay[h];
    if (FIRST_DECAYS) nearest *= __shfl_sync(0xffffffffu, outer_decays[0][2 * h], threadIdx.x & 28);
    const int exponent = int(__float_as_uint(nearest) >> 23) - 127;
    if (exponent >= -8 && exponent <= 0) continue;
    const int change = max(exponent, LEAST_EXPONENT + 127 - int(__float_as_uint(to_border.down[h]) >> 23));
    up[h] = __uint_as_float(u32(127 - change) << 23), down[h] = __uint_as_float(u32(127 + change) << 23);
  }
  if (!__any_sync(0xffffffffu, up[0] != 1.f || up[1] != 1.f)) return;
#pragma unroll
  for (int i = 0; i < BV / 2; ++i) S[i] *= up[i >> 1 & 1];
#pragma unroll
  for (int h = 0; h < 2; ++h) to_border.decay[h] *= up[h], to_border.down[h] *= down[h];
}

// Computes S (BACKWARDS: dS) from zero, chunk by chunk away from the border, until D of every channel is NEGLIGIBLE.
// decays: those of the lane's channels over the segment, 0 if chunks were left out. Sets out_of_range if gates are too
// far above 0 for these products, or if a number of S does not hide what was left out: S is not valid then. Returns how
// many chunks were used. channel: the lane's first one, the other is 8 later.
template <class ReadOrder, bool BACKWARDS, typename T, typename G, int BK, int BV>
__device__ __forceinline__ int sum_from_border(float (&S)[BV / 2], float (&decays)[2], bool& out_of_range,
                                               const Walk<T, G, BK, BV>& walk, const Args<T, G>& args, int channel) {
  const int warpgroup = threadIdx.x / 128, offset = ldmatrix_offset();
  const float scale = BACKWARDS ? float(args.scale) : 1.f;
  const GateCounts<ReadOrder, G> counts;
  BorderDecay to_border;
  Operand keys_to_border;  // k or q, times the decay to the border
  int n = 0;
  for (bool more = walk.chunks; more; more = walk.goes_on(n, walk.vote(n, more)), ++n) {
    walk.wait(n);
    Stage<T, G, BK, BV>& in = walk.s.stages[walk.stage(n)];
    LaneGates<G> gates;
    Operand loaded;
    LaneChunk outer_decays;
    SubChunkDecays chunk_decays;
    gates.load(warpgroup_panels(in.g, warpgroup), offset);
    out_of_range |= exceeds_growth<T>(gates, warpgroup_panels(in.g, warpgroup));
    decays_of(chunk_decays, gates);
    load_operand(loaded, in.keys[warpgroup], offset);
    if (BACKWARDS) decays_from_start(outer_decays, gates, counts);
    else decays_to_end(outer_decays, gates, counts);
    wgmma_wait<0>();  // the previous chunk's products, which ran beside the lines above
    wgmma_fence_operand(S);
    if (IS_FLOAT16<T>) fit_range<BACKWARDS && !ReadOrder::reads_before_write, BV>(S, to_border, outer_decays);
    each_token_pair([&](int n, int h) {  // n: here a sub-chunk
      const float2 two = unpack<T>(token_pair_of(loaded, n, h));
      const float factor =
          scale * to_border.decay[h] * (BACKWARDS ? chunk_decays.before(n, h) : chunk_decays.after(n, h));
      token_pair_of(keys_to_border, n, h) =
          pack<T>(factor * outer_decays[n][2 * h] * two.x, factor * outer_decays[n][2 * h + 1] * two.y);
    });
    wgmma_fence();
    start_state_write<T, BV>(S, keys_to_border, in.values);
    wgmma_commit();
    more = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      to_border.decay[h] *= chunk_decays.all(h);
      out_of_range |= to_border.product(h) > LARGEST_DECAY;
      more |= channel + 8 * h < args.shape.K && !(to_border.product(h) <= NEGLIGIBLE);
    }
  }
  wgmma_wait<0>();
  wgmma_fence_operand(S);
#pragma unroll
  for (int i = 0; i < BV / 2; ++i) S[i] *= to_border.down[i >> 1 & 1];
  float least[2] = {LARGEST_FLOAT, LARGEST_FLOAT};  // of the magnitudes of each channel's numbers of S
#pragma unroll
  for (int i = 0; i < BV / 2; ++i)
    if (8 * (i / 4) < args.shape.V) least[i >> 1 & 1] = fminf(least[i >> 1 & 1], fabsf(S[i]));
  for (int h = 0; h < 2; ++h) {
    const float decay = to_border.product(h);
    decays[h] = n < walk.chunks ? 0.f : decay;
    float left_out = n < walk.chunks ? decay : 0.f;  // the largest decay of what is missing in S
    if (IS_FLOAT16<T> && decay <= NEGLIGIBLE && decay > 0.f) left_out = fmaxf(decay, LEAST_FLOAT16_DECAY);
    out_of_range |= channel + 8 * h < args.shape.K && !hides_forgotten(least[h], left_out);
  }
  for (int unused = n; unused < walk.copied(n); ++unused) walk.wait(unused);  // until no copies are under way
  return n;
}

// If this is a sequence's first segment: adds the decayed given state to S, and stores the given state as the one with
// which the segment starts.
template <int BK, int BV, class Args>
__device__ __forceinline__ void add_initial_state(float (&S)[BV / 2], const float (&decays)[2], const Args& args,
                                                  const WorkTile& work, bool backwards, int channel) {
  if (!is_first_segment(work, args.P, backwards)) return;
  const float* const given = backwards ? args.dht : args.initial;
  const i64 size = args.shape.K * args.shape.V;
  float* const states = args.states + state_index_of(work, backwards, tiles_of<BK>(args.shape)) * size;
  const float* const from = given + (work.sequence / args.P * args.shape.H + work.head) * size;
  each_pair_of_state<BV, HAS_FULL_PATH>(S, states, args.shape, channel, [&](float& x, float& y, float* to) {
    const float2 two = given ? *reinterpret_cast<const float2*>(from + (to - states)) : float2{0.f, 0.f};
    const float decay = decays[&x - S >> 1 & 1];  // S[4n + 2h + 0, 1] is the lane's channel h
    if (decay != 0.f) x = fmaf(decay, two.x, x), y = fmaf(decay, two.y, y);
    *reinterpret_cast<float2*>(to) = two;
  });
}

// ---- second walk, to the border: S <- C S + (keys decayed to the chunk's end)^T values, any gates -------------------

// S (BACKWARDS: dS): on call what the segment starts with, on return what the next one starts with. segment_decay, of
// the lane's channels, is multiplied by the segment's decay.
template <class ReadOrder, bool BACKWARDS, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void carry_to_border(float (&S)[BV / 2], float (&segment_decay)[2],
                                                const Walk<T, G, BK, BV>& walk, const Args<T, G>& args) {
  const int warpgroup = threadIdx.x / 128, offset = ldmatrix_offset();
  const GateCounts<ReadOrder, G> counts;
  int n = 0;
  do {
    walk.wait(n);
    Stage<T, G, BK, BV>& in = walk.s.stages[walk.stage(n)];
    LaneGates<G> gates;
    Operand x;
    LaneChunk outer_decays;
    SubChunkDecays decays;
    gates.load(warpgroup_panels(in.g, warpgroup), offset);
    decays_of(decays, gates);
    for (int h = 0; h < 2; ++h) segment_decay[h] *= decays.all(h);
    Across unused;  // operands of scores, which decay_queries and decay_keys set, too
    QueryScale query_scale = {{1.f, 1.f}, {1.f, 1.f}, true};
    const bool growth = exceeds_growth<T>(gates, warpgroup_panels(in.g, warpgroup));
    load_operand(x, in.keys[warpgroup], offset);
    const auto put = [&](int n, int h, float first, float second) { token_pair_of(x, n, h) = pack<T>(first, second); };
    if (BACKWARDS) {
      decays_from_start(outer_decays, gates, counts);
      query_scale = scale_of_queries<ReadOrder, T>(outer_decays);
      const float scale = float(args.scale);
      decay_queries<IN_FULL, T>(unused, x, outer_decays, decays, {scale * query_scale.up[0], scale * query_scale.up[1]},
                                put);
    } else {
      decays_to_end(outer_decays, gates, counts);
      decay_keys<IN_FULL, T>(unused, x, outer_decays, decays, put);
    }
    if (growth) {  // token by token; x may hold infinities, and is replaced by zeros
      if (BACKWARDS)
        update_gradient_by_token<ReadOrder, T, G, BV>(S, in.keys, in.g, in.values, float(args.scale),
                                                      first_channel_of_lane(), [](int) {});
      else update_state_by_token<T, G, BV>(S, in.keys, in.g, in.values, first_channel_of_lane());
      each_token_pair([&](int n, int h) { token_pair_of(x, n, h) = 0, decays.sub[n][h] = 1.f; });
      query_scale = {{1.f, 1.f}, {1.f, 1.f}, true};
    }
    decay_state<BV>(S, decays, query_scale.up[0], query_scale.up[1]);
    wgmma_fence();
    start_state_write<T, BV>(S, x, in.values);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(S);
    if (!query_scale.is_one) scale_state<BV>(S, query_scale.down[0], query_scale.down[1]);
  } while (walk.goes_on(n, walk.vote(n, true)) && ++n);
}

// ---- a block -------------------------------------------------------------------------------------------------------

// Computes what the next segment starts from, and stores it in `states`, and the segment's decays.
template <class ReadOrder, bool BACKWARDS, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void consume(Shared<T, G, BK, BV>& s, const Args<T, G>& args, const WorkTile& work,
                                        int first_channel) {
  const int lane = threadIdx.x & 31, channel = first_channel + threadIdx.x / 32 * 16 + (lane >> 2);
  float S[BV / 2] = {}, decays[2];
  bool out_of_range = false;
  const Walk walk(s, work);
  const int taken = sum_from_border<ReadOrder, BACKWARDS>(S, decays, out_of_range, walk, args, channel);
  // The result is the same for all consumers. They have waited for all copies, so that a second walk may use the
  // stages.
  const bool walks_again = walk.vote(taken, out_of_range);
  if (walks_again) {
#pragma unroll
    for (int i = 0; i < BV / 2; ++i) S[i] = 0.f;
    decays[0] = decays[1] = 1.f;
  }
  add_initial_state<BK, BV>(S, decays, args, work, BACKWARDS, channel);
  if (walks_again) carry_to_border<ReadOrder, BACKWARDS>(S, decays, walk.second(taken), args);
  const i64 slot = state_index_of(work, BACKWARDS, tiles_of<BK>(args.shape)), K = args.shape.K,
            next = slot + (BACKWARDS ? -args.shape.H : args.shape.H);
  each_pair_of_state<BV, HAS_FULL_PATH>(
      S, args.states + next * K * args.shape.V, args.shape, channel,
      [&](float& x, float& y, float* to) { *reinterpret_cast<float2*>(to) = {x, y}; });
  for (int h = 0; h < 2; ++h)
    if ((lane & 3) == 0 && channel + 8 * h < K) args.decays[slot * K + channel + 8 * h] = decays[h];
}

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6), read_order.cuh; T: the type of q, k, v and do; G: that of g.
// Consumers and the copying warp make the same walks, S from the segment's end and dS from its start.
template <class ReadOrder, typename T, typename G, int BK, int BV>
__global__ void __launch_bounds__(THREADS<BK>, BK == 128   ? 1
                                               : BV == 128 ? 2
                                                           : 3)
    gated_sm90_backward_segments(const __grid_constant__ Args<T, G> args) {
  Shared<T, G, BK, BV>& s = *reinterpret_cast<Shared<T, G, BK, BV>*>(dynamic_smem());
  if (threadIdx.x == 0)
    for (int stage = 0; stage < s.STAGES; ++stage)
      mbarrier_init(s.full[stage], 32), mbarrier_init(s.voted[stage], CONSUMERS<BK>);
  fence_proxy_async();
  __syncthreads();  // barriers are initialised, also for tensor copies
  const u32 tiles = tiles_of<BK>(args.shape), block = blockIdx.x / tiles, half = gridDim.x / tiles / 2;
  const int first_channel = blockIdx.x % tiles * BK;
  const bool backwards = block >= half;
  const WorkTile work = work_tile(args.shape, block - backwards * half);
  if (backwards < args.only_backwards || is_first_segment(work, args.P, !backwards)) return;
  if (args.only_first && !is_first_segment(work, args.P, backwards)) return;
  if (threadIdx.x >= CONSUMERS<BK>) {
    const Walk walk(s, work);
    const int taken = copy_chunks(walk, args, work, first_channel, backwards, !backwards);
    if (walk.result(taken)) copy_chunks(walk.second(taken), args, work, first_channel, backwards, backwards);
  } else if (backwards) consume<ReadOrder, BACKWARDS>(s, args, work, first_channel);
  else consume<ReadOrder, FORWARDS>(s, args, work, first_channel);
}
