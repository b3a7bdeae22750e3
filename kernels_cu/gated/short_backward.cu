// what      GLA and RWKV-6 backward for sequences of at most 16 tokens: all gradients by one launch.
// math      a_t = exp g_t; E_ts, the decay between tokens s and t: the product of a_r over s < r <= t (RWKV-6: s < r <
//           t); E_t0 over all r <= t (RWKV-6: r < t); F_s over all r > s. S_0 is the initial state, dS the gradient of
//           the final state. A and dA [16, 16] are scores and their gradients:
//           A_ts = scale sum over channels of q_t E_ts k_s;  dA_ts = scale do_t . v_s;  s <= t (RWKV-6: A_tt =
//           scale sum of q_t u k_t)
//           dq_t = sum over s of dA_ts E_ts k_s + scale E_t0 S_0 do_t;
//           dk_s = sum over t of dA_ts E_ts q_t + F_s dS v_s;
//           dv_s = sum over t of A_ts do_t + dS^T F_s k_s;  du = sum over t of dA_tt q_t k_t;
//           dh0 = sum over t of scale E_t0 q_t do_t^T + F_0 dS, F_0 over all r;
//           dg_r = sum of all those terms of scores, q_t . S_0 do_t, k_s . dS v_s and S_0 . dS whose decay has a_r
// shapes    q k g dq dk dg [B, H, T, K], v do dv [B, H, T, V], u [H, K]; initial, dht and dh0 [N, H, K, V], partial_du
//           [N, H, K], all float32
// grid      a block for every sequence and head, sequence slowest. 128 threads: a thread a column, then a thread a
//           channel, then a thread a column again
// smem      Shared: scores, and what the block has at a time of a state and of rows that are multiplied by it
// barriers  two after each sum of scores over warps: the warps' sums are written | scores are complete. Two for each 32
//           columns of a state: the previous ones have been read | these are in shared memory. Two for each 128
//           channels of dv and dh0: the previous ones have been read | these are in shared memory
// numerics  float32 throughout. Decays are products, never divided; sums have no subtractions
// source    Yang et al., 2024, section 4.4; Peng et al., 2024, eq. 18-19
// limits    sequences of at most 16 tokens; any K and V
#include "lanes.cuh"
#include "read_order.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int TOKENS = 16, THREADS = 128, WARPS = THREADS / 32;
constexpr int COLUMNS = 32;      // of a state that are in shared memory at a time
constexpr int ROW = TOKENS + 4;  // numbers from one channel's or column's tokens to the next's: 8 lanes that read 16
                                 // bytes each are in different banks

template <typename T, typename G> struct Args {
  StridedRows<const T> q, k, v, do_;
  StridedRows<const G> g;
  StridedRows<T> dq, dk, dv;
  StridedRows<G> dg;
  const float *u, *initial, *dht;  // u: null for GLA; initial and dht null: zero
  float *dh0, *partial_du;         // null: not wanted
  Shape shape;
  double scale;
};

struct alignas(16) Shared {
  float queries[THREADS * ROW];        // [128 channels, 16 tokens]: scale E_t0 q_t; before, scale S_0 do_t
  float keys[THREADS * ROW];           // the same: F_s k_s; before, dS v_s
  float decays[THREADS];               // of channels, over all tokens
  float rows[COLUMNS * ROW];           // [32 columns, 16 tokens] of do or v
  float state[THREADS][COLUMNS + 1];   // [128 channels, 32 columns]
  float sums[WARPS][TOKENS * TOKENS];  // each warp's sums of scores, over its columns or channels
  float dA[TOKENS * TOKENS], A[TOKENS * TOKENS];
};

// The sequence and head of a block, from token `start` of batch row b on. The sequence has `tokens` tokens.
struct Sequence {
  i64 b, h, start;
  int tokens;

