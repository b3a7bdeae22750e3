// what      The delta rule backward, a block for each chunk of 32 tokens: dq, dk, dbeta and dg, from what
//           backward_states.cu has computed from chunk to chunk.
// math      S is the state [K, V] before the chunk, C the gradient of the state after it; e_t: what v_t differs from
//           what k_t reads (the residual); w_t: the gradient of beta_t e_t, what is written. Decays: D_ij from token j
//           to i, D_i from the chunk's start to i, D_end from i to the chunk's end.
//           M_ij = D_ij k_i . k_j, j < i; A_ij = D_ij q_i . k_j, j <= i; dbeta_i = w_i . e_i
//           dA_ij = scale beta_j do_i . e_j, j <= i;   dM_ij = -beta_i beta_j w_i . e_j, j < i
//           dq_i = scale D_i S do_i + sum_j dA_ij D_ij k_j
//           dk_i = D_end beta_i C e_i - beta_i D_i S w_i + sum_j (dM_ij + dM_ji) D_ij k_j + sum_j dA_ji D_ji q_j
//           dg_t = the sum of all terms that gate t multiplies: of rows from t on that read S, of keys before t that C
//           has, <S, C> times the chunk's decay, and A dA + M dM of pairs with j < t <= i. No differences of sums
// shapes    as in backward_states.cu; dq dk [B, H, T, K]; or, if several heads of values share a head of queries, parts
//           [2, B, HV, T, K] float32 of each, of queries and keys after their division; dbeta dg [B, HV, T] float32
// grid      a block for every (batch, head of values, chunk); a warp for every 16 channels
// smem      Shared: the chunk's q and k; 64 columns of S, C, do, e and w at a time
// barriers  q, k and decays are in shared memory; for every 64 columns: they are, as lengths are | they have
//           been read; then: terms over channels, matrices of dq and dk, terms of pairs are in shared memory | sums of
//           dg; with normalized rows: those have been read | products of rows and their gradients, over a warp's
//           channels, are in shared memory | over all channels
// numerics  products of T are summed in float32; those of pairs take e, and those with q or k a matrix [32, 32], in two
//           numbers of T. No division by a decay or by beta
// source    Yang et al., 2024 (2412.06464), section 3.3; the gradient takes the same matrices, transposed
// limits    T of bfloat16, float16; K <= BK; BK of 64, 128
#include "cards.cuh"
#include "delta/backward_storage.cuh"
#include "delta/chunk.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k, do_, e, w;  // e: its numbers, then what rounding leaves of them
  Rows<const G> g, beta;          // rows of one number, for each token
  const T* kept;                  // S and C: backward_storage.cuh
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
      T do_[C * COLUMNS], e[C * COLUMNS], rest[C * COLUMNS], w[C * COLUMNS];
    };
    float pairs[C][LD];  // A_ij dA_ij + M_ij dM_ij, j < i
  };
  Decayed of;
  float reads[WARPS][2 * C];  // of a warp's channels: dg's terms of rows that read S, then those of keys that C has;
                              // at the end k . dk, then q . dq
  float own[WARPS][C];        // dg's terms of pairs, of a warp's rows
  float dots[2];              // <S, C>, of the first and of the second half of every 64 columns
  float along[2 * C];         // k . dk / k . k, then q . dq / q . q
};

// Has L2 fetch 64 columns from `column` on, as fetch_columns will ask for them; a thread a line, of 64 numbers.
template <int BK, typename T, typename G>
__device__ __forceinline__ void prefetch_columns(const Args<T, G>& args, i64 b, i64 h, const Span& span, i64 chunk,
                                                 int column) {
  constexpr int PANELS = BK / KEPT;
  const int panel = threadIdx.x / KEPT, kind = threadIdx.x / C;
  const i64 token = span.start + threadIdx.x % C;
  const i64 state = kept_at(args.shape, panel / PANELS, b, h, chunk, panel % PANELS * KEPT);
  prefetch_line(args.kept + state + i64(column + threadIdx.x % KEPT) * KEPT);
  if (kind < 4 && token < span.stop) {
    const Rows<const T>& rows = kind == 0 ? args.do_ : kind == 3 ? args.w : args.e;
    prefetch_line(rows.row(b, h, token) + column + (kind == 2 ? padded(args.shape.V) : 0));
  }
}

