// what      States [K, V] in the registers of warpgroups, for Hopper's backward of GLA and RWKV-6: products with them,
//           and sums over a chunk's tokens. There are two passes: the first (backward_queries.cu) goes forwards in
//           time with the state S, the second (backward_keys.cu) backwards with its gradient dS. Both are "a state"
//           here, called S.
// shapes    A chunk has 32 tokens in four sub-chunks of 8. Lane 4 g + t of a warp has channels g and g + 8 of the
//           warp's 16, by index h; of a state, S[4n + 2h + p] is channel g + 8h, column 8n + 2t + p. All threads of a
//           warpgroup start products with states together
// numerics  A product with a state takes the state in tf32, which has float32's range (the first pass; the second where
//           TF32_READ says so), or as two bfloat16 numbers or one float16 number, by T. These roundings add up in the
//           gate's gradient from chunk to chunk, so the first pass stores S every CHECKPOINT_EVERY tokens, and the
//           second pass computes from each stored S anew what it carries from chunk to chunk, the sum over V of S dS. A
//           chunk's addition to a state is a product in T. In bfloat16 its queries or keys are two numbers: the gate's
//           gradient is a difference of what both passes compute from them, and a rounding error of one pass alone
//           would remain in it. float16 has no numbers below 6e-8. So queries that are added to dS are multiplied by a
//           power of 2 that depends on the chunk's first gate, which decays all of them (QueryScale). And dS is
//           multiplied by a power of 2 that depends on its largest value before a product reads it (scale_to_float16).
// limits    BK of 64, 128; BV of 64, 128
// tests     those of backward_queries.cu
//
// From the includes:
//   wgmma<type, N, K_MAJOR or MN_MAJOR>(d, a, b, accumulate): starts d[64, N] (+)= a b, with a in registers and b the
//     descriptor of a swizzled tile, [N, depth] if K_MAJOR, else [depth, N]; adding bytes / 16 to b moves the tile.
//     k_major_tile, mn_major_tile: such descriptors; ACCUMULATE: d += a b
//   wgmma_fence: to be called after registers of d or a were written and before the product; wgmma_commit: closes a
//     group of products; wgmma_wait<n>: until at most the n latest groups run. Until then d and a must not change
//   Tile<X, D>: a chunk's rows, in panels of 128 bytes a row; swizzled_offset(row, piece): the byte offset in a panel
//     of 16 bytes, at place `piece` XOR row % 8 of the row
//   LaneChunk: a lane's numbers of a chunk, x[n][2h + p]: sub-chunk n, channel h, token 2t + p; LaneSubChunk: of one
//     sub-chunk. Values: the same order, as accumulators, x[4n + 2h + p]. Operand: as left operand, two tokens of 16
//     bits a register; token_pair_of(x, n, h) finds a pair
//   SubChunkDecays d: over sub-chunks; d.all(h): over the chunk
//   pack: two floats in 16 bits each; remainder_of(two, x, y): their rounding errors, in bfloat16; cut_off: x as a
//     product in tf32 reads it; CUT_OFF_CORRECTION makes up for what it does not read
//   multiply_pairs(d, x, b): d[channel, i] += sum_j x[channel, j] b[j, i], over the 8 tokens j of a sub-chunk
//   each_pair_of_state: calls f for a lane's pairs of columns of a state and their addresses; HAS_FULL_PATH: without
//     branches where V is BV
#include "gated/sm90/decays.cuh"

constexpr int CHECKPOINT_EVERY = 1024;  // tokens; gated_backward.launch_hopper has memory for the states
static_assert(CHECKPOINT_EVERY % CHUNK == 0, "states are stored between chunks");

// The index from which a sequence's stored states are counted: the state before its token n * CHECKPOINT_EVERY has this
// index + n. Segments are such sequences, whose tokens count from work.start on. Only states with n >= 1 are stored, so
// that no two sequences of a batch row share an index: the last one of a sequence is at most its end /
// CHECKPOINT_EVERY, and the first one of the next sequence is greater.
__device__ __forceinline__ int first_checkpoint(const Shape& shape, const WorkTile& work) {
  return int((work.batch * shape.H + work.head) * (shape.T / CHECKPOINT_EVERY + 1)) + work.start / CHECKPOINT_EVERY;
}
// The address of this thread's numbers S[0] ... S[3] of the stored state with index `number`. The thread's next four
// numbers are 2 BK float4 later: a float4 for each of the 2 BK threads that hold the state, threads 0 to 2 BK - 1 of
// both passes.
template <int BK, int BV> __device__ __forceinline__ float4* checkpoint_at(float* checkpoints, int number) {
  return reinterpret_cast<float4*>(checkpoints + i64(number) * (BK * BV)) + threadIdx.x;
}