  // The tokens' numbers in column `column` of x, which has `width` columns; 0 where there is none.
  template <typename T>
  __device__ __forceinline__ void load(float (&to)[TOKENS], const StridedRows<T>& x, i64 column, i64 width) const {
    const T* from = x.row(b, h, start) + column;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) to[t] = t < tokens && column < width ? to_float(from[t * x.token_stride]) : 0.f;
  }
  template <typename T>
  __device__ __forceinline__ void store(const float (&from)[TOKENS], const StridedRows<T>& x, i64 column,
                                        i64 width) const {
    T* to = x.row(b, h, start) + column;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
      if (t < tokens && column < width) to[t * x.token_stride] = from_float<T>(from[t]);
  }
};

// Calls f(i, four numbers) for i = 0, 4, 8, 12, as far as there are tokens: those of a channel or column in shared
// memory.
template <class F> __device__ __forceinline__ void each_four(const float* numbers, int tokens, F f) {
#pragma unroll
  for (int i = 0; i < TOKENS; i += 4)
    if (i < tokens) f(i, *reinterpret_cast<const float4*>(numbers + i));
}

// Adds the sums over the warp of x[s] to scores [t, s] of its `sums`; replaces them if `first`.
__device__ __forceinline__ void add_scores(float (&x)[TOKENS], float* sums, int t, bool first) {
  const int lane = threadIdx.x & 31;
  exchange_halves<8>(x, 16, lane & 16);
  exchange_halves<4>(x, 8, lane & 8);
  exchange_halves<2>(x, 4, lane & 4);
  exchange_halves<1>(x, 2, lane & 2);
  const float sum = sum_over_lanes<2>(x[0]);
  float& score = sums[t * TOKENS + lane / 2];
  if (lane % 2 == 0) score = first ? sum : score + sum;
}

// scores of the tokens = scale times the sums of all warps, which may write sums again afterwards.
__device__ __forceinline__ void finish_scores(Shared& s, float* scores, int tokens, float scale) {
  __syncthreads();  // all warps have written their sums
  for (int i = threadIdx.x; i < tokens * TOKENS; i += THREADS)
    scores[i] = scale * ((s.sums[0][i] + s.sums[1][i]) + (s.sums[2][i] + s.sums[3][i]));
  __syncthreads();  // the scores are complete, and the warps' sums have been read
}

// x[t] = the sum over columns of state_at(channel, column) row_at(t, column), for channel first_channel + threadIdx.x.
template <class State, class Row>
__device__ __forceinline__ void multiply_state(Shared& s, float (&x)[TOKENS], i64 first_channel, const Shape& shape,
                                               int tokens, State state_at, Row row_at) {
#pragma unroll
  for (float& sum : x) sum = 0.f;
#pragma unroll 1
  for (i64 first = 0; first < shape.V; first += COLUMNS) {
    __syncthreads();  // the previous columns have been read
    const int column = threadIdx.x % COLUMNS, row = threadIdx.x / COLUMNS;
    const bool exists = first + column < shape.V;
#pragma unroll 4
    for (int c = row; c < THREADS; c += THREADS / COLUMNS)
      s.state[c][column] = exists && first_channel + c < shape.K ? state_at(first_channel + c, first + column) : 0.f;
    for (int t = row; t < TOKENS; t += THREADS / COLUMNS)
      s.rows[column * ROW + t] = exists && t < tokens ? row_at(t, first + column) : 0.f;
    __syncthreads();  // these columns are in shared memory
#pragma unroll 4
    for (int c = 0; c < COLUMNS; ++c) {
      const float S = s.state[threadIdx.x][c];
      each_four(s.rows + c * ROW, tokens, [&](int t, float4 r) {
        x[t] = fmaf(S, r.x, x[t]);
        x[t + 1] = fmaf(S, r.y, x[t + 1]);
        x[t + 2] = fmaf(S, r.z, x[t + 2]);
        x[t + 3] = fmaf(S, r.w, x[t + 3]);
      });
    }
  }
}

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6), read_order.cuh. T: the type of data; G: that of g and dg.
// Launch bounds: registers for 384 threads of a multiprocessor, 168 a thread.
template <class ReadOrder, typename T, typename G>
__global__ void __launch_bounds__(THREADS, 3) gated_short_backward(const Args<T, G> args) {
  constexpr int BEFORE = ReadOrder::reads_before_write;
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  const Shape& shape = args.shape;
  const i64 h = blockIdx.x % shape.H, n = blockIdx.x / shape.H, K = shape.K, V = shape.V;
  const Span span = tokens_of(shape, n % shape.count);
  const Sequence sequence = {n / shape.count, h, span.start, int(span.stop - span.start)};
  const int tokens = sequence.tokens;
  const i64 state = (n * shape.H + h) * K * V;  // the index of this head's state
  const float scale = float(args.scale);
  float* const own_sums = s.sums[threadIdx.x / 32];

#pragma unroll 1
  for (i64 first = 0; first < V; first += THREADS) {  // dA: a thread has a column
    float v[TOKENS], do_[TOKENS];
    sequence.load(v, args.v, first + threadIdx.x, V);
    sequence.load(do_, args.do_, first + threadIdx.x, V);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
      if (t < tokens) {
        float x[TOKENS];
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) x[i] = i <= t ? do_[t] * v[i] : 0.f;
        add_scores(x, own_sums, t, first == 0);
      }
  }
  finish_scores(s, s.dA, tokens, scale);

  float* const own_queries = s.queries + threadIdx.x * ROW;
  float* const own_keys = s.keys + threadIdx.x * ROW;
