// what      The operands that producer warps of Hopper's forward kernel make of the queries and keys of a sub-chunk, 8
//           of a chunk's 32 tokens: put_keys and put_queries, which make_chunk (forward_producers.cuh) calls
// math      a_t = e^(g_t), g_t the log gates, for each channel. With a border before token z, z <= i, j < z:
//             query i decayed from the border   q_i prod_{z <= m <= i} a_m   (RWKV-6: z <= m < i)
//             key j decayed to the border       k_j prod_{j < m < z} a_m
//           A score of a query and an earlier key is the product of both, of one border between them. A decay over
//           several tokens is the product of their a_t, never a quotient of cumulative decays: so a reset (a_t = 0) is
//           exact for tokens of different sub-chunks; in one sub-chunk, see below
// smem      of Shared (forward_storage.cuh): reads the group's inputs q and k, [32 tokens, BK]; writes, for the group,
//           score_operands, 32 rows of queries and keys about middles and borders; for consumers, the stage's q [32,
//           BK] decayed from the chunk's start, and k [32, BK] decayed to its end. Reads and writes `decays` [4
//           sub-chunks, BK], of each channel over each sub-chunk
// barriers  none: make_chunk has those between writers and readers
// numerics  Operands at borders are float16, or T if K_RANKS is 2. float16 has more precision than bfloat16, but a
//           bfloat16 row that exceeds its range is scaled (forward_scales.cuh). Decays within a sub-chunk: see below
// limits    sm_90a; T of float16, bfloat16; BK of 64, 128
//
// A warp has a sub-chunk (BK = 64: two), a lane 4 channels of it: so decays need no shuffles. All warps run one
// program: a program for each sub-chunk took a third fewer instructions, but all of them exceeded the instruction
// cache, and took 1.5 times as long. Queries and keys are read row by row as they are needed, since registers are
// scarce. The score of a query and a key, by their distance:
//   in different halves of the chunk       the query decayed from the end of the first half, the key decayed to it
//   in different sub-chunks of a half      the same, for the end of the half's first sub-chunk
//   in one sub-chunk                       the same, for its middle; a query before the middle, and a key after it, is
//                                          multiplied by an inverse decay, over three tokens at most: if no log gate is
//                                          above 0 the largest factor is e^(3 * 20)
//   the same token                         q . k (GLA) or q . u k (RWKV-6): no gate, exact but for the sum's rounding
//   RWKV-6: a key and the next query       q . k: no gate lies between
// Since a_t counts as LEAST_DECAY = e^-20 at least in one sub-chunk, a part of a token passes a reset within its own
// sub-chunk: e^-20 times the growth by the other gates, e^7 at most in chunks made as a whole, so e^-13 at most.
//
// T: the type of q and k; B: of operands at borders (Border); GATES: the gates that a lane has of a token, 4, of its
// channels, or 1 if G is ScalarDecay; coord, a ProducerCoord: the lane's sub-chunk, first_row, and the first of its 4
// channels; LANES: lanes of a sub-chunk. From the includes:
//   unpack(x, y)   sets x to 4 numbers y as floats. times(y, x, f): y = x f, channel by channel. put_four stores 4
//                  numbers; store_if(x, ..): stores if x, without a branch
//   in_tile        the address of a sub-chunk's row 0 in a tile of operands, at which put_key and put_state_query store
//                  row i. put_state_query stores T, or tf32 if T is float16
//   RowScales      the scales of rows, powers of 2 (forward_scales.cuh): scale_of(i), of row i. NoScales: without,
//                  SCALES is false
//   direct         DirectProducts, the products of undecayed rows, in 8 steps: load(step) reads rows, then
//                  multiply_step(step) multiplies them
#include "read_order.cuh"
#include "gated/sm90/forward_rows.cuh"
#include "gated/sm90/forward_scales.cuh"
#include "gated/sm90/forward_scores.cuh"

constexpr float LEAST_DECAY = 2.0611536e-9f;  // e^-20: the least a_t that decays from and to a middle are made of
constexpr int MIDDLE = SUB_CHUNK / 2;         // a sub-chunk's middle is before its token MIDDLE

// Stores 4 neighbouring channels as T or as float: the caller gives them as they were `loaded`, of type T, and as
// floats x, so that nothing has to be rounded.
template <typename T> __device__ __forceinline__ void put_loaded(T* to, uint2 loaded, const float (&)[4]) {
  *reinterpret_cast<uint2*>(to) = loaded;
}
__device__ __forceinline__ void put_loaded(float* to, uint2, const float (&x)[4]) { put_four(to, x); }

