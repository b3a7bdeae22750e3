// what      What the Hopper backward sweeps share: how chunks come and go, their decays, and products of tokens.
// math      e_i the sum of the gates from the chunk's middle to token i (before the middle: the negative sum of those
//           behind i), so that q_i 2^(e_i - e_j) k_j is a product of two factors. Where |e| stays under FAR they are mild.
// limits    sm_90a; bfloat16
#include "policy.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int CHUNK = 32;
constexpr float FAR = 54;       // nats: float32 and bfloat16 end at 88

// A chunk's rows of some array, D values wide: panels of 128 bytes a row in the tensor cores' 128-byte swizzle.
template <typename X> constexpr int PANEL = 128 / sizeof(X);
template <typename X, int D> using Tile = X[D / PANEL<X>][CHUNK][PANEL<X>];

// The address of 16-byte piece `piece` of row `row` of a panel.
template <typename X> __device__ __forceinline__ X* swizzled(X* panel, int row, int piece) {
  return reinterpret_cast<X*>(reinterpret_cast<char*>(panel) + row * 128 + ((piece ^ row) & 7) * 16);
}

// Where a block works: a (sequence, head), and its first chunk among those of all blocks.
struct Place {
  i32 sequence, batch, head, start, tokens;
  i64 pair, chunk;
};

__device__ __forceinline__ Place place_of(const Shape& shape, u32 block) {
  const u32 H = u32(shape.H), count = u32(shape.count), n = block / H, h = block % H;
  const Span span = tokens_of(shape, n % count);
  return {i32(n), i32(n / count), i32(h), i32(span.start), i32(span.stop - span.start), i64(block),
          (i64(n / count) * H + h) * (shape.T / CHUNK + count) + span.start / CHUNK + n % count};
}

// ---- chunks come and go: one warp ----------------------------------------------------------------------------

// Columns of a panel.
template <typename X, int PANELS> __device__ __forceinline__ constexpr u32 columns_of(X (&)[PANELS][CHUNK][PANEL<X>]) {
  return PANEL<X>;
}

// Calls f(16 bytes of the tile, row, column) for a whole tile.
template <typename X, int PANELS, class F>
__device__ __forceinline__ void each_piece(X (&tile)[PANELS][CHUNK][PANEL<X>], F f) {
#pragma unroll 1
  for (int at = threadIdx.x & 31; at < PANELS * CHUNK * 8; at += 32) {
    const int panel = at / (CHUNK * 8), row = at / 8 % CHUNK, piece = at % 8;
    f(reinterpret_cast<uint4*>(swizzled(tile[panel][0], row, piece)), row, panel * PANEL<X> + piece * (PANEL<X> / 8));
  }
}

// Starts to copy a chunk to shared memory; `full`, at which all lanes arrive, ends its phase when all of it is there. each_input calls
// f(tile, its map, its rows, its width). What lies behind the sequence's end becomes zero.
template <class Inputs>
__device__ __forceinline__ void fetch_chunk(Barrier& full, const Place& at, int token, Inputs each_input) {
  const int rows = at.tokens - token;
  if (rows >= CHUNK) {
    if (threadIdx.x & 31) return barrier_arrive(full);
    u32 bytes = 0;
    each_input([&](auto& tile, const TensorMap&, auto, i64) { bytes += sizeof tile; });
    barrier_expect(full, bytes);
    each_input([&](auto& tile, const TensorMap& map, auto, i64) {
      for (u32 panel = 0; panel < sizeof tile / sizeof tile[0]; ++panel)
        tensor_load(tile[panel], map, full, i32(panel * columns_of(tile)), at.start + token, at.head, at.batch);
    });
    return;
  }
  each_input([&](auto& tile, const TensorMap&, auto from, i64 width) {
    each_piece(tile, [&](uint4* to, int row, int column) {
      const bool inside = row < rows && column < width;
      const auto* row_of = from.row(at.batch, at.head, at.start + token + (inside ? row : 0));
      *to = inside ? *reinterpret_cast<const uint4*>(row_of + column) : uint4{0, 0, 0, 0};
    });
  });
  fence_async();
  barrier_arrive(full);
}

// Copies a chunk's results from shared memory, and returns when that may be filled again.
template <class Outputs> __device__ __forceinline__ void store_chunk(const Place& at, int token, Outputs each_output) {
  const int rows = at.tokens - token;
  if (rows >= CHUNK) {
    if ((threadIdx.x & 31) == 0) {
      each_output([&](auto& tile, const TensorMap& map, auto, i64) {
        for (u32 panel = 0; panel < sizeof tile / sizeof tile[0]; ++panel)
          tensor_store(map, tile[panel], i32(panel * columns_of(tile)), at.start + token, at.head, at.batch);
      });
      tensor_store_wait();
    }
  } else {
    each_output([&](auto& tile, const TensorMap&, auto to, i64 width) {
      each_piece(tile, [&](uint4* from, int row, int column) {
        if (row < rows && column < width)
          *reinterpret_cast<uint4*>(to.row(at.batch, at.head, at.start + token + row) + column) = *from;
      });
    });
    fence_async();
  }
  __syncwarp();
}

