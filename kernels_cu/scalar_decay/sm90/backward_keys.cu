// what      Backward on Hopper under scalar decays, second pass: backwards in time, carrying the state's
//           gradient C. Gives dk, dv, dg and dh0.
// math      per chunk of 32, E, L, D and dA as scalar_decay_sm90_backward_queries has them, A_ij = scale D_ij q_i .
//           k_j: dk_j = scale sum_{i>=j} D_ij dA_ij q_i + L_j C v_j;  dv_j = sum_{i>=j} A_ij do_i + L_j C^T k_j
//           dg_t = x + sum_{i>=t} weight_i - sum_{j>=t} L_j k_j . C v_j + sum_{i>=t>j} A_ij dA_ij in the chunk,
//           x = sum_kv S C at its end;  C <- E_32 C + scale sum_i E_i q_i do_i^T
// shapes    q k dk [B, H, T, K], v do dv [B, H, T, V], g [B, H, T] float32 of any strides; dht, dh0 [N, H, K, V]
//           float32; dg [B, H, T], the weights on entry, and ends [N, H] as scalar_decay_sm90_backward_queries leaves
//           them
// grid      as scalar_decay_sm90_backward_queries
// smem      Stage: a chunk's tokens, and its results in place of them; Shared::C: C for dv
// barriers  full, done: as scalar_decay_sm90_backward_queries; pairs: A and dA stand
// numerics  as scalar_decay_sm90_backward_queries; dg in float32, always in the same order
// source    Yang et al., 2024, section 4.4; Sun et al., 2023, section 2.2
// limits    as scalar_decay_sm90_backward_queries
#include "warpgroup_backward.cuh"

struct Args {
  TensorMap q, k, v, do_, dk, dv;  // boxes of a chunk's tokens and 128 bytes, swizzled
  Rows<const bf16> q_rows, k_rows, v_rows, do_rows;
  Rows<bf16> dk_rows, dv_rows;
  Rows<const float> g;
  const float *dht, *ends;  // null where there is none
  float *dg, *dh0;          // null where nobody asks for it
  Shape shape;
  double scale;
  i64 P;  // segments a sequence
};

template <int BK, int BV> struct alignas(1024) Stage {
  Tile<bf16, BK> q, k;               // q: then dk
  Tile<bf16, BV> v, do_;             // v: then dv
  bf16 dA[CHUNK][64], A[CHUNK][64];  // decayed, [query, key], and 32 columns on what rounding left over
  TokenDecays decays;
  float crossing[2][CHUNK];       // sum_{i>=t>j} A_ij dA_ij: of the same half's tokens, of both halves'
  float weights[BK / 16][CHUNK];  // every warp's share of L_j k_j . C v_j
};

template <int BK, int BV> struct Shared {
  static constexpr int STAGES = BK + BV == 192 ? 4 : 3;  // two blocks of the smallest share a multiprocessor
  Stage<BK, BV> stages[STAGES];
  bf16 C[2][BK / 64][BV][64];  // [column of V, channel], swizzled; then what rounding left over
  Barrier full[STAGES], pairs[STAGES], done[STAGES];
};
constexpr int CONSUMERS_BARRIER = 1;

// Calls f(turn, first token of the chunk) for the chunks from the last to the first.
template <class F> __device__ __forceinline__ void each_chunk(int tokens, F f) {
  int turn = 0;
#pragma unroll 1
  for (int token = (tokens - 1) / CHUNK * CHUNK; tokens && token >= 0; token -= CHUNK) f(turn++, token);
}

// ---- a warp that moves chunks -------------------------------------------------------------------------------------

// The sum over this lane and those behind it.
__device__ __forceinline__ float sum_behind(float x, int lane) {
#pragma unroll
  for (int distance = 1; distance < CHUNK; distance *= 2) {
    const float other = __shfl_sync(0xffffffffu, x, lane + distance & 31);
    if (lane + distance < CHUNK) x += other;
  }
  return x;
}

