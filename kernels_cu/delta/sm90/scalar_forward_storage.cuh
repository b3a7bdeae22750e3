// what      Shared memory, arguments, and registers by role of scalar_forward.cu: the delta rule's forward pass on
//           Hopper, with one gate per token and head.
// math      The matrices A, M, N, B, W and Z of a chunk of 32 tokens, its decays D, E and L, and the roles of
//           warpgroups are defined in the head of scalar_forward.cu
// smem      Stage: a chunk of tokens and its matrices. In a union the member below overwrites the one above, which
//           has been read by then
// barriers  by stage, in this order. full: queries and keys have arrived; values_full: values have arrived; then
//           complete in shared memory: decays_ready: D and Gates; scores_ready: A and M; inverse_ready: N;
//           operands_ready: B, W and Z; outputs_ready: o, and all of the stage has been read
// limits    sm_90a; bfloat16 or float16
constexpr int CHUNK = 32;  // tokens
#include "warpgroup.cuh"
#include "fragments.cuh"
#include "half_products.cuh"

template <typename T> struct Args {
  TensorMap q, k, v, o;  // boxes of a chunk's tokens and 64 columns, swizzled
  Rows<const T> q_rows, k_rows, v_rows;
  Rows<T> o_rows;
  Rows<const void> g, beta;  // no gate: null
  Shape shape;               // H is the number of value heads
  const float* initial;      // null: zeros
  float* final;              // null: no final state is wanted
  i64 group;                 // value heads that share a head of queries and keys
  i64 state_k, state_v;      // the states' strides along K and V, in numbers
  i64 wide_gate, wide_beta;  // whether g, and beta, are float32; otherwise they are of type T
  i64 normalized;            // whether the kernel divides queries and keys x by sqrt(|x|^2 + 1e-6)
  double scale;
};

// 32 rows of 128 bytes, in the tensor cores' swizzle. A split matrix [32, 32], whose elements are sums of two numbers
// of T, has the rounded elements in columns 0 to 31, and their rounding errors in columns 32 to 63.
template <typename T> using Panel = T[CHUNK][64];

template <typename T, int BK, int BV> struct alignas(1024) Stage {
  using Element = T;
  T queries_keys[BK / 64][2 * CHUNK][64];  // rows 0 to 31: queries, later overwritten by W; rows 32 to 63: keys
  union {
    struct {
      // On its diagonal the two blocks [16, 16] of -diag(beta) M. M's block at the lower left is stored at the upper
      // right, where M is zero: -M, without beta, split.
      float minus_beta_M[CHUNK][32];
      Panel<T> A;  // [query, key], split
    };
    Panel<T> Z[BK / 64];
  };
  union {
    Panel<T> N_to_end;  // N_ij beta_j L_i, [j, i], split: for Z
    Panel<T> B;         // [query, key], split
  };
  union {
    float D[CHUNK][32];  // [i][j]: the decay from after token j through token i, times key j's factor; 0 if j > i
    Panel<T> N_beta;     // N_ij beta_j, [j, i], split: for B
  };
  Tile<T, BV> v;  // overwritten by o
};

// Factors of a chunk's tokens, one for each token. If args.normalized, they include the inverse lengths of queries and
// keys, since shared memory holds these undivided.
struct alignas(16) Gates {
  float query_factors[CHUNK], key_factors[CHUNK];  // scale / |q|, 1 / |k|; if not args.normalized, scale and 1
  float query_start_factors[CHUNK], key_start_factors[CHUNK];  // times the decay from the chunk's start to the token
  float key_end_factors[CHUNK];  // the decay from the token to the chunk's end, times the key's factor
  float beta[CHUNK];
  alignas(16) float chunk_decay;
};

// Decays and betas of CHUNKS_AHEAD chunks, loaded early to hide the latency of memory.
constexpr int CHUNKS_AHEAD = 4;
struct alignas(16) Upcoming {
  float decay[CHUNKS_AHEAD][CHUNK], beta[CHUNKS_AHEAD][CHUNK];
};

template <typename Element, int CHANNELS, int COLUMNS> struct Shared {
  using T = Element;
  static constexpr int BK = CHANNELS, BV = COLUMNS, STAGES = BK + BV == 128 ? 3 : 5;
  Stage<T, BK, BV> stages[STAGES];
  Panel<T> minus_BE[2];  // -B_ij E_j, [query, key], split: for W; of a chunk and the one before it, [chunk % 2]
  Gates gates[STAGES];
  Upcoming upcoming;
  Barrier full[STAGES], values_full[STAGES], decays_ready[STAGES], scores_ready[STAGES], inverse_ready[STAGES],
      operands_ready[STAGES], outputs_ready[STAGES];
};

constexpr int OPERAND_THREADS = 128, OTHER_THREADS = 128;  // others: copies, decays, inverses
template <int BV> constexpr int CONSUMERS = 2 * BV;
template <int BV> constexpr int ALL_THREADS = CONSUMERS<BV> + OPERAND_THREADS + OTHER_THREADS;

// Registers of a thread by role. BLOCKS: blocks on a multiprocessor. A block whose roles ask for more registers than it
// starts with (AT_FIRST) would wait for ever.
template <int BK, int BV> struct Registers {
  static constexpr int BLOCKS = BK + BV == 128 ? 2 : 1, AT_FIRST = 65536 / (BLOCKS * ALL_THREADS<BV>) / 8 * 8;
  static constexpr int CONSUMER = BLOCKS == 2 ? 120 : BV == 64 ? 208 : 168;
  static constexpr int OPERANDS = BLOCKS == 2 ? 72
                                  : BV == 64  ? 168
                                              : 120,
                       OTHER = BLOCKS == 2 ? 48
                               : BV == 64  ? 128
                                           : 56;
  static_assert(BV / 64 * CONSUMER + OPERANDS + OTHER <= ALL_THREADS<BV> / 128 * AT_FIRST);
};
