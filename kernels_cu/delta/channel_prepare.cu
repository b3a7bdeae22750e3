// what      The delta rule with a gate for each channel (Kimi Delta Attention): prepares each chunk of 32 tokens, that
//           is, computes what the chunk does to a state, for the kernels that walk over states. GRADIENT: for those
//           that walk in both directions.
// math      i and j are tokens of the chunk. A token's decay is e^g of its log gates g [K]. kd, qd: k and q decayed
//           from the chunk's start through their token; ke: k decayed from after it to the chunk's end; M_ij = k_i .
//           D_ij k_j, j < i, A_ij = q_i . D_ij k_j, j <= i, D_ij each channel's decay from after token j through token
//           i.
//           N = (I + diag(beta) M)^-1, B = A N diag(beta);   E = -kd, W = w_scale (qd - B kd), Z = diag(beta) N^T ke
//           GRADIENT: B and Z without diag(beta), and the matrix of residuals I - M N diag(beta). What these matrices
//           do to a state: prepared.cuh
//           Keys are stored as k' = k / p, queries as q' = q / r, p and r powers of 2. Primed matrices are those of
//           primed tokens: with N' = (I + diag(beta p^2) M')^-1,   B = diag(r) A' N' diag(p beta), Z = diag(beta p)
//           N'^T ke', M N = diag(p) M' N' diag(p)
// shapes    q k [B, H, T, K], g [B, HV, T, K], beta [B, HV, T]; prepared [B, HV, NC], NC the chunks of a batch row. A
//           thread decays 4 channels of a block of 4 tokens (BlockTask). Of 8 x 8 numbers of a product a lane has row
//           lane / 4, columns 2 (lane % 4) and the next
// grid      a block for every (batch, head of values, chunk), chunks fastest
// smem      Shared: a chunk's inputs, its matrices
// barriers  six, by number; behind each these are in shared memory, and their operands may be overwritten: 1 inputs
//           2 decays of blocks (all threads also agree whether a gate grows)   3 decayed tokens   4 M' and A'
//           5 N' and qd   6 B. One more in prepare_by_tokens, in place of 3 to 6, and one in set_lengths if BK is 256
// numerics  M' and N' in float32. Of 16-bit data they, and A', are the sum of two float16 as operands, and B of two T;
//           E, W, Z in T. Decays: channel_chunk.cuh; chunks that grow: growing_chunk.cuh
// source    Kimi Team, 2025 (2510.26692), eq. 1; Yang et al., 2024 (2412.06464), section 3.3
// limits    T of bfloat16, float16, single (float32: operands.cuh); K <= BK; BK of 64, 128, 256
// tests     test_delta_kernels; gates that grow: test_growth_within_a_segment, test_chunks_that_enlarge_a_state there
#include "cards.cuh"
#include "delta/growing_chunk.cuh"

// From the includes:
//   BT = 32 tokens in BLOCKS = 8 blocks of BLOCK = 4; LEVELS = 3 kinds of borders between blocks
//   put_split, put_split_pair: store numbers as sums of two (a `single` as it is)
//   Accumulators x: a warp's sums [32 tokens, 16 columns]; with g = lane / 4 and t = lane % 4, x[m][across][2 down + p]
//     is token 16 m + 8 down + g, column 8 across + 2t + p
//   each_pair: calls f for a lane's pairs of channels in them
//   fetch_tokens: starts copying a chunk's rows to tiles, with zeros behind; unpack_four, put_four: four channels;
//     decays_at: exp of four log gates; store_pieces, store_channels: copy arrays to memory
//   UPPER, LOWER: the half of a matrix that is not 0
//   Lengths: powers of 2 and lengths of tokens; SumsOfPairs: sums over channels; PairOfBlock: the numbers of a block's
//     pairs; RowNumbers: of a lane's rows in Accumulators; each_border, store_level: decayed rows and columns for
//     borders between blocks; score_borders: scores across borders; Triangle: a warp's lower triangle; solve:
//     multiplies it by (I - diag(weight) M)^-1; put_transposed: stores it; multiply_triangles: products of lower
//     triangles, of which a function gets every number
//   PreparedFor: the struct that is stored; Operand<T, f16>: f16 for 16-bit data, else `single`
//   LANES: threads of a block of tokens

