// what      The delta rule's forward pass on Hopper, with a gate for each token and head, or none; chunks of 32 tokens
// math      Token by token: S' = e^g_t S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = scale S_t^T q_t.
//           By chunks, S is the state before the chunk; i and j are its tokens, 1 to 32. Decays are products of e^g:
//           D_ij of tokens j + 1 to i, E_i from the chunk's start to i, L_j from j + 1 to the chunk's end.
//           Matrices [32, 32] of rows i and columns j, 0 above the diagonal:
//           M_ij = D_ij k_i . k_j, j < i: what token i reads of key j;  A_ij = scale D_ij q_i . k_j, j <= i: the same
//           of its query;  N = (I + diag(beta) M)^-1: how tokens change what later ones write;  B = A N diag(beta).
//           Matrices of a row for each token: W_i = scale E_i q_i - sum_j B_ij E_j k_j;  X_j = v_j - E_j S^T k_j;
//           Z_j = beta_j sum_i N_ij L_i k_i.  With the chunk's values v:  o = W S + B v;  S <- E_32 S + Z^T X
// shapes    q k [B, H, T, K], v o [B, HV, T, V], g beta [B, HV, T] of any strides; states [sequences, HV, K, V]
//           float32. With P > 1, sequences in `shape` are segments, P of each sequence; starts [2, segments, HV, K, V]:
//           in starts[0] the state before each segment, from join_segments.cu
// grid      delta_hopper.py launches a block for every (sequence, value head, BV columns of V), columns fastest,
//           sequence slowest
// roles     consumers: a warpgroup for every 64 columns, with their state transposed in registers, computes X, o and S.
//           Operands: a warpgroup makes A and M of chunk n + 2, and B, W and Z of chunk n (BK = 128: A and M while the
//           product for W runs; BK = 64: after it). In a last warpgroup warp 0 copies chunks, warp 1 computes decays,
//           and warps 2 and 3 invert I + diag(beta) M of even and odd chunks
// smem      Stage (scalar_stage.cuh): a chunk's q, k and v, and its matrices; W overwrites q, and o overwrites v
// barriers  by stage, in this order. full: queries and keys have arrived; values_full: values have arrived; then
//           complete in shared memory: decays_ready: D and Gates; scores_ready: A and M; inverse_ready: N diag(beta);
//           operands_ready: B, W and Z; outputs_ready: o, and all of the stage has been read. One in is_whole, which
//           start_of_walk calls: all threads learn whether a number of the states that segments start from is not
//           finite. Named 1, of the operands' warpgroup: minus_BE is written, and what W, B and Z overwrite has been
//           read
// numerics  products of T are summed in float32. q, k and v are used undecayed; S, W, X and Z are rounded to T; each
//           element of A, B and N is the sum of two T ("split"): the rounded number and its rounding error. |W_i| <=
//           scale |q_i| and |Z_j| <= beta_j |k_j| if gates are <= 0 and beta |k|^2 <= 2, for any keys: no large numbers
//           cancel. N: by substitution in float32 within 16 tokens. Each decay is a product of the decays of the tokens
//           in between, never a quotient, so that gates may be any numbers <= 0, -inf too
// source    Yang et al., 2024, "Gated Delta Networks", eq. 10; the chunk's form is the WY representation multiplied out
// limits    sm_90a; bfloat16, float16; K <= BK, V a multiple of 8; BK and BV of 64, 128; rows start on 16 bytes
#include "delta/sm90/scalar_chunks.cuh"

// From the includes:
//   shape.H: value heads
//   wgmma_fence_operand(d): the compiler reads no register of d before it. mn_major_tile: wgmma's descriptor of a tile
//     whose rows are summed over
//   RingPosition: a place in the ring of stages; `stage`, and `parity`, which waits for its mbarriers take
//   each_transposed: calls f for a lane's numbers of a state, with their places in memory
//   Values, Operand: a lane's part of [the warp's 16 columns or channels, 32 tokens], as sums and as operands
//   start_of_walk: sets the block's tokens to its segment's, and returns `from`, the state that the walk starts from,
//     null for zeros, and `to`, where its last state goes, null for nowhere. Where states were not finite when
//     join_segments.cu had joined segments, the walk's first segment has all tokens, and the others have none
//   Consumer: a lane of a consumer, its column, and the channel_offset at which load_transposed and store_transposed
//     load and store its warp's 16 columns of 32 rows
//   stage_descriptor, descriptor_offset: wgmma's descriptors of tiles of a stage; start_state_product: S^T rows;
//     start_state_update: S += x rows; start_split_product: with a split matrix; decay_state: S times the chunk's
//     decay; make_X: v less what keys read
//   Panel: 32 rows of 128 bytes; a split matrix has its rounding errors in columns 32 to 63. Gates: factors of a
//     chunk's tokens; Upcoming: decays and betas of later chunks
//   CHUNK = 32 tokens; ALL_THREADS: of a block; Registers: of a thread, by role
//   run_roles initialises the barriers, and calls consume by the consumers, make_operands by the operands' warpgroup,
//     and move_chunks by the copying warp, which stores o, too; decays and inverses are the same in all kernels

