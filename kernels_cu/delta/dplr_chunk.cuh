// what      A chunk of 32 tokens of RWKV-7's recurrence, a delta rule that erases with vectors a and b of its own: the
//           matrices that hang on no state.
// math      kd_i: a_i decayed from the chunk's start to token i - 1; qd_i: q_i decayed from the start to i; ke, be: k
//           and b decayed to the chunk's end. Axy_ij = x_i . y_j with the decay between both, for x = q or a, y = k or
//           b; q_i takes its own gate, j <= i; a_i does not, j < i.
//           N = (I - Aab)^-1, L = N Aak, H = Aqb N, B = Aqk + Aqb L;   W = qd + H kd, Zb = N^T be, Zk = ke + L^T be
// numerics  scores, N and L in float32; kd, W and Z in T, H and B as the sum of two T; other decayed operands, N and L
//           in float16, divided by powers of 2; decays: channel_chunk.cuh
// limits    T of bfloat16, float16; K <= BK; BK and BV of 64, 128
#include "delta/chunk.cuh"

constexpr int BLOCK = 8, PAIRS_OF_BLOCK = BLOCK * (BLOCK - 1) / 2;  // tokens whose pairs are multiplied one by one
constexpr int BLOCKS = C / BLOCK;

// The power of 2 below the root of a sum of squares; 1 for 0.
__device__ __forceinline__ float power_below(float squares) {
  if (squares == 0.f) return 1.f;
  const int exponent = int(floorf(0.5f * log2_approx(squares)));
  return __uint_as_float(u32(127 + min(max(exponent, -126), 126)) << 23);
}

template <int BK> __device__ __forceinline__ float2 decays_at(const float* g, int i, int c) {
  const float2 x = *reinterpret_cast<const float2*>(place<BK>(g, i, c));
  return {decay_of(x.x), decay_of(x.y)};
}
template <int BK, typename G> __device__ __forceinline__ float2 decays_at(const G* g, int i, int c) {
  const float2 x = unpack_pair(place<BK>(g, i, c));
  return {decay_of(x.x), decay_of(x.y)};
}
__device__ __forceinline__ float2 times(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }
__device__ __forceinline__ float2 times(float x, float2 y) { return {x * y.x, x * y.y}; }

__device__ __forceinline__ float max_of_lanes(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

// 1 / x of a power of 2 from power_below.
__device__ __forceinline__ float inverse_of_power(float x) { return __uint_as_float(0x7f000000u - __float_as_uint(x)); }

// Stores the decays over each block of 8 tokens; a warp takes a block and 64 channels at a time. The block's threads
// pass a barrier before others read them.
template <int THREADS, typename G, int BK>
__device__ __forceinline__ void decay_blocks(float (&over_blocks)[BLOCKS][BK], const G* g) {
#pragma unroll 1
  for (int task = threadIdx.x >> 5; task < BK / 16; task += THREADS / 32) {
    const int block = task % BLOCKS, c = task / BLOCKS * 64 + 2 * own_lane();
    float2 all = decays_at<BK>(g, block * BLOCK, c);
#pragma unroll
    for (int i = 1; i < BLOCK; ++i) all = times(all, decays_at<BK>(g, block * BLOCK + i, c));
    *reinterpret_cast<float2*>(&over_blocks[block][c]) = all;
  }
}

// The sum over lanes of x[lane], in each lane its own.
template <int HALF> __device__ __forceinline__ float sum_in_turn(const float (&x)[2 * HALF]) {
  const bool upper = threadIdx.x & HALF;
  float half[HALF];
#pragma unroll
  for (int n = 0; n < HALF; ++n)
    half[n] = (upper ? x[n + HALF] : x[n]) + __shfl_xor_sync(0xffffffffu, upper ? x[n] : x[n + HALF], HALF);
  if constexpr (HALF == 1) return half[0];
  else return sum_in_turn<HALF / 2>(half);
}

// Calls f(i, j, score) for the rows of a block of 8 tokens and the keys before them, by one warp. BEFORE_GATE: a row
// meets keys before they decay by its own gate.
template <bool BEFORE_GATE, int BK, typename T, typename G, class F>
__device__ __forceinline__ void score_block(const T* rows, const T* k, const G* g, int first, F f) {
  const int lane = own_lane();
  float sums[32] = {};
#pragma unroll 1
  for (int c = 2 * lane; c < BK; c += 64) {
    float2 keys[BLOCK];  // decayed to the present row
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
      const float2 a = decays_at<BK>(g, first + i, c), x = unpack_pair(place<BK>(rows, first + i, c));
#pragma unroll
      for (int j = 0; j < i; ++j) {
        const float2 before = keys[j];
        keys[j] = times(before, a);
        const float2 key = BEFORE_GATE ? before : keys[j];
        float& sum = sums[i * (i - 1) / 2 + j];
        sum = fmaf(x.x, key.x, fmaf(x.y, key.y, sum));
      }
      keys[i] = unpack_pair(place<BK>(k, first + i, c));
    }
  }
  const float score = sum_in_turn<16>(sums);
  int i = 1, j = lane;
  while (j >= i) j -= i++;  // the lane's pair
  if (lane < PAIRS_OF_BLOCK) f(first + i, first + j, score);
}

