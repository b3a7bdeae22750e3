// what      RWKV-7's forward pass on Hopper, a delta rule that erases by vectors a and b of its own; chunks of 32
//           tokens
// math      S_t = diag(e^g_t) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T;  o_t = scale S_t^T q_t.  For a chunk, S is
//           the state before it. Decayed tokens: kd_i is a_i decayed from the chunk's start through token i - 1, qd_i
//           is q_i decayed from the start through i; ke, be are k and b decayed to the chunk's end. Scores: Axy_ij =
//           x_i . y_j times the decay between both tokens, x = q or a, y = k or b; of q with its own gate, j <= i; of a
//           without it, j < i.  N = (I - Aab)^-1, L = N Aak, H = scale Aqb N, B = scale (Aqk + Aqb L)
//           E = kd, W = scale qd + H E, Zb = N^T be, Zk = ke + L^T be
//           Y = E S;  o = W S + B V;  S <- D S + Zb^T Y + Zk^T V, D the decay of the chunk
//           Each token x is stored as x' = x / p_x, p_x a power of 2. Primed matrices are those of primed tokens:
//           with P = diag(p_a p_b), N' = (I - P Aab')^-1 and L' = N' P Aak':   H = scale diag(p_q) Aqb' N' diag(p_b),
//           B = scale diag(p_q) (Aqk' + Aqb' L') diag(p_k), Zb = diag(p_b) N'^T be', Zk = diag(p_k) (ke' + L'^T be')
// shapes    q k a b g [B, H, T, K], v o [B, H, T, V] of any strides; states [N, H, K, V] float32
// grid      a block for every (sequence, head, BV columns of V), columns fastest, sequence slowest
// roles     makers: 4 channels of 4 tokens a thread; decayed tokens and scores of chunk n + 1, then H, B, Z and W of
//           chunk n. Consumers: a warpgroup for every 64 columns, with their state transposed in registers. In a last
//           warpgroup warp 0 copies chunks, and warps 1 and 2 compute N and L of even and odd chunks
// smem      dplr_forward_storage.cuh, which names the barriers, too. In the code q and a are "rows", k and b "columns",
//           after their place in Axy
// barriers  named 1, of the makers: decays of blocks | decayed rows and k | scores with k | decayed b | H and B are in
//           registers | H and B. Each: these are in shared memory, and what they overwrite has been read
// numerics  products of T are summed in float32. S, E, W, Z, V and Y are rounded to T, decayed tokens to float16. Axy',
//           N' and L' are the sum of two float16 each ("split"), Aqk' is float32, H and B are split in two T. N: by
//           substitution in float32 within 16 tokens. Decays: channel_chunk.cuh; chunks that grow: as
//           growing_chunk.cuh, token by token
// source    Peng et al., 2025 (2503.14456), eq. 17; Yang et al., 2024 (2406.06484), section 3
// limits    sm_90a; bfloat16, float16; K <= BK, V a multiple of 8; BK and BV of 64, 128; rows start on 16 bytes
#include "delta/sm90/dplr_forward_storage.cuh"
#include "delta/growing_chunk.cuh"

enum Kind { OF_Q, OF_A, WITH_K, WITH_B };  // rows of scores, and columns

// Sums of a block, of its rows with one kind of columns: scores numbered by PairOfBlock (j <= i: of q, strict: of a);
// then squares of the columns, and of `squared`, q or a. Sets `decays` to the block's.
constexpr int SQUARES = PAIRS_OF_BOTH, SUMS = SQUARES + 2 * BLOCK;

template <int BK, class Tile, class Gates>
__device__ __forceinline__ SumsOfLanes<BK, SUMS> sum_block(Tile* q, Tile* a, Tile* columns, Tile* squared, Gates* g,
                                                           float4 (&decays)[BLOCK]) {
  const PanelTask<BK> task;
  float sums[SumsOfLanes<BK, SUMS>::EACH * task.LANES] = {};
  float4 decayed[BLOCK];  // columns of the block, decayed to token i
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) {
    const float4 query = unpack_four(task.at(q, i)), reader = unpack_four(task.at(a, i));
    decays[i] = decays_at(task.at(g, i));
    const float4 own = decayed[i] = unpack_four(task.at(columns, i)), other = unpack_four(task.at(squared, i));
    add_product(sums[SQUARES + i], own, own), add_product(sums[SQUARES + BLOCK + i], other, other);
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      if (j < i) {
        add_product(sums[PairOfBlock::before(i, j)], reader, decayed[j]);
        decayed[j] = times(decayed[j], decays[i]);
      }
      add_product(sums[PairOfBlock::with_self(i, j)], query, decayed[j]);
    }
  }
  return sums;
}