// Whether T's exponents have fewer bits than float32's: float16's do. One float16 number, of 11 bits, is enough where
// an operand in bfloat16, of 8 bits, takes two numbers.
template <typename T> constexpr bool IS_FLOAT16 = false;
template <> constexpr bool IS_FLOAT16<f16> = true;

// For a state whose largest magnitude is `largest`: `up` is the power of 2 by which that becomes 2^13 to 2^14, near
// float16's largest number, `down` its inverse; both are 1 if `largest` is between 2^-8 and 2^15.
struct Scale {
  float up, down;
};
__device__ __forceinline__ Scale scale_to_float16(float largest) {
  const int exponent = max(int(__float_as_uint(largest) >> 23), 14);
  if (exponent >= 127 - 8 && exponent < 127 + 15) return {1.f, 1.f};
  return {__uint_as_float(u32(267 - exponent) << 23), __uint_as_float(u32(exponent - 13) << 23)};
}

// A gate is strong if its decay is below STRONG_DECAY, 2^-STRONG. The largest QueryScale::up is 2^MOST_UP.
constexpr int STRONG = 8, MOST_UP = 90;
constexpr float STRONG_DECAY = 1.f / (1 << STRONG);

// For a lane's two channels: `up`, the power of 2 by which queries are multiplied so that those decayed by the chunk's
// first gate stay in float16's range, and its inverse `down`; both 1 unless that gate is strong. Callers multiply dS by
// `up` before the queries are added to it, and by `down` after. outer_decays: decays of queries from the start of their
// sub-chunk. RWKV-6: always 1, since its first query is not decayed.
struct QueryScale {
  float up[2], down[2];
  bool is_one;  // for all channels of the warp
};
template <class ReadOrder, typename T>
__device__ __forceinline__ QueryScale scale_of_queries(const LaneChunk& outer_decays) {
  QueryScale s = {{1.f, 1.f}, {1.f, 1.f}, true};
  if (IS_FLOAT16<T> && !ReadOrder::reads_before_write) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float first = __shfl_sync(0xffffffffu, outer_decays[0][2 * h], threadIdx.x & 28);
      // MOST_UP: dS times `up` stays in float32's range, as chunks whose dS is LARGEST_DS = 2^29 or more do not come
      // here (backward_keys.cu), and backward_segments.cu multiplies `up` by the chunk's decay first, which leaves
      // about 1 at most, as the first gate's decay is a factor of it.
      const int bounded = max(int(__float_as_uint(first) >> 23), 127 - MOST_UP),
                exponent = bounded < 127 - STRONG ? bounded : 127;
      s.up[h] = __uint_as_float(u32(254 - exponent) << 23), s.down[h] = __uint_as_float(u32(exponent) << 23);
    }
    s.is_one = !__any_sync(0xffffffffu, s.up[0] != 1.f || s.up[1] != 1.f);
  }
  return s;
}
// Whether QueryScale::up is not 1 for some channel of the warp, which is rare.
template <class ReadOrder, typename T>
__device__ __forceinline__ bool first_gate_is_strong(const LaneChunk& outer_decays) {
  if (!IS_FLOAT16<T> || ReadOrder::reads_before_write) return false;
  return __any_sync(0xffffffffu,
                    (threadIdx.x & 3) == 0 && fminf(outer_decays[0][0], outer_decays[0][2]) < STRONG_DECAY);
}

// Multiplies S of this lane's first channel by by0, and of its second one by by1.
template <int BV> __device__ __forceinline__ void scale_state(float (&S)[BV / 2], float by0, float by1) {
#pragma unroll
  for (int i = 0; i < BV / 2; ++i) S[i] *= i >> 1 & 1 ? by1 : by0;
}
// The largest magnitude of S in a warp's channels, or up to twice that: the largest sum of two neighbours' magnitudes,
// since a maximum takes twice the time of a sum. Bits of floats that are not negative have the order of the floats.
template <int BV> __device__ __forceinline__ float largest_of(const float (&S)[BV / 2]) {
  float parts[4] = {};  // four independent chains of maxima, for their latency
#pragma unroll
  for (int i = 0; i < BV / 4; ++i) parts[i % 4] = fmaxf(parts[i % 4], fabsf(S[2 * i]) + fabsf(S[2 * i + 1]));
  const float x = fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3]));
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
}

