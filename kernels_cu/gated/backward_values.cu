// what      GLA and RWKV-6 backward on every card: dv of a chunk.
// math      dS [K, V] is the gradient of the state after the chunk of 64 tokens. Decays [K] are e^(sum of log gates g):
//           D_ij over gates j + 1 to i (RWKV-6: to i - 1), L_j over the chunk's gates after j.
//           A_ij = scale q_i . D_ij k_j for j < i; A_ii = scale q_i . k_i (RWKV-6: scale q_i . u k_i)
//           dv_j = dS^T (L_j k_j) + sum_i A_ij do_i
//           D_ij is a factor of the query, its decay from a border, times a factor of the key, its decay to that
//           border. With the chunk in sub-chunks of 8 tokens, blocks of 16 and halves of 32, borders are those between
//           the halves (border32), else between the half's blocks (border16), else between the block's sub-chunks
//           (border8), else the sub-chunk's middle
// shapes    q k g [B, H, T, K], do dv [B, H, T, V], u [H, K] float32; chunk_states: see backward_states.cu
// grid      a block for every (batch, head, chunk, BV columns of V); a warp for every 16 tokens of dv
// smem      q, k, g and dS of 32 channels at a time, copied by all threads; operands of these channels, made by each
//           warp of 8 channels, read by all. Then do overwrites q, k and g, A the operands, and dv do
// barriers  two for every 32 channels: they have been copied | operands and dS are in shared memory. Then: operands
//           have been read, do is in shared memory | A is | do has been read | dv is in shared memory
// numerics  products as in fragments.cuh; scores as in backward_channels.cu, q_i . k_i in float32; if a gate of a
//           sub-chunk exceeds GROWTH, its scores are computed pair by pair (growth.cuh). Factors that make up for what
//           tf32 products cut off their operands: of scores that are products TF32_CORRECTION_OF_BOTH; of A do
//           TF32_CORRECTION<M> of A times TF32_CORRECTION<M, T> of do, in `scale`; of dS^T (L_j k_j)
//           TF32_CORRECTION_OF_BOTH, in `ends`
// source    Yang et al., 2024, section 4.4; Peng et al., 2024, eq. 18-19
// limits    BV of 64, 128
//
// From fragments.cuh. A product is D[16, 8] += A[16, 16] B[16, 8]
//   Math<T, PRODUCTS>  how data T are multiplied; Stored: the type of operands in memory
//   Left, Right        a lane's part of A, of B; RightData: of data as they are in memory
//   load_column        8 channels of 32 tokens: x[m] is this lane's channel and two tokens of sub-chunk m of the four
// From decays.cuh. a: the decays of a lane's two tokens (decays_of: of their log gates)
//   PairDecays(a)      the decays from the sub-chunk's start (`start`) and to its end (`end`)
//   MiddleFactors(a)   the factors about the sub-chunk's middle
//   product_over(x, first, end, factor) = factor times x[first ... end - 1]
// From backward.cuh and others
//   ChunkScores        a warp's blocks of 16 x 16 scores: `diagonal`, border8, border16, border32. In A border32 is
//                      block (half_row, half_column), border16 block (quarter + 1, quarter)
//   ChannelTokens      a tile [channel, token]; CHANNELS = 32. put_operands: stores the operands of scores there
//   load_matrices      two B side by side from a tile of a state, which consists of matrices [8, 8]
//   fetch_rows, store_rows  copy rows of an array to a tile of shared memory, and back
//   state_tile_index, matrix_index  where a tile of dS begins, and one of its matrices of 8 x 8
//   pair_of(lane), PAIRS  a pair of tokens of a sub-chunk, for score_of_pair (growth.cuh), and the number of pairs, 28
//   blocks_with_room   blocks of a multiprocessor, at most the given ones, whose shared memory fits
//   CHUNK = 64 and SUB_CHUNK = 8 tokens; NUM_SUBCHUNKS = 8 sub-chunks; TILE = 64
#include "gated/backward_scores.cuh"
#include "cards.cuh"

template <typename T, typename G> struct Args {
  StridedRows<const T> q, k, do_;
  StridedRows<const G> g;
  StridedRows<T> dv;
  const float* u;  // null for GLA
  const void* chunk_states;
  Shape shape;
  i64 first, heads;  // this launch computes heads first ... first + heads - 1
  double scale;
};

