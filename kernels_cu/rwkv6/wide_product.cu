// what      Products of weights with a large batch's vectors, at the rate of the memory or of the tensor cores.
// math      y_b = W x_b, or y_b = relu(W x_b)^2, or parts of y_b, over a share of K each, whose sum is W x_b
// shapes    one or two stacks of products (Stack), each of C matrices: w [C, M, K], x [C, B, K], y [C, B, M], or
//           [parts, C, B, M]; x of type T
// grid      a cluster of HALVES blocks, with VECTORS vectors each, for every ROWS rows and share of K. A block has a
//           warpgroup for every 64 of its VECTORS, a thread that copies weights, and one that copies vectors
// smem      Shared: a ring of W_STAGES of weights and one of X_STAGES of vectors
// barriers  w_full, x_full: a stage has been copied; w_empty, x_empty: it has been read, here and, of weights, in the
//           block to which this one copies
// numerics  tensor cores: x and weights as they are, float32 sums in a fixed order. A column does not depend on others
// source    Peng et al., 2024, "Eagle and Finch", for the products
// limits    K and M multiples of 8; all arrays start on 16 bytes; sm_90a
//
// The two blocks of a cluster take turns to copy weights to both. Weights do not depend on the kernel before this one:
// copies of as many as fit have been started when x is complete.
#include "clusters.cuh"
#include "rwkv6/products.cuh"
#include "rwkv6/squares.cuh"
#include "wgmma.cuh"

// From the includes:
//   wgmma_fence_operand(d): the compiler reads d after it only
//   Stack: products of one launch: `w`, `x` (tensor maps), `y`, `finish`, `C` matrices of `M` rows; RowTile: a block's
//     rows of one of them: number of the stack, `which` matrix, first `row`; Steps: its part of K: first number `k`,
//     `count` of steps; Finish: what is stored of a product
//   tensor_load_to: to several blocks of the cluster; tensor_prefetch: to L2
//   store_squares: stores relu(sums)^2 of a warp's 16 vectors
//   rows_of_tile, steps_of_part: the rows of the block's tile, the steps of its part of K; STACKS: stacks of a launch
//   cluster_leave: all blocks have read each other's memory; arrive_at_block: at another block's barrier
//   launch_next: the next kernel may start before this one ends; wait_for_previous: until the kernel before has ended
//   k_major_tile: wgmma's descriptor of a tile whose rows are 64 numbers of K; K_MAJOR: the product sums over a row

constexpr int DEPTH = 64;  // numbers of K in a step
constexpr int AHEAD = 4;   // steps by which a cluster's blocks copy weights to L2 ahead of their stages

struct Args {
  Stack stacks[STACKS];  // C = 0: an unused stack
  i64 B, K, parts;
};

// HALVES: blocks of a cluster, each with its share of the vectors, 1 or 2. GROUPS: warpgroups of a block that multiply.
template <int ROWS_, int HALVES_, int GROUPS, bool DEEP> struct Layout {
  static constexpr int ROWS = ROWS_, HALVES = HALVES_, VECTORS = 64 * GROUPS, WARPS = 4 * GROUPS;
  // With HALVES = 1 two blocks share a multiprocessor. DEEP: one stage more than that allows, so that a block starts
  // when the previous product's block on its multiprocessor has ended.
  static constexpr int W_STAGES = HALVES > 1 ? 6 : 512 / ROWS + DEEP, X_STAGES = 6;
  // Stages of weights that are being copied at a time until the previous kernel has ended. With more, its loads would
  // wait.
  static constexpr int FLIGHT = HALVES == 1 ? 2 : W_STAGES;
  static_assert(FLIGHT <= W_STAGES);  // the step that a copy waits for is still in the ring
  static_assert(W_STAGES % HALVES == 0, "the same block always copies to a stage");
};

template <typename T, class S> struct Shared {
  T w[S::W_STAGES][S::ROWS][DEPTH], x[S::X_STAGES][S::VECTORS][DEPTH];  // in the 128-byte swizzle
  static_assert(DEPTH * sizeof(T) == SWIZZLED);
  MBarrier w_full[S::W_STAGES], w_empty[S::W_STAGES], x_full[S::X_STAGES], x_empty[S::X_STAGES];
  volatile u64 started;  // whether the previous kernel has ended: x is complete; set by the thread that copies vectors
};

// A block's work: rows of a product, vectors from `column` on, and a part of K.
struct Tile {
  RowTile rows;
  int column, part;
  Steps steps;
};

