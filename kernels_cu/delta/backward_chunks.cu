// what      The delta rule backward, a block for each chunk of 32 tokens: dq, dk, dbeta and dg, from what
//           backward_states.cu has computed from chunk to chunk.
// math      S is the state [K, V] before the chunk, C the gradient of the state after it; X: values less what S
//           returns for their keys (the residual); w_t: the gradient of what is written for k_t; N: chunk.cuh.
//           Decays: D_ij from token j to i, D_i from the chunk's start to i, D_end from i to the chunk's end.
//           M_ij = D_ij k_i . k_j, j < i; A_ij = D_ij q_i . k_j, j <= i; P = N diag(beta); U = P X, with rows u_i
//           dA = scale (do X^T) P^T, j <= i;   dM_ij = -beta_i n_ij, n = (w X^T) P^T, j < i
//           dq_i = scale D_i S do_i + sum_j dA_ij D_ij k_j;   dbeta_i = w_i . X_i - sum_j M_ij n_ij
//           dk_i = D_end C u_i - beta_i D_i S w_i + sum_j (dM_ij + dM_ji) D_ij k_j + sum_j dA_ji D_ji q_j
//           dg_t = the sum of all terms that gate t multiplies: of rows from t on that read S, of keys before t that C
//           has, <S, C> times the chunk's decay, and A dA + M dM of pairs with j < t <= i. No differences of sums
// shapes    as in backward_states.cu; dq dk [B, H, T, K]; or, if several heads of values share a head of queries, parts
//           [2, B, HV, T, K] float32 of each, of queries and keys after their division; dbeta dg [B, HV, T] float32
// grid      a block for every (batch, head of values, chunk); a warp for every 16 channels
// smem      Shared: the chunk's q and k; 64 columns of S, C, do, X and w at a time
// barriers  q and k | decays and lengths | M and A | N are in shared memory; three for every 64 columns: they are, and
//           P | U is | they have been read; then: do X^T, w X^T, sums over channels | matrices of dq and dk | sums of
//           dg; with normalized rows: those have been read | rows times their gradients
// numerics  products of T are summed in float32; U is rounded once; matrices [32, 32] that multiply q or k are the sum
//           of two numbers of T, other products with them are float32. No division by a decay or by beta
// source    Yang et al., 2024 (2412.06464), section 3.3; the gradient takes the same matrices, transposed
// limits    T of bfloat16, float16; K <= BK; BK of 64, 128
#include "cards.cuh"
#include "delta/backward_storage.cuh"
#include "delta/chunk.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k, do_, X, w;
  Rows<const G> g, beta;  // rows of one number, for each token
  const T* kept;          // S and C: backward_storage.cuh
  Rows<T> dq, dk;
  float* parts;           // not null: gets dq and dk of each head of values
  Rows<float> dbeta, dg;  // rows of one number, for each token; dg null without gates
  Shape shape;            // H: heads of values
  i64 group;              // heads of values that share a head of queries and keys
  double scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 bytes;       // 16, 8, 4 or 2: all rows of q, k, do, dq and dk start on multiples of it, and are multiples long
};

constexpr int COLUMNS = KEPT;

template <typename T, int BK> struct alignas(16) Shared {
  static constexpr int WARPS = BK / 16;
  T q[C * BK], k[C * BK];
  union {
    T states[2][COLUMNS * BK];  // S, C
    struct {
      Matrix<T> of_dq, of_dk, of_queries;  // factors [token, token]: of keys for dq; of keys, of queries for dk
    };
  };
  union {
    struct {
      T do_[C * COLUMNS], X[C * COLUMNS], w[C * COLUMNS], U[C * COLUMNS];
    };
    float products[2][C][LD];  // do X^T, w X^T
  };
  Matrix<T> of_U;
  Scored of;                  // M, A, N, decays; at the end `between` has A dA + M dM of each pair
  float reads[WARPS][2 * C];  // sums over a warp's channels of dg's terms: rows that read S, then keys that C has
  float own[WARPS][C], dots[WARPS];  // dg's terms of pairs, of a warp's rows; <S, C>, a warp's share
};