// v or do of a chunk in float32 [token, column], in the order that start_state_read_part needs: of every 8 columns
// first the even ones, then the odd ones.
template <int BV> using FloatTile = Tile<float, BV>;

// Writes a FloatTile from a tile of T, by ordinary stores: before a product reads it, its writers call
// fence_proxy_async and arrive at a barrier. WARPS warps share the rows; `warp` is the caller's number among them.
template <int WARPS, typename T, int BV>
__device__ __forceinline__ void put_float_tile(FloatTile<BV>& to, T (&from)[BV / 64][CHUNK][64], int warp, int lane) {
  static_assert(BV == 64 || BV == 128);
  // PIECES: pieces of 8 columns in a row; ROWS: rows that a warp writes in a step; STEPS: steps for 8 rows.
  constexpr int PIECES = BV / 8, ROWS = 32 / PIECES, STEPS = 8 / ROWS;
  // Of 8 lanes four have a row r, and four the row r XOR 5: so neither loads nor stores of swizzled tiles have bank
  // conflicts. The rows of the steps are, for BV = 128, 0 5 | 1 4 | 2 7 | 3 6, for 64, 0 5 2 7 | 1 4 3 6; then the same
  // 8 further on. A row's pieces are numbered by the bits of `lane` that `row` does not take.
  const int row = (lane >> 2 & 1) * 5 ^ lane / (2 * PIECES) * 2, piece = lane & 3 | lane >> 1 & PIECES - 4;
  const int source = piece / 8 * CHUNK * 128 + swizzled_offset(row, piece % 8),
            target = piece / 4 * CHUNK * 128 + swizzled_offset(row, piece % 4 * 2);
#pragma unroll 1
  for (int step = warp; step < CHUNK / ROWS; step += WARPS) {
    // The step's row is `row` XOR step % STEPS, and 8 (step / STEPS) further down. `flip` is that XOR of an offset in
    // bytes: of the row, and of the place to which the swizzle moves a piece.
    const int down = step / STEPS * 8 * 128, flip = step % STEPS * (128 + 16);
    const uint4 x = *reinterpret_cast<const uint4*>(at_byte_offset(from, (source ^ flip) + down));
    const float2 a = unpack<T>(x.x), b = unpack<T>(x.y), c = unpack<T>(x.z), d = unpack<T>(x.w);
    *reinterpret_cast<float4*>(at_byte_offset(to, (target ^ flip) + down)) = {a.x, b.x, c.x, d.x};
    *reinterpret_cast<float4*>(at_byte_offset(to, (target ^ flip ^ 16) + down)) = {a.y, b.y, c.y, d.y};
  }
}

// Starts part `part` of the product x[channel, token] = S tokens^T in tf32: it sums over TILES times 8 columns. Callers
// start a part beside the work of each sub-chunk. columns: registers for the part's copy of S. First waits for the
// previous part, whose copy of S is in the same registers. Callers commit no other group between parts, and wait after
// the last one before they read x.
template <int BV, int TILES>
__device__ __forceinline__ void start_state_read_part(Values& x, u32 (&columns)[TILES][4], const float (&S)[BV / 2],
                                                      FloatTile<BV>& tokens, int part) {
  if (part) wgmma_wait<0>();
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int m = 0; m < 4; ++m)
      columns[n][m] = __float_as_uint(CUT_OFF_CORRECTION * S[4 * (part * TILES + n) + (m == 1 ? 2 : m == 2 ? 1 : m)]);
  const u64 b = k_major_tile(tokens);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int tile = part * TILES + n;
    wgmma<tf32, CHUNK, K_MAJOR>(x, columns[n], b + (tile / 4 * CHUNK * 128 + tile % 4 * 32) / 16, tile > 0);
  }
  wgmma_commit();
}