template <typename T> struct Args {
  TensorMap q, k, v, o;  // boxes of a chunk's tokens and 64 columns, swizzled
  StridedRows<const T> q_rows, k_rows, v_rows;
  StridedRows<T> o_rows;
  StridedRows<const void> g, beta;   // no gate: null
  StridedRows<const float> lengths;  // inverse ones of queries and keys, which are divided by them; or null
  Shape shape;                       // H is the number of value heads
  const float* initial;              // null: zeros
  float* final;                      // null: no final state is wanted
  float* starts;                     // null: sequences are not cut into segments
  i64 P;                             // segments of a sequence; in `shape` segments are sequences
  i64 group;                         // value heads that share a head of queries and keys
  i64 state_k, state_v;              // the states' strides along K and V, in numbers
  i64 wide_gate, wide_beta;          // whether g, and beta, are float32; otherwise they are of type T
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

// ---- warpgroups with 64 columns of V each ---------------------------------------------------------------------------

// A consumer: X, o and the state S of each chunk. first_column: the block's first of V.
template <class Memory>
__device__ __forceinline__ void consume(Memory& s, const Args<typename Memory::T>& args, const WorkTile& work,
                                        int first_column) {
  using T = typename Memory::T;
  constexpr int BK = Memory::BK;
  const Consumer at(first_column);
  // The state: columns `at.column` + 8h, channels 8n + 2 (lane % 4) + p at state[4n + 2h + p].
  float state[BK / 2] = {};
  if (s.from)
    each_transposed<BK>(state, s.from, args, args.shape, at.column, [](float& x, const float* from) { x = *from; });
  RingPosition<Memory::STAGES> ring;
#pragma unroll 1
  for (int token = 0; token < work.tokens; token += CHUNK, ring.next()) {
    auto& in = s.stages[ring.stage];
    const Gates& gates = s.gates[ring.stage];
    u32 rounded_state[BK / 16][4];
    Operand v, X;
    float products[CHUNK];  // of the state and 64 rows, W and the keys behind them
    Values S_k, o;          // S^T k; W S, then o
    round_state<T, BK>(rounded_state, state);
    mbarrier_wait(s.full[ring.stage], ring.parity);
    mbarrier_wait(s.values_full[ring.stage], ring.parity);
    load_transposed(v, in.values[at.warpgroup], at.channel_offset);
    mbarrier_wait(s.operands_ready[ring.stage], ring.parity);
    const u64 descriptor = stage_descriptor(in);
    wgmma_fence();
    start_state_product<T>(products, rounded_state,
                           [&](int panel) { return descriptor + descriptor_offset(in, in.queries_keys[panel]); });
    wgmma_commit();
    decay_state(state, gates.chunk_decay);
    wgmma_wait<0>();
    wgmma_fence_operand(products);
#pragma unroll
    for (int i = 0; i < CHUNK / 2; ++i) o[i] = products[i], S_k[i] = products[CHUNK / 2 + i];
    make_X<T>(X, v, S_k, gates, at.lane);  // X = v - E S^T k
    wgmma_fence();
    start_split_product<T>(o, v, descriptor + descriptor_offset(in, in.B), ACCUMULATE);  // o += B v
    wgmma_commit();
    start_state_update<T, BK>(state, X, mn_major_tile(in.Z, sizeof in.Z[0]));  // S += Z^T X
    wgmma_wait<1>();
    wgmma_fence_operand(o);
    store_transposed(in.values[at.warpgroup], at.channel_offset, o);
    wgmma_wait<0>();
    wgmma_fence_operand(state);
    mbarrier_arrive(s.outputs_ready[ring.stage]);
  }
  if (s.to) each_transposed<BK>(state, s.to, args, args.shape, at.column, [](float& x, float* to) { *to = x; });
}

template <typename T, int BK, int BV>
__global__ void __launch_bounds__(ALL_THREADS<BV>, Registers<FORWARD, BK, BV>::BLOCKS)
    delta_sm90_scalar_forward(const __grid_constant__ Args<T> args) {
  auto& s = *reinterpret_cast<Shared<T, BK, BV>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const u32 tiles = u32(shape.V + BV - 1) / BV;
  const int column = blockIdx.x % tiles * BV;
  WorkTile work = work_tile(shape, blockIdx.x / tiles);
  const auto segment =
      start_of_walk<FORWARDS>(work, WITH_OUTPUTS, shape, args.P, args.initial, args.starts, args.final, column, BV);
  if (threadIdx.x == 0) s.from = segment.from, s.to = segment.to;  // for consumers, behind the barrier of run_roles
  run_roles(
      s, args, work, [&] { consume(s, args, work, column); }, [&] { make_operands(s, work.tokens); },
      [&] {
        move_chunks(
            s, args, work, [&](auto f, auto& v) { f(v, args.v, args.v_rows, shape.V, column); },
            [&](auto f, auto& o) { f(o, args.o, args.o_rows, shape.V, column); });
      });
}
