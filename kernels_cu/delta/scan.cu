// what      The delta rules' walk forwards over prepared chunks of 32 tokens: outputs and final states. Without
//           OUTPUTS, what a segment of a sequence does to a state: from S to F S + G.
// math      S is the state before a chunk, D the decay of each channel over it. E, W, Z and Zb have a row [K] for each
//           token, B is [32, 32]; the kernels *prepare.cu make them (prepared.cuh).   Y = E S;   o = scale (W S + B v);
//           S <- D S + Z^T (v + Y), or, TWO_WRITES (RWKV-7), S <- D S + Zb^T Y + Z^T v
// walks     OUTPUTS  columns  starts from                          values  the last state is
//           true     of V     `initial`, or, in a later segment,   v       `final`, if the segment is a sequence's last
//                             its state in `starts`
//           false    of V     `initial`, or, in a later segment,   v       G, in `starts` in the place of the next
//                             zeros                                        segment; not of a last segment
//           false    of F     the identity                         0       F; not of a first or last segment
// shapes    v o [B, H, T, V], prepared [B, H, NC], initial and final state [N, H, K, V] float32; starts, F:
//           join_segments.cu
// grid      a block for every (segment, head, BV columns), segment slowest; a warp for every 16 columns, or, without
//           OUTPUTS, for every tiles_of_warp times 16. The blocks of F's columns follow those of G's
// smem      a ring of STAGES: a prepared chunk, and its v
// barriers  one in is_whole: its threads agree whether a number is not finite; one a chunk: it has arrived, and the
//           previous chunk has been read; these are two barriers if STAGES is 1
// numerics  S in float32 accumulators; S and v + Y (TWO_WRITES: Y) are rounded to T for products
// source    Yang et al., 2024 (2412.06464), section 3.3
// limits    T of bfloat16, float16, single (float32: operands.cuh); K <= BK; BK of 64, 128, 256; BV of 64, 128;
//           STAGES >= 1
// tests     test_delta_kernels; test_segments there without OUTPUTS
#include "delta/chunk.cuh"
#include "delta/prepared.cuh"
#include "delta/walk.cuh"

// From the includes:
//   shape.H: heads of values; BT = 32 tokens
//   State<BK>: a warp's 16 columns of a state
//   read_transposed: y += rows S; write_rows: S += rows^T x; load_packed: operands x from a tile; pack_tokens: from
//     sums y; add_packed: y += x; multiply_packed: sums += M x
//   BlockOfWalk: the block's segment, its tokens, and its columns; it loads the state that the walk starts from, and
//     stores the last one. take_chunk: waits for a chunk, and has a later one copied
//   Accumulators x: a warp's sums [32 tokens, 16 columns]; with g = lane / 4 and t = lane % 4, x[m][across][2 down + p]
//     is token 16 m + 8 down + g, column 8 across + 2t + p
//   decay_state: S <- diag(decay) S
//   blocks_of_walk: how many blocks share a multiprocessor; tiles_of_warp: how many times 16 columns a warp has
//   copy_prepared, copy_chunk: start to copy a prepared chunk, a chunk's rows; store_tokens: stores a warp's columns of
//     o; word_of: two numbers rounded to T

template <typename T> struct Args {
  StridedRows<const T> v;
  StridedRows<T> o;                  // null without OUTPUTS
  StridedRows<const float> initial;  // null: zeros
  StridedRows<float> final;          // null: not wanted
  float *starts, *F;                 // null if no sequence is cut into segments; F is null with OUTPUTS, too
  const void* prepared;              // Prepared of each chunk
  Shape shape;                       // its sequences are the call's segments
  i64 P;                             // segments of a sequence
  double scale;
  i64 bytes;  // 16, 8, 4 or 2: all rows of v and o start on multiples of it, and are multiples long
};

// The bytes of a prepared chunk that the walk reads, and its v.
template <typename T, int BK, int BV, bool TWO_WRITES, bool OUTPUTS> struct alignas(16) Stage {
  using Chunk = Prepared<T, BK, TWO_WRITES>;
  static constexpr int SIZE = OUTPUTS ? sizeof(Chunk) : int(OFFSET_OF(Chunk, W));  // all before W
  static_assert(OFFSET_OF(Chunk, E) < OFFSET_OF(Chunk, W) && OFFSET_OF(Chunk, Z) < OFFSET_OF(Chunk, W) &&
                OFFSET_OF(Chunk, decay) < OFFSET_OF(Chunk, W));
  uint4 bytes[SIZE / 16];
  T v[BT * BV];

  // The chunk, of which only those bytes are in memory: E, Z and decay; with OUTPUTS W and B, too.
  __device__ __forceinline__ Chunk& prepared() { return *reinterpret_cast<Chunk*>(bytes); }
};

template <typename T, int BK, int BV, bool TWO_WRITES, int STAGES, bool OUTPUTS> struct Shared {
  Stage<T, BK, BV, TWO_WRITES, OUTPUTS> stages[STAGES];
};