// 32 channels of the chunk's inputs [token, channel].
template <typename T, typename G> struct Tokens {
  T q[CHUNK * LD<T, CHANNELS>];  // [64, 32]
  T k[CHUNK * LD<T, CHANNELS>];
  G g[CHUNK * LD<G, CHANNELS>];
};

// Tiles [channel, token] of 32 channels: queries and keys times their decays.
template <typename Stored> struct Operands {
  ChannelTokens<Stored> queries, keys;  // from, and to, the middle of their sub-chunks
  // In the columns of tokens before a border: keys decayed to it; in those of tokens after it: queries decayed from it.
  ChannelTokens<Stored> border8, border16, border32;
  ChannelTokens<Stored> ends;  // L_j k_j
};

template <typename T, typename G, int PRODUCTS, int BV> struct alignas(16) Shared {
  using Stored = typename Math<T, PRODUCTS>::Stored;
  union {
    Tokens<T, G> tokens;
    T do_[CHUNK * LD<T, BV>];  // [64, BV]
  };
  union {
    Operands<Stored> operands;
    Stored A[CHUNK * LD<Stored, CHUNK>];  // [64, 64]
  };
  Stored dS[CHANNELS * BV];         // [32, BV] in matrices of 8 x 8
  float self_scores[WARPS][CHUNK];  // scores of tokens with themselves, over each warp's channels
  bool grows[NUM_SUBCHUNKS];        // whether a gate of the sub-chunk exceeds GROWTH
};

// Adds x, summed over the warp's 8 channels, to `sums`, one number for each token. x[m]: of this lane's channel and two
// tokens of sub-chunk first_subchunk + m; first_subchunk is 0 or 4. The loop halves the sub-chunks that a lane keeps.
__device__ __forceinline__ void sum_channels(float (&sums)[CHUNK], float2 (&x)[4], int first_subchunk) {
  const int g = threadIdx.x >> 2 & 7;
  const auto from_lane = [](float2 x, int lanes) {
    return float2{__shfl_xor_sync(0xffffffffu, x.x, lanes), __shfl_xor_sync(0xffffffffu, x.y, lanes)};
  };
#pragma unroll
  for (int half = 2; half > 0; half /= 2) {
    const bool upper = g & half;
#pragma unroll
    for (int m = 0; m < half; ++m)
      x[m] = (upper ? x[m + half] : x[m]) + from_lane(upper ? x[m] : x[m + half], 4 * half);
  }
  const float2 sum_of_lanes = x[0] + from_lane(x[0], 16);
  float2& sum = *reinterpret_cast<float2*>(sums + 8 * g + 2 * (threadIdx.x & 3));
  if ((g & 4) == first_subchunk) sum = sum + sum_of_lanes;  // two lanes have each sum: the one whose `sum` it is adds
}

// What a block computes: BV columns of dv of a chunk.
struct ColumnTile {
  int b, h, c, v_tile;  // batch, head, chunk, tile of BV columns
  Span span;            // the chunk's tokens
};

// A lane's place. Of the 32 channels in shared memory a warp has 8, from warp_channel on, and a lane has channel g of
// these, of tokens 2t and 2t + 1 of each sub-chunk.
struct Lane {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp_channel = 8 * warp;
};

// Starts copying q, k and g of part n of the channels, 32 of them.
template <typename T, typename G>
__device__ __forceinline__ void fetch_tokens(Tokens<T, G>& to, const Args<T, G>& args, const ColumnTile& work, int n) {
  const auto fetch = [&](auto* tile, const auto& rows) {
    fetch_rows<CHUNK, CHANNELS>(tile, rows, work.b, work.h, work.span.start, work.span.stop, n * CHANNELS,
                                args.shape.K);
  };
  fetch(to.q, args.q), fetch(to.k, args.k), fetch(to.g, args.g);
}

// Starts copying 32 channels of dS, from their first number in memory on. tiles: of 64 columns, from the block's first
// one to the last of V. A tile of a state [64 channels, 64 columns] is 8 x 8 matrices, a row of eight after the other
// (backward.cuh): 32 channels are PART neighbouring numbers of it. In shared memory the rows of a matrix are at
// row_in_matrix.
template <int BV, typename Stored>
__device__ __forceinline__ void fetch_state(Stored (&dS)[CHANNELS * BV], const Stored* from, int tiles) {
  constexpr int PART = CHANNELS * TILE, PIECE = 16 / sizeof(Stored);
#pragma unroll 1
  for (int index = threadIdx.x * PIECE; index < BV / TILE * PART; index += THREADS * PIECE)
    cp_async<16>(dS + (index / 64 * 8 + row_in_matrix<Stored>(index / 8 % 8)) * 8 + index % 8,
                 from + index / PART * (TILE * TILE) + index % PART, index / PART < tiles);
}

