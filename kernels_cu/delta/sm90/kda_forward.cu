// what      Kimi Delta Attention's forward pass on Hopper, the delta rule with a gate for each channel; chunks of 32
//           tokens
// math      S' = diag(e^g_t) S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = scale S_t^T q_t.  For a chunk,
//           S is the state before it; kd, qd: k and q decayed from the chunk's start; ke: k decayed to its end; M_ij =
//           k_i . D_ij k_j, j < i, A_ij = q_i . D_ij k_j, j <= i, D_ij the decay between both tokens;
//           N = (I + diag(beta) M)^-1
//           E = -kd, B = scale A N diag(beta), W = scale qd + B E, Z = diag(beta) N^T ke
//           Y = E S;  o = W S + B V;  S <- D S + Z^T (V + Y), D the decay of the chunk
//           Keys are stored as k' = k / p, queries as q' = q / r, p and r powers of 2. Primed matrices are those of
//           primed tokens: with N' = (I + diag(beta p^2) M')^-1,   B = scale diag(r) A' N' diag(p beta),
//           Z = diag(beta p) N'^T ke'
// shapes    q k [B, H, T, K], g [B, HV, T, K], v o [B, HV, T, V], beta [B, HV, T] of any strides; states [N, HV, K, V]
//           float32
// grid      a block for every (sequence, head of v, BV columns of V), columns fastest, sequence slowest
// roles     makers: 4 channels of 4 tokens a thread; decayed tokens, A' and M' of chunk n + 1, then B, Z and W of chunk
//           n. Consumers: a warpgroup for every 64 columns, with their state transposed in registers. In a last
//           warpgroup warp 0 copies chunks, warps 1 and 2 invert for even and odd chunks, and warp 3 loads betas
// smem      kda_forward_storage.cuh, which names the barriers, too
// barriers  named 1, of the makers: decays of blocks | decayed tokens | B. Each: these are in shared memory, and what
//           they overwrite has been read
// numerics  products of T are summed in float32. S, E, W, Z and V + Y are rounded to T, decayed tokens to float16. A'
//           and N' are the sum of two float16 each ("split"), B of two T. N: by substitution in float32 within 16
//           tokens. Decays: channel_chunk.cuh; chunks that grow: as growing_chunk.cuh, token by token
// source    Kimi Team, 2025 (2510.26692), eq. 1; the chunk's form is the WY representation multiplied out
// limits    sm_90a; bfloat16, float16; K <= BK, V a multiple of 8; BK and BV of 64, 128; rows start on 16 bytes
#include "delta/sm90/kda_forward_storage.cuh"
#include "delta/growing_chunk.cuh"

// Makes E, W, Z, B and the decay of a chunk token by token, as prepare_by_tokens in growing_chunk.cuh does.
template <class S, class Numbers>
__device__ __forceinline__ void make_by_tokens(S& s, typename S::StageType& in, Numbers& numbers, float scale) {
  constexpr int BK = S::BK;
  auto& inputs = s.decayed;
  copy_tile<BK>(inputs.queries, in.queries), copy_tile<BK>(inputs.keys, in.keys), copy_tile<BK>(inputs.gates, in.gates);
  makers_sync<BK>();  // the copies stand; the stage may be overwritten
  const auto inverse_length = [&](int kind, int t) {
    return numbers.lengths[kind].factor[t] * numbers.lengths[kind].power[t];
  };
  const PanelTask<BK> task;
  float4 since = {1.f, 1.f, 1.f, 1.f}, W[BLOCK];
#pragma unroll 1
  for (int t = 0; t < task.first; ++t) since = times(since, decays_at(channels_at(inputs.gates, t, task.c)));
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) {
    const int t = task.first + n;
    since = times(since, decays_at(task.at(inputs.gates, n)));
    const float4 key = unpack_four(task.at(inputs.keys, n)), query = unpack_four(task.at(inputs.queries, n));
    put_four(task.at(in.E, n), times(-inverse_length(OF_K, t), times(since, key)));
    W[n] = times(scale * inverse_length(OF_Q, t), times(since, query));
  }
  if (task.block == BT / BLOCK - 1) *reinterpret_cast<float4*>(numbers.decay + task.c) = since;
  const int lane = own_lane(), c = 4 * lane;
