// what      What the Hopper backward sweeps share beside warpgroup.cuh: decays of chunks, and products of tokens.
// math      e_i the sum of the gates from the chunk's middle to token i (before the middle: the negative sum of those
//           behind i), so that q_i 2^(e_i - e_j) k_j is a product of two factors. Where |e| stays under FAR they are mild.
// limits    sm_90a; bfloat16
#include "read_order.cuh"

constexpr int CHUNK = 32;
constexpr float FAR = 54;       // nats: float32 and bfloat16 end at 88

#include "warpgroup.cuh"

// ---- products of tokens with tokens: a warp ------------------------------------------------------------------

// The three 16 x 16 blocks of 32 x 32 pairs with no key behind its query.
__device__ __forceinline__ int queries_of(int block) { return block ? 16 : 0; }
__device__ __forceinline__ int keys_of(int block) { return block == 2 ? 16 : 0; }

// The operands of a block's products: 16 channels from 8 c on of 16 rows of a and of b.
template <int PANELS>
__device__ __forceinline__ void load_queries(u32 (&x)[4], bf16 (&a)[PANELS][CHUNK][64], int block, int c, int lane) {
  ldmatrix_x4(x, swizzled(a[c / 8][0], queries_of(block) + (lane & 15), c % 8 + (lane >> 4)));
}
template <int PANELS>
__device__ __forceinline__ void load_keys(u32 (&y)[2][2], bf16 (&b)[PANELS][CHUNK][64], int block, int c, int lane) {
  u32 two[4];
  ldmatrix_x4(two, swizzled(b[c / 8][0], keys_of(block) + (lane & 7) + (lane >> 4) * 8, c % 8 + (lane >> 3 & 1)));
  y[0][0] = two[0], y[0][1] = two[1], y[1][0] = two[2], y[1][1] = two[3];
}
__device__ __forceinline__ void multiply(float (&d)[2][4], const u32 (&x)[4], const u32 (&y)[2][2]) {
  mma_bf16(d[0], x, y[0]);
  mma_bf16(d[1], x, y[1]);
}

// D[queries, keys] = a b^T, a block.
template <int PANELS>
__device__ __forceinline__ void pair_products(float (&d)[2][4], bf16 (&a)[PANELS][CHUNK][64], bf16 (&b)[PANELS][CHUNK][64],
                                              int block, int lane) {
#pragma unroll
  for (int i = 0; i < 8; ++i) d[i / 4][i % 4] = 0.f;
#pragma unroll 4
  for (int c = 0; c < PANELS * 8; c += 2) {
    u32 x[4], y[2][2];
    load_queries(x, a, block, c, lane);
    load_keys(y, b, block, c, lane);
    multiply(d, x, y);
  }
}

// Stores one as rows of queries, with f(query, key, value) for each value: as the sum of two bfloat16 numbers, the second 32
// columns on.
template <class F>
__device__ __forceinline__ void put_pairs(bf16 (&tile)[CHUNK][64], const float (&d)[2][4], int block, int lane, F f) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = queries_of(block) + g + 8 * half, j = keys_of(block) + 8 * n + 2 * t;
      const float x = f(i, j, d[n][2 * half]), y = f(i, j + 1, d[n][2 * half + 1]);
      const u32 rounded = pack<bf16>(x, y);
      reinterpret_cast<u32*>(swizzled(tile[0], i, j / 8))[t] = rounded;
      reinterpret_cast<u32*>(swizzled(tile[0], i, j / 8 + 4))[t] = remainder_of(rounded, x, y);
    }
}

// ---- channels -----------------------------------------------------------------------------------------------

// The sum over the four lanes of a channel.
__device__ __forceinline__ float channel_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Sums over the warp's channels of x[2n + p], which is this lane's share of token 8n + 2t + p.
__device__ __forceinline__ void put_token_sums(float* to, float (&x)[8]) {
  const int thread = opaque(threadIdx.x), g = thread >> 2 & 7, t = thread & 3;
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {     // lane g ends with value g
    const bool upper = g & half;
#pragma unroll
    for (int n = 0; n < half; ++n) {
      const float other = __shfl_xor_sync(0xffffffffu, upper ? x[n] : x[n + half], 4 * half);
      x[n] = (upper ? x[n + half] : x[n]) + other;
    }
  }
  to[g / 2 * 8 + 2 * t + g % 2] = x[0];
}

// Ones where a token of a half is summed up into another, as operands B.
template <bool BEFORE> __device__ __forceinline__ void ones(u32 (&b)[2][2]) {
  const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = 2 * t + 8 * r, end = 8 * n + g + !BEFORE;
      b[n][r] = (token < end ? 0x3f80u : 0u) | (token + 1 < end ? 0x3f800000u : 0u);
    }
}

// A chunk's decays: factors of queries (with `scale`) and keys, and over the halves.
struct Decays {
  float q[16], k[16], early[2], late[2];
};

