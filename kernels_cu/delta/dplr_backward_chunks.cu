// what      RWKV-7's recurrence backward, a block for each chunk of 32 tokens and 64 channels: dq, dk, da, db and dg,
//           from what backward_states.cu has computed from chunk to chunk.
// math      S is the state [K, V] before the chunk, C the gradient of the state after it; u_t = S_{t-1}^T a_t (the
//           residual); du_t: its gradient. P_i: the decay
//           from the chunk's start to token i, E_i from i to the chunk's end, D_ij from j to i, D_i(i-1) that of gate i
//           alone. Products of pairs: qk_ij = scale do_i . v_j and qb_ij = scale do_i . u_j, j <= i; ak_ij = du_i . v_j
//           and ab_ij = du_i . u_j, j < i
//           dq_i = scale P_i S do_i + sum_j D_ij (qk_ij k_j + qb_ij b_j)
//           da_i = P_{i-1} S du_i + sum_j D_(i-1)j (ak_ij k_j + ab_ij b_j)
//           dk_j = E_j C v_j + sum_i (qk_ij D_ij q_i + ak_ij D_(i-1)j a_i);   db_j: u for v, qb and ab for qk and ak
//           dg_t = the sum of all terms that gate t multiplies: of rows from t on that read S, of keys before t that C
//           has, <S, C> times the chunk's decay, and of pairs with t between. No differences of sums
// shapes    as in backward_states.cu; dq dk da db dg [B, H, T, K]
// grid      a block for every (batch, head, chunk, 64 channels), channels fastest; a warp for 16 channels
// smem      Shared: the chunk's q, a, k, b and gates; 64 columns of S, C, do, du, v and u at a time
// barriers  two for every 64 columns: they have arrived | they have been read, and tokens have arrived; then: terms of
//           S and C, and pairs | rows and columns beside the border of 16 tokens | their products | those beside
//           borders of 8 | theirs are in shared memory
// numerics  products with S and C, and of values, are of T, summed in float32. Pairs within 8 tokens are added up in
//           float32. All others meet at a border of 8 or 16 tokens between them: rows are decayed from it, columns up
//           to it, and pairs, rows and columns are the sum of two bfloat16, of which three products are taken. A decay
//           is a product of those of the tokens between, so that any gate is exact
// source    Peng et al., 2025 (2503.14456), eq. 17
// limits    T of bfloat16, float16
#include "cards.cuh"
#include "delta/channel_backward.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, a, k, b, do_, du, v, u;  // in the order of Token and Value: a warp fetches one of each
  Rows<const G> g;
  const T* kept;  // S and C: backward_storage.cuh
  Rows<T> dq, dk, da, db;
  Rows<G> dg;
  Shape shape;
  double scale;
  i64 bytes;  // 16, 8, 4 or 2: all rows of inputs and do start on multiples of it, and are multiples long
};

enum Token { OF_Q, OF_A, OF_K, OF_B };
enum Value { DO, DU, V_, U };  // rows, of q and a; columns, of k and b

template <typename T, typename G> struct alignas(16) Shared : Borders<2> {
  union {
    T tokens[4][C * KEPT];
    // Beside a border: rows q and a of tokens after it, columns k and b of those before it, each in two numbers.
    bf16 decayed[2][2][C * KEPT];
  };
  G g[C * KEPT];
  union {
    struct {
      T states[2][KEPT * KEPT];  // S, C
      T values[4][C * KEPT];
    };
    float terms[4][C * KEPT];  // of dq, da, dk and db, from beyond the token's block; at term_place
  };
  float4 pairs[BLOCKS][BLOCK][BLOCK];  // qk, qb, ak, ab within blocks of 8 tokens
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
  const Rows<const T>& x = (&args.do_)[warp];
  const bool padding = warp % 2;  // u and du have zeros there
  fetch_rows(s.values[warp], x.row(b, h, span.start) + column, x.t, int(span.stop - span.start),
             (padding ? padded(V) : V) - column, padding ? 16 : int(args.bytes));
  cp_async_commit();
}

// Adds the products of 64 columns of rows x and y to pairs of 16 tokens by 8: both of the first half's rows, then four.
template <typename T> __device__ __forceinline__ void multiply_values(float (&d)[6][4], const T* x, const T* y) {
  const RowsReader<KEPT, T> right;
  const LeftReader<KEPT, T> left;
#pragma unroll
  for (int c = 0; c < KEPT; c += 32) {
    u32 a[2][2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) ldmatrix_x4(a[m][n], left.at(x, 16 * m, c + 16 * n));
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
      u32 b[4];
      ldmatrix_x4(b, right.at(y, 8 * j, c));
#pragma unroll
      for (int m = j / 2; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 2; ++n) multiply_halves(d[2 * m + j], a[m][n], {b[2 * n], b[2 * n + 1]}, T{});
    }
  }
}

