// what      What a step computes between two products: the channel mix's gate, layer norm, token shift, static mixes.
// math      sum = x + sigmoid(gate) times the sum of value's P parts;  xx = LN(sum);  d = shift - xx;  shift = xx;
//           mixed_c = xx + d maa_c
// shapes    x sum gate xx d [B, D], value [P, B, D], weight bias [D], maa [C, D], shift [pool, D], slots [B] or null,
//           mixed [TERMS, C, B, D]. value, gate, xx and d, or maa and shift may be null: without a gate the sigmoid is
//           1, without a shift d = 0. A value of `squares` is in units of UNIT_OF_SQUARES<X, TERMS>
// grid      `shares` blocks a sequence; 512 threads, EACH times 4 channels each. All blocks of a sequence compute the
//           whole norm; each stores the channels of its share of the threads
// smem      the warps' parts of two sums, and mixes' weights that registers do not hold
// barriers  two: mean, then variance
// numerics  float32; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", eq. 3-4
// limits    D a multiple of 4, up to 2048 EACH; C up to MIXES, P up to PARTS. sum is null without a value, and never x.
//           shift is read before the previous kernel has ended. So between this launch and the one that last wrote
//           shift there must be another launch that waits for its predecessor (wait_for_previous) before it calls
//           launch_next
#include "decode.cuh"

// From the includes:
//   store4_terms: four numbers as sums of TERMS terms; UNIT_OF_SQUARES: 2048 for one float16 number, otherwise 1

constexpr int THREADS = 512, WARPS = THREADS / 32;

template <typename X> struct Args {
  const float* x;
  float* sum;
  const float* value;
  const float* gate;
  const float* weight;
  const float* bias;
  const float* maa;
  float* shift;
  const i64* slots;  // null: sequence b has row b of shift
  float* xx;
  float* d;
  X* mixed;
  i64 B, D, C, P, squares, shares;
  double eps;
};

// Whether registers suffice for each thread to load its channels' parameters before the previous kernel has ended.
template <int EACH, int MIXES> constexpr bool EARLY = EACH * (MIXES + 3) <= 10;
// How many mixes' weights, the first, are then in shared memory. With three in registers, and at most four parts, a
// thread has at most 64 registers, so that two blocks fit on a multiprocessor. The three in shared memory fit there
// beside a block of the product before or behind.
template <int EACH, int MIXES> constexpr int IN_SHARED = EARLY<EACH, MIXES> && MIXES > 2 ? 3 : 0;

template <int MIXES> struct MixWeights {
  float4 of[MIXES][THREADS];  // a thread's four channels, which it copies and reads itself
};
template <> struct MixWeights<0> {};

template <int EACH, int MIXES> struct Shared {
  float sum[WARPS], squares[WARPS];
  MixWeights<IN_SHARED<EACH, MIXES>> maa;
};

// Four channels' parameters and shift, which the previous kernel does not write; maa: of the last MIXES mixes.
template <int MIXES> struct Channels {
  float4 weight, bias, shift, maa[MIXES];
};

