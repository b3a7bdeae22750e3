// what      GLA and RWKV-6 backward on Hopper, for sequences cut into segments: what each leaves behind in the state after
//           it, and in the gradient of the state before it.
// math      S <- diag(late) (diag(early) S + k^^T v);  backwards C <- diag(early) (diag(late) C + q^^T do)
//           per chunk of 32, as the sweeps (warpgroup_backward.cuh) have them
// shapes    q k g [B, H, T, K], v do [B, H, T, V]; states [2, N, H, K, V] and decays [2, N, H, K] float32: S, then C, that a
//           segment starts from: of a sequence's P segments the first in either direction from the given one [N / P, H, K, V],
//           the second from what that leaves, and the others from what the one before leaves by itself: scan_both_ways.cu
//           joins them. Nobody needs what the last leaves. Clears what the first sweep marks
// grid      a block for every (direction, segment, head), directions slowest; a warpgroup for every 64 channels, a warp that
//           moves chunks
// smem      Stage: a chunk's tokens
// barriers  full: the tokens are there; done: they have been read
// numerics  as the sweeps
// source    Blelloch, 1990, "Prefix sums and their applications", section 1.4.1
// limits    as the sweeps
#include "warpgroup_backward.cuh"

template <typename G> struct WarpgroupBackwardSegmentsArgs {
  TensorMap q, k, v, do_, g;                    // boxes of a chunk's tokens and 128 bytes, swizzled
  Rows<const bf16> q_rows, k_rows, v_rows, do_rows;
  Rows<const G> g_rows;
  const float *initial, *dht;                   // null where there is none
  float *states, *decays;
  i32* strong;                                  // [N / P, H]
  Shape shape;
  double scale;
  i64 P;                                        // segments a sequence
};

template <typename G, int BK, int BV> struct alignas(1024) Stage {
  Tile<bf16, BK> x;                             // k or q
  Tile<G, BK> g;
  Tile<bf16, BV> y;                             // v or do
};

template <typename G, int BK, int BV> struct Shared {
  static constexpr int STAGES = sizeof(G) == 2 ? 4 : 3;
  Stage<G, BK, BV> stages[STAGES];
  Barrier full[STAGES], done[STAGES];
};

template <typename G, int BK, int BV>
__device__ __forceinline__ void move(Shared<G, BK, BV>& s, const WarpgroupBackwardSegmentsArgs<G>& args, const Place& at,
                                     bool backwards) {
  constexpr int STAGES = Shared<G, BK, BV>::STAGES;
  const i64 K = args.shape.K, V = args.shape.V;
  const int last = (at.tokens - 1) / CHUNK;
#pragma unroll 1
  for (int turn = 0; turn * CHUNK < at.tokens; ++turn) {
    Stage<G, BK, BV>& in = s.stages[turn % STAGES];
    if (turn >= STAGES) barrier_wait(s.done[turn % STAGES], turn / STAGES - 1 & 1);
    fetch_chunk(s.full[turn % STAGES], at, (backwards ? last - turn : turn) * CHUNK, [&](auto f) {
      f(in.g, args.g, args.g_rows, K);
      f(in.x, backwards ? args.q : args.k, backwards ? args.q_rows : args.k_rows, K);
      f(in.y, backwards ? args.do_ : args.v, backwards ? args.do_rows : args.v_rows, V);
    });
  }
}

template <class Policy, bool BACKWARDS, typename G, int BK, int BV>
__device__ __forceinline__ void consume(Shared<G, BK, BV>& s, const WarpgroupBackwardSegmentsArgs<G>& args, const Place& at) {
  constexpr int STAGES = Shared<G, BK, BV>::STAGES;
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x & 31, channel = threadIdx.x / 32 * 16 + (lane >> 2);
  float S[BV / 2] = {}, behind[2] = {1.f, 1.f}, all[2] = {1.f, 1.f};
  start<BV>(S, BACKWARDS ? args.dht : args.initial, args.states, args.shape, at, args.P, BACKWARDS, channel);
#pragma unroll 1
  for (int turn = 0; turn * CHUNK < at.tokens; ++turn) {
    Stage<G, BK, BV>& in = s.stages[turn % STAGES];
    barrier_wait(s.full[turn % STAGES], turn / STAGES & 1);
    Decays decay;
    decays_of<Policy>(decay, own_panels(in.g, warpgroup), float(args.scale));
    u32 x[2][4], rest[2][4];
    load_channels(x, in.x[warpgroup]);
    load_channels(rest, in.x[warpgroup]);
    decayed(x, BACKWARDS ? decay.q : decay.k);
    left_over(rest, x, BACKWARDS ? decay.q : decay.k);
    const float(&first)[2] = BACKWARDS ? decay.late : decay.early, (&second)[2] = BACKWARDS ? decay.early : decay.late;
#pragma unroll
    for (int i = 0; i < BV / 2; ++i) S[i] *= behind[i >> 1 & 1] * first[i >> 1 & 1];
    wgmma_fence();
    write_state<BV>(S, x, in.y);
    write_state<BV>(S, rest, in.y);
    wgmma_commit();
#pragma unroll
    for (int h = 0; h < 2; ++h) all[h] *= first[h] * second[h], behind[h] = second[h];
    wgmma_wait<0>();
    wgmma_keep(S);
    barrier_arrive(s.done[turn % STAGES]);
  }
  const i64 slot = slot_of(at, BACKWARDS), K = args.shape.K, next = slot + (BACKWARDS ? -args.shape.H : args.shape.H);
  each_of_state<BV>(S, args.states + next * K * args.shape.V, args.shape, channel, [&](float& x, float& y, float* to) {
    const float by = behind[&x - S >> 1 & 1];
    *reinterpret_cast<float2*>(to) = {by * x, by * y};
  });
  for (int h = 0; h < 2; ++h)
    if ((lane & 3) == 0 && channel + 8 * h < K) args.decays[slot * K + channel + 8 * h] = all[h];
}

template <class Policy, typename G, int BK, int BV>
__global__ void __launch_bounds__(2 * BK + 32, BK == 64 ? 3 : 1)
warpgroup_backward_segments(const __grid_constant__ WarpgroupBackwardSegmentsArgs<G> args) {
  Shared<G, BK, BV>& s = *reinterpret_cast<Shared<G, BK, BV>*>(dynamic_smem());
  constexpr int CONSUMERS = 2 * BK;
  if (threadIdx.x == 0)
    for (int stage = 0; stage < Shared<G, BK, BV>::STAGES; ++stage) {
      barrier_init(s.full[stage], 32);
      barrier_init(s.done[stage], CONSUMERS);
    }
  __syncthreads();
  const bool backwards = blockIdx.x >= gridDim.x / 2;
  const Place at = place_of(args.shape, blockIdx.x - backwards * (gridDim.x / 2));
  if (is_last(at, args.P, backwards)) return;
  if (!backwards && threadIdx.x == 0) args.strong[at.sequence / args.P * args.shape.H + at.head] = 0;
  if (threadIdx.x >= CONSUMERS) move(s, args, at, backwards);
  else if (backwards) consume<Policy, true>(s, args, at);
  else consume<Policy, false>(s, args, at);
}