// Makes E, W, Z, B and the decay of a chunk token by token, as prepare_by_tokens in growing_chunk.cuh does.
template <class S, class Numbers>
__device__ __forceinline__ void make_by_tokens(S& s, typename S::StageType& in, Numbers& numbers, float scale) {
  constexpr int BK = S::BK;
  auto& [queries, a, k, b] = s.decayed.inputs;
  copy_tile<BK>(queries, in.queries), copy_tile<BK>(a, in.a);
  copy_tile<BK>(k, in.columns[0]), copy_tile<BK>(b, in.columns[1]);
  makers_sync<BK>();  // the copies stand; the stage but for its gates may be overwritten
  const PanelTask<BK> task;
  float4 since = {1.f, 1.f, 1.f, 1.f}, W[BLOCK];
#pragma unroll 1
  for (int t = 0; t < task.first; ++t) since = times(since, decays_at(channels_at(in.gates, t, task.c)));
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) {
    put_four(task.at(in.E, n), times(since, unpack_four(task.at(a, n))));
    since = times(since, decays_at(task.at(in.gates, n)));
    W[n] = times(scale, times(since, unpack_four(task.at(queries, n))));
  }
  if (task.block == BT / BLOCK - 1) *reinterpret_cast<float4*>(numbers.decay + task.c) = since;
  const int lane = own_lane(), c = 4 * lane;
#pragma unroll 1
  for (int row = threadIdx.x >> 5; row < 2 * CHUNK; row += MAKERS<BK> / 32) {
    const auto four = [&](auto& tile, int t) { return c < BK ? unpack_four(channels_at(tile, t, c)) : float4{}; };
    const int j = row % CHUNK, kind = row / CHUNK;
    float4 z = four(kind ? b : k, j);  // what is left of what token j wrote along k, or along b
#pragma unroll 1
    for (int t = 0; t < CHUNK; ++t) {
      float score = 0.f;
      if (t > j) {
        const float4 gates = four(in.gates, t);
        float found = 0.f;
        add_product(found, four(a, t), z);
        z = times(decays_at(&gates.x), z);
        const float4 change = times(warp_sum(found), four(b, t));
        z = {z.x + change.x, z.y + change.y, z.z + change.z, z.w + change.w};
      }
      if (t >= j) {
        add_product(score, four(queries, t), z);
        score = scale * warp_sum(score);
      }
      if (lane) continue;
      if (kind) in.H_by_token[t][j] = score;
      else put_split(in.B, t, j, score);
    }
    if (c < BK) put_four(channels_at(in.Z[kind], j, c), z);
  }
  makers_sync<BK>();  // E and H are written
#pragma unroll 1
  for (int j = 0; j < CHUNK; ++j) {
    const float4 E = unpack_four(channels_at(in.E, j, task.c));
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) {
      const float4 x = times(in.H_by_token[task.first + n][j], E);
      W[n] = {W[n].x + x.x, W[n].y + x.y, W[n].z + x.z, W[n].w + x.w};
    }
  }
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) put_four(task.at(in.W, n), W[n]);
}

