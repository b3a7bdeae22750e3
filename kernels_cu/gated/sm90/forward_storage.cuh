// what      The arguments of Hopper's forward kernel, its shared memory, and the layout of its tiles.
// smem      Shared: of every producer group a chunk of inputs and the operands of its scores; stages of operands for
//           the consumers; slots in which v is replaced by o
// barriers  gates[group]: the gates of the group's next chunk are in shared memory; rows[group]: its q and k are;
//           values[warpgroup][slot]: a chunk of v is; full[stage]: a chunk's operands are complete; empty[stage]: all
//           consumers have read them; Named: below
// limits    sm_90a; half data
#include "ptx.cuh"
#include "gated/sm90/forward_schedules.cuh"
#include "swizzled.cuh"
#include "tensor.cuh"

enum Named { VALUES = 1, PRODUCERS = 3 };  // the first named barrier of the warpgroups, and of the producer groups

// The type of a gate that all channels of a token share: float32, read without a tile of its own.
struct ScalarDecay {};
template <typename G> constexpr int WIDTH = 4;  // gates that a producer has of a token, with 4 channels of it
template <> constexpr int WIDTH<ScalarDecay> = 1;

// bfloat16 has float32's range and few digits: so every operand is bfloat16, and a score is the sum of two numbers.
// float16 has tf32's digits and a small range: so operands that may be far from 1 are tf32.
template <typename T> constexpr bool COARSE = false;
template <> constexpr bool COARSE<bf16> = true;
template <typename T> struct WideOf {
  using type = float;
};
template <> struct WideOf<bf16> {
  using type = bf16;
};
template <typename T> using Wide = typename WideOf<T>::type;

// The type of operands about a sub-chunk's middle: tf32 if two blocks' scores add up, which may cancel.
template <int K_RANKS, typename T> struct MiddleOf {
  using type = float;
};
template <typename T> struct MiddleOf<1, T> {
  using type = Wide<T>;
};

// The type of operands at borders, which no decay makes larger: float16; rows beyond its range are scaled
// (forward_scales.cuh). If two blocks have half of a row's channels each: T.
template <int K_RANKS, typename T> struct BorderOf {
  using type = T;
};
template <typename T> struct BorderOf<1, T> {
  using type = f16;
};
// Whether operands at borders have a type of less range than T.
template <class Schedule, typename T>
constexpr bool NARROWS = Schedule::reads && COARSE<T> && !COARSE<typename BorderOf<Schedule::K_RANKS, T>::type>;

// Whether a score in A is the sum of two numbers, the second of which is the rounding error of the first: bfloat16 has
// few digits, and two blocks' scores may cancel, which would leave their rounding errors.
template <class Schedule, typename T> constexpr bool TWO_NUMBERS = COARSE<T> || Schedule::K_RANKS > 1;

template <typename T, typename G> struct Args {
  TensorMap q, k, g, v;  // boxes of a chunk's tokens and BK channels, of v and o PANEL columns, swizzled
  Rows<const T> q_rows, k_rows;
  Rows<const G> g_rows;
  Rows<const T> v_rows;
  TensorMap o_boxes;
  Rows<T> o;
  Rows<const float> scalar_gate;  // the gate if it is ScalarDecay
  const float *u, *initial;       // [H, K]; [N, H, K, V] of segments or, with `segment_states`, of sequences; or null
  float* final;                   // [N, H, K, V] of whole sequences, of SegmentState's parts; or null
  Shape shape;
  double scale;
  float* decays;           // SegmentState: [N, H, 2, K], whose product is the decay over a part's chunks
  i64 channel;             // the first of this launch
  i64 segments, computed;  // segments of a sequence; SegmentState: how many of them, from the first on, are computed
  float* marks;            // [N, marks_per_sequence, H, K, V]: the states before every `mark_every` chunks; or null
  i64 mark_every, marks_per_sequence;  // mark_every: a power of two, or 0 without marks
  i64 parts;                           // SegmentState: parts of a segment, each of which leaves a state
  const float* segment_states;         // [N, H, K, V]: the final states of segments, from which the next ones start;
                                       // null: segments start from `initial`
  i64 backwards;  // whether tokens lie backwards in memory, which no tensor map describes: then threads copy rows
};

// Blocks that share channels have no registers for that: the host copies their arrays.
template <class Schedule, class Args> __device__ __forceinline__ bool runs_backwards(const Args& args) {
  return Schedule::K_RANKS == 1 && args.backwards;
}

// ROWS tokens of BK channels: panels with rows of 128 bytes, in the tensor cores' 128-byte swizzle.
template <typename X, int ROWS, int BK> using Tile = X[BK * sizeof(X) / 128][ROWS][128 / sizeof(X)];

// Numbers::row of a stage: all rows of the chunk count; AGAIN is added to a row if the chunk's stage is filled again.
constexpr int ALL_ROWS = -1, AGAIN = CHUNK;

