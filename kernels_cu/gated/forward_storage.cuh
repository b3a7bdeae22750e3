// what      Shared memory and schedules of the forward kernel of every card, for GLA and RWKV-6. A tile of it is laid
//           out as forward_tiles.cuh says.
// math      A chunk has 32 tokens in two halves, or 16 if operands are floats; a half has two sub-chunks of 8 tokens.
//           The decays of a token are e^g, with g its log gates. An operand is a query or key times decays. A query
//           "decayed from" a border between tokens is multiplied by the decays of the tokens after the border, up to
//           and with its own token (RWKV-6: without it); a key "decayed to" a border by the decays of the tokens after
//           its own, up to the border. A query before the border is divided by the decays of the tokens after its own
//           (RWKV-6: from its own on), up to the border, and a key after the border by those from the border up to and
//           with its own: only the border in the middle of a sub-chunk has such tokens
// limits    BK and BV of 64, 128
#include "gated/forward_tiles.cuh"
#include "growth.cuh"
#include "tensor.cuh"

// One launch computes whole sequences.
struct SinglePass {
  static constexpr bool has_outputs = true;   // whether there are queries and outputs
  static constexpr bool all_channels = true;  // whether one launch has all channels
};
// A launch for every BK channels, whose outputs add up. Scores of different launches may cancel: so those in sub-chunks
// are computed in tf32, also of bfloat16 data.
struct SplitChannels : SinglePass {
  static constexpr bool all_channels = false;
};
// Only where V's columns have gates, too (value_gate/forward.cu): computes a segment's final state from zero and its
// decay, without outputs. Without gates of columns segment_states.cu computes these.
struct SegmentState : SinglePass {
  static constexpr bool has_outputs = false;
};

constexpr int STAGES = 2;  // chunks of inputs in shared memory: the current one, and the next one, being copied
constexpr int SPAN = SUB_CHUNK / 2;  // tokens: operands about a sub-chunk's middle are made by spans
template <typename T> constexpr int CHUNK = 64 / sizeof(typename OperandOf<T>::Type);  // tokens: 32, or 16 of floats

// The number of blocks whose registers a multiprocessor holds at once. A block has 2 BV threads: 256 / BV blocks have
// 512.
template <class Schedule, int BK, int BV> constexpr int RESIDENT = Schedule::has_outputs && BK > BV ? 2 : 256 / BV;

// Operands that are decayed from or to a sub-chunk's middle. Type: their type in shared memory; OperandOf<T>::Type
// (forward_tiles.cuh) is bfloat16 for bfloat16 data, else float. Their products are Math<Product, PRODUCTS<N>>
// (fragments.cuh) in a kernel whose other products are Math<T, N>, N tf32 products for each product of float32.
template <class Schedule, typename T> struct MiddleOf : OperandOf<T> {
  using Product = T;
  template <int N> static constexpr int PRODUCTS = N;
};
template <> struct MiddleOf<SplitChannels, bf16> : OperandOf<float> {
  using Product = float;
  template <int N> static constexpr int PRODUCTS = 1;
};

// Queries, and operands of scores. `border` has BORDER rows of queries, then BORDER rows of keys, 8 rows of a sub-chunk
// at a time:
//   chunk of 32 tokens   rows 0     queries of sub-chunk 1, from its start    32   keys of sub-chunk 0, to its end
//                        8          of 3, from its start                      40   of 2, to its end
//                        16         of 2, from the chunk's middle             48   of 0, to the chunk's middle
//                        24         of 3, from the chunk's middle             56   of 1, to the chunk's middle
//   chunk of 16 tokens   rows 0     queries of sub-chunk 1, from its start     8   keys of sub-chunk 0, to its end
// A product takes 16 rows of queries: in a chunk of 16 tokens the last 8 are the keys, and their scores are not used.
template <class Schedule, typename T, int BK, bool HAS_OUTPUTS = Schedule::has_outputs>
struct alignas(16) ScoreStorage {
  using X = typename OperandOf<T>::Type;
  using Middle = typename MiddleOf<Schedule, T>::Type;
  static constexpr int BORDER = CHUNK<T> == 32 ? 32 : SUB_CHUNK, LDA = CHUNK<T> + 8;  // LDA: the distance of A's rows
  // A score is the sum of NUMBERS numbers: of itself, rounded, and its rounding error, stored DISTANCE numbers later.
  static constexpr int NUMBERS = sizeof(X) == 2 ? 2 : 1, DISTANCE = CHUNK<T> * LDA;
  T q[STAGES][CHUNK<T> * BK];
  Middle middle_q[CHUNK<T> * BK], middle_k[CHUNK<T> * BK];  // decayed from and to the middle of their sub-chunk
  X border[2 * BORDER * BK];
  X A[NUMBERS * DISTANCE];  // scores [query, key], 0 above the diagonal; then their rounding errors
  // Scores that no gate multiplies, [key][part of the channels][query]: key 0 is the query's own; key 1, in RWKV-6, the
  // one before it. A score is the sum of both parts.
  float direct[2][2][CHUNK<T>];
  float u[BK];  // RWKV-6's bonus
};
template <class Schedule, typename T, int BK> struct ScoreStorage<Schedule, T, BK, false> {};

// Queries decayed from the chunk's start and keys decayed to its end. If their type is as large as T, which it is only
// where it is T, they replace q and k instead: IN_PLACE.
template <bool IN_PLACE, typename T, int BK> struct StateStorage {};
template <typename T, int BK> struct alignas(16) StateStorage<false, T, BK> {
  using X = typename OperandOf<T>::Type;
  X state_q[CHUNK<T> * BK], state_k[CHUNK<T> * BK];
};

template <typename T> constexpr bool IN_PLACE = sizeof(typename OperandOf<T>::Type) == sizeof(T);

// [rows, columns] of tiles: [CHUNK tokens, BK channels], of v [CHUNK tokens, BV columns].
template <class Schedule, typename T, typename G, int BK, int BV>
struct alignas(16) Shared : ScoreStorage<Schedule, T, BK>, StateStorage<IN_PLACE<T>, T, BK> {
  using Gate = G;
  T k[STAGES][CHUNK<T> * BK];
  T v[STAGES][CHUNK<T> * BV];
  G gates[CHUNK<T> * BK];                  // of the current chunk until its operands are made, then of the next one
  float span_decays[CHUNK<T> / SPAN][BK];  // the decay of every SPAN tokens
  float decay[BK];                         // of the whole chunk
};

// The chunk's queries, or keys, that are multiplied with the state: decayed from its start, or to its end. stage: the
// chunk's number modulo STAGES.
template <class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ auto* state_q(Shared<Schedule, T, G, BK, BV>& s, int stage) {
  if constexpr (IN_PLACE<T>) return s.q[stage];
  else return s.state_q;
}
template <class Schedule, typename T, typename G, int BK, int BV>
__device__ __forceinline__ auto* state_k(Shared<Schedule, T, G, BK, BV>& s, int stage) {
  if constexpr (IN_PLACE<T>) return s.k[stage];
  else return s.state_k;
}
