// what      GLA and RWKV-6 backward for sequences of at most 16 tokens: all gradients by one launch. GLA also with a
//           gate of columns.
// math      a_t = exp g_t; E_ts, the decay between tokens s and t: the product of a_r over s < r <= t (RWKV-6: s < r <
//           t); E_t0 over all r <= t (RWKV-6: r < t); F_s over all r > s. S_0 is the initial state, dS the gradient of
//           the final state. A and dA [16, 16] are scores and their gradients:
//           A_ts = scale sum over channels of q_t E_ts k_s;  dA_ts = scale do_t . v_s;  s <= t (RWKV-6: A_tt =
//           scale sum of q_t u k_t)
//           dq_t = sum over s of dA_ts E_ts k_s + scale E_t0 S_0 do_t;
//           dk_s = sum over t of dA_ts E_ts q_t + F_s dS v_s;
//           dv_s = sum over t of A_ts do_t + dS^T F_s k_s;  du = sum over t of dA_tt q_t k_t;
//           dh0 = sum over t of scale E_t0 q_t do_t^T + F_0 dS, F_0 over all r;
//           dg_r = the sum of the channel's terms whose decay has a_r: of dA_ts q_t E_ts k_s, scale E_t0 q_t .
//           S_0 do_t, F_s k_s . dS v_s and F_0 S_0 . dS. RWKV-6: for s = t u takes the place of E_tt, also in dq, dk
//           with gv every term also has its column's decay, made of gv as E_ts and F_s are of g: ev_ts between tokens
//           s and t, such as in dA_ts = scale sum over columns of do_t ev_ts v_s. dgv_r = the sum of the column's
//           terms whose decay has its gate r
// shapes    q k g dq dk dg [B, H, T, K], v do gv dv dgv [B, H, T, V], u [H, K]; initial, dht and dh0 [N, H, K, V],
//           partial_du [N, H, K], all float32
// grid      a block for every sequence and head, sequence slowest. 128 threads: a thread a column, then a thread a
//           channel, then a thread a column again
// smem      Shared: scores and their gradients; two stages of 128 channels and 16 columns of a state, and of the rows
//           that multiply it
// barriers  two after each sum of scores over warps: the warps' sums are written | scores are complete. One before
//           a state is multiplied: the columns of an earlier one have been read. One for each 16 of its columns: these
//           are in shared memory, and the previous ones have been read. Two for each 128
//           channels of dv and dh0: the previous ones have been read | these are in shared memory. With gv one more,
//           which asks whether gates grow; if so, for channels and for columns two a token: the warps' largest runs
//           are written | have been read; and one: the shifts are complete
// numerics  float32 throughout. Decays are products, never divided; sums have no subtractions. With gv, if a channel
//           grows by more than 60 nats over a run of tokens, the excess is taken from the gates of all channels and
//           added to those of all columns, or the other way round: neither decay is infinite where their product is not
// source    Yang et al., 2024, section 4.4; Peng et al., 2024, eq. 18-19
// limits    sequences of at most TOKENS tokens, 8 or 16, with gv 16; any K and V, with gv at most 2,560 (MOST_GATED):
//           value_gate.py compares them before it takes this kernel
// instances T and G: float32, or T of 16 bits with G of T or float32; both orders, and GLA with gv (GATED): with gv a
//           query reads the gate of its own token, which RWKV-6's does not
// tests     test_short_sequences; with gv test_value_gate
#include "gated/short_sequences.cuh"
#include "ptx.cuh"
#include "read_order.cuh"

// From the includes:
//   Sequence: its batch row b, head h, first token `start` and `tokens`; load: its numbers of a channel or column, with
//     zeros after the last token; store
//   ROW<TOKENS>: the distance of rows of tokens in shared memory, TOKENS + 4
//   each_four(row, tokens, f): calls f(t, row's numbers t ... t + 3) for t = 0, 4 and so on below `tokens`
//   add_four(x, t, a, four): x[t ... t + 3] += a four
//   add_scores(x, sums, t, first): adds x, summed over lanes, to row t of the warp's sums, or stores it if `first`
//   finish_scores(s, scores, tokens, scale): scores = scale times the warps' sums, with two barriers
//   decay_of(g): e^g

constexpr float MOST_GROWTH = 60.f;  // nats; where channels and columns both grow by more, states are beyond float32
constexpr int COLUMNS = 16;          // of a state that are multiplied at a time
constexpr int MOST_GATED =
    THREADS * ROW<16>;  // channels, or columns, for whose runs limit_growth has room in `queries`