// Makes the warp's operands from the lane's channel of q, k and g; adds scores of tokens with themselves, u q_i . k_i,
// to self_scores; notes which sub-chunks grow.
template <class ReadOrder, typename T, typename G, int PRODUCTS, int BV>
__device__ __forceinline__ void make_operands(Shared<T, G, PRODUCTS, BV>& s, const Lane& at, float u) {
  using M = Math<T, PRODUCTS>;
  // Sets x to the lane's two tokens of each of sub-chunks m to m + 3.
  const auto load = [&](float2(&x)[4], const auto* from, int m, int ld) {
    load_column(x, from + 8 * m * ld + at.warp_channel, ld);
  };
  float sub_chunk_decays[NUM_SUBCHUNKS];
  float2 q[4], k[4], gates[4], self_terms[4];  // of four sub-chunks; self_terms: u q k
#pragma unroll
  for (int m = 0; m < NUM_SUBCHUNKS; ++m) {  // first all decays of sub-chunks, which the next loop multiplies
    if (m % 4 == 0) load(gates, s.tokens.g, m, LD<G, CHANNELS>);
    sub_chunk_decays[m] = decay_over_subchunk(gates[m % 4]);
    if (!(max_nan(gates[m % 4].x, gates[m % 4].y) <= GROWTH)) s.grows[m] = true;
  }
#pragma unroll
  for (int m = 0; m < NUM_SUBCHUNKS; ++m) {
    if (m % 4 == 0) {
      load(gates, s.tokens.g, m, LD<G, CHANNELS>);
      load(q, s.tokens.q, m, LD<T, CHANNELS>);
      load(k, s.tokens.k, m, LD<T, CHANNELS>);
    }
    const float2 decays_of_tokens = decays_of(gates[m % 4]), query = q[m % 4], key = k[m % 4];
    self_terms[m % 4] = u * query * key;
    const PairDecays<ReadOrder> decays(decays_of_tokens);
    const MiddleFactors<ReadOrder> middle(decays_of_tokens);
    // The query decayed from its sub-chunk's start, and the key decayed to its end.
    const float2 start = decays.start * query, end = decays.end * key;
    const int index = (at.warp_channel + at.g) * LD<typename M::Stored, CHUNK> + 8 * m + 2 * at.t;
    put_operands(s.operands, index, m, query, key, start, end, middle, sub_chunk_decays);
    put_pair(s.operands.ends + index,
             product_over(sub_chunk_decays, m + 1, NUM_SUBCHUNKS, TF32_CORRECTION_OF_BOTH<M>) * end);
    if (m % 4 == 3) sum_channels(s.self_scores[at.warp], self_terms, m - 3);
  }
}

// Adds the 32 channels' products to the warp's scores, and (L_j k_j)^T dS to dv of the warp's 16 tokens.
template <typename T, typename G, int PRODUCTS, int BV>
__device__ __forceinline__ void multiply_channels(ChunkScores& scores, float (&dv)[BV / 16][2][4],
                                                  const Shared<T, G, PRODUCTS, BV>& s, int warp) {
  using M = Math<T, PRODUCTS>;
  constexpr int LDT = LD<typename M::Stored, CHUNK>;
#pragma unroll 1
  for (int c = 0; c < CHANNELS; c += 16) {
    scores.add<M>(s.operands, c);
    Left<M> a;
    Right<M> b[2];
    load_left<TRANSPOSED>(a, s.operands.ends + c * LDT + 16 * warp, LDT);
#pragma unroll
    for (int x = 0; x < BV / 8; x += 2) {
      load_matrices(b, s.dS + x / (TILE / 8) * (CHANNELS * TILE) + matrix_index(c / 8, x % (TILE / 8)));
      multiply(dv[x / 2], a, b);
    }
  }
}