// The task of a warp of decay_block where a block has 2 * BK threads: a block of tokens, and the lane's two channels.
struct BlockTask {
  int block = int(threadIdx.x >> 5) % BLOCKS, c = int(threadIdx.x >> 5) / BLOCKS * 64 + 2 * own_lane();
};

constexpr int LDS = C + 2;  // the row stride of a float matrix [token, token]

enum Rowed { OF_Q, OF_A };         // x of Axy
enum Columned { WITH_K, WITH_B };  // y of Axy

// Inputs and matrices of a chunk.
template <typename T, typename G, int BK> struct alignas(16) DplrMatrices {
  T rows[2][C * BK], columns[2][C * BK];  // inputs: q and a, k and b
  G g[C * BK];
  union {
    struct {
      // Rows decayed from a border of 8 or 16 tokens before them: 8 of q and 8 of a, twice; 16 of q and 16 of a.
      f16 rows_8[C * BK], rows_16[C * BK];
      f16 columns_8[2][C * BK / 2], columns_16[2][C * BK / 2];  // columns decayed to the border after them
    };
    float from_start[C][BK + 8];  // qd
  };
  T kd[C * BK];
  union {
    f16 to_end[2][C * BK];  // ke and be over `most`
    T Z[2][C * BK];
  };
  float scores[3][C][LDS];  // Aqk, Aqb, and Aak, later overwritten by L
  union {
    float N[C][LDS];
    float over_blocks[BLOCKS][BK];  // decays over blocks of 8 tokens
  };
  union {
    float M[C][LDS];  // Aab
    Matrix<T> H;
  };
  Matrix<T> B;
  Matrix<f16> of_Z[2];                          // the transposes of L and N over `largest`
  float power_rows[2][C], power_columns[2][C];  // powers of 2 by which rows, columns are divided for float16
  float own[2][C];                              // q_i . k_i and q_i . b_i
  float most[2], largest[2];                    // the largest of power_columns; the powers of 2 of L and N
  float whole[BK];                              // the chunk's decays

  __device__ __forceinline__ float& score(int row_kind, int column_kind, int i, int j) {
    return row_kind == OF_A && column_kind == WITH_B ? M[i][j] : scores[2 * row_kind + column_kind][i][j];
  }
};

// Computes power_rows, power_columns and own.
template <int THREADS, typename T, typename G, int BK>
__device__ __forceinline__ void look_at(DplrMatrices<T, G, BK>& s) {
  const int lane = own_lane();
#pragma unroll 1
  for (int i = threadIdx.x >> 5; i < C; i += THREADS / 32) {
    float sums[6] = {};  // squares of q, a, k, b; q . k, q . b
#pragma unroll
    for (int c = 2 * lane; c < BK; c += 64) {
      const float2 q = unpack_pair(place<BK>(s.rows[OF_Q], i, c)), a = unpack_pair(place<BK>(s.rows[OF_A], i, c));
      const float2 k = unpack_pair(place<BK>(s.columns[WITH_K], i, c));
      const float2 b = unpack_pair(place<BK>(s.columns[WITH_B], i, c));
      const auto add = [](float& sum, float2 x, float2 y) { sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum)); };
      add(sums[0], q, q), add(sums[1], a, a), add(sums[2], k, k), add(sums[3], b, b);
      add(sums[4], q, k), add(sums[5], q, b);
    }
#pragma unroll
    for (float& sum : sums) sum = warp_sum(sum);
    if (lane) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      s.power_rows[n][i] = power_below(sums[n]), s.power_columns[n][i] = power_below(sums[2 + n]);
      s.own[n][i] = sums[4 + n];
    }
  }
}

