// what      Scales of rows in Hopper's forward kernel, which stores queries and keys that are decayed from or to a
//           border between sub-chunks as float16. A row (token) of bfloat16 queries or keys that exceeds float16's
//           range is multiplied by a power of two, its scale, and its scores by 1 / scale. Args, Shared and "decayed":
//           gated/sm90/forward_storage.cuh
// math      score of query i and key j = (scale_i q_i) . (scale_j k_j), both decayed, times (1 / scale_i) (1 / scale_j)
// smem      undo_q and undo_k, the 1 / scale of a row, are beside that row's border_q and border_k in score_operands:
//           the map of ScoreOperands says which query and which key a row has
// numerics  exact but for float16's rounding. The largest number of a scaled row is 2^12 to 2^13, so that it stays
//           finite after up to 16 log gates of 1/8. If the chunk has log gates above 1/8, every row is scaled, and its
//           largest number is 2^-9 to 2^-8. Between a border and a token lie 16 tokens at most, whose decay is then at
//           most e^16: no gate exceeds GATE_LIMIT = 1, or the gates of each sub-chunk of 8 sum to SUBCHUNK_GROWTH = 7
//           at most (forward_growth.cuh). Chunks with larger gates are computed token by token, by make_tokens
// limits    sm_90a; bfloat16 queries and keys
#include "gated/sm90/forward_rows.cuh"
#include "gated/sm90/forward_scores.cuh"

// From the includes:
//   ProducerCoord: a producer thread's group, its 4 channels, and the first row of its sub-chunk
//   near_queries_row, near_keys_row(n): where rows of sub-chunk n lie among the operands of scores
//   larger_magnitudes_of_halves(a, b): of two pairs of bfloat16 numbers, those of larger magnitude, in one word
//   reduce_each<LANES>(x, lane, join): joins each of 8 numbers over LANES lanes; lane l gets that of number l % 8
//   clear_gates: sets to zero what is after the sequence's end
//   fetch_inputs: starts copying a chunk's inputs; PRODUCER_GROUPS: groups that make whole chunks in turn

// The exponent of a scaled row's largest number: GROWN_EXPONENT if the chunk has log gates above 1/8. Rows from
// LEAST_EXPONENT to LARGEST_EXPONENT need no scale; DirectProducts finds the others by their squares.
constexpr int LARGEST_EXPONENT = 12, LEAST_EXPONENT = -14, GROWN_EXPONENT = -9;
static_assert(LARGEST_SQUARE == u32(127 + 2 * (LARGEST_EXPONENT + 1)) << 23);
static_assert(LEAST_SQUARE == u32(127 + 2 * LEAST_EXPONENT) << 23);

// The larger absolute value of the two bfloat16 numbers in a register, as bits.
__device__ __forceinline__ u32 largest_of(u32 two) { return max(two & 0x7fff, two >> 16 & 0x7fff); }

// The powers of two by which the sub-chunk's 8 rows are multiplied: 1 for rows in float16's range, unless the chunk
// `grows`, that is, has log gates above 1/8. Each lane holds the scale of row lane % 8 and 1 / scale. All lanes of a
// warp must call this, and scale_of.
template <int BK> struct RowScales {
  static constexpr bool SCALES = true;
  static constexpr int LANES = ProducerCoord<BK>::LANES;
  float scale, undo;  // undo: 1 / scale
  int first_lane;     // of the LANES that share the sub-chunk
  __device__ __forceinline__ RowScales(const bf16 (&rows)[CHUNK][BK], const ProducerCoord<BK>& coord, bool grows) {
    const int lane = u32(coord.thread) % 32;
    u32 x[SUB_CHUNK];
#pragma unroll
    for (int i = 0; i < SUB_CHUNK; ++i) {
      const uint2 four = *reinterpret_cast<const uint2*>(rows[coord.first_row + i] + coord.channel);
      x[i] = larger_magnitudes_of_halves(four.x, four.y);
    }
    const u32 largest =
        largest_of(reduce_each<LANES>(x, lane, [](u32 x, u32 y) { return larger_magnitudes_of_halves(x, y); }));
    const int exponent = int(largest >> 7) - 127;
    const bool in_range = !grows && exponent >= LEAST_EXPONENT && exponent <= LARGEST_EXPONENT;
    const int change = in_range ? 0 : (grows ? GROWN_EXPONENT : LARGEST_EXPONENT) - exponent;
    const int bits = min(max(127 + change, 1), 253);  // exponent bits; bounds: the scale and its inverse are normal
    scale = __uint_as_float(u32(bits) << 23), undo = __uint_as_float(u32(254 - bits) << 23);
    first_lane = lane / LANES * LANES;
  }
  // The scale of row i.
  __device__ __forceinline__ float scale_of(int i) const { return __shfl_sync(0xffffffffu, scale, first_lane + i); }
};
// For rows that are not scaled.
struct NoScales {
  static constexpr bool SCALES = false;
  template <class Rows, class Coord> __device__ __forceinline__ NoScales(const Rows&, const Coord&, bool) {}
};

