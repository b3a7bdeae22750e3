// what      For Hopper's kernels whose warpgroups hold states in registers: the products with states and with pairs of
//           tokens, and a lane's part of tiles; chunk_copies.cuh has the copies of chunks of tokens. The including
//           kernel defines CHUNK, the tokens of a chunk, 32 or 64, before it includes this file.
// shapes    A warpgroup holds 64 rows of a state, called channels below, and BV columns: S[channel, column]. A warp has
//           16 of the channels. Tiles in shared memory are [token, column]; operands in registers are [channel, token]
// limits    sm_90a; products of bfloat16 numbers; CHUNK of 32 or 64: arrays of pairs have 64 columns; tiles start on
//           1024 bytes, as the swizzle does; V is a multiple of 8. All lanes of a warp call a function that loads
//           matrices, all threads of the warpgroup one with products
#include "chunk_copies.cuh"
#include "wgmma.cuh"

// From chunk_copies.cuh:
//   PANEL<X>: numbers of 128 bytes; Tile<X, D>: a chunk's rows, D numbers wide, in panels
//   WorkTile: a block's head and sequence, and its tokens

// ---- two bfloat16 numbers in a register -----------------------------------------------------------------------------

// The number in the lower, or the upper half.
__device__ __forceinline__ float low(u32 two) { return __uint_as_float(two << 16); }
__device__ __forceinline__ float high(u32 two) { return __uint_as_float(two & 0xffff0000u); }

// The remainders, in bfloat16, of two values that were rounded to bfloat16.
__device__ __forceinline__ u32 remainder_of(u32 rounded, float x, float y) {
  return pack<bf16>(x - low(rounded), y - high(rounded));
}

// ---- layouts: a warp has 16 channels and all tokens of the chunk ----------------------------------------------------
// With g = lane / 4 and t = lane % 4 a lane has channels g and g + 8 and of every 8 tokens 8n + 2t and 8n + 2t + 1:
//   Values x:    x[4n + 2h + p] is channel g + 8h, token 8n + 2t + p: the accumulators of a product [channel, token]
//   Operand x:   x[step][m] is channel g + 8(m % 2), tokens 16 step + 8(m / 2) + 2t and the next: a left operand that
//                is multiplied over tokens, 16 in a step
using Values = float[CHUNK / 2];
using Operand = u32[CHUNK / 16][4];

// Calls f(index, step, m) for each pair of tokens of this lane: Values x has it at x[index], x[index + 1], Operand x at
// x[step][m].
template <class F> __device__ __forceinline__ void each_two(F f) {
#pragma unroll
  for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) f(4 * n + 2 * h, n / 2, n % 2 * 2 + h);
}

// The address that this lane gives to ldmatrix or stmatrix for 16 rows from `row` on of the warp's 16 columns, as four
// 8x8 matrices. `opaque` keeps the compiler from holding such addresses in registers between uses.
template <typename X> __device__ __forceinline__ X* ldmatrix_row(X* panel, int row) {
  const int thread = opaque(threadIdx.x);
  return swizzled(panel, row + (thread & 7) + (thread >> 4 & 1) * 8, thread / 32 % 4 * 2 + (thread >> 3 & 1));
}
// Load and store the warp's 16 channels of a tile [token, channel].
__device__ __forceinline__ void load_channels(Operand& x, bf16 (&panel)[CHUNK][64]) {
#pragma unroll
  for (int step = 0; step < CHUNK / 16; ++step) ldmatrix_x4_trans(x[step], ldmatrix_row(panel[0], 16 * step));
}
__device__ __forceinline__ void store_channels(bf16 (&panel)[CHUNK][64], const Operand& x) {
#pragma unroll
  for (int step = 0; step < CHUNK / 16; ++step) stmatrix_x4_trans(ldmatrix_row(panel[0], 16 * step), x[step]);
}

