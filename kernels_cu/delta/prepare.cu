// what      The delta rule with one gate for all channels of a token: what each chunk of 32 tokens does to a state, for
//           the kernels that walk over states; GRADIENT: for those that walk in both directions.
// math      i and j are tokens of the chunk. A token's decay is e^g of its log gate g. Decays over tokens: D_ij from
//           after token j through token i, P_i from the chunk's start through i, L_i from after i to the chunk's end.
//           M_ij = D_ij k_i . k_j, j < i; A_ij = D_ij q_i . k_j, j <= i; N = (I + diag(beta) M)^-1, B = A N diag(beta);
//           and of rows for each token
//           E_i = -P_i k_i, W_i = w_scale (P_i q_i + sum_j B_ij E_j), Z_j = beta_j sum_i N_ij L_i k_i
//           args.normalized: q and k are divided by their lengths before all this. GRADIENT: stored are B and Z without
//           beta (W has it), and R = I - M N diag(beta) = (I + M diag(beta))^-1, as the residuals are R (v + E S). What
//           these matrices do to a state: prepared.cuh
// shapes    q k [B, H, T, K], g beta [B, HV, T]; prepared [B, HV, NC], NC the chunks of a batch row; a warp makes E, W
//           and Z of 16 channels. A tile is [BT, BK] in shared memory: place<BK>(tile, i, c) is the address of channel
//           c of token i. A Matrix is [BT, BT]; for 16-bit data each number is the sum of two, a rounded one and its
//           rounding error. Of 8 x 8 numbers of a product a lane has row g, columns 2t and 2t + 1, with g = lane / 4, t
//           = lane % 4
// grid      a block for every (batch, head of values, chunk), chunks fastest
// smem      Shared: a chunk's inputs, its matrices
// barriers  five. Each says that these are in shared memory: inputs and decays | inverse_length | M and A | N | B and
//           Z_from_keys. After the last a warp reads and writes only its own 16 channels of k, E, Z, q and W, and so
//           __syncwarp is enough
// numerics  M and N in float32; for products of 16-bit data they and A are the sum of two bfloat16, which hold any
//           growth that float32 holds. E, W and Z in T; the matrices that make them are sums of two T
// source    Yang et al., 2024 (2412.06464), section 3.3
// limits    T of bfloat16, float16, single (float32: operands.cuh); K <= BK; BK of 64, 128, 256
#include "cards.cuh"
#include "delta/channel_chunk.cuh"
#include "delta/prepared.cuh"

// From the includes:
//   BT = 32 tokens
//   put_split_pair: store numbers as sums of two (a `single` as it is)
//   Accumulators x: a warp's sums [32 tokens, 16 columns]; with g = lane / 4 and t = lane % 4, x[m][across][2 down + p]
//     is token 16 m + 8 down + g, column 8 across + 2t + p
//   UPPER, LOWER: the half of a matrix that is not 0
//   multiply_squares: products of 16 rows with 16 rows; Triangle: a warp's lower triangle; solve(N, M, weight, room,
//     ...): N <- (I - diag(weight) M)^-1 N, by one warp, with `room` and what is above M's diagonal as memory;
//     put_transposed: stores it; multiply_triangles(X, f, Y transposed): calls f(i, j, {(X Y)_ij and the next}) for
//     even j, also above the diagonal, where they are 0
//   PreparedFor: the struct that is stored; Operand<T, bf16>: bf16 for 16-bit data, else `single`
//   LEAST_SQUARE = 1e-6 is added to the square of a length
//   TokenNumbers: the decay and beta of the lane's token; each_pair: calls f for a lane's pairs of channels in
//     Accumulators
//   ChunkOfBlock: the chunk that blockIdx.x selects; fetch_tokens: starts copying its rows, with zeros behind;
//     store_channels: copies the warp's 16 channels of a tile to global memory, after a __syncwarp, so that all lanes
//     have written them; store_pieces: copies a whole array there
//   WRITES_ONCE: tokens write along k alone (RWKV-7's also along another vector), so that there is one B and one Z,
//     B[0] and Z[0]; INVERTS: `solve` is given the identity

