// what      What Hopper's forward pass of the delta rule keeps in shared memory, its argument, and registers of roles.
// math      The matrices A, M, N, B, W and Z of a chunk of 32 tokens are defined in the head of scalar_forward.cu
// smem      Stage: a chunk of tokens and its matrices; unions name what overwrites what
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
  i64 state_k, state_v;      // the states' strides along K and V
  i64 wide_gate, wide_beta;  // whether g, and beta, are float32; otherwise they are of type T
  i64 normalized;            // whether the kernel divides queries and keys x by sqrt(|x|^2 + 1e-6)
  double scale;
};

// 32 rows of 128 bytes, in the tensor cores' swizzle. A matrix [32, 32] whose elements are sums of two numbers of T has
// the rounded elements in columns 0 to 31, and the remainders of the rounding in columns 32 to 63.
template <typename T> using Panel = T[CHUNK][64];

template <typename T, int BK, int BV> struct alignas(1024) Stage {
  using Element = T;
  T queries_keys[BK / 64][2 * CHUNK][64];  // rows 0 to 31: queries, later overwritten by W; rows 32 to 63: keys
  union {
    struct {
      float minus_beta_M
          [CHUNK][32];  // -beta M: blocks of 16 on the diagonal; where it has zeros, as A: block [16.., ..15] of -M
      Panel<T> A;       // by queries
    };
    Panel<T> Z[BK / 64];
  };
  union {
    Panel<T> N_to_end;  // N_ij beta_j L_i, by keys j
    Panel<T> B;         // by queries
  };
  union {
    float D[CHUNK][32];  // [i][j] from behind token j to token i, of key j; 0 where j > i
    Panel<T> N_beta;     // N beta by keys
  };
  Tile<T, BV> v;  // then o
};

// Factors of a chunk's tokens, one for each token. If args.normalized, they include the inverse lengths of queries and
// keys, which are stored undivided.
struct alignas(16) Gates {
  float query_factors[CHUNK], key_factors[CHUNK];  // scale / |q|, 1 / |k|; where they come divided, scale and 1
  float query_start_factors[CHUNK],
      key_start_factors[CHUNK];               // of a query and of a key, decayed from the chunk's start
  float key_end_factors[CHUNK], beta[CHUNK];  // of a key decayed to the chunk's end
  alignas(16) float chunk_decay;
};

// Decays and betas of the next CHUNKS_AHEAD chunks, loaded early to hide the latency of memory.
constexpr int CHUNKS_AHEAD = 4;
struct alignas(16) Next {
  float decay[CHUNKS_AHEAD][CHUNK], beta[CHUNKS_AHEAD][CHUNK];
};

template <typename Element, int CHANNELS, int COLUMNS> struct Shared {
  using T = Element;
  static constexpr int BK = CHANNELS, BV = COLUMNS, STAGES = BK + BV == 128 ? 3 : 5;
  Stage<T, BK, BV> stages[STAGES];
  Panel<T> minus_BE[2];  // -B decayed from the chunk's start, by queries; of every other chunk
  Gates gates[STAGES];
  Next upcoming;
  Barrier full[STAGES], values_full[STAGES], decays_ready[STAGES], scores_ready[STAGES], inverse_ready[STAGES],
      operands_ready[STAGES], outputs_ready[STAGES];
};

constexpr int OPERAND_THREADS = 128, OTHERS = 128;  // threads
template <int BV> constexpr int CONSUMERS = 2 * BV;
template <int BV> constexpr int ALL_THREADS = CONSUMERS<BV> + OPERAND_THREADS + OTHERS;

// Registers of a thread by role. A block whose roles ask for more than the block starts with (AT_FIRST) would wait for
// ever.
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
