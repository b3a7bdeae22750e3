// what      For chunks with large growth, whose log gates are far above 0, in Hopper's backward of GLA and RWKV-6: the
//           tests that find such chunks, and what both passes (backward_queries.cu, backward_keys.cu) compute of them,
//           token by token in float32. The first pass goes forwards in time with the state S, the second backwards with
//           its gradient dS. Layouts: decays.cuh; query_share and its units: query_share.cuh.
// math      Decays [K] are e^(sum of log gates g): D over all gates of the chunk, D_ij over gates j + 1 to i, E_i over
//           those up to i (RWKV-6: D_ij and E_i end with gate i - 1), L_j over those after j. dA_ij = scale do_i . v_j.
//           First pass; S: the state before the chunk
//             state_term_i = q_i scale E_i S do_i;  query_sums = sum_i state_term_i;  S_t = e^g_t S_{t-1} + k_t v_t^T
//             dq_i = scale E_i S do_i + sum_{j<=i} dA_ij D_ij k_j  (RWKV-6: j < i, + dA_ii u k_i)
//             query_share_t = sum_{i>=t} (state_term_i + q_i sum_{j<t} dA_ij D_ij k_j)  (RWKV-6: i > t)
//           Second pass; dS: the gradient, by later chunks, of the state after the chunk; dS_t: that of S_t, by the
//           outputs of tokens from t on (RWKV-6: t + 1), also in later chunks; carried: sum_v of dS times that state
//             GLA dS_{t-1} = e^g_t dS_t + scale q_{t-1} do_{t-1}^T;  RWKV-6 dS_{t-1} = e^g_t dS_t + scale q_t do_t^T
//             dk_j = dS_j v_j  (RWKV-6: + dA_jj u q_j);  dv_j = dS_j^T k_j  (RWKV-6: + scale (q_j . u k_j) do_j)
//             key_term_j = k_j L_j dS v_j;  before = D sum_v S dS = carried - sum_j key_term_j
//             dg_t = query_share_t + sum_{j<t} key_term_j + before;  then carried <- before + query_sums
//           x e^sum is grown(x, sum) (tensor.cuh): finite, if the result is, also where e^sum is not
// numerics  Products on tensor cores need the decay between two tokens as two factors, for which growth is too much: a
//           gate counts as LEAST_GATE = -16 at least within a sub-chunk, so e^(growth - 16) of a token would outlast a
//           gate of -inf; and float16 ends at e^11. The results here overflow only where the recurrence itself does.
// tests     test_growth_gradients, test_growth
//
// From the includes:
//   Tile<X, D> (chunk_copies.cuh): D numbers of type X of each of the chunk's tokens, in swizzled panels
//   LaneGates (decays.cuh): a lane's log gates, float32 ones times LOG2E; each_token_pair, token_pair_of: its pairs of
//     tokens; LaneChunk: its numbers; Pairs, pair_at: dA; self_weight_at: RWKV-6's scale do_i . v_i
//   IN_UNITS<G> (query_share.cuh): whether shares of chunks that do not grow always have a unit: if G is bfloat16. A
//     unit is kept as its float32 exponent, ONE for 2^0, in the lowest bits of the channel's query sum, where
//     sum_with_unit puts it. power_of_two(exponent)
//   query_share_value(x, sum, grew): a stored number x of a share; sum: the channel's query sum; grew: whether it is
//     stored as for a chunk that grows
// S[4n + 2h + p]: channel h of the lane's two, column 8n + 2t + p, t = lane % 4. All lanes of a warp call functions
// with shuffles or votes together
#include "gated/sm90/query_share.cuh"
#include "lanes.cuh"

