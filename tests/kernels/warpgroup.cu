// what      One warpgroup that applies one function of ptx.cuh: the template argument says which.
// shapes    in, out: whatever the case reads and writes; n: how many
// grid      one block of four warps
// smem      48 KiB
// limits    sm_90a
#include "wgmma.cuh"

struct WarpgroupArgs {
  const void* in;
  void* out;
  i64 n;
};

// in [128] float; out [2, 128]: in reversed within each half, and as a whole.
struct NamedBarrier {
  __device__ static void run(const WarpgroupArgs& args) {
    const int thread = threadIdx.x, half = thread / 64;
    float* s = reinterpret_cast<float*>(dynamic_smem());
    float* out = static_cast<float*>(args.out);
    s[thread] = static_cast<const float*>(args.in)[thread];
    named_barrier_sync(1 + half, 64);  // the half of s is whole
    out[thread] = s[thread ^ 63];
    named_barrier_sync(3, 128);  // s is whole; the other half may still be in its own barrier
    out[128 + thread] = s[thread ^ 127];
  }
};

// in [n, 32] float, which the first warp passes on through two stages; out [3, 32]: what the others make of
// each column's x, the last of y = 2 y + x.
struct Stages {
  __device__ static void run(const WarpgroupArgs& args) {
    constexpr int STAGES = 2;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* s = reinterpret_cast<float*>(dynamic_smem());  // [STAGES, 32]
    MBarrier* full = reinterpret_cast<MBarrier*>(s + STAGES * 32);
    MBarrier* empty = full + STAGES;
    if (threadIdx.x == 0)
      for (int i = 0; i < STAGES; ++i) {
        mbarrier_init(full[i], 32);
        mbarrier_init(empty[i], 3);
      }
    __syncthreads();  // the barriers are ready
    float y = 0;
    for (int step = 0; step < args.n; ++step) {
      const int stage = step % STAGES;
      const u32 parity = step / STAGES % 2;
      float& x = s[stage * 32 + lane];
      if (warp == 0) {
        if (lane == 0) mbarrier_wait(empty[stage], parity ^ 1);
        __syncwarp();
        x = static_cast<const float*>(args.in)[step * 32 + lane];
        mbarrier_arrive(full[stage]);
      } else {
        mbarrier_wait(full[stage], parity);
        y = 2 * y + x;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(empty[stage]);
      }
    }
    if (warp > 0) static_cast<float*>(args.out)[threadIdx.x - 32] = y;
  }
};

// in [4 warps, 32 lanes, 4] registers; out [4 warps, 4, 8, 8] 16-bit values.
template <bool TRANSPOSED> struct Stmatrix {
  __device__ static void run(const WarpgroupArgs& args) {
    const int thread = threadIdx.x;
    u32* s = reinterpret_cast<u32*>(dynamic_smem());  // a row, four words, a thread
    const u32* in = static_cast<const u32*>(args.in) + 4 * thread;
    const u32 r[4] = {in[0], in[1], in[2], in[3]};
    if constexpr (TRANSPOSED) stmatrix_x4_trans(s + 4 * thread, r);
    else stmatrix_x4(s + 4 * thread, r);
    __syncthreads();  // s is whole
    for (int i = 0; i < 4; ++i) static_cast<u32*>(args.out)[4 * thread + i] = s[4 * thread + i];
  }
};

// The n words of a tile, to where the swizzle has them.
__device__ void put_tile(unsigned char* tile, const u32* words, i64 n) {
  for (i64 i = threadIdx.x; i < n; i += 128) {
    const u32 at = 4 * i;
    *reinterpret_cast<u32*>(tile + (at ^ (at >> 3 & 0x70))) = words[i];
  }
  fence_proxy_async();
  __syncthreads();  // the tile is whole
}

// This lane's part of the eight words from column 8 step of A [64, 32 words].
__device__ void get_rows(u32 (&a)[4], const u32* A, int step) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32* own = A + (threadIdx.x / 32 * 16 + g) * 32 + 8 * step + t;
  a[0] = own[0], a[1] = own[8 * 32], a[2] = own[4], a[3] = own[8 * 32 + 4];
}

// out [64, N].
template <int N> __device__ void write(float* out, const float (&d)[N / 2]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) out[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + column + i % 2] = d[i];
}

// in: A [64, 32 words], then a tile of n words: B transposed [N, 32 words], or in panels of 64 columns,
// [panels, 64, 32 words]. out: A B [64, N], four steps deep.
template <typename Format, int N, bool TRANSPOSED> struct Product {
  __device__ static void run(const WarpgroupArgs& args) {
    constexpr int STEP = (TRANSPOSED ? 16 * 128 : 32) / 16;
    const u32* A = static_cast<const u32*>(args.in);
    put_tile(dynamic_smem(), A + 64 * 32, args.n);
    const u64 b = mn_major_tile(dynamic_smem(), 64 * 128);
    u32 a[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) get_rows(a[step], A, step);
    float d[N / 2];
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma<Format, N, TRANSPOSED>(d, a[step], b + step * STEP, step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(d);
    write<N>(static_cast<float*>(args.out), d);
  }
};

// in: A [64, 64] and B transposed [N, 64]; out [64, N]: the product of two tiles.
template <typename Format, int N> struct TilesProduct {
  __device__ static void run(const WarpgroupArgs& args) {
    constexpr int ROWS = 64;
    unsigned char* const second = dynamic_smem() + ROWS * 128;
    const u32* A = static_cast<const u32*>(args.in);
    put_tile(dynamic_smem(), A, ROWS * 32);
    put_tile(second, A + ROWS * 32, args.n);
    const u64 a = k_major_tile(dynamic_smem()), b = k_major_tile(second);
    float d[N / 2];
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma<Format, N, K_MAJOR>(d, a + 2 * step, b + 2 * step, step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(d);
    write<N>(static_cast<float*>(args.out), d);
  }
};

// in: A [64, 64] and B transposed [32, 64] in bf16; out [2, 64, 32]: the products of the first 16 columns, and
// of the next added to 1. Two groups, and registers given back and taken.
struct Groups {
  __device__ static void run(const WarpgroupArgs& args) {
    const u32* A = static_cast<const u32*>(args.in);
    float* out = static_cast<float*>(args.out);
    registers_down<64>();
    put_tile(dynamic_smem(), A + 64 * 32, args.n);
    registers_up<128>();
    const u64 b = k_major_tile(dynamic_smem());
    u32 a[2][4];
    get_rows(a[0], A, 0);
    get_rows(a[1], A, 1);
    float first[16], second[16];
    for (int i = 0; i < 16; ++i) second[i] = 1;
    wgmma_fence_operand(second);
    wgmma_fence();
    wgmma<bf16, 32, K_MAJOR>(first, a[0], b, OVERWRITE);
    wgmma_commit();
    wgmma<bf16, 32, K_MAJOR>(second, a[1], b + 2, ACCUMULATE);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_fence_operand(first);
    write<32>(out, first);
    wgmma_wait<0>();
    wgmma_fence_operand(second);
    write<32>(out + 64 * 32, second);
  }
};

template <typename Case> __global__ void __launch_bounds__(128, 1) warpgroup(const WarpgroupArgs args) {
  Case::run(args);
}
