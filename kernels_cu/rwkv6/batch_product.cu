// what      Products of weights with a batch's vectors, at the rate at which memory delivers weights.
// math      y_b = W x_b, or y_b = relu(W x_b)^2, or parts of y_b, over a share of K each, whose sum is W x_b
// shapes    one or two stacks of products (Stack), each of C matrices: w [C, M, K] of type T, scales [C, M] with int8,
//           x [TERMS, C, B, K], y [C, B, M], or [SPLIT, C, B, M] in parts. A vector of TERMS terms is the sum of TERMS
//           numbers of its type, each times unit_of_term (decode.cuh); relu(W x)^2 is stored so, too. Up to eight
//           vectors (COLUMNS = 8) come in three terms, others in one; x is of type T, or bfloat16 beside int8
// grid      a cluster of SPLIT blocks, which share K, for every COLUMNS vectors and ROWS rows of a product, products
//           slowest. A block has two warpgroups (ROWS = 128: 64 rows each; ROWS = 64: the same rows, and half of a step
//           of K each), a thread that copies weights, and one that copies vectors
// smem      Shared: a ring of STAGES of weights and one of X_STAGES of vectors; then the block's part of y
// barriers  w_full, x_full: a stage has been copied; empty: all warps have multiplied it. Then two: the consuming warps
//           have read all stages (named barrier 1) | the parts of y, of the block or of the cluster's blocks, are in
//           shared memory
// numerics  tensor cores: x, or the three terms that hold a float, and weights as they are, int8 ones as bfloat16
//           numbers; float32 sums in a fixed order, times the row's scale. A column does not depend on others
// source    Peng et al., 2024, "Eagle and Finch", for the products
// limits    K a multiple of 8, with int8 of 16; all arrays start on 16 bytes; sm_90a
//
// Weights do not depend on the kernel before this one: copies of as many as fit have been started when x is complete.
#include "rwkv6/products.cuh"
#include "wgmma.cuh"

// From the includes:
//   wgmma_fence_operand(d): the compiler reads d after it only
//   Stack: products of one launch: `w`, `x` (tensor maps), `scales`, `y`, `finish`, `C` matrices of `M` rows; RowTile:
//     a block's rows of one of them: number of the stack, `which` matrix, first `row`; Steps: its part of K: first
//     number `k`, `count` of steps; Finish: what is stored of a product
//   store_terms, store4_terms: numbers as sums of TERMS terms; relu_squared: in units of UNIT_OF_SQUARES.
//     load4_of_block: from another block of the cluster; cluster_leave: all blocks have read each other's memory
//   rows_of_tile, steps_of_part: the rows of the block's tile, the steps of its part of K; STACKS: stacks of a launch;
//     SWIZZLED = 128 bytes of a row
//   MultipliedAs: int8 weights are multiplied as bfloat16; bf16_of_i8: two int8 numbers so; FLOAT_TERMS = 3

constexpr int CONSUMERS = 256, WARPS = CONSUMERS / 32, THREADS = CONSUMERS + 64;

struct Args {
  Stack stacks[STACKS];  // C = 0: an unused stack
  i64 B, K;
};

template <int COLUMNS> constexpr int TERMS = COLUMNS == 8 ? FLOAT_TERMS : 1;

template <typename T, int COLUMNS_, bool DEEP, int ROWS_> struct Shared {
  typedef typename MultipliedAs<T>::Type X;
  static constexpr bool WIDENS = sizeof(T) == 1;  // consumers read weights by plain loads, to convert them
  static constexpr int COLUMNS = COLUMNS_, TERMS = ::TERMS<COLUMNS>, ROWS = ROWS_;
  static_assert(ROWS == 64 || ROWS == 128);
  static constexpr int PITCH = ROWS + 4;     // distance of columns in `parts`, without bank conflicts
  static constexpr int SHARES = 128 / ROWS;  // 2: both warpgroups have the same 64 rows, and each a share of K
  static constexpr int DEPTH = SWIZZLED / sizeof(T),
                       BOX = SWIZZLED / sizeof(X);  // of K: in a box of weights, of vectors
  static constexpr int STEP = SHARES * DEPTH;
  static constexpr int MORE = SHARES - 1;  // 1 if there are two shares: one stage of weights less, and more of vectors
  // As many stages as fit. DEEP: one block has nearly all of a multiprocessor's shared memory; otherwise two share it.
  static constexpr int STAGES = (DEEP ? 11 : COLUMNS == 64 ? 5 : 6) - MORE;
  static constexpr int X_STAGES = ((DEEP ? 8 : 4) + 4 * MORE) * BOX / STEP;
  // Stages of weights that are being copied at a time until the previous kernel has ended. With more, its loads would
  // wait.
  static constexpr int FLIGHT = DEEP && TERMS > 1 ? 1 : 2;
  static_assert(FLIGHT <= STAGES && X_STAGES <= STAGES);  // the steps that copies wait for are still in the ring
  union {
    struct {
      T w[STAGES][SHARES][ROWS][DEPTH];  // in the 128-byte swizzle
      X x[X_STAGES][SHARES][DEPTH / BOX][TERMS][COLUMNS][BOX];
    };
    float parts[SHARES][COLUMNS][PITCH];  // y of the block's share of K, by warpgroup if both have the same rows
  };
  MBarrier w_full[STAGES], x_full[X_STAGES], empty[STAGES];
  volatile u64 started;  // whether the previous kernel has ended: x is complete; set by the thread that copies vectors
};