// GROWTH_LIMIT: the largest sum, in nats, of a channel's gates above 0 over a chunk for which products are used: at
// most e^(LEAST_GATE + GROWTH_LIMIT) of a token then outlasts a gate of -inf, e^-10 (float16: e^-12). If every gate is
// below GROWTH, the sum is not looked at, and products are used: beside a gate of -inf a sub-chunk then has 7 gates,
// which leave at most e^-9 (float16: e^-14), and 32 such gates of float16 data are below 8 nats.
template <typename T> constexpr float GROWTH_LIMIT = 6.f;
template <> constexpr float GROWTH_LIMIT<f16> = 4.f;
template <typename T> constexpr float GROWTH = 1.f;
template <> constexpr float GROWTH<f16> = 0.25f;
static_assert(LEAST_GATE + (SUB_CHUNK - 1) * GROWTH<bf16> <= -9.f &&
              LEAST_GATE + (SUB_CHUNK - 1) * GROWTH<f16> < -14.f);
static_assert(CHUNK * GROWTH<f16> <= 8.f && LEAST_GATE + GROWTH_LIMIT<bf16> <= -10.f);

// FORGOTTEN: the usual rounding error of the second pass's sums over V, relative to the terms that they add up. If a
// channel's decay over a chunk is smaller, what is left of its state is less than that. ROUNDING: the largest error.
constexpr float FORGOTTEN = 0x1p-20f, ROUNDING = 0x1p-7f;

// Whether a channel's decay times sum_v S dS, with S the state before a chunk and dS the gradient of the state after
// it, counts as 0. rest: its value, computed as sum_v (state after the chunk) dS less the terms of the chunk's keys;
// size: the magnitude of these two numbers; decay: the decay over the chunk. If `decay` is below FORGOTTEN, `rest` is
// mostly rounding error. Then it counts as 0 if kept_ratio is infinite. The caller sets kept_ratio to ROUNDING if later
// chunks may have made the gradient grow as much as this chunk's gates decay the state: then a rest of more than
// ROUNDING times `size` is more than rounding error, and is kept. No branches, since a warp's channels differ.
__device__ __forceinline__ bool is_forgotten(float decay, float rest, float size, float kept_ratio) {
  return (decay == 0.f) | ((decay < FORGOTTEN) & !(fabsf(rest) > kept_ratio * fabsf(size)));
}

// Whether the largest gate, `largest`, is GROWTH or more, or NaN.
template <typename T> __device__ __forceinline__ bool grows(float largest) { return !(largest < GROWTH<T>); }

// Whether one of the gates that this lane holds is GROWTH or more, or NaN.
template <typename T, typename G> __device__ __forceinline__ bool some_gate_grows(const LaneGates<G>& gates) {
  u32 largest = gates.x[0][0];
  each_token_pair([&](int n, int h) { largest = max_nan<G>(largest, token_pair_of(gates.x, n, h)); });
  const float2 two = unpack<G>(largest);
  return grows<T>(max_nan(two.x, two.y));
}
template <typename T> __device__ __forceinline__ bool some_gate_grows(const LaneGates<float>& gates) {
  float largest = gates.x[0][0];
  each_token_pair([&](int n, int h) { largest = max_nan(max_nan(largest, gates.x[n][2 * h]), gates.x[n][2 * h + 1]); });
  return grows<T>(largest / LOG2E);
}

// ---- a token --------------------------------------------------------------------------------------------------------

// This lane's first channel (the second one is 8 later), and the lane's number among the four lanes of a channel. With
// `opaque` both are computed again each time, so that other code, where registers are scarce, does not hold them.
__device__ __forceinline__ int first_channel_of_lane() {
  const int thread = opaque(threadIdx.x);
  return thread / 32 * 16 + (thread >> 2 & 7);
}
__device__ __forceinline__ int lane_of_channel() { return opaque(threadIdx.x) & 3; }
// The sum over the four lanes of a channel.
__device__ __forceinline__ float channel_sum(float x) { return sum_over_lanes<4>(x); }

// The element of channel or column `column` of token `row` in a tile.
template <typename X> __device__ __forceinline__ X& value_at(X (*tile)[CHUNK][PANEL<X>], int row, int column) {
  constexpr int PIECE = 16 / sizeof(X);
  return swizzled(tile[column / PANEL<X>][0], row, column % PANEL<X> / PIECE)[column % PIECE];
}