// Makes E, qd', ke', be', the decay and the scores of a chunk.
template <class S, class A>
__device__ __forceinline__ void score_tokens(S& s, const A& args, const Ring<S::STAGES>& ring) {
  constexpr int BK = S::BK;
  using Sums = SumsOfLanes<BK, SUMS>;
  auto& in = s.stages[ring.stage];
  auto& numbers = s.numbers[ring.stage];
  const PanelTask<BK> task;
  const float4 one = {1.f, 1.f, 1.f, 1.f};
  float4 decays[BLOCK];
  barrier_wait(s.full[ring.stage], ring.parity);
  const Sums with_k = sum_block<BK>(in.queries, in.a, in.columns[0], in.queries, in.gates, decays);
  __syncwarp();  // keeps the compiler from computing both sums at a time, which takes too many registers
  const Sums with_b = sum_block<BK>(in.queries, in.a, in.columns[1], in.a, in.gates, decays);
  const auto set_lengths = [&](const Sums& sums, int row, int column) {
    sums.each([&](int n, float sum) {
      n -= SQUARES;
      if (n >= 0 && n < 2 * BLOCK) numbers.lengths[n < BLOCK ? column : row].set(task.first + n % BLOCK, sum, false);
    });
  };
  set_lengths(with_k, OF_Q, WITH_K), set_lengths(with_b, OF_A, WITH_B);
  __syncwarp();  // lengths of the block's tokens are in shared memory
  if (task.lane < BLOCK) {
    const int i = task.first + task.lane;
    numbers.weights[i] = numbers.lengths[OF_A].power[i] * numbers.lengths[WITH_B].power[i];
  }
  *reinterpret_cast<float4*>(&s.block_decays[task.block][task.c]) =
      times(times(decays[0], decays[1]), times(decays[2], decays[3]));
  const bool growth = barrier_any(1, MAKERS<BK>, grows(decays));  // decays of blocks are in shared memory
  if (threadIdx.x == 0) numbers.grows = growth;
  if (growth) {
    make_by_tokens(s, in, numbers, float(args.scale));
    barrier_arrive(s.scores_ready[ring.stage]);
    return;
  }
  clear_block(in.QB, task), clear_block(in.AK, task);
  const float weights_factor = reciprocal(weights_scale(numbers.weights));
  const auto store_columns = [&](int kind) {
    const auto& lengths = numbers.lengths[WITH_K + kind];
    float4 x[BLOCK], since = one;  // decayed to the block's end; from after token n to it
#pragma unroll
    for (int n = BLOCK - 1; n >= 0; --n) {
      const float4 column = unpack_four(task.at(in.columns[kind], n));
      x[n] = times(since, times(lengths.factor[task.first + n], column));
      since = times(since, decays[n]);
    }
    const float4 to_end = store_at_borders<false, 1>(s.decayed.columns, s.block_decays, task, 0, x);
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) put_four(task.at(in.to_end[kind], n), times(to_end, x[n]));
  };
  // Stores a block's own scores with columns of a kind.
  const auto store_own = [&](const Sums& sums, int kind) {
    sums.each([&](int n, float sum) {
      if (n >= SQUARES) return;
      const PairOfBlock of(n);
      const int i = task.first + of.i, j = task.first + of.j;
      const float x =
          numbers.lengths[of.strict ? OF_A : OF_Q].factor[i] * numbers.lengths[WITH_K + kind].factor[j] * sum;
      if (kind && of.strict) put_in_block(in.recurrence_matrix, numbers.weights, i, j, x);
      else if (kind) put_split(in.QB, i, j, x);
      else if (of.strict) put_split(in.AK, i, j, weights_factor * numbers.weights[i] * x);
      else *element(in.QK, i, j) = x;
    });
  };
  const auto score = [&](auto f) {
#pragma unroll 1
    for (int n = threadIdx.x >> 5; n < 8; n += MAKERS<BK> / 32)
      score_borders<BK>(s.decayed.rows, s.decayed.columns, n, f);
  };
  {
    const Lengths &of_a = numbers.lengths[OF_A], &of_q = numbers.lengths[OF_Q];
    float4 row[BLOCK], since = one, from_start;  // decayed from the block's start; from there; from the chunk's start
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) {
      row[n] = times(since, times(of_a.factor[task.first + n], unpack_four(task.at(in.a, n))));
      since = times(since, decays[n]);
    }
    from_start = store_at_borders<true, 2>(s.decayed.rows, s.block_decays, task, OF_A, row);
#pragma unroll
    for (int n = 0; n < BLOCK; ++n)
      put_four(task.at(in.E, n), times(of_a.power[task.first + n], times(from_start, row[n])));
    __syncwarp();  // keeps the compiler from computing the following first, which takes too many registers
    since = one;
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) {
      since = times(since, decays[n]);
      row[n] = times(since, times(of_q.factor[task.first + n], unpack_four(task.at(in.queries, n))));
    }
    from_start = store_at_borders<true, 2>(s.decayed.rows, s.block_decays, task, OF_Q, row);
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) put_four(task.at(in.decayed_queries, n), times(from_start, row[n]));
    if (task.block == BT / BLOCK - 1) *reinterpret_cast<float4*>(numbers.decay + task.c) = times(from_start, since);
  }
  store_columns(0);
  __syncwarp();  // zeros of the block's rows are in shared memory
  store_own(with_k, 0);
  makers_sync<BK>();  // decayed rows and k are in shared memory
  score([&](int i, int j, float2 of_q, float2 of_a) {
    *reinterpret_cast<float2*>(element(in.QK, i, j)) = of_q;
    const float weight = weights_factor * numbers.weights[i];
    put_split_pair(in.AK, i, j, weight * of_a.x, weight * of_a.y);
  });
  makers_sync<BK>();  // decayed k has been read
  store_columns(1);
  store_own(with_b, 1);
  makers_sync<BK>();  // decayed b is in shared memory
  score([&](int i, int j, float2 of_q, float2 of_a) {
    put_split_pair(in.QB, i, j, of_q.x, of_q.y);
    put_pair_of_border(in.recurrence_matrix, numbers.weights, i, j, of_a);
  });
  barrier_arrive(s.scores_ready[ring.stage]);
}

