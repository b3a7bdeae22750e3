// what      Hopper's backward of GLA and RWKV-6: decays of a chunk's queries and keys, and products of queries or
//           keys with a matrix [query, key] of a chunk: dA, dA_ij = scale do_i . v_j, the gradient of the scores A.
// math      g are log gates; a chunk of 32 tokens has four sub-chunks of 8. The decay between query i and key j < i is
//           a factor of the query times a factor of the key, in one of three ways:
//           in a sub-chunk        from its middle m, between tokens 3 and 4 (GLA: halfway through gate 4):
//                                 q_i e^(sum_{m..i} g), k_j e^(-sum_{m..j} g); sum_{m..i} of a token i before m is
//                                 minus the sum of the gates from i to m
//           across sub-chunks     q_i e^(sum of g from the start of its sub-chunk), k_j e^(sum of g after j to the end
//                                 of its sub-chunk): queries of sub-chunk 1 with keys of 0, and 3 with 2 (`by8`);
//                                 queries of 2 and 3 with keys of 0 and 1 (`by16`: by way of the border between 1 and
//                                 2, so queries of 3 also have the decay of sub-chunk 2, keys of 0 that of 1)
//           across chunks         the same from the chunk's start, and to the chunk's end
//           RWKV-6 reads the state before token i writes: its queries' sums end with gate i - 1.
// shapes    A warp has 16 of its warpgroup's 64 channels and all tokens. With g = lane / 4 (g not as in
//           math) and t = lane % 4 a lane has channels g + 8h of the warp's, h = 0 and 1, and tokens 2t and 2t + 1 of
//           each sub-chunk. All lanes call functions with products or shuffles together.
//           Operand (warpgroup.cuh), 16-bit numbers, two tokens a register: x[s][m] has channel g + 8(m % 2), tokens
//           16s + 8(m / 2) + 2t and the next: a left operand [channel, token] of a product over tokens.
//           A panel in shared memory has 128 bytes of each of a chunk's tokens: 64 channels of 16 bits, or 32 of
//           float32, of which a warpgroup has two panels. 16-byte piece p of row r is at place p XOR r % 8
// numerics  Exponents across sub-chunks are sums of the gates between two tokens and never differences of sums, so that
//           a gate of -inf makes the decay exactly 0. In a sub-chunk a gate below LEAST_GATE counts as LEAST_GATE, so
//           that the inverse of a decay is finite: what should be forgotten keeps e^-16 (1e-7) of itself within its
//           sub-chunk. GLA's middle is within gate 4, so that 3.5 gates, e^56 at most, are inverted; float32 ends at
//           e^88. In RWKV-6 three gates are inverted, and four for the first query and the last key, which are in no
//           pair of the sub-chunk. Tensor cores sum gates: they multiply them by how often each counts (GateCounts: 0,
//           1, -1, 1/2 or -1/2) and by log2 e. 16-bit gates are multiplied by log2 e as two numbers of their type;
//           float32 gates are multiplied by it first and then split in two bfloat16 numbers. If a channel's gates
//           above 0 sum to more than GROWTH_LIMIT, its chunk is computed token by token instead (growth.cuh).
// passes    first: backward_queries.cu, forwards in time; second: backward_keys.cu, backwards in time. Before them, of
//           sequences cut into segments, backward_segments.cu. states.cuh and backward_schedules.cuh include this file
// tests     test_gradient_kernels; test_gradient_segments; test_growth_gradients (gates above 0); test_compile
//
// From the includes
//   Operand            see shapes; ldmatrix_x4_trans, stmatrix_x4_trans: move a warp's four 8 x 8 matrices
//   each_float         calls f(4n + 2h + p, x) for this lane's numbers x in two panels of float32: of channel g + 8h,
//                      token 2t + p of sub-chunk n
//   max_nan            the larger number, or NaN if the first is NaN; max_nan<G>: of both numbers of a register
//   low, high          the two bfloat16 numbers of a register as floats; remainder_of: their rounding errors
//   cut_off            a float32 without its last 13 bits
//   opaque             x, of an origin that the compiler does not see: what depends on x is computed again after this
//                      call, and no register keeps it from before. Whether that or in_register (below) spares
//                      registers only a compilation tells (SPILLED in test_compile)
#include "ptx.cuh"
#include "read_order.cuh"
#include "tf32.cuh"

constexpr int CHUNK = 32, SUB_CHUNK = 8, NUM_SUBCHUNKS = CHUNK / SUB_CHUNK;  // SUB_CHUNK: tokens of a sub-chunk

