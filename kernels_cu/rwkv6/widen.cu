// what      Converts an int8 matrix with a scale for each row to T, for matrix products by cuBLAS.
// math      w_ij = scales_i q_ij
// shapes    q w [M, K], scales [M] float32; count = M K; likewise for several matrices
// grid      a thread 16 neighbours of a row; 256 threads
// numerics  rounded once
// limits    K a multiple of 16; q and w start on 16 bytes
#include "decode.cuh"

// launch_next, wait_for_previous: see ptx.cuh; the next kernel begins while this one still runs

constexpr int THREADS = 256;

template <typename T> struct Args {
  const i8* q;
  const float* scales;
  T* w;
  i64 count, K;
};

template <typename T> __global__ void __launch_bounds__(THREADS) rwkv6_widen(const Args<T> args) {
  launch_next();  // the next kernel may begin
  // q and scales are weights, which no kernel writes: this kernel may read them before the previous one has ended.
  const i64 index = 16 * (i64(blockIdx.x) * THREADS + threadIdx.x);
  const bool inside = index < args.count;
  const uint4 four = inside ? *reinterpret_cast<const uint4*>(args.q + index) : uint4{};
  const float scale = inside ? args.scales[index / args.K] : 0.f;
  wait_for_previous();  // the previous kernel may still read what w had before
  if (!inside) return;
  const u32 words[4] = {four.x, four.y, four.z, four.w};
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = scale * float(i8(words[i / 4] >> 8 * (i % 4)));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float eight[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) eight[i] = x[8 * half + i];
    store8(args.w + index + 8 * half, eight);
  }
}