// Stores rows decayed from the chunk's start (kd) and from borders, and columns decayed to its end and to borders, of a
// block of 8 tokens and channels c and c + 1. `queries` gets queries decayed from the start (qd).
template <typename T, typename G, int BK>
__device__ __forceinline__ void decay_block(DplrMatrices<T, G, BK>& s, int block, int c, float2 (&queries)[BLOCK]) {
  const float2 one = {1.f, 1.f};
  const auto over = [&](int n) { return *reinterpret_cast<const float2*>(&s.over_blocks[n][c]); };
  float2 before = one, behind = one;  // decays from the chunk's start to the block, and from it to the chunk's end
#pragma unroll
  for (int n = 0; n < BLOCKS; ++n)
    if (n < block) before = times(before, over(n));
    else if (n > block) behind = times(over(n), behind);
  if (block == BLOCKS - 1) *reinterpret_cast<float2*>(s.whole + c) = times(before, over(block));
  const float2 from_border = block == 3 ? over(2) : one, to_border = block == 0 ? over(1) : one;  // of 16 tokens
  const int first = block * BLOCK;
  float2(&decays)[BLOCK] = queries;
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) decays[n] = decays_at<BK>(s.g, first + n, c);
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    const float most = max_of_lanes(s.power_columns[kind][own_lane()]), of_most = inverse_of_power(most);
    if (block == 0 && c == 0) s.most[kind] = most;
    float2 since = one;
#pragma unroll
    for (int n = BLOCK - 1; n >= 0; --n) {
      const int i = first + n;
      const float2 x = unpack_pair(place<BK>(s.columns[kind], i, c));
      const float2 decayed = times(since, times(inverse_of_power(s.power_columns[kind][i]), x));
      put_pair(place<BK>(s.to_end[kind], i, c), times(of_most, times(times(since, behind), x)));
      if (block % 2 == 0) put_pair(place<BK>(s.columns_8[kind], block / 2 * BLOCK + n, c), decayed);
      if (block < 2) put_pair(place<BK>(s.columns_16[kind], i, c), times(to_border, decayed));
      since = times(since, decays[n]);
    }
  }
  float2 since = one;
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) {
    const int i = first + n;
    const float2 a = unpack_pair(place<BK>(s.rows[OF_A], i, c)), q = unpack_pair(place<BK>(s.rows[OF_Q], i, c));
    put_pair(place<BK>(s.kd, i, c), times(times(before, since), a));
    const float2 of_a = times(since, times(inverse_of_power(s.power_rows[OF_A][i]), a));
    since = times(since, decays[n]);
    const float2 of_q = times(since, times(inverse_of_power(s.power_rows[OF_Q][i]), q));
    queries[n] = times(times(before, since), q);
    if (block % 2) {
      put_pair(place<BK>(s.rows_8, i - 8, c), of_q);
      put_pair(place<BK>(s.rows_8, i, c), of_a);
    }
    if (block >= 2) {
      put_pair(place<BK>(s.rows_16, i - 16, c), times(from_border, of_q));
      put_pair(place<BK>(s.rows_16, i, c), times(from_border, of_a));
    }
  }
}

// Computes scores within blocks of 8 tokens; a warp takes a block's rows and columns of a kind at a time.
template <int THREADS, typename T, typename G, int BK>
__device__ __forceinline__ void score_blocks(DplrMatrices<T, G, BK>& s) {
#pragma unroll 1
  for (int task = threadIdx.x >> 5; task < 4 * BLOCKS; task += THREADS / 32) {
    const int column = task % 2, first = task / 4 * BLOCK;
    const auto store = [&](int row_kind) {
      return [&s, row_kind, column](int i, int j, float score) { s.score(row_kind, column, i, j) = score; };
    };
    if (task / 2 % 2) score_block<true, BK>(s.rows[OF_A], s.columns[column], s.g, first, store(OF_A));
    else score_block<false, BK>(s.rows[OF_Q], s.columns[column], s.g, first, store(OF_Q));
  }
}

// Scores of pairs in different blocks of 8 tokens, by products at borders; and those of tokens with themselves.
template <int THREADS, typename T, typename G, int BK>
__device__ __forceinline__ void score_borders(DplrMatrices<T, G, BK>& s) {
  const int lane = own_lane(), g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int task = threadIdx.x >> 5; task < 12; task += THREADS / 32) {
    float d[2][4] = {};
    const bool near = task >= 8;
    const int kind = task % 2, first = 8 * (task / 2 % 2), half = task / 4 % 2;  // half: rows of q, or of a
    if (near) multiply_rows<BK>(d, s.rows_8, s.columns_8[kind], 2 * first, first);
    else multiply_rows<BK>(d, s.rows_16, s.columns_16[kind], 16 * half, first);
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int lower = x / 2, across = 2 * t + x % 2, row_kind = near ? lower : half;
      const int i = near ? 2 * first + 8 + g : 16 + 8 * lower + g, j = (near ? 2 * first : first) + across;
      s.score(row_kind, kind, i, j) = s.power_rows[row_kind][i] * s.power_columns[kind][j] * (d[0][x] + d[1][x]);
    }
  }
  if (threadIdx.x < 2 * C) {
    const int kind = threadIdx.x / C, i = threadIdx.x % C;
    s.score(OF_Q, kind, i, i) = s.own[kind][i];
  }
}