// Starts copying 64 columns from `column` on of S, C, do, X and w.
template <int BK, typename T, typename G>
__device__ __forceinline__ void fetch_columns(Shared<T, BK>& s, const Args<T, G>& args, i64 b, i64 h, const Span& span,
                                              i64 chunk, int column) {
  constexpr int THREADS = 2 * BK, PIECE = 8;
  const int rows = int(span.stop - span.start), wide = padded(args.shape.V) - column;
#pragma unroll
  for (int way = 0; way < 2; ++way)
#pragma unroll
    for (int panel = 0; panel < BK / KEPT; ++panel) {
      const T* from = args.kept + kept_at(args.shape, way, b, h, chunk, panel * KEPT) + i64(column) * KEPT;
      for (int at = threadIdx.x * PIECE; at < COLUMNS * KEPT; at += THREADS * PIECE)
        cp_async<16>(s.states[way] + panel * COLUMNS * KEPT + at, from + at, true);
    }
  copy_chunk<COLUMNS, THREADS>(s.do_, args.do_.row(b, h, span.start) + column, args.do_.t, rows,
                               int(args.shape.V) - column, int(args.bytes));
  copy_chunk<COLUMNS, THREADS>(s.X, args.X.row(b, h, span.start) + column, args.X.t, rows, wide, 16);
  copy_chunk<COLUMNS, THREADS>(s.w, args.w.row(b, h, span.start) + column, args.w.t, rows, wide, 16);
  cp_async_commit();
}

// d [32 tokens, 16 channels of the warp] += rows [32 tokens, 64 columns] times the state's transpose.
template <int BK, typename T>
__device__ __forceinline__ void multiply_states(Columns& d, const T* rows, const T* state) {
  const int lane = own_lane(), matrix = lane >> 3, warp = threadIdx.x >> 5;
  const LeftReader<COLUMNS, T> reader(lane);
  const T* from =
      state + warp / 4 * COLUMNS * KEPT + ((matrix & 1) * 8 + 2 * (warp % 4) + (matrix >> 1)) * 64 + (lane & 7) * 8;
#pragma unroll
  for (int c = 0; c < COLUMNS / 16; ++c) {
    u32 b[4];
    ldmatrix_x4_trans(b, from + 2 * c * KEPT * 8);
#pragma unroll
    for (int m = 0; m < C / 16; ++m) {
      u32 a[4];
      ldmatrix_x4(a, reader.at(rows, 16 * m, 16 * c));
      multiply_halves(d[m][0], a, {b[0], b[1]}, T{});
      multiply_halves(d[m][1], a, {b[2], b[3]}, T{});
    }
  }
}

// Stores x as the sum of two numbers of T.
template <typename T> __device__ __forceinline__ void put_one(Matrix<T>& M, int i, int j, float x) {
  const T first = from_float<T>(x);
  *M.at(i, j) = first;
  M.at(i, j)[M.REST] = from_float<T>(x - to_float(first));
}