// Calls f(n, the values of columns 8n + 2t and 8n + 2t + 1 of token `row`), t = lane % 4.
template <typename T, int PANELS, class F>
__device__ __forceinline__ void each_column(T (&tile)[PANELS][CHUNK][64], int row, F f) {
  const int first = swizzled_offset(row, 0) + lane_of_channel() * 4;
#pragma unroll
  for (int n = 0; n < PANELS * 8; ++n)
    f(n, unpack<T>(*reinterpret_cast<const u32*>(at_byte_offset(tile[n / 8], first ^ n % 8 * 16))));
}

// Sets x[h] to the sum over columns of S times token `row` of the tile, for this lane's two channels.
template <typename T, int BV>
__device__ __forceinline__ void read_token(float (&x)[2], const float (&S)[BV / 2], T (&tile)[BV / 64][CHUNK][64],
                                           int row) {
  x[0] = x[1] = 0.f;
  each_column(tile, row, [&](int n, float2 two) {
#pragma unroll
    for (int h = 0; h < 2; ++h) x[h] = fmaf(S[4 * n + 2 * h], two.x, fmaf(S[4 * n + 2 * h + 1], two.y, x[h]));
  });
#pragma unroll
  for (int h = 0; h < 2; ++h) x[h] = channel_sum(x[h]);
}

// S <- by S + x y^T for this lane's two channels, where y [BV] is token `row` of the tile: by0 and x0 are the numbers
// of the first channel, by1 and x1 of the second.
template <typename T, int BV>
__device__ __forceinline__ void write_token(float (&S)[BV / 2], float by0, float by1, float x0, float x1,
                                            T (&tile)[BV / 64][CHUNK][64], int row) {
  each_column(tile, row, [&](int n, float2 two) {
    S[4 * n] = fmaf(x0, two.x, by0 * S[4 * n]), S[4 * n + 1] = fmaf(x0, two.y, by0 * S[4 * n + 1]);
    S[4 * n + 2] = fmaf(x1, two.x, by1 * S[4 * n + 2]), S[4 * n + 3] = fmaf(x1, two.y, by1 * S[4 * n + 3]);
  });
}

// The values of token `row` in this lane's two channels, `channel` and `channel` + 8.
template <typename X> __device__ __forceinline__ float2 channels_of(X (*tile)[CHUNK][PANEL<X>], int row, int channel) {
  return {to_float(value_at(tile, row, channel)), to_float(value_at(tile, row, channel + 8))};
}
// e^(the log gates) of token `row` in these two channels.
template <typename G, int PANELS>
__device__ __forceinline__ float2 token_decays(G (&gates)[PANELS][CHUNK][PANEL<G>], int row, int channel) {
  const float2 g = channels_of(gates, row, channel);
  return {exp2_approx(LOG2E * g.x), exp2_approx(LOG2E * g.y)};
}

// ---- whether a chunk is computed token by token --------------------------------------------------------------------

// Whether gates above 0 of one of the warp's channels sum to more than GROWTH_LIMIT; also true for NaN. Not inlined,
// and with few registers, since the callers have none left. panels: the gates of the warpgroup's 64 channels.
template <typename T, typename G> __device__ __noinline__ bool sum_exceeds_growth(G (*panels)[CHUNK][PANEL<G>]) {
  const int channel = first_channel_of_lane() % 64;
  float sums[2] = {};
#pragma unroll 1
  for (int row = lane_of_channel(); row < CHUNK; row += 4) {
    const float2 gates = channels_of(panels, row, channel);
    sums[0] += max_nan(gates.x, 0.f), sums[1] += max_nan(gates.y, 0.f);
  }
  return __any_sync(0xffffffffu,
                    !(channel_sum(sums[0]) <= GROWTH_LIMIT<T>) | !(channel_sum(sums[1]) <= GROWTH_LIMIT<T>));
}
// Whether products would leave their range because of the chunk's gates: then it is computed token by token. The same
// for all lanes of the warp. gates: this lane's; panels: those of the warpgroup's 64 channels, in shared memory.
template <typename T, typename G>
__device__ __forceinline__ bool exceeds_growth(const LaneGates<G>& gates, G (*panels)[CHUNK][PANEL<G>]) {
  return __any_sync(0xffffffffu, some_gate_grows<T>(gates)) && sum_exceeds_growth<T>(panels);
}

