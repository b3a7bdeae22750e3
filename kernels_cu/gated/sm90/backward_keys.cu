// what      GLA and RWKV-6 backward on Hopper, second sweep: backwards in time, carrying the state's gradient C. Gives dk,
//           dv, dg and dh0.
// math      per chunk of 32, decays from its middle (warpgroup_backward.cuh): q^ = scale q E (RWKV-6: E of token i - 1), k^ = k / E,
//           C_mid = diag(late) C;  A = q^ k^^T, dA = do v^T, for j <= i (RWKV-6: j < i, and scale sum r u k for j = i)
//           dk = (dA^T q^ + v C_mid^T) / E (RWKV-6: + scale u q dA_tt);  dv = A^T do + k^ C_mid
//           dg_t = x + sum_{i>=t} q_i dq_i - sum_{j>=t} k_j dk_j in the chunk (RWKV-6: i > t), own parts left out on both
//           sides, with q dq = weight + q^ (dA k^), and x = sum_v S C at the chunk's end; C <- diag(early) (C_mid + q^^T do)
// shapes    q k g weight dk dg [B, H, T, K], v do dv [B, H, T, V], u [H, K], dht and dh0 [N, H, K, V] float32
//           weight, sums, ends, strong: as warpgroup_backward_queries leaves them; weight may be dg itself. Where gates are
//           not mild nothing is written: others compute that head
// grid      as warpgroup_backward_queries
// smem      Stage: a chunk's tokens, and its results in place of them; Shared::C: C_mid for dv
// barriers  full, done: as warpgroup_backward_queries; pairs: dA stands; operands: q^, k^ do; scores: A does
// numerics  as warpgroup_backward_queries; dg in float32 from weights of its own type and sums of chunks in float32
// source    Yang et al., 2024, section 4.4; Peng et al., 2024, eq. 18-19
// limits    as warpgroup_backward_queries
#include "warpgroup_backward.cuh"

template <typename G> struct WarpgroupBackwardKeysArgs {
  TensorMap q, k, v, do_, g, weight, dk, dv, dg;        // boxes of a chunk's tokens and 128 bytes, swizzled
  Rows<const bf16> q_rows, k_rows, v_rows, do_rows;
  Rows<const G> g_rows, weight_rows;
  Rows<bf16> dk_rows, dv_rows;
  Rows<G> dg_rows;
  const float *u, *dht;                         // null where there is none
  const float *ends, *sums;
  const i32* strong;
  float* dh0;                                   // or null
  Shape shape;
  double scale;
  i64 P;                                        // segments a sequence
};

template <typename G, int BK, int BV> struct alignas(1024) Stage {
  Tile<bf16, BK> q, k;                          // then q^ and k^, q: then dk
  Tile<G, BK> g, weight;                        // g: then dg
  Tile<bf16, BV> v, do_;                        // v: then dv
  bf16 dA[CHUNK][64];                           // [query, key], and 32 columns on what rounding left over
  float own[CHUNK];                             // dA of a token with itself
};

template <typename G, int BK, int BV> struct Shared {
  static constexpr int STAGES = sizeof(G) == 2 ? 3 : 2;
  Stage<G, BK, BV> stages[STAGES];
  bf16 C[BK / 64][BV][64];                      // [column of V, channel], swizzled
  Tile<bf16, BK> q_rest, k_rest;                // what rounding left over of q^ and k^
  bf16 A[CHUNK][64];                            // as dA
  float own[BK / 16][CHUNK];                    // RWKV-6: a token's score with itself, every warp's share
  Place place;                                  // here, since registers are scarce
  Barrier full[STAGES], pairs[STAGES], done[STAGES], operands, scores;
};
constexpr int CONSUMERS_BARRIER = 1;

// Whether gates of this block's head are not mild.
template <typename G> __device__ __forceinline__ bool done_elsewhere(const WarpgroupBackwardKeysArgs<G>& args) {
  const u32 H = u32(args.shape.H);
  return args.strong[blockIdx.x / H / u32(args.P) * H + blockIdx.x % H];
}

// Calls f(turn, first token of the chunk) for the chunks from the last to the first.
template <class F> __device__ __forceinline__ void each_chunk(int tokens, F f) {
  int turn = 0;
#pragma unroll 1
  for (int token = (tokens - 1) / CHUNK * CHUNK; tokens && token >= 0; token -= CHUNK) f(turn++, token);
}