// Whether they are mild.
template <class Policy, typename G>
__device__ __forceinline__ bool decays_of(Decays& d, G (*panels)[CHUNK][PANEL<G>], float scale) {
  constexpr u32 ALL[2] = {0x3f803f80u, 0x3f803f80u};
  u32 g[2][4], rest[2][4], until[2][2], before[2][2];
  if constexpr (sizeof(G) == 2) {
    load_channels(g, *panels);
  } else {
    float x[16];
    load_values(x, panels);
    each_two([&](int at, int s, int m) {
      g[s][m] = pack<bf16>(x[at], x[at + 1]);
      rest[s][m] = remainder_of(g[s][m], x[at], x[at + 1]);
    });
  }
  ones<false>(until);
  if (Policy::reads_before_write) ones<true>(before);
  const auto sums = [&](float* to, int s, const u32(&b)[2]) {
    float x[4] = {};
    mma_bf16(x, g[s], b);
    if constexpr (sizeof(G) == 4) mma_bf16(x, rest[s], b);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = x[i];
  };
  bool mild = true;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    float all[4], with[8], without[8];
    sums(all, s, ALL);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      sums(with + 4 * n, s, until[n]);
      if (Policy::reads_before_write) sums(without + 4 * n, s, before[n]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      (s ? d.late : d.early)[h] = exp2_approx(LOG2E * all[2 * h]);
      mild &= fabsf(all[2 * h]) <= FAR;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float from = s ? 0.f : all[i & 2], e = with[i] - from;
      mild &= fabsf(e) <= FAR;
      d.k[8 * s + i] = exp2_approx(-LOG2E * e);
      d.q[8 * s + i] = scale * exp2_approx(LOG2E * (Policy::reads_before_write ? without[i] - from : e));
    }
    __syncwarp();                               // else both halves' are made at once: there are no registers for that
  }
  return mild;
}

// x times factors, in bfloat16.
__device__ __forceinline__ void decayed(u32 (&x)[2][4], const float (&by)[16]) {
  each_two([&](int at, int s, int m) { x[s][m] = pack<bf16>(low(x[s][m]) * by[at], high(x[s][m]) * by[at + 1]); });
}

// What that left over, from x as it was.
__device__ __forceinline__ void left_over(u32 (&x)[2][4], const u32 (&decayed)[2][4], const float (&by)[16]) {
  each_two([&](int at, int s, int m) {
    x[s][m] = remainder_of(decayed[s][m], low(x[s][m]) * by[at], high(x[s][m]) * by[at + 1]);
  });
}

// ---- segments of sequences, P each, in either direction ---------------------------------------------------------

__device__ __forceinline__ bool is_first(const Place& at, i64 P, bool backwards) {
  return at.sequence % P == (backwards ? P - 1 : 0);
}
__device__ __forceinline__ bool is_last(const Place& at, i64 P, bool backwards) { return is_first(at, P, !backwards); }

// Where among the states that segments of both directions start from this one's is.
__device__ __forceinline__ i64 slot_of(const Place& at, bool backwards) { return (backwards ? gridDim.x / 2 : 0) + at.pair; }

// The first segment starts from the given state, or from zeros, and puts it among the others.
template <int BV>
__device__ __forceinline__ void start(float (&S)[BV / 2], const float* given, float* states, const Shape& shape, const Place& at,
                                      i64 P, bool backwards, int channel) {
  if (!is_first(at, P, backwards)) return;
  const i64 size = shape.K * shape.V;
  if (given)
    each_of_state<BV>(S, given + (at.sequence / P * shape.H + at.head) * size, shape, channel, [](float& x, float& y, const float* from) {
      const float2 two = *reinterpret_cast<const float2*>(from);
      x = two.x, y = two.y;
    });
  each_of_state<BV>(S, states + slot_of(at, backwards) * size, shape, channel, [](float& x, float& y, float* to) {
    *reinterpret_cast<float2*>(to) = {x, y};
  });
}

// ---- one gate for all channels of a token: decays belong to tokens, and no gate is too strong --------------------

// Of a chunk, from sums of the gates that lie between, never a difference of such sums.
struct TokenDecays {
  float start[CHUNK];                           // from the chunk's start to a token, both inclusive
  float between[CHUNK][CHUNK + 8];              // [query, key]: behind the key to the query inclusive; 8 rows lie in all banks

  __device__ float all() const { return start[CHUNK - 1]; }
  __device__ const float* end() const { return between[CHUNK - 1]; }         // behind a token to the chunk's end
};

// By a warp, each lane with its token's gate.
__device__ __forceinline__ void put_decays(TokenDecays& to, float gate) {
  const int lane = threadIdx.x & 31;
  float from_start = 0.f, own = 0.f, from_key = 0.f;
  gate *= LOG2E;
#pragma unroll 8
  for (int i = 0; i < CHUNK; ++i) {
    const float next = __shfl_sync(0xffffffffu, gate, i);
    from_start += next;
    if (i == lane) own = from_start;
    if (i > lane) from_key += next;
    to.between[i][lane] = exp2_approx(from_key);
  }
  to.start[lane] = exp2_approx(own);
}

// x times factors of tokens, as the sum of two bfloat16 numbers.
__device__ __forceinline__ void decay_tokens(Operand& x, Operand& rest, const float (&by)[8]) {
  each_two([&](int at, int s, int m) {
    const float first = low(x[s][m]) * by[at / 4 * 2], second = high(x[s][m]) * by[at / 4 * 2 + 1];
    x[s][m] = pack<bf16>(first, second);
    rest[s][m] = remainder_of(x[s][m], first, second);
  });
}

// The decays between the tokens of a block of pairs, laid out as their products are; 0 for a key behind its query.
__device__ __forceinline__ void load_decays(float (&d)[2][4], const TokenDecays& decays, int block, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = queries_of(block) + g + 8 * half, j = keys_of(block) + 8 * n + 2 * t;
      const float2 two = *reinterpret_cast<const float2*>(&decays.between[i][j]);
      d[n][2 * half] = j <= i ? two.x : 0.f, d[n][2 * half + 1] = j < i ? two.y : 0.f;
    }
}
