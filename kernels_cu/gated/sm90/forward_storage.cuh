// what      The arguments of Hopper's forward kernel, its shared memory, and the layout of its tiles. Producer groups
//           make the operands of chunks of 32 tokens in stages; consumer warpgroups multiply them.
// smem      Shared: for every producer group a chunk of inputs and the operands of its scores; stages with the
//           consumers' operands; for every consumer warpgroup slots of v, in which o then overwrites v
// barriers  mbarriers: gates[group]: the gates of the group's next chunk are in shared memory; rows[group]: its q and k
//           are; values[warpgroup][slot]: a chunk of v is; full[stage]: a chunk's operands are complete; empty[stage]:
//           all consumers have read them. Named barriers: Named, below
// limits    sm_90a; half data
#include "ptx.cuh"
#include "gated/sm90/forward_schedules.cuh"
#include "swizzled.cuh"
#include "tensor.cuh"

// Named barriers: VALUES + warpgroup for a consumer warpgroup, PRODUCERS + group for a producer group.
enum Named { VALUES = 1, PRODUCERS = 3 };

// G for a gate that all channels of a token share. Such gates are float32 and have no tile in shared memory.
struct ScalarDecay {};
template <typename G> constexpr int WIDTH = 4;  // gates of a producer thread, which has 4 channels, for each token
template <> constexpr int WIDTH<ScalarDecay> = 1;

// COARSE: whether T is bfloat16, which has float32's range and few digits: scores are the sum of two numbers. float16
// has tf32's digits and a small range. Wide<T>: the type of operands that may be far from 1: bfloat16, or else tf32.
template <typename T> constexpr bool COARSE = false;
template <> constexpr bool COARSE<bf16> = true;
template <typename T> struct WideOf {
  using type = float;
};
template <> struct WideOf<bf16> {
  using type = bf16;
};
template <typename T> using Wide = typename WideOf<T>::type;

// The type of operands that are decayed from or to the middle of a sub-chunk. If two blocks' scores are added, which
// may cancel, it is tf32.
template <int K_RANKS, typename T> struct MiddleOf {
  using type = float;
};
template <typename T> struct MiddleOf<1, T> {
  using type = Wide<T>;
};

// The type of operands that are decayed from or to a border between sub-chunks: float16, since no decay makes them
// larger. Rows beyond float16's range are scaled (forward_scales.cuh). If K_RANKS > 1, the type is T.
template <int K_RANKS, typename T> struct BorderOf {
  using type = T;
};
template <typename T> struct BorderOf<1, T> {
  using type = f16;
};
// Whether operands at borders have a type with a smaller range than T.
template <class Schedule, typename T>
constexpr bool NARROWS = Schedule::reads && COARSE<T> && !COARSE<typename BorderOf<Schedule::K_RANKS, T>::type>;

// Whether a score in A is the sum of two numbers: the rounded score and its rounding error. bfloat16 has few digits;
// two blocks' scores may cancel, and their rounding errors would remain.
template <class Schedule, typename T> constexpr bool TWO_NUMBERS = COARSE<T> || Schedule::K_RANKS > 1;

template <typename T, typename G> struct Args {
  TensorMap q, k, g, v;  // boxes: CHUNK tokens of BK channels (q, k, g) or of PANEL columns, swizzled (v, o_boxes)
  Rows<const T> q_rows, k_rows;
  Rows<const G> g_rows;
  Rows<const T> v_rows;
  TensorMap o_boxes;
  Rows<T> o;
  Rows<const float> scalar_gate;  // the gate if G is ScalarDecay
  const float *u, *initial;       // [H, K]; [N, H, K, V], a state of each segment or, with `segment_states` or in
                                  // SegmentState, of each sequence; null: zero
  float* final;                   // [N, H, K, V]: a state of each sequence; SegmentState: of each part; or null
  Shape shape;
  double scale;
  float* decays;           // SegmentState: [N, H, 2, K]: the product of both rows is a part's decay
  i64 channel;             // the first channel of this launch
  i64 segments, computed;  // segments of a sequence; SegmentState: computes only the first `computed` of them
  float* marks;            // [N, marks_per_sequence, H, K, V]: the states before every mark_every-th chunk, from which
                           // the backward pass starts; or null
  i64 mark_every, marks_per_sequence;  // mark_every: chunks, a power of two; 0 without marks
  i64 parts;                           // SegmentState: parts of a segment, each with a final state of its own
  const float* segment_states;         // [N, H, K, V]: the final states of segments, from which the next segments
                                       // start; null: segments start from `initial`
  i64 backwards;  // whether the stride of tokens is negative, which tensor maps do not allow: threads copy rows
};

// Whether threads copy rows. With K_RANKS blocks registers are too few for that: the host copies such arrays first.
template <class Schedule, class Args> __device__ __forceinline__ bool runs_backwards(const Args& args) {
  return Schedule::K_RANKS == 1 && args.backwards;
}

// ROWS tokens of BK channels: panels [ROWS, 128 bytes of channels], in the tensor cores' 128-byte swizzle.
template <typename X, int ROWS, int BK> using Tile = X[BK * sizeof(X) / 128][ROWS][128 / sizeof(X)];

// Values of Numbers::row[0]. ALL_ROWS: the stage holds a whole chunk. Otherwise it holds the operands of one token,
// whose row is the value; AGAIN is added if the stage will be filled again for this chunk (forward_growth.cuh).
constexpr int ALL_ROWS = -1, AGAIN = CHUNK;

