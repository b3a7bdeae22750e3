// what      Backward on Hopper under scalar decays, first pass: forwards in time, carrying the state.
//           Gives dq, and for the second pass what the state has in the gate's gradient.
// math      per chunk of 32, E_i the decay from its start to token i, L_j from behind token j to its end, D_ij between:
//           dq_i = scale (sum_{j<=i} D_ij dA_ij k_j + E_i S do_i), dA_ij = do_i . v_j;  S <- E_32 S + sum_j L_j k_j
//           v_j^T weight_i = scale E_i q_i . S do_i
// shapes    q k dq [B, H, T, K], v do [B, H, T, V], g [B, H, T] float32 of any strides; initial, dht [N, H, K, V],
//           weights
//           [B, H, T] and ends [N, H] float32: sum_kv S_T dht; these two null where nobody asks for dg
// grid      a block for every (sequence, head), sequence slowest; a warpgroup for every 64 channels, then one of which
//           three warps multiply tokens, and one moves chunks and makes their decays
// smem      Stage: a chunk's tokens, and its results in place of them
// barriers  full: the tokens and decays are there; pairs: so is dA; done: so are the results
// numerics  products of bfloat16 numbers in float32: q, k, v and do as they came, all else as the sum of two of them
// source    Yang et al., 2024, section 4; Sun et al., 2023, section 2.2
// limits    sm_90a; bfloat16; K <= BK, V <= BV, multiples of 8; BK and BV of 64, 128; rows start on 16 bytes
#include "warpgroup_backward.cuh"

struct Args {
  TensorMap q, k, v, do_, dq;  // boxes of a chunk's tokens and 128 bytes, swizzled
  Rows<const bf16> q_rows, k_rows, v_rows, do_rows;
  Rows<bf16> dq_rows;
  Rows<const float> g;
  const float *initial, *dht;  // null where there is none
  float *ends, *weights;
  Shape shape;
  double scale;
  i64 P;  // segments a sequence
};

template <int BK, int BV> struct alignas(1024) Stage {
  Tile<bf16, BK> q, k;  // q: then dq
  Tile<bf16, BV> v, do_;
  bf16 dA[CHUNK][64];  // decayed, [query, key], and 32 columns on what rounding left over
  TokenDecays decays;
  float weights[BK / 16][CHUNK];  // every warp's share
};

template <int BK, int BV> struct Shared {
  static constexpr int STAGES = BK + BV == 128 ? 3 : 4;  // two blocks of the smallest share a multiprocessor
  Stage<BK, BV> stages[STAGES];
  float ends[BK / 16];  // every warp's share
  Barrier full[STAGES], pairs[STAGES], done[STAGES];
};
constexpr int CONSUMERS_BARRIER = 1;

template <int BK, int BV> __device__ __forceinline__ void move(Shared<BK, BV>& s, const Args& args) {
  constexpr int STAGES = Shared<BK, BV>::STAGES;
  const Place at = place_of(args.shape, blockIdx.x);
  const i64 K = args.shape.K, V = args.shape.V;
  const int lane = threadIdx.x & 31;
  float gate = gate_of(args.g, at, lane);
#pragma unroll 1
  for (int turn = -STAGES; turn * CHUNK < at.tokens; ++turn) {
    const int next = turn + STAGES, token = turn * CHUNK + lane;
    const bool more = next * CHUNK < at.tokens;
    Stage<BK, BV>& stage = s.stages[next % STAGES];
    Barrier& full = s.full[next % STAGES];
    if (turn >= 0) {
      barrier_wait(s.done[turn % STAGES], turn / STAGES & 1);
      store_chunk(at, turn * CHUNK, [&](auto f) { f(stage.q, args.dq, args.dq_rows, K); });
    }
    if (more)
      fetch_chunk(full, at, next * CHUNK, [&](auto f) {
        f(stage.do_, args.do_, args.do_rows, V);
        f(stage.v, args.v, args.v_rows, V);
        f(stage.k, args.k, args.k_rows, K);
        f(stage.q, args.q, args.q_rows, K);
      });
    if (args.weights && token >= 0 && token < at.tokens) {
      float weight = 0.f;
      for (int warp = 0; warp < BK / 16; ++warp) weight += stage.weights[warp][lane];
      args.weights[(at.batch * args.shape.H + at.head) * args.shape.T + at.start + token] = weight;
    }
    __syncwarp();
    if (!more) continue;
    put_decays(stage.decays, gate);
    barrier_arrive(full);
    gate = gate_of(args.g, at, (next + 1) * CHUNK + lane);  // long before it is needed
  }
}

template <int BK, int BV>
__device__ __forceinline__ void multiply_tokens(Shared<BK, BV>& s, int tokens, int block, int lane) {
  constexpr int STAGES = Shared<BK, BV>::STAGES;
#pragma unroll 1
  for (int turn = 0; turn * CHUNK < tokens; ++turn) {
    forget(lane);  // addresses are cheaper made anew than held in registers
    Stage<BK, BV>& in = s.stages[turn % STAGES];
    barrier_wait(s.full[turn % STAGES], turn / STAGES & 1);
    float d[2][4], decay[2][4];
    pair_products(d, in.do_, in.v, block, lane);
    load_decays(decay, in.decays, block, lane);
    for (int x = 0; x < 8; ++x) d[x / 4][x % 4] *= decay[x / 4][x % 4];
    put_pairs(in.dA, d, block, lane, [](int i, int j, float x) { return j <= i ? x : 0.f; });
    fence_async();
    barrier_arrive(s.pairs[turn % STAGES]);
  }
}

