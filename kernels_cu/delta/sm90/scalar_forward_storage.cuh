// what      Shared memory and arguments of scalar_forward.cu: the delta rule's forward pass on Hopper, with one gate
//           per token and head.
// math      A chunk has 32 tokens i and j; E_j: the decay from the chunk's start to token j. Matrices of pairs of
//           tokens: M of keys with earlier keys, A of queries with keys, N = (I + diag(beta) M)^-1, B = A N diag(beta).
//           Matrices of a row for each token: W reads the state, Z writes to it. scalar_forward.cu has their formulas
// smem      Stage (scalar_chunks.cuh): a chunk of tokens and its matrices
// barriers  by stage, in this order. full: queries and keys have arrived; values_full: values have arrived; then
//           complete in shared memory: decays_ready: D and Gates; scores_ready: A and M; inverse_ready: N diag(beta),
//           as it is and times decays to the chunk's end; operands_ready: B, W and Z; outputs_ready: o, and all of the
//           stage has been read
// limits    sm_90a; bfloat16 or float16
#include "delta/sm90/scalar_chunks.cuh"

// From scalar_chunks.cuh and its includes:
//   Panel: 32 rows of 128 bytes; Upcoming: decays and betas of later chunks

template <typename T> struct Args {
  TensorMap q, k, v, o;  // boxes of a chunk's tokens and 64 columns, swizzled
  StridedRows<const T> q_rows, k_rows, v_rows;
  StridedRows<T> o_rows;
  StridedRows<const void> g, beta;  // no gate: null
  Shape shape;                      // H is the number of value heads
  const float* initial;             // null: zeros
  float* final;                     // null: no final state is wanted
  float* starts;                    // join_segments.cu; null: sequences are not cut into segments
  i64 P;                            // segments of a sequence; in `shape` segments are sequences
  i64 group;                        // value heads that share a head of queries and keys
  i64 state_k, state_v;             // the states' strides along K and V, in numbers
  i64 wide_gate, wide_beta;         // whether g, and beta, are float32; otherwise they are of type T
  i64 normalized;                   // whether the kernel divides queries and keys x by sqrt(|x|^2 + 1e-6)
  double scale;
};

template <typename Element, int CHANNELS, int COLUMNS> struct Shared {
  using T = Element;
  static constexpr Pass PASS = FORWARD;
  static constexpr int BK = CHANNELS, BV = COLUMNS, STAGES = BK + BV == 128 ? 3 : 5;
  Stage<T, BK, BV> stages[STAGES];
  Panel<T> minus_BE[2];  // -B_ij E_j, [query, key], split: for W; of a chunk and the one before it, [chunk % 2]
  Gates gates[STAGES];
  Upcoming upcoming;
  const float* from;  // the state that the block starts from; null: zeros
  float* to;          // the memory for the state that it ends with; null: not wanted
  MBarrier full[STAGES], values_full[STAGES], decays_ready[STAGES], scores_ready[STAGES], inverse_ready[STAGES],
      operands_ready[STAGES], outputs_ready[STAGES];
};
