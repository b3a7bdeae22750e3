// what      Kimi Delta Attention backward, a block for each chunk of 32 tokens and 64 channels: dq, dk, dbeta and dg,
//           from what backward_states.cu has computed from chunk to chunk.
// math      S is the state [K, V] before the chunk, C the gradient of the state after it; e_t: what v_t differs from
//           what k_t reads (the residual); w_t: the gradient of beta_t e_t, what is written. P_i: the decay
//           from the chunk's start to token i, E_i from i to the chunk's end, D_ij from j to i. Products of pairs:
//           a_ij = scale beta_j do_i . e_j, j <= i; m_ij = -beta_i beta_j w_i . e_j, j < i
//           dq_i = scale P_i S do_i + sum_j D_ij a_ij k_j;   dbeta_i = w_i . e_i
//           dk_i = E_i beta_i C e_i - beta_i P_i S w_i + sum_j D_ij m_ij k_j + sum_j D_ji (a_ji q_j + m_ji k_j)
//           dg_t = the sum of all terms that gate t multiplies: of rows from t on that read S, of keys before t that C
//           has, <S, C> times the chunk's decay, and of pairs with j < t <= i. No differences of sums
// shapes    as in backward_states.cu; parts [2, B, HV, T, K] float32, of queries and keys after their division; dg
//           [B, HV, T, K], dbeta [B, HV, T] float32
// grid      a block for every (batch, head of values, chunk, 64 channels), channels fastest; a warp for 16 channels
// smem      Shared: the chunk's q, k and gates; 64 columns of S, C, do, w and e at a time
// barriers  two for every 64 columns: they have arrived | they have been read; then: terms of S and C, and lengths, are
//           in shared memory | terms of keys that C has, and dk's sums over rows, are
// numerics  products with S and C, and of values, are of T, those of values with e in two numbers, summed in float32;
//           all sums over pairs in float32: a thread has a channel and holds all decayed keys, or decayed rows, of the
//           chunk in registers
// source    Kimi Team, 2025 (2510.26692), eq. 1
// limits    T of bfloat16, float16
#include "delta/channel_backward.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k, do_, e, w;  // e: its numbers, then what rounding leaves of them
  Rows<const G> g, beta;          // a token's beta is a row of one number
  const T* kept;                  // S and C: backward_storage.cuh
  float* parts;
  Rows<G> dg;
  Rows<float> dbeta;
  Shape shape;  // H: heads of values
  i64 group;    // heads of values that share a head of queries and keys
  double scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 bytes;       // 16, 8, 4 or 2: all rows of q, k, g and do start on multiples of it, and are multiples long
};

enum Token { OF_Q, OF_K };
enum Value { DO, W, E, REST };  // REST: what rounding leaves of e

template <typename T, typename G> struct alignas(16) Shared {
  T tokens[2][C * KEPT];
  G g[C * KEPT];
  union {
    struct {
      T states[2][KEPT * KEPT];  // S, C
      T values[4][C * KEPT];
    };
    // S do, S w, C e; then dg's terms of rows, dk's terms of rows, dg's terms of all keys before; dk's terms of keys.
    float terms[4][C][KEPT];
  };
  float2 pairs[C][C + 1];   // a, m
  float dots[2][KEPT];      // <S, C>, of the first and of the second half of every 64 columns
  float unit[2][C];         // 1 / lengths of queries and keys, or 1
  float beta[C], worth[C];  // worth: w . e
};

// Starts copying 64 columns from `column` on of S, C, do, w and e.
template <typename T, typename G>
__device__ __forceinline__ void fetch_columns(Shared<T, G>& s, const Args<T, G>& args, i64 b, i64 h, const Span& span,
                                              i64 chunk, int channel, int column) {
  constexpr int PIECE = 8;
  const int rows = int(span.stop - span.start), wide = padded(args.shape.V) - column;
#pragma unroll
  for (int way = 0; way < 2; ++way) {
    const T* from = args.kept + kept_at(args.shape, way, b, h, chunk, channel) + i64(column) * KEPT;
    for (int at = threadIdx.x * PIECE; at < KEPT * KEPT; at += THREADS * PIECE)
      cp_async<16>(s.states[way] + at, from + at, true);
  }
  const i64 at = span.start;
  copy_chunk<KEPT, THREADS>(s.values[DO], args.do_.row(b, h, at) + column, args.do_.t, rows, int(args.shape.V) - column,
                            int(args.bytes));
  copy_chunk<KEPT, THREADS>(s.values[W], args.w.row(b, h, at) + column, args.w.t, rows, wide, 16);
  const T* e = args.e.row(b, h, at) + column;
  copy_chunk<KEPT, THREADS>(s.values[E], e, args.e.t, rows, wide, 16);
  copy_chunk<KEPT, THREADS>(s.values[REST], e + padded(args.shape.V), args.e.t, rows, wide, 16);
  cp_async_commit();
}

