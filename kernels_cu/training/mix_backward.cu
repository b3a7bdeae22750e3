// what      The gradients of the time mix's data-dependent mixes.
// math      dm_c = dmixed_c d, in the place of m;  dxx = sum_c dmixed_c, dd = sum_c dmixed_c (maa_c + m_c)
//           parts_c = sum_t dm_c of the block's tokens, which add up to dmaa_c
// shapes    dmixed m [5, tokens, D], maa [5, D], xx dxx dd [tokens, D], parts [blocks, 5, D]
// grid      a block for every `each` tokens, one after the other; threads of 8 channels each
// smem      none
// barriers  none
// numerics  float32, rounded once; sums always in the same order
// source    Peng et al., 2024, "Eagle and Finch", eq. 14-15
// limits    D a multiple of 8, up to 8 THREADS
#include "training.cuh"

constexpr int MIXES = 5;

template <typename T> struct Args {
  const T* dmixed;
  T* m;
  const float* maa;
  const T* xx;
  T* dxx;
  T* dd;
  float* parts;
  i64 tokens, T_, D, each;
};

template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS) training_mix_backward(const Args<T> args) {
  constexpr int TOGETHER = sizeof(T) == 4 ? 1 : 3;  // mixes whose loads are under way at a time
  const i64 D = args.D, j = 8 * threadIdx.x;
  if (j >= D) return;
  const Tokens mine(args.each, args.tokens);
  Eight sums[MIXES] = {}, before = {};
  if (mine.first % args.T_) before = load8(args.xx + (mine.first - 1) * D + j);
  for (i64 t = mine.first; t < mine.last; ++t) {
    const i64 at = t * D + j;
    const Eight xx = load8(args.xx + at);
    const bool inner = t % args.T_;
    Eight d, dxx = {}, dd = {};
#pragma unroll
    for (int n = 0; n < 8; ++n) d.x[n] = (inner ? before.x[n] : 0.f) - xx.x[n];
#pragma unroll
    for (int first = 0; first < MIXES; first += TOGETHER) {
      Stored<T> dmixed[TOGETHER], m[TOGETHER];
#pragma unroll
      for (int c = first; c < first + TOGETHER && c < MIXES; ++c) {
        dmixed[c - first].load(args.dmixed + c * args.tokens * D + at);
        m[c - first].load(args.m + c * args.tokens * D + at);
      }
#pragma unroll
      for (int c = first; c < first + TOGETHER && c < MIXES; ++c) {
        const Eight given = dmixed[c - first].floats(), share = m[c - first].floats(),
                    maa = load8(args.maa + c * D + j);
        Eight dm;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          dm.x[n] = given.x[n] * d.x[n];
          sums[c].x[n] += dm.x[n];
          dxx.x[n] += given.x[n];
          dd.x[n] = fmaf(given.x[n], maa.x[n] + share.x[n], dd.x[n]);
        }
        store8(args.m + c * args.tokens * D + at, dm);
      }
    }
    store8(args.dxx + at, dxx);
    store8(args.dd + at, dd);
    before = xx;
  }
#pragma unroll
  for (int c = 0; c < MIXES; ++c) store8(args.parts + (blockIdx.x * MIXES + c) * D + j, sums[c]);
}
