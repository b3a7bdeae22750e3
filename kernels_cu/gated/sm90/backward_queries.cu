// what      GLA and RWKV-6 backward on Hopper, first sweep: forwards in time, carrying the state. Gives dq, du, and for the
//           second sweep the share of q dq that states have in it.
// math      per chunk of 32, decays from its middle (warpgroup_backward.cuh): k^ = k / E, S_mid = diag(early) S;
//           dq = scale E (dA k^ + do S_mid^T), dA_ij = do_i . v_j for j <= i   (RWKV-6: E of token i - 1, j < i, and
//           scale u k dA_tt); S <- diag(late) (S_mid + k^^T v); du = scale sum_t q_t k_t dA_tt
// shapes    q k g dq weight [B, H, T, K], v do [B, H, T, V], u [H, K], initial, dht [N, H, K, V] and du, ends [N, H, K] float32
//           weight: q do S^T, in the type of g; sums [chunk, K]: their sum over a chunk, in float32
//           ends: sum_v S_T dht; strong [N / P, H]: 1 where gates are not mild, and then all else is of no use
// grid      a block for every (sequence, head), sequence slowest; a warpgroup for every 64 channels, then one of which
//           three warps multiply tokens, and one moves chunks
// smem      Stage: a chunk's tokens, and its results in place of them
// barriers  full: the tokens are there; pairs: so is dA; done: so are the results
// numerics  products of bfloat16 numbers in float32; the state as two of them, because dg is a sum over all tokens
// source    Yang et al., 2024, section 4; Peng et al., 2024, eq. 18-19
// limits    sm_90a; bfloat16; K <= BK, V <= BV, multiples of 8; BK and BV of 64, 128; rows start on 16 bytes
#include "warpgroup_backward.cuh"

template <typename G> struct WarpgroupBackwardQueriesArgs {
  TensorMap q, k, v, do_, g, dq, weight;        // boxes of a chunk's tokens and 128 bytes, swizzled
  Rows<const bf16> q_rows, k_rows, v_rows, do_rows;
  Rows<const G> g_rows;
  Rows<bf16> dq_rows;
  Rows<G> weight_rows;
  const float *u, *initial, *dht;               // null where there is none
  float *ends, *sums, *du;
  i32* strong;
  Shape shape;
  double scale;
  i64 P;                                        // segments a sequence
};

template <typename G, int BK, int BV> struct alignas(1024) Stage {
  Tile<bf16, BK> q, k;                          // q: then dq
  Tile<G, BK> g;                                // then weight
  Tile<bf16, BV> v, do_;
  bf16 dA[CHUNK][64];                           // [query, key], and 32 columns on what rounding left over
  float own[CHUNK];                             // dA of a token with itself
};

constexpr int STAGES = 3;
template <typename G, int BK, int BV> struct Shared {
  Stage<G, BK, BV> stages[STAGES];
  Barrier full[STAGES], pairs[STAGES], done[STAGES];
};

template <typename G, int BK, int BV>
__device__ __forceinline__ void move(Shared<G, BK, BV>& s, const WarpgroupBackwardQueriesArgs<G>& args) {
  const Place at = place_of(args.shape, blockIdx.x);
  const i64 K = args.shape.K, V = args.shape.V;
#pragma unroll 1
  for (int turn = -STAGES; turn * CHUNK < at.tokens; ++turn) {
    if (turn >= 0) {
      Stage<G, BK, BV>& out = s.stages[turn % STAGES];
      barrier_wait(s.done[turn % STAGES], turn / STAGES & 1);
      store_chunk(at, turn * CHUNK, [&](auto f) {
        f(out.q, args.dq, args.dq_rows, K);
        f(out.g, args.weight, args.weight_rows, K);
      });
    }
    const int next = turn + STAGES;
    if (next * CHUNK >= at.tokens) continue;
    Stage<G, BK, BV>& in = s.stages[next % STAGES];
    fetch_chunk(s.full[next % STAGES], at, next * CHUNK, [&](auto f) {
      f(in.g, args.g, args.g_rows, K);
      f(in.k, args.k, args.k_rows, K);
      f(in.do_, args.do_, args.do_rows, V);
      f(in.v, args.v, args.v_rows, V);
      f(in.q, args.q, args.q_rows, K);
    });
  }
}