// 4 neighbouring channels rounded to B.
template <typename B> __device__ __forceinline__ uint2 packed(const float (&x)[4]) {
  return {pack<B>(x[0], x[1]), pack<B>(x[2], x[3])};
}
// An operand at a border: x, 4 channels of the sub-chunk's row i, times the row's scale (forward_scales.cuh), rounded
// to B. loaded: the row's 4 channels as they are in memory, of type T; undecayed: whether x are the same numbers, so
// that they need no rounding if T and B are one type. `scales`: of the rows, RowScales or NoScales.
template <typename T, typename B, class Scales>
__device__ __forceinline__ uint2 border_operand(bool undecayed, uint2 loaded, const float (&x)[4], const Scales& scales,
                                                int i) {
  if constexpr (Scales::SCALES) {
    const float scale = scales.scale_of(i), y[4] = {x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale};
    return packed<B>(y);
  }
  return undecayed && IS_BFLOAT16<T> == IS_BFLOAT16<B> ? loaded : packed<B>(x);
}

// The decays of channels over whole sub-chunks, in shared memory. The lanes of a sub-chunk write its decays
// (put_decay); after a barrier all warps of the group read those of all sub-chunks (load_decay).
template <int BK> using Decays = float[NUM_SUBCHUNKS][BK];
template <int GATES, int BK>
__device__ __forceinline__ void put_decay(Decays<BK>& decays, const ProducerCoord<BK>& coord, const float (&x)[GATES]) {
  if constexpr (GATES == 4) put_four(&decays[coord.subchunk][coord.channel], x);
  else if (coord.channel == 0) decays[coord.subchunk][0] = x[0];
}
template <int GATES, int BK>
__device__ __forceinline__ void load_decay(float (&x)[GATES], const Decays<BK>& decays, const ProducerCoord<BK>& coord,
                                           int subchunk) {
  if constexpr (GATES == 4) unpack(x, &decays[subchunk][coord.channel]);
  else x[0] = decays[subchunk][0];
}

// Extends a decay from or to a sub-chunk's middle by one token, whose decay a counts as LEAST_DECAY at least.
template <int GATES> __device__ __forceinline__ void extend_decay(float (&decay)[GATES], const float (&a)[GATES]) {
#pragma unroll
  for (int c = 0; c < GATES; ++c) decay[c] *= fmaxf(a[c], LEAST_DECAY);
}
template <int GATES> __device__ __forceinline__ void invert(float (&y)[GATES], const float (&x)[GATES]) {
#pragma unroll
  for (int c = 0; c < GATES; ++c) y[c] = inverse(x[c]);
}

// The decays of this lane's channels over the neighbour sub-chunk, the other one of the same half. `put` stores 4
// channels of an operand at the border between the chunk's halves. They are the same channels of the operand at the
// border between the lane's sub-chunk and its neighbour, times these decays; the caller gives them as floats (x) and as
// `rounded` to B. If T is bfloat16 and B float16 (IN_FLOAT16), `put` multiplies `rounded` in float16, which has three
// bits more than bfloat16; otherwise it multiplies x in float32. Only `rounded` has the row's scale, so that rows may
// have scales only where IN_FLOAT16 (make_chunk asserts it). If GATES is 1, x[n % GATES] is the one decay of all
// channels.
template <typename T, typename B, int GATES> struct NeighbourDecay {
  static constexpr bool IN_FLOAT16 = IS_BFLOAT16<T> && !IS_BFLOAT16<B>;
  float decay[IN_FLOAT16 ? 1 : GATES];
  uint2 rounded_decay;
  __device__ __forceinline__ NeighbourDecay(const float (&x)[GATES]) {
    if constexpr (IN_FLOAT16) {
      rounded_decay = {pack<f16>(x[0], x[1 % GATES]), pack<f16>(x[2 % GATES], x[3 % GATES])};
    } else {
#pragma unroll
      for (int c = 0; c < GATES; ++c) decay[c] = x[c];
    }
  }
  __device__ __forceinline__ void put(B* to, uint2 rounded, const float (&x)[4]) const {
    if constexpr (IN_FLOAT16) {
      *reinterpret_cast<uint2*>(to) = {mul_f16(rounded.x, rounded_decay.x), mul_f16(rounded.y, rounded_decay.y)};
    } else {
      float y[4];
      times(y, x, decay);
      put_four(to, y);
    }
  }
};

// Where score_operands.rows has operands at borders, 8 rows of a sub-chunk at a time (ScoreOperands has the map):
// border_q, from near_queries_row on, its queries at the border before it; border_k, from near_keys_row on, its keys at
// the border after it. Queries of sub-chunk 3 and keys of 0 are stored twice: there, and, decayed over their neighbour
// as well, at the border between the halves, from HALF_ROW + 8 and from HALF_ROW on. middle_q and middle_k have a row
// for each token. A sub-chunk's row 0 of middle_q and row 7 of middle_k stay unwritten, because make_scores drops the
// products with them.

