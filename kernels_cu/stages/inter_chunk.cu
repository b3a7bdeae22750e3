// what      Stage 3: the state before every chunk, carried from chunk to chunk.
// math      h_{c+1} = diag(exp b_C) h_c + kg_c^T v_c
// shapes    kg b [B, H, T, K] float32, v [B, H, T, V], h [B, H, NC, K, V], initial and final [N, H, K, V], all float32
// grid      a block for every (sequence, head, 64 channels, 64 columns of V), sequence slowest; 128 threads
// smem      Shared: 16 tokens of kg and v; the next 16 are loaded to registers meanwhile
// barriers  two every 16 tokens: tiles loaded | tiles free
// numerics  the state stays in float32 accumulators; products as in product.cuh
// source    Yang et al., 2024, eq. 4
// limits    none
#include "product.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int THREADS = 128, SLAB = 16, TILE = 64, LD = TILE + 8;
constexpr int DOWN = THREADS / TILE, EACH = SLAB / DOWN;  // rows of a slab: loaded at once; of a thread

template <typename T> struct Args {
  Rows<const float> kg, b;
  Rows<const T> v;
  float* h;
  const float* initial;  // or null
  float* final;          // or null
  Shape shape;
};

struct Shared {
  float k[SLAB * LD];  // [16, 64]
  float v[SLAB * LD];  // [16, 64]
};

// A thread's part of a slab of rows from `token` on: one column, every DOWN-th row; zero where the row is not before
// `stop` or the column is past `width`.
template <typename T>
__device__ __forceinline__ void load_slab(float (&x)[EACH], const Rows<const T>& from, i64 batch, i64 head, i64 token,
                                          i64 stop, i64 tile, i64 width) {
  const i64 first = token + threadIdx.x / TILE, column = tile + threadIdx.x % TILE;
  const int rows = column < width ? int(min(stop - first, i64(SLAB))) : 0;
  const T* at = from.row(batch, head, first) + column;
#pragma unroll
  for (int n = 0; n < EACH; ++n, at += DOWN * from.t) x[n] = n * DOWN < rows ? to_float(*at) : 0.f;
}
__device__ __forceinline__ void store_slab(float* to, const float (&x)[EACH]) {
#pragma unroll
  for (int n = 0; n < EACH; ++n) to[(threadIdx.x / TILE + n * DOWN) * LD + threadIdx.x % TILE] = x[n];
}

// 4 blocks a multiprocessor, of float32, whose products take more registers, 2.
template <typename T>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 4 ? 2 : 4) stages_inter_chunk(const Args<T> args) {
  constexpr bool EXACT = sizeof(T) == 4;
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  const Shape& shape = args.shape;
  const i64 v_tiles = (shape.V + TILE - 1) / TILE, k_tiles = (shape.K + TILE - 1) / TILE;
  const i64 v_tile = blockIdx.x % v_tiles * TILE, k_tile = blockIdx.x / v_tiles % k_tiles * TILE;
  const i64 h = blockIdx.x / v_tiles / k_tiles % shape.H, n = blockIdx.x / v_tiles / k_tiles / shape.H;
  const i64 batch = n / shape.count, size = shape.K * shape.V;
  const Span chunks = chunks_of(shape, n % shape.count);
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;

  // This lane's part of the state, 16 channels a warp: f(value, channel, offset in a [K, V] state) where inside.
  float S[TILE / 8][4] = {};
  auto each = [&](auto f) {
#pragma unroll
    for (int tile = 0; tile < TILE / 8; ++tile)
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const i64 channel = k_tile + 16 * warp + g + 8 * (x >> 1), column = v_tile + 8 * tile + 2 * t + (x & 1);
        if (channel < shape.K && column < shape.V) f(S[tile][x], channel, channel * shape.V + column);
      }
  };
  if (args.initial) each([&](float& x, i64, i64 at) { x = args.initial[(n * shape.H + h) * size + at]; });

  // The next slab, and of a chunk's first one what the chunk's gates add up to, in this lane's two channels.
  float next_k[EACH], next_v[EACH], total[2] = {};
  const auto load = [&](const Span& span, i64 token) {
    load_slab(next_k, args.kg, batch, h, token, span.stop, k_tile, shape.K);
    load_slab(next_v, args.v, batch, h, token, span.stop, v_tile, shape.V);
    if (token > span.start) return;
    const float* last = args.b.row(batch, h, span.stop - 1);
#pragma unroll
    for (int m = 0; m < 2; ++m)
      if (const i64 channel = k_tile + 16 * warp + g + 8 * m; channel < shape.K) total[m] = last[channel];
  };
  Span span = {}, next = {};
  if (chunks.start < chunks.stop) next = chunk_tokens(shape, chunks.start), load(next, next.start);
  for (i64 c = chunks.start; c < chunks.stop; ++c) {
    span = next;
    if (c + 1 < chunks.stop) next = chunk_tokens(shape, c + 1);
    float* before = args.h + ((batch * shape.H + h) * shape.NC + c) * size;
    const float decay[2] = {decay_of(total[0]), decay_of(total[1])};
    each([&](float& x, i64, i64 at) { before[at] = x; });
#pragma unroll
    for (int tile = 0; tile < TILE / 8; ++tile)
#pragma unroll
      for (int x = 0; x < 4; ++x) S[tile][x] *= decay[x >> 1];
    for (i64 token = span.start; token < span.stop; token += SLAB) {
      store_slab(s.k, next_k), store_slab(s.v, next_v);
      __syncthreads();  // the tiles are in shared memory
      if (token + SLAB < span.stop) load(span, token + SLAB);
      else if (c + 1 < chunks.stop) load(next, next.start);
#pragma unroll
      for (int j = 0; j < SLAB; j += 8) {
        Operand<EXACT, 4> a;
        Operand<EXACT, 2> b;
        load_a_transposed(a, s.k + j * LD + 16 * warp, LD);
#pragma unroll
        for (int tile = 0; tile < TILE / 8; ++tile) {
          load_b(b, s.v + j * LD + 8 * tile, LD);
          multiply(S[tile], a, b);
        }
      }
      __syncthreads();  // the tiles may be overwritten
    }
  }
  if (args.final) each([&](float& x, i64, i64 at) { args.final[(n * shape.H + h) * size + at] = x; });
}
