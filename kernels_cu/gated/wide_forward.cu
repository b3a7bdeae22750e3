// what      GLA and RWKV-6 forward with more than 128 channels (the 256 of released GLA models) on every card: the
//           products of the operands that wide_operands.cu has made.
// math      per chunk of 32 tokens, S [K, V] being the state before it, A [query, key] its scores (wide_operands.cu).
//           Decays [K] are e^(sum of log gates): E_i over the chunk's gates up to i (RWKV-6: up to i - 1), L_j over
//           those after j, D over all.  o_i = scale (S^T (E_i q_i) + sum_j A_ij v_j),  S <- D S + sum_j L_j k_j v_j^T
// shapes    v o [B, H, T, V], initial and final state [N, H, K, V] float32; operands: of every 128 channels a tile of
//           E_i q_i, then one of L_j k_j; scores: A, rounded, then its rounding errors; decays: D (wide_storage.cuh).
//           Of channels beyond K operands are 0 and D is 1 (wide_operands.cu reads zeros there), so that S stays 0
// grid      a block for every (sequence, head, 64 columns of V), sequence slowest; a warp for every 16 of the columns
//           and 128 of the channels
// smem      WideShared: operands of two chunks, and the outputs over each tile of channels
// barriers  two a chunk: its operands have been copied and the previous outputs read | its outputs over each tile are
//           in shared memory
// numerics  S in float32 accumulators; products in bfloat16, scores as two numbers; outputs of tiles add up in float32
// source    Yang et al., 2024, section 4; Peng et al., 2024, eq. 18-19
// limits    bfloat16; K up to 128 TILES
//
// Names. WIDE = 128: channels of a tile; TILE_SIZE: numbers of a tile [CHUNK = 32 tokens, WIDE]; SCORES: numbers of a
// chunk's scores, whose layout is WideScores; STAGES = 2: chunks in shared memory. copy_tile and fetch_rows start
// copies: of any multiple of 16 bytes, by THREADS threads, and of rows; rows after the end become 0.
// With g = lane / 4, t = lane % 4 a lane has, of its warp's 16 columns: State, S[n][2h + p], column g + 8h, channel
// 8n + 2t + p; Output, o[m][side][2h + p], token 16m + 8h + g, column 8 side + 2t + p. Piece<4, T>: four numbers of a
// row. A batch row has row_sequences sequences and NC chunks; tokens_of and chunks_of (Span: start, stop): those of a
// sequence. opaque: keeps the compiler from holding addresses in registers
#include "gated/forward_copies.cuh"
#include "gated/forward_products.cuh"
#include "gated/wide_storage.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

// Columns of a block; strips of 16 of them, one for each warp of a tile of channels; distance of tokens in `sums`.
constexpr int BV = 64, STRIPS = BV / 16, LDO = BV + 8;

template <typename T> struct Args {
  StridedRows<const T> v;
  StridedRows<T> o;
  const T *operands, *scores;
  const float* decays;
  const float* initial;  // [N, H, K, V]; null: zero
  float* final;          // [N, H, K, V]; null: not wanted
  Shape shape;
  double scale;
  i64 bytes;  // the largest of 16, 8, 4 and 2 that divides the start and the length of all rows of v and o
};

template <typename T, int TILES> struct alignas(16) WideStage {
  T operands[TILES * 2 * TILE_SIZE], v[CHUNK<T> * BV], scores[SCORES];
  float decays[TILES * WIDE];
};
template <typename T, int TILES> struct alignas(16) WideShared {
  WideStage<T, TILES> stages[STAGES];
  float sums[TILES][CHUNK<T>][LDO];  // each tile's part of the chunk's o, the sum over its channels
};

