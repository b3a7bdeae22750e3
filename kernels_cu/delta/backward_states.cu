// what      The delta rules' walks over prepared chunks of 32 tokens, for gradients. Forwards: the state S [K, V]
//           before every chunk, and the residual of every token: its value minus what its key reads from the state;
//           RWKV-7: what its vector a reads. Backwards: the gradient dS of the state after every chunk, dv, and
//           dresidual, the gradient of beta times the residual (RWKV-7: of the residual), which is also that of beta X
//           (of Y) below. Without OUTPUTS, what a segment of a sequence does to a state, from S to F S + G, and to a
//           state's gradient, from dS to F^T dS + G'. A launch computes both directions (BOTH), or one: the call itself
//           ONLY_FORWARDS, which also writes o, and its pullback ONLY_BACKWARDS, whose host has F from the call
// math      The kernels *prepare.cu make of every chunk a PreparedForGradients (prepared.cuh). E, W, Z and Zb have a
//           row [K] for each token, B, H, R and L are [32, 32] and 0 above the diagonal. TWO_WRITES: RWKV-7, which
//           writes v and Y along different rows; it alone has Zb, H and L.
//             D   decay  of each channel over the chunk
//             E   E      reads S for residuals: keys times -1 (RWKV-7: vectors a), decayed from the chunk's start
//             W   W      reads S for o, times scale: queries, decayed likewise, plus what o gets of Y, which reads S
//             Z   Z[0]   beta X (TWO_WRITES: v) is written to S along its rows, decayed to the chunk's end
//             Zb  Z[1]   likewise Y
//             B   B[0]   what o gets of beta v (TWO_WRITES: of v), without scale
//             H   B[1]   what o gets of Y, without scale. W has scale H E in it: only the walk backwards reads H
//             R   residual_matrix[0]   makes residuals of X (TWO_WRITES: of Y)
//             L   residual_matrix[1]   makes residuals of v
//           Forwards: Y = E S;  X = v + Y;  residual = R X;  S <- D S + Z^T beta X
//           TWO_WRITES: residual = R Y + L v;  S <- D S + Zb^T Y + Z^T v
//           ONLY_FORWARDS: o = W S + scale B beta v, TWO_WRITES: o = W S + scale B v
//           Backwards: P = Z dS;  dresidual = P + scale B^T do;  dv = beta dresidual;
//           dS <- D dS + W^T do + E^T beta P
//           TWO_WRITES: P = Zb dS;  dresidual = P + scale H^T do;  dv = Z dS + scale B^T do;
//           dS <- D dS + W^T do + E^T P
// shapes    v o do dv [B, HV, T, V]; initial final dht dh0 [N, HV, K, V] float32; prepared [B, HV, NC]; dresidual
//           [B, HV, T, V padded with zeros to a multiple of 64]; residual: with TWO_WRITES as dresidual; otherwise a
//           row has V numbers and zeros to a multiple of 64, and, for 16-bit data, as many rounding errors after them;
//           chunk_states, state_gradients: backward_storage.cuh; starts, F: scan.cu
// grid      a block for every (direction, segment, head of values, BV columns), directions slowest; a warp for every
//           16 columns, or, without OUTPUTS, for every tiles_of_warp times 16. Forwards the blocks of F's columns
//           follow those of G's
// smem      a ring of STAGES: the bytes of a prepared chunk that the walk reads, and its v or do
// barriers  one in is_whole, which BlockOfWalk calls: its threads agree whether a number is not finite; one a chunk: it
//           has arrived, and the previous chunk has been read; these are two barriers if STAGES is 1
// numerics  S and dS in float32 accumulators; X, beta X, Y, P, beta P, residuals, their gradients, chunk_states and
//           state_gradients are rounded to T; errors of residuals are kept as `shapes` says
// source    Yang et al., 2024 (2412.06464), section 3.3; the gradient takes the same matrices, transposed
// limits    T of bfloat16, float16, single (float32: operands.cuh); K <= BK; BK of 64, 128, 256; BV of 32, 64,
//           128; STAGES >= 1
// tests     test_delta_kernels: test_gradients (BOTH), test_gradients_from_what_a_call_keeps (one direction),
//           test_segments (without OUTPUTS)
#include "delta/backward_storage.cuh"
#include "delta/chunk.cuh"
#include "delta/prepared.cuh"
#include "delta/walk.cuh"