// Stores operands made of the sub-chunk's keys, from its last token to its first: in score_operands.rows, keys decayed
// to the end of the sub-chunk, and to the end of the half by `neighbour`; keys before the sub-chunk's middle decayed to
// it; in k_tile, keys decayed to the end of the chunk, by later_decay, the decay over all later sub-chunks. k_rows: the
// chunk's keys as they are in memory; a: decays of single tokens; scales: those of k_rows (RowScales or NoScales).
template <bool HAS_OUTPUTS, typename T, int GATES, int BK, class Tile, class Scores, class Neighbour, class Scales>
__device__ __forceinline__ void put_keys(Tile& k_tile, Scores& score_operands, const T (&k_rows)[CHUNK][BK],
                                         const float (&a)[SUB_CHUNK][GATES], const ProducerCoord<BK>& coord,
                                         const Neighbour& neighbour, const float (&later_decay)[GATES],
                                         const Scales& scales) {
  const auto load = [&](int i) { return *reinterpret_cast<const uint2*>(k_rows[coord.first_row + i] + coord.channel); };
  char* const row0 = in_tile(k_tile, coord.first_row, coord.channel);
  uint2 earlier_key = load(SUB_CHUNK - 1);
  // Keys of sub-chunk 0 are stored for two borders. The vote tells the compiler that all lanes take the same branch. So
  // lanes of sub-chunk 1 take it, too, if the warp has both. They store their rows, from HALF_ROW + 8 on, twice with
  // the same numbers, because their `neighbour` is 1.
  bool two_borders = false;
  char* border = nullptr;  // the address of this lane's channels of the operand at the sub-chunk's end, row 0
  if constexpr (HAS_OUTPUTS) {
    two_borders = __any_sync(0xffffffffu, coord.subchunk == 0);
    border = reinterpret_cast<char*>(
        &score_operands.rows[score_operands.near_keys_row(coord.subchunk)].border_k[coord.channel]);
  }
  float to_end[GATES], to_middle[GATES];  // the decays over the tokens after row i, to the sub-chunk's end or middle
#pragma unroll
  for (int c = 0; c < GATES; ++c) to_end[c] = to_middle[c] = 1.f;
#pragma unroll
  for (int i = SUB_CHUNK - 1; i >= 0; --i) {
    float k[4], x[4];
    const uint2 loaded = earlier_key;
    unpack<T>(k, loaded);
    if (i > 0) earlier_key = load(i - 1);
    times(x, k, to_end);
    if constexpr (HAS_OUTPUTS) {
      using B = typename Scores::BorderType;
      const uint2 rounded =
          border_operand<T, B>(i == SUB_CHUNK - 1, loaded, x, scales, i);  // the last key has no decay yet
      store_if(coord.subchunk < 3, border + i * sizeof score_operands.rows[0], rounded);
      if (two_borders)
        neighbour.put(&score_operands.rows[score_operands.HALF_ROW + coord.first_row + i].border_k[coord.channel],
                      rounded, x);
    }
    times(x, x, later_decay);
    put_key<T>(row0, i, x);
#pragma unroll
    for (int c = 0; c < GATES; ++c) to_end[c] *= a[i][c];
    if constexpr (HAS_OUTPUTS)
      if (i < MIDDLE) {
        times(x, k, to_middle);  // key MIDDLE - 1 has no decay: it is stored as loaded
        if (i == MIDDLE - 1) put_loaded(&score_operands.rows[coord.first_row + i].middle_k[coord.channel], loaded, k);
        else put_four(&score_operands.rows[coord.first_row + i].middle_k[coord.channel], x);
        extend_decay(to_middle, a[i]);
      }
  }
}

// Stores operands made of the sub-chunk's queries, from its first token to its last: in score_operands.rows, queries
// decayed from the start of the sub-chunk, and from the start of the half by `neighbour`; queries decayed from the
// sub-chunk's middle, by inverse decays if they are before it, and keys after the middle decayed to it by inverse
// decays; in q_tile, queries decayed from the start of the chunk, by earlier_decay, the decay over all earlier
// sub-chunks times `scale`. If T is float16, consumers multiply these queries and the state in tf32, whose range is
// float32's: then earlier_decay includes TF32_CORRECTION_OF_BOTH (forward_scores.cuh), too. RWKV-6: self_scores[i]
// becomes this lane's part of q_i . u k_i. Between rows it takes the 8 steps of `direct`, so that their latency is
// hidden. Other arguments as in put_keys.
template <class Order, typename T, int GATES, int BK, class Tile, class Scores, class Neighbour, class Scales,
          class Direct>
