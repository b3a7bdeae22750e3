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

template <class ReadOrder, int PRODUCTS, class Schedule, typename T, int BK>
__device__ __forceinline__ void make_scores(ScoreStorage<Schedule, T, BK>& s, int task) {
  using Storage = ScoreStorage<Schedule, T, BK>;
  using Middle = MiddleOf<Schedule, T>;
  constexpr int LDA = Storage::LDA;
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  const int kind = CHUNK<T> == 16 && task == 2 ? 2 : task / 2, n = task & 1;
  const bool within = kind < 2, across = kind == 3;
  const int first = 16 * (kind & 1);
  float d[4];
  if constexpr (sizeof(typename Storage::Middle) == sizeof(typename Storage::X)) {  // one place in the program
    const auto* queries = within ? s.middle_q : s.border;
    const auto* keys = within ? s.middle_k : s.border + Storage::BORDER * BK;
    score_tile<T, PRODUCTS, BK>(d, queries, keys, first, first + 8 * n);
  } else if (within) {
    score_tile<typename Middle::Product, Middle::template PRODUCTS<PRODUCTS>, BK>(d, s.middle_q, s.middle_k, first,
                                                                                  first + 8 * n);
  } else {
    score_tile<T, PRODUCTS, BK>(d, s.border, s.border + Storage::BORDER * BK, first, first + 8 * n);
  }
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    if (x != n && !across) continue;  // the other sub-chunk's queries
    const int i = within ? 16 * kind + 8 * n + g : across ? 16 + 8 * x + g : 16 * n + 8 + g;
    const int j = (within ? 16 * kind + 8 * n : across ? 8 * n : 16 * n) + 2 * t;
    float two[2] = {d[2 * x], d[2 * x + 1]};
    if (within) {
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const bool before = ReadOrder::reads_before_write && j + p + 1 == i && i % SPAN;  // as it is
        if (j + p >= i || before) {
          const auto& direct = s.direct[j + p != i];
          two[p] = j + p > i ? 0.f : direct[0][i] + direct[1][i];
        }
      }
    }
    put_two(s.A + i * LDA + j, operand_value<T, PRODUCTS>(two[0]), operand_value<T, PRODUCTS>(two[1]), CHUNK<T> * LDA);
  }
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

// S <- diag(decay) S + (k decayed)^T v.
template <int PRODUCTS, typename T, int BK, int BV>
__device__ __forceinline__ void write_state(State<BK>& S, const typename OperandOf<T>::Type* k, const T* v,
                                            const float* decay) {
  const int t = opaque(threadIdx.x & 3);
  const TransposedReader<BV, T> values(16 * (threadIdx.x >> 5));
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

// o += A v.
template <int PRODUCTS, int BV, class Schedule, typename T, int BK>
__device__ __forceinline__ void read_scores(Output<T>& o, const ScoreStorage<Schedule, T, BK>& s, const T* v) {
  using Storage = ScoreStorage<Schedule, T, BK>;
  const RightReader<BV, T, true> values(16 * (threadIdx.x >> 5));
#pragma unroll
  for (int n = 0; n < CHUNK<T> / 16; ++n) {
    Left<Math<T, PRODUCTS>> a;
    Right<Math<T, PRODUCTS>> b[2];
    values.load(b, v, 16 * n, 0);
#pragma unroll
    for (int m = n; m < CHUNK<T> / 16; ++m)
#pragma unroll
      for (int number = 0; number < Storage::NUMBERS; ++number) {
        load_scores<Storage::LDA>(a, s.A + number * CHUNK<T> * Storage::LDA, 16 * m, 16 * n);
        multiply(o[m][0], a, b[0]);
        multiply(o[m][1], a, b[1]);
      }
  }
}
