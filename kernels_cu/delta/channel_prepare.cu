// what      The delta rule with a gate for every channel (Kimi Delta Attention): what each chunk of 32 tokens does to a
//           state, for the kernels that walk over states; GRADIENT: for those that walk in both directions.
// math      kd, qd: k and q decayed from the chunk's start; ke: k decayed to its end; M = D_ij k_i . k_j below the
//           diagonal, A = D_ij q_i . k_j up to it: channel_chunk.cuh.
//           N = (I + diag(beta) M)^-1, B = A N diag(beta);   E = -kd, W = w_scale (qd - B kd), Z = diag(beta) N^T ke
//           GRADIENT: B and Z without beta, residuals by I - M N diag(beta)
//           Keys are p k', queries r q', p and r powers of 2. So with M' and A' of k' and q', N' = (I + diag(beta p^2)
//           M')^-1 and ke' of k':   B = diag(r) A' N' diag(p beta), Z = diag(beta p) N'^T ke', M N = diag(p) M' N'
//           diag(p)
// shapes    q k [B, H, T, K], g [B, HV, T, K], beta [B, HV, T]; prepared [B, HV, NC]
// grid      a block for every (batch, head of values, chunk), chunks fastest
// smem      Shared: a chunk's inputs, its matrices
// barriers  six: inputs have arrived | decays over blocks | decayed tokens | M' and A' | N' and qd | B. Each: these are
//           in shared memory
// numerics  M' and N' in float32, for products as the sum of two float16, as A'; E, W, Z in T, B as the sum of two T;
//           decays: channel_chunk.cuh
// source    Kimi Team, 2025 (2510.26692), eq. 1; Yang et al., 2024 (2412.06464), section 3.3
// limits    T of bfloat16, float16; K <= BK; BK of 64, 128
#include "cards.cuh"
#include "delta/channel_chunk.cuh"
#include "delta/prepared.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k;
  Rows<const G> g, beta;  // a token's beta is a row of one number
  void* prepared;         // Prepared, or PreparedForGradients, of each chunk
  Shape shape;            // its H are the heads of values
  i64 group;              // so many of them share a head of queries and keys
  double w_scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 bytes;       // 16, 8, 4 or 2: all rows of q, k and g start on multiples of it, and are multiples long
};

enum Kind { OF_K, OF_Q };

template <typename T, typename G, int BK> struct alignas(16) Shared {
  union {
    T k[C * BK];
    T E[C * BK];
  };
  union {
    T q[C * BK];
    f16 ke[C * BK];
    T Z[C * BK];
    T W[C * BK];
  };
  union {
    G g[C * BK];
    Matrix<f16> A;
  };
  union {
    struct {
      f16 rows[LEVELS][C * BK], keys[LEVELS][C / 2 * BK];
    };
    struct {
      float from_start[C][BK + 8];  // q' decayed from the chunk's start
      Matrix<T> B;
    };
  };
  union {
    float over[BLOCKS][BK];  // decays over blocks
    Matrix<f16> turned_N;    // the transpose of N'
  };
  float M[C][LD];
  Lengths lengths[2];
  float beta[C], weight[C];  // weight: -beta p^2
};

// Sums of a block: scores of queries, then keys, as PairOfBlock has them; squares of keys, then queries. Keeps decays
// and keys as they came.
constexpr int SQUARES = PAIRS_OF_BOTH, SUMS = SQUARES + 2 * BLOCK;

template <int BK, typename T, typename G>
__device__ __forceinline__ SumsOfLanes<BK, SUMS> sum_block(const T* q, const T* k, const G* g, float4 (&decays)[BLOCK],
                                                           float4 (&keys)[BLOCK]) {
  const BlockTask<BK> task;
  float sums[SumsOfLanes<BK, SUMS>::EACH * task.LANES] = {};
  float4 decayed[BLOCK];  // keys, to the present row
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) {
    const float4 query = unpack_four(task.at(q, i)), key = keys[i] = unpack_four(task.at(k, i));
    decays[i] = decays_at(task.at(g, i));
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      decayed[j] = j == i ? key : times(decayed[j], decays[i]);
      add_product(sums[PairOfBlock::with_self(i, j)], query, decayed[j]);
      if (j < i) add_product(sums[PairOfBlock::before(i, j)], key, decayed[j]);
    }
    add_product(sums[SQUARES + BLOCK * OF_K + i], key, key),
        add_product(sums[SQUARES + BLOCK * OF_Q + i], query, query);
  }
  return sums;
}

