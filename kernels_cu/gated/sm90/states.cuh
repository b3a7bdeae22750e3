// what      States in the registers of warpgroups, for the Hopper backward of GLA and RWKV-6: products with them, and sums over
//           a chunk's tokens.
// numerics  A state is read as the sum of two numbers of T. The gate's gradient is a sum over all tokens, in which the rounding
//           of a state would add up from chunk to chunk. float16 has little range: there a state is read times a power of 2.
#include "gated/sm90/decays.cuh"

template <typename T> constexpr bool NARROW = false;
template <> constexpr bool NARROW<f16> = true;

// 2^x that takes `largest` to float16's upper end, and 2^-x.
struct Scale {
  float up, down;
};
__device__ __forceinline__ Scale to_range(float largest) {
  const int exponent = max(int(__float_as_uint(largest) >> 23), 14);
  return {__uint_as_float(u32(267 - exponent) << 23), __uint_as_float(u32(exponent - 13) << 23)};
}

// The largest magnitude of a channel, over its four lanes.
template <int BV> __device__ __forceinline__ float largest_of(const float (&S)[BV / 2], int h) {
  float x = 0.f;
#pragma unroll
  for (int n = 0; n < BV / 8; ++n) x = fmaxf(x, fmaxf(fabsf(S[4 * n + 2 * h]), fabsf(S[4 * n + 2 * h + 1])));
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// x[channel, token] = S tokens^T, of NARROW types diag(by) S tokens^T, under way; the first numbers of 16 columns go to f(columns / 16, numbers) too.
template <typename T, int BV, class F>
__device__ __forceinline__ void start_read(Values& x, const float (&S)[BV / 2], const float (&by)[2],
                                           T (&tokens)[BV / 64][CHUNK][64], F f) {
  constexpr int PART = 2, PARTS = BV / 16 / PART;
  u32 first[2][PART][4], rest[2][PART][4];
  const auto copy = [&](int part) {
#pragma unroll
    for (int n = 0; n < PART; ++n) {
      const float* from = S + 8 * (part * PART + n);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float a = NARROW<T> ? from[2 * m] * by[m & 1] : from[2 * m];
        const float b = NARROW<T> ? from[2 * m + 1] * by[m & 1] : from[2 * m + 1];
        const u32 two = pack<T>(a, b);
        const float2 rounded = unpack<T>(two);
        first[part & 1][n][m] = two;
        rest[part & 1][n][m] = pack<T>(a - rounded.x, b - rounded.y);
      }
      f(part * PART + n, first[part & 1][n]);
    }
  };
  const auto multiply = [&](int part) {
#pragma unroll
    for (int n = 0; n < PART; ++n) {
      const int tile = part * PART + n;
      const u64 b = wgmma_tile(tokens[tile / 4], 16, 1024) + tile % 4 * 32 / 16;
      wgmma<T, CHUNK, false>(x, first[part & 1][n], b, tile > 0);
      wgmma<T, CHUNK, false>(x, rest[part & 1][n], b, true);
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
    wgmma_wait<1>();                            // the registers of the part before the last are free
    copy(part);
    wgmma_fence();
    multiply(part);
  }
}

// S += x^T tokens, under way; x the warp's channels.
template <typename T, int BV>
__device__ __forceinline__ void start_write(float (&S)[BV / 2], const Operand& x, T (&tokens)[BV / 64][CHUNK][64]) {
  const u64 b = wgmma_tile(tokens, CHUNK * 128, 1024);
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) wgmma<T, BV, true>(S, x[s], b + s * 16 * 128 / 16, true);
}

template <int BV> __device__ __forceinline__ void decay_state(float (&S)[BV / 2], const SubChunkDecays& d) {
  const float by[2] = {d.all(0), d.all(1)};
#pragma unroll
  for (int i = 0; i < BV / 2; ++i) S[i] *= by[i >> 1 & 1];
}

// Each token's sum over itself and those behind it in the chunk; `all` over all of them.
__device__ __forceinline__ void sum_from(Chunk& x, float (&all)[2]) {
  const int t = threadIdx.x & 3;
  all[0] = all[1] = 0.f;
#pragma unroll
  for (int n = SUBCHUNKS - 1; n >= 0; --n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float &first = x[n][2 * h], &second = x[n][2 * h + 1];
      const float own = first + second, other = __shfl_xor_sync(0xffffffffu, own, 1), two = own + other;
      const float others = __shfl_xor_sync(0xffffffffu, two, 2);
      second += all[h] + (t & 1 ? 0.f : other) + (t & 2 ? 0.f : others);
      first += second;
      all[h] += two + others;
    }
}

// Each token's sum over those before it in the chunk, from `all` on; `all` goes on by all of them.
__device__ __forceinline__ void sum_before(Chunk& x, float (&all)[2]) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < SUBCHUNKS; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float &first = x[n][2 * h], &second = x[n][2 * h + 1];
      const float own = first + second, other = __shfl_xor_sync(0xffffffffu, own, 1), two = own + other;
      const float others = __shfl_xor_sync(0xffffffffu, two, 2);
      const float before = all[h] + (t & 1 ? other : 0.f) + (t & 2 ? others : 0.f);
      second = before + first;
      first = before;
      all[h] += two + others;
    }
}

// The state that a block starts from: given, or zeros.
template <int BV> __device__ __forceinline__ void load_state(float (&S)[BV / 2], const float* given, const Shape& shape, int channel) {
#pragma unroll
  for (int i = 0; i < BV / 2; ++i) S[i] = 0.f;
  if (given)
    each_of_state<BV>(S, given, shape, channel, [](float& x, float& y, const float* from) {
      const float2 two = *reinterpret_cast<const float2*>(from);
      x = two.x, y = two.y;
    });
}
