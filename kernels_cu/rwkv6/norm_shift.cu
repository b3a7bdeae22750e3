// what      What stands between two products: the channel mix's gate, layer norm, token shift, static mixes.
// math      x += sigmoid(gate) value;  xx = LN(x);  d = shift - xx;  shift = xx;  mixed_c = xx + d maa_c
// shapes    x value gate xx d [B, D], weight bias [D], maa [C, D], shift [P, D], slots [B] or null,
//           mixed [C, B, D]; value and gate, or xx and d, or maa and shift may be null, then d = 0
// grid      a block a sequence; 512 threads, up to 4 times 4 channels each
// smem      the warps' parts of two sums
// barriers  two: mean, then variance
// numerics  float32; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", eq. 3-4
// limits    D a multiple of 4, up to 8192
#include "decode.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, EACH = 4;

template <typename X> struct Args {
  float* x;
  const float* value;
  const float* gate;
  const float* weight;
  const float* bias;
  const float* maa;
  float* shift;
  const i64* slots;  // or null: sequence b has row b of shift
  float* xx;
  float* d;
  X* mixed;
  i64 B, D, C;
  double eps;
};

struct Shared {
  float sum[WARPS], squares[WARPS];
};

// a + x b, channel by channel.
__device__ __forceinline__ float4 add_scaled(float4 a, float4 x, float4 b) {
  return {fmaf(x.x, b.x, a.x), fmaf(x.y, b.y, a.y), fmaf(x.z, b.z, a.z), fmaf(x.w, b.w, a.w)};
}

template <typename X> __global__ void __launch_bounds__(THREADS) rwkv6_norm_shift(const Args<X> args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  launch_next();
  const i64 b = blockIdx.x, D = args.D, row = b * D;
  float* const shift = args.shift ? args.shift + (args.slots ? args.slots[b] : b) * D : nullptr;
  if (threadIdx.x == 0) {  // what the kernel before this one leaves as it is
    if (shift) prefetch_l2(shift, u32(4 * D));
    if (b == 0) {
      prefetch_l2(args.weight, u32(4 * D)), prefetch_l2(args.bias, u32(4 * D));
      if (args.maa) prefetch_l2(args.maa, u32(4 * args.C * D));
    }
  }
  wait_for_previous();

  float4 x[EACH];
  float sum = 0.f, squares = 0.f;
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const i64 j = 4 * (n * THREADS + threadIdx.x);
    x[n] = {};
    if (j >= D) continue;
    x[n] = load4(args.x + row + j);
    if (args.value) {
      const float4 gate = load4(args.gate + row + j);
      x[n] = add_scaled(x[n], {sigmoid(gate.x), sigmoid(gate.y), sigmoid(gate.z), sigmoid(gate.w)},
                        load4(args.value + row + j));
      store4(args.x + row + j, x[n]);
    }
    sum += (x[n].x + x[n].y) + (x[n].z + x[n].w);
  }
  const float mean = block_sum<WARPS>(sum, s.sum) / D;
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    x[n] = {x[n].x - mean, x[n].y - mean, x[n].z - mean, x[n].w - mean};
    if (4 * (n * THREADS + threadIdx.x) < D)
      squares += (x[n].x * x[n].x + x[n].y * x[n].y) + (x[n].z * x[n].z + x[n].w * x[n].w);
  }
  const float scale = 1.f / sqrtf(block_sum<WARPS>(squares, s.squares) / D + float(args.eps));

#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const i64 j = 4 * (n * THREADS + threadIdx.x);
    if (j >= D) continue;
    const float4 scaled = {x[n].x * scale, x[n].y * scale, x[n].z * scale, x[n].w * scale};
    const float4 xx = add_scaled(load4(args.bias + j), scaled, load4(args.weight + j));
    float4 d = {};
    if (shift) {
      d = add_scaled(load4(shift + j), xx, {-1.f, -1.f, -1.f, -1.f});
      store4(shift + j, xx);
    }
    if (args.xx) {
      store4(args.xx + row + j, xx);
      store4(args.d + row + j, d);
    }
    for (i64 c = 0; c < args.C; ++c) {
      const float4 mixed = args.maa ? add_scaled(xx, d, load4(args.maa + c * D + j)) : xx;
      store4(args.mixed + c * args.B * D + row + j, mixed);
    }
  }
}