template <typename T, typename G> struct Args {
  StridedRows<const T> q, k;
  StridedRows<const G> g, beta;  // a token's beta is a row of one number
  void* prepared;                // Prepared, or PreparedForGradients, of each chunk
  Shape shape;                   // H: heads of values
  i64 group;                     // heads of values that share a head of queries and keys
  double w_scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 bytes;       // 16, 8, 4 or 2: all rows of q, k and g start on multiples of it, and are multiples long
};

enum Kind { OF_K, OF_Q };  // an index of lengths, and of the rows of scores: keys (M) or queries (A)

template <typename T, typename G, int BK> struct alignas(16) Shared {
  // Arrays [BT * BK] are tiles: place<BK>(tile, i, c) is the address of channel c of token i. A Matrix is [BT, BT], in
  // 16 bits the sum of two numbers. Beside the members of unions: between which barriers they are written and read.
  union {
    T k[BT * BK];  // until 2
    T E[BT * BK];  // from 2 on
  };
  union {
    T q[BT * BK];                 // until 2
    Operand<T, f16> ke[BT * BK];  // from 2 on
    T Z[BT * BK];                 // from 5 on, by each warp over its own channels
    T W[BT * BK];                 // likewise, after 6
  };
  Matrix<Operand<T, f16>> A;
  union {
    G g[BT * BK];  // until 2
    struct {       // from 2 to 4
      // By level, as store_level has them: decayed keys and queries; keys.
      Operand<T, f16> rows[LEVELS][BT * BK], keys[LEVELS][BT / 2 * BK];
    };
    struct {                         // from 4 on
      float from_start[BT][BK + 8];  // q' decayed from the chunk's start
      LowerMatrix<T> B;
    };
  };
  union {
    float block_decays[BLOCKS][BK];        // until 3
    Matrix<Operand<T, f16>> N_transposed;  // from 4 on: of N'
  };
  float M[BT][LD];
  Lengths lengths[2];          // of keys and of queries: p, r are their `power`, and k' = factor k
  float beta[BT], weight[BT];  // weight: -beta p^2
};

// A block of 4 tokens: what a thread has of it in its 4 channels. keys and queries are decayed from the block's start
// through their token, keys_to_end from after their token to the block's end; `decay` is that over the block.
struct BlockOfTokens {
  float4 keys[BLOCK], queries[BLOCK], keys_to_end[BLOCK], decay;
  float largest;  // of the tokens' decays
};

// Reads a block of tokens, and multiplies them by their lengths' factors. Returns the scores of pairs within the block
// (PairOfBlock): of queries, and of keys if strict.
template <int BK, typename T, typename G>
__device__ __forceinline__ float read_block(BlockOfTokens& block, const T* q, const T* k, const G* g,
                                            const Lengths (&lengths)[2]) {
  const BlockTask<BK> task;
  SumsOfPairs<task.LANES> scores;
  block.decay = {1.f, 1.f, 1.f, 1.f}, block.largest = 0.f;
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) {
    const float4 query = times(lengths[OF_Q].factor[task.first + i], unpack_four(task.at(q, i)));
    const float4 key = times(lengths[OF_K].factor[task.first + i], unpack_four(task.at(k, i)));
    const float4 decay = decays_at(task.at(g, i));
    block.largest = largest_of(block.largest, decay), block.decay = times(block.decay, decay);
    block.keys[i] = times(block.decay, key), block.queries[i] = times(block.decay, query);
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      float4& decayed = block.keys_to_end[j];  // to token i
      decayed = j == i ? key : times(decayed, decay);
      scores.add(product(query, decayed));
      if (j < i) scores.add(product(key, decayed));
    }
  }
  return scores.sum;
}