// From the includes:
//   shape.H: heads of values; shape.NC: chunks of a batch row
//   BT = 32 tokens, TILE = 64
//   LowerMatrix<T>: a lower triangle [32, 32], each number the sum of NUMBERS of T: 2 of 16 bits, or 1 `single`
//   State<BK>: a warp's 16 columns of a state; padded(V): V rounded up to a multiple of 64
//   read_transposed: y += rows S, and, if given o and W, o += W S; read_twice: y[i] += rows[i] S for two i; write_rows:
//     S += rows^T x; load_packed: operands x from a tile; pack_tokens: from sums y; add_packed: y += x;
//     multiply_packed: sums += M x
//   BlockOfWalk: the block's segment, its tokens, and its columns; it loads the state that the walk starts from, and
//     stores the last one. take_chunk: waits for a chunk, and has a later one copied
//   blocks_of_walk: how many blocks share a multiprocessor; tiles_of_warp: how many times 16 columns a warp has
//   add_tokens: y += scale M^T x; word_of: two numbers rounded to T; pack, unpack: the same for 16 bits, and back
//   copy_prepared, copy_chunk: start copies of a prepared chunk, of a chunk's rows
//   Accumulators x: a warp's sums [32 tokens, 16 columns]; with g = lane / 4 and t = lane % 4, x[m][across][2 down + p]
//     is token 16 m + 8 down + g, column 8 across + 2t + p
//   decay_state: S <- diag(decay) S; state_index: where chunk_states has a chunk's state, and state_gradients its
//     gradient. weigh_tokens: x times factors of tokens, as a sum of two for 16-bit data

template <typename T> struct Args {
  StridedRows<const T> v, do_;                // those of another direction are null, here and below
  StridedRows<const float> initial, dht;      // null: zeros
  StridedRows<float> final, dh0;              // null: not wanted
  StridedRows<T> o, dv, residual, dresidual;  // null without OUTPUTS; o: of ONLY_FORWARDS
  T *chunk_states, *state_gradients;          // null without OUTPUTS
  float *starts, *F;                          // null if no sequence is cut into segments; F is null with OUTPUTS, too
  const void* prepared;                       // PreparedForGradients of each chunk
  Shape shape;                                // H: heads of values; its sequences are the call's segments
  i64 P;                                      // segments of a sequence
  double scale;
  i64 bytes;  // 16, 8, 4 or 2: all rows of v, o, do and dv start on multiples of it, and are multiples long
};

enum Directions { BOTH, ONLY_FORWARDS, ONLY_BACKWARDS };

// The bytes FROM ... STOP - 1 of a prepared chunk that a walk reads, and values of v, or, BACK, of do. The chunk's
// members follow each other in this order (PreparedForGradients, prepared.cuh): R and L, which the walk forwards reads
// with OUTPUTS; E, Z, decay and beta, which both read; W, which the walk backwards and ONLY_FORWARDS read; B, which
// these read with OUTPUTS; with TWO_WRITES H, which the walk backwards reads with OUTPUTS.
template <typename T, int BK, int BV, bool TWO_WRITES, bool BACK, Directions OF, bool OUTPUTS>
struct alignas(16) Stage {
  using Chunk = PreparedForGradients<T, BK, TWO_WRITES>;
  static constexpr int FROM = BACK || !OUTPUTS ? int(OFFSET_OF(Chunk, E)) : 0;
  static constexpr int STOP = BACK                             ? OUTPUTS ? sizeof(Chunk) : int(OFFSET_OF(Chunk, B))
                              : OUTPUTS && OF == ONLY_FORWARDS ? int(OFFSET_OF(Chunk, B)) + sizeof(LowerMatrix<T>)
                                                               : int(OFFSET_OF(Chunk, W));
  static_assert(FROM % 16 == 0 && STOP % 16 == 0, "copied by 16 bytes");
  static_assert(OFFSET_OF(Chunk, residual_matrix) < OFFSET_OF(Chunk, E) && OFFSET_OF(Chunk, E) < OFFSET_OF(Chunk, Z) &&
                    OFFSET_OF(Chunk, Z) < OFFSET_OF(Chunk, decay) && OFFSET_OF(Chunk, decay) < OFFSET_OF(Chunk, beta) &&
                    OFFSET_OF(Chunk, beta) < OFFSET_OF(Chunk, W) && OFFSET_OF(Chunk, W) < OFFSET_OF(Chunk, B),
                "the order above");
  static constexpr int WIDTH = BV < TILE ? TILE : BV;  // of the tile of values, in columns
  uint4 bytes[(STOP - FROM) / 16];
  T values[BT * WIDTH];

