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
// shapes    as in backward_states.cu; dq dk dg [B, HV, T, K]; or, in place of dq and dk, parts [2, B, HV, T, K] of
//           float32, those of queries and keys after their division; dbeta [B, HV, T] float32
// grid      a block for every (batch, head of values, chunk, 64 channels), channels fastest; a warp for 16 channels
// smem      Shared: the chunk's q, k and gates; 64 columns of S, C, do, w and e at a time
// barriers  two for every 64 columns: they have arrived | they have been read, and tokens have arrived; then: terms of
//           S and C, and pairs | rows and columns beside the border of 16 tokens | their products | those beside
//           borders of 8 | theirs are in shared memory
// numerics  products with S and C, and of values, are of T, those of values with e in two numbers, summed in float32.
//           Pairs within 8 tokens are added up in float32, all others by channel_backward.cuh. A decay is a product of
//           those of the tokens between, so that any gate is exact
// source    Kimi Team, 2025 (2510.26692), eq. 1
// limits    T of bfloat16, float16
#include "cards.cuh"
#include "delta/channel_backward.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k, do_, w, e;  // e: its numbers, then what rounding leaves of them
  Rows<const G> g, beta;          // a token's beta is a row of one number
  const T* kept;                  // S and C: backward_storage.cuh
  float* parts;                   // or null
  Rows<T> dq, dk;                 // unless there are parts
  Rows<G> dg;
  Rows<float> dbeta;
  Shape shape;  // H: heads of values
  i64 group;    // heads of values that share a head of queries and keys
  double scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 bytes;  // 16, 8, 4 or 2: all rows of q, k, g, do and gradients start on multiples of it, and are multiples long
};

enum Term { OF_QUERY, OF_ERASURE, OF_KEY };  // q and k as rows, k as a column: of dq, dk and dk
enum Value { DO, W, E, REST };               // rows of q and of k; columns of k, in two numbers
enum Token { OF_Q, OF_K };

template <typename T, typename G> struct alignas(16) Shared : Borders<1> {
  union {
    T tokens[2][C * KEPT];
    // Beside a border: rows q and k of tokens after it, columns k of those before it, each in two numbers.
    bf16 decayed[2][2][C * KEPT];
  };
  G g[C * KEPT];
  union {
    struct {
      T states[2][KEPT * KEPT];  // S, C
      T values[4][C * KEPT];
    };
    float terms[3][C * KEPT];  // from beyond the token's block; at term_place
  };
  float2 pairs[BLOCKS][BLOCK][BLOCK];  // a, m within blocks of 8 tokens
  float unit[2][C];                    // 1 / lengths of queries and keys, or 1
  float beta[C];
};

// Starts copying 64 columns from `column` on of S, C and values; a warp has half of a state, and values of a kind.
template <typename T, typename G>
__device__ __forceinline__ void fetch_columns(Shared<T, G>& s, const Args<T, G>& args, i64 b, i64 h, const Span& span,
                                              i64 chunk, int channel, int column) {
  constexpr int PIECE = 8, SIZE = KEPT * KEPT / 2;
  const int warp = threadIdx.x >> 5, way = warp / 2, V = int(args.shape.V);
  const int first = warp % 2 * SIZE + own_lane() * PIECE;
  const T* from = args.kept + kept_at(args.shape, way, b, h, chunk, channel) + i64(column) * KEPT + first;
#pragma unroll
  for (int at = 0; at < SIZE; at += 32 * PIECE) cp_async<16>(s.states[way] + first + at, from + at, true);
  const Rows<const T>& x = warp == DO ? args.do_ : warp == W ? args.w : args.e;
  fetch_rows(s.values[warp], x.row(b, h, span.start) + (warp == REST ? padded(V) : 0) + column, x.t,
             int(span.stop - span.start), (warp == DO ? V : padded(V)) - column, warp == DO ? int(args.bytes) : 16);
  cp_async_commit();
}

// Adds products of 64 columns of values to pairs, by 8 columns: of 16 rows, of the first or second half, those with
// j <= i. kind: DO or W.
template <typename T, typename G>
__device__ __forceinline__ void multiply_values(float (&d)[BLOCKS][4], const Shared<T, G>& s, int kind, int half) {
  const RowsReader<KEPT, T> right;
  const LeftReader<KEPT, T> left;
#pragma unroll
  for (int c = 0; c < KEPT; c += 32) {
    u32 a[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) ldmatrix_x4(a[n], left.at(s.values[kind] + 16 * half * KEPT, 0, c + 16 * n));
#pragma unroll
    for (int number = 0; number < 2; ++number)
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) {
        if (j / 2 > half) break;
        u32 b[4];
        ldmatrix_x4(b, right.at(s.values[E + number], 8 * j, c));
#pragma unroll
        for (int n = 0; n < 2; ++n) multiply_halves(d[j], a[n], {b[2 * n], b[2 * n + 1]}, T{});
      }
  }
}