template <int BK, int BV> __device__ __forceinline__ void move(Shared<BK, BV>& s, const Args& args) {
  constexpr int STAGES = Shared<BK, BV>::STAGES;
  const Place at = place_of(args.shape, blockIdx.x);
  const i64 K = args.shape.K, V = args.shape.V;
  const int last = (at.tokens - 1) / CHUNK * CHUNK, lane = threadIdx.x & 31;
  float gate = gate_of(args.g, at, last + lane), end = args.ends ? args.ends[at.pair] : 0.f;
#pragma unroll 1
  for (int turn = -STAGES; turn * CHUNK < at.tokens; ++turn) {
    const int next = turn + STAGES, token = last - turn * CHUNK;
    const bool more = next * CHUNK < at.tokens, inside = args.dg && turn >= 0 && token + lane < at.tokens;
    Stage<BK, BV>& stage = s.stages[next % STAGES];
    Barrier& full = s.full[next % STAGES];
    float* const dg = args.dg + ((at.batch * args.shape.H + at.head) * args.shape.T + at.start + token + lane);
    float sum = inside ? *dg : 0.f;  // long before it is needed
    if (turn >= 0) {
      barrier_wait(s.done[turn % STAGES], turn / STAGES & 1);
      store_chunk(at, token, [&](auto f) {
        f(stage.q, args.dk, args.dk_rows, K);
        f(stage.v, args.dv, args.dv_rows, V);
      });
    }
    if (more)
      fetch_chunk(full, at, last - next * CHUNK, [&](auto f) {
        f(stage.do_, args.do_, args.do_rows, V);
        f(stage.v, args.v, args.v_rows, V);
        f(stage.k, args.k, args.k_rows, K);
        f(stage.q, args.q, args.q_rows, K);
      });
    __syncwarp();
    if (args.dg && turn >= 0) {
      float weight = 0.f;
      for (int warp = 0; warp < BK / 16; ++warp) weight += stage.weights[warp][lane];
      sum = sum_behind(sum - weight, lane);
      if (inside) *dg = end + sum + stage.crossing[0][lane] + stage.crossing[1][lane];
      end += __shfl_sync(0xffffffffu, sum, 0);
    }
    if (!more) continue;
    put_decays(stage.decays, gate);
    barrier_arrive(full);
    gate = gate_of(args.g, at, last - (next + 1) * CHUNK + lane);  // long before it is needed
  }
}

// ---- three warps that multiply tokens -------------------------------------------------------------------------------

// The sums of a block's products that cross a token t, queries from t on and keys before it: of x[query, key], where t
// is a query of the block; and of the block between the halves, which t of the first half meets with all its queries.
__device__ __forceinline__ void put_crossing(float (&to)[2][CHUNK], float (&x)[2][4], int block, int lane) {
  const int g = lane >> 2, t = lane & 3;
  float sum[2] = {};  // of queries g and g + 8
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      float &first = x[n][p], &second = x[n][2 + p];
#pragma unroll
      for (int rows = 1; rows < 8; rows *= 2) {  // sums over this query and those behind it
        const float a = __shfl_sync(0xffffffffu, first, lane + 4 * rows & 31);
        const float b = __shfl_sync(0xffffffffu, second, lane + 4 * rows & 31);
        if (g + rows < 8) first += a, second += b;
      }
      first += __shfl_sync(0xffffffffu, second, t);
      const int key = keys_of(block) + 8 * n + 2 * t + p, query = queries_of(block) + g;
      if (key < query) sum[0] += first;
      if (key < query + 8) sum[1] += second;
    }
  sum[0] = channel_sum(sum[0]), sum[1] = channel_sum(sum[1]);
  float* const own = to[block == 1] + queries_of(block) + g;
  if (t == 0) own[0] = sum[0], own[8] = sum[1];
  if (block != 1) return;
  float before = 0.f;  // of all queries and the keys before this lane
#pragma unroll
  for (int key = 0; key < 16; ++key) {
    const float all = __shfl_sync(0xffffffffu, x[key / 8][key % 2], key % 8 / 2);
    if (key < lane) before += all;
  }
  if (lane < 16) to[1][lane] = before;
}

