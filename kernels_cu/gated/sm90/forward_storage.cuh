// what      What the forward kernel of Hopper keeps in shared memory, how its tiles are laid out, and its arguments.
// smem      Shared: inputs of every producer group, the operands of its scores; stages of operands; v, then o
// barriers  gates[group]: g of its next chunk is there; rows[group]: so are q and k; values[warpgroup][slot]: so is v;
//           full[stage]: a chunk's operands stand; empty[stage]: all consumers have read them; Named: below
// limits    sm_90a; half data
#include "ptx.cuh"
#include "gated/sm90/forward_schedules.cuh"
#include "swizzled.cuh"
#include "tensor.cuh"

enum Named { VALUES = 1, PRODUCERS = 3 };  // named barriers: one of a warpgroup, one of a producer group

// The type of a gate that all channels of a token share: float32, read without a tile of its own.
struct ScalarDecay {};
template <typename G> constexpr int WIDTH = 4;  // gates of a token that a producer with 4 channels of it has
template <> constexpr int WIDTH<ScalarDecay> = 1;

// bfloat16 has float's range and few digits: it holds every operand, and scores take two numbers. float16 has the
// digits of tf32 and no range: what may be far from 1 is tf32 there.
template <typename T> constexpr bool COARSE = false;
template <> constexpr bool COARSE<bf16> = true;
template <typename T> struct WideOf {
  using type = float;
};
template <> struct WideOf<bf16> {
  using type = bf16;
};
template <typename T> using Wide = typename WideOf<T>::type;

// Operands about a sub-chunk's middle. Where scores of two blocks' channels add up and may cancel, in tf32 in any case.
template <int K_RANKS, typename T> struct MiddleOf {
  using type = float;
};
template <typename T> struct MiddleOf<1, T> {
  using type = Wide<T>;
};

// Operands at borders, which no decay makes larger: float16, for which rows that it does not hold are scaled
// (forward_scales.cuh). Where two blocks have half of a row's channels each, T.
template <int K_RANKS, typename T> struct BorderOf {
  using type = T;
};
template <typename T> struct BorderOf<1, T> {
  using type = f16;
};
// Whether operands at borders have a type of less range than T.
template <class Schedule, typename T>
constexpr bool NARROWS = Schedule::reads && COARSE<T> && !COARSE<typename BorderOf<Schedule::K_RANKS, T>::type>;

// Whether A takes a second number, for what rounding leaves over: bfloat16 has few digits, and scores that cancel
// between two blocks' channels must not leave the rounding of both.
template <class Schedule, typename T> constexpr bool TWO_NUMBERS = COARSE<T> || Schedule::K_RANKS > 1;

template <typename T, typename G> struct Args {
  TensorMap q, k, g;     // boxes of a chunk's tokens and BK channels
  TensorMap v, o_boxes;  // boxes of a chunk's tokens and PANEL columns, swizzled
  Rows<T> o;
  Rows<const float> one;     // the gate where it is ScalarDecay
  const float *u, *initial;  // [H, K] and [N, H, K, V], of segments or, beside `left`, of whole sequences; null: none
  float* final;              // [N, H, K, V] of whole sequences, of SegmentState's parts; or null
  Shape shape;
  double scale;
  float* decays;   // SegmentState: [N, H, 2, K], whose product is the decay over a part's chunks
  i64 channel;     // the first of this launch
  i64 of, needed;  // segments a sequence; SegmentState: nobody needs the state of others than the first so many
  float* marks;    // [N, per, H, K, V]: the states before every so many chunks, a power of two; null: none, every is 0
  i64 every, per;
  i64 parts;          // SegmentState: of a segment, with a state each
  const float* left;  // [N, H, K, V]: what segments leave, from which the next ones go on; null: these have `initial`
};

// ROWS tokens of BK channels: panels of 128 bytes a row, in the tensor cores' 128-byte swizzle.
template <typename X, int ROWS, int BK> using Tile = X[BK * sizeof(X) / 128][ROWS][128 / sizeof(X)];

constexpr int ALL = -1, MORE = CHUNK;  // rows of a stage; the chunk comes again