#include "warpgroup.cuh"  // after CHUNK, which it uses

// A lane's values of a sub-chunk: x[2h + p] is channel g + 8h of token 2t + p; and of a chunk's four sub-chunks.
using LaneSubChunk = float[4];
using LaneChunk = LaneSubChunk[NUM_SUBCHUNKS];

template <typename T> __device__ __forceinline__ float2 unpack(u32 two);
template <> __device__ __forceinline__ float2 unpack<bf16>(u32 two) { return {low(two), high(two)}; }
template <> __device__ __forceinline__ float2 unpack<f16>(u32 two) {
  return {to_float(f16{u16(two)}), to_float(f16{u16(two >> 16)})};
}

// CUT_OFF_CORRECTION (tf32.cuh), for each operand in tf32 that is cut off: QueryRow has it in dA, for the queries or
// keys that meet dA, which is itself rounded; states.cuh in the operand of S; backward_keys.cu in scores, twice.

// Calls f(n, h) for this lane's tokens 2t and 2t + 1 in each sub-chunk n, of each channel g + 8h.
template <class F> __device__ __forceinline__ void each_token_pair(F f) {
#pragma unroll
  for (int n = 0; n < NUM_SUBCHUNKS; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) f(n, h);
}

// The register of Operand x that holds these two tokens of this channel.
template <class X> __device__ __forceinline__ auto& token_pair_of(X& x, int n, int h) {
  return x[n / 2][n % 2 * 2 + h];
}

// Keeps x in a register of its own, by a shuffle from the lane itself. `opaque` hides x from the compiler, but not from
// the assembler, which would compute x again at each use.
__device__ __forceinline__ int in_register(int x) { return __shfl_sync(0xffffffffu, x, threadIdx.x & 31); }

// The byte offset in a panel of 16-bit values of the 16 bytes that a lane addresses for ldmatrix and stmatrix, which
// move a warp's 16 of 64 channels, 16 tokens at a time; the next 16 tokens are 2048 bytes further on.
__device__ __forceinline__ int ldmatrix_offset() {
  const int thread = threadIdx.x, row = (thread & 7) + (thread >> 4 & 1) * 8;
  return row * 128 + ((thread / 32 % 4 * 2 + (thread >> 3 & 1)) ^ (row & 7)) * 16;
}

// Load and store 16-bit values of a warp's 16 channels. panel: the tile's panel with the warpgroup's 64 channels;
// offset: ldmatrix_offset(), here and in all functions below. Those for float32 do not read it.
template <typename T> __device__ __forceinline__ void load_operand(Operand& x, T (&panel)[CHUNK][64], int offset) {
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) ldmatrix_x4_trans(x[s], reinterpret_cast<char*>(panel) + offset + 2048 * s);
}
template <typename T>
__device__ __forceinline__ void store_operand(T (&panel)[CHUNK][64], const Operand& x, int offset) {
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) stmatrix_x4_trans(reinterpret_cast<char*>(panel) + offset + 2048 * s, x[s]);
}

// Load and store values of a warp's 16 channels as floats. panels: the warpgroup's one panel of 16-bit values, or its
// two of float32, whose numbers of this lane each_float (warpgroup.cuh) finds.
template <typename T> __device__ __forceinline__ void load_chunk(LaneChunk& x, T (*panels)[CHUNK][64], int offset) {
  Operand packed;
  load_operand(packed, *panels, offset);
  each_token_pair([&](int n, int h) {
    const float2 two = unpack<T>(token_pair_of(packed, n, h));
    x[n][2 * h] = two.x, x[n][2 * h + 1] = two.y;
  });
}
template <typename T>
__device__ __forceinline__ void store_chunk_values(T (*panels)[CHUNK][64], const LaneChunk& x, int offset) {
  Operand packed;
  each_token_pair([&](int n, int h) { token_pair_of(packed, n, h) = pack<T>(x[n][2 * h], x[n][2 * h + 1]); });
  store_operand(*panels, packed, offset);
}
__device__ __forceinline__ void load_chunk(LaneChunk& x, float (*panels)[CHUNK][32], int) {
  each_float(panels, [&](int index, float& value) { x[index / 4][index % 4] = value; });
}
__device__ __forceinline__ void store_chunk_values(float (*panels)[CHUNK][32], const LaneChunk& x, int) {
  each_float(panels, [&](int index, float& value) { value = x[index / 4][index % 4]; });
}

// ---- sums of gates ------------------------------------------------------------------------------------------------