#pragma unroll 1
  for (int j = threadIdx.x >> 5; j < CHUNK; j += MAKERS<BK> / 32) {
    const auto four = [&](auto& tile, int t) { return c < BK ? unpack_four(channels_at(tile, t, c)) : float4{}; };
    float4 z = times(inverse_length(OF_K, j), four(inputs.keys, j));  // what is left of the key of token j
#pragma unroll 1
    for (int t = 0; t < CHUNK; ++t) {
      float score = 0.f;
      if (t > j) {
        const float4 gates = four(inputs.gates, t), key = four(inputs.keys, t);
        float found = 0.f;
        z = times(decays_at(&gates.x), z);
        add_product(found, key, z);
        const float length = inverse_length(OF_K, t);
        const float4 change = times(-numbers.beta[t] * length * length * warp_sum(found), key);
        z = {z.x + change.x, z.y + change.y, z.z + change.z, z.w + change.w};
      }
      if (t >= j) {
        add_product(score, four(inputs.queries, t), z);
        score = scale * numbers.beta[j] * inverse_length(OF_Q, t) * warp_sum(score);
      }
      if (lane == 0) in.H[t][j] = score, put_split(in.B, t, j, score);
    }
    if (c < BK) put_four(channels_at(in.Z[0], j, c), times(numbers.beta[j], z));
  }
  makers_sync<BK>();  // E and H are written
#pragma unroll 1
  for (int j = 0; j < CHUNK; ++j) {
    const float4 E = unpack_four(channels_at(in.E, j, task.c));
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) {
      const float4 x = times(in.H[task.first + n][j], E);
      W[n] = {W[n].x + x.x, W[n].y + x.y, W[n].z + x.z, W[n].w + x.w};
    }
  }
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) put_four(task.at(in.W, n), W[n]);
}

// Makes E, qd', ke', the decay, A' and M' of a chunk.
template <class S, class A>
__device__ __forceinline__ void score_tokens(S& s, const A& args, const Ring<S::STAGES>& ring) {
  constexpr int BK = S::BK;
  auto& in = s.stages[ring.stage];
  auto& numbers = s.numbers[ring.stage];
  const Lengths &of_k = numbers.lengths[OF_K], &of_q = numbers.lengths[OF_Q];
  barrier_wait(s.full[ring.stage], ring.parity);
  float4 decays[BLOCK], undecayed_keys[BLOCK];
  const float4 one = {1.f, 1.f, 1.f, 1.f};
  const auto sums = sum_block<BK, PanelTask<BK>>(in.queries, in.keys, in.gates, decays, undecayed_keys);
  sums.each([&](int n, float sum) {
    n -= SQUARES;
    if (n < 0 || n >= 2 * BLOCK) return;
    const int i = BlockTask<BK>().first + n % BLOCK, kind = n / BLOCK;
    numbers.lengths[kind].set(i, sum, args.normalized);
    if (kind == OF_K) numbers.weights[i] = numbers.beta[i] * of_k.power[i] * of_k.power[i];
  });
  __syncwarp();  // lengths and weights of the block's tokens are in shared memory
  *reinterpret_cast<float4*>(&s.block_decays[BlockTask<BK>().block][BlockTask<BK>().c]) =
      times(times(decays[0], decays[1]), times(decays[2], decays[3]));
  const bool growth = barrier_any(1, MAKERS<BK>, grows(decays));  // decays of blocks are in shared memory
  if (threadIdx.x == 0) numbers.grows = growth;
  if (growth) {
    make_by_tokens(s, in, numbers, float(args.scale));
    barrier_arrive(s.scores_ready[ring.stage]);
    return;
  }
  const PanelTask<BK> task;
  clear_block(in.A, task);
  {
    float4 keys[BLOCK], since = one;  // decayed to the block's end; from after token n to it
#pragma unroll
    for (int n = BLOCK - 1; n >= 0; --n) {
      keys[n] = times(since, times(of_k.factor[task.first + n], unpack_four(task.at(in.keys, n))));
      since = times(since, decays[n]);
    }
    const float4 to_end = store_at_borders<false, 1>(s.decayed.columns, s.block_decays, task, 0, keys);
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) put_four(task.at(in.keys_to_end, n), times(to_end, keys[n]));
  }
  __syncwarp();  // keeps the compiler from computing the following first, which takes too many registers
  float4 row[BLOCK], since = one, from_start;  // decayed from the block's start; from there; from the chunk's start
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) {
    since = times(since, decays[n]);
    row[n] = times(since, times(of_k.factor[task.first + n], unpack_four(task.at(in.keys, n))));
    decays[n] = since;
  }
  from_start = store_at_borders<true, 2>(s.decayed.rows, s.block_decays, task, OF_K, row);