template <typename T, typename G, int BK, bool GRADIENT>
__global__ void __launch_bounds__(2 * BK, blocks_with_room<Shared<T, G, BK>>(384 / BK))
    delta_channel_prepare(const Args<T, G> args) {
  constexpr int THREADS = 2 * BK;
  auto& s = *reinterpret_cast<Shared<T, G, BK>*>(dynamic_smem());
  const ChunkOfBlock of_block(args.shape);
  const u32 head = of_block.h / u32(args.group);
  const int channels = int(args.shape.K), bytes = int(args.bytes);
  using Image = typename ImageOf<T, BK, false, GRADIENT>::Type;
  Image& to = static_cast<Image*>(args.prepared)[of_block.index];
  const Lengths &of_k = s.lengths[OF_K], &of_q = s.lengths[OF_Q];

  const auto inputs = [&](auto copy) {
    copy(s.k, args.k, head), copy(s.q, args.q, head), copy(s.g, args.g, of_block.h);
  };
  if (bytes == 16)
    inputs([&](auto* tile, const auto& from, u32 of) {
      copy_pieces<BK, THREADS>(tile, of_block.row(from, of), from.t, of_block.rows, channels);
    });
  else
    inputs([&](auto* tile, const auto& from, u32 of) {
      copy_numbers<BK, THREADS>(tile, of_block.row(from, of), from.t, of_block.rows, channels);
    });
  cp_async_commit();
  if (threadIdx.x < C) {
    const int i = threadIdx.x;
    s.beta[i] = i < of_block.rows ? to_float(of_block.row(args.beta, of_block.h)[i * args.beta.t]) : 0.f;
    if constexpr (GRADIENT) to.beta[i] = s.beta[i];
  }
  cp_async_wait<0>();
  __syncthreads();  // inputs have arrived

  const BlockTask<BK> task;
  float4 decays[BLOCK], keys[BLOCK];
  const auto sums = sum_block<BK>(s.q, s.k, s.g, decays, keys);
  sums.each([&](int n, float sum) {
    n -= SQUARES;
    if (n >= 0 && n < 2 * BLOCK) s.lengths[n / BLOCK].set(task.first + n % BLOCK, sum, args.normalized);
  });
  __syncwarp();                           // lengths of the block's tokens are in shared memory
  float4 queries[BLOCK], earlier[BLOCK];  // as keys from here on, decayed from the block's start; keys to its end
  {
    float4 since = {1.f, 1.f, 1.f, 1.f};
#pragma unroll
    for (int n = BLOCK - 1; n >= 0; --n) {
      keys[n] = times(of_k.factor[task.first + n], keys[n]);
      earlier[n] = times(since, keys[n]), since = times(since, decays[n]);
    }
    since = {1.f, 1.f, 1.f, 1.f};
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) {
      since = times(since, decays[n]), keys[n] = times(since, keys[n]);
      const float4 query = unpack_four(task.at(s.q, n));
      queries[n] = times(since, times(of_q.factor[task.first + n], query));
    }
    *reinterpret_cast<float4*>(&s.over[task.block][task.c]) = since;
  }
  __syncthreads();  // decays over blocks are in shared memory; inputs have been read, and may be overwritten

  clear_rows(s.A, task);
  float4 before, behind;
  each_border<BK>(
      s.over, task, before, behind,
      [&](int level, float4 by) {
        put_level<2>(s.rows[level], level, OF_K, task, keys, by);
        put_level<2>(s.rows[level], level, OF_Q, task, queries, by);
      },
      [&](int level, float4 by) { put_level<1>(s.keys[level], level, 0, task, earlier, by); });
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) {
    const int i = task.first + n;
    const float4 key = times(-of_k.power[i], times(before, keys[n]));
    put_four(task.at(s.E, n), key), put_four(task.at(to.E, n), key);
    put_four(task.at(s.ke, n), times(behind, earlier[n]));
    queries[n] = times(before, queries[n]);
  }
  if (task.block == BLOCKS - 1)
    *reinterpret_cast<float4*>(to.whole + task.c) = times(before, unpack_four(&s.over[task.block][task.c]));
  __syncwarp();  // zeros of the block's rows of A are in shared memory
  sums.each([&](int n, float sum) {
    if (n >= SQUARES) return;
    const PairOfBlock of(n);
    const int i = task.first + of.i, j = task.first + of.j;
    const float score = s.lengths[of.apart ? OF_K : OF_Q].factor[i] * of_k.factor[j] * sum;
    if (of.apart) s.M[i][j] = score;
    else put_one(s.A.at(i, j), score);
  });
  __syncthreads();  // decayed queries and keys are in shared memory

