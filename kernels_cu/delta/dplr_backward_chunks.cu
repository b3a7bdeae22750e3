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
// barriers  two for every 64 columns: they have arrived | they have been read; then: terms of S and C are in shared
//           memory | dg's terms of keys that C has are
// numerics  products with S and C, and of values, are of T, summed in float32; all sums over pairs in float32: a thread
//           has a channel and holds all decayed keys, or decayed rows, of the chunk in registers
// source    Peng et al., 2025 (2503.14456), eq. 17
// limits    T of bfloat16, float16
#include "delta/channel_backward.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k, a, b, do_, v, u, du;
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

template <typename T, typename G> struct alignas(16) Shared {
  T tokens[4][C * KEPT];
  G g[C * KEPT];
  union {
    struct {
      T states[2][KEPT * KEPT];  // S, C
      T values[4][C * KEPT];
    };
    float terms[4][C][KEPT];  // S do, S du, C v, C u; then dg's terms of rows of q, of a, and of all columns before
  };
  float4 pairs[C][C + 1];  // qk, qb, ak, ab
  float dots[2][KEPT];     // <S, C>, of the first and of the second half of every 64 columns
};

// Starts copying 64 columns from `column` on of S, C, do, du, v and u.
template <typename T, typename G>
__device__ __forceinline__ void fetch_columns(Shared<T, G>& s, const Args<T, G>& args, i64 b, i64 h, const Span& span,
                                              i64 chunk, int channel, int column) {
  constexpr int PIECE = 8;
  const int rows = int(span.stop - span.start), wide = padded(args.shape.V) - column;
  const int columns = int(args.shape.V) - column, bytes = int(args.bytes);
#pragma unroll
  for (int way = 0; way < 2; ++way) {
    const T* from = args.kept + kept_at(args.shape, way, b, h, chunk, channel) + i64(column) * KEPT;
    for (int at = threadIdx.x * PIECE; at < KEPT * KEPT; at += THREADS * PIECE)
      cp_async<16>(s.states[way] + at, from + at, true);
  }
  const i64 at = span.start;
  copy_chunk<KEPT, THREADS>(s.values[DO], args.do_.row(b, h, at) + column, args.do_.t, rows, columns, bytes);
  copy_chunk<KEPT, THREADS>(s.values[V_], args.v.row(b, h, at) + column, args.v.t, rows, columns, bytes);
  copy_chunk<KEPT, THREADS>(s.values[DU], args.du.row(b, h, at) + column, args.du.t, rows, wide, 16);
  copy_chunk<KEPT, THREADS>(s.values[U], args.u.row(b, h, at) + column, args.u.t, rows, wide, 16);
  cp_async_commit();
}

// Adds the products of the present 64 columns of values to the pairs of tokens that have any; a warp a task.
template <typename T, typename G> __device__ __forceinline__ void multiply_values(Shared<T, G>& s, float scale) {
  const int lane = own_lane(), g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int task = threadIdx.x >> 5; task < 32; task += WARPS) {
    const int of_a = task & 1, with_b = task >> 1 & 1, row = (task >> 2 & 1) * 16, column = (task >> 3) * 8;
    if (column > row + 15) continue;
    float d[2][4] = {};
    multiply_rows<KEPT>(d, s.values[DO + of_a], s.values[V_ + with_b], row, column);
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int i = row + g + x / 2 * 8, j = column + 2 * t + x % 2;
      float* sum = reinterpret_cast<float*>(&s.pairs[i][j]) + 2 * of_a + with_b;
      if (j + of_a <= i) *sum += (of_a ? 1.f : scale) * (d[0][x] + d[1][x]);
    }
  }
}

