// what      The gradients of the time mix's data-dependent mixes.
// math      dm_c = dmixed_c d, which overwrites m;  dxx = sum_c dmixed_c, dd = sum_c dmixed_c (maa_c + m_c);
//           d = xx_{t-1} - xx_t with zero before a sequence's first token
//           parts_c = sum_t dm_c of the block's tokens, which add up to dmaa_c
// shapes    dmixed m [5, tokens, D], maa [5, D], xx dxx dd [tokens, D], parts [blocks, 5, D]
// grid      rwkv/cuda_grad.py launches a block for 8 THREADS channels of `tokens_per_block` tokens, channels fastest;
//           it takes the tokens one after the other, and a thread has 8 channels
// smem      Shared: maa, so that no load of it has to wait for a store
// barriers  one, without which the compiler would hold maa in registers
// numerics  float32, rounded once; sums always in the same order
// source    Peng et al., 2024, "Eagle and Finch", eq. 14-15
// limits    D a multiple of 8
#include "training.cuh"

// From training.cuh:
//   EightFloats x: eight neighbouring channels, x.x[0] to x.x[7]; load8, store8: at addresses of whole 16 bytes
//   Stored: eight neighbours as they are in memory
//   Tokens: goes over the block's tokens

constexpr int MIXES = 5;

template <typename T> struct Args {
  const T* dmixed;
  T* m;
  const float* maa;
  const T* xx;
  T* dxx;
  T* dd;
  float* parts;
  i64 tokens, T_;  // T_: of a sequence
  i64 D, tokens_per_block;
};

template <int THREADS> struct Shared {
  float maa[MIXES][8 * THREADS];
};

template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS) training_mix_backward(const Args<T> args) {
  constexpr int AT_ONCE = sizeof(T) == 4 ? 1 : MIXES;  // mixes whose loads are issued together
  Shared<THREADS>& s = *reinterpret_cast<Shared<THREADS>*>(dynamic_smem());
  const int pieces = (int(args.D) + 8 * THREADS - 1) / (8 * THREADS), own = 8 * threadIdx.x;
  const i64 D = args.D, mix_stride = args.tokens * D, block = blockIdx.x / pieces,
            j = own + 8 * THREADS * (blockIdx.x % pieces);
  if (j < D)
#pragma unroll
    for (int c = 0; c < MIXES; ++c) store8(s.maa[c] + own, load8(args.maa + c * D + j));
  __syncthreads();  // keeps the compiler from holding maa in registers, which loads under way need
  if (j >= D) return;
  // The block's tokens, one after the other: starts(): whether it is its sequence's first.
  Tokens token(args.tokens_per_block, args.tokens, args.T_, block);
  EightFloats sums[MIXES] = {}, before = {};
  if (!token.starts()) before = load8(args.xx + (token.t - 1) * D + j);
  for (; token.more(); token.next()) {
    const i64 index = token.t * D + j;
    Stored<T> xx_stored, dmixed[AT_ONCE], m[AT_ONCE];
    xx_stored.load(args.xx + index);
    EightFloats d, dxx = {}, dd = {};
#pragma unroll
    for (int first = 0; first < MIXES; first += AT_ONCE) {
#pragma unroll
      for (int c = 0; c < AT_ONCE; ++c) {
        dmixed[c].load(args.dmixed + (first + c) * mix_stride + index);
        m[c].load(args.m + (first + c) * mix_stride + index);
      }
      if (first == 0) {
        const EightFloats xx = xx_stored.floats();
#pragma unroll
        for (int n = 0; n < 8; ++n) d.x[n] = (token.starts() ? 0.f : before.x[n]) - xx.x[n];
        before = xx;
      }
#pragma unroll
      for (int c = 0; c < AT_ONCE; ++c) {
        const EightFloats dmixed_c = dmixed[c].floats(), m_c = m[c].floats(), maa = load8(s.maa[first + c] + own);
        EightFloats dm;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          dm.x[n] = dmixed_c.x[n] * d.x[n];
          sums[first + c].x[n] += dm.x[n];
          dxx.x[n] += dmixed_c.x[n];
          dd.x[n] = fmaf(dmixed_c.x[n], maa.x[n] + m_c.x[n], dd.x[n]);
        }
        store8(args.m + (first + c) * mix_stride + index, dm);
      }
    }
    store8(args.dxx + index, dxx);
    store8(args.dd + index, dd);
  }
#pragma unroll
  for (int c = 0; c < MIXES; ++c) store8(args.parts + (block * MIXES + c) * D + j, sums[c]);
}