// Whether this block of the cluster copies to a stage of weights.
template <class S> __device__ __forceinline__ bool copies(int stage) { return (blockIdx.x ^ stage) % S::HALVES == 0; }

// This block's work; columns vary fastest, then parts of K.
template <class S> __device__ __forceinline__ Tile tile_of_block(const Args& args) {
  constexpr int COLUMNS = S::HALVES * S::VECTORS;  // of a cluster
  const int across = int(args.B + COLUMNS - 1) / COLUMNS, parts = int(args.parts), tile = blockIdx.x / S::HALVES;
  const int column = tile % across * COLUMNS + blockIdx.x % S::HALVES * S::VECTORS, part = tile / across % parts;
  return {rows_of_tile<S::ROWS>(args.stacks, tile / across / parts), column, part,
          steps_of_part<DEPTH>(args.K, part, parts)};
}

// The loop of the thread that copies weights.
template <class S, class Memory>
__device__ __forceinline__ void copy_weights(Memory& s, const Stack& stack, const Tile& tile) {
#pragma unroll 1
  for (int step = 0; step < tile.steps.count; ++step) {
    const int stage = step % S::W_STAGES, k = tile.steps.k + step * DEPTH;
    if (step >= S::W_STAGES) mbarrier_wait(s.w_empty[stage], step / S::W_STAGES - 1 & 1);
    // Until the previous kernel has ended, the copy FLIGHT steps before this one must have arrived.
    if (const int last = step - S::FLIGHT; last >= 0 && !s.started)
      mbarrier_wait(s.w_full[last % S::W_STAGES], last / S::W_STAGES & 1);
    mbarrier_arrive_and_expect(s.w_full[stage], sizeof s.w[0]);
    if constexpr (S::HALVES == 1)
      tensor_load_evict_first(s.w[stage], stack.w, s.w_full[stage], k, tile.rows.row, tile.rows.which, 0);
    else if (copies<S>(stage))
      tensor_load_to((1 << S::HALVES) - 1, s.w[stage], stack.w, s.w_full[stage], k, tile.rows.row, tile.rows.which, 0);
    // In a cluster, weights are copied to L2 before a stage is free for them.
    if (const int later = step + AHEAD;
        S::HALVES > 1 && step >= S::W_STAGES && later < tile.steps.count && copies<S>(later))
      tensor_prefetch(stack.w, tile.steps.k + later * DEPTH, tile.rows.row, tile.rows.which, 0);
  }
}

// The loop of the thread that copies vectors, after the previous kernel has ended.
template <class S, class Memory>
__device__ __forceinline__ void copy_vectors(Memory& s, const Stack& stack, const Tile& tile) {
  prefetch_tensor_map(stack.x);
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read
  s.started = 1;
#pragma unroll 1
  for (int step = 0; step < tile.steps.count; ++step) {
    const int stage = step % S::X_STAGES;
    if (step >= S::X_STAGES) mbarrier_wait(s.x_empty[stage], step / S::X_STAGES - 1 & 1);
    mbarrier_arrive_and_expect(s.x_full[stage], sizeof s.x[0]);
    tensor_load(s.x[stage], stack.x, s.x_full[stage], tile.steps.k + step * DEPTH, tile.column, 0, tile.rows.which);
  }
}

// Computes the products of a warpgroup's 64 vectors with the block's rows: of a warp's 16 vectors a lane has lane / 4
// and 8 later, sums[4n + 2h + p] is vector lane / 4 + 8h, row 8n + 2 (lane % 4) + p. An instruction takes 16 numbers of
// K, 32 bytes of each row.
template <typename T, class S>
__device__ __forceinline__ void multiply(Shared<T, S>& s, int steps, float (&sums)[S::ROWS / 2]) {
  const int lane = threadIdx.x & 31, first_vector = threadIdx.x / 128 * 64;
  // Says that a step's stages have been read, if they are filled again: to this block and, of weights, to the block
  // that copies them to both. Vectors are this block's own.
  const auto release = [&](int step) {
    const int w = step % S::W_STAGES, x = step % S::X_STAGES;
    if (step + S::W_STAGES < steps) {
      if (lane == 0) mbarrier_arrive(s.w_empty[w]);
      if (lane == 1 && !copies<S>(w)) arrive_at_block(s.w_empty[w], w % S::HALVES);
    }
    if (step + S::X_STAGES < steps && lane == 2) mbarrier_arrive(s.x_empty[x]);
  };
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(s.w_full[step % S::W_STAGES], step / S::W_STAGES & 1);
    mbarrier_wait(s.x_full[step % S::X_STAGES], step / S::X_STAGES & 1);
    const u64 w = k_major_tile(s.w[step % S::W_STAGES]), x = k_major_tile(s.x[step % S::X_STAGES][first_vector]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k) wgmma<T, S::ROWS, K_MAJOR>(sums, x + k * 32 / 16, w + k * 32 / 16, ACCUMULATE);
    wgmma_commit();
    wgmma_wait<1>();  // the step before has been read; this one runs on while the next stages are waited for
    if (step > 0) release(step - 1);
  }
  wgmma_wait<0>();
  wgmma_fence_operand(sums);
}

