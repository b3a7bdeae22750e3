// what      The statistics of softmax attention's queries, which the gradients of k and v read.
// math      L_i = lse_i / ln 2, lse_i the log of the sum of e^score;  delta_i = do_i . o_i - dlse_i, do and dlse being
//           gradients of o and lse
// shapes    o do [B, H, Tq, V]; lse dlse [B, H, Tq] float32, dlse or null; statistics [B, H, chunks, 2, 64]
//           float32: of every 64 queries of a sequence (a chunk) first L, then delta
// grid      softmax.py launches a block for every 64 queries (Work in softmax_work.cuh); four threads compute those of
//           a query
// numerics  float32; delta is computed from the rounded o. L is infinite, so that weights are 0, after the
//           sequence's end, where delta is 0, if no key is seen (lse is -infinity), or if |L| is above 2^24
// source    Dao et al., "FlashAttention", 2022, algorithm 4, line 19
// limits    16-bit data; rows of whole 16 bytes
#include "softmax_work.cuh"

template <typename T> struct Args {
  StridedRows<const T> o, do_;
  const Work* works;
  const float *lse, *dlse;
  float* statistics;
  i64 H, Tq, V, chunks;
};

template <typename T> __global__ void __launch_bounds__(4 * CHUNK_QUERIES, 2) softmax_statistics(const Args<T> args) {
  const Work& work = args.works[blockIdx.x];
  const int query = threadIdx.x / 4;
  const i64 head = i64(work.batch) * args.H + work.head, token = work.start + query;
  float delta = 0.f, L = minus_infinity();
  if (query < work.tokens) {
    const T *const o = args.o.row(work.batch, work.head, token), *const do_ =
                                                                     args.do_.row(work.batch, work.head, token);
    for (int v = threadIdx.x % 4 * 8; v < args.V; v += 32) {
      const uint4 x = *reinterpret_cast<const uint4*>(o + v), y = *reinterpret_cast<const uint4*>(do_ + v);
      delta = add_dot<T>(y.x, x.x, delta), delta = add_dot<T>(y.y, x.y, delta);
      delta = add_dot<T>(y.z, x.z, delta), delta = add_dot<T>(y.w, x.w, delta);
    }
    L = LOG2E * args.lse[head * args.Tq + token];
  }
  delta = row_sum(delta);
  if (query < work.tokens && args.dlse) delta -= args.dlse[head * args.Tq + token];
  if (threadIdx.x % 4) return;
  float* const to = args.statistics + (head * args.chunks + work.statistics_chunk) * CHUNK_STATISTICS + query;
  to[0] = logarithm_or_infinity(L), to[CHUNK_QUERIES] = delta;
}