// In nats, what a smaller gate counts as: in decays from a sub-chunk's middle, LEAST_GATE; in all others,
// FORGOTTEN_GATE, since -inf times a count of 0 would be NaN. e^-256 is 0 in float32.
constexpr float LEAST_GATE = -16.f, FORGOTTEN_GATE = -256.f;
static_assert(-LEAST_GATE * SUB_CHUNK / 2 < 87.f, "a decay from a sub-chunk's middle has an inverse in float32");

// How gates of type G are summed by tensor cores, in numbers of `Type`, so that sums are logarithms of base 2.
// LEAST_TWO, FORGOTTEN_GATE_TWO: -16 and -256 twice, in the halves of a register. A product's depth of 16 has a
// sub-chunk's 8 gates twice. ONE[half]: the bits of the factor of each half of the depth; both together count a gate
// once. For 16-bit gates they sum to log2 e (bf16: 1.4375 + 0.005188; f16: 1.442383 + 0.0003123); float32 gates are
// multiplied by log2 e before, their two halves are two different numbers, and both factors are 1. HALVES: the last bit
// of ONE's exponent, which all of them have set; without it the factor is half as large.
template <typename G> struct GateFormat;
template <> struct GateFormat<bf16> {
  using Type = bf16;
  static constexpr u32 LEAST_TWO = 0xc180c180u, FORGOTTEN_GATE_TWO = 0xc380c380u, HALVES = 0x80;
  static constexpr u32 ONE[2] = {0x3fb8u, 0x3baau};
};
template <> struct GateFormat<f16> {
  using Type = f16;
  static constexpr u32 LEAST_TWO = 0xcc00cc00u, FORGOTTEN_GATE_TWO = 0xdc00dc00u, HALVES = 0x400;
  static constexpr u32 ONE[2] = {0x3dc5u, 0x0d1eu};
};
template <> struct GateFormat<float> {
  using Type = bf16;
  static constexpr u32 HALVES = 0x80, ONE[2] = {0x3f80u, 0x3f80u};
};
// The normal number with these bits, in a 16-bit type that has FRACTION bits of fraction.
template <int FRACTION> constexpr float number_of(u32 bits) {
  const int exponent = int((bits & 0x7fffu) >> FRACTION) - (1 << (14 - FRACTION)) + 1;
  float x = 1.f + float(bits % (1u << FRACTION)) / float(1u << FRACTION);
  for (int n = 0; n < exponent; ++n) x *= 2.f;
  for (int n = 0; n > exponent; --n) x *= 0.5f;
  return bits & 0x8000u ? -x : x;
}
// Whether the numbers in both halves of a register are x.
template <int FRACTION> constexpr bool is_twice(u32 two, float x) {
  return number_of<FRACTION>(two & 0xffffu) == x && number_of<FRACTION>(two >> 16) == x;
}
// Whether the factors ONE sum to `sum`, and HALVES halves both.
template <int FRACTION, class Format> constexpr bool counts_once(Format, float sum) {
  const float error = number_of<FRACTION>(Format::ONE[0]) + number_of<FRACTION>(Format::ONE[1]) - sum;
  return error * error < 1e-10f && Format::HALVES == 1u << FRACTION && Format::ONE[0] & Format::ONE[1] & Format::HALVES;
}
static_assert(is_twice<7>(GateFormat<bf16>::LEAST_TWO, LEAST_GATE));
static_assert(is_twice<7>(GateFormat<bf16>::FORGOTTEN_GATE_TWO, FORGOTTEN_GATE));
static_assert(is_twice<10>(GateFormat<f16>::LEAST_TWO, LEAST_GATE));
static_assert(is_twice<10>(GateFormat<f16>::FORGOTTEN_GATE_TWO, FORGOTTEN_GATE));
static_assert(counts_once<7>(GateFormat<bf16>{}, LOG2E) && counts_once<10>(GateFormat<f16>{}, LOG2E));
static_assert(counts_once<7>(GateFormat<float>{}, 2.f));