template <typename X, int EACH, int PARTS, int TERMS, int MIXES>
__global__ void __launch_bounds__(THREADS, IN_SHARED<EACH, MIXES> > 0 && PARTS <= 4 ? 2 : 1)
    rwkv6_norm_shift(const Args<X> args) {
  auto& s = *reinterpret_cast<Shared<EACH, MIXES>*>(dynamic_smem());
  launch_next();  // the next kernel may begin
  const u32 shares = u32(args.shares);
  const i64 b = blockIdx.x / shares, D = args.D, row = b * D;
  const bool stores = threadIdx.x * shares / THREADS == blockIdx.x % shares;  // whether this thread stores its channels
  float* const shift = args.shift ? args.shift + (args.slots ? args.slots[b] : b) * D : nullptr;
  constexpr int COPIED = IN_SHARED<EACH, MIXES>;
  const auto channels_at = [&](i64 j) {
    Channels<MIXES - COPIED> found = {load4(args.weight + j), load4(args.bias + j)};
    if (shift) found.shift = load4(shift + j);
#pragma unroll
    for (int c = COPIED; c < MIXES; ++c)
      if (args.maa && c < args.C) found.maa[c - COPIED] = load4(args.maa + c * D + j);
    return found;
  };
  Channels<MIXES - COPIED> channels[EACH];
#pragma unroll
  for (int n = 0; n < EACH; ++n)
    if (const i64 j = 4 * (n * THREADS + threadIdx.x); EARLY<EACH, MIXES> && stores && j < D) {
      channels[n] = channels_at(j);
      if constexpr (COPIED > 0) {
        static_assert(EACH == 1);
#pragma unroll
        for (int c = 0; c < COPIED; ++c)
          if (args.maa && c < args.C) cp_async<16>(&s.maa.of[c][threadIdx.x], args.maa + c * D + j);
        cp_async_commit();
      }
    }
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read

  float4 x[EACH];
  float sum = 0.f, squares = 0.f;
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const i64 j = 4 * (n * THREADS + threadIdx.x);
    x[n] = {};
    if (j >= D) continue;
    x[n] = load4(args.x + row + j);
    if (args.value) {
      float4 parts[PARTS] = {}, factor = {1.f, 1.f, 1.f, 1.f};  // all loads are issued before the first is used
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
        if (p < args.P) parts[p] = load4(args.value + p * args.B * D + row + j);
      const float unit = args.squares ? UNIT_OF_SQUARES<X, TERMS> : 1.f;
      if (args.gate) {
        const float4 gate = load4(args.gate + row + j);
        factor = {sigmoid(gate.x), sigmoid(gate.y), sigmoid(gate.z), sigmoid(gate.w)};
      }
      factor = {unit * factor.x, unit * factor.y, unit * factor.z, unit * factor.w};
#pragma unroll
      for (int p = 1; p < PARTS; ++p) parts[0] = plus(parts[0], parts[p]);
      x[n] = fma4(factor, parts[0], x[n]);
      if (stores) store4(args.sum + row + j, x[n]);
    }
    sum += (x[n].x + x[n].y) + (x[n].z + x[n].w);
  }
  const float mean = block_sum<WARPS>(sum, s.sum) / D;
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    x[n] = minus(x[n], {mean, mean, mean, mean});
    if (4 * (n * THREADS + threadIdx.x) < D)
      squares += (x[n].x * x[n].x + x[n].y * x[n].y) + (x[n].z * x[n].z + x[n].w * x[n].w);
  }
  const float scale = 1.f / sqrtf(block_sum<WARPS>(squares, s.squares) / D + float(args.eps));
  if (!stores) return;

#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const i64 j = 4 * (n * THREADS + threadIdx.x);
    if (j >= D) continue;
    if (!EARLY<EACH, MIXES>) channels[n] = channels_at(j);
    const Channels<MIXES - COPIED>& of_four = channels[n];
    const float4 scaled = {x[n].x * scale, x[n].y * scale, x[n].z * scale, x[n].w * scale};
    const float4 xx = fma4(scaled, of_four.weight, of_four.bias);
    float4 d = {};
    if (shift) {
      d = minus(of_four.shift, xx);
      store4(shift + j, xx);
    }
    if (args.xx) {
      store4(args.xx + row + j, xx);
      store4(args.d + row + j, d);
    }
    const auto mix = [&](int c, float4 maa) {
      const float4 mixed = args.maa ? fma4(d, maa, xx) : xx;
      if (c < args.C) store4_terms<TERMS>(args.mixed + c * args.B * D + row + j, args.C * args.B * D, mixed);
    };
    if constexpr (COPIED > 0) {
      cp_async_wait<0>();
#pragma unroll
      for (int c = 0; c < COPIED; ++c) mix(c, s.maa.of[c][threadIdx.x]);
    }
#pragma unroll
    for (int c = COPIED; c < MIXES; ++c) mix(c, of_four.maa[c - COPIED]);
  }
}
