// what      The gradient of a gate that all channels of a token share: the sum of the channels' gradients.
// math      dg = sum_c dg_channels_c
// shapes    dg_channels [B, H, T, C] float32 or float64; dg [B, H, T, 1]
// grid      `lanes` neighbouring threads for every TOKENS tokens, a power of 2 up to 32; 128 threads
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

constexpr int TOKENS = 4;  // neighbouring tokens of `lanes` threads, whose loads overlap

template <typename T> __global__ void __launch_bounds__(128) elementwise_gate_gradient(const Args<T> args) {
  const u32 lanes = u32(args.lanes), lane = threadIdx.x % lanes;
  const i64 groups = (args.T_ + TOKENS - 1) / TOKENS, group = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / lanes;
  const i64 head = group / groups, t = group % groups * TOKENS, h = head % args.H, b = head / args.H;
  const int tokens = b < args.B ? int(min(args.T_ - t, i64(TOKENS))) : 0;
  FloatOrDouble<T> sums[TOKENS] = {};
  const FloatOrDouble<T>* channels = tokens ? args.dg_channels.row(b, h, t) : nullptr;
#pragma unroll 2
  for (i64 c = lane; tokens && c < args.C; c += lanes)
#pragma unroll
    for (int n = 0; n < TOKENS; ++n)
      if (n < tokens) sums[n] += channels[n * args.dg_channels.token_stride + c];
#pragma unroll
  for (int n = 0; n < TOKENS; ++n) {
    for (u32 distance = lanes / 2; distance > 0; distance /= 2)
      sums[n] += __shfl_xor_sync(0xffffffffu, sums[n], distance);
    if (n < tokens && lane == 0) *args.dg.row(b, h, t + n) = narrowed<T>(sums[n]);
  }
}
