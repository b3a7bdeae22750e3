// what      GLA with a value gate, backward: the state S before every chunk, forwards in time, and the gradient dS of
//           the state after every chunk, backwards in time.
// math      per chunk of 64 tokens, with diagonal matrices of the decays over the chunk, D of channels, E of columns:
//           S <- D S E + (k decayed to the chunk's end)^T (v decayed to its end);   backwards
//           dS <- D dS E + scale (q decayed from the chunk's start)^T (do decayed from its start)
//           A block walks in one direction, and calls S what it walks with: S, or dS
// shapes    From backward_scores.cu, with K and V padded to multiples of 8 (padded_width): decayed q k [B, heads,
//           T, K] and v do [B, heads, T, V], channel_decays [B, heads, NC, K], column_decays [B, heads, NC, V] float32;
//           channel_growth, column_growth [B, heads, NC] float32: the largest sum over the chunk of one channel's
//           (column's) gates above 0, in nats, or 0 if no gate is above 1 nat. Not padded: g, given_q, given_k [B, H,
//           T, K], gv, given_v, given_do [B, H, T, V], the caller's arrays; initial, dht (the gradient of the last
//           state), dh0 (of the initial one) [N, H, K, V] float32, N sequences of all batch rows. chunk_states: every
//           chunk's S before it, then every chunk's dS after it, in tiles of 64 x 64 (state_tile_index, backward.cuh)
// grid      value_gate.py launches a block for every (direction, sequence, head, tile of 64 channels, tile of 64
//           columns), directions slowest; a warp for every 16 channels
// smem      Stage, STAGES times: 32 tokens
// barriers  one every 32 tokens: they have been copied, and the previous ones have been read
// numerics  S and dS in float32 accumulators; products as in fragments.cuh. If channel_growth + column_growth of a
//           chunk is above BY_CHUNK (16 nats), it is computed token by token (by_token.cuh)
// source    Yang et al., 2024, sections 4.1 and 4.4
// tests     test_value_gate; test_compile (no spills)
//
// Names. Math<T, PRODUCTS> (fragments.cuh) is how data T are multiplied; Stored, the type of operands in memory. A
// product is D[16, 8] += A[16, 16] B[16, 8]: LeftData and RightData are a lane's part of A and B; load_left, and
// load_right (two B side by side) read them from tiles, AS_STORED or TRANSPOSED. CHUNK = 64 tokens; TILE = 64 channels
// or columns. LD<Stored, TILE>: the distance of a tile's rows in shared memory. fetch_rows (backward.cuh) starts copies
// of rows. state_tile_index: the place of a tile of 64 x 64 in chunk_states, where store_in_tiles stores the warp's
// part of S; each_number: calls a function with the lane's numbers of S that exist, and their places in a state [K, V].
// tokens_at(x, ..., first): rows of an array, read number by number; its at(i, c, width): of token i and channel first
// + c, or 0 from c = width on.
#include "backward.cuh"
#include "value_gate/by_token.cuh"

constexpr int STEP = 32, STEPS = CHUNK / STEP;  // tokens of a stage, and stages of a chunk

template <typename T, typename G, typename Stored> struct Args {
  StridedRows<const Stored> q, k, v, do_;
  StridedRows<const T> given_q, given_k, given_v, given_do;
  StridedRows<const G> g, gv;
  const float *channel_decays, *column_decays, *channel_growth, *column_growth;
  const float *initial, *dht;  // null: zero
  void* chunk_states;
  float* dh0;  // null: not wanted
  Shape shape;
  i64 first, heads;  // this launch computes heads first ... first + heads - 1
  double scale;
};

constexpr int STAGES = 3;  // steps of 32 tokens in shared memory at a time
template <typename Stored> struct alignas(16) Stage {
  Stored x[STEP * LD<Stored, TILE>];  // [32, 64], k or q
  Stored y[STEP * LD<Stored, TILE>];  // [32, 64], v or do
  // The chunk's decays of the tile's channels and columns; set only in the last of a chunk's stages in the walk's
  // order.
  float decays[2][TILE];
};

template <typename T, int PRODUCTS> struct Shared {
  Stage<typename Math<T, PRODUCTS>::Stored> stages[STAGES];
};

