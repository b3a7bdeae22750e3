// what      Products of the value gate's forward kernel: what outputs read of the state and of the chunk's values, and
//           what the state takes.
// shapes    o transposed: [16 columns, 8 tokens] for every sub-chunk, a lane's pairs as columns.cuh has them; the state
//           as gated/forward_products.cuh has it
// numerics  sums in float32; the state is rounded where it is read, values where they are decayed. Where gates grow,
//           values of a sub-chunk go one by one (growth.cuh)
#include "decays.cuh"
#include "gated/forward_products.cuh"
#include "gated/forward_storage.cuh"
#include "value_gate/columns.cuh"
#include "growth.cuh"

template <class Schedule, typename T, typename G, int BK, int BV>
struct alignas(16) ValueShared : Shared<Schedule, T, G, BK, BV> {
  G value_gates[CHUNK<T> * BV];  // [chunk, BV]
};

// Scores of queries row...row + 7 with 16 keys from `key` on, as operands deep in keys: all numbers that each is the
// sum of.
template <int LDA>
__device__ __forceinline__ void load_weights(RightBf16 (&b)[2], const bf16* A, int row, int key, int rest) {
  const int lane = own_lane();
  u32 r[4];
  ldmatrix_x4(r, A + (lane >> 4) * rest + (row + (lane & 7)) * LDA + key + (lane >> 3 & 1) * 8);
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i / 2].both[i % 2] = r[i];
}
template <int LDA, bool SPLIT>
__device__ __forceinline__ void load_weights(RightTf32<SPLIT> (&b)[1], const float* A, int row, int key, int) {
  const int lane = own_lane();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 two =
        *reinterpret_cast<const float2*>(A + (row + (lane >> 2)) * LDA + key + 8 * half + 2 * (lane & 3));
    b[0].take(2 * half, two.x);
    b[0].take(2 * half + 1, two.y);
  }
}

// o += S^T (q decayed)^T.
template <int PRODUCTS, typename T, int BK>
__device__ __forceinline__ void add_state_outputs_by_columns(Output<T>& o, const State<BK>& S,
                                                             const typename OperandOf<T>::Type* q) {
  constexpr int N = sizeof(typename OperandOf<T>::Type) == 2 ? 2 : 1;
  const RowsReader<BK, typename OperandOf<T>::Type> queries;
#pragma unroll
  for (int c = 0; c < BK / 16; c += N) {
    Left<Math<T, PRODUCTS>> a[N];
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const float (&x)[4] = S[2 * (c + n) + (p >> 1)];
        a[n].set(p, float2{x[2 * (p & 1)], x[2 * (p & 1) + 1]});
      }
#pragma unroll
    for (int sub = 0; sub < CHUNK<T> / BC; ++sub) {
      Right<Math<T, PRODUCTS>> b[N];
      queries.load(b, q, BC * sub, 16 * c);
#pragma unroll
      for (int n = 0; n < N; ++n) multiply(o[sub / 2][sub % 2], a[n], b[n]);
    }
  }
}

// S <- diag(decay) S diag(decay) + (k decayed)^T (v decayed).
template <int PRODUCTS, int BV, class Schedule, typename T, typename G, int BK, int SUBS>
__device__ __forceinline__ void write_state_by_columns(State<BK>& S, ValueShared<Schedule, T, G, BK, BV>& s, int stage,
                                                       const ColumnsReader<BV, G>& gates,
                                                       const ColumnsReader<BV, T>& values,
                                                       const float (&all)[2][SUBS]) {
  const int t = opaque(threadIdx.x & 3);
  const RightReader<BK, typename OperandOf<T>::Type> keys;
  const float whole[2] = {product_of(all[0], 0, SUBS), product_of(all[1], 0, SUBS)};
#pragma unroll
  for (int n = 0; n < SUBS / 2; ++n) {
    float2 x[4], by[4];
    Left<Math<T, PRODUCTS>> a;
    gates.load(by, s.value_gates, 16 * n);
    values.load(x, s.v[stage], 16 * n);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float far = product_of(all[p & 1], 2 * n + (p >> 1) + 1, SUBS);
      a.set(p, far * (Decays<AfterWrite>(decays_of(by[p])).end * x[p]));
    }
#pragma unroll
    for (int c = 0; c < BK / 16; ++c) {
      Right<Math<T, PRODUCTS>> b[2];
      keys.load(b, state_k(s, stage), 16 * n, 16 * c);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float (&x)[4] = S[2 * c + half];
        if (n == 0) {
          const float2 by = *reinterpret_cast<const float2*>(s.decay + 16 * c + 8 * half + 2 * t);
          x[0] *= whole[0] * by.x, x[1] *= whole[0] * by.y, x[2] *= whole[1] * by.x, x[3] *= whole[1] * by.y;
        }
        multiply(x, a, b[half]);
      }
    }
  }
}

