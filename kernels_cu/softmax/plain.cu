// what      Softmax attention and its gradients without tensor cores: every dtype, any K and V; the gradient of sinks;
//           and one result of those over parts of the keys.
// math      Forward: o_i = sum_j p_ij v_j, p_ij = e^(s_ij - lse_i), s_ij = scale q_i . k_j or cap tanh(scale q_i . k_j
//           / cap), lse_i = log(e^sink + sum_j e^s_ij).  Queries: delta_i = do_i . o_i - dlse_i, dq_i = sum_j ds_ij
//           k_j, ds_ij = scale p_ij (do_i . v_j - delta_i) (1 - (s_ij / cap)^2).  Keys: dv_j = sum_i p_ij do_i, dk_j =
//           sum_i ds_ij q_i, over all heads that share the keys.  Sinks: dsink = - sum_i e^(sink - lse_i) delta_i.
//           Merge: lse = log(e^sink + sum_n e^lse_n), o = sum_n e^(lse_n - lse) o_n over parts n
// shapes    q dq [B, H, Tq, K], k dk [B, H / group, Tk, K], v dv [.., V], o do [B, H, Tq, V], L dL [B, H, Tq] or null,
//           sinks dsinks [H], statistics as in softmax_work.cuh, but of Real<T> and to base e. Merge: o [parts B, H,
//           Tq, V] and L [parts B, H, Tq] of parts, one behind the other, to out and merged L
// grid      a block for every tile of `works`, 4 tokens of its 64, and 128 columns; a warp a token. Sinks: a block a
//           head; Merge: a warp a query
// smem      none
// barriers  none
// numerics  float32, or float64 for float64; the largest score so far is subtracted
// source    Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax", algorithm 3; Dao et al., 2022,
//           "FlashAttention", algorithm 4
// limits    none
#include "real.cuh"
#include "softmax_work.cuh"

constexpr int WARPS = 4, WIDTH = 128, EACH = WIDTH / 32, TOKENS = STATISTICS;

template <typename T> struct Args {
  Rows<const T> q, k, v, o, g;  // g is do
  Rows<T> out, dq, dk, dv;
  const Work* works;
  Real<T>*L, *dL, *statistics, *sinks, *dsinks, *merged;
  i64 B, H, group, Tq, K, V, left, right, chunks, tiles, parts;  // tiles of 128 columns
  double scale, softcap;
  double unit;  // of the logarithms that Sinks finds in the statistics: log 2 of tensor cores' kernels, here 1
};

// A warp's token, and its columns from `column` on; what its token sees of the other side's sequence.
struct Place {
  Work work;
  int n;  // of the tile
  i64 column;
  Seen others;

  __device__ Place(const Work* works, i64 tiles, i64 before, i64 behind) {
    constexpr int ROWS = TOKENS / WARPS;
    work = works[blockIdx.x / ROWS / tiles];
    column = blockIdx.x / ROWS % tiles * WIDTH + threadIdx.x % 32;
    n = blockIdx.x % ROWS * WARPS + threadIdx.x / 32;
    others = seen(work.diagonal + n, int(before), int(behind), work.other_length);
  }
};

template <typename T> __device__ __forceinline__ Real<T> dot(const T* x, const T* y, i64 size) {
  Real<T> sum = 0;
  for (i64 c = 0; c < size; ++c) sum = fma(to_real(x[c]), to_real(y[c]), sum);
  return sum;
}

// sums += weight rows[column...], of each of `count` lanes its weight and row.
template <typename R, typename T>
__device__ __forceinline__ void add_rows(R (&sums)[EACH], R weight, const T* row, i64 stride, int count, i64 column,
                                         i64 width) {
  for (int lane = 0; lane < count; ++lane, row += stride) {
    const R x = __shfl_sync(0xffffffffu, weight, lane);
#pragma unroll
    for (int n = 0; n < EACH; ++n)
      if (column + 32 * n < width) sums[n] = fma(x, to_real(row[column + 32 * n]), sums[n]);
  }
}

template <typename T, typename R>
__device__ __forceinline__ void put_row(T* row, const R (&sums)[EACH], i64 column, i64 width) {
#pragma unroll
  for (int n = 0; n < EACH; ++n)
    if (column + 32 * n < width) row[column + 32 * n] = from_real<T>(sums[n]);
}