#pragma unroll 1
  for (i64 first = 0; first < K; first += THREADS) {  // dq, dk, dg, du and the sums of A: a thread has a channel
    const i64 channel = first + threadIdx.x;
    float from_states = 0.f;  // the sum over columns of S_0 dS
    const auto load_products = [&](float* to, const float* x, const StridedRows<const T>& rows, float factor) {
      float products[TOKENS];
      multiply_state(
          s, products, first, shape, tokens, [&](i64 c, i64 column) { return x[state + c * V + column]; },
          [&](int t, i64 column) { return to_float(rows.row(sequence.b, h, span.start + t)[column]); });
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) to[t] = factor * products[t];
    };
    if (args.initial) load_products(own_queries, args.initial, args.do_, scale);
    if (args.dht) load_products(own_keys, args.dht, args.v, 1.f);
    if (args.initial && args.dht) {
      float products[TOKENS];
      multiply_state(
          s, products, first, shape, 1,
          [&](i64 c, i64 column) { return args.initial[state + c * V + column] * args.dht[state + c * V + column]; },
          [&](int, i64) { return 1.f; });
      from_states = products[0];
    }

    float q[TOKENS], k[TOKENS], a[TOKENS], dk[TOKENS], dg[TOKENS], du = 0.f;
    sequence.load(q, args.q, channel, K);
    sequence.load(k, args.k, channel, K);
    sequence.load(a, args.g, channel, K);
    const float u = BEFORE && channel < K ? args.u[h * K + channel] : 0.f;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) a[t] = decay_of(a[t]), dk[t] = dg[t] = 0.f;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
      if (t < tokens) {
        float x[TOKENS], dq = 0.f, decay = 1.f;  // x: this channel's terms of scores; decay: E_ti
#pragma unroll
        for (float& term : x) term = 0.f;
        if (BEFORE) {
          const float dA = s.dA[t * TOKENS + t];
          x[t] = q[t] * u * k[t];
          dq = dA * u * k[t];
          dk[t] = fmaf(dA * u, q[t], dk[t]);
          du = fmaf(dA * q[t], k[t], du);
        }
#pragma unroll
        for (int i = t - BEFORE; i >= 0; --i) {
          const float dA = s.dA[t * TOKENS + i] * decay;
          x[i] = decay * q[t] * k[i];
          dq = fmaf(dA, k[i], dq);
          dk[i] = fmaf(dA, q[t], dk[i]);
          decay *= a[i];
        }
        const float from_initial = args.initial ? decay * own_queries[t] : 0.f;  // E_t0 scale S_0 do_t
        dq += from_initial;
        float gate = q[t] * from_initial;  // terms whose decay has gate i: of the initial state and of tokens before i
#pragma unroll
        for (int i = 0; i <= t - BEFORE; ++i) {
          dg[i] += gate;
          gate = fmaf(s.dA[t * TOKENS + i], x[i], gate);
        }
        if (channel < K) args.dq.row(sequence.b, h, span.start + t)[channel] = from_float<T>(dq);
        add_scores(x, own_sums, t, first == 0);
      }
    if (args.dht) {
      float terms[TOKENS], decay = 1.f;  // decay: F_i
#pragma unroll
      for (int i = TOKENS - 1; i >= 0; --i)
        if (i < tokens) {
          const float from_final = decay * own_keys[i];  // F_i dS v_i
          dk[i] += from_final;
          terms[i] = k[i] * from_final;
          decay *= a[i];
        }
      float gate = decay * from_states;
#pragma unroll
      for (int i = 0; i < TOKENS; ++i)
        if (i < tokens) {
          dg[i] += gate;
          gate += terms[i];
        }
    }
    sequence.store(dk, args.dk, channel, K);
    sequence.store(dg, args.dg, channel, K);
    if (args.partial_du && channel < K) args.partial_du[(n * shape.H + h) * K + channel] = du;
  }
  finish_scores(s, s.A, tokens, scale);

