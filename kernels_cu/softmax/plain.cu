// what      Softmax attention and its gradients without tensor cores, for every dtype and any K and V; the gradient of
//           the sinks; the merge of results over parts of the keys.
// math      Forward: o_i = sum_j p_ij v_j, p_ij = e^(s_ij - lse_i), s_ij = scale q_i . k_j or cap tanh(scale q_i . k_j
//           / cap), lse_i = log(e^sink + sum_j e^s_ij).  Queries: delta_i = do_i . o_i - dlse_i, dq_i = sum_j ds_ij
//           k_j, ds_ij = scale p_ij (do_i . v_j - delta_i) (1 - (s_ij / cap)^2).  Keys: dv_j = sum_i p_ij do_i, dk_j =
//           sum_i ds_ij q_i, over all heads that share the keys.  Sinks: dsink = - sum_i e^(sink - lse_i) delta_i.
//           Merge: lse = log(e^sink + sum_n e^lse_n), o = sum_n e^(lse_n - lse) o_n over parts n
// shapes    q dq [B, H, Tq, K], k dk [B, H / group, Tk, K], v dv [.., V], o do [B, H, Tq, V], lse dlse
//           [B, H, Tq] or null, sinks dsinks [H], statistics as in softmax_work.cuh, but in FloatOrDouble<T> and base
//           e. Merge: o [parts B, H, Tq, V] and lse [parts B, H, Tq], part by part, to out [B, H, Tq, V] and merged [B,
//           H, Tq]
// grid      softmax.py launches a block for 4 of the 64 tokens of a tile of `works` and for 128 columns, a warp for
//           each token. Sinks: a block for each head. Merge: a warp for each query
// numerics  float32, or float64 for float64; the largest score so far is subtracted
// source    Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax", algorithm 3; Dao et al., 2022,
//           "FlashAttention", algorithm 4
#include "real.cuh"
#include "softmax_work.cuh"

// From the includes:
//   Work: an entry of `works`; `diagonal`: the position of the tile's first token among the others
//   visible_tokens: the tokens that a row sees (TokenRange: `count` of them, from `from` on); CHUNK_QUERIES = 64
//   FloatOrDouble<T>: the type of the arithmetic; widened, narrowed<T>: numbers to it and to T

constexpr int WARPS = 4;
constexpr int WIDTH = 128, LANE_COLUMNS = WIDTH / 32;  // columns of a block, and of each lane

template <typename T> struct Args {
  StridedRows<const T> q, k, v, o, do_;
  StridedRows<T> out, dq, dk, dv;
  const Work* works;
  FloatOrDouble<T>*lse, *dlse, *statistics, *sinks, *dsinks, *merged;
  // group: heads of queries that share keys; left, right: a query sees so many tokens before and after its position;
  // chunks: of `statistics`, of a batch row
  i64 B, H, group, Tq, K, V, left, right, chunks;
  i64 tiles, parts;  // tiles: of 128 columns of a result; parts: of the keys
  double scale, softcap;
  double unit;  // Sinks: L in `statistics` times this is lse; 1, or log 2 after tensor-core kernels
};

// What a warp computes: token `row` of a tile of `works`. A lane has the columns column, column + 32 ... of a result.
// `others` are the keys that a query sees, or the queries that see a key, counted from their sequence's start. before,
// after: how many tokens before and after its own position the token sees, or is seen from.
struct Place {
  Work work;
  int row;  // the token's number in the tile
  i64 column;
  TokenRange others;

  __device__ Place(const Work* works, i64 tiles, i64 before, i64 after) {
    constexpr int BLOCKS = CHUNK_QUERIES / WARPS;  // that share a tile of `works`: 64 queries or keys
    work = works[blockIdx.x / BLOCKS / tiles];
    column = blockIdx.x / BLOCKS % tiles * WIDTH + threadIdx.x % 32;
    row = blockIdx.x % BLOCKS * WARPS + threadIdx.x / 32;
    others = visible_tokens(work.diagonal + row, int(before), int(after), work.other_length);
  }
};