  // The chunk, of which only those bytes are here: where other members would be, other data are.
  __device__ __forceinline__ Chunk& prepared() {
    return *reinterpret_cast<Chunk*>(reinterpret_cast<char*>(bytes) - FROM);
  }
};

// A block walks in one direction; of BOTH the first member is for the walk forwards, the second for that backwards.
template <typename T, int BK, int BV, bool TWO_WRITES, int STAGES, Directions OF, bool OUTPUTS> union Shared {
  Stage<T, BK, BV, TWO_WRITES, OF == ONLY_BACKWARDS, OF, OUTPUTS> first[STAGES];
  Stage<T, BK, BV, TWO_WRITES, OF != ONLY_FORWARDS, OF, OUTPUTS> second[STAGES];
};

// Goes over the chunks of a segment in one direction; if BACK, the code's S is dS, and `values` are do. Steps that read
// or write S are in walk.cuh; a warp has N times 16 columns (with OUTPUTS N is 1, and code for outputs takes index 0
// only), of which S, Y, P and packed operands are transposed [columns, tokens or channels]. `number` is that of the
// (segment, head, BV columns): of a head's `tiles` of BV columns, the first `value_tiles` have columns of V, the others
// columns of F.
template <int STAGES, bool TWO_WRITES, int BK, int BV, bool BACK, Directions OF, bool OUTPUTS, typename T>
__device__ __forceinline__ void walk(Stage<T, BK, BV, TWO_WRITES, BACK, OF, OUTPUTS> (&stages)[STAGES],
                                     const Args<T>& args, u32 number, u32 value_tiles, u32 tiles) {
  using PreparedChunk = PreparedForGradients<T, BK, TWO_WRITES>;
  using OwnStage = Stage<T, BK, BV, TWO_WRITES, BACK, OF, OUTPUTS>;
  constexpr int N = tiles_of_warp<T, BK>(OUTPUTS), THREADS = 2 * BV / N;  // a warp has N times 16 columns
  const Shape& shape = args.shape;
  const BlockOfWalk<BACK, OUTPUTS, BK, BV> block(shape, u32(args.P), number, value_tiles, tiles,
                                                 BACK ? args.dht : args.initial, args.starts,
                                                 BACK ? args.dh0 : args.final);
  if (!block.is_needed()) return;
  const u32 b = block.b, h = block.h;
  const i64 start = block.segment.tokens.start, first_chunk = block.segment.chunks.start;
  const int tokens = block.tokens, bytes = int(args.bytes), channels = int(shape.K), t = threadIdx.x & 3;
  const int first_column = block.first_column, columns = block.columns, chunks = (tokens + BT - 1) / BT;
  // column: the warp's first one of the block's; padded_columns: those from the block's first one on.
  const int column = threadIdx.x / 32 * 16 * N, padded_columns = padded(shape.V) - first_column;
  const auto* prepared_chunks = static_cast<const PreparedChunk*>(args.prepared) + block.first_prepared(shape);
  const StridedRows<const T>& values = BACK ? args.do_ : args.v;
  const StridedRows<T>& residuals = BACK ? args.dresidual : args.residual;
  // `opaque` hides where the number comes from: else the compiler converts it again for every chunk.
  const float scale = __uint_as_float(opaque(__float_as_uint(float(args.scale))));

  State<BK> S[N];
  block.load(S, shape);

  const auto chunk_of = [&](int step) { return BACK ? chunks - 1 - step : step; };
  const auto fetch = [&](int step, int stage) {
    if (step < chunks) {
      auto& to = stages[stage];
      const int token = chunk_of(step) * BT;
      copy_prepared<OwnStage::FROM, OwnStage::STOP, THREADS>(&to.prepared(), prepared_chunks + chunk_of(step));
      if (!block.computes_F)
        copy_chunk<OwnStage::WIDTH, THREADS>(to.values, values.row(b, h, start + token) + first_column,
                                             values.token_stride, tokens - token, columns, bytes);
    }
    cp_async_commit();
  };
  for (int step = 0; step < STAGES - 1; ++step) fetch(step, step);
#pragma unroll 1
  for (int step = 0, stage = 0; step < chunks; ++step) {
    take_chunk<STAGES>(step, stage, fetch);
    const auto& prepared = stages[stage].prepared();
    const T* values_tile = stages[stage].values;
    if (++stage == STAGES) stage = 0;
    const int chunk = chunk_of(step), token = BT * chunk;
    // Stores the warp's 16 columns of the chunk's tokens (store_tokens, walk.cuh). pair_at(i, across): this lane's pair
    // of columns across + 2t and the next of token i + g, i and `across` being multiples of 8.
    const auto store = [&](const StridedRows<T>& to, const auto& pair_at, int width, int bytes) {
      store_tokens<T>(to.row(b, h, start + token) + first_column, to.token_stride, pair_at, tokens - token, column,
                      width, bytes);
    };

    if (OUTPUTS && column < padded_columns) {  // stores S, rounded: matrices of 8 columns by 8 channels
#pragma unroll
      for (int c = 0; c < BK / 8; ++c) {
        T* to = (BACK ? args.state_gradients : args.chunk_states) +
                state_index(shape, b, h, first_chunk + chunk, c / 8 * TILE);
        if (c / 8 * TILE < channels)
#pragma unroll
          for (int right = 0; right < 2; ++right)
            *reinterpret_cast<Word<T>*>(to + (((first_column + column) / 8 + right) * 8 + c % 8) * 64 +
                                        2 * (threadIdx.x & 31)) =
                word_of<T>(S[0][c][2 * right], S[0][c][2 * right + 1]);
      }
    }
    // Transposed [columns, tokens]; F has values of zeros.
    Word<T> packed_values[N][BT / 16][4] = {}, packed[N][BT / 16][4];
    const auto load_values = [&] {
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (!block.computes_F) load_packed<OwnStage::WIDTH>(packed_values[i], values_tile, column + 16 * i);
    };
    if constexpr (OUTPUTS) load_values();  // else after the first product, which then has their registers
    // The betas of tokens first + 2t and the next.
    const auto betas = [&](int first) { return *reinterpret_cast<const float2*>(prepared.beta + first + 2 * t); };
    // For store_tokens: a pair of columns of a token, from operands [columns, tokens]. transpose_pairs exchanges
    // numbers of 8 x 8 blocks between lanes.
    const auto transposed_pairs = [&](const Word<T>(&packed)[BT / 16][4]) {
      return [&](int i, int across) { return transpose_pairs(packed[i / 16][i % 16 / 8 * 2 + across / 8]); };
    };
    if constexpr (BACK) {
      float P[N][BT / 8][4] = {}, dresidual[BT / 8][4];
      if constexpr (OUTPUTS && TWO_WRITES) {
        float read[2][BT / 8][4] = {}, (&dv)[BT / 8][4] = read[0];
        read_twice<BK>(read, S[0], prepared.Z);
        add_tokens(dv, packed_values[0], prepared.B[0], scale);
        pack_tokens<T>(packed[0], dv);
        store(args.dv, transposed_pairs(packed[0]), columns, bytes);
#pragma unroll
        for (int n = 0; n < BT / 8; ++n)
#pragma unroll
          for (int m = 0; m < 4; ++m) P[0][n][m] = read[1][n][m];
      } else {
        read_transposed<BK>(P, S, prepared.Z[TWO_WRITES]);
      }
      if constexpr (!OUTPUTS) load_values();
      if constexpr (OUTPUTS) {
#pragma unroll
        for (int n = 0; n < BT / 8; ++n)
#pragma unroll
          for (int m = 0; m < 4; ++m) dresidual[n][m] = P[0][n][m];
        add_tokens(dresidual, packed_values[0], prepared.B[TWO_WRITES], scale);
        pack_tokens<T>(packed[0], dresidual);
        store(residuals, transposed_pairs(packed[0]), padded_columns, 16);
        if constexpr (!TWO_WRITES) {
          pack_tokens<T>(packed[0], dresidual, betas);
          store(args.dv, transposed_pairs(packed[0]), columns, bytes);
        }
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if constexpr (!TWO_WRITES) pack_tokens<T>(packed[i], P[i], betas);
        else pack_tokens<T>(packed[i], P[i]);
        decay_state<BK>(S[i], prepared.decay);
      }
      write_rows<BK>(S, prepared.W, packed_values);
      write_rows<BK>(S, prepared.E, packed);
    } else {
      constexpr bool WRITES_O = OUTPUTS && OF == ONLY_FORWARDS;
      float Y[N][BT / 8][4] = {};
      Accumulators o = {};
      if constexpr (WRITES_O) {
        if constexpr (TWO_WRITES) multiply_packed(o, prepared.B[0], packed_values[0]);
        else {
          Word<T> weighted[LowerMatrix<T>::NUMBERS][BT / 16][4];  // beta v
          weigh_tokens<T>(weighted, packed_values[0], betas);
#pragma unroll
          for (const auto& number : weighted) multiply_packed(o, prepared.B[0], number);
        }
#pragma unroll
        for (int m = 0; m < BT / 16; ++m)
#pragma unroll
          for (int n = 0; n < 8; ++n) o[m][n / 4][n % 4] *= scale;
      }
      if constexpr (WRITES_O) read_transposed<BK, true>(Y[0], S[0], prepared.E, &o, prepared.W);
      else read_transposed<BK>(Y, S, prepared.E);
      if constexpr (!OUTPUTS) load_values();
      if constexpr (WRITES_O)
        store(
            args.o,
            [&](int i, int across) {
              const float* pair = o[i / 16][across / 8] + i % 16 / 8 * 2;
              return word_of<T>(pair[0], pair[1]);
            },
            columns, bytes);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if constexpr (!TWO_WRITES) add_packed<T>(Y[i], packed_values[i]);
        pack_tokens<T>(packed[i], Y[i]);
      }
      if constexpr (OUTPUTS) {
        Accumulators residual = {};
        multiply_packed(residual, prepared.residual_matrix[0], packed[0]);
        if constexpr (TWO_WRITES) multiply_packed(residual, prepared.residual_matrix[1], packed_values[0]);
        store(
            residuals,
            [&](int i, int across) {
              const float* pair = residual[i / 16][across / 8] + i % 16 / 8 * 2;
              return word_of<T>(pair[0], pair[1]);
            },
            padded_columns, 16);
        if constexpr (!TWO_WRITES && sizeof(T) == 2) {
          StridedRows<T> errors = residuals;
          errors.p += padded(shape.V);
          store(
              errors,
              [&](int i, int across) {
                const float* pair = residual[i / 16][across / 8] + i % 16 / 8 * 2;
                const float2 rounded = unpack(pack<T>(pair[0], pair[1]), T{});
                return pack<T>(pair[0] - rounded.x, pair[1] - rounded.y);
              },
              padded_columns, 16);
        }
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        decay_state<BK>(S[i], prepared.decay);
        if constexpr (!TWO_WRITES) pack_tokens<T>(packed[i], Y[i], betas);
      }
      if constexpr (!TWO_WRITES) {
        write_rows<BK>(S, prepared.Z[0], packed);
      } else {
        write_rows<BK>(S, prepared.Z[0], packed_values);
        write_rows<BK>(S, prepared.Z[1], packed);
      }
    }
  }
  block.store(S, shape, args.F);
}