#pragma unroll 1
  for (i64 first = 0; first < V; first += THREADS) {  // dv and dh0: a thread has a column
    const i64 column = first + threadIdx.x;
    float do_[TOKENS], dv[TOKENS];
    sequence.load(do_, args.do_, column, V);
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      dv[i] = 0.f;
#pragma unroll
      for (int t = i; t < TOKENS; ++t)
        if (t < tokens) dv[i] = fmaf(s.A[t * TOKENS + i], do_[t], dv[i]);
    }
    if (args.dht || args.dh0) {
#pragma unroll 1
      for (i64 first_channel = 0; first_channel < K; first_channel += THREADS) {
        const i64 channel = first_channel + threadIdx.x;
        float q[TOKENS], k[TOKENS], a[TOKENS];
        sequence.load(q, args.q, channel, K);
        sequence.load(k, args.k, channel, K);
        sequence.load(a, args.g, channel, K);
        float decay = 1.f;
        __syncthreads();  // the previous channels have been read
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {  // rows after the last token are zeros: their decays are 1
          const float before = decay;
          a[t] = decay_of(a[t]);
          decay *= a[t];
          own_queries[t] = scale * (BEFORE ? before : decay) * q[t];
        }
        s.decays[threadIdx.x] = decay;
        decay = 1.f;
#pragma unroll
        for (int t = TOKENS - 1; t >= 0; --t) {
          own_keys[t] = decay * k[t];
          decay *= a[t];
        }
        __syncthreads();  // the channels' queries, keys and decays are in shared memory
        const int channels = K - first_channel < THREADS ? int(K - first_channel) : THREADS;
        if (column < V)
#pragma unroll 4
          for (int c = 0; c < channels; ++c) {
            const i64 at = state + (first_channel + c) * V + column;
            const float dS = args.dht ? args.dht[at] : 0.f;
            float dS_0 = s.decays[c] * dS;
            each_four(s.keys + c * ROW, tokens, [&](int t, float4 x) {
              dv[t] = fmaf(x.x, dS, dv[t]);
              dv[t + 1] = fmaf(x.y, dS, dv[t + 1]);
              dv[t + 2] = fmaf(x.z, dS, dv[t + 2]);
              dv[t + 3] = fmaf(x.w, dS, dv[t + 3]);
            });
            if (args.dh0) {
              each_four(s.queries + c * ROW, tokens, [&](int t, float4 x) {
                dS_0 = fmaf(x.x, do_[t], fmaf(x.y, do_[t + 1], fmaf(x.z, do_[t + 2], fmaf(x.w, do_[t + 3], dS_0))));
              });
              args.dh0[at] = dS_0;
            }
          }
      }
    }
    sequence.store(dv, args.dv, column, V);
  }
}
