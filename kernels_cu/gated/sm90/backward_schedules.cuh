// what      How the two passes of Hopper's backward of GLA and RWKV-6 (backward_queries.cu, forwards in time, and
//           backward_keys.cu, backwards) distribute segments of sequences over blocks.
// grid      OneEach: a block for each segment of a sequence and head, or for two joined ones. InTurn: as many blocks as
//           the card holds
// tests     test_gradient_segments; the rest of those of backward_queries.cu
//
// From warpgroup.cuh: WorkTile, a head of a sequence or segment, with its batch row, head, first token and tokens;
// work_tile, that of block number (sequence or segment) * H + head. `bool BACKWARDS` of a template: of the second pass
#include "gated/sm90/decays.cuh"

// The segment of a sequence that a block of a pass computes; WorkTile::sequence counts segments, P of each sequence.
// `joined`: a sequence has three segments. One block computes the segment that the pass starts with, another block the
// other two as one:
//   first pass, forwards       0 | 1 2
//   second pass, backwards     0 1 | 2
// So only the pass's first segment needs a summary: the state that it leaves if it starts from zero
// (backward_segments.cu). In the grid the blocks of two segments come first. WorkTile::sequence_head is the number that
// work_tile was given, of the first segment in time; last_sequence_head: that of the block's last one.
struct Segment : WorkTile {
  i64 last_sequence_head;
};
__device__ __forceinline__ WorkTile segment_at(const Shape& shape, u32 block, i64 P) {
  WorkTile work = work_tile(shape, block);
  const u32 segment = u32(work.sequence) % u32(shape.count);
  // work_tile counts one row more than T / CHUNK for each segment; arrays here have one more for each sequence.
  work.chunk_row += i64(segment / u32(P)) - segment;
  return work;
}
template <bool BACKWARDS> __device__ __forceinline__ Segment segment_of(const Shape& shape, i64 P, bool joined) {
  const u32 H = u32(shape.H), heads = gridDim.x / 2, n = blockIdx.x < heads ? blockIdx.x : blockIdx.x - heads;
  const bool has_two = joined && blockIdx.x < heads;
  // n: sequence and head. Of the segments 0, 1 and 2 a `joined` sequence has: a block of two takes 1 and 2 (BACKWARDS:
  // 0 and 1), the other block 0 (BACKWARDS: 2); `block` is the number of the first. Otherwise blocks take the segments
  // in order, BACKWARDS in reverse order: of those that the first pass computed last some tokens are in L2.
  const u32 in_order = BACKWARDS ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const u32 block = joined ? (n / H * 3 + (BACKWARDS ? 2 * !has_two : has_two)) * H + n % H : in_order;
  Segment work = {segment_at(shape, block, P), block};
  if (has_two) work.last_sequence_head += H, work.tokens += work_tile(shape, block + H).tokens;
  return work;
}

// Two schedules. OneEach: a block computes one segment, or two joined ones. InTurn, for whole sequences (P = 1, never
// joined): as many blocks as the card holds compute several sequences one after the other, and copy a sequence's first
// chunks while they compute the last chunks of the one before.
struct OneEach {
  static constexpr bool in_turn = false;
};
struct InTurn {
  static constexpr bool in_turn = true;
};
// The number of segments, or sequences, of all heads; and the chunks of one of them.
__device__ __forceinline__ u32 all_segments(const Shape& shape) { return u32(shape.B * shape.count * shape.H); }
__device__ __forceinline__ int chunks_of(const WorkTile& work) { return (work.tokens + CHUNK - 1) / CHUNK; }

// Waits for an iteration's phase of its stage's barrier. Iterations of a block count the chunks of all its segments;
// they take stages in turn.
template <int STAGES, typename Number>
__device__ __forceinline__ void wait_for(MBarrier (&barriers)[STAGES], Number iteration) {
  mbarrier_wait(barriers[iteration % STAGES], iteration / STAGES & 1);
}

// Calls f(segment, number of chunks of the segments before it) for each segment of this block.
template <class Schedule, bool BACKWARDS, class Args, class F>
__device__ __forceinline__ void each_segment(const Args& args, F f) {
  if constexpr (!Schedule::in_turn) return f(segment_of<BACKWARDS>(args.shape, args.P, args.joined), 0);
  int chunks_before = 0;
#pragma unroll 1
  for (u32 block = blockIdx.x; block < all_segments(args.shape); block += gridDim.x) {
    const Segment work = {work_tile(args.shape, block), block};
    f(work, chunks_before);
    chunks_before += chunks_of(work);
  }
}

// Iterates over the chunks of all sequences of an InTurn block. Whoever has one keeps it in shared memory, since
// registers are scarce.
template <bool BACKWARDS> struct Cursor {
  WorkTile work;
  u32 block;  // the segment's number; after the last chunk it is all_segments or more
  int token;  // the chunk's first token, counted from the segment's

  __device__ __forceinline__ bool at_end(const Shape& shape) const { return block >= all_segments(shape); }
  __device__ __forceinline__ void begin(const Shape& shape, u32 first) {
    for (block = first; !at_end(shape); block += gridDim.x) {
      work = work_tile(shape, block);
      token = BACKWARDS ? (chunks_of(work) - 1) * CHUNK : 0;
      if (work.tokens) return;
    }
  }
  // The segment from this chunk on.
  __device__ __forceinline__ WorkTile rest() const {
    WorkTile x = work;
    x.start += token, x.tokens -= token, x.chunk_row += token / CHUNK;
    return x;
  }
  __device__ __forceinline__ void next(const Shape& shape) {
    token += BACKWARDS ? -CHUNK : CHUNK;
    if (BACKWARDS ? token < 0 : token >= work.tokens) begin(shape, block + gridDim.x);
  }
};

// InTurn: the places of the chunks that a warp copies, of the COUNT last ones. A place is the rest of a sequence, from
// the chunk on. OneEach needs none.
template <class Schedule, bool BACKWARDS, int COUNT> struct ChunkPlaces {};
template <bool BACKWARDS, int COUNT> struct ChunkPlaces<InTurn, BACKWARDS, COUNT> {
  WorkTile chunks[COUNT];  // the first member, so that at() adds nothing to the struct's address
  Cursor<BACKWARDS> cursor;

  __device__ __forceinline__ const WorkTile& at(int number) const { return chunks[number % COUNT]; }
  __device__ __forceinline__ void begin(const Shape& shape) {
    if ((threadIdx.x & 31) == 0) cursor.begin(shape, blockIdx.x);
    __syncwarp();  // all lanes see the cursor
  }
  // Stores the place of the block's next chunk, which gets this number; false if there is none.
  __device__ __forceinline__ bool next(const Shape& shape, int number) {
    if (cursor.at_end(shape)) return false;
    __syncwarp();  // all lanes have read the cursor
    if ((threadIdx.x & 31) == 0) chunks[number % COUNT] = cursor.rest(), cursor.next(shape);
    __syncwarp();  // all lanes see the chunk's place
    return true;
  }
};