// The gates of this lane's channels in a chunk, each at least FORGOTTEN_GATE, or LEAST_GATE if CLAMPED; float32 gates
// are multiplied by log2 e. A product of gates and GateCounts, of depth 16, sums a sub-chunk's 8 gates twice, once for
// each number of ONE. For 16-bit gates both halves of the left operand are the same numbers, which the assembler copies
// for each product, since an operand's four registers must differ. SECOND_NEGATED: the second half of both operands is
// negated, which leaves the product as it is, and saves the copies. Only the second pass has free registers for the
// negated gates. float32 gates ignore SECOND_NEGATED: their halves are rounded values and remainders, which differ. The
// constants SECOND_NEGATED and CLAMPED are names for `true` where a template argument of the same name is passed.
constexpr u32 SIGNS = 0x80008000u;
constexpr bool SECOND_NEGATED = true, CLAMPED = true, UNCLAMPED = false;
template <typename G, bool SECOND_NEGATED = false> struct LaneGates {
  using Type = typename GateFormat<G>::Type;  // of the numbers in operands
  Operand x;

  template <bool CLAMPED = false> __device__ __forceinline__ void load(G (*panels)[CHUNK][64], int offset) {
    constexpr u32 BOUND = CLAMPED ? GateFormat<G>::LEAST_TWO : GateFormat<G>::FORGOTTEN_GATE_TWO;
    load_operand(x, *panels, offset);
    each_token_pair([&](int n, int h) { token_pair_of(x, n, h) = max_nan<G>(token_pair_of(x, n, h), BOUND); });
  }
  // Sets `a` to sub-chunk n as a left operand, its 8 gates in both halves of the depth; CLAMPED: gates below LEAST_GATE
  // count as LEAST_GATE.
  template <bool CLAMPED> __device__ __forceinline__ void operand(u32 (&a)[4], int n) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      a[h] = CLAMPED ? max_nan<G>(token_pair_of(x, n, h), GateFormat<G>::LEAST_TWO) : token_pair_of(x, n, h);
      a[2 + h] = SECOND_NEGATED ? a[h] ^ SIGNS : a[h];
    }
  }
};
template <bool SECOND_NEGATED> struct LaneGates<float, SECOND_NEGATED> {
  using Type = GateFormat<float>::Type;
  LaneChunk x;

  template <bool CLAMPED = false> __device__ __forceinline__ void load(float (*panels)[CHUNK][32], int offset) {
    load_chunk(x, panels, offset);
    each_token_pair([&](int n, int h) {
      for (int p = 2 * h; p < 2 * h + 2; ++p) x[n][p] = LOG2E * max_nan(x[n][p], CLAMPED ? LEAST_GATE : FORGOTTEN_GATE);
    });
  }
  template <bool CLAMPED> __device__ __forceinline__ void operand(u32 (&a)[4], int n) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float first = CLAMPED ? max_nan(x[n][2 * h], LOG2E * LEAST_GATE) : x[n][2 * h];
      const float second = CLAMPED ? max_nan(x[n][2 * h + 1], LOG2E * LEAST_GATE) : x[n][2 * h + 1];
      a[h] = pack<bf16>(first, second);
      a[2 + h] = remainder_of(a[h], first, second);
    }
  }
};

// Right operands b [gate, token] of the sums of gates: how often each gate of a sub-chunk counts in the sum for token
// i = lane / 4: 0, 1, -1, 1/2 or -1/2 times. A lane's register b[half] has gates 2t (its low 16 bits) and 2t + 1. Each
// use computes its operand from masks, since registers are scarce.
template <class ReadOrder, typename G, bool SECOND_NEGATED = false> struct GateCounts {
  using Order = ReadOrder;
  using Gates = LaneGates<G, SECOND_NEGATED>;  // the gates that these operands count
  // Masks for this lane's two gates. written: gates up to i; read: gates up to the state that query i reads (RWKV-6: up
  // to i - 1); early: gates before the middle, which count -1 times. For mask = written or read, mask ^ early are the
  // gates between the middle and the token.
  int written, read, early;

  __device__ __forceinline__ GateCounts() {
    const int i = threadIdx.x >> 2 & 7, token = 2 * (threadIdx.x & 3);
    // The mask of those of the lane's two gates whose number is at most `last`.
    const auto up_to = [&](int last) { return (token <= last ? 0xffff : 0) | (token < last ? 0xffff0000 : 0); };
    written = up_to(i), read = up_to(i - ReadOrder::reads_before_write), early = token < SUB_CHUNK / 2 ? -1 : 0;
    // GLA: gate n lies between tokens n - 1 and n, and the middle is halfway through gate 4, the low 16 bits of the
    // lane with token == 4. These bits of the masks, and how often gate 4 then counts for token i:
    //            mask   early             mask ^ early      sign of `early`   counts
    //   i >= 4   all    HALVES            all but HALVES    +                 1/2
    //   i < 4    none   all but HALVES    all but HALVES    -                 -1/2
    if (!ReadOrder::reads_before_write && token == SUB_CHUNK / 2)
      early = (i < SUB_CHUNK / 2 ? 0xffff : 0) ^ GateFormat<G>::HALVES;
  }
  // Sets b[half] to masked(ONE[half] for both gates of a register, negated in the second half if SECOND_NEGATED).
  template <class F> static __device__ __forceinline__ void make_operand(u32 (&b)[2], F masked) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      b[half] = masked(GateFormat<G>::ONE[half] * 0x10001u ^ (half && SECOND_NEGATED && sizeof(G) == 2 ? SIGNS : 0));
  }
  // Sums from the middle to the token of `mask`, in which gates before the middle count negatively; `negative`: minus
  // these sums.
  __device__ __forceinline__ void from_middle(u32 (&b)[2], int mask, bool negative = false) const {
    mask = opaque(mask);
    const u32 minus = (negative ? ~early : early) & 0x80008000u;
    make_operand(b, [&](u32 one) { return (mask ^ early) & (one ^ minus); });
  }
  __device__ __forceinline__ void read_from_middle(u32 (&b)[2]) const { from_middle(b, read); }
  // Minus the sum from the middle: the exponent of a key's decay, in RWKV-6.
  __device__ __forceinline__ void written_to_middle(u32 (&b)[2]) const { from_middle(b, written, true); }
  __device__ __forceinline__ void from_start(u32 (&b)[2]) const {
    const int mask = opaque(read);
    make_operand(b, [&](u32 one) { return mask & one; });
  }
  __device__ __forceinline__ void to_end(u32 (&b)[2]) const {
    const int mask = opaque(written);
    make_operand(b, [&](u32 one) { return ~mask & one; });
  }
};

