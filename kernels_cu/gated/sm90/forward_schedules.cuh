// what      How the forward kernel of Hopper shares out sequences, channels, columns and chunks among blocks.
// grid      a block for every (sequence or segment, head, BV columns of V); those of a cluster have neighbouring
//           columns, and the last sequences in a row of the batch are first: of unequal segments these are the long ones
// limits    clusters of two
#include "tensor.cuh"

constexpr int CHUNK = 32, BC = 8, NUM_SUBCHUNKS = CHUNK / BC;  // tokens
constexpr int PANEL = 64;                                      // columns of V a warpgroup

// Everything by one block.
struct SinglePass {
  static constexpr bool reads = true;  // whether there are queries and outputs
  static constexpr int CLUSTER_SIZE = 1;
  static constexpr int K_RANKS = 1;      // blocks that make BK channels each of every chunk
  static constexpr int CHUNK_RANKS = 1;  // blocks that make chunks in turn
};
// More than BK channels: each of two blocks makes BK of them, for both; their scores add up.
struct ClusterSplitK : SinglePass {
  static constexpr int CLUSTER_SIZE = 2, K_RANKS = 2;
};
// Few heads: two blocks have BV columns of V each; they make chunks in turn, for both.
struct ClusterSplitV : SinglePass {
  static constexpr int CLUSTER_SIZE = 2, CHUNK_RANKS = 2;
};
// Only the state that tokens leave behind, and their decay: for sequences cut into segments and these into parts, whose
// states scan_segments.cu then joins; a launch for every BK channels.
struct SegmentState : SinglePass {
  static constexpr bool reads = false;
};

// Which of its cluster this block is.
template <class Schedule> __device__ __forceinline__ int rank_of() {
  return Schedule::CLUSTER_SIZE > 1 ? blockIdx.x % Schedule::CLUSTER_SIZE : 0;
}

// Where this block works: a stretch of one sequence's tokens, its columns, where its state lies, and where it goes: -1
// for nowhere.
struct WorkTile {
  i32 sequence, batch, head, column, start, tokens;
  i64 state, final;
};

// of: segments a sequence, of which the last one leaves the final state; parts: SegmentState's of a segment, each with a
// state of its own.
template <class Schedule, int BV>
__device__ __forceinline__ WorkTile work_tile(const Shape& shape, u32 block, u32 of, u32 parts) {
  constexpr u32 SIZE = Schedule::CLUSTER_SIZE;
  const u32 tiles = u32(shape.V + BV * SIZE - 1) / (BV * SIZE) * SIZE, H = u32(shape.H), count = u32(shape.count);
  const u32 h = block / tiles % H, row = block / tiles / H / (Schedule::reads ? 1 : parts), batch = row % u32(shape.B);
  const u32 s = count - 1 - row / u32(shape.B), segment = batch * count + s;
  const u32 n = Schedule::reads ? segment : segment * parts + block / tiles / H % parts;
  const Span span = tokens_of(shape, s);
  const i64 size = shape.K * shape.V, state = (i64(n) * H + h) * size;
  i64 final = state;
  if (Schedule::reads) final = segment % of == of - 1 ? (i64(segment / of) * H + h) * size : -1;
  return {i32(n),
          i32(batch),
          i32(h),
          i32(block % tiles * BV),
          i32(span.start),
          i32(span.stop - span.start),
          state,
          final};
}
