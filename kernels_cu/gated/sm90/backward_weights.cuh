// what      What the first pass of the Hopper backward of GLA and RWKV-6 leaves for the second in dg's memory: the
//           queries' share of dg. Its units stand in the chunk's sums.
// numerics  In dg nearly everything cancels, and bfloat16 would round this share by more than all else. So where gates
//           are bfloat16 it is float16, in units of a power of 2 that a channel of a chunk has: 11 bits of what is
//           2^-24 of the largest, or more. Where gates are float16 it is float16 itself, but in units where they grow.
#include "gated/sm90/states.cuh"

// Behind the sums of a chunk, in float32 numbers: a byte of every warp of the first pass, whether gates of its
// channels grow.
constexpr int FLAGS = 2;

// Whether the share is in units where no gate grows. Where gates grow, float16 alone has units.
template <typename G> constexpr bool IN_UNITS = false;
template <> constexpr bool IN_UNITS<bf16> = true;

// As exponents that float32 has: 1; and the least unit, beside which it holds dg in units.
constexpr u32 ONE = 127, LEAST_UNIT = ONE - 80;
__device__ __forceinline__ float power_of_two(u32 exponent) { return __uint_as_float(exponent << 23); }

// Adds up magnitudes of this lane's two channels: no sum of its values over tokens is larger.
__device__ __forceinline__ void add_sizes(float (&size)[2], const Chunk& x) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float two[SUBCHUNKS];
#pragma unroll
    for (int n = 0; n < SUBCHUNKS; ++n) two[n] = fabsf(x[n][2 * h]) + fabsf(x[n][2 * h + 1]);
    size[h] += (two[0] + two[1]) + (two[2] + two[3]);
  }
}
// Units of this lane's channels, from the sizes that four lanes have: together these are below 2^3 times the largest's
// power, and take 2^15 units at most. 1 of zeros, and beside what is not finite.
__device__ __forceinline__ void units_for(u32 (&unit)[2], const float (&size)[2]) {
  u32 largest = __float_as_uint(size[0]) >> 23 | __float_as_uint(size[1]) >> 23 << 16;
  for (int distance = 1; distance < 4; distance *= 2)
    largest = larger_signed(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const u32 exponent = h ? largest >> 16 : largest & 0xffff;
    unit[h] = exponent - 1 < 254 ? max(exponent, LEAST_UNIT + 12) - 12 : ONE;
  }
}

// A sum over a chunk with its channel's unit in the last 9 bits.
__device__ __forceinline__ float sum_with_unit(float sum, u32 unit) {
  return __uint_as_float(__float_as_uint(sum) & ~0x1ffu | unit);
}
__device__ __forceinline__ float unit_of(float sum) { return __uint_as_float(__float_as_uint(sum) << 23); }
__device__ __forceinline__ float inverse_of_power(float x) {
  return __uint_as_float((2 * ONE << 23) - __float_as_uint(x));
}

template <typename G>
__device__ __forceinline__ void store_weights(G (*panels)[CHUNK][PANEL<G>], const Chunk& x, const u32 (&unit)[2],
                                              int at) {
  if constexpr (IN_UNITS<G>) {
    const float by[2] = {power_of_two(2 * ONE - unit[0]), power_of_two(2 * ONE - unit[1])};
    Operand two;
    each_pair([&](int n, int h) { pair_of(two, n, h) = pack<f16>(by[h] * x[n][2 * h], by[h] * x[n][2 * h + 1]); });
    store_operand(*panels, two, at);
  } else store_chunk_values(panels, x, at);
}

// A value of it, by itself; sum: its channel's.
template <typename G> __device__ __forceinline__ float weight_value(G x, float sum, bool grew) {
  if constexpr (sizeof(G) == 2)
    if (grew != IN_UNITS<G>) return to_float(f16{x.bits}) * unit_of(sum);
  return to_float(x);
}

// What of a lane's two depths is its column, in float16: a product with these moves nothing.
__device__ __forceinline__ u32 ones_of_lane() {
  const int thread = opaque(threadIdx.x), i = thread >> 2 & 7, token = 2 * (thread & 3);
  return token == i ? 0x3c00u : token + 1 == i ? 0x3c000000u : 0;
}
// x += it, and `before` of each channel, whose sums have the units; in float16 by a product with `ones_of_lane`: 4
// instructions for 32.
template <typename G>
__device__ __forceinline__ void add_weights(Chunk& x, G (*panels)[CHUNK][PANEL<G>], const float (&before)[2],
                                            const float (&sums)[2], int at, u32 one) {
  if constexpr (IN_UNITS<G>) {
    const float unit[2] = {unit_of(sums[0]), unit_of(sums[1])};
    SubChunk in_units;  // twice by other instructions: the same register twice would be copied for each product
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float inverse = inverse_of_power(unit[h]);
      in_units[2 * h] = inverse * before[h], in_units[2 * h + 1] = fmaf(inverse, before[h], 0.f);
    }
    Operand two;
    load_operand(two, *panels, at);
#pragma unroll
    for (int n = 0; n < SUBCHUNKS; ++n) {
      SubChunk more;
      mma_f16(more, two[n / 2], {n % 2 ? 0 : one, n % 2 ? one : 0}, in_units);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = fmaf(unit[i / 2], more[i], x[n][i]);
    }
  } else {
    Chunk more;
    load_chunk(more, panels, at);
#pragma unroll
    for (int n = 0; n < SUBCHUNKS; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = (x[n][i] + more[n][i]) + before[i / 2];
  }
}