template <int BK, int BV>
__device__ __forceinline__ void multiply_tokens(Shared<BK, BV>& s, const Args& args, int block, int lane) {
  constexpr int STAGES = Shared<BK, BV>::STAGES;
  const int tokens = place_of(args.shape, blockIdx.x).tokens;
  const float scale = float(args.scale);
#pragma unroll 1
  for (int turn = 0; turn * CHUNK < tokens; ++turn) {
    forget(lane);  // addresses are cheaper made anew than held in registers
    Stage<BK, BV>& in = s.stages[turn % STAGES];
    barrier_wait(s.full[turn % STAGES], turn / STAGES & 1);
    float A[2][4], dA[2][4], decay[2][4];
    pair_products(dA, in.do_, in.v, block, lane);
    pair_products(A, in.q, in.k, block, lane);
    load_decays(decay, in.decays, block, lane);
#pragma unroll
    for (int i = 0; i < 8; ++i) A[i / 4][i % 4] *= scale * decay[i / 4][i % 4];
    const auto up_to_query = [](int i, int j, float x) { return j <= i ? x : 0.f; };
    put_pairs(in.A, A, block, lane, up_to_query);
#pragma unroll
    for (int i = 0; i < 8; ++i) A[i / 4][i % 4] *= dA[i / 4][i % 4], dA[i / 4][i % 4] *= decay[i / 4][i % 4];
    put_pairs(in.dA, dA, block, lane, up_to_query);
    if (args.dg) put_crossing(in.crossing, A, block, lane);
    fence_async();
    barrier_arrive(s.pairs[turn % STAGES]);
  }
}

// ---- warps with channels --------------------------------------------------------------------------------------------