static_assert(THREADS % COLUMNS == 0 && THREADS % 16 == 0,
              "a thread sets each shift, and threads share columns evenly");

template <typename T, typename G> struct Args {
  StridedRows<const T> q, k, v, do_;
  StridedRows<const G> g;
  StridedRows<T> dq, dk, dv;
  StridedRows<G> dg;
  const float *u, *initial, *dht;  // u: null for GLA; initial and dht null: zero
  float *dh0, *partial_du;         // null: not wanted
  Shape shape;
  double scale;
  StridedRows<const G> gv;  // this and dgv: null unless GATED
  StridedRows<G> dgv;
};

template <int TOKENS> struct alignas(16) Shared {
  float queries[THREADS * ROW<TOKENS>];  // [128 channels, tokens]: scale E_t0 q_t; before, scale S_0 do_t
  float keys[THREADS * ROW<TOKENS>];     // the same: F_s k_s; before, dS v_s
  float decays[THREADS];                 // of channels, over all tokens
  float rows[2][COLUMNS * ROW<TOKENS>];  // two stages of [16 columns, tokens] of do or v
  float state[2][THREADS][COLUMNS + 1];  // and of [128 channels, 16 columns]
  float sums[WARPS][TOKENS * TOKENS];    // each warp's sums of scores, over its columns or channels
  float dA[TOKENS * TOKENS], A[TOKENS * TOKENS];
  float shifts[TOKENS];  // only if GATED: nats that a token's gates of channels lose, and those of columns gain
};

// The largest x of the warp, in every lane.
__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

// Changes the tokens' shifts so that by these gates, of `width` channels or columns, no run of tokens grows by more
// than MOST_GROWTH. sign * shift is added to each gate of a token (-1: channels, 1: columns). What these gates lose the
// gates of the other side gain. The kernel calls this for channels, then for columns; channels may then grow by more.
template <int TOKENS, typename G>
__device__ __forceinline__ void limit_growth(Shared<TOKENS>& s, const Sequence& sequence,
                                             const StridedRows<const G>& gates, int width, float sign) {
  float* const runs = s.queries;  // of each channel: the largest sum of the gates of a run that ends with this token
  for (int c = threadIdx.x; c < width; c += THREADS) runs[c] = 0.f;
#pragma unroll 1
  for (int t = 0; t < sequence.tokens; ++t) {
    const G* row = gates.row(sequence.b, sequence.h, sequence.start + t);
    float largest = 0.f;
    for (int c = threadIdx.x; c < width; c += THREADS) {
      runs[c] += to_float(row[c]) + sign * s.shifts[t];
      largest = fmaxf(largest, runs[c]);
    }
    largest = largest_of_warp(largest);
    if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32][0] = largest;
    __syncthreads();  // the warps' largest runs are in shared memory, and the token's shift has been read
    static_assert(WARPS == 4);
    largest = fmaxf(fmaxf(s.sums[0][0], s.sums[1][0]), fmaxf(s.sums[2][0], s.sums[3][0]));
    const float excess = fmaxf(largest - MOST_GROWTH, 0.f);
    for (int c = threadIdx.x; c < width; c += THREADS) runs[c] = fmaxf(runs[c] - excess, 0.f);
    __syncthreads();  // the warps' largest runs have been read
    if (threadIdx.x == 0) s.shifts[t] -= sign * excess;
  }
  __syncthreads();  // the shifts are complete
}

// x[t] = the sum over columns of S row_at(t, column), for channel first_channel + threadIdx.x. S: a number of `state`
// [K, V], times that of `other` unless this is null. The next columns are copied while the present ones are multiplied.
template <int TOKENS, class Row>
__device__ __forceinline__ void multiply_state(Shared<TOKENS>& s, float (&x)[TOKENS], i64 first_channel,
                                               const Shape& shape, int tokens, const float* state, const float* other,
                                               Row row_at) {
#pragma unroll
  for (float& sum : x) sum = 0.f;
  const int column = threadIdx.x % COLUMNS, row = threadIdx.x / COLUMNS;
  const auto fetch = [&](i64 first, int stage) {
    const bool exists = first + column < shape.V;
#pragma unroll 4
    for (int c = row; c < THREADS; c += THREADS / COLUMNS) {
      const bool valid = exists && first_channel + c < shape.K;
      const i64 at = valid ? (first_channel + c) * shape.V + first + column : 0;
      float& to = s.state[stage][c][column];
      if (other) to = valid ? state[at] * other[at] : 0.f;
      else cp_async<4>(&to, state + at, valid);
    }
    for (int t = row; t < TOKENS; t += THREADS / COLUMNS)
      s.rows[stage][column * ROW<TOKENS> + t] = exists && t < tokens ? row_at(t, first + column) : 0.f;
    cp_async_commit();
  };
  __syncthreads();  // the columns of an earlier state have been read
  if (shape.V > 0) fetch(0, 0);
#pragma unroll 1
  for (i64 first = 0, stage = 0; first < shape.V; first += COLUMNS, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // these columns are in shared memory, and the previous ones have been read
    if (first + COLUMNS < shape.V) fetch(first + COLUMNS, int(stage) ^ 1);
#pragma unroll 4
    for (int c = 0; c < COLUMNS; ++c) {
      const float S = s.state[stage][threadIdx.x][c];
      each_four<TOKENS>(s.rows[stage] + c * ROW<TOKENS>, tokens, [&](int t, float4 row) { add_four(x, t, S, row); });
    }
  }
}

