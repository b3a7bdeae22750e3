// what      The arguments of Hopper's forward kernel of GLA and RWKV-6, its shared memory, and the layout of its tiles.
//           A producer group multiplies q and k of a chunk by decays, computes the chunk's scores, and stores these
//           operands in a stage. Consumer warpgroups multiply them by v and by the state S [K, V].
// math      A chunk has 32 tokens, in two halves and four sub-chunks of 8. The decays of a token are e^g, with g its
//           log gates. An operand is a query or key times decays. A query "decayed from" a border between tokens is
//           multiplied by the decays of the tokens after the border, up to and with its own token (RWKV-6: without it);
//           a key "decayed to" a border by the decays of the tokens after its own, up to the border. The score of a
//           query and an earlier key is the product of the query decayed from, and the key decayed to, one border
//           between them
// smem      Shared. inputs[group]: q, k and g of a chunk, copied from memory; score_operands[group]: operands of the
//           scores, written and read by the group; operands[stage] and headers[stage]: written by a group, read by all
//           consumers; v[warpgroup][slot]: a chunk of v, copied from memory, which o then overwrites
// barriers  mbarriers. gates_copied[group]: g of the group's next chunk is in inputs; qk_copied[group]: q and k are;
//           values_copied[warpgroup][slot]: v is in the slot; full[stage]: a chunk's operands are complete;
//           empty[stage]: all consumers have read them. Named barriers: NamedBarrier, below
// limits    sm_90a; q, k, v and o of float16 or bfloat16
#include "ptx.cuh"
#include "gated/sm90/forward_schedules.cuh"
#include "swizzled.cuh"
#include "tensor.cuh"

// From the includes:
//   NUM_SUBCHUNKS = 4; PANEL = 64 columns of V
//   Schedule: what the blocks of a cluster share. has_outputs: whether there are queries and outputs; CLUSTER_SIZE, 1
//     or 2 blocks; K_RANKS: blocks that share the channels of every chunk; CHUNK_RANKS: blocks that make chunks in turn
//   SegmentState: the schedule that computes only final states, and their decays. Sequences are cut into segments, to
//     fill the card; in this schedule segments are cut into parts, which blocks compute side by side
//   WorkTile: what a block computes

// Numbers of named barriers: VALUES_BARRIER + warpgroup joins a consumer warpgroup, PRODUCER_BARRIER + group a producer
// group.
enum NamedBarrier { VALUES_BARRIER = 1, PRODUCER_BARRIER = 3 };

// The template argument G, the gates' type, if all channels of a token have one gate. Such gates are float32, and
// threads read them from memory.
struct ScalarDecay {};
// The number of gates that a producer thread has for each of its tokens: of its 4 channels, or the one ScalarDecay.
template <typename G> constexpr int GATES_PER_TOKEN = 4;
template <> constexpr int GATES_PER_TOKEN<ScalarDecay> = 1;
template <typename G> constexpr bool HAS_CHANNEL_GATES = GATES_PER_TOKEN<G> == 4;

// T, the type of q, k, v and o, is bfloat16 or float16. bfloat16 has float32's range and 8 bits of precision; float16
// has 11 bits, as tf32, and a small range. Wide<T> is the type of operands that may leave float16's range: bfloat16 if
// T is, else tf32, which is stored as float.
template <typename T> constexpr bool IS_BFLOAT16 = false;
template <> constexpr bool IS_BFLOAT16<bf16> = true;
template <typename T> using Wide = Select<IS_BFLOAT16<T>, bf16, float>;

// The type of operands that are decayed from or to the middle of a sub-chunk of 8 tokens: Wide<T>, since queries before
// the middle and keys behind it are divided by the decays between; tf32 if a score is the sum of two blocks' scores
// (K_RANKS is 2), since these may cancel.
template <int K_RANKS, typename T> using Middle = Select<K_RANKS == 1, Wide<T>, float>;

// The type of operands that are decayed from or to a border between sub-chunks: float16, since decays to a border are
// at most 1 and make no operand larger. A row of q or k that exceeds float16's range is scaled (forward_scales.cuh). If
// K_RANKS > 1, the type is T.
template <int K_RANKS, typename T> using Border = Select<K_RANKS == 1, f16, T>;
// Whether operands at borders have a smaller range than T: float16's, while T is bfloat16.
template <class Schedule, typename T>
constexpr bool BORDER_IS_NARROWER =
    Schedule::has_outputs && IS_BFLOAT16<T> && !IS_BFLOAT16<Border<Schedule::K_RANKS, T>>;

