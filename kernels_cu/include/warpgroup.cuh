// what      What Hopper's kernels share whose warpgroups hold states while one warp moves chunks: how chunks come and
//           go, states, products with them. CHUNK, the tokens of a chunk, is the including kernel's.
// limits    sm_90a; bfloat16
#include "wgmma.cuh"
#include "swizzled.cuh"
#include "tensor.cuh"

// A chunk's rows of some array, D values wide: panels of 128 bytes a row in the tensor cores' 128-byte swizzle.
template <typename X> constexpr int PANEL = 128 / sizeof(X);
template <typename X, int D> using Tile = X[D / PANEL<X>][CHUNK][PANEL<X>];

// Where a block works: a (sequence, head), and its first chunk among those of all blocks.
struct WorkTile {
  i32 sequence, batch, head, start, tokens, T;  // T: tokens that the arrays have
  i64 pair, chunk;
};

__device__ __forceinline__ WorkTile work_tile(const Shape& shape, u32 block) {
  const u32 H = u32(shape.H), count = u32(shape.count), n = block / H, h = block % H;
  const Span span = tokens_of(shape, n % count);
  return {i32(n),
          i32(n / count),
          i32(h),
          i32(span.start),
          i32(span.stop - span.start),
          i32(shape.T),
          i64(block),
          (i64(n / count) * H + h) * (shape.T / CHUNK + count) + span.start / CHUNK + n % count};
}

// ---- chunks come and go: one warp ----------------------------------------------------------------------------

// Columns of a panel.
template <typename X, int PANELS> __device__ __forceinline__ constexpr u32 columns_of(X (&)[PANELS][CHUNK][PANEL<X>]) {
  return PANEL<X>;
}

// Calls f(16 bytes of a tile, where they are in memory, whether they are among the first so many rows and columns); the
// tile begins at `to`, rows `stride` apart. In few instructions, since one warp does all this.
template <typename X, int PANELS, typename P, class F>
__device__ __forceinline__ void each_piece(X (&tile)[PANELS][CHUNK][PANEL<X>], P* to, i64 stride, int rows, int columns,
                                           F f) {
  const int first = threadIdx.x >> 3 & 3, piece = threadIdx.x & 7;
#pragma unroll 1
  for (int panel = 0; panel < PANELS; ++panel) {
    const int column = panel * PANEL<X> + piece * (PANEL<X> / 8), inside = column < columns ? rows : 0;
    int place = swizzled_offset(first, piece);
    P* at = to + first * stride + column;
#pragma unroll 1
    for (int row = first; row < CHUNK; row += 4, at += 4 * stride, place = (place + 4 * 128) ^ 64)
      f(reinterpret_cast<uint4*>(at_offset(tile[panel], place)), at, row < inside);
  }
}

// Whether boxes of a chunk have tokens of its sequence alone. Behind an array's end copies read zeros, and store none.
__device__ __forceinline__ bool fills_boxes(const WorkTile& at, int token) {
  return at.tokens - token >= CHUNK || at.start + at.tokens == at.T;
}

// Whether some array has its tokens backwards in memory, which tensor maps cannot have.
template <class Arrays> __device__ __forceinline__ bool runs_backwards(Arrays each_array) {
  bool found = false;
  each_array([&](auto&, const TensorMap&, auto rows, i64, i32 = 0, bool = false) { found |= rows.t < 0; });
  return found;
}

// Starts to copy a chunk to shared memory; `full`, at which all lanes arrive, ends its phase when all of it is there.
// each_input calls f(tile, its map, its rows, its width, its first column). What lies behind the sequence's end becomes
// zero.
template <class Inputs>
__device__ __forceinline__ void fetch_chunk(Barrier& full, const WorkTile& at, int token, Inputs each_input) {
  if (fills_boxes(at, token) && !runs_backwards(each_input)) {
    if (threadIdx.x & 31) return barrier_arrive(full);
    u32 bytes = 0;
    each_input([&](auto& tile, const TensorMap&, auto, i64, i32 = 0) { bytes += sizeof tile; });
    barrier_expect(full, bytes);
    each_input([&](auto& tile, const TensorMap& map, auto, i64, i32 first = 0) {
      for (u32 panel = 0; panel < sizeof tile / sizeof tile[0]; ++panel)
        tensor_load(tile[panel], map, full, first + i32(panel * columns_of(tile)), at.start + token, at.head, at.batch);
    });
    return;
  }
  each_input([&](auto& tile, const TensorMap&, auto from, i64 width, i32 first = 0) {
    const auto* const start = from.row(at.batch, at.head, at.start + token) + first;
    each_piece(
        tile, start, from.t, at.tokens - token, int(width) - first,
        [](uint4* to, const auto* from, bool inside) { cp_async<16>(to, from, inside); });  // all under way at once
  });
  cp_async_commit();
  cp_async_wait<0>();
  fence_async();
  barrier_arrive(full);
}

