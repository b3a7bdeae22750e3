// what      The delta rule in chunks, under a gate for all channels of a token.
// math      D_ij the decay from token j to token i. L = beta_i D_ij k_i . k_j below the diagonal, A = D_ij q_i . k_j up
//           to it, N = (I + L)^-1, B = A N beta_j; W = q D_i - B D_j k, Z = beta_j N^T D_end k; X = v - D_i k S
//           o = scale (W S + B v), S <- D S + Z^T X
// shapes    q k [B, H, T, K], v o [B, HV, T, V], g beta [B, HV, T], initial and final state [N, HV, K, V] float32
// grid      a block for every (sequence, head of values, BV columns), sequence slowest; a warp for every 16 columns
// smem      DeltaShared: two chunks of inputs, what is made of the present one
// barriers  six a chunk: it has arrived | decays and lengths | L and A | N | B and what else multiplies keys | W, Z, X
// numerics  S in float32 accumulators, N in float32; W, Z, X and S as it is read in bfloat16, matrices of tokens in two
// source    Yang et al., 2024 (2412.06464), section 3.3, with the products of a chunk in another order: N is multiplied
//           into what is read and written, which it does not enlarge, and not into what a state lacks
// limits    K <= BK; BK and BV of 64, 128
#include "cards.cuh"
#include "delta/forward_storage.cuh"
#include "delta/lengths.cuh"
#include "gated/forward_copies.cuh"
#include "gated/forward_products.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

template <typename G> struct Args {
  Rows<const bf16> q, k, v;
  Rows<const G> g, beta;  // a token's is a row of one number
  Rows<bf16> o;
  const float* initial;  // or null
  float* final;          // or null
  Shape shape;           // its H are the heads of values
  i64 group;             // so many of them share a head of queries and keys
  double scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 bytes;       // all rows of q, k, v and o are whole pieces of so many: 16, 8, 4 or 2
};