// The sum of x[c] y[c] over `size` neighbouring numbers, in order.
template <typename T> __device__ __forceinline__ FloatOrDouble<T> dot(const T* x, const T* y, i64 size) {
  FloatOrDouble<T> sum = 0;
  for (i64 c = 0; c < size; ++c) sum = fma(widened(x[c]), widened(y[c]), sum);
  return sum;
}

// Adds weight times row to `sums` for `count` rows of `width` columns, from `row` on. Lane n has the weight of row n;
// each lane adds its own columns.
template <typename R, typename T>
__device__ __forceinline__ void add_rows(R (&sums)[LANE_COLUMNS], R weight, const T* row, i64 stride, int count,
                                         i64 column, i64 width) {
  for (int lane = 0; lane < count; ++lane, row += stride) {
    const R row_weight = __shfl_sync(0xffffffffu, weight, lane);
#pragma unroll
    for (int n = 0; n < LANE_COLUMNS; ++n)
      if (column + 32 * n < width) sums[n] = fma(row_weight, widened(row[column + 32 * n]), sums[n]);
  }
}

// Stores this lane's columns of a row.
template <typename T, typename R>
__device__ __forceinline__ void store_row(T* row, const R (&sums)[LANE_COLUMNS], i64 column, i64 width) {
#pragma unroll
  for (int n = 0; n < LANE_COLUMNS; ++n)
    if (column + 32 * n < width) row[column + 32 * n] = narrowed<T>(sums[n]);
}

// The score s of a product q . k, and its derivative ds / d(q . k).
template <typename R> struct Score {
  R value, slope;
};
template <typename T>
__device__ __forceinline__ Score<FloatOrDouble<T>> score_of(FloatOrDouble<T> product, const Args<T>& args) {
  const FloatOrDouble<T> score = FloatOrDouble<T>(args.scale) * product;
  if (!(args.softcap > 0)) return {score, FloatOrDouble<T>(args.scale)};
  const FloatOrDouble<T> capped = tanh(score / FloatOrDouble<T>(args.softcap));
  return {FloatOrDouble<T>(args.softcap) * capped, FloatOrDouble<T>(args.scale) * (1 - capped * capped)};
}

// The passes, of which the kernel's template argument is one. `run` is what each thread does. Forward, Queries and Keys
// take 32 tokens of the other side at a time: a lane computes the score of one of them, and then all lanes add the 32
// weighted rows, each lane in its own columns.
// Forward: o, and lse, of a query.
struct Forward {
  template <typename T> static __device__ void run(const Args<T>& args) {
    using R = FloatOrDouble<T>;
    const Place place(args.works, args.tiles, args.left, args.right);
    const Work& work = place.work;
    if (place.row >= work.tokens) return;  // the whole warp
    const int lane = threadIdx.x % 32, shared_head = work.head / int(args.group);
    const T* q = args.q.row(work.batch, work.head, work.start + place.row);
    const R minus_inf = minus_infinity();
    // sums: of weights times v, so far; total: of weights; both relative to e^largest. A lane has every 32nd key.
    R sums[LANE_COLUMNS] = {}, total = args.sinks ? 1 : 0, largest = args.sinks ? args.sinks[work.head] : minus_inf;
    for (int n = 0; n < place.others.count; n += 32) {
      const i64 first = work.other_start + place.others.from + n;
      const int count = min(32, place.others.count - n);
      R score = minus_inf;
      if (lane < count) score = score_of(dot(q, args.k.row(work.batch, shared_head, first + lane), args.K), args).value;
      R new_largest = score;
      for (int distance = 16; distance > 0; distance /= 2)
        new_largest = max(new_largest, __shfl_xor_sync(0xffffffffu, new_largest, distance));
      new_largest = max(new_largest, largest);
      const R shift = new_largest > minus_inf ? new_largest : R(0);  // -inf less -inf is NaN
      const R weight = lane < count ? decay_of(score - shift) : R(0), rescale = decay_of(largest - shift);
      largest = new_largest, total = fma(total, rescale, warp_sum(weight));
#pragma unroll
      for (int c = 0; c < LANE_COLUMNS; ++c) sums[c] *= rescale;
      add_rows(sums, weight, args.v.row(work.batch, shared_head, first), args.v.token_stride, count, place.column,
               args.V);
    }
    if (place.others.count > 0)  // total: e^0 at least, of the largest score, unless all scores are -inf
#pragma unroll
      for (int n = 0; n < LANE_COLUMNS; ++n) sums[n] /= total;
    store_row(args.out.row(work.batch, work.head, work.start + place.row), sums, place.column, args.V);
    if (args.lse && place.column == 0)
      args.lse[(i64(work.batch) * args.H + work.head) * args.Tq + work.start + place.row] = largest + log(total);
  }
};

