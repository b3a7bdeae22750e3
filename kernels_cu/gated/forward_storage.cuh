// what      Shared memory of the forward kernel of every card, and what tells its schedules apart.
// limits    BK and BV of 64, 128, BV also of 256
#include "gated/forward_tiles.cuh"
#include "tensor.cuh"

// Everything of a sequence.
struct SinglePass {
  static constexpr bool reads = true;         // whether there are queries and outputs
  static constexpr bool all_channels = true;  // or what other launches make of other channels is added
};
// The same of some of the channels. Scores may cancel between the launches, so in sub-chunks they are tf32 at least.
struct SplitChannels : SinglePass {
  static constexpr bool all_channels = false;
};
// Only the state that tokens leave behind, and their decay: with gates of columns, else segment_states.cu makes it.
struct SegmentState : SinglePass {
  static constexpr bool reads = false;
};

constexpr int STAGES = 2;        // chunks in shared memory: the one at hand, the next one on its way
constexpr int BC = 8, SPAN = 4;  // tokens of a sub-chunk, and of what a warp decays at a time: half of one
template <typename T>
constexpr int CHUNK =  // tokens of a chunk: twice as many where operands are half as large
    64 / sizeof(typename OperandOf<T>::Type);

// Blocks that share a multiprocessor, as far as registers go.
template <class Schedule, int BK, int BV> constexpr int RESIDENT = Schedule::reads && BK > BV ? 2 : 256 / BV;

// What scores in sub-chunks are made of, and the number of products.
template <class Schedule, typename T> struct MiddleOf : OperandOf<T> {
  using Product = T;
  template <int TF32> static constexpr int PRODUCTS = TF32;
};
template <> struct MiddleOf<SplitChannels, bf16> : OperandOf<float> {
  using Product = float;
  template <int TF32> static constexpr int PRODUCTS = 1;
};

// Queries, and operands of scores. `border` has BORDER rows of queries, those of sub-chunks 1 and 3 from their start
// and of 2 and 3 from the chunk's middle; then of keys, those of sub-chunks 0 and 2 to their end and of 0 and 1 to the
// chunk's middle. A chunk of 16 has sub-chunks 1 and 0 alone: 8 more queries that its product takes are not looked at.
template <class Schedule, typename T, int BK, bool READS = Schedule::reads> struct alignas(16) ScoreStorage {
  using X = typename OperandOf<T>::Type;
  using Middle = typename MiddleOf<Schedule, T>::Type;
  static constexpr int BORDER = CHUNK<T> == 32 ? 32 : BC, LDA = CHUNK<T> + 8;
  static constexpr int NUMBERS = sizeof(X) == 2 ? 2 : 1;  // that a score is the sum of
  T q[STAGES][CHUNK<T> * BK];
  Middle middle_q[CHUNK<T> * BK], middle_k[CHUNK<T> * BK];  // decayed to the middle of their sub-chunk
  X border[2 * BORDER * BK];
  X A[NUMBERS * CHUNK<T> * LDA];  // scores, 0 above the diagonal
  float direct[2][2][CHUNK<T>];   // of a query with its own key, with the key before it; a part of the channels each
  float u[BK];                    // RWKV-6's bonus
};
template <class Schedule, typename T, int BK> struct ScoreStorage<Schedule, T, BK, false> {};

// What meets the state, decayed to the chunk's ends: it takes the place of queries and keys where it is of their type.
template <bool SAME, typename T, int BK> struct StateStorage {};
template <typename T, int BK> struct alignas(16) StateStorage<false, T, BK> {
  using X = typename OperandOf<T>::Type;
  X state_q[CHUNK<T> * BK], state_k[CHUNK<T> * BK];
};

template <typename T> constexpr bool IN_PLACE = sizeof(typename OperandOf<T>::Type) == sizeof(T);

template <class Schedule, typename T, typename G, int BK, int BV>
struct alignas(16) Shared : ScoreStorage<Schedule, T, BK>, StateStorage<IN_PLACE<T>, T, BK> {
  using Gate = G;
  T k[STAGES][CHUNK<T> * BK];
  T v[STAGES][CHUNK<T> * BV];
  G gates[CHUNK<T> * BK];            // of the present chunk until its operands are made, then of the next one
  float spans[CHUNK<T> / SPAN][BK];  // the decay of every SPAN tokens
  float decay[BK];                   // of the whole chunk
};

// Where the operands of the state stand.
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
