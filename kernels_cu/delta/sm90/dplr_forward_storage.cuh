// what      Shared memory, arguments, and registers by role of dplr_forward.cu: RWKV-7's forward pass on Hopper.
// math      The matrices of a chunk of 32 tokens, Axy, N, L, H, B, E, W, Zk and Zb, and ke, be, qd: in the head of
//           dplr_forward.cu
// smem      DplrStage: a chunk of tokens and its matrices. In a union the member below overwrites the one above, which
//           has been read by then
// barriers  by stage, in this order. full: q, a, k, b and gates have arrived; values_full: values have arrived; then
//           complete in shared memory: scores_ready: all Axy, or `grows` is set; inverse_ready: N and L;
//           operands_ready: E, B, W, Z and the decay; outputs_ready: o, and all of the stage has been read
// limits    sm_90a; bfloat16 or float16
#include "delta/sm90/channel_chunks.cuh"

template <typename T, typename G> struct Args {
  TensorMap q, k, a, b, g, v, o;  // boxes of a chunk's tokens and 128 bytes, swizzled
  Rows<const T> q_rows, k_rows, a_rows, b_rows;
  Rows<const G> g_rows;
  Rows<const T> v_rows;
  Rows<T> o_rows;
  Shape shape;
  const float* initial;  // null: zeros
  float* final;          // null: no final state is wanted
  i64 state_k, state_v;  // the states' strides along K and V, in numbers
  double scale;
};

template <typename T, typename G, int BK, int BV> struct alignas(1024) DplrStage {
  union {
    Tile<T, BK> queries;
    Tile<f16, BK> decayed_queries;  // qd'
    Tile<T, BK> W;
  };
  union {
    Tile<T, BK> a;
    Tile<T, BK> E;
  };
  union {
    Tile<T, BK> columns[2];   // k and b
    Tile<f16, BK> to_end[2];  // ke' and be'
    Tile<T, BK> Z[2];         // Zk and Zb
  };
  union {
    Tile<G, BK> gates;  // of chunks that grow: until the end
    struct {
      union {
        Panel<f16> QB;  // Aqb', split
        Panel<T> H;     // times scale, split
      };
      float QK[CHUNK][32];  // Aqk'
    };
  };
  union {
    float recurrence_matrix[CHUNK][32];  // of Aab', see channel_chunks.cuh
    Panel<T> B;                          // times scale, split
  };
  union {
    Panel<f16> AK;  // diag(weights) Aak', split, divided by weights_scale
    Panel<f16> L;   // L' transposed, split, divided by L_scale
  };
  union {
    Panel<f16> N;                    // N' transposed, split, divided by N_scale
    float H_by_token[CHUNK][CHUNK];  // H, times scale, of chunks that grow
  };
  Tile<T, BV> values;  // v, overwritten by o
};

// Numbers of a chunk's channels and tokens.
template <int BK> struct alignas(16) ChunkNumbers {
  float decay[BK];  // over the chunk
  Lengths lengths[4];
  float weights[CHUNK];    // p_a p_b
  float L_scale, N_scale;  // powers of 2
  int grows;               // whether E, W, Z and B were made token by token
};

// Decayed tokens, by which pairs of different blocks are scored; or, for a chunk that grows, copies of its inputs.
template <typename T, int BK> union DecayedTokens {
  struct {
    f16 rows[LEVELS][BT * BK], columns[LEVELS][BT / 2 * BK];
  };
  Tile<T, BK> inputs[4];
};

template <typename Element, typename Gate, int CHANNELS, int COLUMNS> struct Shared {
  using T = Element;
  using G = Gate;
  static constexpr int BK = CHANNELS, BV = COLUMNS;
  static constexpr bool TWO_WRITES = true;
  using StageType = DplrStage<T, G, BK, BV>;
  using Decayed = DecayedTokens<T, BK>;
  static constexpr int STAGES = stages_that_fit<StageType, ChunkNumbers<BK>>(
      sizeof(Decayed) + BT / BLOCK * BK * sizeof(float), BLOCKS_OF<BK, BV>);
  StageType stages[STAGES];
  alignas(16) Decayed decayed;
  float block_decays[BT / BLOCK][BK];
  ChunkNumbers<BK> numbers[STAGES];
  Barrier full[STAGES], values_full[STAGES], scores_ready[STAGES], inverse_ready[STAGES], operands_ready[STAGES],
      outputs_ready[STAGES];
};