// dq, da and dg's terms of rows, of one channel: goes forwards over rows and holds the keys before them, decayed to the
// row.
template <typename T, typename G>
__device__ __forceinline__ void gather_rows(Shared<T, G>& s, float (&passed)[C], int c, float scale, T* dq, i64 next_q,
                                            T* da, i64 next_a, int rows) {
  float k[C] = {}, b[C] = {}, all = 1.f;
#pragma unroll 1
  for (int i = 0; i < C; ++i) {
    const float decay = decay_of(to_float(*place<KEPT>(s.g, i, c)));
    const float q_i = to_float(*place<KEPT>(s.tokens[OF_Q], i, c)), a_i = to_float(*place<KEPT>(s.tokens[OF_A], i, c));
    const float k_i = to_float(*place<KEPT>(s.tokens[OF_K], i, c)), b_i = to_float(*place<KEPT>(s.tokens[OF_B], i, c));
    float of_q = 0.f, of_a = 0.f;  // sums over the keys so far
    each_group<false>(i, [&](auto group, auto near) {
#pragma unroll
      for (int j = group.value * GROUP; j < (group.value + 1) * GROUP; ++j) {
        const float4 pair = s.pairs[i][j];
        of_a = fmaf(pair.z, k[j], fmaf(pair.w, b[j], of_a));
        if (!near.value || j < i - 1) passed[j] = fmaf(a_i, of_a, passed[j]);
        k[j] = near.value && j == i ? k_i : decay * k[j], b[j] = near.value && j == i ? b_i : decay * b[j];
        of_q = fmaf(pair.x, k[j], fmaf(pair.y, b[j], of_q));
        if (!near.value || j < i) passed[j] = fmaf(q_i, of_q, passed[j]);
      }
    });
    const float state_a = all * s.terms[1][i][c];
    all *= decay;
    const float state_q = scale * all * s.terms[0][i][c];
    s.terms[0][i][c] = q_i * state_q, s.terms[1][i][c] = a_i * state_a;
    if (i < rows && dq) dq[i * next_q] = from_float<T>(of_q + state_q), da[i * next_a] = from_float<T>(of_a + state_a);
  }
}

// dk, db and dg's terms of keys that C has, of one channel: goes backwards over keys and holds the rows behind them,
// decayed to the key.
template <typename T, typename G>
__device__ __forceinline__ void gather_columns(Shared<T, G>& s, int c, T* dk, i64 next_k, T* db, i64 next_b, int rows) {
  float q[C] = {}, a[C] = {}, all = 1.f;
#pragma unroll 1
  for (int j = C - 1; j >= 0; --j) {
    const float decay = decay_of(to_float(*place<KEPT>(s.g, j, c)));
    const float q_j = to_float(*place<KEPT>(s.tokens[OF_Q], j, c)), a_j = to_float(*place<KEPT>(s.tokens[OF_A], j, c));
    const float k_j = to_float(*place<KEPT>(s.tokens[OF_K], j, c)), b_j = to_float(*place<KEPT>(s.tokens[OF_B], j, c));
    float of_k = 0.f, of_b = 0.f;
    each_group<true>(j, [&](auto group, auto near) {
#pragma unroll
      for (int i = group.value * GROUP; i < (group.value + 1) * GROUP; ++i) {
        const float4 pair = s.pairs[i][j];
        q[i] = near.value && i == j ? q_j : q[i];
        of_k = fmaf(pair.x, q[i], fmaf(pair.z, a[i], of_k));
        of_b = fmaf(pair.y, q[i], fmaf(pair.w, a[i], of_b));
        q[i] *= decay;
        a[i] = near.value && i == j ? a_j : decay * a[i];
      }
    });
    const float state_k = all * s.terms[2][j][c], state_b = all * s.terms[3][j][c];
    all *= decay;
    s.terms[2][j][c] = fmaf(k_j, state_k, b_j * state_b);
    if (j < rows && dk) dk[j * next_k] = from_float<T>(of_k + state_k), db[j * next_b] = from_float<T>(of_b + state_b);
  }
  float before = 0.f;
#pragma unroll 1
  for (int j = 0; j < C; ++j) {
    const float own = s.terms[2][j][c];
    s.terms[2][j][c] = before, before += own;
  }
}