__device__ __forceinline__ void put_queries(Tile& q_tile, Scores& score_operands, const T (&q_rows)[CHUNK][BK],
                                            const T (&k_rows)[CHUNK][BK], const float (&a)[SUB_CHUNK][GATES],
                                            const ProducerCoord<BK>& coord, const Neighbour& neighbour,
                                            const Scales& scales, const float (&earlier_decay)[GATES],
                                            const float (&u)[4], float (&self_scores)[SUB_CHUNK], Direct& direct) {
  constexpr int INCLUSIVE = !Order::reads_before_write;  // whether query i's state has had the decay of token i
  // from_start: the decay from the sub-chunk's start to the state that query i reads; from_middle: the decay between
  // that state and the middle. inverse_decay[i]: what query i before the middle, or key i after it, is multiplied by.
  float from_start[GATES], from_middle[GATES], inverse_decay[SUB_CHUNK][GATES];
#pragma unroll
  for (int c = 0; c < GATES; ++c) from_start[c] = from_middle[c] = 1.f;
#pragma unroll
  for (int i = MIDDLE - 1; i > 0; --i) {  // the first query has no earlier key in its sub-chunk
    if (INCLUSIVE) invert(inverse_decay[i], from_middle);
    extend_decay(from_middle, a[i]);
    if (!INCLUSIVE) invert(inverse_decay[i], from_middle);
  }
#pragma unroll
  for (int c = 0; c < GATES; ++c) from_middle[c] = 1.f;
  const auto load = [&](const T(&rows)[CHUNK][BK], int i) {
    return *reinterpret_cast<const uint2*>(rows[coord.first_row + i] + coord.channel);
  };
  char* const row0 = in_tile(q_tile, coord.first_row, coord.channel);
  // The first and last key that is needed here: the keys after the middle but the last, or, for self_scores, all keys.
  constexpr int FIRST_KEY = INCLUSIVE ? MIDDLE : 0, LAST_KEY = INCLUSIVE ? SUB_CHUNK - 2 : SUB_CHUNK - 1;
  uint2 next_query = load(q_rows, 0), next_key = load(k_rows, FIRST_KEY);
  const bool two_borders = __any_sync(0xffffffffu, coord.subchunk == 3);  // as in put_keys
  const int border_row = score_operands.near_queries_row(coord.subchunk);
#pragma unroll
  for (int i = 0; i < SUB_CHUNK; ++i) {
    float q[4], k[4], x[4];
    const uint2 loaded = next_query;
    // Row 0 takes steps 0 and 1 of `direct`, row i step i + 1, the last row none: so nothing waits for the last step.
    if (i == 0) direct.load(0);
    else if (i + 1 < SUB_CHUNK) direct.load(i + 1);
    unpack<T>(q, loaded);
    if (i + 1 < SUB_CHUNK) next_query = load(q_rows, i + 1);
    if (i >= FIRST_KEY && i <= LAST_KEY) unpack<T>(k, next_key);
    if (i >= FIRST_KEY && i < LAST_KEY) next_key = load(k_rows, i + 1);
    if (!INCLUSIVE) times(x, q, from_start);
#pragma unroll
    for (int c = 0; c < GATES; ++c) from_start[c] *= a[i][c];
    if (INCLUSIVE) times(x, q, from_start);
    using B = typename Scores::BorderType;
    const uint2 rounded = border_operand<T, B>(!INCLUSIVE && i == 0, loaded, x, scales, i);
    store_if(coord.subchunk > 0, &score_operands.rows[border_row + i].border_q[coord.channel], rounded);
    if (two_borders)
      neighbour.put(&score_operands.rows[score_operands.HALF_ROW + coord.first_row - 16 + i].border_q[coord.channel],
                    rounded, x);
    if (i == 0) direct.multiply_step(0), direct.load(1);
    times(x, x, earlier_decay);
    put_state_query<T>(row0, i, x);
    if (i > 0) {
      if (!INCLUSIVE && i >= MIDDLE) times(x, q, from_middle);
      if (i >= MIDDLE) extend_decay(from_middle, a[i]);
      if (INCLUSIVE && i >= MIDDLE) times(x, q, from_middle);
      if (i < MIDDLE) times(x, q, inverse_decay[i]);
      if (i == MIDDLE - INCLUSIVE)  // no gate lies between this query's state and the middle: it is stored as loaded
        put_loaded(&score_operands.rows[coord.first_row + i].middle_q[coord.channel], loaded, q);
      else put_four(&score_operands.rows[coord.first_row + i].middle_q[coord.channel], x);
    }
    if (i >= MIDDLE && i + 1 < SUB_CHUNK) {  // the last key has no later query in its sub-chunk
      invert(inverse_decay[i], from_middle);
      times(x, k, inverse_decay[i]);
      put_four(&score_operands.rows[coord.first_row + i].middle_k[coord.channel], x);
    }
    if (!INCLUSIVE) {
      times(k, k, u);
      self_scores[i] = dot(q, k);
    }
    if (i + 1 < SUB_CHUNK) direct.multiply_step(i + 1);
  }
}