template <class Policy, typename G, int BK, int BV>
__device__ __forceinline__ void multiply_tokens(Shared<G, BK, BV>& s, int tokens, int block, int lane) {
#pragma unroll 1
  for (int turn = 0; turn * CHUNK < tokens; ++turn) {
    forget(lane);                               // addresses are cheaper made anew than held in registers
    Stage<G, BK, BV>& in = s.stages[turn % STAGES];
    barrier_wait(s.full[turn % STAGES], turn / STAGES & 1);
    float d[2][4];
    pair_products(d, in.do_, in.v, block, lane);
    put_pairs(in.dA, d, block, lane, [&](int i, int j, float x) {
      if (Policy::reads_before_write && i == j) in.own[i] = x;
      return j < i || (j == i && !Policy::reads_before_write) ? x : 0.f;
    });
    fence_async();
    barrier_arrive(s.pairs[turn % STAGES]);
  }
}

template <class Policy, typename G, int BK, int BV>
__device__ __forceinline__ void consume(Shared<G, BK, BV>& s, const WarpgroupBackwardQueriesArgs<G>& args) {
  const Place at = place_of(args.shape, blockIdx.x);
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x & 31, t = lane & 3;
  const int channel = threadIdx.x / 32 * 16 + (lane >> 2);
  const i64 K = args.shape.K, state = at.pair * K * args.shape.V;
  const float scale = float(args.scale);
  const bool inside[2] = {channel < K, channel + 8 < K};

  float S[BV / 2] = {}, late[2] = {1.f, 1.f}, u[2] = {}, du[2] = {};
  if (args.initial)
    each_of_state<BV>(S, args.initial + state, args.shape, channel, [](float& x, float& y, const float* from) {
      const float2 two = *reinterpret_cast<const float2*>(from);
      x = two.x, y = two.y;
    });
  if (Policy::reads_before_write)
    for (int h = 0; h < 2; ++h)
      if (inside[h]) u[h] = args.u[at.head * K + channel + 8 * h];

  bool mild = true;
#pragma unroll 1
  for (int turn = 0; turn * CHUNK < at.tokens; ++turn) {
    Stage<G, BK, BV>& in = s.stages[turn % STAGES];
    bf16(&k_tile)[CHUNK][64] = in.k[warpgroup], (&q_tile)[CHUNK][64] = in.q[warpgroup];
    const u32 phase = turn / STAGES & 1;
    barrier_wait(s.full[turn % STAGES], phase);
    Decays decay;
    mild &= decays_of<Policy>(decay, own_panels(in.g, warpgroup), scale);
    u32 k[2][4], rest[2][4];
    load_channels(k, k_tile);
    each_two([&](int, int x, int m) { rest[x][m] = k[x][m]; });
    decayed(k, decay.k);
    left_over(rest, k, decay.k);

    float from_state[16], from_pairs[16];
    barrier_wait(s.pairs[turn % STAGES], phase);
    wgmma_fence();
    multiply_pairs<false>(from_pairs, k, in.dA, false);
    multiply_pairs<false, true>(from_pairs, k, in.dA, true);
    multiply_pairs<false>(from_pairs, rest, in.dA, true);
    wgmma_commit();
    wgmma_wait<1>();                            // says that the state's products have ended
    const float by[2] = {late[0] * decay.early[0], late[1] * decay.early[1]};
    late[0] = decay.late[0], late[1] = decay.late[1];
    read_state<BV>(from_state, S, by, in.do_, [](int, const u32(&)[4], const u32(&)[4]) {});
    wgmma_keep(S);
    wgmma_fence();
    write_state<BV>(S, k, in.v);
    write_state<BV>(S, rest, in.v);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_keep(from_state);
    wgmma_keep(from_pairs);

    u32 q[2][4];
    float sum[2] = {};
    load_channels(q, q_tile);
    if (Policy::reads_before_write) {           // the present token
      u32 raw[2][4];
      load_channels(raw, k_tile);
      each_two([&](int i, int x, int m) {
        const float2 own = *reinterpret_cast<const float2*>(&in.own[i / 4 * 8 + 2 * t]);
        const float first = scale * own.x * low(raw[x][m]), second = scale * own.y * high(raw[x][m]);
        const int h = m & 1;
        du[h] += low(q[x][m]) * first + high(q[x][m]) * second;
        from_pairs[i] = fmaf(decay.q[i], from_pairs[i] + from_state[i], u[h] * first);
        from_pairs[i + 1] = fmaf(decay.q[i + 1], from_pairs[i + 1] + from_state[i + 1], u[h] * second);
      });
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i) from_pairs[i] = decay.q[i] * (from_pairs[i] + from_state[i]);
    }
    each_two([&](int i, int x, int m) {
      from_state[i] *= decay.q[i] * low(q[x][m]), from_state[i + 1] *= decay.q[i + 1] * high(q[x][m]);
      sum[m & 1] += from_state[i] + from_state[i + 1];
    });
    __syncwarp();
    store_values(&q_tile, from_pairs);
    store_values(own_panels(in.g, warpgroup), from_state);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float whole = channel_sum(sum[h]);
      if (t == 0 && inside[h]) args.sums[(at.chunk + turn) * K + channel + 8 * h] = whole;
    }
    wgmma_wait<0>();
    wgmma_keep(S);
    fence_async();
    barrier_arrive(s.done[turn % STAGES]);
  }
  if (!mild) args.strong[at.sequence / args.P * args.shape.H + at.head] = 1;
  float end[2] = {};
  if (args.dht)
    each_of_state<BV>(S, args.dht + state, args.shape, channel, [&](float& x, float& y, const float* from) {
      const float2 two = *reinterpret_cast<const float2*>(from);
      end[&x - S >> 1 & 1] += x * two.x + y * two.y;
    });
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float whole = channel_sum(late[h] * end[h]), all = channel_sum(du[h]);
    if (t || !inside[h]) continue;
    if (args.dht) args.ends[at.pair * K + channel + 8 * h] = whole;
    if (Policy::reads_before_write) args.du[at.pair * K + channel + 8 * h] = all;
  }
}

