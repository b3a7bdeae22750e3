// what      Up to five products of weights with up to 64 vectors each, every weight read once.
// math      y_b = W x_b, or y_b += W x_b, or y_b = relu(W x_b)^2
// shapes    each product: w [M, K], or BY_INPUTS [K, M], x [B, K], y [B, M]; x of type T, or with PARTS = 3 float32
// grid      SPLIT blocks, a cluster, for every 128 rows of a product, products in turn; a block has a part of K. 256
//           threads: four warps side by side have 32 rows each, two behind each other every other 16 of K
// smem      Shared: weights on their way, or the block's part of y; then all of the block's part of x
// barriers  a step's: its weights stand, those of the step before are free; the warps' parts of y, the blocks' parts
// numerics  tensor cores: x rounded to T, or with PARTS = 3 as a sum of three bfloat16 numbers, which hold a float32;
//           weights as they are; float32 sums in a fixed order. A column does not depend on the others, so neither on B.
// source    Peng et al., 2024, "Eagle and Finch", for the products; Ootomo and Yokota, 2022, for the split
// limits    BY_INPUTS M a multiple of 8; PARTS B up to COLUMNS, which with PARTS = 3 are three for each vector side by side: 8 of the first, of the
//           second, of the third; K a multiple of 8; all start on 16 bytes; sm_90
//
// Weights do not wait for the kernel before this one: as much of them as there is room for is on its way when x comes.
#include "decode.cuh"

constexpr int THREADS = 256, ROWS = 128, DEPTH = 64, PRODUCTS = 5;
constexpr int ROW_WARPS = 4, TILES = ROWS / ROW_WARPS / 16;  // tiles of 16 rows a warp
constexpr int PITCH = ROWS + 4;                              // of a column of parts; no bank conflicts

enum class Finish : i64 { Write, Add, ReluSquared };

template <typename X> struct Product {
  const void* w;
  const X* x;
  void* y;
  i64 M;
  Finish finish;
};

template <typename T, int PARTS> struct Input {
  typedef T Type;
};
template <typename T> struct Input<T, 3> {
  typedef float Type;
};

template <typename X> struct Args {
  Product<X> products[PRODUCTS];  // M = 0 where there are fewer
  i64 B, K;
};

template <int COLUMNS, int STAGES> struct Shared {
  union {
    unsigned char ring[STAGES][ROWS * DEPTH * 2];
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

// Of eight numbers the first, second or third part.
__device__ __forceinline__ uint4 part_of(float (&x)[8]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 low = __float_as_uint(x[2 * i]), high = __float_as_uint(x[2 * i + 1]);
    words[i] = low >> 16 | (high & 0xffff0000u);
    x[2 * i] -= __uint_as_float(low & 0xffff0000u), x[2 * i + 1] -= __uint_as_float(high & 0xffff0000u);
  }
  return {words[0], words[1], words[2], words[3]};
}

template <typename T, int COLUMNS, int PARTS, int SPLIT, int STAGES, bool BY_INPUTS>
__global__ void __launch_bounds__(THREADS, 2) __cluster_dims__(SPLIT, 1, 1)
    rwkv6_skinny_product(const Args<typename Input<T, PARTS>::Type> args) {
  typedef typename Input<T, PARTS>::Type X;
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
    constexpr int CHUNKS = BY_INPUTS ? ROWS / 8 : DEPTH / 8, EACH = THREADS / CHUNKS;  // lines at once
    if (step < steps) {
      uint4* ring = reinterpret_cast<uint4*>(s.ring[step % STAGES]);
      const int chunk = tid % CHUNKS;
#pragma unroll
      for (int i = 0; i < ROWS * DEPTH / 8 / THREADS; ++i) {
        const int line = tid / CHUNKS + i * EACH;
        const int row = first_row + (BY_INPUTS ? chunk * 8 : line),
                  k = start + step * DEPTH + (BY_INPUTS ? line : chunk * 8);
        const bool inside = row < M && k < K;
        const i64 at = BY_INPUTS ? i64(k) * M + row : i64(row) * K + k;
        cp_async<16>(ring + place(line, chunk, CHUNKS), static_cast<const T*>(product.w) + (inside ? at : 0), inside);
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) copy(step);
  wait_for_previous();

  // All of x.
  if constexpr (PARTS == 1) {
    for (int at = tid; at < COLUMNS * chunks; at += THREADS) {
      const int column = at / chunks, chunk = at % chunks, k = start + chunk * 8;
      const bool inside = column < B && k < K;
      cp_async<16>(s_x + place(column, chunk, chunks), product.x + (inside ? i64(column) * K + k : 0), inside);
    }
  } else {
#pragma unroll 4
    for (int at = tid; at < COLUMNS / 4 * chunks; at += THREADS) {
      const int column = at / chunks, chunk = at % chunks, k = start + chunk * 8;
      float x[8] = {};
      if (column < B && k < K) load8(x, product.x + i64(column) * K + k);
#pragma unroll
      for (int part = 0; part < 4; ++part) s_x[place(8 * part + column, chunk, chunks)] = part_of(x);
    }
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
      for (int i = 0; i < TILES; ++i) {
        if constexpr (BY_INPUTS) {
          const int chunk = of_rows / 8 + 2 * i + lane / 8 % 2;
          ldmatrix_x4_trans(w[i], ring + place(8 * k + lane / 16 * 8 + lane % 8, chunk, ROWS / 8));
        } else {
          ldmatrix_x4(w[i], ring + place(of_rows + i * 16 + lane % 16, k + lane / 16, DEPTH / 8));
        }
      }
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
    for (int part = PARTS - 1; part >= 0; --part)
#pragma unroll
      for (int block = 0; block < SPLIT; ++block) {
        const float4 four = load4_of_block(&s.parts[8 * part + b][m], block);
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
          static_cast<X*>(product.y)[to] = from_float<X>(sum[i] > 0.f ? sum[i] * sum[i] : 0.f);
          break;
      }
    }
  }
  if constexpr (SPLIT > 1) cluster_sync();  // the others have read this block's part
}