template <int BK, int BV> __device__ __forceinline__ void consume(Shared<BK, BV>& s, const Args& args) {
  constexpr int STAGES = Shared<BK, BV>::STAGES;
  const Place at = place_of(args.shape, blockIdx.x);
  const int warp = threadIdx.x / 32, warpgroup = warp / 4, channel = warp * 16 + (threadIdx.x >> 2 & 7);
  const i64 state = at.pair * args.shape.K * args.shape.V;
  const float scale = float(args.scale);

  float S[BV / 2] = {};
  if (args.initial)
    each_of_state<BV>(S, args.initial + state, args.shape, channel, [](float& x, float& y, const float* from) {
      const float2 two = *reinterpret_cast<const float2*>(from);
      x = two.x, y = two.y;
    });

#pragma unroll 1
  for (int turn = 0; turn * CHUNK < at.tokens; ++turn) {
    Stage<BK, BV>& in = s.stages[turn % STAGES];
    const u32 phase = turn / STAGES & 1;
    barrier_wait(s.full[turn % STAGES], phase);
    u32 k[2][4], rest[2][4], raw[2][4];
    float decay[8];
    load_channels(raw, in.k[warpgroup]);
    load_tokens(decay, in.decays.end());
    each_two([&](int, int x, int m) { k[x][m] = raw[x][m]; });
    decay_tokens(k, rest, decay);
    const float all = in.decays.all(), by[2] = {all, all};

    float from_state[16], from_pairs[16];
    barrier_wait(s.pairs[turn % STAGES], phase);
    wgmma_fence();
    multiply_pairs<false>(from_pairs, raw, in.dA, false);
    multiply_pairs<false, true>(from_pairs, raw, in.dA, true);
    wgmma_commit();
    wgmma_wait<1>();  // says that the state's products have ended
    read_state<BV, true>(from_state, S, by, in.do_, [](int, const u32(&)[4], const u32(&)[4]) {});
    wgmma_keep(S);
    wgmma_fence();
    write_state<BV>(S, k, in.v);
    write_state<BV>(S, rest, in.v);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_keep(from_state);
    wgmma_keep(from_pairs);

    u32 q[2][4];
    float weights[8] = {};
    load_channels(q, in.q[warpgroup]);
    load_tokens(decay, in.decays.start, scale);
    each_two([&](int i, int x, int m) {
      float &first = from_state[i], &second = from_state[i + 1];
      const int token = i / 4 * 2;
      first *= decay[token], second *= decay[token + 1];
      weights[token] = fmaf(low(q[x][m]), first, weights[token]);
      weights[token + 1] = fmaf(high(q[x][m]), second, weights[token + 1]);
      from_pairs[i] = fmaf(scale, from_pairs[i], first), from_pairs[i + 1] = fmaf(scale, from_pairs[i + 1], second);
    });
    __syncwarp();
    store_values(&in.q[warpgroup], from_pairs);
    if (args.weights) put_token_sums(in.weights[warp], weights);
    wgmma_wait<0>();
    wgmma_keep(S);
    fence_async();
    barrier_arrive(s.done[turn % STAGES]);
  }
  if (!args.ends) return;
  float end = 0.f;
  each_of_state<BV>(S, args.dht + state, args.shape, channel, [&](float& x, float& y, const float* from) {
    const float2 two = *reinterpret_cast<const float2*>(from);
    end += x * two.x + y * two.y;
  });
  end = warp_sum(end);
  if (threadIdx.x % 32 == 0) s.ends[warp] = end;
  barrier_sync(CONSUMERS_BARRIER, 2 * BK);
  if (threadIdx.x) return;
  for (int other = 1; other < BK / 16; ++other) end += s.ends[other];
  args.ends[at.pair] = end;
}

template <int BK, int BV>
__global__ void __launch_bounds__(2 * BK + 128, BK + BV == 128 ? 2 : 1)
    scalar_decay_sm90_backward_queries(const __grid_constant__ Args args) {
  Shared<BK, BV>& s = *reinterpret_cast<Shared<BK, BV>*>(dynamic_smem());
  constexpr int STAGES = Shared<BK, BV>::STAGES, CONSUMERS = 2 * BK;
  if (threadIdx.x == 0)
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(s.full[stage], 2 * 32);  // the tokens, then the decays
      barrier_init(s.pairs[stage], 3 * 32);
      barrier_init(s.done[stage], CONSUMERS);
    }
  for (int i = threadIdx.x; i < STAGES * CHUNK * 32; i += CONSUMERS + 128)  // no key behind its query
    reinterpret_cast<u32*>(s.stages[i / (CHUNK * 32)].dA)[i % (CHUNK * 32)] = 0;
  fence_async();
  __syncthreads();
  constexpr bool TIGHT = BK == 128 || BV == 64;  // otherwise nobody lacks registers
  if (threadIdx.x < CONSUMERS) {
    if constexpr (TIGHT) registers_up<BK == 64 ? 184 : 216>();
    consume(s, args);
    return;
  }
  if constexpr (TIGHT) registers_down<72>();
  const int warp = (threadIdx.x - CONSUMERS) / 32;
  if (warp < 3) multiply_tokens(s, place_of(args.shape, blockIdx.x).tokens, warp, threadIdx.x & 31);
  else move(s, args);
}
