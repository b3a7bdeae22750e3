// what      Kernels that are wrong on purpose, for the emulator to catch: the template argument says which.
// shapes    in, out [blocks, 64] float
// grid      blocks of two warps
// smem      256 bytes: a float a thread
#include "lanes.cuh"
#include "wgmma.cuh"

struct MistakesArgs {
  const float* in;
  float* out;
};

struct NoMistake {
  __device__ static float run(float* s, const float* in) {
    s[threadIdx.x] = float(threadIdx.x);
    __syncthreads();  // s is whole
    return s[63 - threadIdx.x];
  }
};

struct MissingBarrier {
  __device__ static float run(float* s, const float* in) {
    s[threadIdx.x] = float(threadIdx.x);
    return s[63 - threadIdx.x];
  }
};

struct DivergentBarrier {
  __device__ static float run(float* s, const float* in) {
    if (threadIdx.x < 32) __syncthreads();
    else __syncthreads();
    return 0;
  }
};

struct ReturnedThreads {
  __device__ static float run(float* s, const float* in) {
    if (threadIdx.x < 40) __syncthreads();
    return 0;
  }
};

struct DivergentCollective {
  __device__ static float run(float* s, const float* in) {
    if (threadIdx.x % 32 < 16) return warp_sum(1.0f);
    __syncthreads();
    return 0;
  }
};

struct PartialMask {
  __device__ static float run(float* s, const float* in) { return __shfl_xor_sync(0xffffu, 1.0f, 1); }
};

struct UnwrittenShared {
  __device__ static float run(float* s, const float* in) { return s[threadIdx.x] + 1; }
};

struct UnwrittenRegister {
  __device__ static float run(float* s, const float* in) {
    float x[4];
    x[threadIdx.x % 3] = 0;
    return x[3];
  }
};

struct WritePastEnd {
  __device__ static float run(float* s, const float* in) { return s[threadIdx.x + 1] = 0; }
};

struct WriteBeforeStart {
  __device__ static float run(float* s, const float* in) { return s[int(threadIdx.x) - 1] = 0; }
};

struct MissingWait {
  __device__ static float run(float* s, const float* in) {
    cp_async<4>(s + threadIdx.x, in, true);
    cp_async_commit();
    return s[threadIdx.x];
  }
};

struct MissingCommit {
  __device__ static float run(float* s, const float* in) {
    cp_async<4>(s + threadIdx.x, in, true);
    cp_async_wait<0>();
    return s[threadIdx.x];
  }
};

struct MissingBulkWait {
  __device__ static float run(float* s, const float* in) {
    MBarrier& barrier = *reinterpret_cast<MBarrier*>(s + 4);
    if (threadIdx.x == 0) {
      mbarrier_init(barrier, 1);
      mbarrier_arrive_and_expect(barrier, 16);
      copy_bulk(s, in, 16, barrier);
    }
    __syncthreads();
    return s[threadIdx.x % 4];
  }
};

struct MisalignedCopy {
  __device__ static float run(float* s, const float* in) {
    cp_async<16>(s + threadIdx.x, in);
    return 0;
  }
};

struct CopyBeforeStart {
  __device__ static float run(float* s, const float* in) {
    cp_async<16>(s - 4, in);
    return 0;
  }
};

struct MisalignedPair {
  __device__ static float run(float* s, const float* in) {
    *reinterpret_cast<float2*>(s + threadIdx.x) = {0.f, 0.f};
    return 0;
  }
};

struct MisalignedRow {
  __device__ static float run(float* s, const float* in) {
    u32 r[4];
    ldmatrix_x4(r, s + threadIdx.x);
    return 0;
  }
};

struct AbsentWarp {
  __device__ static float run(float* s, const float* in) {
    if (threadIdx.x < 32) named_barrier_sync(1, 64);
    return 0;
  }
};

struct MixedCounts {
  __device__ static float run(float* s, const float* in) {
    named_barrier_sync(1, threadIdx.x < 32 ? 64 : 32);
    return 0;
  }
};

struct BarrierInUse {
  __device__ static float run(float* s, const float* in) {
    if (threadIdx.x < 32) named_barrier_sync(1, 32);
    named_barrier_sync(1, 64);
    return 0;
  }
};

struct NoSuchBarrier {
  __device__ static float run(float* s, const float* in) {
    named_barrier_sync(16, 64);
    return 0;
  }
};

struct DivergentNamedBarrier {
  __device__ static float run(float* s, const float* in) {
    if (threadIdx.x % 32 < 16) named_barrier_sync(1, 64);
    __syncthreads();
    return 0;
  }
};

struct MissingArrival {
  __device__ static float run(float* s, const float* in) {
    MBarrier& barrier = *reinterpret_cast<MBarrier*>(s);
    if (threadIdx.x == 0) mbarrier_init(barrier, 33);
    __syncthreads();  // the barrier is ready
    if (threadIdx.x < 32) {
      mbarrier_arrive(barrier);
      mbarrier_wait(barrier, 0);
    }
    __syncthreads();
    return 0;
  }
};

struct MissingBytes {
  __device__ static float run(float* s, const float* in) {
    MBarrier& barrier = *reinterpret_cast<MBarrier*>(s);
    if (threadIdx.x == 0) {
      mbarrier_init(barrier, 1);
      mbarrier_arrive_and_expect(barrier, 16);
      mbarrier_wait(barrier, 0);
    }
    return 0;
  }
};

struct SurplusArrival {
  __device__ static float run(float* s, const float* in) {
    MBarrier& barrier = *reinterpret_cast<MBarrier*>(s);
    if (threadIdx.x == 0) {
      mbarrier_init(barrier, 1);
      mbarrier_arrive_and_expect(barrier, 16);
      mbarrier_arrive(barrier);
    }
    return 0;
  }
};

struct UninitialisedBarrier {
  __device__ static float run(float* s, const float* in) {
    mbarrier_arrive(*reinterpret_cast<MBarrier*>(s));
    return 0;
  }
};

struct TilePastEnd {
  __device__ static float run(float* s, const float* in) {
    const u32 a[4] = {};
    float d[8];
    wgmma<bf16, 16, K_MAJOR>(d, a, k_major_tile(s), OVERWRITE);
    wgmma_commit();
    wgmma_wait<0>();
    return d[0];
  }
};

struct DivergentTile {
  __device__ static float run(float* s, const float* in) {
    const u32 a[4] = {};
    float d[8];
    wgmma<bf16, 16, K_MAJOR>(d, a, k_major_tile(s + threadIdx.x / 16 * 4), OVERWRITE);
    return d[0];
  }
};

struct MissingProductWait {
  __device__ static float run(float* s, const float* in) {
    const u32 a[4] = {};
    float d[8];
    wgmma<bf16, 16, K_MAJOR>(d, a, k_major_tile(s), OVERWRITE);
    wgmma_commit();
    wgmma_wait<1>();
    return d[0];
  }
};

template <typename Case> __global__ void __launch_bounds__(64) mistakes(const MistakesArgs args) {
  float* s = reinterpret_cast<float*>(dynamic_smem());
  const i64 i = blockIdx.x * 64 + threadIdx.x;
  args.out[i] = Case::run(s, args.in + i);
}
