// what      The gradient of a gate that all channels of a token share: the sum of the channels' gradients.
// math      dg = sum_c dg_channels_c
// shapes    dg_channels [B, H, T, C] float32 or float64; dg [B, H, T, 1]
// grid      a warp for every token
// smem      none
// barriers  none
// numerics  float32, for float64 data float64; always in the same order
// source    Yang et al., 2024, section 4.4
// limits    none
#include "lanes.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

template <typename T> struct Args {
  StridedRows<const FloatOrDouble<T>> dg_channels;
  StridedRows<T> dg;
  i64 B, H, T_, C;  // T_: tokens of a row of the batch
};

template <typename T> __global__ void __launch_bounds__(128) elementwise_gate_gradient(const Args<T> args) {
  const i64 row = i64(blockIdx.x) * 4 + threadIdx.x / 32, t = row % args.T_, h = row / args.T_ % args.H;
  const i64 b = row / args.T_ / args.H;
  if (b >= args.B) return;
  const FloatOrDouble<T>* channels = args.dg_channels.row(b, h, t);
  FloatOrDouble<T> sum = 0;
  for (i64 c = threadIdx.x % 32; c < args.C; c += 32) sum += channels[c];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) *args.dg.row(b, h, t) = narrowed<T>(sum);
}