// Adds the products of 64 columns of values with S and C to `terms` of the warp's 16 channels, and <S, C> to the
// diagonals of `dots`.
template <typename T, typename G>
__device__ __forceinline__ void multiply_states(Columns (&terms)[4], float (&dots)[4], const Shared<T, G>& s) {
  const int lane = own_lane(), matrix = lane >> 3;
  const LeftReader<KEPT, T> reader(lane);
  const int at = ((matrix & 1) * (KEPT / 8) + 2 * (threadIdx.x >> 5) + (matrix >> 1)) * 64 + (lane & 7) * 8;
#pragma unroll 1
  for (int c = 0; c < KEPT / 16; ++c) {
    u32 b[2][4];
#pragma unroll
    for (int way = 0; way < 2; ++way) ldmatrix_x4_trans(b[way], s.states[way] + at + 2 * c * (KEPT / 8) * 64);
#pragma unroll
    for (int n = 0; n < 4; ++n)
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

// Stores a warp's products of pairs, of the kind that has its number.
template <typename T, typename G>
__device__ __forceinline__ void put_pairs(Shared<T, G>& s, const float (&d)[6][4], float by) {
  const int kind = opaque(threadIdx.x >> 5);  // `opaque`: what is made of it takes no registers before
#pragma unroll
  for (int n = 0; n < 6; ++n)
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const int row = (n < 2 ? 0 : 2) + down, column = n < 2 ? n : n - 2;  // blocks of 8 tokens
      const float x = by * d[n][2 * down], y = by * d[n][2 * down + 1];
      put_pair_of_blocks(s, kind, row, column, x, y, [&](int i, int j) {
        reinterpret_cast<float*>(&s.pairs[row][i][j])[kind] = x;
        reinterpret_cast<float*>(&s.pairs[row][i][j + 1])[kind] = y;
      });
    }
}

// The tokens of a thread's block, of two channels, and their decays.
template <typename T> struct BlockTokens {
  u32 tokens[4][BLOCK];
  float2 decays[BLOCK];

  template <typename G> __device__ __forceinline__ BlockTokens(const Shared<T, G>& s, int block, int c) {
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) {
      const int i = block * BLOCK + n;
      const float2 gates = pair_at(place<KEPT>(s.g, i, c));
      decays[n] = {decay_of(gates.x), decay_of(gates.y)};
#pragma unroll
      for (int kind = 0; kind < 4; ++kind)
        tokens[kind][n] = *reinterpret_cast<const u32*>(place<KEPT>(s.tokens[kind], i, c));
    }
  }
  __device__ __forceinline__ float2 of(int kind, int n) const { return unpack(tokens[kind][n], T{}); }

  // Calls f(kind, n, x) for rows q and a, or columns k and b, which decay over the block and by `decay` beyond it.
  template <class F> __device__ __forceinline__ void each_row(float2 decay, F f) const {
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) {
      f(OF_A, n, times(decay, of(OF_A, n)));
      decay = times(decay, decays[n]);
      f(OF_Q, n, times(decay, of(OF_Q, n)));
    }
  }
  template <class F> __device__ __forceinline__ void each_column(float2 decay, F f) const {
#pragma unroll
    for (int n = BLOCK - 1; n >= 0; --n) {
      f(OF_K, n, times(decay, of(OF_K, n)));
      f(OF_B, n, times(decay, of(OF_B, n)));
      decay = times(decay, decays[n]);
    }
  }
};

