// what      Joins the segments of sequences under a delta rule: the state before each segment.
// math      A segment turns the state S before it into F S + G.  S_0 = initial;  S_{p+1} = F_p S_p + G_p;
//           starts_p = S_p;  final = S_P
// shapes    F [N, P, H, K, K padded with zeros to a multiple of 4], G and starts [N, P, H, K, V], initial and final
//           [N, H, K, V], float32
// grid      a block for every (sequence, head, BV columns), sequence slowest; a thread has 2 channels of 4 columns
// smem      S, and the next S
// barriers  one a segment: the next S is in shared memory
// numerics  float32
// source    Blelloch, 1990, "Prefix sums and their applications", section 1.4.1, one after the other
// limits    K <= BK of 64, 128
#include "ptx.cuh"
#include "tensor.cuh"

struct Args {
  const float *F, *G;
  Rows<const float> initial;  // or null: zeros
  float* starts;
  Rows<float> final;  // or null
  i64 P, H, K, V;
};

constexpr int BV = 16;

template <int BK> struct Shared {
  float4 S[2][BK][BV / 4];
};

template <int BK> __global__ void __launch_bounds__(2 * BK) delta_join_segments(const Args args) {
  auto& S = reinterpret_cast<Shared<BK>*>(dynamic_smem())->S;
  const u32 tiles = u32(args.V + BV - 1) / BV, H = u32(args.H), pair = blockIdx.x / tiles, h = pair % H, n = pair / H;
  const int K = int(args.K), V = int(args.V), P = int(args.P), stride = (K + 3) / 4 * 4;
  const int channel = threadIdx.x / (BV / 4) * 2, group = threadIdx.x % (BV / 4);
  const int column = int(blockIdx.x % tiles) * BV + 4 * group;
  // Calls f(channel, index in a state of the first of the thread's columns) for the thread's channels.
  const auto each = [&](auto f) {
    for (int c = channel; c < min(channel + 2, K); ++c) f(c, i64(c) * V + column);
  };
  const auto load = [&](const float* from) {
    float x[4];
    for (int i = 0; i < 4; ++i) x[i] = column + i < V ? from[i] : 0.f;
    return float4{x[0], x[1], x[2], x[3]};
  };
  const auto store = [&](float* to, const float4& x) {
    const float values[4] = {x.x, x.y, x.z, x.w};
    for (int i = 0; i < 4; ++i)
      if (column + i < V) to[i] = values[i];
  };
  for (int c = channel; c < channel + 2; ++c) S[0][c][group] = S[1][c][group] = float4{};
  each([&](int c, i64 at) { S[0][c][group] = args.initial.p ? load(args.initial.row(n, h, 0) + at) : float4{}; });
  for (int p = 0; p < P; ++p) {
    const i64 segment = (i64(n) * P + p) * H + h;
    const float *F = args.F + segment * K * stride, *G = args.G + segment * K * V;
    __syncthreads();  // S is in shared memory
    each([&](int c, i64 at) {
      store(args.starts + segment * K * V + at, S[p % 2][c][group]);
      float4 sum = load(G + at);
#pragma unroll 2
      for (int k = 0; k < stride; k += 4) {
        const float4 four = *reinterpret_cast<const float4*>(F + c * stride + k);
        const float factors[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float by = factors[i];
          const float4 x = S[p % 2][k + i][group];
          sum.x = fmaf(by, x.x, sum.x), sum.y = fmaf(by, x.y, sum.y);
          sum.z = fmaf(by, x.z, sum.z), sum.w = fmaf(by, x.w, sum.w);
        }
      }
      S[(p + 1) % 2][c][group] = sum;
    });
  }
  if (args.final.p) each([&](int c, i64 at) { store(args.final.row(n, h, 0) + at, S[P % 2][c][group]); });
}