// Completes the block (warp, warp) of scores, products about the middles of its two sub-chunks: TF32's correction; for
// the second one's queries and the first one's keys border8; float32 scores of tokens with themselves; 0 for later
// keys.
template <class M>
__device__ __forceinline__ void complete_diagonal(ChunkScores& scores, const float (&self_scores)[WARPS][CHUNK],
                                                  const Lane& at) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int i = at.g + 8 * (x >> 1), j = 8 * half + 2 * at.t + (x & 1);
      float& score = scores.diagonal[half][x];
      score = TF32_CORRECTION_OF_BOTH<M> * (half == 0 && x >= 2 ? scores.border8[x] : score);
      if (j > i) score = 0.f;
      if (j == i) {
        score = 0.f;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) score += self_scores[other][16 * at.warp + i];
      }
    }
}

// Stores a block of 16 x 16 scores, times `factor`, in A: (row, column) of the chunk's 4 x 4.
template <typename Stored>
__device__ __forceinline__ void put_block(Stored* A, const float (&d)[2][4], int row, int column, float factor,
                                          const Lane& at) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int lower = 0; lower < 2; ++lower)
      put_pair(A + (16 * row + at.g + 8 * lower) * LD<Stored, CHUNK> + 16 * column + 8 * half + 2 * at.t,
               factor * float2{d[half][2 * lower], d[half][2 * lower + 1]});
}

// Replaces the scores within those of the warp's two sub-chunks that have a gate above GROWTH: lane n computes the n-th
// of 28 pairs (score_of_pair in growth.cuh). The warp has stored the scores that are replaced.
template <class ReadOrder, typename Stored, typename T, typename G>
__device__ __forceinline__ void replace_growing_scores(Stored* A, const bool (&grows)[NUM_SUBCHUNKS],
                                                       const Args<T, G>& args, const ColumnTile& work, float scale,
                                                       const Lane& at) {
#pragma unroll 1
  for (int n = 2 * at.warp; n < 2 * at.warp + 2; ++n) {
    if (!grows[n]) continue;
    __syncwarp();  // the scores that are replaced have been stored
    const i64 first_token = work.span.start + SUB_CHUNK * n, rows = min(i64(SUB_CHUNK), work.span.stop - first_token);
    const float score =
        score_of_pair<ReadOrder>(args.q.row(work.b, work.h, first_token), args.k.row(work.b, work.h, first_token),
                                 args.g.row(work.b, work.h, first_token), args.q.token_stride, args.k.token_stride,
                                 args.g.token_stride, int(rows), int(args.shape.K));
    const TokenPair pair = pair_of(at.lane);
    if (at.lane < PAIRS)
      A[(SUB_CHUNK * n + pair.query) * LD<Stored, CHUNK> + SUB_CHUNK * n + pair.key] =
          from_float<Stored>(scale * score);
  }
}

// Adds A^T do to dv of the warp's 16 tokens.
template <typename T, typename G, int PRODUCTS, int BV>
__device__ __forceinline__ void add_scores_times_do(float (&dv)[BV / 16][2][4], const Shared<T, G, PRODUCTS, BV>& s,
                                                    int warp) {
  using M = Math<T, PRODUCTS>;
  constexpr int LDT = LD<typename M::Stored, CHUNK>;
#pragma unroll
  for (int row = 0; row < CHUNK / 16; ++row) {
    if (row < warp) continue;  // uniform in the warp
    Left<M> a;                 // A^T of 16 keys, the warp's, and 16 queries
    load_left<TRANSPOSED>(a, s.A + 16 * row * LDT + 16 * warp, LDT);
#pragma unroll
    for (int x = 0; x < BV / 8; x += 2) {
      RightData<M, T> b[2];
      load_right<AS_STORED>(b, s.do_ + 16 * row * LD<T, BV> + 8 * x, LD<T, BV>);
      multiply(dv[x / 2], a, b);
    }
  }
}

