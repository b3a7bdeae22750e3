// what      Layer norm, token shift and static mixes of all tokens of the prompts, packed one after the other.
// math      xx = LN(x);  d_t = xx_{t-1} - xx_t, at a prompt's start d = before - xx;  mixed_c = xx + d maa_c;
//           at its end shift = xx, for the next step; `before` is the LN(x) that a prompt continues
// shapes    x xx d [T, D], weight bias [D], maa [C, D], before [N, D], shift [pool, D], starts ends [T]: the row of
//           before where a prompt starts and of shift where it ends, -1 elsewhere; mixed [C, T, D]; xx and d
//           may be null
// grid      a block a token, which normalises the token before as well; 512 threads, EACH times 4 channels each
// smem      Shared: the warps' parts of four sums
// barriers  two: means, then variances
// numerics  float32; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", eq. 3-4
// limits    D a multiple of 4, up to 2048 EACH
#include "decode.cuh"

// From the includes:
//   block_sum: two sums over the block, by one barrier

constexpr int THREADS = 512, WARPS = THREADS / 32;

template <typename X> struct Args {
  const float* x;
  const float* weight;
  const float* bias;
  const float* maa;
  const float* before;
  float* shift;
  const i64* starts;
  const i64* ends;
  float* xx;
  float* d;
  X* mixed;
  i64 T, D, C;
  double eps;
};

struct Shared {
  float2 sum[WARPS], squares[WARPS];  // of the token, and of the one before
};

// A thread's channels of one row of x. `read` loads them and returns their sum; `centre` subtracts the mean and returns
// the sum of their squares; `normed` returns four of them after the layer norm.
template <int EACH> struct Row {
  float4 x[EACH];

  __device__ __forceinline__ float read(const float* from, i64 D) {
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const i64 j = 4 * (n * THREADS + threadIdx.x);
      x[n] = {};
      if (j < D) x[n] = load4(from + j);
      sum += (x[n].x + x[n].y) + (x[n].z + x[n].w);
    }
    return sum;
  }

  __device__ __forceinline__ float centre(float mean, i64 D) {
    float squares = 0.f;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      x[n] = {x[n].x - mean, x[n].y - mean, x[n].z - mean, x[n].w - mean};
      if (4 * (n * THREADS + threadIdx.x) < D)
        squares += (x[n].x * x[n].x + x[n].y * x[n].y) + (x[n].z * x[n].z + x[n].w * x[n].w);
    }
    return squares;
  }

  __device__ __forceinline__ float4 normed(int n, float scale, float4 weight, float4 bias) const {
    return {fmaf(x[n].x * scale, weight.x, bias.x), fmaf(x[n].y * scale, weight.y, bias.y),
            fmaf(x[n].z * scale, weight.z, bias.z), fmaf(x[n].w * scale, weight.w, bias.w)};
  }
};

template <typename X, int EACH> __global__ void __launch_bounds__(THREADS) rwkv6_shift_mix(const Args<X> args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  launch_next();  // the next kernel may begin
  const i64 t = blockIdx.x, D = args.D, row = t * D;
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read
  const i64 start = args.starts[t], end = args.ends[t];
  // x of the token before, to be normalised; at a prompt's start `before`, which is LN(x) already.
  const float* earlier = start < 0 ? args.x + row - D : args.before + start * D;

  Row<EACH> current, previous;
  const float sum = current.read(args.x + row, D), previous_sum = previous.read(earlier, D);
  const float inverse_D = 1.f / D, eps = float(args.eps);
  const float2 sums = block_sum<WARPS>(float2{sum, previous_sum}, s.sum);
  const float squares = current.centre(sums.x * inverse_D, D);
  const float previous_squares = previous.centre(start < 0 ? sums.y * inverse_D : 0.f, D);
  const float2 all_squares = block_sum<WARPS>(float2{squares, previous_squares}, s.squares);
  const float scale = inverse_root(all_squares.x * inverse_D + eps);
  const float previous_scale = inverse_root(all_squares.y * inverse_D + eps);

#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const i64 j = 4 * (n * THREADS + threadIdx.x);
    if (j >= D) continue;
    const float4 weight = load4(args.weight + j), bias = load4(args.bias + j);
    const float4 xx = current.normed(n, scale, weight, bias);
    const float4 previous_xx = start < 0 ? previous.normed(n, previous_scale, weight, bias) : previous.x[n];
    const float4 d = {previous_xx.x - xx.x, previous_xx.y - xx.y, previous_xx.z - xx.z, previous_xx.w - xx.w};
    if (end >= 0) store4(args.shift + end * D + j, xx);
    if (args.xx) {
      store4(args.xx + row + j, xx);
      store4(args.d + row + j, d);
    }
#pragma unroll 1
    for (i64 c = 0; c < args.C; ++c) {
      const float4 maa = load4(args.maa + c * D + j);
      const float4 mixed = {fmaf(d.x, maa.x, xx.x), fmaf(d.y, maa.y, xx.y), fmaf(d.z, maa.z, xx.z),
                            fmaf(d.w, maa.w, xx.w)};
      store4(args.mixed + c * args.T * D + row + j, mixed);
    }
  }
}