// Computes column `lane` of N or, if kind is WITH_K, of L, by forward substitution; for one warp.
template <typename T, typename G, int BK>
__device__ __forceinline__ void solve_column(DplrMatrices<T, G, BK>& s, int kind) {
  const int column = threadIdx.x & 31;
  float x[C], largest = 0.f;
#pragma unroll
  for (int i = 0; i < C; ++i) {
    float sums[4] = {};
#pragma unroll
    for (int m = 0; m < i; ++m) sums[m % 4] = fmaf(s.M[i][m], x[m], sums[m % 4]);
    float& at = kind == WITH_K ? s.scores[2][i][column] : s.N[i][column];
    const float given = kind == WITH_K ? at : float(i == column);
    x[i] = given + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
    at = x[i], largest = fmaxf(largest, fabsf(x[i]));
  }
  largest = max_of_lanes(largest);
  if (column == 0) s.largest[kind] = power_below(largest) * power_below(largest);
}

// Computes H, B and of_Z.
template <int THREADS, typename T, typename G, int BK>
__device__ __forceinline__ void multiply_scores(DplrMatrices<T, G, BK>& s) {
  constexpr int EACH = C * C / THREADS;  // neighbouring columns
  const int i = threadIdx.x / (C / EACH), first = threadIdx.x % (C / EACH) * EACH;
  const auto& L = s.scores[2];
  float h[EACH] = {}, b[EACH];
#pragma unroll
  for (int j = 0; j < EACH; ++j) b[j] = s.scores[0][i][first + j];
#pragma unroll 8
  for (int m = 0; m < C; ++m) {
    const float x = s.scores[1][i][m];
#pragma unroll
    for (int j = 0; j < EACH; ++j) h[j] = fmaf(x, s.N[m][first + j], h[j]), b[j] = fmaf(x, L[m][first + j], b[j]);
  }
  const float of_L = 1.f / s.largest[WITH_K], of_N = 1.f / s.largest[WITH_B];
#pragma unroll
  for (int x = 0; x < EACH; x += 2) {
    const int j = first + x;
    put_two(s.H.at(i, j), h[x], h[x + 1]);
    put_two(s.B.at(i, j), b[x], b[x + 1]);
    put_two(s.of_Z[WITH_K].at(i, j), of_L * L[j][i], of_L * L[j + 1][i]);
    put_two(s.of_Z[WITH_B].at(i, j), of_N * s.N[j][i], of_N * s.N[j + 1][i]);
  }
}

// Computes Z, which overwrites to_end, and W times `scale`, which may overwrite kd; a warp has 16
// channels of all tokens at a time.
template <int THREADS, typename T, typename G, int BK>
__device__ __forceinline__ void make_wide(DplrMatrices<T, G, BK>& s, T* W, float scale) {
  const int lane = own_lane(), g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int channel = threadIdx.x / 32 * 16; channel < BK; channel += THREADS / 2) {
    Columns w = {}, z[2] = {};
#pragma unroll
    for (int m = 0; m < C / 16; ++m) {
      multiply_tokens<LOWER, BK>(w[m], s.H, s.kd, 16 * m, channel);
#pragma unroll
      for (int kind = 0; kind < 2; ++kind)
        multiply_tokens<UPPER, BK>(z[kind][m], s.of_Z[kind], s.to_end[WITH_B], 16 * m, channel);
    }
    __syncwarp();  // all lanes have read these channels of kd and to_end
    const float of_b = s.most[WITH_B], of_k = s.most[WITH_K];
#pragma unroll
    for (int m = 0; m < C / 16; ++m)
#pragma unroll
      for (int across = 0; across < 2; ++across)
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          const int i = 16 * m + g + 8 * down, c = channel + 8 * across + 2 * t;
          const auto of = [&](const Columns& x) { return float2{x[m][across][2 * down], x[m][across][2 * down + 1]}; };
          const auto plus = [](float2 x, float2 y) { return float2{x.x + y.x, x.y + y.y}; };
          const float2 query = *reinterpret_cast<const float2*>(&s.from_start[i][c]);
          const float2 key = times(of_k, unpack_pair(place<BK>(s.to_end[WITH_K], i, c)));
          put_pair(place<BK>(W, i, c), times(scale, plus(query, of(w))));
          put_pair(place<BK>(s.Z[WITH_K], i, c), plus(key, times(of_b * s.largest[WITH_K], of(z[WITH_K]))));
          put_pair(place<BK>(s.Z[WITH_B], i, c), times(of_b * s.largest[WITH_B], of(z[WITH_B])));
        }
  }
}
