// what      A table in shared memory of offsets and masks that depend on the thread alone, for the consumer threads of
//           the second pass of Hopper's backward of GLA and RWKV-6 (backward_keys.cu).
#include "gated/sm90/backward_scores.cuh"

// The entries. Registers are too scarce to hold them, and to compute them again takes 80 of 1,100 instructions a chunk.
// LOOKUPS: how many entries, the first ones, are in the table: as many as fit. With 64 channels a table gains nothing.
enum Lookup { OFFSETS, FROM_MIDDLE, MASKS };
template <typename G, int BK> constexpr int LOOKUPS = BK == 64 ? 0 : sizeof(G) == 2 ? 3 : 1;
template <int COUNT, int BK> struct Lookups {
  uint4 tables[COUNT - 1 + BK / 64][128];  // OFFSETS for each warpgroup; then the others, the same for all warpgroups

  // offset: ldmatrix_offset(), which is a different multiple of 16 bytes for every thread of a warpgroup.
  __device__ __forceinline__ uint4& at(int what, int warpgroup, int offset) {
    return *reinterpret_cast<uint4*>(at_byte_offset(tables[what == OFFSETS ? warpgroup : what - 1 + BK / 64], offset));
  }
};
template <int BK> struct Lookups<0, BK> {
  __device__ __forceinline__ uint4 at(int, int, int) { return {}; }
};

// Computes an entry for this thread. OFFSETS: the byte offsets at which it stores queries (x) and keys (y) within
// sub-chunks; its index in dA, PairReader::queries_index (z); GateCounts::read (w). FROM_MIDDLE: the operands of
// GateCounts::read_from_middle (x, y) and written_to_middle (z, w). MASKS: the operand of earlier_tokens (x, y),
// identity_of_lane (z), GateCounts::written (w). Functions: decays.cuh, states.cuh, query_share.cuh,
// backward_scores.cuh.
template <class ReadOrder, typename T, typename G, int BK>
__device__ __forceinline__ uint4 computed_entry(Lookup what) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, t = lane & 3;
  const GateCounts<ReadOrder, G, SECOND_NEGATED> counts;
  if (what == OFFSETS) {
    const int within = within_offset(2 * t, warp % 2 * 16 + (lane >> 2));
    // Swaps the middle two of four channels: flips both bits of the channel if they differ.
    const int key_order = (lane >> 2 ^ lane >> 3) & 1 ? 12 : 0;
    return {u32(queries_within<T, G, BK>(warp / 2) + within), u32(warp / 2 * CHUNK * 128 + (within ^ key_order)),
            u32(pair_index(2 * t, lane >> 2)), u32(counts.read)};
  }
  if (what == FROM_MIDDLE) {
    u32 read[2], written[2];
    counts.read_from_middle(read), counts.written_to_middle(written);
    return {read[0], read[1], written[0], written[1]};
  }
  u32 counted[2];
  earlier_tokens(counted);
  return {counted[0], counted[1], identity_of_lane(), u32(counts.written)};  // in the registers that products take
}

// The functions of GateCounts (decays.cuh) that backward_keys.cu calls, from looked-up values. middle: FROM_MIDDLE.
template <class ReadOrder, typename G> struct LookedUpCounts {
  using Order = ReadOrder;
  using Gates = LaneGates<G, SECOND_NEGATED>;
  uint4 middle;
  u32 read, written;

  __device__ __forceinline__ void read_from_middle(u32 (&b)[2]) const { b[0] = middle.x, b[1] = middle.y; }
  __device__ __forceinline__ void written_to_middle(u32 (&b)[2]) const { b[0] = middle.z, b[1] = middle.w; }
  __device__ __forceinline__ void from_start(u32 (&b)[2]) const {
    GateCounts<ReadOrder, G, SECOND_NEGATED>::make_operand(b, [&](u32 one) { return read & one; });
  }
  __device__ __forceinline__ void to_end(u32 (&b)[2]) const {
    GateCounts<ReadOrder, G, SECOND_NEGATED>::make_operand(b, [&](u32 one) { return ~written & one; });
  }
};
