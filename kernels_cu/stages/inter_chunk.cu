// what      Stage 3: the state before every chunk, carried from chunk to chunk.
// math      h_{c+1} = diag(exp b_C) h_c + kg_c^T v_c
// shapes    kg b [B, H, T, K] float32, v [B, H, T, V], h [B, H, NC, K, V], initial and final [N, H, K, V], all float32
// grid      a block for every (sequence, head, 64 channels, 64 columns of V), sequence slowest; 128 threads
// smem      Shared: 16 tokens of kg and v
// barriers  two every 16 tokens: tiles loaded | tiles free
// numerics  the state stays in float32 accumulators; products as in product.cuh
// source    Yang et al., 2024, eq. 4
// limits    none
#include "product.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int THREADS = 128, SLAB = 16, TILE = 64, LD = TILE + 8;

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

// 3 blocks a multiprocessor: without a word the compiler takes 128 registers and spills.
template <typename T> __global__ void __launch_bounds__(THREADS, 3) stages_inter_chunk(const Args<T> args) {
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

  for (i64 c = chunks.start; c < chunks.stop; ++c) {
    const Span span = chunk_tokens(shape, c);
    float* before = args.h + ((batch * shape.H + h) * shape.NC + c) * size;
    const float* total = args.b.row(batch, h, span.stop - 1);
    each([&](float& x, i64 channel, i64 at) {
      before[at] = x;
      x *= decay_of(total[channel]);
    });
    for (i64 token = span.start; token < span.stop; token += SLAB) {
      load_tile<SLAB, TILE, LD, THREADS>(s.k, args.kg, batch, h, token, span.stop, k_tile, shape.K);
      load_tile<SLAB, TILE, LD, THREADS>(s.v, args.v, batch, h, token, span.stop, v_tile, shape.V);
      __syncthreads();  // the tiles are in shared memory
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