// Whether a score is stored as two numbers of type T, the rounded score and its rounding error, which are multiplied
// by v separately. bfloat16 alone would have too little precision; the sum of two blocks' scores (K_RANKS > 1) may
// cancel, and rounding errors would remain.
template <class Schedule, typename T> constexpr bool SPLIT_SCORES = IS_BFLOAT16<T> || Schedule::K_RANKS > 1;

template <typename T, typename G> struct Args {
  // Boxes that one copy moves: [CHUNK tokens, BK channels] of q, k and g; [CHUNK tokens, PANEL columns] of v and
  // o_boxes, in the 128-byte swizzle. The same arrays with strides, for threads that copy rows: *_rows and o.
  TensorMap q, k, g, v;
  StridedRows<const T> q_rows, k_rows;
  StridedRows<const G> g_rows;
  StridedRows<const T> v_rows;
  TensorMap o_boxes;
  StridedRows<T> o;
  StridedRows<const float> scalar_gate;  // [B, H, T]: the log gates if G is ScalarDecay
  const float* u;                        // [H, K]: RWKV-6's bonus; null for GLA
  const float* initial;  // [N, H, K, V]: a state for each segment, or for each sequence if `segment_states`
                         // is given and in SegmentState; null: zero
  float* final;          // [N, H, K, V]: a state of each sequence; SegmentState: one of each part; or null
  Shape shape;
  double scale;
  float* decays;  // [N, H, 2, K], written by SegmentState: the product of both rows is a part's decay
  i64 channel;    // the first channel of this launch: with many channels, several launches share them
  i64 segments;   // of a sequence
  i64 computed;   // SegmentState computes only the first `computed` segments of a sequence
  float* marks;   // [N, marks_per_sequence, H, K, V], written: the states before every mark_every-th chunk, from which
                  // the backward pass starts; or null
  i64 mark_every, marks_per_sequence;  // mark_every: chunks, a power of two; 0 without marks
  i64 parts;                           // SegmentState: parts of a segment, each with a final state of its own
  const float* segment_states;         // [N, H, K, V]: the final states of segments, from which the next segments
                                       // start; null: segments start from `initial`
  i64 backwards;  // whether the stride of tokens is negative, which tensor maps do not allow: threads copy rows
};

// Whether threads copy rows, since the stride of tokens is negative. If K_RANKS > 1 there are too few registers for
// that: the host copies such arrays first.
template <class Schedule, class Args> __device__ __forceinline__ bool threads_copy_rows(const Args& args) {
  return Schedule::K_RANKS == 1 && args.backwards;
}

// ROWS tokens of BK channels as panels [ROWS, 128 bytes of channels] in the tensor cores' 128-byte swizzle
// (swizzled.cuh).
template <typename X, int ROWS, int BK> using Tile = X[BK * sizeof(X) / 128][ROWS][128 / sizeof(X)];

// Values of StageHeader::row[0]. WHOLE_CHUNK: the stage holds the operands of a whole chunk. Otherwise it holds those
// of one token, and the value is the token's row in the chunk, plus MORE_FILLS if the stage will be filled again for
// this chunk (forward_growth.cuh).
constexpr int WHOLE_CHUNK = -1, MORE_FILLS = CHUNK;
static_assert((MORE_FILLS & MORE_FILLS - 1) == 0 && MORE_FILLS >= CHUNK, "a bit beside the row's number");

