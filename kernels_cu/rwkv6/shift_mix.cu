// what      Layer norm, token shift and static mixes of all tokens of the prompts, packed one after the other.
// math      xx = LN(x);  d_t = xx_{t-1} - xx_t, at a prompt's start d = before - xx;  mixed_c = xx + d maa_c;
//           at its end shift = xx, for the next step; `before` is the LN(x) that a prompt continues
// shapes    x xx d [T, D], weight bias [D], maa [C, D], before [N, D], shift [pool, D], starts ends [T]: the row of
//           before where a prompt starts and of shift where it ends, -1 elsewhere; mixed [C, T, D]; xx and d
//           may be null
// grid      a block for every `tokens_per_block` neighbouring tokens, which it computes one after the other, and before
//           them the norm of the token before; 512 threads, EACH times 4 channels each
// smem      Shared: the warps' parts of two sums
// barriers  two a token: mean, then variance
// numerics  float32; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", eq. 3-4
// limits    D a multiple of 4, up to 2048 EACH
#include "decode.cuh"

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
  i64 T, D, C, tokens_per_block;
  double eps;
};

struct Shared {
  float sum[WARPS], squares[WARPS];
};

// A thread's n-th four channels begin here.
__device__ __forceinline__ i64 channel(int n) { return 4 * (n * THREADS + i64(threadIdx.x)); }

// A thread's channels of one row; 0 beyond D.
template <int EACH> struct Row {
  float4 x[EACH];

  __device__ __forceinline__ void load(const float* from, i64 D) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) x[n] = channel(n) < D ? load4(from + channel(n)) : float4{};
  }

  // The layer norm without weight and bias. All threads of the block call it.
  __device__ __forceinline__ void normalise(Shared& s, i64 D, float eps) {
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int n = 0; n < EACH; ++n) sum += (x[n].x + x[n].y) + (x[n].z + x[n].w);
    const float inverse_D = 1.f / D, mean = block_sum<WARPS>(sum, s.sum) * inverse_D;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      if (channel(n) >= D) continue;
      x[n] = {x[n].x - mean, x[n].y - mean, x[n].z - mean, x[n].w - mean};
      squares += (x[n].x * x[n].x + x[n].y * x[n].y) + (x[n].z * x[n].z + x[n].w * x[n].w);
    }
    const float scale = inverse_root(block_sum<WARPS>(squares, s.squares) * inverse_D + eps);
#pragma unroll
    for (int n = 0; n < EACH; ++n) x[n] = {x[n].x * scale, x[n].y * scale, x[n].z * scale, x[n].w * scale};
  }
};

// x weight + bias
__device__ __forceinline__ float4 fma4(float4 x, float4 weight, float4 bias) {
  return {fmaf(x.x, weight.x, bias.x), fmaf(x.y, weight.y, bias.y), fmaf(x.z, weight.z, bias.z),
          fmaf(x.w, weight.w, bias.w)};
}

template <typename X, int EACH> __global__ void __launch_bounds__(THREADS) rwkv6_shift_mix(const Args<X> args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  launch_next();  // the next kernel may begin
  const i64 D = args.D, first = blockIdx.x * args.tokens_per_block, last = min(first + args.tokens_per_block, args.T);
  const float eps = float(args.eps);
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read
  // `next` is loaded while the token before it is computed.
  Row<EACH> next, previous_xx = {};
  i64 t = args.starts[first] < 0 ? first - 1 : first;
  next.load(args.x + t * D, D);
#pragma unroll 1
  for (; t < last; ++t) {
    Row<EACH> current = next;
    if (t + 1 < last) next.load(args.x + (t + 1) * D, D);
    const i64 start = args.starts[t], end = args.ends[t], row = t * D;
    current.normalise(s, D, eps);
    if (start >= 0) previous_xx.load(args.before + start * D, D);
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const i64 j = channel(n);
      if (j >= D) continue;
      const float4 xx = fma4(current.x[n], load4(args.weight + j), load4(args.bias + j)), previous = previous_xx.x[n];
      previous_xx.x[n] = xx;
      if (t < first) continue;  // the previous block's token
      const float4 d = {previous.x - xx.x, previous.y - xx.y, previous.z - xx.z, previous.w - xx.w};
      if (end >= 0) store4(args.shift + end * D + j, xx);
      if (args.xx) {
        store4(args.xx + row + j, xx);
        store4(args.d + row + j, d);
      }
#pragma unroll 1
      for (i64 c = 0; c < args.C; ++c)
        store4(args.mixed + c * args.T * D + row + j, fma4(d, load4(args.maa + c * D + j), xx));
    }
  }
}