#pragma unroll
  for (int n = 0; n < BLOCK; ++n)
    put_four(task.at(in.E, n), times(-of_k.power[task.first + n], times(from_start, row[n])));
  __syncwarp();  // likewise
#pragma unroll
  for (int n = 0; n < BLOCK; ++n)
    row[n] = times(decays[n], times(of_q.factor[task.first + n], unpack_four(task.at(in.queries, n))));
  from_start = store_at_borders<true, 2>(s.decayed.rows, s.block_decays, task, OF_Q, row);
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) put_four(task.at(in.decayed_queries, n), times(from_start, row[n]));
  if (task.block == BT / BLOCK - 1) *reinterpret_cast<float4*>(numbers.decay + task.c) = times(from_start, since);
  __syncwarp();  // zeros of the block's rows of A are in shared memory
  sums.each([&](int n, float sum) {
    if (n >= SQUARES) return;
    const PairOfBlock of(n);
    const int i = task.first + of.i, j = task.first + of.j;
    const float score = numbers.lengths[of.strict ? OF_K : OF_Q].factor[i] * of_k.factor[j] * sum;
    if (of.strict) put_in_block(in.recurrence_matrix, numbers.weights, i, j, -score);
    else put_split(in.A, i, j, score);
  });
  makers_sync<BK>();  // decayed tokens are in shared memory
#pragma unroll 1
  for (int n = threadIdx.x >> 5; n < 8; n += MAKERS<BK> / 32)
    score_borders<BK>(s.decayed.rows, s.decayed.columns, n, [&](int i, int j, float2 key, float2 query) {
      put_split_pair(in.A, i, j, query.x, query.y);
      put_pair_of_border(in.recurrence_matrix, numbers.weights, i, j, {-key.x, -key.y});
    });
  barrier_arrive(s.scores_ready[ring.stage]);
}

// Makes B, Z and W of a chunk, with its inverse: W overwrites qd', Z overwrites ke', B overwrites M'.
template <class S> __device__ __forceinline__ void make_operands(S& s, float scale, const Ring<S::STAGES>& ring) {
  using T = typename S::T;
  constexpr int BK = S::BK;
  auto& in = s.stages[ring.stage];
  const auto& numbers = s.numbers[ring.stage];
  const Lengths &of_k = numbers.lengths[OF_K], &of_q = numbers.lengths[OF_Q];
  const int panel = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4,
            lane = threadIdx.x & 31;
  const int channel_offset = channel_operand_offset(lane, warp);
  barrier_wait(s.inverse_ready[ring.stage], ring.parity);
  if (!numbers.grows) {
    ::Operand tokens;
    Values x;
    load_transposed(tokens, in.keys_to_end[panel], channel_offset);
    wgmma_fence();
    start_split_product<f16>(x, tokens, wgmma_tile(in.N, 16, 1024), false);
    wgmma_commit();
    if (panel == 0) {
      const int row = 16 * (warp & 1), column = 16 * (warp >> 1), i = row + lane / 4;  // of the warp's block of B
      float B[2][4] = {};
      multiply_triangle(B, in.A, in.N, row, column, lane);
      const float factor = scale * numbers.N_scale, factors[2] = {factor * of_q.power[i], factor * of_q.power[i + 8]};
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int j = column + 8 * m + 2 * (lane & 3);
        const float2 power = load_float2(of_k.power + j), beta = load_float2(numbers.beta + j);
#pragma unroll
        for (int n = 0; n < 4; ++n) B[m][n] *= factors[n / 2] * (n % 2 ? power.y * beta.y : power.x * beta.x);
      }
      store_split<T, 1>(in.B, shifted_offset(left_operand_offset(lane), row, column), B);
      fence_async();
    }
    wgmma_wait<0>();
    wgmma_keep(x);
    each_token_pair(x, [&](float* pair, int token) {
      const float2 power = load_float2(of_k.power + token), beta = load_float2(numbers.beta + token);
      pair[0] *= numbers.N_scale * power.x * beta.x, pair[1] *= numbers.N_scale * power.y * beta.y;
    });
    store_transposed(in.Z[0][panel], channel_offset, x);
    load_transposed(tokens, in.decayed_queries[panel], channel_offset);
    each_two([&](int i, int c, int m) {
      const float2 query = unpack(tokens[c][m], f16{});
      x[i] = query.x, x[i + 1] = query.y;
    });
    each_token_pair(x, [&](float* pair, int token) {
      const float2 power = load_float2(of_q.power + token);
      pair[0] *= scale * power.x, pair[1] *= scale * power.y;
    });
    load_transposed(tokens, in.E[panel], channel_offset);
    makers_sync<BK>();  // B is in shared memory
    wgmma_fence();
    start_split_product<T>(x, tokens, wgmma_tile(in.B, 16, 1024), true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_keep(x);
    store_transposed(in.W[panel], channel_offset, x);
  }
  fence_async();
  barrier_arrive(s.operands_ready[ring.stage]);
}

