// what      How the forward kernel of Hopper shares out sequences, channels, columns and chunks among blocks.
// grid      a block for every (sequence or segment, head, BV columns of V). A cluster's blocks have neighbouring
//           columns. The last sequences of a row of the batch have the first blocks: of unequal segments the last are
//           the long ones
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

// What this block computes: some tokens of a sequence, and some columns.
struct WorkTile {
  i32 sequence;  // or segment, or part
  i32 batch, head, column, start;
  i32 tokens;            // whole chunks if they end with the array: boxes read zeros and store nothing behind it
  const float* initial;  // the state before the tokens; null: zero
  float* final;          // where the state behind them is stored; or null
};

template <class Schedule, int BV, class Args>
__device__ __forceinline__ WorkTile work_tile(const Args& args, u32 block) {
  constexpr u32 SIZE = Schedule::CLUSTER_SIZE;
  const Shape& shape = args.shape;
  const u32 tiles = u32(shape.V + BV * SIZE - 1) / (BV * SIZE) * SIZE, H = u32(shape.H), count = u32(shape.count);
  const u32 segments = u32(args.segments), parts = Schedule::reads ? 1 : u32(args.parts);
  const u32 pair = block / tiles, h = pair % H, row = pair / H / parts, batch = row % u32(shape.B);
  const u32 s = count - 1 - row / u32(shape.B), segment = batch * count + s, n = segment * parts + pair / H % parts;
  const Span span = tokens_of(shape, s);
  const auto state = [&](u32 number) { return (i64(number) * H + h) * shape.K * shape.V; };
  const bool continues = args.segment_states && segment % segments;
  const bool last = !Schedule::reads || segment % segments == segments - 1;
  const bool of_sequences = args.segment_states || !Schedule::reads;  // whether `initial` has a state a sequence
  const i32 tokens = i32(span.stop - span.start), whole = (tokens + CHUNK - 1) / CHUNK * CHUNK;
  const float* const before = continues ? args.segment_states : args.initial;
  const u32 own = of_sequences ? segment / segments : segment, from = continues ? segment - 1 : own;
  return {i32(n),
          i32(batch),
          i32(h),
          i32(block % tiles * BV),
          i32(span.start),
          span.stop == shape.T && !(Schedule::K_RANKS == 1 && args.backwards) ? whole : tokens,
          before ? before + state(from) : nullptr,
          args.final && last ? args.final + state(Schedule::reads ? segment / segments : n) : nullptr};
}
