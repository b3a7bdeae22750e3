// what      The product of a matrix W of few rows (a low rank) with a batch's vectors. Blocks share out K in PARTS
//           parts, so that there are blocks for the whole card.
// math      y_pb = the product of W and vector x_b over part p of K; the next kernel adds them: sum_p y_pb = W x_b
// shapes    w [M, K] of type W, with int8 scales [M], x [B, K] of the type that W is multiplied as, y [PARTS, B, M]
// grid      a block for every part of K of every 32 rows and VECTORS vectors, parts fastest, then rows; 256 threads: of
//           every SLICE numbers of the part a warp multiplies an eighth, in STEPS steps. With g = lane / 4 and
//           t = lane % 4, a lane loads numbers 8t to 8t + 7 of a step, of rows and of vectors g, g + 8, ...
// smem      Shared: each warp's sums over its numbers of K
// barriers  one: the warps' sums are in shared memory
// numerics  tensor cores: x and weights in their types, int8 weights as bfloat16; float32 sums in a fixed order, for
//           int8 times the row's scale
// source    Peng et al., 2024, "Eagle and Finch", eq. 14, for the products
// limits    K a multiple of 8, with int8 of 16; w and x start on 16 bytes; M K and B K below 2^31; sm_90a
//
// Weights are loaded to registers before the previous kernel has completed x: no kernel of a decoding step writes them.
#include "decode.cuh"

// From the includes:
//   MultipliedAs: int8 weights are multiplied as bfloat16; bf16_of_i8: two of four int8 numbers so

constexpr int THREADS = 256, WARPS = THREADS / 32, ROWS = 32, PARTS = 4;
constexpr int STEP = 32;                     // numbers of K that a warp multiplies in a step
constexpr int STEPS = 2;                     // steps of a warp in a slice
constexpr int SLICE = WARPS * STEPS * STEP;  // numbers of K that a block loads at a time

template <typename W> struct Args {
  const W* w;
  const float* scales;
  const typename MultipliedAs<W>::Type* x;
  float* y;
  i64 B, K, M;
};

// Loads eight neighbours in the type that tensor cores multiply.
template <typename T> __device__ __forceinline__ uint4 eight(const T* from) {
  if constexpr (sizeof(T) > 1) return *reinterpret_cast<const uint4*>(from);
  else {
    const uint2 both = *reinterpret_cast<const uint2*>(from);
    return {bf16_of_i8<0>(both.x), bf16_of_i8<1>(both.x), bf16_of_i8<0>(both.y), bf16_of_i8<1>(both.y)};
  }
}

template <int VECTORS> struct Shared {
  float sums[WARPS][VECTORS][ROWS + 8];  // 8 more: no bank conflicts
};

template <typename W, int VECTORS>
__global__ void __launch_bounds__(THREADS, 2) rwkv6_narrow_product(const Args<W> args) {
  typedef typename MultipliedAs<W>::Type T;
  static_assert(VECTORS % 16 == 0);
  auto& s = *reinterpret_cast<Shared<VECTORS>*>(dynamic_smem());
  launch_next();  // the next kernel may begin
  const int tid = threadIdx.x, warp = tid >> 5, g = (tid & 31) >> 2, t = tid & 3;
  const int K = int(args.K), B = int(args.B), M = int(args.M), row_tiles = (M + ROWS - 1) / ROWS;
  const int part = blockIdx.x % PARTS, row = blockIdx.x / PARTS % row_tiles * ROWS;
  const int first_vector = blockIdx.x / PARTS / row_tiles * VECTORS;
  const int slices = (K + PARTS * SLICE - 1) / (PARTS * SLICE);
  const uint4 none = {0, 0, 0, 0};
  uint4 w[STEPS][ROWS / 8], x[STEPS][VECTORS / 8];
  const auto k_of = [&](int slice, int step) {
    return (part * slices + slice) * SLICE + (warp * STEPS + step) * STEP + 8 * t;
  };
  // Indices beyond the arrays are clamped: the weights read there are multiplied by zeros of x (beyond K), or belong to
  // rows whose sums are not stored (beyond M).
  const auto load_weights = [&](int slice) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int n = 0; n < ROWS / 8; ++n)
        w[step][n] = eight(args.w + min(row + 8 * n + g, M - 1) * K + min(k_of(slice, step), K - 8));
  };
  load_weights(0);
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read

  float sums[VECTORS / 16][ROWS / 8][4] = {};
#pragma unroll 1
  for (int slice = 0; slice < slices; ++slice) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int half = 0; half < VECTORS / 8; ++half) {
        const int k = k_of(slice, step), b = min(first_vector + g + 8 * half, B - 1);
        x[step][half] = k < K ? *reinterpret_cast<const uint4*>(args.x + b * K + k) : none;
      }
    if (slice > 0) load_weights(slice);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int tile = 0; tile < VECTORS / 16; ++tile) {
        // The order in which w and x hold numbers of K does not matter, as it is the same.
        const uint4 &a = x[step][2 * tile], &b = x[step][2 * tile + 1];
        const u32 lower[4] = {a.x, b.x, a.y, b.y}, upper[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n) {
          const u32 w_lower[2] = {w[step][n].x, w[step][n].y}, w_upper[2] = {w[step][n].z, w[step][n].w};
          mma_m16n8k16(sums[tile][n], lower, w_lower, T{});
          mma_m16n8k16(sums[tile][n], upper, w_upper, T{});
        }
      }
  }
#pragma unroll
  for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
    for (int half = 0; half < VECTORS / 8; ++half)
      store2(&s.sums[warp][g + 8 * half][8 * n + 2 * t],
             {sums[half / 2][n][half % 2 * 2], sums[half / 2][n][half % 2 * 2 + 1]});
  __syncthreads();  // the warps' sums are in shared memory
#pragma unroll
  for (int n = tid; n < VECTORS * ROWS; n += THREADS) {
    const int vector = n / ROWS, b = first_vector + vector, m = row + n % ROWS;
    if (b >= B || m >= M) continue;
    float sum = 0.f;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) sum += s.sums[other][vector][n % ROWS];
    args.y[(i64(part) * B + b) * M + m] = sizeof(W) > 1 ? sum : args.scales[m] * sum;
  }
}