// Starts a part of S tokens^T, as above, with tokens in T, and S in as many numbers of T as hold it (NUMBERS): two in
// bfloat16, a rounded number and its rounding error; one in float16, as the caller has multiplied S by a power of 2
// that brings it into float16's range. First waits for the part whose copy of S is in the same registers: the previous
// one, in float16 the one before that. Calls put(n, this lane's rounded numbers) for the n-th 16 columns of S: if BK =
// 64, the second pass stores them in shared memory, as an operand of dv.
template <int BV, typename T, class Put>
__device__ __forceinline__ void start_state_read_part(Values& x, u32 (&columns)[BV / 8 / NUM_SUBCHUNKS][4],
                                                      const float (&S)[BV / 2], T (&tokens)[BV / 64][CHUNK][64],
                                                      int part, Put put) {
  constexpr int TILES = BV / 16 / NUM_SUBCHUNKS, NUMBERS = IS_FLOAT16<T> ? 1 : 2, PARTS_HELD = 2 / NUMBERS;
  u32(*const copy)[4] = columns + part % PARTS_HELD * TILES;
  if (part >= PARTS_HELD) wgmma_wait<PARTS_HELD - 1>();
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const float* from = S + 8 * (part * TILES + n);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      copy[NUMBERS * n][m] = pack<T>(from[2 * m], from[2 * m + 1]);
      if constexpr (NUMBERS == 2) copy[2 * n + 1][m] = remainder_of(copy[2 * n][m], from[2 * m], from[2 * m + 1]);
    }
    put(part * TILES + n, copy[NUMBERS * n]);
  }
  const u64 b = k_major_tile(tokens);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < NUMBERS * TILES; ++n) {
    const int tile = part * TILES + n / NUMBERS;
    wgmma<T, CHUNK, K_MAJOR>(x, copy[n], b + (tile / 4 * CHUNK * 128 + tile % 4 * 32) / 16, part + n > 0);
  }
  wgmma_commit();
}

// Starts the whole product x[channel, token] = S tokens^T in tf32; needs registers for a copy of S.
template <int BV>
__device__ __forceinline__ void start_state_read(Values& x, const float (&S)[BV / 2], FloatTile<BV>& tokens) {
  u32 columns[BV / 8][4];
  start_state_read_part<BV>(x, columns, S, tokens, 0);
}

// Starts S[channel, column] += sum over tokens of x[channel, token] tokens[token, column]. The caller has called
// wgmma_fence, and calls wgmma_commit after it; until it has waited, S and x must not change.
template <typename T, int BV>
__device__ __forceinline__ void start_state_write(float (&S)[BV / 2], const Operand& x,
                                                  T (&tokens)[BV / 64][CHUNK][64]) {
  const u64 b = mn_major_tile(tokens, CHUNK * 128);
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) wgmma<T, BV, MN_MAJOR>(S, x[s], b + s * 16 * 128 / 16, ACCUMULATE);
}

// This lane's queries or keys of a chunk as the operand of the product that adds them to a state: rounded to T, and for
// bfloat16 also the rounding errors, rounded to T. put: the lane's two tokens x, y of sub-chunk n, channel h.
template <typename T> struct StateOperand {
  Operand rounded, remainder;

  __device__ __forceinline__ void put(int n, int h, float x, float y) {
    token_pair_of(rounded, n, h) = pack<T>(x, y);
    if (!IS_FLOAT16<T>) token_pair_of(remainder, n, h) = remainder_of(token_pair_of(rounded, n, h), x, y);
  }
};
template <typename T, int BV>
__device__ __forceinline__ void start_state_write(float (&S)[BV / 2], const StateOperand<T>& x,
                                                  T (&tokens)[BV / 64][CHUNK][64]) {
  start_state_write<T, BV>(S, x.rounded, tokens);
  if (!IS_FLOAT16<T>) start_state_write<T, BV>(S, x.remainder, tokens);
}
// Two queries or keys x and y, with the values that they have in the product which adds them to a state. One pass adds
// them to its state, the other multiplies these values by products with its state; the gate's gradient is a difference
// of both, whose terms cancel only if the values are the same. Two bfloat16 numbers hold so much of x that x is taken.
template <typename T> __device__ __forceinline__ float2 state_values(float x, float y) {
  return IS_FLOAT16<T> ? unpack<T>(pack<T>(x, y)) : float2{x, y};
}

