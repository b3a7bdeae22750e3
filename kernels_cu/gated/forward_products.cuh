// what      Products of the forward kernel of every card: scores, what they and the state read, what the state takes.
// shapes    a warp has 16 columns of V and BK channels of the state, transposed: S[n] is [16 columns, 8 channels]
// numerics  sums in float32; S is rounded where it is read
#include "read_order.cuh"
#include "gated/forward_storage.cuh"
#include "growth.cuh"

// d[16 queries, 8 keys] of rows `query` and `key` on.
template <typename T, int PRODUCTS, int BK, typename X>
__device__ __forceinline__ void score_tile(float (&d)[4], const X* q, const X* k, int query, int key) {
  constexpr int N = sizeof(X) == 2 ? 2 : 1;
  const RowsReader<BK, X> keys;
  const LeftReader<BK, X> queries;
  float sums[2][4] = {};  // two at a time, as they wait for one another
#pragma unroll
  for (int c = 0; c < BK; c += 16 * N) {
    Right<Math<T, PRODUCTS>> b[N];
    keys.load(b, k, key, c);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      Left<Math<T, PRODUCTS>> a;
      queries.load(a, q, query, c + 16 * n);
      multiply(sums[(c / 16 + n) % 2], a, b[n]);
    }
  }
#pragma unroll
  for (int x = 0; x < 4; ++x) d[x] = sums[0][x] + sums[1][x];
}

__device__ __forceinline__ void put_two(bf16* to, float x, float y, int rest) {
  const u32 two = pack<bf16>(x, y);
  *reinterpret_cast<u32*>(to) = two;
  *reinterpret_cast<u32*>(to + rest) = pack<bf16>(x - to_float(bf16{u16(two)}), y - to_float(bf16{u16(two >> 16)}));
}
__device__ __forceinline__ void put_two(float* to, float x, float y, int) { *reinterpret_cast<float2*>(to) = {x, y}; }

__device__ __forceinline__ void put_score(bf16* to, float x, int rest) {
  const bf16 first = from_float<bf16>(x);
  *to = first;
  to[rest] = from_float<bf16>(x - to_float(first));
}
__device__ __forceinline__ void put_score(float* to, float x, int) { *to = x; }

// Tasks of scores, 16 queries with 8 keys each, two of a kind: in the sub-chunks of the first 16 tokens, and of the
// second; between such sub-chunks; between the first and the second 16 tokens. A chunk of 16 has the first three. So
// the first tasks are a sub-chunk each.
template <typename T> constexpr int TASKS = CHUNK<T> == 32 ? 8 : 3;

// Which queries and keys a task is about: of a lane, a query of either half and a pair of keys.
template <typename T> struct ScoreTask {
  int kind, n, first;
  bool within, across;

  // Callers that know where a task is say so, which spares branches.
  __device__ __forceinline__ ScoreTask(int task, bool within)
      : kind(CHUNK<T> == 16 && task == 2 ? 2 : task / 2),
        n(task & 1),
        first(16 * (kind & 1)),
        within(within),
        across(kind == 3) {}
  __device__ __forceinline__ bool has(int half) const { return half == n || across; }  // or the other sub-chunk's
  __device__ __forceinline__ int row(int half) const {
    const int g = (threadIdx.x & 31) >> 2;
    return within ? 16 * kind + 8 * n + g : across ? 16 + 8 * half + g : 16 * n + 8 + g;
  }
  __device__ __forceinline__ int column() const {
    return (within ? 16 * kind + 8 * n : across ? 8 * n : 16 * n) + 2 * (threadIdx.x & 3);
  }
};

