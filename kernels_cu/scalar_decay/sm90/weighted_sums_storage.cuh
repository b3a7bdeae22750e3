// what      What Hopper's sums under scalar decays keep in shared memory, their arguments, and the registers of roles.
// smem      Stage: a chunk's tokens, what is made of them, and its results in place of v
// barriers  full: the tokens and decays are there; scores: so is A; done: so are the results; summed: shares of dg have
//           been read; requested: the cluster's other block has requested its copy of a chunk
// limits    sm_90a; bfloat16
constexpr int CHUNK = 64, STRETCH = 256;  // tokens
constexpr float LARGEST_BF16 = 3.38e38f;
#include "warpgroup.cuh"

struct Whole {};
struct Summary {};
struct Gradients {};
struct Queries {};
struct Keys {};
struct GatedQueries {};
struct GatedKeys {};
template <class Pass> constexpr bool HAS_OUTPUTS = true;
template <> constexpr bool HAS_OUTPUTS<Summary> = false;
template <class Pass>
constexpr bool SPLITS_STATE = false;  // whether S is read as the sum of two bfloat16 numbers, not as one
template <> constexpr bool SPLITS_STATE<Whole> = true;
template <class Pass> constexpr u32 SUMS = 1;
template <> constexpr u32 SUMS<Gradients> = 3;
template <> constexpr u32 SUMS<Keys> = 2;
template <> constexpr u32 SUMS<GatedKeys> = 2;
template <class Pass> constexpr bool HAS_GATE_GRADIENT = false;  // whether dg is wanted
template <> constexpr bool HAS_GATE_GRADIENT<GatedQueries> = true;
template <> constexpr bool HAS_GATE_GRADIENT<GatedKeys> = true;

// Whether the two sums of a head are a cluster's blocks, which go side by side.
template <class Pass, int BK, int BV>
constexpr bool IN_CLUSTER = HAS_GATE_GRADIENT<Pass> && SUMS<Pass> == 2 && BK + BV == 256;
constexpr int CLUSTER_LEAD = 2;  // chunks at most that one asks for ahead of the other

// Whether a block's sum gives dg its share.
template <class Pass> __device__ __forceinline__ bool computes_gate_gradient() {
  return HAS_GATE_GRADIENT<Pass> && opaque(blockIdx.x) % SUMS<Pass> == 0;
}

// The arrays by the part they take; so are K and V.
struct alignas(64) WeightedSum {
  TensorMap q, k, v, o, partner;  // boxes of a chunk's tokens and 128 bytes, swizzled; partner: o its gradient
  Rows<const bf16> q_rows, k_rows, v_rows, partner_rows;
  Rows<bf16> o_rows;
  const float* initial;        // null where there is none
  float* final;                // or null
  i64 K, V, state_k, state_v;  // strides of the states
  double read, write;          // factors of what states give, and of what tokens add to them
  i64 backwards;
  i64 adds;  // whether o adds to what the array holds
};

template <class Pass, typename G> struct Args {
  WeightedSum sums[SUMS<Pass>];
  Rows<const G> g;
  Shape shape;
  float* decays;      // Summary: [N, H, 2, K], the decay over all chunks, and 1
  i64 of, needed;     // Summary: of every so many parts the first so many; nobody needs the others' state
                      // Gradients: of every so many segments the first, whose final state is kept
  uint4* kept;        // Gated: [stretches, BK / 16, BK / 16, 32], their last state in bfloat16, as lanes have it
  float* token_sums;  // Gated: q_i . dq_i
  void* dg;           // GatedKeys: as the gates are, or of parts float32
  i64 parts;          // Gated: of the sums
};

// A chunk's gates, summed within blocks of 2^level tokens, as logarithms to the base 2. Of two tokens in the two halves
// of a block, the decay between is that of the second's half until it and of the first's half behind it.
struct alignas(16) Gates {
  static constexpr int LEVELS = 6;
  float to_token[LEVELS][CHUNK], to_end[LEVELS - 1][CHUNK];  // a token inclusive, a token exclusive, from level 1 on
  u32 own_scores[CHUNK];           // HAS_GATE_GRADIENT: a token's score with itself, the sum of its halves
  float output_factors[CHUNK];     // E or, backwards, L, decays, with what they multiply o by
  uint2 value_factors[CHUNK / 2];  // L or E of v: of two tokens as the sum of two bfloat16 numbers
  alignas(16) float chunk_decay;
};

template <int BV, bool GATE> struct Partner {};
template <int BV> struct Partner<BV, true> {
  Tile<bf16, BV> partner;  // then, in each warp's columns, its sums: of tokens 2r and 2r + 1 in row r
};
template <int BK, int BV, bool GATE> struct alignas(1024) Stage : Partner<BV, GATE> {
  Tile<bf16, BK> q, k;
  Tile<bf16, BV> v;   // then o
  bf16 A[CHUNK][64];  // [query, key]
};

template <class Pass, int BK, int BV> struct Shared {
  static constexpr int STAGES = HAS_GATE_GRADIENT<Pass> ? BK + BV == 128 ? 2 : 3 : BK + BV == 192 ? 4 : 3;
  Stage<BK, BV, HAS_GATE_GRADIENT<Pass>> stages[STAGES];
  Gates gates[STAGES];
  Barrier full[STAGES], scores[STAGES], done[STAGES], summed[STAGES];
  Barrier requested[2 * CLUSTER_LEAD];  // twice, since the other block may be as far ahead as this one has requested
};

template <int BV> constexpr int CONSUMERS = 2 * BV;
template <int BV> constexpr int ALL_THREADS = CONSUMERS<BV> + 2 * 128;

// Registers of a thread by role, of those that the block starts with: a block that asks for more waits for ever.
template <int BK, int BV> struct Registers {
  static constexpr bool SMALL = BK + BV == 128;
  static constexpr int BLOCKS = SMALL ? 2 : 1, AT_FIRST = 65536 / (BLOCKS * ALL_THREADS<BV>) / 8 * 8;
  static constexpr int CONSUMER = SMALL ? 128 : BV == 128 ? 184 : 240;
  static constexpr int SCORES = SMALL ? 80 : 96, OTHERS = SMALL ? 32 : 48;
  static_assert(BV / 64 * CONSUMER + SCORES + OTHERS <= ALL_THREADS<BV> / 128 * AT_FIRST);
};

__device__ __forceinline__ int tiles_of(i64 width, int BV) { return int(width + BV - 1) / BV; }

// The first token of the chunk that comes so many turns after the first.
__device__ __forceinline__ int first_of(int iteration, const WorkTile& at, bool backwards) {
  return (backwards ? (at.tokens - 1) / CHUNK - iteration : iteration) * CHUNK;
}

// Whether the chunk that starts with a token is the last of its stretch.
__device__ __forceinline__ bool ends_stretch(int first, const WorkTile& at) {
  return first % STRETCH == STRETCH - CHUNK || first + CHUNK >= at.tokens;
}
