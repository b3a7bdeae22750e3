// what      Storage of the query share: the part of dg, the gradient of the log gates, that the first pass of the
//           Hopper backward of GLA and RWKV-6 (backward_queries.cu) computes for every token and channel of a chunk of
//           32 tokens. The first pass stores the share in dg's memory, with dg's type G. The second pass
//           (backward_keys.cu) loads the share, adds the other terms of dg and overwrites it.
// shapes    A chunk's tile is [32 tokens, 64 channels] for each warpgroup. Lane `lane` of a warp has channels lane / 4
//           and lane / 4 + 8 of the warp's 16 channels; index h, 0 or 1, selects one of the two. A `LaneChunk` holds
//           the lane's numbers: x[n][2h + p] is sub-chunk n of 8 tokens, channel h, token 2 (lane % 4) + p. All lanes
//           of a warp call functions with products or shuffles together
// numerics  The terms of dg nearly cancel, so an error of the share is large beside dg. If a chunk's gates do not grow
//           (`exceeds_growth` in growth.cuh):
//             G bfloat16: the share is stored as float16 multiples of a unit, a power of 2 for each channel of a chunk.
//                         bfloat16 would keep 8 bits. float16 keeps 11 bits of every number from 2^-14 units on. A
//                         channel's numbers are below 2^15 units (units_for).
//             G float32: the share is stored as it is.
//             G float16: the share is stored as it is if float16 holds it, else as multiples of a unit; then the second
//                         pass computes the chunk as one whose gates grow.
//           If they grow, growth.cuh computes and stores the share: as bfloat16, as float16 multiples of a unit, or as
//           float32. `query_share_value` reads what it stored; `store_query_share` and `add_query_share` are for chunks
//           that do not grow. The unit is kept in the 9 lowest bits of the channel's sum over the chunk, which leaves
//           15 bits of that sum's fraction
#include "gated/sm90/states.cuh"

// From the includes, all for a lane of a warp that has 16 channels of a chunk of CHUNK = 32 tokens:
//   LaneSubChunk, LaneChunk: its numbers of 8 tokens, and of the chunk's four times 8; each_token_pair(f): calls
//     f(n, h) for its pairs of tokens of sub-chunk n, channel h of its two
//   Operand: 16 channels of all tokens as a tensor core's operand; token_pair_of: its word of a pair of tokens;
//     load_operand, store_operand: from and to a panel of PANEL = 64 channels
//   mma_f16_plus(d, a, b, c): d = a b + c in float16 with float32 sums; max_of_each_half: of pairs of 16-bit integers
//   opaque(x): x, computed again at each call, so that no register keeps it; to_float, pack: between floats and pairs

// After the sums of a chunk's channels, the first pass stores this many float32 numbers' worth of bytes: one byte for
// each of its up to 8 warps, 1 if the warp's share is stored as for gates that grow. One such byte lets the second pass
// compute the chunk token by token.
constexpr int FLAGS = 2;

// Whether the share of a chunk whose gates do not grow always has units. Chunks whose gates grow have units exactly if
// G is float16.
template <typename G> constexpr bool IN_UNITS = false;
template <> constexpr bool IN_UNITS<bf16> = true;

// A unit is represented by the exponent bits of float32: ONE is 2^0. LEAST_UNIT is 2^-80: numbers up to 2^47 divided by
// it are still finite in float32.
constexpr u32 ONE = 127, LEAST_UNIT = ONE - 80;
__device__ __forceinline__ float power_of_two(u32 exponent) { return __uint_as_float(exponent << 23); }

// Adds the absolute values of this lane's numbers to the sizes of its two channels. The size bounds every sum of these
// numbers over tokens, and the share consists of such sums.
__device__ __forceinline__ void add_sizes(float (&size)[2], const LaneChunk& x) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    static_assert(NUM_SUBCHUNKS == 4);
    float of_pair[NUM_SUBCHUNKS];  // of two neighbouring tokens
#pragma unroll
    for (int n = 0; n < NUM_SUBCHUNKS; ++n) of_pair[n] = fabsf(x[n][2 * h]) + fabsf(x[n][2 * h + 1]);
    size[h] += (of_pair[0] + of_pair[1]) + (of_pair[2] + of_pair[3]);
  }
}
// Sets the exponents of the units of this lane's two channels, from the sizes that the channel's four lanes have. If
// the largest of the four sizes has exponent e, their sum is below 2^(e + 3). The unit is 2^(e - 12), so that the sum
// is below 2^15 units and in float16's range. The unit is 1 if all sizes are 0 or one is infinite or NaN.
__device__ __forceinline__ void units_for(u32 (&unit_exponent)[2], const float (&size)[2]) {
  // The largest exponents over four lanes, of channel 0 in the low 16 bits and of channel 1 in the high 16 bits.
  u32 largest = __float_as_uint(size[0]) >> 23 | __float_as_uint(size[1]) >> 23 << 16;
  for (int distance = 1; distance < 4; distance *= 2)
    largest = max_of_each_half(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const u32 exponent = h ? largest >> 16 : largest & 0xffff;
    unit_exponent[h] = exponent - 1 < 254 ? max(exponent, LEAST_UNIT + 12) - 12 : ONE;
  }
}