// A lane's pairs of scores of a task, of either half of its queries.
template <class ReadOrder, int PRODUCTS, class Schedule, typename T, int BK>
__device__ __forceinline__ void score_task(float (&d)[4], const ScoreStorage<Schedule, T, BK>& s,
                                           const ScoreTask<T>& task) {
  using Storage = ScoreStorage<Schedule, T, BK>;
  using Middle = MiddleOf<Schedule, T>;
  const int first = task.first, key = first + 8 * task.n;
  if constexpr (sizeof(typename Storage::Middle) == sizeof(typename Storage::X)) {  // one place in the program
    const auto* queries = task.within ? s.middle_q : s.border;
    const auto* keys = task.within ? s.middle_k : s.border + Storage::BORDER * BK;
    score_tile<T, PRODUCTS, BK>(d, queries, keys, first, key);
  } else if (task.within) {
    score_tile<typename Middle::Product, Middle::template PRODUCTS<PRODUCTS>, BK>(d, s.middle_q, s.middle_k, first,
                                                                                  key);
  } else {
    score_tile<T, PRODUCTS, BK>(d, s.border, s.border + Storage::BORDER * BK, first, key);
  }
  if (!task.within) return;
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    if (!task.has(x)) continue;
    const int i = task.row(x), j = task.column();
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const bool before = ReadOrder::reads_before_write && j + p + 1 == i && i % SPAN;  // as it is
      if (j + p >= i || before) {
        const auto& direct = s.direct[j + p != i];
        d[2 * x + p] = j + p > i ? 0.f : direct[0][i] + direct[1][i];
      }
    }
  }
}
template <int PRODUCTS, class Schedule, typename T, int BK>
__device__ __forceinline__ void put_scores(ScoreStorage<Schedule, T, BK>& s, const ScoreTask<T>& task,
                                           const float (&d)[4]) {
  constexpr int LDA = ScoreStorage<Schedule, T, BK>::LDA;
#pragma unroll
  for (int x = 0; x < 2; ++x)
    if (task.has(x))
      put_two(s.A + task.row(x) * LDA + task.column(), operand_value<T, PRODUCTS>(d[2 * x]),
              operand_value<T, PRODUCTS>(d[2 * x + 1]), CHUNK<T> * LDA);
}
template <class ReadOrder, int PRODUCTS, class Schedule, typename T, int BK>
__device__ __forceinline__ void make_scores(ScoreStorage<Schedule, T, BK>& s, const ScoreTask<T>& task) {
  float d[4];
  score_task<ReadOrder, PRODUCTS>(d, s, task);
  put_scores<PRODUCTS>(s, task, d);
}

// The scores of a sub-chunk where gates grow, from its rows in memory, of which there are `rows`.
template <class ReadOrder, int PRODUCTS, class Schedule, typename T, typename G, int BK>
__device__ __noinline__ void score_one_by_one(ScoreStorage<Schedule, T, BK>& s, int subchunk, const T* q, const T* k,
                                              const G* g, i64 q_stride, i64 k_stride, i64 g_stride, int rows,
                                              int channels) {
  constexpr int LDA = ScoreStorage<Schedule, T, BK>::LDA;
  const int lane = threadIdx.x & 31;
  const auto put = [&](int i, int j, float x) {
    put_score(s.A + (BC * subchunk + i) * LDA + BC * subchunk + j, operand_value<T, PRODUCTS>(x), CHUNK<T> * LDA);
  };
  const float score = score_of_pair<ReadOrder>(q, k, g, q_stride, k_stride, g_stride, rows, channels);
  const TokenPair pair = pair_of(lane);
  if (lane < PAIRS) put(pair.query, pair.key, score);
  const int row = BC * subchunk + lane % BC;
  if (lane < BC) put(lane, lane, s.direct[0][0][row] + s.direct[0][1][row]);
}

// All scores of the chunk that begins with `token` of a span's so many, WARPS tasks at once: from operands, or where
// gates grow, within sub-chunks, from rows in memory.
template <class ReadOrder, int PRODUCTS, int WARPS, class Schedule, typename T, int BK, class Args>
__device__ __forceinline__ void score_chunk(ScoreStorage<Schedule, T, BK>& s, const Args& args, u32 b, u32 h,
                                            const Span& span, int token, int tokens, int channels, bool grows) {
  constexpr int SUBCHUNKS = CHUNK<T> / BC, ITERATIONS = (TASKS<T> + WARPS - 1) / WARPS;
  constexpr bool ONE_OF_EACH = TASKS<T> == 2 * SUBCHUNKS && WARPS == SUBCHUNKS;  // within a sub-chunk, and between two
#pragma unroll ONE_OF_EACH ? 2 : 1
  for (int iteration = 0; iteration < ITERATIONS; ++iteration) {
    const int task = (threadIdx.x >> 5) + iteration * WARPS;
    if (TASKS<T> % WARPS && task >= TASKS<T>) break;
    const bool within = ONE_OF_EACH ? iteration == 0 : task < SUBCHUNKS;
    if (grows && within) {
      const i64 at = span.start + token + BC * task;
      score_one_by_one<ReadOrder, PRODUCTS>(s, task, args.q.row(b, h, at) + args.channel,
                                            args.k.row(b, h, at) + args.channel, args.g.row(b, h, at) + args.channel,
                                            args.q.t, args.k.t, args.g.t, tokens - token - BC * task, channels);
    } else {
      make_scores<ReadOrder, PRODUCTS, Schedule, T, BK>(s, ScoreTask<T>(task, within));
    }
  }
}