// Calls f(index, number) for this lane's numbers of a float32 tile [token, channel], whose 64 channels are two panels:
// Values have the number at x[index].
template <class F> __device__ __forceinline__ void each_float(float (*panels)[CHUNK][32], F f) {
  const int thread = threadIdx.x, g = thread >> 2 & 7, t = thread & 3, warp = thread / 32 % 4;
  each_two([&](int index, int, int) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int channel = 16 * (warp % 2) + g + 8 * (index / 2 % 2), token = 2 * t + p;  // channel: of 32, a panel's
      f(index + p, swizzled(panels[warp / 2][index / 4 * 8], token, channel / 4)[channel % 4]);
    }
  });
}
// Load and store the warp's 16 channels as Values, of tiles that have the warpgroup's 64 channels: one panel of
// bfloat16 numbers, or two of floats.
__device__ __forceinline__ void load_values(Values& x, bf16 (*panels)[CHUNK][64]) {
  Operand packed;
  load_channels(packed, *panels);
  each_two([&](int index, int step, int m) { x[index] = low(packed[step][m]), x[index + 1] = high(packed[step][m]); });
}
__device__ __forceinline__ void load_values(Values& x, float (*panels)[CHUNK][32]) {
  each_float(panels, [&](int index, float& value) { x[index] = value; });
}
__device__ __forceinline__ void store_values(bf16 (*panels)[CHUNK][64], const Values& x) {
  Operand packed;
  each_two([&](int index, int step, int m) { packed[step][m] = pack<bf16>(x[index], x[index + 1]); });
  store_channels(*panels, packed);
}
__device__ __forceinline__ void store_values(float (*panels)[CHUNK][32], const Values& x) {
  each_float(panels, [&](int index, float& value) { value = x[index]; });
}
// The panels of a tile [token, channel] that have the warpgroup's 64 channels.
template <typename X, int PANELS>
__device__ __forceinline__ auto warpgroup_panels(X (&tile)[PANELS][CHUNK][PANEL<X>], int warpgroup) {
  return tile + warpgroup * (64 / PANEL<X>);
}

// ---- states: a warpgroup has 64 channels and all BV columns ------------------------------------------------

// Calls f(x, y, address) for each two neighbouring numbers of S of this lane that lie within [K, V]. V is a multiple of
// 8, so that both or neither do. `state`: the state in memory; `channel`: the first of this lane's two channels, 64
// warpgroup + 16 warp + g; the other one is 8 later. S[4n + 2h], S[4n + 2h + 1] are columns 8n + 2t and the next of
// channel + 8h. HAS_FULL_PATH: if V is BV, code without a branch for each pair is used.
constexpr bool HAS_FULL_PATH = true;  // the template parameter's value, by its name
template <int BV, bool HAS_FULL_PATH = false, typename P, class F>
__device__ __forceinline__ void each_pair_of_state(float (&S)[BV / 2], P* state, const Shape& shape, int channel, F f) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool is_full = HAS_FULL_PATH && shape.V == BV && channel + 8 * h < shape.K;
    if (is_full) {
#pragma unroll
      for (int n = 0; n < BV / 8; ++n)
        f(S[4 * n + 2 * h], S[4 * n + 2 * h + 1], state + (channel + 8 * h) * BV + 8 * n + 2 * t);
    } else
#pragma unroll
      for (int n = 0; n < BV / 8; ++n)
        if (channel + 8 * h < shape.K && 8 * n < shape.V)
          f(S[4 * n + 2 * h], S[4 * n + 2 * h + 1], state + (channel + 8 * h) * shape.V + 8 * n + 2 * t);
    __syncwarp();  // keeps the compiler from computing the addresses of both channels first, which takes more registers
  }
}

// Calls f(number, its address in `state`) for this lane's numbers within [K, V] of a state S that is held transposed: a
// lane has columns `column` and `column` + 8 of V, and channels 2t and 2t + 1 of every 8. strides.state_k and
// strides.state_v: of the state in memory; size.K, size.V: its size.
template <int BK, typename P, class Strides, class Size, class F>
__device__ __forceinline__ void each_transposed(float (&S)[BK / 2], P* state, const Strides& strides, const Size& size,
                                                int column, F f) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < BK / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int channel = 8 * n + 2 * t + (i & 1), value_column = column + 8 * (i >> 1);
      if (channel < size.K && value_column < size.V)
        f(S[4 * n + i], state + channel * strides.state_k + value_column * strides.state_v);
    }
    __syncwarp();  // keeps the compiler from computing all addresses first, for which registers do not suffice
  }
}