// Returns a channel's sum over a chunk with the exponent of its unit in place of the sum's 9 lowest bits.
__device__ __forceinline__ float sum_with_unit(float sum, u32 unit_exponent) {
  return __uint_as_float(__float_as_uint(sum) & ~0x1ffu | unit_exponent);
}
// Returns the unit, a power of 2, from such a sum: the shift moves the exponent to its place and drops all else.
__device__ __forceinline__ float unit_of(float sum) { return __uint_as_float(__float_as_uint(sum) << 23); }
// 1 / x of a power of 2.
__device__ __forceinline__ float inverse_of_power(float x) {
  return __uint_as_float((2 * ONE << 23) - __float_as_uint(x));
}

// Whether a number of the warp's share is infinite in float16.
__device__ __forceinline__ bool exceeds_float16(const LaneChunk& x) {
  float largest = 0.f;
  for (int n = 0; n < NUM_SUBCHUNKS; ++n)
    for (float value : x[n]) largest = fmaxf(largest, fabsf(value));
  return __any_sync(0xffffffffu, largest >= 65520.f);
}

// Stores this lane's share x of a chunk whose gates do not grow. panels: the warpgroup's tile of dg in shared memory;
// offset: ldmatrix_offset(), a byte in a panel (decays.cuh). unit_exponent is not read unless IN_UNITS.
template <typename G>
__device__ __forceinline__ void store_query_share(G (*panels)[CHUNK][PANEL<G>], const LaneChunk& x,
                                                  const u32 (&unit_exponent)[2], int offset) {
  if constexpr (IN_UNITS<G>) {
    const float inverse[2] = {power_of_two(2 * ONE - unit_exponent[0]), power_of_two(2 * ONE - unit_exponent[1])};
    Operand packed;  // pairs of neighbouring tokens in float16
    each_token_pair([&](int n, int h) {
      token_pair_of(packed, n, h) = pack<f16>(inverse[h] * x[n][2 * h], inverse[h] * x[n][2 * h + 1]);
    });
    store_operand(*panels, packed, offset);
  } else store_chunk_values(panels, x, offset);
}

// Returns one stored number x of the share as float32, of any chunk. sum: the channel's sum over the chunk, with its
// unit. grew: whether it is stored as for gates that grow, as the first pass's byte says.
template <typename G> __device__ __forceinline__ float query_share_value(G x, float sum, bool grew) {
  if constexpr (sizeof(G) == 2)
    if (grew != IN_UNITS<G>) return to_float(f16{x.bits}) * unit_of(sum);
  return to_float(x);
}

// This lane's register of an 8 x 8 identity matrix in float16, as a right operand of mma_f16_plus. A product with it
// returns the left operand in the layout of an accumulator.
__device__ __forceinline__ u32 identity_of_lane() {
  const int thread = opaque(threadIdx.x), i = thread >> 2 & 7, token = 2 * (thread & 3);
  return token == i ? 0x3c00u : token + 1 == i ? 0x3c000000u : 0;
}
// Completes x, this lane's dg of a chunk whose gates do not grow: adds the share, and state_term, a term for each of
// the lane's channels h that all tokens of the chunk have. sums: those of these channels over the chunk, with their
// units. identity: from identity_of_lane(). A product with the identity converts multiples of a unit to float32 and
// adds the state's term: 4 instructions instead of 32 conversions and additions.
template <typename G>
__device__ __forceinline__ void add_query_share(LaneChunk& x, G (*panels)[CHUNK][PANEL<G>],
                                                const float (&state_term)[2], const float (&sums)[2], int offset,
                                                u32 identity) {
  if constexpr (IN_UNITS<G>) {
    const float unit[2] = {unit_of(sums[0]), unit_of(sums[1])};
    // state_term / unit: what the products below are added to. The same number twice, by different instructions: if the
    // compiler saw that both are equal, it would copy the register for each product.
    LaneSubChunk in_units;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float inverse = inverse_of_power(unit[h]);
      in_units[2 * h] = inverse * state_term[h], in_units[2 * h + 1] = fmaf(inverse, state_term[h], 0.f);
    }
    Operand packed;
    load_operand(packed, *panels, offset);
#pragma unroll
    for (int n = 0; n < NUM_SUBCHUNKS; ++n) {
      LaneSubChunk share;  // in units, with the state's term
      // Of an operand's registers, which have two sub-chunks, the identity takes one.
      mma_f16_plus(share, packed[n / 2], {n % 2 ? 0 : identity, n % 2 ? identity : 0}, in_units);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = fmaf(unit[i / 2], share[i], x[n][i]);
    }
  } else {
    LaneChunk share;
    load_chunk(share, panels, offset);
#pragma unroll
    for (int n = 0; n < NUM_SUBCHUNKS; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = (x[n][i] + share[n][i]) + state_term[i / 2];
  }
}