// Column `lane` of (I + L)^-1.
__device__ __forceinline__ void solve_column(float (&N)[C][LD], const float (&L)[C][LD]) {
  const int column = threadIdx.x & 31;
  float x[C];
#pragma unroll
  for (int i = 0; i < C; ++i) {
    float sums[4] = {i == column ? 1.f : 0.f};
#pragma unroll
    for (int m = 0; m < i; ++m) sums[m % 4] = fmaf(-L[i][m], x[m], sums[m % 4]);
    x[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    N[i][column] = x[i];
  }
}

// d[16 tokens, 16 channels] += rows of M, a matrix of tokens in two numbers, times keys; UPPER: below its diagonal, or
// else above it, M is 0.
template <bool UPPER, int BK>
__device__ __forceinline__ void multiply_keys(float (&d)[2][4], const bf16* M, const bf16* keys, int row, int channel) {
  const RightReader<BK, bf16> reader;
#pragma unroll
  for (int key = 0; key < C; key += 16) {
    if (UPPER ? key < row : key > row) continue;
    RightBf16 b[2];
    reader.load(b, keys, key, channel);
#pragma unroll
    for (int number = 0; number < 2; ++number) {
      LeftBf16 a;
      load_scores<Matrix::LDA>(a, M + number * C * Matrix::LDA, row, key);
      multiply(d[0], a, b[0]);
      multiply(d[1], a, b[1]);
    }
  }
}

template <typename G, int BK, int BV>
__global__ void __launch_bounds__(2 * BV, blocks_with_room<DeltaShared<BK, BV>>(BK + BV == 256 ? 1 : 2))
    delta_forward(const Args<G> args) {
  constexpr int THREADS = 2 * BV, WARPS = THREADS / 32;
  auto& s = *reinterpret_cast<DeltaShared<BK, BV>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const u32 tiles = u32(shape.V + BV - 1) / BV, pair = blockIdx.x / tiles, H = u32(shape.H), count = u32(shape.count);
  const u32 n = pair / H, h = pair % H, b = n / count, head = h / u32(args.group);
  const Span span = tokens_of(shape, n % count);
  const int v_tile = blockIdx.x % tiles * BV, tokens = int(span.stop - span.start), bytes = int(args.bytes);
  const int channels = int(shape.K), columns = int(min(shape.V - v_tile, i64(BV)));
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

  State<BK> S;
  const auto each = [&](auto f) { each_number<BK>(S, i64(pair) * shape.K, shape.V, v_tile, channels, columns, f); };
  each([&](float& x, i64 at, bool inside) { x = args.initial && inside ? args.initial[at] : 0.f; });
  for (int at = threadIdx.x; at < C * LD; at += THREADS) s.L[at / LD][at % LD] = s.A[at / LD][at % LD] = 0.f;

  float gate = 0.f, beta = 0.f;  // of a token of the next chunk
  const auto fetch = [&](int token, int stage) {
    const int rows = tokens - token;
    const i64 at = span.start + token;
    const bf16 *k = args.k.row(b, head, at), *q = args.q.row(b, head, at), *v = args.v.row(b, h, at) + v_tile;
    if (bytes == 16) {
      copy_rows<16, 8, C, BK, THREADS>(s.k[stage], k, args.k.t, rows, channels);
      copy_rows<16, 8, C, BK, THREADS>(s.q[stage], q, args.q.t, rows, channels);
      copy_rows<16, 8, C, BV, THREADS>(s.v[stage], v, args.v.t, rows, columns);
    } else {
      copy_slowly<C, BK, THREADS>(s.k[stage], k, args.k.t, rows, channels, bytes);
      copy_slowly<C, BK, THREADS>(s.q[stage], q, args.q.t, rows, channels, bytes);
      copy_slowly<C, BV, THREADS>(s.v[stage], v, args.v.t, rows, columns, bytes);
    }
    cp_async_commit();
    if (threadIdx.x < C) {
      const bool exists = int(threadIdx.x) < rows;
      gate = exists ? to_float(*args.g.row(b, h, at + threadIdx.x)) : 0.f;
      beta = exists ? to_float(*args.beta.row(b, h, at + threadIdx.x)) : 0.f;
    }
  };
  if (tokens) fetch(0, 0);
#pragma unroll 1
  for (int token = 0, stage = 0; token < tokens; token += C, stage ^= 1) {
    const bf16 *q = s.q[stage], *k = s.k[stage], *v = s.v[stage];
    cp_async_wait<0>();
    if (threadIdx.x < C) s.decay[threadIdx.x] = decay_of(gate), s.beta[threadIdx.x] = beta;
    __syncthreads();  // the chunk has arrived, and nobody reads the last one or what was made of it
    if (token + C < tokens) fetch(token + C, stage ^ 1);
    if (warp == 0) {
      float all = 1.f, since = 1.f, mine = 1.f;  // decays from the start, from the lane's token, and to its end
#pragma unroll
      for (int i = 0; i < C; ++i) {
        all *= s.decay[i];
        since = i > lane ? since * s.decay[i] : 1.f;
        mine = i == lane ? all : mine;
        s.between[i][lane] = i < lane ? 0.f : since;
      }
      s.start[lane] = mine, s.end[lane] = since;
    }
    for (int row = warp; row < 2 * C; row += WARPS) {  // what rows of keys, then of queries, are multiplied by
      float squares = 0.f;
      if (args.normalized) {
#pragma unroll
        for (int c = 2 * lane; c < BK; c += 64) {
          const float2 two = unpack(*reinterpret_cast<const u32*>(place<BK>(row < C ? k : q, row % C, c)), bf16{});
          squares = fmaf(two.x, two.x, fmaf(two.y, two.y, squares));
        }
        squares = warp_sum(squares);
      }
      if (lane == 0) s.unit[row] = args.normalized ? inverse_root(squares + float(LEAST_SQUARE)) : 1.f;
    }
    float d[16 / WARPS][4];
#pragma unroll
    for (int n = 0; n < 16 / WARPS; ++n) {  // 16 rows, of keys and then of queries, with 8 keys
      const int task = warp + n * WARPS, rows = task / 4, key = task % 4 * 8, row = rows % 2 * 16;
      if (key <= row + 15) score_tile<bf16, 1, BK>(d[n], rows < 2 ? k : q, k, row, key);
    }
    __syncthreads();  // decays and lengths stand
#pragma unroll
    for (int n = 0; n < 16 / WARPS; ++n) {
      const int task = warp + n * WARPS, rows = task / 4, key = task % 4 * 8, row = rows % 2 * 16;
      if (key > row + 15) continue;
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int i = row + g + x / 2 * 8, j = key + 2 * t + x % 2;
        const float score = s.unit[rows / 2 * C + i] * s.unit[j] * s.between[i][j] * d[n][x];
        if (rows >= 2) s.A[i][j] = j <= i ? score : 0.f;
        else s.L[i][j] = j < i ? s.beta[i] * score : 0.f;
      }
    }
    for (int c = threadIdx.x; c < BK; c += THREADS) s.whole[c] = s.start[C - 1];
    __syncthreads();  // L and A stand
    if (warp == 0) solve_column(s.N, s.L);
    Output<bf16> found = {};
    read_state<1, bf16, BK>(found, S, k);
    __syncthreads();  // N stands
    {
      constexpr int EACH = C * C / THREADS;  // neighbouring columns
      const int i = threadIdx.x / (C / EACH), first = threadIdx.x % (C / EACH) * EACH;
      float sums[EACH] = {};
#pragma unroll 8
      for (int m = 0; m < C; ++m)
#pragma unroll
        for (int j = 0; j < EACH; ++j) sums[j] = fmaf(s.A[i][m], s.N[m][first + j], sums[j]);
#pragma unroll
      for (int j = 0; j < EACH; j += 2) {
        const int x = first + j, y = x + 1;
        const float one = s.beta[x] * sums[j], two = s.beta[y] * sums[j + 1];
        put_two(s.B.at(i, x), one, two, Matrix::REST);
        put_two(s.of_W.at(i, x), s.unit[x] * s.start[x] * one, s.unit[y] * s.start[y] * two, Matrix::REST);
        const float of_x = s.unit[x] * s.end[x], of_y = s.unit[y] * s.end[y];
        put_two(s.of_Z.at(i, x), s.beta[i] * s.N[x][i] * of_x, s.beta[i] * s.N[y][i] * of_y, Matrix::REST);
      }
    }
    __syncthreads();  // B and what else multiplies keys stand
#pragma unroll 1
    for (int task = warp; task < BK / 8; task += WARPS) {
      const int channel = task / 2 * 16, row = task % 2 * 16;
      float w[2][4] = {}, z[2][4] = {};
      multiply_keys<false, BK>(w, s.of_W.x, k, row, channel);
      multiply_keys<true, BK>(z, s.of_Z.x, k, row, channel);
#pragma unroll
      for (int across = 0; across < 2; ++across)
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          const int i = row + g + 8 * down, c = channel + 8 * across + 2 * t;
          const float2 query = unpack(*reinterpret_cast<const u32*>(place<BK>(q, i, c)), bf16{});
          const float *of_w = w[across] + 2 * down, *of_z = z[across] + 2 * down;
          const float from_start = s.unit[C + i] * s.start[i];
          put_pair(place<BK>(s.W, i, c), {from_start * query.x - of_w[0], from_start * query.y - of_w[1]});
          put_pair(place<BK>(s.Z, i, c), {of_z[0], of_z[1]});
        }
    }
#pragma unroll
    for (int m = 0; m < C / 16; ++m)
#pragma unroll
      for (int across = 0; across < 2; ++across)
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          const int i = 16 * m + g + 8 * down, c = 16 * warp + 8 * across + 2 * t;
          const float2 value = unpack(*reinterpret_cast<const u32*>(place<BV>(v, i, c)), bf16{});
          const float *read = found[m][across] + 2 * down, from_start = s.unit[i] * s.start[i];
          put_pair(place<BV>(s.X, i, c), {value.x - from_start * read[0], value.y - from_start * read[1]});
        }
    __syncthreads();  // W and Z stand, and X

    Output<bf16> o = {};
    read_state<1, bf16, BK>(o, S, s.W);
    write_state<1, bf16, BK, BV>(S, s.Z, s.X, s.whole, 16 * warp);
    read_scores<Matrix, 1, BV>(o, s.B.x, v, 16 * warp);
    const float scale = float(args.scale);
#pragma unroll
    for (int x = 0; x < C / 2; ++x) {  // row and column as `Output` has them
      const int i = x / 8 * 16 + x / 2 % 2 * 8 + g, c = 16 * warp + x / 4 % 2 * 8 + 2 * t + x % 2;
      if (token + i < tokens && c < columns)
        args.o.row(b, h, span.start + token + i)[v_tile + c] = from_float<bf16>(scale * o[x / 8][x / 4 % 2][x % 4]);
    }
  }
  if (args.final)
    each([&](float& x, i64 at, bool inside) {
      if (inside) args.final[at] = x;
    });
}