// Stores 1 / scale of this lane's query and key, row i of its sub-chunk, beside each of their operands at borders. A
// query of sub-chunks 1 to 3 is stored for the border before its sub-chunk (near_queries_row), a key of sub-chunks 0 to
// 2 for that after it (near_keys_row). Queries of sub-chunk 3 and keys of sub-chunk 0 are also stored for the border
// between the halves; it is the near border of sub-chunk 2's queries and of sub-chunk 1's keys.
template <class Scores, int BK>
__device__ __forceinline__ void put_undo(Scores& score_operands, const ProducerCoord<BK>& coord, const RowScales<BK>& q,
                                         const RowScales<BK>& k) {
  const int i = u32(coord.thread) % ProducerCoord<BK>::LANES;
  if (i >= SUB_CHUNK) return;
  if (coord.subchunk > 0) score_operands.rows[score_operands.near_queries_row(coord.subchunk) + i].undo_q = q.undo;
  if (coord.subchunk == 3) score_operands.rows[score_operands.HALF_ROW + SUB_CHUNK + i].undo_q = q.undo;
  if (coord.subchunk < 3) score_operands.rows[score_operands.near_keys_row(coord.subchunk) + i].undo_k = k.undo;
  if (coord.subchunk == 0) score_operands.rows[score_operands.HALF_ROW + i].undo_k = k.undo;
}

// Copies a chunk's inputs again and waits for them. make_scaled calls this if a row of the chunk turned out to exceed
// float16 (out_of_float16) after the copies of the producer group's next chunk to the same memory had begun. Waits for
// the end of those copies, then overwrites what they brought: make_scaled must make the chunk after this call, by
// make_chunk or make_tokens, which both copy the next chunk once more. So two more phases of gates_copied[group] and
// qk_copied[group] end here, or one if there is no next chunk. parity: that of the last phase that has ended, updated.
template <class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void fetch_again(Shared<Schedule, T, G, BK, BV>& s, const Args<T, G>& args,
                                            const ProducerCoord<BK>& coord, int chunk, u32& parity) {
  const int tokens = s.work.tokens, tokens_left = tokens - chunk * CHUNK;
  // Waits for the next phase of the group's copies to end.
  const auto wait = [&] {
    parity ^= 1;
    if (HAS_CHANNEL_GATES<G>) mbarrier_wait(s.gates_copied[coord.group], parity);  // ScalarDecay's are not copied
    mbarrier_wait(s.qk_copied[coord.group], parity);
  };
  if (chunk + s.PRODUCER_GROUPS < (tokens + CHUNK - 1) / CHUNK)
    wait();  // the group's next chunk; PRODUCER_GROUPS groups take turns
  // The group's threads have waited for the next chunk, and read out_of_float16 in make_chunk.
  named_barrier_sync(PRODUCER_BARRIER + coord.group, coord.THREADS);
  fetch_inputs<LOG_GATES>(s, args, coord.thread, coord.group, chunk, tokens);
  fetch_inputs<QUERIES_AND_KEYS>(s, args, coord.thread, coord.group, chunk, tokens);
  wait();
  // Gates after the sequence's end become 0; make_chunk does the same to keys.
  if (tokens_left < CHUNK) clear_gates(s.inputs[coord.group], coord.first_row, tokens_left, coord.channel);
}
