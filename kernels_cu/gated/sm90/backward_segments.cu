// what      GLA and RWKV-6 backward on Hopper, for sequences cut into segments: what each leaves behind in the state
//           after it, and in the gradient of the state before it.
// math      per chunk of 32, with the decays of decays.cuh, from the last one back: S += sum_j D L_j k_j v_j^T, and D,
//           the decay so far, times the chunk's, until D is next to nothing; backwards from the first one on: C +=
//           scale sum_i D E_i q_i do_i^T. Where gates grow the other way, as the passes: S <- D S + sum_j L_j k_j v_j^T
// shapes    q k g [B, H, T, K], v do [B, H, T, V]; states [2, N, H, K, V] and decays [2, N, H, K] float32: S, then C,
//           that a segment starts from: of a sequence's P segments the first in either direction from the given one [N
//           / P, H, K, V], the second from what that leaves, and the others from what the one before leaves by itself:
//           scan_both_ways.cu joins them. Nobody needs what the last leaves
// grid      a block for every (direction, segment, head, BK channels), directions slowest; a warpgroup for every 64
//           channels, a warp that moves chunks
// smem      Stage: a chunk's tokens
// barriers  full: the tokens are there; WALK: consumers have read those of the chunk before, and vote whether they want
//           others; voted: the result is there
// numerics  as the two passes; but what has decayed to e^-48 before it reaches the segment's end counts as nothing
// source    Blelloch, 1990, "Prefix sums and their applications", section 1.4.1
// limits    as the two passes
#include "gated/sm90/growth.cuh"

template <typename T, typename G> struct Args {
  TensorMap q, k, v, do_, g;  // boxes of a chunk's tokens and 128 bytes, swizzled
  Rows<const T> q_rows, k_rows, v_rows, do_rows;
  Rows<const G> g_rows;
  const float *initial, *dht;  // null where there is none
  float *states, *decays;
  Shape shape;
  double scale;
  i64 P;      // segments a sequence
  i64 first;  // direction: 1 where the states are known
  i64 ends;   // whether nobody needs what segments between a sequence's first and last leave
};

template <typename T, typename G, int BK, int BV> struct alignas(1024) Stage {
  Tile<T, BK> x;  // k or q
  Tile<G, BK> g;
  Tile<T, BV> y;  // v or do
};

template <typename T, typename G, int BK, int BV> struct Shared {
  static constexpr int STAGES = sizeof(G) == 2 ? 4 : 3;
  Stage<T, G, BK, BV> stages[STAGES];
  Barrier full[STAGES];
  Barrier voted[STAGES];  // consumers have read what came before, and `wanted` says whether any wants more
  u32 wanted[STAGES];
};

constexpr int WALK = 1;  // the named barrier of consumers
template <int BK> __device__ __forceinline__ u32 tiles_of(const Shape& shape) { return (u32(shape.K) + BK - 1) / BK; }
template <int BK> constexpr int CONSUMERS = 2 * BK;
template <int BK> constexpr int THREADS = CONSUMERS<BK> + 32;

// Consumers and the warp that moves chunks go over a segment together, as far as a consumer wants. `started` and
// `votes`: how many chunks came in the walk before, whose stages this one goes on with, and how many votes were cast.
template <typename T, typename G, int BK, int BV> struct Walk {
  static constexpr int STAGES = Shared<T, G, BK, BV>::STAGES;
  Shared<T, G, BK, BV>& s;
  int chunks, started, votes;

  __device__ __forceinline__ Walk(Shared<T, G, BK, BV>& s, const WorkTile& at)
      : s(s), chunks((at.tokens + CHUNK - 1) / CHUNK), started(0), votes(0) {}
  // The walk after this one, of which the first `taken` chunks were wanted, and the vote on it.
  __device__ __forceinline__ Walk again(int taken) const {
    Walk next = *this;
    next.started = coming(taken), next.votes = taken + 1;
    return next;
  }
  __device__ __forceinline__ int stage(int n) const { return (started + n) % STAGES; }
  __device__ __forceinline__ void wait(int n) const {
    barrier_wait(s.full[stage(n)], (started + n) / STAGES & 1);  // the n-th chunk is there
  }
  // The n-th vote, by consumers: whether any of them wants more. They have read the chunks before the n-th.
  __device__ __forceinline__ bool vote(int n, bool wanted) const {
    const int slot = (votes + n) % STAGES;
    fence_async();  // the next copies to their stages come after these reads
    const bool any = barrier_any(WALK, CONSUMERS<BK>, wanted);
    if (threadIdx.x == 0) s.wanted[slot] = any;
    barrier_arrive(s.voted[slot]);
    return any;
  }
  // What it was, for the warp that moves chunks.
  __device__ __forceinline__ bool result(int n) const {
    const int slot = (votes + n) % STAGES;
    barrier_wait(s.voted[slot], (votes + n) / STAGES & 1);
    return s.wanted[slot];
  }
  // Whether a chunk follows the n-th where somebody wants it.
  __device__ __forceinline__ bool goes_on(int n, bool wanted) const { return wanted && n + 1 < chunks; }
  // How many come where the first `taken` were wanted.
  __device__ __forceinline__ int coming(int taken) const { return min(chunks, taken + STAGES - 2); }
};