// Stores dv of the warp's 16 tokens in a tile [64, BV] of shared memory.
template <int BV, typename T>
__device__ __forceinline__ void put_dv(T* to, const float (&dv)[BV / 16][2][4], const Lane& at) {
#pragma unroll
  for (int x = 0; x < BV / 8; ++x)
#pragma unroll
    for (int lower = 0; lower < 2; ++lower)
      put_pair(to + (16 * at.warp + at.g + 8 * lower) * LD<T, BV> + 8 * x + 2 * at.t,
               float2{dv[x / 2][x % 2][2 * lower], dv[x / 2][x % 2][2 * lower + 1]});
}

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6), read_order.cuh; T: the type of q, k, do and dv; G: that of g.
// PRODUCTS: tf32 products for each product of float32, 1 or 3.
template <class ReadOrder, typename T, typename G, int PRODUCTS, int BV>
__global__ void __launch_bounds__(
    THREADS, blocks_with_room<Shared<T, G, PRODUCTS, BV>>(sizeof(typename Math<T, PRODUCTS>::Stored) == 2 ? 3 : 2))
    gated_backward_values(const Args<T, G> args) {
  using M = Math<T, PRODUCTS>;
  using Stored = typename M::Stored;
  Shared<T, G, PRODUCTS, BV>& s = *reinterpret_cast<Shared<T, G, PRODUCTS, BV>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const Lane at;
  const int v_tiles = int((shape.V + BV - 1) / BV), v_tile = blockIdx.x % v_tiles;
  const u32 block = blockIdx.x / v_tiles, NC = u32(shape.NC), heads = u32(args.heads);  // block: chunk of all heads
  const int c = block % NC, h = int(args.first) + block / NC % heads, b = block / NC / heads;
  const ColumnTile work = {b, h, c, v_tile, chunk_tokens(shape, c)};

  const int tiles = int((shape.V + TILE - 1) / TILE), first_tile = v_tile * (BV / TILE);  // of 64 columns
  const Stored* chunk_states = static_cast<const Stored*>(args.chunk_states) +
                               state_tile_index(shape, heads, BACKWARDS, b, h - args.first, c, 0, first_tile);

  ChunkScores scores(at.warp);
  float dv[BV / 16][2][4] = {};
  *reinterpret_cast<float2*>(s.self_scores[at.warp] + 2 * at.lane) = {0.f, 0.f};
  __syncwarp();  // self_scores are zero
  const int channel_parts = int((shape.K + CHANNELS - 1) / CHANNELS);
  if (threadIdx.x < NUM_SUBCHUNKS)
    s.grows[threadIdx.x] = false;  // before the loop's first barrier; then threads set true
  fetch_tokens(s.tokens, args, work, 0);
  cp_async_commit();
#pragma unroll 1
  for (int n = 0; n < channel_parts; ++n) {
    cp_async_wait<0>();
    __syncthreads();  // these channels have been copied; the previous operands, and their dS, have been read
    fetch_state<BV>(s.dS, chunk_states + (i64(n * CHANNELS / TILE) * tiles * TILE + n * CHANNELS % TILE) * TILE,
                    tiles - first_tile);
    cp_async_commit();
    const int channel = n * CHANNELS + at.warp_channel + at.g;
    const float u = ReadOrder::reads_before_write ? channel < shape.K ? args.u[h * int(shape.K) + channel] : 0.f : 1.f;
    make_operands<ReadOrder>(s, at, u);
    cp_async_wait<0>();
    __syncthreads();  // the operands and dS are in shared memory; q, k and g have been read
    if (n + 1 < channel_parts) fetch_tokens(s.tokens, args, work, n + 1);
    else  // over q, k and g
      fetch_rows<CHUNK, BV>(s.do_, args.do_, b, h, work.span.start, work.span.stop, v_tile * BV, shape.V);
    cp_async_commit();
    multiply_channels(scores, dv, s, at.warp);
  }
  cp_async_wait<0>();
  __syncthreads();  // the operands have been read; do and self_scores are in shared memory
  // The factor of A, which is multiplied by do.
  const float scale = TF32_CORRECTION<M> * TF32_CORRECTION<M, T> * float(args.scale);
  complete_diagonal<M>(scores, s.self_scores, at);
  put_block(s.A, scores.diagonal, at.warp, at.warp, scale, at);
  put_block(s.A, scores.border32, scores.half_row, scores.half_column, TF32_CORRECTION_OF_BOTH<M> * scale, at);
  if (at.warp < 2)
    put_block(s.A, scores.border16, scores.quarter + 1, scores.quarter, TF32_CORRECTION_OF_BOTH<M> * scale, at);
  replace_growing_scores<ReadOrder>(s.A, s.grows, args, work, scale, at);
  __syncthreads();  // A is in shared memory
  add_scores_times_do(dv, s, at.warp);
  __syncthreads();  // do has been read, and is overwritten by dv
  put_dv<BV>(s.do_, dv, at);
  __syncthreads();  // dv is in shared memory
  store_rows<CHUNK, BV>(args.dv, s.do_, b, h, work.span.start, work.span.stop, v_tile * BV, shape.V);
}