template <typename T, typename G> struct Args {
  StridedRows<const T> q, k;
  StridedRows<const G> g, beta;  // rows of one number, for each token
  void* prepared;                // Prepared, or PreparedForGradients, of each chunk
  Shape shape;                   // its H are the heads of values
  i64 group;                     // so many of them share a head of queries and keys
  double w_scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 bytes;       // 16, 8, 4 or 2: all rows of q and k start on multiples of it, and are multiples long
};

enum Kind { OF_K, OF_Q };  // the rows of a score: keys (M) or queries (A); an index of inverse_length

// In a union each member overwrites the one above, which has been read by then.
template <typename T, int BK> struct alignas(16) Shared {
  union {
    T k[BT * BK];
    T E[BT * BK];
    T Z[BT * BK];
  };
  union {
    T q[BT * BK];
    T W[BT * BK];
  };
  LowerMatrix<T> B;
  Matrix<T> Z_from_keys;  // Z = Z_from_keys k
  Matrix<Operand<T, bf16>> A;
  float M[BT][LD];  // below the diagonal; what the products leave elsewhere is not read
  union {
    float decay_between[BT][LD];  // D_ij; 0 for i < j
    Matrix<Operand<T, bf16>> N_transposed;
  };
  float inverse_length[2][BT];                             // of keys and of queries; 1 if not normalized
  float beta[BT], decay_from_start[BT], decay_to_end[BT];  // decays: P, L
  float minus_beta[BT];
  float E_factors[BT], Z_factors[BT], W_factors[BT];  // factors: of keys for E, of keys for Z, of queries for W
};

// The n-th product [16, 16] for scores: of 16 keys or queries (`kind`) from `row` on with 16 keys from `column` on; or,
// if of_queries_alone, of 16 queries with themselves, for their lengths only. The squares of lengths are on diagonals:
// of queries in the latter products, of keys in those of keys with the same keys. n: 0 k[0] k[0], 1 q[0] k[0], 2 k[16]
// k[0], 3 q[16] k[0], 4 k[16] k[16], 5 q[16] k[16], 6 q[0] q[0], 7 q[16] q[16].
struct ScoreTile {
  static constexpr int COUNT = 8;
  Kind kind;
  bool of_queries_alone;
  int row, column;
  __device__ __forceinline__ explicit ScoreTile(int n)
      : kind(n % 2 || n == 6 ? OF_Q : OF_K),
        of_queries_alone(n >= 6),
        row(n < 2 || n == 6 ? 0 : 16),
        column(n == 4 || n == 5 || n == 7 ? 16 : 0) {}
  // Whether the product's diagonal has the squares of its rows' lengths.
  __device__ __forceinline__ bool has_lengths() const { return row == column && of_queries_alone == (kind == OF_Q); }
};

template <int BK> constexpr int WARPS = 2 * BK / 32;
template <int BK> constexpr int SCORE_TILES = (ScoreTile::COUNT + WARPS<BK> - 1) / WARPS<BK>;
// A warp's score tiles: [n][across] is [16 rows, 8 columns] of its n-th product.
template <int BK> using Scores = float[SCORE_TILES<BK>][2][4];