// The warp that moves chunks, of the channels from `first` on; how many were wanted.
template <typename T, typename G, int BK, int BV>
__device__ __forceinline__ int move(const Walk<T, G, BK, BV>& walk, const Args<T, G>& args, const WorkTile& at,
                                    int first, bool backwards, bool from_last) {
  constexpr int STAGES = Walk<T, G, BK, BV>::STAGES;
  const i64 K = args.shape.K, V = args.shape.V;
  const auto fetch = [&](int n) {
    if (n >= walk.chunks) return;
    Stage<T, G, BK, BV>& in = walk.s.stages[walk.stage(n)];
    const int chunk = from_last ? walk.chunks - 1 - n : n;
    fetch_chunk(walk.s.full[walk.stage(n)], at, chunk * CHUNK, [&](auto f) {
      f(in.g, args.g, args.g_rows, K, first);
      f(in.x, backwards ? args.q : args.k, backwards ? args.q_rows : args.k_rows, K, first);
      f(in.y, backwards ? args.do_ : args.v, backwards ? args.do_rows : args.v_rows, V);
    });
    __syncwarp();
  };
  if (!walk.chunks) return 0;
#pragma unroll 1
  for (int n = 0; n < STAGES - 1; ++n) fetch(n);
  int n = 0;
#pragma unroll 1
  for (; walk.goes_on(n, walk.result(n)); ++n) fetch(n + STAGES - 1);
  return n + 1;
}

// ---- from the border on: S += (what is left of x at the border)^T y ------------------------------------------------

constexpr float LOST = 1.4251641e-21f;  // e^-48, of which float32 adds nothing to a state of like size
constexpr float MOST = 0x1p60f;         // how much may grow on its way

// Of two channels: the decay between a chunk and the border, over `down`, and S is over it, too: a NARROW type has
// nothing that small.
struct Passed {
  float decay[2] = {1.f, 1.f}, down[2] = {1.f, 1.f};

  __device__ __forceinline__ float all(int h) const { return decay[h] * down[h]; }
};

// Has what a chunk's first token is decayed by be near to 1. far: decays from the start of a sub-chunk, or to its end.
template <bool FIRST_DECAYS, int BV>
__device__ __forceinline__ void fit_range(float (&S)[BV / 2], Passed& passed, const Chunk& far) {
  constexpr int LEAST_EXPONENT = -72;  // of `down`: about LOST
  float up[2] = {1.f, 1.f}, down[2] = {1.f, 1.f};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float nearest = passed.decay[h];
    if (FIRST_DECAYS) nearest *= __shfl_sync(0xffffffffu, far[0][2 * h], threadIdx.x & 28);
    const int exponent = int(__float_as_uint(nearest) >> 23) - 127;
    if (exponent >= -8 && exponent <= 8) continue;
    const int by = max(exponent, LEAST_EXPONENT + 127 - int(__float_as_uint(passed.down[h]) >> 23));
    up[h] = __uint_as_float(u32(127 - by) << 23), down[h] = __uint_as_float(u32(127 + by) << 23);
  }
  if (!__any_sync(0xffffffffu, up[0] != 1.f || up[1] != 1.f)) return;
#pragma unroll
  for (int i = 0; i < BV / 2; ++i) S[i] *= up[i >> 1 & 1];
#pragma unroll
  for (int h = 0; h < 2; ++h) passed.decay[h] *= up[h], passed.down[h] *= down[h];
}

