// what      A chunk of the delta rule under a gate for every channel: queries and keys with decays, and scores of pairs
//           of tokens.
// math      D_ij the decays from token j to token i, of each channel. M = sum_c D_ij k_i k_j below the diagonal,
//           A = sum_c D_ij q_i k_j up to it
// numerics  Pairs within 8 tokens are multiplied in float32 as the recurrence does. All others meet at a border of 8 or
//           16 tokens between them: rows are decayed from it, keys up to it, and rounded to float16, as are keys that
//           go to the chunk's end. Powers of 2 bring rows into its range. A decay is a product of those of the tokens
//           between, so that any gate is exact
#include "delta/chunk.cuh"

constexpr int BLOCK = 8, PAIRS_OF_BLOCK = BLOCK * (BLOCK - 1) / 2;  // tokens whose pairs are multiplied one by one
constexpr int BLOCKS = C / BLOCK;

// The matrices of a chunk.
template <typename T, int BK> struct alignas(16) ChannelMatrices {
  static constexpr int WIDE = BK + 8;
  union {
    struct {
      f16 rows_8[C * BK], rows_16[C * BK];          // behind a border: 8 queries and 8 keys twice; 16 and 16
      f16 keys_8[C * BK / 2], keys_16[C * BK / 2];  // up to it
    };
    float from_start[C][WIDE];  // queries
  };
  T kd[C * BK];  // keys from the chunk's start
  union {
    f16 ke[C * BK];  // keys to the chunk's end
    T Z[C * BK];
  };
  Matrix<T> B;
  Matrix<f16> of_Z;
  Scored of;
  float power[2 * C];             // powers of 2 by which keys, then queries, are larger than what is rounded to float16
  float own[C];                   // q . k of a token
  float whole[BK];                // the chunk's decays; pairs are written
  float over_blocks[BLOCKS][BK];  // decays over blocks of tokens
  float most;                     // the largest power of keys
};

// The power of 2 below the root of a sum of squares; 1 for 0.
__device__ __forceinline__ float power_below(float squares) {
  if (squares == 0.f) return 1.f;
  const int exponent = int(floorf(0.5f * log2_approx(squares)));
  return __uint_as_float(u32(127 + min(max(exponent, -126), 126)) << 23);
}