#pragma unroll 1
  for (int n = threadIdx.x >> 5; n < 8; n += THREADS / 32)
    score_borders<BK>(s.rows, s.keys, n, [&](int i, int j, float2 key, float2 query) {
      put_two(s.A.at(i, j), query.x, query.y);
      *reinterpret_cast<float2*>(&s.M[i][j]) = key;
    });
  __syncthreads();  // M' and A' are in shared memory; their operands have been read, and qd may overwrite them
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) *reinterpret_cast<float4*>(&s.from_start[task.first + n][task.c]) = queries[n];
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    s.weight[lane] = -s.beta[lane] * of_k.power[lane] * of_k.power[lane];
    __syncwarp();  // weights are in shared memory
    float x[C];
#pragma unroll
    for (int i = 0; i < C; ++i) x[i] = i == lane;
    solve_column(x, s.M, s.weight);
    put_column(s.turned_N, x);
  }
  __syncthreads();  // N' and qd are in shared memory

  const auto with_powers = [&](int j, float by, float2 x) {
    return float2{by * of_k.power[j] * x.x, by * of_k.power[j + 1] * x.y};
  };
  multiply_triangles<THREADS>(
      s.A,
      [&](int i, int j, const float2(&sum)[1]) {
        const float2 x = with_powers(j, of_q.power[i], sum[0]);
        put_two(s.B.at(i, j), s.beta[j] * x.x, s.beta[j + 1] * x.y);
        if constexpr (GRADIENT) put_two(to.B[0].at(i, j), x.x, x.y);
      },
      s.turned_N);
  if constexpr (GRADIENT)
    multiply_triangles<THREADS>(
        s.M,
        [&](int i, int j, const float2(&sum)[1]) {
          const float2 x = with_powers(j, of_k.power[i], sum[0]);
          put_two(to.of_residual[0].at(i, j), float(i == j) - s.beta[j] * x.x, float(i == j + 1) - s.beta[j + 1] * x.y);
        },
        s.turned_N);
  const int channel = int(threadIdx.x) / 32 * 16;
  Columns sum = {};
#pragma unroll
  for (int m = 0; m < C / 16; ++m) multiply_tokens<UPPER, BK>(sum[m], s.turned_N, s.ke, 16 * m, channel);
  __syncwarp();  // all lanes have read these channels of ke
  each_pair([&](int i, int c, int m, int across, int down) {
    const float by = GRADIENT ? of_k.power[i] : s.beta[i] * of_k.power[i], *two = sum[m][across] + 2 * down;
    put_pair(place<BK>(s.Z, i, c), {by * two[0], by * two[1]});
    sum[m][across][2 * down] = sum[m][across][2 * down + 1] = 0.f;
  });
  store_channels<BK>(to.Z[0], s.Z);
  __syncthreads();  // B is in shared memory
#pragma unroll
  for (int m = 0; m < C / 16; ++m) multiply_tokens<LOWER, BK>(sum[m], s.B, s.E, 16 * m, channel);
  const float scale = float(args.w_scale);
  each_pair([&](int i, int c, int m, int across, int down) {
    const float2 query = *reinterpret_cast<const float2*>(&s.from_start[i][c]);
    const float by = scale * of_q.power[i], *two = sum[m][across] + 2 * down;
    put_pair(place<BK>(s.W, i, c), {fmaf(by, query.x, scale * two[0]), fmaf(by, query.y, scale * two[1])});
  });
  store_channels<BK>(to.W, s.W);
  if constexpr (GRADIENT) clear_padding<THREADS>(to.B[0]), clear_padding<THREADS>(to.of_residual[0]);
  else store_pieces<THREADS>(to.B.x, s.B.x);
}