// What producers hand to the consumers of a chunk, in one of STAGES: of K_RANKS blocks BK channels each. Scores
// [query, key] are the first 32 columns of a tile, the others what rounding left over. Where there is no such
// rest, two stages share a tile, and pieces of the second lie 64 bytes on: `flip` XOR what they would be.
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

// The rest of what they hand over in a stage.
template <int BK, int K_RANKS> struct alignas(16) Numbers {
  float decay[K_RANKS][BK];  // the whole chunk's
  i32 row[4];                // [0]: ALL, or which row alone stands: see forward_growth.cuh
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

// Operands of scores, in rows that are padded so that 16 bytes of eight of them lie in all banks.
template <bool READS, typename M, typename B, int BK> struct alignas(128) ScoreOperands {
  using Border = B;
  struct alignas(16) Row {
    M middle_q[BK], middle_k[BK];  // within sub-chunks, about their middles
    B border_q[BK], border_k[BK];  // decayed from and to a border: rows from NEAR on sub-chunks 1 and 3 with 0 and 2,
    float undo_q, undo_k;          // rows from HALF on the second half with the first; their scales' inverses
    float padding[2];
  } rows[CHUNK];
  static constexpr int NEAR = 0, HALF = 16;
  i32 beyond;  // whether rows are, or were, beyond the range of borders
};
template <typename M, typename B, int BK> struct ScoreOperands<false, M, B, BK> {};

// K_RANKS blocks: whether gates of either's channels grow too much, of the chunk of a stage.
template <int K_RANKS> struct alignas(16) Votes {
  i32 grows[K_RANKS][2][4];
  Barrier told[2];  // both blocks' are there
};
template <> struct Votes<1> {};

// SegmentState: what its beginning is about.
template <bool READS> struct alignas(8) Scan {
  Barrier loaded;
  float before;  // what the part's decays multiply: 0 where tokens before it are forgotten
};
template <> struct Scan<true> {};

template <class Schedule, typename T, typename G, int BK, int BV> struct Shared {
  static constexpr bool READS = Schedule::reads;
  static constexpr int K_RANKS = Schedule::K_RANKS;
  static constexpr int AHEAD = READS && !COARSE<T> ? 2 : sizeof(G) <= 2 ? 4 : 3;  // chunks of v under way or at hand
  // Groups of producers a block: one where the other block's help, or where shared memory has no room for two. Of what
  // takes more room than gates and data in bfloat16 by one block, it holds one thing beside two groups.
  static constexpr int MORE = (sizeof(G) == 4) + !COARSE<T> + (Schedule::CHUNK_RANKS > 1);
  static constexpr int GROUPS = READS && (K_RANKS > 1 || BK == 128 && MORE > 1) ? 1 : 2;
  static constexpr int MAKERS = GROUPS * Schedule::CHUNK_RANKS;  // groups that take chunks in turn
  static constexpr int STAGES = MAKERS > 2 ? MAKERS : 2;         // a maker's stages are its own

  // A score of one number leaves half of a tile's columns to another stage.
  static constexpr bool SHARED = !TWO_NUMBERS<Schedule, T> && Schedule::CLUSTER_SIZE == 1;

  Operands<READS, T, BK, K_RANKS, STAGES, SHARED> operands;
  T v[BV / PANEL][AHEAD][CHUNK][PANEL];  // then o
  ScoreOperands<READS, typename MiddleOf<K_RANKS, T>::type, typename BorderOf<K_RANKS, T>::type, BK> scores[GROUPS];
  InputStage<READS, T, G, BK> inputs[GROUPS];
  float decays[GROUPS][NUM_SUBCHUNKS][BK];  // of every sub-chunk
  float u[BK];                              // the bonus
  Numbers<BK, K_RANKS> numbers[STAGES];
  Votes<K_RANKS> votes;
  Scan<READS> scan;
  WorkTile work;  // here, since registers are scarce
  Barrier gates[GROUPS], rows[GROUPS], values[BV / PANEL][AHEAD], full[STAGES], empty[STAGES];
};