// Computes 1 / length of each query and key (1 if not `normalized`), their powers of 2, and q . k of each token.
template <int THREADS, typename T, int BK>
__device__ __forceinline__ void look_at(ChannelMatrices<T, BK>& s, const T* q, const T* k, bool normalized) {
  const int lane = own_lane();
#pragma unroll 1
  for (int i = threadIdx.x >> 5; i < C; i += THREADS / 32) {
    float qq = 0.f, kk = 0.f, qk = 0.f;
#pragma unroll
    for (int c = 2 * lane; c < BK; c += 64) {
      const float2 x = unpack_pair(place<BK>(q, i, c)), y = unpack_pair(place<BK>(k, i, c));
      qq = fmaf(x.x, x.x, fmaf(x.y, x.y, qq)), kk = fmaf(y.x, y.x, fmaf(y.y, y.y, kk));
      qk = fmaf(x.x, y.x, fmaf(x.y, y.y, qk));
    }
    qq = warp_sum(qq), kk = warp_sum(kk), qk = warp_sum(qk);
    if (lane) continue;
    const float of_q = normalized ? inverse_root(qq + float(LEAST_SQUARE)) : 1.f;
    const float of_k = normalized ? inverse_root(kk + float(LEAST_SQUARE)) : 1.f;
    s.of.unit[i] = of_k, s.of.unit[C + i] = of_q, s.own[i] = of_q * of_k * qk;
    s.power[i] = power_below(of_k * of_k * kk), s.power[C + i] = power_below(of_q * of_q * qq);
  }
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

// Stores keys decayed from the chunk's start and to its end, and queries and keys decayed from
// and to borders, of a block of 8 tokens and channels c and c + 1. `queries` gets queries decayed from the start (qd).
template <typename T, typename G, int BK>
__device__ __forceinline__ void decay_block(ChannelMatrices<T, BK>& s, const T* q, const T* k, const G* g, int block,
                                            int c, float2 (&queries)[BLOCK]) {
  const float2 one = {1.f, 1.f};
  const auto over = [&](int n) { return *reinterpret_cast<const float2*>(&s.over_blocks[n][c]); };
  float2 before = one, behind = one;  // decays from the chunk's start to the block, and from it to the chunk's end
#pragma unroll
  for (int n = 0; n < BLOCKS; ++n)
    if (n < block) before = times(before, over(n));
    else if (n > block) behind = times(over(n), behind);
  if (block == BLOCKS - 1) *reinterpret_cast<float2*>(s.whole + c) = times(before, over(block));
  const float2 from_border = block == 3 ? over(2) : one, to_border = block == 0 ? over(1) : one;  // of 16 tokens
  const float most = max_of_lanes(s.power[own_lane()]), of_most = inverse_of_power(most);
  if (block == 0 && c == 0) s.most = most;
  const int first = block * BLOCK;
  float2(&decays)[BLOCK] = queries, since = one;
#pragma unroll
  for (int n = BLOCK - 1; n >= 0; --n) {
    const int i = first + n;
    decays[n] = decays_at<BK>(g, i, c);
    const float2 key = times(s.of.unit[i], unpack_pair(place<BK>(k, i, c)));
    const float2 decayed = times(since, times(inverse_of_power(s.power[i]), key));
    put_pair(place<BK>(s.ke, i, c), times(of_most, times(times(since, behind), key)));
    if (block % 2 == 0) put_pair(place<BK>(s.keys_8, block / 2 * BLOCK + n, c), decayed);
    if (block < 2) put_pair(place<BK>(s.keys_16, i, c), times(to_border, decayed));
    since = times(since, decays[n]);
  }
  since = one;
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) {
    const int i = first + n;
    since = times(since, decays[n]);
    const float2 key = times(s.of.unit[i], unpack_pair(place<BK>(k, i, c))), all = times(before, since);
    const float2 query = times(s.of.unit[C + i], unpack_pair(place<BK>(q, i, c)));
    const float2 of_k = times(since, times(inverse_of_power(s.power[i]), key));
    const float2 of_q = times(since, times(inverse_of_power(s.power[C + i]), query));
    put_pair(place<BK>(s.kd, i, c), times(all, key));
    queries[n] = times(all, query);
    if (block % 2) {
      put_pair(place<BK>(s.rows_8, i - 8, c), of_q);
      put_pair(place<BK>(s.rows_8, i, c), of_k);
    }
    if (block >= 2) {
      put_pair(place<BK>(s.rows_16, i - 16, c), times(from_border, of_q));
      put_pair(place<BK>(s.rows_16, i, c), times(from_border, of_k));
    }
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

// Computes scores within blocks of 8 tokens; a warp takes a block's queries or keys at a time.
template <int THREADS, typename T, typename G, int BK>
__device__ __forceinline__ void score_blocks(ChannelMatrices<T, BK>& s, const T* q, const T* k, const G* g) {
#pragma unroll 1
  for (int task = threadIdx.x >> 5; task < 2 * BLOCKS; task += THREADS / 32) {
    const bool queries = task % 2;
    score_block<false, BK>(queries ? q : k, k, g, task / 2 * BLOCK, [&](int i, int j, float score) {
      (queries ? s.of.A : s.of.M)[i][j] = s.of.unit[(queries ? C : 0) + i] * s.of.unit[j] * score;
    });
  }
}

// Computes scores of pairs in different blocks of 8 tokens, from rows and keys decayed to the border between them, and
// stores the scores of tokens with themselves.
template <int THREADS, typename T, int BK> __device__ __forceinline__ void score_borders(ChannelMatrices<T, BK>& s) {
  const int lane = own_lane(), g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int task = threadIdx.x >> 5; task < 6; task += THREADS / 32) {
    float d[2][4] = {};
    const bool near = task >= 4;
    const int column = 8 * (task % 2), half = task / 2 % 2;  // of 16 tokens: keys; rows are queries, then keys
    if (near) multiply_rows<BK>(d, s.rows_8, s.keys_8, 2 * column, column);
    else multiply_rows<BK>(d, s.rows_16, s.keys_16, 16 * half, column);
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int lower = x / 2, across = 2 * t + x % 2;
      const int row = near ? 2 * column + 8 + g : 16 + 8 * lower + g, key = (near ? 2 * column : column) + across;
      const bool of_key = near ? lower : half;
      (of_key ? s.of.M : s.of.A)[row][key] = s.power[(of_key ? 0 : C) + row] * s.power[key] * (d[0][x] + d[1][x]);
    }
  }
  if (threadIdx.x < C) s.of.A[threadIdx.x][threadIdx.x] = s.own[threadIdx.x];
}

// The task of a warp of decay_block where a block has 2 * BK threads: a block of tokens, and the lane's two channels.
struct BlockTask {
  int block = int(threadIdx.x >> 5) % BLOCKS, c = int(threadIdx.x >> 5) / BLOCKS * 64 + 2 * own_lane();
};

// Computes Z, which overwrites ke, and W times `scale`, which may overwrite kd; a warp has 16
// channels of all tokens at a time.
template <int THREADS, typename T, int BK>
__device__ __forceinline__ void make_wide(ChannelMatrices<T, BK>& s, T* W, float scale) {
  const int lane = own_lane(), g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int channel = threadIdx.x / 32 * 16; channel < BK; channel += THREADS / 2) {
    Columns w = {}, z = {};
#pragma unroll
    for (int m = 0; m < C / 16; ++m) {
      multiply_tokens<LOWER, BK>(w[m], s.B, s.kd, 16 * m, channel);
      multiply_tokens<UPPER, BK>(z[m], s.of_Z, s.ke, 16 * m, channel);
    }
    __syncwarp();  // all lanes have read these channels of kd and ke
#pragma unroll
    for (int m = 0; m < C / 16; ++m)
#pragma unroll
      for (int across = 0; across < 2; ++across)
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          const int i = 16 * m + g + 8 * down, c = channel + 8 * across + 2 * t;
          const float2 query = *reinterpret_cast<const float2*>(&s.from_start[i][c]);
          const float *of_w = w[m][across] + 2 * down, *of_z = z[m][across] + 2 * down;
          put_pair(place<BK>(W, i, c), {scale * (query.x - of_w[0]), scale * (query.y - of_w[1])});
          put_pair(place<BK>(s.Z, i, c), {s.most * of_z[0], s.most * of_z[1]});
        }
  }
}
