// what      GLA with a value gate, backward: the scores of a chunk's pairs of tokens, its queries decayed from the
//           chunk's start, and its keys decayed to its end. Launched twice: with q, k, the channels' gates g, and K;
//           and with do, v, the columns' gates gv, and V in their places. Below, q, k, g and K are the launch's.
//           backward_states.cu and gated/backward_channels.cu read the results.
// math      A_ij = scale q_i . decay_ij k_j for j < i, decay_ij [K] = exp of the sum of the log gates g from j + 1 to
//           i; A_ii = scale q_i . k_i, in `diagonal`;
//           starts: q decayed from the chunk's start; ends: k decayed to its end; decays: those over the chunk
// shapes    q k g [B, H, T, K]; starts, ends [B, heads, T, K], decays [B, heads, NC, K] float32, all three with K
//           padded (padded_width); scores [B, heads, NC, 64, 64], whose blocks above the diagonal are not written,
//           diagonal [B, heads, NC, 64], growth [B, heads, NC] float32; scores, starts and ends are bfloat16 if T is,
//           else float32
// grid      value_gate.py launches a block for every (batch, head, chunk)
// smem      32 channels at a time: q, k, g, the operands made of them, starts and ends
// barriers  two for every 32 channels: they have been copied | operands, starts and ends are stored. Then: the diagonal
//           is stored
// numerics  products as in fragments.cuh. A pair's decay is the product of two factors, the key's decay to a border
//           between both tokens and the query's from it (gated/backward_scores.cuh); within a sub-chunk of 8 tokens
//           both are factors about its middle, some of them inverse decays (MiddleFactors in decays.cuh). q_i . k_i is
//           float32. If a gate is above GROWTH (1 nat), pairs in a sub-chunk are computed one by one (growth.cuh).
//           Scores in a sub-chunk, and only these, are stored times NEAR_SCALE = 2^22 (backward.cuh): otherwise
//           products of them and small decays would be below float32's normal numbers. gated/backward_channels.cu
//           divides its sums by it. growth: the largest sum of one channel's positive gates over the chunk if a gate is
//           above GROWTH, else 0
// source    Yang et al., 2024, sections 4.1 and 4.4
// tests     test_value_gate; test_compile (no spills)
//
// From fragments.cuh and decays.cuh
//   Math<T, PRODUCTS>   how data T are multiplied; Stored: the type of operands in memory
//   load_column         a lane's tokens of a channel from a tile
//   PairDecays(a)       of the decays a of a lane's two tokens: those from the sub-chunk's start (`start`) and to its
//                       end (`end`); MiddleFactors(a): the factors about its middle
//   product_over(x, first, end) = x[first ... end - 1] multiplied; decays_of(gates): two tokens' decays;
//                       decay_over_subchunk: that of a channel, from its four lanes. AfterWrite: queries read after
//                       their token's write, as GLA's; put_pair: stores two neighbours
// From backward.cuh and gated/backward_scores.cuh
//   ChunkScores         a warp's blocks of 16 x 16 scores and their places: half_row, half_column and quarter
//   ChannelTokens       a tile [channel, token]; CHANNELS = 32. put_operands: stores the operands of scores there
//   fetch_rows, store_rows  copy rows of an array to a tile of shared memory, and back
//   CHUNK = 64 and SUB_CHUNK = 8 tokens; NUM_SUBCHUNKS = 8; THREADS = 128, WARPS = 4
// From others
//   score_of_pair       gives lane n the score of the pair of tokens pair_of(n)
//   tokens_at           an array's rows in memory; growth_of: the largest sum of positive gates
#include "gated/backward_scores.cuh"
#include "value_gate/by_token.cuh"

template <typename T, typename G, typename Stored> struct Args {
  StridedRows<const T> q, k;
  StridedRows<const G> g;
  StridedRows<Stored> starts, ends;
  Stored* scores;
  float *diagonal, *decays, *growth;
  Shape shape;
  i64 first, heads;  // this launch computes heads first ... first + heads - 1
  double scale;
};

