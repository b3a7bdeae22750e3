// what      Stage 3: the state before every chunk, carried from chunk to chunk.
// math      h_{c+1} = diag(exp b_C) h_c + kg_c^T v_c; kg are the keys decayed to their chunk's end (gated_qk.cu), b the
//           sums of log gates from the chunk's start (chunk_cumsum.cu), b_C that of its last token
// shapes    kg b [B, H, T, K] float32, v [B, H, T, V], h [B, H, NC, K, V], initial and final [N, H, K, V], all float32
// grid      stages.py launches a block for every (sequence, head, 64 channels, 64 columns of V), sequence slowest; a
//           warp has 16 channels
// smem      STAGES times 32 tokens of kg and v, and the gates of a chunk's channels
// barriers  one every 32 tokens: they have been copied, and the previous ones have been read
// numerics  the state stays in float32 accumulators; products as in copies.cuh
// source    Yang et al., 2024, eq. 4
#include "ptx.cuh"
#include "stages/copies.cuh"
#include "tensor.cuh"

// From copies.cuh and its includes:
//   copy_tile: starts copying rows to a tile; LeftOf, RightOf: operands of tensor cores, which load_rounded sets from
//     16 x 16 numbers; accumulate(d, a, b): d += a b; chunk_tokens: those of a chunk; chunks_of, tokens_of: those of a
//     sequence; decay_of(x): e^x

constexpr int STEP = 32, TILE = 64, STAGES = 3;  // tokens of a step; channels, columns of a block; steps in memory
static_assert(TILE == THREADS / 32 * 16, "a warp has 16 channels");

template <typename T> struct Args {
  StridedRows<const float> kg, b;
  StridedRows<const T> v;
  float* h;
  const float* initial;  // null: zero
  float* final;          // null: not wanted
  Shape shape;
  i64 bytes;  // divides the start and the length of all rows of kg and v
};

template <typename T> struct alignas(16) Stage {
  float k[STEP * LD<float, TILE>];  // [32, 64]
  T v[STEP * LD<T, TILE>];          // [32, 64]
  float gates[TILE];                // b_C of the step's chunk
};
template <typename T> struct Shared {
  Stage<T> stages[STAGES];
};

template <typename T> __global__ void __launch_bounds__(THREADS, 4) stages_inter_chunk(const Args<T> args) {
  Shared<T>& s = *reinterpret_cast<Shared<T>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const i64 v_tiles = (shape.V + TILE - 1) / TILE, k_tiles = (shape.K + TILE - 1) / TILE;
  const i64 v_tile = blockIdx.x % v_tiles * TILE, k_tile = blockIdx.x / v_tiles % k_tiles * TILE;
  const i64 head = blockIdx.x / v_tiles / k_tiles % shape.H, sequence = blockIdx.x / v_tiles / k_tiles / shape.H;
  const i64 batch = sequence / shape.row_sequences, state_size = shape.K * shape.V;
  const Span chunks = chunks_of(shape, sequence % shape.row_sequences);
  const Span tokens = tokens_of(shape, sequence % shape.row_sequences);
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  const int row = int(k_tile) + 16 * warp + g, across = int(v_tile) + 2 * t;  // of the lane's first number
  const bool pairs = shape.V % 2 == 0;  // whether two neighbouring numbers of a state are aligned for one store

  // The warp's 16 channels of the state: S[tile][2h + p] is channel g + 8h, column 8 tile + 2t + p. each_number calls
  // f(number, its offset in a state [K, V]) for this lane's numbers that are inside.
  float S[TILE / 8][4] = {};
  const auto each_number = [&](auto f) {
#pragma unroll
    for (int tile = 0; tile < TILE / 8; ++tile)
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int channel = row + 8 * (x >> 1), column = across + 8 * tile + (x & 1);
        if (channel < shape.K && column < shape.V) f(S[tile][x], channel * shape.V + column);
      }
  };
  if (args.initial)
    each_number([&](float& x, i64 index) { x = args.initial[(sequence * shape.H + head) * state_size + index]; });
  // Stores the lane's numbers in `state` [K, V].
  const auto store = [&](float* state) {
    if (!pairs) return each_number([&](float& x, i64 index) { state[index] = x; });
#pragma unroll
    for (int tile = 0; tile < TILE / 8; ++tile)
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        const int channel = row + 8 * down, column = across + 8 * tile;
        if (channel < shape.K && column < shape.V)
          *reinterpret_cast<float2*>(state + channel * shape.V + column) = {S[tile][2 * down], S[tile][2 * down + 1]};
      }
  };

  // Every chunk takes chunk_steps steps, those of the longest: copies of tokens after a chunk's end are zeros.
  const i64 longest = tokens.stop - tokens.start < shape.chunk ? tokens.stop - tokens.start : shape.chunk;
  const u32 chunk_steps = u32((longest + STEP - 1) / STEP), steps = u32(chunks.stop - chunks.start) * chunk_steps;
  // Starts to copy a step, and commits a group of copies, also if there is no such step.
  const auto fetch = [&](u32 step) {
    if (step < steps) {
      Stage<T>& to = s.stages[step % STAGES];
      const Span span = chunk_tokens(shape, chunks.start + step / chunk_steps);
      const i64 first = span.start + step % chunk_steps * STEP;
      copy_tile<STEP, TILE>(to.k, args.kg, batch, head, first, span.stop, k_tile, shape.K, args.bytes);
      copy_tile<STEP, TILE>(to.v, args.v, batch, head, first, span.stop, v_tile, shape.V, args.bytes);
      if (threadIdx.x < TILE) {
        const i64 channel = k_tile + threadIdx.x;
        const float* sums = args.b.row(batch, head, span.stop - 1);
        cp_async<4>(to.gates + threadIdx.x, sums + (channel < shape.K ? channel : 0), channel < shape.K);
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (u32 step = 0; step < STAGES - 1; ++step) fetch(step);
  float* before = args.h + ((batch * shape.H + head) * shape.NC + chunks.start) * state_size;
#pragma unroll 1
  for (u32 step = 0; step < steps; ++step) {
    cp_async_wait<STAGES - 2>();  // leaves the later steps' copies under way, each a group, maybe an empty one
    __syncthreads();              // this step's tokens have been copied; the previous step's have been read
    fetch(step + STAGES - 1);
    const Stage<T>& in = s.stages[step % STAGES];
    if (step % chunk_steps == 0) {  // a chunk begins: S is the state before it, and is then decayed over it
      store(before);
      before += state_size;
      const float decays[2] = {decay_of(in.gates[16 * warp + g]), decay_of(in.gates[16 * warp + g + 8])};
#pragma unroll
      for (int tile = 0; tile < TILE / 8; ++tile)
#pragma unroll
        for (int x = 0; x < 4; ++x) S[tile][x] *= decays[x >> 1];
    }
    // S += k^T v over the step's tokens. load_rounded: copies.cuh.
#pragma unroll 1
    for (int j = 0; j < STEP; j += 16) {
      LeftOf<T> a;
      load_rounded<TRANSPOSED>(a, in.k + j * LD<float, TILE> + 16 * warp, LD<float, TILE>);
#pragma unroll
      for (int tile = 0; tile < TILE / 8; tile += 2) {
        RightOf<T> b[2];
        load_rounded<AS_STORED>(b, in.v + j * LD<T, TILE> + 8 * tile, LD<T, TILE>);
        accumulate(S[tile], a, b[0]);
        accumulate(S[tile + 1], a, b[1]);
      }
    }
  }
  if (args.final)
    each_number([&](float& x, i64 index) { args.final[(sequence * shape.H + head) * state_size + index] = x; });
}