// The operands of a chunk for the consumers, in each of STAGES: BK channels of each of K_RANKS blocks. Scores
// [query, key] are in the first 32 columns of a tile, their rounding errors (TWO_NUMBERS) in the other 32. Without
// rounding errors two stages share a tile, and the second has the other columns: `flip` is XORed with byte offsets.
template <bool READS, typename T, int BK, int K_RANKS, int STAGES, bool SHARED> struct alignas(1024) Operands {
  using Scores = T[K_RANKS][CHUNK][PANEL];
  Tile<Wide<T>, CHUNK, BK> q[STAGES][K_RANKS];  // decayed from the chunk's start; tf32 in the order of `in_tile`
  Tile<T, CHUNK, BK> k[STAGES][K_RANKS];        // decayed to the chunk's end
  Scores A[SHARED ? 1 : STAGES];
  __device__ __forceinline__ Scores& scores(int stage) { return A[SHARED ? 0 : stage]; }
  static __device__ __forceinline__ int flip(int stage) { return SHARED ? stage * 64 : 0; }
};
template <typename T, int BK, int K_RANKS, int STAGES, bool SHARED>
struct alignas(1024) Operands<false, T, BK, K_RANKS, STAGES, SHARED> {
  Tile<T, CHUNK, BK> k[STAGES][K_RANKS];
};

// What else a stage has for the consumers.
template <int BK, int K_RANKS> struct alignas(16) Numbers {
  float decay[K_RANKS][BK];  // the whole chunk's
  i32 row[4];                // [0]: ALL_ROWS, or the one row that is not zero: see forward_growth.cuh
};

// A chunk as it comes from memory.
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

// Operands of scores. Rows are padded so that 16 bytes of each of eight rows are in different banks.
template <bool READS, typename M, typename B, int BK> struct alignas(128) ScoreOperands {
  using Border = B;
  struct alignas(16) Row {
    M middle_q[BK], middle_k[BK];  // decayed from and to the middle of their sub-chunk
    // Decayed from and to a border. Rows from NEAR on: the borders between sub-chunks 0 and 1, and 2 and 3. Rows from
    // HALF on: the border between the chunk's halves.
    B border_q[BK], border_k[BK];
    float undo_q, undo_k;  // the inverses of the scales of border_q and border_k
    float padding[2];
  } rows[CHUNK];
  static constexpr int NEAR = 0, HALF = 16;
  i32 beyond;  // whether rows of this chunk, or of an earlier one, are beyond the range of B
};
template <typename M, typename B, int BK> struct ScoreOperands<false, M, B, BK> {};

// K_RANKS blocks: whether the gates of each block's channels exceed the limit, for the chunk of each stage.
template <int K_RANKS> struct alignas(16) Votes {
  i32 grows[K_RANKS][2][4];  // [rank][stage][0]; four numbers are the least that a copy to another block takes
  Barrier told[2];           // both blocks' votes are there
};
template <> struct Votes<1> {};

// SegmentState: see forward_forgotten.cuh.
template <bool READS> struct alignas(8) Scan {
  Barrier loaded;
  float before;  // the factor of the part's decays: 0 if tokens before the part are forgotten, else 1
};
template <> struct Scan<true> {};

template <class Schedule, typename T, typename G, int BK, int BV> struct Shared {
  static constexpr bool READS = Schedule::reads;
  static constexpr int K_RANKS = Schedule::K_RANKS;
  static constexpr int VALUE_SLOTS = READS && !COARSE<T> ? 2 : sizeof(G) <= 2 ? 4 : 3;  // chunks of v in shared memory
  // Producer groups of a block: two, or one if the other block makes half of the operands, or if shared memory is too
  // small for two. With two groups it has room for at most one of these: float32 gates, float16 data, CHUNK_RANKS.
  static constexpr int EXTRA = (sizeof(G) == 4) + !COARSE<T> + (Schedule::CHUNK_RANKS > 1);
  static constexpr int GROUPS = READS && (K_RANKS > 1 || BK == 128 && EXTRA > 1) ? 1 : 2;
  static constexpr int MAKERS = GROUPS * Schedule::CHUNK_RANKS;  // groups of all blocks, which take chunks in turn
  static constexpr int STAGES = MAKERS > 2 ? MAKERS : 2;         // each is filled by one maker only

  // Whether two stages share a tile of scores: see Operands.
  static constexpr bool SHARED = !TWO_NUMBERS<Schedule, T> && Schedule::CLUSTER_SIZE == 1;

  Operands<READS, T, BK, K_RANKS, STAGES, SHARED> operands;
  T v[BV / PANEL][VALUE_SLOTS][CHUNK][PANEL];  // o takes the place of v
  ScoreOperands<READS, typename MiddleOf<K_RANKS, T>::type, typename BorderOf<K_RANKS, T>::type, BK> scores[GROUPS];
  InputStage<READS, T, G, BK> inputs[GROUPS];
  float decays[GROUPS][NUM_SUBCHUNKS][BK];  // of every sub-chunk
  float u[BK];                              // RWKV-6's bonus
  Numbers<BK, K_RANKS> numbers[STAGES];
  Votes<K_RANKS> votes;
  Scan<READS> scan;
  WorkTile work;  // in shared memory, since registers are scarce
  Barrier gates[GROUPS], rows[GROUPS], values[BV / PANEL][VALUE_SLOTS], full[STAGES], empty[STAGES];
};