// Stores y: sums of the block's rows from `row` on, of vectors b and b + 8 below B. Of every eight rows a lane has two
// neighbours, of two vectors. Two lanes exchange numbers of 16 rows, so that each stores four neighbours at once.
template <int ROWS>
__device__ __forceinline__ void store(float* y, i64 M, int row, int b, int B, const float (&sums)[ROWS / 2]) {
  const bool odd = threadIdx.x & 1;
  row += 2 * (threadIdx.x & 3);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* const to = y + (b + 8 * half) * M;
    const bool inside = b + 8 * half < B;
#pragma unroll
    for (int n = 0; n + 1 < ROWS / 8; n += 2) {
      const float2 lower = {sums[4 * n + 2 * half], sums[4 * n + 2 * half + 1]};
      const float2 upper = {sums[4 * n + 4 + 2 * half], sums[4 * n + 4 + 2 * half + 1]};
      const float4 four = pairs_of_two_lanes(lower, upper, odd);
      // Even lanes store numbers of the first eight rows, odd lanes of the other eight.
      const int first_row = row + 8 * n + (odd ? 8 - 2 : 0);
      if (inside && first_row < M) store4(to + first_row, four);
    }
    if constexpr (ROWS % 16) {
      constexpr int n = ROWS / 8 - 1;  // the last eight rows, without another eight
      if (inside && row + 8 * n < M) store2(to + row + 8 * n, {sums[4 * n + 2 * half], sums[4 * n + 2 * half + 1]});
    }
  }
}

template <typename T, int ROWS, int HALVES, int GROUPS, bool DEEP>
__global__ void __launch_bounds__(128 * GROUPS + 64, 3 - HALVES) __cluster_dims__(HALVES, 1, 1)
    rwkv6_wide_product(const __grid_constant__ Args args) {
  using S = Layout<ROWS, HALVES, GROUPS, DEEP>;
  auto& s = *reinterpret_cast<Shared<T, S>*>(dynamic_smem());
  launch_next();  // the next kernel may begin
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (tid == 0) {
    s.started = 0;
    for (int stage = 0; stage < S::W_STAGES; ++stage) {
      mbarrier_init(s.w_full[stage], 1);
      mbarrier_init(s.w_empty[stage], S::WARPS * (copies<S>(stage) ? HALVES : 1));
    }
    for (int stage = 0; stage < S::X_STAGES; ++stage) {
      mbarrier_init(s.x_full[stage], 1);
      mbarrier_init(s.x_empty[stage], S::WARPS);
    }
    fence_proxy_async();  // bulk copies see the barriers
  }
  // The barriers of all blocks of the cluster are initialised.
  if constexpr (HALVES > 1) cluster_sync();
  else __syncthreads();
  const Tile tile = tile_of_block<S>(args);
  const Stack& stack = args.stacks[tile.rows.stack];
  if (warp >= S::WARPS) {
    if (lane == 0 && warp == S::WARPS) copy_weights<S>(s, stack, tile);
    if (lane == 0 && warp > S::WARPS) copy_vectors<S>(s, stack, tile);
    __syncwarp();  // the warp goes on together
  } else {
    float sums[ROWS / 2] = {};
    multiply(s, tile.steps.count, sums);
    wait_for_previous();  // the previous kernel has ended: y, which it may read, may be overwritten
    const int row = tile.rows.row, b = tile.column + warp * 16 + (lane >> 2), B = int(args.B);
    const i64 matrix = stack.finish == Finish::Parts ? tile.part * stack.C + tile.rows.which : tile.rows.which;
    const i64 index = matrix * B * stack.M;
    if (stack.finish == Finish::ReluSquared)
      store_squares<ROWS>(static_cast<T*>(stack.y) + index, stack.M, row, b, B, sums);
    else store<ROWS>(static_cast<float*>(stack.y) + index, stack.M, row, b, B, sums);
  }
  if constexpr (HALVES > 1) cluster_leave();  // no block ends while the other one may copy or arrive there
}