// A lane's part of a tile of S or dS: S[n / 2][n % 2][2h + p] is channel g + 8h of the warp's 16, column 8n + 2t + p,
// with g = lane / 4 and t = lane % 4.
using StatePart = float[TILE / 16][2][4];

// Computes S after a chunk from S before it, or backwards dS before the chunk, token by token. grown(x, nats): x
// e^nats. S is in memory, so that the caller needs no registers for it here. `channel` and `column`: of the part's
// first number.
template <class Args>
__device__ __noinline__ void compute_token_by_token(StatePart& S, const Args& args, i64 b, i64 h, i64 chunk,
                                                    int channel, int column, bool backwards) {
  const Span span = chunk_tokens(args.shape, chunk);
  const auto tokens = [&](const auto& x, int first) { return tokens_at(x, b, h, span.start, first); };
  const auto x = tokens(backwards ? args.given_q : args.given_k, channel);
  const auto y = tokens(backwards ? args.given_do : args.given_v, column);
  const auto g = tokens(args.g, channel);
  const auto gv = tokens(args.gv, column);
  const int rows = int(span.stop - span.start), channels = int(args.shape.K) - channel,
            columns = int(args.shape.V) - column;
  const float scale = backwards ? float(args.scale) : 1.f;
#pragma unroll 1
  for (int index = 0; index < rows; ++index) {
    const int i = backwards ? rows - 1 - index : index;
#pragma unroll 1
    for (int n = 0; n < TILE / 2; ++n) {
      const int row = n / 2 % 2 * 8, across = n / 4 * 8 + n % 2;
      float& state = S[n / 8][n / 4 % 2][n % 4];
      const float added = scale * x.at(i, row, channels) * y.at(i, across, columns);
      const float nats = g.at(i, row, channels) + gv.at(i, across, columns);
      state = backwards ? grown(state + added, nats) : grown(state, nats) + added;
    }
  }
}