// A thread's sums over tokens, for its channel or its column. For a column do takes the place of q, v of k, gv of g and
// A of dA: dk is then dv, and dg is dgv. The scores A and dA have the factor `scale` in them.
template <int TOKENS> struct Sums {
  float dk[TOKENS], dg[TOKENS], du;
};

// Computes `Sums`. q, k, a: the channel's numbers and decays. dA: scores' gradients. u: the weight of a token's own
// key, used if BEFORE. from_initial(t): scale S_0 do_t, used if has_initial. from_final(t): dS v_t, and from_states:
// S_0 . dS, both used if has_final. Calls row(t, dq, x) for every token t; x[s]: the channel's term of score [t, s].
template <bool BEFORE, int TOKENS, class Initial, class Final, class Row>
__device__ __forceinline__ Sums<TOKENS> sum_over_tokens(const float (&q)[TOKENS], const float (&k)[TOKENS],
                                                        const float (&a)[TOKENS], float u, const float* dA, int tokens,
                                                        bool has_initial, Initial from_initial, bool has_final,
                                                        Final from_final, float from_states, Row row) {
  Sums<TOKENS> sums = {};
#pragma unroll
  for (int t = 0; t < TOKENS; ++t)
    if (t < tokens) {
      float x[TOKENS] = {}, dq = 0.f, decay = 1.f;  // decay: E_ti
      if (BEFORE) {
        const float weight = dA[t * TOKENS + t];
        x[t] = q[t] * u * k[t];
        dq = weight * u * k[t];
        sums.dk[t] = fmaf(weight * u, q[t], sums.dk[t]);
        sums.du = fmaf(weight * q[t], k[t], sums.du);
      }
#pragma unroll
      for (int i = t - BEFORE; i >= 0; --i) {
        const float weight = dA[t * TOKENS + i] * decay;
        x[i] = decay * q[t] * k[i];
        dq = fmaf(weight, k[i], dq);
        sums.dk[i] = fmaf(weight, q[t], sums.dk[i]);
        decay *= a[i];
      }
      const float initial = has_initial ? decay * from_initial(t) : 0.f;  // E_t0 scale S_0 do_t
      float gate = q[t] * initial;  // the terms whose decay has gate i: of the initial state and of tokens before i
#pragma unroll
      for (int i = 0; i <= t - BEFORE; ++i) {
        sums.dg[i] += gate;
        gate = fmaf(dA[t * TOKENS + i], x[i], gate);
      }
      row(t, dq + initial, x);
    }
  if (has_final) {
    float terms[TOKENS], decay = 1.f;  // decay: F_i
#pragma unroll
    for (int i = TOKENS - 1; i >= 0; --i)
      if (i < tokens) {
        const float final = decay * from_final(i);  // F_i dS v_i
        sums.dk[i] += final;
        terms[i] = k[i] * final;
        decay *= a[i];
      }
    float gate = decay * from_states;
#pragma unroll
    for (int i = 0; i < TOKENS; ++i)
      if (i < tokens) {
        sums.dg[i] += gate;
        gate += terms[i];
      }
  }
  return sums;
}