template <typename T, int BK, int BV, bool TWO_WRITES, int STAGES, bool OUTPUTS>
__global__ void __launch_bounds__(2 * BV / tiles_of_warp<T, BK>(OUTPUTS),
                                  (blocks_of_walk<Shared<T, BK, BV, TWO_WRITES, STAGES, OUTPUTS>, T, BK, BV>(OUTPUTS)))
    delta_scan(const Args<T> args) {
  constexpr int N = tiles_of_warp<T, BK>(OUTPUTS), THREADS = 2 * BV / N;  // a warp has N times 16 columns
  using OwnStage = Stage<T, BK, BV, TWO_WRITES, OUTPUTS>;
  auto& stages = reinterpret_cast<Shared<T, BK, BV, TWO_WRITES, STAGES, OUTPUTS>*>(dynamic_smem())->stages;
  static_assert(sizeof stages == STAGES * sizeof(Shared<T, BK, BV, TWO_WRITES, 1, OUTPUTS>),
                "as the host adds them up");
  const Shape& shape = args.shape;
  const u32 value_tiles = u32(shape.V + BV - 1) / BV, tiles = value_tiles + (OUTPUTS ? 0 : u32(shape.K + BV - 1) / BV);
  const BlockOfWalk<FORWARDS, OUTPUTS, BK, BV> block(shape, u32(args.P), blockIdx.x, value_tiles, tiles, args.initial,
                                                     args.starts, args.final);
  if (!block.is_needed()) return;
  const u32 b = block.b, h = block.h;
  const i64 start = block.segment.tokens.start;
  const int tokens = block.tokens, bytes = int(args.bytes), first_column = block.first_column, columns = block.columns,
            column = threadIdx.x / 32 * 16 * N;  // column: the warp's first one of the block's
  const auto* prepared_chunks =
      static_cast<const Prepared<T, BK, TWO_WRITES>*>(args.prepared) + block.first_prepared(shape);

  State<BK> S[N];
  block.load(S, shape);
  const auto fetch = [&](int chunk, int stage) {
    if (chunk * BT < tokens) {
      auto& to = stages[stage];
      copy_prepared<0, OwnStage::SIZE, THREADS>(to.bytes, prepared_chunks + chunk);
      if (!block.computes_F)
        copy_chunk<BV, THREADS>(to.v, args.v.row(b, h, start + chunk * BT) + first_column, args.v.token_stride,
                                tokens - chunk * BT, columns, bytes);
    }
    cp_async_commit();
  };
  // `opaque` hides where the number comes from: else the compiler converts it again for every chunk.
  const float scale = __uint_as_float(opaque(__float_as_uint(float(args.scale))));
  for (int chunk = 0; chunk < STAGES - 1; ++chunk) fetch(chunk, chunk);
#pragma unroll 1
  for (int token = 0, chunk = 0, stage = 0; token < tokens; token += BT, ++chunk) {
    take_chunk<STAGES>(chunk, stage, fetch);
    const auto& prepared = stages[stage].prepared();
    const T* v_tile = stages[stage].v;
    if (++stage == STAGES) stage = 0;
    if (sizeof(T) == 2 && column >= columns) continue;  // the warp only copies for the others

    Word<T> v[N][BT / 16][4] = {}, written[N][BT / 16][4];  // written: v + Y (TWO_WRITES: Y); F has values of zeros
    // 16 columns: Y, v and `written` transposed, o [tokens, columns]. Layouts: walk.cuh.
    float Y[N][BT / 8][4] = {};
    Accumulators o = {};
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (!block.computes_F) load_packed<BV>(v[i], v_tile, column + 16 * i);
    if constexpr (OUTPUTS) read_transposed<BK, true>(Y[0], S[0], prepared.E, &o, prepared.W);  // Y = E S; o = W S
    else read_transposed<BK>(Y, S, prepared.E);
#pragma unroll
    for (int i = 0; i < N; ++i) decay_state<BK>(S[i], prepared.decay);
    if constexpr (TWO_WRITES) write_rows<BK>(S, prepared.Z[0], v);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (!TWO_WRITES) add_packed<T>(Y[i], v[i]);
      pack_tokens<T>(written[i], Y[i]);
    }
    write_rows<BK>(S, prepared.Z[TWO_WRITES], written);
    if constexpr (OUTPUTS) {
      multiply_packed(o, prepared.B, v[0]);
      store_tokens<T>(
          args.o.row(b, h, start + token) + first_column, args.o.token_stride,
          [&](int i, int across) {  // across: 0 or 8, the first column of 8
            const float* pair = o[i / 16][across / 8] + i % 16 / 8 * 2;
            return word_of<T>(scale * pair[0], scale * pair[1]);
          },
          tokens - token, column, columns, bytes);
    }
  }
  block.store(S, shape, args.F);
}