// Inverts for every other chunk from `first` on.
template <class S> __device__ __forceinline__ void invert_chunks(S& s, int tokens, int first) {
  Ring<S::STAGES> ring;
  if (first) ring.next();
#pragma unroll 1
  for (int left = tokens - first * CHUNK; left > 0; left -= 2 * CHUNK) {
    barrier_wait(s.scores_ready[ring.stage], ring.parity);
    auto& numbers = s.numbers[ring.stage];
    if (!numbers.grows) {
      const float N_scale = invert_matrix(s.stages[ring.stage], numbers.weights);
      if (own_lane() == 0) numbers.N_scale = N_scale;
    }
    fence_async();
    barrier_arrive(s.inverse_ready[ring.stage]);
    ring.next(), ring.next();
  }
}

// Loads the betas of each chunk, one ahead of the stages to which they are stored.
template <class S, class A> __device__ __forceinline__ void load_betas(S& s, const A& args, const WorkTile& work) {
  using T = typename S::T;
  const int lane = threadIdx.x & 31;
  const i64 first = work.batch * args.beta.b + work.head * args.beta.h + (work.start + lane) * args.beta.t;
  const auto load = [&](int token) {
    if (token + lane >= work.tokens) return 0.f;
    const i64 index = first + token * args.beta.t;
    return args.wide_beta ? static_cast<const float*>(args.beta.p)[index]
                          : to_float(static_cast<const T*>(args.beta.p)[index]);
  };
  float beta = load(0);
  Ring<S::STAGES> ring;
#pragma unroll 1
  for (int token = 0; token < work.tokens; token += CHUNK, ring.next()) {
    if (token >= S::STAGES * CHUNK) barrier_wait(s.outputs_ready[ring.stage], ring.parity ^ 1);
    s.numbers[ring.stage].beta[lane] = beta;
    barrier_arrive(s.full[ring.stage]);
    beta = load(token + CHUNK);
  }
}

template <typename T, typename G, int BK, int BV>
__global__ void __launch_bounds__(CHANNEL_THREADS<BK, BV>, BLOCKS_OF<BK, BV>)
    delta_sm90_kda_forward(const __grid_constant__ Args<T, G> args) {
  using RoleRegisters = ChannelRegisters<BK, BV>;
  auto& s = *reinterpret_cast<Shared<T, G, BK, BV>*>(dynamic_smem());
  const u32 tiles = u32(args.shape.V + BV - 1) / BV;
  const int column = blockIdx.x % tiles * BV;
  const WorkTile work = work_tile(args.shape, blockIdx.x / tiles);
  if (threadIdx.x == 0) init_stage_barriers(s, 3 * 32);  // lanes that copy q and k, and g, and that load betas
  fence_async();
  __syncthreads();
  if (threadIdx.x < MAKERS<BK>) {
    if constexpr (RoleRegisters::MAKER < RoleRegisters::AT_FIRST) registers_down<RoleRegisters::MAKER>();
    make_chunks(s, args, work.tokens);
  } else if (threadIdx.x < MAKERS<BK> + CONSUMERS<BV>) {
    registers_up<RoleRegisters::CONSUMER>();
    consume(s, args, work, column);
  } else {
    registers_down<RoleRegisters::OTHER>();
    const int warp = threadIdx.x / 32 % 4;
    if (warp == 0) {
      WorkTile keys = work;
      keys.head /= int(args.group);
      copy_chunks(s, args, work, column, [&](auto& in, Barrier& full, int token) {
        fetch_chunk(full, keys, token, [&](auto f) {
          f(in.queries, args.q, args.q_rows, args.shape.K), f(in.keys, args.k, args.k_rows, args.shape.K);
        });
        fetch_chunk(full, work, token, [&](auto f) { f(in.gates, args.g, args.g_rows, args.shape.K); });
      });
    } else if (warp == 3) {
      load_betas(s, args, work);
    } else {
      invert_chunks(s, work.tokens, warp - 1);
    }
  }
}