template <typename R> __device__ __forceinline__ R summed(R x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// A score of a product, and what its gradient is multiplied by.
template <typename R> struct Score {
  R value, slope;
};
template <typename T> __device__ __forceinline__ Score<Real<T>> score_of(Real<T> product, const Args<T>& args) {
  const Real<T> score = Real<T>(args.scale) * product;
  if (!(args.softcap > 0)) return {score, Real<T>(args.scale)};
  const Real<T> capped = tanh(score / Real<T>(args.softcap));
  return {Real<T>(args.softcap) * capped, Real<T>(args.scale) * (1 - capped * capped)};
}

struct Forward {
  template <typename T> static __device__ void run(const Args<T>& args) {
    using R = Real<T>;
    const Place place(args.works, args.tiles, args.left, args.right);
    const Work& work = place.work;
    if (place.n >= work.tokens) return;  // the whole warp
    const int lane = threadIdx.x % 32, shared_head = work.head / int(args.group);
    const T* q = args.q.row(work.batch, work.head, work.start + place.n);
    const R nothing = minus_infinity();
    R sums[EACH] = {}, total = args.sinks ? 1 : 0, most = args.sinks ? args.sinks[work.head] : nothing;
    for (int n = 0; n < place.others.count; n += 32) {
      const i64 first = work.other_start + place.others.from + n;
      const int count = min(32, place.others.count - n);
      R score = nothing;
      if (lane < count) score = score_of(dot(q, args.k.row(work.batch, shared_head, first + lane), args.K), args).value;
      R larger = score;
      for (int distance = 16; distance > 0; distance /= 2)
        larger = max(larger, __shfl_xor_sync(0xffffffffu, larger, distance));
      larger = max(larger, most);
      const R weight = lane < count ? decay_of(score - larger) : R(0), before = decay_of(most - larger);
      most = larger, total = fma(total, before, summed(weight));
#pragma unroll
      for (int n = 0; n < EACH; ++n) sums[n] *= before;
      add_rows(sums, weight, args.v.row(work.batch, shared_head, first), args.v.t, count, place.column, args.V);
    }
    if (total > 0)
#pragma unroll
      for (int n = 0; n < EACH; ++n) sums[n] /= total;
    put_row(args.out.row(work.batch, work.head, work.start + place.n), sums, place.column, args.V);
    if (args.L && place.column == 0)
      args.L[(i64(work.batch) * args.H + work.head) * args.Tq + work.start + place.n] = most + log(total);
  }
};

struct Queries {
  template <typename T> static __device__ void run(const Args<T>& args) {
    using R = Real<T>;
    const Place place(args.works, args.tiles, args.left, args.right);
    const Work& work = place.work;
    const bool none = place.n >= work.tokens;
    const int lane = threadIdx.x % 32, shared_head = work.head / int(args.group);
    const i64 pair = i64(work.batch) * args.H + work.head, token = work.start + place.n;
    const T *q = args.q.row(work.batch, work.head, token), *g = args.g.row(work.batch, work.head, token);
    R L = minus_infinity(), delta = 0, sums[EACH] = {};
    if (!none) {
      L = args.L[pair * args.Tq + token], delta = dot(g, args.o.row(work.batch, work.head, token), args.V);
      if (args.dL) delta -= args.dL[pair * args.Tq + token];
    }
    if (L == minus_infinity()) L = -L;
    if (place.column == 0) {
      R* const to = args.statistics + (pair * args.chunks + work.statistics_chunk) * (2 * STATISTICS) + place.n;
      to[0] = L, to[STATISTICS] = delta;
    }
    if (none) return;  // the whole warp
    for (int n = 0; n < place.others.count; n += 32) {
      const i64 first = work.other_start + place.others.from + n;
      const int count = min(32, place.others.count - n);
      const i64 j = first + min(lane, count - 1);
      const Score<R> score = score_of(dot(q, args.k.row(work.batch, shared_head, j), args.K), args);
      const R change = dot(g, args.v.row(work.batch, shared_head, j), args.V) - delta;
      add_rows(sums, decay_of(score.value - L) * score.slope * change, args.k.row(work.batch, shared_head, first),
               args.k.t, count, place.column, args.K);
    }
    put_row(args.dq.row(work.batch, work.head, token), sums, place.column, args.K);
  }
};

struct Keys {
  template <typename T> static __device__ void run(const Args<T>& args) {
    using R = Real<T>;
    const Place place(args.works, args.tiles, args.right, args.left);
    const Work& work = place.work;
    if (place.n >= work.tokens) return;  // the whole warp
    const int lane = threadIdx.x % 32;
    const T *k = args.k.row(work.batch, work.head, work.start + place.n),
            *v = args.v.row(work.batch, work.head, work.start + place.n);
    R dk[EACH] = {}, dv[EACH] = {};
    for (int member = 0; member < int(args.group); ++member) {
      const int head = work.head * int(args.group) + member;
      const i64 chunk = (i64(work.batch) * args.H + head) * args.chunks + work.statistics_chunk;
      for (int n = 0; n < place.others.count; n += 32) {
        const int count = min(32, place.others.count - n), own = place.others.from + n + min(lane, count - 1);
        const i64 first = work.other_start + place.others.from + n, i = work.other_start + own;
        const R* its = args.statistics + (chunk + own / STATISTICS) * (2 * STATISTICS) + own % STATISTICS;
        const Score<R> score = score_of(dot(args.q.row(work.batch, head, i), k, args.K), args);
        const R weight = decay_of(score.value - its[0]);
        const R change = weight * score.slope * (dot(args.g.row(work.batch, head, i), v, args.V) - its[STATISTICS]);
        add_rows(dk, change, args.q.row(work.batch, head, first), args.q.t, count, place.column, args.K);
        add_rows(dv, weight, args.g.row(work.batch, head, first), args.g.t, count, place.column, args.V);
      }
    }
    put_row(args.dk.row(work.batch, work.head, work.start + place.n), dk, place.column, args.K);
    put_row(args.dv.row(work.batch, work.head, work.start + place.n), dv, place.column, args.V);
  }
};

struct Sinks {
  template <typename T> static __device__ void run(const Args<T>& args) {
    using R = Real<T>;
    const R sink = args.sinks[blockIdx.x];
    R sum = 0;
    if (threadIdx.x >= 32) return;
    for (i64 b = 0; b < args.B; ++b) {
      const R* from = args.statistics + (b * args.H + blockIdx.x) * args.chunks * (2 * STATISTICS);
      for (i64 n = threadIdx.x; n < args.chunks * STATISTICS; n += 32) {
        const R* its = from + n / STATISTICS * (2 * STATISTICS) + n % STATISTICS;
        sum -= decay_of(sink - its[0] * R(args.unit)) * its[STATISTICS];
      }
    }
    sum = summed(sum);
    if (threadIdx.x == 0) args.dsinks[blockIdx.x] = sum;
  }
};

struct Merge {
  template <typename T> static __device__ void run(const Args<T>& args) {
    using R = Real<T>;
    const i64 rows = args.B * args.H * args.Tq, row = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (row >= rows) return;  // the whole warp
    const i64 b = row / (args.H * args.Tq), h = row / args.Tq % args.H, t = row % args.Tq;
    R most = args.sinks ? args.sinks[h] : R(minus_infinity());
    for (i64 n = 0; n < args.parts; ++n) most = max(most, args.L[n * rows + row]);
    most = max(most, R(-3e38));  // finite also where no key is seen
    R total = args.sinks ? decay_of(args.sinks[h] - most) : R(0);
    for (i64 n = 0; n < args.parts; ++n) total += decay_of(args.L[n * rows + row] - most);
    for (i64 c = threadIdx.x % 32; c < args.V; c += 32) {
      R sum = 0;
      for (i64 n = 0; n < args.parts; ++n)
        sum = fma(decay_of(args.L[n * rows + row] - most), to_real(args.o.row(n * args.B + b, h, t)[c]), sum);
      args.out.row(b, h, t)[c] = from_real<T>(total > 0 ? sum / total : R(0));
    }
    if (args.merged && threadIdx.x % 32 == 0) args.merged[row] = most + log(total);
  }
};

// 3 blocks a multiprocessor: without a word the compiler takes few registers and spills.
template <class Pass, typename T> __global__ void __launch_bounds__(32 * WARPS, 3) softmax_plain(const Args<T> args) {
  Pass::template run<T>(args);
}
