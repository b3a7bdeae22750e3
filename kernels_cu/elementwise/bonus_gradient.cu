// what      RWKV-6: du of the parts that the backward passes leave; and a shared gate's gradient of those that tiles of
//           the state do.
// math      du = sum_n shares_n
// shapes    partial_du [N, H, K] float32 or float64, of sequences or of their segments; du [H, K], whose rows may lie
//           apart; of gates N tiles, and tokens for K
// grid      a warp for every 4 values; a lane for every eighth share, then their sum
// smem      none
// barriers  none
// numerics  float32, of float64 float64, always in the same order
// source    Peng et al., 2024, eq. 18-19
// limits    none
#include "ptx.cuh"
#include "real.cuh"

template <typename T> struct Args {
  const Real<T>* partial_du;
  T* du;
  i64 N, H, K;
  i64 row;  // numbers from one row of du to the next
};

template <typename T> __global__ void __launch_bounds__(128) elementwise_bonus_gradient(const Args<T> args) {
  const i64 size = args.H * args.K, at = i64(blockIdx.x) * 16 + threadIdx.x / 32 * 4 + threadIdx.x % 4;
  Real<T> sum = 0;
  if (at < size)
    for (i64 n = threadIdx.x % 32 / 4; n < args.N; n += 8) sum += args.partial_du[n * size + at];
#pragma unroll
  for (int distance = 16; distance >= 4; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (at < size && threadIdx.x % 32 < 4) args.du[at / args.K * args.row + at % args.K] = from_real<T>(sum);
}