template <typename T, typename G, int PRODUCTS> struct alignas(16) Shared {
  using Stored = typename Math<T, PRODUCTS>::Stored;
  T q[CHUNK * LD<T, CHANNELS>];  // [64, 32]
  T k[CHUNK * LD<T, CHANNELS>];
  G g[CHUNK * LD<G, CHANNELS>];
  ChannelTokens<Stored> queries, keys;  // decayed from and to the middle of their sub-chunk
  // Columns of tokens before a border have keys decayed to it, those of tokens after it queries decayed from it.
  // border8: borders in the middle of each 16 tokens; border16: of each 32 tokens; border32: of the chunk.
  ChannelTokens<Stored> border8, border16, border32;
  Stored starts[CHUNK * LD<Stored, CHANNELS>];  // [64, 32]
  Stored ends[CHUNK * LD<Stored, CHANNELS>];
  float self_products[WARPS][CHUNK];  // the diagonal, over each warp's channels
  bool grows[NUM_SUBCHUNKS];          // whether a gate of the sub-chunk exceeds GROWTH
};

// Makes operands, starts and ends of the 32 channels in shared memory, from `first_channel` on, of which a warp has 8,
// from warp_channel on. A lane has channel g of these, and tokens 2t and 2t + 1 of each of the NUM_SUBCHUNKS
// sub-chunks. Adds q k of these tokens to self_products; stores the channels' decays over the chunk, `width` of them
// in all, and which sub-chunks grow.
template <typename T, typename G, int PRODUCTS>
__device__ __forceinline__ void make_operands(Shared<T, G, PRODUCTS>& s, float2 (&self_products)[NUM_SUBCHUNKS],
                                              float* chunk_decays, i64 first_channel, i64 width) {
  using Stored = typename Math<T, PRODUCTS>::Stored;
  constexpr int LDT = LD<Stored, CHUNK>, LDC = LD<Stored, CHANNELS>;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp_channel = 8 * (threadIdx.x >> 5);
  // Sets x to the lane's two tokens of each of sub-chunks m to m + 3.
  const auto load = [&](float2(&x)[4], const auto* from, int m, int ld) {
    load_column(x, from + 8 * m * ld + warp_channel, ld);
  };
  // Stores x, the lane's two tokens of sub-chunk m, in a tile [token, channel].
  const auto put_tokens = [&](Stored* tile, int m, float2 x) {
    Stored* to = tile + (8 * m + 2 * t) * LDC + warp_channel + g;
    to[0] = from_float<Stored>(x.x), to[LDC] = from_float<Stored>(x.y);
  };
  float sub_chunk_decays[NUM_SUBCHUNKS];  // of the four lanes of a channel together
  float2 q[4], k[4], gates[4];            // of four sub-chunks
#pragma unroll
  for (int m = 0; m < NUM_SUBCHUNKS; ++m) {
    if (m % 4 == 0) load(gates, s.g, m, LD<G, CHANNELS>);
    sub_chunk_decays[m] = decay_over_subchunk(gates[m % 4]);
    if (!(max_nan(gates[m % 4].x, gates[m % 4].y) <= GROWTH)) s.grows[m] = true;
  }
  const i64 channel = first_channel + warp_channel + g;
  if (t == 0 && channel < width) chunk_decays[channel] = product_over(sub_chunk_decays, 0, NUM_SUBCHUNKS);
#pragma unroll
  for (int m = 0; m < NUM_SUBCHUNKS; ++m) {
    if (m % 4 == 0) {
      load(gates, s.g, m, LD<G, CHANNELS>);
      load(q, s.q, m, LD<T, CHANNELS>);
      load(k, s.k, m, LD<T, CHANNELS>);
    }
    const float2 token_decays = decays_of(gates[m % 4]), query = q[m % 4], key = k[m % 4];
    self_products[m] = self_products[m] + query * key;
    const PairDecays<AfterWrite> decays(token_decays);
    const MiddleFactors<AfterWrite> middle(token_decays);
    // The queries decayed from their sub-chunk's start, and the keys decayed to its end.
    const float2 start = decays.start * query, end = decays.end * key;
    put_operands(s, (warp_channel + g) * LDT + 8 * m + 2 * t, m, query, key, start, end, middle, sub_chunk_decays);
    put_tokens(s.starts, m, product_over(sub_chunk_decays, 0, m) * start);
    put_tokens(s.ends, m, product_over(sub_chunk_decays, m + 1, NUM_SUBCHUNKS) * end);
  }
}

