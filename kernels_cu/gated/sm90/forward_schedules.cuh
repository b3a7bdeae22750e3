// what      How the forward kernel of Hopper shares out sequences, channels, columns and chunks among blocks.
// grid      a block for every (sequence or segment, head, BV columns of V); those of a cluster have neighbouring
//           columns, and the last ones in a row of the batch are first: of unequal segments these are the long ones
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

// Where this block works: a stretch of one sequence's tokens, its columns, the state before these, and where it leaves
// that behind them; null: zero, nowhere. Behind an array's end copies read zeros and store nothing, so that the last
// chunk before it counts as whole.
struct WorkTile {
  i32 sequence, batch, head, column, start, tokens;
  const float* initial;
  float* final;
};

template <class Schedule, int BV, class Args>
__device__ __forceinline__ WorkTile work_tile(const Args& args, u32 block) {
  constexpr u32 SIZE = Schedule::CLUSTER_SIZE;
  const Shape& shape = args.shape;
  const u32 tiles = u32(shape.V + BV * SIZE - 1) / (BV * SIZE) * SIZE, H = u32(shape.H), count = u32(shape.count);
  const u32 of = u32(args.of), parts = Schedule::reads ? 1 : u32(args.parts);
  const u32 pair = block / tiles, h = pair % H, row = pair / H / parts, batch = row % u32(shape.B);
  const u32 s = count - 1 - row / u32(shape.B), segment = batch * count + s, n = segment * parts + pair / H % parts;
  const Span span = tokens_of(shape, s);
  const auto state = [&](u32 number) { return (i64(number) * H + h) * shape.K * shape.V; };
  const bool goes_on = args.left && segment % of, last = !Schedule::reads || segment % of == of - 1;
  const bool of_all = args.left || !Schedule::reads;  // whether there are initial states of sequences, or of segments
  const i32 tokens = i32(span.stop - span.start), whole = (tokens + CHUNK - 1) / CHUNK * CHUNK;
  const float* const before = goes_on ? args.left : args.initial;
  const u32 own = of_all ? segment / of : segment, from = goes_on ? segment - 1 : own;
  return {i32(n),
          i32(batch),
          i32(h),
          i32(block % tiles * BV),
          i32(span.start),
          span.stop == shape.T ? whole : tokens,
          before ? before + state(from) : nullptr,
          args.final && last ? args.final + state(Schedule::reads ? segment / of : n) : nullptr};
}
