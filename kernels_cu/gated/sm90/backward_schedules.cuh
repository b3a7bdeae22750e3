// what      Which segments of sequences a block computes, in the two passes of Hopper's backward of GLA and RWKV-6:
//           backward_queries.cu goes forwards in time, backward_keys.cu backwards. The template argument BACKWARDS is
//           false of the first pass and true of the second; callers write FORWARDS or BACKWARDS (tensor.cuh)
// terms     A batch has shape.B rows of shape.T tokens. A row has shape.row_sequences segments: its sequences, one
//           after the other, of P segments each; P = 1: whole sequences. A pass goes through a segment in chunks of
//           CHUNK tokens. The segment of a head has the number (segment of the batch) * shape.H + head, as work_tile
//           counts
// grid      Three cases, of which the host chooses one, with P, `joined` and the number of blocks that belong to it
//           (segments.hoppers_backward_cut); kernels do not check them:
//           OneEach           a block for the segment of a head: B row_sequences H blocks
//           OneEach, joined   P = 3, and two blocks for the sequence of a head, so gridDim.x is even. The first half of
//                             the grid's blocks have two segments each, which they compute as one; the others have one:
//                               first pass      0 | 1 2
//                               second pass     0 1 | 2
//                             A block of two starts where the block of one ends: so only of segment 0, forwards, and
//                             of 2, backwards, a summary is needed, which backward_segments.cu makes
//           InTurn            P = 1, not joined; any number of blocks, as many as the card holds. Block n computes the
//                             numbers n, n + gridDim.x, ... one after the other, and copies a sequence's first chunks
//                             while it computes the last ones of the one before
// tests     test_gradient_segments, and the other tests in the head of backward_queries.cu
//
// From chunk_copies.cuh: WorkTile, the segment of a head. Its names say "sequence", and mean segments here: `sequence`,
// the segment's number in the batch; sequence_head, the number as above; batch row and head; first token `start` and
// number of `tokens`; chunk_row, of arrays with a row for every chunk: the row of its first chunk. work_tile makes it
// of the number as above
#include "gated/sm90/decays.cuh"

struct OneEach {
  static constexpr bool in_turn = false;
};
struct InTurn {
  static constexpr bool in_turn = true;
};

__device__ __forceinline__ u32 all_segments(const Shape& shape) { return u32(shape.B * shape.row_sequences * shape.H); }
__device__ __forceinline__ int chunks_of(const WorkTile& work) { return (work.tokens + CHUNK - 1) / CHUNK; }

// ---- OneEach --------------------------------------------------------------------------------------------------------

// What a block computes: a segment of a head, or two neighbours as one. Then WorkTile is of the first one in time, with
// the tokens of both, and last_sequence_head is the number of the second; else it is sequence_head.
struct Segment : WorkTile {
  i64 last_sequence_head;
};
// The segment of a head that has this number.
__device__ __forceinline__ WorkTile segment_at(const Shape& shape, u32 number, i64 P) {
  WorkTile work = work_tile(shape, number);
  const u32 segment = u32(work.sequence) % u32(shape.row_sequences);  // of its batch row
  // The row of a segment's first chunk is start / CHUNK, rounded down, plus the number of sequences before it in the
  // batch row. work_tile is called without its P, so it has added the number of segments instead.
  work.chunk_row += i64(segment / u32(P)) - segment;
  return work;
}
// What this block computes.
template <bool BACKWARDS> __device__ __forceinline__ Segment segment_of(const Shape& shape, i64 P, bool joined) {
  // In the second pass blocks go from the last number to the first, unless joined: of what the first pass computed last
  // some tokens are still in L2.
  const u32 in_order = BACKWARDS ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  // If joined: sequence_head is (sequence of the batch) * H + head; first_segment: which of the sequence's segments 0,
  // 1 and 2 is the block's first one in time.
  const u32 H = u32(shape.H), half = gridDim.x / 2, sequence_head = blockIdx.x < half ? blockIdx.x : blockIdx.x - half;
  const bool has_two = joined && blockIdx.x < half;
  const u32 first_segment = BACKWARDS ? 2 * !has_two : has_two;
  const u32 number = joined ? (sequence_head / H * 3 + first_segment) * H + sequence_head % H : in_order;
  Segment work = {segment_at(shape, number, P), number};
  if (has_two) work.last_sequence_head += H, work.tokens += work_tile(shape, number + H).tokens;
  return work;
}