// A block's work: rows of a product, vectors from `column` on, and a part of K.
struct Tile {
  RowTile rows;
  int column;
  Steps steps;
};

// This block's work; parts of K vary fastest, then columns.
template <int ROWS, int COLUMNS, int SPLIT, int STEP> __device__ __forceinline__ Tile tile_of_block(const Args& args) {
  const int across = int(args.B + COLUMNS - 1) / COLUMNS, column = blockIdx.x / SPLIT % across * COLUMNS;
  return {rows_of_tile<ROWS>(args.stacks, blockIdx.x / SPLIT / across), column,
          steps_of_part<STEP>(args.K, blockIdx.x % SPLIT, SPLIT)};
}

// The loop of the thread that copies weights. A box of W is at (number of K, row, matrix of the stack).
template <class S> __device__ __forceinline__ void copy_weights(S& s, const Stack& stack, const Tile& tile) {
#pragma unroll 1
  for (int step = 0; step < tile.steps.count; ++step) {
    MBarrier& full = s.w_full[step % S::STAGES];
    if (step >= S::STAGES) {
      mbarrier_wait(s.empty[step % S::STAGES], step / S::STAGES - 1 & 1);
      if (S::WIDENS) fence_proxy_async();  // orders those reads before the copy that overwrites the stage
    }
    // Until the previous kernel has ended, the copy FLIGHT steps before this one must have arrived.
    if (const int last = step - S::FLIGHT; last >= 0 && !s.started)
      mbarrier_wait(s.w_full[last % S::STAGES], last / S::STAGES & 1);
    mbarrier_arrive_and_expect(full, sizeof s.w[0]);
    for (int share = 0; share < S::SHARES; ++share)
      tensor_load_evict_first(s.w[step % S::STAGES][share], stack.w, full,
                              tile.steps.k + step * S::STEP + share * S::DEPTH, tile.rows.row, tile.rows.which, 0);
  }
}

// The loop of the thread that copies vectors, after the previous kernel has ended.
template <class S> __device__ __forceinline__ void copy_vectors(S& s, const Stack& stack, const Tile& tile) {
  prefetch_tensor_map(stack.x);
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read
  s.started = 1;
#pragma unroll 1
  for (int step = 0; step < tile.steps.count; ++step) {
    const int before = step - S::X_STAGES;  // the step whose stage this one overwrites
    if (before >= 0) mbarrier_wait(s.empty[before % S::STAGES], before / S::STAGES & 1);
    auto& x = s.x[step % S::X_STAGES];
    MBarrier& full = s.x_full[step % S::X_STAGES];
    mbarrier_arrive_and_expect(full, sizeof x);
    for (int box = 0; box < S::STEP / S::BOX; ++box)
      tensor_load(x[0][box], stack.x, full, tile.steps.k + step * S::STEP + box * S::BOX, tile.column, 0,
                  tile.rows.which);
  }
}

// Converts a warp's 16 of the warpgroup's 64 rows of int8 weights to bfloat16, as left operands a[k] of wgmma for
// numbers 16 k ... 16 k + 15 of the step. w: those 64 rows, DEPTH = 128 numbers each, in the 128-byte swizzle. [0],
// [2]: row g, [1], [3]: row g + 8; [2], [3] are 8 numbers of K later.
template <int DEPTH> __device__ __forceinline__ void widen(u32 (&a)[DEPTH / 16][4], const i8 (*w)[DEPTH]) {
  static_assert(DEPTH == SWIZZLED);  // a row has eight times 16 bytes, as the swizzle, and g, have eight values
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u16* const upper = reinterpret_cast<const u16*>(w[(threadIdx.x >> 5) % 4 * 16 + g]);
#pragma unroll
  for (int k = 0; k < DEPTH / 16; ++k) {
    const u16* const pairs = upper + (k ^ g) * 8 + t;  // the swizzled place of 16 bytes of a row
    a[k][0] = bf16_of_i8(pairs[0]), a[k][1] = bf16_of_i8(pairs[8 * DEPTH / 2]);
    a[k][2] = bf16_of_i8(pairs[4]), a[k][3] = bf16_of_i8(pairs[8 * DEPTH / 2 + 4]);
  }
}

