// what      RWKV-7's recurrence, a delta rule that erases by vectors a and b of its own: prepares each chunk of 32
//           tokens, that is, computes what the chunk does to a state, for the kernels that walk over states. GRADIENT:
//           for those that walk in both directions. LOGITS: in prompts of RWKV-7 models, where k, a, b and g are at
//           first products of the time mix, of which rwkv7/chunk_keys.cuh makes the recurrence's arrays and values.
// math      A token's decay is e^g of its log gates g [K]. Decayed tokens: ad_i is a_i decayed from the chunk's start
//           through token i - 1, qd_i is q_i decayed from the start through i; ke, be are k and b decayed to the
//           chunk's end. Scores: Axy_ij = x_i . y_j times the decay between both tokens, x = q or a, y = k or b; of q
//           with its own gate, j <= i; of a without it, j < i.
//           N = (I - Aab)^-1, L = N Aak, H = Aqb N, B = Aqk + Aqb L;   E = ad, W = w_scale (qd + H ad), Zb = N^T be,
//           Zk = ke + L^T be
//           A walk reads Y = E S from the state S, writes S <- decay S + Zb^T Y + Zk^T v, and o = W S + w_scale B v. It
//           finds Zk and Zb as Z[0] and Z[1], N and L as residual_matrix[0] (R in prepared.cuh) and [1]
//           Each token x is stored as x' = x / p_x, p_x a power of 2. Primed matrices are those of primed tokens:
//           with P = diag(p_a p_b), N' = (I - P Aab')^-1 and L' = N' P Aak':   H = diag(p_q) Aqb' N' diag(p_b),
//           B = diag(p_q) (Aqk' + Aqb' L') diag(p_k), Zb = diag(p_b) N'^T be', Zk = diag(p_k) (ke' + L'^T be'),
//           N = diag(1 / p_b) N' diag(p_b), L = diag(1 / p_b) L' diag(p_k)
// shapes    q k a b g [B, H, T, K], prepared [B, H, NC], NC the chunks of a batch row. A thread decays 4 channels of a
//           block of 4 tokens (BlockTask). Of 8 x 8 numbers of a product a lane has row lane / 4, columns 2 (lane % 4)
//           and the next
// grid      a block for every (batch, head, chunk), chunks fastest
// smem      Shared: a chunk's inputs, its matrices. In the code q and a are "rows", k and b "columns", after their
//           place in Axy
// barriers  eight of the block, by number; behind each these are in shared memory, and their operands may be
//           overwritten:
//             1 inputs   2 decays of blocks (all threads also agree whether a gate grows)   3 decayed rows and k
//             4 scores with k   5 decayed b   6 scores with b   7 N', L', qd, ke and be   8 H and B
//           A named one, between 6 and 7, of the two warps that make L' and N': the lower right 16 x 16 block of N',
//           which the second one has computed and both multiply by, is in shared memory. One more of the block in
//           prepare_by_tokens, in place of 3 to 8, and one in set_lengths if BK is 256
// numerics  scores, N' and L' in float32. For 16-bit data each number of them is, as an operand, the sum of two float16
//           numbers, and each number of H and B the sum of two T; E, W, Z in T. Decays: channel_chunk.cuh; chunks that
//           grow: growing_chunk.cuh
// source    Peng et al., 2025 (2503.14456), eq. 17; Yang et al., 2024 (2406.06484), section 3
// limits    T of bfloat16, float16, single (float32: operands.cuh); K <= BK; BK of 64, 128, 256
// tests     test_delta_kernels; gates that grow: test_growth_within_a_segment, test_chunks_that_enlarge_a_state there
#include "cards.cuh"
#include "delta/growing_chunk.cuh"
#include "rwkv7/chunk_keys.cuh"