template <class Policy, typename G, int BK, int BV>
__global__ void __launch_bounds__(2 * BK + 128, BK + BV == 128 ? 2 : 1)
warpgroup_backward_queries(const __grid_constant__ WarpgroupBackwardQueriesArgs<G> args) {
  Shared<G, BK, BV>& s = *reinterpret_cast<Shared<G, BK, BV>*>(dynamic_smem());
  constexpr int CONSUMERS = 2 * BK;
  if (threadIdx.x == 0)
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(s.full[stage], 32);
      barrier_init(s.pairs[stage], 3 * 32);
      barrier_init(s.done[stage], CONSUMERS);
    }
  for (int i = threadIdx.x; i < STAGES * CHUNK * 32; i += CONSUMERS + 128)       // no key behind its query
    reinterpret_cast<u32*>(s.stages[i / (CHUNK * 32)].dA)[i % (CHUNK * 32)] = 0;
  fence_async();
  __syncthreads();
  constexpr bool TIGHT = BK == 128 || BV == 64;  // otherwise nobody lacks registers
  if (threadIdx.x < CONSUMERS) {
    if constexpr (TIGHT) registers_up<BK == 64 ? 192 : 216>();
    consume<Policy>(s, args);
    return;
  }
  if constexpr (TIGHT) registers_down<BK == 64 ? 64 : 72>();
  const int warp = (threadIdx.x - CONSUMERS) / 32;
  if (warp < 3) multiply_tokens<Policy>(s, place_of(args.shape, blockIdx.x).tokens, warp, threadIdx.x & 31);
  else move(s, args);
}