// The segment's S from nothing, of as many chunks as some channel remembers. `decays`: over all of them, 0 where others
// were left out. grown: whether gates were met that products cannot follow: then S is nothing to go by. How many were
// wanted.
template <class ReadOrder, bool BACKWARDS, typename T, typename G, int BK, int BV>
__device__ __forceinline__ int sum_from_border(float (&S)[BV / 2], float (&decays)[2], bool& grown,
                                               const Walk<T, G, BK, BV>& walk, const Args<T, G>& args, int channel) {
  const int warpgroup = threadIdx.x / 128, offset = lane_offset();
  const float scale = BACKWARDS ? float(args.scale) : 1.f;
  const Counts<ReadOrder, G> counts;
  Passed passed;
  Operand x;
  int n = 0;
  for (bool more = walk.chunks; more; more = walk.goes_on(n, walk.vote(n, more)), ++n) {
    walk.wait(n);
    Stage<T, G, BK, BV>& in = walk.s.stages[walk.stage(n)];
    Gates<G> gates;
    Operand loaded;
    Chunk far;
    SubChunkDecays own;
    gates.load(own_panels(in.g, warpgroup), offset);
    grown |= outgrows<T>(gates, own_panels(in.g, warpgroup));
    decays_of(own, gates);
    load_operand(loaded, in.x[warpgroup], offset);
    if (BACKWARDS) decays_from_start(far, gates, counts);
    else decays_to_end(far, gates, counts);
    wgmma_wait<0>();  // the products of the chunk before, under way beside what comes before this line
    wgmma_keep(S);
    if (NARROW<T>) fit_range<BACKWARDS && !ReadOrder::reads_before_write, BV>(S, passed, far);
    each_pair([&](int n, int h) {
      const float2 two = unpack<T>(pair_of(loaded, n, h));
      const float by = scale * passed.decay[h] * (BACKWARDS ? own.before(n, h) : own.behind(n, h));
      pair_of(x, n, h) = pack<T>(by * far[n][2 * h] * two.x, by * far[n][2 * h + 1] * two.y);
    });
    wgmma_fence();
    start_write<T, BV>(S, x, in.y);
    wgmma_commit();
    more = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      passed.decay[h] *= own.all(h);
      grown |= passed.all(h) > MOST;
      more |= channel + 8 * h < args.shape.K && !(passed.all(h) <= LOST);
    }
  }
  wgmma_wait<0>();
  wgmma_keep(S);
#pragma unroll
  for (int i = 0; i < BV / 2; ++i) S[i] *= passed.down[i >> 1 & 1];
  for (int h = 0; h < 2; ++h) decays[h] = n < walk.chunks ? 0.f : passed.all(h);
  for (int late = n; late < walk.coming(n); ++late) walk.wait(late);  // nothing is under way any more
  return n;
}

// The same from the given state on, which it puts where the segment starts from.
template <int BK, int BV, class Args>
__device__ __forceinline__ void add_start(float (&S)[BV / 2], const float (&decays)[2], const Args& args,
                                          const WorkTile& at, bool backwards, int channel) {
  if (!is_first(at, args.P, backwards)) return;
  const float* const given = backwards ? args.dht : args.initial;
  const i64 size = args.shape.K * args.shape.V;
  float* const states = args.states + slot_of(at, backwards, tiles_of<BK>(args.shape)) * size;
  const float* const from = given + (at.sequence / args.P * args.shape.H + at.head) * size;
  each_of_state<BV, true>(S, states, args.shape, channel, [&](float& x, float& y, float* to) {
    const float2 two = given ? *reinterpret_cast<const float2*>(from + (to - states)) : float2{0.f, 0.f};
    const float decay = decays[&x - S >> 1 & 1];
    if (decay != 0.f) x = fmaf(decay, two.x, x), y = fmaf(decay, two.y, y);
    *reinterpret_cast<float2*>(to) = two;
  });
}

// ---- to the border: S <- D S + x^T y, whatever grows ---------------------------------------------------------------