// Rows row...row + 15 and keys key...key + 15 of the scores, and what is left of them.
template <int LDA> __device__ __forceinline__ void load_scores(LeftBf16& a, const bf16* A, int row, int key) {
  const int lane = own_lane();
  ldmatrix_x4(a.both, A + (row + (lane & 15)) * LDA + key + (lane >> 4) * 8);
}
template <int LDA, bool SPLIT>
__device__ __forceinline__ void load_scores(LeftTf32<SPLIT>& a, const float* A, int row, int key) {
  const int lane = own_lane(), g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const float2 two = *reinterpret_cast<const float2*>(A + (row + g + 8 * lower) * LDA + key + 8 * half + 2 * t);
      a.take(4 * half + 2 * lower, two.x);
      a.take(4 * half + 2 * lower + 1, two.y);
    }
}

template <int BK> using State = float[BK / 8][4];                 // of a warp, [16 columns, BK], transposed
template <typename T> using Output = float[CHUNK<T> / 16][2][4];  // of a warp, [CHUNK, 16 columns]

// f(value, its place in the array of states, whether it is in there), of a state whose channels begin at `row` of all
// states' rows of V numbers. A block has so many channels, and so many columns from v_tile on.
template <int BK, class F>
__device__ __forceinline__ void each_number(State<BK>& S, i64 row, i64 V, int v_tile, int channels, int columns, F f) {
  const int thread = opaque(threadIdx.x), warp = thread >> 5, g = thread >> 2 & 7, t = thread & 3;
  i64 at = (row + 2 * t) * V + v_tile + 16 * warp + g;
#pragma unroll
  for (int c = 0; c < BK / 8; ++c) {
#pragma unroll
    for (int x = 0; x < 4; ++x)
      f(S[c][x], at + (x & 1) * V + 8 * (x >> 1),
        8 * c + 2 * t + (x & 1) < channels && 16 * warp + g + 8 * (x >> 1) < columns);
    at += 8 * opaque(int(V));  // else all addresses are made at once, and there are no registers for that
  }
}

// o += (q decayed) S.
template <int PRODUCTS, typename T, int BK>
__device__ __forceinline__ void read_state(Output<T>& o, const State<BK>& S, const typename OperandOf<T>::Type* q) {
  const LeftReader<BK, typename OperandOf<T>::Type> queries;
#pragma unroll
  for (int c = 0; c < BK / 16; ++c) {
    Right<Math<T, PRODUCTS>> b[2];
    pack_right(b[0], S[2 * c], S[2 * c + 1], 0);
    pack_right(b[1], S[2 * c], S[2 * c + 1], 1);
#pragma unroll
    for (int m = 0; m < CHUNK<T> / 16; ++m) {
      Left<Math<T, PRODUCTS>> a;
      queries.load(a, q, 16 * m, 16 * c);
      multiply(o[m][0], a, b[0]);
      multiply(o[m][1], a, b[1]);
    }
  }
}

// S <- diag(decay) S + (k decayed)^T v, of the columns from `column` on.
template <int PRODUCTS, typename T, int BK, int BV>
__device__ __forceinline__ void write_state(State<BK>& S, const typename OperandOf<T>::Type* k, const T* v,
                                            const float* decay, int column) {
  const int t = opaque(threadIdx.x & 3);
  const TransposedReader<BV, T> values(column);
  const RightReader<BK, typename OperandOf<T>::Type> keys;
#pragma unroll
  for (int n = 0; n < CHUNK<T> / 16; ++n) {
    Left<Math<T, PRODUCTS>> a;
    values.load(a, v, 16 * n);
#pragma unroll
    for (int c = 0; c < BK / 16; ++c) {
      Right<Math<T, PRODUCTS>> b[2];
      keys.load(b, k, 16 * n, 16 * c);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float (&x)[4] = S[2 * c + half];
        if (n == 0) {
          const float2 by = *reinterpret_cast<const float2*>(decay + 16 * c + 8 * half + 2 * t);
          x[0] *= by.x, x[1] *= by.y, x[2] *= by.x, x[3] *= by.y;
        }
        multiply(x, a, b[half]);
      }
    }
  }
}

// o += A v, of the columns from `column` on; A as `Storage` has it.
template <class Storage, int PRODUCTS, int BV, typename T>
__device__ __forceinline__ void read_scores(Output<T>& o, const typename Storage::X* A, const T* v, int column) {
  const RightReader<BV, T, true> values(column);
#pragma unroll
  for (int n = 0; n < CHUNK<T> / 16; ++n) {
    Left<Math<T, PRODUCTS>> a;
    Right<Math<T, PRODUCTS>> b[2];
    values.load(b, v, 16 * n, 0);
#pragma unroll
    for (int m = n; m < CHUNK<T> / 16; ++m)
#pragma unroll
      for (int number = 0; number < Storage::NUMBERS; ++number) {
        load_scores<Storage::LDA>(a, A + number * CHUNK<T> * Storage::LDA, 16 * m, 16 * n);
        multiply(o[m][0], a, b[0]);
        multiply(o[m][1], a, b[1]);
      }
  }
}