// Calls f(n, sums) for each sub-chunk n. b: an operand of GateCounts; sums, a LaneSubChunk: log2 of this lane's decays,
// sums of the sub-chunk's gates a [channel, gate], counted by b [gate, token].
template <typename G, bool SECOND_NEGATED, class F>
__device__ __forceinline__ void sum_gates(const LaneGates<G, SECOND_NEGATED>& g, const u32 (&b)[2], F f) {
#pragma unroll
  for (int n = 0; n < NUM_SUBCHUNKS; ++n) {
    u32 a[4];
    LaneSubChunk d = {};
    g.template operand<UNCLAMPED>(a, n);
    mma_m16n8k16(d, a, b, typename GateFormat<G>::Type{});
    f(n, d);
  }
}
// Sets `to` to e^(sum of gates), the decays of this lane's numbers.
template <typename G, bool SECOND_NEGATED>
__device__ __forceinline__ void exponentiate_sums(LaneChunk& to, const LaneGates<G, SECOND_NEGATED>& g,
                                                  const u32 (&b)[2]) {
  sum_gates(g, b, [&](int n, const LaneSubChunk& sum) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[n][i] = exp2_approx(sum[i]);
  });
}

// Set `to` to the decays of queries from the start of their sub-chunk, or to those of keys to its end. Counts:
// GateCounts, or the same looked up (backward_lookups.cuh), of these gates' type.
template <class Counts>
__device__ __forceinline__ void decays_from_start(LaneChunk& to, const typename Counts::Gates& g,
                                                  const Counts& counts) {
  u32 b[2];
  counts.from_start(b);
  exponentiate_sums(to, g, b);
}
template <class Counts>
__device__ __forceinline__ void decays_to_end(LaneChunk& to, const typename Counts::Gates& g, const Counts& counts) {
  u32 b[2];
  counts.to_end(b);
  exponentiate_sums(to, g, b);
}

// The decays over each sub-chunk, for this lane's two channels h.
struct SubChunkDecays {
  static_assert(NUM_SUBCHUNKS == 4, "this struct, Across and what sets them are written for four");
  float sub[NUM_SUBCHUNKS][2];  // [sub-chunk][h]