// Statistics and dq of a query.
struct Queries {
  template <typename T> static __device__ void run(const Args<T>& args) {
    using R = FloatOrDouble<T>;
    const Place place(args.works, args.tiles, args.left, args.right);
    const Work& work = place.work;
    const bool is_empty = place.row >= work.tokens;  // no such query: its statistics are written, too
    const int lane = threadIdx.x % 32, shared_head = work.head / int(args.group);
    const i64 head = i64(work.batch) * args.H + work.head, token = work.start + place.row;
    const T *q = args.q.row(work.batch, work.head, token), *do_ = args.do_.row(work.batch, work.head, token);
    R L = minus_infinity(), delta = 0, sums[LANE_COLUMNS] = {};
    if (!is_empty) {
      L = args.lse[head * args.Tq + token], delta = dot(do_, args.o.row(work.batch, work.head, token), args.V);
      if (args.dlse) delta -= args.dlse[head * args.Tq + token];
    }
    if (L == minus_infinity()) L = -L;  // no key is seen, or there is no such query: its weights become e^-inf = 0
    if (place.column == 0) {
      R* const to = args.statistics + (head * args.chunks + work.statistics_chunk) * CHUNK_STATISTICS + place.row;
      to[0] = L, to[CHUNK_QUERIES] = delta;
    }
    if (is_empty) return;  // the whole warp
    for (int n = 0; n < place.others.count; n += 32) {
      const i64 first = work.other_start + place.others.from + n;
      const int count = min(32, place.others.count - n);
      const i64 j = first + min(lane, count - 1);  // lanes from `count` on repeat the last key; add_rows ignores them
      const Score<R> score = score_of(dot(q, args.k.row(work.batch, shared_head, j), args.K), args);
      const R dp_less_delta = dot(do_, args.v.row(work.batch, shared_head, j), args.V) - delta;
      add_rows(sums, decay_of(score.value - L) * score.slope * dp_less_delta,
               args.k.row(work.batch, shared_head, first), args.k.token_stride, count, place.column, args.K);
    }
    store_row(args.dq.row(work.batch, work.head, token), sums, place.column, args.K);
  }
};