// Computes the state after a chunk from S, the state before it.
template <typename T, typename G, int BV, int PANELS, int GATES>
__device__ __forceinline__ void update_state_by_token(float (&S)[BV / 2], T (&k)[PANELS][CHUNK][64],
                                                      G (&g)[GATES][CHUNK][PANEL<G>], T (&v)[BV / 64][CHUNK][64],
                                                      int channel) {
#pragma unroll 1
  for (int row = 0; row < CHUNK; ++row) {
    const float2 decay = token_decays(g, row, channel), key = channels_of(k, row, channel);
    write_token<T, BV>(S, decay.x, decay.y, key.x, key.y, v, row);
  }
}

// Computes the gradient of the state before a chunk from dS, that of the state after it. Calls f(row) when dS is the
// gradient of the state after token `row`'s write.
template <class ReadOrder, typename T, typename G, int BV, int PANELS, int GATES, class F>
__device__ __forceinline__ void update_gradient_by_token(float (&dS)[BV / 2], T (&q)[PANELS][CHUNK][64],
                                                         G (&g)[GATES][CHUNK][PANEL<G>], T (&do_)[BV / 64][CHUNK][64],
                                                         float scale, int channel, F f) {
#pragma unroll 1
  for (int row = CHUNK - 1; row >= 0; --row) {
    const float2 decay = token_decays(g, row, channel), query = channels_of(q, row, channel);
    const float x = scale * query.x, y = scale * query.y;
    if (ReadOrder::reads_before_write) {
      f(row);
      write_token<T, BV>(dS, decay.x, decay.y, x, y, do_, row);
    } else {
      write_token<T, BV>(dS, 1.f, 1.f, x, y, do_, row);
      f(row);
#pragma unroll
      for (int i = 0; i < BV / 2; ++i) dS[i] *= i >> 1 & 1 ? decay.y : decay.x;
    }
  }
}

// ---- results of a chunk --------------------------------------------------------------------------------------------

// One channel's numbers for all tokens of a chunk, shared by the channel's four lanes: this lane has the number of
// token 4m + lane % 4 at index m. token_of returns one token's number to all four lanes.
using Tokens = float[CHUNK / 4];
__device__ __forceinline__ float token_of(const Tokens& x, int token) {
  return __shfl_sync(0xffffffffu, x[token / 4], (opaque(threadIdx.x) & 28) + token % 4);
}
// Divides a channel's query share by its unit, a power of 2, and returns the channel's sum with the unit
// (query_share.cuh). The unit is 1 if all finite values are below 2^15, else the power of 2 that makes them so.
__device__ __forceinline__ float convert_to_units(Tokens& query_share, float sum) {
  u32 largest = 0;
  for (int m = 0; m < CHUNK / 4; ++m) {
    const u32 exponent = __float_as_uint(query_share[m]) >> 23 & 0xff;
    if (exponent < 0xff) largest = max(largest, exponent);
  }
  for (int distance = 1; distance < 4; distance *= 2)
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  const u32 unit = max(largest, ONE + 14) - 14;
  for (int m = 0; m < CHUNK / 4; ++m) query_share[m] *= power_of_two(2 * ONE - unit);
  return sum_with_unit(sum, unit);
}

// Divides the query share of this lane's two channels by their units, and sets sum to the sums with units. For float16
// shares beyond float16's range of chunks that do not grow (backward_queries.cu).
__device__ __forceinline__ void convert_to_units(LaneChunk& query_share, float (&sum)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    Tokens share;  // the lane's own tokens, not 4m + lane % 4: convert_to_units does not depend on their order
    for (int m = 0; m < CHUNK / 4; ++m) share[m] = query_share[m / 2][2 * h + m % 2];
    sum[h] = convert_to_units(share, sum[h]);
    for (int m = 0; m < CHUNK / 4; ++m) query_share[m / 2][2 * h + m % 2] = share[m];
  }
}