// From the includes:
//   BT = 32 tokens in BLOCKS = 8 blocks of BLOCK = 4; LEVELS = 3: borders between the halves of 8 tokens (level 0), of
//     16 (level 1) and of 32 (level 2)
//   put_split, put_split_pair: store numbers as sums of two (a `single` as it is)
//   Accumulators x: a warp's sums [32 tokens, 16 columns]; with g = lane / 4 and t = lane % 4, x[m][across][2 down + p]
//     is token 16 m + 8 down + g, column 8 across + 2t + p
//   each_pair: calls f for a lane's pairs of channels in them
//   fetch_tokens: starts copying a chunk's rows to tiles, with zeros after the last token and from channel K on;
//     unpack_four, put_four: four channels; decays_at: exp of four log gates; store_pieces, store_channels: copy arrays
//     to memory
//   UPPER, LOWER: the half of a matrix that is not 0
//   ChunkOfBlock: the chunk that the block prepares; blocks_with_room: so many blocks, or fewer if memory holds fewer
//   Lengths: powers of 2 and lengths of tokens. set_lengths finds them; its last argument: the power of a token of 0
//   BlockTask: a block of 4 tokens has LANES = BK / 4 threads; `lane` is the thread's number among them
//   Pairs of a block's tokens: PAIRS = 16 scores with each kind of column, 10 of q and 6 of a. PairOfBlock(n): tokens i
//     and j of the n-th: for each i, for each j <= i that of q, then, if j < i, that of a (`strict`). SumsOfPairs:
//     add(x), called 16 times in this order, takes the thread's part of the next score; then `sum` is, in lane l, score
//     l % 16, summed over the block's lanes in the warp
//   clear_rows: zeros in a block's 4 rows of a matrix [BT][LD] or a Matrix. in_gap: for lane l of a block, the place of
//     score l % 16 among the 4 x 4 numbers behind these rows (LD = BT + 4), which clear_rows and stores of scores leave
//   each_border: calls a function for each level's border, with the decay between it and a block. store_level<N> stores
//     a block's rows or columns of one kind (its third argument) decayed that far, in a tile that has N kinds, 8 tokens
//     of each by turns. score_borders: scores of rows after a border with columns before it
//   Triangle: a warp's lower triangle, of which a lane has diagonal[i], number (16 (lane / 16) + i, lane), and `below`,
//     of the block of rows 16 to 31 and columns 0 to 15, which lies as sums of its transpose: with g = lane / 4 and
//     t = lane % 4 below[across][2 down + p] is number (16 + 8 across + 2t + p, g + 8 down). solve: multiplies it by
//     (I - diag(weight) M)^-1; put_transposed: stores it; multiply_triangles: products of lower triangles, of which a
//     function gets every number
//   LowerMatrix: REST numbers and, for 16-bit data, REST rounding errors behind; row(n), column(n): of number n. Of a
//     Matrix number(i, j) is the value, with its error
//   RowNumbers: of a lane's rows in Accumulators
//   PreparedFor: the struct that is stored; WRITES_TWICE: of a rule whose tokens write along k and along b.
//     Operand<T, f16>: f16 for 16-bit data, else `single`

template <typename T, typename G> struct Args {
  StridedRows<const T> q, k, a, b;
  StridedRows<const G> g;
  void* prepared;  // Prepared, or PreparedForGradients, of each chunk
  Shape shape;
  double w_scale;
  i64 bytes;  // 16, 8, 4 or 2: all rows start on multiples of it, and are multiples long
  // If LOGITS:
  StridedRows<T> key, v, first_v;
  StridedRows<const float> bases, removal, replacement;
};

// Rows of scores (q, a) and columns (k, b): an index of lengths. In loops `kind` is 0 for k and 1 for b.
enum Kind { OF_Q, OF_A, WITH_K, WITH_B };

