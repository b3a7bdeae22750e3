// what      What Hopper's forward pass of the delta rule keeps in shared memory, its argument, and registers of roles.
// smem      Stage: a chunk of tokens and what is made of them, in whose places other things come
// barriers  of a stage, in this order: full: queries and keys are there; valued: values; gated: decays; scored: A and
//           M; solved: N; made: B, W and Z; done: o
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
  using Number = T;
  T rows[BK / 64][2 * CHUNK][64];  // queries, then W; behind them keys
  union {
    struct {
      float M[CHUNK][32];  // -beta M: blocks of 16 on the diagonal; where it has zeros, as A: block [16.., ..15] of -M
      Panel<T> A;          // by queries
    };
    Panel<T> Z[BK / 64];
  };
  Panel<T> B;  // by queries; before, N beta by keys, each query's row decayed to the chunk's end
  union {
    float decay[CHUNK][32];  // [i][j] from behind token j to token i, of key j; 0 where j > i
    Panel<T> N;              // N beta by keys
  };
  Tile<T, BV> v;  // then o
};

// Factors of a chunk's tokens. NORMALIZED queries and keys come as they are, and are divided by their lengths here.
struct alignas(16) Gates {
  float query[CHUNK], key[CHUNK];   // scale / |q|, 1 / |k|; where they come divided, scale and 1
  float read[CHUNK], start[CHUNK];  // of a query and of a key, decayed from the chunk's start
  float end[CHUNK], beta[CHUNK];    // of a key decayed to the chunk's end
  alignas(16) float all;            // decay of the chunk
};

// Of the next chunks.
constexpr int AHEAD = 4;
struct alignas(16) Next {
  float decay[AHEAD][CHUNK], beta[AHEAD][CHUNK];
};

template <typename Numbers, int CHANNELS, int COLUMNS> struct Shared {
  using T = Numbers;
  static constexpr int BK = CHANNELS, BV = COLUMNS, STAGES = BK + BV == 128 ? 3 : 5;
  Stage<T, BK, BV> stages[STAGES];
  Panel<T> erased[2];  // -B decayed from the chunk's start, by queries; of every other chunk
  Gates gates[STAGES];
  Next next;
  Barrier full[STAGES], valued[STAGES], gated[STAGES], scored[STAGES], solved[STAGES], made[STAGES], done[STAGES];
};

// The stages in turn, and the parity of the phase that their barriers end next.
template <int STAGES> struct Turn {
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

constexpr int MAKERS = 128, OTHERS = 128;  // threads
template <int BV> constexpr int CONSUMERS = 2 * BV;
template <int BV> constexpr int ALL_THREADS = CONSUMERS<BV> + MAKERS + OTHERS;

// Registers of a thread by role, of those that the block starts with: a block that asks for more waits for ever.
template <int BK, int BV> struct Registers {
  static constexpr int BLOCKS = BK + BV == 128 ? 2 : 1, AT_FIRST = 65536 / (BLOCKS * ALL_THREADS<BV>) / 8 * 8;
  static constexpr int CONSUMER = BLOCKS == 2 ? 120 : BV == 64 ? 208 : 168;
  static constexpr int MAKER = BLOCKS == 2 ? 72 : BV == 64 ? 168 : 120, OTHER = BLOCKS == 2 ? 48 : BV == 64 ? 128 : 56;
  static_assert(BV / 64 * CONSUMER + MAKER + OTHER <= ALL_THREADS<BV> / 128 * AT_FIRST);
};
