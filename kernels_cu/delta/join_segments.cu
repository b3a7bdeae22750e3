// what      Joins the segments of sequences under a delta rule: the state from which each of them starts, and backwards
//           the gradient of the state behind it.
// math      A segment turns the state S before it into F S + G, and the gradient C of the state behind it into
//           F^T C + G. Segments have the numbers 0...P - 1; S_1 and C_{P-2} are known: G of the segment before.
//           S_{p+1} = F_p S_p + G_p, p = 1...P - 2;  C_{p-1} = F_p^T C_p + G_p, p = P - 2...1
// shapes    F [N, P, H, K, K padded with zeros to a multiple of 4], starts [directions, N, P, H, K, V] float32: S_p and
//           C_p, where G of the segment before lies first
// grid      a block for every (direction, sequence, head, BV columns), direction slowest; a thread has 2 channels of 4
//           columns
// smem      S, or C, of two segments
// barriers  one a segment: the next S is in shared memory
// numerics  float32
// source    Blelloch, 1990, "Prefix sums and their applications", section 1.4.1, one after the other
// limits    K <= BK of 64, 128; P >= 3
#include "ptx.cuh"
#include "tensor.cuh"

struct Args {
  const float* F;
  float* starts;
  i64 N, P, H, K, V;
};

constexpr int BV = 16;

template <int BK> struct Shared {
  float4 S[2][BK][BV / 4];
};

// block: the number of the (sequence, head, BV columns). S in the code is C if BACKWARDS.
template <bool BACKWARDS, int BK>
__device__ __forceinline__ void join(float4 (&S)[2][BK][BV / 4], const Args& args, float* starts, u32 block) {
  const u32 tiles = u32(args.V + BV - 1) / BV, H = u32(args.H), pair = block / tiles, h = pair % H, n = pair / H;
  const int K = int(args.K), V = int(args.V), P = int(args.P), stride = (K + 3) / 4 * 4;
  const int channel = threadIdx.x / (BV / 4) * 2, group = threadIdx.x % (BV / 4);
  const int column = int(block % tiles) * BV + 4 * group;
  // Calls f(number of the state from which segment p starts, number of x) for the thread's channels and columns.
  const auto each = [&](int p, float (&x)[2][4], auto f) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (channel + j < K && column + i < V)
          f(starts[(((i64(n) * P + p) * H + h) * K + channel + j) * V + column + i], x[j][i]);
  };
  const auto load = [](float& from, float& to) { to = from; };
  const int first = BACKWARDS ? P - 2 : 1, by = BACKWARDS ? -1 : 1;
  float x[2][4] = {};
  each(first, x, load);
#pragma unroll 1
  for (int step = 0; step < P - 2; ++step) {
    const int p = first + by * step;
    const auto& before = S[step % 2];
    for (int j = 0; j < 2; ++j) S[step % 2][channel + j][group] = float4{x[j][0], x[j][1], x[j][2], x[j][3]};
    each(p + by, x, load);
    __syncthreads();  // S is in shared memory
    if (channel >= K) continue;
    const float* F = args.F + ((i64(n) * P + p) * H + h) * K * stride;
#pragma unroll 4
    for (int k = 0; k < stride; k += 4) {
      float factors[4][2] = {};
      if constexpr (BACKWARDS) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (k + i < K) {
            const float2 two = *reinterpret_cast<const float2*>(F + (k + i) * stride + channel);
            factors[i][0] = two.x, factors[i][1] = two.y;
          }
      } else {
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (channel + j < K) {
            const float4 four = *reinterpret_cast<const float4*>(F + (channel + j) * stride + k);
            factors[0][j] = four.x, factors[1][j] = four.y, factors[2][j] = four.z, factors[3][j] = four.w;
          }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 four = before[k + i][group];
        const float numbers[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) x[j][c] = fmaf(factors[i][j], numbers[c], x[j][c]);
      }
    }
    each(p + by, x, [](float& to, float& from) { to = from; });
  }
}

template <int BK> __global__ void __launch_bounds__(2 * BK, 1) delta_join_segments(const Args args) {
  auto& S = reinterpret_cast<Shared<BK>*>(dynamic_smem())->S;
  const u32 blocks = u32(args.N * args.H * ((args.V + BV - 1) / BV));
  if (blockIdx.x < blocks) join<false>(S, args, args.starts, blockIdx.x);
  else join<true>(S, args, args.starts + args.N * args.P * args.H * args.K * args.V, blockIdx.x - blocks);
}
