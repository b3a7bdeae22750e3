// what      Products of weights with up to 256 vectors each, every weight read once, at the rate of the memory.
// math      y_b = W x_b, or y_b += W x_b, or y_b = relu(W x_b)^2
// shapes    each stack of products: w [C, M, K], x [C, B, K], y [C, B, M]; x of type T
// grid      clusters of SPLIT SIDES blocks for every 128 SIDES rows of a product, products in turn: a block has 128 rows
//           and a part of K; blocks beside each other have the same part, and each fetches half of the vectors for
//           both. Two warpgroups with 64 rows each, and a warp that copies
// smem      Shared: STAGES of weights and vectors on their way, or the block's part of y
// barriers  full: a stage stands; empty: all warps of both sides have multiplied it; then the warps' parts of y, the
//           blocks' parts
// numerics  tensor cores: x and weights as they are, float32 sums in a fixed order. A column does not depend on the
//           others, so neither on B.
// source    Peng et al., 2024, "Eagle and Finch", for the products
// limits    B up to COLUMNS; K a multiple of 8; all start on 16 bytes; sm_90a
//
// Weights do not wait for the kernel before this one: as much of them as there is room for is on its way when x comes.
#include "decode.cuh"

constexpr int ROWS = 128, DEPTH = 64, STACKS = 2;
constexpr int CONSUMERS = 256, WARPS = CONSUMERS / 32, THREADS = CONSUMERS + 32;
constexpr int PITCH = ROWS + 4;  // of a column of parts; no bank conflicts

enum class Finish : i64 { Write, Add, ReluSquared };

struct Stack {
  TensorMap w;  // boxes of DEPTH by ROWS
  TensorMap x;  // of DEPTH by COLUMNS / SIDES
  void* y;
  i64 C, M;
  Finish finish;
};

struct Args {
  Stack stacks[STACKS];  // C = 0 where there is one
  i64 B, K;
};

template <typename T, int COLUMNS> struct alignas(1024) Stage {
  T w[ROWS][DEPTH], x[COLUMNS][DEPTH];  // in the 128-byte swizzle
};

template <typename T, int COLUMNS> struct Shared {
  static constexpr int STAGES = COLUMNS == 128 ? 3 : 4;  // but for 256 vectors two blocks share a multiprocessor
  union {
    Stage<T, COLUMNS> ring[STAGES];
    float parts[COLUMNS][PITCH];
  };
  Barrier full[STAGES], empty[STAGES];
};

// 128 rows of a product, and this block's part of K.
struct Tile {
  int stack, which, row, k, steps;
};

template <int SPLIT, int SIDES> __device__ __forceinline__ Tile tile_of_block(const Args& args) {
  const int all = int(args.K + DEPTH - 1) / DEPTH, each = (all + SPLIT - 1) / SPLIT;
  const int rank = blockIdx.x % (SPLIT * SIDES), part = rank / SIDES, side = rank % SIDES;
  const auto tiles_of = [&](int stack) { return int(args.stacks[stack].M + SIDES * ROWS - 1) / (SIDES * ROWS); };
  int tile = blockIdx.x / (SPLIT * SIDES), stack = 0, tiles = tiles_of(0);
  if (const int before = tiles * int(args.stacks[0].C); tile >= before) tile -= before, stack = 1, tiles = tiles_of(1);
  const int row = (tile % tiles * SIDES + side) * ROWS;
  return {stack, tile / tiles, row, part * each * DEPTH, min(each, max(0, all - part * each))};
}

// One thread copies for all.
template <int SIDES, typename T, int COLUMNS>
__device__ __forceinline__ void copy(Shared<T, COLUMNS>& s, const Stack& stack, const Tile& tile) {
  constexpr int STAGES = Shared<T, COLUMNS>::STAGES;
  const auto weights = [&](int step) {
    Barrier& full = s.full[step % STAGES];
    barrier_expect(full, sizeof s.ring[0]);
    tensor_load(s.ring[step % STAGES].w, stack.w, full, tile.k + step * DEPTH, tile.row, tile.which, 0);
  };
  const auto vectors = [&](int step) {
    auto& x = s.ring[step % STAGES].x;
    Barrier& full = s.full[step % STAGES];
    const int k = tile.k + step * DEPTH, half = blockIdx.x % SIDES * (COLUMNS / SIDES);
    if constexpr (SIDES == 2) tensor_load_to_both(x[half], stack.x, full, k, half, tile.which, 0);
    else tensor_load(x, stack.x, full, k, 0, tile.which, 0);
  };
  const int first = min(STAGES, tile.steps);
  prefetch_map(stack.x);
  for (int step = 0; step < first; ++step) weights(step);
  wait_for_previous();
  for (int step = 0; step < first; ++step) vectors(step);
#pragma unroll 1
  for (int step = first; step < tile.steps; ++step) {
    barrier_wait(s.empty[step % STAGES], step / STAGES - 1 & 1);
    weights(step);
    vectors(step);
  }
}