template <int BK, int BV> __device__ __forceinline__ void consume(Shared<BK, BV>& s, const Args& args) {
  constexpr int STAGES = Shared<BK, BV>::STAGES, CONSUMERS = 2 * BK;
  const Place at = place_of(args.shape, blockIdx.x);
  const int warp = threadIdx.x / 32, warpgroup = warp / 4, lane = threadIdx.x & 31, channel = warp * 16 + (lane >> 2);
  const i64 size = args.shape.K * args.shape.V;
  const float scale = float(args.scale);

  float C[BV / 2] = {};
  if (args.dht)
    each_of_state<BV>(C, args.dht + at.pair * size, args.shape, channel, [](float& x, float& y, const float* from) {
      const float2 two = *reinterpret_cast<const float2*>(from);
      x = two.x, y = two.y;
    });

  each_chunk(at.tokens, [&](int turn, int token) {
    Stage<BK, BV>& in = s.stages[turn % STAGES];
    const u32 phase = turn / STAGES & 1;
    barrier_wait(s.full[turn % STAGES], phase);
    u32 q[2][4], rest[2][4], raw[2][4];
    float decay[8];
    load_channels(raw, in.q[warpgroup]);
    load_tokens(decay, in.decays.start, scale);
    each_two([&](int, int x, int m) { q[x][m] = raw[x][m]; });
    decay_tokens(q, rest, decay);
    const float all = in.decays.all(), by[2] = {all, all};

    float from_state[16], from_pairs[16];
    barrier_wait(s.pairs[turn % STAGES], phase);
    barrier_sync(CONSUMERS_BARRIER, CONSUMERS);  // the last chunk's C has been read
    wgmma_fence();
    multiply_pairs<true>(from_pairs, raw, in.dA, false);
    multiply_pairs<true, true>(from_pairs, raw, in.dA, true);
    wgmma_commit();
    wgmma_wait<1>();  // says that the state's products have ended
    read_state<BV, true>(from_state, C, by, in.v, [&](int part, const u32(&columns)[4], const u32(&rest)[4]) {
      stmatrix_x4_trans(matrix_row(s.C[0][warpgroup][0], 16 * part), columns);
      stmatrix_x4_trans(matrix_row(s.C[1][warpgroup][0], 16 * part), rest);
    });
    wgmma_keep(C);
    wgmma_fence();
    write_state<BV>(C, q, in.do_);
    write_state<BV>(C, rest, in.do_);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_keep(from_state);
    wgmma_keep(from_pairs);

    u32 k[2][4];
    float weights[8] = {};
    load_channels(k, in.k[warpgroup]);
    load_tokens(decay, in.decays.end());
    each_two([&](int i, int x, int m) {
      float &first = from_state[i], &second = from_state[i + 1];
      const int token = i / 4 * 2;
      first *= decay[token], second *= decay[token + 1];
      weights[token] = fmaf(low(k[x][m]), first, weights[token]);
      weights[token + 1] = fmaf(high(k[x][m]), second, weights[token + 1]);
      from_pairs[i] = fmaf(scale, from_pairs[i], first), from_pairs[i + 1] = fmaf(scale, from_pairs[i + 1], second);
    });
    __syncwarp();
    store_values(&in.q[warpgroup], from_pairs);
    if (args.dg) put_token_sums(in.weights[warp], weights);
    barrier_sync(CONSUMERS_BARRIER, CONSUMERS);  // C stands, and v has been read
#pragma unroll 1
    for (int panel = warpgroup; panel < BV / 64; panel += CONSUMERS / 128) {
      float dv[16], of_pairs[16];
      u32 columns[2][BK / 16][4], gradient[2][4];
      const int row = 64 * panel + threadIdx.x / 32 % 4 * 16 + (lane & 7) + (lane >> 3 & 1) * 8;
#pragma unroll
      for (int c = 0; c < BK / 8; ++c) {
        const int number = c / (BK / 16), tile = c % (BK / 16);
        ldmatrix_x4(columns[number][tile], swizzled(s.C[number][tile / 4][0], row, tile % 4 * 2 + (lane >> 4)));
      }
      load_channels(gradient, in.do_[panel]);
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < BK / 8; ++c) {
        const int number = c / (BK / 16), tile = c % (BK / 16);
        wgmma<bf16, CHUNK, false>(dv, columns[number][tile], wgmma_tile(in.k[tile / 4], 16, 1024) + tile % 4 * 32 / 16,
                                  c > 0);
      }
      multiply_pairs<true>(of_pairs, gradient, in.A, false);
      multiply_pairs<true, true>(of_pairs, gradient, in.A, true);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_keep(dv);
      wgmma_keep(of_pairs);
      load_tokens(decay, in.decays.end());
#pragma unroll
      for (int i = 0; i < 16; ++i) dv[i] = fmaf(decay[i / 4 * 2 + i % 2], dv[i], of_pairs[i]);
      store_values(&in.v[panel], dv);
    }
    wgmma_wait<0>();
    wgmma_keep(C);
    fence_async();
    barrier_arrive(s.done[turn % STAGES]);
  });
  if (args.dh0 && at.sequence % args.P == 0) {
    float* first = args.dh0 + (at.sequence / args.P * args.shape.H + at.head) * size;
    each_of_state<BV>(C, first, args.shape, channel,
                      [](float& x, float& y, float* to) { *reinterpret_cast<float2*>(to) = {x, y}; });
  }
}

template <int BK, int BV>
__global__ void __launch_bounds__(2 * BK + 128, BK + BV == 128 ? 2 : 1)
    scalar_decay_sm90_backward_keys(const __grid_constant__ Args args) {
  Shared<BK, BV>& s = *reinterpret_cast<Shared<BK, BV>*>(dynamic_smem());
  constexpr int STAGES = Shared<BK, BV>::STAGES, CONSUMERS = 2 * BK;
  if (threadIdx.x == 0)
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(s.full[stage], 2 * 32);  // the tokens, then the decays
      barrier_init(s.pairs[stage], 3 * 32);
      barrier_init(s.done[stage], CONSUMERS);
    }
  for (int i = threadIdx.x; i < 2 * STAGES * CHUNK * 32; i += CONSUMERS + 128) {  // no key behind its query
    Stage<BK, BV>& stage = s.stages[i / (2 * CHUNK * 32)];
    reinterpret_cast<u32*>(i / (CHUNK * 32) % 2 ? stage.A : stage.dA)[i % (CHUNK * 32)] = 0;
  }
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
  if (warp < 3) multiply_tokens(s, args, warp, threadIdx.x & 31);
  else move(s, args);
}