// ---- either schedule ------------------------------------------------------------------------------------------------

// Shared memory holds STAGES chunks at a time: a stage is the memory of one, with barriers of its own. A block counts
// the chunks of all its segments as iterations; iteration n takes stage n % STAGES. Waits until its phase of that
// stage's barrier has ended: phase n / STAGES, of which a wait takes the parity.
template <int STAGES, typename Number>
__device__ __forceinline__ void wait_for(MBarrier (&barriers)[STAGES], Number iteration) {
  mbarrier_wait(barriers[iteration % STAGES], iteration / STAGES & 1);
}

// Calls f(Segment, the block's chunks in earlier segments) for each segment of this block.
template <class Schedule, bool BACKWARDS, class Args, class F>
__device__ __forceinline__ void each_segment(const Args& args, F f) {
  if constexpr (!Schedule::in_turn) return f(segment_of<BACKWARDS>(args.shape, args.P, args.joined), 0);
  int chunks_before = 0;
#pragma unroll 1
  for (u32 number = blockIdx.x; number < all_segments(args.shape); number += gridDim.x) {
    const Segment work = {work_tile(args.shape, number), number};  // P = 1: its chunk_row needs no correction
    f(work, chunks_before);
    chunks_before += chunks_of(work);
  }
}

// ---- InTurn: where the chunks lie that a warp copies ----------------------------------------------------------------

// A chunk of this block, which next() moves on, from sequence to sequence; within one in the direction of the pass.
template <bool BACKWARDS> struct Cursor {
  WorkTile work;  // the chunk's sequence
  u32 number;     // of that sequence; behind the block's last chunk it is all_segments or more
  int token;      // the chunk's first token, counted from the sequence's

  __device__ __forceinline__ bool at_end(const Shape& shape) const { return number >= all_segments(shape); }
  // Moves to the first chunk of the block's first sequence, from number `first` on, that has tokens.
  __device__ __forceinline__ void begin(const Shape& shape, u32 first) {
    for (number = first; !at_end(shape); number += gridDim.x) {
      work = work_tile(shape, number);
      token = BACKWARDS ? (chunks_of(work) - 1) * CHUNK : 0;
      if (work.tokens) return;
    }
  }
  __device__ __forceinline__ void next(const Shape& shape) {
    token += BACKWARDS ? -CHUNK : CHUNK;
    if (BACKWARDS ? token < 0 : token >= work.tokens) begin(shape, number + gridDim.x);
  }
  // The chunk's place: its sequence without the tokens before the chunk. Copies take the first CHUNK of its tokens.
  __device__ __forceinline__ WorkTile place() const {
    WorkTile x = work;
    x.start += token, x.tokens -= token, x.chunk_row += token / CHUNK;
    return x;
  }
};

// The places of the last PLACES chunks that a warp has begun to copy: at(n) holds until next(shape, n + PLACES). So
// PLACES must be at least the number of chunks that the warp holds at a time: from the chunk whose results it stores
// next, up to the chunk that it copies last, both counted. In shared memory, since registers are scarce; all lanes of
// the warp call the functions. OneEach needs none: there a chunk's place follows from its iteration.
template <class Schedule, bool BACKWARDS, int PLACES> struct ChunkPlaces {};
template <bool BACKWARDS, int PLACES> struct ChunkPlaces<InTurn, BACKWARDS, PLACES> {
  WorkTile places[PLACES];   // the first member, so that at() adds nothing to the struct's address
  Cursor<BACKWARDS> cursor;  // the next chunk

  __device__ __forceinline__ const WorkTile& at(int iteration) const { return places[iteration % PLACES]; }
  __device__ __forceinline__ void begin(const Shape& shape) {
    if ((threadIdx.x & 31) == 0) cursor.begin(shape, blockIdx.x);
    __syncwarp();  // all lanes see the cursor
  }
  // Stores the place of the next chunk, which is that of `iteration`; false if the block has no more. Calls count up
  // from iteration 0. Sequences without tokens have no iteration, as in each_segment.
  __device__ __forceinline__ bool next(const Shape& shape, int iteration) {
    if (cursor.at_end(shape)) return false;
    __syncwarp();  // all lanes have read the cursor
    if ((threadIdx.x & 31) == 0) places[iteration % PLACES] = cursor.place(), cursor.next(shape);
    __syncwarp();  // all lanes see the chunk's place
    return true;
  }
};