// Starts copying 64 columns from `column` on of S, C, do, e and w.
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
  copy_chunk<COLUMNS, THREADS>(s.e, args.e.row(b, h, span.start) + column, args.e.t, rows, wide, 16);
  copy_chunk<COLUMNS, THREADS>(s.rest, args.e.row(b, h, span.start) + padded(args.shape.V) + column, args.e.t, rows,
                               wide, 16);
  copy_chunk<COLUMNS, THREADS>(s.w, args.w.row(b, h, span.start) + column, args.w.t, rows, wide, 16);
  cp_async_commit();
}

// Adds products of rows and states' transposes, of 64 columns: [32 tokens, 16 channels of the warp].
template <int BK, typename T>
__device__ __forceinline__ void multiply_states(Columns& S_do, Columns& S_w, Columns& C_e, const Shared<T, BK>& s) {
  const int lane = own_lane(), matrix = lane >> 3, warp = threadIdx.x >> 5;
  const LeftReader<COLUMNS, T> reader(lane);
  const int first =
      warp / 4 * COLUMNS * KEPT + ((matrix & 1) * 8 + 2 * (warp % 4) + (matrix >> 1)) * 64 + (lane & 7) * 8;
#pragma unroll
  for (int c = 0; c < COLUMNS / 16; ++c) {
    u32 b[4];
    const auto add = [&](Columns& d, const T* rows) {
#pragma unroll
      for (int m = 0; m < C / 16; ++m) {
        u32 a[4];
        ldmatrix_x4(a, reader.at(rows, 16 * m, 16 * c));
        multiply_halves(d[m][0], a, {b[0], b[1]}, T{});
        multiply_halves(d[m][1], a, {b[2], b[3]}, T{});
      }
    };
    ldmatrix_x4_trans(b, s.states[0] + first + 2 * c * KEPT * 8);
    add(S_do, s.do_), add(S_w, s.w);
    ldmatrix_x4_trans(b, s.states[1] + first + 2 * c * KEPT * 8);
    add(C_e, s.e);
  }
}

// dot += the products of x and y, S and C, over 32 columns of the 64, from `column` on: two diagonals of matrices
// [8, 8], whose row g is in dot[0] and dot[1], and in dot[2] and dot[3].
template <int BK, typename T>
__device__ __forceinline__ void multiply_both(float (&dot)[4], const T* x, const T* y, int column) {
  const int lane = own_lane(), matrix = lane >> 3;
  const int first = (column / 8 + (matrix & 1)) * KEPT * 8 + (matrix >> 1) * 64 + (lane & 7) * 8;
#pragma unroll 4
  for (int n = 0; n < BK / 8; ++n) {
    const int at = first + n / 8 * COLUMNS * KEPT + n / 4 % 2 * 2 * KEPT * 8 + n % 4 * 128;
    u32 a[4], b[4];
    ldmatrix_x4(a, x + at);
    ldmatrix_x4(b, y + at);
    multiply_halves(dot, {a[0], 0, a[2], 0}, {b[0], b[2]}, T{});
    multiply_halves(dot, {0, a[1], 0, a[3]}, {b[1], b[3]}, T{});
  }
}

// The sum of the x of the lanes below.
__device__ __forceinline__ float sum_below(float x) {
  const int lane = own_lane();
  x = __shfl_up_sync(0xffffffffu, x, 1);
  if (lane == 0) x = 0.f;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, x, distance);
    if (lane >= distance) x += other;
  }
  return x;
}

// The sum of the x of this lane and of those above.
__device__ __forceinline__ float sum_from(float x) {
  const int lane = own_lane();
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_down_sync(0xffffffffu, x, distance);
    if (lane + distance < 32) x += other;
  }
  return x;
}

// Stores x as the sum of two numbers of T.
template <typename T> __device__ __forceinline__ void put_one(Matrix<T>& M, int i, int j, float x) {
  const T first = from_float<T>(x);
  *M.at(i, j) = first;
  M.at(i, j)[M.REST] = from_float<T>(x - to_float(first));
}

