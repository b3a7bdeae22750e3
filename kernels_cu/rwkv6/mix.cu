// what      The five inputs of the time mix, their token shift mixed by the data.
// math      mixed_c = xx + d (maa_c + tanh(low_c) up_c), c = w k v r g
// shapes    low [B, 5, A], up [5, A, D], maa [5, D], xx d [B, D], mixed [5, B, D]
// grid      a block for every (8 sequences, c, 128 channels), sequences slowest; 128 threads: a channel
//           each
// smem      Shared: 32 tanh(low) of each sequence
// barriers  two a pass of 32: read the tile before it changes, and after
// numerics  float32
// source    Peng et al., 2024, "Eagle and Finch", eq. 14-15
// limits    none
#include "decode.cuh"

constexpr int THREADS = 128, SEQUENCES = 8, PASS = 32;

template <typename T, typename X> struct Args {
  const float* low;
  const T* up;
  const float* maa;
  const float* xx;
  const float* d;
  X* mixed;
  i64 B, D, A;
};

struct Shared {
  float low[PASS][SEQUENCES];
};

template <typename T, typename X> __global__ void __launch_bounds__(THREADS) rwkv6_mix(const Args<T, X> args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  launch_next();
  const i64 A = args.A, B = args.B, D = args.D, tiles = (D + THREADS - 1) / THREADS;
  const i64 j = blockIdx.x % tiles * THREADS + threadIdx.x, c = blockIdx.x / tiles % 5;
  const i64 first = blockIdx.x / tiles / 5 * SEQUENCES;
  const T* up = args.up + c * A * D + j;

  float m[SEQUENCES] = {};
  for (i64 start = 0; start < A; start += PASS) {
    float weight[PASS];
#pragma unroll
    for (int a = 0; a < PASS; ++a) weight[a] = j < D && start + a < A ? to_float(up[(start + a) * D]) : 0.f;
    if (start == 0) wait_for_previous();
    __syncthreads();  // the tile may change
    for (int at = threadIdx.x; at < PASS * SEQUENCES; at += THREADS) {
      const i64 a = start + at % PASS, b = first + at / PASS;
      s.low[at % PASS][at / PASS] = a < A && b < B ? tanhf(args.low[(b * 5 + c) * A + a]) : 0.f;
    }
    __syncthreads();  // the tile stands
#pragma unroll
    for (int a = 0; a < PASS; ++a)
#pragma unroll
      for (int n = 0; n < SEQUENCES; ++n) m[n] = fmaf(s.low[a][n], weight[a], m[n]);
  }
  if (j >= D) return;
  const float maa = args.maa[c * D + j];
#pragma unroll
  for (int n = 0; n < SEQUENCES; ++n) {
    const i64 at = (first + n) * D + j;
    if (first + n < B) args.mixed[c * B * D + at] = from_float<X>(fmaf(args.d[at], maa + m[n], args.xx[at]));
  }
}
