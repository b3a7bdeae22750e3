// what      What Hopper's forward pass of the delta rule keeps in shared memory, its argument, and registers of roles.
// smem      Stage: a chunk of tokens and what is made of them, in whose places other things come
// barriers  of a stage, in this order: full: queries and keys are there; values_full: values; decays_ready;
//           scores_ready: A and M; inverse_ready: N; operands_ready: B, W and Z; outputs_ready: o
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
  Shape shape;               // its heads are those of values
  const float* initial;      // or null
  float* final;              // or null
  i64 group;                 // heads of values that share queries and keys
  i64 state_k, state_v;      // strides of the states
  i64 wide_gate, wide_beta;  // whether they are float32, not T
  i64 normalized;            // whether queries and keys are to be divided by sqrt(|x|^2 + 1e-6)
  double scale;
};

// 32 rows of 128 bytes, in the tensor cores' swizzle. A matrix [32, 32] has numbers of T in the first half of a row,
// and in the other what their rounding left over.
template <typename T> using Panel = T[CHUNK][64];

template <typename T, int BK, int BV> struct alignas(1024) Stage {
  using Element = T;
  T queries_keys[BK / 64][2 * CHUNK][64];  // queries, then W; behind them keys
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

// Factors of a chunk's tokens. NORMALIZED queries and keys come as they are, and are divided by their lengths here.
struct alignas(16) Gates {
  float query_factors[CHUNK], key_factors[CHUNK];  // scale / |q|, 1 / |k|; where they come divided, scale and 1
  float query_start_factors[CHUNK],
      key_start_factors[CHUNK];               // of a query and of a key, decayed from the chunk's start
  float key_end_factors[CHUNK], beta[CHUNK];  // of a key decayed to the chunk's end
  alignas(16) float chunk_decay;
};

// Factors of the next chunks' tokens.
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

// Registers of a thread by role, of those that the block starts with: a block that asks for more waits for ever.
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