// Blocks of a multiprocessor, as their registers allow: of three a thread has 168, of two 255.
template <bool GATED, int TOKENS> constexpr int RESIDENT = GATED ? 2 : TOKENS > 8 ? 3 : 5;

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6), read_order.cuh. T: the type of data; G: that of gates and their
// gradients. GATED: whether columns have gates gv, too; TOKENS: the most of a sequence. Threads without a channel or
// column go through all loops, with zeros: sums by shuffles and barriers need them.
template <class ReadOrder, typename T, typename G, bool GATED, int TOKENS>
__global__ void __launch_bounds__(THREADS, RESIDENT<GATED, TOKENS>) gated_short_backward(const Args<T, G> args) {
  constexpr bool BEFORE = ReadOrder::reads_before_write;
  static_assert(!(GATED && BEFORE), "a query reads the column gate of its own token, which RWKV-6's does not");
  auto& s = *reinterpret_cast<Shared<TOKENS>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const i64 h = blockIdx.x % shape.H, n = blockIdx.x / shape.H, K = shape.K, V = shape.V;
  const Span span = tokens_of(shape, n % shape.row_sequences);
  const Sequence sequence = {n / shape.row_sequences, h, span.start, int(span.stop - span.start)};
  const int tokens = sequence.tokens;
  const i64 state = (n * shape.H + h) * K * V;  // the index of this head's state
  const float scale = float(args.scale);
  float* const own_sums = s.sums[threadIdx.x / 32];
  if constexpr (GATED) {
    bool grows = false;
    const auto look = [&](const StridedRows<const G>& gates, i64 width) {
      for (i64 column = threadIdx.x; column < width; column += THREADS)
        for (int t = 0; t < tokens; ++t)
          grows = grows || to_float(gates.row(sequence.b, h, span.start + t)[column]) > 0.f;
    };
    look(args.g, K), look(args.gv, V);
    if (threadIdx.x < TOKENS) s.shifts[threadIdx.x] = 0.f;
    if (__syncthreads_or(grows)) {  // the shifts are zeros
      limit_growth(s, sequence, args.g, int(K), -1.f);
      limit_growth(s, sequence, args.gv, int(V), 1.f);
    }
  }
  const auto shift = [&](int t) { return GATED ? s.shifts[t] : 0.f; };
  // The tokens' decays of a channel; 1 where there is no such token or channel.
  const auto load_decays = [&](float (&a)[TOKENS], i64 channel) {
    sequence.load(a, args.g, channel, K);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) a[t] = t < tokens && channel < K ? decay_of(a[t] - shift(t)) : 1.f;
  };
  // Those of a column; 1 unless GATED.
  const auto load_column_decays = [&](float (&a)[TOKENS], i64 column) {
    if constexpr (GATED) sequence.load(a, args.gv, column, V);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) a[t] = GATED && t < tokens && column < V ? decay_of(a[t] + shift(t)) : 1.f;
  };
  // The decay of a column over tokens first ... stop - 1; 1 unless GATED.
  const auto column_decay = [&](int first, int stop, i64 column) {
    float decay = 1.f;
    if constexpr (GATED)
      for (int t = first; t < stop; ++t)
        decay *= decay_of(to_float(args.gv.row(sequence.b, h, span.start + t)[column]) + shift(t));
    return decay;
  };

#pragma unroll 1
  for (i64 first = 0; first < V; first += THREADS) {  // dA: a thread has a column
    float v[TOKENS], do_[TOKENS], a[TOKENS];
    sequence.load(v, args.v, first + threadIdx.x, V);
    sequence.load(do_, args.do_, first + threadIdx.x, V);
    load_column_decays(a, first + threadIdx.x);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
      if (t < tokens) {
        float x[TOKENS] = {}, decayed = do_[t];
#pragma unroll
        for (int i = t; i >= 0; --i) {
          x[i] = decayed * v[i];
          decayed *= a[i];
        }
        add_scores(x, own_sums, t, first == 0);
      }
  }
  finish_scores<TOKENS>(s, s.dA, tokens, scale);

  float* const own_queries = s.queries + threadIdx.x * ROW<TOKENS>;
  float* const own_keys = s.keys + threadIdx.x * ROW<TOKENS>;
