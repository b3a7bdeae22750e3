// what      The first product of a prompt's channel mix, with its activation: relu squared reads and writes no memory.
// math      y = relu(x W^T)^2 in units of UNIT_OF_SQUARES<T>
// shapes    x [tokens, K], w [M, K], y [tokens, M]
// grid      clusters of two blocks, as many as run at the same time; a cluster computes tiles of 256 tokens, 128 of
//           each block, and ROWS rows of w, one after the other. Two warpgroups have 64 tokens each, a thread copies
// smem      Shared: a ring of STAGES, of DEPTH numbers of K each
// barriers  full: a stage has been copied; empty: both blocks have read it
// numerics  tensor cores: float32 sums in a fixed order, rounded once
// source    Peng et al., 2024, "Eagle and Finch", section 4
// limits    K and M multiples of 8; all arrays start on 16 bytes; sm_90a
//
// Each block copies its tokens, and half of the rows to both.
#include "clusters.cuh"
#include "rwkv6/squares.cuh"
#include "wgmma.cuh"

// From the includes:
//   wgmma_fence_operand(d): the compiler reads d after it only
//   store_squares: stores relu(sums)^2 of a warp's 16 tokens
//   tensor_load_to: to several blocks of the cluster; arrive_at_block: at another block's barrier
//   cluster_leave: all blocks have read each other's memory
//   launch_next: the next kernel may start before this one ends; wait_for_previous: until the kernel before has ended
//   k_major_tile: wgmma's descriptor of a tile whose rows are 64 numbers of K; K_MAJOR: the product sums over a row

constexpr int DEPTH = 64, TOKENS = 128, ROWS = 256, STAGES = 4, WARPS = 8, BLOCKS = 2;

struct Args {
  TensorMap x, w;  // boxes [128 tokens or rows, DEPTH]
  void* y;
  i64 tokens, M, K;
};

static_assert(TOKENS == 16 * WARPS);  // a warpgroup has 64 tokens

template <typename T> struct Shared {
  T x[STAGES][TOKENS][DEPTH], w[STAGES][ROWS][DEPTH];  // in the 128-byte swizzle
  static_assert(DEPTH * sizeof(T) == 128);
  MBarrier full[STAGES], empty[STAGES];
};

// The tiles of this block's cluster, which this object goes through: of each the first token of the block, and the
// first row. Clusters that run at the same time have the same rows where they can.
struct Tiles {
  int across, left, tile;  // across: tiles of one range of rows

  __device__ __forceinline__ explicit Tiles(const Args& args)
      : across(int(args.tokens + BLOCKS * TOKENS - 1) / (BLOCKS * TOKENS)), tile(blockIdx.x / BLOCKS) {
    left = across * (int(args.M + ROWS - 1) / ROWS) - tile;
  }
  __device__ __forceinline__ bool go_on() const { return left > 0; }
  __device__ __forceinline__ void next() {
    const int clusters = gridDim.x / BLOCKS;
    tile += clusters, left -= clusters;
  }
  __device__ __forceinline__ int token() const {
    return tile % across * BLOCKS * TOKENS + blockIdx.x % BLOCKS * TOKENS;
  }
  __device__ __forceinline__ int row() const { return tile / across * ROWS; }
};

// The loop of the thread that copies. `step` counts steps of all tiles.
template <typename T> __device__ __forceinline__ void copy(Shared<T>& s, const Args& args) {
  constexpr int HALF = ROWS / BLOCKS;
  const int steps = int(args.K + DEPTH - 1) / DEPTH, half = blockIdx.x % BLOCKS * HALF;
  prefetch_tensor_map(args.w);
  prefetch_tensor_map(args.x);
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read
  int step = 0;
#pragma unroll 1
  for (Tiles tiles(args); tiles.go_on(); tiles.next())
#pragma unroll 1
    for (int n = 0; n < steps; ++n, ++step) {
      const int stage = step % STAGES;
      if (step >= STAGES) mbarrier_wait(s.empty[stage], step / STAGES - 1 & 1);
      mbarrier_arrive_and_expect(s.full[stage], sizeof s.x[0] + sizeof s.w[0]);
      tensor_load(s.x[stage], args.x, s.full[stage], n * DEPTH, tiles.token(), 0, 0);
      tensor_load_to((1 << BLOCKS) - 1, s.w[stage][half], args.w, s.full[stage], n * DEPTH, tiles.row() + half, 0, 0);
    }
}

// Computes and stores the tiles of a warpgroup's 64 tokens. Sums: as wgmma leaves them.
template <typename T> __device__ __forceinline__ void multiply(Shared<T>& s, const Args& args) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, steps = int(args.K + DEPTH - 1) / DEPTH;
  int step = 0;
  // Says to both blocks that a step's stage has been read.
  const auto release = [&](int step) {
    if (lane < BLOCKS) arrive_at_block(s.empty[step % STAGES], lane);
  };
#pragma unroll 1
  for (Tiles tiles(args); tiles.go_on(); tiles.next()) {
    float sums[ROWS / 2];
#pragma unroll 1
    for (int n = 0; n < steps; ++n, ++step) {
      const int stage = step % STAGES;
      mbarrier_wait(s.full[stage], step / STAGES & 1);
      const u64 x = k_major_tile(s.x[stage][warp / 4 * 64]), w = k_major_tile(s.w[stage]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < DEPTH / 16; ++k) wgmma<T, ROWS, K_MAJOR>(sums, x + k * 32 / 16, w + k * 32 / 16, n + k > 0);
      wgmma_commit();
      wgmma_wait<1>();  // the step before has been read; this one runs on while the next stage is waited for
      if (n > 0) release(step - 1);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(sums);
    release(step - 1);
    store_squares<ROWS>(static_cast<T*>(args.y), args.M, tiles.row(), tiles.token() + warp * 16 + (lane >> 2),
                        int(args.tokens), sums);
  }
}

template <typename T>
__global__ void __launch_bounds__(32 * WARPS + 32, 1) __cluster_dims__(BLOCKS, 1, 1)
    rwkv6_squared_product(const __grid_constant__ Args args) {
  auto& s = *reinterpret_cast<Shared<T>*>(dynamic_smem());
  launch_next();  // the next kernel may begin
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(s.full[stage], 1);
      mbarrier_init(s.empty[stage], BLOCKS * WARPS);
    }
    fence_proxy_async();  // bulk copies see the barriers
  }
  cluster_sync();  // the barriers of both blocks are initialised
  if (threadIdx.x < 32 * WARPS) multiply(s, args);
  else {
    if (threadIdx.x % 32 == 0) copy(s, args);
    __syncwarp();  // the warp goes on together
  }
  cluster_leave();  // no block ends while the other one may copy or arrive there
}
