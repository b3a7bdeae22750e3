// what      Products of weights with a batch's vectors, at the rate of the memory.
// math      y_b = W x_b, or y_b = relu(W x_b)^2, or the sum of y_b's parts is W x_b
// shapes    each stack of products: w [C, M, K], x [TERMS, C, B, K] of type T, y [C, B, M], or [SPLIT, C, B, M] in
//           parts; relu(W x)^2 in terms as x. Up to eight vectors, COLUMNS = 8, come in three terms, others in one
// grid      SPLIT blocks, a cluster, for every COLUMNS vectors of every 128 rows of a product, products in turn; each
//           has a part of K. Two warpgroups with 64 rows each; a thread that copies weights, and one for vectors
// smem      Shared: STAGES of weights and X_STAGES of vectors on their way, or the block's part of y
// barriers  full: a stage stands; empty: all warps have multiplied it; then the warps' parts of y, the blocks' parts
// numerics  tensor cores: x, or the three terms that hold a float, and weights as they are; float32 sums in a fixed
//           order. A column does not depend on others
// source    Peng et al., 2024, "Eagle and Finch", for the products
// limits    K a multiple of 8; all start on 16 bytes; sm_90a
//
// Weights do not wait for the kernel before this one: as much of them as there is room for is on its way when x comes.
#include "decode.cuh"

constexpr int ROWS = 128, DEPTH = 64, STACKS = 2;
constexpr int CONSUMERS = 256, WARPS = CONSUMERS / 32, THREADS = CONSUMERS + 64;
// Stages of weights asked for and not yet come until x stands: what small kernels load before queues behind them.
constexpr int FLIGHT = 3;
constexpr int PITCH = ROWS + 4;  // of a column of parts; no bank conflicts

enum class Finish : i64 { Write, ReluSquared = 2, Parts };

struct Stack {
  TensorMap w;  // boxes of DEPTH by ROWS
  TensorMap x;  // of DEPTH by COLUMNS
  void* y;
  i64 C, M;
  Finish finish;
};

struct Args {
  Stack stacks[STACKS];  // C = 0 where there is one
  i64 B, K;
};

template <int COLUMNS> constexpr int TERMS = COLUMNS == 8 ? FLOAT_TERMS : 1;

template <typename T, int COLUMNS, bool DEEP> struct Shared {
  // Two blocks share a multiprocessor, or one has it almost for itself where DEEP.
  static constexpr int STAGES = DEEP ? 11 : COLUMNS == 64 ? 5 : 6, X_STAGES = 4;
  union {
    struct {
      T w[STAGES][ROWS][DEPTH], x[X_STAGES][TERMS<COLUMNS>][COLUMNS][DEPTH];  // in the 128-byte swizzle
    };
    float parts[COLUMNS][PITCH];
  };
  Barrier w_full[STAGES], x_full[X_STAGES], empty[STAGES];
  volatile u64 started;  // whether x stands
};

// 128 rows of a product, some vectors, and this block's part of K.
struct Tile {
  int stack, which, row, column, k, steps;
};

template <int COLUMNS, int SPLIT> __device__ __forceinline__ Tile tile_of_block(const Args& args) {
  const int all = int(args.K + DEPTH - 1) / DEPTH, each = (all + SPLIT - 1) / SPLIT, rank = blockIdx.x % SPLIT;
  const auto tiles_of = [&](int stack) { return int(args.stacks[stack].M + ROWS - 1) / ROWS; };
  const int across = int(args.B + COLUMNS - 1) / COLUMNS, column = blockIdx.x / SPLIT % across * COLUMNS;
  int tile = blockIdx.x / SPLIT / across, stack = 0, tiles = tiles_of(0);
  if (const int before = tiles * int(args.stacks[0].C); tile >= before) tile -= before, stack = 1, tiles = tiles_of(1);
  const int steps = min(each, max(0, all - rank * each));
  return {stack, tile / tiles, tile % tiles * ROWS, column, rank * each * DEPTH, steps};
}