template <typename T, typename G, int BK> struct alignas(16) Shared {
  // Arrays [BT * BK] are tiles: place<BK>(tile, i, c) is the address of channel c of token i. A Matrix is [BT, BT], in
  // 16 bits the sum of two numbers. Beside the members of unions: between which barriers they are written and read.
  union {
    T q[BT * BK];  // until 2
    T E[BT * BK];  // from 2 on
  };
  union {
    struct {                  // until 2
      T columns[2][BT * BK];  // k and b
      T a[BT * BK];
      G g[BT * BK];
    };
    struct {                       // from 2 on
      Matrix<Operand<T, f16>> QB;  // Aqb'
      float QK[BT][LD];            // Aqk'
      union {
        struct {  // until 6
          // By level, as store_level has them: decayed q and a; decayed k, from 4 on b.
          Operand<T, f16> rows[LEVELS][BT * BK], decayed_columns[LEVELS][BT / 2 * BK];
        };
        struct {  // from 6 on
          union {
            Operand<T, f16> to_end[2][BT * BK];  // ke' and be'
            T Z[2][BT * BK];  // from 7 on, by each warp over its own channels: Zk and Zb; after 8 [0] is W
          };
          float from_start[BT][BK + 8];                        // q' decayed from the chunk's start
          Matrix<Operand<T, f16>> N_transposed, L_transposed;  // of N' and L', divided by their matrix_powers
        };
      };
    };
  };
  union {
    struct {  // until 7
      union {
        float block_decays[BLOCKS][BK];  // until 5
        float AB[BT][LD];                // from 5 on: Aab'
      };
      float AK[BT][LD];  // Aak', from 2 on: it shares no memory with block_decays
    };
    struct {  // from 7 on
      LowerMatrix<T> B, H;
    };
  };
  Lengths lengths[4];      // of q, a, k, b (Kind): p_x is `power`, and x' = factor x
  float weight[BT];        // p_a p_b
  float matrix_powers[2];  // of L' and of N': the largest power of 4 that the matrix's largest number is not below
};

// A block of 4 tokens: what a thread has of it in its 4 channels. `rows` are decayed from the block's start, q through
// its token, a through the one before; `to_end` are columns decayed from after their token to the block's end; `decay`
// is that over the block. scores[kind]: the thread's `sum` of SumsOfPairs, with k and with b; if a block has two warps,
// over the channels of the thread's warp only.
struct BlockOfTokens {
  float4 rows[2][BLOCK], to_end[2][BLOCK], decay;
  float largest;  // of the tokens' decays
  float scores[2];

  // Reads the block, and multiplies its tokens by their lengths' factors.
  template <typename T, typename G, int BK> __device__ __forceinline__ BlockOfTokens(const Shared<T, G, BK>& s) {
    const BlockTask<BK> task;
    SumsOfPairs<task.LANES> sums[2];
    decay = {1.f, 1.f, 1.f, 1.f}, largest = 0.f;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
      const auto token = [&](Kind kind, const T* tile) {
        return times(s.lengths[kind].factor[task.first + i], unpack_four(task.at(tile, i)));
      };
      const float4 q = token(OF_Q, s.q), a = token(OF_A, s.a), own = decays_at(task.at(s.g, i));
      rows[OF_A][i] = times(decay, a);
      largest = largest_of(largest, own), decay = times(decay, own);
      rows[OF_Q][i] = times(decay, q);
#pragma unroll
      for (int kind = 0; kind < 2; ++kind) {
        to_end[kind][i] = token(kind ? WITH_B : WITH_K, s.columns[kind]);
        // In the order of PairOfBlock, on which it depends where put_score stores each.
#pragma unroll
        for (int j = 0; j <= i; ++j) {
          float4& column = to_end[kind][j];
          const float score = product(a, column);  // without the own decay of a
          if (j < i) column = times(column, own);
          sums[kind].add(product(q, column));
          if (j < i) sums[kind].add(score);
        }
      }
    }
    scores[0] = sums[0].sum, scores[1] = sums[1].sum;
  }
};