// ---- two bfloat16 numbers, side by side or one that adds to the other --------------------------------------------

__device__ __forceinline__ float low(u32 two) { return __uint_as_float(two << 16); }
__device__ __forceinline__ float high(u32 two) { return __uint_as_float(two & 0xffff0000u); }

// What rounding leaves over of two values.
__device__ __forceinline__ u32 remainder_of(u32 rounded, float x, float y) {
  return pack<bf16>(x - low(rounded), y - high(rounded));
}

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

// ---- channels: a warp has 16 of them and all tokens ----------------------------------------------------------
// With g = lane / 4 and t = lane % 4 a lane has channels g and g + 8 and tokens 8n + 2t, 8n + 2t + 1, n from 0 to 3:
//   float x[16]:     x[4n + 2h + p] is channel g + 8h of token 8n + 2t + p, as a product's accumulators are
//   u32 x[2][4]:     x[s][m] two tokens 16s + 8(m / 2) + 2t, + 1 of channel g + 8(m % 2), as its operand A is

// Calls f(where in x[16] the first of two tokens is, s, m).
template <class F> __device__ __forceinline__ void each_two(F f) {
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) f(4 * n + 2 * h, n / 2, n % 2 * 2 + h);
}

// Where this lane's row begins of the four 8x8 matrices that are 16 rows from `row` on of the warp's 16 columns.
template <typename X> __device__ __forceinline__ X* matrix_row(X* panel, int row) {
  const int thread = opaque(threadIdx.x);
  return swizzled(panel, row + (thread & 7) + (thread >> 4 & 1) * 8, thread / 32 % 4 * 2 + (thread >> 3 & 1));
}
__device__ __forceinline__ void load_channels(u32 (&x)[2][4], bf16 (&panel)[CHUNK][64]) {
  ldmatrix_x4_trans(x[0], matrix_row(panel[0], 0));
  ldmatrix_x4_trans(x[1], matrix_row(panel[0], 16));
}
__device__ __forceinline__ void store_channels(bf16 (&panel)[CHUNK][64], const u32 (&x)[2][4]) {
  stmatrix_x4_trans(matrix_row(panel[0], 0), x[0]);
  stmatrix_x4_trans(matrix_row(panel[0], 16), x[1]);
}

// The same of a float32 array; warpgroup's 64 channels are two panels.
template <class F> __device__ __forceinline__ void each_float(float (*panels)[CHUNK][32], F f) {
  const int thread = threadIdx.x, g = thread >> 2 & 7, t = thread & 3, warp = thread / 32 % 4;
  each_two([&](int at, int, int) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int c = 16 * (warp % 2) + g + 8 * (at / 2 % 2), token = 2 * t + p;
      f(at + p, swizzled(panels[warp / 2][at / 4 * 8], token, c / 4)[c % 4]);
    }
  });
}
__device__ __forceinline__ void load_values(float (&x)[16], bf16 (*panels)[CHUNK][64]) {
  u32 two[2][4];
  load_channels(two, *panels);
  each_two([&](int at, int s, int m) { x[at] = low(two[s][m]), x[at + 1] = high(two[s][m]); });
}
__device__ __forceinline__ void load_values(float (&x)[16], float (*panels)[CHUNK][32]) {
  each_float(panels, [&](int at, float& value) { x[at] = value; });
}
__device__ __forceinline__ void store_values(bf16 (*panels)[CHUNK][64], const float (&x)[16]) {
  u32 two[2][4];
  each_two([&](int at, int s, int m) { two[s][m] = pack<bf16>(x[at], x[at + 1]); });
  store_channels(*panels, two);
}
__device__ __forceinline__ void store_values(float (*panels)[CHUNK][32], const float (&x)[16]) {
  each_float(panels, [&](int at, float& value) { value = x[at]; });
}
// A tile's panels of a warpgroup's 64 channels.
template <typename X, int PANELS>
__device__ __forceinline__ auto own_panels(X (&tile)[PANELS][CHUNK][PANEL<X>], int warpgroup) {
  return tile + warpgroup * (64 / PANEL<X>);
}

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

// ---- states: a warpgroup has 64 channels and all columns of V ------------------------------------------------

// Calls f(two values, where they are in [K, V]) for those of this lane that exist.
template <int BV, typename P, class F>
__device__ __forceinline__ void each_of_state(float (&S)[BV / 2], P* state, const Shape& shape, int channel, F f) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int n = 0; n < BV / 8; ++n)
      if (channel + 8 * h < shape.K && 8 * n < shape.V)
        f(S[4 * n + 2 * h], S[4 * n + 2 * h + 1], state + (channel + 8 * h) * shape.V + 8 * n + 2 * t);
    __syncwarp();
  }
}

