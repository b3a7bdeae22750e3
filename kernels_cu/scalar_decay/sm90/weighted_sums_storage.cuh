// what      Shared memory, arguments, template parameters and registers of weighted_sums.cu: outputs and gradients of a
//           recurrence with one gate per token and head, on Hopper.
// smem      Stage: a chunk's tokens and its scores A; its outputs overwrite v. Gates: sums of a chunk's gates
// barriers  by stage. full: the chunk's tokens and gates have arrived; scores: A is complete; done: the outputs are
//           complete and the inputs have been read; summed: the terms of dg, which overwrite `partner`, have been read.
//           By chunk: requested: the cluster's other block has requested its copy of the chunk
// limits    sm_90a; bfloat16
constexpr int CHUNK = 64, STRETCH = 256;  // tokens
static_assert(CHUNK == 64 && STRETCH % CHUNK == 0, "a lane of the warps that sum gates, and dg, has two tokens");
constexpr float LARGEST_BF16 = 3.38e38f;  // below bfloat16's largest number: what exceeds it may round to infinity
#include "warpgroup.cuh"

// Passes: what one launch computes, as the table in the head of weighted_sums.cu has it.
struct OneSum {
  static constexpr u32 SUMS = 1;                       // sums of a launch, each by blocks of its own
  static constexpr bool HAS_OUTPUTS = true;            // computes o, and so reads q; without it, states alone
  static constexpr bool SPLITS_STATE = false;          // reads S as the sum of two bfloat16 numbers, not as one
  static constexpr bool SERVES_GATE_GRADIENT = false;  // one of the two passes that compute dg together
};
struct Whole : OneSum {
  static constexpr bool SPLITS_STATE = true;
};
struct Summary : OneSum {
  static constexpr bool HAS_OUTPUTS = false;
};
struct BothSummaries : Summary {
  static constexpr u32 SUMS = 2;
};
struct Queries : OneSum {};
struct GatedQueries : OneSum {
  static constexpr bool SERVES_GATE_GRADIENT = true;
};
struct Keys : OneSum {
  static constexpr u32 SUMS = 2;
};
struct GatedKeys : Keys {
  static constexpr bool SERVES_GATE_GRADIENT = true;
};
struct Gradients : OneSum {
  static constexpr u32 SUMS = 3;
};
// GatedKeys, which writes dg; BothSummaries, whose segments hand states on; the passes whose sums all go backward in
// time: dk and dv; and those, Gradients and BothSummaries, some of whose sums do: each tells by WeightedSum::backwards.
template <class Pass> constexpr bool WRITES_GATE_GRADIENT = Pass::SERVES_GATE_GRADIENT && Pass::SUMS == 2;
template <class Pass> constexpr bool HANDS_STATES_ON = !Pass::HAS_OUTPUTS && Pass::SUMS == 2;
template <class Pass> constexpr bool ALL_BACKWARD = Pass::HAS_OUTPUTS && Pass::SUMS == 2;
template <class Pass> constexpr bool SOME_BACKWARD = Pass::SUMS > 1 && !ALL_BACKWARD<Pass>;

// Whether the blocks of a head's two sums, dk and dv, form a cluster.
template <class Pass, int BK, int BV> constexpr bool IN_CLUSTER = WRITES_GATE_GRADIENT<Pass> && BK + BV == 256;
constexpr int CLUSTER_LEAD = 2;  // one block requests at most this many chunks more than the other

// Whether this block's sum has terms of dg: dq and dk have, dv, the second sum of GatedKeys, has not.
template <class Pass> __device__ __forceinline__ bool block_serves_gate_gradient() {
  return Pass::SERVES_GATE_GRADIENT && opaque(blockIdx.x) % Pass::SUMS == 0;  // opaque: no register holds it
}

// One sum: its arrays by their roles (see the head of weighted_sums.cu). K is the width of q and k, V that of v and o.
struct alignas(64) WeightedSum {
  TensorMap q, k, v, o, partner;  // boxes of a chunk's tokens and 128 bytes, swizzled; o is the partner's gradient
  StridedRows<const bf16> q_rows, k_rows, v_rows, partner_rows;
  StridedRows<bf16> o_rows;
  const float* initial;  // the states before the first token (backwards: after the last), or null for zeros
  // The states after the last token (backwards: before the first), or null: not wanted. HANDS_STATES_ON: the states
  // with which segments start.
  float* final;
  i64 K, V;
  i64 state_k, state_v;                          // the states' strides along K and V
  double output_scale, value_scale;              // factors of o, and of the values that are added to the state
  i64 backwards;                                 // whether chunks come backward in time
  i64 adds_to_o;                                 // whether the result is added to what o's array holds
  i64 q_group, k_group, v_group, partner_group;  // how many heads of o share a head of the array
};