// The consumers' operands, of one chunk in each stage: BK channels of each of K_RANKS blocks. Producers write them
// before full[stage], consumers read them before empty[stage]. Scores [query, key] are in the first 32 columns of a
// tile, their rounding errors (SPLIT_SCORES) in the other 32. SHARED: without rounding errors two stages share a tile,
// and the second stage has the other 32 columns. `scores_offset` is XORed with byte offsets in a stage's tile: 64
// bytes, 32 columns, for the second stage of a shared tile, else 0.
template <bool HAS_OUTPUTS, typename T, int BK, int K_RANKS, int STAGES, bool SHARED> struct alignas(1024) Operands {
  using Scores = T[K_RANKS][CHUNK][PANEL];
  static_assert(!SHARED || STAGES == 2, "each stage has half of a tile");
  Tile<Wide<T>, CHUNK, BK> q[STAGES][K_RANKS];  // decayed from the chunk's start; tf32: channels in in_tile's order
  Tile<T, CHUNK, BK> k[STAGES][K_RANKS];        // decayed to the chunk's end
  Scores A[SHARED ? 1 : STAGES];
  __device__ __forceinline__ Scores& scores(int stage) { return A[SHARED ? 0 : stage]; }
  static __device__ __forceinline__ int scores_offset(int stage) { return SHARED ? stage * 64 : 0; }
};
template <typename T, int BK, int K_RANKS, int STAGES, bool SHARED>
struct alignas(1024) Operands<false, T, BK, K_RANKS, STAGES, SHARED> {
  Tile<T, CHUNK, BK> k[STAGES][K_RANKS];
};

// Stored with a stage's operands: the chunk's decays, and which rows the stage holds.
template <int BK, int K_RANKS> struct alignas(16) StageHeader {
  float decay[K_RANKS][BK];  // of each channel over the whole chunk, ordered by put_decays (forward_rows.cuh)
  i32 row[4];                // [0]: see WHOLE_CHUNK; the rest pads to 16 bytes, the least that one block copies to
                             // another
};

// A chunk of the inputs, undecayed, with the types that they have in memory.
template <bool HAS_OUTPUTS, typename T, typename G, int BK> struct alignas(128) InputStage {
  T q[CHUNK][BK], k[CHUNK][BK];
  G g[CHUNK][BK];
};
template <typename T, int BK> struct alignas(128) InputStage<true, T, ScalarDecay, BK> {
  T q[CHUNK][BK], k[CHUNK][BK];
};
template <typename T, typename G, int BK> struct alignas(128) InputStage<false, T, G, BK> {
  T k[CHUNK][BK];
  G g[CHUNK][BK];
};
template <typename T, int BK> struct alignas(128) InputStage<false, T, ScalarDecay, BK> {
  T k[CHUNK][BK];
};

// Operands of the scores of a chunk: M is the type of those at sub-chunks' middles, B of those at borders. A producer
// group's warps write them, and read them after the group's barrier. Rows are padded, so that the 16 bytes that
// ldmatrix reads of each of eight rows are in different banks.
template <bool HAS_OUTPUTS, typename M, typename B, int BK> struct alignas(128) ScoreOperands {
  using BorderType = B;
  struct alignas(16) Row {
    M middle_q[BK], middle_k[BK];  // decayed from and to the middle of their sub-chunk
    // Queries decayed from a border, keys decayed to it, 8 rows of a sub-chunk at a time. A row has one border:
    //   row             border between  border_q: queries of  border_k: keys of
    //   NEAR_ROW + 0    0 and 1         sub-chunk 1           sub-chunk 0
    //   NEAR_ROW + 8    2 and 3         sub-chunk 3           sub-chunk 2
    //   HALF_ROW + 0    the halves      sub-chunk 2           sub-chunk 0
    //   HALF_ROW + 8    the halves      sub-chunk 3           sub-chunk 1
    B border_q[BK], border_k[BK];
    float undo_q, undo_k;  // 1 / the scales of border_q and border_k (forward_scales.cuh)
    float padding[2];
  } rows[CHUNK];
  static constexpr int NEAR_ROW = 0, HALF_ROW = 16;
  // The first row of a sub-chunk's queries at the border before it, and of its keys at the border after it. Sub-chunk 0
  // has no border before it, and 3 none after it: their results are not used.
  static __device__ __forceinline__ constexpr int near_queries_row(int subchunk) {
    return subchunk == 2 ? HALF_ROW : NEAR_ROW + 4 * (subchunk - 1);
  }
  static __device__ __forceinline__ constexpr int near_keys_row(int subchunk) {
    return subchunk == 1 ? HALF_ROW + SUB_CHUNK : NEAR_ROW + 4 * subchunk;
  }
  i32 out_of_float16;  // whether a row of this chunk, or of an earlier one, exceeds the range of B; never reset
};
template <typename M, typename B, int BK> struct ScoreOperands<false, M, B, BK> {};
using AnyOperands = ScoreOperands<true, bf16, f16, 64>;
static_assert(AnyOperands::near_queries_row(1) == 0 && AnyOperands::near_queries_row(3) == SUB_CHUNK, "see the map");
static_assert(AnyOperands::near_keys_row(0) == 0 && AnyOperands::near_keys_row(2) == SUB_CHUNK, "see the map");