// One thread copies weights for all.
template <typename T, int COLUMNS, bool DEEP>
__device__ __forceinline__ void copy_weights(Shared<T, COLUMNS, DEEP>& s, const Stack& stack, const Tile& tile) {
  constexpr int STAGES = Shared<T, COLUMNS, DEEP>::STAGES;
#pragma unroll 1
  for (int step = 0; step < tile.steps; ++step) {
    Barrier& full = s.w_full[step % STAGES];
    if (step >= STAGES) barrier_wait(s.empty[step % STAGES], step / STAGES - 1 & 1);
    if (const int last = step - FLIGHT; last >= 0 && !s.started)
      barrier_wait(s.w_full[last % STAGES], last / STAGES & 1);
    barrier_expect(full, sizeof s.w[0]);
    tensor_load_once(s.w[step % STAGES], stack.w, full, tile.k + step * DEPTH, tile.row, tile.which, 0);
  }
}

// Another copies vectors, once they stand.
template <typename T, int COLUMNS, bool DEEP>
__device__ __forceinline__ void copy_vectors(Shared<T, COLUMNS, DEEP>& s, const Stack& stack, const Tile& tile) {
  constexpr int STAGES = Shared<T, COLUMNS, DEEP>::STAGES, X_STAGES = Shared<T, COLUMNS, DEEP>::X_STAGES;
  prefetch_map(stack.x);
  wait_for_previous();
  s.started = 1;
#pragma unroll 1
  for (int step = 0; step < tile.steps; ++step) {
    const int before = step - X_STAGES;  // whose place this takes
    if (before >= 0) barrier_wait(s.empty[before % STAGES], before / STAGES & 1);
    auto& x = s.x[step % X_STAGES];
    Barrier& full = s.x_full[step % X_STAGES];
    barrier_expect(full, sizeof x);
    for (int term = 0; term < TERMS<COLUMNS>; ++term)
      tensor_load(x[term], stack.x, full, tile.k + step * DEPTH, tile.column, tile.which, term);
  }
}

// A warpgroup's 64 rows of the block's part of y, term by term.
template <typename T, int COLUMNS, bool DEEP>
__device__ __forceinline__ void multiply(Shared<T, COLUMNS, DEEP>& s, int steps,
                                         float (&sums)[TERMS<COLUMNS> * COLUMNS / 2]) {
  constexpr int STAGES = Shared<T, COLUMNS, DEEP>::STAGES, X_STAGES = Shared<T, COLUMNS, DEEP>::X_STAGES;
  const int warp = threadIdx.x >> 5;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    barrier_wait(s.w_full[step % STAGES], step / STAGES & 1);
    barrier_wait(s.x_full[step % X_STAGES], step / X_STAGES & 1);
    const u64 w = wgmma_tile(s.w[step % STAGES][warp / 4 * 64], 16, 1024),
              x = wgmma_tile(s.x[step % X_STAGES], 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k)
      wgmma<T, TERMS<COLUMNS> * COLUMNS, false>(sums, w + k * 32 / 16, x + k * 32 / 16, true);
    wgmma_commit();
    wgmma_wait<0>();  // weights come more slowly: what counts is room for them
    if ((threadIdx.x & 31) == 0) barrier_arrive(s.empty[step % STAGES]);
  }
  wgmma_keep(sums);
}

// The first numbers of four, where not all are `inside` one by one.
template <int TERMS, typename Y> __device__ __forceinline__ void store(Y* y, i64 apart, int inside, const float4& x) {
  if (inside >= 4 && (reinterpret_cast<u64>(y) | u64(TERMS > 1 ? apart * sizeof(Y) : 0)) % (4 * sizeof(Y)) == 0)
    return store4_terms<TERMS>(y, apart, x);
  const float each[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < inside) store_terms<TERMS>(y + i, apart, each[i]);
}