template <class Pass, typename G> struct Args {
  WeightedSum sums[Pass::SUMS];
  StridedRows<const G> g;
  Shape shape;
  float* decays;  // the decay over all chunks. Summary: [N, H, 2, K], the second row is 1; BothSummaries: [2, N, H, K]
  i64 segments;   // the segments into which each of the caller's sequences is cut
  // Without outputs: how many of these are computed, from the first one of the direction on. BothSummaries: fewer than
  // all, since the last one has no next one to which it hands its state.
  i64 computed;
  // Gated passes, both with one BK, to which the layer's K and V were rounded up: [stretches, BK / 16, BK / 16, 32],
  // bfloat16 states in the layout of lanes' registers
  uint4* stretch_states;
  float* token_sums;  // Gated passes: q_i . dq_i of each tile of columns of dq
  void* dg;           // GatedKeys: numbers of the gates' type, or float32 if several blocks write parts of it
  i64 dq_tiles;       // Gated passes: the tiles of BV columns that dq has
};

// Sums of a chunk's log gates within groups of 2^level tokens, as logarithms to base 2. If two tokens are in
// neighbouring groups of a level, the logarithm of the decay from the earlier one to the later one is the earlier one's
// to_end plus the later one's to_token.
struct alignas(16) Gates {
  static constexpr int LEVELS = 6;
  static_assert(1 << LEVELS == CHUNK, "groups of the last level are halves of the chunk");
  float to_token[LEVELS][CHUNK];    // from the group's start through the token
  float to_end[LEVELS - 1][CHUNK];  // from after the token to the group's end, levels from 1 on
  u32 self_scores[CHUNK];       // SERVES_GATE_GRADIENT: a token's score with itself, the sum of two bfloat16 numbers
  float output_factors[CHUNK];  // E or, backwards, L, times output_scale
  // L or, backwards, E, times value_scale; for two tokens, each the sum of two bfloat16 numbers
  uint2 value_factors[CHUNK / 2];
  alignas(16) float chunk_decay;
};

template <int BV, bool GATE> struct Partner {};
template <int BV> struct Partner<BV, true> {
  // In each warp's columns row r is overwritten by the warp's sums of partner . o, of tokens 2r and 2r + 1.
  Tile<bf16, BV> partner;
};
template <int BK, int BV, bool GATE> struct alignas(1024) Stage : Partner<BV, GATE> {
  Tile<bf16, BK> q, k;
  Tile<bf16, BV> v;   // overwritten by o
  bf16 A[CHUNK][64];  // [query, key]
};

template <class Pass, int BK, int BV> struct Shared {
  static_assert((BK == 64 || BK == 128) && (BV == 64 || BV == 128));
  static constexpr int STAGES = Pass::SERVES_GATE_GRADIENT ? BK + BV == 128 ? 2 : 3 : BK + BV == 192 ? 4 : 3;
  Stage<BK, BV, Pass::SERVES_GATE_GRADIENT> stages[STAGES];
  Gates gates[STAGES];
  MBarrier full[STAGES], scores[STAGES], done[STAGES], summed[STAGES];
  MBarrier requested[2 * CLUSTER_LEAD];  // twice, since the other block may be as far ahead as this one has requested
};

template <int BV> constexpr int CONSUMERS = 2 * BV;
template <int BV> constexpr int ALL_THREADS = CONSUMERS<BV> + 2 * 128;

// Registers of a thread by role. A block whose roles together ask for more than all its threads start with (AT_FIRST
// each, of 65,536 a multiprocessor) would wait for ever. TWO_BLOCKS: whether a multiprocessor has registers and shared
// memory for two blocks.
template <int BK, int BV> struct Registers {
  static constexpr bool TWO_BLOCKS = BK + BV == 128;
  static constexpr int BLOCKS = TWO_BLOCKS ? 2 : 1, AT_FIRST = 65536 / (BLOCKS * ALL_THREADS<BV>) / 8 * 8;
  static constexpr int CONSUMER = TWO_BLOCKS ? 128 : BV == 128 ? 184 : 240;
  static constexpr int SCORES = TWO_BLOCKS ? 80 : 96, OTHERS = TWO_BLOCKS ? 32 : 48;
  static_assert(BV / 64 * CONSUMER + SCORES + OTHERS <= ALL_THREADS<BV> / 128 * AT_FIRST);
};

__device__ __forceinline__ int tiles_of(i64 width, int BV) { return int(width + BV - 1) / BV; }

// The first token of the chunk that the given iteration computes.
__device__ __forceinline__ int first_token_of(int iteration, const WorkTile& work, bool backwards) {
  return (backwards ? (work.tokens - 1) / CHUNK - iteration : iteration) * CHUNK;
}

// The number of a sequence's segment that `work` is, counted from the first one of the direction.
template <class Args> __device__ __forceinline__ i64 step_of(const WorkTile& work, const Args& args, bool backwards) {
  const i64 segment = work.sequence % args.segments;
  return backwards ? args.segments - 1 - segment : segment;
}

// Whether the chunk whose first token is `first` is the last of its stretch.
__device__ __forceinline__ bool ends_stretch(int first, const WorkTile& work) {
  return first % STRETCH == STRETCH - CHUNK || first + CHUNK >= work.tokens;
}