// Copies a chunk's results from shared memory, and returns when that may be filled again. each_output is as each_input
// above, and may say last whether results add to what the array holds.
template <class Outputs>
__device__ __forceinline__ void store_chunk(const WorkTile& at, int token, Outputs each_output) {
  if (fills_boxes(at, token) && !runs_backwards(each_output)) {
    if ((threadIdx.x & 31) == 0) {
      each_output([&](auto& tile, const TensorMap& map, auto, i64, i32 first = 0, bool adds = false) {
        for (u32 panel = 0; panel < sizeof tile / sizeof tile[0]; ++panel) {
          const i32 column = first + i32(panel * columns_of(tile));
          tensor_store_or_add(map, tile[panel][0], column, at.start + token, at.head, at.batch, adds);
        }
      });
      tensor_store_wait();
    }
  } else {
    each_output([&](auto& tile, const TensorMap&, auto to, i64 width, i32 first = 0, bool adds = false) {
      auto* const start = to.row(at.batch, at.head, at.start + token) + first;
      each_piece(tile, start, to.t, at.tokens - token, int(width) - first, [&](auto* from, auto* to, bool inside) {
        if (!inside) return;
        if (adds) add_piece(to, reinterpret_cast<decltype(to)>(from));
        else *reinterpret_cast<uint4*>(to) = *from;
      });
    });
    commit_adds();
    tensor_store_wait();
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

// ---- channels: a warp has 16 of them and all tokens ----------------------------------------------------------
// With g = lane / 4 and t = lane % 4 a lane has channels g and g + 8 and of every 8 tokens 8n + 2t and 8n + 2t + 1:
//   Values x:    x[4n + 2h + p] is channel g + 8h of token 8n + 2t + p, as a product's accumulators are
//   Operand x:   x[s][m] two tokens 16s + 8(m / 2) + 2t, + 1 of channel g + 8(m % 2), as its operand A is
using Values = float[CHUNK / 2];
using Operand = u32[CHUNK / 16][4];

// Calls f(where in Values the first of two tokens is, s, m).
template <class F> __device__ __forceinline__ void each_two(F f) {
#pragma unroll
  for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) f(4 * n + 2 * h, n / 2, n % 2 * 2 + h);
}

// Where this lane's row begins of the four 8x8 matrices that are 16 rows from `row` on of the warp's 16 columns.
template <typename X> __device__ __forceinline__ X* matrix_row(X* panel, int row) {
  const int thread = opaque(threadIdx.x);
  return swizzled(panel, row + (thread & 7) + (thread >> 4 & 1) * 8, thread / 32 % 4 * 2 + (thread >> 3 & 1));
}
__device__ __forceinline__ void load_channels(Operand& x, bf16 (&panel)[CHUNK][64]) {
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) ldmatrix_x4_trans(x[s], matrix_row(panel[0], 16 * s));
}
__device__ __forceinline__ void store_channels(bf16 (&panel)[CHUNK][64], const Operand& x) {
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) stmatrix_x4_trans(matrix_row(panel[0], 16 * s), x[s]);
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
__device__ __forceinline__ void load_values(Values& x, bf16 (*panels)[CHUNK][64]) {
  Operand two;
  load_channels(two, *panels);
  each_two([&](int at, int s, int m) { x[at] = low(two[s][m]), x[at + 1] = high(two[s][m]); });
}
__device__ __forceinline__ void load_values(Values& x, float (*panels)[CHUNK][32]) {
  each_float(panels, [&](int at, float& value) { x[at] = value; });
}
__device__ __forceinline__ void store_values(bf16 (*panels)[CHUNK][64], const Values& x) {
  Operand two;
  each_two([&](int at, int s, int m) { two[s][m] = pack<bf16>(x[at], x[at + 1]); });
  store_channels(*panels, two);
}
__device__ __forceinline__ void store_values(float (*panels)[CHUNK][32], const Values& x) {
  each_float(panels, [&](int at, float& value) { value = x[at]; });
}
// A tile's panels of a warpgroup's 64 channels.
template <typename X, int PANELS>
__device__ __forceinline__ auto own_panels(X (&tile)[PANELS][CHUNK][PANEL<X>], int warpgroup) {
  return tile + warpgroup * (64 / PANEL<X>);
}

// ---- states: a warpgroup has 64 channels and all columns of V ------------------------------------------------

// Calls f(two values, where they are in [K, V]) for those of this lane that exist. APART: by code of its own where all
// columns do, without a branch for each.
template <int BV, bool APART = false, typename P, class F>
__device__ __forceinline__ void each_of_state(float (&S)[BV / 2], P* state, const Shape& shape, int channel, F f) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool whole = APART && shape.V == BV && channel + 8 * h < shape.K;
    if (whole) {
#pragma unroll
      for (int n = 0; n < BV / 8; ++n)
        f(S[4 * n + 2 * h], S[4 * n + 2 * h + 1], state + (channel + 8 * h) * BV + 8 * n + 2 * t);
    } else
