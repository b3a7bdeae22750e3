// what      GLA and RWKV-6 backward on Hopper, for sequences cut into segments: what each leaves behind in the state
//           after it, and in the gradient of the state before it.
// math      per chunk of 32, with the decays of decays.cuh: S <- D S + sum_j L_j k_j v_j^T; backwards C <- D C + scale
//           sum_i E_i q_i do_i^T
// shapes    q k g [B, H, T, K], v do [B, H, T, V]; states [2, N, H, K, V] and decays [2, N, H, K] float32: S, then C,
//           that a segment starts from: of a sequence's P segments the first in either direction from the given one [N
//           / P, H, K, V], the second from what that leaves, and the others from what the one before leaves by itself:
//           scan_both_ways.cu joins them. Nobody needs what the last leaves
// grid      a block for every (direction, segment, head), directions slowest; a warpgroup for every 64 channels, a warp
//           that moves chunks
// smem      Stage: a chunk's tokens
// barriers  full: the tokens are there; done: they have been read
// numerics  as the two passes
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
  Barrier full[STAGES], done[STAGES];
};

template <typename T, typename G, int BK, int BV>
__device__ __forceinline__ void move(Shared<T, G, BK, BV>& s, const Args<T, G>& args, const Place& at, bool backwards) {
  constexpr int STAGES = Shared<T, G, BK, BV>::STAGES;
  const i64 K = args.shape.K, V = args.shape.V;
  const int last = (at.tokens - 1) / CHUNK;
#pragma unroll 1
  for (int iteration = 0; iteration * CHUNK < at.tokens; ++iteration) {
    Stage<T, G, BK, BV>& in = s.stages[iteration % STAGES];
    if (iteration >= STAGES) barrier_wait(s.done[iteration % STAGES], iteration / STAGES - 1 & 1);  // the stage is free
    fetch_chunk(s.full[iteration % STAGES], at, (backwards ? last - iteration : iteration) * CHUNK, [&](auto f) {
      f(in.g, args.g, args.g_rows, K);
      f(in.x, backwards ? args.q : args.k, backwards ? args.q_rows : args.k_rows, K);
      f(in.y, backwards ? args.do_ : args.v, backwards ? args.do_rows : args.v_rows, V);
    });
  }
}

template <class ReadOrder, bool BACKWARDS, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void consume(Shared<T, G, BK, BV>& s, const Args<T, G>& args, const Place& at) {
  constexpr int STAGES = Shared<T, G, BK, BV>::STAGES;
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x & 31, channel = threadIdx.x / 32 * 16 + (lane >> 2);
  const int offset = lane_offset();
  const Counts<ReadOrder, G> counts;
  float S[BV / 2] = {}, all[2] = {1.f, 1.f};
  start<BV>(S, BACKWARDS ? args.dht : args.initial, args.states, args.shape, at, args.P, BACKWARDS, channel);
#pragma unroll 1
  for (int iteration = 0; iteration * CHUNK < at.tokens; ++iteration) {
    Stage<T, G, BK, BV>& in = s.stages[iteration % STAGES];
    barrier_wait(s.full[iteration % STAGES], iteration / STAGES & 1);  // the tokens are there
    Gates<G> gates;
    Operand x;
    Chunk far;
    SubChunkDecays decays;
    gates.load(own_panels(in.g, warpgroup), offset);
    decays_of(decays, gates);
    for (int h = 0; h < 2; ++h) all[h] *= decays.all(h);
    Across nowhere;
    QueryScale range = {{1.f, 1.f}, {1.f, 1.f}, true};
    const bool growth = __any_sync(0xffffffffu, any_grows<T>(gates));
    load_operand(x, in.x[warpgroup], offset);
    if (BACKWARDS) {
      decays_from_start(far, gates, counts);
      range = scale_of_queries<ReadOrder, T>(far);
      const float scale = float(args.scale);
      decay_queries<false, T>(nowhere, x, x, far, decays, {scale * range.up[0], scale * range.up[1]});
    } else {
      decays_to_end(far, gates, counts);
      decay_keys<false, T>(nowhere, x, x, far, decays);
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
    barrier_arrive(s.done[iteration % STAGES]);
  }
  const i64 slot = slot_of(at, BACKWARDS), K = args.shape.K, next = slot + (BACKWARDS ? -args.shape.H : args.shape.H);
  each_of_state<BV>(S, args.states + next * K * args.shape.V, args.shape, channel,
                    [&](float& x, float& y, float* to) { *reinterpret_cast<float2*>(to) = {x, y}; });
  for (int h = 0; h < 2; ++h)
    if ((lane & 3) == 0 && channel + 8 * h < K) args.decays[slot * K + channel + 8 * h] = all[h];
}

template <class ReadOrder, typename T, typename G, int BK, int BV>
__global__ void __launch_bounds__(2 * BK + 32, BK == 64 ? 3 : 1)
    gated_sm90_backward_segments(const __grid_constant__ Args<T, G> args) {
  Shared<T, G, BK, BV>& s = *reinterpret_cast<Shared<T, G, BK, BV>*>(dynamic_smem());
  constexpr int CONSUMERS = 2 * BK;
  if (threadIdx.x == 0)
    for (int stage = 0; stage < Shared<T, G, BK, BV>::STAGES; ++stage) {
      barrier_init(s.full[stage], 32);
      barrier_init(s.done[stage], CONSUMERS);
    }
  __syncthreads();  // the barriers stand
  const bool backwards = blockIdx.x >= gridDim.x / 2;
  const Place at = place_of(args.shape, blockIdx.x - backwards * (gridDim.x / 2));
  if (backwards < args.first || is_last(at, args.P, backwards)) return;
  if (args.ends && !is_first(at, args.P, backwards)) return;
  if (threadIdx.x >= CONSUMERS) move(s, args, at, backwards);
  else if (backwards) consume<ReadOrder, true>(s, args, at);
  else consume<ReadOrder, false>(s, args, at);
}