template <class ReadOrder, bool BACKWARDS, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void carry_to_border(float (&S)[BV / 2], float (&all)[2], const Walk<T, G, BK, BV>& walk,
                                                const Args<T, G>& args) {
  const int warpgroup = threadIdx.x / 128, offset = lane_offset();
  const Counts<ReadOrder, G> counts;
  int n = 0;
  do {
    walk.wait(n);
    Stage<T, G, BK, BV>& in = walk.s.stages[walk.stage(n)];
    Gates<G> gates;
    Operand x;
    Chunk far;
    SubChunkDecays decays;
    gates.load(own_panels(in.g, warpgroup), offset);
    decays_of(decays, gates);
    for (int h = 0; h < 2; ++h) all[h] *= decays.all(h);
    Across nowhere;
    QueryScale range = {{1.f, 1.f}, {1.f, 1.f}, true};
    const bool growth = outgrows<T>(gates, own_panels(in.g, warpgroup));
    load_operand(x, in.x[warpgroup], offset);
    const auto put = [&](int n, int h, float first, float second) { pair_of(x, n, h) = pack<T>(first, second); };
    if (BACKWARDS) {
      decays_from_start(far, gates, counts);
      range = scale_of_queries<ReadOrder, T>(far);
      const float scale = float(args.scale);
      decay_queries<false, T>(nowhere, x, far, decays, {scale * range.up[0], scale * range.up[1]}, put);
    } else {
      decays_to_end(far, gates, counts);
      decay_keys<false, T>(nowhere, x, far, decays, put);
    }
    if (growth) {  // what has been computed may be anything, and nothing is left to do
      if (BACKWARDS)
        grow_backwards<ReadOrder, T, G, BV>(S, in.x, in.g, in.y, float(args.scale), own_channel(), [](int) {});
      else grow_forwards<T, G, BV>(S, in.x, in.g, in.y, own_channel());
      each_pair([&](int n, int h) { pair_of(x, n, h) = 0, decays.own[n][h] = 1.f; });
      range = {{1.f, 1.f}, {1.f, 1.f}, true};
    }
    decay_state<BV>(S, decays, range.up[0], range.up[1]);
    wgmma_fence();
    start_write<T, BV>(S, x, in.y);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_keep(S);
    if (BACKWARDS) scale_down<ReadOrder, T, BV>(S, range);
  } while (walk.goes_on(n, walk.vote(n, true)) && ++n);
}

// ---- a block -------------------------------------------------------------------------------------------------------

template <class ReadOrder, bool BACKWARDS, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void consume(Shared<T, G, BK, BV>& s, const Args<T, G>& args, const WorkTile& at,
                                        int first) {
  const int lane = threadIdx.x & 31, channel = first + threadIdx.x / 32 * 16 + (lane >> 2);
  float S[BV / 2] = {}, decays[2];
  bool grown = false;
  const Walk walk(s, at);
  const int taken = sum_from_border<ReadOrder, BACKWARDS>(S, decays, grown, walk, args, channel);
  if (walk.vote(taken, grown)) {  // all know it, and have read what has come
#pragma unroll
    for (int i = 0; i < BV / 2; ++i) S[i] = 0.f;
    decays[0] = decays[1] = 1.f;
    start<BV>(S, BACKWARDS ? args.dht : args.initial, args.states, args.shape, at, args.P, BACKWARDS, channel,
              tiles_of<BK>(args.shape));
    carry_to_border<ReadOrder, BACKWARDS>(S, decays, walk.again(taken), args);
  } else add_start<BK, BV>(S, decays, args, at, BACKWARDS, channel);
  const i64 slot = slot_of(at, BACKWARDS, tiles_of<BK>(args.shape)), K = args.shape.K,
            next = slot + (BACKWARDS ? -args.shape.H : args.shape.H);
  each_of_state<BV, true>(S, args.states + next * K * args.shape.V, args.shape, channel,
                          [&](float& x, float& y, float* to) { *reinterpret_cast<float2*>(to) = {x, y}; });
  for (int h = 0; h < 2; ++h)
    if ((lane & 3) == 0 && channel + 8 * h < K) args.decays[slot * K + channel + 8 * h] = decays[h];
}

template <class ReadOrder, typename T, typename G, int BK, int BV>
__global__ void __launch_bounds__(THREADS<BK>, BK == 128   ? 1
                                               : BV == 128 ? 2
                                                           : 3)
    gated_sm90_backward_segments(const __grid_constant__ Args<T, G> args) {
  Shared<T, G, BK, BV>& s = *reinterpret_cast<Shared<T, G, BK, BV>*>(dynamic_smem());
  if (threadIdx.x == 0)
    for (int stage = 0; stage < s.STAGES; ++stage)
      barrier_init(s.full[stage], 32), barrier_init(s.voted[stage], CONSUMERS<BK>);
  fence_async();
  __syncthreads();  // the barriers stand, and tensor copies see them
  const u32 tiles = tiles_of<BK>(args.shape), block = blockIdx.x / tiles, half = gridDim.x / tiles / 2;
  const int first = blockIdx.x % tiles * BK;  // channel
  const bool backwards = block >= half;
  const WorkTile at = work_tile(args.shape, block - backwards * half);
  if (backwards < args.first || is_last(at, args.P, backwards)) return;
  if (args.ends && !is_first(at, args.P, backwards)) return;
  if (threadIdx.x >= CONSUMERS<BK>) {
    const Walk walk(s, at);
    const int taken = move(walk, args, at, first, backwards, !backwards);
    if (walk.result(taken)) move(walk.again(taken), args, at, first, backwards, backwards);
  } else if (backwards) consume<ReadOrder, true>(s, args, at, first);
  else consume<ReadOrder, false>(s, args, at, first);
}