template <typename T, typename G, int BK>
__global__ void __launch_bounds__(2 * BK, blocks_with_room<Shared<T, BK>>(2))
    delta_backward_chunks(const Args<T, G> args) {
  constexpr int THREADS = 2 * BK, WARPS = THREADS / 32, TASKS = 16 / WARPS;
  auto& s = *reinterpret_cast<Shared<T, BK>*>(dynamic_smem());
  Scored& of = s.of;
  const Shape& shape = args.shape;
  const u32 chunk = blockIdx.x % u32(shape.NC), pair = blockIdx.x / u32(shape.NC);
  const u32 h = pair % u32(shape.H), b = pair / u32(shape.H), head = h / u32(args.group);
  const Span span = chunk_tokens(shape, chunk);
  const int rows = int(span.stop - span.start), bytes = int(args.bytes), channels = int(shape.K);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, channel = 16 * warp;
  const float scale = float(args.scale);

  copy_chunk<BK, THREADS>(s.k, args.k.row(b, head, span.start), args.k.t, rows, channels, bytes);
  copy_chunk<BK, THREADS>(s.q, args.q.row(b, head, span.start), args.q.t, rows, channels, bytes);
  cp_async_commit();
  fetch_columns<BK>(s, args, b, h, span, chunk, 0);
  TokenNumbers numbers;
  numbers.ask(args.g, args.beta, b, h, span.start, rows);
  numbers.put(of);
  cp_async_wait<1>();
  __syncthreads();  // q and k have arrived, and `of` has decays and beta
  score_pairs<BK, THREADS>(of, s.q, s.k, args.normalized);
  __syncthreads();  // M and A are in shared memory
  if (warp == 0) solve_column(of);
  __syncthreads();  // N is in shared memory
  for (int at = 2 * threadIdx.x; at < C * C; at += 2 * THREADS) {
    const int i = at / C, j = at % C;
    put_two(s.of_U.at(i, j), of.beta[j] * of.N[i][j], of.beta[j + 1] * of.N[i][j + 1]);
  }

  Columns of_q = {}, of_k = {}, of_end = {};  // S do, S w and C u; of_q and of_k become dq and dk
  float products[TASKS][2][4] = {}, dot = 0.f;
#pragma unroll 1
  for (int column = 0;; column += COLUMNS) {
    cp_async_wait<0>();
    __syncthreads();  // the columns have arrived, and P is in shared memory
#pragma unroll
    for (int n = 0; n < 8 / WARPS; ++n) {
      const int task = warp + n * WARPS, row = task % 2 * 16, first = task / 2 * 16;
      float u[2][4] = {};
      multiply_tokens<LOWER, COLUMNS>(u, s.of_U, s.X, row, first);
#pragma unroll
      for (int across = 0; across < 2; ++across)
#pragma unroll
        for (int down = 0; down < 2; ++down)
          put_pair(place<COLUMNS>(s.U, row + g + 8 * down, first + 8 * across + 2 * t),
                   {u[across][2 * down], u[across][2 * down + 1]});
    }
    if (args.dg.p)
      for (int at = 2 * threadIdx.x; at < COLUMNS * BK; at += 2 * THREADS) {
        const float2 x = unpack_pair(s.states[0] + at), y = unpack_pair(s.states[1] + at);
        dot = fmaf(x.x, y.x, fmaf(x.y, y.y, dot));
      }
#pragma unroll
    for (int n = 0; n < TASKS; ++n) {
      const int task = warp + n * WARPS, key = task % 4 * 8, row = task / 4 % 2 * 16;
      if (key <= row + 15) multiply_rows<COLUMNS>(products[n], task < 8 ? s.do_ : s.w, s.X, row, key);
    }
    __syncthreads();  // U is in shared memory
    multiply_states<BK>(of_q, s.do_, s.states[0]);
    multiply_states<BK>(of_k, s.w, s.states[0]);
    multiply_states<BK>(of_end, s.U, s.states[1]);
    __syncthreads();  // the columns have been read: the next ones, or `products` and matrices, may overwrite them
    if (column + COLUMNS >= shape.V) break;
    fetch_columns<BK>(s, args, b, h, span, chunk, column + COLUMNS);
  }
  dot = warp_sum(dot);
  if (lane == 0) s.dots[warp] = dot;
#pragma unroll
  for (int n = 0; n < TASKS; ++n) {
    const int task = warp + n * WARPS, key = task % 4 * 8, row = task / 4 % 2 * 16;
#pragma unroll
    for (int x = 0; x < 4; ++x)
      s.products[task / 8][row + g + x / 2 * 8][key + 2 * t + x % 2] = products[n][0][x] + products[n][1][x];
  }
  // The terms of S and C: of_q and of_k become these terms of dq and dk, and dg's sums over channels are stored.
#pragma unroll
  for (int m = 0; m < C / 16; ++m)
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const int i = 16 * m + g + 8 * down;
      const float of_query = scale * of.start[i], of_key = -of.start[i] * of.beta[i], to_end = of.end[i];
      float read = 0.f, written = 0.f;
#pragma unroll
      for (int across = 0; across < 2; ++across) {
        const float2 q = unpack_pair(place<BK>(s.q, i, channel + 8 * across + 2 * t));
        const float2 k = unpack_pair(place<BK>(s.k, i, channel + 8 * across + 2 * t));
        float *dq = of_q[m][across] + 2 * down, *dk = of_k[m][across] + 2 * down;
        const float* end = of_end[m][across] + 2 * down;
        const float key = of.unit[i], query = of.unit[C + i];
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const float of_k_end = to_end * end[x], one_k = x ? k.y : k.x, one_q = x ? q.y : q.x;
          dq[x] *= of_query, dk[x] *= of_key;
          read = fmaf(query * one_q, dq[x], fmaf(key * one_k, dk[x], read));
          written = fmaf(key * one_k, of_k_end, written);
          dk[x] += of_k_end;
        }
      }
      read = sum_of_lanes<4>(read), written = sum_of_lanes<4>(written);
      if (t == 0) s.reads[warp][i] = read, s.reads[warp][C + i] = written;
    }
  __syncthreads();  // `products` and `reads` are in shared memory
  {
    constexpr int EACH = C * C / THREADS, ACROSS = C / EACH;
    const int i = threadIdx.x / ACROSS, first = threadIdx.x % ACROSS;  // a thread has row i, every ACROSS-th column
    float dA[EACH] = {}, n[EACH] = {}, erased = 0.f;
#pragma unroll 2
    for (int m = 0; m < C; m += 4) {
      const float4 x = *reinterpret_cast<const float4*>(&s.products[0][i][m]);
      const float4 y = *reinterpret_cast<const float4*>(&s.products[1][i][m]);
      const float4 beta = *reinterpret_cast<const float4*>(&of.beta[m]);
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const float4 N = *reinterpret_cast<const float4*>(&of.N[first + ACROSS * j][m]);
        const float by[4] = {beta.x * N.x, beta.y * N.y, beta.z * N.z, beta.w * N.w};
        dA[j] = fmaf(x.x, by[0], fmaf(x.y, by[1], fmaf(x.z, by[2], fmaf(x.w, by[3], dA[j]))));
        n[j] = fmaf(y.x, by[0], fmaf(y.y, by[1], fmaf(y.z, by[2], fmaf(y.w, by[3], n[j]))));
      }
    }
    const float key = of.unit[i], query = of.unit[C + i], beta = of.beta[i];