  // The decay over all sub-chunks before n, after n, and over the chunk.
  __device__ __forceinline__ float before(int n, int h) const {
    return n == 0 ? 1.f : n == 1 ? sub[0][h] : n == 2 ? sub[0][h] * sub[1][h] : sub[0][h] * sub[1][h] * sub[2][h];
  }
  __device__ __forceinline__ float after(int n, int h) const {
    return n == 3 ? 1.f : n == 2 ? sub[3][h] : n == 1 ? sub[2][h] * sub[3][h] : sub[1][h] * (sub[2][h] * sub[3][h]);
  }
  __device__ __forceinline__ float all(int h) const { return sub[0][h] * sub[1][h] * (sub[2][h] * sub[3][h]); }
};
// Sets d from log gates. Its operand b has no negated half: so it takes no gates with SECOND_NEGATED.
template <typename G> __device__ __forceinline__ void decays_of(SubChunkDecays& d, const LaneGates<G>& g) {
  const u32 b[2] = {GateFormat<G>::ONE[0] * 0x10001u, GateFormat<G>::ONE[1] * 0x10001u};
  sum_gates(g, b, [&](int n, const LaneSubChunk& sum) {
    for (int h = 0; h < 2; ++h) d.sub[n][h] = exp2_approx(sum[2 * h]);
  });
}
// Sets d from results of decays_from_start and decays_to_end: the decay from a sub-chunk's start through token 2t,
// times that from there to its end. If queries read before the write, the decay of query 2t + 1 is the one that ends
// with gate 2t.
template <class ReadOrder>
__device__ __forceinline__ void decays_of(SubChunkDecays& d, const LaneChunk& from_start, const LaneChunk& to_end) {
  each_token_pair(
      [&](int n, int h) { d.sub[n][h] = from_start[n][2 * h + ReadOrder::reads_before_write] * to_end[n][2 * h]; });
}

// ---- operands -------------------------------------------------------------------------------------------------------

// x as an operand in tf32. AS_MULTIPLIED: without the 13 bits that products ignore. So if the caller uses the operand
// in float32 arithmetic, too, as the first pass does for dg, both computations have the same number. The constants name
// the template's argument.
constexpr bool AS_MULTIPLIED = true, IN_FULL = false;
template <bool AS_MULTIPLIED> __device__ __forceinline__ float operand_value(float x) {
  return AS_MULTIPLIED ? cut_off(x) : x;
}

// Sets `queries` and `keys` to their factors in sub-chunk n: e^(the sum of gates from the middle to the state that
// query i reads), and e^-(the sum from the middle through the key's own gate). LOADED_CLAMPED: `gates` were loaded with
// CLAMPED; such gates serve for this function only.
template <bool LOADED_CLAMPED = false, class Counts>
__device__ __forceinline__ void decays_from_middle(LaneSubChunk& queries, LaneSubChunk& keys,
                                                   const typename Counts::Gates& gates, const Counts& counts, int n) {
  constexpr bool READS_BEFORE_WRITE = Counts::Order::reads_before_write;
  u32 a[4], b[2];
  LaneSubChunk read = {}, minus_written = {};
  gates.template operand<!LOADED_CLAMPED>(a, n);
  counts.read_from_middle(b);
  mma_m16n8k16(read, a, b, typename Counts::Gates::Type{});
  if (READS_BEFORE_WRITE) {
    counts.written_to_middle(b);
    mma_m16n8k16(minus_written, a, b, typename Counts::Gates::Type{});
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    queries[i] = exp2_approx(read[i]);
    keys[i] = READS_BEFORE_WRITE ? exp2_approx(minus_written[i]) : inverse(queries[i]);
  }
}

// Sets `queries` and `keys` to those of sub-chunk n, q and k, times their factors of decays_from_middle. Calls
// f(i, query, key) with the numbers without factors, i = 2h + p.
template <bool AS_MULTIPLIED, typename T, class F>
__device__ __forceinline__ void decay_within(LaneSubChunk& queries, LaneSubChunk& keys,
                                             const LaneSubChunk& query_decays, const LaneSubChunk& key_decays,
                                             const Operand& q, const Operand& k, int n, F f) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float2 query = unpack<T>(token_pair_of(q, n, h)), key = unpack<T>(token_pair_of(k, n, h));
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int i = 2 * h + p;
      f(i, p ? query.y : query.x, p ? key.y : key.x);
      queries[i] = operand_value<AS_MULTIPLIED>((p ? query.y : query.x) * query_decays[i]);
      keys[i] = operand_value<AS_MULTIPLIED>((p ? key.y : key.x) * key_decays[i]);
    }
  }
}

// A lane's operands, in tf32, of pairs of tokens in different sub-chunks. by8, at the borders after 8 and 24 tokens:
// queries of sub-chunks 1 and 3, or keys of 0 and 2; by16, at the border after 16 tokens: queries of 2 and 3, or keys
// of 0 and 1. The products' results, sums over the pairs of each of these queries or keys, have the same type and
// order. They lack the decay of the query or key itself: for dq and dk callers multiply by16 of queries of 3 by the
// decay of sub-chunk 2, of keys of 0 by that of 1, then all by the decay from the sub-chunk's start, or to its end.
struct Across {
  LaneSubChunk by8[2], by16[2];
};