template <typename T, typename G>
__global__ void __launch_bounds__(THREADS, blocks_with_room<Shared<T, G>>(SINCE_SM100 ? 2 : 3))
    delta_dplr_backward_chunks(const Args<T, G> args) {
  auto& s = *reinterpret_cast<Shared<T, G>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const u32 tiles = u32(padded(shape.K)) / KEPT, pair = blockIdx.x / tiles / u32(shape.NC);
  const u32 chunk = blockIdx.x / tiles % u32(shape.NC), h = pair % u32(shape.H), b = pair / u32(shape.H);
  const int first = blockIdx.x % tiles * KEPT, channels = int(shape.K) - first, bytes = int(args.bytes);
  const Span span = chunk_tokens(shape, chunk);
  const int rows = int(span.stop - span.start);
  const float scale = float(args.scale);

  const int warp = threadIdx.x >> 5;
  fetch_columns(s, args, b, h, span, chunk, first, 0);
  const auto& x = (&args.q)[warp];
  fetch_rows(s.tokens[warp], x.row(b, h, span.start) + first, x.t, rows, channels, bytes);
  copy_chunk<KEPT, THREADS>(s.g, args.g.row(b, h, span.start) + first, args.g.t, rows, channels, bytes);
  cp_async_commit();

  Columns terms[4] = {};  // S do, S du; C v, C u
  float pairs[6][4] = {}, dots[4] = {};
  cp_async_wait<1>();
#pragma unroll 1
  for (int column = 0;; column += KEPT) {
    __syncthreads();  // the columns have arrived
    multiply_values(pairs, s.values[DO + warp / 2], s.values[V_ + warp % 2]);
    multiply_states(terms, dots, s);
    cp_async_wait<0>();
    __syncthreads();  // the columns have been read: others, or terms, may overwrite them; tokens have arrived
    if (column + KEPT >= shape.V) break;
    fetch_columns(s, args, b, h, span, chunk, first, column + KEPT);
    cp_async_wait<0>();
  }
#pragma unroll
  for (int n = 0; n < 4; ++n)
    each_pair([&](int i, int c, int m, int across, int down) {
      const float* x = terms[n][m][across] + 2 * down;
      const float by = n == DO ? scale : 1.f;
      put_pair(s.terms[n] + term_place(i, c), {by * x[0], by * x[1]});
    });
  put_pairs(s, pairs, warp < 2 ? scale : 1.f);
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
  __syncthreads();  // terms, pairs and decays over blocks are in shared memory

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
    float2 k[BLOCK], key_b[BLOCK], reads[BLOCK] = {}, all = one;  // keys decayed to the row
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
      const float2 q_i = tokens.of(OF_Q, i), a_i = tokens.of(OF_A, i), decay = tokens.decays[i];
      k[i] = tokens.of(OF_K, i), key_b[i] = tokens.of(OF_B, i);
      float2 of_q = {}, of_a = {};  // sums over the keys so far
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        const float4 pair = s.pairs[block][i][j];
        if (j < i) {
          of_a = plus_times(plus_times(of_a, pair.w, key_b[j]), pair.z, k[j]);
          if (j < i - 1) dg[j + 1] = plus_times(dg[j + 1], a_i, of_a);
          k[j] = times(decay, k[j]), key_b[j] = times(decay, key_b[j]);
        }
        of_q = plus_times(plus_times(of_q, pair.y, key_b[j]), pair.x, k[j]);
        if (j < i) dg[j + 1] = plus_times(dg[j + 1], q_i, of_q);
      }
      const float2 state_a = times(all, term(OF_A, i));
      all = times(all, decay);
      const float2 state_q = times(all, term(OF_Q, i));
      reads[i] = times(q_i, state_q);
      if (i) reads[i - 1] = plus_times(reads[i - 1], a_i, state_a);  // `a` reads the state before its own gate
      term(OF_Q, i) = plus(of_q, state_q), term(OF_A, i) = plus(of_a, state_a);
    }
    float2 sum = {};
#pragma unroll
    for (int i = BLOCK - 1; i >= 0; --i) sum = plus(sum, reads[i]), dg[i] = plus(dg[i], sum);
  }
  float2 written[BLOCK];
  {
    float2 q[BLOCK], a[BLOCK], all = one;  // rows decayed to the key
#pragma unroll
    for (int j = BLOCK - 1; j >= 0; --j) {
      const float2 k_j = tokens.of(OF_K, j), b_j = tokens.of(OF_B, j), decay = tokens.decays[j];
      q[j] = tokens.of(OF_Q, j);
      float2 of_k = {}, of_b = {};
#pragma unroll
      for (int i = BLOCK - 1; i >= j; --i) {
        const float4 pair = s.pairs[block][i][j];
        of_k = plus_times(of_k, pair.x, q[i]), of_b = plus_times(of_b, pair.y, q[i]);
        q[i] = times(decay, q[i]);
        if (i == j) continue;
        of_k = plus_times(of_k, pair.z, a[i]), of_b = plus_times(of_b, pair.w, a[i]);
        a[i] = times(decay, a[i]);
      }
      a[j] = tokens.of(OF_A, j);
      const float2 state_k = times(all, term(OF_K, j)), state_b = times(all, term(OF_B, j));
      all = times(all, decay);
      written[j] = plus_times(times(k_j, state_k), b_j, state_b);
      term(OF_K, j) = plus(of_k, state_k), term(OF_B, j) = plus(of_b, state_b);
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
  const auto store = [&](const auto& to, auto value) {
    store_block(to.row(b, h, span.start + start) + first + c, to.t, rows - start, channels - c, bytes, value);
  };
  store(args.dg, [&](int n) { return dg[n]; });
  store(args.dq, [&](int n) { return term(OF_Q, n); });
  store(args.da, [&](int n) { return term(OF_A, n); });
  store(args.dk, [&](int n) { return term(OF_K, n); });
  store(args.db, [&](int n) { return term(OF_B, n); });
}