#pragma unroll
    for (int at = 0; at < EACH; ++at) {
      const int j = first + ACROSS * at;
      const float of_A = j <= i ? scale * dA[at] : 0.f, of_M = j < i ? -beta * n[at] : 0.f, D = of.between[i][j];
      put_one(s.of_dq, i, j, of_A * D * of.unit[j]);
      put_one(s.of_queries, j, i, of_A * D * query);
      if (j <= i) {
        put_one(s.of_dk, i, j, of_M * D * of.unit[j]);
        put_one(s.of_dk, j, i, of_M * D * key);
      }
      const float M = of.M[i][j];
      of.between[i][j] = j < i ? fmaf(of.A[i][j], of_A, M * of_M) : 0.f;
      if (j < i) erased = fmaf(M, n[at], erased);
    }
    erased = sum_of_lanes<ACROSS>(erased);
    if (first == 0 && i < rows) *args.dbeta.row(b, h, span.start + i) = s.products[1][i][i] - erased;
  }
  __syncthreads();  // the matrices that multiply q and k, and of.between, are in shared memory
  if (args.dg.p) {
    float passed = 0.f;  // of this warp's rows, the terms of pairs that gate `lane` multiplies
    for (int i = warp; i < C; i += WARPS) {
      float row = 0.f;
#pragma unroll 8
      for (int j = 0; j < C; ++j) row += j < lane ? of.between[i][j] : 0.f;
      passed += i >= lane ? row : 0.f;
    }
    s.own[warp][lane] = passed;
  }