#pragma unroll
      for (int n = 0; n < BV / 8; ++n)
        if (channel + 8 * h < shape.K && 8 * n < shape.V)
          f(S[4 * n + 2 * h], S[4 * n + 2 * h + 1], state + (channel + 8 * h) * shape.V + 8 * n + 2 * t);
    __syncwarp();
  }
}

// S <- diag(by) S, and x[channel, token] = S x^T of that S, or of S before it where READ_FIRST, which is under way. S
// goes in as the sum of two bfloat16 numbers, which are given to f(columns / 16, the first, the second); or as one
// where not EXACT.
template <int BV, bool READ_FIRST = false, int PART = 2, bool EXACT = true, class F>
__device__ __forceinline__ void read_state(Values& x, float (&S)[BV / 2], const float (&by)[2],
                                           bf16 (&tokens)[BV / 64][CHUNK][64], F f) {
  constexpr int PARTS = BV / 16 / PART;
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
        if (EXACT) rest[part & 1][n][m] = remainder_of(rounded[part & 1][n][m], a, b);
        if (READ_FIRST) a *= by[m & 1], b *= by[m & 1];
      }
      if (EXACT) f(part * PART + n, rounded[part & 1][n], rest[part & 1][n]);
    }
  };
  const auto multiply = [&](int part) {
#pragma unroll
    for (int n = 0; n < PART; ++n) {
      const int tile = part * PART + n;
      const u64 b = wgmma_tile(tokens[tile / 4], 16, 1024) + tile % 4 * 32 / 16;
      wgmma<bf16, CHUNK, false>(x, rounded[part & 1][n], b, tile > 0);
      if (EXACT) wgmma<bf16, CHUNK, false>(x, rest[part & 1][n], b, true);
    }
    wgmma_commit();
  };
  copy(0);
  if constexpr (PARTS > 1) copy(1);
  wgmma_fence();
  multiply(0);
  if constexpr (PARTS > 1) multiply(1);
#pragma unroll
  for (int part = 2; part < PARTS; ++part) {
    wgmma_wait<1>();
    copy(part);
    wgmma_fence();
    multiply(part);
  }
}

// S += x^T tokens, under way; x the warp's channels.
template <int BV>
__device__ __forceinline__ void write_state(float (&S)[BV / 2], const Operand& x, bf16 (&tokens)[BV / 64][CHUNK][64]) {
  const u64 b = wgmma_tile(tokens, CHUNK * 128, 1024);
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) wgmma<bf16, BV, true>(S, x[s], b + s * 16 * 128 / 16, true);
}

// y[channel, i] (+)= sum_j x[channel, j] pairs[i, j], under way; BY_KEY: y[channel, j] with sum_i. REST: of their
// second numbers, that lie 32 columns on.
template <bool BY_KEY, bool REST = false>
__device__ __forceinline__ void multiply_pairs(Values& y, const Operand& x, bf16 (&pairs)[CHUNK][64], bool accumulate) {
  static_assert(!REST || CHUNK == 32);
  const u64 b = wgmma_tile(pairs, 16, 1024) + (REST ? 64 / 16 : 0);
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s)
    wgmma<bf16, CHUNK, BY_KEY>(y, x[s], b + s * (BY_KEY ? 16 * 128 : 32) / 16, accumulate || s);
}

// ---- scalar decays: one gate for all channels of a token; no gate is too strong --------------------

// The gate of a token of the sequence, as it comes, so that nothing waits for it yet; none before and behind the
// sequence.
template <typename G> __device__ __forceinline__ G gate_of(const Rows<const G>& gates, const WorkTile& at, int token) {
  return token >= 0 && token < at.tokens ? *gates.row(at.batch, at.head, at.start + token) : from_float<G>(0.f);
}

// A factor of this lane's tokens 8n + 2t + p: x[2n + p].
__device__ __forceinline__ void load_tokens(float (&x)[CHUNK / 4], const float* from, float scale = 1.f) {
#pragma unroll
  for (int n = 0; n < CHUNK / 8; ++n) {
    const float2 two = *reinterpret_cast<const float2*>(from + 8 * n + 2 * (threadIdx.x & 3));
    x[2 * n] = scale * two.x, x[2 * n + 1] = scale * two.y;
  }
}

// x times factors of two tokens each, in bfloat16, the sums of two such numbers.
__device__ __forceinline__ void decay_tokens(Operand& x, const uint2 (&by)[CHUNK / 2]) {
#pragma unroll
  for (int n = 0; n < CHUNK / 8; ++n) {
    const uint2 its = by[4 * n + (threadIdx.x & 3)];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      u32& two = x[n / 2][n % 2 * 2 + h];
      two = fma_bf16(two, its.x, fma_bf16(two, its.y, 0));
    }
  }
}