// Adds the products of 64 columns of values with S and C to `terms` of the warp's 16 channels, and <S, C> to the
// diagonals of `dots`.
template <typename T, typename G>
__device__ __forceinline__ void multiply_states(Columns (&terms)[3], float (&dots)[4], const Shared<T, G>& s) {
  const int lane = own_lane(), matrix = lane >> 3;
  const LeftReader<KEPT, T> reader(lane);
  const int at = ((matrix & 1) * (KEPT / 8) + 2 * (threadIdx.x >> 5) + (matrix >> 1)) * 64 + (lane & 7) * 8;
#pragma unroll 1
  for (int c = 0; c < KEPT / 16; ++c) {
    u32 b[2][4];
#pragma unroll
    for (int way = 0; way < 2; ++way) ldmatrix_x4_trans(b[way], s.states[way] + at + 2 * c * (KEPT / 8) * 64);
#pragma unroll
    for (int n = 0; n < 3; ++n)
#pragma unroll
      for (int m = 0; m < C / 16; ++m) {
        u32 a[4];
        ldmatrix_x4(a, reader.at(s.values[n], 16 * m, 16 * c));
        multiply_halves(terms[n][m][0], a, {b[n / 2][0], b[n / 2][1]}, T{});
        multiply_halves(terms[n][m][1], a, {b[n / 2][2], b[n / 2][3]}, T{});
      }
    multiply_diagonals<T>(dots, b[0], b[1]);
  }
}

// 1 / lengths of the chunk's rows x, or 1.
template <typename T>
__device__ __forceinline__ void measure(float* unit, const Rows<const T>& x, i64 b, i64 head, i64 first, int rows,
                                        int channels, bool normalized) {
  const int lane = own_lane();
#pragma unroll 4
  for (int i = threadIdx.x >> 5; i < C; i += THREADS / 32) {
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

// The tokens of a thread's block, of two channels, and their decays.
template <typename T> struct BlockTokens {
  u32 tokens[2][BLOCK];
  float2 decays[BLOCK];
  const float* unit[2];  // in shared memory: registers are few

  template <typename G> __device__ __forceinline__ BlockTokens(const Shared<T, G>& s, int block, int c) {
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) {
      const int i = block * BLOCK + n;
      const float2 gates = pair_at(place<KEPT>(s.g, i, c));
      decays[n] = {decay_of(gates.x), decay_of(gates.y)};
#pragma unroll
      for (int kind = 0; kind < 2; ++kind)
        tokens[kind][n] = *reinterpret_cast<const u32*>(place<KEPT>(s.tokens[kind], i, c));
    }
    for (int kind = 0; kind < 2; ++kind) unit[kind] = s.unit[kind] + block * BLOCK;
  }
  __device__ __forceinline__ float2 of(int kind, int n) const {
    return times({unit[kind][n], unit[kind][n]}, unpack(tokens[kind][n], T{}));
  }

  // Calls f(term, n, x) for rows q and k, or columns k, which decay over the block and by `decay` beyond it.
  template <class F> __device__ __forceinline__ void each_row(float2 decay, F f) const {
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) {
      decay = times(decay, decays[n]);
      f(OF_QUERY, n, times(decay, of(OF_Q, n)));
      f(OF_ERASURE, n, times(decay, of(OF_K, n)));
    }
  }
  template <class F> __device__ __forceinline__ void each_column(float2 decay, F f) const {
#pragma unroll
    for (int n = BLOCK - 1; n >= 0; --n) {
      f(OF_KEY, n, times(decay, of(OF_K, n)));
      decay = times(decay, decays[n]);
    }
  }
};