// The operands of a chunk for the consumers, STAGES times: BK channels of each of K_RANKS blocks. Scores [query, key]
// are in the first 32 columns of a tile, their rounding errors (TWO_NUMBERS) in the other 32. SHARED: without rounding
// errors two stages share a tile, and the second stage has the other 32 columns. `flip` is XORed with byte offsets in
// the tile, which moves them by 32 columns.
template <bool READS, typename T, int BK, int K_RANKS, int STAGES, bool SHARED> struct alignas(1024) Operands {
  using Scores = T[K_RANKS][CHUNK][PANEL];
  Tile<Wide<T>, CHUNK, BK> q[STAGES][K_RANKS];  // decayed from the chunk's start; tf32: columns as `in_tile` has them
  Tile<T, CHUNK, BK> k[STAGES][K_RANKS];        // decayed to the chunk's end
  Scores A[SHARED ? 1 : STAGES];
  __device__ __forceinline__ Scores& scores(int stage) { return A[SHARED ? 0 : stage]; }
  static __device__ __forceinline__ int flip(int stage) { return SHARED ? stage * 64 : 0; }
};
template <typename T, int BK, int K_RANKS, int STAGES, bool SHARED>
struct alignas(1024) Operands<false, T, BK, K_RANKS, STAGES, SHARED> {
  Tile<T, CHUNK, BK> k[STAGES][K_RANKS];
};

// A stage's decays, and which rows it holds.
template <int BK, int K_RANKS> struct alignas(16) Numbers {
  float decay[K_RANKS][BK];  // of the whole chunk, in the order of put_decays (forward_rows.cuh)
  i32 row[4];                // [0]: see ALL_ROWS; four numbers are the least that a copy to another block takes
};

// A chunk of inputs as they are in memory.
template <bool READS, typename T, typename G, int BK> struct alignas(128) InputStage {
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

// Operands of the scores, of types M (about sub-chunks' middles) and B (at borders). Rows are padded so that the 16
// bytes which ldmatrix reads of each of eight rows are in different banks.
template <bool READS, typename M, typename B, int BK> struct alignas(128) ScoreOperands {
  using Border = B;
  struct alignas(16) Row {
    M middle_q[BK], middle_k[BK];  // decayed from and to the middle of their sub-chunk
    // Queries decayed from a border, keys decayed to it. Rows from NEAR on: the borders between sub-chunks 0 and 1, and
    // 2 and 3. Rows from HALF on: the border between the chunk's halves.
    B border_q[BK], border_k[BK];
    float undo_q, undo_k;  // the inverses of the scales of border_q and border_k
    float padding[2];
  } rows[CHUNK];
  static constexpr int NEAR = 0, HALF = 16;
  i32 beyond;  // whether a row of this chunk, or of an earlier one, exceeds the range of B; never reset
};
template <typename M, typename B, int BK> struct ScoreOperands<false, M, B, BK> {};

// With K_RANKS blocks: whether the gates of each block's channels are too large for the chunk's operands (stages 0, 1).
template <int K_RANKS> struct alignas(16) Votes {
  i32 grows[K_RANKS][2][4];  // [rank][stage][0]; four numbers are the least that a copy to another block takes
  Barrier told[2];           // [stage]: both blocks' votes are in shared memory
};
template <> struct Votes<1> {};

// SegmentState's scan of gates, see forward_forgotten.cuh.
template <bool READS> struct alignas(8) Scan {
  Barrier loaded;  // a batch of gates is in shared memory
  float before;    // a factor of the part's decay: 0 if the segment's first tokens are forgotten and skipped, else 1
};
template <> struct Scan<true> {};

template <class Schedule, typename T, typename G, int BK, int BV> struct Shared {
  static constexpr bool READS = Schedule::reads;
  static constexpr int K_RANKS = Schedule::K_RANKS;
  static constexpr int VALUE_SLOTS = READS && !COARSE<T> ? 2 : sizeof(G) <= 2 ? 4 : 3;  // chunks of v in shared memory
  // Producer groups of a block: two; one if the other block makes half of the operands, or if shared memory is too
  // small for two: if BK = 128 and two of these need more of it: float32 gates, float16 data, CHUNK_RANKS > 1.
  static constexpr int EXTRA = (sizeof(G) == 4) + !COARSE<T> + (Schedule::CHUNK_RANKS > 1);
  static constexpr int GROUPS = READS && (K_RANKS > 1 || BK == 128 && EXTRA > 1) ? 1 : 2;
  static constexpr int MAKERS = GROUPS * Schedule::CHUNK_RANKS;  // groups of the cluster that make chunks in turn
  static constexpr int STAGES = MAKERS > 2 ? MAKERS : 2;         // one group only fills a stage

  // Whether two stages share a tile of scores: see Operands.
  static constexpr bool SHARED = !TWO_NUMBERS<Schedule, T> && Schedule::CLUSTER_SIZE == 1;

  Operands<READS, T, BK, K_RANKS, STAGES, SHARED> operands;
  T v[BV / PANEL][VALUE_SLOTS][CHUNK][PANEL];  // consumers overwrite v by o
  ScoreOperands<READS, typename MiddleOf<K_RANKS, T>::type, typename BorderOf<K_RANKS, T>::type, BK> scores[GROUPS];
  InputStage<READS, T, G, BK> inputs[GROUPS];
  float decays[GROUPS][NUM_SUBCHUNKS][BK];  // over each sub-chunk of the group's chunk
  float u[BK];                              // RWKV-6's bonus
  Numbers<BK, K_RANKS> numbers[STAGES];
  Votes<K_RANKS> votes;
  Scan<READS> scan;
  WorkTile work;  // in shared memory, since registers are scarce
  Barrier gates[GROUPS], rows[GROUPS], values[BV / PANEL][VALUE_SLOTS], full[STAGES], empty[STAGES];
};