// Stores the products of tokens with themselves, x of this lane's channels, summed over the warp's.
__device__ __forceinline__ void put_self_products(float (&to)[CHUNK], float2 (&x)[NUM_SUBCHUNKS]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int m = 0; m < NUM_SUBCHUNKS; ++m) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2)
      x[m] = x[m] + float2{__shfl_xor_sync(0xffffffffu, x[m].x, lanes), __shfl_xor_sync(0xffffffffu, x[m].y, lanes)};
    if (lane >> 2 == m) *reinterpret_cast<float2*>(to + 8 * m + 2 * (lane & 3)) = x[m];
  }
}

// Completes the block (warp, warp): scores of its two sub-chunks from products about their middles, those of the second
// one's queries with the first one's keys from border8, and 0 for the token itself and later ones.
__device__ __forceinline__ void complete_diagonal(ChunkScores& scores) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int i = (lane >> 2) + 8 * (x >> 1), j = 8 * half + 2 * (lane & 3) + (x & 1);
      if (half == 0 && x >= 2) scores.diagonal[half][x] = scores.border8[x];
      else scores.diagonal[half][x] *= NEAR_SCALE;
      if (j >= i) scores.diagonal[half][x] = 0.f;
    }
}

// T: the type of q and k; G: that of g. PRODUCTS: tf32 products for each product of float32, 1 or 3. 4 or 2: the blocks
// whose registers a multiprocessor is to hold at once.
template <typename T, typename G, int PRODUCTS>
__global__ void __launch_bounds__(THREADS, sizeof(typename Math<T, PRODUCTS>::Stored) == 2 ? 4 : 2)
    value_gate_backward_scores(const Args<T, G, typename Math<T, PRODUCTS>::Stored> args) {
  using M = Math<T, PRODUCTS>;
  using Stored = typename M::Stored;
  auto& s = *reinterpret_cast<Shared<T, G, PRODUCTS>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u32 NC = u32(shape.NC), heads = u32(args.heads);
  // The chunk is number `chunk` in the results, as chunk_of_launch (backward.cuh) counts; the head is number `head` of
  // this launch's, h of all; b: the batch row.
  const int chunk_of_row = blockIdx.x % NC, head = blockIdx.x / NC % heads, b = blockIdx.x / NC / heads;
  const i64 h = args.first + head, chunk = blockIdx.x, width = padded_width(shape.K);
  const Span span = chunk_tokens(shape, chunk_of_row);

  // Starts to copy the n-th 32 channels.
  const auto fetch = [&](int n) {
    const i64 channel = n * CHANNELS, start = span.start, stop = span.stop;
    fetch_rows<CHUNK, CHANNELS>(s.q, args.q, b, h, start, stop, channel, shape.K);
    fetch_rows<CHUNK, CHANNELS>(s.k, args.k, b, h, start, stop, channel, shape.K);
    fetch_rows<CHUNK, CHANNELS>(s.g, args.g, b, h, start, stop, channel, shape.K);
  };
  ChunkScores scores(warp);
  float2 self_products[NUM_SUBCHUNKS] = {};  // products of tokens with themselves, over this lane's channels
  const int channel_parts = int((shape.K + CHANNELS - 1) / CHANNELS);
  if (threadIdx.x < NUM_SUBCHUNKS) s.grows[threadIdx.x] = false;
  fetch(0);
  cp_async_commit();
#pragma unroll 1
  for (int n = 0; n < channel_parts; ++n) {
    cp_async_wait<0>();
    __syncthreads();  // these channels have been copied; operands, starts and ends of the previous ones have been read
    make_operands(s, self_products, args.decays + chunk * width, n * CHANNELS, width);
    __syncthreads();  // operands, starts and ends are stored; the tokens have been read
    if (n + 1 < channel_parts) fetch(n + 1);
    cp_async_commit();
    store_rows<CHUNK, CHANNELS>(args.starts, s.starts, b, head, span.start, span.stop, n * CHANNELS, width);
    store_rows<CHUNK, CHANNELS>(args.ends, s.ends, b, head, span.start, span.stop, n * CHANNELS, width);
    // Adds the products of 16 channels of s.queries, s.keys and the borders' tiles to the warp's scores.
#pragma unroll 1
    for (int channel = 0; channel < CHANNELS; channel += 16) scores.add<M>(s, channel);
  }
  const float scale = float(args.scale);
  put_self_products(s.self_products[warp], self_products);
  // Stores a block of 16 x 16 scores, (row, column) of the chunk's 4 x 4. TF32_CORRECTION_OF_BOTH: of the products that
  // the scores are; STORED_SCORE: of those that gated/backward_channels.cu makes of them. Both are 1 for bfloat16.
  const auto put = [&](const float (&d)[2][4], int row, int column) {
    Stored* to = args.scores + chunk * (CHUNK * CHUNK) + 16 * row * CHUNK + 16 * column;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int lower = 0; lower < 2; ++lower)
        put_pair(
            to + (g + 8 * lower) * CHUNK + 8 * half + 2 * t,
            TF32_CORRECTION_OF_BOTH<M> * STORED_SCORE<M> * scale * float2{d[half][2 * lower], d[half][2 * lower + 1]});
  };
  complete_diagonal(scores);
  put(scores.diagonal, warp, warp);
  put(scores.border32, scores.half_row, scores.half_column);
  if (warp < 2) put(scores.border16, scores.quarter + 1, scores.quarter);
  __syncthreads();  // s.self_products and s.grows of all warps are stored, and so are the scores that are replaced
  bool grows = false;
