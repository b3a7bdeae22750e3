// what      Layer norm, token shift and static mixes of all tokens of the prompts, packed one after the other.
// math      xx = LN(x);  d_t = xx_{t-1} - xx_t, at a prompt's start d = before - xx;  mixed_c = xx + d maa_c;
//           at its end shift = xx, for the next step; `before` is the LN(x) that a prompt continues
// shapes    x xx d [T, D], weight bias [D], maa [C, D], before [N, D], shift [pool, D], starts ends [T]: the row of
//           before where a prompt starts and of shift where it ends, -1 elsewhere; mixed [C, T, D]; xx and d
//           may be null
// grid      a block for every `tokens_per_block` neighbouring tokens, at most TOKENS; it also computes the norm of the
//           token before them. 512 threads, EACH times 4 channels each
// smem      Shared: the warps' parts of two sums of each token
// barriers  two: the tokens' means, then their variances
// numerics  float32; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", eq. 3-4
// limits    D a multiple of 4, up to 2048 EACH
#include "decode.cuh"

// From decode.cuh and its includes:
//   load4, store4: four neighbours as floats. minus(x, y), fma4(x, y, z): x - y and x y + z, channel by channel
//   warp_sum, sum_over_lanes<N>: sums over a warp, or N neighbouring lanes, in each of them; inverse_root: 1 / sqrt(x)
//   exchange_and_add_halves: a step of such sums of several numbers, of which a lane keeps a part
//   launch_next, wait_for_previous: the next kernel may begin; the previous one has ended

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

constexpr int ROWS = 9;  // the most of which block_sums makes sums

struct Shared {
  float sums[ROWS][WARPS], squares[ROWS][WARPS];  // of each warp
};

// A thread's n-th four channels begin here.
__device__ __forceinline__ i64 channel(int n) { return 4 * (n * THREADS + i64(threadIdx.x)); }

// x[n] becomes its sum over the block, the same bits in every thread, for every n; all threads call this, and it has
// one barrier. parts: memory that the caller does not use again.
template <int N> __device__ __forceinline__ void block_sums(float (&x)[N], float (&parts)[ROWS][WARPS]) {
  static_assert(N <= ROWS && ROWS == 1 + 8 && WARPS == 16);  // 8 are exchanged; four lanes add four sums each
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  float shares[ROWS - 1] = {};
#pragma unroll
  for (int n = 1; n < N; ++n) shares[n - 1] = x[n];
  exchange_and_add_halves<4>(shares, 16, lane & 16);
  exchange_and_add_halves<2>(shares, 8, lane & 8);
  exchange_and_add_halves<1>(shares, 4, lane & 4);
  // Of a number, all lanes that have it store it.
  parts[0][warp] = warp_sum(x[0]);
  parts[1 + lane / 4][warp] = sum_over_lanes<4>(shares[0]);
  __syncthreads();  // the warps' sums are in shared memory
  // Four lanes add the warps' sums of a number.
  const auto sum_of = [&](int n) {
    const float4 four = load4(&parts[n][4 * (lane & 3)]);
    return sum_over_lanes<4>((four.x + four.y) + (four.z + four.w));
  };
  x[0] = sum_of(0);
  const float others = sum_of(1 + lane / 4);
#pragma unroll
  for (int n = 1; n < N; ++n) x[n] = __shfl_sync(0xffffffffu, others, 4 * (n - 1));
}

template <int EACH> constexpr int BLOCKS = EACH < 4 ? 2 : 1;  // of a multiprocessor that registers have room for

template <typename X, int EACH, int TOKENS>
__global__ void __launch_bounds__(THREADS, BLOCKS<EACH>) rwkv6_shift_mix(const Args<X> args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  launch_next();  // the next kernel may begin
  constexpr int N = TOKENS + 1;
  const i64 D = args.D, first = blockIdx.x * args.tokens_per_block;
  const int count = int(min(args.tokens_per_block, args.T - first));
  wait_for_previous();           // the previous kernel has ended: what it wrote can be read
  u32 starting = 0, ending = 0;  // bit m: a prompt starts, or ends, with the block's token m
#pragma unroll
  for (int m = 0; m < TOKENS; ++m) {
    if (m >= count) continue;
    if (args.starts[first + m] >= 0) starting |= 1u << m;
    if (args.ends[first + m] >= 0) ending |= 1u << m;
  }
  // Row m + 1 is the block's token m; row 0 is the token before, unless a prompt starts. Rows are 0 where there is no
  // token, and beyond D.
  float4 x[N][EACH];
#pragma unroll
  for (int m = 0; m < N; ++m)
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const bool inside = channel(n) < D && (m == 0 ? !(starting & 1) : m <= count);
      x[m][n] = inside ? load4(args.x + (first + m - 1) * D + channel(n)) : float4{};
    }
  const float inverse_D = 1.f / D, eps = float(args.eps);
  float sums[N] = {}, squares[N] = {};
#pragma unroll
  for (int m = 0; m < N; ++m)
#pragma unroll
    for (int n = 0; n < EACH; ++n) sums[m] += (x[m][n].x + x[m][n].y) + (x[m][n].z + x[m][n].w);
  block_sums(sums, s.sums);
#pragma unroll
  for (int m = 0; m < N; ++m) {
    const float mean = sums[m] * inverse_D;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      if (channel(n) >= D) continue;
      const float4 centred = minus(x[m][n], {mean, mean, mean, mean});
      squares[m] += (centred.x * centred.x + centred.y * centred.y) + (centred.z * centred.z + centred.w * centred.w);
      x[m][n] = centred;
    }
  }
  block_sums(squares, s.squares);
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const i64 j = channel(n);
    if (j >= D) continue;
    const float4 weight = load4(args.weight + j), bias = load4(args.bias + j);
#pragma unroll
    for (int m = 0; m < N; ++m) {
      const float scale = inverse_root(squares[m] * inverse_D + eps);
      const float4 centred = x[m][n];
      x[m][n] = fma4({scale * centred.x, scale * centred.y, scale * centred.z, scale * centred.w}, weight, bias);
    }
    // From here on x has xx. change: the previous token's xx minus that of the block's token m.
    const auto change = [&](int m) {
      const bool starts = starting >> m & 1;
      return minus(starts ? load4(args.before + args.starts[first + m] * D + j) : x[m][n], x[m + 1][n]);
    };
#pragma unroll
    for (int m = 0; m < TOKENS; ++m) {
      if (m >= count) continue;
      const i64 index = (first + m) * D + j;
      if (ending >> m & 1) store4(args.shift + args.ends[first + m] * D + j, x[m + 1][n]);
      if (!args.xx) continue;
      store4(args.xx + index, x[m + 1][n]);
      store4(args.d + index, change(m));
    }
#pragma unroll 1
    for (i64 c = 0; c < args.C; ++c) {
      const float4 maa = load4(args.maa + c * D + j);
      X* to = args.mixed + (c * args.T + first) * D + j;
#pragma unroll
      for (int m = 0; m < TOKENS; ++m, to += D)
        if (m < count) store4(to, fma4(change(m), maa, x[m + 1][n]));
    }
  }
}
