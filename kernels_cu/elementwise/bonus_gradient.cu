// what      RWKV-6: du of the shares that the backward sweeps leave, each head's from those that have computed it.
// math      du = sum_n (strong_n ? of_sequence_n : sum_p of_segment_np)
// shapes    shares float32: P [N P, H, K] of segments, then [N, H, K] of sequences; du [H, K]
// grid      a warp for every 4 values; a lane for every eighth sequence, then their sum
// smem      none
// barriers  none
// numerics  float32, always in the same order
// source    Peng et al., 2024, eq. 18-19
// limits    none
#include "ptx.cuh"

template <typename T> struct Args {
  const float* shares;
  const i32* strong;  // [N, H]: 0 where the segments' shares count; null where there are none
  T* du;
  i64 N, P, H, K;
};

template <typename T> __global__ void __launch_bounds__(128) elementwise_bonus_gradient(const Args<T> args) {
  const i64 size = args.H * args.K, at = i64(blockIdx.x) * 16 + threadIdx.x / 32 * 4 + threadIdx.x % 4;
  float sum = 0.f;
  if (at < size)
    for (i64 n = threadIdx.x % 32 / 4; n < args.N; n += 8) {
      const bool whole = !args.strong || args.strong[n * args.H + at / args.K];
      const i64 first = whole ? args.N * args.P + n : n * args.P, rows = whole ? 1 : args.P;
      for (i64 row = first; row < first + rows; ++row) sum += args.shares[row * size + at];
    }
#pragma unroll
  for (int distance = 16; distance >= 4; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (at < size && threadIdx.x % 32 < 4) args.du[at] = from_float<T>(sum);
}