// Where gates grow: what outputs of 16 tokens have of their own sub-chunks, each value by the decays between. As a
// value, so that callers have no array in memory.
struct Within {
  float x[2][4];
};
template <int BV, class Schedule, typename T, typename G, int BK>
__device__ __noinline__ Within sum_one_by_one(ValueShared<Schedule, T, G, BK, BV>& s, int stage, int first,
                                              int column) {
  using Storage = ScoreStorage<Schedule, T, BK>;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  Within within;
#pragma unroll 1
  for (int at = 0; at < 8; ++at) {
    const int sub = at / 4, x = at % 4, i = first + BC * sub + 2 * t + (x & 1), col = column + g + 8 * (x >> 1);
    float sum = 0.f, decay = 1.f;
#pragma unroll 1
    for (int j = i; j >= first + BC * sub; --j) {
      float weight = 0.f;
#pragma unroll
      for (int n = 0; n < Storage::NUMBERS; ++n) weight += to_float(s.A[(n * CHUNK<T> + i) * Storage::LDA + j]);
      sum = fmaf(weight, decay * to_float(*place<BV>(s.v[stage], j, col)), sum);
      decay *= decay_of(to_float(*place<BV>(s.value_gates, j, col)));
    }
    within.x[sub][x] = sum;
  }
  return within;
}

// From what outputs read at the chunk's start, still to be decayed, to o: at every border on the way to a token, what
// comes from before it decays and values decayed to it are added. Where gates grow tokens do not meet in the middle.
template <int PRODUCTS, int BV, class Schedule, typename T, typename G, int BK, int SUBS>
__device__ __forceinline__ void read_scores_by_columns(Output<T>& o, ValueShared<Schedule, T, G, BK, BV>& s, int stage,
                                                       const ColumnsReader<BV, G>& gates,
                                                       const ColumnsReader<BV, T>& values, const float (&all)[2][SUBS],
                                                       bool grows) {
  using Storage = ScoreStorage<Schedule, T, BK>;
  constexpr int NUMBERS = Storage::NUMBERS, LDA = Storage::LDA, REST = CHUNK<T> * LDA;
  Right<Math<T, PRODUCTS>> weights[NUMBERS];
#pragma unroll
  for (int m = 0; m < SUBS / 2; ++m) {
    float2 x[4], decays[4];
    values.load(x, s.v[stage], 16 * m);
    gates.load(decays, s.value_gates, 16 * m);
#pragma unroll
    for (int p = 0; p < 4; ++p) decays[p] = decays_of(decays[p]);
    {
      Left<Math<T, PRODUCTS>> border;
#pragma unroll
      for (int p = 0; p < 4; ++p) border.set(p, Decays<AfterWrite>(decays[p]).end * x[p]);
      // the second sub-chunk meets the first
      scale_columns(o[m][1], all[0][2 * m], all[1][2 * m]);
      load_weights<LDA>(weights, s.A, 16 * m + BC, 16 * m, REST);
#pragma unroll
      for (int n = 0; n < NUMBERS; ++n) multiply_half(o[m][1], border, weights[n], 0);
    }
    if (SUBS == 4 && m == 0) {  // the second half meets the first
      Left<Math<T, PRODUCTS>> border;
#pragma unroll
      for (int p = 0; p < 4; ++p)
        border.set(p, (p < 2 ? all[p & 1][1] : 1.f) * (Decays<AfterWrite>(decays[p]).end * x[p]));
#pragma unroll
      for (int sub = 0; sub < 2; ++sub) {
        scale_columns(o[SUBS / 2 - 1][sub], all[0][0] * all[0][1], all[1][0] * all[1][1]);
        load_weights<LDA>(weights, s.A, 16 + BC * sub, 0, REST);
#pragma unroll
        for (int n = 0; n < NUMBERS; ++n) multiply(o[SUBS / 2 - 1][sub], border, weights[n]);
      }
    }
    float within[2][4] = {};
    if (grows) {
      const Within sums = sum_one_by_one(s, stage, 16 * m, threadIdx.x >> 5 << 4);
#pragma unroll
      for (int n = 0; n < 8; ++n) within[n / 4][n % 4] = sums.x[n / 4][n % 4];
    } else {
      Left<Math<T, PRODUCTS>> middle;
#pragma unroll
      for (int p = 0; p < 4; ++p) middle.set(p, Middle<AfterWrite, true>(decays[p]).keys * x[p]);
#pragma unroll
      for (int sub = 0; sub < 2; ++sub) {
        load_weights<LDA>(weights, s.A, 16 * m + BC * sub, 16 * m, REST);
#pragma unroll
        for (int n = 0; n < NUMBERS; ++n) multiply_half(within[sub], middle, weights[n], sub);
      }
    }
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      float (&to)[4] = o[m][p >> 1];
      const int row = 2 * (p & 1);
      const float2 start = Decays<AfterWrite>(decays[p]).start,
                   by = grows ? float2{1.f, 1.f} : Middle<AfterWrite, true>(decays[p]).queries;
      to[row] = start.x * to[row] + by.x * within[p >> 1][row];
      to[row + 1] = start.y * to[row + 1] + by.y * within[p >> 1][row + 1];
    }
  }
}