// Computes a warpgroup's 64 rows of the block's part of y, with columns for each term of each vector: of a warp's 16
// rows a lane has lane / 4 and 8 later, sums[4n + 2h + p] is row lane / 4 + 8h, column 8n + 2 (lane % 4) + p. Columns
// are [TERMS][COLUMNS]. A step takes 16 of K, 32 bytes.
template <typename T, class S>
__device__ __forceinline__ void multiply(S& s, int steps, float (&sums)[S::TERMS * S::COLUMNS / 2]) {
  typedef typename S::X X;
  constexpr int N = S::TERMS * S::COLUMNS, IN_BOX = S::BOX / 16;  // products of 16 of K
  const int group = threadIdx.x >> 7, share = S::SHARES > 1 ? group : 0, row = S::SHARES > 1 ? 0 : group * 64;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int stage = step % S::STAGES;
    auto& vectors = s.x[step % S::X_STAGES][share];
    auto* const weights = s.w[stage][share] + row;
    mbarrier_wait(s.w_full[stage], step / S::STAGES & 1);
    if constexpr (sizeof(T) == 1) {
      u32 a[S::DEPTH / 16][4];
      widen(a, weights);
      mbarrier_wait(s.x_full[step % S::X_STAGES], step / S::X_STAGES & 1);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < S::DEPTH / 16; ++k)  // 16 numbers are 32 bytes; descriptors count by 16 bytes
        wgmma<X, N, K_MAJOR>(sums, a[k], k_major_tile(vectors[k / IN_BOX]) + k % IN_BOX * 32 / 16, ACCUMULATE);
    } else {
      mbarrier_wait(s.x_full[step % S::X_STAGES], step / S::X_STAGES & 1);
      const u64 w = k_major_tile(weights), x = k_major_tile(vectors);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < IN_BOX; ++k) wgmma<X, N, K_MAJOR>(sums, w + k * 32 / 16, x + k * 32 / 16, ACCUMULATE);
    }
    wgmma_commit();
    // No overlap: weights arrive more slowly, and the stage should be free soon. int8 weights have been read, too, by
    // the plain loads of `widen`, since products have used them.
    wgmma_wait<0>();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(s.empty[stage]);
  }
  wgmma_fence_operand(sums);
}

// Stores the first `inside` of four numbers: at once if all four are inside and aligned, otherwise one by one.
template <int TERMS, typename Y> __device__ __forceinline__ void store(Y* y, i64 apart, int inside, const float4& x) {
  if (inside >= 4 && (reinterpret_cast<u64>(y) | u64(TERMS > 1 ? apart * sizeof(Y) : 0)) % (4 * sizeof(Y)) == 0)
    return store4_terms<TERMS>(y, apart, x);
  const float each[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < inside) store_terms<TERMS>(y + i, apart, each[i]);
}

// Four neighbouring rows from m on of column n of the block's part: the sum over the shares of K.
template <class S> __device__ __forceinline__ float4 sum_of_shares(const S& s, int n, int m) {
  const float4 sum = load4(&s.parts[0][n][m]);
  return S::SHARES > 1 ? plus(sum, load4(&s.parts[S::SHARES - 1][n][m])) : sum;
}

// Stores this block's part of y, which must be in shared memory. The kernel that reads y adds the parts.
template <int SPLIT, class S>
__device__ __forceinline__ void store_part(const S& s, const Args& args, const Stack& stack, const Tile& tile) {
  constexpr int QUADS = S::ROWS / 4;
  const int m = threadIdx.x % QUADS * 4, row = tile.rows.row + m, inside = int(stack.M) - row;
  const i64 matrices = blockIdx.x % SPLIT * stack.C + tile.rows.which;
#pragma unroll 4
  for (int n = threadIdx.x / QUADS; n < S::COLUMNS; n += THREADS / QUADS) {
    const int b = tile.column + n;
    if (b >= args.B || inside <= 0) break;
    store<1>(static_cast<float*>(stack.y) + (matrices * args.B + b) * stack.M + row, 0, inside, sum_of_shares(s, n, m));
  }
}