// S <- diag(by) S, and x[channel, token] = S x^T of that S, or of S before it where READ_FIRST, which is under way. S goes in as
// the sum of two bfloat16 numbers, which are given to f(columns / 16, the first, the second).
template <int BV, bool READ_FIRST = false, class F>
__device__ __forceinline__ void read_state(float (&x)[16], float (&S)[BV / 2], const float (&by)[2],
                                           bf16 (&tokens)[BV / 64][CHUNK][64], F f) {
  constexpr int PART = 2, PARTS = BV / 16 / PART;
  u32 rounded[2][PART][4], rest[2][PART][4];
  const auto copy = [&](int part) {
#pragma unroll
    for (int n = 0; n < PART; ++n) {
      float* from = S + 8 * (part * PART + n);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        float &a = from[2 * m], &b = from[2 * m + 1];
        if (!READ_FIRST) a *= by[m & 1], b *= by[m & 1];
        rounded[part & 1][n][m] = pack<bf16>(a, b);
        rest[part & 1][n][m] = remainder_of(rounded[part & 1][n][m], a, b);
        if (READ_FIRST) a *= by[m & 1], b *= by[m & 1];
      }
      f(part * PART + n, rounded[part & 1][n], rest[part & 1][n]);
    }
  };
  const auto multiply = [&](int part) {
#pragma unroll
    for (int n = 0; n < PART; ++n) {
      const int tile = part * PART + n;
      const u64 b = wgmma_tile(tokens[tile / 4], 16, 1024) + tile % 4 * 32 / 16;
      wgmma<bf16, CHUNK, false>(x, rounded[part & 1][n], b, tile > 0);
      wgmma<bf16, CHUNK, false>(x, rest[part & 1][n], b, true);
    }
    wgmma_commit();
  };
  copy(0);
  copy(1);
  wgmma_fence();
  multiply(0);
  multiply(1);
#pragma unroll
  for (int part = 2; part < PARTS; ++part) {
    wgmma_wait<1>();
    copy(part);
    wgmma_fence();
    multiply(part);
  }
}

// S += (x + rest)^T tokens, under way; x and rest the warp's channels.
template <int BV>
__device__ __forceinline__ void write_state(float (&S)[BV / 2], const u32 (&x)[2][4], const u32 (&rest)[2][4],
                                            bf16 (&tokens)[BV / 64][CHUNK][64]) {
  const u64 b = wgmma_tile(tokens, CHUNK * 128, 1024);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    wgmma<bf16, BV, true>(S, x[half], b + half * 16 * 128 / 16, true);
    wgmma<bf16, BV, true>(S, rest[half], b + half * 16 * 128 / 16, true);
  }
}

// y[channel, i] (+)= sum_j x[channel, j] pairs[i, j], under way; BY_KEY: y[channel, j] with sum_i. Pairs as put_pairs has
// them: of `REST` their second numbers.
template <bool BY_KEY, bool REST = false>
__device__ __forceinline__ void multiply_pairs(float (&y)[16], const u32 (&x)[2][4], bf16 (&pairs)[CHUNK][64], bool accumulate) {
  const u64 b = wgmma_tile(pairs, 16, 1024) + (REST ? 64 / 16 : 0);
  wgmma<bf16, CHUNK, BY_KEY>(y, x[0], b, accumulate);
  wgmma<bf16, CHUNK, BY_KEY>(y, x[1], b + (BY_KEY ? 16 * 128 : 32) / 16, true);
}

// ---- one gate for all channels of a token: decays belong to tokens, and no gate is too strong --------------------

// Of a chunk, from sums of the gates that lie between, never a difference of such sums.
struct TokenDecays {
  float start[CHUNK];                           // from the chunk's start to a token, both inclusive
  float between[CHUNK][CHUNK + 8];              // [query, key]: behind the key to the query inclusive; 8 rows lie in all banks

  __device__ float all() const { return start[CHUNK - 1]; }
  __device__ const float* end() const { return between[CHUNK - 1]; }         // behind a token to the chunk's end
};

// The gate of the chunk's token that is this lane's; none behind the sequence's end.
__device__ __forceinline__ float gate_of(const Rows<const float>& gates, const Place& at, int token) {
  token += threadIdx.x & 31;
  return token >= 0 && token < at.tokens ? *gates.row(at.batch, at.head, at.start + token) : 0.f;
}

// By a warp, from `gate_of`.
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

// This lane's tokens 8n + 2t + p of 32: x[2n + p].
__device__ __forceinline__ void load_tokens(float (&x)[8], const float* from, float scale = 1.f) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 two = *reinterpret_cast<const float2*>(from + 8 * n + 2 * (threadIdx.x & 3));
    x[2 * n] = scale * two.x, x[2 * n + 1] = scale * two.y;
  }
}

// x times factors of tokens, as the sum of two bfloat16 numbers.
__device__ __forceinline__ void decay_tokens(u32 (&x)[2][4], u32 (&rest)[2][4], const float (&by)[8]) {
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