// Makes H, B, Z and W of a chunk, with its inverse: W overwrites qd', Z overwrites ke' and be', H Aqb', and B Aab'.
template <class S> __device__ __forceinline__ void make_operands(S& s, float scale, const Ring<S::STAGES>& ring) {
  using T = typename S::T;
  constexpr int BK = S::BK;
  auto& in = s.stages[ring.stage];
  const auto& numbers = s.numbers[ring.stage];
  const int panel = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4,
            lane = threadIdx.x & 31;
  const int channel_offset = channel_operand_offset(lane, warp);
  const auto power = [&](int kind, int token) { return load_float2(numbers.lengths[kind].power + token); };
  barrier_wait(s.inverse_ready[ring.stage], ring.parity);
  if (!numbers.grows) {
    ::Operand tokens;
    Values x;
    load_transposed(tokens, in.to_end[1][panel], channel_offset);
    wgmma_fence();
    start_split_product<f16>(x, tokens, wgmma_tile(in.L, 16, 1024), false);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_keep(x);
    {
      ::Operand keys;
      load_transposed(keys, in.to_end[0][panel], channel_offset);
      each_two([&](int i, int c, int m) {
        const float2 key = unpack(keys[c][m], f16{});
        x[i] = fmaf(numbers.L_scale, x[i], key.x), x[i + 1] = fmaf(numbers.L_scale, x[i + 1], key.y);
      });
    }
    each_token_pair(x, [&](float* pair, int token) {
      const float2 factors = power(WITH_K, token);
      pair[0] *= factors.x, pair[1] *= factors.y;
    });
    store_transposed(in.Z[0][panel], channel_offset, x);
    wgmma_fence();
    start_split_product<f16>(x, tokens, wgmma_tile(in.N, 16, 1024), false);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_keep(x);
    each_token_pair(x, [&](float* pair, int token) {
      const float2 factors = power(WITH_B, token);
      pair[0] *= numbers.N_scale * factors.x, pair[1] *= numbers.N_scale * factors.y;
    });
    store_transposed(in.Z[1][panel], channel_offset, x);
    const int row = 16 * (warp & 1), column = 16 * (warp >> 1), i = row + lane / 4;  // of the warp's block of B and H
    float B[2][4] = {}, H[2][4] = {};
    if (panel == 0) {
      multiply_triangle(B, in.QB, in.L, row, column, lane);
      multiply_triangle(H, in.QB, in.N, row, column, lane);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int first = column + 8 * m + 2 * (lane & 3);
        const float2 of_k = power(WITH_K, first), of_b = power(WITH_B, first);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int r = i + n / 2 * 8, j = first + n % 2;
          const float QK = j <= r ? *element(in.QK, r, j) : 0.f, factor = scale * numbers.lengths[OF_Q].power[r];
          B[m][n] = factor * (n % 2 ? of_k.y : of_k.x) * fmaf(numbers.L_scale, B[m][n], QK);
          H[m][n] *= factor * (n % 2 ? of_b.y : of_b.x) * numbers.N_scale;
        }
      }
    }
    makers_sync<BK>();  // Aqk and Aqb have been read
    if (panel == 0) {
      const int offset = shifted_offset(left_operand_offset(lane), row, column);
      store_split<T, 1>(in.B, offset, B), store_split<T, 1>(in.H, offset, H);
      fence_async();
    }
    load_transposed(tokens, in.decayed_queries[panel], channel_offset);
    each_two([&](int i, int c, int m) {
      const float2 query = unpack(tokens[c][m], f16{});
      x[i] = query.x, x[i + 1] = query.y;
    });
    each_token_pair(x, [&](float* pair, int token) {
      const float2 factors = power(OF_Q, token);
      pair[0] *= scale * factors.x, pair[1] *= scale * factors.y;
    });
    load_transposed(tokens, in.E[panel], channel_offset);
    makers_sync<BK>();  // H and B are in shared memory
    wgmma_fence();
    start_split_product<T>(x, tokens, wgmma_tile(in.H, 16, 1024), true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_keep(x);
    store_transposed(in.W[panel], channel_offset, x);
  }
  fence_async();
  barrier_arrive(s.operands_ready[ring.stage]);
}