template <typename T, typename G>
__global__ void __launch_bounds__(THREADS, blocks_with_room<Shared<T, G>>(SINCE_SM100 ? 2 : 3))
    delta_kda_backward_chunks(const Args<T, G> args) {
  auto& s = *reinterpret_cast<Shared<T, G>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const u32 tiles = u32(padded(shape.K)) / KEPT, pair = blockIdx.x / tiles / u32(shape.NC);
  const u32 chunk = blockIdx.x / tiles % u32(shape.NC), h = pair % u32(shape.H), b = pair / u32(shape.H);
  const u32 head = h / u32(args.group);
  const int first = blockIdx.x % tiles * KEPT, channels = int(shape.K) - first, bytes = int(args.bytes);
  const Span span = chunk_tokens(shape, chunk);
  const int rows = int(span.stop - span.start);
  const float scale = float(args.scale);

  const int warp = threadIdx.x >> 5;
  fetch_columns(s, args, b, h, span, chunk, first, 0);
  if (warp < 2) {
    const auto& x = warp ? args.k : args.q;
    fetch_rows(s.tokens[warp], x.row(b, head, span.start) + first, x.t, rows, channels, bytes);
  }
  copy_chunk<KEPT, THREADS>(s.g, args.g.row(b, h, span.start) + first, args.g.t, rows, channels, bytes);
  cp_async_commit();
  if (int(threadIdx.x) < C)
    s.beta[threadIdx.x] = int(threadIdx.x) < rows ? to_float(*args.beta.row(b, h, span.start + threadIdx.x)) : 0.f;
  measure(s.unit[OF_Q], args.q, b, head, span.start, rows, int(shape.K), args.normalized);
  measure(s.unit[OF_K], args.k, b, head, span.start, rows, int(shape.K), args.normalized);

  const int kind = warp % 2, half = warp / 2;  // of the warp's pairs: a or m; the first or the last 16 rows
  Columns terms[3] = {};                       // S do, S w; C e
  float pairs[BLOCKS][4] = {}, dots[4] = {};
  cp_async_wait<1>();
#pragma unroll 1
  for (int column = 0;; column += KEPT) {
    __syncthreads();  // the columns have arrived; lengths and beta are in shared memory
    multiply_values(pairs, s, kind, half);
    multiply_states(terms, dots, s);
    cp_async_wait<0>();
    __syncthreads();  // the columns have been read: others, or terms, may overwrite them; tokens have arrived
    if (column + KEPT >= shape.V) break;
    fetch_columns(s, args, b, h, span, chunk, first, column + KEPT);
    cp_async_wait<0>();
  }
#pragma unroll
  for (int n = 0; n < 3; ++n)
    each_pair([&](int i, int c, int m, int across, int down) {
      const float* x = terms[n][m][across] + 2 * down;
      const float by = n == OF_QUERY ? scale : n == OF_ERASURE ? -s.beta[i] : s.beta[i];
      put_pair(s.terms[n] + term_place(i, c), {by * x[0], by * x[1]});
    });
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
    if (j / 2 > half) break;
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const int row = 2 * half + down, g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3, i = 8 * row + g;
      const float2 beta = pair_at(s.beta + 8 * j + 2 * t);
      const float by = kind ? -s.beta[i] : scale, x = pairs[j][2 * down], y = pairs[j][2 * down + 1];
      put_pair_of_blocks(s, kind, row, j, by * beta.x * x, by * beta.y * y, [&](int i_of, int j_of) {
        const bool own = i_of == j_of, next = i_of == j_of + 1;  // whether x, y is a token's product with itself
        reinterpret_cast<float*>(&s.pairs[row][i_of][j_of])[kind] = by * beta.x * x;
        reinterpret_cast<float*>(&s.pairs[row][i_of][j_of + 1])[kind] = by * beta.y * y;
        if (kind && first == 0 && (own || next) && i < rows) *args.dbeta.row(b, h, span.start + i) = own ? x : y;
      });
    }
  }
  put_diagonals(s.dots, dots);
  const int block = warp, c = 2 * own_lane(), start = block * BLOCK;
  const BlockTokens<T> tokens(s, block, c);
  const float2 one = {1.f, 1.f};
  {
    float2 all = tokens.decays[0];
#pragma unroll
    for (int n = 1; n < BLOCK; ++n) all = times(all, tokens.decays[n]);
    put_pair(&s.over_blocks[block][c], all);
  }
  __syncthreads();  // terms, pairs and decays over blocks are in shared memory; tokens have been read

  const auto at = [&](float (&x)[KEPT]) -> float2& { return *reinterpret_cast<float2*>(x + c); };
  const auto over = [&](int n) { return at(s.over_blocks[n]); };
  const auto term = [&](int kind, int n) -> float2& {
    return *reinterpret_cast<float2*>(s.terms[kind] + term_place(start + n, c));
  };
  const auto put = [&](int kind, int n, float2 x) {
    put_two<bf16, C * KEPT>(place<KEPT>(s.decayed[kind % 2][0], start + n, c), x.x, x.y);
  };
  const auto sum_rows = [&](float (&to)[KEPT], float2 decay) {
    float2 sum = {};
    tokens.each_row(decay, [&](int kind, int n, float2 x) { sum = plus_times(sum, x, term(kind, n)); });
    at(to) = sum;
  };
  const auto sum_columns = [&](float (&to)[KEPT], float2 decay) {
    float2 sum = {};
    tokens.each_column(decay, [&](int kind, int n, float2 x) { sum = plus_times(sum, x, term(kind, n)); });
    at(to) = sum;
  };
  float2 before = one, behind = one;  // decays from the chunk's start to the block, and from it to the chunk's end