// Starts the product x[channel, token] = S tokens^T of S as it is, then S <- decay S; `tokens` is a tile. SPLIT: S is
// multiplied as the sum of two bfloat16 numbers; otherwise it is rounded to one. The product is made in parts of PART
// times 16 columns, two parts under way at a time, so that registers hold the bfloat16 numbers of two parts only. When
// the function returns, the last parts are still under way: the caller must call wgmma_wait before it reads x or
// overwrites `tokens`.
template <int BV, int PART, bool SPLIT>
__device__ __forceinline__ void read_state(Values& x, float (&S)[BV / 2], float decay,
                                           bf16 (&tokens)[BV / 64][CHUNK][64]) {
  static_assert(BV / 16 % PART == 0);
  constexpr int PARTS = BV / 16 / PART;
  u32 rounded[2][PART][4], remainders[2][PART][4];
  const auto copy = [&](int part) {
#pragma unroll
    for (int n = 0; n < PART; ++n) {
      float* from = S + 8 * (part * PART + n);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        float &a = from[2 * m], &b = from[2 * m + 1];
        rounded[part & 1][n][m] = pack<bf16>(a, b);
        if (SPLIT) remainders[part & 1][n][m] = remainder_of(rounded[part & 1][n][m], a, b);
        a *= decay, b *= decay;
      }
    }
  };
  const auto multiply = [&](int part) {
#pragma unroll
    for (int n = 0; n < PART; ++n) {
      const int tile = part * PART + n;
      // 16 columns, 32 bytes, of the panel's rows. K_MAJOR: a row of the tile is a token, a column of the product.
      const u64 b = k_major_tile(tokens[tile / 4]) + tile % 4 * 32 / 16;
      wgmma<bf16, CHUNK, K_MAJOR>(x, rounded[part & 1][n], b, tile > 0);
      if (SPLIT) wgmma<bf16, CHUNK, K_MAJOR>(x, remainders[part & 1][n], b, ACCUMULATE);
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

// Starts S[channel, column] += sum over tokens of x[channel, token] tokens[token, column]. The caller calls wgmma_fence
// before, wgmma_commit after, and waits, so that it may put several such products into one group. read_state commits
// its groups itself. MN_MAJOR: the tile's rows are what is summed over; a step takes 16 of them.
template <int BV>
__device__ __forceinline__ void write_state(float (&S)[BV / 2], const Operand& x, bf16 (&tokens)[BV / 64][CHUNK][64]) {
  const u64 b = mn_major_tile(tokens, CHUNK * 128);
#pragma unroll
  for (int step = 0; step < CHUNK / 16; ++step)
    wgmma<bf16, BV, MN_MAJOR>(S, x[step], b + step * 16 * 128 / 16, ACCUMULATE);
}

// Starts y[channel, i] += sum_j x[channel, j] pairs[i, j]; the caller fences, commits and waits, as for write_state.
// `pairs` has a number for each query i and key j of the chunk.
__device__ __forceinline__ void add_pair_products(Values& y, const Operand& x, bf16 (&pairs)[CHUNK][64]) {
  const u64 b = k_major_tile(pairs);
#pragma unroll
  for (int step = 0; step < CHUNK / 16; ++step) wgmma<bf16, CHUNK, K_MAJOR>(y, x[step], b + step * 32 / 16, ACCUMULATE);
}

// ---- scalar decays: one gate for all channels of a token ------------------------------------------------------------

// The log gate of a token of the sequence, in the array's type: a conversion here would wait for the load. 0, which is
// no decay, for tokens before and after the sequence.
template <typename G>
__device__ __forceinline__ G gate_of(const StridedRows<const G>& gates, const WorkTile& work, int token) {
  return token >= 0 && token < work.tokens ? *gates.row(work.batch, work.head, work.start + token) : from_float<G>(0.f);
}

// Loads one factor for each token of this lane: x[2n + p] is of token 8n + 2t + p.
__device__ __forceinline__ void load_token_factors(float (&x)[CHUNK / 4], const float* from) {
#pragma unroll
  for (int n = 0; n < CHUNK / 8; ++n) {
    const float2 factors = *reinterpret_cast<const float2*>(from + 8 * n + 2 * (threadIdx.x & 3));
    x[2 * n] = factors.x, x[2 * n + 1] = factors.y;
  }
}

// Multiplies x by a factor for each token. factors[i] is of tokens 2i and 2i + 1, as the sum of two bfloat16 numbers:
// .x has the rounded factors of both tokens, .y their remainders.
__device__ __forceinline__ void decay_tokens(Operand& x, const uint2 (&factors)[CHUNK / 2]) {
#pragma unroll
  for (int n = 0; n < CHUNK / 8; ++n) {
    const uint2 factor = factors[4 * n + (threadIdx.x & 3)];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      u32& tokens = x[n / 2][n % 2 * 2 + h];
      tokens = fma_bf16(tokens, factor.x, fma_bf16(tokens, factor.y, 0));
    }
  }
}