template <typename T, int BK, int BV, bool TWO_WRITES, int STAGES, bool OUTPUTS, Directions OF>
__global__ void __launch_bounds__(
    2 * BV / tiles_of_warp<T, BK>(OUTPUTS),
    (blocks_of_walk<Shared<T, BK, BV, TWO_WRITES, STAGES, OF, OUTPUTS>, T, BK, BV>(OUTPUTS)))
    delta_backward_states(const Args<T> args) {
  static_assert(BK <= 128 || OF == BOTH, "only rules of at most 128 channels keep what they prepare");
  auto& s = *reinterpret_cast<Shared<T, BK, BV, TWO_WRITES, STAGES, OF, OUTPUTS>*>(dynamic_smem());
  static_assert(sizeof s == STAGES * sizeof(Shared<T, BK, BV, TWO_WRITES, 1, OF, OUTPUTS>), "as the host adds them up");
  const Shape& shape = args.shape;
  const u32 value_tiles = u32(shape.V + BV - 1) / BV, tiles = value_tiles + (OUTPUTS ? 0 : u32(shape.K + BV - 1) / BV);
  const u32 forward_blocks = u32(shape.B * shape.row_sequences * shape.H) * tiles;
  if constexpr (OF != BOTH) walk(s.first, args, blockIdx.x, value_tiles, OF == ONLY_BACKWARDS ? value_tiles : tiles);
  else if (blockIdx.x >= forward_blocks) walk(s.second, args, blockIdx.x - forward_blocks, value_tiles, value_tiles);
  else walk(s.first, args, blockIdx.x, value_tiles, tiles);
}