template <typename T, typename G>
__global__ void __launch_bounds__(THREADS, 3) delta_dplr_backward_chunks(const Args<T, G> args) {
  auto& s = *reinterpret_cast<Shared<T, G>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const u32 tiles = u32(padded(shape.K)) / KEPT, pair = blockIdx.x / tiles / u32(shape.NC);
  const u32 chunk = blockIdx.x / tiles % u32(shape.NC), h = pair % u32(shape.H), b = pair / u32(shape.H);
  const int first = blockIdx.x % tiles * KEPT, channels = int(shape.K) - first, bytes = int(args.bytes);
  const Span span = chunk_tokens(shape, chunk);
  const int rows = int(span.stop - span.start);
  const float scale = float(args.scale);

  const auto fetch = [&](auto* tile, const auto& x) {
    copy_chunk<KEPT, THREADS>(tile, x.row(b, h, span.start) + first, x.t, rows, channels, bytes);
  };
  fetch(s.tokens[OF_Q], args.q), fetch(s.tokens[OF_A], args.a), fetch(s.tokens[OF_K], args.k);
  fetch(s.tokens[OF_B], args.b), fetch(s.g, args.g);
  fetch_columns(s, args, b, h, span, chunk, first, 0);
  for (int at = threadIdx.x; at < C * (C + 1); at += THREADS) s.pairs[0][at] = {0.f, 0.f, 0.f, 0.f};

  Columns of_rows[2] = {}, of_columns[2] = {};  // S do, S du; C v, C u
  float dot = 0.f;
  const int c = threadIdx.x % KEPT, half = threadIdx.x / KEPT;
#pragma unroll 1
  for (int column = 0;; column += KEPT) {
    cp_async_wait<0>();
    __syncthreads();  // the columns have arrived
    multiply_values(s, scale);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      multiply_states(of_rows[n], s.values[DO + n], s.states[0]);
      multiply_states(of_columns[n], s.values[V_ + n], s.states[1]);
    }
    dot += multiply_halves_of_columns(s.states[0], s.states[1], c, half);
    __syncthreads();  // the columns have been read: the next ones, or terms, may overwrite them
    if (column + KEPT >= shape.V) break;
    fetch_columns(s, args, b, h, span, chunk, first, column + KEPT);
  }
  s.dots[half][c] = dot;
#pragma unroll
  for (int n = 0; n < 2; ++n)
    each_pair([&](int i, int at, int m, int across, int down) {
      const float *row = of_rows[n][m][across] + 2 * down, *key = of_columns[n][m][across] + 2 * down;
      put_pair(&s.terms[n][i][at], {row[0], row[1]});
      put_pair(&s.terms[2 + n][i][at], {key[0], key[1]});
    });
  __syncthreads();  // terms and pairs are in shared memory

  const auto of = [&](const auto& x) { return c < channels ? x.row(b, h, span.start) + first + c : nullptr; };
  float passed[C] = {};  // dg's terms of pairs, of the gate behind each token
  if (half) gather_columns(s, c, of(args.dk), args.dk.t, of(args.db), args.db.t, rows);
  else gather_rows(s, passed, c, scale, of(args.dq), args.dq.t, of(args.da), args.da.t, rows);
  __syncthreads();  // dg's terms of keys are in shared memory
  if (half) return;
  float whole = 1.f;
#pragma unroll 1
  for (int i = 0; i < C; ++i) whole *= decay_of(to_float(*place<KEPT>(s.g, i, c)));
  float dg = whole * (s.dots[0][c] + s.dots[1][c]);
  G* to = of(args.dg);
#pragma unroll
  for (int t = C - 1; t >= 0; --t) {
    dg += s.terms[0][t][c];
    if (t < rows && to) to[t * args.dg.t] = from_float<G>(dg + s.terms[2][t][c] + (t ? passed[t - 1] : 0.f));
    dg += s.terms[1][t][c];  // `a` reads the state before its own gate
  }
}