// Launch bounds: blocks have 2 BK threads, so that registers are for 512 threads of a multiprocessor (128 a thread),
// and for fewer blocks if shared memory has room for fewer.
template <typename T, typename G, int BK, bool GRADIENT, bool LOGITS>
__global__ void __launch_bounds__(2 * BK, blocks_with_room<Shared<T, G, BK>>(256 / BK))
    delta_dplr_prepare(const Args<T, G> args) {
  constexpr int THREADS = 2 * BK;
  auto& s = *reinterpret_cast<Shared<T, G, BK>*>(dynamic_smem());
  const ChunkOfBlock chunk(args.shape);
  using PreparedChunk = typename PreparedFor<T, BK, WRITES_TWICE, GRADIENT>::Type;
  PreparedChunk& to = static_cast<PreparedChunk*>(args.prepared)[chunk.index];
  const Lengths &q_lengths = s.lengths[OF_Q], &a_lengths = s.lengths[OF_A], *column_lengths = s.lengths + WITH_K;

  Select<LOGITS, ChunkKeys<T>, NoKeys> keys(args, chunk);
  const u32 h = chunk.h;
  fetch_tokens<BK, THREADS>(args, chunk, [&](auto copy) {
    copy(s.q, args.q, h), copy(s.a, args.a, h), copy(s.columns[0], args.k, h), copy(s.g, args.g, h);
    if constexpr (!LOGITS) copy(s.columns[1], args.b, h);
  });
  if constexpr (LOGITS) keys.mix_values(args, chunk);
  cp_async_wait<0>();
  __syncthreads();  // 1: inputs have arrived

  const BlockTask<BK> task;
  if constexpr (LOGITS) keys.make_keys(args, chunk, s.columns[0], s.a, s.columns[1], s.g);
  constexpr bool normalized = false;  // queries and keys are not divided by their lengths
  set_lengths<BK>(s.lengths, {s.q, s.a, s.columns[0], s.columns[1]}, normalized, 1.f);
  BlockOfTokens block(s);
  *reinterpret_cast<float4*>(&s.block_decays[task.block][task.c]) = block.decay;
  if constexpr (GRADIENT)
    if (threadIdx.x < BT) to.beta[threadIdx.x] = 1.f;  // RWKV-7 has none: walks copy beta, and do not use it
  // 2: decays of blocks are in shared memory; inputs may be overwritten, but only behind the branch, which reads them.
  if (__syncthreads_or(block.largest > GROWTH)) {
    // A decay is above GROWTH (growing_chunk.cuh): float16 might not hold decayed tokens. Stores all of `to` but beta,
    // from the inputs, which are in shared memory still.
    const float* const betas = nullptr;
    prepare_by_tokens<WRITES_TWICE, GRADIENT, BK>(to, s.q, s.columns[0], s.a, s.columns[1], s.g, s.lengths, betas, s.AK,
                                                  float(args.w_scale));
    return;
  }
  if (const int i = threadIdx.x; i < BT) s.weight[i] = a_lengths.power[i] * column_lengths[1].power[i];
  // Zeros above the diagonals of QB and AK; those of QK and AB are not read. Below, scores are stored after barrier 3.
  clear_rows(s.QB, task), clear_rows(s.AK, task);
  // If a block of tokens has two warps, the second one gives its sums to the first one, which reads them after barrier
  // 5: in gaps, since other threads clear the rows, and store scores there, meanwhile.
  const auto other_half = [&](int kind) -> float& { return in_gap(kind ? s.AK : s.QK, task); };
  if (task.LANES > 32 && task.lane >= 32 && task.lane < 32 + PAIRS)
    other_half(0) = block.scores[0], other_half(1) = block.scores[1];
  // before, after: the decays from the chunk's start to the block, and from the block to the chunk's end.
  float4 before, after;
  each_border<BK>(
      s.block_decays, task, before, after,
      [&](int level, float4 decay) {
        store_level<2>(s.rows[level], level, OF_Q, task, block.rows[OF_Q], decay);
        store_level<2>(s.rows[level], level, OF_A, task, block.rows[OF_A], decay);
      },
      [&](int level, float4 decay) {
        store_level<1>(s.decayed_columns[level], level, 0, task, block.to_end[0], decay);
      });
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) {
    const float4 a = times(a_lengths.power[task.first + n], times(before, block.rows[OF_A][n]));
    put_four(task.at(s.E, n), a), store_four(task.at(to.E, n), a);
    block.rows[OF_Q][n] = times(before, block.rows[OF_Q][n]);
  }
  if (task.block == BLOCKS - 1)
    *reinterpret_cast<float4*>(to.decay + task.c) = times(before, unpack_four(&s.block_decays[task.block][task.c]));
  __syncthreads();  // 3: decayed rows and k are in shared memory
  score_borders<BK, THREADS>(s.rows, s.decayed_columns, [&](int i, int j, float2 q_scores, float2 a_scores) {
    *reinterpret_cast<float2*>(&s.QK[i][j]) = q_scores, *reinterpret_cast<float2*>(&s.AK[i][j]) = a_scores;
  });
  __syncthreads();  // 4: scores with k are in shared memory; decayed b may overwrite decayed k
  each_border<BK>(
      s.block_decays, task, before, after, [](int, float4) {},
      [&](int level, float4 decay) {
        store_level<1>(s.decayed_columns[level], level, 0, task, block.to_end[1], decay);
      });
  __syncthreads();  // 5: decayed b is in shared memory; decays of blocks have been read
  const auto put_score = [&](int kind, float x) {
    const PairOfBlock pair(task.lane % PAIRS);
    const int i = task.first + pair.i, j = task.first + pair.j;
    if (kind && !pair.strict) put_split(s.QB.at(i, j), x);
    else (kind ? s.AB : pair.strict ? s.AK : s.QK)[i][j] = x;
  };
  // Lanes 0 to 15 have the same scores as lanes 16 to 31, if these are of the same block.
  if (task.LANES < 32) {
    put_score(0, block.scores[0]), put_score(1, block.scores[1]);
  } else if (task.lane < 32) {
    const int kind = task.lane / PAIRS;
    float score = kind ? block.scores[1] : block.scores[0];
    if (task.LANES > 32) score += other_half(kind);
    put_score(kind, score);
  }
  score_borders<BK, THREADS>(s.rows, s.decayed_columns, [&](int i, int j, float2 q_scores, float2 a_scores) {
    put_split_pair(s.QB.at(i, j), q_scores.x, q_scores.y);
    *reinterpret_cast<float2*>(&s.AB[i][j]) = a_scores;
  });
  __syncthreads();  // 6: scores are in shared memory; their operands have been read: qd, ke, be may overwrite them