#pragma unroll
  for (int m = 0; m < C / 16; ++m) {
    multiply_tokens<LOWER, BK>(of_q[m], s.of_dq, s.k, 16 * m, channel);
    multiply_tokens<WHOLE, BK>(of_k[m], s.of_dk, s.k, 16 * m, channel);
    multiply_tokens<UPPER, BK>(of_k[m], s.of_queries, s.q, 16 * m, channel);
  }
  __syncthreads();  // dg's terms of pairs are in shared memory
  if (args.dg.p && warp == 0 && lane < rows) {
    float dg = 0.f, across = 0.f;
    for (int other = 0; other < WARPS; ++other) {
      dg += s.own[other][lane], across += s.dots[other];
#pragma unroll 8
      for (int i = 0; i < C; ++i) dg += s.reads[other][i >= lane ? i : C + i];
    }
    *args.dg.row(b, h, span.start + lane) = fmaf(of.start[C - 1], across, dg);
  }
  const bool divided = args.normalized && !args.parts;
  if (divided) {
    __syncthreads();  // dg's sums have been read: the next lines overwrite `reads`
#pragma unroll
    for (int m = 0; m < C / 16; ++m)
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        const int i = 16 * m + g + 8 * down;
        float queries = 0.f, keys = 0.f;
#pragma unroll
        for (int across = 0; across < 2; ++across) {
          const float2 q = unpack_pair(place<BK>(s.q, i, channel + 8 * across + 2 * t));
          const float2 k = unpack_pair(place<BK>(s.k, i, channel + 8 * across + 2 * t));
          const float *dq = of_q[m][across] + 2 * down, *dk = of_k[m][across] + 2 * down;
          queries = fmaf(q.x, dq[0], fmaf(q.y, dq[1], queries)), keys = fmaf(k.x, dk[0], fmaf(k.y, dk[1], keys));
        }
        queries = sum_of_lanes<4>(queries), keys = sum_of_lanes<4>(keys);
        if (t == 0) s.reads[warp][i] = keys, s.reads[warp][C + i] = queries;
      }
    __syncthreads();  // the products of rows and their gradients are in shared memory
  }
  // Stores a gradient; kind: 0 for queries, 1 for keys. If rows were divided by their lengths, the part along the row
  // is removed, and the rest is divided by the length.
  const auto store = [&](const Columns& d, const T* x, const Rows<T>& to, int kind) {
    each_pair([&](int i, int c, int m, int across, int down) {
      float one = d[m][across][2 * down], two = d[m][across][2 * down + 1];
      if (i >= rows) return;
      if (args.parts) {
        float* row = args.parts + (((kind * shape.B + b) * shape.H + h) * shape.T + span.start + i) * shape.K;
        if (c < channels) row[c] = one;
        if (c + 1 < channels) row[c + 1] = two;
        return;
      }
      if (divided) {
        const int at = (kind ? 0 : C) + i;
        float along = 0.f;
        for (int other = 0; other < WARPS; ++other) along += s.reads[other][at];
        const float2 value = unpack_pair(place<BK>(x, i, c));
        const float unit = of.unit[at];
        along *= unit * unit;
        one = unit * fmaf(-along, value.x, one), two = unit * fmaf(-along, value.y, two);
      }
      store_pair(to.row(b, head, span.start + i), c, channels, bytes, one, two);
    });
  };
  store(of_q, s.q, args.dq, 0);
  store(of_k, s.k, args.dk, 1);
}