// Stores x over numbers of the tile that all four lanes of a channel have read before the call. The __syncwarp orders
// their loads before these stores, which shuffles alone do not.
template <typename X, int PANELS>
__device__ __forceinline__ void store_tokens(X (&tile)[PANELS][CHUNK][PANEL<X>], const Tokens& x, int channel) {
  __syncwarp();
  for (int m = 0; m < CHUNK / 4; ++m) value_at(tile, 4 * m + lane_of_channel(), channel) = from_float<X>(x[m]);
}

// Computes a chunk of the first pass (backward_queries.cu): S becomes the state after the chunk; dq overwrites q, the
// query share (this pass's part of dg) overwrites g. Stores the query sums of this lane's channels that are `inside` K,
// at lane_query_sums[0] and [8]. in: the chunk's Tiles q, k, g, v and do_, and Pairs dA, scale do_i . v_j times
// CUT_OFF_CORRECTION.
template <class ReadOrder, typename T, typename G, int BV, class Stage>
__device__ __forceinline__ void compute_queries_by_token(float (&S)[BV / 2], float* lane_query_sums,
                                                         const bool (&inside)[2], Stage& in, const float (&u)[2],
                                                         float scale) {
  constexpr bool BEFORE = ReadOrder::reads_before_write;
  int channel = first_channel_of_lane();
  const int t = lane_of_channel();
  Tokens from_state[2];
#pragma unroll 1
  for (int row = 0; row < CHUNK; ++row) {
    float x[2];
    read_token<T, BV>(x, S, in.do_, row);
    if (row % 4 == t) from_state[0][row / 4] = x[0], from_state[1][row / 4] = x[1];
  }
  update_state_by_token<T, G, BV>(S, in.k, in.g, in.v, channel);
#pragma unroll 1
  for (int h = 0; h < 2; ++h, channel += 8) {
    const auto gate = [&](int row) { return to_float(value_at(in.g, row, channel)); };
    const auto query = [&](int row) { return to_float(value_at(in.q, row, channel)); };
    const auto key = [&](int row) { return to_float(value_at(in.k, row, channel)); };
    // state_term: for each query, q times the state's term of dq; key_terms: q times the terms of the keys up to j.
    Tokens dq, state_term, key_terms, query_share;
    float sum = 0.f;
#pragma unroll 1
    for (int m = 0; m < CHUNK / 4; ++m) {
      float from_start = 0.f;  // the sum of the gates up to the state that query `row` reads
      for (int n = 0; n < 4; ++n) {
        const float before = sum;
        sum += gate(4 * m + n);
        if (n == t) from_start = BEFORE ? before : sum;
      }
      const int row = 4 * m + t;
      dq[m] = scale * grown(from_state[h][m], from_start);
      state_term[m] = query(row) * dq[m], key_terms[m] = query_share[m] = 0.f;
      if (BEFORE) dq[m] = fmaf(h ? u[1] : u[0], self_weight_at(in.dA, row) * key(row), dq[m]);
    }
#pragma unroll 1
    for (int j = 0; j < CHUNK; ++j) {
      // between: the sum of the gates after key j so far; gate_terms: the sum of the terms that have gate j + 1 between
      // their key, j at most, and their query.
      float between = 0.f, gate_terms = 0.f;
#pragma unroll 1
      for (int m = j / 4; m < CHUNK / 4; ++m) {
        const int i = 4 * m + t;
        float from_key = 0.f;  // the sum of the gates from after key j to the state that query i reads
        for (int n = 0; n < 4; ++n) {
          const float before = between;
          if (4 * m + n > j) between += gate(4 * m + n);
          if (n == t) from_key = BEFORE ? before : between;
        }
        if (i < j + BEFORE) continue;
        const float x = grown(pair_at(in.dA, i, j) * (key(j) / CUT_OFF_CORRECTION), from_key);
        dq[m] += x;
        if (i > j) key_terms[m] = fmaf(query(i), x, key_terms[m]);
        if (i > j + BEFORE) gate_terms += key_terms[m];
      }
      __syncwarp();  // lanes that `continue` has parted go on together: channel_sum shuffles
      gate_terms = channel_sum(gate_terms);
      if (j + 1 < CHUNK && (j + 1) % 4 == t) query_share[(j + 1) / 4] = gate_terms;
    }
    float after = 0.f;  // the sum of the state's terms of the queries after `row`
#pragma unroll 1
    for (int row = CHUNK - 1; row >= 0; --row) {
      const float term = token_of(state_term, row);
      if (row % 4 == t) query_share[row / 4] += BEFORE ? after : after + term;
      after += term;
    }
    // Float16 shares of chunks that grow have units. Bfloat16 ones have none: they are stored as they are, and `grew`
    // tells the second pass so.
    if constexpr (sizeof(G) == 2 && !IN_UNITS<G>) after = convert_to_units(query_share, after);
    if (t == 0 && (h ? inside[1] : inside[0])) lane_query_sums[8 * h] = after;
    store_tokens(in.q, dq, channel);
    store_tokens(in.g, query_share, channel);
  }
}