__device__ __forceinline__ float4 plus(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

__device__ __forceinline__ float relu_squared(float x) { return x > 0.f ? x * x : 0.f; }

// This block's part, as it is: who reads y adds all of them.
template <int SPLIT, typename T, int COLUMNS, bool DEEP>
__device__ __forceinline__ void store_part(const Shared<T, COLUMNS, DEEP>& s, const Args& args, const Tile& tile) {
  const Stack& stack = args.stacks[tile.stack];
  const int m = threadIdx.x % (ROWS / 4) * 4, row = tile.row + m, inside = int(stack.M) - row;
  const i64 matrices = blockIdx.x % SPLIT * stack.C + tile.which;
#pragma unroll 4
  for (int n = threadIdx.x / (ROWS / 4); n < COLUMNS; n += THREADS / (ROWS / 4)) {
    const int b = tile.column + n;
    if (b >= args.B || inside <= 0) break;
    store<1>(static_cast<float*>(stack.y) + (matrices * args.B + b) * stack.M + row, 0, inside, load4(&s.parts[n][m]));
  }
}

template <typename T, int COLUMNS, int SPLIT, bool DEEP>
__global__ void __launch_bounds__(THREADS, DEEP ? 1 : 2) __cluster_dims__(SPLIT, 1, 1)
    rwkv6_batch_product(const __grid_constant__ Args args) {
  auto& s = *reinterpret_cast<Shared<T, COLUMNS, DEEP>*>(dynamic_smem());
  launch_next();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (tid == 0) {
    s.started = 0;
    for (int stage = 0; stage < s.STAGES; ++stage)
      barrier_init(s.w_full[stage], 1), barrier_init(s.empty[stage], WARPS);
    for (int stage = 0; stage < s.X_STAGES; ++stage) barrier_init(s.x_full[stage], 1);
  }
  __syncthreads();  // the barriers stand
  const Tile tile = tile_of_block<COLUMNS, SPLIT>(args);
  const Stack& stack = args.stacks[tile.stack];
  if (warp >= WARPS) {
    if (lane == 0 && warp == WARPS) copy_weights(s, stack, tile);
    if (lane == 0 && warp > WARPS) copy_vectors(s, stack, tile);
    __syncwarp();
  } else {
    float sums[TERMS<COLUMNS> * COLUMNS / 2] = {};
    multiply(s, tile.steps, sums);
    barrier_sync(1, CONSUMERS);  // the ring is free
    const int row = warp * 16 + (lane >> 2);
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float sum = 0.f;  // of the terms, the least first
#pragma unroll
        for (int term = TERMS<COLUMNS> - 1; term >= 0; --term)
          sum = fmaf(unit_of_term<T, TERMS<COLUMNS>>(term), sums[4 * n + term * COLUMNS / 2 + e], sum);
        s.parts[8 * n + 2 * (lane & 3) + e % 2][row + e / 2 * 8] = sum;
      }
  }
  wait_for_previous();
  if (stack.finish == Finish::Parts) {
    __syncthreads();  // the block's part stands
    return store_part<SPLIT>(s, args, tile);
  }
  // The blocks' parts stand.
  if constexpr (SPLIT > 1) cluster_sync_shared();
  else __syncthreads();

  constexpr int QUADS = ROWS / 4, EACH = COLUMNS / SPLIT;  // columns that this block finishes
  constexpr int TURNS = (EACH * QUADS + CONSUMERS - 1) / CONSUMERS;
  const int first = blockIdx.x % SPLIT * EACH, m = tid % QUADS * 4, row = tile.row + m, inside = int(stack.M) - row;
  float4 sums[TURNS] = {};  // all loads at once: another block's memory is far
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int n = tid / QUADS + turn * (CONSUMERS / QUADS);
    if (tid >= CONSUMERS || n >= EACH) continue;
#pragma unroll
    for (int block = 0; block < SPLIT; ++block) {
      const float* const part = &s.parts[first + n][m];
      sums[turn] = plus(sums[turn], SPLIT > 1 ? load4_of_block(part, block) : load4(part));
    }
  }
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int n = tid / QUADS + turn * (CONSUMERS / QUADS), b = tile.column + first + n;
    if (tid >= CONSUMERS || n >= EACH || b >= args.B || inside <= 0) continue;
    const float4& sum = sums[turn];
    const i64 to = (tile.which * args.B + b) * stack.M + row;
    if (stack.finish == Finish::ReluSquared)
      store<TERMS<COLUMNS>>(static_cast<T*>(stack.y) + to, stack.C * args.B * stack.M, inside,
                            {relu_squared(sum.x), relu_squared(sum.y), relu_squared(sum.z), relu_squared(sum.w)});
    else store<1>(static_cast<float*>(stack.y) + to, 0, inside, sum);
  }
  if constexpr (SPLIT > 1) cluster_leave();  // the others have read this block's part
}