#pragma unroll 1
  for (int n = 0; n < NUM_SUBCHUNKS; ++n) {  // a warp replaces those of its two sub-chunks that grow
    grows = grows || s.grows[n];
    if (n / 2 != warp || !s.grows[n]) continue;
    // rows: 0 or less if the sub-chunk is after the sequence's end; then score_of_pair reads nothing and returns 0.
    const i64 first_token = span.start + SUB_CHUNK * n, rows = min(i64(SUB_CHUNK), span.stop - first_token);
    const float score = score_of_pair<AfterWrite>(args.q.row(b, h, first_token), args.k.row(b, h, first_token),
                                                  args.g.row(b, h, first_token), args.q.token_stride,
                                                  args.k.token_stride, args.g.token_stride, int(rows), int(shape.K));
    const TokenPair pair = pair_of(lane);  // lane n computes the n-th of 28 pairs
    Stored* to =
        args.scores + chunk * (CHUNK * CHUNK) + (SUB_CHUNK * n + pair.query) * CHUNK + SUB_CHUNK * n + pair.key;
    if (lane < PAIRS) *to = from_float<Stored>(NEAR_SCALE * STORED_SCORE<M> * scale * score);
  }
  if (warp == 0) {
    const Tokens<G> gates = tokens_at(args.g, b, h, span.start, 0);
    args.growth[chunk] = grows ? growth_of(gates, int(span.stop - span.start), int(shape.K)) : 0.f;
  }
  if (threadIdx.x < CHUNK) {
    float sum = 0.f;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) sum += s.self_products[other][threadIdx.x];
    args.diagonal[chunk * CHUNK + threadIdx.x] = scale * sum;
  }
}
