// what      Hopper's forward kernel stores queries and keys that are decayed from or to a border between sub-chunks as
//           float16. A row that exceeds float16's range is multiplied by a power of two, and its scores by the inverse.
// numerics  exact but for float16's rounding. The largest number of such a row becomes 2^12 to 2^13, so that log gates
//           of up to 1/8 keep it finite. If the chunk has gates above 1/8, the largest number of every row becomes 2^-9
//           to 2^-8: these gates multiply it by e^16 at most between a border and a token. Other rows are not scaled
// limits    sm_90a; bfloat16 queries and keys
#include "gated/sm90/forward_rows.cuh"
#include "gated/sm90/forward_scores.cuh"

// The exponent that a row's largest number gets: GROWN_EXPONENT if gates are above 1/8.
constexpr int LARGEST_EXPONENT = 12, GROWN_EXPONENT = -9;

// The larger magnitude of two bfloat16 numbers in a register, as bits.
__device__ __forceinline__ u32 largest_of(u32 two) { return max(two & 0x7fff, two >> 16 & 0x7fff); }

// This lane's 4 channels of the rows of its sub-chunk.
template <int BK> struct OwnRows {
  const bf16 (&rows)[CHUNK][BK];
  const ProducerCoord<BK>& me;
  __device__ __forceinline__ uint2 operator[](int i) const {
    return *reinterpret_cast<const uint2*>(rows[me.first + i] + me.channel);
  }
};

// The powers of two by which the sub-chunk's rows are multiplied; 1 for rows in float16's range, unless the chunk
// `grows`: unless it has gates above 1/8. Each lane holds the scale of one row (`own`) and its inverse (`undo`).
template <int BK> struct RowScales {
  static constexpr int LANES = ProducerCoord<BK>::LANES;
  float own, undo;
  int first;  // the sub-chunk's first lane
  __device__ __forceinline__ RowScales(const bf16 (&rows)[CHUNK][BK], const ProducerCoord<BK>& me, bool grows) {
    const int lane = u32(me.thread) % 32;
    u32 x[BC];
#pragma unroll
    for (int i = 0; i < BC; ++i) {
      const uint2 four = OwnRows<BK>{rows, me}[i];
      x[i] = larger(four.x, four.y);
    }
    const u32 largest = largest_of(join_each<LANES>(x, lane, [](u32 x, u32 y) { return larger(x, y); }));
    const int exponent = int(largest >> 7) - 127;
    const bool held = !grows && exponent >= -14 && exponent <= LARGEST_EXPONENT;
    const int by = held ? 0 : (grows ? GROWN_EXPONENT : LARGEST_EXPONENT) - exponent;
    const int bits = min(max(127 + by, 1), 253);  // so that the scale and its inverse are normal numbers
    own = __uint_as_float(u32(bits) << 23), undo = __uint_as_float(u32(254 - bits) << 23);
    first = lane / LANES * LANES;
  }
  __device__ __forceinline__ float of(int i) const { return __shfl_sync(0xffffffffu, own, first + i); }
};
// For rows that are not scaled.
struct NoScales {};

template <class Scales> constexpr bool SCALED = true;
template <> constexpr bool SCALED<NoScales> = false;

template <bool SCALE, typename T, int BK>
__device__ __forceinline__ auto scales_of(const T (&rows)[CHUNK][BK], const ProducerCoord<BK>& me, bool grows) {
  if constexpr (SCALE) return RowScales<BK>(rows, me, grows);
  else return NoScales{};
}

// Stores the inverses of the scales beside the rows' operands.
template <class Scores, int BK>
__device__ __forceinline__ void put_undo(Scores& s, const ProducerCoord<BK>& me, const RowScales<BK>& q,
                                         const RowScales<BK>& k) {
  const int i = u32(me.thread) % ProducerCoord<BK>::LANES;
  if (i >= BC) return;
  if (me.subchunk > 0) s.rows[near_queries(s, me.subchunk) + i].undo_q = q.undo;
  if (me.subchunk == 3) s.rows[s.HALF + BC + i].undo_q = q.undo;
  if (me.subchunk < 3) s.rows[near_keys(s, me.subchunk) + i].undo_k = k.undo;
  if (me.subchunk == 0) s.rows[s.HALF + i].undo_k = k.undo;
}

// Copies a chunk's inputs again, after the copies of the group's next chunk to the same memory have ended. So two more
// phases of gates[group] and rows[group] end, or one if there is no next chunk; `parity`, of both barriers, follows.
template <class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void fetch_again(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args,
                                            const ProducerCoord<BK>& me, int chunk, u32& parity) {
  const int tokens = s.work.tokens, rest = tokens - chunk * CHUNK;
  const auto wait = [&] {
    parity ^= 1;
    if (WIDTH<G> == 4) barrier_wait(s.gates[me.group], parity);
    barrier_wait(s.rows[me.group], parity);
  };
  if (chunk + s.MAKERS < (tokens + CHUNK - 1) / CHUNK) wait();
  barrier_sync(PRODUCERS + me.group, me.THREADS);  // all have waited for the next chunk, and read s.scores.beyond
  fetch_gates(s, args, me.thread, me.group, chunk, tokens), fetch_rows(s, args, me.thread, me.group, chunk, tokens);
  wait();
  if (rest < CHUNK) clear_gates(s.inputs[me.group], me.first, rest, me.channel);
}
