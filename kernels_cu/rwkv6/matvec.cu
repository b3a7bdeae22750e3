// what      Up to seven products of weights with up to 8 vectors each, every weight read once.
// math      y_b = W x_b, or y_b += W x_b, or y_b = relu(W x_b)^2
// shapes    each product: w [M, K], x [B, K], y [B, M]
// grid      a block for every 16 rows of every product, numbered product by product; THREADS threads: a warp takes a
//           slice of K. Of every 32 numbers of the slice a lane takes 8 neighbours: of rows lane / 4 and lane / 4 + 8,
//           and of vector lane / 4. In sums a lane has these two rows of vectors 2 (lane % 4) and the next
// smem      Shared: two stages of weights for each thread, and the warps' sums
// barriers  one: the warps' sums are in shared memory
// numerics  tensor cores on tf32: x, and float32 weights, as two tf32 numbers each, 16-bit weights as they are;
//           float32 sums in a fixed order. What a vector yields does not depend on the other vectors, nor on B
// source    Peng et al., 2024, "Eagle and Finch", for the products; include/product.cuh for the split
// limits    B up to 8, K a multiple of 8; w and x start on 16 bytes; as many blocks as products have rows, by 16
//
// A lane copies its own operands of the tensor core: any order of k is right if W and x have the same. The copies are
// under way before the kernel waits for x: two stages of 64 bytes a thread, with 1024 threads a multiprocessor. That is
// enough to hide the memory's latency at its full bandwidth, and copies take no registers.
#include "decode.cuh"
#include "product.cuh"

// From the includes:
//   launch_next: the next kernel may start; wait_for_previous: until the previous kernel has ended
//   Operand: a lane's numbers as tf32 numbers, split in two if EXACT; Finish: what is done with a product

constexpr int ROWS = 16, COLUMNS = 8, PRODUCTS = 7;  // rows of a block, vectors, products of a launch
constexpr int STEP = 32, STAGES = 2;                 // numbers of K that a warp multiplies at a time; stages in memory

template <typename T> struct Product {
  const T* w;
  const float* x;
  float* y;
  i64 M;
  Finish finish;
};

template <typename T> struct Args {
  Product<T> products[PRODUCTS];  // M = 0: an unused one
  i64 B, K;
};

template <int THREADS> struct Shared {
  uint4 weights[STAGES][4][THREADS];
  float warp_sums[THREADS / 32][COLUMNS][ROWS];  // of y, over each warp's slice of K
};

// 8 neighbours of a row, as floats.
__device__ __forceinline__ void unpack(float (&x)[8], const uint4& first, const uint4& second) {
  const u32 words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = __uint_as_float(words[i]);
}

template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS) rwkv6_matvec(const Args<T> args) {
  constexpr bool EXACT = sizeof(T) == 4;
  constexpr int COPIES = EXACT ? 2 : 1;      // 16-byte copies of a row in a step
  constexpr int STEPS = 2 / COPIES;          // in a stage
  static_assert(STEPS * 2 * COPIES == 4);    // copies of a thread in a stage of s.weights
  static_assert(THREADS >= ROWS * COLUMNS);  // each result has a thread
  constexpr int WARPS = THREADS / 32;
  Shared<THREADS>& s = *reinterpret_cast<Shared<THREADS>*>(dynamic_smem());
  launch_next();          // the next kernel may begin
  i64 tile = blockIdx.x;  // becomes the number of the block's 16 rows in product n
  int n = 0;
  for (; tile * ROWS >= args.products[n].M; ++n) tile -= (args.products[n].M + ROWS - 1) / ROWS;
  const Product<T>& product = args.products[n];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

  const i64 K = args.K, steps = (K + STEP - 1) / STEP, share = (steps + WARPS - 1) / WARPS;  // of a warp, in steps
  const i64 start = (warp * share) * STEP + 8 * t, stop = min(K, (warp + 1) * share * STEP);
  const i64 row = tile * ROWS + g, last = product.M - 1;
  const T* const rows[2] = {product.w + min(row, last) * K, product.w + min(row + 8, last) * K};

  const auto copy = [&](i64 stage) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const i64 k = start + (stage * STEPS + step) * STEP;
      const bool inside = k < stop;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int piece = 0; piece < COPIES; ++piece)
          cp_async<16>(&s.weights[stage % STAGES][(step * 2 + half) * COPIES + piece][threadIdx.x],
                       rows[half] + (inside ? k + piece * 4 : 0), inside);
    }
    cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) copy(stage);
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read

  const float* x = product.x + min(i64(g), args.B - 1) * K;
  float sums[4] = {}, small_sums[4] = {};  // of products of high parts; of products with a low part
  const i64 stages = (share + STEPS - 1) / STEPS;
  for (i64 stage = 0; stage < stages; ++stage) {
    float4 vectors[STEPS][2];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const i64 k = start + (stage * STEPS + step) * STEP;
      const float4* from = reinterpret_cast<const float4*>(x + (k < stop ? k : 0));
      vectors[step][0] = from[0];
      vectors[step][1] = from[1];
    }
    cp_async_wait<STAGES - 1>();  // a lane reads only what it has copied itself
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const auto copied = [&](int i) { return s.weights[stage % STAGES][step * 2 * COPIES + i][threadIdx.x]; };
      float upper[8], lower[8];
      if constexpr (EXACT) {
        unpack(upper, copied(0), copied(1));
        unpack(lower, copied(2), copied(3));
      } else {
        unpack<T>(upper, copied(0));
        unpack<T>(lower, copied(1));
      }
      const float4* a = vectors[step];
      const float vector[8] = {a[0].x, a[0].y, a[0].z, a[0].w, a[1].x, a[1].y, a[1].z, a[1].w};
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        Operand<SPLIT, 2> b;
        b.set(0, vector[i]);
        b.set(1, vector[i + 1]);
        Operand<EXACT, 4> w;
        w.set(0, upper[i]);
        w.set(1, lower[i]);
        w.set(2, upper[i + 1]);
        w.set(3, lower[i + 1]);
        if constexpr (EXACT) mma_tf32(small_sums, w.low, b.high);
        mma_tf32(small_sums, w.high, b.low);
        mma_tf32(sums, w.high, b.high);
      }
    }
    copy(stage + STAGES);
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) s.warp_sums[warp][2 * t + i % 2][g + i / 2 * 8] = sums[i] + small_sums[i];
  __syncthreads();  // the warps' sums are in shared memory
  const i64 b = threadIdx.x / ROWS, m = tile * ROWS + threadIdx.x % ROWS;
  if (b >= args.B || m >= product.M) return;
  float sum = 0.f;
#pragma unroll
  for (int other = 0; other < WARPS; ++other) sum += s.warp_sums[other][b][threadIdx.x % ROWS];
  float& y = product.y[b * product.M + m];
  switch (product.finish) {
    case Finish::Write:
      y = sum;
      break;
    case Finish::Add:
      y += sum;
      break;
    case Finish::ReluSquared:
      y = relu_squared<float>(sum);
      break;
  }
}
