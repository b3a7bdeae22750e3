// what      Stage 5: the outputs, from the state before each chunk and from the chunk's own tokens.
// math      o = scale (qg h_c + A v); qg are the queries decayed from their chunk's start (gated_qk.cu), h_c the state
//           before chunk c (inter_chunk.cu), A the scores (intra_chunk.cu)
// shapes    C tokens a chunk. qg [B, H, T, K] and A [B, H, T, C] and h [B, H, NC, K, V] float32, v o [B, H, T, V]
// grid      stages.py launches a block for every (batch, head, chunk, 64 rows of it, 64 columns of V), batch slowest; a
//           warp has 16 rows
// smem      STAGES times 64 x 32 of a left factor, 32 x 64 of a right one
// barriers  one for every 32 of the inner axis: the tiles have been copied, and the previous ones have been read
// numerics  products: see copies.cuh. qg, h and A are float32, not rounded before: beside 16-bit v they are rounded to
//           tf32 here; beside float32 v an operand is two tf32 numbers
// source    Yang et al., 2024, eq. 5
#include "ptx.cuh"
#include "stages/copies.cuh"
#include "tensor.cuh"

// From copies.cuh and its includes:
//   copy_tile: starts copying rows to a tile; LeftOf, RightOf: operands of tensor cores, which load_rounded sets from
//     16 x 16 numbers; multiply(d, a, b): d += a b; chunk_tokens: those of a chunk; put_pair: stores two neighbours

// STEP: how much of the inner axis a step has, channels or tokens, which products sum over; TILE: rows and columns of a
// block; STAGES: steps in shared memory at a time.
constexpr int STEP = 32, TILE = 64, STAGES = 3;
static_assert(TILE == THREADS / 32 * 16, "a warp has 16 rows");

template <typename T> struct Args {
  StridedRows<const float> qg;
  StridedRows<const float> h;  // rows are channels: [B, H, NC * K, V]
  StridedRows<const float> A;
  StridedRows<const T> v;
  StridedRows<T> o;
  Shape shape;
  double scale;
  i64 bytes;  // divides the start and the length of all rows of qg, h, A, v and o
};

template <typename T> struct alignas(16) Stage {
  float left[TILE * LD<float, STEP>];  // [64, 32] of qg or A
  union {                              // h beside qg, v beside A
    float h[STEP * LD<float, TILE>];   // [32, 64]
    T v[STEP * LD<T, TILE>];           // [32, 64]
  };
};
template <typename T> struct Shared {
  Stage<T> stages[STAGES];
};

// sums[16 rows of the warp, 64] += left[64, 32] right[32, 64], of left the warp's 16 rows. sums[n] is columns 8n to 8n
// + 7: with g = lane / 4 and t = lane % 4, [0] and [1] are row g and columns 2t and 2t + 1, [2] and [3] row g + 8.
// load_rounded (copies.cuh) sets operands from 16 x 16 numbers of a tile, which is AS_STORED: not transposed.
template <typename T, typename E>
__device__ __forceinline__ void add_products(float (&sums)[TILE / 8][4], const Stage<T>& in, const E* right) {
  const int warp = threadIdx.x >> 5;
#pragma unroll
  for (int j = 0; j < STEP; j += 16) {
    LeftOf<T> a;
    load_rounded<AS_STORED>(a, in.left + 16 * warp * LD<float, STEP> + j, LD<float, STEP>);
#pragma unroll
    for (int tile = 0; tile < TILE / 8; tile += 2) {
      RightOf<T> b[2];
      load_rounded<AS_STORED>(b, right + j * LD<E, TILE> + 8 * tile, LD<E, TILE>);
      multiply(sums[tile], a, b[0]);
      multiply(sums[tile + 1], a, b[1]);
    }
  }
}

template <typename T> __global__ void __launch_bounds__(THREADS, 4) stages_combine(const Args<T> args) {
  Shared<T>& s = *reinterpret_cast<Shared<T>*>(dynamic_smem());
  const Shape& shape = args.shape;
  // groups: how many groups of 64 rows a chunk has; v_tile: the block's first column; chunk: the number among all
  // batches and heads, c: in its batch row. THREADS = 128 (copies.cuh)
  const u32 v_tiles = u32(shape.V + TILE - 1) / TILE, groups = u32(shape.chunk + TILE - 1) / TILE;
  const u32 NC = u32(shape.NC), H = u32(shape.H), chunk = blockIdx.x / v_tiles / groups, c = chunk % NC;
  const u32 v_tile = blockIdx.x % v_tiles * TILE, group = blockIdx.x / v_tiles % groups;
  const u32 head = chunk / NC % H, batch = chunk / NC / H;
  const Span span = chunk_tokens(shape, c);
  const i64 first_row = span.start + group * TILE;
  if (first_row >= span.stop) return;  // the chunk is a last, shorter one: no thread has a row

  // Steps over the channels, then over the tokens up to that of the last row. A is zero for tokens after its row.
  const i64 stop = first_row + TILE < span.stop ? first_row + TILE : span.stop;
  const int channel_steps = int((shape.K + STEP - 1) / STEP),
            steps = channel_steps + int((stop - span.start + STEP - 1) / STEP);
  // Starts to copy a step, and commits a group of copies also if there is none.
  const auto fetch = [&](int step) {
    if (step < steps) {
      Stage<T>& to = s.stages[step % STAGES];
      const bool over_channels = step < channel_steps;
      const i64 index = i64(over_channels ? step : step - channel_steps) * STEP, first_channel = c * shape.K;
      copy_tile<TILE, STEP>(to.left, over_channels ? args.qg : args.A, batch, head, first_row, span.stop, index,
                            over_channels ? shape.K : stop - span.start, args.bytes);
      if (over_channels)
        copy_tile<STEP, TILE>(to.h, args.h, batch, head, first_channel + index, first_channel + shape.K, v_tile,
                              shape.V, args.bytes);
      else copy_tile<STEP, TILE>(to.v, args.v, batch, head, span.start + index, stop, v_tile, shape.V, args.bytes);
    }
    cp_async_commit();
  };
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) fetch(step);
  float sums[TILE / 8][4] = {};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<STAGES - 2>();  // leaves the later steps' copies under way, each a group, maybe an empty one
    __syncthreads();              // this step's tiles have been copied; the previous step's have been read
    fetch(step + STAGES - 1);
    const Stage<T>& in = s.stages[step % STAGES];
    if (step < channel_steps) add_products(sums, in, in.h);
    else add_products(sums, in, in.v);
  }

  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  const float scale = float(args.scale);
  const bool pairs = args.bytes >= 2 * i64(sizeof(T));
#pragma unroll
  for (int down = 0; down < 2; ++down) {
    const i64 row = first_row + 16 * warp + g + 8 * down;
    if (row >= span.stop) continue;
    T* const to = args.o.row(batch, head, row);
#pragma unroll
    for (int tile = 0; tile < TILE / 8; ++tile) {
      const i64 column = v_tile + 8 * tile + 2 * t;
      const float2 x = {scale * sums[tile][2 * down], scale * sums[tile][2 * down + 1]};
      if (pairs) {
        if (column < shape.V) put_pair(to + column, x);
      } else {
        if (column < shape.V) to[column] = from_float<T>(x.x);
        if (column + 1 < shape.V) to[column + 1] = from_float<T>(x.y);
      }
    }
  }
}