// Stores queries times their decays in `to`, and calls put(n, h, x, y) with the lane's two queries of sub-chunk n and
// channel h, times their decays from the chunk's start and scale[h], for products with a state. scale[h]: the
// operator's scale, by channel because it includes a power of 2 that keeps the channel's queries in float16's range
// (QueryScale in states.cuh). outer_decays: those of queries from the start of their sub-chunk; d: decays over whole
// sub-chunks.
template <bool AS_MULTIPLIED, typename T, class F>
__device__ __forceinline__ void decay_queries(Across& to, const Operand& q, const LaneChunk& outer_decays,
                                              const SubChunkDecays& d, const float (&scale)[2], F put) {
  each_token_pair([&](int n, int h) {
    const float2 two = unpack<T>(token_pair_of(q, n, h));
    const float x[2] = {two.x * outer_decays[n][2 * h], two.y * outer_decays[n][2 * h + 1]},
                factor = scale[h] * d.before(n, h);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      if (n % 2) to.by8[n / 2][2 * h + p] = operand_value<AS_MULTIPLIED>(x[p]);
      if (n == 2) to.by16[0][2 * h + p] = operand_value<AS_MULTIPLIED>(x[p]);
      if (n == 3) to.by16[1][2 * h + p] = operand_value<AS_MULTIPLIED>(d.sub[2][h] * x[p]);
    }
    put(n, h, factor * x[0], factor * x[1]);
  });
}

// Stores keys times their decays in `to`, and calls put(n, h, x, y) with the lane's two keys of sub-chunk n and channel
// h, times their decays to the chunk's end. outer_decays: those of keys to the end of their sub-chunk; d: decays
// over whole sub-chunks.
template <bool AS_MULTIPLIED, typename T, class F>
__device__ __forceinline__ void decay_keys(Across& to, const Operand& k, const LaneChunk& outer_decays,
                                           const SubChunkDecays& d, F put) {
  each_token_pair([&](int n, int h) {
    const float2 two = unpack<T>(token_pair_of(k, n, h));
    const float x[2] = {two.x * outer_decays[n][2 * h], two.y * outer_decays[n][2 * h + 1]}, factor = d.after(n, h);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      if (n % 2 == 0) to.by8[n / 2][2 * h + p] = operand_value<AS_MULTIPLIED>(x[p]);
      if (n == 0) to.by16[0][2 * h + p] = operand_value<AS_MULTIPLIED>(d.sub[1][h] * x[p]);
      if (n == 1) to.by16[1][2 * h + p] = operand_value<AS_MULTIPLIED>(x[p]);
    }
    put(n, h, factor * x[0], factor * x[1]);
  });
}

// ---- pairs of tokens ------------------------------------------------------------------------------------------------

// dA's values of pairs [query, key] in tf32, for keys up to the query (RWKV-6: before it). pair_index is the index of a
// pair's value. It moves a row's groups of 8 keys: group m of query i is at place m XOR i % 4 XOR i / 4 % 2. So both
// reads touch 32 banks: that of add_keys, 8 keys of 4 neighbouring queries, and that of add_queries, 8 keys of queries
// 0, 2, 4 and 6 of a sub-chunk.
using Pairs = float[CHUNK][CHUNK];
__device__ __forceinline__ constexpr int pair_index(int query, int key) {
  return query * CHUNK + (key ^ 8 * ((query & 3) ^ (query >> 2 & 1)));
}
__device__ __forceinline__ float& pair_at(Pairs& x, int query, int key) { return x[0][pair_index(query, key)]; }
// x rounded to tf32, as dA and, in backward_keys.cu, the scores A are stored.
__device__ __forceinline__ float rounded_to_tf32(float x) { return __uint_as_float(to_tf32(x)); }
// RWKV-6: scale do_i . v_i of a token. Those of sub-chunk n are side by side in row n of Pairs, where pair_index puts
// keys 24 to 31 of query n: they are after the query and in no pair. So no function may store zeros for keys 24 to 31
// of queries 0 to 3.
__device__ __forceinline__ constexpr int self_weight_index(int n) {
  return n * CHUNK + (CHUNK - SUB_CHUNK ^ n * SUB_CHUNK);
}
static_assert(self_weight_index(0) == pair_index(0, CHUNK - SUB_CHUNK));
static_assert(self_weight_index(1) == pair_index(1, CHUNK - SUB_CHUNK));
static_assert(self_weight_index(2) == pair_index(2, CHUNK - SUB_CHUNK));
static_assert(self_weight_index(3) == pair_index(3, CHUNK - SUB_CHUNK));
__device__ __forceinline__ float& self_weight_at(Pairs& x, int token) {
  return x[0][self_weight_index(token / SUB_CHUNK) + token % SUB_CHUNK];
}
// The values of a lane's two tokens in sub-chunk n.
__device__ __forceinline__ float2 self_weights(Pairs& x, int n) {
  return *reinterpret_cast<const float2*>(&self_weight_at(x, n * SUB_CHUNK) + 2 * (threadIdx.x & 3));
}