// What a warp computes beside products with states. Part 0 to 5: dA and dM of 16 rows and 8 keys, those that have pairs
// j <= i. Part 6 and 7: <S, C>, of half of the columns.
struct Part {
  static constexpr int COUNT = 8;
  bool of_pairs;
  int row, key, column;
  __device__ __forceinline__ explicit Part(int part)
      : of_pairs(part < 6), row(part < 2 ? 0 : 16), key(8 * (part < 2 ? part : part - 2)), column(32 * (part - 6)) {}
};

template <typename T, typename G, int BK>
__global__ void __launch_bounds__(2 * BK, blocks_with_room<Shared<T, BK>>(2))
    delta_backward_chunks(const Args<T, G> args) {
  constexpr int THREADS = 2 * BK, WARPS = THREADS / 32, OWN = Part::COUNT / WARPS;
  auto& s = *reinterpret_cast<Shared<T, BK>*>(dynamic_smem());
  Decayed& of = s.of;
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
  fetch_columns<BK>(s, args, opaque(b), opaque(h), span, chunk, 0);  // `opaque`: addresses take no registers later
  for (int column = COLUMNS; column < shape.V; column += COLUMNS)
    prefetch_columns<BK>(args, opaque(b), opaque(h), span, chunk, column);
  const TokenNumbers numbers(args.g, args.beta, b, h, span.start, rows);
  decay_pairs<WARPS>(of, numbers.decay);
  if (warp == 0) of.beta[lane] = numbers.beta;
  cp_async_wait<1>();
  __syncthreads();  // q and k have arrived; decays are in shared memory
  measure_rows<BK, WARPS>(of, s.q, s.k, args.normalized);

  Columns of_q = {}, of_k = {}, of_end = {};  // S do, S w and C e; of_q and of_k become dq and dk
  float products[OWN][2][4] = {};             // of the warp's parts: do . e and w . e; or <S, C>
#pragma unroll 1
  for (int column = 0;; column += COLUMNS) {
    cp_async_wait<0>();
    __syncthreads();  // the columns have arrived; lengths are in shared memory
    multiply_states(of_q, of_k, of_end, s);
#pragma unroll
    for (int n = 0; n < OWN; ++n) {
      const Part part(warp + n * WARPS);
      if (!part.of_pairs) {
        if (args.dg.p) multiply_both<BK>(products[n][0], s.states[0], s.states[1], part.column);
        continue;
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float sums[2][4] = {};
        multiply_rows<COLUMNS>(sums, m ? s.w : s.do_, s.e, part.row, part.key);
        multiply_rows<COLUMNS>(sums, m ? s.w : s.do_, s.rest, part.row, part.key);
#pragma unroll
        for (int x = 0; x < 4; ++x) products[n][m][x] += sums[0][x] + sums[1][x];
      }
    }
    __syncthreads();  // the columns have been read: the next ones, or matrices and pairs, may overwrite them
    if (column + COLUMNS >= shape.V) break;
    fetch_columns<BK>(s, args, opaque(b), opaque(h), span, chunk, column + COLUMNS);
  }
  // The terms of S and C: of_q and of_k become these terms of dq and dk, and dg's sums over channels are stored.
#pragma unroll
  for (int m = 0; m < C / 16; ++m)
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const int i = 16 * m + g + 8 * down;
      const float of_query = scale * of.start[i], of_key = -of.start[i] * of.beta[i], to_end = of.end[i] * of.beta[i];
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
#pragma unroll
  for (int n = 0; n < OWN; ++n) {
    const Part part(warp + n * WARPS);
    if (!part.of_pairs) {
      const float (&dot)[4] = products[n][0];
      const float sum = warp_sum(t == g / 2 ? (g % 2 ? dot[1] + dot[3] : dot[0] + dot[2]) : 0.f);
      if (lane == 0) s.dots[part.column != 0] = sum;
      continue;
    }
    float of_A[2][4] = {}, of_M[2][4] = {};  // q . k and k . k, each in two sums
    multiply_rows<BK>(of_A, s.q, s.k, part.row, part.key);
    multiply_rows<BK>(of_M, s.k, s.k, part.row, part.key);
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int i = part.row + g + x / 2 * 8, j = part.key + 2 * t + x % 2;
      const float key = of.unit[i], query = of.unit[C + i], D = of.between[i][j], of_key = D * of.unit[j];
      const float read = products[n][0][x], written = products[n][1][x];
      const float dA = j <= i ? scale * of.beta[j] * read : 0.f, dM = j < i ? -of.beta[i] * of.beta[j] * written : 0.f;
      put_one(s.of_dq, i, j, dA * of_key);
      put_one(s.of_queries, j, i, dA * D * query);
      if (j <= i) {
        put_one(s.of_dk, i, j, dM * of_key);
        put_one(s.of_dk, j, i, dM * D * key);
      }
      const float A = query * of_key * (of_A[0][x] + of_A[1][x]), M = key * of_key * (of_M[0][x] + of_M[1][x]);
      s.pairs[i][j] = fmaf(A, dA, M * dM);
      if (i == j && i < rows) *args.dbeta.row(b, h, span.start + i) = written;
    }
  }
  __syncthreads();  // terms over channels, matrices that multiply q and k, and terms of pairs are in shared memory
  if (args.dg.p) {
    float passed = 0.f;  // of this warp's rows, the terms of pairs that gate `lane` multiplies
#pragma unroll
    for (int n = 0; n < C / WARPS; ++n) {
      const int i = warp + n * WARPS;
      const float before = sum_below(lane < i ? s.pairs[i][lane] : 0.f);
      passed += lane <= i ? before : 0.f;
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
  if (args.dg.p && warp == 0) {
    float dg = 0.f, read = 0.f, kept = 0.f;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) {
      dg += s.own[other][lane];
      read += s.reads[other][lane], kept += s.reads[other][C + lane];
    }
    dg += sum_from(read) + sum_below(kept);
    if (lane < rows) *args.dg.row(b, h, span.start + lane) = fmaf(of.start[C - 1], s.dots[0] + s.dots[1], dg);
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
    __syncthreads();  // products of rows and their gradients, over a warp's channels, are in shared memory
    if (threadIdx.x < 2 * C) {
      const float unit = of.unit[threadIdx.x];
      float sum = 0.f;
#pragma unroll
      for (int other = 0; other < WARPS; ++other) sum += s.reads[other][threadIdx.x];
      s.along[threadIdx.x] = unit * unit * sum;
    }
    __syncthreads();  // those over all channels are in shared memory
  }
  // Stores a gradient, over the rows x of a warp's channels; kind: 0 for queries, 1 for keys. If rows were divided by
  // their lengths, the part along the row is removed, and the rest is divided by the length.
  const auto store = [&](const Columns& d, T* x, const Rows<T>& to, int kind) {
    if (args.parts) {
      each_pair([&](int i, int c, int m, int across, int down) {
        if (i >= rows) return;
        float* row = args.parts + (((kind * shape.B + b) * shape.H + h) * shape.T + span.start + i) * shape.K;
        if (c < channels) row[c] = d[m][across][2 * down];
        if (c + 1 < channels) row[c + 1] = d[m][across][2 * down + 1];
      });
      return;
    }
    each_pair([&](int i, int c, int m, int across, int down) {
      float one = d[m][across][2 * down], two = d[m][across][2 * down + 1];
      T* pair = place<BK>(x, i, c);
      if (divided) {
        const int at = (kind ? 0 : C) + i;
        const float2 value = unpack_pair(pair);
        const float unit = of.unit[at], along = s.along[at];
        one = unit * fmaf(-along, value.x, one), two = unit * fmaf(-along, value.y, two);
      }
      put_pair(pair, {one, two});
    });
    __syncwarp();  // the warp's channels of the gradient are in shared memory
    T* const first = to.row(b, head, span.start);
    if (bytes == 16) {
#pragma unroll
      for (int n = 0; n < C; n += 16) {
        const int i = n + lane / 2, c = channel + lane % 2 * 8;
        if (i < rows && c < channels)
          *reinterpret_cast<uint4*>(first + i * to.t + c) = *reinterpret_cast<const uint4*>(place<BK>(x, i, c));
      }
    } else {
#pragma unroll 1
      for (int n = lane; n < C * 16; n += 32) {
        const int i = n / 16, c = channel + n % 16;
        if (i < rows && c < channels) first[i * to.t + c] = *place<BK>(x, i, c);
      }
    }
  };
  store(of_q, s.q, args.dq, 0);
  store(of_k, s.k, args.dk, 1);
}
