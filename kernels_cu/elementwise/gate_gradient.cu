// what      The gradient of a gate that all channels of a token share: the sum of the channels' gradients.
// math      dg = sum_c dg_channels_c
// shapes    dg_channels [B, H, T, C] float32 or float64; dg [B, H, T, 1]
// grid      `lanes` neighbouring threads for every token, a power of 2 up to 32; 128 threads
// numerics  float32, for float64 data float64; always in the same order
// source    Yang et al., 2024, section 4.4
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

// From real.cuh: FloatOrDouble<T>: double for double, else float; widened, narrowed: a number to it, and back.
template <typename T> struct Args {
  StridedRows<const FloatOrDouble<T>> dg_channels;
  StridedRows<T> dg;
  i64 B, H, T_, C;  // T_: tokens of a row of the batch
  i64 lanes;
};

template <typename T> __global__ void __launch_bounds__(128) elementwise_gate_gradient(const Args<T> args) {
  const u32 lanes = u32(args.lanes), lane = threadIdx.x % lanes;
  const i64 row = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / lanes, t = row % args.T_, h = row / args.T_ % args.H;
  const i64 b = row / args.T_ / args.H;
  FloatOrDouble<T> sum = 0;
  if (b < args.B) {
    const FloatOrDouble<T>* channels = args.dg_channels.row(b, h, t);
#pragma unroll 4
    for (i64 c = lane; c < args.C; c += lanes) sum += channels[c];
  }
  for (u32 distance = lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (b < args.B && lane == 0) *args.dg.row(b, h, t) = narrowed<T>(sum);
}