// By the launch bounds a multiprocessor has registers for 768 threads (80 a thread), that is, for 384 / BK blocks; or
// for as many blocks as its shared memory holds, if these are fewer.
template <typename T, typename G, int BK, bool GRADIENT>
__global__ void __launch_bounds__(2 * BK, blocks_with_room<Shared<T, G, BK>>(384 / BK))
    delta_channel_prepare(const Args<T, G> args) {
  constexpr int THREADS = 2 * BK;
  auto& s = *reinterpret_cast<Shared<T, G, BK>*>(dynamic_smem());
  const ChunkOfBlock chunk(args.shape);
  const u32 head = chunk.h / u32(args.group);
  using PreparedChunk = typename PreparedFor<T, BK, WRITES_ONCE, GRADIENT>::Type;
  PreparedChunk& to = static_cast<PreparedChunk*>(args.prepared)[chunk.index];
  const Lengths &k_lengths = s.lengths[OF_K], &q_lengths = s.lengths[OF_Q];

  fetch_tokens<BK, THREADS>(
      args, chunk, [&](auto copy) { copy(s.k, args.k, head), copy(s.q, args.q, head), copy(s.g, args.g, chunk.h); });
  if (threadIdx.x < BT) {
    const int i = threadIdx.x;
    s.beta[i] = i < chunk.rows ? to_float(chunk.row(args.beta, chunk.h)[i * args.beta.token_stride]) : 0.f;
    if constexpr (GRADIENT) to.beta[i] = s.beta[i];
  }
  const BlockTask<BK> task;
  clear_rows(s.A, task);  // numbers above the diagonal stay 0; of M they are not read
  cp_async_wait<0>();
  __syncthreads();  // 1: inputs have arrived

  set_lengths<BK>(s.lengths, {s.k, s.q}, args.normalized, LITTLE);
  BlockOfTokens block;
  float score = read_block<BK>(block, s.q, s.k, s.g, s.lengths);
  // If a block of tokens has two warps, the second one gives its sums to the first one.
  float& other_half = in_gap(s.M, task);
  if (task.LANES > 32 && task.lane >= 32 && task.lane < 32 + PAIRS) other_half = score;
  *reinterpret_cast<float4*>(&s.block_decays[task.block][task.c]) = block.decay;
  // 2: decays of blocks are in shared memory; inputs may be overwritten.
  if (__syncthreads_or(block.largest > GROWTH)) {
    // A gate is too large for float16: stores all of `to` but beta, from the inputs, which are in shared memory still.
    prepare_by_tokens<WRITES_ONCE, GRADIENT, BK>(to, s.q, s.k, s.k, s.k, s.g, s.lengths, s.beta, s.M,
                                                 float(args.w_scale));
    return;
  }
  if (const int i = threadIdx.x; i < BT) s.weight[i] = -s.beta[i] * k_lengths.power[i] * k_lengths.power[i];
  // before, after: the decays from the chunk's start to the block, and from the block to the chunk's end.
  float4 before, after;
  each_border<BK>(
      s.block_decays, task, before, after,
      [&](int level, float4 decay) {
        store_level<2>(s.rows[level], level, OF_K, task, block.keys, decay);
        store_level<2>(s.rows[level], level, OF_Q, task, block.queries, decay);
      },
      [&](int level, float4 decay) { store_level<1>(s.keys[level], level, 0, task, block.keys_to_end, decay); });
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) {
    const int i = task.first + n;
    const float4 key = times(-k_lengths.power[i], times(before, block.keys[n]));
    put_four(task.at(s.E, n), key), store_four(task.at(to.E, n), key);
    put_four(task.at(s.ke, n), times(after, block.keys_to_end[n]));
    block.queries[n] = times(before, block.queries[n]);
  }
  if (task.block == BLOCKS - 1)
    *reinterpret_cast<float4*>(to.decay + task.c) = times(before, unpack_four(&s.block_decays[task.block][task.c]));
  if (task.lane < PAIRS) {
    if (task.LANES > 32) score += other_half;
    const PairOfBlock pair(task.lane);
    const int i = task.first + pair.i, j = task.first + pair.j;
    if (pair.strict) s.M[i][j] = score;
    else put_split(s.A.at(i, j), score);
  }
  __syncthreads();  // 3: decayed queries and keys are in shared memory

  score_borders<BK, THREADS>(s.rows, s.keys, [&](int i, int j, float2 key, float2 query) {
    put_split_pair(s.A.at(i, j), query.x, query.y);
    *reinterpret_cast<float2*>(&s.M[i][j]) = key;
  });
  __syncthreads();  // 4: M' and A' are in shared memory; their operands have been read, and qd may overwrite them
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) *reinterpret_cast<float4*>(&s.from_start[task.first + n][task.c]) = block.queries[n];
  // One warp inverts. Which one depends on the block, since each quarter of a multiprocessor runs every fourth warp.
  if (threadIdx.x / 32 == blockIdx.x % (THREADS / 32)) {
    Triangle N = identity();
    solve(N, s.M, s.weight, s.N_transposed, INVERTS, [] { __syncwarp(); });
    put_transposed(s.N_transposed, N);
  }
  __syncthreads();  // 5: N' and qd are in shared memory

  // x: (X N')_ij and the next, with the powers of 2 of row i (`factor`) and of columns j and j + 1.
  const auto with_powers = [&](int j, float factor, float2 x) {
    return float2{factor * k_lengths.power[j] * x.x, factor * k_lengths.power[j + 1] * x.y};
  };
  multiply_triangles<THREADS, Operand<T, f16>>(
      s.A,
      [&](int i, int j, const float2(&sum)[1]) {
        const float2 x = with_powers(j, q_lengths.power[i], sum[0]);
        put_split_pair(s.B, i, j, {s.beta[j] * x.x, s.beta[j + 1] * x.y});
        if constexpr (GRADIENT) put_split_pair(to.B[0], i, j, x);
      },
      s.N_transposed);
  if constexpr (GRADIENT)
    multiply_triangles<THREADS, Operand<T, f16>>(
        s.M,
        [&](int i, int j, const float2(&sum)[1]) {
          const float2 x = with_powers(j, k_lengths.power[i], sum[0]);
          put_split_pair(to.residual_matrix[0], i, j,
                         {float(i == j) - s.beta[j] * x.x, float(i == j + 1) - s.beta[j + 1] * x.y});
        },
        s.N_transposed);
  // The warp's 16 channels of Z, then of W. multiply_tokens: sum += the matrix times the tile.
  const int channel = int(threadIdx.x) / 32 * 16;
  Accumulators sum = {};
  multiply_tokens<UPPER, BK>(sum, s.N_transposed, s.ke, channel);
  __syncwarp();  // all lanes have read these channels of ke
  const RowNumbers Z_factors([&](int i) { return GRADIENT ? k_lengths.power[i] : s.beta[i] * k_lengths.power[i]; });
  each_pair([&](int i, int c, int m, int across, int down) {
    const float factor = Z_factors.x[m][down], *two = sum[m][across] + 2 * down;
    put_pair(place<BK>(s.Z, i, c), {factor * two[0], factor * two[1]});
    sum[m][across][2 * down] = sum[m][across][2 * down + 1] = 0.f;
  });
  store_channels<BK>(to.Z[0], s.Z);
  __syncthreads();  // 6: B is in shared memory
  multiply_tokens<LOWER, BK>(sum, s.B, s.E, channel);
  const float scale = float(args.w_scale);
  const RowNumbers W_factors([&](int i) { return scale * q_lengths.power[i]; });
  each_pair([&](int i, int c, int m, int across, int down) {
    const float2 query = *reinterpret_cast<const float2*>(&s.from_start[i][c]);
    const float factor = W_factors.x[m][down], *two = sum[m][across] + 2 * down;
    put_pair(place<BK>(s.W, i, c), {fmaf(factor, query.x, scale * two[0]), fmaf(factor, query.y, scale * two[1])});
  });
  store_channels<BK>(to.W, s.W);
  if constexpr (!GRADIENT) store_pieces<THREADS>(to.B.x, s.B.x);
}