// Adds the products of the present 64 columns of values to the pairs of tokens that have any; a warp a task.
template <typename T, typename G> __device__ __forceinline__ void multiply_values(Shared<T, G>& s, float scale) {
  const int lane = own_lane(), g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int task = threadIdx.x >> 5; task < 16; task += WARPS) {
    const int of_w = task & 1, row = (task >> 1 & 1) * 16, column = (task >> 2) * 8;
    if (column > row + 15) continue;
    float d[2][4] = {};
    multiply_rows<KEPT>(d, s.values[DO + of_w], s.values[E], row, column);
    multiply_rows<KEPT>(d, s.values[DO + of_w], s.values[REST], row, column);
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int i = row + g + x / 2 * 8, j = column + 2 * t + x % 2;
      const float product = d[0][x] + d[1][x], by = of_w ? -s.beta[i] : scale;
      if (of_w && i == j) s.worth[i] += product;
      else if (j <= i) reinterpret_cast<float*>(&s.pairs[i][j])[of_w] += by * s.beta[j] * product;
    }
  }
}

// 1 / lengths of the chunk's rows x, or 1; those of rows that are not there are 0.
template <typename T>
__device__ __forceinline__ void measure(float* unit, const Rows<const T>& x, i64 b, i64 head, i64 first, int rows,
                                        int channels, bool normalized) {
  const int lane = own_lane();
  for (int i = threadIdx.x >> 5; i < C; i += WARPS) {
    float squares = 0.f;
    if (normalized && i < rows)
      for (int c = lane; c < channels; c += 32) {
        const float one = to_float(x.row(b, head, first + i)[c]);
        squares = fmaf(one, one, squares);
      }
    squares = warp_sum(squares);
    if (lane == 0) unit[i] = normalized ? inverse_root(squares + float(LEAST_SQUARE)) : 1.f;
  }
}

// Query, key and decay of token i, in channel c.
template <typename T, typename G>
__device__ __forceinline__ void numbers_of(const Shared<T, G>& s, int i, int c, float& q, float& k, float& decay) {
  q = s.unit[OF_Q][i] * to_float(*place<KEPT>(s.tokens[OF_Q], i, c));
  k = s.unit[OF_K][i] * to_float(*place<KEPT>(s.tokens[OF_K], i, c));
  decay = decay_of(to_float(*place<KEPT>(s.g, i, c)));
}

// dq, dk's and dg's terms of rows, of one channel: goes forwards over rows and holds the keys before them, decayed to
// the row.
template <typename T, typename G>
__device__ __forceinline__ void gather_rows(Shared<T, G>& s, float (&passed)[C], int c, float scale, float* dq, i64 K,
                                            int rows) {
  float k[C] = {}, all = 1.f;
#pragma unroll 1
  for (int i = 0; i < C; ++i) {
    float q_i, k_i, decay, of_q = 0.f, of_k = 0.f;
    numbers_of(s, i, c, q_i, k_i, decay);
    each_group<false>(i, [&](auto group, auto near) {
#pragma unroll
      for (int j = group.value * GROUP; j < (group.value + 1) * GROUP; ++j) {
        const float2 pair = s.pairs[i][j];
        k[j] = near.value && j == i ? k_i : decay * k[j];
        of_q = fmaf(pair.x, k[j], of_q), of_k = fmaf(pair.y, k[j], of_k);
        if (!near.value || j < i) passed[j] = fmaf(q_i, of_q, fmaf(k_i, of_k, passed[j]));
      }
    });
    all *= decay;
    const float state_q = scale * all * s.terms[0][i][c], state_k = -s.beta[i] * all * s.terms[1][i][c];
    s.terms[0][i][c] = fmaf(q_i, state_q, k_i * state_k), s.terms[1][i][c] = of_k + state_k;
    if (i < rows && dq) dq[i * K] = of_q + state_q;
  }
}

// dk's terms of keys and dg's of those that C has, of one channel: goes backwards over keys and holds the rows behind
// them, decayed to the key.
template <typename T, typename G> __device__ __forceinline__ void gather_columns(Shared<T, G>& s, int c) {
  float q[C] = {}, k[C] = {}, all = 1.f;
#pragma unroll 1
  for (int j = C - 1; j >= 0; --j) {
    float q_j, k_j, decay, of_key = 0.f;
    numbers_of(s, j, c, q_j, k_j, decay);
    each_group<true>(j, [&](auto group, auto near) {
#pragma unroll
      for (int i = group.value * GROUP; i < (group.value + 1) * GROUP; ++i) {
        const float2 pair = s.pairs[i][j];
        q[i] = near.value && i == j ? q_j : q[i], k[i] = near.value && i == j ? k_j : k[i];
        of_key = fmaf(pair.x, q[i], fmaf(pair.y, k[i], of_key));
        q[i] *= decay, k[i] *= decay;
      }
    });
    const float state = all * s.beta[j] * s.terms[2][j][c];
    all *= decay;
    s.terms[2][j][c] = k_j * state, s.terms[3][j][c] = of_key + state;
  }
  float before = 0.f;
#pragma unroll 1
  for (int j = 0; j < C; ++j) {
    const float own = s.terms[2][j][c];
    s.terms[2][j][c] = before, before += own;
  }
}