// T: the type of the caller's arrays; G: of the gates. PRODUCTS: tf32 products for each product of float32, 1 or 3.
template <typename T, typename G, int PRODUCTS>
__global__ void __launch_bounds__(THREADS, sizeof(typename Math<T, PRODUCTS>::Stored) == 2 ? 4 : 2)
    value_gate_backward_states(const __grid_constant__ Args<T, G, typename Math<T, PRODUCTS>::Stored> args) {
  using M = Math<T, PRODUCTS>;
  using Stored = typename M::Stored;
  auto& s = *reinterpret_cast<Shared<T, PRODUCTS>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const int v_tiles = int((shape.V + TILE - 1) / TILE), k_tiles = int((shape.K + TILE - 1) / TILE);
  const bool backwards = blockIdx.x >= gridDim.x / 2;
  const u32 block = blockIdx.x - backwards * (gridDim.x / 2), tiles = v_tiles * k_tiles, heads = u32(args.heads);
  const int v_tile = block % v_tiles, k_tile = block / v_tiles % k_tiles, head = block / tiles % heads;
  const int sequence = block / tiles / heads, batch = sequence / int(shape.row_sequences);
  const Span span = tokens_of(shape, sequence % shape.row_sequences);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int K = int(shape.K), V = int(shape.V);
  const int channel = k_tile * TILE + 16 * warp + g, column = v_tile * TILE + 2 * t;

  StatePart S = {};
  const i64 state_offset = ((sequence * shape.H) + args.first + head) * i64(K) * V;
  if (const float* given = backwards ? args.dht : args.initial)
    each_number(S, channel, column, K, V, [&](float& x, i64 index) { x = given[state_offset + index]; });

  const int chunks = int((span.stop - span.start + CHUNK - 1) / CHUNK), steps = STEPS * chunks;
  const int read = backwards && args.dh0 ? steps : steps - STEPS;  // nobody else wants the state behind the last chunk
  const i64 first_chunk = chunks_of(shape, sequence % shape.row_sequences).start;
  // A step is 32 tokens, in the order of the walk. chunk_of: its chunk in the batch row. `fetch` starts to copy its
  // tokens to stage step % STAGES, and commits a group of copies also if there is no such step.
  const auto chunk_of = [&](int step) { return first_chunk + (backwards ? chunks - 1 - step / STEPS : step / STEPS); };
  const auto fetch = [&](int step) {
    if (step < read) {
      Stage<Stored>& in = s.stages[step % STAGES];
      const i64 token = span.start + STEP * (backwards ? steps - 1 - step : step), stop = span.stop;
      const i64 width[2] = {padded_width(K), padded_width(V)};
      fetch_rows<STEP, TILE>(in.x, backwards ? args.q : args.k, batch, head, token, stop, k_tile * TILE, width[0]);
      fetch_rows<STEP, TILE>(in.y, backwards ? args.do_ : args.v, batch, head, token, stop, v_tile * TILE, width[1]);
      if (step % STEPS == STEPS - 1 && threadIdx.x < 2 * TILE / 4) {
        const int side = threadIdx.x / (TILE / 4), index = threadIdx.x % (TILE / 4) * 4;
        const i64 first = (side ? v_tile : k_tile) * TILE + index,
                  chunk = chunk_of_launch(shape, heads, batch, head, chunk_of(step));
        const bool exists = first < width[side];
        const float* from =
            (side ? args.column_decays : args.channel_decays) + (exists ? chunk * width[side] + first : 0);
        cp_async<16>(in.decays[side] + index, from, exists);
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) fetch(step);
  StatePart added = {};   // what this chunk's tokens add
  bool by_token = false;  // whether this chunk was computed token by token, alike in all threads
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<STAGES - 2>();  // leaves the later steps' copies under way, each a group, maybe an empty one
    __syncthreads();              // this step's tokens have been copied; the previous ones have been read
    fetch(step + STAGES - 1);
    if (step % STEPS == 0) {  // a chunk begins: stores S, rounded, for the kernels that compute gradients
      Stored* to = static_cast<Stored*>(args.chunk_states) +
                   state_tile_index(shape, heads, backwards, batch, head, chunk_of(step), k_tile, v_tile);
      store_in_tiles(to, S, false);
      if (step >= read) break;
      const i64 chunk = chunk_of_launch(shape, heads, batch, head, chunk_of(step));
      by_token = args.channel_growth[chunk] + args.column_growth[chunk] > BY_CHUNK;
      if (by_token) {
        StatePart in_memory;
#pragma unroll
        for (int n = 0; n < TILE / 2; ++n) in_memory[n / 8][n / 4 % 2][n % 4] = S[n / 8][n / 4 % 2][n % 4];
        compute_token_by_token(in_memory, args, batch, args.first + head, chunk_of(step), channel, column, backwards);
#pragma unroll
        for (int n = 0; n < TILE / 2; ++n) S[n / 8][n / 4 % 2][n % 4] = in_memory[n / 8][n / 4 % 2][n % 4];
      }
    }
    if (by_token) continue;
    const Stage<Stored>& in = s.stages[step % STAGES];
    // added[channel, column] += x^T y over the step's tokens.
#pragma unroll
    for (int m = 0; m < STEP / 16; ++m) {
      LeftData<M, Stored> a;
      load_left<TRANSPOSED>(a, in.x + 16 * m * LD<Stored, TILE> + 16 * warp, LD<Stored, TILE>);
#pragma unroll
      for (int n = 0; n < TILE / 8; n += 2) {
        RightData<M, Stored> b[2];
        load_right<AS_STORED>(b, in.y + 16 * m * LD<Stored, TILE> + 8 * n, LD<Stored, TILE>);
        multiply(added[n / 2], a, b);
      }
    }
    if (step % STEPS == STEPS - 1) {  // the chunk ends. The correction is for both operands, cut off to tf32
      const float factor = TF32_CORRECTION_OF_BOTH<M> * (backwards ? float(args.scale) : 1.f);
#pragma unroll
      for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const float decay = in.decays[0][16 * warp + g + 8 * (x >> 1)] * in.decays[1][8 * n + 2 * t + (x & 1)];
          float &number = S[n / 2][n % 2][x], &addition = added[n / 2][n % 2][x];
          number = fmaf(decay, number, factor * addition);
          addition = 0.f;
        }
    }
  }
  cp_async_wait<0>();
  if (backwards && args.dh0)
    each_number(S, channel, column, K, V, [&](float& x, i64 index) { args.dh0[state_offset + index] = x; });
}