// Computes the warp's score tiles, and stores the inverse lengths on their diagonals.
template <typename T, int BK>
__device__ __forceinline__ void compute_scores(Scores<BK>& sums, Shared<T, BK>& s, bool normalized) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < SCORE_TILES<BK>; ++n) {
    const ScoreTile tile(warp + n * WARPS<BK>);
    if (WARPS<BK> > ScoreTile::COUNT && warp >= ScoreTile::COUNT) continue;  // more warps than products
    multiply_squares<BK>(sums[n], tile.kind ? s.q : s.k, tile.of_queries_alone ? s.q : s.k, tile.row, tile.column);
    if (tile.has_lengths() && t == g / 2)  // this lane has rows g and g + 8 of the diagonal
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const float squares = g % 2 ? sums[n][x][2 * x + 1] : sums[n][x][2 * x];
        s.inverse_length[tile.kind][tile.row + 8 * x + g] =
            normalized ? inverse_root(squares + float(LEAST_SQUARE)) : 1.f;
      }
  }
}
// Stores the factors of keys and queries; by a warp.
template <typename T, int BK> __device__ __forceinline__ void store_factors(Shared<T, BK>& s, float w_scale) {
  const int lane = threadIdx.x & 31;
  const float start = s.decay_from_start[lane], key = s.inverse_length[OF_K][lane];
  s.minus_beta[lane] = -s.beta[lane], s.E_factors[lane] = -start * key, s.Z_factors[lane] = s.decay_to_end[lane] * key;
  s.W_factors[lane] = w_scale * start * s.inverse_length[OF_Q][lane];
}
// Stores the warp's score tiles in M and A, times decays and inverse lengths.
template <typename T, int BK> __device__ __forceinline__ void store_scores(Shared<T, BK>& s, const Scores<BK>& sums) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < SCORE_TILES<BK>; ++n) {
    const ScoreTile tile(warp + n * WARPS<BK>);
    if (tile.of_queries_alone || WARPS<BK> > ScoreTile::COUNT && warp >= ScoreTile::COUNT) continue;
#pragma unroll
    for (int down = 0; down < 2; ++down)
#pragma unroll
      for (int across = 0; across < 2; ++across) {
        const int i = tile.row + 8 * down + g, j = tile.column + 8 * across + 2 * t;
        const float2 D = *reinterpret_cast<const float2*>(&s.decay_between[i][j]);
        const float2 keys = *reinterpret_cast<const float2*>(&s.inverse_length[OF_K][j]);
        const float row = s.inverse_length[tile.kind][i], *two = sums[n][across] + 2 * down;
        const float x = D.x * (row * keys.x * two[0]), y = D.y * (row * keys.y * two[1]);
        if (tile.kind == OF_Q) put_split_pair(s.A.at(i, j), x, y);
        else *reinterpret_cast<float2*>(&s.M[i][j]) = {x, y};
      }
  }
}
// Overwrites 16 channels of k, from `channel` on, by those of E. Two lanes have a token's 16 channels, 8 each: one
// piece of 16 bytes, or two in float32, which `place` puts apart.
template <typename T, int BK> __device__ __forceinline__ void scale_keys(Shared<T, BK>& s, int channel) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < BT; n += 16) {
    const int i = n + lane / 2, c = channel + lane % 2 * 8;
    T *key = place<BK>(s.k, i, c), *next = sizeof(T) == 4 ? place<BK>(s.k, i, c + 4) : key + 4;
    put_four(key, times(s.E_factors[i], unpack_four(key))), put_four(next, times(s.E_factors[i], unpack_four(next)));
  }
}