// Stores dA of a query and of pairs of neighbouring keys, times CUT_OFF_CORRECTION, since queries and keys that meet dA
// in products are cut off to tf32. Self weights meet no tf32 product and lack that factor.
template <class ReadOrder> struct QueryRow {
  Pairs& dA;
  float scale, factor;
  int query, distance, index;  // distance: the query less its first key; index: of this pair in dA

  __device__ __forceinline__ QueryRow(Pairs& dA, int query, int first_key, float scale)
      : dA(dA),
        scale(scale),
        factor(CUT_OFF_CORRECTION * scale),
        query(query),
        distance(query - first_key),
        index(pair_index(query, first_key)) {}
  // Stores dA of the keys first_key + 8n and the next, from the query's do . v with both. 8n must not carry, as the XOR
  // below adds it: the passes' first keys are 2t, and for n < 2 also 16 + 2t. They put no keys from 16 on of queries
  // 0 to 3: self weights lie there. RWKV-6: also stores the query's self weight, if it is one of the keys.
  __device__ __forceinline__ void put(int n, float first, float second) const {
    const auto value = [&](int key, float product) {  // key: counted from first_key
      if (ReadOrder::reads_before_write && key == distance) self_weight_at(dA, query) = scale * product;
      return rounded_to_tf32(key < distance + !ReadOrder::reads_before_write ? factor * product : 0.f);
    };
    *reinterpret_cast<float2*>(&dA[0][index ^ 8 * n]) = {value(8 * n, first), value(8 * n + 1, second)};
  }
};

// d[channel, i] += sum_j x[channel, j] b[j, i], over the 8 tokens j of a sub-chunk. The right operand b has token 2t at
// depth t, and token 2t + 1 at depth t + 4, and so has the left operand that is made of x.
__device__ __forceinline__ void multiply_pairs(LaneSubChunk& d, const LaneSubChunk& x, const u32 (&b)[2]) {
  const u32 a[4] = {__float_as_uint(x[0]), __float_as_uint(x[2]), __float_as_uint(x[1]), __float_as_uint(x[3])};
  mma_tf32(d, a, b);
}

// Products of queries or keys and a chunk's Pairs. The index in Pairs (pair_index) of the first pair that a lane reads
// in the first sub-chunk: in sums over keys keys_index, of query lane / 4 with key 2t; in sums over queries
// queries_index, of query 2t with key lane / 4. Keys of sub-chunk m are at this index XOR 8m, queries of sub-chunk n
// 8 n CHUNK further on.
struct PairReader {
  const float* pairs;
  int keys_index, queries_index;

  // The caller keeps both indices from chunk to chunk.
  __device__ __forceinline__ PairReader(Pairs& x, int keys_index, int queries_index)
      : pairs(&x[0][0]), keys_index(keys_index), queries_index(queries_index) {}
  // Sums over the keys of sub-chunk `keys`, for the queries of sub-chunk `queries`: to_i += sum_j pairs_ij k_j.
  __device__ __forceinline__ void add_keys(LaneSubChunk& to, const LaneSubChunk& k, int queries, int keys) const {
    const float2 two = *reinterpret_cast<const float2*>(pairs + (keys_index ^ 8 * keys) + 8 * CHUNK * queries);
    const u32 b[2] = {__float_as_uint(two.x), __float_as_uint(two.y)};
    multiply_pairs(to, k, b);
  }
  // Sums over these queries, for these keys: to_j += sum_i pairs_ij q_i.
  __device__ __forceinline__ void add_queries(LaneSubChunk& to, const LaneSubChunk& q, int queries, int keys) const {
    const float* from = pairs + 8 * CHUNK * queries;
    // Query 2t + 1 is a row of CHUNK pairs later, where pair_index flips bit 0 of a group's place: keys ^ 1.
    static_assert(pair_index(1, 0) == CHUNK + 8 && pair_index(3, 0) - CHUNK == (pair_index(2, 0) ^ 8));
    const float first = from[queries_index ^ 8 * keys], second = from[(queries_index ^ 8 * (keys ^ 1)) + CHUNK];
    const u32 b[2] = {__float_as_uint(first), __float_as_uint(second)};
    multiply_pairs(to, q, b);
  }
};