template <typename T, typename G>
__global__ void __launch_bounds__(THREADS, 3) delta_kda_backward_chunks(const Args<T, G> args) {
  auto& s = *reinterpret_cast<Shared<T, G>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const u32 tiles = u32(padded(shape.K)) / KEPT, pair = blockIdx.x / tiles / u32(shape.NC);
  const u32 chunk = blockIdx.x / tiles % u32(shape.NC), h = pair % u32(shape.H), b = pair / u32(shape.H);
  const u32 head = h / u32(args.group);
  const int first = blockIdx.x % tiles * KEPT, channels = int(shape.K) - first, bytes = int(args.bytes);
  const Span span = chunk_tokens(shape, chunk);
  const int rows = int(span.stop - span.start);
  const float scale = float(args.scale);

  const auto fetch = [&](auto* tile, const auto& x, u32 of_head) {
    copy_chunk<KEPT, THREADS>(tile, x.row(b, of_head, span.start) + first, x.t, rows, channels, bytes);
  };
  fetch(s.tokens[OF_Q], args.q, head), fetch(s.tokens[OF_K], args.k, head), fetch(s.g, args.g, h);
  fetch_columns(s, args, b, h, span, chunk, first, 0);
  for (int at = threadIdx.x; at < C * (C + 1); at += THREADS) s.pairs[0][at] = {0.f, 0.f};
  if (threadIdx.x < C) {
    const int i = threadIdx.x;
    s.worth[i] = 0.f, s.beta[i] = i < rows ? to_float(*args.beta.row(b, h, span.start + i)) : 0.f;
  }
  measure(s.unit[OF_Q], args.q, b, head, span.start, rows, int(shape.K), args.normalized);
  measure(s.unit[OF_K], args.k, b, head, span.start, rows, int(shape.K), args.normalized);

  Columns of_rows[2] = {}, of_columns = {};  // S do, S w; C e
  float dot = 0.f;
  const int c = threadIdx.x % KEPT, half = threadIdx.x / KEPT;
#pragma unroll 1
  for (int column = 0;; column += KEPT) {
    cp_async_wait<0>();
    __syncthreads();  // the columns have arrived
    multiply_values(s, scale);
#pragma unroll
    for (int n = 0; n < 2; ++n) multiply_states(of_rows[n], s.values[DO + n], s.states[0]);
    multiply_states(of_columns, s.values[E], s.states[1]);
    dot += multiply_halves_of_columns(s.states[0], s.states[1], c, half);
    __syncthreads();  // the columns have been read: the next ones, or terms, may overwrite them
    if (column + KEPT >= shape.V) break;
    fetch_columns(s, args, b, h, span, chunk, first, column + KEPT);
  }
  s.dots[half][c] = dot;
  each_pair([&](int i, int at, int m, int across, int down) {
    const float* key = of_columns[m][across] + 2 * down;
#pragma unroll
    for (int n = 0; n < 2; ++n)
      put_pair(&s.terms[n][i][at], {of_rows[n][m][across][2 * down], of_rows[n][m][across][2 * down + 1]});
    put_pair(&s.terms[2][i][at], {key[0], key[1]});
  });
  __syncthreads();  // terms and pairs are in shared memory

  const auto part = [&](int kind) {
    return args.parts + (((kind * shape.B + b) * shape.H + h) * shape.T + span.start) * shape.K + first + c;
  };
  float passed[C] = {};  // dg's terms of pairs, of the gate behind each token
  if (half) gather_columns(s, c);
  else gather_rows(s, passed, c, scale, c < channels ? part(OF_Q) : nullptr, shape.K, rows);
  __syncthreads();  // terms of keys, and dk's terms of rows, are in shared memory
  if (first == 0 && int(threadIdx.x) < rows) *args.dbeta.row(b, h, span.start + threadIdx.x) = s.worth[threadIdx.x];
  if (c >= channels) return;
  if (half) {
    for (int i = 0; i < rows; ++i) part(OF_K)[i * shape.K] = s.terms[1][i][c] + s.terms[3][i][c];
    return;
  }
  float whole = 1.f;
#pragma unroll 1
  for (int i = 0; i < C; ++i) whole *= decay_of(to_float(*place<KEPT>(s.g, i, c)));
  float dg = whole * (s.dots[0][c] + s.dots[1][c]);
  G* to = args.dg.row(b, h, span.start) + first + c;
#pragma unroll
  for (int t = C - 1; t >= 0; --t) {
    dg += s.terms[0][t][c];
    if (t < rows) to[t * args.dg.t] = from_float<G>(dg + s.terms[2][t][c] + (t ? passed[t - 1] : 0.f));
  }
}