// T: bfloat16; TILES: tiles of 128 channels that K has, the last one maybe in part. Two blocks, as the host counts
// (GatedWideForward), if Hopper's shared memory has room: with two tiles.
template <typename T, int TILES>
__global__ void __launch_bounds__(32 * STRIPS * TILES, TILES > 2 ? 1 : 2) gated_wide_forward(const Args<T> args) {
  static_assert(sizeof(T) == 2, "outputs are stored four at a time if rows are multiples of 8 bytes");
  constexpr int THREADS = 32 * STRIPS * TILES, BT = CHUNK<T>;
  auto& s = *reinterpret_cast<WideShared<T, TILES>*>(dynamic_smem());
  const Shape& shape = args.shape;
  // head: the number among all sequences' heads; b: batch row.
  const u32 v_tiles = u32(shape.V + BV - 1) / BV, head = blockIdx.x / v_tiles, H = u32(shape.H);
  const u32 sequence = head / H, h = head % H, b = sequence / u32(shape.row_sequences);
  const Span span = tokens_of(shape, sequence % u32(shape.row_sequences));
  const Span chunks = chunks_of(shape, sequence % u32(shape.row_sequences));
  const int first_column = blockIdx.x % v_tiles * BV, columns = int(min(shape.V - first_column, i64(BV))),
            bytes = int(args.bytes);
  // The warp's tile of channels, and its strip of 16 columns.
  const int tile = (threadIdx.x >> 5) / STRIPS, strip = (threadIdx.x >> 5) % STRIPS;
  const int channels = int(shape.K) - tile * WIDE, tokens = int(span.stop - span.start);

  State<WIDE> S;
  // Calls f(number of S, its index in the array of states, whether it is inside that array) for this lane's numbers.
  const auto each_number = [&](auto f) {
    const int thread = opaque(threadIdx.x), g = thread >> 2 & 7, t = thread & 3, column = 16 * strip + g;
    i64 index = (i64(head) * shape.K + tile * WIDE + 2 * t) * shape.V + first_column + column;
#pragma unroll
    for (int c = 0; c < WIDE / 8; ++c) {
#pragma unroll
      for (int x = 0; x < 4; ++x)
        f(S[c][x], index + (x & 1) * shape.V + 8 * (x >> 1),
          8 * c + 2 * t + (x & 1) < channels && column + 8 * (x >> 1) < columns);
      index += 8 * opaque(int(shape.V));  // keeps the compiler from computing all addresses at once
    }
  };
  each_number([&](float& x, i64 index, bool inside) { x = args.initial && inside ? args.initial[index] : 0.f; });

  // Starts copying a chunk of the sequence: operands of all tiles, scores, decays and v.
  const auto fetch = [&](int chunk) {
    auto& to = s.stages[chunk % STAGES];
    const i64 row = (i64(b) * shape.H + h) * shape.NC + chunks.start + chunk, token = span.start + BT * chunk;
    const int rows = tokens - BT * chunk;
    copy_tile<TILES * 2 * TILE_SIZE, THREADS>(to.operands, args.operands + row * TILES * 2 * TILE_SIZE);
    copy_tile<SCORES, THREADS>(to.scores, args.scores + row * SCORES);
    copy_tile<TILES * WIDE, THREADS>(to.decays, args.decays + row * TILES * WIDE);
    const T* v = args.v.row(b, h, token) + first_column;
    fetch_rows<BT, BV, THREADS>(to.v, v, args.v.token_stride, rows, columns, bytes);
  };

  const int count = int(chunks.stop - chunks.start);
  const float scale = float(args.scale);
  if (count) fetch(0);
  cp_async_commit();
#pragma unroll 1
  for (int chunk = 0; chunk < count; ++chunk) {
    cp_async_wait<0>();
    __syncthreads();  // the chunk has been copied; the previous one and its outputs have been read
    if (chunk + 1 < count) fetch(chunk + 1);
    cp_async_commit();
    const auto& in = s.stages[chunk % STAGES];
    const T* operands = in.operands + tile * 2 * TILE_SIZE;
    {
      // Products (forward_products.cuh): o += q S over the warp's channels; the warps of tile 0 add A v.
      Output<T> o = {};
      add_state_outputs<1, T, WIDE>(o, S, operands);
      if (tile == 0) add_score_outputs<WideScores, 1, BV>(o, in.scores, in.v, 16 * strip);
      const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
#pragma unroll
      for (int n = 0; n < BT / 8; ++n)
#pragma unroll
        for (int side = 0; side < 2; ++side)
          *reinterpret_cast<float2*>(&s.sums[tile][8 * n + g][16 * strip + 8 * side + 2 * t]) = {
              o[n / 2][side][n % 2 * 2], o[n / 2][side][n % 2 * 2 + 1]};
    }
    // S <- D S + sum of L k v^T. The argument 1, here and above, is PRODUCTS, which only float32 data have more of.
    update_state<1, T, WIDE, BV>(S, operands + TILE_SIZE, in.v, in.decays + tile * WIDE, 16 * strip);
    __syncthreads();  // the outputs over each tile are in shared memory
    const i64 token = span.start + BT * chunk;
    const int rows = tokens - BT * chunk;
#pragma unroll 1
    for (int index = 4 * threadIdx.x; index < BT * BV; index += 4 * THREADS) {
      const int row = index / BV, column = index % BV;
      if (row >= rows || column >= columns) continue;
      float x[4] = {};
#pragma unroll
      for (int other = 0; other < TILES; ++other) {
        const float4 sums = *reinterpret_cast<const float4*>(&s.sums[other][row][column]);
        x[0] += sums.x, x[1] += sums.y, x[2] += sums.z, x[3] += sums.w;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] *= scale;
      T* to = args.o.row(b, h, token + row) + first_column + column;
      if (bytes >= 8) {  // V is then a multiple of 4 numbers of 2 bytes: all four are inside
        Piece<4, T> four;
        four.set(x);
        four.store(to);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (column + i < columns) to[i] = from_float<T>(x[i]);
      }
    }
  }
  if (args.final)
    each_number([&](float& x, i64 index, bool inside) {
      if (inside) args.final[index] = x;
    });
}