// Stores the columns of y that this block finishes, those of its number among the SPLIT blocks: the sums of all blocks'
// parts, which must be in shared memory.
template <int SPLIT, class S>
__device__ __forceinline__ void store_sums_of_parts(const S& s, const Args& args, const Stack& stack,
                                                    const Tile& tile) {
  static_assert(S::COLUMNS % SPLIT == 0);
  constexpr int QUADS = S::ROWS / 4, EACH = S::COLUMNS / SPLIT;  // columns that this block finishes
  constexpr int ITERATIONS = (EACH * QUADS + CONSUMERS - 1) / CONSUMERS;
  const int tid = threadIdx.x, first = blockIdx.x % SPLIT * EACH, m = tid % QUADS * 4, row = tile.rows.row + m;
  const int inside = int(stack.M) - row;
  float4 sums[ITERATIONS] = {};  // all loads are issued first: another block's memory has a long latency
#pragma unroll
  for (int iteration = 0; iteration < ITERATIONS; ++iteration) {
    const int n = tid / QUADS + iteration * (CONSUMERS / QUADS);
    if (tid >= CONSUMERS || n >= EACH) continue;
#pragma unroll
    for (int block = 0; block < SPLIT; ++block) {
      if (SPLIT == 1) sums[iteration] = sum_of_shares(s, n, m);
      else
#pragma unroll
        for (int share = 0; share < S::SHARES; ++share)
          sums[iteration] = plus(sums[iteration], load4_of_block(&s.parts[share][first + n][m], block));
    }
  }
#pragma unroll
  for (int iteration = 0; iteration < ITERATIONS; ++iteration) {
    const int n = tid / QUADS + iteration * (CONSUMERS / QUADS), b = tile.column + first + n;
    if (tid >= CONSUMERS || n >= EACH || b >= args.B || inside <= 0) continue;
    const float4& sum = sums[iteration];
    const i64 to = (tile.rows.which * args.B + b) * stack.M + row;
    if (stack.finish == Finish::ReluSquared) {
      const auto squared = [](float x) { return relu_squared<typename S::X, S::TERMS>(x); };
      store<S::TERMS>(static_cast<typename S::X*>(stack.y) + to, stack.C * args.B * stack.M, inside,
                      {squared(sum.x), squared(sum.y), squared(sum.z), squared(sum.w)});
    } else store<1>(static_cast<float*>(stack.y) + to, 0, inside, sum);
  }
}

template <typename T, int COLUMNS, int SPLIT, bool DEEP, int ROWS>
__global__ void __launch_bounds__(THREADS, DEEP ? 1 : 2) __cluster_dims__(SPLIT, 1, 1)
    rwkv6_batch_product(const __grid_constant__ Args args) {
  typedef Shared<T, COLUMNS, DEEP, ROWS> S;
  auto& s = *reinterpret_cast<S*>(dynamic_smem());
  launch_next();  // the next kernel may begin
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (tid == 0) {
    s.started = 0;
    for (int stage = 0; stage < s.STAGES; ++stage)
      mbarrier_init(s.w_full[stage], 1), mbarrier_init(s.empty[stage], WARPS);
    for (int stage = 0; stage < s.X_STAGES; ++stage) mbarrier_init(s.x_full[stage], 1);
    fence_proxy_async();  // bulk copies see the barriers
  }
  __syncthreads();  // the barriers are initialised
  const Tile tile = tile_of_block<ROWS, COLUMNS, SPLIT, S::STEP>(args);
  const Stack& stack = args.stacks[tile.rows.stack];
  if (warp >= WARPS) {
    if (lane == 0 && warp == WARPS) copy_weights(s, stack, tile);
    if (lane == 0 && warp > WARPS) copy_vectors(s, stack, tile);
    __syncwarp();  // the warp goes on together, to the block's barriers
  } else {
    const int row = warp % (ROWS / 16) * 16 + (lane >> 2);
    float scales[2] = {1.f, 1.f};
    if constexpr (sizeof(T) == 1)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        scales[half] = stack.scales[tile.rows.which * stack.M + min(tile.rows.row + row + 8 * half, int(stack.M) - 1)];
    float sums[TERMS<COLUMNS> * COLUMNS / 2] = {};
    multiply<T>(s, tile.steps.count, sums);
    named_barrier_sync(1, CONSUMERS);  // all stages have been read: the parts of y overwrite them
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float sum = 0.f;  // of the terms, the least first
#pragma unroll
        for (int term = TERMS<COLUMNS> - 1; term >= 0; --term)
          sum = fmaf(unit_of_term<typename S::X, TERMS<COLUMNS>>(term), sums[4 * n + term * COLUMNS / 2 + e], sum);
        s.parts[warp / (ROWS / 16)][8 * n + 2 * (lane & 3) + e % 2][row + e / 2 * 8] = scales[e / 2] * sum;
      }
  }
  wait_for_previous();  // the previous kernel has ended: y, which it may read, may be overwritten
  if (stack.finish == Finish::Parts) {
    __syncthreads();  // the block's part is in shared memory
    return store_part<SPLIT>(s, args, stack, tile);
  }
  // The blocks' parts are in shared memory.
  if constexpr (SPLIT > 1) cluster_sync_shared();
  else __syncthreads();
  store_sums_of_parts<SPLIT>(s, args, stack, tile);
  if constexpr (SPLIT > 1) cluster_leave();  // the others have read this block's part
}
