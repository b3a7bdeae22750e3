// what      Up to five products of weights with up to 64 vectors each, every weight read once.
// math      y_b = W x_b, or y_b += W x_b, or y_b = relu(W x_b)^2
// shapes    each product: w [M, K], x [B, K], y [B, M]; x of type T
// grid      SPLIT blocks, a cluster, for every 128 rows of a product, products in turn; a block has a part of K. 256
//           threads: four warps side by side have 32 rows each, two behind each other every other 16 of K
// smem      Shared: weights on their way, or the block's part of y; then all of the block's part of x
// barriers  a step's: its weights stand, those of the step before are free; the warps' parts of y, the blocks' parts
// numerics  tensor cores: x and weights as they are, float32 sums in a fixed order. A column does not depend on the
//           others, so neither on B.
// source    Peng et al., 2024, "Eagle and Finch", for the products
// limits    B up to COLUMNS; K a multiple of 8; all start on 16 bytes; sm_90
//
// Weights do not wait for the kernel before this one: as much of them as there is room for is on its way when x comes.
#include "decode.cuh"

constexpr int THREADS = 256, ROWS = 128, DEPTH = 64, PRODUCTS = 5;
constexpr int ROW_WARPS = 4, TILES = ROWS / ROW_WARPS / 16;  // tiles of 16 rows a warp
constexpr int PITCH = ROWS + 4;                              // of a column of parts; no bank conflicts

enum class Finish : i64 { Write, Add, ReluSquared };

template <typename T> struct Product {
  const T* w;
  const T* x;
  void* y;
  i64 M;
  Finish finish;
};

template <typename T> struct Args {
  Product<T> products[PRODUCTS];  // M = 0 where there are fewer
  i64 B, K;
};

template <int COLUMNS, int STAGES> struct Shared {
  union {
    unsigned char ring[STAGES][ROWS][2 * DEPTH];
    float parts[COLUMNS][PITCH];
  };
};

__device__ __forceinline__ void multiply_halves(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], bf16) {
  mma_bf16(d, a, b);
}
__device__ __forceinline__ void multiply_halves(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], f16) {
  mma_f16(d, a, b);
}

// Where 16 bytes of a row stand, whose neighbours are multiples of 8 of them: eight rows' meet in no bank.
__device__ __forceinline__ int place(int row, int chunk, int chunks) { return row * chunks + (chunk ^ (row & 7)); }