#pragma unroll
  for (int n = 0; n < BLOCKS; ++n)
    if (n < block) before = times(before, over(n));
    else if (n > block) behind = times(over(n), behind);
  sum_rows(s.reads[block], before), sum_columns(s.written[block], behind);
  if (block < 2) tokens.each_column(block == 0 ? over(1) : one, put);
  else tokens.each_row(block == 3 ? over(2) : one, put);
  __syncthreads();  // rows and columns beside the border of 16 tokens are in shared memory, and terms have been read
  cross_borders<HALF, false>(s), cross_borders<HALF, true>(s);
  __syncthreads();  // their products are among the terms, and they have been read: others may overwrite them
  if (block == 3) sum_rows(s.across[0], over(2));
  if (block == 0) sum_columns(s.across[1], over(1));
  if (block % 2) tokens.each_row(one, put);
  else tokens.each_column(one, put);
  __syncthreads();  // rows and columns beside borders of 8 tokens are in shared memory, and terms have been read
  cross_borders<BLOCK, false>(s), cross_borders<BLOCK, true>(s);
  __syncthreads();  // their products are among the terms

  float2 dg[BLOCK] = {};  // of pairs within the block, then of all rows from a token on
  {
    float2 keys[BLOCK], reads[BLOCK], all = one;  // keys decayed to the row
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
      const float2 q_i = tokens.of(OF_Q, i), k_i = tokens.of(OF_K, i), decay = tokens.decays[i];
      keys[i] = k_i;
      float2 of_q = {}, of_k = {};  // sums over the keys so far
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        const float2 pair = s.pairs[block][i][j];
        if (j < i) keys[j] = times(decay, keys[j]);
        of_q = plus_times(of_q, pair.x, keys[j]);
        if (j == i) continue;
        of_k = plus_times(of_k, pair.y, keys[j]);
        dg[j + 1] = plus_times(plus_times(dg[j + 1], q_i, of_q), k_i, of_k);
      }
      all = times(all, decay);
      const float2 state_q = times(all, term(OF_QUERY, i)), state_k = times(all, term(OF_ERASURE, i));
      reads[i] = plus_times(times(q_i, state_q), k_i, state_k);
      term(OF_QUERY, i) = plus(of_q, state_q), term(OF_ERASURE, i) = plus(of_k, state_k);
    }
    float2 sum = {};
#pragma unroll
    for (int i = BLOCK - 1; i >= 0; --i) sum = plus(sum, reads[i]), dg[i] = plus(dg[i], sum);
  }
  float2 written[BLOCK];
  {
    float2 q[BLOCK], k[BLOCK], all = one;  // rows decayed to the key
#pragma unroll
    for (int j = BLOCK - 1; j >= 0; --j) {
      const float2 k_j = tokens.of(OF_K, j), decay = tokens.decays[j];
      q[j] = tokens.of(OF_Q, j);
      float2 of_key = {};
#pragma unroll
      for (int i = BLOCK - 1; i >= j; --i) {
        const float2 pair = s.pairs[block][i][j];
        of_key = plus_times(of_key, pair.x, q[i]), q[i] = times(decay, q[i]);
        if (i > j) of_key = plus_times(of_key, pair.y, k[i]), k[i] = times(decay, k[i]);
      }
      k[j] = times(decay, k_j);
      const float2 state = times(all, term(OF_KEY, j));
      all = times(all, decay);
      written[j] = times(k_j, state);
      term(OF_KEY, j) = plus(plus(of_key, state), term(OF_ERASURE, j));  // dk
    }
  }
  // What passes the block, and then what its keys add to that.
  float2 passing = times(times(times(over(0), over(1)), times(over(2), over(3))), at(s.dots));
#pragma unroll
  for (int n = 0; n < BLOCKS; ++n)
    if (n > block) passing = plus(passing, at(block == 2 ? s.across[0] : s.reads[n]));
    else if (n < block) passing = plus(passing, at(block == 1 ? s.across[1] : s.written[n]));
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) {
    dg[n] = plus(dg[n], passing);
    passing = plus(passing, written[n]);
  }
  const i64 token = span.start + start;
  store_block(args.dg.row(b, h, token) + first + c, args.dg.t, rows - start, channels - c, bytes,
              [&](int n) { return dg[n]; });
#pragma unroll
  for (int of = 0; of < 2; ++of) {
    const auto value = [&](int n) { return term(of == OF_Q ? OF_QUERY : OF_KEY, n); };
    if (args.parts) {
      float* to = args.parts + (((of * shape.B + b) * shape.H + h) * shape.T + token) * shape.K + first + c;
      store_block(to, shape.K, rows - start, channels - c, shape.K % 2 ? 4 : 8, value);
    } else {
      const Rows<T>& to = of == OF_Q ? args.dq : args.dk;
      store_block(to.row(b, head, token) + first + c, to.t, rows - start, channels - c, bytes, value);
    }
  }
}