// A warpgroup's 64 rows of the block's part of y.
template <int SIDES, typename T, int COLUMNS>
__device__ __forceinline__ void multiply(Shared<T, COLUMNS>& s, int steps, float (&sums)[COLUMNS / 2]) {
  constexpr int STAGES = Shared<T, COLUMNS>::STAGES;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const auto release = [&](int step) {
    if (lane > 0) return;
    barrier_arrive(s.empty[step % STAGES]);
    if constexpr (SIDES == 2) arrive_at_peer(s.empty[step % STAGES]);
  };
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    barrier_wait(s.full[step % STAGES], step / STAGES & 1);
    auto& stage = s.ring[step % STAGES];
    const u64 w = wgmma_tile(stage.w[warp / 4 * 64], 16, 1024), x = wgmma_tile(stage.x, 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k) wgmma<T, COLUMNS, false>(sums, w + k * 32 / 16, x + k * 32 / 16, true);
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) release(step - 1);
  }
  wgmma_wait<0>();
  wgmma_keep(sums);
}

// The first numbers of four, where not all are `inside` one by one.
template <typename Y> __device__ __forceinline__ void store(Y* y, int inside, const float4& x) {
  if (inside >= 4 && reinterpret_cast<u64>(y) % (4 * sizeof(Y)) == 0) return store4(y, x);
  const float each[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < inside) y[i] = from_float<Y>(each[i]);
}

__device__ __forceinline__ float4 old(const float* y, int inside) {
  if (inside >= 4 && reinterpret_cast<u64>(y) % 16 == 0) return load4(y);
  return {y[0], inside > 1 ? y[1] : 0.f, inside > 2 ? y[2] : 0.f, inside > 3 ? y[3] : 0.f};
}

__device__ __forceinline__ float4 plus(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

__device__ __forceinline__ float relu_squared(float x) { return x > 0.f ? x * x : 0.f; }

template <typename T, int COLUMNS, int SPLIT, int SIDES>
__global__ void __launch_bounds__(THREADS, COLUMNS == 256 ? 1 : 2) __cluster_dims__(SPLIT* SIDES, 1, 1)
    rwkv6_batch_product(const __grid_constant__ Args args) {
  auto& s = *reinterpret_cast<Shared<T, COLUMNS>*>(dynamic_smem());
  launch_next();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (tid < s.STAGES) {
    barrier_init(s.full[tid], 1);
    barrier_init(s.empty[tid], SIDES * WARPS);
  }
  // The barriers stand, on both sides.
  if constexpr (SIDES > 1) cluster_sync();
  else __syncthreads();
  const Tile tile = tile_of_block<SPLIT, SIDES>(args);
  const Stack& stack = args.stacks[tile.stack];
  if (warp == WARPS) {
    if (lane == 0) copy<SIDES>(s, stack, tile);
    __syncwarp();
  } else {
    float sums[COLUMNS / 2] = {};
    multiply<SIDES>(s, tile.steps, sums);
    barrier_sync(1, CONSUMERS);  // the ring is free
    const int row = warp * 16 + (lane >> 2);
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s.parts[8 * n + 2 * (lane & 3) + e % 2][row + e / 2 * 8] = sums[4 * n + e];
  }
  wait_for_previous();
  // The blocks' parts stand.
  if constexpr (SPLIT > 1) cluster_sync();
  else __syncthreads();

  constexpr int QUADS = ROWS / 4, EACH = COLUMNS / SPLIT;  // columns that this block finishes
  const int rank = blockIdx.x % (SPLIT * SIDES), part = rank / SIDES, side = rank % SIDES, M = int(stack.M),
            B = int(args.B);
  for (int at = tid; at < EACH * QUADS; at += THREADS) {
    const int b = part * EACH + at / QUADS, m = at % QUADS * 4, row = tile.row + m;
    if (b >= B || row >= M) continue;
    float4 sum = {};
#pragma unroll
    for (int block = 0; block < SPLIT; ++block)
      sum = plus(sum, SPLIT > 1 ? load4_of_block(&s.parts[b][m], block * SIDES + side) : load4(&s.parts[b][m]));
    const i64 to = (i64(tile.which) * B + b) * M + row;
    float* const y = static_cast<float*>(stack.y) + to;
    switch (stack.finish) {
      case Finish::Write:
        store(y, M - row, sum);
        break;
      case Finish::Add:
        store(y, M - row, plus(sum, old(y, M - row)));
        break;
      case Finish::ReluSquared:
        store(static_cast<T*>(stack.y) + to, M - row,
              {relu_squared(sum.x), relu_squared(sum.y), relu_squared(sum.z), relu_squared(sum.w)});
        break;
    }
  }
  if constexpr (SPLIT * SIDES > 1) cluster_sync();  // the others have read this block's part, and arrive no more
}