template <typename T, int COLUMNS, int SPLIT, int STAGES>
__global__ void __launch_bounds__(THREADS, 2) __cluster_dims__(SPLIT, 1, 1) rwkv6_skinny_product(const Args<T> args) {
  auto& s = *reinterpret_cast<Shared<COLUMNS, STAGES>*>(dynamic_smem());
  uint4* const s_x = reinterpret_cast<uint4*>(&s + 1);
  launch_next();
  const int rank = blockIdx.x % SPLIT, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  i64 tile = blockIdx.x / SPLIT;
  int n = 0;
  for (; tile * ROWS >= args.products[n].M; ++n) tile -= (args.products[n].M + ROWS - 1) / ROWS;
  const auto& product = args.products[n];
  const int B = int(args.B), K = int(args.K), M = int(product.M), first_row = int(tile) * ROWS;

  // This block's part of K: as many steps as the others, but for the last ones.
  const int steps_each = (K + DEPTH * SPLIT - 1) / (DEPTH * SPLIT), chunks = steps_each * (DEPTH / 8);
  const int start = rank * steps_each * DEPTH, steps = min(steps_each, max(0, (K - start + DEPTH - 1) / DEPTH));

  const auto copy = [&](int step) {
    if (step < steps) {
      const int chunk = tid % 8, k = start + step * DEPTH + chunk * 8;
      uint4* ring = reinterpret_cast<uint4*>(s.ring[step % STAGES]);
#pragma unroll
      for (int i = 0; i < ROWS * 8 / THREADS; ++i) {
        const int row = tid / 8 + i * (THREADS / 8);
        const bool inside = first_row + row < M && k < K;
        const T* from = product.w + (inside ? i64(first_row + row) * K + k : 0);
        cp_async<16>(ring + place(row, chunk, 8), from, inside);
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) copy(step);
  wait_for_previous();

  // All of x; blocks, which read the same, begin at different places.
  const int all = COLUMNS * chunks, turn = int(blockIdx.x / SPLIT) * (THREADS / 2) % all;
  for (int n = tid; n < all; n += THREADS) {
    const int at = n + turn < all ? n + turn : n + turn - all;
    const int column = at / chunks, chunk = at % chunks, k = start + chunk * 8;
    const bool inside = column < B && k < K;
    cp_async<16>(s_x + place(column, chunk, chunks), product.x + (inside ? i64(column) * K + k : 0), inside);
  }
  cp_async_commit();
  cp_async_wait<0>();

  const int of_rows = warp % ROW_WARPS * (TILES * 16), behind = warp / ROW_WARPS;
  float sums[TILES][COLUMNS / 8][4] = {};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // the step's weights stand, those of the step before are free
    copy(step + STAGES - 1);
    const uint4* ring = reinterpret_cast<const uint4*>(s.ring[step % STAGES]);
#pragma unroll
    for (int n = 0; n < DEPTH / 32; ++n) {
      const int k = 2 * (2 * n + behind);  // of the step's 16-byte chunks
      u32 w[TILES][4];
#pragma unroll
      for (int i = 0; i < TILES; ++i) ldmatrix_x4(w[i], ring + place(of_rows + i * 16 + lane % 16, k + lane / 16, 8));
#pragma unroll
      for (int j = 0; j < COLUMNS / 16; ++j) {
        u32 x[4];
        const int column = j * 16 + lane / 16 * 8 + lane % 8, chunk = step * (DEPTH / 8) + k + lane / 8 % 2;
        ldmatrix_x4(x, s_x + place(column, chunk, chunks));
        const u32 pairs[2][2] = {{x[0], x[1]}, {x[2], x[3]}};
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) multiply_halves(sums[i][2 * j + half], w[i], pairs[half], T{});
      }
    }
  }

  cp_async_wait<0>();
  __syncthreads();  // the ring is free
#pragma unroll
  for (int turn = 1; turn >= 0; --turn) {
    if (behind == turn)
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& part = s.parts[8 * j + 2 * (lane & 3) + e % 2][of_rows + i * 16 + (lane >> 2) + e / 2 * 8];
            part = turn ? sums[i][j][e] : part + sums[i][j][e];
          }
    __syncthreads();  // half of the warps' parts stand, or all
  }
  if constexpr (SPLIT > 1) cluster_sync();

  constexpr int QUADS = ROWS / SPLIT / 4;  // of rows that this block finishes
#pragma unroll 2
  for (int at = tid; at < B * QUADS; at += THREADS) {
    const int b = at / QUADS, m = rank * (ROWS / SPLIT) + at % QUADS * 4, row = first_row + m;
    float sum[4] = {};
#pragma unroll
    for (int block = 0; block < SPLIT; ++block) {
      const float4 four = load4_of_block(&s.parts[b][m], block);
      sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + i >= M) break;
      const i64 to = i64(b) * M + row + i;
      switch (product.finish) {
        case Finish::Write:
          static_cast<float*>(product.y)[to] = sum[i];
          break;
        case Finish::Add:
          static_cast<float*>(product.y)[to] += sum[i];
          break;
        case Finish::ReluSquared:
          static_cast<T*>(product.y)[to] = from_float<T>(sum[i] > 0.f ? sum[i] * sum[i] : 0.f);
          break;
      }
    }
  }
  if constexpr (SPLIT > 1) cluster_sync();  // the others have read this block's part
}
