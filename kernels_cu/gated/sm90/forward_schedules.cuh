// what      How Hopper's forward kernel distributes sequences, channels of K, columns of V and chunks over blocks.
//           Terms: a batch row has one sequence, or several packed ones; the host may cut a sequence into segments, and
//           a segment into parts, which different blocks compute.
// grid      a block for every (sequence, segment or part; head; BV columns of V). The blocks of a cluster have
//           neighbouring columns. The first blocks have the last sequences of the batch rows: if segments are unequal,
//           the last ones are the longest, and should start first
// limits    a cluster has two blocks at most
#include "tensor.cuh"

// From the includes:
//   shape.H: heads
//   Args, in forward_storage.cuh: segments (of a sequence); parts (of a segment); segment_states (the final states of
//     segments from an earlier launch, from which the next segments start; null: each segment starts from a state of
//     `initial`); backwards (the token stride is negative: then threads copy rows, else tensor maps copy boxes of CHUNK
//     tokens. Never set for ClusterSplitK: the host copies such arrays first)

constexpr int CHUNK = 32, SUB_CHUNK = 8, NUM_SUBCHUNKS = CHUNK / SUB_CHUNK;  // tokens; sub-chunks of a chunk
constexpr int PANEL = 64;                                                    // columns of V a warpgroup

// One block makes all operands of its chunks and multiplies them.
struct SinglePass {
  static constexpr bool has_outputs = true;  // whether there are queries and outputs
  static constexpr int CLUSTER_SIZE = 1;
  static constexpr int K_RANKS = 1;      // blocks that share the channels of every chunk, BK each
  static constexpr int CHUNK_RANKS = 1;  // blocks that make the operands of chunks in turn, of all channels
};
// For K > BK: each of the cluster's two blocks makes the operands of BK channels and copies them to the other block.
// Each block multiplies all channels; a score is the sum of both blocks' scores.
struct ClusterSplitK : SinglePass {
  static constexpr int CLUSTER_SIZE = 2, K_RANKS = 2;
};
// For few heads: two blocks of BV columns each make the operands of the chunks in turn and copy them to each other.
struct ClusterSplitV : SinglePass {
  static constexpr int CLUSTER_SIZE = 2, CHUNK_RANKS = 2;
};
// Computes only the final states of parts of segments, and their decays; no outputs. One launch for every BK channels.
// The host gives one of two:
//   no `initial`: each part starts from zero; scan_segments.cu joins the parts
//   `initial`, and one part: a sequence has two segments. The first one starts from the sequence's initial state, and
//     its final state is the `segment_states` of the next launch; the second one is not computed
struct SegmentState : SinglePass {
  static constexpr bool has_outputs = false;
};

// This block's number in its cluster: that of blockIdx.x, which is also the `block` of work_tile.
template <class Schedule> __device__ __forceinline__ int rank_in_cluster() {
  return Schedule::CLUSTER_SIZE > 1 ? blockIdx.x % Schedule::CLUSTER_SIZE : 0;
}

// What a block computes: `tokens` tokens of a head from token `start` of the batch row on, and BV columns from `column`
// on. work_tile gives every part all tokens of its segment; narrow_work (forward_forgotten.cuh) then sets start and
// tokens to those of the part.
struct WorkTile {
  i32 sequence;  // the number, over the batch, of the segment (a sequence, if none is cut), or of the part
  i32 batch, head, column, start;
  // Rounded up to a multiple of CHUNK if the tokens end with the batch row and boxes copy them: boxes read 0 after the
  // row's end, and store nothing there.
  i32 tokens;
  const float* initial;  // the state before the tokens; null: zero
  float* final;          // where the state after the tokens is stored; null: it is not
};

// The work of block number `block` of the grid. Blocks: column fastest, then head, part, batch row and sequence.
template <class Schedule, int BV, class Args>
__device__ __forceinline__ WorkTile work_tile(const Args& args, u32 block) {
  constexpr u32 SIZE = Schedule::CLUSTER_SIZE;
  const Shape& shape = args.shape;
  const u32 tiles = u32(shape.V + BV * SIZE - 1) / (BV * SIZE) * SIZE, H = u32(shape.H),
            row_sequences = u32(shape.row_sequences);
  const u32 segments = u32(args.segments), parts = Schedule::has_outputs ? 1 : u32(args.parts);
  // s: the number of the sequence or segment in its batch row; segment: its number over the batch; part: the part's.
  const u32 head_index = block / tiles, h = head_index % H, segment_index = head_index / H / parts;
  const u32 batch = segment_index % u32(shape.B), s = row_sequences - 1 - segment_index / u32(shape.B);
  const u32 segment = batch * row_sequences + s, part = segment * parts + head_index / H % parts;
  const Span span = tokens_of(shape, s);
  const auto state = [&](u32 number) { return (i64(number) * H + h) * shape.K * shape.V; };
  // continues: the tokens start from the final state of the segment before; last: they end their sequence, or each part
  // has a final state.
  const bool continues = args.segment_states && segment % segments;
  const bool last = !Schedule::has_outputs || segment % segments == segments - 1;
  // Whether args.initial has a state for each sequence, not for each segment.
  const bool initial_of_sequence = args.segment_states || !Schedule::has_outputs;
  const i32 tokens = i32(span.stop - span.start), rounded_up = (tokens + CHUNK - 1) / CHUNK * CHUNK;
  const float* const states = continues ? args.segment_states : args.initial;
  const u32 initial = initial_of_sequence ? segment / segments : segment, before = continues ? segment - 1 : initial;
  return {i32(part),
          i32(batch),
          i32(h),
          i32(block % tiles * BV),
          i32(span.start),
          span.stop == shape.T && !(Schedule::K_RANKS == 1 && args.backwards) ? rounded_up : tokens,
          states ? states + state(before) : nullptr,
          args.final && last ? args.final + state(Schedule::has_outputs ? segment / segments : part) : nullptr};
}
