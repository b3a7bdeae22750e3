// what      Shared memory, arguments, and registers by role of kda_forward.cu: Kimi Delta Attention's forward pass on
//           Hopper.
// math      A, M, N, B, E, W and Z of a chunk of 32 tokens, and ke, qd: in the head of kda_forward.cu
// smem      KdaStage: a chunk of tokens and its matrices. In a union the member below overwrites the one above, which
//           has been read by then
// barriers  by stage, in this order. full: queries, keys, gates and betas have arrived; values_full: values have
//           arrived; then complete in shared memory: scores_ready: M and A, or `grows` is set; inverse_ready: N;
//           operands_ready: E, B, W, Z and the decay; outputs_ready: o, and all of the stage has been read
// limits    sm_90a; bfloat16 or float16
#include "delta/kda_block.cuh"
#include "delta/sm90/channel_chunks.cuh"

template <typename T, typename G> struct Args {
  TensorMap q, k, g, v, o;  // boxes of a chunk's tokens and 128 bytes, swizzled
  Rows<const T> q_rows, k_rows;
  Rows<const G> g_rows;
  Rows<const T> v_rows;
  Rows<T> o_rows;
  Rows<const void> beta;
  Shape shape;           // H is the number of value heads
  const float* initial;  // null: zeros
  float* final;          // null: no final state is wanted
  i64 group;             // value heads that share a head of queries and keys
  i64 state_k, state_v;  // the states' strides along K and V, in numbers
  i64 wide_beta;         // whether beta is float32; otherwise it is of type T
  i64 normalized;        // whether the kernel divides queries and keys x by sqrt(|x|^2 + 1e-6)
  double scale;
};

template <typename T, typename G, int BK, int BV> struct alignas(1024) KdaStage {
  union {
    Tile<T, BK> queries;
    Tile<f16, BK> decayed_queries;  // qd'
    Tile<T, BK> W;
  };
  union {
    Tile<T, BK> keys;
    Tile<T, BK> E;
  };
  union {
    Tile<G, BK> gates;
    Tile<f16, BK> keys_to_end;  // ke'
    Tile<T, BK> Z[1];
  };
  union {
    float recurrence_matrix[CHUNK][32];  // of -M', see channel_chunks.cuh
    Panel<T> B;                          // times scale, split
  };
  union {
    Panel<f16> A;           // A', split
    float H[CHUNK][CHUNK];  // B, times scale, of chunks that grow
  };
  Panel<f16> N;        // N' transposed, split, divided by N_scale
  Tile<T, BV> values;  // v, overwritten by o
};

// Numbers of a chunk's channels and tokens.
template <int BK> struct alignas(16) ChunkNumbers {
  float decay[BK];  // over the chunk
  Lengths lengths[2];
  float beta[CHUNK], weights[CHUNK];  // weights: beta p^2
  float N_scale;                      // a power of 2
  int grows;                          // whether E, W, Z and B were made token by token
};

// Decayed tokens, by which pairs of different blocks are scored; or, for a chunk that grows, copies of its inputs.
template <typename T, typename G, int BK> union DecayedTokens {
  struct {
    f16 rows[LEVELS][BT * BK], columns[LEVELS][BT / 2 * BK];
  };
  struct {
    Tile<T, BK> queries, keys;
    Tile<G, BK> gates;
  };
};

template <typename Element, typename Gate, int CHANNELS, int COLUMNS> struct Shared {
  using T = Element;
  using G = Gate;
  static constexpr int BK = CHANNELS, BV = COLUMNS;
  static constexpr bool TWO_WRITES = false;
  using StageType = KdaStage<T, G, BK, BV>;
  using Decayed = DecayedTokens<T, G, BK>;
  static constexpr int STAGES = stages_that_fit<StageType, ChunkNumbers<BK>>(
      sizeof(Decayed) + BT / BLOCK * BK * sizeof(float), BLOCKS_OF<BK, BV>);
  StageType stages[STAGES];
  alignas(16) Decayed decayed;
  float block_decays[BT / BLOCK][BK];
  ChunkNumbers<BK> numbers[STAGES];
  Barrier full[STAGES], values_full[STAGES], scores_ready[STAGES], inverse_ready[STAGES], operands_ready[STAGES],
      outputs_ready[STAGES];
};
