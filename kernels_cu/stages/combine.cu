// what      Stage 5: what the past chunks and the present one give.
// math      o = scale (qg h_c + A v)
// shapes    qg [B, H, T, K] and A [B, H, T, C] and h [B, H, NC, K, V] float32, v o [B, H, T, V]
// grid      a block for every (batch, head, chunk, 64 rows of it, 64 columns of V), batch slowest; 128 threads
// smem      Shared: 64 x 16 of the left factor, 16 x 64 of the right one
// barriers  two every 16 of the inner axis: tiles loaded | tiles free
// numerics  products as in product.cuh; for half data qg, h and A are rounded to tf32 here and nowhere before
// source    Yang et al., 2024, eq. 5
// limits    none
#include "product.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int THREADS = 128, SLAB = 16, TILE = 64, LDL = SLAB + 4, LDR = TILE + 8;

template <typename T> struct Args {
  Rows<const float> qg;
  Rows<const float> h;  // rows are channels: [B, H, NC * K, V]
  Rows<const float> A;
  Rows<const T> v;
  Rows<T> o;
  Shape shape;
  double scale;
};

struct Shared {
  float left[TILE * LDL];   // [64, 16]
  float right[SLAB * LDR];  // [16, 64]
};

// acc[16 rows a warp, 64] += left[64, 16] right[16, 64]
template <bool EXACT> __device__ __forceinline__ void accumulate(float (&acc)[TILE / 8][4], const Shared& s) {
  const int warp = threadIdx.x >> 5;
#pragma unroll
  for (int j = 0; j < SLAB; j += 8) {
    Operand<EXACT, 4> a;
    Operand<EXACT, 2> b;
    load_a(a, s.left + 16 * warp * LDL + j, LDL);
#pragma unroll
    for (int tile = 0; tile < TILE / 8; ++tile) {
      load_b(b, s.right + j * LDR + 8 * tile, LDR);
      multiply(acc[tile], a, b);
    }
  }
}

template <typename T> __global__ void __launch_bounds__(THREADS) stages_combine(const Args<T> args) {
  constexpr bool EXACT = sizeof(T) == 4;
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  const Shape& shape = args.shape;
  const i64 v_tiles = (shape.V + TILE - 1) / TILE, groups = (shape.chunk + TILE - 1) / TILE;
  const i64 v_tile = blockIdx.x % v_tiles * TILE, group = blockIdx.x / v_tiles % groups;
  const i64 c = blockIdx.x / v_tiles / groups % shape.NC, h = blockIdx.x / v_tiles / groups / shape.NC % shape.H;
  const i64 batch = blockIdx.x / v_tiles / groups / shape.NC / shape.H;
  const Span span = chunk_tokens(shape, c);
  const i64 first = span.start + group * TILE;
  if (first >= span.stop) return;  // the whole block: the chunk is a short tail

  float acc[TILE / 8][4] = {};
  for (i64 k = 0; k < shape.K; k += SLAB) {
    load_tile<TILE, SLAB, LDL, THREADS>(s.left, args.qg, batch, h, first, span.stop, k, shape.K);
    load_tile<SLAB, TILE, LDR, THREADS>(s.right, args.h, batch, h, c * shape.K + k, (c + 1) * shape.K, v_tile, shape.V);
    __syncthreads();  // the tiles are in shared memory
    accumulate<EXACT>(acc, s);
    __syncthreads();  // the tiles may be overwritten
  }
  for (i64 j = 0; j < span.stop - span.start; j += SLAB) {
    load_tile<TILE, SLAB, LDL, THREADS>(s.left, args.A, batch, h, first, span.stop, j, span.stop - span.start);
    load_tile<SLAB, TILE, LDR, THREADS>(s.right, args.v, batch, h, span.start + j, span.stop, v_tile, shape.V);
    __syncthreads();  // the tiles are in shared memory
    accumulate<EXACT>(acc, s);
    __syncthreads();  // the tiles may be overwritten
  }

  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (int tile = 0; tile < TILE / 8; ++tile)
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const i64 row = first + 16 * warp + g + 8 * (x >> 1), column = v_tile + 8 * tile + 2 * t + (x & 1);
      if (row < span.stop && column < shape.V)
        args.o.row(batch, h, row)[column] = from_float<T>(float(args.scale) * acc[tile][x]);
    }
}