#pragma unroll
  for (int n = 0; n < BLOCK; ++n) {
    *reinterpret_cast<float4*>(&s.from_start[task.first + n][task.c]) = block.rows[OF_Q][n];
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) put_four(task.at(s.to_end[kind], n), times(after, block.to_end[kind][n]));
  }
  constexpr int INVERSE_BARRIER = 1;  // a named barrier
  // A warp makes L' (kind 0), the next one N' (1). Which ones depends on the block, since each quarter of a
  // multiprocessor runs every fourth warp.
  if (const int kind = int((threadIdx.x / 32 + blockIdx.x) % (THREADS / 32)); kind < 2) {
    const int lane = own_lane(), block = lane & 16;
    const bool inverts = kind;
    Triangle x = identity();
    if (!inverts) {  // P Aak'
#pragma unroll
      for (int i = 0; i < 16; ++i) x.diagonal[i] = s.weight[block + i] * s.AK[block + i][lane];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int i = 16 + n / 4 * 8 + lane % 4 * 2 + n % 2;
        x.below[n / 4][n % 4] = s.weight[i] * s.AK[i][lane / 4 + n / 2 % 2 * 8];
      }
    }
    auto& transposed = inverts ? s.N_transposed : s.L_transposed;
    solve(x, s.AB, s.weight, transposed, inverts, [] { named_barrier_sync(INVERSE_BARRIER, 2 * 32); });
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = fmaxf(largest, fabsf(x.diagonal[i]));
#pragma unroll
    for (int n = 0; n < 8; ++n) largest = fmaxf(largest, fabsf(x.below[n / 4][n % 4]));
    // power_below takes a square: root is the largest power of 2 not above the root of the largest number, or 1 if all
    // are 0 (L' of keys of 0). Divided by its square, a matrix has a largest number in [1, 4), which float16 holds.
    const float root = power_below(max_of_lanes(largest)), power = root * root;
    if (lane == 0) s.matrix_powers[kind] = power;
    put_transposed(transposed, x, 1.f / power);
  }
  __syncthreads();  // 7: N', L', qd, ke and be are in shared memory

  const float L_power = s.matrix_powers[0], N_power = s.matrix_powers[1];
  // sums: (Aqb' L')_ij and (Aqb' N')_ij, divided by L_power and N_power, and those of j + 1.
  multiply_triangles<THREADS, Operand<T, f16>>(
      s.QB,
      [&](int i, int j, const float2(&sums)[2]) {
        const auto put = [&](LowerMatrix<T>& M, float factor, const Lengths& columns, float x, float y) {
          put_split_pair(M, i, j, {factor * columns.power[j] * x, factor * columns.power[j + 1] * y});
        };
        const float one = j <= i ? s.QK[i][j] : 0.f, next = j + 1 <= i ? s.QK[i][j + 1] : 0.f;
        put(s.B, q_lengths.power[i], column_lengths[0], fmaf(L_power, sums[0].x, one), fmaf(L_power, sums[0].y, next));
        put(s.H, N_power * q_lengths.power[i], column_lengths[1], sums[1].x, sums[1].y);
      },
      s.L_transposed, s.N_transposed);
  // The warp's 16 channels of Zk and Zb, then of W. multiply_tokens: z[n] += the matrix times the tile.
  const int channel = int(threadIdx.x) / 32 * 16;
  Accumulators z[2] = {};
  multiply_tokens<UPPER, BK>(z[0], s.L_transposed, s.to_end[1], channel);
  multiply_tokens<UPPER, BK>(z[1], s.N_transposed, s.to_end[1], channel);
  __syncwarp();  // all lanes have read these channels of be
  const RowNumbers k_factors([&](int i) { return column_lengths[0].power[i]; });
  const RowNumbers b_factors([&](int i) { return N_power * column_lengths[1].power[i]; });
  each_pair([&](int i, int c, int m, int across, int down) {
    const float *zk = z[0][m][across] + 2 * down, *zb = z[1][m][across] + 2 * down;
    const float2 key = unpack_pair(place<BK>(s.to_end[0], i, c));
    const float k_factor = k_factors.x[m][down], b_factor = b_factors.x[m][down];
    put_pair(place<BK>(s.Z[0], i, c), {k_factor * fmaf(L_power, zk[0], key.x), k_factor * fmaf(L_power, zk[1], key.y)});
    put_pair(place<BK>(s.Z[1], i, c), {b_factor * zb[0], b_factor * zb[1]});
  });
  store_channels<BK>(to.Z[0], s.Z[0]);
  store_channels<BK>(to.Z[1], s.Z[1]);
  __syncthreads();  // 8: H and B are in shared memory
  Accumulators w = {};
  multiply_tokens<LOWER, BK>(w, s.H, s.E, channel);
  const float scale = float(args.w_scale);
  const RowNumbers W_factors([&](int i) { return scale * q_lengths.power[i]; });
  each_pair([&](int i, int c, int m, int across, int down) {
    const float2 query = *reinterpret_cast<const float2*>(&s.from_start[i][c]);
    const float factor = W_factors.x[m][down], *two = w[m][across] + 2 * down;
    put_pair(place<BK>(s.Z[0], i, c), {fmaf(factor, query.x, scale * two[0]), fmaf(factor, query.y, scale * two[1])});
  });
  store_channels<BK>(to.W, s.Z[0]);
  if constexpr (GRADIENT) {
    store_pieces<THREADS>(to.B[0].x, s.B.x), store_pieces<THREADS>(to.B[1].x, s.H.x);
    // The residual matrices are N and L: number (i, j) is number (j, i) of the transposed matrices.
    for (int n = 2 * threadIdx.x; n < LowerMatrix<T>::REST; n += 2 * THREADS) {
      const int i = LowerMatrix<T>::row(n), j = LowerMatrix<T>::column(n);
      const float factor = 1.f / column_lengths[1].power[i];
      const auto put = [&](LowerMatrix<T>& M, const auto& transposed, float power, const Lengths& lengths) {
        const auto at = [&](int j) { return factor * power * lengths.power[j] * transposed.number(j, i); };
        put_split_pair(M, i, j, {at(j), at(j + 1)});
      };
      put(to.residual_matrix[0], s.N_transposed, N_power, column_lengths[1]),
          put(to.residual_matrix[1], s.L_transposed, L_power, column_lengths[0]);
    }
  } else {
    store_pieces<THREADS>(to.B.x, s.B.x);
  }
}