// ---- a warpgroup that multiplies tokens and moves chunks: a warp has 8 queries, and one or two of the arrays ----------

// D[query, key] = a b^T + a more^T for a warp's 8 queries, and in its other 8 rows the same of a_rest. MORE: with `more`.
template <bool MORE, int PANELS>
__device__ __forceinline__ void multiply_rows(float (&d)[CHUNK / 2], bf16 (&a)[PANELS][CHUNK][64], bf16 (&a_rest)[PANELS][CHUNK][64],
                                              bf16 (&b)[PANELS][CHUNK][64], bf16 (&more)[PANELS][CHUNK][64], int warp, int lane) {
  const int row = 8 * warp + (lane & 7), piece = lane >> 4;
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel) {            // one after the other: registers are scarce
    u32 x[4][4];
#pragma unroll
    for (int c = 0; c < 4; ++c) ldmatrix_x4(x[c], swizzled((lane & 8 ? a_rest : a)[panel][0], row, 2 * c + piece));
    const u64 keys = wgmma_tile(b[panel], 16, 1024), others = wgmma_tile(more[panel], 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      wgmma<bf16, CHUNK, false>(d, x[c], keys + c * 32 / 16, panel || c);
      if (MORE) wgmma<bf16, CHUNK, false>(d, x[c], others + c * 32 / 16, true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_keep(d);
  }
}

// Stores the first 8 rows or, of BOTH, their sum with the others, with f(query, key, value) for each, as that of two bfloat16
// numbers, the second 32 columns on.
template <bool BOTH, class F>
__device__ __forceinline__ void put_rows(bf16 (&tile)[CHUNK][64], const float (&d)[CHUNK / 2], int warp, int lane, F f) {
  const int i = 8 * warp + (lane >> 2), t = lane & 3;
#pragma unroll
  for (int n = 0; n < CHUNK / 8; ++n) {
    const float x = f(i, 8 * n + 2 * t, BOTH ? d[4 * n] + d[4 * n + 2] : d[4 * n]);
    const float y = f(i, 8 * n + 2 * t + 1, BOTH ? d[4 * n + 1] + d[4 * n + 3] : d[4 * n + 1]);
    const u32 rounded = pack<bf16>(x, y);
    reinterpret_cast<u32*>(swizzled(tile[0], i, n))[t] = rounded;
    reinterpret_cast<u32*>(swizzled(tile[0], i, n + 4))[t] = remainder_of(rounded, x, y);
  }
}

template <class Policy, typename G, int BK, int BV>
__device__ __forceinline__ void multiply_tokens(Shared<G, BK, BV>& s, const WarpgroupBackwardKeysArgs<G>& args) {
  constexpr int STAGES = Shared<G, BK, BV>::STAGES;
  const Place& at = s.place;
  const i64 K = args.shape.K, V = args.shape.V;
  const int warp = threadIdx.x / 32 % 4;
  int lane = threadIdx.x & 31;
  const auto announce = [&](Barrier& b) {
    fence_async();
    barrier_arrive(b);
  };
  const auto fetch = [&](int turn) {
    if (turn * CHUNK >= at.tokens) return;
    Stage<G, BK, BV>& in = s.stages[turn % STAGES];
    fetch_chunk(s.full[turn % STAGES], at, ((at.tokens - 1) / CHUNK - turn) * CHUNK, [&](auto f) {
      if (warp == 0) f(in.q, args.q, args.q_rows, K), f(in.k, args.k, args.k_rows, K);
      if (warp == 1) f(in.v, args.v, args.v_rows, V), f(in.do_, args.do_, args.do_rows, V);
      if (warp == 2) f(in.g, args.g, args.g_rows, K);
      if (warp == 3) f(in.weight, args.weight, args.weight_rows, K);
    });
  };
  const auto store = [&](int turn, int token) {
    Stage<G, BK, BV>& out = s.stages[turn % STAGES];
    barrier_wait(s.done[turn % STAGES], turn / STAGES & 1);
    store_chunk(at, token, [&](auto f) {
      if (warp == 0) f(out.q, args.dk, args.dk_rows, K);
      if (warp == 1) f(out.v, args.dv, args.dv_rows, V);
      if (warp == 2) f(out.g, args.dg, args.dg_rows, K);
    });
  };
  const auto gradients = [&](int turn) {        // of the scores: dA
    Stage<G, BK, BV>& in = s.stages[turn % STAGES];
    float d[CHUNK / 2];
    barrier_wait(s.full[turn % STAGES], turn / STAGES & 1);
    multiply_rows<false>(d, in.do_, in.do_, in.v, in.v, warp, lane);
    put_rows<false>(in.dA, d, warp, lane, [&](int i, int j, float y) {
      if (Policy::reads_before_write && i == j) in.own[i] = y;
      return j < i || (j == i && !Policy::reads_before_write) ? y : 0.f;
    });
    announce(s.pairs[turn % STAGES]);
  };
  for (int turn = 0; turn < STAGES; ++turn) fetch(turn);
  __syncwarp();
  if (at.tokens) gradients(0);
  each_chunk(at.tokens, [&](int turn, int token) {
    forget(lane);                               // addresses are cheaper made anew than held in registers
    Stage<G, BK, BV>& in = s.stages[turn % STAGES];
    float d[CHUNK / 2], own = 0.f;              // q^ k^^T, of the numbers that rounding left over too
    barrier_wait(s.operands, turn & 1);
    multiply_rows<true>(d, in.q, s.q_rest, in.k, s.k_rest, warp, lane);
    if (Policy::reads_before_write)
      for (int other = 0; other < BK / 16; ++other) own += s.own[other][8 * warp + (lane >> 2)];
    put_rows<true>(s.A, d, warp, lane, [&](int i, int j, float x) {
      return j < i ? x : j > i ? 0.f : Policy::reads_before_write ? own : x;
    });
    announce(s.scores);
    if (token) gradients(turn + 1);
    store(turn, token);
    fetch(turn + STAGES);                       // each warp what takes the place of what it has stored
    __syncwarp();
  });
}

// ---- warpgroups with 64 channels each ---------------------------------------------------------------------------------

// Over a channel's four lanes: what comes behind this lane's value, and the sum of all.
__device__ __forceinline__ void sums_behind(float x, float& behind, float& all) {
  const int t = threadIdx.x & 3;
  const float other = __shfl_xor_sync(0xffffffffu, x, 1), two = x + other, others = __shfl_xor_sync(0xffffffffu, two, 2);
  behind = (t & 1 ? 0.f : other) + (t & 2 ? 0.f : others);
  all = two + others;
}

// Scores of tokens with themselves over this warp's channels, from q (with scale) and k as they are.
__device__ __forceinline__ void put_own(float* to, const u32 (&q)[2][4], const u32 (&k)[2][4], const float (&u)[2]) {
  float x[8] = {};
  each_two([&](int i, int s, int m) {
    const float by = u[m & 1];
    x[i / 4 * 2] = fmaf(low(q[s][m]) * by, low(k[s][m]), x[i / 4 * 2]);
    x[i / 4 * 2 + 1] = fmaf(high(q[s][m]) * by, high(k[s][m]), x[i / 4 * 2 + 1]);
  });
  put_token_sums(to, x);
}

// x times factors, in registers and in its tile; and what rounding leaves over of that.
__device__ __forceinline__ void hand_over(u32 (&x)[2][4], bf16 (&tile)[CHUNK][64], bf16 (&rest)[CHUNK][64], const float (&by)[16]) {
  u32 left[2][4];
  each_two([&](int, int s, int m) { left[s][m] = x[s][m]; });
  decayed(x, by);
  left_over(left, x, by);
  store_channels(tile, x);
  store_channels(rest, left);
}

template <class Policy, typename G, int BK, int BV>
__device__ __forceinline__ void consume(Shared<G, BK, BV>& s, const WarpgroupBackwardKeysArgs<G>& args) {
  constexpr int STAGES = Shared<G, BK, BV>::STAGES, CONSUMERS = 2 * BK;
  const Place at = place_of(args.shape, blockIdx.x);
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x & 31, t = lane & 3;
  const int channel = threadIdx.x / 32 * 16 + (lane >> 2);
  const i64 K = args.shape.K, state = at.pair * K * args.shape.V;
  const float scale = float(args.scale);
  const bool inside[2] = {channel < K, channel + 8 < K};
  if (done_elsewhere(args)) return;

  float C[BV / 2] = {}, early[2] = {1.f, 1.f}, u[2] = {}, end[2] = {};
  if (args.dht)
    each_of_state<BV>(C, args.dht + state, args.shape, channel, [](float& x, float& y, const float* from) {
      const float2 two = *reinterpret_cast<const float2*>(from);
      x = two.x, y = two.y;
    });
  for (int h = 0; h < 2; ++h) {
    if (Policy::reads_before_write && inside[h]) u[h] = args.u[at.head * K + channel + 8 * h];
    if (args.dht && inside[h]) end[h] = args.ends[at.pair * K + channel + 8 * h];
  }

  each_chunk(at.tokens, [&](int turn, int token) {
    Stage<G, BK, BV>& in = s.stages[turn % STAGES];
    bf16(&k_tile)[CHUNK][64] = in.k[warpgroup], (&q_tile)[CHUNK][64] = in.q[warpgroup];
    float sum[2] = {};
    for (int h = 0; h < 2; ++h)
      if (inside[h]) sum[h] = args.sums[(at.chunk + token / CHUNK) * K + channel + 8 * h];
    barrier_wait(s.full[turn % STAGES], turn / STAGES & 1);
    Decays decay;
    decays_of<Policy>(decay, own_panels(in.g, warpgroup), scale);
    u32 q[2][4], k[2][4], raw[2][4];
    load_channels(q, q_tile);
    load_channels(k, k_tile);
    if (Policy::reads_before_write) {
      const float by[2] = {scale * u[0], scale * u[1]};
      put_own(s.own[threadIdx.x / 32], q, k, by);
      each_two([&](int, int x, int m) { raw[x][m] = q[x][m]; });
    }
    __syncwarp();
    hand_over(q, q_tile, s.q_rest[warpgroup], decay.q);
    hand_over(k, k_tile, s.k_rest[warpgroup], decay.k);
    fence_async();
    barrier_arrive(s.operands);

    float dk[16], dq[16];
    const float by[2] = {early[0] * decay.late[0], early[1] * decay.late[1]};
    early[0] = decay.early[0], early[1] = decay.early[1];
    barrier_sync(CONSUMERS_BARRIER, CONSUMERS);         // the last chunk's C has been read
    read_state<BV>(dk, C, by, in.v, [&](int part, const u32(&columns)[4], const u32(&)[4]) {
      stmatrix_x4_trans(matrix_row(s.C[warpgroup][0], 16 * part), columns);
    });
    wgmma_wait<0>();
    u32 q_rest[2][4], k_rest[2][4];
    load_channels(q_rest, s.q_rest[warpgroup]);
    load_channels(k_rest, s.k_rest[warpgroup]);
    barrier_wait(s.pairs[turn % STAGES], turn / STAGES & 1);
    wgmma_fence();
    multiply_pairs<true>(dk, q, in.dA, true);
    multiply_pairs<true, true>(dk, q, in.dA, true);
    multiply_pairs<true>(dk, q_rest, in.dA, true);
    multiply_pairs<false>(dq, k, in.dA, false);
    multiply_pairs<false, true>(dq, k, in.dA, true);
    multiply_pairs<false>(dq, k_rest, in.dA, true);
    wgmma_commit();
    wgmma_keep(C);
    wgmma_fence();
    write_state<BV>(C, q, in.do_);
    write_state<BV>(C, q_rest, in.do_);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_keep(dk);
    wgmma_keep(dq);

    float weight[16];                                   // then dg
    load_values(weight, own_panels(in.weight, warpgroup));
    float behind[2] = {end[0], end[1]}, total[2] = {};
#pragma unroll
    for (int n = 3; n >= 0; --n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = 4 * n + 2 * h, x = n / 2, m = n % 2 * 2 + h;
        float &first = weight[i], &second = weight[i + 1];
        float from_first = (low(q[x][m]) + low(q_rest[x][m])) * dq[i];
        float from_second = (high(q[x][m]) + high(q_rest[x][m])) * dq[i + 1];
        const float to_first = (low(k[x][m]) + low(k_rest[x][m])) * dk[i];
        const float to_second = (high(k[x][m]) + high(k_rest[x][m])) * dk[i + 1];
        total[h] += from_first - to_first + (from_second - to_second);
        from_first += first, from_second += second;
        first = from_first - to_first, second = from_second - to_second;
        float next, all;
        sums_behind(first + second, next, all);
        second += behind[h] + next;
        first += second;
        if (Policy::reads_before_write) first -= from_first, second -= from_second;
        behind[h] += all;
      }
#pragma unroll
    for (int h = 0; h < 2; ++h) end[h] += sum[h] + channel_sum(total[h]);
#pragma unroll
    for (int i = 0; i < 16; ++i) dk[i] *= decay.k[i];
    if (Policy::reads_before_write)
      each_two([&](int i, int x, int m) {
        const float2 own = *reinterpret_cast<const float2*>(&in.own[i / 4 * 8 + 2 * t]);
        dk[i] = fmaf(scale * u[m & 1] * own.x, low(raw[x][m]), dk[i]);
        dk[i + 1] = fmaf(scale * u[m & 1] * own.y, high(raw[x][m]), dk[i + 1]);
      });
    store_values(own_panels(in.g, warpgroup), weight);
    barrier_wait(s.scores, turn & 1);
    store_values(&q_tile, dk);
    barrier_sync(CONSUMERS_BARRIER, CONSUMERS);         // C stands, and v has been read
#pragma unroll 1
    for (int panel = warpgroup; panel < BV / 64; panel += CONSUMERS / 128) {
      float dv[16];
      u32 columns[BK / 16][4], gradient[2][4];
      const int row = 64 * panel + threadIdx.x / 32 % 4 * 16 + (lane & 7) + (lane >> 3 & 1) * 8;
#pragma unroll
      for (int c = 0; c < BK / 16; ++c) ldmatrix_x4(columns[c], swizzled(s.C[c / 4][0], row, c % 4 * 2 + (lane >> 4)));
      load_channels(gradient, in.do_[panel]);
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < BK / 16; ++c)
        wgmma<bf16, CHUNK, false>(dv, columns[c], wgmma_tile(in.k[c / 4], 16, 1024) + c % 4 * 32 / 16, c > 0);
      multiply_pairs<true>(dv, gradient, s.A, true);
      multiply_pairs<true, true>(dv, gradient, s.A, true);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_keep(dv);
      store_values(&in.v[panel], dv);
    }
    wgmma_wait<0>();
    wgmma_keep(C);
    fence_async();
    barrier_arrive(s.done[turn % STAGES]);
  });
  if (args.dh0 && at.sequence % args.P == 0) {
    float* first = args.dh0 + (at.sequence / args.P * args.shape.H + at.head) * K * args.shape.V;
    each_of_state<BV>(C, first, args.shape, channel, [&](float& x, float& y, float* to) {
      const float by = early[&x - C >> 1 & 1];
      *reinterpret_cast<float2*>(to) = {by * x, by * y};
    });
  }
}