// If K_RANKS > 1, each block's vote for the chunks of stages 0 and 1: whether gates of its channels are so far above 0
// that operands would overflow, so that both blocks compute the chunk token by token (forward_growth.cuh).
template <int K_RANKS> struct alignas(16) Votes {
  i32 grows[K_RANKS][2][4];  // the vote is at [rank][stage][0]; 16 bytes are the least that one block copies to another
  MBarrier arrived[2];       // [stage]: both blocks' votes are in shared memory
};
template <> struct Votes<1> {};

// For SegmentState's scan of gates from a segment's end (forward_forgotten.cuh).
template <bool HAS_OUTPUTS> struct alignas(8) Scan {
  MBarrier loaded;  // a batch of gates is in shared memory
  // The factor of `total_decay` for the tokens that are skipped before this part: 0 if there are any, since they are
  // skipped only where the state before them is forgotten; else 1.
  float skipped_decay;
};
template <> struct Scan<true> {};

template <class Schedule, typename T, typename G, int BK, int BV> struct Shared {
  static constexpr bool HAS_OUTPUTS = Schedule::has_outputs;
  static constexpr int K_RANKS = Schedule::K_RANKS;
  // The chunks of v, for each consumer warpgroup, that shared memory has room for.
  static constexpr int VALUE_SLOTS = HAS_OUTPUTS && !IS_BFLOAT16<T> ? 2 : sizeof(G) <= 2 ? 4 : 3;
  // GROUPS: the producer groups of a block. Two, but one if the cluster's other block makes half of the operands
  // (K_RANKS), or if BK = 128 and shared memory has no room for two. LARGE: how many of three properties the instance
  // has that take more shared memory; with two or three of them there is no room for two groups.
  static constexpr int LARGE = (sizeof(G) == 4) + !IS_BFLOAT16<T> + (Schedule::CHUNK_RANKS > 1);
  static constexpr int GROUPS = HAS_OUTPUTS && (K_RANKS > 1 || BK == 128 && LARGE > 1) ? 1 : 2;
  // PRODUCER_GROUPS: the producer groups of the cluster that make whole chunks in turn. Each stage is filled by one of
  // them only.
  static constexpr int PRODUCER_GROUPS = GROUPS * Schedule::CHUNK_RANKS;
  static constexpr int STAGES = PRODUCER_GROUPS > 2 ? PRODUCER_GROUPS : 2;
  static_assert(STAGES % PRODUCER_GROUPS == 0 && Schedule::CLUSTER_SIZE == K_RANKS * Schedule::CHUNK_RANKS);
  static_assert(K_RANKS == 1 || STAGES == 2, "Votes are of two stages");
  static_assert(VALUE_SLOTS >= 2, "v is copied to the previous chunk's slot");
  static_assert(VALUES_BARRIER + BV / PANEL <= PRODUCER_BARRIER && PRODUCER_BARRIER + GROUPS <= 16, "named barriers");

  // Whether two stages share a tile of scores: see Operands.
  static constexpr bool SHARED = !SPLIT_SCORES<Schedule, T> && Schedule::CLUSTER_SIZE == 1;

  Operands<HAS_OUTPUTS, T, BK, K_RANKS, STAGES, SHARED> operands;
  T v[BV / PANEL][VALUE_SLOTS][CHUNK][PANEL];  // consumers overwrite v by o
  ScoreOperands<HAS_OUTPUTS, Middle<K_RANKS, T>, Border<K_RANKS, T>, BK> score_operands[GROUPS];
  InputStage<HAS_OUTPUTS, T, G, BK> inputs[GROUPS];
  float decays[GROUPS][NUM_SUBCHUNKS][BK];  // of each channel over each sub-chunk; written and read by the group
  float u[BK];                              // RWKV-6's bonus
  StageHeader<BK, K_RANKS> headers[STAGES];
  Votes<K_RANKS> votes;
  Scan<HAS_OUTPUTS> scan;
  WorkTile work;  // what this block computes; here, since registers are scarce
  // See the top.
  MBarrier gates_copied[GROUPS], qk_copied[GROUPS], values_copied[BV / PANEL][VALUE_SLOTS];
  MBarrier full[STAGES], empty[STAGES];
};