// Overwrites diag(weights) Aak' with L' transposed = Aak'^T diag(weights) N'^T, whose block (1, 0) is 0. in.N has N'
// transposed.
template <class Stage> __device__ __forceinline__ void multiply_inverse(Stage& in) {
  // Computes and stores the block at (j, i) of L transposed: the sum of the blocks (j, l) of Aak^T times (l, i) of N^T,
  // j <= l <= i.
  const auto make_block = [&](int j, int i) {
    const int left_offset = left_operand_offset(own_lane()), transposed_offset = channel_operand_offset(own_lane(), 0);
    float y[2][4] = {};
#pragma unroll
    for (int l = j; l <= i; ++l) {
      u32 left[2][4], right[2][4];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        ldmatrix_x4_trans(left[part], at_offset(in.AK, shifted_offset(transposed_offset, 16 * l, 16 * j + 32 * part)));
        ldmatrix_x4_trans(right[part], at_offset(in.N, shifted_offset(left_offset, 16 * l, 16 * i + 32 * part)));
      }
      multiply_split<f16>(y, left, right);
    }
    __syncwarp();  // all lanes have read the block of Aak that is overwritten
    store_split<f16, 1>(in.L, shifted_offset(left_offset, 16 * j, 16 * i), y);
  };
  make_block(1, 1), make_block(0, 1), make_block(0, 0);  // each overwrites what the following do not read
  const float zeros[2][4] = {};
  __syncwarp();  // all lanes have read Aak
  store_split<f16, 1>(in.L, shifted_offset(left_operand_offset(own_lane()), 16, 0), zeros);
}

// Computes N and L of every other chunk from `first` on.
template <class S> __device__ __forceinline__ void invert_chunks(S& s, int tokens, int first) {
  Ring<S::STAGES> ring;
  if (first) ring.next();
#pragma unroll 1
  for (int left = tokens - first * CHUNK; left > 0; left -= 2 * CHUNK) {
    barrier_wait(s.scores_ready[ring.stage], ring.parity);
    auto& numbers = s.numbers[ring.stage];
    if (!numbers.grows) {
      const float N_scale = invert_matrix(s.stages[ring.stage], numbers.weights);
      const float L_scale = N_scale * weights_scale(numbers.weights);
      if (own_lane() == 0) numbers.N_scale = N_scale, numbers.L_scale = L_scale;
      __syncwarp();  // N is in shared memory
      multiply_inverse(s.stages[ring.stage]);
    }
    fence_async();
    barrier_arrive(s.inverse_ready[ring.stage]);
    ring.next(), ring.next();
  }
}

template <typename T, typename G, int BK, int BV>
__global__ void __launch_bounds__(CHANNEL_THREADS<BK, BV>, BLOCKS_OF<BK, BV>)
    delta_sm90_dplr_forward(const __grid_constant__ Args<T, G> args) {
  using RoleRegisters = ChannelRegisters<BK, BV>;
  auto& s = *reinterpret_cast<Shared<T, G, BK, BV>*>(dynamic_smem());
  const u32 tiles = u32(args.shape.V + BV - 1) / BV;
  const int column = blockIdx.x % tiles * BV;
  const WorkTile work = work_tile(args.shape, blockIdx.x / tiles);
  if (threadIdx.x == 0) init_stage_barriers(s, 32);  // lanes that copy inputs
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
    if (warp == 0)
      copy_chunks(s, args, work, column, [&](auto& in, Barrier& full, int token) {
        fetch_chunk(full, work, token, [&](auto f) {
          f(in.queries, args.q, args.q_rows, args.shape.K), f(in.a, args.a, args.a_rows, args.shape.K);
          f(in.columns[0], args.k, args.k_rows, args.shape.K), f(in.columns[1], args.b, args.b_rows, args.shape.K);
          f(in.gates, args.g, args.g_rows, args.shape.K);
        });
      });
    else if (warp < 3) invert_chunks(s, work.tokens, warp - 1);
  }
}