// Launch bounds, of blocks of 2 BK threads. Up to sm_90 the compiler leaves registers for 1024 threads of a
// multiprocessor (64 a thread), from sm_100 on for 768 (80); in float32 for 256 threads fewer (80; 128); for fewer if
// no whole block fits (BK = 256, of 512 threads), or if shared memory has room for fewer blocks.
template <typename T, typename G, int BK, bool GRADIENT>
__global__ void __launch_bounds__(2 * BK,
                                  blocks_with_room<Shared<T, BK>>((512 - 128 * SINCE_SM100 - 128 * (sizeof(T) == 4)) /
                                                                  BK)) delta_prepare(const Args<T, G> args) {
  constexpr int THREADS = 2 * BK;
  auto& s = *reinterpret_cast<Shared<T, BK>*>(dynamic_smem());
  const ChunkOfBlock chunk(args.shape);
  const u32 head = chunk.h / u32(args.group);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  using PreparedChunk = typename PreparedFor<T, BK, WRITES_ONCE, GRADIENT>::Type;
  PreparedChunk& to = static_cast<PreparedChunk*>(args.prepared)[chunk.index];

  fetch_tokens<BK, THREADS>(args, chunk, [&](auto copy) { copy(s.k, args.k, head), copy(s.q, args.q, head); });
  // Lane i has the decay and beta of token i; past the end they are 1 and 0. set_decays stores D_ij, P_i and L_i.
  const TokenNumbers numbers(args.g, args.beta, chunk.b, chunk.h, chunk.span.start, chunk.rows);
  set_decays<WARPS<BK>>(s, numbers.decay);
  if (warp == 0) {
    s.beta[lane] = numbers.beta;
    if constexpr (GRADIENT) to.beta[lane] = numbers.beta;
  }
  cp_async_wait<0>();
  __syncthreads();  // inputs have arrived; decays are in shared memory

  Scores<BK> sums = {};
  compute_scores(sums, s, args.normalized);
  __syncthreads();  // lengths are in shared memory
  if (warp == WARPS<BK> - 1) store_factors(s, float(args.w_scale));
  store_scores(s, sums);
  __syncthreads();  // M and A are in shared memory; decays of pairs have been read, and N may overwrite them
  // One warp inverts. Which one depends on the block, since each quarter of a multiprocessor runs every fourth warp.
  if (warp == blockIdx.x % WARPS<BK>) {
    Triangle N = identity();
    solve(N, s.M, s.minus_beta, s.N_transposed, INVERTS, [] { __syncwarp(); });
    put_transposed(s.N_transposed, N);
  }
  __syncthreads();  // N is in shared memory

  // sum: (A N)_ij and the next; N_transposed at (i, j) is N_ji.
  multiply_triangles<THREADS, Operand<T, bf16>>(
      s.A,
      [&](int i, int j, const float2(&sum)[1]) {
        put_split_pair(s.B, i, j, {s.beta[j] * sum[0].x, s.beta[j + 1] * sum[0].y});
        if constexpr (GRADIENT) put_split_pair(to.B[0], i, j, sum[0]);
        const float2 high = unpack_pair(s.N_transposed.at(i, j)), low = s.N_transposed.errors_at(i, j);
        const float row = GRADIENT ? 1.f : s.beta[i];
        put_split_pair(s.Z_from_keys.at(i, j), row * s.Z_factors[j] * (high.x + low.x),
                       row * s.Z_factors[j + 1] * (high.y + low.y));
      },
      s.N_transposed);
  if constexpr (GRADIENT)
    multiply_triangles<THREADS, Operand<T, bf16>>(  // sum: (M N)_ij and the next
        s.M,
        [&](int i, int j, const float2(&sum)[1]) {
          put_split_pair(to.residual_matrix[0], i, j,
                         {float(i == j) - s.beta[j] * sum[0].x, float(i == j + 1) - s.beta[j + 1] * sum[0].y});
        },
        s.N_transposed);
  __syncthreads();  // B and Z_from_keys are in shared memory

  // The warp's 16 channels of Z, E and W. multiply_tokens: z += the matrix times the tile.
  const int channel = 16 * warp;
  Accumulators z = {}, w = {};
  multiply_tokens<UPPER, BK>(z, s.Z_from_keys, s.k, channel);
  __syncwarp();  // all lanes have read these channels of k
  scale_keys(s, channel);
  store_channels<BK>(to.E, s.E);
  multiply_tokens<LOWER, BK>(w, s.B, s.E, channel);
  __syncwarp();  // all lanes have read these channels of E
  const float scale = float(args.w_scale);
  each_pair([&](int i, int c, int m, int across, int down) {
    T* query = place<BK>(s.q, i, c);
    const float2 q = unpack_pair(query);
    const float *w_pair = w[m][across] + 2 * down, *z_pair = z[m][across] + 2 * down;
    put_pair(query, {fmaf(s.W_factors[i], q.x, scale * w_pair[0]), fmaf(s.W_factors[i], q.y, scale * w_pair[1])});
    put_pair(place<BK>(s.Z, i, c), {z_pair[0], z_pair[1]});  // over E
  });
  store_channels<BK>(to.Z[0], s.Z);
  store_channels<BK>(to.W, s.W);
  if (threadIdx.x < BK) to.decay[threadIdx.x] = s.decay_from_start[BT - 1];
  if constexpr (!GRADIENT) store_pieces<THREADS>(to.B.x, s.B.x);
}