#pragma unroll 1
  for (i64 first = 0; first < K; first += THREADS) {  // dq, dk, dg, du and the sums of A: a thread has a channel
    const i64 channel = first + threadIdx.x;
    float q[TOKENS], k[TOKENS], a[TOKENS], products[TOKENS], from_states = 0.f;
    if (args.initial) {
      multiply_state(s, products, first, shape, tokens, args.initial + state, nullptr, [&](int t, i64 column) {
        const float do_ = to_float(args.do_.row(sequence.b, h, span.start + t)[column]);
        return do_ * column_decay(0, t + 1, column);
      });
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) own_queries[t] = scale * products[t];
    }
    if (args.dht) {
      multiply_state(s, products, first, shape, tokens, args.dht + state, nullptr, [&](int t, i64 column) {
        const float v = to_float(args.v.row(sequence.b, h, span.start + t)[column]);
        return v * column_decay(t + 1, tokens, column);
      });
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) own_keys[t] = products[t];
    }
    if (args.initial && args.dht) {
      multiply_state(s, products, first, shape, 1, args.initial + state, args.dht + state,
                     [&](int, i64 column) { return column_decay(0, tokens, column); });
      from_states = products[0];
    }
    sequence.load(q, args.q, channel, K);
    sequence.load(k, args.k, channel, K);
    load_decays(a, channel);
    const float u = BEFORE && channel < K ? args.u[h * K + channel] : 0.f;
    const Sums<TOKENS> sums = sum_over_tokens<BEFORE>(
        q, k, a, u, s.dA, tokens, args.initial, [&](int t) { return own_queries[t]; }, args.dht,
        [&](int t) { return own_keys[t]; }, from_states,
        [&](int t, float dq, float (&x)[TOKENS]) {
          if (channel < K) args.dq.row(sequence.b, h, span.start + t)[channel] = from_float<T>(dq);
          add_scores(x, own_sums, t, first == 0);
        });
    sequence.store(sums.dk, args.dk, channel, K);
    sequence.store(sums.dg, args.dg, channel, K);
    if (args.partial_du && channel < K) args.partial_du[(n * shape.H + h) * K + channel] = sums.du;
  }
  finish_scores<TOKENS>(s, s.A, tokens, scale);

  const bool reads_initial = GATED && args.initial;
#pragma unroll 1
  for (i64 first = 0; first < V; first += THREADS) {  // dv, dgv and dh0: a thread has a column
    const i64 column = first + threadIdx.x;
    float do_[TOKENS], v[TOKENS], a[TOKENS], from_start[TOKENS], all = 1.f;  // all: this column's decay over all tokens
    sequence.load(do_, args.do_, column, V);
    sequence.load(v, args.v, column, V);
    load_column_decays(a, column);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {  // tokens after the last one are zeros: their decays are 1
      all *= a[t];
      from_start[t] = all * do_[t];
    }
    // Sums over channels: scale E_t0 q_t S_0; F_s k_s dS; and S_0 dS, decayed by all tokens' gates of channels.
    float from_initial[TOKENS] = {}, from_final[TOKENS] = {}, from_states = 0.f;
    if (args.dht || args.dh0 || reads_initial) {
#pragma unroll 1
      for (i64 first_channel = 0; first_channel < K; first_channel += THREADS) {
        const i64 channel = first_channel + threadIdx.x;
        float x[TOKENS], decays[TOKENS], decay = 1.f;
        __syncthreads();  // the previous channels have been read
        load_decays(decays, channel);
        sequence.load(x, args.q, channel, K);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
          const float before = decay;
          decay *= decays[t];
          own_queries[t] = scale * (BEFORE ? before : decay) * x[t];
        }
        s.decays[threadIdx.x] = decay;
        decay = 1.f;
        sequence.load(x, args.k, channel, K);
#pragma unroll
        for (int t = TOKENS - 1; t >= 0; --t) {
          own_keys[t] = decay * x[t];
          decay *= decays[t];
        }
        __syncthreads();  // the channels' queries, keys and decays are in shared memory
        const int channels = K - first_channel < THREADS ? int(K - first_channel) : THREADS;
        if (column < V)
#pragma unroll 2
          for (int c = 0; c < channels; ++c) {
            const i64 at = state + (first_channel + c) * V + column;
            const float dS = args.dht ? args.dht[at] : 0.f, S = reads_initial ? args.initial[at] : 0.f;
            float dS_0 = s.decays[c] * dS;
            from_states = fmaf(S, dS_0, from_states);
            dS_0 *= all;
            each_four<TOKENS>(s.keys + c * ROW<TOKENS>, tokens,
                              [&](int t, float4 keys) { add_four(from_final, t, dS, keys); });
            if (args.dh0 || reads_initial)
              each_four<TOKENS>(s.queries + c * ROW<TOKENS>, tokens, [&](int t, float4 x) {
                if (GATED) add_four(from_initial, t, S, x);
                const float low = fmaf(x.x, from_start[t], x.y * from_start[t + 1]);
                dS_0 += low + fmaf(x.z, from_start[t + 2], x.w * from_start[t + 3]);
              });
            if (args.dh0) args.dh0[at] = dS_0;
          }
      }
    }
    const Sums<TOKENS> sums = sum_over_tokens<BEFORE>(
        do_, v, a, 1.f, s.A, tokens, reads_initial, [&](int t) { return from_initial[t]; }, args.dht,
        [&](int t) { return from_final[t]; }, from_states, [](int, float, float (&)[TOKENS]) {});
    sequence.store(sums.dk, args.dv, column, V);
    if constexpr (GATED) sequence.store(sums.dg, args.dgv, column, V);
  }
}