// S <- diag(up) diag(D) S, D the decay over the chunk; up0, up1: of the lane's two channels.
template <int BV>
__device__ __forceinline__ void decay_state(float (&S)[BV / 2], const SubChunkDecays& d, float up0 = 1.f,
                                            float up1 = 1.f) {
  scale_state<BV>(S, up0 * d.all(0), up1 * d.all(1));
}

// x[channel, i] <- the sum of x over the chunk's tokens before token i. counted: the operand that earlier_tokens sets.
// all: for each of the lane's two channels the sum over all tokens. The sums are products of x, as two tf32 numbers,
// and of ones.
__device__ __forceinline__ void sum_earlier_tokens(LaneChunk& x, float (&all)[2], const u32 (&counted)[2]) {
  const u32 one = __float_as_uint(1.f), ones[2] = {one, one};
  LaneSubChunk sum = {};
#pragma unroll
  for (int n = 0; n < NUM_SUBCHUNKS; ++n) {
    LaneSubChunk truncated, remainder;
#pragma unroll
    for (int m = 0; m < 4; ++m)
      truncated[m] = cut_off(x[n][m]), remainder[m] = x[n][m] - truncated[m], x[n][m] = sum[m];
    multiply_pairs(x[n], truncated, counted);
    multiply_pairs(x[n], remainder, counted);
    multiply_pairs(sum, truncated, ones);
    multiply_pairs(sum, remainder, ones);
  }
  all[0] = sum[0], all[1] = sum[2];
}

// Sets `counted`, a right operand [token, i] of tf32 numbers, to 1 for tokens before token i of a sub-chunk, else to 0.
// The lane has tokens 2t and 2t + 1 and i = lane / 4.
__device__ __forceinline__ void earlier_tokens(u32 (&counted)[2]) {
  const int thread = opaque(threadIdx.x), i = thread >> 2 & 7, token = 2 * (thread & 3);
  const u32 one = __float_as_uint(1.f);
  counted[0] = token < i ? one : 0, counted[1] = token + 1 < i ? one : 0;
}
// sum_earlier_tokens by shuffles, for places where a sum on tensor cores would wait for a product with a state that
// they are computing. AND_LATER: sums over token i and the tokens after it instead.
constexpr bool FROM_TOKEN_ON = true, BEFORE_TOKEN = false;
template <bool AND_LATER> __device__ __forceinline__ void sum_tokens_by_shuffles(LaneChunk& x, float (&all)[2]) {
  const int t = opaque(threadIdx.x) & 3;  // opaque: computed again, not held in a register
  // Of the four lanes with a channel, the neighbour is lane t ^ 1. Whether its tokens count in this lane's sums, and
  // whether those of the other two lanes do.
  const bool neighbour_counts = t % 2 == !AND_LATER, other_two_count = t / 2 == !AND_LATER;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int step = 0; step < NUM_SUBCHUNKS; ++step) {
      LaneSubChunk& sums = x[AND_LATER ? NUM_SUBCHUNKS - 1 - step : step];
      // Of the lane's two tokens, `more` is the one whose sum has one term more.
      float &more = sums[2 * h + !AND_LATER], &less = sums[2 * h + AND_LATER];
      const float lane_sum = more + less, neighbour = __shfl_xor_sync(0xffffffffu, lane_sum, 1),
                  sum_of_two = lane_sum + neighbour, other_two = __shfl_xor_sync(0xffffffffu, sum_of_two, 2);
      float others = neighbour_counts ? neighbour : 0.f;
      if (step) others += all[h];
      if (other_two_count) others += other_two;
      all[h] = step ? all[h] + (sum_of_two + other_two) : sum_of_two + other_two;
      more = others + (AND_LATER ? lane_sum : less), less = AND_LATER ? others + less : others;
    }
  }
}

// Loads the state that a block starts from; zeros if `given` is null. channel: the lane's first one, of the head's.
template <int BV>
__device__ __forceinline__ void load_state(float (&S)[BV / 2], const float* given, const Shape& shape, int channel) {
#pragma unroll
  for (int i = 0; i < BV / 2; ++i) S[i] = 0.f;
  if (given)
    each_pair_of_state<BV, HAS_FULL_PATH>(S, given, shape, channel, [](float& x, float& y, const float* from) {
      const float2 two = *reinterpret_cast<const float2*>(from);
      x = two.x, y = two.y;
    });
}