// dk and dv of a key, from the queries of all heads that share it.
struct Keys {
  template <typename T> static __device__ void run(const Args<T>& args) {
    using R = FloatOrDouble<T>;
    const Place place(args.works, args.tiles, args.right, args.left);  // queries up to `right` before a key see it
    const Work& work = place.work;
    if (place.row >= work.tokens) return;  // the whole warp
    const int lane = threadIdx.x % 32;
    const T *k = args.k.row(work.batch, work.head, work.start + place.row),
            *v = args.v.row(work.batch, work.head, work.start + place.row);
    R dk[LANE_COLUMNS] = {}, dv[LANE_COLUMNS] = {};
    for (int member = 0; member < int(args.group); ++member) {
      const int head = work.head * int(args.group) + member;
      const i64 chunk = (i64(work.batch) * args.H + head) * args.chunks + work.statistics_chunk;
      for (int n = 0; n < place.others.count; n += 32) {
        // Lanes from `count` on repeat the last query; add_rows ignores them.
        const int count = min(32, place.others.count - n), query = place.others.from + n + min(lane, count - 1);
        const i64 first = work.other_start + place.others.from + n, i = work.other_start + query;
        const R* statistics =
            args.statistics + (chunk + query / CHUNK_QUERIES) * CHUNK_STATISTICS + query % CHUNK_QUERIES;
        const Score<R> score = score_of(dot(args.q.row(work.batch, head, i), k, args.K), args);
        const R weight = decay_of(score.value - statistics[0]);
        const R score_gradient =
            weight * score.slope * (dot(args.do_.row(work.batch, head, i), v, args.V) - statistics[CHUNK_QUERIES]);
        add_rows(dk, score_gradient, args.q.row(work.batch, head, first), args.q.token_stride, count, place.column,
                 args.K);
        add_rows(dv, weight, args.do_.row(work.batch, head, first), args.do_.token_stride, count, place.column, args.V);
      }
    }
    store_row(args.dk.row(work.batch, work.head, work.start + place.row), dk, place.column, args.K);
    store_row(args.dv.row(work.batch, work.head, work.start + place.row), dv, place.column, args.V);
  }
};

// dsink of a head, by one warp. Each number of `statistics` has been written: where there is no query, L is infinite
// and delta is 0, so that nothing is added.
struct Sinks {
  template <typename T> static __device__ void run(const Args<T>& args) {
    using R = FloatOrDouble<T>;
    const R sink = args.sinks[blockIdx.x];
    R sum = 0;
    if (threadIdx.x >= 32) return;
    for (i64 b = 0; b < args.B; ++b) {
      const R* from = args.statistics + (b * args.H + blockIdx.x) * args.chunks * CHUNK_STATISTICS;
      for (i64 n = threadIdx.x; n < args.chunks * CHUNK_QUERIES; n += 32) {
        const R* statistics = from + n / CHUNK_QUERIES * CHUNK_STATISTICS + n % CHUNK_QUERIES;
        sum -= decay_of(sink - statistics[0] * R(args.unit)) * statistics[CHUNK_QUERIES];
      }
    }
    sum = warp_sum(sum);
    if (threadIdx.x == 0) args.dsinks[blockIdx.x] = sum;
  }
};

// o and lse of a query from those of `parts` parts of the keys.
struct Merge {
  template <typename T> static __device__ void run(const Args<T>& args) {
    using R = FloatOrDouble<T>;
    const i64 rows = args.B * args.H * args.Tq, row = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (row >= rows) return;  // the whole warp
    const i64 b = row / (args.H * args.Tq), h = row / args.Tq % args.H, t = row % args.Tq;
    R largest = args.sinks ? args.sinks[h] : R(minus_infinity());
    for (i64 n = 0; n < args.parts; ++n) largest = max(largest, args.lse[n * rows + row]);
    largest = max(largest, R(-3e38));  // finite even if no key is seen: total is then 0, and lse -inf
    R total = args.sinks ? decay_of(args.sinks[h] - largest) : R(0);
    for (i64 n = 0; n < args.parts; ++n) total += decay_of(args.lse[n * rows + row] - largest);
    for (i64 c = threadIdx.x % 32; c < args.V; c += 32) {
      R sum = 0;
      for (i64 n = 0; n < args.parts; ++n)
        sum = fma(decay_of(args.lse[n * rows + row] - largest), widened(args.o.row(n * args.B + b, h, t)[c]), sum);
      args.out.row(b, h, t)[c] = narrowed<T>(total == 0 ? R(0) : sum / total);
    }
    if (args.merged && threadIdx.x % 32 == 0) args.merged[row] = largest + log(total);
  }
};

// 3 blocks on a multiprocessor: without this bound the compiler aims at more, has fewer registers for each, and spills.
template <class Pass, typename T> __global__ void __launch_bounds__(32 * WARPS, 3) softmax_plain(const Args<T> args) {
  Pass::template run<T>(args);
}