template <class Policy, typename G, int BK, int BV>
__global__ void __launch_bounds__(2 * BK + 128, BK + BV == 128 ? 2 : 1)
warpgroup_backward_keys(const __grid_constant__ WarpgroupBackwardKeysArgs<G> args) {
  Shared<G, BK, BV>& s = *reinterpret_cast<Shared<G, BK, BV>*>(dynamic_smem());
  constexpr int STAGES = Shared<G, BK, BV>::STAGES, CONSUMERS = 2 * BK;
  if (threadIdx.x == 0) {
    s.place = place_of(args.shape, blockIdx.x);
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(s.full[stage], 128);
      barrier_init(s.pairs[stage], 128);
      barrier_init(s.done[stage], CONSUMERS);
    }
    barrier_init(s.operands, CONSUMERS);
    barrier_init(s.scores, 128);
  }
  fence_async();
  __syncthreads();
  constexpr bool TIGHT = BK == 128 || BV == 64;  // otherwise nobody lacks registers
  if (threadIdx.x < CONSUMERS) {
    if constexpr (TIGHT) registers_up<BK == 64 ? 184 : 216>();
    consume<Policy>(s, args);
    return;
  }
  if constexpr (TIGHT) registers_down<72>();
  if (done_elsewhere(args)) return;             // not before: the others wait for the registers
  multiply_tokens<Policy>(s, args);
}