// sum_and_share (lanes.cuh) over the eight lanes with the same lane % 4: lane g = lane / 4 gets COUNT / 8 of the sums,
// from number g COUNT / 8 on, as its x[0], x[1] ... In each step two lanes that are LANES apart keep one half each;
// `opaque`: which half is computed again, not held in a register.
template <int COUNT, int LANES = 16, int N> __device__ __forceinline__ void share_sums(float (&x)[N]) {
  exchange_and_add_halves<COUNT / 2>(x, LANES, opaque(threadIdx.x) & LANES);
  if constexpr (LANES > 4) share_sums<COUNT / 2, LANES / 2>(x);
}

// Stores in `parts` [BV] what a warp's 16 channels contribute to dv of token `row`: the sum over them of key dS +
// self_score do. key: that of this lane's two channels; self_score: their terms, together, of RWKV-6's score of the
// token with itself, otherwise 0.
template <typename T, int BV>
__device__ __forceinline__ void put_value_part(float* parts, const float (&dS)[BV / 2], float2 key, float self_score,
                                               T (&do_)[BV / 64][CHUNK][64], int row) {
  constexpr int N = BV / 4;
  const int lane = opaque(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
  float x[N];
  each_column(do_, row, [&](int n, float2 two) {
    x[2 * n] = fmaf(key.x, dS[4 * n], fmaf(key.y, dS[4 * n + 2], self_score * two.x));
    x[2 * n + 1] = fmaf(key.x, dS[4 * n + 1], fmaf(key.y, dS[4 * n + 3], self_score * two.y));
  });
  // Sums the N values over the lanes with the same t; lane g gets the sums of N / 8 of them, from number g N / 8 on.
  // The columns of values 2n and 2n + 1 are 8n + 2t and the next.
  share_sums<N>(x);
#pragma unroll
  for (int i = 0; i < N / 8; i += 2)
    *reinterpret_cast<float2*>(parts + 8 * (N / 16 * g + i / 2) + 2 * t) = {x[i], x[i + 1]};
}

// Computes a chunk of the second pass (backward_keys.cu): dS becomes the gradient of the state before it; dk overwrites
// q, dg overwrites g, dv overwrites v. carried: for this lane's channels sum_v S dS with the state after the chunk; on
// return, with the state before it. query_sums: [BK], from channel 0 on. in: the chunk's Tiles q, k, g and query_share;
// values: its v, do_ and Pairs dA. parts: [SUB_CHUNK][BK / 16][BV] in shared memory; barrier: the number of a named
// barrier of the 2 BK consumer threads, which all call this; grew: the first pass's flag of this warp, see
// query_share_value. It may be false: another warp's flag, or a large dS, suffices for the whole block to compute a
// chunk token by token.
template <class ReadOrder, typename T, typename G, int BK, int BV, class Channels, class Columns>
__device__ __forceinline__ void compute_keys_by_token(float (&dS)[BV / 2], float (&carried)[2], const float* query_sums,
                                                      float* parts, Channels& in, Columns& values, const float (&u)[2],
                                                      float scale, bool grew, int barrier) {
  constexpr bool BEFORE = ReadOrder::reads_before_write;
  constexpr int WARPS = BK / 16, THREADS = 2 * BK;
  int channel = first_channel_of_lane();
  const int t = lane_of_channel(), warp = opaque(threadIdx.x) / 32;
  Tokens from_state[2], dk[2];
#pragma unroll 1
  for (int row = 0; row < CHUNK; ++row) {
    float x[2];
    read_token<T, BV>(x, dS, values.v, row);
    if (row % 4 == t) from_state[0][row / 4] = x[0], from_state[1][row / 4] = x[1];
  }
  update_gradient_by_token<ReadOrder, T, G, BV>(dS, in.q, in.g, values.do_, scale, channel, [&](int row) {
    const float2 key = channels_of(in.k, row, channel);
    float x[2], self_score = 0.f;
    read_token<T, BV>(x, dS, values.v, row);
    if (BEFORE) {
      const float2 query = channels_of(in.q, row, channel);
      const float weight = self_weight_at(values.dA, row), first = u[0] * query.x, second = u[1] * query.y;
      x[0] = fmaf(weight, first, x[0]), x[1] = fmaf(weight, second, x[1]);
      self_score = scale * (first * key.x + second * key.y);
    }
    if (row % 4 == t) dk[0][row / 4] = x[0], dk[1][row / 4] = x[1];
    put_value_part<T, BV>(parts + (row % SUB_CHUNK * WARPS + warp) * BV, dS, key, self_score, values.do_, row);
    if (row % SUB_CHUNK) return;
    named_barrier_sync(barrier, THREADS);  // all parts of a sub-chunk are stored, and its v has been read
    for (int number = opaque(threadIdx.x); number < SUB_CHUNK * BV; number += THREADS) {
      const float* from = parts + number / BV * (WARPS * BV) + number % BV;
      float dv = 0.f;
      for (int other = 0; other < WARPS; ++other) dv += from[other * BV];
      value_at(values.v, row + number / BV, number % BV) = from_float<T>(dv);
    }
    named_barrier_sync(barrier, THREADS);  // the parts have been read: the next sub-chunk's may overwrite them
  });
#pragma unroll 1
  for (int h = 0; h < 2; ++h, channel += 8) {
    // key_terms: for key j, k_j L_j dS v_j, with dS of the state after the chunk and L_j the decay from j to its end.
    // sum: the sum of the gates after a token; all_keys: the sum of key_terms; size: the sum of their magnitudes.
    Tokens key_terms, dg;
    float sum = 0.f, all_keys = 0.f, size = 0.f;
#pragma unroll 1
    for (int m = CHUNK / 4 - 1; m >= 0; --m) {
      float to_end = 0.f;  // the sum of the gates after this lane's token
      for (int n = 3; n >= 0; --n) {
        if (n == t) to_end = sum;
        sum += to_float(value_at(in.g, 4 * m + n, channel));
      }
      key_terms[m] = to_float(value_at(in.k, 4 * m + t, channel)) * grown(from_state[h][m], to_end);
      all_keys += key_terms[m], size += fabsf(key_terms[m]);
    }
    all_keys = channel_sum(all_keys), size = channel_sum(size);
    const float after = h ? carried[1] : carried[0], rest = after - all_keys, decay = exp2_approx(LOG2E * sum);
    const float before = is_forgotten(decay, rest, fabsf(after) + size, ROUNDING) ? 0.f : rest;
    if (h) carried[1] = before + query_sums[channel];
    else carried[0] = before + query_sums[channel];
    float earlier_terms = before;
#pragma unroll 1
    for (int row = 0; row < CHUNK; ++row) {
      if (row % 4 == t)
        dg[row / 4] =
            query_share_value(value_at(in.query_share, row, channel), query_sums[channel], grew) + earlier_terms;
      earlier_terms += token_of(key_terms, row);
    }
    store_tokens(in.q, dk[h], channel);
    store_tokens(in.g, dg, channel);
  }
}
